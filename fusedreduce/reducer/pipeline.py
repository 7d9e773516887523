"""Pipeline: issues and finishes the collectives of a step. Every rank issues the same ones in the same order.

    once          a profiled step's probe, before the first bucket
    per bucket    launch: pack and start the collective, when the bucket is ready and next in the plan
    once          after the last bucket: the used map, the scheduler's report, the kinds of sparse gradients, the check
                  for non-finite gradients; then the later phases of buckets that are exchanged in several, as far as
                  they have not been issued, and the sums of sparse gradients whose kind no rank knew before
    per bucket    finish, in the same order: check that no gradient has changed since, wait, unpack

step_cycle.py decides when a step begins and when buckets are launched, and the sync mode (modes/) how a step ends.
A rank without inputs takes part with no gradients, which are packed as zeros. Called under the reducer's lock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch

from ..buckets.bucket_set import BucketMaker, BucketSet
from ..buckets.comm_hook import CommHookReduction
from ..buckets.loss_scale import Unscaling
from ..buckets.reduction import Members, Reduction
from ..buckets.stats.grad_stats import GradStats
from ..buckets.tensors import any_gradient, no_autograd
from ..buckets.wire_table import WireTable
from ..comm.protocol import Communicator
from ..comm.stall_monitor import StallMonitor, stall_report_after_s
from ..comm.waiting import wait_for
from ..config import ReduceConfig
from ..errors import FusedReduceError
from ..kernels import dispatch
from ..planning.plan import Plan
from ..trace.step_profile import StepProfile
from .modes import make_mode
from .modes.gradient_stash import GradientStash
from .modes.mode import DelayedAverages, Ended
from .modes.steps_in_flight import unused_of
from .plans import Plans
from .recording import Recording
from .step import Step, StepCollective, StepTimes
from .unused_parameters import UsedMap, UsedSum
from .wire_schedule import WireSchedule


class Pipeline:
    """The buckets of a reducer, and their collectives in flight.

    Args:
        maker: builds the buckets; another one takes effect with the next `build_buckets`.
        plans: gives the first plan, and says whether plans follow measurements now.
        wires: what parameters travel on, which may change between two steps.
        observed: gradient statistics and the loss-scale state.
        recording: keeps profiled steps for a trace.
        used: the map of used parameters.
        skip_unused_buckets: do not reduce a bucket whose parameters are all unused.

    Attributes:
        rounds: synchronised steps that all ranks have taken part in, since the communicator was set.
        buckets: of the plan in use.
        observers: of the current step, none unless it is profiled. They change, raise and issue nothing.
        collectives: those that follow the last bucket of a step, in this order on every rank; only those that may be
            due.
        mode: the sync mode in use.
        overlaps: buckets are launched during backward.
        late: which averages the gradients are.
        issued: collectives issued since the communicator was set.
        times: host times of the latest step.
    """

    def __init__(
        self,
        maker: BucketMaker,
        plans: Plans,
        wires: WireSchedule,
        observed: GradStats,
        recording: Recording,
        used: UsedMap,
        *,
        skip_unused_buckets: bool,
    ) -> None:
        self.maker = maker
        self.used = used
        self.times = StepTimes()
        self.issued = 0
        self._plans = plans
        self._wires = wires
        self.observed = observed
        self._recording = recording
        self._skip_unused_buckets = skip_unused_buckets
        self.observers: tuple[StepProfile, ...] = ()
        devices = {parameter.device for parameter in maker.parameters}
        self._device = devices.pop() if len(devices) == 1 else None
        self._monitor = StallMonitor()
        self._divisor = 1.0
        self._keeps_unused = False
        self._kept: dict[int, torch.Tensor] = {}
        self._count_ranks: Any = None
        self._installed: list[torch.futures.Future[Any]] = []
        self._warned = False
        self._allocations = 0
        self._restrided = 0
        self.rounds = 0
        self.buckets = BucketSet((), maker)
        self.late = DelayedAverages()
        self._stash = GradientStash(maker.parameters)
        self._enter_mode()
        self.build_buckets(plans.first())

    @property
    def profile(self) -> StepProfile | None:
        """The observer of a profiled step; None: the step is not profiled."""
        return self.observers[0] if self.observers else None

    # Between steps

    def build_buckets(self, plan: Plan) -> None:
        """Builds the buckets of `plan` in place of the old ones."""
        self._allocations += self.buckets.wire_allocations()
        self._restrided += int(self.buckets.stats()["restrided"])
        if self.maker.feedback is not None:
            self.maker.feedback.leave_buckets()
        self.buckets = BucketSet(plan, self.maker)
        self._plans.in_use = plan
        self.observed.collect_from(self.buckets.reductions)
        self.mode.set_buckets(self.buckets)
        self.observers = ()
        self._follow_settings()
        dispatch.report_compilation()

    def check_wires(self) -> None:
        """Checks that the backend can sum the buckets' wire dtypes.

        Raises:
            UnsupportedWireError: it cannot; on every rank.
        """
        if self.maker.hook is None:
            for bucket in self.buckets.packed():
                bucket.bucket.check(self.maker.communicator)
        if self._wires.counts:
            self.maker.communicator.check_wire(torch.bfloat16, self.maker.parameters[0].device)

    def set_wires(self, wires: WireTable) -> None:
        """Changes what parameters travel on. `build_buckets` must follow."""
        self.maker = dataclasses.replace(self.maker, wires=wires)

    def set_communicator(self, communicator: Communicator) -> None:
        """Switches to `communicator`. `drop_step` and `build_buckets` must follow."""
        self.maker = maker = dataclasses.replace(self.maker, communicator=communicator)
        for holder in (maker.sparse_kinds, maker.phases, maker.draws, self.used, self.mode):
            if holder is not None:
                holder.set_communicator(communicator)
        self.issued = self.rounds = 0

    def set_mode(self, config: ReduceConfig, *, local: bool) -> None:
        """Switches to the sync mode of `config`, when no step is in flight.

        Args:
            config: has the new mode.
            local: `.grad` may hold gradients of backwards under no_sync, which the next step reduces.
        """
        self.maker = dataclasses.replace(self.maker, config=config)
        before = self.mode
        before.release()
        self._enter_mode()
        self.mode.set_buckets(self.buckets)
        self._follow_settings()
        self.late.withheld = self._stash.stepped = False
        if before.delays and not self.mode.delays:
            self._stash.put_back()
        elif self.mode.delays and not before.delays and local:
            self._stash.keep()

    def drop_step(self) -> None:
        """Abandons what is in flight. `build_buckets` must follow: collectives may still write into these buffers."""
        self.mode.drop_steps()
        self._installed = []
        self._count_ranks = None
        self.observed.drop_step()
        for reduction in self.buckets.reductions:
            reduction.drop_views()
        self.used.restart()
        self.maker.sparse_kinds.restart()
        self.maker.phases.restart()

    def release_buckets(self) -> None:
        """Releases the buckets and their wires; gradients that are views keep the buffer they refer to."""
        self.mode.release()
        self.maker.phases.close()
        self.buckets = BucketSet((), self.maker)

    def stats(self) -> dict[str, int | str]:
        """The pipeline's part of `Reducer.stats`."""
        return {
            "collectives": self.issued + self.maker.phases.issued,
            "wire_allocations": self._allocations + self.buckets.wire_allocations(),
            **(found := self.buckets.stats()),
            "restrided": self._restrided + int(found["restrided"]),
            "steps_under_way": 0,
            "steps_given_up": self.late.given_up,
            **self.mode.stats(),
        }

    # A step

    def divide_by_ranks_counted(self, work: Any) -> None:
        """Divides the next step's gradients by the result of `work`, an all-reduce of ones; not with op="sum"."""
        self._count_ranks = work

    def wait_at_end(self, futures: Iterable[torch.futures.Future[Any]]) -> None:
        """Adds futures that the next `finish_step` waits for."""
        self._installed.extend(futures)

    def arm(self, *, profiled: bool, watch: bool, forward_ns: int, divisor: float | None = None) -> None:
        """Prepares for a synchronised backward.

        Args:
            profiled: times of this step are recorded.
            watch: streams may wait for its collectives to time their ends, see `StepProfile`.
            forward_ns: time.perf_counter_ns() when forward began.
            divisor: this rank's own for this step; None: the ranks that were counted, else the configured one.
        """
        self.begin_round()
        self.observers = ()
        if profiled:
            wait = self._wait_to_time if watch else None
            count = len(self.maker.parameters)
            self.observers = (StepProfile(count, len(self.buckets), self._device, wait, forward_ns=forward_ns),)
        counted = None if self._count_ranks is None else self._counted_ranks()
        self._divisor = divisor or counted or self.maker.config.divisor(self.maker.communicator.size)
        # The kept gradient of a parameter that no rank has used is a view, so it is reduced all the same. torch leaves
        # its mean there; by another divisor, or as a sum, it would change each step, so it is copied and restored.
        self._keeps_unused = self.maker.as_views and (divisor is not None or self.maker.config.op == "sum")

    @contextlib.contextmanager
    def own_set_aside(self) -> Iterator[None]:
        """Context of a step on a rank without inputs (join): each gradient is missing, and nothing of it stays.

        Afterwards gradients, the times and statistics of the latest step, and residuals are this rank's own again.
        """
        parameters = self.maker.parameters
        gradients = [parameter.grad for parameter in parameters]
        # Views lie in what the step writes, as may what a comm hook has left.
        overwritten = self.maker.as_views or self.maker.hook is not None
        values = [one.clone() if overwritten and one is not None else None for one in gradients]
        armed = self.times, self.observers, self._divisor, self._keeps_unused
        self.times, ended = StepTimes(), False
        for parameter in parameters:
            parameter.grad = None
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(self.observed.own_set_aside(self.buckets.reductions))
                if self.maker.feedback is not None:
                    stack.enter_context(self.maker.feedback.own_set_aside())
                yield
                ended = True
        finally:
            self.times, self.observers, self._divisor, self._keeps_unused = armed
            for parameter, gradient, value in zip(parameters, gradients, values, strict=True):
                # After a failure a collective in flight may still write to what views lie in.
                parameter.grad = gradient if ended or value is None else value
                if ended and gradient is not None and value is not None:
                    gradient.data.copy_(value)  # `data`: its version stays, as it holds what it held

    def launch(self, step: Step) -> None:
        """Launches every bucket that is next and ready, and after the last one the step's other collectives.

        Where ranks are in different steps (Asynchronous) nothing is launched: `finish_step` issues a contribution.

        Raises:
            FusedReduceError, CollectiveError, TypeError: as `Reduction.launch`.
        """
        if torch.is_grad_enabled() and not self._warned:
            self._warned = True
            warnings.warn(
                # begins as torch's own warning does, for filters of warnings
                "Using DistributedDataParallel with create_graph=True: gradients are averaged over the ranks, but "
                "gradients of gradients (double backward) are this rank's own",
                stacklevel=2,
            )
        if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            with no_autograd():
                self.launch(step)
            return
        reductions, before = self.buckets.reductions, step.next_bucket
        if before == 0 and not self._open_step(step):
            return
        while not step.pending[step.next_bucket]:
            reduction = reductions[step.next_bucket]
            step.next_bucket += 1
            if self._skip_unused_buckets and self._skips(step, reduction.members):
                self._check_skipped(reduction.members)
                reduction.skip()
                continue
            if self.buckets.streams.on_cuda:
                self.buckets.streams.wait_for_gradients(reduction.members.index, reduction.members.device)
                with self.buckets.streams.on(reduction.members.device):
                    self._launch_one(step, reduction)
            else:
                self._launch_one(step, reduction)
        if before < step.next_bucket == len(reductions):
            if self.buckets.streams.on_cuda:
                self.buckets.streams.wait_for_packs()
                if self.maker.phases.follow_at_once:
                    self.maker.phases.issue_all()
            for one in self.collectives:
                self.issued += one.issue()

    def launch_late(self) -> None:
        """Starts what had to wait for other collectives: later phases of buckets, and sums of sparse gradients.

        A gradient's kind may be what no rank knew at `launch`. Does nothing when it is called again in the same step.

        Raises:
            AgreementError, CollectiveError: as `SparseKinds.learn`; a phase failed.
        """
        with no_autograd():
            self.maker.phases.issue_all()  # first, on every rank
            for sparse in self.buckets.sparse(self.maker.sparse_kinds.learn()):
                with self.buckets.streams.on(sparse.members.device):
                    sparse.launch_late()
                self.issued += 1

    def finish_step(self, step: Step, *, shared: bool) -> Ended:
        """Ends a step whose buckets are all launched.

        Args:
            step: the step.
            shared: another reducer, of a nested wrapper, writes the same gradients.

        Returns:
            Which step's averages the gradients are.

        Raises:
            FusedReduceError: a gradient was changed after it had been packed.
            CollectiveError: a peer died, left, or did not answer.
        """
        launched: Sequence[Reduction] = ()
        if self.mode.together:
            launched = self.buckets.reductions
            if self._skip_unused_buckets:
                launched = [one for one in launched if not self._skips(step, one.members)]
        if self.maker.sparse_kinds.place or self.maker.phases.due:
            # Before the check, which may raise on this rank alone: the other ranks wait for these sums.
            self.launch_late()
        with no_autograd():
            if not shared:
                # All are checked before the first is overwritten: gradients that share memory share their version.
                for reduction in launched:
                    reduction.check_unchanged()
            ended = self.mode.end_step(self, launched)
            if self._plans.measured:
                self._plans.scheduler.complete()
            if self._wires.measuring:
                self._wires.complete()
            installed, self._installed = self._installed, []
            for future in installed:
                wait_for(future, "a future that the end of backward waits for", self.maker.communicator)
        self.times.comm_end = time.time_ns()
        # Before anything else may raise, which would leave this rank's number of rounds behind that of its peers.
        looked, self.observers = self.profile, ()
        self.close_round(looked)
        return ended

    def end_step(self, ended: Ended) -> None:
        """Completes the gradient statistics after `finish_step`; `observed.check` may raise for them.

        Args:
            ended: what `finish_step` returned.
        """
        if self.used.always:
            self.used.clear_marks()
        self.end_statistics(ended)

    def begin_round(self) -> None:
        """Called before a synchronised step's backward."""
        if self.maker.draws is not None:
            self.maker.draws.begin_step(self.rounds)

    def close_round(self, looked: StepProfile | None) -> None:
        """Counts a synchronised step that all ranks have ended, this one maybe without inputs (join).

        Args:
            looked: the step's profile, where it was profiled.
        """
        if self._plans.measured:
            self._plans.scheduler.close_round(looked)
        if self._wires.counts:
            self._wires.close_step()
        self.rounds += 1
        if looked is not None:
            self._recording.keep(self.rounds, self.buckets.plan, looked)

    # What a mode calls

    def finish_buckets(self, launched: Sequence[Reduction]) -> list[int]:
        """Finishes launched buckets; returns the numbers of the parameters whose gradients were not written."""
        left: list[int] = []
        used = self.used.sum_of_step() if self.used.kept else None
        unscaling = self.observed.units.unscaling()
        writes = [
            (one, functools.partial(self._finish_one, one, unused_of(one.members, used) if used else (), unscaling))
            for one in launched
        ]
        for by_hook, group in itertools.groupby(writes, lambda one: isinstance(one[0], CommHookReduction)):
            if not by_hook:
                self.write(group)
                continue
            for reduction, finish in group:
                finish()  # the hook's future makes the current stream wait for what the hook has enqueued
                reduction.release()
        if used is not None or self.maker.keeps_gradients:
            left = self._not_written(() if self.maker.keeps_gradients else launched, used)
        if used is not None and self.used.asks():
            self.used.complete()
        self.observed.complete()
        return left

    def write(self, writes: Iterable[tuple[Reduction, Callable[[], None]]]) -> None:
        """Calls what writes each bucket's gradients: on CUDA on a side stream, watched by the stall monitor."""
        if not self.buckets.streams.on_cuda:
            for reduction, write in writes:
                write()
                reduction.release()
            return
        for device, group in itertools.groupby(writes, lambda one: one[0].members.device):
            after_s = stall_report_after_s(self.maker.config.stall_report_s, self.maker.communicator, device)
            finished = []
            with self.buckets.streams.beside(device) as written:
                for reduction, write in group:
                    write()
                    self._watch(reduction.members, written(reduction.members.index), after_s)
                    finished.append(reduction)
            for reduction in finished:
                reduction.release()

    def end_statistics(self, ended: Ended) -> None:
        """Completes the statistics of the gradients that a step has left."""
        with no_autograd():
            if ended.number is None or not ended.measured:
                self.observed.end_without_gradients()
            elif ended.elsewhere:
                self.observed.end_measured_step(ended.number)
            else:
                self.issued += self.observed.end_step(ended.number, ended.left)
                if self.maker.feedback is not None:
                    self.maker.feedback.end_step(self.observed.found_non_finite())

    # Within

    def _follow_settings(self) -> None:
        known: tuple[StepCollective, ...] = (
            self.used,
            self._plans,
            self._wires,
            self.maker.sparse_kinds,
            self.observed,
        )
        self.collectives = tuple(one for one in known if one.active)

    def _enter_mode(self) -> None:
        self.mode = make_mode(self.maker, self._stash, self.late)
        self.overlaps = self.maker.config.overlap and self.mode.together
        self.used.alone = self.observed.alone = not self.mode.together

    def _wait_to_time(self, collective: Any) -> None:
        wait_for(collective, "the collective whose end is timed", self.maker.communicator)

    def _open_step(self, step: Step) -> bool:
        """Called before a step's first bucket; returns whether buckets are to be launched."""
        self.observed.begin_reduction()
        self.times.comm_start = time.time_ns()
        if not self.mode.together:
            step.next_bucket = step.launched = len(self.buckets)
            return False
        if self.maker.feedback is not None:
            self.maker.feedback.begin_step(self.observed.units.unscaling().scale)
        self._kept = {}  # those of the last step: on CUDA a side stream may have read them until now
        if self._plans.measured:
            self.issued += self._plans.scheduler.open_round(self.profile)
        return True

    def _launch_one(self, step: Step, reduction: Reduction) -> None:
        index = reduction.members.index
        for one in self.observers:
            one.pack(index)
        if self._keeps_unused and self.used.kept:
            self._keep_unused(reduction.members)
        watched, issued_ns = reduction.launch(self._divisor)
        step.launched_ns[index] = issued_ns
        if self._wires.measuring:
            self._wires.measure(reduction)
        for one in self.observers:
            one.launched(index, watched, issued_ns)
        step.launched += 1
        self.issued += watched is not None  # not the sum of a sparse gradient of unknown kind: see `launch_late`

    def _watch(self, members: Members, written: torch.cuda.Event, after_s: float) -> None:
        what = f"rank {self.maker.communicator.rank}: the reduction of {members.label}"
        self._monitor.watch(members, what, written.query, after_s, members.device)

    def _finish_one(self, reduction: Reduction, unused: Collection[int], unscaling: Unscaling) -> None:
        for one in self.observers:
            one.unpack(reduction.members.index)
        reduction.finish(unused, unscaling)
        for number in self._kept.keys() & unused:
            gradient = self.maker.parameters[number].grad
            assert gradient is not None
            gradient.copy_(self._kept[number])
        for one in self.observers:
            one.unpacked(reduction.members.index)

    def _keep_unused(self, members: Members) -> None:
        """Copies the gradients of parameters that this rank has not used: as views they are overwritten by the sum."""
        for number, parameter in zip(members.numbers, members.parameters, strict=True):
            if parameter.grad is not None and not self.used.here(number) and not self.maker.sparse[number]:
                self._kept[number] = parameter.grad.clone()

    def _skips(self, step: Step, members: Members) -> bool:
        return step.skipped.issuperset(members.numbers)

    def _not_written(self, launched: Sequence[Reduction], used: UsedSum | None) -> list[int]:
        """Numbers of the parameters whose gradients this step has not written; `launched`: the buckets it has."""
        written: set[int] = set()
        for reduction in launched:
            written |= set(reduction.members.numbers) - unused_of(reduction.members, used)
        return [number for number in range(len(self.maker.parameters)) if number not in written]

    def _check_skipped(self, members: Members) -> None:
        if any_gradient(members.parameters) and self.observed.units.scaled_step():
            raise FusedReduceError(
                f"rank {self.maker.communicator.rank}: {members.label} is skipped in this step "
                "(skip_all_reduce_unused_params), but has gradients of earlier backwards, which would keep their loss "
                "scale. Call zero_grad() before the forward, or use torch.amp.GradScaler"
            )

    def _counted_ranks(self) -> float | None:
        work, self._count_ranks = self._count_ranks, None
        wait_for(work, "counting the ranks that still have inputs", self.maker.communicator)
        return float(work.result()[0].item()) if self.maker.config.op == "mean" else None
