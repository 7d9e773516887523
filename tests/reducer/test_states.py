"""Every call of a Reducer in every state that it can have: what it raises, which state it leaves, and how to go on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from reducer import state_cases
from reducer.state_cases import (
    CALLS,
    CHANGED,
    RANKS,
    Outcome,
    Rank,
    bring,
    check,
    check_averages,
    drive,
    fail,
    gradient_value,
    in_turn,
)
from support.leaf_steps import SHAPES, given
from support.ranks import RankPool

from fusedreduce import FusedReduceError
from fusedreduce.comm.local.group import LocalCommunicator, LocalGroup
from fusedreduce.comm.protocol import Communicator
from fusedreduce.reducer.state import ReducerState

IDLE, ARMED, LAUNCHED = ReducerState.IDLE, ReducerState.ARMED, ReducerState.LAUNCHED
FAILED, LOST, CLOSED = ReducerState.FAILED, ReducerState.LOST, ReducerState.CLOSED
TIMEOUT_S = 10.0

_UNFINISHED = r"call reset\(\) on every rank"
_NO_GROUP = r"give it to set_communicator\(\)"
_CLOSED = "closed: build another one"


def _fine(after: ReducerState, does: str) -> Outcome:
    return Outcome(after, does=does)


def _refused(state: ReducerState, match: str, does: str, error: type[Exception] = FusedReduceError) -> Outcome:
    return Outcome(state, error, match, does)


# What most calls do with a reducer that cannot go on.
_UNUSABLE = {
    FAILED: _refused(FAILED, _UNFINISHED, "raises: reset"),
    LOST: _refused(LOST, _NO_GROUP, "raises: set_communicator"),
    CLOSED: _refused(CLOSED, _CLOSED, "raises: closed"),
}
# What looks at a finished step, and changes nothing else.
_CHECK = {
    IDLE: _fine(IDLE, "nothing"),
    ARMED: _fine(ARMED, "nothing"),
    LAUNCHED: _fine(IDLE, "completes the step"),
    **_UNUSABLE,
}
_TOO_LATE = r"before training loop starts"

# By call and state; of a reducer that has reduced one step already.
ROWS: Mapping[str, Mapping[ReducerState, Outcome]] = {
    "prepare_for_forward": {**_CHECK},
    "prepare_for_backward": {
        IDLE: _fine(ARMED, "arms"),
        ARMED: _fine(ARMED, "arms anew"),
        LAUNCHED: _fine(ARMED, "completes the step, arms"),
        **_UNUSABLE,
    },
    "loss.backward": {
        IDLE: _fine(IDLE, "local"),
        ARMED: _fine(IDLE, "averages"),  # or LAUNCHED, where nothing may be waited for in backward
        LAUNCHED: _fine(LAUNCHED, "local, so the end raises"),
        FAILED: _fine(FAILED, "local"),
        LOST: _fine(LOST, "local"),
        CLOSED: _fine(CLOSED, "local"),
    },
    "backward under no_sync": {
        IDLE: _fine(IDLE, "local"),
        ARMED: _fine(IDLE, "disarms, local"),
        LAUNCHED: _fine(IDLE, "completes the step, local"),
        **_UNUSABLE,
    },
    "finalize": {**_CHECK},
    "check_finalized": {**_CHECK},
    "finalize_backward": {
        state: _refused(state, "manual backward finalization is not required", "raises: not required")
        for state in ReducerState
    },
    "require_manual_finalization": {
        IDLE: _fine(IDLE, "sets"),
        ARMED: _refused(ARMED, "cannot be called after forward", "raises: armed"),
        LAUNCHED: _refused(LAUNCHED, "cannot be called after forward", "raises: launched"),
        **_UNUSABLE,
    },
    "zero_grad": {
        IDLE: _fine(IDLE, "zeroes"),
        ARMED: _fine(ARMED, "zeroes"),
        LAUNCHED: _fine(IDLE, "completes the step, zeroes"),
        FAILED: _fine(FAILED, "zeroes"),
        LOST: _fine(LOST, "zeroes"),
        CLOSED: _fine(CLOSED, "zeroes"),
    },
    "flush": {**_CHECK},
    "state_dict": {**_CHECK},
    "load_state_dict": {**_CHECK},
    "set_sync_mode": {
        IDLE: _fine(IDLE, "switches"),
        ARMED: _refused(ARMED, r"a step is armed.*after its backward, or after reset\(\)", "raises: armed"),
        LAUNCHED: _fine(IDLE, "completes the step, switches"),
        **_UNUSABLE,
    },
    "set_bucket_size": {
        IDLE: _fine(IDLE, "changes"),
        ARMED: _refused(ARMED, r"a step is armed.*after its backward, or after reset\(\)", "raises: armed"),
        LAUNCHED: _fine(IDLE, "completes the step, changes"),
        **_UNUSABLE,
    },
    "register_comm_hook": {
        IDLE: _fine(IDLE, "registers"),
        ARMED: _fine(ARMED, "registers"),
        LAUNCHED: _fine(IDLE, "completes the step, registers"),
        **_UNUSABLE,
    },
    "set_static_graph": {
        **{
            state: _refused(state, _TOO_LATE, "raises: too late", RuntimeError)
            for state in (IDLE, ARMED, LAUNCHED, FAILED, LOST)
        },
        CLOSED: _UNUSABLE[CLOSED],
    },
    "record_trace": {
        **{state: _fine(state, "records") for state in (IDLE, ARMED, LAUNCHED, FAILED, LOST)},
        CLOSED: _UNUSABLE[CLOSED],
    },
    "reset": {
        IDLE: _fine(IDLE, "compares the ranks"),
        ARMED: _fine(IDLE, "gives up the step"),
        LAUNCHED: _fine(IDLE, "gives up the step"),
        FAILED: _fine(IDLE, "gives up the step"),
        LOST: _UNUSABLE[LOST],
        CLOSED: _UNUSABLE[CLOSED],
    },
    "set_communicator": {
        IDLE: _fine(IDLE, "switches"),
        ARMED: _fine(IDLE, "gives up the step, switches"),
        LAUNCHED: _fine(IDLE, "gives up the step, switches"),
        FAILED: _fine(IDLE, "gives up the step, switches"),
        LOST: _fine(IDLE, "switches"),
        CLOSED: _UNUSABLE[CLOSED],
    },
    "close": {
        ARMED: _fine(CLOSED, "gives up the step, closes"),
        LAUNCHED: _fine(CLOSED, "warns, gives up the step, closes"),
        **{state: _fine(CLOSED, "closes") for state in (IDLE, FAILED, LOST)},
        CLOSED: _fine(CLOSED, "nothing"),
    },
}
TABLE: Mapping[tuple[str, ReducerState], Outcome] = {
    (call, state): outcome for call, row in ROWS.items() for state, outcome in row.items()
}
# Before the first step.
FIRST: Mapping[tuple[str, ReducerState], Outcome] = {
    ("set_static_graph", state): _fine(state, "") for state in (IDLE, FAILED, LOST)
}
# Armed, after a backward that has raised: what changes nothing and what gives up the step is as in TABLE.
BROKEN: Mapping[str, Outcome] = {
    "loss.backward": _refused(FAILED, "ready only once", ""),
    **{call: _refused(ARMED, _UNFINISHED, "") for call, row in ROWS.items() if row[FAILED] is _UNUSABLE[FAILED]},
}
# Where one thread drives all ranks, what waits for the others cannot end, and says so at once.
_NOBODY = "cannot arrive: the thread that waits drives them too"
ALONE: Mapping[tuple[str, ReducerState], Outcome] = {
    ("reset", state): _refused(LOST, _NOBODY, "") for state in (IDLE, ARMED, LAUNCHED, FAILED)
}
# The same, in a backward that cannot wait.
DEFERRED: Mapping[tuple[str, ReducerState], Outcome] = {("loss.backward", ARMED): _fine(LAUNCHED, "")}


pytestmark = [
    pytest.mark.usefixtures("path"),
    pytest.mark.filterwarnings("ignore:rank .* got a gradient after this step's gradients:UserWarning"),
    pytest.mark.filterwarnings("ignore:rank .* gives up a step that is in flight:UserWarning"),
]


def test_the_table_is_complete() -> None:
    assert set(ROWS) == set(CALLS)
    assert all(set(row) == set(ReducerState) for row in ROWS.values())
    for (call, state), outcome in TABLE.items():
        assert (outcome.error is None) == (not outcome.match), (call, state)
        assert outcome.error is None or outcome.after is state, "what is refused changes nothing"


def _connect(group: LocalGroup, number: int, *, waits: bool = True) -> Callable[[], Communicator]:
    """`waits`: in backward, as on CPU, and not on CUDA."""

    def connect() -> Communicator:
        communicator = group.communicator(number)
        if not waits:
            communicator.waits_in_backward = lambda device: False  # type: ignore[method-assign]
        return communicator

    return connect


def _with_threads(
    call: str,
    state: ReducerState,
    outcome: Outcome,
    steps: int,
    *,
    waits: bool,
    views: bool = False,
    broken: bool = False,
) -> None:
    group = LocalGroup(RANKS, timeout_s=TIMEOUT_S)

    def case(communicator: LocalCommunicator) -> None:
        number = communicator.rank
        rank = Rank(number, _connect(group, number, waits=waits), {"gradient_as_bucket_view": views})
        for _ in drive(rank, call, state, outcome, steps, broken=broken):
            pass

    with group:
        group.run(case)


@pytest.mark.parametrize("state", ReducerState)
@pytest.mark.parametrize("call", ROWS)
def test_calls_of_ranks_that_have_a_thread_each(call: str, state: ReducerState) -> None:
    """With views after a step, whose end is waited for where it can be; before any step, where nothing may wait."""
    _with_threads(call, state, TABLE[call, state], 1, waits=state is not LAUNCHED, views=True)
    _with_threads(call, state, (TABLE | DEFERRED | FIRST)[call, state], 0, waits=False)  # type: ignore[operator]


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("call", ROWS)
def test_calls_after_a_backward_that_has_raised(call: str, waits: bool) -> None:
    _with_threads(call, ARMED, BROKEN.get(call, TABLE[call, ARMED]), 1, waits=waits, broken=True)


@pytest.mark.parametrize("state", ReducerState)
@pytest.mark.parametrize("call", ROWS)
def test_calls_of_ranks_that_one_thread_drives(call: str, state: ReducerState) -> None:
    outcome = (TABLE | DEFERRED | ALONE)[call, state]  # type: ignore[operator]
    options: dict[str, Any] = {"agreed": True, "find_unused_parameters": True}  # what one thread cannot find out
    with LocalGroup(RANKS, timeout_s=TIMEOUT_S, one_thread=True) as group:
        ranks = [Rank(number, _connect(group, number), options) for number in range(RANKS)]
        in_turn([drive(rank, call, state, outcome, alone=True) for rank in ranks])


@pytest.mark.parametrize(
    "state", [ARMED, FAILED, LOST, *(pytest.param(one, marks=pytest.mark.full) for one in (IDLE, CLOSED))]
)
def test_calls_of_ranks_that_are_processes(state: ReducerState, two: RankPool) -> None:
    two.run(state_cases.over_gloo, state, [(call, row[state]) for call, row in ROWS.items()], 1)


def _with_an_unused_parameter(rank: Rank) -> None:
    """Arms a step in which the last parameter is unused."""
    rank.loss = given(rank.parameters[:-1], [torch.full(shape, float(rank.number)) for shape in SHAPES[:-1]])
    rank.reducer.prepare_for_backward(rank.loss)


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("writes", [True, False])
def test_a_comm_hook_of_an_armed_step_with_an_unused_parameter(writes: bool, waits: bool) -> None:
    """The new buckets still know that it gets no gradient."""
    with LocalGroup(RANKS, timeout_s=TIMEOUT_S) as group:

        def case(communicator: LocalCommunicator) -> None:
            connect = _connect(group, communicator.rank, waits=waits)
            rank = Rank(communicator.rank, connect, {"find_unused_parameters": True})
            _with_an_unused_parameter(rank)
            CALLS["register_comm_hook"](rank)
            if writes:
                rank.reducer.leave_gradients_to_hook()
            assert rank.loss is not None
            rank.loss.backward()
            rank.reducer.finalize()
            assert rank.state is IDLE and rank.reducer.last_unused == (len(SHAPES) - 1,)
            wanted = rank.number if writes else sum(range(RANKS)) / RANKS
            for parameter in rank.parameters[:-1]:
                assert parameter.grad is not None and (parameter.grad == wanted).all()

        group.run(case)


@pytest.mark.parametrize("state", [LAUNCHED, FAILED, CLOSED])
def test_gradients_are_left_to_a_hook_only_between_steps(state: ReducerState) -> None:
    with LocalGroup(RANKS, timeout_s=TIMEOUT_S) as group:

        def case(communicator: LocalCommunicator) -> None:
            rank = Rank(communicator.rank, _connect(group, communicator.rank, waits=False))
            for _ in bring(rank, state, 1):
                pass
            if state is LAUNCHED:
                rank.reducer.leave_gradients_to_hook()
                check_averages(rank)
            else:
                with pytest.raises(FusedReduceError, match=_UNUSABLE[state].match):
                    rank.reducer.leave_gradients_to_hook()

        group.run(case)


def test_a_reducer_that_is_closed_with_a_step_in_flight_warns() -> None:
    with LocalGroup(RANKS, timeout_s=TIMEOUT_S) as group:

        def case(communicator: LocalCommunicator) -> None:
            rank = Rank(communicator.rank, _connect(group, communicator.rank, waits=False))
            for _ in bring(rank, LAUNCHED, 1):
                pass
            rank.reducer.close()

        with pytest.warns(UserWarning, match=r"close\(\) gives up a step .* call finalize\(\)"):
            group.run(case)


OPTIONS = ("find_unused_parameters", "static_graph", "exclusive")  # the last is the default
NEXT = {
    IDLE: "prepare_for_backward",
    ARMED: "loss.backward",
    LAUNCHED: "finalize",
    FAILED: "reset",
    LOST: "set_communicator",
}


class Calls(RuleBasedStateMachine):
    """Random calls, the same on both ranks; TABLE says what each does, and a model what the gradients are then.

    Gradient i is `own[rank] + i * times`: what the rank has accumulated, until a step makes it the mean.
    """

    @initialize(
        state=st.sampled_from(ReducerState),
        steps=st.integers(0, 1),
        waits=st.booleans(),
        option=st.sampled_from(OPTIONS),
    )
    def begin(self, state: ReducerState, steps: int, waits: bool, option: str) -> None:
        self.group = LocalGroup(RANKS, timeout_s=TIMEOUT_S)
        self.pool = ThreadPoolExecutor(RANKS)
        self.waits = waits and state is not LAUNCHED
        self.option = option
        self.ranks = [Rank(one, _connect(self.group, one, waits=self.waits), {option: True}) for one in range(RANKS)]
        self.is_new()
        self.each(lambda rank: [*bring(rank, state, steps)])
        self.state, self.steps = state, steps
        if state is LAUNCHED:
            self.accumulate()
        else:
            self.drop_gradients()

    def is_new(self) -> None:
        self.state, self.steps = IDLE, 0
        self.own: list[float] | None = None  # None: there are no gradients
        self.times = 0.0
        self.hooked = self.changed = False
        self.static = self.option == "static_graph"

    def each(self, call: Callable[[Rank], object]) -> None:
        """On both ranks at once."""
        for one in [self.pool.submit(call, rank) for rank in self.ranks]:
            one.result()

    def predict(self, call: str) -> Outcome:
        state, table = self.state, TABLE if self.waits else TABLE | DEFERRED  # type: ignore[operator]
        outcome: Outcome = table[call, state]
        completes = "completes the step" in outcome.does
        if completes and self.changed:
            return _refused(FAILED, CHANGED, "")
        if call == "register_comm_hook" and self.hooked and outcome.error is None:
            return _refused(IDLE if completes else state, "can only be called once", outcome.does, RuntimeError)
        if call == "set_bucket_size" and self.hooked and outcome.error is None:
            return _refused(IDLE, "set_bucket_size.. and a comm hook exclude", outcome.does, ValueError)
        if call == "set_static_graph" and state is not CLOSED:
            if self.static:
                return _fine(state, "")
            return outcome if self.steps else FIRST.get((call, state), outcome)
        return outcome

    @rule(call=st.sampled_from(sorted(CALLS)))
    def makes(self, call: str) -> None:
        before, wanted = self.state, self.predict(call)
        self.each(lambda rank: check(rank, call, before, wanted))
        self.state = wanted.after
        if wanted.error is None or wanted.after is not before:
            self.follow(call, before, wanted)

    @rule(times=st.integers(1, 3))
    def goes_on(self, times: int) -> None:
        """As a training loop does, and as the errors say."""
        for _ in range(times):
            if self.state is CLOSED:
                self.each(Rank.build)
                self.is_new()
            else:
                self.makes(NEXT[self.state])

    def follow(self, call: str, before: ReducerState, outcome: Outcome) -> None:
        """What has become of the gradients."""
        if "completes the step" in outcome.does:
            self.complete()
        if call == "zero_grad" and outcome.error is None and self.own is not None:
            self.own, self.times = [0.0] * RANKS, 0.0
        if call in ("loss.backward", "backward under no_sync") and outcome.error is None:
            self.accumulate()
            self.changed = before is LAUNCHED and outcome.after is LAUNCHED
            if outcome.does == "averages":
                self.complete()
        self.changed = self.changed and self.state is LAUNCHED
        self.hooked = self.hooked or (call == "register_comm_hook" and outcome.error is None)
        self.static = self.static or (call == "set_static_graph" and outcome.error is None)

    def accumulate(self) -> None:
        added = [gradient_value(rank.number, rank.value) for rank in self.ranks]
        self.own = [have + new for have, new in zip(self.own or [0.0] * RANKS, added, strict=True)]
        self.times += 1

    def complete(self) -> None:
        assert self.own is not None
        self.own = [sum(self.own) / RANKS] * RANKS
        self.steps += 1

    @precondition(lambda self: self.state is IDLE and self.steps > 1)
    @rule(lost=st.booleans())
    def fails(self, lost: bool) -> None:
        error = RuntimeError("Connection closed by peer") if lost and not self.hooked else MemoryError("out of memory")
        self.each(lambda rank: [*fail(rank, error)])
        self.state = FAILED
        self.drop_gradients()
        if isinstance(error, RuntimeError):
            self.each(lambda rank: check(rank, "reset", FAILED, TABLE["reset", LOST]))
            self.state = LOST

    @precondition(lambda self: self.state is not LAUNCHED)  # whose end looks at them
    @rule()
    def drop_gradients(self) -> None:
        self.each(state_cases.drop_gradients)
        self.own, self.times = None, 0.0

    @invariant()
    def gradients_are_right(self) -> None:
        for number, rank in enumerate(self.ranks):
            assert rank.state is self.state and rank.reducer.steps == self.steps
            for index, (parameter, shape) in enumerate(zip(rank.parameters, SHAPES, strict=True)):
                if self.own is None:
                    assert parameter.grad is None
                else:
                    wanted = torch.full(shape, self.own[number] + index * self.times)
                    assert parameter.grad is not None and torch.equal(parameter.grad, wanted), (parameter.grad, wanted)

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            self.each(lambda rank: rank.reducer.close())
            self.pool.shutdown()
            self.group.close()


TestCalls = Calls.TestCase
TestCalls.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)


def rendered() -> list[str]:
    """The rows of the table in docs/design.md."""
    rows = ["| call | " + " | ".join(state.name for state in ReducerState) + " |", "|---" * 7 + "|"]
    for call, row in ROWS.items():
        cells = []
        for state in ReducerState:
            outcome = row[state]
            cells.append(outcome.does + (f" → {outcome.after.name}" if outcome.after is not state else ""))
        rows.append(f"| `{call}` | " + " | ".join(cells) + " |")
    return rows


def test_the_table_is_that_of_the_documentation() -> None:
    text = (Path(__file__).parents[2] / "docs" / "design.md").read_text()
    section = text.partition("\n## States\n")[2].partition("\n## ")[0]
    assert [row for row in section.splitlines() if row.startswith("|")] == rendered(), "\n".join(rendered())
