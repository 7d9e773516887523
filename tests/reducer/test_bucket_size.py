"""set_bucket_size: buckets of another size between steps, the same on every rank, and the same gradients to the bit."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given as drawn_from
from hypothesis import strategies as st
from support.inside import LEAST_PLANNED_BYTES, inside
from support.leaf_steps import CAPS, assert_same, clear, copies, drawn, given, leaves, leaves_all, shadow_step, step
from support.loopback import Loopback, ThreadWorld, constant
from support.sweep import sweep

from fusedreduce import (
    AgreementError,
    Asynchronous,
    BoundedStaleness,
    BucketCaps,
    FusedReduceError,
    ReduceConfig,
    Reducer,
    Synchronous,
)
from fusedreduce.comm.local.group import LocalCommunicator
from fusedreduce.comm.protocol import Communicator
from fusedreduce.config import CapPolicy, Policy, SyncMode, Wire
from fusedreduce.planning.bucketing import DEFAULT_CAP_BYTES
from fusedreduce.planning.plan import Plan, first_plan, static_plan
from fusedreduce.planning.plan_file import dump, load
from fusedreduce.reducer.state import ReducerState
from fusedreduce.trace.step_profile import StepProfile

pytestmark = pytest.mark.usefixtures("path")
# As large as the first three together, and as the largest alone.
SMALL, LARGE = 156, 240
FIXED_LINK = (1e6, 1.0)  # on such a link the optimum is one bucket, or as few as the cap allows


def within(reducer: Reducer, cap_bytes: int) -> bool:
    """Whether a bucket stays under the cap without its last parameter, as c10d's rule has it."""
    sizes = [parameter.numel() * parameter.element_size() for parameter in reducer.parameters]
    return all(sum(sizes[number] for number in members[:-1]) < cap_bytes for members in reducer.plan)


def strictly_within(reducer: Reducer, cap_bytes: int) -> bool:
    return all(
        size <= cap_bytes or len(members) == 1
        for size, members in zip(reducer.bucket_bytes(), reducer.plan, strict=True)
    )


# Property


@sweep(60)
@drawn_from(st.data())
def test_gradients_do_not_depend_on_when_the_size_changes(data: st.DataObject) -> None:
    """At two ranks sums have one order, so moving a bucket's boundary changes no bit."""
    numels = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=8))
    order = data.draw(st.permutations(range(len(numels))))
    sizes = data.draw(st.lists(st.one_of(st.none(), st.integers(1, 200)), min_size=1, max_size=8))
    cap_policy: CapPolicy = data.draw(st.sampled_from(("c10d", "strict")))
    policy: Policy = data.draw(st.sampled_from(("static", "ready", "planned")))
    wire: Wire = data.draw(st.sampled_from(("native", "bf16", "fp16")))
    views, find_unused = data.draw(st.booleans()), data.draw(st.booleans())
    accumulates = data.draw(st.booleans())

    def case(communicator: Communicator) -> tuple[list[Any], list[Plan]]:
        found, used = [], []
        for changes in (True, False):
            parameters = leaves(numels)
            config = ReduceConfig(policy=policy, cap_policy=cap_policy, wire=wire)
            with Reducer(
                parameters,
                communicator,
                config,
                find_unused_parameters=find_unused,
                gradient_as_bucket_view=views,
                exclusive=False,
            ) as reducer:
                gradients: list[Any] = []
                cap_bytes: int | None = None
                for number, size in enumerate(sizes):
                    if changes and size is not None:
                        cap_bytes = size
                        reducer.set_bucket_size(size)
                    if not accumulates:
                        clear(parameters)
                    step(reducer, drawn(2 * number + communicator.rank, numels), ready=order)
                    gradients.append(copies(parameters))
                    if changes:
                        used.append(reducer.plan)
                    learned = find_unused or number > 0
                    if cap_bytes is not None and learned:
                        holds = strictly_within if cap_policy == "strict" else within
                        assert holds(reducer, cap_bytes), (reducer.plan, cap_bytes)
                found.append(gradients)
        for changed, unchanged in zip(*found, strict=True):
            assert_same(changed, unchanged)
        return found[0], used

    first, second = ThreadWorld(2).results(case)
    assert first[1] == second[1], "ranks have different plans"
    for mine, other in zip(first[0], second[0], strict=True):
        assert_same(mine, other)


