"""Registry: peers of one group register here; the last one to do so makes their PeerGroup.

A registration is an operation like the others, with one verdict that late peers get too. Among nodes it uses the
store before anything else is made, so that a disagreement leaves no half-made group behind.
"""

from __future__ import annotations

import dataclasses
import threading
import time
import weakref
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ..comm.local.group import LocalGroup
from ..comm.store_exchange import KeyValueStore, StoreExchange
from ..errors import CollectiveError
from .config import CollectiveConfig
from .errors import CollectiveSessionError, InvalidConfig, MultipleRegister, PeerLost
from .node_collectives import (
    NodeCollectives,
    default_group,
    is_group,
    listen_or_connect,
    own_gloo,
    rank_and_size,
    store_of,
)
from .peer_group import PeerGroup
from .transport import NodeLayout
from .verdicts import Description, Verdict, decode_verdict, descriptions_of, encode, failed, judge, lost, peers_text

_registries: MutableMapping[Any, Registry] = WeakKeyDictionary()
_alone: dict[tuple[str, int], Registry] = {}  # of nodes with one peer and no group: by address and node
_lock = threading.Lock()
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
    """

    config: CollectiveConfig
    device: torch.device
    layout: NodeLayout
    shared: Any | None


@dataclass
class _Registration:
    """One attempt to register; the registry's lock guards every field.

    Attributes:
        until_s: when its timeout is over, time.monotonic().
        count: how many callers it has.
        calls: their descriptions.
        callers: by peer.
        deciding: a caller has begun to find the verdict.
        ended: why the group's epoch ended before all had registered; empty if it did not.
    """

    until_s: float
    count: int = 0
    calls: list[Description] = field(default_factory=list)
    callers: dict[int, Caller] = field(default_factory=dict)
    deciding: bool = False
    ended: str = ""
    verdict: Verdict | None = None
    peer_group: PeerGroup | None = None


@dataclass(eq=False)
class _Waiter:
    """A caller that waits for others; `epoch_ended`: why the group's epoch has ended since it registered, or ""."""

    epoch_ended: str = ""


