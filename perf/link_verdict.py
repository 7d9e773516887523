"""Who ends a step first: ours beside torch's best, at any bucket size of it, from the rounds of one cell.

Of variants that are alike in rounds that do not depend on each other, each of two false verdicts, ours first and
torch's first, comes at most once in 50 verdicts: a side's quickest may be so by luck, so the odds of as many won rounds
by chance count once for each of the side's variants.
PowerSGD is left out: its gradients are approximations that no step checks.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import link_variants

FALSE_SHARE = 1 / 50
LEAST_ROUNDS = 10
# What travels; of `any`, 8 and 4 bits too, which torch has not.
CLASSES = {"any": None, "fp32": ("native",), "16 bits": ("bf16", "fp16")}


def verdicts(cell: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of a cell from link_cells.py what is to be said, by what travels: {"at", "ours", "torch", "ratio", ...}.

    "ended" says who was first: "ours", "torch", or "neither", where they differ by no more than one of torch's that
    took part twice, or were quicker in turns. Nothing is said of fewer rounds than `LEAST_ROUNDS`.
    """
    if _rounds(cell) < LEAST_ROUNDS:
        return []
    found = (_verdict(cell, at, wires) for at, wires in CLASSES.items())
    return [one for one in found if one is not None]


def _verdict(cell: Mapping[str, Any], at: str, wires: Sequence[str] | None) -> dict[str, Any] | None:
    sides: dict[str, list[str]] = {"ours": [], "torch": []}
    for name, row in cell["variants"].items():
        of_class = row["wire"] != link_variants.POWERSGD if wires is None else row["wire"] in wires
        if row["side"] != "floor" and of_class and row["failed"] is None and name != link_variants.AGAIN:
            sides["torch" if row["side"] == "torch" else "ours"].append(name)
    if not all(sides.values()):
        return None
    ours, torch = (min(names, key=lambda name: float(cell["variants"][name]["step_ms"])) for names in sides.values())
    pairs = list(zip(*(cell["variants"][name]["samples_ms"] for name in (ours, torch)), strict=True))
    ours_ms, torch_ms = (cell["variants"][name]["step_ms"] for name in (ours, torch))
    quicker = {"ours": sum(own < other for own, other in pairs), "torch": sum(own > other for own, other in pairs)}
    noise = 0.0 if cell["aa_ratio"] is None else abs(cell["aa_ratio"] - 1)
    first = "ours" if ours_ms < torch_ms else "torch"
    by_luck = len(sides[first]) * by_chance(quicker[first], len(pairs))
    ended = first if abs(ours_ms / torch_ms - 1) > noise and by_luck <= FALSE_SHARE else "neither"
    return {
        "at": at,
        "ours": ours,
        "ours_ms": ours_ms,
        "torch": torch,
        "torch_ms": torch_ms,
        "ratio": statistics.median(own_ms / other_ms for own_ms, other_ms in pairs),
        "quicker_rounds": quicker["ours"],
        "rounds": len(pairs),
        "ended": ended,
    }


def by_chance(won: int, rounds: int) -> float:
    """How often one of two that are alike is the quicker one in at least so many rounds."""
    return sum(math.comb(rounds, count) for count in range(won, rounds + 1)) / 2.0**rounds


def _rounds(cell: Mapping[str, Any]) -> int:
    return min(len(row["samples_ms"]) for row in cell["variants"].values())


def lines(cell: Mapping[str, Any]) -> list[str]:
    """As the screen has it: whether to use ours here, and at which wire."""
    head = f"verdict on {cell['case']}:"
    if cell["not_published"] is not None:
        return [f"{head} none, {cell['not_published']}"]
    if (rounds := _rounds(cell)) < LEAST_ROUNDS:
        return [f"{head} none of {rounds} rounds: it takes {LEAST_ROUNDS}"]
    found = verdicts(cell)
    if not found:
        return [f"{head} none: ours and torch's have not both taken part"]
    noise = "was not measured" if cell["aa_ratio"] is None else f"is {abs(cell['aa_ratio'] - 1):.1%}"
    return [head, *(f"  {line}" for one in found for line in _lines(one)), f"  noise, one of torch's twice, {noise}"]


def _lines(one: Mapping[str, Any]) -> list[str]:
    said = {
        "ours": f"{one['ours']} ends a step first",
        "torch": f"torch's best is not beaten, {one['ours']} is later",
        "neither": f"torch's best is not beaten, {one['ours']} is too near to tell",
    }[one["ended"]]
    what = {"any": "whatever travels", "fp32": "at fp32", "16 bits": "at 16 bits"}[one["at"]]
    return [
        f"{what}: {said}",
        f"    {one['ours_ms']:.1f} ms beside {one['torch_ms']:.1f} of {one['torch']}",
        f"    ratio by rounds {one['ratio']:.2f}, sooner in {one['quicker_rounds']} of {one['rounds']}",
    ]
