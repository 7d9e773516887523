"""The schedule: rounds, payloads, decisions; no order of events has ranks launch differently or wait for ever."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.sweep import sweep

from fusedreduce.buckets.parameters import Parameters
from fusedreduce.config import Policy
from fusedreduce.planning.bucketing import BucketCaps
from fusedreduce.planning.cost_model import Costs, Linear
from fusedreduce.planning.link_timing import CollectiveTimes, busy_periods, collective_times, last_to_issue
from fusedreduce.planning.plan import ParameterKind, Plan, ready_plan
from fusedreduce.planning.schedule import BucketTimes, Model, Schedule, StepTimes
from fusedreduce.planning.timeline import MISSING_NS
from fusedreduce.reducer.step import Step

PARAMETERS = 7


def model(
    policy: Policy = "planned",
    *,
    sizes: Sequence[int] = (40, 4, 400, 8, 4000, 40, 4),
    groups: Sequence[int] = (),
    caps: BucketCaps | None = None,
    link: tuple[float, float] | None = None,
    least_bytes: int = 0,
) -> Model:
    kinds = [ParameterKind(size, group, 0) for size, group in zip(sizes, groups or [0] * len(sizes), strict=True)]
    caps = caps or BucketCaps(first_bytes=100, cap_bytes=1000)
    return Model(
        kinds=kinds,
        wire_bytes=list(sizes),
        caps=caps,
        cap_policy="c10d",
        share=False,
        policy=policy,
        link=link,
        least_bytes=least_bytes,
    )


def first_plan(of: Model) -> Plan:
    return ready_plan(of.kinds, of.caps, of.cap_policy, range(len(of.kinds))[::-1], share=of.share)


def costing(fixed_ns: int, ns_per_byte: int, plan: Plan, of: Model) -> StepTimes:
    """A step whose collectives cost exactly that; packing 10 ns and 2 a byte, unpacking 4 and 5."""
    sizes = [sum(of.wire_bytes[number] for number in members) for members in plan]
    began = [10**6 * place for place in range(len(plan))]
    ended = [at + fixed_ns + ns_per_byte * size for at, size in zip(began, sizes, strict=True)]
    rows = [
        BucketTimes(wire, 10 + 2 * size, 4 + 5 * size)
        for wire, size in zip(collective_times(began, ended), sizes, strict=True)
    ]
    return StepTimes(rows, stall_ns=0, backward_ns=1000)


def three(step: StepTimes) -> dict[int, StepTimes]:
    """Three steps of which `step` is the median: everything took 3 ns longer in the first, and 2 less in the last."""
    return {0: _later(step, 3), 1: step, 2: _later(step, -2)}


def _later(step: StepTimes, by_ns: int) -> StepTimes:
    rows = []
    for row in step.buckets:
        assert row is not None
        wire = CollectiveTimes(row.wire.since_first_ns + by_ns, row.wire.queued_ns + by_ns)
        rows.append(BucketTimes(wire, row.pack_ns + by_ns, row.unpack_ns + by_ns))
    return dataclasses.replace(step, buckets=rows, backward_ns=step.backward_ns + by_ns)


@pytest.mark.parametrize(
    ("every", "profiled", "reports"),
    [
        (0, set(), set()),
        (8, {33, 34, 41, 42, 49, 50}, {35, 43, 51}),
        (10, {35, 36, 45, 46}, {37, 47}),
        (1000, {1025, 1026}, {1027}),
    ],
)
def test_rounds(every: int, profiled: set[int], reports: set[int]) -> None:
    upto = max(reports, default=52) + 2
    rounds = [Schedule(model(), every, number) for number in range(upto)]
    assert {one.round for one in rounds if one.due().place is not None} == {8, 9, 10, 17, 18, 25, 26} | profiled
    assert {one.round for one in rounds if one.due().reports} == {11, 19, 27} | reports
    assert {one.round - 1 for one in rounds if one.due().confirms} == {11, 19, 27} | reports


def test_latency_is_at_most_what_next_to_nothing_takes() -> None:
    """Of few large buckets, their times apart by what else the processor does, it may come out as many times that."""
    of = model(policy="planned")
    plan = ((0,), tuple(range(1, PARAMETERS)))
    slow = costing(900_000, 3, plan, of)
    schedule = Schedule(of, 0)
    for probe_ns, latency_ns in ((None, 900_000), (700_000, 700_000), (500_000, 500_000), (600_000, 500_000)):
        step = dataclasses.replace(slow, probe_ns=probe_ns)
        costs = schedule.decide(schedule.numbers([0] * PARAMETERS, three(step), len(plan)), plan).costs
        assert costs is not None and costs.wire.fixed_ns == pytest.approx(latency_ns, rel=0.01)


def test_the_link_is_learned_from_what_was_measured_and_the_shortest_rank_counts() -> None:
    of = model()
    plan = first_plan(of)
    ready = [1000 * (PARAMETERS - number) for number in range(PARAMETERS)]
    schedule = Schedule(of, 0)
    exact = schedule.numbers(ready, three(costing(500, 3, plan, of)), len(plan))
    waited = schedule.numbers(ready, three(costing(90_000, 3, plan, of)), len(plan))
    decision = schedule.decide(list(map(max, exact, waited)), plan)
    assert decision.costs is not None
    assert (decision.costs.wire.fixed_ns, decision.costs.wire.fs_per_byte) == (500, 3_000_000)
    assert decision.costs == schedule.costs
    assert decision.costs.pack == Linear(fixed_ns=10, fs_per_byte=2_000_000)
    assert decision.costs.unpack == Linear(fixed_ns=4, fs_per_byte=5_000_000)


def test_a_rank_without_anything_to_say_changes_nothing() -> None:
    of = model()
    plan = first_plan(of)
    ready = [1000 * (PARAMETERS - number) for number in range(PARAMETERS)]
    mine = Schedule(of, 0).numbers(ready, {0: costing(500, 3, plan, of)}, len(plan))
    silent = Schedule(of, 0).numbers([MISSING_NS] * PARAMETERS, {}, len(plan))
    assert list(map(max, mine, silent)) == mine
    decision = Schedule(of, 0).decide(silent, plan)
    assert decision.plan == plan and "no rank knows" in decision.why


def test_deterministic_algorithms_on_one_rank_keep_the_plan_on_all() -> None:
    of = model(link=(1.0, 1.0))
    plan = first_plan(of)
    ready = [1000 * number for number in range(PARAMETERS)]  # the other way round
    free = Schedule(of, 0).numbers(ready, {}, len(plan))
    frozen = Schedule(of, 0).numbers(ready, {}, len(plan), frozen=True)
    assert Schedule(of, 0).decide(free, plan).plan != plan
    assert Schedule(of, 0).decide(list(map(max, free, frozen)), plan).plan == plan


def test_ready_moves_only_when_buckets_wait_for_the_head_of_the_line() -> None:
    of = model("ready")
    plan = first_plan(of)
    backward_ns = 1000 * PARAMETERS
    ready = [1000 * number for number in range(PARAMETERS)]

    def decided(times: Sequence[int], stall_ns: int) -> Plan:
        seen = StepTimes([None] * len(plan), stall_ns=stall_ns, backward_ns=backward_ns)
        schedule = Schedule(of, 0)
        return schedule.decide(schedule.numbers(times, {2: seen}, len(plan)), plan).plan

    by_readiness = ready_plan(of.kinds, of.caps, of.cap_policy, range(PARAMETERS), share=False)
    assert by_readiness != plan
    assert decided(ready, backward_ns // 20) == plan, "5 % are not more than 5 %"
    assert decided(ready, backward_ns // 20 + 1) == by_readiness
    assert decided(ready[::-1], backward_ns) == plan, "jitter: by the agreed times nothing waits with this plan"


def test_ready_does_not_flap_between_gradients_that_come_together() -> None:
    of = model("ready")
    plan = first_plan(of)
    schedule = Schedule(of, 8)
    for look in range(6):
        ready = [1000 * (PARAMETERS - number) for number in range(PARAMETERS)]
        ready[5], ready[6] = (1010, 1000) if look % 2 else (1000, 1010)
        stalled = StepTimes([None] * len(plan), stall_ns=600, backward_ns=8000)
        assert schedule.decide(schedule.numbers(ready, {0: stalled}, len(plan)), plan).plan == plan


@pytest.mark.parametrize(("percent", "moves"), [(0.8, False), (1.5, True)])
def test_planned_moves_for_a_gain_of_more_than_one_percent_of_backward(percent: float, moves: bool) -> None:
    """Two gradients, ready at 0 and at the end: in one bucket, the first one's bytes are sent after the end."""
    end_ns = 10**9
    of = model(sizes=[1000, 8], caps=BucketCaps(cap_bytes=10**6), link=(0.0, 8000 / (percent / 100 * end_ns)))
    plan: Plan = ((0, 1),)
    schedule = Schedule(of, 0)
    decision = schedule.decide(schedule.numbers([0, end_ns], {}, 1), plan)
    assert decision.plan == (((0,), (1,)) if moves else plan), decision.why


