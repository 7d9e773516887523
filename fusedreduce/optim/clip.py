"""clip_grad_norm_: as torch's, with the norm from the reduction and the coefficient folded into a fused optimizer.

    optimizer given     its own step divides the gradients (see folded_step.py); no pass
    none given          gradient *= coefficient, one fused launch: 8 bytes per element of fp32
    norm                of the reduction (reuse_norm, or with FusedGradScaler): no pass; else one launch: 4 bytes

torch's two passes are 12 bytes per element.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Iterable, Sequence

import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim import Optimizer

from ..buckets.gradient_table import GradientTable
from ..buckets.tensors import any_gradient
from ..errors import FusedReduceError
from ..parallel.data_parallel import DataParallel
from ..parallel.wrapper_reducer import find_reducer, uncompiled
from ..reducer.reducer import Reducer
from .folded_step import PendingClip, can_wait, check_can_fold
from .grad_scaler import Reduces, gradients_of, is_unscaled

_NORM_TYPES = (2.0, math.inf)
# What torch adds to the norm before it divides.
_EPSILON = 1e-6
_WHEN = "Call it after the backward that reduces them, before the optimizer's step"


def clip_grad_norm_(
    ddp: TorchDDP | DataParallel | Reducer,
    max_norm: float,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    reuse_norm: bool = False,
    *,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    include_ignored: bool = False,
) -> torch.Tensor:
    """Scales the reduced gradients so that their total norm is at most `max_norm`, as `torch.nn.utils.clip_grad_norm_`.

    Call it between backward and `step`, on every rank. The host does not wait for the GPU, and no collective is issued
    (where ranks' sums may differ in the last bit, one: see GradStats).

    Without `optimizer`, `.grad` holds clipped gradients when this returns. With it, gradients stay as they were until
    the optimizer's step, which divides them and leaves them clipped (a step that is skipped for a found Inf leaves them
    as they were). So read or change gradients before this call. The coefficient is dropped if the step does not come
    before the wrapper's next synchronised backward, or if all gradients are set to None or replaced before it
    (zero_grad). If only some were, or a backward has added to them, the step raises a FusedReduceError before it
    changes anything. A second call before `step` clips the clipped gradients.
    In three cases gradients are clipped at once although an optimizer is given: in the first call with it (from then on
    its steps have our hooks), within its step's closure, and with fp64 parameters, for which fp32 would be too coarse.

    Args:
        ddp: our wrapper, a DataParallel (whose module's gradients these are), a Reducer, or torch's
            DistributedDataParallel (with fused_hook or not), for which `optimizer` must be left out; also if compiled
            by torch.compile.
        max_norm: largest norm; 0 makes every gradient 0, inf leaves them.
        optimizer: the fused optimizer (Adam, AdamW or SGD of torch.optim, fused=True, not capturable) that steps next,
            or several that own the parameters together.
        reuse_norm: use the norm that the reduction has computed (from the second such call on), if nothing has changed
            the gradients since backward. It is measured all the same where a gradient is another tensor or has another
            version; writes to `.data`, by fused optimizers and by torch's `unscale_` raise no version. Between
            `unscale_` and `step` of a FusedGradScaler the norm is reused always, with torch's wrapper never.
        norm_type: 2 or inf.
        error_if_nonfinite: raise if the norm is NaN or Inf; waits for the GPU.
        include_ignored: count and clip also parameters that the wrapper does not reduce. Their gradients differ across
            ranks, and so will the norm.

    Returns:
        The total norm before clipping: 0-dim, of torch's dtype (fp32; 16 bits if all gradients are of one such dtype,
        fp64 if one is). As with torch, a NaN norm makes all gradients NaN; an Inf norm makes them 0, and those that are
        Inf themselves NaN. For fp32 gradients whose squares overflow or underflow, as of 1e25 or 1e-25, the norm is
        right here, while torch's is Inf or 0.

    Raises:
        ValueError: max_norm is negative or NaN, norm_type another one, an ignored parameter has a gradient, an
            optimizer comes with torch's wrapper, or cannot fold: it is of another class (also a derived one), not
            fused, capturable, or does not own exactly these parameters.
        TypeError: not a wrapper, or not an optimizer.
        FusedReduceError: nothing has been reduced yet, or the latest backward was not (no_sync), or not to its end; or
            this is a second clip after which some of the first one's optimizers have stepped, gradients were replaced,
            or a backward has added to them.
        RuntimeError: error_if_nonfinite, with torch's text.
        All of them before anything has changed.
    """
    max_norm, norm_type = float(max_norm), float(norm_type)
    if not max_norm >= 0:
        raise ValueError(f"max_norm must be a number of at least 0, or inf; got {max_norm}")
    if norm_type not in _NORM_TYPES:
        raise ValueError(f"norm_type must be 2 or inf, got {norm_type}")
    gradients = _gradients(uncompiled(ddp), include_ignored)
    optimizers = _optimizers(optimizer)
    if optimizers:
        if gradients.reducer is None:
            raise ValueError(
                "clip_grad_norm_ cannot fold into an optimizer with torch's DistributedDataParallel, which does not "
                "say of which step its gradients are: leave the optimizer out, and they are clipped in place, in one "
                "launch"
            )
        check_can_fold(optimizers, gradients.named)
    clipped = _clipped(gradients.reducer)
    clipped.check_again(optimizers)

    with torch.no_grad():
        norm = gradients.norm(norm_type, gradients.may_reuse(reuse_norm) and not clipped.written)
        if clipped.divisor is not None:
            norm = norm / clipped.divisor
        returned = norm.to(_norm_dtype(gradients.named))
        if error_if_nonfinite and not bool(returned.isfinite()):
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
                "clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
                "`error_if_nonfinite=False`"
            )
        if gradients.reducer is not None:
            gradients.reducer.note_clip(functools.partial(_coefficient, norm, max_norm))
        wide = any(one.dtype is torch.float64 for _, one in gradients.named)
        if optimizers and can_wait(optimizers) and not wide:
            clipped.fold(optimizers, ((norm + _EPSILON) / max_norm).clamp(min=1.0))  # keeps NaN
        else:
            gradients.multiply(_coefficient(norm, max_norm))
            clipped.written = True
    return returned


class _Reduced:
    """The gradients of a reducer."""

    def __init__(self, reducer: Reduces) -> None:
        self.reducer = reducer
        self.named = tuple(zip(reducer.names, reducer.parameters, strict=True))

    def may_reuse(self, asked: bool) -> bool:
        """Whether the norm of the reduction can be used; `asked`: reuse_norm was given."""
        if asked:
            self.reducer.observed.require()
        return (asked or is_unscaled(self.reducer)) and self.reducer.observed.has_by_products()

    def norm(self, norm_type: float, reuse: bool) -> torch.Tensor:
        """The norm: 0-dim, fp64, on the first parameter's device."""
        observed = self.reducer.observed
        return observed.shared_norm(observed.reduced_norm(norm_type) if reuse else observed.measured_norm(norm_type))

    def multiply(self, factor: torch.Tensor) -> None:
        """Multiplies the gradients in place."""
        self.reducer.observed.multiply(factor)


