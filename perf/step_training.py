"""One training step of a variant: zero_grad, forward, backward, unscale, clip, optimizer; and what it must leave.

Weights and the optimizer's state are put back before every step, untimed: each step does the same work, and each can be
checked. Gradients are compared with the mean of all ranks' own, which torch's all_reduce makes of a plain backward;
weights with those that torch's plain optimizer makes of that mean.

Allowed error of a gradient's element: a few roundings to the wire of the largest element that any rank has in that
parameter, and a few of the smallest numbers that an fp16 wire has (scaled down). On a GPU two backwards of one model
differ by themselves, by the order of atomic additions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import harness
import models
import torch
import torch.distributed as dist
from records import BenchError
from step_variants import Variant
from torch import nn
from torch.distributed.tensor import DTensor

import fusedreduce

LEARNING_RATE = 1e-3
EPSILON = 1e-8  # AdamW's, torch's default
LOSS_SCALE = 1024.0
NEVER = 10**9  # steps until the scale would grow
ATOMICS = 1e-4  # of the largest element: what the order of a backward's own additions may make
SMALLEST_FP16 = 2.0**-24


@dataclass(frozen=True, kw_only=True)
class Task:
    """What every step of a run does, the same on all ranks."""

    model: str
    optimizer: str = "none"  # or "adamw"
    clips: bool = False
    scales: bool = False


def adamw(parameters: Sequence[torch.Tensor], *, fused: bool) -> torch.optim.Optimizer:
    """The optimizer of a step, or torch's plainest form of it, to compare with."""
    form: dict[str, Any] = {"fused": True} if fused else {"foreach": False, "fused": False}
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, eps=EPSILON, **form)


