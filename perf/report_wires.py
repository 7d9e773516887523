"""What docs/wires.md shows of the records of steps over links, errors and encoded buckets.

A decision and short tables; the picture of steps by link, and that of errors by the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

from render import Lines, Record, Row, number, share_of, table
from report_link import LOCAL, TITLES, cells, panels, rate_name, rates_below, step_ms

from fusedreduce.kernels.encodings import ENCODINGS

BOTH, BF16 = "encode + decode", "pack + unpack, bf16"  # of bench_encoded.py
# Of bench_errors.py.
RING, SUMS, NODES = "bf16, ring", "bf16, fp32 sums", ", nodes of 8"
FLAT_RANKS, NODE_RANKS = (2, 64), (16, 1024)
FP8 = ("fp8 e4m3", "fp8 e5m2")
COLOURS = {RING: "#b0b0b0", SUMS: "#2060a0", "int8": "#2e8b57", "int4": "#c06020"}
SHOWN_RANKS = (2, 8, 64, 256, 1024)
UNKNOWN = "an unknown part"
# From the most bytes to the fewest, as bench_link.py calls them; bf16 is drawn over fp16.
OF_WIRES = {wire: f"ours {wire}" for wire in ("native", "fp16", "bf16", "int8", "int4")}
WIRE_COLOURS = {
    "native": "#8f8f8f",
    "fp16": "#e0b020",
    "bf16": "#0072b2",
    "int8": "#56b4e9",
    "int4": "#2e8b57",
}


def decision(record: Record) -> Lines:
    """Which wire for which link: what each took on the links of the picture, of the one with twice its bytes."""
    bf16, int8, int4 = (_by_rate(record, *pair) for pair in (("bf16", "native"), ("int8", "bf16"), ("int4", "int8")))
    fp16 = _range(record, "fp16", "bf16")
    return [
        f"- **`bf16` to begin with**: half of `native`'s bytes, one rounding, no overflow. A step took {bf16}.",
        f"- **`fp16` in its place** for three more bits, where no mean comes near 65,504. A step took {fp16}.",
        f"- **`int8` where the link decides with `bf16` too**. A step took {int8}.",
        f"- **`int4` where it does with `int8` too**, and your model is seen to bear it. A step took {int4}.",
        "- **`native` where backward hides communication already**, since there is nothing to gain then, and where no "
        "gradient may be rounded.",
    ]


def _shares(record: Record, wire: str, other: str, rate_mbit: float | None) -> list[float]:
    """Of each model with a picture, a step with one wire as a share of the other's."""
    shares = (
        share_of(step_ms(cell, OF_WIRES[wire]), step_ms(cell, OF_WIRES[other]))
        for cell in _pictured(record)
        if cell["rate_mbit"] == rate_mbit
    )
    return [share for share in shares if share is not None]


def _by_rate(record: Record, wire: str, other: str) -> str:
    words: list[str] = []
    for rate_mbit in dict.fromkeys(cell["rate_mbit"] for cell in _pictured(record)):
        if rate_mbit is not None and (shares := _shares(record, wire, other, rate_mbit)):
            beside = "" if words else f" of `{other}`'s"
            words.append(f"{_least_to_most(shares)}{beside} at {rate_name(rate_mbit)}")
    return ", ".join(words) or f"{UNKNOWN} of `{other}`'s"


def _range(record: Record, wire: str, other: str) -> str:
    rates = dict.fromkeys(cell["rate_mbit"] for cell in _pictured(record))
    shares = [share for rate_mbit in rates for share in _shares(record, wire, other, rate_mbit)]
    return f"{_least_to_most(shares)} of `{other}`'s"


def _least_to_most(shares: list[float]) -> str:
    if not shares:
        return UNKNOWN
    least, most = f"{min(shares):.2f}", f"{max(shares):.2f}"
    return least if least == most else f"{least} to {most}"


def _pictured(record: Record) -> list[Row]:
    """Models that the wire decides about, at each rate."""
    return [cell for cell in cells(record) if cell["case"] in TITLES and cell["not_published"] is None]


