"""Norms, statistics and attribution of every surface, and loss units of the wrapper, on 2 and 3 Gloo ranks.

Inputs differ from rank to rank. What is the hook's alone: test_hook_observed.py.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.comm_hooks import HOOKS
from support.ddp_models import (
    Branches,
    Checkpointed,
    Collectives,
    assert_same_on_all_ranks,
    batch,
    loss_of,
    mlp,
)
from support.grids import grid
from support.inside import inside
from support.leaf_steps import SCALER, TRAVELS, assert_close, exact_norms, loss_scale
from support.observed import Observed, Several, planted, several_inputs
from support.ranks import on_ranks
from support.wires import EXCHANGED
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fusedreduce
from fusedreduce import reducer_of
from fusedreduce.buckets.loss_scale import LossScale
from fusedreduce.buckets.stats.non_finite import Culprit, NonFiniteReport
from fusedreduce.errors import NonFiniteGradientError

COMM_HOOKS = ("allreduce", "fp16", "fp16 around allreduce", "post-localSGD", "noop", "built-in allreduce")


SURFACES = ("wrapper", "hook", "hook in wrapper")
EVERYWHERE = ("plain", "everything", "unused")  # with every wire; the others with two
OF_THE_WRAPPER = ("sparse", "overlap off", "static policy", "skipped")

STEPS = 7


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


UNUSED: dict[str, Any] = {"find_unused_parameters": True, "bucket_cap_mb": 0.001}
MODELS: dict[str, Make] = {
    "plain": (mlp, batch, {}),
    "everything": (Several, several_inputs, {}),
    "sparse": (_embedding, _tokens, {}),
    "unused": (Branches, _branch, UNUSED),
    "static graph": (Branches, lambda rank, _: (batch(rank, _), rank % 2), {"static_graph": True}),
    "reentrant, shared": (lambda: Checkpointed(reentrant=True, times=2), batch, {"static_graph": True}),
    # The wrapper's alone:
    "overlap off": (mlp, batch, {"overlap": False}),
    "static policy": (mlp, batch, {"policy": "static"}),
    "skipped": (Branches, _same_branch, {**UNUSED, "skip_all_reduce_unused_params": True}),
}


def norms(rank: int, world: int, surface: str, kind: str, wire: str, views: bool) -> None:
    """Every step's, through re-plans; with zero_grad left out at times, and two micro-batches."""
    make, make_input, options = MODELS[kind]
    one = Observed(surface, make(), wire, gradient_as_bucket_view=views, check="count", **options)
    optimizer = torch.optim.SGD(one.ddp.parameters(), lr=0.01)
    # The wrapper first learns of which kind a sparse gradient is: its hook is shown that bucket behind the last one.
    late = surface == "hook in wrapper" and kind == "everything"
    for number in range(STEPS):
        if number != 3:
            one.ddp.zero_grad(set_to_none=number % 2 == 0)
        if number == 5 and kind not in ("static graph", "skipped"):
            with one.ddp.no_sync():
                loss_of(one.ddp(make_input(rank, 100))).backward()
                assert one.hooked or not inside(one.ddp).statistics.has_by_products()
        loss_of(one.ddp(make_input(rank, number))).backward()
        if late and number < 2:
            with pytest.raises(fusedreduce.FusedReduceError, match="the latest step has no norm"):
                one.grad_norm()
        else:
            one.check()
        optimizer.step()
    assert one.non_finite() == []


NORMS: list[tuple[str, str, bool, str]] = [
    (surface, *travel, kind)
    for surface in SURFACES
    for kind in MODELS
    for travel in TRAVELS
    if surface == "wrapper" or kind not in OF_THE_WRAPPER
    if kind in EVERYWHERE or travel[0] == "bf16" or travel[1]
]
NORMS += [(one, "int8", False, kind) for one in ("wrapper", "hook") for kind in (*EVERYWHERE, "static graph")]


@grid(("surface", "wire", "views", "kind"), NORMS)
@on_ranks(2)
def test_norms_are_those_of_the_gradients_and_the_same_on_every_rank(
    rank: int, world: int, surface: str, wire: str, views: bool, kind: str
) -> None:
    norms(rank, world, surface, kind, wire, views)


