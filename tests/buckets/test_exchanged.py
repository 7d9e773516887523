"""Buckets that are exchanged and added up in fp32: against their definition, over threads, scripted peers, and alone.

Many ranks are cheap where nobody issues a collective: `_together` calls what ranks do with their buckets in turn.
"""

from __future__ import annotations

import gc
import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from support.grids import grid
from support.inside import inside
from support.leaf_steps import CAPS, SCALER, clear, drawn, given, leaves, loss_scale, step
from support.loopback import Loopback, ThreadWorld
from support.telling import addends
from support.wires import ENCODED, EXCHANGED, in_memory, reduced, reduced_in_two_levels, settings

from fusedreduce import (
    AgreementError,
    BoundedStaleness,
    DataParallel,
    NonFiniteGradientError,
    ReduceConfig,
    Reducer,
    SyncServer,
    UnsupportedWireError,
)
from fusedreduce.buckets.bucket import Bucket
from fusedreduce.buckets.data_path import accumulated_split, scalar
from fusedreduce.buckets.exchanged import AccumulatedBucket, EncodedBucket, ExchangedBucket
from fusedreduce.buckets.phases import Exchange, Phase, Phases
from fusedreduce.buckets.two_levels import TwoLevelBucket
from fusedreduce.comm.group import Group
from fusedreduce.comm.protocol import Communicator
from fusedreduce.kernels import reference_encoded
from fusedreduce.kernels.encodings import ENCODINGS
from fusedreduce.kernels.table import PointerTable
from fusedreduce.wires import wire_bytes

pytestmark = pytest.mark.usefixtures("path")

CPU = torch.device("cpu")
# A block and more of either encoding, some with a part of a block at their end; and what is never encoded.
SHAPES = ((7, 41), (3,), (2, 300), (16, 16), (0, 4), (300,), (5, 7), (1, 1031))


