"""The wrapper in asynchronous mode on 2 and 3 Gloo ranks that take their steps at different speeds."""

from __future__ import annotations

import functools
import itertools
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import ddp_models
from support.ddp_models import assert_same_on_all_ranks, batch, loss_of, mlp
from support.inside import inside
from support.ranks import on_ranks
from support.timeouts import PATIENT_S, after_the_others, in_time, patient_group, settles, wait_briefly
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

import fusedreduce
from fusedreduce import FusedGradScaler
from fusedreduce.buckets.deferred_errors import in_backward
from fusedreduce.comm.process_group import ProcessGroupCommunicator
from fusedreduce.config import Asynchronous, FlushReport

TURNS, SLOW = 5, 10


def wrapped(model: nn.Module, max_in_flight: int = 2, wire: str = "native", **options: Any) -> Any:
    """`model` under our wrapper; small buckets unless said otherwise."""
    return ddp_models.wrapped(model, wire, sync_mode=Asynchronous(max_in_flight), **options)


def step(ddp: nn.Module, optimizer: Optimizer, rank: int, number: int) -> None:
    """One, as loops have it."""
    loss_of(ddp(batch(rank, number))).backward()
    optimizer.step()
    optimizer.zero_grad()


def tensors_of(ddp: nn.Module, *optimizers: Optimizer) -> list[torch.Tensor]:
    """All that flush makes equal."""
    states = [value for one in optimizers for held in one.state.values() for value in held.values()]
    return [*(one.detach() for one in ddp.parameters()), *ddp.buffers(), *states]


def flushed(ddp: fusedreduce.DistributedDataParallel, *optimizers: Optimizer) -> FlushReport:
    """After it every tensor is the same everywhere, byte for byte."""
    report = ddp.flush(*optimizers)
    assert_same_on_all_ranks([one.float().reshape(-1) for one in tensors_of(ddp, *optimizers)])
    assert all(one.grad is None for one in ddp.parameters())
    reports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, (report.drift, report.relative_drift))
    assert len(set(reports)) == 1
    return report


@pytest.mark.parametrize("world", [2, 3])
@on_ranks()
def test_a_rank_that_is_always_slower_is_passed(rank: int, world: int) -> None:
    """The last rank makes a step when each of the others has made ten more: a rank that waited for it would wait until
    its timeout.
    """
    ddp = wrapped(mlp())
    optimizer = SGD(ddp.parameters(), lr=0.01)
    slow = rank == world - 1
    step(ddp, optimizer, rank, 0)  # buffers, and agreeing
    for turn in range(TURNS):
        assert settles(functools.partial(_has_averaged, ddp, 1 + turn))
        with after_the_others(slow):
            for number in range(1 if slow else SLOW):
                step(ddp, optimizer, rank, 1 + turn * SLOW + number)
        dist.barrier()
    steps = 1 + TURNS * (1 if slow else SLOW)
    stats: dict[str, int | str] = ddp.reduce_stats()
    report = flushed(ddp, optimizer)
    # Without momentum the order of steps does not matter: all weights end alike before they are made to.
    assert report.relative_drift < 1e-5
    after = ddp.reduce_stats()
    assert after["steps"] == stats["steps"] == steps
    issued: list[Any] = [None] * world
    dist.all_gather_object(issued, after["contributions"])
    assert len(set(issued)) == 1
    assert after["contributions_under_way"] == 0
    if slow:
        assert stats["steps"] == stats["contributions"] == 6 and stats["merged_steps"] == 0
    else:
        # Two more than the slowest rank had issued when it came last; of the rest all but the first wait merged.
        assert (stats["steps"], stats["contributions"], stats["merged_steps"]) == (51, 7, 43)


def _has_averaged(ddp: fusedreduce.DistributedDataParallel, count: int) -> bool:
    """Whether the first `count` contributions of all ranks have been added up."""
    return inside(ddp).has_averaged(count)


