"""clip_grad_norm_ on a real Reducer with scripted peers, and on wrappers in a group of one.

What is compared with torch is its own clip_grad_norm_ and the same optimizer on the same reduced gradients.
"""

from __future__ import annotations

import copy
import gc
import math
import pickle
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.inside import inside
from support.leaf_steps import clear
from support.loopback import Loopback
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.utils import clip_grad_norm_ as torch_clip
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

import fusedreduce
from fusedreduce import FusedReduceError, ReduceConfig, Reducer
from fusedreduce.kernels import counting
from fusedreduce.optim.clip import clip_grad_norm_
from fusedreduce.optim.folded_step import OptimizerHook
from fusedreduce.optim.grad_scaler import FusedGradScaler

pytestmark = pytest.mark.usefixtures("path")

SHAPES = ((3,), (5, 7), (1,), (0,), (40,), (8, 3))
MakeOptimizer = Callable[[Sequence[torch.Tensor]], Optimizer]
FUSED: dict[str, MakeOptimizer] = {
    "adam": lambda parameters: Adam(parameters, lr=0.1, fused=True),
    "adamw": lambda parameters: AdamW(parameters, lr=0.1, weight_decay=0.1, fused=True),
    "sgd": lambda parameters: SGD(parameters, lr=0.1, fused=True),
    "momentum": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, fused=True),
}
# Ours: the norm has 1e-6 of an ulp, the divisor is rounded once to fp32 and the quotient once: a unit each.
OURS_ULPS = 2
# torch: sums squares in fp32, by parameter and then in all, and rounds the norm, the coefficient and the product.
THEIRS_ULPS = 8
# Of weights after 10 steps of at most 0.1 with gradients that differ by the sum of both.
WEIGHTS = 1e-5


