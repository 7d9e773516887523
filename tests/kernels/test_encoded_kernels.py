"""encode, combine_encoded and decode in Triton's interpreter against their definition: exact, nothing written twice."""

from __future__ import annotations

import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st
from support.buckets import assert_same
from support.encoded_buckets import EncodedCase, encoded_cases, table_of
from support.encoded_checks import (
    SCALES,
    assert_combine_equals_the_reference,
    assert_decode_equals_the_reference,
    assert_encode_equals_the_reference,
)
from support.interpreter_defects import store_as_interpreted
from support.sweep import sweep

from fusedreduce.kernels import counting, dispatch, encoded, reference_encoded
from fusedreduce.kernels.combine_encoded import combine_encoded
from fusedreduce.kernels.decode import decode
from fusedreduce.kernels.encode import encode
from fusedreduce.kernels.encoded_table import Residuals
from fusedreduce.kernels.encodings import ENCODINGS, INT8, Encoding
from fusedreduce.kernels.table import PointerTable
from fusedreduce.kernels.variants import Tuning, tuned

pytestmark = [
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
    # numpy's remarks on the overflows and NaNs that these tests are about
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
encodings = pytest.mark.parametrize("encoding", ENCODINGS.values(), ids=ENCODINGS.keys())
tunings = st.sampled_from([Tuning(4096, 1), Tuning(16384, 1)])


@given(encoded_cases(), tunings)
@sweep(100)
def test_encode_equals_the_reference(case: EncodedCase, tuning: Tuning) -> None:
    with tuned(tuning):
        assert_encode_equals_the_reference(case, encode)


@given(encoded_cases(), tunings)
@sweep(40)
def test_combine_equals_the_reference(case: EncodedCase, tuning: Tuning) -> None:
    with tuned(tuning):
        assert_combine_equals_the_reference(case, combine_encoded)


@given(encoded_cases(), st.sampled_from(SCALES), tunings)
@sweep(100)
def test_decode_equals_the_reference(case: EncodedCase, scalar: float, tuning: Tuning) -> None:
    with pytest.MonkeyPatch.context() as patch:  # the one difference that is known, and is not ours
        patch.setattr(reference_encoded, "store_rounded", store_as_interpreted)
        with tuned(tuning):
            assert_decode_equals_the_reference(case, scalar, decode)


@encodings
@pytest.mark.parametrize("stochastic", [False, True])
@tuned(Tuning(4096, 1))
def test_blocks_of_every_kind(encoding: Encoding, stochastic: bool) -> None:
    """What is not finite, zero, too small for a scale, at its edge, huge; the last block is not full."""
    block, smallest = encoding.block_numel, encoding.levels * 2.0**-126
    firsts = (float("nan"), -float("nan"), float("inf"), 0.0, smallest, smallest * (1 - 2.0**-20), 3e38, 1.0)
    gradient = torch.randn(len(firsts) * block - 3).clamp_(-1, 1)
    for number, first in enumerate(firsts):
        part = gradient[number * block : (number + 1) * block]
        part *= abs(first) if first == first and first < float("inf") else 1.0
        part[5] = first
    chunks = table_of((len(gradient),), encoding)
    draw = torch.tensor([3, 2**31 + 5, 7, 0]) if stochastic else None
    found = []
    for function in (encode, reference_encoded.encode):
        copies = [torch.full_like(gradient, 2.0**-4)], [torch.zeros_like(gradient)]
        residuals = Residuals(copies, torch.tensor([0]), torch.tensor([0.5, 2.0]))
        bucket = torch.empty(chunks.layout.nbytes, dtype=torch.uint8)
        partials = chunks.new_source_partials(torch.device("cpu"))
        function([gradient], chunks, PointerTable(), bucket, 1.0, draw=draw)
        plain = bucket.clone()
        function([gradient], chunks, PointerTable(), bucket, 1.0, partials, residuals=residuals, draw=draw)
        found.append((plain, bucket, copies[1][0], partials.first_non_finite))
    for ours, wanted in zip(*found, strict=True):
        assert torch.equal(ours, wanted)
    assert (found[0][2][: 3 * block] == 2.0**-4).all(), "of a block that is not finite the residual stays"
    result = torch.empty_like(gradient)
    decode([result], chunks, PointerTable(), found[0][0], torch.ones(1))
    blocks = result[: 7 * block].view(7, block)
    assert blocks[:3].isnan().all() and (blocks[[3, 5]] == 0).all()
    assert blocks[4, 5] == smallest and abs(blocks[6, 5].item() / 3e38 - 1) < 2.0**-6


@encodings
@tuned(Tuning(4096, 1))
def test_contributions_are_added_in_their_order(encoding: Encoding) -> None:
    """(2^25 + 1) - 2^25 is 0 in fp32, and 1 in another order."""
    chunks = table_of((700,), encoding)
    layout = chunks.layout
    parts = [torch.empty(layout.nbytes, dtype=torch.uint8) for _ in range(3)]
    for part, value in zip(
        parts, (2.0**25 * encoding.levels, 1.0 * encoding.levels, -(2.0**25) * encoding.levels), strict=True
    ):
        reference_encoded.encode([torch.full((700,), value)], chunks, PointerTable(), part, 1.0)
    result, output = torch.empty(700), torch.empty(layout.shard_bytes, dtype=torch.uint8)
    decode([result], chunks, PointerTable(), torch.cat(parts), torch.ones(1))
    combine_encoded(torch.cat(parts), chunks, output)
    wanted = torch.empty(700)
    reference_encoded.decode([wanted], chunks, PointerTable(), torch.cat(parts), torch.ones(1))
    assert_same(result, wanted)
    reference_encoded.decode([wanted], chunks, PointerTable(), output, torch.ones(1))
    assert (result == 0).all() and (wanted == 0).all()


@encodings
def test_one_launch_each(encoding: Encoding) -> None:
    """Whatever the number of parameters; on CPU under the interpreter these are the kernels."""
    chunks = table_of((300,) * 5, encoding, 2)
    gradients = [torch.randn(300) for _ in range(5)]
    bucket = torch.empty(chunks.layout.nbytes, dtype=torch.uint8)
    output = torch.empty(chunks.layout.shard_bytes, dtype=torch.uint8)
    with counting.count_launches() as counted:
        encoded.encode(gradients, chunks, PointerTable(), bucket, 1.0)
        encoded.combine_encoded(bucket, chunks, output)
        encoded.decode(gradients, chunks, PointerTable(), bucket, torch.ones(1))
    assert [(one.function, one.path, one.launches) for one in counted] == [
        ("encode", "interpreter", 1),
        ("combine_encoded", "interpreter", 1),
        ("decode", "interpreter", 1),
    ]


def test_warming_up_launches_what_a_step_will(monkeypatch: pytest.MonkeyPatch) -> None:
    device, wanted = torch.device("cpu"), ["encode", "encode", "decode", "combine_encoded"]
    totals = ["reduce_partials", "reduce_source_partials"]
    encoded.warm_up.cache_clear()
    for path, options, launched in (
        ("triton", {}, wanted),
        (
            "triton",
            {"feedback": True, "stochastic": True, "stats": True},
            [*wanted[:3], *wanted[:3], *totals, *wanted[3:]],
        ),
        ("triton", {"fp64": True}, wanted),
        ("torch", {}, []),
    ):
        monkeypatch.setattr(dispatch, "path_for", lambda *arguments, path=path: path)
        with counting.count_launches() as counted:
            encoded.warm_up(device, INT8, **options)
        assert [one.function for one in counted] == launched
        encoded.warm_up.cache_clear()