@pytest.mark.parametrize(("world", "kind"), [(2, "momentum"), (2, "adamw"), (2, "adamw fused"), (3, "momentum")])
@on_ranks()
def test_flush_makes_ranks_equal_and_tells_the_drift(rank: int, world: int, kind: str) -> None:
    """Momentum, Adam and decay: drift, its figure, and then the same bytes; several times, and training goes on."""
    makers: dict[str, Any] = {
        "momentum": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01),
        "adamw": lambda parameters: AdamW(parameters, lr=0.01),
        "adamw fused": lambda parameters: AdamW(parameters, lr=0.01, fused=True),
    }
    ddp = wrapped(nn.Sequential(mlp(), nn.BatchNorm1d(12)), 1)
    optimizer = makers[kind](ddp.parameters())
    landed = torch.zeros(1, dtype=torch.int64)
    for turn in range(3):
        for number in range(3 + 4 * (rank == turn % world)):
            step(ddp, optimizer, rank, 10 * turn + number)
            time.sleep(0.001)
        report = flushed(ddp, optimizer)
        assert report.drift > 0.0 and 0.0 < report.relative_drift < 1.0
        landed += report.steps
    again = flushed(ddp, optimizer)
    assert (again.steps, again.drift, again.relative_drift) == (0, 0.0, 0.0)
    dist.all_reduce(landed)
    assert int(landed) > 0


@on_ranks(2)
def test_an_optimizer_that_has_not_stepped_everywhere_is_one_error(rank: int, world: int) -> str:
    """The error is the same on all ranks."""
    ddp = wrapped(mlp())
    optimizer = SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    # The others' backwards end before the average can be there, so each of them is owed it.
    with after_the_others(rank == 0):
        if rank == 0:
            step(ddp, optimizer, rank, 0)
        else:
            loss_of(ddp(batch(rank, 0))).backward()
            ddp.zero_grad()
            ddp.check_finalized()
    # Draining steps every optimizer on ranks that are owed something, so a second one is needed.
    other = SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    if rank == 0:
        for parameter in ddp.parameters():
            parameter.grad = torch.zeros_like(parameter)
        other.step()
        other.zero_grad()
    ddp.flush(optimizer)
    with pytest.raises(fusedreduce.AgreementError) as caught:
        ddp.flush(other)
    assert "momentum_buffer" in str(caught.value)
    return str(caught.value)


@on_ranks(2)
def test_clips(rank: int, world: int) -> None:
    """By this rank's own norm, and without a collective: ranks may take different numbers of steps."""
    ddp = wrapped(mlp())
    optimizer = SGD(ddp.parameters(), lr=0.01)
    for number in range(3 + 2 * rank):
        loss_of(ddp(batch(rank, number))).backward()
        norm = fusedreduce.clip_grad_norm_(ddp, 0.05)
        own = torch.stack([parameter.grad.norm() for parameter in ddp.parameters() if parameter.grad is not None])
        assert float(norm) > 0.05 and float(own.norm()) == pytest.approx(0.05, rel=1e-4)
        optimizer.step()
        optimizer.zero_grad()
    flushed(ddp, optimizer)


@on_ranks(2)
def test_an_overflow_stays_on_its_rank(rank: int, world: int) -> None:
    """An overflow skips this rank's step and reaches nobody; scales may differ; nothing else is lost."""
    ddp = wrapped(mlp())
    extra = nn.Parameter(torch.zeros(2))  # that nobody reduces: whether its gradient is finite, no other rank is told
    optimizer = SGD([*ddp.parameters(), extra], lr=0.01)
    scaler = FusedGradScaler(ddp, init_scale=2.0 ** (8 + rank), growth_interval=1000)
    skipped = 0
    for number in range(8 + 3 * rank):
        loss = loss_of(ddp(batch(rank, number)))
        if rank == 0 and number == 3:
            loss = loss * float("inf")
        scaler.scale(loss + extra.sum()).backward()
        scaler.unscale_(optimizer)
        finite = all(bool(one.grad.isfinite().all()) for one in ddp.parameters() if one.grad is not None)
        skipped += not finite
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        assert (scaler.get_scale() < before) == (not finite)
        optimizer.zero_grad()
        time.sleep(0.002 * rank)

    def last() -> None:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    with pytest.raises(ValueError, match="FusedGradScaler"):
        ddp.flush(optimizer)
    with pytest.raises(TypeError, match="Optimizer"):
        ddp.flush(ddp, step=last)
    report = ddp.flush(optimizer, step=last)
    assert report.relative_drift < 1e-5
    assert_same_on_all_ranks([one.detach() for one in ddp.parameters()])
    assert all(bool(one.isfinite().all()) for one in ddp.parameters())
    assert (skipped, scaler.get_scale()) == ((1, 2.0**7) if rank == 0 else (0, 2.0**9))