def _gradients(seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Whose elements, and blocks, are of different sizes."""
    return [(one * 10.0 ** (index - 3)).to(dtype) for index, one in enumerate(drawn(seed, SHAPES, torch.float64))]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _assert_bits(actual: torch.Tensor | None, expected: torch.Tensor, what: object = "") -> None:
    assert actual is not None and actual.dtype is expected.dtype and actual.shape == expected.shape, what
    assert torch.equal(_bits(actual), _bits(expected)), (what, actual.reshape(-1)[:4], expected.reshape(-1)[:4])


# (wire, ranks, ranks of a node): in one level, and in two.
CELLS: list[tuple[str, int, int | None]] = [
    *((wire, ranks, None) for wire in EXCHANGED for ranks in (2, 3)),
    *(("int8", ranks, 2) for ranks in (4, 6)),
]


def _config(wire: str, per_node: int | None = None, **options: Any) -> ReduceConfig:
    return ReduceConfig(ranks_per_node=per_node, **settings(wire), **options)


def _wanted(
    local: Sequence[torch.Tensor], divisors: Sequence[float], wire: str, per_node: int | None, op: Any = "mean"
) -> torch.Tensor:
    if per_node is None:
        return reduced(local, divisors, wire, op)
    return reduced_in_two_levels(local, divisors, wire, per_node)


# Against the definition


@pytest.mark.parametrize(
    ("wire", "ranks", "per_node", "steps"),
    [
        *((wire, ranks, None, 3) for wire in EXCHANGED for ranks in (1, 2, 3, 8)),
        *[("int8", 4, 2, 100), ("int4", 6, 2, 12), ("int8", 6, 3, 6), ("int4", 9, 3, 6)],
    ],
)
def test_every_rank_gets_the_bytes_of_the_definition(wire: str, ranks: int, per_node: int | None, steps: int) -> None:
    """Also with buckets of another size, from the middle on."""

    def case(communicator: Communicator) -> list[list[torch.Tensor | None]]:
        parameters, found = leaves(SHAPES), []
        given = [_gradients(10 * number + communicator.rank) for number in range(4)]
        with Reducer(parameters, communicator, _config(wire, per_node), caps=CAPS) as reducer:
            for number in range(steps):
                if number == steps // 2:
                    before = reducer.plan
                    reducer.set_bucket_size(3000)
                step(reducer, given[number % 4])
                found.append([one.grad for one in parameters])
                clear(parameters)
            assert reducer.plan != before
        return found

    local = [[_gradients(10 * number + rank) for rank in range(ranks)] for number in range(4)]
    expected = [
        [_wanted(one, [ranks] * ranks, wire, per_node) for one in zip(*of_step, strict=True)] for of_step in local
    ]
    for rank, held in enumerate(ThreadWorld(ranks).results(case)):
        for number, gradients in enumerate(held):
            for index, gradient in enumerate(gradients):
                _assert_bits(gradient, expected[number % 4][index], (rank, number, index))


@grid(
    ("wire", "ranks", "per_node", "dtype"),
    [(*cell, dtype) for cell in CELLS for dtype in (torch.bfloat16, torch.float16, torch.float64)],
)
def test_gradients_of_other_dtypes(wire: str, ranks: int, per_node: int | None, dtype: torch.dtype) -> None:
    def case(communicator: Communicator) -> list[torch.Tensor | None]:
        parameters = leaves(SHAPES, dtype)
        step(Reducer(parameters, communicator, _config(wire, per_node)), _gradients(communicator.rank, dtype))
        return [one.grad for one in parameters]

    for held in ThreadWorld(ranks).results(case):
        for index, gradient in enumerate(held):
            local = [_gradients(rank, dtype)[index] for rank in range(ranks)]
            _assert_bits(gradient, _wanted(local, [ranks] * ranks, wire, per_node), index)


@grid(
    ("wire", "ranks", "per_node", "own", "op"),
    [
        (*cell, own, op)
        for cell in [*((wire, n, None) for wire in EXCHANGED for n in (2, 3, 5)), ("int8", 4, 2)]
        for own in (False, True)
        for op in ("mean", "sum")
    ],
)
def test_sums_divisors_and_loss_scales(wire: str, ranks: int, per_node: int | None, own: bool, op: Any) -> None:
    """5 ranks: what an fp16 wire holds of a mean is 2 times the mean, of a sum an eighth. A scale comes off once."""
    divisors = [2.5 + rank if own else (float(ranks) if op == "mean" else 1.0) for rank in range(ranks)]
    scale = 2.0**6

    def case(communicator: Communicator) -> list[torch.Tensor | None]:
        parameters = leaves(SHAPES)
        reducer = Reducer(parameters, communicator, _config(wire, per_node, op=op), caps=CAPS)
        inside(reducer).loss_scale.attach(SCALER)
        divisor = divisors[communicator.rank] if own else None
        step(reducer, _gradients(communicator.rank), divisor=divisor, scale=loss_scale(scale))
        return [one.grad for one in parameters]

    for held in ThreadWorld(ranks).results(case):
        for index, gradient in enumerate(held):
            local = [_gradients(rank)[index] * scale for rank in range(ranks)]
            _assert_bits(gradient, _wanted(local, divisors, wire, per_node, op) / scale, index)


@pytest.mark.parametrize(
    ("op", "ranks", "mine", "theirs", "result"),
    [
        ("sum", 3, 49152.0, 49152.0, 49152.0 * 3),
        ("mean", 4, 80000.0, 0.0, 20000.0),
        ("mean", 4, 2.0**-23, 2.0**-23, 2.0**-23),
    ],
)
def test_what_fp16_holds_of_each_rank_and_of_the_mean_is_not_lost_on_the_way(
    op: Any, ranks: int, mine: float, theirs: float, result: float
) -> None:
    """Divided by 4 before the wire, the first of 4 ranks' 80000 fits; small ones are not flushed."""

    def case(communicator: Communicator) -> torch.Tensor | None:
        parameters = [torch.zeros(3, requires_grad=True)]
        reducer = Reducer(parameters, communicator, _config("fp16+fp32", op=op))
        step(reducer, [torch.full((3,), theirs if communicator.rank else mine)])
        return parameters[0].grad

    for gradient in ThreadWorld(ranks).results(case):
        assert torch.equal(gradient, torch.full((3,), result))


# Pieces of many ranks, without collectives


def _no_phases() -> Phases:
    return Phases(Group(Loopback()), CPU)


def _bucket(wire: str, numels: Sequence[int], ranks: int, dtype: torch.dtype = torch.float32) -> Bucket:
    name, dtypes = wire.partition("+")[0], [dtype] * len(numels)
    shapes = [((numel,), (1,)) for numel in numels]
    if name in ENCODINGS:
        return EncodedBucket(
            numels, dtypes, ENCODINGS[name], CPU, "bucket", shapes, ranks=ranks, phases=_no_phases(), lazy=False
        )
    wire_dtype = torch.bfloat16 if name == "bf16" else torch.float16
    split = accumulated_split(wire_dtype, ranks)
    return AccumulatedBucket(
        numels, dtypes, wire_dtype, CPU, "bucket", shapes, split=split, ranks=ranks, phases=_no_phases(), lazy=False
    )


def _together(bucket: Bucket, local: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """The means of ranks' gradients, by what each of them would do with its bucket; ranks: two or more."""
    ranks, wires = len(local), []
    for gradients in local:
        wire = torch.empty(bucket.wire_numel, dtype=bucket.wire_dtype)
        bucket.pack(gradients, wire, ranks / bucket.sent_split, None)
        wires.append(wire)
    assert isinstance(bucket, ExchangedBucket)
    if isinstance(bucket, EncodedBucket) and ranks == 2:
        result = torch.cat(wires)
    else:
        shards = torch.stack(wires).view(ranks, ranks, -1)
        result = torch.empty_like(wires[0])
        for rank, mine in enumerate(result.view(ranks, -1)):
            bucket.add_up(shards[:, rank].contiguous(), mine)
    means = [torch.full_like(one, math.nan) for one in local[0]]
    bucket.unpack(means, result, scalar(1.0 / bucket.split, bucket.compute_dtype, CPU), None)
    return means


class _Unissued:
    """Phases of which none is issued."""

    def start(self, phases: Sequence[Phase], label: str, device: torch.device) -> Exchange:
        return Exchange(phases, label, device)


@pytest.mark.parametrize("wire", EXCHANGED)
def test_what_is_in_flight_does_not_keep_the_group(wire: str) -> None:
    """A backend's thread may free it, and would free the group with it."""
    bucket, communicator = _bucket(wire, [2000], ranks=3), Loopback()
    assert isinstance(bucket, AccumulatedBucket | EncodedBucket)
    bucket._phases = _Unissued()  # type: ignore[assignment]
    pending, _ = bucket.reduce(torch.zeros(bucket.wire_numel, dtype=bucket.wire_dtype), communicator)
    alive = weakref.ref(communicator)
    del communicator
    gc.collect()
    assert isinstance(pending, Exchange) and len(pending.phases) == 2
    assert alive() is None


def _normal(ranks: int, numel: int, seed: int = 0) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(numel, generator=generator)] for _ in range(ranks)]


