"""Hooks on a backward as a whole: they call the reducer when it begins at an output of forward, and when it has ended.

The end is a callback of the autograd engine. A pre-hook on the outputs queues it, because a callback that a parameter's
hook queues inside a reentrant checkpoint runs at the end of the inner backward, when gradients are still to come. Where
no output was given, or none is part of the loss, the last parameter's hook queues it.
"""

from __future__ import annotations

import functools
import operator
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ..buckets.deferred_errors import raise_last
from ..errors import CollectiveError, FusedReduceError
from .step import Step


class BackwardHooks:
    """Calls a reducer where backwards begin and end. Graphs that outlive the reducer do not keep it alive.

    Args:
        owner: the reducer; referenced weakly.
        on_begin: called as on_begin(owner) on an autograd thread, before the backward has made any gradient.
        on_end: called as on_end(owner, step) when the backward, and those around it, have made all gradients.
    """

    def __init__(self, owner: object, on_begin: Callable[[Any], None], on_end: Callable[[Any, Step], None]) -> None:
        self._owner = weakref.ref(owner)
        self._begin = functools.partial(_call, self._owner, on_begin)
        self._on_end = on_end
        self._watched: list[RemovableHandle] = []

    def watch(self, outputs: Sequence[torch.Tensor]) -> bool:
        """Calls `on_begin` when a backward begins at one of `outputs`, and no longer at earlier ones.

        Returns:
            Whether a backward can begin at one of them.
        """
        for handle in self._watched:
            handle.remove()
        functions = dict.fromkeys(map(_grad_fn, outputs))
        self._watched = [one.register_prehook(self._begin) for one in functions if one is not None]
        return bool(self._watched)

    def watch_also(self, outputs: Sequence[torch.Tensor], on_begin: Callable[[Any], None]) -> bool:
        """Calls on_begin(owner), in addition, when a backward begins at one of `outputs`; returns whether one can."""
        functions = dict.fromkeys(map(_grad_fn, outputs))
        begin = functools.partial(_call, self._owner, on_begin)
        return bool([one.register_prehook(begin) for one in functions if one is not None])

    def queue_end(self, step: Step) -> None:
        """Queues `on_end` for the end of the backward that this thread runs, once per backward."""
        task = torch._C._current_graph_task_id()
        if step.callbacks == 0 or task != step.task:
            step.callbacks += 1
            step.task = task
            owner, on_end = self._owner(), self._on_end  # until then the engine alone keeps the owner alive
            assert owner is not None, "the owner calls this"

            def end() -> None:
                step.callbacks -= 1
                try:
                    on_end(owner, step)
                except CollectiveError:  # no other reducer of these ranks can go on
                    raise
                except Exception as error:
                    # The engine runs no callback behind one that raises, and peers wait for those of other reducers.
                    raise_last(error)

            torch.autograd.Variable._execution_engine.queue_callback(end)


def _call(alive: weakref.ref[Any], on_begin: Callable[[Any], None], _: object) -> None:
    owner = alive()
    if owner is not None:
        on_begin(owner)


_grad_fn = operator.attrgetter("grad_fn")


def refuse_compiled_autograd(rank: int) -> None:
    """Refuses a backward under compiled autograd, which traces hooks and has no callbacks at its end.

    Args:
        rank: for the message.

    Raises:
        FusedReduceError: compiled autograd runs this backward.
    """
    compiled_autograd = sys.modules.get("torch._dynamo.compiled_autograd")  # to import it takes a second
    if compiled_autograd is not None and compiled_autograd.in_compiled_autograd_region:
        raise FusedReduceError(
            f"rank {rank}: compiled autograd runs this backward, and fusedreduce cannot reduce its gradients (nor can "
            "torch's own DistributedDataParallel). Set torch._dynamo.config.compiled_autograd = False, or call "
            "backward() outside of the compiled function; the forward may be compiled"
        )
