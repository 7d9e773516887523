"""When a product stands for a division: only where it has the same bits."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.buckets import divisors

from fusedreduce.kernels.division import division

KINDS: Mapping[torch.dtype, type[np.floating]] = {torch.float32: np.float32, torch.float64: np.float64}


@pytest.mark.parametrize(("compute", "lowest"), [(torch.float32, -126), (torch.float64, -1022)])
def test_a_product_stands_for_powers_of_two_with_normal_reciprocals(compute: torch.dtype, lowest: int) -> None:
    for power in range(lowest - 20, -lowest + 2):
        scalar, exact = division(2.0**power, compute)
        assert exact == (lowest <= power <= -lowest), power
        assert scalar == (2.0**-power if exact else 2.0**power)
    for divisor in (3.0, 6.0, 1.5, 257.0, 0.1, -2.0, 0.0, math.inf):
        assert not division(divisor, compute).exact


@given(divisors(), st.floats(width=32), st.sampled_from(list(KINDS)))
def test_it_has_the_bits_of_the_division(divisor: float, value: float, compute: torch.dtype) -> None:
    kind = KINDS[compute]
    with np.errstate(all="ignore"):
        expected = kind(value) / kind(divisor)
        scalar, exact = division(divisor, compute)
        got = kind(value) * kind(scalar) if exact else kind(value) / kind(scalar)
    assert got.tobytes() == expected.tobytes() or (np.isnan(got) and np.isnan(expected))


def test_the_divisor_is_rounded_to_the_dtype_of_the_division() -> None:
    assert division(0.1, torch.float64) == (0.1, False)
    assert division(0.1, torch.float32) == (float(np.float32(0.1)), False)
    assert division(1.0 + 2.0**-40, torch.float32) == (1.0, True)
