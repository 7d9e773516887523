"""A LocalGroup against torch.distributed (Gloo): the same contributions by rank, every collective."""

from __future__ import annotations

import pytest
import torch
from support import local_cases
from support.ranks import RankPool
from support.timeouts import PATIENT_S

from fusedreduce.comm.local.group import LocalGroup
from fusedreduce.comm.local.strategies import Centralized, Ring, Strategy, Tree


def _locally(size: int, strategy: Strategy, whole: bool) -> list[list[torch.Tensor]]:
    group = LocalGroup(size, strategy=strategy, timeout_s=30)
    return group.run(lambda communicator: local_cases.everything(communicator, whole))


@pytest.mark.parametrize("strategy", [Centralized(), Tree(2), Ring()], ids=str)
def test_two_peers_have_the_bits_of_two_ranks(two: RankPool, strategy: Strategy) -> None:
    _assert_equal(two.run(local_cases.over_torch, False), _locally(2, strategy, False))


@pytest.mark.parametrize("size", [3, 4])
def test_more_have_them_where_every_order_gives_the_same_sum(three: RankPool, four: RankPool, size: int) -> None:
    theirs = {3: three, 4: four}[size].run(local_cases.over_torch, True)
    for strategy in (Centralized(), Tree(2), Ring()):
        _assert_equal(theirs, _locally(size, strategy, True))


def test_a_part_of_a_reduce_scatter_has_the_bits_of_an_all_reduce(two: RankPool, three: RankPool) -> None:
    for ranks in (two, three):
        ranks.run(local_cases.scattered_as_reduced)


def test_peers_over_torch(two: RankPool) -> None:
    said, _ = two.run(local_cases.peers_over_torch)
    assert said.startswith("rank 0: a message of rank 1 failed after ")
    assert "Timed out waiting 10000ms for recv" in said


def test_ranks_are_split_into_rows_and_columns(four: RankPool) -> None:
    """Collectives of all of them at once, in another order on each rank."""
    with LocalGroup(4, timeout_s=PATIENT_S) as group:
        locally = group.run(lambda one: local_cases.rows_and_columns(one.rank, 4, one))
    for rank, (ours, theirs) in enumerate(zip(locally, four.run(local_cases.rows_and_columns), strict=True)):
        assert ours == theirs, rank


def test_groups_apart_come_and_go(two: RankPool) -> None:
    for before, after in two.run(local_cases.groups_apart):
        assert after <= before


def test_texts_are_compared_beside_the_collectives_with_one_verdict(two: RankPool) -> None:
    first, second = two.run(local_cases.exchanges_aside)
    assert first == second == ["exchange 'late' among 2 ranks: ranks [1] did not reach it within 0.1 s"]


def test_communicators_made_anew_do_not_read_what_was_written_before(two: RankPool) -> None:
    two.run(local_cases.groups_made_anew)


def _assert_equal(theirs: list[list[torch.Tensor]], ours: list[list[torch.Tensor]]) -> None:
    for rank, (their, our) in enumerate(zip(theirs, ours, strict=True)):
        for number, (one, other) in enumerate(zip(their, our, strict=True)):
            assert one.dtype == other.dtype and one.shape == other.shape
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), (rank, number, one, other)
