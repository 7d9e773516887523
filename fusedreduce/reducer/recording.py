"""Recording: keeps the profiles of a reducer's steps while a trace is recorded, and writes the trace file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from ..errors import FusedReduceError
from ..planning.plan import Plan
from ..planning.timeline import MISSING_NS
from ..trace.recorder import Recorder, Source
from ..trace.step_profile import StepProfile
from .plans import Plans


class Recording:
    """One trace of a reducer, from `record` on.

    Args:
        plans: describes parameters and settings for the trace.
        source: "reducer" or "wrapper", as the trace names it.
        folder: folder of this rank's file.
        limit: number of steps after which no more are kept.

    Attributes:
        error: why the file could not be written while steps went on.
    """

    def __init__(self, plans: Plans, source: Source, folder: str | Path, limit: int) -> None:
        self._plans = plans
        self._limit = limit
        self._new = lambda: Recorder(Path(folder), plans.trace_header(source), limit)
        self._recorder: Recorder | None = self._new()  # None: written
        self._recorded: list[tuple[int, Plan, StepProfile]] = []
        self._process = os.getpid()
        self._over = False
        self.error: OSError | None = None

    def wants_step(self) -> bool:
        """Whether another step would be kept, and so is to be profiled."""
        return len(self._recorded) < self._limit and not self._over and self._recorder is not None

    def new_group(self) -> None:
        """Follows other ranks: no further step is kept, as a trace is of one group."""
        self._over = True

    def follow_wires(self) -> None:
        """Begins anew, with other wires: a trace is of one, and keeps the latest."""
        if self.wants_step():
            self._recorded = []
            try:
                self._recorder = self._new()
            except OSError as error:  # as in `begin_step`
                self._recorder, self.error = None, error

    def keep(self, step: int, plan: Plan, looked: StepProfile) -> None:
        """Keeps a profiled step, if the limit is not reached."""
        if self.wants_step():
            self._recorded.append((step, plan, looked))

    def begin_step(self) -> bool:
        """Called before a step; returns whether it would be kept.

        If none will be any more, the file is written now: the program may be killed before it ends.
        """
        if not self.wants_step():
            try:
                self.write()
            except OSError as error:  # on this rank alone, maybe: the training goes on
                self.error = error
        return self._recorder is not None

    def write(self) -> None:
        """Writes what was kept, unless that was done already, or this process was forked from the one that records."""
        recorder, self._recorder = self._recorder, None
        recorded, self._recorded = self._recorded, []
        if recorder is None or os.getpid() != self._process:
            return
        # Here and not in each step, because on CUDA this waits for the GPU.
        for step, plan, looked in recorded:
            seen = MISSING_NS not in looked.ready_ns
            recorder.add(step, plan, looked.best_marks(), looked.ready_ns if seen else None)
        if self._over:
            recorder.write(None)
        else:
            scheduler = self._plans.scheduler
            recorder.write(scheduler.schedule.costs, scheduler.readiness.best().tolist())


class Records(Protocol):
    """The engine, as a trace sees it."""

    recording: Recording | None


@contextmanager
def record(engine: Records, plans: Plans, source: Source, folder: str | Path, limit: int) -> Iterator[None]:
    """Context in which the engine's steps are kept; they are written to a file when it is left, or before the first
    step that is not kept.

    Raises:
        FusedReduceError: a trace is being recorded already.
    """
    if engine.recording is not None:
        raise FusedReduceError("a trace is being recorded already: leave its record_trace() context first")
    engine.recording = recording = Recording(plans, source, folder, limit)
    try:
        yield
    finally:
        engine.recording = None
        recording.write()
    if recording.error is not None:  # (What has ended the context early says more.)
        raise recording.error