# Agreement


def _sized(communicator: Communicator, **options: Any) -> Reducer:
    return Reducer(leaves(), communicator, ReduceConfig(policy="static"), caps=CAPS, **options)


def _steps(reducer: Reducer, count: int, first: int = 0) -> None:
    for number in range(first, first + count):
        clear(reducer.parameters)
        step(reducer, drawn(2 * number + reducer.communicator.rank, [one.numel() for one in reducer.parameters]))


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_different_sizes_are_the_same_error_on_every_rank_until_all_agree(steps: int) -> None:
    def case(communicator: Communicator) -> tuple[list[str], Plan]:
        reducer = _sized(communicator)
        _steps(reducer, steps)
        plan, issued = reducer.plan, reducer.stats()["collectives"]
        reducer.set_bucket_size(SMALL + communicator.rank)
        found = []
        for attempt in (reducer.prepare_for_forward, reducer.prepare_for_backward):
            with pytest.raises(
                AgreementError, match=f"bucket_cap_bytes: {SMALL} on rank 0; {SMALL + 1} on rank 1"
            ) as e:
                attempt()
            found.append(str(e.value))
        reducer.reset()
        with pytest.raises(AgreementError, match="bucket_cap_bytes"):
            reducer.prepare_for_backward()
        assert (reducer.plan, reducer.stats()["collectives"]) == (plan, issued), "nothing was rebuilt or reduced"
        reducer.set_bucket_size(SMALL)
        _steps(reducer, 2)
        assert within(reducer, SMALL)
        return found, reducer.plan

    first, second = ThreadWorld(2).results(case)
    assert first == second and len(set(first[0])) == 1


def _set_sync_mode(reducer: Reducer) -> None:
    reducer.set_sync_mode(Synchronous())


def _set_bucket_size(reducer: Reducer) -> None:
    reducer.set_bucket_size(SMALL)


@pytest.mark.parametrize("change", [_set_sync_mode, _set_bucket_size])
@pytest.mark.parametrize("changes", [0, 1])
def test_a_call_on_one_rank_only_ends_on_both(change: Callable[[Reducer], None], changes: int) -> None:
    """Its comparison meets the other's next collective: at once an error here, over a network one after the timeout."""

    def case(communicator: Communicator) -> str:
        reducer = _sized(communicator)
        _steps(reducer, 3)
        if communicator.rank == changes:
            change(reducer)
        with pytest.raises(FusedReduceError) as raised:
            _steps(reducer, 1)
        assert reducer.plan and not reducer.pending()
        return str(raised.value)

    found = ThreadWorld(2).results(case)
    assert all("all_gather" in one and "did not issue it within" not in one for one in found), found


@pytest.mark.parametrize("find_unused", [False, True])
def test_a_rank_that_is_new_has_the_plan_of_those_that_have_changed(find_unused: bool) -> None:
    """Another rank's reducer is made with the limits that this one was given later."""

    def case(communicator: Communicator) -> Plan:
        parameters, options = leaves(), {"find_unused_parameters": find_unused}
        if communicator.rank:
            reducer = Reducer(parameters, communicator, caps=BucketCaps.of(1), **options)  # type: ignore[arg-type]
        else:
            reducer = Reducer(parameters, Loopback(), caps=CAPS, **options)  # type: ignore[arg-type]
            _steps(reducer, 3)
            reducer.set_communicator(communicator)
            reducer.set_bucket_size(1)
        _steps(reducer, 2)
        return reducer.plan

    first, second = ThreadWorld(2).results(case)
    assert first == second and len(first) == len(leaves())


# What it refuses, before anything changes


def _given_plan() -> ReduceConfig:
    numels = [one.numel() for one in leaves()]
    names = [f"parameter {number}" for number in range(len(numels))]
    plan = tuple((number,) for number in range(len(numels)))
    return ReduceConfig(plan=dump(plan, names=names, numels=numels, world_size=3, wire="native"))


