"""encode, combine_encoded and decode on CPU against their definition, bit for bit, and every byte written once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st
from support.buckets import assert_same, poison
from support.by_products import CPU, assert_partials
from support.encoded_buckets import EncodedCase, encoded_cases, table_of
from support.encoded_checks import (
    SCALES,
    assert_combine_equals_the_reference,
    assert_decode_equals_the_reference,
    assert_encode_equals_the_reference,
)
from support.sweep import sweep

from fusedreduce.kernels import cpu_encoded, encoded, launchers, reference_encoded
from fusedreduce.kernels.encoded_table import EncodedTable, Residuals
from fusedreduce.kernels.encodings import ENCODINGS, INT8, Encoding
from fusedreduce.kernels.table import PointerTable
from fusedreduce.kernels.variants import Tuning, tuned

# numpy's remarks on the overflows and NaNs that these tests are about
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
encodings = pytest.mark.parametrize("encoding", ENCODINGS.values(), ids=ENCODINGS.keys())
interpreted = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")
PATHS = pytest.mark.parametrize(
    "path",
    [
        pytest.param(reference_encoded, id="reference"),
        pytest.param(cpu_encoded, id="torch"),
        pytest.param(launchers, id="kernel", marks=interpreted),
    ],
)


@given(encoded_cases(), st.sampled_from([1024, 131072]))
@sweep(300)
def test_encode_equals_the_reference(case: EncodedCase, piece_numel: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_encoded, "PIECE_NUMEL", piece_numel)
        assert_encode_equals_the_reference(case, cpu_encoded.encode)


@given(encoded_cases(), st.sampled_from([1024, 131072]))
@sweep(200)
def test_combine_equals_the_reference(case: EncodedCase, piece_numel: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_encoded, "PIECE_NUMEL", piece_numel)
        assert_combine_equals_the_reference(case, cpu_encoded.combine_encoded)


@given(encoded_cases(), st.sampled_from(SCALES), st.sampled_from([1024, 131072]))
@sweep(300)
def test_decode_equals_the_reference(case: EncodedCase, scalar: float, piece_numel: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_encoded, "PIECE_NUMEL", piece_numel)
        assert_decode_equals_the_reference(case, scalar, cpu_encoded.decode)


@encodings
def test_large_gradients_in_several_shards(encoding: Encoding) -> None:
    """Rows that end where a shard does, and statistics of them."""
    numels = (100_003, 5, 70_000, 33)
    chunks = table_of(numels, encoding, 3)
    gradients: list[torch.Tensor | None] = [torch.randn(numel) for numel in numels]
    found = []
    for module in (cpu_encoded, reference_encoded):
        bucket, pointers = torch.empty(chunks.layout.nbytes, dtype=torch.uint8), PointerTable()
        results: list[torch.Tensor | None] = [torch.empty(numel) for numel in numels]
        partials = chunks.new_partials(CPU)
        for _ in range(2):  # what is kept with the pointer table is used again
            module.encode(gradients, chunks, pointers, bucket, 3.0)
            module.decode(results, chunks, pointers, bucket, torch.ones(1), partials)
        found.append((bucket, results, partials))
    assert torch.equal(found[0][0], found[1][0])
    for ours, theirs in zip(found[0][1], found[1][1], strict=True):
        assert ours is not None and theirs is not None
        assert_same(ours, theirs)
    assert_partials(found[0][2], found[1][2])


@given(encoded_cases())
@sweep(100)
def test_rows_cover_every_block_once(case: EncodedCase) -> None:
    chunks = case.table()
    layout, block = chunks.layout, case.encoding.block_numel
    written = torch.zeros(layout.nbytes, dtype=torch.int32)
    covered = [torch.zeros(numel, dtype=torch.int32) for numel in chunks.numels]
    for row, (slot, begin, end, offset, _) in enumerate(chunks.rows.tolist()):
        first_scale, first_code, key, element = chunks.places[row].tolist()
        blocks = -((begin - end) // block)
        assert offset // layout.shard_numel == (offset + blocks * block - 1) // layout.shard_numel
        assert first_code % 16 == 0 and end - begin <= chunks.chunk_numel
        written[first_scale : first_scale + blocks * case.encoding.scale_bytes] += 1
        written[first_code : first_code + blocks * case.encoding.code_bytes] += 1
        if slot < len(chunks):
            covered[slot][begin:end] += 1
            assert (key, element) == (chunks.keys[slot], begin)
    blocks_end = layout.shard_bytes - layout.tail_bytes
    if layout.shard_bytes:
        shards = written.view(layout.shards, layout.shard_bytes)
        assert (shards[:, :blocks_end] == 1).all() and (shards[:, blocks_end:] == 0).all()
    assert all(bool((one == 1).all()) for one in covered)
    assert chunks.first_rows[-1] == chunks.data_rows


@encodings
@PATHS
@pytest.mark.parametrize("begin", [1, 4, 5])
@tuned(Tuning(4096, 1))
def test_slots_of_one_shared_buffer(path: Any, encoding: Encoding, begin: int) -> None:
    """A comm hook's bucket: gradients, at any element of one flat buffer, need not lie as they do in blocks."""
    numels = (begin, 700, 64)
    chunks = table_of(numels, encoding, 2)
    buffer, draw = torch.randn(begin + 764), torch.tensor([1, 2, 3, 4])
    found = []
    for module, flat in ((path, buffer), (reference_encoded, buffer), (path, buffer.clone())):
        bucket, result = torch.empty(chunks.layout.nbytes, dtype=torch.uint8), torch.empty_like(buffer)
        # At the buffer's own places, or each at one of its own.
        given_, results = (
            [one if flat is buffer else one.clone() for one in tensor.split(numels)] for tensor in (flat, result)
        )
        module.encode(given_, chunks, PointerTable(), bucket, 3.0, draw=draw)
        module.decode(results, chunks, PointerTable(), bucket, torch.ones(1))
        found.append((bucket, torch.cat(results)))
    for bucket, decoded in found[1:]:
        assert torch.equal(bucket, found[0][0])
        assert_same(decoded, found[0][1])


