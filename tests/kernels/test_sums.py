"""By-products of unpack and measure, and what scale writes, on both paths, against their definitions in fp64."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import triton
from hypothesis import assume, given
from hypothesis import strategies as st
from support.buckets import FLOATS, Case, Guarded, assert_same, cases, inner, poison
from support.by_products import CPU, SUM_RTOL, assert_first, assert_partials, expected_partials, planted
from support.grids import grid
from support.interpreter_defects import store_as_interpreted
from support.ranks import group_of_one
from support.sweep import sweep

from fusedreduce.kernels import cpu, reference, runs
from fusedreduce.kernels import unpack as unpack_file
from fusedreduce.kernels import walk as walk_file
from fusedreduce.kernels.table import ChunkTable, PointerTable, Shape, new_partials
from fusedreduce.kernels.variants import Tuning, tuned

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
interpreted = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")
SCALES = (1.0, 0.5, 3.0)
NAN, INFINITY = float("nan"), float("inf")
Gradients = list[torch.Tensor | None]
MEASURES = [
    pytest.param(reference.measure, id="reference"),
    pytest.param(cpu.measure, id="torch"),
    pytest.param(walk_file.measure, id="kernel", marks=interpreted),
]
UNPACKS = [
    pytest.param(reference.unpack, id="reference"),
    pytest.param(cpu.unpack, id="torch"),
    pytest.param(unpack_file.unpack, id="kernel", marks=interpreted),
]
WALKS = [
    pytest.param(reference, id="reference"),
    pytest.param(cpu, id="torch"),
    pytest.param(walk_file, id="kernel", marks=interpreted),
]


def _shaped(gradients: Sequence[torch.Tensor | None]) -> tuple[Gradients, list[Shape]]:
    """Every third gradient as a transposed matrix, where it divides."""
    shaped: Gradients = []
    shapes: list[Shape] = []
    for slot, one in enumerate(gradients):
        numel = 0 if one is None else one.numel()
        size, strides = ((3, numel // 3), (1, 3)) if numel and numel % 3 == 0 and slot % 3 == 0 else ((numel,), (1,))
        shaped.append(None if one is None else one.as_strided(size, strides, one.storage_offset()))
        shapes.append((size, strides))
    return shaped, shapes


def _scaled(values: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return reference.round_once(values.to(factor.dtype) * factor, values.dtype)


@given(cases(SCALES), st.sampled_from([1, 100, 10**6]), st.sampled_from([16, 200, 10**6]))
@sweep(100)
def test_torch_path_sums_what_it_stores(case: Case, large: int, block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "LARGE_NUMEL", large)
        patch.setattr(runs, "RUN_NUMEL", block)
        gradients = inner(case.gradients())
        shaped, shapes = _shaped(gradients)
        chunks = case.table(shapes=shapes if None not in gradients else None)
        pointers, partials = PointerTable(), new_partials(chunks.data_rows, CPU)
        factor = torch.tensor([case.scalar], dtype=case.compute)

        cpu.measure(shaped, chunks, pointers, partials)
        assert_partials(partials, expected_partials(gradients, chunks))

        wanted = [None if one is None else _scaled(one, factor) for one in gradients]
        cpu.scale(shaped, chunks, pointers, factor)
        _assert_all_same(gradients, wanted)

        wire = case.travelled(float("nan"))
        cpu.unpack(shaped, chunks, pointers, wire, factor, partials)
        for slot, one in enumerate(gradients):
            if one is not None:
                part = wire[chunks.offsets[slot] :][: one.numel()].to(case.compute)
                assert_same(one, reference.round_once(part * factor, one.dtype))
        assert_partials(partials, expected_partials(gradients, chunks))


def _assert_all_same(actual: Sequence[torch.Tensor | None], expected: Sequence[torch.Tensor | None]) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        if ours is not None and theirs is not None:
            assert_same(ours, theirs)


@interpreted
@given(cases(SCALES))
@sweep(30)
def test_kernels_sum_what_they_store(case: Case) -> None:
    chunks = case.table()
    guarded = case.gradients()
    gradients = inner(guarded)
    pointers, partials = PointerTable(), new_partials(chunks.data_rows, CPU)
    with tuned(Tuning(case.tile_bytes, 1)):
        walk_file.measure(gradients, chunks, pointers, partials)
    assert_partials(partials, expected_partials(gradients, chunks))
    for one in guarded:
        if one is not None:
            assert_same(one.outer, one.before)

    # bf16 subnormals are a known defect of the interpreter.
    smallest = torch.finfo(torch.bfloat16).tiny
    tiny = [g for g in gradients if g is not None and ((g != 0) & (g.abs().double() * case.scalar < smallest)).any()]
    assume(torch.bfloat16 not in case.dtypes or not tiny)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "store_rounded", store_as_interpreted)
        factor = torch.tensor([case.scalar], dtype=case.compute)
        wanted = [None if one is None else _scaled(one, factor) for one in gradients]
    with tuned(Tuning(case.tile_bytes, 1)):
        walk_file.scale(gradients, chunks, pointers, factor)
    for one in guarded:
        if one is not None:
            one.assert_edges_untouched()
    _assert_all_same(gradients, wanted)


OUTSIDE = (0.0, 1e-25, 1e-30, 1e-42, 3e25, 2e-19, 1e18, 1e38, 65504.0, -1.0)


@interpreted
@grid(
    ("measure", "value", "dtype"),
    [*itertools.product((reference.measure, cpu.measure, walk_file.measure), OUTSIDE, (torch.float32, torch.bfloat16))],
)
def test_sums_outside_the_range_of_fp32_are_right(measure: Any, value: float, dtype: torch.dtype) -> None:
    if dtype is torch.bfloat16 and 0 < abs(value) < 1e-37 and measure is walk_file.measure:
        pytest.skip("the interpreter reads subnormals of bf16 wrongly")
    numel = 3 * 8192 + 700
    gradient = torch.full((numel,), value).to(dtype)
    gradient[:8192] = 1.0  # a row of its own kind between the others
    chunks = ChunkTable([numel], [0], [dtype], numel)
    partials = new_partials(chunks.data_rows, CPU)
    measure([gradient], chunks, PointerTable(), partials)
    assert_partials(partials, expected_partials([gradient], chunks))


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("dtype", [torch.float64, *FLOATS])
def test_sums_of_heavy_tails(measure: Any, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    numel = 5 * 8192 + 13
    for exponent in (3.0, 8.0):
        values = torch.randn(numel, generator=generator, dtype=torch.float64)
        values = values.sign() * values.abs() ** exponent
        gradient = (values / values.abs().max() * 60000).to(dtype)
        gradient[8192:16384] = torch.tensor(2.0**-13)  # small ones that fp32 would lose beside a large one
        gradient[8192 + 5] = 1.0
        if dtype is torch.bfloat16:
            gradient[gradient.abs() < 1e-37] = 0.0
        chunks = ChunkTable([numel], [0], [dtype], numel)
        partials = new_partials(chunks.data_rows, CPU)
        measure([gradient], chunks, PointerTable(), partials)
        assert_partials(partials, expected_partials([gradient], chunks))


@pytest.mark.parametrize("measure", MEASURES)
def test_fp64_squares_beyond_fp64(measure: Any) -> None:
    gradient = torch.tensor([1e200, -1e-200, 3.0, 1e-320], dtype=torch.float64)
    chunks = ChunkTable([4], [0], [torch.float64], 4, chunk_numel=2)
    partials = new_partials(2, CPU)
    measure([gradient], chunks, PointerTable(), partials)
    assert partials.sums.tolist() == [float("inf"), 9.0], "a sum of finite values may overflow"
    assert partials.peaks.tolist() == [1e200, 3.0]
    assert partials.first_non_finite.tolist() == [-1, -1], "and is no non-finite value"


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("dtype", [torch.float64, *FLOATS])
@pytest.mark.parametrize(
    "bad", [[float("nan")], [float("inf")], [-float("inf"), float("inf")], [float("inf"), float("nan")]]
)
def test_peaks_keep_nan_and_infinity(measure: Any, dtype: torch.dtype, bad: list[float]) -> None:
    gradient = torch.ones(300, dtype=dtype)
    gradient[70 : 70 + len(bad)] = torch.tensor(bad, dtype=dtype)
    chunks = ChunkTable([300], [0], [dtype], 300, chunk_numel=100)
    partials = new_partials(3, CPU)
    measure([gradient], chunks, PointerTable(), partials)
    peak = float("nan") if np.isnan(bad).any() else float("inf")
    assert_same(partials.peaks, torch.tensor([peak, 1.0, 1.0], dtype=torch.float64))
    assert partials.first_non_finite.tolist() == [70, -1, -1]


@interpreted
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@tuned(Tuning(1024, 1))
def test_nan_survives_a_maximum_that_drops_it(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    builder, ops = triton.runtime.interpreter.InterpreterBuilder, triton.runtime.interpreter.ReduceOps
    monkeypatch.setattr(builder, "create_maxnumf", lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax))
    monkeypatch.setattr(ops, "min_max", _dropping_nan(ops.min_max))
    gradient = torch.ones(500, dtype=dtype)
    gradient[3], gradient[1], gradient[400] = float("nan"), -7.0, float("inf")
    chunks = ChunkTable([500], [0], [dtype], 500, chunk_numel=250)
    partials = new_partials(2, CPU)
    walk_file.measure([gradient], chunks, PointerTable(), partials)
    assert_partials(partials, expected_partials([gradient], chunks))


def _dropping_nan(min_max: Callable[..., Any]) -> Callable[..., Any]:
    def dropping(self: Any, value: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
        drop = val_reduce_op is np.nanmax or val_reduce_op is np.max
        return min_max(self, value, np.fmax.reduce if drop else val_reduce_op, idx_reduce_op)

    return dropping


@given(st.sampled_from([torch.float64, *FLOATS]), st.integers(0, 2**30), st.sampled_from([64, 700, 8192]))
@sweep(500)
def test_the_first_non_finite_is_never_missed_and_never_false(dtype: torch.dtype, seed: int, chunk: int) -> None:
    """On the torch path."""
    gradients, expected = planted(dtype, seed, 3000)
    numels = [len(one) for one in gradients]
    chunks = ChunkTable(numels, np.cumsum([0, *numels[:-1]]).tolist(), [dtype] * 6, sum(numels), chunk_numel=chunk)
    partials = new_partials(chunks.data_rows, CPU)
    cpu.measure(gradients, chunks, PointerTable(), partials)
    assert_first(partials.first_non_finite, chunks, expected)


@pytest.mark.parametrize("unpack", UNPACKS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("factor", [1.0, 0.25])
def test_unpack_in_place(unpack: Any, dtype: torch.dtype, factor: float) -> None:
    """Gradients that are views of their own slots of the wire, and one that is not."""
    numels, offsets = (300, 5, 0, 2 * runs.LARGE_NUMEL, 77), (0, 304, 312, 312, 312 + 2 * runs.LARGE_NUMEL)
    wire = Guarded.of(torch.randn(offsets[-1] + 80).to(dtype))
    before = wire.inner.clone()
    gradients: Gradients = [wire.inner[at : at + n] for at, n in zip(offsets, numels, strict=True)]
    gradients[0] = torch.empty(300, dtype=dtype)
    chunks = ChunkTable(
        numels, offsets, [dtype] * 5, len(before), shapes=[((numel,), (1,)) for numel in numels], chunk_numel=4096
    )
    partials, scale = new_partials(chunks.data_rows, CPU), torch.tensor([factor], dtype=_compute(dtype))
    unpack(gradients, chunks, PointerTable(), wire.inner, scale, partials)
    wire.assert_edges_untouched()
    for slot, (at, numel) in enumerate(zip(offsets, numels, strict=True)):
        assert_same(gradients[slot], _scaled(before[at : at + numel], scale))  # type: ignore[arg-type]
    assert_same(wire.inner[:300], before[:300])
    assert_partials(partials, expected_partials(gradients, chunks))


def _compute(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


@pytest.mark.parametrize("walk", WALKS)
@pytest.mark.parametrize("begin", [1, 16, 37])
def test_slots_of_one_shared_buffer(walk: Any, begin: int) -> None:
    """A comm hook's bucket: indices are those of the buffer."""
    buffer = torch.randn(begin + 300)
    buffer[begin + 150] = float("nan")
    numels, begins = [begin, 100, 200], [0, begin, begin + 100]
    chunks = ChunkTable(numels, begins, [torch.float32] * 3, begin + 300, begins=begins, chunk_numel=64)
    partials, factor = new_partials(chunks.data_rows, CPU), torch.tensor([3.0])
    wanted = buffer * 3.0
    walk.scale([buffer] * 3, chunks, PointerTable(), factor)
    walk.measure([buffer] * 3, chunks, PointerTable(), partials)
    assert_same(buffer, wanted)
    assert_partials(partials, expected_partials(list(buffer.split(numels)), chunks))
    assert max(partials.first_non_finite.tolist()) == begin + 150


