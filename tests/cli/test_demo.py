"""The command line: `fusedreduce demo` as a user runs it, what it refuses, what it says when a rank fails, Ctrl-C."""

from __future__ import annotations

import importlib.machinery
import io
import json
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
from support.fake_driver import CHECKOUT
from support.on_device import pick
from support.ranks import RankPool

from fusedreduce.cli import demo, demo_worker, digits, launch, main, measure, picture, report, results, trace
from fusedreduce.cli.progress import Progress
from fusedreduce.cli.results import Row, write_json
from fusedreduce.cli.variants import Contender, variants

PARAMETERS = 40394
STEPS = 110
COLUMNS = ("variant", "loss", "accuracy", "error", "bytes/step", "ms", "share", "launches", "path", "buckets")
NUMBERS = (
    "accuracy",
    "loss",
    "worst_gradient_error",
    "wire_bytes_per_step",
    "step_ms",
    "sync_ms",
    "sync_share",
    "launches_per_bucket",
    "collectives_per_bucket",
    "buckets",
)


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
    out, err = process.communicate(timeout=300)
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


def test_a_short_run_compares_all_variants_and_fails_for_its_accuracy_alone(tmp_path: Path) -> None:
    done = run(tmp_path, "--steps", "2", "--wire", "native")
    (error,) = [line for line in done.err.splitlines() if "error" in line]
    assert done.status == 1 and error.count("under 95%") == error.count(";") + 1
    names = ("torch DDP", "hook native", "wrapper native", "torch scaled", "native scaled")
    assert all(name in done.out and name in error for name in names)


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
    heading = " ".join(lines[rule - 2 : rule]).split()
    assert [column for column in COLUMNS if column not in heading] == []
    names = [line[: len("wrapper native")].strip() for line in lines[rule + 1 : rule + 10]]
    ours = [f"{door} {wire}" for door in ("hook", "wrapper") for wire in ("native", "bf16", "fp16")]
    assert names == ["torch DDP", *ours, "torch scaled", "fp16 scaled"]
    assert max(map(len, lines)) <= 120
    assert "out/demo.json" in finished.out
    assert "out/demo.png" in finished.out


@pytest.mark.full
def test_the_json(finished: Finished) -> None:
    found = finished.json
    assert (found["device"], found["ranks"], found["steps"], found["seed"]) == ("cpu", 2, STEPS, 0)
    assert found["command"] == f"fusedreduce demo --device cpu --steps {STEPS}"
    assert found["versions"]["torch"] == torch.__version__
    assert {"created", "wall_s", "hardware"} <= set(found)
    assert str(finished.folder) not in (finished.folder / "out" / "demo.json").read_text()
    for variant in found["variants"]:
        for field in NUMBERS:
            assert isinstance(variant[field], int | float), field
        assert len(variant["losses"]) == STEPS
        assert variant["parameters_equal"] is True


@pytest.mark.full
def test_the_figures(finished: Finished) -> None:
    """What must hold on any machine: sizes, counts, and errors within what the wire's precision allows."""
    torchs, *ours, scaled, our_scaled = finished.json["variants"]
    for variant in (torchs, *ours, scaled, our_scaled):
        assert variant["accuracy"] >= 0.95
        # One more per step tells the ranks what is not finite.
        assert variant["collectives_per_bucket"] == pytest.approx(4 / 3 if variant is our_scaled else 1)
        assert variant["buckets"] == 3
        assert variant["losses"][0] == torchs["losses"][0], "same weights, same batch"
        assert 0 < variant["sync_ms"] < variant["step_ms"]
        assert variant["sync_share"] == pytest.approx(variant["sync_ms"] / variant["step_ms"])
        wire_bytes = 4 if "native" in variant["name"] or variant["name"].startswith("torch") else 2
        payload = PARAMETERS * wire_bytes
        # The wrapper aligns its slots: at most 15 bytes before a small one, 127 before one of 4 KiB.
        padding = 10 * 128 + 16 if variant["name"].startswith(("wrapper", "fp16")) else 0
        assert payload <= variant["wire_bytes_per_step"] <= payload + padding
        # Of the largest gradient: half an ulp each for the two that are summed and for the sum, and cancellation.
        ulp = next((ulp for wire, ulp in (("fp16", 2**-10), ("bf16", 2**-7)) if wire in variant["name"]), 2**-23)
        assert ulp / 8 < variant["worst_gradient_error"] < 4 * ulp
    for native in (ours[0], ours[3]):
        assert native["losses"] == torchs["losses"], "two ranks, fp32: the same bits"
        # On CPU operators are counted, and few gradients are divided into their slots one by one, as torch does.
        assert native["launches_per_bucket"] <= torchs["launches_per_bucket"]
    for hook, wrapper in zip(ours[:3], ours[3:], strict=True):
        assert hook["losses"] == wrapper["losses"], "one data path behind both doors"
    # What fp16 rounds off grows from step to step: 2e-6 of the loss by the tenth, a third of it by the eightieth.
    assert our_scaled["losses"][:15] == pytest.approx(scaled["losses"][:15], rel=1e-3)


