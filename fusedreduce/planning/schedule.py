"""Schedule: which steps are profiled, which numbers ranks exchange, and which plan follows. Pure: the same numbers give
the same decision on every rank.

Rounds count the synchronised steps since the schedule began; a rank without inputs (join) counts them too.

    round 0            the first step in rank 0's order of arrival, which the step before has shown
    rounds 8, 9, 10    profiled: every gradient's time is taken (the first steps of a training run are not typical)
    end of round 11    ranks reduce their numbers (maximum); each decides on a plan
    end of round 12    ranks compare the plan's hash
    from round 13 on   that plan

Rounds 19 and 27 report again, each after two profiled rounds, as the first report's times are from steps of another
plan, whose collectives used the processor, the memory and the link at other times. After that every `replan_every`-th
round reports. Both reductions are issued behind the last bucket's, so that they keep their place among the user's own
collectives on every rank; their results are read before the next round. (It takes two rounds because on a GPU the
device's times are known only after the step.)
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from ..config import CapPolicy, Policy
from .bucketing import BucketCaps
from .cost_model import Costs, Linear, fit, fit_copy
from .link_timing import CollectiveTimes, busy_periods
from .plan import ParameterKind, Plan, ready_plan, static_plan
from .plan_file import plan_hash
from .planner import best_plan
from .timeline import MISSING_NS, Problem, ready_order, timeline

REPORTS = (11, 19, 27)
FIRST_PROFILED = range(8, REPORTS[0])
PROFILED_AGAIN = 2
_WINDOW = len(FIRST_PROFILED)
# A plan is kept unless buckets wait for the head of the line for more than the first share of backward, or the model
# promises to save more than the second: moving a boundary changes the last bits of sums.
STALL_PERCENT = 5
GAIN_PERCENT = 1
# The number of latest profiled rounds that count, because links change.
_ROUNDS_KEPT = 12
# Buckets may all have one size, which says nothing about latency: a profiled round begins with a small collective.
PROBE_BYTES = 1024
NO_SAMPLE = -(1 << 62)  # in place of a negative time, of which ranks take the largest


@dataclass(frozen=True, kw_only=True)
class Model:
    """What all plans of a model are made from.

    Args:
        kinds: of all parameters.
        wire_bytes: per parameter, its bytes on the wire.
        caps: limits of the buckets.
        cap_policy: how the limits are applied.
        share: buckets of mixed dtypes are allowed.
        policy: "ready" or "planned"; "static" has no schedule.
        link: (latency in us, bandwidth in Gbit/s); None: measured.
        least_bytes: if all gradients together have fewer bytes on the wire, "planned" keeps its plan.
        copies: what packing and unpacking cost the same of; samples of others say nothing.
    """

    kinds: Sequence[ParameterKind]
    wire_bytes: Sequence[int]
    caps: BucketCaps
    cap_policy: CapPolicy
    share: bool
    policy: Policy
    link: tuple[float, float] | None = None
    least_bytes: int = 0
    copies: Hashable = None

    @property
    def is_small(self) -> bool:
        """Whether so few bytes are reduced that no measurement changes the plan."""
        return self.policy == "planned" and sum(self.wire_bytes) < self.least_bytes

    def problem(self, ready_ns: Sequence[int], costs: Costs) -> Problem:
        """Makes the planner's problem for these ready times (ns) and costs."""
        return Problem.of(
            self.kinds,
            ready_ns=ready_ns,
            wire_bytes=self.wire_bytes,
            cap_bytes=self.caps.planned_limit_bytes,
            costs=costs,
            share=self.share,
        )


@dataclass(frozen=True)
class BucketTimes:
    """One bucket in one profiled step on one rank, in ns.

    Args:
        wire: the times of its collective.
        pack_ns: packing, up to the collective's issue.
        unpack_ns: unpacking.
    """

    wire: CollectiveTimes
    pack_ns: int
    unpack_ns: int


@dataclass(frozen=True)
class StepTimes:
    """One profiled step on one rank.

    Args:
        buckets: in launch order; None where times are missing.
        stall_ns: how long buckets were ready and waited for an earlier one.
        backward_ns: duration of backward, our packing included.
        probe_ns: duration of the probe, a collective of PROBE_BYTES ahead of the first bucket's; None: not known.
    """

    buckets: Sequence[BucketTimes | None]
    stall_ns: int
    backward_ns: int
    probe_ns: int | None = None


@dataclass(frozen=True)
class Decision:
    """The plan to use from now on.

    Args:
        plan: possibly the one in use.
        why: the reason, for the log.
        costs: on which the decision is based; None: on ready times only.
    """

    plan: Plan
    why: str
    costs: Costs | None = None

    @property
    def hash(self) -> int:
        """The plan's hash, which ranks compare."""
        return plan_hash(self.plan)


