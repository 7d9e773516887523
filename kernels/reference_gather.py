"""Runs of slots: how `reference` divides a layout, and finds and gathers the elements of its slots."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from .table import ChunkTable


@dataclass(frozen=True)
class Run:
    """Consecutive slots that are packed together, and their range of the wire, padding included.

    Args:
        slots: at least one, unless the layout is empty.
        begin: first element of the range.
        end: the element after the last one.
        padded: whether the range contains padding.
        small: whether every slot is below LARGE_NUMEL.
        dtypes: of its gradients.
    """

    slots: range
    begin: int
    end: int
    padded: bool
    small: bool
    dtypes: frozenset[torch.dtype]


def members_of(gradients: Sequence[torch.Tensor | None], run: Run, base: int = 0) -> Sequence[torch.Tensor | None]:
    """A run's gradients, of a list that begins with slot `base`; not copied if the run has all of them."""
    whole = len(run.slots) == len(gradients)
    return gradients if whole else gradients[run.slots.start - base : run.slots.stop - base]


def numbered(members: Sequence[torch.Tensor | None], run: Run) -> Iterator[tuple[int, torch.Tensor | None]]:
    """Pairs of a slot and its member."""
    return zip(run.slots, members, strict=True)


def missing_slots(gradients: Sequence[torch.Tensor | None], run: Run) -> list[int]:
    """Slots of a run without a gradient."""
    if type(None) not in set(map(type, gradients)):
        return []
    return [slot for slot, gradient in numbered(gradients, run) if gradient is None]


def present(
    gradients: Sequence[torch.Tensor | None], views: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The gradients that are not None, and their views."""
    if type(None) not in set(map(type, gradients)):
        return list(gradients), list(views)  # type: ignore[arg-type]
    pairs = [(gradient, view) for gradient, view in zip(gradients, views, strict=True) if gradient is not None]
    return [gradient for gradient, _ in pairs], [view for _, view in pairs]


def copy_all(into: Sequence[torch.Tensor | None], source: Sequence[torch.Tensor]) -> None:
    """Copies tensors into tensors of the same shapes, skipping None; rounds to their dtypes."""
    try:  # 0.3 us each; checking each one first would add a quarter of that
        torch._foreach_copy_(into, source)  # type: ignore[arg-type]
    except (RuntimeError, TypeError):
        # None causes a TypeError, a lazily negated tensor a RuntimeError, both before anything is written.
        there, views = present(into, source)
        if len(there) == len(into) and not any(map(torch.Tensor.is_neg, there)):
            raise
        for one, values in zip(there, views, strict=True):
            one.copy_(values)


def memory_of(gradient: torch.Tensor, chunks: ChunkTable, slot: int) -> torch.Tensor:
    """The slot's elements, flat, in memory order."""
    if not chunks.shared and gradient.is_contiguous():
        return gradient.detach().view(-1)
    begin = gradient.storage_offset() + chunks.begins[slot]
    return gradient.detach().as_strided((chunks.numels[slot],), (1,), begin)


def memories(gradients: Sequence[torch.Tensor | None], run: Run, chunks: ChunkTable) -> list[torch.Tensor | None]:
    """`memory_of` for a run."""
    first = gradients[0]
    if chunks.shared and first is not None and all(one is first for one in gradients):
        # One split of the shared buffer: a view per slot would cost ten times as much.
        numels, begins = (one[run.slots.start : run.slots.stop] for one in (chunks.numels, chunks.begins))
        *places, end = itertools.accumulate(numels, initial=begins[0])
        if tuple(places) == begins:
            flat = first.detach().as_strided((end - begins[0],), (1,), first.storage_offset() + begins[0])
            return list(flat.split_with_sizes(numels))
    return [
        None if gradient is None else memory_of(gradient, chunks, slot) for slot, gradient in numbered(gradients, run)
    ]


def as_laid_out(gradient: torch.Tensor | None, chunks: ChunkTable, slot: int) -> torch.Tensor | None:
    """The slot's elements, flat, in the layout's order: with vouched=True a small one may have any strides."""
    if gradient is None:
        return None
    if chunks.shapes is not None and not chunks.shared and gradient.stride() != chunks.shapes[slot][1]:
        size, strides = chunks.shapes[slot]
        gradient = torch.empty_strided(size, strides, dtype=gradient.dtype, device=gradient.device).copy_(gradient)
    return memory_of(gradient, chunks, slot)


def slot_of(wire: torch.Tensor, chunks: ChunkTable, slot: int) -> torch.Tensor:
    """A slot of the wire, flat."""
    return wire[chunks.offsets[slot] : chunks.offsets[slot] + chunks.numels[slot]]


def slots_of(block: torch.Tensor, run: Run, chunks: ChunkTable) -> list[torch.Tensor]:
    """The slots of a run's part of the wire, flat."""
    sizes, at = [], run.begin
    for slot in run.slots:
        sizes += [chunks.offsets[slot] - at, chunks.numels[slot]]
        at = chunks.offsets[slot] + chunks.numels[slot]
    return list(block.split_with_sizes([*sizes, run.end - at])[1::2])


def gathered(
    flat: Sequence[torch.Tensor | None],
    chunks: ChunkTable,
    run: Run,
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> torch.Tensor:
    """A run's values, laid out as on the wire, in `dtype`; zeros in gaps and for missing gradients.

    Values of one dtype are concatenated before they are converted: torch.cat copies other dtypes one by one, 1 us each.
    """
    device = device or next((one.device for one in flat if one is not None), torch.device("cpu"))
    own = next(iter(run.dtypes)) if len(run.dtypes) == 1 else dtype
    zeros = torch.zeros(run.end - run.begin, dtype=own, device=device)
    parts = []
    at = run.begin
    for slot, one in numbered(flat, run):
        offset, numel = chunks.offsets[slot], chunks.numels[slot]
        if offset > at:
            parts.append(zeros[: offset - at])
        parts.append(zeros[:numel] if one is None else one)
        at = offset + numel
    parts.append(zeros[: run.end - at])
    return torch.cat(parts, out=torch.empty_like(zeros)).to(dtype)