@pytest.mark.parametrize(
    ("size", "error", "match"),
    [
        (0, ValueError, "at least 1 byte, got 0"),
        (-5, ValueError, "at least 1 byte, got -5"),
        (1e6, TypeError, "whole number of bytes, or BucketCaps; got 1000000.0"),
        (True, TypeError, "got True"),
        ("25", TypeError, "got '25'"),
        (None, TypeError, "got None"),
    ],
)
def test_a_size_is_a_number_of_bytes(size: Any, error: type[Exception], match: str) -> None:
    with _sized(Loopback()) as reducer:
        _steps(reducer, 2)
        plan = reducer.plan
        with pytest.raises(error, match=match):
            reducer.set_bucket_size(size)
        _steps(reducer, 1)
        assert (reducer.caps, reducer.plan) == (CAPS, plan)


def test_a_plan_a_comm_hook_and_a_trace_are_refused(tmp_path: Path) -> None:
    with Reducer(leaves(), Loopback(), _given_plan(), caps=CAPS) as reducer:
        with pytest.raises(ValueError, match=r"set_bucket_size\(\) and plan=... exclude"):
            reducer.set_bucket_size(SMALL)
        _steps(reducer, 2)
        assert reducer.caps == CAPS and len(reducer.plan) == len(reducer.parameters)
        reducer.set_communicator(Loopback([constant(1.0)]))  # of two ranks, which the plan is not for
        reducer.set_bucket_size(SMALL)
        _steps(reducer, 2)
        assert within(reducer, SMALL) and len(reducer.plan) < len(reducer.parameters)
    with _sized(Loopback()) as reducer:
        with reducer.record_trace(tmp_path), pytest.raises(FusedReduceError, match="a trace is being recorded"):
            reducer.set_bucket_size(SMALL)
        reducer.set_bucket_size(SMALL)
    with _sized(Loopback()) as reducer:
        reducer.register_comm_hook(None, leaves_all)
        with pytest.raises(ValueError, match="a comm hook exclude each other"):
            reducer.set_bucket_size(SMALL)
        assert reducer.caps == CAPS


def test_a_hook_that_is_registered_later_gets_the_new_buckets() -> None:
    with _sized(Loopback()) as reducer:
        _steps(reducer, 2)
        reducer.set_bucket_size(1)
        reducer.register_comm_hook(None, leaves_all)
        _steps(reducer, 1)
        assert len(reducer.plan) == len(reducer.parameters)


# Plans


@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize("static_graph", [False, True])
def test_the_order_of_the_first_step_is_kept(find_unused: bool, static_graph: bool) -> None:
    """It is broadcast once, and cut by the limits that hold then; where none is learned parameters are in reverse."""
    communicator, parameters = Loopback(), leaves()
    told: list[torch.Tensor] = []

    def other_order(mine: torch.Tensor) -> torch.Tensor:
        told.append(mine[torch.tensor([2, 0, 5, 6, 1, 4, 3])])
        return told[-1]

    communicator.order = other_order
    options = {"find_unused_parameters": find_unused, "static_graph": static_graph}
    with Reducer(parameters, communicator, ReduceConfig(policy="static"), **options) as reducer:  # type: ignore[arg-type]
        learns = static_graph or not find_unused
        _steps(reducer, 1)
        for size in (SMALL, 1, LARGE, BucketCaps(listed_bytes=(1, 1, 10**6))):
            reducer.set_bucket_size(size)
            _steps(reducer, 1)
            caps, kinds = BucketCaps.of(size), inside(reducer).kinds
            if learns:
                assert reducer.plan == static_plan(kinds, caps, "c10d", told[0].tolist())
            else:
                assert reducer.plan == first_plan(kinds, caps, "c10d", learns=False)
            plan, _ = load(reducer.plan_json(), names=reducer.names, numels=[one.numel() for one in parameters])
            assert plan == reducer.plan
        assert len(told) == communicator.count("broadcast") == learns
        assert reducer.rebuilt == learns


def test_a_plan_that_stays_the_same_is_not_built_again() -> None:
    with _sized(Loopback()) as reducer:
        _steps(reducer, 3)
        before = inside(reducer).buckets_as_built
        reducer.set_bucket_size(CAPS)
        _steps(reducer, 1)
        assert inside(reducer).buckets_as_built is before


