"""What ranks run in test_hook.py. Every rank draws inputs of its own, so that a hook that does nothing fails."""

from __future__ import annotations

import copy
import logging
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ddp_models import (
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
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import fusedreduce
from fusedreduce.kernels import counting


def two_modules_one_state(rank: int, world: int, wire: str) -> None:
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


def subgroup_size_counts(rank: int, world: int, wire: str) -> None:
    """A group of ranks 0 and 1 in a world of 3 divides by 2."""
    group = dist.new_group([0, 1])
    if rank < 2:
        model = nn.Linear(4, 2, bias=False)
        nn.init.ones_(model.weight)
        ddp, _ = hooked(model, wire, process_group=group)
        ddp(torch.full((1, 4), float(2 * rank + 1))).sum().backward()
        assert model.weight.grad is not None and model.weight.grad.unique().tolist() == [2.0]
    else:
        with pytest.raises(ValueError, match="rank 2 is not a member"):
            fusedreduce.FusedHookState(group)
    dist.barrier()


def fp16_divides_before_it_casts(rank: int, world: int) -> tuple[list[float], list[float]]:
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
    return results[0], results[1]


def non_finite_survives(rank: int, world: int, wire: str) -> None:
    """NaN and Inf on one rank are NaN and Inf on all."""
    model = nn.Linear(3, 1, bias=False)
    ddp, _ = hooked(model, wire)
    ddp(torch.tensor([[float("nan"), float("inf"), 1.0]] if rank == 0 else [[1.0, 1.0, 1.0]])).sum().backward()
    assert model.weight.grad is not None
    found = model.weight.grad.flatten()
    assert found[0].isnan() and found[1].isinf() and found[2] == 1.0
    assert_same_on_all_ranks([model.weight.grad])


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
        "issued": issued.payload_bytes,
        "collectives": int(after["collectives"]) - int(before["collectives"]),
        "wire_bytes": int(after["wire_bytes"]) - int(before["wire_bytes"]),
        "numel": sum(p.numel() for p in ddp.parameters()),
        "launches": [(one.function, one.path, one.launches) for one in launches],
        "allocations": int(after["wire_allocations"]) - int(before["wire_allocations"]),
    }


def disagreement(rank: int, world: int, as_view: bool) -> tuple[str, str, bool, bool]:
    """One rank uses another wire. The error, whether gradients stayed local, and whether DDP works afterwards."""
    ddp, state = hooked(mlp(), "bf16" if rank == world - 1 else "fp16", gradient_as_bucket_view=as_view)
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
    return kind, message, kept, usable


def unsupported_wire(rank: int, world: int) -> tuple[str, str, bool]:
    """A backend that cannot sum the wire's dtype."""
    from fusedreduce.comm import backend_support

    ddp, state = hooked(mlp(), "bf16")
    local = copy.deepcopy(ddp.module)
    loss_of(local(batch(rank, 0))).backward()
    known = backend_support._SUMMABLE["gloo", "cpu"]
    backend_support._SUMMABLE["gloo", "cpu"] = known - {torch.bfloat16}
    try:
        loss_of(ddp(batch(rank, 0))).backward()
    except Exception as error:
        kept = all(torch.equal(a, b) for a, b in zip(gradients(ddp), gradients(local), strict=True))
        return type(error).__name__, str(error), kept
    finally:
        backend_support._SUMMABLE["gloo", "cpu"] = known
    return "", "", False


def unlisted_backend(rank: int, world: int) -> tuple[str, list[str]]:
    """A backend that is in no table is asked with one element, on every rank alike."""
    from fusedreduce.comm import backend_support, process_group

    known = backend_support._SUMMABLE.pop(("gloo", "cpu"))
    try:
        communicator = process_group.ProcessGroupCommunicator()
        device, failed = torch.device("cpu"), []
        for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
            try:
                communicator.check_wire(dtype, device)
            except fusedreduce.UnsupportedWireError as error:
                failed.append(f"{dtype}: {error}")
        return "asked", failed
    finally:
        backend_support._SUMMABLE["gloo", "cpu"] = known


