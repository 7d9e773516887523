"""Meeting: one collective of peers that are threads of this process, from the first arrival to the verdict.

A peer arrives, which never blocks, and gets a LocalPending. The last to arrive performs the collective in its own
thread, outside of every lock, and then tells the others. There is one verdict per meeting, for latecomers too: done,
or failed with a text that is the same on every peer.

Who holds what: the channel holds a meeting until all peers have come; then only their LocalPendings do. On CUDA the
meeting keeps a peer's tensors until that peer has ordered its stream behind the collective.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ...errors import CollectiveError
from ..agreement import ranks_text
from ..protocol import ReduceOp

_logger = logging.getLogger(__name__)


class State(enum.Enum):
    """Where a meeting is."""

    GATHERING = "not all peers have come"
    WORKING = "all have come, the last one performs the collective"
    DONE = "the result is there (on CUDA: behind events)"
    FAILED = "every peer raises the same error"


@dataclass(frozen=True)
class Arrival:
    """What one peer brings.

    Attributes:
        kind, op, root: the collective and its arguments.
        tensors: what is read and written, in the collective's own order.
        payload: of collectives between hosts.
        events: of the peer's current stream on arrival; none on CPU.
        problem: why this peer's arguments cannot be used; it fails the meeting for all.
        due_s: until when the others must have come, time.monotonic().
        thread: which one brought it.
    """

    kind: str
    tensors: tuple[torch.Tensor, ...] = ()
    op: ReduceOp | None = None
    root: int | None = None
    payload: bytes | str = b""
    events: tuple[torch.cuda.Event, ...] = ()
    problem: str = ""
    due_s: float = 0.0
    thread: int = 0

    @property
    def signature(self) -> tuple[object, ...]:
        """What must be equal on all peers."""
        tensors = tuple((one.dtype, one.layout, one.numel(), one.device.type) for one in self.tensors)
        shapes = tuple(one.shape for one in self.tensors if one.layout is not torch.strided)
        return self.kind, self.op, self.root, tensors, shapes

    def __str__(self) -> str:
        arguments = [f"{name} {value}" for name, value in (("op", self.op), ("root", self.root)) if value is not None]
        tensors = [
            f"{str(one.dtype).removeprefix('torch.')}"
            f"[{one.numel() if one.layout is torch.strided else ', '.join(map(str, one.shape))}]"
            f"{'' if one.layout is torch.strided else ' sparse'} on {one.device.type}"
            for one in self.tensors
        ]
        return f"{self.kind} {', '.join([*arguments, *tensors])}".strip()


@dataclass
class Outcome:
    """What performing a collective left behind.

    Attributes:
        events: one per CUDA device that took part, behind its work there.
        streams: the streams of that work.
        results: by rank, where the result is not in the tensors that were brought.
        gathered: every peer's payload, in rank order.
    """

    events: tuple[torch.cuda.Event, ...] = ()
    streams: tuple[torch.cuda.Stream, ...] = ()
    results: Sequence[torch.Tensor] | None = None
    gathered: tuple[bytes | str, ...] = ()


@dataclass(eq=False)
class Meeting:
    """One collective; `lock` guards every field. `name` says which one it is, for messages."""

    name: str
    size: int
    lock: threading.RLock
    timeout_s: float
    state: State = State.GATHERING
    arrivals: dict[int, Arrival] = field(default_factory=dict)
    came: set[int] = field(default_factory=set)
    outcome: Outcome | None = None
    problem: str = ""
    cause: BaseException | None = None
    aborted: bool = False

    def __post_init__(self) -> None:
        self.changed = threading.Condition(self.lock)
        self._told: list[Callable[[], None]] = []

    def arrive(self, rank: int, arrival: Arrival) -> bool:
        """Takes a peer's arrival; whether it must `perform` now. The lock is held."""
        if rank in self.came:  # of an exchange with a key: a place in the sequence is there once
            self.verdict()
            raise CollectiveError(f"{self.name}: rank {rank} has come before; every exchange needs a key of its own")
        self.came.add(rank)
        if self.state is State.FAILED:
            return False
        self.arrivals[rank] = arrival
        if len(self.arrivals) < self.size:
            return False
        self.state = State.WORKING
        return True

    def perform(self, work: Callable[[Sequence[Arrival]], Outcome]) -> None:
        """All have come: checks that they want the same and does it. The lock is not held."""
        try:
            arrivals = [self.arrivals[rank] for rank in range(self.size)]
            problem = disagreement(arrivals)
            if problem:
                self.finish(None, f"{self.name}: {problem}")
            else:
                self.finish(work(arrivals))
        except BaseException as error:
            self.finish(None, f"{self.name} failed: {type(error).__name__}: {error}", error)
            if not isinstance(error, Exception):
                raise

    def fail(self, problem: str, cause: BaseException | None = None) -> bool:
        """Fails what is not being performed yet; whether it did. The lock is held, and `tell` called after it."""
        if self.state is not State.GATHERING:
            return False
        self._settle(State.FAILED, problem, cause)
        self.arrivals.clear()
        return True

    def abort(self, problem: str, cause: BaseException | None) -> bool:
        """As `fail`, for all collectives at once."""
        self.aborted = self.fail(problem, cause)
        return self.aborted

    def finish(self, outcome: Outcome | None, problem: str = "", cause: BaseException | None = None) -> None:
        """It has been performed, or could not be."""
        with self.lock:
            if self.state is State.WORKING:
                self.outcome = outcome
                self._settle(State.DONE if outcome is not None else State.FAILED, problem, cause)
            if outcome is None or not outcome.events:
                self.arrivals.clear()
        self.tell()

    def end_at_last(self, problem: str) -> None:
        """Whoever performs it is through: where nothing came of that, it has failed."""
        if not self.ended:
            self.finish(None, f"{self.name}: {problem}")

    def tell(self) -> None:
        """Calls what was to be called at the end. The lock is not held."""
        with self.lock:
            told, self._told = self._told, []
        for done in told:
            try:
                done()
            except Exception:
                _logger.exception("a callback at the end of %s failed", self.name)

    def notify(self, done: Callable[[], None]) -> None:
        """Has `done()` called at the end, by whoever brings it about; at once if it has come."""
        with self.lock:
            if not self.ended:
                self._told.append(done)
                return
        done()

    @property
    def ended(self) -> bool:
        """Whether the verdict is there."""
        return self.state in (State.DONE, State.FAILED)

    def missing(self) -> list[int]:
        """Who has not come."""
        return [rank for rank in range(self.size) if rank not in self.came]

    def verdict(self) -> Outcome | None:
        """The outcome, or the error; None if there is none yet."""
        if self.state is State.FAILED:
            raise CollectiveError(self.problem) from self.cause
        return self.outcome

    def time_out(self) -> bool:
        """A peer's time is over: fails for all, unless the last one has come. The lock is held, `tell` called after it.

        What is being performed writes into every peer's tensor: its end is waited for.
        """
        what = "; ".join(_by_text(self.arrivals))
        return self.fail(
            f"{self.name}: {ranks_text(self.missing())} did not come within {self.timeout_s:g} s ({what}). A peer has "
            "died, hangs, or issues other collectives than its peers"
        )

    def _settle(self, state: State, problem: str, cause: BaseException | None) -> None:
        self.state, self.problem, self.cause = state, problem, cause
        self.changed.notify_all()

    def __del__(self) -> None:
        # Peers that never waited: their memory must not be used again before the device is through with it.
        streams = () if self.outcome is None else self.outcome.streams
        if streams:
            with contextlib.suppress(RuntimeError):
                for arrival in self.arrivals.values():
                    for tensor in arrival.tensors:
                        for stream in streams:
                            tensor.record_stream(stream)


