"""perf/records.py: what a record holds, which files are refused, how a benchmark ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import records
import torch
from torch.multiprocessing.spawn import ProcessRaisedException


@pytest.fixture
def written(tmp_path: Path) -> Path:
    return records.write(tmp_path, "step", "cpu", ranks=2)


def test_a_record_says_where_it_comes_from(written: Path) -> None:
    record = records.read(written)
    assert written.name == f"step_cpu_{record['created'][:10]}.json"
    assert {"schema", "what", "rehearsal", "device", "hardware", "others_cores", "ranks", "rows", "demands"} <= set(
        record
    )
    assert {"torch", "python", "numpy"} <= set(record["versions"])
    assert record["commit"]
    assert record["command"].startswith("python ")
    assert list(written.parent.iterdir()) == [written]  # nothing half written stays


def test_no_run_replaces_another(written: Path) -> None:
    before = written.read_text()
    for number in (2, 3):
        again = records.write(written.parent, "step", "cpu", ranks=3 + number)
        assert again.name == f"{written.stem}-{number}.json"
        assert records.read(again)["ranks"] == 3 + number
    assert written.read_text() == before


def test_a_run_that_writes_as_it_goes_leaves_one_record(written: Path) -> None:
    first = records.write(written.parent, "step", "cpu", ranks=3)
    assert records.write(written.parent, "step", "cpu", over=first, ranks=4) == first
    assert records.read(first)["ranks"] == 4 and records.read(written)["ranks"] == 2
    assert sorted(written.parent.iterdir()) == sorted([written, first])


def test_the_command_names_no_folder_of_this_machine() -> None:
    script = str(records.CHECKOUT / "perf" / "bench_step.py")
    typed = [script, "--out", "/some/where/else", "--to=/some/where", "/one", "200x50000", "-x", "a/b"]
    assert records._command(typed) == "python perf/bench_step.py --out else --to=where one 200x50000 -x a/b"
    assert records._command(["/somewhere/other.py"]) == "python other.py"


def test_a_record_of_another_schema_and_a_rehearsal_are_refused(written: Path) -> None:
    record = json.loads(written.read_text())
    for change, said in (({"schema": 1}, "no record of schema 2"), ({"rehearsal": True}, "is a rehearsal")):
        written.write_text(json.dumps({**record, **change}))
        with pytest.raises(records.BenchError, match=said):
            records.read(written)


@pytest.mark.parametrize(
    ("value", "sign", "bound", "met"), [(1.0, "<=", 1.0, True), (1.0, "<", 1.0, False), (2.0, ">=", 1.0, True)]
)
def test_a_demand_is_met_by_its_numbers_and_not_judged_without_them(
    value: float, sign: Any, bound: float, met: bool
) -> None:
    assert records.demand("it", value, sign, bound)["met"] is met
    for found in (
        records.demand("it", None, sign, bound),
        records.demand("it", value, sign, None),
        records.demand("it", value, sign, bound, why_not="noise"),
    ):
        assert found["met"] is None and found["why_not"]


@pytest.mark.parametrize("folder", [records.RESULTS, records.RESULTS / "deeper", records.RESULTS / ".." / "results"])
def test_a_rehearsal_is_kept_out_of_the_results(folder: Path) -> None:
    before = sorted(records.RESULTS.iterdir())
    with pytest.raises(records.BenchError, match="rehearsal"):
        records.write(folder, "step", "cpu", rehearsal=True)
    assert sorted(records.RESULTS.iterdir()) == before


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "deeper"):
        with pytest.raises(records.BenchError, match="cannot be made"):
            records.write(folder, "step", "cpu")


def test_no_record_holds_a_number_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(records.BenchError, match="not finite"):
        records.write(tmp_path, "step", "cpu", ratio=float("nan"))
    with pytest.raises(ValueError, match="commit"):
        records.write(tmp_path, "step", "cpu", commit="mine")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GH200 480GB", "gh200-480gb"),
        ("Tesla T4", "tesla-t4"),
    ],
)
def test_what_hardware_is_called(monkeypatch: pytest.MonkeyPatch, name: str, slug: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert records.hardware_name("cuda") == slug
    assert records.hardware_name(torch.device("cpu")) == "cpu"


def test_no_gpu_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert records.pick_device("auto").type == "cpu"
    for asked in (records.pick_device, records.hardware_name):
        with pytest.raises(records.BenchError, match="no GPU"):
            asked("cuda")


def raising(error: BaseException) -> Callable[[], int]:
    def main() -> int:
        print("so far")
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (records.BenchError("the check failed:\n  3 is not 4"), "error: the check failed: 3 is not 4"),
        (
            ProcessRaisedException("\n\n-- Process 1 ...\nTraceback ...\nrecords.BenchError: off by 3: bad\n", 1, 2),
            "error: off by 3: bad",
        ),
        (torch.OutOfMemoryError("CUDA out of memory.\nTried"), "error: too little memory: CUDA out of memory. Tried"),
        (RuntimeError("DefaultCPUAllocator: can't"), "error: too little memory: DefaultCPUAllocator: can't"),
    ],
)
def test_what_cannot_be_done_is_one_line(capsys: pytest.CaptureFixture[str], error: Exception, line: str) -> None:
    with pytest.raises(SystemExit) as ended:
        records.entry(raising(error))
    assert ended.value.code == 1
    assert capsys.readouterr().err == f"{line}\n"


def test_other_ends_are_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    for main, status in (
        (lambda: 0, 0),
        (lambda: 1, 1),
        (raising(KeyboardInterrupt()), 130),
        (raising(SystemExit(3)), 3),
    ):
        with pytest.raises(SystemExit) as ended:
            records.entry(main)
        assert ended.value.code == status
    with pytest.raises(ZeroDivisionError):
        records.entry(raising(ZeroDivisionError()))
    assert capsys.readouterr().err == ""


def test_a_bad_option_is_one_line_too() -> None:
    parser = records.Parser(description="x", prog="bench_x.py")
    parser.add_argument("--steps", type=int)
    with pytest.raises(records.BenchError, match=r"invalid int value: 'many' \(see bench_x.py --help\)"):
        parser.parse_args(["--steps", "many"])
