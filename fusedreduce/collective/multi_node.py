"""MultiNodePeerGroup: a session's peers on one of several nodes.

The last local peer to call an operation posts its peers' calls to a store. The first peer that waits reads the
verdicts in order and starts the collectives: all nodes start the same ones in the same order, without a background
thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping

import torch

from ..comm.store_exchange import StoreExchange
from .config import CollectiveConfig
from .node_collectives import NodeCollectives
from .peer_group import Operation, PeerGroup
from .transport import NodeLayout
from .verdicts import Verdict, decode_verdict, descriptions_of, encode, judge, lost

# While a node waits for one of its own peers, how often it looks for a verdict of the other nodes.
_POLL_S = 0.02
# How long node 0, which may host the store, waits at the end for the others to read the last verdict.
_FINISH_S = 10.0


class MultiNodePeerGroup(PeerGroup):
    """A session's peers on this node, one of several.

    Args:
        config: the options that all peers agreed on.
        layout: of this node.
        devices: by peer.
        node_collectives: collectives among nodes.
        exchange: with the other nodes.
        at_finish: called when all peers have finished.
    """

    def __init__(
        self,
        config: CollectiveConfig,
        layout: NodeLayout,
        devices: Mapping[int, torch.device],
        node_collectives: NodeCollectives,
        exchange: StoreExchange,
        at_finish: Callable[[], None],
    ) -> None:
        super().__init__(config, layout, devices, node_collectives)
        self._exchange = exchange
        self._at_finish = at_finish
        self._next = 0  # the first operation that has not been started
        self._starting = False
        self._aborting = False
        self._finish_number: int | None = None

    @property
    def is_open(self) -> bool:
        """Whether the session goes on, so that its peers cannot register again."""
        return self.closed is None and not self._aborting

    def try_start(self, operation: Operation, block: bool) -> bool:
        """Starts the operations before it, too, in the order of their numbers; returns whether it has been started."""
        while not operation.started:
            with self._changed:
                if operation.started:
                    break
                if self._starting or self._aborting:
                    if not block:
                        break
                    self._changed.wait(1.0)
                    continue
                self._starting = True
            try:
                self._start_in_order(operation.number, block)
            except RuntimeError as error:
                self._fail(operation, error)
            except ValueError as error:
                self._fail(operation, RuntimeError(f"another program uses the session's keys: {error}"))
            finally:
                with self._changed:
                    self._starting = False
                    self._changed.notify_all()
            if not block:
                break
        return operation.started

    def abort(self, why: Verdict) -> None:
        """Ends the session on all nodes: `why` becomes the verdict on operations that have none yet."""
        why = dataclasses.replace(why, closes=True)
        with self._changed:
            if not self.is_open:
                return
            self._aborting = True
            first, upto = self._next, min(self._calls_made.values())
            self._changed.notify_all()
        try:
            # If the store is gone, the other nodes know that the session is over.
            with contextlib.suppress(RuntimeError, ValueError):
                for number in range(first, upto + 1):
                    self._exchange.propose(number, encode(why))
                self._start_agreed_operations(upto)
        finally:
            self._close(why)

    def _start_agreed_operations(self, upto: int) -> None:
        """Starts operations with a verdict before the session ends, because other nodes wait in their collectives."""
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

    def _release(self) -> None:
        if self._finish_number is not None and self.layout.node == 0:
            until_s = time.monotonic() + min(self.config.timeout_s, _FINISH_S)
            self._exchange.wait_until_acknowledged(self._finish_number, until_s)
        super()._release()
        self._exchange.close()  # also where sessions are kept
        self._at_finish()

    def _submit(self, operation: Operation, all_called: bool) -> None:
        calls = list(operation.calls.values())
        try:
            if all_called:
                finishing = all(one.kind == "finish" for one in calls)
                operation.known = self._exchange.post(
                    operation.number,
                    encode(calls),
                    finishing,
                    lambda texts: encode(judge(descriptions_of(texts), operation.name)),
                )
            else:
                operation.known = self._exchange.propose(operation.number, encode(judge(calls, operation.name)))
        except RuntimeError as error:
            self._fail(operation, error)
        with self._changed:
            self._changed.notify_all()

    def _start_in_order(self, upto: int, block: bool) -> None:
        """Starts operations in order, `upto` included; without `block` as far as their verdicts are known."""
        while self._next <= upto and self.closed is None:
            number = self._next
            operation = self._operations.get(number)
            if operation is None:  # `abort` may ask for one more than peers have called
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
                self._finish_number = number
            try:
                self._exchange.acknowledge(number)
            finally:
                self._apply_verdict(operation, verdict)
            if verdict.closes:
                self._close(verdict)

    def _wait_for_local_peers(self, operation: Operation, block: bool) -> bool:
        """Waits until all local peers have called it, or its timeout is over; returns False if not, without `block`."""
        with self._changed:
            while not operation.deciding and not self._aborting:
                left_s = operation.until_s - time.monotonic()
                # Other nodes may have given a verdict: their timeout is over, or they were reset.
                if left_s <= 0 or self._exchange.verdict(operation.number) is not None:
                    operation.deciding = True
                elif not block:
                    return False
                else:
                    self._changed.wait(min(left_s, _POLL_S))
            return True

    def _lost(self, operation: Operation) -> Verdict:
        with self._changed:
            present = {one.peer: one for one in operation.calls.values()}
        present |= {one.peer: one for one in descriptions_of(self._exchange.present(operation.number))}
        return lost(list(present.values()), range(self.layout.total), operation.name, self.config.timeout_s)

    def _start_failed(self, operation: Operation, error: BaseException) -> None:
        self._fail(operation, error)  # other nodes may wait in its collective

    def _failure_text(self, operation: Operation, error: BaseException) -> str:
        return self._exchange.first_failure(super()._failure_text(operation, error))
