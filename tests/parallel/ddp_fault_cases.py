"""What ranks run in test_ddp_faults.py: a step goes wrong, is reported, and the wrapper is used again.

Each case has a group of its own, so that one that is ruined leaves the pool's alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ddp_models import (
    UNIT,
    Branches,
    Checkpointed,
    assert_averaged,
    assert_step_averages,
    batch,
    loss_of,
    mlp,
    wrapped,
)
from support.timeouts import after_the_others, in_time, patient_group, wait_briefly
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import fusedreduce


class HookFailed(Exception):
    """What a user's hook raises."""


def right_steps(
    rank: int,
    ddp: fusedreduce.DistributedDataParallel,
    make_input: Callable[[int, int], Any] = batch,
    *,
    wire: str = "native",
    steps: int = 6,
) -> None:
    """Steps with right results: after some of them only the parameters that complete a bucket are hooked."""
    for step in range(steps):
        assert_step_averages(ddp, make_input(rank, step), wire)


def _recover(rank: int, world: int, ddp: fusedreduce.DistributedDataParallel, **options: Any) -> None:
    """After a ruined group: reset says so on every rank, and a new group makes everything right."""
    with in_time(), pytest.raises(fusedreduce.FusedReduceError, match="make a new one on every rank"):
        ddp.reset()
    with pytest.raises(fusedreduce.FusedReduceError, match="_update_process_group"):
        ddp(batch(rank, 0))
    dist.barrier()
    ddp._update_process_group(patient_group())
    right_steps(rank, ddp, **options)


def hook_fails_everywhere(rank: int, world: int, before: int, bucket_index: int, as_view: bool) -> None:
    """A comm hook that raises on all ranks: its own error from backward, then a clear one, then reset()."""
    failing = [False]

    def fails(bucket: Any) -> torch.futures.Future[torch.Tensor]:
        if failing[0] and bucket.index() == bucket_index:
            raise HookFailed("by the user")
        future: torch.futures.Future[torch.Tensor] = default_hooks.allreduce_hook(group, bucket)
        return future

    group = patient_group()
    ddp = wrapped(mlp(), process_group=group, gradient_as_bucket_view=as_view)
    ddp.register_comm_hook(None, lambda state, bucket: fails(bucket))
    right_steps(rank, ddp, steps=before)
    for _ in range(2):
        loss = loss_of(ddp(batch(rank, 0)))
        failing[0] = True
        with in_time(), pytest.raises(HookFailed, match="by the user"):
            loss.backward()
        failing[0] = False
        for call in (lambda: ddp(batch(rank, 1)), ddp.check_finalized):
            with pytest.raises(fusedreduce.FusedReduceError, match=r"call reset\(\).*HookFailed: by the user"):
                call()
        assert ddp._get_ddp_logging_data()["has_error"] == 1
        with in_time():
            ddp.reset()
        right_steps(rank, ddp)


def hook_fails_on_one_rank(rank: int, world: int, before: int) -> None:
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


