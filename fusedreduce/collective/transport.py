"""Transport: starts the operations that all peers agree on, on flat tensors (payload.py), and returns their results.

one node        all_reduce, reduce: a collective of a LocalGroup of its own, issued for all peers by one thread;
                broadcast: nothing moves, all peers read the source's copy
several nodes   the local tensors are reduced into one, on which the collective among nodes runs; all peers read it
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
from .node_collectives import NodeCollectives, NodePending
from .payload import copies, empty_bytes, wire_op
from .verdicts import Description, Verdict


@dataclass(frozen=True)
class NodeLayout:
    """How peers are distributed: this is node `node` of `nodes`, with `local` peers each."""

    local: int
    node: int = 0
    nodes: int = 1

    @property
    def peers(self) -> range:
        """The numbers of this node's peers."""
        return range(self.node * self.local, (self.node + 1) * self.local)

    @property
    def total(self) -> int:
        """Number of peers of all nodes."""
        return self.nodes * self.local


_AMONG_PEERS = "the collective among the peers of this node"


@dataclass
class Transfer:
    """The data of an operation.

    Attributes:
        tensors: by local peer, what it passed, to be overwritten; with `pendings`, where its result will be.
        events: by local peer, on CUDA, behind which its tensor may be read.
        pendings: by local peer, of a collective among local peers, with its communicator.
        shared: otherwise, where the one result for all local peers will be.
        among_nodes: the collective among nodes that `shared` comes from.
        spread: by device, a copy of `shared`, and on CUDA the event behind which it may be read; made by the first peer
            that asks for it.
    """

    tensors: dict[int, torch.Tensor] = field(default_factory=dict)
    events: dict[int, torch.cuda.Event] = field(default_factory=dict)
    pendings: dict[int, tuple[Pending, LocalCommunicator]] = field(default_factory=dict)
    shared: torch.Tensor | None = None
    among_nodes: NodePending | None = None
    spread: dict[torch.device, tuple[torch.Tensor, torch.cuda.Event | None]] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def is_complete(self, peer: int) -> bool:
        """Returns whether `Transport.result` would return, or raise, without blocking."""
        if self.among_nodes is not None:
            return self.among_nodes.ready()
        return peer not in self.pendings or self.pendings[peer][0].ready()


class Transport:
    """The data path of a node's peers.

    Args:
        config: its strategies and timeout are used.
        layout: of this node.
        devices: by peer.
        node_collectives: collectives among nodes; None where there is one node.
    """

    def __init__(
        self,
        config: CollectiveConfig,
        layout: NodeLayout,
        devices: Mapping[int, torch.device],
        node_collectives: NodeCollectives | None,
    ) -> None:
        self._config = config
        self._layout = layout
        self._devices = dict(devices)
        self._node_collectives = node_collectives
        self._communicators: dict[Strategy, list[LocalCommunicator]] = {}

    def start(self, transfer: Transfer, call: Description, verdict: Verdict) -> None:
        """Starts an operation for all local peers. Operations must be started one at a time, in order on all nodes.

        Args:
            transfer: with what the local peers passed.
            call: that of one of them.
            verdict: that all call the same.
        """
        for peer, event in transfer.events.items():
            torch.cuda.current_stream(self._devices[peer]).wait_event(event)
        if call.kind == "broadcast":
            assert verdict.source is not None
            self._broadcast(transfer, verdict.source)
        elif call.kind in ("all_reduce", "reduce"):
            self._reduce(transfer, call)

    def result(self, transfer: Transfer, peer: int) -> torch.Tensor | None:
        """Returns the result for a peer, on CUDA ready on its current stream; other peers read it too. Blocks.

        Raises:
            RuntimeError: a node died, left, or did not answer within the timeout.
        """
        with transfer.lock:
            if peer in transfer.pendings:
                pending, communicator = transfer.pendings[peer]
                wait_for(pending, _AMONG_PEERS, communicator)
                return transfer.tensors[peer]
            if transfer.shared is None:
                return None
            if transfer.spread is None:
                transfer.spread = self._spread(transfer)
        tensor, event = transfer.spread[self._devices[peer]]
        if event is not None:
            current = torch.cuda.current_stream(tensor.device)
            current.wait_event(event)
            tensor.record_stream(current)  # another thread's stream made it, and may free it
        return tensor

    def release(self) -> None:
        """Releases the collectives among nodes; everything that was started must have ended on all nodes."""
        if self._node_collectives is not None:
            self._node_collectives.release()
        self._node_collectives = None

    def _broadcast(self, transfer: Transfer, source: Description) -> None:
        tensor = transfer.tensors.get(source.peer)
        if tensor is None:
            tensor = empty_bytes(source, self._devices[self._layout.peers[0]])
        if self._node_collectives is not None and tensor.numel():
            transfer.among_nodes = self._node_collectives.broadcast(tensor, source.peer // self._layout.local)
        transfer.shared = tensor

    def _reduce(self, transfer: Transfer, call: Description) -> None:
        assert call.op is not None
        op, layout, nodes = wire_op(call.op), self._layout, self._node_collectives
        tensors = [transfer.tensors[peer] for peer in layout.peers]
        root_node, root = divmod(call.root or 0, layout.local)
        root = root if root_node == layout.node else 0
        if layout.local > 1 and tensors[0].numel():
            pendings: list[tuple[Pending, LocalCommunicator]]
            if nodes is None and call.kind == "all_reduce":
                ranks = self._ranks(self._config.strategy)
                pendings = [(rank.all_reduce(one, op), rank) for rank, one in zip(ranks, tensors, strict=True)]
            else:
                ranks = self._ranks(self._config.reduce_strategy)
                pendings = [(rank.reduce(one, root, op), rank) for rank, one in zip(ranks, tensors, strict=True)]
            if nodes is None:
                transfer.pendings = dict(zip(layout.peers, pendings, strict=True))
                return
            wait_for(pendings[root][0], _AMONG_PEERS, ranks[root])
        transfer.shared = tensors[root]
        if nodes is not None and tensors[root].numel():
            if call.kind == "all_reduce":
                transfer.among_nodes = nodes.all_reduce(tensors[root], op)
            else:
                transfer.among_nodes = nodes.reduce(tensors[root], root_node, op)

    def _ranks(self, strategy: Strategy) -> list[LocalCommunicator]:
        """One communicator per local peer; the thread that starts an operation uses them all."""
        if strategy not in self._communicators:
            group = LocalGroup(self._layout.local, strategy=strategy, timeout_s=self._config.timeout_s)
            self._communicators[strategy] = group.communicators()
        return self._communicators[strategy]

    def _spread(self, transfer: Transfer) -> dict[torch.device, tuple[torch.Tensor, torch.cuda.Event | None]]:
        """Copies the shared result to every device of this node, along the strategy."""
        for peer, event in transfer.events.items():
            torch.cuda.current_stream(self._devices[peer]).wait_event(event)
        tensor = transfer.shared
        if transfer.among_nodes is not None:
            assert self._node_collectives is not None
            tensor = wait_for(transfer.among_nodes, "the collective among nodes", self._node_collectives)
        assert tensor is not None
        devices = list(dict.fromkeys(self._devices.values()))
        source = devices.index(tensor.device)
        copied = {source: tensor}
        if len(devices) > 1:
            for begin, end in copies(self._config.broadcast_strategy, len(devices), source):
                copied[end] = copied[begin].to(devices[end], non_blocking=True)
        events = {
            index: torch.cuda.current_stream(one.device).record_event() if one.is_cuda else None
            for index, one in copied.items()
        }
        return {devices[index]: (one, events[index]) for index, one in copied.items()}
