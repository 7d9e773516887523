"""What test_states.py drives over a LocalGroup and over Gloo: every call of a Reducer in every state that it can have.

A drive is a generator, one per rank, which ends a turn wherever no rank may begin the next call before every rank has
made this one. So the ranks may be threads or processes, which run theirs through, or one thread may take them in turn.
"""

from __future__ import annotations

import datetime
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from support.leaf_steps import SHAPES, clear, given, leaves
from support.rig import boom

from fusedreduce import BucketCaps, CollectiveError, Reducer, Synchronous
from fusedreduce.buckets.grad_bucket import GradBucket
from fusedreduce.comm.protocol import Communicator
from fusedreduce.reducer.state import ReducerState

RANKS = 2
_TIMEOUT = datetime.timedelta(seconds=20)
CHANGED = "was written to after it had been packed"
CAPS = BucketCaps(first_bytes=64, cap_bytes=150)  # several buckets


@dataclass(frozen=True)
class Outcome:
    """What a call does.

    Args:
        after: the state that it leaves.
        error: what it raises; None: nothing.
        match: a pattern that the message has.
        does: in a few words, for docs/design.md.
    """

    after: ReducerState
    error: type[Exception] | None = None
    match: str = ""
    does: str = ""


@dataclass
class Rank:
    """One rank and its reducer.

    Args:
        number: this rank's.
        connect: makes a communicator of all ranks; each rank calls it as often.
        options: of the reducer.
    """

    number: int
    connect: Callable[[], Communicator]
    options: Mapping[str, Any] = field(default_factory=dict)
    loss: torch.Tensor | None = None  # what the armed step is of
    value: int = 0  # what the last forward's gradients are

    def __post_init__(self) -> None:
        self.build()

    def build(self) -> None:
        """Builds another reducer, of parameters of its own."""
        self.parameters = leaves(SHAPES)
        self.reducer = Reducer(self.parameters, self.connect(), caps=CAPS, **self.options)
        self.loss = None

    @property
    def state(self) -> ReducerState:
        return self.reducer.state

    def forward(self) -> torch.Tensor:
        """A loss whose gradients say which forward of which rank they are of."""
        self.value += 1
        value = gradient_value(self.number, self.value)
        return given(self.parameters, [torch.full(shape, value + index) for index, shape in enumerate(SHAPES)])


def gradient_value(number: int, forward: int) -> float:
    """Even, so that sums and means of two are exact."""
    return float(2 * ((7 * forward + 3) % 50) + 64 * number)


def drop_gradients(rank: Rank) -> None:
    clear(rank.parameters)


# The calls


def _prepare_for_backward(rank: Rank) -> None:
    loss = rank.forward()
    rank.reducer.prepare_for_backward(loss)
    rank.loss = loss


def _backward(rank: Rank) -> None:
    """Of the armed loss, or of a forward that the reducer knows nothing of."""
    armed = rank.loss is not None and rank.state is ReducerState.ARMED
    loss, rank.loss = rank.loss if armed else rank.forward(), None
    assert loss is not None
    loss.backward()


def _no_sync(rank: Rank) -> None:
    with rank.reducer.no_sync():
        loss = rank.forward()
        rank.reducer.prepare_for_backward(loss)
        loss.backward()


def _record_trace(rank: Rank) -> None:
    with tempfile.TemporaryDirectory() as folder, rank.reducer.record_trace(folder):
        pass


def _require_manual_finalization(rank: Rank) -> None:
    """There and back: what follows is predicted without it."""
    rank.reducer.require_manual_finalization(True)
    rank.reducer.require_manual_finalization(False)


def _register_comm_hook(rank: Rank) -> None:
    reducer = rank.reducer

    def hook(state: object, bucket: GradBucket) -> Any:
        pending = reducer.communicator.all_reduce(bucket.buffer().div_(RANKS))
        return pending.future().then(lambda done: done.value()[0])

    reducer.register_comm_hook(None, hook)


