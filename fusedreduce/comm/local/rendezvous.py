"""Rendezvous: one collective of ranks that are threads of this process, from the first arrival to the outcome.

A rank arrives, which never blocks, and gets a LocalPending. The last to arrive performs the collective in its own
thread, outside of every lock, and then wakes the others. A rendezvous ends once, for late ranks too: done, or failed
with a text that is the same on every rank.

Ownership: the channel references a rendezvous until all ranks have arrived; afterwards only their LocalPendings do. On
CUDA a rendezvous keeps a rank's tensors until that rank has ordered its stream behind the collective.
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
    """The state of a rendezvous."""

    GATHERING = "not all ranks have arrived"
    WORKING = "all have arrived, and the last one performs the collective"
    DONE = "the result is complete (on CUDA: behind events)"
    FAILED = "every rank raises the same error"


@dataclass(frozen=True)
class Arrival:
    """What one rank brings to a collective.

    Attributes:
        kind, op, root: the collective and its arguments.
        tensors: what is read and written, in the collective's own order.
        payload: of a collective of bytes or texts.
        events: of the rank's current streams on arrival; none on CPU.
        problem: why this rank's arguments cannot be used, which fails the collective for all; empty if they can.
        due_s: until when the others must have arrived, time.monotonic().
        thread: that issued it.
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
        """What must be equal on all ranks."""
        tensors = tuple((tensor.dtype, tensor.layout, tensor.numel(), tensor.device.type) for tensor in self.tensors)
        shapes = tuple(tensor.shape for tensor in self.tensors if tensor.layout is not torch.strided)
        return self.kind, self.op, self.root, tensors, shapes

    def __str__(self) -> str:
        arguments = [f"{name} {value}" for name, value in (("op", self.op), ("root", self.root)) if value is not None]
        tensors = [
            f"{str(tensor.dtype).removeprefix('torch.')}"
            f"[{tensor.numel() if tensor.layout is torch.strided else ', '.join(map(str, tensor.shape))}]"
            f"{'' if tensor.layout is torch.strided else ' sparse'} on {tensor.device.type}"
            for tensor in self.tensors
        ]
        return f"{self.kind} {', '.join([*arguments, *tensors])}".strip()


@dataclass
class Outcome:
    """The result of a collective.

    Attributes:
        events: one per CUDA device that took part, recorded behind the collective's work.
        streams: the streams of that work.
        results: by rank, where the result is not in the tensors that the ranks brought.
        gathered: every rank's payload, in rank order.
    """

    events: tuple[torch.cuda.Event, ...] = ()
    streams: tuple[torch.cuda.Stream, ...] = ()
    results: Sequence[torch.Tensor] | None = None
    gathered: tuple[bytes | str, ...] = ()


