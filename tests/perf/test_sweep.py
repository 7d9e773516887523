"""perf/sweep.py without a GPU: its plumbing, its check of results, its ranking."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import kernel_cases
import pytest
import sweep
import timing
import torch
import workload
from records import BenchError


@pytest.fixture(autouse=True)
def few_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "MOST_SETS", 2)


def test_a_rehearsal_writes_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cases, "prove_path", lambda device: None)
    monkeypatch.setattr(sys, "argv", ["sweep.py", "--rehearse", "--out", str(tmp_path)])
    assert sweep.main() == 0
    written = json.loads((tmp_path / "sweep.json").read_text())
    assert len(written["rows"]) == 2 * len(sweep.WORKLOADS) and written["rehearsal"]
    (best, worst) = written["ranking"]
    assert 1 <= best["slower"] <= worst["slower"] and best["rows"] == 2 * len(sweep.WORKLOADS)
    assert len({shape.name for shape in sweep.SHAPES}) == 48


def test_after_its_time_no_workload_is_begun() -> None:
    rows: list[dict[str, Any]] = []
    sweep.sweep(torch.device("cpu"), rows.append, rounds=2, ends_s=time.monotonic(), rehearse=True)
    assert not rows


def test_a_wrong_shape_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload.Workload, "unpacked", lambda work: [one.memory + 1 for one in work.sets])
    rows: list[dict[str, Any]] = []
    with pytest.raises(BenchError, match="in use is wrong"):
        sweep.sweep(torch.device("cpu"), rows.append, rounds=2, rehearse=True)
    assert {row["direction"] for row in rows} == {"pack"}


def test_the_shape_that_is_nowhere_slow_is_the_best() -> None:
    def row(**slower: float) -> dict[str, Any]:
        return {"shapes": {name: {"slower": s, "ratio": s} for name, s in slower.items()}}

    rows = [row(a=1.0, b=1.1, c=1.0), row(a=1.3, b=1.0)]
    assert [(one["shape"], one["slower"]) for one in sweep.ranking(rows)] == [("b", 1.1), ("a", 1.3)]
    assert not sweep.ranking([])
