"""fused_hook on torch's own DDP: 2 and 3 Gloo ranks, different inputs on each."""

from __future__ import annotations

import copy
import logging
import pickle
import re
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ddp_models import (
    WIRES,
    Collectives,
    assert_is_mean,
    assert_same_on_all_ranks,
    assert_step_averages,
    batch,
    gradients,
    hooked,
    loss_of,
    mlp,
)
from support.inside import inside_hook
from support.logs import logged
from support.ranks import fake_group, on_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import fusedreduce
from fusedreduce.kernels import counting

WIRES_AT_TWO_AND_INT8 = [*((2, wire) for wire in WIRES), (3, "int8")]


@pytest.mark.parametrize(("world", "wire"), WIRES_AT_TWO_AND_INT8)
@on_ranks()
def test_two_modules_one_state(rank: int, world: int, wire: str) -> None:
    """Both in one backward, same bucket sizes: their buckets must never share a wire buffer."""
    first, state = hooked(mlp(1), wire)
    second, _ = hooked(mlp(2), wire, state=state)
    for step in range(5):
        locals_ = [copy.deepcopy(first.module), copy.deepcopy(second.module)]
        for model in (first, second, *locals_):
            model.zero_grad()
        (loss_of(first(batch(rank, step))) + loss_of(second(batch(rank, step + 50)))).backward()
        (loss_of(locals_[0](batch(rank, step))) + loss_of(locals_[1](batch(rank, step + 50)))).backward()
        for model, local in zip((first, second), locals_, strict=True):
            assert_same_on_all_ranks(gradients(model))
            assert_is_mean(gradients(model), gradients(local), wire)


@on_ranks(3)
def test_the_groups_own_size_divides(rank: int, world: int) -> None:
    """A group of ranks 0 and 1 in a world of 3 divides by 2."""
    group = dist.new_group([0, 1])
    if rank < 2:
        model = nn.Linear(4, 2, bias=False)
        nn.init.ones_(model.weight)
        ddp, _ = hooked(model, "native", process_group=group)
        ddp(torch.full((1, 4), float(2 * rank + 1))).sum().backward()
        assert model.weight.grad is not None and model.weight.grad.unique().tolist() == [2.0]
    else:
        with pytest.raises(ValueError, match="rank 2 is not a member"):
            fusedreduce.FusedHookState(group)
    dist.barrier()


@on_ranks(2)
def test_fp16_divides_before_it_casts_and_torch_does_not(rank: int, world: int) -> None:
    """Gradients of 80000 on rank 0 and 0 elsewhere, by our hook and by torch's."""
    results = []
    for register in (
        lambda ddp: ddp.register_comm_hook(fusedreduce.FusedHookState(wire="fp16"), fusedreduce.fused_hook),
        lambda ddp: ddp.register_comm_hook(None, default_hooks.fp16_compress_hook),
    ):
        model = nn.Linear(3, 1, bias=False)
        ddp = DistributedDataParallel(model)
        register(ddp)
        ddp(torch.full((1, 3), 80000.0 if rank == 0 else 0.0)).sum().backward()
        assert model.weight.grad is not None
        results.append(model.weight.grad.flatten().tolist())
    ours, theirs = results[0], results[1]
    assert ours == [40000.0] * 3
    assert theirs == [float("inf")] * 3


def counted(rank: int, world: int, wire: str) -> dict[str, Any]:
    """Launches and collectives of one late step."""
    ddp, state = hooked(mlp(), wire, gradient_as_bucket_view=True)
    for step in range(3):
        ddp.zero_grad()
        loss_of(ddp(batch(rank, step))).backward()
    before = state.stats()
    ddp.zero_grad()
    with counting.count_launches() as launches, Collectives() as issued:
        loss_of(ddp(batch(rank, 3))).backward()
    after = state.stats()
    return {
        "buckets": after["buckets"],
        "gradients": gradients(ddp),
        "issued": issued.payload_bytes,
        "collectives": int(after["collectives"]) - int(before["collectives"]),
        "wire_bytes": int(after["wire_bytes"]) - int(before["wire_bytes"]),
        "numel": sum(p.numel() for p in ddp.parameters()),
        "launches": [(one.function, one.path, one.launches) for one in launches],
        "allocations": int(after["wire_allocations"]) - int(before["wire_allocations"]),
    }


