"""The command line: `fusedreduce demo` as a user runs it, what it refuses, what it says when a rank fails, Ctrl-C."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.machinery
import importlib.util
import io
import json
import math
import os
import pty
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support.cuda.fake_driver import CHECKOUT
from support.on_device import pick
from support.ranks import RankPool
from support.timeouts import SETUP_S
from support.traces import FakeRun

from fusedreduce.cli import demo, demo_report, demo_worker, digits, launch, main, trace
from fusedreduce.cli.demo_report import Row, show_progress
from fusedreduce.cli.report import as_json
from fusedreduce.cli.variants import variants
from fusedreduce.wires import PLAIN_WIRES

PARAMETERS = 40394
STEPS = 110
NOT_EXACT = "off torch DDP's, and must be the same bits"


class Finished(NamedTuple):
    """A run of the demo that has ended."""

    status: int
    out: str
    err: str
    folder: Path

    @property
    def json(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "out" / "demo.json").read_text())
        return found


def start(folder: Path, *options: str, device: str = "cpu", terminal: int = subprocess.PIPE) -> subprocess.Popen[str]:
    """`fusedreduce demo` in a folder of its own, as a terminal would start it; `terminal` takes its standard error."""
    ours = ("TRITON_INTERPRET", "LOGLEVEL")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    (folder / "tmp").mkdir()
    search = os.pathsep.join([CHECKOUT, *filter(None, [environment.get("PYTHONPATH")])])  # it need not be installed
    environment |= {"TMPDIR": str(folder / "tmp"), "PYTHONWARNINGS": "default::RuntimeWarning", "PYTHONPATH": search}
    return subprocess.Popen(
        [sys.executable, "-m", "fusedreduce.cli", "demo", "--device", device, *options],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=terminal,
        start_new_session=True,
    )


def run(folder: Path, *options: str, device: str = "cpu") -> Finished:
    process = start(folder, *options, device=device)
    out, err = process.communicate(timeout=SETUP_S)
    assert not ranks_of(folder), "ranks outlive the demo"
    # torch leaves a folder of its own there (torchinductor_*).
    left = [path.name for path in (folder / "tmp").iterdir()]
    assert [name for name in left if name.startswith(("fusedreduce", "torchelastic"))] == []
    return Finished(process.returncode, out, err, folder)


def ranks_of(folder: Path) -> list[int]:
    """Processes whose command line names a folder within `folder`: the ranks of the demo that runs there."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if any(word.startswith(os.fsencode(folder)) for word in words):
            found.append(int(path.parent.name))
    return found


def wait_until(true: Callable[[], bool], limit_s: float, what: str) -> None:
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end, f"{what} within {limit_s} s"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return run(tmp_path_factory.mktemp("demo"), "--steps", str(STEPS))


def test_a_short_run_compares_all_variants_and_fails_for_its_accuracy_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The command is in this process; its ranks are started as ever."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("PYTHONPATH", CHECKOUT)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    options = ("--device", "cpu", "--steps", "2", "--wire", "native", "--out", str(tmp_path / "out"))
    done = Finished(main(["demo", *options]), *capfd.readouterr(), tmp_path)
    assert not ranks_of(tmp_path) and [path.name for path in tmp_path.iterdir()] == ["out"]
    (error,) = [line for line in done.err.splitlines() if "error" in line]
    assert done.status == 1 and error.count("under 95%") == error.count(";") + 1
    names = ("torch DDP", "hook native", "wrapper native", "torch scaled", "native scaled")
    assert all(name in done.out and name in error for name in names)
    check_figures(done.json["variants"], steps=2)


@pytest.mark.full
def test_a_run_succeeds_and_is_quiet(finished: Finished) -> None:
    assert finished.status == 0, finished.err
    lines = finished.err.splitlines()
    assert sum(line.startswith("training") for line in lines) >= 10
    # Matplotlib says so, once per machine, when it looks for fonts.
    assert [line for line in lines if not line.startswith("training") and "font cache" not in line] == []


