"""What rank processes do for test_local_parity: the collectives of a LocalGroup's ranks, over torch.distributed."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fusedreduce.comm.process_group import ProcessGroupCommunicator
from fusedreduce.comm.protocol import Communicator, Pending, ReduceOp
from fusedreduce.comm.waiting import wait_for
from fusedreduce.errors import CollectiveError
from support.timeouts import after_the_others

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


def scattered_as_reduced(rank: int, world: int) -> None:
    """A reduce-scatter's part has the bits of an all-reduce, is the tensor's own memory, and may be empty."""
    communicator = ProcessGroupCommunicator()
    for dtype in DTYPES:
        for numel in (0, 1, 7, 1000):
            whole = contribution(rank, numel * world, dtype, False)
            one = whole.clone()
            communicator.all_reduce(whole).wait()
            pending, part = communicator.reduce_scatter(one)
            pending.wait()
            assert pending.ready() and part.shape == (numel,)
            assert part.data_ptr() == one[rank * numel :].data_ptr()
            wanted = whole[rank * numel : (rank + 1) * numel]
            assert torch.equal(part.view(torch.uint8), wanted.view(torch.uint8))
    with pytest.raises(ValueError, match=f"{world + 1} elements cannot be divided among {world} ranks"):
        communicator.reduce_scatter(torch.ones(world + 1))


def peers_that_cannot_be(communicator: Communicator) -> None:
    for peer in (communicator.rank, -1, communicator.size, True, 0.0):
        for call, name in ((communicator.send, "destination"), (communicator.recv, "source")):
            with pytest.raises(
                ValueError, match=f"{name} must be one of 0 to {communicator.size - 1} and not this rank"
            ):
                call(torch.ones(1), peer)  # type: ignore[arg-type]


def peers_over_torch(rank: int, world: int) -> str:
    """Peers that cannot be, and one that never answers."""
    # Connecting has to do with it too: Gloo's receives keep to the timeout with which their group was made.
    group = torch.distributed.new_group(timeout=datetime.timedelta(seconds=10))
    communicator, said = ProcessGroupCommunicator(group), ""
    peers_that_cannot_be(communicator)
    if rank == 0:
        try:
            wait_for(communicator.recv(torch.ones(1), 1), "a message of rank 1", communicator)
        except CollectiveError as error:
            said = str(error)
    ProcessGroupCommunicator().all_reduce(torch.ones(1)).wait()
    torch.distributed.destroy_process_group(group)
    return said


def groups_apart(rank: int, world: int) -> Sequence[int]:
    """Three in a row, though one rank has made and destroyed groups of its own; threads are back in the end."""
    cpu, threads = torch.device("cpu"), []
    communicator = ProcessGroupCommunicator()
    communicator.all_reduce(torch.ones(1)).wait()
    threads.append(len(os.listdir("/proc/self/task")))
    for number in range(3):
        if rank == 1 and number < 2:
            torch.distributed.destroy_process_group(torch.distributed.new_group([rank], use_local_synchronization=True))
        one, apart = torch.tensor([float(rank)]), communicator.apart()
        assert apart.rank == rank and apart.size == world and apart.timeout_s(cpu) == communicator.timeout_s(cpu)
        # Its collectives keep no place relative to the other's.
        other = communicator.all_reduce(torch.ones(1)) if rank == 0 else None
        apart.all_reduce(one).wait()
        other = other or communicator.all_reduce(torch.ones(1))
        other.wait()
        assert one.item() == world * (world - 1) / 2
        assert apart.compare_aside("key", f"{number} {rank}", cpu) == [f"{number} {one}" for one in range(world)]
        apart.close()
        apart.close()
        del apart
    communicator.close()
    communicator.all_reduce(torch.ones(1)).wait()
    threads.append(len(os.listdir("/proc/self/task")))
    return threads


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


def exchanges_aside(rank: int, world: int) -> list[str]:
    """Two threads of a rank at once; nothing stays in the store; who comes late reads what the others were told."""
    cpu, communicator = torch.device("cpu"), ProcessGroupCommunicator()
    one, other = communicator.apart(), communicator.apart()
    # torch.distributed has no group without a store.
    store = torch.distributed.distributed_c10d._get_process_group_store(one.group)
    kept = []
    for turn in range(20):
        order = [one, other] if rank % 2 else [other, one]
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(order[0].compare_aside, f"turn {turn}", f"{rank} of {turn}", cpu)
            time.sleep(0.01)
            second = order[1].compare_aside(f"turn {turn}", f"{rank} of {turn}", cpu)
            assert first.result() == second == [f"{peer} of {turn}" for peer in range(world)]
        communicator.all_reduce(torch.ones(1)).wait()
        kept.append(store.num_keys())
        communicator.all_reduce(torch.ones(1)).wait()
    assert len(set(kept)) == 1, kept
    told = []
    one.timeout_s = lambda device=None: 0.1  # type: ignore[method-assign]  # it passes before anybody else comes
    with after_the_others(rank == 1):
        try:
            one.compare_aside("late", "", cpu)
        except CollectiveError as error:
            told.append(str(error))
    for each in (one, other):
        each.close()
    return told


def groups_made_anew(rank: int, world: int) -> None:
    """A group that has the store of one before: what was written there is not read again."""
    cpu = torch.device("cpu")
    for number in range(3):
        first, second = ProcessGroupCommunicator(), ProcessGroupCommunicator()
        for one in (second, first):
            assert one.compare_aside("key", f"{number} {rank}", cpu) == [f"{number} {peer}" for peer in range(world)]
