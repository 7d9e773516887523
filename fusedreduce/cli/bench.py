"""`fusedreduce bench`: runs a benchmark of the source checkout; an installed package has none."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import fusedreduce

from .arguments import ALWAYS, add, run_by

# Names of files other than perf/bench_NAME.py.
_OTHERS = {"report": "report.py", "gpu-check": "gpu_check.py"}
CHECKOUT = Path(fusedreduce.__file__).resolve().parent.parent


def add_parser(subparsers: Any) -> None:
    """Adds `bench` to the command line."""
    found = scripts(CHECKOUT)
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "bench",
        help="run a benchmark of the checkout",
        description="Runs perf/bench_NAME.py of the checkout with this interpreter. "
        + (f"NAME is one of: {', '.join(found)}." if found else _absent(CHECKOUT).capitalize() + "."),
        epilog="Exit status: the benchmark's own; 1 if there is no benchmark of that name.",
        allow_abbrev=False,
    )
    add(parser, "name", needs=ALWAYS, nargs="?", metavar="NAME", help="which benchmark")
    add(
        parser,
        "arguments",
        needs=ALWAYS,
        nargs=argparse.REMAINDER,
        metavar="...",
        help="its arguments; --help lists them",
    )
    run_by(parser, _run)


def scripts(checkout: Path) -> Mapping[str, Path]:
    """The benchmarks of a checkout by name; empty if `checkout` is none."""
    folder = checkout / "perf"
    if not (folder / "records.py").is_file():
        return {}
    found = {path.stem.removeprefix("bench_").replace("_", "-"): path for path in sorted(folder.glob("bench_*.py"))}
    return found | {name: folder / file for name, file in _OTHERS.items() if (folder / file).is_file()}


def _run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> NoReturn:
    """Replaces this process by the benchmark, which then has its own exit status and signals."""
    found = scripts(CHECKOUT)
    if not found:
        parser.exit(1, f"error: {_absent(CHECKOUT)}\n")
    script = found.get((arguments.name or "").replace("_", "-"))
    if script is None:
        asked = f"no benchmark is named {arguments.name!r}" if arguments.name else "no benchmark was named"
        parser.exit(1, f"error: {asked}: use one of {', '.join(found)}\n")
    sys.stdout.flush()
    sys.stderr.flush()
    # Python puts the script's folder on its path, but not the checkout.
    path = os.pathsep.join([str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, str(script), *arguments.arguments]
    os.execve(sys.executable, command, {**os.environ, "PYTHONPATH": path})


def _absent(checkout: Path) -> str:
    return f"the benchmarks are in perf/ of the source checkout, and {checkout} is not one: run this from a clone"