class _Measured:
    """The gradients of any parameters, always measured: of torch's wrapper, or with some that the wrapper ignores."""

    def __init__(self, ddp: TorchDDP, reducer: Reduces | None, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        self.reducer, self.named = reducer, tuple(named)
        identity = tuple(id(one) for _, one in named)
        known = _tables.get(ddp)
        if known is None or known[0] != identity:
            known = _tables[ddp] = identity, GradientTable.of(one for _, one in named)
        self._table = known[1]

    def may_reuse(self, asked: bool) -> bool:
        """Returns False: these gradients are always measured."""
        return False

    def norm(self, norm_type: float, reuse: bool) -> torch.Tensor:
        """The norm: 0-dim, fp64, on the first parameter's device."""
        total = self._table.measure().total
        return total[0].sqrt() if norm_type == 2.0 else total[1]

    def multiply(self, factor: torch.Tensor) -> None:
        """Multiplies the gradients in place."""
        self._table.multiply(factor)


_tables: weakref.WeakKeyDictionary[TorchDDP, tuple[tuple[int, ...], GradientTable]] = weakref.WeakKeyDictionary()
_records: weakref.WeakKeyDictionary[Reduces, PendingClip] = weakref.WeakKeyDictionary()


def _gradients(ddp: object, include_ignored: bool) -> _Reduced | _Measured:
    if isinstance(ddp, Reducer | DataParallel):
        owner = gradients_of(ddp)
        _check_reduced(owner)
        return _Reduced(owner)
    if not isinstance(ddp, TorchDDP):
        raise TypeError(
            "clip_grad_norm_ takes the wrapper whose gradients are clipped (a DistributedDataParallel, ours or "
            f"torch's, a DataParallel, or a Reducer), got {type(ddp).__name__}. Clip the parameters of several "
            "wrappers one by one, or all together with torch.nn.utils.clip_grad_norm_"
        )
    if not ddp.require_backward_grad_sync:
        raise FusedReduceError(f"clip_grad_norm_ under no_sync(): these gradients have not been reduced. {_WHEN}")
    reducer = find_reducer(ddp)
    if reducer is not None:
        _check_reduced(reducer)
        ignored = reducer.ignored_with_gradients(allowed=include_ignored)
        if not ignored:
            return _Reduced(reducer)
        return _Measured(ddp, reducer, [*zip(reducer.names, reducer.parameters, strict=True), *ignored])
    named = [(name, one) for name, one in ddp.module.named_parameters() if one.requires_grad]
    if not any_gradient([one for _, one in named]):
        raise FusedReduceError(f"clip_grad_norm_ before any backward: there is no gradient. {_WHEN}")
    ignored = [(name, one) for name, one in named if name in ddp.parameters_to_ignore and one.grad is not None]
    if ignored and not include_ignored:
        raise ValueError(
            f"{len(ignored)} parameters that the wrapper was told to ignore have gradients, the first one is "
            f"{ignored[0][0]}: they are no part of the reduced norm. Give include_ignored=True to count and clip them "
            "too, or clip them on their own"
        )
    return _Measured(ddp, None, [*(one for one in named if one[0] not in ddp.parameters_to_ignore), *ignored])


def _check_reduced(reducer: Reduces) -> None:
    reducer.check_finalized()
    if not reducer.steps:
        raise FusedReduceError(f"clip_grad_norm_ before any synchronised backward: nothing has been reduced. {_WHEN}")
    if reducer.local_backward_expected:
        raise FusedReduceError(
            f"clip_grad_norm_ after a forward under no_sync(): these gradients have not been reduced. {_WHEN}"
        )


def _coefficient(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    return (max_norm / (norm + _EPSILON)).clamp(max=1.0)


def _optimizers(optimizer: object) -> tuple[Optimizer, ...]:
    if optimizer is None:
        return ()
    given = tuple(optimizer) if isinstance(optimizer, Iterable) else (optimizer,)
    for one in given:
        if not isinstance(one, Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer or several, got {type(one).__name__}")
    if not given:
        raise ValueError("optimizer is an empty list: leave it out to clip the gradients in place")
    return given


def _norm_dtype(named: Iterable[tuple[str, torch.Tensor]]) -> torch.dtype:
    found = {one.dtype.to_real() if one.is_complex() else one.dtype for _, one in named if one.grad is not None}
    return functools.reduce(torch.promote_types, found) if found else torch.float32


def _clipped(reducer: Reduces | None) -> PendingClip:
    """What clipping has done to a reducer's current gradients."""
    if reducer is None:
        return PendingClip(lambda: None, lambda: None)
    known = _records.get(reducer)
    if known is None or not known.is_current():
        alive = weakref.ref(reducer)
        known = _records[reducer] = PendingClip(
            lambda: None if (one := alive()) is None else (one.steps, one.late.flushed),
            lambda: None if (one := alive()) is None else one.observed.additions,
        )
    return known
