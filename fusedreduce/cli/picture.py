"""The demo's picture: loss curves, and time per step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fusedreduce.trace.files import replace_file

from .results import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which colour-blind readers can tell apart; torch's own row is grey.
_COLOURS = ("#7f7f7f", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_STYLES = ("-", "--", "-.", ":")
_SMOOTH = 0.05  # of the steps are averaged into a point of a loss curve


def draw(path: Path, rows: Sequence[Row], title: str, times_title: str) -> None:
    """Draws the picture and writes a PNG, atomically.

    Args:
        path: the file.
        rows: one per variant.
        title: what the picture shows.
        times_title: title of the bars on the right.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.4), width_ratios=(1.15, 1), layout="constrained")
    figure.suptitle(title, fontsize=12, x=0.01, ha="left", weight="bold")
    _losses(left, rows)
    _times(right, rows)
    right.set_title(times_title, loc="left", fontsize=11)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
    try:
        replace_file(path, lambda temporary: figure.savefig(temporary, format="png", dpi=150))
    finally:
        pyplot.close(figure)


def _losses(axes: Axes, rows: Sequence[Row]) -> None:
    """One line per variant. They lie on top of each other where the answers agree: hence dashes, thin over thick."""
    for index, row in enumerate(rows):
        smooth = _smoothed(row.losses)
        axes.plot(
            range(1, len(smooth) + 1),
            smooth,
            color=_COLOURS[index % len(_COLOURS)],
            linestyle=_STYLES[index % len(_STYLES)],
            linewidth=max(1.2, 5.0 - 1.2 * index),
            alpha=0.5 if index == 0 else 1.0,
            label=f"{row.name}, test accuracy {row.accuracy:.1%}",
        )
    if all(math.isfinite(loss) and loss > 0 for row in rows for loss in row.losses):
        axes.set_yscale("log")
    axes.set_title("Training loss", loc="left", fontsize=11)
    axes.set_xlabel("step")
    axes.set_ylabel("cross-entropy, running mean")
    axes.grid(axis="y", color="#e6e6e6")
    axes.legend(frameon=False, fontsize=9)


def _times(axes: Axes, rows: Sequence[Row]) -> None:
    """One bar per variant, torch's at the top: computing, then synchronising."""
    places = range(len(rows))[::-1]
    sync = [max(0.0, row.sync_ms) if math.isfinite(row.sync_ms) else 0.0 for row in rows]
    total = [row.step_ms if math.isfinite(row.step_ms) else 0.0 for row in rows]
    compute = [max(0.0, whole - part) for whole, part in zip(total, sync, strict=True)]
    axes.barh(places, compute, height=0.6, color="#b9c4cf", label="computing")
    bars = axes.barh(places, sync, left=compute, height=0.6, color="#0072b2", label="synchronising gradients")
    axes.bar_label(bars, [f"{row.step_ms:.1f} ms" for row in rows], padding=5, fontsize=9)
    # In white, where the bar is long enough to hold it.
    shares = [f"{row.sync_share:.0%}" if part > 0.12 * max(total) else "" for row, part in zip(rows, sync, strict=True)]
    axes.bar_label(bars, shares, label_type="center", color="white", fontsize=9)
    axes.set_yticks(places, [row.name for row in rows])
    axes.set_xlim(0, 1.15 * max(total) or 1)
    axes.set_ylim(-0.6, len(rows) - 0.05)
    axes.set_xlabel("ms, median")
    axes.grid(axis="x", color="#e6e6e6")
    axes.tick_params(axis="y", length=0)
    axes.legend(frameon=False, fontsize=9, ncols=2, loc="upper left", borderaxespad=0, handlelength=1.2)


def _smoothed(losses: Sequence[float]) -> list[float]:
    """Means over the latest steps: single batches of digits are noisy."""
    window = max(1, round(_SMOOTH * len(losses)))
    return [math.fsum(losses[max(0, end - window) : end]) / min(end, window) for end in range(1, len(losses) + 1)]
