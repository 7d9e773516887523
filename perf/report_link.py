"""The section "On a network" of docs/measurements.md, and the picture docs/link.png, from records of bench_link.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from report_words import MISSED, Lines, Record, number, ratio_text, table

PICTURE = "link.png"
BF16, FP16, HOOK = "ours bf16", "ours fp16", "fused_hook bf16, views"
LOCAL = "no DDP"
HEADLINE_MBIT = 1000
POWERSGD = ("torch PowerSGD rank 1", "torch PowerSGD rank 4")
FAILED = "failed"
TITLES = {"resnet18": "ResNet-18", "gpt2-7m": "GPT, 6.9 M parameters", "mlp-8m": "MLP, 8.4 M parameters"}
TORCH_COLOUR, HOOK_COLOUR, OURS_COLOUR, BOUND_COLOUR = "#c9c9c9", "#8f8f8f", "#0072b2", "#d55e00"

Cell = Mapping[str, Any]


def rate_name(rate_mbit: float | None, unlimited: str = "unlimited") -> str:
    """Short, as an axis and a column have it."""
    if rate_mbit is None:
        return unlimited
    return f"{rate_mbit:g} Mbit/s" if rate_mbit < 1000 else f"{rate_mbit / 1000:g} Gbit/s"


def link(record: Record) -> Lines:
    """A table per model with a line per rate, what links carry, and training to a loss."""
    lines: Lines = []
    if record["cells"]:
        lines += [
            f"{record['ranks']} ranks, a core each; a step is zero_grad, forward and backward, and as long as the "
            f"slowest rank's; medians of {record['rounds']} rounds.",
            "",
        ]
    for model in dict.fromkeys(cell["model"] for cell in record["cells"]):
        lines += _model([cell for cell in _by_rate(record["cells"]) if cell["model"] == model])
    if record["links"]:
        lines += _links(_by_rate(record["links"]))
    if record["training"]:
        lines += _training(record["training"])
    if record["verdicts"]:
        lines += _verdicts(record["verdicts"])
    if record["ended_early"] is not None:
        lines += [f"Not all was measured: {record['ended_early']}.", ""]
    return lines[:-1]


def _by_rate(measured: Sequence[Cell]) -> list[Cell]:
    """From the slowest link to one without a limit, in whichever order they were measured."""
    return sorted(measured, key=lambda row: row["rate_mbit"] or math.inf)


def _model(cells: Sequence[Cell]) -> Lines:
    rows, notes = [], []
    for cell in cells:
        name = rate_name(cell["rate_mbit"])
        if cell["not_published"] is not None:
            notes.append(f"Not shown: {name}, {cell['not_published']}.")
            continue
        best = cell["torch_best"]
        rows.append(
            [
                name,
                number(_ms(cell, LOCAL), 0),
                number(_ms(cell, best.get("native")), 0),
                number(_ms(cell, cell["torch_sized"].get("native")), 0),
                _of(cell, cell["ours_best"].get("native"), best.get("native")),
                _bound_of(cell, "native", best.get("native")),
                number(_ms(cell, best.get("bf16")), 0),
                number(_ms(cell, cell["torch_sized"].get("bf16")), 0),
                *(_of(cell, ours, best.get("bf16")) for ours in (BF16, FP16, HOOK)),
                _bound_of(cell, "bf16", best.get("bf16")),
                " / ".join(number(_ms(cell, powersgd), 0) for powersgd in POWERSGD),
                number(cell["aa_ratio"]),
            ]
        )
        notes.append(
            f"{name}: torch's best {best.get('native', '-')!r} and, of 16 bits, {best.get('bf16', '-')!r}; "
            f"of ours native {cell['ours_best'].get('native', '-')!r}."
        )
        notes += [
            f"{name}: {which} {FAILED}: {row['failed']}." for which, row in cell["variants"].items() if row["failed"]
        ]
    first = cells[0]
    title = f"**{TITLES.get(first['model'], first['model'])}**: {first['parameters']:,} tensors, "
    title += f"{first['elements']:,} elements"
    headings = ["link", "no DDP ms", "torch's best, fp32 ms", "with sizes tried", "ours native, of the best", "bound"]
    headings += [
        "torch's best, 16 bits ms",
        "with sizes tried",
        "ours bf16, of the best",
        "ours fp16",
        "hook bf16",
        "bound",
    ]
    headings += ["PowerSGD rank 1 / 4, ms", "the same twice"]
    body = [*table(headings, rows), ""] if rows else []
    folded = [
        "<details><summary>Which of torch's, and what is not shown</summary>",
        "",
        *(f"- {note}" for note in notes),
        "",
        "</details>",
        "",
    ]
    return [f"{title}.", "", *body, *folded]


def _ms(cell: Cell, name: str | None) -> float | None:
    """A variant's median; None: not measured, or failed."""
    row = None if name is None else cell["variants"].get(name)
    return None if row is None or row["failed"] is not None else float(row["step_ms"])