@encodings
def test_zeros_and_missing_gradients(encoding: Encoding) -> None:
    """They are zeros, whatever memory held before; so are padding, and what is too small."""
    chunks = table_of((300, 70, 1000), encoding)
    bucket, wanted = (torch.empty(chunks.layout.nbytes, dtype=torch.uint8) for _ in range(2))
    pointers = PointerTable()
    cpu_encoded.encode([torch.full((n,), 1e9) for n in chunks.numels], chunks, pointers, bucket, 1.0)
    tiny = torch.cat([torch.zeros(500), torch.full((500,), 1e-40)])
    gradients = [torch.ones(300), None, tiny]
    cpu_encoded.encode(gradients, chunks, pointers, bucket, 1.0)
    reference_encoded.encode(gradients, chunks, PointerTable(), wanted, 1.0)
    assert torch.equal(bucket, wanted)
    results: list[torch.Tensor | None] = [torch.empty(300), None, torch.empty(1000)]
    cpu_encoded.decode(results, chunks, pointers, bucket, torch.ones(1))
    assert results[0] is not None and abs(results[0] - 1).max() < 2.0**-6
    assert results[2] is not None and (results[2] == 0).all()


@encodings
@PATHS
@tuned(Tuning(4096, 1))
def test_no_draw_makes_a_code_larger_than_the_largest(path: Any, encoding: Encoding) -> None:
    """A block's largest value may have a quotient a little above it, to which in a few places nearly one is added."""
    levels = float(encoding.levels)
    scale = next(one for one in torch.arange(1.0, 256.0, device="cpu") if levels * one * one.reciprocal() > levels)
    gradient = torch.full((2**18,), float(levels * scale), device="cpu")
    result, chunks = torch.empty_like(gradient), table_of((2**18,), encoding)
    bucket = torch.empty(chunks.layout.nbytes, dtype=torch.uint8, device="cpu")
    draw = torch.tensor([1, 2, 3, 0], device="cpu")
    path.encode([gradient], chunks, PointerTable(), bucket, 1.0, draw=draw)
    path.decode([result], chunks, PointerTable(), bucket, torch.ones(1, device="cpu"))
    assert torch.equal(result, gradient)


