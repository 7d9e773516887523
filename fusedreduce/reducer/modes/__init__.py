"""Sync modes: what becomes of a step's gradients when its backward ends. One base class (mode.py), two others."""

from __future__ import annotations

from ...buckets.bucket_set import BucketMaker
from ...config import Asynchronous, is_synchronous, staleness
from .asynchronous import AsynchronousMode
from .bounded_staleness import BoundedStalenessMode
from .gradient_stash import GradientStash
from .mode import DelayedAverages, Mode


def make_mode(maker: BucketMaker, late: DelayedAverages, stash: GradientStash | None) -> Mode:
    """Makes the sync mode of `maker.config`; `late` is the reducer's, `stash` that of the mode before it."""
    mode = maker.config.sync_mode
    if is_synchronous(mode):
        return Mode()
    stash = stash or GradientStash(maker.parameters)
    if isinstance(mode, Asynchronous):
        return AsynchronousMode(maker, mode.max_in_flight, stash, late)
    return BoundedStalenessMode(staleness(mode), stash, late)
