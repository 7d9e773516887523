"""Writes tests/slow.txt from the JUnit files of a run: the tests that `make quick` leaves out.

    make test && python tests/slow.py out/test/*.xml

A test function is slow if one run of it, its fixtures too, takes more than 0.12 s on average over its parameters.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as tree
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

LIST = Path(__file__).with_name("slow.txt")
LIMIT_S = 0.12


def slow_functions(paths: Sequence[str]) -> list[str]:
    """`folder/file.py::function` of those above the limit, sorted."""
    times_s: defaultdict[str, list[float]] = defaultdict(list)
    for path in paths:
        for case in tree.parse(path).iter("testcase"):
            if case.find("skipped") is None:
                _, *folders, function = f"{case.get('classname')}.{case.get('name', '').partition('[')[0]}".split(".")
                end = next(index for index, name in enumerate(folders) if name.startswith("test_"))
                path = "/".join(folders[: end + 1])
                name = "::".join([f"{path}.py", *folders[end + 1 :], function])
                times_s[name].append(float(case.get("time", 0)))
    return sorted(name for name, times in times_s.items() if sum(times) / len(times) > LIMIT_S)


if __name__ == "__main__":
    LIST.write_text("".join(f"{name}\n" for name in slow_functions(sys.argv[1:])))
