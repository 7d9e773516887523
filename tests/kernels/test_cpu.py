"""cpu.py bit for bit against the definition, slot by slot: however a layout is divided."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.buckets import FLOATS, Case, Guarded, assert_same, cases, divisors, inner, poison
from support.sweep import sweep

from fusedreduce.kernels import counting, cpu, dispatch, few_ops, reference, runs
from fusedreduce.kernels.table import ChunkTable, PointerTable, Shape


def _shaped(numel: int, seed: int) -> Shape:
    """Size and strides of a dense tensor of `numel` elements: flat, or transposed where it divides."""
    if numel and numel % 3 == 0 and seed % 2:
        return (3, numel // 3), (1, 3)
    return (numel,), (1,)


def _as_shaped(guarded: list[Guarded | None], shapes: list[Shape]) -> list[torch.Tensor | None]:
    return [
        None if one is None else one.inner.as_strided(size, strides, one.inner.storage_offset())
        for one, (size, strides) in zip(guarded, shapes, strict=True)
    ]


def _packed_slot_by_slot(case: Case, guarded: list[Guarded | None]) -> torch.Tensor:
    """The definition: every slot alone, zeros everywhere else."""
    chunks = case.table()
    wire = torch.zeros(chunks.wire_numel, dtype=case.wire)
    divisor = torch.tensor(case.scalar, dtype=case.compute)
    for slot, one in enumerate(guarded):
        if one is not None:
            begin = chunks.offsets[slot]
            quotient = one.inner.to(case.compute) / divisor
            wire[begin : begin + one.inner.numel()] = reference.round_once(quotient, case.wire)
    return wire


# `dispatch` is what calls cpu once its checks have passed.
PATHS = pytest.mark.parametrize("path", [cpu, few_ops, dispatch], ids=["cpu", "few_ops", "dispatch"])
SIZES = st.tuples(st.sampled_from([1, 8, 100, 10**6]), st.sampled_from([16, 200, 10**6]), st.sampled_from([64, 10**6]))


@contextmanager
def _on_the_torch_path(sizes: tuple[int, int, int] | None = None) -> Iterator[None]:
    """With sizes of large slots, runs and blocks so small that few elements make many of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fusedreduce.kernels.variants.interpreted", lambda: False)
        if sizes is not None:
            large, run, block = sizes
            patch.setattr(runs, "LARGE_NUMEL", large)
            patch.setattr(runs, "RUN_NUMEL", run)
            patch.setattr(cpu, "BLOCK_NUMEL", block)
        yield


@PATHS
@given(cases(divisors()), SIZES, st.booleans(), st.integers(0, 3))
@sweep(200)
def test_pack_is_slot_by_slot_however_it_is_shaped(
    path: Any, case: Case, sizes: tuple[int, int, int], shaped: bool, seed: int
) -> None:
    shapes = [_shaped(numel, seed) for numel in case.numels]
    guarded = case.gradients()
    gradients = _as_shaped(guarded, shapes)
    for one in gradients:
        if one is not None and path is dispatch:
            one.requires_grad_(seed % 2 == 0)
    chunks, pointers = case.table(shapes=shapes if shaped else None), PointerTable()
    wire = Guarded.of(poison(chunks.wire_numel, case.wire), case.wire_shift)
    expected = _packed_slot_by_slot(case, case.gradients())
    with _on_the_torch_path(sizes):
        for _ in range(2):  # what the first call remembers must not change the second
            wire.inner.copy_(poison(chunks.wire_numel, case.wire))
            path.pack(gradients, chunks, pointers, wire.inner, case.scalar)
            assert_same(wire.inner, expected)
            assert not wire.inner.requires_grad
    wire.assert_edges_untouched()


@PATHS
@given(cases((1.0, 0.5, 3.0)), SIZES, st.booleans(), st.integers(0, 3))
@sweep(200)
def test_unpack_is_slot_by_slot_however_it_is_shaped(
    path: Any, case: Case, sizes: tuple[int, int, int], shaped: bool, seed: int
) -> None:
    shapes = [_shaped(numel, seed) for numel in case.numels]
    chunks = case.table(shapes=shapes if shaped else None)
    wire = case.travelled(float("nan"))
    before, guarded = wire.clone(), case.gradients(poisoned=True)
    gradients = _as_shaped(guarded, shapes)
    scale = torch.tensor([case.scalar], dtype=case.compute)
    pointers = PointerTable()
    with _on_the_torch_path(sizes):
        for _ in range(2):
            path.unpack(gradients, chunks, pointers, wire, scale)
            for slot, one in enumerate(guarded):
                if one is not None:
                    one.assert_edges_untouched()
                    product = wire[chunks.offsets[slot] :][: one.inner.numel()].to(case.compute) * scale
                    assert_same(one.inner, reference.round_once(product, case.dtypes[slot]))
    assert_same(wire, before)


