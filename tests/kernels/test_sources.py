"""By-products of pack, on both paths: the first non-finite value of a gradient as given, and what the wire made 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st
from support.buckets import FLOATS, Case, Guarded, assert_same, cases, poison
from support.by_products import CPU, assert_first, assert_source_partials, expected_source_partials, planted
from support.sweep import sweep

from fusedreduce.kernels import cpu, reference, runs
from fusedreduce.kernels import pack as pack_file
from fusedreduce.kernels.table import ChunkTable, PointerTable, Shape, new_source_partials

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
interpreted = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")


def quick_pack(gradients: Any, chunks: ChunkTable, pointers: PointerTable, wire: torch.Tensor, *rest: Any) -> None:
    """`cpu.pack` as a reducer calls it; other calls are left to the reference."""
    shapes: list[Shape] | None = None if chunks.shared else [((numel,), (1,)) for numel in chunks.numels]
    begins = chunks.begins if chunks.shared else None
    known = ChunkTable(
        chunks.numels,
        chunks.offsets,
        chunks.dtypes,
        chunks.wire_numel,
        begins=begins,
        chunk_numel=chunks.chunk_numel,
        shapes=shapes,
    )
    cpu.pack(gradients, known, pointers, wire, *rest)


PACKS = [
    pytest.param(reference.pack, id="reference"),
    pytest.param(quick_pack, id="cpu"),
    pytest.param(pack_file.pack, id="kernel", marks=interpreted),
]
# Large ones flush; test_kernels.py compares the kernel with the reference at more.
DIVISORS = (1.0, 3.0, 1024.0, 2.0**100)


def _values(case: Case) -> list[torch.Tensor | None]:
    """Gradients with zeros of both signs among them, and on fp32 numbers that are 0 on a 16-bit wire."""
    values: list[torch.Tensor | None] = []
    for slot, missing in enumerate(case.missing):
        one = Guarded.of(case.values(slot), case.shifts[slot]).inner
        one[slot::7] = -0.0
        if one.dtype in (torch.float32, torch.float64):
            one[slot::5] *= 2.0**-30
        values.append(None if missing else one)
    return values


@given(cases(DIVISORS), st.sampled_from([1, 100, 10**6]), st.sampled_from([16, 200, 10**6]))
@sweep(150)
def test_torch_path_finds_what_is_wrong_with_sources(case: Case, large: int, block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "LARGE_NUMEL", large)
        patch.setattr(runs, "RUN_NUMEL", block)
        gradients = _values(case)
        plain = case.table()
        shapes: list[Shape] = [((numel,), (1,)) for numel in case.numels]
        chunks = ChunkTable(
            plain.numels, plain.offsets, plain.dtypes, plain.wire_numel, chunk_numel=case.chunk_numel, shapes=shapes
        )
        wire = Guarded.of(poison(chunks.wire_numel, case.wire), case.wire_shift)
        pointers, partials = PointerTable(), new_source_partials(chunks.data_rows, CPU)
        cpu.pack(gradients, chunks, pointers, wire.inner, case.scalar, partials)
        wire.assert_edges_untouched()
        assert_source_partials(partials, expected_source_partials(gradients, wire.inner, chunks))


@given(st.sampled_from([torch.float64, *FLOATS]), st.sampled_from(FLOATS), st.integers(0, 2**30))
@sweep(1000)
def test_a_source_is_never_missed_and_never_blamed_falsely(
    dtype: torch.dtype, wire_dtype: torch.dtype, seed: int
) -> None:
    """On the torch path; half of the examples are finite, though they may overflow on the wire."""
    if dtype is torch.float64 and wire_dtype is torch.float32:
        wire_dtype = torch.float64
    gradients, expected = planted(dtype, seed, 900)
    numels = [len(one) for one in gradients]
    offsets = np.cumsum([0, *numels[:-1]]).tolist()
    shapes: list[Shape] = [((numel,), (1,)) for numel in numels]
    chunks = ChunkTable(numels, offsets, [dtype] * 6, sum(numels), shapes=shapes, chunk_numel=(700, 8192)[seed % 2])
    wire, partials = torch.empty(sum(numels), dtype=wire_dtype), new_source_partials(chunks.data_rows, CPU)
    cpu.pack(gradients, chunks, PointerTable(), wire, 3.0, partials)
    assert_first(partials.first_non_finite, chunks, expected)


@pytest.mark.parametrize("pack", PACKS)
def test_an_overflow_on_the_wire_is_not_the_sources_fault(pack: Any) -> None:
    chunks = ChunkTable([100], [0], [torch.float32], 100)
    partials, wire = new_source_partials(1, CPU), torch.empty(100, dtype=torch.float16)
    gradient = torch.ones(100)
    gradient[37] = 70000.0
    pack([gradient], chunks, PointerTable(), wire, 1.0, partials)
    assert wire[37].item() == float("inf") and partials.first_non_finite.tolist() == [-1]
    gradient[41] = float("inf")
    pack([gradient], chunks, PointerTable(), wire, 1.0, partials)
    assert partials.first_non_finite.tolist() == [41]


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_flushed_numbers_at_the_edge_of_fp16(pack: Any, dtype: torch.dtype) -> None:
    """Up to 2^-25 everything becomes 0, a tie included; what was 0 is not counted."""
    values = [0.0, -0.0, 2.0**-25, -(2.0**-25), 2.0**-25 * (1 + 2.0**-7), 2.0**-24, 2.0**-60, 1.0, float("nan")]
    gradient = torch.tensor(values).to(dtype)
    chunks = ChunkTable([9], [0], [dtype], 9)
    wire, partials = torch.empty(9, dtype=torch.float16), new_source_partials(1, CPU)
    pack([gradient], chunks, PointerTable(), wire, 1.0, partials)
    assert (wire == 0).tolist() == [True] * 4 + [False, False, True, False, False]
    assert partials.flushed.tolist() == [3]


@pytest.mark.parametrize("pack", PACKS[1:])
def test_flushed_numbers_of_bf16(pack: Any) -> None:
    """2^-134 is half of the smallest. The kernel counts by a GPU's limit; what the interpreter writes is wrong."""
    gradient = torch.tensor([2.0**-134, 2.0**-133, 2.0**-149, 0.0, 3 * 2.0**-134])
    chunks = ChunkTable([5], [0], [torch.float32], 5)
    wire, partials = torch.empty(5, dtype=torch.bfloat16), new_source_partials(1, CPU)
    pack([gradient], chunks, PointerTable(), wire, 1.0, partials)
    assert partials.flushed.tolist() == [2]
    assert pack is pack_file.pack or (wire == 0).tolist() == [True, False, True, True, False]


