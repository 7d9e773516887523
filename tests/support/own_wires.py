"""Wires that are not built in, by their names: "support.own_wires:TOP16"."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fusedreduce import CastWire, Encoding

NAME = "support.own_wires:{}"


def top16(values: torch.Tensor) -> torch.Tensor:
    """The upper 16 bits of fp32: bf16, rounded toward zero."""
    cut = (values.view(torch.int32) & -65536).view(torch.float32)
    return torch.where(values.isnan(), values, cut).to(torch.bfloat16)


@triton.jit
def top16_kernel(value):
    cut = (value.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return tl.where(value == value, cut, value).to(tl.bfloat16)


def toward_zero(values: torch.Tensor) -> torch.Tensor:
    """fp16, rounded toward zero."""
    nearest = values.to(torch.float16)
    bits = nearest.view(torch.int16)
    return torch.where(nearest.float().abs() > values.abs(), bits - 1, bits).view(torch.float16)


@triton.jit
def toward_zero_kernel(value):
    nearest = value.to(tl.float16)
    bits = nearest.to(tl.int16, bitcast=True)
    away = tl.abs(nearest.to(tl.float32)) > tl.abs(value)
    return tl.where(away, bits - 1, bits).to(tl.float16, bitcast=True)


def nearest_bf16(values: torch.Tensor) -> torch.Tensor:
    """As the built-in wire rounds."""
    return values.to(torch.bfloat16)


def nearest_fp16(values: torch.Tensor) -> torch.Tensor:
    """As the built-in wire rounds."""
    return values.to(torch.float16)


@triton.jit
def nearest_fp16_kernel(value):
    return value.to(tl.float16)


TOP16 = CastWire(torch.bfloat16, top16, top16_kernel)
TOP16_IN_TORCH = CastWire(torch.bfloat16, top16)
ZERO16 = CastWire(torch.float16, toward_zero, toward_zero_kernel)
ZERO16_IN_TORCH = CastWire(torch.float16, toward_zero)
PLAIN = CastWire(torch.bfloat16)
NEAREST_BF16 = CastWire(torch.bfloat16, nearest_bf16)
NEAREST_FP16 = CastWire("float16", nearest_fp16, nearest_fp16_kernel)
SAME8 = Encoding(block_numel=256, bits=8)
SMALL8 = Encoding(block_numel=64, bits=8)
MIDDLE4 = Encoding(block_numel=128, bits=4)
LARGE4 = Encoding(block_numel=256, bits=4)
NO_WIRE = torch.bfloat16
# By a wire of one's own the built-in one that does the same.
EQUAL = {"PLAIN": "bf16", "NEAREST_BF16": "bf16", "NEAREST_FP16": "fp16", "SAME8": "int8"}
OWN_ENCODINGS = (SMALL8, MIDDLE4, LARGE4)
