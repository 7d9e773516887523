"""Instructions of PTX, each made a function on the registers of many threads.

A step is called with the machine and the indices of the threads that run it (a slice of all of them, or an array), and
returns nothing. Branches, barriers and `ret` are the machine's own. What is not known raises when a kernel is read, and
nothing is ever skipped.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from support.emulator.arithmetic import (
    canonical,
    compared,
    converted,
    doubled,
    drop_nan,
    fma,
    from_bf16,
    permuted,
    shift_left,
    shift_right,
)
from support.emulator.ptx import INTEGERS, RAW, TYPES, WARP, Array, Instruction, Kernel, Literal, PtxError, Register

#
Read: TypeAlias = Callable[[Any, Any], Array]
# Modifiers of accesses that change no value.
_NEUTRAL = {"L1::evict_first", "L1::evict_last", "L1::evict_normal", "L2::cache_hint", "ca", "cg", "cs", "wb", "wt"}


def _width(kernel: Kernel, register: Register) -> int:
    prefix = register.name[1:].rstrip("0123456789")
    if prefix not in kernel.widths:
        raise PtxError(f"register {register.name} is not declared")
    return kernel.widths[prefix]


def _reader(kernel: Kernel, operand: Any, kind: str) -> Read:
    dtype = np.dtype(bool) if kind == "pred" else TYPES[kind]
    if isinstance(operand, Register):
        name = operand.name
        if name in ("%tid.x", "%ctaid.x", "%ntid.x", "%laneid"):
            return lambda m, w: m.special[name][w].view(dtype)
        if name in ("%tid.y", "%tid.z", "%ctaid.y", "%ctaid.z"):
            return lambda m, w: np.zeros(1, dtype)
        wanted = 1 if kind == "pred" else dtype.itemsize * 8
        if _width(kernel, operand) != wanted:
            raise PtxError(f"{name} has {_width(kernel, operand)} bits, {kind} was expected")
        return lambda m, w: m.typed(name, dtype)[w]
    if isinstance(operand, Literal):
        bits = operand.bits
        if kind == "pred":
            truth = np.array([bits != 0])
            return lambda m, w: truth
        if operand.floating and kind[0] in "fb" and operand.floating != dtype.itemsize * 8:
            raise PtxError(f"a literal of {operand.floating} bits for {kind}")
        if kind in ("f32", "f64") and not operand.floating:
            raise PtxError(f"an integer for {kind}")
        value = np.array([bits & (2 ** (dtype.itemsize * 8) - 1)], dtype=RAW[dtype.itemsize * 8]).view(dtype)
        return lambda m, w: value
    if operand == "global_smem":
        return lambda m, w: np.zeros(1, dtype)
    raise PtxError(f"operand {operand!r} is not understood")


def _writer(kernel: Kernel, operand: Any, kind: str) -> Callable[[Any, Any, Array], None]:
    if not isinstance(operand, Register):
        raise PtxError(f"{operand!r} cannot be written")
    name, dtype = operand.name, np.dtype(bool) if kind == "pred" else TYPES[kind]
    if _width(kernel, operand) != (1 if kind == "pred" else dtype.itemsize * 8):
        raise PtxError(f"{name} has {_width(kernel, operand)} bits, {kind} was expected")

    def write(m: Any, w: Any, value: Array) -> None:
        if value.dtype != dtype:
            value = value.view(dtype) if value.dtype.itemsize == dtype.itemsize else value.astype(dtype)
        m.typed(name, dtype)[w] = value

    return write


def step_of(kernel: Kernel, each: Instruction) -> Callable[[Any, Any], Any]:
    """The step of one instruction.

    Raises:
        PtxError: it is not known.
    """
    try:
        return _step(kernel, each)
    except (PtxError, KeyError, ValueError, IndexError) as error:
        raise PtxError(f"not known: {each.text} ({type(error).__name__}: {error}) at {each.where}") from error


def _step(kernel: Kernel, each: Instruction) -> Callable[[Any, Any], Any]:
    name, *parts = each.operation.split(".")
    if name in ("bra", "ret", "bar"):
        known = {"bra": ([], ["uni"]), "ret": ([],), "bar": (["sync"], ["warp", "sync"])}[name]
        if parts not in known or (name == "bar" and each.guard):
            raise PtxError("modifiers")
        if name == "bra" and each.operands[0] not in kernel.labels:
            raise PtxError("label")
        if parts == ["sync"] and each.operands != (Literal(0, 0),):
            raise PtxError("not the whole program's barrier")
        return lambda m, w: None
    if name in ("ld", "st"):
        return _access(kernel, each, name, parts)
    if name == "shfl":
        return _shuffle(kernel, each, parts)
    if name == "redux":
        return _warp_reduction(kernel, each, parts)
    if name == "mov" and any(isinstance(one, tuple) for one in each.operands):
        return _repacked(kernel, each, parts)
    if name == "cvt":
        return _conversion(kernel, each, parts)
    if each.operation == "createpolicy.fractional.L2::evict_first.b64" and each.operands[1:] == ("1.0",):
        hold = _writer(kernel, each.operands[0], "b64")  # opaque: of accesses that change no value by it
        return lambda m, w: hold(m, w, np.zeros(1, np.uint64))
    function, kinds, result = _function(name, parts, each)
    if len(each.operands) != len(kinds) + 1:
        raise PtxError("operands")
    reads = [_reader(kernel, operand, kind) for operand, kind in zip(each.operands[1:], kinds, strict=True)]
    write = _writer(kernel, each.operands[0], result)
    return lambda m, w: write(m, w, function(*[read(m, w) for read in reads]))


def _selected(a: Array, b: Array, chosen: Array) -> Array:
    return np.where(chosen, a, b)


def _function(name: str, parts: list[str], each: Instruction) -> tuple[Callable[..., Array], list[str], str]:
    """A function of arrays, the types of its arguments, and of its result."""
    kind = parts[-1]
    integer, floating = kind in INTEGERS, kind in ("f32", "f64")
    rest = parts[:-1]
    if name == "mov" and not rest:
        return (lambda a: a), [kind], kind
    if name == "selp" and not rest:
        return _selected, [kind, kind, "pred"], kind
    if name == "setp" and len(rest) == 1:
        return compared(rest[0], kind), [kind, kind], "pred"
    logic = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
    if name in logic and not rest:
        return logic[name], [kind, kind], kind
    if name == "not" and not rest:
        return np.invert, [kind], kind
    if name in ("shl", "shr") and not rest and integer:
        return (shift_left if name == "shl" else shift_right), [kind, "u32"], kind
    plain = {"add": np.add, "sub": np.subtract}
    if name in plain and integer and not rest:
        return plain[name], [kind, kind], kind
    if name in ("add", "sub", "mul") and floating and rest in ([], ["rn"]):
        operate = {**plain, "mul": np.multiply}[name]
        return (lambda a, b: canonical(operate(a, b))), [kind, kind], kind
    if name == "div" and floating and rest == ["rn"]:
        return (lambda a, b: canonical(np.divide(a, b))), [kind, kind], kind
    if name == "fma" and floating and rest == ["rn"]:
        return fma, [kind] * 3, kind
    if name == "add" and rest[:1] == ["rn"] and rest[1:] == ["f32"] and kind in ("f16", "bf16"):  # to fp32, as wide
        widen = from_bf16 if kind == "bf16" else converted([], "f16", "f32")
        return (lambda a, b: canonical(widen(a) + b)), [kind, "f32"], "f32"
    if name in ("min", "max") and not rest:
        pick = np.minimum if name == "min" else np.maximum
        if kind == "f32" and len(each.operands) == 4:
            two = drop_nan(pick, name == "max")
            return (lambda a, b, c: two(two(a, b), c)), [kind] * 3, kind
        return (drop_nan(pick, name == "max") if floating else pick), [kind, kind], kind
    if name == "abs" and not rest:
        return (lambda a: canonical(np.abs(a))) if floating else np.abs, [kind], kind
    if name == "neg" and not rest:
        return (lambda a: canonical(np.negative(a))) if floating else np.negative, [kind], kind
    if name in ("mul", "mad") and integer and len(rest) == 1:
        dtype = TYPES[kind]
        wide = "s64" if kind == "s32" else "u64"
        if rest == ["wide"] and dtype.itemsize == 4:
            target = TYPES[wide]
            if name == "mul":
                return (lambda a, b: np.multiply(a, b, dtype=target)), [kind, kind], wide
            return (lambda a, b, c: np.multiply(a, b, dtype=target) + c), [kind, kind, wide], wide
        if rest == ["lo"]:
            if name == "mul":
                return np.multiply, [kind, kind], kind
            return (lambda a, b, c: a * b + c), [kind] * 3, kind
        if rest == ["hi"] and name == "mul" and dtype.itemsize == 4:
            target = doubled(dtype)
            shift = target.type(32)
            return (lambda a, b: (np.multiply(a, b, dtype=target) >> shift).astype(dtype)), [kind, kind], kind
    if kind == "f32x2" and (rest == ["rn"] or (not rest and name != "fma")):  # two numbers in one register
        one = _function(name, [*rest, "f32"], each)[0]
        arguments = 3 if name == "fma" else 2

        def both(*given: Array) -> Array:
            halves = [np.ascontiguousarray(value).view(np.float32).reshape(-1, 2) for value in given]
            return np.ascontiguousarray(one(*halves)).view(np.uint64).reshape(-1)

        return both, ["b64"] * arguments, "b64"
    if name == "prmt" and parts == ["b32"]:
        selector = each.operands[3].bits
        return (lambda a, b, s: permuted(np.atleast_1d(a), np.atleast_1d(b), selector)), ["b32", "b32", "b32"], "b32"
    if name == "bfe" and kind in ("u32", "s32") and not rest:
        position, length = each.operands[2].bits, each.operands[3].bits
        if not (0 <= position < 32 and 0 < length <= 32 - position):
            raise PtxError("bit field")
        up, down = TYPES[kind].type(32 - position - length), TYPES[kind].type(32 - length)
        return (lambda a, b, c: (a << up) >> down), [kind, "u32", "u32"], kind
    raise PtxError("operation")


def _conversion(kernel: Kernel, each: Instruction, parts: list[str]) -> Callable[[Any, Any], Any]:
    *how, target, source = parts
    if target in ("bf16x2", "f16x2"):
        if how != ["rn"] or source != "f32" or len(each.operands) != 3:
            raise PtxError("conversion of two")
        one = converted(["rn"], "f32", target[:-2])
        high, low = (_reader(kernel, operand, "f32") for operand in each.operands[1:])
        write = _writer(kernel, each.operands[0], "b32")

        def pair(m: Any, w: Any) -> None:
            upper, lower = (np.atleast_1d(one(read(m, w))).view(np.uint16).astype(np.uint32) for read in (high, low))
            write(m, w, (upper << np.uint32(16)) | lower)

        return pair
    convert = converted(how, source, target)
    # Bytes lie in wider registers: of the source the lowest counts, and the result is extended.
    given, to = each.operands[1], each.operands[0]
    read = _reader(kernel, given, f"u{_width(kernel, given)}" if source in ("s8", "u8") else source)
    write = _writer(kernel, to, f"{target[0]}{_width(kernel, to)}" if target in ("s8", "u8") else target)
    if source in ("s8", "u8"):
        return lambda m, w: write(m, w, convert(read(m, w).astype(np.uint8).view(TYPES[source])))
    return lambda m, w: write(m, w, convert(read(m, w)))


def _repacked(kernel: Kernel, each: Instruction, parts: list[str]) -> Callable[[Any, Any], Any]:
    """mov between one register and several narrower ones; None stands for one that is not wanted."""
    (kind,) = parts
    to, given = each.operands
    bits = int(kind[1:])
    pieces = to if isinstance(to, tuple) else given
    part = f"b{bits // len(pieces)}"
    size = np.dtype(TYPES[kind]).type(bits // len(pieces))
    if isinstance(to, tuple):
        read = _reader(kernel, given, kind)
        writes = [None if one is None else _writer(kernel, one, part) for one in to]

        def unpack(m: Any, w: Any) -> None:
            value = np.array(read(m, w))
            for nth, write in enumerate(writes):
                if write is not None:
                    write(m, w, (value >> (size * size.dtype.type(nth))).astype(TYPES[part]))

        return unpack
    reads = [_reader(kernel, one, part) for one in given]
    write_one = _writer(kernel, to, kind)

    def pack(m: Any, w: Any) -> None:
        total: Any = 0
        for nth, one in enumerate(reads):
            total = (one(m, w).astype(TYPES[kind]) << (size * size.dtype.type(nth))) | np.asarray(total, TYPES[kind])
        write_one(m, w, total)

    return pack


def _access(kernel: Kernel, each: Instruction, name: str, parts: list[str]) -> Callable[[Any, Any], Any]:
    space, kind = parts[0].removesuffix("::cta"), parts[-1]  # a program's own: what "shared" alone means
    lanes = 1
    for part in parts[1:-1]:
        if re.fullmatch(r"v[248]", part):
            lanes = int(part[1])
        elif part not in _NEUTRAL:
            raise PtxError(f"modifier {part}")
    extra = 1 if "L2::cache_hint" in parts else 0
    if len(each.operands) != 2 + extra:
        raise PtxError("operands")
    if space == "param":
        if name != "ld" or each.operands[1].offset:
            raise PtxError("parameter")
        names = [parameter for parameter, _ in kernel.parameters]
        nth, write = names.index(each.operands[1].base), _writer(kernel, each.operands[0], kind)
        if TYPES[kernel.parameters[nth][1]].itemsize != TYPES[kind].itemsize:
            raise PtxError("a parameter of another size")
        return lambda m, w: write(m, w, m.parameters[nth : nth + 1].view(TYPES[kind])[:1])
    if space not in ("global", "shared"):
        raise PtxError(f"memory {space}")
    place, data = (each.operands[1], each.operands[0]) if name == "ld" else (each.operands[0], each.operands[1])
    registers = data if isinstance(data, tuple) else (data,)
    if len(registers) != lanes:
        raise PtxError("vector")
    item = TYPES[kind].itemsize
    wide = f"u{8 * max(item, 2)}"  # registers are 16 bits at least
    base = _reader(kernel, place.base, "u64" if space == "global" else "u32")

    def addresses(m: Any, w: Any) -> Array:
        found = base(m, w).astype(np.uint64) + np.uint64(place.offset % 2**64)
        return found if len(found) == m.count(w) else np.broadcast_to(found, m.count(w))

    if name == "ld":
        writes = [_writer(kernel, one, wide) for one in registers]

        def load(m: Any, w: Any) -> None:
            found = m.load(space, addresses(m, w), item, lanes, w, each)
            for nth, write in enumerate(writes):
                value = found[:, nth]
                if item == 1:  # in a wider register
                    value = value.astype(np.int8).astype(np.int16) if kind == "s8" else value.astype(np.uint16)
                write(m, w, value)

        return load
    reads = [_reader(kernel, one, wide) for one in registers]

    def store(m: Any, w: Any) -> None:
        value = np.empty((m.count(w), lanes), dtype=RAW[8 * item])
        for nth, read in enumerate(reads):
            value[:, nth] = read(m, w).astype(RAW[8 * item])
        m.store(space, addresses(m, w), value, w, each)

    return store


def _shuffle(kernel: Kernel, each: Instruction, parts: list[str]) -> Callable[[Any, Any], Any]:
    if parts != ["sync", "bfly", "b32"] or each.operands[3:] != (Literal(31, 0), Literal(-1, 0)) or each.guard:
        raise PtxError("shuffle")
    by = each.operands[2].bits
    if not 0 <= by < WARP:
        raise PtxError("shuffle")
    read, write = _reader(kernel, each.operands[1], "b32"), _writer(kernel, each.operands[0], "b32")
    order = np.arange(WARP) ^ by

    def shuffle(m: Any, w: Any) -> None:
        m.whole_warps(w, each)
        write(m, w, read(m, w).reshape(-1, WARP)[:, order].reshape(-1))

    return shuffle


def _warp_reduction(kernel: Kernel, each: Instruction, parts: list[str]) -> Callable[[Any, Any], Any]:
    known = {"add": np.add, "min": np.minimum, "max": np.maximum}
    if len(parts) != 3 or parts[0] != "sync" or parts[1] not in known or each.guard:
        raise PtxError("reduction")
    reduce, kind = known[parts[1]], parts[2]
    read, write = _reader(kernel, each.operands[1], kind), _writer(kernel, each.operands[0], kind)
    members = _reader(kernel, each.operands[2], "b32")

    def step(m: Any, w: Any) -> None:
        m.whole_warps(w, each)
        if not (members(m, w) == np.uint32(0xFFFFFFFF)).all():
            raise m.error(each, "a reduction of a part of a warp")
        found = reduce.reduce(read(m, w).reshape(-1, WARP), axis=1, dtype=TYPES[kind])
        write(m, w, np.repeat(found, WARP))

    return step