@pytest.mark.parametrize("as_view", [False, True])
@on_ranks(3)
def test_disagreeing_ranks_all_raise_and_lose_nothing(rank: int, world: int, as_view: bool) -> None:
    """One rank has another wire and another option. The error, whether gradients stayed local, and whether DDP works
    afterwards."""
    options: dict[str, Any] = {"wire": "bf16", "stall_report_s": 3.0} if rank == world - 1 else {"wire": "fp16"}
    ddp, state = hooked(mlp(), state=fusedreduce.FusedHookState(**options), gradient_as_bucket_view=as_view)
    local = copy.deepcopy(ddp.module)
    loss_of(local(batch(rank, 0))).backward()
    message, kind = "", ""
    for _ in range(2):
        ddp.zero_grad()
        try:
            loss_of(ddp(batch(rank, 0))).backward()
        except Exception as error:
            message, kind = str(error), type(error).__name__
    kept = all(torch.equal(a, b) for a, b in zip(gradients(ddp), gradients(local), strict=True))
    inside_hook(state).pretend_config(fusedreduce.ReduceConfig(wire="bf16"))
    usable = True
    for step in range(3):
        assert_step_averages(ddp, batch(rank, step), "bf16")
        usable = usable and state.stats()["collectives"] != 0
    assert kind == "AgreementError"
    assert 'wire: "fp16" on ranks 0, 1; "bf16" on rank 2' in message
    assert re.search("stall_report_s: .* on ranks 0, 1; 3.0 on rank 2", message), message
    assert kept, "gradients must stay what they were on this rank"
    assert usable, "the next step must work"


@on_ranks(2)
def test_a_wire_the_backend_cannot_sum_is_refused_on_every_rank(rank: int, world: int) -> None:
    """A backend that cannot sum the wire's dtype."""
    from fusedreduce.comm import backend_support

    ddp, state = hooked(mlp(), "bf16")
    local = copy.deepcopy(ddp.module)
    loss_of(local(batch(rank, 0))).backward()
    known = backend_support.SUMMABLE["gloo", "cpu"]
    backend_support.SUMMABLE["gloo", "cpu"] = known - {torch.bfloat16}
    try:
        with pytest.raises(
            fusedreduce.UnsupportedWireError,
            match="'gloo' cannot all-reduce torch.bfloat16 on cpu.*choose another wire",
        ):
            loss_of(ddp(batch(rank, 0))).backward()
    finally:
        backend_support.SUMMABLE["gloo", "cpu"] = known
    assert all(torch.equal(a, b) for a, b in zip(gradients(ddp), gradients(local), strict=True))


@on_ranks(2)
def test_a_backend_in_no_table_is_asked(rank: int, world: int) -> None:
    """A backend that is in no table is asked with one element, on every rank alike."""
    from fusedreduce.comm import backend_support, process_group

    known = backend_support.SUMMABLE.pop(("gloo", "cpu"))
    try:
        communicator = process_group.ProcessGroupCommunicator()
        device, failed = torch.device("cpu"), []
        for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
            try:
                communicator.check_wire(dtype, device)
            except fusedreduce.UnsupportedWireError as error:
                failed.append(f"{dtype}: {error}")
    finally:
        backend_support.SUMMABLE["gloo", "cpu"] = known
    assert any("torch.float8_e4m3fn" in one for one in failed), failed
    assert not any("bfloat16" in one or "float32:" in one for one in failed)


@pytest.mark.parametrize("door", ["hook", "wrapper"])
@on_ranks(3)
def test_a_backend_that_cannot_exchange_is_refused_before_anything_is_reduced(rank: int, world: int, door: str) -> None:
    """A backend that is in no table, and has no all-to-all."""
    from fusedreduce.comm import backend_support

    def all_to_all(*_: object, **__: object) -> None:
        raise RuntimeError("Backend mine does not support all_to_all_single")

    if door == "hook":
        ddp: Any = hooked(mlp(), "int8")[0]
    else:
        ddp = fusedreduce.DistributedDataParallel(mlp(), reduce=fusedreduce.ReduceConfig(wire="int8"))
    local = copy.deepcopy(ddp.module)
    loss_of(local(batch(rank, 0))).backward()
    known, theirs = backend_support.SUMMABLE.pop(("gloo", "cpu")), dist.all_to_all_single
    dist.all_to_all_single = all_to_all
    try:
        with pytest.raises(fusedreduce.UnsupportedWireError) as caught:
            loss_of(ddp(batch(rank, 0))).backward()
    finally:
        backend_support.SUMMABLE["gloo", "cpu"] = known
        dist.all_to_all_single = theirs
    refusal = "'gloo' cannot exchange bytes (all-to-all) on cpu (RuntimeError: Backend mine does not support"
    assert refusal in str(caught.value) and "accumulation='wire'" in str(caught.value)
    if door == "hook":
        assert all(map(torch.equal, gradients(ddp), gradients(local)))
    else:
        assert all(one.grad is None for one in ddp.parameters())


