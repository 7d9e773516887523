"""The picture of a step: for each rank bars of backward, packing, all-reduce and unpacking."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fusedreduce.trace.chrome import LANES, Lane, Slice, slices
from fusedreduce.trace.files import replace_file
from fusedreduce.trace.report import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which colour-blind readers can tell apart; neighbours in a lane are a shade apart.
_COLOURS: dict[Lane, tuple[str, str]] = {
    "compute": ("#b9c4cf", "#b9c4cf"),
    "pack": ("#e69f00", "#b87f00"),
    "wire": ("#0072b2", "#4a9fd0"),
    "unpack": ("#009e73", "#00775a"),
}
_NAMES = {"compute": "backward", "pack": "pack", "wire": "all-reduce", "unpack": "unpack"}
_EXPOSED, _EXPOSED_TEXT = "#d55e00", "#a34700"
_WAIT = "#cc79a7"
_MOST_RANKS = 8
_BAR = 0.8  # of a lane's height
_NUMBERED = 0.02  # of the width: bars at least as wide carry their bucket's number
_NS_PER_MS = 1e6


def draw(path: Path, run: Run, step: int) -> None:
    """Draws a step and writes a PNG, atomically.

    Args:
        path: the file.
        run: all ranks; the first 8 are shown.
        step: index of the step, counted from the first recorded.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ranks = range(min(len(run.traces), _MOST_RANKS))
    found = [slices(run, rank, step) for rank in ranks]
    begin_ns = min(run.base_ns(rank, step) for rank in ranks)
    end_ns = max([one.end_ns for rows in found for one in rows], default=begin_ns + 1)
    figure, axes = pyplot.subplots(figsize=(12, 1.6 + 1.25 * len(ranks)), layout="constrained")
    for rank in ranks:
        _draw_rank(axes, found[rank], rank * (len(LANES) + 1), begin_ns, max(end_ns - begin_ns, 1))
    _label(axes, run, step, max(end_ns - begin_ns, 1) / _NS_PER_MS)
    _legend(axes)
    try:
        replace_file(path, lambda temporary: figure.savefig(temporary, format="png", dpi=150))
    finally:
        pyplot.close(figure)


def _draw_rank(axes: Axes, found: Sequence[Slice], top: int, begin_ns: int, width_ns: int) -> None:
    """Draws a rank's four lanes from `top` down, with exposed communication behind them."""
    bars: dict[tuple[int, str], list[tuple[float, float]]] = {}  # one call per place and colour, for speed
    waits = []
    for one in found:
        begin_ms, length_ms = (one.begin_ns - begin_ns) / _NS_PER_MS, (one.end_ns - one.begin_ns) / _NS_PER_MS
        place = top + LANES.index(one.lane)
        if one.stage == "exposed":
            axes.broken_barh([(begin_ms, length_ms)], (top - 0.5, len(LANES)), facecolor=_EXPOSED, alpha=0.16, zorder=0)
            said = f"exposed {length_ms:.2f} ms "
            axes.text(begin_ms + length_ms, top, said, ha="right", va="center", color=_EXPOSED_TEXT, fontsize=9)
        elif one.stage != "forward":
            colour = _COLOURS[one.lane][(one.bucket or 0) % 2]
            bars.setdefault((place, colour), []).append((begin_ms, length_ms))
            if one.lane == "pack" and one.waited_ns > 0:
                waits.append((begin_ms - one.waited_ns / _NS_PER_MS, one.waited_ns / _NS_PER_MS))
            if one.bucket is not None and one.end_ns - one.begin_ns > _NUMBERED * width_ns:
                axes.text(
                    begin_ms + length_ms / 2,
                    place,
                    str(one.bucket),
                    ha="center",
                    va="center",
                    color="white",
                    fontsize=8,
                    zorder=3,
                )
    axes.broken_barh(waits, (top + LANES.index("pack") - 0.1, 0.2), facecolor=_WAIT, zorder=1)
    for (place, colour), rows in bars.items():
        axes.broken_barh(rows, (place - _BAR / 2, _BAR), facecolor=colour, zorder=2)


def _label(axes: Axes, run: Run, step: int, width_ms: float) -> None:
    ranks = min(len(run.traces), _MOST_RANKS)
    first = run.traces[0]
    places = [rank * (len(LANES) + 1) + row for rank in range(ranks) for row in range(len(LANES))]
    axes.set_yticks(places, [lane for _ in range(ranks) for lane in LANES], fontsize=9)
    for rank in range(ranks):
        middle = rank * (len(LANES) + 1) + (len(LANES) - 1) / 2
        axes.text(
            -0.075,
            middle,
            f"rank {run.traces[rank].rank}",
            transform=axes.get_yaxis_transform(),
            rotation=90,
            ha="center",
            va="center",
            weight="bold",
            fontsize=9,
        )
    axes.set_ylim(ranks * (len(LANES) + 1) - 1, -0.9)
    axes.set_xlim(0, 1.01 * width_ms)
    axes.set_xlabel("ms since the first rank's backward began")
    shown = f"{len(run.traces)} ranks" if ranks == len(run.traces) else f"the first {ranks} of {len(run.traces)} ranks"
    buckets = len(first.steps[step].marks.buckets)
    axes.set_title(
        f"Step {run.steps[step]}: {shown}, {first.device}, {buckets} buckets", loc="left", fontsize=12, weight="bold"
    )
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e6e6e6")
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _legend(axes: Axes) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(facecolor=_COLOURS[lane][0], label=_NAMES[lane]) for lane in LANES]
    patches.append(Patch(facecolor=_WAIT, label="ready, waiting to be packed"))
    patches.append(Patch(facecolor=_EXPOSED, alpha=0.3, label="exposed communication"))
    axes.legend(
        handles=patches,
        ncols=len(patches),
        loc="upper right",
        bbox_to_anchor=(1.0, 1.0 + 0.02),
        frameon=False,
        fontsize=9,
        borderaxespad=0,
        handlelength=1.2,
        columnspacing=1.2,
    )
