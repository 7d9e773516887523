"""Importing this makes the modules in perf/ importable by their bare names, as its scripts import each other."""

from __future__ import annotations

import sys
from pathlib import Path

PERF = Path(__file__).resolve().parent.parent / "perf"

if str(PERF) not in sys.path:
    sys.path.append(str(PERF))  # last, so that nothing of the tests' own is shadowed
