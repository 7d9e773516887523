"""The planner fed by a device's clock: a Reducer's own steps, on a GPU that is stood in for (device_time.py).

Gradients become ready, buckets are packed, summed and unpacked in times that are known. So it is known which plan they
call for, and what is measured must lead there.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import raw_calls
from support.cuda.device_time import DEVICE, FakeGpu, FakeStream
from support.inside import STREAMS_OF_BUCKETS, inside
from support.leaf_steps import clear, leaves
from support.loopback import Loopback, LoopbackPending, constant

from fusedreduce import ReduceConfig, Reducer
from fusedreduce.buckets.streams import Streams
from fusedreduce.comm.protocol import Pending, ReduceOp
from fusedreduce.planning.bucketing import UNLIMITED_BYTES, BucketCaps
from fusedreduce.planning.cost_model import FS_PER_NS, Costs, Linear
from fusedreduce.planning.plan import ready_plan
from fusedreduce.planning.planner import best_plan
from fusedreduce.planning.schedule import GAIN_PERCENT
from fusedreduce.planning.timeline import timeline
from fusedreduce.simulation.models import MODELS

MIB = 2**20
# The first step shows rank 0's order. Rounds begin behind it, and the plan that round 27 leads to is in use from 29 on.
STEPS = 31
HOST_CALL_NS = 20_000  # between two looks at the host's clock, of which device times must hold nothing


class Model:
    """A known model's gradients, `shrink` times smaller and each byte as much dearer: the times are those of the whole.

    Args:
        name: in the simulator's list.
        backward_ms: how long its backward takes, whatever the list says.
        gb_per_s: of the wire, whose collectives take 20 us more.
        shrink: what sizes are divided by.
    """

    def __init__(self, name: str, backward_ms: float, gb_per_s: float, shrink: int) -> None:
        known = MODELS[name].workload("a100")
        # Multiples of 64: slots without padding.
        self.numels = [-(-numel // shrink // 64) * 64 for numel in known.numels]
        self.ready_ns = [round(ns * backward_ms * 1e6) // max(known.ready_ns) for ns in known.ready_ns]
        self.caps = BucketCaps(first_bytes=MIB // shrink, cap_bytes=25 * MIB // shrink, planned_bytes=UNLIMITED_BYTES)
        copy = Linear(fixed_ns=8_000, fs_per_byte=1_500 * shrink)  # 6 bytes per 2 on the wire, at 2 TB/s
        wire = Linear(fixed_ns=20_000, fs_per_byte=round(shrink * FS_PER_NS / gb_per_s))
        self.costs = Costs(wire=wire, pack=copy, unpack=copy)


class OnDevice(LoopbackPending):
    """A collective under way on a stream of its own: waiting for it holds the current stream up, and no thread."""

    def __init__(self, gpu: FakeGpu, ends_ns: int, finish: Callable[[], torch.Tensor]) -> None:
        super().__init__(finish)
        self._gpu = gpu
        self._ends_ns = ends_ns

    def wait(self) -> None:
        self._gpu.current.wait_until(self._ends_ns)
        super().wait()


class Channel(Loopback):
    """Two ranks that do the same at the same time; collectives run one after the other."""

    def __init__(self, gpu: FakeGpu, wire: Linear) -> None:
        super().__init__([constant(0.0)])
        self._gpu, self._wire, self._stream = gpu, wire, FakeStream()

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Pending:
        pending = super().all_reduce(tensor, op)
        assert isinstance(pending, LoopbackPending) and pending._finish is not None
        self._stream.wait_stream(self._gpu.current)
        with self._gpu.on(self._stream):
            self._gpu.work(self._wire.fs(tensor.numel() * tensor.itemsize) // FS_PER_NS)
        return OnDevice(self._gpu, self._stream.now_ns, pending._finish)


class Gradient(torch.autograd.Function):
    """Its backward takes the current stream some time, and then there is a gradient."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, gpu: FakeGpu, takes_ns: int) -> torch.Tensor:
        ctx.gpu, ctx.takes_ns, ctx.like = gpu, takes_ns, parameter
        return parameter.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.gpu.work(ctx.takes_ns)
        return torch.ones_like(ctx.like), None, None


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """In place of torch.cuda; tensors stay on the CPU, and reductions take them for a GPU's."""
    calls = itertools.count(1)
    monkeypatch.setattr(time, "perf_counter_ns", lambda: HOST_CALL_NS * next(calls))
    STREAMS_OF_BUCKETS.replace(monkeypatch, lambda buckets, _: Streams(buckets))
    return FakeGpu(monkeypatch)


def trained(gpu: FakeGpu, model: Model, monkeypatch: pytest.MonkeyPatch) -> Reducer:
    """A reducer that has taken as many steps as it takes to decide on a plan."""

    def copy(gradients: object, chunks: object, pointers: object, wire: torch.Tensor, *_: object, **__: object) -> None:
        gpu.work(model.costs.pack.fs(wire.numel() * wire.itemsize) // FS_PER_NS)

    raw_calls.replace(monkeypatch, "pack", copy)
    raw_calls.replace(monkeypatch, "unpack", copy)
    parameters = leaves(model.numels)
    # Backward runs from the last to the first.
    takes_ns = [after - before for before, after in itertools.pairwise([0, *model.ready_ns[::-1]])][::-1]
    config = ReduceConfig(wire="bf16", policy="planned")
    reducer = Reducer(parameters, Channel(gpu, model.costs.wire), config, caps=model.caps)
    inside(reducer).pretend_timed_on(DEVICE)
    for _ in range(STEPS):
        rows = [Gradient.apply(one, gpu, ns) for one, ns in zip(parameters, takes_ns, strict=True)]
        loss = torch.stack(rows).sum()
        reducer.prepare_for_backward(loss)
        loss.backward()
        clear(parameters)
    return reducer


@pytest.mark.parametrize(
    ("model", "moves"),
    [
        (Model("resnet50", 30, 3, 32), True),
        pytest.param(Model("resnet50", 30, 2, 32), True, marks=pytest.mark.full),
        (Model("resnet50", 30, 1.5, 32), False),
        (Model("gpt2-xl", 250, 25, 2048), False),
    ],
    ids=["resnet50 at 3 GB/s", "at 2", "at 1.5", "gpt2-xl at 25"],
)
def test_the_plan_is_the_one_that_the_right_costs_call_for(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, model: Model, moves: bool
) -> None:
    with trained(gpu, model, monkeypatch) as reducer:
        schedule, plan = inside(reducer).scheduler.schedule, reducer.plan
    asked, found = schedule.model, schedule.costs
    assert found is not None
    largest_bytes = max(sum(asked.wire_bytes[number] for number in members) for members in plan)
    assert found.unpack.fs(largest_bytes) < 1e6 * FS_PER_NS, "waiting for the end of backward was taken for unpacking"
    for stage in ("wire", "pack", "unpack"):
        line, known = getattr(found, stage), getattr(model.costs, stage)
        for size_bytes in (0, largest_bytes):
            # Medians of whole ns.
            assert abs(line.fs(size_bytes) - known.fs(size_bytes)) < 5 * FS_PER_NS + 1e-5 * known.fs(size_bytes), stage

    right = asked.problem(model.ready_ns, model.costs)
    ready = ready_plan(asked.kinds, asked.caps, asked.cap_policy, right.order, share=asked.share)
    _, best = best_plan(right, {"ready": ready, "static": schedule.static(model.ready_ns)})
    now, then = timeline(ready, right), timeline(best, right)
    assert moves == (100 * (now.finish - then.finish) > GAIN_PERCENT * then.backward_end)
    assert plan == (best if moves else ready)
