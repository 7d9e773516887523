"""Grids of parameters: all cells under `pytest --full`, and otherwise as few as hold any two values together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest


def grid(
    names: Sequence[str],
    rows: Sequence[tuple[Any, ...]],
    marks: Callable[[tuple[Any, ...]], list[pytest.MarkDecorator]] = lambda row: [],
) -> pytest.MarkDecorator:
    """Parametrizes a test with `rows`; what is not needed for every pair of values is marked `full`.

    Args:
        names: of the columns.
        rows: cells of the grid, without those that do not exist.
        marks: of a row, beside that.
    """
    few = pairwise(rows)
    full = [pytest.mark.full]
    marked = [pytest.param(*row, marks=[*marks(row), *([] if row in few else full)]) for row in rows]
    return pytest.mark.parametrize(names, marked, ids=lambda value: getattr(value, "__name__", str(value)))


def pairwise(rows: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Rows among `rows` in which any two values stand together, in their columns, that do so anywhere."""
    pairs = {row: set(itertools.combinations(enumerate(row), 2)) for row in rows}
    left, few = set[Any]().union(*pairs.values()), []
    while left:
        few.append(max(rows, key=lambda row: len(pairs[row] & left)))
        left -= pairs[few[-1]]
    return few
