"""What the synchronisation modes do to the time of a step where ranks are not equally fast: ms per step of each rank.

    python perf/bench_modes.py    # 2 Gloo ranks of this machine; a JSON into perf/results

Work is a sleep, in place of a GPU, before a forward and backward that cost little; what ranks do differs by scenario:

    even                     all ranks work for one sleep a step
    pauses of K, in turns    every eighth step one rank, another one each time, pauses for K sleeps
    pauses of K, one rank    every sixteenth step the last rank pauses for K sleeps
    always 5 times slower    the last rank works for five sleeps a step
    no sleep, COUNT x NUMEL  nothing but gradients of that shape: what a mode costs

A case is a block of steps, timed from a step at which the wires are under way until the last backward has returned;
flush is timed beside it. Blocks of all modes and scenarios (of one shape) take turns; Synchronous takes part twice.
"held up" is what a step takes beyond the same mode's in `even` in that round, and beyond the rank's own sleeps: what
it waited for others. Nothing hides a rank's own sleeps, and over a long time no rank of a bounded mode is faster than
the slowest. Before a block is timed every step's gradients are compared: the mean of step t - k; asynchronously, that
all that was given sums to all the means.

Demanded: BoundedStaleness(k) is held up by pauses of k steps in turns for at most a quarter of what Synchronous is;
Asynchronous's fast rank takes at most 1.25 of its time in `even` beside a rank that is always 5 times slower.
"""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import harness
import records
import report_tables
import torch
import torch.distributed as dist
from records import BenchError, Spread, demand
from torch import nn

import fusedreduce
from fusedreduce import Asynchronous, BoundedStaleness, Synchronous

SyncMode = Synchronous | BoundedStaleness | Asynchronous
SYNCHRONOUS, AGAIN, ASYNCHRONOUS = "synchronous", "synchronous, again", "asynchronous"
HELD_UP_ALLOWED = 0.25
PASSING_ALLOWED = 1.25
SLOWER = 5.0
PAUSE_EVERY = 8  # steps
FIRST_STEPS = 8  # of a block, untimed: more than are ever under way
TOLERANCE = 1e-6  # of the largest mean, and of the largest sum of means: a few roundings of each step
SCALES = 7  # the loss of step t is multiplied by 1 + t % 7: another step's mean is another mean


def staleness(steps: int) -> str:
    """How tables and records call BoundedStaleness."""
    return f"staleness {steps}"


def modes() -> dict[str, SyncMode]:
    """By name; the first is what ratios refer to."""
    bounded = {staleness(steps): BoundedStaleness(steps) for steps in (1, 4)}
    return {SYNCHRONOUS: Synchronous(), AGAIN: Synchronous()} | bounded | {ASYNCHRONOUS: Asynchronous()}


def wrapped(model: nn.Module, mode: SyncMode) -> fusedreduce.DistributedDataParallel:
    """A wrapper of that mode; its buffers stay each rank's own."""
    return fusedreduce.DistributedDataParallel(
        model, reduce=fusedreduce.ReduceConfig(sync_mode=mode), **harness.OWN_BUFFERS
    )


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What ranks do beside their gradients.

    Args:
        shape: of the gradients.
        sleeps: whether a step begins with any.
        pause: additional sleeps of a pause.
        in_turns: every eighth step another rank pauses; else every sixteenth step the last one.
        slower: sleeps in each step of the last rank.
    """

    shape: harness.Shape = (20, 20_000)
    sleeps: bool = True
    pause: int = 0
    in_turns: bool = True
    slower: float = 1.0

    def units(self, rank: int, world: int, step: int) -> float:
        """How many sleeps a rank's step begins with."""
        if not self.sleeps:
            return 0.0
        turn, into = divmod(step, PAUSE_EVERY)
        pausing = turn % world if self.in_turns else world - 1 if turn % world == world - 1 else -1
        return (self.slower if rank == world - 1 else 1.0) + (self.pause if into == 0 and pausing == rank else 0)


