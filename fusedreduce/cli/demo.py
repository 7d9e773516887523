"""`fusedreduce demo`: a training run on real data, with the fused paths and torch's own side by side."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from fusedreduce.config import WIRES, Wire
from fusedreduce.trace.reader import read
from fusedreduce.trace.report import merge

from . import picture, report, results, trace
from .digits import BATCH_IMAGES, TRAINING_IMAGES
from .files import writable
from .launch import InterruptedRunError, RankFailedError, run_ranks

ACCURACY_NEEDED = 0.95
_DEFAULT_STEPS = 400
_WORKER = "fusedreduce.cli.demo_worker"
_NEEDS = ("sklearn", "matplotlib")
_MAX_RANKS = TRAINING_IMAGES // BATCH_IMAGES
_ANSWERS = {True: "The answers agree", False: "The answers do NOT agree"}


def add_parser(subparsers: Any) -> None:
    """Adds `demo` to the command line."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "demo",
        help="train on real data with the fused path beside torch's own, and compare",
        description="Trains a small convolutional network on scikit-learn's handwritten digits, on several ranks of "
        "this machine, with torch DDP and with the fused hook side by side. Prints a table and writes demo.json and "
        "demo.png, and of some steps where the time went, trace.json (for Perfetto) and trace.png.",
        epilog=f"Exit status: 0 all is well; 1 a variant ends under {ACCURACY_NEEDED:.0%} accuracy, the ranks' "
        "parameters differ, or a rank failed; 2 wrong usage; 128 plus its number when a signal ended it.",
        allow_abbrev=False,
    )
    parser.add_argument("--ranks", type=int, metavar="N", help="processes (default: 2, at most one per GPU)")
    parser.add_argument(
        "--steps",
        type=int,
        default=_DEFAULT_STEPS,
        metavar="N",
        help="training steps per variant (default: %(default)s)",
    )
    parser.add_argument(
        "--wire",
        action="append",
        metavar="WIRE[,WIRE...]",
        help=f"what travels, of {', '.join(WIRES)}; may be repeated (default: all of them)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the initial weights and the order of images (default: %(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out"), metavar="FOLDER", help="where the files go (default: %(default)s)"
    )
    parser.add_argument(
        "--device", default="auto", metavar="DEVICE", help="cpu, cuda, or auto: cuda where there is one (default)"
    )
    parser.set_defaults(run=lambda arguments: _run(parser, arguments))


def _run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    """Checks the arguments, then runs. Returns the exit status."""
    _check_installed(parser)
    device = _device(parser, arguments.device)
    ranks = _ranks(parser, arguments.ranks, device)
    job = results.Job(
        device=device,
        wires=_wires(parser, arguments.wire),
        steps=_at_least(parser, "--steps", arguments.steps, 1),
        seed=_at_least(parser, "--seed", arguments.seed, 0),
        launcher_pid=os.getpid(),
    )
    out = writable(parser, arguments.out)
    began = time.monotonic()
    place = report.hardware(device, ranks)
    ranks_there = f"{_count(ranks, 'rank')} on {place}"
    print(f"fusedreduce demo: {ranks_there}; {_count(job.steps, 'step')}, seed {job.seed}", flush=True)
    try:
        with tempfile.TemporaryDirectory(prefix="fusedreduce-demo-") as folder:
            results.write_job(Path(folder), job)
            run_ranks(_WORKER, Path(folder), ranks, loopback=device == "cpu")
            rows = results.read_rows(Path(folder))
            traced = merge(read(Path(folder) / results.TRACE_FOLDER))
    except InterruptedRunError as interrupted:
        _complain(f"{interrupted}; every rank has ended")
        return 128 + interrupted.signum
    except RankFailedError as failure:
        _complain(str(failure) + _keep_details(out, failure.details))
        return 1
    facts = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": _as_typed(arguments.typed, arguments.out),
        "device": device,
        "hardware": place,
        "ranks": ranks,
        "steps": job.steps,
        "seed": job.seed,
        "wall_s": round(time.monotonic() - began, 1),
    }
    report.write_demo_json(out / "demo.json", rows, facts)
    wrong = _wrong(rows)
    link = "over loopback" if device == "cpu" else "over NCCL"
    title = f"{_ANSWERS[not wrong]}: handwritten digits, {_count(ranks, 'rank')} on {device.upper()}, {link}"
    no_network = ": no network here" if device == "cpu" else ""
    picture.draw(out / "demo.png", rows, title, f"Time per step, {link}{no_network}")
    print(f"\n{report.table(rows)}\n\n{report.notes(rows, ranks)}\n")
    print(f"{out / 'demo.json'}  every figure\n{out / 'demo.png'}   loss curves and time per step")
    print(trace.write(traced, out))
    if wrong:
        _complain("; ".join(wrong))
    return 1 if wrong else 0


