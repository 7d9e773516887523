"""The fold: a divisor that the next step of torch's fused optimizers takes in, instead of a pass over the gradients.

torch's fused Adam, AdamW and SGD read an attribute that GradScaler sets around a step: gradients are divided by
`grad_scale`, and written back so. A pre-hook of `step` multiplies the divisor into what is there, a post-hook puts back
what was there. Both stay on the optimizer for good: a hook that took itself away while torch goes through them would
make that step raise after the weights have changed. What they fold is used once, and only as long as the gradients are
those that it was made for.

Found by trying torch 2.13 on CPU: `grad_scale` must be fp32; NaN and Inf in it do to gradients what division does; a
step that raises runs no post-hook, so the next thing that looks puts back what was there; optimizers lose their hooks
when they are copied, and keep them over load_state_dict.

What waits is for the gradients of its day. Where all of them are gone it is dropped; where others have taken the place
of some, or a backward has added to them, no one divisor is right, and the step is refused. What the user does to them
in place is divided with them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from ..errors import FusedReduceError

_MISSING = object()


class Clipped:
    """What has been done to one set of gradients since they were made.

    Args:
        generation: what gradients these are; another value once they are others.
        additions: another value once a backward has added to them.
    """

    def __init__(self, generation: Callable[[], object], additions: Callable[[], object]) -> None:
        self._generation = generation
        self._made_for = generation()
        self._additions = additions
        self._folded_at: object = None
        self.divisor: torch.Tensor | None = None  # 0-dim fp32; some optimizer has still to divide by it
        self.written = False  # `.grad` is not what backward left
        self._waiting: set[Folder] = set()
        self._some_stepped = False

    def is_current(self) -> bool:
        """Whether the gradients still are those that it was made for."""
        return self._generation() == self._made_for

    def check_again(self, optimizers: Sequence[Optimizer]) -> None:
        """Raises if these cannot be clipped once more: some optimizers have divided already and others not; or as
        `still_for`."""
        for folder in tuple(self._waiting):
            self.still_for(folder)
        given = {Folder.known(one) for one in optimizers}
        if self._waiting and (self._some_stepped or (given and given != self._waiting)):
            raise FusedReduceError(
                "these gradients were clipped before for optimizers that have not all stepped since: some gradients "
                "are clipped by now and some are not. Clip before the first of the optimizers steps, each time with "
                "the same ones"
            )

    def fold(self, optimizers: Sequence[Optimizer], divisor: torch.Tensor) -> None:
        """Has the next step of each divide its gradients by `divisor`, 0-dim, and by what waits already."""
        if self.divisor is not None:
            divisor = self.divisor * divisor
        self.divisor = divisor.to(torch.float32)
        self._some_stepped = False
        self._folded_at = self._additions()
        self._waiting = set()
        for one in optimizers:
            folder = Folder.of(one)
            folder.clipped, folder.meant = self, Gradients(one)
            self._waiting.add(folder)

    def still_for(self, folder: Folder) -> bool:
        """Whether an optimizer's gradients are those that its divisor waits for; if none of them is, it is dropped.

        Raises:
            FusedReduceError: some are, or a backward has added to them.
        """
        assert folder.meant is not None
        left, others = folder.meant.left()
        if others and not left:
            folder.clipped = folder.meant = None
            self._waiting.discard(folder)
            self.written = self._some_stepped = True
            if not self._waiting:
                self.divisor = None
            return False
        what = None
        if others:
            what = f"{others} of the {left + others} gradients are others now"
        elif self._additions() != self._folded_at:
            what = "a backward has added to the gradients"
        if what is not None:
            raise FusedReduceError(
                f"since clip_grad_norm_ left its coefficient for this optimizer's step, {what}: they cannot be divided "
                "by it. Call clip_grad_norm_ after the last change of gradients, or without the optimizer, to clip in "
                "place. To give this step up, zero_grad(set_to_none=True)"
            )
        return True

    def used(self, folder: Folder) -> None:
        """One optimizer has stepped."""
        self._waiting.discard(folder)
        self.written = self._some_stepped = True
        if not self._waiting:
            self.divisor = None


class Gradients:
    """Which tensors an optimizer's gradients are. Nothing is kept alive."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._seen = [
            (weakref.ref(one), None if one.grad is None else weakref.ref(one.grad))
            for group in optimizer.param_groups
            for one in group["params"]
        ]

    def left(self) -> tuple[int, int]:
        """How many are still there, and in how many places something else is."""
        left = others = 0
        for parameter, then in self._seen:
            held = parameter()
            now, was = None if held is None else held.grad, None if then is None else then()
            if now is was:
                left += now is not None
                others += now is None and then is not None  # both gone
            else:
                others += 1
        return left, others