def test_views_follow_a_wire_that_has_moved() -> None:
    shapes: list[Shape] = [((4,), (1,)), ((3,), (1,))]
    chunks = ChunkTable([4, 3], [0, 4], [torch.float32] * 2, 8, shapes=shapes)
    pointers = PointerTable()
    kept = []
    for value in (2.0, 4.0, 6.0):
        wire = torch.full((8,), float("nan"))
        kept.append(wire)
        gradients = [torch.full((4,), value), torch.full((3,), -value)]
        cpu.pack(gradients, chunks, pointers, wire, 2.0)
        assert wire.tolist() == [value / 2] * 4 + [-value / 2] * 3 + [0.0]
        cpu.unpack(gradients, chunks, pointers, wire.mul_(8), torch.tensor([1.0]))
        assert gradients[0].tolist() == [value * 4] * 4 and gradients[1].tolist() == [-value * 4] * 3
    assert kept[0].tolist() == [8.0] * 4 + [-8.0] * 3 + [0.0], "an old wire is not written to"


@pytest.mark.parametrize("wire_dtype", FLOATS)
def test_padding_of_every_length_is_zeros(wire_dtype: torch.dtype) -> None:
    """Some of it is zeroed as a range, some by its indices: none is left out between the two."""
    lengths = [*range(140), 1000]
    offsets = np.cumsum([length + 2 for length in lengths]) - 2  # slots of two elements, each behind its padding
    numel = int(offsets[-1]) + 2 + 64
    shapes: list[Shape] = [((2,), (1,))] * len(lengths)
    chunks = ChunkTable([2] * len(lengths), offsets.tolist(), [torch.float32] * len(lengths), numel, shapes=shapes)
    wire = torch.full((numel,), float("nan"), dtype=wire_dtype)
    gradients = [torch.full((2,), 6.0) for _ in lengths]
    cpu.pack(gradients, chunks, PointerTable(), wire, 3.0)
    expected = torch.zeros(numel, dtype=wire_dtype)
    for offset in offsets.tolist():
        expected[offset : offset + 2] = 2.0
    assert_same(wire, expected)