class Registry:
    """The registrations of one group in this process; references the group weakly.

    Args:
        group: the LocalGroup; None where this node has one peer.
    """

    def __init__(self, group: LocalGroup | None) -> None:
        self._group = None if group is None else weakref.ref(group)
        self._changed = threading.Condition()
        self._current: _Registration | None = None
        self._peer_group: weakref.ref[PeerGroup] | None = None  # sessions reference it
        self._connection: tuple[str, KeyValueStore] | None = None
        self._known: int | None = 0  # of how many registrations in that store this node knows the end; None: of all

    def register(self, call: Description, caller: Caller) -> PeerGroup:
        """Registers a peer, and blocks until all have; see `session.register`."""
        peer, layout, timeout_s = call.peer, caller.layout, caller.config.timeout_s
        waiter = _Waiter()
        group = None if self._group is None else self._group()
        if group is not None:
            try:
                group.on_epoch_end(waiter, self._epoch_ended)
            except CollectiveError as error:
                raise PeerLost(f"register: {error}") from error
        with self._changed:
            peer_group = None if self._peer_group is None else self._peer_group()
            if peer_group is not None and peer_group.closed is None:
                raise MultipleRegister(f"peer {peer} is registered already: finish() or reset() that session first")
            attempt = self._current
            registered = set() if attempt is None else {one.peer for one in attempt.calls}
            ended = attempt is not None and attempt.verdict is not None
            if attempt is None or (ended and (peer in registered or attempt.count >= layout.local)):
                attempt = self._current = _Registration(time.monotonic() + timeout_s)
                ended = False
            attempt.count += 1
            attempt.calls.append(call)
            if not ended:
                attempt.callers.setdefault(peer, caller)
            decides = not ended and not attempt.deciding and attempt.count == layout.local
            attempt.deciding = attempt.deciding or decides
            if not decides:
                self._wait_for_peers(attempt, waiter)
                decides = attempt.verdict is None
        if decides:
            self._decide(attempt, caller)
        assert attempt.verdict is not None
        if attempt.verdict.error is not None:
            raise attempt.verdict.raised()
        assert attempt.peer_group is not None
        return attempt.peer_group

    def discard(self, peer_group: PeerGroup) -> None:
        """Removes a peer group whose session is over, so that peers can register again."""
        with self._changed:
            if self._peer_group is not None and self._peer_group() is peer_group:
                self._peer_group = None

    def _wait_for_peers(self, attempt: _Registration, waiter: _Waiter) -> None:
        """Waits until there is a verdict, or this caller must find it. The lock must be held."""
        while attempt.verdict is None:
            left_s = attempt.until_s - time.monotonic()
            if attempt.deciding:
                self._changed.wait(1.0)
            elif left_s <= 0 or waiter.epoch_ended:
                attempt.deciding = True
                attempt.ended = waiter.epoch_ended
                return
            else:
                self._changed.wait(left_s)

    def _epoch_ended(self, waiter: _Waiter, why: str) -> None:
        with self._changed:
            waiter.epoch_ended = why
            self._changed.notify_all()

    def _decide(self, attempt: _Registration, caller: Caller) -> None:
        verdict: Verdict | None = None
        peer_group: PeerGroup | None = None
        calls: list[Description] = []
        layout = caller.layout
        try:
            with self._changed:
                calls, callers = list(attempt.calls), dict(attempt.callers)
                complete = attempt.count >= layout.local
            verdict = _judge_here(calls, callers, complete)
            if attempt.ended:
                verdict = failed(PeerLost, f"register: {attempt.ended}; {_missing_text(calls, layout)}")
            same_nodes = len({(one.layout, id(one.shared)) for one in callers.values()}) == 1
            if layout.nodes > 1 and same_nodes:
                verdict, peer_group = self._decide_among_nodes(attempt, caller, calls, callers, verdict)
            elif verdict is None:
                verdict = lost(calls, layout.peers, "register", caller.config.timeout_s)
            elif verdict.error is None:
                peer_group = PeerGroup(caller.config, layout, {peer: one.device for peer, one in callers.items()})
            group = None if self._group is None else self._group()
            if peer_group is not None and group is not None and layout.local > 1:
                group.on_epoch_end(peer_group, _end_with_group)
        except (RuntimeError, ValueError) as error:
            if verdict is None or verdict.error is None:
                kind = type(error) if isinstance(error, CollectiveSessionError) else PeerLost
                named = "" if kind is type(error) else f"{type(error).__name__}: "
                verdict = failed(kind, f"register: {named}{error}")
            if peer_group is not None:
                peer_group.shut_down(verdict)
            peer_group = None
        except BaseException as error:
            verdict, peer_group = failed(PeerLost, f"register: a peer gave up ({type(error).__name__}: {error})"), None
            raise
        finally:
            with self._changed:
                attempt.verdict, attempt.peer_group = verdict or failed(PeerLost, "register: it failed"), peer_group
                attempt.callers.clear()
                if peer_group is not None:  # else it stays, for the verdict on late callers
                    self._current, self._peer_group = None, weakref.ref(peer_group)
                self._changed.notify_all()

    def _decide_among_nodes(
        self,
        attempt: _Registration,
        caller: Caller,
        calls: Sequence[Description],
        callers: Mapping[int, Caller],
        local: Verdict | None,
    ) -> tuple[Verdict, PeerGroup | None]:
        config, layout, shared = caller.config, caller.layout, caller.shared
        while True:
            try:
                store, number, own = self._store(caller, attempt.until_s)
                exchange = _registration(store, number, layout)
                verdict = self._agree(exchange, layout, calls, local, attempt.until_s, config.timeout_s)
                if own:
                    store.compare_set(_NUMBER, str(number) if number else "", str(number + 1))
                    self._known = number + 1
                break
            except CollectiveSessionError:
                raise
            except RuntimeError:
                # The host of a session that has just finished may have closed its store meanwhile.
                with self._changed:
                    self._connection, self._known = None, 0
                if shared is not None or layout.node == 0 or time.monotonic() >= attempt.until_s:
                    raise
                time.sleep(0.01)
        if verdict.error is not None:
            return verdict, None
        prefix = f"{_PREFIX}/{number}"
        if own:
            left_s = max(attempt.until_s - time.monotonic(), 1.0)
            backend = own_gloo(store, f"{prefix}/gloo", layout.node, layout.nodes, left_s)
        else:
            backend = shared
        node_collectives = NodeCollectives(backend, own, config.timeout_s)
        exchange = StoreExchange(store, f"{prefix}/operation", layout.node, layout.nodes)
        peer_group = PeerGroup(
            config, layout, {peer: one.device for peer, one in callers.items()}, exchange, node_collectives
        )
        if own:
            peer_group.at_end.append(self._disconnect)
        return verdict, peer_group

    def _agree(
        self,
        exchange: StoreExchange,
        layout: NodeLayout,
        calls: Sequence[Description],
        local: Verdict | None,
        until_s: float,
        timeout_s: float,
    ) -> Verdict:
        if local is None:  # some local peers did not register
            present = {one.peer: one for one in [*descriptions_of(exchange.present(0)), *calls]}
            verdict = lost(list(present.values()), range(layout.total), "register", timeout_s)
            text: str | None = exchange.propose(0, encode(verdict))
        elif len(calls) < layout.local or _has_duplicates(calls):
            text = exchange.propose(0, encode(local))
        else:
            text = exchange.post(
                0, encode(calls), False, lambda texts: encode(judge(descriptions_of(texts), "register"))
            )
            text = text or exchange.wait_for_verdict(0, until_s)
        if text is None:
            present = {one.peer: one for one in descriptions_of(exchange.present(0))}
            verdict = lost(list(present.values()), range(layout.total), "register", timeout_s)
            text = exchange.propose(0, encode(verdict))
        exchange.acknowledge(0)
        return decode_verdict(text)

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
        ended = (one for one in missed if _registration(store, one, layout).verdict(0) is not None)
        return store, next(ended, now), True

    def _disconnect(self) -> None:
        with self._changed:
            self._connection, self._known = None, 0
        with _lock:
            for key in [key for key, registry in _alone.items() if registry is self]:
                del _alone[key]


