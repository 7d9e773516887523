"""What rank processes do for test_local_parity: the collectives of a LocalGroup's ranks, over torch.distributed."""

from __future__ import annotations

import pytest
import torch

from fusedreduce.comm.process_group import ProcessGroupCommunicator
from fusedreduce.comm.protocol import Communicator, Pending, ReduceOp

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NUMELS = (1, 7, 64, 1000, 40_001)
OPS: tuple[ReduceOp, ...] = ("sum", "max", "min", "product")


def contribution(rank: int, numel: int, dtype: torch.dtype, whole: bool) -> torch.Tensor:
    """What a rank brings, wherever it runs; `whole`: small integers, whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(rank * 7919 + numel)
    if whole:
        return torch.randint(-8, 9, (numel,), generator=generator).to(dtype)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


def everything(communicator: Communicator, whole: bool) -> list[torch.Tensor]:
    """The results of every collective that a reduction or a session needs."""
    rank, size, results = communicator.rank, communicator.size, []
    for op in OPS:  # as what ranks agree on travels
        numbers = contribution(rank, 100, torch.int64, True)
        communicator.all_reduce(numbers, op).wait()
        results.append(numbers)
    for dtype in DTYPES:
        for numel in NUMELS:
            one = contribution(rank, numel, dtype, whole)
            communicator.all_reduce(one).wait()
            results.append(one)
        for op in OPS[1:]:
            one = contribution(rank, 100, dtype, True)
            communicator.all_reduce(one, op).wait()
            results.append(one)
        for op in OPS[:2]:
            one = contribution(rank, 100, dtype, whole or op != "sum")
            communicator.reduce(one, size - 1, op).wait()
            results.append(one if rank == size - 1 else torch.zeros(0))
        one = contribution(rank, 100, dtype, whole)
        communicator.broadcast(one, size - 1)
        results.append(one)
        pending, rows = communicator.all_gather(contribution(rank, 100, dtype, whole))
        pending.wait()
        results.append(rows)
        source = contribution(rank, 12 * size, dtype, whole)
        output = torch.empty_like(source)
        communicator.all_to_all(output, source).wait()
        results.append(output)
        for op in OPS:
            one = contribution(rank, 12 * size, dtype, whole or op != "sum")
            pending, part = communicator.reduce_scatter(one, op)
            pending.wait()
            results.append(part.clone())
        results.append(around_the_ring(communicator, contribution(rank, 100, dtype, whole)))
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[rank, 2, 5, rank]]), contribution(rank, 4, torch.float32, True), (8,), check_invariants=True
    )
    under_way = communicator.all_reduce_sparse(sparse)
    under_way.wait()
    results.append(under_way.future().value()[0].to_dense())
    payload = communicator.all_gather_bytes(bytes([rank] * rank), 8, torch.device("cpu"))
    results.append(torch.tensor([len(one) for one in payload]))
    return results


def around_the_ring(communicator: Communicator, tensor: torch.Tensor) -> torch.Tensor:
    """What the rank before has sent: twice, so that the order of transfers counts."""
    rank, size = communicator.rank, communicator.size
    received = [torch.empty_like(tensor) for _ in range(2)]
    ended: list[int] = []
    under_way = [communicator.send(one, (rank + 1) % size) for one in (tensor, -tensor)]
    under_way += [communicator.recv(one, (rank - 1) % size) for one in received]
    for number, pending in enumerate(under_way):
        pending.notify(lambda number=number: ended.append(number))  # type: ignore[misc]
        pending.wait()
    assert ended == [0, 1, 2, 3] and torch.equal(received[1], -received[0])
    return received[0]


def over_torch(rank: int, world: int, whole: bool) -> list[torch.Tensor]:
    communicator = ProcessGroupCommunicator()
    assert communicator.waits_in_backward(torch.device("cpu"))
    pending = communicator.all_reduce(torch.ones(1))
    pending.wait()
    assert pending.ready()
    return everything(communicator, whole)


def peers_that_cannot_be(communicator: Communicator) -> None:
    for peer in (communicator.rank, -1, communicator.size, True, 0.0):
        for call, name in ((communicator.send, "destination"), (communicator.recv, "source")):
            with pytest.raises(
                ValueError, match=f"{name} must be one of 0 to {communicator.size - 1} and not this rank"
            ):
                call(torch.ones(1), peer)  # type: ignore[arg-type]


def rows_and_columns(rank: int, world: int, communicator: Communicator | None = None) -> list[list[float]]:
    """Collectives among ranks 0 and 1, 2 and 3, and 0 and 2, 1 and 3; what each has received."""
    whole = communicator or ProcessGroupCommunicator()
    row = whole.apart(ranks=[rank // 2 * 2, rank // 2 * 2 + 1])
    column = whole.apart(ranks=[rank % 2, rank % 2 + 2])
    twice = row.apart()
    assert (row.rank, column.rank, twice.rank) == (rank % 2, rank // 2, rank % 2)
    assert row.size == column.size == twice.size == 2
    found: list[torch.Tensor] = []
    flights: list[Pending] = []
    for one in (row, column, twice) if rank % 2 else (twice, column, row):
        sent, received, own = torch.arange(4.0) + 10 * rank, torch.empty(4), torch.empty(8)
        own[4 * one.rank : 4 * one.rank + 4] = sent
        total = sent + 0.5
        flights += [
            one.all_to_all(received, sent.clone()),
            one.all_gather(own[4 * one.rank :][:4], own)[0],
            one.all_reduce(total),
        ]
        if one.rank == 0:
            flights.append(one.send(sent, 1))
            last = sent
        else:
            last = torch.empty(4)
            flights.append(one.recv(last, 0))
        part = one.reduce_scatter(sent.clone())
        flights.append(part[0])
        found += [received, own, total, last, part[1]]
    for pending in flights:
        pending.wait()
    assert row.compare_aside("row", f"of {rank // 2}", torch.device("cpu")) == [f"of {rank // 2}"] * 2
    whole.all_reduce(torch.ones(1)).wait()
    for each in (twice, column, row):
        each.close()
    whole.all_reduce(torch.ones(1)).wait()
    return [one.tolist() for one in found]
