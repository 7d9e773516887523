"""On hardware: compiled kernels against the reference on the same device, exactly; launches, compilations, NCCL."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from buckets import FLOATS, Case, assert_same, cases, poison
from torch import nn

import fusedreduce
from fusedreduce.kernels import dispatch, reference, reference_stats
from fusedreduce.kernels.table import ChunkTable, PointerTable, SourceTotals, Totals
from fusedreduce.traces.files import read

pytestmark = pytest.mark.gpu
SUM_RTOL = 30 * 2.0**-24  # as in test_kernels.py


def _cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _shifted(values: torch.Tensor, shift: int) -> torch.Tensor:
    room = torch.empty(values.numel() + shift, dtype=values.dtype, device=_cuda())
    room[shift:] = values.to(_cuda())
    return room[shift:]


def test_pack_and_unpack_equal_the_reference_bit_for_bit() -> None:
    hypothesis = pytest.importorskip("hypothesis")
    compare = hypothesis.given(cases((1.0, 2.0, 3.0, 7.0, 1024.0)))(_equals_the_reference)
    hypothesis.settings(max_examples=300)(compare)()


def _equals_the_reference(case: Case) -> None:
    chunks, device = case.table(), _cuda()
    gradients = [
        None if missing else _shifted(case.values(slot), case.shifts[slot]) for slot, missing in enumerate(case.missing)
    ]
    scalar = torch.tensor([case.scalar], dtype=case.compute, device=device)
    wires, backs = [], []
    sources: list[SourceTotals] = []
    results: list[Totals] = []
    for path, stats in ((dispatch, dispatch), (reference, reference_stats)):
        wire = poison(chunks.wire_numel, case.wire).to(device)
        source, result = chunks.new_source_partials(device), chunks.new_partials(device)
        path.pack(gradients, chunks, PointerTable(), wire, scalar, source)
        sources.append(stats.reduce_source_partials(source, chunks.spans(device)))
        wires.append(wire)
        back = [None if g is None else poison(g.numel(), g.dtype).to(device) for g in gradients]
        path.unpack(back, chunks, PointerTable(), wires[0], scalar, result)
        results.append(stats.reduce_partials(result, chunks.spans(device)))
        backs.append(back)
    assert_same(wires[0].cpu(), wires[1].cpu())
    for ours, theirs in zip(*backs, strict=True):
        if ours is not None and theirs is not None:
            assert_same(ours.cpu(), theirs.cpu())
    for field in dataclasses.fields(SourceTotals):
        assert torch.equal(getattr(sources[0], field.name), getattr(sources[1], field.name))
    assert torch.equal(results[0].first_non_finite, results[1].first_non_finite)
    torch.testing.assert_close(results[0].parameter_peaks, results[1].parameter_peaks, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(
        results[0].parameter_sums, results[1].parameter_sums, rtol=SUM_RTOL, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("wire_dtype", FLOATS)
def test_large_tensors(dtype: torch.dtype, wire_dtype: torch.dtype) -> None:
    numel = 3_000_017
    gradient = torch.randn(numel, device=_cuda()).to(dtype)
    chunks = ChunkTable([numel], [0], [dtype], numel)
    divisor = torch.tensor([3.0], device=_cuda())
    wires = [poison(numel, wire_dtype).to(_cuda()) for _ in range(2)]
    dispatch.pack([gradient], chunks, PointerTable(), wires[0], divisor)
    reference.pack([gradient], chunks, PointerTable(), wires[1], divisor)
    assert_same(wires[0].cpu(), wires[1].cpu())


def test_no_compilation_after_the_first_launch() -> None:
    import triton

    compiled: list[str] = []

    def note(**details: Any) -> None:
        compiled.append(str(details.get("repr")))

    dispatch.warm_up(_cuda(), torch.bfloat16)
    before = triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = note
    try:
        for numel, shift in ((1, 0), (7, 1), (1000, 3), (100_003, 0)):
            gradient = _shifted(torch.randn(numel), shift)
            chunks = ChunkTable([numel], [0], [torch.float32], numel)
            wire, pointers = torch.empty(numel, dtype=torch.bfloat16, device=_cuda()), PointerTable()
            dispatch.pack([gradient], chunks, pointers, wire, torch.ones(1, device=_cuda()))
            dispatch.unpack([gradient], chunks, pointers, wire, torch.ones(1, device=_cuda()))
    finally:
        triton.knobs.runtime.jit_post_compile_hook = before
    assert not compiled


def test_one_launch_each_whatever_the_number_of_parameters() -> None:
    for parameters in (1, 10, 1000):
        offsets = [8 * slot for slot in range(parameters)]
        chunks = ChunkTable([8] * parameters, offsets, [torch.float32] * parameters, 8 * parameters)
        gradients = [torch.ones(8, device=_cuda()) for _ in range(parameters)]
        wire, pointers = torch.empty(8 * parameters, dtype=torch.bfloat16, device=_cuda()), PointerTable()
        with dispatch.count_launches() as counted:
            dispatch.pack(gradients, chunks, pointers, wire, torch.ones(1, device=_cuda()))
            dispatch.unpack(gradients, chunks, pointers, wire, torch.ones(1, device=_cuda()))
        assert [(one.path, one.launches) for one in counted] == [("triton", 1), ("triton", 1)]
        assert pointers.uploads == 1


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """An NCCL group of one."""
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _local(model: nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
    """Gradients without any reduction."""
    model.zero_grad()
    model(batch).square().mean().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return gradients


class Branches(nn.Module):
    """Two halves of one bucket, run on a stream each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(256, 512), nn.Linear(256, 512)
        self.streams = (torch.cuda.Stream(), torch.cuda.Stream())

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        current = torch.cuda.current_stream()
        parts = []
        for layer, stream in zip((self.first, self.second), self.streams, strict=True):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                parts.append(torch.tanh(layer(features)))
        for stream in self.streams:
            current.wait_stream(stream)
        return parts[0] * parts[1]


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 64))


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("make", [_mlp, Branches])
@pytest.mark.parametrize("wire", ["native", "bf16", "fp16"])
def test_the_wrapper_over_nccl_on_a_stream_of_its_own(alone: None, wire: Any, make: Any, views: bool) -> None:
    if views and wire != "native":
        return
    torch.manual_seed(0)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        model = make().to(_cuda())
        config = fusedreduce.ReduceConfig(wire=wire)
        ddp = fusedreduce.DistributedDataParallel(
            model, bucket_cap_mb=0.2, gradient_as_bucket_view=views, reduce=config
        )
        for step in range(8):
            batch = torch.randn(32, 256, device=_cuda())
            local = _local(model, batch)
            ddp.zero_grad(set_to_none=step % 3 != 2)
            ddp(batch).square().mean().backward()
            averaged = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            for ours, mine in zip(averaged, local, strict=True):
                dtype = {"native": mine.dtype, "bf16": torch.bfloat16, "fp16": torch.float16}[wire]
                assert torch.equal(ours, mine.to(dtype).to(mine.dtype)), f"step {step}"
    assert ddp.reduce_stats()["path"] == "triton"


