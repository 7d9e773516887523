"""A LocalGroup against torch.distributed (Gloo): the same contributions by rank, every collective."""

from __future__ import annotations

import datetime
import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support import local_cases
from support.ranks import RankPool, on_ranks
from support.timeouts import PATIENT_S, after_the_others

from fusedreduce.comm.local.group import LocalGroup
from fusedreduce.comm.local.strategies import Centralized, Ring, Strategy, Tree
from fusedreduce.comm.process_group import ProcessGroupCommunicator
from fusedreduce.comm.waiting import wait_for
from fusedreduce.errors import CollectiveError


def _locally(size: int, strategy: Strategy, whole: bool) -> list[list[torch.Tensor]]:
    group = LocalGroup(size, strategy=strategy, timeout_s=30)
    return group.run(lambda communicator: local_cases.everything(communicator, whole))


@pytest.mark.parametrize("strategy", [Centralized(), Tree(2), Ring()], ids=str)
def test_two_peers_have_the_bits_of_two_ranks(two: RankPool, strategy: Strategy) -> None:
    _assert_equal(two.run(local_cases.over_torch, False), _locally(2, strategy, False))


def test_three_have_them_where_every_order_gives_the_same_sum(three: RankPool) -> None:
    theirs = three.run(local_cases.over_torch, True)
    for strategy in (Centralized(), Tree(2), Ring()):
        _assert_equal(theirs, _locally(3, strategy, True))


@pytest.mark.parametrize("world", [2, 3])
@on_ranks()
def test_a_part_of_a_reduce_scatter_has_the_bits_of_an_all_reduce(rank: int, world: int) -> None:
    """It is the tensor's own memory, and may be empty."""
    communicator = ProcessGroupCommunicator()
    for dtype in local_cases.DTYPES:
        for numel in (0, 1, 7, 1000):
            whole = local_cases.contribution(rank, numel * world, dtype, False)
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


@on_ranks(2)
def test_peers_over_torch(rank: int, world: int) -> None:
    """Peers that cannot be, and one that never answers."""
    # Connecting has to do with it too: Gloo's receives keep to the timeout with which their group was made.
    group = torch.distributed.new_group(timeout=datetime.timedelta(seconds=10))
    communicator = ProcessGroupCommunicator(group)
    local_cases.peers_that_cannot_be(communicator)
    if rank == 0:
        with pytest.raises(
            CollectiveError, match="(?s)^rank 0: a message of rank 1 failed after .*Timed out waiting 10000ms for recv"
        ):
            wait_for(communicator.recv(torch.ones(1), 1), "a message of rank 1", communicator)
    ProcessGroupCommunicator().all_reduce(torch.ones(1)).wait()
    torch.distributed.destroy_process_group(group)


def test_ranks_are_split_into_rows_and_columns(four: RankPool) -> None:
    """Collectives of all of them at once, in another order on each rank."""
    with LocalGroup(4, timeout_s=PATIENT_S) as group:
        locally = group.run(lambda one: local_cases.rows_and_columns(one.rank, 4, one))
    for rank, (ours, theirs) in enumerate(zip(locally, four.run(local_cases.rows_and_columns), strict=True)):
        assert ours == theirs, rank


@on_ranks(2)
def test_groups_apart_come_and_go(rank: int, world: int) -> None:
    """Three in a row, though one rank has made and destroyed groups of its own; threads are back in the end."""
    cpu, communicator = torch.device("cpu"), ProcessGroupCommunicator()
    communicator.all_reduce(torch.ones(1)).wait()
    threads = len(os.listdir("/proc/self/task"))
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
    assert len(os.listdir("/proc/self/task")) <= threads


@on_ranks(2)
def test_texts_are_compared_beside_the_collectives_with_one_verdict(rank: int, world: int) -> None:
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
    one.timeout_s = lambda device=None: 0.1  # type: ignore[method-assign]  # it passes before anybody else comes
    with after_the_others(rank == 1), pytest.raises(CollectiveError) as told:
        one.compare_aside("late", "", cpu)
    assert str(told.value) == "exchange 'late' among 2 ranks: ranks [1] did not reach it within 0.1 s"
    for each in (one, other):
        each.close()


@on_ranks(2)
def test_communicators_made_anew_do_not_read_what_was_written_before(rank: int, world: int) -> None:
    cpu = torch.device("cpu")
    for number in range(3):
        first, second = ProcessGroupCommunicator(), ProcessGroupCommunicator()
        for one in (second, first):
            assert one.compare_aside("key", f"{number} {rank}", cpu) == [f"{number} {peer}" for peer in range(world)]


def _assert_equal(theirs: list[list[torch.Tensor]], ours: list[list[torch.Tensor]]) -> None:
    for rank, (their, our) in enumerate(zip(theirs, ours, strict=True)):
        for number, (one, other) in enumerate(zip(their, our, strict=True)):
            assert one.dtype == other.dtype and one.shape == other.shape
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), (rank, number, one, other)
