"""The states of plans, held against the flags that they were told apart by before, each with a rule of its own."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given as drawn_from
from hypothesis import settings
from hypothesis import strategies as st
from support.inside import inside
from support.leaf_steps import shadow_step
from support.loopback import Loopback, constant
from support.walked import walked

from fusedreduce import Asynchronous, BoundedStaleness, BucketCaps, ReduceConfig, Reducer, Synchronous
from fusedreduce.buckets.bucket_set import kind_of
from fusedreduce.buckets.parameters import Parameters
from fusedreduce.buckets.step_feature import Moments
from fusedreduce.buckets.wire_table import WireTable
from fusedreduce.comm.group import Group
from fusedreduce.config import Policy, SyncMode, Wire, is_synchronous
from fusedreduce.kernels import variants
from fusedreduce.planning.plan import Plan, first_plan, ready_plan, regrouped, static_plan
from fusedreduce.planning.plan_file import dump
from fusedreduce.planning.readiness import Readiness
from fusedreduce.planning.schedule import REPORTS, Decision, Model, Schedule
from fusedreduce.reducer.plans import FIRST, GIVEN, LEARNING, MEASURED, ORDERED, SHOWN, Plans, PlanState
from fusedreduce.wires import wire_bytes

NUMELS = [3, 30, 300, 3000]
NAMES = [str(number) for number in range(len(NUMELS))]
LINK = (1e6, 1.0)  # on such a link one bucket is best
GIVEN_PLAN: Plan = ((0, 1), (2,), (3,))
FOR_RANKS = 3
# The first ones are drawn most often: with them plans are measured.
MODES: list[SyncMode] = [*[Synchronous()] * 4, BoundedStaleness(0), BoundedStaleness(1), Asynchronous()]
WIRES: list[Wire] = ["native", "native", "bf16", "int8"]


@pytest.fixture(scope="module", autouse=True)
def _torch_path() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(variants, "interpreted", lambda: False)
        yield


def parameters() -> list[torch.Tensor]:
    return [torch.zeros(numel, requires_grad=True) for numel in NUMELS]


def settings_of(policy: Policy = "planned", *, given: bool = False, **options: Any) -> ReduceConfig:
    text = dump(GIVEN_PLAN, names=NAMES, numels=NUMELS, world_size=FOR_RANKS, wire="native")
    return ReduceConfig(policy=policy, replan_every=8, plan=text if given else None, **options)


def ranks(count: int) -> Loopback:
    """Rank 0 has seen the gradients in another order than this one."""
    communicator = Loopback([constant(1.0)] * (count - 1))
    communicator.order = lambda mine: mine.flip(0)
    return communicator


def of_one(wire: Wire) -> WireTable:
    return WireTable((wire,) * len(NUMELS), "wire")


class Round(NamedTuple):
    """What a round is for."""

    place: int | None
    reports: bool
    confirms: bool


def round_of(number: int, every: int, *, done: bool) -> Round:
    """From the number alone; `done`: no report follows."""

    def next_report(of: int) -> int | None:
        if of <= REPORTS[-1]:
            return min(one for one in REPORTS if one >= of)
        return of + (REPORTS[-1] - of) % every if every else None

    report = None if done else next_report(number)
    ahead = 0 if report is None else report - number
    profiled = 0 < ahead <= (3 if report == REPORTS[0] else 2)
    return Round(3 - ahead if profiled else None, report == number, next_report(number - 1) == number - 1)


class Flags:
    """Today's rules: what follows from what, asked anew whenever it is needed, by a reducer that compares nothing."""

    def __init__(self, config: ReduceConfig, caps: BucketCaps, count: int, wire: Wire, *, learns: bool) -> None:
        self.config, self.caps, self.learns = config, caps, learns
        self.may_measure = config.policy != "static" and config.overlap
        self.mode: SyncMode = config.sync_mode
        self.rebuilt = False
        self.said: list[int] = []
        self.wire(wire)
        self.group(count)

    # Events

    def group(self, count: int) -> None:
        self.count = count
        self.given = GIVEN_PLAN if self.config.plan is not None and count == FOR_RANKS else None
        self.arrival: tuple[int, ...] = ()
        self.forget()
        self.return_to_first()

    def wire(self, wire: Wire) -> None:
        self.table = of_one(wire)
        self.kinds = [kind_of(one, False, wire) for one in parameters()]
        self.recut = True

    def forget(self) -> None:
        """What the ranks have not all heard of."""
        self.order: tuple[int, ...] = ()
        self.begin_again()

    def begin_again(self) -> None:
        self.readiness, self.round = Readiness(len(NUMELS)), 0
        self.schedule = Schedule(self.model, self.config.replan_every, arrival=self.arrival)
        self.numbers = self.reduced = self.compared = False
        self.decision: Decision | None = None

    def return_to_first(self) -> None:
        self.recut = self.rebuilt = False

    # Rules

    @property
    def wants_order(self) -> bool:
        together = not isinstance(self.mode, Asynchronous)
        return self.learns and together and not self.rebuilt and self.given is None

    @property
    def measured(self) -> bool:
        modelled = self.count > 1 and not self.table.has_two_phases(self.count)
        return self.rebuilt and self.may_measure and is_synchronous(self.mode) and modelled

    @property
    def model(self) -> Model:
        default = self.table.default_caps(self.count, torch.device("cpu"))
        return Model(
            kinds=self.kinds,
            wire_bytes=[wire_bytes(one, wire) for one, wire in zip(parameters(), self.table.wires, strict=True)],
            caps=default if self.caps == BucketCaps() else self.caps,
            cap_policy=self.config.cap_policy,
            share=self.config.policy != "static",
            policy=self.config.policy,
            link=self.config.link,
            least_bytes=0 if self.config.link else 2**20,
        )

    @property
    def due(self) -> Round:
        small = self.config.policy == "planned" and sum(self.model.wire_bytes) < self.model.least_bytes
        done = self.schedule.costs is not None and small
        return round_of(self.round, self.config.replan_every, done=done)

    @property
    def state(self) -> PlanState:
        if self.given is not None:
            return GIVEN
        if self.rebuilt:
            return MEASURED if self.measured else ORDERED
        return (SHOWN if self.order else LEARNING) if self.wants_order else FIRST

    # Plans

    def first(self) -> Plan:
        model = self.model
        if self.given is not None:
            return regrouped(self.given, model.kinds, share=model.share)
        return first_plan(model.kinds, model.caps, model.cap_policy, learns=self.wants_order)

    def cut(self) -> Plan:
        model = self.model
        if self.config.policy == "static":
            return static_plan(model.kinds, model.caps, model.cap_policy, self.arrival)
        return ready_plan(model.kinds, model.caps, model.cap_policy, self.arrival, share=model.share)

    def recut_of(self, plan: Plan) -> Plan:
        return plan if not self.recut else self.cut() if self.rebuilt else self.first()

    def next(self, plan: Plan) -> tuple[Plan, str]:
        """The plan, and what was done to find it."""
        if self.wants_order and self.order:
            self.arrival = self.schedule.arrival = self.order[::-1]
            self.order, self.recut, self.rebuilt = (), False, True
            return self.cut(), "broadcast"
        if self.recut:
            plan, self.recut = self.recut_of(plan), False
            return plan, "cut"
        if not self.measured:
            return plan, ""
        if self.reduced:
            self.reduced = False
            self.decision = self.schedule.decide(self.said, plan)
            return plan, "decided"
        if self.compared:
            decision, self.compared, self.decision = self.decision, False, None
            assert decision is not None
            return decision.plan, "compared"
        if self.due.reports and not self.numbers:
            ready_ns = [int(one) for one in self.readiness.best()]
            self.said, self.numbers = self.schedule.numbers(ready_ns, {}, len(plan)), True
            return plan, "prepared"
        return plan, ""

    def step(self, seen: Sequence[int], *, ends: bool, joined: bool) -> list[str]:
        """The small collectives of a step."""
        issued = []
        if joined and self.wants_order and not self.order:
            self.order = tuple(range(len(NUMELS)))
        if self.measured:
            due = self.due
            if due.place is not None:
                issued.append("probe")
            if due.reports:
                issued.append("numbers")
                self.numbers, self.reduced = False, True
            elif due.confirms and self.decision is not None:
                issued.append("plans")
                self.compared = True
            if ends:
                self.round += 1
        if ends and not joined and self.wants_order and not self.order:
            self.order = tuple(seen)
        return issued


