"""Which averages land in which step, none lost and none given twice: every surface, in every mode.

Whole numbers, and halves of them: sums are exact in any order, and what a step had is told from its numbers.
"""

from __future__ import annotations

import contextlib
import io
import random
import time
from collections.abc import Iterable, Sequence

import pytest
import torch
from support.surfaces import (
    MODES,
    PARTS,
    Loop,
    Make,
    cells,
    delayed,
    hole,
    in_step,
    late,
    ours,
    own_pace,
    stale,
)

from fusedreduce import FusedReduceError
from fusedreduce.config import BoundedStaleness, SyncMode

pytestmark = pytest.mark.usefixtures("path")
Parts = Sequence[float | None]
NONE: Parts = [None] * PARTS


def gradients_of(step: int) -> tuple[float, float]:
    """Of each rank."""
    draw = random.Random(step)
    return draw.randrange(1, 9), draw.randrange(1, 9)


def used_in(step: int) -> tuple[list[int], list[int]]:
    """Each rank's weights: at least one."""
    draw = random.Random(step)
    mine, theirs = (draw.sample(range(PARTS), draw.randrange(1, PARTS)) for _ in range(2))
    return mine, theirs


def total(averages: Iterable[Parts]) -> list[float | None]:
    """By weight; None counts nothing."""
    found = [[one for one in of_weight if one is not None] for of_weight in zip(NONE, *averages, strict=True)]
    return [sum(one) if one else None for one in found]


def zeros(parts: Parts) -> list[float]:
    """Where there is nothing."""
    return [one or 0.0 for one in parts]


def train(loop: Loop, steps: Iterable[int]) -> list[Parts]:
    """Steps of the optimizer; the averages that are due."""
    found: list[Parts] = []
    for number in steps:
        loop.backward(*gradients_of(number))
        found.append(loop.mean(*gradients_of(number)))
        if hasattr(loop, "scaler"):
            loop.finish()
            loop.scaler.update(2.0 ** (number % 3))  # another scale for every step
        else:
            loop.step()
    return found


def trained(averages: Iterable[Parts]) -> list[float]:
    """The weights after them."""
    return [-one for one in zeros(total(averages))]


@cells(in_step, wires=("native", "bf16", "fp16", "int8"), unused=(False, True))
def test_a_step_has_the_means_of_its_own_gradients(make: Make, unused: bool) -> None:
    """Those of backwards under no_sync among them; None for what no rank has used."""
    loop = make(unused=unused)
    averages = []
    for number in range(7):
        loop.optimizer.zero_grad()
        own: list[Parts] = []
        for micro in range(number % 3, 3):
            used = used_in(3 * number + micro) if unused else None
            with loop.wrapper.no_sync() if micro < 2 else contextlib.nullcontext():
                loop.backward(*gradients_of(3 * number + micro), used=used)
            own.append(loop.mean(*gradients_of(3 * number + micro), used=used))
        averages.append(total(own))
        assert loop.gradients() == (averages[number - loop.late] if number >= loop.late else NONE), number
    if loop.late:
        loop.optimizer.zero_grad()
        assert loop.wrapper.flush().steps == loop.late
        assert loop.gradients() == total(averages[-loop.late :])
    assert not unused or any(None in one for one in averages)


@cells(in_step, zero=("never", "sometimes", "in place", "late"))
def test_gradients_accumulate_until_they_are_zeroed(make: Make, zero: str) -> None:
    """Zeroing clears what has landed, between forward and backward too; what is under way comes all the same."""
    loop = make()
    held, waiting = zeros(NONE), []
    for number in range(12):
        if zero == "in place" or (zero == "sometimes" and number % 3 == 0):
            loop.optimizer.zero_grad(set_to_none=zero != "in place")
            held = zeros(NONE)
        own = [loop.mean(*gradients_of(number))]
        if number % 4 == 1 and zero != "late":
            with loop.wrapper.no_sync():
                loop.backward(*gradients_of(100 + number))
            own.append(loop.mean(*gradients_of(100 + number)))
        loss = loop.loss(*gradients_of(number))
        if zero == "late":
            loop.optimizer.zero_grad()
            held = zeros(NONE)
        loss.backward()
        waiting.append(total(own))
        if len(waiting) > loop.late:
            held = zeros(total([held, waiting.pop(0)]))
        assert zeros(loop.gradients()) == held, number


