"""On hardware: compiled kernels against the reference on the same device, exactly; launches, compilations, NCCL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from buckets import FLOATS, Case, assert_same, cases, poison
from hypothesis import given, settings
from torch import nn

import fusedreduce
from fusedreduce.kernels import dispatch, reference
from fusedreduce.kernels.table import ChunkTable, PointerTable

pytestmark = pytest.mark.gpu
SUM_RTOL = 30 * 2.0**-24  # as in test_kernels.py


def _cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _shifted(values: torch.Tensor, shift: int) -> torch.Tensor:
    room = torch.empty(values.numel() + shift, dtype=values.dtype, device=_cuda())
    room[shift:] = values.to(_cuda())
    return room[shift:]


@given(cases((1.0, 2.0, 3.0, 7.0, 1024.0)))
@settings(max_examples=300)
def test_pack_and_unpack_equal_the_reference_bit_for_bit(case: Case) -> None:
    chunks, device = case.table(), _cuda()
    gradients = [
        None if missing else _shifted(case.values(slot), case.shifts[slot]) for slot, missing in enumerate(case.missing)
    ]
    scalar = torch.tensor([case.scalar], dtype=case.compute, device=device)
    wires, partials, backs = [], [], []
    for pack, unpack in ((dispatch.pack, dispatch.unpack), (reference.pack, reference.unpack)):
        wire = poison(chunks.wire_numel, case.wire).to(device)
        partial = chunks.new_partials(device)
        pack(gradients, chunks, PointerTable(), wire, scalar, partial)
        wires.append(wire)
        partials.append((dispatch if pack is dispatch.pack else reference).reduce_partials(partial, chunks))
        back = [None if g is None else poison(g.numel(), g.dtype).to(device) for g in gradients]
        unpack(back, chunks, PointerTable(), wires[0], scalar)
        backs.append(back)
    assert_same(wires[0].cpu(), wires[1].cpu())
    for ours, theirs in zip(*backs, strict=True):
        if ours is not None and theirs is not None:
            assert_same(ours.cpu(), theirs.cpu())
    assert torch.equal(partials[0].first_non_finite, partials[1].first_non_finite)
    torch.testing.assert_close(
        partials[0].parameter_sums, partials[1].parameter_sums, rtol=SUM_RTOL, atol=0, equal_nan=True
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