@dataclass(eq=False)
class Rendezvous:
    """One collective; `lock` guards every field.

    Attributes:
        name: which collective it is, for messages.
        ranks: those that take part.
        arrivals: by rank, while they are needed.
        arrived: ranks that have arrived, also after it has failed.
        aborted: it has failed because its epoch ended.
    """

    name: str
    ranks: Sequence[int]
    lock: threading.RLock
    timeout_s: float
    state: State = State.GATHERING
    arrivals: dict[int, Arrival] = field(default_factory=dict)
    arrived: set[int] = field(default_factory=set)
    outcome: Outcome | None = None
    problem: str = ""
    cause: BaseException | None = None
    aborted: bool = False

    def __post_init__(self) -> None:
        self.changed = threading.Condition(self.lock)
        self._callbacks: list[Callable[[], None]] = []

    def add(self, rank: int, arrival: Arrival) -> bool:
        """Adds a rank's arrival; returns whether the caller must `perform` the collective. The lock must be held."""
        if rank in self.arrived:  # of an exchange by key: a place in the sequence is used once
            self.outcome_or_error()
            raise CollectiveError(
                f"{self.name}: rank {rank} has used this key before; every exchange needs a new key, the same on all"
            )
        self.arrived.add(rank)
        if self.state is State.FAILED:
            return False
        self.arrivals[rank] = arrival
        if len(self.arrivals) < len(self.ranks):
            return False
        self.state = State.WORKING
        return True

    def perform(self, work: Callable[[Sequence[Arrival]], Outcome]) -> None:
        """Checks that all ranks issued the same collective, and performs it. The lock must not be held."""
        try:
            arrivals = {rank: self.arrivals[rank] for rank in self.ranks}
            problem = disagreement(arrivals)
            if problem:
                self._complete(None, f"{self.name}: {problem}")
            else:
                self._complete(work([*arrivals.values()]))
        except BaseException as error:
            self._complete(None, f"{self.name} failed: {type(error).__name__}: {error}", error)
            if not isinstance(error, Exception):
                raise

    def fail(self, problem: str, cause: BaseException | None = None) -> bool:
        """Fails the collective unless it is being performed; returns whether it did.

        The lock must be held, and the caller calls `run_callbacks` once it has released it.
        """
        if self.state is not State.GATHERING:
            return False
        self._set_state(State.FAILED, problem, cause)
        self.arrivals.clear()
        return True

    def abort(self, problem: str, cause: BaseException | None) -> bool:
        """As `fail`, at the end of the epoch."""
        self.aborted = self.fail(problem, cause)
        return self.aborted

    def _complete(self, outcome: Outcome | None, problem: str = "", cause: BaseException | None = None) -> None:
        """Records that it has been performed, or could not be."""
        with self.lock:
            if self.state is State.WORKING:
                self.outcome = outcome
                self._set_state(State.DONE if outcome is not None else State.FAILED, problem, cause)
            if outcome is None or not outcome.events:
                self.arrivals.clear()
        self.run_callbacks()

    def fail_if_unfinished(self, problem: str) -> None:
        """Fails it where the rank that performs it has left without an outcome."""
        if not self.ended:
            self._complete(None, f"{self.name}: {problem}")

    def run_callbacks(self) -> None:
        """Calls what `notify` was given. The lock must not be held."""
        with self.lock:
            callbacks, self._callbacks = self._callbacks, []
        for done in callbacks:
            try:
                done()
            except Exception:
                _logger.exception("a callback at the end of %s failed", self.name)

    def notify(self, done: Callable[[], None]) -> None:
        """Has `done()` called at the end, by the thread that ends it; immediately if it has ended."""
        with self.lock:
            if not self.ended:
                self._callbacks.append(done)
                return
        done()

    @property
    def ended(self) -> bool:
        """Whether it is done or has failed."""
        return self.state in (State.DONE, State.FAILED)

    def missing(self) -> list[int]:
        """The ranks that have not arrived."""
        return [rank for rank in self.ranks if rank not in self.arrived]

    def outcome_or_error(self) -> Outcome | None:
        """Returns the outcome, or None before the end; raises CollectiveError if it has failed."""
        if self.state is State.FAILED:
            raise CollectiveError(self.problem) from self.cause
        return self.outcome

    def time_out(self) -> bool:
        """Fails as `fail` does, because a rank's timeout is over.

        A collective that is being performed goes on, since it writes into every rank's tensor.
        """
        what = "; ".join(_by_text(self.arrivals))
        return self.fail(
            f"{self.name}: {ranks_text(self.missing())} did not issue it within {self.timeout_s:g} s (issued: {what}). "
            "A rank has died, hangs, or issues other collectives than its peers"
        )

    def _set_state(self, state: State, problem: str, cause: BaseException | None) -> None:
        self.state, self.problem, self.cause = state, problem, cause
        self.changed.notify_all()

    def __del__(self) -> None:
        # The memory of ranks that never waited must not be reused before the device has finished with it.
        streams = () if self.outcome is None else self.outcome.streams
        if streams:
            with contextlib.suppress(RuntimeError):
                for arrival in self.arrivals.values():
                    for tensor in arrival.tensors:
                        for stream in streams:
                            tensor.record_stream(stream)


