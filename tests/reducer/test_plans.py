"""Readiness, policies, saved plans, and what a reducer may be told about all three."""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.inside import BUCKET_IS_LAUNCHED, inside
from support.leaf_steps import clear, leaves_all, shadow_step
from support.loopback import Loopback, ThreadWorld, constant
from support.walked import walked

from fusedreduce import AgreementError, BoundedStaleness, BucketCaps, ReduceConfig, Reducer, Synchronous
from fusedreduce.buckets.dense import DenseReduction
from fusedreduce.buckets.reduction import StartedCollective
from fusedreduce.comm.protocol import Communicator
from fusedreduce.config import Policy
from fusedreduce.kernels import variants
from fusedreduce.planning.cost_model import Costs, Linear
from fusedreduce.planning.plan import ParameterKind, Plan, ready_plan, static_plan
from fusedreduce.planning.plan_file import dump, load, plan_hash
from fusedreduce.planning.readiness import Readiness
from fusedreduce.planning.schedule import Decision, Schedule, head_of_line_ns
from fusedreduce.planning.timeline import MISSING_NS
from fusedreduce.reducer.plans import Forecast

NAMES, NUMELS = ["a", "b", "c", "d"], [1, 2, 3, 4]


@pytest.fixture(scope="module", autouse=True)
def _torch_path() -> Iterator[None]:
    """Hundreds of steps, some on ranks that are threads and wait for each other: interpreted, they time out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(variants, "interpreted", lambda: False)
        yield


def test_averages_are_exponential_and_know_what_is_missing() -> None:
    readiness = Readiness(3)
    assert readiness.best().tolist() == [MISSING_NS] * 3
    readiness.add([100, MISSING_NS, 10**15], [])
    readiness.add([200, MISSING_NS, 10**15 + 2], [])
    assert readiness.best().tolist() == [150, MISSING_NS, 10**15 + 1]
    readiness.add([MISSING_NS, 0, MISSING_NS], [])
    assert readiness.best().tolist() == [150, 0, 10**15 + 1]


@pytest.mark.parametrize("wrong", [[1, 2], [1, 2, 3, 4], [1, -2, 3]])
def test_averages_refuse_what_cannot_be(wrong: list[int]) -> None:
    readiness = Readiness(3)
    with pytest.raises(ValueError, match="times|time of"):
        readiness.add(wrong, [])
    assert readiness.best().tolist() == [MISSING_NS] * 3


@given(st.lists(st.lists(st.integers(0, 10**15), min_size=4, max_size=4), min_size=1, max_size=9))
def test_averages_keep_an_order_that_every_step_has(steps: list[list[int]]) -> None:
    readiness = Readiness(4)
    for one in steps:
        readiness.add(sorted(one), [])
    average = readiness.best().tolist()
    assert average == sorted(average)
    assert min(map(min, steps)) <= average[0] and average[-1] <= max(map(max, steps))


def test_device_times_stand_apart_and_are_preferred() -> None:
    readiness = Readiness(2)
    readiness.add([1, 2], [])
    assert readiness.best().tolist() == [1, 2]
    readiness.add([3, 4], [30, 40])
    assert readiness.best().tolist() == [30, 40], "the first of their own"
    readiness.add([5, 6], [50, 60])
    assert readiness.best().tolist() == [40, 50]


def kinds(groups: str) -> list[ParameterKind]:
    return [ParameterKind(10, group, 0) for group in groups]


def test_leftovers_are_launched_by_readiness_not_in_the_order_of_a_hash_map() -> None:
    caps = BucketCaps(first_bytes=20, cap_bytes=20)
    # b is never full and ready after the first a's: torch's rule keeps what is left over for the end.
    order = [0, 1, 2, 3, 4, 5]
    assert static_plan(kinds("abaaaa"), caps, "c10d", order) == ((0, 2), (3, 4), (1,), (5,))
    assert ready_plan(kinds("abaaaa"), caps, "c10d", order, share=False) == ((1,), (0, 2), (3, 4), (5,))


@given(st.data())
def test_with_readiness_no_bucket_waits_for_the_head_of_the_line(data: st.DataObject) -> None:
    groups = data.draw(st.text("abc", min_size=1, max_size=12))
    times = data.draw(st.lists(st.integers(0, 5), min_size=len(groups), max_size=len(groups)))
    order = sorted(range(len(groups)), key=times.__getitem__)
    caps = BucketCaps(first_bytes=data.draw(st.integers(1, 60)), cap_bytes=data.draw(st.integers(1, 60)))
    plan = ready_plan(kinds(groups), caps, "c10d", order, share=False)
    assert head_of_line_ns(plan, times) == 0
    assert sorted(plan) == sorted(static_plan(kinds(groups), caps, "c10d", order)), "the same buckets as torch's"


plans = st.permutations(range(4)).flatmap(
    lambda order: st.sets(st.integers(1, 3)).map(
        lambda cuts: tuple(
            tuple(order[begin:end]) for begin, end in zip([0, *sorted(cuts)], [*sorted(cuts), 4], strict=True)
        )
    )
)


@given(plans, st.integers(1, 1 << 20))
def test_a_plan_survives_being_saved(plan: Plan, world_size: int) -> None:
    text = dump(plan, names=NAMES, numels=NUMELS, world_size=world_size, wire="bf16")
    assert load(text, names=NAMES, numels=NUMELS) == (plan, world_size)
    assert json.loads(text)["wire"] == "bf16"
    assert 0 <= plan_hash(plan) < 1 << 62


@given(plans, plans)
def test_hashes_tell_plans_apart(one: Plan, other: Plan) -> None:
    assert (plan_hash(one) == plan_hash(other)) == (one == other)


GOOD = json.loads(dump(((0, 1), (2, 3)), names=NAMES, numels=NUMELS, world_size=2, wire="native"))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"format": "other"}, "not a plan of fusedreduce"),
        ({"version": 2}, "reads version 1"),
        ({"version": True}, "reads version 1"),
        ({"version": 1.0}, "reads version 1"),
        ({"world_size": 0}, "damaged: world_size 0"),
        ({"world_size": True}, "damaged"),
        ({"world_size": 2.0}, "damaged"),
        ({"wire": None}, "damaged"),
        ({"model": "00"}, "other parameters"),
        ({"buckets": None}, "not lists"),
        ({"buckets": [[0, 1], []]}, "not lists"),
        ({"buckets": [[0, 1], [2]]}, "each of 4 parameters once"),
        ({"buckets": [[0, 1], [2, 2]]}, "each of 4 parameters once"),
        (
            {"buckets": [[0, 1], [2, 3, 1]], "hash": f"{plan_hash(((0, 1), (2, 3, 1))):016x}"},
            "each of 4 parameters once",
        ),
        ({"buckets": [[0, 1], [2, 4]]}, "each of 4 parameters once"),
        ({"buckets": [[0, 1], [2, 3.0]]}, "each of 4 parameters once"),
        ({"buckets": [[0, True], [2, 3]]}, "each of 4 parameters once"),
        ({"buckets": [[0, 1], [3, 2]]}, "hash"),
        ({"hash": 0}, "hash"),
    ],
)
def test_plans_are_checked_field_by_field(change: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        load(json.dumps({**GOOD, **change}), names=NAMES, numels=NUMELS)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "7", '"plan"', "[" * 100_000, "\x80"])
def test_what_is_no_plan_says_so(text: str) -> None:
    with pytest.raises(ValueError, match="this is not a plan"):
        load(text, names=NAMES, numels=NUMELS)


@pytest.mark.parametrize(
    ("names", "numels"), [(["a", "b", "d", "c"], NUMELS), (NAMES, [1, 2, 4, 3]), (NAMES[:3], NUMELS[:3])]
)
def test_a_plan_for_another_model_is_refused(names: list[str], numels: list[int]) -> None:
    with pytest.raises(ValueError, match="other parameters"):
        load(json.dumps(GOOD), names=names, numels=numels)


@pytest.mark.parametrize(
    "options",
    [
        {"replan_every": 7},
        {"replan_every": -1},
        {"replan_every": 10.0},
        {"replan_every": True},
        {"link": (1.0,)},
        {"link": (-1.0, 1.0)},
        {"link": (1.0, 0.0)},
        {"link": (float("nan"), 1.0)},
        {"link": (1e300, 1.0)},
        {"link": (1.0, 1e-310)},
        {"link": (10**400, 1.0)},
        {"link": (1.0, float("inf"))},
        {"link": [1.0, 1.0]},
        {"link": (True, 1.0)},
        {"plan": b"{}"},
        {"policy": "fastest"},
    ],
)
def test_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        ReduceConfig(**options)


def parameters(*dtypes: torch.dtype) -> list[torch.Tensor]:
    return [torch.zeros(3, dtype=dtype, requires_grad=True) for dtype in dtypes]


def saved(plan: Plan, count: int, world_size: int = 3) -> str:
    names = [f"parameter {index}" for index in range(count)]
    return dump(plan, names=names, numels=[3] * count, world_size=world_size, wire="native")


def test_a_plan_that_mixes_dtypes_is_refused() -> None:
    mixed = parameters(torch.float32, torch.bfloat16)
    text = saved(((0, 1),), 2)
    with pytest.raises(ValueError, match="bucket 0 of the plan .* differ in dtype"):
        Reducer(mixed, Loopback(), ReduceConfig(plan=text))
    with Reducer(mixed, Loopback(), ReduceConfig(plan=text, wire="bf16")) as reducer:
        assert reducer.plan == ((0, 1),), "a 16-bit wire may"
    with pytest.raises(ValueError, match="sparse"):
        Reducer(parameters(torch.float32, torch.float32), Loopback(), ReduceConfig(plan=text), sparse=[True, False])


def test_a_plan_for_another_world_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    text = saved(((0,), (1,)), 2, world_size=4)
    with (
        caplog.at_level(logging.WARNING),
        Reducer(parameters(torch.float32, torch.float32), Loopback(), ReduceConfig(plan=text)) as reducer,
    ):
        assert reducer.plan == ((0, 1),), "the first step's, of one bucket; the plan that was given has two"
        assert "for 4 ranks, not 3: it is not used" in caplog.text
        assert load(reducer.plan_json(), names=reducer.names, numels=[3, 3]) == (reducer.plan, 3)


def test_a_plan_that_was_given_is_looked_at_anew_in_another_group() -> None:
    given = parameters(torch.float32, torch.float32)
    plan: Plan = ((0,), (1,))
    with Reducer(given, Loopback(), ReduceConfig(plan=saved(plan, 2, world_size=3))) as reducer:
        train(reducer, given, 2)
        assert reducer.plan == plan
        two_ranks = Loopback([constant(0.5)])
        reducer.set_communicator(two_ranks)
        assert reducer.plan == ((0, 1),), "it is for three ranks, and these are two"
        train(reducer, given, 2)
        assert two_ranks.count("broadcast") == 1, "they learn one of their own"
        reducer.set_communicator(Loopback())
        assert reducer.plan == plan


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize("largest", [False, True], ids=["least", "largest"])
def test_ranks_that_decide_on_different_plans_all_raise(
    monkeypatch: pytest.MonkeyPatch, odd: int, largest: bool
) -> None:
    """Whichever rank it is, and whether its hash is the largest or the least: an error of some ranks only leaves them
    in the next collective without the others."""
    plans: list[Plan] = sorted([((0,), (2,), (1,)), ((0,), (1,), (2,))], key=plan_hash, reverse=largest)
    decide, apart = Schedule.decide, threading.local()

    def decides(self: Schedule, reduced: Sequence[int], plan: Plan) -> Decision:
        return dataclasses.replace(decide(self, reduced, plan), plan=plans[apart.rank != odd])

    monkeypatch.setattr(Schedule, "decide", decides)

    def case(communicator: Communicator) -> None:
        apart.rank = communicator.rank
        given = parameters(*[torch.float32] * 3)
        with Reducer(given, communicator, caps=BucketCaps(cap_bytes=12)) as reducer:
            train(reducer, given, 16)

    errors = ThreadWorld(3).run(case)
    least, most = sorted(map(plan_hash, plans))
    for rank, error in enumerate(errors):
        own = plan_hash(plans[rank != odd])
        assert isinstance(error, AgreementError), error
        assert f"rank {rank}: ranks have decided on different plans from the same numbers" in str(error)
        assert f"hash {own:016x} on this rank, {least:016x} to {most:016x} over all" in str(error)


@pytest.mark.parametrize(
    ("policy", "plan"), [("static", ((0, 2), (3, 4), (1,), (5,))), ("ready", ((1,), (0, 2), (3, 4), (5,)))]
)
def test_each_policy_cuts_rank_0s_order_by_its_own_rule(policy: Policy, plan: Plan) -> None:
    """See test_leftovers_are_launched_by_readiness_not_in_the_order_of_a_hash_map."""
    given, communicator = parameters(torch.float32, torch.bfloat16, *[torch.float32] * 4), Loopback()
    communicator.order = lambda mine: torch.arange(6)
    config, caps = ReduceConfig(policy=policy), BucketCaps(first_bytes=24, cap_bytes=24)
    with Reducer(given, communicator, config, caps=caps) as reducer:
        train(reducer, given, 2)
        assert reducer.plan == plan


ROUNDS = 38  # four looks at the plan, with replan_every=8


def train(reducer: Reducer, given: list[torch.Tensor], steps: int) -> None:
    for _ in range(steps):
        clear(given)
        reducer.prepare_for_forward()  # as a wrapper does; what was due is not any more by the next call
        loss = torch.stack([parameter.sum() for parameter in given]).sum()
        reducer.prepare_for_backward(loss)
        loss.backward()


@pytest.mark.parametrize(
    "why", ["static", "comm hook", "late comm hook", "no overlap", "one rank", "two phases", "find unused", "plan"]
)
def test_where_no_plan_follows_a_clock_nobody_looks(why: str) -> None:
    given = parameters(*[torch.float32] * 3)
    communicator = Loopback(()) if why == "one rank" else Loopback()
    in_phases: dict[str, Any] = {"wire": "bf16", "accumulation": "fp32"} if why == "two phases" else {}
    config = ReduceConfig(
        **in_phases,
        policy="static" if why == "static" else "planned",
        overlap=why != "no overlap",
        replan_every=8,
        plan=saved(((0,), (1, 2)), 3) if why == "plan" else None,
    )
    with Reducer(given, communicator, config, find_unused_parameters=why == "find unused") as reducer:
        if why == "comm hook":
            reducer.register_comm_hook(None, leaves_all)
        if why == "late comm hook":
            train(reducer, given, 4)
            reducer.register_comm_hook(None, leaves_all)
            reducer.set_sync_mode(Synchronous())
        train(reducer, given, ROUNDS)
        assert communicator.count("max") == 0


def test_our_own_packing_is_no_part_of_readiness(monkeypatch: pytest.MonkeyPatch) -> None:
    given = parameters(*[torch.float32] * 3)
    with Reducer(given, Loopback(), caps=BucketCaps(cap_bytes=12)) as reducer:
        launch = BUCKET_IS_LAUNCHED.present

        def slow(self: DenseReduction, divisor: float) -> StartedCollective:
            time.sleep(0.02)
            started: StartedCollective = launch(self, divisor)
            return started

        BUCKET_IS_LAUNCHED.replace(monkeypatch, slow)
        train(reducer, given, 14)
        ready_ns = inside(reducer).scheduler.readiness.best().tolist()
        assert min(ready_ns) >= 0 and max(ready_ns) < 20_000_000, "of 60 ms that backward took"
        costs = inside(reducer).scheduler.schedule
        assert min(ns for one in costs._rounds for _, ns in one.pack) >= 20_000_000


def test_after_a_reset_ranks_know_the_same_again() -> None:
    """One rank has read what the others have not, when all give up."""

    def case(communicator: Communicator) -> Any:
        given = parameters(*[torch.float32] * 4)
        reducer = Reducer(
            given, communicator, ReduceConfig(policy="planned", replan_every=8), caps=BucketCaps(cap_bytes=24)
        )
        train(reducer, given, 13)
        if communicator.rank == 0:
            reducer.prepare_for_forward()
            assert inside(reducer).scheduler.schedule.costs is not None
        reducer.reset()
        scheduler = inside(reducer).scheduler
        assert scheduler.schedule.costs is None and scheduler.schedule.round == 0
        assert set(scheduler.readiness.best().tolist()) == {MISSING_NS}
        train(reducer, given, 30)
        return reducer.plan, scheduler.schedule.costs, list(scheduler.schedule._rounds)

    first, *others = ThreadWorld(3).results(case)
    assert all(other == first for other in others) and first[1] is not None


def test_after_a_reset_ranks_that_hold_different_plans_begin_again() -> None:
    """One rank has gone on to the plan that all have decided on, when all give up."""

    def case(communicator: Communicator) -> Any:
        reducer, given = planned(communicator)
        train(reducer, given, 14)
        if communicator.rank == 0:
            reducer.prepare_for_forward()
        held = len(reducer.plan)
        reducer.reset()
        train(reducer, given, 3)
        return held, reducer.plan, [parameter.grad.tolist() for parameter in given if parameter.grad is not None]

    first, second = ThreadWorld(2).results(case)
    assert (first[0], second[0]) == (1, 4), "otherwise this has tested nothing"
    assert first[1:] == second[1:] and first[2] == [[1.0] * 3] * 4


@pytest.mark.parametrize("steps", [12, 13])
def test_deterministic_algorithms_stop_a_change_that_is_decided_already(steps: int) -> None:
    reducer, given = planned(Loopback())
    train(reducer, given, steps)
    torch.use_deterministic_algorithms(True)
    try:
        train(reducer, given, 4)
        assert len(reducer.plan) == 4 and reducer.stats()["plans"] == 0
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("steps", [0, 12, 13])
def test_deterministic_algorithms_of_one_rank_keep_the_plan_of_all(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """From the first step on, or when a change is decided already."""
    of_thread = threading.local()
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: getattr(of_thread, "frozen", False))

    def case(communicator: Communicator) -> tuple[int, object]:
        reducer, given = planned(communicator)
        train(reducer, given, steps)
        of_thread.frozen = communicator.rank == 1
        train(reducer, given, 34 - steps)
        return len(reducer.plan), reducer.stats()["plans"]

    assert ThreadWorld(2).results(case) == [(4, 0)] * 2


def test_without_them_that_change_is_made() -> None:
    reducer, given = planned(Loopback())
    train(reducer, given, 34)
    assert len(reducer.plan) == 1 and reducer.stats()["plans"] == 1


def test_a_forecast_has_our_bytes_for_us_and_torchs_for_torch() -> None:
    parameters = [torch.zeros(4, requires_grad=True) for _ in range(2)]
    reducer = Reducer(parameters, Loopback(), ReduceConfig(wire="bf16"))
    assert reducer.forecast() is None, "nothing is measured"
    scheduler = inside(reducer).scheduler
    scheduler.readiness.add([1_000_000, 2_000_000], [])
    scheduler.schedule.costs = Costs(
        wire=Linear(fixed_ns=1_000_000, fs_per_byte=10**12 // 16), pack=Linear(fixed_ns=500_000, fs_per_byte=0)
    )
    # Ours: gradients and pack, then 1 ms and 16 bytes; torch's: gradients, then 1 ms and 32 bytes.
    assert reducer.forecast() == Forecast(backward_ms=2.5, finish_ms=4.5, torch_finish_ms=5.0)
    reducer.close()


# What is due, and what is not


def planned(communicator: Communicator, config: ReduceConfig | None = None) -> tuple[Reducer, list[torch.Tensor]]:
    """On a link on which one bucket is best."""
    given = parameters(*[torch.float32] * 4)
    config = config or ReduceConfig(policy="planned", replan_every=8, link=(1e6, 1.0))
    return Reducer(given, communicator, config, caps=BucketCaps(cap_bytes=12, planned_bytes=10**6)), given


@pytest.mark.parametrize("every", [0, 8, 11, 1000])
def test_what_is_due_lasts_until_the_round_that_is_said(every: int) -> None:
    """Between two rounds in which something is due, no round need be looked at."""
    model = inside(planned(Loopback())[0]).scheduler.schedule.model
    rounds = [Schedule(model, every, number).due() for number in range(3000)]
    busy = {number for number, due in enumerate(rounds) if due.place is not None or due.reports or due.confirms}
    looked: list[int] = []
    number: int | None = 0
    while number is not None and number < len(rounds):
        looked.append(number)
        number = rounds[number].until
    assert busy <= set(looked) <= {0} | busy | {one + 1 for one in busy}


PLANNERS = {"reducer/plans.py", "reducer/scheduler.py", "planning/schedule.py"}


@pytest.mark.parametrize("joined", [False, True])
def test_a_step_in_which_nothing_is_due_counts_its_round_and_that_is_all(joined: bool) -> None:
    reducer, given = planned(Loopback())
    train(reducer, given, 40)
    walk = walked(lambda: shadow_step(reducer) if joined else train(reducer, given, 1))
    calls = [call.function for thread in walk.threads for call in thread if call.file in PLANNERS]
    assert calls == ["Plans.note_order"] * joined + ["Plans.counted", "Scheduler.close_round"]


@pytest.mark.parametrize("options", [{"policy": "static"}, {"overlap": False}, {"plan": saved(((0, 1), (2, 3)), 4)}])
def test_where_no_plan_is_measured_plans_are_not_asked_at_all(options: dict[str, Any]) -> None:
    reducer, given = planned(Loopback(), ReduceConfig(**options))
    train(reducer, given, 3)
    assert not PLANNERS & {*walked(lambda: train(reducer, given, 1)).files}


def test_small_collectives_come_in_the_rounds_that_they_always_came_in() -> None:
    """By step: a probe, the numbers, the hashes. Of these steps some are without inputs, which count as well."""
    communicator = Loopback()
    reducer, given = planned(communicator)
    found = {}
    for number in range(40):
        before = communicator.count("max")
        shadow_step(reducer) if number % 5 == 4 else train(reducer, given, 1)
        if issued := communicator.count("max") - before:
            found[number] = issued
        assert not inside(reducer).scheduler.pending, "none is in flight between two steps"
    # Step 0 is before the first round.
    probes = [9, 10, 11, 18, 19, 26, 27, 34, 35]
    reports = [12, 20, 28, 36]
    assert found == dict.fromkeys(sorted([*probes, *reports, *[one + 1 for one in reports]]), 1)


@pytest.mark.parametrize("size", [False, True])
@pytest.mark.parametrize("rounds", [9, 11, 12, 13])
def test_what_ends_measuring_ends_it_in_any_round(rounds: int, size: bool) -> None:
    """Profiled, or with numbers that are prepared, or with a plan that is decided on and not compared. By another mode,
    or another size, for which it begins anew."""
    communicator = Loopback()
    reducer, given = planned(communicator)
    train(reducer, given, 1 + rounds)
    reducer.prepare_for_forward()
    before, plan = communicator.count("max"), reducer.plan
    if size:
        reducer.set_bucket_size(12)
    else:
        reducer.set_sync_mode(BoundedStaleness(1))
    train(reducer, given, 4)
    assert communicator.count("max") == before
    assert len(reducer.plan) == 4 if size else reducer.plan == plan


def test_a_mode_that_is_set_before_the_first_step_leaves_the_order_to_be_learned() -> None:
    reducer, given = planned(Loopback())
    reducer.set_sync_mode(BoundedStaleness(1))
    train(reducer, given, 2)
    assert reducer.rebuilt


def test_a_trace_names_the_mode_that_is_in_use(tmp_path: Path) -> None:
    reducer, given = planned(Loopback(), ReduceConfig(sync_mode=BoundedStaleness(1)))
    reducer.set_sync_mode(Synchronous())
    with reducer.record_trace(tmp_path):
        train(reducer, given, 2)
    assert json.loads((tmp_path / "rank0.json").read_text())["config"]["sync_mode"] == "Synchronous()"
