"""How many ranks each node has, and whether ranks are told the same."""

from __future__ import annotations

import pytest
import torch
from support.loopback import Loopback

from fusedreduce.comm.nodes import agreed_per_node, launched_per_node

CPU = torch.device("cpu")


def _told(rank: int, per_node: int) -> dict[str, str]:
    """What torchrun sets."""
    return {"RANK": str(rank), "LOCAL_RANK": str(rank % per_node), "LOCAL_WORLD_SIZE": str(per_node)}


@pytest.mark.parametrize("per_node", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("nodes", [1, 2, 5])
def test_all_ranks_of_a_job(per_node: int, nodes: int) -> None:
    members = range(nodes * per_node)
    assert {launched_per_node(members, rank, _told(rank, per_node)) for rank in members} == {per_node}


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ([0, 2, 4, 6], 2),  # one of two tensor-parallel ranks
        ([0, 4, 8, 12], 1),
        ([0, 1, 2, 3], 4),  # one node
        ([2, 3, 6, 7], 2),
        ([0, 1, 2, 4, 5], 1),  # three on one node, two on the next
        ([0, 1, 4, 5, 2, 3], 1),  # a node twice
        ([0, 4, 1, 5], 1),
        ([0], 1),
    ],
)
def test_some_ranks_of_a_job_with_four_per_node(members: list[int], expected: int) -> None:
    assert [launched_per_node(members, rank, _told(rank, 4)) for rank in members] == [expected] * len(members)


@pytest.mark.parametrize(
    "changed",
    [
        {"LOCAL_WORLD_SIZE": ""},
        {"LOCAL_WORLD_SIZE": "0"},
        {"LOCAL_WORLD_SIZE": "two"},
        {"LOCAL_WORLD_SIZE": "-2"},
        {"LOCAL_RANK": "0"},  # ranks are not numbered node by node
        {"RANK": "4"},  # not the rank of this group
        {"RANK": "9" * 5000},
    ],
)
def test_what_does_not_fit_together_says_nothing(changed: dict[str, str]) -> None:
    assert launched_per_node(range(8), 3, _told(3, 2)) == 2
    assert launched_per_node(range(8), 3, {**_told(3, 2), **changed}) == 1


@pytest.mark.parametrize(("peer", "expected"), [("2", 2), ("4", 1), ("1", 1)])
def test_ranks_that_are_told_different_numbers_have_no_nodes(
    monkeypatch: pytest.MonkeyPatch, peer: str, expected: int
) -> None:
    for name, value in _told(0, 2).items():
        monkeypatch.setenv(name, value)
    communicator = Loopback([torch.clone] * 3)
    communicator.payload = lambda rank, mine: peer.encode() if rank == 3 else mine
    assert agreed_per_node(communicator, range(4), 0, CPU) == expected
