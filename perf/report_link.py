"""The section "On a network" of docs/measurements.md, and the picture docs/link.png, from records of bench_link.py."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from link_bound import AUTO, AUTO_WIRES, fixed_pick, reduced_bytes, trial_cost
from render import (
    MISSED,
    Columns,
    Line,
    Lines,
    Record,
    Row,
    Shown,
    Table,
    number,
    ratio_text,
    share_of,
    table,
    value,
    verdict_word,
)
from render import Cell as Render

BF16, FP16, HOOK = "ours bf16", "ours fp16", "fused_hook bf16, views"
ENCODED = ("ours int8", "ours int4")
LOCAL = "no DDP"
HEADLINE_MBIT = 1000
POWERSGD = ("torch PowerSGD rank 1", "torch PowerSGD rank 4")
FAILED = "failed"
TITLES = {"resnet18": "ResNet-18", "gpt2-7m": "GPT, 6.9 M parameters", "mlp-8m": "MLP, 8.4 M parameters"}
TORCH_COLOUR, HOOK_COLOUR, OURS_COLOUR = "#c9c9c9", "#8f8f8f", "#0072b2"
INT8_COLOUR, CHOICE_COLOUR, BOUND_COLOUR = "#56b4e9", "#009e73", "#d55e00"


def rate_name(rate_mbit: float | None, unlimited: str = "unlimited") -> str:
    """Short, as an axis and a column have it."""
    if rate_mbit is None:
        return unlimited
    return f"{rate_mbit:g} Mbit/s" if rate_mbit < 1000 else f"{rate_mbit / 1000:g} Gbit/s"


def cells(record: Record) -> list[Row]:
    """A model at a rate each, from the slowest link to one without a limit, in whichever order they were measured."""
    rows = [row for row in record["rows"] if row["part"] == "steps"]
    return sorted(rows, key=lambda row: row["rate_mbit"] or math.inf)


def step_ms(cell: Row, name: str | None) -> float | None:
    """A variant's median; None: not measured, or failed."""
    row = None if name is None else cell["variants"].get(name)
    return None if row is None or row["failed"] is not None else float(row["step_ms"])


def _of(cell: Row, ours: str | None, best: str | None) -> str:
    if ours in cell["variants"] and cell["variants"][ours]["failed"] is not None:
        return FAILED
    return ratio_text(share_of(step_ms(cell, ours), step_ms(cell, best)))


def _rate(line: Line) -> str:
    return rate_name(line.row["rate_mbit"], line.row.get("link", "unlimited"))


def _time(key: str, wire: str) -> Render:
    """Of the variant that the cell names under this key for this wire."""
    return lambda line: number(step_ms(line.row, line.row[key].get(wire)), 0)


def _beside(ours: str, wire: str) -> Render:
    """A variant of ours, or the best of ours for the wire, as a share of torch's best."""
    return lambda line: _of(line.row, ours or line.row["ours_best"].get(wire), line.row["torch_best"].get(wire))


def _bound(wire: str) -> Render:
    return lambda line: number(
        share_of(line.row["bound_ms"].get(wire), step_ms(line.row, line.row["torch_best"].get(wire)))
    )


_STEPS: Columns = (
    ("link", _rate),
    ("no DDP ms", lambda line: number(step_ms(line.row, LOCAL), 0)),
    ("torch's best, fp32 ms", _time("torch_best", "native")),
    ("with sizes tried", _time("torch_sized", "native")),
    ("ours native, of the best", _beside("", "native")),
    ("bound", _bound("native")),
    ("torch's best, 16 bits ms", _time("torch_best", "bf16")),
    ("with sizes tried", _time("torch_sized", "bf16")),
    ("ours bf16, of the best", _beside(BF16, "bf16")),
    ("ours fp16", _beside(FP16, "bf16")),
    ("hook bf16", _beside(HOOK, "bf16")),
    ("bound", _bound("bf16")),
    ("PowerSGD rank 1 / 4, ms", lambda line: " / ".join(number(step_ms(line.row, one), 0) for one in POWERSGD)),
    ("the same twice", value("aa_ratio")),
)


def _of_bf16(name: str, key: str) -> Render:
    """A variant's step or bytes as a share of our bf16's; what has failed has none."""

    def cell(line: Line) -> str:
        mine, bf16 = (line.row["variants"].get(one) for one in (name, BF16))
        if mine is None or bf16 is None:
            return "-"
        return FAILED if mine["failed"] or bf16["failed"] else number(share_of(mine[key], bf16[key]))

    return cell


