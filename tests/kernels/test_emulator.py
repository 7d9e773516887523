"""The emulator itself, on PTX written by hand: arithmetic against numpy, torch and rationals, and what it must find."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
from support.emulator.cases import values
from support.emulator.machine import load, run
from support.emulator.memory import Memory
from support.emulator.ptx import PtxError

THREADS = 64
NUMEL = 8 * THREADS
# Width of a register by type; of it the class and the number of bytes in memory.
_CLASSES = {16: "%rs", 32: "%r", 64: "%rd"}
_BITS = {"f64": 64, "s64": 64, "u64": 64, "b64": 64, "f16": 16, "bf16": 16, "s16": 16, "pred": 1}


def module(body: str, arrays: int) -> str:
    """A kernel whose parameters are addresses, in %rd1 and following; %r1 is the thread, %r2 the program."""
    parameters = ",\n".join(f"\t.param .u64 .ptr .global .align 1 probe_param_{nth}" for nth in range(arrays))
    loads = "\n".join(f"\tld.param.b64 \t%rd{nth + 1}, [probe_param_{nth}];" for nth in range(arrays))
    return f"""
.version 8.7
.target sm_90a
.address_size 64
.visible .entry probe(
{parameters}
)
.reqntid {THREADS}
{{
	.reg .pred 	%p<9>;
	.reg .b16 	%rs<9>;
	.reg .b32 	%r<40>;
	.reg .b64 	%rd<40>;
	.loc	1 7 0                           // probe.py:7:0
{loads}
	mov.u32 	%r1, %tid.x;
	mov.u32 	%r2, %ctaid.x;
{body}
	ret;
}}
"""


def probe(
    body: str, *arrays: Any, programs: int = 1, shared_bytes: int = 0, read_only: int = 0, races: bool = True
) -> None:
    """Runs `module`; the first `read_only` arrays must not be written."""
    memory = Memory()
    for nth, array in enumerate(arrays):
        memory.allow(array, f"array {nth}", write=nth >= read_only)
    pointers = [one.data_ptr() if isinstance(one, torch.Tensor) else one.ctypes.data for one in arrays]
    run(load(module(body, len(arrays))), programs, pointers, memory, shared_bytes, races=races, together=3)


def elementwise(operation: str, kinds: Sequence[str], result: str, *arrays: torch.Tensor) -> torch.Tensor:
    """One instruction on every element: `operation` with its operands' types and its result's."""
    sizes = [_BITS.get(kind, 32) for kind in (result, *kinds)]
    names = [f"{_CLASSES[size]}{nth + 3 if size != 64 else nth + 20}" for nth, size in enumerate(sizes)]
    lines = [f"mad.lo.s32 \t%r39, %r2, {THREADS}, %r1;"]
    for nth, size in enumerate(sizes):
        lines += [f"mul.wide.s32 \t%rd38, %r39, {size // 8};", f"add.s64 \t%rd{nth + 30}, %rd{nth + 1}, %rd38;"]
    lines += [
        f"ld.global.b{size} \t{name}, [%rd{nth + 31}];"
        for nth, (name, size) in enumerate(zip(names[1:], sizes[1:], strict=True))
    ]
    lines += [f"{operation} \t{', '.join(names)};", f"st.global.b{sizes[0]} \t[%rd30], {names[0]};"]
    dtypes = {"f32": torch.float32, "f64": torch.float64, "f16": torch.float16, "bf16": torch.bfloat16}
    integers = {16: torch.int16, 32: torch.int32, 64: torch.int64}
    out = torch.full((len(arrays[0]),), 77).to(dtypes.get(result, integers[sizes[0]]))
    probe("\n".join(f"\t{line}" for line in lines), out, *arrays, programs=len(out) // THREADS)
    return out


def assert_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bits; NaN is the one that PTX names."""
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    kind = kinds[actual.element_size()]
    equal = actual.view(kind) == expected.view(kind)
    if expected.is_floating_point():
        canonical = {torch.float64: 0x7FF8000000000000, torch.float32: 0x7FFFFFFF}.get(actual.dtype, 0x7FFF)
        equal = torch.where(expected.isnan(), actual.view(kind) == canonical, equal)
    assert equal.all(), (actual[~equal][:4], expected[~equal][:4])


