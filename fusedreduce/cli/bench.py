"""`fusedreduce bench`: runs a benchmark of the checkout, which is no part of an installed package."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import fusedreduce

# Beside perf/bench_*.py, which name themselves.
_OTHERS = {"report": "report.py", "gpu-check": "gpu_check.py"}
_CHECKOUT = Path(fusedreduce.__file__).resolve().parent.parent


def add_parser(subparsers: Any) -> None:
    """Adds `bench` to the command line."""
    found = scripts(_CHECKOUT)
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "bench",
        help="run a benchmark of the checkout",
        description="Runs perf/bench_NAME.py of the checkout with this interpreter. "
        + (f"NAME is one of: {', '.join(found)}." if found else _absent(_CHECKOUT).capitalize() + "."),
        epilog="Exit status: the benchmark's own; 1 if there is none of that name.",
        allow_abbrev=False,
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="which benchmark")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments; --help lists them")
    parser.set_defaults(run=lambda arguments: _run(parser, arguments))


def scripts(checkout: Path) -> Mapping[str, Path]:
    """The benchmarks that there are, by name; none outside a checkout."""
    folder = checkout / "perf"
    if not (folder / "records.py").is_file():
        return {}
    found = {path.stem.removeprefix("bench_").replace("_", "-"): path for path in sorted(folder.glob("bench_*.py"))}
    return found | {name: folder / file for name, file in _OTHERS.items() if (folder / file).is_file()}


def _run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> NoReturn:
    """Becomes the benchmark, so that its exit status and every signal are its own."""
    found = scripts(_CHECKOUT)
    if not found:
        parser.exit(1, f"error: {_absent(_CHECKOUT)}\n")
    script = found.get((arguments.name or "").replace("_", "-"))
    if script is None:
        asked = f"no benchmark {arguments.name!r}" if arguments.name else "which benchmark"
        parser.exit(1, f"error: {asked}; there are: {', '.join(found)}\n")
    sys.stdout.flush()
    sys.stderr.flush()
    # A script's own folder is the first on its path; that of this package need not be on it at all.
    path = os.pathsep.join([str(_CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, str(script), *arguments.arguments]
    os.execve(sys.executable, command, {**os.environ, "PYTHONPATH": path})


def _absent(checkout: Path) -> str:
    return f"the benchmarks are in perf/ of the source checkout, and {checkout} is none; run this from a clone"
