"""HookReduction: what `fused_hook` does with the buckets that DDP shows it.

A bucket is prepared (which raises on every rank or none), packed into its wire, and all-reduced or exchanged; the
collective's callback unpacks it. Errors wait for the end of backward, and so do later phases of exchanges that have not
been issued by then, where DDP waits for the buckets only after that.

A callback holds no reference that leads to the process group. A Gloo thread runs and frees it: if that dropped the last
reference to the group, the group would join that thread from within it and abort the process.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, MutableMapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.utils.weak import WeakIdKeyDictionary

from ..buckets import data_path
from ..buckets.bucket import Bucket, BucketCache, BucketKey, BucketState
from ..buckets.data_path import InFlight
from ..buckets.deferred_errors import DeferredErrors, in_backward
from ..buckets.exchanged import ExchangedBucket
from ..buckets.phases import Phases
from ..buckets.stats.bucket_partials import BucketPartials
from ..buckets.streams import refuse_capture
from ..buckets.tensors import as_real, no_autograd, real_numel
from ..buckets.wire_table import WireTable
from ..comm.agreement import agree
from ..comm.local.group import LocalCommunicator
from ..comm.local.process_group import communicator_of
from ..comm.protocol import Communicator, Pending
from ..comm.stall_monitor import StallMonitor, stall_report_after_s
from ..comm.waiting import collective_error, naming_failure, wait_for
from ..config import ReduceConfig
from ..errors import CollectiveError, FusedReduceError
from ..kernels import dispatch, encoded
from ..trace.device_clock import Watched
from ..trace.step_profile import StepProfile
from ..wires import cast_of, described, encoding_of, wire_dtype
from .hook_buckets import make_bucket, phases_of
from .hook_stats import HookStats, ShownStep
from .hook_trace import HookTrace

_Finish = Callable[[Callable[[], object]], torch.Tensor]
AccumulateGrad: type = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
_current_node = torch._C._current_autograd_node
# DDP rebuilds its buckets once: after its first step, with static_graph after its second.
_RELAY_STEPS = 3


class HookReduction:
    """Reduces the buckets of one FusedHookState.

    Args:
        config: the options.

    Attributes:
        observed: the statistics.
        trace: records the steps; None: none is being recorded.
        buckets: by what DDP shows.
        errors: raised at the end of backward.
    """

    def __init__(self, config: ReduceConfig) -> None:
        self.config = config
        self.observed = HookStats(config)
        self.trace: HookTrace | None = None
        self.buckets = BucketCache()
        self.errors = DeferredErrors()
        self._lock = threading.Lock()
        self._communicator: Communicator | None = None
        self._made_for: tuple[object, int] = None, 0  # the communicator's group, and the process that has made it
        self._agreed: MutableMapping[torch.Tensor, None] = WeakIdKeyDictionary()  # parameters of what is not packed
        self._monitor = StallMonitor()
        self._wires = WireTable((config.one_wire,), config.accumulation)
        self._exchanges = self._wires.has_two_phases(3)
        self._phases: dict[str, Phases] = {}  # by type of device
        self._counts = {"steps": 0, "wire_bytes": 0, "collectives": 0, "wire_allocations": 0, "buckets": 0}
        self._buckets_this_step = 0
        self._path = "none"
        # Where this process holds no memory it will not train: before set_device every rank's current GPU is the first.
        if torch.cuda.memory_reserved() > 0:
            device = torch.device("cuda", torch.cuda.current_device())
            # Of a native wire, whose dtype is the gradients', fp32; what they have else is compiled with their bucket.
            sent = wire_dtype(config.one_wire) or torch.float32
            dispatch.warm_up(device, sent, stats=self.observed.wanted, cast=cast_of(config.one_wire))
            if config.accumulation == "fp32" and sent is not torch.float32:
                dispatch.warm_up_combine(device, sent)
            if encoding := encoding_of(config.one_wire):
                encoded.warm_up(device, encoding, stats=self.observed.wanted)
            dispatch.report_compilation()

    def stats(self) -> dict[str, int | str]:
        """Counters since the state was built, and the path that the kernels take."""
        with self._lock:
            return {**self._counts, "path": self._path}

    def communicator(self, process_group: dist.ProcessGroup | None) -> Communicator:
        """The communicator of the state's group; None: of the default group, which may be another than before."""
        group = process_group if process_group is not None else dist.group.WORLD
        if self._communicator is None or self._made_for != (group, os.getpid()):
            self._communicator, self._made_for = communicator_of(group), (group, os.getpid())
            # Peers may begin with a new state, so over a new group every rank agrees on every bucket again.
            self.buckets = BucketCache()
            self._agreed.clear()
            self._phases = {}
            self._buckets_this_step = 0
            self.trace = None  # which is of one group: no further step is recorded
            self.errors = DeferredErrors()  # what is in flight over the old group still tells the old ones
            self.observed.new_group(self._communicator)
        if self.errors.out_of_step is not None:
            raise FusedReduceError(
                f"rank {self._communicator.rank}: an earlier reduction failed on this rank, which may be out of step "
                "with its peers, so it reduces no more. Destroy the process group, make a new one on every rank, and "
                f"start from a checkpoint. The failure: {self.errors.out_of_step}"
            )
        return self._communicator

    def reduce(
        self, process_group: dist.ProcessGroup | None, bucket: GradBucket, *, called_by_ddp: bool = False
    ) -> torch.futures.Future[torch.Tensor]:
        """Starts to average one DDP bucket, outside of inference mode; see `fused_hook`."""
        if torch.is_inference_mode_enabled():
            with no_autograd():
                return self.reduce(process_group, bucket, called_by_ddp=called_by_ddp)
        buffer = bucket.buffer()
        future, step, on_all_ranks = None, None, True
        try:
            communicator = self.communicator(process_group)
            if self.trace is not None:
                self.trace.shown(bucket)
            if not self.errors.pending():
                prepared = self._prepare(bucket, buffer, communicator)
                on_all_ranks = False
                future = self._start(bucket, buffer, communicator, prepared, called_by_ddp=called_by_ddp)
                if bucket.is_last() and self.observed.wanted:
                    step = self.observed.end_backward()
                    with self._lock:
                        self._counts["collectives"] += self.observed.checks
        except Exception as error:
            self.errors.remember(error, on_all_ranks=on_all_ranks and not isinstance(error, CollectiveError))
            if not in_backward():
                self.errors.pop_error()
                self.observed.take_step()
                raise
        if future is None:
            future = _done(buffer)
        if bucket.is_last():
            self._end_step(step)
        return future

    def _prepare(
        self, bucket: GradBucket, buffer: torch.Tensor, communicator: Communicator
    ) -> tuple[Bucket, torch.Tensor] | None:
        """The Bucket for a DDP bucket, and its gradients, flat; None if there is nothing to pack (sparse, empty).

        It writes no gradient, and raises the same error on every rank, since it depends on what all ranks share.
        """
        if buffer.device.type == "cuda":
            refuse_capture(communicator.rank)
        if buffer.layout is not torch.strided or buffer.numel() == 0 or not buffer.is_contiguous():
            self._prepare_unpacked(bucket, buffer, communicator)
            return None
        # Under backward(create_graph=True) DDP's buckets are part of the graph.
        flat = buffer.detach()
        if flat.is_complex():
            flat = as_real(flat).view(-1)
        shapes = tuple(one.shape for one in bucket.parameters()) if self._exchanges else ()
        key = BucketKey(bucket.index(), flat.numel(), flat.dtype, flat.device, shapes)
        with self._lock:
            ours = self.buckets.find(key, flat.data_ptr())
        if ours is None:
            ours = self._new_bucket(bucket, buffer, flat, key, communicator)
        if ours.uses <= _RELAY_STEPS:
            # DDP may have put other parameters into a bucket of the same index, size and address.
            ours.label = _describe(bucket)
        ours.uses += 1
        return ours, flat

    def _prepare_unpacked(self, bucket: GradBucket, buffer: torch.Tensor, communicator: Communicator) -> None:
        """Checks a bucket of which nothing is packed, and compares it across ranks when it is new.

        Per bucket, not once per state: which calls agree must not depend on how ranks share states among modules.
        """
        self._check(bucket, buffer, communicator)
        parameters = bucket.parameters()
        if not any(one in self._agreed for one in parameters):
            self._agree(bucket, communicator)
            self._agreed.update(dict.fromkeys(parameters))

    def _new_bucket(
        self,
        bucket: GradBucket,
        buffer: torch.Tensor,
        flat: torch.Tensor,
        key: BucketKey,
        communicator: Communicator,
    ) -> Bucket:
        """Checks out the Bucket of a buffer that was not known at its address."""
        self._check(bucket, buffer, communicator)
        parameters = bucket.parameters()
        if self._exchanges and sum(map(real_numel, parameters)) != flat.numel():
            raise ValueError(
                f"rank {communicator.rank}: the buffer of {_describe(bucket)} has {buffer.numel()} elements, but a "
                "wire that is exchanged needs those of its parameters: give set_buffer a tensor of as many"
            )
        if not self.buckets.knows(key, parameters):
            self._agree(bucket, communicator)
        communicator.check_wire(self.config.wire_dtype(flat.dtype), flat.device)
        phases = self._phases.get(flat.device.type)
        with self._lock:
            ours = self.buckets.check_out(
                key,
                flat.data_ptr(),
                parameters,
                lambda: make_bucket(
                    flat,
                    [real_numel(one) for one in parameters],
                    [encoding_of(self.config.wire_of(one)) is not None for one in parameters],
                    self.config,
                    communicator.size,
                    _describe(bucket),
                    phases,
                ),
            )
            self._path = dispatch.path_for(flat.device, (ours.wire_dtype,))
        dispatch.report_compilation()
        ours.uses = 0
        return ours

    def _check(self, bucket: GradBucket, buffer: torch.Tensor, communicator: Communicator) -> None:
        """Raises, on every rank, if what DDP shows cannot be reduced."""
        if not (buffer.is_floating_point() or buffer.is_complex()):
            raise TypeError(
                f"rank {communicator.rank}: {_describe(bucket)} holds {buffer.dtype}; gradients must be fp32, fp16, "
                "bf16, fp64 or complex. Keep integer parameters out of DDP (requires_grad=False)"
            )
        if not communicator.waits_in_backward(buffer.device):
            raise FusedReduceError(
                f"ranks of a LocalGroup cannot use fused_hook on {buffer.device.type}: torch's DistributedDataParallel "
                "waits inside backward, on a thread that these ranks share. Use fusedreduce.DistributedDataParallel"
            )
        if buffer.layout is torch.strided and not buffer.is_contiguous():  # maybe a user's, by set_buffer
            raise ValueError(
                f"rank {communicator.rank}: the buffer of {_describe(bucket)} must be contiguous, got strides "
                f"{buffer.stride()}: give set_buffer a tensor of one piece, as .contiguous() makes it"
            )

    def _start(
        self,
        bucket: GradBucket,
        buffer: torch.Tensor,
        communicator: Communicator,
        prepared: tuple[Bucket, torch.Tensor] | None,
        *,
        called_by_ddp: bool,
    ) -> torch.futures.Future[torch.Tensor]:
        """Starts one bucket's reduction. An error here may be this rank's alone.

        On CPU a bucket ends as backward does, by the thread that has called it: in its collective's callback the
        backend's thread would take the interpreter's lock from backward. That is so only where nobody asks for the
        future before DDP's own callback does: not a hook around this one, nor DDP in static_graph's first step and in
        join, whose buckets are new or are shown behind the nodes of backward.
        """
        rows = None
        ours, shown = prepared or (None, buffer)
        if self.observed.wanted:
            rows = self.observed.show(bucket.index(), bucket.parameters(), shown, ours)
        if ours is None and buffer.layout is torch.strided:
            return _done(buffer)
        allocations = 0 if ours is None else ours.allocations
        if ours is None:
            pending, finish = self._start_sparse(bucket, buffer, communicator, rows)
        else:
            pending, finish = self._start_dense(bucket, buffer, communicator, ours, shown, rows)
        future: torch.futures.Future[torch.Tensor]
        within = called_by_ddp and not buffer.is_cuda and isinstance(_current_node(), AccumulateGrad)
        if within and ours is not None and ours.uses > 1:
            future = torch.futures.Future()
            reduced = functools.partial(wait_for, pending, ours.collective_text)
            self.errors.add(lambda ranks: future.set_result(finish(functools.partial(reduced, ranks))))
        else:
            future = pending.future().then(lambda reduced: finish(reduced.value))
            self.errors.add(functools.partial(wait_for, future, "the reduction of a bucket"))
        if isinstance(communicator, LocalCommunicator):
            # Ranks are threads, and DDP waits for the future, which would never fail on a timeout.
            self._issue_phases()
            with contextlib.suppress(CollectiveError):
                wait_for(pending, "the all-reduce", communicator)
        with self._lock:
            self._buckets_this_step += 1
            self._counts["collectives"] += 1 if ours is None else ours.collectives
            if ours is not None:
                self._counts["wire_bytes"] += ours.wire_bytes
                self._counts["wire_allocations"] += ours.allocations - allocations
        return future

    def _start_dense(
        self,
        bucket: GradBucket,
        buffer: torch.Tensor,
        communicator: Communicator,
        ours: Bucket,
        flat: torch.Tensor,
        rows: BucketPartials | None,
    ) -> tuple[Pending, _Finish]:
        """Packs the bucket and starts its all-reduce; statistics go into `rows`. Returns it, and its callback."""
        index = bucket.index()
        profile = None if self.trace is None else self.trace.profile_of(index)
        exchanged = isinstance(ours, ExchangedBucket)
        in_place = ours.wire_dtype is flat.dtype and not exchanged
        gradients = flat.split([real_numel(one) for one in bucket.parameters()]) if exchanged else [flat]
        sources = None
        if rows is not None and in_place:
            if self.observed.checks:
                rows.measure_source(flat)
        elif rows is not None:
            sources = rows.source
            if rows.chunks is not None:
                ours.chunks, gradients = rows.chunks, [flat] * len(rows)
        in_flight = data_path.start(
            ours,
            gradients,
            communicator,
            divisor=communicator.size / ours.sent_split,
            in_place=in_place,
            partials=sources,
        )
        pending = in_flight.pending
        if profile is not None:
            # On CUDA a stream waits for what is watched, here, before phase two is issued; but for no future.
            watched: Watched = torch.futures.Future() if ours.on_cuda and ours.collectives > 1 else pending
            profile.launched(index, watched, in_flight.issued_ns)
            profile.leave()
        finish = functools.partial(
            _finish_dense,
            errors=self.errors,
            monitor=self._monitor,
            report_after_s=stall_report_after_s(self.config.stall_report_s, communicator, flat.device),
            in_flight=in_flight,
            buffer=buffer,
            profile=profile,
            index=index,
            rows=rows,
        )
        return pending, finish

    def _start_sparse(
        self, bucket: GradBucket, buffer: torch.Tensor, communicator: Communicator, rows: BucketPartials | None
    ) -> tuple[Pending, _Finish]:
        """Divides and all-reduces as torch does: there is nothing to flatten or cast in a sparse tensor."""
        if rows is not None and self.observed.checks:
            rows.measure_sparse_source(buffer)
        finish = functools.partial(
            _finish_sparse, errors=self.errors, label=_describe(bucket), rank=communicator.rank, rows=rows
        )
        # What was made in inference mode is written in that mode only.
        mean = buffer / communicator.size if buffer.is_inference() else buffer.div_(communicator.size)
        return communicator.all_reduce_sparse(mean), finish

    def _agree(self, bucket: GradBucket, communicator: Communicator) -> None:
        """Compares the options, and this bucket's size and dtype, across ranks."""
        buffer = bucket.buffer()
        seen = {f"bucket {bucket.index()}": f"{buffer.numel()} elements of {buffer.dtype}"}
        if self.config.grad_stats:
            seen["arithmetic of grad_stats"] = dispatch.arithmetic(buffer.device)
        why = encoded.refusal(buffer.device) if encoding_of(self.config.one_wire) else ""
        seen |= {"encoding on this GPU": "no" if why else "yes", "wire": described(self.config.one_wire)}
        what = f"comparing options before the first all-reduce of {_describe(bucket)} failed"
        with naming_failure(what, communicator, but=FusedReduceError):
            agree(communicator, "options of fused_hook", {**self.config.to_dict(), **seen}, buffer.device)
            if why:
                raise FusedReduceError(f"rank {communicator.rank}: {buffer.device} cannot encode gradients: {why}")
            if self._wires.has_two_phases(communicator.size):
                self._open_phases(communicator, buffer.device)

    def _open_phases(self, communicator: Communicator, device: torch.device) -> None:
        """Opens the phases of the group's states; other ones, where a rank has collected all its earlier states."""
        group, _ = self._made_for
        phases = phases_of(group, communicator, device, self.config)
        is_open = communicator.all_gather_bytes(bytes([phases.is_open(self._wires)]), 1, device)
        if len(set(is_open)) > 1:
            phases = phases_of(group, communicator, device, self.config, anew=True)
        self._phases[device.type] = phases
        phases.open(self._wires, self.config.ranks_per_node)

    def _end_step(self, step: ShownStep | None) -> None:
        """Called with the last bucket: issues later phases, and schedules errors to be raised at the end of backward.

        Phases wait for the end of backward too where the host would wait for those before, so that what backward still
        does goes on: a peer may wait for it. A callback of the engine that is queued by the node of a parameter's
        gradient comes before that of torch's DDP, which waits for the buckets. With static_graph DDP waits at once, in
        the first step; so does its join, and other callers of the hook.

        Args:
            step: for the statistics; None: it has failed, or none are collected.
        """
        issue = end_step = None
        phases = self._phases.values()
        if phases and isinstance(_current_node(), AccumulateGrad) and not all(one.follow_at_once for one in phases):
            issue = self._issue_phases
        elif phases:
            self._issue_phases()
        if self.trace is not None:
            self.trace.last_shown()
        with self._lock:
            self._counts["buckets"], self._buckets_this_step = self._buckets_this_step, 0
            self._counts["steps"] += 1
        if step is None:
            self.observed.take_step()
        else:
            end_step = functools.partial(self.observed.end_step, step, self._counts["steps"])
        self.errors.raise_at_the_end_of_backward(self._communicator, end_step, issue)

    def _issue_phases(self) -> None:
        """Issues those that are due, also where this rank has failed: its peers would wait for them."""
        with no_autograd():
            for phases in self._phases.values():
                try:
                    phases.issue_all()
                except Exception as error:
                    self.errors.remember(error)
                    phases.fail(error)


