"""ReduceConfig, every option of a reduction, and the synchronisation modes; checked when they are made."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:  # the command line checks settings before anything imports torch
    import torch

CapPolicy = Literal["c10d", "strict"]
CAP_POLICIES: tuple[CapPolicy, ...] = ("c10d", "strict")
Policy = Literal["planned", "ready", "static"]
POLICIES: tuple[Policy, ...] = ("planned", "ready", "static")
# An agreement takes two steps after the two that are profiled for it.
LEAST_REPLAN_EVERY = 8
_MOST_LATENCY_US = 1e9
_LEAST_GBIT_PER_S = 1e-6
_MOST_GBIT_PER_S = 1e6
Op = Literal["mean", "sum"]
OPS: tuple[Op, ...] = ("mean", "sum")
Wire = Literal["native", "bf16", "fp16"]
CheckFinite = Literal["off", "count", "raise"]
CHECKS_FINITE: tuple[CheckFinite, ...] = ("off", "count", "raise")
WIRES: Mapping[Wire, str | None] = {"native": None, "bf16": "bfloat16", "fp16": "float16"}  # torch's names


@dataclass(frozen=True)
class Synchronous:
    """After each backward `.grad` holds its own average over all ranks."""


@dataclass(frozen=True)
class BoundedStaleness:
    """After step t `.grad` holds the average of step t - max_staleness: the same bytes on every rank.

    The first `max_staleness` steps leave `.grad` None. A rank that is late now and then delays nobody, as long as it
    catches up within so many steps. Each bucket has a wire buffer more per step. 0 is as Synchronous.

    Buffers that forward broadcasts from rank 0 are waited for in every forward, as by torch: where rank 0 may
    be the late one, leave that out (broadcast_buffers=False), or it delays all. So does whatever else ranks exchange in
    forward and backward (SyncBatchNorm).

    Args:
        max_staleness: steps.

    Raises:
        ValueError: no whole number, or below 0.
    """

    max_staleness: int

    def __post_init__(self) -> None:
        _check_count("max_staleness", self.max_staleness, 0)


@dataclass(frozen=True)
class Asynchronous:
    """`.grad` holds this rank's own gradient, and corrections: what earlier averages were more than its own, then.

    Ranks' parameters drift apart; `flush` brings them together.

    Args:
        max_in_flight: contributions under way; while there are so many, gradients merge into the next one.

    Raises:
        ValueError: no whole number, or below 1.
    """

    max_in_flight: int = 2

    def __post_init__(self) -> None:
        _check_count("max_in_flight", self.max_in_flight, 1)


@dataclass(frozen=True)
class FlushReport:
    """What a `flush` has done.

    Args:
        steps: that have landed.
        drift: largest difference of a parameter from the mean over all ranks, before they were made equal; 0.0 where
            they never differ.
        relative_drift: L2 norm of the differences over that of the mean, the largest of all ranks.
    """

    steps: int = 0
    drift: float = 0.0
    relative_drift: float = 0.0


SyncMode: TypeAlias = Synchronous | BoundedStaleness | Asynchronous


def staleness(mode: SyncMode) -> int:
    """By how many steps averages come later than their own."""
    return mode.max_staleness if isinstance(mode, BoundedStaleness) else 0


def is_synchronous(mode: SyncMode) -> bool:
    """Whether a step ends with its own averages."""
    return isinstance(mode, Synchronous) or mode == BoundedStaleness(0)


@dataclass(frozen=True, kw_only=True)
class ReduceConfig:
    """How gradients are reduced. Every rank must use the same values.

    Args:
        wire: dtype that travels. "native": the gradients' own (fp32 for a bucket of mixed dtypes); "bf16" or "fp16":
            divided by the world size in fp32, then rounded once. On fp16 the division is split: a power of two of
            about the root of the world size comes off after the sum, so that small values survive.
        op: "mean": the average over all ranks; "sum": their sum. (On an fp16 wire a power of two of at least the world
            size comes off ahead of that sum, which then cannot overflow there, and on again after it.) Reducer and
            wrapper only.
        stall_report_s: log a bucket whose reduction has not finished after this many seconds; None: after 80 % of
            the process group's timeout. CUDA only: on CPU the timeout itself raises.
        overlap: start each bucket's reduction as soon as it is ready; False starts all of them when backward is done
            (to measure what overlap gains). Reducer and wrapper only.
        policy: how parameters are cut into buckets, and in which order those are launched. "static": torch's rule;
            "ready": the same limits, in the order in which gradients become ready, and with a 16-bit wire fp32, bf16
            and fp16 gradients share buckets; "planned": what a model of the measured costs says ends first. "static"
            never follows a clock, nor does any policy under `torch.use_deterministic_algorithms`. Reducer and wrapper
            only. See docs/scheduling.md.
        replan_every: look at the plan again after so many synchronised steps; 0: only within the first 30.
        plan: a plan to keep to, as `plan_json()` gives it; one for another number of ranks is not used. Wrapper and
            reducer only.
        link: latency in us and bandwidth in Gbit/s of one all-reduce, for the cost model; None: measured.
        grad_stats: norms, largest values and shares flushed to zero, of every gradient in every synchronised step, as
            by-products of the reduction.
        check_finite: "count": find out in every step which rank had a NaN or Inf in which gradient before it was
            reduced, log it, and go on; "raise": NonFiniteGradientError on every rank at the end of backward, which on
            CUDA waits for the GPU. (With FusedGradScaler, whose scale is found by overflows, nothing is raised.)
        cap_policy: "c10d": a bucket is closed once it has reached its limit; "strict": before it would exceed it.
            Reducer and wrapper only.
        sync_mode: of which step the averages are that `.grad` holds after a backward: Synchronous(),
            BoundedStaleness(k) or Asynchronous(). See docs/modes.md. Reducer and wrapper only.

    Raises:
        ValueError: a value that is not accepted, with those that are.
    """

    wire: Wire = "native"
    op: Op = "mean"
    stall_report_s: float | None = None
    overlap: bool = True
    policy: Policy = "planned"
    cap_policy: CapPolicy = "c10d"
    replan_every: int = 1000
    link: tuple[float, float] | None = None
    plan: str | None = None
    grad_stats: bool = False
    check_finite: CheckFinite = "off"
    sync_mode: SyncMode = Synchronous()

    def __post_init__(self) -> None:
        if not isinstance(self.wire, str) or self.wire not in WIRES:
            accepted = ", ".join(map(repr, WIRES))
            raise ValueError(f"unknown wire {self.wire!r}: use one of {accepted}")
        for name in ("overlap", "grad_stats"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        choices: Mapping[str, tuple[str, ...]] = {
            "op": OPS,
            "policy": POLICIES,
            "cap_policy": CAP_POLICIES,
            "check_finite": CHECKS_FINITE,
        }
        for name, allowed in choices.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"unknown {name} {value!r}: use one of {', '.join(map(repr, allowed))}")
        stall = self.stall_report_s
        if stall is not None and not (isinstance(stall, int | float) and math.isfinite(stall) and stall > 0):
            raise ValueError(f"stall_report_s must be a positive number of seconds or None, got {stall!r}")

        every = self.replan_every
        if type(every) is not int or not (every == 0 or every >= LEAST_REPLAN_EVERY):
            raise ValueError(f"replan_every must be 0 or at least {LEAST_REPLAN_EVERY} steps, got {every!r}")
        _check_link(self.link)
        if not isinstance(self.sync_mode, SyncMode):
            raise ValueError(
                "sync_mode must be Synchronous(), BoundedStaleness(max_staleness) or Asynchronous(), got "
                f"{self.sync_mode!r}"
            )
        if not isinstance(self.plan, str | None):
            raise ValueError(f"plan must be the JSON text of a plan or None, got {type(self.plan).__name__}")

    def has_views(self, asked: bool) -> bool:
        """Whether gradients are views of the wire, if gradient_as_bucket_view asks for that: "native" only."""
        return asked and self.wire == "native"

    def divisor(self, ranks: int) -> float:
        """What every rank divides its gradients by, unless a step has a divisor of its own."""
        return float(ranks) if self.op == "mean" else 1.0

    def wire_dtype(self, gradient: torch.dtype) -> torch.dtype:
        """The dtype in which a bucket of gradients of dtype `gradient` travels."""
        return wire_dtype(self.wire) or gradient

    def wire_bytes(self, gradient: torch.Tensor) -> int:
        """What a gradient like `gradient` has on the wire; a complex one travels as real pairs."""
        if gradient.is_complex():
            return 2 * gradient.numel() * self.wire_dtype(gradient.dtype.to_real()).itemsize
        return gradient.numel() * self.wire_dtype(gradient.dtype).itemsize

    def to_dict(self) -> dict[str, object]:
        """Plain values, as compared across ranks and logged; of a plan, a digest."""
        digest = None if self.plan is None else hashlib.blake2b(self.plan.encode(), digest_size=8).hexdigest()
        return {**dataclasses.asdict(self), "plan": digest, "sync_mode": repr(self.sync_mode)}


@functools.cache  # the hook asks for every bucket
def wire_dtype(wire: Wire) -> torch.dtype | None:
    """A wire's dtype; None: the gradients' own."""
    import torch

    name = WIRES[wire]
    dtype: torch.dtype | None = None if name is None else getattr(torch, name)
    return dtype


def _check_link(link: object) -> None:
    if link is None:
        return
    numbers = isinstance(link, tuple) and len(link) == 2 and all(type(one) in (int, float) for one in link)
    latency_us, gbit_per_s = link if numbers and isinstance(link, tuple) else (-1.0, 0.0)
    if not (0 <= latency_us <= _MOST_LATENCY_US and _LEAST_GBIT_PER_S <= gbit_per_s <= _MOST_GBIT_PER_S):
        raise ValueError(
            f"link must be None or (latency in us, Gbit/s), 0 to {_MOST_LATENCY_US:g} and {_LEAST_GBIT_PER_S:g} to "
            f"{_MOST_GBIT_PER_S:g}; got {link!r}"
        )


def _check_count(name: str, value: object, least: int) -> None:
    if type(value) is not int or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