CALLS: dict[str, Callable[[Rank], object]] = {
    "prepare_for_forward": lambda rank: rank.reducer.prepare_for_forward(),
    "prepare_for_backward": _prepare_for_backward,
    "loss.backward": _backward,
    "backward under no_sync": _no_sync,
    "finalize": lambda rank: rank.reducer.finalize(),
    "check_finalized": lambda rank: rank.reducer.check_finalized(),
    "finalize_backward": lambda rank: rank.reducer.finalize_backward(),
    "require_manual_finalization": _require_manual_finalization,
    "zero_grad": lambda rank: rank.reducer.zero_grad(),
    "flush": lambda rank: rank.reducer.flush(),
    "state_dict": lambda rank: rank.reducer.state_dict(),
    "load_state_dict": lambda rank: rank.reducer.load_state_dict({}),
    "set_sync_mode": lambda rank: rank.reducer.set_sync_mode(Synchronous()),
    "set_bucket_size": lambda rank: rank.reducer.set_bucket_size(100),
    "register_comm_hook": _register_comm_hook,
    "set_static_graph": lambda rank: rank.reducer.set_static_graph(),
    "record_trace": _record_trace,
    "reset": lambda rank: rank.reducer.reset(),
    "set_communicator": lambda rank: rank.reducer.set_communicator(rank.connect()),
    "close": lambda rank: rank.reducer.close(),
}


# After these the next forward compares the ranks, which one thread that drives them all cannot.
AGREES_ANEW = ("set_sync_mode", "set_bucket_size", "set_communicator", "reset")


# Drives


def step(rank: Rank) -> Iterator[None]:
    """One step, whose averages must be exactly right."""
    drop_gradients(rank)
    _prepare_for_backward(rank)
    yield
    _backward(rank)
    yield
    rank.reducer.finalize()
    yield
    check_averages(rank)


def check_averages(rank: Rank, forward: int | None = None) -> None:
    """The gradients are the means of a forward's, or of the latest."""
    forward = rank.value if forward is None else forward
    mean = sum(gradient_value(number, forward) for number in range(RANKS)) / RANKS
    for index, parameter in enumerate(rank.parameters):
        wanted = torch.full(SHAPES[index], mean + index)
        assert parameter.grad is not None and torch.equal(parameter.grad, wanted), (index, parameter.grad, wanted)


def fail(rank: Rank, error: Exception) -> Iterator[None]:
    """A step whose second bucket, or only one, cannot be started, on every rank."""
    communicator: Any = rank.reducer.communicator
    issue, issued = communicator.all_reduce, 0

    def all_reduce(*arguments: Any) -> Any:
        nonlocal issued
        issued += 1
        if issued == min(2, len(rank.reducer.plan)):
            raise error
        return issue(*arguments)

    communicator.all_reduce = all_reduce
    drop_gradients(rank)
    _prepare_for_backward(rank)
    yield
    try:
        _backward(rank)
    except (MemoryError, RuntimeError):
        pass
    else:
        raise AssertionError("the fault was not met")
    yield
    del communicator.all_reduce


def bring(rank: Rank, state: ReducerState, steps: int) -> Iterator[None]:
    """Brings a new reducer into `state`, after some steps."""
    for _ in range(steps):
        yield from step(rank)
    drop_gradients(rank)
    if state in (ReducerState.ARMED, ReducerState.LAUNCHED):
        _prepare_for_backward(rank)
        yield
    if state is ReducerState.LAUNCHED:
        _backward(rank)
    elif state is ReducerState.FAILED:
        yield from fail(rank, MemoryError("out of memory"))
    elif state is ReducerState.LOST:
        yield from fail(rank, RuntimeError("Connection closed by peer"))
        try:
            rank.reducer.reset()
        except RuntimeError:
            pass
        else:
            raise AssertionError("the group should be lost")
    elif state is ReducerState.CLOSED:
        rank.reducer.close()
    assert rank.state is state, f"{rank.state} in place of {state}"
    yield


def bring_broken(rank: Rank) -> Iterator[None]:
    """Leaves the reducer armed, after a backward in which a hook of the user's has raised."""
    yield from bring(rank, ReducerState.ARMED, 1)
    handle = rank.parameters[1].register_hook(boom)
    try:
        _backward(rank)
    except ZeroDivisionError:
        pass
    else:
        raise AssertionError("the hook was not called")
    handle.remove()
    yield


