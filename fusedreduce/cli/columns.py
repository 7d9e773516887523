"""Tables as text."""

from __future__ import annotations

from collections.abc import Sequence


def columns(headings: Sequence[tuple[str, str]], rows: Sequence[Sequence[str]], *, last_is_text: bool = False) -> str:
    """A table as text: names left-aligned, numbers right-aligned, under two lines of headings.

    Args:
        headings: upper and lower line, per column.
        rows: cells; the first column holds names.
        last_is_text: align the last column to the left too.

    Returns:
        Lines, without a line feed at the end.
    """
    cells = [[top for top, _ in headings], [name for _, name in headings], *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    aligned = [str.ljust, *[str.rjust] * (len(headings) - 1)]
    if last_is_text:
        aligned[-1] = str.ljust
    lines = [
        "  ".join(align(cell, width) for align, cell, width in zip(aligned, line, widths, strict=True)).rstrip()
        for line in cells
    ]
    return "\n".join([*lines[:2], "-" * (sum(widths) + 2 * len(widths) - 2), *lines[2:]])
