"""Wires by the names that tables of tests have for them, what they make of gradients, and what they may be off by."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fusedreduce import ReduceConfig
from fusedreduce.buckets.data_path import accumulated_split, divisor_split
from fusedreduce.buckets.tensors import real_dtype
from fusedreduce.config import Op
from fusedreduce.kernels.encodings import Encoding
from fusedreduce.kernels.reference_encoded import decode_blocks, encode_blocks
from fusedreduce.wires import cast_of, wire_dtype
from fusedreduce.wires import encoding_of as encoding_of_wire

# Those whose contributions are exchanged and added up in fp32.
ENCODED = ("int8", "int4")
EXCHANGED = (*ENCODED, "bf16+fp32", "fp16+fp32")


def settings(wire: str) -> dict[str, Any]:
    """Arguments of ReduceConfig for "int8", or for a wire and its accumulation, "bf16+fp32"."""
    name, _, accumulation = wire.partition("+")
    return {"wire": name, "accumulation": accumulation or "wire"}


def encoding_of(gradient: torch.Tensor, wire: str) -> Encoding | None:
    """The encoding in which it travels; None: it travels as it is, or as 16 bits."""
    return encoding_of_wire(_config(wire).wire_of(gradient))


@functools.cache
def _config(wire: str) -> ReduceConfig:
    return ReduceConfig(**settings(wire))


def in_memory(gradient: torch.Tensor) -> torch.Tensor:
    """Its elements, flat, in the order of memory; of one without gaps."""
    return gradient.detach().as_strided((gradient.numel(),), (1,))


def half_quanta(gradient: torch.Tensor, wire: str) -> torch.Tensor:
    """Per element, in memory's order, the most that encoding it once may be off by, fp64; 0 where it is not encoded.

    Half a quantum: the largest absolute value of the element's block / levels / 2; for bf16 scales, which are rounded
    up, a 128th more. And fp32's rounding of value, scale and their product.
    """
    flat = in_memory(gradient).double().abs()
    encoding = encoding_of(gradient, wire)
    if encoding is None:
        return torch.zeros_like(flat)
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % encoding.block_numel)).view(-1, encoding.block_numel)
    wider = 1.0 + 2.0**-7 if encoding.scale_bytes == 2 else 1.0
    quantum = blocks.amax(1, keepdim=True) * wider / encoding.levels
    return (quantum / 2 + blocks.amax(1, keepdim=True) * 2.0**-21).expand_as(blocks).reshape(-1)[: flat.numel()]


def decoded(values: torch.Tensor, encoding: Encoding) -> torch.Tensor:
    """fp32 values, encoded and decoded; each row by itself."""
    numel = values.shape[-1]
    padded = torch.nn.functional.pad(values, (0, -numel % encoding.block_numel))
    with np.errstate(all="ignore"):
        decoded = decode_blocks(*encode_blocks(padded.view(-1, encoding.block_numel).numpy(), encoding))
    return torch.from_numpy(decoded).view(padded.shape)[..., :numel]


def reduced_in_two_levels(
    local: Sequence[torch.Tensor], divisors: Sequence[float], wire: str, per_node: int
) -> torch.Tensor:
    """`reduced` for nodes of `per_node` consecutive ranks: to the bit.

    Contributions are divided and added up in fp32 (fp64) in rank order within a node; the sum is encoded; the nodes'
    are added up in order, and encoded once more where there are three and more.
    """
    encoding = encoding_of(local[0], wire)
    if encoding is None:
        return reduced(local, divisors, wire)
    compute = torch.float64 if local[0].dtype is torch.float64 else torch.float32
    sent = _divided(local, divisors, compute)
    sums = torch.stack([in_order(sent[first : first + per_node]) for first in range(0, len(sent), per_node)])
    nodes = decoded(sums.float(), encoding)
    total = in_order(nodes)
    total = decoded(total, encoding) if len(nodes) > 2 else total
    return total.to(local[0].dtype).view_as(local[0])


def _divided(local: Sequence[torch.Tensor], divisors: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
    """A row for each, in memory's order, divided in `dtype`."""
    rows = torch.stack([in_memory(one) for one in local]).to(dtype)
    return rows / torch.tensor(divisors, dtype=dtype)[:, None]


def in_order(addends: Sequence[torch.Tensor] | torch.Tensor) -> torch.Tensor:
    """Their sum, one after the other."""
    total = addends[0]
    for one in addends[1:]:
        total = total + one
    return total


def reduced(local: Sequence[torch.Tensor], divisors: Sequence[float], wire: str, op: Op = "mean") -> torch.Tensor:
    """What every rank must have of contiguous gradients, given in rank order, by an exchanged wire: to the bit.

    Each contribution is encoded (in fp32), or rounded, once; they are added up in fp32 in rank order; three ranks and
    more encode or round the sum once more; it is decoded, and rounded to the gradient's dtype.
    """
    first, ranks = local[0], len(local)
    compute = torch.float64 if first.dtype is torch.float64 else torch.float32
    encoding = encoding_of(first, wire)
    name = wire.partition("+")[0]
    sent, cast = wire_dtype(name), cast_of(name)
    # What is not encoded is added up by the group, here a LocalGroup: in fp32, or fp64, and rounded once.
    dtype = sent or first.dtype
    exchanged = "+" in wire and ranks > 2
    split = 1.0 if encoding else divisor_split(dtype, {real_dtype(first.dtype)}, ranks, op)
    if exchanged:
        split = accumulated_split(dtype, ranks, op)
    if encoding is not None:
        rows = decoded(_divided(local, divisors, torch.float32), encoding)
    else:
        rows = _divided(local, [divisor / split for divisor in divisors], compute)
        rows = cast.rounding(rows.float()) if cast and cast.rounding else rows.to(dtype)
        rows = rows.to(torch.float64 if dtype is torch.float64 else torch.float32)
    total = in_order(rows)
    kept = min(split, 1.0) if exchanged else split
    if encoding is None:
        total = (total * torch.tensor(kept / split, dtype=total.dtype)).to(dtype)
    elif ranks > 2:
        total = decoded(total, encoding)
    return (total.to(compute) / kept).to(first.dtype).view_as(first)
