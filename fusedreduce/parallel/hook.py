"""The comm hook: one line on torch's own DistributedDataParallel.

    ddp.register_comm_hook(FusedHookState(wire="bf16"), fused_hook)

DDP has flattened the bucket already. The hook divides by the world size in fp32, rounds once to the wire's dtype,
all-reduces, and writes the result back into the bucket's own buffer, which it returns: with
`gradient_as_bucket_view=True` nothing is copied after that. A bucket takes one launch and one collective at wire
"native" (in place), two launches and one collective with a 16-bit wire. Norms, the finite check, and counts of
elements that the wire flushes to zero come out of the same launches on request; at wire "native" out of one or two
more launches, which only read. On the wires "int8" and "int4", and with accumulation="fp32", ranks exchange their
contributions instead, by two collectives a bucket on three and more ranks; parameters of a bucket that are not encoded
take one more.

Errors are raised at the end of backward, with their own class; see buckets/deferred_errors.py. If options are wrong,
nothing is reduced: buffers are returned unchanged, gradients stay local, and the next step works.
"""
# No `from __future__ import annotations` here: register_comm_hook compares the annotations with the types themselves.

import contextlib
import inspect
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from ..buckets.stats.non_finite import NonFiniteReport
from ..config import OPTIONS, Accumulation, CheckFinite, ReduceConfig, Wire
from ..errors import FusedReduceError
from .hook_reduction import HookReduction
from .hook_trace import HookTrace

_logger = logging.getLogger(__name__)