@pytest.mark.parametrize("wire", ["native", "bf16"])
def test_the_wrapper_launches_two_kernels_per_bucket_and_never_waits_for_the_gpu(alone: None, wire: Any) -> None:
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(40)]).to(_cuda())
    ddp = fusedreduce.DistributedDataParallel(model, bucket_cap_mb=0.2, reduce=fusedreduce.ReduceConfig(wire=wire))
    batch = torch.randn(8, 64, device=_cuda())
    for _ in range(6):
        ddp.zero_grad()
        ddp(batch).square().mean().backward()
    ddp.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with dispatch.count_launches() as counted:
            ddp(batch).square().mean().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    buckets = int(ddp.reduce_stats()["buckets"])
    assert buckets > 2
    assert [one.function for one in counted] == ["pack"] * buckets + ["unpack"] * buckets
    assert {(one.path, one.launches) for one in counted} == {("triton", 1)}


@pytest.mark.parametrize("wire", ["native", "bf16", "fp16"])
def test_the_hook_over_nccl_on_a_stream_of_its_own(alone: None, wire: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 64)).to(_cuda())
    ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.2, gradient_as_bucket_view=True)
    state = fusedreduce.FusedHookState(wire=wire)
    ddp.register_comm_hook(state, fusedreduce.fused_hook)
    stream = torch.cuda.Stream()
    for step in range(5):
        batch = torch.randn(32, 256, device=_cuda())
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            ddp.zero_grad()
            ddp(batch).square().mean().backward()
            averaged = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            with ddp.no_sync():
                ddp.zero_grad()
                ddp(batch).square().mean().backward()
            local = [p.grad for p in model.parameters() if p.grad is not None]
        stream.synchronize()
        for ours, mine in zip(averaged, local, strict=True):
            dtype = {"native": mine.dtype, "bf16": torch.bfloat16, "fp16": torch.float16}[wire]
            assert torch.equal(ours, mine.to(dtype).to(mine.dtype)), f"step {step}"
    assert state.stats()["path"] == "triton"


