"""Two processes that share a GPU, and the same two on CPU: what one process alone, whose plan measures nothing, leaves
out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gpu import rank_cases
from support.ranks import RankPool

STEPS = 15  # costs are agreed on between the 13th and the 14th
# Of kernels that take us, launched by a busy host; the wait for the end of backward, which is not theirs, takes more.
MOST_UNPACK_MS = 1.0


@pytest.fixture(scope="module")
def spawned() -> Iterator[RankPool]:
    """Not forked: from a process that has looked for GPUs, which does not work with CUDA."""
    pool = RankPool(2, {})
    yield pool
    pool.close()


def trained(ranks: RankPool, device_type: str) -> float:
    """Training ends with the same weights on both ranks; what the planner takes unpacking for, in ms."""
    first, second = ranks.run(rank_cases.train, device_type, STEPS)
    assert first["weights"] == second["weights"] and len(set(first["weights"])) == STEPS
    assert {first["path"], second["path"]} == {"triton" if device_type == "cuda" else "torch"}
    return float(first["unpack_ms"])


def test_two_processes_train_alike_with_sums_through_the_host(two: RankPool) -> None:
    assert trained(two, "cpu") > 0


@pytest.mark.gpu
def test_two_processes_on_one_gpu_train_alike_and_unpacking_is_no_waiting(spawned: RankPool) -> None:
    assert 0 < trained(spawned, "cuda") < MOST_UNPACK_MS


@pytest.mark.gpu
def test_cuda_tensors_over_gloo_are_refused(spawned: RankPool) -> None:
    for said in spawned.run(rank_cases.over_gloo):
        assert said.startswith("UnsupportedWireError: ") and "gloo" in said
