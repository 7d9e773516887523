"""What the kernels of encoded buckets share: blocks in registers, from values to codes and back.

A tile is two tensors [rows, block / 2]: a row is a block, the tensors are its halves. With 16 bytes of a gradient per
thread and access, half a block lies within one warp (256 elements of fp32 would take two), so its largest value is
found without shared memory, and codes of int4 meet their partner, element j + block / 2, in the same thread.

A gradient whose first element is aligned moves in accesses of 16 bytes, up to its last whole vector. What is left, and
all of a gradient at an odd address, moves element by element, by the same threads.

A code is found by adding 1.5 * 2^23: the sum is rounded to a whole number, which then stands in its last bits.
"""

import triton
import triton.language as tl

from .chunk import load_single, load_vector, store_single, store_vector

_SHIFT = tl.constexpr(12582912.0)
_SIGNLESS = tl.constexpr(0x7FFFFFFF)
_INFINITY = tl.constexpr(0x7F800000)
_NAN = tl.constexpr(0x7FC00000)
_SMALLEST_SCALE = tl.constexpr(2.0**-126)


@triton.jit
def load_halves(address, index, half, middle, end, rest, DTYPE: tl.constexpr, VECTOR: tl.constexpr):
    """(elements at `index`, those `half` further): before `middle` in wide accesses; if `rest`, those up to `end` one
    by one; zeros behind.

    The second masks are of single elements, so their accesses are no wider, whatever the pointer claims. With a pointer
    that claims less their elements would belong to other threads, and get there through shared memory.
    """
    pointer = tl.multiple_of(address.to(tl.pointer_type(DTYPE)), VECTOR * DTYPE.primitive_bitwidth // 8)
    middle = tl.multiple_of(middle, VECTOR)
    other = index + half
    low = load_vector(pointer + index, index < middle)
    high = load_vector(pointer + other, other < middle)
    if rest:
        low = tl.where(index < middle, low, load_single(pointer + index, (index >= middle) & (index < end)))
        high = tl.where(other < middle, high, load_single(pointer + other, (other >= middle) & (other < end)))
    return low, high


@triton.jit
def store_halves(address, index, half, low, high, middle, end, rest, DTYPE: tl.constexpr, VECTOR: tl.constexpr):
    """Writes what `load_halves` reads."""
    pointer = tl.multiple_of(address.to(tl.pointer_type(DTYPE)), VECTOR * DTYPE.primitive_bitwidth // 8)
    middle = tl.multiple_of(middle, VECTOR)
    other = index + half
    store_vector(pointer + index, low, index < middle)
    store_vector(pointer + other, high, other < middle)
    if rest:
        store_single(pointer + index, low, (index >= middle) & (index < end))
        store_single(pointer + other, high, (other >= middle) & (other < end))


@triton.jit
def load_kept(address, index, half, middle, end, rest, SOURCE: tl.constexpr, VECTOR: tl.constexpr):
    """Residuals, as `load_halves`."""
    return load_halves(address, index, half, middle, end, rest, SOURCE, VECTOR)


@triton.jit
def store_kept(address, index, half, low, high, middle, end, rest, DESTINATION: tl.constexpr, VECTOR: tl.constexpr):
    """Residuals, as `store_halves`."""
    store_halves(address, index, half, low, high, middle, end, rest, DESTINATION, VECTOR)


@triton.jit
def load_residuals(first_copy, second_copy, live, parameter):
    """(address of the residual that is read, of the one that is written)."""
    first, second = tl.load(first_copy + parameter), tl.load(second_copy + parameter)
    return tl.where(live == 0, first, second), tl.where(live == 0, second, first)


@triton.jit
def load_scales(pointer, mask, BITS: tl.constexpr):
    """Scales as fp32."""
    if BITS == 8:
        scale = tl.load(pointer.to(tl.pointer_type(tl.float32)), mask=mask, other=0.0)
    else:
        stored = tl.load(pointer.to(tl.pointer_type(tl.int16)), mask=mask, other=0)
        scale = (stored.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def store_scales(address, scale, finite, inside, BITS: tl.constexpr, THREADS: tl.constexpr):
    """Scales from fp32; NaN where a block is not finite.

    As [rows, THREADS], of which the first column is written: THREADS threads hold a row. As [rows] they would first
    change threads, through shared memory.
    """
    ROWS: tl.constexpr = scale.shape[0]
    SCALE_BYTES: tl.constexpr = 4 if BITS == 8 else 2
    bits = tl.where(finite, scale.to(tl.int32, bitcast=True), _NAN)
    place = tl.broadcast_to((address + tl.arange(0, ROWS) * SCALE_BYTES)[:, None], (ROWS, THREADS))
    wanted = inside[:, None] & (tl.arange(0, THREADS)[None, :] == 0)
    if BITS == 8:
        tl.store(place.to(tl.pointer_type(tl.int32)), tl.broadcast_to(bits[:, None], (ROWS, THREADS)), mask=wanted)
    else:
        upper = (bits >> 16).to(tl.int16)
        tl.store(place.to(tl.pointer_type(tl.int16)), tl.broadcast_to(upper[:, None], (ROWS, THREADS)), mask=wanted)


@triton.jit
def block_peaks(low, high):
    """The bits of each block's largest absolute value: as integers in order, infinity and NaN behind all numbers."""
    bits = tl.maximum(low.to(tl.int32, bitcast=True) & _SIGNLESS, high.to(tl.int32, bitcast=True) & _SIGNLESS)
    return tl.max(bits, axis=1)


@triton.jit
def block_scales(peak, BITS: tl.constexpr):
    """(scale, its inverse, whether the block is finite) of blocks with these largest values."""
    LEVELS: tl.constexpr = 127.0 if BITS == 8 else 7.0
    finite = peak < _INFINITY
    scale = tl.div_rn(peak.to(tl.float32, bitcast=True), LEVELS)
    zero = scale < _SMALLEST_SCALE
    if BITS == 4:  # up to the next bf16
        scale = ((scale.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000).to(tl.float32, bitcast=True)
    # What is below the smallest scale is rounded to 0 with an inverse of 1 too.
    inverse = tl.div_rn(1.0, tl.where(zero, 1.0, scale))
    return tl.where(zero, 0.0, scale), inverse, finite


@triton.jit
def round_codes(value, inverse, finite, words, BITS: tl.constexpr, STOCHASTIC: tl.constexpr):
    """(codes as fp32, numbers whose last 8 bits are the codes)."""
    LEVELS: tl.constexpr = 127.0 if BITS == 8 else 7.0
    ratio = tl.where(finite[:, None], value * inverse[:, None], 0.0)
    if STOCHASTIC:
        within = tl.minimum(tl.maximum(ratio, -LEVELS), LEVELS)
        code = tl.floor(within + (words.to(tl.float32) * 2.0**-16 + 2.0**-17))
        return code, code.to(tl.int32)
    else:
        shifted = ratio + _SHIFT
        return shifted - _SHIFT, shifted.to(tl.int32, bitcast=True)


@triton.jit
def load_key(draw):
    """(64 bits of seed and stream, step) of stochastic rounding."""
    return tl.load(draw) | (tl.load(draw + 1) << 32), tl.load(draw + 2)


@triton.jit
def random_words(key, step, parameter, first_block, ROWS: tl.constexpr, HALF: tl.constexpr):
    """32 random bits for each pair of elements of blocks from `first_block` of a parameter on; see `philox`."""
    QUADS: tl.constexpr = HALF // 4
    number = (first_block + tl.arange(0, ROWS))[:, None] * QUADS + tl.arange(0, QUADS)[None, :]
    low, high = (number & 0xFFFFFFFF).to(tl.uint32), (number >> 32).to(tl.uint32)
    zeros = tl.zeros_like(low)
    first, second, third, fourth = tl.philox(
        key, low, high, zeros + parameter.to(tl.uint32), zeros + (step & 0xFFFFFFFF).to(tl.uint32)
    )
    pairs = tl.join(tl.join(first, third), tl.join(second, fourth))
    return tl.reshape(pairs, (ROWS, HALF))


@triton.jit
def encode_tile(low, high, inside, place, BITS: tl.constexpr, VECTOR: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Encodes the halves of blocks [rows, block / 2] and writes those that are `inside` [rows].

    Args:
        place: addresses of the tile's first scale and code, then what `random_words` takes.

    Returns what the codes stand for, and which blocks are finite.
    """
    scales, codes, key, step, parameter, first_block = place
    ROWS: tl.constexpr = low.shape[0]
    HALF: tl.constexpr = low.shape[1]
    scale, inverse, finite = block_scales(block_peaks(low, high), BITS)
    if STOCHASTIC:
        words = random_words(key, step, parameter, first_block, ROWS, HALF)
        low_code, low_bits = round_codes(low, inverse, finite, words & 0xFFFF, BITS, STOCHASTIC)
        high_code, high_bits = round_codes(high, inverse, finite, words >> 16, BITS, STOCHASTIC)
    else:
        low_code, low_bits = round_codes(low, inverse, finite, 0, BITS, STOCHASTIC)
        high_code, high_bits = round_codes(high, inverse, finite, 0, BITS, STOCHASTIC)
    row = tl.arange(0, ROWS)
    lane = tl.arange(0, HALF)[None, :]
    store_scales(scales, scale, finite, inside, BITS, HALF // VECTOR)
    pointer = tl.multiple_of(codes.to(tl.pointer_type(tl.int8)), VECTOR)
    wanted = inside[:, None] & (lane < HALF)
    if BITS == 8:
        place = row[:, None] * (2 * HALF) + lane
        store_vector(pointer + place, low_bits.to(tl.int8), wanted)
        store_vector(pointer + place + HALF, high_bits.to(tl.int8), wanted)
    else:
        store_vector(pointer + row[:, None] * HALF + lane, (low_bits + (high_bits << 4)).to(tl.int8), wanted)
    return low_code * scale[:, None], high_code * scale[:, None], finite


@triton.jit
def decode_tile(
    scales, codes, inside, ROWS: tl.constexpr, HALF: tl.constexpr, BITS: tl.constexpr, VECTOR: tl.constexpr
):
    """The values of blocks, as their halves [rows, block / 2]; `scales` and `codes` as of `encode_tile`."""
    row = tl.arange(0, ROWS)
    lane = tl.arange(0, HALF)[None, :]
    SCALE_BYTES: tl.constexpr = 4 if BITS == 8 else 2
    scale = load_scales(scales + row * SCALE_BYTES, inside, BITS)[:, None]
    pointer = tl.multiple_of(codes.to(tl.pointer_type(tl.int8)), VECTOR)
    wanted = inside[:, None] & (lane < HALF)
    if BITS == 8:
        place = row[:, None] * (2 * HALF) + lane
        low = load_vector(pointer + place, wanted).to(tl.int32)
        high = load_vector(pointer + place + HALF, wanted).to(tl.int32)
    else:
        both = load_vector(pointer + row[:, None] * HALF + lane, wanted).to(tl.int32)
        low = (both << 28) >> 28
        high = (both - low) >> 4
    return low.to(tl.float32) * scale, high.to(tl.float32) * scale