class Run:
    """Parameters, their reducer, an optimizer, and a twin of both that torch clips."""

    def __init__(self, kind: str = "adamw", dtype: torch.dtype = torch.float32, **config: Any) -> None:
        self.parameters = [torch.randn(shape).to(dtype).requires_grad_() for shape in SHAPES]
        self.twins = [one.detach().clone().requires_grad_() for one in self.parameters]
        self.communicator = Loopback()
        self.reducer = Reducer(self.parameters, self.communicator, ReduceConfig(**config))
        self.optimizer, self.twin = (FUSED[kind](held) for held in (self.parameters, self.twins))
        self.meet()

    def meet(self) -> None:
        """A step as the others come: in its first one an optimizer is not waited for."""
        self.backward(0)
        clip_grad_norm_(self.reducer, 1.0, self.optimizer)
        torch_clip(self.twins, 1.0)
        self.optimizer.step()
        self.twin.step()

    def backward(self, seed: int, factor: float = 1.0) -> None:
        """New reduced gradients; the twins have the same."""
        generator = torch.Generator().manual_seed(seed)
        loss = torch.zeros((), dtype=torch.float64)
        for parameter in self.parameters:
            parameter.grad = None
            loss = loss + (parameter * factor * torch.randn(parameter.shape, generator=generator)).double().sum()
        self.reducer.prepare_for_backward(loss)
        loss.backward()
        self.share()

    def loss(self, term: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """The sum of a term of each parameter; the reducer awaits its backward."""
        loss = torch.stack([term(one) for one in self.parameters]).sum()
        self.reducer.prepare_for_backward(loss)
        return loss

    def folds(self, seed: int) -> None:
        """A step whose clip waits for the optimizer's step."""
        self.backward(seed)
        clip_grad_norm_(self.reducer, 0.3, self.optimizer)
        self.optimizer.step()
        assert exact_norm(self.gradients()) == pytest.approx(0.3, rel=1e-5)

    def share(self) -> None:
        """Gives the twins gradients like ours."""
        for twin, parameter in zip(self.twins, self.parameters, strict=True):
            twin.grad = None if parameter.grad is None else parameter.grad.detach().clone()

    def gradients(self) -> list[torch.Tensor]:
        """Clones of ours."""
        return [parameter.grad.detach().clone() for parameter in self.parameters if parameter.grad is not None]

    def compare(self, ulps: float = OURS_ULPS + THEIRS_ULPS) -> None:
        """Gradients and weights against the twins'."""
        for ours, theirs in zip(self.parameters, self.twins, strict=True):
            assert ours.grad is not None and theirs.grad is not None
            assert ulps_apart(ours.grad, theirs.grad) <= ulps
            torch.testing.assert_close(ours, theirs, rtol=WEIGHTS, atol=WEIGHTS, equal_nan=True)


def _waiting() -> Run:
    """With a clip to 0.3 that waits for the step."""
    run = Run("sgd")
    run.backward(1)
    clip_grad_norm_(run.reducer, 0.3, run.optimizer)
    return run


def ulps_apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference, in units of the last place of the larger of both; NaN equals NaN, Inf itself."""
    assert ours.dtype is theirs.dtype and ours.shape == theirs.shape
    ours, theirs, eps = ours.double(), theirs.double(), torch.finfo(ours.dtype).eps
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    largest = torch.maximum(ours.abs(), theirs.abs())
    unit = torch.exp2(torch.floor(torch.log2(largest))) * eps
    apart = torch.where(same, 0.0, (ours - theirs).abs() / unit)
    return float(apart.max()) if apart.numel() else 0.0


def exact_norm(gradients: Sequence[torch.Tensor], norm_type: float = 2.0) -> float:
    """In fp64."""
    return float(torch.cat([one.double().reshape(-1) for one in gradients]).norm(norm_type))


# Values


@pytest.mark.parametrize("max_norm", [0.0, 0.3, 1e6, math.inf])
@pytest.mark.parametrize("kind", FUSED)
def test_folded_steps_are_torchs_within_ulps(kind: str, max_norm: float) -> None:
    run = Run(kind)
    for step in range(1, 11):
        run.backward(step)
        before = run.gradients()
        norm = clip_grad_norm_(run.reducer, max_norm, run.optimizer)
        assert norm.dtype is torch.float32 and norm.shape == ()
        assert float(norm) == pytest.approx(exact_norm(before), rel=1e-6)
        assert all(map(torch.equal, before, run.gradients())), "nothing is written before the step"
        assert float(torch_clip(run.twins, max_norm)) == pytest.approx(float(norm), rel=1e-5)
        run.optimizer.step()
        run.twin.step()
        assert not hasattr(run.optimizer, "grad_scale")
        run.compare()
        divisor = max((exact_norm(before) + 1e-6) / max_norm, 1.0) if max_norm else math.inf
        for one, after in zip(before, run.gradients(), strict=True):
            assert ulps_apart((one.double() / divisor).float(), after) <= OURS_ULPS


@pytest.mark.parametrize(
    ("path", "max_norm", "norm_type"),
    [
        *(("torch", max_norm, norm_type) for max_norm in (0.0, 0.3, 1e6, math.inf) for norm_type in (2.0, math.inf)),
        *(("interpreter", *one) for one in ((0.0, math.inf), (0.3, 2.0), (1e6, math.inf), (math.inf, 2.0))),
    ],
    indirect=["path"],
)
def test_clipping_in_place_is_torchs_within_ulps(path: str, max_norm: float, norm_type: float) -> None:
    run = Run()
    for step in (1, 2):
        run.backward(step)
        before = run.gradients()
        norm = clip_grad_norm_(run.reducer, max_norm, norm_type=norm_type)
        torch_clip([one for one in run.twins if one.numel()], max_norm, norm_type)  # it takes no empty ones for inf
        assert float(norm) == pytest.approx(exact_norm(before, norm_type), rel=1e-6)
        run.compare()
        assert math.isclose(
            exact_norm(run.gradients(), norm_type), min(max_norm, exact_norm(before, norm_type)), rel_tol=1e-5
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("fold", [True, False])
def test_other_dtypes(dtype: torch.dtype, fold: bool) -> None:
    """fp64 is clipped at once: in fp32 the coefficient would be too coarse. 16 bits: one rounding less than torch's."""
    run = Run("sgd", dtype)
    for step in range(1, 4):
        run.backward(step)
        before = run.gradients()
        norm = clip_grad_norm_(run.reducer, 0.3, run.optimizer if fold else None)
        theirs = torch_clip(run.twins, 0.3)
        assert norm.dtype is theirs.dtype is dtype
        assert float(norm) == pytest.approx(exact_norm(before), rel=torch.finfo(dtype).eps)
        written = not all(map(torch.equal, before, run.gradients()))
        assert written == (not fold or dtype is torch.float64)
        run.optimizer.step()
        for one, after in zip(before, run.gradients(), strict=True):
            divisor = (exact_norm(before) + 1e-6) / 0.3
            assert ulps_apart((one.double() / divisor).to(dtype), after) <= OURS_ULPS


def test_the_norms_dtype_is_torchs() -> None:
    kinds: list[list[torch.dtype]] = [
        [torch.float32],
        [torch.bfloat16],
        [torch.float16, torch.bfloat16],
        [torch.float32, torch.float16],
        [torch.float32, torch.float64],
        [torch.complex64],
        [torch.complex128, torch.float32],
    ]
    for dtypes in kinds:
        parameters = [torch.ones(4, dtype=dtype).requires_grad_() for dtype in dtypes]
        with Reducer(parameters, Loopback(())) as reducer:
            loss = torch.stack([(one * one).sum().real.double() for one in parameters]).sum()
            reducer.prepare_for_backward(loss)
            loss.backward()
            norm = clip_grad_norm_(reducer, math.inf)
            assert norm.dtype is torch_clip(parameters, math.inf).dtype
            assert float(norm) == pytest.approx(2 * 2 * math.sqrt(len(dtypes)), rel=1e-2)


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("max_norm", [0.0, 1.0, math.inf])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_nan_or_inf_norm_does_what_torchs_does(value: float, max_norm: float, fold: bool) -> None:
    run = Run("sgd")
    run.backward(1)
    assert run.parameters[1].grad is not None
    run.parameters[1].grad[2, 3] = value
    run.share()
    norm = clip_grad_norm_(run.reducer, max_norm, run.optimizer if fold else None)
    theirs = torch_clip(run.twins, max_norm)
    assert torch.equal(norm, theirs) or (norm.isnan() and theirs.isnan())
    run.optimizer.step()
    run.twin.step()
    run.compare(ulps=0)
    assert any(one.isnan().any() for one in run.gradients())


@pytest.mark.parametrize("size", [1e25, 1e-25])
def test_a_norm_whose_square_leaves_fp32_is_right_where_torchs_is_not(size: float) -> None:
    run = Run("sgd")
    run.backward(1, factor=size)
    for one in run.parameters:
        assert one.grad is not None
        one.grad.fill_(size)
    run.share()
    norm = clip_grad_norm_(run.reducer, 1.0, error_if_nonfinite=True)
    count = sum(one.numel() for one in run.parameters)
    assert float(norm) == pytest.approx(size * math.sqrt(count), rel=1e-6)
    expected = torch.tensor(min(size, 1 / math.sqrt(count)))
    assert all(torch.allclose(one, expected, rtol=1e-6, atol=0) for one in run.gradients())
    assert float(torch_clip(run.twins, 1.0)) == (math.inf if size > 1 else 0.0)
    assert size < 1 or not any(one.grad.any() for one in run.twins if one.grad is not None)


def test_error_if_nonfinite_raises_torchs_text_and_changes_nothing() -> None:
    run = Run()
    run.backward(1)
    assert run.parameters[1].grad is not None
    run.parameters[1].grad[2, 3] = math.inf
    run.share()
    before = run.gradients()
    texts = []
    clips: list[Callable[[], object]] = [
        lambda: clip_grad_norm_(run.reducer, 1.0, error_if_nonfinite=True),
        lambda: clip_grad_norm_(run.reducer, 1.0, run.optimizer, error_if_nonfinite=True),
        lambda: torch_clip(run.twins, 1.0, error_if_nonfinite=True),
    ]
    for clip in clips:
        with pytest.raises(RuntimeError) as raised:
            clip()
        texts.append(str(raised.value))
    assert len(set(texts)) == 1
    assert all(map(torch.equal, before, run.gradients()))
    run.optimizer.step()
    assert all(map(torch.equal, before, run.gradients())), "nothing waits for the step"


def test_missing_gradients_count_nothing() -> None:
    run = Run()
    run.backward(1)
    run.parameters[1].grad = None
    rest = run.gradients()
    assert float(clip_grad_norm_(run.reducer, 0.1, run.optimizer)) == pytest.approx(exact_norm(rest), rel=1e-6)
    run.optimizer.step()
    clear(run.parameters)
    assert clip_grad_norm_(run.reducer, 0.1, run.optimizer) == 0.0


# The fold


def test_what_was_there_is_restored_exactly() -> None:
    run = Run("sgd")
    for value in (torch.tensor(4.0), torch.tensor([2.0]), None):
        run.backward(1)
        gradient = run.gradients()[1]
        run.optimizer.grad_scale = value  # type: ignore[attr-defined]
        clip_grad_norm_(run.reducer, 0.3, run.optimizer)
        assert vars(run.optimizer)["grad_scale"] is value
        run.optimizer.step()
        assert vars(run.optimizer)["grad_scale"] is value
        there = 1.0 if value is None else float(value)
        factor = (exact_norm(run.gradients()) * there) / 0.3
        assert factor == pytest.approx(1.0, rel=1e-5)
        assert torch.allclose(run.gradients()[1] * there, gradient * 0.3 / exact_norm([t.grad for t in run.twins]))  # type: ignore[misc]
        if value is not None:
            assert value.unique().tolist() in ([4.0], [2.0]), "the tensor that was there is not written to"
        del run.optimizer.grad_scale  # type: ignore[attr-defined]
    run.backward(2)
    clip_grad_norm_(run.reducer, 0.3, run.optimizer)
    run.optimizer.step()
    assert "grad_scale" not in vars(run.optimizer) and "found_inf" not in vars(run.optimizer)


def test_the_users_hooks_and_schedulers_work_beside_it() -> None:
    run = Run("sgd")
    seen: list[bool] = []
    run.optimizer.register_step_pre_hook(lambda optimizer, *_: seen.append(hasattr(optimizer, "grad_scale")))
    run.optimizer.register_step_post_hook(lambda optimizer, *_: seen.append(hasattr(optimizer, "grad_scale")))
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 1)
    for step in range(3):
        run.backward(step)
        clip_grad_norm_(run.reducer, 0.3, run.optimizer)
        run.optimizer.step()
        scheduler.step()
    assert seen == [True, False] * 3


