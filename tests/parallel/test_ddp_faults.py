"""The wrapper when a step goes wrong: errors in hooks and models, unfinished steps, ranks that differ or leave."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel.test_faults import survivors_raise
from support.ddp_models import (
    UNIT,
    Branches,
    Interrupted,
    Partial,
    assert_step_averages,
    batch,
    loss_of,
    mlp,
    right_steps,
    wrapped,
)
from support.ranks import on_ranks
from support.timeouts import FAULT_S, after_the_others, in_time, patient_group, wait_briefly
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import fusedreduce

# At the first step, in one bucket and with every parameter hooked; and when only the last of each bucket is.
BEFORE = (0, 6)


class HookFailed(Exception):
    """What a user's hook raises."""


def _recover(rank: int, world: int, ddp: fusedreduce.DistributedDataParallel, **options: Any) -> None:
    """After a ruined group: reset says so on every rank, and a new group makes everything right."""
    with in_time(), pytest.raises(fusedreduce.FusedReduceError, match="make a new one on every rank"):
        ddp.reset()
    with pytest.raises(fusedreduce.FusedReduceError, match="_update_process_group"):
        ddp(batch(rank, 0))
    dist.barrier()
    ddp._update_process_group(patient_group())
    right_steps(rank, ddp, **options)


@pytest.mark.parametrize("before", BEFORE)
@on_ranks(2)
def test_a_hook_that_raises_on_one_rank_ruins_the_group_and_a_new_one_helps(rank: int, world: int, before: int) -> None:
    """The others wait for its collective: they raise in time, with bucket and names; a new group is needed."""
    failing = [False]

    def fails(bucket: Any) -> torch.futures.Future[torch.Tensor]:
        if failing[0] and bucket.is_last():
            if rank == world - 1:
                raise HookFailed("by the user")
            wait_briefly()
        # (what the user's own code does about the new group)
        future: torch.futures.Future[torch.Tensor] = default_hooks.allreduce_hook(ddp.process_group, bucket)
        return future

    ddp = wrapped(mlp(), process_group=patient_group())
    ddp.register_comm_hook(None, lambda state, bucket: fails(bucket))
    right_steps(rank, ddp, steps=before)
    ddp.zero_grad()
    loss = loss_of(ddp(batch(rank, 0)))
    failing[0] = True
    with in_time(), pytest.raises((HookFailed, fusedreduce.CollectiveError)) as caught:
        loss.backward()
    failing[0] = False
    if rank == world - 1:
        assert caught.type is HookFailed
    else:
        assert caught.type is fusedreduce.CollectiveError
        bucket = len(fusedreduce.reducer_of(ddp).plan) - 1
        assert f"rank {rank}: " in str(caught.value) and f"bucket {bucket} (" in str(caught.value)
        assert all(name in str(caught.value) for name in ("0.weight", "0.bias"))
    _recover(rank, world, ddp)


@pytest.mark.parametrize("wire", ["native", "bf16"])
@on_ranks(2)
def test_a_failed_step_leaves_each_bucket_reduced_or_local(rank: int, world: int, wire: str) -> None:
    """Buckets that were reduced and buckets that were not, on this rank; each is wholly one or the other."""
    ddp = wrapped(Interrupted(), wire, process_group=patient_group())
    model: Any = ddp.module
    right_steps(rank, ddp, wire=wire)
    local: Any = copy.deepcopy(ddp.module)
    loss_of(local(batch(rank, 0))).backward()
    model.armed = rank == world - 1
    ddp.zero_grad()
    loss = loss_of(ddp(batch(rank, 0)))
    model.meanwhile = wait_briefly
    with in_time(), pytest.raises((KeyError, fusedreduce.CollectiveError)):
        loss.backward()
    model.armed, model.meanwhile = False, lambda: None
    alone: list[Any] = [parameter.grad for parameter in local.parameters()]
    sums, sizes = [one.double() for one in alone], [one.double().abs() for one in alone]
    for tensors in (sums, sizes):
        for one in tensors:
            dist.all_reduce(one)
    reduced = kept = 0
    parameters = fusedreduce.reducer_of(ddp).parameters
    for members in fusedreduce.reducer_of(ddp).plan:
        found: list[Any] = [(parameters[index].grad, alone[index], sums[index], sizes[index]) for index in members]
        present = [one for one in found if one[0] is not None]
        if all(torch.equal(grad, mine) for grad, mine, _, _ in present):
            kept += 1
            continue
        assert len(present) == len(found), "half of a bucket was written"
        for grad, _, total, size in found:
            bound = 2 * max(UNIT[wire], 2.0**-24) * size / world * 1.01 + 1e-30
            assert bool(((grad.double() - total / world).abs() <= world * bound).all()), "half-written bucket"
        reduced += 1
    _recover(rank, world, ddp, wire=wire)
    # On the survivor the bucket before the error is reduced, the one after it is not.
    assert (reduced, kept) == ((1, 1), (0, 2))[rank]


