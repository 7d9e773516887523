"""Synchronisation cost and memory of our DDP wrapper beside torch's, on Gloo ranks of this machine.

    python perf/bench_step.py                # 2 ranks, both shapes, writes perf/results/step_cpu_<date>.json
    python perf/bench_step.py --torch-only   # the baselines alone, nothing is judged

Cost = median over all rounds and ranks of (step with the wrapper - step of the same module without DDP in that round),
a step being forward + backward from gradients that are None. All variants take turns step by step in one run, in an
order that changes each round, ranks starting together. Every variant's gradients are first compared with the true mean;
one that is wrong is an error and no number. Ratios are to the best, in that run, of torch's four variants. Ours without
overlap stands beside them to show what overlap brings; it is never taken for our best.

Memory: each variant in processes of its own, over what the same module takes there without DDP: the resident set after
the last step, its peak from before the wrapping on, and what the heap holds in use (exact: gradients, buckets, wire).

Exit status 1 if something required is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import harness
from torch import nn

import fusedreduce

LARGE = (200, 50_000)
SMALL = (2_000, 8)
MEMORY_STEPS = 10
REQUIRED = 1.0  # of the best of torch's, or less
GOAL = 0.75

FLOOR = "no DDP"
TORCH_DEFAULT = "torch DDP"
NATIVE = "ours native"
NATIVE_VIEWS = "ours native, views"
NATIVE_LATE = "ours native, no overlap"
BF16 = "ours bf16"
FP16 = "ours fp16"


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One line of the verdict: the best of `candidates` on a shape, and beside it `also` where that is another."""

    shape: harness.Shape
    wire: str
    candidates: tuple[str, ...]
    also: str | None = None


VERDICTS = (
    Judged(shape=SMALL, wire="native", candidates=(NATIVE, NATIVE_VIEWS), also=NATIVE),
    Judged(shape=LARGE, wire="native", candidates=(NATIVE, NATIVE_VIEWS), also=NATIVE),
    Judged(shape=LARGE, wire="bf16", candidates=(BF16,)),
)


def our_variants() -> dict[str, harness.Build]:
    """The wrapper by wire, by where gradients live, by when collectives start.

    Raises:
        SystemExit: the installed fusedreduce has no such wrapper or option.
    """
    wrapper: Callable[..., nn.Module] | None = getattr(fusedreduce, "DistributedDataParallel", None)
    if wrapper is None:
        raise SystemExit("fusedreduce has no DistributedDataParallel; --torch-only measures the baselines alone")

    def ours(config: Mapping[str, Any], **options: Any) -> harness.Build:
        try:
            reduce = fusedreduce.ReduceConfig(**config)
        except TypeError as error:
            raise SystemExit(f"ReduceConfig: {error}; --torch-only measures the baselines alone") from error
        return lambda model: wrapper(model, reduce=reduce, **options)

    return {
        NATIVE: ours({"wire": "native"}),
        NATIVE_VIEWS: ours({"wire": "native"}, gradient_as_bucket_view=True),
        NATIVE_LATE: ours({"wire": "native", "overlap": False}),
        BF16: ours({"wire": "bf16"}),
        FP16: ours({"wire": "fp16"}),
    }


def variants(torch_only: bool) -> dict[str, harness.Build]:
    """Everything that is measured, the floor first."""
    floor: dict[str, harness.Build] = {FLOOR: lambda model: model}
    return {**floor, **harness.torch_variants(), **({} if torch_only else our_variants())}


def wire_of(name: str) -> str:
    """What bounds the error of a variant."""
    return {BF16: "bf16", FP16: "fp16"}.get(name, "native")


# Time


def measure_time(rank: int, world: int, folder: str, shape: harness.Shape, steps: int, torch_only: bool) -> NoReturn:
    """One rank: checks, then times all variants in turns."""
    harness.begin(rank, world, folder)
    rows = harness.inputs(rank, shape)
    mean = harness.mean_of_ranks(rows)

    def case(name: str, model: nn.Module) -> harness.Case:
        expected = rows if name == FLOOR else mean
        return harness.Case(
            prepare=lambda: model.zero_grad(set_to_none=True),
            run=lambda: model(rows).backward(),
            check=lambda: harness.check_gradients(name, model, expected, wire_of(name)),
        )

    models = {name: build(harness.Many(*shape)) for name, build in variants(torch_only).items()}
    harness.finish(rank, folder, harness.take_turns({name: case(name, model) for name, model in models.items()}, steps))


