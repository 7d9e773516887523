"""What wires do to training: final losses, paired by seed, of small models on two ranks and two optimizers.

    python perf/bench_training.py --cells out/training.jsonl     # half an hour of two cores; a JSON in perf/results
    python perf/bench_training.py --quick --out out/training     # does everything run?

exchanged   Gloo ranks of this machine train with torch's DDP wrapped by ours, by wire, and with PowerSGD beside.
simulated   in one process, by the same kernels: rounding to nearest, stochastic rounding, error feedback.

What is trained, and which loss is reported: training_runs.py. Of a seed all variants begin with the same weights and
see the same batches. A difference is that of the losses of one seed, as a share of native's mean over seeds; its
standard error is that of the mean over seeds. Losses do not depend on what else a machine does. Each is written to
--cells as it is found, and what is there already is not run again.

Demanded of exchanged runs that settle: a mean difference of at most 0.1 % (int8) and 0.3 % (int4). Where twice the
standard error leaves open on which side of that the difference lies, it is not judged.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import harness
import records
import report_tables
import training_runs
from records import BenchError, demand
from training_runs import TASKS

EXCHANGED, SIMULATED = "exchanged", "simulated"
PARTS: Mapping[str, tuple[Sequence[str], Callable[..., float]]] = {
    EXCHANGED: (training_runs.EXCHANGED, training_runs.exchanged),
    SIMULATED: (training_runs.SIMULATED, training_runs.simulated),
}
MOST = {"ours int8": 1e-3, "ours int4": 3e-3}
QUICK_STEPS = 2
Cell = dict[str, Any]  # part, task, optimizer, seed, variant, ranks, steps; and its loss, once it is known


def cells(asked: argparse.Namespace) -> list[Cell]:
    """All that is to be run, one seed of a task after the other."""
    return [
        {
            "part": part,
            "task": task,
            "optimizer": optimizer,
            "seed": seed,
            "variant": variant,
            "ranks": asked.ranks,
            "steps": QUICK_STEPS if asked.quick else TASKS[task].steps,
        }
        for part in asked.parts
        for task in asked.tasks
        for seed in range(asked.seeds or TASKS[task].seeds)
        for optimizer in training_runs.OPTIMIZERS
        for variant in PARTS[part][0]
        if not asked.variants or any(text in variant for text in (*asked.variants, "native"))
    ]


def work(rank: int, world: int, folder: str, todo: Sequence[Cell], path: str) -> NoReturn:
    """One rank: takes part in every exchanged run, and has its share of the simulated ones for itself."""
    harness.begin(rank, world, folder)
    own = [cell for cell in todo if cell["part"] == SIMULATED][rank::world]
    for cell in [*(cell for cell in todo if cell["part"] == EXCHANGED), *own]:
        names = (cell["task"], cell["optimizer"], cell["variant"], cell["seed"], cell["steps"])
        loss = PARTS[cell["part"]][1](*names, **({"ranks": world} if cell["part"] == SIMULATED else {}))
        if rank == 0 or cell["part"] == SIMULATED:
            with Path(path).open("a") as lines:
                lines.write(json.dumps({**cell, "loss": loss}) + "\n")
    harness.finish(rank, folder, None)


def found_in(path: Path, wanted: Iterable[Cell]) -> tuple[list[Cell], list[Cell]]:
    """Those of `wanted` that a file has, with their losses, and those that it lacks.

    Raises:
        BenchError: a line that is none of ours.
    """
    known: dict[str, Cell] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            cell = json.loads(line)
            known[_key(cell)] = cell
        except (ValueError, KeyError, TypeError) as error:
            raise BenchError(f"{path} has a line that is no run's: {line[:80]!r}") from error
    wanted = list(wanted)
    return [known[_key(cell)] for cell in wanted if _key(cell) in known], [
        cell for cell in wanted if _key(cell) not in known
    ]


def _key(cell: Cell) -> str:
    return json.dumps([cell[name] for name in ("part", "task", "optimizer", "seed", "variant", "ranks", "steps")])


def rows(found: Sequence[Cell]) -> list[dict[str, Any]]:
    """A row per part, task and optimizer, with means over seeds of each variant."""
    grouped: dict[tuple[str, str, str], dict[str, dict[int, float]]] = {}
    for cell in found:
        of_row = grouped.setdefault((cell["part"], cell["task"], cell["optimizer"]), {})
        of_row.setdefault(cell["variant"], {})[cell["seed"]] = cell["loss"]
    return [_row(*names, losses) for names, losses in grouped.items()]


def _row(part: str, task: str, optimizer: str, losses: Mapping[str, Mapping[int, float]]) -> dict[str, Any]:
    native = losses[PARTS[part][0][0]]
    level = statistics.fmean(native.values())
    variants = {}
    for name, mine in losses.items():
        nearest = losses.get(name.partition(", ")[0], {}) if part == SIMULATED and ", " in name else {}
        difference, error = paired(mine, native, level)
        beside, beside_error = paired(mine, nearest, level) if nearest else (None, None)
        variants[name] = {
            "loss": statistics.fmean(mine.values()),
            "spread": statistics.stdev(mine.values()) / level,
            "difference": difference,
            "difference_error": error,
            "of_nearest": beside,
            "of_nearest_error": beside_error,
            "losses": [round(loss, 6) for loss in mine.values()],
        }
    return {
        "part": part,
        "case": f"{task}, {optimizer}",
        "task": task,
        "optimizer": optimizer,
        "steps": TASKS[task].steps,
        "learning_rate": TASKS[task].learning_rates[optimizer],
        "seeds": len(native),
        "variants": variants,
    }


def paired(mine: Mapping[int, float], other: Mapping[int, float], level: float) -> tuple[float, float]:
    """Mean difference to `other` of the same seeds and its standard error, as shares of `level`."""
    differences = [(mine[seed] - other[seed]) / level for seed in mine]
    return statistics.fmean(differences), statistics.stdev(differences) / math.sqrt(len(differences))


def demands(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What is demanded of exchanged runs that settle."""
    made = []
    for row in found:
        if row["part"] != EXCHANGED or not TASKS[row["task"]].settles:
            continue
        for name, most in MOST.items():
            values = row["variants"].get(name)
            if values is not None:
                off, error = values["difference"], values["difference_error"]
                open_ = abs(off - most) < 2 * error
                why_not = f"{off:+.3%} with a standard error of {error:.3%}, at most {most:.1%}" if open_ else None
                made.append(demand(f"{row['case']}: {name}", off, "<=", most, unit="%", why_not=why_not))
    return made