@pytest.mark.parametrize(("least", "moves"), [(1008, True), (1009, False)])
def test_planned_keeps_its_plan_where_all_that_travels_is_less_than_buckets_cost(least: int, moves: bool) -> None:
    of = model(sizes=[1000, 8], caps=BucketCaps(cap_bytes=10**6), link=(0.0, 8000 / 10**8), least_bytes=least)
    schedule = Schedule(of, 0)
    decision = schedule.decide(schedule.numbers([0, 10**9], {}, 1), ((0, 1),))
    assert decision.plan == (((0,), (1,)) if moves else ((0, 1),))
    assert decision.costs is not None
    schedule.round = 18
    assert (schedule.due().place is not None) == moves, "what nothing follows from is not measured again"
    assert moves or decision.why.startswith("kept: fewer bytes in all than a bucket costs")


def test_a_link_that_is_given_is_taken_as_given() -> None:
    of = model(link=(20.0, 100.0))
    schedule = Schedule(of, 0)
    plan = first_plan(of)
    costs = schedule.decide(schedule.numbers([0] * PARAMETERS, {}, len(plan)), plan).costs
    assert costs is not None and (costs.wire.fixed_ns, costs.wire.fs_per_byte) == (20_000, 80_000), "12.5 GB/s"


def test_a_link_that_changes_is_noticed() -> None:
    of = model()
    plan = first_plan(of)
    schedule = Schedule(of, 8)
    ready = [1000 * (PARAMETERS - number) for number in range(PARAMETERS)]
    for _ in range(20):
        schedule.decide(schedule.numbers(ready, three(costing(500, 3, plan, of)), len(plan)), plan)
    for _ in range(4):
        schedule.decide(schedule.numbers(ready, three(costing(5000, 30, plan, of)), len(plan)), plan)
    assert schedule.costs is not None
    assert (schedule.costs.wire.fixed_ns, schedule.costs.wire.fs_per_byte) == (5000, 30_000_000)


