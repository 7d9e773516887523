"""Draws: what stochastic rounding draws its random bits by, on the device.

A draw is int64 [4]: seed, stream, step, and the bucket's index. The stream is 2 x rank for contributions, whose bits
depend on parameter and element beside it, and not on the plan; and 2 x rank + 1 for sums of shards, which only their
owner draws, by the bucket's index and the element of the shard. The step is a number of synchronised steps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class BucketDraws(NamedTuple):
    """The draws of one bucket.

    Args:
        contribution: int64 [4], of this rank's contribution; None: it is rounded to nearest.
        sum: int64 [4], of the sum of this rank's shard; None: it is rounded to nearest.
    """

    contribution: torch.Tensor | None
    sum: torch.Tensor | None


class Draws:
    """The draws of one reducer: one tensor per device, so that a step takes one update.

    Args:
        seed: in [0, 2**32); the same on every rank.
        buckets: most that a plan has.
    """

    def __init__(self, seed: int, buckets: int) -> None:
        self._seed = seed
        self._buckets = buckets
        self._rows: dict[tuple[torch.device, int], torch.Tensor] = {}

    def of_bucket(self, index: int, device: torch.device, rank: int) -> BucketDraws:
        """The draws of the bucket at place `index` of the plan, on its device, of the process with this rank."""
        rows = self._rows.get((device, rank))
        if rows is None:
            sums = ([self._seed, 2 * rank + 1, 0, bucket] for bucket in range(self._buckets))
            rows = torch.tensor([[self._seed, 2 * rank, 0, 0], *sums], dtype=torch.int64).to(device)
            self._rows[device, rank] = rows
        return BucketDraws(rows[0], rows[1 + index])

    def begin_step(self, step: int) -> None:
        """Sets the step, before its backward; `step`: number of steps that all ranks have ended."""
        for rows in self._rows.values():
            rows[:, 2].fill_(step)
