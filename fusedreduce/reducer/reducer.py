"""Reducer: averages gradients during backward, bucket by bucket: what its users call. It knows nothing of DDP.

    reducer = Reducer(model.parameters(), communicator, ReduceConfig(wire="bf16"))
    for batch in data:
        loss = model(batch)
        reducer.prepare_for_backward(loss)       # arms the hooks
        loss.backward()                          # every .grad is the mean over all ranks when this returns
        optimizer.step()

engine.py has the steps: when one begins, which gradients are ready, what is launched when, and how it ends. Here is
what its ranks agree on, and how it changes between two steps: other plans, wires, modes, ranks; reset; the end.

The first step uses one bucket per dtype and device. Then rank 0's order of readiness is broadcast, and every rank cuts
it into buckets by the same pure function. With find_unused_parameters (and no static graph) no order is learned:
buckets of limited size, in reverse order of registration, from the start.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
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
from ..buckets.deferred_errors import in_backward
from ..buckets.draws import Draws
from ..buckets.feedback import Feedback
from ..buckets.loss_scale import LossScale
from ..buckets.parameters import Parameters
from ..buckets.phases import Phases
from ..buckets.sparse_kinds import SparseKinds
from ..buckets.stats.grad_stats import GradStats
from ..buckets.wire_table import WireTable, warn_of_small_shards
from ..comm.group import Group
from ..comm.protocol import Communicator
from ..config import FlushReport, ReduceConfig, SyncMode, checked
from ..errors import FusedReduceError
from ..planning.bucketing import BucketCaps
from ..planning.plan import Plan
from ..planning.plan_file import plan_hash
from ..trace.recorder import Source
from ..wires import wire_dtype
from . import failures, optimizer_hooks, validation
from .engine import Engine
from .modes.mode import DelayedAverages
from .plans import LEARNING, SHOWN, Forecast, Plans
from .recording import record
from .state import ARMED, CLOSED, LAUNCHED, LOST, ReducerState
from .step import StepTimes, unfinalized_text
from .unused_parameters import NOT_GIVEN, UsedMap
from .wire_choice import WireChoice, WireTimes
from .wire_schedule import ParameterWire, WireSchedule

_logger = logging.getLogger(__name__)


class Reducer:
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
        engine: the steps, for wrappers.

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
        lazy_bucket_allocation: bool = False,
        exclusive: bool = True,
        agreed: bool | None = None,
    ) -> None:
        validation.check_communicator(communicator)
        self.parameters = tuple(parameters)
        count = len(self.parameters)
        self.config = checked(config, "config")
        self.names = tuple(names) if names is not None else tuple(f"parameter {index}" for index in range(count))
        self.sparse = tuple(sparse) if sparse is not None else (False,) * count
        validation.check_parameters(self.parameters, self.names, self.sparse)
        described = (self.names, self.parameters, self.sparse)
        tables = WireTable.of_each(self.config, *described)
        table = next(iter(tables.values()))
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.has_views = self.config.has_views(gradient_as_bucket_view)
        self.config.check_beside(
            self.has_views and "gradient_as_bucket_view",
            skip_unused_buckets and "skip_unused_buckets or skip_all_reduce_unused_params",
            wires=table.wires,
            sparse=[name for name, one in zip(self.names, self.sparse, strict=True) if one],
        )
        if communicator.rank == 0:
            for one in tables.values():
                one.log(self.config, *described)
        self.caps = caps or BucketCaps()
        own, self._group = Parameters(self.parameters, self.names, self.sparse), Group(communicator)
        self._device = own.device
        self.wires = WireSchedule(table, self.config, own, self._group)
        self.find_unused_parameters = find_unused_parameters
        self.skip_unused_buckets = skip_unused_buckets
        self._plans = Plans(
            own,
            self.wires.table,
            self.config,
            self.caps,
            self._group,
            learns=static_graph or not find_unused_parameters,
        )
        given, schedule = self.config, self.wires  # not `self`, which would live as long as what holds it
        self.choice = (
            WireChoice(
                given,
                tables,
                lambda wire: WireTable.of(given, *described, wire=wire),
                self._plans,
                own,
                self._group,
                waits=lambda: schedule.at_16_bits,
                searches=find_unused_parameters and not static_graph,
            )
            if self.config.allowed
            else None
        )
        self._agreed = agreed is not None
        self._opened = False  # wires are known to the backend, and the mode has its communicator
        self._sync = True
        self.steps_in_backward = False  # the optimizer does, or the comm hook writes gradients itself
        self.observed = GradStats(own, self.wires.table.wires, self.config, self._group)
        self.observed.alike = agreed is not False
        maker = BucketMaker(
            parameters=own,
            wires=self.wires.table,
            config=self.config,
            views=self.has_views,
            group=self._group,
            sparse_kinds=SparseKinds(own, self._group) if any(own.sparse) else None,
            phases=Phases(self._group, own.device) if any(one.has_two_phases(3) for one in tables.values()) else None,
            draws=Draws(self.config.seed, count, self._group) if self.config.stochastic_rounding else None,
            feedback=Feedback(own, self.observed) if self.config.error_feedback else None,
            lazy=lazy_bucket_allocation,
        )
        self.engine = Engine(
            maker,
            self._plans,
            self.wires,
            self.observed,
            UsedMap(own, self._group, always=find_unused_parameters, static=static_graph),
            *(() if self.choice is None else (self.choice,)),
            skip_unused_buckets=skip_unused_buckets,
            exclusive=exclusive,
        )
        self.observed.before_reading = _weakly(self.engine)
        self._attend_optimizers()
        if communicator.rank == 0 and gradient_as_bucket_view and not self.has_views:
            gradient_bytes = sum(kind.size_bytes for kind in self._plans.kinds if not kind.alone)
            wire_bytes = int(self.engine.stats()["wire_bytes"])
            _logger.info(validation.no_views_text(self.config, wire_bytes, gradient_bytes))
        if communicator.rank == 0 and lazy_bucket_allocation and self.has_views:
            _logger.info(
                "lazy_bucket_allocation=True has no effect where gradients are views of their buckets, which therefore "
                "last as long as the gradients"
            )
        if self._agreed:
            self.engine.mode.open()

    @property
    def communicator(self) -> Communicator:
        """The ranks to average over."""
        return self._group.communicator

    @property
    def state(self) -> ReducerState:
        """Where the reducer is in its lifecycle."""
        return self.engine.state

    @property
    def steps(self) -> int:
        """Synchronised steps since the reducer was built."""
        return self.engine.steps

    @property
    def local_backward_expected(self) -> bool:
        """Whether the next backward is not reduced on purpose (no_sync)."""
        return self.engine.local_backward_expected

    @property
    def times(self) -> StepTimes:
        """Host times of the latest step."""
        return self.engine.times

    @property
    def late(self) -> DelayedAverages:
        """Which averages the gradients are."""
        return self.engine.late

    @property
    def static_graph(self) -> bool:
        """Whether every step uses the same parameters equally often."""
        return self.engine.used.static

    @property
    def has_comm_hook(self) -> bool:
        """Whether a comm hook reduces the buckets in place of our own wire."""
        return self.engine.maker.hook is not None

    @property
    def plan(self) -> Plan:
        """Parameter numbers by bucket, in launch order."""
        return self.engine.buckets.plan

    @property
    def rebuilt(self) -> bool:
        """Whether the buckets follow an order of readiness already."""
        return self._plans.rebuilt

    @property
    def last_order(self) -> tuple[int, ...]:
        """Parameter numbers in the order in which they became ready in the latest step that has reduced any."""
        return self.engine.ordered.ready_order()

    @property
    def last_unused(self) -> tuple[int, ...]:
        """Parameter numbers that the latest step has found unused."""
        return self.engine.last_unused

    # Agreed and learned

    def follow_ranks(self) -> bool:
        """Agrees with the other ranks where that is still to be done, and rebuilds the buckets where that is due.

        Returns:
            Whether the buckets were rebuilt.

        Raises:
            AgreementError, UnsupportedWireError, CollectiveError: as `agree` and `rebuild`.
        """
        if not self._opened:
            self.agree()
        due = self.wires.due or self._plans.due or (self.choice is not None and self.choice.due)
        return due and self.rebuild()

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
                "plan": f"{plan_hash(self._plans.recut(self.plan)):016x}",
                "plan learned": self.rebuilt,
                "steps before encoding": self.wires.state(),
                "wire chosen": "" if self.choice is None else self.choice.state(),
            }
            settings = validation.settings(self.config, self.caps, flags)
            wires = dict(zip(self.names, self.wires.agreed.wires, strict=True))
            problem = ""
            try:
                for table in self._tables():
                    validation.check_encoding(self.parameters, table.wires)
            except FusedReduceError as error:
                problem = str(error)
            alike = validation.agree(self.communicator, descriptions, settings, self._device, problem, wires)
            self.observed.alike = alike
            self._agreed = True
        self.engine.check_wires()
        if self.choice is not None:
            named = {wire for table in self._tables() for wire in table.wires}
            for dtype in sorted({dtype for wire in named if (dtype := wire_dtype(wire)) is not None}, key=str):
                self.communicator.check_wire(dtype, self._device)
        self.engine.mode.open()
        size, phases = self.communicator.size, self.engine.maker.phases
        # Groups of phases are made now for whatever steps may choose.
        later = self._tables() if self.choice is None or not self.choice.why else [self.choice.table]
        exchanged = sorted((one for one in later if one.has_two_phases(size)), key=lambda one: not one.encoded)
        table = next(iter(exchanged), self.wires.agreed)
        of_contributions = self.config.stochastic_rounding or self.config.error_feedback
        per_node = 1 if of_contributions else self.config.ranks_per_node
        if phases is not None and table.has_two_phases(self.communicator.size):
            if phases.open(table, per_node):
                self._build_buckets(self.plan)
            self.engine.follow_settings()
            if self.communicator.rank == 0 and table.encoded and phases.per_node == 1:
                encoded = frozenset(table[number] for number in table.encoded)
                warn_of_small_shards(encoded, self.communicator.size, self.caps.cap_bytes)
        self._opened = True

    def rebuild(self) -> bool:
        """Rebuilds the buckets if the ranks have agreed on another plan or wire. Both change only here, between steps.

        After the first step the plan follows rank 0's order of readiness, which one collective broadcasts. Later it is
        the one that the ranks have agreed on at the end of earlier steps.

        Returns:
            Whether the buckets were rebuilt.

        Raises:
            AgreementError: ranks have decided on different plans; on every rank.
            CollectiveError: a peer did not answer.
        """
        with self.engine.lock:
            before = self.engine.buckets.plan
            try:
                if self.choice is not None and self.choice.due:
                    self.choice.advance()
                changed = self._change_wires()
            except BaseException as error:  # peers have moved on
                self.engine.fail(error)
                raise
            plan, issued = self._plans.next(before) if self._plans.due else (before, 0)
            self.engine.issued += issued
            # Also where the order gives the same buckets, because streams are still those of a first step.
            new = changed or issued > 0 or plan != before
            if new:
                self._build_buckets(plan)
            else:
                self.engine.follow_settings()
            return new

    def set_bucket_size(self, size: int | BucketCaps) -> None:
        """Changes the size limits of the buckets. Every rank calls it at the same place, between two steps.

        The next `prepare_for_forward` or `prepare_for_backward` compares the limits across ranks, then builds the
        buckets anew: in the order of readiness that the first step has shown, if one was learned. Gradients stay as
        they are, also where they are views. With policy="planned" steps are then measured anew.

        Args:
            size: limit of every bucket in bytes of gradients, also of those that the planner cuts; or BucketCaps.

        Raises:
            TypeError, ValueError: not a number of bytes from 1; a given plan is in use; a comm hook is there, which may
                keep state per bucket.
            FusedReduceError: a step is armed or not finished; a trace is being recorded; or, with Asynchronous,
                averages are outstanding.
        """
        with self.engine.lock:
            self.engine.check_finalized()
            caps = BucketCaps.of(size)
            if self.state is ARMED:
                raise FusedReduceError(
                    "a step is armed, and would end in other buckets than it began in: call set_bucket_size() after "
                    "its backward, or after reset() on every rank"
                )
            self.config.check_beside(
                "set_bucket_size()", self.has_comm_hook and "a comm hook", self._plans.is_given and "plan="
            )
            if self._records_trace:
                raise FusedReduceError(
                    "a trace is being recorded, for one size of buckets: leave its record_trace() context, then call "
                    "set_bucket_size()"
                )
            mode = self.engine.mode
            if not mode.together and (pending := mode.pending()):
                raise FusedReduceError(f"{pending}: call flush() on every rank, then set_bucket_size()")
            self._plans.set_caps(caps)
            if self.choice is not None:
                self.choice.dropped()
            self.caps = caps
            self._agreed = self._opened = False

    # A step

    def prepare_for_forward(self) -> None:
        """Checks that the last step is finished, and rebuilds the buckets if the plan has changed.

        Optional in a plain loop: `prepare_for_backward` does the same, but before forward a rebuild takes less memory.

        Raises:
            FusedReduceError, AgreementError, CollectiveError: as `prepare_for_backward`.
        """
        with self.engine.lock:
            self.engine.begin_forward()
            if self._sync:
                self.follow_ranks()

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
        engine = self.engine
        if divisor is not None:
            divisor = self._checked_divisor(divisor)
        with engine.lock:
            engine.check_prepared()
            engine.check_parameters()  # forward may have converted them
            if not self._sync:
                engine.disarm(outputs)
                return
            self.follow_ranks()
            if engine.shares_parameters:
                engine.shares_parameters = validation.shared(engine, self.parameters)
                self.config.check_beside(engine.shares_parameters and "parameters of two wrappers")
            engine.arm(outputs, divisor)

    def finalize(self) -> None:
        """Ends the step: waits for the buckets in flight, if there are any, and writes the gradients.

        Raises:
            FusedReduceError: not every gradient has been reduced; or one was changed while it was in flight.
            CollectiveError: a peer died, left, or did not answer.
            NonFiniteGradientError: see ReduceConfig.check_finite.
        """
        self.engine.complete()
        self.engine.check_finalized()

    def launch_late(self) -> None:
        """The part of `finalize` that starts collectives: sums of sparse gradients whose kind no rank knew before, and
        later phases of buckets that are exchanged in several.

        Needed only where one thread drives all ranks: call it for each of them before `finalize` waits for one.

        Raises:
            AgreementError: ranks have gradients of several kinds; on every rank.
            CollectiveError: a peer died, left, or did not answer.
        """
        self.engine.launch_late()

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
        engine = self.engine
        with engine.lock:
            if engine.state is not ARMED or not engine.step.begin_without_gradients():
                raise FusedReduceError(
                    f"rank {self.communicator.rank}: end_without_backward() needs an armed step, "
                    "find_unused_parameters=True and outputs that depend on no parameter; here a gradient is expected, "
                    f"or no step is armed (the reducer is {self.state.value}). Call backward() instead"
                )
            with torch.no_grad():  # as a backward runs
                engine.end_backward(engine.step)

    def step_without_inputs(self) -> None:
        """Takes part in a step of the other ranks, for a rank that has run out of inputs (join): without gradients.

        Gradients, residuals, counts, times and statistics of this rank stay as its latest own step has left them.

        Raises:
            ValueError: a mode other than Synchronous.
            FusedReduceError: called within a backward or `no_sync`, where no step begins; or, as AgreementError and
                CollectiveError, as `prepare_for_backward` and `finalize`.
            NonFiniteGradientError: see ReduceConfig.check_finite.
        """
        with self.engine.lock:
            self.config.check_beside("join")
            if in_backward() or not self._sync:
                where = "a backward" if in_backward() else "no_sync()"
                raise FusedReduceError(
                    f"rank {self.communicator.rank}: step_without_inputs() within {where}, where the other ranks begin "
                    "no step: call it where a forward would begin one"
                )
            self.engine.check_finalized()
            self.engine.check_parameters()
            self.follow_ranks()
            self.engine.step_without_inputs()

    def check_finalized(self) -> None:
        """Checks that the last synchronised backward was reduced to its end. A launched step is completed first.

        Raises:
            FusedReduceError: a backward has begun but not every bucket has been reduced (names the missing parameters),
                or it failed; the reducer is closed, or its group is lost; or a CUDA graph is being captured.
            CollectiveError, NonFiniteGradientError: as `finalize`.
        """
        self.engine.check_finalized()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which forwards do not arm the hooks: gradients accumulate, and the next step reduces their sum."""
        before, self._sync = self._sync, False
        if self.engine.mode.stash is not None:
            self.engine.mode.stash.stash()  # a backward without prepare_for_backward may follow, unnoticed
        try:
            yield
        finally:
            self._sync = before
            if self.engine.mode.stash is not None:
                self.engine.mode.stash.end_local()

    def expect_local_backward(self) -> None:
        """Says that the next backward is not reduced on purpose (a wrapper's no_sync), so that nothing warns of it."""
        self.engine.local_backward_expected = True
        self.observed.units.new_forward()

    def begin_scaled(self, scale: LossScale) -> None:
        """Called when a backward of a scaled loss begins: unpack removes the scale from what this backward makes.

        Args:
            scale: the loss scale.

        Raises:
            FusedReduceError: see `LossScaleState`: scaled gradients would be added to unscaled ones.
        """
        with self.engine.lock:
            self.observed.units.begin_scaled(scale)

    def zero_grad(self) -> None:
        """Zeroes all gradients in place, with one operator per bucket where they are views of it.

        Raises:
            FusedReduceError, CollectiveError: as `finalize`, where a step is launched and not finished.
        """
        self.engine.complete_outside()
        reductions = self.engine.buckets.reductions
        groups = [one.members.parameters for one in reductions if not one.zero_views()]
        for parameter in itertools.chain(*groups) if reductions else self.parameters:  # closed: there are no buckets
            if parameter.grad is not None:
                parameter.grad.detach_().zero_()

    def note_clip(self, coefficient: Callable[[], torch.Tensor]) -> None:
        """Called when the reduced gradients are clipped: their residuals will be multiplied by `coefficient()` too."""
        if self.engine.maker.feedback is not None:
            self.engine.maker.feedback.clip(coefficient())

    # Steps that the caller ends

    def require_manual_finalization(self, required: bool) -> None:
        """Sets whether `finalize_backward` ends each synchronised step, and nothing else does, from the next one on.

        A backward then ends with its collectives in flight and local gradients (as views of a bucket: undefined ones).
        The next forward, optimizers, `zero_grad` and this package's norms, clipping and loss scalers then raise. No
        optimizer takes a closure. Where steps choose among wires every rank calls it, at the same place.

        Args:
            required: whether the caller ends each step.

        Raises:
            FusedReduceError: a backward is expected or not finalized, or the reducer cannot be used.
            ValueError: the sync mode is not Synchronous.
        """
        with self.engine.lock:
            if required == self.engine.manual:
                return
            if self.state is not LAUNCHED:
                self.engine.check_finalized()
            if self.state in (ARMED, LAUNCHED):
                raise FusedReduceError(
                    "set_manual_finalization_required cannot be called after forward while a backward pass is "
                    "expected or in progress. Call it before forward or after backward finalization."
                )
            self.config.check_beside(required and "manual backward finalization")
            # Steps that choose need the groups of phases of all their wires.
            self.engine.manual, self._opened = required, self._opened and self.choice is None
            if self.choice is not None:
                self.choice.end_by_hand(required)
            self._attend_optimizers()

    @property
    def should_finalize_after_backward(self) -> bool:
        """Whether `finalize_backward` is not possible within the backward of the step that is armed.

        It is not in the first step, in steps that are profiled (to plan by, or for a trace), with
        find_unused_parameters, and where ranks share an autograd thread.
        """
        engine = self.engine
        first = self._plans.state in (LEARNING, SHOWN) or engine.used.counting or self.find_unused_parameters
        return engine.manual and (first or engine.armed.profile is not None or not engine.waits_in_backward)

    def finalize_backward(self) -> None:
        """Ends the step, once, where `require_manual_finalization` is set: waits for it and writes the gradients.

        Call it when every gradient is ready: after backward, or within it unless `should_finalize_after_backward`.

        Raises:
            FusedReduceError: it is not required; gradients are missing; nothing is to be finalized; or it was called
                within a backward where it cannot be.
            CollectiveError, NonFiniteGradientError: as `finalize`.
        """
        engine = self.engine
        with engine.lock:
            if not engine.manual:
                raise FusedReduceError(
                    "finalize_backward() called but manual backward finalization is not required. Set "
                    "require_manual_backward_finalization to true first."
                )
            if engine.state is ARMED and engine.step.begun:
                if engine.used.counting or not engine.step.all_ready():
                    raise FusedReduceError(
                        "finalize_backward() called before all DDP buckets were ready. next_bucket_="
                        f"{engine.step.next_bucket} buckets_.size()={len(self.plan)}. Call finalize_backward() only "
                        "after all DDP-managed parameters have computed gradients."
                    )
                if self.should_finalize_after_backward:
                    raise FusedReduceError(
                        f"rank {self.communicator.rank}: this step cannot be finalized within its backward: call "
                        "finalize_backward() after backward() where should_finalize_after_backward is true"
                    )
                engine.end_backward(engine.step)
            elif engine.state is not LAUNCHED:
                engine.check_finalized()
                raise FusedReduceError(
                    "finalize_backward() called but no gradient reduction requires finalization. This can happen if "
                    "no_sync() is active or finalize_backward() was already called for this backward pass."
                )
            engine.complete()

    # Steps that end later than with their own backward

    def set_sync_mode(self, mode: SyncMode) -> None:
        """Switches to another sync mode, from the next step on. Every rank calls it at the same place, after `flush`.

        Args:
            mode: Synchronous(), BoundedStaleness(k) or Asynchronous(); see ReduceConfig.

        Raises:
            ValueError: not a mode, or an option in use excludes it.
            FusedReduceError: steps are in flight, or one is armed or not finished.
        """
        with self.engine.lock:
            self.check_finalized()
            if self.state is ARMED:
                raise FusedReduceError(
                    "a step is armed, and would end in another mode than it began in: call set_sync_mode() after its "
                    "backward, or after reset() on every rank"
                )
            config = dataclasses.replace(self.config, sync_mode=mode)
            config.check_beside(
                self.has_views and "gradient_as_bucket_view",
                self.skip_unused_buckets and "skip_unused_buckets or skip_all_reduce_unused_params",
                self.has_comm_hook and "a comm hook",
                self.steps_in_backward and "an optimizer in backward",
                self._records_trace and "record_trace()",
                self.engine.manual and "manual backward finalization",
                wires=self._tables()[0].wires,  # of several the first, where steps do not choose
                sparse=[name for name, one in zip(self.names, self.sparse, strict=True) if one],
            )
            if pending := self.pending():
                raise FusedReduceError(f"{pending}: call flush() on every rank, then set_sync_mode()")
            if self.choice is not None:
                self.choice.follow(config)
                self._build_buckets(self._plans.recut(self.plan) if self._change_wires() else self.plan)
            self.config = config
            self._agreed = self._opened = False
            self._plans.follow(config=config)
            self.engine.set_mode(config)
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
        mode = self.engine.mode
        scaled = bool(self.observed.units.attached)
        step = optimizer_hooks.flush_step(optimizers, step, scaled=scaled, both=not mode.together)
        with self.engine.lock:
            self._check_agreed()
            return mode.flush(self.engine, step, optimizers, buffers)

    def pending(self) -> str:
        """What `flush` would apply, in words; empty: nothing is outstanding."""
        return self.engine.mode.pending()

    def state_dict(self, *, gather: bool = True) -> dict[str, Any]:
        """The steps in flight, for a checkpoint. Waits for them.

        In the asynchronous mode, and with error feedback, every rank calls it at the same place.

        Args:
            gather: with every rank's residuals, by a collective; False: with this rank's alone, which do not load.

        Returns:
            Plain tensors by parameter name, and numbers. In the synchronous mode empty, but with several wires the
            chosen one, to begin with; with `wire_after`, stochastic rounding or error feedback the number of steps, and
            the residuals of every rank. It loads on any
            number of ranks: the residuals of rank r are added to those of rank r mod that number. With bounded
            staleness the same on every rank. In the asynchronous mode this rank's outstanding correction: call flush()
            first if only one rank saves.

        Raises:
            FusedReduceError: a step is not finished.
            CollectiveError: a peer died, left, or did not answer.
        """
        with self.engine.lock:
            self._check_agreed()
            try:
                state, maker = self.engine.mode.state_dict(self.engine), self.engine.maker
                if gather and maker.feedback is not None:
                    state["residuals"] = maker.feedback.gathered(state["residuals"], self.communicator)
                return state if self.choice is None else {**state, "wire": self.choice.held}
            except BaseException as error:
                self.engine.fail(error)
                raise

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the steps in flight of a checkpoint, whatever the plan was then.

        Args:
            state: what `state_dict` returned.

        Raises:
            ValueError: `state` is damaged, or of another model, number of ranks or mode.
            FusedReduceError: steps are in flight here, or one is not finished.
        """
        with self.engine.lock:
            self._check_agreed()
            if pending := self.pending():
                raise FusedReduceError(f"{pending}: call flush(), or reset(), before load_state_dict()")
            try:
                state = dict(state or {})
                held = state.pop("wire", None)
                if state:  # that of the synchronous mode holds nothing
                    self.engine.mode.load_state_dict(self.engine, state)
                    if self.wires.in_use:
                        self.wires.restart(self.engine.rounds)
                        self._agreed = self._opened = False  # whether each rank has loaded the same
                if held is not None and self.choice is not None:
                    self.choice.new_group(held)
                    self._agreed = self._opened = False
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
        with self.engine.lock:
            self.check_finalized()
            maker = self.engine.maker
            if self.has_comm_hook:
                raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
            self.config.check_beside("a comm hook")
            self.engine.maker = dataclasses.replace(maker, hook=(state, hook))
            self._plans.follow(hooked=True)
            self._build_buckets(self.plan)

    def leave_gradients_to_hook(self) -> None:
        """Copies nothing out of the comm hook's buckets: the hook writes `.grad` itself, or steps the optimizer.

        Raises:
            ValueError: the sync mode is not Synchronous.
            FusedReduceError: the last step is not finished, or has failed; or the reducer is closed.
        """
        self.check_finalized()
        self.config.check_beside("an optimizer in backward")
        self.steps_in_backward = True
        self.engine.maker = dataclasses.replace(self.engine.maker, keeps_gradients=True)
        self._build_buckets(self.plan)

    def allow_other_dtypes(self) -> None:
        """Allows parameters to change their dtype during a step, as torch's mixed precision has them."""
        self.engine.hooks.allow_other_dtypes()

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
        self.engine.refuse_closed()
        self.config.check_beside("record_trace()")
        source: Source = "reducer" if self.engine.exclusive else "wrapper"
        return record(self.engine, self._plans, source, folder, limit)

    # Reports

    def get_backward_stats(self) -> list[int]:
        """When each gradient was ready in the latest step.

        Returns:
            Per parameter, ns on the host clock from the end of forward. For times of every step see `bucket_times`.
        """
        return self.engine.ordered.ready_times()

    def bucket_times(self) -> list[tuple[int, int]]:
        """When each bucket of the latest step was ready and when it was launched.

        Returns:
            Per bucket (ready, launched), ns on the host clock since backward began.
        """
        return self.engine.step.bucket_times()

    def plan_json(self) -> str:
        """The plan in use, as JSON for a checkpoint or a file: `ReduceConfig(plan=...)` then keeps to it."""
        return self._plans.json(self.plan)

    def forecast(self) -> Forecast | None:
        """What the planner's model predicts of a step with the plan in use; None where nothing was measured (yet)."""
        return self._plans.forecast(self.plan)

    def stats(self) -> dict[str, int | str]:
        """Counters of this rank since the reducer was built.

        Returns:
            steps (synchronised backwards), buckets, buckets_reduced (in the latest step), collectives (since the
            communicator was set), wire_bytes (payload of one step, padding included; without sparse and hooked buckets;
            with encoded wires in two levels the fp32 elements that are added up within a node, of which fewer bytes
            cross nodes, see docs/wires.md), padding_bytes (of those), wire_allocations, restrided (gradients that were
            copied because their strides were not their parameter's), plans (changes of plan that the ranks have agreed
            on since the communicator was set), path (triton, interpreter, torch, none), state. In other sync modes also
            steps_under_way and steps_given_up, or the counters of contributions. With error feedback also
            residuals_dropped (of parameters, and of parts of them in a shard), for which the host waits. With several
            wires also wire, the chosen one, and wire_stage: see `wire_times`.
        """
        feedback = self.engine.maker.feedback
        return {
            "steps": self.steps,
            "buckets_reduced": self.engine.buckets_reduced,
            "plans": self._plans.scheduler.changes,
            "state": self.state.value,
            **self.engine.stats(),
            **({} if feedback is None else {"residuals_dropped": feedback.residuals_dropped()}),
            **({} if self.choice is None else {"wire": self.choice.held, "wire_stage": self.choice.stage.value}),
        }

    def bucket_bytes(self) -> list[int]:
        """Bytes of the gradients in each bucket, in launch order; padding not included."""
        return [sum(self._plans.kinds[index].size_bytes for index in members) for members in self.plan]

    def wire_report(self) -> dict[str, ParameterWire]:
        """By parameter's name what its gradient travels on, and how much its encoding has lost when last measured.

        Measured with ReduceConfig(least_sqnr_db=...) only; the same on every rank. A change takes effect with the next
        step.
        """
        with self.engine.lock:
            return self.wires.report()

    def wire_times(self) -> WireTimes | None:
        """Which of several wires is used, and what steps took on those that were tried; None: one wire was given.

        The same on every rank. A change takes effect with the next step.
        """
        with self.engine.lock:
            return None if self.choice is None else self.choice.times()

    # Failures, changes, the end

    def reset(self) -> None:
        """Abandons a step that failed or was not finished. Every rank calls it, within the group's timeout.

        Ranks compare, without a collective, how many collectives each has issued, and go on with the largest number of
        steps that one of them has ended. Gradients stay as they are (those that are views of a buffer become None):
        zero them.

        Raises:
            FusedReduceError: a collective failed, ranks have issued different numbers of them, or a rank did not call
                this in time; on every rank that did. The group cannot be used any more: call `set_communicator`.
        """
        with self.engine.lock:
            phases = self.engine.maker.phases
            issued = self.engine.issued + (0 if phases is None else phases.issued_together)
            chosen = "" if self.choice is None else self.choice.state()
            plan_state = f"{plan_hash(self.plan):016x} {self.rebuilt} {self.wires.state()} {chosen}"
            self.engine.refuse_closed()
            self.engine.resets += 1
            try:
                same, rounds = failures.compare(
                    self.communicator, self._device, self.engine.resets, issued, self.engine.rounds, plan_state
                )
            except FusedReduceError:
                # Not the rest of `give_up_step`, in which the host may wait for collectives that peers never issue.
                self.engine.give_up()
                self.engine.mode.drop_steps()
                for reduction in self.engine.buckets.reductions:
                    reduction.drop_views()
                self.engine.state = LOST
                raise
            self.give_up_step()
            self.engine.rounds = rounds  # a rank that has raised alone has not ended the step that its peers have
            if not same:
                self.wires.restart()
                if self.choice is not None:
                    self.choice.new_group()
                self._change_wires()
                # Some ranks had adopted the next plan, or an order of readiness, when others failed.
                self._build_buckets(self._plans.return_to_first())

    def give_up_step(self) -> None:
        """The part of `reset` without the other ranks, for callers that go on with `set_communicator`.

        Raises:
            FusedReduceError: the reducer is closed.
        """
        with self.engine.lock:
            self.engine.give_up()
            self._agreed = self._opened = False
            self.engine.drop_step()
            self._change_wires()
            # New wire buffers: a collective that is still in flight may write into the old ones.
            self._build_buckets(self._plans.recut(self.plan))

    def set_communicator(self, communicator: Communicator) -> None:
        """Switches to another group of ranks, which agree on settings, learn a plan and count steps anew.

        A step that is not finished is given up, and so are steps in flight.

        Args:
            communicator: the new ranks; the next synchronised step is the first one for all of them.

        Raises:
            FusedReduceError: the reducer is closed.
        """
        with self.engine.lock:
            self.engine.refuse_closed()
            self._group.communicator = communicator
            self.engine.new_group()
            self._attend_optimizers()
            self.give_up_step()
            self._build_buckets(self._plans.return_to_first())

    def set_static_graph(self) -> None:
        """Declares the graph static, as static_graph=True does. Call it before the first backward.

        Raises:
            RuntimeError: a backward has been reduced, or one is armed.
            FusedReduceError: the reducer is closed.
        """
        self.engine.refuse_closed()
        if self.static_graph:
            return
        if self.steps or self.state in (ARMED, LAUNCHED):
            raise RuntimeError(
                "set_static_graph() should be called before training loop starts and after DistributedDataParallel is "
                "constructed."
            )
        self.engine.used.static = True
        if self.choice is not None:
            self.choice.set_static_graph()
        self._plans.follow(learns=True)
        self._build_buckets(self._plans.first())

    def close(self) -> None:
        """Removes the hooks and releases the wire buffers. May be called twice.

        Gradients that are views keep their buffer alive. A step in flight is given up, with a warning.
        """
        with self.engine.lock:
            gives_up = self.state is LAUNCHED and self.engine.advises
            self.engine.state = CLOSED
            optimizer_hooks.leave(self)
            self.remove_hooks()
            self.engine.release_buckets()
            validation.leave(self.engine, self.parameters)
        if gives_up:
            warnings.warn(
                f"rank {self.communicator.rank}: close() gives up a step that is in flight, and its gradients are no "
                "averages: call finalize() after the backward, then close()",
                stacklevel=2,
            )

    def remove_hooks(self) -> None:
        """Removes the hooks from the parameters: nothing is reduced any more."""
        self.engine.hooks.remove()

    # Within

    def __enter__(self) -> Reducer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_agreed(self) -> None:
        """Checks that the last step is finished, and where ranks are in different steps that they agree on settings."""
        self.engine.complete_outside()
        self.check_finalized()
        if not self.engine.mode.together:
            self.agree()

    @property
    def _records_trace(self) -> bool:
        return self.engine.recording is not None and self.engine.recording.wants_step()

    def _checked_divisor(self, divisor: float) -> float:
        if isinstance(divisor, bool) or not isinstance(divisor, int | float) or not 0 < divisor < math.inf:
            raise ValueError(f"divisor must be a positive number or None, got {divisor!r}")
        self.config.check_beside("divisor=", self.has_comm_hook and "a comm hook")
        return float(divisor)

    def before_optimizer_step(self, *, closure: bool) -> None:
        """Called before an optimizer of these parameters steps, where gradients may be in flight or averages delayed.

        Args:
            closure: step() was given a closure.

        Raises:
            FusedReduceError: a closure, where ranks share an autograd thread or finalization is manual; the step waits
                for `finalize_backward`; or as `finalize`.
        """
        if self.engine.manual:
            # (A comm hook may step the optimizer while its bucket is launched.)
            if self.engine.step.begun and self.engine.state is ARMED and not self.has_comm_hook:
                raise FusedReduceError(unfinalized_text(self.communicator.rank))
            self.engine.complete_outside()
            if closure:
                raise FusedReduceError(
                    "step(closure) with manual finalization: the optimizer would read this rank's own gradients where "
                    "the closure does not end its step. Call backward(), finalize_backward() and step() without a "
                    "closure, or turn manual finalization off"
                )
        elif not self.engine.waits_in_backward:
            if closure:
                raise FusedReduceError(
                    "step(closure): the closure's backward ends before its gradients are reduced, as ranks share an "
                    "autograd thread here, and the optimizer would read this rank's own. Call reducer.backward(loss), "
                    "and step() without a closure; or have a thread per rank, on CPU"
                )
            self.engine.complete_outside()
        if self.engine.mode.stash is not None:
            self.engine.mode.stash.stepped = True

    def _attend_optimizers(self) -> None:
        if self.engine.waits_in_backward and not self.engine.manual and self.engine.mode.stash is None:
            optimizer_hooks.leave(self)
        else:
            optimizer_hooks.enter(self)

    def _change_wires(self) -> bool:
        """Takes the wires of the next step; returns whether they are other ones, for which buckets must be built."""
        choice, before = self.choice, self.wires.table
        chosen = choice is not None and choice.table != self.wires.agreed
        if choice is not None and chosen:
            self.wires.follow(choice.table)
        changed = self.wires.due and self.wires.advance()
        if choice is not None and chosen:
            self._plans.take(self.wires.table, choice.plan)
        elif changed:
            self._plans.set_wires(self.wires.table)
        if self.wires.table != before:
            self.engine.set_wires(self.wires.table)
            self.observed.wires = self.wires.table.wires
            if self.engine.recording is not None:
                self.engine.recording.follow_wires()
        return self.wires.table != before

    def _tables(self) -> Sequence[WireTable]:
        """All that parameters may travel on."""
        return [self.wires.agreed] if self.choice is None else [*self.choice.tables.values()]

    def _build_buckets(self, plan: Plan) -> None:
        """Builds the buckets of `plan`, between two steps."""
        self._opened = False
        self.engine.build_buckets(plan)


def _weakly(engine: Engine) -> Callable[[], None]:
    """Returns what completes a launched step before its gradients are read; it does not keep the reducer alive."""
    alive = weakref.ref(engine)

    def complete() -> None:
        owner = alive()
        if owner is not None:
            owner.complete_outside()

    return complete