@pytest.mark.parametrize("wire", ["bf16+fp32", "fp16+fp32"])
@pytest.mark.parametrize("ranks", [3, 8, 64])
def test_the_error_of_the_mean_of_gaussian_gradients(wire: str, ranks: int) -> None:
    """Relative, L2, at 16 bits; of encoded ones: test_encodings.py."""
    local = _normal(ranks, 40_000)
    (mean,) = _together(_bucket(wire, [40_000], ranks), local)
    exact = torch.stack([one.double() for (one,) in local]).mean(0)
    error = float((mean.double() - exact).norm() / exact.norm())
    assert 0.0025 / 30 < error <= 0.0025, error


@pytest.mark.parametrize("ranks", [3, 16, 64, pytest.param(256, marks=pytest.mark.full)])
def test_gradients_of_one_sign_at_16_bits_are_as_exact_at_any_number_of_ranks(ranks: int) -> None:
    """Two roundings, each of at most 2^-8."""
    generator = torch.Generator().manual_seed(ranks)
    local = [[0.5 + torch.rand(2000, generator=generator)] for _ in range(ranks)]
    (mean,) = _together(_bucket("bf16+fp32", [2000], ranks), local)
    exact = torch.stack([one.double() for (one,) in local]).mean(0)
    bound = 2 * 2.0**-8 + 2.0**-16 + ranks * 2.0**-24
    assert float(((mean.double() - exact) / exact).abs().max()) <= bound