def costs(times: Mapping[str, list[float]]) -> dict[str, dict[str, float]]:
    """The table: spread of the step, spread of what it takes more than the floor, ratio to the best of torch's.

    The difference is taken round by round: on a machine with other work, this halves the scatter of the ratios.

    Raises:
        SystemExit: torch's best costs nothing that can be measured; every ratio would be noise.
    """
    rows = {}
    for name, seconds in times.items():
        rows[name] = _spread("step", seconds)
        if name != FLOOR:
            rows[name] |= _spread("sync", [step - floor for step, floor in zip(seconds, times[FLOOR], strict=True)])
    best_ms = rows[torch_best(rows)]["sync_ms"]
    if best_ms <= 0:
        raise SystemExit(f"torch's best costs {best_ms:.3f} ms more than no DDP: too few steps to tell")
    for row in rows.values():
        if "sync_ms" in row:
            row["ratio"] = row["sync_ms"] / best_ms
    return rows


def _spread(prefix: str, seconds: Sequence[float]) -> dict[str, float]:
    spread = harness.Spread.of(seconds)
    return {
        f"{prefix}_ms": spread.median_ms,
        f"{prefix}_p20_ms": spread.p20_ms,
        f"{prefix}_p80_ms": spread.p80_ms,
    }


def torch_best(rows: Mapping[str, Mapping[str, float]]) -> str:
    """The variant of torch's that all ratios refer to."""
    return min(harness.torch_variants(), key=lambda name: rows[name]["sync_ms"])


def print_costs(shape: str, ranks: int, rows: Mapping[str, Mapping[str, float]]) -> None:
    """One line per variant."""
    print(f"\n{shape} parameters, {ranks} ranks; ratios to {torch_best(rows)!r}")
    print(f"{'variant':34} {'step ms':>8} {'p20':>8} {'p80':>8} {'sync ms':>8} {'p20':>8} {'p80':>8} {'ratio':>6}")
    for name, row in rows.items():
        step = f"{name:34} {row['step_ms']:8.2f} {row['step_p20_ms']:8.2f} {row['step_p80_ms']:8.2f}"
        if name == FLOOR:
            print(step)
        else:
            sync = f"{row['sync_ms']:8.2f} {row['sync_p20_ms']:8.2f} {row['sync_p80_ms']:8.2f}"
            print(f"{step} {sync} {row['ratio']:6.2f}")


# Memory

