"""Whether a cost grows in proportion: a line through measured points, and the judgement of how well it holds.

The line is cost = fixed + slope x count, by least squares of relative deviations: points range over decades, and noise
is a share of what is measured. Points far from the line count for less (weights are taken anew until they settle), so
that one that was hit by other work does not turn it. It holds if, over the top two decades and as far as the slope
outweighs the fixed cost (below that a point says little about the slope),

* no point's cost per unit (less the fixed cost) is more than 1.5 times the slope, nor less than the slope / 1.5, and
* cost per unit does not grow: the median of the log-log slopes of all pairs of points (Theil's and Sen's estimate,
  which one point hit by other work does not move) is at most 0.1.

A cost of n log n has an exponent of 0.11 to 0.15 between 1,000 and 100,000, n^1.2 one of 0.2; a tenth of noise in every
point moves the estimate by about 0.03.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

TOP = 100.0  # two decades
MOST_RATIO = 1.5
MOST_GROWTH = 0.1
FEWEST = 3  # points of a judgement
REWEIGHTINGS = 30
NEAR = 0.05  # deviations below this count in full


@dataclass(frozen=True, kw_only=True)
class Line:
    """A fitted line and what was found of it.

    Args:
        fixed_s: cost of nothing; never negative.
        slope_s: of each unit.
        judged: points that the judgement is of.
        worst_ratio: of cost per unit to the slope, the furthest from 1 in either direction; 1 if nothing is judged.
        growth: exponent of cost per unit; 0 if nothing is judged.
        why_not: what does not hold; empty if all does.
    """

    fixed_s: float
    slope_s: float
    judged: int
    worst_ratio: float
    growth: float
    why_not: str

    @property
    def holds(self) -> bool:
        """Whether the cost is linear."""
        return not self.why_not


def line(counts: Sequence[float], seconds: Sequence[float]) -> Line:
    """Fits and judges.

    Args:
        counts: ascending, at least `FEWEST`.
        seconds: of each; positive.
    """
    count, cost = np.asarray(counts, dtype=float), np.asarray(seconds, dtype=float)
    fixed_s, slope_s = _fit(count, cost)
    if slope_s <= 0:
        # It costs the same whatever the count: nothing grows, unless the fit has missed a growth elsewhere.
        fixed_s, slope_s = float(1 / np.mean(1 / cost)), 0.0
    top = [
        (one, took)
        for one, took in zip(counts, seconds, strict=True)
        if one >= counts[-1] / TOP and slope_s * one >= fixed_s and took > fixed_s
    ]
    if len(top) < FEWEST:
        # The fixed cost outweighs the slope nearly everywhere: then the line itself must come near every point.
        ratios = [took / (fixed_s + slope_s * one) for one, took in zip(counts, seconds, strict=True)]
        judged, growth = 0, 0.0
    else:
        ratios = [(took - fixed_s) / (slope_s * one) for one, took in top]
        pairs = itertools.combinations([(math.log(one), math.log((took - fixed_s) / one)) for one, took in top], 2)
        judged, growth = len(top), statistics.median((b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs)
    worst = max(ratios, key=lambda ratio: abs(math.log(ratio)))
    why_not = ""
    if not 1 / MOST_RATIO <= worst <= MOST_RATIO:
        why_not = f"a point costs {worst:.2f} times what the line says, {MOST_RATIO} or its inverse is allowed"
    elif growth > MOST_GROWTH:
        why_not = f"the cost of each grows with exponent {growth:.2f}, {MOST_GROWTH} is allowed"
    return Line(fixed_s=fixed_s, slope_s=slope_s, judged=judged, worst_ratio=worst, growth=growth, why_not=why_not)


def _fit(count: np.ndarray[Any, Any], cost: np.ndarray[Any, Any]) -> tuple[float, float]:
    """Fixed cost, not below 0, and slope."""
    scale, doubt = cost, np.ones_like(cost)
    fixed_s = slope_s = 0.0
    for _ in range(REWEIGHTINGS):
        weight = np.sqrt(doubt) / scale
        both = np.stack([weight, weight * count], axis=1)
        fixed_s, slope_s = (float(part) for part in np.linalg.lstsq(both, weight * cost, rcond=None)[0])
        if fixed_s < 0:  # the best without one
            fixed_s, slope_s = 0.0, float((weight**2 * count).dot(cost) / (weight**2 * count).dot(count))
        scale = np.maximum(fixed_s + slope_s * count, cost / 100)
        doubt = NEAR / np.maximum(NEAR, np.abs(cost / scale - 1))
    return fixed_s, slope_s
