"""Which parameters share a bucket: torch's own function as the oracle, then what ours promises beyond it; plans."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from support.sweep import sweep

from fusedreduce.buckets.bucket_set import kind_of
from fusedreduce.config import CAP_POLICIES, CapPolicy
from fusedreduce.planning.bucketing import MIB, UNLIMITED_BYTES, BucketCaps, assign_by_size
from fusedreduce.planning.plan import ParameterKind, bucket_label, first_plan, ready_plan, static_plan

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64)
numels = st.one_of(st.sampled_from([0, 1, 10, 20, 100]), st.integers(0, 60))
limits = st.lists(st.one_of(st.sampled_from([1, 40, 80, 400, 2**40]), st.integers(1, 500)), min_size=1, max_size=4)


@st.composite
def models(draw: st.DrawFn, most: int = 16) -> tuple[list[torch.Tensor], list[bool], list[int]]:
    """Tensors without memory, which of them get sparse gradients, and an order."""
    count = draw(st.integers(1, most))
    kinds = draw(st.lists(st.tuples(numels, st.sampled_from(DTYPES)), min_size=count, max_size=count))
    tensors = [torch.empty(numel, dtype=dtype, device="meta") for numel, dtype in kinds]
    rare = st.sampled_from([False] * 6 + [True])
    sparse = draw(st.lists(rare, min_size=count, max_size=count))
    return tensors, sparse, draw(st.permutations(range(count)))


def _ours(
    tensors: list[torch.Tensor],
    limits_bytes: list[int],
    sparse: list[bool] | None = None,
    order: list[int] | None = None,
    cap_policy: CapPolicy = "c10d",
) -> list[tuple[int, ...]]:
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    alone = [index for index, flag in enumerate(sparse or ()) if flag]
    groups = [(tensor.dtype, tensor.device) for tensor in tensors]
    return assign_by_size(sizes, groups, limits_bytes, order=order, alone=alone, cap_policy=cap_policy)


def _torchs(
    tensors: list[torch.Tensor], limits_bytes: list[int], sparse: list[bool], order: list[int]
) -> tuple[list[tuple[int, ...]], list[int]]:
    """torch's buckets and the limit of each; with an order it takes the tensors in that order too."""
    walked = [tensors[index] for index in order] if order else tensors
    cut: Any = dist._compute_bucket_assignment_by_size(walked, limits_bytes, sparse, order)  # type: ignore[attr-defined]
    return [tuple(bucket) for bucket in cut[0]], cut[1]


@given(models(), limits)
@sweep(400)
def test_without_an_order_it_is_torchs_function(
    model: tuple[list[torch.Tensor], list[bool], list[int]], limits_bytes: list[int]
) -> None:
    tensors, sparse, _ = model
    assert _ours(tensors, limits_bytes, sparse) == _torchs(tensors, limits_bytes, sparse, [])[0]


@given(models(), limits)
@sweep(400)
def test_with_an_order_it_is_torchs_but_for_the_order_of_what_is_left(
    model: tuple[list[torch.Tensor], list[bool], list[int]], limits_bytes: list[int]
) -> None:
    tensors, sparse, order = model
    ours = _ours(tensors, limits_bytes, sparse, order)
    theirs, used_limits = _torchs(tensors, limits_bytes, sparse, order)

    def is_left(bucket: tuple[int, ...], limit: int) -> bool:
        size = sum(tensors[index].numel() * tensors[index].element_size() for index in bucket)
        return not sparse[bucket[0]] and size < limit

    left = [bucket for bucket, limit in zip(theirs, used_limits, strict=True) if is_left(bucket, limit)]
    closed = len(theirs) - len(left)
    assert ours[:closed] == theirs[:closed]
    assert ours[closed:] == sorted(left, key=lambda bucket: order.index(bucket[0]))


@given(models(), limits, st.sampled_from(CAP_POLICIES), st.booleans())
@sweep(400)
def test_every_parameter_is_in_one_bucket_of_its_kind(
    model: tuple[list[torch.Tensor], list[bool], list[int]], limits_bytes: list[int], policy: CapPolicy, ordered: bool
) -> None:
    tensors, sparse, order = model
    buckets = _ours(tensors, limits_bytes, sparse, order if ordered else None, policy)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(tensors)))
    place = order.index if ordered else int
    for bucket in buckets:
        assert bucket and len({tensors[index].dtype for index in bucket}) == 1
        assert list(bucket) == sorted(bucket, key=place), "members in the order of the walk"
        assert len(bucket) == 1 or not any(sparse[index] for index in bucket)


