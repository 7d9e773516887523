"""fused_hook on wires whose contributions are exchanged and added up in fp32, on 2 and 3 Gloo ranks.

What it does on any wire: test_ddp.py, test_ddp_observed.py and test_local_ddp.py, whose tables have these too.
"""

from __future__ import annotations

import copy
import gc
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel.test_faults import survivors_raise
from support.comm_hooks import Shown
from support.ddp_models import (
    SMALL_CAP_MB,
    Collectives,
    Together,
    assert_same_on_all_ranks,
    assert_step_averages,
    batch,
    gradients,
    hooked,
    loss_of,
    mlp,
    wrapped,
)
from support.grids import grid
from support.inside import ENCODED_IS_ADDED_UP, ENCODED_IS_PACKED, inside_hook
from support.own_wires import NAME
from support.ranks import fake_group, group_of_one, on_ranks
from support.timeouts import in_time, patient_group, wait_briefly
from support.wires import EXCHANGED, encoding_of, reduced, settings
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusedreduce
from fusedreduce.comm.process_group import ProcessGroupCommunicator
from fusedreduce.kernels.encodings import ENCODINGS

pytestmark = pytest.mark.usefixtures("path")


class OfAGroupThatIsGone:
    """An exchange that its peers have not taken part in."""

    def notify(self, done: Callable[[], None]) -> None:
        """Nobody is told."""

    def ready(self) -> bool:
        return False

    def future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return torch.futures.Future()

    def wait(self) -> None:
        raise RuntimeError("the peers of the old group are gone")


@grid(
    ("world", "cap_mb", "wire"),
    [
        *itertools.product((2, 3), (SMALL_CAP_MB, 25), EXCHANGED),
        *itertools.product((2, 3), [SMALL_CAP_MB], map(NAME.format, ("SMALL8", "LARGE4"))),
        (2, SMALL_CAP_MB, NAME.format("TOP16")),  # which Gloo adds up on three, in an order of its own
    ],
)
@on_ranks()
def test_bits_are_the_definitions_and_the_wrappers_whatever_the_buckets(
    rank: int, world: int, wire: str, cap_mb: float
) -> None:
    """Each step's gradients are what the definition makes of those of all ranks, and what the wrapper makes of them.

    Whatever the buckets, which are not those of the wrapper. What is not encoded is added up by Gloo, on three ranks in
    an order of its own. One bucket DDP lays out anew in another order, of as many elements, for the second step.
    """
    ours, model = wrapped(mlp(), wire, policy="static", bucket_cap_mb=1.0), mlp()
    ddp, _ = hooked(model, wire, bucket_cap_mb=cap_mb, gradient_as_bucket_view=cap_mb > 1)
    for step in range(3):
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