@pytest.mark.full
def test_the_picture_is_a_picture(finished: Finished) -> None:
    from matplotlib import image

    pixels = image.imread(finished.folder / "out" / "demo.png")
    assert pixels.shape[:2] == (660, 1650)


def row(name: str = "hook native", **figures: Any) -> Row:
    """A variant of which nothing is wrong, but for `figures`."""
    nan = float("nan")
    fine: dict[str, Any] = {
        "name": name,
        "setting": "",
        "accuracy": 0.97,
        "loss": 0.1,
        "worst_gradient_error": 1e-7,
        "wire_bytes_per_step": 0,
        "step_ms": nan,
        "sync_ms": nan,
        "sync_share": nan,
        "launches_per_bucket": 1.0,
        "collectives_per_bucket": 1.0,
        "buckets": 1,
        "path": "triton",
        "losses": [2.3, 0.1],
        "parameters_equal": True,
        "difference": None,
    }
    return Row(**{**fine, **figures})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (row("native scaled", accuracy=0.1), "native scaled ended at 10.00% accuracy, under 95%"),
        (row("native scaled", accuracy=float("nan")), "native scaled ended at nan% accuracy, under 95%"),
        (row("a", parameters_equal=False, difference="0.weight on rank 1 is not"), "a: 0.weight on rank 1 is not"),
    ],
)
def test_a_variant_that_is_wrong_fails_and_is_named_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wrong: Row, said: str
) -> None:
    titles: list[str] = []
    monkeypatch.setattr(picture, "draw", lambda path, rows, title, times: titles.append(title))
    for rows, status, errors, answers in (
        ([row("torch DDP"), wrong], 1, [f"fusedreduce demo: error: {said}"], "The answers do NOT agree"),
        ([row("torch DDP")], 0, [], "The answers agree"),
    ):
        assert with_rows(monkeypatch, rows, tmp_path) == status
        out, err = capsys.readouterr()
        assert err.splitlines() == errors
        assert all(one.name in out for one in rows), "the table is shown all the same"
        assert titles.pop() == f"{answers}: handwritten digits, 2 ranks on CPU, over loopback"


def with_rows(
    monkeypatch: pytest.MonkeyPatch,
    rows: Sequence[Row],
    out: Path,
    *options: str,
    asked: list[tuple[int, results.Job]] | None = None,
) -> int:
    """The demo, whose ranks are said to have found these; its exit status. `asked` takes what they were to do."""

    def take(module: str, folder: Path, ranks: int, *, loopback: bool) -> None:
        if asked is not None:
            asked.append((ranks, results.read_job(folder)))

    monkeypatch.setattr(demo, "run_ranks", take)
    monkeypatch.setattr(results, "read_rows", lambda _: list(rows))
    for name in ("read", "merge"):
        monkeypatch.setattr(demo, name, lambda _: None)
    monkeypatch.setattr(trace, "write", lambda *_: "")
    return main(["demo", "--device", "cpu", "--out", str(out), *options])


def test_ranks_are_given_what_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, results.Job]] = []
    options = ("--ranks", "3", "--wire", "bf16", "--wire", "native", "--steps", "7", "--seed", "5")
    assert with_rows(monkeypatch, [row()], tmp_path, *options, asked=asked) == 0
    job = results.Job(device="cpu", wires=("bf16", "native"), steps=7, seed=5, launcher_pid=os.getpid())
    assert asked == [(3, job)]