class Interrupted(nn.Module):
    """Between two layers of backward it raises when armed, and calls `meanwhile` when not."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.armed = False
        self.meanwhile: Callable[[], None] = lambda: None

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        layers: Any = self.body
        hidden = layers[1](layers[0](features))
        if hidden.requires_grad:
            hidden.register_hook(self._half_way)
        result: torch.Tensor = layers[4](layers[3](layers[2](hidden)))
        return result

    def _half_way(self, _: torch.Tensor) -> None:
        if self.armed:
            raise KeyError("of the user")
        self.meanwhile()


def user_error_in_backward(rank: int, world: int, before: int, wire: str) -> None:
    """An exception of the user's own, half-way through every rank's backward: reset() and go on, twice."""
    ddp = wrapped(Interrupted(), wire, process_group=patient_group())
    model: Any = ddp.module
    right_steps(rank, ddp, wire=wire, steps=before)
    for _ in range(2):
        ddp.zero_grad()
        loss = loss_of(ddp(batch(rank, 0)))
        model.armed = True
        with pytest.raises(KeyError, match="of the user"):
            loss.backward()
        model.armed = False
        for call in (lambda: ddp(batch(rank, 1)), ddp.check_finalized):
            with pytest.raises(fusedreduce.FusedReduceError, match=r"body\.0\.weight, body\.0\.bias.*") as caught:
                call()
            assert "reset()" in str(caught.value)
        with in_time():
            ddp.reset()
        right_steps(rank, ddp, wire=wire)


def user_error_on_one_rank(rank: int, world: int, wire: str) -> tuple[int, int]:
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
    return reduced, kept


class Partial(nn.Module):
    """Uses all three layers, or only the first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(15)
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))

    def forward(self, given: tuple[torch.Tensor, bool]) -> torch.Tensor:
        features, everything = given
        for layer in self.layers if everything else self.layers[:1]:
            features = torch.tanh(layer(features))
        return features


MISSING = ("layers.1.weight", "layers.1.bias", "layers.2.weight", "layers.2.bias")


def unfinished(rank: int, world: int, before: int, wire: str) -> tuple[str, str]:
    """A parameter takes no part in the loss: what the next forward and check_finalized() say. Then reset() and on."""
    ddp = wrapped(Partial(), wire, process_group=patient_group(), bucket_cap_mb=0.001)
    right_steps(rank, ddp, lambda r, s: (batch(r, s), True), wire=wire, steps=before)
    ddp.zero_grad()
    ddp.check_finalized()
    loss_of(ddp((batch(rank, 0), False))).backward()
    messages = []
    for call in (lambda: ddp((batch(rank, 1), True)), ddp.check_finalized):
        with pytest.raises(fusedreduce.FusedReduceError) as caught:
            call()
        messages.append(str(caught.value))
    with in_time():
        ddp.reset()
    right_steps(rank, ddp, lambda r, s: (batch(r, s), True), wire=wire)
    return messages[0], messages[1]


class Sometimes(Checkpointed):
    """Several reentrant checkpoints around one weight, when told to."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        self.times = 2 if self.again else 1
        return super().forward(features)

    again = False


def marked_twice(rank: int, world: int, before: int) -> str:
    """Two gradients for one parameter in one backward: which, and the usual causes. Then reset() and on."""
    model = Sometimes(reentrant=True)
    ddp = wrapped(model, process_group=patient_group())
    right_steps(rank, ddp, steps=before)
    model.again = True
    ddp.zero_grad()
    loss = loss_of(ddp(batch(rank, 0)))
    with in_time(), pytest.raises(fusedreduce.FusedReduceError) as caught:
        loss.backward()
    model.again = False
    with pytest.raises(fusedreduce.FusedReduceError, match=r"call reset\(\)"):
        ddp(batch(rank, 1))
    with in_time():
        ddp.reset()
    right_steps(rank, ddp)
    return str(caught.value)


def different_control_flow(rank: int, world: int, before: int, both_miss: bool) -> str:
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
    return str(caught.value)


# How a wrapper is built in which each rank leaves another layer unused.
UNUSED: dict[str, dict[str, Any]] = {
    "search": {"find_unused_parameters": True},
    "static graph": {"static_graph": True},
    "staleness": {"find_unused_parameters": True},
}


def late_peer_with_unused(rank: int, world: int, how: str) -> str:
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
    for step in range(3):
        ddp.zero_grad()
        local = copy.deepcopy(ddp.module)
        loss_of(ddp((batch(rank, 7), rank % 2))).backward()
        loss_of(local((batch(rank, 7), rank % 2))).backward()
        if how != "staleness" or step:
            assert_averaged(ddp.module, local)
    return f"{type(caught.value).__name__}: {caught.value}"


def lost_for_every_wrapper(rank: int, world: int) -> None:
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
