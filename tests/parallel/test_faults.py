"""A peer that dies, stops or leaves in the middle of a step: the others raise in time, name the bucket, and exit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.ranks import RANKS_ENVIRONMENT, Program
from support.timeouts import PATIENT_S, SETUP_S

RANK = "from support.fault_rank import main; main()"


class Fresh:
    """As `Program`, in an interpreter of its own, which ends as a user's does."""

    def __init__(self, source: str, *arguments: str) -> None:
        tests = str(Path(__file__).resolve().parents[1])
        path = os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-c", source, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **RANKS_ENVIRONMENT, "PYTHONPATH": path},
        )

    def ended(self) -> tuple[int, str, str]:
        out, err = self._process.communicate(timeout=SETUP_S)
        return self._process.returncode, out, err

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def survivors_raise(
    folder: Path, world: int, *arguments: str, named: str, rank_of: type[Fresh] | type[Program] = Program
) -> None:
    """Runs ranks of which the last goes away; each of the others raises in time and names what has failed.

    Args:
        folder: an empty one.
        world: number of ranks.
        arguments: of fault_rank.py, behind rank, world and store.
        named: what the error names, as a regular expression.
        rank_of: what a rank is.
    """
    store = str(folder / "store")
    ranks = [rank_of(RANK, str(rank), str(world), store, *arguments) for rank in range(world)]
    try:
        for rank, process in enumerate(ranks[:-1]):
            status, out, err = process.ended()
            assert status != 0 and "finished" not in out, out
            assert re.search(rf"fusedreduce\.errors\.CollectiveError: rank {rank}: .*{named}", err), err
            waited = re.search(r"raised after ([\d.]+) s", out)
            assert waited is not None and float(waited[1]) < PATIENT_S
    finally:
        for process in ranks:
            process.close()


@pytest.mark.parametrize(
    ("world", "wire", "as_view", "fault", "step"),
    [
        (2, "native", "copy", "kill", 0),
        (3, "fp16", "view", "kill", 3),
        (2, "bf16", "copy", "stop", 3),
        (2, "native", "view", "leave", 3),
    ],
)
def test_survivors_raise_in_time_and_name_the_bucket(
    tmp_path: Path, world: int, wire: str, as_view: str, fault: str, step: int
) -> None:
    named = r"all-reduce of bucket \d+ \(\d+ parameters of shapes \("
    fresh = Fresh if fault == "leave" else Program
    survivors_raise(tmp_path, world, wire, as_view, fault, str(step), named=named, rank_of=fresh)


# In a process of its own: a child of one with a long history may crash.
FORKS = """
import os
import signal
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import fusedreduce

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
wrapper = fusedreduce.DistributedDataParallel(nn.Linear(2, 2))
hooked = DistributedDataParallel(nn.Linear(2, 2))
hooked.register_comm_hook(fusedreduce.FusedHookState(), fusedreduce.fused_hook)


def step(model):
    model.zero_grad()
    model(torch.ones(2, 2)).sum().backward()
    assert model.module.weight.grad.tolist() == [[2.0, 2.0]] * 2


uses = [
    lambda: step(wrapper),
    lambda: step(hooked),
    lambda: fusedreduce.DistributedDataParallel(nn.Linear(2, 2)),
]
step(wrapper), step(hooked)
step(hooked)  # torch rebuilds its buckets, with a collective of its own
child = os.fork()
if not child:
    signal.alarm(60)  # what waits for ever ends
    refused = 0
    for use in uses:
        try:
            use()
        except fusedreduce.FusedReduceError as error:
            refused += "forked from the one that made the group" in str(error)
    os._exit(refused)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
step(wrapper), step(hooked)
"""


def test_a_forked_process_is_told_that_it_needs_a_group_of_its_own() -> None:
    """Whose threads stayed where it was made; without that it would wait for ever."""
    Program(FORKS).printed()
