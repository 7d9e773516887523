"""What ranks run in test_ddp_observed.py: norms, statistics, attribution and loss units through the wrapper."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel.ddp_hook_cases import HOOKS
from support import hook_cases
from support.ddp_cases import Branches, Checkpointed
from support.hook_cases import SMALL_CAP_MB, assert_same_on_all_ranks, batch, loss_of, mlp
from support.leaf_steps import SCALER, assert_close, bits, exact_norms, loss_scale
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fusedreduce
from fusedreduce.buckets.loss_scale import LossScale
from fusedreduce.buckets.stats.non_finite import Culprit, NonFiniteReport
from fusedreduce.errors import NonFiniteGradientError
from fusedreduce.reducer.reducer import Reducer

STEPS = 7


def wrapped(
    model: nn.Module,
    wire: str = "native",
    *,
    stats: bool = True,
    check: str = "off",
    overlap: bool = True,
    policy: str = "planned",
    **options: Any,
) -> Any:
    """`model` under our wrapper, observed."""
    options.setdefault("bucket_cap_mb", SMALL_CAP_MB)
    given: dict[str, Any] = {"wire": wire, "check_finite": check, "policy": policy}
    config = fusedreduce.ReduceConfig(**given, grad_stats=stats, overlap=overlap)
    return fusedreduce.DistributedDataParallel(model, reduce=config, **options)


def reducer_of(ddp: Any) -> Reducer:
    """The wrapper's."""
    reducer: Reducer = ddp.reducer.reducer
    return reducer


def _embedding() -> nn.Module:
    torch.manual_seed(6)
    return nn.Sequential(nn.Embedding(50, 24, sparse=True), nn.Linear(24, 6))


def _tokens(rank: int, number: int) -> torch.Tensor:
    return torch.randint(0, 50, (10,), generator=torch.Generator().manual_seed(13 * number + rank))


def _branch(rank: int, number: int) -> tuple[torch.Tensor, int]:
    return batch(rank, number), (rank + number) % 2 if number < 4 else 0


def _same_branch(rank: int, number: int) -> tuple[torch.Tensor, int]:
    return batch(rank, number), number % 2


Make = tuple[Callable[[], nn.Module], Callable[[int, int], Any], dict[str, Any]]
MODELS: dict[str, Make] = {
    "plain": (mlp, batch, {}),
    "overlap off": (mlp, batch, {"overlap": False}),
    "static policy": (mlp, batch, {"policy": "static"}),
    "zoo": (hook_cases.Zoo, hook_cases.images, {}),
    "complex": (hook_cases.ComplexNet, batch, {}),
    "sparse": (_embedding, _tokens, {}),
    "unused": (Branches, _branch, {"find_unused_parameters": True, "bucket_cap_mb": 0.001}),
    "skipped": (
        Branches,
        _same_branch,
        {"find_unused_parameters": True, "skip_all_reduce_unused_params": True, "bucket_cap_mb": 0.001},
    ),
    "static graph": (Branches, lambda rank, _: (batch(rank, _), rank % 2), {"static_graph": True}),
    "reentrant, shared": (lambda: Checkpointed(reentrant=True, times=2), batch, {"static_graph": True}),
}


def assert_observed(ddp: Any) -> list[int]:
    """Norms against fp64 on `.grad`, and the same bits on every rank; their bits."""
    reducer = reducer_of(ddp)
    assert reducer.observed.has_by_products()
    # A tied one has several names; torch takes the last.
    names = {id(parameter): name for name, parameter in ddp.module.named_parameters(remove_duplicate=False)}
    norms = []
    for norm_type in (2.0, math.inf):
        exact = exact_norms(reducer.parameters, norm_type)
        by_name, total = ddp.grad_norms(norm_type), ddp.grad_norm(norm_type)
        assert list(by_name) == [names[id(parameter)] for parameter in reducer.parameters], "a tied one once"
        assert_close([*by_name.values(), total], exact, norm_type)
        assert_close([reducer.observed.measured_norm(norm_type)], exact[-1:], "measured now")
        norms += [*by_name.values(), total]
    stacked = torch.stack(norms)
    assert_same_on_all_ranks([stacked])
    stats = ddp.grad_stats()
    assert stats["grad_norm"] == float(ddp.grad_norm()) and stats["grad_absmax"] == float(ddp.grad_norm(math.inf))
    assert ddp.grad_stats(per_parameter=False).keys() == {"grad_norm", "grad_absmax", "grad_flushed"}
    return bits(stacked)


