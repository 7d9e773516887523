"""Encoded buckets: gradients to encoded shards, sums of encoded shards, and back; by device, as `dispatch` does.

    encode            gradients -> a bucket's encoded shards                  one launch
    combine_encoded   W encodings of one shard -> their sum, encoded          one launch
    decode            encoded buckets, one or several -> gradients            one launch

Two ranks exchange whole buckets: all-gather, then `decode` adds both up in the order of ranks. Three and more exchange
shards: all-to-all, `combine_encoded` by the shard's owner, all-gather, `decode`. Nothing here allocates: a bucket is
[table.layout.nbytes] bytes, a shard [table.layout.shard_bytes], at addresses that are multiples of 16.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Protocol, cast

import torch

from . import compile_time, cpu_encoded, dispatch, reference_encoded
from .checks import check_combine_encoded, check_decode, check_encode
from .encoded_table import EncodedTable, Residuals
from .encodings import Encoding
from .table import Gradients, Partials, PointerTable, SourcePartials


class Kernels(Protocol):
    """The functions of one path. They take the arguments of this module's, and check nothing."""

    def encode(
        self,
        gradients: Gradients,
        chunks: EncodedTable,
        pointers: PointerTable,
        encoded: torch.Tensor,
        divisor: float,
        partials: SourcePartials | None = None,
        *,
        residuals: Residuals | None = None,
        draw: torch.Tensor | None = None,
    ) -> None:
        """Flattens, divides and encodes `gradients` into `encoded`."""

    def combine_encoded(
        self,
        received: torch.Tensor,
        chunks: EncodedTable,
        output: torch.Tensor,
        *,
        residuals: Residuals | None = None,
        draw: torch.Tensor | None = None,
    ) -> None:
        """Decodes the contributions to one shard, adds them up and encodes the sum into `output`."""

    def decode(
        self,
        gradients: Gradients,
        chunks: EncodedTable,
        pointers: PointerTable,
        encoded: torch.Tensor,
        scale: torch.Tensor,
        partials: Partials | None = None,
    ) -> None:
        """Decodes and adds up `encoded`, scales the sum and unflattens it into `gradients`."""


def encode(
    gradients: Gradients,
    chunks: EncodedTable,
    pointers: PointerTable,
    encoded: torch.Tensor,
    divisor: float,
    partials: SourcePartials | None = None,
    *,
    residuals: Residuals | None = None,
    draw: torch.Tensor | None = None,
) -> None:
    """Flattens, divides and encodes `gradients` into `encoded`, every byte of it.

    Args:
        gradients: P tensors, dense in memory, on one device; None: no gradient, which counts as zeros.
        chunks: the layout's table, with the size, dtype and place of each gradient.
        pointers: this bucket's address table.
        encoded: output, uint8 [chunks.layout.nbytes].
        divisor: what to divide by, in fp32 (fp64 gradients are rounded to it first).
        partials: filled in the same launch; None: no statistics. Nothing is `flushed`: small codes are no underflow.
        residuals: what earlier steps have lost is added, and what this one loses written; None: no error feedback. Of
            a block that is not finite it stays as it was.
        draw: codes are rounded stochastically, by random bits that depend on the parameter, the element and this:
            int64 [4] on the device: seed in [0, 2**32), stream (2 x rank for this function, 2 x rank + 1 for
            `combine_encoded`), step, and a number that `combine_encoded` alone uses. None: rounding to nearest.

    Raises:
        ValueError, TypeError: arguments that do not fit together; nothing is written then.
        UnsupportedPairError: see `dispatch.path_for`.
    """
    check_encode(gradients, chunks, pointers, encoded, partials, residuals, draw)
    _on_path(encoded.device, (encoded.dtype,)).encode(
        gradients, chunks, pointers, encoded, divisor, partials, residuals=residuals, draw=draw
    )


def combine_encoded(
    received: torch.Tensor,
    chunks: EncodedTable,
    output: torch.Tensor,
    *,
    residuals: Residuals | None = None,
    draw: torch.Tensor | None = None,
) -> None:
    """Decodes the contributions to one shard, adds them up in fp32 in their order, and encodes the sum.

    Args:
        received: uint8 [contributions x chunks.layout.shard_bytes], one contribution after the other.
        chunks: the layout's table.
        output: uint8 [chunks.layout.shard_bytes], in memory of its own.
        residuals: of the sum: one tensor per copy, [chunks.layout.shard_numel]; see `encode`.
        draw: see `encode`; its last number stands for the parameter, so it should be the bucket's.

    Raises:
        ValueError, TypeError: arguments that do not fit together; nothing is written then.
        UnsupportedPairError: see `dispatch.path_for`.
    """
    check_combine_encoded(received, chunks, output, residuals, draw)
    _on_path(output.device, (output.dtype,)).combine_encoded(received, chunks, output, residuals=residuals, draw=draw)


