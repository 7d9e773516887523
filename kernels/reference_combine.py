"""Combine in torch: the definition of correct, and the path on CPU and across devices.

    output[i] = round_once(scale * (tensor_0[i] + tensor_1[i] + ...))     in the order of the parts

Sums and the product are in fp32 (fp64 for fp64), with one rounding to the tensors' dtype. On CPU it works in blocks
that stay in the cache: each of P tensors is read once and written once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .checks import check_combine
from .parts import ADD, FOLD, PUSH, Part, Step, steps

# Elements of a block, 512 KiB of fp32: two tensors of 25 MiB in 3.4 ms, in a quarter of it 5 ms (each costs 10 us), in
# one piece 4.0 ms.
BLOCK_NUMEL = 131072


def combine(
    tensors: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    parts: Sequence[Part],
    scale: float = 1.0,
) -> None:
    """Adds `tensors` up and writes the sum, times `scale`, into each of `outputs`.

    Arguments as for `kernels.dispatch.combine`. Tensors may be on several CUDA devices: partial sums are copied to the
    devices that the parts name, and the sum to all outputs.
    """
    check_combine(tensors, outputs, parts)
    flat, written = [one.view(-1) for one in tensors], [one.view(-1) for one in outputs]
    on_cpu = all(one.device.type == "cpu" for one in (*flat, *written))
    for part in parts:
        if on_cpu:
            _combine_blocks(flat, written, part, scale)
        else:
            _combine_along(flat, written, part, scale)


def _combine_blocks(tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], part: Part, scale: float) -> None:
    program = steps(part.adds, part.owner)
    order = [peer for kind, peer in program if kind != FOLD]
    wide = tensors[0].dtype in (torch.float32, torch.float64)
    # If additions need no wider dtype in between (two tensors have one addition), an output can hold the partial sums.
    plain = scale == 1.0 and len(order) > 1 and (FOLD, 0) not in program and (wide or len(order) == 2)
    first = _free(tensors, order, outputs) if plain else None
    ordered = [outputs[first], *outputs[:first], *outputs[first + 1 :]] if first is not None else outputs
    for begin in range(part.begin, part.end, BLOCK_NUMEL):
        end = min(begin + BLOCK_NUMEL, part.end)
        total, *others = (one[begin:end] for one in ordered)
        if first is not None:
            torch.add(tensors[order[0]][begin:end], tensors[order[1]][begin:end], out=total)
            for peer in order[2:]:
                total.add_(tensors[peer][begin:end])
        else:
            total.copy_(_evaluated([one[begin:end] for one in tensors], program, scale))
        for output in others:
            output.copy_(total)


def _free(tensors: Sequence[torch.Tensor], order: Sequence[int], outputs: Sequence[torch.Tensor]) -> int | None:
    """The first output that is not among the tensors read after the first two."""
    later = {tensors[peer].data_ptr() for peer in order[2:]}
    return next((index for index, one in enumerate(outputs) if one.data_ptr() not in later), None)


def _evaluated(blocks: Sequence[torch.Tensor], program: Sequence[Step], scale: float) -> torch.Tensor:
    compute = torch.float64 if blocks[0].dtype is torch.float64 else torch.float32
    stack: list[torch.Tensor] = []
    for kind, peer in program:
        if kind == PUSH:
            stack.append(blocks[peer].to(compute, copy=True))
        elif kind == ADD:
            stack[-1].add_(blocks[peer])
        else:
            top = stack.pop()
            stack[-1].add_(top)
    (total,) = stack
    return total if scale == 1.0 else total.mul_(scale)


def _combine_along(tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], part: Part, scale: float) -> None:
    """Adds across devices; copies between these are ordered by their current streams."""
    compute = torch.float64 if tensors[0].dtype is torch.float64 else torch.float32
    pieces = [one[part.begin : part.end] for one in tensors]
    sums: dict[int, torch.Tensor] = {}
    for into, source in part.adds:
        partial = sums.pop(source, pieces[source])
        if partial.device != pieces[into].device:
            partial = partial.to(pieces[into].device, non_blocking=True)
        if into in sums:
            sums[into].add_(partial)
        else:
            sums[into] = pieces[into].to(compute, copy=True).add_(partial)
    total = sums[part.owner] if part.owner in sums else pieces[part.owner].to(compute, copy=True)
    if scale != 1.0:
        total.mul_(scale)
    rounded = total.to(tensors[0].dtype)
    for output in outputs:
        output[part.begin : part.end].copy_(rounded, non_blocking=True)