# The quick forms: what torch.cat lays out, what is converted in blocks, and what torch divides in 16 bits.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("divisor", [1.0, 2.0, 3.0, 7.0, 1000.0, 2.0**60, 2.0**100])
def test_every_16_bit_number_is_divided_in_fp32_and_rounded_once(dtype: torch.dtype, divisor: float) -> None:
    """torch's own operator does it, vectorised and not; nothing promises that but this test."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    for gradient in (every, every[1:1000], every[::3].contiguous()):
        wire = torch.empty_like(gradient)
        numel = gradient.numel()
        chunks = ChunkTable([numel], [0], [dtype], numel, shapes=[((numel,), (1,))])
        cpu.pack([gradient], chunks, PointerTable(), wire, divisor)
        assert_same(wire, (gradient.float() / torch.tensor(divisor)).to(dtype))
        cpu.unpack([wire], chunks, PointerTable(), gradient.clone(), torch.tensor([divisor]))
        assert_same(wire, (gradient.float() * torch.tensor(divisor)).to(dtype))
        cpu.scale([wire.copy_(gradient)], chunks, PointerTable(), torch.tensor([0.1 * divisor]))
        assert_same(wire, (gradient.float() * torch.tensor(0.1 * divisor)).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("divisor", [1.0, 2.0, 3.3, 257.0, 301.0, 2049.0, 65537.0])
def test_in_place_the_divisor_is_not_rounded_to_the_wires_dtype(dtype: torch.dtype, divisor: float) -> None:
    compute = torch.float64 if dtype is torch.float64 else torch.float32
    gradient = torch.randn(5000).to(dtype)
    chunks = ChunkTable([5000], [0], [dtype], 5000, shapes=[((5000,), (1,))])
    for pack in (reference.pack, cpu.pack):
        wire = gradient.clone()
        by = torch.tensor([divisor], dtype=compute)
        pack([wire], chunks, PointerTable(), wire, divisor)
        assert_same(wire, (gradient.to(compute) / by).to(dtype))


@st.composite
def _joinable(draw: st.DrawFn) -> tuple[list[Shape], list[int]]:
    """Dense shapes that mostly differ in their first dimension only, and the gap before each and after the last."""
    rows = draw(st.sampled_from([(), (), (3,), (2, 5)]))
    shapes: list[Shape] = []
    for _ in range(draw(st.integers(1, 9))):
        size = (draw(st.integers(0 if not rows else 1, 40)), *rows)
        if draw(st.integers(0, 7)) == 0:
            size = draw(st.sampled_from([(), (7,), (2, 2), (1, 3)]))
        shapes.append((size, torch.empty(size).stride()))
    gaps = [0] * len(shapes) if draw(st.booleans()) else [draw(st.integers(0, 3)) for _ in shapes]
    return shapes, [*gaps, draw(st.sampled_from([0, 3, 100]))]


@given(
    _joinable(),
    st.sampled_from(FLOATS),
    st.sampled_from(FLOATS),
    st.sampled_from([1.0, 2.0, 3.0]),
    st.sampled_from(["fresh", "missing", "own slots"]),
    st.integers(0, 2**20),
)
@settings(max_examples=150)
def test_small_gradients_of_any_shapes_are_packed_and_unpacked_slot_by_slot(
    layout: tuple[list[Shape], list[int]], dtype: torch.dtype, wire_dtype: torch.dtype, by: float, kind: str, seed: int
) -> None:
    shapes, gaps = layout
    generator = torch.Generator().manual_seed(seed)
    numels, offsets, end = [int(np.prod(size)) for size, _ in shapes], [], 0
    for numel, gap in zip(numels, gaps, strict=False):
        offsets.append(end + gap)
        end += gap + numel
    wire = Guarded.of(poison(end + gaps[-1], wire_dtype), seed % 4)
    gradients: list[torch.Tensor | None] = []
    for nth, ((size, strides), offset) in enumerate(zip(shapes, offsets, strict=True)):
        one = torch.randn(size, generator=generator).to(dtype)
        if kind == "own slots" and dtype is wire_dtype and nth % 2:
            one = wire.inner.as_strided(size, strides, wire.inner.storage_offset() + offset).copy_(one)
        gradients.append(None if kind == "missing" and nth % 3 == 1 else one)
    expected = torch.zeros(wire.inner.numel(), dtype=wire_dtype)
    for gradient, offset, numel in zip(gradients, offsets, numels, strict=True):
        if gradient is not None:
            expected[offset : offset + numel] = (gradient.float() / torch.tensor(by)).to(wire_dtype).reshape(-1)
    chunks, pointers = ChunkTable(numels, offsets, [dtype] * len(shapes), end + gaps[-1], shapes=shapes), PointerTable()
    cpu.pack(gradients, chunks, pointers, wire.inner, by)
    wire.assert_edges_untouched()
    assert_same(wire.inner, expected)
    cpu.unpack(gradients, chunks, pointers, wire.inner, torch.tensor([by]))
    for gradient, offset, numel in zip(gradients, offsets, numels, strict=True):
        if gradient is not None:
            product = expected[offset : offset + numel].float() * torch.tensor(by)
            assert_same(gradient.reshape(-1), product.to(dtype))


def test_runs_that_grow_share_one_block_of_memory() -> None:
    numels = [12_000 + nth // 36 * 90 + nth % 2 for nth in range(10 * 36)]
    offsets = [0, *np.cumsum(numels).tolist()]
    # In no shape that torch.cat lays out.
    shapes: list[Shape] = [((n,), (1,)) if slot % 2 else ((n, 1), (1, 1)) for slot, n in enumerate(numels)]
    chunks = ChunkTable(numels, offsets[:-1], [torch.float32] * len(numels), offsets[-1], shapes=shapes)
    gradients = [torch.full(size, 3.0) for size, _ in shapes]
    wire, pointers, by = torch.empty(offsets[-1], dtype=torch.bfloat16), PointerTable(), torch.tensor([3.0])
    for _ in range(2):
        cpu.pack(gradients, chunks, pointers, wire, 3.0)
        assert torch.equal(wire, torch.ones_like(wire))
        cpu.unpack(gradients, chunks, pointers, wire, by)
        assert all(bool((gradient == 3.0).all()) for gradient in gradients)
    staged = [block for block, _ in pointers.kept._staged.values()]
    assert len(staged) > 1 and len({block.untyped_storage().data_ptr() for block in staged}) == 1


# What `dispatch` calls once its checks have passed.


@pytest.mark.parametrize("known", [True, False], ids=["shapes known", "unknown"])
@pytest.mark.parametrize("wire_dtype", FLOATS)
def test_calls_that_are_checked_take_few_operators(wire_dtype: torch.dtype, known: bool) -> None:
    numels = [6] * 300
    shapes: list[Shape] = [((2, 3), (3, 1))] * 300
    offsets = list(range(0, 6 * 300, 6))
    dtypes = [torch.float32] * 300
    chunks = ChunkTable(numels, offsets, dtypes, 6 * 300, shapes=shapes if known else None)
    gradients = [torch.ones(2, 3) for _ in numels]
    wire = torch.empty(6 * 300, dtype=wire_dtype)
    with _on_the_torch_path(), counting.count_launches() as counted:
        dispatch.pack(gradients, chunks, PointerTable(), wire, 3.0)
        dispatch.unpack(gradients, chunks, PointerTable(), wire, torch.tensor([3.0]))
    assert [one.path for one in counted] == ["torch", "torch"]
    assert max(one.launches for one in counted) <= 6, "the definition takes three for each gradient"


def test_of_one_buffer_the_only_slot_may_begin_behind_its_start() -> None:
    chunks = ChunkTable([3], [0], [torch.float32], 3, begins=[2])
    flat, wire = torch.arange(6.0), torch.empty(3)
    cpu.pack([flat], chunks, PointerTable(), wire, 2.0)
    assert wire.tolist() == [1.0, 1.5, 2.0]
    cpu.unpack([flat], chunks, PointerTable(), wire, torch.tensor([4.0]))
    assert flat.tolist() == [0.0, 1.0, 4.0, 6.0, 8.0, 5.0]


def test_memory_that_is_kept_can_be_used_outside_the_inference_mode_that_it_was_made_in() -> None:
    shapes: list[Shape] = [((2, 1), (1, 1)), ((3,), (1,))]
    chunks = ChunkTable([2, 3], [0, 2], [torch.float32] * 2, 5, shapes=shapes)
    gradients, pointers = [torch.full((2, 1), 6.0), torch.full((3,), 6.0)], PointerTable()
    wire = torch.empty(5, dtype=torch.bfloat16)
    with _on_the_torch_path():
        for inference in (True, False):
            with torch.inference_mode(inference):
                dispatch.pack(gradients, chunks, pointers, wire, 3.0)
                dispatch.unpack(gradients, chunks, pointers, wire, torch.tensor([3.0]))
            assert wire.tolist() == [2.0] * 5 and gradients[0].tolist() == [[6.0], [6.0]]


# On a GPU without the kernels.


@given(cases((1.0, 0.5, 3.0)))
@settings(max_examples=50)
def test_scaling_in_few_operators_is_slot_by_slot(case: Case) -> None:
    chunks, guarded = case.table(), case.gradients()
    before = [None if one is None else one.inner.clone() for one in guarded]
    factor = torch.tensor([case.scalar], dtype=case.compute)
    few_ops.scale(inner(guarded), chunks, PointerTable(), factor)
    for slot, (one, was) in enumerate(zip(guarded, before, strict=True)):
        if one is not None and was is not None:
            assert_same(one.inner, reference.round_once(was.to(case.compute) * factor, case.dtypes[slot]))
            one.assert_edges_untouched()


@pytest.mark.parametrize("wire_dtype", FLOATS)
def test_operators_of_a_bucket_on_a_gpu_without_the_kernels(wire_dtype: torch.dtype) -> None:
    """A GPU is launched so many kernels, each of which costs the host some us, whatever the number of parameters."""
    numels = [2 * runs.LARGE_NUMEL, *[5] * 100]
    offsets = [0, *range(numels[0], numels[0] + 500, 5)]
    chunks = ChunkTable(numels, offsets, [torch.float32] * 101, numels[0] + 512)
    gradients = [torch.ones(numel) for numel in numels]
    wire, pointers, one = torch.empty(chunks.wire_numel, dtype=wire_dtype), PointerTable(), torch.ones(1)
    with counting.OperatorCounter() as packing:
        few_ops.pack(gradients, chunks, pointers, wire, 3.0)
    with counting.OperatorCounter() as unpacking:
        few_ops.unpack(gradients, chunks, pointers, wire, one)
    assert (packing.calls, unpacking.calls) == (4, 2)


@pytest.mark.parametrize("missing", [(), (0,), (1,), (2,), (0, 2)])
def test_of_a_shared_buffer_slots_may_be_missing(missing: tuple[int, ...]) -> None:
    """Slots that lie in one tensor as they do on the wire are looked at in one piece, if all of them are there."""
    numels, begins = [4, 3, 2], [0, 4, 7]
    chunks = ChunkTable(numels, begins, [torch.float32] * 3, 9, begins=begins)
    values = torch.arange(1.0, 10.0)
    values[8] = float("nan")
    there = torch.ones(9, dtype=torch.bool)
    for slot in missing:
        there[begins[slot] :][: numels[slot]] = False
    found = []
    for path in (reference, cpu):
        buffer, wire, pointers = values.clone(), torch.full((9,), 77.0), PointerTable()
        gradients = [None if slot in missing else buffer for slot in range(3)]
        sources, results = chunks.new_source_partials(torch.device("cpu")), chunks.new_partials(torch.device("cpu"))
        path.pack(gradients, chunks, pointers, wire, 2.0, sources)
        assert_same(wire, torch.where(there, values / 2, 0.0))
        path.unpack(gradients, chunks, pointers, wire, torch.tensor([8.0]), results)
        assert_same(buffer, torch.where(there, values * 4, values))
        found.append((sources.first_non_finite, results.sums, results.peaks, results.first_non_finite))
    for right, ours in zip(*found, strict=True):
        assert_same(ours, right)
