"""The figures of every kernel's machine code, kept in machine_code.json, and what has become worse since.

A row is one kernel on one architecture: registers and spills of the whole, and for each dtype branch

    in_flight_bytes   loads in flight on one multiprocessor: resident warps x bytes of vector loads in a block
    per_16_bytes      instructions of a turn of the tile loop for 16 bytes of the wider side
    loads, stores     accesses to gradients and wire, as "width in bytes x how many"

Worse is: more registers, spills or instructions, fewer bytes in flight, more accesses of some width or narrower.
Example: "16x4 4x1" has 1 access of up to 4 bytes and 5 of up to 16. "8x8 4x1" has 9 of up to 8, where there was 1:
worse. "16x2 4x1" has nowhere more: better.

A compiler of another version makes other code, so a table speaks for the one Triton that it names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

RECORD = Path(__file__).with_name("machine_code.json")
COLUMNS = ("in_flight_bytes", "per_16_bytes", "loads", "stores")


class BranchRow(NamedTuple):
    """One dtype branch. `per_16_bytes` is None where the branch has no loop; accesses are counted by width in bytes."""

    in_flight_bytes: int
    per_16_bytes: float | None
    loads: Mapping[int, int]
    stores: Mapping[int, int]


class Row(NamedTuple):
    """One kernel on one architecture. If it cannot be compiled, `unsupported` is the reason, and the rest is empty."""

    registers: int = 0
    spills: int = 0
    branches: Mapping[str, BranchRow] = {}
    unsupported: str | None = None


class Place(NamedTuple):
    """The key of a row."""

    target: str
    kernel: str


@dataclass(frozen=True)
class Table:
    """All rows, and the version of Triton that compiled them."""

    triton: str
    rows: Mapping[Place, Row]


class Change(NamedTuple):
    """One figure that differs from the record. `branch` is empty for a figure of the whole kernel."""

    kernel: str
    target: str
    branch: str
    figure: str
    was: str
    now: str
    worse: bool

    def __str__(self) -> str:
        branch = f", branch {self.branch}" if self.branch else ""
        return f"{self.kernel} on {self.target}{branch}: {self.figure}: was {self.was}, is {self.now}"


def compare(recorded: Mapping[Place, Row], found: Mapping[Place, Row]) -> list[Change]:
    """Every figure of `found` that differs from the record, worse or better.

    A kernel or branch that one side lacks counts as worse: the record must be complete. Architectures without a row in
    `found` are not compared.

    Args:
        recorded: rows of the record.
        found: rows compiled now.

    Returns:
        The differences.
    """
    targets = {place.target for place in found}
    gone = [place for place in recorded if place.target in targets and place not in found]
    changes = [_change(place, "", "kernel", "recorded", "gone") for place in gone]
    for place, now in found.items():
        was = recorded.get(place)
        if was is None:
            changes.append(_change(place, "", "kernel", "not recorded", "there"))
        else:
            changes += _row_changes(place, was, now)
    return changes


def _row_changes(place: Place, was: Row, now: Row) -> Iterator[Change]:
    if was.unsupported is not None or now.unsupported is not None:
        if was.unsupported != now.unsupported:
            yield _change(place, "", "kernel", _support(was), _support(now), was.unsupported is None)
        return
    for figure in ("registers", "spills"):
        before, after = getattr(was, figure), getattr(now, figure)
        if before != after:
            yield _change(place, "", figure, str(before), str(after), after > before)
    for branch in [*was.branches, *(branch for branch in now.branches if branch not in was.branches)]:
        if branch not in now.branches:
            yield _change(place, branch, "branch", "recorded", "gone")
        elif branch not in was.branches:
            yield _change(place, branch, "branch", "not recorded", "there")
        else:
            yield from _branch_changes(place, branch, was.branches[branch], now.branches[branch])


def _branch_changes(place: Place, branch: str, was: BranchRow, now: BranchRow) -> Iterator[Change]:
    if was.in_flight_bytes != now.in_flight_bytes:
        worse = now.in_flight_bytes < was.in_flight_bytes
        yield _change(place, branch, "in_flight_bytes", str(was.in_flight_bytes), str(now.in_flight_bytes), worse)
    before, after = was.per_16_bytes, now.per_16_bytes
    if before != after:
        yield _change(
            place,
            branch,
            "per_16_bytes",
            "no loop" if before is None else f"{before:g}",
            "no loop" if after is None else f"{after:g}",
            before is None or after is None or after > before,
        )
    for figure, had, has in (("loads", was.loads, now.loads), ("stores", was.stores, now.stores)):
        if had != has:
            yield _change(place, branch, figure, accesses(had), accesses(has), more_or_narrower(had, has))


def more_or_narrower(was: Mapping[int, int], now: Mapping[int, int]) -> bool:
    """Whether some width has more accesses, those of smaller widths counted in, than it had."""
    return any(
        sum(times for of, times in now.items() if of <= width) > sum(times for of, times in was.items() if of <= width)
        for width in now
    )


def accesses(by_width: Mapping[int, int]) -> str:
    """As the table has it: {16: 4, 4: 1} is "16x4 4x1"."""
    return " ".join(f"{width}x{times}" for width, times in sorted(by_width.items(), reverse=True)) or "-"


def dump(table: Table) -> str:
    """The file's text: one line a row, in the order of `table.rows`."""
    lines = [
        f" {json.dumps([*place, row.unsupported])}"
        if row.unsupported is not None
        else f" {json.dumps([*place, row.registers, row.spills, _branches(row)])}"
        for place, row in table.rows.items()
    ]
    head = {"triton": table.triton, "columns": ["target", "kernel", "registers", "spills", {"branch": COLUMNS}]}
    return json.dumps(head)[:-1] + ', "rows": [\n' + ",\n".join(lines) + "\n]}\n"


def load(text: str) -> Table:
    """The table that `dump` wrote.

    Raises:
        ValueError: that is no such text.
    """
    try:
        content = json.loads(text)
        rows = {Place(target, kernel): _row(cells) for target, kernel, *cells in content["rows"]}
        version: Any = content["triton"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a table of machine code: {type(error).__name__}: {error}") from error
    return Table(str(version), rows)


def _row(cells: Sequence[Any]) -> Row:
    if len(cells) == 1:
        return Row(unsupported=str(cells[0]))
    registers, spills, branches = cells
    return Row(
        int(registers),
        int(spills),
        {
            branch: BranchRow(int(in_flight), cost, _by_width(loads), _by_width(stores))
            for branch, (in_flight, cost, loads, stores) in branches.items()
        },
    )


def _branches(row: Row) -> dict[str, list[object]]:
    return {
        branch: [figures.in_flight_bytes, figures.per_16_bytes, accesses(figures.loads), accesses(figures.stores)]
        for branch, figures in row.branches.items()
    }


def _by_width(text: str) -> dict[int, int]:
    pairs = [] if text == "-" else [part.split("x") for part in text.split(" ")]
    return {int(width): int(times) for width, times in pairs}


def _support(row: Row) -> str:
    return "compiled" if row.unsupported is None else f"unsupported ({row.unsupported})"


def _change(place: Place, branch: str, figure: str, was: str, now: str, worse: bool = True) -> Change:
    return Change(place.kernel, place.target, branch, figure, was, now, worse)
