"""Step: no group, no clock, no autograd. Every order of arrival, against what a step promises."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.sweep import sweep

from fusedreduce import FusedReduceError
from fusedreduce.buckets.parameters import Parameters
from fusedreduce.reducer.step import Step, unfinished_text


def _bucket_of(plan: list[list[int]]) -> list[int]:
    owner = {index: bucket for bucket, members in enumerate(plan) for index in members}
    return [owner[index] for index in range(len(owner))]


def _parameters(count: int) -> Parameters:
    return Parameters((), tuple(f"layer.{index}" for index in range(count)))


def _step(plan: list[list[int]], fires: list[int] | None = None, unused: list[int] | None = None) -> Step:
    sizes, owners = [len(members) for members in plan], _bucket_of(plan)
    return Step(sizes, owners, _parameters(len(owners)), fires=fires, unused=unused or ())


def _launchable(step: Step) -> list[int]:
    """The buckets that may go now, taken as the reducer takes them."""
    launched = []
    while step.pending[step.next_bucket] == 0:
        launched.append(step.next_bucket)
        step.next_bucket += 1
    return launched


@st.composite
def plans(draw: st.DrawFn) -> list[list[int]]:
    """1 to 14 parameters in any order, cut into buckets anywhere."""
    order = draw(st.permutations(range(draw(st.integers(1, 14)))))
    cuts = draw(st.sets(st.integers(1, len(order)), max_size=5))
    edges = [0, *sorted(cuts | {len(order)})]
    return [list(order[lo:hi]) for lo, hi in zip(edges, edges[1:], strict=False)]


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[list[int]], list[int] | None, list[int], list[int]]:
    """A plan, gradients per parameter (static graph) or None, the unused, and an order of all arrivals."""
    plan = draw(plans())
    count = sum(map(len, plan))
    unused = sorted(draw(st.sets(st.integers(0, count - 1), max_size=count - 1)))
    fires = None
    if draw(st.booleans()):
        fires = [0 if index in unused else draw(st.integers(1, 3)) for index in range(count)]
    arrivals = [
        index for index in range(count) if index not in unused for _ in range(1 if fires is None else fires[index])
    ]
    return plan, fires, unused, draw(st.permutations(arrivals))


@given(steps())
@sweep(400)
def test_buckets_are_launched_in_plan_order_and_each_once(
    case: tuple[list[list[int]], list[int] | None, list[int], list[int]],
) -> None:
    plan, fires, unused, arrivals = case
    step = _step(plan, fires, unused)
    assert not step.begun and step.pending[step.next_bucket] and not step.all_ready()
    launched: list[int] = []
    ready: set[int] = set()
    left = {index: arrivals.count(index) for index in arrivals}
    for index in arrivals:
        before = list(step.pending)
        may_launch = step.mark_ready(index, 1000 + len(step.order))
        assert may_launch or [one == 0 for one in before] == [one == 0 for one in step.pending], "what is ready is told"
        left[index] -= 1
        ready.update(index for index in left if left[index] == 0)
        ready.update(unused)
        assert step.begun and step.skipped == frozenset(unused)
        assert [one for one in range(len(left) + len(unused)) if step.is_ready(one)] == sorted(ready)
        assert step.missing() == sorted(set(range(len(left) + len(unused))) - ready)
        launched += _launchable(step)
        whole = [ready.issuperset(members) for members in plan]
        assert [count == 0 for count in step.pending] == [*whole, False]
        assert [bool(one) for one in step.arrived_ns] == [one in ready for one in range(len(step.ready))]
        assert launched == list(range(whole.index(False) if False in whole else len(plan)))
    assert launched == list(range(len(plan))), "no bucket is left waiting"
    assert step.next_bucket == len(step.launched_ns) and step.all_ready() and step.missing() == []
    assert sorted(step.order) == sorted(left), "the unused are not in the order of readiness"


@given(steps(), st.data())
@sweep(300)
def test_one_gradient_too_many_is_named(
    case: tuple[list[list[int]], list[int] | None, list[int], list[int]], data: st.DataObject
) -> None:
    plan, fires, unused, arrivals = case
    step = _step(plan, fires, unused)
    for index in arrivals:
        step.mark_ready(index, 1)
    again = data.draw(st.integers(0, sum(map(len, plan)) - 1))
    twice = f"Expected to mark a variable ready only once. Parameter at index {again} with name layer.{again} has"
    changed = rf"training graph has changed .* layer\.{again} \(index {again}\)"
    with pytest.raises(FusedReduceError, match=re.escape(twice) if fires is None else changed):
        step.mark_ready(again, 1)


def test_a_parameter_that_was_found_unused_and_gets_a_gradient_is_named() -> None:
    step = _step([[0, 1], [2]], unused=[1])
    step.mark_ready(2, 1)
    assert step.is_ready(1) and step.is_ready(2) and step.skipped == {1}
    with pytest.raises(FusedReduceError, match=r"index 1 with name layer\.1 .*found unused, but got a gradient"):
        step.mark_ready(1, 1)
    first = _step([[0, 1], [2]], unused=[1])
    with pytest.raises(FusedReduceError, match=r"index 1 with name layer\.1 "):
        first.mark_ready(1, 1)


def test_a_static_graph_that_gives_fewer_gradients_leaves_the_parameter_missing() -> None:
    step = _step([[0, 1]], fires=[1, 2])
    step.mark_ready(1, 1)
    step.mark_ready(0, 2)
    assert not step.is_ready(1) and step.is_ready(0) and step.order == [0]
    assert step.missing() == [1] and step.pending[step.next_bucket]


def test_a_changed_static_graph_says_how_many_gradients_there_were() -> None:
    step = _step([[0, 1]], fires=[1, 2])
    step.mark_ready(0, 1)
    with pytest.raises(FusedReduceError, match=r"layer\.0 \(index 0\) got 1 gradient in the first iteration"):
        step.mark_ready(0, 1)
    for ready in (False, True):
        step.mark_ready(1, 2)
        assert step.is_ready(1) is ready
    with pytest.raises(FusedReduceError, match=r"layer\.1 \(index 1\) got 2 gradients in the first"):
        step.mark_ready(1, 1)


def test_in_the_first_step_of_a_static_graph_nothing_is_ready_before_the_end() -> None:
    step = _step([[0], [1, 2]])
    for index in (2, 0, 2):
        step.count(index)
    assert step.begun and not step.all_ready() and step.pending[step.next_bucket]
    assert step.order == [2, 0, 2] and step.missing() == [0, 1, 2]
    step.make_all_ready()
    assert step.all_ready() and _launchable(step) == [0, 1] and step.missing() == []


@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize("static_graph", [False, True])
@pytest.mark.parametrize("failure", ["", "ValueError: a kernel failed"])
@pytest.mark.parametrize("debug_hint", [False, True])
def test_what_is_unfinished_is_named_in_every_mode(
    find_unused: bool, static_graph: bool, failure: str, debug_hint: bool
) -> None:
    names = _parameters(300).names
    missing = list(range(0, 300, 2))

    def text_for(indices: list[int]) -> str:
        return unfinished_text(
            indices,
            names,
            3,
            find_unused=find_unused,
            static_graph=static_graph,
            failure=failure,
            debug_hint=debug_hint,
        )

    text = text_for(missing)
    assert "Expected to have finished reduction in the prior iteration before starting a new one" in text
    shown = text.split("Parameters which did not receive grad for rank 3: ")[1].splitlines()[0]
    assert shown.split(", ") == [names[index] for index in missing], "all of them, in every debug level"
    assert f"rank 3: {' '.join(map(str, missing))}\n" in text
    assert ("TORCH_DISTRIBUTED_DEBUG" in text) == debug_hint
    assert "reset()" in text and failure in text
    assert ("static_graph" in text) == static_graph
    assert "every parameter received its gradient" in text_for([]) and "did not receive" not in text_for([])
