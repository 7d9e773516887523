"""Registry: peers of one group register here; the last one to do so makes their PeerGroup.

A registration is an operation like the others, with one verdict that late peers get too.
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
from ..errors import CollectiveError
from .config import CollectiveConfig
from .errors import CollectiveSessionError, InvalidConfig, MultipleRegister, PeerLost
from .node_collectives import default_group, is_group, rank_and_size
from .node_registration import Caller, NodeRegistration
from .peer_group import PeerGroup
from .transport import NodeLayout
from .verdicts import Description, Verdict, failed, judge, lost, peers_text

_registries: MutableMapping[Any, Registry] = WeakKeyDictionary()
_alone: dict[tuple[str, int], Registry] = {}  # of nodes with one peer and no group: by address and node
_peer_groups: weakref.WeakSet[PeerGroup] = weakref.WeakSet()  # of all sessions, open or over
_lock = threading.Lock()


@dataclass(eq=False)
class _Registration:
    """One attempt to register; the lock of `changed`, its registry's, guards every field.

    Attributes:
        until_s: when its timeout is over, time.monotonic().
        calls: descriptions of its callers, late ones too.
        callers: by peer.
        decider: the call of the one that finds the verdict.
        epoch_ended: why the group's epoch ended since this began; empty if it did not.
    """

    changed: threading.Condition
    until_s: float
    calls: list[Description] = field(default_factory=list)
    callers: dict[int, Caller] = field(default_factory=dict)
    decider: Description | None = None
    epoch_ended: str = ""
    verdict: Verdict | None = None
    peer_group: PeerGroup | None = None

    def end_epoch(self, why: str) -> None:
        """Called when the group's epoch ends: nobody waits for those who have not registered."""
        with self.changed:
            self.epoch_ended = why
            self.changed.notify_all()
        if self.peer_group is not None:
            _end_with_group(self.peer_group, why)  # made meanwhile, it may be of the group's next epoch


