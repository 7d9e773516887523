"""`fusedreduce bench`: which benchmarks there are, and that a benchmark's end is the command's own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from fusedreduce.cli import bench, main

ROOT = Path(__file__).resolve().parents[2]

# Ends with 40 plus its number of arguments when it is told to; says so once it can be told.
SCRIPT = """
import signal, sys, fusedreduce
signal.signal(signal.SIGTERM, lambda *_: sys.exit(40 + len(sys.argv[1:])))
print("ready", fusedreduce.__file__, flush=True)
signal.pause()
"""
COMMAND = """
import sys
from pathlib import Path
from fusedreduce.cli import bench, main
bench.CHECKOUT = Path(sys.argv[1])
sys.exit(main(["bench", "waits-long", "--what", "-x", "3"]))
"""


class Became(Exception):
    """The process would have become another program."""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One with a benchmark, and a package that can be told from the true one."""
    for name, text in {"perf/records.py": "", "perf/bench_waits_long.py": SCRIPT, "fusedreduce.py": ""}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(bench, "CHECKOUT", tmp_path)
    return tmp_path


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that refuses."""
    with pytest.raises(SystemExit) as ended:
        main(["bench", *arguments])
    shown = capsys.readouterr()
    assert ended.value.code == 1
    assert shown.out == ""
    [line] = shown.err.splitlines()
    assert line.startswith("error: ")
    return line


def test_every_benchmark_of_the_checkout_is_known() -> None:
    found = bench.scripts(ROOT)
    files = {path.stem.removeprefix("bench_").replace("_", "-") for path in (ROOT / "perf").glob("bench_*.py")}
    assert {"kernels", "step", "host", "errors", "link"} <= files
    assert files | {"report"} <= set(found) <= files | {"report", "gpu-check"}
    assert all(path.is_file() for path in found.values())


def test_an_unknown_name_is_one_line_with_those_known(capsys: pytest.CaptureFixture[str], checkout: Path) -> None:
    assert refusal(capsys, "nothing", "--steps", "2") == "error: no benchmark is named 'nothing': use one of waits-long"
    assert refusal(capsys) == "error: no benchmark was named: use one of waits-long"


def test_outside_a_checkout_it_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "perf").mkdir()
    (tmp_path / "perf" / "bench_step.py").touch()  # some other package's: ours has records.py beside it
    monkeypatch.setattr(bench, "CHECKOUT", tmp_path)
    assert "source checkout" in refusal(capsys, "step")


def test_it_becomes_the_benchmark(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[object] = []

    def execve(program: str, arguments: list[str], environment: dict[str, str]) -> NoReturn:
        became.extend([program, arguments, environment["PYTHONPATH"].split(os.pathsep)[0]])
        raise Became

    monkeypatch.setattr(os, "execve", execve)
    with pytest.raises(Became):
        main(["bench", "waits_long", "--help", "--", "-x", "3"])
    script = str(checkout / "perf" / "bench_waits_long.py")
    program, arguments, first = became
    assert program == sys.executable
    assert isinstance(arguments, list)
    assert arguments[:3] == [sys.executable, script, "--help"]
    assert arguments[-2:] == ["-x", "3"]
    assert first == str(checkout)


def test_signals_reach_it_and_its_exit_status_is_handed_on(checkout: Path) -> None:
    command = [sys.executable, "-c", COMMAND, str(checkout)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == f"ready {checkout / 'fusedreduce.py'}\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=30) == 43
        finally:
            process.kill()
