"""Lobby: where peers register, once per group; the last one to come opens their room.

A registration is an operation like the others, with one verdict that those who come late get too. Among nodes it goes
through the store before anything else is made, so that disagreement leaves no half-made group behind.
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
from .node_collectives import Wide, default_group, is_group, listen_or_connect, own_gloo, rank_and_size, store_of
from .peer_group import Room
from .transport import Place
from .verdicts import Description, Verdict, decode_verdict, descriptions_of, encode, failed, judge, lost, peers_text

_lobbies: MutableMapping[Any, Lobby] = WeakKeyDictionary()
_alone: dict[tuple[str, int], Lobby] = {}  # one peer per node and no group: by address and node
_lock = threading.Lock()
_PREFIX = "fusedreduce/session"
_NUMBER = f"{_PREFIX}/number"  # of the next registration, in a session's own store


@dataclass(frozen=True)
class Caller:
    """One who registers.

    Attributes:
        config: its options.
        device: where its results are computed.
        place: where its config puts this node.
        shared: the torch.distributed group that joins the nodes; None if there is none, or the config has an address.
    """

    config: CollectiveConfig
    device: torch.device
    place: Place
    shared: Any | None


@dataclass
class _Registration:
    """One attempt; the lobby's lock guards every field."""

    until_s: float
    calls: int = 0
    wants: list[Description] = field(default_factory=list)
    callers: dict[int, Caller] = field(default_factory=dict)
    deciding: bool = False
    ended: str = ""  # why the group's epoch ended before all had come
    verdict: Verdict | None = None
    room: Room | None = None


@dataclass(eq=False)
class _Waiter:
    """A caller that waits for others; `epoch_ended`: why the group's epoch has, since it began to."""

    epoch_ended: str = ""


