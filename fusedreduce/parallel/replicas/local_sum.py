"""LocalSum: sums of several replicas' gradients on one device, in place: the result that reducers give, without a wire.

    sum = g_0 + g_1 + ... in that order, in fp32 (fp64 for fp64), rounded once to the gradients' dtype

W gradients are read and 1 is written; through a wire it would be 3 W and 3 W.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...buckets.loss_scale import LossScale
from ...config import FlushReport, ReduceConfig, SyncMode
from ...reducer.reducer import Reducer
from .replicate import Replicas
from .thread_pool import Workers

# The number of elements from which on a sum is divided among the workers.
_SHARED_NUMEL = 1 << 17
Gradients = Sequence[torch.Tensor | None]
_WIDE = (torch.float32, torch.float64, torch.complex64, torch.complex128)


class LocalSum:
    """Adds the replicas' gradients up on the first device. Every sum is there when `reduce` returns.

    Args:
        replicas: the modules.
        workers: one thread per replica, or a single one.
        config: how gradients are reduced.
        threads: whether there is a worker per replica.

    Attributes:
        delayed: sums come later than their own step.
    """

    delayed = False

    def __init__(self, replicas: Replicas, workers: Workers, config: ReduceConfig, *, threads: bool) -> None:
        self._replicas = replicas
        self._workers = workers
        self._config = config
        self._threads = threads

    @property
    def reducers(self) -> Sequence[Reducer]:
        """The reducer of each replica; here there are none."""
        return ()

    def add_up(self) -> list[torch.Tensor | None]:
        """The sum per parameter of what replicas have in `.grad`, in place of some of that; None: no gradient."""
        replicas = self._replicas
        device, count = replicas.devices[0], len(replicas.devices)
        gradients = [
            [None if one is None else one.to(device) for one in replicas.gradients_of(replica)]
            for replica in range(count)
        ]
        if is_sparse(gradients):
            return added_up_sparse(gradients)
        if count > 1 and self._threads and replicas.numel >= _SHARED_NUMEL:
            self._workers.run([functools.partial(add_up, gradients, share, count) for share in range(count)])
        else:
            add_up(gradients)
        return totals(gradients)

    def reduce(self, scale: LossScale | None, scalers: Sequence[object]) -> list[torch.Tensor | None]:
        """The sum per parameter of what replicas have in `.grad`, as the configuration says.

        Args:
            scale: of the step's loss, by which gradients have been divided already.
            scalers: who decides on gradients under a loss scale that are not finite.

        Returns:
            The sums; None: no gradient, or sums come later.
        """
        return self.add_up()

    def note_clip(self, coefficient: Callable[[], torch.Tensor]) -> None:
        """Called when the sums are clipped; here there are no residuals to clip, too."""

    # What outlives a step

    def steps_in_flight(self) -> int:
        """Number of steps whose sums come later, as a whole and in order (BoundedStaleness)."""
        return 0

    def check_mode(self, mode: SyncMode) -> None:
        """Raises, before anything is changed, if the mode cannot change to `mode` now; see `Reducer.set_sync_mode`."""

    def flush(self, apply: Callable[[], None], step: Callable[[], None] | None) -> FlushReport:
        """Applies the sums of all steps in flight.

        Args:
            apply: called when replica 0 has a step's sums in `.grad`.
            step: called after each `apply`.
        """
        return FlushReport()

    def state(self) -> dict[str, Any]:
        """Checkpoint of what is in flight, or kept by replica."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resumes from what `state` returned.

        Raises:
            ValueError: it is damaged, or belongs to another model, number of devices or mode.
        """
        if state:
            raise ValueError(
                f"the state holds what is in flight of {len(state.get('replicas', ()))} replicas, and this mode is "
                f"{self._config.sync_mode}: load it in the mode that it was saved in, or call flush() before saving"
            )

    def abort(self, replica: int, error: BaseException) -> None:
        """Aborts the collectives in flight, for a replica that has raised."""

    def close(self) -> None:
        """Drops what is in flight. After an interrupt within it, the next call completes it."""


def totals(replicas: Sequence[Gradients]) -> list[torch.Tensor | None]:
    """Per parameter the gradient that `add_up` writes the sum to: the first one that is not None."""
    return [next((one for one in each if one is not None), None) for each in zip(*replicas, strict=True)]


def add_up(replicas: Sequence[Gradients], share: int = 0, shares: int = 1) -> None:
    """Adds every parameter's gradients to the first of them.

    Args:
        replicas: per replica its gradients, on one device; None: no gradient.
        share: which share this call adds up; shares are independent of each other.
        shares: number of equal shares that the elements are divided into.
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
    """Whether a gradient is sparse, so that `added_up_sparse` is needed."""
    return any(one is not None and one.layout is not torch.strided for each in replicas for one in each)


def added_up_sparse(replicas: Sequence[Gradients]) -> list[torch.Tensor | None]:
    """The sums per parameter, if some gradients are sparse; those sums are new tensors."""
    with torch.no_grad():
        return [_sum_of([one for one in each if one is not None]) for each in zip(*replicas, strict=True)]


def _sum_of(gradients: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Entries of one index are added two at a time, so that their order within a tensor is irrelevant."""
    if not gradients:
        return None
    dtype = gradients[0].dtype
    wide = [_coalesced(one).to(dtype if dtype in _WIDE else torch.float32) for one in gradients]
    total = wide[0]
    for other in wide[1:]:
        total = _coalesced(total + other)
    return total.to(dtype)


def _coalesced(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.coalesce() if gradient.is_sparse else gradient


def _shared(columns: Sequence[list[torch.Tensor]], share: int, shares: int) -> list[list[torch.Tensor]]:
    """The elements of one share, as views of the gradients."""
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
            elif _have_one_order(column):
                mine.append([_flat(one)[first:last] for one in column])
            elif first == 0:  # not divisible: it belongs to the share with its first element
                mine.append(column)
        at += numel
    return mine


def _have_one_order(column: Sequence[torch.Tensor]) -> bool:
    """Whether elements are dense, and in the same order in memory."""
    strides = column[0].stride()
    return all(one.stride() == strides for one in column) and torch.ops.aten.is_non_overlapping_and_dense(column[0])


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))
