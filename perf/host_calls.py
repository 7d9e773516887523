"""Where the host's time goes on the critical path: Python calls counted, and the stages of our reduction clocked.

Both slow down what they look at, so nothing is timed while calls are counted, and what stages take is told apart from
what steps take.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

# (stage, module, attribute), of the wrapper and of the hook. A stage's time is without that of stages within it.
STAGES: tuple[tuple[str, str, str], ...] = (
    ("arm", "fusedreduce.reducer.reducer", "Reducer.prepare_for_forward"),
    ("arm", "fusedreduce.reducer.reducer", "Reducer.prepare_for_backward"),
    ("backward begins", "fusedreduce.reducer.engine", "Engine._backward_begins"),
    ("parameters' hooks", "fusedreduce.reducer.engine", "Engine.on_accumulated"),
    ("comm hook", "fusedreduce", "fused_hook"),
    ("launch", "fusedreduce.reducer.engine", "Engine.launch"),
    ("pack", "fusedreduce.buckets.data_path", "start"),
    ("issue the collective", "fusedreduce.comm.process_group", "ProcessGroupCommunicator.all_reduce"),
    ("backward ends", "fusedreduce.reducer.engine", "Engine.end_backward"),
    ("wait", "fusedreduce.comm.process_group", "_Work.wait"),
    ("future's callback", "fusedreduce.parallel.hook_reduction", "_finish_dense"),
    ("unpack", "fusedreduce.buckets.data_path", "finish"),
)
# What may run on a thread that Python did not start: Gloo's.
_FOREIGN = ("fusedreduce.parallel.hook_reduction", "_finish_dense")


@contextlib.contextmanager
def _replaced(module: str, attribute: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Within: the attribute is what `make` has made of it."""
    *path, name = attribute.split(".")
    owner = functools.reduce(getattr, path, importlib.import_module(module))
    before = getattr(owner, name)
    setattr(owner, name, make(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


class Stages:
    """Within `clocked`: seconds and calls of each of STAGES, over all threads."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}
        self._lock = threading.Lock()
        self._open = threading.local()

    @contextlib.contextmanager
    def clocked(self) -> Iterator[None]:
        """Wrap models within it: a wrapper keeps the functions that it is built with."""
        with contextlib.ExitStack() as stack:
            for stage, module, attribute in STAGES:
                stack.enter_context(_replaced(module, attribute, functools.partial(self._clocked, stage)))
            yield

    def forget(self) -> None:
        """Starts anew."""
        self.seconds, self.calls = {}, {}

    def _clocked(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def clocked(*arguments: Any, **options: Any) -> Any:
            within: list[float] = self._open.__dict__.setdefault("within", [])
            within.append(0.0)
            begin_s = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                elapsed_s = time.perf_counter() - begin_s
                own_s = elapsed_s - within.pop()
                if within:
                    within[-1] += elapsed_s
                with self._lock:
                    self.seconds[stage] = self.seconds.get(stage, 0.0) + own_s
                    self.calls[stage] = self.calls.get(stage, 0) + 1

        return clocked


class PythonCalls:
    """Counts calls of Python functions while it is entered.

    From Python 3.12 on those of all threads. Before, those of this thread and of the collectives' callbacks: all that
    there are on a CPU, while for a GPU autograd has a thread of its own, which is out of reach.
    """

    @staticmethod
    def sees_all(device_type: str) -> bool:
        """Whether none is left out."""
        return device_type == "cpu" or sys.version_info >= (3, 12)

    def __init__(self) -> None:
        self.calls = 0
        self._restore = contextlib.ExitStack()

    def __enter__(self) -> PythonCalls:
        self.calls = 0
        if sys.version_info >= (3, 12):
            events = sys.monitoring.events
            tool = sys.monitoring.PROFILER_ID
            sys.monitoring.use_tool_id(tool, "fusedreduce calls")
            for event in (events.PY_START, events.PY_RESUME):
                sys.monitoring.register_callback(tool, event, self._started)
            sys.monitoring.set_events(tool, events.PY_START | events.PY_RESUME)
        else:
            self._restore.enter_context(_replaced(*_FOREIGN, self._counted_there))
            sys.setprofile(self._profiled)
        return self

    def __exit__(self, *_: object) -> None:
        if sys.version_info >= (3, 12):
            tool = sys.monitoring.PROFILER_ID
            sys.monitoring.set_events(tool, 0)
            for event in (sys.monitoring.events.PY_START, sys.monitoring.events.PY_RESUME):
                sys.monitoring.register_callback(tool, event, None)
            sys.monitoring.free_tool_id(tool)
        else:
            sys.setprofile(None)
            self._restore.close()

    def _started(self, _code: CodeType, _offset: int) -> None:
        self.calls += 1

    def _profiled(self, _frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            self.calls += 1

    def _counted_there(self, function: Callable[..., Any]) -> Callable[..., Any]:
        here = threading.get_ident()

        def counted(*arguments: Any) -> Any:
            if threading.get_ident() == here:
                self.calls -= 1  # this function itself
                return function(*arguments)
            sys.setprofile(self._profiled)
            try:
                return function(*arguments)
            finally:
                sys.setprofile(None)

        return counted