class Lobby:
    """Of one group in this process, which it does not keep: it is found by it.

    Args:
        group: the LocalGroup; None where this node has one peer.
    """

    def __init__(self, group: LocalGroup | None) -> None:
        self._group = None if group is None else weakref.ref(group)
        self._changed = threading.Condition()
        self._current: _Registration | None = None
        self._room: weakref.ref[Room] | None = None  # sessions hold it
        self._connection: tuple[str, KeyValueStore] | None = None
        self._told: int | None = 0  # of registrations in that store, how many this node knows the end of; None: all

    def register(self, want: Description, caller: Caller) -> Room:
        """Waits for all peers; see `session.register`."""
        peer, place, timeout_s = want.peer, caller.place, caller.config.timeout_s
        waiter = _Waiter()
        group = None if self._group is None else self._group()
        if group is not None:
            try:
                group.on_epoch_end(waiter, self._epoch_ended)
            except CollectiveError as error:
                raise PeerLost(f"register: {error}") from error
        with self._changed:
            room = None if self._room is None else self._room()
            if room is not None and room.closed is None:
                raise MultipleRegister(f"peer {peer} is registered already: finish() that session first")
            attempt = self._current
            came = set() if attempt is None else {one.peer for one in attempt.wants}
            ended = attempt is not None and attempt.verdict is not None
            if attempt is None or (ended and (peer in came or attempt.calls >= place.local)):
                attempt = self._current = _Registration(time.monotonic() + timeout_s)
                ended = False
            attempt.calls += 1
            attempt.wants.append(want)
            if not ended:
                attempt.callers.setdefault(peer, caller)
            decides = not ended and not attempt.deciding and attempt.calls == place.local
            attempt.deciding = attempt.deciding or decides
            if not decides:
                self._wait(attempt, waiter)
                decides = attempt.verdict is None
        if decides:
            self._decide(attempt, caller)
        assert attempt.verdict is not None
        if attempt.verdict.error is not None:
            raise attempt.verdict.raised()
        assert attempt.room is not None
        return attempt.room

    def forget(self, room: Room) -> None:
        """`room` is of no use any more."""
        with self._changed:
            if self._room is not None and self._room() is room:
                self._room = None

    def _wait(self, attempt: _Registration, waiter: _Waiter) -> None:
        """Until there is a verdict, or this caller must give one; the lock is held."""
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
        room: Room | None = None
        wants: list[Description] = []
        place = caller.place
        try:
            with self._changed:
                wants, callers = list(attempt.wants), dict(attempt.callers)
                complete = attempt.calls >= place.local
            verdict = _judge_here(wants, callers, complete)
            if attempt.ended:
                verdict = failed(PeerLost, f"register: {attempt.ended}; {_who(wants, place)}")
            one_way = len({(one.place, id(one.shared)) for one in callers.values()}) == 1
            if place.nodes > 1 and one_way:
                verdict, room = self._decide_among_nodes(attempt, caller, wants, callers, verdict)
            elif verdict is None:
                verdict = lost(wants, place.peers, "register", caller.config.timeout_s)
            elif verdict.error is None:
                room = Room(caller.config, place, {peer: one.device for peer, one in callers.items()})
            group = None if self._group is None else self._group()
            if room is not None and group is not None and place.local > 1:
                group.on_epoch_end(room, _end_with_group)
        except (RuntimeError, ValueError) as error:
            if verdict is None or verdict.error is None:
                kind = type(error) if isinstance(error, CollectiveSessionError) else PeerLost
                named = "" if kind is type(error) else f"{type(error).__name__}: "
                verdict = failed(kind, f"register: {named}{error}")
            if room is not None:
                room.end(verdict)
            room = None
        except BaseException as error:
            verdict, room = failed(PeerLost, f"register: a peer gave up ({type(error).__name__}: {error})"), None
            raise
        finally:
            with self._changed:
                attempt.verdict, attempt.room = verdict or failed(PeerLost, "register: it failed"), room
                attempt.callers.clear()
                if room is not None:  # else who comes late is told
                    self._current, self._room = None, weakref.ref(room)
                self._changed.notify_all()

    def _decide_among_nodes(
        self,
        attempt: _Registration,
        caller: Caller,
        wants: Sequence[Description],
        callers: Mapping[int, Caller],
        local: Verdict | None,
    ) -> tuple[Verdict, Room | None]:
        config, place, shared = caller.config, caller.place, caller.shared
        while True:
            try:
                store, number, own = self._store(caller, attempt.until_s)
                exchange = _registration(store, number, place)
                verdict = self._agree(exchange, place, wants, local, attempt.until_s, config.timeout_s)
                if own:
                    store.compare_set(_NUMBER, str(number) if number else "", str(number + 1))
                    self._told = number + 1
                break
            except CollectiveSessionError:
                raise
            except RuntimeError:
                # The host of a session that was finished a moment ago may have closed its store under us.
                with self._changed:
                    self._connection, self._told = None, 0
                if shared is not None or place.node == 0 or time.monotonic() >= attempt.until_s:
                    raise
                time.sleep(0.01)
        if verdict.error is not None:
            return verdict, None
        prefix = f"{_PREFIX}/{number}"
        if own:
            left_s = max(attempt.until_s - time.monotonic(), 1.0)
            backend = own_gloo(store, f"{prefix}/gloo", place.node, place.nodes, left_s)
        else:
            backend = shared
        wide = Wide(backend, own, config.timeout_s)
        exchange = StoreExchange(store, f"{prefix}/operation", place.node, place.nodes)
        room = Room(config, place, {peer: one.device for peer, one in callers.items()}, exchange, wide)
        if own:
            room.at_end.append(self._hang_up)
        return verdict, room

    def _agree(
        self,
        exchange: StoreExchange,
        place: Place,
        wants: Sequence[Description],
        local: Verdict | None,
        until_s: float,
        timeout_s: float,
    ) -> Verdict:
        if local is None:  # some did not come
            present = {one.peer: one for one in [*descriptions_of(exchange.present(0)), *wants]}
            verdict = lost(list(present.values()), range(place.total), "register", timeout_s)
            text: str | None = exchange.propose(0, encode(verdict))
        elif len(wants) < place.local or _doubled(wants):
            text = exchange.propose(0, encode(local))
        else:
            text = exchange.post(0, encode(wants), False, lambda held: encode(judge(descriptions_of(held), "register")))
            text = text or exchange.wait_for_verdict(0, until_s)
        if text is None:
            present = {one.peer: one for one in descriptions_of(exchange.present(0))}
            verdict = lost(list(present.values()), range(place.total), "register", timeout_s)
            text = exchange.propose(0, encode(verdict))
        exchange.acknowledge(0)
        return decode_verdict(text)

    def _store(self, caller: Caller, until_s: float) -> tuple[KeyValueStore, int, bool]:
        """The nodes' store, the number of this registration on it, and whether it is the session's own."""
        config, place = caller.config, caller.place
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
                self._told = None
                what = "listen at" if listens else "reach node 0 at"
                raise (InvalidConfig if listens else PeerLost)(
                    f"node {config.global_rank} cannot {what} global_address {address!r}: {error}"
                ) from error
        # A node that comes late is told how the registration that it missed has ended, unless it could not even reach
        # the store, and was told that.
        store = self._connection[1]
        now = int(store.get(_NUMBER)) if store.check([_NUMBER]) else 0
        missed = range(now if self._told is None else self._told, now)
        ended = (one for one in missed if _registration(store, one, place).verdict(0) is not None)
        return store, next(ended, now), True

    def _hang_up(self) -> None:
        with self._changed:
            self._connection, self._told = None, 0
        with _lock:
            for key in [key for key, lobby in _alone.items() if lobby is self]:
                del _alone[key]