@pytest.mark.parametrize(("wire", "dtype"), [("bf16+fp32", torch.bfloat16), ("fp16+fp32", torch.float16)])
@pytest.mark.parametrize("ranks", [3, 4, 5])
def test_contributions_at_16_bits_are_added_up_in_rank_order(wire: str, dtype: torch.dtype, ranks: int) -> None:
    torch.manual_seed(ranks)
    local = [one.float() for one in addends(ranks, (700,), dtype)]
    expected, backwards = (reduced(each, [float(ranks)] * ranks, wire) for each in (local, local[::-1]))
    assert int((expected != backwards).sum()) > 100, "otherwise this tests nothing"
    (mean,) = _together(_bucket(wire, [700], ranks), [[one] for one in local])
    _assert_bits(mean, expected, wire)


@st.composite
def _several(draw: st.DrawFn) -> tuple[int, list[int], torch.dtype, int, str]:
    size = st.one_of(st.sampled_from([0, 1, 63, 64, 65, 255, 256, 257]), st.integers(0, 1500))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]))
    numels = draw(st.lists(size, min_size=1, max_size=4))
    return draw(st.integers(3, 6)), numels, dtype, draw(st.integers(0, 2**20)), draw(st.sampled_from(ENCODED))


@hypothesis.given(_several())
@hypothesis.settings(max_examples=60, deadline=None)
def test_random_buckets_are_what_the_reference_makes_of_them(
    drawn: tuple[int, list[int], torch.dtype, int, str],
) -> None:
    """Whatever lies in their padding; a gradient that is missing counts as zeros."""
    ranks, numels, dtype, seed, wire = drawn
    generator = torch.Generator().manual_seed(seed)
    local: list[list[Any]] = [
        [(torch.randn(numel, generator=generator, dtype=torch.float64) * 10.0**rank).to(dtype) for numel in numels]
        for rank in range(-3, ranks - 3)
    ]
    bucket = _bucket(wire, numels, ranks, dtype)
    means = _together(bucket, local)
    assert isinstance(bucket, EncodedBucket)
    table, shard = bucket.chunks, bucket.chunks.layout.shard_bytes
    wires = [torch.full((bucket.wire_numel,), 0xA5, dtype=torch.uint8) for _ in range(ranks)]
    for gradients, one in zip(local, wires, strict=True):
        reference_encoded.encode(gradients, table, PointerTable(), one, float(ranks))
    summed = torch.empty_like(wires[0])
    for rank in range(ranks):
        part = slice(rank * shard, (rank + 1) * shard)
        reference_encoded.combine_encoded(torch.cat([one[part] for one in wires]), table, summed[part])
    expected = [torch.full_like(one, math.nan) for one in means]
    reference_encoded.decode(expected, table, PointerTable(), summed, torch.ones(1, dtype=bucket.compute_dtype))
    for index, (mean, one) in enumerate(zip(means, expected, strict=True)):
        _assert_bits(mean, one, index)


# Collectives


