"""Optimizer steps, as far as reducers must know of them: one hook on all optimizers, while a reducer needs it.

Steps that are launched and not completed: all backwards of a CUDA device run on one thread, so a hook or callback there
that waited for a peer on the same device would keep that peer from ever coming. Such a step ends its backward with all
collectives under way, and whoever needs the gradients next completes it. In a plain loop that is an optimizer.

Averages that come later than their own step: `flush` must not hand those out again that an optimizer has stepped with.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle


class Attends(Protocol):
    """A reducer, as far as this goes."""

    @property
    def parameters(self) -> Sequence[torch.Tensor]:
        """Whose gradients it reduces."""
        ...

    def before_optimizer_step(self, *, closure: bool) -> None:
        """An optimizer with one of its parameters is about to step."""
        ...


_lock = threading.Lock()
# In the order in which they entered, which is the same on every rank: completing a step may issue collectives.
_attending: weakref.WeakKeyDictionary[Attends, None] = weakref.WeakKeyDictionary()
_hook: RemovableHandle | None = None


def enter(reducer: Attends) -> None:
    """`reducer` is told from now on; every optimizer of this process looks for it then."""
    global _hook
    with _lock:
        _attending.setdefault(reducer)
        if _hook is None:
            _hook = register_optimizer_step_pre_hook(_before_step)


def leave(reducer: Attends) -> None:
    """It is told no more; with the last one goes the hook."""
    global _hook
    with _lock:
        _attending.pop(reducer, None)
        if _hook is not None and not _attending:
            _hook.remove()
            _hook = None


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with _lock:
        attending = list(_attending)
    closure = (args[1] if len(args) > 1 else kwargs.get("closure")) is not None
    owned = {id(one) for group in optimizer.param_groups for one in group["params"]} if attending else set()
    for reducer in attending:
        if any(id(one) in owned for one in reducer.parameters):
            reducer.before_optimizer_step(closure=closure)


def flush_step(
    optimizers: Sequence[Optimizer], step: Callable[[], None] | None, *, scaled: bool
) -> Callable[[], None] | None:
    """What `flush` calls after each landing.

    Args:
        optimizers: to step; their gradients are None then.
        step: in their place.
        scaled: a loss scaler takes part.

    Raises:
        TypeError: an optimizer that is none.
        ValueError: both are given, or optimizers where a loss scaler must decide on their steps.
    """
    for one in optimizers:
        if not isinstance(one, Optimizer):
            raise TypeError(f"flush takes torch.optim.Optimizers, got {type(one).__name__}")
    if not optimizers:
        return step
    if step is not None:
        raise ValueError("flush takes optimizers or step=, not both")
    if scaled:
        raise ValueError(
            "flush(optimizer) would step with gradients that may have overflowed: with FusedGradScaler give "
            "step=..., which calls scaler.step(optimizer), scaler.update() and optimizer.zero_grad()"
        )

    def all_step() -> None:
        for one in optimizers:
            one.step()
            one.zero_grad(set_to_none=True)

    return all_step