@grid(("surface", "kind", "wire"), [*itertools.product(["wrapper", "hook"], ["everything", "unused"], EXCHANGED)])
@on_ranks(3)
def test_norms_at_three_ranks_are_of_what_has_been_exchanged(
    rank: int, world: int, surface: str, wire: str, kind: str
) -> None:
    norms(rank, world, surface, kind, wire, False)


@pytest.mark.parametrize(("wire", "views"), TRAVELS)
@on_ranks(3)
def test_norms_at_three_ranks_have_the_same_bits_from_run_to_run(rank: int, world: int, wire: str, views: bool) -> None:
    """For a plan that no clock decides."""

    def run() -> list[list[int]]:
        one = Observed("wrapper", mlp(), wire, policy="static", gradient_as_bucket_view=views)
        found = []
        for number in range(STEPS):
            one.ddp.zero_grad()
            loss_of(one.ddp(batch(rank, number))).backward()
            found.append(one.check())
        return found

    assert run() == run()


# How many: most where nothing but the surface is between a planting and its report.
PLANTINGS = [
    (*how, *travel)
    for how in [("hook", "count", 340), ("hook", "raise", 24), ("wrapper", "count", 24), ("wrapper", "raise", 24)]
    for travel in [*TRAVELS, *((wire, False) for wire in EXCHANGED)]
    if how[1:] != ("count", 340) or travel[0] not in EXCHANGED
]


# (every second one in full runs alone)
@pytest.mark.parametrize(
    ("surface", "check", "count", "wire", "views"),
    [pytest.param(*one, marks=pytest.mark.full) if number % 2 else one for number, one in enumerate(PLANTINGS)],
)
@on_ranks(3)
def test_random_plantings_are_found_on_every_rank_and_nothing_else_is(
    rank: int, world: int, surface: str, wire: str, views: bool, check: str, count: int
) -> list[str]:
    """One element on one rank, or on several one of their own: found by all, and nothing else is."""
    one = Observed(surface, mlp(), wire, check=check, stats=False, gradient_as_bucket_view=views)
    optimizer = torch.optim.SGD(one.ddp.parameters(), lr=0.01)
    named = list(one.ddp.module.named_parameters())
    draw = random.Random(5)
    texts, seen = [], 0
    for step in range(count):
        places = []
        for _ in range(world):
            name, parameter = draw.choice(named)
            places.append((name, parameter, draw.randrange(parameter.numel()), draw.choice((math.nan, math.inf))))
        bad = draw.sample(range(world), draw.randrange(world + 1))
        one.ddp.zero_grad()
        with contextlib.ExitStack() as stack:
            if rank in bad:
                stack.enter_context(planted(*places[rank][1:]))
            loss = loss_of(one.ddp(batch(rank, step)))
            if bad and check == "raise":
                raised = stack.enter_context(pytest.raises(NonFiniteGradientError))
            loss.backward()
        spoiled = {name for name, parameter in named if not parameter.grad.isfinite().all()}
        assert spoiled == {places[one][0] for one in bad}, "the step is finished all the same"
        if not bad:
            assert len(one.non_finite()) == min(seen, 100)
            optimizer.step()
            continue
        if check == "raise":
            own, text = str(raised.value).split(": ", 1)
            assert own == f"rank {rank}" and text.startswith(f"step {step + 1}: ")
            texts.append(text)
        seen += 1
        culprits = tuple(Culprit(each, places[each][0], places[each][2]) for each in sorted(bad))
        report = one.non_finite()[-1]
        assert (report.step, report.culprits, set(report.reduced)) == (step + 1, culprits, spoiled)
        if not one.hooked:
            assert inside(one.ddp).statistics.found_non_finite().item() == 1.0
    assert_same_on_all_ranks([each.detach() for each in one.ddp.parameters()])
    assert bool(texts) == (check == "raise")
    return texts


