"""Stage 2: the compiled kernels against the reference on the same device, bit for bit; also past 2^31 elements.

    random      small buckets of all kinds: pack, unpack, measure, scale, second stages, with sentinels around outputs
    patterns    every fp32 bit pattern, 2^32 of them in one tensor, to bf16 and fp16, divided by 1 and by 3
    far         offsets in the wire past 2^31, gradients off alignment, padding between; sums; a NaN found out there

Large results are compared in blocks with torch's own arithmetic, so nothing of their size is made beside them.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator

import torch
import triton
from exact_cases import Bucket, Guarded, buckets, differing, same
from records import BenchError
from stage import GIB, Skipped, Stage, entry, free_bytes, need_memory, run_parts, synchronize

from fusedreduce.kernels import cpu_stats, dispatch, reference, variants
from fusedreduce.kernels.table import ChunkTable, PointerTable, may_flush

SEED = 6
RANDOM_CASES, REHEARSED_CASES = 240, 6
# What fp32 sums of 8,192 squares may be off by, whatever their order; as in tests/kernels/test_kernels.py.
SUM_RTOL = 30 * 2.0**-24
ODD = 0x61C88647  # index times this, mod 2^32: every bit pattern once in any 2^32 in a row
BLOCK_NUMEL = 2**26
ROOM_BYTES = 3 * GIB  # for blocks under comparison


def run(stage: Stage) -> None:
    if variants.interpreted():
        _try_interpreter(stage)
    parts = {
        "random buckets": (0.0, random_buckets),
        "every pattern": (10.0, every_pattern),
        "far slots": (8.0, far_slots),
        "far sums": (8.0, far_sums),
    }
    run_parts(stage, {name: (least_s, functools.partial(_part, part)) for name, (least_s, part) in parts.items()})


def _part(part: Callable[[Stage], None], stage: Stage) -> None:
    """What is wrong on the GPU shows in the part that did it, and its memory is there for the next."""
    try:
        part(stage)
        synchronize(stage.device)
    finally:
        if stage.device.type == "cuda":
            torch.cuda.empty_cache()


def _try_interpreter(stage: Stage) -> None:
    """A rehearsal goes on with the torch path where Triton's interpreter does not get along with the numpy here."""
    chunks, one = ChunkTable([1], [0], [torch.float32], 1), torch.ones(1)
    try:
        dispatch.pack([one], chunks, PointerTable(), torch.empty(1), 1.0)
    except Exception as error:  # whatever the interpreter makes of it
        stage.skip("Triton's interpreter", error)
        triton.knobs.runtime.interpret = False


# Random


def random_buckets(stage: Stage) -> None:
    """Every function of the data path on small buckets of all kinds."""
    count = REHEARSED_CASES if stage.rehearse else RANDOM_CASES
    most_numel = 300 if stage.rehearse else 200_000
    began_s, paths = time.monotonic(), set[str]()
    # The interpreter's subnormals are a known defect.
    for done, bucket in enumerate(buckets(count, SEED, stage.device, most_numel, subnormal=not stage.rehearse), 1):
        with dispatch.count_launches() as counted:
            check_bucket(bucket, stage.device)
        paths |= {one.path for one in counted}
        launches = {one.launches for one in counted if one.path == "triton" and not one.function.startswith("reduce")}
        if launches - {0, 1}:
            raise BenchError(f"{bucket.label}: {max(launches)} launches for one call")
        if done % 20 == 0 or done == count:
            seconds = round(time.monotonic() - began_s, 1)
            stage.note(random_cases=done, random_seconds=seconds, paths=sorted(paths))
        if stage.left_s() < 25 and not stage.rehearse:
            stage.skip("random buckets", f"stopped after {done} of {count} for lack of time")
            break
    if stage.device.type == "cuda" and paths != {"triton"}:
        raise BenchError(f"kernels were to run compiled, and {', '.join(sorted(paths))} ran")


