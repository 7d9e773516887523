"""Phases: the collectives of buckets that are exchanged in several phases, in one order on every rank.

    one level    all-to-all: each rank gets every rank's contribution to its shard      issued as a bucket is launched
                 all-gather: every rank gets every shard's sum                          issued here
    two levels   the same among the ranks of a node, and in between across nodes; see two_levels.py

Between two phases a rank adds up what it has received. Where the host has to wait for a phase, the moment at which the
next one may be issued follows a clock, and differs between ranks. There each phase has a communicator of its own, on
which only the buckets' order counts. On CPU those that may be issued without waiting are, as further buckets are
launched, and the rest at the end of the step. Nothing waits for ever there: of what some rank has not issued yet, take
the least by (phase, bucket). Only ranks at the end of their step wait, and for the phase before the least that they
have not issued, which is smaller: all have issued it.

With NCCL the host waits for no phase, and the order follows from that of the buckets alone: with a bucket's first phase
go the second of the bucket before, the third of the one before that, and so on; with the last bucket's also the rest.
Example, two phases: all-to-all 0, all-to-all 1, all-gather 0, all-to-all 2, all-gather 1, all-gather 2. So phases among
the same ranks share a communicator. A side stream waits for the phase before and adds up, while backward goes on; it
waits for what comes earlier in that order only, so nothing waits for ever.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from typing import Literal, NamedTuple, TypeAlias

import torch

from ..comm.group import Group
from ..comm.nodes import node_of, peers_across
from ..comm.protocol import Communicator, Pending
from ..comm.waiting import collective_failed, naming_failure, wait_for
from .step_feature import LateSums, StepFeature
from .streams import AsideStreams
from .wire_table import WireTable

# Of a phase: all ranks, those of this rank's node, or of each node the one with this rank's number within its node.
Among: TypeAlias = Literal["all", "node", "across"]
_WHERE: dict[Among, str] = {"all": "", "node": " within the node", "across": " across nodes"}
_USERS: tuple[Among, int] = ("all", 0)  # the ranks and the phase that are served by the communicator of the reducer
ONE_LEVEL: tuple[Among, ...] = ("all", "all")
_MOST_PHASES = 4
# Communicators whose owner was dropped without `close`: at an arbitrary place and in any thread, maybe a backend's own,
# where nothing may be closed. The next `open` closes them.
_shelved: deque[Communicator] = deque()


def two_levels(nodes: int) -> tuple[Among, ...]:
    """Among which ranks the phases of an exchange in two levels are.

    Args:
        nodes: how many; two gather each other's contribution, in one phase.
    """
    return ("node", "across", "node") if nodes == 2 else ("node", "across", "across", "node")


class Phase(NamedTuple):
    """One collective of an exchange.

    Attributes:
        name: of the collective, for errors.
        among: the ranks that take part.
        begin: called when the phase before has ended, with their communicator; returns what is in flight.
    """

    name: str
    among: Among
    begin: Callable[[Communicator], Pending]


class Exchange:
    """One bucket's exchange: a `Pending` of all its phases, once `Phases` has issued the last one.

    Args:
        phases: in order, two or more.
        label: names the bucket in errors.
        device: of the bucket.
    """

    def __init__(self, phases: Sequence[Phase], label: str, device: torch.device) -> None:
        self.phases = phases
        self.label = label
        self.device = device
        self.issued: list[Pending] = []
        self._told: list[Callable[[], None]] = []
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None

    @property
    def next_phase(self) -> Phase:
        """The phase that is to be issued."""
        return self.phases[len(self.issued)]

    def text(self, place: int) -> str:
        """Names a phase, and the bucket, in errors."""
        phase = self.phases[place]
        return f"the {phase.name}{_WHERE[phase.among]} of {self.label}"

    def begin_next(self, communicator: Communicator) -> None:
        """Issues the next phase, when the one before has been waited for."""
        self.issued.append(self.next_phase.begin(communicator))
        if self.complete:
            for done in self._told:
                self.issued[-1].notify(done)
            self._chain_future()

    def fail(self, error: Exception) -> None:
        """Has the future raise `error`: the last phase will not be issued."""
        if self._future is not None:
            self._future.set_exception(error)  # type: ignore[arg-type]  # torch's annotation is wrong

    @property
    def complete(self) -> bool:
        """Whether the last phase has been issued."""
        return len(self.issued) == len(self.phases)

    def notify(self, done: Callable[[], None]) -> None:
        """Tells `done` when the last phase ends, also if that is not yet issued."""
        if self.complete:
            self.issued[-1].notify(done)
        else:
            self._told.append(done)

    def ready(self) -> bool:
        """Whether the last phase has been issued, and has ended."""
        return self.complete and self.issued[-1].ready()

    def future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Completes with the last phase; may be asked for once, before that is issued or after."""
        assert self._future is None
        devices: list[int | str | torch.device] | None = [self.device] if self.device.type == "cuda" else None
        self._future = torch.futures.Future(devices=devices)
        if self.complete:
            self._chain_future()
        return self._future

    def wait(self) -> None:
        """Waits for the last phase, which must have been issued; errors name it."""
        try:
            self._last().wait()
        except RuntimeError as error:
            raise RuntimeError(f"{self.text(-1)}: {error}") from error

    def _chain_future(self) -> None:
        if self._future is not None:
            self.issued[-1].future().add_done_callback(functools.partial(_complete, self._future, self.text(-1)))

    def _last(self) -> Pending:
        assert self.complete, f"{self.text(len(self.issued))} is not issued"
        return self.issued[-1]


