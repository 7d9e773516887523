"""What the tables of docs/measurements.md show of each benchmark, and how a benchmark ends.

What is lost is marked: **slower** beside a ratio above 1 to the strongest that it was measured with, **MISSED** beside
what was demanded and not reached.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import records
import report_link
import torch
from render import (
    Cell,
    Columns,
    Line,
    Lines,
    Record,
    Row,
    Shown,
    Table,
    aligned,
    demand_text,
    name,
    number,
    ratio,
    ratio_text,
    rendered,
    share,
    spread,
    text,
    value,
    verdict_word,
)

# Names in the records: of kernels, and of steps as perf/step_variants.py gives them.
OURS, NORMS, NORM = "ours", "ours, norms", "norm behind it, torch's"
TORCH_CASE = "torch: "
NATIVE, NATIVE_VIEWS = "ours native", "ours native, views"
ALWAYS_SHOWN = ("fp32-bf16", "fp32-fp32", "bf16-bf16", "fp32-native", "bf16-native")


def is_torchs(variant: str) -> bool:
    """Whether a variant has nothing of ours in it: torch's own, or what is rebuilt where torch lacks it."""
    return variant.startswith(("torch", "rebuilt"))


# Kernels


def of_ours(row: Row) -> str:
    """The case of ours that a row of kernels is about; "after" (unpack, and a norm behind it) is of earlier records."""
    return NORMS if row["direction"] == "after" else OURS


def fastest(row: Row) -> str:
    """The fastest of torch's."""
    torchs: list[str] = list(filter(is_torchs, row["variants"]))
    return min(torchs, key=lambda one: float(row["variants"][one]["us"]))


def _with_norm(line: Line) -> str:
    """Ours with norms as a share of the fastest of torch's and its norm; none if one has launches in its time."""
    spent = {one: float(values["ratio"]) for one, values in line.row["variants"].items() if not values.get("eager")}
    known = spent.keys() >= {NORMS, NORM, best := fastest(line.row)}
    return ratio_text(spent[NORMS] / (spent[best] + spent[NORM]) if known else None)


def _of_fastest(row: Row) -> float:
    return 1 / float(row["variants"][fastest(row)]["ratio"])


def _telling(row: Row) -> bool:  # "warm": of earlier records, in which the cache had what a call took
    return row["cache"] != "warm" and (_of_fastest(row) > 1 / 0.995 or row["pair"] in ALWAYS_SHOWN)


_KERNELS = (
    ("call", lambda line: name(line) + ("*" if line.row["cache"] == "not cold" else "")),
    ("us", value("us", 1, of_ours)),
    ("p20 to p80", spread("us", 1, of_ours)),
    ("GB/s", value("gbps", 1, of_ours)),
    ("of copy", value("share_copy", 2, of_ours)),
    ("of cast", value("share_cast", 2, of_ours)),
    ("launches", text("launches", of_ours)),
    ("fastest of torch's", lambda line: fastest(line.row).removeprefix(TORCH_CASE)),
    ("its launches", text("launches", fastest)),
    ("ours / it", lambda line: ratio_text(_of_fastest(line.row))),
    ("with the norm", _with_norm),
    ("twice the same", value("noise", 3)),
)


def _kernels_notes(record: Record) -> Lines:
    small = any(row["cache"] == "not cold" for row in record["rows"])
    return ["\\* Too small to be rotated past the cache.", ""] if small else []


# Steps


def _step_title(record: Record, row: Row) -> str:
    parts = [f"{record['ranks']} ranks, {record['backend']}", f"optimizer {record['optimizer']}"]
    parts += [flag for flag, on in (("clipped", record["clip"]), ("scaled loss", record["amp"])) if on]
    best, strongest = row["torch_best"], row["strongest_of_torch"]
    return (
        f"{row['case']}: {row['parameters']:,} parameters, {row['elements']:,} elements; {', '.join(parts)}. The best "
        f"of torch DDP's forms is {best!r}, the strongest of all of torch's {strongest!r}; the same twice: "
        f"{number(row['aa_ratio'])}. Counts and memory are over no DDP's."
    )


