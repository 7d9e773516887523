"""What is not finite: who had it, where, and which step says so; every surface that looks for it."""

from __future__ import annotations

import contextlib
import math

import pytest
from support.surfaces import Make, cells, own_pace, stale, whole

from fusedreduce.buckets.stats.non_finite import Culprit, NonFiniteReport
from fusedreduce.config import SyncMode
from fusedreduce.errors import NonFiniteGradientError

pytestmark = pytest.mark.usefixtures("path")


def looks(surface: str, mode: SyncMode) -> bool:
    """Ranks with a pace of their own do not meet in a step, to tell each other."""
    return not own_pace(surface, mode)


@cells(looks, wires=("native", "fp16", "int8"))
def test_all_are_told_of_the_step_that_lands_it(make: Make) -> None:
    _told(make, "count")


@cells(looks, whole, wires=("native", "fp16", "int8"))
def test_all_raise_in_the_step_that_lands_it_and_the_next_one_is_right(make: Make) -> None:
    """DataParallel gives up what is in flight with a backward that raises: test_resuming_after_an_error."""
    _told(make, "raise")


def _told(make: Make, check: str) -> None:
    """In a weight that no other rank uses."""
    loop = make(check_finite=check, unused=True)
    bad = loop.ranks - 1
    used, of_ranks = [[0, 2], [0, 2]], [1.0] * loop.ranks
    used[bad], of_ranks[bad] = [1], math.inf
    report = NonFiniteReport(3, (Culprit(bad, "parts.1", 0),), ("parts.1",))
    for number in range(4 + loop.late):
        loop.optimizer.zero_grad()
        raises = pytest.raises(NonFiniteGradientError, match=rf"step 3: .*rank {bad}, parts\.1, element 0")
        with raises if check == "raise" and number == 2 + loop.late else contextlib.nullcontext():
            loop.backward(*(of_ranks if number == 2 else [number + 1.0] * 2), used=used)
        assert loop.non_finite() == [report] * (number >= 2 + loop.late), number
    assert loop.gradients() == loop.mean(4.0, 4.0, used=used)


@cells(stale, whole)
def test_flush_raises_for_the_step_that_it_lands_and_can_go_on(make: Make) -> None:
    loop = make(check_finite="raise")
    for number in range(loop.late):
        loop.backward(math.nan if number == 0 else 3.0)
    with pytest.raises(NonFiniteGradientError, match="step 1: "):
        loop.wrapper.flush()
    loop.optimizer.zero_grad()
    assert loop.wrapper.flush().steps == loop.late - 1
    assert loop.gradient() == (3.0 * (loop.late - 1) or None)
