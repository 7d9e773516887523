"""What tests with the `device` argument need (conftest.py): the same body on CPU, small, and on a GPU.

On CPU nothing is enqueued, so there is no stream and nothing to wait for, and kernels run in Triton's interpreter, or,
where they would write bf16 or `torch_path` is imported, as torch operators.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

import pytest
import torch

from support.inside import take_torch_path

T = TypeVar("T")


@pytest.fixture(autouse=True)
def torch_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPU torch operators, in a file that imports this: the interpreter takes tens of milliseconds for a bucket."""
    if request.node.get_closest_marker("gpu") is None:
        take_torch_path(monkeypatch)


def pick(device: torch.device, *, cpu: T, cuda: T) -> T:
    """A size by device: the interpreter takes seconds for a million elements."""
    return cuda if device.type == "cuda" else cpu


def paths(device: torch.device) -> set[str]:
    """The paths that ours may take: on a GPU compiled kernels and nothing else."""
    return pick(device, cpu={"interpreter", "torch"}, cuda={"triton"})


def own_stream(device: torch.device) -> AbstractContextManager[object]:
    """Within: a stream other than the default one is current."""
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()


def synchronize(device: torch.device) -> None:
    """Waits for all that was enqueued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def no_wait(device: torch.device) -> Iterator[None]:
    """Within: a host that waits for the GPU raises RuntimeError."""
    synchronize(device)
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


@contextmanager
def stopwatch(device: torch.device) -> Iterator[list[float]]:
    """Within: a list that in the end has one item, the nanoseconds that what was enqueued took there."""
    took_ns: list[float] = []
    if device.type == "cuda":
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        yield took_ns
        ended.record()
        torch.cuda.synchronize(device)
        took_ns.append(began.elapsed_time(ended) * 1e6)
    else:
        began_ns = time.perf_counter_ns()
        yield took_ns
        took_ns.append(time.perf_counter_ns() - began_ns)
