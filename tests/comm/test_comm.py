"""Agreement and the stall monitor, without a process group: fake peers and a fake clock."""

from __future__ import annotations

import ctypes
import json
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from fusedreduce.comm import stall_monitor
from fusedreduce.comm.agreement import CAPACITY_BYTES, agree
from fusedreduce.comm.stall_monitor import StallMonitor, stall_report_after_s
from fusedreduce.comm.store_exchange import KeyPrefixes
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
    with pytest.raises(AgreementError, match="another program does"):
        _agree({"wire": "bf16"}, garbage)


def test_settings_that_do_not_fit_are_our_own_mistake() -> None:
    from fusedreduce.comm.process_group import ProcessGroupCommunicator

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
    monitor.watch("slow", "rank 1: the reduction of bucket 3", lambda: finished["slow"], 10.0, CPU)
    monitor.watch("quick", "bucket 4", lambda: finished["quick"], 10.0, CPU)
    with caplog.at_level(logging.ERROR):
        clock.now += 9.9
        assert monitor.poll() == 1 and not caplog.records
        clock.now += 0.2
        assert monitor.poll() == 1 and monitor.poll() == 1
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "rank 1: the reduction of bucket 3 has not finished after 10.1 s" in caplog.records[0].message
    finished["slow"] = True
    assert monitor.poll() == 0


