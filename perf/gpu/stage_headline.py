"""Stage 3: pack and unpack beside the machine's own limits, in the most telling cases of bench_kernels.

What is not done when the deadline comes is named. The rows are left as a record too, for perf/results.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_kernels
import kernel_cases
import records
import timing
import torch
from stage import Stage, entry, tolerate
from workload import Pair, Workload

END_S = 8.0  # kept for what has begun, and for writing


def run(stage: Stage) -> None:
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    judged: list[bench_kernels.Verdict] = []

    def emit(row: dict[str, Any]) -> None:
        rows.append(row)
        bench_kernels.show(row)
        stage.note(rows=[_short(one) for one in rows])
        # At once: this process may be killed before the next row is there.
        for one in bench_kernels.verdicts([row], stage.device.type):
            judged.append(one)
            what = f"{one['what']}: {one['direction']} {one['model']} {one['pair']} {one['way']}"
            if "least" in one:
                stage.at_least(what, one["figure"], one["least"])
            else:
                stage.at_most(what, one["figure"], one["most"])

    kernel_cases.prove_path(stage.device)
    rounds = 3 if stage.rehearse else 30
    faults: list[str] = []
    for (model, way), pair in itertools.product(bench_kernels.HEADLINE, bench_kernels.HEADLINE_PAIRS):
        what = f"{model} {pair} {way}"
        if stage.left_s() < END_S:
            stage.skip(what, "no time left")
            continue
        with tolerate(stage, what, faults):
            measure(stage, model, way, pair, rounds, emit)
    rate = None
    if stage.device.type == "cuda" and stage.left_s() > 4:
        rate = timing.copy_rate(stage.device, repeats=5) / 1e9
        stage.note(copy_8gb_gbps=rate)
    if faults:
        raise records.BenchError("; ".join(faults))
    records.write(
        Path(os.environ.get("FUSEDREDUCE_GPU_CHECK_KEEP", str(Path.cwd() / "out"))),
        "headline",
        stage.device,
        rehearsal=stage.rehearse,
        bounded=True,
        threads=torch.get_num_threads(),
        cache_bytes=timing.cache_bytes(stage.device),
        copy_8gb_gbps=rate,
        rows=rows,
        verdicts=judged,
    )


def measure(stage: Stage, model: str, way: str, pair: str, rounds: int, emit: Callable[[dict[str, Any]], None]) -> None:
    """Pack and unpack of one layer list."""
    options: dict[str, Any] = {"cap_bytes": bench_kernels.REHEARSED_CAP_BYTES} if stage.rehearse else {}
    name = bench_kernels.REHEARSED[model] if stage.rehearse else model
    work = Workload(name, Pair.parse(pair), way, stage.device, **options)
    work.model = model
    work.allocate()
    try:
        for direction in ("pack", "unpack"):
            names = bench_kernels.headline_baselines(work)
            for row in bench_kernels.measure_row(work, direction, rounds=rounds, names=names):
                emit(row)
    finally:
        work.release()


def _short(row: dict[str, Any]) -> dict[str, Any]:
    """What belongs beside the other stages; the record has the rest."""
    kept = ("model", "pair", "way", "direction", "cache", "noise")
    cases = {
        name: {key: one.get(key) for key in ("median_us", "gbps", "share_copy", "share_cast", "ratio", "eager")}
        for name, one in row["cases"].items()
    }
    return {**{key: row[key] for key in kept}, "cases": cases}


if __name__ == "__main__":
    entry(run)