def norms(rank: int, world: int, kind: str, wire: str, views: bool) -> None:
    """Every step's, through re-plans; with zero_grad left out at times, and two micro-batches."""
    make, make_input, options = MODELS[kind]
    ddp = wrapped(make(), wire, gradient_as_bucket_view=views, check="count", **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for number in range(STEPS):
        if number != 3:
            ddp.zero_grad(set_to_none=number % 2 == 0)
        if number == 5 and kind not in ("static graph", "skipped"):
            with ddp.no_sync():
                loss_of(ddp(make_input(rank, 100))).backward()
                assert not reducer_of(ddp).observed.has_by_products()
        loss_of(ddp(make_input(rank, number))).backward()
        assert_observed(ddp)
        optimizer.step()
    assert ddp.non_finite() == []


def same_bits_from_run_to_run(rank: int, world: int, wire: str, views: bool) -> None:
    """For a plan that no clock decides."""

    def run() -> list[list[int]]:
        ddp = wrapped(mlp(), wire, policy="static", gradient_as_bucket_view=views)
        found = []
        for number in range(STEPS):
            ddp.zero_grad()
            loss_of(ddp(batch(rank, number))).backward()
            found.append(assert_observed(ddp))
        return found

    assert run() == run()


def hooks(rank: int, world: int, name: str, views: bool) -> None:
    """Comm hooks that are registered on the wrapper."""
    ddp = wrapped(mlp(), gradient_as_bucket_view=views, check="count")
    HOOKS[name](ddp)
    for number in range(STEPS):
        ddp.zero_grad()
        loss_of(ddp(batch(rank, number))).backward()
        reducer = reducer_of(ddp)
        exact = exact_norms(reducer.parameters, 2.0)
        assert_close([*ddp.grad_norms().values(), ddp.grad_norm()], exact, name)
        if name not in ("noop", "post-localSGD"):
            assert_observed(ddp)
    assert ddp.non_finite() == []


def ignored(rank: int, world: int) -> None:
    """What the wrapper does not reduce has no place in a norm that every rank must agree on."""
    model: Any = nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 6))
    TorchDDP._set_params_and_buffers_to_ignore_for_model(model, ["2.bias"])
    for stats in (True, False):
        model.zero_grad()
        ddp = wrapped(model, stats=stats)
        assert float(ddp.grad_norm()) == 0.0
        loss_of(ddp(batch(rank, 0))).backward()
        for norm_type in (2.0, math.inf):
            with pytest.raises(ValueError, match=r"2\.bias has a gradient.*include_ignored"):
                ddp.grad_norm(norm_type)
            everything = exact_norms(list(model.parameters()), norm_type)[-1]
            assert_close([ddp.grad_norm(norm_type, include_ignored=True)], [everything])
        assert "2.bias" not in ddp.grad_norms()
        model[2].bias.grad = None
        assert_close([ddp.grad_norm()], exact_norms(list(model.parameters()), 2.0)[-1:])
        with pytest.raises(ValueError, match="norm_type"):
            ddp.grad_norm(1.0)


def join(
    rank: int, world: int, wire: str, batches: Sequence[int], check: str, alike: bool, **options: Any
) -> list[NonFiniteReport]:
    """Ranks that leave early: who stays has its norms; whoever raises, all do, and the rest of the epoch goes on."""
    views = bool(options.get("gradient_as_bucket_view"))
    model = Branches() if options.get("find_unused_parameters") else mlp()
    make_input = _branch if options.get("find_unused_parameters") else batch
    ddp = wrapped(model, wire, check=check, **options)
    reducer_of(ddp).observed.alike = alike
    raised = 0
    number = 0
    planted = {max(batches) - 2} if check == "raise" else {1, max(batches) - 2}
    while number < batches[rank] or raised:
        raised = 0
        with (
            pytest.raises(NonFiniteGradientError, match="rank 0") if check == "raise" else contextlib.nullcontext(),
            ddp.join(),
        ):
            while number < batches[rank]:
                ddp.zero_grad()
                features = make_input(rank, number)
                if rank == 0 and number in planted:
                    first = features[0] if isinstance(features, tuple) else features
                    first[2, 3] = math.nan
                number += 1
                loss_of(ddp(features)).backward()
                if number - 1 not in planted:
                    exact = exact_norms(reducer_of(ddp).parameters, 2.0)
                    assert_close([*ddp.grad_norms().values(), ddp.grad_norm()], exact, (number, views))
        if check == "raise":
            break
    # After it the wrapper goes on as before.
    ddp.zero_grad()
    loss_of(ddp(make_input(rank, 200))).backward()
    assert_close([ddp.grad_norm()], exact_norms(reducer_of(ddp).parameters, 2.0)[-1:])
    found: list[NonFiniteReport] = ddp.non_finite()
    return found


class Planted(torch.autograd.Function):
    """The identity, whose backward puts `value` at one place of a weight's gradient."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, index: int, value: float) -> torch.Tensor:
        ctx.index, ctx.value = index, value
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        spoiled = gradients[0].clone()
        spoiled.reshape(-1)[ctx.index] = ctx.value
        return spoiled, None, None


class Spoiled(nn.Module):
    """An mlp, one of whose weights' gradients can be spoiled at one place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.place: tuple[str, int, float] | None = None

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        weights: dict[str, torch.Tensor] = dict(self.inner.named_parameters())
        if self.place is not None:
            name, index, value = self.place
            weights[name] = Planted.apply(weights[name], index, value)
        result: torch.Tensor = torch.func.functional_call(self.inner, weights, (features,))
        return result


