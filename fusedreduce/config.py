"""ReduceConfig: every option, settled once, checked when it is made."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

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

    Raises:
        ValueError: a value that is not accepted, with those that are.
    """

    wire: Wire = "native"
    stall_report_s: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.wire, str) or self.wire not in WIRES:
            accepted = ", ".join(map(repr, WIRES))
            raise ValueError(f"unknown wire {self.wire!r}: use one of {accepted}")
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