def _wrong(rows: Sequence[results.Row]) -> list[str]:
    """Descriptions of wrong results, by variant."""
    wrong = [f"{row.name}: {row.difference}" for row in rows if not row.parameters_equal]
    # Not `<`: NaN must fail too.
    return wrong + [
        f"{row.name} ended at {row.accuracy:.2%} accuracy, under {ACCURACY_NEEDED:.0%}"
        for row in rows
        if not row.accuracy >= ACCURACY_NEEDED
    ]


def _check_installed(parser: argparse.ArgumentParser) -> None:
    missing = [name for name in _NEEDS if not _importable(name)]
    if missing:
        parser.error(f"{' and '.join(missing)} cannot be imported: pip install 'fusedreduce[demo]'")


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _device(parser: argparse.ArgumentParser, wanted: str) -> str:
    if wanted not in ("auto", "cpu", "cuda"):
        parser.error(f"argument --device: unknown device {wanted!r}: use auto, cpu or cuda")
    usable = torch.cuda.is_available() and dist.is_nccl_available()
    if wanted == "cuda" and not usable:
        parser.error("argument --device: torch finds no CUDA GPU with NCCL here: use cpu or auto")
    return "cuda" if usable and wanted != "cpu" else "cpu"


def _ranks(parser: argparse.ArgumentParser, wanted: int | None, device: str) -> int:
    limit = torch.cuda.device_count() if device == "cuda" else _MAX_RANKS
    ranks = min(2, limit) if wanted is None else _at_least(parser, "--ranks", wanted, 1)
    if ranks > limit:
        batches = f"{TRAINING_IMAGES} images in batches of {BATCH_IMAGES} per rank"
        why = "one rank per GPU" if device == "cuda" else batches
        parser.error(f"argument --ranks: {ranks} is more than {limit}, the most there can be ({why})")
    return ranks


def _wires(parser: argparse.ArgumentParser, wanted: Sequence[str] | None) -> tuple[Wire, ...]:
    names = [name.strip() for part in wanted for name in part.split(",")] if wanted else list(WIRES)
    for name in names:
        if name not in WIRES:
            parser.error(f"argument --wire: unknown wire {name!r}: use one of {', '.join(WIRES)}")
    return tuple(cast("Wire", name) for name in dict.fromkeys(names))


def _at_least(parser: argparse.ArgumentParser, option: str, value: int, least: int) -> int:
    if value < least:
        parser.error(f"argument {option}: must be at least {least}, got {value}")
    return value


def _keep_details(out: Path, details: str | None) -> str:
    if details is None:
        return ""
    path = out / "demo-error.txt"
    path.write_text(details)
    return f" (traceback: {path})"


def _as_typed(typed: Sequence[str], out: Path) -> str:
    """The command line, without absolute paths of this machine."""
    shown = [one.replace(str(out), out.name) if out.is_absolute() else one for one in typed]
    return shlex.join(["fusedreduce", *shown])


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _complain(reason: str) -> None:
    # On a terminal the progress bar's line may not be ended.
    print(("\n" if sys.stderr.isatty() else "") + f"fusedreduce demo: error: {reason}", file=sys.stderr, flush=True)
