"""Packer: its layout covers every tensor, and it computes what the kernels' definition does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st
from support.buckets import FLOATS, Guarded, assert_same, poison
from support.sweep import sweep

from fusedreduce.kernels import counting, reference
from fusedreduce.kernels.packer import Packer
from fusedreduce.kernels.table import PointerTable

dtypes = st.one_of(
    st.lists(st.sampled_from(FLOATS), min_size=1, max_size=5), st.lists(st.just(torch.float64), min_size=1)
)


@st.composite
def tensors_and_wires(draw: st.DrawFn) -> tuple[list[torch.Tensor], torch.dtype | None]:
    """Tensors of one to three dimensions, some transposed, at addresses of any alignment."""
    kinds = draw(dtypes)
    tensors = []
    for number, kind in enumerate(kinds):
        shape = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
        generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)) + number)
        values = torch.randn(shape, generator=generator, dtype=torch.float64).to(kind)
        flat = Guarded.of(values.flatten(), draw(st.sampled_from([0, 1, 3]))).inner
        tensors.append(flat.view(shape).mT if draw(st.booleans()) and len(shape) > 1 else flat.view(shape))
    wide = torch.float64 if kinds[0] is torch.float64 else torch.float32
    return tensors, draw(st.sampled_from([None, wide, torch.bfloat16, torch.float16]))


@given(tensors_and_wires(), st.sampled_from([1.0, 2.0, 3.0]), st.sampled_from([1.0, 0.5, 7.0]), st.booleans())
@sweep(60)
def test_a_packer_computes_what_the_definition_does(
    given_: tuple[list[torch.Tensor], torch.dtype | None], divisor: float, scale: float, missing: bool
) -> None:
    tensors, wire_dtype = given_
    packer = Packer(tensors, wire_dtype)
    packed: list[Any] = [None if missing and number == 0 else one for number, one in enumerate(tensors)]
    packer.wire.fill_(float("nan"))
    wire = packer.pack(packed, divisor)
    wanted = poison(len(wire), wire.dtype)
    reference.pack(packed, packer.chunks, PointerTable(), wanted, divisor)
    assert wire is packer.wire and not wire.isnan().any()
    assert_same(wire, wanted)
    results: list[Any] = [None if one is None else torch.full_like(one, float("nan")) for one in packed]
    expected: list[Any] = [None if one is None else one.clone() for one in results]
    packer.unpack(wire, results, scale)
    factor = torch.tensor([scale], dtype=packer.chunks.compute_dtype)
    reference.unpack(expected, packer.chunks, PointerTable(), wire, factor)
    for ours, theirs in zip(results, expected, strict=True):
        if ours is not None:
            assert not ours.isnan().any()
            assert_same(ours, theirs)


@given(tensors_and_wires())
@sweep(60)
def test_its_layout_covers_each_tensor_once(given_: tuple[list[torch.Tensor], torch.dtype | None]) -> None:
    tensors, wire_dtype = given_
    packer = Packer(tensors, wire_dtype)
    covered = torch.zeros(len(packer.wire), dtype=torch.int64)
    for one, offset in zip(tensors, packer.offsets, strict=True):
        assert offset * packer.wire.itemsize % 16 == 0
        covered[offset : offset + one.numel()] += 1
    assert covered.sum() == sum(one.numel() for one in tensors) and not (covered > 1).any()
    if wire_dtype is None:
        packer.pack(tensors)
        results = [torch.empty_like(one) for one in tensors]
        packer.unpack(packer.wire, results)
        for ours, theirs in zip(results, tensors, strict=True):
            assert_same(ours, theirs)


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")
def test_each_way_is_one_launch() -> None:
    tensors = [torch.randn(3, 5), torch.randn(7).half()]
    packer = Packer(tensors, torch.float16)
    with counting.count_launches() as packed:
        packer.pack(tensors, 3.0)
    with counting.count_launches() as unpacked:
        packer.unpack(packer.wire, tensors, torch.tensor([0.5]))
    assert [one[0].launches for one in (packed, unpacked)] == [1, 1]


def test_tensors_that_are_other_than_it_was_made_for_are_refused() -> None:
    tensors = [torch.ones(3, 5), torch.ones(7)]
    packer = Packer(tensors, torch.bfloat16)
    packer.pack(tensors)
    before = packer.wire.clone()
    with pytest.raises(ValueError, match="got 1 gradients for a layout of 2 slots"):
        packer.pack(tensors[:1])
    with pytest.raises(ValueError, match=r"gradient 0 has shape \(5, 3\)"):
        packer.pack([torch.ones(5, 3), tensors[1]])
    with pytest.raises(TypeError, match="gradient 1 is torch.float16, its slot expects torch.float32"):
        packer.pack([tensors[0], torch.ones(7).half()])
    with pytest.raises(TypeError, match="wire buffer is torch.int32"):
        packer.unpack(torch.ones(len(packer.wire), dtype=torch.int32), tensors)
    assert_same(packer.wire, before)


def test_a_packer_needs_tensors_on_one_device() -> None:
    with pytest.raises(ValueError, match="one device, got no tensors"):
        Packer([])
    with pytest.raises(ValueError, match="one device, got cpu, meta: make one for each device"):
        Packer([torch.ones(1), torch.ones(1, device="meta")])
    with pytest.raises(TypeError, match="float64"):
        Packer([torch.ones(1), torch.ones(1).double()])