@pytest.mark.parametrize(("before", "both_miss"), [(0, True), (0, False), (6, False)])
@on_ranks(2)
def test_different_control_flow_is_an_error_on_every_rank(rank: int, world: int, before: int, both_miss: bool) -> None:
    """Ranks use different parameters, find_unused_parameters being off: an error on every rank, in bounded time."""
    if both_miss:
        model: nn.Module = Branches()
        ddp = wrapped(model, process_group=patient_group(), bucket_cap_mb=0.001, find_unused_parameters=False)
        given: Any = (batch(rank, 0), rank % 2)
    else:
        ddp = wrapped(Partial(), process_group=patient_group(), bucket_cap_mb=0.001)
        right_steps(rank, ddp, lambda r, s: (batch(r, s), True), steps=before)
        given = (batch(rank, 0), rank != world - 1)
    ddp.zero_grad()

    def two_steps() -> None:
        for _ in range(2):
            loss = loss_of(ddp(given))
            if not both_miss:  # else every bucket that is issued is reduced
                wait_briefly()
            loss.backward()

    with in_time(), pytest.raises(fusedreduce.FusedReduceError) as caught:
        two_steps()
    dist.barrier()
    # Nothing was issued, or something was that not all ranks took part in: reset() says which.
    try:
        with in_time():
            ddp.reset()
    except fusedreduce.FusedReduceError:
        dist.barrier()
        ddp._update_process_group(patient_group())
    if not both_miss:
        right_steps(rank, ddp, lambda r, s: (batch(r, s), True))
    message = str(caught.value)
    if both_miss:
        assert f"layers.{1 - rank}.weight" in message and "layers.2.bias" in message
    elif rank == 0:
        assert re.search(r"bucket \d+ \(layers", message)
    else:
        assert "layers.1.weight, layers.1.bias, layers.2.weight, layers.2.bias" in message


# How a wrapper is built in which each rank leaves another layer unused.
UNUSED: dict[str, dict[str, Any]] = {
    "search": {"find_unused_parameters": True},
    "static graph": {"static_graph": True},
    "staleness": {"find_unused_parameters": True},
}


@pytest.mark.parametrize("how", UNUSED)
@on_ranks(2)
def test_a_late_peer_is_named_where_parameters_are_unused_and_its_group_is_given_up(
    rank: int, world: int, how: str
) -> None:
    """The last rank comes after the timeout; each rank leaves another layer unused. The error, and what helps then."""
    mode = fusedreduce.BoundedStaleness(1) if how == "staleness" else fusedreduce.Synchronous()
    config = fusedreduce.ReduceConfig(sync_mode=mode)
    ddp = fusedreduce.DistributedDataParallel(
        Branches(), process_group=patient_group(), bucket_cap_mb=0.001, reduce=config, **UNUSED[how]
    )
    given = (batch(rank, 0), rank % 2)
    loss = loss_of(ddp(given))
    wait_briefly()

    def two_steps() -> None:
        loss.backward()  # with staleness nothing is waited for yet
        loss_of(ddp(given)).backward()

    with after_the_others(rank == world - 1), in_time(), pytest.raises(fusedreduce.FusedReduceError) as caught:
        two_steps()
    dist.barrier()
    for _ in range(2):
        with in_time(), pytest.raises(fusedreduce.FusedReduceError, match=r"set_communicator\(\)"):
            ddp.reset()
    with pytest.raises(fusedreduce.FusedReduceError, match=r"set_communicator\(\)"):
        ddp(given)
    dist.barrier()
    ddp._update_process_group(patient_group())
    if how == "staleness":
        loss_of(ddp((batch(rank, 7), rank % 2))).backward()
    for _ in range(3):
        assert_step_averages(ddp, (batch(rank, 7), rank % 2))
    message = str(caught.value)
    assert caught.type is fusedreduce.CollectiveError and message.startswith(f"rank {rank}: "), message
    if rank == 0:
        waited = rf" failed after [\d.]+ s\..* (Timed out waiting {1000 * FAULT_S:.0f}ms|Application timeout)"
        assert re.search(waited, message), message
        assert re.search(r"bucket \d+ \(layers\.\d\.(weight|bias)", message), message


@on_ranks(2)
def test_a_group_that_one_wrapper_has_lost_is_lost_for_all(rank: int, world: int) -> None:
    """What one wrapper has found out of a group, another one over it knows: its reset() does not take that group."""
    group = patient_group()
    first, second = wrapped(mlp(), process_group=group), wrapped(mlp(), process_group=group)
    for ddp in (first, second):
        right_steps(rank, ddp, steps=2)
    loss = loss_of(first(batch(rank, 0)))
    wait_briefly()
    with after_the_others(rank == world - 1), in_time(), pytest.raises(fusedreduce.CollectiveError):
        loss.backward()
    dist.barrier()
    for ddp in (second, first):
        _recover(rank, world, ddp)


def test_survivors_raise_in_time_and_name_the_bucket(tmp_path: Path) -> None:
    named = r"all-reduce of bucket \d+ \((\d\.(weight|bias)(, )?)+\)"
    survivors_raise(tmp_path, 3, "bf16", "copy", "leave", "5", "wrapper", named=named)
