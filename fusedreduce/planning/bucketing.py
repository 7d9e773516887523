"""Bucketing: which parameters share a bucket, by c10d's rule.

`assign_by_size` walks the parameters in order, with one open bucket and one cursor into the list of
limits per group (dtype and device); append first, close when the bucket has reached its limit, move to the next limit
(the last one repeats). A bucket may thus exceed its limit by one parameter; "strict" closes it before.

Example, limits (10, 20), one group, sizes 4 4 4 15 15: {4 4 4} {15 15} as c10d, {4 4} {4 15} {15} strict.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field

from ..config import CapPolicy

MIB = 1024 * 1024
UNLIMITED_BYTES = sys.maxsize
DEFAULT_CAP_BYTES = 25 * MIB


@dataclass(frozen=True, kw_only=True)
class BucketCaps:
    """How large buckets may grow, in bytes of gradients.

    The defaults are torch's; where all are in use, wires that are exchanged may have smaller ones: see
    `WireTable.default_caps`.

    Args:
        first_bytes: limit of the first bucket of each group; small, so that communication starts early.
        cap_bytes: limit of all others.
        listed_bytes: limits one after the other, in place of the two above; the last one repeats.
        planned_bytes: limit of buckets that are cut by measured costs; None: the limit of the others if that is not
            torch's default, else none. (Larger buckets take no more memory, because each has its own wire buffer.)

    Raises:
        ValueError: a limit is below 1 byte.
    """

    first_bytes: int = MIB
    cap_bytes: int = DEFAULT_CAP_BYTES
    listed_bytes: tuple[int, ...] = ()
    planned_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("first_bytes", "cap_bytes", "planned_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1 byte, got {value}")
        if any(value < 1 for value in self.listed_bytes):
            raise ValueError(f"every limit must be at least 1 byte, got {self.listed_bytes}")

    @classmethod
    def of(cls, size: int | BucketCaps) -> BucketCaps:
        """The limits that `set_bucket_size(size)` means.

        Args:
            size: the limit of every bucket in bytes, also of those that are cut by measured costs; or all limits.

        Returns:
            The limits.

        Raises:
            TypeError: neither an int nor BucketCaps.
            ValueError: below 1 byte.
        """
        if isinstance(size, BucketCaps):
            return size
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"a bucket size is a whole number of bytes, or BucketCaps; got {size!r}")
        if size < 1:
            raise ValueError(f"a bucket size must be at least 1 byte, got {size}")
        return cls(first_bytes=size, cap_bytes=size, planned_bytes=size)

    @property
    def limits_bytes(self) -> tuple[int, ...]:
        """The limits for `assign_by_size`."""
        if self.listed_bytes:
            return self.listed_bytes
        return (self.first_bytes, self.cap_bytes) if self.first_bytes < self.cap_bytes else (self.cap_bytes,)

    @property
    def planned_limit_bytes(self) -> int:
        """The limit of buckets that are cut by measured costs."""
        if self.planned_bytes is not None:
            return self.planned_bytes
        if self.listed_bytes:
            return max(self.listed_bytes)
        return UNLIMITED_BYTES if self.cap_bytes == DEFAULT_CAP_BYTES else self.cap_bytes


@dataclass
class _Open:
    """A bucket that may still grow; `cursor` counts the group's buckets closed so far."""

    members: list[int] = field(default_factory=list)
    size_bytes: int = 0
    cursor: int = 0


def assign_by_size(
    sizes_bytes: Sequence[int],
    groups: Sequence[Hashable],
    limits_bytes: Sequence[int],
    *,
    order: Sequence[int] | None = None,
    alone: Collection[int] = (),
    cap_policy: CapPolicy = "c10d",
) -> list[tuple[int, ...]]:
    """Cuts parameters into buckets.

    Args:
        sizes_bytes: bytes of each parameter's gradient.
        groups: per parameter, what must be equal within a bucket.
        limits_bytes: limits of a group's first, second, ... bucket; the last one repeats.
        order: parameters in the order to walk them; None: as they are numbered.
        alone: parameters that get a bucket of their own (sparse gradients).
        cap_policy: "c10d", or "strict" (no bucket exceeds its limit, unless a single parameter does).

    Returns:
        Buckets of parameter numbers. With `order`: in the order in which they were closed, then those left open, by
        the first parameter of each in `order`. Without: by the smallest number in each.

    Raises:
        ValueError: no limits, or `order` does not name every parameter once.

    Source: `compute_bucket_assignment_by_size` of torch's c10d, where buckets left open come in hash-map order.
    """
    if not limits_bytes:
        raise ValueError("limits_bytes must name at least one limit")
    walk = range(len(sizes_bytes)) if order is None else order
    if order is not None and sorted(order) != list(range(len(sizes_bytes))):
        raise ValueError(f"order must name each of {len(sizes_bytes)} parameters once")
    closed: list[tuple[int, ...]] = []
    opened: dict[Hashable, _Open] = {}

    def close_bucket(bucket: _Open) -> None:
        closed.append(tuple(bucket.members))
        bucket.members, bucket.size_bytes, bucket.cursor = [], 0, bucket.cursor + 1

    separate = frozenset(alone)
    for index in walk:
        if index in separate:
            closed.append((index,))
            continue
        bucket = opened.setdefault(groups[index], _Open())
        limit = _limit(limits_bytes, bucket)
        if cap_policy == "strict" and bucket.members and bucket.size_bytes + sizes_bytes[index] > limit:
            close_bucket(bucket)
            limit = _limit(limits_bytes, bucket)
        bucket.members.append(index)
        bucket.size_bytes += sizes_bytes[index]
        if bucket.size_bytes >= limit:
            close_bucket(bucket)
    place = {index: position for position, index in enumerate(walk)}
    still_open = [tuple(bucket.members) for bucket in opened.values() if bucket.members]
    closed.extend(sorted(still_open, key=lambda members: place[members[0]]))
    return sorted(closed, key=min) if order is None else closed


def _limit(limits_bytes: Sequence[int], bucket: _Open) -> int:
    return limits_bytes[min(bucket.cursor, len(limits_bytes) - 1)]