@grid(
    ("surface", "wire", "kind"),
    [*itertools.product(SURFACES, ["native", "bf16"], ["plain", "static graph", "reentrant, shared"])],
)
@on_ranks(2)
def test_raise_at_the_end_of_any_backward(rank: int, world: int, surface: str, wire: str, kind: str) -> None:
    """At the end of any kind of backward; norms are right before and after."""
    make, make_input, options = MODELS[kind]
    one = Observed(surface, make(), wire, check="raise", **options)
    place = next(each for each in one.ddp.parameters() if each.numel() > 3)
    for step in range(5):
        one.ddp.zero_grad()
        if step == 3:
            with planted(place, 2, math.nan), pytest.raises(NonFiniteGradientError):
                loss_of(one.ddp(make_input(rank, step))).backward()
        else:
            loss_of(one.ddp(make_input(rank, step))).backward()
            one.check()
    (report,) = one.non_finite()
    users = [0] if kind == "static graph" else list(range(world))  # of the first branch
    assert report.step == 4 and [culprit.rank for culprit in report.culprits] == users


def _poisoned(gradient: torch.Tensor) -> torch.Tensor:
    """The fifth element as it lies in memory."""
    bad = gradient.clone()
    if bad.is_sparse:
        bad._values().view(-1)[5] = math.nan
    else:
        bad.as_strided((bad.numel(),), (1,))[5] = math.nan
    return bad


@pytest.mark.parametrize("wire", ["native", "bf16"])
@pytest.mark.parametrize("surface", SURFACES)
@on_ranks(2)
def test_planted_in_others(rank: int, world: int, surface: str, wire: str) -> None:
    """A sparse gradient, a complex one, of which pairs are counted, and one that is channels last."""
    one = Observed(surface, Several(), wire, check="count")
    for step in range(3):
        one.ddp.zero_grad()
        loss_of(one.ddp(several_inputs(rank, step))).backward()
    for name in ("embedding.weight", "complex.weight", "zoo.conv.weight"):
        one.ddp.zero_grad()
        handle = one.ddp.module.get_parameter(name).register_hook(_poisoned if rank == 1 else lambda gradient: gradient)
        loss_of(one.ddp(several_inputs(rank, 1))).backward()
        handle.remove()
        assert one.non_finite()[-1] == NonFiniteReport(one.non_finite()[-1].step, (Culprit(1, name, 5),), (name,))
        assert math.isnan(one.grad_norm().item()) and math.isnan(one.grad_norm(math.inf).item())
    assert [report.step for report in one.non_finite()] == [4, 5, 6]


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("name", COMM_HOOKS)
@on_ranks(2)
def test_norms_of_what_a_comm_hook_has_reduced(rank: int, world: int, name: str, views: bool) -> None:
    """Comm hooks that are registered on the wrapper."""
    one = Observed("wrapper", mlp(), gradient_as_bucket_view=views, check="count")
    ddp = one.ddp
    HOOKS[name](ddp)
    for number in range(STEPS):
        ddp.zero_grad()
        loss_of(ddp(batch(rank, number))).backward()
        reducer = reducer_of(ddp)
        exact = exact_norms(reducer.parameters, 2.0)
        assert_close([*ddp.grad_norms().values(), ddp.grad_norm()], exact, name)
        if name not in ("noop", "post-localSGD"):
            one.check()
    assert ddp.non_finite() == []


@on_ranks(2)
def test_an_ignored_parameter_with_a_gradient_is_an_error_unless_it_is_wanted(rank: int, world: int) -> None:
    """What the wrapper does not reduce has no place in a norm that every rank must agree on."""
    model: Any = nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 6))
    TorchDDP._set_params_and_buffers_to_ignore_for_model(model, ["2.bias"])
    for stats in (True, False):
        model.zero_grad()
        ddp = Observed("wrapper", model, stats=stats).ddp
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


JOINS: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True, "bucket_cap_mb": 0.001},
    "static": {"static_graph": True},
}


