"""Several ranks over NCCL: on as many GPUs, or, where there are fewer, on one that they share.

NCCL refuses two ranks on one GPU of one host, and knows hosts by NCCL_HOSTID: each of these ranks says another. So they
go through sockets. The same cases over Gloo are part of the ordinary tests.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gpu.nccl_cases import CASES, TWO_LEVELS, leave_what_is_lost, train
from support.ranks import RankPool


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """Joined in an NCCL group, which serves all tests."""
    pool = RankPool(request.param, {}, backend="nccl")
    yield pool
    pool.close()


def trained(ranks: RankPool, name: str) -> None:
    """Each rank has compared its gradients; all of them have the same bytes."""
    first, *others = ranks.run(train, name)
    assert len(set(first)) == CASES[name].steps, "each step has gradients of its own"
    assert all(other == first for other in others)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_over_gloo(two: RankPool, name: str) -> None:
    trained(two, name)


def test_four_ranks_over_gloo_in_two_levels(four: RankPool) -> None:
    trained(four, TWO_LEVELS)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_ranks_over_nccl(ranks: RankPool, name: str) -> None:
    trained(ranks, name)


@pytest.mark.gpu
@pytest.mark.parametrize("whole", ["this group", "the whole"])
def test_a_group_whose_peer_has_not_come_can_be_left(whole: str) -> None:
    """NCCL's destroy waits for kernels; torch's watchdog, which else ends the process first, is off."""
    ranks = RankPool(2, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, backend="nccl")
    try:
        assert ranks.run(leave_what_is_lost, whole) == [2.0, 2.0]
    finally:
        ranks.close()
