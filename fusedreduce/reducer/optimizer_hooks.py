"""The pre-hook on optimizer steps: one hook on all optimizers, while a reducer needs it.

A reducer needs it in two cases.

Steps that are launched and not completed: all backwards of a CUDA device run on one thread, so a hook or callback there
that waited for a peer on the same device would wait for ever. Such a step ends its backward with all collectives in
flight, and the next reader of the gradients completes it: in a plain loop that is the optimizer.

Averages that come later than their own step: `flush` must not apply those again that an optimizer has stepped with.
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


class StepListener(Protocol):
    """A reducer that is called before optimizer steps."""

    @property
    def parameters(self) -> Sequence[torch.Tensor]:
        """The parameters whose gradients it reduces."""
        ...

    def before_optimizer_step(self, *, closure: bool) -> None:
        """Called before an optimizer with one of its parameters steps; `closure`: step() was given one."""
        ...


_lock = threading.Lock()
# In the order in which they entered, which is the same on every rank: completing a step may issue collectives.
_listeners: weakref.WeakKeyDictionary[StepListener, None] = weakref.WeakKeyDictionary()
_hook: RemovableHandle | None = None


def enter(reducer: StepListener) -> None:
    """Registers `reducer`, to be called before optimizer steps; the first one installs the hook."""
    global _hook
    with _lock:
        _listeners.setdefault(reducer)
        if _hook is None:
            _hook = register_optimizer_step_pre_hook(_before_step)


def leave(reducer: StepListener) -> None:
    """Unregisters `reducer`; the last one removes the hook."""
    global _hook
    with _lock:
        _listeners.pop(reducer, None)
        if _hook is not None and not _listeners:
            _hook.remove()
            _hook = None


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with _lock:
        listeners = list(_listeners)
    closure = (args[1] if len(args) > 1 else kwargs.get("closure")) is not None
    owned = {id(one) for group in optimizer.param_groups for one in group["params"]} if listeners else set()
    for reducer in listeners:
        if any(id(one) in owned for one in reducer.parameters):
            reducer.before_optimizer_step(closure=closure)


def flush_step(
    optimizers: Sequence[Optimizer], step: Callable[[], None] | None, *, scaled: bool, both: bool = False
) -> Callable[[], None] | None:
    """What `flush` calls after each step that it applies.

    Args:
        optimizers: to step; their gradients are then set to None.
        step: called in their place.
        scaled: a loss scaler is attached.
        both: `step` may be given beside `optimizers`, and is called in their place.

    Returns:
        The function; None: neither is given.

    Raises:
        TypeError: one of `optimizers` is not a torch.optim.Optimizer.
        ValueError: both are given and not `both`, or optimizers where a loss scaler must decide on their steps.
    """
    for one in optimizers:
        if not isinstance(one, Optimizer):
            raise TypeError(f"flush takes torch.optim.Optimizers, got {type(one).__name__}")
    if not optimizers or (both and step is not None):
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