def test_the_first_call_with_an_optimizer_clips_at_once() -> None:
    run = Run("sgd")
    other = SGD(run.parameters, lr=0.1, fused=True)
    for waits in (False, True):
        run.backward(1)
        before = run.gradients()
        clip_grad_norm_(run.reducer, 0.3, other)
        assert all(map(torch.equal, before, run.gradients())) == waits
        other.step()
        assert exact_norm(run.gradients()) == pytest.approx(0.3, rel=1e-5)


def test_one_clip_is_for_one_step() -> None:
    """Clip in one iteration and none in the next; and a step that never came."""
    run = _waiting()
    run.optimizer.step()
    run.backward(2)
    before = run.gradients()
    run.optimizer.step()
    assert all(map(torch.equal, before, run.gradients()))
    run.backward(3)
    clip_grad_norm_(run.reducer, 0.3, run.optimizer)  # no step: skipped, say
    run.backward(4)
    before = run.gradients()
    run.optimizer.step()
    assert all(map(torch.equal, before, run.gradients())), "a coefficient of other gradients"
    run.backward(5)
    clip_grad_norm_(run.reducer, 0.3, run.optimizer)
    run.backward(6)
    clip_grad_norm_(run.reducer, 0.2, run.optimizer)
    run.optimizer.step()
    assert exact_norm(run.gradients()) == pytest.approx(0.2, rel=1e-5)


@pytest.mark.parametrize("again", [True, False])
def test_a_coefficient_is_dropped_with_the_gradients_that_it_is_for(again: bool) -> None:
    """A step given up by zero_grad, and gradients that a user or a local backward made since."""
    run = _waiting()
    run.optimizer.zero_grad()
    for one in run.parameters:
        one.grad = torch.full_like(one, 2.0)
    before = run.gradients()
    if again:
        norm = clip_grad_norm_(run.reducer, 1e6, run.optimizer, reuse_norm=True)
        assert float(norm) == pytest.approx(exact_norm(before), rel=1e-6)
    run.optimizer.step()
    assert all(map(torch.equal, before, run.gradients()))
    run.backward(2)
    clip_grad_norm_(run.reducer, 0.3, run.optimizer)
    run.optimizer.zero_grad()
    run.optimizer.step()
    run.folds(3)