@pytest.fixture
def any_model_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    LEAST_PLANNED_BYTES.replace(monkeypatch, 0)


@pytest.mark.usefixtures("any_model_is_planned")
@pytest.mark.parametrize(("steps", "ahead"), [*((steps, False) for steps in (2, *range(8, 17), 30)), (12, True)])
def test_the_planner_keeps_to_the_new_size(steps: int, ahead: bool) -> None:
    """At whatever place of a round it comes: a plan that was decided on for the old size is not adopted, nor are
    numbers of the old buckets sent, which the next forward had prepared."""
    config = ReduceConfig(policy="planned", link=FIXED_LINK, replan_every=8)
    caps = BucketCaps(cap_bytes=48, planned_bytes=10**6)
    with Reducer(leaves([3] * 8), Loopback(), config, caps=caps) as reducer:
        _steps(reducer, steps)
        if ahead:
            reducer.prepare_for_forward()
        reducer.set_bucket_size(24)
        for number in range(24):
            _steps(reducer, 1)
            assert strictly_within(reducer, 24), number
        assert len(reducer.plan) == 4, "as few as the cap allows"
        reducer.set_bucket_size(BucketCaps(first_bytes=24, cap_bytes=24, planned_bytes=10**6))
        _steps(reducer, 1)
        assert len(reducer.plan) == 4
        _steps(reducer, 20)
        assert len(reducer.plan) == 1, "planned anew, by its own limit"


@pytest.mark.usefixtures("any_model_is_planned")
def test_torchs_default_is_a_limit_where_it_is_asked_for() -> None:
    with Reducer(leaves(), Loopback()) as reducer:
        assert reducer.caps.planned_limit_bytes > DEFAULT_CAP_BYTES
        reducer.set_bucket_size(DEFAULT_CAP_BYTES)
        assert reducer.caps.planned_limit_bytes == DEFAULT_CAP_BYTES


@pytest.mark.usefixtures("any_model_is_planned")
def test_ranks_whose_clocks_differ_have_the_same_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    def case(communicator: Communicator) -> list[Plan]:
        config = ReduceConfig(policy="planned", replan_every=8)
        reducer = Reducer(leaves(), communicator, config, caps=CAPS)
        found: list[Plan] = []
        for number in range(45):
            if number % 9 == 0:
                reducer.set_bucket_size(SMALL if number % 2 else LARGE)
            _steps(reducer, 1, number)
            found.append(reducer.plan)
        return found

    probed = StepProfile.step_times

    def slower(profile: StepProfile) -> Any:
        time.sleep(0.001)
        return probed(profile)

    monkeypatch.setattr(StepProfile, "step_times", slower)
    first, second = ThreadWorld(2).results(case)
    assert first == second and len(set(first)) >= 2


# Gradients that stay


@pytest.mark.parametrize("kept", ["accumulated", "no_sync", "zeroed"])
@pytest.mark.parametrize("views", [False, True])
def test_gradients_stay_where_buckets_are_built_anew(views: bool, kept: str) -> None:
    """Views move to the new buckets with what they hold."""

    def case(communicator: Communicator) -> None:
        parameters, alike = leaves(), leaves()
        numels = [one.numel() for one in parameters]
        rank = communicator.rank
        options: dict[str, Any] = {"gradient_as_bucket_view": views, "exclusive": False, "caps": CAPS}
        config = ReduceConfig(policy="static")
        changing, same = (Reducer(own, communicator, config, **options) for own in (parameters, alike))
        for number, size in enumerate((None, None, SMALL, LARGE, 1, 10**6)):
            for reducer in (changing, same):
                if reducer is changing and size is not None:
                    reducer.set_bucket_size(size)
                if kept == "zeroed":
                    reducer.zero_grad()
                elif kept == "no_sync":
                    clear(reducer.parameters)
                    with reducer.no_sync():
                        step(reducer, drawn(100 + 2 * number + rank, numels))
                step(reducer, drawn(2 * number + rank, numels))
            assert_same(copies(parameters), copies(alike), (number, size))
            if views:
                wires = {one.grad.untyped_storage().data_ptr() for one in parameters if one.grad is not None}
                assert len(wires) == len(changing.plan), "a buffer for each bucket"
        assert len(changing.plan) != len(same.plan)

    ThreadWorld(2).results(case)