def _of(cell: Cell, ours: str | None, best: str | None) -> str:
    if ours in cell["variants"] and cell["variants"][ours]["failed"] is not None:
        return FAILED
    mine, theirs = _ms(cell, ours), _ms(cell, best)
    return ratio_text(None if mine is None or theirs is None else mine / theirs)


def _bound_of(cell: Cell, wire: str, best: str | None) -> str:
    theirs = _ms(cell, best)
    return number(None if theirs is None else cell["bound_ms"][wire] / theirs)


def _links(links: Sequence[Mapping[str, Any]]) -> Lines:
    rows = []
    for seen in links:
        of_nominal = None if seen["rate_mbit"] is None else seen["on_the_line_mbit"] / seen["rate_mbit"]
        missed = f" {MISSED}" if seen["misses_nominal"] else ""
        sizes = ", ".join(f"{int(size) / 2**20:g} MiB {rate:,.0f}" for size, rate in seen["raw_mbit"].items())
        rows.append(
            [rate_name(seen["rate_mbit"]), number(seen["steady_mbit"], 0), f"{number(of_nominal, 3)}{missed}", sizes]
        )
    headings = ["link", "raw stream, Mbit/s of payload", "with headers, of nominal", "by size of message"]
    return ["What a raw TCP stream carries:", "", *table(headings, rows), ""]


def _training(runs: Sequence[Mapping[str, Any]]) -> Lines:
    rows = [
        [
            f"{run['task']}, {rate_name(run['rate_mbit'])}, {run['variant']}",
            number(run["target"]),
            "not reached" if run["reached_s"] is None else number(run["reached_s"], 1),
            str(run["steps"]),
            number(run["step_ms"], 1),
        ]
        for run in runs
        if run["not_published"] is None
    ]
    reasons = dict.fromkeys(
        f"{rate_name(run['rate_mbit'])}, {run['not_published']}" for run in runs if run["not_published"] is not None
    )
    hidden = [line for reason in reasons for line in (f"Not shown: {reason}.", "")]
    if not rows:
        return hidden
    return ["Training to a loss:", "", *table(["what", "loss", "seconds", "steps", "ms a step"], rows), "", *hidden]


def _verdicts(verdicts: Sequence[Mapping[str, Any]]) -> Lines:
    rows = [
        [
            verdict["what"],
            number(verdict["ours_ms"], 0),
            number(verdict["torch_ms"], 0),
            number(verdict["bound_ms"], 0),
            number(verdict["required_ms"], 0),
            _word(verdict),
        ]
        for verdict in verdicts
    ]
    headings = ["target", "ours ms", "torch's best ms", "bound ms", "required, at most", ""]
    return [*table(headings, rows), ""]


def _word(verdict: Mapping[str, Any]) -> str:
    if verdict["met"] is None:
        return f"not judged, {verdict['why_not']}"
    return "met" if verdict["met"] else MISSED


def missed(record: Record) -> Lines:
    """Targets that were not reached."""
    return [
        f"{verdict['what']}: not judged, {verdict['why_not']}"
        if verdict["met"] is None
        else f"{verdict['what']}: {verdict['ours_ms']:.0f} ms, {number(verdict['ratio'])} of {verdict['of']!r}, "
        f"at most {verdict['required_ms']:.0f} ms"
        for verdict in record["verdicts"]
        if not verdict["met"]
    ]