def attribution(rank: int, world: int, wire: str, check: str, views: bool) -> list[str]:
    """Every weight of the model in turn, on every rank in turn."""
    ddp = wrapped(Spoiled(), wire, check=check, stats=False, gradient_as_bucket_view=views)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    names = [name for name, _ in ddp.module.inner.named_parameters()]
    before = [one.detach().clone() for one in ddp.parameters()]
    texts = []
    for number, name in enumerate([*names, *names]):
        culprit, index = number % world, (number * 7) % 12
        ddp.zero_grad()
        ddp.module.place = (name, index, (math.nan, math.inf)[number % 2]) if rank == culprit else None
        loss = loss_of(ddp(batch(rank, number)))
        if check == "raise":
            with pytest.raises(NonFiniteGradientError) as caught:
                loss.backward()
            texts.append(str(caught.value).split(": ", 1)[1])
        else:
            loss.backward()
        full = f"inner.{name}"
        report = NonFiniteReport(2 * number + 1, (Culprit(culprit, full, index),), (full,))
        assert ddp.non_finite()[-1] == report and len(ddp.non_finite()) == number + 1
        assert reducer_of(ddp).observed.found_non_finite().item() == 1.0
        # One that is as it should be.
        ddp.zero_grad()
        ddp.module.place = None
        loss_of(ddp(batch(rank, number))).backward()
        assert len(ddp.non_finite()) == number + 1
        assert all(one.grad.isfinite().all() for one in ddp.parameters())
        optimizer.step()
    assert not all(torch.equal(one, two) for one, two in zip(before, ddp.parameters(), strict=True))
    assert_same_on_all_ranks([one.detach() for one in ddp.parameters()])
    return texts


# Loss units


def backward(ddp: Any, loss: torch.Tensor, scale: LossScale | None) -> None:
    """Of a loss that a scaler has scaled, or a plain one."""
    if scale is not None:
        loss = loss * scale.scale
        function = loss.grad_fn
        assert function is not None
        function.register_prehook(lambda _: reducer_of(ddp).begin_scaled(scale))
    loss.backward()


def scaled(rank: int, world: int, kind: str, wire: str, views: bool) -> float:
    """Against a wrapper of the same weights without a scale; the worst difference relative to the largest gradient."""
    make, make_input, options = MODELS[kind]
    ours, plain = (wrapped(make(), wire, gradient_as_bucket_view=views, **options) for _ in range(2))
    reducer_of(ours).observed.units.attach(SCALER)
    first, second = loss_scale(2.0**12), loss_scale(2.0**13)
    worst = 0.0
    for number in range(STEPS):
        for ddp in (ours, plain):
            ddp.zero_grad(set_to_none=number % 3 != 0)
            if number in (4, 5) and kind != "static graph":
                with ddp.no_sync():
                    backward(ddp, loss_of(ddp(make_input(rank, 100))), first if ddp is ours else None)
                assert reducer_of(ddp).observed.units.unscaled_now() is (ddp is plain)
            now = second if number == 5 else first
            backward(ddp, loss_of(ddp(make_input(rank, number))), now if ddp is ours else None)
            assert_observed(ddp)
            assert reducer_of(ddp).observed.units.unscaled_now()
        for mine, other in zip(ours.parameters(), plain.parameters(), strict=True):
            assert (mine.grad is None) == (other.grad is None)
            if mine.grad is not None and mine.numel():
                one, two = mine.grad.to_dense(), other.grad.to_dense()
                worst = max(worst, float((one - two).abs().max() / two.abs().max().clamp(min=1e-12)))
    return worst


def mixed_units(rank: int, world: int, wire: str) -> None:
    """Every rank finds it, before anything is sent; reset() and zero_grad() and it goes on."""
    ddp = wrapped(mlp(), wire)
    reducer = reducer_of(ddp)
    reducer.observed.units.attach(SCALER)
    scale = loss_scale(256.0)
    for number in range(4):
        ddp.zero_grad()
        backward(ddp, loss_of(ddp(batch(rank, number))), scale)
        local = copy.deepcopy(ddp.module)
        loss = loss_of(ddp(batch(rank, number)))
        with hook_cases.Collectives() as issued, pytest.raises(fusedreduce.FusedReduceError, match="zero_grad"):
            backward(ddp, loss, scale)
        assert not issued.payload_bytes
        ddp.reset()
        assert len(list(local.parameters())) == len(reducer.parameters)
    ddp.zero_grad()
    backward(ddp, loss_of(ddp(batch(rank, 9))), scale)
    assert_observed(ddp)


def broken_out_of_step(rank: int, world: int) -> None:
    """Ranks are the same again after an error that all of them met."""
    ddp = wrapped(mlp(), check="raise")
    for number in range(6):
        ddp.zero_grad()
        features = batch(rank, number)
        if number % 2 and rank == world - 1:
            features[0, 0] = math.inf
        loss = loss_of(ddp(features))
        with pytest.raises(NonFiniteGradientError) if number % 2 else contextlib.nullcontext():
            loss.backward()
        held = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
        dist.all_gather(held, torch.tensor([ddp.reduce_stats()["collectives"]]))
        assert len({one.item() for one in held}) == 1
