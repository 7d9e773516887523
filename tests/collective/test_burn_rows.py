"""What burn and cubecl test of their reductions (rows 0.50 to 0.52), with several devices and to the last bit."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Literal

import pytest
import torch
from support import sweep
from support.on_device import torch_path as torch_path

from fusedreduce import LocalGroup, SyncServer
from fusedreduce.comm.protocol import Communicator
from fusedreduce.parallel.sync_device import SyncDevice

DEVICES = 3
ITERATIONS = 100 if sweep.full else 20
SIZE = 6
Model = Callable[[torch.Tensor, Sequence[torch.Tensor]], torch.Tensor]


def matmul(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    return x @ weights[0] @ weights[1]


def residual(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    hidden = x @ weights[0]
    return hidden + hidden @ weights[1]


def residual_relu(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    hidden = torch.relu(x @ weights[0])
    return hidden + torch.relu(hidden @ weights[1])


def diamond(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """One weight on both ways, which meet again."""
    hidden = x @ weights[0]
    return (hidden @ weights[1]) * torch.relu(hidden @ weights[1].t())


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("model", [matmul, residual, residual_relu, diamond], ids=lambda model: model.__name__)
def test_row_0_50_synced_gradients_are_the_local_ones_reduced(op: Literal["sum", "mean"], model: Model) -> None:
    """A thread per device. What each computes by itself comes from the same graph, without hooks."""
    torch.manual_seed(0)
    start = [torch.randn(SIZE, SIZE) for _ in range(2)]
    weights = [[one.clone().requires_grad_() for one in start] for _ in range(DEVICES)]
    local: list[Sequence[torch.Tensor]] = [()] * DEVICES
    meet = threading.Barrier(DEVICES)
    divisor = DEVICES if op == "mean" else 1

    def case(device: SyncDevice) -> None:
        mine = weights[device.rank]
        inputs = torch.Generator().manual_seed(device.rank)
        optimizer = torch.optim.SGD(mine, lr=1e-4)
        for _ in range(ITERATIONS):
            optimizer.zero_grad()
            loss = model(torch.randn(4, SIZE, generator=inputs), mine).square().mean()
            local[device.rank] = torch.autograd.grad(loss, mine, retain_graph=True)
            device.backward(loss)
            meet.wait(20)
            for index, weight in enumerate(mine):
                expected = functools.reduce(torch.add, [one[index] / divisor for one in local])
                assert weight.grad is not None and torch.equal(weight.grad, expected)
            meet.wait(20)
            optimizer.step()

    with SyncServer(DEVICES, op=op, timeout_s=20) as server:
        for rank in range(DEVICES):
            server.device(rank, [(str(index), one) for index, one in enumerate(weights[rank])])
        server.run(case)
    assert all(torch.equal(mine[0], weights[0][0]) and not torch.equal(mine[0], start[0]) for mine in weights)


def _random(rank: int) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(rank)
    return [torch.rand(20, 20, generator=source) * 10 for _ in range(ITERATIONS)]


@pytest.mark.parametrize("one_thread", [True, False])
def test_rows_0_51_and_0_52_all_reduces_of_buffers_that_are_waited_for_in_the_end(one_thread: bool) -> None:
    """From one thread, and from one for each device; eight at a time, the last one waited for first."""
    given = [_random(rank) for rank in range(DEVICES)]

    def case(ranks: Sequence[Communicator]) -> None:
        tensors = [_random(one.rank) for one in ranks]
        for begin in range(0, ITERATIONS, 8):
            buffers = range(begin, min(begin + 8, ITERATIONS))
            pending = [
                one.all_reduce(mine[index]) for index in buffers for one, mine in zip(ranks, tensors, strict=True)
            ]
            for flight in reversed(pending):
                flight.wait()
        for mine in tensors:
            for index, tensor in enumerate(mine):
                assert torch.equal(tensor, functools.reduce(torch.add, [values[index] for values in given]))

    with LocalGroup(DEVICES, timeout_s=20, one_thread=one_thread) as group:
        if one_thread:
            case(group.communicators())
        else:
            group.run(lambda one: case([one]))