class Side:
    """What a reducer does with its plans, beside the flags.

    Args:
        data: draws all that may differ.
    """

    def __init__(self, data: st.DataObject) -> None:
        self.config = settings_of(
            data.draw(st.sampled_from(["planned", "ready", "planned", "ready", "static"])),
            given=data.draw(st.sampled_from([False, False, True])),
            overlap=data.draw(st.sampled_from([True, True, True, False])),
            link=data.draw(st.sampled_from([None, LINK])),
            sync_mode=data.draw(st.sampled_from(MODES)),
        )
        wire: Wire = data.draw(st.sampled_from(WIRES))
        caps = BucketCaps(cap_bytes=data.draw(st.sampled_from([40, 4000])), planned_bytes=10**6)
        learns, count = data.draw(st.sampled_from([True, True, True, False])), data.draw(st.sampled_from([3, 2, 1]))
        self.flags = Flags(self.config, caps, count, wire, learns=learns)
        self.communicator = ranks(count)
        self.ranks = Group(self.communicator)
        own = Parameters(tuple(parameters()), tuple(NAMES), (False,) * len(NUMELS))
        self.plans = Plans(own, of_one(wire), self.config, caps, self.ranks, learns=learns)
        self.build(self.plans.first())

    def build(self, plan: Plan) -> None:
        self.plan = plan
        self.follow()

    def follow(self) -> None:
        """As `Engine.follow_settings`."""
        self.moments = Moments.of([self.plans])

    def agrees(self) -> None:
        plans, flags = self.plans, self.flags
        assert plans.state is flags.state
        assert plans.rebuilt == flags.rebuilt and plans.recut(self.plan) == flags.recut_of(self.plan)
        assert plans.profiles == (flags.measured and flags.due.place is not None)
        assert plans.in_use == flags.measured
        if flags.measured:
            assert plans.acts == (flags.due.place is not None or flags.due.reports or flags.due.confirms)

    def rebuild(self) -> None:
        """Twice, as within a wrapper; the second time nothing is due."""
        for _ in range(2):
            before, broadcasts = self.plan, self.communicator.count("broadcast")
            expected, what = self.flags.next(before)
            assert self.plans.due == bool(what), what
            plan, issued = self.plans.next(before) if self.plans.due else (before, 0)
            assert (plan, issued) == (expected, int(what == "broadcast")), what
            assert self.communicator.count("broadcast") == broadcasts + issued
            if issued or plan != before:
                self.build(plan)
            else:
                self.follow()
            self.agrees()
        assert not self.plans.due

    def step(self, seen: Sequence[int], *, ends: bool = True, joined: bool = False) -> None:
        plans, before = self.plans, self.communicator.count("max")
        assert self.moments == Moments.of([plans]), "what the round is for would be left out"
        if joined:
            plans.note_order()
        expected = self.flags.step(seen, ends=ends, joined=joined)
        found = ["probe" for opened in self.moments.opened if opened(None)]
        found += ["numbers" if plans.scheduler.due.reports else "plans" for one in self.moments.behind if one()]
        assert (found, self.communicator.count("max") - before) == (expected, len(expected))
        if not ends:
            return
        assert bool(plans.scheduler.pending) == bool(expected)
        for waited in self.moments.waited:
            waited()
        changed = [counted(None) for counted in self.moments.counted]
        if any(changed):
            self.follow()
        if plans.state is LEARNING and not joined:
            plans.note_order(seen)

    def give_up(self) -> None:
        self.flags.forget()
        self.plans.dropped()
        plan = self.plans.recut(self.plan)
        assert plan == self.flags.recut_of(self.plan)
        self.build(plan)

    def begin_again(self) -> None:
        self.flags.return_to_first()
        plan = self.plans.return_to_first()
        assert plan == self.flags.first()
        self.build(plan)

    def group(self, count: int) -> None:
        """As `Reducer.set_communicator`."""
        self.communicator = ranks(count)
        self.flags.group(count)
        self.ranks.communicator = self.communicator
        self.plans.new_group()
        self.begin_again()

    def caps(self, cap_bytes: int) -> None:
        caps = BucketCaps(cap_bytes=cap_bytes, planned_bytes=10**6)
        if self.flags.given is not None:
            assert self.plans.is_given == (self.flags.given is not None)
            return
        self.flags.caps, self.flags.recut = caps, True
        self.flags.begin_again()
        self.plans.set_caps(caps)

    def wires(self, wire: Wire) -> None:
        self.flags.wire(wire)
        self.flags.begin_again()
        self.plans.set_wires(of_one(wire))

    def mode(self, mode: SyncMode) -> None:
        self.flags.mode = mode
        self.config = dataclasses.replace(self.config, sync_mode=mode)
        self.plans.follow(config=self.config)
        self.follow()

    def learn(self) -> None:
        if not self.flags.rebuilt:
            self.flags.learns = True
            self.plans.follow(learns=True)
            plan = self.plans.first()
            assert plan == self.flags.first()
            self.build(plan)

    def hook(self) -> None:
        self.flags.may_measure = False
        self.plans.follow(hooked=True)
        self.build(self.plan)

    def ready(self, times_ns: Sequence[int]) -> None:
        self.flags.readiness.add(times_ns, [])
        self.plans.scheduler.readiness.add(times_ns, [])


