"""`fusedreduce doctor` on two ranks, under torch's launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.fake_driver import CHECKOUT
from support.timeouts import SETUP_S

from fusedreduce.cli import doctor_ranks
from fusedreduce.config import WIRES


def test_two_ranks_under_torchrun(tmp_path: Path) -> None:
    """They find each other, one of them prints, and nothing is left to warn of but cores."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "fusedreduce.cli", "doctor"]
    dropped = ("TRITON_INTERPRET", "RANK", "WORLD_SIZE")
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    environment["PYTHONPATH"] = os.pathsep.join([CHECKOUT, *filter(None, [environment.get("PYTHONPATH")])])
    options = ["--model", "20M", "--backward-ms", "50", "--json"]
    done = subprocess.run(
        [*command, *options],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SETUP_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ranks"] == len(found["machines"]) == 2
    assert [one["text"] for one in found["findings"] if one["about"] == "ranks"] == [
        "2 of 2 connected, with the same versions"
    ]
    rows = found["link"]["rows"]
    assert [row["bytes"] for row in rows] == [*doctor_ranks.SIZES_BYTES] * 4
    assert [row["wire"] for row in rows[::3]] == [*WIRES, "encoded"]
    for row in rows:  # of two ranks each sends as many bytes as there are
        assert row["gbit_per_s"] == pytest.approx(row["bytes"] * 8 / row["ms"] / 1e6)
    assert found["link"]["latency_us"] > 0
    assert [row["size_mib"] for row in found["forecast"]["rows"]] == pytest.approx(
        [76.29, 38.15, 38.15, 19.43, 10.14], abs=0.05
    )
    assert found["forecast"]["wire"] is None and not found["forecast"]["write"], "loopback is no network"
    assert found["forecast"]["of"] == "20,000,000 fp32 parameters, backward of 50.0 ms"
