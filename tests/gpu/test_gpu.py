"""Kernels against the reference on the same device, exactly; launches; wrapper and hook in a group of one.

On a GPU with compiled kernels and NCCL, on CPU at small sizes. test_both_devices.py plants a fault in each.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.buckets import FLOATS, Case, assert_same, cases, poison
from support.on_device import no_wait, own_stream, paths, pick, stopwatch, synchronize
from torch import nn

import fusedreduce
from fusedreduce.kernels import cpu_stats, dispatch, reference
from fusedreduce.kernels.table import ChunkTable, PointerTable, SourceTotals, Totals
from fusedreduce.trace.reader import read

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter's overflows and NaNs
SUM_RTOL = 30 * 2.0**-24  # as in test_kernels.py
# Wires, and whether gradients are views of the buckets.
TRAVELS = [("native", False), ("native", True), ("bf16", False), ("fp16", False)]
WIRES = {"native": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def _shifted(values: torch.Tensor, shift: int, device: torch.device) -> torch.Tensor:
    room = torch.empty(values.numel() + shift, dtype=values.dtype, device=device)
    room[shift:] = values.to(device)
    return room[shift:]


def test_pack_and_unpack_equal_the_reference_bit_for_bit(device: torch.device) -> None:
    hypothesis: Any = pytest.importorskip("hypothesis")
    # On CPU test_kernels.py has many more examples.
    few = {"max_examples": 5, "derandomize": True, "database": None, "phases": [hypothesis.Phase.generate]}
    chosen: dict[str, Any] = pick(device, cpu=few, cuda={"max_examples": 300})
    compare = hypothesis.given(cases((1.0, 2.0, 3.0, 7.0, 1024.0)))(lambda case: equals_the_reference(case, device))
    hypothesis.settings(**chosen)(compare)()


def equals_the_reference(case: Case, device: torch.device) -> None:
    chunks = case.table()
    gradients = [
        None if missing else _shifted(case.values(slot), case.shifts[slot], device)
        for slot, missing in enumerate(case.missing)
    ]
    scalar = torch.tensor([case.scalar], dtype=case.compute, device=device)
    wires, backs = [], []
    sources: list[SourceTotals] = []
    results: list[Totals] = []
    for path, stats in ((dispatch, dispatch), (reference, cpu_stats)):
        wire = poison(chunks.wire_numel, case.wire).to(device)
        source, result = chunks.new_source_partials(device), chunks.new_partials(device)
        path.pack(gradients, chunks, PointerTable(), wire, case.scalar, source)
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
def test_large_tensors(device: torch.device, dtype: torch.dtype, wire_dtype: torch.dtype) -> None:
    numel = pick(device, cpu=30_017, cuda=3_000_017)
    gradient = torch.randn(numel, device=device).to(dtype)
    chunks = ChunkTable([numel], [0], [dtype], numel)
    wires = [poison(numel, wire_dtype).to(device) for _ in range(2)]
    dispatch.pack([gradient], chunks, PointerTable(), wires[0], 3.0)
    reference.pack([gradient], chunks, PointerTable(), wires[1], 3.0)
    assert_same(wires[0].cpu(), wires[1].cpu())


@pytest.mark.gpu
def test_no_compilation_after_the_first_launch() -> None:
    import triton

    compiled: list[str] = []
    device = torch.device("cuda", torch.cuda.current_device())

    def note(**details: Any) -> None:
        compiled.append(str(details.get("repr")))

    dispatch.warm_up(device, torch.bfloat16)
    before = triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = note
    try:
        for numel, shift in ((1, 0), (7, 1), (1000, 3), (100_003, 0)):
            gradient = _shifted(torch.randn(numel), shift, device)
            chunks = ChunkTable([numel], [0], [torch.float32], numel)
            wire, pointers = torch.empty(numel, dtype=torch.bfloat16, device=device), PointerTable()
            dispatch.pack([gradient], chunks, pointers, wire, 1.0)
            dispatch.unpack([gradient], chunks, pointers, wire, torch.ones(1, device=device))
    finally:
        triton.knobs.runtime.jit_post_compile_hook = before
    assert not compiled


def test_one_launch_each_whatever_the_number_of_parameters(device: torch.device) -> None:
    for parameters in pick(device, cpu=(1, 5, 25), cuda=(1, 10, 1000)):
        offsets = [8 * slot for slot in range(parameters)]
        chunks = ChunkTable([8] * parameters, offsets, [torch.float32] * parameters, 8 * parameters)
        gradients = [torch.ones(8, device=device) for _ in range(parameters)]
        wire, pointers = torch.empty(8 * parameters, dtype=torch.float16, device=device), PointerTable()
        with dispatch.count_launches() as counted:
            dispatch.pack(gradients, chunks, pointers, wire, 1.0)
            dispatch.unpack(gradients, chunks, pointers, wire, torch.ones(1, device=device))
        path = pick(device, cpu="interpreter", cuda="triton")
        assert [(one.path, one.launches) for one in counted] == [(path, 1), (path, 1)]
        assert pointers.uploads == 1


def _local(ddp: nn.parallel.DistributedDataParallel, batch: torch.Tensor) -> list[torch.Tensor]:
    """Gradients without any reduction."""
    with ddp.no_sync():
        ddp.zero_grad()
        ddp(batch).square().mean().backward()
    return [p.grad.clone() for p in ddp.parameters() if p.grad is not None]


def _mlp(device: torch.device) -> nn.Sequential:
    inputs, hidden, outputs = pick(device, cpu=(16, 32, 8), cuda=(256, 512, 64))
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs)).to(device)


def _batch(model: nn.Module, device: torch.device) -> torch.Tensor:
    return torch.randn(32, next(model.parameters()).shape[1], device=device)


def _assert_rounded_once(averaged: list[torch.Tensor], local: list[torch.Tensor], wire: str, step: int) -> None:
    for ours, mine in zip(averaged, local, strict=True):
        assert torch.equal(ours, mine.to(WIRES[wire]).to(mine.dtype)), f"step {step}"


@pytest.mark.parametrize(("wire", "views"), TRAVELS)
def test_the_wrapper_on_a_stream_of_its_own(device: torch.device, group: None, wire: Any, views: bool) -> None:
    torch.manual_seed(0)
    with own_stream(device):
        model = _mlp(device)
        ddp = fusedreduce.DistributedDataParallel(
            model,
            bucket_cap_mb=pick(device, cpu=0.001, cuda=0.2),
            gradient_as_bucket_view=views,
            reduce=fusedreduce.ReduceConfig(wire=wire),
        )
        for step in range(8):
            batch = _batch(model, device)
            local = _local(ddp, batch)
            ddp.zero_grad(set_to_none=step % 3 != 2)
            ddp(batch).square().mean().backward()
            averaged = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            _assert_rounded_once(averaged, local, wire, step)
    assert ddp.reduce_stats()["path"] in paths(device)


@pytest.mark.parametrize("wire", ["native", "bf16", "fp16"])
def test_the_wrapper_launches_two_kernels_per_bucket_and_never_waits_for_the_gpu(
    device: torch.device, group: None, wire: Any
) -> None:
    layers, width = pick(device, cpu=(4, 8), cuda=(40, 64))
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)]).to(device)
    cap_mb = pick(device, cpu=0.0003, cuda=0.2)
    ddp = fusedreduce.DistributedDataParallel(model, bucket_cap_mb=cap_mb, reduce=fusedreduce.ReduceConfig(wire=wire))
    batch = torch.randn(8, width, device=device)
    for _ in range(pick(device, cpu=3, cuda=6)):
        ddp.zero_grad()
        ddp(batch).square().mean().backward()
    ddp.zero_grad()
    with no_wait(device), dispatch.count_launches() as counted:
        ddp(batch).square().mean().backward()
    buckets = int(ddp.reduce_stats()["buckets"])
    assert buckets > 2
    assert [one.function for one in counted] == ["pack"] * buckets + ["unpack"] * buckets
    assert {one.path for one in counted} <= paths(device)
    assert {one.launches for one in counted if one.path != "torch"} == {1}


@pytest.mark.parametrize("wire", ["native", "bf16", "fp16"])
def test_the_hook_on_a_stream_of_its_own(device: torch.device, group: None, wire: Any) -> None:
    torch.manual_seed(0)
    model = _mlp(device)
    cap_mb = pick(device, cpu=0.001, cuda=0.2)
    ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=cap_mb, gradient_as_bucket_view=True)
    state = fusedreduce.FusedHookState(wire=wire)
    ddp.register_comm_hook(state, fusedreduce.fused_hook)
    stream = own_stream(device)
    for step in range(5):
        batch = _batch(model, device)
        synchronize(device)
        with stream:
            ddp.zero_grad()
            ddp(batch).square().mean().backward()
            averaged = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            local = _local(ddp, batch)
        synchronize(device)
        _assert_rounded_once(averaged, local, wire, step)
    assert state.stats()["path"] in paths(device)


@pytest.mark.parametrize("wire", ["native", "bf16", "fp16"])
def test_what_the_hook_finds_out_costs_no_wait(device: torch.device, group: None, wire: Any) -> None:
    torch.manual_seed(0)
    model = _mlp(device)
    bias = model[2].bias
    assert isinstance(bias, torch.Tensor)
    ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=pick(device, cpu=0.001, cuda=0.2))
    state = fusedreduce.FusedHookState(wire=wire, grad_stats=True, check_finite="count")
    state.name_parameters(model)
    ddp.register_comm_hook(state, fusedreduce.fused_hook)
    batch = _batch(model, device)
    for _ in range(pick(device, cpu=2, cuda=5)):
        ddp.zero_grad()
        ddp(batch).square().mean().backward()
    synchronize(device)
    ddp.zero_grad()
    loss = ddp(batch).square().mean()
    with no_wait(device), dispatch.count_launches() as counted:
        loss.backward()
        norm, norms = state.grad_norm(), state.grad_norms(model)
    assert {one.path for one in counted} <= paths(device)
    assert sum(one.launches for one in counted if one.function == "reduce_partials") <= 2
    squares = {name: p.grad.double().square().sum() for name, p in model.named_parameters() if p.grad is not None}
    for name, square in squares.items():
        torch.testing.assert_close(norms[name], square.sqrt(), rtol=1e-6, atol=0)
    torch.testing.assert_close(norm, torch.stack(list(squares.values())).sum().sqrt(), rtol=1e-6, atol=0)
    assert state.non_finite() == []
    last = bias.numel() - 1
    there = torch.arange(bias.numel(), device=device) == last
    handle = bias.register_hook(lambda one: one.masked_fill(there, math.nan))
    ddp.zero_grad()
    ddp(batch).square().mean().backward()
    handle.remove()
    (report,) = state.non_finite()
    assert [str(one) for one in report.culprits] == [f"rank 0, 2.bias, element {last}"]
    assert report.reduced == ("2.bias",)


def test_a_trace_has_the_devices_times(device: torch.device, group: None, tmp_path: Path) -> None:
    width, cap_mb, steps = pick(device, cpu=(24, 0.002, 3), cuda=(2048, 20.0, 8))
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(6)]).to(device)
    ddp = fusedreduce.DistributedDataParallel(model, bucket_cap_mb=cap_mb)
    batch = torch.randn(512, width, device=device)
    with ddp.record_trace(tmp_path / "trace"):
        for _ in range(steps):
            ddp.zero_grad()
            loss = ddp(batch).square().mean()
            with stopwatch(device) as took_ns:
                loss.backward()
    (trace,) = read(tmp_path / "trace")
    last = trace.steps[-1].marks
    assert trace.device == device.type and len(last.buckets) >= 3
    for bucket in last.buckets:
        times = [bucket.ready_ns, bucket.pack_ns, bucket.launch_ns, bucket.done_ns, bucket.unpack_ns, bucket.end_ns]
        assert times[0] >= 0 and times == sorted(times)
    assert last.buckets[-1].end_ns <= 1.05 * took_ns[0], "within what the stream took"
    least = pick(device, cpu=0.1, cuda=0.3)  # of the interpreter's step most is packing and unpacking
    assert last.buckets[-1].ready_ns >= least * took_ns[0], "the device's clock: the host is done long before"
