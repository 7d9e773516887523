"""Carrier: starts what all peers agree on, on tensors that `tensors` has made flat, and hands out the results.

one node        all_reduce, reduce: a collective of a LocalGroup of its own, issued for all peers by one thread;
                broadcast: nothing moves, all read the source's copy
several nodes   the local tensors are reduced into one; that goes through the collective among nodes; all read it
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ..comm.local.group import LocalCommunicator, LocalGroup
from ..comm.local.strategies import Strategy
from ..comm.protocol import Pending
from ..comm.waiting import wait_for
from .config import CollectiveConfig
from .node_collectives import Wide, WidePending
from .payload import copies, empty_bytes, wire_op
from .verdicts import Description, Verdict


@dataclass(frozen=True)
class Place:
    """Where a node's peers stand among all: this `node` of `nodes`, with `local` peers each."""

    local: int
    node: int = 0
    nodes: int = 1

    @property
    def peers(self) -> range:
        """This node's."""
        return range(self.node * self.local, (self.node + 1) * self.local)

    @property
    def total(self) -> int:
        """Peers of all nodes."""
        return self.nodes * self.local


_AMONG_PEERS = "the collective among the peers of this node"


@dataclass
class Carried:
    """An operation whose data is on its way.

    Attributes:
        tensors: what each local peer brought; with `pendings`, where its result will be.
        pendings: of a collective among local peers.
        ranks: whose collective it is, by local peer.
        shared: where the one result of all local peers will be, otherwise.
        wide: the collective among nodes that it comes from.
        events: on CUDA, behind which everything that was brought may be read.
        spread: `shared` by device, and on CUDA behind which event; made by the first peer that asks.
    """

    tensors: dict[int, torch.Tensor]
    pendings: dict[int, Pending] = field(default_factory=dict)
    ranks: dict[int, LocalCommunicator] = field(default_factory=dict)
    shared: torch.Tensor | None = None
    wide: WidePending | None = None
    events: dict[int, torch.cuda.Event] = field(default_factory=dict)
    spread: dict[torch.device, tuple[torch.Tensor, torch.cuda.Event | None]] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def ready(self, peer: int) -> bool:
        """Whether `Carrier.result` would come without waiting."""
        if self.wide is not None:
            return self.wide.ready()
        return peer not in self.pendings or self.pendings[peer].ready()


