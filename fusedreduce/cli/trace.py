"""`fusedreduce trace`: shows recorded steps as a table, a picture and a timeline for Perfetto."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fusedreduce.errors import TraceError
from fusedreduce.planning.plan import bucket_label
from fusedreduce.trace.chrome import chrome_trace
from fusedreduce.trace.files import replace_text
from fusedreduce.trace.reader import read
from fusedreduce.trace.report import Figures, Run, figures, finish_ns, merge

from . import gantt
from .arguments import ALWAYS, add, importable, run_by, writable
from .columns import columns

JSON_FILE = "trace.json"
PICTURE_FILE = "trace.png"
# Limit of what a browser loads. An event takes about 300 bytes, and twice its parameters' names.
MOST_BYTES = 100_000_000
_EVENT_BYTES = 300
_NOTES = """\
step: from one start of backward to the next. exposed: from the end of backward, our packing in it, to the last
gradient reduced and unpacked. overlap: share of the time with a collective under way that lies within backward. stall:
a bucket is ready and an earlier one is not. Medians over the steps. all: the slowest rank of each step, but exposed
from the last end of backward on any rank to the last gradient on any rank, without waiting for slower ranks."""


def add_parser(subparsers: Any) -> None:
    """Adds `trace` to the command line."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "trace",
        help="show where the time of recorded steps went",
        description="Reads the traces that record_trace(FOLDER) wrote, aligns the ranks' clocks, prints exposed "
        f"communication, overlap and head-of-line stall, and writes {JSON_FILE} (open it in https://ui.perfetto.dev) "
        f"and {PICTURE_FILE}.",
        epilog="Exit status: 0 all went well; 2 wrong usage, or FOLDER has no trace.",
        allow_abbrev=False,
    )
    add(parser, "folder", needs=ALWAYS, type=Path, metavar="FOLDER", help="where the traces are (or one rank's file)")
    add(
        parser,
        "--out",
        needs=ALWAYS,
        type=Path,
        metavar="FOLDER",
        help="where the files go (default: beside the traces)",
    )
    add(
        parser,
        "--step",
        needs=ALWAYS,
        type=int,
        metavar="N",
        help="only this step (default: all; the picture a typical one)",
    )
    run_by(parser, _run)


def _run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    try:
        run = merge(read(arguments.folder))
    except TraceError as error:
        parser.error(str(error))
    if arguments.step is not None and arguments.step not in run.steps:
        parser.error(f"argument --step: {arguments.step} was not recorded: use one of {_spans(run.steps)}")
    out = writable(parser, arguments.out or beside(arguments.folder))
    print(f"fusedreduce trace: {_facts(run)}\n\n{table(run)}\n\n{_NOTES}\n")
    print(write(run, out, arguments.step))
    return 0


def write(run: Run, out: Path, step: int | None = None) -> str:
    """Writes timeline and picture.

    Args:
        run: all ranks.
        out: a folder.
        step: number of the step; None: all steps that fit into the timeline, and a typical one in the picture.

    Returns:
        A line for each file: its name and what it shows.
    """
    shown = typical(run) if step is None else run.steps.index(step)
    steps = [shown] if step is not None else _that_fit(run)
    replace_text(out / JSON_FILE, json.dumps(chrome_trace(run, steps)))
    picture = f"{out / PICTURE_FILE}   step {run.steps[shown]}"
    if importable("matplotlib"):
        gantt.draw(out / PICTURE_FILE, run, shown)
    else:
        picture = f"no {PICTURE_FILE}: pip install matplotlib"
    which = _spans([run.steps[index] for index in steps])
    return f"{out / JSON_FILE}  step {which}: open it in https://ui.perfetto.dev\n{picture}"


def table(run: Run) -> str:
    """The figures as text, one line per rank."""
    names = [str(trace.rank) for trace in run.traces]
    rows = [_row(name, one) for name, one in zip([*names, "all"], figures(run), strict=False)]
    if len(run.traces) == 1:
        rows = rows[:1]
    return columns(
        [("", "rank"), ("step", "ms"), ("backward", "ms"), ("exposed", "ms"), ("", "overlap"), ("stall", "ms")]
        + [("of", "backward")],
        rows,
    )


def typical(run: Run) -> int:
    """The index of the step with the median time of its last gradient, on the first rank."""
    ends = [(finish_ns(step.marks), index) for index, step in enumerate(run.traces[0].steps)]
    known = sorted((end_ns, index) for end_ns, index in ends if end_ns is not None)
    return known[len(known) // 2][1] if known else len(ends) - 1


def milliseconds(time_ns: float | None) -> str:
    """A time in ns as a cell of a table, in ms; "-" for None."""
    return "-" if time_ns is None else f"{time_ns / 1e6:.3f}"


def beside(folder: Path) -> Path:
    """The folder for files about a trace: the trace's own."""
    return folder if folder.is_dir() else folder.parent


def _row(name: str, one: Figures) -> list[str]:
    times = [milliseconds(time_ns) for time_ns in (one.step_ns, one.backward_ns, one.exposed_ns)]
    return [name, *times, _percent(one.overlap), milliseconds(one.stall_ns), _percent(one.stall_share)]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _facts(run: Run) -> str:
    first = run.traces[0]
    ranks = f"rank {first.rank} of {first.ranks}" if len(run.traces) < first.ranks else f"{first.ranks} ranks"
    plans = {first.plans[step.plan] for step in first.steps}
    buckets = "/".join(map(str, sorted({len(plan) for plan in plans})))
    clocks = ""
    if len(run.traces) > 1:
        known = run.spread_ns is not None
        clocks = f"; clocks aligned to {(run.spread_ns or 0) / 1e3:.0f} us" if known else "; wall clocks as they are"
    return f"{ranks}, {first.device}, {first.source}; step {_spans(run.steps)}, {buckets} buckets{clocks}"


def _that_fit(run: Run) -> list[int]:
    """The latest steps whose timeline stays below the size limit; at least one."""
    first = run.traces[0]
    sizes = []
    for plan in first.plans:
        names = [[first.parameters[number].name for number in numbers] for numbers in plan]
        labels = sum(len(bucket_label(index, row)) for index, row in enumerate(names))
        sizes.append(len(run.traces) * 3 * (_EVENT_BYTES * (1 + len(plan)) + 2 * labels))
    left = MOST_BYTES
    found: list[int] = []
    for index in reversed(range(len(run.steps))):
        left -= sizes[first.steps[index].plan]
        if found and left < 0:
            break
        found.append(index)
    return found[::-1]


def _spans(numbers: Sequence[int]) -> str:
    """ "3 to 9, 12": ascending numbers, in words."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], number]
        else:
            spans.append([number])
    shown = [" to ".join(map(str, span)) for span in spans[:8]]
    return ", ".join(shown) + (", ..." if len(spans) > len(shown) else "")
