"""Steps that are launched and not completed: where autograd's thread must not wait, the calling thread does, later.

All backwards of a CUDA device run on one thread. A hook or callback there that waited for a peer on the same device
would keep that peer from ever coming. So such a step ends its backward with all collectives under way, and whoever
needs the gradients next completes it. Who that may be in a plain loop is an optimizer: one global hook sees to it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook


class Launched(Protocol):
    """A reducer, as far as this goes."""

    parameters: Sequence[torch.Tensor]

    def finalize(self) -> None:
        """Completes the step."""
        ...


_lock = threading.Lock()
_waiting: weakref.WeakSet[Launched] = weakref.WeakSet()
_hooked = False


def note(reducer: Launched) -> None:
    """A reducer's step is launched: the next step of an optimizer with one of its parameters completes it."""
    global _hooked
    with _lock:
        _waiting.add(reducer)
        if not _hooked:
            register_optimizer_step_pre_hook(_before_step)
            _hooked = True


def forget(reducer: Launched) -> None:
    """It is completed, or was given up."""
    with _lock:
        _waiting.discard(reducer)


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not _waiting:
        return
    with _lock:
        waiting = list(_waiting)
    owned = {id(one) for group in optimizer.param_groups for one in group["params"]}
    for reducer in waiting:
        if any(id(one) in owned for one in reducer.parameters):
            reducer.finalize()