@given(models(), limits, st.booleans())
@sweep(400)
# The second bucket begins with more than the first one's limit, and has room for the third parameter.
@example(([torch.empty(numel, device="meta") for numel in (5, 20, 20)], [False] * 3, [0, 1, 2]), [40, 400], False)
def test_strict_never_exceeds_a_cap_but_for_one_large_parameter(
    model: tuple[list[torch.Tensor], list[bool], list[int]], limits_bytes: list[int], ordered: bool
) -> None:
    tensors, sparse, order = model
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    walk = order if ordered else list(range(len(tensors)))
    buckets = _ours(tensors, limits_bytes, sparse, order if ordered else None, "strict")
    for dtype in DTYPES:
        mine = [bucket for bucket in buckets if tensors[bucket[0]].dtype is dtype and not sparse[bucket[0]]]
        mine.sort(key=lambda bucket: walk.index(bucket[0]))
        for cursor, bucket in enumerate(mine):
            limit = limits_bytes[min(cursor, len(limits_bytes) - 1)]
            size = sum(sizes[index] for index in bucket)
            # A parameter without elements may lie beside a large one.
            assert size <= limit or sum(sizes[index] > 0 for index in bucket) == 1
            if cursor + 1 < len(mine) and size < limit:
                assert size + sizes[mine[cursor + 1][0]] > limit, "closed too early"


def test_the_example_of_the_docstring() -> None:
    sizes = [4, 4, 4, 15, 15]
    assert assign_by_size(sizes, [0] * 5, [10, 20]) == [(0, 1, 2), (3, 4)]
    assert assign_by_size(sizes, [0] * 5, [10, 20], cap_policy="strict") == [(0, 1), (2, 3), (4,)]


@pytest.mark.parametrize("order", [[0, 1], [0, 1, 1], [0, 1, 3], [0, 1, 2, 2], []])
def test_an_order_that_does_not_name_each_parameter_once_is_refused(order: list[int]) -> None:
    with pytest.raises(ValueError, match="name each of 3 parameters once"):
        assign_by_size([1, 1, 1], [0, 0, 0], [10], order=order)


def test_bad_limits_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one limit"):
        assign_by_size([1], [0], [])
    with pytest.raises(ValueError, match="first_bytes must be at least 1 byte, got 0"):
        BucketCaps(first_bytes=0)
    with pytest.raises(ValueError, match="cap_bytes must be at least 1 byte, got -1"):
        BucketCaps(cap_bytes=-1)
    with pytest.raises(ValueError, match=r"every limit .* \(4, 0\)"):
        BucketCaps(listed_bytes=(4, 0))


def test_no_parameters_make_no_buckets() -> None:
    assert assign_by_size([], [], [10]) == []


