"""Models, inputs and comparisons of rank processes, which train them under the wrapper or under torch's with our hook.

Every rank draws inputs of its own, so that a hook that does nothing fails.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fusedreduce
from support.own_wires import NAME
from support.wires import EXCHANGED, encoding_of, half_quanta, in_memory, settings

UNIT = {"native": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11, NAME.format("TOP16"): 2.0**-7}
TINY = {"native": 2.0**-150, "bf16": 2.0**-134, "fp16": 2.0**-25}
for _wire in EXCHANGED:
    UNIT[_wire], TINY[_wire] = (one.get(_wire.removesuffix("+fp32"), one["native"]) for one in (UNIT, TINY))
WIRES = ("native", "bf16", "fp16")
SURFACES = ("wrapper", "hook")
SMALL_CAP_MB = 0.004
# First every parameter is hooked, then buckets are laid out anew and only those that complete one are.
STEPS = 5


def training_cells(trainings: Sequence[Any]) -> list[tuple[int, Any, str, str]]:
    """Ranks, training, surface and wire of grids: exchanged wires with three ranks, where sums are combined."""
    return [
        *itertools.product((2,), trainings, SURFACES, WIRES),
        *itertools.product((2,), trainings, ("wrapper",), ("int8", "int4")),
        *itertools.product((3,), trainings, SURFACES, ("int8", "bf16+fp32")),
    ]


def hooked(
    model: nn.Module, wire: str = "native", state: fusedreduce.FusedHookState | None = None, **options: Any
) -> tuple[DistributedDataParallel, fusedreduce.FusedHookState]:
    """`model` under torch's DDP with our hook; small buckets unless said otherwise."""
    options.setdefault("bucket_cap_mb", SMALL_CAP_MB)
    ddp = DistributedDataParallel(model, **options)
    state = state or fusedreduce.FusedHookState(options.get("process_group"), **settings(wire))
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
    most W u times the sum of |contribution|, and half of the smallest subnormal each where the wire underflows. A wire
    of 16 bits that is added up in fp32 rounds the sum once, whatever W: 2 u. An encoded one is off by half a quantum
    for each contribution, and where it encodes the sum, by as much again and a twelfth: decoded contributions may be
    larger than they were by half a quantum, of int4 a fourteenth of the block's largest. What is not encoded is native.
    """
    world = dist.get_world_size()
    roundings = 2 if wire.endswith("+fp32") else world
    assert len(averaged) == len(local)
    # Of all gradients at once: a collective costs more than they do.
    rows = torch.cat([_total_size_and_quanta(mine, wire) for mine in local], 1)
    of_ranks = [torch.empty_like(rows) for _ in range(world)]
    dist.all_gather(of_ranks, rows)
    means = torch.stack(of_ranks).mean(0).split([mine.numel() for mine in local], 1)
    for ours, mine, (total, size, quanta) in zip(averaged, local, means, strict=True):
        unit = max(UNIT.get(wire, UNIT["native"]), torch.finfo(mine.dtype).eps / 2)
        bound = factor * roundings * (1.01 * unit * size + world * TINY.get(wire, TINY["native"]))
        bound += factor * (1.01 if world <= 2 else 1.01 + 13 / 12) * quanta
        worst = ((ours.double().reshape(-1) - total).abs() - bound).max() if ours.numel() else torch.tensor(-1.0)
        assert worst <= 0, f"gradient off by {worst.item()} more than the {wire} wire explains"


def _total_size_and_quanta(gradient: torch.Tensor, wire: str) -> torch.Tensor:
    """As three rows, in the order of the dimensions: its elements, their absolute values, and `half_quanta`."""
    exact = gradient.double()
    quanta = torch.zeros_like(exact)
    if encoding_of(gradient, wire) is not None:
        in_memory(quanta).copy_(half_quanta(gradient, wire))
    return torch.stack([exact, exact.abs(), quanta]).flatten(1)


def loss_of(output: Any) -> torch.Tensor:
    """Mean square of everything a model returns."""
    if isinstance(output, tuple):
        return torch.stack([loss_of(one) for one in output]).sum()
    assert isinstance(output, torch.Tensor)
    return (output.real if output.is_complex() else output).float().square().mean()


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


class ComplexNet(nn.Module):
    """A complex weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.weight = nn.Parameter(torch.randn(24, 10, dtype=torch.complex64))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(features.to(torch.complex64) @ self.weight)