class Phases(StepFeature):
    """Issues phases. One per reducer; called under its lock.

    Args:
        group: the ranks.
        device: of the gradients.

    Attributes:
        due: the exchanges with a phase that is to be issued.
        per_node: consecutive ranks of a node among which encoded contributions are added up first; 1: one level. Known
            from the first `open` on.
        issued: phases after a bucket's first, issued among these ranks.
        issued_together: those of them that were issued on the communicator of the group itself.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._made: dict[tuple[Among, int], Communicator] = {}  # by the ranks and, where each has its own, the phase
        self._is_stale = self._settled = False
        self._queues: tuple[deque[Exchange], ...] = tuple(deque() for _ in range(_MOST_PHASES))  # by the phase
        self._aside = AsideStreams()
        self.due: list[Exchange] = []
        self.per_node = 1
        self.issued = self.issued_together = 0
        weakref.finalize(self, _shelved.extend, self._made.values()).atexit = False
        weakref.finalize(self, self._aside.join).atexit = False

    @property
    def follow_at_once(self) -> bool:
        """Whether phases follow those of the next buckets, without a wait of the host."""
        return self._device.type == "cuda" and self._group.communicator.waits_in_backward(self._device)

    def is_open(self, wires: WireTable) -> bool:
        """Whether `open` has nothing to do for these wires."""
        return self._settled and not self._is_stale and all(one in self._made for one in self._needed(wires))

    def open(self, wires: WireTable, ranks_per_node: int | None) -> bool:
        """Makes the communicators of phases that need one of their own; every rank calls it.

        Args:
            wires: of the parameters.
            ranks_per_node: see ReduceConfig.

        Returns:
            Whether `per_node` has changed, so that the buckets have to be built anew.

        Raises:
            UnsupportedWireError: the backend has no all-to-all; on every rank.
            ValueError: nodes of so many ranks are not possible; on every rank.
            CollectiveError: a rank did not come within the timeout.
        """
        with suppress(IndexError):  # ranks may be threads, which empty it together
            while True:
                _shelved.popleft().close()
        if self._is_stale:
            self.close()
        self._group.communicator.check_exchange(self._device)
        before = self.per_node
        with naming_failure("the groups of phases could not be made", self._group.communicator):
            if not self._settled:
                self.per_node, self._settled = self._nodes(wires, ranks_per_node), True
            for among, place in self._needed(wires):
                if (among, place) not in self._made:
                    self._made[among, place] = self._split(among)
        return self.per_node != before

    # As a StepFeature, which counts what it issues itself

    @property
    def in_use(self) -> bool:
        """Whether a bucket may be exchanged in several phases."""
        return self._settled

    def behind(self) -> int:
        """Issues the rest of the phases, where no host waits for any."""
        if self.follow_at_once:
            self.issue_all()
        return 0

    def late(self, buckets: LateSums) -> Iterable[object]:
        """Issues the rest of the phases."""
        self.issue_all()
        return ()

    def dropped(self) -> None:
        """Forgets what is in flight. The next `open` makes other communicators.

        Those in use stay until then: peers may still wait for what is in flight on them.
        """
        self._forget()
        self._is_stale = bool(self._made)

    def close(self) -> None:
        """Forgets what is in flight, and closes the communicators of phases."""
        self._forget()
        self._is_stale = False
        while self._made:
            self._made.popitem()[1].close()

    def new_group(self) -> None:
        """Follows other ranks."""
        self.close()
        self._settled, self.per_node = False, 1
        self.issued = self.issued_together = 0

    def start(self, phases: Sequence[Phase], label: str, device: torch.device) -> Exchange:
        """Issues the first phase of a bucket, and of the buckets before it what may be issued without waiting.

        Args:
            phases: see `Exchange`.
            label: names the bucket in errors.
            device: of the bucket.

        Returns:
            The exchange in flight.

        Raises:
            RuntimeError: the first phase could not be issued.
            CollectiveError: see `issue_all`.
        """
        exchange = Exchange(phases, label, device)
        exchange.begin_next(self._communicator_of(exchange))
        self.due.append(exchange)
        self._queues[1].append(exchange)
        self._issue_ready()
        return exchange

    def issue_all(self) -> None:
        """Issues every phase that is due; waits for those before (on CUDA a stream does, see `AsideStreams`).

        An exchange that fails stays due, and so do those behind it, whose phases peers may issue after its own.

        Raises:
            CollectiveError: a phase failed, or the next could not be issued; names it and its bucket.
        """
        for queue in self._queues:
            while queue:
                self._issue_next(queue)
                self._issue_ready()

    def fail(self, error: Exception) -> None:
        """Has the futures of all that are due raise `error`, with which `issue_all` has failed."""
        for exchange in self.due:
            exchange.fail(error)
        self._forget()

    def _issue_ready(self) -> None:
        for queue in self._queues:
            while queue and self._may_follow(queue):
                self._issue_next(queue)

    def _may_follow(self, queue: deque[Exchange]) -> bool:
        """Whether the next phase of its first exchange may be issued now, in the middle of backward."""
        if self.follow_at_once:
            return len(queue) > 1
        return self._device.type == "cpu" and queue[0].issued[-1].ready()

    def _issue_next(self, queue: deque[Exchange]) -> None:
        exchange = queue[0]
        with self._aside.on(exchange.device) if self.follow_at_once else nullcontext():
            wait_for(exchange.issued[-1], lambda: exchange.text(len(exchange.issued) - 1), self._group.communicator)
            communicator = self._communicator_of(exchange)
            try:
                exchange.begin_next(communicator)
            except RuntimeError as error:
                what = f"{exchange.text(len(exchange.issued))} could not be started"
                raise collective_failed(what, self._group.communicator, error) from error
        queue.popleft()
        self.issued += 1
        self.issued_together += communicator is self._group.communicator
        if exchange.complete:
            self.due.remove(exchange)
        else:
            self._queues[len(exchange.issued)].append(exchange)

    def _communicator_of(self, exchange: Exchange) -> Communicator:
        among, place = exchange.next_phase.among, 0 if self.follow_at_once else len(exchange.issued)
        return self._group.communicator if (among, place) == _USERS else self._made[among, place]

    def _forget(self) -> None:
        self.due.clear()
        for queue in self._queues:
            queue.clear()
        self._aside.join()

    def _nodes(self, wires: WireTable, asked: int | None) -> int:
        """Among how many ranks of a node encoded contributions are added up first."""
        ranks = self._group.communicator.size
        share_a_thread = not self._group.communicator.waits_in_backward(self._device)
        if asked is not None and asked > 1 and (ranks % asked or share_a_thread):
            why = "the ranks share a thread, which cannot wait between phases" if share_a_thread else "nodes differ"
            raise ValueError(f"ranks_per_node={asked} is not possible among {ranks} ranks: {why}. Leave it out")
        if not wires.encoded or share_a_thread:
            return 1
        found = self._group.communicator.ranks_per_node(self._device) if asked is None else asked
        return found if found < ranks and ranks % found == 0 else 1

    def _needed(self, wires: WireTable) -> list[tuple[Among, int]]:
        """By ranks and phase the communicators that have to be made, in this order."""
        exchanges: list[tuple[Among, ...]] = []
        if self.per_node > 1:
            exchanges.append(two_levels(self._group.communicator.size // self.per_node))
        if self.per_node == 1 or wires.accumulation == "fp32":
            exchanges.append(ONE_LEVEL)
        places = [(among, 0 if self.follow_at_once else place) for one in exchanges for place, among in enumerate(one)]
        return [one for one in places if one != _USERS]

    def _split(self, among: Among) -> Communicator:
        """A communicator of its own for these ranks."""
        whole, per_node = self._group.communicator, self.per_node
        ranks = None
        if among != "all":
            own = node_of(whole.rank, per_node)
            ranks = own if among == "node" else peers_across(whole.rank, per_node, whole.size)
        return whole.apart([self._device] if self.follow_at_once else (), ranks)


def _complete(
    future: torch.futures.Future[list[torch.Tensor]], what: str, last: torch.futures.Future[list[torch.Tensor]]
) -> None:
    """Called when the last phase has ended, maybe by a backend's thread: references no group."""
    try:
        value = last.value()
    except RuntimeError as error:
        future.set_exception(RuntimeError(f"{what}: {error}"))  # type: ignore[arg-type]  # torch's annotation is wrong
    else:
        future.set_result(value)