class Registry:
    """The registrations of one group in this process, which it does not reference."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._current: _Registration | None = None
        self._peer_group: weakref.ref[PeerGroup] | None = None  # sessions reference it
        self._nodes = NodeRegistration()

    def register(self, call: Description, caller: Caller, group: LocalGroup | None) -> PeerGroup:
        """Registers a peer, and blocks until all have; see `session.register`.

        Args:
            call: its description.
            caller: the peer.
            group: the registry's; None where this node has one peer.
        """
        peer, local = call.peer, caller.layout.local
        attempt = _Registration(self._changed, time.monotonic() + caller.config.timeout_s)
        if group is not None:
            try:
                group.on_epoch_end(attempt, _Registration.end_epoch)
            except CollectiveError as error:
                raise PeerLost(f"register: {error}") from error
        with self._changed:
            peer_group = None if self._peer_group is None else self._peer_group()
            current = self._current
            deciding = current is not None and current.decider is not None and peer in current.callers
            if deciding or (peer_group is not None and peer_group.is_open):
                raise MultipleRegister(f"peer {peer} is registered already: finish() or reset() that session first")
            if current is not None and (
                current.verdict is None  # else this one comes late, or begins another
                or (len(current.calls) < local and all(one.peer != peer for one in current.calls))
            ):
                attempt = current
            self._current = attempt
            attempt.calls.append(call)
            if attempt.verdict is None:
                attempt.callers.setdefault(peer, caller)
        try:
            if self._wait_for_verdict(attempt, call, local):
                self._conclude(attempt, *self._decide(attempt, caller, group))
        except BaseException as error:
            if attempt.decider is call:
                text = f"register: a peer gave up ({type(error).__name__}: {error})"
                self._conclude(attempt, failed(PeerLost, text), None)
            else:
                self._withdraw(attempt, call, caller)
            raise
        assert attempt.verdict is not None
        if attempt.verdict.error is not None:
            raise attempt.verdict.raised()
        assert attempt.peer_group is not None
        return attempt.peer_group

    def give_up(self, why: Verdict) -> None:
        """Ends the registration that is being made, if there is one, with the verdict `why`."""
        with self._changed:
            attempt, self._current = self._current, None
        if attempt is not None:
            self._conclude(attempt, why, None)
            self._nodes.give_up(why)

    def _withdraw(self, attempt: _Registration, call: Description, caller: Caller) -> None:
        """Takes back the call of a peer that was interrupted while it waited, unless it is being decided on."""
        with self._changed:
            if attempt.decider is None and attempt.verdict is None:
                attempt.calls.remove(call)
                if attempt.callers.get(call.peer) is caller:
                    del attempt.callers[call.peer]

    def _wait_for_verdict(self, attempt: _Registration, call: Description, local: int) -> bool:
        """Blocks until there is a verdict, or returns True if this caller must find it."""
        with self._changed:
            while attempt.verdict is None:
                left_s = attempt.until_s - time.monotonic()
                if attempt.decider is not None:
                    self._changed.wait(1.0)
                elif len(attempt.calls) >= local or left_s <= 0 or attempt.epoch_ended:
                    attempt.decider = call
                    return True
                else:
                    self._changed.wait(left_s)
        return False

    def _decide(
        self, attempt: _Registration, caller: Caller, group: LocalGroup | None
    ) -> tuple[Verdict, PeerGroup | None]:
        """Finds the verdict on a registration, and makes the peer group if that is no error."""
        with self._changed:
            calls, callers = list(attempt.calls), dict(attempt.callers)
        layout, devices = caller.layout, {peer: one.device for peer, one in callers.items()}
        verdict = _judge_here(calls, callers, layout)
        if attempt.epoch_ended:
            missing = [peer for peer in layout.peers if peer not in callers]
            who = f"; {peers_text(missing)} had not registered" if missing else ""
            verdict = failed(PeerLost, f"register: {attempt.epoch_ended}{who}")
        same_nodes = len({(one.layout, id(one.shared)) for one in callers.values()}) == 1
        peer_group: PeerGroup | None = None
        try:
            if layout.nodes > 1 and same_nodes:
                verdict, peer_group = self._nodes.register(
                    caller, calls, devices, verdict, attempt.until_s, self._disconnect
                )
            elif verdict is None:
                verdict = lost(calls, layout.peers, "register", caller.config.timeout_s)
            elif verdict.error is None:
                peer_group = PeerGroup(caller.config, layout, devices)
            if peer_group is not None and group is not None and layout.local > 1:
                group.on_epoch_end(peer_group, _end_with_group)
        except (RuntimeError, ValueError) as error:
            if verdict is None or verdict.error is None:
                kind = type(error) if isinstance(error, CollectiveSessionError) else PeerLost
                named = "" if kind is type(error) else f"{type(error).__name__}: "
                verdict = failed(kind, f"register: {named}{error}")
            if peer_group is not None:
                peer_group.abort(verdict)
            return verdict, None
        return verdict, peer_group

    def _conclude(self, attempt: _Registration, verdict: Verdict, peer_group: PeerGroup | None) -> None:
        """Records the verdict on a registration; only the first one counts."""
        if peer_group is not None:
            with _lock:
                _peer_groups.add(peer_group)
        with self._changed:
            given_up = attempt.verdict
            if given_up is None:
                attempt.verdict, attempt.peer_group = verdict, peer_group
                attempt.callers.clear()
                if peer_group is not None:  # else it stays, for the verdict on late callers
                    self._current, self._peer_group = None, weakref.ref(peer_group)
                self._changed.notify_all()
        if given_up is not None and peer_group is not None:
            peer_group.abort(given_up)
        elif attempt.epoch_ended and peer_group is not None:
            _end_with_group(peer_group, attempt.epoch_ended)

    def _disconnect(self) -> None:
        self._nodes.disconnect()
        with _lock:
            for key in [key for key, registry in _alone.items() if registry is self]:
                del _alone[key]


def reset() -> None:
    """Ends every session and every registration of this process, whatever their state, so that peers may register anew.

    Peers that wait in one raise SessionReset, on other nodes too, and so does every later operation of such a session.
    A peer that is connecting to other nodes to register raises after its timeout at the latest; one that had not come
    to a registration which another node has reset raises SessionReset when it does.
    """
    why = failed("SessionReset", "collective.reset() was called: the session is over, register again")
    with _lock:
        registries = {*_registries.values(), *_alone.values()}
        peer_groups = list(_peer_groups)
    for registry in registries:
        registry.give_up(why)
    for peer_group in peer_groups:
        peer_group.abort(why)


def _end_with_group(peer_group: PeerGroup, why: str) -> None:
    """Ends a session whose LocalGroup was closed, or one of whose ranks gave up (LocalGroup.run, abort)."""
    peer_group.abort(failed(PeerLost, f"the session is over: {why}"))


def registry_and_caller(
    group: object, config: CollectiveConfig, device: torch.device
) -> tuple[Registry, Caller, LocalGroup | None]:
    """Finds the registry of a group.

    Args:
        group: as given to `register`.
        config: the caller's options.
        device: where the caller's results are computed.

    Returns:
        The registry, the caller, and its LocalGroup if it has one.

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
        layout = NodeLayout(1, *rank_and_size(group))
        return _registry(group), Caller(config, device, layout, group, layout.nodes), None
    size = 1 if group is None else group.size
    node, nodes = 0, 1
    if shared is not None:
        node, nodes = rank_and_size(shared)
    elif config.global_rank is not None and config.global_world_size is not None:
        node, nodes = config.global_rank, config.global_world_size
    if node < 0:
        raise InvalidConfig("this process is not a member of global_group: register only on its members")
    caller = Caller(config, device, NodeLayout(size, node, nodes), shared, size)
    if group is not None or shared is not None:
        return _registry(shared if group is None else group), caller, group
    if config.global_address is None:
        return Registry(), caller, None
    with _lock:
        # One entry per node of one peer, so that registering twice is noticed.
        return _alone.setdefault((config.global_address, node), Registry()), caller, None


def _registry(key: Any) -> Registry:
    with _lock:
        return _registries.setdefault(key, Registry())


def _judge_here(calls: Sequence[Description], callers: Mapping[int, Caller], layout: NodeLayout) -> Verdict | None:
    """The verdict on the local peers' calls, which must agree in more than nodes must; None where some are missing."""
    if len(calls) < layout.local and len(callers) == len(calls):
        return None
    here = []
    for one in calls:
        caller = callers[one.peer]
        group = None if caller.shared is None else repr(caller.shared)
        settings = {**dict(one.settings), "global_rank": caller.config.global_rank, "global_group": group}
        here.append(dataclasses.replace(one, settings=tuple(settings.items())))
    return judge(here, "register")
