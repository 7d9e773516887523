"""What a user of torch's DistributedDataParallel relies on, of ours: on 2 and 3 Gloo ranks, torch's class beside it."""

from __future__ import annotations

import copy
import itertools
import logging
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.ddp_models import SMALL_CAP_MB, Branches, assert_same_on_all_ranks, batch, gradients, loss_of, mlp, wrapped
from support.grids import grid
from support.logs import logged
from support.ranks import RankPool, on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fusedreduce
from fusedreduce import Asynchronous, BoundedStaleness
from fusedreduce.config import SyncMode

KEPT = ("view", "other", "alone", "own")
KEPT_GRID = grid(
    ("world", "how", "others_to_none", "accumulates"),
    [*itertools.product((2, 3), KEPT, (False, True), (False, True))],
)

STEPS = 3

# Kept gradients of parameters that no rank uses


def kept_gradient(ddp: Any, rank: int, *, how: str, others_to_none: bool, accumulates: bool) -> list[float | None]:
    """After each of a few steps what a parameter that no rank uses has for a gradient.

    Args:
        ddp: around Branches, whose layer 2 is never used and whose layer 0 always is.
        rank: ours.
        how: the gradient that it begins with: a "view" of the bucket, the same on every rank, a view of "other" values
            on each, one on rank 0 "alone", or a tensor of the user's "own", of other values on each rank. (Values
            whose mean no order of summing rounds.)
        others_to_none: whether the other gradients are set to None between steps; else they are zeroed.
        accumulates: each step is two backwards, the first under no_sync.
    """
    parameter = ddp.module.layers[2].weight
    if how == "own":
        parameter.grad = torch.full_like(parameter, 3 * 2.0**rank)
    else:
        # A view is what a step leaves in which the parameter was used.
        loss_of(ddp((batch(rank, 0), 2))).backward()
        assert parameter.grad is not None
        parameter.grad.fill_(3 * 2.0**rank if how == "other" else 0.7)
        if how == "alone" and rank > 0:
            parameter.grad = None
    found: list[float | None] = []
    for step in range(STEPS):
        for other in ddp.parameters():
            if other is not parameter and other.grad is not None:
                other.grad = None if others_to_none else other.grad.zero_()
        if accumulates:
            with ddp.no_sync():
                loss_of(ddp((batch(rank, 10 + step), 0))).backward()
        loss_of(ddp((batch(rank, step), 0))).backward()
        if parameter.grad is None:
            found.append(None)
        else:
            (value,) = set(parameter.grad.flatten().tolist())
            found.append(value)
    return found


@KEPT_GRID
@on_ranks()
def test_the_mean_of_a_kept_gradient_that_no_rank_uses_has_torchs_bits(
    rank: int, world: int, how: str, others_to_none: bool, accumulates: bool
) -> None:
    """What torch's class and ours make of a kept gradient."""
    options: dict[str, Any] = {"find_unused_parameters": True, "gradient_as_bucket_view": True}
    case: dict[str, Any] = {"how": how, "others_to_none": others_to_none, "accumulates": accumulates}
    theirs, ours = (
        kept_gradient(TorchDDP(Branches(), bucket_cap_mb=SMALL_CAP_MB, **options), rank, **case),
        kept_gradient(wrapped(Branches(), **options), rank, **case),
    )
    assert theirs == ours


@KEPT_GRID
@on_ranks()
def test_a_sum_leaves_a_kept_gradient_that_no_rank_uses(
    rank: int, world: int, how: str, others_to_none: bool, accumulates: bool
) -> None:
    config = fusedreduce.ReduceConfig(op="sum", grad_stats=True)
    ddp = fusedreduce.DistributedDataParallel(
        Branches(),
        reduce=config,
        bucket_cap_mb=SMALL_CAP_MB,
        find_unused_parameters=True,
        gradient_as_bucket_view=True,
    )
    found = kept_gradient(ddp, rank, how=how, others_to_none=others_to_none, accumulates=accumulates)
    single = 0.699999988079071  # 0.7 as fp32
    own = 3 * 2.0**rank
    kept = {"view": single, "other": own, "alone": single if rank == 0 else None, "own": own}[how]
    assert found == [kept] * STEPS
    if how == "view":  # else ranks agree on one norm, though each has a gradient of its own
        measured = torch.stack([one.grad.double().norm() for one in ddp.parameters() if one.grad is not None]).norm()
        torch.testing.assert_close(ddp.grad_norm(), measured, rtol=1e-6, atol=0)


