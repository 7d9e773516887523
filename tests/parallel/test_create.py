"""create_data_parallel and create_distributed_data_parallel, and what a wrapper says of its place among the ranks."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import Program, RankPool
from torch import nn

import fusedreduce
from fusedreduce.parallel import create

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@pytest.mark.parametrize("count", [0, 1, 3])
def test_all_devices_that_there_are(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    made: list[tuple[Any, ...]] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(create, "DataParallel", lambda module, devices, **options: made.append((devices, options)))
    fusedreduce.create_data_parallel(nn.Linear(2, 1), dim=1)
    ((devices, options),) = made
    assert [*devices] == [*(range(count) or ["cpu"])] and options == {"dim": 1}


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without GPUs")
def test_a_data_parallel_that_trains_on_the_cpu() -> None:
    model = nn.Linear(2, 1)
    with fusedreduce.create_data_parallel(model, reduce=fusedreduce.ReduceConfig(wire="bf16")) as parallel:
        assert parallel.devices == (torch.device("cpu"),) and parallel.reduce_config.wire == "bf16"
        parallel(torch.ones(4, 2)).sum().backward()
    assert model.weight.grad is not None and model.weight.grad.tolist() == [[4.0, 4.0]]
    with pytest.raises(TypeError, match="devices"):
        fusedreduce.create_data_parallel(model, devices=["cpu"])


RANK = """
import sys, torch, fusedreduce
from torch import nn
rank = int(sys.argv[1])
model = nn.Linear(1, 1)
ddp = fusedreduce.create_distributed_data_parallel(
    model, backend="gloo", rank=rank, world_size=2, reduce=fusedreduce.ReduceConfig(wire="bf16"), bucket_cap_mb=1
)
assert (ddp.rank, ddp.world_size, ddp.reduce_config.wire) == (rank, 2, "bf16")
again = fusedreduce.create_distributed_data_parallel(nn.Linear(1, 1), rank=rank, world_size=2)
ddp(torch.tensor([[1.0 + 2 * rank]])).sum().backward()
assert model.weight.grad.item() == 2.0, model.weight.grad
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="two ranks need two GPUs")
def test_two_processes_that_were_not_started_by_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [Program(RANK, str(rank), environment=environment) for rank in range(2)]
    for rank in ranks:
        rank.printed()


def test_what_is_started_already_is_used(two: RankPool) -> None:
    two.run(in_a_started_group)


def in_a_started_group(rank: int, world: int) -> None:
    ddp = fusedreduce.create_distributed_data_parallel(nn.Linear(2, 1), find_unused_parameters=True)
    assert ddp.find_unused_parameters and (ddp.rank, ddp.world_size) == (rank, world)
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"rank": 1 - rank, "world_size": world}, f"rank={1 - rank}, but .* with rank={rank}"),
        ({"world_size": 3}, "world_size=3, but .* with world_size=2"),
    )
    for given, said in wrong:
        with pytest.raises(ValueError, match=said):
            fusedreduce.create_distributed_data_parallel(nn.Linear(2, 1), **given)
    # Within a group of its own a rank has another number; on its machine it does not.
    alone, _ = dist.new_subgroups(1)
    one = fusedreduce.DistributedDataParallel(nn.Linear(2, 1), process_group=alone)
    assert (one.rank, one.world_size) == (0, 1)
    with pytest.MonkeyPatch.context() as patched:
        for name in VARIABLES:
            patched.delenv(name, raising=False)
        assert one.local_rank is None
        for text in ("2", "-1", "one"):
            patched.setenv("LOCAL_RANK", text)
            with pytest.raises(ValueError, match=f"LOCAL_RANK='{text}'"):
                _ = one.local_rank
        patched.setenv("LOCAL_RANK", str(rank))
        assert one.local_rank == ddp.local_rank == rank


def test_ranks_that_are_threads() -> None:
    def case(communicator: Any) -> tuple[int, int | None, int]:
        group = communicator.process_group()
        ddp = fusedreduce.create_distributed_data_parallel(nn.Linear(2, 1), process_group=group)
        return ddp.rank, ddp.local_rank, ddp.world_size

    with fusedreduce.LocalGroup(3) as group:
        assert group.run(case) == [(0, 0, 3), (1, 1, 3), (2, 2, 3)]
    assert not dist.is_initialized()
