"""NodeRegistration: one node's side of registrations among nodes, through the store of their group or address.

The store is used before anything else is made, so that a disagreement leaves no half-made group behind.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..comm.store_exchange import KeyValueStore, StoreExchange
from .config import CollectiveConfig
from .errors import CollectiveSessionError, InvalidConfig, PeerLost
from .multi_node import MultiNodePeerGroup
from .node_collectives import NodeCollectives, listen_or_connect, own_gloo, store_of
from .transport import NodeLayout
from .verdicts import Description, Verdict, decode_verdict, descriptions_of, encode, judge, lost

_PREFIX = "fusedreduce/session"
_NUMBER = f"{_PREFIX}/number"  # of the next registration, in a session's own store


@dataclass(frozen=True)
class Caller:
    """A peer that registers.

    Attributes:
        config: its options.
        device: where its results are computed.
        layout: of the nodes, by its config.
        shared: the torch.distributed group that joins the nodes; None if there is none, or the config has an address.
        group_size: how many peers the group has that it registers with.
    """

    config: CollectiveConfig
    device: torch.device
    layout: NodeLayout
    shared: Any | None
    group_size: int

    @property
    def problem(self) -> tuple[str, str] | None:
        """What to report to all peers: (name of an error class, text); None if the config fits the group."""
        if self.config.world_size == self.group_size:
            return None
        return "InvalidConfig", f"world_size is {self.config.world_size}, but the group has {self.group_size} peers"


class NodeRegistration:
    """What a node keeps from one registration to the next."""

    def __init__(self) -> None:
        self._connection: tuple[str, KeyValueStore] | None = None
        self._agreeing: StoreExchange | None = None
        self._known: int | None = 0  # of how many registrations in that store this node knows the end; None: of all

    def register(
        self,
        caller: Caller,
        calls: Sequence[Description],
        devices: Mapping[int, torch.device],
        local: Verdict | None,
        until_s: float,
        at_finish: Callable[[], None],
    ) -> tuple[Verdict, MultiNodePeerGroup | None]:
        """Agrees with the other nodes on a registration, and makes this node's peer group; blocks.

        Args:
            caller: one of this node's peers.
            calls: descriptions of those that have registered.
            devices: theirs, by peer.
            local: the verdict on their calls alone; None if some are missing.
            until_s: when the timeout is over, time.monotonic().
            at_finish: called when all peers of a session with an address have finished.

        Returns:
            The verdict, and the peer group if that is no error.

        Raises:
            RuntimeError: the other nodes could not be reached.
        """
        config, layout = caller.config, caller.layout
        while True:
            try:
                store, number, own = self._store(caller, until_s)
                self._agreeing = _exchange(store, number, layout)
                verdict = _agree(self._agreeing, layout, calls, local, until_s, config.timeout_s)
                if own:
                    store.compare_set(_NUMBER, str(number) if number else "", str(number + 1))
                    self._known = number + 1
                break
            except CollectiveSessionError:
                raise
            except RuntimeError:
                # The host of a session that has just finished may have closed its store meanwhile.
                self.disconnect()
                if caller.shared is not None or layout.node == 0 or time.monotonic() >= until_s:
                    raise
                time.sleep(0.01)
            finally:
                self._agreeing = None
        if verdict.error is not None:
            return verdict, None
        backend = caller.shared
        if own:
            left_s = max(until_s - time.monotonic(), 1.0)
            backend = own_gloo(store, f"{_PREFIX}/{number}/gloo", layout.node, layout.nodes, left_s)
        return verdict, MultiNodePeerGroup(
            config,
            layout,
            devices,
            NodeCollectives(backend, own, config.timeout_s),
            StoreExchange(store, f"{_PREFIX}/{number}/operation", layout.node, layout.nodes),
            at_finish if own else _nothing,
        )

    def give_up(self, why: Verdict) -> None:
        """Proposes `why` as the verdict on the registration that this node is agreeing on with others, if on any."""
        exchange = self._agreeing
        if exchange is not None:
            with contextlib.suppress(RuntimeError):  # without the store, the others are not waiting in it either
                exchange.propose(0, encode(why))

    def disconnect(self) -> None:
        """Drops the store, and so frees its port."""
        self._connection, self._known = None, 0

    def _store(self, caller: Caller, until_s: float) -> tuple[KeyValueStore, int, bool]:
        """Returns the nodes' store, the number of this registration in it, and whether the session made the store."""
        config, layout = caller.config, caller.layout
        if caller.shared is not None:
            store, number = store_of(caller.shared)
            return store, number, False
        address = str(config.global_address)
        if self._connection is None or self._connection[0] != address:
            self._connection = None  # frees its port
            host, port = config.host_and_port()
            left_s = max(until_s - time.monotonic(), 0.1)
            listens = config.global_rank == 0
            try:
                self._connection = address, listen_or_connect(host, port, listens, left_s)
            except RuntimeError as error:
                self._known = None
                what = "listen at" if listens else "reach node 0 at"
                raise (InvalidConfig if listens else PeerLost)(
                    f"node {config.global_rank} cannot {what} global_address {address!r}: {error}"
                ) from error
        # A late node gets the verdict on the registration that it missed, unless it could not even reach the store, and
        # has raised that.
        store = self._connection[1]
        now = int(store.get(_NUMBER)) if store.check([_NUMBER]) else 0
        missed = range(now if self._known is None else self._known, now)
        ended = (one for one in missed if _exchange(store, one, layout).verdict(0) is not None)
        return store, next(ended, now), True


def _exchange(store: KeyValueStore, number: int, layout: NodeLayout) -> StoreExchange:
    return StoreExchange(store, f"{_PREFIX}/{number}/register", layout.node, layout.nodes)


def _agree(
    exchange: StoreExchange,
    layout: NodeLayout,
    calls: Sequence[Description],
    local: Verdict | None,
    until_s: float,
    timeout_s: float,
) -> Verdict:
    """Returns the nodes' verdict on a registration; blocks. See `NodeRegistration.register`."""
    text: str | None = None
    if local is not None and sorted(one.peer for one in calls) != [*layout.peers]:  # none for each, or several
        text = exchange.propose(0, encode(local))
    elif local is not None:
        text = exchange.post(0, encode(calls), False, lambda texts: encode(judge(descriptions_of(texts), "register")))
        text = text or exchange.wait_for_verdict(0, until_s)
    if text is None:
        present = {one.peer: one for one in [*descriptions_of(exchange.present(0)), *calls]}
        verdict = lost(list(present.values()), range(layout.total), "register", timeout_s)
        text = exchange.propose(0, encode(verdict))
    exchange.acknowledge(0)
    return decode_verdict(text)


def _nothing() -> None: ...
