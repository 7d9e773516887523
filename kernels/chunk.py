"""What all kernels of gradients share: one program converts or reads one chunk, `destination = round(op(source))`.

A chunk is `count` consecutive elements. Its middle, where source and destination are aligned together, moves in
tiles of 16-byte accesses; the few elements before and after it move in one narrow piece, one element per thread.
Where source and destination are never aligned together (a gradient that is a view at an odd address), the narrow
piece loops over the whole chunk, so every alignment is right and the common one is fast.

Example, fp32 -> bf16, so VECTOR = 16 bytes / 4 bytes = 4 elements: count = 13, destination 3 elements short of
alignment. Head = elements 0 to 2, middle = 3 to 10 (two vectors), tail = 11 and 12; the narrow piece moves
elements 0, 1, 2, 11 and 12 with five threads.

Arithmetic: load in the source's own dtype, compute in fp32 (fp64 if either side is fp64), round once to the
destination's dtype. The check of machine code finds accesses to gradients and wire by the four functions that they go
through: load_vector, store_vector, load_single, store_single.
"""

import triton
import triton.language as tl

from .table import PADDING_CODE

# Columns of a ChunkTable row: parameter, begin, end, offset, dtype code.
ROW = tl.constexpr(5)
PADDING = tl.constexpr(PADDING_CODE)
DIVIDE = tl.constexpr(0)
MULTIPLY = tl.constexpr(1)
# What walk_gradient does with a gradient.
TO_WIRE = tl.constexpr(0)
FROM_WIRE = tl.constexpr(1)
IN_PLACE = tl.constexpr(2)
READ = tl.constexpr(3)
# Statistics that convert_chunk collects.
NOTHING = tl.constexpr(0)
STORED = tl.constexpr(1)
SOURCES = tl.constexpr(2)
# Between these bounds a chunk's sum of squares in fp32 is accurate: squares that were flushed to zero are below 2^-24
# of it, and nothing has overflowed.
SUM_LOWEST = tl.constexpr(1e-27)
SUM_HIGHEST = tl.constexpr(3e38)
NOT_FOUND = tl.constexpr(0x7FFFFFFF)
NO_HINT = tl.constexpr("")  # Triton 3.6 takes a bare string as a default for no constexpr
NEAREST = tl.constexpr("nearest")  # else a CastWire's kernel


@triton.jit
def load_vector(pointer, mask, EVICTION: tl.constexpr = NO_HINT):
    return tl.load(pointer, mask=mask, other=0.0, eviction_policy=EVICTION)


@triton.jit
def store_vector(pointer, value, mask, EVICTION: tl.constexpr = NO_HINT):
    tl.store(pointer, value, mask=mask, eviction_policy=EVICTION)


@triton.jit
def load_single(pointer, mask):
    return tl.load(pointer, mask=mask, other=0.0)


@triton.jit
def store_single(pointer, value, mask):
    tl.store(pointer, value, mask=mask)


@triton.jit
def round_once(value, DESTINATION: tl.constexpr, ROUNDING: tl.constexpr = NEAREST):
    """One rounding to DESTINATION, to nearest or by the jit function ROUNDING, which gets fp32.

    fp64 -> bf16 or fp16 has no single instruction; through a plain fp32 it would round twice. So fp32 is taken
    rounded to odd (the last bit is set when anything was lost): the second rounding then sees on which side of a
    tie the value was. 1 + 2^-8 + 2^-40 -> fp32 by nearest is 1 + 2^-8, a tie, -> bf16 1.0 (wrong); rounded to odd
    it is 1 + 2^-8 + 2^-23 -> bf16 1 + 2^-7 (right).
    """
    if value.dtype.primitive_bitwidth == 64 and DESTINATION.primitive_bitwidth == 16:
        nearest = value.to(tl.float32)
        back = nearest.to(tl.float64)
        bits = nearest.to(tl.int32, bitcast=True)
        lost = (back != value) & (value == value) & ((bits & 1) == 0)
        toward = tl.where(tl.abs(value) > tl.abs(back), 1, -1)
        odd = tl.where(lost, bits + toward, bits).to(tl.float32, bitcast=True)
        return _round_by(odd, DESTINATION, ROUNDING)
    else:
        return _round_by(value, DESTINATION, ROUNDING)


@triton.jit
def _round_by(value, DESTINATION: tl.constexpr, ROUNDING: tl.constexpr):
    if ROUNDING == NEAREST:
        return value.to(DESTINATION)
    else:
        return ROUNDING(value).to(DESTINATION)