@pytest.mark.parametrize("steps", [30, pytest.param(110, marks=pytest.mark.full)])
@on_ranks(3)
def test_steps_with_collectives_of_the_users_own(rank: int, world: int, steps: int) -> None:
    """Collectives of the user's own between buckets, in forward and backward; the same bytes and the averages."""
    ddp, state = hooked(Together(), "int8", bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for step in range(steps):
        if step % 20 == 0:
            assert_step_averages(ddp, batch(rank, step), "int8")
        else:
            ddp.zero_grad()
            loss_of(ddp(batch(rank, step))).backward()
        optimizer.step()
    assert_same_on_all_ranks([parameter.detach() for parameter in ddp.parameters()])
    assert state.stats()["steps"] == steps and int(state.stats()["buckets"]) >= 4


@pytest.mark.parametrize("wire", ["int8", "int4", "bf16+fp32"])
@pytest.mark.parametrize("world", [2, 3])
@on_ranks()
def test_collectives_bytes_and_allocations(rank: int, world: int, wire: str) -> None:
    """Collectives of one late step, on the user's group and on the private one, and bytes."""
    ddp, state = hooked(mlp(), wire, gradient_as_bucket_view=True)
    for step in range(3):
        ddp.zero_grad()
        loss_of(ddp(batch(rank, step))).backward()
    before = state.stats()
    with Collectives() as issued:
        loss_of(ddp(batch(rank, 3))).backward()
    after = state.stats()
    collectives, sent, allocations = (
        int(after[key]) - int(before[key]) for key in ("collectives", "wire_bytes", "wire_allocations")
    )
    buckets = [type(one).__name__ for one in inside_hook(state).buckets]
    each = {"Bucket": 1, "AccumulatedBucket": 2, "EncodedBucket": min(world, 3) - 1, "PartlyEncodedBucket": world}
    assert collectives == len(issued.payload_bytes) == sum(each[kind] for kind in buckets)
    assert len(buckets) >= 2 and allocations == 0 and after["path"] == "torch"
    assert "PartlyEncodedBucket" in buckets or wire == "bf16+fp32"
    encoding = ENCODINGS.get(wire)
    block, block_bytes = (encoding.block_numel, encoding.block_bytes) if encoding else (1, 2)
    numels = [one.numel() for one in ddp.parameters()]
    least = sum(-(-numel // block) * block_bytes for numel in numels if numel >= max(block, 100))
    padding = len(buckets) * world * block_bytes * 1024 / block
    assert least < sent < least + 4 * 100 + padding


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


@on_ranks(3)
def test_last_bucket_comes_early(rank: int, world: int) -> None:
    """Its peers wait for what rank 0 issues behind it: so nothing may be waited for in the hook.

    But for the first steps, in which settings are compared.
    """
    ddp, state = hooked(
        UnusedByRankZero(patient_group()),
        "int8",
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


@on_ranks(3)
def test_states_over_one_group_share_the_groups_of_phases(rank: int, world: int) -> None:
    """How many groups of second phases the states of two modules over one group make; rank 0 has one for both."""
    group, made, known = patient_group(), [], ProcessGroupCommunicator.apart

    def apart(self: Any, *arguments: Any) -> Any:
        made.append(self)
        return known(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessGroupCommunicator, "apart", apart)
        first, state = hooked(mlp(1), "int8", process_group=group)
        second, _ = hooked(mlp(2), "int8", process_group=group, state=state if rank == 0 else None)
        for step in range(4):
            for one in (first, second):
                assert_step_averages(one, batch(rank, step), "int8")
    wrapper = wrapped(mlp(3), "int8", process_group=group)  # ranks whose states have made different numbers of them
    assert_step_averages(wrapper, batch(rank, 0), "int8")
    assert len(made) == 1


@pytest.mark.parametrize("shared", [False, True])
@on_ranks(3)
def test_dropped_state(rank: int, world: int, shared: bool) -> None:
    """A module that rank 0 alone has collected, with its state, when the next one over the group begins.

    Or all have, and rank 0 uses the state again (`shared`).
    """
    group = patient_group()
    kept = [hooked(mlp(1), "int8", process_group=group)]
    assert_step_averages(kept[0][0], batch(rank, 0), "int8")
    state = kept[0][1] if shared and rank == 0 else None
    if shared or rank == 0:
        kept.clear()
        gc.collect()
    second, _ = hooked(mlp(2), "int8", process_group=group, state=state)
    for step in range(3):
        assert_step_averages(second, batch(rank, step), "int8")


@on_ranks(3)
def test_sparse_and_shared_by_one_rank(rank: int, world: int) -> None:
    """The first sparse sum of a group comes from a state that rank 0 has for another module too."""
    group = patient_group()
    first, state = hooked(mlp(), "int8", process_group=group)
    assert_step_averages(first, batch(rank, 0), "int8")
    table = nn.Embedding(8, 4, sparse=True)
    second, _ = hooked(table, "int8", process_group=group, state=state if rank == 0 else None)
    second(torch.tensor([rank])).sum().backward()
    assert table.weight.grad is not None
    expected = torch.zeros(8, 4)
    expected[:world] = torch.tensor(1.0).div(world)
    assert torch.equal(table.weight.grad.to_dense(), expected)


@on_ranks(3)
def test_nested(rank: int, world: int) -> None:
    """A DDP module with static_graph inside a reentrant checkpoint, whose node is evaluated meanwhile."""
    ddp, _ = hooked(mlp(), "int8", static_graph=True)
    for step in range(4):
        ddp.zero_grad()
        features = batch(rank, step).requires_grad_()
        output = checkpoint(ddp, features, use_reentrant=True)
        loss_of(output).backward()
        assert_same_on_all_ranks(gradients(ddp))


# What goes wrong


@pytest.mark.parametrize("when", ["pack", "between"])
@on_ranks(3)
def test_a_rank_that_raises_alone_is_an_error_on_every_rank_in_time(rank: int, world: int, when: str) -> None:
    """A bucket's packing fails there, or its addition between the phases.

    Its peers have what it had issued before, and say in which phase of which bucket they have waited for it.
    """
    ddp, state = hooked(mlp(), "int8", process_group=patient_group())
    for step in range(3):
        assert_step_averages(ddp, batch(rank, step), "int8")
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
    kind, text = type(caught.value).__name__, str(caught.value)
    if rank == 1:
        assert (kind, text) == ("MemoryError", "only here")
    else:
        phase = {"pack": "all-(to-all|reduce)", "between": "all-(gather|reduce)"}[when]
        assert kind == "CollectiveError"
        assert re.search(rf"rank {rank}: .*the {phase} of bucket 1 \(\d parameters of shapes", text), text


def test_survivors_raise_in_time_and_name_phase_and_bucket(tmp_path: Path) -> None:
    """The last of three ranks ends when it has taken part in phase one of every bucket, and in no phase two."""
    named = r"all-gather of bucket \d+ \(\d parameters of shapes"
    survivors_raise(tmp_path, 3, "int8", "view", "between", "3", named=named)


# One rank


@pytest.mark.parametrize("wire", EXCHANGED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_a_mean_over_one_rank_is_within_a_rounding(wire: str, dtype: torch.dtype) -> None:
    with group_of_one():
        state = fusedreduce.FusedHookState(**settings(wire))
        weight = torch.zeros(40, 25, dtype=dtype)
        for _ in range(2):
            buffer = torch.linspace(-1.0, 1.0, 1000).to(dtype)
            before = buffer.clone()
            result = fusedreduce.fused_hook(state, Shown(0, [weight], buffer=buffer)).wait()  # type: ignore[arg-type]
            assert result.data_ptr() == buffer.data_ptr() and result.dtype is dtype
            bound = {"int8": 1 / 254, "int4": 1.01 / 14}.get(wire, 2**-9) + (1e-2 if dtype is torch.bfloat16 else 1e-3)
            assert float((result - before).abs().max()) <= bound


@pytest.mark.parametrize("wire", EXCHANGED)
def test_a_buffer_that_is_not_that_of_its_parameters_is_refused(wire: str) -> None:
    with group_of_one():
        state, buffer = fusedreduce.FusedHookState(**settings(wire)), torch.ones(1000)
        with pytest.raises(ValueError, match=r"has 1000 elements, but a wire that is exchanged needs those of its par"):
            fusedreduce.fused_hook(state, Shown(0, [torch.ones(30, 30)], buffer=buffer))  # type: ignore[arg-type]
        assert buffer.eq(1.0).all()
        assert fusedreduce.fused_hook(state, Shown(0, [torch.ones(40, 25)], buffer=buffer)).wait().numel() == 1000  # type: ignore[arg-type]


@pytest.mark.parametrize("wire", EXCHANGED)
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_new_group_is_not_told_of_exchanges_that_the_old_one_left_open(
    monkeypatch: pytest.MonkeyPatch, wire: str, ranks: int
) -> None:
    """A backward that raised midway on every rank; then they, or the one that is left, go on with the same state."""
    monkeypatch.setattr(ProcessGroupCommunicator, "apart", lambda self, *_: ProcessGroupCommunicator(self.group))
    state, weight = fusedreduce.FusedHookState(**settings(wire)), torch.ones(40, 25)

    def show(*, last: bool) -> torch.futures.Future[torch.Tensor]:
        bucket: Any = Shown(0, [weight], last=last)
        return fusedreduce.fused_hook(state, bucket)

    with fake_group(3), monkeypatch.context() as patch:
        show(last=True).wait()
        patch.setattr(ProcessGroupCommunicator, "all_to_all", lambda *_: OfAGroupThatIsGone())
        show(last=False)
    with fake_group(ranks):
        for _ in range(3):
            mean = show(last=True).wait()
            assert ranks > 1 or mean.isfinite().all(), "the collectives of a fake group write nothing"
