"""Files between the demo's processes, as JSON: the launcher's Job for the ranks, and rank 0's Rows."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusedreduce.config import Wire
from fusedreduce.trace.files import replace_text

JOB_FILE = "job.json"
ROWS_FILE = "rows.json"
TRACE_FOLDER = "trace"
PROBE_EVERY = 5  # steps; see demo_worker


@dataclass(frozen=True, kw_only=True)
class Job:
    """The task of every rank.

    Args:
        device: "cpu" or "cuda".
        wires: of the hook and of the wrapper, a row each.
        steps: training steps per variant.
        seed: of the initial weights and of the order of images.
        launcher_pid: parent process; a rank exits when it has lost it.
    """

    device: str
    wires: tuple[Wire, ...]
    steps: int
    seed: int
    launcher_pid: int


@dataclass(frozen=True, kw_only=True)
class Row:
    """One variant's row of the table; names and meanings are those of `variants` in demo.json.

    Args:
        name: the variant.
        setting: how it was built.
        accuracy: share of the held-out images that rank 0's parameters get right.
        loss: mean training loss of the last epoch, over all ranks.
        worst_gradient_error: see `measure.gradient_error`; worst over parameters, probed steps and ranks.
        wire_bytes_per_step: payload that a rank hands to collectives in one step.
        step_ms: median of forward, backward, optimizer and zero_grad; mean over ranks.
        sync_ms: the part of it that exchanging gradients takes; see `demo_worker`.
        sync_share: sync_ms / step_ms.
        launches_per_bucket: see `measure`.
        collectives_per_bucket: c10d calls.
        buckets: per step.
        path: triton, interpreter or torch.
        losses: mean over ranks, per step.
        parameters_equal: every parameter and buffer has the same bytes on every rank.
        difference: which one differs, on which ranks; None: none.
    """

    name: str
    setting: str
    accuracy: float
    loss: float
    worst_gradient_error: float
    wire_bytes_per_step: int
    step_ms: float
    sync_ms: float
    sync_share: float
    launches_per_bucket: float
    collectives_per_bucket: float
    buckets: int
    path: str
    losses: list[float]
    parameters_equal: bool
    difference: str | None


def write_job(folder: Path, job: Job) -> None:
    """Writes `job` into `folder` for the ranks."""
    (folder / JOB_FILE).write_text(json.dumps(dataclasses.asdict(job)))


def read_job(folder: Path) -> Job:
    """Reads the job that `write_job` wrote."""
    fields = json.loads((folder / JOB_FILE).read_text())
    return Job(**{**fields, "wires": tuple(fields["wires"])})


def write_rows(folder: Path, rows: list[Row]) -> None:
    """Writes `rows` into `folder` for the launcher."""
    write_json(folder / ROWS_FILE, [dataclasses.asdict(row) for row in rows])


def read_rows(folder: Path) -> list[Row]:
    """Reads the rows that `write_rows` wrote."""
    return [Row(**fields) for fields in json.loads((folder / ROWS_FILE).read_text())]


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file atomically.

    Args:
        path: the file.
        value: its content.
    """
    text = json.dumps(value, indent=2)
    # A list of numbers, such as hundreds of losses, goes on one line.
    text = re.sub(r"\[[-+\d.eE,\s]+\]", lambda numbers: re.sub(r"\s+", " ", numbers[0]), text)
    replace_text(path, text)
