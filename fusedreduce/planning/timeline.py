"""Timeline: the model of one backward, when each bucket of a plan is ready, packed, reduced and unpacked.

Backward runs through the parameters in ready order. A bucket is launched once its last gradient is ready and every
bucket before it has been launched (head of line). Packing runs where backward runs and delays it. Collectives share
one channel, first in, first out. Unpacking begins when backward, with all of its packing, has ended. With e, pack,
wire, unpack of buckets 1, 2, ... in launch order:

    packed_k   = max(e_1 .. e_k) + pack_1 + ... + pack_k
    done_k     = max(done_k-1, packed_k) + wire_k
    unpacked_k = max(unpacked_k-1, done_k, end of backward) + unpack_k

Example, gradients of one byte each ready at 0 and 10 ns; one byte takes 2 ns to pack, 5 to reduce and 1 to unpack, two
bytes 3, 6 and 2. Two buckets are packed at 0 + 2 = 2 and 10 + 2 + 2 = 14, done at 7 and 19, and unpacked, backward
having ended at 14, at 15 and 20. One bucket is packed at 13, done at 19 and unpacked at 21.

Everything is an exact integer: ns where it is given, femtoseconds inside.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

from .cost_model import FS_PER_NS, Costs
from .plan import ParameterKind, Plan

# In place of a time that is not known, here and in traces.
MISSING_NS = -1


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The planner's input; tuples have an entry per parameter.

    Args:
        ready_ns: when its gradient is ready, since backward began and without our own packing; MISSING_NS: not known,
            which counts as last.
        wire_bytes: bytes of its gradient on the wire.
        size_bytes: bytes of its gradient, which `cap_bytes` limits.
        groups: parameters of equal group may share a bucket.
        alone: parameters that get a bucket of their own (sparse gradients).
        cap_bytes: the largest bucket; a larger parameter is a bucket of its own.
        costs: of a bucket.

    Raises:
        ValueError: lengths differ, a number is negative or not an int, a time is below MISSING_NS, `alone` has the
            number of no parameter, or the cap is below 1 byte.
    """

    ready_ns: tuple[int, ...]
    wire_bytes: tuple[int, ...]
    size_bytes: tuple[int, ...]
    groups: tuple[Hashable, ...]
    alone: frozenset[int]
    cap_bytes: int
    costs: Costs

    def __post_init__(self) -> None:
        count = len(self.ready_ns)
        for name in ("wire_bytes", "size_bytes", "groups"):
            if len(getattr(self, name)) != count:
                raise ValueError(f"{name} has {len(getattr(self, name))} entries for {count} parameters")
        _check("ready_ns", self.ready_ns, MISSING_NS)
        _check("wire_bytes", self.wire_bytes, 0)
        _check("size_bytes", self.size_bytes, 0)
        _check("cap_bytes", (self.cap_bytes,), 1)
        unknown = sorted(set(self.alone).difference(range(count)))
        if unknown:
            raise ValueError(f"alone names {unknown}, but there are {count} parameters")

    @classmethod
    def of(
        cls,
        kinds: Sequence[ParameterKind],
        *,
        ready_ns: Sequence[int],
        wire_bytes: Sequence[int],
        cap_bytes: int,
        costs: Costs,
        share: bool,
    ) -> Problem:
        """Makes a problem with the sizes, groups and `alone` of the kinds of parameters.

        Args:
            kinds: of all parameters.
            ready_ns: per parameter, or MISSING_NS.
            wire_bytes: per parameter.
            cap_bytes: the largest bucket.
            costs: of a bucket.
            share: buckets of mixed dtypes are allowed.
        """
        return cls(
            ready_ns=tuple(ready_ns),
            wire_bytes=tuple(wire_bytes),
            size_bytes=tuple(kind.size_bytes for kind in kinds),
            groups=tuple(kind.wide_group if share else kind.group for kind in kinds),
            alone=frozenset(index for index, kind in enumerate(kinds) if kind.alone),
            cap_bytes=cap_bytes,
            costs=costs,
        )

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Parameters in ready order."""
        return tuple(ready_order(self.ready_ns))

    @cached_property
    def ready_fs(self) -> tuple[int, ...]:
        """Ready times in fs, with the latest known one where a time is missing."""
        latest = max(self.ready_ns, default=0)
        return tuple(FS_PER_NS * max(latest if ns == MISSING_NS else ns, 0) for ns in self.ready_ns)


def _check(name: str, values: Sequence[int], least: int) -> None:
    if set(map(type, values)) <= {int} and min(values, default=least) >= least:
        return
    index, value = next((i, v) for i, v in enumerate(values) if type(v) is not int or v < least)
    raise ValueError(f"{name} must be ints of at least {least}, got {value!r} at {index}")


def ready_order(ready_ns: Sequence[int]) -> list[int]:
    """Parameters by their time; of equal times the higher number first, as in backward; missing times last.

    Args:
        ready_ns: per parameter, or MISSING_NS.

    Returns:
        Every parameter's number once.
    """
    last = max(ready_ns, default=0) + 1
    keys = [last if ns == MISSING_NS else ns for ns in ready_ns]
    return sorted(range(len(keys) - 1, -1, -1), key=keys.__getitem__)


@dataclass(frozen=True)
class Timeline:
    """The times of a plan in the model, in fs since backward began; tuples are per bucket, in launch order.

    Args:
        ready: the last gradient of the bucket is ready, had no packing delayed backward.
        packed: it is packed and its collective issued.
        done: the collective has ended.
        unpacked: the gradients hold the result.
        backward_end: backward ends, with all packing.
        last_done: the last collective has ended, which the planner minimises.
        finish: the last gradient holds its result.
    """

    ready: tuple[int, ...]
    packed: tuple[int, ...]
    done: tuple[int, ...]
    unpacked: tuple[int, ...]
    backward_end: int
    last_done: int
    finish: int


def timeline(plan: Plan, problem: Problem) -> Timeline:
    """Computes the timeline of a plan; caps and groups are ignored.

    Args:
        plan: buckets in launch order.
        problem: that it is a plan for.

    Raises:
        ValueError: a bucket is empty, or the plan does not have every parameter once.
    """
    count = len(problem.ready_ns)
    named = [number for members in plan for number in members]
    if sorted(named) != list(range(count)) or not all(plan):
        raise ValueError(f"a plan must name each of {count} parameters once, in buckets that are not empty")
    costs = problem.costs
    sizes = [sum(map(problem.wire_bytes.__getitem__, members)) for members in plan]
    ready = [max(map(problem.ready_fs.__getitem__, members)) for members in plan]
    packed, done, unpacked = [], [], []
    head = packs = channel = 0
    for ready_fs, size in zip(ready, sizes, strict=True):
        head = max(head, ready_fs)
        packs += costs.pack.fs(size)
        packed.append(head + packs)
        channel = max(channel, head + packs) + costs.wire.fs(size)
        done.append(channel)
    backward_end = now = max(problem.ready_fs, default=0) + packs
    for done_fs, size in zip(done, sizes, strict=True):
        now = max(now, done_fs) + costs.unpack.fs(size)
        unpacked.append(now)
    return Timeline(tuple(ready), tuple(packed), tuple(done), tuple(unpacked), backward_end, channel, now)
