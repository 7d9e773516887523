"""One backward on many clusters: what each policy leaves exposed of communication, and where planning loses."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from ..bucketing import BucketCaps
from ..cost_model import FREE, FS_PER_NS, Costs
from ..timeline import Problem
from .networks import Network
from .noise import Noise
from .simulate import Outcome, agreed, compare, on_network, policy_plans

# Few ranks need many steps for their mean.
_MOST_STEPS, _RANK_STEPS = 16, 8192
# Shares of a step: below the first a gain is called none, below the second a loss.
GAIN, LOSS = 0.005, 0.0005
# What a policy that plans must not lose to. What it gains, it gains on `static`.
RIVALS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"planned": ("static", "ready", "capped"), "capped": ("static", "ready")}
)


@dataclass(frozen=True)
class Case:
    """What runs on every rank.

    Args:
        problem: backward; its line for the wire is not used.
        forward_ns: how long forward takes; 0: not known, and shares are of backward.
    """

    problem: Problem
    forward_ns: int = 0


@dataclass(frozen=True)
class Steps:
    """Steps on one cluster under each policy, the mean over them.

    Args:
        compute_ms: forward and backward of the slowest rank.
        exposed_ms: what communication adds to that, by policy.
    """

    compute_ms: float
    exposed_ms: Mapping[str, float]

    def share(self, policy: str) -> float:
        """How much of a step is exposed communication."""
        return self.exposed_ms[policy] / (self.compute_ms + self.exposed_ms[policy])

    def saved(self, *, by: str = "planned", of: str = "static") -> float:
        """What one policy saves of a step under another."""
        return (self.exposed_ms[of] - self.exposed_ms[by]) / (self.compute_ms + self.exposed_ms[of])


@dataclass(frozen=True)
class Row:
    """One cluster.

    Args:
        network: which.
        ranks: how many.
        quiet: without noise.
        noisy: with noise.
        buckets: of each policy's plan without noise, by policy.
    """

    network: Network
    ranks: int
    quiet: Steps
    noisy: Steps
    buckets: Mapping[str, int]

    def saved(self, policy: str) -> tuple[float, float]:
        """What a policy saves of a step under `static`, without and with noise."""
        return self.quiet.saved(by=policy), self.noisy.saved(by=policy)

    def loss(self, policy: str) -> tuple[float, str]:
        """What a policy adds to a step under the rival that beats it most, as a share of that, and which that is."""
        sides = (("", self.quiet), (", noise", self.noisy))
        losses = [(-steps.saved(by=policy, of=of), of + how) for how, steps in sides for of in RIVALS[policy]]
        return max(losses, key=lambda loss: loss[0])

    def loses(self, policy: str) -> bool:
        """Whether that is more than nothing."""
        return self.loss(policy)[0] > LOSS

    def gains(self, policy: str) -> bool:
        """Whether a policy loses to none and saves something."""
        return not self.loses(policy) and max(self.saved(policy)) >= GAIN

    def verdict(self, policy: str) -> str:
        """That a policy loses, or that it gains nothing."""
        share, rival = self.loss(policy)
        if self.loses(policy):
            return f"LOSES {share:.2%} to {rival}"
        return "" if self.gains(policy) else "no gain"


def rows(
    case: Callable[[Network], Case], networks: Sequence[Network], ranks: Sequence[int], noise: Noise, caps: BucketCaps
) -> Iterator[Row]:
    """Simulates one backward on many clusters.

    Args:
        case: what runs on a network.
        networks: which.
        ranks: how many, one row each.
        noise: how ranks differ.
        caps: limits of buckets.
    """
    for network in networks:
        plain, forward_ns = case(network).problem, case(network).forward_ns
        for count in ranks:
            known = replace(plain, ready_ns=_agreed_ns(plain.ready_ns, count, noise))
            plans = [policy_plans(on_network(seen, network, count, caps), caps) for seen in (plain, known)]
            steps = max(1, min(_MOST_STEPS, _RANK_STEPS // count))
            quiet = compare(plain, plans[0], count, network)
            noisy = compare(plain, plans[1], count, network, noise=noise, steps=1 if noise.quiet else steps)
            buckets = {name: len(plan) for name, plan in plans[0].items()}
            yield Row(network, count, _mean(quiet, forward_ns), _mean(noisy, forward_ns), buckets)


@functools.lru_cache
def _agreed_ns(ready_ns: tuple[int, ...], ranks: int, noise: Noise) -> tuple[int, ...]:
    """Ready times as ranks agree on them, whatever the network and the wire."""
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


def _mean(found: Mapping[str, Sequence[Outcome]], forward_ns: int) -> Steps:
    alone = statistics.fmean(float(step.alone.max()) for step in next(iter(found.values()))) / FS_PER_NS
    exposed = {name: statistics.fmean(step.exposed_ns for step in steps) / 1e6 for name, steps in found.items()}
    return Steps((forward_ns + alone) / 1e6, exposed)
