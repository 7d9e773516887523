"""ReduceConfig: every option, settled once, checked when it is made."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

CapPolicy = Literal["c10d", "strict"]
CAP_POLICIES: tuple[CapPolicy, ...] = ("c10d", "strict")
Policy = Literal["ready", "static"]
POLICIES: tuple[Policy, ...] = ("ready", "static")
Wire = Literal["native", "bf16", "fp16"]
WIRES: Mapping[str, torch.dtype | None] = {"native": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class ReduceConfig:
    """How gradients are reduced. Every rank must use the same values.

    Args:
        wire: dtype that travels. "native": the gradients' own (fp32 for a bucket of mixed dtypes); "bf16" or "fp16":
            divided by the world size in fp32, then rounded once.
        stall_report_s: log a bucket whose reduction has not finished after this many seconds; None: after 80 % of
            the process group's timeout. CUDA only: on CPU the timeout itself raises.
        overlap: start each bucket's reduction as soon as it is ready; False starts all of them when backward is done
            (to measure what overlap gains). Reducer and wrapper only.
        policy: "ready": in the order in which gradients became ready in the first step, and with a 16-bit wire
            fp32, bf16 and fp16 gradients share buckets; "static": one dtype per bucket, as torch. Reducer and
            wrapper only.
        cap_policy: "c10d": a bucket is closed once it has reached its limit; "strict": before it would exceed it.
            Reducer and wrapper only.

    Raises:
        ValueError: a value that is not accepted, with those that are.
    """

    wire: Wire = "native"
    stall_report_s: float | None = None
    overlap: bool = True
    policy: Policy = "ready"
    cap_policy: CapPolicy = "c10d"

    def __post_init__(self) -> None:
        if not isinstance(self.wire, str) or self.wire not in WIRES:
            accepted = ", ".join(map(repr, WIRES))
            raise ValueError(f"unknown wire {self.wire!r}: use one of {accepted}")
        if not isinstance(self.overlap, bool):
            raise ValueError(f"overlap must be True or False, got {self.overlap!r}")
        for name, value, allowed in (("policy", self.policy, POLICIES), ("cap_policy", self.cap_policy, CAP_POLICIES)):
            if value not in allowed:
                raise ValueError(f"unknown {name} {value!r}: use one of {', '.join(map(repr, allowed))}")
        stall = self.stall_report_s
        if stall is not None and not (isinstance(stall, int | float) and math.isfinite(stall) and stall > 0):
            raise ValueError(f"stall_report_s must be a positive number of seconds or None, got {stall!r}")

    def wire_dtype(self, gradient: torch.dtype) -> torch.dtype:
        """The dtype in which a bucket of `gradient`s travels."""
        dtype = WIRES[self.wire]
        return gradient if dtype is None else dtype

    def to_dict(self) -> dict[str, str | float | None]:
        """Plain values, as compared across ranks and logged."""
        return dataclasses.asdict(self)
