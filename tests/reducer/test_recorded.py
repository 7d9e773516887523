"""A step does what it did when it was recorded: collectives and their order, bytes, allocations, `.grad`, names.

For what is meant to change: `python tests/record.py` writes the record anew, and `git diff` shows what has changed.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
from support import recorded
from support.grids import pairwise
from support.recorded_cases import Cell, cells, lines


@functools.cache
def _record() -> dict[str, list[str]]:
    return recorded.read()


# Wires that take the same way through a step.
KINDS = {"fp16": "bf16", **dict.fromkeys(("int4", "int8 stochastic", "by name", "bf16+fp32"), "int8")}


def _few() -> list[Cell]:
    """As few as hold any two of door, kind of wire, mode and situation together; wires of a kind take turns."""
    alike: dict[tuple[str, ...], list[Cell]] = {}
    for cell in cells():
        alike.setdefault(cell._replace(wire=KINDS.get(cell.wire, cell.wire)), []).append(cell)
    return [alike[one][turn % len(alike[one])] for turn, one in enumerate(pairwise(list(alike)))]


FEW = _few()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    Cell._fields, [pytest.param(*cell, marks=[] if cell in FEW else [pytest.mark.full]) for cell in cells()]
)
def test_a_cell_does_what_it_did(door: str, wire: str, mode: str, situation: str) -> None:
    cell = Cell(door, wire, mode, situation)
    assert not (found := recorded.difference(str(cell), _record().get(str(cell)), lines(cell))), found


def test_the_record_has_the_cells_that_there_are() -> None:
    assert list(_record()) == list(map(str, cells()))


def test_what_is_written_is_read() -> None:
    record = _record()
    assert recorded.text(record) == recorded.RECORD.read_text()


SAID = [
    "step 1, all ranks: all_reduce f32 8, all_gather i64 2 | new 1 of 32 bytes | idle",
    "stats, all ranks: none | a=1",
]


@pytest.mark.parametrize(
    ("now", "sentence"),
    [
        (SAID, ""),
        (
            [SAID[0].replace("8, all_gather i64 2", "8"), SAID[1]],
            "step 1, all ranks differs first in: all_reduce f32 8;",
        ),
        ([SAID[0].replace("all ranks", "rank 1"), SAID[1]], "step 1, rank 1 comes in place of step 1, all ranks"),
        (SAID[:1], "in stats, all ranks there is no more: none | a=1"),
        ([*SAID, "step 2, rank 0: none"], "in step 2, rank 0 there is more than was recorded: none"),
        ([SAID[0], SAID[1].replace("a=1", "b=1")], "stats, all ranks differs first in: b=1; recorded: a=1"),
    ],
)
def test_a_difference_is_said(now: Sequence[str], sentence: str) -> None:
    found = recorded.difference("cell", SAID, now)
    assert sentence in found and bool(sentence) == bool(found)
