"""`make gpu-check` without a GPU: steps and tests that hang and crash, a run ended from outside; what is summed up."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gpu_check
import outcomes
import pytest
import records
import torch
from gpu.test_both_devices import functions_by_file

from fusedreduce.kernels import combine_encoded, decode, encode, pack, stats, unpack, walk

SLEEPS = """
import pathlib, subprocess, sys, time
child = subprocess.Popen(["sleep", "60"])
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(60)
"""
DEMAND = records.demand("pack one: share of the copy", 0.5, ">=", 0.9)


def _step(name: str, program: str, *arguments: str, limit_s: float = 30.0, **options: Any) -> gpu_check.Step:
    return gpu_check.Step(name=name, arguments=("-S", "-c", program, *arguments), limit_s=limit_s, **options)


def _written(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("gpu_check_cpu_*.json")
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def _run(folder: Path, *chosen: gpu_check.Step, budget_s: float = 60.0) -> dict[str, Any]:
    check = gpu_check.Check(folder, True)
    check.run(chosen, budget_s)
    assert _written(folder)["stages"] == check.stages
    return check.stages


def _gone(pid: int) -> bool:
    """Ended, or dead and not yet collected by whoever adopted it."""
    path = Path(f"/proc/{pid}/stat")
    return not path.exists() or path.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_step_that_hangs_is_killed_with_all_it_started(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    hangs = _step("hangs", SLEEPS, str(pid), limit_s=2.0)
    stages = _run(tmp_path, hangs, _step("after", "print('fine')"))
    assert stages["hangs"]["status"] == "failed" and "killed at its time limit" in stages["hangs"]["reason"]
    assert stages["hangs"]["seconds"] < 50
    assert (stages["after"]["status"], stages["after"]["reason"]) == ("ok", "fine")
    assert not pid.exists() or _gone(int(pid.read_text()))  # on a loaded machine it may not have begun by then


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("print('lost'); raise SystemExit(3)", "ended with exit status 3: lost"),
        ("import os; os.kill(os.getpid(), 11)", "ended by signal 11: it said nothing"),
        ("print('error: no such driver'); print('bye'); raise SystemExit(1)", "exit status 1: error: no such driver"),
    ],
)
def test_how_a_step_ends(tmp_path: Path, program: str, reason: str) -> None:
    stage = _run(tmp_path, _step("odd", program))["odd"]
    assert stage["status"] == "failed" and reason in stage["reason"]


def test_without_time_or_tool_nothing_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = gpu_check.Check(tmp_path, True)
    check.rehearse = False
    check.run([_step("tool", "", tool=("no-such-tool-here",)), _step("late", "print('begun')")], budget_s=5.0)
    stages = check.stages
    assert (stages["tool"]["status"], stages["tool"]["reason"]) == ("skipped", "no-such-tool-here is not installed")
    assert stages["late"]["status"] == "failed" and "not begun" in stages["late"]["reason"]


def test_no_run_replaces_another(tmp_path: Path) -> None:
    for number in range(2):
        gpu_check.Check(tmp_path, True).run([_step("one", f"print({number})")], 60.0)
    first, second = sorted(tmp_path.glob("*.json"), key=lambda path: len(path.name))
    assert [json.loads(path.read_text())["stages"]["one"]["reason"] for path in (first, second)] == ["0", "1"]


def test_ended_from_outside_it_ends_its_step_and_leaves_what_was_known(tmp_path: Path) -> None:
    program = f"""
import gpu_check, signal, sys
from pathlib import Path
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
step = lambda name, program: gpu_check.Step(name=name, arguments=("-c", program, "pid"), limit_s=50.0)
gpu_check.records.CHECKOUT = Path.cwd()
gpu_check.Check(Path.cwd(), True).run([step("first", "print('fine')"), step("second", {SLEEPS!r})], 100.0)
"""
    environment = {**os.environ, "PYTHONPATH": str(gpu_check.HERE)}
    process = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, env=environment)
    pid = tmp_path / "pid"
    deadline_s = time.monotonic() + 60
    while not (pid.exists() and pid.read_text()) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 143
    assert _gone(int(pid.read_text()))
    assert _written(tmp_path)["stages"]["first"]["status"] == "ok"


TESTS = {
    "test_one.py": """
import os, signal, time
import pytest

def test_passes(record_property):
    record_property("registers", 32)

def test_hangs():
    time.sleep(60)

