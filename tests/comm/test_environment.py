"""init_process_group: tables of environments, right and wrong; CUDA is pretended. Once with two real processes."""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.inside import STORES_PREFIX, TEXTS_ARE_COMPARED
from support.ranks import Program
from torch._C._distributed_c10d import DebugLevel, get_debug_level, set_debug_level
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from fusedreduce import FusedReduceError, init_process_group
from fusedreduce.comm import init_process_group as environment
from fusedreduce.comm.process_group import ProcessGroupCommunicator

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
GOOD = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
LOCAL = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


class Torch:
    """What was asked of torch, in order; nothing is started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(dist, "init_process_group", self._init)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: self.calls.append(("device", device)))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self._current())
        self.have_cuda(0)

    def have_cuda(self, devices: int) -> None:
        self._monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
        self._monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)

    def environment(self, *values: Mapping[str, str], without: str = "") -> None:
        wanted = {name: value for part in values for name, value in part.items() if name != without}
        for name in VARIABLES:
            if name in wanted:
                self._monkeypatch.setenv(name, wanted[name])
            else:
                self._monkeypatch.delenv(name, raising=False)

    def _init(
        self,
        backend: str,
        *,
        timeout: datetime.timedelta | None,
        rank: int,
        world_size: int,
        device_id: torch.device | None,
    ) -> None:
        self.calls.append((backend, timeout, rank, world_size))
        # NCCL refuses ranks that share a device as soon as they connect.
        own = "nccl" in backend and int(os.environ.get("LOCAL_WORLD_SIZE", world_size)) <= torch.cuda.device_count()
        assert device_id == (torch.device("cuda", self._current()) if own else None)

    def _current(self) -> int:
        return next((int(call[1]) for call in reversed(self.calls) if call[0] == "device"), 0)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Torch:
    return Torch(monkeypatch)


def test_without_cuda(fake: Torch) -> None:
    fake.environment(GOOD, LOCAL)
    init_process_group()
    assert fake.calls == [("gloo", None, 3, 8)]


def test_with_cuda_the_local_rank_is_the_device(fake: Torch) -> None:
    fake.have_cuda(2)
    fake.environment(GOOD, LOCAL)
    init_process_group()
    assert fake.calls == [("device", 1), ("cpu:gloo,cuda:nccl", None, 3, 8)]


@pytest.mark.parametrize("backend", ["gloo", "GLOO", "cpu:gloo", "mpi"])
def test_a_backend_by_name_without_cuda(fake: Torch, backend: str) -> None:
    fake.have_cuda(2)
    fake.environment(GOOD, LOCAL)
    init_process_group(backend, timeout=datetime.timedelta(seconds=7))
    assert fake.calls == [(backend.lower(), datetime.timedelta(seconds=7), 3, 8)]


@pytest.mark.parametrize("backend", ["nccl", "cuda:nccl", "cpu:gloo,cuda:nccl"])
def test_a_backend_by_name_with_cuda(fake: Torch, backend: str) -> None:
    fake.have_cuda(2)
    fake.environment(GOOD, LOCAL)
    init_process_group(backend)
    assert fake.calls == [("device", 1), (backend, None, 3, 8)]


def test_one_device_needs_no_local_rank(fake: Torch) -> None:
    fake.have_cuda(1)
    fake.environment(GOOD)
    init_process_group()
    assert fake.calls == [("device", 0), ("cpu:gloo,cuda:nccl", None, 3, 8)]


def test_several_devices_need_one(fake: Torch) -> None:
    fake.have_cuda(2)
    fake.environment(GOOD)
    with pytest.raises(ValueError, match="LOCAL_RANK.*torchrun"):
        init_process_group()
    assert fake.calls == []


@pytest.mark.parametrize("name", GOOD)
def test_missing(fake: Torch, name: str) -> None:
    fake.environment(GOOD, LOCAL, without=name)
    with pytest.raises(ValueError, match=f"not set in the environment: {name}. .*torchrun"):
        init_process_group()
    assert fake.calls == []


def test_all_that_is_missing_is_named(fake: Torch) -> None:
    fake.environment({})
    with pytest.raises(ValueError, match="RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"):
        init_process_group()


def test_a_local_size_without_a_local_rank(fake: Torch) -> None:
    fake.environment(GOOD, LOCAL, without="LOCAL_RANK")
    with pytest.raises(ValueError, match="not set in the environment: LOCAL_RANK"):
        init_process_group()


ADDRESS = {name: GOOD[name] for name in ("MASTER_ADDR", "MASTER_PORT")}


def test_rank_and_size_as_arguments(fake: Torch) -> None:
    fake.environment(ADDRESS)
    init_process_group(rank=1, world_size=2)
    fake.environment(GOOD, LOCAL)
    init_process_group("gloo", rank=0, world_size=2, timeout=datetime.timedelta(seconds=7))
    assert fake.calls == [("gloo", None, 1, 2), ("gloo", datetime.timedelta(seconds=7), 0, 2)]


def test_without_a_local_rank_the_given_rank_is_the_device_if_there_is_one_for_each(fake: Torch) -> None:
    fake.have_cuda(4)
    fake.environment(ADDRESS)
    init_process_group(rank=2, world_size=4)
    assert fake.calls == [("device", 2), ("cpu:gloo,cuda:nccl", None, 2, 4)]
    with pytest.raises(ValueError, match="not set in the environment: LOCAL_RANK"):
        init_process_group(rank=2, world_size=5)
    fake.environment(ADDRESS, LOCAL)
    init_process_group(rank=2, world_size=4)
    assert fake.calls[2:] == [("device", 1), ("cpu:gloo,cuda:nccl", None, 2, 4)]


@pytest.mark.parametrize(
    ("rank", "world_size", "said"),
    [
        (0, None, "rank=0 and world_size=None: give both, or neither"),
        (None, 2, "rank=None and world_size=2: give both, or neither"),
        (2, 2, r"rank must be an integer from 0 to 1 \(world_size - 1\), got 2"),
        (-1, 2, "rank must be an integer from 0 to 1 .*, got -1"),
        (True, 2, "rank must be an integer .*, got True"),
        ("0", 2, "rank must be an integer .*, got '0'"),
        (0, 0, "world_size must be an integer of at least 1, got 0"),
        (0, 2.0, "world_size must be an integer of at least 1, got 2.0"),
    ],
)
def test_wrong_arguments(fake: Torch, rank: Any, world_size: Any, said: str) -> None:
    fake.environment(ADDRESS)
    with pytest.raises(ValueError, match=said):
        init_process_group(rank=rank, world_size=world_size)
    assert fake.calls == []


def test_an_address_is_needed_still(fake: Torch) -> None:
    fake.environment({})
    with pytest.raises(ValueError, match="MASTER_ADDR, MASTER_PORT. .*on one machine MASTER_ADDR=127.0.0.1") as caught:
        init_process_group(rank=0, world_size=1)
    assert "torchrun" not in str(caught.value) and fake.calls == []


NO_NUMBERS = ("", "two", "1.0", "1e1", " 1", "1 ", "+1", "1_0", "0x1", "٣", "1" * 5000, "--1", "1\n")
WRONG = (
    *((name, text) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", *LOCAL) for text in (*NO_NUMBERS, "-1")),
    ("RANK", "8"),
    ("RANK", "9" * 18),
    ("WORLD_SIZE", "0"),
    ("WORLD_SIZE", "3"),
    ("MASTER_PORT", "0"),
    ("MASTER_PORT", "65536"),
    ("MASTER_ADDR", ""),
    ("MASTER_ADDR", "  "),
    ("LOCAL_RANK", "2"),
    ("LOCAL_WORLD_SIZE", "0"),
    ("LOCAL_WORLD_SIZE", "1"),
    ("LOCAL_WORLD_SIZE", "9"),
)


@pytest.mark.parametrize(("name", "text"), WRONG, ids=lambda one: repr(one[:12]))
def test_wrong(fake: Torch, name: str, text: str) -> None:
    fake.have_cuda(2)
    fake.environment(GOOD, LOCAL, {name: text})
    with pytest.raises(ValueError, match="torchrun") as caught:
        init_process_group()
    blamed = {("WORLD_SIZE", "3"): "RANK='3'", ("LOCAL_WORLD_SIZE", "1"): "LOCAL_RANK='1'"}
    assert str(caught.value).startswith(blamed.get((name, text), f"{name}={text!r}"))
    assert fake.calls == []


def test_a_local_rank_beyond_all_ranks(fake: Torch) -> None:
    fake.environment(GOOD, {"LOCAL_RANK": "8"})
    with pytest.raises(ValueError, match="LOCAL_RANK='8': must be at most 7"):
        init_process_group()


def test_more_local_ranks_than_devices(fake: Torch) -> None:
    fake.have_cuda(1)
    fake.environment(GOOD, LOCAL)
    with pytest.raises(ValueError, match="LOCAL_RANK='1'.* there are 1 here"):
        init_process_group()
    assert fake.calls == []


@pytest.mark.parametrize("backend", ["", "glooo", "cpu:", "cpu:gloo,cuda:nccll", None, 3, "undefined"])
def test_an_unknown_backend(fake: Torch, backend: Any) -> None:
    fake.environment(GOOD)
    with pytest.raises(ValueError, match="unknown backend .*'auto'.*'gloo'"):
        init_process_group(backend)
    assert fake.calls == []


def test_nccl_without_cuda(fake: Torch) -> None:
    fake.environment(GOOD)
    with pytest.raises(ValueError, match="needs CUDA"):
        init_process_group("cpu:gloo,cuda:nccl")
    assert fake.calls == []


@pytest.mark.parametrize("timeout", [0, 5.0, "5", datetime.timedelta(), datetime.timedelta(seconds=-1)])
def test_a_bad_timeout(fake: Torch, timeout: Any) -> None:
    fake.environment(GOOD)
    with pytest.raises(ValueError, match="timeout must be a positive"):
        init_process_group(timeout=timeout)
    assert fake.calls == []


@pytest.mark.usefixtures("alone")
def test_twice(fake: Torch) -> None:
    fake.environment(GOOD)
    with pytest.raises(FusedReduceError, match="initialised already"):
        init_process_group()
    assert fake.calls == []


RANK = """
import fusedreduce, torch, torch.distributed as dist
fusedreduce.init_process_group()
value = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(value)
assert value.item() == 3.0 and dist.get_backend() == "gloo" and dist.get_world_size() == 2, value
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="two ranks need two GPUs")
def test_two_processes() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": "2"}
    common["GLOO_SOCKET_IFNAME"] = "lo"
    ranks = [Program(RANK, environment={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)]
    for rank in ranks:
        rank.printed()


@pytest.mark.parametrize(
    ("name", "value", "warned"),
    [
        ("DDP_SET_LAST_BUCKET_CAP", "1", True),
        ("DDP_SET_LAST_BUCKET_CAP", "0", False),
        ("DDP_SET_LAST_BUCKET_CAP", "true", False),  # torch compares with "1"
        ("DDP_DISABLE_COMM_MEM", "0", True),
        ("DDP_DISABLE_COMM_MEM", "1", False),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", False),
    ],
)
def test_switches_of_torchs_reducer_are_named_once_where_they_would_act(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, value: str, warned: bool
) -> None:
    environment._warn_of_switch.cache_clear()
    monkeypatch.setenv(name, value)
    for _ in range(2):
        environment.warn_of_switches()
    assert [f"{name}={value} is not followed" in message for message in caplog.messages] == [True] * warned


@pytest.mark.usefixtures("alone")
def test_a_group_apart_leaves_torchs_debug_level_as_it_was() -> None:
    before = get_debug_level()
    set_debug_level(DebugLevel.INFO)
    try:
        ProcessGroupCommunicator().apart().close()
        assert get_debug_level() == DebugLevel.INFO
    finally:
        set_debug_level(before)


@pytest.mark.parametrize("lost", ["neither", "apart", "whole"])
@pytest.mark.usefixtures("alone")
def test_nccl_of_a_lost_group_is_aborted_before_it_is_destroyed(monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    """To destroy it waits for its kernels, whose peers may never come (tests/gpu/test_gpu_nccl.py)."""
    whole = ProcessGroupCommunicator()
    apart = whole.apart()
    done: list[str] = []
    destroy = dist.destroy_process_group

    class Backend:
        def abort(self) -> None:
            done.append("abort")

    def destroyed(group: Any) -> None:
        done.append("destroy")
        destroy(group)

    with monkeypatch.context() as patch:
        patch.setattr(ProcessGroupCommunicator, "_backend_name", lambda self, device: "nccl")
        patch.setattr(dist.ProcessGroup, "_get_backend", lambda group, device: Backend())
        patch.setattr(dist, "destroy_process_group", destroyed)
        if lost != "neither":
            (apart if lost == "apart" else whole).lost = "a peer did not come"
        apart.close()
        apart.close()
    assert done == (["destroy"] if lost == "neither" else ["abort", "destroy"])


@pytest.mark.parametrize(("ranks", "bound"), [(4, torch.device("cuda", 0)), (2, None)])
def test_a_group_apart_is_split_from_the_default_group_by_all_of_its_ranks_or_by_none(
    monkeypatch: pytest.MonkeyPatch, ranks: int, bound: torch.device | None
) -> None:
    """NCCL's split of a communicator waits for every rank of it."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        world: Any = dist.group.WORLD
        communicator = ProcessGroupCommunicator(world if ranks == 4 else dist.new_group(list(range(ranks))))
        world.bound_device_id = torch.device("cuda", 0)

        def make(*_: Any, **__: Any) -> None:
            assert world.bound_device_id == bound
            raise KeyError("seen")

        monkeypatch.setattr(c10d, "_new_process_group_helper", make)
        STORES_PREFIX.replace(monkeypatch, lambda one, key: key)
        TEXTS_ARE_COMPARED.replace(monkeypatch, lambda one, prefix, key, text, device: [text])
        with pytest.raises(KeyError, match="seen"):
            communicator.apart()
        assert world.bound_device_id == torch.device("cuda", 0)
    finally:
        dist.destroy_process_group()
