"""Agreement and the stall monitor, without a process group: fake peers and a fake clock."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusedreduce.comm.agreement import CAPACITY_BYTES, agree
from fusedreduce.comm.monitor import StallMonitor
from fusedreduce.errors import AgreementError, FusedReduceError

CPU = torch.device("cpu")


@dataclass
class FakePeers:
    """A communicator whose peers have already sent something."""

    others: list[bytes]
    rank: int = 0

    @property
    def size(self) -> int:
        return len(self.others) + 1

    def all_gather_bytes(self, payload: bytes, capacity_bytes: int, device: torch.device) -> list[bytes]:
        assert len(payload) <= capacity_bytes
        return [payload, *self.others]


def _agree(mine: dict[str, Any], *others: Any) -> None:
    sent = [one if isinstance(one, bytes) else json.dumps(one).encode() for one in others]
    peers: Any = FakePeers(sent)
    agree(peers, "options of fused_hook", mine, CPU)


def test_equal_settings_agree() -> None:
    _agree({"wire": "bf16", "n": 1}, {"n": 1, "wire": "bf16"}, {"wire": "bf16", "n": 1})


def test_every_differing_field_is_named_with_ranks_and_values() -> None:
    with pytest.raises(AgreementError) as caught:
        _agree({"wire": "bf16", "n": 1, "same": 2}, {"wire": "fp16", "n": 1, "same": 2}, {"wire": "bf16", "same": 2})
    message = str(caught.value)
    assert 'wire: "bf16" on ranks 0, 2; "fp16" on rank 1' in message
    assert "n: 1 on ranks 0, 1; nothing on rank 2" in message
    assert "same:" not in message and "options of fused_hook" in message
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, FusedReduceError)


@given(st.lists(st.sampled_from(["native", "bf16", "fp16"]), min_size=1, max_size=40))
def test_all_ranks_come_to_the_same_verdict(wires: list[str]) -> None:
    sent = [json.dumps({"wire": wire}).encode() for wire in wires]
    messages = set()
    for rank in range(len(wires)):

        class Same(FakePeers):
            def all_gather_bytes(self, payload: bytes, capacity_bytes: int, device: torch.device) -> list[bytes]:
                return self.others

        peers: Any = Same(sent, rank)
        try:
            agree(peers, "options", {"wire": wires[rank]}, CPU)
            messages.add("agreed")
        except AgreementError as error:
            messages.add(str(error))
    assert len(messages) == 1 and (messages == {"agreed"}) == (len(set(wires)) == 1)


@pytest.mark.parametrize("garbage", [b"\x80\x04pickle", b"[1, 2]", b"", b"7", b"{", b"\xff"])
def test_what_is_no_json_object_is_refused_and_never_unpickled(garbage: bytes) -> None:
    with pytest.raises(AgreementError, match="another program in this group"):
        _agree({"wire": "bf16"}, garbage)


def test_settings_that_do_not_fit_are_our_own_mistake() -> None:
    from fusedreduce.comm.distributed import ProcessGroupCommunicator

    communicator = ProcessGroupCommunicator.__new__(ProcessGroupCommunicator)
    with pytest.raises(ValueError, match="does not fit"):
        communicator.all_gather_bytes(b"x" * (CAPACITY_BYTES + 1), CAPACITY_BYTES, CPU)


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_an_overdue_bucket_is_named_once_and_a_finished_one_never(caplog: pytest.LogCaptureFixture) -> None:
    clock, finished = Clock(), {"slow": False, "quick": True}
    monitor = StallMonitor(poll_s=3600.0, clock=clock)
    monitor.watch("slow", "rank 1: the reduction of bucket 3", lambda: finished["slow"], 10.0)
    monitor.watch("quick", "bucket 4", lambda: finished["quick"], 10.0)
    with caplog.at_level(logging.ERROR):
        clock.now += 9.9
        assert monitor.look() == 1 and not caplog.records
        clock.now += 0.2
        assert monitor.look() == 1 and monitor.look() == 1
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "rank 1: the reduction of bucket 3 has not finished after 10.1 s" in caplog.records[0].message
    finished["slow"] = True
    assert monitor.look() == 0


def test_a_buckets_next_step_starts_its_time_anew(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    monitor = StallMonitor(poll_s=3600.0, clock=clock)
    for _ in range(5):
        monitor.watch("bucket", "bucket 0", lambda: False, 10.0)
        clock.now += 8.0
        assert monitor.look() == 1
    assert not caplog.records
    monitor.forget_all()
    assert monitor.look() == 0


def test_the_thread_ends_when_nothing_is_left() -> None:
    monitor = StallMonitor(poll_s=0.01)
    monitor.watch("bucket", "bucket 0", lambda: True, 10.0)
    thread = monitor._thread
    if thread is not None:
        thread.join(10)
        assert not thread.is_alive()
    assert monitor._thread is None
