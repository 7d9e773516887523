"""Plans: the sequence of a reducer's plans.

    a plan given by the user        kept for good
    else, in the first step         one bucket per dtype and device
    after it                        rank 0's order of readiness, broadcast, cut by the policy
    from then on                    what all ranks agree on from measurements (scheduler.py)
    after `set_caps`                that order, cut by the new limits; then measured anew

With find_unused_parameters (and no static graph) no order is learned: buckets of limited size, in reverse order of
registration, from the start. Every rank has the same plan in every step.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..buckets.bucket_set import kind_of
from ..buckets.step_feature import StepFeature
from ..buckets.wire_table import WireTable
from ..comm.protocol import Communicator
from ..comm.waiting import naming_failure
from ..config import Asynchronous, ReduceConfig, SyncMode, is_synchronous, wire_bytes
from ..planning.bucketing import BucketCaps
from ..planning.cost_model import Costs
from ..planning.plan import ParameterKind, Plan, check_groups, first_plan, ready_plan, regrouped, static_plan
from ..planning.plan_file import dump, load
from ..planning.schedule import Model
from ..planning.timeline import timeline
from ..trace.recorder import Parameter, Source, group_text, header
from ..trace.step_profile import StepProfile
from .scheduler import Scheduler

_logger = logging.getLogger(__name__)

# With fewer bytes on the wire Python dominates the measurements, 0.1 ms per bucket: plans that followed them cut 2,000
# gradients of 8 elements into five buckets, and each step took 6 ms longer. A link that the user names has no limit.
_LEAST_PLANNED_BYTES = 2**20


class Forecast(NamedTuple):
    """The planner's prediction of a step, from the costs that ranks have agreed on, in ms since backward began.

    Args:
        backward_ms: end of backward, our packing included.
        finish_ms: the last gradient is written.
        torch_finish_ms: the same with torch's plan, at no cost for its copies and with gradients in their own dtype.
    """

    backward_ms: float
    finish_ms: float
    torch_finish_ms: float


def size_of_a_given_plan() -> ValueError:
    """The error for `set_bucket_size` where a plan was given."""
    return ValueError(
        "set_bucket_size() and ReduceConfig(plan=...) exclude each other, because the plan has its buckets already: "
        "leave the plan out"
    )


class Plans(StepFeature):
    """The plans of one reducer.

    Args:
        parameters: all parameters of the reducer.
        names: their names.
        sparse: per parameter whether its gradient is sparse.
        wires: what each travels on.
        config: policy, and maybe a plan.
        caps: size limits of the buckets; BucketCaps(): those of the wires.
        communicator: the ranks.
        learns: the first step shows an order of readiness to learn.

    Attributes:
        rebuilt: the plan follows an order of readiness.
        wants_order: an order of readiness is still to be learned or adopted.
        measured: the plan follows measurements now: the same on every rank.
        plan: that of the buckets.
        kinds: what a plan must know of each parameter.
        scheduler: has the ranks agree on plans.

    Raises:
        ValueError: the given plan is not a plan, or is of another model.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        names: Sequence[str],
        sparse: Sequence[bool],
        wires: WireTable,
        config: ReduceConfig,
        caps: BucketCaps,
        communicator: Communicator,
        *,
        learns: bool,
    ) -> None:
        self._learns = learns
        self.rebuilt = False
        self.plan: Plan = ()
        self._parameters, self._sparse = parameters, sparse
        self._wires, self._caps = wires, caps
        self.kinds = self._kinds()
        self._numels = [parameter.numel() for parameter in parameters]
        self._groups = [(parameter.dtype, parameter.device) for parameter in parameters]
        self._names = names
        self._config = config
        self._device = parameters[0].device
        self._order: tuple[int, ...] = ()
        self._model = Model(
            kinds=self.kinds,
            wire_bytes=self._wire_bytes(),
            caps=caps,
            cap_policy=config.cap_policy,
            share=config.policy != "static",
            policy=config.policy,
            link=config.link,
            least_bytes=0 if config.link else _LEAST_PLANNED_BYTES,
        )
        # Not where nothing overlaps. (A comm hook may keep state per bucket: the reducer then calls give_up_measuring.)
        self._may_measure = config.policy != "static" and config.overlap
        self._mode = config.sync_mode
        self.set_communicator(communicator)

    def set_communicator(self, communicator: Communicator) -> None:
        """Switches to `communicator`, for which plans are learned anew."""
        self._communicator = communicator
        self._model = dataclasses.replace(self._model, caps=self._limits())
        self.scheduler = Scheduler(self._model, self._config.replan_every, communicator, self._device)
        self._given = self._loaded()
        self._order = ()
        self.return_to_first()

    def set_mode(self, mode: SyncMode) -> None:
        """Switches to a sync mode: delayed averages are not measured, and ranks in different steps learn no plan."""
        self._mode = mode
        self._follow(rebuilt=self.rebuilt)

    def learn(self) -> None:
        """The next step shows an order of readiness to learn, after all (a graph that is declared static)."""
        self._learns = True
        self._follow(rebuilt=self.rebuilt)

    def set_caps(self, caps: BucketCaps) -> None:
        """Changes the size limits: the next plan is cut by them, and what was measured of other plans is forgotten.

        Raises:
            ValueError: a plan was given.
        """
        if self._given is not None:
            raise size_of_a_given_plan()
        self._caps = caps
        self._model = dataclasses.replace(self._model, caps=self._limits())
        self._recut = True
        self.scheduler.restart(self._model)

    def set_wires(self, wires: WireTable) -> None:
        """Changes what parameters travel on: the next plan is cut for it, and what was measured is forgotten."""
        self._wires = wires
        self.kinds = self._kinds()
        self._model = dataclasses.replace(
            self._model, kinds=self.kinds, wire_bytes=self._wire_bytes(), caps=self._limits()
        )
        self._recut = True
        self.scheduler.restart(self._model)
        self._follow(rebuilt=self.rebuilt)

    def give_up_measuring(self) -> None:
        """Keeps the plan that follows the first step's order for good."""
        self._may_measure = False
        self._follow(rebuilt=self.rebuilt)

    def dropped(self) -> None:
        """Forgets what some ranks may not know; the plan in use stays."""
        self._order = ()
        self.scheduler.restart(self._model)

    def return_to_first(self) -> None:
        """Returns to the first plan, because ranks may have different ones. `first` must follow."""
        self._recut = False  # the limits have changed since the plan in use was cut
        self._follow(rebuilt=False)

    def first(self) -> Plan:
        """The plan of the first step."""
        if self._given is not None:
            return regrouped(self._given, self.kinds, share=self._model.share)
        model = self._model
        return first_plan(model.kinds, model.caps, model.cap_policy, learns=self.wants_order)

    def recut(self, plan: Plan) -> Plan:
        """The plan by the limits in use: another one than `plan` if `set_caps` was called since that was cut."""
        if not self._recut:
            return plan
        return self._cut() if self.rebuilt else self.first()

    def note_order(self, order: Sequence[int] = ()) -> None:
        """Notes the order of readiness of the first step; a rank without inputs (join) has none."""
        if self.wants_order and not self._order:
            seen = set(order)
            self._order = (*order, *(index for index in range(len(self.kinds)) if index not in seen))

    @property
    def due(self) -> bool:
        """Whether `next` is to be called before the next step."""
        return True

    def profiles(self) -> bool:
        """Whether the step that begins is profiled."""
        return self.measured and self.scheduler.due.place is not None

    def next(self, plan: Plan) -> tuple[Plan, int]:
        """Decides, between two steps, which plan is used from now on.

        Args:
            plan: the one in use.

        Returns:
            The plan, and how many collectives were issued.

        Raises:
            AgreementError: ranks have decided on different plans; on every rank.
            CollectiveError: a peer did not answer.
        """
        if not (self.wants_order and self._order):
            if self._recut:
                plan, self._recut = self.recut(plan), False
                return plan, 0
            return (self.scheduler.decide(plan) if self.measured else plan), 0
        order = torch.tensor(self._order, dtype=torch.int64, device="cpu").to(self._device)
        with naming_failure("broadcasting the order of readiness failed", self._communicator):
            self._communicator.broadcast(order, 0)
        self._order, self._recut = (), False
        self._follow(rebuilt=True)
        self.scheduler.learned(order.tolist())
        return self._cut(), 1

    # As a StepFeature

    @property
    def in_use(self) -> bool:
        """Whether plans follow measurements now."""
        return self.measured

    def opened(self, profile: StepProfile | None) -> int:
        """Issues the probe of a step that is profiled."""
        return self.scheduler.open_round(profile)

    def behind(self) -> int:
        """Starts the exchange of measurements, or of decisions, where one is due."""
        return self.scheduler.report(self.plan)

    def waited(self) -> None:
        """Waits for the probe and the exchange."""
        self.scheduler.complete()

    def counted(self, profile: StepProfile | None) -> None:
        """Counts a round."""
        self.scheduler.close_round(profile)

    def forecast(self, plan: Plan) -> Forecast | None:
        """The prediction for `plan`; None before the first report, and where nothing is measured."""
        schedule, model = self.scheduler.schedule, self._model
        if schedule.costs is None:
            return None
        ready_ns = self.scheduler.readiness.best().tolist()
        ours = timeline(plan, model.problem(ready_ns, schedule.costs))
        own_bytes = [0 if kind.alone else kind.size_bytes for kind in model.kinds]
        torchs = dataclasses.replace(model, wire_bytes=own_bytes).problem(ready_ns, Costs(wire=schedule.costs.wire))
        then = timeline(schedule.static(ready_ns), torchs)
        return Forecast(ours.backward_end / 1e12, ours.finish / 1e12, then.finish / 1e12)

    def json(self, plan: Plan) -> str:
        """`plan` as JSON, for `ReduceConfig(plan=...)`."""
        size, wire = self._communicator.size, self._config.wire_text
        return dump(plan, names=self._names, numels=self._numels, world_size=size, wire=wire)

    def trace_header(self, source: Source) -> dict[str, Any]:
        """The part of a trace that is the same for all its steps.

        Args:
            source: what records it.
        """
        model = self._model
        ready_ns = self.scheduler.readiness.best().tolist()
        described = zip(self._names, self._parameters, self._groups, self._wires.wires, strict=True)
        rows = zip(described, model.kinds, model.wire_bytes, ready_ns, strict=True)
        return header(
            source=source,
            rank=self._communicator.rank,
            ranks=self._communicator.size,
            device=self._device.type,
            config=self._config.to_dict(),
            caps=self._caps,
            parameters=[
                Parameter(
                    name=name,
                    numel=parameter.numel(),
                    ndim=parameter.ndim,
                    size_bytes=kind.size_bytes,
                    wire=wire,
                    wire_bytes=wire_bytes,
                    group=group_text(*group),
                    alone=kind.alone,
                    ready_ns=known_ns,
                )
                for (name, parameter, group, wire), kind, wire_bytes, known_ns in rows
            ],
        )

    def _limits(self) -> BucketCaps:
        if self._caps != BucketCaps():
            return self._caps
        return self._wires.default_caps(self._communicator.size, self._device)

    def _kinds(self) -> list[ParameterKind]:
        return list(map(kind_of, self._parameters, self._sparse, self._wires.wires))

    def _wire_bytes(self) -> list[int]:
        # The size of a sparse gradient is not known before it exists.
        rows = zip(self._parameters, self._sparse, self._wires.wires, strict=True)
        return [0 if alone else wire_bytes(one, wire) for one, alone, wire in rows]

    def _cut(self) -> Plan:
        """The plan that follows from rank 0's order of readiness in the first step."""
        model, order = self._model, self.scheduler.schedule.arrival
        if self._config.policy == "static":
            return static_plan(model.kinds, model.caps, model.cap_policy, order)
        return ready_plan(model.kinds, model.caps, model.cap_policy, order, share=model.share)

    def _follow(self, *, rebuilt: bool) -> None:
        self.rebuilt = rebuilt
        together = not isinstance(self._mode, Asynchronous)
        self.wants_order = self._learns and together and not rebuilt and self._given is None
        size = self._communicator.size
        modelled = size > 1 and not self._wires.has_two_phases(size)  # the cost model has one collective per bucket
        self.measured = rebuilt and self._may_measure and is_synchronous(self._mode) and modelled

    def _loaded(self) -> Plan | None:
        """The given plan, if it was made for as many ranks."""
        text = self._config.plan_text
        if text is None:
            return None
        plan, ranks = load(text, names=self._names, numels=self._numels)
        size = self._communicator.size
        if ranks != size:
            _logger.warning(
                "rank %d: ReduceConfig(plan=...) is for %d ranks, not %d: it is not used, and a plan is learned",
                self._communicator.rank,
                ranks,
                size,
            )
            return None
        check_groups(plan, self.kinds, share=self._model.share)
        return plan
