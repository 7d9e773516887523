"""The demo's results, a row per variant, and how they are shown: progress, table, picture, demo.json."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from fusedreduce.trace.files import replace_file, replace_text

from .columns import columns
from .report import as_json, versions

# Files between the demo's processes.
ROWS_FILE = "rows.json"
TRACE_FOLDER = "trace"
CHECK_EVERY = 10  # steps
_BAR = 40
_TERMINAL_COLUMNS = 80  # if the terminal does not report its width
# Okabe and Ito's colours, which colour-blind readers can tell apart; torch's own row is grey.
_COLOURS = ("#7f7f7f", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_STYLES = ("-", "--", "-.", ":")
_SMOOTH = 0.05  # of the steps are averaged into a point of a loss curve


@dataclass(frozen=True, kw_only=True)
class Row:
    """One variant's row of the table; names and meanings are those of `variants` in demo.json.

    Args:
        name: the variant.
        accuracy: share of the held-out images that are recognised.
        loss: mean of the last epoch, over all ranks.
        worst_loss_difference: of a step's loss from that of torch's own reduction: torch DDP's or torch scaled's.
        exact: that difference must be 0.
        worst_gradient_error: see `demo_worker.gradient_error`; worst over parameters, checked steps and ranks.
        wire_bytes_per_step: gradients that a rank hands to collectives in one step, padding included.
        path: triton, interpreter or torch.
        losses: mean over ranks, per step.
        difference: which parameter or buffer has other bytes on which ranks than on rank 0; None: none.
    """

    name: str
    accuracy: float
    loss: float
    worst_loss_difference: float
    exact: bool
    worst_gradient_error: float
    wire_bytes_per_step: int
    path: str
    losses: list[float]
    difference: str | None


# Two lines of heading, then how a row's cell reads.
_COLUMNS: tuple[tuple[str, str, Callable[[Row], str]], ...] = (
    ("", "variant", lambda row: row.name),
    ("final", "loss", lambda row: f"{row.loss:.4f}"),
    ("test", "accuracy", lambda row: f"{row.accuracy:.2%}"),
    ("losses off", "torch's by", lambda row: f"{row.worst_loss_difference:.1e}" if row.worst_loss_difference else "0"),
    ("gradient", "error", lambda row: f"{row.worst_gradient_error:.1e}"),
    ("wire", "bytes/step", lambda row: f"{row.wire_bytes_per_step:,}"),
    ("", "path", lambda row: row.path),
)
_NOTES = f"""\
torch DDP: torch's own DistributedDataParallel. hook: the same with fused_hook at that wire. wrapper: fusedreduce's
  DistributedDataParallel in its place. scaled: loss scaled and gradients clipped, with torch's GradScaler and
  clip_grad_norm_ on torch DDP, with FusedGradScaler and our clip_grad_norm_ on the wrapper.
losses off torch's by: the largest difference of a step's loss from torch DDP's, or torch scaled's; 0: the same bits.
  What a wire rounds off makes a run as different as another seed would: compare loss and accuracy.
gradient error: max |difference| / max |mean| per parameter, against the fp64 mean of the ranks' local gradients; the
  worst parameter, rank and step of every {CHECK_EVERY}th step.
No times: those of so small a network say nothing about yours. `fusedreduce doctor --model N` forecasts a step on your
  link, and in a clone `fusedreduce bench step` measures some."""


def table(rows: Sequence[Row]) -> str:
    """The rows as text, one line per variant, and what the columns mean."""
    headings = [(top, name) for top, name, _ in _COLUMNS]
    shown = columns(headings, [[show(row) for _, _, show in _COLUMNS] for row in rows], last_is_text=True)
    return f"{shown}\n\n{_NOTES}"


def write_json(path: Path, rows: Sequence[Row], facts: dict[str, Any]) -> None:
    """Writes demo.json: `facts` about the run, and `variants`. What is not a number becomes null."""
    replace_text(path, as_json({**facts, "versions": versions(), "variants": list(map(dataclasses.asdict, rows))}))


def draw(path: Path, rows: Sequence[Row], title: str) -> None:
    """Draws the loss curves and writes a PNG, atomically.

    Args:
        path: the file.
        rows: one per variant. Where they agree their lines lie on top of each other: hence dashes, thin over thick.
        title: what the picture shows.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(11, 4.4), layout="constrained")
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
    axes.set_title(title, loc="left", fontsize=12, weight="bold")
    axes.set_xlabel("step")
    axes.set_ylabel("training loss, running mean")
    axes.grid(axis="y", color="#e6e6e6")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    try:
        replace_file(path, lambda temporary: figure.savefig(temporary, format="png", dpi=150))
    finally:
        pyplot.close(figure)


def _smoothed(losses: Sequence[float]) -> list[float]:
    """Means over the latest steps: single batches of digits are noisy."""
    window = max(1, round(_SMOOTH * len(losses)))
    return [math.fsum(losses[max(0, end - window) : end]) / min(end, window) for end in range(1, len(losses) + 1)]


def show_progress(done: int, total: int, stream: TextIO) -> None:
    """Redraws one line on a terminal where the percentage has changed; elsewhere writes a line at every 10 %.

    Args:
        done: steps that are done; it is called after each.
        total: number of steps.
        stream: where to write.
    """
    before, percent = (100 * steps // total for steps in (done - 1, done))
    live = stream.isatty()
    if done > 1 and (before == percent if live else before // 10 == percent // 10):
        return
    numbers = f"{percent:3d} %  step {done}/{total}"
    line = f"training {numbers}\n"
    if live:
        # A line that wraps cannot be redrawn.
        columns = os.get_terminal_size(stream.fileno()).columns or _TERMINAL_COLUMNS
        width = max(0, min(_BAR, columns - len(f"training [] {numbers}") - 1))
        bar = "#" * (width * done // total)
        line = f"\rtraining [{bar:.<{width}}] {numbers}" + "\n" * (done == total)
    stream.write(line)
    stream.flush()