def test_a_sparse_gradient_hides_its_own_busy_period_only() -> None:
    kinds = [ParameterKind(size, 0, 0, alone=size == 400) for size in (40, 400, 4000)]
    of = Model(
        kinds=kinds,
        wire_bytes=[40, 0, 4000],
        caps=BucketCaps(first_bytes=1, cap_bytes=1),
        cap_policy="c10d",
        share=False,
        policy="planned",
    )
    plan: Plan = ((0,), (1,), (2,))
    schedule = Schedule(of, 0)
    schedule.decide(schedule.numbers([0, 1, 2], three(costing(500, 3, plan, of)), 3), plan)
    assert schedule.costs is not None
    assert schedule.costs == Costs(
        wire=Linear(fixed_ns=500, fs_per_byte=3_000_000),
        pack=Linear(fixed_ns=10, fs_per_byte=2_000_000),
        unpack=Linear(fixed_ns=4, fs_per_byte=5_000_000),
    )


def test_static_is_tried_with_rank_0s_order() -> None:
    of = model(groups="ababaab")  # type: ignore[arg-type]
    plan = first_plan(of)
    ready = [1000 * (PARAMETERS - number) for number in range(PARAMETERS)]
    tried = []
    for arrival in ((), tuple(range(PARAMETERS))):
        schedule = Schedule(of, 0, arrival=arrival)
        tried.append(schedule.static(ready))
        assert schedule.decide(schedule.numbers(ready, three(costing(500, 3, plan, of)), len(plan)), plan).costs
    assert tried[0] != tried[1]


