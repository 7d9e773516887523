"""Synchronisation modes: of which step the averages are that `.grad` holds after a backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Synchronous:
    """After each backward `.grad` holds its own average over all ranks."""


@dataclass(frozen=True)
class BoundedStaleness:
    """After step t `.grad` holds the average of step t - max_staleness: the same bytes on every rank.

    The first `max_staleness` steps leave `.grad` None. A rank that is late now and then delays nobody, as long as it
    catches up within so many steps. Each bucket has a wire buffer more per step. 0 is as Synchronous.

    Buffers that forward broadcasts from rank 0 are waited for in every forward, as by torch: where rank 0 may
    be the late one, leave that out (broadcast_buffers=False), or it delays all. So does whatever else ranks exchange in
    forward and backward (SyncBatchNorm).

    Args:
        max_staleness: steps.

    Raises:
        ValueError: no whole number, or below 0.
    """

    max_staleness: int

    def __post_init__(self) -> None:
        _check_count("max_staleness", self.max_staleness, 0)


@dataclass(frozen=True)
class Asynchronous:
    """`.grad` holds this rank's own gradient, and corrections: what earlier averages were more than its own, then.

    Ranks' parameters drift apart; `flush` brings them together.

    Args:
        max_in_flight: contributions under way; while there are so many, gradients merge into the next one.

    Raises:
        ValueError: no whole number, or below 1.
    """

    max_in_flight: int = 2

    def __post_init__(self) -> None:
        _check_count("max_in_flight", self.max_in_flight, 1)


@dataclass(frozen=True)
class FlushReport:
    """What a `flush` has done.

    Args:
        steps: that have landed.
        drift: largest difference of a parameter from the mean over all ranks, before they were made equal; 0.0 where
            they never differ.
        relative_drift: L2 norm of the differences over that of the mean, the largest of all ranks.
    """

    steps: int = 0
    drift: float = 0.0
    relative_drift: float = 0.0


SyncMode: TypeAlias = Synchronous | BoundedStaleness | Asynchronous


def staleness(mode: SyncMode) -> int:
    """By how many steps averages come later than their own."""
    return mode.max_staleness if isinstance(mode, BoundedStaleness) else 0


def is_synchronous(mode: SyncMode) -> bool:
    """Whether a step ends with its own averages."""
    return isinstance(mode, Synchronous) or mode == BoundedStaleness(0)


def _check_count(name: str, value: object, least: int) -> None:
    if type(value) is not int or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