def test_a_buckets_next_step_starts_its_time_anew(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    monitor = StallMonitor(poll_s=3600.0, clock=clock)
    for _ in range(5):
        monitor.watch("bucket", "bucket 0", lambda: False, 10.0, CPU)
        clock.now += 8.0
        assert monitor.poll() == 1
    assert not caplog.records


def test_a_step_that_begins_while_the_last_one_is_looked_at_is_watched(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    monitor = StallMonitor(poll_s=3600.0, clock=clock)

    def done() -> bool:
        monitor.watch("bucket", "bucket 0 in its next step", lambda: False, 10.0, CPU)
        return True

    monitor.watch("bucket", "bucket 0", done, 10.0, CPU)
    assert monitor.poll() == 1
    clock.now += 11.0
    assert monitor.poll() == 1
    assert "bucket 0 in its next step has not finished after 11.0 s" in caplog.text


def test_a_reduction_is_overdue_as_configured_or_ahead_of_the_timeout_and_never_on_cpu() -> None:
    class Group:
        lost, rank = "", 0

        def timeout_s(self, device: torch.device | None = None) -> float:
            return {"cuda": 600.0, "xpu": 50.0}[torch.device(device or "cuda").type]

    assert stall_report_after_s(None, Group(), torch.device("cuda")) == 480.0
    assert stall_report_after_s(None, Group(), torch.device("xpu")) == 40.0
    assert stall_report_after_s(5.0, Group(), torch.device("cuda")) == 5.0
    assert stall_report_after_s(5.0, Group(), CPU) == stall_report_after_s(None, Group(), CPU) == 0.0


def test_the_thread_ends_when_nothing_is_left() -> None:
    monitor = StallMonitor(poll_s=0.01)
    monitor.watch("bucket", "bucket 0", lambda: True, 10.0, CPU)
    thread = monitor._thread
    if thread is not None:
        thread.join(10)
        assert not thread.is_alive()
    assert monitor._thread is None


class FakeDriver:
    """In place of libcuda: notes in which thread the capture mode is set."""

    def __init__(self, seen: list[tuple[object, ...]], status: int = 0) -> None:
        self._seen = seen
        self._status = status

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        self._seen.append(("mode", mode._obj.value, threading.get_ident()))
        return self._status

    hipThreadExchangeStreamCaptureMode = cuThreadExchangeStreamCaptureMode


def _watched(
    monkeypatch: pytest.MonkeyPatch, load: Callable[[str], object], seen: list[tuple[object, ...]], device: torch.device
) -> None:
    """Has a monitor look three times at a reduction on `device`, and waits for its thread."""
    looks = iter([False, False, True])
    ended = threading.Event()

    def done() -> bool:
        found = next(looks)
        seen.append(("query", threading.get_ident()))
        if found:
            ended.set()
        return found

    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: seen.append(("device", device, threading.get_ident())))
    StallMonitor(poll_s=0.01).watch("bucket", "bucket 0", done, 10.0, device)
    assert ended.wait(10)


MAPS = """\
7f31a0000000-7f31a0021000 rw-p 00000000 00:00 0
7f31a4a00000-7f31a4c00000 r--p 00000000 08:01 1184   /usr/lib/libamdhip64_helper.so
7f31a5400000-7f31a7000000 r-xp 00002000 08:01 1183   /my wheels/torch/lib/libamdhip64.so.7
7ffd0a1e0000-7ffd0a1e2000 r-xp 00000000 00:00 0      [vdso]
"""
OF_MAPS = "/my wheels/torch/lib/libamdhip64.so.7"
OF_TORCH = f"{Path(torch.__file__).resolve().parent}/lib/libamdhip64.so"


@pytest.mark.parametrize(
    ("hip", "maps", "library"),
    [
        (None, MAPS, "libcuda.so.1"),
        ("7.0", MAPS, OF_MAPS),
        ("7.0", MAPS.replace("so.7", "so.7 (deleted)"), OF_MAPS),
        ("7.0", "7f31a1000000-7f31a1001000 r--s 00000000 08:01 9   /données\n" + MAPS, OF_MAPS),
        ("7.0", f"{MAPS}7f31a8000000-7f31a9000000 r-xp 00000000 08:01 7   {OF_TORCH}\n", OF_TORCH),
        ("7.0", "", "libamdhip64.so"),
        ("7.0", None, "libamdhip64.so"),
    ],
)
def test_its_thread_may_query_while_another_captures_a_graph(
    hip: str | None, maps: str | None, library: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In CUDA's default mode an event query in any thread invalidates a capture that is under way in another one.

    A wheel of torch for ROCm brings a library, of which a machine may have another copy, with a mode of its own.
    """
    seen: list[tuple[object, ...]] = []
    loaded: list[str] = []
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(stall_monitor, "MAPS", tmp_path / "maps")
    if maps is not None:
        (tmp_path / "maps").write_bytes(maps.encode("latin-1"))  # a path is of any bytes

    def load(name: str) -> FakeDriver:
        loaded.append(name)
        return FakeDriver(seen)

    device = torch.device("cuda", 1)
    _watched(monkeypatch, load, seen, device)
    relaxed = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
    thread = seen[-1][-1]
    assert thread != threading.get_ident()
    # The device: the first query in a thread makes a context on the thread's device, which is 0 in a new one.
    assert seen == [("mode", relaxed, thread), ("device", device, thread), *[("query", thread)] * 3]
    assert loaded == [library]


def test_on_a_cpu_no_driver_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[object, ...]] = []
    _watched(monkeypatch, lambda name: pytest.fail(f"{name} was loaded"), seen, CPU)
    assert [kind for kind, *_ in seen] == ["query"] * 3


def _no_library(name: str) -> object:
    raise OSError(f"{name}: cannot open shared object file")


@pytest.mark.parametrize(
    ("load", "why"),
    [
        (_no_library, "libcuda.so.1: cannot open"),
        (lambda _: object(), "cuThreadExchangeStreamCaptureMode"),
        (lambda _: FakeDriver([], status=3), "status 3"),
    ],
    ids=["no library", "no function", "an error"],
)
def test_where_the_mode_cannot_be_set_that_is_said_and_it_watches_all_the_same(
    load: Callable[[str], object], why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[tuple[object, ...]] = []
    with caplog.at_level(logging.WARNING):
        _watched(monkeypatch, load, seen, torch.device("cuda", 0))
    (record,) = caplog.records
    assert why in record.message and "capture" in record.message
    assert [kind for kind, *_ in seen].count("query") == 3


def test_prefixes_of_keys_are_those_of_every_node_and_new_in_a_group_that_has_an_earlier_ones_store() -> None:
    store, used = dist.HashStore(), []  # type: ignore[attr-defined]
    for _ in range(2):
        nodes = [KeyPrefixes(store, node) for node in range(2)]
        of_one, of_other = ([one.next(what) for what in ("apart", "sparse", "apart")] for one in nodes)
        assert of_one == of_other
        used += of_one
    assert len(set(used)) == 6