def test_one_size_of_buckets_tells_nothing_about_the_link_and_planned_falls_back_to_ready() -> None:
    of = model(sizes=[100] * PARAMETERS, caps=BucketCaps(first_bytes=100, cap_bytes=100))
    plan = first_plan(of)
    ready = [1000 * (PARAMETERS - number) for number in range(PARAMETERS)]
    decision = Schedule(of, 0).decide(Schedule(of, 0).numbers(ready, three(costing(500, 3, plan, of)), len(plan)), plan)
    assert decision.plan == plan and decision.costs is None and "fewer than two sizes" in decision.why
    given = Schedule(model(sizes=[100] * PARAMETERS, link=(0.5, 8 / 3)), 0)
    assert given.decide(given.numbers(ready, {}, len(plan)), plan).costs is not None


def test_samples_outlive_a_plan() -> None:
    """One bucket after another size: together they are two."""
    of = model(sizes=[100] * PARAMETERS, caps=BucketCaps(first_bytes=100, cap_bytes=100))
    ready = [1000 * (PARAMETERS - number) for number in range(PARAMETERS)]
    schedule = Schedule(of, 8)
    for plan in (first_plan(of), (tuple(range(PARAMETERS)),)):
        decision = schedule.decide(schedule.numbers(ready, {0: costing(500, 3, plan, of)}, len(plan)), plan)
    assert decision.costs is not None and decision.costs.wire.fs_per_byte == 3_000_000


def test_busy_periods_of_the_example() -> None:
    ranks = collective_times([0, 5], [12, 40]), collective_times([102, 130], [112, 140])
    assert busy_periods(last_to_issue(ranks), [10, 30]) == [(10, 10), (30, 10)]


def test_a_collective_that_ends_before_an_earlier_one_ends_no_busy_period() -> None:
    """Gloo's threads run two at once."""
    assert busy_periods(collective_times([0, 5, 30, 100], [40, 12, 50, 130]), [10, 30, 20, 5]) == [(20, 16), (5, 30)]


def test_a_busy_period_with_a_sparse_gradient_in_it_tells_nothing() -> None:
    """Nobody knows the bytes of one, and so not what the bucket that was queued beside it cost."""
    buckets = collective_times([0, 5, 100, 105, 200], [12, 40, 130, 140, 220])
    assert busy_periods(buckets, [10, None, None, 10, 20]) == [(20, 20)]
    assert busy_periods(buckets, [10, 30, 10, 10, 20]) == [(20, 20), (10, 20), (20, 20)]


@sweep(300)
@given(st.data())
def test_busy_periods_find_what_a_fifo_channel_cost_whatever_the_ranks_clocks_and_delays(data: st.DataObject) -> None:
    """Issued at any times on three ranks, served in order, each for 7 ns and 3 per byte."""
    count = data.draw(st.integers(1, 8))
    sizes = data.draw(st.lists(st.integers(0, 50), min_size=count, max_size=count))
    gaps = st.lists(st.integers(0, 300), min_size=count, max_size=count)
    issued = [np.cumsum(data.draw(gaps)).tolist() for _ in range(3)]
    ended, channel = [], 0
    for place, size in enumerate(sizes):
        channel = max(channel, max(one[place] for one in issued)) + 7 + 3 * size
        ended.append(channel)
    offsets = data.draw(st.lists(st.integers(-(10**6), 10**6), min_size=3, max_size=3))
    rows = [
        collective_times([at + offset for at in one], [at + offset for at in ended])
        for one, offset in zip(issued, offsets, strict=True)
    ]
    periods = busy_periods(last_to_issue(rows), sizes)
    assert periods
    for size, took_ns in periods:
        assert 7 + 3 * size <= took_ns < 7 + 3 * (size + 1) + 1, "averages are rounded down"