def check_bucket(bucket: Bucket, device: torch.device) -> None:
    """Ours and the reference on copies of the same bucket.

    Raises:
        BenchError: the first difference.
    """
    chunks, label = bucket.chunks, bucket.label
    scalar = torch.tensor([bucket.scalar], dtype=bucket.compute, device=device)
    gradients = [_shifted(bucket, slot, device) for slot in range(len(bucket.numels))]
    wires, sources = [], []
    for path, stats in ((dispatch, dispatch), (reference, cpu_stats)):
        wire = Guarded(chunks.wire_numel, bucket.wire, device)
        source = chunks.new_source_partials(device)
        path.pack(gradients, chunks, PointerTable(), wire.inner, bucket.scalar, source)
        sources.append(stats.reduce_source_partials(source, chunks.spans(device)))
        wires.append(wire)
    wires[0].check_edges(f"{label}, pack")
    same(f"{label}, pack", wires[0].inner, wires[1].inner)
    for field in dataclasses.fields(sources[0]):
        _equal(f"{label}, pack's {field.name}", getattr(sources[0], field.name), getattr(sources[1], field.name))

    results, backs = [], []
    for path, stats in ((dispatch, dispatch), (reference, cpu_stats)):
        places = [
            None if gradient is None else Guarded(gradient.numel(), gradient.dtype, device, bucket.shifts[slot])
            for slot, gradient in enumerate(gradients)
        ]
        into = [None if place is None else place.inner for place in places]
        result = chunks.new_partials(device)
        path.unpack(into, chunks, PointerTable(), wires[1].inner, scalar, result)
        totals = [stats.reduce_partials(result, chunks.spans(device))]
        measured, scaled = chunks.new_partials(device), chunks.new_partials(device)
        path.measure(into, chunks, PointerTable(), measured)
        totals.append(stats.reduce_partials(measured, chunks.spans(device)))
        path.scale(into, chunks, PointerTable(), 1 / scalar, scaled)
        totals.append(stats.reduce_partials(scaled, chunks.spans(device)))
        results.append(totals)
        backs.append(places)
    for slot, (ours, theirs) in enumerate(zip(*backs, strict=True)):
        if ours is not None and theirs is not None:
            ours.check_edges(f"{label}, unpack of slot {slot}")
            same(f"{label}, unpack and scale of slot {slot}", ours.inner, theirs.inner)
    for function, ours, theirs in zip(("unpack", "measure", "scale"), *results, strict=True):
        what = f"{label}, {function}'s"
        _equal(f"{what} first_non_finite", ours.first_non_finite, theirs.first_non_finite)
        _close(f"{what} peaks", ours.parameter_peaks, theirs.parameter_peaks, 0.0)
        _close(f"{what} sums", ours.parameter_sums, theirs.parameter_sums, SUM_RTOL)
        _close(f"{what} total", ours.total, theirs.total, SUM_RTOL)


def _shifted(bucket: Bucket, slot: int, device: torch.device) -> torch.Tensor | None:
    values = bucket.values[slot]
    if values is None:
        return None
    place = Guarded(values.numel(), values.dtype, device, bucket.shifts[slot])
    place.inner.copy_(values)
    return place.inner


