"""Kernels with one fault each, which the rules about machine code must find; test_machine_code.py has them judged."""
# What @triton.jit reads is not Python.
# ruff: noqa: ANN001, ANN202
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import triton
import triton.language as tl

from fusedreduce.kernels.aot import Target
from fusedreduce.kernels.chunk import (
    DIVIDE,
    NOTHING,
    ROW,
    convert_chunk,
    load_single,
    load_vector,
    store_single,
    store_vector,
)
from fusedreduce.kernels.variants import Variant, lanes, tuning_for
from support.machine_code.check import RECORDED

_POINTERS = ["addresses", "rows", "wire", "scalar"]


@triton.jit
def _move(
    source,
    destination,
    count,
    SOURCE: tl.constexpr,
    DESTINATION: tl.constexpr,
    SOURCE_BYTES: tl.constexpr,
    DESTINATION_BYTES: tl.constexpr,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
):
    """Casts `count` elements, each side hinted to be aligned to so many bytes."""
    source_ptr = tl.multiple_of(source.to(tl.pointer_type(SOURCE)), SOURCE_BYTES)
    destination_ptr = tl.multiple_of(destination.to(tl.pointer_type(DESTINATION)), DESTINATION_BYTES)
    middle = tl.multiple_of(count // 8 * 8, 8)
    for start in tl.range(0, middle, TILE):
        index = tl.multiple_of(start, 8) + tl.arange(0, TILE)
        value = load_vector(source_ptr + index, index < middle)
        store_vector(destination_ptr + index, value.to(DESTINATION), index < middle)
    piece = middle + tl.arange(0, LANES)
    store_single(destination_ptr + piece, load_single(source_ptr + piece, piece < count).to(DESTINATION), piece < count)


@triton.jit
def _move_by_hand(source, destination, count, SOURCE: tl.constexpr, DESTINATION: tl.constexpr, LANES: tl.constexpr):
    for start in tl.range(0, count, LANES):
        index = start + tl.arange(0, LANES)
        value = tl.load(source.to(tl.pointer_type(SOURCE)) + index, mask=index < count)
        tl.store(destination.to(tl.pointer_type(DESTINATION)) + index, value.to(DESTINATION), mask=index < count)


@triton.jit
def _add(source, destination, count, SOURCE: tl.constexpr, DESTINATION: tl.constexpr, LANES: tl.constexpr):
    index = tl.arange(0, LANES)
    value = load_single(source.to(tl.pointer_type(SOURCE)) + index, index < count).to(DESTINATION)
    tl.atomic_add(destination.to(tl.pointer_type(DESTINATION)) + index, value, mask=index < count)


@triton.jit(do_not_specialize=_POINTERS)
def _planted_kernel(addresses, rows, wire, scalar, FAULT: tl.constexpr, TILE_BYTES: tl.constexpr, LANES: tl.constexpr):
    """Pack, without zeros and sums; its bf16 branch has the fault."""
    row = rows + tl.program_id(0).to(tl.int64) * ROW
    begin = tl.load(row + 1)
    count = (tl.load(row + 2) - begin).to(tl.int32)
    dtype = tl.load(row + 4)
    address = tl.load(addresses + tl.load(row))
    divisor = tl.load(scalar)
    WIRE: tl.constexpr = wire.dtype.element_ty
    destination = (wire + tl.load(row + 3)).to(tl.int64)
    if dtype == 0:
        convert_chunk(
            address + begin * 4, destination, count, divisor, tl.float32, WIRE, DIVIDE, NOTHING, TILE_BYTES, LANES
        )
    elif dtype == 1:
        source = address + begin * 2
        if FAULT == "scalar branch":
            _move(source, destination, count, tl.bfloat16, WIRE, 2, 4, TILE_BYTES // 4, LANES)
        elif FAULT == "layout conversion":
            _move(source, destination, count, tl.bfloat16, WIRE, 16, 16, TILE_BYTES // 4, LANES)
        elif FAULT == "by hand":
            _move_by_hand(source, destination, count, tl.bfloat16, WIRE, LANES)
        elif FAULT == "atomic":
            _add(source, destination, count, tl.bfloat16, WIRE, LANES)
        elif FAULT != "missing branch":
            convert_chunk(source, destination, count, divisor, tl.bfloat16, WIRE, DIVIDE, NOTHING, TILE_BYTES, LANES)
    else:
        convert_chunk(
            address + begin * 2, destination, count, divisor, tl.float16, WIRE, DIVIDE, NOTHING, TILE_BYTES, LANES
        )


class Planted(NamedTuple):
    """What is changed of a sound kernel: the branch's code, or how the whole is compiled."""

    fault: str
    targets: tuple[str, ...] = RECORDED
    tile_factor: int = 1
    options: Mapping[str, Any] = {}


PLANTED = (
    Planted("none"),
    Planted("scalar branch"),
    Planted("layout conversion"),
    Planted("missing branch"),
    Planted("by hand", ("sm_90", "gfx942")),
    Planted("atomic", ("sm_90", "gfx942")),
    Planted("spill", ("sm_80", "sm_90", "sm_100"), options={"maxnreg": 24}),
    Planted("spill", ("gfx942",), tile_factor=8, options={"waves_per_eu": 8}),
)


def variant_of(planted: Planted, target: Target) -> Variant:
    """The faulty kernel as one architecture would launch it."""
    tuning = tuning_for(target.key)
    return Variant(
        kernel=_planted_kernel,
        signature={
            "addresses": "*i64",
            "rows": "*i64",
            "wire": "*fp32",
            "scalar": "*fp32",
            **dict.fromkeys(("FAULT", "TILE_BYTES", "LANES"), "constexpr"),
        },
        constexprs={
            "FAULT": planted.fault,
            "TILE_BYTES": tuning.tile_bytes * planted.tile_factor,
            "LANES": lanes(tuning, target.key[0]),
        },
        num_warps=tuning.num_warps,
        branches=(("fp32", "fp32"), ("bf16", "fp32"), ("fp16", "fp32")),
        label=f"planted[{planted.fault}]",
        options={"enable_fp_fusion": True, **planted.options},
    )
