"""StepCycle: the steps of one reducer, from the end of forward until the gradients are averages.

    IDLE  --arm-->  ARMED  --backward ends-->  IDLE
                      |                          ^
                      +--backward ends, where nothing may be waited for-->  LAUNCHED  --complete--+

Each parameter's hook marks it ready. A bucket is launched when all its parameters are ready, strictly in plan order, so
that all ranks issue the same collectives in the same order whatever their own readiness was. When backward is done, a
callback of the autograd engine finishes the buckets in that order.

Where ranks share an autograd thread (Communicator.waits_in_backward) that callback leaves the step LAUNCHED, and the
calling thread completes it: in `Reducer.finalize`, or before it next reads a gradient (optimizer_hooks.py). With manual
finalization (manual_finalization.py) only `finalize_backward` does.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from ..buckets.deferred_errors import in_backward
from ..buckets.stats.grad_stats import GradStats
from ..buckets.streams import refuse_capture
from ..buckets.tensors import no_autograd
from ..comm.protocol import Communicator
from ..errors import FusedReduceError
from ..planning.timeline import MISSING_NS
from . import validation
from .backward_hooks import BackwardHooks, refuse_compiled_autograd
from .failures import Failures, lost_error
from .parameter_hooks import ParameterHooks
from .pipeline import Pipeline
from .plans import Plans
from .recording import Recording
from .state import ARMED, CLOSED, FAILED, IDLE, LAUNCHED, LOST
from .step import Step, unfinalized_text, unfinished_text
from .unused_parameters import NOT_GIVEN, tensors_in, unreachable

_logger = logging.getLogger(__name__)

# So many of the latest steps can be timed, by the forwards around them: 40 kB.
_TIMED_STEPS = 1024
# Of an output that only says where a backward may begin, this many values are looked at.
_LOOKED_AT = 256


class StepCycle:
    """The steps of one reducer. Hooks and engine callbacks call it, on autograd threads; hooks hold it weakly.

    Args:
        pipeline: has the buckets.
        plans: says which steps are profiled, and learns the order of readiness.
        observed: gradient statistics and the loss-scale state.
        recording: says which steps are profiled for a trace.
        find_unused_parameters: search the graph of the outputs for parameters that get no gradient.
        static_graph: every step uses the same parameters equally often.
        exclusive: refuse parameters that another exclusive reducer already reduces.

    Attributes:
        state: see ReducerState.
        lock: is held while the cycle changes, since autograd has a thread per device. (Only `Step.mark_ready` is called
            without it, where there is one device.)
        step: the current step, or the last one.
        ordered: the latest step that has reduced any gradient.
        steps: synchronised steps since the reducer was built.
        forwards: of the latest of them, time.perf_counter_ns() when their forwards had ended.
        buckets_reduced: buckets that the latest step has reduced.
        last_unused: parameter numbers that the latest step has found unused.
        unused_now: what the search has found for the step that is armed.
        unused_always_same: the search has found the same in every step.
        local_backward_expected: the next backward is not reduced on purpose.
        shares_parameters: another reducer, of a nested wrapper, writes the same gradients.
        manual: `Reducer.finalize_backward` ends each step, and nothing else does.
        advises: the user has made this reducer, so warnings may name its options and calls.
        stranger: called with numbers of parameters: gives the name of one in whose place the wrapped module trains
            another, or, without numbers, of any other that it trains; "" if there is none. None: no module is known.
        failures: the error that the latest step has failed with.
        on_error: called with the text of an error that a step has failed with; what it raises is raised in its place.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        plans: Plans,
        observed: GradStats,
        recording: Recording,
        *,
        find_unused_parameters: bool,
        static_graph: bool,
        exclusive: bool,
    ) -> None:
        self._pipeline = pipeline
        self._plans = plans
        self._observed = observed
        self._recording = recording
        self._find_unused = find_unused_parameters
        self.static_graph = static_graph
        maker = pipeline.maker
        self._parameters, self._names = maker.parameters, maker.names
        self._devices = [parameter.device for parameter in self._parameters]
        self._device = self._devices[0]
        self.state = IDLE
        self.lock = threading.RLock()
        self.steps = 0
        self.forwards: deque[int] = deque(maxlen=_TIMED_STEPS + 1)
        self.buckets_reduced = 0
        self.last_unused: tuple[int, ...] = ()
        self.unused_now: tuple[int, ...] = ()
        self.unused_always_same = True
        self.local_backward_expected = False
        self.exclusive = exclusive
        self.shares_parameters = validation.enter(self, self._parameters, self._names, exclusive=exclusive)
        self.manual = False
        self.advises = True
        self.on_error: Callable[[str], None] | None = None
        self._fires: list[int] | None = None  # static graph: how many gradients each parameter gets; None: not known
        self._counted = [0] * len(self._parameters)
        self._forward_ns = MISSING_NS
        self._warned_of_second = False
        self._several_devices = len(set(self._devices)) > 1  # autograd has a thread for each
        self._attentive = True  # a gradient of this step needs more than to be marked ready
        self._opaque = ""  # type of an output in which no tensor was found, where the step needs them
        self._watched = True  # an output was found at which a backward can begin
        self.stranger: Callable[[Sequence[int]], str] | None = None
        self._lost = ""  # the error of a parameter without its hook, to be raised behind each step from now on
        self._elsewhere: weakref.ref[validation.Owner] | None = None  # what averaged gradients that came here
        self.hooks = ParameterHooks(self, self._parameters, StepCycle.on_gradient)
        self._backward_hooks = BackwardHooks(self, StepCycle._backward_begins, StepCycle.end_backward)
        self.set_communicator(maker.communicator)
        self.begin_step()
        self.ordered = self.step

    # Between steps

    def set_communicator(self, communicator: Communicator) -> None:
        """Switches to `communicator`. `give_up` must follow."""
        self._communicator = communicator
        self.waits_in_backward = all(map(communicator.waits_in_backward, set(self._devices)))
        self.failures = Failures()

    def begin_step(self) -> None:
        """Begins with no gradient ready, in the pipeline's buckets. Parameters that were found unused will get none."""
        pipeline, buckets = self._pipeline, self._pipeline.buckets
        fires = self._fires if self.static_graph else None
        self.step = Step(buckets.sizes, buckets.bucket_of, self._names, fires=fires, unused=self.unused_now)
        self._attentive = bool(
            self.static_graph
            or self._find_unused
            or self._several_devices
            or pipeline.observers
            or buckets.streams.unrecorded
        )

    def give_up(self) -> None:
        """Forgets a step that was abandoned. New buckets must follow.

        Raises:
            FusedReduceError: the reducer is closed.
        """
        self.refuse_closed()
        self.state = IDLE
        self.unused_now = ()
        self._forward_ns = MISSING_NS
        self.failures.clear_failure()
        self._counted = [0] * len(self._parameters)
        self._fires = None

    @property
    def takes_gradients(self) -> bool:
        """Whether gradients that come now are averaged, or accumulate on purpose (no_sync)."""
        return self.state in (ARMED, LAUNCHED) or (self.state is IDLE and self.local_backward_expected)

    def refuse_closed(self) -> None:
        """Raises FusedReduceError if the reducer is closed."""
        if self.state is CLOSED:
            raise FusedReduceError("this reducer is closed: build another one to reduce gradients again")

    def check_finalized(self) -> None:
        """Checks that the last synchronised backward was reduced to its end. A launched step is completed first.

        Raises:
            FusedReduceError: a backward has begun but not every bucket has been reduced (names the missing parameters),
                or it failed; the reducer is closed, or its group is lost; or a CUDA graph is being captured.
            CollectiveError, NonFiniteGradientError: as `complete_outside`.
        """
        communicator = self._communicator
        refuse_capture(self._device, communicator.rank)
        if self.state is LAUNCHED:
            self.complete_outside()
        self.refuse_closed()
        if self.state is LOST or communicator.lost:
            raise lost_error(communicator, communicator.lost)
        # A backward whose queued callback never ran has raised, maybe before any parameter's hook was called.
        step = self.step
        broken = step.callbacks > 0 and not in_backward()
        if self.state is FAILED or (self.state is ARMED and (step.begun or broken)):
            missing = self._missing()
            if self.state is ARMED and self._communicator.size > 1:
                self.hooks.check_accumulators(missing, self._names)
            text = unfinished_text(
                missing,
                self._names,
                communicator.rank,
                find_unused=self._find_unused,
                static_graph=self.static_graph,
                failure=self.failures.text,
                debug_hint=os.environ.get("TORCH_DISTRIBUTED_DEBUG", "OFF").upper() == "OFF",
            )
            raise FusedReduceError(text)

    # A step

    def begin_forward(self) -> None:
        """Called before a forward; raises as `check_finalized`, or where a parameter has another dtype or device."""
        with self.lock:
            self.check_finalized()
            self.check_parameters()
            self._pipeline.times.forward_start = time.time_ns()
            self._forward_ns = time.perf_counter_ns()

    def check_parameters(self) -> None:
        """Checks before and after a forward that parameters still have our hooks, as far as that is quickly seen.

        Raises:
            FusedReduceError: names one that was converted, moved or replaced.
        """
        self.hooks.check_nodes(self._names)
        if self.state is ARMED and not (self._watched or self.step.begun):  # whether there was a backward was not seen
            error = self._lost_hook()
            if error is not None:
                raise error

    def in_forward(self) -> bool:
        """Whether `begin_forward` was called since a step was last armed, ended, failed or given up."""
        return self._forward_ns != MISSING_NS and self.state is IDLE and not self._communicator.lost

    def disarm(self, outputs: object) -> None:
        """Called after a forward whose backward is not reduced (no_sync); `outputs` as for `arm`."""
        self.local_backward_expected = True
        self._forward_ns = MISSING_NS
        self._observed.units.arm()
        self.state = IDLE
        self.watch_local_forward(outputs)

    def watch_local_forward(self, outputs: object) -> None:
        """Has a backward from `outputs` that is not reduced keep its gradients apart from delayed averages."""
        mode = self._pipeline.mode
        if mode.delays and not self._backward_hooks.watch_also(
            tensors_in(outputs, self._most_outputs()), _hold_gradients
        ):
            mode.hold_gradients()

    def arm(self, outputs: object, divisor: float | None) -> None:
        """Called after a forward, when the last step is finished and the buckets are those of the plan.

        Args:
            outputs: what it returned, or NOT_GIVEN.
            divisor: this rank's own; None: the ranks that were counted, or the configured one.

        Raises:
            ValueError: static_graph without `outputs` in the first step.
        """
        pipeline = self._pipeline
        forward_ns, self._forward_ns = self._forward_ns, MISSING_NS
        self.local_backward_expected = False
        self._observed.units.arm()
        self._observed.begin_forward(pipeline.buckets.reductions)
        if outputs is NOT_GIVEN and self.counting():
            raise ValueError("static_graph=True needs the forward's outputs: call prepare_for_backward(outputs)")
        decides = self.counting() or (self._find_unused and not self.static_graph and outputs is not NOT_GIVEN)
        tensors = tensors_in(outputs, None if decides else self._most_outputs())
        self._opaque = "" if tensors or not decides else type(outputs).__name__
        self.unused_now = tuple(self._unused(tensors)) if self.static_graph or self._find_unused else ()
        self._watched = self._backward_hooks.watch(tensors)
        if not self._watched:
            pipeline.mode.hold_gradients()
        recorded = self._recording.begin_step()
        profiled = self._plans.profiles() or recorded
        pipeline.arm(profiled=profiled, watch=self.waits_in_backward, forward_ns=forward_ns, divisor=divisor)
        self.begin_step()
        self.state = ARMED
        pipeline.times.backward_start = time.time_ns()

    def step_without_inputs(self) -> None:
        """See `Reducer.step_without_inputs`."""
        pipeline = self._pipeline
        with self.lock, no_autograd():
            own = self.step
            with pipeline.own_set_aside():
                self._plans.note_order()
                pipeline.arm(profiled=False, watch=False, forward_ns=MISSING_NS)
                self.begin_step()
                try:
                    self.step.make_all_ready()
                    pipeline.launch(self.step)
                    pipeline.end_statistics(pipeline.finish_step(self.step, shared=True))
                except BaseException as error:
                    self.fail(error)
                    raise
                finally:
                    self.step = own
            self._observed.check()

    def on_gradient(self, index: int) -> None:
        """Called by a parameter's hook, on an autograd thread, when its gradient has been accumulated.

        Args:
            index: number of the parameter.
        """
        if self.state is not ARMED:
            if self.state is not LAUNCHED:  # else it has changed what is in flight: `finish_step` raises
                self._local_gradient(index)
            return
        step = self.step
        if self._attentive or self._observed.units.attached or step.ready[index]:
            self._attend(index)
        elif step.mark_ready(index, time.perf_counter_ns()):
            with self.lock:
                if self.state is ARMED and self.step is step:  # else another thread has called reset() or close()
                    try:  # as `_noting_failures`, without the 2 us of a context manager
                        self._advance()
                    except BaseException as error:
                        self._note_failure(error)
                        raise

    def end_first_static_step(self) -> None:
        """Ends a static graph's first step. A wrapper calls it; without one the hook on the outputs does."""
        with self.lock:
            if self.state is ARMED and self.counting() and self.step.begun:
                self.end_backward(self.step)

    def end_backward(self, step: Step) -> None:
        """Called when a backward of `step` has ended: ends the step, unless gradients are still to come."""
        pipeline = self._pipeline
        with self._noting_failures():
            if self.state is not ARMED or self.step is not step:
                return
            if not step.begun:
                error = self._lost_hook()
                if error is None:
                    return
                if not step.begin_without_gradients():
                    raise error
                self._lost = str(error)  # peers may have gradients: it is raised behind the collectives
            if self.static_graph and self.counting():
                self._note_lost(self._missing())
                self._fires = list(self._counted)
                step.make_all_ready()
            elif not step.all_ready():
                return
            pipeline.times.backward_end = time.time_ns()
            for one in pipeline.observers:
                one.backward_ended()
            pipeline.launch(step)
            if not (self.waits_in_backward and not self.manual) and pipeline.mode.together:
                self.state = LAUNCHED
            elif pipeline.maker.hook is not None and in_backward():
                # Behind what comm hooks have queued: torch's mixed precision joins its stream there.
                self.state = LAUNCHED
                torch.autograd.Variable._execution_engine.queue_callback(self.complete)
            else:
                self._finish(step)

    def complete_outside(self) -> None:
        """Completes a launched step before its gradients are used; raises where only `finalize_backward` may."""
        if self.state is LAUNCHED and self.manual:
            raise FusedReduceError(unfinalized_text(self._communicator.rank))
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
        refuse_capture(self._device, self._communicator.rank)
        if in_backward() and not self.waits_in_backward:
            raise FusedReduceError(
                f"rank {self._communicator.rank}: gradients that are still in flight are needed within another "
                "backward, where nothing may wait for a peer. Call finalize() after each backward()"
            )
        with self._noting_failures():
            if self.state is LAUNCHED:
                self._finish(self.step)

    def launch_late(self) -> None:
        """See `Reducer.launch_late`."""
        with self._noting_failures():
            if self.state is LAUNCHED:
                self._pipeline.launch_late()

    def fail(self, error: BaseException) -> None:
        """Makes the reducer FAILED: `reset` is needed."""
        self.state = FAILED
        self.failures.note(error, self._communicator)
        if self.on_error is not None:
            self.on_error(str(error))

    # Within

    def _backward_begins(self) -> None:
        """Called when a backward has reached an output of forward: queues the callback that ends the step."""
        if self.state is not ARMED:
            return
        refuse_capture(self._device, self._communicator.rank)
        refuse_compiled_autograd(self._communicator.rank)
        with self.lock:
            if self.state is not ARMED:
                return
            self._pipeline.mode.hold_gradients()
            step = self.step
            if step.from_outputs and step.task == torch._C._current_graph_task_id():
                return  # another output of the same backward
            # Another root of a partial backward; else a new backward, which has made no gradient yet.
            again = step.from_outputs and (step.begun or step.callbacks > 0)
            step.from_outputs = True
            if self._observed.units.attached:
                self._observed.units.note_backward(first_output=not (again or step.begun))
            if not again:
                step.began_ns = time.perf_counter_ns()
                for one in self._pipeline.observers:
                    one.backward_began()
            self._observed.additions += 1  # in case this backward raises
            self._backward_hooks.queue_end(step)

    @contextmanager
    def _noting_failures(self) -> Iterator[None]:
        """Context that holds the lock and notes what a hook, kernel or collective of a step raises."""
        with self.lock:
            try:
                yield
            except BaseException as error:
                self._note_failure(error)
                raise

    def _note_failure(self, error: BaseException) -> None:
        if self.state in (ARMED, LAUNCHED):
            self.fail(error)

    def _attend(self, index: int) -> None:
        """`on_gradient` where more is to be done than to mark a gradient ready, or threads run beside each other."""
        with self.lock:
            if self.state is not ARMED:
                return  # another device's thread has raised, and maybe reset() was called
            now_ns = time.perf_counter_ns()
            step, pipeline = self.step, self._pipeline
            buckets = pipeline.buckets
            try:
                self._observed.units.note_backward()
                if index in buckets.streams.unrecorded:
                    buckets.streams.record(index, self._devices[index])
                if self.static_graph or self._find_unused:
                    if self._opaque:
                        raise FusedReduceError(self._opaque_text())
                    if self._parameters[index].grad is not None:
                        pipeline.used.mark(index)
                    if self.counting():
                        self._counted[index] += 1
                        step.count(index)
                        return
                may_launch = step.mark_ready(index, now_ns)
                if pipeline.observers:
                    self._show_ready(index, now_ns)
                if may_launch:
                    self._advance()
            except BaseException as error:
                self._note_failure(error)  # still under the lock: no other thread may launch the bucket behind this one
                raise
            for one in pipeline.observers:
                one.leave()

    def _advance(self) -> None:
        """Launches what may be launched now, and ends the step where nothing else does, when a bucket is ready."""
        step = self.step
        if self._pipeline.overlaps and not step.pending[step.next_bucket]:
            self._pipeline.launch(step)
        if step.callbacks == 0 and step.all_ready():
            if in_backward():
                self._backward_hooks.queue_end(step)
            else:
                self.end_backward(step)

    def counting(self) -> bool:
        """Whether this is a static graph's first step: gradients are counted, and none is final before its end."""
        return self.static_graph and self._fires is None

    def _show_ready(self, index: int, now_ns: int) -> None:
        """Shows the observers what has become ready with the gradient that came at `now_ns`."""
        step, bucket_of = self.step, self._pipeline.buckets.bucket_of
        ready = [index] if step.ready[index] else []
        if step.order and step.order == ready:
            ready = [*sorted(step.skipped), *ready]
        for one in self._pipeline.observers:
            one.enter(now_ns)
            for number in ready:
                one.gradient_ready(number)
            for bucket in {bucket_of[number] for number in ready}:
                if step.pending[bucket] == 0:
                    one.bucket_ready(bucket)

    def _finish(self, step: Step) -> None:
        """Ends a step whose buckets are all launched."""
        pipeline = self._pipeline
        ended = pipeline.finish_step(step, shared=self.shares_parameters)
        pipeline.late.ended(ended)
        self._forward_ns = MISSING_NS
        self.steps += 1
        self.forwards.append(step.armed_ns)
        self.buckets_reduced = step.launched
        if step.order:
            self.ordered = step
        self.last_unused = tuple(sorted(step.skipped))
        if self._plans.wants_order:
            self._plans.note_order(self.ordered.ready_order())
        pipeline.end_step(ended)
        pipeline.mode.restore_gradients()
        self.state = IDLE
        if in_backward():
            # After the callbacks of other reducers: if one raises, the engine runs no later ones.
            torch.autograd.Variable._execution_engine.queue_callback(self._check_ended)
        else:
            self._check_ended()

    def _check_ended(self) -> None:
        """Raises what a step has found that has reduced all the same."""
        if self._lost:
            raise FusedReduceError(self._lost)
        self._observed.check()

    def _local_gradient(self, index: int) -> None:
        """Notes a gradient that is not reduced now: with no_sync the next step will, after a step nothing does."""
        if self._find_unused and self._parameters[index].grad is not None:
            self._pipeline.used.mark(index)
        if self.state is not IDLE:
            return
        self._observed.added_here()
        if not self.steps or self.takes_gradients or self._warned_of_second:
            return
        if self._is_averaged_elsewhere(index):
            return
        self._warned_of_second = True
        warnings.warn(
            f"rank {self._communicator.rank}: {self._names[index]} got a gradient after this step's gradients had "
            "been averaged (a second backward through the same forward, or several forwards before one backward): "
            "it was added on this rank only, so ranks now differ, unless something else averages it. Call forward "
            "before each backward, or use no_sync() to accumulate",
            stacklevel=2,
        )

    def _unused(self, outputs: Sequence[torch.Tensor]) -> list[int]:
        """Numbers of the parameters that a backward from `outputs` gives no gradient."""
        if self.static_graph:
            return [index for index, one in enumerate(self._fires or ()) if one == 0]
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

    def _opaque_text(self) -> str:
        option = "static_graph" if self.static_graph else "find_unused_parameters"
        return (
            f"rank {self._communicator.rank}: {option}=True needs the tensors that forward has returned, and found "
            f"none in its output of type {self._opaque}: which parameters are used is not known. Return a tensor, or "
            "a list, tuple, dict or dataclass that holds them (with a Reducer: give them to prepare_for_backward), or "
            f"leave {option}=True out, if every step uses every parameter"
        )

    def _missing(self) -> list[int]:
        """Numbers of the parameters whose gradients have not come in the step that is armed."""
        counting = self.counting()
        return [index for index in self.step.missing() if not (counting and self._counted[index])]

    def _lost_hook(self) -> FusedReduceError | None:
        """Looks, where a backward has given no parameter a gradient, whether the model has those that were hooked.

        That is no fault by itself: a gradient penalty does so in every step. So it looks at two parameters only.

        Returns:
            The error, which names a parameter that is another one now; None: there is none, or this is the only rank,
            where nothing is left out.
        """
        if self._communicator.size == 1:
            return None
        trained = [index for index in self._missing() if self._parameters[index].requires_grad]
        looked_at = [trained[0], trained[-1]] if trained else []
        try:
            known = self.hooks.check_accumulators(looked_at, self._names)
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
        if self._communicator.size > 1:
            try:
                self.hooks.check_accumulators(numbers, self._names)
            except FusedReduceError as error:
                self._lost = str(error)

    def _most_outputs(self) -> int:
        """How many values of an output are looked at where it only says at which tensors a backward may begin."""
        return sys.maxsize if self._pipeline.mode.delays else _LOOKED_AT

    def _is_averaged_elsewhere(self, index: int) -> bool:
        """Whether another reducer takes this gradient; asked for each gradient of a wrapper that another replaces."""
        known = None if self._elsewhere is None else self._elsewhere()
        if known is None or not known.takes_gradients:
            known = validation.averaged_elsewhere(self, self._parameters[index])
            self._elsewhere = None if known is None else weakref.ref(known)
        return known is not None


def _hold_gradients(cycle: StepCycle) -> None:
    cycle._pipeline.mode.hold_gradients()