def main() -> int:
    """Runs what is missing, prints the tables, writes one JSON."""
    parser = records.Parser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=list(PARTS))
    parser.add_argument("--tasks", nargs="+", choices=tuple(TASKS), default=list(TASKS))
    parser.add_argument("--variants", nargs="+", metavar="TEXT", help="those whose name holds it, beside native")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seeds", type=int, help="of every task (default: 10 of digits, 5 of the others)")
    parser.add_argument("--cells", type=Path, help="JSON lines: what is there is not run again")
    parser.add_argument("--quick", action="store_true", help="a few steps and two seeds: does everything run?")
    parser.add_record()
    asked = parser.parse_args()
    asked.rehearse |= asked.quick
    asked.seeds = 2 if asked.quick else asked.seeds
    if (asked.seeds or 2) < 2 or asked.ranks < 2:
        raise BenchError("a spread takes 2 seeds at least, and an exchange 2 ranks")
    if asked.ranks != 2 and SIMULATED in asked.parts:
        raise BenchError("what is simulated has 2 ranks: --parts exchanged")
    wanted = cells(asked)
    with tempfile.TemporaryDirectory() as folder:
        path = asked.cells or Path(folder, "cells.jsonl")
        records.make_folder(path.parent)
        todo = found_in(path, wanted)[1]
        if todo:
            harness.run_ranks(work, asked.ranks, todo, str(path.resolve()))
        found, missing = found_in(path, wanted)
    assert not missing, missing[0]
    made = rows(found)
    what = "training" if asked.ranks == 2 else f"training-{asked.ranks}-ranks"
    return report_tables.publish(asked, what, "cpu", rows=made, demands=demands(made), ranks=asked.ranks)


if __name__ == "__main__":
    records.entry(main)