@pytest.mark.parametrize("measure", MEASURES)
def test_missing_gradients_and_empty_tables(measure: Any) -> None:
    chunks = ChunkTable([5, 0, 20000, 3], [0, 5, 5, 20005], [torch.float32] * 4, 20008)
    partials = new_partials(chunks.data_rows, CPU)
    for tensor in vars(partials).values():
        tensor.copy_(poison(chunks.data_rows, tensor.dtype) if tensor.is_floating_point() else torch.tensor(77))
    measure([None, torch.empty(0), None, torch.ones(3)], chunks, PointerTable(), partials)
    assert partials.sums.tolist() == [0.0] * 4 + [3.0] and partials.peaks.tolist() == [0.0] * 4 + [1.0]
    assert partials.first_non_finite.tolist() == [-1] * 5
    measure([], ChunkTable([], [], [], 0), PointerTable(), new_partials(0, CPU))


@pytest.mark.parametrize("dtype", [torch.float64, *FLOATS])
def test_the_number_of_threads_does_not_change_a_bit(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(11)
    numels = torch.randint(1, 3000, (300,), generator=generator).tolist() + [1_000_003, 300_000, 40_000]
    gradients = [torch.randn(numel, generator=generator).to(dtype) for numel in numels]
    offsets = np.cumsum([0, *numels[:-1]]).tolist()
    shapes = [((numel,), (1,)) for numel in numels]
    chunks = ChunkTable(numels, offsets, [dtype] * len(numels), sum(numels), shapes=shapes)
    wire = torch.cat(gradients).to(torch.float64 if dtype is torch.float64 else torch.float32)
    factor = torch.tensor([0.7], dtype=wire.dtype)
    found = []
    threads = torch.get_num_threads()
    try:
        for number in (1, 2, 4, 3):
            torch.set_num_threads(number)
            for run in (
                lambda into: cpu.measure(gradients, chunks, PointerTable(), into),
                lambda into: cpu.unpack(
                    list(map(torch.empty_like, gradients)), chunks, PointerTable(), wire, factor, into
                ),
            ):
                partials = new_partials(chunks.data_rows, CPU)
                run(partials)
                found.append(partials)
    finally:
        torch.set_num_threads(threads)
    for which in (0, 1):
        for other in found[which + 2 :: 2]:
            for name, tensor in vars(found[which]).items():
                assert_same(getattr(other, name).view(torch.float64), tensor.view(torch.float64))
    assert_partials(found[0], expected_partials_fast(gradients, chunks))


def test_threads_have_scratch_memory_of_their_own() -> None:
    """Ranks may be threads, and torch's operators let others run: one's squares must not be another's."""
    held: list[torch.Tensor] = []
    together = threading.Barrier(3)

    def use() -> None:
        held.append(runs.scratch(torch.float32, 100))
        together.wait(10.0)

    threads = [threading.Thread(target=use) for _ in range(2)]
    for thread in threads:
        thread.start()
    use()
    for thread in threads:
        thread.join()
    assert len({one.untyped_storage().data_ptr() for one in held}) == 3
    again = runs.scratch(torch.float32, 50)
    assert again.data_ptr() in {one.data_ptr() for one in held}, "and none is allocated anew"


def test_scratch_memory_outlives_a_callback_of_gloos() -> None:
    """Its thread has a new Python state for each, and torch 2.11 ends the process where tensors are freed with one."""
    held: dict[int, list[torch.Tensor]] = {}

    def use(future: torch.futures.Future[Any]) -> Any:
        held.setdefault(threading.get_ident(), []).append(runs.scratch(torch.float64, 100))
        return future.value()

    with group_of_one():
        for _ in range(20):
            work = dist.all_reduce(torch.ones(8), async_op=True)
            assert work is not None
            work.get_future().then(use).wait()
    assert sum(map(len, held.values())) == 20
    for kept in held.values():
        assert len({one.data_ptr() for one in kept}) == 1


def test_scratch_memory_outlives_inference_mode() -> None:
    def use() -> None:
        with torch.inference_mode():
            runs.scratch(torch.float32, 100).zero_()
        runs.scratch(torch.float32, 100).fill_(1.0)
        ended.append(True)

    ended: list[bool] = []
    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert ended


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_the_default_dtype_does_not_matter(default: torch.dtype) -> None:
    gradient = torch.ones(3 * runs.LARGE_NUMEL)
    chunks = ChunkTable([len(gradient)], [0], [torch.float32], len(gradient))
    partials, before = new_partials(chunks.data_rows, CPU), torch.get_default_dtype()
    try:
        torch.set_default_dtype(default)
        cpu.measure([gradient], chunks, PointerTable(), partials)
    finally:
        torch.set_default_dtype(before)
    assert float(partials.sums.sum()) == len(gradient)


def expected_partials_fast(gradients: Sequence[torch.Tensor], chunks: ChunkTable) -> Any:
    """expected_partials of finite values, a row at a time."""
    found = new_partials(chunks.data_rows, CPU)
    rows = [part.double() for one in gradients for part in one.split(chunks.chunk_numel)]
    found.sums.copy_(torch.stack([part.square().sum() for part in rows]))
    found.peaks.copy_(torch.stack([part.abs().max() for part in rows]))
    found.first_non_finite.fill_(-1)
    return found


def test_sums_are_within_their_bound_in_the_worst_case() -> None:
    """One large square to which every other that meets it in fp32 is too small to be added: none is found again."""
    for others in (2.0**-12.51, 2.0**-12.49, 2.0**-12):
        gradient = torch.full((4 * 8192,), others)
        gradient[::512] = 1.0
        chunks = ChunkTable([4 * 8192], [0], [torch.float32], 4 * 8192)
        partials = new_partials(4, CPU)
        cpu.measure([gradient], chunks, PointerTable(), partials)
        torch.testing.assert_close(
            partials.sums, expected_partials_fast([gradient], chunks).sums, rtol=SUM_RTOL, atol=0
        )