@cells(own_pace, wires=("native", "bf16"), set_to_none=(True, False), unused=(False, True))
def test_a_rank_is_given_the_mean_of_all_steps_of_all_ranks(make: Make, set_to_none: bool, unused: bool) -> None:
    """What a backward has given is not given again by the next one; what nobody uses gets no gradient."""
    loop = make(unused=unused)
    used = ([0], [0, 1]) if unused else None
    counts = [6] * loop.ranks if loop.alike else [4, 9]
    given = zeros(NONE)

    def take() -> None:
        nonlocal given
        assert not unused or loop.gradients()[2] is None
        given = zeros(total([given, loop.gradients()]))

    for number in range(counts[loop.rank]):
        loop.optimizer.zero_grad(set_to_none)
        for micro in range(4):
            with loop.wrapper.no_sync() if micro % 2 == 0 else contextlib.nullcontext():
                loop.backward(*gradients_of(4 * number + micro), used=used)
        take()
        time.sleep(0.002 * loop.rank)
    loop.optimizer.zero_grad()
    loop.wrapper.flush()
    take()
    everything = [0.0] * PARTS
    for rank, count in enumerate(counts):
        for place in used[rank] if used else range(PARTS):
            everything[place] += sum(gradients_of(step)[rank] for step in range(4 * count)) / loop.ranks
    assert given == everything


@cells(delayed, zeroed=(False, True), by_step=(False, True))
def test_flush_steps_with_what_is_under_way_and_with_nothing_again(make: Make, zeroed: bool, by_step: bool) -> None:
    """zero_grad, backward, step: what has landed last may still be there when the loop ends."""
    loop = make()
    averages = []
    for number in range(5):
        loop.optimizer.zero_grad()
        loop.backward(*gradients_of(number))
        averages.append(loop.mean(*gradients_of(number)))
        loop.optimizer.step()
    if zeroed:
        loop.optimizer.zero_grad()
    if by_step:
        loop.wrapper.flush(step=loop.step)
    else:
        loop.wrapper.flush(loop.optimizer)
    assert loop.weights() == trained(averages)
    assert loop.gradients() == NONE, "the next step would take it once more"


@cells(stale, zeroed=(False, True))
def test_flush_adds_up_what_is_under_way(make: Make, zeroed: bool) -> None:
    """Not to what was stepped with, but to what nobody has taken; and what waits for its reduction is refused."""
    loop = make()
    averages = train(loop, range(loop.late))
    for number in (5, 6):
        loop.optimizer.zero_grad()
        loop.backward(*gradients_of(number))
        averages.append(loop.mean(*gradients_of(number)))
        if zeroed:
            loop.optimizer.step()
    landed = averages[1] if not zeroed else NONE
    assert loop.wrapper.flush().steps == loop.late
    assert loop.gradients() == total([landed, *averages[-loop.late :]])
    loop.optimizer.zero_grad()
    loop.backward(1.0)
    with loop.wrapper.no_sync():
        loop.backward(1.0)
    with pytest.raises(FusedReduceError, match="no_sync"):
        loop.wrapper.flush()
    loop.optimizer.zero_grad()
    loop.wrapper.zero_grad()  # what DataParallel has is in no `.grad`
    assert loop.wrapper.flush().steps == 1 and loop.wrapper.flush().steps == 0


@cells(delayed, scaled=(False, True), saved_at=(1, 3, 5))
def test_training_goes_on_from_a_checkpoint_of_any_step(make: Make, scaled: bool, saved_at: int) -> None:
    """In a new wrapper with other buckets."""
    scaler = {"init_scale": 4.0} if scaled else None
    loop = make(scaler=scaler)
    averages = train(loop, range(saved_at))
    file = io.BytesIO()
    torch.save((loop.state_dict(), loop.module.state_dict()), file)
    file.seek(0)
    state, weights = torch.load(file, weights_only=True)
    again = make(scaler=scaler, cap_bytes=1000)
    again.module.load_state_dict(weights)
    again.load(state)
    averages += train(again, range(saved_at, 8))
    again.flush(again.finish if scaled else again.step)
    assert again.weights() == trained(averages)


@cells(ours, then=MODES)
def test_modes_change_between_steps(make: Make, then: SyncMode) -> None:
    """With nothing in flight, and on all ranks to the same one."""
    surface, mode, _ = make.place
    modes = [mode, then, mode] if not hole(surface, then) else [mode]
    loop, averages = make(), list[Parts]()
    for one in modes:
        loop.wrapper.set_sync_mode(one)
        assert loop.mode() == one
        averages += train(loop, range(4))
        if late(one):
            with pytest.raises(FusedReduceError, match=r"in flight: call flush\(\)"):
                loop.wrapper.set_sync_mode(BoundedStaleness(5))
        assert loop.flush(loop.step) >= late(one)
        assert loop.weights() == trained(averages)
    if surface in ("ranks", "threads", "gloo"):
        loop.wrapper.set_sync_mode(BoundedStaleness(1 + loop.rank))
        with pytest.raises(FusedReduceError, match=r"sync_mode.*max_staleness=1.*max_staleness=2"):
            loop.loss(1.0)
