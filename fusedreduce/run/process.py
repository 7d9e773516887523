"""The part of the command that runs inside the program: installs the wrapper, and prints rank 0's lines about it."""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import statistics
import sys
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from fusedreduce.buckets.wire_table import WireTable
from fusedreduce.parallel import install
from fusedreduce.parallel.wrapper_reducer import reducer_of
from fusedreduce.reducer.plans import Forecast
from fusedreduce.reducer.reducer import Reducer
from fusedreduce.reducer.state import ReducerState
from fusedreduce.wires import wire_bytes

from . import options

_LEAST_LOSS = 0.01  # share of a step; the planner's model is no more accurate than that
# Plans settle in so many steps, and a median is told of at least so many behind them.
_SETTLING, _FEWEST_TIMED = 32, 16
_CHOOSING = 66  # steps until a wire is chosen
_BEHIND = f"the first {_SETTLING}"
_MOST_TRACED = 100  # as --help says
_begun = False


def method_for(name: str, torchs: Callable[..., Any]) -> Callable[..., Any]:
    """What is called in place of `torchs`, as site/sitecustomize.py has arranged; the first call installs us.

    Args:
        name: of a method of torch's class.
        torchs: torch's.
    """
    global _begun
    if not _begun:
        _begun = True
        asked = options.read(os.environ)
        if not install.is_decided():  # else the program has called install() or uninstall() itself
            install.activate(PrintingInstallation(asked))
    return install.method_for(name, torchs)


class Timed(NamedTuple):
    """Times of successive steps of one reducer, each from its forward to the next one's: of those that were followed.

    Args:
        first: number of the first of them, counted from 1.
        took_ns: their times.
        behind: what was left out before them, in words.
    """

    first: int
    took_ns: Sequence[int]
    behind: str = _BEHIND


class Ended(NamedTuple):
    """Totals of one reducer.

    Args:
        steps: number of synchronised steps.
        ranks: size of its group.
        native_bytes: of all gradients of a step, in their own dtype.
        sent_bytes: of what was sent for them in all steps; None: a comm hook decided.
        forecast: see `Reducer.forecast`.
        timed: its latest steps, without those in which plans change.
        choice: what steps have chosen of several wires; "": one was given.
    """

    steps: int
    ranks: int
    native_bytes: int
    sent_bytes: int | None
    forecast: Forecast | None
    timed: Timed
    choice: str = ""


class PrintingInstallation(install.Installation):
    """An installation of which rank 0 prints on stderr: the first wrapper, options that were dropped, and totals.

    Every rank records the first steps of its first wrapper, if that is asked for.

    Args:
        asked: the command's options.
    """

    def __init__(self, asked: options.Options) -> None:
        super().__init__(asked.config, asked.fallback)
        self._quiet = asked.quiet
        self._folder = asked.trace
        self._is_first = os.environ.get("RANK", "0") == "0"
        self._forget()

    def _forget(self) -> None:
        """Begins with no wrapper, in a new process: another one's are for that one to tell of."""
        self._process = os.getpid()
        self._live: list[weakref.finalize[..., Any]] = []
        self._known: weakref.WeakSet[Reducer] = weakref.WeakSet()
        self._ended: list[Ended] = []
        self._recorded: weakref.ref[Reducer] | None = None
        self._recording = contextlib.ExitStack()
        self._has_trace = False
        # Unlike atexit, this also runs in processes that multiprocessing forks; it forgets those of the one it forked.
        Finalize(None, self.at_end, exitpriority=100)

    def wrapped(self, made: TorchDDP) -> None:
        """Prints about the first wrapper. Each reducer is kept until its wrapper is freed, for its counters."""
        if self._process != os.getpid():
            self._forget()
        reducer = reducer_of(made)
        if reducer in self._known:  # called already, when the constructor registered a comm hook
            return
        self._known.add(reducer)
        if reducer.choice is not None:
            reducer.choice.told = self.say
        first, self._is_first = not self._live, self._is_rank_0()
        end = weakref.finalize(made, self._note, reducer)
        end.atexit = False
        self._live.append(end)
        if self._folder is not None:
            self._record(reducer, self._folder)
        if first:
            self.say(first_line(type(made.module).__name__, reducer))

    def say(self, text: str) -> None:
        """Prints on stderr of rank 0, unless --quiet."""
        if not self._quiet:
            self.warn(text)

    def warn(self, text: str) -> None:
        """Prints on stderr of rank 0."""
        if self._is_rank_0():
            _print(text)

    def _is_rank_0(self) -> bool:
        """Whether this is rank 0 of the default group; if there is none now: of the last one, or by RANK."""
        return dist.get_rank() == 0 if dist.is_initialized() else self._is_first

    def _record(self, reducer: Reducer, folder: Path) -> None:
        """Records the steps of the first reducer, or of the one that is made in its place for a comm hook."""
        before = None if self._recorded is None else self._recorded()
        if self._recorded is None or (before is not None and before.state is ReducerState.CLOSED):
            if before is not None:
                self._end_recording(before)
            self._recorded = weakref.ref(reducer)
            _clear(folder, reducer.communicator.rank, reducer.communicator.size)
            self._recording.enter_context(reducer.record_trace(folder, _MOST_TRACED))

    def _end_recording(self, reducer: Reducer) -> None:
        """Writes what this rank has recorded, if it has not been written."""
        try:
            self._recording.close()
            self._has_trace = reducer.steps > 0
        except OSError as error:
            _print(f"rank {reducer.communicator.rank} could not write its trace: {error}")

    def _note(self, reducer: Reducer) -> None:
        if reducer not in self._known:  # of the process that forked this one
            return
        if self._recorded is not None and self._recorded() is reducer:
            self._end_recording(reducer)
        if self._is_first and reducer.steps:
            native, _ = _bytes(reducer, reducer.wires.table)
            sent = None if reducer.has_comm_hook else sent_bytes(reducer)
            ranks, forecast = reducer.communicator.size, reducer.forecast()
            timed = _timed(reducer)
            self._ended.append(Ended(reducer.steps, ranks, native, sent, forecast, timed, _choice(reducer, timed)))

    def at_end(self) -> None:
        """Says the last line; called at the end of the process."""
        for end in self._live:
            alive = end.detach()  # calling it does nothing any more: weakref's own exit function has run
            if alive is not None:
                self._note(*alive[2])
        ended, self._ended = self._ended, []
        if ended and not self._quiet:
            _print(last_line(ended))
            if self._has_trace:
                told = shlex.quote(str(self._folder))
                _print(f"the first steps of every rank are in {self._folder}: fusedreduce trace {told}")