class Branches(nn.Module):
    """Uses one of two layers, never a third, and returns what it is told to."""

    def __init__(self, pack: Callable[[torch.Tensor], Any] = lambda output: output) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))
        self.pack = pack

    def forward(self, given: tuple[torch.Tensor, int]) -> Any:
        features, which = given
        return self.pack(self.layers[which](features))


class Checkpointed(nn.Module):
    """A layer inside checkpoints, between two outside."""

    def __init__(self, *, reentrant: bool, times: int = 1) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.first, self.second, self.third = nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 24)
        self.reentrant, self.times = reentrant, times

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(features))
        for _ in range(self.times):
            hidden = checkpoint(lambda x: torch.tanh(self.second(x)), hidden, use_reentrant=self.reentrant)
        result: torch.Tensor = self.third(hidden)
        return result


class TwoHeads(nn.Module):
    """Two outputs that share no parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.left, self.right = mlp(1), mlp(2)

    def forward(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.left(features), self.right(features)


class Partial(nn.Module):
    """Uses all three layers, or only the first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(15)
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))

    def forward(self, given: tuple[torch.Tensor, bool]) -> torch.Tensor:
        features, everything = given
        for layer in self.layers if everything else self.layers[:1]:
            features = torch.tanh(layer(features))
        return features


class Interrupted(nn.Module):
    """Between two layers of backward it raises when armed, and calls `meanwhile` when not."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.armed = False
        self.meanwhile: Callable[[], None] = lambda: None

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        layers: Any = self.body
        hidden = layers[1](layers[0](features))
        if hidden.requires_grad:
            hidden.register_hook(self._half_way)
        result: torch.Tensor = layers[4](layers[3](layers[2](hidden)))
        return result

    def _half_way(self, _: torch.Tensor) -> None:
        if self.armed:
            raise KeyError("of the user")
        self.meanwhile()


class Summed(torch.autograd.Function):
    """A collective of the user's own in backward, as SyncBatchNorm has, whose GPU kernels a CPU has not."""

    @staticmethod
    def forward(ctx: Any, features: torch.Tensor) -> torch.Tensor:
        total = features.detach().mean(0)
        dist.all_reduce(total)
        return features + 0.0 * total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (gradient,) = gradients
        total = gradient.mean(0)
        dist.all_reduce(total)
        return gradient + total / dist.get_world_size()


class Together(nn.Module):
    """Layers with such a collective between any two of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(4))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            features = Summed.apply(torch.tanh(layer(features)))
        return features


class Collectives(TorchDispatchMode):
    """Bytes of every collective that this thread issues, whoever issues it."""

    def __init__(self) -> None:
        super().__init__()
        self.payload_bytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.payload_bytes.append(sum(tensor.nbytes for tensor in args[0]))
        return func(*args, **(kwargs or {}))


_OF_OURS = ("overlap", "policy", "sync_mode", "ranks_per_node")


def wrapped(model: nn.Module, wire: str = "native", *, surface: str = "wrapper", **options: Any) -> Any:
    """`model` under our wrapper, or under torch's with our hook; small buckets unless said otherwise."""
    if surface == "hook":
        ddp, state = hooked(model, wire, **options)
        ddp.reduce_stats = state.stats  # type: ignore[assignment]
        return ddp
    options.setdefault("bucket_cap_mb", SMALL_CAP_MB)
    ours: dict[str, Any] = {name: options.pop(name) for name in _OF_OURS if name in options}
    config = fusedreduce.ReduceConfig(**settings(wire), **ours)
    return fusedreduce.DistributedDataParallel(model, reduce=config, **options)


def assert_averaged(ddp: nn.Module, local: nn.Module, wire: str = "native", factor: float = 1.0) -> None:
    """Every gradient of `ddp` is the mean of the ranks' in `local`, and None where no rank has one."""
    pairs = [(p, q) for p, q in zip(ddp.parameters(), local.parameters(), strict=True) if p.requires_grad]
    used = torch.tensor([int(alone.grad is not None) for _, alone in pairs])
    dist.all_reduce(used)
    ours, mine = [], []
    for (parameter, alone), ranks in zip(pairs, used.tolist(), strict=True):
        assert (parameter.grad is not None) == (ranks > 0)
        if parameter.grad is not None:
            assert parameter.grad.stride() == parameter.stride() and parameter.grad.dtype is parameter.dtype
            ours.append(parameter.grad)
            mine.append(torch.zeros_like(alone) if alone.grad is None else alone.grad)
    ours, mine = ([_as_real(gradient) for gradient in one] for one in (ours, mine))
    assert_same_on_all_ranks(ours)
    assert_is_mean(ours, mine, wire, factor)


