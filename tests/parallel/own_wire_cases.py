"""What ranks run in test_own_wires.py: wires that are not built in."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.ddp_models import SMALL_CAP_MB, batch, gradients, hooked, loss_of, mlp
from support.wires import settings
from torch import nn

import fusedreduce
from fusedreduce import DistributedDataParallel, FusedHookState, ReduceConfig
from fusedreduce.kernels.reference import store_rounded
from fusedreduce.wires import cast_of

HOOK, STATS = "hook", "with statistics"


def _made(model: nn.Module, wire: str, surface: str, **options: Any) -> tuple[Any, Any]:
    """A wrapper with this wire, and what to ask for its statistics."""
    has_stats = STATS in surface
    if surface.startswith(HOOK):
        state = FusedHookState(grad_stats=has_stats, **settings(wire))
        return hooked(model, wire, state, **options)[0], state
    config = ReduceConfig(**settings(wire), grad_stats=has_stats, **options)
    ddp = DistributedDataParallel(model, reduce=config, bucket_cap_mb=SMALL_CAP_MB)
    return ddp, ddp


def _steps(rank: int, wire: str, surface: str, steps: int, **options: Any) -> list[Any]:
    """Gradients of some steps and their statistics."""
    ddp, told = _made(mlp(), wire, surface, **options)
    found: list[Any] = []
    for step in range(steps):
        ddp.zero_grad()
        loss_of(ddp(batch(rank, step))).backward()
        found += gradients(ddp)
        if STATS in surface:
            found.append(told.grad_stats())
    return found


def equal(rank: int, world: int, own: str, built_in: str, surface: str) -> None:
    """A wire of one's own that does what a built-in one does leaves its bytes, and its statistics."""
    mine, theirs = (_steps(rank, wire, surface, steps=5) for wire in (own, built_in))
    for one, other in zip(mine, theirs, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def rounded(rank: int, world: int, wire: str, surface: str) -> None:
    """Every gradient is rounded as the wire does: of the last rank alone, so that sums are exact in any order."""
    modes = {"stale": fusedreduce.BoundedStaleness(1), "late": fusedreduce.Asynchronous()}
    options = {"sync_mode": modes[surface]} if surface in modes else {}
    model = mlp().double() if surface == "of fp64" else mlp()
    (ddp, told), cast, mine = _made(model, wire, surface, **options), cast_of(wire), rank == world - 1
    assert cast is not None and cast.rounding is not None
    expected: list[torch.Tensor] = []
    for step in range(4):
        before = expected
        for owner in (ddp, alone := copy.deepcopy(ddp.module)):
            owner.zero_grad()
            rows = batch(world - 1, step).to(next(ddp.parameters()).dtype)
            (loss_of(owner(rows)) * float(mine or owner is alone)).backward()
        expected = gradients(alone)
        for one in expected:
            sent = torch.empty_like(one, dtype=cast.torch_dtype)
            store_rounded(sent, one / world, cast)
            one.copy_(sent)
        if surface == "late":
            ddp.flush()
            if mine:  # its own in fp32, plus the average less that, which is rounded
                continue
        wanted = before if surface == "stale" else expected
        for one, other in zip(gradients(ddp), wanted, strict=True):
            assert torch.equal(one, other), (step, (one - other).abs().max())
        exact = zip(gradients(alone), expected, strict=True)
        assert not any(torch.equal((one / world).to(cast.torch_dtype).to(one.dtype), other) for one, other in exact)
    if STATS in surface:
        squares = sum(float(one.double().square().sum()) for one in expected)
        assert float(told.grad_norm()) == pytest.approx(squares**0.5, rel=1e-6)


def disagreement(rank: int, world: int, first: str, other: str, surface: str) -> str:
    """The last rank is given another wire."""
    with pytest.raises(fusedreduce.AgreementError) as caught:
        _steps(rank, other if rank == world - 1 else first, surface, steps=1)
    return str(caught.value)


def refused(rank: int, world: int, wire: str) -> None:
    """Where sums would be rounded to nearest, on every rank alike, and nothing is left behind."""
    patterns: dict[str, Any] = {"*weight": wire, "*": "bf16"}
    for asked in (patterns, lambda name, parameter: patterns["*weight" if name.endswith("weight") else "*"]):
        with pytest.raises(
            ValueError, match=r"accumulation='fp32' and wire=.* exclude each other: sums would be rounded"
        ):
            DistributedDataParallel(mlp(), reduce=ReduceConfig(wire=asked, accumulation="fp32"))
    with pytest.raises(ValueError, match="exclude each other"):
        FusedHookState(wire=wire, accumulation="fp32")
    _steps(rank, wire, "wrapper", steps=2)
