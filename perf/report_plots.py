"""Pictures of docs/measurements.md: shares of the copy's rate, costs of synchronising.

Every picture is of one record and named after it. matplotlib is imported when one is drawn: the page's text needs none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import report_link
import report_wires
from records import BenchError
from render import Record
from report_tables import OURS, TORCH_CASE, family, is_torchs

WIDTH_INCHES, DPI = 9.0, 110
OURS_COLOUR, TORCH_COLOUR = "#2060a0", "#b0b0b0"


def pictures(record: Record) -> dict[str, Callable[[Path], None]]:
    """What saves each picture of a record, by file name; the first is shown beside its table."""
    of_family = family(record["what"])
    made: Mapping[str, Callable[[Record], Callable[[Path], None] | None]] = {}
    if of_family == "link":
        # Pages of their own show the network's, whose other records are parts of it, or training.
        made = NETWORK if record["what"] == "link" else {}
    elif of_family is not None and of_family in PICTURES:
        made = {f"performance_{record['what']}_{record['device']}.png": PICTURES[of_family]}
    found = {name: of(record) for name, of in made.items()}
    return {name: save for name, save in found.items() if save is not None}


def draw(save: Callable[[Path], None], path: Path) -> None:
    """Draws one of `pictures`.

    Raises:
        BenchError: matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise BenchError("the pictures take matplotlib: pip install '.[demo]', or --text-only") from error
    matplotlib.use("Agg")
    save(path)


def _bars(rows: list[tuple[str, float, str]], axis: str, title: str, mark: float) -> Callable[[Path], None] | None:
    """Horizontal bars of (name, length, colour), and a line at `mark`; None where there are none."""
    if not rows:
        return None

    def save(path: Path) -> None:
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(WIDTH_INCHES, 0.9 + 0.22 * len(rows)), layout="constrained")
        names, lengths, colours = zip(*reversed(rows), strict=True)
        places = range(len(rows))
        axes.barh(places, lengths, color=colours)
        axes.set_yticks(places, names, fontsize=8)
        axes.axvline(mark, color="black", linewidth=0.8)
        axes.set_xlabel(axis)
        axes.set_title(title, fontsize=10)
        figure.savefig(path, dpi=DPI, metadata={"Software": None})
        pyplot.close(figure)

    return save


def _kernels(record: Record) -> Callable[[Path], None] | None:
    """Share of the copy's rate, ours and the fastest of torch's, of fp32 gradients on a bf16 wire."""
    rows = []
    for row in record["rows"]:
        if row["cache"] != "cold" or row["pair"] != "fp32-bf16" or row["direction"] == "after":
            continue
        shares = {name: values["share_copy"] for name, values in row["variants"].items()}
        best = max(filter(is_torchs, shares), key=lambda name: float(shares[name]))
        where = f"{row['direction']}, {row['model']}, {row['way']}"
        rows.append((f"{where}: ours", shares[OURS], OURS_COLOUR))
        rows.append((best.removeprefix(TORCH_CASE), shares[best], TORCH_COLOUR))
    return _bars(rows, "share of the rate of a copy of as many bytes", f"fp32 to bf16 and back, {_where(record)}", 1.0)


def _step(record: Record) -> Callable[[Path], None] | None:
    """Synchronisation as a share of torch DDP's best."""
    rows = []
    for row in (row for row in record["rows"] if row["part"] == "steps"):
        for name, values in row["variants"].items():
            if values["ratio"] is not None:
                ours = "ours" in name or "fused" in name
                rows.append((f"{row['case']}: {name}", values["ratio"], OURS_COLOUR if ours else TORCH_COLOUR))
    title = f"synchronisation, {record['ranks']} ranks, {record['backend']}, {_where(record)}"
    return _bars(rows, "of the best of torch DDP's (less is better)", title, 1.0)


def _where(record: Record) -> str:
    return f"{str(record['hardware']).split(',')[0]}, {str(record['created'])[:10]}"


# From a record to what saves its picture; None where there is nothing to draw.
PICTURES: Mapping[str, Callable[[Record], Callable[[Path], None] | None]] = {
    "kernels": _kernels,
    "step": _step,
    "errors": report_wires.picture,
}
# Those of steps over links, by file name: the README's and that of the page on wires.
NETWORK: Mapping[str, Callable[[Record], Callable[[Path], None] | None]] = {
    report_link.PICTURE: report_link.picture,
    report_wires.PICTURE: report_wires.steps_picture,
}