_ENCODED: Columns = (
    ("link", _rate),
    ("ours bf16 ms", lambda line: number(step_ms(line.row, BF16), 0)),
    *((f"{name} ms", lambda line, name=name: number(step_ms(line.row, name), 0)) for name in ENCODED),
    *((f"{name}, of bf16's step", _of_bf16(name, "step_ms")) for name in ENCODED),
    *((f"{name}, of its bytes", _of_bf16(name, "sent_bytes")) for name in ENCODED),
    ("PowerSGD rank 4 ms", lambda line: number(step_ms(line.row, POWERSGD[1]), 0)),
)


def _has_encoded(cell: Row) -> bool:
    return cell["not_published"] is None and any(name in cell["variants"] for name in ENCODED)


def shards(record: Record) -> Lines:
    """Of FSDP2's models what a step takes and its reductions send, a line per link and variant, beside torch's."""
    rows = []
    for cell in cells(record):
        for kind in ("HSDP", "FSDP2") if cell["not_published"] is None else ():
            torchs = f"torch {kind}"
            for name in cell["variants"]:
                if name.removeprefix("torch ").split(" ")[0].rstrip(",") != kind:
                    continue
                took, base = step_ms(cell, name), step_ms(cell, torchs)
                sent = reduced_bytes(cell, kind, name)
                rows.append(
                    [rate_name(cell["rate_mbit"]), name, number(took, 0), number(share_of(took, base)), number(sent)]
                )
    if not rows:
        return []
    headings = ["link", "", "step ms", "of torch's at fp32", "bytes sent per element of a shard"]
    lines = [*table(headings, rows), ""]
    if hidden := [note for cell in cells(record) if cell["not_published"] is not None for note in _notes(cell)]:
        lines += [*(f"- {note}" for note in hidden), ""]
    return lines


def choices(record: Record) -> Lines:
    """Where steps chose among wires: a line per model and link, beside the wires by themselves; then beside torch's."""
    rows: list[list[str]] = []
    beside: list[tuple[float, list[str]]] = []
    for cell in cells(record):
        auto, fixed = cell["variants"].get(AUTO), fixed_pick(cell)
        if auto is None or fixed is None or cell["not_published"] is not None:
            continue
        where = [str(TITLES.get(cell["case"], cell["case"])), rate_name(cell["rate_mbit"], cell["link"])]
        since, took = auto["chosen_behind"], step_ms(cell, AUTO)
        singles = {wire: step_ms(cell, f"ours {wire}") for wire in AUTO_WIRES}
        known = {wire: ms for wire, ms in singles.items() if ms is not None}
        quickest = min(known, key=known.__getitem__)
        tried = zip(auto["tried"], auto["expected_ms"], auto["tried_ms"], strict=True)
        rows.append(
            [
                *where,
                *(number(singles[wire], 0) for wire in singles),
                str(auto["chosen"]),
                number(took, 0),
                f"{fixed.removeprefix('ours ')} {number(share_of(took, step_ms(cell, fixed)))}",
                f"{quickest} {number(share_of(took, known[quickest]))}",
                number(cell["aa_ratio"], 3),
                "-" if since is None else str(since),
                number(trial_cost(auto), 0) if auto["tried"] else "-",
                ", ".join(f"{wire} {number(expected_ms, 0)} / {number(ms, 0)}" for wire, expected_ms, ms in tried),
            ]
        )
        for wire in ("native", "bf16"):
            best = cell["torch_sized"].get(wire)
            if (share := share_of(took, step_ms(cell, best))) is not None:
                beside.append((share, [*where, str(best), number(step_ms(cell, best), 0), number(share)]))
    if not rows:
        return []
    headings = ["model", "link", "native ms", "bf16 ms", "int8 ms", "chosen", "auto ms", "of the rule's, by all rounds"]
    headings += ["of the quickest", "the same twice", "chosen behind step", "trial cost, steps", "expected / tried, ms"]
    lines = [*table(headings, rows), ""]
    lines += ["Beside torch's, with bucket sizes tried; where auto is later first:", ""]
    ordered = [row for _, row in sorted(beside, key=lambda one: -one[0])]
    return lines + ([*table(["model", "link", "torch's", "ms", "auto, of it"], ordered), ""] if ordered else [])


def _models(record: Record) -> Lines:
    """A table per model with a line per rate."""
    lines: Lines = []
    found = [cell for cell in cells(record) if cell["torch_best"] or cell["ours_best"] or cell["not_published"]]
    if found:
        lines += [
            f"{record['ranks']} ranks, a core each; a step is zero_grad, forward and backward, and as long as the "
            f"slowest rank's; medians of {record['rounds']} rounds.",
            "",
        ]
    for model in dict.fromkeys(cell["case"] for cell in found):
        mine = [cell for cell in found if cell["case"] == model]
        first = mine[0]
        title = f"**{TITLES.get(model, model)}**: {first['parameters']:,} tensors, {first['elements']:,} elements."
        steps = Table(lines="rows", columns=_STEPS, where=lambda cell: cell["not_published"] is None)
        encoded = Table(lines="rows", columns=_ENCODED, where=_has_encoded)
        lines += [title, "", *(line for one in (steps, encoded) for line in one.render({**record, "rows": mine}))]
        lines += ["<details><summary>Which of torch's, and what is not shown</summary>", ""]
        lines += [*(f"- {note}" for cell in mine for note in _notes(cell)), "", "</details>", ""]
    return lines