def assert_step_averages(
    ddp: Any,
    given: Any,
    wire: str = "native",
    loss: Callable[[Any], torch.Tensor] = loss_of,
    *,
    end: Callable[[], object] = lambda: None,
    factor: float = 1.0,
) -> None:
    """A step from cleared gradients, which `end` ends, has the means of those that ranks compute alone."""
    local = copy.deepcopy(ddp.module)
    for model in (ddp, local):
        model.zero_grad()
        loss(model(given)).backward()
    end()
    assert_averaged(ddp.module, local, wire, factor)


def right_steps(
    rank: int,
    ddp: Any,
    make_input: Callable[[int, int], Any] = batch,
    *,
    wire: str = "native",
    steps: int = 6,
) -> None:
    """Steps with right results: after some of them only the parameters that complete a bucket are hooked."""
    for step in range(steps):
        assert_step_averages(ddp, make_input(rank, step), wire)


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def train(
    rank: int,
    model: nn.Module,
    wire: str = "native",
    make_input: Callable[[int, int], Any] = batch,
    *,
    steps: int = STEPS,
    set_to_none: bool = True,
    loss: Callable[[Any], torch.Tensor] = loss_of,
    **options: Any,
) -> Any:
    """Steps of SGD; each step's gradients are compared with the mean of those that ranks compute alone."""
    ddp = wrapped(model, wire, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for step in range(steps):
        local = copy.deepcopy(ddp.module)
        loss(local(make_input(rank, step))).backward()
        ddp.zero_grad(set_to_none=set_to_none)
        loss(ddp(make_input(rank, step))).backward()
        assert_averaged(ddp.module, local, wire)
        optimizer.step()
        if step == 2:
            before = ddp.reduce_stats()
    assert_same_on_all_ranks([_as_real(parameter.detach()) for parameter in ddp.parameters()])
    stats = ddp.reduce_stats()
    assert stats["steps"] == steps and stats.get("state", "idle") == "idle"
    assert steps < 3 or no_allocation_between(before, stats), "a wire buffer was allocated after the third step"
    return ddp


def no_allocation_between(before: Mapping[str, int | str], after: Mapping[str, int | str]) -> bool:
    """Whether no wire buffer was allocated, or the ranks have agreed on another plan, whose buckets need their own."""
    return before.get("plans") != after.get("plans") or before["wire_allocations"] == after["wire_allocations"]


# Against torch's DDP the worst difference relative to the largest gradient of a parameter: none at 2 ranks and wire
# native (x / 2 and x * 0.5 are the same); at 3 ranks torch multiplies by 1/3 where we divide, an ulp per contribution;
# a 16-bit wire rounds every contribution and every partial sum.
PARITY = {
    (2, "native"): 0.0,
    (3, "native"): 3 * 2.0**-22,
    (2, "bf16"): 3 * 2.0**-8,
    (3, "bf16"): 5 * 2.0**-8,
    (2, "fp16"): 3 * 2.0**-11,
    (3, "fp16"): 5 * 2.0**-11,
}


def parity_with_torch(rank: int, wire: str, steps: int, surface: str) -> float:
    """Ours against torch's on the same weights, step by step; the worst difference relative to the largest gradient."""
    views = surface == "hook" and wire != "fp16"
    theirs = DistributedDataParallel(mlp(), bucket_cap_mb=SMALL_CAP_MB)
    ours = wrapped(mlp(), wire, surface=surface, gradient_as_bucket_view=views)
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
            before = ours.reduce_stats()
    stats = ours.reduce_stats()
    assert no_allocation_between(before, stats) and stats["steps"] == steps and int(stats["buckets"]) >= 2
    assert_same_on_all_ranks([parameter.detach() for parameter in ours.parameters()])
    return worst
