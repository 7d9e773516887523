"""Wires with a rounding of their own, and blocks of other sizes: every path has the definition's bits.

Compiling needs a process without TRITON_INTERPRET: as a script, this file compiles such wires' kernels for a GPU.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import sweep as examples
from support.buckets import Case, Guarded, assert_same, cases, divisors, inner, poison
from support.cuda.fake_driver import run_compiled
from support.emulator import driver
from support.emulator.cases import Bucket, EncodedBucket
from support.emulator.kernels import SMALL, Emulation
from support.machine_code import check
from support.own_wires import (
    NEAREST_BF16,
    NEAREST_FP16,
    OWN_ENCODINGS,
    TOP16,
    TOP16_IN_TORCH,
    ZERO16,
    ZERO16_IN_TORCH,
)
from support.sweep import sweep

from fusedreduce import CastWire, Encoding
from fusedreduce.kernels import combine_encoded, cpu, decode, dispatch, encode, few_ops, launchers, pack, reference
from fusedreduce.kernels.aot import TARGETS
from fusedreduce.kernels.table import PointerTable
from fusedreduce.kernels.variants import Variant, tuning_for

NOTHING: Any = lambda values: None  # noqa: E731
CASTS = {
    "top16": TOP16,
    "top16 in torch": TOP16_IN_TORCH,
    "zero16": ZERO16,
    "zero16 in torch": ZERO16_IN_TORCH,
    "nearest": NEAREST_FP16,
    "nearest in torch": NEAREST_BF16,
}


def packed(path: Any, case: Case, cast: CastWire | None) -> list[torch.Tensor]:
    """The wire, and per chunk the first non-finite index and the number of flushed elements."""
    chunks, gradients = case.table(cast=cast), inner(case.gradients())
    wire, alone = (Guarded.of(poison(chunks.wire_numel, case.wire), case.wire_shift) for _ in range(2))
    partials = chunks.new_source_partials(torch.device("cpu"))
    path.pack(gradients, chunks, PointerTable(), wire.inner, case.scalar, partials)
    path.pack(gradients, chunks, PointerTable(), alone.inner, case.scalar)
    for one in (wire, alone):
        one.assert_edges_untouched()
    assert_same(alone.inner, wire.inner)
    return [wire.inner, partials.first_non_finite, partials.flushed]


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS.keys())
@sweep(30)
@given(case=cases(divisors()))
def test_every_path_rounds_as_the_wire_does(case: Case, cast: CastWire) -> None:
    case = dataclasses.replace(case, wire=cast.torch_dtype)
    expected = packed(reference, case, cast)
    # The interpreter truncates where it should round to bf16: on fp16 it tells the kernel's rounding from that.
    for path in (cpu, few_ops, launchers if case.wire is torch.float16 else dispatch):
        for got, wanted in zip(packed(path, case, cast), expected, strict=True):
            assert_same(got, wanted)


@sweep(100)
@given(cases(divisors()), st.sampled_from([NEAREST_BF16, NEAREST_FP16]))
def test_rounding_to_nearest_of_ones_own_is_the_built_in_wires(case: Case, cast: CastWire) -> None:
    case = dataclasses.replace(case, wire=cast.torch_dtype)
    for got, wanted in zip(packed(reference, case, cast), packed(reference, case, None), strict=True):
        assert_same(got, wanted)


@sweep(500)
@given(cases(divisors()), st.sampled_from([TOP16, ZERO16]))
def test_toward_zero_is_the_largest_number_of_the_wire_that_is_no_larger(case: Case, cast: CastWire) -> None:
    """By fp64, in which all numbers are exact: fp32 gradients, and fp64 ones, which are not rounded before."""
    case = dataclasses.replace(case, wire=cast.torch_dtype)
    wire, _, flushed = packed(reference, case, cast)
    for slot, offset in enumerate(case.table().offsets):
        exact = case.values(slot).to(case.compute) / torch.tensor(case.scalar, dtype=case.compute)
        if case.missing[slot]:
            exact = torch.zeros_like(exact)
        stored = wire[offset : offset + len(exact)]
        assert torch.equal(stored.isnan(), exact.isnan()) and torch.equal(stored.isinf(), exact.isinf())
        finite = exact.isfinite()
        stored, exact = stored[finite], exact[finite].double().abs()
        above = (stored.view(torch.int16) + 1).view(cast.torch_dtype).double().abs()
        assert (stored.double().abs() <= exact).all() and (exact < above).all()
    assert (flushed >= 0).all()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: CastWire(torch.float32), r"dtype must be torch.bfloat16 or torch.float16, got torch.float32"),
        (lambda: CastWire("fp8"), r"got 'fp8'"),
        (lambda: CastWire(torch.float16, kernel=ZERO16.kernel), r"give rounding= too"),
        (lambda: CastWire(torch.bfloat16, lambda values: values[:1]), r"of the shape \(2,\)"),
        (lambda: CastWire(torch.bfloat16, NOTHING), r"must return a tensor"),
        (
            lambda: CastWire(torch.bfloat16, lambda values: (values.view(torch.int32) & -65536).view(torch.float32)),
            r"rounding made \[inf, nan\] of nan, which a wire must keep",
        ),
        (lambda: CastWire(torch.float16, lambda values: values.clamp(-1.0, 1.0)), r"of inf, which a wire must keep"),
        (lambda: CastWire(torch.float16, lambda values: values + 1.0), r"of zero, which a wire must keep"),
        (lambda: Encoding(block_numel=96, bits=8), r"block_numel must be one of \(64, 128, 256\), got 96"),
        (lambda: Encoding(block_numel=64, bits=2), r"bits must be one of \(8, 4\), got 2"),
    ],
)
def test_what_is_no_wire_is_refused_when_it_is_made(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def cast_options(*casts: CastWire) -> Iterator[tuple[CastWire, bool, bool]]:
    """With whether gradients are fp64, and with statistics: without `--full` any two of the three values together."""
    for nth, (cast, fp64, stats) in enumerate(itertools.product(casts, (False, True), (False, True))):
        if examples.full or (nth // 4 + fp64 + stats) % 2:
            yield cast, fp64, stats


def encoding_options() -> Iterator[tuple[Encoding, bool]]:
    """With whether all options are taken, which without `--full` are left out with one encoding alone."""
    for encoding, option in itertools.product(OWN_ENCODINGS, (False, True)):
        if examples.full or option or encoding is OWN_ENCODINGS[0]:
            yield encoding, option


def own_variants() -> list[Variant]:
    """What wires of one's own can launch on one architecture, with few options and with all."""
    launch = tuning_for(("cuda", 90)), "cuda"
    found = [
        pack.pack_variant(cast.torch_dtype, fp64, stats, not stats, cast.kernel, *launch)
        for cast, fp64, stats in cast_options(TOP16, ZERO16)
    ]
    for encoding, option in encoding_options():
        found.append(encode.encode_variant(encoding, option, True, option, option, option, *launch))
        found.append(combine_encoded.combine_encoded_variant(encoding, option, option, *launch))
        found.append(decode.decode_variant(encoding, option, option, *launch))
    return found


