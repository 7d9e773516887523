"""The torch path on a GPU, where Triton cannot launch: what `reference` defines, a whole bucket in few operators.

    pack      zeros in the compute dtype, gradients copied there, divided into the wire       4 operators
    unpack    the wire times the scale in the compute dtype, copied to the gradients          2 operators

It takes memory for one bucket in the compute dtype, while it runs. What is rare is left to `reference`, an operator or
more for each row of 8,192 elements: statistics, and fp64 gradients that are packed into a 16-bit wire.
"""

from __future__ import annotations

import torch

from . import reference
from .cpu import copy_all, pack_flat, slots
from .reference import combine, flattened, measure
from .table import ChunkTable, Gradients, Partials, PointerTable, SourcePartials

__all__ = ["combine", "measure", "pack", "scale", "unpack"]


def pack(
    gradients: Gradients,
    chunks: ChunkTable,
    pointers: PointerTable,
    wire: torch.Tensor,
    divisor: float,
    partials: SourcePartials | None = None,
) -> None:
    """Flattens, divides and casts `gradients` into `wire`; arguments as for `kernels.dispatch.pack`."""
    rounds_twice = chunks.fp64 and wire.dtype is not torch.float64  # see reference.store_rounded
    if rounds_twice or partials is not None:
        reference.pack(gradients, chunks, pointers, wire, divisor, partials)
    else:
        pack_flat(gradients, chunks, wire, divisor)


def unpack(
    gradients: Gradients,
    chunks: ChunkTable,
    pointers: PointerTable,
    wire: torch.Tensor,
    scale: torch.Tensor,
    partials: Partials | None = None,
) -> None:
    """Unflattens, scales and casts `wire` into `gradients`; arguments as for `kernels.dispatch.unpack`."""
    flat = torch.mul(wire, scale)  # in the dtype of `scale`, which is the compute dtype
    copy_all(flattened(gradients, chunks), slots(flat, chunks))
    if partials is not None:
        reference.measure(gradients, chunks, pointers, partials)


def scale(gradients: Gradients, chunks: ChunkTable, pointers: PointerTable, factor: torch.Tensor) -> None:
    """Multiplies gradients by `factor`, in place; arguments as for `kernels.dispatch.scale`."""
    if chunks.shared:
        reference.scale(gradients, chunks, pointers, factor)
        return
    for gradient in flattened(gradients, chunks):  # one by one: they may be a whole model's, and products are wider
        if gradient is not None:
            gradient.copy_(torch.mul(gradient, factor))