class Folder:
    """The hooks of one optimizer, and what its next step folds in."""

    def __init__(self) -> None:
        self.clipped: Clipped | None = None
        self.meant: Gradients | None = None  # those that it is for
        self.in_closure = False  # maybe: a step with a closure has begun, and not come to its end
        self._mine: torch.Tensor | None = None
        self._before: object = _MISSING

    @classmethod
    def known(cls, optimizer: Optimizer) -> Folder | None:
        """The optimizer's, if it has one."""
        return _folders.get(optimizer)

    @classmethod
    def of(cls, optimizer: Optimizer) -> Folder:
        """The optimizer's, made and hooked the first time."""
        folder = cls.known(optimizer)
        if folder is None:
            folder = _folders[optimizer] = cls()
            optimizer.register_step_pre_hook(folder.before_step)
            optimizer.register_step_post_hook(folder.after_step)
        return folder

    def before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Multiplies the divisor into `grad_scale`.

        Raises:
            FusedReduceError: see `Clipped.still_for`.
            ValueError: a closure, and a divisor that waits.
            Both of them before anything has changed.
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
                "step(closure) would divide the closure's gradients by the coefficient of others, which "
                "clip_grad_norm_ has left for this step. Call clip_grad_norm_ within the closure"
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
        """Puts back what was there."""
        self.in_closure = False
        if self._mine is not None and self.clipped is not None:
            self.clipped.used(self)
        self.clipped = self.meant = None
        self.put_back(optimizer)

    def put_back(self, optimizer: Optimizer) -> None:
        """Undoes what a step has left, or one that raised; unless somebody else has written there since."""
        if self._mine is not None and vars(optimizer).get("grad_scale") is self._mine:
            if self._before is _MISSING:
                del optimizer.grad_scale  # type: ignore[attr-defined]
            else:
                optimizer.grad_scale = self._before  # type: ignore[attr-defined]
        self._mine, self._before = None, _MISSING


_folders: weakref.WeakKeyDictionary[Optimizer, Folder] = weakref.WeakKeyDictionary()


def can_wait(optimizers: Sequence[Optimizer]) -> bool:
    """Whether the next step of each will see what waits for it. From now on its steps are watched.

    Not within a step's closure, whose pre-hooks have been through; and whether an optimizer is in one we can't tell
    when we meet it for the first time. (After a step with a closure that raised, not before the next one.)
    """
    strangers = [one for one in optimizers if Folder.known(one) is None]
    folders = [Folder.of(one) for one in optimizers]
    for one, folder in zip(optimizers, folders, strict=True):
        folder.put_back(one)
    return not strangers and not any(folder.in_closure for folder in folders)


def check_can_fold(optimizers: Sequence[Optimizer], named: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Raises unless these optimizers divide by `grad_scale`, and own exactly these parameters, each once.

    Raises:
        ValueError: with what to do.
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
                f"the coefficient cannot be folded into {type(one).__name__}, which {why}. Leave the optimizer out: "
                "the gradients are clipped in place then, in one launch"
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