def one_step(rank: int, world: int, folder: str) -> list[Row]:
    """The shortest run that there is; behind it one bit of the last variant's weights flips on the last rank."""
    job = results.Job(device="cpu", wires=("bf16",), steps=1, seed=0, launcher_pid=0)
    summed_up = demo_worker._row

    def flip(run: demo_worker.Run, *rest: Any) -> Row:
        if run.variant.name == "bf16 scaled" and rank == world - 1:
            next(run.contender.ddp.module.parameters()).data.view(-1).view(torch.uint8)[0] ^= 1
        return summed_up(run, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_worker, "_row", flip)
        return demo_worker.train(job, torch.device("cpu"), rank, Path(folder))


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
    assert found["command"] == "fusedreduce demo --device cpu --out out"
    assert [variant["parameters_equal"] for variant in found["variants"]] == [True] * 4 + [False]
    assert [variant["step_ms"] for variant in found["variants"]] == [None] * 5, "only the probe; JSON has no NaN"


class Failure(NamedTuple):
    """What torch's launcher says of a rank that failed; `reason` as the rank leaves it, or none."""

    exitcode: int
    reason: dict[str, Any] | None = None


OWN = {"reason": "ValueError: bad", "traceback": "Traceback ...", "lost_peer": False, "time": 5.0}
LATER = {**OWN, "reason": "ValueError: too", "time": 6.0}
LOST_PEER = {**OWN, "reason": "RuntimeError: Connection closed by peer", "lost_peer": True, "time": 4.0}


@pytest.mark.parametrize(
    ("failures", "said"),
    [
        ([Failure(-9), Failure(1, LOST_PEER)], "rank 0 died: killed by SIGKILL"),
        ([Failure(1, LOST_PEER), Failure(3)], "rank 1 died: exit status 3"),
        ([Failure(1, LOST_PEER), Failure(1, OWN), Failure(-15)], "rank 1 failed: ValueError: bad"),
        ([Failure(1, LATER), Failure(1, OWN)], "rank 1 failed: ValueError: bad"),
        ([Failure(1, LOST_PEER), Failure(-15)], "rank 1 died: killed by SIGTERM"),
    ],
)
def test_the_failure_that_others_followed_from_is_reported(
    tmp_path: Path, failures: Sequence[Failure], said: str
) -> None:
    for rank, failure in enumerate(failures):
        if failure.reason is not None:
            (tmp_path / f"rank{rank}.error.json").write_text(json.dumps(failure.reason))
    found = launch.first_failure(dict(enumerate(failures)), tmp_path)
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
    monkeypatch.setattr(demo, "_WORKER", "support.demo_rank")
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
        progress = Progress(400, stream)
        for step in range(400):
            progress.show(step + 1)
    line, *after = shown[True].getvalue().split("\n")
    assert after == [""]
    draws = line.split("\r")[1:]
    assert len(draws) == 101
    assert max(map(len, draws)) < 60
    assert draws[-1] == f"training [{'#' * 28}] 100 %  step 400/400"
    lines = shown[False].getvalue().splitlines()
    assert lines[0] == "training   0 %  step 1/400"
    assert lines[1:] == [f"training {10 * tenth:3d} %  step {40 * tenth}/400" for tenth in range(1, 11)]


