"""reference.py bit for bit against its definition, and against fp64 arithmetic in numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.buckets import Case, Guarded, assert_same, cases, divisors, inner, poison
from support.sweep import sweep

from fusedreduce.kernels import reference
from fusedreduce.kernels.table import PointerTable


def _round_bf16(values: npt.NDArray[np.float32]) -> torch.Tensor:
    """fp32 -> bf16, to nearest, ties to even, by integer arithmetic on the bits."""
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    quiet = np.where(np.isnan(values), np.uint16(0x7FC0), rounded)
    return torch.from_numpy(quiet.view(np.int16).copy()).view(torch.bfloat16)


def _round(values: npt.NDArray[np.float32], dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.bfloat16:
        return _round_bf16(values)
    with np.errstate(over="ignore"):
        kind = {torch.float32: np.float32, torch.float16: np.float16}[dtype]
        return torch.from_numpy(values.astype(kind))


@given(cases(divisors(), fp64=False))
@sweep(600)
def test_pack_is_one_fp32_division_and_one_cast(case: Case) -> None:
    chunks = case.table()
    gradients = inner(case.gradients())
    wire = Guarded.of(poison(chunks.wire_numel, case.wire), case.wire_shift)
    reference.pack(gradients, chunks, PointerTable(), wire.inner, case.scalar)
    wire.assert_edges_untouched()
    expected = torch.zeros(chunks.wire_numel, dtype=case.wire)
    for slot, gradient in enumerate(gradients):
        if gradient is not None:
            with np.errstate(all="ignore"):
                quotient = (gradient.float().numpy() / np.float32(case.scalar)).astype(np.float32)
            begin = chunks.offsets[slot]
            expected[begin : begin + gradient.numel()] = _round(quotient, case.wire)
    assert_same(wire.inner, expected)


@given(cases((1.0, 0.5, 3.0), fp64=False))
@sweep(300)
def test_unpack_is_one_fp32_product_and_one_cast(case: Case) -> None:
    chunks = case.table()
    flat = torch.cat([case.values(slot).float() for slot in range(len(chunks))])
    wire = torch.zeros(chunks.wire_numel)
    wire[: flat.numel()] = flat
    wire = wire.to(case.wire)
    gradients = case.gradients(poisoned=True)
    reference.unpack(inner(gradients), chunks, PointerTable(), wire, torch.tensor([case.scalar]))
    for slot, one in enumerate(gradients):
        if one is not None:
            one.assert_edges_untouched()
            part = wire[chunks.offsets[slot] :][: one.inner.numel()].float().numpy()
            with np.errstate(all="ignore"):
                product = (part * np.float32(case.scalar)).astype(np.float32)
                assert_same(one.inner, _round(product, case.dtypes[slot]))


def _ulp(values: torch.Tensor) -> torch.Tensor:
    """Distance to the next value of the same dtype, in fp64."""
    info = torch.finfo(values.dtype)
    exponent = torch.frexp(values.double().abs().clamp_min(info.tiny)).exponent - 1
    return info.eps * 2.0 ** exponent.double()


@given(st.sampled_from([torch.float16, torch.bfloat16]), st.integers(0, 2**30))
@sweep(200)
def test_fp64_to_16_bit_rounds_once(dtype: torch.dtype, seed: int) -> None:
    """Nearest by exact comparison with both neighbours, ties to even; drawn close to ties, where two roundings fail."""
    generator = torch.Generator().manual_seed(seed)
    scales = 2.0 ** torch.randint(-20, 14, (300,), generator=generator)
    base = (torch.randn(300, generator=generator) * scales).to(dtype)
    step = _ulp(base)
    nudge = torch.tensor([0.0, 2.0**-30, -(2.0**-30)], dtype=torch.float64)
    values = base.double() + step * (0.5 + nudge[torch.randint(0, 3, (300,), generator=generator)])
    rounded = reference.round_once(values, dtype)
    down = (rounded.view(torch.int16) - 1).view(dtype).double()
    up = (rounded.view(torch.int16) + 1).view(dtype).double()
    error = (rounded.double() - values).abs()
    for neighbour in (down, up):
        other = (neighbour - values).abs()
        even = (rounded.view(torch.int16) & 1) == 0
        assert ((error < other) | ((error == other) & even) | ~neighbour.isfinite()).all()


@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [
        (1 + 2.0**-8 + 2.0**-40, torch.bfloat16, 1 + 2.0**-7),
        (1 + 2.0**-11 + 2.0**-40, torch.float16, 1 + 2.0**-10),
        (1e300, torch.float16, float("inf")),
        (1e300, torch.bfloat16, float("inf")),
        (-1e-300, torch.bfloat16, -0.0),
        (float("-inf"), torch.float16, float("-inf")),
        (3.4e38, torch.bfloat16, float("inf")),
    ],
)
def test_fp64_to_16_bit_at_the_edges(value: float, dtype: torch.dtype, expected: float) -> None:
    rounded = reference.round_once(torch.tensor([value], dtype=torch.float64), dtype)
    assert_same(rounded, torch.tensor([expected], dtype=torch.float64).to(dtype))
    assert reference.round_once(torch.tensor([float("nan")], dtype=torch.float64), dtype).isnan().all()


@given(cases(divisors(), fp64=True))
@sweep(100)
def test_fp64_is_divided_in_fp64(case: Case) -> None:
    chunks = case.table()
    gradients = [case.values(slot) for slot in range(len(chunks))]
    wire = torch.empty(chunks.wire_numel, dtype=case.wire)
    reference.pack(gradients, chunks, PointerTable(), wire, case.scalar)
    for slot, gradient in enumerate(gradients):
        with np.errstate(all="ignore"):
            quotient = torch.from_numpy(gradient.numpy() / np.float64(case.scalar))
        part = wire[chunks.offsets[slot] :][: gradient.numel()]
        assert_same(part, reference.round_once(quotient, case.wire))