@pytest.mark.parametrize("pack", PACKS)
def test_packed_in_place(pack: Any) -> None:
    """The wire is the gradients: their first non-finite value is found in what was divided."""
    numels, offsets = (300, 40, runs.LARGE_NUMEL), (0, 300, 340)
    wire = torch.randn(340 + runs.LARGE_NUMEL) * 3e38
    wire[wire.isinf()] = 1.0
    wire[offsets[0] + 17], wire[offsets[2] + 9001] = float("nan"), float("inf")
    gradients: Sequence[torch.Tensor | None] = wire.split(numels)
    shapes: list[Shape] = [((numel,), (1,)) for numel in numels]
    chunks = ChunkTable(numels, offsets, [torch.float32] * 3, len(wire), shapes=shapes)
    expected, partials = wire / torch.tensor(3.0), new_source_partials(chunks.data_rows, CPU)
    pack(gradients, chunks, PointerTable(), wire, 3.0, partials)
    assert_same(wire, expected)
    assert partials.first_non_finite.tolist() == [17, -1, -1, 9001] and partials.flushed.tolist() == [0] * 4


@pytest.mark.parametrize("pack", PACKS)
def test_padding_has_no_by_products(pack: Any) -> None:
    """It has rows of the table, behind those of the data; where by-products lie there are those of the next bucket."""
    chunks = ChunkTable([5, 3], [0, 8], [torch.float32] * 2, 16)
    assert (chunks.data_rows, len(chunks.rows)) == (2, 4)
    room = new_source_partials(6, CPU)
    room.first_non_finite.fill_(77)
    room.flushed.fill_(88)
    pack([torch.ones(5), None], chunks, PointerTable(), torch.empty(16), 1.0, room.part(1, 3))
    assert room.first_non_finite.tolist() == [77, -1, -1, 77, 77, 77]
    assert room.flushed.tolist() == [88, 0, 0, 88, 88, 88]


@pytest.mark.parametrize("pack", PACKS)
def test_slots_of_one_shared_buffer_and_missing_ones(pack: Any) -> None:
    buffer = torch.randn(350) * 1e-8
    buffer[260] = -float("inf")
    chunks = ChunkTable([50, 100, 200], [0, 50, 160], [torch.float32] * 3, 370, begins=[0, 50, 150], chunk_numel=64)
    wire, partials = torch.empty(370, dtype=torch.float16), new_source_partials(chunks.data_rows, CPU)
    pack([buffer, None, buffer], chunks, PointerTable(), wire, 2.0, partials)
    wanted = expected_source_partials([buffer[:50], None, buffer[150:]], wire, chunks)
    assert_source_partials(partials, wanted)
    assert 260 in partials.first_non_finite.tolist() and partials.flushed[0] > 0


def test_faults_beyond_the_first_block_of_many_runs_and_slots() -> None:
    numels = (7, 3 * runs.LARGE_NUMEL, 5, 900_000, 11)
    offsets = [0, 16, 16 + numels[1], 40 + numels[1], 40 + numels[1] + numels[3]]
    gradients = [torch.full((numel,), 1.0) for numel in numels]
    gradients[3][-2], gradients[3][700_000], gradients[4][3] = 1e-9, float("nan"), 1e-9
    gradients[1][0], gradients[2][4] = 0.0, float("inf")
    chunks = ChunkTable(numels, offsets, [torch.float32] * 5, offsets[-1] + 20, chunk_numel=4096)
    for dtype in (torch.float16, torch.float32):
        wire, partials = torch.empty(chunks.wire_numel, dtype=dtype), new_source_partials(chunks.data_rows, CPU)
        quick_pack(gradients, chunks, PointerTable(), wire, 2.0, partials)
        assert_source_partials(partials, expected_source_partials(gradients, wire, chunks))
        assert int(partials.flushed.sum()) == (2 if dtype is torch.float16 else 0)