def test_a_rank_that_starts_after_the_demo_was_interrupted_ends_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its folder is gone; a traceback would follow the line that says that every rank has ended."""
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as exited:
        demo_worker.main([str(tmp_path / "gone")])
    assert (exited.value.code, *capfd.readouterr()) == (1, "", "")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--ranks", "0"], "--ranks: must be at least 1, got 0"),
        (["--ranks", "45"], "--ranks: 45 is more than 44"),
        (["--ranks", "two"], "--ranks: invalid int value: 'two'"),
        (["--steps", "0"], "--steps: must be at least 1, got 0"),
        (["--seed", "-1"], "--seed: must be at least 0, got -1"),
        (["--wire", "fp8"], "--wire: unknown wire 'fp8': use one of native, bf16, fp16"),
        (["--wire", "bf16,"], "--wire: unknown wire ''"),
        (["--device", "tpu"], "--device: unknown device 'tpu': use auto, cpu or cuda"),
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
    assert "sklearn cannot be imported: pip install 'fusedreduce[demo]'" in line


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


@pytest.mark.parametrize("wire", ["native", "bf16", "fp16"])
def test_what_is_counted_agrees_with_the_hooks_own_statistics(wire: str, alone: None) -> None:
    contender, batch = contender_and_batch(f"hook {wire}")
    assert contender.stats is not None
    for _ in range(3):
        measure.forward_backward(contender.ddp, batch)
    before = contender.stats()
    counted = measure.count_exchange(contender.ddp, batch)
    after = contender.stats()
    assert counted.wire_bytes == int(after["wire_bytes"]) - int(before["wire_bytes"])
    assert counted.collectives == int(after["collectives"]) - int(before["collectives"])
    assert counted.collectives == after["buckets"] == contender.buckets == 3
    # DDP flattens ten gradients with a copy each. In place: one launch per bucket; with a wire of its own one on each
    # side, or, where torch does it (the interpreter cannot round to bf16), a few operators.
    ours = counted.launches - 10
    if wire == "native":
        assert ours == 3
    elif contender.path == "interpreter":
        assert ours == 6
    else:
        assert 6 <= ours <= 15
    assert all(parameter.grad is None for parameter in contender.ddp.parameters())


@pytest.mark.parametrize("wire", ["native", "bf16", "fp16"])
def test_what_is_counted_agrees_with_the_wrappers_own_statistics(wire: str, alone: None) -> None:
    contender, batch = contender_and_batch(f"wrapper {wire}")
    assert contender.stats is not None
    for _ in range(3):
        measure.forward_backward(contender.ddp, batch)
    before = contender.stats()
    counted = measure.count_exchange(contender.ddp, batch)
    after = contender.stats()
    assert counted.wire_bytes == int(after["wire_bytes"])
    assert counted.collectives == int(after["collectives"]) - int(before["collectives"])
    assert counted.collectives == after["buckets"] == contender.buckets == 3
    if contender.path == "interpreter":
        assert counted.launches == 6, "a pack and an unpack per bucket, and nothing of DDP's"


def count_torchs_own_reduction(rank: int, world: int) -> tuple[measure.Exchange, int, str]:
    """One late step of torch DDP, counted."""
    contender, batch = contender_and_batch("torch DDP")
    for _ in range(3):
        measure.forward_backward(contender.ddp, batch)
    return measure.count_exchange(contender.ddp, batch), contender.buckets, contender.path


def test_torchs_own_reduction_is_counted_by_the_same_rule(two: RankPool) -> None:
    # Ten gradients divided into the buckets, ten copied back.
    exchange = measure.Exchange(launches=20, collectives=3, wire_bytes=PARAMETERS * 4)
    assert two.run(count_torchs_own_reduction) == [(exchange, 3, "torch")] * 2


def test_the_gradient_error_on_numbers(alone: None) -> None:
    local = [torch.tensor([2.0, 2.0]), torch.zeros(2), torch.tensor([1.0, 0.0])]
    assert measure.gradient_error(local, local) == 0
    assert measure.gradient_error([torch.tensor([2.0, 2.5]), *local[1:]], local) == 0.25
    assert measure.gradient_error([local[0], torch.tensor([0.0, 1e-9]), local[2]], local) == float("inf")
    unknown = measure.gradient_error([*local[:2], torch.tensor([1.0, float("nan")])], local)
    assert unknown != unknown


def test_figures_that_are_missing_still_make_a_table_a_picture_and_json(tmp_path: Path) -> None:
    nan = float("nan")
    bare = row(accuracy=0.1, loss=nan, worst_gradient_error=float("inf"), losses=[2.3, nan])
    assert "hook native" in report.table([bare])
    picture.draw(tmp_path / "demo.png", [bare], "nothing measured", "no time")
    report.write_demo_json(tmp_path / "demo.json", [bare], {"wall_s": 1.0})
    (variant,) = json.loads((tmp_path / "demo.json").read_text())["variants"]
    assert (variant["losses"], variant["worst_gradient_error"]) == ([2.3, None], None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo.json", "demo.png"]


def test_json_keeps_numbers_on_one_line_and_text_as_it_is(tmp_path: Path) -> None:
    value = {"losses": [2.5, -1e-05, 3], "text": "[ 1,\n 2 ]", "none": [], "names": ["a", "b"]}
    write_json(tmp_path / "x.json", value)
    text = (tmp_path / "x.json").read_text()
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
    rows = [one.name for one in variants(("native", "bf16", "fp16"))]
    expected = [(name, "torch" if name.startswith("torch") else ours) for name in rows]
    assert finished_there.json["device"] == device.type
    assert [(one["name"], one["path"]) for one in finished_there.json["variants"]] == expected


def contender_and_batch(name: str) -> tuple[Contender, digits.Digits]:
    training, _ = digits.load()
    (variant,) = [one for one in variants(("native", "bf16", "fp16")) if one.name == name]
    return variant.build(digits.build_model(seed=0)), training.select(torch.arange(digits.BATCH_IMAGES))
