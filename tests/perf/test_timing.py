"""Timing by CUDA graphs, with stand-ins for CUDA: what a replay leaves is what is checked, and what is timed."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import records
import timing
import torch


class _Graph:
    """Records the calls that are made through `recorded` while it is captured; a replay makes them."""

    capturing: _Graph | None = None

    def __init__(self) -> None:
        self.calls: list[Callable[[], object]] = []

    @classmethod
    @contextlib.contextmanager
    def captured(cls, graph: _Graph, *, stream: object, pool: object, capture_error_mode: str) -> Iterator[None]:
        cls.capturing = graph
        try:
            yield
        finally:
            cls.capturing = None

    @classmethod
    def recorded(cls, call: Callable[[], object]) -> Callable[[], object]:
        return lambda: call() if cls.capturing is None else cls.capturing.calls.append(call)

    def replay(self) -> None:
        for call in self.calls:
            call()


class _Stream:
    device_index = 0

    def __init__(self, device: torch.device) -> None: ...

    def wait_stream(self, other: object) -> None: ...


class _Event:
    def __init__(self, *, enable_timing: bool) -> None:
        self._at_s = 0.0

    def record(self, stream: object) -> None:
        self._at_s = time.perf_counter()

    def elapsed_time(self, end: _Event) -> float:
        return 1e3 * max(1e-6, end._at_s - self._at_s)


def test_what_a_graph_leaves_is_what_is_checked_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*_: object) -> Any:
        return contextlib.nullcontext()

    fakes: dict[str, Any] = {"CUDAGraph": _Graph, "graph": _Graph.captured, "Event": _Event, "Stream": _Stream}
    fakes["current_stream"] = _Stream
    fakes |= dict.fromkeys(("device", "stream", "synchronize", "_sleep", "graph_pool_handle"), nothing)
    ended: list[object] = []
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *pool: ended.append(pool), raising=False)
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(timing, "WARMUP_S", 0.0)
    monkeypatch.setattr(timing, "SHORTEST_REPLAY_S", 0.0)
    outputs = [torch.zeros(3), torch.zeros(3)]

    def cases(first: float, recorded: bool) -> tuple[list[Callable[[], object]], timing.Check]:
        calls = [functools.partial(one.fill_, first) for one in outputs]

        def poison() -> None:
            for one in outputs:
                one.fill_(-1)

        def check() -> None:
            if any(one[0] != first for one in outputs):
                raise records.BenchError("wrong")

        return [_Graph.recorded(call) if recorded else call for call in calls], timing.Check(poison=poison, check=check)

    def refuse() -> None:
        if _Graph.capturing is not None:
            raise RuntimeError("operation not permitted\nwhen stream is capturing")
        good[0](), good[1]()

    good, check = cases(7.0, recorded=True)
    made: dict[str, list[Callable[[], object]]] = {"good": good, "alone": [refuse]}
    times = timing._measure_graphs(made, torch.device("cpu"), 3, 5, {"good": check, "alone": check})
    assert [len(seconds) for seconds in times.values()] == [3, 3]
    assert times.eager == {"alone": "operation not permitted"} and len(ended) == 1
    # Right when it is called, but not recorded: a replay does nothing.
    bad, check = cases(7.0, recorded=False)
    with pytest.raises(records.BenchError, match="wrong"):
        timing._measure_graphs({"bad": bad}, torch.device("cpu"), 3, 5, {"bad": check})
