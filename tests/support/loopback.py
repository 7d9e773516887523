"""Communicators without processes: one rank with scripted peers, and a few ranks that are threads.

What is under way is poisoned with NaN until it is waited for, so nobody reads it early; every collective is recorded.

A Loopback's peers answer with what this rank says, so a wrong message meets its mirror: what ranks tell each other is
tested on ranks that differ, in a ThreadWorld.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusedreduce.comm.local.group import LocalCommunicator, LocalGroup
from fusedreduce.comm.protocol import Communicator, Pending, ReduceOp
from support.leaf_steps import ended

TIMEOUT_S = 10.25
# What a peer adds to a sum, given what this rank contributes.
Peer = Callable[[torch.Tensor], torch.Tensor]


def constant(value: float) -> Peer:
    """A peer that contributes `value` everywhere; as often as this rank where parameters in use are counted."""
    return lambda mine: mine.clone() if mine.dtype is torch.int32 else torch.full_like(mine, value)


def uses(*counts: int) -> Peer:
    """A peer that adds 0.5 to every sum, and uses each parameter as often as told."""
    wanted = torch.tensor(counts, dtype=torch.int32)
    return lambda mine: wanted.clone() if mine.dtype is torch.int32 else torch.full_like(mine, 0.5)


def half(mine: torch.Tensor) -> torch.Tensor:
    """A peer whose contribution is in proportion: small numbers stay small, and a loss scale is in it too."""
    return mine.clone() if mine.dtype is torch.int32 else mine * 0.5


class Counted:
    """The all-reduce of ones with which a join counts the ranks that still have inputs.

    Args:
        ranks: what it comes to.
    """

    def __init__(self, ranks: float) -> None:
        self._ranks = ranks

    def wait(self) -> None:
        """Returns at once: `result` is known from the beginning."""

    def result(self) -> list[torch.Tensor]:
        return [torch.tensor([self._ranks])]


# They differ, so a sum that leaves one out or takes one twice is noticed; powers of two, so bf16 holds them.
PEERS = (constant(0.5), constant(-2.0))


@dataclass(frozen=True)
class Call:
    """One collective: "all_reduce", "max", "sparse", "all_gather", "broadcast", "gather" or "aside"."""

    kind: str
    dtype: torch.dtype
    numel: int


class LoopbackPending:
    """Summed when it is waited for, not before."""

    def __init__(self, finish: Callable[[], torch.Tensor]) -> None:
        self._finish: Callable[[], torch.Tensor] | None = finish
        self._result: torch.Tensor | None = None
        self._told: list[Callable[[], None]] = []

    def notify(self, done: Callable[[], None]) -> None:
        if self._finish is None:
            done()
        else:
            self._told.append(done)

    def ready(self) -> bool:
        return self._finish is None

    def future(self) -> torch.futures.Future[list[torch.Tensor]]:
        self.wait()
        assert self._result is not None
        return ended([self._result])

    def wait(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            self._result = finish()
            for done in self._told:
                done()


class Loopback:
    """One rank whose peers are functions.

    Args:
        peers: what each of the other ranks adds.
        rank: this one's.

    `fail_issue` and `fail_wait`: number of the all-reduce, from 0, that cannot be issued or whose wait raises.
    """

    def __init__(self, peers: Sequence[Peer] = PEERS, rank: int = 0) -> None:
        self._peers = tuple(peers)
        self._rank = rank
        self.calls: list[Call] = []
        self.lost = ""
        self.under_way = 0
        self.may_wait = True
        self.fail_issue = -1
        self.fail_wait = -1
        self.aside: Callable[[str], list[str]] = lambda text: [text] * self.size
        self.payload: Callable[[int, bytes], bytes] = lambda rank, mine: mine
        self.order: Callable[[torch.Tensor], torch.Tensor] = lambda mine: mine
        self.numbers: Callable[[torch.Tensor], torch.Tensor] = lambda mine: mine
        self.gathered: Callable[[int, torch.Tensor], torch.Tensor] = lambda rank, mine: mine
        self.wires: list[weakref.ref[torch.Tensor]] = []

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return len(self._peers) + 1

    def timeout_s(self, device: torch.device | None = None) -> float:
        return TIMEOUT_S

    def check_wire(self, dtype: torch.dtype, device: torch.device) -> None:
        """Everything can be summed here."""

    def check_exchange(self, device: torch.device) -> None:
        """Everything can be exchanged here."""

    def waits_in_backward(self, device: torch.device) -> bool:
        return self.may_wait

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Pending:
        """The maximum: peers have what `numbers` makes of this rank's."""
        if op == "max":
            self.calls.append(Call("max", tensor.dtype, tensor.numel()))
            had = tensor.clone()
            return LoopbackPending(lambda: tensor.copy_(torch.maximum(had, self.numbers(had))))
        assert op == "sum", op
        number = self.count("all_reduce")
        self.calls.append(Call("all_reduce", tensor.dtype, tensor.numel()))
        self.wires.append(weakref.ref(tensor))
        if number == self.fail_issue:
            raise RuntimeError("Connection refused by peer")
        mine = tensor.clone()
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
        self.under_way += 1

        def finish() -> torch.Tensor:
            self.under_way -= 1
            if number == self.fail_wait:
                raise RuntimeError("Connection closed by peer")
            return tensor.copy_(self.total(mine))

        return LoopbackPending(finish)

    def reduce(self, tensor: torch.Tensor, root: int, op: ReduceOp = "sum") -> Pending:
        return self.all_reduce(tensor, op)

    def reduce_scatter(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> tuple[Pending, torch.Tensor]:
        return self.all_reduce(tensor, op), tensor.view(self.size, -1)[self._rank]

    def send(self, tensor: torch.Tensor, destination: int) -> Pending:
        raise NotImplementedError

    def recv(self, tensor: torch.Tensor, source: int) -> Pending:
        raise NotImplementedError

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> Pending:
        """Every peer sends what this rank would send itself."""
        self.calls.append(Call("all_to_all", input.dtype, input.numel()))
        parts = input.clone().view(self.size, -1)
        return LoopbackPending(lambda: output.view(self.size, -1).copy_(parts[self._rank].expand_as(parts)))

    def all_reduce_sparse(self, tensor: torch.Tensor) -> Pending:
        """Records the call and starts a sum that is `sparse_total`'s."""
        self.calls.append(Call("sparse", tensor.dtype, tensor.numel()))
        total = self.sparse_total(tensor)
        return LoopbackPending(lambda: total)

    def all_gather(self, tensor: torch.Tensor, into: torch.Tensor | None = None) -> tuple[Pending, torch.Tensor]:
        """Peers have what `gathered` makes of this rank's."""
        self.calls.append(Call("all_gather", tensor.dtype, tensor.numel()))
        mine = tensor.clone()
        ranks = [mine if rank == self._rank else self.gathered(rank, mine) for rank in range(self.size)]
        result = torch.empty(self.size * tensor.numel(), dtype=tensor.dtype) if into is None else into
        result = result.view(self.size, tensor.numel()).fill_(9)
        return LoopbackPending(lambda: result.copy_(torch.stack(ranks))), result

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        self.calls.append(Call("broadcast", tensor.dtype, tensor.numel()))
        tensor.copy_(self.order(tensor))

    def all_gather_bytes(self, payload: bytes, capacity_bytes: int, device: torch.device) -> list[bytes]:
        assert len(payload) <= capacity_bytes
        self.calls.append(Call("gather", torch.uint8, capacity_bytes))
        return [payload if rank == self._rank else self.payload(rank, payload) for rank in range(self.size)]

    def ranks_per_node(self, device: torch.device) -> int:
        return self.size

    def apart(self, devices: Collection[torch.device] = (), ranks: Sequence[int] | None = None) -> Loopback:
        return self

    def close(self) -> None:
        """Nothing to give back."""

    def compare_aside(self, key: str, text: str, device: torch.device) -> list[str]:
        self.calls.append(Call(f"aside {key}", torch.uint8, len(text)))
        return self.aside(text)

    def count(self, kind: str) -> int:
        """How many collectives of a kind there have been."""
        return Counter(call.kind for call in self.calls)[kind]

    def sparse_total(self, mine: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, where the n-th peer has n + 1 times this rank's values, n rows further down."""
        own = mine.coalesce()
        total = own
        for place in range(1, self.size):
            indices = own.indices().clone()
            indices[0] = (indices[0] + place) % own.shape[0]
            total = total + torch.sparse_coo_tensor(
                indices, own.values() * (place + 1), own.shape, check_invariants=True
            )
        return total.coalesce()

    def total(self, mine: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks."""
        total = mine.clone()
        for peer in self._peers:
            total += peer(mine)
        return total

    def mean(self, gradient: torch.Tensor, wire: torch.dtype | None = None) -> torch.Tensor:
        """What `gradient` must become: one division, one rounding to `wire`, the peers, one rounding back."""
        real = torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient
        compute = torch.float64 if real.dtype is torch.float64 else torch.float32
        packed = (real.detach().to(compute) / self.size).to(wire or real.dtype)
        mean = self.total(packed).to(real.dtype)
        return torch.view_as_complex(mean) if gradient.is_complex() else mean


class Group(Loopback):
    """A communicator whose peers contribute half of what this rank does.

    Args:
        size: number of ranks.
        rank: this one's.
        per_node: ranks of each node.
    """

    def __init__(self, size: int, rank: int, per_node: int = 1) -> None:
        super().__init__([half] * (size - 1), rank)
        self._per_node = per_node
        self.made: list[Group] = []
        self.closed = False

    def __repr__(self) -> str:
        return f"rank {self.rank} of {self.size}"

    def ranks_per_node(self, device: torch.device) -> int:
        return self._per_node

    def apart(self, devices: Collection[torch.device] = (), ranks: Sequence[int] | None = None) -> Group:
        members = range(self.size) if ranks is None else ranks
        self.made.append(Group(len(members), list(members).index(self.rank)))
        return self.made[-1]

    def close(self) -> None:
        self.closed = True


class ThreadPending:
    """One rank's part of a collective of a LocalGroup, whose result appears when it is waited for, not before."""

    def __init__(self, pending: Pending, written: torch.Tensor, result: torch.Tensor) -> None:
        self._pending = pending
        self._written = written
        self._result: torch.Tensor | None = result

    def notify(self, done: Callable[[], None]) -> None:
        self._pending.notify(done)

    def ready(self) -> bool:
        return self._pending.ready()

    def future(self) -> torch.futures.Future[list[torch.Tensor]]:
        self.wait()
        return ended([self._written])

    def wait(self) -> None:
        self._pending.wait()
        if self._result is not None:
            self._written.copy_(self._result)
            self._result = None


class ThreadRank(LocalCommunicator):
    """Another communicator in a LocalCommunicator's place, which records, and poisons what is under way."""

    def __init__(self, communicator: LocalCommunicator) -> None:
        super().__init__(communicator.group, communicator._channel, communicator._rank)
        self.calls: list[Call] = []

    def apart(self, devices: Collection[torch.device] = (), ranks: Sequence[int] | None = None) -> ThreadRank:
        return ThreadRank(super().apart(devices, ranks))

    def _issue(self, kind: str, *tensors: torch.Tensor, **options: Any) -> Any:
        if tensors:
            op = options.get("op") or "sum"
            self._record(kind if op == "sum" else op, tensors[0])
        if not tensors or tensors[0].is_sparse:
            return super()._issue(kind, *tensors, **options)
        hidden, written = [one.detach().clone() for one in tensors], tensors[-1].detach()
        written.fill_(float("nan") if written.is_floating_point() else 9)
        return ThreadPending(super()._issue(kind, *hidden, **options), written, hidden[-1])

    def _record(self, kind: str, tensor: torch.Tensor) -> None:
        self.calls.append(Call(kind, tensor.dtype, tensor.numel()))


class ThreadWorld:
    """`size` ranks that are threads of a LocalGroup."""

    def __init__(self, size: int) -> None:
        self.size = size

    def run(self, case: Callable[[Communicator], Any]) -> list[Any]:
        """`case(communicator)` on every rank at once; what each returned or raised, in rank order.

        A rank that raises does not abort the others: most of these cases are about errors that all ranks find.
        """

        def rank(communicator: LocalCommunicator) -> Any:
            try:
                return case(ThreadRank(communicator))
            except BaseException as error:
                return error

        with LocalGroup(self.size, timeout_s=TIMEOUT_S) as group:
            return group.run(rank)

    def results(self, case: Callable[[Communicator], Any]) -> list[Any]:
        """As `run`, but the first error is raised."""
        found = self.run(case)
        for one in found:
            if isinstance(one, BaseException):
                raise one
        return found
