"""The second pytest process of `--beside`: what it finds is what the first one says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
FIRST = """
def test_here():
    pass
"""
# Of a name in beside.BESIDE.
SECOND = """
import os, pytest

def test_passes():
    print("pid", os.getpid())

@pytest.mark.parametrize("text", ["a b", "[1]"])
def test_fails(text):
    assert text == "no such text"

@pytest.mark.skip(reason="of no use")
def test_skipped():
    pass

@pytest.fixture
def broken():
    raise ValueError("no fixture")

def test_error(broken):
    pass
"""


def _pytest(folder: Path, *options: str, **files: str) -> str:
    """Standard output of a run on these files."""
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "conftest.py").write_text('pytest_plugins = ["beside"]\n')
    (folder / "pytest.ini").write_text("[pytest]\n")
    done = _run(folder, *options)
    return done.stdout + done.stderr


def _run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    # Where CI is set, pytest's summary repeats whole messages.
    environment = {key: value for key, value in os.environ.items() if key not in ("CI", "BUILD_NUMBER")}
    environment["PYTHONPATH"] = str(HERE)
    command = [sys.executable, "-m", "pytest", *options]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)


def test_reports_of_the_second_process_are_the_firsts(tmp_path: Path) -> None:
    alone = _pytest(tmp_path, "-rA", test_other=FIRST, test_costs=SECOND)
    both = _pytest(tmp_path, "-rA", "--beside")
    assert re.search(r"2 failed, 2 passed, 1 skipped, 1 error in", both), both
    summary = [line for line in both.splitlines() if line.startswith(("PASSED", "FAILED", "SKIPPED", "ERROR"))]
    assert sorted(summary) == sorted(
        line for line in alone.splitlines() if line.startswith(("PASSED", "FAILED", "SKIPPED", "ERROR"))
    )
    assert re.search(r"test_other.py \.\s.*\n.*test_costs.py \.FFsE", both), both


def test_a_second_process_that_ends_early_fails_what_it_has_not_reported(tmp_path: Path) -> None:
    dies = (
        "import os\n\ndef test_first():\n    pass\n\ndef test_dies():\n    os._exit(7)\n\ndef test_never():\n    pass\n"
    )
    out = _pytest(tmp_path, "--beside", test_other=FIRST, test_costs=dies)
    assert out.count("the process beside this one ended without a report") == 2
    assert "2 failed, 2 passed in" in out, out


def test_a_second_process_that_dies_after_its_last_report_fails_the_first(tmp_path: Path) -> None:
    dies = "import atexit, os\n\ndef test_first():\n    atexit.register(os._exit, 7)\n"
    out = _pytest(tmp_path, "--beside", test_other=FIRST, test_costs=dies)
    assert "2 passed in" in out and "the process beside this one ended with status 7" in out, out
    for body, status in [("atexit.register(os._exit, 0)", 0), ("assert False", 1), ("atexit.register(os._exit, 7)", 3)]:
        (tmp_path / "test_costs.py").write_text(f"import atexit, os\n\ndef test_first():\n    {body}\n")
        assert _run(tmp_path, "--beside").returncode == status