def without_all_to_all(rank: int, world: int, door: str) -> tuple[str, str, bool]:
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
    known, theirs = backend_support._SUMMABLE.pop(("gloo", "cpu")), dist.all_to_all_single
    dist.all_to_all_single = all_to_all
    try:
        loss_of(ddp(batch(rank, 0))).backward()
    except Exception as error:
        held = gradients(ddp) if door == "hook" else [one.grad for one in ddp.parameters()]
        kept = [None] * len(held) if door == "wrapper" else gradients(local)
        return type(error).__name__, str(error), all(map(_same, held, kept))
    finally:
        backend_support._SUMMABLE["gloo", "cpu"] = known
        dist.all_to_all_single = theirs
    return "", "", False


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


def pickled(rank: int, world: int) -> None:
    """A state with a group loses it, says so, and works on the default group."""
    state = fusedreduce.FusedHookState(dist.group.WORLD, wire="fp16")
    with logged(level=logging.WARNING) as messages:
        loaded = pickle.loads(pickle.dumps(state))
    assert len(messages) == 1 and "without its process group" in messages[0]
    assert loaded.config == state.config and loaded.process_group is None
    assert copy.deepcopy(state).process_group is dist.group.WORLD
    ddp, _ = hooked(mlp(), state=loaded)
    assert_step_averages(ddp, batch(rank, 0), "fp16")


def user_collectives_in_backward(rank: int, world: int, wire: str) -> None:
    """SyncBatchNorm-like all-reduces of the user's own in backward keep their order relative to ours."""

    class Summed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            reduced = grad.clone()
            dist.all_reduce(reduced)
            return reduced / dist.get_world_size()

    class WithCollectives(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(9)
            self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(4))

        def forward(self, features: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                features = Summed.apply(torch.tanh(layer(features)))
            return features

    ddp, _ = hooked(WithCollectives(), wire)
    for step in range(5):
        ddp.zero_grad()
        loss_of(ddp(batch(rank, step))).backward()
        assert_same_on_all_ranks(gradients(ddp))


def gradient_accumulation_dtype_of_autocast(rank: int, world: int, wire: str) -> None:
    """Autocast: fp32 gradients from bf16 compute."""
    ddp, _ = hooked(mlp(), wire)
    for step in range(3):
        local = copy.deepcopy(ddp.module)
        ddp.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss, alone = loss_of(ddp(batch(rank, step))), loss_of(local(batch(rank, step)))
        loss.backward()
        alone.backward()
        assert_is_mean(gradients(ddp), gradients(local), wire)


def create_graph(rank: int, world: int, wire: str) -> None:
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


def shared_and_separate_states(rank: int, world: int, wire: str) -> None:
    """Rank 0 uses one state for two modules, the others one each: they must still agree at the same calls."""
    first, state = hooked(mlp(1), wire)
    second, _ = hooked(mlp(2), wire, state=state if rank == 0 else None)
    for step in range(4):
        for model in (first, second):
            assert_step_averages(model, batch(rank, step), wire)


def models_of_different_dtype(rank: int, world: int) -> str:
    """DDP compares shapes, not dtypes; a sum of buckets of different dtypes is garbage or a crash."""
    ddp, _ = hooked(mlp().to(torch.bfloat16 if rank == 0 else torch.float32), "fp16")
    with pytest.raises(fusedreduce.AgreementError) as caught:
        loss_of(ddp(batch(rank, 0).to(next(ddp.parameters()).dtype))).backward()
    return str(caught.value)


def names_follow_the_buckets(rank: int, world: int) -> list[str]:
    """DDP reverses a model of one bucket after its first step: same index, same size, other order of parameters."""
    ddp, state = hooked(mlp(), bucket_cap_mb=25)
    labels = []
    for step in range(3):
        loss_of(ddp(batch(rank, step))).backward()
        (ours,) = inside_hook(state).buckets
        labels.append(ours.label)
    return labels


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


def layers_of_different_dtype(rank: int, world: int) -> str:
    """Only a later bucket differs."""
    ddp, _ = hooked(TwoDtypes(torch.bfloat16 if rank == 0 else torch.float16))
    with pytest.raises(fusedreduce.AgreementError) as caught:
        loss_of(ddp(batch(rank, 0))).backward()
    return str(caught.value)
