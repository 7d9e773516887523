"""Arithmetic of PTX on arrays, bit for bit: to nearest, ties to even, subnormal numbers kept, one NaN."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from support.emulator.ptx import TYPES, Array, PtxError

_NAN32, _NAN16 = np.uint32(0x7FFFFFFF), np.uint16(0x7FFF)


def canonical(value: Array) -> Array:
    """Results that are NaN are one NaN."""
    nan = value != value
    if nan.any():
        value = np.array(value)
        if value.dtype == np.float32:
            value.view(np.uint32)[nan] = _NAN32
        elif value.dtype == np.float64:
            value.view(np.uint64)[nan] = np.uint64(0x7FF8000000000000)
        else:
            value.view(np.uint16)[nan] = _NAN16
    return value


_libm = ctypes.CDLL("libm.so.6")
_libm.fma.restype = ctypes.c_double
_libm.fma.argtypes = [ctypes.c_double] * 3
_fma64_one = np.frompyfunc(_libm.fma, 3, 1)


def fma(a: Array, b: Array, c: Array) -> Array:
    """a * b + c, rounded once."""
    if np.result_type(a) == np.float64:
        return canonical(np.asarray(_fma64_one(a, b, c), dtype=np.float64))
    # The product of two fp32 is exact in fp64; the sum is taken there rounded to odd, so that what follows rounds once.
    product, addend = np.multiply(a, b, dtype=np.float64), np.asarray(c, dtype=np.float64)
    total = np.atleast_1d(product + addend)
    part = total - product
    error = (product - (total - part)) + (addend - part)
    bits = total.view(np.int64)
    even = (error != 0) & np.isfinite(total) & np.isfinite(error) & ((bits & 1) == 0)
    odd = np.where(even, np.where((error > 0) == (total > 0), bits + 1, bits - 1), bits)
    return canonical(odd.view(np.float64).astype(np.float32))


def drop_nan(pick: Callable[[Array, Array], Array], largest: bool) -> Callable[[Array, Array], Array]:
    def picked(a: Array, b: Array) -> Array:
        result = np.where(a != a, b, np.where(b != b, a, pick(a, b)))
        # -0 is less than +0.
        zero = (a == 0) & (b == 0)
        signed = (np.signbit(a) & np.signbit(b)) if largest else (np.signbit(a) | np.signbit(b))
        zeros = np.where(signed, a.dtype.type(-0.0), a.dtype.type(0.0))
        return canonical(np.where(zero, zeros, result))

    return picked


def to_bf16(value: Array) -> Array:
    """fp32 to the bits of bf16, to nearest, ties to even."""
    bits = np.atleast_1d(value).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(value != value, _NAN16, rounded.astype(np.uint16))


def from_bf16(bits: Array) -> Array:
    return canonical((np.asarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32))


def shift_left(a: Array, by: Array) -> Array:
    bits = a.dtype.itemsize * 8
    kind = a.dtype.type
    shifted: Array = np.where(by >= bits, kind(0), a << np.minimum(by, bits - 1).astype(kind))
    return shifted


def shift_right(a: Array, by: Array) -> Array:
    bits = a.dtype.itemsize * 8
    kind = a.dtype.type
    shifted: Array = a >> np.minimum(by, bits - 1).astype(kind)
    return shifted if a.dtype.kind == "i" else np.where(by >= bits, kind(0), shifted)


def doubled(kind: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(f"{kind.kind}{2 * kind.itemsize}")


def permuted(a: Array, b: Array, selector: int) -> Array:
    """Each byte of the result is one of the eight bytes of b and a, or eight times its sign."""
    both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    result = np.zeros(both.shape, dtype=np.uint32)
    for nth in range(4):
        chosen = selector >> (4 * nth) & 15
        byte = (both >> np.uint64(8 * (chosen & 7))).astype(np.uint8)
        if chosen & 8:
            byte = np.where(byte & np.uint8(0x80), np.uint8(0xFF), np.uint8(0))
        result |= byte.astype(np.uint32) << np.uint32(8 * nth)
    return result


_COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


def compared(how: str, kind: str) -> Callable[[Array, Array], Array]:
    if kind not in ("f16", "f32", "f64", "bf16"):
        return _COMPARE[how]

    def compare(a: Array, b: Array) -> Array:
        if kind == "bf16":
            a, b = from_bf16(a), from_bf16(b)
        unordered: Array = (a != a) | (b != b)
        if how in ("num", "nan"):
            return np.invert(unordered) if how == "num" else unordered
        if how.endswith("u"):
            return np.bitwise_or(_COMPARE[how[:-1]](a, b), unordered)
        return np.bitwise_and(_COMPARE[how](a, b), np.invert(unordered))

    if how not in ("num", "nan") and how not in _COMPARE and how[:-1] not in _COMPARE:
        raise PtxError(f"comparison {how} is not known")
    return compare


def converted(parts: list[str], source: str, target: str) -> Callable[[Array], Array]:
    """What `cvt.<parts>.<target>.<source>` does."""
    to_float, from_float = target in ("f16", "bf16", "f32", "f64"), source in ("f16", "bf16", "f32", "f64")
    rounding = [part for part in parts if part != "ftz"]
    if not to_float and not from_float and not rounding and "ftz" not in parts:
        return lambda a: a.astype(TYPES[target])
    if to_float and from_float and not parts:  # to a wider type: exact
        order = ["f16", "bf16", "f32", "f64"]
        if order.index(target) > order.index(source) and (source, target) != ("f16", "bf16"):
            if source == "bf16":
                return lambda a: from_bf16(a).astype(TYPES[target])
            return lambda a: canonical(a.astype(TYPES[target]))
    if to_float and from_float and parts == ["rn"]:
        if (source, target) == ("f32", "bf16"):
            return to_bf16
        if (source, target) in (("f32", "f16"), ("f64", "f32")):
            return lambda a: canonical(a.astype(TYPES[target]))
    if (source, target, rounding) == ("f32", "f32", ["rmi"]):

        def floor(a: Array) -> Array:
            if "ftz" in parts:
                a = np.where(np.abs(a) < np.float32(2.0**-126), np.copysign(np.float32(0), a), a)
            return canonical(np.floor(a))

        return floor
    if (source, target, parts) == ("f32", "s32", ["rzi"]):

        def truncate(a: Array) -> Array:
            wide = np.trunc(np.where(a != a, np.float32(0), a).astype(np.float64))
            return np.clip(wide, -(2.0**31), 2.0**31 - 1).astype(np.int64).astype(np.int32)

        return truncate
    if to_float and not from_float and parts == ["rn"] and target in ("f32", "f64"):
        return lambda a: a.astype(TYPES[target])
    raise PtxError(f"conversion {'.'.join(parts)} from {source} to {target} is not known")
