"""What a collective that adds 16-bit numbers in 16 bits does to a sum over W ranks, simulated.

    python perf/sum_rounding.py          # the table of docs/wires.md

    ring    a partial sum passes from rank to rank, and each adds its own: W - 1 additions, one after the other
    tree    partial sums of as many ranks are added, two at a time: log2 W additions, one after the other

each rounded to nearest in the wire's dtype, as NCCL's rings and trees do, and Gloo. Of what is on the wire: that each
rank has rounded its gradient to it is another rounding, and not in here. The same numbers come out everywhere.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

Values = npt.NDArray[np.float64]  # [ranks, NUMEL]
RANKS = (2, 8, 64, 256, 1024)
NUMEL = 1024
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def ring_sum(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Each rank's row added to the sum of those before it."""
    return list(itertools.accumulate(rows, torch.add))[-1]


def tree_sum(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows added by pairs, then their sums, and so on; as many rows as a power of two."""
    while len(rows) > 1:
        rows = [one + other for one, other in zip(rows[::2], rows[1::2], strict=True)]
    return rows[0]


def mixed_signs(ranks: int) -> Values:
    """Normal values, independent of each other: gradients that are noise."""
    return np.random.default_rng(0).standard_normal((ranks, NUMEL))


def one_sign(ranks: int) -> Values:
    """Their absolute values."""
    return np.abs(mixed_signs(ranks))


def alike(ranks: int) -> Values:
    """One gradient, on every rank within 10 % of it (one standard deviation)."""
    noise = mixed_signs(ranks)
    return np.abs(np.random.default_rng(1).standard_normal(NUMEL)) * (1 + 0.1 * noise)


SUMS: Mapping[str, Callable[[Sequence[torch.Tensor]], torch.Tensor]] = {"ring": ring_sum, "tree": tree_sum}
VALUES: Mapping[str, Callable[[int], Values]] = {
    "mixed signs": mixed_signs,
    "one sign": one_sign,
    "alike": alike,
}


def error(wire: str, values: str, sums: str, ranks: int) -> tuple[float, float]:
    """How far a sum over `ranks` ranks is off the exact one.

    Returns:
        Its error as a multiple of the error of rounding the exact sum once, both root mean square; and the mean of all
        sums as a share of that of the exact ones, less 1.
    """
    rows = torch.from_numpy(VALUES[values](ranks)).to(DTYPES[wire])
    exact = rows.double().sum(0)
    once = exact.to(DTYPES[wire]).double() - exact
    off = SUMS[sums](list(rows)).double() - exact
    roundings = (off.square().mean() / once.square().mean()).sqrt()
    return float(roundings), float(off.mean() / exact.abs().mean())


def table() -> list[str]:
    """Markdown: per wire, values and way to add `error`, the second part for values of one sign only."""
    lines = ["| " + " | ".join(["values, on a wire of", *(f"{one:,} ranks" for one in RANKS)]) + " |"]
    lines.append(f"| --- |{' ---: |' * len(RANKS)}")
    for wire, values, sums in itertools.product(DTYPES, VALUES, SUMS):
        cells = []
        for ranks in RANKS:
            roundings, bias = error(wire, values, sums, ranks)
            shown = "" if abs(bias) < 5e-4 or values == "mixed signs" else f", {bias:+.1%}"
            cells.append(f"{roundings:.{1 if roundings < 10 else 0}f}{shown}")
        lines.append(f"| {values}, {wire}, {sums} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print("\n".join(table()))
