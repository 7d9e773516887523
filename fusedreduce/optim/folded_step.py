"""Folds a divisor into the next step of torch's fused optimizers, in place of a pass over the gradients.

torch's fused Adam, AdamW and SGD read an attribute that GradScaler sets around a step: they divide the gradients by
`grad_scale` and write them back. A pre-hook of `step` multiplies the divisor into that attribute, a post-hook restores
it. Both hooks stay on the optimizer for good: a hook that removed itself while torch iterates over them would make that
step raise after the weights have changed. A divisor is used once, and only for the gradients that it was made for.

Observed with torch 2.13 on CPU: `grad_scale` must be fp32; NaN and Inf in it act on gradients as in a division; a step
that raises runs no post-hook, so the next call of ours restores the attribute; optimizers lose their hooks when they
are copied, and keep them over load_state_dict.

A divisor that waits for a step is for the gradients of that time. If all of them are gone it is dropped; if others have
replaced some, or a backward has added to them, no single divisor is right, and the step is refused. Changes that the
user makes in place are divided with them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from ..errors import FusedReduceError

_MISSING = object()


class PendingClip:
    """What clipping has done to one set of gradients, and the divisor that still waits for optimizers' steps.

    Args:
        generation: returns a value that changes when the gradients are those of another step.
        additions: returns a value that changes when a backward adds to them.

    Attributes:
        divisor: 0-dim fp32, by which some optimizer has still to divide; None: none has.
        written: `.grad` is not what the backward left.
    """

    def __init__(self, generation: Callable[[], object], additions: Callable[[], object]) -> None:
        self._generation = generation
        self._made_for = generation()
        self._additions = additions
        self._folded_at: object = None
        self.divisor: torch.Tensor | None = None
        self.written = False
        self._waiting: set[OptimizerHook] = set()
        self._some_stepped = False

    def is_current(self) -> bool:
        """Whether the gradients still are those of the same step."""
        return self._generation() == self._made_for

    def check_again(self, optimizers: Sequence[Optimizer]) -> None:
        """Checks that the gradients can be clipped once more.

        Args:
            optimizers: that they are to be clipped for; empty: in place.

        Raises:
            FusedReduceError: some optimizers have divided already and others have not; or as `still_for`.
        """
        for hook in tuple(self._waiting):
            self.still_for(hook)
        given = {OptimizerHook.known(one) for one in optimizers}
        if self._waiting and (self._some_stepped or (given and given != self._waiting)):
            raise FusedReduceError(
                "clip_grad_norm_: these gradients were clipped before for optimizers of which only some have stepped "
                "since, or with other optimizers than now, so some gradients are clipped and some are not. Call it "
                "before the first of the optimizers steps, each time with the same optimizers"
            )

    def fold(self, optimizers: Sequence[Optimizer], divisor: torch.Tensor) -> None:
        """Has the next step of each optimizer divide its gradients by `divisor`, 0-dim, and by one that waits."""
        if self.divisor is not None:
            divisor = self.divisor * divisor
        self.divisor = divisor.to(torch.float32)
        self._some_stepped = False
        self._folded_at = self._additions()
        self._waiting = set()
        for one in optimizers:
            hook = OptimizerHook.of(one)
            hook.clipped, hook.meant = self, GradIdentity(one)
            self._waiting.add(hook)

    def still_for(self, hook: OptimizerHook) -> bool:
        """Whether an optimizer's gradients are those that its divisor is for; if all are gone, the divisor is dropped.

        Raises:
            FusedReduceError: some have been replaced, or a backward has added to them.
        """
        assert hook.meant is not None
        left, others = hook.meant.left()
        if others and not left:
            hook.clipped = hook.meant = None
            self._waiting.discard(hook)
            self.written = self._some_stepped = True
            if not self._waiting:
                self.divisor = None
            return False
        what = None
        if others:
            what = f"{others} of the {left + others} gradients were replaced, added or set to None"
        elif self._additions() != self._folded_at:
            what = "a backward has added to the gradients"
        if what is not None:
            raise FusedReduceError(
                f"since clip_grad_norm_ left its coefficient for this optimizer's step, {what}, so the coefficient "
                "does not fit them. Call clip_grad_norm_ after the last change of gradients, or without the optimizer, "
                "to clip in place. To skip this step, call zero_grad(set_to_none=True)"
            )
        return True

    def used(self, hook: OptimizerHook) -> None:
        """Notes that an optimizer has stepped, and so divided."""
        self._waiting.discard(hook)
        self.written = self._some_stepped = True
        if not self._waiting:
            self.divisor = None


class GradIdentity:
    """Which tensors an optimizer's gradients are, by weak references."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._seen = [
            (weakref.ref(one), None if one.grad is None else weakref.ref(one.grad))
            for group in optimizer.param_groups
            for one in group["params"]
        ]

    def left(self) -> tuple[int, int]:
        """Returns how many gradients are still the same tensors, and how many are not."""
        left = others = 0
        for parameter, then in self._seen:
            alive = parameter()
            now, was = None if alive is None else alive.grad, None if then is None else then()
            if now is was:
                left += now is not None
                others += now is None and then is not None  # both gone
            else:
                others += 1
        return left, others