@pytest.mark.full
def test_the_table(finished: Finished) -> None:
    lines = finished.out.splitlines()
    rule = next(index for index, line in enumerate(lines) if set(line) == {"-"})
    names = [line[: len("wrapper native")].strip() for line in lines[rule + 1 : rule + 10]]
    ours = [f"{door} {wire}" for door in ("hook", "wrapper") for wire in ("native", "bf16", "fp16")]
    assert names == ["torch DDP", *ours, "torch scaled", "fp16 scaled"]
    *above, verdict = lines  # which the terminal breaks
    assert max(map(len, above)) <= 120 and verdict.startswith("Verdict: ")
    files = ("demo.json", "demo.png", "trace.json", "trace.png")
    assert all(f"out/{name} " in finished.out for name in files)


@pytest.mark.full
def test_the_figures(finished: Finished) -> None:
    found = finished.json
    assert (found["device"], found["ranks"], found["steps"], found["seed"]) == ("cpu", 2, STEPS, 0)
    assert found["versions"]["torch"] == torch.__version__
    assert {"created", "wall_s", "hardware"} <= set(found)
    check_figures(found["variants"], STEPS)
    torchs, *ours, scaled, our_scaled = found["variants"]
    assert min(variant["accuracy"] for variant in found["variants"]) >= 0.95
    for hook, wrapper in zip(ours[:3], ours[3:], strict=True):
        assert hook["losses"] == wrapper["losses"], "one data path behind both doors"
    # What fp16 rounds off grows from step to step: 2e-6 of the loss by the tenth, a third of it by the eightieth.
    assert our_scaled["losses"][:15] == pytest.approx(scaled["losses"][:15], rel=1e-3)


def check_figures(rows: Sequence[dict[str, Any]], steps: int) -> None:
    """What must hold of two ranks on any machine: sizes, and errors within what the wire's precision allows."""
    torchs, *_, scaled, our_scaled = rows
    for row in rows:
        name, losses = row["name"], row["losses"]
        assert row["difference"] is None
        assert len(losses) == steps
        assert losses[0] == torchs["losses"][0], "same weights, same batch"
        last_epoch = losses[-(1438 // 64) :]
        assert row["loss"] == pytest.approx(math.fsum(last_epoch) / len(last_epoch))
        exact = name in ("hook native", "wrapper native")
        assert row["exact"] == exact
        assert not exact or losses == torchs["losses"], "two ranks, fp32: the same bits"
        reference = scaled if row in (scaled, our_scaled) else torchs
        pairs = zip(losses, reference["losses"], strict=True)
        assert row["worst_loss_difference"] == max(abs(ours - theirs) for ours, theirs in pairs)
        ulp = next((ulp for wire, ulp in (("fp16", 2**-10), ("bf16", 2**-7)) if wire in name), 2**-23)
        # Of the largest gradient: half an ulp each for the two that are summed and for the sum, and cancellation.
        assert ulp / 8 < row["worst_gradient_error"] < 4 * ulp
        payload = PARAMETERS * (4 if ulp == 2**-23 else 2)
        # The wrapper aligns its slots: at most 15 bytes before a small one, 127 before one of 4 KiB.
        padding = 0 if name.startswith(("torch", "hook")) else 10 * 128
        assert payload <= row["wire_bytes_per_step"] <= payload + padding


def row(name: str = "hook native", **figures: Any) -> Row:
    """A variant of which nothing is wrong, but for `figures`."""
    fine: dict[str, Any] = {
        "name": name,
        "accuracy": 0.97,
        "loss": 0.1,
        "worst_loss_difference": 0.0,
        "exact": True,
        "worst_gradient_error": 1e-7,
        "wire_bytes_per_step": 0,
        "path": "triton",
        "losses": [2.3, 0.1],
        "difference": None,
    }
    return Row(**{**fine, **figures})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (row("native scaled", accuracy=0.1), "native scaled ended at 10.00% accuracy, under 95%"),
        (row("native scaled", accuracy=float("nan")), "native scaled ended at nan% accuracy, under 95%"),
        (row("a", difference="0.weight on rank 1 is not"), "a: 0.weight on rank 1 is not"),
        (
            row("a", worst_loss_difference=1e-7),
            "a: losses are up to 1.0e-07 off torch DDP's, and must be the same bits",
        ),
        (
            row("a", worst_loss_difference=math.nan),
            "a: losses are up to nan off torch DDP's, and must be the same bits",
        ),
    ],
)
def test_a_variant_that_is_wrong_fails_and_is_named_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wrong: Row, said: str
) -> None:
    titles: list[str] = []
    monkeypatch.setattr(demo_report, "draw", lambda path, rows, title: titles.append(title))
    for rows, status, errors, answers in (
        ([row("torch DDP"), wrong], 1, [f"fusedreduce demo: error: {said}"], "The answers do NOT agree"),
        ([row("torch DDP"), row("a", exact=False, worst_loss_difference=0.1)], 0, [], "The answers agree"),
    ):
        assert with_rows(monkeypatch, rows, tmp_path) == status
        out, err = capsys.readouterr()
        assert err.splitlines() == errors
        assert all(one.name in out for one in rows), "the table is shown all the same"
        verdict = out.splitlines()[-1]
        assert verdict.startswith(f"Verdict: t{answers[1:]}: ")
        assert (said in verdict) is bool(status) and ("fusedreduce doctor --model N" in verdict) is not bool(status)
        assert titles.pop() == f"{answers}: handwritten digits, 2 ranks on CPU"