def wild(dtype: torch.dtype, seed: int, numel: int = NUMEL) -> torch.Tensor:
    """Any bits, ties, edges, and numbers near each other."""
    return values(numel, dtype, seed, wild=True)


FLOATS = {"f32": torch.float32, "f64": torch.float64}


@pytest.mark.parametrize("operation", ["add.rn", "mul.rn", "fma.rn"])
def test_two_numbers_in_a_register_are_two_numbers(operation: str) -> None:
    count = 3 if operation == "fma.rn" else 2
    given = [wild(torch.float32, seed, 2 * NUMEL) for seed in range(count)]
    pairs = elementwise(f"{operation}.f32x2", ["b64"] * count, "b64", *(one.view(torch.int64) for one in given))
    assert_bits(pairs.view(torch.float32), elementwise(f"{operation}.f32", ["f32"] * count, "f32", *given))


@pytest.mark.parametrize("kind", FLOATS)
def test_a_fused_product_and_sum_is_rounded_once(kind: str) -> None:
    x, y, z = (wild(FLOATS[kind], seed) for seed in (1, 2, 3))
    z[::2] = -(x * y)[::2]  # what is left is what the product was rounded by
    found = elementwise(f"fma.rn.{kind}", [kind] * 3, kind, x, y, z)
    finite = [nth for nth in range(NUMEL) if all(float(one[nth]) - float(one[nth]) == 0 for one in (x, y, z))]
    assert len(finite) > NUMEL // 3
    for nth in finite:
        exact = Fraction(float(x[nth])) * Fraction(float(y[nth])) + Fraction(float(z[nth]))
        assert abs(float(found[nth])) == abs(rounded(exact, kind)), nth
        assert not exact or (float(found[nth]) < 0) == (exact < 0) or not float(found[nth])


def test_a_fused_product_and_sum_of_fp32_is_not_rounded_to_fp64_first() -> None:
    """The sum is below the middle of two fp32 by 2^-70, which fp64 drops; of the middle the upper one is even."""
    x, y, z = (torch.full((NUMEL,), one) for one in (2.0**-12 + 2.0**-35, 2.0**-12 - 2.0**-35, 1 + 2.0**-23))
    for sign in (1, -1):
        assert_bits(elementwise("fma.rn.f32", ["f32"] * 3, "f32", x * sign, y, z * sign), z * sign)


def rounded(exact: Fraction, kind: str) -> float:
    """The nearest number, ties to even."""
    digits, lowest, highest = {"f32": (24, -149, 128), "f64": (53, -1074, 1024)}[kind]
    magnitude = abs(exact)
    if not magnitude:
        return 0.0
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent -= magnitude < Fraction(2) ** exponent
    unit = Fraction(2) ** max(exponent - digits + 1, lowest)
    result = round(magnitude / unit) * unit  # of halves Python too takes the even one
    return float("inf") if result >= Fraction(2) ** highest else float(result)