@pytest.mark.parametrize("wire", EXCHANGED)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_collectives_bytes_and_allocations(wire: str, ranks: int) -> None:
    """Up to two ranks one collective a bucket, from three on two; buffers are kept, from the first step on."""
    parameters = [torch.zeros(64, 64, requires_grad=True) for _ in range(3)]
    communicator = Loopback([torch.clone] * (ranks - 1))
    reducer = Reducer(parameters, communicator, ReduceConfig(policy="static", **settings(wire)), caps=CAPS)
    gradients = [torch.randn(64, 64) for _ in parameters]
    for _ in range(3):
        step(reducer, gradients)
        clear(parameters)
    before, allocated = len(communicator.calls), reducer.stats()["wire_allocations"]
    for _ in range(5):
        step(reducer, gradients)
        clear(parameters)
    kinds = [call.kind for call in communicator.calls[before:]]
    buckets = inside(reducer).buckets
    assert len(buckets) == 3 and reducer.stats()["wire_allocations"] == allocated
    one_phase = "all_gather" if wire in ENCODED else "all_reduce"
    expected = ["all_to_all", "all_gather"] if ranks > 2 else [one_phase]
    assert sorted(kinds) == sorted(expected * 15)
    block = {"int8": 260 / 256, "int4": 34 / 64}.get(wire, 2.0)
    for bucket in buckets:
        assert bucket.wire_bytes - bucket.padding_bytes == 4096 * block
        assert bucket.padding_bytes < ranks * (1024 if wire == "int8" else 512) * block
    assert reducer.stats()["wire_bytes"] == sum(one.wire_bytes for one in buckets)


