"""The error tree. What a user passed wrongly is a ValueError or TypeError; these are what peers and groups did."""

from __future__ import annotations


class FusedReduceError(RuntimeError):
    """Base of every error that is not a plain ValueError or TypeError."""


class AgreementError(FusedReduceError, ValueError):
    """Ranks were given different settings. Raised on every rank, with the setting, the ranks and their values.

    Attributes:
        on_every_rank: all of them refuse what they were given, each for its own reason.
    """

    on_every_rank = False


class UnsupportedWireError(FusedReduceError, TypeError):
    """The process group's backend cannot sum the wire's dtype on this device."""


class CollectiveError(FusedReduceError):
    """A collective failed: a peer died, left, or did not answer within the group's timeout."""


class NonFiniteGradientError(FusedReduceError, ArithmeticError):
    """A gradient held a NaN or an Inf; on every rank, with the ranks, parameters and indices. The step is done."""


class TraceError(FusedReduceError, ValueError):
    """A trace cannot be used: damaged, foreign, incomplete, or its ranks did not do the same."""
