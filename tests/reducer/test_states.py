"""Every call of a Reducer in every state that it can have: what it raises, which state it leaves, and how to go on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from support import state_cases
from support.ranks import RankPool
from support.state_cases import CALLS, RANKS, Outcome, Rank, drive, in_turn

from fusedreduce import FusedReduceError
from fusedreduce.comm.local.group import LocalCommunicator, LocalGroup
from fusedreduce.comm.protocol import Communicator
from fusedreduce.kernels import dispatch
from fusedreduce.reducer.step_cycle import ReducerState

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
    FAILED: _refused(FAILED, _UNFINISHED, "says reset"),
    LOST: _refused(LOST, _NO_GROUP, "says set_communicator"),
    CLOSED: _refused(CLOSED, _CLOSED, "says closed"),
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
        LAUNCHED: _fine(LAUNCHED, "changes what is in flight: the end raises"),
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
        ARMED: _refused(ARMED, r"a step is armed.*after its backward, or after reset\(\)", "says backward"),
        LAUNCHED: _fine(IDLE, "completes the step, switches"),
        **_UNUSABLE,
    },
    "register_comm_hook": {
        IDLE: _fine(IDLE, "registers"),
        ARMED: _fine(ARMED, "registers"),
        LAUNCHED: _fine(IDLE, "completes the step, registers"),
        FAILED: _fine(FAILED, "registers"),
        LOST: _fine(LOST, "registers"),
        CLOSED: _UNUSABLE[CLOSED],
    },
    "set_static_graph": {
        **{
            state: _refused(state, _TOO_LATE, "says too late", RuntimeError)
            for state in (IDLE, ARMED, LAUNCHED, FAILED, LOST)
        },
        CLOSED: _UNUSABLE[CLOSED],
    },
    "record_trace": {
        **{state: _fine(state, "records from the next step") for state in (IDLE, ARMED, LAUNCHED, FAILED, LOST)},
        CLOSED: _UNUSABLE[CLOSED],
    },
    "reset": {
        IDLE: _fine(IDLE, "compares the ranks"),
        ARMED: _fine(IDLE, "abandons the step"),
        LAUNCHED: _fine(IDLE, "abandons the step"),
        FAILED: _fine(IDLE, "abandons the step"),
        LOST: _UNUSABLE[LOST],
        CLOSED: _UNUSABLE[CLOSED],
    },
    "set_communicator": {
        IDLE: _fine(IDLE, "switches"),
        ARMED: _fine(IDLE, "abandons the step, switches"),
        LAUNCHED: _fine(IDLE, "abandons the step, switches"),
        FAILED: _fine(IDLE, "abandons the step, switches"),
        LOST: _fine(IDLE, "switches"),
        CLOSED: _UNUSABLE[CLOSED],
    },
    "close": {
        **{state: _fine(CLOSED, "abandons the step, closes") for state in (ARMED, LAUNCHED)},
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
# Where one thread drives all ranks, what waits for the others cannot end, and says so at once.
_NOBODY = "cannot arrive: the thread that waits drives them too"
ALONE: Mapping[tuple[str, ReducerState], Outcome] = {
    ("reset", state): _refused(LOST, _NOBODY, "") for state in (IDLE, ARMED, LAUNCHED, FAILED)
}
# The same, in a backward that cannot wait.
DEFERRED: Mapping[tuple[str, ReducerState], Outcome] = {("loss.backward", ARMED): _fine(LAUNCHED, "")}


@pytest.fixture(autouse=True)
def _torch_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_triton", lambda: None)


pytestmark = pytest.mark.filterwarnings("ignore:rank .* got a gradient after this step's gradients:UserWarning")


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


def _with_threads(call: str, state: ReducerState, outcome: Outcome, steps: int, *, waits: bool) -> None:
    group = LocalGroup(RANKS, timeout_s=TIMEOUT_S)

    def case(communicator: LocalCommunicator) -> None:
        number = communicator.rank
        for _ in drive(Rank(number, _connect(group, number, waits=waits)), call, state, outcome, steps):
            pass

    with group:
        group.run(case)


@pytest.mark.parametrize("state", ReducerState)
@pytest.mark.parametrize("call", ROWS)
def test_calls_of_ranks_that_have_a_thread_each(call: str, state: ReducerState) -> None:
    pair = call, state
    if state is not LAUNCHED:
        _with_threads(call, state, TABLE[pair], 1, waits=True)
    _with_threads(call, state, (TABLE | DEFERRED)[pair], 1, waits=False)  # type: ignore[operator]
    _with_threads(call, state, (TABLE | DEFERRED | FIRST)[pair], 0, waits=False)  # type: ignore[operator]


@pytest.mark.parametrize("state", ReducerState)
@pytest.mark.parametrize("call", ROWS)
def test_calls_of_ranks_that_one_thread_drives(call: str, state: ReducerState) -> None:
    outcome = (TABLE | DEFERRED | ALONE)[call, state]  # type: ignore[operator]
    options: dict[str, Any] = {"agreed": True, "find_unused_parameters": True}  # what one thread cannot find out
    with LocalGroup(RANKS, timeout_s=TIMEOUT_S, one_thread=True) as group:
        ranks = [Rank(number, _connect(group, number), options) for number in range(RANKS)]
        in_turn([drive(rank, call, state, outcome, alone=True) for rank in ranks])


@pytest.mark.parametrize("state", [IDLE, ARMED, FAILED, LOST, CLOSED])
def test_calls_of_ranks_that_are_processes(state: ReducerState, two: RankPool) -> None:
    two.run(state_cases.over_gloo, state, [(call, row[state]) for call, row in ROWS.items()], 1)
