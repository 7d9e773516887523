"""Reducer: averages gradients during backward, bucket by bucket: what its users call.

It knows nothing of DistributedDataParallel.

    reducer = Reducer(model.parameters(), communicator, ReduceConfig(wire="bf16"))
    for batch in data:
        loss = model(batch)
        reducer.prepare_for_backward(loss)       # arms the hooks
        loss.backward()                          # every .grad is the mean over all ranks when this returns
        optimizer.step()

step_cycle.py has the steps: when one begins, which gradients are ready, when it ends; pipeline.py issues the
collectives.

The first step uses one bucket per dtype and device. Then rank 0's order of readiness is broadcast, and every rank cuts
it into buckets by the same pure function. With find_unused_parameters (and no static graph) no order is learned:
buckets of limited size, in reverse order of registration, from the start.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from ..buckets.bucket_set import BucketMaker
from ..buckets.comm_hook import CommHook
from ..buckets.loss_scale import LossScale
from ..buckets.sparse_kinds import SparseKinds
from ..buckets.stats.grad_stats import GradStats
from ..comm.protocol import Communicator
from ..config import FlushReport, ReduceConfig, SyncMode
from ..errors import FusedReduceError
from ..planning.bucketing import BucketCaps
from ..planning.plan import Plan
from ..planning.plan_file import plan_hash
from . import optimizer_hooks, validation
from .join import JoinShadows
from .modes import asynchronous
from .modes.mode import FlushRequest
from .pipeline import Pipeline
from .plans import Forecast, Plans
from .recording import Recording
from .step_cycle import ReducerState, StepCycle
from .unused_parameters import UsedMap


class Reducer:
    """Averages the gradients of some parameters over a group of ranks, during backward.

    Args:
        parameters: leaves that require a gradient, on devices of one type: fp32, fp16, bf16, fp64 or complex.
        communicator: the ranks to average over.
        config: see ReduceConfig; None: the defaults.
        names: names of the parameters, for messages; None: "parameter 0", ...
        sparse: per parameter whether its gradient is a sparse COO tensor; None: none is.
        caps: size limits of the buckets after the first step, in bytes; None: torch's.
        find_unused_parameters: search the graph of the outputs for parameters that get no gradient.
        static_graph: every step uses the same parameters equally often; allows reentrant checkpoints that share them.
        gradient_as_bucket_view: gradients become views of the wire, and `zero_grad` keeps them. With a 16-bit wire they
            cannot: a warning says how many bytes that takes.
        skip_unused_buckets: do not reduce a bucket whose parameters are all unused; every rank must then have the
            same unused parameters.
        exclusive: refuse parameters that another exclusive reducer already reduces. (Wrappers may be nested.)
        agreed: None: the ranks compare model and settings in the first `prepare_for_backward`. Else they have done so
            already, and this says whether their statistics are bitwise equal (see GradStats).

    Attributes:
        observed: statistics of the gradients and the loss-scale state.
        cycle: the steps, for wrappers.
        pipeline: the buckets, for wrappers.
        times: host times of the latest step.
        late: which averages the gradients are.
        shadows: takes part for a rank without inputs (join).

    Raises:
        ValueError, TypeError: bad input; nothing has been hooked. Differences across ranks are raised by the first
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
        agreed: bool | None = None,
    ) -> None:
        self.parameters = tuple(parameters)
        count = len(self.parameters)
        self.config = config or ReduceConfig()
        self.names = tuple(names) if names is not None else tuple(f"parameter {index}" for index in range(count))
        self.sparse = tuple(sparse) if sparse is not None else (False,) * count
        validation.check_parameters(self.parameters, self.names, self.sparse)
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.has_views = self.config.has_views(gradient_as_bucket_view)
        validation.check_mode(
            self.config.sync_mode,
            {
                "gradient_as_bucket_view": self.has_views,
                "skip_unused_buckets (skip_all_reduce_unused_params)": skip_unused_buckets,
            },
        )
        asynchronous.check(self.config, self.names, self.sparse)
        self.caps = caps or BucketCaps()
        self.communicator = communicator
        self.find_unused_parameters = find_unused_parameters
        self.skip_unused_buckets = skip_unused_buckets
        self._plans = Plans(
            self.parameters,
            self.names,
            self.sparse,
            self.config,
            self.caps,
            communicator,
            learns=static_graph or not find_unused_parameters,
        )
        self._agreed = agreed is not None
        self._opened = False  # wires are known to the backend, and the mode has its communicator
        self._sync = True
        self.steps_in_backward = False  # the optimizer does, or the comm hook writes gradients itself
        self.observed = GradStats(self.parameters, self.names, self.config, communicator)
        self.observed.alike = agreed is not False
        self._device = self.parameters[0].device
        numbers = [number for number, one in enumerate(self.sparse) if one]
        maker = BucketMaker(
            parameters=self.parameters,
            names=self.names,
            sparse=self.sparse,
            config=self.config,
            as_views=self.has_views,
            communicator=communicator,
            sparse_kinds=SparseKinds(numbers, self.names, self._device, communicator),
        )
        self._recording = Recording(self._plans, "reducer" if exclusive else "wrapper")
        self.pipeline = Pipeline(
            maker,
            self._plans,
            self.observed,
            self._recording,
            UsedMap(count, self._device, communicator, always=find_unused_parameters, first=static_graph),
            skip_unused_buckets=skip_unused_buckets,
        )
        self.cycle = StepCycle(
            self.pipeline,
            self._plans,
            self.observed,
            self._recording,
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            exclusive=exclusive,
        )
        self.times = self.pipeline.times
        self.late = self.pipeline.late
        self.shadows = JoinShadows(self.pipeline, self._plans, self.observed)
        self.observed.before_reading = _weakly(self.cycle)
        self._attend_optimizers()
        if gradient_as_bucket_view and not self.has_views:
            self._warn_of_no_views()
        if self._agreed:
            self.pipeline.mode.open()

    @property
    def state(self) -> ReducerState:
        """See ReducerState."""
        return self.cycle.state

    @property
    def steps(self) -> int:
        """Synchronised steps since the reducer was built."""
        return self.cycle.steps

    @property
    def local_backward_expected(self) -> bool:
        """Whether the next backward is not reduced on purpose (no_sync)."""
        return self.cycle.local_backward_expected

    @property
    def last_order(self) -> tuple[int, ...]:
        """Parameter numbers in the order in which they became ready in the latest step that has reduced any."""
        return self.cycle.last_order

    @property
    def last_unused(self) -> tuple[int, ...]:
        """Parameter numbers that the latest step has found unused."""
        return self.cycle.last_unused

    @property
    def static_graph(self) -> bool:
        """Whether every step uses the same parameters equally often."""
        return self.cycle.static_graph

    # Lifecycle of a step

    def prepare_for_forward(self) -> None:
        """Checks that the last step is finished, and rebuilds the buckets if the plan has changed.

        Optional in a plain loop: `prepare_for_backward` does the same, but before forward a rebuild takes less memory.

        Raises:
            FusedReduceError, AgreementError, CollectiveError: as `prepare_for_backward`.
        """
        with self.cycle.lock:
            self.cycle.begin_forward()
            if self._sync:
                self.agree()
                self.rebuild()

    def prepare_for_backward(self, outputs: object = None, *, divisor: float | None = None) -> None:
        """Arms the hooks: the next backward is reduced. Call it after each forward; under `no_sync` it arms nothing.

        Args:
            outputs: what the forward returned, or the loss: tensors in any pytree. Needed for static_graph, for
                find_unused_parameters, and to distinguish a reentrant checkpoint from the backward around it.
            divisor: what this rank's gradients are divided by in this step; None: the number of ranks, or 1 with
                ReduceConfig(op="sum"). Ranks may give different ones. Example: rank i has n_i of N samples, and its
                loss is their mean: N / n_i on each rank gives the mean over all N samples.
                With find_unused_parameters and gradient_as_bucket_view every rank gives one in a step, or none does:
                with one, a kept gradient that no rank has used stays as it is; without, it is averaged.

        Raises:
            ValueError: the divisor is not a positive number, or comes with a comm hook, which divides by itself, or
                with Asynchronous; or static_graph=True without `outputs` in the first step.
            FusedReduceError: the last step is not finished (names the missing parameters) or has failed; a parameter
                has changed its dtype or device; or a CUDA graph is being captured, which cannot contain steps.
            AgreementError: ranks have different models or settings (first call only), or have decided on different
                plans; on every rank.
            UnsupportedWireError: the backend cannot sum the wire's dtype; on every rank.
            CollectiveError: a peer did not answer.
        """
        cycle = self.cycle
        if divisor is not None:
            divisor = self._checked_divisor(divisor)
        with cycle.lock:
            if not cycle.in_forward():  # else `prepare_for_forward` has done so
                cycle.check_finalized()
                cycle.hooks.check_nodes(self.names)
            if not self._sync:
                cycle.disarm(outputs)
                return
            self.agree()
            self.rebuild()
            if cycle.shares_parameters:
                cycle.shares_parameters = validation.shared(cycle, self.parameters)
                validation.check_mode(self.config.sync_mode, {"parameters of two wrappers": cycle.shares_parameters})
            cycle.arm(outputs, divisor)

    def finalize(self) -> None:
        """Ends the step: waits for the buckets in flight, if there are any, and writes the gradients.

        Raises:
            FusedReduceError: not every gradient has been reduced; or one was changed while it was in flight.
            CollectiveError: a peer died, left, or did not answer.
            NonFiniteGradientError: see ReduceConfig.check_finite.
        """
        self.cycle.complete_outside()
        self.cycle.check_finalized()

    def launch_late(self) -> None:
        """The part of `finalize` that starts collectives: sums of sparse gradients whose kind no rank knew before.

        Needed only where one thread drives all ranks: call it for each of them before `finalize` waits for one.

        Raises:
            AgreementError: ranks have gradients of several kinds; on every rank.
            CollectiveError: a peer died, left, or did not answer.
        """
        self.cycle.launch_late()

    def backward(self, loss: torch.Tensor) -> None:
        """Runs `loss.backward()` and `finalize`: the step is complete when this returns.

        Args:
            loss: where the backward begins.

        Raises:
            FusedReduceError, CollectiveError, NonFiniteGradientError: as `finalize`.
        """
        loss.backward()
        self.finalize()

    def end_without_backward(self) -> None:
        """Takes part in the armed step without gradients of this rank, whose outputs depend on no parameter.

        Raises:
            FusedReduceError: no step is armed, its backward has begun, or a gradient is expected on this rank.
        """
        self.cycle.end_without_backward()

    def check_finalized(self) -> None:
        """Checks that the last synchronised backward was reduced to its end. A launched step is completed first.

        Raises:
            FusedReduceError: a backward has begun but not every bucket has been reduced (names the missing parameters),
                or it failed; the reducer is closed, or its group is lost; or a CUDA graph is being captured.
            CollectiveError, NonFiniteGradientError: as `finalize`.
        """
        self.cycle.check_finalized()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which forwards do not arm the hooks: gradients accumulate, and the next step reduces their sum."""
        before, self._sync = self._sync, False
        self.pipeline.mode.hold_gradients()  # a backward without prepare_for_backward may follow, unnoticed
        try:
            yield
        finally:
            self._sync = before
            self.pipeline.mode.restore_gradients(local=True)

    def expect_local_backward(self) -> None:
        """Says that the next backward is not reduced on purpose (a wrapper's no_sync), so that nothing warns of it."""
        self.cycle.local_backward_expected = True
        self.observed.units.new_forward()

    def begin_scaled(self, scale: LossScale) -> None:
        """Called when a backward of a scaled loss begins: unpack removes the scale from what this backward makes.

        Args:
            scale: the loss scale.

        Raises:
            FusedReduceError: see `LossScaleState`: scaled gradients would be added to unscaled ones.
        """
        with self.cycle.lock:
            self.observed.units.begin_scaled(scale)

    # Steps that end later than with their own backward

    def set_sync_mode(self, mode: SyncMode) -> None:
        """Switches to another sync mode, from the next step on. Every rank calls it at the same place, after `flush`.

        Args:
            mode: Synchronous(), BoundedStaleness(k) or Asynchronous(); see ReduceConfig.

        Raises:
            ValueError: not a mode, or an option in use excludes it.
            FusedReduceError: steps are in flight, or one is not finished.
        """
        with self.cycle.lock:
            self.check_finalized()
            config = dataclasses.replace(self.config, sync_mode=mode)
            asynchronous.check(config, self.names, self.sparse)
            present = {
                "gradient_as_bucket_view": self.has_views,
                "skip_unused_buckets (skip_all_reduce_unused_params)": self.skip_unused_buckets,
                "a comm hook": self.has_comm_hook,
                "an optimizer in backward": self.steps_in_backward,
                "a trace that is being recorded": self._recording.wants_step(),
            }
            validation.check_mode(mode, present)
            if pending := self.pending():
                raise FusedReduceError(f"{pending}: call flush() on every rank, then set_sync_mode()")
            self.config = config
            self._agreed = self._opened = False
            self._plans.set_mode(mode)
            self.pipeline.set_mode(config, local=self.cycle.local_backward_expected)
            self._attend_optimizers()

    def flush(
        self,
        *optimizers: Optimizer,
        step: Callable[[], None] | None = None,
        buffers: Sequence[torch.Tensor] = (),
    ) -> FlushReport:
        """Applies the averages of every step in flight, in order. Every rank calls it at the same place.

        The averages are added to what `.grad` holds, unless an optimizer of torch.optim has already stepped with that.
        (With another optimizer zero it first.)

        In the asynchronous mode all averages are applied at once, and this rank's outstanding correction is added to
        `.grad`; then parameters, and the states that `optimizers` keep of them, become the same on all ranks (see
        modes/average_parameters.py). `optimizers` and `step` go together there: `step` is called in place of the
        optimizers' own.

        Args:
            optimizers: each steps after each applied step, and its gradients are then set to None.
            step: called after each applied step in place of them, to clip, step, update a scaler, and zero gradients.
                With neither, `.grad` holds the sum of the averages that were in flight.
            buffers: module buffers, which become rank 0's (Asynchronous only).

        Returns:
            How many steps were applied, and how far parameters were apart.

        Raises:
            FusedReduceError: gradients of backwards under no_sync() are still to be reduced, or a step is not finished.
            ValueError: optimizers beside `step`, or with a loss scaler, which must decide on each of their steps.
            TypeError: one of `optimizers` is not a torch.optim.Optimizer.
            CollectiveError: a peer died, left, or did not answer.
        """
        mode = self.pipeline.mode
        scaled = bool(self.observed.units.attached)
        step = optimizer_hooks.flush_step(optimizers, step, scaled=scaled, both=not mode.together)
        with self.cycle.lock:
            self._check_agreed()
            return mode.flush(self.pipeline, FlushRequest(step, optimizers, buffers, self.cycle.fail))

    def pending(self) -> str:
        """What `flush` would apply, in words; empty: nothing is outstanding."""
        return self.pipeline.mode.pending()

    def state_dict(self) -> dict[str, Any]:
        """The steps in flight, for a checkpoint. Waits for them.

        In the asynchronous mode every rank calls it at the same place.

        Returns:
            Plain tensors by parameter name, and numbers. Empty in the synchronous mode. With bounded staleness the same
            on every rank. In the asynchronous mode this rank's outstanding correction: call flush() first if only one
            rank saves.

        Raises:
            FusedReduceError: a step is not finished.
            CollectiveError: a peer died, left, or did not answer.
        """
        with self.cycle.lock:
            self._check_agreed()
            try:
                return self.pipeline.mode.state_dict(self.pipeline)
            except BaseException as error:
                self.cycle.fail(error)
                raise

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the steps in flight of a checkpoint, whatever the plan was then.

        Args:
            state: what `state_dict` returned.

        Raises:
            ValueError: `state` is damaged, or of another model, number of ranks or mode.
            FusedReduceError: steps are in flight here, or one is not finished.
        """
        with self.cycle.lock:
            self._check_agreed()
            if pending := self.pending():
                raise FusedReduceError(f"{pending}: call flush(), or reset(), before load_state_dict()")
            try:
                if state:  # that of the synchronous mode holds nothing
                    self.pipeline.mode.load_state_dict(self.pipeline, state)
            except (AttributeError, KeyError, TypeError) as error:
                raise ValueError(f"a damaged state of steps in flight: {type(error).__name__}: {error}") from error

    # Failures, changes, the end

    def reset(self) -> None:
        """Abandons a step that failed or was not finished. Every rank calls it, within the group's timeout.

        Ranks compare, without a collective, how many collectives each has issued. Gradients stay as they are (those
        that are views of a buffer become None): zero them.

        Raises:
            FusedReduceError: a collective failed, ranks have issued different numbers of them, or a rank did not call
                this in time; on every rank that did. The group cannot be used any more: call `set_communicator`.
        """
        with self.cycle.lock:
            issued, plan_state = self.pipeline.issued, f"{plan_hash(self.plan):016x} {self.rebuilt}"
            self.give_up_step()
            try:
                same = self.cycle.failures.compare(self.communicator, self._device, issued, plan_state)
            except FusedReduceError:
                self.cycle.state = ReducerState.LOST
                raise
            if not same:
                # Some ranks had adopted the next plan, or an order of readiness, when others failed.
                self._plans.return_to_first()
                self._build_buckets(self._plans.first())

    def give_up_step(self) -> None:
        """The part of `reset` without the other ranks, for callers that go on with `set_communicator`.

        Raises:
            FusedReduceError: the reducer is closed.
        """
        with self.cycle.lock:
            self.cycle.give_up()
            self._agreed = self._opened = False
            self._plans.restart()
            self.pipeline.drop_step()
            # New wire buffers: a collective that is still in flight may write into the old ones.
            self._build_buckets(self.plan)

    def set_communicator(self, communicator: Communicator) -> None:
        """Switches to another group of ranks, which agree on settings and learn a plan anew.

        A step that is not finished is abandoned, and so are steps in flight.

        Args:
            communicator: the new ranks; the next synchronised step is the first one for all of them.

        Raises:
            FusedReduceError: the reducer is closed.
        """
        with self.cycle.lock:
            self.communicator = communicator
            self.pipeline.set_communicator(communicator)
            self.cycle.follow_communicator()
            self._attend_optimizers()
            self.cycle.failures.restart_count()
            self._plans.set_communicator(communicator)
            self.observed.set_communicator(communicator)
            self.give_up_step()
            self._build_buckets(self._plans.first())

    def set_static_graph(self) -> None:
        """Declares the graph static, as static_graph=True does. Call it before the first backward.

        Raises:
            RuntimeError: a backward has been reduced, or one is armed.
        """
        if self.static_graph:
            return
        if self.steps or self.state in (ReducerState.ARMED, ReducerState.LAUNCHED):
            raise RuntimeError(
                "set_static_graph() should be called before training loop starts and after DistributedDataParallel is "
                "constructed."
            )
        self.cycle.static_graph = True
        self._plans.learn()
        self.pipeline.used.first = True
        self._build_buckets(self._plans.first())

    def close(self) -> None:
        """Removes the hooks and releases the wire buffers. May be called twice.

        Gradients that are views keep their buffer alive.
        """
        with self.cycle.lock:
            self.cycle.state = ReducerState.CLOSED
            optimizer_hooks.leave(self)
            self.remove_hooks()
            self.pipeline.release_buckets()
            validation.leave(self.cycle, self.parameters)

    def remove_hooks(self) -> None:
        """Removes the hooks from the parameters: nothing is reduced any more."""
        self.cycle.hooks.remove()

    def __enter__(self) -> Reducer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Comm hooks and views

    def register_comm_hook(self, state: object, hook: CommHook) -> None:
        """Reduces the buckets by `hook(state, bucket)` in place of our own wire.

        Args:
            state: the hook's first argument.
            hook: called with a GradBucket that is flat, dense, of one dtype, without padding and not divided; returns a
                future of one tensor with as many elements.

        Raises:
            RuntimeError: a hook is registered already.
            ValueError: the wire is not "native", op is not "mean", or the sync mode is not Synchronous: the hook would
                take their place.
        """
        with self.cycle.lock:
            self.cycle.complete_outside()
            maker = self.pipeline.maker
            if self.has_comm_hook:
                raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
            if self.config.wire != "native":
                raise ValueError(
                    f"wire={self.config.wire!r} and a comm hook exclude each other, because the hook decides what "
                    "travels: use wire='native', or no hook"
                )
            validation.check_mode(self.config.sync_mode, {"a comm hook": True})
            if self.config.op != "mean":
                raise ValueError(
                    f"op={self.config.op!r} and a comm hook exclude each other, because the hook divides or does not: "
                    "use op='mean', or no hook"
                )
            self.pipeline.maker = dataclasses.replace(maker, hook=(state, hook))
            self._plans.give_up_measuring()
            self._build_buckets(self.plan)

    @property
    def has_comm_hook(self) -> bool:
        """Whether a comm hook reduces the buckets in place of our own wire."""
        return self.pipeline.maker.hook is not None

    def leave_gradients_to_hook(self) -> None:
        """Copies nothing out of the comm hook's buckets: the hook writes `.grad` itself, or steps the optimizer.

        Raises:
            ValueError: the sync mode is not Synchronous.
        """
        validation.check_mode(self.config.sync_mode, {"an optimizer in backward": True})
        self.steps_in_backward = True
        self.pipeline.maker = dataclasses.replace(self.pipeline.maker, keeps_gradients=True)
        self._build_buckets(self.plan)

    def allow_other_dtypes(self) -> None:
        """Allows parameters to change their dtype during a step, as torch's mixed precision has them."""
        self.cycle.hooks.allow_other_dtypes()

    def zero_grad(self) -> None:
        """Zeroes all gradients in place, with one operator per bucket where they are views of it.

        Raises:
            FusedReduceError, CollectiveError: as `finalize`, where a step is launched and not finished.
        """
        self.cycle.complete_outside()
        for reduction in self.pipeline.buckets.reductions:
            if not reduction.zero_views():
                for parameter in reduction.members.parameters:
                    if parameter.grad is not None:
                        parameter.grad.detach_().zero_()

    # Agreed and learned

    def agree(self) -> None:
        """Compares model and settings across ranks, unless that was done since the last `reset`. A collective.

        Raises:
            AgreementError: they differ; on every rank.
            UnsupportedWireError: the backend cannot sum the wire's dtype; on every rank.
            CollectiveError: a peer did not answer.
        """
        if self._opened:
            return
        if not self._agreed:
            descriptions = [
                validation.describe(*one) for one in zip(self.parameters, self.names, self.sparse, strict=True)
            ]
            flags: dict[str, object] = {
                "find_unused_parameters": self.find_unused_parameters,
                "static_graph": self.static_graph,
                "gradient_as_bucket_view": self.gradient_as_bucket_view,
                "skip_unused_buckets": self.skip_unused_buckets,
                "plan": f"{plan_hash(self.plan):016x}",
                "plan learned": self.rebuilt,
            }
            settings = validation.settings(self.config, self.caps, flags)
            self.observed.alike = validation.agree(self.communicator, descriptions, settings, self._device)
            self._agreed = True
        self.pipeline.check_wires()
        self.pipeline.mode.open()
        self._opened = True

    def rebuild(self) -> bool:
        """Rebuilds the buckets if the ranks have agreed on another plan. A plan changes only here, between steps.

        After the first step the plan follows rank 0's order of readiness, which one collective broadcasts. Later it is
        the one that the ranks have agreed on at the end of earlier steps.

        Returns:
            Whether the buckets were rebuilt.

        Raises:
            AgreementError: ranks have decided on different plans; on every rank.
            CollectiveError: a peer did not answer.
        """
        with self.cycle.lock:
            before = self.pipeline.buckets.plan
            plan, issued = self._plans.next(before)
            self.pipeline.issued += issued
            # Also where the order gives the same buckets, because hooks and streams are still those of a first step.
            new = issued > 0 or plan is not before and plan != before
            if new:
                self._build_buckets(plan)
            return new

    def should_rebuild(self) -> bool:
        """Whether the plan still waits for an order of readiness, as before and right after the first step."""
        return self._plans.wants_order

    @property
    def rebuilt(self) -> bool:
        """Whether the buckets follow an order of readiness already."""
        return self._plans.rebuilt

    def get_backward_stats(self) -> list[int]:
        """When each gradient was ready in the latest step.

        Returns:
            Per parameter, ns on the host clock from the end of forward. For times of every step see `bucket_times`.
        """
        return self.cycle.backward_stats()

    def bucket_times(self) -> list[tuple[int, int]]:
        """When each bucket of the latest step was ready and when it was launched.

        Returns:
            Per bucket (ready, launched), ns on the host clock since backward began.
        """
        return self.cycle.step.bucket_times()

    def plan_json(self) -> str:
        """The plan in use, as JSON for a checkpoint or a file: `ReduceConfig(plan=...)` then keeps to it."""
        return self._plans.json(self.plan)

    def forecast(self) -> Forecast | None:
        """What the planner's model predicts of a step with the plan in use; None where nothing was measured (yet)."""
        return self._plans.forecast(self.plan)

    def record_trace(self, folder: str | Path, limit: int = 100) -> AbstractContextManager[None]:
        """Records every synchronised step within the context, for `fusedreduce trace` and `fusedreduce plan`.

        Args:
            folder: folder of this rank's file; the ranks may share it.
            limit: number of steps after which no more are kept.

        Returns:
            The context manager; it writes the file when it is left.

        Raises:
            FusedReduceError: a trace is being recorded already.
            ValueError: the sync mode is not Synchronous: steps do not end with their own backward.
        """
        validation.check_mode(self.config.sync_mode, {"a trace": True})
        return self._recording.record(folder, limit)

    def stats(self) -> dict[str, int | str]:
        """Counters of this rank since the reducer was built.

        Returns:
            steps (synchronised backwards), buckets, buckets_reduced (in the latest step), collectives (since the
            communicator was set), wire_bytes (payload of one step, padding included; without sparse and hooked
            buckets), padding_bytes (of those), wire_allocations, restrided (gradients that were copied because their
            strides were not their parameter's), plans (changes of plan that the ranks have agreed on since the
            communicator was set), path (triton, interpreter, torch, none), state. In other sync modes also
            steps_under_way and steps_given_up, or the counters of contributions.
        """
        return {
            "steps": self.steps,
            "buckets_reduced": self.cycle.buckets_reduced,
            "plans": self._plans.scheduler.changes,
            "state": self.state.value,
            **self.pipeline.stats(),
        }

    @property
    def plan(self) -> Plan:
        """Parameter numbers by bucket, in launch order."""
        return self.pipeline.plan

    def bucket_bytes(self) -> list[int]:
        """Bytes of the gradients in each bucket, in launch order; padding not included."""
        return [sum(self._plans.kinds[index].size_bytes for index in members) for members in self.plan]

    # Join: `shadows` takes part for a rank without inputs

    # Within

    def _attend_optimizers(self) -> None:
        if self.cycle.waits_in_backward and not self.pipeline.mode.delays:
            optimizer_hooks.leave(self)
        else:
            optimizer_hooks.enter(self)

    def before_optimizer_step(self, *, closure: bool) -> None:
        """Called before an optimizer of these parameters steps, where gradients may be in flight or averages delayed.

        Args:
            closure: step() was given a closure.

        Raises:
            FusedReduceError: a closure, where ranks share an autograd thread; or as `finalize`.
        """
        if not self.cycle.waits_in_backward:
            if closure:
                raise FusedReduceError(
                    "step(closure): the closure's backward ends before its gradients are reduced, as ranks share an "
                    "autograd thread here, and the optimizer would read this rank's own. Call reducer.backward(loss), "
                    "and step() without a closure; or have a thread per rank, on CPU"
                )
            self.cycle.complete_outside()
        self.pipeline.mode.optimizer_steps()

    def _check_agreed(self) -> None:
        """Checks that the last step is finished, and where ranks are in different steps that they agree on settings."""
        self.cycle.complete_outside()
        self.check_finalized()
        if not self.pipeline.mode.together:
            self.agree()

    def _checked_divisor(self, divisor: float) -> float:
        if isinstance(divisor, bool) or not isinstance(divisor, int | float) or not 0 < divisor < math.inf:
            raise ValueError(f"divisor must be a positive number or None, got {divisor!r}")
        if not self.pipeline.mode.together:
            raise ValueError(
                "divisor= and Asynchronous exclude each other, because a contribution holds several steps: leave it out"
            )
        if self.has_comm_hook:
            raise ValueError("divisor= and a comm hook exclude each other, because the hook divides: leave it out")
        return float(divisor)

    def _warn_of_no_views(self) -> None:
        wire_bytes = int(self.pipeline.stats()["wire_bytes"])
        dense = zip(self._plans.kinds, self.sparse, strict=True)
        gradient_bytes = sum(kind.size_bytes for kind, sparse in dense if not sparse)
        warnings.warn(
            f"gradient_as_bucket_view=True has no effect with wire={self.config.wire!r}: gradients can be views of "
            f"wire='native' only. Wire and gradients take {wire_bytes} bytes at the start of backward and "
            f"{wire_bytes + gradient_bytes} at its end; as views with wire='native' they would take {gradient_bytes} "
            "at both",
            stacklevel=3,
        )

    def _build_buckets(self, plan: Plan) -> None:
        """Builds the buckets of `plan`, between two steps."""
        self._opened = False
        self.pipeline.build_buckets(plan)
        self.cycle.begin_step()


def _weakly(cycle: StepCycle) -> Callable[[], None]:
    """Returns what completes a launched step before its gradients are read; it does not keep the reducer alive."""
    alive = weakref.ref(cycle)

    def complete() -> None:
        owner = alive()
        if owner is not None:
            owner.complete_outside()

    return complete
