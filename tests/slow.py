"""Writes tests/slow.txt and tests/longest.txt from the JUnit file of a run.

    make test && python tests/slow.py out/test/cpu.xml

slow.txt has what `make quick` leaves out beside tests that are marked `ranks` or `slow` without it. In each file the
test functions that take least stay, with all their parameters and fixtures, together at most 1.2 s; the others are
listed. A limit for each test would leave more of the product out. What was skipped is not listed. longest.txt has the
files of more than 10 s, in the order in which they begin: whoever has the last one keeps the others waiting no longer
than the shortest takes.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as tree
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

LIST = Path(__file__).with_name("slow.txt")
LONGEST = LIST.with_name("longest.txt")
QUICK_S = 1.2  # in a file
LONG_S = 10.0


class Case(NamedTuple):
    """A test that ran: its file, `folder/file.py`, its function, how long it took, and whether its file marks it."""

    file: str
    function: str
    time_s: float
    marked: bool


def _cases(paths: Sequence[str]) -> Iterator[Case]:
    for path in paths:
        for case in tree.parse(path).iter("testcase"):
            if case.find("skipped") is None:
                _, *folders, function = f"{case.get('classname')}.{case.get('name', '').partition('[')[0]}".split(".")
                end = next(index for index, name in enumerate(folders) if name.startswith("test_"))
                file, name = "/".join(folders[: end + 1]), "::".join([*folders[end + 1 :], function])
                marked = case.find("properties/property[@name='never quick']") is not None
                yield Case(f"{file}.py", name, float(case.get("time", 0)), marked)


def slow_functions(paths: Sequence[str]) -> list[str]:
    """`folder/file.py::function` of those that `make quick` leaves out, sorted."""
    times_s: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for case in _cases(paths):
        if not case.marked:
            times_s[case.file][f"{case.file}::{case.function}"] += case.time_s
    slow = []
    for of_file in times_s.values():
        cheapest = sorted(of_file, key=of_file.__getitem__)
        together_s = accumulate(of_file[name] for name in cheapest)
        slow += [name for name, until_s in zip(cheapest, together_s, strict=True) if until_s > QUICK_S]
    return sorted(slow)


def longest_files(paths: Sequence[str]) -> list[str]:
    """`folder/file.py` of those above the limit, the longest first."""
    times_s: defaultdict[str, float] = defaultdict(float)
    for case in _cases(paths):
        times_s[case.file] += case.time_s
    return sorted((file for file, time_s in times_s.items() if time_s > LONG_S), key=lambda file: -times_s[file])


if __name__ == "__main__":
    LONGEST.write_text("".join(f"{file}\n" for file in longest_files(sys.argv[1:])))
    LIST.write_text("".join(f"{name}\n" for name in slow_functions(sys.argv[1:])))
