"""Norms, statistics and attribution of every surface, and loss units of the wrapper, on 2 and 3 Gloo ranks.

Inputs differ from rank to rank. What is the hook's alone: test_hook_observed.py.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from parallel import observed_cases
from support.grids import grid
from support.leaf_steps import TRAVELS, Wire
from support.ranks import RankPool
from support.wires import EXCHANGED

COMM_HOOKS = ("allreduce", "fp16", "fp16 around allreduce", "post-localSGD", "noop", "built-in allreduce")


SURFACES = ("wrapper", "hook", "hook in wrapper")
EVERYWHERE = ("plain", "everything", "unused")  # with every wire; the others with two
OF_THE_WRAPPER = ("sparse", "overlap off", "static policy", "skipped")
NORMS: list[tuple[str, str, bool, str]] = [
    (surface, *travel, kind)
    for surface in SURFACES
    for kind in observed_cases.MODELS
    for travel in TRAVELS
    if surface == "wrapper" or kind not in OF_THE_WRAPPER
    if kind in EVERYWHERE or travel[0] == "bf16" or travel[1]
]
NORMS += [(one, "int8", False, kind) for one in ("wrapper", "hook") for kind in (*EVERYWHERE, "static graph")]


@grid(("surface", "wire", "views", "kind"), NORMS)
def test_norms_are_those_of_the_gradients_and_the_same_on_every_rank(
    two: RankPool, surface: str, wire: str, views: bool, kind: str
) -> None:
    two.run(observed_cases.norms, surface, kind, wire, views)


@grid(("surface", "kind", "wire"), [*itertools.product(["wrapper", "hook"], ["everything", "unused"], EXCHANGED)])
def test_norms_at_three_ranks_are_of_what_has_been_exchanged(
    three: RankPool, surface: str, wire: str, kind: str
) -> None:
    three.run(observed_cases.norms, surface, kind, wire, False)


@pytest.mark.parametrize(("wire", "views"), TRAVELS)
def test_norms_at_three_ranks_have_the_same_bits_from_run_to_run(three: RankPool, wire: Wire, views: bool) -> None:
    three.run(observed_cases.same_bits_from_run_to_run, wire, views)


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("name", COMM_HOOKS)
def test_norms_of_what_a_comm_hook_has_reduced(two: RankPool, name: str, views: bool) -> None:
    two.run(observed_cases.hooks, name, views)


def test_an_ignored_parameter_with_a_gradient_is_an_error_unless_it_is_wanted(two: RankPool) -> None:
    two.run(observed_cases.ignored)


JOINS: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True, "bucket_cap_mb": 0.001},
    "static": {"static_graph": True},
}


def _join(rank: int, world: int, wire: str, batches: tuple[int, int], check: str, alike: bool, options: Any) -> Any:
    return observed_cases.join(rank, world, wire, batches, check, alike, **options)


@grid(("how", "check", "alike"), [*itertools.product([*JOINS, "int8"], ["off", "count", "raise"], [True, False])])
def test_a_rank_that_leaves_early_knows_what_the_others_know(two: RankPool, how: str, check: str, alike: bool) -> None:
    wire = {"plain": "bf16", "unused": "fp16", "int8": "int8"}.get(how, "native")
    mine, other = two.run(_join, wire, (7, 3), check, alike, JOINS.get(how, {}))
    assert mine == other, "equal on every rank"
    assert [one.step for one in mine] == {"off": [], "count": [2, 6], "raise": [6]}[check]
    assert all(one.culprits[0].rank == 0 and len(one.culprits) == 1 for one in mine)


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
def test_random_plantings_are_found_on_every_rank_and_nothing_else_is(
    three: RankPool, surface: str, wire: str, views: bool, check: str, count: int
) -> None:
    first, *others = three.run(observed_cases.plantings, surface, wire, check, views, count)
    assert others == [first, first] and bool(first) == (check == "raise")


@grid(
    ("surface", "wire", "kind"),
    [*itertools.product(SURFACES, ["native", "bf16"], ["plain", "static graph", "reentrant, shared"])],
)
def test_raise_at_the_end_of_any_backward(two: RankPool, surface: str, wire: str, kind: str) -> None:
    two.run(observed_cases.raises, surface, kind, wire)


@pytest.mark.parametrize("case", [observed_cases.planted_in_others, observed_cases.used_by_one_rank])
@pytest.mark.parametrize("wire", ["native", "bf16"])
@pytest.mark.parametrize("surface", SURFACES)
def test_sparse_complex_strided_and_unused_gradients_are_looked_at(
    two: RankPool, surface: str, wire: str, case: Any
) -> None:
    two.run(case, surface, wire)


def test_an_error_that_every_rank_raises_leaves_them_in_step(three: RankPool) -> None:
    three.run(observed_cases.broken_out_of_step)


@pytest.mark.parametrize("kind", ["plain", "sparse", "unused", "static graph", "reentrant, shared"])
@pytest.mark.parametrize(("wire", "views"), [*TRAVELS, ("int8", False), ("int4", False)])
def test_a_loss_scale_comes_off_whatever_the_wire(two: RankPool, wire: str, views: bool, kind: str) -> None:
    """Bit for bit where no number is subnormal without the scale, which on an fp16 wire some are."""
    worst = max(two.run(observed_cases.scaled, kind, wire, views))
    assert worst <= (0.0 if wire != "fp16" else 1e-3)


def test_mixed_units_are_found_by_every_rank(three: RankPool) -> None:
    three.run(observed_cases.mixed_units, "native")