@pytest.mark.parametrize(
    ("caps", "expected", "planned"),
    [
        (BucketCaps(), (MIB, 25 * MIB), UNLIMITED_BYTES),
        (BucketCaps(cap_bytes=MIB // 2), (MIB // 2,), MIB // 2),
        (BucketCaps(first_bytes=8, cap_bytes=8), (8,), 8),
        (BucketCaps(listed_bytes=(30, 10, 20)), (30, 10, 20), 30),
        (BucketCaps(cap_bytes=7, listed_bytes=(5,)), (5,), 5),
    ],
)
def test_limits_as_the_assignment_and_the_planner_take_them(
    caps: BucketCaps, expected: tuple[int, ...], planned: int
) -> None:
    assert caps.limits_bytes == expected
    assert caps.planned_limit_bytes == planned


def _kinds(*dtypes: torch.dtype, numel: int = 100) -> list[ParameterKind]:
    return [kind_of(torch.empty(numel, dtype=dtype), False, "bf16") for dtype in dtypes]


def test_the_first_plan_of_a_reducer_that_learns_is_one_bucket_per_dtype_and_device() -> None:
    f32, bf16 = torch.float32, torch.bfloat16
    kinds = [dataclasses.replace(kind, size_bytes=100 * MIB) for kind in _kinds(f32, bf16, f32)]
    kinds.append(kind_of(torch.empty(2, device="meta"), False, "bf16"))
    assert first_plan(kinds, BucketCaps(), "c10d", learns=True) == ((3,), (1,), (0, 2))
    kinds[0] = kind_of(torch.empty(2), True, "bf16")
    assert first_plan(kinds, BucketCaps(), "c10d", learns=True) == ((3,), (2,), (1,), (0,)), "a sparse one is alone"


@pytest.mark.parametrize("policy", CAP_POLICIES)
def test_a_plan_that_is_never_learned_is_cut_at_once_and_launched_in_reverse(policy: CapPolicy) -> None:
    caps = BucketCaps(first_bytes=400, cap_bytes=800)
    assert first_plan(_kinds(*[torch.float32] * 5), caps, policy, learns=False) == ((3, 4), (1, 2), (0,))


def test_listed_caps_hold_from_the_first_step_on() -> None:
    kinds = _kinds(*[torch.float32] * 4)
    caps = BucketCaps(listed_bytes=(400, 1200))
    for learns in (True, False):
        assert first_plan(kinds, caps, "c10d", learns=learns) == ((1, 2, 3), (0,))
    assert static_plan(kinds, caps, "c10d", [3, 1, 0, 2]) == ((3,), (1, 0, 2))


def test_what_may_share_a_bucket() -> None:
    f32, bf16, f16, f64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
    kinds = _kinds(f32, bf16, f64, f16, torch.complex64, torch.complex128)
    order = [5, 3, 4, 2, 1, 0]
    caps = BucketCaps(cap_bytes=25 * MIB)
    shared = ready_plan(kinds, caps, "c10d", order, share=True)
    assert shared == ((5, 2), (3, 4, 1, 0)), "pairs of fp64 are fp64, pairs of fp32 are fp32"
    assert static_plan(kinds, caps, "c10d", order) == ((5,), (3,), (4,), (2,), (1,), (0,))
    kinds[0] = kind_of(torch.empty(100, device="meta"), False, "bf16")
    kinds[1] = kind_of(torch.empty(100, dtype=bf16), True, "bf16")
    shared = ready_plan(kinds, caps, "c10d", order, share=True)
    assert shared == ((3, 4), (5, 2), (1,), (0,)), "devices and sparse gradients never share"


@given(models(), limits, st.booleans(), st.sampled_from(CAP_POLICIES))
@sweep(400)
def test_plans_cover_every_parameter_once(
    model: tuple[list[torch.Tensor], list[bool], list[int]], limits_bytes: list[int], flag: bool, policy: CapPolicy
) -> None:
    tensors, sparse, order = model
    kinds = [kind_of(tensor, one, "bf16") for tensor, one in zip(tensors, sparse, strict=True)]
    caps = BucketCaps(listed_bytes=tuple(limits_bytes))
    for plan in (
        first_plan(kinds, caps, policy, learns=flag),
        static_plan(kinds, caps, policy, order),
        ready_plan(kinds, caps, policy, order, share=flag),
    ):
        assert sorted(index for bucket in plan for index in bucket) == list(range(len(kinds)))


def test_sizes_are_bytes_of_the_gradient() -> None:
    assert kind_of(torch.empty(3, dtype=torch.complex64), False, "native").size_bytes == 24
    assert kind_of(torch.empty(3, 0), False, "native").size_bytes == 0
    assert kind_of(torch.empty(3).expand(4, 3), False, "native").size_bytes == 48


@pytest.mark.parametrize(
    ("count", "shown"), [(1, "layer0"), (3, "layer0, layer1, layer2"), (50, "layer49"), (51, "layer49 and 1 more")]
)
def test_a_label_names_at_most_fifty_parameters(count: int, shown: str) -> None:
    label = bucket_label(4, [f"layer{index}" for index in range(count)])
    assert label.startswith("bucket 4 (layer0") and label.endswith(f"{shown})")
    assert label.count("layer") == min(count, 50)