EVEN, CONSTANT = "even", f"always {SLOWER:g} times slower"
SCENARIOS: Mapping[str, Scenario] = {
    EVEN: Scenario(),
    "pauses of 1, in turns": Scenario(pause=1),
    "pauses of 4, in turns": Scenario(pause=4),
    "pauses of 4, one rank": Scenario(pause=4, in_turns=False),
    CONSTANT: Scenario(slower=SLOWER),
    "no sleep, 200 x 50,000": Scenario(sleeps=False, shape=(200, 50_000)),
    "no sleep, 2,000 x 8": Scenario(sleeps=False, shape=(2_000, 8)),
}


class Block:
    """Steps of one wrapper in one scenario.

    Args:
        ddp: around harness.Many.
        mode: the wrapper's.
        scenario: what this rank does.
        sleep_s: how long a sleep is.
        rows: this rank's inputs.
        mean: of all ranks'.
    """

    def __init__(
        self,
        ddp: Any,
        mode: SyncMode,
        scenario: Scenario,
        sleep_s: float,
        rows: torch.Tensor,
        mean: torch.Tensor,
    ) -> None:
        self._ddp, self._mode, self._scenario, self._sleep_s = ddp, mode, scenario, sleep_s
        self._rows, self._mean = rows, mean

    def _step(self, step: int, look: Callable[[], object] | None = None) -> None:
        units = self._scenario.units(dist.get_rank(), dist.get_world_size(), step)
        if units:
            time.sleep(units * self._sleep_s)
        (self._ddp(self._rows) * scale(step)).backward()
        if look is not None:
            look()
        self._ddp.zero_grad(set_to_none=True)

    def seconds(self, steps: int) -> tuple[float, float]:
        """Of a step, in the mean over `steps`, and of the flush."""
        dist.barrier()
        for step in range(FIRST_STEPS):
            self._step(step)
        begin_s = time.perf_counter()
        for step in range(FIRST_STEPS, FIRST_STEPS + steps):
            self._step(step)
        end_s = time.perf_counter()
        self._ddp.flush()
        flush_s = time.perf_counter() - end_s
        self._ddp.zero_grad(set_to_none=True)
        return (end_s - begin_s) / steps, flush_s

    def check(self, name: str, steps: int) -> None:
        """Looks at the gradients of so many steps and of the flush.

        Raises:
            BenchError: they are not what the mode promises.
        """
        dist.barrier()
        given = torch.zeros_like(self._mean)
        late = self._mode.max_staleness if isinstance(self._mode, BoundedStaleness) else 0
        asynchronous = isinstance(self._mode, Asynchronous)

        def look(step: int) -> None:
            if asynchronous:
                given.add_(gradients(self._ddp, self._mean))
            else:
                expected = None if step < late else self._mean * scale(step - late)
                check_gradients(f"{name}, step {step}", self._ddp, expected)

        for step in range(steps):
            self._step(step, functools.partial(look, step))
        self._ddp.flush()
        if asynchronous:
            given.add_(gradients(self._ddp, self._mean))
            total = self._mean * sum(map(scale, range(steps)))
            if not float((given - total).abs().max()) <= steps * TOLERANCE * float(total.abs().max()):
                raise BenchError(f"{name} is wrong: what its steps and flush gave does not sum to the means")
        elif late:
            under_way = sum(map(scale, range(max(0, steps - late), steps)))
            check_gradients(f"{name}, flush", self._ddp, self._mean * under_way)
        self._ddp.zero_grad(set_to_none=True)


def scale(step: int) -> float:
    """What the loss of a step is multiplied by."""
    return 1.0 + step % SCALES


def gradients(model: nn.Module, like: torch.Tensor) -> torch.Tensor:
    """All gradients, a row each; zeros where there is none."""
    rows = [torch.zeros_like(row) for row in like]
    return torch.stack(
        [row if one.grad is None else one.grad for one, row in zip(model.parameters(), rows, strict=True)]
    )


