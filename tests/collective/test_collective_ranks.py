"""Collective sessions over processes: a torch.distributed group, and four processes of four peers each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support import collective_cases
from support.collective_cases import free_port
from support.ranks import RankPool


@pytest.fixture(scope="module", name="four")
def _four() -> Iterator[RankPool]:
    pool = RankPool(4)
    yield pool
    pool.close()


def test_four_processes_of_four_peers_as_upstream(four: RankPool) -> None:
    """Row 3.51: shape 4 x 64 x 512, mean, three pairs of strategies; and what upstream's launcher cannot do."""
    assert four.run(collective_cases.nodes_of_four) == [[]] * 4


def test_a_process_group(two: RankPool) -> None:
    """Results, handles, disagreements, latecomers; 500 operations; the store holds what it held before."""
    first, second = two.run(collective_cases.a_group_of_processes, 500)
    assert first == second
    shapes, dtypes, registered, operated, keys = first
    assert shapes == "operation 509 (all_reduce): shapes differ: (2,) on peer 0; (3,) on peer 1. Nothing was reduced"
    assert "dtypes differ: float32 on peer 0; int32 on peer 1" in dtypes
    assert registered == "register: peer 1 did not arrive within 0.2 s (called: register on peer 0)"
    assert operated == "operation 0: peer 1 did not arrive within 0.2 s (called: all_reduce on peer 0)"
    assert keys == "0 keys stayed"


def test_a_rank_that_agrees_and_does_not_come(two: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "told"
    two.run(collective_cases.ends_in_between, free_port(), str(path), False)
    _check_told(path)


def test_a_rank_that_dies_between_verdict_and_collective(two: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "told"
    with pytest.raises(AssertionError, match="rank 1:\nits process has ended"):
        two.run(collective_cases.ends_in_between, free_port(), str(path), True)
    _check_told(path)


def _check_told(path: Path) -> None:
    first, second = path.read_text().splitlines()
    assert first.startswith("PeerLost: operation 3: a node died, left or did not answer") and second == "PeerLost"
    assert "cannot be used any more: reset() it and register again" in first