def steps_picture(record: Record) -> Callable[[Path], None] | None:
    """Step by link speed, a line for each wire, a panel for each model; None: nothing of that was measured."""
    found = _pictured(record)
    models = list(dict.fromkeys(cell["case"] for cell in found))
    if not models:
        return None

    def save(path: Path) -> None:
        from matplotlib import ticker

        title = f"Time of a training step by link and wire, {record['ranks']} ranks on CPU, less is better"
        titles = [TITLES[model] for model in models]
        with panels(path, titles, "ms per step, median", title, columns=6, sharey=True) as axes:
            for panel, model in zip(axes, models, strict=True):
                mine = [cell for cell in found if cell["case"] == model]
                lines = [(wire, name, WIRE_COLOURS[wire], "-") for wire, name in OF_WIRES.items()]
                for label, name, colour, style in (*lines, (LOCAL, LOCAL, "#d55e00", ":")):
                    steps = [(place, step_ms(cell, name)) for place, cell in enumerate(mine)]
                    points = [(place, step) for place, step in steps if step is not None]
                    if points:
                        panel.plot(*zip(*points, strict=True), style, marker="o", ms=4, color=colour, label=label)
                rates_below(panel, mine)
                panel.set_yscale("log", base=2)
                panel.yaxis.set_major_locator(ticker.LogLocator(base=2, subs=(100 / 64,)))  # 100, 200, 400, ...
                panel.yaxis.set_major_formatter("{x:g}")

    return save


def errors(record: Record) -> Lines:
    """Of each wire the largest error over ranks, by what was added up; a ring knows no nodes."""
    ways = (("2 to 64 ranks", "", FLAT_RANKS), ("nodes of 8", NODES, NODE_RANKS))
    lines = [
        [
            f"{row['case']}, {way}",
            *(_largest(row, wire if wire == RING else wire + suffix, ranks) for wire in (*COLOURS, *FP8)),
        ]
        for row in record["rows"]
        for way, suffix, ranks in ways
    ]
    return table(["largest error of the mean", *COLOURS, *FP8], lines)


def _largest(row: Row, name: str, ranks: tuple[int, int]) -> str:
    least, most = ranks
    values = row["variants"].get(name, {})
    found = [one for key, one in values.items() if one is not None and least <= int(key.split("_")[1]) <= most]
    return f"{100 * max(found):#.3g} %" if found else "-"


def here(record: Record) -> Lines:
    """Two ranks on this machine, by measurement: below which speed a link takes longer for what a wire saves it."""
    lines = []
    for row in record["rows"]:
        encoding, spent = ENCODINGS[row["encoding"]], row["variants"]
        more_ns = spent[BOTH]["ns"] - spent[BF16]["ns"]
        saved = 2.0 - encoding.block_bytes / encoding.block_numel  # bytes an element, of the two at bf16
        speed = 8 * saved / more_ns if more_ns > 0 else math.inf
        pays = "any speed" if speed == math.inf else number(speed, 0 if speed >= 10 else 1)
        lines.append([row["case"], number(spent[BOTH]["ns"]), number(spent[BF16]["ns"]), number(saved), pays])
    headings = ["two ranks, measured on CPU", "encode + decode ns", "pack + unpack at bf16 ns"]
    return table([*headings, "bytes saved to bf16", "pays below, Gbit/s"], lines)


def picture(record: Record) -> Callable[[Path], None] | None:
    """Error against the number of ranks, of normal values and of values of one sign."""
    rows = [row for row in record["rows"] if row["case"] in ("Gaussian", "one sign")]
    if not rows:
        return None

    def save(path: Path) -> None:
        titles = [row["case"] for row in rows]
        with panels(path, titles, "relative error of the mean, %", columns=4, sharey=True) as axes:
            for panel, row in zip(axes, rows, strict=True):
                for name, colour in COLOURS.items():
                    for suffix, style in (("", "-"), (NODES, "--")):
                        values = row["variants"].get(name + suffix, {})
                        points = [(int(key.split("_")[1]), 100 * one) for key, one in values.items() if one is not None]
                        if points:
                            label = name + suffix if name != RING else "bf16, torch's ring"
                            panel.plot(*zip(*points, strict=True), style, marker="o", ms=3, color=colour, label=label)
                panel.set_xscale("log", base=2)
                panel.set_yscale("log")
                panel.set_xticks(SHOWN_RANKS, [f"{ranks:,}" for ranks in SHOWN_RANKS])
                panel.yaxis.set_major_formatter("{x:g}")
                panel.set_xlabel("ranks")

    return save


# The page's blocks that are of a record: of which benchmark, and what makes one of its latest on CPU.
BLOCKS: Mapping[str, tuple[str, Callable[[Record], Lines]]] = {
    "wire-decision": ("link", decision),
    "wire-errors": ("errors", errors),
    "break-even": ("encoded", here),
}
