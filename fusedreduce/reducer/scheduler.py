"""Scheduler: has the ranks agree on a plan from their measurements.

The schedule and the decisions are pure (planning/schedule.py); here are this rank's measurements and the two small
collectives. Both are issued right after the last bucket's, so in the same place on every rank, and waited for with the
buckets: none is in flight between two steps. Their results are read before the next step.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from ..comm.numbers import on_device
from ..comm.protocol import Communicator, Pending
from ..comm.waiting import naming_failure, wait_for
from ..errors import AgreementError
from ..planning.plan import Plan
from ..planning.readiness import Readiness
from ..planning.schedule import PROBE_BYTES, Decision, Model, Schedule
from ..trace.step_profile import StepProfile

_logger = logging.getLogger(__name__)


class Scheduler:
    """The schedule of one reducer over one group of ranks.

    Args:
        model: of the parameters and the wire.
        replan_every: see ReduceConfig.
        communicator: the ranks.
        device: device for the collectives' tensors.

    Attributes:
        readiness: when this rank's gradients were ready in profiled steps.
        schedule: its state: the round, and the costs that ranks have agreed on.
        due: what the current round is for.
        changes: plans that were adopted.
    """

    def __init__(self, model: Model, replan_every: int, communicator: Communicator, device: torch.device) -> None:
        self.readiness = Readiness(len(model.kinds))
        self._communicator = communicator
        self._device = device
        self.schedule = Schedule(model, replan_every)
        self.due = self.schedule.due()
        self._looked: dict[int, StepProfile] = {}
        self._numbers: list[int] | None = None
        self._pending: list[Pending] = []
        self._reduced: torch.Tensor | None = None
        self._compared: torch.Tensor | None = None
        self._decision: Decision | None = None
        self._waited: torch.cuda.Event | None = None
        self.changes = 0

    def learned(self, order: Sequence[int]) -> None:
        """Notes rank 0's order of readiness in the first step, which every rank has received."""
        self.schedule.arrival = tuple(order)

    def open_round(self, looked: StepProfile | None) -> int:
        """Called before the first bucket: in a profiled step issues a small collective, to measure its latency.

        Args:
            looked: the step's profile; None: this rank has no inputs (join).

        Returns:
            How many collectives this issued.
        """
        if self.due.place is None:
            return 0
        tensor = torch.zeros(PROBE_BYTES // 8, dtype=torch.int64, device=self._device)
        if looked is not None:
            looked.probe_issuing()
        with naming_failure("agreeing on a plan failed", self._communicator):
            pending = self._communicator.all_reduce(tensor, "max")
        if looked is not None:
            looked.probe_issued(pending)
        self._pending.append(pending)
        return 1

    def report(self, plan: Plan) -> int:
        """Called after the last bucket: starts the exchange of measurements, or of decisions, where one is due.

        Args:
            plan: the one in use.

        Returns:
            How many collectives this issued.
        """
        if self.due.reports:
            numbers, self._numbers = self._numbers or self._mine(plan), None
            self._reduced = self._start(numbers)
            return 1
        if self.due.confirms and self._decision is not None:
            self._compared = self._start([self._decision.hash, -self._decision.hash, int(_frozen())])
            return 1
        return 0

    def complete(self) -> None:
        """Waits for this step's collectives of `open_round` and `report`; on CUDA only the current stream waits."""
        pending_ones, self._pending = self._pending, []
        for pending in pending_ones:
            wait_for(pending, "agreeing on a plan", self._communicator)
        if pending_ones and self._device.type == "cuda":
            self._waited = self._waited or torch.cuda.Event()
            self._waited.record(torch.cuda.current_stream(self._device))

    def close_round(self, looked: StepProfile | None) -> None:
        """Counts a step that is done.

        Args:
            looked: its profile; None: it was not profiled.
        """
        if looked is not None and self.due.place is not None:
            self._looked[self.due.place] = looked
        self.schedule.round += 1
        self.due = self.schedule.due()

    def decide(self, plan: Plan) -> Plan:
        """Reads, before a step, the results of the last one's collectives.

        Args:
            plan: the one in use.

        Returns:
            The plan to use from now on.

        Raises:
            AgreementError: ranks have decided on different plans; on every rank.
        """
        if self._reduced is not None:
            reduced, self._reduced = self._reduced, None
            self._decision = self.schedule.decide(self._read(reduced), plan)
            self.due = self.schedule.due()
        elif self._compared is not None:
            compared, self._compared = self._compared, None
            most, least, frozen = self._read(compared)
            decision, self._decision = self._decision, None
            assert decision is not None
            if most != -least:
                raise AgreementError(
                    f"rank {self._communicator.rank}: ranks have decided on different plans from the same numbers: "
                    f"hash {decision.hash:016x} on this rank, {-least:016x} to {most:016x} over all. Run the same "
                    "versions of fusedreduce and Python on all ranks, or use policy='static', which decides nothing"
                )
            if decision.plan != plan and not frozen:
                self.changes += 1
                self._looked = {}
                _logger.info("new plan %016x, %d buckets: %s", decision.hash, len(decision.plan), decision.why)
                return decision.plan
            _logger.debug("plan %016x stays: %s", decision.hash, decision.why)
        elif self.due.reports and self._numbers is None:
            # Here and not at the end of the last profiled step, because on CUDA this waits for that step.
            self._numbers = self._mine(plan)
        return plan

    def restart(self, model: Model) -> None:
        """Forgets all but the order of the first step; every rank does so at the same place.

        Args:
            model: what plans are made from now on.
        """
        self.readiness = Readiness(len(model.kinds))
        self.schedule = Schedule(model, self.schedule.replan_every, arrival=self.schedule.arrival)
        self.due = self.schedule.due()
        self._looked, self._numbers, self._pending = {}, None, []
        self._reduced = self._compared = self._decision = None

    def _mine(self, plan: Plan) -> list[int]:
        looked, self._looked = self._looked, {}
        for _, one in sorted(looked.items()):
            self.readiness.add(one.ready_ns, one.device_ready_times_ns())
        steps = {place: one.step_times() for place, one in looked.items()}
        ready_ns = [int(value) for value in self.readiness.best()]
        return self.schedule.numbers(ready_ns, steps, len(plan), frozen=_frozen())

    def _start(self, numbers: Sequence[int]) -> torch.Tensor:
        tensor = on_device(numbers, torch.int64, self._device)
        with naming_failure("agreeing on a plan failed", self._communicator):
            self._pending.append(self._communicator.all_reduce(tensor, "max"))
        return tensor

    def _read(self, numbers: torch.Tensor) -> list[int]:
        """Reads `numbers` on the host, after the stream of `complete`, which may not be the current one."""
        if self._waited is not None:
            torch.cuda.current_stream(self._device).wait_event(self._waited)
        found: list[int] = numbers.tolist()
        return found


def _frozen() -> bool:
    """Whether this rank's plan must not depend on measured times (torch.use_deterministic_algorithms)."""
    return torch.are_deterministic_algorithms_enabled()