@on_ranks(2)
def test_connects_before_backward(rank: int, world: int) -> None:
    """A backend that makes a communicator at its first collective, as NCCL does, makes ours outside of backward."""
    seen: list[tuple[object, int, bool]] = []
    all_reduce = ProcessGroupCommunicator.all_reduce

    def recorded(communicator: ProcessGroupCommunicator, tensor: torch.Tensor, *op: Any) -> Any:
        seen.append((communicator.group, tensor.numel(), in_backward()))
        return all_reduce(communicator, tensor, *op)

    def own_group() -> object:
        return inside(ddp).communicator_of_contributions.group

    group = patient_group()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ProcessGroupCommunicator, "all_reduce", recorded)
        ddp = wrapped(mlp(), process_group=group)
        optimizer = SGD(ddp.parameters(), lr=0.01)
        assert [one for one in seen if one[0] is own_group()] == [(own_group(), 1, False)]
        seen.clear()
        for number in range(3):
            step(ddp, optimizer, rank, number)
        assert seen and all(one[0] is own_group() and one[2] for one in seen)
        flushed(ddp, optimizer)
        # Another group: in the forward, which agrees anew.
        ddp._update_process_group(patient_group())
        seen.clear()
        out = ddp(batch(rank, 0))
        assert [one for one in seen if one[0] is own_group()] == [(own_group(), 1, False)]
        loss_of(out).backward()
        flushed(ddp, optimizer)

        def refused(communicator: ProcessGroupCommunicator, tensor: torch.Tensor, *op: Any) -> Any:
            all_reduce(communicator, tensor, *op).wait()  # a peer that closes while we connect is another error
            raise RuntimeError("no route to host")

        patched.setattr(ProcessGroupCommunicator, "all_reduce", refused)
        groups = len(dist.distributed_c10d._world.pg_map)
        with pytest.raises(fusedreduce.CollectiveError, match=f"rank {rank}: .*own group.*no route to host"):
            wrapped(mlp(), process_group=group)
        assert len(dist.distributed_c10d._world.pg_map) == groups, "nothing is left of it"


@on_ranks(2)
def test_dead_peer(rank: int, world: int) -> None:
    """A peer that is gone is raised at the end of the backward that notices; then a new group is needed, and helps."""
    ddp = wrapped(mlp(), 1, process_group=patient_group())
    optimizer = SGD(ddp.parameters(), lr=0.01)
    step(ddp, optimizer, rank, 0)
    if rank == world - 1:
        inside(ddp).communicator_of_contributions.close()
    else:
        wait_briefly()

        def steps() -> None:
            began_s = time.monotonic()
            for number in itertools.count(1):
                assert time.monotonic() - began_s < PATIENT_S
                time.sleep(0.05)
                step(ddp, optimizer, rank, number)

        with in_time(), pytest.raises(fusedreduce.CollectiveError, match=rf"rank {rank}: .*bucket \d+ \("):
            steps()
        for call in (lambda: ddp(batch(rank, 0)), lambda: ddp.flush(optimizer)):
            with pytest.raises(fusedreduce.FusedReduceError, match="_update_process_group"):
                call()
    dist.barrier()
    ddp._update_process_group(patient_group())
    ddp.zero_grad()
    for number in range(4 + rank):
        step(ddp, optimizer, rank, number)
    flushed(ddp, optimizer)
