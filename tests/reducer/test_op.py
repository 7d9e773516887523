"""ReduceConfig(op=...) and a step's own divisor; peers are scripted, or threads."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.grids import grid
from support.inside import inside
from support.leaf_steps import CAPS, SCALER, WIRE_DTYPES, Wire, clear, drawn, leaves, loss_scale, step
from support.loopback import Loopback, ThreadWorld, constant

from fusedreduce import ReduceConfig, Reducer
from fusedreduce.buckets.data_path import fp16_split
from fusedreduce.comm.protocol import Communicator

pytestmark = pytest.mark.usefixtures("path")

SHAPES = ((3,), (5, 7), (1,), (0,), (40,))


def _reduced(local: Sequence[torch.Tensor], divisors: Sequence[float], wire: Wire, split: float) -> torch.Tensor:
    """One rounding to the wire per rank, one of their sum (LocalGroup adds in fp32, in order of rank), and back."""
    dtype = WIRE_DTYPES[wire] or local[0].dtype
    compute = torch.float64 if local[0].dtype is torch.float64 else torch.float32
    packed = [(one.to(compute) / (by / split)).to(dtype) for one, by in zip(local, divisors, strict=True)]
    total = packed[0].to(compute)
    for one in packed[1:]:
        total = total + one.to(compute)
    return (total.to(dtype).to(compute) / split).to(local[0].dtype)


@grid(
    ("wire", "ranks", "own", "op"),
    [*itertools.product(("native", "bf16", "fp16"), (1, 2, 3, 5), (False, True), ("mean", "sum"))],
)
def test_every_rank_gets_the_sum_over_each_ranks_divisor(wire: Wire, ranks: int, own: bool, op: Any) -> None:
    divisors = [2.5 + rank if own else (float(ranks) if op == "mean" else 1.0) for rank in range(ranks)]
    split = fp16_split(ranks, op) if wire == "fp16" else 1.0

    def case(communicator: Communicator) -> list[list[torch.Tensor | None]]:
        parameters = leaves(SHAPES)
        found = []
        with Reducer(parameters, communicator, ReduceConfig(wire=wire, op=op), caps=CAPS) as reducer:
            for number in range(5):
                divisor = divisors[communicator.rank] if own else None
                step(reducer, drawn(10 * number + communicator.rank, SHAPES), divisor=divisor)
                found.append([one.grad for one in parameters])
                clear(parameters)
        return found

    for held in ThreadWorld(ranks).results(case):
        for number, gradients in enumerate(held):
            for index, gradient in enumerate(gradients):
                local = [drawn(10 * number + rank, SHAPES)[index] for rank in range(ranks)]
                expected = _reduced(local, divisors, wire, split)
                assert torch.equal(gradient, expected), (number, index)


@grid(("wire", "ranks", "op"), [*itertools.product(("native", "bf16", "fp16"), (2, 4, 8), ("mean", "sum"))])
def test_a_loss_scale_is_removed_once_and_the_split_of_an_fp16_wire_too(wire: Wire, ranks: int, op: Any) -> None:
    """8 ranks: a mean's split is 4 then, a sum's an eighth; of a scaled step one factor removes both."""
    scale, split = 2.0**10, fp16_split(ranks, op) if wire == "fp16" else 1.0
    divisors = [float(ranks) if op == "mean" else 1.0] * ranks

    def case(communicator: Communicator) -> list[torch.Tensor | None]:
        parameters = leaves(SHAPES)
        reducer = Reducer(parameters, communicator, ReduceConfig(wire=wire, op=op), caps=CAPS)
        inside(reducer).loss_scale.attach(SCALER)
        step(reducer, drawn(communicator.rank, SHAPES), scale=loss_scale(scale))
        return [one.grad for one in parameters]

    for held in ThreadWorld(ranks).results(case):
        for index, gradient in enumerate(held):
            local = [drawn(rank, SHAPES)[index] * scale for rank in range(ranks)]
            assert torch.equal(gradient, _reduced(local, divisors, wire, split) / scale), index


def test_weights_give_the_mean_over_all_samples() -> None:
    samples = [1, 5, 2]

    def case(communicator: Communicator) -> list[torch.Tensor]:
        parameters = leaves(SHAPES, torch.float64)
        reducer = Reducer(parameters, communicator, ReduceConfig())
        mean_loss = [one * 8 for one in drawn(communicator.rank, SHAPES, torch.float64)]
        step(reducer, mean_loss, divisor=sum(samples) / samples[communicator.rank])
        return [one.grad for one in parameters if one.grad is not None]

    ranks = [drawn(rank, SHAPES, torch.float64) for rank in range(3)]
    exact = [sum(n * one[i] for n, one in zip(samples, ranks, strict=True)) for i in range(len(SHAPES))]
    for held in ThreadWorld(3).run(case):
        for gradient, expected in zip(held, exact, strict=True):
            torch.testing.assert_close(gradient, expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("op", ["mean", "sum"])
@pytest.mark.parametrize("by_products", [{}, {"grad_stats": True, "check_finite": "count"}], ids=str)
def test_large_gradients_are_divided_once(op: Any, views: bool, by_products: dict[str, Any]) -> None:
    parameters, peers = leaves((5, 300_000)), Loopback([constant(0.0)])
    reducer = Reducer(parameters, peers, ReduceConfig(op=op, **by_products), gradient_as_bucket_view=views)
    for number, divisor in enumerate((None, 4.0, None, 4.0, None)):
        step(reducer, [torch.full_like(one, 3.0) for one in parameters], divisor=divisor)
        for one in parameters:
            assert one.grad is not None and one.grad.eq(3.0 / (divisor or (2.0 if op == "mean" else 1.0))).all(), number
        clear(parameters)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_fp16_gradients_of_four_ranks_average_to_what_fp16_holds(dtype: torch.dtype) -> None:
    """What they come back to has no room for more than the wire: nothing is held back for behind the sum."""
    value = 40_000.0 if dtype is torch.float16 else 32_000.0

    def case(communicator: Communicator) -> torch.Tensor | None:
        parameters = [torch.zeros(3, dtype=dtype, requires_grad=True)]
        step(Reducer(parameters, communicator, ReduceConfig(wire="fp16")), [torch.full((3,), value, dtype=dtype)])
        return parameters[0].grad

    for gradient in ThreadWorld(4).run(case):
        assert torch.equal(gradient, torch.full((3,), value, dtype=dtype))


def test_what_each_rank_can_hold_in_fp16_a_sum_of_all_can_hold_on_the_wire() -> None:
    def case(communicator: Communicator) -> torch.Tensor | None:
        parameters = [torch.zeros(3, requires_grad=True)]
        step(Reducer(parameters, communicator, ReduceConfig(op="sum", wire="fp16")), [torch.full((3,), 49152.0)])
        return parameters[0].grad

    for ranks in (2, 3):
        for gradient in ThreadWorld(ranks).run(case):
            assert torch.equal(gradient, torch.full((3,), 49152.0 * ranks))


@pytest.mark.parametrize("ranks", range(1, 70))
def test_the_split_of_a_sum_is_the_least_power_of_two_that_holds_all_ranks(ranks: int) -> None:
    split = fp16_split(ranks, "sum")
    assert math.frexp(split)[0] == 0.5 and split <= 1 / ranks < 2 * split


@pytest.mark.parametrize("divisor", [0, 0.0, -1.0, math.inf, math.nan, True, "2", 1j])
def test_a_divisor_that_is_none_is_refused_before_anything_happens(divisor: Any) -> None:
    parameters, communicator = leaves(SHAPES), Loopback()
    reducer = Reducer(parameters, communicator)
    with pytest.raises(ValueError, match="divisor must be a positive number"):
        reducer.prepare_for_backward(divisor=divisor)
    assert not communicator.calls and reducer.state.value == "idle"


@pytest.mark.parametrize(("op", "divisor"), [("mean", 1.0), ("sum", 1.0), ("sum", None)])
def test_a_kept_view_that_no_rank_uses_is_not_summed_again(op: Any, divisor: float | None) -> None:
    def case(communicator: Communicator) -> None:
        rank = communicator.rank
        parameters = leaves(SHAPES)
        reducer = Reducer(
            parameters,
            communicator,
            ReduceConfig(op=op),
            caps=CAPS,
            find_unused_parameters=True,
            gradient_as_bucket_view=True,
        )
        step(reducer, drawn(rank, SHAPES), divisor=divisor)
        kept = parameters[1].grad
        assert kept is not None
        kept.fill_(rank + 1.0)
        for number in range(3):
            for one in (*parameters[:1], *parameters[2:]):
                one.grad = None
            gradients: list[torch.Tensor | None] = [*drawn(2 * number + rank, SHAPES)]
            gradients[1] = None
            step(reducer, gradients, divisor=divisor)
            assert parameters[1].grad is kept and torch.equal(kept, torch.full_like(kept, rank + 1.0))
            expected = drawn(2 * number, SHAPES)[4] + drawn(2 * number + 1, SHAPES)[4]
            assert parameters[4].grad is not None and torch.equal(parameters[4].grad, expected)
        # Used on one rank, the other's kept gradient is part of the sum.
        gradients = [*drawn(rank, SHAPES)]
        gradients[1] = gradients[1] if rank else None
        step(reducer, gradients, divisor=divisor)
        assert torch.equal(kept, drawn(1, SHAPES)[1] + 2.0 + 1.0)
        # What the rank that did not use it has kept of that step is of no other.
        for one in parameters:
            one.grad = None
        gradients[1] = None
        step(reducer, gradients, divisor=divisor)
        assert parameters[1].grad is None

    for failure in ThreadWorld(2).run(case):
        assert failure is None, failure


def test_a_comm_hook_divides_itself() -> None:
    reducer = Reducer(leaves(SHAPES), Loopback())
    reducer.register_comm_hook(None, lambda state, bucket: torch.futures.Future())
    with pytest.raises(ValueError, match="exclude each other"):
        reducer.prepare_for_backward(divisor=2.0)
    summing = Reducer(leaves(SHAPES), Loopback(), ReduceConfig(op="sum"))
    with pytest.raises(ValueError, match="op='sum' and a comm hook exclude each other"):
        summing.register_comm_hook(None, lambda state, bucket: torch.futures.Future())


@pytest.mark.parametrize("op", ["average", None, 1, ""])
def test_another_op_is_refused_with_those_there_are(op: Any) -> None:
    with pytest.raises(ValueError, match="unknown op .* use one of 'mean', 'sum'"):
        ReduceConfig(op=op)


def test_a_sum_counts_no_ranks_that_have_joined() -> None:
    class Counted:
        waited = False

        def wait(self) -> None:
            self.waited = True

        def result(self) -> list[torch.Tensor]:
            return [torch.tensor([2.0])]

    for op, expected in (("mean", 0.5), ("sum", 1.0)):
        parameters, work = [torch.zeros(2, requires_grad=True)], Counted()
        reducer = Reducer(parameters, Loopback([constant(0.0)] * 2), ReduceConfig(op=op))  # type: ignore[arg-type]
        inside(reducer).divide_by_ranks_counted(work)
        step(reducer, [torch.ones(2)])
        assert work.waited and torch.equal(parameters[0].grad, torch.full((2,), expected))  # type: ignore[arg-type]
