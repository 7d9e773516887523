"""What adding in 16 bits does to sums: the simulation, and that Gloo does what it simulates."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import sum_rounding
import torch
import torch.distributed as dist
from sum_rounding import DTYPES, SUMS, VALUES, error, ring_sum, tree_sum
from support.ranks import RankPool

CHECKOUT = Path(__file__).resolve().parents[2]


def test_the_table_of_the_docs_is_what_the_simulation_gives() -> None:
    text = (CHECKOUT / "docs" / "wires.md").read_text()
    assert "\n".join(sum_rounding.table()) in text


def test_what_the_pages_say_besides_is_so() -> None:
    page = " ".join((CHECKOUT / "docs" / "wires.md").read_text().split())
    assert "8 ranks: about twice the error of one rounding" in page
    assert "with the root of W / 2" in page
    for wire, ranks in itertools.product(DTYPES, (8, 64, 256, 1024)):
        roundings, _ = error(wire, "mixed signs", "ring", ranks)
        assert roundings == pytest.approx(math.sqrt(ranks / 2), rel=0.2)
    assert "on 1,024 ranks means are too small by more than half" in page
    assert error("bf16", "alike", "ring", 1024)[1] < -0.5
    assert "A tree adds partial sums of like size, and stays within four roundings" in page
    assert max(error(wire, values, "tree", 1024)[0] for wire in DTYPES for values in VALUES) < 4


@pytest.mark.parametrize(("wire", "most"), [("bf16", 256), ("fp16", 2048)])
@pytest.mark.parametrize("value", [1.0, 1.25, 1.5, 1.9921875, 3e-3])
def test_a_ring_of_equal_values_stops_growing_and_a_tree_does_not(wire: str, most: int, value: float) -> None:
    rows = torch.full((4 * most, 1), value).to(DTYPES[wire])
    reached = [float(one / rows[0]) for one in itertools.accumulate(rows.unbind(), torch.add)]
    stops = reached.index(reached[-1]) + 1
    assert most <= stops < 1.5 * most and reached[-1] < 1.7 * most
    assert float(tree_sum(rows.unbind()) / rows[0]) == 4 * most


@pytest.mark.parametrize("wire", DTYPES)
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("ranks", [2, 8, 256])
def test_no_sum_is_off_by_more_than_the_bound(wire: str, values: str, ranks: int) -> None:
    rows = torch.from_numpy(VALUES[values](ranks)).to(DTYPES[wire])
    unit = torch.finfo(DTYPES[wire]).eps / 2
    exact, whole = rows.double().sum(0), rows.double().abs().sum(0)
    for sums, additions in (("ring", ranks - 1), ("tree", math.log2(ranks))):
        off = (SUMS[sums](list(rows)).double() - exact).abs()
        assert bool((off <= additions * unit * whole).all())
    if ranks == 2:
        assert bool((off > 0.9 * unit * whole).any()), "nothing less would be a bound"


def _sum(rank: int, world: int, dtype: torch.dtype, rows: sum_rounding.Values) -> sum_rounding.Values:
    mine = torch.from_numpy(rows[rank]).to(dtype)
    dist.all_reduce(mine)
    reduced: sum_rounding.Values = mine.double().numpy()
    return reduced


@pytest.mark.parametrize("wire", DTYPES)
def test_gloo_rounds_after_each_addition(three: RankPool, wire: str) -> None:
    dtype, rows = DTYPES[wire], np.random.default_rng(2).standard_normal((3, 4096))
    found = [torch.from_numpy(one) for one in three.run(_sum, dtype, rows)]
    on_wire = torch.from_numpy(rows).to(dtype)
    once = on_wire.double().sum(0).to(dtype).double()
    rings = torch.stack([ring_sum([on_wire[rank] for rank in order]).double() for order in _orders(3)])
    assert all(torch.equal(found[0], one) for one in found[1:])
    assert bool((rings == found[0]).any(0).all())
    assert int((found[0] != once).sum()) > 400


def _orders(ranks: int) -> list[tuple[int, ...]]:
    """Around the ring, from each rank on, either way."""
    ways = (1, -1)
    return [tuple((start + way * step) % ranks for step in range(ranks)) for start in range(ranks) for way in ways]