orders = st.permutations(range(len(NUMELS)))
EVENTS: dict[str, st.SearchStrategy[Any]] = {
    "steps": st.tuples(st.sampled_from([1, 2, 9, 11, 12, 13, 20]), orders),
    "joined steps": st.integers(1, 3),
    "step fails": st.booleans(),
    "reset": st.booleans(),
    "caps": st.sampled_from([1, 40, 4000, 10**6]),
    "wires": st.sampled_from(WIRES),
    "mode": st.sampled_from(MODES),
    "learn": st.none(),
    "hook": st.none(),
    "rebuild": st.none(),
    "group": st.sampled_from([1, 2, 3]),
    "ready": st.lists(st.integers(0, 10**7), min_size=len(NUMELS), max_size=len(NUMELS)),
}
one_event = st.one_of(*[st.tuples(st.just(name), drawn) for name, drawn in EVENTS.items()])
changes = st.lists(one_event, max_size=3)
# Between changes there are steps, else nothing is ever measured.
many_events = st.lists(st.tuples(EVENTS["ready"], EVENTS["steps"], changes), min_size=1, max_size=9)


@settings(max_examples=300)
@drawn_from(st.data())
def test_states_are_what_the_flags_say_and_next_is_due_where_it_does_something(data: st.DataObject) -> None:
    side = Side(data)
    side.agrees()
    drawn = data.draw(many_events)
    for name, value in itertools.chain(*[(("ready", ready), ("steps", steps), *last) for ready, steps, last in drawn]):
        if name == "steps":
            count, order = value
            for _ in range(count):
                side.rebuild()
                side.step(order)
                side.agrees()
        elif name == "joined steps":
            for _ in range(value):
                side.rebuild()
                side.step((), joined=True)
                side.agrees()
        elif name == "step fails":
            side.rebuild()
            side.step((), ends=False)
            side.give_up()
            if value:
                side.begin_again()
        elif name == "reset":
            if value:
                side.rebuild()  # this rank had gone on
            side.give_up()
            if value:
                side.begin_again()
        else:
            one: Callable[..., None] = getattr(side, name)
            one(*() if value is None else (value,))
        side.agrees()
    side.rebuild()


