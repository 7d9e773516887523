"""The tables of docs/design.md, which tests drive."""

from __future__ import annotations

from pathlib import Path

_PAGE = Path(__file__).parents[2] / "docs" / "design.md"


def rows(section: str) -> list[list[str]]:
    """The cells of each row of the table in a section, the head's first."""
    text = _PAGE.read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    found = [row.strip("|").split("|") for row in text.splitlines() if row.startswith("|") and row.strip("|-")]
    return [[cell.strip() for cell in row] for row in found]


def changes() -> dict[tuple[str, str], str]:
    """By state and change what becomes of the state."""
    (_, *heads), *states = rows("Changes")
    return {(state, change): cell for state, *cells in states for change, cell in zip(heads, cells, strict=True)}
