"""`fusedreduce demo`: a training run on real data, with the fused paths and torch's own side by side."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fusedreduce.trace.reader import read
from fusedreduce.trace.report import merge
from fusedreduce.wires import PLAIN_WIRES, WIRES

from . import demo_report, trace
from .arguments import ALWAYS, add, importable, names, require, run_by, whole, writable
from .demo_report import ROWS_FILE, TRACE_FOLDER, Row
from .digits import BATCH_IMAGES, TRAINING_IMAGES
from .launch import InterruptedRunError, RankFailedError, run_ranks
from .report import hardware

ACCURACY_NEEDED = 0.95
WORKER = "fusedreduce.cli.demo_worker"
_NEXT = "fusedreduce doctor --model N --backward-ms MS --network 10gbe --ranks 4"
_MAX_RANKS = TRAINING_IMAGES // BATCH_IMAGES


def add_parser(subparsers: Any) -> None:
    """Adds `demo` to the command line."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "demo",
        help="train on real data with the fused path beside torch's own, and compare",
        description="Trains a small convolutional network on scikit-learn's handwritten digits, on several ranks of "
        "this machine, side by side with torch DDP, the fused hook and the wrapper. Prints a table of what they learnt "
        "and how far they differ, and writes demo.json, demo.png (loss curves), and of some steps where the time went, "
        "trace.json (for Perfetto) and trace.png.",
        epilog=f"Exit status: 0 all is well; 1 a variant ends under {ACCURACY_NEEDED:.0%} accuracy, the ranks' "
        "parameters differ, losses that must be torch's bit for bit (wire native, at most two ranks, on CPU) are not, "
        "or a rank failed; 2 wrong usage; 128 plus its number when a signal ended it.",
        allow_abbrev=False,
    )
    add(parser, "--ranks", needs=ALWAYS, type=whole(1), metavar="N", help="processes (default: 2, at most one per GPU)")
    add(
        parser,
        "--steps",
        needs=ALWAYS,
        type=whole(1),
        default=300,
        metavar="N",
        help="training steps per variant (default: %(default)s)",
    )
    add(
        parser,
        "--wire",
        needs=ALWAYS,
        repeated=True,
        type=names(WIRES),
        metavar="WIRE[,WIRE...]",
        help=f"what travels, of {', '.join(WIRES)}; may be repeated (default: {', '.join(PLAIN_WIRES)})",
    )
    add(
        parser,
        "--seed",
        needs=ALWAYS,
        type=whole(0),
        default=0,
        help="of the initial weights and the order of images (default: %(default)s)",
    )
    add(
        parser,
        "--out",
        needs=ALWAYS,
        type=Path,
        default=Path("out"),
        metavar="FOLDER",
        help="where the files go (default: %(default)s)",
    )
    add(
        parser,
        "--device",
        needs=ALWAYS,
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto: cuda where there is one (default)",
    )
    run_by(parser, _run)