@pytest.mark.parametrize("op", ["mean", "sum"])
@on_ranks(2)
def test_in_a_static_graph_too(rank: int, world: int, op: str) -> None:
    """The same parameters are unused in each step."""
    config = fusedreduce.ReduceConfig(op=op)  # type: ignore[arg-type]
    options: dict[str, Any] = {
        "static_graph": True,
        "gradient_as_bucket_view": True,
        "bucket_cap_mb": SMALL_CAP_MB,
    }
    found = []
    for ddp in (
        TorchDDP(Branches(), **options),
        fusedreduce.DistributedDataParallel(Branches(), reduce=config, **options),
    ):
        found.append(kept_gradient(ddp, rank, how="own", others_to_none=True, accumulates=False))
    theirs, ours = found
    assert ours == (theirs if op == "mean" else [3 * 2.0**rank] * STEPS)


# Caps


@pytest.mark.parametrize(
    "options", [{"bucket_cap_mb": 0}, {"bucket_cap_mb": 1e-7}, {"bucket_cap_mb_list": [0, 0.005]}], ids=str
)
@on_ranks(2)
def test_a_cap_of_less_than_a_byte_is_what_it_is_for_torch(rank: int, world: int, options: dict[str, Any]) -> None:
    """The sizes of torch's buckets and of ours after their first step."""
    config = fusedreduce.ReduceConfig(policy="static")
    found = []
    for ddp in (TorchDDP(mlp(), **options), fusedreduce.DistributedDataParallel(mlp(), reduce=config, **options)):
        for step in range(3):
            loss_of(ddp(batch(rank, step))).backward()
        ddp(batch(rank, 3))
        found.append(ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"])
    theirs, ours = found[0], found[1]
    assert theirs == ours and "," in ours


# gradient_as_bucket_view with a 16-bit wire

SAID = re.compile(r"wire='(\w+)'.* (\d+) bytes at the start of backward and (\d+) at its end.* take (\d+) at both")


def told_of_views(make: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What is made, and what is said of views meanwhile."""
    with logged() as messages:
        made = make()
    return made, [message for message in messages if "gradient_as_bucket_view" in message]


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
@pytest.mark.parametrize("wire", ["bf16", "fp16"])
@on_ranks(2)
def test_views_of_a_16_bit_wire_are_none_and_rank_0_logs_what_that_costs(
    rank: int, world: int, wire: str, options: dict[str, Any]
) -> None:
    """Everything is as without the flag, but for what rank 0 logs: the bytes of this model."""
    with_flag, said = told_of_views(lambda: wrapped(mlp(), wire, gradient_as_bucket_view=True, **options))
    without, silent = told_of_views(lambda: wrapped(mlp(), wire, **options))
    assert len(said) == (rank == 0) and silent == []
    figures = [match.groups() for match in map(SAID.search, said) if match is not None]
    gradient_bytes = 4 * sum(one.numel() for one in with_flag.parameters())
    wire_bytes = int(with_flag.reduce_stats()["wire_bytes"])
    of_model = wire, str(wire_bytes), str(wire_bytes + gradient_bytes), str(gradient_bytes)
    assert figures == [of_model] * (rank == 0), said
    assert 0 <= wire_bytes - gradient_bytes // 2 <= 128 * int(with_flag.reduce_stats()["buckets"])
    assert with_flag.gradient_as_bucket_view, "as given, as torch's"
    for step in range(8):
        to_none = step % 2 == 0
        held = [one.grad for one in with_flag.parameters()]
        for ddp in (with_flag, without):
            ddp.zero_grad(set_to_none=to_none)
            loss_of(ddp(batch(rank, step))).backward()
        assert all(map(torch.equal, gradients(with_flag), gradients(without)))
        now = [one.grad for one in with_flag.parameters()]
        if step:
            assert all((one is before) != to_none for one, before in zip(now, held, strict=True))
        assert len({one.untyped_storage().data_ptr() for one in now if one is not None}) == len(now), "views share one"
    loss_of(with_flag(batch(rank, 9)))
    assert with_flag._get_ddp_logging_data()["gradient_as_bucket_view"] == 0
    copied, again = told_of_views(lambda: copy.deepcopy(with_flag))
    assert len(again) == (rank == 0) and copied.gradient_as_bucket_view
    loss_of(copied(batch(rank, 0))).backward()


# Switches in the environment


SWITCHES = {"DDP_SET_LAST_BUCKET_CAP": "1", "DDP_DISABLE_COMM_MEM": "0"}


@pytest.fixture(scope="module")
def switched() -> Iterator[RankPool]:
    """Two ranks whose environment has these."""
    pool = RankPool(2, SWITCHES)
    yield pool
    pool.close()


@on_ranks(pool="switched")
def test_a_switch_of_torchs_reducer_that_is_not_followed_is_named_once(rank: int, world: int) -> None:
    config = fusedreduce.ReduceConfig(policy="static")
    with logged(level=logging.WARNING) as messages:
        models = TorchDDP(_of_mebibytes()), fusedreduce.DistributedDataParallel(_of_mebibytes(), reduce=config)
        fusedreduce.DistributedDataParallel(_of_mebibytes(), reduce=config)
    found = []
    for ddp in models:
        for _ in range(3):
            loss_of(ddp(torch.zeros(1, 512))).backward()
        ddp(torch.zeros(1, 512))
        found.append(ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"])
    wanted = [f"{name}={value} is not followed" for name, value in SWITCHES.items()]
    assert [message.partition(" by ")[0] for message in messages] == wanted
    # torch's small bucket is the last one then, ours the first.
    assert found == [f"{2**21}, {2**20}", f"{2**20}, {2**21}"]


def _of_mebibytes() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(3)))


@pytest.mark.parametrize("debugged", ["OFF", "INFO", "DETAIL"], indirect=True)
@on_ranks(pool="debugged")
def test_torchs_debugging_has_logging_data_logged(rank: int, world: int) -> None:
    with logged("fusedreduce.parallel.logging_data") as kept:
        ddp = wrapped(Branches(), find_unused_parameters=True)
        for step in range(2):
            loss_of(ddp((batch(rank, step), 0))).backward()
        ddp((batch(rank, 2), 0))
    level = os.environ["TORCH_DISTRIBUTED_DEBUG"]
    assert len(kept) == {"OFF": 0, "INFO": 1, "DETAIL": 3}[level]
    if level != "OFF":
        assert kept[0].startswith(f"[Rank {rank}]: DDP Initialized with: ") and "world_size: 2" in kept[0]
    for number, line in enumerate(kept[1:], 1):
        assert line.startswith(f"[Rank {rank} / 2] [after iteration {number}] ")
        assert "avg_backward_comm_time: " in line and "layers.1.weight, layers.1.bias, layers.2.weight" in line


@pytest.mark.parametrize("debugged", [pytest.param("INFO", marks=pytest.mark.full), "DETAIL"], indirect=True)
@pytest.mark.parametrize(
    ("mode", "steps"), [(BoundedStaleness(2), (6, 6)), (Asynchronous(), (6, 6)), (Asynchronous(), (6, 1))]
)
@on_ranks(pool="debugged")
def test_modes_work_under_torchs_debugging(rank: int, world: int, mode: SyncMode, steps: tuple[int, int]) -> None:
    """Also where a rank ends while its peer goes on, which waits for nobody."""
    config = fusedreduce.ReduceConfig(wire="bf16", sync_mode=mode)
    ddp = fusedreduce.DistributedDataParallel(
        mlp(), reduce=config, bucket_cap_mb=SMALL_CAP_MB, gradient_as_bucket_view=True
    )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for step in range(steps[rank]):
        optimizer.zero_grad()
        loss_of(ddp(batch(rank, step))).backward()
        optimizer.step()
    optimizer.zero_grad()
    ddp.flush(optimizer)
    assert_same_on_all_ranks([one.detach() for one in ddp.parameters()])