class FusedHookState:
    """State of `fused_hook`: options, and a wire buffer per DDP bucket.

    The state may be built before `init_process_group`, registered on several DDP modules that use the same group, and
    pickled or copied (without its process group, buffers, names and reports). torch does not register hooks again when
    it loads a DDP module: register it yourself. The buffers take half the bytes of fp32 gradients at a 16-bit wire, and
    none at wire "native"; what is exchanged takes two buffers, or on two ranks the room of three contributions.

    Args:
        process_group: the group that DDP was given; None: the default group, as in torch's own hooks. Gradients are
            divided by its size.
        wire: what travels: "native" (the bucket's own dtype), "bf16", "fp16", "int8", "int4" or a wire of one's own;
            see ReduceConfig.
        accumulation: "wire", or "fp32" for the wires "bf16" and "fp16"; see ReduceConfig. With it, and on the wires
            "int8" and "int4", the hook is for torch's own DDP: fusedreduce's wrapper refuses it.
        ranks_per_node: with the wires "int8" and "int4", see ReduceConfig.
        stall_report_s: seconds after which an unfinished reduction is logged (CUDA only); None: 80 % of the group's
            timeout.
        grad_stats: collect norms and related statistics in every synchronised step. All ranks then need bitwise
            reproducible sums: GPUs of one architecture, one version of Triton.
        check_finite: "off", "count" or "raise": what to do about NaN and Inf in gradients; see ReduceConfig.

    Raises:
        ValueError: an option that is not accepted, or a group that this process is not a member of.
        TypeError: an unknown option, or a process_group that is not a ProcessGroup.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        wire: Wire = "native",
        *,
        accumulation: Accumulation = "wire",
        ranks_per_node: int | None = None,
        stall_report_s: float | None = None,
        grad_stats: bool = False,
        check_finite: CheckFinite = "off",
    ) -> None:
        outside: object = dist.GroupMember.NON_GROUP_MEMBER
        if process_group is outside:
            raise ValueError(
                f"rank {dist.get_rank()} is not a member of the process group that FusedHookState was given: build the "
                "state on the group's members only"
            )
        if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
            raise TypeError(
                f"process_group must be a torch.distributed.ProcessGroup or None, got {process_group!r} "
                f"(the wire is a keyword: {_state_meant_by(process_group)})"
            )
        config = ReduceConfig(
            wire=wire,
            accumulation=accumulation,
            ranks_per_node=ranks_per_node,
            stall_report_s=stall_report_s,
            grad_stats=grad_stats,
            check_finite=check_finite,
        )
        config.check_beside("fused_hook")
        self._begin(process_group, config)

    def _begin(self, process_group: dist.ProcessGroup | None, config: ReduceConfig) -> None:
        self.process_group = process_group
        self._reduction = HookReduction(config)

    @property
    def config(self) -> ReduceConfig:
        """The options, which never change."""
        return self._reduction.config

    def stats(self) -> dict[str, int | str]:
        """Counters since the state was built, on this rank.

        Returns:
            steps (synchronised backwards, counted per DDP module), buckets (in the latest step), collectives (those of
            check_finite included), wire_bytes (payload of all dense buckets), wire_allocations (wire buffers, and those
            that contributions are received in), path (triton, interpreter or torch).
        """
        return self._reduction.stats()

    def grad_norm(self, norm_type: float = 2.0) -> torch.Tensor:
        """Norm of all reduced gradients of the latest synchronised step, a by-product of its reduction.

        Neither the host nor another rank is waited for, and the result is the same on every rank, bit for bit. It is
        that of the gradients as the reduction left them, even if they were changed since; gradients of parameters that
        no rank used count as zeros. If the state serves several DDP modules, it is that of the module whose step ended
        last.

        Args:
            norm_type: 2 or inf.

        Returns:
            0-dim tensor of fp64 on the device of the first bucket.

        Raises:
            FusedReduceError: grad_stats is off; no step has ended yet, or the latest one failed; or the buckets of
                several modules came interleaved.
            ValueError: another norm_type.
        """
        return self._reduction.observed.grad_norm(norm_type)

    def grad_norms(self, module: nn.Module, norm_type: float = 2.0) -> dict[str, torch.Tensor]:
        """Norm of each reduced gradient of the latest synchronised step; see `grad_norm`.

        Args:
            module: the module whose gradients were reduced, or the DDP module around it, which names the parameters.
            norm_type: 2 or inf.

        Returns:
            0-dim tensors of fp64 by parameter name, in the module's order.

        Raises:
            FusedReduceError: as `grad_norm`.
            ValueError: a parameter that was reduced is not in `module`; or another norm_type.
        """
        return self._reduction.observed.grad_norms(module, norm_type)

    def grad_stats(self, module: nn.Module | None = None) -> dict[str, float]:
        """Statistics of the latest synchronised step to log, as plain numbers: one transfer, which the host waits for.

        Args:
            module: as for `grad_norms`, to have each parameter too, under "grad_norm/<name>" and so on; None: totals
                only.

        Returns:
            grad_norm (L2), grad_absmax, and grad_flushed: the share of this rank's elements that were not zero and
            became zero on the wire.

        Raises:
            FusedReduceError: as `grad_norm`.
            ValueError: a parameter that was reduced is not in `module`.
        """
        return self._reduction.observed.grad_stats(module)

    def non_finite(self) -> list[NonFiniteReport]:
        """The latest steps in which a gradient held a NaN or Inf; found with check_finite "count" or "raise".

        Returns:
            A report per step, oldest first. Steps are counted from 1, per DDP module. Parameters are named by their
            position in DDP's buckets, unless `name_parameters` gave names.
        """
        return self._reduction.observed.non_finite()

    def name_parameters(self, module: nn.Module) -> None:
        """Gives reports and errors the names of a module's parameters.

        Args:
            module: the module that is trained, not the DDP module around it, whose names begin with "module.".
        """
        self._reduction.observed.name_parameters(module)

    @contextlib.contextmanager
    def record_trace(self, folder: str | Path, limit: int = 100) -> Iterator[None]:
        """Records steps for `fusedreduce trace` and `fusedreduce plan` while the context is open; not the first one.

        Args:
            folder: where this rank's file is written; ranks may share it.
            limit: number of steps after which recording stops.

        Yields:
            None.

        Raises:
            FusedReduceError: a trace is being recorded already.
            ValueError: torch.distributed is not initialised.
        """
        if self._reduction.trace is not None:
            raise FusedReduceError(
                "a trace is being recorded already with this FusedHookState: leave that record_trace() first"
            )
        trace = HookTrace(Path(folder), self.config, self._reduction.communicator(self.process_group), limit)
        self._reduction.trace = trace
        try:
            yield
        finally:
            self._reduction.trace = None
            trace.write()

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not None:
            _logger.warning(
                "FusedHookState is pickled without its process group: it will use the default group when loaded"
            )
        return {"config": self.config}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._begin(None, state["config"])

    def __deepcopy__(self, memo: dict[int, object]) -> "FusedHookState":
        return self.__copy__()

    def __copy__(self) -> "FusedHookState":
        copied = FusedHookState.__new__(FusedHookState)
        copied._begin(self.process_group, self.config)
        return copied


def fused_hook(state: FusedHookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages one DDP bucket over the state's process group; pass it to `register_comm_hook`.

    Errors are raised by `backward()`, after DDP has finished it.

    Args:
        state: options and buffers. Not None or a process group, as torch's own hooks take: what is kept between steps
            needs a place, which the caller can ask for norms and reports.
        bucket: DDP's bucket: flat gradients of fp32, fp16, bf16, fp64 or a complex dtype, not divided yet. A sparse
            bucket goes through torch's own all-reduce.

    Returns:
        A future of the bucket's own buffer, averaged. A hook around this one may chain another to it, or wait for it;
        not wait on three and more ranks that exchange ("int8", "int4", accumulation="fp32"), whose second phase is
        issued with the last bucket.

    Raises:
        AgreementError: ranks use different options; raised on every rank.
        UnsupportedWireError: the backend cannot sum this bucket's wire dtype; raised on every rank.
        TypeError: a bucket of integers; or `state` is no FusedHookState (raised at once).
        ValueError: a buffer that is not contiguous (set_buffer); or, where contributions are exchanged, one that has
            not the elements of the bucket's parameters.
        CollectiveError: a peer died, left or did not answer in time; names the bucket.
        NonFiniteGradientError: check_finite="raise", and a gradient held a NaN or Inf; raised on every rank, joined
            ranks included. The step is complete, and the next one works.
        FusedReduceError: a CUDA graph is being captured, which cannot hold a step; or an earlier step failed on this
            rank alone, so that a new process group is needed.
    """
    check_hook_state(state)
    # If DDP has called this, and no hook around it, the frame below is the one that has called backward.
    called_by_ddp = sys._getframe(1).f_globals.get("__name__") == torch.autograd.graph.__name__
    return state._reduction.reduce(state.process_group, bucket, called_by_ddp=called_by_ddp)


def check_hook_state(state: object) -> None:
    """Raises TypeError, with what to write, for what is no state of `fused_hook`."""
    if not isinstance(state, FusedHookState):
        raise TypeError(
            f"fused_hook takes a FusedHookState as its state, got {state!r}: write register_comm_hook("
            f"fusedreduce.{_state_meant_by(state)}, fusedreduce.fused_hook)"
        )


def _state_meant_by(given: object) -> str:
    """What to write in place of `given`."""
    if isinstance(given, dist.ProcessGroup):
        return "FusedHookState(process_group, wire='bf16')"
    options = {"wire": given if isinstance(given, str) else "bf16"}
    if isinstance(given, ReduceConfig):
        asked = {name: getattr(given, name) for name in inspect.signature(FusedHookState).parameters if name in OPTIONS}
        options = {name: value for name, value in asked.items() if value != getattr(ReduceConfig, name)}
    return f"FusedHookState({', '.join(f'{name}={value!r}' for name, value in options.items())})"
