"""Reducer: when which bucket is reduced. Owns the hooks on the parameters; knows nothing of DDP.

    reducer = Reducer(model.parameters(), communicator, ReduceConfig(wire="bf16"))
    for batch in data:
        loss = model(batch)
        reducer.prepare_for_backward(loss)       # arms the hooks
        loss.backward()                          # every .grad is the mean over all ranks when this returns
        optimizer.step()

One step: armed (prepare_for_backward) -> each parameter's hook marks it ready -> a bucket whose parameters all are is
launched, strictly in plan order, so that all ranks issue the same collectives in the same order whatever their own
readiness was -> when backward is done a callback of the autograd engine finishes the buckets in that order.

Once a step has shown which parameter completes each bucket, only that one keeps its hook (on CPU also those that
complete a group within a bucket, which is packed at once, while it is in the cache). That is sound in a step whose
backward began at an output of forward with every `.grad` None: then a `.grad` that is there was made by this backward.
In any other step every parameter is hooked again. And in every step each gradient must, before it is overwritten, be
the tensor that was packed, at the same version.

That callback is queued by a pre-hook on the outputs: what a parameter's hook queues inside a reentrant checkpoint
would run at the end of the inner backward, with gradients still to come. It is queued by the last hook where no
output was given or took part in the loss.

The first step uses one bucket per dtype and device. Then rank 0's order of readiness is broadcast and every rank cuts
it into buckets by the same pure function. With find_unused_parameters (and no static graph) nothing is learned:
buckets of limited size, in reverse order of registration, from the start.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
import operator
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import record_function
from torch.utils.hooks import RemovableHandle

from . import admission, exchange
from .bucket_set import BucketMaker, BucketSet
from .comm.agreement import agree_on_parameters
from .comm.monitor import StallMonitor
from .comm.protocol import Communicator, Pending
from .config import ReduceConfig
from .deferred import in_backward
from .errors import AgreementError, CollectiveError, FusedReduceError
from .grad_bucket import GradBucket
from .parameter_hooks import ParameterHooks
from .planning.assignment import BucketCaps
from .planning.plan import Plan
from .planning.saved import plan_hash
from .planning.timeline import MISSING_NS
from .plans import Plans
from .reductions import CommHook, HookedReduction, Members, Reduction
from .step import Step, unfinished_text
from .step_clock import Looked, StepClock
from .trace import Recorder
from .unused import UsedMap, tensors_in, unreachable

_logger = logging.getLogger(__name__)
_STALL_SHARE_OF_TIMEOUT = 0.8
# After a step that needed all hooks: so many that would not have, before they are taken off again (4 us each).
_CLEAN_STEPS = 3


class ReducerState(enum.Enum):
    """Where a reducer stands."""

    IDLE = "idle"  # no synchronised backward is expected, or the last one is done: gradients stay local
    ARMED = "armed"  # the next backward is reduced
    FAILED = "failed"  # a hook, kernel or collective raised: reset() is needed
    LOST = "lost"  # reset, but the group of ranks cannot be used any more: set_communicator() is needed
    CLOSED = "closed"  # for good


@dataclass
class StepTimes:
    """Marks of the latest synchronised step, host clock, ns of time.time_ns()."""

    forward_start: int = 0
    backward_start: int = 0
    backward_end: int = 0
    comm_start: int = 0
    comm_end: int = 0


class Reducer:
    """Averages the gradients of some parameters over a group of ranks, during backward.

    Args:
        parameters: leaves that require a gradient, on devices of one type: fp32, fp16, bf16, fp64 or complex.
        communicator: the ranks.
        config: see ReduceConfig.
        names: theirs, for messages; default "parameter 0", ...
        sparse: per parameter whether its gradient is a sparse COO tensor.
        caps: limits of the buckets after the first step.
        find_unused_parameters: search the graph of the outputs for parameters that will get no gradient.
        static_graph: every step uses the same parameters equally often; allows reentrant checkpoints that share them.
        gradient_as_bucket_view: gradients become views of the wire (wire "native" only); `zero_grad` keeps them.
        skip_unused_buckets: do not reduce a bucket whose parameters are all unused; every rank must then have the
            same unused parameters.
        exclusive: stands alone: refuse parameters that another such reducer holds. (Wrappers may be nested.)
        agreed: the ranks have compared model and settings already.

    Raises:
        ValueError, TypeError: bad input; nothing has been hooked. What differs across ranks is raised by the first
            `prepare_for_backward`, as AgreementError, on every rank.
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        communicator: Communicator,
        config: ReduceConfig | None = None,
        *,
        names: Sequence[str] | None = None,
        sparse: Sequence[bool] | None = None,
        caps: BucketCaps | None = None,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = False,
        skip_unused_buckets: bool = False,
        exclusive: bool = True,
        agreed: bool = False,
    ) -> None:
        self.parameters = tuple(parameters)
        count = len(self.parameters)
        self.config = config or ReduceConfig()
        self.names = tuple(names) if names is not None else tuple(f"parameter {index}" for index in range(count))
        self.sparse = tuple(sparse) if sparse is not None else (False,) * count
        admission.check_parameters(self.parameters, self.names, self.sparse, self.config, gradient_as_bucket_view)
        self.caps = caps or BucketCaps()
        self.communicator = communicator
        self.find_unused_parameters = find_unused_parameters
        self.static_graph = static_graph
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.skip_unused_buckets = skip_unused_buckets
        self.exclusive = exclusive
        self._plans = Plans(
            self.parameters,
            self.names,
            self.sparse,
            self.config,
            self.caps,
            communicator,
            learns=static_graph or not find_unused_parameters,
        )
        self.state = ReducerState.IDLE
        self.times = StepTimes()
        self.steps = 0
        self.last_order: tuple[int, ...] = ()
        self.last_unused: tuple[int, ...] = ()
        self.unused_always_same = True
        self.buckets_reduced = 0
        self.on_error: Callable[[str], None] | None = None
        self.shares_parameters = admission.enter(self, self.parameters, self.names, exclusive=exclusive)
        self._agreed = agreed
        self._checked_wires = False
        self._sync = True
        self._lock = threading.RLock()  # autograd has a thread per device
        self._devices = [parameter.device for parameter in self.parameters]
        self._ready_ns = [0] * count
        self._clock = StepClock(count, self._one_device())
        self._forward_ns = MISSING_NS
        self._recorded: list[tuple[int, Plan, Looked]] = []
        self._record_limit = 0
        self._rounds = 0
        self._dtypes: list[torch.dtype] | None = [parameter.dtype for parameter in self.parameters]
        self._fires: list[int] | None = None
        self._counted = [0] * count
        self._failure = ""
        self._collective_failed = False
        self._issued = 0
        self._resets = 0
        self._local_backward_expected = False
        self._warned: set[str] = set()
        self._installed: list[torch.futures.Future[Any]] = []
        self._divisor: float | None = None
        self._count_ranks: Any = None
        self._watched: list[RemovableHandle] = []
        self._monitor = StallMonitor()
        self._used = self._new_used_map()
        self._maker = BucketMaker(
            parameters=self.parameters,
            names=self.names,
            sparse=self.sparse,
            config=self.config,
            as_views=gradient_as_bucket_view,
            communicator=communicator,
        )
        self._allocations = 0
        self._restrided = 0
        self._streams_known = False
        self._hooks = ParameterHooks(self, self.parameters, Reducer.on_gradient)
        # While few are hooked: by parameter its bucket, the groups that it completes there, and whether the bucket.
        self._tells: dict[int, tuple[int, list[int], bool]] = {}
        self._clean_steps = 0
        self._buckets = BucketSet(self._plans.first(), self._maker)
        self._lay(self._buckets.plan)

    # Lifecycle of a step

    def prepare_for_forward(self) -> None:
        """Checks that the last step is finished, and lays the buckets out anew where that is due.

        Optional in a plain loop: `prepare_for_backward` does the same, but a relay before forward costs less memory.
        """
        with self._lock:
            self.begin_forward()
            if self._sync:
                self.agree()
                self.rebuild()

    def begin_forward(self) -> None:
        """The part of `prepare_for_forward` without collectives."""
        with self._lock:
            self.check_finalized()
            self._check_still_hooked()
            self.times.forward_start = time.time_ns()
            self._forward_ns = time.perf_counter_ns()

    def prepare_for_backward(self, outputs: object = None) -> None:
        """Arms the hooks: the next backward is reduced. Called after each forward, not under `no_sync`.

        Args:
            outputs: what the forward returned, or the loss: tensors in any pytree. Needed for static_graph, for
                find_unused_parameters, and for reentrant checkpoints to be told from the backward around them.

        Raises:
            FusedReduceError: the last step is not finished, with the names of what is missing, or has failed.
            AgreementError: ranks were given different models or settings; on every rank. First call only.
        """
        with self._lock:
            self.check_finalized()
            self._local_backward_expected = not self._sync
            if not self._sync:
                self.state = ReducerState.IDLE
                return
            self._check_still_hooked()
            self.agree()
            self.rebuild()
            if self.shares_parameters:
                self.shares_parameters = admission.shared(self, self.parameters)
                self._hook_all()  # another reducer writes the same gradients: versions prove nothing
            if self._tells and self.state is ReducerState.ARMED and self._has_gradients():
                self._hook_all()
                self._warn_once(
                    "gradients have come, but by no backward from an output of forward: they were not averaged. "
                    "Return from forward every tensor that a loss is made of"
                )
            tensors = tensors_in(outputs)
            unused: list[int] = []
            if self.static_graph:
                if not tensors and self._fires is None:
                    raise ValueError("static_graph=True needs the outputs: prepare_for_backward(outputs)")
                unused = [index for index, fires in enumerate(self._fires or ()) if fires == 0]
            elif self.find_unused_parameters and tensors:
                with record_function("fusedreduce::search_unused_parameters"):
                    unused = unreachable(tensors, self._hooks.nodes)
                self._note_unused(unused)
            self._step = self._new_step(unused)
            profiled = self._plans.measured() and self._plans.scheduler.profiles()
            if not self._watch(tensors) or profiled:
                self._hook_all()
                self._clean_steps = _CLEAN_STEPS if profiled else self._clean_steps
            closely = profiled or len(self._recorded) < self._record_limit
            self._clock.arm(len(self._buckets), closely=closely, forward_ns=self._forward_ns)
            self._forward_ns = MISSING_NS
            self._divisor = self._counted_ranks()
            self.state = ReducerState.ARMED
            self.times.backward_start = time.time_ns()

    def on_gradient(self, index: int) -> None:
        """A parameter's gradient has been accumulated; called by its hook, on an autograd thread."""
        if self.state is not ReducerState.ARMED:
            self._local_gradient(index)
            return
        with self._lock:
            self._clock.enter()
            step = self._step
            if self.find_unused_parameters or self.static_graph:
                if self.parameters[index].grad is not None:
                    self._used.mark(index)
                if self.static_graph and self._fires is None:
                    self._counted[index] += 1
                    step.count(index)
                    self._record_stream(index)
                    return
            try:
                if self._tells:
                    if not self._arrive_for_others(index):
                        return
                else:
                    self._arrive(index)
                    if index in self._buckets.large and step.is_ready(index):
                        self._take(self._buckets.bucket_of[index], self._buckets.large[index])
                if self.config.overlap and step.head_is_ready():
                    self._launch()
            except BaseException as error:
                self._note_failure(error)
                raise
            self._clock.leave()
            if step.callbacks == 0 and (step.all_launched() or not self.config.overlap and step.all_ready()):
                if in_backward():
                    self._queue_end(step)
                else:
                    self._end_of_backward(step)

    def finalize(self) -> None:
        """Ends a step of a plain loop: raises if not every gradient has been reduced. Waits for nothing."""
        self.check_finalized()

    def check_finalized(self) -> None:
        """Raises if a backward has begun but not every bucket has been reduced, or if the last one failed.

        Raises:
            FusedReduceError: with the names of all parameters that are missing.
        """
        if self.state is ReducerState.CLOSED:
            raise FusedReduceError("this reducer is closed")
        if self.state is ReducerState.LOST or self._collective_failed:
            raise FusedReduceError(self._lost_text())
        # A backward whose queued end never came has raised, maybe before any parameter told.
        broken = self._step.callbacks > 0 and not in_backward()
        if self.state is ReducerState.FAILED or (self.state is ReducerState.ARMED and (self._step.begun or broken)):
            first_static = self.static_graph and self._fires is None
            text = unfinished_text(
                [index for index in self._step.missing() if not (first_static and self._counted[index])],
                self.names,
                self.communicator.rank,
                find_unused=self.find_unused_parameters,
                static_graph=self.static_graph,
                failure=self._failure,
                debug_hint=os.environ.get("TORCH_DISTRIBUTED_DEBUG", "OFF").upper() == "OFF",
            )
            raise FusedReduceError(text)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forwards within it do not arm the hooks: gradients accumulate here, and the next step reduces their sum."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def expect_local_backward(self) -> None:
        """The next backward is not reduced on purpose (no_sync of a wrapper)."""
        self._local_backward_expected = True

    # Failures, changes, the end

    def reset(self) -> None:
        """Gives up a step that failed or was not finished. Every rank calls it, within the group's timeout.

        Ranks compare how many collectives each has issued, outside of the collectives' own channel. Gradients stay as
        they are (those that are views of a buffer become None): zero them.

        Raises:
            FusedReduceError: a collective failed, or ranks have issued different numbers of them, or one did not
                come: the group cannot be used any more. On every rank that came. The reducer then waits for
                `set_communicator`.
        """
        with self._lock:
            how = "failed" if self._collective_failed else "whole"
            mine = f"{self._issued} {plan_hash(self.plan):016x} {self.rebuilt} {how}"
            self.give_up_step()
            self._resets += 1
            try:
                held = self.communicator.compare_aside(f"reset {self._resets}", mine, self._devices[0])
            except RuntimeError as error:
                self._lose(f"not every rank called reset() in time: {error}")
            if any(one.endswith("failed") for one in held):
                self._lose("a collective failed, on ranks " + _where(held, lambda one: one.endswith("failed")))
            issued = [one.split()[0] for one in held]
            if len(set(issued)) > 1:
                self._lose(f"ranks have issued different numbers of collectives, by rank: {issued}")
            if len(set(held)) > 1:
                # Some had gone on to the next plan, or had learned an order, when others failed.
                self._plans.forget()
                self._lay(self._plans.first())

    def give_up_step(self) -> None:
        """The part of `reset` that concerns this rank alone; for what follows with `set_communicator`."""
        with self._lock:
            if self.state is ReducerState.CLOSED:
                raise FusedReduceError("this reducer is closed")
            self.state = ReducerState.IDLE
            self._failure, self._collective_failed = "", False
            self._agreed = False
            self._installed = []
            self._count_ranks = None
            self._counted = [0] * len(self.parameters)
            self._plans.restart()
            for reduction in self._buckets.reductions:
                reduction.drop_views()
            # New wire buffers: a collective that is still under way may write into the old ones.
            self._lay(self.plan)
            self._used = self._new_used_map()
            self._fires = None

    def set_communicator(self, communicator: Communicator) -> None:
        """Goes on with another group of ranks: they agree anew, and the plan is learned anew.

        Args:
            communicator: the new ranks; the next synchronised step is the first one for all of them.
        """
        with self._lock:
            self.communicator = communicator
            self._maker = dataclasses.replace(self._maker, communicator=communicator)
            self._issued = 0
            self._resets = 0
            self._plans.use(communicator)
            self.give_up_step()
            self._lay(self._plans.first())

    def set_static_graph(self) -> None:
        """As static_graph=True, before the first backward.

        Raises:
            RuntimeError: a backward has been reduced already.
        """
        if self.static_graph:
            return
        if self.steps or self.state is ReducerState.ARMED:
            raise RuntimeError("set_static_graph() should be called before training loop starts")
        self.static_graph = self._plans.learns = True
        self._lay(self._plans.first())

    def close(self) -> None:
        """Removes the hooks and gives the buffers up; gradients that are views keep theirs. May be called twice."""
        with self._lock:
            self.state = ReducerState.CLOSED
            self.remove_hooks()
            self._buckets = BucketSet((), self._maker)
            admission.leave(self, self.parameters)

    def remove_hooks(self) -> None:
        """Removes the hooks from the parameters; nothing is reduced from then on."""
        self._tells = {}
        self._hooks.remove()

    def __enter__(self) -> Reducer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Comm hooks and views

    def register_comm_hook(self, state: object, hook: CommHook) -> None:
        """Has `hook(state, bucket)` reduce the buckets in place of our own wire.

        Args:
            state: the hook's first argument.
            hook: shown a GradBucket that is flat, dense, of one dtype, without padding and not divided; returns a
                future of one tensor of as many elements.

        Raises:
            RuntimeError: a hook is registered already.
            ValueError: the wire is not "native": the hook would take its place.
        """
        with self._lock:
            if self._maker.hook is not None:
                raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
            if self.config.wire != "native":
                raise ValueError(
                    f"wire={self.config.wire!r} and a comm hook exclude each other: the hook decides what travels"
                )
            self._maker = dataclasses.replace(self._maker, hook=(state, hook))
            self._plans.give_up_measuring()
            self._lay(self.plan)

    def leave_gradients_to_hook(self) -> None:
        """The comm hook writes `.grad` itself, or steps the optimizer: nothing is copied out of its buckets."""
        self._maker = dataclasses.replace(self._maker, keeps_gradients=True)
        self._lay(self.plan)

    def allow_other_dtypes(self) -> None:
        """Parameters change their dtype during a step (torch's mixed precision)."""
        self._dtypes = None

    def zero_grad(self) -> None:
        """Zeroes all gradients in place, one operator per bucket where they are views of it."""
        for reduction in self._buckets.reductions:
            if not reduction.zero_views():
                for parameter in reduction.members.parameters:
                    if parameter.grad is not None:
                        parameter.grad.detach_().zero_()

    # Agreed and learned

    def agree(self) -> None:
        """Compares model and settings across ranks, unless that has been done since the last `reset`. A collective.

        Raises:
            AgreementError: on every rank.
            UnsupportedWireError: the backend cannot sum the wire's dtype; on every rank.
            CollectiveError: a peer did not answer.
        """
        if self._agreed and self._checked_wires:
            return
        if not self._agreed:
            descriptions = [
                admission.describe(*one) for one in zip(self.parameters, self.names, self.sparse, strict=True)
            ]
            flags: dict[str, object] = {
                "find_unused_parameters": self.find_unused_parameters,
                "static_graph": self.static_graph,
                "gradient_as_bucket_view": self.gradient_as_bucket_view,
                "skip_unused_buckets": self.skip_unused_buckets,
                "plan": f"{plan_hash(self.plan):016x}",
                "plan learned": self.rebuilt,
            }
            settings = admission.settings(self.config, self.caps, flags)
            try:
                agree_on_parameters(self.communicator, descriptions, settings, self._devices[0])
            except AgreementError:
                raise
            except RuntimeError as error:
                what = "comparing model and settings across ranks failed"
                raise exchange.collective_error(what, self.communicator.rank, error) from error
            self._agreed = True
        if self._maker.hook is None:
            for bucket in self._buckets.packed():
                self.communicator.check_wire(bucket.bucket.wire_dtype, bucket.members.device)
        self._checked_wires = True

    def rebuild(self) -> bool:
        """Lays out what ranks have agreed on; says whether that was new. A plan changes only here, between steps.

        After the first step that is rank 0's order of readiness, by one collective. Later it is what the schedule has
        had them agree on at the end of earlier steps.

        Raises:
            AgreementError: ranks have decided on different plans; on every rank.
            CollectiveError: a peer did not answer.
        """
        with self._lock:
            try:
                plan, issued = self._plans.next(self.plan)
            except CollectiveError:
                self._collective_failed = True
                raise
            self._issued += issued
            # Also where the order leaves the buckets as they are: hooks and streams are those of a first step.
            new = issued > 0 or plan != self.plan
            if new:
                self._lay(plan)
            return new

    def should_rebuild(self) -> bool:
        """Whether an order of readiness is still to be learned or adopted."""
        return self._plans.wants_order()

    @property
    def rebuilt(self) -> bool:
        """Whether the buckets have been laid out by an order of readiness."""
        return self._plans.rebuilt

    def end_shadow_step(self) -> None:
        """A rank without inputs (join) has taken part in a step: it takes part in agreeing on a plan too."""
        self._plans.note_order()
        if self._plans.measured():
            self._issued += self._plans.scheduler.report(self.plan)
            self._plans.scheduler.wait()
        self._close_round(None)

    def get_backward_stats(self) -> list[int]:
        """Per parameter, ns from the end of forward until its gradient was ready, host clock.

        Of the latest step in which all parameters were hooked; see `bucket_times` for every step.
        """
        return list(self._ready_ns)

    def bucket_times(self) -> list[tuple[int, int]]:
        """Per bucket of the latest step, ns since backward began until it was ready and until it was launched."""
        return list(zip(self._clock.ready_ns, self._clock.launched_ns, strict=True))

    def plan_json(self) -> str:
        """The plan in use, to keep in a checkpoint; `ReduceConfig(plan=...)` takes it, and keeps to it."""
        return self._plans.json(self.plan)

    @contextmanager
    def record_trace(self, folder: str | Path, limit: int = 100) -> Iterator[None]:
        """Within: what happens in each synchronised step is recorded, for `fusedreduce trace` and `fusedreduce plan`.

        Args:
            folder: where this rank's file goes; the ranks may share it.
            limit: steps after which no more are kept.

        Raises:
            FusedReduceError: one is being recorded already.
        """
        if self._record_limit:
            raise FusedReduceError("a trace is being recorded already")
        source = "reducer" if self.exclusive else "wrapper"
        clock = {"perf_ns": time.perf_counter_ns(), "wall_ns": time.time_ns()}
        recorder = Recorder(Path(folder), {"clock": clock, "source": source, **self._plans.described()}, limit)
        self._record_limit = limit
        try:
            yield
        finally:
            recorded, self._recorded, self._record_limit = self._recorded, [], 0
            # Not step by step: on CUDA this waits for the GPU.
            for step, plan, looked in recorded:
                seen = MISSING_NS not in looked.ready_ns
                recorder.add(step, plan, looked.finest(), looked.ready_ns if seen else None)
            scheduler = self._plans.scheduler
            recorder.write(scheduler.schedule.costs, scheduler.readiness.best().tolist())

    def stats(self) -> dict[str, int | str]:
        """Counters since the reducer was built, on this rank.

        Returns:
            steps (synchronised backwards), buckets, buckets_reduced (in the latest step), collectives (since the
            communicator was set), wire_bytes (payload of one step, padding included; sparse and hooked buckets left
            out), padding_bytes (of those), wire_allocations, restrided (gradients whose strides were not their
            parameter's, and were copied), plans (changes of plan that ranks have agreed on,
            since the communicator was set), path (triton, interpreter, torch, none), state.
        """
        return {
            "steps": self.steps,
            "buckets_reduced": self.buckets_reduced,
            "collectives": self._issued,
            "wire_allocations": self._allocations + self._buckets.wire_allocations(),
            "plans": self._plans.scheduler.changes,
            "state": self.state.value,
            **(found := self._buckets.stats()),
            "restrided": self._restrided + int(found["restrided"]),
        }

    @property
    def plan(self) -> Plan:
        """Parameter numbers by bucket, in launch order."""
        return self._buckets.plan

    def bucket_bytes(self) -> list[int]:
        """Bytes of gradients in each bucket, in launch order."""
        return [sum(self._plans.kinds[index].size_bytes for index in members) for members in self.plan]

    # Join: what a rank without inputs does in place of forward and backward

    def shadows(self) -> list[GradBucket]:
        """Zeros for every bucket, in launch order, for a step that begins with this."""
        self.rebuild()
        if self._plans.measured():
            self._issued += self._plans.scheduler.open_round(None)
        return [reduction.shadow() for reduction in self._buckets.reductions]

    def run_shadow(self, bucket: GradBucket) -> Pending | torch.futures.Future[torch.Tensor]:
        """Takes part in one bucket's collective with nothing."""
        self._issued += 1
        return self._buckets.reductions[bucket.index()].run_shadow(bucket)

    def used_map(self, *, joined: bool) -> torch.Tensor:
        """int32 per parameter: on how many ranks it was used in the latest step; `joined`: zeros to take part with."""
        if joined or self._used.last is None:
            return self._used.local()
        return self._used.last

    def shadow_used_map(self) -> None:
        """Takes part in the sum of the used map that ends a static graph's first step."""
        if self.static_graph and not self.find_unused_parameters and self._asks_for_used():
            self._used.start()
            self._used.finish()
            self._used_settled = True

    def divide_by_ranks_counted(self, work: Any) -> None:
        """The next step's divisor is what `work`, an all-reduce of ones, gives: the ranks that still have inputs."""
        self._count_ranks = work

    def wait_at_end(self, futures: Iterable[torch.futures.Future[Any]]) -> None:
        """Has the end of the next backward wait for these too."""
        self._installed.extend(futures)

    def end_first_static_step(self) -> None:
        """A static graph's first backward is done. (A wrapper's own call; without one the outputs' hook calls.)"""
        with self._lock:
            if self.state is ReducerState.ARMED and self.static_graph and self._fires is None and self._step.begun:
                self._end_of_backward(self._step)

    # Within

    def _arrive(self, index: int) -> None:
        """One parameter is ready, and with the first one all that are unused."""
        step = self._step
        if step.callbacks == 0:
            step.clean = False  # a backward of which nobody has told us: no output of forward is its root
        for one in step.arrive(index):
            self._clock.arrive(one)
            self._record_stream(one)
            bucket = self._buckets.bucket_of[one]
            if step.bucket_is_ready(bucket):
                self._clock.bucket_ready(bucket)

    def _record_stream(self, index: int) -> None:
        if self._buckets.streams.on_cuda and not self._streams_known:
            self._buckets.streams.record(self._buckets.bucket_of[index], self._devices[index])

    def _arrive_for_others(self, index: int) -> bool:
        """Only the parameters that complete a bucket, or a group within it, are hooked. Whether a bucket is ready."""
        step = self._step
        if not step.from_outputs:
            self._hook_all()
            raise FusedReduceError(
                f"a backward that did not begin at an output of forward gave {self.names[index]} a gradient; the steps "
                "before did. Return from forward every tensor that a loss is made of. After reset() every parameter "
                "is watched one by one again"
            )
        step.tell(index)
        bucket, groups, completes = self._tells[index]
        for group in groups:
            self._take(bucket, group)
        reduction = self._buckets.reductions[bucket]
        if not completes:
            return False
        if reduction.whole():
            self._clock.bucket_ready(bucket)
            step.arrive_whole(bucket, reduction.members.numbers)
        else:
            # Another order than before. The bucket must go as soon as its last member comes, not at the end: peers,
            # whose order may be the old one, launch theirs at that place among the user's own collectives.
            self._adopt()
            self._hook_all()
        return True

    def _adopt(self) -> bool:
        """Makes ready what this step's backward has given a gradient unseen, in a step that began with none."""
        late = [
            index
            for index, parameter in enumerate(self.parameters)
            if not self._step.is_ready(index) and parameter.grad is not None
        ]
        for index in late:
            self._arrive(index)
        return bool(late)

    def _take(self, bucket: int, group: int) -> None:
        if bucket >= self._step.next_bucket:  # else its wire is under way, and what comes too late is found in finish
            began_ns = time.perf_counter_ns()
            with torch.no_grad():
                self._buckets.reductions[bucket].take(group, self._divisor or float(self.communicator.size))
            self._clock.packed_part(bucket, began_ns)

    def _watch(self, outputs: Sequence[torch.Tensor]) -> bool:
        """Has us told when a backward begins at one of `outputs`; says whether one can."""
        alive = weakref.ref(self)

        def begin(_: object) -> None:
            reducer = alive()
            if reducer is not None and reducer.state is ReducerState.ARMED:
                reducer._begin()

        for handle in self._watched:
            handle.remove()
        functions = {output.grad_fn for output in outputs if output.grad_fn is not None}
        self._watched = [function.register_prehook(begin) for function in functions]
        return bool(functions)

    def _begin(self) -> None:
        """A backward has reached an output of forward: has its end finish the step."""
        with self._lock:
            step = self._step
            if step.from_outputs and step.task == torch._C._current_graph_task_id():
                return
            # Another root of this backward, or of a partial one; else a new one, which has made nothing yet.
            again = step.from_outputs and (step.begun or step.callbacks > 0)
            step.from_outputs = True
            if not again:
                step.clean = not self._has_gradients()
            if not again:
                self._clock.begin()
            if self._tells and (again or not step.clean or self._users_hook_gradients()):
                if again:
                    self._adopt()
                self._hook_all()
            self._queue_end(step)

    def _has_gradients(self) -> bool:
        """Whether any `.grad` is there. By type, 20 ns each: `None in tensors` would compare tensors."""
        return set(map(type, [parameter.grad for parameter in self.parameters])) != {type(None)}

    def _users_hook_gradients(self) -> bool:
        """Whether a user's hook may take a gradient away before ours would see it (30 ns per parameter)."""
        return any(map(_post_accumulate_grad_hooks, self.parameters))

    def _hook_all(self) -> None:
        if self._tells:
            self._tells = {}
            self._clean_steps = 0
            self._hooks.hook_all()

    def _hook_few(self) -> None:
        """After a step with all hooks: keeps those that are needed, if the next steps can do with them."""
        step = self._step
        never = self.find_unused_parameters or self._dtypes is None or self._maker.keeps_gradients
        never = never or self.shares_parameters or any(fires != 1 for fires in self._fires or ())
        never = never or self._users_hook_gradients() or (self._plans.measured() and self._plans.scheduler.profiles())
        if never or self.should_rebuild() or not step.whole or len(step.order) != len(self.parameters):
            return
        self._clean_steps = self._clean_steps + 1 if step.clean else 0
        if self._clean_steps < _CLEAN_STEPS:
            return
        self._tells = self._buckets.tellers(step.order)
        self._hooks.hook(self._tells)

    def _queue_end(self, step: Step) -> None:
        task = torch._C._current_graph_task_id()
        if step.callbacks == 0 or task != step.task:
            step.callbacks += 1
            step.task = task

            def end() -> None:
                step.callbacks -= 1
                self._end_of_backward(step)

            torch.autograd.Variable._execution_engine.queue_callback(end)

    def _end_of_backward(self, step: Step) -> None:
        """Finishes the step if all is launched; does nothing after one of several partial backwards."""
        with self._lock:
            if self.state is not ReducerState.ARMED or self._step is not step:
                return
            self._clock.enter()
            late = bool(self._tells) and not step.all_ready() and self._adopt()
            if not step.begun:
                return
            if self.static_graph and self._fires is None:
                self._fires = list(self._counted)
                step.make_all_ready()
            elif late or not step.all_ready():
                self._hook_all()  # members of a bucket came in another order than before, or will come later
            if not step.all_ready():
                return
            self.times.backward_end = time.time_ns()
            self._clock.backward_ended()
            try:
                self._launch()
                self._finish()
            except BaseException as error:
                self._note_failure(error)
                raise

    def _launch(self) -> None:
        """Starts every bucket that is next and ready."""
        step = self._step
        if step.next_bucket == 0:
            self.times.comm_start = time.time_ns()
            if torch.is_grad_enabled():
                self._warn_once(
                    "Using DistributedDataParallel with create_graph=True: gradients are averaged, but gradients of "
                    "gradients are not"
                )
            if self._plans.measured():
                self._issued += self._plans.scheduler.open_round(self._clock.looks)
        before = step.next_bucket
        while step.head_is_ready():
            reduction = self._buckets.reductions[step.next_bucket]
            step.next_bucket += 1
            members = reduction.members
            if self._passes_over(members):
                continue
            self._buckets.streams.wait_for_gradients(members.index, members.device)
            with torch.no_grad(), self._buckets.streams.on(members.device):
                self._clock.pack(members.index)
                reduction.launch(self._divisor or float(self.communicator.size))
                self._clock.launched(members.index, *(reduction.under_way() or (None, None)))
            step.launched += 1
            self._issued += 1
        if step.all_launched() and before < step.next_bucket:
            if self._asks_for_used():
                self._used.start()
                self._issued += 1
            if self._plans.measured():
                self._issued += self._plans.scheduler.report(self.plan)

    def _finish(self) -> None:
        """Finishes every launched bucket in launch order; the step is done then."""
        step = self._step
        if not self._tells:
            step.whole = all(parameter.grad is not None for parameter in self.parameters)
        launched = [one for one in self._buckets.reductions if not self._passes_over(one.members)]
        with torch.no_grad():
            if not self.shares_parameters:  # else another reducer, of a nested wrapper, writes the same gradients
                # All before the first is overwritten: gradients that share memory share their version.
                for reduction in launched:
                    reduction.check_unchanged()
            for reduction in launched:
                self._finish_one(reduction)
            if self._asks_for_used():
                self._used.finish()
            self._plans.scheduler.wait()
            installed, self._installed = self._installed, []
            for future in installed:
                future.wait()
        self.times.comm_end = time.time_ns()
        # First of all: what raised below would leave this rank's rounds behind those of its peers.
        self._close_round(self._clock.taken())
        self.steps += 1
        self.buckets_reduced = step.launched
        if step.order:
            # A static graph's first step has an entry for each gradient: the last one is when it was final.
            self.last_order = tuple(reversed(dict.fromkeys(reversed(step.order))))
        self.last_unused = tuple(sorted(step.skipped))
        self._plans.note_order(self.last_order)
        self._streams_known = True
        self._used_settled = True
        if not self._tells:
            self._ready_ns = list(self._clock.arrived_ns)
            self._hook_few()
        if self.find_unused_parameters:
            self._used.forget()
        self.state = ReducerState.IDLE

    def _close_round(self, looked: Looked | None) -> None:
        """A synchronised step has ended, here or (join) without this rank's inputs: all ranks count it."""
        if self._plans.measured():
            self._plans.scheduler.close_round(looked)
        self._rounds += 1
        if looked is not None and len(self._recorded) < self._record_limit:
            self._recorded.append((self._rounds, self.plan, looked))

    def _finish_one(self, reduction: Reduction) -> None:
        members = reduction.members
        untouched = self._untouched(members)
        self._clock.unpack(members.index)
        if isinstance(reduction, HookedReduction) or not self._buckets.streams.on_cuda:
            # A hook's future makes the current stream wait for whatever the hook did.
            reduction.finish(untouched)
            self._clock.unpacked(members.index)
            return
        done = torch.cuda.Event()
        with self._buckets.streams.beside(members.device):
            reduction.finish(untouched)
            self._clock.unpacked(members.index)
            done.record()
        if torch.cuda.is_current_stream_capturing():
            self._monitor.forget_all()  # events must not be queried while a graph is being captured
        else:
            what = f"rank {self.communicator.rank}: the reduction of {members.label}"
            self._monitor.watch(members, what, done.query, self._report_after_s(members.device))

    def _local_gradient(self, index: int) -> None:
        """A gradient that is not reduced now: under no_sync the next step will, after a finished step nobody does."""
        if self.find_unused_parameters and self.parameters[index].grad is not None:
            self._used.mark(index)
        if self.steps and not self._local_backward_expected and self.state is ReducerState.IDLE:
            self._warn_once(
                f"{self.names[index]} got a gradient after this step's gradients had been averaged (a second backward "
                "through the same forward, or several forwards before one backward): it was added on this rank only, "
                "so ranks now differ. Call forward before each backward, or use no_sync() where this is meant"
            )

    def _asks_for_used(self) -> bool:
        """Whether this step sums the used map: always for find_unused, for a static graph in the first step."""
        return self.find_unused_parameters or (self.static_graph and not self._used_settled)

    def _untouched(self, members: Members) -> frozenset[int]:
        """Parameters of a bucket that no rank has a gradient for: theirs stay as they are."""
        if not (self.find_unused_parameters or self.static_graph):
            return frozenset()
        if all(self._used.used(number) for number in members.numbers):
            return frozenset()
        return frozenset(number for number in members.numbers if not self._used.used_anywhere(number))

    def _passes_over(self, members: Members) -> bool:
        return self.skip_unused_buckets and self._step.skipped.issuperset(members.numbers)

    def _counted_ranks(self) -> float | None:
        work, self._count_ranks = self._count_ranks, None
        if work is None:
            return None
        work.wait()
        return float(work.result()[0].item())

    def _report_after_s(self, device: torch.device) -> float:
        if self.config.stall_report_s is not None:
            return self.config.stall_report_s
        return _STALL_SHARE_OF_TIMEOUT * self.communicator.timeout_s(device)

    def _check_still_hooked(self) -> None:
        """A parameter whose dtype or device has changed has a new AccumulateGrad node, which nobody hooks."""
        dtypes = self._dtypes
        if dtypes is None or self._tells:
            # With few hooks the end of backward looks at every `.grad`, and pack at its dtype.
            return
        now = [parameter.dtype for parameter in self.parameters]
        devices = [parameter.device for parameter in self.parameters]
        if now != dtypes or devices != self._devices:
            kinds = zip(now, dtypes, devices, self._devices, strict=True)
            index = next(i for i, (a, b, c, d) in enumerate(kinds) if a != b or c != d)
            raise FusedReduceError(
                f"{self.names[index]} was {dtypes[index]} on {self._devices[index]} when it was wrapped and is "
                f"{now[index]} on {devices[index]} now: its gradients would not be reduced. Convert and move a model "
                "before wrapping it"
            )

    def _note_unused(self, unused: list[int]) -> None:
        if self.steps and tuple(unused) != self.last_unused:
            self.unused_always_same = False
        if not unused and self.steps == 0:
            _logger.warning(
                "find_unused_parameters=True was given, but no unused parameter was found in the first forward. The "
                "search costs time in every iteration: turn it off if the model never has any"
            )

    def _warn_once(self, text: str) -> None:
        key = text[-80:]
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(text, stacklevel=2)

    def _note_failure(self, error: BaseException) -> None:
        if self.state is ReducerState.ARMED:
            self.state = ReducerState.FAILED
            self._failure = f"{type(error).__name__}: {error}"
            self._collective_failed = isinstance(error, CollectiveError)
            if self.on_error is not None:
                self.on_error(str(error))

    def _lost_text(self) -> str:
        return (
            f"rank {self.communicator.rank}: the process group cannot be used any more; give every rank a new one "
            f"(set_communicator, or a wrapper's _update_process_group). {self._failure}"
        )

    def _lose(self, why: str) -> None:
        self.state = ReducerState.LOST
        self._failure = why
        raise FusedReduceError(self._lost_text())

    # Buckets

    def _one_device(self) -> torch.device | None:
        return self._devices[0] if len(set(self._devices)) == 1 else None

    def _lay(self, plan: Plan) -> None:
        """Builds the buckets of `plan`; the old ones are given up."""
        self._allocations += self._buckets.wire_allocations()
        self._restrided += int(self._buckets.stats()["restrided"])
        self._buckets = BucketSet(plan, self._maker)
        self._streams_known = False
        self._checked_wires = False
        self._hook_all()
        self._clean_steps = _CLEAN_STEPS  # hooks go as soon as the new plan has been through one step
        self._step = self._new_step()
        self._clock.arm(len(plan), closely=False, forward_ns=MISSING_NS)

    def _new_step(self, unused: Sequence[int] = ()) -> Step:
        fires = self._fires if self.static_graph else None
        return Step(self._buckets.sizes, self._buckets.bucket_of, self.names, fires=fires, unused=unused)

    def _new_used_map(self) -> UsedMap:
        self._used_settled = False
        return UsedMap(len(self.parameters), self._devices[0], self.communicator)


_post_accumulate_grad_hooks = operator.attrgetter("_post_accumulate_grad_hooks")


def _where(held: Sequence[str], is_so: Callable[[str], bool]) -> str:
    return ", ".join(str(rank) for rank, one in enumerate(held) if is_so(one))
