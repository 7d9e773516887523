"""What `@on_ranks` makes of a test: its arguments, its report where ranks fail, differ or hang."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import ranks
from support.ranks import RankPool, on_ranks


@pytest.fixture(params=["a", "b"])
def letter(request: pytest.FixtureRequest) -> str:
    value: str = request.param
    return value


@pytest.mark.parametrize("number", [1, 2])
@on_ranks(2)
def test_arguments_are_what_pytest_gives(rank: int, world: int, number: int, letter: str, tmp_path: Path) -> None:
    assert (world, dist.get_world_size(), dist.get_rank()) == (2, 2, rank)
    assert number in (1, 2) and letter in "ab" and tmp_path.is_dir()


@on_ranks()
@pytest.mark.parametrize(("world", "ranks_there"), [(2, 2), (3, 3)])
def test_the_number_of_ranks_may_be_a_parameter(rank: int, world: int, ranks_there: int) -> int:
    one = torch.ones(1)
    dist.all_reduce(one)
    assert one.item() == world == ranks_there
    return world


@pytest.fixture(scope="module")
def others(two: RankPool) -> RankPool:
    return two


@on_ranks(pool="others")
def test_the_pool_may_be_a_fixture_of_the_file(rank: int, world: int) -> None:
    assert world == 2


@on_ranks(2)
def fails(rank: int, world: int, number: int) -> None:
    assert number == rank, "why"


@on_ranks(2)
def differs(rank: int, world: int) -> tuple[str, int]:
    return "text", rank


@on_ranks(2)
def hangs(rank: int, world: int) -> None:
    if rank == 1:
        threading.Event().wait()


def _report(test: Any, request: pytest.FixtureRequest, **arguments: Any) -> str:
    with pytest.raises(pytest.fail.Exception) as raised:
        test(request, **arguments)
    return str(raised.value)


def test_a_failure_shows_values_and_where(request: pytest.FixtureRequest) -> None:
    report = _report(fails, request, number=0)
    assert report.startswith("rank 1:\nTraceback (most recent call last):\n") and "rank 0" not in report
    assert "in fails\n    assert number == rank" in report and "AssertionError: why\nassert 0 == 1" in report
    assert "_run_body" not in report, "nothing of what brought it there"


def test_ranks_that_return_different_values_are_a_failure(request: pytest.FixtureRequest) -> None:
    report = _report(differs, request)
    assert report == "ranks do not return the same:\nrank 0: ('text', 0)\nrank 1: ('text', 1)"


@pytest.mark.slow
def test_a_hang_shows_where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "CASE_TIMEOUT_S", 1.0)
    report = _report(hangs, request)
    assert "rank 1 did not answer:\n" in report and "test_on_ranks.py" in report and "in hangs" in report
