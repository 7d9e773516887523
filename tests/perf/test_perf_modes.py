"""The benchmark of modes: who sleeps when, what lets a number pass, sums, demands, options.

No processes: the world is a fake, and what is checked are stand-ins that are right or wrong on purpose.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import bench_modes as modes
import harness
import pytest
import torch
from records import BenchError
from torch import nn

from fusedreduce import Asynchronous, BoundedStaleness, Synchronous

SHAPE = (3, 5)


class Alone:
    """Stands for torch.distributed: a world of one, which holds what `others` say too."""

    ReduceOp = torch.distributed.ReduceOp

    def __init__(self, others: int = 0) -> None:
        self.others = others

    def get_world_size(self) -> int:
        return 1

    def get_rank(self) -> int:
        return 0

    def barrier(self) -> None:
        """Nobody else comes."""

    def all_reduce(self, tensor: torch.Tensor, op: Any = None) -> None:
        tensor.add_(self.others if op == self.ReduceOp.MAX else 0)


class Late(nn.Module):
    """Leaves in every step the gradients of `late` steps before; asynchronously what `drops` leaves of them, besides.

    Args:
        late: steps.
        loses: the first so many gradients are never given.
    """

    def __init__(self, late: int, *, asynchronous: bool = False, loses: int = 0) -> None:
        super().__init__()
        self.many = harness.Many(*SHAPE)
        self._late, self._asynchronous, self._loses = late, asynchronous, loses
        self._queues: dict[int, deque[torch.Tensor]] = {id(one): deque() for one in self.many.parameters()}
        for parameter in self.many.parameters():
            parameter.register_post_accumulate_grad_hook(self._take)

    def forward(self, rows: torch.Tensor) -> Any:
        return self.many(rows)

    def _take(self, parameter: torch.Tensor) -> None:
        queue = self._queues[id(parameter)]
        assert parameter.grad is not None
        queue.append(parameter.grad)
        parameter.grad = queue.popleft() if len(queue) > self._late else None

    def flush(self) -> None:
        """The sum of what is left."""
        for parameter in self.many.parameters():
            queue = self._queues[id(parameter)]
            left = list(queue)[self._loses :]
            parameter.grad = sum(left, torch.zeros_like(parameter)) if left else None
            queue.clear()


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Alone:
    world = Alone()
    for module in (modes, harness):
        monkeypatch.setattr(module, "dist", world)
    return world


def checked(ddp: nn.Module, mode: modes.SyncMode) -> None:
    rows = harness.inputs(0, SHAPE).contiguous()
    modes.Block(ddp, mode, modes.Scenario(sleeps=False), 0.0, rows, rows).check("it", 12)


# What lets a number pass


@pytest.mark.parametrize("late", [0, 1, 4])
def test_a_mode_that_leaves_the_mean_of_its_step_passes_and_others_do_not(alone: Alone, late: int) -> None:
    mode: modes.SyncMode = BoundedStaleness(late) if late else Synchronous()
    checked(Late(late), mode)
    for other in {0, 1, 2, 3, 4, 5} - {late}:
        with pytest.raises(BenchError, match="it, step"):
            checked(Late(other), mode)


def test_bounded_staleness_must_flush_all_that_is_under_way(alone: Alone) -> None:
    with pytest.raises(BenchError, match="it, flush is wrong"):
        checked(Late(4, loses=1), BoundedStaleness(4))


@pytest.mark.parametrize("late", [0, 1, 7])
def test_asynchronously_only_the_sum_counts(alone: Alone, late: int) -> None:
    checked(Late(late), Asynchronous())
    if late:
        with pytest.raises(BenchError, match="does not sum to the means"):
            checked(Late(late, loses=1), Asynchronous())


# Scenarios


def test_ranks_sleep_as_scenarios_say() -> None:
    cycle = range(2 * modes.PAUSE_EVERY)
    expected = {
        modes.EVEN: ([1.0] * 16, [1.0] * 16),
        "pauses of 4, in turns": ([5.0] + [1.0] * 15, [1.0] * 8 + [5.0] + [1.0] * 7),
        "pauses of 4, one rank": ([1.0] * 16, [1.0] * 8 + [5.0] + [1.0] * 7),
        modes.CONSTANT: ([1.0] * 16, [5.0] * 16),
        "no sleep, 2,000 x 8": ([0.0] * 16, [0.0] * 16),
    }
    for name, ranks in expected.items():
        scenario = modes.SCENARIOS[name]
        for rank, units in enumerate(ranks):
            assert [scenario.units(rank, 2, step) for step in cycle] == units, name
            if scenario.sleeps:
                assert modes.own_units(scenario, rank, 2) == sum(units) / 16 - 1


def test_held_up_is_what_is_left_without_the_modes_own_time_and_the_ranks_own_sleeps() -> None:
    def by_mode(*seconds: float) -> dict[str, list[tuple[float, float]]]:
        return {name: [(one, 0.5)] * 4 for name, one in zip(modes.modes(), seconds, strict=True)}

    first = {
        modes.EVEN: by_mode(0.006, 0.006, 0.006, 0.007, 0.006),
        "pauses of 4, in turns": by_mode(0.011, 0.011, 0.010, 0.00925, 0.009),
        modes.CONSTANT: by_mode(0.03, 0.03, 0.03, 0.03, 0.0075),
    }
    second = {**first, modes.CONSTANT: by_mode(0.03, 0.03, 0.03, 0.03, 0.031)}
    results = modes.summed_up([first, second], 0.005)
    held = {name: row["held_up_ms"] for name, row in results["pauses of 4, in turns"].items()}
    # A sleep is 5 ms, a rank's own pauses 4 sleeps in 16 steps: 1.25 ms.
    assert held[modes.SYNCHRONOUS] == pytest.approx([3.75, 3.75])
    assert held["staleness 4"] == pytest.approx([1.0, 1.0])
    assert results[modes.CONSTANT][modes.ASYNCHRONOUS]["held_up_ms"] == pytest.approx([1.5, 5.0])
    assert results[modes.CONSTANT][modes.ASYNCHRONOUS]["ratio"] == pytest.approx([0.25, 31 / 30])
    assert results[modes.EVEN][modes.SYNCHRONOUS]["flush_ms"] == [500.0, 500.0]
    assert results[modes.EVEN][modes.SYNCHRONOUS]["held_up_ms"] == [None, None]
    verdicts = {one["what"]: one for one in modes.judge(results)}
    assert [one["met"] for one in verdicts.values()] == [False, True]
    assert [one["value"] for one in verdicts.values()] == pytest.approx([1 / 3.75, 1.25], abs=1e-4)


@pytest.mark.parametrize(
    ("base_ms", "again_ms", "judged"), [(4.0, 3.5, True), (-0.08, -0.09, False), (0.0, 0.0, False), (0.3, 0.7, False)]
)
def test_being_held_up_is_judged_where_synchronous_is_beyond_what_it_differs_from_itself(
    base_ms: float, again_ms: float, judged: bool
) -> None:
    held_ms = {modes.SYNCHRONOUS: base_ms, modes.AGAIN: again_ms, "staleness 1": 1.0}
    rows = {name: {"held_up_ms": [one, one]} for name, one in held_ms.items()}
    [verdict] = modes.judge({"pauses of 1, in turns": rows})
    if judged:
        assert verdict["value"] == 0.25 and verdict["met"] is True
    else:
        assert verdict["met"] is None and verdict["value"] is None
        assert verdict["why_not"].startswith(f"{modes.SYNCHRONOUS} was held up {base_ms:.2f} ms a step, and ")


def test_of_a_scenario_each_rank_has_a_line() -> None:
    results: Any = {modes.EVEN: {modes.SYNCHRONOUS: {"ms": [1.0, 2.0], "held_up_ms": [None, None]}}}
    [row] = modes.rows_of(results)
    assert row["variants"] == {
        "synchronous, rank 0": {"ms": 1.0, "held_up_ms": None},
        "synchronous, rank 1": {"ms": 2.0, "held_up_ms": None},
    }


def test_scenarios_of_one_shape_are_measured_together() -> None:
    together = modes.runs(list(modes.SCENARIOS))
    assert [len(names) for names in together] == [5, 1, 1] and together[0][0] == modes.EVEN
    assert modes.runs([modes.CONSTANT]) == [[modes.CONSTANT]]