class OptimizerHook:
    """The step hooks of one optimizer, and the clip whose divisor its next step folds in.

    Attributes:
        clipped: the clip; None: there is none.
        meant: the gradients that its divisor is for.
        in_closure: a step with a closure has begun, and is not known to have ended.
    """

    def __init__(self) -> None:
        self.clipped: PendingClip | None = None
        self.meant: GradIdentity | None = None
        self.in_closure = False
        self._mine: torch.Tensor | None = None
        self._before: object = _MISSING

    @classmethod
    def known(cls, optimizer: Optimizer) -> OptimizerHook | None:
        """The optimizer's hooks, if it has any."""
        return _hooks.get(optimizer)

    @classmethod
    def of(cls, optimizer: Optimizer) -> OptimizerHook:
        """The optimizer's hooks, registered by the first call."""
        hook = cls.known(optimizer)
        if hook is None:
            hook = _hooks[optimizer] = cls()
            optimizer.register_step_pre_hook(hook.before_step)
            optimizer.register_step_post_hook(hook.after_step)
        return hook

    def before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Pre-hook of the step: multiplies the divisor into `grad_scale`.

        Raises:
            FusedReduceError: as `PendingClip.still_for`.
            ValueError: the step has a closure, and a divisor waits.
            Both before anything has changed.
        """
        self.put_back(optimizer)
        if self.clipped is not None and not self.clipped.is_current():
            self.clipped = self.meant = None
        if self.clipped is not None:
            self.clipped.still_for(self)
        closure = (args[1] if len(args) > 1 else kwargs.get("closure")) is not None
        divisor = None if self.clipped is None else self.clipped.divisor
        if closure and divisor is not None:
            raise ValueError(
                "step(closure) would divide the closure's gradients by the coefficient that clip_grad_norm_ has made "
                "for the gradients before. Call clip_grad_norm_ within the closure"
            )
        self.in_closure = closure
        if divisor is None:
            return
        before = vars(optimizer).get("grad_scale", _MISSING)
        if isinstance(before, torch.Tensor):
            divisor = (before.to(divisor.device, non_blocking=True) * divisor).to(torch.float32)
        optimizer.grad_scale = divisor  # type: ignore[attr-defined]
        self._mine, self._before = divisor, before

    def after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Post-hook of the step: restores `grad_scale`."""
        self.in_closure = False
        if self._mine is not None and self.clipped is not None:
            self.clipped.used(self)
        self.clipped = self.meant = None
        self.put_back(optimizer)

    def put_back(self, optimizer: Optimizer) -> None:
        """Restores `grad_scale` after a step, also one that raised, unless another value was written there since."""
        if self._mine is not None and vars(optimizer).get("grad_scale") is self._mine:
            if self._before is _MISSING:
                del optimizer.grad_scale  # type: ignore[attr-defined]
            else:
                optimizer.grad_scale = self._before  # type: ignore[attr-defined]
        self._mine, self._before = None, _MISSING


_hooks: weakref.WeakKeyDictionary[Optimizer, OptimizerHook] = weakref.WeakKeyDictionary()


def can_wait(optimizers: Sequence[Optimizer]) -> bool:
    """Whether the next step of each optimizer runs our hooks, which are registered from now on.

    Not within a step's closure, after the pre-hooks have run; and at an optimizer's first call we cannot know whether
    it is in one. (After a step with a closure that raised, not before the next step has ended.)

    Args:
        optimizers: each, in any order.
    """
    strangers = [one for one in optimizers if OptimizerHook.known(one) is None]
    hooks = [OptimizerHook.of(one) for one in optimizers]
    for one, hook in zip(optimizers, hooks, strict=True):
        hook.put_back(one)
    return not strangers and not any(hook.in_closure for hook in hooks)


def check_can_fold(optimizers: Sequence[Optimizer], named: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Checks that these optimizers divide by `grad_scale`, and own exactly these parameters, each once.

    Args:
        optimizers: to fold a divisor into.
        named: (name, parameter) of every reduced parameter.

    Raises:
        ValueError: they do not; with what to do.
    """
    for one in optimizers:
        why = None
        # Not isinstance: the step of a class derived from these may read gradients itself.
        if type(one) not in (Adam, AdamW, SGD):
            why = "is not torch.optim's Adam, AdamW or SGD"
        elif not all(group.get("fused") for group in one.param_groups):
            why = "has a group without fused=True"
        elif any(group.get("capturable") for group in one.param_groups):
            why = "is capturable"
        if why is not None:
            raise ValueError(
                f"clip_grad_norm_: the coefficient cannot be folded into {type(one).__name__}, which {why}. Leave the "
                "optimizer out: the gradients are then clipped in place, in one launch"
            )
    held = [one for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]]
    owned, reduced = set(map(id, held)), {id(one) for _, one in named}
    remedy = "Give the optimizers that own exactly the wrapper's parameters, or leave them out to clip in place"
    if len(owned) < len(held):
        raise ValueError(f"the optimizers share parameters, whose gradients would be clipped twice. {remedy}")
    missing = [name for name, one in named if id(one) not in owned]
    if missing:
        raise ValueError(
            f"{len(missing)} of the wrapper's parameters are in no optimizer: {', '.join(missing[:4])}. {remedy}"
        )
    foreign = [tuple(one.shape) for one in held if one.requires_grad and id(one) not in reduced]
    if foreign:
        raise ValueError(
            f"the optimizers own {len(foreign)} parameters that are not the wrapper's, the first one of shape "
            f"{foreign[0]}: their gradients would be scaled by a norm that they are no part of. {remedy}"
        )
