"""Callbacks of the comm hook's collectives: unpack the bucket, keep errors.

A callback holds no reference that leads to the process group. A Gloo thread runs and frees it: if that dropped the last
reference to the group, the group would join that thread from within it and abort the process.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..buckets import exchange
from ..buckets.bucket import BucketState
from ..buckets.deferred_errors import DeferredErrors
from ..buckets.exchange import InFlight
from ..buckets.stats.bucket_partials import BucketPartials
from ..comm.stall_monitor import StallMonitor
from ..comm.waiting import collective_error
from ..errors import CollectiveError
from .hook_trace import HookTrace


@dataclass(frozen=True, eq=False)
class Finish:
    """Unpacks into DDP's bucket. On CUDA the callback's stream already waits for the collective.

    Args:
        errors: keeps a failure, which the future raises too.
        monitor: watches the unpack's event (CUDA only).
        report_after_s: seconds after which the reduction is overdue.
        in_flight: the bucket in flight.
        buffer: DDP's bucket; the future's value.
        trace: records when unpacking begins and ends.
        index: DDP's index of the bucket.
        scale: unpack multiplies by it; None: by 1.
        rows: take the bucket's partial statistics; None: none are collected.
    """

    errors: DeferredErrors
    monitor: StallMonitor
    report_after_s: float
    in_flight: InFlight
    buffer: torch.Tensor
    trace: HookTrace | None = None
    index: int = 0
    scale: torch.Tensor | None = None
    rows: BucketPartials | None = None

    def __call__(self, reduced: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        ours, rank = self.in_flight.bucket, self.in_flight.rank
        try:
            try:
                reduced.value()
            except CollectiveError:
                ours.state = BucketState.FAILED
                raise
            except RuntimeError as error:
                ours.state = BucketState.FAILED
                raise collective_error(f"the {ours.collective} of {ours.label} failed", rank, error) from error
            if self.trace is not None:
                self.trace.unpack(self.index)
            done = self._unpack()
            if self.trace is not None:
                self.trace.unpacked(self.index)
        except Exception as error:
            self.errors.remember(error)
            raise
        if done is not None:
            what = f"rank {rank}: the reduction of {ours.label}"
            self.monitor.watch(ours, what, done.query, self.report_after_s, ours.device)
        return self.buffer

    def _unpack(self) -> torch.cuda.Event | None:
        if self.rows is None:
            return exchange.finish(self.in_flight, scale=self.scale)
        if self.in_flight.in_place:
            self.rows.measure_result(self.in_flight.wire)
            return exchange.finish(self.in_flight)
        return exchange.finish(self.in_flight, scale=self.scale, partials=self.rows.result)


@dataclass(frozen=True, eq=False)
class FinishSparse:
    """Returns the sum of a sparse bucket.

    Args:
        errors: keeps a failure, which the future raises too.
        label: names the bucket in messages.
        rank: of this process.
        rows: take the bucket's partial statistics; None: none are collected.
    """

    errors: DeferredErrors
    label: str
    rank: int
    rows: BucketPartials | None = None

    def __call__(self, reduced: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        try:
            value = reduced.value()[0]
        except RuntimeError as error:
            failure = collective_error(f"the all-reduce of {self.label} failed", self.rank, error)
            self.errors.remember(failure)
            raise failure from error
        if self.rows is not None:
            try:
                self.rows.measure_sparse_result(value)
            except Exception as error:
                self.errors.remember(error)
                raise
        return value