def _finish_dense(
    reduced: Callable[[], object],
    *,
    errors: DeferredErrors,
    monitor: StallMonitor,
    report_after_s: float,
    in_flight: InFlight,
    buffer: torch.Tensor,
    profile: StepProfile | None,
    index: int,
    rows: BucketPartials | None,
) -> torch.Tensor:
    """Unpacks into DDP's bucket. On CUDA the callback's stream already waits for the collective.

    Args:
        reduced: raises if the collective has failed.
        errors: keeps a failure, which the future raises too.
        monitor: watches the unpack's event (CUDA only).
        report_after_s: seconds after which the reduction is overdue.
        in_flight: the bucket in flight.
        buffer: DDP's bucket; the future's value.
        profile: takes when unpacking begins and ends.
        index: DDP's index of the bucket.
        rows: take the bucket's partial statistics; None: none are collected.
    """
    ours, rank = in_flight.bucket, in_flight.rank
    try:
        try:
            reduced()
        except RuntimeError as error:
            ours.state = BucketState.FAILED
            if isinstance(error, CollectiveError):
                raise
            raise collective_error(f"{ours.collective_text()} failed", rank, error) from error
        if profile is not None:
            profile.unpack(index)
        if rows is not None and in_flight.in_place:
            rows.measure_result(in_flight.wire)
        done = data_path.finish(in_flight, partials=None if rows is None else rows.result)
        if profile is not None:
            profile.unpacked(index)
    except Exception as error:
        errors.remember(error)
        raise
    if done is not None:
        monitor.watch(ours, f"rank {rank}: the reduction of {ours.label}", done.query, report_after_s, ours.device)
    return buffer


def _finish_sparse(
    reduced: Callable[[], Any],
    *,
    errors: DeferredErrors,
    label: str,
    rank: int,
    rows: BucketPartials | None,
) -> torch.Tensor:
    """Returns the sum of a sparse bucket; arguments as of `_finish_dense`, `label` names the bucket in messages."""
    try:
        try:
            value = reduced()[0]
        except RuntimeError as error:
            raise collective_error(f"the all-reduce of {label} failed", rank, error) from error
        if rows is not None:
            rows.measure_sparse_result(value)
    except Exception as error:
        errors.remember(error)
        raise
    return cast(torch.Tensor, value)


def _describe(bucket: GradBucket) -> str:
    shapes = [str(tuple(parameter.shape)) for parameter in bucket.parameters()]
    shown = ", ".join(shapes[:4]) + (f", ... {len(shapes) - 4} more" if len(shapes) > 4 else "")
    return f"bucket {bucket.index()} ({len(shapes)} parameters of shapes {shown})"


def _done(buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    devices: list[int | str | torch.device] | None = [buffer.device] if buffer.is_cuda else None
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
    future.set_result(buffer)
    return future