def test_the_last_line_says_what_agrees_and_what_it_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo_report, "draw", lambda path, rows, title: None)
    rows = [
        row("torch DDP", exact=False, wire_bytes_per_step=4_000),
        row("hook native", wire_bytes_per_step=4_000),
        row("wrapper int8", exact=False, accuracy=0.96, worst_loss_difference=0.1, wire_bytes_per_step=1_040),
    ]
    assert with_rows(monkeypatch, rows, tmp_path) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "Verdict: the answers agree: 3 variants of at least 96.0% accuracy, wire native has torch's losses bit for "
        "bit, wrapper int8 sends 0.26 of torch's bytes. Next, what it saves on your link: fusedreduce doctor --model N "
        "--backward-ms MS --network 10gbe --ranks 4"
    )


def with_rows(
    monkeypatch: pytest.MonkeyPatch,
    rows: Sequence[Row],
    out: Path,
    *options: str,
    asked: list[tuple[int, Sequence[str]]] | None = None,
) -> int:
    """The demo, whose ranks are said to have found these; its exit status. `asked` takes what they were to do."""

    def take(module: str, folder: Path, arguments: Sequence[str], ranks: int, *, loopback: bool) -> None:
        if asked is not None:
            asked.append((ranks, arguments))
        (folder / demo_report.ROWS_FILE).write_text(json.dumps(list(map(dataclasses.asdict, rows))))

    monkeypatch.setattr(demo, "run_ranks", take)
    for name in ("read", "merge"):
        monkeypatch.setattr(demo, name, lambda _: None)
    monkeypatch.setattr(trace, "write", lambda *_: "")
    return main(["demo", "--device", "cpu", "--out", str(out), *options])


def test_ranks_are_given_what_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, Sequence[str]]] = []
    options = ("--ranks", "3", "--wire", "bf16", "--wire", "int4,bf16", "--steps", "7", "--seed", "5")
    assert with_rows(monkeypatch, [row()], tmp_path, *options, asked=asked) == 0
    assert asked == [(3, ["cpu", "bf16,int4", "7", "5"])]


def one_step(rank: int, world: int, folder: str) -> list[Row]:
    """The shortest run that there is; behind it one bit of the last variant's weights flips on the last rank."""
    summed_up = demo_worker.rows

    def flip(runs: Sequence[demo_worker.Run], held_out: digits.Digits) -> list[Row]:
        if rank == world - 1:
            next(runs[-1].contender.ddp.module.parameters()).data.view(-1).view(torch.uint8)[0] ^= 1
        return summed_up(runs, held_out)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_worker, "rows", flip)
        return demo_worker.train(rank, world, torch.device("cpu"), ["bf16"], steps=1, seed=0, traces=Path(folder))


