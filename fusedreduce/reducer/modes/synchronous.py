"""SynchronousMode: every step ends with its own averages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ...buckets.bucket_set import BucketSet
from ...buckets.reduction import Reduction
from ...comm.protocol import Communicator
from ...config import FlushReport
from . import staleness_state
from .mode import Ended, Steps


class SynchronousMode:
    """See `Mode`. Nothing outlives a step."""

    together = True
    delays = False

    def open(self) -> None:
        """Does nothing."""

    def set_buckets(self, buckets: BucketSet) -> None:
        """Does nothing."""

    def set_communicator(self, communicator: Communicator) -> None:
        """Does nothing."""

    def drop_steps(self) -> None:
        """Does nothing."""

    def release(self) -> None:
        """Does nothing."""

    def stats(self) -> dict[str, int | str]:
        """Returns no counters."""
        return {}

    def hold_gradients(self) -> None:
        """Does nothing."""

    def restore_gradients(self, *, local: bool = False) -> None:
        """Does nothing."""

    def end_step(self, steps: Steps, launched: Sequence[Reduction]) -> Ended:
        """Waits for the buckets in flight, and writes the gradients."""
        return Ended(steps.rounds + 1, steps.finish_buckets(launched))

    def optimizer_steps(self) -> None:
        """Does nothing."""

    def pending(self) -> str:
        """Nothing is ever outstanding."""
        return ""

    def flush(
        self,
        steps: Steps,
        step: Callable[[], None] | None,
        optimizers: Sequence[Optimizer],
        buffers: Sequence[torch.Tensor],
        failed: Callable[[BaseException], None],
    ) -> FlushReport:
        """Applies nothing."""
        return FlushReport()

    def state_dict(self, steps: Steps) -> dict[str, Any]:
        """Returns nothing."""
        return {}

    def load_state_dict(self, steps: Steps, state: Mapping[str, Any]) -> int:
        """Takes a checkpoint without steps in flight; see `Mode`."""
        return staleness_state.load(steps.maker, state, most=0)[1] if state else steps.rounds
