"""Layout: where each parameter lies in a bucket.

Offsets and lengths count wire elements. Slots of at least 4 KiB begin at multiples of 128 bytes (a cache
line: no line is written by two slots), smaller ones at multiples of 16 (one vector access); the bucket's length is a
multiple of shards x 16 bytes, so that every shard begins aligned.

Example, wire of 2 bytes: numels (3, 5000, 10) -> offsets (0, 64, 5064), numel 5080: slot 1 is 10,000 bytes and moves
up to element 64 = 128 bytes; slot 2 begins at 5064 = 8 x 633; 5074 elements end at the next multiple of 8, 5080.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SMALL_ALIGN_BYTES = 16
LARGE_ALIGN_BYTES = 128
LARGE_SLOT_BYTES = 4096


@dataclass(frozen=True)
class Slot:
    """One parameter's place in a bucket: `numel` wire elements from `offset` on."""

    numel: int
    offset: int


@dataclass(frozen=True)
class Layout:
    """A bucket's slots, ascending and without overlap.

    Args:
        numels: elements of each slot.
        offsets: first wire element of each.
        numel: the bucket's length in wire elements, padding included.
    """

    numels: tuple[int, ...]
    offsets: tuple[int, ...]
    numel: int

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Each slot."""
        return tuple(map(Slot, self.numels, self.offsets))

    @property
    def padding_numel(self) -> int:
        """Wire elements that belong to no slot."""
        return self.numel - sum(self.numels)


def aligned_layout(numels: Sequence[int], *, wire_itemsize_bytes: int, shards: int = 1) -> Layout:
    """Lays parameters out one after the other, each slot and each shard aligned.

    Args:
        numels: elements of each parameter; 0 is allowed and takes no space.
        wire_itemsize_bytes: bytes of one wire element: 1, 2, 4 or 8.
        shards: equal parts into which a collective divides the bucket (the world size for a reduce-scatter).

    Returns:
        A slot per parameter, in order, and the bucket's length.

    Raises:
        ValueError: a size is negative, the itemsize does not divide 16, or `shards` is below 1.
    """
    if wire_itemsize_bytes < 1 or SMALL_ALIGN_BYTES % wire_itemsize_bytes:
        raise ValueError(f"wire_itemsize_bytes must divide {SMALL_ALIGN_BYTES}, got {wire_itemsize_bytes}")
    if shards < 1:
        raise ValueError(f"shards must be at least 1, got {shards}")
    offsets, end = [], 0
    for index, numel in enumerate(numels):
        if numel < 0:
            raise ValueError(f"parameter {index} has {numel} elements")
        large = numel * wire_itemsize_bytes >= LARGE_SLOT_BYTES
        align = (LARGE_ALIGN_BYTES if large else SMALL_ALIGN_BYTES) // wire_itemsize_bytes
        offset = _round_up(end, align) if numel else end
        offsets.append(offset)
        end = offset + numel
    return Layout(tuple(numels), tuple(offsets), _round_up(end, shards * SMALL_ALIGN_BYTES // wire_itemsize_bytes))


def block_layout(numels: Sequence[int], *, block_numel: int, shard_align: int, shards: int = 1) -> Layout:
    """Lays parameters out one after the other, each at the begin of a block.

    Args:
        numels: elements of each parameter; 0 is allowed and takes no space.
        block_numel: elements of a block.
        shard_align: elements of which a shard is a multiple; a multiple of `block_numel`.
        shards: equal parts of the bucket.

    Returns:
        A slot per parameter, in order, and the bucket's length.

    Raises:
        ValueError: a size is negative, `shard_align` is no multiple of `block_numel`, or `shards` is below 1.
    """
    if block_numel < 1 or shard_align < 1 or shard_align % block_numel:
        raise ValueError(f"shard_align must be a multiple of block_numel, got {shard_align} and {block_numel}")
    if shards < 1:
        raise ValueError(f"shards must be at least 1, got {shards}")
    offsets, end = [], 0
    for index, numel in enumerate(numels):
        if numel < 0:
            raise ValueError(f"parameter {index} has {numel} elements")
        offsets.append(end)
        end += _round_up(numel, block_numel)
    return Layout(tuple(numels), tuple(offsets), _round_up(end, shards * shard_align))


def flat_layout(numel: int) -> Layout:
    """One slot and no padding, for a buffer that has been flattened already (by DDP, for a comm hook).

    Args:
        numel: elements of the buffer.

    Raises:
        ValueError: `numel` is negative.
    """
    if numel < 0:
        raise ValueError(f"a buffer of {numel} elements")
    return Layout((numel,), (0,), numel)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
