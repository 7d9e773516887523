"""Versions beyond those that were tried are named once, and rows of docs/versions.md are replaced one by one."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from triton import JITFunction

from fusedreduce import _public
from fusedreduce.kernels import triton_versions

SPEC = importlib.util.spec_from_file_location("versions_run", Path(__file__).with_name("run.py"))
assert SPEC is not None and SPEC.loader is not None
versions = sys.modules["versions_run"] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(versions)


USES = {
    "torch": "import fusedreduce; fusedreduce.Reducer; fusedreduce.DataParallel",
    "triton": "import fusedreduce.kernels.triton_versions",
}


def _even(number: int) -> bool:
    return number == 0 or _odd(number - 1)


def _odd(number: int) -> bool:
    return number != 0 and _even(number - 1)


def test_functions_that_name_each_other_have_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [JITFunction(one) for one in (_even, _odd)]
    for name, function in zip(("_even", "_odd"), both, strict=True):
        monkeypatch.setitem(globals(), name, function)
    triton_versions.settle_key(both[0])
    assert all(one.hash for one in both)


def _said(program: str) -> str:
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], text=True, capture_output=True, check=True)
    return done.stderr


def test_a_newer_version_is_warned_of_once() -> None:
    newer = [f"import {package}; {package}.__version__ = '99.1.0+x'" for package in USES]
    said = _said("; ".join([*newer, *USES.values()]))
    for package in USES:
        assert said.count(f"fusedreduce has been tested with {package} up to ") == 1
    assert said.count("this is 99.1.0") == 2


def test_those_that_were_tried_are_not() -> None:
    assert "fusedreduce has been tested" not in _said("; ".join(USES.values()))


def test_rows_are_replaced_and_kept_in_order() -> None:
    first = versions.Row("2.13.0", "3.9.0", versions.KERNELS, 10, 1, ("test_a::b",))
    older = versions.Row("2.13.0", "3.6.0", versions.KERNELS, 9, 0, ())
    page = "# Title\n\n" + versions._line(versions.HEAD) + versions._line(["---"] * 7) + "\nWords.\n"
    page = versions.written(page, [first])
    page = versions.written(page, [older, versions.Row("2.13.0", "3.9.0", versions.KERNELS, 11, 0, ())])
    rows = [line for line in page.splitlines() if line.startswith("| 2.13.0")]
    assert [row.split(" | ")[1:6] for row in rows] == [
        ["3.6.0", versions.KERNELS, "9", "0", "none"],
        ["3.9.0", versions.KERNELS, "11", "0", "none"],
    ]
    assert page.startswith("# Title\n") and page.endswith("\nWords.\n")


def test_what_ci_compiles_and_what_it_does_not_are_compiled_with_the_pinned_triton(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commands: list[tuple[str, ...]] = []

    def run(*command: str, **_: object) -> str:
        commands.append(tuple(command[3:]))
        return "FAILED x[y] on sm_120: stack: 8\n400 kernels compiled, 0 unsupported, 1 rules broken"

    monkeypatch.setattr(versions, "_run", run)
    monkeypatch.setattr(versions, "pytest_row", lambda *_: versions.Row("", "", versions.KERNELS, 1, 0, ()))
    _, of_ci, of_others = versions.over_this_torch(versions.version("triton"))
    assert commands == [(), ("--arch=others",)]
    assert (of_ci.what, of_others.what) == (versions.MACHINE_CODE, versions.OTHERS)
    assert of_others.exceptions == ("x[y] on sm_120",) and of_others.unknown


def test_what_counts_as_tested_is_on_the_page() -> None:
    rows = [[cell.strip() for cell in line.split("|")[1:5]] for line in versions.PAGE.read_text().splitlines()]
    tried = {(torch[:4], triton[:3], what) for torch, triton, what, _ in (row for row in rows if len(row) == 4)}
    for triton in triton_versions.TESTED:
        name = ".".join(map(str, triton))
        assert {("2.13", name, versions.KERNELS), ("2.13", name, versions.MACHINE_CODE)} <= tried
    assert _public.NEWEST_TORCH in {torch for torch, _, _ in tried}
