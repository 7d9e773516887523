"""What ranks run in test_hook.py. Every rank draws inputs of its own, so that a hook that does nothing fails."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import fusedreduce
from fusedreduce.kernels import dispatch

UNIT = {"native": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}
TINY = {"native": 2.0**-150, "bf16": 2.0**-134, "fp16": 2.0**-25}
SMALL_CAP_MB = 0.004


def hooked(
    model: nn.Module, wire: str = "native", state: fusedreduce.FusedHookState | None = None, **options: Any
) -> tuple[DistributedDataParallel, fusedreduce.FusedHookState]:
    """`model` under torch's DDP with our hook; small buckets unless said otherwise."""
    options.setdefault("bucket_cap_mb", SMALL_CAP_MB)
    ddp = DistributedDataParallel(model, **options)
    state = state or fusedreduce.FusedHookState(options.get("process_group"), wire=wire)  # type: ignore[arg-type]
    ddp.register_comm_hook(state, fusedreduce.fused_hook)
    return ddp, state


def mlp(seed: int = 0) -> nn.Module:
    """Three layers, about 2,700 parameters: three or four of the small buckets."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 40), nn.Tanh(), nn.Linear(40, 12))


def batch(rank: int, step: int, features: int = 24) -> torch.Tensor:
    """This rank's input of one step."""
    return torch.randn(8, features, generator=torch.Generator().manual_seed(7919 * step + rank))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """Clones of all gradients, real pairs for complex ones."""
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [(torch.view_as_real(one) if one.is_complex() else one).detach().clone() for one in found]


def assert_same_on_all_ranks(tensors: list[torch.Tensor]) -> None:
    """Byte for byte."""
    flat = torch.cat([one.contiguous().view(torch.uint8).reshape(-1) for one in tensors if one.numel()])
    gathered = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, flat)
    assert all(torch.equal(one, flat) for one in gathered), "ranks hold different bytes"


def assert_is_mean(averaged: list[torch.Tensor], local: list[torch.Tensor], wire: str, factor: float = 1.0) -> None:
    """`averaged` is the mean over all ranks of `local`, within the roundings that the wire makes.

    Each of W contributions is rounded once to the wire's unit u, and at most W - 1 sums of them are: an error of at
    most W u times the sum of |contribution|, and half of the smallest subnormal each where the wire underflows.
    """
    world = dist.get_world_size()
    assert len(averaged) == len(local)
    for ours, mine in zip(averaged, local, strict=True):
        total, size = mine.double() / world, mine.double().abs() / world
        dist.all_reduce(total)
        dist.all_reduce(size)
        unit = max(UNIT[wire], torch.finfo(mine.dtype).eps / 2)
        bound = factor * world * (1.01 * unit * size + 2 * TINY[wire])
        worst = ((ours.double() - total).abs() - bound).max() if ours.numel() else torch.tensor(-1.0)
        assert worst <= 0, f"gradient off by {worst.item()} more than the {wire} wire explains"


def loss_of(output: Any) -> torch.Tensor:
    """Mean square of everything a model returns."""
    if isinstance(output, tuple):
        return torch.stack([loss_of(one) for one in output]).sum()
    assert isinstance(output, torch.Tensor)
    return (output.real if output.is_complex() else output).float().square().mean()


