"""Pack and unpack as kernels: against torch's ways, and against the limits of the machine in the same run.

    python perf/bench_kernels.py                        # the GPU if there is one, else CPU; a JSON in perf/results
    python perf/bench_kernels.py --models gpt2 one --pairs fp32-bf16
    python perf/bench_kernels.py --device cpu --rehearse --out out/kernels    # tiny sizes: does everything run?
    python perf/bench_kernels.py --models gpt2 --tuning 16384 8    # another launch shape of ours

A call packs (or unpacks) one bucket nearest to 25 MiB, all 25 MiB buckets of the layer list, or the list as one bucket.
`ours, partials` has by-products without their second stage, `ours, norms` with it (of pack: whether gradients are
finite); "with the norm" is unpack with it as a share of the fastest of torch's and its norm, timed by itself. Cases
and their checks: kernel_cases.py and baselines.py. How is timed: timing.py.

Times are medians over rounds; GB/s are bytes that must move, each side once (fp32 and bf16: 6 an element); shares and
ratios are medians of those within a round. `ours again` beside `ours` is the noise. On CPU one thread works, and the
default models are bounded to what is done in three minutes.

What is demanded. On a GPU, fp32-bf16, fp32-fp32 and bf16-bf16, from 64 MB of gradients on, and for one
25 MiB bucket of gpt2: 90 % of the copy and 95 % of the cast, less what the kernel has to wait for and a copy has not;
from 64 MB on at most 3 % more with norms, and the two launches of their second stage. On CPU: at most 1.1 times the
fastest of torch's ways. Exit status 1 if that is missed, unless --no-check is given.

What the kernel has to wait for: in front of its first load are two that depend on one another, of a row of the table
and of a gradient's address. Cold, each is a trip to memory, 0.5 to 0.8 us. A 25 MiB bucket of fp32 moves 39 MB: where
copying that takes 10 us, 10 / 11.5 = 87 % of the copy's rate is all there can be, and 78 % are demanded; of 256 MiB in
one kernel, 89 %. With norms a tile of 8,192 elements (49 KB) writes 24 bytes more, but what adds the tiles up are two
more kernels, each of which starts, reads, writes and ends, however little it has to do: 3 to 4 us.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import kernel_cases
import layers
import records
import report_tables
import timing
import torch
from kernel_cases import AGAIN, CAST, COPY, COPY_KERNEL, Cases
from records import BenchError, demand
from report_tables import NORMS, OURS
from workload import WAYS, Pair, Workload

from fusedreduce.kernels.variants import Tuning, tuned

Row = dict[str, Any]
Demand = dict[str, Any]

PAIRS = ("fp32-native", "fp32-bf16", "fp32-fp16", "bf16-native", "bf16-fp16", "fp16-native", "fp16-bf16")
JUDGED_PAIRS = ("fp32-bf16", "fp32-fp32", "bf16-bf16")
CPU_MODELS = ("tiny", "2000x8", "200x50000", "resnet50", "gpt2")
REHEARSED_MODELS = ("100x1000", "20x8")
DIRECTIONS: Mapping[str, Callable[..., Cases]] = {
    "pack": kernel_cases.pack,
    "unpack": kernel_cases.unpack,
}
LARGE_BYTES = 64 * 10**6
SHARE_OF_COPY, SHARE_OF_CAST, WITH_NORMS = 0.90, 0.95, 1.03
TRIPS_US = 1.5  # of each kernel of ours: to memory for a row, and then for an address
SECOND_STAGE_US = 8.0  # of the two kernels that add tiles up, with little to do
JUDGED = (OURS, NORMS, COPY, COPY_KERNEL, CAST)
MOST_ON_CPU = 1.1  # of the time of the fastest of torch's ways


def measure_row(work: Workload, direction: str, *, rounds: int) -> Row:
    """One table's row, `pack` before the others.

    Raises:
        BenchError: a case's result is wrong; on a GPU also if one that is judged cannot be recorded into a graph.
    """
    cases = DIRECTIONS[direction](work)
    times = timing.measure(cases.calls, work.device, rounds=rounds, checks=cases.checks)
    for name in JUDGED:
        if name in times.eager:
            raise BenchError(f"{name} cannot be recorded into a graph, so its time has launches: {times.eager[name]}")
    found = {}
    for name, seconds in times.items():
        spread = records.spread(seconds, "us")
        found[name] = {
            **spread,
            "gbps": work.bytes / (spread["us"] * 1e3),
            "launches": cases.launches[name],
            "ratio": ratio(seconds, times[OURS]),
            "eager": times.eager.get(name),
            "share_copy": ratio(list(map(min, times[COPY], times[COPY_KERNEL])), seconds),
            "share_cast": ratio(times[CAST], seconds),
        }
    return {
        "part": "kernels",
        "case": f"{direction}, {work.model}, {work.pair.name}, {work.way}",
        "model": work.model,
        "pair": work.pair.name,
        "way": work.way,
        "direction": direction,
        "cache": "cold" if work.cold else "not cold",
        "parameters": len(work.sizes),
        "elements": work.numel,
        "buckets": len(work.tables),
        "gradient_bytes": work.gradient_bytes,
        "bytes": work.bytes,
        "divisor": work.divisor,
        "sets": work.count,
        "rounds": len(times[OURS]),
        "noise": ratio(times[AGAIN], times[OURS]),
        "variants": found,
    }


def ratio(seconds: Sequence[float], base: Sequence[float]) -> float:
    """Median of the ratios within each round."""
    return statistics.median(mine / first for mine, first in zip(seconds, base, strict=True))


def demands(row: Row, device_type: str) -> list[Demand]:
    """What is demanded of a row, and whether it gives it."""
    where = f"{row['direction']} {row['model']} {row['pair']} {row['way']}"
    cases = row["variants"]
    if device_type != "cuda":
        best = report_tables.fastest(row)
        return [demand(f"{where}: time against the fastest, {best}", 1 / cases[best]["ratio"], "<=", MOST_ON_CPU)]
    if row["pair"] not in JUDGED_PAIRS:
        return []
    large = row["gradient_bytes"] >= LARGE_BYTES and row["way"] != "bucket"
    if not large and (row["way"], row["model"]) != ("bucket", "gpt2"):
        return []
    ours = cases[OURS]
    copy_us = min(float(cases[name]["us"]) for name in (COPY, COPY_KERNEL))
    most = copy_us / (copy_us + TRIPS_US * row["buckets"])
    found = [
        demand(f"{where}: share of the copy", ours["share_copy"], ">=", SHARE_OF_COPY * most),
        demand(f"{where}: share of the cast", ours["share_cast"], ">=", SHARE_OF_CAST * most),
    ]
    if large and row["direction"] == "unpack":
        allowed = WITH_NORMS + SECOND_STAGE_US / ours["us"]
        found.append(demand(f"{where}: time with norms", cases[NORMS]["ratio"], "<=", allowed))
    return found


def plan(models: Sequence[str], pairs: Sequence[str], ways: Sequence[str], device: torch.device) -> list[Workload]:
    """What there is to do, none of it allocated; a list that is one bucket anyway is done once.

    Raises:
        BenchError: unknown names, or too little memory for one of them.
    """
    found = []
    for model in models:
        for text in pairs:
            pair = Pair.parse(text)
            several = len(layers.buckets(layers.shapes(model), pair.gradients.itemsize)) > 1
            for way in ways if several else ["whole"]:
                found.append(Workload(model, pair, way, device))
    return found


def main() -> int:
    """Measures, prints tables and demands, writes one JSON."""
    parser = records.Parser(description=__doc__)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--models", nargs="+", help=f"of {', '.join(layers.NAMES)} or COUNTxNUMEL")
    parser.add_argument("--pairs", nargs="+", help="GRADIENTS-WIRE, such as fp32-bf16 or bf16-native")
    parser.add_argument("--ways", nargs="+", choices=WAYS, help="default: all; on CPU: bucket")
    parser.add_argument("--rounds", type=int, help="timings of each case (default: 30; on CPU 11)")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="begin no other list of tensors after so long")
    parser.add_argument("--tuning", nargs=2, type=int, metavar=("TILE_BYTES", "WARPS"), help="of ours, on a GPU")
    parser.add_record()
    chosen = parser.parse_args()
    device = records.pick_device(chosen.device)
    on_cpu = device.type == "cpu"
    if chosen.tuning and on_cpu:
        parser.error("only a GPU has launch shapes: leave --tuning out")
    rounds = chosen.rounds or (5 if chosen.rehearse else 11 if on_cpu else 30)
    if rounds < 2:
        raise BenchError(f"--rounds {rounds}: a median takes 2 rounds at least")
    kernel_cases.prove_path(device)
    if on_cpu:
        torch.set_num_threads(1)
    models = chosen.models or (REHEARSED_MODELS if chosen.rehearse else CPU_MODELS if on_cpu else layers.NAMES)
    pairs = chosen.pairs or (JUDGED_PAIRS if on_cpu else PAIRS)
    ways = chosen.ways or (("bucket",) if on_cpu else WAYS)
    rows: list[Row] = []
    until_s = time.monotonic() + chosen.limit_s
    with tuned(Tuning(*chosen.tuning)) if chosen.tuning else contextlib.nullcontext():
        for work in plan(models, pairs, ways, device):
            if time.monotonic() > until_s:
                print(f"stopped after {chosen.limit_s:g} s: lists of tensors are missing", flush=True)
                break
            work.allocate()
            for direction in DIRECTIONS:
                row = measure_row(work, direction, rounds=rounds)
                rows.append(row)
                print(f"{row['case']}: {row['variants'][OURS]['us']:.1f} us", flush=True)
            work.release()
    return report_tables.publish(
        chosen,
        "-".join(["kernels", *map(str, chosen.tuning or ())]),
        device,
        bounded=on_cpu and not chosen.models,
        threads=torch.get_num_threads(),
        cache_bytes=timing.cache_bytes(device),
        rows=rows,
        demands=[one for row in rows for one in demands(row, device.type)],
    )


if __name__ == "__main__":
    records.entry(main)