class LocalPending:
    """A collective of a LocalGroup, as one peer holds it (comm.protocol.Pending)."""

    def __init__(
        self, meeting: Meeting, rank: int, arrival: Arrival, alone: Callable[[], str], told: Callable[[], None]
    ) -> None:
        self._meeting = meeting
        self._rank = rank
        self._tensors = arrival.tensors
        self._due_s = arrival.due_s
        self._alone = alone
        self._told = told

    def notify(self, done: Callable[[], None]) -> None:
        """Has `done()` called once when the collective ends, or at once if it has, by the thread that ended it."""
        self._meeting.notify(done)

    def ready(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        meeting = self._meeting
        return meeting.ended or (meeting.state is State.GATHERING and time.monotonic() >= self._due_s)

    def future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Completed at the end, by the thread that brought it about; nobody need wait."""
        devices: list[int | str | torch.device] = [*dict.fromkeys(one.device for one in self._tensors if one.is_cuda)]
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(devices=devices or None)
        self._meeting.notify(lambda: self._complete(future))
        return future

    def gathered(self) -> tuple[bytes | str, ...]:
        """Every peer's payload, in rank order; blocks."""
        return self._outcome().gathered

    def wait(self) -> None:
        """Blocks until all peers have come; on CUDA the current stream is then ordered behind the collective.

        Raises:
            CollectiveError: they did not come in time, want different things, or one gave up.
        """
        outcome = self._outcome()
        for device in dict.fromkeys(one.device for one in self._tensors if one.is_cuda):
            current = torch.cuda.current_stream(device)
            for event in outcome.events:
                current.wait_event(event)
            if outcome.results is not None:
                record_use(outcome.results[self._rank], current)
        if outcome.events:
            with self._meeting.lock:
                self._meeting.arrivals.pop(self._rank, None)

    def _outcome(self) -> Outcome:
        meeting = self._meeting
        settled = False
        with meeting.lock:
            if not meeting.ended:
                stuck = self._alone()
                if stuck:
                    settled = meeting.fail(f"{meeting.name}: {stuck}")
            while not meeting.ended:
                left_s = self._due_s - time.monotonic()
                if meeting.state is State.WORKING:
                    meeting.changed.wait()
                elif left_s > 0:
                    meeting.changed.wait(left_s)
                else:
                    settled = meeting.time_out()
        if settled:
            meeting.tell()
        if meeting.aborted:
            self._told()
        outcome = meeting.verdict()
        assert outcome is not None
        return outcome

    def _complete(self, future: torch.futures.Future[list[torch.Tensor]]) -> None:
        try:
            outcome = self._meeting.verdict()
        except CollectiveError as error:
            future.set_exception(error)  # type: ignore[arg-type]  # torch's annotation is wrong
            return
        assert outcome is not None
        result = list(self._tensors[-1:]) if outcome.results is None else [outcome.results[self._rank]]
        with contextlib.ExitStack() as streams:
            for stream in outcome.streams:  # the future's own events are recorded there
                streams.enter_context(torch.cuda.stream(stream))
            future.set_result(result)


def disagreement(arrivals: Sequence[Arrival]) -> str:
    """Why these cannot be one collective, naming every rank; "" if they can."""
    problems = [f"rank {rank}: {one.problem}" for rank, one in enumerate(arrivals) if one.problem]
    if problems:
        return f"not every peer brought what can be used: {'; '.join(problems)}"
    if len({one.signature for one in arrivals}) == 1:
        return "" if arrivals[0].kind == "broadcast" else _overlap(arrivals)
    held = "; ".join(_by_text(dict(enumerate(arrivals))))
    return f"peers issued different collectives, so nothing was done: {held}"


def _overlap(arrivals: Sequence[Arrival]) -> str:
    """Which two ranks brought the same memory, where a result would be lost; "" if none did."""
    ranges = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, rank)
        for rank, one in enumerate(arrivals)
        for tensor in one.tensors
        if tensor.layout is torch.strided and tensor.numel()
    )
    for (_, end, rank), (begin, _, other) in zip(ranges, ranges[1:], strict=False):
        if begin < end:
            who = f"{ranks_text([rank, other])} brought" if rank != other else f"{ranks_text([rank])} twice brought"
            return f"{who} overlapping memory to {arrivals[0]}: give every rank a tensor of its own"
    return ""


def record_use(tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
    """`tensor` came from another stream's memory and is used on `stream` from now on."""
    for one in (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,):
        one.record_stream(stream)


def _by_text(arrivals: Mapping[int, Arrival]) -> list[str]:
    held: dict[str, list[int]] = {}
    for rank in sorted(arrivals):
        held.setdefault(str(arrivals[rank]), []).append(rank)
    return [f"{text} from {ranks_text(ranks)}" for text, ranks in held.items()]