MALLINFO2_FIELDS = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class _Mallinfo2(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [(name, ctypes.c_size_t) for name in MALLINFO2_FIELDS]


def heap_bytes() -> int | None:
    """Bytes that malloc has handed out and not got back, over all arenas; None without glibc 2.33."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return None
    mallinfo2.restype = _Mallinfo2
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


def resident_bytes(field: str) -> int:
    """VmRSS (now) or VmHWM (peak) of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def measure_memory(rank: int, world: int, folder: str, name: str, torch_only: bool) -> NoReturn:
    """One rank, one variant: some steps, then what the process holds while its gradients live."""
    harness.begin(rank, world, folder)
    rows = harness.inputs(rank, LARGE)
    # What the first DDP of a process takes once (torch imports 800 modules for it: 80 MB) is no matter of the variant.
    harness.torch_ddp()(harness.Many(1, 8))(rows[:1, :8]).backward()
    module = harness.Many(*LARGE)
    with contextlib.suppress(OSError):  # where that is not allowed the peak is that of the whole process
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    model = variants(torch_only)[name](module)
    for _ in range(MEMORY_STEPS):
        model.zero_grad(set_to_none=True)
        model(rows).backward()
    usage = {"end_bytes": resident_bytes("VmRSS"), "peak_bytes": resident_bytes("VmHWM"), "heap_bytes": heap_bytes()}
    expected = rows if name == FLOOR else harness.mean_of_ranks(rows)
    harness.check_gradients(name, model, expected, wire_of(name))
    storages = [p.grad.untyped_storage() for p in model.parameters() if p.grad is not None]
    usage["gradient_bytes"] = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    harness.finish(rank, folder, usage)


def memory(ranks: int, torch_only: bool) -> dict[str, dict[str, int | None]]:
    """Per variant the rank that holds most; `over_` is what it holds more than the floor."""
    rows: dict[str, dict[str, int | None]] = {}
    for name in variants(torch_only):
        usages = harness.run_ranks(measure_memory, ranks, name, torch_only)
        row = {key: None if usages[0][key] is None else max(usage[key] for usage in usages) for key in usages[0]}
        floor = rows.get(FLOOR, row)
        over = {f"over_{key}": _difference(row[key], floor[key]) for key in ("end_bytes", "peak_bytes", "heap_bytes")}
        rows[name] = row | over
    return rows


def _difference(left: int | None, right: int | None) -> int | None:
    return None if left is None or right is None else left - right


def print_memory(ranks: int, rows: Mapping[str, Mapping[str, int | None]]) -> None:
    """One line per variant, in MB of 10^6 bytes."""

    def mb(value: int | None) -> str:
        return f"{'-':>9}" if value is None else f"{value / 1e6:9.1f}"

    print(f"\nMemory, {harness.shape_name(LARGE)} parameters, {ranks} ranks, MB after {MEMORY_STEPS} steps;")
    print("'+' is over no DDP: resident set at the end, its peak, heap in use")
    print(f"{'variant':34} {'end':>9} {'peak':>9} {'gradients':>9} {'+end':>9} {'+peak':>9} {'+heap':>9}")
    shown = ("end_bytes", "peak_bytes", "gradient_bytes", "over_end_bytes", "over_peak_bytes", "over_heap_bytes")
    for name, row in rows.items():
        print(f"{name:34} {' '.join(mb(row[key]) for key in shown)}")


# Verdict


def judge_costs(shapes: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[bool]:
    """Prints a line for each of VERDICTS; whether what is required is met, for those that were measured."""
    met = []
    for judged in VERDICTS:
        shape = harness.shape_name(judged.shape)
        rows = shapes.get(shape, {})
        if judged.candidates[0] not in rows:
            print(f"{judged.wire}, {shape}: not measured")
            continue
        best = min(judged.candidates, key=lambda name: rows[name]["ratio"])
        ratio = rows[best]["ratio"]
        also = f", {judged.also!r} {rows[judged.also]['ratio']:.2f}" if judged.also not in (None, best) else ""
        print(
            f"{judged.wire}, {shape}: {ratio:.2f} of {torch_best(rows)!r} by {best!r}{also}; "
            f"required <= {REQUIRED:.2f}: {_word(ratio <= REQUIRED)}; goal {GOAL}: {_word(ratio <= GOAL)}"
        )
        met.append(ratio <= REQUIRED)
    return met


def judge_memory(rows: Mapping[str, Mapping[str, int | None]]) -> list[bool]:
    """Prints a line; whether our bf16 is below torch's default, at its peak and at the end."""
    if BF16 not in rows:
        print("memory, bf16: not measured")
        return []
    parts, met = [], True
    for key, words in (("peak_bytes", "peak"), ("end_bytes", "end")):
        ours, theirs = (rows[name][f"over_{key}"] for name in (BF16, TORCH_DEFAULT))
        assert ours is not None and theirs is not None
        parts.append(f"{words} +{ours / 1e6:.1f} MB to +{theirs / 1e6:.1f}")
        met = met and ours < theirs
    print(f"memory, bf16 to {TORCH_DEFAULT!r}: {', '.join(parts)}; required below: {_word(met)}")
    return [met]


def _word(met: bool) -> str:
    return "met" if met else "MISSED"


def main() -> int:
    """Runs every shape and the memory of each variant, prints tables and verdict, writes one JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes of one thread each (default: 2)")
    parser.add_argument("--steps", type=int, default=40, help="timed rounds (default: 40); best a multiple of 10")
    parser.add_argument(
        "--shapes",
        type=harness.parse_shape,
        nargs="+",
        default=[LARGE, SMALL],
        metavar="COUNTxNUMEL",
        help="default: 200x50000, with which memory is measured, and 2000x8",
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder for the JSON")
    parser.add_argument("--torch-only", action="store_true", help="leave ours out")
    parser.add_argument("--no-check", action="store_true", help="exit status 0 whatever is missed")
    arguments = parser.parse_args()
    if arguments.ranks < 2 or arguments.steps < 2:
        parser.error("at least 2 ranks and 2 steps")
    variants(arguments.torch_only)  # what is missing is said here, once
    neighbours = harness.Neighbours()

    results = {}
    for shape in arguments.shapes:
        name = harness.shape_name(shape)
        per_rank = harness.run_ranks(measure_time, arguments.ranks, shape, arguments.steps, arguments.torch_only)
        results[name] = costs(harness.pooled(per_rank))
        print_costs(name, arguments.ranks, results[name])
    held: dict[str, dict[str, int | None]] = {}
    if LARGE in arguments.shapes:
        held = memory(arguments.ranks, arguments.torch_only)
        print_memory(arguments.ranks, held)

    others_cores = neighbours.cores()
    print(f"\nother work kept {others_cores:.2f} cores busy meanwhile\n")
    met = judge_costs(results) + judge_memory(held)
    path = harness.write_record(
        arguments.out,
        "step_cpu",
        ranks=arguments.ranks,
        steps=arguments.steps,
        others_cores=others_cores,
        shapes=results,
        memory={"shape": harness.shape_name(LARGE), "steps": MEMORY_STEPS, "variants": held},
        torch_best={name: torch_best(rows) for name, rows in results.items()},
    )
    print(f"\n{path}")
    return 0 if all(met) or arguments.no_check else 1


if __name__ == "__main__":
    sys.exit(main())
