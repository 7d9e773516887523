"""Records of benchmark runs: what stands in one, how it is written and read, and how a benchmark ends.

One JSON file per run, `<what>_<hardware>_<date>.json`, and -2, -3 for more of a day: no run replaces another, so that
none is chosen by its numbers. A record has

    a header   when, by which command, of which commit, on what and with which versions it came about
    settings   of the run, under names of the benchmark's own: "ranks", "rounds"
    rows       of what was measured, each {"part", "case", facts ..., "variants": {name: {quantity: value}}}
    demands    of what is to be reached, each {"what", "value", "unit", "sign", "bound", "met"}: see `demand`

A row is a case that was measured, of a part of the benchmark; its variants are what took turns in it. A quantity has
its unit at its end ("step_ms", "over_peak_bytes"); a time is a median, beside which stand the 20th and the 80th
percentile ("step_p20_ms", "step_p80_ms"). What could not be measured is null, and so is a ratio to nothing.

A benchmark that cannot run, or whose check fails, raises BenchError: `entry` makes one line and exit status 1 of it.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib.util
import json
import math
import operator
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from torch.multiprocessing.spawn import ProcessRaisedException

SCHEMA = 2
SIGNS: Mapping[str, Callable[[float, float], bool]] = {"<=": operator.le, "<": operator.lt, ">=": operator.ge}
CHECKOUT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).parent / "results"
# Of 4, 5, ... degrees of freedom: the 97.5th percentile of Student's t.
_T = (2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093)
LEAST_RATIOS = 5
_KNOWN_GPUS = re.compile(r"\b(h200|h100|a100)\b")
# What a run's numbers depend on; records and pages that were just written do not make it another program.
_MEASURED_SOURCES = ("fusedreduce", "kernels", "perf", ":(exclude)perf/results")


class BenchError(Exception):
    """A benchmark cannot give a number; the message is the one line that says why."""


class Parser(argparse.ArgumentParser):
    """Bad options are a BenchError as everything else is: one line, exit status 1. Help is the script's docstring."""

    def __init__(self, *, description: str | None, **options: Any) -> None:
        super().__init__(
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            **options,
        )

    def add_record(self) -> None:
        """The options of a benchmark that ends with a record: --out, --rehearse, --no-check."""
        self.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON (default: perf/results)")
        self.add_argument("--rehearse", action="store_true", help="too small for numbers: the record says so")
        self.add_argument("--no-check", action="store_true", help="exit status 0 whatever is missed")

    def error(self, message: str) -> NoReturn:
        raise BenchError(f"{message} (see {self.prog} --help)")


def entry(main: Callable[[], int]) -> NoReturn:
    """Ends the process with what `main` returns; what it cannot do is one line on stderr and exit status 1."""
    try:
        status = main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(130)
    except BaseException as error:
        line = line_of(error)
        if line is None:
            raise
        sys.stdout.flush()
        print(f"error: {line}", file=sys.stderr)
        sys.exit(1)
    sys.exit(status)


def line_of(error: BaseException) -> str | None:
    """What to say of an error that is not a fault of the program; None: it is one."""
    if isinstance(error, BenchError):
        return " ".join(str(error).split())
    if isinstance(error, ProcessRaisedException):  # of a rank: its message ends with the rank's own error
        name, _, said = str(error).strip().splitlines()[-1].partition(": ")
        return said if name.endswith(BenchError.__name__) else None
    # torch raises a plain RuntimeError where the CPU has too little.
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
        return f"too little memory: {' '.join(str(error).split())[:160]}"
    return None


