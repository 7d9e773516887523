"""Norms and statistics of a Reducer against fp64 on the final gradients; its peers are scripted, or threads.

On the torch path, which is what CPU users get; kernels against it: test_kernels.py.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.grids import grid
from support.inside import LEAST_PLANNED_BYTES, inside
from support.leaf_steps import (
    CAPS,
    HOOKS,
    TRAVELS,
    WIRE_DTYPES,
    Wire,
    assert_close,
    averaging,
    bits,
    clear,
    exact_norms,
    flat_real,
    given,
    leaves,
    real_numel,
    shadow_step,
    sparse_like,
    step,
    with_hooks,
)
from support.loopback import PEERS, Loopback, ThreadRank, ThreadWorld, half

from fusedreduce import ReduceConfig, Reducer
from fusedreduce.buckets.gradient_table import GradientTable
from fusedreduce.comm.protocol import Communicator
from fusedreduce.config import POLICIES, Policy
from fusedreduce.kernels import counting, dispatch, runs
from fusedreduce.kernels.table import CHUNK_NUMEL, Totals

pytestmark = pytest.mark.usefixtures("path")

Make = Callable[[], list[torch.Tensor | None]]


def _zoo() -> list[torch.Tensor]:
    """Every kind of dense parameter."""
    made: list[tuple[torch.dtype, tuple[tuple[int, ...], ...]]] = [
        (torch.float32, ((3,), (5, 7), (), (0,), (40,), (2, 0), (8, 3), (runs.LARGE_NUMEL + 5,))),
        (torch.bfloat16, ((9,), (60,))),
        (torch.float16, ((33,), (4,))),
        (torch.float64, ((6, 5), (2,))),
        (torch.complex64, ((7,), (31,))),
        (torch.complex128, ((3, 2),)),
    ]
    found = [torch.zeros(shape, dtype=dtype) for dtype, shapes in made for shape in shapes]
    found.append(torch.zeros(4, 3, 5, 5).to(memory_format=torch.channels_last))
    found.append(torch.zeros(6, 2).t())
    return [one.requires_grad_() for one in found]


def _random(parameter: torch.Tensor, kind: str, wire: Wire) -> torch.Tensor:
    """A gradient of one kind that neither its dtype nor the wire turns into Inf."""
    real = parameter.dtype.to_real() if parameter.is_complex() else parameter.dtype
    numel = real_numel(parameter)
    normal = torch.randn(numel, dtype=torch.float64)
    most = min(torch.finfo(real).max, torch.finfo(WIRE_DTYPES[wire] or torch.float64).max)
    least = torch.finfo(real).smallest_normal
    if kind == "heavy tails":
        found = (normal / torch.rand(numel, dtype=torch.float64) ** 3).clamp(-most / 16, most / 16)
    elif kind == "denormal":
        found = normal * (least / 16 if real is not torch.float64 else 1e-140)
    elif kind == "overflowing squares":
        found = normal.sign() * (most**0.9 if real is not torch.float64 or wire != "native" else 1e100) / 8
        found = found * torch.rand(numel, dtype=torch.float64)
    elif kind == "wide":
        found = normal * torch.pow(10.0, torch.randint(-30, 4, (numel,)).double())
    else:
        found = torch.zeros(numel, dtype=torch.float64)
    filled = torch.empty_like(parameter.detach())
    flat_real_memory = torch.view_as_real(filled) if filled.is_complex() else filled
    flat_real_memory.copy_(found.reshape(flat_real_memory.shape))
    return filled


KINDS = ("heavy tails", "denormal", "overflowing squares", "wide", "zeros")


def _reducer(
    parameters: list[torch.Tensor],
    wire: Wire,
    views: bool,
    communicator: Communicator | None = None,
    config: dict[str, Any] | None = None,
    **options: Any,
) -> Reducer:
    """With statistics, in several buckets, beside one peer."""
    return Reducer(
        parameters,
        communicator or Loopback((half,)),
        ReduceConfig(**{"wire": wire, "grad_stats": True, **(config or {})}),
        caps=CAPS,
        gradient_as_bucket_view=views,
        **options,
    )


def _assert_norms(reducer: Reducer, *, collected: bool) -> None:
    """What is collected and what is measured now, 2 and inf, all and one by one."""
    parameters, observed = reducer.parameters, inside(reducer).statistics
    assert observed.has_by_products() is collected
    for norm_type in (2.0, math.inf):
        exact = exact_norms(parameters, norm_type)
        if norm_type == 2.0:
            by_name = observed.grad_norms()
            assert_close([*by_name.values(), observed.grad_norm()], exact, "L2")
            assert_close([observed.measured_norm()], exact[-1:], "L2, measured")
        else:
            by_name = observed.grad_norms(math.inf)
            numbers = [float(one) for one in (*by_name.values(), observed.grad_norm(math.inf))]
            assert_close(numbers, exact, "inf")
            assert float(observed.measured_norm(math.inf)) == numbers[-1]
        assert tuple(by_name) == reducer.names
        assert {(one.dtype, one.dim()) for one in (*by_name.values(), observed.grad_norm())} == {(torch.float64, 0)}
    assert float(observed.found_non_finite()) == 0.0 if collected else True


def _train(reducer: Reducer, make: Make, *, collected: bool, steps: int = 8) -> set[Any]:
    """Steps whose norms are all looked at; the plans they had."""
    plans = set()
    for _ in range(steps):
        clear(reducer.parameters)
        step(reducer, make())
        plans.add(reducer.plan)
        _assert_norms(reducer, collected=collected)
    return plans


# Against fp64


@grid(
    ("wire", "views", "kind", "collected"),
    [(*travel, *one) for travel in TRAVELS for one in [*((kind, True) for kind in KINDS), ("wide", False)]],
)
def test_norms_are_those_of_the_reduced_gradients(wire: Wire, views: bool, kind: str, collected: bool) -> None:
    parameters = _zoo()
    table = torch.zeros(20, 4, requires_grad=True)
    complex_table = torch.zeros(9, 2, dtype=torch.complex64, requires_grad=True)
    sparse = [False] * len(parameters) + [True, True]
    parameters += [table, complex_table]
    reducer = _reducer(parameters, wire, views, Loopback((half, half)), config={"grad_stats": collected}, sparse=sparse)

    def make() -> list[torch.Tensor | None]:
        dense = [_random(parameter, kind, wire) for parameter in parameters[:-2]]
        return [*dense, sparse_like(table, [3, 7, 3, 19]), sparse_like(complex_table, [8, 8, 0])]

    plans = _train(reducer, make, collected=collected, steps=4)
    assert len(plans) > 1 and max(map(len, plans)) > 4


def test_a_gradient_in_several_chunks_and_one_of_a_billionth_beside_it() -> None:
    parameters = [torch.zeros(3 * CHUNK_NUMEL + 1, requires_grad=True), torch.zeros(1, requires_grad=True)]
    reducer = Reducer(parameters, Loopback((half,)), ReduceConfig(grad_stats=True))
    for place in (0, CHUNK_NUMEL - 1, CHUNK_NUMEL, 3 * CHUNK_NUMEL):
        clear(parameters)
        first = torch.full((3 * CHUNK_NUMEL + 1,), 1e-3)
        first[place] = 2e18
        step(reducer, [first, torch.full((1,), 1e-9)])
        _assert_norms(reducer, collected=True)


@pytest.mark.parametrize(
    ("wire", "views", "option"), with_hooks("plain", "overlap off", "static graph", "find unused", "skip unused")
)
def test_norms_in_every_mode(wire: Wire, views: bool, option: str) -> None:
    parameters, communicator = _zoo(), Loopback((half, half))
    reducer = _reducer(
        parameters,
        wire,
        views,
        communicator,
        config={"overlap": option != "overlap off"},
        static_graph=option == "static graph",
        find_unused_parameters=option in ("find unused", "skip unused"),
        skip_unused_buckets=option == "skip unused",
    )
    if option in HOOKS:
        reducer.register_comm_hook(None, averaging(3, communicator.total, option))
    draw = random.Random(3)
    keep: list[int] = []

    def make() -> list[torch.Tensor | None]:
        found: list[torch.Tensor | None] = [_random(parameter, "heavy tails", "fp16") for parameter in parameters]
        if "unused" in option:
            keep[:] = draw.sample(range(len(found)), 9)
            found = [one if index in keep else None for index, one in enumerate(found)]
        return found

    _train(reducer, make, collected=True, steps=4)


@grid(
    ("wire", "views", "skip", "zeroed"),
    [(*travel, skip, how) for travel in TRAVELS for skip in (False, True) for how in ("none", "in place", "kept")],
)
def test_what_a_step_leaves_as_it_is_counts_too(wire: Wire, views: bool, skip: bool, zeroed: str) -> None:
    """Parameters that no rank used keep the gradient of an earlier step, which the optimizer will take."""
    parameters = leaves((5, 70, 3, 20))
    reducer = _reducer(parameters, wire, views, find_unused_parameters=True, skip_unused_buckets=skip)
    for number in range(8):
        if zeroed == "none":
            clear(parameters)
        elif zeroed == "in place":
            reducer.zero_grad()
        gradients: list[torch.Tensor | None] = [torch.randn_like(one) for one in parameters]
        if number:
            gradients[number % 4] = gradients[(number + 1) % 4] = None
        step(reducer, gradients)
        _assert_norms(reducer, collected=True)


@pytest.mark.parametrize("views", [False, True])
def test_what_a_hook_writes_itself_counts_as_it_is(views: bool) -> None:
    parameters, communicator = [torch.zeros(5, requires_grad=True), torch.zeros(70, requires_grad=True)], Loopback()
    reducer = Reducer(parameters, communicator, ReduceConfig(grad_stats=True), gradient_as_bucket_view=views)
    reducer.register_comm_hook(None, averaging(3, communicator.total, "own"))
    reducer.leave_gradients_to_hook()
    _train(reducer, lambda: [torch.randn_like(one) for one in parameters], collected=True, steps=4)


@pytest.mark.parametrize(("wire", "views"), TRAVELS)
def test_a_gradient_that_only_other_ranks_have(wire: Wire, views: bool) -> None:
    def other(mine: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(mine) if mine.dtype is torch.int32 else torch.full_like(mine, 0.25)

    parameters = leaves((5, 70, 3, 20))
    reducer = _reducer(parameters, wire, views, Loopback((other,)), find_unused_parameters=True)
    for number in range(4):
        clear(parameters)
        gradients: list[torch.Tensor | None] = [torch.randn_like(one) for one in parameters]
        gradients[number] = None
        step(reducer, gradients)
        assert exact_norms(parameters, math.inf)[number] == 0.25
        _assert_norms(reducer, collected=True)


@pytest.mark.parametrize(("wire", "views"), TRAVELS)
def test_a_gradient_that_is_taken_away_before_it_is_reduced(wire: Wire, views: bool) -> None:
    parameters = leaves((5, 70, 3, 20))
    parameters[1].register_post_accumulate_grad_hook(lambda one: setattr(one, "grad", None))
    reducer = _reducer(parameters, wire, views, Loopback(PEERS))
    _train(reducer, lambda: [torch.randn_like(one) for one in parameters], collected=True)
    assert exact_norms(parameters, math.inf)[1] == 1.5, "the peers' alone"


@pytest.mark.parametrize(("wire", "views"), TRAVELS)
def test_accumulation_and_parameters_that_are_used_twice(wire: Wire, views: bool) -> None:
    parameters = _zoo()
    reducer = _reducer(parameters, wire, views)
    for number in range(6):
        if number != 3:
            clear(parameters)
        with reducer.no_sync():
            step(reducer, [_random(one, "heavy tails", "fp16") for one in parameters])
            assert not inside(reducer).statistics.has_by_products()
            assert_close([inside(reducer).statistics.measured_norm()], exact_norms(parameters, 2.0)[-1:])
        twice = [[_random(one, "heavy tails", "fp16") for one in parameters] for _ in range(2)]
        loss = given(parameters, twice[0]) + given(parameters, twice[1])
        reducer.prepare_for_backward(loss)
        loss.backward()
        _assert_norms(reducer, collected=True)


STRIDES: dict[str, Callable[[], torch.Tensor]] = {
    "permuted": lambda: torch.randn(6, 4).t(),
    "with gaps": lambda: torch.randn(4, 12)[:, ::2],
    "at an odd place": lambda: torch.randn(25)[1:].view(4, 6),
    "negated": lambda: torch.randn(4, 6, dtype=torch.complex64).conj().imag,
    "large, permuted": lambda: torch.randn(160, 125).t(),
    "large, with gaps": lambda: torch.randn(125, 320)[:, ::2],
}


@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize(("wire", "views"), TRAVELS)
def test_gradients_with_other_strides(wire: Wire, views: bool, strides: str) -> None:
    shape = STRIDES[strides]().shape
    parameters = [torch.zeros(5, requires_grad=True), torch.zeros(shape, requires_grad=True)]
    parameters[1].register_post_accumulate_grad_hook(lambda one: setattr(one, "grad", STRIDES[strides]()))
    communicator = Loopback((half,))
    for collected in (True, False):
        with _reducer(
            parameters,
            wire,
            views,
            communicator,
            config={"grad_stats": collected, "check_finite": "count" if collected else "off"},
        ) as reducer:
            _train(reducer, lambda: [torch.randn(5), torch.zeros(shape)], collected=collected, steps=3)
            assert not inside(reducer).statistics.finite_check().reports


@pytest.mark.parametrize(("wire", "views"), [("native", False), ("native", True), ("fp16", False)])
def test_interpreted_kernels_give_the_norms_too(monkeypatch: pytest.MonkeyPatch, wire: Wire, views: bool) -> None:
    monkeypatch.undo()
    parameters = [torch.zeros(numel, dtype=dtype) for numel in (3, 70) for dtype in (torch.float32, torch.float64)]
    parameters += [torch.zeros(5, dtype=torch.complex64), torch.zeros(6, dtype=torch.float16)]
    parameters = [one.requires_grad_() for one in parameters]
    reducer = _reducer(parameters, wire, views, config={"check_finite": "count"})
    if reducer.stats()["path"] != "interpreter":
        pytest.skip("Triton is not interpreted here")
    _train(reducer, lambda: [_random(one, "heavy tails", wire) for one in parameters], collected=True, steps=2)
    clear(parameters)
    gradients = [_random(one, "heavy tails", wire) for one in parameters]
    gradients[3][61] = math.nan
    step(reducer, list(gradients))
    (report,) = inside(reducer).statistics.finite_check().reports
    assert [(one.parameter, one.index) for one in report.culprits[:1]] == [("parameter 3", 61)]


# Plans


@pytest.mark.parametrize("policy", POLICIES)
def test_by_products_follow_the_plan(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    LEAST_PLANNED_BYTES.replace(monkeypatch, 0)
    parameters = _zoo()
    reducer = Reducer(
        parameters,
        Loopback((half,)),
        ReduceConfig(policy=policy, grad_stats=True, check_finite="count", replan_every=8),
        caps=CAPS,
    )
    _train(reducer, lambda: [_random(one, "heavy tails", "native") for one in parameters], collected=True, steps=24)


@pytest.mark.parametrize(("wire", "views"), TRAVELS)
def test_any_plan_gives_the_norms_and_one_plan_gives_the_same_bits_from_run_to_run(wire: Wire, views: bool) -> None:
    parameters = leaves((3, 400, 5, 20_000, 1, 60, 7))
    gradients = [torch.randn_like(one) for one in parameters]
    draw = random.Random(1)

    def run(plans: list[tuple[tuple[int, ...], ...]]) -> list[list[int]]:
        found = []
        with _reducer(parameters, wire, views, config={"policy": "static"}) as reducer:
            step(reducer, gradients)
            for plan in plans:
                clear(parameters)
                inside(reducer).build_buckets(plan)
                assert not inside(reducer).statistics.has_by_products()
                step(reducer, gradients)
                assert reducer.plan == plan or reducer.stats()["steps"] == 2
                _assert_norms(reducer, collected=True)
                observed = inside(reducer).statistics
                found.append(bits(torch.stack([observed.grad_norm(), *observed.grad_norms().values()])))
        return found

    plans = []
    for _ in range(6):
        order = draw.sample(range(7), 7)
        cuts = sorted(draw.sample(range(1, 7), 3))
        plans.append(tuple(tuple(order[a:b]) for a, b in zip([0, *cuts], [*cuts, 7], strict=True)))
    assert run(plans) == run(plans)


# When they are there, and what they cost


def test_by_products_are_collected_from_the_step_after_they_are_required() -> None:
    parameters = leaves((5, 70))
    reducer = Reducer(parameters, Loopback((half,)))
    observed = inside(reducer).statistics
    assert not observed.has_by_products() and float(observed.grad_norm()) == 0.0
    with counting.count_launches() as launches:
        step(reducer, [torch.randn_like(one) for one in parameters])
    assert {one.function for one in launches} == {"pack", "unpack"}
    _assert_norms(reducer, collected=False)
    observed.require()
    assert not observed.has_by_products()
    for _ in range(8):
        clear(parameters)
        step(reducer, [torch.randn_like(one) for one in parameters])
        _assert_norms(reducer, collected=True)
    before = float(observed.reduced_norm())
    observed.multiply(torch.tensor(3.0))
    assert not observed.has_by_products()
    assert float(observed.reduced_norm()) == before, "of the latest reduction, whatever has become of its gradients"
    for now in (observed.measured_norm(), observed.grad_norm()):
        assert_close([now], exact_norms(parameters, 2.0)[-1:])
    with reducer.no_sync():
        step(reducer, [torch.randn_like(one) for one in parameters])
    assert not observed.has_by_products()
    for _ in range(2):
        clear(parameters)
        step(reducer, [torch.randn_like(one) for one in parameters])
        assert observed.has_by_products()


@pytest.mark.parametrize(("wire", "views"), TRAVELS)
def test_what_is_launched_for_a_norm(wire: Wire, views: bool) -> None:
    parameters = leaves((5, 70, 3, 20))
    for stats in (False, True):
        with _reducer(parameters, wire, views, config={"grad_stats": stats}) as reducer:
            for _ in range(6):
                clear(parameters)
                with counting.count_launches() as launches:
                    step(reducer, [torch.randn_like(one) for one in parameters])
            buckets = len(reducer.plan)
            functions = [one.function for one in launches]
            assert functions.count("pack") == buckets and functions.count("unpack") == (0 if views else buckets)
            assert functions.count("measure") == (buckets if views and stats else 0)
            assert len(set(functions) - {"pack", "unpack", "measure"}) == 0
            with counting.count_launches() as launches:
                for _ in range(3):
                    inside(reducer).statistics.grad_norm()
                    inside(reducer).statistics.grad_norms(math.inf)
            functions = [one.function for one in launches]
            assert functions == (["reduce_partials"] if stats else ["measure", "reduce_partials"] * 6)


def test_a_norm_is_of_the_reduction_whatever_becomes_of_complex_gradients() -> None:
    """Their largest absolute value is no by-product: it is read before they are the user's."""
    parameters = [torch.zeros(4, dtype=torch.complex64, requires_grad=True), torch.zeros(5, requires_grad=True)]
    reducer = Reducer(parameters, Loopback((half,)), ReduceConfig(grad_stats=True))
    step(reducer, [torch.full((4,), 3.0 + 4.0j), torch.ones(5)])
    exact = exact_norms(parameters, math.inf)
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad.zero_()
    observed = inside(reducer).statistics
    assert_close([*observed.grad_norms(math.inf).values(), observed.grad_norm(math.inf)], exact)