def _run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    """Checks the arguments, then runs. Returns the exit status."""
    require(parser, "sklearn")
    device = _device(parser, arguments.device)
    ranks = _ranks(parser, arguments.ranks, device)
    wires = list(dict.fromkeys(arguments.wire or PLAIN_WIRES))
    steps, seed = arguments.steps, arguments.seed
    out = writable(parser, arguments.out)
    began = time.monotonic()
    place = hardware(device, ranks)
    print(f"fusedreduce demo: {_count(ranks, 'rank')} on {place}; {_count(steps, 'step')}, seed {seed}", flush=True)
    try:
        with tempfile.TemporaryDirectory(prefix="fusedreduce-demo-") as temporary:
            folder = Path(temporary)
            asked = [device, ",".join(wires), str(steps), str(seed)]
            run_ranks(WORKER, folder, asked, ranks, loopback=device == "cpu")
            rows = [Row(**fields) for fields in json.loads((folder / ROWS_FILE).read_text())]
            traced = merge(read(folder / TRACE_FOLDER))
    except InterruptedRunError as interrupted:
        _complain(f"{interrupted}; every rank has ended")
        return 128 + interrupted.signum
    except RankFailedError as failure:
        _complain(str(failure) + _keep_details(out, failure.details))
        return 1
    facts = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device,
        "hardware": place,
        "ranks": ranks,
        "steps": steps,
        "seed": seed,
        "wall_s": round(time.monotonic() - began, 1),
    }
    demo_report.write_json(out / "demo.json", rows, facts)
    wrong = _wrong(rows, device)
    answers = "answers do NOT agree" if wrong else "answers agree"
    title = f"The {answers}: handwritten digits, {_count(ranks, 'rank')} on {device.upper()}"
    curves = f"{out / 'demo.png'}    loss curves"
    if importable("matplotlib"):
        demo_report.draw(out / "demo.png", rows, title)
    else:
        curves = "no demo.png: pip install matplotlib"
    print(f"\n{demo_report.table(rows)}\n")
    if not any(row.path == "triton" for row in rows):
        print("No kernel was compiled here: this shows that the CPU path agrees, not that kernels on a GPU do.\n")
    print(f"{out / 'demo.json'}   every figure\n{curves}")
    print(f"{trace.write(traced, out)}\n")
    said = "; ".join(wrong) if wrong else f"{_agreement(rows)}. Next, what it saves on your link: {_NEXT}"
    print(f"Verdict: the {answers}: {said}")
    if wrong:
        _complain("; ".join(wrong))
    return 1 if wrong else 0


def _wrong(rows: Sequence[Row], device: str) -> list[str]:
    """Descriptions of wrong results, by variant."""
    wrong = [f"{row.name}: {row.difference}" for row in rows if row.difference is not None]
    # Not on a GPU: torch does not promise that two runs compute the same gradients there.
    wrong += [
        f"{row.name}: losses are up to {row.worst_loss_difference:.1e} off torch DDP's, and must be the same bits"
        for row in rows
        if device == "cpu" and row.exact and row.worst_loss_difference != 0
    ]
    # Not `<`: NaN must fail too.
    return wrong + [
        f"{row.name} ended at {row.accuracy:.2%} accuracy, under {ACCURACY_NEEDED:.0%}"
        for row in rows
        if not row.accuracy >= ACCURACY_NEEDED
    ]


def _agreement(rows: Sequence[Row]) -> str:
    """What agrees, and what the smallest wire saves."""
    said = [f"{_count(len(rows), 'variant')} of at least {min(row.accuracy for row in rows):.1%} accuracy"]
    if any(row.exact and row.worst_loss_difference == 0 for row in rows):
        said.append("wire native has torch's losses bit for bit")
    least, torchs = min(rows, key=lambda row: row.wire_bytes_per_step), rows[0].wire_bytes_per_step
    if least.wire_bytes_per_step < torchs:
        said.append(f"{least.name} sends {least.wire_bytes_per_step / torchs:.2f} of torch's bytes")
    return ", ".join(said)


def _device(parser: argparse.ArgumentParser, wanted: str) -> str:
    usable = torch.cuda.is_available() and dist.is_nccl_available()
    if wanted == "cuda" and not usable:
        parser.error("argument --device: torch finds no CUDA GPU with NCCL here: use cpu or auto")
    return "cuda" if usable and wanted != "cpu" else "cpu"


def _ranks(parser: argparse.ArgumentParser, wanted: int | None, device: str) -> int:
    limit = torch.cuda.device_count() if device == "cuda" else _MAX_RANKS
    ranks = min(2, limit) if wanted is None else wanted
    if ranks > limit:
        batches = f"{TRAINING_IMAGES} images in batches of {BATCH_IMAGES} per rank"
        why = "one rank per GPU" if device == "cuda" else batches
        parser.error(f"argument --ranks: {ranks} is more than {limit}, the most there can be ({why})")
    return ranks


def _keep_details(out: Path, details: str | None) -> str:
    if details is None:
        return ""
    path = out / "demo-error.txt"
    path.write_text(details)
    return f" (traceback: {path})"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _complain(reason: str) -> None:
    # On a terminal the progress bar's line may not be ended.
    print(("\n" if sys.stderr.isatty() else "") + f"fusedreduce demo: error: {reason}", file=sys.stderr, flush=True)
