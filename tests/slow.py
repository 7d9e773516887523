"""Writes tests/slow.txt and tests/longest.txt from the JUnit file of a run.

    make test && python tests/where.py --run && python tests/slow.py out/test/cpu.xml

slow.txt has what `make quick` leaves out beside tests that are marked `ranks` or `slow` without it. In each file the
test functions that take least stay, with all their parameters and fixtures, together at most 0.75 s; the others are
listed. A limit for each test would leave more of the product out. Of the others, those of at most 1.5 s stay that
execute functions of the product which no test that stays does, by where.py's record: most functions per second first.
(What is executed once in a process counts for whoever comes first, so lists of two runs may differ. where.md says what
`make quick` executes by the list that was there when its tests ran.) What was skipped is not listed. longest.txt has
the files of more than 10 s, in the order in which they begin: whoever has the last one keeps the others waiting no
longer than the shortest takes.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as tree
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import where

LIST = Path(__file__).with_name("slow.txt")
LONGEST = LIST.with_name("longest.txt")
QUICK_S = 0.75  # in a file
SOLE_S = 1.5  # of a test function that executes what none that stays does
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


def slow_functions(cases: Sequence[Case], executes: Mapping[str, Set[object]]) -> list[str]:
    """`folder/file.py::function` of those that `make quick` leaves out, sorted; `executes`: by name what each does."""
    times_s: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for case in cases:
        if not case.marked:
            times_s[case.file][f"{case.file}::{case.function}"] += case.time_s
    slow: dict[str, float] = {}
    for of_file in times_s.values():
        cheapest = sorted(of_file, key=of_file.__getitem__)
        together_s = accumulate(of_file[name] for name in cheapest)
        slow |= {name: of_file[name] for name, until_s in zip(cheapest, together_s, strict=True) if until_s > QUICK_S}
    names = {name for of_file in times_s.values() for name in of_file}
    executed = set[object]().union(*(executes[name] for name in names - set(slow)))
    short = sorted(name for name, time_s in slow.items() if time_s <= SOLE_S)
    while short:
        best = max(short, key=lambda name: len(executes[name] - executed) / (slow[name] + 0.01))
        if executes[best] <= executed:
            break
        executed |= executes[best]
        short.remove(best)
        del slow[best]
    return sorted(slow)


def recorded(cases: Sequence[Case]) -> dict[str, set[object]]:
    """By `folder/file.py::function` the functions of the product that it executes; ends where one was not recorded."""
    found: dict[str, set[object]] = {test: set(map(tuple, of["calls"])) for test, of in where.record().items()}
    if lacking := {f"{case.file}::{case.function}" for case in cases if not case.marked} - set(found):
        sys.exit(f"run python tests/where.py --run: it has not recorded {', '.join(sorted(lacking)[:5])}")
    return found


def longest_files(cases: Sequence[Case]) -> list[str]:
    """`folder/file.py` of those above the limit, the longest first."""
    times_s: defaultdict[str, float] = defaultdict(float)
    for case in cases:
        times_s[case.file] += case.time_s
    return sorted((file for file, time_s in times_s.items() if time_s > LONG_S), key=lambda file: -times_s[file])


if __name__ == "__main__":
    cases = list(_cases(sys.argv[1:]))
    functions = recorded(cases)
    LONGEST.write_text("".join(f"{file}\n" for file in longest_files(cases)))
    LIST.write_text("".join(f"{name}\n" for name in slow_functions(cases, functions)))