def test_other_norms_are_refused() -> None:
    reducer = Reducer([torch.zeros(3, requires_grad=True)], Loopback())
    for norm_type in (1.0, 0.0, -math.inf, math.nan):
        observed = inside(reducer).statistics
        for norm in (observed.grad_norm, observed.grad_norms, observed.measured_norm):
            with pytest.raises(ValueError, match="norm_type must be 2 or inf"):
                norm(norm_type)


def test_found_non_finite_is_a_new_zero_or_one_for_any_parameters() -> None:
    parameters = leaves((5, 7, 3))
    reducer = Reducer(parameters, Loopback((half,)))
    inside(reducer).statistics.require()
    step(reducer, [torch.randn(5), torch.tensor([0.0, 1, 2, float("nan"), 4, 5, 6]), torch.randn(3)])
    for numbers, expected in ((None, 1), ([0, 1, 2], 1), ([1], 1), ([0, 2], 0), ([0], 0), ([2, 1], 1)):
        found = inside(reducer).statistics.found_non_finite(numbers)
        assert found.dtype is torch.float32 and found.dim() == 0 and found.item() == expected
        found += 5
        assert inside(reducer).statistics.found_non_finite(numbers).item() == expected, "torch's update() adds in place"


# Statistics


@pytest.mark.parametrize(("wire", "views"), TRAVELS)
@pytest.mark.parametrize("size", [2, 3, 8])
def test_statistics_are_plain_numbers_and_the_flushed_share_is_counted(wire: Wire, views: bool, size: int) -> None:
    parameters = _zoo()
    names = [f"layer.{index}" for index in range(len(parameters))]
    reducer = _reducer(parameters, wire, views, Loopback((half,) * (size - 1)), names=names)
    split = {2: 1, 3: 1, 8: 4}[size]
    flushed_at_all = 0
    for number in range(5):
        clear(parameters)
        kind = KINDS[number]
        gradients = [_random(one, kind, wire) for one in parameters]
        step(reducer, list(gradients))
        # The split is not for buckets with fp16 gradients.
        whole = {
            index
            for bucket in reducer.plan
            for index in bucket
            if torch.float16 in {parameters[i].dtype for i in bucket}
        }
        counts = []
        for index, one in enumerate(gradients):
            values = flat_real(one)
            divisor = size / (split if wire == "fp16" and index not in whole else 1)
            compute = values.to(torch.float64 if values.dtype is torch.float64 else torch.float32)
            sent = (compute / divisor).to(WIRE_DTYPES[wire] or values.dtype)
            narrower = sent.dtype.itemsize < values.dtype.itemsize  # of bf16 on an fp16 wire nothing is counted
            counts.append(int(((values != 0) & (sent == 0)).sum()) if narrower else 0)
        flushed_at_all += sum(counts)
        stats = inside(reducer).statistics.grad_stats()
        keys = ["grad_norm", "grad_absmax", "grad_flushed"]
        assert list(stats) == keys + [f"{key}/{name}" for key in keys for name in names]
        assert {type(value) for value in stats.values()} == {float}
        for key, norm_type in (("grad_norm", 2.0), ("grad_absmax", math.inf)):
            columns = [stats[f"{key}/{name}"] for name in names] + [stats[key]]
            assert_close(columns, exact_norms(parameters, norm_type))
        numels = [real_numel(one) for one in parameters]
        counted = [wire != "fp16" or one.dtype is not torch.bfloat16 for one in parameters]
        for name, count, numel, known in zip(names, counts, numels, counted, strict=True):
            if not known:
                assert math.isnan(stats[f"grad_flushed/{name}"])
                stats[f"grad_flushed/{name}"] = 0.0
            assert stats[f"grad_flushed/{name}"] == pytest.approx(count / max(1, numel), rel=1e-12, abs=0), (kind, name)
        share = sum(counts) / sum(numel for numel, known in zip(numels, counted, strict=True) if known)
        assert stats["grad_flushed"] == pytest.approx(share, rel=1e-12, abs=0), kind
        assert inside(reducer).statistics.grad_stats(per_parameter=False) == {key: stats[key] for key in keys}
    assert (flushed_at_all > 0) == (wire != "native")


