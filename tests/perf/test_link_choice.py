"""Steps choose the wire anew where the link of two ranks becomes slow; over a real one, in namespaces."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import link_network
import pytest
from support.timeouts import SETUP_S

from fusedreduce.reducer import wire_trial

SCRIPT = Path(__file__).with_name("choice_link.py")
SETTLING, TRIAL = 32, 2 * wire_trial.BLOCKS * wire_trial.block(2)


def test_the_wire_follows_a_link_that_becomes_slow_in_the_middle_of_a_run() -> None:
    try:
        link_network.check_allowed()
    except link_network.LinkError as error:
        pytest.skip(f"no network namespaces here: {error}")
    done = subprocess.run(
        link_network.room_command(SCRIPT), capture_output=True, text=True, check=False, timeout=4 * SETUP_S
    )
    assert done.returncode == 0, done.stderr
    _, *by_rank = [json.loads(line) for line in done.stdout.splitlines()]
    first, second = by_rank
    assert first == second, "the same wire at the same step, and the same weights"
    (before, _), (after, wire) = first["chosen"]
    assert wire == "int8"
    # A window that was under way, one on the slow link, a new plan, the trial and its check.
    most = 2 * wire_trial.WINDOW + SETTLING + TRIAL + wire_trial.CHECKED + 10
    assert after - before <= most, first
