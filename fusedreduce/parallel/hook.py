"""The comm hook: one line on torch's own DistributedDataParallel.

    ddp.register_comm_hook(FusedHookState(wire="bf16"), fused_hook)

DDP has flattened the bucket already. The hook divides by the world size in fp32, rounds once to the wire's dtype,
all-reduces, and writes the result back into the bucket's own buffer, which it returns: with
`gradient_as_bucket_view=True` nothing is copied after that. A bucket takes one launch and one collective at wire
"native" (in place), two launches and one collective with a 16-bit wire. Norms, the finite check, and counts of
elements that the wire flushes to zero come out of the same launches on request; at wire "native" out of one or two
more launches, which only read.

Errors are raised at the end of backward, with their own class; see buckets/deferred_errors.py. If options are wrong,
nothing is reduced: buffers are returned unchanged, gradients stay local, and the next step works.
"""
# No `from __future__ import annotations` here: register_comm_hook compares the annotations with the types themselves.

import contextlib
import functools
import logging
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from ..buckets import exchange
from ..buckets.bucket import Bucket, BucketCache, BucketKey
from ..buckets.deferred_errors import DeferredErrors, in_backward
from ..buckets.stats.bucket_partials import BucketPartials
from ..buckets.stats.non_finite import NonFiniteReport
from ..buckets.streams import refuse_capture
from ..buckets.tensors import as_real
from ..comm.agreement import agree
from ..comm.local.group import LocalCommunicator
from ..comm.local.process_group import communicator_of
from ..comm.protocol import Communicator, Pending
from ..comm.stall_monitor import StallMonitor, stall_report_after_s
from ..comm.waiting import collective_failed, wait_for
from ..config import CheckFinite, ReduceConfig, Wire, wire_dtype
from ..errors import AgreementError, CollectiveError, FusedReduceError
from ..kernels import dispatch
from ..kernels.table import WIRE_DTYPES
from ..planning.layout import flat_layout
from .hook_completion import Finish, FinishSparse
from .hook_stats import HookStats, ShownStep
from .hook_trace import HookTrace

_logger = logging.getLogger(__name__)
# DDP rebuilds its buckets once: after its first step, with static_graph after its second.
_RELAY_STEPS = 3