def test_one_step_is_a_run_too_and_a_bit_that_differs_between_ranks_is_found_on_all(
    two: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, others = two.run(one_step, str(tmp_path / "trace"))
    assert [one.name for one in rows] == ["torch DDP", "hook bf16", "wrapper bf16", "torch scaled", "bf16 scaled"]
    assert [one.losses for one in rows] == [one.losses for one in others]
    assert [one.difference for one in rows] == [one.difference for one in others]
    assert with_rows(monkeypatch, rows, tmp_path / "out") == 1, "nothing is learnt in one step"
    (reason,) = capsys.readouterr().err.splitlines()
    assert reason.startswith("fusedreduce demo: error: bf16 scaled: 0.weight on rank 1 differs from rank 0's; ")
    assert "; torch DDP ended at" in reason
    found = json.loads((tmp_path / "out" / "demo.json").read_text())
    assert [variant["difference"] is None for variant in found["variants"]] == [True] * 4 + [False]


@pytest.mark.parametrize(
    ("statuses", "reasons", "said"),
    [
        ([1, -9], [0], "rank 1 died: killed by SIGKILL"),
        ([1, 3], [0], "rank 1 died: exit status 3"),
        ([1, 1], [1, 0], "rank 1 failed: ValueError: bad"),
    ],
)
def test_the_failure_that_others_followed_from_is_reported(
    tmp_path: Path, statuses: Sequence[int], reasons: Sequence[int], said: str
) -> None:
    """`reasons`: ranks that raised an error, the first one first."""
    for time_s, rank in enumerate(reasons):
        path = tmp_path / f"rank{rank}.error.txt"
        path.write_text("ValueError: bad\nTraceback ...")
        os.utime(path, (time_s, time_s + 1))
    found = launch.first_failure(dict(enumerate(statuses)), tmp_path)
    assert str(found) == said
    assert found.details == ("Traceback ..." if "failed" in said else None)


def test_a_traceback_is_kept_and_its_file_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise launch.RankFailedError("rank 1 failed: ValueError: bad", "Traceback ...")

    monkeypatch.setattr(demo, "run_ranks", fail)
    assert main(["demo", "--device", "cpu", "--out", str(tmp_path)]) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.endswith(f"rank 1 failed: ValueError: bad (traceback: {tmp_path}/demo-error.txt)")
    assert (tmp_path / "demo-error.txt").read_text() == "Traceback ..."


@pytest.fixture
def heeds_interrupts() -> Iterator[None]:
    """A test run in the background of a script ignores SIGINT, and the demo would then do so too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("does", "status", "said"),
    [
        ("die", 1, "rank 1 died: killed by SIGKILL"),
        ("SIGINT", 130, "interrupted by SIGINT; every rank has ended"),
        ("SIGTERM", 143, "interrupted by SIGTERM; every rank has ended"),
    ],
)
def test_a_rank_that_dies_is_named_and_a_signal_while_ranks_start_ends_them(
    heeds_interrupts: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    does: str,
    status: int,
    said: str,
) -> None:
    """Ranks that do nothing, not even import torch: how they end is the launcher's to know."""
    monkeypatch.setattr(demo, "WORKER", "support.demo_rank")
    monkeypatch.setenv("FUSEDREDUCE_STAND_IN", does)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert main(["demo", "--device", "cpu", "--out", str(tmp_path / "out")]) == status
    assert capfd.readouterr().err.splitlines() == [f"fusedreduce demo: error: {said}"]
    assert not ranks_of(tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.name != "out"] == []
    assert not (tmp_path / "out" / "demo.json").exists()


@pytest.mark.full
def test_no_rank_outlives_a_demo_that_is_killed(tmp_path: Path) -> None:
    """On a terminal, of which the progress bar is one line."""
    terminal, its = pty.openpty()
    process = start(tmp_path, "--steps", "100000", "--wire", "native", terminal=its)
    os.close(its)
    try:
        assert os.read(terminal, 4096).startswith(b"\rtraining [")
        assert len(ranks_of(tmp_path)) == 2
        process.kill()
        assert process.wait(20) == -9
        wait_until(lambda: not ranks_of(tmp_path), 10, "every rank ends")
    finally:
        for pid in {process.pid, *ranks_of(tmp_path)}:
            if pid != process.pid or process.poll() is None:
                os.kill(pid, signal.SIGKILL)
        process.communicate()
        os.close(terminal)


class Terminal(io.StringIO):
    """One of 60 columns, or a file."""

    def __init__(self, live: bool) -> None:
        super().__init__()
        self._live = live

    def isatty(self) -> bool:
        return self._live

    def fileno(self) -> int:
        return -1


def test_progress_is_one_line_on_a_terminal_and_ten_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((60, 24)))
    shown = {live: Terminal(live) for live in (True, False)}
    for stream in shown.values():
        for step in range(400):
            show_progress(step + 1, 400, stream)
    line, *after = shown[True].getvalue().split("\n")
    assert after == [""]
    draws = line.split("\r")[1:]
    assert len(draws) == 101
    assert max(map(len, draws)) < 60
    assert draws[-1] == f"training [{'#' * 28}] 100 %  step 400/400"
    lines = shown[False].getvalue().splitlines()
    assert lines[0] == "training   0 %  step 1/400"
    assert lines[1:] == [f"training {10 * tenth:3d} %  step {40 * tenth}/400" for tenth in range(1, 11)]