@on_ranks(2)
def test_pickling_and_copying(rank: int, world: int) -> None:
    """A state with a group loses it, says so, and works on the default group."""
    state = fusedreduce.FusedHookState(dist.group.WORLD, wire="fp16")
    with logged(level=logging.WARNING) as messages:
        loaded = pickle.loads(pickle.dumps(state))
    assert len(messages) == 1 and "without its process group" in messages[0]
    assert loaded.config == state.config and loaded.process_group is None
    assert copy.deepcopy(state).process_group is dist.group.WORLD
    ddp, _ = hooked(mlp(), state=loaded)
    assert_step_averages(ddp, batch(rank, 0), "fp16")


@pytest.mark.parametrize(("world", "wire"), WIRES_AT_TWO_AND_INT8)
@on_ranks()
def test_create_graph(rank: int, world: int, wire: str) -> None:
    """backward(create_graph=True) on what torch's own DDP can do: one parameter, first-order gradients averaged."""
    ddp, _ = hooked(nn.Linear(24, 12, bias=False), wire)
    for step in range(3):
        local = copy.deepcopy(ddp.module)
        ddp.zero_grad()
        local.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss_of(ddp(batch(rank, step))).backward(create_graph=True)
        loss_of(local(batch(rank, step))).backward()
        assert_is_mean(gradients(ddp), gradients(local), wire)


@pytest.mark.parametrize(("world", "wire"), WIRES_AT_TWO_AND_INT8)
@on_ranks()
def test_shared_and_separate_states(rank: int, world: int, wire: str) -> None:
    """Rank 0 uses one state for two modules, the others one each: they must still agree at the same calls."""
    first, state = hooked(mlp(1), wire)
    second, _ = hooked(mlp(2), wire, state=state if rank == 0 else None)
    for step in range(4):
        for model in (first, second):
            assert_step_averages(model, batch(rank, step), wire)


class TwoDtypes(nn.Module):
    """An fp32 layer and one of 16 bits."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.second = nn.Linear(24, 24).to(dtype), nn.Linear(24, 24)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.first(features.to(self.first.weight.dtype))
        result: torch.Tensor = self.second(hidden.float())
        return result


@on_ranks(2)
def test_a_layer_of_another_dtype_in_a_later_bucket_is_refused_on_every_rank(rank: int, world: int) -> None:
    """Only a later bucket differs."""
    ddp, _ = hooked(TwoDtypes(torch.bfloat16 if rank == 0 else torch.float16))
    with pytest.raises(fusedreduce.AgreementError) as caught:
        loss_of(ddp(batch(rank, 0))).backward()
    message = str(caught.value)
    assert "bucket 1: " in message and "torch.bfloat16" in message and "torch.float16" in message


@pytest.mark.parametrize("wire", WIRES)
@on_ranks(2)
def test_launches_collectives_and_bytes_are_as_promised(rank: int, world: int, wire: str) -> None:
    seen = counted(rank, world, wire)
    assert seen["buckets"] >= 2 and seen["collectives"] == seen["buckets"]
    functions = [function for function, _, _ in seen["launches"]]
    assert functions.count("pack") == seen["buckets"]
    assert functions.count("unpack") == (0 if wire == "native" else seen["buckets"])
    assert seen["wire_bytes"] == seen["numel"] * (4 if wire == "native" else 2)
    assert len(seen["issued"]) == seen["buckets"] and sum(seen["issued"]) == seen["wire_bytes"]
    assert seen["allocations"] == 0


@pytest.mark.parametrize("wire", ["native", "fp16"])
def test_one_kernel_launch_before_and_one_after_the_collective(wire: str) -> None:
    """The same steps through Triton's interpreter: each pack and each unpack is one kernel. The other rank sends 0."""
    with fake_group(2):
        seen = counted(0, 2, wire)
    local = mlp()
    loss_of(local(batch(0, 3))).backward()
    assert {path for _, path, _ in seen["launches"]} == {"interpreter"}
    assert all(launches == 1 for _, _, launches in seen["launches"])
    assert len(seen["launches"]) == seen["buckets"] * (1 if wire == "native" else 2)
    for found, own in zip(seen["gradients"], gradients(local), strict=True):
        assert torch.equal(found, own / 2 if wire == "native" else (own / 2).half().float())