def train(
    rank: int,
    make: Callable[[], nn.Module],
    wire: str,
    steps: int,
    make_input: Callable[[int, int], Any] = batch,
    **options: Any,
) -> dict[str, Any]:
    """Steps of SGD under our hook; every step's gradients are compared with the mean of the ranks' local ones."""
    ddp, state = hooked(make(), wire, **options)
    local = copy.deepcopy(ddp.module)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    allocations = 0
    for step in range(steps):
        given = make_input(rank, step)
        with torch.no_grad():
            for mine, theirs in zip(local.parameters(), ddp.module.parameters(), strict=True):
                mine.copy_(theirs)
        local.zero_grad()
        loss_of(local(given)).backward()
        optimizer.zero_grad()
        loss_of(ddp(given)).backward()
        averaged = gradients(ddp)
        assert_same_on_all_ranks(averaged)
        expected = [p.grad for p in local.parameters() if p.requires_grad]
        shapes = [p for p in local.parameters() if p.requires_grad]
        filled = [torch.zeros_like(p) if g is None else g for p, g in zip(shapes, expected, strict=True)]
        filled = [torch.view_as_real(one) if one.is_complex() else one for one in filled]
        assert_is_mean(averaged, filled, wire)
        optimizer.step()
        if step == 2:
            allocations = int(state.stats()["wire_allocations"])
    stats = state.stats()
    assert stats["wire_allocations"] == allocations or steps < 3, "a wire buffer was allocated after the third step"
    assert stats["steps"] == steps
    return stats


def parity_with_torch(rank: int, world: int, wire: str, steps: int, as_view: bool) -> float:
    """Our hook against torch's own DDP on the same weights, step by step; returns the worst relative difference."""
    theirs = DistributedDataParallel(mlp(), bucket_cap_mb=SMALL_CAP_MB)
    ours, state = hooked(mlp(), wire, gradient_as_bucket_view=as_view)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.05)
    worst = 0.0
    for step in range(steps):
        with torch.no_grad():
            for to, source in zip(theirs.parameters(), ours.parameters(), strict=True):
                to.copy_(source)
        for model in (theirs, ours):
            model.zero_grad()
            loss_of(model(batch(rank, step))).backward()
        assert_same_on_all_ranks(gradients(ours))
        for mine, other in zip(gradients(ours), gradients(theirs), strict=True):
            worst = max(worst, float((mine - other).abs().max() / other.abs().max()))
        optimizer.step()
        if step == 2:
            allocations = state.stats()["wire_allocations"]
    assert state.stats()["wire_allocations"] == allocations
    assert int(state.stats()["buckets"]) >= 2
    return worst


class Zoo(nn.Module):
    """Tied, frozen, zero-element and channels-last parameters, mixed dtypes, several outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.conv = nn.Conv2d(3, 8, 3)
        self.conv.weight.data = self.conv.weight.data.to(memory_format=torch.channels_last)
        self.first = nn.Linear(8, 8, bias=False)
        self.tied = nn.Linear(8, 8, bias=False)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.empty = nn.Parameter(torch.zeros(0, 5))
        self.brain = nn.Linear(8, 8).to(torch.bfloat16)
        self.sixteen = nn.Linear(8, 8).to(torch.float16)
        self.wide = nn.Linear(8, 4).to(torch.float64)

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = self.conv(image).mean((2, 3))
        hidden = self.frozen(self.tied(torch.tanh(self.first(features))))
        mixed = self.brain(hidden.to(torch.bfloat16)).float() + self.sixteen(hidden.half()).float()
        return self.wide(mixed.double()), hidden + self.empty.sum()


def images(rank: int, step: int) -> torch.Tensor:
    """Channels-last images."""
    generator = torch.Generator().manual_seed(31 * step + rank)
    return torch.randn(4, 3, 6, 6, generator=generator).to(memory_format=torch.channels_last)


class Branches(nn.Module):
    """Uses one of two layers, never a third."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))

    def forward(self, given: tuple[torch.Tensor, int]) -> torch.Tensor:
        features, which = given
        chosen: torch.Tensor = self.layers[which](features)
        return chosen


