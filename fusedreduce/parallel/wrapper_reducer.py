"""WrapperReducer: the Reducer of a DistributedDataParallel, which knows the module around it; reducer_of, to get at it.

    fusedreduce.install()
    model = torch.nn.parallel.DistributedDataParallel(model)
    print(fusedreduce.reducer_of(model).plan_json())

Beside what `Reducer` does it knows the module's buffers, and parameters that are not reduced.
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim import Optimizer

from ..buckets.deferred_errors import in_backward
from ..buckets.gradient_table import GradientTable
from ..buckets.stats.non_finite import NonFiniteReport
from ..config import FlushReport, SyncMode
from ..errors import FusedReduceError
from ..planning.bucketing import BucketCaps
from ..reducer.reducer import Reducer
from ..trace.collective_metrics import CollectiveMetrics, measure_collectives
from .ddp_arguments import features_of
from .torch_reducer import TorchReducer


class WrapperReducer(Reducer):
    """The `Reducer` of a wrapped module. Where the module matters (its buffers, parameters that are not reduced) its
    methods do what those of `fusedreduce.DistributedDataParallel` with these names do.

    Args:
        ddp: the wrapper; referenced weakly.
        args: of `Reducer`.
        kwargs: of `Reducer`.
    """

    def __init__(self, ddp: TorchDDP, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ddp = weakref.ref(ddp)

    @property
    def _wrapper(self) -> Any:
        ddp = self._ddp()
        if ddp is None:
            raise FusedReduceError(
                f"rank {self.communicator.rank}: the wrapper that this reducer belongs to has been freed. Keep the "
                "wrapper, and ask for its reducer where it is used: fusedreduce.reducer_of(model)"
            )
        return ddp

    # What a wrapper adds to a reducer

    def set_sync_mode(self, mode: SyncMode) -> None:
        """Changes the mode, unless an option of the wrapper excludes it."""
        dataclasses.replace(self.config, sync_mode=mode).check_beside(*features_of(self._wrapper, self.config))
        super().set_sync_mode(mode)

    def set_bucket_size(self, size: int | BucketCaps) -> None:
        """Changes the limits of the buckets, and the cap that torch.compile and torch's logger know."""
        ddp = self._wrapper
        super().set_bucket_size(size)
        ddp.bucket_bytes_cap = self.caps.cap_bytes  # torch.compile cuts its graphs by it
        ddp.logger.set_bucket_cap_bytes(self.caps.cap_bytes)

    def flush(
        self,
        *optimizers: Optimizer,
        step: Callable[[], None] | None = None,
        buffers: Sequence[torch.Tensor] | None = None,
    ) -> FlushReport:
        """Flushes; `buffers`: None: the module's, unless they are not broadcast."""
        if buffers is None:
            ddp = self._wrapper
            buffers = list(ddp.modules_buffers) if ddp.broadcast_buffers else ()
        return super().flush(*optimizers, step=step, buffers=buffers)

    def reset(self) -> None:
        """Clears torch's flag that a static graph's delayed all-reduce is enqueued, and gives up the step."""
        self._wrapper._static_graph_delay_allreduce_enqueued = False
        super().reset()

    @property
    def should_finalize_after_backward(self) -> bool:
        """As for any reducer, and always with torch's mixed_precision."""
        mixed = self.engine.manual and self._wrapper.mixed_precision is not None
        return mixed or super().should_finalize_after_backward

    def finalize_backward(self) -> None:
        """Ends the step; with mixed_precision not within its backward, where it raises."""
        if self._wrapper.mixed_precision is not None and in_backward():
            raise FusedReduceError(
                f"rank {self.communicator.rank}: with mixed_precision a step cannot be finalized within its backward: "
                "call finalize_backward() after backward()"
            )
        super().finalize_backward()

    # Reports

    def measure_collectives(self) -> AbstractContextManager[CollectiveMetrics]:
        """Counts and times the collectives of this reducer's communicator while the context is open."""
        return measure_collectives(self.communicator)

    def grad_norm(self, norm_type: float = 2.0, *, include_ignored: bool = False) -> torch.Tensor:
        """Norm of the reduced gradients, with those that this wrapper ignores if `include_ignored`."""
        norm = self.observed.grad_norm(norm_type)
        ignored = self.ignored_with_gradients(allowed=include_ignored)
        if not ignored:
            return norm
        total = GradientTable.of(parameter for _, parameter in ignored).measure().total
        if norm_type == math.inf:
            return torch.maximum(norm, total[1].to(norm.device))
        return (norm.square() + total[0].to(norm.device)).sqrt()

    def grad_norms(self, norm_type: float = 2.0) -> dict[str, torch.Tensor]:
        """Norm of each reduced gradient, by parameter name."""
        return self.observed.grad_norms(norm_type)

    def grad_stats(self, *, per_parameter: bool = True) -> dict[str, float]:
        """Statistics of the latest step, as plain numbers."""
        return self.observed.grad_stats(per_parameter=per_parameter)

    def non_finite(self) -> list[NonFiniteReport]:
        """Reports of the latest steps in which a gradient held a NaN or Inf, oldest first."""
        return list(self.observed.finite_check().reports)

    def ignored_with_gradients(self, *, allowed: bool) -> list[tuple[str, torch.Tensor]]:
        """Parameters that have a gradient which this reducer does not reduce.

        Args:
            allowed: False: raise if there are any.

        Returns:
            Name and parameter of each.

        Raises:
            ValueError: there are some, and they are not `allowed`.
        """
        reduced = set(map(id, self.parameters))
        found = [
            (name, parameter)
            for name, parameter in self._wrapper.module.named_parameters()
            if id(parameter) not in reduced and parameter.grad is not None
        ]
        if found and not allowed:
            raise ValueError(
                f"{', '.join(name for name, _ in found[:8])} {'has' if len(found) == 1 else 'have'} a gradient that "
                "this wrapper does not reduce (ignored, delayed, or frozen since): a norm over all gradients would "
                "differ between ranks. Pass include_ignored=True to add it as it is on this rank"
            )
        return found