def summary(record: Record) -> Lines:
    """A line per model: bf16 beside torch's best 16-bit hook, by rate."""
    lines = []
    for model in dict.fromkeys(cell["model"] for cell in record["cells"]):
        words = [
            f"{rate_name(cell['rate_mbit'])} {_of(cell, BF16, cell['torch_best'].get('bf16'))}"
            for cell in _by_rate(record["cells"])
            if cell["model"] == model and cell["not_published"] is None
        ]
        if words:
            lines.append(f"a step of {model} at bf16, as a share of torch's best 16-bit hook's: {', '.join(words)}")
    return lines


def headline(record: Record) -> Lines:
    """For the README: by model what a step takes at 1 Gbit/s, beside torch's."""
    lines = []
    for cell in record["cells"]:
        best, sized = cell["torch_best"], cell["torch_sized"]
        times = [_ms(cell, name) for name in (BF16, best.get("native"), best.get("bf16"), sized.get("bf16"))]
        if cell["rate_mbit"] == HEADLINE_MBIT and cell["not_published"] is None and None not in times:
            ours, native, hook, tried = (number(step_ms, 0) for step_ms in times)
            title = TITLES.get(cell["model"], cell["model"])
            lines.append(
                f"{title}: **{ours} ms** a step, where torch's DDP takes {native}, its best 16-bit hook {hook}, "
                f"and that with the best of several bucket sizes {tried}"
            )
    return lines[:3]


def picture(record: Record) -> Callable[[Path], None] | None:
    """Step time by link speed, a panel per model; None: nothing of that was measured."""
    cells = [cell for cell in _by_rate(record["cells"]) if cell["model"] in TITLES and cell["not_published"] is None]
    shown = [cell for cell in cells if {"native", "bf16"} <= cell["torch_best"].keys() and _ms(cell, BF16) is not None]
    found = list(dict.fromkeys(cell["model"] for cell in shown))
    if not found:
        return None

    def save(path: Path) -> None:
        from matplotlib import pyplot

        figure, panels = pyplot.subplots(
            1, len(found), figsize=(10, 4.4), layout="constrained", squeeze=False, facecolor="white"
        )
        for panel, model in zip(panels[0], found, strict=True):
            _panel(panel, [cell for cell in shown if cell["model"] == model])
            panel.set_title(TITLES[model], fontsize=12, loc="left")
        panels[0][0].set_ylabel("ms per step, median", fontsize=11)
        handles, labels = panels[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=11)
        figure.suptitle(
            f"Time of a training step by link speed, {record['ranks']} ranks on CPU, less is better",
            fontsize=13,
            x=0.01,
            ha="left",
            weight="bold",
        )
        figure.savefig(path, dpi=160, metadata={"Software": None})
        pyplot.close(figure)

    return save


def _panel(panel: Any, cells: Sequence[Cell]) -> None:
    places, width = range(len(cells)), 0.27
    bars = (
        ("torch DDP, fp32", TORCH_COLOUR, [_ms(cell, cell["torch_best"]["native"]) for cell in cells]),
        ("torch DDP, its best 16-bit hook", HOOK_COLOUR, [_ms(cell, cell["torch_best"]["bf16"]) for cell in cells]),
        ("fusedreduce, bf16", OURS_COLOUR, [_ms(cell, BF16) for cell in cells]),
    )
    for index, (label, colour, heights) in enumerate(bars):
        panel.bar([place + (index - 1) * width for place in places], heights, width, color=colour, label=label)
    for place, cell in zip(places, cells, strict=True):
        bound = cell["bound_ms"]["bf16"]
        (line,) = panel.plot([place - 0.45, place + 0.45], [bound, bound], color=BOUND_COLOUR, linewidth=2)
        if place == 0:
            line.set_label("least possible with 16 bits")
        panel.annotate(
            f"{_ms(cell, BF16):.0f}",
            (place + width, max(bars[1][2][place] or 0.0, bars[2][2][place] or 0.0, bound)),
            ha="center",
            va="bottom",
            fontsize=9,
            color=OURS_COLOUR,
        )
    names = [rate_name(cell["rate_mbit"], "no limit").replace(" ", "\n") for cell in cells]
    panel.set_xticks(places, names, fontsize=9)
    panel.tick_params(axis="y", labelsize=9)
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(axis="y", color="#e6e6e6")
    panel.set_axisbelow(True)