@encodings
@pytest.mark.usefixtures("path")  # whose bits are the kernels' too
def test_what_is_lost_comes_back(encoding: Encoding) -> None:
    """Over many steps the sum of what was decoded is that of the gradients, less the last residual."""
    generator = torch.Generator().manual_seed(3)
    chunks = table_of((1000,), encoding)
    live = torch.zeros(1, dtype=torch.int64)
    residuals = Residuals(([torch.zeros(1000)], [torch.zeros(1000)]), live, torch.ones(2))
    bucket, result = torch.empty(chunks.layout.nbytes, dtype=torch.uint8), torch.empty(1000)
    given_, decoded = torch.zeros(1000, dtype=torch.float64), torch.zeros(1000, dtype=torch.float64)
    for _ in range(50):
        gradient = torch.randn(1000, generator=generator) * 0.1 + 0.01
        encoded.encode([gradient], chunks, PointerTable(), bucket, 1.0, residuals=residuals)
        encoded.decode([result], chunks, PointerTable(), bucket, torch.ones(1))
        live.fill_(1 - live.item())
        given_ += gradient
        decoded += result
    left = residuals.copies[int(live)][0].double()
    assert left.abs().max() > 0
    assert (given_ - decoded - left).abs().max() < 1e-6


def _call(function: str, **changes: Any) -> None:
    chunks = table_of((300,), INT8)
    bucket, shard = (torch.zeros(n, dtype=torch.uint8) for n in (chunks.layout.nbytes, chunks.layout.shard_bytes))
    of_gradients = {"gradients": [torch.ones(300)], "chunks": chunks, "pointers": PointerTable(), "encoded": bucket}
    arguments: dict[str, dict[str, Any]] = {
        "combine_encoded": {"received": torch.cat([shard] * 2), "chunks": chunks, "output": shard},
        "encode": {**of_gradients, "divisor": 1.0},
        "decode": {**of_gradients, "scale": torch.ones(1)},
    }
    getattr(encoded, function)(**{**arguments[function], **changes})


_SHARED = torch.zeros(4096, dtype=torch.uint8)
_ONE = torch.tensor([0])
_WEIGHTS = torch.ones(2)


@pytest.mark.parametrize(
    ("function", "changes", "error", "message"),
    [
        (
            "encode",
            {"encoded": torch.zeros(1041, dtype=torch.uint8)},
            ValueError,
            r"shape \(1040,\), got shape \(1041,\)",
        ),
        ("encode", {"encoded": torch.zeros(1040, dtype=torch.int8)}, TypeError, "expected torch.uint8"),
        ("encode", {"encoded": _SHARED[1:1041]}, ValueError, "multiple of 16"),
        ("encode", {"gradients": []}, ValueError, "got 0 gradients"),
        ("encode", {"gradients": [torch.ones(299)]}, ValueError, "299 elements"),
        (
            "encode",
            {"gradients": [_SHARED[:1200].view(torch.float32)], "encoded": _SHARED[:1040]},
            ValueError,
            "overlaps",
        ),
        ("encode", {"draw": torch.zeros(3, dtype=torch.int64)}, ValueError, "draw must be torch.int64"),
        (
            "encode",
            {"residuals": Residuals(([torch.ones(299)], [torch.ones(300)]), _ONE, _WEIGHTS)},
            ValueError,
            r"\[299\] elements",
        ),
        (
            "encode",
            {"residuals": Residuals(([torch.ones(300)], [torch.ones(300).half()]), _ONE, _WEIGHTS)},
            ValueError,
            "residual 0 must be torch.float32",
        ),
        (
            "encode",
            {"residuals": Residuals(([torch.ones(300)], [torch.ones(300)]), _ONE, torch.ones(1))},
            ValueError,
            "residuals.weights",
        ),
        ("combine_encoded", {"received": torch.zeros(1041, dtype=torch.uint8)}, ValueError, "received shards"),
        ("combine_encoded", {"received": _SHARED[:2080], "output": _SHARED[1040:2080]}, ValueError, "overlaps"),
        ("combine_encoded", {"draw": torch.zeros(4)}, ValueError, "draw must be"),
        (
            "combine_encoded",
            {"residuals": Residuals(([torch.ones(1024)], [torch.ones(1025)[1:]]), _ONE, _WEIGHTS)},
            ValueError,
            "multiples of 16: clone them",
        ),
        ("decode", {"encoded": torch.zeros(2079, dtype=torch.uint8)}, ValueError, "encoded buckets"),
        ("decode", {"scale": torch.ones(2)}, TypeError, "one element of torch.float32"),
    ],
)
def test_bad_arguments_are_refused(
    function: str, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    _call(function)
    with pytest.raises(error, match=message):
        _call(function, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"wire_numel": 1000}, "1 x 1024"),
        ({"offsets": [3]}, "multiples of a block, 256"),
        ({"chunk_numel": 100}, "chunk_numel must be a multiple of a block"),
        ({"keys": [2**32]}, r"\[0, 2\*\*32\)"),
        ({"keys": []}, "0 keys for 1 slots"),
        ({"tail_bytes": 24}, "multiples of 16 bytes, and 24"),
    ],
)
def test_bad_tables_are_refused(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"numels": [300], "offsets": [0], "dtypes": [torch.float32], "wire_numel": 1024}
    EncodedTable(**arguments, encoding=INT8, shards=1)
    with pytest.raises(ValueError, match=message):
        EncodedTable(**{**arguments, **changes}, encoding=INT8, shards=1)


