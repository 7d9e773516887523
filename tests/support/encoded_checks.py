"""What every implementation of encode, combine_encoded and decode must do: what the reference does, no more."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fusedreduce.kernels import reference_encoded
from fusedreduce.kernels.encoded_table import Residuals
from fusedreduce.kernels.table import PointerTable
from support.buckets import assert_same, inner
from support.by_products import CPU, assert_partials, assert_source_partials
from support.encoded_buckets import UNWRITTEN, EncodedCase, contributed, guarded_bytes

SCALES = (1.0, 0.5, 3.0, 1.0 / 65536.0)


def assert_encode_equals_the_reference(
    case: EncodedCase, function: Callable[..., None], device: torch.device = CPU
) -> None:
    """Bytes, residuals and statistics; gradients and everything beside the output as they were."""
    chunks, found = case.table(), []
    for one, where in ((function, device), (reference_encoded.encode, CPU)):
        gradients, partials = case.bucket.gradients(where), chunks.new_source_partials(where)
        bucket, residuals = guarded_bytes(chunks.layout.nbytes, where), case.residuals(chunks.numels, where)
        given = inner(gradients), chunks, PointerTable(), bucket.inner, case.bucket.scalar, partials
        one(*given, residuals=residuals, draw=case.drawn(where))
        bucket.assert_edges_untouched()
        for gradient in gradients:
            if gradient is not None:
                assert_same(gradient.outer, gradient.before)
        found.append((bucket.inner.cpu(), residuals, partials))
    (bytes_, kept, partials), (wanted, wanted_kept, wanted_partials) = found
    assert torch.equal(bytes_, wanted)
    layout = chunks.layout
    if layout.tail_bytes:
        tails = bytes_.view(layout.shards, layout.shard_bytes)[:, -layout.tail_bytes :]
        assert (tails == UNWRITTEN).all()
    assert_residuals(kept, wanted_kept)
    assert_source_partials(partials, wanted_partials)


def assert_residuals(kept: Residuals | None, wanted: Residuals | None) -> None:
    """Both copies, bit for bit."""
    assert (kept is None) == (wanted is None)
    if kept is not None and wanted is not None:
        for ours, theirs in zip(kept.copies, wanted.copies, strict=True):
            for mine, other in zip(ours, theirs, strict=True):
                assert_same(mine.cpu(), other)


def assert_combine_equals_the_reference(
    case: EncodedCase, function: Callable[..., None], device: torch.device = CPU
) -> None:
    """Bytes and residuals."""
    chunks = case.table()
    layout = chunks.layout
    received = contributed(case.bucket.gradients(), chunks, case.contributions).view(-1, max(layout.shard_bytes, 1))
    received = received[:: layout.shards].contiguous().view(-1)
    found = []
    for one, where in ((function, device), (reference_encoded.combine_encoded, CPU)):
        output, residuals = guarded_bytes(layout.shard_bytes, where), case.residuals((layout.shard_numel,), where)
        one(received.to(where), chunks, output.inner, residuals=residuals, draw=case.drawn(where))
        output.assert_edges_untouched()
        found.append((output.inner.cpu(), residuals))
    assert torch.equal(found[0][0], found[1][0])
    assert_residuals(found[0][1], found[1][1])


def assert_decode_equals_the_reference(
    case: EncodedCase, scalar: float, function: Callable[..., None], device: torch.device = CPU
) -> None:
    """Gradients and statistics; every element of a gradient written, and no other."""
    chunks = case.table()
    buckets = contributed(case.bucket.gradients(), chunks, case.contributions)
    scale = torch.tensor([scalar], dtype=case.bucket.compute)
    found = []
    for one, where in ((function, device), (reference_encoded.decode, CPU)):
        gradients, partials = case.bucket.gradients(where, poisoned=True), chunks.new_partials(where)
        given = buckets.to(where, copy=True)
        one(inner(gradients), chunks, PointerTable(), given, scale.to(where), partials)
        assert torch.equal(given.cpu(), buckets)
        found.append((gradients, partials))
    for ours, theirs in zip(found[0][0], found[1][0], strict=True):
        if ours is not None and theirs is not None:
            ours.assert_edges_untouched()
            assert_same(ours.inner.cpu(), theirs.inner)
    assert_partials(found[0][1], found[1][1])