class Truth:
    """What a step of a model must leave, worked out without any variant; steps clip to half of the mean's norm."""

    def __init__(self, task: Task, template: nn.Module, batch: Sequence[torch.Tensor]) -> None:
        self._task = task
        self.before = [parameter.detach() for parameter in template.parameters()]
        model = copy.deepcopy(template)
        model(*batch).backward()
        self._own = [gradient_of(parameter) for parameter in model.parameters()]
        largest = torch.stack(torch._foreach_norm(self._own, float("inf")))
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        self._largest = largest
        self._mean = [gradient.clone() for gradient in self._own]
        for gradient in self._mean:
            dist.all_reduce(gradient)
        torch._foreach_div_(self._mean, dist.get_world_size())
        self.max_norm = float(_norm(self._mean)) / 2

    def check(self, name: str, variant: Variant, model: nn.Module) -> None:
        """Compares a model after its step.

        Raises:
            BenchError: a gradient or a weight is missing or wrong.
        """
        allowed = self._allowed(variant.wire)
        expected = self._mean if variant.sums else self._own
        if self._task.clips and not variant.plain:
            by = min(1.0, self.max_norm / (float(_norm(expected)) + 1e-6))
            expected = list(torch._foreach_mul(expected, by))
            allowed = 2 * allowed * by  # the norm is off as well
        names = [parameter_name for parameter_name, _ in model.named_parameters()]
        parameters = list(model.parameters())
        for parameter_name, parameter in zip(names, parameters, strict=True):
            if parameter.grad is None:
                raise BenchError(f"{name} is wrong: {parameter_name} has no gradient")
        off = torch._foreach_sub([gradient_of(parameter) for parameter in parameters], expected)
        worst = torch.stack(torch._foreach_norm(off, float("inf")))
        _refuse(name, "the gradient", names, worst, allowed)
        if self._task.optimizer != "none":
            after, bounds = self._stepped(expected, allowed.tolist())
            excess = [
                ((parameter.detach() - one).abs() - bound).amax()
                for parameter, one, bound in zip(parameters, after, bounds, strict=True)
            ]
            _refuse(name, "the updated weight", names, torch.stack(excess), torch.zeros_like(allowed))

    def _allowed(self, wire: str) -> torch.Tensor:
        """Per parameter."""
        ranks = dist.get_world_size()
        share = harness.TOLERANCE[wire] * max(1.0, ranks / 8)
        share = max(share, ATOMICS) if self._largest.is_cuda else share
        least = ranks * SMALLEST_FP16 / (LOSS_SCALE if self._task.scales else 1.0) if wire == "fp16" else 0.0
        return share * self._largest + least

    def _stepped(
        self, gradients: Sequence[torch.Tensor], allowed: Sequence[float]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Weights after a step with these gradients, and how far off each may be with gradients that far off.

        AdamW's first step is g / (|g| + eps) times the rate: with d to the gradient it moves by at most
        2 d / (|g| + eps), and by 2.
        """
        after = [weight.clone().requires_grad_() for weight in self.before]
        for weight, gradient in zip(after, gradients, strict=True):
            weight.grad = gradient.clone()
        adamw(after, fused=False).step()
        bounds = []
        for weight, gradient, off in zip(self.before, gradients, allowed, strict=True):
            moved = (2 * off / (gradient.abs() + EPSILON)).clamp(max=2.0)
            roundings = 8 * torch.finfo(weight.dtype).eps
            bounds.append(LEARNING_RATE * (moved + 1e-4) + roundings * weight.abs())
        return [weight.detach() for weight in after], bounds


class Training:
    """A variant's model, optimizer and scaler, and its step."""

    def __init__(
        self,
        name: str,
        variant: Variant,
        task: Task,
        truth: Truth,
        template: nn.Module,
        batch: Sequence[torch.Tensor],
    ) -> None:
        self._name, self._variant, self._truth, self._batch = name, variant, truth, batch
        self._clips = task.clips and not variant.plain
        self.model = variant.build(copy.deepcopy(template))
        self._parameters = [parameter.detach() for parameter in self.model.parameters()]
        optimizes = task.optimizer == "adamw"
        self._optimizer: Any = adamw(list(self.model.parameters()), fused=True) if optimizes else None
        self._scaler = self._new_scaler() if task.scales and not variant.plain else None

    def case(self) -> harness.Case:
        """For `take_turns`."""
        return harness.Case(prepare=self.rewind, run=self.step, check=self.check)

    @torch.no_grad()
    def rewind(self) -> None:
        """Weights and the optimizer's state as before any step."""
        if self._optimizer is None:
            return
        torch._foreach_copy_(self._parameters, self._truth.before)
        states = self._optimizer.state.values()
        held = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
        if held:
            torch._foreach_zero_(held)

    def step(self) -> None:
        """All of it."""
        if self._optimizer is None:
            self.model.zero_grad(set_to_none=True)
            self.model(*self._batch).backward()
            return
        optimizer, scaler = self._optimizer, self._scaler
        optimizer.zero_grad(set_to_none=True)
        loss = self.model(*self._batch)
        if scaler is None:
            loss.backward()
            if self._clips:
                self._clip()
            optimizer.step()
            return
        scaler.scale(loss).backward()
        if self._clips:
            scaler.unscale_(optimizer)
            self._clip()
        scaler.step(optimizer)
        scaler.update()

    def check(self) -> None:
        """Raises a BenchError if what the step left is wrong."""
        self._truth.check(self._name, self._variant, self.model)

    def _clip(self) -> None:
        how, max_norm, model = self._variant.clip, self._truth.max_norm, self.model
        if how == "torch":
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        elif how == "torch folded":
            norm = nn.utils.get_total_norm([gradient_of(parameter) for parameter in model.parameters()])
            self._optimizer.grad_scale = ((norm + 1e-6) / max_norm).clamp(min=1.0)
        else:
            assert isinstance(model, nn.parallel.DistributedDataParallel)
            optimizer = None if how == "in place" else self._optimizer
            fusedreduce.clip_grad_norm_(model, max_norm, optimizer, reuse_norm=how == "reused")

    def _new_scaler(self) -> torch.amp.GradScaler:
        options: dict[str, Any] = {"init_scale": LOSS_SCALE, "growth_interval": NEVER}
        if isinstance(self.model, fusedreduce.DistributedDataParallel):
            return fusedreduce.FusedGradScaler(self.model, **options)
        return torch.amp.GradScaler(self._parameters[0].device.type, **options)


def new_training(task: Task, device: torch.device, rank: int) -> tuple[Truth, Callable[[str, Variant], Training]]:
    """The truth of a task on this rank, and what makes a variant's training; all begin with the same model."""
    template = models.build(task.model).to(device)
    batch = models.batch(task.model, rank, device)
    truth = Truth(task, template, batch)
    return truth, lambda name, variant: Training(name, variant, task, truth, template, batch)


def gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter's gradient, which is there; of FSDP2's shards the whole, a collective."""
    assert parameter.grad is not None
    gradient = parameter.grad.detach()
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def _norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    norm: torch.Tensor = torch.stack(torch._foreach_norm(list(tensors))).double().norm()
    return norm


def _refuse(name: str, what: str, names: Sequence[str], worst: torch.Tensor, allowed: torch.Tensor) -> None:
    wrong = ~(worst <= allowed)  # NaN is wrong too
    if bool(wrong.any()):
        at = int(wrong.nonzero()[0])
        raise BenchError(
            f"{name} is wrong: {what} of {names[at]} is off by {float(worst[at]):.3g}, {float(allowed[at]):.3g} is "
            f"allowed ({int(wrong.sum())} of {len(names)} parameters)"
        )
