"""What a user of torch's DistributedDataParallel relies on, of ours: on 2 and 3 Gloo ranks, torch's class beside it."""

from __future__ import annotations

import ddp_dropin_cases
import pytest
from ranks import RankPool

KEPT = ("view", "other", "alone", "own")


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("others_to_none", [False, True])
@pytest.mark.parametrize("how", KEPT)
@pytest.mark.parametrize("world", [2, 3])
def test_the_mean_of_a_kept_gradient_that_no_rank_uses_has_torchs_bits(
    two: RankPool, three: RankPool, world: int, how: str, others_to_none: bool, accumulates: bool
) -> None:
    for theirs, ours in {2: two, 3: three}[world].run(
        ddp_dropin_cases.kept_mean_is_torchs, how, others_to_none, accumulates
    ):
        assert theirs == ours


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("others_to_none", [False, True])
@pytest.mark.parametrize("how", KEPT)
@pytest.mark.parametrize("world", [2, 3])
def test_a_sum_leaves_a_kept_gradient_that_no_rank_uses(
    two: RankPool, three: RankPool, world: int, how: str, others_to_none: bool, accumulates: bool
) -> None:
    single = 0.699999988079071  # 0.7 as fp32
    for rank, found in enumerate(
        {2: two, 3: three}[world].run(ddp_dropin_cases.kept_sum, how, others_to_none, accumulates)
    ):
        kept = {"view": single, "other": 3 * 2.0**rank, "alone": single if rank == 0 else None, "own": 3 * 2.0**rank}[
            how
        ]
        assert found == [kept] * ddp_dropin_cases.STEPS


def test_in_a_static_graph_too(two: RankPool) -> None:
    for theirs, ours in two.run(ddp_dropin_cases.kept_static, "mean"):
        assert theirs == ours
    for rank, (_, ours) in enumerate(two.run(ddp_dropin_cases.kept_static, "sum")):
        assert ours == [3 * 2.0**rank] * ddp_dropin_cases.STEPS