def test_statistics_without_by_products_are_measured_now() -> None:
    parameters = _zoo()
    reducer = Reducer(parameters, Loopback((half,)))
    step(reducer, [_random(one, "wide", "native") for one in parameters])
    stats = inside(reducer).statistics.grad_stats(per_parameter=False)
    assert list(stats) == ["grad_norm", "grad_absmax"]
    assert_close(list(stats.values()), [exact_norms(parameters, 2.0)[-1], exact_norms(parameters, math.inf)[-1]])


# One pass over gradients as they are


def test_multiply_reaches_every_kind_of_gradient_in_one_launch_per_kind() -> None:
    parameters = _zoo()
    parameters.append(torch.zeros(20, 4, requires_grad=True))
    gradients = [_random(one, "heavy tails", "native") for one in parameters]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    parameters[-1].grad = sparse_like(parameters[-1], [3, 7, 3])
    gradients[-1] = parameters[-1].grad.clone()
    parameters[4].grad = None
    permuted = parameters[6].grad = gradients[6].t().contiguous().t()
    gapped = parameters[1].grad = torch.randn(5, 14)[:, ::2]
    gradients[1] = gapped.clone()
    assert permuted.stride() == (1, 8)
    table = GradientTable.of(parameters)
    with counting.count_launches() as launches:
        table.multiply(torch.tensor([0.3]))
    assert [one.function for one in launches] == ["scale"] * 2, "fp64 goes alone"
    assert parameters[4].grad is None and parameters[6].grad is permuted and parameters[1].grad is gapped
    for number, (parameter, before) in enumerate(zip(parameters, gradients, strict=True)):
        if parameter.grad is None:
            continue
        one, two = (flat_real(g.coalesce().values() if g.is_sparse else g) for g in (parameter.grad, before))
        compute = torch.float64 if two.dtype is torch.float64 else torch.float32
        factor = torch.tensor(0.3, dtype=torch.float32).to(compute)
        assert torch.equal(one, (two.to(compute) * factor).to(two.dtype)), number
    assert_close([*table.measure().parameter_sums.sqrt()], exact_norms(parameters, 2.0)[:-1])


