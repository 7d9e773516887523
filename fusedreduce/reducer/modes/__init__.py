"""Sync modes: what becomes of a step's gradients when its backward ends. One protocol (mode.py), three modes."""

from __future__ import annotations

from ...buckets.bucket_set import BucketMaker
from ...config import Asynchronous, is_synchronous, staleness
from .asynchronous import AsynchronousMode
from .bounded_staleness import BoundedStalenessMode
from .gradient_stash import GradientStash
from .mode import DelayedAverages, Mode
from .synchronous import SynchronousMode


def make_mode(maker: BucketMaker, stash: GradientStash, late: DelayedAverages) -> Mode:
    """Makes the sync mode of `maker.config`; `stash` and `late` are the reducer's, and outlive it."""
    mode = maker.config.sync_mode
    if is_synchronous(mode):
        return SynchronousMode()
    if isinstance(mode, Asynchronous):
        return AsynchronousMode(maker, mode.max_in_flight, stash, late)
    return BoundedStalenessMode(staleness(mode), stash, late)