def _end_with_group(peer_group: PeerGroup, why: str) -> None:
    """Ends a session whose LocalGroup was closed, or one of whose ranks gave up (LocalGroup.run, abort)."""
    peer_group.shut_down(failed(PeerLost, f"the session is over, because its LocalGroup is: {why}"))


def registry_and_caller(
    group: object, config: CollectiveConfig, device: torch.device
) -> tuple[Registry, Caller, tuple[str, str] | None]:
    """Finds the registry of a group.

    Args:
        group: as given to `register`.
        config: the caller's options.
        device: where the caller's results are computed.

    Returns:
        The registry, the caller, and a problem to report to all peers: (name of an error class, text), or None.

    Raises:
        InvalidConfig: `group` and `config` fit no registry.
    """
    shared = config.global_group
    if group is not None and not isinstance(group, LocalGroup) and not is_group(group):
        raise InvalidConfig(f"group must be a LocalGroup, a torch.distributed group or None, got {group!r}")
    if group is None and not config.is_global and config.world_size > 1:
        group = default_group()
        if group is None:
            raise InvalidConfig(
                f"world_size is {config.world_size} and there is no group: give a LocalGroup that the peers share, or "
                "initialise torch.distributed"
            )
    if group is not None and not isinstance(group, LocalGroup):
        if config.is_global:
            raise InvalidConfig(
                "group is a torch.distributed group, which cannot be combined with global options: leave those out, or "
                "give a LocalGroup"
            )
        rank, size = rank_and_size(group)
        return (
            _registry(group, None),
            Caller(config, device, NodeLayout(1, rank, size), group),
            _size_problem(config, size),
        )
    size = 1 if group is None else group.size
    node, nodes = 0, 1
    if shared is not None:
        node, nodes = rank_and_size(shared)
    elif config.global_rank is not None and config.global_world_size is not None:
        node, nodes = config.global_rank, config.global_world_size
    if node < 0:
        raise InvalidConfig("this process is not a member of global_group: register only on its members")
    caller, problem = Caller(config, device, NodeLayout(size, node, nodes), shared), _size_problem(config, size)
    if group is not None:
        return _registry(group, group), caller, problem
    if shared is not None:
        return _registry(shared, None), caller, problem
    if config.global_address is None:
        return Registry(None), caller, problem
    with _lock:
        # One entry per node of one peer, so that registering twice is noticed.
        return _alone.setdefault((config.global_address, node), Registry(None)), caller, problem


def _size_problem(config: CollectiveConfig, size: int) -> tuple[str, str] | None:
    if config.world_size == size:
        return None
    return "InvalidConfig", f"world_size is {config.world_size}, but the group has {size} peers"


def _registry(key: Any, group: LocalGroup | None) -> Registry:
    with _lock:
        return _registries.setdefault(key, Registry(group))


def _judge_here(calls: Sequence[Description], callers: Mapping[int, Caller], complete: bool) -> Verdict | None:
    """The verdict on the local peers' calls, which must agree in more than nodes must; None where some are missing."""
    if not complete and not _has_duplicates(calls):
        return None
    here = []
    for one in calls:
        caller = callers[one.peer]
        group = None if caller.shared is None else repr(caller.shared)
        settings = {**dict(one.settings), "global_rank": caller.config.global_rank, "global_group": group}
        here.append(dataclasses.replace(one, settings=tuple(settings.items())))
    return judge(here, "register")


def _missing_text(calls: Sequence[Description], layout: NodeLayout) -> str:
    registered = {call.peer for call in calls}
    return f"{peers_text([peer for peer in layout.peers if peer not in registered])} had not registered"


def _registration(store: KeyValueStore, number: int, layout: NodeLayout) -> StoreExchange:
    return StoreExchange(store, f"{_PREFIX}/{number}/register", layout.node, layout.nodes)


def _has_duplicates(calls: Sequence[Description]) -> bool:
    return len({one.peer for one in calls}) < len(calls)