def pick_device(name: str) -> torch.device:
    """The device that an option names: "cpu", "cuda", or "auto", which is the GPU where there is one.

    Raises:
        BenchError: there is no GPU.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise BenchError("no GPU: torch finds no CUDA device here")
    return torch.device(name)


def hardware_name(device: torch.device | str) -> str:
    """What file names call the device: cpu, h200, h100, a100, else a slug of its name."""
    device = torch.device(device)
    if device.type == "cpu":
        return "cpu"
    pick_device("cuda")
    name = torch.cuda.get_device_name(device).lower()
    known = _KNOWN_GPUS.search(name)
    return known[1] if known else re.sub(r"[^a-z0-9]+", "-", name.removeprefix("nvidia ")).strip("-")


def provenance(device: torch.device | str) -> dict[str, object]:
    """When, by which command, of which commit, on what and with what a run comes about."""
    device = torch.device(device)
    return {
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": _command(sys.argv),
        "commit": _commit(),
        "device": hardware_name(device),
        "hardware": _hardware(device),
        "versions": _versions(device.type),
    }


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """The geometric mean of at least 5 ratios, and the ends of its 95 % interval."""
    logs = [math.log(ratio) for ratio in ratios]
    mean = statistics.fmean(logs)
    percentile = _T[min(len(logs) - LEAST_RATIOS, len(_T) - 1)]
    half = percentile * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def demand(
    what: str,
    value: float | None,
    sign: Literal["<=", "<", ">="],
    bound: float | None,
    *,
    unit: str = "",
    why_not: str | None = None,
    **facts: object,
) -> dict[str, Any]:
    """What is to be reached, and whether it is.

    Args:
        unit: of value and bound, as it is printed behind them; "%" for shares of 1.
        why_not: it cannot be judged; None: it can.
        facts: "of", what it is a share of, and what else belongs to it.
    """
    met = None
    if value is None or bound is None:
        why_not = why_not or "it could not be measured"
    elif why_not is None:
        met = SIGNS[sign](value, bound)
    found = {"what": what, "value": value, "unit": unit, "sign": sign, "bound": bound, "met": met}
    return found | ({} if why_not is None else {"why_not": why_not}) | facts


def write(
    folder: Path,
    what: str,
    device: torch.device | str,
    *,
    rows: Sequence[Mapping[str, Any]] = (),
    demands: Sequence[Mapping[str, Any]] = (),
    rehearsal: bool = False,
    over: Path | None = None,
    **settings: Any,
) -> Path:
    """Writes <folder>/<what>_<hardware>_<date>.json, or beside it if that is there, and all of it or nothing.

    Args:
        folder: made if it is not there.
        what: the benchmark's name, as `report.py` knows it.
        rehearsal: sizes and clocks that say nothing of the hardware. Such a record never goes into `RESULTS`.
        over: what this run has written before, which this takes the place of.
        settings: of the run. `others_cores`, that other work kept busy, are of the whole process unless given.

    Raises:
        BenchError: a rehearsal into `RESULTS`; a number that is not finite; a folder that cannot be written to.
    """
    if rehearsal and folder.resolve().is_relative_to(RESULTS.resolve()):
        raise BenchError(f"a rehearsal leaves no record in {RESULTS.name}: name another folder")
    record = {"schema": SCHEMA, "what": what, **provenance(device), "others_cores": 0.0, "rehearsal": rehearsal}
    if clash := sorted(record.keys() & (settings.keys() - {"others_cores"})):
        raise ValueError(f"the record has {clash} already")
    if "others_cores" not in settings:  # beside many of them no number is worth publishing
        others_cores = (_others_busy_s() - _BUSY_BEFORE_S) / (time.monotonic() - _BEGAN_S)
        record["others_cores"] = max(0.0, round(others_cores, 2))
    record |= {**settings, "rows": list(rows), "demands": list(demands)}
    try:
        text = json.dumps(record, indent=1, allow_nan=False)
    except ValueError as error:
        raise BenchError(f"{what}: a number is not finite, so there is no record ({error})") from error
    make_folder(folder)
    name = f"{what}_{record['device']}_{str(record['created'])[:10]}"
    path, number = over or folder / f"{name}.json", 1
    while path != over and path.exists():
        number += 1
        path = folder / f"{name}-{number}.json"
    beside = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        beside.write_text(text + "\n")
        beside.replace(path)
    except OSError as error:
        raise BenchError(f"{folder} cannot be written to: {error.strerror}") from error
    return path


def make_folder(folder: Path) -> None:
    """Makes it if it is not there.

    Raises:
        BenchError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BenchError(f"{folder} cannot be made: {error.strerror}") from error