@dataclass(frozen=True, kw_only=True)
class Due:
    """What a round is for.

    Args:
        place: its place among those that are profiled for a report, of which the last is 2; None: it is not profiled.
        reports: it ends with the reduction of all ranks' numbers.
        confirms: it ends with the comparison of the plans that ranks have decided on, if they have.
        until: the next round that is for something, or follows one that is; None: none ever is.
    """

    place: int | None
    reports: bool
    confirms: bool
    until: int | None


@dataclass
class Schedule:
    """The rounds of a reducer, and what its ranks have agreed on so far.

    Args:
        model: what is planned.
        replan_every: rounds between two reports after the last of REPORTS; 0: there is none after those.
        round: the number of the round that runs or is next.
        arrival: rank 0's order of gradients in the first round.
        costs: as agreed on last; None: not known.
        ready_ns: as agreed on last, per parameter; (): not known.
        reports: how many reports ranks have decided by.
    """

    model: Model
    replan_every: int
    round: int = 0
    arrival: tuple[int, ...] = ()
    costs: Costs | None = None
    ready_ns: tuple[int, ...] = ()
    reports: int = 0
    _rounds: deque[_Round] = field(default_factory=lambda: deque(maxlen=_ROUNDS_KEPT))

    def due(self) -> Due:
        """What this round is for."""
        done = self.costs is not None and self.model.is_small
        report = None if done else self._next_report(self.round)
        confirms = self._next_report(self.round - 1) == self.round - 1
        ahead = report - self.round if report is not None else 0
        window = _WINDOW if report == REPORTS[0] else PROFILED_AGAIN
        begins = None if report is None else max(report - window, self.round + 1)
        return Due(
            place=_WINDOW - ahead if 0 < ahead <= window else None,
            reports=report == self.round,
            confirms=confirms,
            until=self.round + 1 if confirms else begins,
        )

    def numbers(
        self, ready_ns: Sequence[int], steps: Mapping[int, StepTimes], buckets: int, *, frozen: bool = False
    ) -> list[int]:
        """One rank's numbers for a report, which is their elementwise maximum over all ranks.

        Args:
            ready_ns: per parameter, or MISSING_NS.
            steps: the profiled steps by `place`, so that ranks compare the same ones; some may be missing (join).
            buckets: how many the plan in use has.
            frozen: the plan must not depend on measured times on this rank (deterministic algorithms).

        Returns:
            int64s; equally many on all ranks that use the same plan.
        """
        rows = list(steps.values())
        numbers = list(ready_ns)
        for place in range(_WINDOW):
            row = steps[place].buckets if place in steps else [None] * buckets
            assert len(row) == buckets
            # Negative, so that the maximum is the shortest time: the last rank to issue a collective does not wait.
            numbers += [NO_SAMPLE if one is None else -one.wire.since_first_ns for one in row]
            numbers += [NO_SAMPLE if one is None else -one.wire.queued_ns for one in row]
            # Copies count as on the rank where they are fastest, undisturbed.
            numbers += [NO_SAMPLE if one is None else -one.pack_ns for one in row]
            numbers += [NO_SAMPLE if one is None else -one.unpack_ns for one in row]
            probe_ns = steps[place].probe_ns if place in steps else None
            numbers.append(NO_SAMPLE if probe_ns is None else -probe_ns)
        numbers.append(int(statistics.median_low([row.stall_ns for row in rows])) if rows else 0)
        numbers.append(int(statistics.median_low([row.backward_ns for row in rows])) if rows else 0)
        return [*numbers, int(frozen)]

    def decide(self, reduced: Sequence[int], plan: Plan) -> Decision:
        """Decides on a plan from the maximum over all ranks' `numbers`.

        Args:
            reduced: the maximum, as many as `numbers` returns.
            plan: the plan in use.
        """
        count, buckets = len(self.model.kinds), len(plan)
        assert len(reduced) == count + _WINDOW * (4 * buckets + 1) + 3, "numbers of another plan"
        ready_ns, samples, (stall_ns, backward_ns, frozen) = reduced[:count], reduced[count:-3], reduced[-3:]
        self._learn(samples, plan)
        self.costs, self.ready_ns, self.reports = self._fitted(), tuple(ready_ns), self.reports + 1
        if frozen:
            return Decision(plan, "kept: a rank uses deterministic algorithms", self.costs)
        if max(ready_ns, default=MISSING_NS) == MISSING_NS:
            return Decision(plan, "kept: no rank knows when gradients become ready", self.costs)
        model = self.model
        order = ready_order(ready_ns)
        by_readiness = ready_plan(model.kinds, model.caps, model.cap_policy, order, share=model.share)
        text = f"head-of-line stall {stall_ns / 1e6:.3f} ms of {backward_ns / 1e6:.3f} ms backward"
        if model.policy == "ready" or self.costs is None:
            why = text if model.policy == "ready" else f"{text}; costs unknown, collectives of fewer than two sizes"
            # A stall that is no jitter: by the times that ranks agree on, this plan has buckets wait as well.
            waits_ns = head_of_line_ns(plan, ready_ns)
            moves = 100 * min(stall_ns, waits_ns) > STALL_PERCENT * backward_ns
            return Decision(by_readiness if moves else plan, why, self.costs)
        if model.is_small:
            return Decision(plan, f"kept: fewer bytes in all than a bucket costs; {text}", self.costs)
        problem = model.problem(ready_ns, self.costs)
        name, best = best_plan(problem, {"ready": by_readiness, "static": self.static(ready_ns)})
        now, then = timeline(plan, problem), timeline(best, problem)
        gain_fs = now.finish - then.finish
        why = f"{name} ends {gain_fs / 1e12:.3f} ms earlier than the plan in use; {text}"
        moves = 100 * gain_fs > GAIN_PERCENT * then.backward_end
        return Decision(best if moves else plan, why, self.costs)

    def follow(self, model: Model) -> None:
        """Goes on with another model of the same parameters, whose buckets share the link: what it takes is kept.

        Where ranks have reported, the rounds go on behind the first report: the model's own copies are soon known.
        """
        self.model, self.round = model, REPORTS[0] + 2 if self.reports else 0

    def static(self, ready_ns: Sequence[int]) -> Plan:
        """torch's plan: by rank 0's order of arrival, or by readiness where that is not known (a plan was loaded)."""
        model = self.model
        return static_plan(model.kinds, model.caps, model.cap_policy, self.arrival or ready_order(ready_ns))

    def _next_report(self, number: int) -> int | None:
        """`number` if that round reports, else the next that does; None: there are no more reports."""
        since = number - REPORTS[-1]
        if since <= 0:
            return next(one for one in REPORTS if one >= number)
        return number + -since % self.replan_every if self.replan_every else None

    def _learn(self, samples: Sequence[int], plan: Plan) -> None:
        """Keeps what the latest rounds have measured, whatever their plan."""
        buckets = len(plan)
        sizes = [
            None
            if any(self.model.kinds[number].alone for number in members)  # a sparse gradient, whose size is not known
            else sum(self.model.wire_bytes[number] for number in members)
            for members in plan
        ]
        for row in range(_WINDOW):
            at = row * (4 * buckets + 1)
            ends, queues, packs, unpacks = (samples[at + k * buckets : at + (k + 1) * buckets] for k in range(4))
            probe = samples[at + 4 * buckets]
            measured = _Round(self.model.copies, None if probe == NO_SAMPLE else max(-probe, 0), [], [], [])
            if NO_SAMPLE not in ends:
                rows = [CollectiveTimes(-end, -queued) for end, queued in zip(ends, queues, strict=True)]
                measured.wire.extend(busy_periods(rows, sizes))
                known = [(size, index) for index, size in enumerate(sizes) if size is not None]
                measured.pack.extend((size, max(-packs[index], 0)) for size, index in known)
                measured.unpack.extend((size, max(-unpacks[index], 0)) for size, index in known)
            if measured.wire or measured.probe_ns is not None:
                self._rounds.append(measured)

    def _fitted(self) -> Costs | None:
        """Fits the costs to what was measured; None if the link's cannot be (collectives of fewer than two sizes)."""
        link = self.model.link
        if link is not None:
            wire: Linear | None = Linear.of_link(*link)
        else:
            # The probe runs beside the first bucket's packing, so the shortest one is its latency.
            probes = [one.probe_ns for one in self._rounds if one.probe_ns is not None]
            least = [(PROBE_BYTES, min(probes))] if probes else []
            # A line through a few large buckets takes their delays for latency: on a link of 1 Gbit/s, with backward on
            # the same core, 9 ms instead of 0.5.
            most_ns = min(probes, default=None)
            wire = fit(least + [sample for one in self._rounds for sample in one.wire], most_ns)
        if wire is None:
            return None
        alike = [one for one in self._rounds if one.copies == self.model.copies]
        pack = fit_copy([sample for one in alike for sample in one.pack])
        unpack = fit_copy([sample for one in alike for sample in one.unpack])
        return Costs(wire=wire, pack=pack, unpack=unpack)


@dataclass(frozen=True)
class _Round:
    """One profiled round as all ranks agree on it: the probe's time in ns, and (bytes, ns) samples of buckets.

    Args:
        copies: see `Model`.
    """

    copies: Hashable
    probe_ns: int | None
    wire: list[tuple[int, int]]
    pack: list[tuple[int, int]]
    unpack: list[tuple[int, int]]


def head_of_line_ns(plan: Plan, ready_ns: Sequence[int]) -> int:
    """How long a plan's buckets would wait for earlier ones in total, if gradients were ready at these times."""
    total_ns = head_ns = 0
    for members in plan:
        bucket_ns = max(ready_ns[number] for number in members)
        head_ns = max(head_ns, bucket_ns)
        total_ns += head_ns - bucket_ns
    return total_ns