@pytest.mark.parametrize("change", ["one is None", "one is another", "one has come", "a backward added"])
def test_a_coefficient_for_some_of_the_gradients_is_refused(change: str) -> None:
    run = Run("sgd")
    run.backward(1)
    first, second = run.parameters[:2]
    second.grad = None
    clip_grad_norm_(run.reducer, 0.3, run.optimizer)
    if change == "one is None":
        first.grad = None
    elif change == "one is another":
        first.grad = torch.ones_like(first)
    elif change == "one has come":
        second.grad = torch.ones_like(second)
    else:
        with run.reducer.no_sync():
            loss = torch.stack([one.sum() for one in run.parameters if one is not second]).sum()
            run.reducer.prepare_for_backward(loss)
            loss.backward()
    before = run.gradients(), [one.detach().clone() for one in run.parameters]
    text = "a backward has added" if change == "a backward added" else "1 of the 5 gradients|1 of the 6 gradients"
    for act in (run.optimizer.step, run.optimizer.step):
        with pytest.raises(FusedReduceError, match=rf"({text}).*clip in place.*zero_grad"):
            act()
    if change != "a backward added":
        with pytest.raises(FusedReduceError, match=text):
            clip_grad_norm_(run.reducer, 0.3)
    assert all(map(torch.equal, before[0], run.gradients())) and all(map(torch.equal, before[1], run.parameters))
    assert not hasattr(run.optimizer, "grad_scale")
    run.optimizer.zero_grad()
    run.optimizer.step()
    run.folds(2)


@pytest.mark.parametrize("reset", [False, True])
def test_a_coefficient_is_not_for_what_a_failed_backward_has_added(reset: bool) -> None:
    run = _waiting()

    def fail(_: torch.Tensor) -> None:
        raise ZeroDivisionError

    loss = run.loss(lambda one: one.square().sum())
    handle = run.parameters[0].register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    handle.remove()
    if reset:
        run.reducer.reset()
    with pytest.raises(FusedReduceError, match="a backward has added to the gradients"):
        run.optimizer.step()


def test_a_coefficient_is_not_for_the_next_gradients_in_the_same_memory() -> None:
    """A step that was never taken, gradients zeroed in place, and another synchronised backward."""
    run = _waiting()
    held = [one.grad for one in run.parameters]
    run.optimizer.zero_grad(set_to_none=False)
    run.loss(lambda one: (one * 2.0).sum()).backward()
    before = run.gradients()
    assert all(one.grad is other for one, other in zip(run.parameters, held, strict=True)), "or this shows nothing"
    run.optimizer.step()
    assert all(map(torch.equal, before, run.gradients())), "a coefficient of other gradients"


def test_gradients_changed_in_place_after_a_clip_are_divided_with_the_rest() -> None:
    run = Run("sgd")
    run.backward(1)
    norm = clip_grad_norm_(run.reducer, 0.3, run.optimizer)
    for one in run.parameters:
        assert one.grad is not None
        one.grad.mul_(4.0)
    run.optimizer.step()
    assert exact_norm(run.gradients()) == pytest.approx(4 * 0.3, rel=1e-5) and float(norm) > 0.3


def test_optimizers_of_which_one_is_zeroed_or_has_no_gradients() -> None:
    run = Run("sgd")
    both = [SGD(held, 0.1, fused=True) for held in (run.parameters[:2], run.parameters[2:])]
    run.backward(0)
    clip_grad_norm_(run.reducer, 0.3, both)  # their steps are watched from now on
    run.backward(1)
    both[0].zero_grad()
    for max_norm in (0.9, 0.3):
        clip_grad_norm_(run.reducer, max_norm, both)
    for one in both:
        one.step()
    assert exact_norm(run.gradients()) == pytest.approx(0.3, rel=1e-5)
    run.backward(2)
    clip_grad_norm_(run.reducer, 0.3, both)
    both[0].zero_grad()
    run.parameters[0].grad = torch.ones(3)
    for again in (both, None):
        with pytest.raises(FusedReduceError, match="only some have stepped"):
            clip_grad_norm_(run.reducer, 0.3, again)
    for one in both:
        one.step()
    assert torch.equal(run.gradients()[0], torch.ones(3)) and exact_norm(run.gradients()[1:]) < 0.3


def test_a_second_step_with_the_same_gradients_has_them_clipped_once() -> None:
    run = _waiting()
    torch_clip(run.twins, 0.3)
    for _ in range(2):
        run.optimizer.step()
        run.twin.step()
        run.compare()


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("folds", [(True, True), (True, False), (False, True), (False, False), (True, True, True)])
def test_clipping_again_clips_what_is_clipped(folds: tuple[bool, ...], reuse: bool) -> None:
    run = Run("sgd")
    for step in range(1, 4):  # from the second on the reduction has found the norm out
        run.backward(step)
        for fold, max_norm in zip(folds, (0.9, 0.3, 0.5), strict=False):
            norm = clip_grad_norm_(run.reducer, max_norm, run.optimizer if fold else None, reuse)
            assert float(norm) == pytest.approx(float(torch_clip(run.twins, max_norm)), rel=1e-5)
        run.optimizer.step()
        run.twin.step()
        run.compare(ulps=2 * (OURS_ULPS + THEIRS_ULPS))


def test_clipping_after_the_step_takes_the_norm_of_now() -> None:
    run = Run("sgd")
    for step in range(1, 4):
        run.backward(step)
        clip_grad_norm_(run.reducer, 0.9, run.optimizer, reuse_norm=True)
        run.optimizer.step()
        assert float(clip_grad_norm_(run.reducer, 0.3, run.optimizer, reuse_norm=True)) == pytest.approx(0.9, rel=1e-5)
        run.optimizer.step()
        assert exact_norm(run.gradients()) == pytest.approx(0.3, rel=1e-5)


