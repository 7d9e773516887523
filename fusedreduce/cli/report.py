"""Output of the demo: the table and demo.json."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import fusedreduce

from .columns import columns
from .results import PROBE_EVERY, Row, write_json

_PACKAGES = ("triton", "numpy", "scikit-learn", "matplotlib")


def _milliseconds(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}" if value < 100 else f"{value:.0f}"


# Two lines of heading, then how a row's cell reads.
_COLUMNS: tuple[tuple[str, str, Callable[[Row], str]], ...] = (
    ("", "variant", lambda row: row.name),
    ("final", "loss", lambda row: f"{row.loss:.4f}"),
    ("test", "accuracy", lambda row: f"{row.accuracy:.2%}"),
    ("gradient", "error", lambda row: f"{row.worst_gradient_error:.1e}"),
    ("wire", "bytes/step", lambda row: f"{row.wire_bytes_per_step:,}"),
    ("step", "ms", lambda row: _milliseconds(row.step_ms)),
    ("of it", "sync ms", lambda row: _milliseconds(row.sync_ms)),
    ("", "share", lambda row: "-" if math.isnan(row.sync_share) else f"{row.sync_share:.0%}"),
    ("launches", "/bucket", lambda row: f"{row.launches_per_bucket:.1f}"),
    ("collectives", "/bucket", lambda row: f"{row.collectives_per_bucket:.1f}"),
    ("", "buckets", lambda row: str(row.buckets)),
    ("", "path", lambda row: row.path),
)


def table(rows: Sequence[Row]) -> str:
    """The rows as text, one line per variant, at most 120 columns wide."""
    headings = [(top, name) for top, name, _ in _COLUMNS]
    return columns(headings, [[show(row) for _, _, show in _COLUMNS] for row in rows], last_is_text=True)


def notes(rows: Sequence[Row], ranks: int) -> str:
    """Explanations of the table's columns."""
    lines = [
        f"{rows[0].name}: {rows[0].setting}.",
        "hook: the same with gradient_as_bucket_view=True and fused_hook at that wire. wrapper: fusedreduce's own",
        "  DistributedDataParallel in its place. scaled: loss scaled, gradients clipped, AdamW fused, with torch's",
        "  GradScaler and clip_grad_norm_ on torch DDP, with FusedGradScaler and our clip_grad_norm_ on the wrapper.",
        "gradient error: max |difference| / max |mean| per parameter, against the fp64 mean of the ranks' local",
        f"  gradients; the worst parameter, rank and step of every {PROBE_EVERY}th step.",
        "step: median of forward, backward, optimizer and zero_grad. sync: by how much that exceeds the median of the",
        f"  same without exchange (no_sync, every {PROBE_EVERY}th step); waiting for the slower rank included.",
        "launches: torch operator calls (no views, no allocations) and Triton launches of a backward, less those under",
        "  no_sync; collectives are counted separately.",
    ]
    if not any(row.path == "triton" for row in rows):
        lines.append("No kernel was compiled here: on CPU this shows that the answers agree, not what a GPU saves.")
    if ranks == 1:
        lines.append("One rank has nobody to exchange gradients with: sync is what the machinery alone costs.")
    return "\n".join(lines)


def write_demo_json(path: Path, rows: Sequence[Row], facts: dict[str, Any]) -> None:
    """Writes demo.json: `facts` about the run, and `variants`. What is not a number becomes null."""
    variants = [_plain(dataclasses.asdict(row)) for row in rows]
    write_json(path, {**_plain(facts), "versions": versions(), "variants": variants})


def as_json(value: Any) -> str:
    """JSON text of plain values, with null for NaN and infinities."""
    return json.dumps(_plain(value), indent=2)


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that figures depend on; None: not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    # From the packages themselves: torch's names its build, and a checkout may not be installed.
    found |= {"torch": str(torch.__version__), "fusedreduce": fusedreduce.__version__}
    return found


def hardware(device: str, ranks: int) -> str:
    """The ranks' hardware, as text."""
    if device == "cuda":
        return f"{ranks} x {torch.cuda.get_device_name(0)}"
    return f"{_processor()}, {len(os.sched_getaffinity(0))} cores"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _plain(value: Any) -> Any:
    """`value` with None for NaN and infinities, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value
