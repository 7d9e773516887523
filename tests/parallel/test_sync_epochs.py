"""Epochs of a SyncServer to which devices come at different times, as where no backward waits: what one of them has
done, given up or missed counts for the others in that epoch, and in no other."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from parallel.test_sync_server import Group, loss_of, threads, torch_path, values
from support.inside import inside

from fusedreduce import CollectiveError, FusedReduceError
from fusedreduce.comm.local.group import LocalCommunicator

__all__ = ["threads", "torch_path"]  # fixtures


@pytest.fixture(autouse=True)
def nobody_waits_in_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA: a backward ends with everything under way."""
    monkeypatch.setattr(LocalCommunicator, "waits_in_backward", lambda self, device: False)


def test_what_a_device_has_done_counts_where_it_has_closed_before_the_others_come() -> None:
    with Group(2) as group:
        group.works()
        first, second = group.devices
        for own in group.leaves:
            own[0].grad = None
        second.announce(loss := loss_of(group.leaves[1][0], 6.0))
        loss.backward()
        second.close()
        first.backward(loss_of(group.leaves[0][0], 2.0))
        assert values(group.leaves[0]) == [4.0, None]
        with pytest.raises(CollectiveError, match="device 1 is closed"):
            first.announce(None)
        group.devices[1] = group.start(1)
        group.works()


def test_who_starts_behind_an_epoch_that_was_given_up_before_anybody_came_does_not_hear_of_it() -> None:
    with Group(2) as group:
        group.works()
        group.devices[0].abort(ZeroDivisionError("planted"))
        group.devices[1].close()
        group.devices[1] = group.start(1)
        group.works()


def test_a_late_failure_is_none_of_those_who_have_gone_on_to_new_communicators(threads: ThreadPoolExecutor) -> None:
    with Group(2) as group:
        group.works()
        quick, slow = group.devices
        slow.announce(loss_of(group.leaves[1][0], 8.0))
        quick.announce(loss := loss_of(group.leaves[0][0], 8.0))
        loss.backward()  # all that slow needs of it in epoch 2
        quick.abort(ZeroDivisionError("early"))  # epoch 3
        for own in group.leaves:
            own[0].grad = None
        done = threads.submit(quick.backward, loss_of(group.leaves[0][0], 4.0))
        while quick.epoch < 4:
            time.sleep(1e-4)
        slow.abort(ZeroDivisionError("late"))
        with pytest.raises(CollectiveError, match="device 1: epoch 3 was given up: device 0 raised .*early"):
            slow.announce(None)
        slow.backward(None)
        done.result(60)
        assert values(group.leaves[0]) == [2.0, None]
        group.works()


def test_who_is_slow_hears_of_an_epoch_that_the_others_have_left_behind(threads: ThreadPoolExecutor) -> None:
    with Group(2) as group:
        group.works()
        quick, slow = group.devices
        for own in group.leaves:
            own[0].grad = None
        quick.abort(ZeroDivisionError("planted"))  # epoch 2
        done = threads.submit(quick.backward, loss_of(group.leaves[0][0], 4.0))
        while quick.epoch < 3:
            time.sleep(1e-4)
        with pytest.raises(CollectiveError, match="device 1: epoch 2 was given up: device 0 raised .*planted"):
            slow.announce(None)
        slow.backward(None)
        done.result(60)
        assert values(group.leaves[0]) == [2.0, None]


def test_a_server_closes_while_a_device_waits_for_the_others(threads: ThreadPoolExecutor) -> None:
    """In sync(), which holds the lock that closing its reducer takes."""
    with Group(2, timeout_s=35.5) as group:
        group.works()
        first = group.devices[0]
        first.announce(loss := loss_of(group.leaves[0][0], 1.0))
        loss.backward()
        waits = threads.submit(first.sync)
        lock = inside(first.reducer).lock
        while lock.acquire(blocking=False):
            lock.release()
            time.sleep(1e-4)
        threads.submit(group.server.close).result(30)  # a net: not when the device has waited in vain
        assert isinstance(waits.exception(30), FusedReduceError)