@pytest.fixture
def hangs_behind():
    yield
    time.sleep(60)

def test_fails_and_hangs(hangs_behind):
    assert False, "three is wrong"

def test_crashes():
    os.kill(os.getpid(), signal.SIGSEGV)

@pytest.mark.parametrize("number", [1, 2])
def test_goes_on(number):
    assert number == 1, "two is wrong"
""",
    "test_broken.py": """
import sys
from types import SimpleNamespace
import pytest

def synchronize():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

def test_breaks_the_gpu():
    sys.modules["torch"] = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True, synchronize=synchronize))

def test_in_another_process():
    assert "torch" not in sys.modules

def test_skips():
    pytest.skip("needs 11 GiB")
""",
    "test_no_import.py": "import no_such_module",
}


AT_ONCE = pytest.param(("-n", "2", "--dist", "worksteal"), "status 1", marks=pytest.mark.full)


@pytest.mark.parametrize(("at_a_time", "crash"), [((), "signal 11"), AT_ONCE])
def test_tests_go_on_behind_what_hangs_crashes_and_breaks_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_a_time: tuple[str, ...], crash: str
) -> None:
    monkeypatch.setattr(gpu_check, "_at_a_time", lambda: at_a_time)
    monkeypatch.setattr(records, "CHECKOUT", tmp_path)
    monkeypatch.setenv(outcomes.LIMIT, "2")
    for name, text in TESTS.items():
        (tmp_path / name).write_text(text)
    step = gpu_check.Step(name="tests", arguments=(*at_a_time, "."), limit_s=200.0)
    stage = _run(tmp_path, step, budget_s=200.0)["tests"]
    assert stage["status"] == "failed" and stage["reason"] == "3 passed, 6 failed, 1 skipped, 0 not run"
    ended = {test.rpartition("::")[2] or test: why for test, why in stage["failed"].items()}
    assert "ended with exit status 1" in ended["test_hangs"] and crash in ended["test_crashes"]
    assert re.search("(?s)three is wrong.*then ended with exit status 1", ended["test_fails_and_hangs"])
    assert "two is wrong" in ended["test_goes_on[2]"] and "illegal memory access" in ended["test_breaks_the_gpu"]
    assert "no_such_module" in ended["test_no_import.py"]
    assert stage["skipped"] == ["test_broken.py::test_skips: Skipped: needs 11 GiB"]
    assert stage["properties"] == {"test_one.py::test_passes": {"registers": 32}}
    assert (stage["demands"][0]["value"], stage["demands"][0]["bound"]) == (3, 9)
    (log,) = tmp_path.glob("*.log")
    assert "in test_hangs" in log.read_text(), "where it hung"


def test_where_time_is_up_the_tests_that_did_not_run_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "CHECKOUT", tmp_path)

    def killed(name: str, command: object, ends_s: float, environment: dict[str, str]) -> tuple[None, str]:
        lines = [{"collected": ["a", "b", "c"]}, {"began": "a"}]
        lines += [{"ended": "a", "outcome": "passed", "why": "", "properties": {}}, {"began": "b"}]
        text = "".join(f"{json.dumps(line)}\n" for line in lines) + '{"ended": "b", "outc'
        Path(environment[gpu_check.OUTCOMES]).write_text(text)
        return None, "."

    check = gpu_check.Check(tmp_path, True)
    monkeypatch.setattr(check, "_run", killed)
    check.run([gpu_check.Step(name="tests", arguments=(), limit_s=9.0)], 20.0)
    stage = check.stages["tests"]
    assert stage["reason"] == "1 passed, 1 failed, 0 skipped, 1 not run"
    assert stage["failed"] == {"b": "killed at its time limit; see the log"} and stage["skipped"] == ["c: not run"]


@pytest.mark.parametrize("rehearsal", [True, False])
def test_what_a_benchmark_demands_is_in_the_summary(tmp_path: Path, rehearsal: bool) -> None:
    writes = "import json, pathlib, sys; pathlib.Path(sys.argv[1], 'kernels.json').write_text(sys.argv[2])"
    judged = {"demands": [DEMAND, records.demand("native", None, "<=", 1.0)]}
    check = gpu_check.Check(tmp_path, True)
    check.rehearse = rehearsal
    check.run([_step("kernels", writes, str(tmp_path), json.dumps(judged))], 60.0)
    missed = ["kernels: pack one: share of the copy is 0.5, required >= 0.9"]
    assert check.missed() == ([] if rehearsal else missed) and not check.failed()
    assert (f"MISSED {missed[0]}" in check.summary()) != rehearsal
    assert any(line.startswith("kernels    ok ") for line in check.summary())


@pytest.mark.parametrize(
    ("program", "met", "arguments", "status"),
    [
        ("", True, [], 0),
        ("", False, [], 1),
        ("", False, ["--no-check"], 0),
        ("raise SystemExit(1)", True, ["--no-check"], 1),
    ],
)
def test_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, met: bool, arguments: list[str], status: int
) -> None:
    monkeypatch.setattr(gpu_check, "steps", lambda out, rehearse: (_step("kernels", program), _step("encoded", "1/0")))
    monkeypatch.setattr(gpu_check.Check, "missed", lambda check: [] if met else ["a demand"])
    monkeypatch.setattr(
        sys, "argv", ["gpu_check.py", "--rehearse", "--only", "kernels", "--out", str(tmp_path), *arguments]
    )
    assert gpu_check.main() == status
    assert set(_written(tmp_path)["stages"]) == {"kernels"}


def test_without_a_gpu_there_is_one_line_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--out", str(tmp_path / "new")])
    with pytest.raises(records.BenchError, match="no GPU"):
        gpu_check.main()
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--rehearse", "--out", str(records.RESULTS)])
    with pytest.raises(records.BenchError, match="rehearsal"):
        gpu_check.main()


def test_kernels_are_compiled_whatever_the_caller_tests_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    environment = gpu_check._environment()
    assert "TRITON_INTERPRET" not in environment
    assert environment["PYTHONPATH"].split(os.pathsep)[-1] == "/somewhere"


@pytest.mark.parametrize("rehearse", [True, False])
def test_steps_are_programs_and_tests_that_exist(tmp_path: Path, rehearse: bool) -> None:
    every = gpu_check.steps(tmp_path, rehearse)
    named = [part for step in every for part in step.arguments if part.endswith(".py")]
    assert len(named) >= 5 and all((records.CHECKOUT / part).is_file() for part in named)
    assert gpu_check.OUTCOMES == outcomes.OUTCOMES
    memcheck = next(step for step in every if step.name == "memcheck")
    assert dict(memcheck.environment)["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
    chosen, _, size = memcheck.arguments[-1].partition(" and ")
    for part in gpu_check.EVERY_KERNEL:
        tests = (records.CHECKOUT / part).read_text()
        assert len(re.findall(rf'"{size}".*\ndef test_\w*{chosen}', tests)) == 1, part


def test_benchmarks_know_the_options_that_they_are_given_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    scripts = [step for step in gpu_check.steps(tmp_path, False) if step.arguments[0].endswith(".py")]
    assert [step.name for step in scripts] == ["kernels", "step", "step-gpt2", "encoded"]
    for step in scripts:
        monkeypatch.setattr(sys, "argv", list(step.arguments))
        with pytest.raises(records.BenchError, match="no GPU"):  # and not: unrecognized arguments
            importlib.import_module(Path(step.arguments[0]).stem).main()


def test_the_sanitizer_looks_at_every_kernel() -> None:
    modules = (pack, unpack, walk, encode, combine_encoded, decode, stats)
    kernels = {name for module in modules for name in vars(module) if name.endswith("_kernel")}
    assert kernels == set(gpu_check.KERNELS)  # substrings: "_pack_kernel" is none of "_unpack_kernel"


def _needs_a_gpu(test: ast.FunctionDef) -> bool:
    """Whether a test is marked gpu, or has the fixture whose second value is a GPU."""
    decorators = " ".join(map(ast.unparse, test.decorator_list))
    return "pytest.mark.gpu" in decorators or (
        "device" in [one.arg for one in test.args.args] and "device" not in decorators
    )


def test_steps_fit_into_ten_minutes_and_tests_are_looked_for_where_they_are(tmp_path: Path) -> None:
    assert sum(step.limit_s for step in gpu_check.steps(tmp_path, False)) <= gpu_check.BUDGET_S <= 600
    folders = [records.CHECKOUT / part for part in gpu_check.GPU_FILES]
    needing = [path for path, tests in functions_by_file().items() if any(map(_needs_a_gpu, tests))]
    assert len(needing) > len(folders)
    assert all(any(path.is_relative_to(folder) for folder in folders) for path in needing)