# Ranks that do not compute alike

_of_thread = threading.local()


@pytest.fixture
def unlike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks whose sums differ in the last bits: `_of_thread.off` says by how many units."""
    original = dispatch.reduce_partials

    def reduce_partials(*arguments: Any) -> Totals:
        totals = original(*arguments)
        for sums in (totals.parameter_sums, totals.total[:1]):
            sums.copy_((sums.view(torch.int64) + _of_thread.off * (sums > 0)).view(torch.float64))
        return totals

    monkeypatch.setattr(dispatch, "reduce_partials", reduce_partials)


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("check", ["off", "count"])
def test_ranks_that_do_not_compute_alike_end_with_one_norm(unlike: None, check: Any, joined: bool) -> None:
    def case(communicator: Communicator, offs: tuple[int, int, int]) -> list[list[int]]:
        _of_thread.off = offs[communicator.rank]
        generator = torch.Generator().manual_seed(communicator.rank)
        parameters = leaves((5, 70, 3, 20))
        reducer = Reducer(parameters, communicator, ReduceConfig(grad_stats=True, check_finite=check), caps=CAPS)
        found = []
        for number in range(8):
            reducer.agree()
            inside(reducer).pretend_alike(False)
            if joined and communicator.rank == 2 and number >= 3:
                shadow_step(reducer)
                continue
            clear(parameters)
            step(reducer, [torch.randn(one.shape, generator=generator) for one in parameters])
            observed = inside(reducer).statistics
            norms = [observed.grad_norm(), *observed.grad_norms().values()]
            if not joined:
                norms.append(observed.shared_norm(observed.measured_norm()))
            assert observed.grad_stats()["grad_norm"] == float(observed.grad_norm())
            assert_close([norms[0]], exact_norms(parameters, 2.0)[-1:])
            found.append(bits(torch.stack(norms)))
            reducer.agree()
        return found

    first, second, third = ThreadWorld(3).run(lambda one: case(one, (10, 30, 20)))
    assert first == second and len(first) == 8
    assert third == first[: 3 if joined else 8]
    assert ThreadWorld(3).run(lambda one: case(one, (30, 30, 30)))[0] == first, "the largest"
    assert ThreadWorld(3).run(lambda one: case(one, (20, 20, 20)))[0] != first


def test_the_largest_norm_wins_also_where_one_is_not_a_number(unlike: None) -> None:
    def case(communicator: Communicator) -> list[float]:
        _of_thread.off = 0
        reducer = Reducer([torch.zeros(2, requires_grad=True)], communicator)
        observed = inside(reducer).statistics
        mine = torch.tensor(float(communicator.rank), dtype=torch.float64)
        assert observed.shared_norm(mine) is mine, "alike: no collective"
        assert isinstance(communicator, ThreadRank) and not communicator.calls
        inside(reducer).pretend_alike(False)
        shared = float(observed.shared_norm(mine))
        nan = observed.shared_norm(torch.tensor(math.nan if communicator.rank == 1 else math.inf, dtype=torch.float64))
        found = float(observed.on_any_rank(torch.tensor(float(communicator.rank == 1), dtype=torch.float32)))
        return [shared, float(math.isnan(nan)), found, float(mine)]

    assert ThreadWorld(3).run(case) == [[2.0, 1.0, 1.0, float(rank)] for rank in range(3)]


@pytest.mark.parametrize("change", ["multiplied", "replaced", "added to"])
def test_gradients_that_were_changed_have_no_by_products_any_more(change: str) -> None:
    """As far as anybody can tell: by their versions, their identity, and backwards."""
    parameters = leaves((5, 70))
    reducer = Reducer(parameters, Loopback((half,)))
    inside(reducer).statistics.require()
    step(reducer, [torch.randn_like(one) for one in parameters])
    assert inside(reducer).statistics.has_by_products()
    gradient = parameters[1].grad
    assert gradient is not None
    if change == "multiplied":
        gradient.mul_(2.0)
    elif change == "replaced":
        parameters[1].grad = gradient.clone()
    else:
        with reducer.no_sync():
            step(reducer, [torch.randn_like(one) for one in parameters])
        assert inside(reducer).statistics.additions > 0
    assert not inside(reducer).statistics.has_by_products()


@pytest.mark.parametrize("check", ["off", "count"])
def test_without_grad_stats_a_norm_is_of_now_whatever_else_is_collected(check: Any) -> None:
    parameters = leaves((5, 70))
    reducer = Reducer(parameters, Loopback((half,)), ReduceConfig(check_finite=check))
    step(reducer, [torch.randn_like(one) for one in parameters])
    for one in parameters:
        assert one.grad is not None
        one.grad.mul_(0.25)
    assert_close([inside(reducer).statistics.grad_norm()], exact_norms(parameters, 2.0)[-1:])


def test_a_new_gradient_in_the_place_of_an_old_one_is_another() -> None:
    """Memory, and with it an object's id, is used again at once; fresh tensors have the same versions."""
    parameter = torch.zeros(8, 8, requires_grad=True)
    reducer = Reducer([parameter], Loopback((half,)))
    inside(reducer).statistics.require()
    for _ in range(8):
        clear([parameter])
        step(reducer, [torch.randn(8, 8)])
        assert inside(reducer).statistics.has_by_products()
        parameter.grad = None
        parameter.grad = torch.empty(8, 8).fill_(3.0)
        assert not inside(reducer).statistics.has_by_products()
