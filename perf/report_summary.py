"""What the summary of docs/performance.md says of each benchmark: a line or two that a reader decides by."""

from __future__ import annotations

import re
from collections.abc import Sequence

import report_link
from render import MORE, SLOWER, Lines, Record, Row, number, ratio_text, share_of
from report_link import BF16, HOOK, LOCAL
from report_tables import NATIVE, NATIVE_VIEWS, OURS, is_torchs

TORCH_DEFAULT, TORCH_VIEWS = "torch DDP", "torch DDP, views"
TORCH_BF16 = "torch bf16_compress_hook, views"
DECIDING = (NATIVE, NATIVE_VIEWS, BF16, HOOK)


def summary(record: Record) -> Lines:
    """What a reader decides by: a line or two of a record, with what is lost in them; [] for most."""
    what = record["what"]
    if record["device"] != "cpu" and re.match(r"step\b", what):  # as many ranks as GPUs
        return [*_step_summary(record), *_gpu_time_summary(record)]
    if what == "step":
        return [*_step_summary(record), *_memory_summary(record)]
    made = {
        "kernels": _kernels_summary,
        "link": report_link.summary,
    }.get(what)
    if record["device"] != "cpu":  # on a CPU steps say it
        made = made or {"host": _host_summary, "encoded": _encoded_summary}.get(what)
    return [] if made is None else made(record)


def _host_summary(record: Record) -> Lines:
    """One line: what the host takes of a step, which a GPU that is ahead of it waits for."""
    slopes = {row["case"]: row["variants"] for row in _rows(record, "slopes")}
    shown = [one for one in slopes.get("bucket", {}) if one in slopes["parameter"] and not one.endswith("again")]
    words = [
        f"{one} {number(slopes['bucket'][one]['us_slope'], 0)} and {number(slopes['parameter'][one]['us_slope'], 1)}"
        for one in shown
    ]
    return [f"the host's us per bucket and per parameter of a step: {', '.join(words)}"] if words else []


def _encoded_summary(record: Record) -> Lines:
    """A line per encoding: its time as a share of a copy's of the same fp32 elements."""
    lines = []
    for encoding in dict.fromkeys(row["encoding"] for row in record["rows"]):
        rows = [row["variants"] for row in record["rows"] if row["encoding"] == encoding]
        words = [f"{what} {_range([row[what]['ratio'] for row in rows])}" for what in ("encode", "decode")]
        lines.append(f"{encoding}: {', '.join(words)} of the time of a copy of the same fp32 elements")
    return lines


def _rows(record: Record, part: str) -> list[Row]:
    return [row for row in record["rows"] if row["part"] == part]


def _kernels_summary(record: Record) -> Lines:
    """A line per direction."""
    lines = []
    for direction in ("pack", "unpack"):
        rows = [row for row in record["rows"] if row["cache"] != "warm" and row["direction"] == direction]
        if not rows:
            continue
        ratios = [1 / min(one["ratio"] for key, one in row["variants"].items() if is_torchs(key)) for row in rows]
        slower = sum(ratio > 1.005 for ratio in ratios)
        lost = f", {slower} of them {SLOWER}" if slower else ""
        shares = [row["variants"][OURS]["share_copy"] for row in rows]
        lines.append(
            f"{direction}, {len(rows)} cases{lost}: {_range(ratios)} of the time of the fastest of torch's ways; "
            f"{_range(shares)} of a copy's rate"
        )
    return lines


def _step_summary(record: Record) -> Lines:
    """A line per model."""
    lines = []
    for row in _rows(record, "steps"):
        variants, strongest = row["variants"], row["strongest_of_torch"]
        shares = [
            f"{one} {ratio_text(share_of(variants[one]['sync_ms'], variants[strongest]['sync_ms']))}"
            for one in DECIDING
            if one in variants
        ]
        which = f"synchronising {row['case']}, {record['ranks']} ranks, as a share of {strongest!r}"
        lines.append(f"{which}: {', '.join(shares)}")
    return lines


def _gpu_time_summary(record: Record) -> Lines:
    """A line per model: what the GPU does beyond a step without DDP, beside collectives."""
    lines = []
    for row in _rows(record, "steps"):
        variants, best = row["variants"], row["torch_best"]
        words = [
            f"{one} {number(variants[one]['over_gpu_ms'], 2)} in {number(variants[one]['over_launches'], 0)}"
            for one in dict.fromkeys((TORCH_DEFAULT, TORCH_VIEWS, best, TORCH_BF16, *DECIDING))
            if one in variants
        ]
        lines.append(f"ms on the GPU, and launches, for a step of {row['case']} beyond no DDP's: {', '.join(words)}")
    return lines


def _memory_summary(record: Record) -> Lines:
    """A line per model: what is held after a step beyond one without DDP, and where that is more than torch's least."""
    lines = []
    for row in _rows(record, "steps"):
        of_all = {one: found["over_held_bytes"] for one, found in row["variants"].items() if one != LOCAL}
        held = {one: bytes_ for one, bytes_ in of_all.items() if bytes_ is not None}
        if held:
            least = min(bytes_ for one, bytes_ in held.items() if is_torchs(one))
            words = [
                f"{one} {number(held[one] / 1e6, 1)}{f' {MORE}' if not is_torchs(one) and held[one] > least else ''}"
                for one in (TORCH_DEFAULT, TORCH_VIEWS, *DECIDING)
                if one in held
            ]
            lines.append(f"MB held after a step of {row['case']} beyond no DDP's: {', '.join(words)}")
    return lines


def _range(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.2f} to {max(ratios):.2f}"
