"""Stage 4: launch shapes of pack and unpack beside each other (perf/sweep.py), for the table in kernels/variants.py."""

from __future__ import annotations

import time
from typing import Any

import sweep
import torch
from stage import Stage, entry

END_S = 8.0  # kept for what has begun, and for writing
RANKED = 12
ROUNDS = 30


def run(stage: Stage) -> None:
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []

    def emit(row: dict[str, Any]) -> None:
        rows.append(row)
        stage.note(rows=rows, ranking=sweep.ranking(rows)[:RANKED])
        what = " ".join(str(row[key]) for key in ("model", "pair", "direction") if key in row)
        fastest = min(row["shapes"], key=lambda name: float(row["shapes"][name]["median_us"]))
        print(f"{what}: {row['shapes'][fastest]['median_us']:.1f} us by {fastest}", flush=True)

    ends_s = time.monotonic() + stage.left_s() - END_S
    rounds = 2 if stage.rehearse else ROUNDS
    for what in sweep.sweep(stage.device, ends_s, emit, rounds=rounds, rehearse=stage.rehearse):
        stage.skip(what, "no time left")
    for one in sweep.ranking(rows)[:RANKED]:
        print(f"{one['slower']:.3f} of the fastest, {one['ratio']:.3f} of what is in use: {one['shape']}", flush=True)


if __name__ == "__main__":
    entry(run)