def read(path: Path, *, published: bool = True) -> dict[str, Any]:
    """The record in a file.

    Raises:
        BenchError: it is of another schema, or a rehearsal that is to be published.
    """
    record: dict[str, Any] = json.loads(path.read_text())
    if record["schema"] != SCHEMA:
        raise BenchError(f"{path.name} is no record of schema {SCHEMA}; measure it again")
    if record["rehearsal"] and published:
        raise BenchError(f"{path.name} is a rehearsal: its numbers say nothing of the hardware")
    return record


def spread(seconds: Sequence[float], key: str) -> dict[str, float]:
    """Median, 20th and 80th percentile as a row has them: of "step_ms" that, "step_p20_ms" and "step_p80_ms"."""
    tenths = statistics.quantiles(seconds, n=10, method="inclusive")
    by = {"ms": 1e3, "us": 1e6, "ns": 1e9}[key.rpartition("_")[2]]
    return {key: by * tenths[4], spread_key(key, "p20"): by * tenths[1], spread_key(key, "p80"): by * tenths[7]}


def spread_key(key: str, part: str) -> str:
    """Of "step_ms" and "p20": "step_p20_ms"."""
    *quantity, unit = key.split("_")
    return "_".join([*quantity, part, unit])


def _others_busy_s() -> float:
    """Of all cores, for which other work has kept them busy; every process that was started here must have ended."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    busy_ticks = user + nice + system + irq + softirq + steal
    return busy_ticks / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])  # ours: this process and its children


_BEGAN_S, _BUSY_BEFORE_S = time.monotonic(), _others_busy_s()


def _command(argv: Sequence[str]) -> str:
    """As it can be typed in the checkout; of folders elsewhere the name alone, which is all that others can use."""
    script = Path(argv[0]).resolve()
    shown = script.relative_to(CHECKOUT) if script.is_relative_to(CHECKOUT) else Path(script.name)
    arguments = [re.sub(r"(?:^|(?<==))/(?:\S*/)?(?=[^/\s]+)", "", argument) for argument in argv[1:]]
    return shlex.join(["python", str(shown), *arguments])


@functools.cache
def _commit() -> str:
    """What the environment's FUSEDREDUCE_COMMIT says, of a checkout that came without its git; else the short hash,
    with -dirty if what is measured differs from it."""
    if said := os.environ.get("FUSEDREDUCE_COMMIT"):
        return said
    commit = _output("git", "rev-parse", "--short", "HEAD")
    if not commit:
        return "unknown"
    return commit + ("-dirty" if _output("git", "status", "--porcelain", "--", *_MEASURED_SOURCES) else "")


@functools.cache
def _hardware(device: torch.device) -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    processor = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")
    host = f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}, {processor}"
    if device.type == "cpu":
        return host
    gpu = torch.cuda.get_device_properties(device)
    return f"{gpu.name}, {gpu.multi_processor_count} multiprocessors, {gpu.total_memory / 2**30:.0f} GiB; {host}"


@functools.cache
def _versions(device_type: str) -> dict[str, str]:
    found = {"torch": torch.__version__, "python": platform.python_version(), "numpy": metadata.version("numpy")}
    if importlib.util.find_spec("triton"):
        found["triton"] = metadata.version("triton")
    if device_type != "cuda":
        return found
    found["cuda"] = str(torch.version.cuda or torch.version.hip)
    if driver := _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"):
        found["driver"] = driver.splitlines()[0]
    if torch.distributed.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def _output(*command: str) -> str:
    """What a command prints; empty if it cannot be run or fails."""
    try:
        done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
