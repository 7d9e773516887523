"""Gradients of several replicas on one device, added up where they lie: what reducers would give, without a wire.

    sum = g_0 + g_1 + ... in that order, in fp32 (fp64 for fp64), rounded once to the gradients' dtype

Read W, written 1; through a wire it is 3 W and 3 W. Stateless.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Gradients = Sequence[torch.Tensor | None]
_WIDE = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def totals(replicas: Sequence[Gradients]) -> list[torch.Tensor | None]:
    """Per parameter the gradient that takes the sum: the first that is there."""
    return [next((one for one in each if one is not None), None) for each in zip(*replicas, strict=True)]


def add_up(replicas: Sequence[Gradients], share: int = 0, shares: int = 1) -> None:
    """Adds every parameter's gradients to the first of them.

    Args:
        replicas: per replica its gradients, on one device; None: it has none.
        share: which of the shares this call does; the shares are independent of each other.
        shares: into how many equal parts the elements are divided.
    """
    with torch.no_grad():
        columns = [[one for one in each if one is not None] for each in zip(*replicas, strict=True)]
        mine = _shared([column for column in columns if len(column) > 1], share, shares)
        plain = [column for column in mine if len(column) == 2 or column[0].dtype in _WIDE]
        for number in range(1, len(replicas)):
            several = [column for column in plain if len(column) > number]
            if several:
                torch._foreach_add_([column[0] for column in several], [column[number] for column in several])
        for column in mine:
            if len(column) > 2 and column[0].dtype not in _WIDE:
                total = column[0].float()
                for other in column[1:]:
                    total.add_(other)
                column[0].copy_(total)


def is_sparse(replicas: Sequence[Gradients]) -> bool:
    """Whether one of them has to be added otherwise."""
    return any(one is not None and one.layout is not torch.strided for each in replicas for one in each)


def added_up_sparse(replicas: Sequence[Gradients]) -> list[torch.Tensor | None]:
    """The sums, where some are sparse; those are new tensors."""
    sums: list[torch.Tensor | None] = []
    with torch.no_grad():
        for each in zip(*replicas, strict=True):
            found = [one for one in each if one is not None]
            total = found[0] if found else None
            for other in found[1:]:
                assert total is not None
                total = total + other
            sums.append(total.coalesce() if total is not None and total.is_sparse else total)
    return sums


def _shared(columns: Sequence[list[torch.Tensor]], share: int, shares: int) -> list[list[torch.Tensor]]:
    """The part of all elements that belongs to a share, as views of the gradients that hold it."""
    if shares == 1:
        return list(columns)
    total = sum(column[0].numel() for column in columns)
    begin, end = total * share // shares, total * (share + 1) // shares
    mine, at = [], 0
    for column in columns:
        numel = column[0].numel()
        first, last = max(begin, at) - at, min(end, at + numel) - at
        if first < last:
            if last - first == numel:
                mine.append(column)
            elif _walked_alike(column):
                mine.append([_flat(one)[first:last] for one in column])
            elif first == 0:  # whole, in the share that has its beginning
                mine.append(column)
        at += numel
    return mine


def _walked_alike(column: Sequence[torch.Tensor]) -> bool:
    """Whether the same elements are at the same places in memory."""
    strides = column[0].stride()
    return all(one.stride() == strides for one in column) and torch.ops.aten.is_non_overlapping_and_dense(column[0])


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))
