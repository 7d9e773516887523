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

    def environment(self, wanted: Mapping[str, str]) -> None:
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


ADDRESS = {name: GOOD[name] for name in ("MASTER_ADDR", "MASTER_PORT")}
ALL = {**GOOD, **LOCAL}
SEVEN = datetime.timedelta(seconds=7)
BOTH = "cpu:gloo,cuda:nccl"
FIRST_OF_TWO, THIRD_OF_FOUR = {"rank": 0, "world_size": 2}, {"rank": 2, "world_size": 4}
# (CUDA devices, environment, arguments, the device, what torch is asked for)
RIGHT: dict[str, tuple[int, Mapping[str, str], dict[str, Any], int | None, tuple[Any, ...]]] = {
    "without CUDA": (0, ALL, {}, None, ("gloo", None, 3, 8)),
    "with CUDA the local rank is the device": (2, ALL, {}, 1, (BOTH, None, 3, 8)),
    **{
        f"{name}, without CUDA": (2, ALL, {"backend": name, "timeout": SEVEN}, None, (name.lower(), SEVEN, 3, 8))
        for name in ("gloo", "GLOO", "cpu:gloo", "mpi")
    },
    **{
        f"{backend}, with CUDA": (2, ALL, {"backend": backend}, 1, (backend, None, 3, 8))
        for backend in ("nccl", "cuda:nccl", BOTH)
    },
    "one device needs no local rank": (1, GOOD, {}, 0, (BOTH, None, 3, 8)),
    "rank and size as arguments": (0, ADDRESS, {"rank": 1, "world_size": 2}, None, ("gloo", None, 1, 2)),
    "arguments first": (0, ALL, {**FIRST_OF_TWO, "backend": "gloo", "timeout": SEVEN}, None, ("gloo", SEVEN, 0, 2)),
    "the given rank is the device if there is one for each": (4, ADDRESS, THIRD_OF_FOUR, 2, (BOTH, None, 2, 4)),
    "a local rank before that": (4, {**ADDRESS, **LOCAL}, THIRD_OF_FOUR, 1, (BOTH, None, 2, 4)),
}


@pytest.mark.parametrize("case", RIGHT)
def test_what_torch_is_asked_for(fake: Torch, case: str) -> None:
    devices, environ, arguments, device, asked = RIGHT[case]
    fake.have_cuda(devices)
    fake.environment(environ)
    init_process_group(**arguments)
    assert fake.calls == [*([("device", device)] if device is not None else []), asked]


# (CUDA devices, environment, arguments, what is said)
REFUSED: dict[str, tuple[int, Mapping[str, str], dict[str, Any], str]] = {
    "several devices need a local rank": (2, GOOD, {}, "LOCAL_RANK.*torchrun"),
    "fewer devices than ranks do": (3, ADDRESS, THIRD_OF_FOUR, "not set in the environment: LOCAL_RANK"),
    **{
        f"no {name}": (
            0,
            {one: ALL[one] for one in ALL if one != name},
            {},
            f"not set in the environment: {name}. .*torchrun",
        )
        for name in (*GOOD, "LOCAL_RANK")
    },
    "all that is missing": (0, {}, {}, "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
    "no address": (
        0,
        {},
        FIRST_OF_TWO,
        "^(?!.*torchrun).*MASTER_ADDR, MASTER_PORT. .*on one machine MASTER_ADDR=127.0.0.1",
    ),
    **{
        f"rank={rank!r}, world_size={world_size!r}": (0, ADDRESS, {"rank": rank, "world_size": world_size}, said)
        for rank, world_size, said in (
            (0, None, "rank=0 and world_size=None: give both, or neither"),
            (None, 2, "rank=None and world_size=2: give both, or neither"),
            (2, 2, r"rank must be an integer from 0 to 1 \(world_size - 1\), got 2"),
            (-1, 2, "rank must be an integer from 0 to 1 .*, got -1"),
            (True, 2, "rank must be an integer .*, got True"),
            ("0", 2, "rank must be an integer .*, got '0'"),
            (0, 0, "world_size must be an integer of at least 1, got 0"),
            (0, 2.0, "world_size must be an integer of at least 1, got 2.0"),
        )
    },
    "a local rank beyond all ranks": (0, {**GOOD, "LOCAL_RANK": "8"}, {}, "LOCAL_RANK='8': must be at most 7"),
    "more local ranks than devices": (1, ALL, {}, "LOCAL_RANK='1'.* there are 1 here"),
    **{
        f"backend={backend!r}": (0, GOOD, {"backend": backend}, "unknown backend .*'auto'.*'gloo'")
        for backend in ("", "glooo", "cpu:", "cpu:gloo,cuda:nccll", None, 3, "undefined")
    },
    "NCCL without CUDA": (0, GOOD, {"backend": BOTH}, "needs CUDA"),
    **{
        f"timeout={timeout!r}": (0, GOOD, {"timeout": timeout}, "timeout must be a positive")
        for timeout in (0, 5.0, "5", datetime.timedelta(), datetime.timedelta(seconds=-1))
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_before_anything_is_started(fake: Torch, case: str) -> None:
    devices, environ, arguments, said = REFUSED[case]
    fake.have_cuda(devices)
    fake.environment(environ)
    with pytest.raises(ValueError, match=said):
        init_process_group(**arguments)
    assert fake.calls == []


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
    fake.environment({**ALL, name: text})
    with pytest.raises(ValueError, match="torchrun") as caught:
        init_process_group()
    blamed = {("WORLD_SIZE", "3"): "RANK='3'", ("LOCAL_WORLD_SIZE", "1"): "LOCAL_RANK='1'"}
    assert str(caught.value).startswith(blamed.get((name, text), f"{name}={text!r}"))
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


@pytest.mark.slow
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
