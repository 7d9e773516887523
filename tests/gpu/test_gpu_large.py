"""All fp32 bit patterns, and buckets of more than 2^31 elements, bit for bit; the same programs, small, on CPU.

What comes out is compared in blocks with torch's own arithmetic, so that nothing of its size is made beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.buckets import assert_same
from support.on_device import pick

from fusedreduce.kernels import dispatch
from fusedreduce.kernels.table import ChunkTable, PointerTable, may_flush

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter's overflows and NaNs
GIB = 2**30
ODD = 0x61C88647  # index times this, mod 2^32: every bit pattern once in any 2^32 in a row
SUM_RTOL = 30 * 2.0**-24  # as in test_kernels.py


@pytest.fixture(autouse=True)
def given_back() -> Iterator[None]:
    """The next test, and other processes, find the memory free."""
    yield
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def blocks(numel: int, device: torch.device) -> Iterator[slice]:
    step = pick(device, cpu=1000, cuda=2**26)
    return (slice(begin, min(begin + step, numel)) for begin in range(0, numel, step))


def fits(bytes_: int, device: torch.device) -> bool:
    """Whether that much is free, and room for blocks under comparison."""
    return device.type == "cpu" or torch.cuda.mem_get_info(device)[0] >= bytes_ + 3 * GIB


def patterns(numel: int, device: torch.device) -> torch.Tensor:
    """fp32 whose element i has the bits of i * ODD mod 2^32."""
    values = torch.empty(numel, device=device)
    for block in blocks(numel, device):
        product = torch.arange(block.start, block.stop, device=device).mul_(ODD).bitwise_and_(2**32 - 1)
        values.view(torch.int32)[block] = product - ((product & 2**31) << 1)  # as a signed number
    return values


def noise(numel: int, dtype: torch.dtype, seed: int, device: torch.device, shift: int = 0) -> torch.Tensor:
    """Normal values, `shift` elements past where memory was allocated."""
    values = torch.empty(numel + shift, dtype=dtype, device=device)[shift:]
    generator = torch.Generator(device).manual_seed(seed)
    for block in blocks(numel, device):
        values[block] = torch.randn(block.stop - block.start, generator=generator, device=device)
    return values


@pytest.mark.parametrize("divisor", [1.0, 3.0])
@pytest.mark.parametrize("wire_dtype", [torch.bfloat16, torch.float16])
def test_every_bit_pattern(device: torch.device, wire_dtype: torch.dtype, divisor: float) -> None:
    """All fp32 values through pack, their images through unpack; on less than 32 GiB those of half of the indices."""
    if device.type == "cpu" and wire_dtype is torch.bfloat16:
        pytest.skip("the interpreter reads bf16's subnormals wrongly: see interpreter_defects.py")
    sizes: Any = pick(device, cpu=(3013,), cuda=(2**32 + 13, 2**31 + 13))
    numel = next((one for one in sizes if fits(6 * one, device)), None)
    if numel is None:
        pytest.skip("needs 15 GiB of the GPU's memory")
    chunks, pointers = ChunkTable([numel], [0], [torch.float32], numel), PointerTable()
    gradient = patterns(numel, device)
    wire = torch.full((numel,), -21555, dtype=torch.int16, device=device).view(wire_dtype)
    source = chunks.new_source_partials(device)
    dispatch.pack([gradient], chunks, pointers, wire, divisor, source)
    by, flushed = torch.tensor([divisor], device=device), 0
    for block in blocks(numel, device):
        expected = torch.div(gradient[block], by).to(wire_dtype)
        assert_same(wire[block], expected)
        flushed += int(((gradient[block] != 0) & (expected == 0)).sum())
    counted = dispatch.reduce_source_partials(source, chunks.spans(device)).flushed
    assert counted.tolist() == [flushed * may_flush(torch.float32, wire_dtype)]
    scale = torch.tensor([0.3], device=device)
    dispatch.unpack([gradient], chunks, pointers, wire, scale)
    for block in blocks(numel, device):
        assert_same(gradient[block], wire[block].float() * scale)


def test_slots_past_2_to_the_31(device: torch.device) -> None:
    """Their offsets in the wire lie there, off alignment on both sides, padding between them."""
    numels = pick(device, cpu=[403, 57, 1000, 4096], cuda=[2**30 + 403, 2**30 + 57, 1000, 2**24 + 4096])
    offsets, end = [], 3
    for numel in numels:
        offsets.append(end)
        end += numel + 5
    if not fits(2 * end + 2 * sum(numels), device):
        pytest.skip("needs 12 GiB of the GPU's memory")
    dtype = torch.float16
    chunks, pointers = ChunkTable(numels, offsets, [dtype] * len(numels), end), PointerTable()
    gradients = [noise(numel, dtype, slot, device, shift=1 + slot) for slot, numel in enumerate(numels)]
    wire = torch.full((end,), 0x2BAD, dtype=torch.int16, device=device).view(dtype)
    dispatch.pack(gradients, chunks, pointers, wire, 3.0)
    slots = [wire[offset : offset + numel] for offset, numel in zip(offsets, numels, strict=True)]
    divisor, scale = torch.tensor([3.0], device=device), torch.tensor([0.7], device=device)
    for gradient, slot in zip(gradients, slots, strict=True):
        for block in blocks(gradient.numel(), device):
            assert_same(slot[block], torch.div(gradient[block].float(), divisor).to(dtype))
        gradient.zero_()
    assert len(chunks.gaps) == len(numels) + 1
    for low, high in chunks.gaps:
        assert_same(wire[low:high], torch.zeros(high - low, dtype=dtype, device=device))
    dispatch.unpack(gradients, chunks, pointers, wire, scale)
    for gradient, slot in zip(gradients, slots, strict=True):
        for block in blocks(gradient.numel(), device):
            assert_same(gradient[block], (slot[block].float() * scale).to(dtype))


def test_the_sum_of_more_than_2_to_the_31_squares_and_a_nan_out_there(device: torch.device) -> None:
    numel, dtype = pick(device, cpu=9001, cuda=2**31 + 9001), torch.bfloat16
    if not fits(4 * numel, device):
        pytest.skip("needs 11 GiB of the GPU's memory")
    chunks, pointers = ChunkTable([numel], [0], [dtype], numel), PointerTable()
    wire = noise(numel, dtype, 7, device)
    gradient, one = torch.empty_like(wire), torch.ones(1, device=device)

    def unpacked() -> Any:
        partials = chunks.new_partials(device)
        dispatch.unpack([gradient], chunks, pointers, wire, one, partials)
        return dispatch.reduce_partials(partials, chunks.spans(device))

    totals = unpacked()
    exact = torch.zeros(1, dtype=torch.float64, device=device)
    for block in blocks(numel, device):
        assert_same(gradient[block], wire[block])
        exact += wire[block].double().square_().sum()
    torch.testing.assert_close(totals.parameter_sums, exact, rtol=SUM_RTOL, atol=0)
    assert totals.first_non_finite.tolist() == [-1]
    wire[numel - 5] = float("nan")
    assert unpacked().first_non_finite.tolist() == [numel - 5]
