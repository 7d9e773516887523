"""ReducerBase: what a reducer is made of, what its ranks agree on, and how it changes: reset, other ranks, the end."""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence

import torch

from ..buckets.bucket_set import BucketMaker
from ..buckets.draws import Draws
from ..buckets.feedback import Feedback
from ..buckets.phases import Phases
from ..buckets.sparse_kinds import SparseKinds
from ..buckets.stats.grad_stats import GradStats
from ..buckets.wire_table import WireTable, warn_of_small_shards
from ..comm.protocol import Communicator
from ..config import ReduceConfig, checked
from ..errors import FusedReduceError
from ..planning.bucketing import BucketCaps
from ..planning.plan import Plan
from ..planning.plan_file import plan_hash
from . import optimizer_hooks, validation
from .modes import asynchronous
from .pipeline import Pipeline
from .plans import Plans
from .recording import Recording
from .state import ReducerState
from .step import unfinalized_text
from .step_cycle import StepCycle
from .unused_parameters import UsedMap
from .wire_schedule import WireSchedule

_logger = logging.getLogger(__name__)


class ReducerBase:
    """See `Reducer`."""

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
        table = WireTable.of(self.config, self.names, self.parameters, self.sparse)
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.has_views = self.config.has_views(gradient_as_bucket_view)
        validation.check_mode(
            self.config.sync_mode,
            {
                "gradient_as_bucket_view": self.has_views,
                "skip_unused_buckets (skip_all_reduce_unused_params)": skip_unused_buckets,
            },
        )
        asynchronous.check(self.config, table.wires, self.names, self.sparse)
        if communicator.rank == 0:
            table.log(self.config, self.names, self.parameters, self.sparse)
        self.caps = caps or BucketCaps()
        self.communicator = communicator
        self._device = self.parameters[0].device
        self.wires = WireSchedule(table, self.config, self.names, communicator, self._device)
        self.find_unused_parameters = find_unused_parameters
        self.skip_unused_buckets = skip_unused_buckets
        self._plans = Plans(
            self.parameters,
            self.names,
            self.sparse,
            self.wires.table,
            self.config,
            self.caps,
            communicator,
            learns=static_graph or not find_unused_parameters,
        )
        self._agreed = agreed is not None
        self._opened = False  # wires are known to the backend, and the mode has its communicator
        self._sync = True
        self.steps_in_backward = False  # the optimizer does, or the comm hook writes gradients itself
        self.observed = GradStats(self.parameters, self.names, table.wires, self.config, communicator)
        self.observed.alike = agreed is not False
        numbers = [number for number, one in enumerate(self.sparse) if one]
        maker = BucketMaker(
            parameters=self.parameters,
            names=self.names,
            sparse=self.sparse,
            wires=self.wires.table,
            config=self.config,
            as_views=self.has_views,
            communicator=communicator,
            sparse_kinds=SparseKinds(numbers, self.names, self._device, communicator),
            phases=Phases(communicator, self._device),
            draws=Draws(self.config.seed, count, communicator) if self.config.stochastic_rounding else None,
            feedback=Feedback(self.parameters, self.names) if self.config.error_feedback else None,
            lazy=lazy_bucket_allocation and not self.has_views,
        )
        self._recording = Recording(self._plans, "reducer" if exclusive else "wrapper")
        self.pipeline = Pipeline(
            maker,
            self._plans,
            self.wires,
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
        self.observed.before_reading = _weakly(self.cycle)
        self._attend_optimizers()
        if communicator.rank == 0 and gradient_as_bucket_view and not self.has_views:
            gradient_bytes = sum(kind.size_bytes for kind in self._plans.kinds if not kind.alone)
            wire_bytes = int(self.pipeline.stats()["wire_bytes"])
            _logger.info(validation.no_views_text(self.config, wire_bytes, gradient_bytes))
        if communicator.rank == 0 and lazy_bucket_allocation and self.has_views:
            _logger.info(
                "lazy_bucket_allocation=True has no effect where gradients are views of their buckets, which therefore "
                "last as long as the gradients"
            )
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
    def static_graph(self) -> bool:
        """Whether every step uses the same parameters equally often."""
        return self.cycle.static_graph

    @property
    def has_comm_hook(self) -> bool:
        """Whether a comm hook reduces the buckets in place of our own wire."""
        return self.pipeline.maker.hook is not None

    @property
    def plan(self) -> Plan:
        """Parameter numbers by bucket, in launch order."""
        return self.pipeline.buckets.plan

    @property
    def rebuilt(self) -> bool:
        """Whether the buckets follow an order of readiness already."""
        return self._plans.rebuilt

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
                "plan": f"{plan_hash(self._plans.recut(self.plan)):016x}",
                "plan learned": self.rebuilt,
                "steps before encoding": self.wires.state(),
            }
            settings = validation.settings(self.config, self.caps, flags)
            wires = dict(zip(self.names, self.wires.agreed.wires, strict=True))
            problem = ""
            try:
                validation.check_encoding(self.parameters, wires.values())
            except FusedReduceError as error:
                problem = str(error)
            alike = validation.agree(self.communicator, descriptions, settings, self._device, problem, wires)
            self.observed.alike = alike
            self._agreed = True
        self.pipeline.check_wires()
        self.pipeline.mode.open()
        table, phases = self.wires.agreed, self.pipeline.maker.phases
        of_contributions = self.config.stochastic_rounding or self.config.error_feedback
        per_node = 1 if of_contributions else self.config.ranks_per_node
        if table.has_two_phases(self.communicator.size) and phases.open(table, per_node):
            self._build_buckets(self.plan)
        ranks = self.communicator.size
        if self.communicator.rank == 0 and table.encoded and ranks > 2 and phases.per_node == 1:
            encoded = frozenset(table[number] for number in table.encoded)
            warn_of_small_shards(encoded, ranks, self.caps.cap_bytes)
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
        with self.cycle.lock:
            before = self.pipeline.buckets.plan
            changed = self.wires.due and self._change_wires()
            plan, issued = self._plans.next(before)
            self.pipeline.issued += issued
            # Also where the order gives the same buckets, because streams are still those of a first step.
            new = changed or issued > 0 or plan != before
            if new:
                self._build_buckets(plan)
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
        with self.cycle.lock:
            self.cycle.check_finalized()
            caps = BucketCaps.of(size)
            if self.state is ReducerState.ARMED:
                raise FusedReduceError(
                    "a step is armed, and would end in other buckets than it began in: call set_bucket_size() after "
                    "its backward, or after reset() on every rank"
                )
            if self.has_comm_hook:
                raise ValueError(
                    "set_bucket_size() and a comm hook exclude each other, because the hook may keep state per bucket: "
                    "call it before the hook is registered"
                )
            if self._recording.wants_step():
                raise FusedReduceError(
                    "a trace is being recorded, for one size of buckets: leave its record_trace() context, then call "
                    "set_bucket_size()"
                )
            mode = self.pipeline.mode
            if not mode.together and (pending := mode.pending()):
                raise FusedReduceError(f"{pending}: call flush() on every rank, then set_bucket_size()")
            self._plans.set_caps(caps)
            self.caps = caps
            self._agreed = self._opened = False

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
        with self.cycle.lock:
            issued = self.pipeline.issued + self.pipeline.maker.phases.issued_together
            plan_state = f"{plan_hash(self.plan):016x} {self.rebuilt} {self.wires.state()}"
            self.cycle.refuse_closed()
            try:
                same, rounds = self.cycle.failures.compare(
                    self.communicator, self._device, issued, self.pipeline.rounds, plan_state
                )
            except FusedReduceError:
                # Not the rest of `give_up_step`, in which the host may wait for collectives that peers never issue.
                self.cycle.give_up()
                self.pipeline.mode.drop_steps()
                for reduction in self.pipeline.buckets.reductions:
                    reduction.drop_views()
                self.cycle.state = ReducerState.LOST
                raise
            self.give_up_step()
            self.pipeline.rounds = rounds  # a rank that has raised alone has not ended the step that its peers have
            if not same:
                self.wires.restart()
                self._change_wires()
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
            self.wires.drop_step()
            self._change_wires()
            # New wire buffers: a collective that is still in flight may write into the old ones.
            self._build_buckets(self._plans.recut(self.plan))

    def set_communicator(self, communicator: Communicator) -> None:
        """Switches to another group of ranks, which agree on settings, learn a plan and count steps anew.

        A step that is not finished is abandoned, and so are steps in flight.

        Args:
            communicator: the new ranks; the next synchronised step is the first one for all of them.

        Raises:
            FusedReduceError: the reducer is closed.
        """
        with self.cycle.lock:
            self.cycle.refuse_closed()
            self.communicator = communicator
            for holder in (self.pipeline, self.cycle, self._plans, self.wires, self.observed):
                holder.set_communicator(communicator)
            self._recording.end()
            self._attend_optimizers()
            self.give_up_step()
            self._plans.return_to_first()
            self._build_buckets(self._plans.first())

    def set_static_graph(self) -> None:
        """Declares the graph static, as static_graph=True does. Call it before the first backward.

        Raises:
            RuntimeError: a backward has been reduced, or one is armed.
            FusedReduceError: the reducer is closed.
        """
        self.cycle.refuse_closed()
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

        Gradients that are views keep their buffer alive. A step in flight is abandoned, with a warning.
        """
        with self.cycle.lock:
            abandons = self.state is ReducerState.LAUNCHED and self.cycle.advises
            self.cycle.state = ReducerState.CLOSED
            optimizer_hooks.leave(self)
            self.remove_hooks()
            self.pipeline.release_buckets()
            validation.leave(self.cycle, self.parameters)
        if abandons:
            warnings.warn(
                f"rank {self.communicator.rank}: close() abandons a step that is in flight, and its gradients are no "
                "averages: call finalize() after the backward, then close()",
                stacklevel=2,
            )

    def remove_hooks(self) -> None:
        """Removes the hooks from the parameters: nothing is reduced any more."""
        self.cycle.hooks.remove()

    # Within

    def before_optimizer_step(self, *, closure: bool) -> None:
        """Called before an optimizer of these parameters steps, where gradients may be in flight or averages delayed.

        Args:
            closure: step() was given a closure.

        Raises:
            FusedReduceError: a closure, where ranks share an autograd thread or finalization is manual; the step waits
                for `finalize_backward`; or as `finalize`.
        """
        if self.cycle.manual:
            # (A comm hook may step the optimizer while its bucket is launched.)
            if self.cycle.step.begun and self.cycle.state is ReducerState.ARMED and not self.has_comm_hook:
                raise FusedReduceError(unfinalized_text(self.communicator.rank))
            self.cycle.complete_outside()
            if closure:
                raise FusedReduceError(
                    "step(closure) with manual finalization: the optimizer would read this rank's own gradients where "
                    "the closure does not end its step. Call backward(), finalize_backward() and step() without a "
                    "closure, or turn manual finalization off"
                )
        elif not self.cycle.waits_in_backward:
            if closure:
                raise FusedReduceError(
                    "step(closure): the closure's backward ends before its gradients are reduced, as ranks share an "
                    "autograd thread here, and the optimizer would read this rank's own. Call reducer.backward(loss), "
                    "and step() without a closure; or have a thread per rank, on CPU"
                )
            self.cycle.complete_outside()
        self.pipeline.mode.optimizer_steps()

    def _attend_optimizers(self) -> None:
        if self.cycle.waits_in_backward and not (self.cycle.manual or self.pipeline.mode.delays):
            optimizer_hooks.leave(self)
        else:
            optimizer_hooks.enter(self)

    def _change_wires(self) -> bool:
        """Takes the wires of the next step; returns whether they are other ones, for which buckets must be built."""
        changed = self.wires.advance()
        if changed:
            self._plans.set_wires(self.wires.table)
            self.pipeline.set_wires(self.wires.table)
        return changed

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
