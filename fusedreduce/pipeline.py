"""Pipeline: what is issued and finished in a step. Every rank issues the same collectives in the same order.

    once          a profiled step's probe, ahead of the first bucket
    per bucket    launch: pack and start the collective, when it is ready and next in the plan
    once          behind the last bucket: the used map, the scheduler's report, what is observed
    per bucket    finish, in the same order: check that nothing has changed since, wait, unpack

When a step begins and when a bucket is ready others say (reducer.py, arrivals.py). A rank without inputs (join) issues
the same from here, with zeros. Called under the reducer's lock.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .asynchronous.own_pace import OwnPace
from .bucket_set import BucketMaker, BucketSet
from .comm.monitor import StallMonitor
from .comm.protocol import Communicator, Pending
from .errors import FusedReduceError
from .grad_bucket import GradBucket
from .later import averages
from .later.under_way import StepsUnderWay, StepUnderWay, untouched_of
from .modes import Asynchronous, SyncMode, staleness
from .observed import Observed
from .planning.plan import Plan
from .planning.timeline import MISSING_NS
from .plans import Plans
from .recording import Recording
from .reductions import HookedReduction, Members, Reduction
from .step import Step
from .step_clock import Looked, StepClock
from .units import LossScale, Unscaling
from .unused import UsedMap, UsedSum

_STALL_SHARE_OF_TIMEOUT = 0.8


@dataclass
class StepTimes:
    """Marks of the latest synchronised step, host clock, ns of time.time_ns()."""

    forward_start: int = 0
    backward_start: int = 0
    backward_end: int = 0
    comm_start: int = 0
    comm_end: int = 0


class Ended(NamedTuple):
    """How a step has ended.

    Args:
        number: of the step whose averages the gradients are; None: there are none.
        left: numbers of the parameters whose gradients are as they were.
        elsewhere: it was launched in other buckets than those in use.
        scale: its loss scale, which has come off.
    """

    number: int | None
    left: Sequence[int] = ()
    elsewhere: bool = False
    scale: LossScale | None = None


class Pipeline:
    """The buckets of a reducer, and what is under way of them.

    Args:
        maker: builds the buckets; what is put in its place holds from the next `lay` on.
        plans: where the first plan comes from, and whether plans follow measurements now.
        observed: is told what happens to the gradients.
        clock: is told when.
        recording: keeps steps.
        used: parameters that have a gradient.
        skip_unused_buckets: leave a bucket out whose parameters are all unused.

    Attributes:
        buckets: of the plan in use.
        under_way: steps that end later than with their own backward.
        own: in the asynchronous mode, what takes the place of launching and finishing.
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
        self._rounds = 0
        self._divisor = 1.0
        self._count_ranks: Any = None
        self._installed: list[torch.futures.Future[Any]] = []
        self._warned = False
        self._checked_wires = False
        self._allocations = 0
        self._restrided = 0
        self.under_way = StepsUnderWay(maker.parameters)
        self.own: OwnPace | None = None
        self.buckets = BucketSet((), maker)
        self.follow(maker.config.sync_mode)
        self.lay(plans.first())

    # Between steps

    @property
    def plan(self) -> Plan:
        """Parameter numbers by bucket, in launch order."""
        return self.buckets.plan

    def lay(self, plan: Plan) -> None:
        """Builds the buckets of `plan`; the old ones are given up."""
        self._allocations += self.buckets.wire_allocations()
        self._restrided += int(self.buckets.stats()["restrided"])
        self.buckets = BucketSet(plan, self.maker)
        self._observed.lay(self.buckets.reductions)
        if self.own is not None:
            self.own.lay([one.members for one in self.buckets.reductions])
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

    def use(self, communicator: Communicator) -> None:
        """Goes on with other ranks. To be followed by `give_up` and `lay`."""
        self.maker = dataclasses.replace(self.maker, communicator=communicator)
        self.used.use(communicator)
        if self.own is not None:
            self.own.use(communicator)
        self.issued = 0

    def follow(self, mode: SyncMode) -> None:
        """Steps end as `mode` says from now on; none is under way."""
        self._staleness = staleness(mode)
        if self.own is not None:
            self.own.close()
            self.own = None
        if isinstance(mode, Asynchronous):
            self.own = OwnPace(self.maker, mode.max_in_flight)
            self.own.lay([one.members for one in self.buckets.reductions])
        self.used.alone = self._observed.alone = self.own is not None

    def give_up(self) -> None:
        """Abandons what is under way. To be followed by `lay`: collectives may still write into these wire buffers."""
        self.under_way.give_up()
        self._installed = []
        self._count_ranks = None
        self._observed.give_up()
        for reduction in self.buckets.reductions:
            reduction.drop_views()
        self.used.restart()

    def close(self) -> None:
        """Gives the buffers up; gradients that are views keep theirs."""
        self.under_way.give_up()
        if self.own is not None:
            self.own.close()
        self.buckets = BucketSet((), self.maker)

    def stats(self) -> dict[str, int | str]:
        """The part of `Reducer.stats` that is counted here."""
        return {
            "collectives": self.issued,
            "steps_under_way": len(self.under_way),
            "steps_given_up": self.under_way.given_up,
            "wire_allocations": self._allocations + self.buckets.wire_allocations(),
            **(found := self.buckets.stats()),
            "restrided": self._restrided + int(found["restrided"]),
            **({} if self.own is None else self.own.stats()),
        }

    # A step

    def divide_by_ranks_counted(self, work: Any) -> None:
        """The next step's divisor is what `work`, an all-reduce of ones, gives; of a sum there is none."""
        self._count_ranks = work

    def wait_at_end(self, futures: Iterable[torch.futures.Future[Any]]) -> None:
        """Has the next `finish` wait for these too."""
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

    def take(self, step: Step, bucket: int, group: int) -> None:
        """Packs a group of a bucket ahead of its launch; on CPU."""
        if (
            bucket >= step.next_bucket and self.own is None
        ):  # else its wire is under way, and what comes too late is found in finish
            began_ns = time.perf_counter_ns()
            with torch.no_grad() if torch.is_grad_enabled() else nullcontext():  # 2 us, for every large gradient
                self.buckets.reductions[bucket].take(group, self._divisor)
            self._clock.packed_part(bucket, began_ns)

    def launch(self, step: Step) -> None:
        """Starts every bucket that is next and ready. In the asynchronous mode nothing, until `finish`."""
        if self.own is not None:
            return
        if step.next_bucket == 0:
            self._observed.begin_reduction()
            self.times.comm_start = time.time_ns()
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
                reduction.launch(self._divisor)
                self._clock.launched(members.index, *(reduction.under_way() or (None, None)))
                self.buckets.streams.packed(members.device)
            step.launched += 1
            self.issued += 1
        if step.all_launched() and before < step.next_bucket:
            if self.used.asks():
                self.used.start()
                self.issued += 1
            if self._plans.measured():
                self.issued += self._plans.scheduler.report(self.plan)
            self.buckets.streams.wait_for_packs()
            self.issued += self._observed.tell()

    def finish(self, step: Step, *, shared: bool) -> Ended:
        """Ends the step: finishes every launched bucket in launch order, or those of an earlier step, as the mode says.

        Args:
            step: all of whose buckets are launched.
            shared: another reducer, of a nested wrapper, writes the same gradients.
        """
        if self.own is not None:
            return self._contribute(step, self.own)
        launched = [one for one in self.buckets.reductions if not self._passes_over(step, one.members)]
        with torch.no_grad():
            if not shared:
                # All before the first is overwritten: gradients that share memory share their version.
                for reduction in launched:
                    reduction.check_unchanged()
            ended = self._end_later() if self._staleness else Ended(self._rounds + 1, self._end_now(launched))
            self._plans.scheduler.wait()
            installed, self._installed = self._installed, []
            for future in installed:
                future.wait()
        self.times.comm_end = time.time_ns()
        # First of all: what raised below, or in `end_step`, would leave this rank's rounds behind those of its peers.
        self._close_round(self._clock.taken())
        self.buckets.streams.settle()
        return ended

    def end_step(self, ended: Ended) -> None:
        """Behind `finish`: completes what is observed of the gradients. `observed.check` then raises for it.

        Args:
            ended: what `finish` returned.
        """
        if self.used.always:
            self.used.forget()
        with torch.no_grad():
            self._observe(ended)

    def land(self) -> Ended:
        """The oldest step under way lands, between two steps. `observed.check` then raises for it."""
        with torch.no_grad():
            ended = self._land()
            self._observe(ended)
        return ended

    def state_dict(self) -> dict[str, Any]:
        """What is under way, by parameter name; waits for it."""
        if not self._staleness:
            return {}
        maker = self.maker
        with torch.no_grad():
            self.under_way.settle(self._averaged)
        for one in self.buckets.parting():
            one.ready()
        return averages.dump(self.under_way, maker.names, world_size=maker.communicator.size, rounds=self._rounds)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with what `state_dict` has given; see `averages.load`."""
        maker = self.maker
        steps, rounds = averages.load(
            state,
            maker.parameters,
            maker.names,
            world_size=maker.communicator.size,
            most=self._staleness,
            tells=maker.config.check_finite != "off",
        )
        self._rounds = rounds
        for step in steps:
            self.under_way.add(step)

    def _averaged(self, step: StepUnderWay) -> Any:
        """A step's averages, in new tensors."""
        for parameter in self.maker.parameters:
            parameter.grad = None
        if step.told is not None:
            step.told[0].wait()
        self.under_way.write(step, self._write)
        found = [parameter.grad for parameter in self.maker.parameters]
        return averages.flights(self.maker.parameters, self.maker.names, found)

    # Join: what a rank without inputs does in place of all that

    def shadows(self) -> list[GradBucket]:
        """Zeros for every bucket, in launch order, for a step that begins with this."""
        if self._plans.measured():
            self.issued += self._plans.scheduler.open_round(None)
        self._observed.begin_shadow()
        return [reduction.shadow() for reduction in self.buckets.reductions]

    def run_shadow(self, bucket: GradBucket) -> Pending | torch.futures.Future[torch.Tensor]:
        """Takes part in one bucket's collective with nothing."""
        self.issued += 1
        under_way = self.buckets.reductions[bucket.index()].run_shadow(bucket)
        self._observed.add_shadow(bucket, under_way)
        return under_way

    def shadow_used_map(self) -> None:
        """Takes part in the sum of the used map that ends a static graph's first step."""
        if not self.used.always and self.used.asks():
            self.used.start()
            self.used.finish()

    def end_shadow_step(self) -> None:
        """The others' step is done: takes part in agreeing on a plan too. `observed.check` then raises for it."""
        self._plans.note_order()
        if self._plans.measured():
            self.issued += self._plans.scheduler.report(self.plan)
            self._plans.scheduler.wait()
        self._close_round(None)
        self.issued += self._observed.close_shadow(self._rounds)

    # Within

    def _close_round(self, looked: Looked | None) -> None:
        """A synchronised step has ended, here or (join) without this rank's inputs: all ranks count it."""
        if self._plans.measured():
            self._plans.scheduler.close_round(looked)
        self._rounds += 1
        if looked is not None:
            self._recording.keep(self._rounds, self.plan, looked)

    def _end_now(self, launched: Sequence[Reduction]) -> list[int]:
        """Finishes what was launched; returns the parameters whose gradients it has not written."""
        left: list[int] = []
        used, unscaling = self.used.held(), self._observed.units.unscaling()
        for reduction in launched:
            self._finish_one(reduction, used, unscaling)
        if self.used.kept or self.maker.keeps_gradients:
            left = self._left_alone(() if self.maker.keeps_gradients else launched, used)
        if self.used.asks():
            self.used.finish()
        self._observed.wait()
        return left

    def _end_later(self) -> Ended:
        """Takes along what was launched; an earlier step lands in its place, if there are as many as there may be."""
        parting = self.buckets.parting()
        step = StepUnderWay(
            number=self._rounds + 1,
            flights=[(one, one.part()) for one in parting],
            unscaling=self._observed.units.unscaling(),
            used=self.used.taken(),
            told=self._observed.taken(),
            buckets=self.buckets,
        )
        self.under_way.add(step)
        if len(self.under_way) > self._staleness:
            ended = self._land()
        else:
            self.under_way.withhold()
            ended = Ended(None)
        for one in parting:
            one.ready()
        return ended

    def _land(self) -> Ended:
        self._observed.begin_landing()
        step = self.under_way.land(self._write, self._observed.wait)
        return Ended(step.number, elsewhere=step.buckets is not self.buckets, scale=step.unscaling.scale)

    def _contribute(self, step: Step, own: OwnPace) -> Ended:
        """In place of launching and finishing: waits for nobody."""
        self._observed.begin_reduction()
        self.times.comm_start = time.time_ns()
        own.end_step(self._observed, self.buckets.streams)
        for bucket in self.buckets.packed():
            bucket.let_go()
        step.next_bucket = step.launched = len(self.buckets)
        self.times.comm_end = time.time_ns()
        self._close_round(self._clock.taken())
        self.buckets.streams.settle()
        return Ended(self._rounds)

    def _observe(self, ended: Ended) -> None:
        if ended.number is None or self.own is not None:
            self._observed.withhold()
        elif ended.elsewhere:
            self._observed.close_measured(ended.number)
        else:
            self.issued += self._observed.close(ended.number, ended.left)

    def _finish_one(self, reduction: Reduction, used: UsedSum | None, unscaling: Unscaling) -> None:
        members = reduction.members
        untouched = untouched_of(members, used)
        self._clock.unpack(members.index)

        def finish() -> None:
            reduction.finish(untouched, unscaling)
            self._clock.unpacked(members.index)

        if isinstance(reduction, HookedReduction):
            finish()  # a hook's future makes the current stream wait for whatever the hook did
        else:
            self._write(members, finish)

    def _write(self, members: Members, write: Callable[[], None]) -> None:
        """Calls what writes a bucket's gradients; on CUDA on a side stream, and watched."""
        if not self.buckets.streams.on_cuda:
            write()
            return
        done = torch.cuda.Event()
        with self.buckets.streams.beside(members.device):
            write()
            done.record()
        if torch.cuda.is_current_stream_capturing():
            self._monitor.forget_all()  # events must not be queried while a graph is being captured
        else:
            what = f"rank {self.maker.communicator.rank}: the reduction of {members.label}"
            self._monitor.watch(members, what, done.query, self._report_after_s(members.device))

    def _passes_over(self, step: Step, members: Members) -> bool:
        return self._skip_unused_buckets and step.skipped.issuperset(members.numbers)

    def _left_alone(self, launched: Sequence[Reduction], used: UsedSum | None) -> list[int]:
        """Parameters whose gradients this step has not written; `launched`: the buckets that it may have."""
        written: set[int] = set()
        for reduction in launched:
            written |= set(reduction.members.numbers) - untouched_of(reduction.members, used)
        return [number for number in range(len(self.maker.parameters)) if number not in written]

    def _check_left_out(self, members: Members) -> None:
        waits = any(parameter.grad is not None for parameter in members.parameters)
        if waits and self._observed.units.scaled_step():
            raise FusedReduceError(
                f"{members.label} is left out of this step (skip_all_reduce_unused_params), but holds gradients of "
                "earlier backwards, whose loss scale would stay on: zero_grad() first, or use torch.amp.GradScaler"
            )

    def _counted_ranks(self) -> float | None:
        work, self._count_ranks = self._count_ranks, None
        if work is None:
            return None
        work.wait()
        return float(work.result()[0].item()) if self.maker.config.op == "mean" else None

    def _report_after_s(self, device: torch.device) -> float:
        config = self.maker.config
        if config.stall_report_s is not None:
            return config.stall_report_s
        return _STALL_SHARE_OF_TIMEOUT * self.maker.communicator.timeout_s(device)
