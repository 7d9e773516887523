"""CUDA graphs: the kernels alone can be captured; steps are refused within a capture, and harm none."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.buckets import assert_same
from support.inside import inside
from support.on_device import pick
from torch import nn

import fusedreduce
from fusedreduce.kernels import dispatch
from fusedreduce.kernels.table import ChunkTable, PointerTable


class Walk:
    """Gradients of all dtypes and alignments, a wire, and pack and unpack over them."""

    def __init__(self, device: torch.device) -> None:
        numels, self.offsets = (1, 7, 1000, 5003, 4096), (0, 64, 128, 1152, 6208)
        dtypes = (torch.float32, torch.float16, torch.float16, torch.float32, torch.float32)
        rooms = [
            torch.zeros(numel + 5, dtype=dtype, device=device) for numel, dtype in zip(numels, dtypes, strict=True)
        ]
        self.gradients = [room[shift:][:numel] for shift, (room, numel) in enumerate(zip(rooms, numels, strict=True))]
        self.chunks = ChunkTable(numels, self.offsets, dtypes, 10_304)
        self.chunks.on(device)
        self.wire = torch.zeros(10_304, dtype=torch.float16, device=device)
        self.scale = torch.tensor([0.7], device=device)
        self.pointers = PointerTable()

    def fill(self, seed: int) -> list[torch.Tensor]:
        """Other values, in the same places; copies of them."""
        generator = torch.Generator(self.wire.device).manual_seed(seed)
        for gradient in self.gradients:
            gradient.copy_(torch.randn(gradient.numel(), generator=generator, device=gradient.device))
        self.wire.fill_(float("nan"))
        return [gradient.clone() for gradient in self.gradients]

    def run(self) -> None:
        dispatch.pack(self.gradients, self.chunks, self.pointers, self.wire, 2.0)
        dispatch.unpack(self.gradients, self.chunks, self.pointers, self.wire, self.scale)

    def check(self, given: list[torch.Tensor]) -> None:
        for gradient, before, offset in zip(self.gradients, given, self.offsets, strict=True):
            wire = (before.float() / 2.0).half()
            assert_same(self.wire[offset : offset + before.numel()], wire)
            assert_same(gradient, (wire.float() * self.scale).to(gradient.dtype))


def test_a_captured_pack_and_unpack_do_their_work_at_every_replay(device: torch.device) -> None:
    """Whether their addresses were uploaded before the capture or within it. On CPU a call stands for a replay."""
    for uploaded in pick(device, cpu=(True,), cuda=(True, False)):
        assert_replays(Walk(device), device, uploaded=uploaded)


def assert_replays(walk: Walk, device: torch.device, *, uploaded: bool) -> None:
    again: Callable[[], object] = walk.run
    if device.type == "cuda":
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            walk.run()  # compiles
        torch.cuda.synchronize(device)
        if not uploaded:
            walk.pointers = PointerTable()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            walk.run()
        again = graph.replay
    for replay in range(pick(device, cpu=2, cuda=5)):
        given = walk.fill(replay)
        again()
        walk.check(given)
        # Memory of tables that a capture has let go of would be taken by these.
        _ = [torch.full((64,), -1, dtype=torch.int64, device=device) for _ in range(256)]


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[torch.device]:
    """An NCCL group of one, and its device."""
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield torch.device("cuda", torch.cuda.current_device())
    dist.destroy_process_group()


@pytest.mark.gpu
def test_the_stall_monitor_looks_during_a_capture_and_does_not_invalidate_it(alone: torch.device) -> None:
    ddp = fusedreduce.DistributedDataParallel(nn.Linear(64, 64).to(alone))
    batch, values = torch.randn(8, 64, device=alone), torch.zeros(4, device=alone)
    watched = inside(ddp).work_watched
    graph = torch.cuda.CUDAGraph()
    ddp(batch).sum().backward()
    assert watched, "the monitor looks once a second: the step is still watched when the capture begins"
    with torch.cuda.graph(graph):  # in the mode "global"
        values.add_(1.0)
        time.sleep(3.0)
        values.mul_(2.0)
    assert not watched, "it has looked meanwhile"
    for expected in (2.0, 6.0):
        graph.replay()
        assert values.tolist() == [expected] * 4


def _model(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 16)).to(device)


def _gradients(model: nn.Module, module: nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
    """What a backward through `module`, which is `model` or holds it, leaves in the model's `.grad`."""
    model.zero_grad()
    module(batch).square().mean().backward()
    return [one.grad.clone() for one in model.parameters() if one.grad is not None]


def _assert_rounded(found: list[torch.Tensor], local: list[torch.Tensor], wire: str) -> None:
    """`found` is `local` as one rank's wire returns it."""
    for ours, mine in zip(found, local, strict=True):
        assert torch.equal(ours, mine.bfloat16().float() if wire == "bf16" else mine)


@pytest.mark.gpu
@pytest.mark.parametrize("wire", ["native", "bf16"])
def test_a_step_of_the_wrapper_is_refused_and_both_capture_and_wrapper_go_on(alone: torch.device, wire: Any) -> None:
    stream = torch.cuda.Stream(alone)
    batch, values = torch.randn(8, 64, device=alone), torch.zeros(4, device=alone)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        model = _model(alone)
        ddp = fusedreduce.DistributedDataParallel(model, reduce=fusedreduce.ReduceConfig(wire=wire))
        local = _gradients(model, model, batch)
        for _ in range(4):
            _assert_rounded(_gradients(model, ddp, batch), local, wire)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            values.add_(1.0)
            with pytest.raises(fusedreduce.FusedReduceError, match="a CUDA graph is being captured"):
                ddp(batch)
            values.mul_(2.0)
        graph.replay()
        assert values.tolist() == [2.0] * 4
        for _ in range(4):
            _assert_rounded(_gradients(model, ddp, batch), local, wire)


@pytest.mark.gpu
@pytest.mark.parametrize("wire", ["native", "bf16"])
def test_a_step_with_the_hook_is_refused_and_the_next_one_works(alone: torch.device, wire: Any) -> None:
    stream = torch.cuda.Stream(alone)
    batch = torch.randn(8, 64, device=alone)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        model = _model(alone)
        ddp = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        ddp.register_comm_hook(fusedreduce.FusedHookState(wire=wire), fusedreduce.fused_hook)
        local = _gradients(model, model, batch)
        for _ in range(12):  # so many torch asks for before a capture
            _assert_rounded(_gradients(model, ddp, batch), local, wire)
        graph = torch.cuda.CUDAGraph()
        with (
            pytest.raises(fusedreduce.FusedReduceError, match="a CUDA graph is being captured"),
            torch.cuda.graph(graph, stream=stream),
        ):
            ddp(batch).square().mean().backward()
        for _ in range(4):
            _assert_rounded(_gradients(model, ddp, batch), local, wire)


@pytest.mark.gpu
@pytest.mark.parametrize("wire", ["native", "bf16"])
def test_a_module_whose_forward_and_backward_are_graphs_can_be_wrapped(alone: torch.device, wire: Any) -> None:
    batches = [torch.randn(8, 64, device=alone) for _ in range(6)]
    # Each forward copies its input into the sample's memory.
    model: Any = torch.cuda.make_graphed_callables(_model(alone), (batches[0].clone(),))
    local = [_gradients(model, model, batch) for batch in batches]
    ddp = fusedreduce.DistributedDataParallel(model, reduce=fusedreduce.ReduceConfig(wire=wire))
    for batch, mine in zip(batches, local, strict=True):
        _assert_rounded(_gradients(model, ddp, batch), mine, wire)
