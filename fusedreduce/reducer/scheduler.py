"""Scheduler: has the ranks agree on a plan from their measurements.

The schedule and the decisions are pure (planning/schedule.py); here are this rank's measurements and the two small
collectives. Both are issued right after the last bucket's, so in the same place on every rank, and waited for with the
buckets: none is in flight between two steps. Their results are read before the next step.
"""

from __future__ import annotations

import logging

import torch

from ..comm.group import Group
from ..comm.numbers import on_device
from ..comm.protocol import Pending
from ..comm.waiting import naming_failure, wait_for
from ..errors import AgreementError
from ..planning.plan import Plan
from ..planning.readiness import Readiness
from ..planning.schedule import PROBE_BYTES, REPORTS, Decision, Model, Schedule
from ..trace.step_profile import StepProfile

_logger = logging.getLogger(__name__)


class Scheduler:
    """The schedule of one reducer over one group of ranks.

    Args:
        model: of the parameters and the wire.
        replan_every: see ReduceConfig.
        group: the ranks.
        device: device for the collectives' tensors.

    Attributes:
        readiness: when this rank's gradients were ready in profiled steps.
        schedule: its state: the round, and the costs that ranks have agreed on.
        due: what the current round is for.
        pending: this step's collectives, until `complete`.
        changes: plans that were adopted.
    """

    def __init__(self, model: Model, replan_every: int, group: Group, device: torch.device) -> None:
        self._group = group
        self._device = device
        self.schedule = Schedule(model, replan_every)
        self._waited: torch.cuda.Event | None = None
        self.changes = 0
        self.restart(model)

    def restart(self, model: Model) -> None:
        """Forgets all but the order of the first step; every rank does so at the same place.

        Args:
            model: what plans are made from now on.
        """
        self.readiness = Readiness(len(model.kinds))
        self.schedule = Schedule(model, self.schedule.replan_every, arrival=self.schedule.arrival)
        self.due = self.schedule.due()
        self.pending: list[Pending] = []
        self._looked: dict[int, StepProfile] = {}
        self._numbers: list[int] | None = None
        self._found: torch.Tensor | None = None  # of all ranks: their numbers, or with a decision what they compare
        self._decision: Decision | None = None

    def follow(self, model: Model) -> None:
        """As `Schedule.follow`; what is under way is forgotten. Every rank does so at the same place.

        Args:
            model: what plans are made from now on.
        """
        self.schedule.follow(model)
        self.due = self.schedule.due()
        self._looked, self._numbers, self._found, self._decision = {}, None, None, None

    # A step in whose round something is due

    def open_round(self, looked: StepProfile | None) -> int:
        """Called before the first bucket of a profiled step: issues a small collective, to measure its latency.

        Args:
            looked: the step's profile; None: this rank has no inputs (join).

        Returns:
            How many collectives this issued.
        """
        tensor = torch.zeros(PROBE_BYTES // 8, dtype=torch.int64, device=self._device)
        if looked is not None:
            looked.probe_issuing()
        with naming_failure("agreeing on a plan failed", self._group.communicator):
            pending = self._group.communicator.all_reduce(tensor, "max")
        if looked is not None:
            looked.probe_issued(pending)
        self.pending.append(pending)
        return 1

    def report(self) -> int:
        """Called after the last bucket: starts the exchange of measurements, or of decisions, where one is due.

        Returns:
            How many collectives this issued.
        """
        if self._numbers is not None:
            numbers, self._numbers = self._numbers, None
        elif self._decision is not None:
            numbers = [self._decision.hash, -self._decision.hash, int(_frozen())]
        else:
            return 0
        self._found = on_device(numbers, torch.int64, self._device)
        with naming_failure("agreeing on a plan failed", self._group.communicator):
            self.pending.append(self._group.communicator.all_reduce(self._found, "max"))
        return 1

    def complete(self) -> None:
        """Waits for this step's collectives, if there are any; on CUDA only the current stream waits."""
        pending_ones, self.pending = self.pending, []
        for pending in pending_ones:
            wait_for(pending, "agreeing on a plan", self._group.communicator)
        if pending_ones and self._device.type == "cuda":
            self._waited = self._waited or torch.cuda.Event()
            self._waited.record(torch.cuda.current_stream(self._device))

    # Every step

    def close_round(self, looked: StepProfile | None) -> bool:
        """Counts a step that is done.

        Args:
            looked: its profile; None: it was not profiled.

        Returns:
            Whether something was due in it, or is in the next one. `Plans.look_ahead` must follow.
        """
        self.schedule.round += 1
        if self.schedule.round != self.due.until:
            return False
        if looked is not None and self.due.place is not None:
            self._looked[self.due.place] = looked
        self.due = self.schedule.due()
        return True

    # Between two steps

    @property
    def settled(self) -> bool:
        """Whether ranks have decided from the first reports, or there are no more, and nothing of that is under way."""
        is_over = self.schedule.round > REPORTS[-1] or self.due.until is None
        return (
            is_over
            and self.schedule.reports > 0
            and self._numbers is None
            and self._found is None
            and self._decision is None
        )

    @property
    def decides(self) -> bool:
        """Whether `decide` has something to do before the next step."""
        return self._found is not None or (self.due.reports and self._numbers is None)

    def decide(self, plan: Plan) -> Plan:
        """Reads the results of the last step's collectives, or prepares what the next one's needs; where it `decides`.

        Args:
            plan: the one in use.

        Returns:
            The plan to use from now on.

        Raises:
            AgreementError: ranks have decided on different plans; on every rank.
        """
        if self._found is None:
            # Here and not at the end of the last profiled step, because on CUDA this waits for that step.
            looked, self._looked = self._looked, {}
            for _, one in sorted(looked.items()):
                self.readiness.add(one.ready_ns, one.device_ready_times_ns())
            steps = {place: one.step_times() for place, one in looked.items()}
            ready_ns = [int(value) for value in self.readiness.best()]
            self._numbers = self.schedule.numbers(ready_ns, steps, len(plan), frozen=_frozen())
            return plan
        if self._waited is not None:
            # The stream of `complete` may not be the current one.
            torch.cuda.current_stream(self._device).wait_event(self._waited)
        tensor, self._found = self._found, None
        found: list[int] = tensor.tolist()
        decision, self._decision = self._decision, None
        if decision is None:
            self._decision = self.schedule.decide(found, plan)
            return plan
        most, least, frozen = found
        if most != -least:
            raise AgreementError(
                f"rank {self._group.communicator.rank}: ranks have decided on different plans from the same numbers: "
                f"hash {decision.hash:016x} on this rank, {-least:016x} to {most:016x} over all. Run the same "
                "versions of fusedreduce and Python on all ranks, or use policy='static', which decides nothing"
            )
        if decision.plan == plan or frozen:
            _logger.debug("plan %016x stays: %s", decision.hash, decision.why)
            return plan
        self.changes += 1
        self._looked = {}
        _logger.info("new plan %016x, %d buckets: %s", decision.hash, len(decision.plan), decision.why)
        return decision.plan


def _frozen() -> bool:
    """Whether this rank's plan must not depend on measured times (torch.use_deterministic_algorithms)."""
    return torch.are_deterministic_algorithms_enabled()