# Modes


def test_asynchronous_contributions_are_flushed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contributions of two ranks that meet must have the same buckets, whatever steps they are of."""
    compared: list[tuple[LocalCommunicator, str]] = []
    compare_aside = LocalCommunicator.compare_aside

    def noted(communicator: LocalCommunicator, key: str, text: str, device: torch.device) -> list[str]:
        compared.append((communicator, key))
        return compare_aside(communicator, key, text, device)

    monkeypatch.setattr(LocalCommunicator, "compare_aside", noted)

    def case(communicator: Communicator) -> list[float]:
        parameters = leaves()
        rank = communicator.rank
        config = ReduceConfig(policy="static", sync_mode=Asynchronous(2))
        total = [0.0] * len(parameters)
        with Reducer(parameters, communicator, config, caps=CAPS) as reducer:
            for number, size in enumerate((SMALL, 1, LARGE)):
                for _ in range(2 + (number + rank) % 2):  # ranks take different numbers of steps
                    clear(parameters)
                    step(reducer, [torch.full_like(one, 1.0 + rank) for one in parameters])
                    total = _added(total, parameters)
                with pytest.raises(FusedReduceError, match=r"outstanding: call flush\(\) on every rank, then"):
                    reducer.set_bucket_size(size)
                clear(parameters)
                reducer.flush()
                total = _added(total, parameters)
                reducer.set_bucket_size(size)
                clear(parameters)
                step(reducer, [torch.zeros_like(one) for one in parameters])
                assert within(reducer, size)
                total = _added(total, parameters)
            clear(parameters)
            reducer.flush()
            return _added(total, parameters)

    first, second = ThreadWorld(2).results(case)
    # Per rank 2 or 3 steps of 1.0 + rank, averaged: 8 or 7 steps, of 1 or 2.
    assert first == second == [(7 * 1.0 + 8 * 2.0) / 2] * 7
    assert len(set(compared)) == len(compared), "each exchange has a key of its own"


def _added(total: Sequence[float], parameters: Sequence[torch.Tensor]) -> list[float]:
    return [
        had + (0.0 if one.grad is None else float(one.grad.flatten()[0]))
        for had, one in zip(total, parameters, strict=True)
    ]


@pytest.mark.parametrize("mode", [Synchronous(), BoundedStaleness(1)], ids=repr)
def test_a_mode_and_a_size_may_change_together(mode: SyncMode) -> None:
    with _sized(Loopback()) as reducer:
        _steps(reducer, 3)
        reducer.set_sync_mode(mode)
        reducer.set_bucket_size(SMALL)
        _steps(reducer, 3)
        assert within(reducer, SMALL) and reducer.state is ReducerState.IDLE


# Ranks without inputs


def test_a_rank_that_has_joined_follows_a_change_from_before() -> None:
    def case(communicator: Communicator) -> Plan:
        reducer = _sized(communicator)
        _steps(reducer, 2)
        reducer.set_bucket_size(1)
        for _ in range(3):
            if communicator.rank:
                shadow_step(reducer)
            else:
                _steps(reducer, 1)
                assert all(one.grad is not None and one.grad.isfinite().all() for one in reducer.parameters)
        assert len(reducer.plan) == len(reducer.parameters)
        return reducer.plan

    first, second = ThreadWorld(2).results(case)
    assert first == second


def test_under_no_sync_it_takes_effect_with_the_next_step() -> None:
    communicator = Loopback()
    with _sized(communicator) as reducer:
        _steps(reducer, 2)
        plan = reducer.plan
        with reducer.no_sync():
            reducer.set_bucket_size(1)
            loss = given(reducer.parameters, drawn(5, [one.numel() for one in reducer.parameters]))
            reducer.prepare_for_backward(loss)
            loss.backward()
            assert reducer.plan == plan
        _steps(reducer, 1)
        assert reducer.plan != plan and within(reducer, 1)