times = st.one_of(st.just(MISSING_NS), st.just(0), st.integers(0, 50), st.integers(10**15, 10**15 + 3))


@sweep(200)
@given(st.data())
def test_all_ranks_decide_the_same_for_any_set_of_numbers(data: st.DataObject) -> None:
    policy: Policy = data.draw(st.sampled_from(["planned", "ready"]))
    groups = data.draw(st.lists(st.integers(0, 2), min_size=PARAMETERS, max_size=PARAMETERS))
    of = model(policy, groups=groups)
    plan = first_plan(of)
    wire = st.builds(CollectiveTimes, st.integers(0, 10**12), st.integers(-(10**12), 10**12))
    row = st.one_of(st.none(), st.builds(BucketTimes, wire, *[st.integers(0, 10**12)] * 2))
    ranks = [Schedule(of, 8, arrival=tuple(range(PARAMETERS))) for _ in range(3)]
    for _ in range(2):
        rows = st.lists(row, min_size=len(plan), max_size=len(plan))
        step = st.builds(StepTimes, rows, stall_ns=st.integers(0, 1000), backward_ns=st.integers(0, 1000))
        sent = [
            one.numbers(
                data.draw(st.lists(times, min_size=PARAMETERS, max_size=PARAMETERS)),
                data.draw(st.dictionaries(st.integers(0, 2), step)),
                len(plan),
                frozen=False,
            )
            for one in ranks
        ]
        reduced = [max(values) for values in zip(*sent, strict=True)]
        first, *others = [one.decide(reduced, plan) for one in ranks]
        assert all(other == first for other in others)
        assert sorted(number for members in first.plan for number in members) == list(range(PARAMETERS))
        assert all(len({groups[number] for number in members}) == 1 for members in first.plan)
        plan = first.plan


