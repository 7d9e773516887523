"""What every implementation of encode, combine_encoded and decode must do: what the reference does, no more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fusedreduce.kernels import reference_encoded
from fusedreduce.kernels.encoded_table import EncodedTable, Residuals
from fusedreduce.kernels.table import PointerTable
from support.buckets import Guarded, assert_same
from support.by_products import CPU, assert_partials
from support.encoded_buckets import UNWRITTEN, EncodedCase, guarded_bytes

SCALES = (1.0, 0.5, 3.0, 1.0 / 65536.0)


def inner(guarded: list[Guarded | None]) -> list[torch.Tensor | None]:
    return [None if one is None else one.inner for one in guarded]


def assert_encode_equals_the_reference(case: EncodedCase, function: Callable[..., None]) -> None:
    """Bytes, residuals and statistics; gradients and everything beside the output as they were."""
    chunks, gradients = case.table(), case.gradients()
    found = []
    for one in (function, reference_encoded.encode):
        bucket, residuals = guarded_bytes(chunks.layout.nbytes), case.residuals(chunks.numels)
        partials = chunks.new_source_partials(CPU)
        one(
            inner(gradients),
            chunks,
            PointerTable(),
            bucket.inner,
            case.bucket.scalar,
            partials,
            residuals=residuals,
            draw=case.drawn(),
        )
        bucket.assert_edges_untouched()
        found.append((bucket.inner, residuals, partials))
    (bytes_, kept, partials), (wanted, wanted_kept, wanted_partials) = found
    assert torch.equal(bytes_, wanted)
    layout = chunks.layout
    if layout.tail_bytes:
        tails = bytes_.view(layout.shards, layout.shard_bytes)[:, -layout.tail_bytes :]
        assert (tails == UNWRITTEN).all()
    assert_residuals(kept, wanted_kept)
    assert partials.first_non_finite.tolist() == wanted_partials.first_non_finite.tolist()
    assert partials.flushed.tolist() == wanted_partials.flushed.tolist()
    for gradient in gradients:
        if gradient is not None:
            assert_same(gradient.outer, gradient.before)


def assert_residuals(kept: Residuals | None, wanted: Residuals | None) -> None:
    """Both copies, bit for bit."""
    assert (kept is None) == (wanted is None)
    if kept is not None and wanted is not None:
        for ours, theirs in zip(kept.copies, wanted.copies, strict=True):
            for mine, other in zip(ours, theirs, strict=True):
                assert_same(mine, other)


def encoded_buckets(case: EncodedCase, chunks: EncodedTable) -> torch.Tensor:
    """As many different buckets as there are contributions, made by the reference."""
    parts = []
    for number in range(case.contributions):
        gradients = [None if one is None else one.inner * (number + 1) for one in case.gradients()]
        bucket = guarded_bytes(chunks.layout.nbytes).inner
        reference_encoded.encode(gradients, chunks, PointerTable(), bucket, 1.0)
        parts.append(bucket)
    return torch.cat(parts)


def assert_combine_equals_the_reference(case: EncodedCase, function: Callable[..., None]) -> None:
    """Bytes and residuals."""
    chunks = case.table()
    layout = chunks.layout
    received = encoded_buckets(case, chunks).view(-1, max(layout.shard_bytes, 1))
    received = received[:: layout.shards].contiguous().view(-1)
    found = []
    for one in (function, reference_encoded.combine_encoded):
        output, residuals = guarded_bytes(layout.shard_bytes), case.residuals((layout.shard_numel,))
        one(received, chunks, output.inner, residuals=residuals, draw=case.drawn())
        output.assert_edges_untouched()
        found.append((output.inner, residuals))
    assert torch.equal(found[0][0], found[1][0])
    assert_residuals(found[0][1], found[1][1])


def assert_decode_equals_the_reference(
    case: EncodedCase, scalar: float, function: Callable[..., None], **extra: Any
) -> None:
    """Gradients and statistics; every element of a gradient written, and no other."""
    chunks = case.table()
    buckets = encoded_buckets(case, chunks)
    before, scale = buckets.clone(), torch.tensor([scalar], dtype=case.bucket.compute)
    found = []
    for one in (function, reference_encoded.decode):
        gradients, partials = case.gradients(poisoned=True), chunks.new_partials(CPU)
        one(inner(gradients), chunks, PointerTable(), buckets, scale, partials)
        found.append((gradients, partials))
    assert torch.equal(buckets, before)
    for ours, theirs in zip(found[0][0], found[1][0], strict=True):
        if ours is not None and theirs is not None:
            ours.assert_edges_untouched()
            assert_same(ours.inner, theirs.inner)
    assert_partials(found[0][1], found[1][1])
