"""What ranks run in test_dropin.py: torch's own class beside ours, in the same script."""

from __future__ import annotations

from typing import Any

import torch
from ddp_cases import Branches, wrapped
from hook_cases import SMALL_CAP_MB, batch, loss_of, mlp
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fusedreduce

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


def kept_mean_is_torchs(
    rank: int, world: int, how: str, others_to_none: bool, accumulates: bool
) -> tuple[list[float | None], list[float | None]]:
    """What torch's class and ours make of a kept gradient."""
    options: dict[str, Any] = {"find_unused_parameters": True, "gradient_as_bucket_view": True}
    case: dict[str, Any] = {"how": how, "others_to_none": others_to_none, "accumulates": accumulates}
    return (
        kept_gradient(TorchDDP(Branches(), bucket_cap_mb=SMALL_CAP_MB, **options), rank, **case),
        kept_gradient(wrapped(Branches(), **options), rank, **case),
    )


def kept_sum(
    rank: int, world: int, how: str, others_to_none: bool, accumulates: bool, **options: Any
) -> list[float | None]:
    """What a sum makes of a kept gradient."""
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": True, **options}
    config = fusedreduce.ReduceConfig(op="sum", grad_stats=True)
    ddp = fusedreduce.DistributedDataParallel(Branches(), reduce=config, bucket_cap_mb=SMALL_CAP_MB, **options)
    found = kept_gradient(ddp, rank, how=how, others_to_none=others_to_none, accumulates=accumulates)
    if how != "view":  # then ranks agree on one norm, though each has a gradient of its own
        return found
    measured = torch.stack([one.grad.double().norm() for one in ddp.parameters() if one.grad is not None]).norm()
    torch.testing.assert_close(ddp.grad_norm(), measured, rtol=1e-6, atol=0)
    return found


def kept_static(rank: int, world: int, op: str) -> tuple[list[float | None], list[float | None]]:
    """In a static graph the same parameters are unused in each step: what torch's class and ours make of a kept one."""
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
    return found[0], found[1]


# Caps


def bucket_sizes(rank: int, world: int, options: dict[str, Any]) -> tuple[str, str]:
    """The sizes of torch's buckets and of ours after their first step."""
    config = fusedreduce.ReduceConfig(policy="static")
    found = []
    for ddp in (TorchDDP(mlp(), **options), fusedreduce.DistributedDataParallel(mlp(), reduce=config, **options)):
        for step in range(3):
            loss_of(ddp(batch(rank, step))).backward()
        ddp(batch(rank, 3))
        found.append(ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"])
    return found[0], found[1]
