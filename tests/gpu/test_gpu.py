"""Kernels against the reference on the same device, exactly; launches; wrapper and hook in a group of one.

On a GPU with compiled kernels and NCCL, on CPU at small sizes. test_both_devices.py plants a fault in each.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.buckets import FLOATS, Case, Guarded, assert_same, poison
from support.on_device import no_wait, own_stream, paths, pick, stopwatch, synchronize
from torch import nn

import fusedreduce
from fusedreduce.kernels import counting, cpu_stats, dispatch, pack, reference, stats, unpack, variants, walk
from fusedreduce.kernels.table import ChunkTable, PointerTable, SourceTotals, Totals
from fusedreduce.trace.reader import read

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter's overflows and NaNs
SUM_RTOL = 30 * 2.0**-24  # as in test_kernels.py
# Wires, and whether gradients are views of the buckets.
TRAVELS = [("native", False), ("native", True), ("bf16", False), ("fp16", False)]
WIRES = {"native": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


LARGE_NUMEL, LARGE_SEEDS = 2_000_000, 180


def drawn(seed: int, most_numel: int) -> Case:
    """A bucket of any size and alignment, the same for the same seed."""
    draw = random.Random(seed)
    wide = draw.random() < 0.2
    slots = draw.randint(40, 120) if draw.random() < 0.2 and most_numel > 1000 else draw.randint(1, 6)
    most = most_numel if slots <= 6 else most_numel // 100
    # Of every magnitude: an even draw would have hardly a small one.
    numels = [int(most ** draw.uniform(0.3, 1.0)) for _ in range(slots)]
    small = [one for one in (0, 1, 2, 3, 7, 13, 64, 127, 257, 700) if one <= most]
    few = (0, 0, 0, 1, 3, 8)
    return Case(
        numels=tuple(one if draw.random() < 0.5 else draw.choice(small) for one in numels),
        gaps=tuple(draw.choices(few, k=slots + 1)),
        dtypes=(torch.float64,) * slots if wide else tuple(draw.choices(FLOATS, k=slots)),
        wire=draw.choice((torch.float64, torch.bfloat16, torch.float16) if wide else FLOATS),
        shifts=tuple(draw.choices(few, k=slots)),
        wire_shift=draw.choice(few),
        missing=tuple(draw.random() < 0.1 for _ in range(slots)),
        # The reference goes row by row, 80 launches for each.
        chunk_numel=draw.choice((8192, 8192, 700, 64) if max(numels) <= 20_000 else (8192, 8192, 8192, 700)),
        tile_bytes=4096,
        scalar=draw.choice((1.0, 2.0, 3.0, 7.0, 1024.0)),
        seed=seed,
        special=draw.random() < 0.5,
    )


def _shifted(values: torch.Tensor, shift: int, device: torch.device) -> torch.Tensor:
    return Guarded.of(values.to(device), shift).inner


@pytest.mark.parametrize("size", ["small", "large"])
def test_random_buckets_equal_the_reference_bit_for_bit(device: torch.device, size: str) -> None:
    """Every function of the data path; on CPU test_kernels.py has many more examples."""
    counts = {"small": pick(device, cpu=5, cuda=60), "large": pick(device, cpu=1, cuda=LARGE_SEEDS)}
    most_numel = 300 if size == "small" else pick(device, cpu=3_000, cuda=LARGE_NUMEL)
    kernels = []
    for seed in range(counts[size]):
        case = drawn(seed, most_numel)
        with counting.count_launches() as counted:
            try:
                equals_the_reference(case, device)
            except AssertionError as error:
                error.add_note(str(case))
                raise
        assert {one.path for one in counted} <= paths(device)
        kernels += [one for one in counted if one.path != "torch"]
        assert all(one.launches <= 1 or one.function.startswith("reduce") for one in kernels)
    assert kernels


def test_the_large_buckets_take_a_gpu_seconds() -> None:
    """The reference needs some 0.3 ms for a row."""
    rows = [drawn(seed, LARGE_NUMEL).table().data_rows for seed in range(LARGE_SEEDS)]
    assert sum(rows) < 50_000


def equals_the_reference(case: Case, device: torch.device) -> None:
    chunks = case.table()
    gradients = [
        None if missing else _shifted(case.values(slot), case.shifts[slot], device)
        for slot, missing in enumerate(case.missing)
    ]
    scalar = torch.tensor([case.scalar], dtype=case.compute, device=device)
    wires: list[Guarded] = []
    sources: list[SourceTotals] = []
    for path, second in ((dispatch, dispatch), (reference, cpu_stats)):
        wires.append(Guarded.of(poison(chunks.wire_numel, case.wire).to(device), case.wire_shift))
        source = chunks.new_source_partials(device)
        path.pack(gradients, chunks, PointerTable(), wires[-1].inner, case.scalar, source)
        sources.append(second.reduce_source_partials(source, chunks.spans(device)))
    wires[0].assert_edges_untouched()
    assert_same(wires[0].inner, wires[1].inner)
    for field in dataclasses.fields(SourceTotals):
        assert torch.equal(getattr(sources[0], field.name), getattr(sources[1], field.name)), field.name

    backs: list[list[Guarded | None]] = []
    totals: list[list[Totals]] = []
    for path, second in ((dispatch, dispatch), (reference, cpu_stats)):
        back = [
            None if one is None else Guarded.of(poison(one.numel(), one.dtype).to(device), case.shifts[slot])
            for slot, one in enumerate(gradients)
        ]
        into = [None if one is None else one.inner for one in back]
        unpacked, measured = (chunks.new_partials(device) for _ in range(2))
        path.unpack(into, chunks, PointerTable(), wires[1].inner, scalar, unpacked)
        path.measure(into, chunks, PointerTable(), measured)
        path.scale(into, chunks, PointerTable(), 1 / scalar)
        totals.append([second.reduce_partials(one, chunks.spans(device)) for one in (unpacked, measured)])
        backs.append(back)
    for ours, theirs in zip(*backs, strict=True):
        if ours is not None and theirs is not None:
            ours.assert_edges_untouched()
            assert_same(ours.inner, theirs.inner)
    for function, mine, wanted in zip(("unpack", "measure"), *totals, strict=True):
        assert torch.equal(mine.first_non_finite, wanted.first_non_finite), function
        for name, rtol in (("parameter_peaks", 0.0), ("parameter_sums", SUM_RTOL), ("total", SUM_RTOL)):
            torch.testing.assert_close(getattr(mine, name), getattr(wanted, name), rtol=rtol, atol=0, equal_nan=True)


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


@pytest.mark.gpu
def test_what_is_launched_was_compiled_ahead_of_time(record_property: Callable[[str, object], None]) -> None:
    """What `fusedreduce.kernels.aot` compiles is the code that runs; registers as the driver counts them."""
    from fusedreduce.kernels import aot

    device = torch.device("cuda", torch.cuda.current_device())
    for seed in range(20):
        equals_the_reference(drawn(seed, 1000), device)
    target, modules = aot.Target("this GPU", variants.current_target(device)), (pack, unpack, walk, stats)
    kernels = [kernel for module in modules for kernel in vars(module).values()]
    launched_here = [one for one in aot.all_variants(target) if any(one.kernel is kernel for kernel in kernels)]
    ahead = {aot.compile_variant(variant, target).hash for variant in launched_here}
    for module in modules:
        for name, kernel in vars(module).items():
            if name.endswith("_kernel") and hasattr(kernel, "device_caches"):
                launched = list(kernel.device_caches[device.index][0].values())
                assert launched and {one.hash for one in launched} <= ahead, name
                assert not any(one.n_spills for one in launched), name
                record_property(f"{name} registers", sorted(one.n_regs for one in launched))


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
        for step in range(pick(device, cpu=4, cuda=8)):
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
    for _ in range(pick(device, cpu=2, cuda=6)):
        ddp.zero_grad()
        ddp(batch).square().mean().backward()
    ddp.zero_grad()
    with no_wait(device), counting.count_launches() as counted:
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
    for step in range(pick(device, cpu=3, cuda=5)):
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
    with no_wait(device), counting.count_launches() as counted:
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