class ComplexNet(nn.Module):
    """A complex weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.weight = nn.Parameter(torch.randn(24, 10, dtype=torch.complex64))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(features.to(torch.complex64) @ self.weight)


def zoo(rank: int, world: int, wire: str) -> dict[str, Any]:
    """Every kind of parameter under one model."""
    return train(rank, Zoo, wire, 6, images, gradient_as_bucket_view=True)


def complex_parameters(rank: int, world: int, wire: str) -> dict[str, Any]:
    """Complex gradients travel as pairs."""
    return train(rank, ComplexNet, wire, 5)


def static_graph(rank: int, world: int, wire: str) -> dict[str, Any]:
    """DDP delays every reduction of the first step to its end."""
    return train(rank, mlp, wire, 6, static_graph=True)


def unused_parameters(rank: int, world: int, wire: str) -> None:
    """Locally unused gets the mean, globally unused keeps its gradient (None)."""
    ddp, _ = hooked(Branches(), wire, find_unused_parameters=True, bucket_cap_mb=0.001)
    for step in range(6):
        ddp.zero_grad()
        local = copy.deepcopy(ddp.module)
        which = (rank + step) % 2
        loss_of(local((batch(rank, step), which))).backward()
        loss_of(ddp((batch(rank, step), which))).backward()
        assert ddp.module.layers[2].weight.grad is None
        used = list(ddp.module.layers[:2].parameters())
        mine = [p.grad if p.grad is not None else torch.zeros_like(p) for p in local.layers[:2].parameters()]
        averaged = [p.grad for p in used]
        assert all(one is not None for one in averaged)
        assert_same_on_all_ranks(averaged)
        assert_is_mean(averaged, mine, wire)


def no_sync(rank: int, world: int, wire: str) -> None:
    """Two micro-batches accumulate, their sum is averaged once."""
    ddp, state = hooked(mlp(), wire)
    for step in range(4):
        local = copy.deepcopy(ddp.module)
        ddp.zero_grad()
        with ddp.no_sync():
            loss_of(ddp(batch(rank, 2 * step))).backward()
        loss_of(ddp(batch(rank, 2 * step + 1))).backward()
        local.zero_grad()
        for micro in (0, 1):
            loss_of(local(batch(rank, 2 * step + micro))).backward()
        assert_same_on_all_ranks(gradients(ddp))
        assert_is_mean(gradients(ddp), gradients(local), wire)
    assert state.stats()["steps"] == 4


def join_uneven(rank: int, world: int, wire: str) -> list[float]:
    """Rank r has 3 + 2 r batches; joined ranks contribute zeros, the divisor stays the world size."""
    ddp, _ = hooked(mlp(), wire)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    with Join([ddp], divide_by_initial_world_size=True):
        for step in range(3 + 2 * rank):
            optimizer.zero_grad()
            loss_of(ddp(batch(rank, step))).backward()
            optimizer.step()
    parameters = [p.detach() for p in ddp.parameters()]
    assert_same_on_all_ranks(parameters)
    return [float(p.double().sum()) for p in parameters]


def join_uneven_alone(rank: int, world: int) -> list[float]:
    """The same training in one process, in fp64: what join_uneven must come to."""
    model = mlp().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(3 + 2 * (world - 1)):
        optimizer.zero_grad()
        for other in range(world):
            if step < 3 + 2 * other:
                (model(batch(other, step).double()).square().mean() / world).backward()
        optimizer.step()
    return [float(p.detach().sum()) for p in model.parameters()]


def sparse_embedding(rank: int, world: int, wire: str) -> None:
    """A sparse bucket goes through torch's all-reduce, beside dense ones through ours."""
    torch.manual_seed(6)
    model = nn.Sequential(nn.Embedding(50, 24, sparse=True), nn.Linear(24, 6))
    ddp, _ = hooked(model, wire)
    for step in range(4):
        tokens = torch.randint(0, 50, (10,), generator=torch.Generator().manual_seed(13 * step + rank))
        local = copy.deepcopy(ddp.module)
        ddp.zero_grad()
        local.zero_grad()
        loss_of(ddp(tokens)).backward()
        loss_of(local(tokens)).backward()
        assert ddp.module[0].weight.grad.is_sparse
        averaged = [ddp.module[0].weight.grad.to_dense(), *gradients(ddp.module[1])]
        mine = [local[0].weight.grad.to_dense(), *gradients(local[1])]
        assert_same_on_all_ranks(averaged)
        assert_is_mean(averaged[:1], mine[:1], "native", factor=2.0)
        assert_is_mean(averaged[1:], mine[1:], wire)


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


