"""Plants one fault at a time in a copy of the package, and runs the tests that must find it.

    python tests/faults/plant.py                       # all
    python tests/faults/plant.py core hook-divides-twice    # a file's, or single ones
    python tests/faults/plant.py --list

Each fault in `*.toml` is a small wrong change: what it would do to a training run, the text that it replaces, and the
tests of which every one must fail. A change of the product that loses a property shows as a failed test; one that loses
a test shows here. A text that no longer occurs exactly once is an error: the fault is then written anew, for the new
code.

Exit status 1: a fault was not found, or could not be planted; 2: wrong usage.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
COPIED = ("fusedreduce", "kernels", "tests", "perf", "docs", "pyproject.toml", "README.md")
TEST_TIMEOUT_S = 900.0  # as long as the slowest net of the tests, and what they do beside waiting


@dataclass(frozen=True)
class Edit:
    """One replacement.

    Args:
        file: relative to the checkout.
        before: text that occurs there exactly once.
        after: what stands there instead.
    """

    file: str
    before: str
    after: str


@dataclass(frozen=True)
class Fault:
    """A planted fault.

    Args:
        id: unique.
        says: what it would do to a training run.
        edits: that plant it.
        tests: pytest node ids; each must fail.
    """

    id: str
    says: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]


class FaultError(Exception):
    """A fault that cannot be planted, or whose entry is wrong."""


def faults(folder: Path = HERE) -> dict[str, list[Fault]]:
    """Those of every file in `folder`, by the file's stem.

    Raises:
        FaultError: an entry is incomplete, or two have one id.
    """
    found = {path.stem: [_fault(path, entry) for entry in _entries(path)] for path in sorted(folder.glob("*.toml"))}
    ids = [fault.id for some in found.values() for fault in some]
    if twice := sorted({name for name in ids if ids.count(name) > 1}):
        raise FaultError(f"ids that stand twice: {', '.join(twice)}")
    return found


def _entries(path: Path) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = tomllib.loads(path.read_text()).get("fault", [])
    return entries


def _fault(path: Path, entry: dict[str, Any]) -> Fault:
    keys = {"id", "says", "tests", *(("edit",) if "edit" in entry else ("file", "before", "after"))}
    if set(entry) != keys:
        name = entry.get("id", entry)
        raise FaultError(f"{path.name}, {name!r}: it must have {sorted(keys)}, and has {sorted(entry)}")
    edits = tuple(Edit(one["file"], one["before"], one["after"]) for one in entry.get("edit", [entry]))
    if not entry["tests"] or not entry["says"]:
        raise FaultError(f"{path.name}, {entry['id']!r}: it names no test, or does not say what it does")
    return Fault(entry["id"], entry["says"], edits, tuple(entry["tests"]))


@contextlib.contextmanager
def planted(fault: Fault, root: Path) -> Iterator[None]:
    """Within it the checkout at `root` has the fault.

    Raises:
        FaultError: a text does not occur exactly once.
    """
    held: dict[Path, str] = {}
    try:
        for edit in fault.edits:
            path = root / edit.file
            text = path.read_text() if path.is_file() else ""
            if text.count(edit.before) != 1:
                raise FaultError(f"{edit.file} has the text {text.count(edit.before)} times, not once:\n{edit.before}")
            held.setdefault(path, text)
            path.write_text(text.replace(edit.before, edit.after))
        yield
    finally:
        for path, text in held.items():
            path.write_text(text)


def not_found_by(fault: Fault, root: Path) -> list[str]:
    """The tests that pass with the fault, or do not run, each with pytest's last line.

    Args:
        fault: planted by this.
        root: a checkout that nobody else uses.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": str(root),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "TRITON_INTERPRET": "1",
    }
    missed = []
    with planted(fault, root):
        for test in fault.tests:
            command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider"]
            command += ["--hypothesis-profile=planted", test]
            try:
                ended = subprocess.run(
                    command, cwd=root, env=environment, capture_output=True, text=True, timeout=TEST_TIMEOUT_S
                )
            except subprocess.TimeoutExpired:
                missed.append(f"{test}: no end within {TEST_TIMEOUT_S:g} s")
                continue
            if ended.returncode != 1:  # 1: tests have failed; not "none was found", nor "interrupted"
                missed.append(f"{test}: {(ended.stdout.strip() or ended.stderr.strip()).splitlines()[-1]}")
    return missed


def _copy(into: Path) -> Path:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "results")
            shutil.copytree(source, into / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy2(source, into / name)
    return into


def _picked(found: dict[str, list[Fault]], names: Sequence[str]) -> list[Fault]:
    every = [fault for some in found.values() for fault in some]
    known = {*found, *(fault.id for fault in every)}
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"error: no fault, and no file of faults, is called {', '.join(unknown)}")
    return [fault for stem, some in found.items() for fault in some if not names or {stem, fault.id} & set(names)]


def main() -> int:
    """Plants what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a fault's id, or a file's name without .toml")
    parser.add_argument("--list", action="store_true", help="print them, and plant none")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="at once; default: one a core")
    asked = parser.parse_args()
    picked = _picked(faults(), asked.names)
    if asked.list:
        for fault in picked:
            print(f"{fault.id:44} {fault.says}")
        return 0
    began_s, missed = time.monotonic(), 0
    with (
        tempfile.TemporaryDirectory(prefix="fusedreduce-faults-") as folder,
        concurrent.futures.ThreadPoolExecutor(max_workers=asked.jobs) as workers,
    ):
        free: queue.Queue[Path] = queue.Queue()
        for number in range(asked.jobs):
            free.put(_copy(Path(folder) / str(number)))

        def run(fault: Fault) -> tuple[Fault, list[str], float]:
            root = free.get()
            start_s = time.monotonic()
            try:
                return fault, not_found_by(fault, root), time.monotonic() - start_s
            except FaultError as error:
                return fault, [str(error)], time.monotonic() - start_s
            finally:
                free.put(root)

        for fault, why, took_s in workers.map(run, picked):
            print(f"{'MISSED' if why else 'found ':6} {took_s:6.1f} s  {fault.id:44} {fault.says}", flush=True)
            for line in why:
                print(f"       {line}", flush=True)
            missed += bool(why)
    print(f"{len(picked) - missed} of {len(picked)} planted faults found in {time.monotonic() - began_s:.0f} s")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