@pytest.mark.parametrize("kind", FLOATS)
def test_of_two_the_larger_and_the_smaller_drop_nan_and_know_signs_of_zero(kind: str) -> None:
    x, y = wild(FLOATS[kind], 1), wild(FLOATS[kind], 2)
    y[: NUMEL // 2] = x[torch.randperm(NUMEL)[: NUMEL // 2]]
    x[:4], y[:4] = torch.tensor([0.0, -0.0, 0.0, -0.0]), torch.tensor([0.0, 0.0, -0.0, -0.0])
    raw, lowest = (torch.int32, -(2**31)) if kind == "f32" else (torch.int64, -(2**63))

    def ordered(one: torch.Tensor) -> torch.Tensor:
        bits = one.view(raw)
        return torch.where(bits < 0, bits ^ (-1 - lowest), bits)

    greater = ordered(x) > ordered(y)
    for name, picked in (("max", torch.where(greater, x, y)), ("min", torch.where(greater, y, x))):
        expected = torch.where(x.isnan(), y, torch.where(y.isnan(), x, picked))
        assert_bits(elementwise(f"{name}.{kind}", [kind] * 2, kind, x, y), expected)


CASTS = [
    ("cvt.rn.bf16.f32", "f32", "bf16"),
    ("cvt.rn.f16.f32", "f32", "f16"),
    ("cvt.f64.f32", "f32", "f64"),
    ("cvt.rn.f32.f64", "f64", "f32"),
]
TORCHS = {**FLOATS, "bf16": torch.bfloat16, "f16": torch.float16}


@pytest.mark.parametrize(("operation", "source", "target"), CASTS)
def test_casts_are_torchs(operation: str, source: str, target: str) -> None:
    given = wild(TORCHS[source], 3, 4 * NUMEL)
    assert_bits(elementwise(operation, [source], target, given), given.to(TORCHS[target]))


@pytest.mark.parametrize("source", ["bf16", "f16"])
def test_of_16_bits_every_number_is_widened_to_itself(source: str) -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(TORCHS[source])
    assert_bits(elementwise(f"cvt.f32.{source}", [source], "f32", every), every.float())


def test_casts_between_numbers_and_integers() -> None:
    whole = torch.randint(-(2**31), 2**31 - 1, (NUMEL,)).to(torch.int32)
    assert_bits(elementwise("cvt.rn.f32.s32", ["s32"], "f32", whole), whole.float())
    given = wild(torch.float32, 4)
    cut = given.double().nan_to_num(0.0, 2.0**40, -(2.0**40)).trunc().clamp(-(2**31), 2**31 - 1).to(torch.int32)
    assert_bits(elementwise("cvt.rzi.s32.f32", ["f32"], "s32", given), cut)
    assert_bits(elementwise("cvt.rmi.f32.f32", ["f32"], "f32", given), given.floor())


def _wrapped(numbers: list[int]) -> torch.Tensor:
    return torch.tensor([(number + 2**31) % 2**32 - 2**31 for number in numbers]).to(torch.int32)


@pytest.mark.parametrize(
    ("operation", "of"),
    [
        ("add.s32", lambda x, y: x + y),
        ("sub.s32", lambda x, y: x - y),
        ("mul.lo.s32", lambda x, y: x * y),
        ("mul.hi.u32", lambda x, y: (x % 2**32) * (y % 2**32) >> 32),
        ("and.b32", lambda x, y: x & y),
        ("or.b32", lambda x, y: x | y),
        ("xor.b32", lambda x, y: x ^ y),
        ("min.s32", min),
        ("max.u32", lambda x, y: max(x % 2**32, y % 2**32)),
        ("shl.b32", lambda x, y: x << (y % 2**32) if y % 2**32 < 32 else 0),
        ("shr.s32", lambda x, y: x >> min(y % 2**32, 31)),
        ("shr.u32", lambda x, y: (x % 2**32) >> (y % 2**32) if y % 2**32 < 32 else 0),
    ],
)
def test_integers_are_pythons(operation: str, of: Callable[[int, int], int]) -> None:
    x, y = (torch.randint(-(2**31), 2**31 - 1, (NUMEL,)).to(torch.int32) for _ in range(2))
    y[: NUMEL // 2] = torch.randint(0, 40, (NUMEL // 2,)).to(torch.int32)
    expected = _wrapped([of(*pair) for pair in zip(x.tolist(), y.tolist(), strict=True)])
    assert_bits(elementwise(operation, ["s32"] * 2, "s32", x, y), expected)


def test_bytes_are_picked_and_fields_are_extracted() -> None:
    given = torch.arange(THREADS, dtype=torch.int32) * 0x01030507
    out = torch.zeros(3 * THREADS, dtype=torch.int32)
    probe(
        """
	mul.wide.s32 	%rd10, %r1, 4;
	add.s64 	%rd11, %rd1, %rd10;
	add.s64 	%rd12, %rd2, %rd10;
	ld.global.b32 	%r3, [%rd11];
	prmt.b32 	%r4, %r3, 0, 0x4120U;
	st.global.b32 	[%rd12], %r4;
	bfe.u32 	%r5, %r3, 5, 9;
	st.global.b32 	[%rd12+256], %r5;
	bfe.s32 	%r6, %r3, 5, 9;
	st.global.b32 	[%rd12+512], %r6;
""",
        given,
        out,
        read_only=1,
    )
    for nth, number in enumerate(given.tolist()):
        first, second, third, _ = struct.pack("<i", number)
        field = number >> 5 & 511
        picked = struct.unpack("<i", bytes((first, third, second, 0)))[0]
        assert out[nth::THREADS].tolist() == [picked, field, field - 512 * (field > 255)]


# Each thread writes its number, then reads the one of another thread.
_EXCHANGE = """
	shl.b32 	%r3, %r1, 2;
	xor.b32 	%r4, %r3, {apart};
	cvt.u64.u32 	%rd10, %r3;
	cvt.u64.u32 	%rd11, %r4;
	add.s64 	%rd12, %rd1, %rd10;
	add.s64 	%rd13, %rd1, %rd11;
	st.global.b32 	[%rd12], %r1;
	{barrier}
	ld.global.b32 	%r5, [%rd13];
	{second}
	st.global.b32 	[%rd12], %r5;
"""


@pytest.mark.parametrize(("apart", "barrier"), [(4, "bar.warp.sync 	-1;"), (128, "bar.sync 	0;")])
def test_with_barriers_threads_exchange_values(apart: int, barrier: str) -> None:
    out = torch.full((THREADS,), -1, dtype=torch.int32)
    probe(_EXCHANGE.format(apart=apart, barrier=barrier, second=barrier), out)
    assert out.tolist() == [thread ^ apart // 4 for thread in range(THREADS)]


@pytest.mark.parametrize("barriers", [("", "bar.sync 	0;"), ("bar.sync 	0;", "")])
@pytest.mark.parametrize("apart", [4, 128])
def test_a_missing_barrier_is_a_race(apart: int, barriers: tuple[str, str]) -> None:
    body = _EXCHANGE.format(apart=apart, barrier=barriers[0], second=barriers[1])
    with pytest.raises(PtxError, match="race: .*, program 0 thread .*; at probe.py:7:0"):
        probe(body, torch.zeros(THREADS, dtype=torch.int32))


def test_a_barrier_of_a_warp_orders_no_other_warp() -> None:
    warp = "bar.warp.sync 	-1;"
    with pytest.raises(PtxError, match="race"):
        probe(_EXCHANGE.format(apart=128, barrier=warp, second=warp), torch.zeros(THREADS, dtype=torch.int32))


# All read one number; then one thread, of the last program, writes it.
_READ_BY_ALL = """
	ld.global.b32 	%r3, [%rd1];
	{barrier}
	setp.eq.u32 	%p1, %r1, {writer};
	setp.eq.u32 	%p2, %r2, {program};
	and.pred 	%p3, %p1, %p2;
	@%p3 st.global.b32 	[%rd1], %r1;
"""


@pytest.mark.parametrize("writer", [0, 40, THREADS - 1])
def test_what_several_threads_have_read_is_written_behind_a_barrier(writer: int) -> None:
    out = torch.zeros(1, dtype=torch.int32)
    probe(_READ_BY_ALL.format(barrier="bar.sync 	0;", writer=writer, program=0), out)
    assert out.item() == writer
    again = "{0}\n\tld.global.b32 	%r4, [%rd1];\n\t{0}"
    whole, warp = again.format("bar.sync 	0;"), again.format("bar.warp.sync 	-1;")
    probe(_READ_BY_ALL.format(barrier=whole, writer=writer, program=0), out)
    for barrier, programs in (
        ("", 1),
        (warp, 1),
        ("bar.sync 	0;", 2),
        ("bar.sync 	0;", 5),
        (whole, 2),
        (whole, 5),
    ):
        body = _READ_BY_ALL.format(barrier=barrier, writer=writer, program=programs - 1)
        with pytest.raises(PtxError, match="race: writes what another thread has read"):
            probe(body, out, programs=programs)


def test_no_barrier_orders_programs() -> None:
    body = """
	mul.wide.s32 	%rd10, %r1, 4;
	add.s64 	%rd11, %rd1, %rd10;
	bar.sync 	0;
	st.global.b32 	[%rd11], %r1;
"""
    probe(body, torch.zeros(THREADS, dtype=torch.int32))
    for programs in (2, 5):  # side by side, and one after the other
        with pytest.raises(PtxError, match="race"):
            probe(body, torch.zeros(THREADS, dtype=torch.int32), programs=programs)


_MOVE = """
	mul.wide.s32 	%rd10, %r1, {step};
	add.s64 	%rd11, %rd1, %rd10;
	add.s64 	%rd12, %rd2, %rd10;
	ld.global{vector}.b32 	{registers}, [%rd11{offset}];
	st.global{vector}.b32 	[%rd12{offset}], {registers};
"""


def _move(offset: int = 0, *, wide: bool = False) -> str:
    place = f"+{offset}" if offset else ""
    if wide:
        return _MOVE.format(step=16, vector=".v4", registers="{ %r3, %r4, %r5, %r6 }", offset=place)
    return _MOVE.format(step=4, vector="", registers="%r3", offset=place)


def test_memory_is_what_was_allowed_and_no_more() -> None:
    source, target = torch.arange(THREADS + 1, dtype=torch.int32), torch.zeros(THREADS, dtype=torch.int32)
    probe(_move(), source, target, read_only=1)
    assert torch.equal(target, source[:-1])
    with pytest.raises(PtxError, match=r"access: .* from the end of array 0, program 0 thread 63; ld.global"):
        probe(_move(), source[:-2], target, read_only=1)
    with pytest.raises(PtxError, match=r"access: .* from the end of array 1, program 0 thread 63; st.global"):
        probe(_move(4), source, target, read_only=1)
    with pytest.raises(PtxError, match=r"access: array 1 must not be written"):
        probe(_move(), source, target, read_only=2)
    with pytest.raises(PtxError, match="no memory at all"):
        probe(_move(), source[:0], target[:0])


def test_an_access_is_aligned_to_its_width() -> None:
    source, target = (torch.zeros(4 * THREADS + 4, dtype=torch.int32) for _ in range(2))
    assert source.data_ptr() % 16 == target.data_ptr() % 16 == 0
    probe(_move(16, wide=True), source, target, read_only=1)
    with pytest.raises(PtxError, match="is no multiple of 16"):
        probe(_move(8, wide=True), source, target, read_only=1)
    with pytest.raises(PtxError, match="is no multiple of 4"):
        probe(_move(2), source, target, read_only=1)


_SHARED = """
	mov.b32 	%r3, global_smem;
	shl.b32 	%r4, %r1, 2;
	add.s32 	%r5, %r3, %r4;
	setp.lt.u32 	%p1, %r1, {writers};
	@%p1 st.shared.b32 	[%r5], %r1;
	bar.sync 	0;
	xor.b32 	%r6, %r4, 252;
	add.s32 	%r7, %r3, %r6;
	ld.shared.b32 	%r8, [%r7];
	mul.wide.s32 	%rd10, %r1, 4;
	add.s64 	%rd11, %rd1, %rd10;
	st.global.b32 	[%rd11], %r8;
"""


def test_shared_memory_is_written_before_it_is_read_and_ends() -> None:
    out = torch.zeros(THREADS, dtype=torch.int32)
    probe(_SHARED.format(writers=THREADS), out, shared_bytes=4 * THREADS)
    assert out.tolist() == list(range(THREADS))[::-1]
    with pytest.raises(PtxError, match="shared: never written, program 0 thread 0"):
        probe(_SHARED.format(writers=THREADS - 1), out, shared_bytes=4 * THREADS)
    with pytest.raises(PtxError, match="shared: address 2 of 260 bytes"):
        probe(_SHARED.format(writers=THREADS).replace("[%r5]", "[%r5+2]"), out, shared_bytes=4 * THREADS + 4)
    with pytest.raises(PtxError, match="shared: address 252 of 252 bytes"):
        probe(_SHARED.format(writers=THREADS), out, shared_bytes=4 * THREADS - 4)
    with pytest.raises(PtxError, match="race"):
        probe(_SHARED.format(writers=THREADS).replace("bar.sync 	0;", ""), out, shared_bytes=4 * THREADS)


def test_threads_that_part_meet_again() -> None:
    out = torch.zeros(THREADS, dtype=torch.int32)
    probe(
        """
	mov.b32 	%r3, 0;
	mov.b32 	%r4, 0;
$L__BB0_1:
	add.s32 	%r3, %r3, %r4;
	add.s32 	%r4, %r4, 1;
	setp.le.s32 	%p1, %r4, %r1;
	@%p1 bra 	$L__BB0_1;
	shfl.sync.bfly.b32 	%r5, %r3, 1, 31, -1;
	mul.wide.s32 	%rd10, %r1, 4;
	add.s64 	%rd11, %rd1, %rd10;
	st.global.b32 	[%rd11], %r5;
""",
        out,
    )
    triangles = [thread * (thread + 1) // 2 for thread in range(THREADS)]
    assert out.tolist() == [triangles[thread ^ 1] for thread in range(THREADS)]
    probe(
        """
	setp.lt.u32 	%p1, %r1, 5;
	@%p1 bra 	$L__BB0_2;
	add.s32 	%r3, %r1, 100;
	bra.uni 	$L__BB0_3;
$L__BB0_2:
	add.s32 	%r3, %r1, 200;
$L__BB0_3:
	shfl.sync.bfly.b32 	%r5, %r3, 8, 31, -1;
	mul.wide.s32 	%rd10, %r1, 4;
	add.s64 	%rd11, %rd1, %rd10;
	st.global.b32 	[%rd11], %r5;
""",
        out,
    )
    assert out.tolist() == [(thread ^ 8) + (200 if thread ^ 8 < 5 else 100) for thread in range(THREADS)]


@pytest.mark.parametrize(
    "waiting", ["bar.sync 	0;", "bar.warp.sync 	-1;", "shfl.sync.bfly.b32 	%r5, %r3, 1, 31, -1;"]
)
def test_what_some_threads_come_to_alone_is_found(waiting: str) -> None:
    body = f"""
	mov.b32 	%r3, 0;
	setp.lt.u32 	%p1, %r1, 40;
	@%p1 bra 	$L__BB0_2;
	{waiting}
$L__BB0_2:
	mov.b32 	%r4, 0;
"""
    with pytest.raises(PtxError, match=r"convergence|some threads of a warp are not here"):
        probe(body, torch.zeros(1))


def test_a_warp_adds_up() -> None:
    out = torch.zeros(THREADS, dtype=torch.int32)
    probe(
        """
	redux.sync.add.s32 	%r3, %r1, -1;
	mul.wide.s32 	%rd10, %r1, 4;
	add.s64 	%rd11, %rd1, %rd10;
	st.global.b32 	[%rd11], %r3;
""",
        out,
    )
    assert out.tolist() == [496] * 32 + [496 + 32 * 32] * 32


def test_threads_that_store_in_one_place_store_one_value() -> None:
    out = torch.zeros(1, dtype=torch.int32)
    probe("	mov.b32 	%r3, 7;\n	st.global.b32 	[%rd1], %r3;", out)
    assert out.item() == 7
    with pytest.raises(PtxError, match="stores: several threads store different values"):
        probe("	st.global.b32 	[%rd1], %r1;", out)


@pytest.mark.parametrize(
    "line",
    [
        "sin.approx.f32 	%r3, %r1;",
        "add.rz.f32 	%r3, %r1, %r1;",
        "div.full.f32 	%r3, %r1, %r1;",
        "rcp.approx.ftz.f32 	%r3, %r1;",
        "fma.rz.f32 	%r3, %r1, %r1, %r1;",
        "cvt.rz.bf16.f32 	%rs1, %r1;",
        "ld.volatile.global.b32 	%r3, [%rd1];",
        "ld.global.nc.b32 	%r3, [%rd1];",
        "atom.global.add.f32 	%r3, [%rd1], %r1;",
        "shfl.sync.down.b32 	%r3, %r1, 1, 31, -1;",
        "bar.sync 	1;",
        "bra 	$L__BB0_9;",
        "add.f32 	%r3, %r1, %x1;",
        "add.f64 	%rd9, %r1, %rd1;",
        "mov.b32 	%r3, %clock;",
        ".maxnreg 32;",
    ],
)
def test_what_is_not_known_raises_before_anything_runs(line: str) -> None:
    with pytest.raises(PtxError, match="not known|not understood"):
        load(module(f"\t{line}", 1))
