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
import enum
import logging
from collections.abc import Sequence
from itertools import starmap
from typing import Any, NamedTuple

import torch

from ..buckets.bucket_set import kind_of
from ..buckets.parameters import Parameters
from ..buckets.step_feature import StepFeature
from ..buckets.wire_table import WireTable
from ..comm.group import Group
from ..comm.waiting import naming_failure
from ..config import Asynchronous, ReduceConfig, is_synchronous
from ..planning.bucketing import BucketCaps
from ..planning.cost_model import FS_PER_NS, Costs
from ..planning.plan import ParameterKind, Plan, check_groups, first_plan, ready_plan, regrouped, static_plan
from ..planning.plan_file import dump, load
from ..planning.planner import best_plan
from ..planning.schedule import Model
from ..planning.timeline import ready_order, timeline
from ..trace.recorder import Parameter, Source, group_text, header
from ..trace.step_profile import StepProfile
from ..wires import NATIVE, wire_bytes
from .scheduler import Scheduler

_logger = logging.getLogger(__name__)

# With fewer bytes on the wire Python dominates the measurements, 0.1 ms per bucket: plans that followed them cut 2,000
# gradients of 8 elements into five buckets, and each step took 6 ms longer. A link that the user names has no limit.
_LEAST_PLANNED_BYTES = 2**20


class PlanState(enum.Enum):
    """Where the plan in use is from, and what may come after it. `Plans` says when one follows another."""

    GIVEN = "given"  # from the user, for good
    FIRST = "first"  # from the registration, for good: no step shows an order that holds for all ranks
    LEARNING = "learning"  # from the registration: the next synchronised step shows an order of readiness
    SHOWN = "shown"  # still that one: rank 0's order is broadcast before the next synchronised step
    ORDERED = "ordered"  # from rank 0's order, for good: no clock is asked
    MEASURED = "measured"  # from rank 0's order, then from what ranks agree on by measurements


GIVEN, FIRST, LEARNING, SHOWN, ORDERED, MEASURED = PlanState  # see ReducerState


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