def _clear(folder: Path, rank: int, ranks: int) -> None:
    """Removes what an earlier run has left: this rank's trace, and those of ranks that there are not now.

    Each rank does so when it begins to record; so none removes what another one of this run has written.
    """
    with contextlib.suppress(OSError):  # a folder that cannot be written to is told of when this run's trace is written
        for file in folder.glob("rank*.json"):
            number = file.stem.removeprefix("rank")
            if number.isdecimal() and (int(number) == rank or int(number) >= ranks):
                file.unlink(missing_ok=True)


def first_line(module: str, reducer: Reducer) -> str:
    """The line about the first wrapper: what is sent, and which options have no effect."""
    config, ranks = reducer.config, reducer.communicator.size
    native, sent = _bytes(reducer, reducer.wires.agreed)
    parts = [f"wire {config.wire_text}", f"policy {config.policy}"]
    if ranks == 1:
        rounded = "" if sent == native else f", though gradients are rounded to {config.wire_text}"
        parts.append(f"nothing is sent{rounded}")
    else:
        instead = f" instead of {_amount(native)}" if sent != native else ""
        parts.append(f"{_amount(sent)} of gradients a step{instead}")
    if reducer.choice is not None:
        held, why = reducer.choice.held, reducer.choice.why
        parts.append(f"{held} throughout" if why else f"steps choose one, {held} first")
    if config.wire_after and reducer.wires.agreed.encoded:
        parts.append(f"the first {config.wire_after} at bf16")
    if reducer.find_unused_parameters and not reducer.static_graph:
        parts.append("no bucket plan is learned, because of find_unused_parameters=True")
    if reducer.gradient_as_bucket_view and not reducer.has_views:
        parts.append(f"gradient_as_bucket_view=True has no effect, because wire {config.wire_text} has no views")
    return f"{module} on {ranks} rank{'s' if ranks > 1 else ''}: {', '.join(parts)}"


def last_line(ended: Sequence[Ended]) -> str:
    """The line with the totals of all reducers of this process."""
    steps = sum(one.steps for one in ended)
    parts = [f"{steps} step{'s' if steps > 1 else ''}" + (f" of {len(ended)} reducers" if len(ended) > 1 else "")]
    longest = max(ended, key=lambda one: one.steps)
    parts.append(_step_time(longest.timed, " of the reducer with most" if len(ended) > 1 else ""))
    if longest.choice:
        parts.append(longest.choice)
    sums = [one for one in ended if one.sent_bytes is not None and one.ranks > 1]
    native, sent = sum(one.steps * one.native_bytes for one in sums), sum(one.sent_bytes or 0 for one in sums)
    if sums and native != sent:
        parts.append(f"{_amount(sent)} of gradients sent instead of {_amount(native)} ({1 - sent / native:.0%} less)")
    elif sums:
        parts.append(f"{_amount(sent)} of gradients sent, in their own dtype")
    if any(one.sent_bytes is None for one in ended):
        parts.append("a comm hook decided what was sent")
    if longest.forecast is not None:
        backward, finish, theirs = longest.forecast
        parts.append(f"{1 - backward / finish:.0%} of backward and reduction exposed, by the planner's model")
        if finish - theirs > _LEAST_LOSS * finish:
            parts.append(f"by that model torch's own class may be up to {finish - theirs:.1f} ms a step faster here")
    return "; ".join(parts)


