"""PeerGroup: a session's peers on this node, and their operations.

The n-th calls of all peers are one operation. The last local peer to call compares all calls and starts the operation;
nothing blocks before `try_start`. With other nodes (multi_node.py) the verdict comes through a store.

Ownership: the peer group references an operation until all local peers have called it; afterwards only their handles
do.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from .config import CollectiveConfig
from .errors import PeerLost
from .node_collectives import NodeCollectives
from .transport import NodeLayout, Transfer, Transport
from .verdicts import Description, Verdict, failed, judge, lost


@dataclass
class Operation:
    """One call of every peer; the peer group's lock guards every field but the results.

    Attributes:
        number: its place among the calls of each peer.
        until_s: when the timeout of the first local peer is over, time.monotonic().
        called: local peers that have called it.
        calls: their descriptions of the call, by peer.
        deciding: a thread has begun to find the verdict.
        known: the verdict as text, where posting the calls to other nodes returned it.
        verdict: whether and why the operation fails.
        started: the verdict has been acted upon.
        transfer: its data.
    """

    number: int
    until_s: float
    called: set[int] = field(default_factory=set)
    calls: dict[int, Description] = field(default_factory=dict)
    deciding: bool = False
    known: str | None = None
    verdict: Verdict | None = None
    started: bool = False
    transfer: Transfer = field(default_factory=Transfer)

    @property
    def name(self) -> str:
        """Names the operation in messages."""
        return f"operation {self.number}"


class PeerGroup:
    """A session's peers where there is one node; MultiNodePeerGroup where there are several.

    Args:
        config: the options that all peers agreed on.
        layout: of this node.
        devices: by peer.
        node_collectives: collectives among nodes; None where there is one node.

    Attributes:
        closed: why there can be no more operations; set once.
    """

    def __init__(
        self,
        config: CollectiveConfig,
        layout: NodeLayout,
        devices: Mapping[int, torch.device],
        node_collectives: NodeCollectives | None = None,
    ) -> None:
        self.config = config
        self.layout = layout
        self.closed: Verdict | None = None
        self._transport = Transport(config, layout, devices, node_collectives)
        self._changed = threading.Condition()
        self._issuing = threading.Lock()
        self._operations: dict[int, Operation] = {}
        self._calls_made = dict.fromkeys(layout.peers, 0)

    @property
    def is_open(self) -> bool:
        """Whether the session goes on, so that its peers cannot register again."""
        return self.closed is None

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
                    operation.transfer.tensors[peer] = tensor
                if event is not None:
                    operation.transfer.events[peer] = event
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
        while True:
            with self._changed:
                while not operation.started:
                    left_s = operation.until_s - time.monotonic()
                    if left_s <= 0 and operation.verdict is None:
                        operation.deciding = True  # the thread that was to decide may have been interrupted
                        break
                    if not block:
                        return False
                    self._changed.wait(left_s if left_s > 0 else 1.0)
                if operation.started:
                    return True
                calls = list(operation.calls.values())
            self._apply_verdict(operation, lost(calls, self.layout.peers, operation.name, self.config.timeout_s))

    def result(self, operation: Operation, peer: int) -> torch.Tensor | None:
        """Returns the result of a started operation, on CUDA ready on the peer's current stream; blocks.

        Peers share it, so it must not be written to.

        Raises:
            CollectiveSessionError: the verdict is an error, or a node has died since.
        """
        assert operation.started and operation.verdict is not None
        if operation.verdict.error is not None:
            raise operation.verdict.raised()
        transfer = operation.transfer
        try:
            return self._transport.result(transfer, peer)
        except RuntimeError as error:
            with transfer.lock:  # so that all local peers raise the same text
                self._fail(operation, error)
            raise operation.verdict.raised() from error

    def is_complete(self, operation: Operation, peer: int) -> bool:
        """Returns whether `result` of a started operation would return, or raise, without blocking."""
        if operation.verdict is None or operation.verdict.error is not None:
            return True
        return operation.transfer.is_complete(peer)

    def abort(self, why: Verdict) -> None:
        """Ends the session for all peers: operations in flight and later ones fail with `why`, on other nodes too."""
        self._close(why)

    def finish(self) -> None:
        """Ends the session once all peers of all nodes have finished. Every local peer calls it; the first acts."""
        with self._issuing:
            if self.closed is None:
                self._release()

    def _release(self) -> None:
        self._transport.release()
        self._close(failed("RegisterNotFirstOperation", "the session is finished: register again"))

    def _submit(self, operation: Operation, all_called: bool) -> None:
        """Called once, when all local peers have called an operation, or one that does has finished."""
        self._apply_verdict(operation, judge(list(operation.calls.values()), operation.name))

    def _apply_verdict(self, operation: Operation, verdict: Verdict) -> None:
        """Acts upon a verdict: starts the operation, or fails it. Only the first verdict counts."""
        with self._changed:
            if operation.verdict is not None:
                return
            operation.verdict = verdict
        try:
            if verdict.error is None:
                with self._issuing, torch.no_grad():
                    self._transport.start(operation.transfer, next(iter(operation.calls.values())), verdict)
        except BaseException as error:
            text = f"{operation.name} failed: {type(error).__name__}: {error}"
            operation.verdict = failed("CollectiveSessionError", text)
            self._start_failed(operation, error)
            if not isinstance(error, Exception):
                raise
        finally:
            with self._changed:
                if operation.verdict.error is not None:
                    operation.transfer = Transfer()  # frees its tensors
                operation.started = True
                self._drop_if_done(operation)
                self._changed.notify_all()

    def _start_failed(self, operation: Operation, error: BaseException) -> None:
        """Called when an operation could not be started. All peers raise that; within a node the session goes on."""

    def _fail(self, operation: Operation, error: BaseException) -> None:
        """Ends the session because a collective has failed, so that nothing can be agreed on any more."""
        verdict = failed(PeerLost, self._failure_text(operation, error))
        if operation.verdict is None or operation.verdict.error is None:
            operation.verdict = verdict
        self._close(verdict)

    def _failure_text(self, operation: Operation, error: BaseException) -> str:
        return (
            f"{operation.name}: a node died, left or did not answer ({type(error).__name__}: {error}). This session "
            "cannot be used any more: reset() it and register again"
        )

    def _close(self, why: Verdict) -> None:
        """Fails operations that were not started with `why`, and all later ones."""
        with self._changed:
            self.closed = self.closed or why
            for operation in self._operations.values():
                if not operation.started and (operation.verdict is None or operation.verdict.error is not None):
                    operation.verdict = operation.verdict or why
                    operation.started = operation.deciding = True
                    operation.transfer = Transfer()
            self._operations.clear()
            self._changed.notify_all()

    def _drop_if_done(self, operation: Operation) -> None:
        if operation.started and len(operation.called) == self.layout.local:
            self._operations.pop(operation.number, None)