def test_what_is_due_lasts_until_the_round_that_is_said() -> None:
    """Between two rounds in which something is due, no round need be looked at."""
    model = Flags(settings_of(), BucketCaps(), 2, "native", learns=True).model
    for every in (0, 8, 11, 1000):
        number = 0
        while number is not None and number < 3000:
            due = Schedule(model, every, number).due()
            assert (due.place, due.reports, due.confirms) == round_of(number, every, done=False)
            after = number + 1 if due.until is None else due.until
            assert after > number and (due.until is not None or (every == 0 and number > REPORTS[-1]))
            quiet = range(number + 1, after if due.until is not None else 3000)
            assert {round_of(one, every, done=False) for one in quiet} <= {(None, False, False)}
            assert due.until is None or not quiet or (due.place, due.reports, due.confirms) == (None, False, False)
            number = due.until if due.until is not None else 3000


def made(communicator: Loopback, config: ReduceConfig | None = None, **options: Any) -> Reducer:
    return Reducer(parameters(), communicator, config or settings_of(link=LINK), names=NAMES, **options)


def train(reducer: Reducer, steps: int) -> None:
    for _ in range(steps):
        one_step(reducer)


def one_step(reducer: Reducer) -> None:
    reducer.prepare_for_forward()
    loss = torch.stack([parameter.sum() for parameter in reducer.parameters]).sum()
    reducer.prepare_for_backward(loss)
    loss.backward()