@pytest.mark.parametrize("wire", EXCHANGED)
def test_nothing_is_read_before_it_has_been_waited_for(wire: str) -> None:
    """What a Loopback gathers is poisoned until then. Its peers send what this rank does: its own shard is right."""
    parameters, gradient = [torch.zeros(60, 60, requires_grad=True)], torch.randn(60, 60)
    reducer = Reducer(parameters, Loopback([torch.clone] * 2), ReduceConfig(**settings(wire)))
    step(reducer, [gradient])
    (reduction,) = inside(reducer).dense_reductions
    mine, held = slice(0, reduction.bucket.layout.numel // 3), parameters[0].grad
    assert held is not None
    _assert_bits(in_memory(held)[mine], in_memory(reduced([gradient] * 3, [3.0] * 3, wire))[mine])


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize(("wire", "ranks", "per_node"), [*((wire, 3, None) for wire in EXCHANGED), ("int8", 6, 2)])
def test_buffers_are_kept_or_released(wire: str, ranks: int, per_node: int | None, lazy: bool) -> None:
    def case(communicator: Communicator) -> None:
        parameters = leaves(SHAPES)
        config = _config(wire, per_node)
        reducer = Reducer(parameters, communicator, config, caps=CAPS, lazy_bucket_allocation=lazy)
        for number in range(6):
            if number == 3:
                allocated = reducer.stats()["wire_allocations"]
            step(reducer, _gradients(number))
            assert any(isinstance(one, TwoLevelBucket) for one in inside(reducer).buckets) == (per_node is not None)
            assert not (lazy and inside(reducer).buffers())
            assert all(one.grad is not None and one.grad.isfinite().all() for one in parameters)
            clear(parameters)
        assert lazy or reducer.stats()["wire_allocations"] == allocated

    ThreadWorld(ranks).results(case)


# Unused parameters, and values that are not finite


@pytest.mark.parametrize(("wire", "ranks", "per_node"), CELLS)
def test_a_rank_that_has_no_gradient_contributes_zeros(wire: str, ranks: int, per_node: int | None) -> None:
    def case(communicator: Communicator) -> list[torch.Tensor | None]:
        parameters, config = leaves(SHAPES), _config(wire, per_node)
        reducer = Reducer(parameters, communicator, config, caps=CAPS, find_unused_parameters=True)
        gradients: list[torch.Tensor | None] = list(_gradients(communicator.rank))
        gradients[2 + communicator.rank % 2] = None
        gradients[7] = None
        step(reducer, gradients)
        return [one.grad for one in parameters]

    zeros = [torch.zeros(shape) for shape in SHAPES]
    for held in ThreadWorld(ranks).results(case):
        assert held[7] is None
        for index, gradient in enumerate(held[:7]):
            local = [(zeros if index == 2 + rank % 2 else _gradients(rank))[index] for rank in range(ranks)]
            _assert_bits(gradient, _wanted(local, [ranks] * ranks, wire, per_node), index)


@grid(("wire", "ranks", "per_node", "bad"), [(*cell, bad) for cell in CELLS for bad in (math.nan, math.inf, -math.inf)])
def test_what_is_not_finite_is_named_and_its_block_is_nan(
    wire: str, ranks: int, per_node: int | None, bad: float
) -> None:
    """The element itself is named, not the first one of its block, though all of that is NaN."""

    def case(communicator: Communicator) -> tuple[str, torch.Tensor | None]:
        parameters, gradients = leaves(SHAPES), _gradients(communicator.rank)
        config = _config(wire, per_node, check_finite="raise")
        reducer = Reducer(parameters, communicator, config, names=[f"p{n}" for n in range(len(SHAPES))], caps=CAPS)
        if communicator.rank == 1:
            gradients[2].view(-1)[333] = bad
        with pytest.raises(NonFiniteGradientError) as caught:
            step(reducer, gradients)
        spoiled = parameters[2].grad
        clear(parameters)
        step(reducer, _gradients(communicator.rank))
        return str(caught.value).removeprefix(f"rank {communicator.rank}: "), spoiled

    found = ThreadWorld(ranks).results(case)
    (text,) = {text for text, _ in found}
    assert "rank 1" in text and "p2" in text and "333" in text, text
    numel = ENCODINGS[wire].block_numel if wire in ENCODED else 1
    begin = 333 // numel * numel
    for _, gradient in found:
        finite = gradient.view(-1).isfinite()
        assert not finite[begin : begin + numel].any() and finite[:begin].all() and finite[begin + numel :].all()
        assert wire not in ENCODED or gradient.view(-1)[begin : begin + numel].isnan().all()


@pytest.mark.parametrize(("wire", "ranks", "per_node"), CELLS)
def test_statistics_are_of_decoded_values(wire: str, ranks: int, per_node: int | None) -> None:
    def case(communicator: Communicator) -> list[float]:
        parameters = leaves(SHAPES)
        reducer = Reducer(parameters, communicator, _config(wire, per_node, grad_stats=True), caps=CAPS)
        for number in range(3):
            step(reducer, _gradients(10 * number + communicator.rank))
            held = torch.cat([one.grad.reshape(-1).double() for one in parameters if one.grad is not None])
            norm, peak = inside(reducer).statistics.grad_norm(), inside(reducer).statistics.grad_norm(math.inf)
            assert float(norm) == pytest.approx(float(held.norm()), rel=1e-6)
            assert float(peak) == float(held.abs().max())
            clear(parameters)
        return [float(norm), float(peak)]

    assert len({tuple(one) for one in ThreadWorld(ranks).results(case)}) == 1


# What ranks refuse


def _different(first: dict[str, Any], other: dict[str, Any]) -> Callable[[Communicator], None]:
    def case(communicator: Communicator) -> None:
        config = ReduceConfig(**(other if communicator.rank == 1 else first))
        step(Reducer(leaves(SHAPES), communicator, config), _gradients(0))

    return case


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("first", "other", "option"),
    [
        ("int8", "int4", "wire"),
        ("native", "int8", "wire"),
        ("bf16", "bf16+fp32", "accumulation"),
        ("bf16+fp32", "fp16+fp32", "wire"),
    ],
)
def test_ranks_of_different_wires_all_learn_of_it(first: str, other: str, option: str, ranks: int) -> None:
    found = ThreadWorld(ranks).run(_different(settings(first), settings(other)))
    assert all(isinstance(one, AgreementError) and option in str(one) for one in found), found
    assert len({str(one) for one in found}) == 1


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("wire", EXCHANGED)
def test_a_backend_that_cannot_be_used_on_the_device_is_refused_where_it_adds_nothing_up(wire: str, ranks: int) -> None:
    """As Gloo for CUDA tensors, with whose streams its collectives are not ordered."""

    class Unordered(Loopback):
        def check_wire(self, dtype: torch.dtype, device: torch.device) -> None:
            raise UnsupportedWireError("its collectives are not ordered with the device's streams")

    communicator = Unordered([torch.clone] * (ranks - 1))
    parameter = torch.zeros(4, 640, requires_grad=True)
    with Reducer([parameter], communicator, ReduceConfig(policy="static", **settings(wire))) as reducer:
        with pytest.raises(UnsupportedWireError, match="not ordered"):
            step(reducer, [torch.ones_like(parameter)])
        assert parameter.grad is None