def _timed(reducer: Reducer) -> Timed:
    """The latest steps of a reducer on the wires that it was given, without the first of those."""
    forwards = list(reducer.engine.forwards)
    before = reducer.steps - len(forwards)
    at_16_bits = reducer.wires.steps_at_16_bits if reducer.wires.agreed.encoded else 0
    times = reducer.wire_times()
    chosen = (0 if times is None else times.since) or 0
    left_out = max(before, at_16_bits + _SETTLING, chosen)
    behind = f"{at_16_bits} at bf16 and {_SETTLING} more" if at_16_bits else _BEHIND
    if chosen == left_out:
        behind = f"step {chosen}, where a wire was chosen"
    took_ns = [end - begin for begin, end in itertools.pairwise(forwards[left_out - before :])]
    return Timed(left_out + 1, took_ns, behind)


def _choice(reducer: Reducer, timed: Timed) -> str:
    """The wire that steps have chosen, what it saves, and what the next smaller one should save."""
    choice, times = reducer.choice, reducer.wire_times()
    if choice is None or times is None:
        return ""
    if times.why:
        return f"wire {times.wire}: {times.why}"
    if times.since is None:
        return f"wire {times.wire}: none was chosen, for the run ended while {times.stage} (about {_CHOOSING} steps)"
    first, took_ms = next(iter(times.measured_ms), times.wire), times.measured_ms
    saved = ", the first of the wires that were tried"
    if first != times.wire:
        saved_ms = took_ms[first] - took_ms[times.wire]
        saved = f", {saved_ms:.2f} ms a step less than {first}"
        if len(timed.took_ns) >= _FEWEST_TIMED:
            saved += f", {saved_ms / (saved_ms + statistics.median(timed.took_ns) / 1e6):.0%}"
    told = f"wire {times.wire} from step {times.since + 1} on{saved} (--wire {times.wire} repeats it)"
    return told + choice.smaller


def _step_time(timed: Timed, whose: str) -> str:
    first, took_ns, behind = timed
    count = len(took_ns)
    if count < _FEWEST_TIMED:
        counted = f"{count} step{' was' if count == 1 else 's were'} timed"
        return f"no step time: {counted} behind {behind}, and {_FEWEST_TIMED} are needed"
    return f"median step {statistics.median(took_ns) / 1e6:.2f} ms (steps {first} to {first + count - 1}{whose})"


def sent_bytes(reducer: Reducer) -> int:
    """Bytes of all dense gradients of all steps: on each of several wires, or before and since `wire_after`."""
    if reducer.choice is not None:
        tables, counted = reducer.choice.tables, reducer.choice.steps_on
        others = max(reducer.steps - counted.total(), 0) * _bytes(reducer, reducer.choice.table)[1]
        return sum(steps * _bytes(reducer, tables[wire])[1] for wire, steps in counted.items()) + others
    agreed, now = reducer.wires.agreed, reducer.wires.table
    before = min(reducer.steps, reducer.wires.steps_at_16_bits)  # steps without inputs count among the latter alone
    _, at_16_bits = _bytes(reducer, agreed.with_wire("bf16", agreed.encoded))
    return before * at_16_bits + (reducer.steps - before) * _bytes(reducer, now)[1]


def _bytes(reducer: Reducer, wires: WireTable) -> tuple[int, int]:
    """Bytes of all dense gradients of one step, in their own dtype and on `wires`."""
    rows = zip(reducer.parameters, reducer.sparse, wires.wires, strict=True)
    dense = [(one, wire) for one, sparse, wire in rows if not sparse]
    return sum(one.numel() * one.element_size() for one, _ in dense), sum(wire_bytes(*one) for one in dense)


def _amount(size_bytes: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.2f} {unit}"
    return f"{size_bytes / 1e3:.2f} kB"


def _print(text: str) -> None:
    # stderr may be closed, or a pipe that nobody reads any more.
    with contextlib.suppress(OSError, ValueError):
        print(f"fusedreduce: {text}", file=sys.stderr, flush=True)
