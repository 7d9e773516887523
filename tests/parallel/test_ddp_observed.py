"""Norms, statistics and attribution of every surface, on 2 and 3 Gloo ranks.

Inputs differ from rank to rank. What is the hook's alone: test_hook_observed.py.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.ddp_models import Branches, Checkpointed, assert_same_on_all_ranks, batch, loss_of, mlp
from support.grids import grid
from support.inside import inside
from support.leaf_steps import TRAVELS
from support.observed import Observed, Several, planted, several_inputs
from support.ranks import on_ranks
from support.wires import EXCHANGED
from torch import nn

import fusedreduce
from fusedreduce.buckets.stats.non_finite import Culprit, NonFiniteReport
from fusedreduce.errors import NonFiniteGradientError

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


# How many, so that the oldest of a hundred reports go on one wire; of a reducer's: buckets/test_finite.py.
PLANTINGS: list[tuple[str, int, str, bool]] = [
    ("count", 40 if number else 150, *travel) for number, travel in enumerate(TRAVELS)
]
PLANTINGS += [("raise", 24, *travel) for travel in [*TRAVELS, *((wire, False) for wire in EXCHANGED)]]


# (every second one in full runs alone)
@pytest.mark.parametrize(
    ("check", "count", "wire", "views"),
    [pytest.param(*one, marks=pytest.mark.full) if number % 2 else one for number, one in enumerate(PLANTINGS)],
)
@on_ranks(3)
def test_random_plantings_are_found_on_every_rank_and_nothing_else_is(
    rank: int, world: int, wire: str, views: bool, check: str, count: int
) -> list[str]:
    """One element on one rank, or on several one of their own: found by all, and nothing else is."""
    one = Observed("hook", mlp(), wire, check=check, stats=False, gradient_as_bucket_view=views)
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


# Of MODELS, a wire, and more options.
JOINS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "plain": ("plain", "bf16", {}),
    "views": ("plain", "native", {"gradient_as_bucket_view": True}),
    "unused": ("unused", "fp16", {}),
    "static": ("plain", "native", {"static_graph": True}),
    "encoded": ("plain", "int8", {}),
}


@pytest.mark.parametrize(("check", "alike"), [("count", True), ("raise", False)])
@pytest.mark.parametrize("how", JOINS)
@on_ranks(2)
def test_a_rank_that_has_joined_raises_and_records_what_the_others_do(
    rank: int, world: int, how: str, check: str, alike: bool
) -> list[NonFiniteReport]:
    """Rank 1 leaves first: it raises from the context of the join, rank 0 from backward. Then both go on."""
    kind, wire, more = JOINS[how]
    make, make_input, options = MODELS[kind]
    one = Observed("wrapper", make(), wire, check=check, **options, **more)
    inside(one.ddp).pretend_alike(alike)
    place = next(each for each in one.ddp.parameters() if each.numel() > 3)
    raises = check == "raise"
    with pytest.raises(NonFiniteGradientError, match="rank 0") if raises else contextlib.nullcontext(), one.ddp.join():
        for number in range((6, 3)[rank]):
            one.ddp.zero_grad()
            loss = loss_of(one.ddp(make_input(rank, number)))
            spoils = rank == 0 and number in ({5} if raises else {2, 5})
            with planted(place, 2, math.nan) if spoils else contextlib.nullcontext():
                loss.backward()
    one.ddp.zero_grad()
    loss_of(one.ddp(make_input(rank, 200))).backward()
    one.check()
    found = one.non_finite()
    assert [report.step for report in found] == ([6] if raises else [3, 6])
    assert all([culprit.rank for culprit in report.culprits] == [0] for report in found)
    return found
