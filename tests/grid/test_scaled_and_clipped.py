"""FusedGradScaler and clip_grad_norm_ through every surface, in every mode: support/surfaces.py has the table.

Each step's gradient is a number, so that what each step took is told from its weight alone; powers of two, so that a
loss scale leaves no trace.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from support.grids import pairwise
from support.surfaces import WIRES, Make, alike, cells, in_step, ours, prompt, stale, whole
from torch import nn

from fusedreduce import FusedReduceError, clip_grad_norm_

pytestmark = pytest.mark.usefixtures("path")


def test_cells_without_full_hold_every_pair_of_values() -> None:
    every = [row for row in itertools.product("abcde", "fghi", "jklmn", "op", "qrs") if row[:3] != ("a", "f", "j")]
    few = pairwise(every)
    pairs, kept = (
        {pair for row in rows for pair in itertools.combinations(enumerate(row), 2)} for rows in (every, few)
    )
    assert pairs == kept and len(few) == len(set(few)) < len(every) / 10


# Loss scales


@cells(ours, alike, wires=WIRES, fused=(False, True))
def test_each_step_is_unscaled_by_its_own_scale(make: Make, fused: bool) -> None:
    loop = make(fused=fused, scaler={})
    for number in range(8):
        loop.backward(2.0 * number)
        loop.finish(unscale=number % 2 == 0)
        assert loop.steps == max(0, number + 1 - loop.late), "a step without gradients is none"
        loop.scaler.update(2.0 ** (number % 5 + 1))  # another scale for every step
    if loop.late:
        assert loop.weight() == -2.0 * sum(range(8 - loop.late))
    assert loop.flush() >= loop.late
    assert loop.weight() == -2.0 * sum(range(8))


@cells(ours, alike, wires=WIRES, where=(0, -1))
def test_an_overflow_of_one_rank_skips_a_step_of_all_and_lowers_the_scale_once(make: Make, where: int) -> None:
    loop = make(scaler={})
    of_ranks = [2.0] * loop.ranks
    of_ranks[where] = math.inf
    scales = []
    for number in range(6):
        loop.backward(*(of_ranks if number == 2 else [2.0]))
        loop.finish(unscale=number % 2 == 0)
        scales.append(loop.scaler.get_scale())
    assert scales == [1024.0] * (2 + loop.late) + [512.0] * (4 - loop.late)
    assert loop.steps == 6 - 1 - loop.late
    loop.flush()
    assert loop.weight() == -2.0 * 5


@cells(ours, whole, wires=("fp16",))
def test_steps_that_hold_the_overflow_of_one_scale_lower_it_once(make: Make) -> None:
    """1024 x 100 overflows on the wire, in each of the steps that were scaled before that was known; 512 x 100 fits."""
    loop = make(scaler={})
    scales = []
    for _ in range(3 * loop.late + 4):
        loop.backward(100.0)
        loop.finish()
        scales.append(loop.scaler.get_scale())
    assert scales == [1024.0] * loop.late + [512.0] * (2 * loop.late + 4)
    good = len(scales) - loop.late - (loop.late + 1)  # landed, less those that were scaled by 1024
    assert loop.steps == good and loop.weight() == -100.0 * good


@cells(ours, whole, wires=("fp16",))
def test_an_overflow_at_the_lowered_scale_lowers_it_again(make: Make) -> None:
    loop = make(scaler={})
    scales = []
    for _ in range(3 * (loop.late + 1) + 2):
        loop.backward(300.0)
        loop.finish()
        scales.append(loop.scaler.get_scale())
    lowered = [1024.0 / 2**times for times in (1, 2, 3) for _ in range(loop.late + 1)]
    assert scales == ([1024.0] * loop.late + lowered + [128.0] * 9)[: len(scales)] and scales[-1] == 128.0


@cells(stale, then=((), (1.0,)))
def test_a_step_of_flush_is_told_of_its_own_landing(make: Make, then: tuple[float, ...]) -> None:
    """Steps that overflow at the old scale land in flush, which lowers it once; also beside one of the new scale."""
    loop = make(scaler={})
    scales = []

    def finish() -> None:
        loop.finish()
        scales.append(loop.scaler.get_scale())

    for value in [math.inf] * (loop.late + len(then)) + [*then]:
        loop.backward(value)
        finish()
    assert loop.flush(finish) == loop.late
    assert scales[: loop.late] == [1024.0] * loop.late and set(scales[loop.late :]) == {512.0}, "lowered once"
    assert loop.steps == len(then)


@cells(ours, alike)
def test_only_steps_with_gradients_count_for_growth(make: Make) -> None:
    loop = make(scaler={"growth_interval": 2})
    scales = []
    for number in range(5 + loop.late):
        loop.backward(1.0)
        loop.finish(unscale=number % 2 == 0)
        scales.append(loop.scaler.get_scale())
    assert scales == [1024.0] * (loop.late + 1) + [2048.0] * 2 + [4096.0] * 2


@cells(ours, in_step)
def test_parameters_that_nobody_reduces_step_all_the_same(make: Make) -> None:
    loop = make(scaler={})
    other = nn.Parameter(torch.zeros(1, device="cpu"))
    loop.optimizer.add_param_group({"params": [other]})
    for number in range(6):
        loop.scaler.scale(loop.loss(1.0) + other.sum()).backward()
        loop.finish()
        assert other.item() == -(number + 1.0)
    assert loop.weight() == -(6.0 - loop.late)


@cells(ours, in_step, wires=("native", "bf16", "int8"), change=(None, 2.0**3, 2.0**17))
def test_four_micro_batches_with_a_scale_change_in_between(make: Make, change: float | None) -> None:
    loop = make(scaler={"init_scale": 2.0**9})
    for number in range(5):
        with loop.wrapper.no_sync():
            for micro in (1.0, 2.0, 4.0):
                loop.backward(micro)
                if micro == 2.0 and change is not None:
                    loop.scaler.update(change)
        loop.backward(8.0 * number)
        assert loop.gradient() in (None, 7.0 + 8.0 * (number - loop.late))
        loop.finish()
        loop.scaler.update(2.0**9)
    loop.flush()
    assert loop.weight() == -(5 * 7.0 + 8.0 * sum(range(5)))


@cells(ours, prompt, scaled_first=(True, False))
def test_a_scaled_and_an_unscaled_backward_of_one_step(make: Make, scaled_first: bool) -> None:
    """Refused where one of them is in the other's unit by then; DataParallel's replicas unscale each by itself."""
    loop = make(scaler={"init_scale": 4.0})
    first = loop.backward if scaled_first else lambda value: loop.loss(value).backward()
    second = (lambda value: loop.loss(value).backward()) if scaled_first else loop.backward
    with loop.wrapper.no_sync():
        first(1.0)
    if loop.whole:
        with pytest.raises(FusedReduceError, match=r"zero_grad\(\).*scaler\.scale\(loss\).*no_sync\(\)"):
            second(2.0)
    else:
        second(2.0)
        assert loop.gradient() == 3.0


@cells(ours, in_step)
def test_a_checkpoint_between_backward_and_step_leaves_the_verdict_on_the_gradients(make: Make) -> None:
    """It unpacks the steps in flight, whose statistics are not those of what `.grad` holds."""
    loop = make(scaler={})
    bad = 3
    for number in range(bad + loop.late + 1):
        loop.backward(math.inf if number == bad else 1.0)
        if number == bad + loop.late:  # `.grad` holds the averages of step 3
            loop.state_dict()
        loop.finish()
    assert loop.steps == bad and loop.scaler.get_scale() == 512.0 and loop.weight() == -bad


# Clipping and norms


@cells(
    ours, in_step, wires=("native", "int8", "int4"), fold=(False, True), reuse=(False, True), norm_type=(2.0, math.inf)
)
def test_clipping_is_of_what_has_landed(make: Make, fold: bool, reuse: bool, norm_type: float) -> None:

    loop = make(fused=True)
    size = loop.unit * (math.sqrt(loop.numel) if norm_type == 2.0 else 1.0)

    def clip() -> float:
        return clip_grad_norm_(
            loop.wrapper,
            2.0 * size,
            loop.optimizer if fold else None,
            reuse_norm=reuse,
            norm_type=norm_type,
        ).item()

    expected = 0.0
    for number in range(6):
        loop.backward(number + 1.0)
        landed = max(number + 1.0 - loop.late, 0.0)
        assert loop.grad_norm(norm_type) == pytest.approx(size * landed, rel=1e-6)
        assert clip() == pytest.approx(size * landed, rel=1e-6)
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        expected += min(landed, 2.0)
        assert loop.weight() == pytest.approx(-expected, rel=1e-5)

    def step() -> None:
        clip()
        loop.optimizer.step()
        loop.optimizer.zero_grad()

    assert loop.flush(step) >= loop.late
    assert loop.weight() == pytest.approx(-expected - 2.0 * loop.late, rel=1e-5)


@cells(stale)
def test_a_coefficient_that_waits_is_for_no_other_landing(make: Make) -> None:
    loop = make(fused=True)
    for number in range(loop.late + 2):
        loop.optimizer.zero_grad()
        loop.backward(1.0 if number > 1 else 5.0)
        clip_grad_norm_(loop.wrapper, 2.0, loop.optimizer)
    loop.optimizer.zero_grad()  # the last clip waits, and its step is never taken
    loop.wrapper.flush(loop.optimizer)
    assert loop.weight() == -float(loop.late)


@cells(stale)
def test_a_norm_after_a_checkpoint_is_of_the_gradients_that_are_there(make: Make) -> None:
    loop = make(grad_stats=True)
    for number in range(loop.late + 3):
        loop.optimizer.zero_grad()
        loop.backward(10.0**number)
    loop.state_dict()
    assert loop.grad_norm() == 100.0 * math.sqrt(loop.numel), "of step 2"
