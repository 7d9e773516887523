"""FusedGradScaler and clipping on 2 Gloo ranks, against torch's wrapper, clip and GradScaler."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.ddp_models import assert_same_on_all_ranks, batch, mlp, wrapped
from support.ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.utils import clip_grad_norm_ as torch_clip
from torch.optim import SGD, AdamW, Optimizer

from fusedreduce.optim.clip import clip_grad_norm_
from fusedreduce.optim.grad_scaler import FusedGradScaler

OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "fused": lambda model: AdamW(model.parameters(), lr=0.01, fused=True),
    "not fused": lambda model: AdamW(model.parameters(), lr=0.01),
    "momentum": lambda model: SGD(model.parameters(), lr=1e-4, momentum=0.9, fused=True),
}
# Powers of two that grow until gradients overflow. (Not in the first step: torch's fused SGD would lose its momentum.)
INIT_SCALE, GROWTH_INTERVAL = 2.0**112, 3


def amp_parity(
    rank: int,
    wire: str,
    optimizer: str = "fused",
    max_norm: float = math.inf,
    init_scale: float = INIT_SCALE,
    fused_scaler: bool = True,
) -> dict[str, Any]:
    """The unchanged loop, twice; the largest relative difference of losses, and what the scales went through."""
    ours, theirs = wrapped(mlp(), wire), TorchDDP(mlp())
    optimizers = [OPTIMIZERS[optimizer](model) for model in (ours, theirs)]
    options: dict[str, Any] = {"init_scale": init_scale, "growth_interval": GROWTH_INTERVAL}
    mine = FusedGradScaler(ours, **options) if fused_scaler else torch.amp.GradScaler("cpu", **options)
    scalers = [mine, torch.amp.GradScaler("cpu", **options)]
    worst, scales, folds, steps = 0.0, [], 0, 60
    for step in range(steps):
        losses = []
        for model, stepper, scaler in zip((ours, theirs), optimizers, scalers, strict=True):
            stepper.zero_grad()
            loss = _loss(model, rank, step)
            scaler.scale(loss).backward()
            scaler.unscale_(stepper)
            if scaler is scalers[0]:
                before = _first_gradient(ours)
                clip_grad_norm_(ours, max_norm, stepper if optimizer != "not fused" else None)
                folds += torch.equal(before, _first_gradient(ours))
            elif max_norm < math.inf:
                torch_clip(model.parameters(), max_norm)
            scaler.step(stepper)
            scaler.update()
            losses.append(loss.item())
        assert math.isfinite(losses[0]) and math.isfinite(losses[1])
        worst = max(worst, abs(losses[0] - losses[1]) / abs(losses[1]))
        scales.append((scalers[0].get_scale(), scalers[1].get_scale()))
    assert_same_on_all_ranks([parameter.detach() for parameter in ours.parameters()])
    changes = [after[0] / before[0] for before, after in zip(scales, scales[1:], strict=False)]
    return {
        "worst": worst,
        "same scales": all(one == other for one, other in scales),
        "backoffs": changes.count(0.5),
        "growths": changes.count(2.0),
        "folds": folds / steps,
    }


def _loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """With noise for targets: gradients stay as large as they are."""
    given = batch(rank, step)
    loss: torch.Tensor = (model(given) - given[:, :12].flip(0)).square().mean() * 64.0
    return loss


def _first_gradient(model: nn.Module) -> torch.Tensor:
    gradient = next(model.parameters()).grad
    assert gradient is not None
    return gradient.clone()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@on_ranks(2)
def test_scaled_steps_on_two_ranks_are_torchs_bit_for_bit(rank: int, world: int, optimizer: str) -> None:
    found = amp_parity(rank, "native", optimizer)
    assert found["worst"] == 0.0 and found["same scales"]
    assert found["backoffs"] >= 5 and found["growths"] >= 5


# (rounding of the coefficient, or of the wire, in training that gets nowhere near chaos)
@pytest.mark.parametrize(("wire", "bound"), [("native", 1e-6), ("bf16", 2e-3)])
@pytest.mark.parametrize("optimizer", ["fused", pytest.param("not fused", marks=pytest.mark.full)])
@on_ranks(2)
def test_clipped_and_scaled_steps_on_two_ranks(rank: int, world: int, wire: str, bound: float, optimizer: str) -> None:
    found = amp_parity(rank, wire, optimizer, 1.0)
    assert found["worst"] <= bound and found["same scales"]
    assert found["backoffs"] >= 5 and found["growths"] >= 5
    assert found["folds"] >= (0.75 if optimizer == "fused" else 0.0)


@pytest.mark.parametrize(
    ("wire", "init_scale", "bound"), [("native", 2.0**112, 0), ("bf16", 2.0**112, 2e-3), ("fp16", 2.0**13, 0.1)]
)
@on_ranks(2)
def test_torchs_scaler_trains_our_wrapper(rank: int, world: int, wire: str, init_scale: float, bound: float) -> None:
    """On an fp16 wire its scale overflows, as on torch's own fp16 hook: backed off from, and skipped on both ranks."""
    found = amp_parity(rank, wire, init_scale=init_scale, fused_scaler=False)
    assert found["worst"] <= bound and found["backoffs"] >= 5 and found["growths"] >= 5
    # torch's wrapper, at wire native, skips no step where ours overflows.
    assert found["same scales"] or wire == "fp16"


@on_ranks(2)
def test_torchs_wrapper_is_clipped(rank: int, world: int) -> None:
    """Without any hook of ours, too."""
    ddp = TorchDDP(mlp())
    ddp(batch(rank, 0)).square().mean().backward()
    twins = [one.detach().clone().requires_grad_() for one in ddp.parameters()]
    for twin, one in zip(twins, ddp.parameters(), strict=True):
        assert one.grad is not None
        twin.grad = one.grad.clone()
    norm = clip_grad_norm_(ddp, 0.01)
    assert float(norm) == pytest.approx(float(torch_clip(twins, 0.01)), rel=1e-6)
    for twin, one in zip(twins, ddp.parameters(), strict=True):
        assert one.grad is not None and twin.grad is not None
        torch.testing.assert_close(one.grad, twin.grad, rtol=1e-6, atol=0)
    assert_same_on_all_ranks([one.grad for one in ddp.parameters() if one.grad is not None])
