"""Engine: a step of a reducer, in the order of time.

    IDLE  --arm-->  ARMED  --backward ends-->  IDLE
                      |                          ^
                      +--backward ends, where nothing may be waited for-->  LAUNCHED  --complete--+

    prepared       the last step is finished; nothing is armed yet                          begin_forward
    armed          forward has ended: a record of what this step has to itself              arm
    a gradient     is marked ready; a bucket's last one launches what is next in the plan   on_accumulated
    launched       packed, and the collective issued, strictly in the order of the plan     launch
    behind them    the collectives of the features in use (buckets/step_feature.py)
    backward ends  all are launched                                                         end_backward
    late           collectives that had to wait for others, before this rank may raise      finish_step
    waited         no gradient has changed since; waited for, unpacked
    finished       counted, statistics, what is to be raised                                _finish

All ranks issue the same collectives in the same order whatever their own readiness was. The sync mode (modes/) says how
a step ends: with its own averages, or later. Where ranks share an autograd thread (Communicator.waits_in_backward) the
end of backward leaves the step LAUNCHED, and the calling thread completes it: in `Reducer.finalize`, or before it next
reads a gradient (optimizer_hooks.py). With manual finalization only `Reducer.finalize_backward` does.

A rank without inputs takes part with no gradients, which are packed as zeros.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import os
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..buckets.bucket_set import BucketMaker, BucketSet
from ..buckets.comm_hook import CommHookReduction
from ..buckets.deferred_errors import in_backward
from ..buckets.loss_scale import LossScale
from ..buckets.reduction import Members, Reduction
from ..buckets.stats.grad_stats import GradStats
from ..buckets.step_feature import Ended, Moments, StepFeature
from ..buckets.streams import refuse_capture
from ..buckets.tensors import any_gradient, no_autograd
from ..buckets.wire_table import WireTable
from ..comm.stall_monitor import StallMonitor, stall_report_after_s
from ..comm.waiting import mark_lost, wait_for
from ..config import ReduceConfig
from ..errors import CollectiveError, FusedReduceError
from ..kernels import dispatch
from ..planning.plan import Plan
from ..planning.timeline import MISSING_NS
from ..trace.step_profile import StepProfile
from . import validation
from .backward_hooks import BackwardHooks, refuse_compiled_autograd
from .failures import lost_error
from .modes import make_mode
from .modes.gradient_stash import GradientStash
from .modes.mode import DelayedAverages
from .modes.steps_in_flight import unused_of
from .parameter_hooks import ParameterHooks, TakesGradients
from .plans import LEARNING, Plans
from .recording import Recording
from .state import ARMED, CLOSED, FAILED, IDLE, LAUNCHED, LOST
from .step import Step, StepTimes, unfinalized_text, unfinished_text
from .unused_parameters import NOT_GIVEN, UsedMap, UsedSum, tensors_in, unreachable
from .wire_schedule import WireSchedule

_logger = logging.getLogger(__name__)

# So many of the latest steps can be timed, by the forwards around them: 40 kB.
_TIMED_STEPS = 1024
# Of an output that only says where a backward may begin, this many values are looked at.
_LOOKED_AT = 256


@dataclass(eq=False)
class ArmedStep:
    """What one step has to itself, beside its readiness: made when it is armed, and let go of when it has ended.

    Args:
        divisor: what this rank's gradients are divided by.
        unused: numbers of the parameters that the search has found unused.
        opaque: type of an output in which no tensor was found, where the step needs them.
        watched: an output was found at which a backward can begin.
        attentive: a gradient needs more than to be marked ready.
        profile: its observer, where it is profiled. It changes, raises and issues nothing.
        keeps_unused: gradients that no rank has used are put back as they were.
    """

    divisor: float = 1.0
    unused: tuple[int, ...] = ()
    opaque: str = ""
    watched: bool = True
    attentive: bool = False
    profile: StepProfile | None = None
    keeps_unused: bool = False


class Engine(TakesGradients):
    """The steps of one reducer. Hooks and engine callbacks call it, on autograd threads; hooks hold it weakly.

    Args:
        maker: builds the buckets; another one takes effect with the next `build_buckets`.
        plans: gives the first plan, says which steps are profiled, and learns the order of readiness.
        wires: what parameters travel on, which may change between two steps.
        observed: gradient statistics and the loss-scale state.
        used: the map of used parameters.
        others: what rides on steps beside all these.
        skip_unused_buckets: do not reduce a bucket whose parameters are all unused.
        exclusive: refuse parameters that another exclusive reducer already reduces.

    Attributes:
        state: see ReducerState.
        parameters, group: of the reducer.
        lock: is held while a step changes, since autograd has a thread per device. (Only `Step.mark_ready` is called
            without it, where there is one device.)
        step: readiness of the current step, or of the last one.
        armed: what that step has to itself, until it has ended.
        times: of the latest step, on the host's clock.
        installed: futures that the end of the step waits for.
        ordered: the latest step that has reduced any gradient.
        buckets: of the plan in use.
        moments: what the features in use do in a step.
        mode: the sync mode in use.
        late: which averages the gradients are.
        recording: the trace that is being recorded: says which steps are profiled for it, and keeps those.
        steps: synchronised steps since the reducer was built.
        rounds: those that all ranks have taken part in, since the communicator was set.
        issued: collectives issued since then.
        resets: calls of `Reducer.reset` since then.
        forwards: of the latest steps, time.perf_counter_ns() when their forwards had ended.
        buckets_reduced: buckets that the latest step has reduced.
        last_unused: parameter numbers that the latest step has found unused.
        unused_always_same: the search has found the same in every step.
        local_backward_expected: the next backward is not reduced on purpose.
        shares_parameters: another reducer, of a nested wrapper, writes the same gradients.
        manual: `Reducer.finalize_backward` ends each step, and nothing else does.
        advises: the user has made this reducer, so warnings may name its options and calls.
        stranger: called with numbers of parameters: gives the name of one in whose place the wrapped module trains
            another, or, without numbers, of any other that it trains; "" if there is none. None: no module is known.
        failure: class and message of the error that the latest step has failed with; empty: it has not.
        on_error: called with the text of an error that a step has failed with; what it raises is raised in its place.
        ranks_counted: an all-reduce of ones, by whose result the next step divides (join); None: there is none.
    """

    def __init__(
        self,
        maker: BucketMaker,
        plans: Plans,
        wires: WireSchedule,
        observed: GradStats,
        used: UsedMap,
        *others: StepFeature,
        skip_unused_buckets: bool,
        exclusive: bool,
    ) -> None:
        self.maker = maker
        self.used = used
        self.observed = observed
        self._plans = plans
        self._wires = wires
        self._skip_unused_buckets = skip_unused_buckets
        self.parameters, self.group = maker.parameters, maker.group
        # In the order of their collectives, which is protocol.
        known = (
            maker.phases,
            used,
            plans,
            wires,
            *others,
            maker.sparse_kinds,
            observed,
            maker.feedback,
            maker.draws,
        )
        self._features = tuple(one for one in known if one is not None)
        self._device = self.parameters.device
        self._devices = {parameter.device for parameter in self.parameters.tensors}
        self._several_devices = len(self._devices) > 1  # autograd has a thread for each
        self._profiled_on = None if self._several_devices else self._device
        self.state = IDLE
        self.lock = threading.RLock()
        self.steps = self.buckets_reduced = 0
        self.forwards: deque[int] = deque(maxlen=_TIMED_STEPS + 1)
        self._forward_ns = MISSING_NS  # when the forward of the next step began
        self.last_unused: tuple[int, ...] = ()
        self.unused_always_same = True
        self.local_backward_expected = False
        self.exclusive = exclusive
        self._elsewhere: weakref.ref[validation.Owner] | None = None  # what averaged gradients that came here
        self.manual = False
        self.advises = True
        self.on_error: Callable[[str], None] | None = None
        self.stranger: Callable[[Sequence[int]], str] | None = None
        self.failure = ""
        self._lost = ""  # the error of a parameter without its hook, to be raised behind each step from now on
        self._warned_of_second = self._warned_of_graph = False
        self.ranks_counted: Any = None
        self._monitor: StallMonitor | None = None  # where something is watched
        self.late = DelayedAverages()
        self.recording: Recording | None = None
        self.armed = ArmedStep()
        self.times = StepTimes()
        self.installed: list[torch.futures.Future[Any]] = []
        self._kept: dict[int, torch.Tensor] = {}  # by the parameter's number, see `ArmedStep.keeps_unused`
        self.buckets = BucketSet((), maker)
        self._enter_mode()
        self._follow_ranks()
        self.build_buckets(plans.first())
        self.ordered = self.step
        validation.enter(self, self.parameters.tensors, self.parameters.names, exclusive=exclusive)
        self.shares_parameters = validation.shared(self, self.parameters.tensors)
        self.hooks = ParameterHooks(self, self.parameters)
        self._backward_hooks = BackwardHooks(self, Engine._backward_begins, Engine.end_backward)

    # Between steps

    def build_buckets(self, plan: Plan) -> None:
        """Builds the buckets of `plan` in place of the old ones.

        What a build raises (no memory, no compiler) leaves the reducer FAILED: plan and wires have moved on, and a
        step with the old buckets would not be the step of the other ranks.
        """
        try:
            if self.maker.feedback is not None:
                self.maker.feedback.leave_buckets()
            self.buckets = BucketSet(plan, self.maker, self.buckets)
            self.observed.collect_from(self.buckets.reductions)
            self.mode.set_buckets(self.buckets)
            self.armed.profile = None
            self.follow_settings()
            dispatch.report_compilation()
            self._begin_step()
        except BaseException as error:
            self.fail(error)
            raise

    def check_wires(self) -> None:
        """Checks that the backend can sum the buckets' wire dtypes.

        Raises:
            UnsupportedWireError: it cannot; on every rank.
        """
        if self.maker.hook is None:
            for bucket in self.buckets.packed():
                bucket.bucket.check(self.group.communicator)
        if self._wires.in_use:
            self.group.communicator.check_wire(torch.bfloat16, self._device)

    def set_wires(self, wires: WireTable) -> None:
        """Changes what parameters travel on. `build_buckets` must follow."""
        self.maker = dataclasses.replace(self.maker, wires=wires)

    def new_group(self) -> None:
        """Has all that must forget something with other ranks do so. `drop_step` and `build_buckets` must follow."""
        for one in (*self._features, self.mode, self.recording):
            if one is not None:
                one.new_group()
        self._follow_ranks()

    def set_mode(self, config: ReduceConfig) -> None:
        """Switches to the sync mode of `config`, when no step is in flight."""
        self.maker = dataclasses.replace(self.maker, config=config)
        stash = self.mode.stash
        self.mode.release()
        self._enter_mode(stash)
        self.mode.set_buckets(self.buckets)
        self.follow_settings()
        self.late.latest = Ended(0, scale=self.late.landed_scale)
        if stash is not None:
            stash.stepped = False
            if self.mode.stash is None:
                stash.put_back()
        elif self.mode.stash is not None and self.local_backward_expected:
            self.mode.stash.keep()  # `.grad` may hold gradients of backwards under no_sync, which the next step reduces

    def follow_settings(self) -> None:
        """Finds out which features are in use. Those that issue are on every rank or on none."""
        self.moments = Moments.of(self._features)

    def give_up(self) -> None:
        """Forgets a step that was given up. New buckets must follow.

        Raises:
            FusedReduceError: the reducer is closed.
        """
        self.refuse_closed()
        self.state = IDLE
        self.armed = ArmedStep()
        self._forward_ns = MISSING_NS
        self.failure = ""

    def drop_step(self) -> None:
        """Drops what is in flight. `build_buckets` must follow: collectives may still write into these buffers."""
        self.mode.drop_steps()
        self.ranks_counted, self.installed = None, []
        self.observed.units.reduced()
        for reduction in self.buckets.reductions:
            reduction.drop_views()
        for feature in self._features:
            feature.dropped()

    def release_buckets(self) -> None:
        """Releases the buckets and their wires; gradients that are views keep the buffer they refer to."""
        self.mode.release()
        if self.maker.phases is not None:
            self.maker.phases.close()
        self.buckets = BucketSet((), self.maker, self.buckets)

    def stats(self) -> dict[str, int | str]:
        """The engine's part of `Reducer.stats`."""
        return {
            "collectives": self.issued + (0 if self.maker.phases is None else self.maker.phases.issued),
            **self.buckets.stats(),
            "steps_under_way": 0,
            "steps_given_up": self.late.given_up,
            **self.mode.stats(),
        }

    @property
    def takes_gradients(self) -> bool:
        """Whether gradients that come now are averaged, or accumulate on purpose (no_sync)."""
        return self.state in (ARMED, LAUNCHED) or (self.state is IDLE and self.local_backward_expected)

    def refuse_closed(self) -> None:
        """Raises FusedReduceError if the reducer is closed."""
        if self.state is CLOSED:
            raise FusedReduceError("this reducer is closed: build another one to reduce gradients again")

    # Prepared: the last step is finished

    def begin_forward(self) -> None:
        """Called before a forward; raises as `check_finalized`, or where a parameter has another dtype or device."""
        with self.lock:
            self.check_finalized()
            self.check_parameters()
            self.times.forward_start, self._forward_ns = time.time_ns(), time.perf_counter_ns()
            for forward in self.moments.forward:
                forward()

    def check_prepared(self) -> None:
        """`check_finalized`, unless `begin_forward` has done so since a step was last armed, ended, failed or given up.

        Raises:
            FusedReduceError, CollectiveError, NonFiniteGradientError: as `check_finalized`.
        """
        if self._forward_ns == MISSING_NS or self.state is not IDLE or self.group.communicator.lost:
            self.check_finalized()

    def check_finalized(self) -> None:
        """Checks that the last synchronised backward was reduced to its end. A launched step is completed first.

        Raises:
            FusedReduceError: a backward has begun but not every bucket has been reduced (names the missing parameters),
                or it failed; the reducer is closed, or its group is lost; or a CUDA graph is being captured.
            CollectiveError, NonFiniteGradientError: as `complete_outside`.
        """
        communicator = self.group.communicator
        if self._device.type == "cuda":
            refuse_capture(communicator.rank)
        if self.state is LAUNCHED:
            self.complete_outside()
        if self.state is CLOSED:
            self.refuse_closed()
        if self.state is LOST or communicator.lost:
            raise lost_error(communicator, communicator.lost)
        # A backward whose queued callback never ran has raised, maybe before any parameter's hook was called.
        step = self.step
        broken = step.callbacks > 0 and not in_backward()
        if self.state is FAILED or (self.state is ARMED and (step.begun or broken)):
            missing = self._missing()
            if self.state is ARMED and communicator.size > 1:
                self.hooks.check_accumulators(missing)
            text = unfinished_text(
                missing,
                self.parameters.names,
                communicator.rank,
                find_unused=self.used.always,
                static_graph=self.used.static,
                failure=self.failure,
                debug_hint=os.environ.get("TORCH_DISTRIBUTED_DEBUG", "OFF").upper() == "OFF",
            )
            raise FusedReduceError(text)

    def check_parameters(self) -> None:
        """Checks before and after a forward that parameters still have our hooks, as far as that is quickly seen.

        Raises:
            FusedReduceError: names one that was converted, moved or replaced.
        """
        self.hooks.check_nodes()
        if self.state is ARMED and not (self.armed.watched or self.step.begun):  # a backward may not have been seen
            error = self._lost_hook()
            if error is not None:
                raise error

    # Armed: forward has ended

    def disarm(self, outputs: object) -> None:
        """Called after a forward whose backward is not reduced (no_sync); `outputs` as for `arm`."""
        self.local_backward_expected = True
        self._forward_ns = MISSING_NS
        self.observed.units.arm()
        self.state = IDLE
        self.watch_local_forward(outputs)

    def watch_local_forward(self, outputs: object) -> None:
        """Has a backward from `outputs` that is not reduced keep its gradients apart from delayed averages."""
        if self.mode.stash is not None and not self._backward_hooks.watch_also(
            tensors_in(outputs, self._most_outputs), _stash_gradients
        ):
            self.mode.stash.stash()

    def arm(self, outputs: object, divisor: float | None) -> None:
        """Called after a forward, when the last step is finished and the buckets are those of the plan.

        Args:
            outputs: what it returned, or NOT_GIVEN.
            divisor: this rank's own; None: the ranks that were counted, or the configured one.

        Raises:
            ValueError: static_graph without `outputs` in the first step.
        """
        forward_ns, self._forward_ns = self._forward_ns, MISSING_NS
        self.local_backward_expected = False
        self.observed.units.arm()
        if self.observed.wanted:
            if self.observed not in self.moments.features:  # asked for since the last step
                self.follow_settings()
            self.observed.begin_forward(self.buckets.reductions)
        used = self.used
        counting = used.static and used.fires is None
        if outputs is NOT_GIVEN and counting:
            raise ValueError("static_graph=True needs the forward's outputs: call prepare_for_backward(outputs)")
        decides = counting or (used.always and not used.static and outputs is not NOT_GIVEN)
        tensors = tensors_in(outputs, None if decides else self._most_outputs)
        opaque = "" if tensors or not decides else type(outputs).__name__
        unused = tuple(self._unused(tensors)) if used.static or used.always else ()
        watched = self._backward_hooks.watch(tensors)
        if not watched:
            _stash_gradients(self)
        recorded = self.recording is not None and self.recording.begin_step()
        self._arm(
            ArmedStep(
                unused=unused,
                opaque=opaque,
                watched=watched,
                profile=self._new_profile(forward_ns) if self._plans.profiles or recorded else None,
            ),
            divisor,
        )
        self.state = ARMED
        self.times.backward_start = time.time_ns()

    def _arm(self, armed: ArmedStep, divisor: float | None = None) -> None:
        """Begins a step with this record, of a rank with inputs or of one without."""
        maker, self.armed = self.maker, armed
        for begin in self.moments.begin:
            begin(self.rounds)
        counted = None if self.ranks_counted is None else self._counted_ranks()
        armed.divisor = divisor or counted or self._divisor
        # The kept gradient of a parameter that no rank has used is a view, so it is reduced all the same. torch leaves
        # its mean there; by another divisor, or as a sum, it would change each step, so it is copied and restored.
        armed.keeps_unused = (divisor is not None or maker.config.op == "sum") and self.used.kept and maker.as_views
        self._begin_step()

    def _begin_step(self) -> None:
        """Begins with no gradient ready. Parameters that were found unused will get none."""
        buckets, used, armed = self.buckets, self.used, self.armed
        self.step = Step(buckets.sizes, buckets.bucket_of, self.parameters, fires=used.fires, unused=armed.unused)
        unrecorded = buckets.streams is not None and buckets.streams.unrecorded
        armed.attentive = bool(used.static or used.always or self._several_devices or armed.profile or unrecorded)

    def _unused(self, outputs: Sequence[torch.Tensor]) -> list[int]:
        """Numbers of the parameters that a backward from `outputs` gives no gradient."""
        if self.used.static:
            return [index for index, one in enumerate(self.used.fires or ()) if one == 0]
        if not outputs:
            return []
        unused = unreachable(outputs, self.hooks.nodes)
        if tuple(unused) != self.last_unused:
            self._note_lost(sorted(set(unused).difference(self.last_unused)))
            if self.steps:
                self.unused_always_same = False
        if not unused and self.steps == 0 and self.advises:
            _logger.warning(
                "find_unused_parameters=True was given, but no unused parameter was found in the first forward. The "
                "search costs time in every iteration: turn it off if the model never has any"
            )
        return unused

    def _counted_ranks(self) -> float | None:
        """The result of `ranks_counted`, which is that of one step; None: op="sum"."""
        work, self.ranks_counted = self.ranks_counted, None
        wait_for(work, "counting the ranks that still have inputs", self.group.communicator)
        return float(work.result()[0].item()) if self.maker.config.op == "mean" else None

    def _new_profile(self, forward_ns: int) -> StepProfile:
        wait = self._wait_to_time if self.waits_in_backward else None
        return StepProfile(
            len(self.parameters.tensors), len(self.buckets), self._profiled_on, wait, forward_ns=forward_ns
        )

    # Backward: a gradient is ready, a bucket complete

    def _backward_begins(self) -> None:
        """Called when a backward has reached an output of forward: queues the callback that ends the step."""
        if self.state is not ARMED:
            return
        if self._device.type == "cuda":
            refuse_capture(self.group.communicator.rank)
        refuse_compiled_autograd(self.group.communicator.rank)
        with self.lock:
            if self.state is not ARMED:
                return
            if self.mode.stash is not None:
                self.mode.stash.stash()
            step = self.step
            if step.from_outputs and step.task == torch._C._current_graph_task_id():
                return  # another output of the same backward
            # Another root of a partial backward; else a new backward, which has made no gradient yet.
            again = step.from_outputs and (step.begun or step.callbacks > 0)
            step.from_outputs = True
            if self.observed.units.attached:
                self.observed.units.note_backward(first_output=not (again or step.begun))
            if not again:
                step.began_ns = time.perf_counter_ns()
                if self.armed.profile is not None:
                    self.armed.profile.backward_began()
            self.observed.additions += 1  # in case this backward raises
            self._backward_hooks.queue_end(step)

    @staticmethod
    def on_accumulated(owner: weakref.ref[Engine], index: int, *_: object) -> None:
        """What autograd calls, on a thread of its own, when the `.grad` of a parameter has been accumulated.

        One that only has to be marked ready, as most, is, without the calls of `on_gradient` and `Step.mark_ready`.
        """
        engine = owner()
        if engine is None:
            return
        step = engine.step
        if engine.state is not ARMED or engine.armed.attentive or engine.observed.units.attached or step.ready[index]:
            engine.on_gradient(index)
            return
        step.begun, step.ready[index], step.arrived_ns[index] = True, 1, time.perf_counter_ns()
        step.order.append(index)
        bucket, pending = step.bucket_of[index], step.pending
        pending[bucket] -= 1
        if not pending[bucket]:
            with engine.lock:
                if engine.state is ARMED and engine.step is step:  # else another thread has called reset() or close()
                    try:  # as `_noting_failures`, without the 2 us of a context manager
                        engine._advance()
                    except BaseException as error:
                        engine._note_failure(error)
                        raise

    def on_gradient(self, index: int) -> None:
        """The `.grad` of parameter `index` has been accumulated, whatever is to be done for it."""
        if self.state is not ARMED:
            if self.state is not LAUNCHED:  # else it has changed what is in flight: `finish_step` raises
                self._local_gradient(index)
            return
        with self.lock:
            if self.state is not ARMED:
                return  # another device's thread has raised, and maybe reset() was called
            now_ns = time.perf_counter_ns()
            step, streams, profile = self.step, self.buckets.streams, self.armed.profile
            with self._noting_failures():  # still under the lock: no other thread may launch the bucket behind this one
                self.observed.units.note_backward()
                if streams is not None and index in streams.unrecorded:
                    streams.record(index, self.parameters.tensors[index].device)
                if self.used.static or self.used.always:
                    if self.armed.opaque:
                        raise FusedReduceError(self._opaque_text())
                    if self.parameters.tensors[index].grad is not None:
                        self.used.mark(index)
                    if self.used.counting:
                        self.used.counts[index] += 1
                        step.count(index)
                        return
                may_launch = step.mark_ready(index, now_ns)
                if profile is not None:
                    self._show_ready(profile, index, now_ns)
                if may_launch:
                    self._advance()
            if profile is not None:
                profile.leave()

    def _advance(self) -> None:
        """Launches what may be launched now, and ends the step where nothing else does, when a bucket is ready."""
        step = self.step
        if self.overlaps and not step.pending[step.next_bucket]:
            self.launch(step)
        if step.callbacks == 0 and step.all_ready():
            if in_backward():
                self._backward_hooks.queue_end(step)
            else:
                self.end_backward(step)

    def _show_ready(self, profile: StepProfile, index: int, now_ns: int) -> None:
        """Shows the profile what has become ready with the gradient that came at `now_ns`."""
        step, bucket_of = self.step, self.buckets.bucket_of
        ready = [index] if step.ready[index] else []
        if step.order and step.order == ready:
            ready = [*sorted(step.skipped), *ready]
        profile.enter(now_ns)
        for number in ready:
            profile.gradient_ready(number)
        for bucket in {bucket_of[number] for number in ready}:
            if step.pending[bucket] == 0:
                profile.bucket_ready(bucket)

    # Launched: packed, and the collective issued

    def launch(self, step: Step) -> None:
        """Launches every bucket that is next and ready, and after the last one the step's other collectives.

        Where ranks are in different steps (Asynchronous) nothing is launched: `finish_step` issues a contribution.

        Raises:
            FusedReduceError, CollectiveError, TypeError: as `Reduction.launch`.
        """
        if torch.is_grad_enabled() and not self._warned_of_graph:
            self._warned_of_graph = True
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
        buckets, before = self.buckets, step.next_bucket
        if before == 0 and not self._open_step(step):
            return
        streams = buckets.streams
        while not step.pending[step.next_bucket]:
            reduction = buckets.reductions[step.next_bucket]
            step.next_bucket += 1
            if self._skip_unused_buckets and self._skips(step, reduction.members):
                self._check_skipped(reduction.members)
                reduction.skip()
            elif streams is not None:
                streams.wait_for_gradients(reduction.members.index, reduction.members.device)
                with torch.cuda.device(reduction.members.device):  # an autograd thread launches those of others too
                    self._launch_one(step, reduction)
            else:
                self._launch_one(step, reduction)
        if before < step.next_bucket == len(buckets.reductions):
            if streams is not None:
                streams.wait_for_packs()
            for behind in self.moments.behind:
                self.issued += behind()

    def _open_step(self, step: Step) -> bool:
        """Called before a step's first bucket; returns whether buckets are to be launched."""
        if self.observed.units.attached:
            self.observed.units.check_before_reduction()
        self.times.comm_start = time.time_ns()
        self._kept = {}  # those of the last step: on CUDA a side stream may have read them until now
        for opened in self.moments.opened:
            self.issued += opened(self.armed.profile)
        if not self.mode.together:
            step.next_bucket = step.launched = len(self.buckets)
        return self.mode.together

    def _launch_one(self, step: Step, reduction: Reduction) -> None:
        armed, index = self.armed, reduction.members.index
        if armed.profile is not None:
            armed.profile.pack(index)
        if armed.keeps_unused:
            self._keep_unused(reduction.members)
        watched, issued_ns = reduction.launch(armed.divisor)
        step.launched_ns[index] = issued_ns
        for sent in self.moments.sent:
            sent(reduction)
        if armed.profile is not None:
            armed.profile.launched(index, watched, issued_ns)
        step.launched += 1
        self.issued += watched is not None  # not the sum of a sparse gradient of unknown kind: see `launch_late`

    def _keep_unused(self, members: Members) -> None:
        """Copies the gradients of parameters that this rank has not used: as views they are overwritten by the sum."""
        for number, parameter in zip(members.numbers, members.parameters, strict=True):
            if parameter.grad is not None and not self.used.here(number) and not self.parameters.sparse[number]:
                self._kept[number] = parameter.grad.clone()

    def _skips(self, step: Step, members: Members) -> bool:
        return step.skipped.issuperset(members.numbers)

    def _check_skipped(self, members: Members) -> None:
        if any_gradient(members.parameters) and self.observed.units.scale_of_step() is not None:
            raise FusedReduceError(
                f"rank {self.group.communicator.rank}: {members.label} is skipped in this step "
                "(skip_all_reduce_unused_params), but has gradients of earlier backwards, which would keep their loss "
                "scale. Call zero_grad() before the forward, or use torch.amp.GradScaler"
            )

    # Backward ends

    def end_first_static_step(self) -> None:
        """Ends a static graph's first step. A wrapper calls it; without one the hook on the outputs does."""
        with self.lock:
            if self.state is ARMED and self.used.counting and self.step.begun:
                self.end_backward(self.step)

    def end_backward(self, step: Step) -> None:
        """Called when a backward of `step` has ended: ends the step, unless gradients are still to come."""
        with self.lock, self._noting_failures():
            if self.state is not ARMED or self.step is not step:
                return
            if not step.begun:
                error = self._lost_hook()
                if error is None:
                    return
                if not step.begin_without_gradients():
                    raise error
                self._lost = str(error)  # peers may have gradients: it is raised behind the collectives
            if self.used.static and self.used.counting:
                self._note_lost(self._missing())
                self.used.fires = list(self.used.counts)
                step.make_all_ready()
            elif not step.all_ready():
                return
            self.times.backward_end = time.time_ns()
            if self.armed.profile is not None:
                self.armed.profile.backward_ended()
            if step.next_bucket < len(self.buckets.sizes):
                self.launch(step)
            if (self.manual or not self.waits_in_backward) and self.mode.together:
                self.state = LAUNCHED
            elif self.maker.hook is not None and in_backward():
                # Behind what comm hooks have queued: torch's mixed precision joins its stream there.
                self.state = LAUNCHED
                torch.autograd.Variable._execution_engine.queue_callback(self.complete)
            else:
                self._finish(step)

    def complete_outside(self) -> None:
        """Completes a launched step before its gradients are used; raises where only `finalize_backward` may."""
        if self.state is LAUNCHED and self.manual:
            raise FusedReduceError(unfinalized_text(self.group.communicator.rank))
        self.complete()

    def complete(self) -> None:
        """Completes a launched step, for callers that may run within a backward or a capture, where nothing may wait.

        Raises:
            FusedReduceError: called within a capture, or within a backward of ranks that share an autograd thread; or a
                gradient was changed while it was in flight.
            CollectiveError: a peer died, left, or did not answer.
            NonFiniteGradientError: see ReduceConfig.check_finite.
        """
        if self.state is not LAUNCHED:
            return
        rank = self.group.communicator.rank
        if self._device.type == "cuda":
            refuse_capture(rank)
        if in_backward() and not self.waits_in_backward:
            raise FusedReduceError(
                f"rank {rank}: gradients that are still in flight are needed within another backward, where nothing "
                "may wait for a peer. Call finalize() after each backward()"
            )
        with self.lock, self._noting_failures():
            if self.state is LAUNCHED:
                self._finish(self.step)

    # Waited for, and the gradients written

    def launch_late(self) -> None:
        """Issues, under the lock, the collectives that had to wait for others of the step."""
        with self.lock, self._noting_failures():
            if self.state is LAUNCHED:
                with no_autograd():
                    self._issue_late()

    def _issue_late(self) -> None:
        """Issues what had to wait for other collectives; nothing when it is called again in the same step."""
        for late in self.moments.late:
            for _ in late(self.buckets):
                self.issued += 1

    def _finish(self, step: Step) -> None:
        """Ends a step whose buckets are all launched."""
        with no_autograd():
            ended = self.finish_step(step, shared=self.shares_parameters)
            self.late.latest = ended
            self._forward_ns = MISSING_NS
            self.steps += 1
            self.forwards.append(step.armed_ns)
            self.buckets_reduced = step.launched
            if step.order:
                self.ordered = step
            self.last_unused = tuple(sorted(step.skipped))
            if self._plans.state is LEARNING:
                self._plans.note_order(self.ordered.ready_order())
            self.used.clear_marks()
            self.end_statistics(ended)
        if self.mode.stash is not None:
            self.mode.stash.put_back()
        self.state, self.armed = IDLE, ArmedStep()
        if in_backward():
            # After the callbacks of other reducers: if one raises, the engine runs no later ones.
            torch.autograd.Variable._execution_engine.queue_callback(self._check_ended)
        else:
            self._check_ended()

    def finish_step(self, step: Step, *, shared: bool) -> Ended:
        """Ends the collectives of a step whose buckets are all launched.

        Args:
            step: the step.
            shared: another reducer, of a nested wrapper, writes the same gradients.

        Returns:
            Which step's averages the gradients are.

        Raises:
            FusedReduceError: a gradient was changed after it had been packed.
            CollectiveError: a peer died, left, or did not answer.
        """
        launched: Sequence[Reduction] = self.buckets.reductions if self.mode.together else ()
        if self._skip_unused_buckets:
            launched = [one for one in launched if not self._skips(step, one.members)]
        self._issue_late()  # before the check, which may raise on this rank alone: the others wait for these
        if not shared:
            # All are checked before the first is overwritten: gradients that share memory share their version.
            for reduction in launched:
                reduction.check_unchanged()
        ended = self.mode.end_step(self, launched)
        for waited in self.moments.waited:
            waited()
        armed, communicator = self.armed, self.group.communicator
        installed, self.installed = self.installed, []
        for future in installed:
            wait_for(future, "a future that the end of backward waits for", communicator)
        self.times.comm_end = time.time_ns()
        # Before anything else may raise, which would leave this rank's number of rounds behind that of its peers.
        profile, armed.profile = armed.profile, None
        changed = [counted(profile) for counted in self.moments.counted]
        self.rounds += 1
        if any(changed):
            self.follow_settings()
        if profile is not None and self.recording is not None:
            self.recording.keep(self.rounds, self.buckets.plan, profile)
        return ended

    def end_statistics(self, ended: Ended) -> None:
        """Completes the statistics of the gradients that a step has left."""
        self.observed.units.reduced()
        for landed in self.moments.landed:
            self.issued += landed(ended)

    def finish_buckets(self, launched: Sequence[Reduction]) -> list[int]:
        """Finishes launched buckets; returns the numbers of the parameters whose gradients were not written."""
        left: list[int] = []
        used = self.used.sum_of_step() if self.used.kept else None
        scale = self.observed.units.scale_of_step()
        writes = [
            (one, functools.partial(self._finish_one, one, unused_of(one.members, used) if used else (), scale))
            for one in launched
        ]
        self.write(writes)
        if used is not None or self.maker.keeps_gradients:
            left = self._not_written(() if self.maker.keeps_gradients else launched, used)
        if used is not None and self.used.asks():
            self.used.complete()
        return left

    def write(self, writes: Iterable[tuple[Reduction, Callable[[], None]]]) -> None:
        """Calls what writes each bucket's gradients: on CUDA on a side stream, watched by the stall monitor."""
        groups: Iterable[tuple[torch.device | None, Iterable[tuple[Reduction, Callable[[], None]]]]] = [(None, writes)]
        streams = self.buckets.streams
        if streams is not None:
            groups = itertools.groupby(writes, _written_beside_on)
        for device, group in groups:
            if device is None or streams is None:
                # A hook's future makes the current stream wait for what the hook has enqueued.
                for reduction, write in group:
                    write()
                    reduction.release()
                continue
            after_s = stall_report_after_s(self.maker.config.stall_report_s, self.group.communicator, device)
            finished = []
            with streams.beside(device) as written:
                for reduction, write in group:
                    write()
                    self._watch(reduction.members, written(reduction.members.index), after_s)
                    finished.append(reduction)
            for reduction in finished:
                reduction.release()

    def _watch(self, members: Members, written: torch.cuda.Event, after_s: float) -> None:
        what = f"rank {self.group.communicator.rank}: the reduction of {members.label}"
        self._monitor = self._monitor or StallMonitor()
        self._monitor.watch(members, what, written.query, after_s, members.device)

    def _finish_one(self, reduction: Reduction, unused: Collection[int], scale: LossScale | None) -> None:
        armed, index = self.armed, reduction.members.index
        if armed.profile is not None:
            armed.profile.unpack(index)
        reduction.finish(unused, scale)
        for number in self._kept.keys() & unused:
            gradient = self.parameters.tensors[number].grad
            assert gradient is not None
            gradient.copy_(self._kept[number])
        if armed.profile is not None:
            armed.profile.unpacked(index)

    def _not_written(self, launched: Sequence[Reduction], used: UsedSum | None) -> list[int]:
        """Numbers of the parameters whose gradients this step has not written; `launched`: the buckets it has."""
        written: set[int] = set()
        for reduction in launched:
            written |= set(reduction.members.numbers) - unused_of(reduction.members, used)
        return [number for number in range(len(self.parameters.tensors)) if number not in written]

    def _check_ended(self) -> None:
        """Raises what a step has found that has reduced all the same."""
        if self._lost:
            raise FusedReduceError(self._lost)
        for raises in self.moments.raises:
            raises()

    # A rank without inputs

    def step_without_inputs(self) -> None:
        """Runs a step without gradients beside this rank's latest own one, which stays as it is."""
        with self.lock, no_autograd():
            own = self.armed, self.step, self.times
            self.times = StepTimes()
            with self._own_set_aside():
                self._plans.note_order()
                try:
                    self._arm(ArmedStep())
                    self.step.make_all_ready()
                    self.launch(self.step)
                    self.end_statistics(self.finish_step(self.step, shared=True))
                except BaseException as error:
                    self.fail(error)
                    raise
                finally:
                    self.armed, self.step, self.times = own
            for raises in self.moments.raises:
                raises()

    @contextlib.contextmanager
    def _own_set_aside(self) -> Iterator[None]:
        """Context of a step on a rank without inputs (join): each gradient is missing, and nothing of it stays.

        Afterwards gradients, the statistics of the latest step, and residuals are this rank's own again.
        """
        parameters = self.parameters.tensors
        gradients = [parameter.grad for parameter in parameters]
        # Views lie in what the step writes, as may what a comm hook has left.
        overwritten = self.maker.as_views or self.maker.hook is not None
        values = [one.clone() if overwritten and one is not None else None for one in gradients]
        ended = False
        for parameter in parameters:
            parameter.grad = None
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(self.observed.units.own_set_aside())
                for feature in self.moments.features:
                    stack.enter_context(feature.own_set_aside(self.buckets.reductions))
                yield
                ended = True
        finally:
            for parameter, gradient, value in zip(parameters, gradients, values, strict=True):
                # After a failure a collective in flight may still write to what views lie in.
                parameter.grad = gradient if ended or value is None else value
                if ended and gradient is not None and value is not None:
                    gradient.data.copy_(value)  # `data`: its version stays, as it holds what it held

    # Failed, lost hooks, gradients that are not reduced

    def fail(self, error: BaseException) -> None:
        """Makes the reducer FAILED: `reset` is needed."""
        self.state = FAILED
        self.failure = f"{type(error).__name__}: {error}"
        if isinstance(error, CollectiveError):
            mark_lost(self.group.communicator, str(error))
        if self.on_error is not None:
            self.on_error(str(error))

    @contextlib.contextmanager
    def _noting_failures(self) -> Iterator[None]:
        """Context that notes what a hook, kernel or collective of a step raises."""
        try:
            yield
        except BaseException as error:
            self._note_failure(error)
            raise

    def _note_failure(self, error: BaseException) -> None:
        if self.state in (ARMED, LAUNCHED):
            self.fail(error)

    def _local_gradient(self, index: int) -> None:
        """Notes a gradient that is not reduced now: with no_sync the next step will, after a step nothing does."""
        if self.used.always and self.parameters.tensors[index].grad is not None:
            self.used.mark(index)
        if self.state is not IDLE:
            return
        self.observed.added_here()
        if not self.steps or self.takes_gradients or self._warned_of_second:
            return
        if self._is_averaged_elsewhere(index):
            return
        self._warned_of_second = True
        warnings.warn(
            f"rank {self.group.communicator.rank}: {self.parameters.names[index]} got a gradient after this step's "
            "gradients had been averaged (a second backward through the same forward, or several forwards before one "
            "backward): it was added on this rank only, so ranks now differ, unless something else averages it. "
            "Call forward before each backward, or use no_sync() to accumulate",
            stacklevel=2,
        )

    def _is_averaged_elsewhere(self, index: int) -> bool:
        """Whether another reducer takes this gradient; asked for each gradient of a wrapper that another replaces."""
        known = None if self._elsewhere is None else self._elsewhere()
        if known is None or not known.takes_gradients:
            known = validation.averaged_elsewhere(self, self.parameters.tensors[index])
            self._elsewhere = None if known is None else weakref.ref(known)
        return known is not None

    def _opaque_text(self) -> str:
        option = "static_graph" if self.used.static else "find_unused_parameters"
        return (
            f"rank {self.group.communicator.rank}: {option}=True needs the tensors that forward has returned, and "
            f"found none in its output of type {self.armed.opaque}: which parameters are used is not known. Return a "
            "tensor, or a list, tuple, dict or dataclass that holds them (with a Reducer: give them to "
            f"prepare_for_backward), or leave {option}=True out, if every step uses every parameter"
        )

    def _missing(self) -> list[int]:
        """Numbers of the parameters whose gradients have not come in the step that is armed."""
        counting = self.used.counting
        return [index for index in self.step.missing() if not (counting and self.used.counts[index])]

    def _lost_hook(self) -> FusedReduceError | None:
        """Looks, where a backward has given no parameter a gradient, whether the model has those that were hooked.

        That is no fault by itself: a gradient penalty does so in every step. So it looks at two parameters only.

        Returns:
            The error, which names a parameter that is another one now; None: there is none, or this is the only rank,
            where nothing is left out.
        """
        if self.group.communicator.size == 1:
            return None
        trained = [index for index in self._missing() if self.parameters.tensors[index].requires_grad]
        looked_at = [trained[0], trained[-1]] if trained else []
        try:
            known = self.hooks.check_accumulators(looked_at)
        except FusedReduceError as error:
            return error
        name = self.stranger(looked_at) if known and self.stranger is not None else ""
        if not name:
            return None
        return FusedReduceError(
            f"{name} has a gradient, and was not there, or was frozen, when the model was wrapped: its gradients are "
            "not reduced. Load, replace, add and thaw parameters before you wrap the model, or wrap it anew"
        )

    def _note_lost(self, numbers: Sequence[int]) -> None:
        """Looks among parameters that seem unused for one that has lost its hook. What is unused differs between ranks,
        so the error is raised behind the step's collectives."""
        if self.group.communicator.size > 1:
            try:
                self.hooks.check_accumulators(numbers)
            except FusedReduceError as error:
                self._lost = str(error)

    # Within

    def _enter_mode(self, stash: GradientStash | None = None) -> None:
        self.mode = make_mode(self.maker, self.late, stash)
        self.overlaps = self.maker.config.overlap and self.mode.together
        self.used.alone = self.observed.alone = not self.mode.together
        # How many values of an output are looked at where it only says at which tensors a backward may begin.
        self._most_outputs = _LOOKED_AT if self.mode.stash is None else sys.maxsize

    def _follow_ranks(self) -> None:
        self.issued = self.rounds = self.resets = 0
        self._divisor = self.maker.config.divisor(self.group.communicator.size)
        self.waits_in_backward = all(map(self.group.communicator.waits_in_backward, self._devices))

    def _wait_to_time(self, collective: Any) -> None:
        wait_for(collective, "the collective whose end is timed", self.group.communicator)


def _stash_gradients(engine: Engine) -> None:
    if engine.mode.stash is not None:
        engine.mode.stash.stash()


def _written_beside_on(one: tuple[Reduction, Callable[[], None]]) -> torch.device | None:
    """The device on whose side stream a bucket is written; None: the current one is behind what is to be read."""
    return None if isinstance(one[0], CommHookReduction) else one[0].members.device