_STEPS = (
    ("variant", name),
    ("step ms", value("step_ms")),
    ("p20 to p80", spread("step_ms")),
    ("sync ms", value("sync_ms")),
    ("of the best DDP's", value("ratio")),
    ("of the strongest", share("sync_ms", lambda row: str(row["strongest_of_torch"]))),
    ("operators", value("over_operators", 0)),
    ("collectives", value("over_collectives", 0)),
    ("launches", value("over_launches", 0)),
    ("GPU ms", value("over_gpu_ms", 3)),
    ("held MB", value("over_held_bytes", 1, by=1e-6)),
    ("peak MB", value("over_peak_bytes", 1, by=1e-6)),
)


# Others


def _host_share(line: Line) -> str:
    return "-" if line.variant == report_link.LOCAL else share("us", fastest)(line)


def _share_off(key: str) -> Cell:
    """An error in percent, with two digits that count."""

    def cell(line: Line) -> str:
        found = line.get(key)
        return "-" if found is None else f"{100 * found:#.3g} %"

    return cell


_ERRORS: Columns = (
    ("wire", name),
    *((f"{ranks:,}", _share_off(f"error_{ranks}")) for ranks in (2**power for power in range(1, 11))),
)

TABLES: Mapping[str, Sequence[Shown]] = {
    "kernels": (
        Table(lines="rows", columns=_KERNELS, where=_telling),
        _kernels_notes,
        Table(
            lines="rows",
            columns=_KERNELS,
            where=lambda row: row["cache"] != "warm" and not _telling(row),
            folded="Other pairs of dtypes, none of them lost",
        ),
    ),
    "step": (Table(part="steps", title=_step_title, columns=_STEPS),),
    "link": report_link.TABLES,
    "encoded": (
        Table(
            part="encoded",
            title="{case}, ns per element:",
            columns=(
                ("what", name),
                ("ns", value("ns", 4)),
                ("p20 to p80", spread("ns", 4)),
                ("of the copy", ratio("ratio")),
            ),
        ),
    ),
    "errors": (Table(title="{case}, relative error of the mean, by ranks:", columns=_ERRORS),),
    "host": (
        Table(
            part="slopes",
            title="Host time of a step over no DDP's, against the number of {case}s:",
            columns=(
                ("variant", name),
                ("us per {case}", value("us_slope")),
                ("us besides", value("us_besides")),
                ("worst point off", value("us_worst")),
            ),
        ),
        Table(
            part="points",
            title="{parameters:,} parameters in {buckets:,} buckets:",
            columns=(
                ("variant", name),
                ("us", value("us", 0)),
                ("p20 to p80", spread("us", 0)),
                ("of torch's least", _host_share),
            ),
        ),
    ),
}


def family(what: str) -> str | None:
    """Which tables a record has: "step-clip" those of step. None: none."""
    return next((one for one in TABLES if what == one or what.startswith((f"{one}-", f"{one}_"))), None)


def lines_of(record: Record) -> Lines:
    """A record's tables."""
    return rendered(TABLES[str(family(record["what"]))], record)


def missed(record: Record) -> Lines:
    """What a record was to reach and did not, or what cannot be judged, a bullet each."""
    return [demand_text(one) for one in record["demands"] if not one["met"]]


def publish(
    asked: argparse.Namespace,
    what: str,
    device: torch.device | str,
    *,
    rows: Sequence[Row],
    demands: Sequence[Mapping[str, Any]] = (),
    **settings: Any,
) -> int:
    """Ends a benchmark: writes its record, prints the tables that it gives, and what was demanded.

    Returns:
        The exit status: 1 if a demand is missed, or cannot be judged.
    """
    path = records.write(asked.out, what, device, rows=rows, demands=demands, rehearsal=asked.rehearse, **settings)
    record = records.read(path, published=False)
    print("\n".join(["", *aligned(lines_of(record)), ""]))
    for one in demands:
        print(demand_text(one) + ("" if one["met"] is None else f": {verdict_word(one)}"))
    print(f"\nother work kept {record['others_cores']:.2f} cores busy meanwhile\n{path}")
    return int(not asked.no_check and not asked.rehearse and not all(one["met"] for one in demands))