def reducer_of(model: nn.Module) -> WrapperReducer:
    """The reducer of a wrapped model: a `fusedreduce.DistributedDataParallel`, or torch's under `install` and `run`.

    It has everything that `fusedreduce.DistributedDataParallel` adds to torch's class: reports, `flush`, `plan_json`,
    `record_trace` and the others. Ask for it where it is used: a wrapper that is copied or given a comm hook has
    another one.

    Args:
        model: the wrapper, also as compiled by torch.compile.

    Returns:
        The Reducer.

    Raises:
        TypeError: `model` is no such wrapper: a bare module, or reduced by torch.
    """
    found = find_reducer(model)
    if found is not None:
        return found
    given = uncompiled(model)
    name = f"{type(given).__module__}.{type(given).__qualname__}"
    if not isinstance(given, TorchDDP):
        raise TypeError(
            f"reducer_of takes a DistributedDataParallel, got {name}: pass what wrapping the model has returned, not "
            "the model itself"
        )
    if "reducer" not in vars(given):
        raise TypeError(f"this {name} has no reducer: all of its parameters are in delay_all_reduce_named_params")
    raise TypeError(
        f"this {name} is reduced by torch: call fusedreduce.install() before it is made, start the program by "
        "`python -m fusedreduce.run`, or make a fusedreduce.DistributedDataParallel. (Of fused_hook its FusedHookState "
        "tells)"
    )


def find_reducer(model: object) -> WrapperReducer | None:
    """As `reducer_of`; None where that raises."""
    model = uncompiled(model)
    # Its own attribute: a subclass's __getattr__ may ask the wrapped module, which may have a `reducer` too.
    facade = vars(model).get("reducer") if isinstance(model, TorchDDP) else None
    reducer = facade.reducer if isinstance(facade, TorchReducer) else None
    return reducer if isinstance(reducer, WrapperReducer) else None


def uncompiled(module: object) -> object:
    """The module that torch.compile wrapped.

    Args:
        module: anything.

    Returns:
        The original module if `module` comes from torch.compile, else `module`.
    """
    # Not by getattr: a wrapper that forwards attributes would give the module that was compiled before it was wrapped.
    return module._modules.get("_orig_mod", module) if isinstance(module, nn.Module) else module