PLANNERS = ("reducer/plans.py", "reducer/scheduler.py", "planning/schedule.py")


@pytest.mark.parametrize("joined", [False, True])
def test_a_step_in_which_nothing_is_due_counts_its_round_and_that_is_all(joined: bool) -> None:
    with made(ranks(2)) as reducer:
        train(reducer, 40)
        walk = walked(lambda: shadow_step(reducer) if joined else one_step(reducer))
        calls = [call.function for thread in walk.threads for call in thread if call.file in PLANNERS]
        assert calls == ["Plans.note_order"] * joined + ["Plans.counted", "Scheduler.close_round"]


def test_where_no_plan_is_measured_plans_are_not_asked_at_all() -> None:
    for config in (settings_of("static"), settings_of(given=True), settings_of(overlap=False)):
        with made(ranks(3), config) as reducer:
            train(reducer, 3)
            walk = walked(lambda: one_step(reducer))
            assert not {*walk.files} & {*PLANNERS}


def test_small_collectives_come_in_the_rounds_that_they_always_came_in() -> None:
    """By step: a probe, the numbers, the hashes. Of these steps some are without inputs, which count as well."""
    communicator = ranks(2)
    with made(communicator) as reducer:
        found = {}
        for number in range(40):
            before = communicator.count("max")
            shadow_step(reducer) if number % 5 == 4 else one_step(reducer)
            if issued := communicator.count("max") - before:
                found[number] = issued
            assert not inside(reducer).scheduler.pending, "none is in flight between two steps"
    # Step 0 is before the first round.
    probes = [9, 10, 11, 18, 19, 26, 27, 34, 35]
    reports = [12, 20, 28, 36]
    assert found == dict.fromkeys(sorted([*probes, *reports, *[one + 1 for one in reports]]), 1)


@pytest.mark.parametrize("rounds", [9, 11, 12, 13])
def test_what_ends_measuring_ends_it_in_any_round(rounds: int) -> None:
    """Profiled, or with numbers that are prepared, or with a plan that is decided on and not compared."""
    communicator = ranks(2)
    with made(communicator) as reducer:
        train(reducer, 1 + rounds)
        reducer.prepare_for_forward()
        before, plan = communicator.count("max"), reducer.plan
        reducer.set_sync_mode(BoundedStaleness(1))
        train(reducer, 4)
        assert (communicator.count("max"), reducer.plan) == (before, plan)


def test_a_trace_names_the_mode_that_is_in_use(tmp_path: Path) -> None:
    with made(ranks(2), settings_of(sync_mode=BoundedStaleness(1))) as reducer:
        reducer.set_sync_mode(Synchronous())
        with reducer.record_trace(tmp_path):
            train(reducer, 2)
    assert json.loads((tmp_path / "rank0.json").read_text())["config"]["sync_mode"] == "Synchronous()"