def _notes(cell: Row) -> Lines:
    rate, best = rate_name(cell["rate_mbit"]), cell["torch_best"]
    if cell["not_published"] is not None:
        return [f"Not shown: {rate}, {cell['not_published']}."]
    return [
        f"{rate}: torch's best {best.get('native', '-')!r} and, of 16 bits, {best.get('bf16', '-')!r}; "
        f"of ours native {cell['ours_best'].get('native', '-')!r}.",
        *(f"{rate}: {which} {FAILED}: {row['failed']}." for which, row in cell["variants"].items() if row["failed"]),
    ]


def _of_nominal(line: Line) -> str:
    seen = line.row
    share = None if seen["rate_mbit"] is None else seen["on_the_line_mbit"] / seen["rate_mbit"]
    return number(share, 3) + (f" {MISSED}" if seen["misses_nominal"] else "")


def _sizes(line: Line) -> str:
    return ", ".join(f"{int(size) / 2**20:g} MiB {rate:,.0f}" for size, rate in line.row["raw_mbit"].items())


def _targets(record: Record) -> Lines:
    rows = [
        [
            one["what"],
            *(number(one[key], 0) for key in ("value", "torch_ms", "bound_ms", "bound")),
            verdict_word(one).replace("MISSED", MISSED),
        ]
        for one in record["demands"]
        if "torch_ms" in one
    ]
    encoded = [
        [one["what"], number(one["value"]), number(one["bound"]), verdict_word(one).replace("MISSED", MISSED)]
        for one in record["demands"]
        if "torch_ms" not in one
    ]
    headings = ["target", "ours ms", "torch's best ms", "bound ms", "required, at most", ""]
    lines = [*table(headings, rows), ""] if rows else []
    return lines + ([*table(["target", "found", "required, at most", ""], encoded), ""] if encoded else [])


def _ended_early(record: Record) -> Lines:
    return [] if record["ended_early"] is None else [f"Not all was measured: {record['ended_early']}.", ""]


def _forecasts(record: Record) -> Lines:
    from link_forecast import forecast_table  # which needs this file

    rows = [row for row in cells(record) if "forecast_ms" in row]
    lines = forecast_table(rows, [row["forecast_ms"] for row in rows])
    return ["What the model of `fusedreduce doctor` makes of these steps:", "", *lines, ""] if lines else []


TABLES: Sequence[Shown] = (
    _models,
    shards,
    choices,
    _forecasts,
    Table(
        part="links",
        lines="rows",
        title="What a raw TCP stream carries:",
        order=lambda line: line.row["rate_mbit"] or math.inf,
        columns=(
            ("link", _rate),
            ("raw stream, Mbit/s of payload", value("steady_mbit", 0)),
            ("with headers, of nominal", _of_nominal),
            ("by size of message", _sizes),
        ),
    ),
    _targets,
    _ended_early,
)


def summary(record: Record) -> Lines:
    """Per model bf16 beside torch's best 16-bit hook, and that with bucket sizes tried, by rate; then 8 and 4 bits."""
    lines = []
    for model in dict.fromkeys(row["case"] for row in record["rows"] if row["part"] == "steps"):
        shown = [cell for cell in cells(record) if cell["case"] == model and cell["not_published"] is None]
        words = [
            f"{rate_name(cell['rate_mbit'])} {_of(cell, BF16, cell['torch_best'].get('bf16'))}"
            f" ({_of(cell, BF16, cell['torch_sized'].get('bf16'))})"
            for cell in shown
        ]
        if words:
            beside = "torch's best 16-bit hook's (with bucket sizes tried)"
            lines.append(f"a step of {model} at bf16, as a share of {beside}: {', '.join(words)}")
        encoded = [
            f"{rate_name(cell['rate_mbit'])} {' and '.join(_of(cell, wire, BF16) for wire in ENCODED)}"
            for cell in shown
            if any(step_ms(cell, wire) is not None for wire in ENCODED)
        ]
        if encoded:
            lines.append(f"a step of {model} at int8 and int4, as a share of ours at bf16: {', '.join(encoded)}")
    return lines


