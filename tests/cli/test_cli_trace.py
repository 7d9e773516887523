"""`fusedreduce trace` as a user runs it: the table, the two files, and what it refuses."""

from __future__ import annotations

import json
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.traces import FakeRun, check_chrome, edit

from fusedreduce.cli import main
from fusedreduce.cli import trace as command
from fusedreduce.planning.timeline import MISSING_NS
from fusedreduce.trace.reader import read
from fusedreduce.trace.report import Run, merge


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two ranks, three steps (5 to 7), three buckets."""
    FakeRun().write(tmp_path / "traces")
    return tmp_path / "traces"


def picture_size(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n") and content.rstrip().endswith(b"IEND\xaeB`\x82")
    width, height = struct.unpack(">II", content[16:24])
    return int(width), int(height)


def steps_in(path: Path) -> set[int]:
    found = json.loads(path.read_text())
    check_chrome(found)
    return {event["args"]["step"] for event in found["traceEvents"] if event["ph"] == "X"}


def test_it_prints_a_table_and_writes_both_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(folder)]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0] == ("fusedreduce trace: 2 ranks, cpu, wrapper; step 5 to 7, 3 buckets; clocks aligned to 0 us")
    heading = next(line for line in lines if line.startswith("rank"))
    assert heading.split() == ["rank", "ms", "ms", "ms", "overlap", "ms", "backward"]
    rows = {line.split()[0]: line.split() for line in lines if line.split()[:1] in (["0"], ["1"], ["all"])}
    # Rank 1: backward 44 us and packing of 3 x 1 us and 10,000 bytes; then the last bucket, 4 us of wire of its 16.
    assert rows["1"] == ["1", "1.000", "0.048", "0.004", "75.0%", "0.000", "0.0%"]
    assert rows["all"][1:4] == ["1.000", "0.048", "0.004"]
    assert f"{folder / 'trace.json'}  step 5 to 7" in out and f"{folder / 'trace.png'}   step 6" in out
    assert steps_in(folder / "trace.json") == {5, 6, 7}
    width, height = picture_size(folder / "trace.png")
    assert width > 1000 and height > 400
    assert sorted(path.name for path in folder.iterdir()) == ["rank0.json", "rank1.json", "trace.json", "trace.png"]
    assert main(["trace", str(folder)]) == 0, "its own files are no traces"


def test_one_step_and_another_folder(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "out"
    assert main(["trace", str(folder), "--step", "7", "--out", str(out)]) == 0
    assert steps_in(out / "trace.json") == {7}
    assert f"{out / 'trace.png'}   step 7" in capsys.readouterr().out
    assert len(list(folder.iterdir())) == 2


def test_one_ranks_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(folder / "rank1.json")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("fusedreduce trace: rank 1 of 2, cpu") and (folder / "trace.png").exists()
    assert not any(line.startswith("all ") for line in out.splitlines())


@pytest.mark.parametrize(
    "run",
    [
        FakeRun(ranks=1, steps=1),
        FakeRun(ranks=12, steps=1),
        FakeRun(plan=tuple((number,) for number in range(300)), ready_ns=range(10, 610, 2), numels=(64,) * 300),
    ],
    ids=["one rank", "12 ranks", "300 buckets"],
)
def test_runs_of_all_sizes(run: FakeRun, tmp_path: Path) -> None:
    run.write(tmp_path)
    assert main(["trace", str(tmp_path)]) == 0
    picture_size(tmp_path / "trace.png")
    assert len(steps_in(tmp_path / "trace.json")) == run.steps


def test_what_was_not_seen_is_a_dash(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def forget(found: dict[str, Any]) -> None:
        for step in found["steps"]:
            step["backward_end_ns"] = step["forward_ns"] = MISSING_NS
            step["buckets"] = [[MISSING_NS] * 6 for _ in step["buckets"]]

    for rank in range(2):
        edit(folder, forget, rank)
    assert main(["trace", str(folder)]) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if line.startswith(("0 ", "all "))]
    assert [row[2:] for row in rows] == [["-"] * 5] * 2 and "wall clocks as they are" in out
    picture_size(folder / "trace.png")


def test_the_timeline_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for most, kept in ((10**6, {5, 6, 7}), (18_000, {6, 7}), (1, {7})):
        monkeypatch.setattr(command, "MOST_BYTES", most)
        command.write(merge(read(folder)), folder)
        assert steps_in(folder / "trace.json") == kept, "the latest, and one at least"
        # Of the lines that name processes and threads there are 20, whatever the steps.
        assert (folder / "trace.json").stat().st_size < max(most, 9_000) + 2_500


def test_a_typical_step_is_one_of_median_length(folder: Path) -> None:
    def slow(found: dict[str, Any]) -> None:
        found["steps"][1]["buckets"][2][5] += 10**6
        found["steps"][2]["buckets"][2][5] += 10**3

    edit(folder, slow)
    run: Run = merge(read(folder))
    assert run.steps[command.typical(run)] == 7


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["nowhere"], "No such file or directory"),
        ([".", "--step", "5"], "no trace there"),
        (["traces", "--step", "4"], "argument --step: 4 was not recorded: use one of 5 to 7"),
        (["traces", "--step", "x"], "argument --step: invalid int value"),
        (["traces", "--out", "/dev/null"], "--out: '/dev/null' is not a folder that can be written to"),
        ([], "the following arguments are required: FOLDER"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    options: list[str], said: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder.parent)
    refused(["trace", *options], said, capsys)


def test_a_bad_trace_is_refused_in_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(folder, lambda found: found["steps"][0]["buckets"][0].reverse())
    refused(["trace", str(folder)], "do not ascend", capsys)
    assert not (folder / "trace.json").exists()


def refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Ends with status 2, says so in one line, and prints nothing else."""
    with pytest.raises(SystemExit) as exited:
        main(arguments)
    assert exited.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert said in line


def test_a_reader_that_has_had_enough_gets_no_traceback(folder: Path) -> None:
    command = f"'{sys.executable}' -m fusedreduce.cli trace '{folder}' | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) in ((0, ""), (128 + signal.SIGPIPE, ""))
