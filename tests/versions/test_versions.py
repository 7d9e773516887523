"""Versions beyond those that were tried are named once, and rows of docs/versions.md are replaced one by one."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SPEC = importlib.util.spec_from_file_location("versions_run", Path(__file__).with_name("run.py"))
assert SPEC is not None and SPEC.loader is not None
versions = sys.modules["versions_run"] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(versions)


@pytest.mark.parametrize(
    ("package", "use"),
    [
        ("torch", "import fusedreduce; fusedreduce.Reducer; fusedreduce.DataParallel"),
        ("triton", "import fusedreduce.kernels.triton_versions"),
    ],
)
@pytest.mark.parametrize("newer", [False, True])
def test_a_newer_version_is_warned_of_once(package: str, use: str, newer: bool) -> None:
    fake = f"import {package}; {package}.__version__ = '99.1.0+x'; " if newer else ""
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", fake + use], text=True, capture_output=True, check=True
    )
    assert done.stderr.count(f"fusedreduce has been tested with {package} up to ") == newer
    assert done.stderr.count("this is 99.1.0") == newer


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
