"""What the tables of docs/measurements.md are made of: cells, marks, numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]
Lines = list[str]

SLOWER = "**slower**"
MORE = "**more**"
MISSED = "**MISSED**"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Lines:
    """Markdown; numbers to the right, the first column to the left."""
    body = [f"| {' | '.join(row)} |" for row in rows]
    return [f"| {' | '.join(headings)} |", f"| --- |{' ---: |' * (len(headings) - 1)}", *body]


def ratio_text(ratio: float | None) -> str:
    """A time of ours as a share of another's; above 1 it is marked."""
    if ratio is None:
        return "-"
    return f"{ratio:.2f} {SLOWER}" if ratio > 1.005 else f"{ratio:.2f}"


def number(value: float | None, places: int = 2) -> str:
    """A number, or a dash where there is none."""
    return "-" if value is None else f"{round(value, places) + 0.0:,.{places}f}"  # + 0.0: no "-0.00"


def share_of(value: float | None, whole: float) -> float | None:
    """None where the whole is nothing that can be measured."""
    return None if value is None or whole <= 0 else value / whole
