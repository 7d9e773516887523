"""Whether this checkout is slower than another revision of itself: whole process starts, interleaved.

    python perf/against.py origin/main                     # all cases, 7 starts a side: about seven minutes
    python perf/against.py HEAD~3 --cases "2000x8 bf16" --starts 11 --bound 1.03

Each start is a pair of ranks that runs all cases (against_case.py). Three sides take turns: the other revision, this
checkout, and the other revision once more, whose ratio to itself is the noise. A case's ratio is the geometric mean
over the starts, with its 95 % interval (Student's t, of logarithms).

Exit status 1: for some case the lower end of that interval is above the bound, so it is slower beyond doubt.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

from records import LEAST_RATIOS, BenchError, entry, interval

ROOT = Path(__file__).resolve().parents[1]
CASE = Path(__file__).with_name("against_case.py")
START_TIMEOUT_S = 300.0
OLD, NEW, AGAIN = "old", "new", "old, again"


def start(checkout: Path, cases: Sequence[str]) -> dict[str, float]:
    """Median milliseconds by case of one process start.

    Raises:
        BenchError: it failed, or did not end in time.
    """
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(CASE), *cases]
    try:
        ended = subprocess.run(
            command, env=environment, cwd=checkout, capture_output=True, text=True, timeout=START_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise BenchError(f"a start did not end within {START_TIMEOUT_S:g} s") from None
    if ended.returncode != 0:
        raise BenchError(f"a start in {checkout} failed:\n{ended.stderr[-2000:]}")
    medians: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return medians


def checked_out(revision: str, into: Path) -> Path:
    """The files of a revision.

    Raises:
        BenchError: there is no such revision.
    """
    made = subprocess.run(["git", "archive", "--format=tar", revision], cwd=ROOT, capture_output=True)
    if made.returncode != 0:
        raise BenchError(made.stderr.decode().strip())
    with tarfile.open(fileobj=BytesIO(made.stdout)) as archive:
        archive.extractall(into, filter="data")
    return into


def main() -> int:
    """Measures, and prints a line per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", help="the other one, as git knows it")
    parser.add_argument("--cases", nargs="+", default=[], metavar="CASE", help="of against_case.py; default: all")
    parser.add_argument("--starts", type=int, default=7, help="of each side (default: 7, at least 5)")
    parser.add_argument("--bound", type=float, default=1.03, help="that a ratio must not exceed (default: 1.03)")
    asked = parser.parse_args()
    if asked.starts < LEAST_RATIOS:
        parser.error(f"at least {LEAST_RATIOS} starts")
    seen: dict[str, list[dict[str, float]]] = {OLD: [], NEW: [], AGAIN: []}
    with tempfile.TemporaryDirectory(prefix="fusedreduce-against-") as folder:
        old = checked_out(asked.revision, Path(folder))
        sides = [(OLD, old), (NEW, ROOT), (AGAIN, old)]
        for number in range(asked.starts):
            for side, checkout in sides[number % 3 :] + sides[: number % 3]:
                seen[side].append(start(checkout, asked.cases))
            print(f"start {number + 1} of {asked.starts}", file=sys.stderr, flush=True)
    slower = []
    print(f"{'case':30} {'old ms':>9} {'new ms':>9}  new / old   95 % interval     old / old")
    for case in seen[OLD][0]:
        ratio, low, high = interval([new[case] / old[case] for new, old in zip(seen[NEW], seen[OLD], strict=True)])
        noise, _, _ = interval([again[case] / old[case] for again, old in zip(seen[AGAIN], seen[OLD], strict=True)])
        old_ms, new_ms = (statistics.median(one[case] for one in seen[side]) for side in (OLD, NEW))
        slower += [case] if low > asked.bound else []
        figures = f"{old_ms:9.3f} {new_ms:9.3f} {ratio:10.3f}   {low:.3f} to {high:.3f}  {noise:10.3f}"
        print(f"{case:30} {figures}  {'SLOWER' if low > asked.bound else ''}")
    return 1 if slower else 0


if __name__ == "__main__":
    entry(main)
