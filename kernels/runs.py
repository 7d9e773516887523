"""How the CPU path divides a layout into runs of slots, and its temporary memory."""

from __future__ import annotations

import math
import threading
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from .table import ChunkTable

# Slots of at least so many elements are converted one by one; for smaller ones the fixed cost of operators (about 5 us
# in all) shows.
LARGE_NUMEL = 16384
# Largest number of elements of a run, which has a fixed cost of 30 us. 1,000 gradients of 1,000: 0.41 ms bf16 -> bf16
# in one run, 0.75 ms in eight.
RUN_NUMEL = 524288
# Elements of a block that is worked on in the cache, 1 MiB in fp32: 8 million fp32 -> bf16 take 3.2 ms, in blocks of
# half the size 3.9 ms; squares of 10 million 4.0 ms, in blocks of a quarter 5.4 ms.
BLOCK_NUMEL = 262144


@dataclass(frozen=True)
class Run:
    """One large slot, or consecutive small ones that are packed together.

    Args:
        slots: at least one.
        begin: first element of its range of the wire.
        end: the element after its last slot; gaps between slots are in the range.
        numel: elements of its slots.
        dtypes: of its gradients.
        dtype: the dtype in which its gradients are gathered: their own, if they have one dtype, else the compute dtype.
        trailing: the gradients' shapes without the first dimension, if torch.cat can write the whole range, else None.
    """

    slots: range
    begin: int
    end: int
    numel: int
    dtypes: frozenset[torch.dtype]
    dtype: torch.dtype
    trailing: tuple[int, ...] | None

    def members(self, gradients: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        """Its gradients, of those of all slots."""
        return gradients if len(self.slots) == len(gradients) else gradients[self.slots.start : self.slots.stop]


_known: MutableMapping[ChunkTable, tuple[Run, ...]] = WeakKeyDictionary()
# By thread. Not in a threading.local: a thread of Gloo's has a new Python state for each callback, with whose end that
# would be freed, which ends the process on torch 2.11.
_scratch: dict[int, dict[torch.dtype, dict[int, torch.Tensor]]] = {}
_THREADS = 64  # that may keep some, of which many may have ended


def runs(chunks: ChunkTable) -> tuple[Run, ...]:
    """Divides a layout into runs: of small slots, up to RUN_NUMEL elements of wire, or of one large slot."""
    known = _known.get(chunks)
    if known is None:
        ends = [offset + numel for offset, numel in zip(chunks.offsets, chunks.numels, strict=True)]
        found: list[Run] = []
        first = 0
        for slot in range(1, len(chunks) + 1):
            last = slot == len(chunks)
            if (
                last
                or max(chunks.numels[slot - 1 : slot + 1]) >= LARGE_NUMEL
                or ends[slot] - chunks.offsets[first] > RUN_NUMEL
            ):
                found.append(_run(chunks, range(first, slot), ends[slot - 1]))
                first = slot
        known = _known[chunks] = tuple(found)
    return known


def _run(chunks: ChunkTable, slots: range, end: int) -> Run:
    begin, numel = chunks.offsets[slots.start], sum(chunks.numels[slots.start : slots.stop])
    dtypes = frozenset(chunks.dtypes[slots.start : slots.stop])
    dtype = next(iter(dtypes)) if len(dtypes) == 1 else chunks.compute_dtype
    trailing = None
    if chunks.shapes is not None and numel == end - begin > 0 and len(dtypes) == 1:
        shapes = chunks.shapes[slots.start : slots.stop]
        inner = shapes[0][0][1:]
        if all(size and size[1:] == inner and is_contiguous(size, strides) for size, strides in shapes):
            trailing = inner
    return Run(slots, begin, end, numel, dtypes, dtype, trailing)


def is_contiguous(size: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a tensor of this size and these strides is contiguous."""
    numel = 1
    for length, stride in zip(reversed(size), reversed(strides), strict=True):
        if length != 1 and stride != numel:
            return math.prod(size) == 0
        numel *= length
    return True


def scratch(dtype: torch.dtype, numel: int) -> torch.Tensor:
    """`numel` elements on CPU that this thread alone uses, until it asks for them again."""
    thread = threading.get_ident()
    if thread not in _scratch and len(_scratch) >= _THREADS:
        _scratch.clear()
    parts = _scratch.setdefault(thread, {}).setdefault(dtype, {})
    part = parts.get(numel)
    if part is None:
        whole = parts[max(parts)] if parts else None
        if whole is None or whole.numel() < numel:
            parts.clear()  # views of a smaller one would keep it
            with torch.inference_mode(False):  # it outlives the caller's
                whole = torch.empty(max(numel, BLOCK_NUMEL), dtype=dtype, device="cpu")
            parts[whole.numel()] = whole
        part = parts[numel] = whole[:numel]
    return part
