"""The wrapper in asynchronous mode on 2 and 3 Gloo ranks that take their steps at different speeds."""

from __future__ import annotations

from typing import Any

import pytest
from parallel import async_cases
from support.ranks import RankPool


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_that_is_always_slower_is_passed(two: RankPool, three: RankPool, world: int) -> None:
    *quick, slow_stats = {2: two, 3: three}[world].run(async_cases.one_is_always_slower)
    for stats in quick:
        # Two more than the slowest rank had issued when it came last; of the rest all but the first wait merged.
        assert (stats["steps"], stats["contributions"], stats["merged_steps"]) == (51, 7, 43)
    assert slow_stats["steps"] == slow_stats["contributions"] == 6 and slow_stats["merged_steps"] == 0


@pytest.mark.parametrize(("wire", "max_in_flight"), [("native", 1), ("native", 3), ("bf16", 2)])
@pytest.mark.parametrize("world", [2, 3])
def test_the_sum_of_what_was_given_is_the_mean_of_everything(
    two: RankPool, three: RankPool, world: int, wire: str, max_in_flight: int
) -> None:
    {2: two, 3: three}[world].run(async_cases.sums, wire, max_in_flight)


@pytest.mark.parametrize("kind", ["momentum", "adamw", "adamw fused"])
def test_flush_makes_ranks_equal_and_tells_the_drift(two: RankPool, kind: str) -> None:
    found = two.run(async_cases.flush_makes_equal, kind)
    assert max(landed for _, landed in found) > 0


def test_flush_makes_three_ranks_equal(three: RankPool) -> None:
    three.run(async_cases.flush_makes_equal, "momentum")


def test_an_optimizer_that_has_not_stepped_everywhere_is_one_error(two: RankPool) -> None:
    texts = two.run(async_cases.an_optimizer_that_has_not_stepped_everywhere)
    assert len(set(texts)) == 1 and "momentum_buffer" in texts[0]


@pytest.mark.parametrize(
    "case",
    [
        async_cases.accumulates,
        async_cases.unused,
        async_cases.buffers,
        async_cases.clips,
        async_cases.resumes,
        async_cases.changes_mode,
        async_cases.errors_of_users,
        async_cases.stepped_already,
        async_cases.connects_before_backward,
        async_cases.new_group,
        async_cases.dead_peer,
        async_cases.late_for_flush,
        async_cases.refusals,
    ],
    ids=lambda case: case.__name__,
)
def test_it_goes_with_the_rest(two: RankPool, case: Any) -> None:
    two.run(case)


def test_an_overflow_stays_on_its_rank(two: RankPool) -> None:
    (skipped, scale), (other, its) = two.run(async_cases.scales)
    assert (skipped, scale) == (1, 2.0**7) and (other, its) == (0, 2.0**9)