def _end_with_group(room: Room, why: str) -> None:
    """The group was closed, or a peer's thread gave up (LocalGroup.run, abort): nobody waits for that peer."""
    room.end(failed(PeerLost, f"the session is over, its group has ended: {why}"))


def lobby_and_caller(
    group: object, config: CollectiveConfig, device: torch.device
) -> tuple[Lobby, Caller, tuple[str, str] | None]:
    """Where the peers of `group` and `config` meet, who this one is, and what is wrong with that, for all to hear.

    Raises:
        InvalidConfig: there is no such place.
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
            raise InvalidConfig("group is one of torch.distributed: global options are for local groups")
        rank, size = rank_and_size(group)
        return _lobby(group, None), Caller(config, device, Place(1, rank, size), group), _size_problem(config, size)
    size = 1 if group is None else group.size
    node, nodes = 0, 1
    if shared is not None:
        node, nodes = rank_and_size(shared)
    elif config.global_rank is not None and config.global_world_size is not None:
        node, nodes = config.global_rank, config.global_world_size
    if node < 0:
        raise InvalidConfig("this process is no member of global_group")
    caller, problem = Caller(config, device, Place(size, node, nodes), shared), _size_problem(config, size)
    if group is not None:
        return _lobby(group, group), caller, problem
    if shared is not None:
        return _lobby(shared, None), caller, problem
    if config.global_address is None:
        return Lobby(None), caller, problem
    with _lock:
        # Each entry is for a node of one peer, so that it notices if it registers twice.
        return _alone.setdefault((config.global_address, node), Lobby(None)), caller, problem


def _size_problem(config: CollectiveConfig, size: int) -> tuple[str, str] | None:
    if config.world_size == size:
        return None
    return "InvalidConfig", f"world_size is {config.world_size}, but the group has {size} peers"


def _lobby(key: Any, group: LocalGroup | None) -> Lobby:
    with _lock:
        return _lobbies.setdefault(key, Lobby(group))


def _judge_here(wants: Sequence[Description], callers: Mapping[int, Caller], complete: bool) -> Verdict | None:
    """On what the peers of this node want; None where some did not come. On a node they must agree in more."""
    if not complete and not _doubled(wants):
        return None
    here = []
    for one in wants:
        caller = callers[one.peer]
        group = None if caller.shared is None else repr(caller.shared)
        settings = {**dict(one.settings), "global_rank": caller.config.global_rank, "global_group": group}
        here.append(dataclasses.replace(one, settings=tuple(settings.items())))
    return judge(here, "register")


def _who(wants: Sequence[Description], place: Place) -> str:
    came = {one.peer for one in wants}
    return f"{peers_text([peer for peer in place.peers if peer not in came])} had not come"


def _registration(store: KeyValueStore, number: int, place: Place) -> StoreExchange:
    return StoreExchange(store, f"{_PREFIX}/{number}/register", place.node, place.nodes)


def _doubled(wants: Sequence[Description]) -> bool:
    return len({one.peer for one in wants}) < len(wants)