def check_gradients(name: str, model: nn.Module, expected: torch.Tensor | None) -> None:
    """As harness.check_gradients; with None there must be no gradient.

    Raises:
        BenchError: one is missing, wrong or left over.
    """
    if expected is not None:
        harness.check_gradients(name, model, expected)
        return
    for parameter_name, parameter in model.named_parameters():
        if parameter.grad is not None:
            raise BenchError(f"{name} is wrong: {parameter_name} has a gradient, which was to be withheld")


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """How much is measured."""

    rounds: int = 10
    steps: int = 48
    sleep_s: float = 5e-3
    shrink: int = 1  # divides the shapes


Seconds = dict[str, dict[str, list[tuple[float, float]]]]  # by scenario and mode, per round: of a step, of the flush


def stragglers(names: Sequence[str], lengths: Lengths) -> Seconds:
    """Measures scenarios of one shape, block by block in turns, on this rank; all with the same wrappers.

    Raises:
        BenchError: gradients are wrong.
    """
    [shape] = {SCENARIOS[name].shape for name in names}
    count, numel = (max(1, size // lengths.shrink) for size in shape)
    rows = harness.inputs(dist.get_rank(), (count, numel))
    mean = harness.mean_of_ranks(rows)
    by_name = modes()
    wrappers = {mode_name: wrapped(harness.Many(count, numel), mode) for mode_name, mode in by_name.items()}
    blocks = {
        (name, mode_name): Block(ddp, by_name[mode_name], SCENARIOS[name], lengths.sleep_s, rows, mean)
        for name in names
        for mode_name, ddp in wrappers.items()
    }
    found: Seconds = {name: {mode_name: [] for mode_name in wrappers} for name in names}
    keys = list(blocks)
    _check_all(blocks)
    gc.collect()
    gc.freeze()
    try:
        for round_number in range(lengths.rounds):
            for name, mode_name in (keys[turn] for turn in harness.turns(len(keys), round_number)):
                found[name][mode_name].append(blocks[name, mode_name].seconds(lengths.steps))
    finally:
        gc.unfreeze()
    _check_all(blocks)
    return found


def _check_all(blocks: Mapping[tuple[str, str], Block]) -> None:
    for (name, mode_name), block in blocks.items():
        block.check(f"{mode_name}, {name}", 2 * PAUSE_EVERY)


def measure_stragglers(rank: int, world: int, folder: str, names: Sequence[str], lengths: Lengths) -> NoReturn:
    """One rank."""
    harness.begin(rank, world, folder)
    harness.finish(rank, folder, stragglers(names, lengths))


def runs(names: Sequence[str]) -> list[list[str]]:
    """What is measured in one run: scenarios of one shape."""
    shapes = dict.fromkeys(SCENARIOS[name].shape for name in names)
    return [[name for name in names if SCENARIOS[name].shape == shape] for shape in shapes]


def own_units(scenario: Scenario, rank: int, world: int) -> float:
    """Sleeps per step of a rank, in the mean over a cycle of pauses, beyond those of `even`."""
    cycle = PAUSE_EVERY * world
    return statistics.fmean(scenario.units(rank, world, step) for step in range(cycle)) - float(scenario.sleeps)


def summed_up(per_rank: Sequence[Seconds], sleep_s: float) -> dict[str, dict[str, Any]]:
    """Per scenario and mode, a number for each rank: milliseconds per step and of the flush; and, as medians of those
    within a round, the ratio to Synchronous and what a step was held up."""
    return {name: {mode: _row(per_rank, name, mode, sleep_s) for mode in per_rank[0][name]} for name in per_rank[0]}


def _row(per_rank: Sequence[Seconds], name: str, mode: str, sleep_s: float) -> dict[str, list[float | None]]:
    mine_s = [[step_s for step_s, _ in result[name][mode]] for result in per_rank]
    spreads = [Spread.of(seconds) for seconds in mine_s]
    row: dict[str, list[float | None]] = {
        "ms": [spread.median_ms for spread in spreads],
        "p20_ms": [spread.p20_ms for spread in spreads],
        "p80_ms": [spread.p80_ms for spread in spreads],
        "flush_ms": [1e3 * statistics.median(flush_s for _, flush_s in result[name][mode]) for result in per_rank],
        "ratio": [
            statistics.median(one / base for one, (base, _) in zip(seconds, result[name][SYNCHRONOUS], strict=True))
            for seconds, result in zip(mine_s, per_rank, strict=True)
        ],
    }
    row["held_up_ms"] = [None] * len(per_rank)
    if name != EVEN and EVEN in per_rank[0]:
        row["held_up_ms"] = [
            1e3 * statistics.median(one - even for one, (even, _) in zip(seconds, result[EVEN][mode], strict=True))
            - 1e3 * sleep_s * own_units(SCENARIOS[name], rank, len(per_rank))
            for rank, (seconds, result) in enumerate(zip(mine_s, per_rank, strict=True))
        ]
    return row


# Verdict


def judge(results: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What is demanded of what was measured."""
    found: list[dict[str, Any]] = []
    for steps in (1, 4):
        rows = results.get(f"pauses of {steps}, in turns")
        if rows is not None and None not in rows[SYNCHRONOUS]["held_up_ms"]:
            held_ms, base_ms, again_ms = (
                statistics.fmean(rows[one]["held_up_ms"]) for one in (staleness(steps), SYNCHRONOUS, AGAIN)
            )
            what = f"{staleness(steps)}, pauses of {steps} in turns: held up, of Synchronous"
            if base_ms > abs(base_ms - again_ms):
                found.append(demand(what, round(held_ms / base_ms, 4), "<=", HELD_UP_ALLOWED))
            else:
                why = f"{SYNCHRONOUS} was held up {base_ms:.2f} ms a step, and {again_ms:.2f} when measured again"
                found.append(demand(what, None, "<=", HELD_UP_ALLOWED, why_not=why))
    if EVEN in results and CONSTANT in results:
        ratio = results[CONSTANT][ASYNCHRONOUS]["ms"][0] / results[EVEN][ASYNCHRONOUS]["ms"][0]
        what = f"{ASYNCHRONOUS}, {CONSTANT}: the fast rank, of its time in even"
        found.append(demand(what, round(ratio, 4), "<=", PASSING_ALLOWED))
    return found


def rows_of(results: Mapping[str, Mapping[str, Mapping[str, Sequence[Any]]]]) -> list[dict[str, Any]]:
    """Rows of the record: of a scenario each mode's ranks, one by one."""
    rows: list[dict[str, Any]] = []
    for name, found in results.items():
        ranks = {
            f"{mode}, rank {rank}": {key: each[rank] for key, each in row.items()}
            for mode, row in found.items()
            for rank in range(len(row["ms"]))
        }
        rows.append({"part": "stragglers", "case": name, "variants": ranks})
    return rows


# Command line


def main() -> int:
    """Measures, prints tables and demands, writes one JSON."""
    parser = records.Parser(description=__doc__)
    parser.add_argument("--scenario", choices=tuple(SCENARIOS), action="append", help="default: all")
    parser.add_argument("--ranks", type=int, default=2, help="processes of one thread each (default: 2)")
    parser.add_argument("--rounds", type=int, default=Lengths.rounds, help="blocks of each mode in a scenario")
    parser.add_record()
    asked = parser.parse_args()
    if asked.ranks < 2 or asked.rounds < 2:
        parser.error("at least 2 ranks and 2 rounds")
    lengths = Lengths(rounds=2, steps=8, sleep_s=2e-4, shrink=10) if asked.rehearse else Lengths(rounds=asked.rounds)
    results: dict[str, dict[str, Any]] = {}
    for names in runs(asked.scenario or list(SCENARIOS)):
        results |= summed_up(harness.run_ranks(measure_stragglers, asked.ranks, names, lengths), lengths.sleep_s)
    return report_tables.publish(
        asked,
        "modes",
        "cpu",
        ranks=asked.ranks,
        rounds=lengths.rounds,
        block_steps=lengths.steps,
        sleep_ms=lengths.sleep_s * 1e3,
        rows=rows_of(results),
        demands=judge(results),
    )


if __name__ == "__main__":
    records.entry(main)
