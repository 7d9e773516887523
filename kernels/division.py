"""Division by a number that the host knows: as a product where that is exact, and cheaper, else as a division."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
import torch

# Smallest normal number: 2 to this.
_LOWEST_EXPONENT = {torch.float32: -126, torch.float64: -1022}


class Division(NamedTuple):
    """How values are divided.

    Args:
        scalar: a number of the compute dtype.
        exact: the scalar is the divisor's reciprocal, and values are multiplied by it; else they are divided by it.
    """

    scalar: float
    exact: bool


@functools.lru_cache(maxsize=256)
def division(divisor: float, compute: torch.dtype) -> Division:
    """How to divide in `compute`, fp32 or fp64, so that the quotient is correctly rounded.

    A reciprocal is exact only for powers of two (1/3 is wrong in the last bit for a third of all values), and only
    where it and the divisor are normal numbers: a GPU may take subnormal ones for 0.

    Example: 8 -> multiply by 0.125; 3 -> divide by 3; 2^127 in fp32 -> divide, since 2^-127 is subnormal.
    """
    divisor = float(divisor) if compute is torch.float64 else float(np.float32(divisor))
    fraction, exponent = math.frexp(divisor)
    exact = fraction == 0.5 and abs(exponent - 1) <= -_LOWEST_EXPONENT[compute]
    return Division(1.0 / divisor if exact else divisor, exact)