class Ranks(RuleBasedStateMachine):
    """A few ranks in rounds. Each gets its gradients in an order of its own, at times of its own, and may be ahead of
    the others by as much as collectives allow: none ends a step before all have issued what that step needs."""

    WORLD = 3

    @initialize(seed=st.integers(0, 1 << 30), policy=st.sampled_from(["planned", "ready"]), groups=st.integers(1, 3))
    def begin(self, seed: int, policy: Policy, groups: int) -> None:
        self.random = random.Random(seed)
        of = model(policy, groups=[number % groups for number in range(PARAMETERS)])
        self.parameters = Parameters((), tuple(map(str, range(PARAMETERS))))
        # A machine of 300 rules gets through some 12 rounds: from the beginning, or across a later report.
        start = self.random.choice([0, 8, 16, 24, 32])
        self.schedules = [Schedule(of, 8, start) for _ in range(self.WORLD)]
        self.plans = [first_plan(of)] * self.WORLD
        self.decisions: list[object] = [None] * self.WORLD
        self.looked: list[dict[int, StepTimes]] = [{} for _ in range(self.WORLD)]
        self.launched: list[list[tuple[str, object]]] = [[] for _ in range(self.WORLD)]
        self.ended = [0] * self.WORLD
        self.steps: list[Step] = []
        self.waiting: list[list[int]] = []
        for rank in range(self.WORLD):
            self.steps.append(self._step(rank))
            self.waiting.append(self._order())

    def _step(self, rank: int) -> Step:
        plan = self.plans[rank]
        bucket_of = [next(b for b, members in enumerate(plan) if number in members) for number in range(PARAMETERS)]
        return Step([len(members) for members in plan], bucket_of, self.parameters)

    def _order(self) -> list[int]:
        return self.random.sample(range(PARAMETERS), PARAMETERS)

    def _may_end(self, rank: int) -> bool:
        """Everything is here, and each collective of this step has been issued by all."""
        issued = min(len(one) for one in self.launched)
        return not self.waiting[rank] and len(self.launched[rank]) <= issued

    @precondition(lambda self: any(self.waiting))
    @rule(pick=st.integers(0, 1 << 20))
    def a_gradient_comes(self, pick: int) -> None:
        ranks = [rank for rank in range(self.WORLD) if self.waiting[rank]]
        rank = ranks[pick % len(ranks)]
        step = self.steps[rank]
        step.mark_ready(self.waiting[rank].pop(), 1)
        while step.pending[step.next_bucket] == 0:
            self.launched[rank].append(("bucket", self.plans[rank][step.next_bucket]))
            step.next_bucket += 1
        if step.next_bucket == len(step.launched_ns):
            self._issue(rank)

    def _issue(self, rank: int) -> None:
        """The end of backward: what the schedule wants said."""
        schedule = self.schedules[rank]
        place = schedule.due().place
        if place is not None:
            some = (self.random.randrange(10**6) for _ in range(10**6))
            rows = [
                BucketTimes(CollectiveTimes(next(some), next(some) - 10**5), next(some), next(some))
                for _ in self.plans[rank]
            ]
            self.looked[rank][place] = StepTimes(rows, self.random.randrange(100), 100)
        if schedule.due().reports:
            ready = [self.random.choice([MISSING_NS, 0, self.random.randrange(10**6)]) for _ in range(PARAMETERS)]
            numbers = schedule.numbers(ready, self.looked[rank], len(self.plans[rank]))
            self.looked[rank] = {}
            self.launched[rank].append(("numbers", tuple(numbers)))
        elif schedule.due().confirms:
            decision = self.decisions[rank]
            self.launched[rank].append(("hash", decision.hash))  # type: ignore[attr-defined]

    @precondition(lambda self: any(self._may_end(rank) for rank in range(self.WORLD)))
    @rule(pick=st.integers(0, 1 << 20))
    def a_step_ends(self, pick: int) -> None:
        ranks = [rank for rank in range(self.WORLD) if self._may_end(rank)]
        rank = ranks[pick % len(ranks)]
        schedule = self.schedules[rank]
        if schedule.due().reports:
            place = len(self.launched[rank]) - 1
            sent = [self.launched[one][place] for one in range(self.WORLD)]
            assert {kind for kind, _ in sent} == {"numbers"}
            values: list[tuple[int, ...]] = [numbers for _, numbers in sent]  # type: ignore[misc]
            reduced = [max(column) for column in zip(*values, strict=True)]
            self.decisions[rank] = schedule.decide(reduced, self.plans[rank])
        elif schedule.due().confirms:
            self.plans[rank] = self.decisions[rank].plan  # type: ignore[attr-defined]
        schedule.round += 1
        self.ended[rank] += 1
        self.steps[rank] = self._step(rank)
        self.waiting[rank] = self._order()

    @invariant()
    def all_issue_the_same(self) -> None:
        """What has been issued by several ranks is the same, but for the numbers themselves."""
        for place in range(min(len(one) for one in self.launched)):
            kinds = {
                (kind, len(value)) if kind == "numbers" else (kind, value)  # type: ignore[arg-type]
                for kind, value in (one[place] for one in self.launched)
            }
            assert len(kinds) == 1, kinds

    @invariant()
    def somebody_can_go_on(self) -> None:
        assert any(self.waiting) or any(self._may_end(rank) for rank in range(self.WORLD)), "a deadlock"

    @invariant()
    def none_is_two_steps_ahead(self) -> None:
        assert max(self.ended) - min(self.ended) <= 1


TestRanks = Ranks.TestCase
TestRanks.settings = settings(sweep(60), stateful_step_count=300, deadline=None)