class FusedHookState:
    """State of `fused_hook`: options, and a wire buffer per DDP bucket.

    The state may be built before `init_process_group`, registered on several DDP modules that use the same group, and
    pickled or copied (without its process group, buffers, names and reports). torch does not register hooks again when
    it loads a DDP module: register it yourself. The buffers take half the bytes of fp32 gradients at a 16-bit wire, and
    none at wire "native".

    Args:
        process_group: the group that DDP was given; None: the default group, as in torch's own hooks. Gradients are
            divided by its size.
        wire: dtype that travels: "native" (the bucket's own), "bf16" or "fp16"; see ReduceConfig.
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
                "(the wire is a keyword: FusedHookState(wire='bf16'))"
            )
        self._config = ReduceConfig(
            wire=wire, stall_report_s=stall_report_s, grad_stats=grad_stats, check_finite=check_finite
        )
        self._observed = HookStats(self._config)
        self.process_group = process_group
        self._lock = threading.Lock()
        self._communicator: Communicator | None = None
        self._group: dist.ProcessGroup | None = None  # the communicator's
        self._agreed = False
        self._buckets = BucketCache()
        self._errors = DeferredErrors()
        self._monitor = StallMonitor()
        self._steps = 0
        self._counts = {"wire_bytes": 0, "collectives": 0, "wire_allocations": 0, "buckets": 0}
        self._buckets_this_step = 0
        self._path = "none"
        self._trace: HookTrace | None = None
        # Where this process holds no memory it will not train: before set_device every rank's current GPU is the first.
        if torch.cuda.memory_reserved() > 0:
            sent = wire_dtype(self.config.wire)
            for dtype in WIRE_DTYPES if sent is None else (sent,):
                device = torch.device("cuda", torch.cuda.current_device())
                dispatch.warm_up(device, dtype, stats=self._observed.wanted)

    @property
    def config(self) -> ReduceConfig:
        """The options, which never change."""
        return self._config

    def stats(self) -> dict[str, int | str]:
        """Counters since the state was built, on this rank.

        Returns:
            steps (synchronised backwards, counted per DDP module), buckets (in the latest step), collectives (those of
            check_finite included), wire_bytes (payload of all dense buckets), wire_allocations (wire buffers
            allocated), path (triton, interpreter or torch).
        """
        with self._lock:
            return {"steps": self._steps, **self._counts, "path": self._path}

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
        return self._observed.grad_norm(norm_type)

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
        return self._observed.grad_norms(module, norm_type)

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
        return self._observed.grad_stats(module)

    def non_finite(self) -> list[NonFiniteReport]:
        """The latest steps in which a gradient held a NaN or Inf; found with check_finite "count" or "raise".

        Returns:
            A report per step, oldest first. Steps are counted from 1, per DDP module. Parameters are named by their
            position in DDP's buckets, unless `name_parameters` gave names.
        """
        return self._observed.non_finite()

    def name_parameters(self, module: nn.Module) -> None:
        """Gives reports and errors the names of a module's parameters.

        Args:
            module: the module that is trained, not the DDP module around it, whose names begin with "module.".
        """
        self._observed.name_parameters(module)

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
        if self._trace is not None:
            raise FusedReduceError(
                "a trace is being recorded already with this FusedHookState: leave that record_trace() first"
            )
        communicator = _communicator(self)
        trace = HookTrace(Path(folder), self.config, communicator.rank, communicator.size, limit)
        self._trace = trace
        try:
            yield
        finally:
            self._trace = None
            trace.write()

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group is not None:
            warnings.warn(
                "FusedHookState is pickled without its process group: it will use the default group when loaded",
                stacklevel=2,
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

    def _begin(self, process_group: dist.ProcessGroup | None, config: ReduceConfig) -> None:
        FusedHookState.__init__(
            self,
            process_group,
            config.wire,
            stall_report_s=config.stall_report_s,
            grad_stats=config.grad_stats,
            check_finite=config.check_finite,
        )


def fused_hook(state: FusedHookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages one DDP bucket over the state's process group; pass it to `register_comm_hook`.

    Errors are raised by `backward()`, after DDP has finished it.

    Args:
        state: options and buffers.
        bucket: DDP's bucket: flat gradients of fp32, fp16, bf16, fp64 or a complex dtype, not divided yet. A sparse
            bucket goes through torch's own all-reduce.

    Returns:
        A future of the bucket's own buffer, averaged.

    Raises:
        AgreementError: ranks use different options; raised on every rank.
        UnsupportedWireError: the backend cannot sum this bucket's wire dtype; raised on every rank.
        TypeError: a bucket of integers.
        ValueError: a buffer that is not contiguous (set_buffer).
        CollectiveError: a peer died, left or did not answer in time; names the bucket.
        NonFiniteGradientError: check_finite="raise", and a gradient held a NaN or Inf; raised on every rank, joined
            ranks included. The step is complete, and the next one works.
        FusedReduceError: a CUDA graph is being captured, which cannot hold a step; or an earlier step failed on this
            rank alone, so that a new process group is needed.
    """
    future, step, on_all_ranks = None, None, True
    try:
        communicator = _communicator(state)
        if state._trace is not None:
            buffer = bucket.buffer()
            sparse = buffer.layout is not torch.strided or buffer.numel() == 0
            state._trace.shown(bucket.index(), bucket.parameters(), sparse=sparse)
        if not state._errors.pending():
            prepared = _prepare(state, bucket, communicator)
            on_all_ranks = False
            future = _start(state, bucket, communicator, prepared)
            if bucket.is_last() and state._observed.wanted:
                step = state._observed.end_backward()
                with state._lock:
                    state._counts["collectives"] += state._observed.checks
    except Exception as error:
        state._errors.remember(error, on_all_ranks=on_all_ranks and not isinstance(error, CollectiveError))
        if not in_backward():
            state._errors.pop_error()
            state._observed.drop_step()
            raise
    if future is None:
        future = _done(bucket.buffer())
    if bucket.is_last():
        _end_step(state, step)
    return future


