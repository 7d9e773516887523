"""Within the program: what is installed there, and the lines that rank 0 prints about it."""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from fusedreduce.parallel import install as installed
from fusedreduce.reducer.plans import Forecast
from fusedreduce.reducer.reducer import Reducer

from . import options

# Of a step: a smaller share is no loss that the planner's model could tell.
_LEAST_LOSS = 0.01
_begun = False


def initialise(
    placed: Callable[..., None], torch_init: Callable[..., None], made: TorchDDP, args: Any, kwargs: Any
) -> None:
    """What stands in the place of torch's `__init__`."""
    global _begun
    if not _begun:
        _begun = True
        asked = options.read(os.environ)
        if not installed.is_decided():  # what the program itself says counts
            installed.hold(placed, torch_init, Told(asked))
    installed.initialise(torch_init, made, args, kwargs)


class Ended(NamedTuple):
    """What a reducer has done.

    Args:
        steps: synchronised ones.
        ranks: of its group.
        native_bytes: of gradients in a step, in their own dtype.
        wire_bytes: of what travels in their place; None: a comm hook decides.
        forecast: see `Reducer.forecast`.
    """

    steps: int
    ranks: int
    native_bytes: int
    wire_bytes: int | None
    forecast: Forecast | None


class Told(installed.Installation):
    """An installation that rank 0 tells of on stderr: the first wrapper, what was dropped, and what came of it.

    Args:
        asked: the command's options.
    """

    def __init__(self, asked: options.Options) -> None:
        super().__init__(asked.config, asked.fallback)
        self._quiet = asked.quiet
        self._is_first = os.environ.get("RANK", "0") == "0"
        self._live: list[weakref.finalize[..., Any]] = []
        self._told: weakref.WeakSet[Reducer] = weakref.WeakSet()
        self._ended: list[Ended] = []
        # Unlike what atexit is given this also runs in processes that multiprocessing forks.
        Finalize(None, self._at_end, exitpriority=100)

    def wrapped(self, made: installed.DistributedDataParallel) -> None:
        """Says so of the first one. Each reducer is held as long as its wrapper, for what it has counted."""
        reducer = made._ours()
        if reducer in self._told:  # a hook that the constructor registers has been here
            return
        self._told.add(reducer)
        first, self._is_first = not self._live, self._is_rank_0()
        end = weakref.finalize(made, self._note, reducer)
        end.atexit = False
        self._live.append(end)
        if first:
            self.say(first_line(type(made.module).__name__, reducer))

    def say(self, text: str) -> None:
        """On stderr of rank 0, unless --quiet."""
        if not self._quiet:
            self.warn(text)

    def warn(self, text: str) -> None:
        """On stderr of rank 0."""
        if self._is_rank_0():
            _print(text)

    def _is_rank_0(self) -> bool:
        """Of the default group; as it was, or as the environment has it, where there is none (any more)."""
        return dist.get_rank() == 0 if dist.is_initialized() else self._is_first

    def _note(self, reducer: Reducer) -> None:
        if self._is_first and reducer.steps:
            native, sent = _bytes(reducer)
            ranks, forecast = reducer.communicator.size, reducer.forecast()
            self._ended.append(Ended(reducer.steps, ranks, native, None if reducer.has_comm_hook else sent, forecast))

    def _at_end(self) -> None:
        for end in self._live:
            alive = end.detach()  # a call would do nothing: weakref's own exit function has run by now
            if alive is not None:
                self._note(*alive[2])
        ended, self._ended = self._ended, []
        if ended and not self._quiet:
            _print(last_line(ended))


def first_line(module: str, reducer: Reducer) -> str:
    """Of the first wrapper: what travels, and which wishes are not followed."""
    config, ranks = reducer.config, reducer.communicator.size
    native, sent = _bytes(reducer)
    parts = [f"wire {config.wire}", f"policy {config.policy}"]
    if ranks == 1:
        rounded = "" if sent == native else f", though gradients are rounded to {config.wire}"
        parts.append(f"nothing travels{rounded}")
    else:
        parts.append(f"{_amount(sent)} of gradients a step" + (f" for {_amount(native)}" if sent != native else ""))
    if reducer.find_unused_parameters and not reducer.static_graph:
        parts.append("no plan is learned, because of find_unused_parameters=True")
    if reducer.gradient_as_bucket_view and not reducer.has_views:
        parts.append(f"gradient_as_bucket_view=True is dropped, because wire {config.wire} has no views")
    return f"{module} on {ranks} rank{'s' if ranks > 1 else ''}: {', '.join(parts)}"


def last_line(ended: Sequence[Ended]) -> str:
    """What all reducers of this process have done."""
    steps = sum(one.steps for one in ended)
    parts = [f"{steps} step{'s' if steps > 1 else ''}" + (f" of {len(ended)} reducers" if len(ended) > 1 else "")]
    sums = [one for one in ended if one.wire_bytes is not None and one.ranks > 1]
    native, sent = (
        sum(one.steps * one.native_bytes for one in sums),
        sum(one.steps * (one.wire_bytes or 0) for one in sums),
    )
    if sums and native != sent:
        parts.append(f"{_amount(sent)} of gradients travelled for {_amount(native)} ({1 - sent / native:.0%} less)")
    elif sums:
        parts.append(f"{_amount(sent)} of gradients travelled, in their own dtype")
    if any(one.wire_bytes is None for one in ended):
        parts.append("a comm hook decided what travelled")
    longest = max(ended, key=lambda one: one.steps)
    if longest.forecast is not None:
        backward, finish, theirs = longest.forecast
        parts.append(f"{1 - backward / finish:.0%} of backward and reduction exposed, by the planner's model")
        if finish - theirs > _LEAST_LOSS * finish:
            parts.append(f"by which torch's own class may be up to {finish - theirs:.1f} ms a step faster here")
    return "; ".join(parts)


def _bytes(reducer: Reducer) -> tuple[int, int]:
    """Of all dense gradients in one step: in their own dtype, and on the wire."""
    dense = [one for one, sparse in zip(reducer.parameters, reducer.sparse, strict=True) if not sparse]
    return sum(one.numel() * one.element_size() for one in dense), sum(map(reducer.config.wire_bytes, dense))


def _amount(size_bytes: int) -> str:
    for unit, one in (("GB", 1e9), ("MB", 1e6)):
        if size_bytes >= one:
            return f"{size_bytes / one:.2f} {unit}"
    return f"{size_bytes / 1e3:.2f} kB"


def _print(text: str) -> None:
    """Where stderr is closed, or whoever read it has gone, nothing is said."""
    with contextlib.suppress(OSError, ValueError):
        print(f"fusedreduce: {text}", file=sys.stderr, flush=True)