def _equal(what: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    if not torch.equal(ours, theirs):
        where = int((ours != theirs).to(torch.uint8).argmax())
        raise BenchError(f"{what}: {ours[where].item()} instead of {theirs[where].item()} at {where}")


def _close(what: str, ours: torch.Tensor, theirs: torch.Tensor, rtol: float) -> None:
    near = torch.isclose(ours, theirs, rtol=rtol, atol=0.0, equal_nan=True)
    if not bool(near.all()):
        where = int((~near).to(torch.uint8).argmax())
        raise BenchError(f"{what}: {ours[where].item()!r} instead of {theirs[where].item()!r} at {where}")


# Every bit pattern


def every_pattern(stage: Stage) -> None:
    """All 2^32 fp32 values through pack; their 16-bit images through unpack."""
    numel, device = pattern_numel(stage), stage.device
    chunks = ChunkTable([numel], [0], [torch.float32], numel)
    gradient = torch.empty(numel, dtype=torch.float32, device=device)
    wire_bits = torch.empty(numel, dtype=torch.int16, device=device)
    done: list[dict[str, object]] = []
    stage.note(pattern_numel=numel, every_pattern=numel >= 2**32, patterns=done)
    # The interpreter reads bf16's subnormals wrongly.
    for wire_dtype in (torch.float16,) if stage.rehearse else (torch.bfloat16, torch.float16):
        wire = wire_bits.view(wire_dtype)
        for divisor in (1.0, 3.0):
            fill_patterns(gradient)
            by = torch.tensor([divisor], device=device)
            what = f"every pattern / {divisor:.0f} -> {str(wire_dtype).removeprefix('torch.')}"
            source = chunks.new_source_partials(device)
            pointers = PointerTable()
            wire_bits.fill_(-21555)
            dispatch.pack([gradient], chunks, pointers, wire, divisor, source)
            flushed = torch.zeros((), dtype=torch.int64, device=device)
            for begin, end in blocks(numel, stage):
                given = gradient[begin:end]
                expected = torch.div(given, by).to(wire_dtype)
                same(f"pack, {what}", wire[begin:end], expected, begin)
                flushed += ((given != 0) & (expected == 0)).sum()
            totals = dispatch.reduce_source_partials(source, chunks.spans(device))
            counted = bool(may_flush(torch.float32, wire_dtype))
            _equal(f"pack's flushed, {what}", totals.flushed, (flushed * int(counted)).reshape(1))
            scale = torch.tensor([0.3], device=device)
            dispatch.unpack([gradient], chunks, pointers, wire, scale)
            for begin, end in blocks(numel, stage):
                expected = wire[begin:end].float() * scale
                same(f"unpack, {what}", gradient[begin:end], expected, begin)
            done.append({"wire": str(wire_dtype).removeprefix("torch."), "divisor": divisor})
            stage.note(patterns=done)


def pattern_numel(stage: Stage) -> int:
    """2^32 values and a few, where 6 bytes for each fit; else just past 2^31."""
    if stage.rehearse:
        return 3013
    for numel in (2**32 + 13, 2**31 + 13):
        if free_bytes(stage.device) >= 6 * numel + ROOM_BYTES:
            return numel
    need_memory(stage.device, 6 * (2**31 + 13) + ROOM_BYTES, "2^31 elements of fp32 and their wire")
    raise AssertionError


def fill_patterns(gradient: torch.Tensor) -> None:
    """Writes bit pattern (index x ODD) mod 2^32 to every element."""
    bits = gradient.view(torch.int32)
    for begin in range(0, bits.numel(), BLOCK_NUMEL):
        end = min(begin + BLOCK_NUMEL, bits.numel())
        product = torch.arange(begin, end, dtype=torch.int64, device=bits.device).mul_(ODD).bitwise_and_(2**32 - 1)
        product -= (product & 2**31) << 1  # as a signed number
        bits[begin:end] = product


def blocks(numel: int, stage: Stage) -> Iterator[tuple[int, int]]:
    """[begin, end) of all elements; small ones in a rehearsal, so that there are some."""
    step = 1000 if stage.rehearse else BLOCK_NUMEL
    for begin in range(0, numel, step):
        yield begin, min(begin + step, numel)


# Past 2^31 elements of one wire


def far_slots(stage: Stage) -> None:
    """Slots whose wire offsets lie past 2^31, off alignment on both sides, padding between them."""
    numels = [403, 57, 1000, 4096] if stage.rehearse else [2**30 + 403, 2**30 + 57, 1000, 2**24 + 4096]
    offsets, end = [], 3
    for numel in numels:
        offsets.append(end)
        end += numel + 5
    device, dtype = stage.device, torch.float16
    if free_bytes(device) < 2 * end + 2 * sum(numels) + ROOM_BYTES:
        raise Skipped(f"needs {(2 * end + 2 * sum(numels) + ROOM_BYTES) / GIB:.0f} GiB of the GPU's memory")
    chunks = ChunkTable(numels, offsets, [dtype] * len(numels), end)
    gradients = [_noise(numel, dtype, slot, device, shift=1 + slot) for slot, numel in enumerate(numels)]
    wire = torch.full((end,), 0x2BAD, dtype=torch.int16, device=device).view(dtype)
    divisor, pointers = torch.tensor([3.0], device=device), PointerTable()
    dispatch.pack(gradients, chunks, pointers, wire, 3.0)
    for slot, (gradient, offset) in enumerate(zip(gradients, offsets, strict=True)):
        for begin, stop in blocks(gradient.numel(), stage):
            expected = torch.div(gradient[begin:stop].float(), divisor).to(dtype)
            same(f"pack of slot {slot}, far out", wire[offset + begin : offset + stop], expected, begin)
    for low, high in chunks.gaps:
        same("padding, far out", wire[low:high], torch.zeros(high - low, dtype=dtype, device=device), low)
    for gradient in gradients:
        gradient.zero_()
    scale = torch.tensor([0.7], device=device)
    dispatch.unpack(gradients, chunks, pointers, wire, scale)
    for slot, (gradient, offset) in enumerate(zip(gradients, offsets, strict=True)):
        for begin, stop in blocks(gradient.numel(), stage):
            expected = (wire[offset + begin : offset + stop].float() * scale).to(dtype)
            same(f"unpack of slot {slot}, far out", gradient[begin:stop], expected, begin)
    stage.note(far_wire_numel=end)


def far_sums(stage: Stage) -> None:
    """Sum of squares of more than 2^31 elements, and a NaN out there, from bf16 to bf16."""
    numel, device = 9001 if stage.rehearse else 2**31 + 9001, stage.device
    if free_bytes(device) < 4 * numel + ROOM_BYTES:
        raise Skipped(f"needs {(4 * numel + ROOM_BYTES) / GIB:.0f} GiB of the GPU's memory")
    chunks = ChunkTable([numel], [0], [torch.bfloat16], numel)
    wire = _noise(numel, torch.bfloat16, 7, device)
    gradient = torch.empty_like(wire)
    one, spans, pointers = torch.ones(1, device=device), chunks.spans(device), PointerTable()
    for planted in (None, numel - 5):
        if planted is not None:
            wire[planted] = float("nan")
        partials = chunks.new_partials(device)
        dispatch.unpack([gradient], chunks, pointers, wire, one, partials)
        totals = dispatch.reduce_partials(partials, spans)
        _equal("first non-finite element", totals.first_non_finite, _number(-1 if planted is None else planted, device))
        if planted is None:
            exact, worst = torch.zeros(1, dtype=torch.float64, device=device), 0
            for begin, end in blocks(numel, stage):
                worst += int(differing(gradient[begin:end], wire[begin:end]).sum())
                exact += wire[begin:end].double().square_().sum()
            if worst:
                raise BenchError(f"unpack of {numel} elements of bf16: {worst} differ")
            _close("sum of squares", totals.parameter_sums, exact, SUM_RTOL)
            stage.note(far_sum_relative_error=abs(float(totals.parameter_sums / exact - 1)))
    stage.note(far_sum_numel=numel)


def _number(value: int, device: torch.device) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int64, device=device)


def _noise(numel: int, dtype: torch.dtype, seed: int, device: torch.device, shift: int = 0) -> torch.Tensor:
    """Normal values, `shift` elements past where memory was allocated."""
    room = torch.empty(numel + shift, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    values = room[shift:]
    for begin in range(0, numel, BLOCK_NUMEL):
        end = min(begin + BLOCK_NUMEL, numel)
        values[begin:end] = torch.randn(end - begin, generator=generator, device=device)
    return values


if __name__ == "__main__":
    entry(run)