class Plans(StepFeature):
    """The plans of one reducer: a state, which `_find_state` alone finds, and what is due in it.

        a step ends                    LEARNING -> SHOWN
        before the next one            SHOWN -> ORDERED, MEASURED
        the mode, the wires, a comm    between ORDERED and MEASURED; between FIRST and LEARNING
          hook, a static graph
        a step is given up             SHOWN -> LEARNING
        other ranks, or ranks that     any -> GIVEN, FIRST, LEARNING
          have different plans

    Other wires and other limits (`set_wires`, `set_caps`) change no state by themselves: the plan is cut anew, as what
    it is from.

    Args:
        parameters: all parameters of the reducer.
        wires: what each travels on.
        config: policy, and maybe a plan.
        caps: size limits of the buckets; BucketCaps(): those of the wires.
        group: the ranks.
        learns: the first step shows an order of readiness to learn.

    Attributes:
        state: see PlanState; the same on every rank between two steps.
        due: `next` is to be called before the next synchronised step.
        profiles: the next synchronised step is profiled, to plan by.
        scheduler: has the ranks agree on plans.

    Raises:
        ValueError: the given plan is not a plan, or is of another model.
    """

    def __init__(
        self,
        parameters: Parameters,
        wires: WireTable,
        config: ReduceConfig,
        caps: BucketCaps,
        group: Group,
        *,
        learns: bool,
    ) -> None:
        self._learns = learns
        self._hooked = False
        self._parameters = parameters
        self._group = group
        self._wires, self._caps = wires, caps
        self._on_hold = False
        self._next: Plan | None = None
        self._numels = [parameter.numel() for parameter in parameters.tensors]
        self._groups = [(parameter.dtype, parameter.device) for parameter in parameters.tensors]
        self._config = config
        self._model = Model(
            **self._sizes(wires),
            caps=caps,
            cap_policy=config.cap_policy,
            share=config.policy != "static",
            policy=config.policy,
            link=config.link,
            least_bytes=0 if config.link else _LEAST_PLANNED_BYTES,
            copies=wires.wires,
        )
        self.new_group()

    @property
    def rebuilt(self) -> bool:
        """Whether the plan follows an order of readiness."""
        return self.state is ORDERED or self.state is MEASURED

    @property
    def kinds(self) -> Sequence[ParameterKind]:
        """What a plan must know of each parameter."""
        return self._model.kinds

    # What plans depend on

    def new_group(self) -> None:
        """Follows other ranks, for which plans are learned anew."""
        self._model = dataclasses.replace(self._model, caps=self._limits(self._wires))
        self._on_hold = False
        self.scheduler = Scheduler(self._model, self._config.replan_every, self._group, self._parameters.device)
        self._given = self._loaded()
        self._order: tuple[int, ...] = ()  # of readiness, that a step has shown and that is still to be broadcast
        self.return_to_first()

    def follow(self, *, config: ReduceConfig | None = None, learns: bool = False, hooked: bool = False) -> None:
        """Changes what the state depends on. The plan stays, and what was measured.

        Args:
            config: has another sync mode: delayed averages are not measured, and ranks in different steps learn no
                plan; None: stays.
            learns: the next step shows an order of readiness to learn, after all (a graph that is declared static).
            hooked: a comm hook reduces the buckets, and may keep state per bucket: what follows the first step's order
                is kept for good.
        """
        self._config = config or self._config
        self._learns |= learns
        self._hooked |= hooked
        self._find_state(ordered=self.rebuilt)

    @property
    def is_given(self) -> bool:
        """Whether a plan was given that these ranks keep to."""
        return self.state is GIVEN

    def set_caps(self, caps: BucketCaps) -> None:
        """Changes the size limits: the next plan is cut by them, and what was measured of other plans is forgotten."""
        self._caps = caps
        self._cut_anew()

    def set_wires(self, wires: WireTable) -> None:
        """Changes what parameters travel on: the next plan is cut for it, and what was measured is forgotten."""
        self._wires = wires
        self._cut_anew(**self._sizes(wires), copies=wires.wires)

    def take(self, wires: WireTable, plan: Plan | None) -> None:
        """Changes what parameters travel on, and keeps what was measured of the link.

        Args:
            wires: of the parameters.
            plan: the next plan; None: cut from the first step's order.
        """
        self._wires = wires
        self._model = self._model_of(wires)
        # Parameters that have returned from an encoding are not those that the plan was made for.
        self._recut, self._next = True, plan and regrouped(plan, self.kinds, share=self._model.share)
        self.scheduler.follow(self._model)
        self._find_state(ordered=self.rebuilt)

    def hold(self, on: bool) -> None:
        """Leaves the plan alone and measures nothing for it, or does so again; every rank at the same place."""
        self._on_hold = on
        self.look_ahead()

    def measure_anew(self) -> None:
        """Forgets what was measured, of a link that is another one now; the plan stays."""
        self.scheduler.restart(self._model)
        self.look_ahead()

    def judged(self) -> bool:
        """Whether the plan in use was decided on by the first reports; without measurements, whether it has an order.

        By all of them: what the first one finds is of steps with one bucket, and its link can have twice the latency.
        """
        return self.state is ORDERED or (self.state is MEASURED and self.scheduler.settled)

    @property
    def is_small(self) -> bool:
        """Whether so few bytes are reduced that nothing is measured, whatever they travel on."""
        dense_bytes = sum(kind.size_bytes for kind in self.kinds if not kind.alone)
        return self._config.policy == "planned" and dense_bytes < self._model.least_bytes

    def best_on(self, wires: WireTable, costs: Costs) -> tuple[Plan, float]:
        """The plan for other wires, and when the last gradient is written with it, in ns since backward began.

        Args:
            wires: of the parameters.
            costs: of a bucket on them.
        """
        model, schedule = self._model_of(wires), self.scheduler.schedule
        problem = model.problem(schedule.ready_ns, costs)
        if wires.has_two_phases(self._group.communicator.size):  # by the plan that it would have
            plan = ready_plan(model.kinds, model.caps, model.cap_policy, schedule.arrival, share=model.share)
        else:
            order = ready_order(schedule.ready_ns)
            plan = ready_plan(model.kinds, model.caps, model.cap_policy, order, share=model.share)
            if self._config.policy == "planned":
                others = {
                    "ready": plan,
                    "static": static_plan(model.kinds, model.caps, model.cap_policy, schedule.arrival or order),
                }
                plan = best_plan(problem, others)[1]
        return plan, timeline(plan, problem).finish / FS_PER_NS

    def dropped(self) -> None:
        """Forgets what some ranks may not know; the plan in use stays."""
        self._order = ()
        self._on_hold = False
        self.scheduler.restart(self._model)
        self._find_state(ordered=self.rebuilt)

    def return_to_first(self) -> Plan:
        """Returns to the first plan, because ranks may have different ones. It must be built."""
        self._recut, self._next = False, None  # the limits have changed since the plan in use was cut
        self._find_state(ordered=False)
        return self.first()

    # Plans

    def first(self) -> Plan:
        """The plan of the first step."""
        if self._given is not None:
            return regrouped(self._given, self.kinds, share=self._model.share)
        model = self._model
        return first_plan(model.kinds, model.caps, model.cap_policy, learns=self.state in (LEARNING, SHOWN))

    def recut(self, plan: Plan) -> Plan:
        """The plan by the limits in use: another one than `plan` if `set_caps` was called since that was cut."""
        if not self._recut:
            return plan
        if self._next is not None:
            return self._next
        return self._cut() if self.rebuilt else self.first()

    def note_order(self, order: Sequence[int] = ()) -> None:
        """Notes the order of readiness of the first step; a rank without inputs (join) has none."""
        if self.state is LEARNING:
            seen = set(order)
            self._order = (*order, *(index for index in range(len(self.kinds)) if index not in seen))
            self._find_state(ordered=False)

    def next(self, plan: Plan) -> tuple[Plan, int]:
        """Decides, between two steps and where that is `due`, which plan is used from now on.

        Args:
            plan: the one in use.

        Returns:
            The plan, and how many collectives were issued.

        Raises:
            AgreementError: ranks have decided on different plans; on every rank.
            CollectiveError: a peer did not answer.
        """
        if self.state is SHOWN:
            return self._adopt_order(), 1
        try:
            plan, self._recut = self.recut(plan) if self._recut else self.scheduler.decide(plan), False
            self._next = None
        finally:
            self.look_ahead()
        return plan, 0

    def look_ahead(self) -> None:
        """Finds what is due before and in the next step; called behind whatever changes that."""
        measured = self.in_use
        self.profiles = measured and self.scheduler.due.place is not None
        self.due = self.state is SHOWN or self._recut or (measured and self.scheduler.decides)

    # As a StepFeature

    @property
    def in_use(self) -> bool:
        """Whether plans follow measurements now."""
        return self.state is MEASURED and not self._on_hold

    @property
    def acts(self) -> bool:
        """Whether the round of the next step is for something."""
        due = self.scheduler.due
        return due.place is not None or due.reports or due.confirms

    def opened(self, profile: StepProfile | None) -> int:
        """Issues the probe of a step that is profiled."""
        return self.scheduler.open_round(profile) if self.profiles else 0

    def behind(self) -> int:
        """Starts the exchange of measurements, or of decisions, where one is due."""
        return self.scheduler.report()

    def waited(self) -> None:
        """Waits for the probe and the exchange."""
        self.scheduler.complete()

    def counted(self, profile: StepProfile | None) -> bool:
        """Counts a round."""
        changed = self.scheduler.close_round(profile)
        if changed:
            self.look_ahead()
        return changed

    # Told to users

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
        ranks, wire = self._group.communicator.size, self._config.wire_text
        return dump(plan, names=self._parameters.names, numels=self._numels, world_size=ranks, wire=wire)

    def trace_header(self, source: Source) -> dict[str, Any]:
        """The part of a trace that is the same for all its steps.

        Args:
            source: what records it.
        """
        model = self._model
        ready_ns = self.scheduler.readiness.best().tolist()
        # Of several the one in use: native is also what that leaves as it is.
        now = min(set(self._wires.wires), key=lambda one: (one in (NATIVE, "bf16"), one == NATIVE))
        wire = {"wire": now} if self._config.allowed else {}
        described = zip(self._parameters.names, self._parameters.tensors, self._groups, self._wires.wires, strict=True)
        rows = zip(described, model.kinds, model.wire_bytes, ready_ns, strict=True)
        return header(
            source=source,
            rank=self._group.communicator.rank,
            ranks=self._group.communicator.size,
            device=self._parameters.device.type,
            config={**self._config.to_dict(), **wire},
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

    def _limits(self, wires: WireTable) -> BucketCaps:
        given = self._caps != BucketCaps()
        return self._caps if given else wires.default_caps(self._group.communicator.size, self._parameters.device)

    def _model_of(self, wires: WireTable) -> Model:
        return dataclasses.replace(self._model, **self._sizes(wires), caps=self._limits(wires), copies=wires.wires)

    def _sizes(self, wires: WireTable) -> dict[str, Any]:
        """The part of the model that depends on the wires."""
        rows = list(zip(self._parameters.tensors, self._parameters.sparse, wires.wires, strict=True))
        made: dict[ParameterKind, ParameterKind] = {}  # a model has few kinds of parameters
        return {
            "kinds": [made.setdefault(kind, kind) for kind in starmap(kind_of, rows)],
            # The size of a sparse gradient is not known before it exists.
            "wire_bytes": [0 if alone else wire_bytes(one, wire) for one, alone, wire in rows],
        }

    def _cut_anew(self, **sizes: Any) -> None:
        self._model = dataclasses.replace(self._model, caps=self._limits(self._wires), **sizes)
        self._recut, self._next = True, None
        self.scheduler.restart(self._model)
        self._find_state(ordered=self.rebuilt)

    def _adopt_order(self) -> Plan:
        order = torch.tensor(self._order, dtype=torch.int64, device="cpu").to(self._parameters.device)
        with naming_failure("broadcasting the order of readiness failed", self._group.communicator):
            self._group.communicator.broadcast(order, 0)
        self.scheduler.schedule.arrival = tuple(order.tolist())
        self._order, self._recut, self._next = (), False, None
        self._find_state(ordered=True)
        return self._cut()

    def _cut(self) -> Plan:
        """The plan that follows from rank 0's order of readiness in the first step."""
        model, order = self._model, self.scheduler.schedule.arrival
        if self._config.policy == "static":
            return static_plan(model.kinds, model.caps, model.cap_policy, order)
        return ready_plan(model.kinds, model.caps, model.cap_policy, order, share=model.share)

    def _find_state(self, *, ordered: bool) -> None:
        """Finds the state from all that it depends on.

        Args:
            ordered: rank 0's order of readiness is known to every rank.
        """
        config, size = self._config, self._group.communicator.size
        if self._given is not None:
            self.state = GIVEN
        elif not ordered:
            learns = self._learns and not isinstance(config.sync_mode, Asynchronous)
            self.state = (SHOWN if self._order else LEARNING) if learns else FIRST
        else:
            overlaps = config.overlap and is_synchronous(config.sync_mode)  # else there is nothing to plan
            modelled = size > 1 and not self._wires.has_two_phases(size)  # the cost model has one collective per bucket
            measured = config.policy != "static" and overlaps and modelled and not self._hooked
            self.state = MEASURED if measured else ORDERED
        self.look_ahead()

    def _loaded(self) -> Plan | None:
        """The given plan, if it was made for as many ranks."""
        text = self._config.plan_text
        if text is None:
            return None
        plan, ranks = load(text, names=self._parameters.names, numels=self._numels)
        size = self._group.communicator.size
        if ranks != size:
            _logger.warning(
                "rank %d: ReduceConfig(plan=...) is for %d ranks, not %d: it is not used, and a plan is learned",
                self._group.communicator.rank,
                ranks,
                size,
            )
            return None
        check_groups(plan, self.kinds, share=self._model.share)
        return plan
