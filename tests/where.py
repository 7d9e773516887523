"""Where is the test of this line? By module the tests that execute its functions, quick ones first.

    python tests/where.py --run [FILES]                        # runs the tests, by default all, and writes where.md
    python tests/where.py fusedreduce/reducer/scheduler.py:120 # of that run: tests of the function of this line

A run takes twice as long as the tests alone. Tests of a GPU count where there is one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType
from typing import Any

from support.executed import FOLDER, ROOT

PAGE = Path(__file__).with_name("where.md")
FOUND = ROOT / "out" / "executed"
MOST_FILES = 4
HEAD = """# Which tests execute what

Written by `python tests/where.py --run`. By module how many functions it has; of the tests that `make quick` runs, and
then of all, the files that execute most of these, each with how many no earlier one does; and what no test executes. Of
a line: `python tests/where.py FILE:LINE`. What is executed by an import, in a program of its own, or as a kernel, is
not seen.

| module | functions | quick tests | and all tests | executed by none |
| --- | ---: | --- | --- | --- |
"""
Functions = Mapping[int, str]  # by first line


def functions_of(file: str) -> Functions:
    """The functions of a module by the line where they begin, a decorator's too."""
    found: dict[int, str] = {}

    def walk(code: CodeType) -> None:
        for one in code.co_consts:
            if isinstance(one, CodeType):
                if one.co_flags & CO_OPTIMIZED and not one.co_name.startswith("<"):
                    found[one.co_firstlineno] = one.co_qualname.replace(".<locals>", "")
                walk(one)

    walk(compile((ROOT / file).read_text(), file, "exec"))
    return found


def record() -> dict[str, dict[str, Any]]:
    """Of the latest run by test: whether it is quick, and its calls, as files and first lines of functions."""
    return {test: of for path in FOUND.glob("*.json") for test, of in json.loads(path.read_text()).items()}


def executed() -> tuple[dict[str, dict[str, set[int]]], set[str]]:
    """Of the latest run by module and test the first lines of the functions that it has executed; and quick tests."""
    found: defaultdict[str, defaultdict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    quick = set()
    for test, of in record().items():
        if of["quick"]:
            quick.add(test)
        for file, line in of["calls"]:
            found[file][test].add(line)
    return {file: dict(tests) for file, tests in found.items()}, quick


def row(file: str, tests: Mapping[str, set[int]], quick: Set[str]) -> str:
    """A module's line of the page."""
    functions = functions_of(file)
    left = set(functions)
    cells = []
    for which in ([test for test in tests if test in quick], list(tests)):
        by_file: defaultdict[str, set[int]] = defaultdict(set)
        for test in which:
            by_file[test.partition("::")[0]] |= tests[test]
        named = []
        while by_file:
            best = max(sorted(by_file), key=lambda one: len(by_file[one] & left))
            new = by_file.pop(best) & left
            if not new:
                break
            left -= new
            named.append(f"{best} {len(new)}")
        more = f", {len(named) - MOST_FILES} more" if len(named) > MOST_FILES else ""
        cells.append(", ".join(named[:MOST_FILES]) + more)
    none = [f"`{functions[line]}`" for line in sorted(left)]
    return f"| {file} | {len(functions)} | {' | '.join(cells)} | {', '.join(none)} |\n"


def modules() -> Iterator[str]:
    """Those of the product that have functions."""
    for folder in ("fusedreduce", "kernels"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            file = str(path.relative_to(ROOT))
            if not file.startswith("fusedreduce/kernels") and functions_of(file):
                yield file


def tests_of(file: str, line: int) -> list[str]:
    """Tests that execute the function around a line, quick ones first."""
    functions, (by_module, quick) = functions_of(file), executed()
    begin = max((first for first in functions if first <= line), default=None)
    if begin is None:
        return []
    found = sorted(test for test, lines in by_module.get(file, {}).items() if begin in lines)
    print(f"{file}:{begin} {functions[begin]}: {len(found)} tests, {len(quick & {*found})} of them quick")
    return sorted(found, key=lambda test: test not in quick)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help="run the tests, and write where.md")
    parser.add_argument("what", nargs="*", metavar="FILE", help="with --run tests; else FILE:LINE of the product")
    asked = parser.parse_args(arguments)
    if not asked.run:
        if not any(FOUND.glob("*.json")):
            parser.error("no run is there: python tests/where.py --run")
        for place in asked.what:
            file, _, line = place.partition(":")
            print(*tests_of(file, int(line)), sep="\n")
        return 0
    FOUND.mkdir(parents=True, exist_ok=True)
    for old in FOUND.glob("*.json"):
        old.unlink()
    environment = {**os.environ, FOLDER: str(FOUND), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = (sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "-p", "support.executed")
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests"), environment.get("PYTHONPATH", "")])
    status = subprocess.run([*command, *(asked.what or ["tests"])], cwd=ROOT, env=environment, check=False).returncode
    by_module, quick = executed()
    PAGE.write_text(HEAD + "".join(row(file, by_module.get(file, {}), quick) for file in modules()))
    return status


if __name__ == "__main__":
    sys.exit(main())