def decode(
    gradients: Gradients,
    chunks: EncodedTable,
    pointers: PointerTable,
    encoded: torch.Tensor,
    scale: torch.Tensor,
    partials: Partials | None = None,
) -> None:
    """Decodes buckets, adds them up in fp32 in their order, scales the sum and unflattens it into `gradients`.

    Args:
        gradients: P tensors, dense in memory, on one device; None: no gradient, its slot is skipped.
        chunks: the layout's table, with the size, dtype and place of each gradient.
        pointers: this bucket's address table.
        encoded: uint8 [contributions x chunks.layout.nbytes]: the bucket, or whole buckets one after the other.
        scale: one element on the device, fp32 (fp64 for fp64 gradients).
        partials: filled in the same launch, from the values as stored; None: no statistics.

    Raises:
        ValueError, TypeError: arguments that do not fit together; nothing is written then.
        UnsupportedPairError: see `dispatch.path_for`.
    """
    check_decode(gradients, chunks, pointers, encoded, scale, partials)
    _on_path(encoded.device, chunks.dtype_set).decode(gradients, chunks, pointers, encoded, scale, partials)


def refusal(device: torch.device) -> str:
    """Why buckets on a device cannot be encoded; empty: they can.

    A GPU's need the kernels: to encode them on the host would copy them there, and take seconds a step.
    """
    return dispatch.without_kernels(device) if device.type == "cuda" else ""


@functools.cache
def unchecked(device: torch.device, written: tuple[torch.dtype, ...] | frozenset[torch.dtype]) -> Kernels:
    """The functions on a device's path, as `dispatch.unchecked` finds them; arguments as there.

    Returns:
        Functions that take the arguments of this module's, and check none of them.

    Raises:
        UnsupportedPairError: see `dispatch.path_for`; or these buckets need kernels, which this device cannot run.
    """
    return _on_path(device, written)


def _on_path(device: torch.device, written: Collection[torch.dtype]) -> Kernels:
    if why := refusal(device):
        raise dispatch.UnsupportedPairError(f"encoded buckets on {device} need the Triton kernels: {why}")
    if dispatch.path_for(device, written) == "torch":
        return cpu_encoded if device.type == "cpu" else reference_encoded
    return cast(Kernels, dispatch._triton())


@functools.cache
@compile_time.counted()
def warm_up(
    device: torch.device,
    encoding: Encoding,
    *,
    fp64: bool = False,
    stats: bool = False,
    feedback: bool = False,
    stochastic: bool = False,
) -> None:
    """Compiles the three kernels by running them on one element, once; does nothing on the torch path.

    Args:
        device: whose architecture is compiled for, with its index.
        encoding: of the buckets.
        fp64: gradients are fp64; else fp32, bf16 and fp16.
        stats: with statistics too.
        feedback: with residuals, and not without.
        stochastic: with stochastic rounding, and not without.

    Raises:
        UnsupportedPairError: see `dispatch.path_for`.
    """
    dtype = torch.float64 if fp64 else torch.float32
    if dispatch.path_for(device, (torch.uint8,)) != "triton":
        return
    chunks, pointers = EncodedTable([1], [0], [dtype], encoding.shard_align, encoding, 1), PointerTable()
    gradients = [torch.zeros(1, dtype=dtype, device=device)]
    bucket, output = (torch.empty(chunks.layout.nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    residuals = of_shard = draw = None
    if feedback:
        live = torch.zeros(1, dtype=torch.int64, device=device)
        weights = torch.ones(2, dtype=torch.float32, device=device)
        numels, kind = (1, chunks.layout.shard_numel), torch.float32
        kept, sums = ([torch.zeros(numel, dtype=kind, device=device) for _ in range(2)] for numel in numels)
        residuals, of_shard = (Residuals(([one], [other]), live, weights) for one, other in (kept, sums))
    if stochastic:
        draw = torch.zeros(4, dtype=torch.int64, device=device)
    one = torch.ones(1, dtype=dtype, device=device)
    for with_partials in (False, True) if stats else (False,):
        sources = chunks.new_source_partials(device) if with_partials else None
        partials = chunks.new_partials(device) if with_partials else None
        for divisor in (1.0, 3.0):  # by product and by division: a step's divisor may be any number
            encode(gradients, chunks, pointers, bucket, divisor, sources, residuals=residuals, draw=draw)
        decode(gradients, chunks, pointers, bucket, one, partials)
        if sources is not None and partials is not None:
            spans = chunks.spans(device)
            dispatch.reduce_partials(partials, spans)
            dispatch.reduce_source_partials(sources, spans)
    combine_encoded(bucket, chunks, output, residuals=of_shard, draw=draw)