def _prepare(
    state: FusedHookState, bucket: GradBucket, communicator: Communicator
) -> tuple[Bucket, torch.Tensor] | None:
    """The Bucket for a DDP bucket, and its gradients, flat; None if there is nothing to pack (sparse, empty).

    It writes no gradient, and raises the same error on every rank, since it depends on what all ranks share.
    """
    buffer = bucket.buffer()
    dense = buffer.layout is torch.strided
    if not (buffer.is_floating_point() or buffer.is_complex()):
        raise TypeError(
            f"rank {communicator.rank}: {_describe(bucket)} holds {buffer.dtype}; gradients must be fp32, fp16, bf16, "
            "fp64 or complex. Keep integer parameters out of DDP (requires_grad=False)"
        )
    if not communicator.waits_in_backward(buffer.device):
        raise FusedReduceError(
            f"ranks of a LocalGroup cannot use fused_hook on {buffer.device.type}: torch's DistributedDataParallel "
            "waits inside backward, on a thread that these ranks share. Use fusedreduce.DistributedDataParallel"
        )
    refuse_capture(buffer.device, communicator.rank)
    if not dense or buffer.numel() == 0:
        if not state._agreed:
            _agree(state, bucket, communicator)
        return None
    if not buffer.is_contiguous():  # maybe a user's, by set_buffer
        raise ValueError(
            f"rank {communicator.rank}: the buffer of {_describe(bucket)} must be contiguous, got strides "
            f"{buffer.stride()}: give set_buffer a tensor of one piece, as .contiguous() makes it"
        )
    # Under backward(create_graph=True) DDP's buckets are part of the graph.
    flat = buffer.detach()
    if flat.is_complex():
        flat = as_real(flat).view(-1)
    wire_dtype = state.config.wire_dtype(flat.dtype)
    key = BucketKey(bucket.index(), flat.numel(), flat.dtype, wire_dtype, flat.device)
    with state._lock:
        ours = state._buckets.find(key, flat.data_ptr())
    if ours is None:
        parameters = bucket.parameters()
        # Per bucket, not once per state: which calls agree must not depend on how a rank shares states among modules.
        if not state._buckets.knows(key, parameters):
            _agree(state, bucket, communicator)
        communicator.check_wire(wire_dtype, flat.device)
        layout = flat_layout(flat.numel())
        split = exchange.divisor_split(wire_dtype, {flat.dtype}, communicator.size)
        with state._lock:
            ours = state._buckets.check_out(
                key,
                flat.data_ptr(),
                parameters,
                lambda: Bucket(layout, [flat.dtype], wire_dtype, flat.device, _describe(bucket), split=split),
            )
    if ours.uses <= _RELAY_STEPS:
        # DDP may have put other parameters into a bucket of the same index, size and address.
        ours.label = _describe(bucket)
    ours.uses += 1
    return ours, flat


def _start(
    state: FusedHookState,
    bucket: GradBucket,
    communicator: Communicator,
    prepared: tuple[Bucket, torch.Tensor] | None,
) -> torch.futures.Future[torch.Tensor]:
    """Starts one bucket's reduction. An error here may be this rank's alone."""
    buffer = bucket.buffer()
    rows = None
    if state._observed.wanted:
        ours, shown = prepared or (None, buffer)
        rows = state._observed.show(bucket.index(), bucket.parameters(), shown, ours)
    if prepared is None and buffer.layout is torch.strided:
        return _done(buffer)
    with state._lock:
        state._buckets_this_step += 1
    if prepared is None:
        future = _start_sparse(state, bucket, communicator, rows)
    else:
        future = _start_dense(state, bucket, communicator, *prepared, rows)
    state._errors.add_future(future)
    with state._lock:
        state._counts["collectives"] += 1
    return future


def _start_dense(
    state: FusedHookState,
    bucket: GradBucket,
    communicator: Communicator,
    ours: Bucket,
    flat: torch.Tensor,
    rows: BucketPartials | None,
) -> torch.futures.Future[torch.Tensor]:
    """Packs the bucket and starts its all-reduce; statistics go into `rows`."""
    trace = state._trace
    allocations = ours.allocations
    report_after_s = stall_report_after_s(state.config.stall_report_s, communicator, flat.device)
    in_place = ours.wire_dtype is flat.dtype
    gradients, sources = [flat], None
    if rows is not None and in_place and state._observed.checks:
        rows.measure_source(flat)
    if rows is not None and not in_place:
        assert rows.chunks is not None
        ours.chunks, sources = rows.chunks, rows.source
        gradients = [flat] * len(rows)
    in_flight = exchange.start(
        ours,
        gradients,
        communicator,
        divisor=communicator.size / ours.split,
        in_place=in_place,
        vouched=True,
        partials=sources,
    )
    if trace is not None:
        trace.launched(bucket.index(), in_flight.pending, in_flight.issued_ns, communicator)
    scale = None if ours.split == 1.0 else exchange.scalar(1.0 / ours.split, ours.compute_dtype, ours.device)
    finish = Finish(
        state._errors, state._monitor, report_after_s, in_flight, bucket.buffer(), trace, bucket.index(), scale, rows
    )
    future = in_flight.pending.future().then(finish)
    _wait_on_local_group(in_flight.pending, communicator)
    with state._lock:
        state._counts["wire_bytes"] += ours.wire_bytes
        state._counts["wire_allocations"] += ours.allocations - allocations
        if ours.uses == 1:
            state._path = dispatch.path_for(flat.device, (ours.wire_dtype,), (flat.dtype,))
    return future


