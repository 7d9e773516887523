"""all_reduce with a gradient: against one process that has all ranks' losses, over threads and over Gloo."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import RankPool
from support.timeouts import PATIENT_S

import fusedreduce
from fusedreduce.comm.protocol import Communicator

OPS = ("sum", "mean")


def factor(rank: int) -> torch.Tensor:
    return torch.arange(1.0, 7.0, dtype=torch.float64).view(2, 3) * (rank + 1) - 2.0


def drawn(rank: int) -> torch.Tensor:
    return torch.randn(3, 2, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).t()


def loss_of(reduced: torch.Tensor, rank: int) -> torch.Tensor:
    return (factor(rank) * reduced**3).sum()


def on_a_rank(communicator: Communicator, op: Any) -> list[torch.Tensor]:
    """Value, gradient, and the gradient of the gradient's squares."""
    rank = communicator.rank
    tensor = drawn(rank).requires_grad_()
    given = tensor.detach().clone()
    reduced = fusedreduce.all_reduce(tensor, communicator, op)
    assert reduced.is_contiguous() and torch.equal(tensor.detach(), given)
    (gradient,) = torch.autograd.grad(loss_of(reduced, rank), tensor, create_graph=True)
    (second,) = torch.autograd.grad(gradient.square().sum(), tensor)
    return [reduced.detach(), gradient.detach(), second]


def in_one_process(size: int, op: str) -> list[list[torch.Tensor]]:
    leaves = [drawn(rank).requires_grad_() for rank in range(size)]
    reduced = torch.stack(leaves).sum(0) / (size if op == "mean" else 1)
    gradients = torch.autograd.grad(sum(loss_of(reduced, rank) for rank in range(size)), leaves, create_graph=True)  # type: ignore[arg-type]
    seconds = torch.autograd.grad(sum(one.square().sum() for one in gradients), leaves)  # type: ignore[arg-type]
    return [[reduced.detach(), one.detach(), second] for one, second in zip(gradients, seconds, strict=True)]


def assert_close(ours: list[list[torch.Tensor]], op: str) -> None:
    for mine, wanted in zip(ours, in_one_process(len(ours), op), strict=True):
        for one, other in zip(mine, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_threads(size: int, op: str) -> None:
    assert_close(
        fusedreduce.LocalGroup(size, timeout_s=PATIENT_S).run(lambda communicator: on_a_rank(communicator, op)), op
    )


@pytest.mark.parametrize("op", OPS)
def test_processes(two: RankPool, three: RankPool, op: str) -> None:
    for ranks in (two, three):
        assert_close(ranks.run(over_gloo, op), op)


def over_gloo(rank: int, world: int, op: str) -> list[torch.Tensor]:
    ours = on_a_rank(fusedreduce.ProcessGroupCommunicator(), op)
    # torch's own, as long as there is one: two roundings of its mean are elsewhere.
    from torch.distributed.nn import functional

    tensor = drawn(rank).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        reduced = functional.all_reduce(tensor, op=dist.ReduceOp.AVG if op == "mean" else dist.ReduceOp.SUM)
        loss_of(reduced, rank).backward()
    assert tensor.grad is not None
    torch.testing.assert_close(reduced.detach(), ours[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(tensor.grad, ours[1], rtol=1e-12, atol=1e-12)
    return ours


def test_a_mean_in_16_bits_stays_in_range() -> None:
    def case(communicator: Communicator) -> float:
        value = torch.tensor(40000.0, dtype=torch.float16)
        return fusedreduce.all_reduce(value, communicator, "mean").item()

    assert fusedreduce.LocalGroup(4, timeout_s=PATIENT_S).run(case) == [40000.0] * 4


def test_what_cannot_be_reduced_is_refused() -> None:
    def case(communicator: Communicator) -> None:
        wrong: Any = "max"
        with pytest.raises(ValueError, match="op must be 'sum' or 'mean', got 'max'"):
            fusedreduce.all_reduce(torch.ones(1), communicator, wrong)
        with pytest.raises(fusedreduce.UnsupportedWireError, match="int64"):
            fusedreduce.all_reduce(torch.ones(1, dtype=torch.int64), communicator)
        with pytest.raises(fusedreduce.CollectiveError, match="ranks issued different collectives"):
            fusedreduce.all_reduce(torch.ones(1 + communicator.rank), communicator)

    fusedreduce.LocalGroup(2, timeout_s=PATIENT_S).run(case)
    with fusedreduce.LocalGroup(2, one_thread=True) as group:
        communicator = group.communicator(0)
        with pytest.raises(ValueError, match="a backward on cpu cannot wait for the other ranks"):
            fusedreduce.all_reduce(torch.ones(1, requires_grad=True), communicator)
        with torch.no_grad(), pytest.raises(fusedreduce.CollectiveError, match="cannot arrive"):
            fusedreduce.all_reduce(torch.ones(1, requires_grad=True), communicator)


def test_a_rank_that_does_not_run_its_backward_is_named() -> None:
    group = fusedreduce.LocalGroup(2, timeout_s=PATIENT_S)

    def case(communicator: Communicator) -> str:
        tensor = torch.ones(2, requires_grad=True)
        reduced = fusedreduce.all_reduce(tensor, communicator)
        if communicator.rank == 1:
            return ""
        group.timeout_s = 0.3  # nobody comes to what follows
        with pytest.raises(fusedreduce.CollectiveError, match="rank 1 did not issue it within 0.3 s") as found:
            reduced.sum().backward()
        return str(found.value)

    said, _ = group.run(case)
    assert said.startswith("rank 0: a differentiable all-reduce failed after")
