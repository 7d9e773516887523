"""What the command prints within a program, by the rank that the program itself has given to a process; step times."""

from __future__ import annotations

import gc
import json
import re
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.inside import CLOCK_OF_STEPS, inside
from support.ranks import fake_group
from torch import nn

import fusedreduce
from fusedreduce.parallel import install
from fusedreduce.reducer.plans import Forecast
from fusedreduce.run import options, process

pytestmark = pytest.mark.usefixtures("path")
MS = 1_000_000


class Clock:
    """Takes the place of time in step.py: stands still but for `pass_ms`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = 5
        CLOCK_OF_STEPS.replace(monkeypatch, SimpleNamespace(perf_counter_ns=lambda: self.now_ns))

    def pass_ms(self, took_ms: float) -> None:
        self.now_ns += round(took_ms * MS)


def installed(trace: Path | None = None, *, quiet: bool = False) -> process.PrintingInstallation:
    return process.PrintingInstallation(options.Options(fusedreduce.ReduceConfig(), trace=trace, quiet=quiet))


def finished(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(tensor)
    return future


def train(ddp: nn.Module, steps: int, clock: Clock | None = None, step_ms: float = 0.0) -> None:
    for _ in range(steps):
        if clock is not None:
            clock.pass_ms(step_ms)
        ddp(torch.ones(1, 30, device="cpu")).sum().backward()


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_totals_are_rank_0s_also_where_no_environment_numbers_the_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: int
) -> None:
    """As of a script that starts its ranks itself; it has destroyed its group when its processes end."""
    monkeypatch.delenv("RANK", raising=False)
    installation = installed()
    with fake_group(3, rank):
        ddp = fusedreduce.DistributedDataParallel(nn.Linear(30, 20))
        installation.wrapped(ddp)
        train(ddp, 2)
        first = capsys.readouterr().err
    installation.at_end()
    last = capsys.readouterr().err
    if rank == 0:
        assert first.startswith("fusedreduce: Linear on 3 ranks: wire native") and first.count("\n") == 1
        said = "no step time: 0 steps were timed behind the first 32, and 16 are needed"
        assert last == f"fusedreduce: 2 steps; {said}; 4.96 kB of gradients sent, in their own dtype\n"
    else:
        assert first == last == ""


def test_the_last_line_counts_what_each_reducer_sent_and_no_other() -> None:
    """Two that differ in everything, one of which a comm hook decided, and one that sent nothing to anybody."""
    timed = process.Timed(33, [9 * MS, 12_345_678, 30 * MS] * 6)
    ours = process.Ended(100, 8, 4_000_000, 100_000_000, Forecast(80.0, 100.0, 99.5), timed)
    other = process.Ended(30, 4, 1_000_000, 20_000_000, Forecast(1.0, 2.0, 1.0), process.Timed(30, []))
    hook, alone = ours._replace(steps=7, sent_bytes=None), other._replace(steps=5, ranks=1)
    said = "120.00 MB of gradients sent instead of 430.00 MB (72% less)"
    took = "median step 12.35 ms (steps 33 to 50 of the reducer with most)"
    exposed = "20% of backward and reduction exposed, by the planner's model"
    assert process.last_line([other, ours]) == f"130 steps of 2 reducers; {took}; {said}; {exposed}"
    assert process.last_line([alone, other, hook, ours]) == (
        f"142 steps of 4 reducers; {took}; {said}; a comm hook decided what was sent; {exposed}"
    )


@pytest.mark.parametrize(("steps", "stage"), [(20, "measuring"), (45, "trying"), (80, "checking"), (140, "chosen")])
def test_the_lines_of_a_run_in_which_steps_choose_the_wire(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], steps: int, stage: str
) -> None:
    clock, installation = Clock(monkeypatch), installed()
    took_ms = {"native": 10.0, "bf16": 6.0}
    with fake_group(2):
        config = fusedreduce.ReduceConfig(wire="auto", link=(5.0, 1.0))
        ddp = fusedreduce.DistributedDataParallel(nn.Linear(30, 20), reduce=config)
        inside(ddp).tell_step_times(lambda wire: round(took_ms[wire] * MS))
        installation.wrapped(ddp)
        for _ in range(steps):
            train(ddp, 1, clock, took_ms[inside(ddp).tried_wire])
        assert (times := ddp.wire_times()) is not None and times.stage == stage
    installation.at_end()
    first, *chosen, last = capsys.readouterr().err.splitlines()
    assert first.endswith(
        "wire native,bf16, policy planned, 2.48 kB of gradients a step, steps choose one, native first"
    )
    if steps < 80:
        ended = f"none was chosen, for the run ended while {stage} (about 66 steps)"
        assert not chosen and f"; wire native: {ended}; " in last
        return
    assert re.fullmatch(
        r"fusedreduce: wire bf16 from step (\d+) on: from the begin of forward to the end of backward native 10.00 ms, "
        r"bf16 6.00 ms; int8.*",
        chosen[0],
    )
    since = times.since or 0
    told = chosen[0].rpartition("; ")[2]
    share = "" if stage == "checking" else ", 40%"
    saved = f"wire bf16 from step {since + 1} on, 4.00 ms a step less than native{share} (--wire bf16 repeats it)"
    assert f"{saved}; {told}; " in last
    if stage == "checking":
        timed = f"{steps - since - 1} steps were timed behind step {since}, where a wire was chosen"
        assert f"no step time: {timed}, and 16 are needed" in last
    else:
        assert f"median step 6.00 ms (steps {since + 1} to {steps - 1})" in last
    bytes_of = {"native": 4 * 620, "bf16": 2 * 620}
    sent_bytes = sum(count * bytes_of[wire] for wire, count in inside(ddp).steps_by_wire.items())
    assert f"{sent_bytes / 1e3:.2f} kB of gradients sent instead of {steps * 4 * 620 / 1e3:.2f}" in last


def test_the_lines_of_a_run_in_which_steps_cannot_choose(capsys: pytest.CaptureFixture[str]) -> None:
    installation = installed()
    with fake_group(2):
        ddp = fusedreduce.DistributedDataParallel(
            nn.Linear(30, 20), reduce=fusedreduce.ReduceConfig(wire="auto", policy="static")
        )
        installation.wrapped(ddp)
        train(ddp, 3)
    installation.at_end()
    first, last = capsys.readouterr().err.splitlines()
    assert first.endswith(", native throughout")
    assert "; wire native: policy='static' measures nothing; " in last


@pytest.mark.parametrize(("micro_batches", "grad_in_evaluation"), [(2, False), (0, True)])
def test_the_step_time_is_that_between_synchronised_forwards_once_plans_have_settled(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    micro_batches: int,
    grad_in_evaluation: bool,
) -> None:
    """Micro-batches under no_sync are of one step. Evaluation is none, even where it arms a backward."""
    clock, installation = Clock(monkeypatch), installed()
    with fake_group(2):
        ddp, other = (fusedreduce.DistributedDataParallel(nn.Linear(30, 2)) for _ in range(2))
        for wrapper in (ddp, other):
            installation.wrapped(wrapper)
        train(other, 40, clock, 1.0)
        for step in range(49):
            with ddp.no_sync():
                train(ddp, micro_batches, clock, 3.0)
            train(ddp, 1, clock, 500.0 if step < 32 else 7.25 - 3 * micro_batches + step / 1000)
            if step % 4 == 0:
                ddp.eval()
                with torch.set_grad_enabled(grad_in_evaluation):
                    for _ in range(20):
                        clock.pass_ms(1000.0)
                        ddp(torch.ones(1, 30, device="cpu"))
                ddp.train()
    installation.at_end()
    last = capsys.readouterr().err.splitlines()[-1]
    # Those of 7.293 and 7.294 ms are in the middle: behind four steps there was an evaluation.
    assert "; median step 7.29 ms (steps 33 to 48 of the reducer with most); " in last, last


TOO_FEW = "no step time: {} timed behind {}, and 16 are needed"
AT_BF16 = {"wire": "int8", "wire_after": 40}


@pytest.mark.parametrize(
    ("config", "outputs", "trains", "says"),
    [
        *(
            ({}, 2, [(steps, 7.0)], TOO_FEW.format(timed, "the first 32"))
            for steps, timed in ((1, "0 steps were"), (33, "0 steps were"), (34, "1 step was"), (48, "15 steps were"))
        ),
        ({}, 2, [(1000, 90.0), (1030, 4.0)], "median step 4.00 ms (steps 1006 to 2029)"),  # the latest
        # Before the wire is used:
        (AT_BF16, 20, [(60, 3.0)], TOO_FEW.format("0 steps were", "40 at bf16 and 32 more")),
        (AT_BF16, 20, [(30, 3.0)], TOO_FEW.format("0 steps were", "30 at bf16 and 32 more")),
        (AT_BF16, 20, [(72, 3.0), (17, 7.0)], "median step 7.00 ms (steps 73 to 88)"),
        # Of a model that is never encoded:
        ({**AT_BF16, "wire_after": 5000}, 2, [(60, 3.0)], "median step 3.00 ms (steps 33 to 59)"),
    ],
)
def test_which_steps_are_timed(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    config: dict[str, Any],
    outputs: int,
    trains: list[tuple[int, float]],
    says: str,
) -> None:
    """In bounded memory."""
    clock, installation = Clock(monkeypatch), installed()
    with fake_group(2):
        reduce = fusedreduce.ReduceConfig(**config)
        ddp = fusedreduce.DistributedDataParallel(nn.Linear(30, outputs), reduce=reduce)
        installation.wrapped(ddp)
        for steps, step_ms in trains:
            train(ddp, steps, clock, step_ms)
        assert len(inside(ddp).forwards) <= 1025
    installation.at_end()
    assert f"; {says}; " in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(("rank", "steps", "kept"), [(0, 105, 100), (1, 7, 7)])
def test_trace_records_the_first_wrapper_and_says_how_to_read_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rank: int, steps: int, kept: int
) -> None:
    """On every rank, which rank 0 alone tells of."""
    folder = tmp_path / "made" / "by it"
    install.activate(installation := installed(folder))
    try:
        with fake_group(2, rank):
            ddp = nn.parallel.DistributedDataParallel(nn.Linear(30, 2))
            other = nn.parallel.DistributedDataParallel(nn.Linear(30, 3))
            train(other, 2)
            train(ddp, steps)
        assert len(list(folder.glob("*.json"))) == (steps > 100), "a program may be killed"
        installation.at_end()
    finally:
        fusedreduce.uninstall()
    [file] = folder.iterdir()
    written = json.loads(file.read_text())
    assert file.name == f"rank{rank}.json" and written["ranks"] == 2
    assert len(written["steps"]) == kept and [one["numel"] for one in written["parameters"]] == [60, 2]
    told = capsys.readouterr().err
    said = f"fusedreduce: the first steps of every rank are in {folder}: fusedreduce trace '{folder}'\n"
    assert told.endswith(said) if rank == 0 else not told


@pytest.mark.parametrize(("rank", "other"), [(0, 1), (1, 0)])
def test_a_trace_takes_the_place_of_an_earlier_one_of_more_ranks(tmp_path: Path, rank: int, other: int) -> None:
    """Each rank removes its own, also where it ends early, and those of no rank; the others may have begun before."""
    for name in ("0", "1", "2", "13", "x"):
        (tmp_path / f"rank{name}.json").write_text("earlier")
    installation = installed(tmp_path)
    with fake_group(2, rank):
        ddp = fusedreduce.DistributedDataParallel(nn.Linear(30, 2))
        installation.wrapped(ddp)
        assert {one.name for one in tmp_path.iterdir()} == {f"rank{other}.json", "rankx.json"}
        train(ddp, 3)
    installation.at_end()
    assert json.loads((tmp_path / f"rank{rank}.json").read_text())["ranks"] == 2


def test_trace_follows_a_wrapper_to_the_reducer_that_is_made_for_its_comm_hook(tmp_path: Path) -> None:
    config = fusedreduce.ReduceConfig(wire="bf16")
    installation = process.PrintingInstallation(options.Options(config, trace=tmp_path, quiet=True))
    install.activate(installation)
    try:
        with fake_group(2):
            ddp = nn.parallel.DistributedDataParallel(nn.Linear(30, 2))
            ddp.register_comm_hook(None, lambda state, bucket: finished(bucket.buffer()))
            train(ddp, 3)
        installation.at_end()
    finally:
        fusedreduce.uninstall()
    written = json.loads((tmp_path / "rank0.json").read_text())
    assert written["config"]["wire"] == "native" and len(written["steps"]) == 3


def test_a_trace_that_cannot_be_written_is_told_of_and_does_not_end_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "trace"
    installation = installed(folder)
    with fake_group(2, 1):
        ddp = fusedreduce.DistributedDataParallel(nn.Linear(30, 2))
        installation.wrapped(ddp)
        train(ddp, 100)
        folder.rmdir()
        folder.write_text("")
        train(ddp, 5)
    installation.at_end()
    assert re.fullmatch("fusedreduce: rank 1 could not write its trace: .*File exists.*\n", capsys.readouterr().err)


def test_a_trace_keeps_no_reducer_whose_wrapper_is_freed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It has buffers of the size of its gradients."""
    installation = installed(tmp_path)
    with fake_group(2):
        ddp = fusedreduce.DistributedDataParallel(nn.Linear(30, 2))
        installation.wrapped(ddp)
        train(ddp, 3)
        reducer = weakref.ref(fusedreduce.reducer_of(ddp))
        del ddp
        gc.collect()
        assert reducer() is None and (tmp_path / "rank0.json").is_file()
    installation.at_end()
    assert capsys.readouterr().err.endswith(f"are in {tmp_path}: fusedreduce trace {tmp_path}\n")