@pytest.mark.parametrize("wire", ["native", "bf16", "fp16"])
def test_what_the_hook_finds_out_costs_no_wait(alone: None, wire: Any) -> None:
    torch.manual_seed(0)
    head = nn.Linear(512, 64)
    model = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), head).to(_cuda())
    ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.2)
    state = fusedreduce.FusedHookState(wire=wire, grad_stats=True, check_finite="count")
    state.name_parameters(model)
    ddp.register_comm_hook(state, fusedreduce.fused_hook)
    batch = torch.randn(32, 256, device=_cuda())
    for _ in range(5):
        ddp.zero_grad()
        ddp(batch).square().mean().backward()
    torch.cuda.synchronize()
    ddp.zero_grad()
    loss = ddp(batch).square().mean()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with dispatch.count_launches() as counted:
            loss.backward()
            norm, norms = state.grad_norm(), state.grad_norms(model)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert {one.path for one in counted} == {"triton"}
    assert sum(one.launches for one in counted if one.function == "reduce_partials") <= 2
    squares = {name: p.grad.double().square().sum() for name, p in model.named_parameters() if p.grad is not None}
    for name, square in squares.items():
        torch.testing.assert_close(norms[name], square.sqrt(), rtol=1e-6, atol=0)
    torch.testing.assert_close(norm, torch.stack(list(squares.values())).sum().sqrt(), rtol=1e-6, atol=0)
    assert state.non_finite() == []
    ninth = torch.arange(64, device=_cuda()) == 9
    handle = head.bias.register_hook(lambda one: one.masked_fill(ninth, math.nan))
    ddp.zero_grad()
    ddp(batch).square().mean().backward()
    handle.remove()
    (report,) = state.non_finite()
    assert [str(one) for one in report.culprits] == ["rank 0, 2.bias, element 9"] and report.reduced == ("2.bias",)


def test_a_trace_has_the_devices_times(alone: None, tmp_path: Path) -> None:
    model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(6)]).to(_cuda())
    ddp = fusedreduce.DistributedDataParallel(model, bucket_cap_mb=20)
    batch = torch.randn(512, 2048, device=_cuda())
    with ddp.record_trace(tmp_path / "trace"):
        for _ in range(8):
            ddp.zero_grad()
            began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            loss = ddp(batch).square().mean()
            began.record()
            loss.backward()
            ended.record()
            torch.cuda.synchronize()
    (trace,) = read(tmp_path / "trace")
    last = trace.steps[-1].marks
    assert trace.device == "cuda" and len(last.buckets) >= 3
    for bucket in last.buckets:
        times = [bucket.ready_ns, bucket.pack_ns, bucket.launch_ns, bucket.done_ns, bucket.unpack_ns, bucket.end_ns]
        assert times[0] >= 0 and times == sorted(times)
    took_ns = began.elapsed_time(ended) * 1e6
    assert last.buckets[-1].end_ns <= 1.05 * took_ns, "within what the stream took"
    assert last.buckets[-1].ready_ns >= 0.3 * took_ns, "the device's clock: the host is done long before"
