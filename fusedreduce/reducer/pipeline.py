"""Pipeline: what is issued and finished in a step. Every rank issues the same collectives in the same order.

    once          a profiled step's probe, ahead of the first bucket
    per bucket    launch: pack and start the collective, when it is ready and next in the plan
    once          behind the last bucket: the used map, the scheduler's report, the kinds of sparse gradients, what is
                  observed; then the sums of sparse gradients whose kind nobody knew before
    per bucket    finish, in the same order: check that nothing has changed since, wait, unpack

When a step begins and when a bucket is ready others say (reducer.py, readiness.py); how it ends in modes where its
averages come later, modes/step_end.py. A rank without inputs issues the same with zeros (join.py). Called under the
reducer's lock.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ..buckets.bucket_set import BucketMaker, BucketSet
from ..buckets.comm_hook import HookedReduction
from ..buckets.loss_scale import Unscaling
from ..buckets.reduction import Members, Reduction
from ..buckets.stats.grad_stats import Observed
from ..buckets.tensors import any_gradient
from ..comm.protocol import Communicator
from ..comm.stall_monitor import StallMonitor, stall_report_after_s
from ..comm.waiting import wait_for
from ..config import ReduceConfig
from ..errors import FusedReduceError
from ..planning.plan import Plan
from ..planning.timeline import MISSING_NS
from ..trace.step_clock import Looked, StepClock
from .modes.step_end import Ended, Ends
from .modes.steps_in_flight import untouched_of
from .plans import Plans
from .recording import Recording
from .step import Step
from .unused_parameters import UsedMap, UsedSum


@dataclass
class StepTimes:
    """Marks of the latest synchronised step, host clock, ns of time.time_ns()."""

    forward_start: int = 0
    backward_start: int = 0
    backward_end: int = 0
    comm_start: int = 0
    comm_end: int = 0


class Pipeline:
    """The buckets of a reducer, and what is under way of them.

    Args:
        maker: builds the buckets; what is put in its place holds from the next `build_buckets` on.
        plans: where the first plan comes from, and whether plans follow measurements now.
        observed: is told what happens to the gradients.
        clock: is told when.
        recording: keeps steps.
        used: parameters that have a gradient.
        skip_unused_buckets: leave a bucket out whose parameters are all unused.

    Attributes:
        rounds: synchronised steps, of all ranks.
        buckets: of the plan in use.
        ends: how steps end.
        issued: collectives since the communicator was set.
    """

    def __init__(
        self,
        maker: BucketMaker,
        plans: Plans,
        observed: Observed,
        clock: StepClock,
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
        self._observed = observed
        self._clock = clock
        self._recording = recording
        self._skip_unused_buckets = skip_unused_buckets
        self._monitor = StallMonitor()
        self._divisor = 1.0
        self._keeps_unused = False
        self._kept: dict[int, torch.Tensor] = {}
        self._count_ranks: Any = None
        self._installed: list[torch.futures.Future[Any]] = []
        self._warned = False
        self._checked_wires = False
        self._allocations = 0
        self._restrided = 0
        self.rounds = 0
        self.buckets = BucketSet((), maker)
        self.ends = Ends(maker, observed, used)
        self.build_buckets(plans.first())

    # Between steps

    @property
    def plan(self) -> Plan:
        """Parameter numbers by bucket, in launch order."""
        return self.buckets.plan

    def build_buckets(self, plan: Plan) -> None:
        """Builds the buckets of `plan`; the old ones are given up."""
        self._allocations += self.buckets.wire_allocations()
        self._restrided += int(self.buckets.stats()["restrided"])
        self.buckets = BucketSet(plan, self.maker)
        self._observed.collect_from(self.buckets.reductions)
        self.ends.set_buckets(self.buckets)
        self._checked_wires = False
        self._clock.arm(len(plan), closely=False, forward_ns=MISSING_NS)

    def check_wires(self) -> None:
        """Asks the backend whether it can sum what these buckets send; once, until they are laid out anew.

        Raises:
            UnsupportedWireError: it cannot; on every rank.
        """
        if not self._checked_wires and self.maker.hook is None:
            for bucket in self.buckets.packed():
                self.maker.communicator.check_wire(bucket.bucket.wire_dtype, bucket.members.device)
        self._checked_wires = True

    def set_communicator(self, communicator: Communicator) -> None:
        """Goes on with other ranks. To be followed by `drop_step` and `build_buckets`."""
        self.maker = dataclasses.replace(self.maker, communicator=communicator)
        self.maker.sparse_kinds.set_communicator(communicator)
        self.used.set_communicator(communicator)
        self.ends.set_communicator(communicator)
        self.issued = 0

    def set_mode(self, config: ReduceConfig) -> None:
        """Steps end as `config.sync_mode` says from now on; none is under way."""
        self.maker = dataclasses.replace(self.maker, config=config)
        self.ends.set_mode(self.maker, self.buckets)

    def drop_step(self) -> None:
        """Abandons what is in flight. `build_buckets` must follow: collectives may still write into these buffers."""
        self.ends.drop_steps()
        self._installed = []
        self._count_ranks = None
        self._observed.drop_step()
        for reduction in self.buckets.reductions:
            reduction.drop_views()
        self.used.restart()
        self.maker.sparse_kinds.restart()

    def release_buckets(self) -> None:
        """Gives the buffers up; gradients that are views keep theirs."""
        self.ends.release()
        self.buckets = BucketSet((), self.maker)

    def stats(self) -> dict[str, int | str]:
        """The part of `Reducer.stats` that is counted here."""
        return {
            "collectives": self.issued,
            "wire_allocations": self._allocations + self.buckets.wire_allocations(),
            **(found := self.buckets.stats()),
            "restrided": self._restrided + int(found["restrided"]),
            **self.ends.stats(),
        }

    # A step

    def divide_by_ranks_counted(self, work: Any) -> None:
        """The next step's divisor is what `work`, an all-reduce of ones, gives; of a sum there is none."""
        self._count_ranks = work

    def wait_at_end(self, futures: Iterable[torch.futures.Future[Any]]) -> None:
        """Has the next `finish_step` wait for these too."""
        self._installed.extend(futures)

    def arm(self, *, closely: bool, forward_ns: int, divisor: float | None = None) -> None:
        """A synchronised backward comes next; see `StepClock.arm`.

        Args:
            closely, forward_ns: as there.
            divisor: this rank's own, in this step.
        """
        self._clock.arm(len(self.buckets), closely=closely, forward_ns=forward_ns)
        counted = self._counted_ranks()
        self._divisor = divisor or counted or self.maker.config.divisor(self.maker.communicator.size)
        # A sum of what ranks keep would grow from step to step; a mean of it is what torch makes of views.
        self._keeps_unused = self.maker.as_views and (divisor is not None or self.maker.config.op == "sum")

    def pack_early(self, step: Step, bucket: int, group: int) -> None:
        """Packs a group of a bucket ahead of its launch; on CPU."""
        # Else its wire is under way, and what comes too late is found in finish.
        if bucket >= step.next_bucket and self.ends.own is None:
            began_ns = time.perf_counter_ns()
            with torch.no_grad() if torch.is_grad_enabled() else nullcontext():  # 2 us, for every large gradient
                self.buckets.reductions[bucket].pack_early(group, self._divisor)
            self._clock.packed_part(bucket, began_ns)

    def launch(self, step: Step) -> None:
        """Starts every bucket that is next and ready. In the asynchronous mode nothing, until `finish_step`."""
        if self.ends.own is not None:
            return
        if step.next_bucket == 0:
            self._observed.begin_reduction()
            self.times.comm_start = time.time_ns()
            self._kept = {}  # only now: on CUDA a side stream may have read them until here
            if torch.is_grad_enabled() and not self._warned:
                self._warned = True
                warnings.warn(
                    "Using DistributedDataParallel with create_graph=True: gradients are averaged, but gradients of "
                    "gradients are not",
                    stacklevel=2,
                )
            if self._plans.measured():
                self.issued += self._plans.scheduler.open_round(self._clock.looks)
        before = step.next_bucket
        while step.head_is_ready():
            reduction = self.buckets.reductions[step.next_bucket]
            step.next_bucket += 1
            members = reduction.members
            if self._passes_over(step, members):
                self._check_left_out(members)
                reduction.pass_over()
                continue
            self.buckets.streams.wait_for_gradients(members.index, members.device)
            with torch.no_grad(), self.buckets.streams.on(members.device):
                self._clock.pack(members.index)
                if self._keeps_unused and self.used.kept:
                    self._keep_unused(members)
                reduction.launch(self._divisor)
                watched, issued_ns = reduction.under_way() or (None, None)
                self._clock.launched(members.index, watched, issued_ns, self.maker.communicator)
                self.buckets.streams.packed(members.device)
            step.launched += 1
            self.issued += watched is not None  # the sum of a sparse gradient may have to wait for `finish_step`
        if step.all_launched() and before < step.next_bucket:
            if self.used.asks():
                self.used.start()
                self.issued += 1
            if self._plans.measured():
                self.issued += self._plans.scheduler.report(self.plan)
            if self.maker.sparse_kinds.place:
                self.maker.sparse_kinds.ask()
                self.issued += 1
            self.buckets.streams.wait_for_packs()
            self.issued += self._observed.start_exchange()

    def launch_late(self) -> None:
        """Behind `launch`, where it may be waited for: starts the sums of sparse gradients whose kind nobody knew.

        Does nothing when it is called again.

        Raises:
            AgreementError, CollectiveError: see `SparseKinds.learn`.
        """
        with torch.no_grad():
            for sparse in self.buckets.sparse(self.maker.sparse_kinds.learn()):
                with self.buckets.streams.on(sparse.members.device):
                    sparse.launch_late()
                self.issued += 1

    def finish_step(self, step: Step, *, shared: bool) -> Ended:
        """Ends the step: finishes every launched bucket in launch order, or those of an earlier step, as the mode says.

        Args:
            step: all of whose buckets are launched.
            shared: another reducer, of a nested wrapper, writes the same gradients.
        """
        if self.ends.own is not None:
            return self._contribute(step)
        launched = [one for one in self.buckets.reductions if not self._passes_over(step, one.members)]
        if self.maker.sparse_kinds.place:
            # Ahead of the check, which may raise on this rank alone: the others wait for these sums too.
            self.launch_late()
        with torch.no_grad():
            if not shared:
                # All before the first is overwritten: gradients that share memory share their version.
                for reduction in launched:
                    reduction.check_unchanged()
            if self.ends.staleness:
                ended = self.ends.end_later(self.buckets, self.rounds + 1, self._write)
            else:
                ended = Ended(self.rounds + 1, self._end_now(launched))
            self._plans.scheduler.complete()
            installed, self._installed = self._installed, []
            for future in installed:
                wait_for(future, "a future that the end of backward waits for", self.maker.communicator)
        self.times.comm_end = time.time_ns()
        # First of all: what raised below, or in `end_step`, would leave this rank's rounds behind those of its peers.
        self.close_round(self._clock.taken())
        return ended

    def end_step(self, ended: Ended) -> None:
        """Behind `finish_step`: completes what is observed of the gradients. `observed.check` then raises for it.

        Args:
            ended: what `finish_step` returned.
        """
        if self.used.always:
            self.used.clear_marks()
        with torch.no_grad():
            self.issued += self.ends.observe(ended)

    def apply_oldest(self) -> Ended:
        """The oldest step under way lands, between two steps. `observed.check` then raises for it."""
        with torch.no_grad():
            ended = self.ends.apply_oldest(self.buckets, self._write)
            self.issued += self.ends.observe(ended)
        return ended

    def state_dict(self) -> dict[str, Any]:
        """What is under way, by parameter name; waits for it."""
        with torch.no_grad():
            return self.ends.state_dict(self.maker, self.buckets, self.rounds, self._write)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with what `state_dict` has given; see `averages.load`."""
        self.rounds = self.ends.load_state_dict(self.maker, state)

    def close_round(self, looked: Looked | None) -> None:
        """A synchronised step has ended, here or (join) without this rank's inputs: all ranks count it."""
        if self._plans.measured():
            self._plans.scheduler.close_round(looked)
        self.rounds += 1
        if looked is not None:
            self._recording.keep(self.rounds, self.plan, looked)

    # Within

    def _end_now(self, launched: Sequence[Reduction]) -> list[int]:
        """Finishes what was launched; returns the parameters whose gradients it has not written."""
        left: list[int] = []
        used, unscaling = self.used.sum_of_step(), self._observed.units.unscaling()
        for reduction in launched:
            self._finish_one(reduction, used, unscaling)
        if self.used.kept or self.maker.keeps_gradients:
            left = self._left_alone(() if self.maker.keeps_gradients else launched, used)
        if self.used.asks():
            self.used.complete()
        self._observed.complete()
        return left

    def _contribute(self, step: Step) -> Ended:
        """In place of launching and finishing: waits for nobody."""
        self._observed.begin_reduction()
        self.times.comm_start = time.time_ns()
        self.ends.contribute(self.buckets)
        step.next_bucket = step.launched = len(self.buckets)
        self.times.comm_end = time.time_ns()
        self.close_round(self._clock.taken())
        return Ended(self.rounds)

    def _finish_one(self, reduction: Reduction, used: UsedSum | None, unscaling: Unscaling) -> None:
        members = reduction.members
        untouched = untouched_of(members, used)

        def write() -> None:
            self._clock.unpack(members.index)
            reduction.finish(untouched, unscaling)
            for number in untouched & self._kept.keys():
                gradient = self.maker.parameters[number].grad
                assert gradient is not None
                gradient.copy_(self._kept[number])
            self._clock.unpacked(members.index)

        # A hook's future makes the current stream wait for whatever the hook did.
        if isinstance(reduction, HookedReduction):
            write()
        else:
            self._write(members, write)

    def _write(self, members: Members, write: Callable[[], None]) -> None:
        """Calls what writes a bucket's gradients; on CUDA on a side stream, and watched."""
        if not self.buckets.streams.on_cuda:
            write()
            return
        done = torch.cuda.Event()
        with self.buckets.streams.beside(members.device):
            write()
            done.record()
        what = f"rank {self.maker.communicator.rank}: the reduction of {members.label}"
        after_s = stall_report_after_s(self.maker.config.stall_report_s, self.maker.communicator, members.device)
        self._monitor.watch(members, what, done.query, after_s, members.device)

    def _keep_unused(self, members: Members) -> None:
        """Copies gradients of parameters that this rank has not used: as views they lie where the sum will."""
        for number, parameter in zip(members.numbers, members.parameters, strict=True):
            if parameter.grad is not None and not self.used.here(number) and not self.maker.sparse[number]:
                self._kept[number] = parameter.grad.clone()

    def _passes_over(self, step: Step, members: Members) -> bool:
        return self._skip_unused_buckets and step.skipped.issuperset(members.numbers)

    def _left_alone(self, launched: Sequence[Reduction], used: UsedSum | None) -> list[int]:
        """Parameters whose gradients this step has not written; `launched`: the buckets that it may have."""
        written: set[int] = set()
        for reduction in launched:
            written |= set(reduction.members.numbers) - untouched_of(reduction.members, used)
        return [number for number in range(len(self.maker.parameters)) if number not in written]

    def _check_left_out(self, members: Members) -> None:
        if any_gradient(members.parameters) and self._observed.units.scaled_step():
            raise FusedReduceError(
                f"{members.label} is left out of this step (skip_all_reduce_unused_params), but holds gradients of "
                "earlier backwards, whose loss scale would stay on: zero_grad() first, or use torch.amp.GradScaler"
            )

    def _counted_ranks(self) -> float | None:
        work, self._count_ranks = self._count_ranks, None
        if work is None:
            return None
        wait_for(work, "counting the ranks that still have inputs", self.maker.communicator)
        return float(work.result()[0].item()) if self.maker.config.op == "mean" else None
