"""Collective sessions over processes: a torch.distributed group, and four processes of four peers each."""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import collective_cases
from support.collective_cases import caught, free_port, good, run_threads
from support.ranks import RankPool, on_ranks

from fusedreduce.collective import Centralized, CollectiveConfig, LocalGroup, Ring, Tree, register
from fusedreduce.comm.local.strategies import Strategy


@pytest.mark.parametrize(
    ("strategy", "others"), [(Tree(2), Tree(2)), (Tree(2), Ring()), (Centralized(), Centralized())], ids=str
)
@on_ranks(4)
def test_four_processes_of_four_peers_as_upstream(rank: int, world: int, strategy: Strategy, others: Strategy) -> str:
    """Row 3.51: shape 4 x 64 x 512, mean, three pairs of strategies; and what upstream's launcher cannot do."""
    whole = dist.distributed_c10d._get_default_group()
    config = CollectiveConfig(
        world_size=4,
        timeout_s=30,
        global_group=whole,
        strategy=strategy,
        reduce_strategy=others,
        broadcast_strategy=others,
    )
    group = LocalGroup(4)
    seeds = [torch.Generator().manual_seed(peer) for peer in range(4 * world)]
    values = [torch.randn(4, 64, 512, generator=seed, device="cpu") for seed in seeds]
    expected = torch.stack(values).double().mean(0)

    def case(peer: int) -> str:
        with register(peer, "cpu", config, group) as session:
            mean = session.all_reduce(values[peer], "mean")
            assert torch.allclose(mean.double(), expected, rtol=0, atol=1e-6)
            total = session.reduce(torch.full((3,), float(peer), device="cpu"), "sum", root=5)
            assert (total is not None) == (peer == 5)
            assert total is None or torch.equal(total, torch.full((3,), 120.0))
            sent = session.broadcast(torch.arange(3.0) if peer == 6 else None)
            assert torch.equal(sent, torch.arange(3.0))
            error = caught(lambda: session.all_reduce(torch.ones(2 if peer == 9 else 3)))
            assert "(2,) on peer 9" in str(error), error
            good(session, 2)
            return hashlib.blake2b(mean.numpy().tobytes()).hexdigest()

    found = run_threads([partial(case, 4 * rank + local) for local in range(4)])
    assert isinstance(found[0], str) and found == found[:1] * 4, found
    return found[0]


def test_a_process_group(two: RankPool) -> None:
    """Results, handles, disagreements, latecomers; 100 operations; the store holds what it held before."""
    first, second = two.run(collective_cases.a_group_of_processes, 100)
    assert first == second
    shapes, dtypes, registered, operated, keys = first
    assert shapes == "operation 109 (all_reduce): shapes differ: (2,) on peer 0; (3,) on peer 1. Nothing was reduced"
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
