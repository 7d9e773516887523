"""Room: where the peers of a node meet, operation by operation, and where the node meets the others.

The n-th calls of all peers are one operation. Within a node nothing blocks until `settle`: the last local peer to call
judges what all said and, if there is no other node, carries it out. With other nodes it posts what its peers want, and
whoever waits first drives: reads the verdicts in order, and starts the collectives, so that all nodes start the same
ones in the same order without a thread of their own.

Who holds what: the room holds an operation until all local peers have called it; then only their handles do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from ..comm.store_exchange import StoreExchange
from .config import CollectiveConfig
from .errors import PeerLost
from .node_collectives import Wide
from .transport import Carried, Carrier, Place
from .verdicts import Description, Verdict, decode_verdict, descriptions_of, encode, failed, judge, lost

# How often a node that waits for a peer of its own looks whether the others have given up.
_LOOK_EVERY_S = 0.02


@dataclass
class Operation:
    """One call of every peer; the room's lock guards every field but the results.

    Attributes:
        until_s: when the first local peer's patience is over, time.monotonic().
        came: local peers that have called it, `wants` what they said and `tensors` what they brought.
        events: of their streams on CUDA.
        deciding: somebody has begun to find the verdict.
        known: the verdict as text, where posting gave it.
        settled: the verdict has been acted upon.
        carried: the data on its way.
    """

    number: int
    until_s: float
    came: set[int] = field(default_factory=set)
    wants: dict[int, Description] = field(default_factory=dict)
    tensors: dict[int, torch.Tensor] = field(default_factory=dict)
    events: dict[int, torch.cuda.Event] = field(default_factory=dict)
    deciding: bool = False
    known: str | None = None
    verdict: Verdict | None = None
    settled: bool = False
    carried: Carried | None = None
    failing: threading.Lock = field(default_factory=threading.Lock)

    @property
    def name(self) -> str:
        """For messages."""
        return f"operation {self.number}"


class Room:
    """A session's peers on this node.

    Args:
        config: what all agreed on.
        place: of this node.
        devices: by peer.
        exchange: with the other nodes; None where there are none.
        wide: collectives among nodes, the same.
    """

    def __init__(
        self,
        config: CollectiveConfig,
        place: Place,
        devices: Mapping[int, torch.device],
        exchange: StoreExchange | None = None,
        wide: Wide | None = None,
    ) -> None:
        self.config = config
        self.place = place
        self.closed: Verdict | None = None  # why there can be no more operations; set once
        self.at_end: list[Callable[[], None]] = []  # when all peers have finished
        self._exchange = exchange
        self._carrier = Carrier(config, place, devices, wide)
        self._changed = threading.Condition()
        self._issuing = threading.Lock()
        self._operations: dict[int, Operation] = {}
        self._called = dict.fromkeys(place.peers, 0)
        self._next = 0  # the first operation that no driver has settled, with other nodes
        self._driving = False
        self._ending = False
        self._finished: int | None = None

    def enter(self, description: Description, tensor: torch.Tensor | None) -> Operation:
        """A peer's next call; blocks for nobody.

        Raises:
            CollectiveSessionError: the room is closed.
        """
        peer = description.peer
        event = None
        if tensor is not None and tensor.is_cuda:
            event = torch.cuda.current_stream(tensor.device).record_event()
        with self._changed:
            if self.closed is not None:
                raise self.closed.raised()
            number = self._called[peer]
            self._called[peer] = number + 1
            operation = self._operations.get(number)
            if operation is None:
                operation = Operation(number, time.monotonic() + self.config.timeout_s)
                self._operations[number] = operation
            operation.came.add(peer)
            if operation.verdict is None:
                operation.wants[peer] = description
                if tensor is not None:
                    operation.tensors[peer] = tensor
                if event is not None:
                    operation.events[peer] = event
            kinds = {one.kind for one in operation.wants.values()}
            all_came = len(operation.came) == self.place.local
            decides = not operation.deciding and (all_came or (len(kinds) > 1 and "finish" in kinds))
            operation.deciding = operation.deciding or decides
            self._forget(operation)
            self._changed.notify_all()
        if decides:
            self._decide(operation, all_came)
        return operation

    def settle(self, operation: Operation, block: bool) -> bool:
        """Brings an operation to its verdict and its collective under way; whether it is.

        Args:
            operation: one that a peer here has called.
            block: wait for others, until the timeout is over.
        """
        if self._exchange is None:
            self._settle_here(operation, block)
        else:
            self._settle_among_nodes(operation, block)
        return operation.settled

    def result(self, operation: Operation, peer: int) -> torch.Tensor | None:
        """What a settled operation left for a peer, ordered before its current stream; shared: not to be written to.

        Raises:
            CollectiveSessionError: the verdict is an error, or a node died since.
        """
        assert operation.settled and operation.verdict is not None
        if operation.verdict.error is not None:
            raise operation.verdict.raised()
        assert operation.carried is not None
        try:
            return self._carrier.result(operation.carried, peer)
        except RuntimeError as error:
            with operation.failing:  # all local peers say the same
                self._break(operation, error)
            raise operation.verdict.raised() from error

    def ready(self, operation: Operation, peer: int) -> bool:
        """Whether `result` of a settled operation would come without waiting."""
        if operation.verdict is None or operation.verdict.error is not None:
            return True
        return operation.carried is None or operation.carried.ready(peer)

    def end(self, why: Verdict) -> None:
        """Closes the room for all: operations under way fail with `why`, on other nodes too, and so do later ones."""
        why = dataclasses.replace(why, closes=True)
        with self._changed:
            if self._ending or self.closed is not None:
                return
            self._ending = True
            first, upto = self._next, min(self._called.values())
            self._changed.notify_all()
        try:
            if self._exchange is not None:
                # Where the store is gone, so are the others.
                with contextlib.suppress(RuntimeError, ValueError):
                    for number in range(first, upto + 1):
                        self._exchange.propose(number, encode(why))
                    self._start_what_was_agreed(upto)
        finally:
            self._give_up(why)

    def _start_what_was_agreed(self, upto: int) -> None:
        """Before the room closes: other nodes would wait in those collectives for this one."""
        assert self._exchange is not None
        with self._changed:
            if not self._changed.wait_for(lambda: not self._driving, self.config.timeout_s):
                return
            self._driving = True
        try:
            self._drive(upto, block=False)
            for number in range(self._next, upto + 1):
                self._exchange.acknowledge(number)
        finally:
            with self._changed:
                self._driving = False

    def finish(self) -> None:
        """All peers have finished, on every node, and nobody waits for anything. Every local peer calls it."""
        gone = failed("RegisterNotFirstOperation", "the session is finished: register again")
        with self._issuing:
            if self.closed is None:
                self._finish(gone)

    def _finish(self, gone: Verdict) -> None:
        if self._exchange is not None and self._finished is not None and self.place.node == 0:
            # Node 0 may be the store's host.
            self._exchange.wait_until_acknowledged(self._finished, time.monotonic() + min(self.config.timeout_s, 10.0))
        self._carrier.close()
        self._close(gone, gone)
        self._exchange = None  # sessions may be kept, but not the store's port
        for call in self.at_end:
            call()

    def _decide(self, operation: Operation, all_came: bool) -> None:
        """What all peers of this node want, or those that came to the end of it, goes to the verdict."""
        wants = list(operation.wants.values())
        if self._exchange is None:
            self._conclude(operation, judge(wants, operation.name))
            return
        try:
            if all_came:
                finishing = all(one.kind == "finish" for one in wants)
                operation.known = self._exchange.post(
                    operation.number, encode(wants), finishing, lambda held: self._judged(held, operation)
                )
            else:
                operation.known = self._exchange.propose(operation.number, encode(judge(wants, operation.name)))
        except RuntimeError as error:
            self._break(operation, error)
        with self._changed:
            self._changed.notify_all()

    def _judged(self, held: Mapping[int, str], operation: Operation) -> str:
        return encode(judge(descriptions_of(held), operation.name))

    def _settle_here(self, operation: Operation, block: bool) -> None:
        verdict = None
        with self._changed:
            while not operation.settled:
                left_s = operation.until_s - time.monotonic()
                if left_s <= 0 and operation.verdict is None:  # whoever was to decide may have been interrupted
                    operation.deciding = True
                    verdict = lost(
                        list(operation.wants.values()), self.place.peers, operation.name, self.config.timeout_s
                    )
                    break
                elif block:
                    self._changed.wait(left_s if left_s > 0 else 1.0)
                else:
                    return
        if verdict is not None:
            self._conclude(operation, verdict)

    def _settle_among_nodes(self, operation: Operation, block: bool) -> None:
        while not operation.settled:
            with self._changed:
                if operation.settled:
                    return
                if self._driving or self._ending:
                    if not block:
                        return
                    self._changed.wait(1.0)
                    continue
                self._driving = True
            try:
                self._drive(operation.number, block)
            except RuntimeError as error:
                self._break(operation, error)
            except ValueError as error:
                self._break(operation, RuntimeError(f"another program uses the session's keys: {error}"))
            finally:
                with self._changed:
                    self._driving = False
                    self._changed.notify_all()
            if not block:
                return

    def _drive(self, upto: int, block: bool) -> None:
        """Settles operations in order, `upto` included; as far as that goes without blocking."""
        assert self._exchange is not None
        while self._next <= upto and self.closed is None:
            number = self._next
            operation = self._operations.get(number)
            if operation is None:  # `end` may look one further than anybody has called
                return
            if not self._posted(operation, block):
                return
            text = operation.known or self._exchange.verdict(number)
            if text is None and block:
                text = self._exchange.wait_for_verdict(number, operation.until_s)
            if text is None and time.monotonic() >= operation.until_s:
                text = self._exchange.propose(number, encode(self._lost(operation)))
            if text is None:
                return
            verdict = decode_verdict(text)
            self._next += 1
            if verdict.error is None and next(iter(operation.wants.values())).kind == "finish":
                self._finished = number
            try:
                self._exchange.acknowledge(number)
            finally:
                self._conclude(operation, verdict)
            if verdict.closes:
                self._give_up(verdict)

    def _posted(self, operation: Operation, block: bool) -> bool:
        """Waits for this node's own peers, as long as the first has patience; False: not yet."""
        assert self._exchange is not None
        with self._changed:
            while not operation.deciding and not self._ending:
                left_s = operation.until_s - time.monotonic()
                if left_s <= 0:
                    operation.deciding = True
                    return True
                # A verdict may come from other nodes, whose patience is over or who were reset.
                if self._exchange.verdict(operation.number) is not None:
                    operation.deciding = True
                    return True
                if not block:
                    return False
                self._changed.wait(min(left_s, _LOOK_EVERY_S))
            return True

    def _lost(self, operation: Operation) -> Verdict:
        assert self._exchange is not None
        with self._changed:
            present = {one.peer: one for one in operation.wants.values()}
        present |= {one.peer: one for one in descriptions_of(self._exchange.present(operation.number))}
        return lost(list(present.values()), range(self.place.total), operation.name, self.config.timeout_s)

    def _conclude(self, operation: Operation, verdict: Verdict) -> None:
        """Acts upon a verdict, once."""
        with self._changed:
            if operation.verdict is not None:
                return
            operation.verdict = verdict
        try:
            if verdict.error is None:
                with self._issuing, torch.no_grad():
                    operation.carried = self._carrier.start(
                        operation.wants, operation.tensors, operation.events, verdict
                    )
        except BaseException as error:
            text = f"{operation.name} failed: {type(error).__name__}: {error}"
            operation.verdict = failed("CollectiveSessionError", text)
            if self._exchange is not None:
                self._break(operation, error)
            if not isinstance(error, Exception):
                raise
        finally:
            with self._changed:
                if operation.verdict.error is not None:
                    operation.tensors.clear()
                operation.settled = True
                self._forget(operation)
                self._changed.notify_all()

    def _break(self, operation: Operation, error: BaseException) -> None:
        """A node died, or the store: nothing can be agreed on any more."""
        text = (
            f"{operation.name}: a node died, left or did not come ({type(error).__name__}: {error}). This session "
            "cannot be used any more: reset() it and register again"
        )
        if self._exchange is not None:
            text = self._exchange.first_failure(text)
        verdict = failed(PeerLost, text)
        if operation.verdict is None or operation.verdict.error is None:
            operation.verdict = verdict
        self._give_up(verdict)

    def _give_up(self, why: Verdict) -> None:
        self._close(why, _afterwards(why))

    def _close(self, why: Verdict, later: Verdict) -> None:
        with self._changed:
            if self.closed is None:
                self.closed = later
            for operation in list(self._operations.values()):
                if not operation.settled and (operation.verdict is None or operation.verdict.error is not None):
                    operation.verdict = operation.verdict or why
                    operation.settled = operation.deciding = True
                    operation.tensors.clear()
            self._operations.clear()
            self._changed.notify_all()

    def _forget(self, operation: Operation) -> None:
        if operation.settled and len(operation.came) == self.place.local:
            self._operations.pop(operation.number, None)


def reset_verdict(peer: int) -> Verdict:
    """For those who wait in an operation when `peer` resets the session."""
    return failed("SessionReset", f"peer {peer} called reset(): the session is forgotten, register again")


def _afterwards(why: Verdict) -> Verdict:
    """For calls that come later than what closed the room."""
    assert why.error is not None
    return failed("RegisterNotFirstOperation", why.error[1]) if why.error[0] == "SessionReset" else why
