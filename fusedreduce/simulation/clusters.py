"""Simulates one backward on many clusters: the exposed communication of each policy, and where planning loses."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypedDict

from ..planning.bucketing import BucketCaps
from ..planning.cost_model import FREE, FS_PER_NS, Costs
from ..planning.plan import Plan
from ..planning.timeline import Problem
from .networks import Network
from .noise import Noise
from .simulate import Outcome, agreed, compare, on_network, policy_plans

# A mean over few ranks needs many steps.
_MOST_STEPS, _RANK_STEPS = 16, 8192
# Shares of a step: a smaller gain, or loss, counts as none.
GAIN, LOSS = 0.005, 0.0005
# The policies that a planning policy must not lose to. Its gain is that over `static`.
RIVALS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"planned": ("static", "ready", "capped"), "capped": ("static", "ready")}
)


@dataclass(frozen=True)
class Case:
    """The work of every rank.

    Args:
        problem: backward; its line for the wire is not used.
        forward_ns: duration of forward; 0: not known, and shares are of backward.
        wide: for buckets that are exchanged, see `exchange_lines`; None: they are all-reduced.
        measured: plans follow measured times; False: of `capped` and `planned` there are none.
        padded: the problem with the padding of a plan's buckets.
    """

    problem: Problem
    forward_ns: int = 0
    wide: float | None = None
    measured: bool = True
    padded: Callable[[Plan, Problem], Problem] = lambda _, problem: problem


@dataclass(frozen=True)
class Steps:
    """The mean step on one cluster under each policy.

    Args:
        compute_ms: forward and backward of the slowest rank.
        exposed_ms: by policy, what communication adds to that.
    """

    compute_ms: float
    exposed_ms: Mapping[str, float]

    def share(self, policy: str) -> float:
        """Exposed communication as a share of a step."""
        return self.exposed_ms[policy] / (self.compute_ms + self.exposed_ms[policy])

    def saved(self, *, by: str = "planned", of: str = "static") -> float:
        """The share of a step under policy `of` that policy `by` saves."""
        return (self.exposed_ms[of] - self.exposed_ms[by]) / (self.compute_ms + self.exposed_ms[of])


@dataclass(frozen=True)
class Row:
    """One cluster.

    Args:
        network: which reduces.
        ranks: number of ranks.
        quiet: steps without noise.
        noisy: steps with noise.
        buckets: by policy, the number of buckets of its plan without noise.
    """

    network: Network
    ranks: int
    quiet: Steps
    noisy: Steps
    buckets: Mapping[str, int]

    def saved(self, policy: str) -> tuple[float, float]:
        """The share of a step under `static` that a policy saves, without and with noise."""
        return self.quiet.saved(by=policy), self.noisy.saved(by=policy)

    def loss(self, policy: str) -> tuple[float, str]:
        """The share of a rival's step that a policy adds, for the rival that beats it most, and that rival's name."""
        sides = (("", self.quiet), (", noise", self.noisy))
        losses = [(-steps.saved(by=policy, of=of), of + how) for how, steps in sides for of in RIVALS[policy]]
        return max(losses, key=lambda loss: loss[0])

    def loses(self, policy: str) -> bool:
        """Whether a policy loses to a rival."""
        return self.loss(policy)[0] > LOSS

    def gains(self, policy: str) -> bool:
        """Whether a policy loses to no rival and saves something."""
        return not self.loses(policy) and max(self.saved(policy)) >= GAIN

    def verdict(self, policy: str) -> str:
        """Says that a policy loses, or gains nothing; "" if it gains."""
        share, rival = self.loss(policy)
        if self.loses(policy):
            return f"LOSES {share:.2%} to {rival}"
        return "" if self.gains(policy) else "no gain"


def rows(
    case: Callable[[Network, int], Case],
    networks: Sequence[Network],
    ranks: Sequence[int],
    noise: Noise,
    caps: BucketCaps,
) -> Iterator[Row]:
    """Simulates one backward on many clusters.

    Args:
        case: the work of every rank, by network and number of ranks.
        networks: to simulate.
        ranks: numbers of ranks to simulate.
        noise: how ranks differ.
        caps: limits of buckets.

    Yields:
        A row per network and number of ranks.
    """
    for network in networks:
        for count in ranks:
            work = case(network, count)
            plain, forward_ns = work.problem, work.forward_ns
            known = replace(plain, ready_ns=_agreed_ns(plain.ready_ns, count, noise))
            plans = [_plans(work, seen, network, count, caps) for seen in (plain, known)]
            steps = 1 if noise.quiet else max(1, min(_MOST_STEPS, _RANK_STEPS // count))
            how: _How = {"wide": work.wide, "padded": work.padded}
            quiet = compare(plain, plans[0], count, network, **how)
            noisy = compare(plain, plans[1], count, network, **how, noise=noise, steps=steps)
            buckets = {name: len(plan) for name, plan in plans[0].items()}
            yield Row(network, count, _mean(quiet, forward_ns), _mean(noisy, forward_ns), buckets)


class _How(TypedDict):
    wide: float | None
    padded: Callable[[Plan, Problem], Problem]


def _plans(work: Case, seen: Problem, network: Network, ranks: int, caps: BucketCaps) -> dict[str, Plan]:
    if not work.measured:
        return policy_plans(replace(seen, costs=replace(seen.costs, wire=FREE)), caps)
    return policy_plans(on_network(seen, network, ranks, caps, wide=work.wide), caps)


@functools.lru_cache
def _agreed_ns(ready_ns: tuple[int, ...], ranks: int, noise: Noise) -> tuple[int, ...]:
    """Ready times as ranks would agree on them, which do not depend on network and wire."""
    none = (0,) * len(ready_ns)
    problem = Problem(
        ready_ns=ready_ns,
        wire_bytes=none,
        size_bytes=none,
        groups=none,
        alone=frozenset(),
        cap_bytes=1,
        costs=Costs(wire=FREE),
    )
    return agreed(problem, ranks, noise).ready_ns


def _mean(outcomes: Mapping[str, Sequence[Outcome]], forward_ns: int) -> Steps:
    alone = statistics.fmean(float(step.alone.max()) for step in next(iter(outcomes.values()))) / FS_PER_NS
    exposed = {name: statistics.fmean(step.exposed_ns for step in steps) / 1e6 for name, steps in outcomes.items()}
    return Steps((forward_ns + alone) / 1e6, exposed)