def _start_sparse(
    state: FusedHookState, bucket: GradBucket, communicator: Communicator, rows: BucketPartials | None
) -> torch.futures.Future[torch.Tensor]:
    """Divides and all-reduces as torch does: there is nothing to flatten or cast in a sparse tensor."""
    if rows is not None and state._observed.checks:
        rows.measure_sparse_source(bucket.buffer())
    finish = FinishSparse(state._errors, _describe(bucket), communicator.rank, rows)
    pending = communicator.all_reduce_sparse(bucket.buffer().div_(communicator.size))
    future = pending.future().then(finish)
    _wait_on_local_group(pending, communicator)
    return future


def _wait_on_local_group(pending: Pending, communicator: Communicator) -> None:
    """Waits for ranks that are threads. DDP waits for the future, which would never fail on a timeout."""
    if isinstance(communicator, LocalCommunicator):
        with contextlib.suppress(CollectiveError):
            wait_for(pending, "the all-reduce", communicator)


def _communicator(state: FusedHookState) -> Communicator:
    """The communicator of the current group: the default group may have been destroyed and made again."""
    group = state.process_group if state.process_group is not None else dist.group.WORLD
    if state._communicator is None or state._group is not group:
        state._communicator, state._group = communicator_of(group), group
        state._agreed = False
        # Peers may begin with a new state, so over a new group every rank agrees on every bucket again.
        state._buckets = BucketCache()
        state._errors.clear()
        state._observed.set_communicator(state._communicator)
    if state._errors.out_of_step is not None:
        raise FusedReduceError(
            f"rank {state._communicator.rank}: an earlier reduction failed on this rank, which may be out of step with "
            "its peers, so it reduces no more. Destroy the process group, make a new one on every rank, and start from "
            f"a checkpoint. The failure: {state._errors.out_of_step}"
        )
    return state._communicator


def _agree(state: FusedHookState, bucket: GradBucket, communicator: Communicator) -> None:
    """Compares the options, and this bucket's size and dtype, across ranks."""
    buffer = bucket.buffer()
    seen = {f"bucket {bucket.index()}": f"{buffer.numel()} elements of {buffer.dtype}"}
    if state.config.grad_stats:
        seen["arithmetic of grad_stats"] = dispatch.arithmetic(buffer.device)
    try:
        agree(communicator, "options of fused_hook", {**state.config.to_dict(), **seen}, buffer.device)
    except AgreementError:
        raise
    except RuntimeError as error:
        what = f"comparing options before the first all-reduce of {_describe(bucket)} failed"
        raise collective_failed(what, communicator, error) from error
    state._agreed = True


def _describe(bucket: GradBucket) -> str:
    shapes = [str(tuple(parameter.shape)) for parameter in bucket.parameters()]
    shown = ", ".join(shapes[:4]) + (f", ... {len(shapes) - 4} more" if len(shapes) > 4 else "")
    return f"bucket {bucket.index()} ({len(shapes)} parameters of shapes {shown})"


def _end_step(state: FusedHookState, step: ShownStep | None) -> None:
    """Called with the last bucket: schedules errors to be raised at the end of backward.

    `step` is None if the step failed, or if no statistics are collected.
    """
    if state._trace is not None:
        state._trace.last_shown()
    with state._lock:
        state._counts["buckets"], state._buckets_this_step = state._buckets_this_step, 0
        state._steps += 1
    if step is None:
        state._observed.drop_step()
        state._errors.raise_at_the_end_of_backward(state._communicator)
    else:
        end_step = functools.partial(state._observed.end_step, step, state._steps)
        state._errors.raise_at_the_end_of_backward(state._communicator, end_step)


def _done(buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    devices: list[int | str | torch.device] | None = [buffer.device] if buffer.is_cuda else None
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
    future.set_result(buffer)
    return future