def emulated_kernels() -> list[str]:
    """What is wrong with them, run by the emulator; launched by Triton first, then as kept launches.

    Of ZERO16, which is the interpreter's, it does not know arithmetic on two 16-bit integers at once.
    """
    found = Emulation(driver.activate(90))
    for seed, (cast, fp64, stats) in enumerate(cast_options(TOP16, NEAREST_FP16), 1):
        bucket = Bucket(seed, fp64=fp64, numels=SMALL)
        bucket.chunks.cast = cast
        for divisor in (2.0, 3.0, 4.0, 7.0):
            found.pack(bucket, cast.torch_dtype, divisor, with_stats=stats)
    for seed, (encoding, option) in enumerate(encoding_options(), 1):
        encoded = EncodedBucket(seed, encoding, fp64=option)
        for divisor in (2.0, 4.0):
            found.encode(encoded, divisor, (option, option, option))
            found.combine_encoded(encoded, 3, (option, option))
            found.decode(encoded, 2, with_stats=option)
    return found.wrong


def test_kernels_of_ones_own_compile_by_the_rules_and_have_the_definitions_bits() -> None:
    arguments = ["--full"] if examples.full else []
    assert run_compiled(__file__, *arguments, timeout_s=1500) == {"violations": [], "wrong": []}


if __name__ == "__main__":
    examples.full = "--full" in sys.argv
    reports = [check.report(variant, TARGETS["sm_90"]) for variant in own_variants()]
    violations = [str(violation) for one in reports for violation in one.violations]
    json.dump({"violations": violations, "wrong": emulated_kernels()}, sys.stdout)
