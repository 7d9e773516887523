"""`python -m fusedreduce.run` in front of real ranks: each way to start them, and what their last weights are."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from run import run_cases
from support.collective_cases import free_port
from support.ranks import RankPool
from support.timeouts import SETUP_S

from fusedreduce.trace.reader import read
from fusedreduce.trace.report import merge

SCRIPT = Path(__file__).with_name("run_train.py").resolve()
RUN = ("-m", "fusedreduce.run")
TORCHS = "torch.nn.parallel.distributed"
OURS = f"{TORCHS} fusedreduce.parallel.torch_reducer "
UNTIMED = "no step time: 0 steps were timed behind the first 32, and 16 are needed"
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port")


def run(*arguments: str, cwd: Path) -> tuple[set[str], list[str]]:
    """What the script's ranks have printed, without their number, and our lines."""
    environment = {name: text for name, text in os.environ.items() if not name.startswith("FUSEDREDUCE_")}
    paths = os.pathsep.join(map(str, (SCRIPT.parents[2], SCRIPT.parents[1])))
    environment |= {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SETUP_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ranks = re.findall(r"^rank \d (.*)$", done.stdout, re.M)
    assert len(ranks) == len(done.stdout.splitlines())
    return set(ranks), [line for line in done.stderr.splitlines() if line.startswith("fusedreduce: ")]


def test_torchrun_native_gives_torchs_weights_and_bf16_half_of_the_bytes_and_a_trace(
    two: RankPool, tmp_path: Path
) -> None:
    script, port = str(SCRIPT), str(free_port())
    plain, same = two.run(run_cases.weights_of_script)
    [native], _ = run(*TORCHRUN, port, *RUN, "--wire", "native", "--quiet", script, cwd=tmp_path)
    assert plain.startswith(f"{TORCHS} torch._C._distributed_c10d ") and plain == same
    assert native == plain.replace("torch._C._distributed_c10d", "fusedreduce.parallel.torch_reducer")
    launcher = ("--", sys.executable, *TORCHRUN, port)
    flags = ("--wire", "bf16", "--trace", "a/../out")
    [bf16], told = run(*RUN, *flags, *launcher, script, "--epochs", "13", cwd=tmp_path)
    assert bf16.startswith(OURS)
    first, last, traced = told
    assert first == (
        "fusedreduce: Sequential on 2 ranks: wire bf16, policy planned, 5.26 kB of gradients a step instead of 10.53 kB"
    )
    assert re.match(
        r"fusedreduce: 52 steps; median step \d+\.\d\d ms \(steps 33 to 51\); "
        r"273\.73 kB of gradients sent instead of 547\.46 kB \(50% less\)",
        last,
    )
    folder = tmp_path / "out"
    assert traced == f"fusedreduce: the first steps of every rank are in {folder}: fusedreduce trace {folder}"
    merged = merge(read(folder))
    assert [one.rank for one in merged.traces] == [0, 1] and len(merged.steps) == 52


def test_processes_that_a_script_starts_are_reached(tmp_path: Path) -> None:
    """By mp.spawn and by a fork server; torchrun, in front of which the command stands above, starts programs."""
    started = ("--launch", "spawn", "forkserver")
    port = str(free_port())
    found, told = run(*RUN, "--wire", "bf16", str(SCRIPT), *started, "--ranks", "1", "--port", port, cwd=tmp_path)
    [only] = found
    assert only.startswith(OURS)
    assert [line.split(": ")[1] for line in told] == ["Sequential on 1 rank", "32 steps; no step time"] * 2


@pytest.mark.parametrize("wrapper", ["kept", pytest.param("freed", marks=pytest.mark.full)])
def test_ranks_forked_after_training_tell_of_their_own_and_so_does_the_first_process(
    wrapper: str, tmp_path: Path
) -> None:
    """Whether its wrapper is kept until the fork, where the ranks free it, or freed before."""
    script, ports = str(SCRIPT.with_name("run_fork.py")), [str(free_port()), str(free_port())]
    gradients, told = run(*RUN, "--wire", "native", "--trace", "out", script, wrapper, *ports, cwd=tmp_path)
    assert len(gradients) == 2, "of one rank, and the same of two"
    assert told == [
        "fusedreduce: Linear on 1 rank: wire native, policy planned, nothing is sent",
        "fusedreduce: Linear on 2 ranks: wire native, policy planned, 0.04 kB of gradients a step",
        f"fusedreduce: 5 steps; {UNTIMED}; 0.20 kB of gradients sent, in their own dtype",
        traced := f"fusedreduce: the first steps of every rank are in {tmp_path / 'out'}: "
        f"fusedreduce trace {tmp_path / 'out'}",
        f"fusedreduce: 3 steps; {UNTIMED}",
        traced,
    ]
    forked = json.loads((tmp_path / "out" / "rank1.json").read_text())
    assert (forked["ranks"], len(forked["steps"])) == (2, 5)


@pytest.mark.parametrize("whats", [("save",), pytest.param(("save", "load"), marks=pytest.mark.full)])
def test_scripts_that_look_at_the_type_or_have_a_class_of_their_own_have_torchs_bits(
    tmp_path: Path, whats: tuple[str, ...]
) -> None:
    script, pickled = SCRIPT.with_name("run_types.py"), str(tmp_path / "wrapper")
    for what in whats:
        program = (str(script), what, pickled)
        plain, _ = run(*TORCHRUN, str(free_port()), *program, cwd=tmp_path)
        ours, told = run(*TORCHRUN, str(free_port()), *RUN, "--wire", "native", *program, cwd=tmp_path)
        of_torch = {line for line in plain if "Replaces" in line}
        reduced = {line.replace("torch._C._distributed_c10d", "fusedreduce.parallel.torch_reducer") for line in plain}
        assert ours == {line for line in reduced if "Replaces" not in line} | of_torch
        assert len(plain) == (12 if what == "save" else 2), "each rank has the last batch's statistics"
        assert len([line for line in told if "is left to torch" in line]) == len(of_torch) // 2 == int(what == "save")
        assert told[0].startswith("fusedreduce: Sequential on 2 ranks: wire native")


@pytest.mark.parametrize(
    "case", [run_cases.default_device_set_late, run_cases.hooks_win, run_cases.refusals_are_shared]
)
def test_ranks(two: RankPool, case: object) -> None:
    two.run(case)  # type: ignore[arg-type]
