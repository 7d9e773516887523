"""Stage 3: pack and unpack beside the machine's own limits, in the most telling cases of bench_kernels.

What is not done when the deadline comes is named. The rows are left as a record too, for perf/results.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import bench_kernels
import records
import timing
import torch
from stage import Stage, entry

END_S = 8.0  # kept for what has begun, and for writing


def run(stage: Stage) -> None:
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []

    def emit(row: dict[str, Any]) -> None:
        rows.append(row)
        bench_kernels.show(row)
        stage.note(rows=[_short(one) for one in rows])

    ends_s = time.monotonic() + stage.left_s() - END_S
    rounds = 3 if stage.rehearse else 30
    left = bench_kernels.headline(stage.device, ends_s, emit, rounds=rounds, rehearse=stage.rehearse)
    for what in left:
        stage.skip(what, "no time left")
    judged = bench_kernels.verdicts(rows, stage.device.type)
    for one in judged:
        what = f"{one['what']}: {one['direction']} {one['model']} {one['pair']} {one['way']}"
        if "least" in one:
            stage.at_least(what, one["figure"], one["least"])
        else:
            stage.at_most(what, one["figure"], one["most"])
    rate = None
    if stage.device.type == "cuda" and stage.left_s() > 4:
        rate = timing.copy_rate(stage.device, repeats=5) / 1e9
        stage.note(copy_8gb_gbps=rate)
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