def test_the_example_of_the_docstring() -> None:
    chunks = EncodedTable([300], [0], [torch.float32], 1024, INT8, 1)
    assert chunks.rows.tolist() == [[0, 0, 300, 0, 0], [1, 0, 512, 512, 4]]
    assert chunks.places.tolist() == [[0, 16, 0, 0], [8, 528, 0, 0]]


@encodings
@PATHS
def test_nothing_at_all(path: Any, encoding: Encoding) -> None:
    chunks, empty = table_of((0,), encoding), torch.empty(0, dtype=torch.uint8)
    path.encode([torch.empty(0)], chunks, PointerTable(), empty, 1.0)
    path.combine_encoded(empty, chunks, empty)
    path.decode([torch.empty(0)], chunks, PointerTable(), empty, torch.ones(1))


@encodings
def test_what_is_kept_of_a_call_in_inference_mode_serves_later_ones(encoding: Encoding) -> None:
    chunks, pointers, gradient = table_of((3000,), encoding), PointerTable(), torch.randn(3000)
    bucket, result = torch.empty(chunks.layout.nbytes, dtype=torch.uint8), torch.empty(3000)
    with torch.inference_mode():
        cpu_encoded.encode([gradient], chunks, pointers, bucket, 1.0)
        cpu_encoded.decode([result.clone()], chunks, pointers, bucket, torch.ones(1))
    cpu_encoded.encode([gradient], chunks, pointers, bucket, 1.0)
    cpu_encoded.decode([result], chunks, pointers, bucket, torch.ones(1))
    assert (result - gradient).abs().max() <= 0.5 * gradient.abs().max() / encoding.levels * 1.01


@encodings
def test_gradients_in_their_own_shapes(encoding: Encoding) -> None:
    """Channels-last gradients travel in the order of memory; views of small ones are made once."""
    shape = (4, 3, 5, 2)
    gradient = torch.randn(shape).to(memory_format=torch.channels_last)
    layout = table_of((120,), encoding)
    chunks = EncodedTable(
        (120,), (0,), [torch.float32], layout.wire_numel, encoding, 1, shapes=[(shape, gradient.stride())]
    )
    bucket = torch.empty(chunks.layout.nbytes, dtype=torch.uint8)
    cpu_encoded.encode([gradient], chunks, PointerTable(), bucket, 1.0)
    flat = torch.empty(120)
    cpu_encoded.decode([flat], table_of((120,), encoding), PointerTable(), bucket, torch.ones(1))
    back = torch.full_like(gradient, 9.0)
    cpu_encoded.decode([back], chunks, PointerTable(), bucket, torch.ones(1))
    assert_same(back.permute(0, 2, 3, 1).reshape(-1), flat)
    half_a_code = 0.5 * gradient.abs().max() / encoding.levels * 1.01  # int4 rounds scales up
    assert (back - gradient).abs().max() <= half_a_code and not torch.equal(flat, poison(120, torch.float32))
