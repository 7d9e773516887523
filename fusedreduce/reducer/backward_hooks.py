"""Hooks on a backward as a whole: how the reducer learns that one has begun at an output of forward, and has ended.

The end is told by a callback of the autograd engine. It is queued by a pre-hook on the outputs: what a parameter's hook
queues inside a reentrant checkpoint would run at the end of the inner backward, with gradients still to come. It is
queued by the last parameter's hook where no output was given or took part in the loss.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ..errors import FusedReduceError
from .step import Step


class BackwardHooks:
    """Tells a reducer where backwards begin and end. Graphs that outlive it do not keep it.

    Args:
        owner: held weakly.
        on_begin: called as on_begin(owner) on an autograd thread, before the backward has made any gradient.
        on_end: called as on_end(owner, step) when it has made all of them, those of the backwards around it too.
    """

    def __init__(self, owner: object, on_begin: Callable[[Any], None], on_end: Callable[[Any, Step], None]) -> None:
        self._owner = weakref.ref(owner)
        self._on_begin = on_begin
        self._on_end = on_end
        self._watched: list[RemovableHandle] = []

    def watch(self, outputs: Sequence[torch.Tensor]) -> bool:
        """Has us told when a backward begins at one of `outputs`, and at no earlier ones; says whether one can."""
        begin = self._told(self._on_begin)
        for handle in self._watched:
            handle.remove()
        functions = {output.grad_fn for output in outputs if output.grad_fn is not None}
        self._watched = [function.register_prehook(begin) for function in functions]
        return bool(functions)

    def watch_also(self, outputs: Sequence[torch.Tensor], on_begin: Callable[[Any], None]) -> bool:
        """Has on_begin(owner) called when a backward begins at one of `outputs`, besides; says whether one can."""
        functions = {output.grad_fn for output in outputs if output.grad_fn is not None}
        begin = self._told(on_begin)
        for function in functions:
            function.register_prehook(begin)
        return bool(functions)

    def _told(self, on_begin: Callable[[Any], None]) -> Callable[[object], None]:
        alive = self._owner

        def begin(_: object) -> None:
            owner = alive()
            if owner is not None:
                on_begin(owner)

        return begin

    def queue_end(self, step: Step) -> None:
        """Has us told when the backward ends that this thread runs; once, however often it is called in one."""
        task = torch._C._current_graph_task_id()
        if step.callbacks == 0 or task != step.task:
            step.callbacks += 1
            step.task = task
            # Kept until then, by the engine alone.
            owner, on_end = self._owner(), self._on_end
            assert owner is not None, "called by it"

            def end() -> None:
                step.callbacks -= 1
                on_end(owner, step)

            torch.autograd.Variable._execution_engine.queue_callback(end)


def refuse_compiled_autograd(rank: int) -> None:
    """Raises where the backward that runs is compiled autograd's, which has no such callbacks, and traces hooks.

    Args:
        rank: for the message.

    Raises:
        FusedReduceError: it is.
    """
    if torch._dynamo.compiled_autograd.in_compiled_autograd_region:
        raise FusedReduceError(
            f"rank {rank}: compiled autograd cannot run a backward that fusedreduce reduces, as it cannot with torch's "
            "own DistributedDataParallel. Leave torch._dynamo.config.compiled_autograd off, or call backward outside "
            "of what torch.compile compiles; the forward may be compiled"
        )
