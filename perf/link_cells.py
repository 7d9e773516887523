"""A cell is one model at one rate: from what ranks measured to what the record and the screen show."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import link_bound
import link_variants
import records
from link_variants import POWERSGD
from report_link import rate_name
from step_variants import Variant

UNLIMITED = "unlimited"


def size_name(size_bytes: int) -> str:
    """In KiB or MiB."""
    return f"{size_bytes // 1024} KiB" if size_bytes < 2**20 else f"{size_bytes // 2**20} MiB"


def link_row(rate_mbit: float | None, raw: Sequence[Mapping[str, Any]], case: str | None = None) -> dict[str, Any]:
    """What a link is: its nominal rate, and what a raw stream carries, in Mbit/s of payload by message size.

    Args:
        rate_mbit: nominal; None: not shaped.
        raw: what each rank saw as the sender. A link misses its rate if anyone's stream does.
        case: what it is called; None: by its rate.
    """
    sizes = list(raw[0]["rates"])
    each = [link_bound.steady(rate_mbit, seen["rates"]).rate / 1e6 for seen in raw]
    return {
        "part": "links",
        "case": case or rate_name(rate_mbit),
        "rate_mbit": rate_mbit,
        "burst_bytes": None if rate_mbit is None else link_bound.burst_bytes(rate_mbit),
        "congestion_control": raw[0]["congestion_control"],
        "raw_mbit": {size: max(seen["rates"][size] for seen in raw) / 1e6 for size in sizes},
        "raw_least_mbit": {size: min(seen["rates"][size] for seen in raw) / 1e6 for size in sizes},
        "steady_mbit": max(each),
        "on_the_line_mbit": link_bound.on_the_line(min(each)),
        "misses_nominal": any(link_bound.misses_nominal(rate, rate_mbit) for rate in each),
        "variants": {},
    }


def cell(
    model: str,
    link: Mapping[str, Any],
    answers: Sequence[Mapping[str, Any]],
    *,
    shared_cores: bool,
    counted: bool = True,
) -> dict[str, Any]:
    """One cell: a row of the record.

    Args:
        link: from `link_row`.
        answers: of all ranks, what link_steps.py found.
        counted: the counters saw these ranks alone: what was sent can be judged.
    """
    ranks, elements = len(answers), answers[0]["elements"]
    found = link_variants.variants()
    bounds_ms = {
        wire: statistics.median(map(max, *(answer["bounds"][wire] for answer in answers))) * 1e3
        for wire in answers[0]["bounds"]
    }
    rows: dict[str, dict[str, Any]] = {}
    for name in answers[0]["seconds"]:
        variant, chosen = found[name], answers[0].get("chosen", {}).get(name)
        if chosen is not None:  # judged by what it sends
            variant = dataclasses.replace(variant, wire=chosen["wire"])
        steps_s = list(map(max, *(answer["seconds"][name] for answer in answers)))
        spread = records.spread(steps_s, "step_ms")
        sent = statistics.median(map(sum, zip(*(answer["bytes"][name] for answer in answers), strict=True)))
        rows[name] = {
            "side": variant.side,
            "wire": variant.wire,
            **spread,
            "cpu_ms": statistics.median(map(max, *(answer["cpu_seconds"][name] for answer in answers))) * 1e3,
            "sent_bytes": sent,
            "failed": _failed(variant, spread["step_ms"], bounds_ms, sent if counted else None, elements, ranks),
            "samples_ms": [round(step_s * 1e3, 3) for step_s in steps_s],
            **({} if chosen is None else _choice(chosen)),
        }
    medians = {name: float(row["step_ms"]) for name, row in rows.items() if row["failed"] is None}
    return {
        "part": "steps",
        "case": model,
        "rate_mbit": link["rate_mbit"],
        "link": link["case"],
        "parameters": answers[0]["parameters"],
        "elements": elements,
        "not_published": not_published(link, shared_cores),
        "bound_ms": bounds_ms,
        "torch_best": link_variants.torch_best(medians, found),
        "torch_sized": link_variants.torch_best(medians, found, sized=True),
        "ours_best": link_variants.ours_best(medians, rows),
        "aa_ratio": link_variants.noise(medians),
        "variants": rows,
    }


def _choice(times: Mapping[str, Any]) -> dict[str, Any]:
    """What steps have found of several wires, as a record has it."""
    tried: Mapping[str, float] = times["measured_ms"]
    return {
        "chosen": times["wire"],
        "chosen_behind": times["since"],
        "tried": list(tried),
        "tried_ms": list(tried.values()),
        "expected_ms": [times["expected_ms"].get(wire) for wire in tried],
    }


def _failed(
    variant: Variant,
    step_ms: float,
    bounds_ms: Mapping[str, float],
    sent_bytes: float | None,
    elements: int,
    ranks: int,
) -> str | None:
    """Why a row is no measurement; None: it is one."""
    shards = link_variants.SHARDS if ranks > 2 else (link_variants.TORCHS_FSDP2, link_variants.OUR_FSDP2)
    if variant.side == "floor" or variant.wire == POWERSGD or variant.side in shards:  # which gather parameters too
        return None
    if step_ms < bounds_ms.get(variant.wire, 0.0) * (1 - link_bound.BELOW_SHARE):
        return f"{step_ms:.1f} ms is below the bound of {bounds_ms[variant.wire]:.1f} ms"
    return None if sent_bytes is None else link_bound.wrong_bytes(sent_bytes, elements, variant.wire, ranks)


def not_published(link: Mapping[str, Any], shared_cores: bool) -> str | None:
    """Why a cell is not shown, nor judged; None: it is."""
    if shared_cores:
        return "shared cores"
    if link.get("shared_gpu"):
        return "ranks share a GPU"
    if link["misses_nominal"]:
        return (
            f"a raw stream takes {link['on_the_line_mbit']:.0f} Mbit/s of the line, "
            f"{link['rate_mbit']:g} are nominal: off by more than {link_bound.MISSED_SHARE:.0%}"
        )
    return None


def show_link(link: Mapping[str, Any]) -> None:
    """The raw rates of a link, a line."""
    sizes = ", ".join(f"{size_name(int(size))} {rate:,.0f}" for size, rate in link["raw_mbit"].items())
    what = "the quickest" if link["rate_mbit"] is None else "a long stream"
    carries = f"{what} {link['steady_mbit']:,.0f}; by size {sizes}"
    print(f"\nlink: {link['case']}, {link['congestion_control']}; Mbit/s of payload: {carries}")
    if link["rate_mbit"] is not None:
        share = link["on_the_line_mbit"] / link["rate_mbit"]
        said = "MISSED: its cells are not published" if link["misses_nominal"] else "ok"
        print(f"  the slowest rank's, headers counted: {share:.1%} of the nominal rate: {said}")


def show(cell: Mapping[str, Any]) -> None:
    """A line per variant."""
    bounds = ", ".join(f"{wire} {bound:.1f}" for wire, bound in cell["bound_ms"].items()) or "not known"
    print(f"\n{cell['case']} at {cell['link']}: {cell['parameters']:,} parameters, ", end="")
    noise = "-" if cell["aa_ratio"] is None else f"{cell['aa_ratio']:.3f}"
    print(f"{cell['elements']:,} elements; bound, ms: {bounds}; the same twice: {noise}")
    if cell["not_published"] is not None:
        print(f"  not published: {cell['not_published']}")
    headings = ("step ms", "p20", "p80", "/ bound", "/ torch", "cpu ms", "sent MB")
    print(f"  {'variant':56} {' '.join(f'{heading:>8}' for heading in headings)}")
    for name, row in cell["variants"].items():
        line = f"  {name:56} {row['step_ms']:8.1f} {row['step_p20_ms']:8.1f} {row['step_p80_ms']:8.1f}"
        of_bound, of_torch = ratios(cell, name)
        line += "".join(f" {'-' if ratio is None else f'{ratio:.3f}':>8}" for ratio in (of_bound, of_torch))
        line += f" {row['cpu_ms']:8.1f} {row['sent_bytes'] / 1e6:8.1f}"
        print(line + (f"  FAILED: {row['failed']}" if row["failed"] is not None else ""))


def ratios(cell: Mapping[str, Any], name: str) -> tuple[float | None, float | None]:
    """A variant's step as a share of the bound of its wire, and of torch's best at equal bytes; None: of no sense."""
    row = cell["variants"][name]
    if row["side"] == "floor":
        return None, None
    bound, best = cell["bound_ms"].get(row["wire"]), cell["torch_best"].get(row["wire"])
    of_torch = None if best is None else row["step_ms"] / cell["variants"][best]["step_ms"]
    return None if bound is None else row["step_ms"] / bound, of_torch
