"""A plan as torch's bucket_cap_mb_list: c10d's rule as the oracle, and torch's own DDP."""

from __future__ import annotations

import ast
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.ranks import RankPool
from support.sweep import sweep
from torch.nn.parallel import DistributedDataParallel

from fusedreduce.planning.bucketing import MIB, assign_by_size
from fusedreduce.planning.plan import Plan
from fusedreduce.planning.torch_caps import TorchCaps, nearest

some_bytes = st.one_of(st.integers(1, 40), st.sampled_from([4, 1000, MIB, 25 * MIB, 2**33]))


def limits_of(found: TorchCaps) -> list[int]:
    """As torch reads them, after they have been printed."""
    return [int(cap_mb * MIB) for cap_mb in ast.literal_eval(repr(list(found.caps_mb)))]


@st.composite
def cut(draw: st.DrawFn, sizes: st.SearchStrategy[int], most: int = 30) -> tuple[Plan, list[int], list[int]]:
    """A plan of one group, its parameters' bytes, and the order in which they come."""
    found = draw(st.lists(sizes, min_size=1, max_size=most))
    order = draw(st.permutations(range(len(found))))
    ends = sorted(draw(st.sets(st.integers(1, len(found)))) | {len(found)})
    plan = tuple(tuple(order[begin:end]) for begin, end in zip([0, *ends], ends, strict=False))
    return plan, found, list(order)


@given(cut(some_bytes))
@sweep(500)
def test_one_group_is_exact(case: tuple[Plan, list[int], list[int]]) -> None:
    plan, sizes, order = case
    found = nearest(plan, sizes, ["f32"] * len(sizes), order)
    assert found.exact and found.kept == len(plan) and found.plan == plan
    assert tuple(assign_by_size(sizes, ["f32"] * len(sizes), limits_of(found), order=order)) == plan
    assert len(found.caps_mb) <= len(plan)


@given(cut(st.one_of(st.just(0), st.integers(1, 40))))
@sweep(400)
def test_parameters_without_elements_move_no_other(case: tuple[Plan, list[int], list[int]]) -> None:
    plan, sizes, order = case
    found = nearest(plan, sizes, ["f32"] * len(sizes), order)

    def filled(one: Plan) -> list[tuple[int, ...]]:
        rows = [tuple(number for number in bucket if sizes[number]) for bucket in one]
        return [row for row in rows if row]

    assert filled(found.plan) == filled(plan)
    assert min(limits_of(found)) >= 1


@given(cut(st.integers(1, 40)), st.data())
@sweep(400)
def test_of_several_groups_no_more_buckets_differ_than_if_one_were_cut_as_planned(
    case: tuple[Plan, list[int], list[int]], data: st.DataObject
) -> None:
    mixed, sizes, order = case
    groups = data.draw(st.lists(st.sampled_from("abc"), min_size=len(sizes), max_size=len(sizes)))
    alone = data.draw(st.sets(st.sampled_from(range(len(sizes))), max_size=3))
    plan: list[tuple[int, ...]] = [(number,) for number in alone]
    for bucket in mixed:
        for group in dict.fromkeys(groups[number] for number in bucket):
            plan += [tuple(number for number in bucket if groups[number] == group and number not in alone)]
    plan = [bucket for bucket in plan if bucket]
    found = nearest(tuple(plan), sizes, groups, order, alone=alone)
    assert tuple(assign_by_size(sizes, groups, limits_of(found), order=order, alone=alone)) == found.plan
    wanted = set(map(frozenset, plan))
    assert found.kept == sum(frozenset(bucket) in wanted for bucket in found.plan)
    assert found.exact == (set(map(frozenset, found.plan)) == wanted)
    # Lists that give one group its own buckets are among those that were tried; then only others differ.
    shared = [groups[number] for number in range(len(sizes)) if number not in alone]
    assert len(found.plan) - found.kept <= min((len(shared) - shared.count(one) for one in shared), default=0)


def test_groups_whose_limits_meet_are_exact_together() -> None:
    # n-th limits: above 4 up to 8 and above 6 up to 12; above 0 up to 5 and above 3 up to 7.
    sizes = [4, 4, 5, 6, 6, 3, 4]
    groups = ["a", "a", "a", "b", "b", "b", "b"]
    plan = ((0, 1), (3, 4), (2,), (5, 6))
    found = nearest(plan, sizes, groups, [0, 1, 3, 4, 2, 5, 6])
    assert found.exact and found.plan == plan


def test_of_lists_that_miss_the_cheapest_is_taken() -> None:
    sizes, groups, order = [4, 4, 20, 20], ["a", "a", "b", "b"], [0, 1, 2, 3]
    plan = ((0, 1), (2,), (3,))
    assert nearest(plan, sizes, groups, order).kept == 3
    apart = nearest(
        ((0,), (1,), (2, 3)), sizes, groups, order, cost=lambda made: sum(len(one) == 1 for one in made[:2])
    )
    together = nearest(((0,), (1,), (2, 3)), sizes, groups, order, cost=lambda made: -len(made))
    assert len(together.plan) == 4 and len(apart.plan) == 2


@pytest.mark.parametrize(("plan", "order"), [(((0, 1),), [0, 0]), (((0,),), [0, 1]), (((0, 1, 1),), [1, 0])])
def test_bad_plans_and_orders_are_refused(plan: Plan, order: list[int]) -> None:
    with pytest.raises(ValueError, match="must name each of 2 parameters once"):
        nearest(plan, [1, 1], ["a", "a"], order)


def test_limits_have_few_digits() -> None:
    sizes = [22 * MIB + 40, 3 * MIB + 12, 7 * MIB, 2 * MIB + 4]
    found = nearest(((0, 1), (2, 3)), sizes, ["a"] * 4, [0, 1, 2, 3])
    assert found.caps_mb == (25.0, 9.0) and found.exact


def torchs_buckets(rank: int, world: int, caps_mb: Any, layers: int) -> list[tuple[int, ...]]:
    """What torch's DDP makes of limits, once it has laid its buckets out by readiness: parameter numbers."""
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16, bias=False) for _ in range(layers)))
    ddp = DistributedDataParallel(model, bucket_cap_mb_list=caps_mb)
    for _ in range(3):
        ddp(torch.randn(2, 16)).sum().backward()
    rebuilt = str(ddp._get_ddp_logging_data()["rebuilt_per_bucket_param_indices"])
    return [tuple(map(int, bucket.split())) for bucket in rebuilt.split(",")]


@pytest.mark.parametrize("ends", [(1, 3, 6), (2, 3, 6), (6,), (1, 2, 3, 4, 5, 6), (5, 6)])
def test_torchs_own_ddp_makes_the_plans_buckets(ends: tuple[int, ...], two: RankPool) -> None:
    """In a chain of layers gradients come from its end."""
    order = [5, 4, 3, 2, 1, 0]
    plan = tuple(tuple(order[begin:end]) for begin, end in zip((0, *ends), ends, strict=False))
    found = nearest(plan, [16 * 16 * 4] * 6, ["float32 cpu"] * 6, order)
    assert found.exact
    assert two.run(torchs_buckets, list(found.caps_mb), 6) == [list(plan)] * 2
