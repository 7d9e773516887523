"""Writes tests/slow.txt and tests/longest.txt from the JUnit files of a run.

    make test && python tests/slow.py out/test/*.xml

slow.txt has the tests that `make quick` leaves out: of each file those test functions stay that take least, with all
their parameters and fixtures, as long as they take 1.5 s together. So every part of the product has some: a limit for
each test would leave whole modules out. longest.txt has the files of more than 10 s, in the order in which they begin:
whoever has the last one keeps the others waiting no longer than the shortest takes.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as tree
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

LIST = Path(__file__).with_name("slow.txt")
LONGEST = LIST.with_name("longest.txt")
QUICK_S = 1.5  # of a file
LONG_S = 10.0


def _cases(paths: Sequence[str]) -> Iterator[tuple[str, str, float]]:
    """Of each test that ran its file, `folder/file.py`, its function, and how long it took, s."""
    for path in paths:
        for case in tree.parse(path).iter("testcase"):
            if case.find("skipped") is None:
                _, *folders, function = f"{case.get('classname')}.{case.get('name', '').partition('[')[0]}".split(".")
                end = next(index for index, name in enumerate(folders) if name.startswith("test_"))
                file = "/".join(folders[: end + 1])
                yield f"{file}.py", "::".join([*folders[end + 1 :], function]), float(case.get("time", 0))


def slow_functions(paths: Sequence[str]) -> list[str]:
    """`folder/file.py::function` of those that `make quick` leaves out, sorted."""
    times_s: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for file, function, time_s in _cases(paths):
        times_s[file][f"{file}::{function}"] += time_s
    slow = []
    for of_file in times_s.values():
        cheapest = sorted(of_file, key=of_file.__getitem__)
        together_s = accumulate(of_file[name] for name in cheapest)
        slow += [name for name, until_s in zip(cheapest, together_s, strict=True) if until_s > QUICK_S]
    return sorted(slow)


def longest_files(paths: Sequence[str]) -> list[str]:
    """`folder/file.py` of those above the limit, the longest first."""
    times_s: defaultdict[str, float] = defaultdict(float)
    for file, _, time_s in _cases(paths):
        times_s[file] += time_s
    return sorted((file for file, time_s in times_s.items() if time_s > LONG_S), key=lambda file: -times_s[file])


if __name__ == "__main__":
    LONGEST.write_text("".join(f"{file}\n" for file in longest_files(sys.argv[1:])))
    LIST.write_text("".join(f"{name}\n" for name in slow_functions(sys.argv[1:])))
