"""perf/linear.py: what grows in proportion passes with noise on it, what grows faster does not."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import linear
import pytest

COUNTS = [10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000]


def noisy(cost: Callable[[float], float], seed: int, share: float = 0.1) -> list[float]:
    random_ = random.Random(seed)
    return [cost(count) * (1 + share * random_.uniform(-1, 1)) for count in COUNTS]


def test_a_line_is_found_exactly() -> None:
    found = linear.line(COUNTS, [3e-4 + 2e-6 * count for count in COUNTS])
    assert found.fixed_s == pytest.approx(3e-4)
    assert found.slope_s == pytest.approx(2e-6)
    assert found.judged == 5  # from 1,000 on; there the slope outweighs the fixed cost
    assert found.worst_ratio == pytest.approx(1)
    assert found.growth == pytest.approx(0, abs=1e-9)
    assert found.holds


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("fixed_s", [0.0, 1e-5, 1e-3, 1.0])
def test_noise_does_not_fail_a_line(fixed_s: float, seed: int) -> None:
    found = linear.line(COUNTS, noisy(lambda count: fixed_s + 2e-6 * count, seed))
    assert found.holds, found
    assert found.fixed_s >= 0


def test_one_point_hit_by_other_work_does_not_fail_a_line() -> None:
    for place, share in ((1, 5.0), (2, 0.1), (6, 1.3)):
        seconds = noisy(lambda count: 1e-5 + 2e-6 * count, 0, share=0.02)
        seconds[place] *= share
        found = linear.line(COUNTS, seconds)
        assert found.holds
        assert found.slope_s == pytest.approx(2e-6, rel=0.05)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    "cost",
    [
        lambda count: 1e-5 + 1e-6 * count**1.2,
        lambda count: 1e-6 * count**2,
        lambda count: 1e-4 + 2e-6 * count + 1e-10 * count**2,
        lambda count: 2e-6 * count * (1 if count < 50_000 else 3),  # a cliff at the end
        lambda count: 2e-6 * count * (3 if count < 50_000 else 1),
    ],
)
def test_what_grows_otherwise_fails(cost: Callable[[float], float], seed: int) -> None:
    found = linear.line(COUNTS, noisy(cost, seed))
    assert not found.holds, found
    assert found.why_not


def test_sorting_is_told_from_counting() -> None:
    found = linear.line(COUNTS, [1e-4 + 1e-7 * count * math.log(count) for count in COUNTS])
    assert found.growth == pytest.approx(0.11, abs=0.02)
    assert not found.holds


def test_a_cost_that_does_not_grow_is_linear_with_no_slope_worth_the_name() -> None:
    for seed in range(20):
        found = linear.line(COUNTS, noisy(lambda count: 1e-3, seed))
        assert found.holds, found
        assert found.slope_s * COUNTS[-1] < 0.3 * found.fixed_s
    assert not linear.line(COUNTS, [1e-3 * (1 + count % 7) for count in COUNTS]).holds
