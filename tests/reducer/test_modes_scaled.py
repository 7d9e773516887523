"""FusedGradScaler and clip_grad_norm_ where gradients are averages of an earlier step. Peers are scripted."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from support.loopback import Loopback
from torch import nn

from fusedreduce import FusedGradScaler, ReduceConfig, Reducer, clip_grad_norm_
from fusedreduce.config import BoundedStaleness

pytestmark = pytest.mark.usefixtures("path")


class Loop:
    """A training loop over one weight of 4; a step's gradient is what it is told, the peer's is the same."""

    def __init__(self, k: int, wire: str = "native", fused: bool = False, **scaler: float) -> None:
        self.layer = nn.Linear(4, 1, bias=False)
        self.layer.weight.data.zero_()
        communicator = Loopback([lambda mine: mine.clone()])
        config = ReduceConfig(sync_mode=BoundedStaleness(k), wire=wire)  # type: ignore[arg-type]
        self.reducer = Reducer(self.layer.parameters(), communicator, config)
        self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=1.0, fused=fused)
        self.scaler = FusedGradScaler(self.reducer, **{"init_scale": 1024.0, "growth_interval": 1000, **scaler})  # type: ignore[arg-type]
        self.steps = 0
        self.optimizer.register_step_post_hook(lambda *_: self._stepped())

    def _stepped(self) -> None:
        self.steps += 1

    def backward(self, gradient: float) -> None:
        self.optimizer.zero_grad()
        loss = self.scaler.scale(self.layer(torch.full((1, 4), gradient)).sum())
        self.reducer.prepare_for_backward(loss)
        loss.backward()

    def finish(self, unscale: bool = False) -> None:
        if unscale:
            self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def weight(self) -> list[float]:
        return self.layer.weight.detach().reshape(-1).tolist()


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
def test_each_step_is_unscaled_by_its_own_scale(k: int, fused: bool, unscale: bool) -> None:
    loop = Loop(k, fused=fused)
    for number in range(12):
        loop.backward(float(number))
        loop.finish(unscale)
        assert loop.steps == max(0, number + 1 - k), "a step without gradients is not one"
        loop.scaler.update(2.0 ** (number % 5 + 1))  # another scale for every step
    assert loop.weight() == [-float(sum(range(12 - k)))] * 4

    def one_step() -> None:
        loop.finish(unscale)
        loop.optimizer.zero_grad()

    assert loop.reducer.flush(step=one_step).steps == k
    assert loop.weight() == [-float(sum(range(12)))] * 4


def test_a_step_without_gradients_says_no_inf_and_does_not_count_for_growth() -> None:
    loop = Loop(3, growth_interval=2)
    scales = []
    for number in range(8):
        loop.backward(1.0)
        loop.finish(unscale=number % 2 == 0)
        scales.append(loop.scaler.get_scale())
    assert scales == [1024.0] * 4 + [2048.0] * 2 + [4096.0] * 2


@pytest.mark.parametrize("k", [1, 2, 4])
def test_one_overflow_lowers_the_scale_once_and_steps_that_hold_it_are_skipped(k: int) -> None:
    """On an fp16 wire: 1024 x 100 overflows, in each of the steps that were scaled before that was known."""
    loop = Loop(k, wire="fp16")
    scales = []
    for _ in range(3 * k + 4):
        loop.backward(100.0)
        loop.finish()
        scales.append(loop.scaler.get_scale())
    expected = [1024.0] * k + [512.0] * (2 * k + 4)
    assert scales == expected
    good = len(scales) - k - (k + 1)  # landed, less those that overflowed: scaled by 1024
    assert loop.steps == good
    assert loop.weight() == [-100.0 * good] * 4


def test_an_overflow_at_the_lowered_scale_lowers_it_again() -> None:
    loop = Loop(1, wire="fp16")
    scales = []
    for _ in range(8):
        loop.backward(300.0)
        loop.finish()
        scales.append(loop.scaler.get_scale())
    assert scales == [1024.0, 512.0, 512.0, 256.0, 256.0, 128.0, 128.0, 128.0]


def test_parameters_that_nobody_reduces_step_all_the_same() -> None:
    loop = Loop(2)
    other = nn.Parameter(torch.zeros(1))
    loop.optimizer.add_param_group({"params": [other]})
    for number in range(4):
        loop.optimizer.zero_grad()
        loss = loop.scaler.scale(loop.layer(torch.ones(1, 4)).sum() + other.sum())
        loop.reducer.prepare_for_backward(loss)
        loss.backward()
        loop.finish()
        assert other.item() == -(number + 1.0)
    assert loop.weight() == [-2.0] * 4


@pytest.mark.parametrize("fold", [False, True])
@pytest.mark.parametrize("reuse", [False, True])
def test_clipping_is_of_what_has_landed(fold: bool, reuse: bool) -> None:
    parameters = [torch.zeros(4, requires_grad=True), torch.zeros(5, requires_grad=True)]
    reducer = Reducer(parameters, Loopback([lambda mine: mine.clone()]), ReduceConfig(sync_mode=BoundedStaleness(2)))
    optimizer = torch.optim.SGD(parameters, lr=1.0, fused=True)
    expected = 0.0
    for number in range(8):
        optimizer.zero_grad()
        loss = torch.stack([(one * (number + 1.0)).sum() for one in parameters]).sum()
        reducer.prepare_for_backward(loss)
        loss.backward()
        norm = clip_grad_norm_(reducer, 3.0, optimizer if fold else None, reuse_norm=reuse)
        optimizer.step()
        landed = max(number + 1.0 - 2, 0.0)
        assert math.isclose(norm.item(), 3 * landed, rel_tol=1e-6)
        expected += min(landed, 1.0) if landed else 0.0
        for one in parameters:
            torch.testing.assert_close(one.detach(), torch.full_like(one, -expected), rtol=1e-5, atol=0)

    def step() -> None:
        clip_grad_norm_(reducer, 3.0, optimizer if fold else None)
        optimizer.step()
        optimizer.zero_grad()

    optimizer.zero_grad()
    assert reducer.flush(step=step).steps == 2
    for one in parameters:
        torch.testing.assert_close(one.detach(), torch.full_like(one, -expected - 2.0), rtol=1e-5, atol=0)


def test_a_coefficient_that_waits_is_for_no_other_landing() -> None:
    parameters = [torch.zeros(4, requires_grad=True)]
    reducer = Reducer(parameters, Loopback([lambda mine: mine.clone()]), ReduceConfig(sync_mode=BoundedStaleness(1)))
    optimizer = torch.optim.SGD(parameters, lr=1.0, fused=True)
    values: Sequence[float] = (5.0, 5.0, 1.0)
    for value in values:
        optimizer.zero_grad()
        loss = (parameters[0] * value).sum()
        reducer.prepare_for_backward(loss)
        loss.backward()
        clip_grad_norm_(reducer, 2.0, optimizer)
    optimizer.zero_grad()  # the last clip waits, and its step is never taken
    reducer.flush(optimizer)
    assert torch.equal(parameters[0].detach(), torch.full((4,), -1.0))


def test_a_step_of_flush_is_told_of_its_own_landing() -> None:
    """The first averages come in `flush`, and both overflow: the scale that both were made with is lowered once."""
    loop = Loop(2, wire="fp16")
    for _ in range(2):
        loop.backward(100.0)
        loop.finish()
    scales = [loop.scaler.get_scale()]

    def one_step() -> None:
        loop.finish()
        loop.optimizer.zero_grad()
        scales.append(loop.scaler.get_scale())

    assert loop.reducer.flush(step=one_step).steps == 2
    assert scales == [1024.0, 512.0, 512.0] and loop.steps == 0


def test_a_checkpoint_between_backward_and_step_leaves_the_verdict_on_the_gradients() -> None:
    """It unpacks the steps in flight, whose statistics are not those of what `.grad` holds."""
    verdicts = []
    for checkpoint in (False, True):
        loop = Loop(1)
        for number in range(5):
            loop.backward(math.inf if number == 3 else 1.0)
            if number == 4 and checkpoint:  # `.grad` holds the averages of step 3
                loop.reducer.state_dict()
            loop.finish()
        verdicts.append((loop.steps, loop.scaler.get_scale(), loop.weight()))
    assert verdicts[0] == verdicts[1] and all(map(math.isfinite, verdicts[1][2]))


def test_a_norm_after_a_checkpoint_is_of_the_gradients_that_are_there() -> None:
    parameter = torch.zeros(4, requires_grad=True)
    config = ReduceConfig(sync_mode=BoundedStaleness(1), grad_stats=True)
    reducer = Reducer([parameter], Loopback([lambda mine: mine.clone()]), config)
    for number in range(4):
        parameter.grad = None
        loss = (parameter * 10.0**number).sum()
        reducer.prepare_for_backward(loss)
        loss.backward()
    reducer.state_dict()
    assert reducer.observed.grad_norm().item() == 200.0, "of step 2, in four elements"