def test_another_accumulation_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown accumulation 'fp64': use one of 'wire', 'fp32'"):
        ReduceConfig(wire="bf16", accumulation="fp64")  # type: ignore[arg-type]
    for wire in EXCHANGED:
        _config(wire, sync_mode=BoundedStaleness(0))


@pytest.mark.parametrize("wire", EXCHANGED)
def test_views_are_not_made(wire: str) -> None:
    parameters = leaves(SHAPES)
    reducer = Reducer(parameters, Loopback([torch.clone]), ReduceConfig(**settings(wire)), gradient_as_bucket_view=True)
    assert not reducer.has_views
    gradients = _gradients(0)
    step(reducer, gradients)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert parameter.grad is not None
        _assert_bits(parameter.grad, reduced([gradient] * 2, [2.0] * 2, wire))
        buffers = inside(reducer).buffers()
        assert parameter.grad.untyped_storage().data_ptr() not in {one.untyped_storage().data_ptr() for one in buffers}


@pytest.mark.parametrize("wire", ENCODED)
def test_what_is_not_encoded_stays_native(wire: str) -> None:
    """Of one dimension, smaller than a block, complex; sparse gradients have no such wire anyway."""
    config, block = ReduceConfig(**settings(wire)), ENCODINGS[wire].block_numel
    for native in (
        torch.zeros(4 * block),
        torch.zeros(1, block - 1),
        torch.zeros(4, block, dtype=torch.complex64),
        torch.tensor(1.0),
    ):
        assert config.wire_of(native) == "native"
        assert wire_bytes(native, config.wire_of(native)) == native.numel() * native.element_size()
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        assert config.wire_of(torch.zeros(1, block, dtype=dtype)) == wire
    assert wire_bytes(torch.zeros(2, block + 1), config.one_wire) == 3 * ENCODINGS[wire].block_bytes


# Other surfaces


@grid(("wire", "threads", "replicas"), list(itertools.product(EXCHANGED, (True, False), (2, 3))))
def test_replicas_of_one_process(wire: str, threads: bool, replicas: int) -> None:
    """Also where one thread drives all of them, so that none may wait for a second phase before all have issued it."""
    torch.manual_seed(0)
    module = torch.nn.Linear(40, 40)
    parallel = DataParallel(
        module, ["cpu"] * replicas, reduce=ReduceConfig(**settings(wire)), threads=threads, timeout_s=20.0
    )
    try:
        for _ in range(3):
            samples = torch.randn(4 * replicas, 40)
            parallel.zero_grad()
            parallel(samples).square().sum().backward()
            held = [one.grad for one in module.parameters()]
            local = []
            for part in samples.chunk(replicas):
                loss = torch.func.functional_call(module, dict(module.named_parameters()), (part,))
                local.append(torch.autograd.grad(loss.square().sum(), list(module.parameters())))
            for index, gradient in enumerate(held):
                expected = reduced([one[index] for one in local], [1.0] * replicas, wire, "sum")
                _assert_bits(gradient, expected, index)
    finally:
        parallel.close()


@pytest.mark.parametrize("wire", EXCHANGED)
def test_devices_of_a_sync_server(wire: str) -> None:
    server = SyncServer(3, config=ReduceConfig(**settings(wire)), timeout_s=20.0)

    def device(rank: int) -> list[list[torch.Tensor | None]]:
        parameters, found = leaves(SHAPES), []
        mine = server.device(rank, [(f"p{number}", one) for number, one in enumerate(parameters)])
        for number in range(3):
            loss = given(parameters, _gradients(10 * number + rank))
            mine.announce(loss)
            loss.backward()
            mine.sync()
            found.append([one.grad for one in parameters])
            clear(parameters)
        mine.close()
        return found

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(device, range(3)))
    server.close()
    for held in results:
        for number, gradients in enumerate(held):
            for index, gradient in enumerate(gradients):
                local = [_gradients(10 * number + rank)[index] for rank in range(3)]
                _assert_bits(gradient, reduced(local, [3.0] * 3, wire), (number, index))
