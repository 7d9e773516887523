"""Steps that are launched and not completed: where autograd's thread must not wait, the calling thread does, later.

All backwards of a CUDA device run on one thread. A hook or callback there that waited for a peer on the same device
would keep that peer from ever coming. So such a step ends its backward with all collectives under way, and whoever
needs the gradients next completes it. Who that may be in a plain loop is an optimizer: one global hook sees to it.
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

from .errors import FusedReduceError


class Launched(Protocol):
    """A reducer, as far as this goes."""

    @property
    def parameters(self) -> Sequence[torch.Tensor]:
        """Whose gradients are under way."""
        ...

    def finalize(self) -> None:
        """Completes the step."""
        ...


_lock = threading.Lock()
_reducers: weakref.WeakSet[Launched] = weakref.WeakSet()
_waiting: weakref.WeakSet[Launched] = weakref.WeakSet()
_hook: RemovableHandle | None = None


def enter(reducer: Launched) -> None:
    """A reducer whose steps may be launched and not completed: every optimizer of this process looks from now on."""
    global _hook
    with _lock:
        _reducers.add(reducer)
        if _hook is None:
            _hook = register_optimizer_step_pre_hook(_before_step)


def leave(reducer: Launched) -> None:
    """It is closed; with the last one goes the hook."""
    global _hook
    with _lock:
        _waiting.discard(reducer)
        _reducers.discard(reducer)
        if _hook is not None and not _reducers:
            _hook.remove()
            _hook = None


def note(reducer: Launched) -> None:
    """Its step is launched: the next step of an optimizer with one of its parameters completes it."""
    with _lock:
        _waiting.add(reducer)


def forget(reducer: Launched) -> None:
    """It is completed, or was given up."""
    with _lock:
        _waiting.discard(reducer)


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    closure = (args[1] if len(args) > 1 else kwargs.get("closure")) is not None
    with _lock:
        concerned = list(_reducers if closure else _waiting)
    if not concerned:
        return
    owned = {id(one) for group in optimizer.param_groups for one in group["params"]}
    for reducer in concerned:
        if any(id(one) in owned for one in reducer.parameters):
            if closure:
                raise FusedReduceError(
                    "step(closure): the closure's backward ends before its gradients are reduced, as ranks share an "
                    "autograd thread here, and the optimizer would read this rank's own. Call reducer.backward(loss) "
                    "and step() without a closure, or use a thread per rank on CPU"
                )
            reducer.finalize()


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
