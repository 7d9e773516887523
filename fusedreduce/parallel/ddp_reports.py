"""ReducerReports: what a wrapper tells of its reducer and of the gradients that it has reduced."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from ..buckets.stats.non_finite import NonFiniteReport
from ..comm.init_process_group import local_rank
from ..comm.local.process_group import LocalProcessGroup
from ..reducer.wire_schedule import ParameterWire
from ..trace.collective_metrics import CollectiveMetrics
from .wrapper_reducer import WrapperReducer


class ReducerReports:
    """The part of DistributedDataParallel that reads only."""

    module: Any
    process_group: Any

    def _ours(self) -> WrapperReducer:
        """The wrapper's reducer."""
        raise NotImplementedError

    @property
    def world_size(self) -> int:
        """Number of ranks of the process group."""
        return int(self.process_group.size())

    @property
    def rank(self) -> int:
        """This rank's number in the process group."""
        return int(self.process_group.rank())

    @property
    def local_rank(self) -> int | None:
        """This process's number on its machine: LOCAL_RANK, None if that is not set; of a LocalGroup's rank its rank.

        Raises:
            ValueError: LOCAL_RANK is not a number, or out of range.
        """
        return self.rank if isinstance(self.process_group, LocalProcessGroup) else local_rank()

    def reduce_stats(self) -> dict[str, int | str]:
        """Counters of this rank's reducer since it was built.

        Returns:
            steps, buckets, buckets_reduced, collectives, wire_bytes and others, by name: `Reducer.stats` lists them.
        """
        return self._ours().stats()

    def plan_json(self) -> str:
        """The bucket plan in use, to keep in a checkpoint.

        Returns:
            JSON text, which `ReduceConfig(plan=...)` takes.
        """
        return self._ours().plan_json()

    def wire_report(self) -> dict[str, ParameterWire]:
        """By parameter's name what its gradient travels on, and what its encoding has lost: `Reducer.wire_report`."""
        return self._ours().wire_report()

    def record_trace(self, folder: str | Path, limit: int = 100) -> AbstractContextManager[None]:
        """Records steps for `fusedreduce trace` and `fusedreduce plan` while the context is open.

        Args:
            folder: where this rank's file is written; ranks may share it.
            limit: number of synchronised steps after which recording stops.

        Returns:
            The context manager.

        Raises:
            FusedReduceError: a trace is being recorded already.
            ValueError: a mode other than Synchronous, whose steps do not end with their own backward.
        """
        return self._ours().record_trace(folder, limit)

    def measure_collectives(self) -> AbstractContextManager[CollectiveMetrics]:
        """Counts and times the reducer's collectives while the context is open, see `measure_collectives`.

        What travels by a communicator of its own is not seen: averages in the mode Asynchronous, and on CPU the second
        phases of the wires "int8", "int4" and accumulation="fp32" on three and more ranks.

        Returns:
            The context manager, which gives the metrics.

        Raises:
            FusedReduceError: they are being measured already.
        """
        return self._ours().measure_collectives()

    def grad_norm(self, norm_type: float = 2.0, *, include_ignored: bool = False) -> torch.Tensor:
        """Norm over all reduced gradients, as they were reduced last with ReduceConfig(grad_stats=True), else as now.

        Neither the host nor another rank is waited for. The result is the same on every rank, bit for bit, if all ranks
        have the same hardware and versions, or with ReduceConfig(grad_stats=True), which shares the largest result.

        Args:
            norm_type: 2 or inf.
            include_ignored: add gradients that this wrapper does not reduce, as they are on this rank.

        Returns:
            0-dim tensor of fp64 on the first parameter's device.

        Raises:
            ValueError: another norm_type; or a parameter that is not reduced has a gradient, unless include_ignored.
        """
        return self._ours().grad_norm(norm_type, include_ignored=include_ignored)

    def grad_norms(self, norm_type: float = 2.0) -> dict[str, torch.Tensor]:
        """Norm of each reduced gradient; measured when `grad_norm` would be.

        Args:
            norm_type: 2 or inf.

        Returns:
            0-dim tensors of fp64 by parameter name.

        Raises:
            ValueError: another norm_type.
        """
        return self._ours().grad_norms(norm_type)

    def grad_stats(self, *, per_parameter: bool = True) -> dict[str, float]:
        """Statistics of the latest step to log, as plain numbers: one transfer, which the host waits for.

        Args:
            per_parameter: also per parameter, under "grad_norm/<name>" and so on.

        Returns:
            grad_norm (L2) and grad_absmax. With ReduceConfig(grad_stats=True) also grad_flushed: the share of this
            rank's elements that were not zero and became zero on the wire; NaN for bf16 gradients on an fp16 wire.
        """
        return self._ours().grad_stats(per_parameter=per_parameter)

    def non_finite(self) -> list[NonFiniteReport]:
        """The latest steps in which a gradient held a NaN or Inf; found with ReduceConfig(check_finite=...).

        Returns:
            A report per step, oldest first: which rank had what in which gradient before it was reduced.
        """
        return self._ours().non_finite()
