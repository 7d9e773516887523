"""The errors that other ranks, groups and devices cause. A wrong argument is a ValueError or TypeError."""

from __future__ import annotations

from collections.abc import Iterable


class FusedReduceError(RuntimeError):
    """Base class of every error of fusedreduce that is not a plain ValueError or TypeError."""


class AgreementError(FusedReduceError, ValueError):
    """Ranks were given different settings. Raised on every rank, with the setting, the ranks and their values.

    Attributes:
        on_every_rank: whether every rank refuses what it was given, each for its own reason.
    """

    on_every_rank = False


class UnsupportedWireError(FusedReduceError, TypeError):
    """The process group's backend cannot sum the wire's dtype on this device."""


class CollectiveError(FusedReduceError):
    """A collective failed: a rank died, left, or did not answer within the group's timeout."""


class NonFiniteGradientError(FusedReduceError, ArithmeticError):
    """A gradient had a NaN or an Inf. Raised on every rank, with the ranks, parameters and indices, after the step."""


class TraceError(FusedReduceError, ValueError):
    """A trace cannot be used: it is damaged, not ours or incomplete, or its ranks are of different runs."""


def shortened(items: Iterable[object], most: int, separator: str = ", ") -> str:
    """Lists items in a message: at most the first `most`, and how many more there are, as in "0, 1 and 3 more"."""
    texts = list(map(str, items))
    more = len(texts) - most
    return separator.join(texts[:most]) + (f" and {more} more" if more > 0 else "")
