"""Forecasts beside measured steps, for every wire of ours: what doctor's model makes of the link benchmark's steps.

A forecast is that of fusedreduce/cli/wire_forecast.py: from when gradients are ready without DDP, a line for the link
(what a raw stream carries, and a barrier's latency), and what packing and unpacking take on one core of this machine.
What it leaves out: Python's time per parameter, and that Gloo's threads share the core with backward. A forecast that
is off by more than 10 % of the step is a miss, and named. The last column is what doctor's verdict makes of either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from render import Lines, table
from report_link import TITLES, rate_name
from step_variants import FLOOR

from fusedreduce.cli import wire_forecast
from fusedreduce.config import Wire
from fusedreduce.planning.bucketing import BucketCaps
from fusedreduce.planning.cost_model import FS_PER_BYTE_AT_1_GBIT_S, Costs, Linear
from fusedreduce.wires import WIRES

Copies = Mapping[Wire, tuple[Linear, Linear]]
Ready = Sequence[tuple[float, int, int]]  # when, as a share of the step; elements, dimensions; in order of readiness
MISSED_SHARE = 0.10


def link_line(steady_mbit: float, latency_s: float, ranks: int) -> Linear:
    """What an all-reduce costs over a link: each rank sends 2 (W - 1) / W of the bytes."""
    sent = 2 * (ranks - 1) / ranks
    per_byte = round(sent * FS_PER_BYTE_AT_1_GBIT_S * 1000 / steady_mbit)
    return Linear(fixed_ns=round(latency_s * 1e9), fs_per_byte=per_byte)


def steps_ms(ready: Ready, local_ms: float, link: Linear, copies: Copies, ranks: int) -> dict[Wire, float]:
    """By wire what a step takes until the last gradient is unpacked, where it takes `local_ms` without DDP."""
    gradients = [
        wire_forecast.Gradient(numel, ndim, round(1e6 * share * local_ms)) for share, numel, ndim in reversed(ready)
    ]
    trace = wire_forecast.as_trace(gradients, ranks=ranks, device="cpu")
    found: dict[Wire, float] = {}
    for wire, (pack, unpack) in copies.items():
        phases = 2 if wire_forecast.wide(wire) and ranks > 2 else 1
        of_wire = Linear(fixed_ns=phases * link.fixed_ns, fs_per_byte=link.fs_per_byte)
        costs = Costs(wire=of_wire, pack=pack, unpack=unpack)
        found[wire] = wire_forecast.on_wire([trace], wire, costs, BucketCaps()).finish_ms
    return found


def of_cell(
    cell: Mapping[str, Any], link: Mapping[str, Any], ready: Ready, latency_s: float, copies: Copies, ranks: int
) -> dict[str, float]:
    """By variant of ours what its step should take, with what packing and unpacking cost by wire."""
    line = link_line(link["steady_mbit"], latency_s, ranks)
    by_wire = steps_ms(ready, cell["variants"][FLOOR]["step_ms"], line, copies, ranks)
    return {name: by_wire[wire] for wire, name in cell["ours_best"].items()}


def forecast_table(cells: Sequence[Mapping[str, Any]], forecasts: Sequence[Mapping[str, float]]) -> Lines:
    """Measured and forecast steps, and the misses by name."""
    lines, misses, count = [], [], 0
    for cell, forecast in zip(cells, forecasts, strict=True):
        name = f"{TITLES.get(cell['case'], cell['case'])}, {rate_name(cell['rate_mbit'])}"
        both: tuple[dict[Wire, float], dict[Wire, float]] = ({}, {})
        cells_of_line = [name, f"{cell['variants'][FLOOR]['step_ms']:.0f}"]
        for wire in WIRES:
            variant = cell["ours_best"].get(wire)
            if variant is None or variant not in forecast:
                cells_of_line.append("-")
                continue
            measured, said = cell["variants"][variant]["step_ms"], forecast[variant]
            both[0][wire], both[1][wire] = measured, said
            off = said / measured - 1
            count += 1
            cells_of_line.append(f"{measured:.0f} / {said:.0f} ({off:+.0%})")
            if abs(off) > MISSED_SHARE:
                misses.append(f"MISSED {name}, {wire}: {measured:.0f} ms measured, {said:.0f} forecast, {off:+.0%}")
        lines.append([*cells_of_line, " / ".join(_use(cell, took_ms) for took_ms in both)])
    headings = ["measured / forecast, ms", "no DDP", *WIRES, "use"]
    within = f"{count - len(misses)} of {count} forecasts are within {MISSED_SHARE:.0%} of the measured step"
    return [*table(headings, lines), "", f"{within}.", *misses] if lines else []


def _use(cell: Mapping[str, Any], took_ms: Mapping[Wire, float]) -> str:
    """The verdict on these steps, beside torch's best in fp32 where it took part."""
    if not took_ms:
        return "-"
    best = cell["torch_best"].get("native")
    torch_ms = max(took_ms.values()) if best is None else cell["variants"][best]["step_ms"]
    return wire_forecast.verdict(took_ms, torch_ms).wire or "torch's"
