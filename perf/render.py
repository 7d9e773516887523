"""From the rows of a record to tables in Markdown: what a table shows is declared, and rendered here.

A row of a record is a case that was measured, with facts of its own and a set of values per variant (see records.py).
A table has a line per variant of a row, or a line per row; a column is a heading and a cell, a function of the line.
The functions below make cells: a number, its spread, a share. What is shown must be there: a key that is missing is a
KeyError, and None is a dash.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from records import spread_key

Record = Mapping[str, Any]
Row = Mapping[str, Any]
Lines = list[str]

SLOWER = "**slower**"
MORE = "**more**"
MISSED = "**MISSED**"


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of a table: a row of a record, and one of its variants, or None for the row's own facts."""

    record: Record
    row: Row
    variant: str | None = None

    def get(self, key: str, of: Of = None) -> Any:
        """A value of the variant `of`, or else of the line's own, or of the row."""
        which = of(self.row) if callable(of) else of or self.variant
        return (self.row if which is None else self.row["variants"][which])[key]


Cell = Callable[[Line], str]
Of = str | Callable[[Row], str] | None
Columns = Sequence[tuple[str, Cell]]


@dataclass(frozen=True, kw_only=True)
class Table:
    """What a table shows.

    Args:
        columns: heading and cell of each, that of the line's name first; headings may have {fields} of the first row.
        lines: "variants": a table per row, with a line per variant; "rows": one table with a line per row.
        part: of the rows that it is of; None: of all.
        title: above it, with {fields} of the record and of its first row; or what makes it of these two.
        where: which rows it is of.
        order: of the lines; None: as they are.
        folded: it can be opened under these words.
    """

    columns: Columns
    lines: Literal["variants", "rows"] = "variants"
    part: str | None = None
    title: str | Callable[[Record, Row], str] = ""
    where: Callable[[Row], bool] = lambda row: True
    order: Callable[[Line], Any] | None = None
    folded: str = ""

    def render(self, record: Record) -> Lines:
        """Markdown, with an empty line behind each table; none where no row is shown."""
        rows = [row for row in record["rows"] if self.part in (None, row["part"]) and self.where(row)]
        made: Lines = []
        for some in [[row] for row in rows] if self.lines == "variants" else [rows] if rows else []:
            first = some[0]
            if self.lines == "rows":
                shown = [Line(record=record, row=row) for row in some]
            else:
                shown = [Line(record=record, row=first, variant=one) for one in first["variants"]]
            if self.order is not None:
                shown.sort(key=self.order)
            title = self.title(record, first) if callable(self.title) else self.title.format_map({**record, **first})
            headings = [heading.format_map(first) for heading, _ in self.columns]
            cells = ([cell(line) for _, cell in self.columns] for line in shown)
            made += [*([title, ""] if title else []), *table(headings, cells), ""]
        if self.folded and made:
            return [f"<details><summary>{self.folded}</summary>", "", *made, "</details>", ""]
        return made


Shown = Table | Callable[[Record], Lines]


def rendered(shown: Iterable[Shown], record: Record) -> Lines:
    """Tables and what stands between them, in order."""
    lines: Lines = []
    for one in shown:
        lines += one.render(record) if isinstance(one, Table) else one(record)
    while lines and not lines[-1]:
        lines.pop()
    return lines


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Lines:
    """Markdown; numbers to the right, the first column to the left."""
    body = [f"| {' | '.join(row)} |" for row in rows]
    return [f"| {' | '.join(headings)} |", f"| --- |{' ---: |' * (len(headings) - 1)}", *body]


def aligned(lines: Iterable[str]) -> Lines:
    """The same for a terminal: columns padded, and no line of dashes."""
    padded: Lines = []
    held: list[list[str]] = []

    def let_go() -> None:
        widths = [max(map(len, column)) for column in zip(*held, strict=True)]
        for first, *rest in held:
            cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
            padded.append("  ".join(cells).rstrip())
        held.clear()

    for line in lines:
        if line.startswith("| "):
            if not line.startswith("| ---"):
                held.append([cell.strip() for cell in line[1:-1].split("|")])
            continue
        let_go()
        if not line.startswith(("<", "!")):
            padded.append(line)
    let_go()
    return padded


# Cells


def number(value: float | None, places: int = 2) -> str:
    """A number, or a dash where there is none."""
    return "-" if value is None else f"{round(value, places) + 0.0:,.{places}f}"  # + 0.0: no "-0.00"


def ratio_text(ratio: float | None) -> str:
    """A time of ours as a share of another's; above 1 it is marked."""
    if ratio is None:
        return "-"
    return f"{ratio:.2f} {SLOWER}" if ratio > 1.005 else f"{ratio:.2f}"


def share_of(value: float | None, whole: float | None) -> float | None:
    """None where the whole is nothing that can be measured."""
    return None if value is None or whole is None or whole <= 0 else value / whole


def is_ours(line: Line) -> bool:
    """Whether a line is of something of ours."""
    return line.variant is not None and ("ours" in line.variant or "fused" in line.variant)


def name(line: Line) -> str:
    """Of the variant, or of the row's case."""
    return str(line.row["case"] if line.variant is None else line.variant)


def text(key: str, of: Of = None) -> Cell:
    """As it is."""
    return lambda line: "-" if (found := line.get(key, of)) is None else str(found)


def value(key: str, places: int = 2, of: Of = None, *, by: float = 1.0) -> Cell:
    """A number, multiplied by `by`."""
    return lambda line: number(None if (found := line.get(key, of)) is None else by * found, places)


def spread(key: str, places: int = 2, of: Of = None) -> Cell:
    """The 20th and the 80th percentile of what `key` has the median of."""
    return lambda line: " to ".join(number(line.get(spread_key(key, one), of), places) for one in ("p20", "p80"))


def ratio(key: str) -> Cell:
    """A share that the record has, marked above 1 where it is ours that is so slow."""
    return lambda line: (ratio_text if is_ours(line) else number)(line.get(key))


def share(key: str, of: Of) -> Cell:
    """Of the same of another variant, marked as `ratio` does."""
    return lambda line: (ratio_text if is_ours(line) else number)(share_of(line.get(key), line.get(key, of)))


# Demands


def verdict_word(demand: Mapping[str, Any]) -> str:
    """Whether what was demanded was reached: "met", None where that cannot be judged, and then "why_not"."""
    met = demand["met"]
    return f"not judged, {demand['why_not']}" if met is None else "met" if met else "MISSED"


def demand_text(demand: Mapping[str, Any]) -> str:
    """What was demanded and what was found."""
    if demand["met"] is None:
        return f"{demand['what']}: {verdict_word(demand)}"
    words = {"<=": "at most", "<": "less than", ">=": "at least"}[demand["sign"]]
    compared = ""
    if demand.get("of") is not None:
        compared = f" of {demand['of']!r}" if "ratio" not in demand else f", {demand['ratio']:.2f} of {demand['of']!r}"
    found, bound = (_amount(demand[key], demand["unit"]) for key in ("value", "bound"))
    return f"{demand['what']}: {found}{compared}, {words} {bound}"


def _amount(amount: float | None, unit: str) -> str:
    if amount is None:
        return "nothing finite"
    return f"{100 * amount:.4g}%" if unit == "%" else f"{amount:.4g}{unit}"
