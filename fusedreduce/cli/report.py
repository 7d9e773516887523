"""What the commands' reports have in common: versions, hardware, errors in one line, JSON."""

from __future__ import annotations

import json
import math
import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import fusedreduce

WIDTH = 96  # of a report's text, in columns: as wide as the documentation's site shows
_PACKAGES = ("triton", "numpy", "scikit-learn", "matplotlib")


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


def one_line(error: BaseException) -> str:
    """The error's class and the first line of its message."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def as_json(value: Any) -> str:
    """JSON text of plain values: null for NaN and infinities; a list of numbers, such as losses, is one line."""
    text = json.dumps(_plain(value), indent=2)
    return re.sub(r"\[\n[-+\d.eE,\s]+\]", lambda numbers: re.sub(r"\s+", " ", numbers[0]), text)


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