class Collectives(TorchDispatchMode):
    """Bytes of every collective that this thread issues, whoever issues it."""

    def __init__(self) -> None:
        super().__init__()
        self.payload_bytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.payload_bytes.append(sum(tensor.nbytes for tensor in args[0]))
        return func(*args, **(kwargs or {}))


def counted(rank: int, world: int, wire: str) -> dict[str, Any]:
    """Launches and collectives of one late step."""
    ddp, state = hooked(mlp(), wire, gradient_as_bucket_view=True)
    for step in range(3):
        ddp.zero_grad()
        loss_of(ddp(batch(rank, step))).backward()
    before = state.stats()
    ddp.zero_grad()
    with dispatch.count_launches() as launches, Collectives() as issued:
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
    state._reduction.config = fusedreduce.ReduceConfig(wire="bf16")
    usable = True
    for step in range(3):
        ddp.zero_grad()
        local.zero_grad()
        loss_of(ddp(batch(rank, step))).backward()
        loss_of(local(batch(rank, step))).backward()
        assert_is_mean(gradients(ddp), gradients(local), "bf16")
        usable = usable and state.stats()["collectives"] != 0
    return kind, message, kept, usable


def unsupported_wire(rank: int, world: int) -> tuple[str, str, bool]:
    """A backend that cannot sum the wire's dtype."""
    from fusedreduce.comm import process_group

    ddp, state = hooked(mlp(), "bf16")
    local = copy.deepcopy(ddp.module)
    loss_of(local(batch(rank, 0))).backward()
    known = process_group._SUMMABLE["gloo", "cpu"]
    process_group._SUMMABLE["gloo", "cpu"] = known - {torch.bfloat16}
    try:
        loss_of(ddp(batch(rank, 0))).backward()
    except Exception as error:
        kept = all(torch.equal(a, b) for a, b in zip(gradients(ddp), gradients(local), strict=True))
        return type(error).__name__, str(error), kept
    finally:
        process_group._SUMMABLE["gloo", "cpu"] = known
    return "", "", False


def unlisted_backend(rank: int, world: int) -> tuple[str, list[str]]:
    """A backend that is in no table is asked with one element, on every rank alike."""
    from fusedreduce.comm import process_group

    known = process_group._SUMMABLE.pop(("gloo", "cpu"))
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
        process_group._SUMMABLE["gloo", "cpu"] = known


def pickled(rank: int, world: int) -> None:
    """A state with a group loses it, says so, and works on the default group."""
    state = fusedreduce.FusedHookState(dist.group.WORLD, wire="fp16")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = pickle.loads(pickle.dumps(state))
    assert any("without its process group" in str(one.message) for one in caught)
    assert loaded.config == state.config and loaded.process_group is None
    assert copy.deepcopy(state).process_group is dist.group.WORLD
    ddp, _ = hooked(mlp(), state=loaded)
    local = copy.deepcopy(ddp.module)
    loss_of(ddp(batch(rank, 0))).backward()
    loss_of(local(batch(rank, 0))).backward()
    assert_is_mean(gradients(ddp), gradients(local), "fp16")


def reentrant_checkpoint(rank: int, world: int, wire: str, reentrant: bool) -> None:
    """Activation checkpointing inside DDP."""
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(8)
            self.first, self.second, self.third = nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 24)

        def forward(self, features: torch.Tensor) -> torch.Tensor:
            hidden = torch.tanh(self.first(features))
            hidden = checkpoint(lambda x: torch.tanh(self.second(x)), hidden, use_reentrant=reentrant)
            result: torch.Tensor = self.third(hidden)
            return result

    train(rank, Checkpointed, wire, 5)


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
            local = copy.deepcopy(model.module)
            model.zero_grad()
            local.zero_grad()
            loss_of(model(batch(rank, step))).backward()
            loss_of(local(batch(rank, step))).backward()
            assert_same_on_all_ranks(gradients(model))
            assert_is_mean(gradients(model), gradients(local), wire)


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
        (ours,) = state._reduction.buckets.buckets()
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