def headline(record: Record) -> Lines:
    """For the README: by model what a step takes at 1 Gbit/s, beside torch's."""
    lines = []
    for cell in (row for row in record["rows"] if row["part"] == "steps"):
        best, sized = cell["torch_best"], cell["torch_sized"]
        times = [step_ms(cell, name) for name in (BF16, best.get("native"), best.get("bf16"), sized.get("bf16"))]
        if cell["rate_mbit"] == HEADLINE_MBIT and cell["not_published"] is None and None not in times:
            ours, native, hook, tried = (number(step_ms, 0) for step_ms in times)
            title = TITLES.get(cell["case"], cell["case"])
            encoded = zip((8, 4), (step_ms(cell, name) for name in ENCODED), strict=True)
            fewer = ", ".join(f"{number(step_ms, 0)} at {bits} bits" for bits, step_ms in encoded if step_ms)
            lines.append(
                f"- {title}: **{ours} ms** a step, where torch's DDP takes {native}, its best 16-bit hook {hook}, "
                f"and that with the best of several bucket sizes {tried}" + (fewer and f"; ours takes {fewer}")
            )
    return lines[:3]


def picture(record: Record) -> Callable[[Path], None] | None:
    """Step time by link speed, a panel per model; None: nothing of that was measured."""
    mine = [cell for cell in cells(record) if cell["case"] in TITLES and cell["not_published"] is None]
    shown = [
        cell for cell in mine if {"native", "bf16"} <= cell["torch_best"].keys() and step_ms(cell, BF16) is not None
    ]
    found = list(dict.fromkeys(cell["case"] for cell in shown))
    if not found:
        return None

    def save(path: Path) -> None:
        title = f"Time of a training step by link speed, {record['ranks']} ranks on CPU, less is better"
        with panels(path, [TITLES[model] for model in found], "ms per step, median", title, columns=3) as axes:
            for panel, model in zip(axes, found, strict=True):
                _panel(panel, [cell for cell in shown if cell["case"] == model])

    return save


@contextlib.contextmanager
def panels(
    path: Path, titles: Sequence[str], label: str, title: str = "", *, columns: int, sharey: bool = False
) -> Iterator[Sequence[Any]]:
    """A picture's axes, side by side, to draw on; saved behind it, with one legend in so many columns."""
    from matplotlib import pyplot

    figure, [axes] = pyplot.subplots(
        1, len(titles), figsize=(10, 4.4), layout="constrained", squeeze=False, sharey=sharey, facecolor="white"
    )
    for panel, of_panel in zip(axes, titles, strict=True):
        panel.set_title(of_panel, fontsize=12, loc="left")
        panel.tick_params(axis="y", labelsize=9)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", color="#e6e6e6")
        panel.set_axisbelow(True)
    axes[0].set_ylabel(label, fontsize=11)
    yield axes
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=10)
    if title:
        figure.suptitle(title, fontsize=13, x=0.01, ha="left", weight="bold")
    figure.savefig(path, dpi=160, metadata={"Software": None})
    pyplot.close(figure)


def rates_below(panel: Any, shown: Sequence[Row]) -> None:
    """The links' rates under a panel."""
    names = [rate_name(cell["rate_mbit"], "no limit").replace(" ", "\n") for cell in shown]
    panel.set_xticks(range(len(shown)), names, fontsize=9)


def _panel(panel: Any, shown: Sequence[Row]) -> None:
    places, width = range(len(shown)), 0.17
    bars = (
        ("torch DDP, fp32", TORCH_COLOUR, [step_ms(cell, cell["torch_best"]["native"]) for cell in shown]),
        ("torch DDP, best 16-bit hook", HOOK_COLOUR, [step_ms(cell, cell["torch_best"]["bf16"]) for cell in shown]),
        ("fusedreduce, bf16", OURS_COLOUR, [step_ms(cell, BF16) for cell in shown]),
        ("fusedreduce, int8", INT8_COLOUR, [step_ms(cell, ENCODED[0]) or 0.0 for cell in shown]),
        ("fusedreduce, chosen by steps", CHOICE_COLOUR, [step_ms(cell, AUTO) or 0.0 for cell in shown]),
    )
    for index, (label, colour, heights) in enumerate(bars):
        panel.bar([place + (index - 2) * width for place in places], heights, width, color=colour, label=label)
    for place, cell in zip(places, shown, strict=True):
        bound = cell["bound_ms"]["bf16"]
        (line,) = panel.plot([place - 0.45, place + 0.45], [bound, bound], color=BOUND_COLOUR, linewidth=2)
        if place == 0:
            line.set_label("least possible with 16 bits")
        panel.annotate(
            f"{step_ms(cell, BF16):.0f}",
            (place, max(*(heights[place] or 0.0 for _, _, heights in bars[1:]), bound)),
            ha="center",
            va="bottom",
            fontsize=9,
            color=OURS_COLOUR,
        )
    rates_below(panel, shown)