def outcome_of(rank: Rank, call: str) -> tuple[Exception | None, ReducerState]:
    """What a call raises, and the state that it leaves."""
    error: Exception | None = None
    try:
        CALLS[call](rank)
    except Exception as raised:
        error = raised
    return error, rank.state


def check(rank: Rank, call: str, before: ReducerState, wanted: Outcome) -> None:
    """Makes the call, which must do what was predicted."""
    what = f"rank {rank.number}: {call} in {before}"
    error, after = outcome_of(rank, call)
    if wanted.error is None:
        assert error is None, f"{what} raised {error!r}"
    else:
        assert type(error) is wanted.error, f"{what} raised {error!r} in place of {wanted.error}"
        assert re.search(wanted.match, str(error)), f"{what} says {error}, without {wanted.match!r}"
    assert after is wanted.after, f"{what} leaves {after}, not {wanted.after}"


def _wants_reset(rank: Rank) -> bool:
    try:
        rank.reducer.check_finalized()
    except RuntimeError as error:
        return "call reset() on every rank" in str(error)
    return False


def recover(rank: Rank, *, alone: bool) -> Iterator[None]:
    """What the errors say, until a step is right; `alone`: one thread drives all ranks, and nothing may be compared."""
    if rank.state is ReducerState.LAUNCHED:
        text = ""
        try:
            rank.reducer.finalize()
        except RuntimeError as error:
            text = str(error)
        assert not text or CHANGED in text, text
        yield
    if _wants_reset(rank) and not alone:
        rank.reducer.reset()
    elif rank.state is ReducerState.LOST and not alone:
        rank.reducer.set_communicator(rank.connect())
    elif rank.state in (ReducerState.CLOSED, ReducerState.FAILED, ReducerState.LOST):
        rank.reducer.close()
        rank.build()
    yield
    for _ in range(2):
        yield from step(rank)


def drive(
    rank: Rank,
    call: str,
    before: ReducerState,
    wanted: Outcome,
    steps: int = 1,
    *,
    alone: bool = False,
    broken: bool = False,
) -> Iterator[None]:
    """Brings a reducer into a state, makes the call, checks what it does, and that steps can follow."""
    yield from bring_broken(rank) if broken else bring(rank, before, steps)
    forwards = rank.value
    if call == "zero_grad" and before is not ReducerState.LAUNCHED:
        for parameter in rank.parameters:
            parameter.grad = torch.ones_like(parameter)
    check(rank, call, before, wanted)
    if call == "zero_grad":
        assert not any(one.grad is None or one.grad.any() for one in rank.parameters)
    elif call != "backward under no_sync" and "completes the step" in wanted.does:
        check_averages(rank, forwards)
    yield
    if alone and wanted.error is None and call in AGREES_ANEW and wanted.after is not ReducerState.CLOSED:
        error, _ = outcome_of(rank, "prepare_for_backward")
        assert isinstance(error, CollectiveError) and "comparing model and settings" in str(error), error
        yield
        rank.reducer.close()
    yield from recover(rank, alone=alone)
    rank.reducer.close()


def in_turn(drives: Sequence[Iterator[None]]) -> None:
    """Runs the drives of all ranks in this thread."""
    for _ in zip(*drives, strict=True):
        pass


# Over Gloo


def over_gloo(rank: int, world: int, before: ReducerState, column: Sequence[tuple[str, Outcome]], steps: int) -> None:
    """Every call in one state."""
    from fusedreduce.comm.process_group import ProcessGroupCommunicator

    groups: list[Any] = [torch.distributed.new_group(timeout=_TIMEOUT)]

    def connect() -> Communicator:
        if ProcessGroupCommunicator(groups[-1]).lost:
            groups.append(torch.distributed.new_group(timeout=_TIMEOUT))
        return ProcessGroupCommunicator(groups[-1])

    for call, wanted in column:
        for _ in drive(Rank(rank, connect), call, before, wanted, steps):
            pass
    for group in groups:
        torch.distributed.destroy_process_group(group)
