"""Recording: keeps the profiles of a reducer's steps while a trace is recorded, and writes the trace file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import FusedReduceError
from ..planning.plan import Plan
from ..planning.timeline import MISSING_NS
from ..trace.recorder import Recorder, Source
from ..trace.step_profile import StepProfile
from .plans import Plans


class Recording:
    """The trace of one reducer, at most one at a time.

    Args:
        plans: describes parameters and settings for the trace.
        source: "reducer" or "wrapper", as the trace names it.

    Attributes:
        recorder: of the file that is still to be written; None: nothing is recorded.
    """

    def __init__(self, plans: Plans, source: Source) -> None:
        self._plans = plans
        self._source = source
        self._recorded: list[tuple[int, Plan, StepProfile]] = []
        self.recorder: Recorder | None = None
        self._process = 0  # that records
        self._limit = 0  # above 0 until the context is left
        self._over = False
        self._error: OSError | None = None

    def wants_step(self) -> bool:
        """Whether another step would be kept, and so is to be profiled."""
        return len(self._recorded) < self._limit and not self._over and self.recorder is not None

    def new_group(self) -> None:
        """Follows other ranks: no further step is kept, as a trace is of one group."""
        self._over = self._limit > 0

    def keep(self, step: int, plan: Plan, looked: StepProfile) -> None:
        """Keeps a profiled step, if the limit is not reached."""
        if self.wants_step():
            self._recorded.append((step, plan, looked))

    def begin_step(self) -> bool:
        """Called before a step while there is a `recorder`; returns whether the step would be kept.

        If none will be any more, the file is written now: the program may be killed before it ends.
        """
        if not self.wants_step():
            try:
                self._write()
            except OSError as error:  # on this rank alone, maybe: the training goes on
                self._error = error
        return self.recorder is not None

    @contextmanager
    def record(self, folder: str | Path, limit: int) -> Iterator[None]:
        """Context in which steps are kept; they are written to a file when it is left, or before the first step that is
        not kept.

        Args:
            folder: folder of this rank's file.
            limit: number of steps after which no more are kept.

        Raises:
            FusedReduceError: a trace is being recorded already.
        """
        if self._limit:
            raise FusedReduceError("a trace is being recorded already: leave its record_trace() context first")
        self.recorder = Recorder(Path(folder), self._plans.trace_header(self._source), limit)
        self._limit, self._process = limit, os.getpid()
        ended = False
        try:
            yield
            ended = True
        finally:
            self._limit = 0
            self._write()
            error, self._error = self._error, None
            if error is not None and ended:  # else what has ended the context says more
                raise error

    def _write(self) -> None:
        """Writes what was kept, unless that was done already, or this process was forked from the one that records."""
        recorder, self.recorder = self.recorder, None
        recorded, self._recorded = self._recorded, []
        over, self._over = self._over, False
        if recorder is None or os.getpid() != self._process:
            return
        # Here and not in each step, because on CUDA this waits for the GPU.
        for step, plan, looked in recorded:
            seen = MISSING_NS not in looked.ready_ns
            recorder.add(step, plan, looked.best_marks(), looked.ready_ns if seen else None)
        if over:
            recorder.write(None)
        else:
            scheduler = self._plans.scheduler
            recorder.write(scheduler.schedule.costs, scheduler.readiness.best().tolist())