def test_a_step_that_raises_leaves_nothing_behind() -> None:
    run = Run("sgd")
    for restore in ("clip", "step", "retry"):
        run.backward(1)
        mine = torch.tensor(1.0)
        run.optimizer.grad_scale = mine  # type: ignore[attr-defined]
        clip_grad_norm_(run.reducer, 0.3, run.optimizer)
        run.optimizer.param_groups[0]["lr"] = "wrong"
        with pytest.raises(TypeError):
            run.optimizer.step()
        run.optimizer.param_groups[0]["lr"] = 0.1
        if restore != "retry":
            run.backward(2)
        if restore == "clip":
            clip_grad_norm_(run.reducer, 0.2, run.optimizer)
            assert vars(run.optimizer)["grad_scale"] is mine
        before = exact_norm(run.gradients())
        run.optimizer.step()
        assert vars(run.optimizer)["grad_scale"] is mine
        expected = {"clip": 0.2, "step": before, "retry": 0.3}[restore]
        assert exact_norm(run.gradients()) == pytest.approx(expected, rel=1e-5)
        del run.optimizer.grad_scale  # type: ignore[attr-defined]


def test_a_step_with_a_closure() -> None:
    """The closure's gradients are not those that were clipped; a clip within the closure is at once."""
    run = _waiting()
    weights = [one.detach().clone() for one in run.parameters]
    with pytest.raises(ValueError, match="within the closure"):
        run.optimizer.step(lambda: 0.0)
    assert all(map(torch.equal, weights, run.parameters)) and not hasattr(run.optimizer, "grad_scale")
    run.optimizer.step()
    fresh = SGD(run.parameters, lr=0.1, fused=True)
    for optimizer in (run.optimizer, fresh, fresh):

        def closure() -> float:
            run.backward(2)
            clip_grad_norm_(run.reducer, 0.3, optimizer)  # noqa: B023
            assert exact_norm(run.gradients()) == pytest.approx(0.3, rel=1e-5)
            return 1.0

        assert optimizer.step(closure) == 1.0
        assert exact_norm(run.gradients()) == pytest.approx(0.3, rel=1e-5)
        run.backward(3)
        clip_grad_norm_(run.reducer, 0.3, optimizer)
        assert exact_norm(run.gradients()) > 1, "folded again"
        optimizer.step(closure=None)
        assert exact_norm(run.gradients()) == pytest.approx(0.3, rel=1e-5)


def _groups(first: object, second: object, **second_only: object) -> list[dict[str, Any]]:
    return [{"params": first}, {"params": second, **second_only}]


def test_several_optimizers_and_groups() -> None:
    run = Run()
    halves = [
        [AdamW(_groups(held[:1], held[1:3], lr=0.01), fused=True), SGD(held[3:], 0.1, fused=True)]
        for held in (run.parameters, run.twins)
    ]
    for step in range(1, 6):
        run.backward(step)
        before = run.gradients()
        clip_grad_norm_(run.reducer, 0.3, halves[0])
        torch_clip(run.twins, 0.3)
        assert all(map(torch.equal, before, run.gradients())) == (step > 1)
        halves[0][0].step()
        if step > 1:
            for again in (halves[0], None):
                with pytest.raises(FusedReduceError, match="only some have stepped"):
                    clip_grad_norm_(run.reducer, 0.3, again)
        halves[0][1].step()
        for one in halves[1]:
            one.step()
        run.compare()
        assert exact_norm(run.gradients()) == pytest.approx(0.3, rel=1e-5)


def test_an_optimizer_that_steps_twice_before_another_divides_once() -> None:
    run = Run("sgd")
    both = [SGD(held, 0.1, fused=True) for held in (run.parameters[:2], run.parameters[2:])]
    run.backward(0)
    clip_grad_norm_(run.reducer, 0.3, both)  # their steps are watched from now on
    run.backward(1)
    clip_grad_norm_(run.reducer, 0.3, both)
    both[0].step()
    before = run.gradients()[:2]
    both[0].step()
    assert all(map(torch.equal, before, run.gradients())), "its gradients are clipped by now"
    both[1].step()
    assert exact_norm(run.gradients()) == pytest.approx(0.3, rel=1e-5)


def test_a_copy_or_a_loaded_state_still_folds() -> None:
    run = Run("momentum")
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    run.backward(1)
    clip_grad_norm_(run.reducer, 0.3, run.optimizer)
    copied = copy.deepcopy(run.optimizer)
    assert OptimizerHook.known(copied) is None and not hasattr(copied, "grad_scale")
    run.optimizer.step()
    assert exact_norm(run.gradients()) == pytest.approx(0.3, rel=1e-5)
    pickle.dumps(run.optimizer)
    copied.step()


def test_nothing_is_kept_alive() -> None:
    run = _waiting()
    reducer, stepper = weakref.ref(run.reducer), weakref.ref(run.optimizer)
    optimizer = run.optimizer
    del run
    gc.collect()
    assert reducer() is None, "an optimizer that waits keeps the reducer"
    optimizer.step()
    del optimizer
    gc.collect()
    assert stepper() is None


# torch's GradScaler around it


