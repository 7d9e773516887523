"""What ranks run in test_hook_wires.py: torch's DDP with fused_hook, on wires whose contributions are exchanged."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel.ddp_wire_cases import Together
from support.ddp_models import (
    Collectives,
    assert_same_on_all_ranks,
    assert_step_averages,
    batch,
    gradients,
    hooked,
    loss_of,
    mlp,
    wrapped,
)
from support.inside import ENCODED_IS_ADDED_UP, ENCODED_IS_PACKED, inside_hook
from support.timeouts import after_the_others, in_time, patient_group, wait_briefly
from support.wires import encoding_of, reduced
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusedreduce
from fusedreduce.comm.process_group import ProcessGroupCommunicator
from fusedreduce.trace.reader import read

LONG = 110  # steps


def same_bits(rank: int, world: int, wire: str, **options: Any) -> None:
    """Each step's gradients are what the definition makes of those of all ranks, and what the wrapper makes of them.

    Whatever the buckets, which are not those of the wrapper. What is not encoded is added up by Gloo, on three ranks in
    an order of its own.
    """
    ours, model = wrapped(mlp(), wire, policy="static", bucket_cap_mb=1.0), mlp()
    ddp, _ = hooked(model, wire, **options)
    for step in range(5):
        local: list[list[torch.Tensor]] = []
        for other in range(world):
            alone = copy.deepcopy(model)
            alone.zero_grad()
            loss_of(alone(batch(other, step))).backward()
            local.append(gradients(alone))
        for one in (ddp, ours):
            one.zero_grad()
            loss_of(one(batch(rank, step))).backward()
        compared = 0
        for index, (mine, theirs) in enumerate(zip(gradients(ddp), gradients(ours), strict=True)):
            assert mine.isfinite().all()
            if world > 2 and encoding_of(mine, wire) is None and "+" not in wire:
                continue
            expected = reduced([one[index] for one in local], [float(world)] * world, wire)
            assert torch.equal(mine, expected) and torch.equal(theirs, expected), (step, index)
            compared += 1
        assert compared >= 3
        assert_same_on_all_ranks(gradients(ddp))


def one_bucket(rank: int, world: int, wire: str) -> None:
    """The same of one bucket, which DDP lays out anew in another order, of as many elements, for the second step."""
    same_bits(rank, world, wire, bucket_cap_mb=25, gradient_as_bucket_view=True)


def long_run(rank: int, world: int, wire: str) -> None:
    """Collectives of the user's own between buckets, in forward and backward; the same bytes and the averages."""
    ddp, state = hooked(Together(), wire, bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for step in range(LONG):
        if step % 20 == 0:
            assert_step_averages(ddp, batch(rank, step), wire)
        else:
            ddp.zero_grad()
            loss_of(ddp(batch(rank, step))).backward()
        optimizer.step()
    assert_same_on_all_ranks([parameter.detach() for parameter in ddp.parameters()])
    assert state.stats()["steps"] == LONG and int(state.stats()["buckets"]) >= 4


def counted(rank: int, world: int, wire: str) -> dict[str, Any]:
    """Collectives of one late step, on the user's group and on the private one, and bytes."""
    ddp, state = hooked(mlp(), wire, gradient_as_bucket_view=True)
    for step in range(3):
        ddp.zero_grad()
        loss_of(ddp(batch(rank, step))).backward()
    before = state.stats()
    with Collectives() as issued:
        loss_of(ddp(batch(rank, 3))).backward()
    after = state.stats()
    return {
        "buckets": [type(one).__name__ for one in inside_hook(state).buckets],
        "issued": len(issued.payload_bytes),
        "collectives": int(after["collectives"]) - int(before["collectives"]),
        "wire_bytes": int(after["wire_bytes"]) - int(before["wire_bytes"]),
        "allocations": int(after["wire_allocations"]) - int(before["wire_allocations"]),
        "numels": [one.numel() for one in ddp.parameters()],
        "path": after["path"],
    }


class ElsewhereInBackward(torch.autograd.Function):
    """A blocking collective in backward, over another group."""

    @staticmethod
    def forward(ctx: Any, features: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return features.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        dist.all_reduce(torch.ones(1), group=ctx.group)
        return gradients[0], None


class UnusedByRankZero(nn.Module):
    """When told so, rank 0 does not use the first layer: its last bucket comes before its backward has ended."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.first, self.second = nn.Linear(24, 24), nn.Linear(24, 24)
        self.group = group
        self.skips = False

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden = features if self.skips and dist.get_rank() == 0 else self.first(features)
        output: torch.Tensor = self.second(ElsewhereInBackward.apply(hidden, self.group))
        return output


def last_bucket_comes_early(rank: int, world: int, wire: str) -> None:
    """Its peers wait for what rank 0 issues behind it: so nothing may be waited for in the hook.

    But for the first steps, in which settings are compared.
    """
    ddp, state = hooked(
        UnusedByRankZero(patient_group()),
        wire,
        find_unused_parameters=True,
        process_group=patient_group(),
        bucket_cap_mb=0.001,
    )
    for step in range(6):
        ddp.module.skips = step > 2
        ddp.zero_grad()
        features = batch(rank, step).requires_grad_()
        loss_of(ddp(features)).backward()
        assert_same_on_all_ranks(gradients(ddp))
    assert int(state.stats()["buckets"]) >= 2


def scaled(rank: int, world: int, wire: str) -> None:
    """torch's GradScaler: a step that overflows on one rank is skipped on all, and the next ones train."""
    ddp, _ = hooked(mlp(), wire)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(6):
        before = [parameter.detach().clone() for parameter in ddp.parameters()]
        optimizer.zero_grad()
        loss = loss_of(ddp(batch(rank, step)))
        scaler.scale(loss * float("inf") if step == 2 and rank == 1 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        same = all(map(torch.equal, before, ddp.parameters()))
        assert same == (step == 2)
        assert_same_on_all_ranks([parameter.detach() for parameter in ddp.parameters()])
    assert scaler.get_scale() == 2.0


def traced(rank: int, world: int, wire: str, folder: str) -> None:
    """A trace of some steps; every bucket's collective has an end."""
    ddp, state = hooked(mlp(), wire)
    for step in range(3):
        assert_step_averages(ddp, batch(rank, step), wire)
    with state.record_trace(folder):
        for step in range(6):
            loss_of(ddp(batch(rank, step))).backward()
    dist.barrier()
    trace = read(Path(folder))[rank]
    assert len(trace.steps) >= 3
    for one in trace.steps:
        for bucket in one.marks.buckets:
            assert bucket.pack_ns <= bucket.launch_ns <= bucket.done_ns <= bucket.unpack_ns <= bucket.end_ns


def groups_of_states(rank: int, world: int, wire: str) -> int:
    """How many groups of second phases the states of two modules over one group make; rank 0 has one for both."""
    group, made, known = patient_group(), [], ProcessGroupCommunicator.apart

    def apart(self: Any, *arguments: Any) -> Any:
        made.append(self)
        return known(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessGroupCommunicator, "apart", apart)
        first, state = hooked(mlp(1), wire, process_group=group)
        second, _ = hooked(mlp(2), wire, process_group=group, state=state if rank == 0 else None)
        for step in range(4):
            for one in (first, second):
                assert_step_averages(one, batch(rank, step), wire)
    wrapper = wrapped(mlp(3), wire, process_group=group)  # ranks whose states have made different numbers of them
    assert_step_averages(wrapper, batch(rank, 0), wire)
    return len(made)


def dropped_state(rank: int, world: int, wire: str) -> None:
    """A module and its state that rank 0 alone has collected, when the next one over the group begins."""
    group = patient_group()
    kept = [hooked(mlp(1), wire, process_group=group)]
    assert_step_averages(kept[0][0], batch(rank, 0), wire)
    if rank == 0:
        kept.clear()
        gc.collect()
    second, _ = hooked(mlp(2), wire, process_group=group)
    for step in range(3):
        assert_step_averages(second, batch(rank, step), wire)


def shared_by_one_rank(rank: int, world: int, wire: str) -> None:
    """One state on rank 0, on the others one for each module; the first one is gone when the second module begins."""
    group = patient_group()
    kept = [hooked(mlp(1), wire, process_group=group)]
    assert_step_averages(kept[0][0], batch(rank, 0), wire)
    state = kept[0][1] if rank == 0 else None
    kept.clear()
    gc.collect()
    second, _ = hooked(mlp(2), wire, process_group=group, state=state)
    for step in range(3):
        assert_step_averages(second, batch(rank, step), wire)


def sparse_and_shared_by_one_rank(rank: int, world: int, wire: str) -> None:
    """The first sparse sum of a group comes from a state that rank 0 has for another module too."""
    group = patient_group()
    first, state = hooked(mlp(), wire, process_group=group)
    assert_step_averages(first, batch(rank, 0), wire)
    table = nn.Embedding(8, 4, sparse=True)
    second, _ = hooked(table, wire, process_group=group, state=state if rank == 0 else None)
    second(torch.tensor([rank])).sum().backward()
    assert table.weight.grad is not None
    expected = torch.zeros(8, 4)
    expected[:world] = torch.tensor(1.0).div(world)
    assert torch.equal(table.weight.grad.to_dense(), expected)


def nested(rank: int, world: int, wire: str) -> None:
    """A DDP module with static_graph inside a reentrant checkpoint, whose node is evaluated meanwhile."""
    ddp, _ = hooked(mlp(), wire, static_graph=True)
    for step in range(4):
        ddp.zero_grad()
        features = batch(rank, step).requires_grad_()
        output = checkpoint(ddp, features, use_reentrant=True)
        loss_of(output).backward()
        assert_same_on_all_ranks(gradients(ddp))


# What goes wrong


def raises_alone(rank: int, world: int, wire: str, when: str) -> tuple[str, str]:
    """On one rank a bucket's packing fails, or its addition between the phases: (error's class, its text)."""
    ddp, state = hooked(mlp(), wire, process_group=patient_group())
    for step in range(3):
        assert_step_averages(ddp, batch(rank, step), wire)
    loss = loss_of(ddp(batch(rank, 3)))
    part = {"pack": ENCODED_IS_PACKED, "between": ENCODED_IS_ADDED_UP}[when]
    known = part.present

    def fail(self: Any, *arguments: Any, **options: Any) -> None:
        if "bucket 1" in self.label:
            if rank == 1:
                raise MemoryError("only here")
            wait_briefly()
        known(self, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch, in_time():
        part.replace(patch, fail)
        with pytest.raises(Exception) as caught:  # noqa: PT011
            loss.backward()
    dist.barrier()
    with pytest.raises(fusedreduce.FusedReduceError, match="an earlier reduction failed"):
        inside_hook(state).connect()
    return type(caught.value).__name__, str(caught.value)


def late_peer(rank: int, world: int, wire: str) -> str:
    """The last rank comes after the timeout; with a new group a new DDP works."""
    ddp, _ = hooked(mlp(), wire, process_group=patient_group())
    for step in range(3):
        assert_step_averages(ddp, batch(rank, step), wire)
    loss = loss_of(ddp(batch(rank, 0)))
    wait_briefly()
    with after_the_others(rank == world - 1), in_time(), pytest.raises(fusedreduce.CollectiveError) as caught:
        loss.backward()
    dist.barrier()
    ddp, _ = hooked(mlp(), wire, process_group=patient_group())
    assert_step_averages(ddp, batch(rank, 0), wire)
    return str(caught.value)


def disagreement(rank: int, world: int, first: str, other: str) -> str:
    """The last rank is given another wire; with a state of the same one all works."""
    ddp, _ = hooked(mlp(), other if rank == world - 1 else first)
    with pytest.raises(fusedreduce.AgreementError) as caught:
        loss_of(ddp(batch(rank, 0))).backward()
    ddp, _ = hooked(mlp(), first)
    assert_step_averages(ddp, batch(rank, 0), first)
    return str(caught.value)
