"""Reducer: averages gradients during backward, bucket by bucket: what its users call. It knows nothing of DDP.

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
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from ..buckets.comm_hook import CommHook
from ..buckets.deferred_errors import in_backward
from ..buckets.loss_scale import LossScale
from ..config import FlushReport, SyncMode
from ..errors import FusedReduceError
from . import optimizer_hooks, validation
from .manual_finalization import ManualFinalization
from .modes import asynchronous
from .modes.mode import FlushRequest
from .state import ReducerState
from .unused_parameters import NOT_GIVEN


class Reducer(ManualFinalization):
    """Averages the gradients of some parameters over a group of ranks, during backward.

    Args:
        parameters: leaves that require a gradient, on devices of one type: fp32, fp16, bf16, fp64 or complex.
        communicator: the ranks to average over.
        config: see ReduceConfig; None: the defaults.
        names: names of the parameters, for messages; None: "parameter 0", ...
        sparse: per parameter whether its gradient is a sparse COO tensor; None: none is.
        caps: size limits of the buckets after the first step, in bytes; None: torch's, or where shards
            are exchanged those of `WireTable.default_caps`.
        find_unused_parameters: search the graph of the outputs for parameters that get no gradient.
        static_graph: every step uses the same parameters equally often; allows reentrant checkpoints that share them.
        gradient_as_bucket_view: gradients become views of the wire, and `zero_grad` keeps them. With a 16-bit wire they
            cannot: a log line says how many bytes that takes.
        skip_unused_buckets: do not reduce a bucket whose parameters are all unused; every rank must then have the
            same unused parameters.
        lazy_bucket_allocation: allocate each bucket's wire when it is packed and release it at the end of the step: the
            memory is free for activations, and each step allocates anew. No effect on gradients that are views of the
            wire (a log line says so), and in the asynchronous mode, whose wires are in flight between steps.
        exclusive: refuse parameters that another exclusive reducer already reduces. (Wrappers may be nested.)
        agreed: None: the ranks compare model and settings in the first `prepare_for_backward`. Else they have done so
            already, and this says whether their statistics are bitwise equal (see GradStats).

    Attributes:
        observed: statistics of the gradients and the loss-scale state.
        cycle: the steps, for wrappers.
        pipeline: the buckets, for wrappers.
        times: host times of the latest step.
        late: which averages the gradients are.

    Raises:
        ValueError, TypeError: bad input; nothing has been hooked. Differences across ranks are raised by the first
            `prepare_for_backward`, as AgreementError, on every rank.
    """

    @property
    def last_order(self) -> tuple[int, ...]:
        """Parameter numbers in the order in which they became ready in the latest step that has reduced any."""
        return self.cycle.ordered.ready_order()

    @property
    def last_unused(self) -> tuple[int, ...]:
        """Parameter numbers that the latest step has found unused."""
        return self.cycle.last_unused

    # A step

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

    def prepare_for_backward(self, outputs: object = NOT_GIVEN, *, divisor: float | None = None) -> None:
        """Arms the hooks: the next backward is reduced. Call it after each forward; under `no_sync` it arms nothing.

        Args:
            outputs: what the forward returned, or the loss: tensors in lists, tuples, dicts, dataclasses, their
                subclasses, and pytrees. For find_unused_parameters, and for the first step of static_graph, all are
                looked through, and where there is no tensor the backward raises FusedReduceError at its first gradient.
                Else the first 256 values are looked at, to distinguish a reentrant checkpoint from the backward around
                it. Left out: every parameter counts as used.
            divisor: what this rank's gradients are divided by in this step; None: the number of ranks, or 1 with
                ReduceConfig(op="sum"). Ranks may give different ones. Example: rank i has n_i of N samples, and its
                loss is their mean: N / n_i on each rank gives the mean over all N samples.
                With find_unused_parameters and gradient_as_bucket_view every rank gives one in a step, or none does:
                with one, a kept gradient that no rank has used stays as it is; without, it is averaged.

        Raises:
            ValueError: the divisor is not a positive number, or comes with a comm hook, which divides by itself, or
                with Asynchronous; or static_graph=True without `outputs` in the first step.
            FusedReduceError: the last step is not finished (names the missing parameters) or has failed; a parameter
                was converted, moved or replaced; or a CUDA graph is being captured, which cannot contain steps.
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
            cycle.check_parameters()  # forward may have converted them
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
        self.cycle.complete()
        self.cycle.check_finalized()

    def launch_late(self) -> None:
        """The part of `finalize` that starts collectives: sums of sparse gradients whose kind no rank knew before, and
        later phases of buckets that are exchanged in several.

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
        cycle = self.cycle
        with cycle.lock:
            if cycle.state is not ReducerState.ARMED or not cycle.step.begin_without_gradients():
                raise FusedReduceError(
                    f"rank {self.communicator.rank}: end_without_backward() needs an armed step, "
                    "find_unused_parameters=True and outputs that depend on no parameter; here a gradient is expected, "
                    f"or no step is armed (the reducer is {self.state.value}). Call backward() instead"
                )
            with torch.no_grad():  # as a backward runs
                cycle.end_backward(cycle.step)

    def step_without_inputs(self) -> None:
        """Takes part in a step of the other ranks, for a rank that has run out of inputs (join): without gradients.

        Gradients, residuals, counts, times and statistics of this rank stay as its latest own step has left them.

        Raises:
            ValueError: a mode other than Synchronous.
            FusedReduceError: called within a backward or `no_sync`, where no step begins; or, as AgreementError and
                CollectiveError, as `prepare_for_backward` and `finalize`.
            NonFiniteGradientError: see ReduceConfig.check_finite.
        """
        with self.cycle.lock:
            validation.check_mode(self.config.sync_mode, {"join": True})
            if in_backward() or not self._sync:
                where = "a backward" if in_backward() else "no_sync()"
                raise FusedReduceError(
                    f"rank {self.communicator.rank}: step_without_inputs() within {where}, where the other ranks begin "
                    "no step: call it where a forward would begin one"
                )
            self.cycle.check_finalized()
            self.cycle.check_parameters()
            self.agree()
            self.rebuild()
            self.cycle.step_without_inputs()

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

    def zero_grad(self) -> None:
        """Zeroes all gradients in place, with one operator per bucket where they are views of it.

        Raises:
            FusedReduceError, CollectiveError: as `finalize`, where a step is launched and not finished.
        """
        self.cycle.complete_outside()
        reductions = self.pipeline.buckets.reductions
        groups = [one.members.parameters for one in reductions if not one.zero_views()]
        for parameter in itertools.chain(*groups) if reductions else self.parameters:  # closed: there are no buckets
            if parameter.grad is not None:
                parameter.grad.detach_().zero_()

    def note_clip(self, coefficient: Callable[[], torch.Tensor]) -> None:
        """Called when the reduced gradients are clipped: their residuals will be multiplied by `coefficient()` too."""
        if self.pipeline.maker.feedback is not None:
            self.pipeline.maker.feedback.clip(coefficient())

    # Steps that end later than with their own backward

    def set_sync_mode(self, mode: SyncMode) -> None:
        """Switches to another sync mode, from the next step on. Every rank calls it at the same place, after `flush`.

        Args:
            mode: Synchronous(), BoundedStaleness(k) or Asynchronous(); see ReduceConfig.

        Raises:
            ValueError: not a mode, or an option in use excludes it.
            FusedReduceError: steps are in flight, or one is armed or not finished.
        """
        with self.cycle.lock:
            self.check_finalized()
            if self.state is ReducerState.ARMED:
                raise FusedReduceError(
                    "a step is armed, and would end in another mode than it began in: call set_sync_mode() after its "
                    "backward, or after reset() on every rank"
                )
            config = dataclasses.replace(self.config, sync_mode=mode)
            asynchronous.check(config, self.wires.agreed.wires, self.names, self.sparse)
            config.check_wires(self.wires.agreed.wires)
            present = {
                "gradient_as_bucket_view": self.has_views,
                "skip_unused_buckets (skip_all_reduce_unused_params)": self.skip_unused_buckets,
                "a comm hook": self.has_comm_hook,
                "an optimizer in backward": self.steps_in_backward,
                "a trace that is being recorded": self._recording.wants_step(),
                "manual backward finalization": self.cycle.manual,
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

    def state_dict(self, *, gather: bool = True) -> dict[str, Any]:
        """The steps in flight, for a checkpoint. Waits for them.

        In the asynchronous mode, and with error feedback, every rank calls it at the same place.

        Args:
            gather: with every rank's residuals, by a collective; False: with this rank's alone, which do not load.

        Returns:
            Plain tensors by parameter name, and numbers. In the synchronous mode empty, but with `wire_after`,
            stochastic rounding or error feedback the number of steps, and the residuals of every rank. It loads on any
            number of ranks: the residuals of rank r are added to those of rank r mod that number. With bounded
            staleness the same on every rank. In the asynchronous mode this rank's outstanding correction: call flush()
            first if only one rank saves.

        Raises:
            FusedReduceError: a step is not finished.
            CollectiveError: a peer died, left, or did not answer.
        """
        with self.cycle.lock:
            self._check_agreed()
            try:
                state, maker = self.pipeline.mode.state_dict(self.pipeline), self.pipeline.maker
                if gather and maker.feedback is not None:
                    state["residuals"] = maker.feedback.gathered(state["residuals"], maker.communicator)
                return state
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
                    if self.wires.counts:
                        self.wires.restart(self.pipeline.rounds)
                        self._agreed = self._opened = False  # whether each rank has loaded the same
            except (AttributeError, KeyError, TypeError) as error:
                raise ValueError(f"a damaged state of steps in flight: {type(error).__name__}: {error}") from error

    # Comm hooks

    def register_comm_hook(self, state: object, hook: CommHook) -> None:
        """Reduces the buckets by `hook(state, bucket)` in place of our own wire.

        Args:
            state: the hook's first argument.
            hook: called with a GradBucket that is flat, dense, of one dtype, without padding and not divided; returns a
                future of one tensor with as many elements.

        Raises:
            RuntimeError: a hook is registered already.
            FusedReduceError: the last step is not finished, or has failed; or the reducer is closed.
            ValueError: the wire is not "native", op is not "mean", or the sync mode is not Synchronous: the hook would
                take their place; or `state` is a FusedHookState whose wire is exchanged.
        """
        validation.check_comm_hook(state)
        with self.cycle.lock:
            self.check_finalized()
            maker = self.pipeline.maker
            if self.has_comm_hook:
                raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
            if self.config.wire != "native":
                raise ValueError(
                    f"wire={self.config.wire_text!r} and a comm hook exclude each other, because the hook decides what "
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

    def leave_gradients_to_hook(self) -> None:
        """Copies nothing out of the comm hook's buckets: the hook writes `.grad` itself, or steps the optimizer.

        Raises:
            ValueError: the sync mode is not Synchronous.
            FusedReduceError: the last step is not finished, or has failed; or the reducer is closed.
        """
        self.check_finalized()
        validation.check_mode(self.config.sync_mode, {"an optimizer in backward": True})
        self.steps_in_backward = True
        self.pipeline.maker = dataclasses.replace(self.pipeline.maker, keeps_gradients=True)
        self._build_buckets(self.plan)

    def allow_other_dtypes(self) -> None:
        """Allows parameters to change their dtype during a step, as torch's mixed precision has them."""
        self.cycle.hooks.allow_other_dtypes()

    def record_trace(self, folder: str | Path, limit: int = 100) -> AbstractContextManager[None]:
        """Records every synchronised step within the context, for `fusedreduce trace` and `fusedreduce plan`.

        Args:
            folder: folder of this rank's file; the ranks may share it.
            limit: number of steps after which no more are kept.

        Returns:
            The context manager; it writes the file when it is left, or before the forward behind the last step that is
            kept has ended, which then waits for the GPU.

        Raises:
            FusedReduceError: a trace is being recorded already, or the reducer is closed.
            ValueError: the sync mode is not Synchronous: steps do not end with their own backward.
        """
        self.cycle.refuse_closed()
        validation.check_mode(self.config.sync_mode, {"a trace": True})
        return self._recording.record(folder, limit)

    # Within

    def __enter__(self) -> Reducer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