@grid(("how", "check", "alike"), [*itertools.product([*JOINS, "int8"], ["off", "count", "raise"], [True, False])])
@on_ranks(2)
def test_a_rank_that_leaves_early_knows_what_the_others_know(
    rank: int, world: int, how: str, check: str, alike: bool
) -> list[NonFiniteReport]:
    """Who stays has its norms; whoever raises, all do, and the rest of the epoch goes on."""
    wire = {"plain": "bf16", "unused": "fp16", "int8": "int8"}.get(how, "native")
    batches, options = (7, 3), JOINS.get(how, {})
    views = bool(options.get("gradient_as_bucket_view"))
    model = Branches() if options.get("find_unused_parameters") else mlp()
    make_input = _branch if options.get("find_unused_parameters") else batch
    ddp = Observed("wrapper", model, wire, check=check, **options).ddp
    inside(ddp).pretend_alike(alike)
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
    assert [one.step for one in found] == {"off": [], "count": [2, 6], "raise": [6]}[check]
    assert all(one.culprits[0].rank == 0 and len(one.culprits) == 1 for one in found)
    return found


# Loss units


def backward(ddp: Any, loss: torch.Tensor, scale: LossScale | None) -> None:
    """Of a loss that a scaler has scaled, or a plain one."""
    if scale is not None:
        loss = loss * scale.scale
        function = loss.grad_fn
        assert function is not None
        function.register_prehook(lambda _: reducer_of(ddp).begin_scaled(scale))
    loss.backward()


@pytest.mark.parametrize("kind", ["plain", "sparse", "unused", "static graph", "reentrant, shared"])
@pytest.mark.parametrize(("wire", "views"), [*TRAVELS, ("int8", False), ("int4", False)])
@on_ranks(2)
def test_a_loss_scale_comes_off_whatever_the_wire(rank: int, world: int, wire: str, views: bool, kind: str) -> None:
    """Against a wrapper of the same weights without a scale.

    Bit for bit where no number is subnormal without the scale, which on an fp16 wire some are.
    """
    make, make_input, options = MODELS[kind]
    both = [Observed("wrapper", make(), wire, gradient_as_bucket_view=views, **options) for _ in range(2)]
    ours, plain = (one.ddp for one in both)
    inside(ours).loss_scale.attach(SCALER)
    first, second = loss_scale(2.0**12), loss_scale(2.0**13)
    worst = 0.0
    for number in range(STEPS):
        for one in both:
            ddp = one.ddp
            ddp.zero_grad(set_to_none=number % 3 != 0)
            if number in (4, 5) and kind != "static graph":
                with ddp.no_sync():
                    backward(ddp, loss_of(ddp(make_input(rank, 100))), first if ddp is ours else None)
                assert inside(ddp).loss_scale.unscaled_now() is (ddp is plain)
            now = second if number == 5 else first
            backward(ddp, loss_of(ddp(make_input(rank, number))), now if ddp is ours else None)
            one.check()
            assert inside(ddp).loss_scale.unscaled_now()
        for mine, other in zip(ours.parameters(), plain.parameters(), strict=True):
            assert (mine.grad is None) == (other.grad is None)
            if mine.grad is not None and mine.numel():
                dense, other_dense = mine.grad.to_dense(), other.grad.to_dense()
                worst = max(worst, float((dense - other_dense).abs().max() / other_dense.abs().max().clamp(min=1e-12)))
    assert worst <= (0.0 if wire != "fp16" else 1e-3), "relative to the largest gradient"


@on_ranks(3)
def test_mixed_units_are_found_by_every_rank(rank: int, world: int) -> None:
    """Every rank finds it, before anything is sent; reset() and zero_grad() and it goes on."""
    one = Observed("wrapper", mlp(), "native")
    ddp, reducer = one.ddp, reducer_of(one.ddp)
    inside(reducer).loss_scale.attach(SCALER)
    scale = loss_scale(256.0)
    for number in range(4):
        ddp.zero_grad()
        backward(ddp, loss_of(ddp(batch(rank, number))), scale)
        local = copy.deepcopy(ddp.module)
        loss = loss_of(ddp(batch(rank, number)))
        with Collectives() as issued, pytest.raises(fusedreduce.FusedReduceError, match="zero_grad"):
            backward(ddp, loss, scale)
        assert not issued.payload_bytes
        ddp.reset()
        assert len(list(local.parameters())) == len(reducer.parameters)
    ddp.zero_grad()
    backward(ddp, loss_of(ddp(batch(rank, 9))), scale)
    one.check()
