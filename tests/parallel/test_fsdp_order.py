"""The reductions of `set_fsdp_comms` on stand-ins for CUDA streams, called by torch's own `foreach_reduce`."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.cuda.fake_cuda import FakeCuda
from support.cuda.fake_streams import FakeEvent
from support.cuda.order_check import Violation, check
from support.grids import grid
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter, foreach_reduce

from fusedreduce.buckets import data_path
from fusedreduce.comm.process_group import ProcessGroupCommunicator
from fusedreduce.parallel import fsdp_shards
from fusedreduce.parallel.fsdp_buckets import reduce_scatter_bucket
from fusedreduce.parallel.fsdp_shards import ReduceScatter, ReplicaGroup, Replicas

SHAPES = ((40, 16), (300,), (7, 64), (20,))
_GIVEN_THE_DTYPE = "orig_dtype" in inspect.signature(foreach_reduce).parameters


def _parameter(shape: tuple[int, ...], shards: int, gradients: torch.dtype) -> Any:
    """What torch's functions and ours read of an FSDPParam, of the first of some shards."""
    padded = torch.Size((-(-shape[0] // shards), *shape[1:]))
    return SimpleNamespace(
        fsdp_placement=SimpleNamespace(dim=0),
        sharded_size=padded,
        padded_sharded_param_size=padded,
        sharded_grad_dtype=gradients,  # that of foreach_reduce's argument orig_dtype, before torch 2.15
        contiguous_sharded_stride=torch.empty(padded, device="meta").stride(),
        sharded_param=SimpleNamespace(
            grad=None, requires_grad=True, ndim=len(shape), dtype=None, is_complex=lambda: False
        ),
        offload_to_cpu=False,
        to_sharded_dtensor=lambda gradient: gradient,
    )


def _trained(
    cuda: FakeCuda,
    monkeypatch: pytest.MonkeyPatch,
    wire: str,
    gradients: torch.dtype,
    *,
    scatters: bool = False,
    defers: bool = False,
    held: bool = True,
) -> list[Violation]:
    """Some backwards of three modules, one after the other, as FSDP2 calls its functions.

    Args:
        scatters: our reduce-scatter over all ranks, which have no replicas; else our all-reduce, of whole modules.
        defers: replicas are reduced in every second backward.
        held: torch holds what the replicas reduce until its stream is behind that; else they are its all-reduce hook.
    """
    device, current, world = cuda.device, cuda.home_stream(), dist.group.WORLD
    assert world is not None
    others = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, **options: Any) -> Any:
        """As torch's, which calls the group's own."""
        if isinstance(group, ReplicaGroup):
            return group.allreduce([tensor], SimpleNamespace(reduceOp=op))
        return others(tensor, op=op, group=group, **options)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    reduces, adds_up = torch.cuda.Stream(device), torch.cuda.Stream(device)
    shards = world.size() if scatters else 1
    modules = [
        SimpleNamespace(
            fsdp_params=[_parameter(shape, shards, gradients) for shape in SHAPES],
            _reduce_scatter_comm=DefaultReduceScatter(),
        )
        for _ in range(3)
    ]
    replicas = Replicas(ProcessGroupCommunicator(world), "native" if scatters else wire, "wire", device)
    groups = [ReplicaGroup(group, replicas, "a shard") for group in modules]
    comms = [ReduceScatter(group, wire, "a shard", set(), DefaultReduceScatter()) for group in modules]
    given_dtype: dict[str, Any] = {"orig_dtype": gradients} if _GIVEN_THE_DTYPE else {}
    opts = SimpleNamespace(reduceOp=dist.ReduceOp.AVG)
    partial: list[Any] = [None] * len(modules)
    for step in range(4):
        if step == 2:
            cuda.steady()
        shown: list[Any] = []  # FSDPParamGroup's _all_reduce_state
        behind: list[Any] = []  # events of a module: the reduce-scatter's, and that of all of it
        for number, (group, ours, comm) in enumerate(zip(modules, groups, comms, strict=True)):
            given = [torch.randn(math.prod(shape), device=device).to(gradients).view(shape) for shape in SHAPES]
            hook = None if held or scatters else functools.partial(_reduced_by, ours, opts)
            state: Any = foreach_reduce(
                fsdp_params=group.fsdp_params,
                unsharded_grads=given,
                reduce_scatter_group=world if scatters else None,  # type: ignore[arg-type]
                reduce_scatter_stream=reduces,
                reduce_scatter_comm=comm if scatters else DefaultReduceScatter(),  # type: ignore[arg-type]
                reduce_dtype=torch.float32,
                device=device,
                gradient_divide_factor=3.0 + step if scatters else None,
                all_reduce_group=ours if held and not scatters else None,
                all_reduce_stream=adds_up,
                all_reduce_grads=not defers or step % 2 == 1,
                partial_reduce_output=partial[number],
                all_reduce_hook=hook,
                **given_dtype,
            )
            # Since torch 2.15 what a hook reduces is held too.
            one = state if held else [*state[:-3], None, *state[-2:]]
            del state
            # FSDPParamGroup keeps the input of one reduce-scatter, and the current stream waits for it before the next.
            if behind:
                current.wait_event(behind[0])
            *_, shard, _, partial[number] = one
            shown.append(shard)
            behind = [part for part in one if isinstance(part, FakeEvent)]
        del one
        current.wait_event(behind[1])  # the last one's, as FSDPState does behind backward
        shown.clear()
        for group in modules:
            for parameter in group.fsdp_params if partial[0] is None else ():
                torch.ones(1, device=device).add_(parameter.sharded_param.grad.view(-1)[:1])
                parameter.sharded_param.grad = None
    assert all(one.shard.counts["calls"] for one in (comms if scatters else groups)), "ours were not called"
    return check(cuda.trace)


def _reduced_by(group: ReplicaGroup, opts: Any, flat: torch.Tensor) -> None:
    group.allreduce([flat], opts)


WIRES = (("native", 2), ("bf16", 2), ("int8", 2), ("int8", 4))  # and ranks


@grid(("wire", "gradients", "defers"), [*itertools.product(WIRES, (torch.float32, torch.bfloat16), (False, True))])
def test_a_shard_is_not_given_out_while_torchs_stream_works_on_it(
    monkeypatch: pytest.MonkeyPatch, wire: tuple[str, int], gradients: torch.dtype, defers: bool
) -> None:
    name, ranks = wire
    cuda = FakeCuda(monkeypatch, ranks=ranks)
    with cuda.recording():
        found = _trained(cuda, monkeypatch, name, gradients, defers=defers)
    assert not found, "\n".join(map(str, found[:8]))


@pytest.mark.parametrize(
    ("wire", "ranks", "gradients"),
    [
        ("bf16", 2, torch.float32),
        ("fp16", 4, torch.bfloat16),
        ("int8", 2, torch.bfloat16),
        ("int4", 4, torch.float32),
    ],
)
def test_a_reduce_scatter_uses_nothing_that_another_stream_works_on(
    monkeypatch: pytest.MonkeyPatch, wire: str, ranks: int, gradients: torch.dtype
) -> None:
    cuda = FakeCuda(monkeypatch, ranks=ranks)
    with cuda.recording():
        found = _trained(cuda, monkeypatch, wire, gradients, scatters=True)
    assert not found, "\n".join(map(str, found[:8]))


@pytest.mark.parametrize("wire", ["native", "bf16", "int8"])
@pytest.mark.parametrize("numels", [[640], [640, 300, 7]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_nothing_is_uploaded_behind_an_exchange(
    monkeypatch: pytest.MonkeyPatch, wire: str, numels: list[int], dtype: torch.dtype
) -> None:
    """The host would wait for the copy, and so for the peers whose contributions the stream waits for."""
    cuda = FakeCuda(monkeypatch)
    with cuda.recording():
        world, device = dist.group.WORLD, cuda.device
        assert world is not None
        flat = torch.randn(2 * sum(numels), device=device).to(dtype)
        into = torch.empty(sum(numels), dtype=dtype, device=device)
        numels = numels if wire == "int8" else [sum(numels)]
        is_encoded = [wire == "int8" and numel == 640 for numel in numels]
        bucket = reduce_scatter_bucket(into, wire, numels, is_encoded, "a shard", 2)
        cuda.steady()
        in_flight = data_path.start(bucket, flat.split(numels * 2), ProcessGroupCommunicator(world), divisor=2.0)
        in_flight.pending.wait()
        data_path.finish(in_flight, into.split(numels))
    found = check(cuda.trace)
    assert not found, "\n".join(map(str, found[:8]))


@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_a_reduce_scatter_that_torchs_stream_does_not_wait_for_is_found(
    monkeypatch: pytest.MonkeyPatch, wire: str
) -> None:
    monkeypatch.setattr(fsdp_shards, "wait_for", lambda *_: None)
    cuda = FakeCuda(monkeypatch)
    with cuda.recording():
        found = _trained(cuda, monkeypatch, wire, torch.float32, scatters=True)
    assert found


def test_where_torch_does_not_hold_a_shard_the_checker_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a hook on a mesh of one dimension: pytorch #140044."""
    cuda = FakeCuda(monkeypatch)
    with cuda.recording():
        found = _trained(cuda, monkeypatch, "int8", torch.bfloat16, held=False)
    assert any(one.rule == "reuse" and "decode" in one.sentence for one in found)
