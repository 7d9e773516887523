"""Parameters, optimizer states and buffers become the same on all ranks, and how far they were apart is told."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.inside import RESYNC_PIECE_NUMEL
from torch import nn
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer

from fusedreduce.comm.local.group import LocalGroup
from fusedreduce.comm.protocol import Communicator
from fusedreduce.errors import AgreementError, CollectiveError
from fusedreduce.reducer.modes.average_parameters import Drift, equalize

Make = Callable[[Sequence[torch.Tensor]], Optimizer]
MAKERS: dict[str, Make] = {
    "sgd": lambda parameters: SGD(parameters, lr=0.1),
    "momentum": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: Adam(parameters, lr=0.1, amsgrad=True),
    "adamw foreach": lambda parameters: AdamW(parameters, lr=0.1, foreach=True),
    "adamw fused": lambda parameters: AdamW(parameters, lr=0.1, fused=True),
    "nadam": lambda parameters: NAdam(parameters, lr=0.1),
}


def leaves(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    made = [torch.zeros(3, 4, dtype=dtype), torch.zeros(5, 2, dtype=dtype).t(), torch.zeros((), dtype=dtype)]
    return [one.requires_grad_() for one in made]


def fill(parameters: Sequence[torch.Tensor], generator: torch.Generator, scale: float = 1.0) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))


def stepped(rank: int, make: Make, parameters: Sequence[torch.Tensor], steps: int) -> Optimizer:
    optimizer = make(parameters)
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()
    return optimizer


def run(world: int, case: Callable[[Communicator], Any]) -> list[Any]:
    with LocalGroup(world, timeout_s=10.0) as group:
        return group.run(case)


def names(count: int) -> list[str]:
    return [f"weight{number}" for number in range(count)]


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype is other.dtype and torch.equal(
        one.detach().contiguous().reshape(-1).view(torch.uint8),
        other.detach().contiguous().reshape(-1).view(torch.uint8),
    )


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
@pytest.mark.parametrize("world", [2, 3])
def test_states_are_averaged_counts_become_the_largest_and_bytes_are_the_same(make: Make, world: int) -> None:
    def case(communicator: Communicator) -> tuple[list[torch.Tensor], list[dict[str, Any]], list[dict[str, Any]]]:
        parameters = leaves()
        fill(parameters, torch.Generator().manual_seed(7))
        optimizer = stepped(communicator.rank, make, parameters, 2 + communicator.rank)
        before = [copy.deepcopy(dict(optimizer.state[one])) for one in parameters]
        own = [one.detach().clone() for one in parameters]
        equalize(parameters, names(3), [optimizer], [], communicator)
        after = [dict(optimizer.state[one]) for one in parameters]
        return [*own, *(one.detach() for one in parameters)], before, after

    found = run(world, case)
    everything = [tensors for tensors, _, _ in found]
    for number in range(3):
        mean = sum(one[number].double() for one in everything) / world
        for one in everything:
            assert torch.allclose(one[3 + number].double(), mean, rtol=0, atol=4e-7)
            assert same_bytes(one[3 + number], everything[0][3 + number])
        for key in found[0][2][number]:
            ends = [after[number][key] for _, _, after in found]
            starts = [before[number][key] for _, before, _ in found]
            if ends[0].dim() == 0 and (key in ("step", "mu_product")):
                assert float(ends[0]) == max(map(float, starts)), key
            elif ends[0].dim():
                wanted = sum(one.double() for one in starts) / world
                assert torch.allclose(ends[0].double(), wanted, rtol=0, atol=4e-7)
            assert all(same_bytes(one, ends[0]) for one in ends)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 4),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.complex64]),
    st.integers(0, 99),
    st.sampled_from([1, 3, 1 << 22]),
)
def test_the_mean_is_rounded_once_and_drift_is_that_of_another_computation(
    world: int, dtype: torch.dtype, seed: int, most: int
) -> None:
    real = dtype.to_real() if dtype.is_complex else dtype
    with pytest.MonkeyPatch.context() as patch:
        RESYNC_PIECE_NUMEL.replace(patch, most)

        def case(communicator: Communicator) -> tuple[list[torch.Tensor], list[torch.Tensor], Drift]:
            generator = torch.Generator().manual_seed(1000 * seed + communicator.rank)
            parameters = leaves(dtype)
            fill(parameters, generator)
            own = [one.detach().clone() for one in parameters]
            drift = equalize(parameters, names(3), [], [], communicator)
            return own, [one.detach() for one in parameters], drift

        found = run(world, case)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    largest, relative = 0.0, 0.0
    means = [sum(own[number].to(wide) for own, _, _ in found) / world for number in range(3)]
    for own, after, _ in found:
        apart = [torch.view_as_real(a - m) if dtype.is_complex else a - m for a, m in zip(own, means, strict=True)]
        largest = max([largest, *(float(one.abs().max()) for one in apart)])
        squares = sum(float(one.square().sum()) for one in apart)
        relative = max(relative, (squares / sum(float(one.abs().square().sum()) for one in means)) ** 0.5)
        unit = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8, torch.float64: 2.0**-50}[real]
        for got, mean in zip(after, means, strict=True):
            assert torch.all((got.to(wide) - mean).abs() <= unit * mean.abs().clamp(min=1.0))
        assert all(map(same_bytes, after, found[0][1]))
    for _, _, drift in found:
        assert drift == found[0][2]
        assert drift.largest == pytest.approx(largest, rel=1e-5, abs=1e-6)
        assert drift.relative == pytest.approx(relative, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("world", [2, 3])
def test_what_is_equal_stays_to_the_last_bit(world: int) -> None:
    special = torch.tensor([0.1, -0.0, 0.0, 1e-41, 3.4e38, float("inf"), -float("inf"), 1 / 3])

    def case(communicator: Communicator) -> tuple[torch.Tensor, Drift]:
        parameter = special.clone().requires_grad_()
        drift = equalize([parameter], ["w"], [], [], communicator)
        return parameter.detach(), drift

    for after, drift in run(world, case):
        assert same_bytes(after, special)
        assert drift.largest == 0.0


def test_a_number_that_is_not_finite_stays_one() -> None:
    def case(communicator: Communicator) -> torch.Tensor:
        parameter = torch.ones(3).requires_grad_()
        with torch.no_grad():
            parameter[communicator.rank] = (float("nan"), float("inf"))[communicator.rank]
        equalize([parameter], ["w"], [], [], communicator)
        return parameter.detach()

    for after in run(2, case):
        assert not after[:2].isfinite().any() and after[2] == 1.0


def test_buffers_become_rank_0s_whatever_their_dtype() -> None:
    def buffers(rank: int) -> list[torch.Tensor]:
        return [
            torch.full((3,), 1.5 + rank),
            torch.tensor(7 + rank),
            torch.tensor([True, rank == 0]),
            torch.full((2, 3), rank, dtype=torch.bfloat16).t(),
            torch.zeros(0),
            torch.full((2,), rank + 1.0).to(torch.float8_e4m3fn),
        ]

    def case(communicator: Communicator) -> list[torch.Tensor]:
        parameter = torch.ones(1).requires_grad_()
        mine = buffers(communicator.rank)
        equalize([parameter], ["w"], [], mine, communicator)
        return mine

    for mine in run(3, case):
        for got, wanted in zip(mine, buffers(0), strict=True):
            assert got.shape == wanted.shape and same_bytes(got, wanted)


def test_parameters_of_several_optimizers_and_plain_numbers() -> None:
    class Counting(SGD):
        """Keeps numbers that are no tensors, and counts per row."""

        def __init__(self, parameters: Sequence[torch.Tensor], rank: int) -> None:
            super().__init__(parameters, lr=0.1)
            for parameter in parameters:
                self.state[parameter] = {
                    "calls": 2**53 + rank,
                    "rate": 0.1 * (1 + rank),
                    "rows": torch.tensor([rank, 2 - rank]),
                    "nothing": None,
                }

    def case(communicator: Communicator) -> tuple[dict[str, Any], list[torch.Tensor]]:
        one, two = nn.Linear(2, 2), nn.Linear(2, 1)
        parameters = [*one.parameters(), *two.parameters()]
        fill(parameters, torch.Generator().manual_seed(3))
        adam = stepped(communicator.rank, MAKERS["adam"], list(one.parameters()), 1 + communicator.rank)
        counting = Counting(list(two.parameters()), communicator.rank)
        equalize(parameters, names(4), [adam, counting], [], communicator)
        tensors = [value for held in adam.state.values() for value in held.values()]
        return counting.state[two.weight], tensors

    found = run(2, case)
    for state, tensors in found:
        assert (state["calls"], state["rate"], state["nothing"]) == (2**53 + 1, 0.2, None)
        assert type(state["calls"]) is int and state["rows"].tolist() == [1, 2]
        assert all(map(same_bytes, tensors, found[0][1]))


def test_states_of_parameters_that_nobody_reduces_stay_as_they_are() -> None:
    def case(communicator: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        own, shared = torch.zeros(2).requires_grad_(), torch.zeros(2).requires_grad_()
        optimizer = stepped(communicator.rank, MAKERS["momentum"], [own, shared], 1)
        before = optimizer.state[own]["momentum_buffer"].clone()
        equalize([shared], ["shared"], [optimizer], [], communicator)
        return before, optimizer.state[own]["momentum_buffer"]

    assert all(torch.equal(*one) for one in run(2, case))


def raised(world: int, case: Callable[[Communicator], Any]) -> list[str]:
    """The text of the AgreementError on each rank, none of which has changed its parameters."""

    def guarded(communicator: Communicator) -> str:
        with pytest.raises(AgreementError) as caught:
            case(communicator)
        return str(caught.value)

    return run(world, guarded)


def test_an_optimizer_that_has_not_stepped_on_every_rank_is_the_same_error_on_all() -> None:
    after: dict[int, list[torch.Tensor]] = {}

    def case(communicator: Communicator) -> None:
        parameters = leaves()
        fill(parameters, torch.Generator().manual_seed(communicator.rank))
        optimizer = stepped(communicator.rank, MAKERS["momentum"], parameters, int(communicator.rank != 1))
        before = [one.detach().clone() for one in parameters]
        try:
            equalize(parameters, names(3), [optimizer], [], communicator)
        finally:
            after[communicator.rank] = [a - b for a, b in zip(parameters, before, strict=True)]

    texts = raised(3, case)
    assert len(set(texts)) == 1
    assert "momentum_buffer of weight0 in optimizer 0 (SGD)" in texts[0] and "[3, 0, 3]" in texts[0]
    assert "rank 1: nothing more" in texts[0]
    assert all(not float(one.detach().abs().sum()) for tensors in after.values() for one in tensors)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda state: state.update(extra=torch.zeros(3)), "extra of weight1"),
        (lambda state: state.pop("exp_avg_sq"), "exp_avg_sq of weight1"),
        (lambda state: state.update(exp_avg=torch.zeros(7)), r"exp_avg of weight1.*\(7,\)"),
        (lambda state: state.update(exp_avg=torch.zeros(5, 2).t().double()), "exp_avg of weight1.*float64"),
        (lambda state: state.update(exp_avg=[1, 2]), "exp_avg of weight1.* is list, which has no mean"),
        (lambda state: state.update(exp_avg=torch.zeros(4, dtype=torch.uint8)), "uint8.*, which has no mean"),
        (lambda state: state.update(exp_avg=torch.zeros(4).to_sparse()), "which has no mean"),
    ],
)
def test_states_of_another_kind_on_one_rank_are_the_same_error_on_all(
    spoil: Callable[[dict[str, Any]], object], text: str
) -> None:
    def case(communicator: Communicator) -> None:
        parameters = leaves()
        optimizer = stepped(communicator.rank, MAKERS["adamw foreach"], parameters, 1)
        if communicator.rank == 1:
            spoil(optimizer.state[parameters[1]])
        equalize(parameters, names(3), [optimizer], [], communicator)

    texts = raised(2, case)
    assert len(set(texts)) == 1
    with pytest.raises(AgreementError, match=text):
        raise AgreementError(texts[0])


def test_a_rank_that_leaves_is_a_named_error() -> None:
    def case(communicator: Communicator) -> str:
        parameter = torch.ones(2).requires_grad_()
        if communicator.rank == 1:
            return ""
        with pytest.raises(CollectiveError) as caught:
            equalize([parameter], ["w"], [], [], communicator)
        return str(caught.value)

    with LocalGroup(2, timeout_s=0.2) as group:  # nobody comes to any of its collectives
        assert "rank 0" in group.run(case)[0]