class LocalPending:
    """A collective of a LocalGroup in flight, on one rank (comm.protocol.Pending).

    Args:
        rendezvous: the collective.
        rank: whose handle this is.
        arrival: what that rank brought.
        deadlock: why waiting in this thread would never end; "" if it may end.
        acknowledge: called when this rank learns that the epoch has ended.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        rank: int,
        arrival: Arrival,
        deadlock: Callable[[], str],
        acknowledge: Callable[[], None],
    ) -> None:
        self._rendezvous = rendezvous
        self._rank = rank
        self._place = rendezvous.ranks.index(rank)
        self._tensors = arrival.tensors
        self._due_s = arrival.due_s
        self._deadlock = deadlock
        self._acknowledge = acknowledge

    def notify(self, done: Callable[[], None]) -> None:
        """Has `done()` called once when the collective ends, by the thread that ends it; immediately if it has."""
        self._rendezvous.notify(done)

    def ready(self) -> bool:
        """Returns whether `wait` would return, or raise, without blocking."""
        rendezvous = self._rendezvous
        return rendezvous.ended or (rendezvous.state is State.GATHERING and time.monotonic() >= self._due_s)

    def future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future that the thread that ends the collective completes; nothing needs to wait for it."""
        devices: list[int | str | torch.device] = [
            *dict.fromkeys(tensor.device for tensor in self._tensors if tensor.is_cuda)
        ]
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(devices=devices or None)
        self._rendezvous.notify(lambda: self._complete(future))
        return future

    def gathered(self) -> tuple[bytes | str, ...]:
        """Every rank's payload, in rank order; blocks, and raises as `wait` does."""
        return self._wait_for_outcome().gathered

    def wait(self) -> None:
        """Blocks until all ranks have issued the collective; on CUDA the current stream is then ordered behind it.

        Raises:
            CollectiveError: a rank did not issue it in time, ranks issued different collectives, or one gave up.
        """
        outcome = self._wait_for_outcome()
        for device in dict.fromkeys(tensor.device for tensor in self._tensors if tensor.is_cuda):
            current = torch.cuda.current_stream(device)
            for event in outcome.events:
                current.wait_event(event)
            if outcome.results is not None:
                record_use(outcome.results[self._place], current)
        if outcome.events:
            with self._rendezvous.lock:
                self._rendezvous.arrivals.pop(self._rank, None)

    def _wait_for_outcome(self) -> Outcome:
        rendezvous = self._rendezvous
        failed = False
        with rendezvous.lock:
            if not rendezvous.ended:
                deadlock = self._deadlock()
                if deadlock:
                    failed = rendezvous.fail(f"{rendezvous.name}: {deadlock}")
            while not rendezvous.ended:
                left_s = self._due_s - time.monotonic()
                if rendezvous.state is State.WORKING:
                    rendezvous.changed.wait()
                elif left_s > 0:
                    rendezvous.changed.wait(left_s)
                else:
                    failed = rendezvous.time_out()
        if failed:
            rendezvous.run_callbacks()
        if rendezvous.aborted:
            self._acknowledge()
        outcome = rendezvous.outcome_or_error()
        assert outcome is not None
        return outcome

    def _complete(self, future: torch.futures.Future[list[torch.Tensor]]) -> None:
        try:
            outcome = self._rendezvous.outcome_or_error()
        except CollectiveError as error:
            future.set_exception(error)  # type: ignore[arg-type]  # torch's annotation is wrong
            return
        assert outcome is not None
        result = list(self._tensors[-1:]) if outcome.results is None else [outcome.results[self._place]]
        with contextlib.ExitStack() as streams:
            for stream in outcome.streams:  # the future's own events are recorded there
                streams.enter_context(torch.cuda.stream(stream))
            future.set_result(result)


def disagreement(arrivals: Mapping[int, Arrival]) -> str:
    """Why these arrivals, by rank, cannot be one collective, naming every rank; "" if they can."""
    problems = [f"rank {rank}: {arrival.problem}" for rank, arrival in arrivals.items() if arrival.problem]
    if problems:
        return f"ranks gave arguments that cannot be used, so nothing was done: {'; '.join(problems)}"
    if len({arrival.signature for arrival in arrivals.values()}) == 1:
        return "" if next(iter(arrivals.values())).kind == "broadcast" else _overlap(arrivals)
    return f"ranks issued different collectives, so nothing was done: {'; '.join(_by_text(arrivals))}"


def _overlap(arrivals: Mapping[int, Arrival]) -> str:
    """Which two ranks gave overlapping memory, where one result would overwrite another; "" if none did."""
    ranges = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, rank)
        for place, (rank, arrival) in enumerate(arrivals.items())
        for tensor in (arrival.tensors[1:] if _in_place(arrival, place) else arrival.tensors)
        if tensor.layout is torch.strided and tensor.numel()
    )
    for (_, end, rank), (begin, _, other) in zip(ranges, ranges[1:], strict=False):
        if begin < end:
            who = ranks_text([rank, other]) if rank != other else f"{ranks_text([rank])} twice"
            return f"overlapping memory was given by {who} to {arrivals[rank]}: give every rank a tensor of its own"
    return ""


def _in_place(arrival: Arrival, place: int) -> bool:
    """Whether what the rank at `place` gathers is its own part of the result already."""
    if arrival.kind != "all_gather":
        return False
    tensor, gathered = arrival.tensors
    return tensor.data_ptr() == gathered.data_ptr() + place * tensor.nbytes


def record_use(tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
    """Tells the allocator that `tensor`, of another stream's memory, is used on `stream`; sparse ones too."""
    for part in (tensor._indices(), tensor._values()) if tensor.is_sparse else (tensor,):
        part.record_stream(stream)


def _by_text(arrivals: Mapping[int, Arrival]) -> list[str]:
    by_text: dict[str, list[int]] = {}
    for rank in sorted(arrivals):
        by_text.setdefault(str(arrivals[rank]), []).append(rank)
    return [f"{text} from {ranks_text(ranks)}" for text, ranks in by_text.items()]
