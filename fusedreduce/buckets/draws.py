"""Draws: what stochastic rounding draws its random bits by, on the device.

A draw is int64 [4]: seed, stream, step, and the bucket's index. The stream is 2 x rank for contributions, whose bits
depend on parameter and element beside it, and not on the plan; and 2 x rank + 1 for sums of shards, which only their
owner draws, by the bucket's index and the element of the shard. The step is a number of synchronised steps, of this
group of ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..comm.group import Group
from .step_feature import StepFeature


class BucketDraws(NamedTuple):
    """The draws of one bucket.

    Args:
        contribution: int64 [4], of this rank's contribution; None: it is rounded to nearest.
        sum: int64 [4], of the sum of this rank's shard; None: it is rounded to nearest.
    """

    contribution: torch.Tensor | None
    sum: torch.Tensor | None


class Draws(StepFeature):
    """The draws of one reducer: one tensor per device, so that a step takes one update.

    Args:
        seed: in [0, 2**32); the same on every rank.
        buckets: most that a plan has.
        group: the ranks.
    """

    in_use = True

    def __init__(self, seed: int, buckets: int, group: Group) -> None:
        self._seed = seed
        self._buckets = buckets
        self._group = group
        self._rows: dict[torch.device, torch.Tensor] = {}

    def new_group(self) -> None:
        """Follows other ranks, among which this process may have another number. Other buckets must follow."""
        self._rows = {}

    def of_bucket(self, index: int, device: torch.device) -> BucketDraws:
        """The draws of the bucket at place `index` of the plan, on its device."""
        rows = self._rows.get(device)
        if rows is None:
            rank = self._group.communicator.rank
            sums = ([self._seed, 2 * rank + 1, 0, bucket] for bucket in range(self._buckets))
            rows = torch.tensor([[self._seed, 2 * rank, 0, 0], *sums], dtype=torch.int64, device="cpu").to(device)
            self._rows[device] = rows
        return BucketDraws(rows[0], rows[1 + index])

    def begin(self, rounds: int) -> None:
        """Sets the step."""
        for rows in self._rows.values():
            rows[:, 2].fill_(rounds)
