"""`python -m fusedreduce.run` in front of real ranks: each way to start them, and what their last weights are."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from run import run_types
from support.collective_cases import free_port
from support.ddp_subclasses import installed_for, is_torchs
from support.ranks import Program, RankPool, on_ranks
from support.timeouts import SETUP_S
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

import fusedreduce
from fusedreduce import ReduceConfig, reducer_of
from fusedreduce.trace.reader import read
from fusedreduce.trace.report import merge

SCRIPT = Path(__file__).with_name("run_train.py").resolve()
RUN = ("-m", "fusedreduce.run")
TORCHS = "torch.nn.parallel.distributed"
OURS = f"{TORCHS} fusedreduce.parallel.torch_reducer "
UNTIMED = "no step time: 0 steps were timed behind the first 32, and 16 are needed"
AGENT = "from torch.distributed.run import main; main()"
TWO = ("--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port")
PATHS = os.pathsep.join(map(str, (SCRIPT.parents[2], SCRIPT.parents[1])))


def run(*arguments: str, cwd: Path) -> tuple[set[str], list[str]]:
    """What the script's ranks have printed, without their number, and our lines."""
    environment = {name: text for name, text in os.environ.items() if not name.startswith("FUSEDREDUCE_")}
    environment |= {"PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SETUP_S,
        check=False,
    )
    return said(done.returncode, done.stdout, done.stderr)


def said(status: int, out: str, err: str) -> tuple[set[str], list[str]]:
    assert status == 0, err
    ranks = re.findall(r"^rank \d (.*)$", out, re.M)
    assert len(ranks) == len(out.splitlines())
    return set(ranks), [line for line in err.splitlines() if line.startswith("fusedreduce: ")]


BF16 = ReduceConfig(wire="bf16")


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def trained(wrapper: nn.Module, rank: int, steps: int = 20) -> list[torch.Tensor]:
    """The weights after some steps, on inputs of this rank's own."""
    generator = torch.Generator().manual_seed(rank)
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        wrapper(torch.randn(4, 16, generator=generator, device="cpu")).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in wrapper.parameters()]


def register(wrapper: DDP, hook: str) -> None:
    if hook == "built in":
        wrapper._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)  # type: ignore[attr-defined]
    elif hook == "powersgd":
        state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=4, min_compression_rate=0.5)
        wrapper.register_comm_hook(state, powerSGD_hook)
    else:
        wrapper.register_comm_hook(None, default_hooks.fp16_compress_hook)


def lines_of_types(rank: int, world: int, what: str, pickled: Path) -> list[str]:
    """What run_types.py prints with torch's class, in these processes."""
    return run_types.lines(what, pickled)


@on_ranks(2)
def test_default_device_set_late(rank: int, world: int) -> None:
    """A script that sets a default device behind the wrapper, which is not its model's, trains as without."""
    wanted = trained(DDP(model()), rank)
    with installed_for(ReduceConfig()):
        wrapper = DDP(model())
        torch.set_default_device("meta")
        try:
            found = trained(wrapper, rank)
        finally:
            torch.set_default_device(None)
    assert all(map(torch.equal, wanted, found))


@on_ranks(2)
def test_hooks_win(rank: int, world: int) -> None:
    """The weights are those of torch's class with that hook, whatever wire was installed."""
    for hook in ("built in", "powersgd", "python"):
        plain = DDP(model())
        register(plain, hook)
        with installed_for(BF16):
            made = DDP(model())
        register(made, hook)
        assert reducer_of(made).config.wire == "native"
        for got, wanted in zip(trained(made, rank), trained(plain, rank), strict=True):
            assert torch.equal(got, wanted), hook


@on_ranks(2)
def test_refusals_are_shared(rank: int, world: int) -> None:
    """Where one rank would be refused all have torch's class, and without fallback all an error."""
    with installed_for(BF16):
        for init_sync in (True, False):
            arguments: dict[str, Any] = {"init_sync": init_sync, "bucket_cap_mb": -1 if rank == 1 else 25}
            if init_sync:
                with pytest.raises((ValueError, fusedreduce.AgreementError), match="bucket_cap_mb"):
                    DDP(model(), **arguments)
            fusedreduce.install(BF16, fallback=True)
            made = DDP(model(), **arguments)
            assert is_torchs(made)
            plain = trained(made, rank)
            fusedreduce.install(BF16)
        fusedreduce.install(ReduceConfig(), fallback=True)
        ours = DDP(model(), init_sync=False)
        assert not is_torchs(ours)
        assert all(map(torch.equal, trained(ours, rank), plain))
        fusedreduce.install(BF16, fallback=rank == 0)
        with pytest.raises(fusedreduce.AgreementError, match="fallback is asked for on rank 0 only"):
            DDP(model())
        fusedreduce.install(BF16, fallback=True)
        # Ranks that were given different models are no refusal: torch's class would raise it too.
        with pytest.raises(fusedreduce.AgreementError, match="appears not to match|same model"):
            DDP(nn.Linear(2, 2 + rank))


def test_in_front_of_torchrun_bf16_sends_half_of_the_bytes_and_leaves_a_trace(tmp_path: Path) -> None:
    """Behind torchrun the command stands below, where weights are held against torch's."""
    launcher = ("--", sys.executable, "-m", "torch.distributed.run", *TWO, str(free_port()))
    flags = ("--wire", "bf16", "--trace", "a/../out")
    [bf16], told = run(*RUN, *flags, *launcher, str(SCRIPT), "--epochs", "13", cwd=tmp_path)
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
    two: RankPool, tmp_path: Path, whats: tuple[str, ...]
) -> None:
    script, pickled = SCRIPT.with_name("run_types.py"), tmp_path / "wrapper"
    for what in whats:
        program = (str(script), what, str(pickled))
        plain = {line for lines in two.run(lines_of_types, what, pickled) for line in lines}
        assert all("torch._C._distributed_c10d" in line or "Replaces" in line for line in plain)
        command = (*TWO, str(free_port()), *RUN, "--wire", "native", *program)
        ours, told = said(*Program(AGENT, *command, environment={"PYTHONPATH": PATHS}, folder=tmp_path).ended())
        of_torch = {line for line in plain if "Replaces" in line}
        reduced = {line.replace("torch._C._distributed_c10d", "fusedreduce.parallel.torch_reducer") for line in plain}
        assert ours == {line for line in reduced if "Replaces" not in line} | of_torch
        assert len(plain) == (12 if what == "save" else 2), "each rank has the last batch's statistics"
        assert len([line for line in told if "is left to torch" in line]) == len(of_torch) // 2 == int(what == "save")
        assert told[0].startswith("fusedreduce: Sequential on 2 ranks: wire native")
