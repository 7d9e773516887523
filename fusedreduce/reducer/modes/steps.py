"""Steps: the engine, as a mode sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from ...buckets.bucket_set import BucketMaker, BucketSet
from ...buckets.reduction import Reduction
from ...buckets.stats.grad_stats import GradStats
from ...buckets.step_feature import Ended
from ..unused_parameters import UsedMap


class Steps(Protocol):
    """The engine, as a mode sees it."""

    buckets: BucketSet
    maker: BucketMaker
    used: UsedMap
    observed: GradStats
    rounds: int

    def finish_buckets(self, launched: Sequence[Reduction]) -> list[int]:
        """Finishes launched buckets; returns the numbers of the parameters whose gradients were not written."""
        ...

    def write(self, writes: Iterable[tuple[Reduction, Callable[[], None]]]) -> None:
        """Calls what writes each bucket's gradients, on the stream for that."""
        ...

    def end_statistics(self, ended: Ended) -> None:
        """Completes the statistics of the gradients that a step has left."""
        ...

    def fail(self, error: BaseException) -> None:
        """Notes what applying averages has raised: `reset` is needed."""
        ...