@triton.jit
def apply_scalar(value, scalar, OP: tl.constexpr):
    """value / scalar, correctly rounded, or value * scalar."""
    if OP == MULTIPLY:
        return value * scalar
    elif value.dtype.primitive_bitwidth == 64:
        return value / scalar
    else:
        return tl.div_rn(value, scalar)


@triton.jit
def convert_chunk(
    source,
    destination,
    count,
    scalar,
    SOURCE: tl.constexpr,
    DESTINATION: tl.constexpr,
    OP: tl.constexpr,
    WATCH: tl.constexpr,
    TILE_BYTES: tl.constexpr,
    LANES: tl.constexpr,
    HINT: tl.constexpr = NO_HINT,
    ROUNDING: tl.constexpr = NEAREST,
):
    """Moves `count` elements; returns what `chunk_sum` or `chunk_faults` needs.

    `source` and `destination` are int64 addresses of the chunk's first element, each a multiple of its itemsize; they
    may be the same memory. Returns two numbers per vector [TILE_BYTES / 16] and the same of the narrow piece [LANES].
    WATCH = STORED: sums of squares and largest absolute values as stored. WATCH = SOURCES: sums of 0 * op(source), not
    0 where a source is NaN or infinite (or op overflowed), and how many sources are not 0 and stored as 0.
    """
    SOURCE_BYTES: tl.constexpr = SOURCE.primitive_bitwidth // 8
    DESTINATION_BYTES: tl.constexpr = DESTINATION.primitive_bitwidth // 8
    # The wider side decides: 16 bytes there, 8 on the narrow side. 16 on both would cost a layout conversion.
    WIDE_BYTES: tl.constexpr = SOURCE_BYTES if SOURCE_BYTES > DESTINATION_BYTES else DESTINATION_BYTES
    COMPUTE: tl.constexpr = tl.float64 if WIDE_BYTES == 8 else tl.float32
    VECTOR: tl.constexpr = 16 // WIDE_BYTES
    VECTORS: tl.constexpr = TILE_BYTES // 16
    TILE: tl.constexpr = VECTORS * VECTOR
    # Half of the destination's smallest number: up to here everything is rounded to 0.
    LOST: tl.constexpr = 2.0**-25 if DESTINATION == tl.float16 else 2.0**-134
    # As table.may_flush says of torch's dtypes.
    FLUSHES: tl.constexpr = DESTINATION_BYTES < SOURCE_BYTES
    # What is read is not read again soon; what is written is, by the collective or the optimizer.
    READ_EVICTION: tl.constexpr = "" if HINT == "" else "evict_first"
    WRITE_EVICTION: tl.constexpr = "evict_first" if HINT == "both" else ""

    head = ((VECTOR - (destination // DESTINATION_BYTES) % VECTOR) % VECTOR).to(tl.int32)
    together = (source // SOURCE_BYTES + head) % VECTOR == 0
    head = tl.minimum(tl.where(together, head, count), count)
    middle = tl.multiple_of((count - head) // VECTOR * VECTOR, VECTOR)

    source_ptr = source.to(tl.pointer_type(SOURCE))
    destination_ptr = destination.to(tl.pointer_type(DESTINATION))
    vector_source = tl.multiple_of(source_ptr + head, VECTOR * SOURCE_BYTES)
    vector_destination = tl.multiple_of(destination_ptr + head, VECTOR * DESTINATION_BYTES)
    tile_lane = tl.arange(0, TILE)
    sums, marks = no_sums(VECTORS, COMPUTE), no_marks(VECTORS, COMPUTE, WATCH)
    for start in tl.range(0, middle, TILE):
        index = tl.multiple_of(start, VECTOR) + tile_lane
        inside = index < middle
        value = load_vector(vector_source + index, inside, READ_EVICTION).to(COMPUTE)
        result = apply_scalar(value, scalar, OP)
        stored = round_once(result, DESTINATION, ROUNDING)
        store_vector(vector_destination + index, stored, inside, WRITE_EVICTION)
        # A vector lies in one thread: added up there, it costs one register of accumulator instead of VECTOR.
        if WATCH == STORED:
            seen = tl.reshape(stored.to(COMPUTE), (VECTORS, VECTOR))
            sums += tl.sum(seen * seen, axis=1)
            marks = tl.maximum(marks, tl.max(tl.abs(seen), axis=1))
        if WATCH == SOURCES:
            sums += tl.sum(tl.reshape(result * 0.0, (VECTORS, VECTOR)), axis=1)
            if FLUSHES:
                lost = (value != 0.0) & _is_flushed(result, stored, LOST, ROUNDING)
                marks += tl.sum(tl.reshape(lost.to(tl.int32), (VECTORS, VECTOR)), axis=1)

    lane = tl.arange(0, LANES)
    # fp64: where the piece is the whole chunk, as many additions follow one another as it has turns.
    edge_sums, edge_marks = no_sums(LANES, tl.float64), no_marks(LANES, COMPUTE, WATCH)
    for start in tl.range(0, count - middle, LANES):
        piece = start + lane
        index = tl.where(piece < head, piece, piece + middle)
        inside = piece < count - middle
        value = load_single(source_ptr + index, inside).to(COMPUTE)
        result = apply_scalar(value, scalar, OP)
        stored = round_once(result, DESTINATION, ROUNDING)
        store_single(destination_ptr + index, stored, inside)
        if WATCH == STORED:
            seen = stored.to(COMPUTE)
            edge_sums += (seen * seen).to(tl.float64)
            edge_marks = tl.maximum(edge_marks, tl.abs(seen))
        if WATCH == SOURCES:
            edge_sums += (result * 0.0).to(tl.float64)
            if FLUSHES:
                edge_marks += ((value != 0.0) & _is_flushed(result, stored, LOST, ROUNDING)).to(tl.int32)
    return sums, marks, edge_sums, edge_marks


@triton.jit
def _is_flushed(result, stored, LOST: tl.constexpr, ROUNDING: tl.constexpr):
    """Where 0 is stored: known of the result if it is rounded to nearest, so that what is stored is let go of."""
    if ROUNDING == NEAREST:
        return tl.abs(result) <= LOST
    else:
        return stored.to(tl.float32) == 0.0


@triton.jit
def no_sums(SIZE: tl.constexpr, DTYPE: tl.constexpr):
    """Sums of nothing."""
    return tl.zeros((SIZE,), DTYPE)


@triton.jit
def no_marks(SIZE: tl.constexpr, COMPUTE: tl.constexpr, WATCH: tl.constexpr):
    """Largest absolute values of nothing, or (WATCH = SOURCES) counts of nothing."""
    if WATCH == SOURCES:
        return tl.zeros((SIZE,), tl.int32)
    else:
        return tl.zeros((SIZE,), COMPUTE)


@triton.jit
def measure_chunk(source, count, SOURCE: tl.constexpr, TILE_BYTES: tl.constexpr, LANES: tl.constexpr):
    """Reads `count` elements; returns what convert_chunk does for WATCH = STORED, of what is there."""
    BYTES: tl.constexpr = SOURCE.primitive_bitwidth // 8
    COMPUTE: tl.constexpr = tl.float64 if BYTES == 8 else tl.float32
    VECTOR: tl.constexpr = 16 // BYTES
    VECTORS: tl.constexpr = TILE_BYTES // 16
    TILE: tl.constexpr = VECTORS * VECTOR
    pointer = source.to(tl.pointer_type(SOURCE))
    head = tl.minimum(((VECTOR - (source // BYTES) % VECTOR) % VECTOR).to(tl.int32), count)
    middle = tl.multiple_of((count - head) // VECTOR * VECTOR, VECTOR)
    vector_pointer = tl.multiple_of(pointer + head, 16)
    tile_lane = tl.arange(0, TILE)
    sums, marks = no_sums(VECTORS, COMPUTE), no_marks(VECTORS, COMPUTE, STORED)
    for start in tl.range(0, middle, TILE):
        index = tl.multiple_of(start, VECTOR) + tile_lane
        value = load_vector(vector_pointer + index, index < middle).to(COMPUTE)
        seen = tl.reshape(value, (VECTORS, VECTOR))
        sums += tl.sum(seen * seen, axis=1)
        marks = tl.maximum(marks, tl.max(tl.abs(seen), axis=1))
    # Head and tail together are fewer elements than LANES.
    piece = tl.arange(0, LANES)
    index = tl.where(piece < head, piece, piece + middle)
    seen = load_single(pointer + index, piece < count - middle).to(COMPUTE)
    return sums, marks, (seen * seen).to(tl.float64), tl.abs(seen)


@triton.jit
def zero_chunk(destination, count, DESTINATION: tl.constexpr, TILE_BYTES: tl.constexpr, LANES: tl.constexpr):
    """Writes `count` zeros: a missing gradient, or padding (a stale NaN there would travel)."""
    BYTES: tl.constexpr = DESTINATION.primitive_bitwidth // 8
    VECTOR: tl.constexpr = 16 // BYTES
    TILE: tl.constexpr = TILE_BYTES // BYTES
    pointer = destination.to(tl.pointer_type(DESTINATION))
    head = tl.minimum(((VECTOR - (destination // BYTES) % VECTOR) % VECTOR).to(tl.int32), count)
    middle = tl.multiple_of((count - head) // VECTOR * VECTOR, VECTOR)
    vector_pointer = tl.multiple_of(pointer + head, 16)
    tile_lane = tl.arange(0, TILE)
    for start in tl.range(0, middle, TILE):
        index = tl.multiple_of(start, VECTOR) + tile_lane
        store_vector(vector_pointer + index, tl.zeros((TILE,), DESTINATION), index < middle)
    # Head and tail together are fewer elements than LANES.
    piece = tl.arange(0, LANES)
    index = tl.where(piece < head, piece, piece + middle)
    store_single(pointer + index, tl.zeros((LANES,), DESTINATION), piece < count - middle)


@triton.jit
def load_row(addresses, rows, program):
    """(gradient's address, begin, count, wire offset, dtype code) of a row of the table."""
    row = rows + program * ROW
    address, begin = load_place(addresses, rows, program)
    count = (tl.load(row + 2) - begin).to(tl.int32)
    return address, begin, count, tl.load(row + 3), tl.load(row + 4)


@triton.jit
def load_place(addresses, rows, program):
    """(gradient's address, begin) of a row of the table."""
    row = rows + program * ROW
    return tl.load(addresses + tl.load(row)), tl.load(row + 1)


@triton.jit
def walk_gradient(
    address,
    begin,
    place,
    count,
    scalar,
    dtype,
    WAY: tl.constexpr,
    WIRE: tl.constexpr,
    FP64: tl.constexpr,
    OP: tl.constexpr,
    WATCH: tl.constexpr,
    TILE_BYTES: tl.constexpr,
    LANES: tl.constexpr,
    HINT: tl.constexpr = NO_HINT,
    ROUNDING: tl.constexpr = NEAREST,
):
    """Converts or reads a chunk of a gradient of any dtype, with a branch for each; returns what convert_chunk does.

    `place` is the address of its slot on the wire. Without a gradient (address 0) TO_WIRE writes zeros.
    """
    COMPUTE: tl.constexpr = tl.float64 if FP64 else tl.float32
    sums, edge_sums = no_sums(TILE_BYTES // 16, COMPUTE), no_sums(LANES, tl.float64)
    marks, edge_marks = no_marks(TILE_BYTES // 16, COMPUTE, WATCH), no_marks(LANES, COMPUTE, WATCH)
    chunk = place, count, scalar
    if address == 0:
        if WAY == TO_WIRE:
            zero_chunk(place, count, WIRE, TILE_BYTES, LANES)
    elif FP64:
        sums, marks, edge_sums, edge_marks = _walk_as(
            address + begin * 8, chunk, tl.float64, WAY, WIRE, OP, WATCH, TILE_BYTES, LANES, HINT, ROUNDING
        )
    elif dtype == 0:
        sums, marks, edge_sums, edge_marks = _walk_as(
            address + begin * 4, chunk, tl.float32, WAY, WIRE, OP, WATCH, TILE_BYTES, LANES, HINT, ROUNDING
        )
    elif dtype == 1:
        sums, marks, edge_sums, edge_marks = _walk_as(
            address + begin * 2, chunk, tl.bfloat16, WAY, WIRE, OP, WATCH, TILE_BYTES, LANES, HINT, ROUNDING
        )
    else:
        sums, marks, edge_sums, edge_marks = _walk_as(
            address + begin * 2, chunk, tl.float16, WAY, WIRE, OP, WATCH, TILE_BYTES, LANES, HINT, ROUNDING
        )
    return sums, marks, edge_sums, edge_marks


@triton.jit
def _walk_as(
    gradient,
    chunk,
    GRADIENT: tl.constexpr,
    WAY: tl.constexpr,
    WIRE: tl.constexpr,
    OP: tl.constexpr,
    WATCH: tl.constexpr,
    TILE_BYTES: tl.constexpr,
    LANES: tl.constexpr,
    HINT: tl.constexpr,
    ROUNDING: tl.constexpr,
):
    place, count, scalar = chunk
    if WAY == TO_WIRE:
        return convert_chunk(
            gradient, place, count, scalar, GRADIENT, WIRE, OP, WATCH, TILE_BYTES, LANES, HINT, ROUNDING
        )
    elif WAY == FROM_WIRE:
        return convert_chunk(place, gradient, count, scalar, WIRE, GRADIENT, OP, WATCH, TILE_BYTES, LANES, HINT)
    elif WAY == IN_PLACE:
        return convert_chunk(gradient, gradient, count, scalar, GRADIENT, GRADIENT, OP, WATCH, TILE_BYTES, LANES, HINT)
    else:
        return measure_chunk(gradient, count, GRADIENT, TILE_BYTES, LANES)


@triton.jit
def chunk_sum(sums, marks, edge_sums, edge_marks):
    """(sum of squares in fp64, largest absolute value, whether they stand): they do not where squares may have
    overflowed or vanished, or something is not finite.

    All zeros stands, and is common: rows of an embedding that were not looked up.
    """
    # fp64 from here on: a sum of a few squares in fp32 is off by as many times 2^-24, and then by no more.
    total = tl.sum(sums.to(tl.float64), axis=0) + tl.sum(edge_sums, axis=0)
    peak = tl.maximum(tl.max(marks, axis=0), tl.max(edge_marks, axis=0))
    stands = ((total > SUM_LOWEST) & (total < SUM_HIGHEST)) | ((total == 0.0) & (peak == 0.0))
    return total, peak.to(tl.float64), stands


@triton.jit
def chunk_faults(sums, marks, edge_sums, edge_marks):
    """(whether all sources are known to be finite, how many were flushed)."""
    zero = tl.sum(sums.to(tl.float64), axis=0) + tl.sum(edge_sums, axis=0)
    flushed = tl.sum(marks, axis=0) + tl.sum(edge_marks, axis=0)
    return zero == 0.0, flushed.to(tl.int64)


@triton.jit
def careful_sum(source, count, SOURCE: tl.constexpr, LANES: tl.constexpr):
    """Sum of squares in fp64 and first non-finite index (-1: none) of what this program has just read or stored."""
    # Other threads of this program stored some of what this one reads.
    tl.debug_barrier()
    pointer = source.to(tl.pointer_type(SOURCE))
    lane = tl.arange(0, LANES)
    squares = tl.zeros((LANES,), tl.float64)
    found = tl.full((LANES,), NOT_FOUND, tl.int32)
    for start in tl.range(0, count, LANES):
        index = start + lane
        seen = load_single(pointer + index, index < count).to(tl.float64)
        squares += seen * seen
        found = tl.minimum(found, tl.where(tl.abs(seen) < float("inf"), NOT_FOUND, index))
    first = tl.min(found, axis=0)
    return tl.sum(squares, axis=0), tl.where(first == NOT_FOUND, -1, first).to(tl.int64)


@triton.jit
def careful_gradient(address, begin, count, dtype, FP64: tl.constexpr, LANES: tl.constexpr):
    """careful_sum of a chunk of a gradient; the index is that within the parameter's memory."""
    if FP64:
        total, first = careful_sum(address + begin * 8, count, tl.float64, LANES)
    elif dtype == 0:
        total, first = careful_sum(address + begin * 4, count, tl.float32, LANES)
    elif dtype == 1:
        total, first = careful_sum(address + begin * 2, count, tl.bfloat16, LANES)
    else:
        total, first = careful_sum(address + begin * 2, count, tl.float16, LANES)
    return total, tl.where(first < 0, first, first + begin)


@triton.jit
def gradient_sums(
    sums, marks, edge_sums, edge_marks, address, begin, count, dtype, FP64: tl.constexpr, LANES: tl.constexpr
):
    """(sum of squares, largest absolute value, first non-finite index) of a chunk of a gradient."""
    total, peak, stands = chunk_sum(sums, marks, edge_sums, edge_marks)
    first = tl.full((), -1, tl.int64)
    if not stands:
        total, first = careful_gradient(address, begin, count, dtype, FP64, LANES)
        # A GPU's maximum drops NaN; a sum of squares is NaN where one is NaN and nowhere else.
        peak = tl.where(total == total, peak, float("nan"))
    return total, peak, first
