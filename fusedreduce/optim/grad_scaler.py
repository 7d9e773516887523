"""FusedGradScaler: torch's GradScaler whose two passes over the gradients are part of the reduction.

    scaler = FusedGradScaler(ddp)
    for batch in data:
        optimizer.zero_grad()
        scaler.scale(loss(ddp(batch))).backward()     # the scale stays on during the wire, unpack takes it off
        scaler.unscale_(optimizer)                    # no pass: unpack has found what is not finite
        fusedreduce.clip_grad_norm_(ddp, 1.0, optimizer)
        scaler.step(optimizer)
        scaler.update()

torch's unscale_ reads and writes every gradient: 8 bytes per element of fp32. Here gradients that a wrapper reduces
cost nothing; others go through torch's operator.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.amp.grad_scaler import OptState
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim import SGD, Optimizer

from ..buckets.gradient_table import index_of
from ..buckets.loss_scale import LossScale
from ..buckets.tensors import any_gradient
from ..errors import FusedReduceError
from ..parallel.data_parallel import DataParallel
from ..parallel.replicas.module_gradients import ModuleGradients
from ..parallel.wrapper_reducer import find_reducer, uncompiled
from ..reducer import validation
from ..reducer.reducer import Reducer

Wrapper = TorchDDP | DataParallel | Reducer
# The owner of a wrapper's gradients: its reducer, or the sum over its replicas.
Reduces = Reducer | ModuleGradients
_MISSING = object()
_FUSED_STEP_ATTRIBUTES = ("grad_scale", "found_inf")
_numbers: weakref.WeakKeyDictionary[Reduces, dict[int, int]] = weakref.WeakKeyDictionary()


class FusedGradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler for models under our wrapper.

    It differs from torch's in these points. Gradients of a wrapper are unscaled when its synchronised backward returns,
    so `.grad` holds unscaled values from then on, also before `unscale_` and `step` (after backwards under no_sync it
    holds scaled ones). `unscale_` only asks whether the reduction has found a NaN or Inf, which is the same on every
    rank: a step is skipped on all ranks or on none. (For an optimizer with parameters that no wrapper reduces, ranks
    agree by a small collective in `unscale_`: all of them must call it, and none may have joined.) If the scale changes
    between backwards under no_sync, the next backward brings the wrapper's gradients to the new one.

    A fused SGD with momentum that is told by `found_inf` to skip its very first step would keep an uninitialised
    momentum: that one step is decided on the host. So is every step of an optimizer that is not fused, as in torch's
    class.

    DataParallel removes the scale from each replica's gradients before it adds them up: its gradients are unscaled,
    also under no_sync, and backwards with and without a scale may be accumulated. A loss that depends on its module's
    parameters also in another way (a penalty on weights) is refused by `scale`: run that term's backward on its own.

    Args:
        ddp: the wrapper (DistributedDataParallel, ours or torch's under `install`, DataParallel or Reducer), or
            several, whose backwards begin at a loss from `scale`; also as compiled by torch.compile.
        device: device type of the losses; None: that of the first wrapper's first parameter.
        init_scale: initial loss scale, as torch's.
        growth_factor: factor of growth, as torch's.
        backoff_factor: factor after an overflow, as torch's.
        growth_interval: steps without an overflow before the scale grows, as torch's.
        enabled: False: nothing is scaled, `step` steps, the rest does nothing.

    Raises:
        TypeError: not a wrapper that we reduce, or a Reducer. With torch's own reducer, with fused_hook or without, use
            torch's GradScaler.
        ValueError: no wrapper, or one twice; one with fp16 parameters, whose gradients torch does not unscale either;
            one that shares parameters with another wrapper; or one whose optimizer steps within backward.
    """

    def __init__(
        self,
        ddp: Wrapper | Iterable[Wrapper],
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        wrappers = _checked(ddp)
        super().__init__(
            gradients_of(wrappers[0]).parameters[0].device.type if device is None else device,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
        self._loss_scale: LossScale | None = None
        self._wrappers: tuple[Wrapper, ...] = ()
        self.attach(wrappers)

    def attach(self, ddp: Wrapper | Iterable[Wrapper]) -> None:
        """Replaces the scaler's wrappers. A copy or an unpickled scaler has none, and needs this call.

        Args:
            ddp: a wrapper or several, as in the constructor.

        Raises:
            TypeError, ValueError: as the constructor; the scaler then keeps its wrappers.
        """
        wrappers = _checked(ddp)
        if not self._enabled:
            self._wrappers = wrappers
            return
        for one in wrappers:
            _refuse_fp16(gradients_of(one))
            _refuse_unscalable(gradients_of(one))
        for one in self._wrappers:
            gradients_of(one).observed.units.detach(self)
        self._wrappers = wrappers
        self._reducers()

    def scale(self, outputs: Any) -> Any:
        """Multiplies losses by the scale, as torch's, and marks their backwards as scaled.

        Such a backward raises FusedReduceError, before anything is sent, if it adds to gradients that are unscaled
        already: `zero_grad` was not called, or an earlier micro-batch of this step did not run under no_sync.

        Args:
            outputs: a loss, or several in lists, tuples or iterables.

        Returns:
            The scaled losses, in the same structure.

        Raises:
            ValueError: no backward can begin at a tensor, while gradients are enabled; or a wrapper shares parameters
                with another one, or has an optimizer that steps within backward.
            FusedReduceError: the loss depends on parameters of a DataParallel other than through its replicas.
        """
        if not self._enabled:
            return outputs
        reducers = self._reducers()
        for reducer in reducers:
            _refuse_unscalable(reducer)
        if self._scale is None and not isinstance(outputs, torch.Tensor):
            # torch would wait for the first tensor to come out of what may be a generator.
            self._lazy_init_scale_growth_tracker(reducers[0].parameters[0].device)
        scaled = super().scale(outputs)
        assert self._scale is not None
        if self._loss_scale is None:
            self._loss_scale = LossScale.of(self._scale.detach().clone())  # update() writes into torch's tensor
        return _watched(scaled, _Beginning(reducers, self._loss_scale))

    def unscale_(self, optimizer: Optimizer) -> None:
        """Finds out whether the optimizer's gradients are finite; `.grad` holds unscaled values before and after.

        Gradients that no wrapper reduces are unscaled here, in place. As torch's it is optional, and the host does not
        wait.

        Args:
            optimizer: whose gradients.

        Raises:
            RuntimeError: called twice since `update`, or after `step`; torch's.
            FusedReduceError: all backwards since `zero_grad` ran under no_sync, so gradients are still scaled.
        """
        super().unscale_(optimizer)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Steps the optimizer, unless one of its gradients is NaN or Inf, as torch's.

        `.grad` holds unscaled values before and after. A coefficient that `clip_grad_norm_` has folded into a fused
        optimizer is multiplied into `.grad` by a step that is not skipped.

        Args:
            optimizer: what to step.
            args: for its `step`.
            kwargs: for its `step`.

        Returns:
            What its `step` returned; None if it was skipped.

        Raises:
            RuntimeError: called twice since `update`, or with a closure; torch's.
            FusedReduceError: as `unscale_`.
        """
        if not self._enabled:
            return super().step(optimizer, *args, **kwargs)
        state = self._per_optimizer_states[id(optimizer)]
        if self._scale is not None and state["stage"] is OptState.READY and "closure" not in kwargs:
            # For a fused optimizer torch's step would leave unscaling to its kernel.
            self.unscale_(optimizer)
        if state["stage"] is OptState.UNSCALED and self._withheld() and not _has_gradients(optimizer):
            state["stage"] = OptState.STEPPED
            return None
        if state["stage"] is OptState.UNSCALED and _begins_momentum(optimizer):
            returned = self._maybe_opt_step(optimizer, state, *args, **kwargs)
            state["stage"] = OptState.STEPPED
            return returned
        before = {name: vars(optimizer).get(name, _MISSING) for name in _FUSED_STEP_ATTRIBUTES}
        try:
            return super().step(optimizer, *args, **kwargs)
        except BaseException:
            # torch leaves its own there: a found_inf of 1 would have later steps skipped in silence.
            for name, value in before.items():
                if value is not _MISSING:
                    setattr(optimizer, name, value)
                elif name in vars(optimizer):
                    delattr(optimizer, name)
            raise

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Updates the scale, as torch's.

        A step that was scaled before the scale was last lowered does not count, nor one without gradients. (With
        BoundedStaleness k more steps were in flight then, and would each lower it again.)

        Args:
            new_scale: the scale from now on; None: by the rule.
        """
        kept = None if new_scale is not None or not self._enabled else self._kept()
        super().update(new_scale)
        if kept is not None:
            old, scale, tracker = kept
            assert self._scale is not None and self._growth_tracker is not None
            self._scale.copy_(torch.where(old, scale, self._scale))
            self._growth_tracker.copy_(torch.where(old, tracker, self._growth_tracker))
        self._loss_scale = None

    def _kept(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Whether scale and growth tracker stay as they are, and both, on the device; None: they may change."""
        reducers = list(map(gradients_of, self._wrappers))
        landed = [one.late.landed_scale for one in reducers if one.late.landed_scale is not None]
        if self._scale is None or self._growth_tracker is None or not (landed or self._withheld()):
            return None
        old = torch.full_like(self._scale, self._withheld(), dtype=torch.bool)
        for one in landed:
            old |= one.scale.reshape(self._scale.shape).to(self._scale.device) > self._scale
        return old, self._scale.clone(), self._growth_tracker.clone()

    def _withheld(self) -> bool:
        """Whether the latest step has left no gradients, because averages come later."""
        return any(gradients_of(one).late.withheld for one in self._wrappers)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the scale; takes torch's dictionaries too.

        Args:
            state_dict: from `state_dict` of this class or of torch's.
        """
        super().load_state_dict(state_dict)
        self._loss_scale = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_wrappers": (), "_loss_scale": None}

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        """Called by torch's unscale_. Returns one flag, exactly 0. or 1., because a fused step skips for nothing else,
        and torch adds up one per device."""
        reducers = self._reducers()
        for reducer in reducers:
            reducer.observed.before_reading()
        known = [_numbers_of(reducer) for reducer in reducers]
        owned: list[list[int]] = [[] for _ in reducers]
        others: list[torch.Tensor] = []
        for parameter in (one for group in optimizer.param_groups for one in group["params"]):
            for numbers, mine_of in zip(known, owned, strict=True):
                if (number := numbers.get(id(parameter))) is not None:
                    mine_of.append(number)
                    break
            else:
                if parameter.requires_grad or parameter.grad is not None:
                    others.append(parameter)
        mine = [
            (reducer, numbers)
            for reducer, numbers in zip(reducers, owned, strict=True)
            if any_gradient([reducer.parameters[number] for number in numbers])
        ]
        if not all(reducer.observed.units.unscaled_now() for reducer, _ in mine):
            raise FusedReduceError(
                "the gradients have not been reduced yet and are still scaled, because every backward since "
                "zero_grad() ran under no_sync(): run the last micro-batch's forward and backward outside of no_sync()"
            )
        unscaled = super()._unscale_grads_(_Parameters(others), inv_scale, found_inf, allow_fp16)  # type: ignore[arg-type]
        flags = [*unscaled.values(), *(_found_non_finite(*one) for one in mine)]
        # A tensor of its own, because update() adds other optimizers' flags to it in place.
        for flag in flags:
            found_inf = torch.maximum(found_inf, flag.to(found_inf.device, non_blocking=True))
        if others:
            # Their gradients are this rank's own, but all ranks must skip or none.
            found_inf = reducers[0].observed.on_any_rank(found_inf).to(found_inf.device)
        # torch's update() needs a flag of every step, also of one without gradients.
        return {found_inf.device: found_inf} if flags or self._withheld() else {}

    def _reducers(self) -> list[Reduces]:
        """The current reducers of the wrappers: a wrapper that is copied or loaded builds another."""
        if not self._wrappers:
            raise FusedReduceError("this FusedGradScaler is a copy, or was unpickled, and has no wrapper: attach(ddp)")
        reducers = [gradients_of(one) for one in self._wrappers]
        for reducer in reducers:
            reducer.observed.units.attach(self)
            reducer.observed.require()
        return reducers

    def _has_unscaled(self) -> bool:
        return self._enabled and any(
            state["stage"] is OptState.UNSCALED for state in self._per_optimizer_states.values()
        )


def is_unscaled(reducer: Reduces) -> bool:
    """Whether `unscale_` was called on a scaler of this reducer for an optimizer that has not stepped yet."""
    scalers = reducer.observed.units.scalers()
    return any(isinstance(scaler, FusedGradScaler) and scaler._has_unscaled() for scaler in scalers)


def gradients_of(wrapper: Wrapper) -> Reduces:
    """The owner of a wrapper's gradients."""
    found = _owner(wrapper)
    assert found is not None
    return found


def _owner(wrapper: object) -> Reduces | None:
    if isinstance(wrapper, Reducer):
        return wrapper
    return wrapper.gradients if isinstance(wrapper, DataParallel) else find_reducer(wrapper)


class _Beginning:
    """Hook for the begin of a scaled loss's backward. A loss that is kept does not keep the reducers alive."""

    def __init__(self, reducers: Sequence[Reduces], scale: LossScale) -> None:
        self._reducers, self._scale = [weakref.ref(one) for one in reducers], scale

    def check(self, scaled: torch.Tensor) -> None:
        """Raises FusedReduceError if the scale would stay on some gradients of a DataParallel."""
        for reference in self._reducers:
            reducer = reference()
            if isinstance(reducer, ModuleGradients):
                reducer.check_loss(scaled)

    def __call__(self, _: object) -> None:
        for reference in self._reducers:
            reducer = reference()
            if reducer is not None:
                reducer.begin_scaled(self._scale)


def _watched(scaled: Any, begin: _Beginning) -> Any:
    """Makes the backward of each tensor in `scaled`, nested and lazy as in torch's `scale`, call `begin`."""
    if isinstance(scaled, torch.Tensor):
        if scaled.grad_fn is not None:
            begin.check(scaled)
            scaled.grad_fn.register_prehook(begin)
        elif torch.is_grad_enabled():
            # As the gradient that another backward begins with, it would scale that backward unnoticed.
            raise ValueError(
                "FusedGradScaler.scale needs a loss that backward() can be called on, but this tensor has no grad_fn. "
                "For loss.backward(gradient=...) scale the loss, not the gradient, or use torch.amp.GradScaler"
            )
        return scaled
    if isinstance(scaled, list | tuple):
        for one in scaled:
            _watched(one, begin)
        return scaled
    return (_watched(one, begin) for one in scaled)


def _numbers_of(reducer: Reduces) -> dict[int, int]:
    """The numbers of a reducer's parameters, by id; the reducer keeps them alive."""
    if reducer not in _numbers:
        _numbers[reducer] = {id(parameter): number for number, parameter in enumerate(reducer.parameters)}
    return _numbers[reducer]


def _found_non_finite(reducer: Reduces, numbers: Sequence[int]) -> torch.Tensor:
    """0. or 1.: from the reduction's statistics, or measured now if there are none or gradients have changed."""
    observed = reducer.observed
    if observed.has_by_products():
        return observed.found_non_finite(None if len(numbers) == len(reducer.parameters) else numbers)
    first = observed.table.measure().first_non_finite
    return (first[index_of(tuple(numbers), first.device)] >= 0).any().to(torch.float32)


class _Parameters:
    """The part of an optimizer that torch's operator reads."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.param_groups = [{"params": parameters}]


def _checked(ddp: object) -> tuple[Wrapper, ...]:
    ddp = uncompiled(ddp)
    given = (ddp,) if isinstance(ddp, Wrapper) or not isinstance(ddp, Iterable) else tuple(ddp)
    checked: list[Wrapper] = []
    for one in map(uncompiled, given):
        if not isinstance(one, Wrapper) or _owner(one) is None:
            raise TypeError(
                "FusedGradScaler takes a fusedreduce.DistributedDataParallel, DataParallel or Reducer, or several; got "
                f"{type(one).__module__}.{type(one).__name__}. torch's own wrapper, with fused_hook or without, takes "
                "torch.amp.GradScaler"
            )
        checked.append(one)
    if not checked or len(set(map(id, checked))) < len(checked):
        raise ValueError(f"FusedGradScaler takes one wrapper or more, each once; got {len(checked)}")
    return tuple(checked)


def _refuse_fp16(reducer: Reduces) -> None:
    fp16 = [n for n, one in zip(reducer.names, reducer.parameters, strict=True) if one.dtype is torch.float16]
    if fp16:
        raise ValueError(
            f"Attempting to unscale FP16 gradients. {len(fp16)} of the wrapper's parameters are fp16, the first one is "
            f"{fp16[0]}: unscaled, their gradients would underflow again. Keep parameters in fp32, and use autocast"
        )


def _refuse_unscalable(reducer: Reduces) -> None:
    """Refuses what may change during training and would leave gradients wrong by the factor of the scale, unnoticed."""
    if reducer.steps_in_backward:
        raise ValueError(
            "FusedGradScaler cannot take this wrapper: its optimizer steps within backward, before the loss scale is "
            "removed. Step it after backward"
        )
    if isinstance(reducer, Reducer) and validation.shared(reducer.engine, reducer.parameters):
        raise ValueError(
            "FusedGradScaler cannot take this wrapper: it shares parameters with another one (nested, or not deleted "
            "yet), so their gradients are reduced twice and would be unscaled twice. Use torch.amp.GradScaler"
        )


def _has_gradients(optimizer: Optimizer) -> bool:
    return any_gradient([one for group in optimizer.param_groups for one in group["params"]])


def _begins_momentum(optimizer: Optimizer) -> bool:
    """Whether a fused SGD would allocate a momentum buffer in this step."""
    return isinstance(optimizer, SGD) and any(
        group["momentum"] != 0
        and group.get("fused")
        and any(
            one.grad is not None and optimizer.state.get(one, {}).get("momentum_buffer") is None
            for one in group["params"]
        )
        for group in optimizer.param_groups
    )
