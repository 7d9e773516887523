"""Cost model: a bucket's costs as straight lines in its bytes, and how they are fitted to measurements.

Times are integers, so that the same samples give the same line on every rank; costs per byte count femtoseconds
(1 GB/s is 1,000,000 fs per byte, a 400 Gbit/s link 20,000).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

FS_PER_NS = 1_000_000
# 8 bits at 1 ns each.
FS_PER_BYTE_AT_1_GBIT_S = 8 * FS_PER_NS
# 64 sizes make 2,016 slopes, a millisecond of work.
MOST_SIZES = 64


@dataclass(frozen=True, kw_only=True)
class Linear:
    """`fixed_ns` + `fs_per_byte` for each byte: the latency-bandwidth model of a collective, or of a copy.

    Args:
        fixed_ns: cost of every bucket, whatever its size.
        fs_per_byte: cost of every byte, in femtoseconds.

    Raises:
        ValueError: a value is negative or not an int.
    """

    fixed_ns: int
    fs_per_byte: int

    def __post_init__(self) -> None:
        for name, value in (("fixed_ns", self.fixed_ns), ("fs_per_byte", self.fs_per_byte)):
            if type(value) is not int or value < 0:
                raise ValueError(f"{name} must be an int and not negative, got {value!r}")

    @classmethod
    def of_link(cls, latency_us: float, gbit_per_s: float) -> Linear:
        """The cost of a collective on a link of this latency and bandwidth."""
        return cls(fixed_ns=round(latency_us * 1000), fs_per_byte=round(FS_PER_BYTE_AT_1_GBIT_S / gbit_per_s))

    def fs(self, size_bytes: int) -> int:
        """The cost of `size_bytes` bytes, in femtoseconds."""
        return self.fixed_ns * FS_PER_NS + self.fs_per_byte * size_bytes


FREE = Linear(fixed_ns=0, fs_per_byte=0)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What a bucket costs, by its bytes on the wire.

    Args:
        wire: of its collective, which uses the channel alone.
        pack: of packing, on the thread or stream of backward, which it delays.
        unpack: of unpacking, after backward.
    """

    wire: Linear
    pack: Linear = FREE
    unpack: Linear = FREE


def fit(samples: Sequence[tuple[int, int]], most_fixed_ns: int | None = None) -> Linear | None:
    """Fits a line to measurements; robust against outliers in a quarter of them, and independent of their order.

    The slope is the median of the slopes between any two sizes, the fixed part the median of what the slope leaves;
    each size counts with the median of its times. Of more than 64 sizes, 64 count, spread evenly over their ranks. A
    line that falls is taken as flat. A line that starts below zero, or above `most_fixed_ns`, is replaced by the one
    that starts there, its slope the median, by bytes, of time by bytes.

    Args:
        samples: (bytes, ns) of single buckets.
        most_fixed_ns: a known upper bound of the fixed part; None: there is none.

    Returns:
        The line; None if there are fewer than two sizes, or if the line is zero.

    Raises:
        ValueError: a number is negative or not an int.

    Source: the slope is Theil's (1950, "A rank-invariant method of linear and polynomial regression analysis") and
        Sen's (1968, "Estimates of the regression coefficient based on Kendall's tau"). It withstands 29 % of outliers:
        here of sizes, where a size is an outlier once half of its samples are.
    """
    points = _points(samples)
    if len(points) < 2:
        return None
    slope = _median(
        [(b_ns - a_ns) * FS_PER_NS // (b - a) for i, (a, a_ns) in enumerate(points) for b, b_ns in points[i + 1 :]]
    )
    slope = max(slope, 0)
    fixed_fs = _median([ns * FS_PER_NS - slope * size for size, ns in points])
    most_fs = fixed_fs if most_fixed_ns is None else most_fixed_ns * FS_PER_NS
    if not 0 <= fixed_fs <= most_fs:
        fixed_fs = max(min(fixed_fs, most_fs), 0)
        slope = _median_by_bytes([(max(ns * FS_PER_NS - fixed_fs, 0) // size, size) for size, ns in points if size])
    line = Linear(fixed_ns=fixed_fs // FS_PER_NS, fs_per_byte=slope)
    return None if line == FREE else line


def fit_copy(samples: Sequence[tuple[int, int]]) -> Linear:
    """Fits the cost of a copy: as `fit`; where that is None in proportion to the bytes, or free without samples.

    Args:
        samples: (bytes, ns) of packing, or of unpacking, single buckets.

    Raises:
        ValueError: a number is negative or not an int.
    """
    rates = [ns * FS_PER_NS // size for size, ns in samples if size]
    return fit(samples) or (Linear(fixed_ns=0, fs_per_byte=statistics.median_low(rates)) if rates else FREE)


def _points(samples: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """At most `MOST_SIZES` sizes, ascending, each with the median of its times."""
    times_ns: dict[int, list[int]] = {}
    for size, ns in samples:
        if type(size) is not int or type(ns) is not int or size < 0 or ns < 0:
            raise ValueError(f"a sample must be (bytes, ns), ints and not negative, got {(size, ns)!r}")
        times_ns.setdefault(size, []).append(ns)
    points = [(size, _median(times)) for size, times in sorted(times_ns.items())]
    last = len(points) - 1
    if last < MOST_SIZES:
        return points
    return [points[rank * last // (MOST_SIZES - 1)] for rank in range(MOST_SIZES)]


def _median_by_bytes(rates: list[tuple[int, int]]) -> int:
    """The median of rates, each weighted with its bytes."""
    ascending = sorted(rates)
    sent = accumulate(size for _, size in ascending)
    half = sum(size for _, size in rates) / 2
    return next(rate for (rate, _), so_far in zip(ascending, sent, strict=True) if so_far >= half)


def _median(values: list[int]) -> int:
    """The median; of an even number of values the mean of the middle two, rounded down."""
    values = sorted(values)
    middle = len(values) // 2
    return values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) // 2