@pytest.mark.parametrize(
    ("launcher", "does", "status", "left"),
    [
        ("here", "works", 0, ""),
        ("here", "fails", 1, "rank 1 failed: ValueError: bad"),
        ("gone", "fails", 1, "rank 1 died: exit status 1"),
    ],
)
def test_how_a_rank_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: str, does: str, status: int, left: str
) -> None:
    """One whose launcher has gone while it started does nothing, and says nothing."""
    calls: list[tuple[int, int]] = []

    def work(rank: int, ranks: int) -> None:
        calls.append((rank, ranks))
        if does == "fails":
            raise ValueError("bad\nand worse")

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Libc())
    monkeypatch.setattr(os, "_exit", sys.exit)
    pid = os.getppid() if launcher == "here" else 1
    for name, value in (("RANK", 1), ("WORLD_SIZE", 2), ("FUSEDREDUCE_LAUNCHER_PID", pid)):
        monkeypatch.setenv(name, str(value))
    with pytest.raises(SystemExit) as exited:
        launch.as_rank(tmp_path, work)
    assert exited.value.code == status
    assert calls == ([(1, 2)] if launcher == "here" else [])
    if left:
        found = launch.first_failure({1: status}, tmp_path)
        assert str(found) == left
        assert ("and worse" in (found.details or "")) == (launcher == "here")