@pytest.mark.parametrize("unscale", [True, False])
@pytest.mark.parametrize("kind", ["adamw", "sgd", "momentum"])
def test_under_torchs_grad_scaler(kind: str, unscale: bool) -> None:
    """In its READY and UNSCALED states, with steps that it skips (not the first one: see FusedGradScaler)."""
    run = Run(kind)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3) for _ in range(2)]
    for step in range(1, 13):
        scale = scalers[0].get_scale()
        for scaler in scalers:
            scaler.scale(torch.ones(()))
        run.backward(step, factor=math.inf if step % 5 == 4 else scale)
        if unscale:
            scalers[0].unscale_(run.optimizer)
            scalers[1].unscale_(run.twin)
        max_norm = 0.3 if unscale else 0.3 * scale
        ours = clip_grad_norm_(run.reducer, max_norm, run.optimizer)
        theirs = torch_clip(run.twins, max_norm)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0, equal_nan=True)
        assert bool(theirs.isfinite()) == (step % 5 != 4)
        scalers[0].step(run.optimizer)
        scalers[1].step(run.twin)
        for scaler in scalers:
            scaler.update()
        assert not hasattr(run.optimizer, "grad_scale") and not hasattr(run.optimizer, "found_inf")
        assert scalers[0].get_scale() == scalers[1].get_scale()
        for mine, other in zip(run.parameters, run.twins, strict=True):
            torch.testing.assert_close(mine, other, rtol=WEIGHTS, atol=WEIGHTS)
    assert scalers[0].get_scale() not in (1024.0, 2.0**14)


# Where the norm comes from


def test_the_reductions_norm_is_reused_only_where_that_was_asked_for() -> None:
    run = Run("sgd")
    launched = []
    for step, reuse in enumerate((False, True, True, False)):
        run.backward(step)
        assert run.parameters[1].grad is not None
        run.parameters[1].grad.data.mul_(3.0)
        with counting.count_launches() as launches:
            norm = clip_grad_norm_(run.reducer, 1e9, run.optimizer, reuse)
        launched.append([one.function for one in launches])
        stale = exact_norm([one / 3 if index == 1 else one for index, one in enumerate(run.gradients())])
        expected = stale if step == 2 else exact_norm(run.gradients())
        assert float(norm) == pytest.approx(expected, rel=1e-6)
    measured = ["measure", "reduce_partials"]
    assert launched == [measured, measured, ["reduce_partials"], measured], "the first one that asks has it collected"


@pytest.mark.parametrize("change", ["mul_", "another", "none"])
def test_a_gradient_that_is_seen_to_have_changed_has_the_norm_measured(change: str) -> None:
    """Whatever was asked for; also between a FusedGradScaler's unscale_ and step."""
    run = Run("sgd")
    for scaler in (None, FusedGradScaler(run.reducer, init_scale=1.0)):
        for step in range(2):  # the first one has the norm collected from the second on
            if scaler is None:
                run.backward(step)
            else:
                run.optimizer.zero_grad()
                scaler.scale(run.loss(lambda one: one.sum()).mul(step + 1)).backward()
                scaler.unscale_(run.optimizer)
            held = run.parameters[1]
            assert held.grad is not None
            if change == "mul_":
                held.grad.mul_(3.0)
            else:
                held.grad = None if change == "none" else held.grad * 3.0
            norm = clip_grad_norm_(run.reducer, 1e9, run.optimizer, reuse_norm=scaler is None)
            assert float(norm) == pytest.approx(exact_norm(run.gradients()), rel=1e-6)
            if scaler is not None:
                scaler.step(run.optimizer)
                scaler.update()


