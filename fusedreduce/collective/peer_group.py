"""PeerGroup: a session's peers on one node, and their operations.

The n-th calls of all peers are one operation. Within a node nothing blocks before `try_start`: the last local peer to
call compares all calls and, if there is no other node, starts the operation. With other nodes it posts its peers' calls
to the store, and the first peer that waits reads the verdicts in order and starts the collectives, so that all nodes
start the same ones in the same order without a background thread.

Ownership: the peer group references an operation until all local peers have called it; afterwards only their handles
do.
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
from .node_collectives import NodeCollectives
from .transport import NodeLayout, Transfer, Transport
from .verdicts import Description, Verdict, decode_verdict, descriptions_of, encode, failed, judge, lost

# While a node waits for one of its own peers, how often it looks for a verdict of the other nodes.
_POLL_S = 0.02


@dataclass
class Operation:
    """One call of every peer; the peer group's lock guards every field but the results.

    Attributes:
        number: its place among the calls of each peer.
        until_s: when the timeout of the first local peer is over, time.monotonic().
        called: local peers that have called it.
        calls: their descriptions of the call, by peer.
        tensors: what they passed, by peer.
        events: on CUDA, of their streams at the call.
        deciding: a thread has begun to find the verdict.
        known: the verdict as text, where posting the calls returned it.
        verdict: whether and why the operation fails.
        started: the verdict has been acted upon.
        transfer: its data in flight.
        failing: held while a failure of the transfer is recorded.
    """

    number: int
    until_s: float
    called: set[int] = field(default_factory=set)
    calls: dict[int, Description] = field(default_factory=dict)
    tensors: dict[int, torch.Tensor] = field(default_factory=dict)
    events: dict[int, torch.cuda.Event] = field(default_factory=dict)
    deciding: bool = False
    known: str | None = None
    verdict: Verdict | None = None
    started: bool = False
    transfer: Transfer | None = None
    failing: threading.Lock = field(default_factory=threading.Lock)

    @property
    def name(self) -> str:
        """Names the operation in messages."""
        return f"operation {self.number}"


class PeerGroup:
    """A session's peers on this node.

    Args:
        config: the options that all peers agreed on.
        layout: of this node.
        devices: by peer.
        exchange: with the other nodes; None where there are none.
        node_collectives: collectives among nodes; None where there are none.

    Attributes:
        closed: why there can be no more operations; set once.
        at_end: called when all peers have finished.
    """

    def __init__(
        self,
        config: CollectiveConfig,
        layout: NodeLayout,
        devices: Mapping[int, torch.device],
        exchange: StoreExchange | None = None,
        node_collectives: NodeCollectives | None = None,
    ) -> None:
        self.config = config
        self.layout = layout
        self.closed: Verdict | None = None
        self.at_end: list[Callable[[], None]] = []
        self._exchange = exchange
        self._transport = Transport(config, layout, devices, node_collectives)
        self._changed = threading.Condition()
        self._issuing = threading.Lock()
        self._operations: dict[int, Operation] = {}
        self._calls_made = dict.fromkeys(layout.peers, 0)
        self._next = 0  # with other nodes: the first operation that has not been started
        self._starting = False
        self._ending = False
        self._finished: int | None = None

    def add_call(self, description: Description, tensor: torch.Tensor | None) -> Operation:
        """Adds a peer's next call; does not block.

        Args:
            description: of the call.
            tensor: a flat copy of what the peer passed, which may be overwritten; None if it passed none.

        Returns:
            The operation that the call belongs to.

        Raises:
            CollectiveSessionError: the session is over.
        """
        peer = description.peer
        event = None
        if tensor is not None and tensor.is_cuda:
            event = torch.cuda.current_stream(tensor.device).record_event()
        with self._changed:
            if self.closed is not None:
                raise self.closed.raised()
            number = self._calls_made[peer]
            self._calls_made[peer] = number + 1
            operation = self._operations.get(number)
            if operation is None:
                operation = Operation(number, time.monotonic() + self.config.timeout_s)
                self._operations[number] = operation
            operation.called.add(peer)
            if operation.verdict is None:
                operation.calls[peer] = description
                if tensor is not None:
                    operation.tensors[peer] = tensor
                if event is not None:
                    operation.events[peer] = event
            kinds = {one.kind for one in operation.calls.values()}
            all_called = len(operation.called) == self.layout.local
            decides = not operation.deciding and (all_called or (len(kinds) > 1 and "finish" in kinds))
            operation.deciding = operation.deciding or decides
            self._drop_if_done(operation)
            self._changed.notify_all()
        if decides:
            self._submit(operation, all_called)
        return operation

    def try_start(self, operation: Operation, block: bool) -> bool:
        """Finds the verdict on an operation and starts its collective, as far as that is possible.

        Args:
            operation: one that a peer of this node has called.
            block: wait for the other peers, until the timeout is over.

        Returns:
            Whether it has been started, or has failed.
        """
        if self._exchange is None:
            self._decide_within_node(operation, block)
        else:
            self._decide_with_nodes(operation, block)
        return operation.started

    def result(self, operation: Operation, peer: int) -> torch.Tensor | None:
        """Returns the result of a started operation, on CUDA ready on the peer's current stream; blocks.

        Peers share it, so it must not be written to.

        Raises:
            CollectiveSessionError: the verdict is an error, or a node has died since.
        """
        assert operation.started and operation.verdict is not None
        if operation.verdict.error is not None:
            raise operation.verdict.raised()
        assert operation.transfer is not None
        try:
            return self._transport.result(operation.transfer, peer)
        except RuntimeError as error:
            with operation.failing:  # so that all local peers raise the same text
                self._lose_nodes(operation, error)
            raise operation.verdict.raised() from error

    def is_complete(self, operation: Operation, peer: int) -> bool:
        """Returns whether `result` of a started operation would return, or raise, without blocking."""
        if operation.verdict is None or operation.verdict.error is not None:
            return True
        return operation.transfer is None or operation.transfer.is_complete(peer)

    def shut_down(self, why: Verdict) -> None:
        """Ends the session for all peers: operations in flight and later ones fail with `why`, on other nodes too."""
        why = dataclasses.replace(why, closes=True)
        with self._changed:
            if self._ending or self.closed is not None:
                return
            self._ending = True
            first, upto = self._next, min(self._calls_made.values())
            self._changed.notify_all()
        try:
            if self._exchange is not None:
                # If the store is gone, the other nodes know that the session is over.
                with contextlib.suppress(RuntimeError, ValueError):
                    for number in range(first, upto + 1):
                        self._exchange.propose(number, encode(why))
                    self._start_agreed_operations(upto)
        finally:
            self._close_with(why)

    def _start_agreed_operations(self, upto: int) -> None:
        """Starts operations with a verdict before the session ends, because other nodes wait in their collectives."""
        assert self._exchange is not None
        with self._changed:
            if not self._changed.wait_for(lambda: not self._starting, self.config.timeout_s):
                return
            self._starting = True
        try:
            self._start_in_order(upto, block=False)
            for number in range(self._next, upto + 1):
                self._exchange.acknowledge(number)
        finally:
            with self._changed:
                self._starting = False

    def release(self) -> None:
        """Releases everything once all peers of all nodes have finished. Every local peer calls it; the first acts."""
        gone = failed("RegisterNotFirstOperation", "the session is finished: register again")
        with self._issuing:
            if self.closed is None:
                self._release(gone)

    def _release(self, gone: Verdict) -> None:
        if self._exchange is not None and self._finished is not None and self.layout.node == 0:
            # Node 0 may host the store, which the other nodes must have read.
            self._exchange.wait_until_acknowledged(self._finished, time.monotonic() + min(self.config.timeout_s, 10.0))
        self._transport.release()
        self._close(gone, gone)
        self._exchange = None  # frees the store's port, also where sessions are kept
        for call in self.at_end:
            call()

    def _submit(self, operation: Operation, all_called: bool) -> None:
        """Submits the local peers' calls: to the verdict, or with other nodes to the exchange."""
        calls = list(operation.calls.values())
        if self._exchange is None:
            self._apply_verdict(operation, judge(calls, operation.name))
            return
        try:
            if all_called:
                finishing = all(one.kind == "finish" for one in calls)
                operation.known = self._exchange.post(
                    operation.number, encode(calls), finishing, lambda texts: self._judged(texts, operation)
                )
            else:
                operation.known = self._exchange.propose(operation.number, encode(judge(calls, operation.name)))
        except RuntimeError as error:
            self._lose_nodes(operation, error)
        with self._changed:
            self._changed.notify_all()

    def _judged(self, texts: Mapping[int, str], operation: Operation) -> str:
        return encode(judge(descriptions_of(texts), operation.name))

    def _decide_within_node(self, operation: Operation, block: bool) -> None:
        verdict = None
        with self._changed:
            while not operation.started:
                left_s = operation.until_s - time.monotonic()
                if left_s <= 0 and operation.verdict is None:  # the thread that was to decide may have been interrupted
                    operation.deciding = True
                    verdict = lost(
                        list(operation.calls.values()), self.layout.peers, operation.name, self.config.timeout_s
                    )
                    break
                elif block:
                    self._changed.wait(left_s if left_s > 0 else 1.0)
                else:
                    return
        if verdict is not None:
            self._apply_verdict(operation, verdict)

    def _decide_with_nodes(self, operation: Operation, block: bool) -> None:
        while not operation.started:
            with self._changed:
                if operation.started:
                    return
                if self._starting or self._ending:
                    if not block:
                        return
                    self._changed.wait(1.0)
                    continue
                self._starting = True
            try:
                self._start_in_order(operation.number, block)
            except RuntimeError as error:
                self._lose_nodes(operation, error)
            except ValueError as error:
                self._lose_nodes(operation, RuntimeError(f"another program uses the session's keys: {error}"))
            finally:
                with self._changed:
                    self._starting = False
                    self._changed.notify_all()
            if not block:
                return

    def _start_in_order(self, upto: int, block: bool) -> None:
        """Starts operations in order, `upto` included; without `block` as far as their verdicts are known."""
        assert self._exchange is not None
        while self._next <= upto and self.closed is None:
            number = self._next
            operation = self._operations.get(number)
            if operation is None:  # `shut_down` may ask for one more than peers have called
                return
            if not self._wait_for_local_peers(operation, block):
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
            if verdict.error is None and next(iter(operation.calls.values())).kind == "finish":
                self._finished = number
            try:
                self._exchange.acknowledge(number)
            finally:
                self._apply_verdict(operation, verdict)
            if verdict.closes:
                self._close_with(verdict)

    def _wait_for_local_peers(self, operation: Operation, block: bool) -> bool:
        """Waits until all local peers have called it, or its timeout is over; returns False if not, without `block`."""
        assert self._exchange is not None
        with self._changed:
            while not operation.deciding and not self._ending:
                left_s = operation.until_s - time.monotonic()
                if left_s <= 0:
                    operation.deciding = True
                    return True
                # Other nodes may have given a verdict: their timeout is over, or they were reset.
                if self._exchange.verdict(operation.number) is not None:
                    operation.deciding = True
                    return True
                if not block:
                    return False
                self._changed.wait(min(left_s, _POLL_S))
            return True

    def _lost(self, operation: Operation) -> Verdict:
        assert self._exchange is not None
        with self._changed:
            present = {one.peer: one for one in operation.calls.values()}
        present |= {one.peer: one for one in descriptions_of(self._exchange.present(operation.number))}
        return lost(list(present.values()), range(self.layout.total), operation.name, self.config.timeout_s)

    def _apply_verdict(self, operation: Operation, verdict: Verdict) -> None:
        """Acts upon a verdict: starts the operation, or fails it. Only the first verdict counts."""
        with self._changed:
            if operation.verdict is not None:
                return
            operation.verdict = verdict
        try:
            if verdict.error is None:
                with self._issuing, torch.no_grad():
                    operation.transfer = self._transport.start(
                        operation.calls, operation.tensors, operation.events, verdict
                    )
        except BaseException as error:
            text = f"{operation.name} failed: {type(error).__name__}: {error}"
            operation.verdict = failed("CollectiveSessionError", text)
            if self._exchange is not None:
                self._lose_nodes(operation, error)
            if not isinstance(error, Exception):
                raise
        finally:
            with self._changed:
                if operation.verdict.error is not None:
                    operation.tensors.clear()
                operation.started = True
                self._drop_if_done(operation)
                self._changed.notify_all()

    def _lose_nodes(self, operation: Operation, error: BaseException) -> None:
        """Ends the session because a node or the store has died, so that nothing can be agreed on any more."""
        text = (
            f"{operation.name}: a node died, left or did not answer ({type(error).__name__}: {error}). This session "
            "cannot be used any more: reset() it and register again"
        )
        if self._exchange is not None:
            text = self._exchange.first_failure(text)
        verdict = failed(PeerLost, text)
        if operation.verdict is None or operation.verdict.error is None:
            operation.verdict = verdict
        self._close_with(verdict)

    def _close_with(self, why: Verdict) -> None:
        self._close(why, _afterwards(why))

    def _close(self, why: Verdict, later: Verdict) -> None:
        with self._changed:
            if self.closed is None:
                self.closed = later
            for operation in list(self._operations.values()):
                if not operation.started and (operation.verdict is None or operation.verdict.error is not None):
                    operation.verdict = operation.verdict or why
                    operation.started = operation.deciding = True
                    operation.tensors.clear()
            self._operations.clear()
            self._changed.notify_all()

    def _drop_if_done(self, operation: Operation) -> None:
        if operation.started and len(operation.called) == self.layout.local:
            self._operations.pop(operation.number, None)


def reset_verdict(peer: int) -> Verdict:
    """The verdict for peers that wait in an operation when `peer` resets the session."""
    return failed("SessionReset", f"peer {peer} called reset(): the session is over, register again")


def _afterwards(why: Verdict) -> Verdict:
    """The verdict on calls that are made after the session has ended because of `why`."""
    assert why.error is not None
    return failed("RegisterNotFirstOperation", why.error[1]) if why.error[0] == "SessionReset" else why