class Libc:
    """The C library, whose prctl would have the operating system end this process."""

    def prctl(self, *_: int) -> None:
        """Does nothing."""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--ranks", "0"], "--ranks: must be a whole number from 1 on, got '0'"),
        (["--ranks", "45"], "--ranks: 45 is more than 44"),
        (["--ranks", "two"], "--ranks: must be a whole number from 1 on, got 'two'"),
        (["--steps", "0"], "--steps: must be a whole number from 1 on, got '0'"),
        (["--seed", "-1"], "--seed: must be a whole number from 0 on, got '-1'"),
        (["--wire", "fp8"], "--wire: unknown name 'fp8': use native, bf16, fp16, int8, int4 or all"),
        (["--wire", "bf16,"], "--wire: unknown name ''"),
        (["--device", "tpu"], "--device: invalid choice: 'tpu'"),
        (["--out", "/dev/null"], "--out: '/dev/null' is not a folder that can be written to"),
        (["--step", "3"], "unrecognized arguments: --step 3"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(
    options: Sequence[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["demo", "--device", "cpu", *options])
    assert exited.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert said in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["demo", "--device", "cuda"])
    assert exited.value.code == 2
    assert "torch finds no CUDA GPU" in capsys.readouterr().err


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Without:
        @staticmethod
        def find_spec(name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
            if name == "sklearn":
                raise ModuleNotFoundError(name)
            return None

    monkeypatch.setattr(sys, "meta_path", [Without(), *sys.meta_path])
    for name in [name for name in sys.modules if name.partition(".")[0] == "sklearn"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(SystemExit) as exited:
        main(["demo"])
    assert exited.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "sklearn cannot be imported: pip install '.[demo]' in the clone" in line


def test_without_matplotlib_there_are_no_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    FakeRun().write(tmp_path / "traces")
    assert main(["trace", str(tmp_path / "traces")]) == 0
    out = capsys.readouterr().out
    assert "overlap" in out and "no trace.png: pip install matplotlib" in out
    assert (tmp_path / "traces" / "trace.json").exists() and not list(tmp_path.rglob("*.png"))


def test_ranks_share_no_image_and_epochs_differ() -> None:
    images, ranks = 1438, 3
    per_epoch = digits.batches_per_epoch(images, ranks)
    seen = [digits.batch_rows(step, images, rank, ranks, seed=7) for step in range(per_epoch) for rank in range(ranks)]
    assert len(torch.cat(seen).unique()) == per_epoch * ranks * digits.BATCH_IMAGES
    assert {len(rows) for rows in seen} == {digits.BATCH_IMAGES}
    again = digits.batch_rows(per_epoch, images, 0, ranks, seed=7)
    assert not torch.equal(again, seen[0])


def test_the_split_holds_a_fifth_of_every_class_out() -> None:
    training, held_out = digits.load()
    assert (len(training), len(held_out)) == (1438, 359)
    shares = held_out.labels.bincount() / (held_out.labels.bincount() + training.labels.bincount())
    assert ((shares - 0.2).abs() < 0.003).all()
    assert training.images.shape == (1438, 1, 8, 8)
    assert (training.images.min().item(), training.images.max().item()) == (0, 1)


def test_the_gradient_error_on_numbers(alone: None) -> None:
    local = [torch.tensor([2.0, 2.0]), torch.zeros(2), torch.tensor([1.0, 0.0])]
    assert demo_worker.gradient_error(local, local) == 0
    assert demo_worker.gradient_error([torch.tensor([2.0, 2.5]), *local[1:]], local) == 0.25
    assert demo_worker.gradient_error([local[0], torch.tensor([0.0, 1e-9]), local[2]], local) == float("inf")
    unknown = demo_worker.gradient_error([*local[:2], torch.tensor([1.0, float("nan")])], local)
    assert unknown != unknown


def test_figures_that_are_missing_still_make_a_table_a_picture_and_json(tmp_path: Path) -> None:
    nan = float("nan")
    bare = row(accuracy=0.1, loss=nan, worst_gradient_error=float("inf"), losses=[2.3, nan])
    assert "hook native" in demo_report.table([bare])
    demo_report.draw(tmp_path / "demo.png", [bare], "nothing measured")
    demo_report.write_json(tmp_path / "demo.json", [bare], {"wall_s": 1.0})
    (variant,) = json.loads((tmp_path / "demo.json").read_text())["variants"]
    assert (variant["losses"], variant["worst_gradient_error"]) == ([2.3, None], None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo.json", "demo.png"]


def test_json_keeps_numbers_on_one_line_and_text_as_it_is() -> None:
    value = {"losses": [2.5, -1e-05, 3], "text": "[ 1,\n 2 ]", "none": [], "names": ["a", "b"], "said": "[1,  2]"}
    text = as_json(value)
    assert json.loads(text) == value
    assert "[ 2.5, -1e-05, 3 ]" in text


@pytest.fixture(scope="module")
def finished_there(
    device: torch.device, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Finished:
    """A run on the device that the demo chooses."""
    if device.type == "cpu":
        done: Finished = request.getfixturevalue("finished")
        return done
    return run(tmp_path_factory.mktemp("demo"), "--steps", str(STEPS), device="auto")


@pytest.mark.full
def test_every_row_says_where_it_ran(device: torch.device, finished_there: Finished) -> None:
    assert finished_there.status == 0, finished_there.err
    ours = pick(device, cpu="torch", cuda="triton")
    expected = [(name, "torch" if name.startswith("torch") else ours) for name in variants(tuple(PLAIN_WIRES))]
    assert finished_there.json["device"] == device.type
    assert [(one["name"], one["path"]) for one in finished_there.json["variants"]] == expected
