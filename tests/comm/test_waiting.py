"""wait_for: what it raises, after how long, and what it leaves behind."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from support.loopback import Loopback, LoopbackPending

from fusedreduce import CollectiveError, NonFiniteGradientError
from fusedreduce.comm import waiting
from fusedreduce.comm.waiting import wait_for


def test_a_collective_that_fails_names_rank_what_and_seconds_and_its_group_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    communicator = Loopback(rank=2)
    asked: list[None] = []
    now_s = [5.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])

    def fail() -> torch.Tensor:
        now_s[0] += 7.25
        raise RuntimeError("Connection closed by peer")

    def what() -> str:
        asked.append(None)
        return "the all-reduce of bucket 3"

    wait_for(LoopbackPending(lambda: torch.ones(1)), what, communicator)
    assert not asked and not communicator.lost, "a text is made where it is needed only"
    with pytest.raises(CollectiveError, match=r"^rank 2: the all-reduce of bucket 3 failed after 7\.2 s") as caught:
        wait_for(LoopbackPending(fail), what, communicator)
    assert "Connection closed by peer" in str(caught.value) and isinstance(caught.value.__cause__, RuntimeError)
    assert communicator.lost == str(caught.value)
    with pytest.raises(CollectiveError, match="bucket 4 failed"):
        wait_for(LoopbackPending(fail), "the all-reduce of bucket 4", communicator)
    assert communicator.lost == str(caught.value), "the first one is why the others failed"


def test_a_future_gives_its_value() -> None:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(torch.ones(2))
    assert wait_for(future, "it", Loopback()).tolist() == [1.0, 1.0]


def test_a_future_that_nobody_completes_is_given_up_after_the_groups_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    communicator = Loopback()
    monkeypatch.setattr(communicator, "timeout_s", lambda device=None: 0.1)
    monkeypatch.setattr(waiting, "_GRACE_S", 0.1)
    with pytest.raises(CollectiveError, match=r"the hook's future failed after [\d.]+ s.* within 0\.1 s"):
        wait_for(torch.futures.Future(), "the hook's future", communicator)
    assert communicator.lost


@pytest.mark.parametrize("error", [NonFiniteGradientError("ours"), CollectiveError("ours"), ValueError("theirs")])
def test_an_error_of_ours_that_a_callback_has_left_in_a_future_is_raised_as_it_is(error: Exception) -> None:
    communicator = Loopback()
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_exception(error)
    with pytest.raises(type(error), match=r"^(ours|theirs)$"):
        wait_for(future, "it", communicator)
    assert bool(communicator.lost) == isinstance(error, CollectiveError)