class Operators(TorchDispatchMode):
    """Operators outside of kernels (see count_launches), and how often the host waits for a number."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    @property
    def waits(self) -> int:
        """Times that a GPU would have been waited for."""
        return self.names.count("_local_scalar_dense")

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if counting.does_work(func):
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def test_a_clipped_step_waits_for_nothing_and_takes_no_pass() -> None:
    """Work per gradient: torch's norm and multiply each take every gradient, ours take none but the optimizer's."""
    run = Run("adamw")
    counts: dict[str, tuple[int, int, int]] = {}
    kinds = (
        ("asked for", run.optimizer, True),
        ("folded", run.optimizer, True),
        ("measured", run.optimizer, False),
        ("in place", None, False),
    )
    for step, (name, optimizer, reuse) in enumerate(kinds):
        run.backward(step)
        with Operators() as operators, counting.count_launches() as launches:
            clip_grad_norm_(run.reducer, 0.3, optimizer, reuse)
            clipping = len(operators.names)
            run.optimizer.step()
        assert operators.waits == 0
        counts[name] = (clipping, len(operators.names) - clipping, len(launches))
    with Operators() as operators:
        torch_clip(run.twins, 0.3)
        clipping = len(operators.names)
        run.twin.step()
    counts["torch"] = (clipping, len(operators.names) - clipping, 0)
    assert "_foreach_norm" in operators.names and "_foreach_mul_" in operators.names
    # Operators on single numbers, of the optimizer's step, and launches of kernels. torch's 8 hold its two passes.
    assert counts == {
        "asked for": (6, 2, 2),
        "folded": (6, 2, 1),
        "measured": (6, 2, 2),
        "in place": (7, 2, 3),
        "torch": (8, 2, 0),
    }


# Bad input: all of it before anything changes


@pytest.fixture
def ready() -> Run:
    """With reduced gradients."""
    run = Run()
    run.backward(1)
    return run


@pytest.mark.parametrize("max_norm", [-1.0, -math.inf, math.nan])
def test_a_negative_or_nan_max_norm_is_refused(ready: Run, max_norm: float) -> None:
    with pytest.raises(ValueError, match="max_norm must be"):
        clip_grad_norm_(ready.reducer, max_norm)


class Derived(AdamW):
    """Not to be trusted."""


_REFUSED: dict[str, tuple[str, Callable[[Run], Any]]] = {
    "not fused": ("fused=True", lambda run: AdamW(run.parameters)),
    "one group not fused": (
        "fused=True",
        lambda run: Adam(_groups(run.parameters[:2], run.parameters[2:], fused=False), fused=True),
    ),
    "capturable": ("capturable", lambda run: Adam(run.parameters, fused=True, capturable=True)),
    "derived": ("Derived", lambda run: Derived(run.parameters, fused=True)),
    "other class": ("Adagrad", lambda run: torch.optim.Adagrad(run.parameters)),
    "some missing": (
        "2 of the wrapper's parameters are in no optimizer: parameter 4",
        lambda run: AdamW(run.parameters[:-2], fused=True),
    ),
    "one more": (
        "own 1 parameters that are not the wrapper's",
        lambda run: AdamW([*run.parameters, torch.ones(3, requires_grad=True)], fused=True),
    ),
    "shared": (
        "share parameters",
        lambda run: [AdamW(run.parameters, fused=True), SGD(run.parameters[:1], 0.1, fused=True)],
    ),
    "same twice": ("share parameters", lambda run: [run.optimizer, run.optimizer]),
    "none": ("empty", lambda run: []),
}


@pytest.mark.parametrize("case", _REFUSED)
def test_optimizers_that_cannot_fold_are_refused(ready: Run, case: str) -> None:
    says, made = _REFUSED[case]
    given, before = made(ready), ready.gradients()
    with pytest.raises(ValueError, match=says):
        clip_grad_norm_(ready.reducer, 0.3, given)
    assert all(map(torch.equal, before, ready.gradients()))
    for one in given if isinstance(given, list) else [given]:
        assert one is ready.optimizer or OptimizerHook.known(one) is None
    ready.optimizer.step()
    assert all(map(torch.equal, before, ready.gradients()))


def test_parameters_that_need_no_gradient_may_be_in_the_optimizer(ready: Run) -> None:
    optimizer = AdamW([*ready.parameters, frozen := torch.ones(3)], fused=True)
    before = exact_norm(ready.gradients())
    norm = clip_grad_norm_(ready.reducer, 0.3, optimizer)
    assert float(norm) == pytest.approx(before, rel=1e-6)
    assert exact_norm(ready.gradients()) == pytest.approx(0.3, rel=1e-6), "at once: the first call with an optimizer"
    optimizer.step()
    assert frozen.eq(1).all()


def test_other_bad_input_is_refused(ready: Run) -> None:
    with pytest.raises(TypeError, match="Optimizer"):
        clip_grad_norm_(ready.reducer, 1.0, [ready.parameters[0]])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="several wrappers one by one"):
        clip_grad_norm_(ready.parameters, 1.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes the wrapper"):
        clip_grad_norm_([ready.reducer, ready.reducer], 1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="norm_type must be 2 or inf"):
        clip_grad_norm_(ready.reducer, 1.0, norm_type=1.0)


def test_gradients_that_were_not_reduced_are_refused() -> None:
    parameters = [torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)]
    reducer = Reducer(parameters, Loopback())

    def backward(*held: torch.Tensor) -> None:
        loss = torch.stack([one.sum() for one in held]).sum()
        reducer.prepare_for_backward(loss)
        loss.backward()

    with pytest.raises(FusedReduceError, match="before any synchronised backward"):
        clip_grad_norm_(reducer, 1.0)
    with reducer.no_sync():
        backward(*parameters)
    with pytest.raises(FusedReduceError, match="before any synchronised backward"):
        clip_grad_norm_(reducer, 1.0)
    backward(*parameters)
    clip_grad_norm_(reducer, 1.0)
    with reducer.no_sync():
        backward(*parameters)
        with pytest.raises(FusedReduceError, match="under no_sync"):
            clip_grad_norm_(reducer, 1.0)
    with pytest.raises(FusedReduceError, match="under no_sync"):
        clip_grad_norm_(reducer, 1.0)
    backward(parameters[0])
    with pytest.raises(FusedReduceError, match="parameter 1"):
        clip_grad_norm_(reducer, 1.0)
    reducer.close()
    with pytest.raises(FusedReduceError, match="closed"):
        clip_grad_norm_(reducer, 1.0)


# Wrappers


def _trained(ddp: nn.Module) -> nn.Module:
    ddp.zero_grad()
    ddp(torch.ones(4, 6)).square().sum().backward()
    return ddp


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3), nn.Linear(3, 2))


def test_torchs_wrapper_is_measured_and_clipped_in_place(alone: None) -> None:
    model = _model()
    model[1].requires_grad_(False)
    model._ddp_params_and_buffers_to_ignore = ["2.bias"]  # type: ignore[assignment]
    ddp = TorchDDP(model)
    ddp.register_comm_hook(fusedreduce.FusedHookState(), fusedreduce.fused_hook)
    with pytest.raises(FusedReduceError, match="before any backward"):
        clip_grad_norm_(ddp, 1.0)
    _trained(ddp)
    with pytest.raises(ValueError, match=r"2\.bias.*include_ignored"):
        clip_grad_norm_(ddp, 1.0)
    held = [one for one in ddp.parameters() if one.grad is not None]
    everything = exact_norm([one.grad for one in held if one.grad is not None])
    assert float(clip_grad_norm_(ddp, math.inf, include_ignored=True)) == pytest.approx(everything, rel=1e-6)
    model[2].bias.grad = None
    held = held[:-1]
    twins = [copy.deepcopy(one) for one in held]
    for one, twin in zip(held, twins, strict=True):
        assert one.grad is not None
        twin.grad = one.grad.clone()
    with pytest.raises(ValueError, match="leave the optimizer out"):
        clip_grad_norm_(ddp, 0.3, AdamW(ddp.parameters(), fused=True))
    with counting.count_launches() as launches:
        norm = clip_grad_norm_(ddp, 0.3, reuse_norm=True)
    assert [one.function for one in launches] == ["measure", "reduce_partials", "scale"]
    assert float(norm) == pytest.approx(float(torch_clip(twins, 0.3)), rel=1e-6)
    for one, twin in zip(held, twins, strict=True):
        assert one.grad is not None and twin.grad is not None
        assert ulps_apart(one.grad, twin.grad) <= OURS_ULPS + THEIRS_ULPS
    with ddp.no_sync():
        _trained(ddp)
        with pytest.raises(FusedReduceError, match="under no_sync"):
            clip_grad_norm_(ddp, 1.0)


def test_a_clip_counts_ignored_parameters_that_had_no_gradient_before(alone: None) -> None:
    model = _model()
    model._ddp_params_and_buffers_to_ignore = ["2.bias"]  # type: ignore[assignment]
    ddp = TorchDDP(model)
    ddp.register_comm_hook(fusedreduce.FusedHookState(), fusedreduce.fused_hook)
    _trained(ddp)
    model[2].bias.grad = None
    clip_grad_norm_(ddp, math.inf)
    _trained(ddp)
    everything = exact_norm([one.grad for one in ddp.parameters()])  # type: ignore[misc]
    assert float(clip_grad_norm_(ddp, 0.3, include_ignored=True)) == pytest.approx(everything, rel=1e-6)
    assert exact_norm([one.grad for one in ddp.parameters()]) == pytest.approx(0.3, rel=1e-5)  # type: ignore[misc]


def test_our_wrapper_and_parameters_that_it_ignores(alone: None) -> None:
    model = _model()
    model._ddp_params_and_buffers_to_ignore = ["1.weight", "1.bias"]  # type: ignore[assignment]
    ddp = fusedreduce.DistributedDataParallel(model)
    reduced = [one for name, one in model.named_parameters() if not name.startswith("1.")]
    with pytest.raises(FusedReduceError, match="before any synchronised backward"):
        clip_grad_norm_(ddp, 1.0)
    optimizers = [SGD(reduced, 0.1, fused=True), SGD(model.parameters(), 0.1, fused=True)]
    for _ in range(2):
        _trained(ddp)
        with pytest.raises(ValueError, match=r"1\.weight.*include_ignored"):
            clip_grad_norm_(ddp, 0.3)
        norms = [exact_norm([one.grad for one in held]) for held in (reduced, list(model.parameters()))]  # type: ignore[misc]
        with pytest.raises(ValueError, match="in no optimizer"):
            clip_grad_norm_(ddp, 0.3, optimizers[0], include_ignored=True)
        assert float(clip_grad_norm_(ddp, 0.3, optimizers[1], include_ignored=True)) == pytest.approx(
            norms[1], rel=1e-6
        )
        optimizers[1].step()
        assert exact_norm([one.grad for one in model.parameters()]) == pytest.approx(0.3, rel=1e-5)  # type: ignore[misc]
    for _ in range(2):  # from the second on there are by-products, of gradients as they were before the first clip
        _trained(ddp)
        clip_grad_norm_(ddp, 0.3, reuse_norm=True, include_ignored=True)
        model[1].zero_grad()
        norm = exact_norm([one.grad for one in reduced])  # type: ignore[misc]
        assert float(clip_grad_norm_(ddp, 0.1, reuse_norm=True)) == pytest.approx(norm, rel=1e-6)
    _trained(ddp)
    model[1].zero_grad()
    norm = exact_norm([one.grad for one in reduced])  # type: ignore[misc]
    assert float(clip_grad_norm_(ddp, 0.3, optimizers[0])) == pytest.approx(norm, rel=1e-6)
    with ddp.no_sync():
        _trained(ddp)
        with pytest.raises(FusedReduceError, match="under no_sync"):
            clip_grad_norm_(ddp, 1.0)


def test_a_wrapper_that_was_compiled_is_clipped(alone: None) -> None:
    for wrapper in (fusedreduce.DistributedDataParallel, TorchDDP):
        ddp = wrapper(_model())
        if wrapper is TorchDDP:
            ddp.register_comm_hook(fusedreduce.FusedHookState(), fusedreduce.fused_hook)
        compiled: Any = torch.compile(ddp, backend="eager")
        _trained(ddp)
        assert not isinstance(compiled, TorchDDP)
        clip_grad_norm_(compiled, 0.3)
        assert exact_norm([one.grad for one in ddp.parameters()]) == pytest.approx(0.3, rel=1e-5)  # type: ignore[misc]


def test_a_rank_whose_sums_are_not_the_others_takes_a_norm_that_all_have() -> None:
    run = Run("sgd")
    run.backward(1)
    mine = exact_norm(run.gradients())
    inside(run.reducer).pretend_alike(False)
    # Peers have one that is larger by two units of fp64.
    run.communicator.numbers = lambda bits: bits + 2
    before = run.communicator.count("max")
    norm = clip_grad_norm_(run.reducer, 0.3)
    assert run.communicator.count("max") == before + 1
    assert float(norm) == pytest.approx(mine, rel=1e-6)


def test_under_fused_grad_scaler_the_reductions_norm_is_taken() -> None:
    run = Run("sgd")
    scaler = FusedGradScaler(run.reducer, init_scale=1024.0)
    for step in range(3):
        clear(run.parameters)
        scaler.scale(run.loss(lambda one: one.sum()).mul(step + 1)).backward()
        for unscaled in (False, True):
            if unscaled:
                scaler.unscale_(run.optimizer)
            with counting.count_launches() as launches:
                norm = clip_grad_norm_(run.reducer, 0.3, run.optimizer)
            # The by-products' totals are added up once; unscale_ has done so.
            assert [one.function for one in launches] == ([] if unscaled else ["measure", "reduce_partials"])
            expected = min(exact_norm(run.gradients()), 0.3) if unscaled else exact_norm(run.gradients())
            assert float(norm) == pytest.approx(expected, rel=1e-5)
        scaler.step(run.optimizer)
        scaler.update()
        assert exact_norm(run.gradients()) == pytest.approx(0.3, rel=1e-5)