class Carrier:
    """The data path of a node's peers.

    Args:
        config: with the strategies.
        place: of this node.
        devices: by peer.
        wide: collectives among nodes; None where there is one.
    """

    def __init__(
        self, config: CollectiveConfig, place: Place, devices: Mapping[int, torch.device], wide: Wide | None
    ) -> None:
        self._config = config
        self._place = place
        self._devices = dict(devices)
        self._wide = wide
        self._communicators: dict[Strategy, list[LocalCommunicator]] = {}

    def start(
        self,
        wants: Mapping[int, Description],
        tensors: dict[int, torch.Tensor],
        events: dict[int, torch.cuda.Event],
        verdict: Verdict,
    ) -> Carried:
        """Starts an operation, whoever calls this, on all local peers' tensors; one at a time, on all nodes in order.

        Args:
            wants: what the local peers want, by peer.
            tensors: what they brought, to be overwritten.
            events: on CUDA, behind which those may be read.
            verdict: that all want the same.
        """
        for peer, event in events.items():
            torch.cuda.current_stream(self._devices[peer]).wait_event(event)
        carried = Carried(tensors, events=events)
        want = next(iter(wants.values()))
        if want.kind == "broadcast":
            assert verdict.source is not None
            self._broadcast(carried, verdict.source)
        elif want.kind in ("all_reduce", "reduce"):
            self._reduce(carried, want)
        return carried

    def result(self, carried: Carried, peer: int) -> torch.Tensor | None:
        """What came of it for a peer, ordered before its current stream; others read it too.

        Raises:
            RuntimeError: a node died, left, or did not come within the timeout.
        """
        with carried.lock:
            if peer in carried.pendings:
                wait_for(carried.pendings[peer], _AMONG_PEERS, carried.ranks[peer])
                return carried.tensors[peer]
            if carried.shared is None:
                return None
            if carried.spread is None:
                carried.spread = self._spread(carried)
        tensor, event = carried.spread[self._devices[peer]]
        if event is not None:
            current = torch.cuda.current_stream(tensor.device)
            current.wait_event(event)
            tensor.record_stream(current)  # another thread's stream made it, and may free it
        return tensor

    def close(self) -> None:
        """Everything that was started has ended, everywhere."""
        if self._wide is not None:
            self._wide.close()
        self._wide = None

    def _broadcast(self, carried: Carried, source: Description) -> None:
        tensor = carried.tensors.get(source.peer)
        if tensor is None:
            tensor = empty_bytes(source, self._devices[self._place.peers[0]])
        if self._wide is not None and tensor.numel():
            carried.wide = self._wide.broadcast(tensor, source.peer // self._place.local)
        carried.shared = tensor

    def _reduce(self, carried: Carried, want: Description) -> None:
        assert want.op is not None
        op, place = wire_op(want.op), self._place
        tensors = [carried.tensors[peer] for peer in place.peers]
        root_node, root = divmod(want.root or 0, place.local)
        root = root if root_node == place.node else 0
        if not tensors[0].numel() or place.total == 1:
            carried.shared = tensors[root]
            return
        if self._wide is None and want.kind == "all_reduce":
            ranks = self._ranks(self._config.strategy)
            pendings = [rank.all_reduce(tensor, op) for rank, tensor in zip(ranks, tensors, strict=True)]
            carried.pendings = dict(zip(place.peers, pendings, strict=True))
            carried.ranks = dict(zip(place.peers, ranks, strict=True))
            return
        if place.local > 1:
            ranks = self._ranks(self._config.reduce_strategy)
            pendings = [rank.reduce(tensor, root, op) for rank, tensor in zip(ranks, tensors, strict=True)]
            if self._wide is None:
                carried.pendings = dict(zip(place.peers, pendings, strict=True))
                carried.ranks = dict(zip(place.peers, ranks, strict=True))
                return
            wait_for(pendings[root], _AMONG_PEERS, ranks[root])
        assert self._wide is not None
        carried.shared = tensors[root]
        if want.kind == "all_reduce":
            carried.wide = self._wide.all_reduce(tensors[root], op)
        else:
            carried.wide = self._wide.reduce(tensors[root], root_node, op)

    def _ranks(self, strategy: Strategy) -> list[LocalCommunicator]:
        """One communicator per local peer; whoever starts an operation uses them all."""
        if strategy not in self._communicators:
            group = LocalGroup(self._place.local, strategy=strategy, timeout_s=self._config.timeout_s)
            self._communicators[strategy] = group.communicators()
        return self._communicators[strategy]

    def _spread(self, carried: Carried) -> dict[torch.device, tuple[torch.Tensor, torch.cuda.Event | None]]:
        """The shared result on every device of this node, copied along the strategy."""
        for peer, event in carried.events.items():
            torch.cuda.current_stream(self._devices[peer]).wait_event(event)
        tensor = carried.shared
        if carried.wide is not None:
            assert self._wide is not None
            tensor = wait_for(carried.wide, "the collective among nodes", self._wide)
        assert tensor is not None
        devices = list(dict.fromkeys(self._devices.values()))
        source = devices.index(tensor.device)
        held = {source: tensor}
        if len(devices) > 1:
            for giver, taker in copies(self._config.broadcast_strategy, len(devices), source):
                held[taker] = held[giver].to(devices[taker], non_blocking=True)
        events = {
            index: torch.cuda.current_stream(one.device).record_event() if one.is_cuda else None
            for index, one in held.items()
        }
        return {devices[index]: (one, events[index]) for index, one in held.items()}
