"""Noise: how ranks differ in when their gradients are ready.

Noise only delays, as that of operating systems and neighbours does (Hoefler, Schneider and Lumsdaine, "Characterizing
the influence of system noise on large-scale applications by simulation", 2010), and gradients come in the same order
on every rank. The random numbers are the same for every plan and every strength of the noise, and a larger run begins
with the ranks of a smaller one, so that more noise and more ranks never end earlier.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..planning.timeline import Problem

Times = npt.NDArray[np.int64]

LONGEST_FS = 2**62
_FURTHEST_DRAW = 10  # standard deviations, which no draw exceeds in practice


@dataclass(frozen=True, kw_only=True)
class Noise:
    """How ranks differ from the measured times.

    Args:
        jitter: standard deviation of the normal numbers z in the delays 1 + jitter |z|, one for each rank and step and
            one for the time from each gradient to the next.
        straggler_share: the share of ranks that are slow in every step; at least one rank if not 0.
        straggler_slowdown: their time as a multiple of the other ranks'.
        seed: of the random numbers.

    Raises:
        ValueError: a value is negative, the share above 1, or the slowdown below 1.
    """

    jitter: float = 0.0
    straggler_share: float = 0.0
    straggler_slowdown: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("jitter", self.jitter, 0, 1000),
            ("straggler_share", self.straggler_share, 0, 1),
            ("straggler_slowdown", self.straggler_slowdown, 1, 1000),
            ("seed", self.seed, 0, 2**63),
        ):
            if not least <= value <= most:
                raise ValueError(f"{name} must be from {least} to {most}, got {value}")

    @property
    def quiet(self) -> bool:
        """Whether all ranks are equal."""
        return not self.jitter and (not self.straggler_share or self.straggler_slowdown == 1)

    @property
    def worst(self) -> float:
        """An upper bound of the factor by which a rank's time is multiplied."""
        return (1 + _FURTHEST_DRAW * self.jitter) ** 2 * self.straggler_slowdown


QUIET = Noise()


def moments_of(problem: Problem) -> tuple[Times, list[int]]:
    """Returns the distinct ready times in fs, ascending, and for each parameter the index of its own.

    Raises:
        ValueError: there are no parameters, or times are too long to count in fs (over an hour).
    """
    if not problem.ready_fs:
        raise ValueError("there are no parameters to simulate")
    latest_fs = max(problem.ready_fs)
    if latest_fs >= LONGEST_FS:
        raise ValueError(f"a gradient that is ready after {latest_fs / 1e15:.0f} s is too late to simulate")
    moments, places = np.unique(np.array(problem.ready_fs, dtype=np.int64), return_inverse=True)
    return moments, places.tolist()


def ready_times(moments: Times, ranks: int, noise: Noise, steps: int, *, rehearsal: bool = False) -> Iterator[Times]:
    """Generates when gradients are ready, step by step.

    Args:
        moments: ready times without noise, ascending, in fs since backward began.
        ranks: number of ranks.
        noise: how they differ.
        steps: number of steps.
        rehearsal: generate other steps than without this flag.

    Yields:
        Ready times, [ranks, moments], in fs since backward began.

    Raises:
        ValueError: there are no ranks, or times are too long to count in fs (over an hour).
    """
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")
    if int(moments[-1]) * noise.worst >= LONGEST_FS:
        raise ValueError(
            f"cannot simulate {moments[-1] / 1e15:.0f} s with delays of up to {noise.worst:.0f} times that"
        )
    if noise.quiet:
        for _ in range(steps):
            yield np.broadcast_to(moments, (ranks, len(moments)))
        return
    gaps = np.diff(moments, prepend=0).astype(np.float64)
    slow = np.ones(ranks)
    slow[: math.ceil(noise.straggler_share * ranks)] = noise.straggler_slowdown
    for step in range(steps):
        by_rank, by_gap = (np.random.default_rng([noise.seed, step, rehearsal, stream]) for stream in range(2))
        delays = by_gap.standard_normal((ranks, len(gaps)), dtype=np.float32)
        np.abs(delays, out=delays)
        times = delays * (noise.jitter * gaps)
        times += gaps
        np.cumsum(times, axis=1, out=times)
        times *= ((1 + noise.jitter * np.abs(by_rank.standard_normal(ranks))) * slow)[:, None]
        yield np.rint(times, out=times).astype(np.int64)
