"""Reducer on a LocalGroup: a small model trained for 100 steps by thread peers, against plain means of gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.inside import inside

from fusedreduce.comm.local.group import LocalGroup
from fusedreduce.comm.local.strategies import Centralized, Ring, Strategy, Tree
from fusedreduce.comm.protocol import Communicator
from fusedreduce.config import Policy, ReduceConfig, Wire
from fusedreduce.planning.bucketing import BucketCaps
from fusedreduce.reducer.reducer import Reducer

PEERS = 4
STEPS = 100
CAPS = BucketCaps(first_bytes=128, cap_bytes=600)
WIRES: dict[Wire, torch.dtype] = {"native": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture(autouse=True)
def _compiled_kernels_or_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers are threads, and Triton's interpreter runs one kernel at a time: 100 steps would take a minute."""
    monkeypatch.setattr("fusedreduce.kernels.variants.interpreted", lambda: False)


class Model(torch.nn.Module):
    """Two layers, and one that only some ranks use in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 20), torch.nn.Linear(20, 5)
        self.sometimes = torch.nn.Linear(20, 5)
        generator = torch.Generator().manual_seed(0)  # peers share the global one, and draw from it at the same time
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) / 4

    def forward(self, batch: torch.Tensor, also: bool) -> torch.Tensor:
        hidden = self.first(batch).relu()
        result: torch.Tensor = self.second(hidden)
        return result + self.sometimes(hidden) if also else result


def batch_of(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1000 * rank + step))


def also_used(rank: int, step: int, unused: bool) -> bool:
    return not unused or (rank + step) % 3 == 0 or step % 7 == 0


def summed(contributions: list[torch.Tensor], strategy: Strategy) -> torch.Tensor:
    """In fp32, in the order of the strategy, rounded once."""
    flat = [one.float() for one in contributions]
    if isinstance(strategy, Centralized):
        return (((flat[0] + flat[1]) + flat[2]) + flat[3]).to(contributions[0].dtype)
    (part,) = strategy.parts(PEERS, 1)
    for into, source in part.adds:
        flat[into] = flat[into] + flat[source]
    return flat[part.owner].to(contributions[0].dtype)


def plain(wire: torch.dtype, strategy: Strategy, unused: bool) -> list[torch.Tensor]:
    """The parameters after STEPS, each gradient's mean made by hand."""
    model = Model()
    split = 2.0 if wire is torch.float16 else 1.0  # an fp16 wire takes half of the divisor off before it, half after
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        found = []
        for rank in range(PEERS):
            model.zero_grad()
            model(batch_of(rank, step), also_used(rank, step, unused)).square().mean().backward()
            found.append([None if one.grad is None else one.grad for one in model.parameters()])
        for index, parameter in enumerate(model.parameters()):
            ranks = [gradients[index] for gradients in found]
            if all(one is None for one in ranks):
                parameter.grad = None
                continue
            packed = [
                (torch.zeros_like(parameter) if one is None else one).div(PEERS / split).to(wire) for one in ranks
            ]
            parameter.grad = summed(packed, strategy).float() / split
        optimizer.step()
    return [one.detach().clone() for one in model.parameters()]


# Every wire, policy and order once; what is observed goes with "ready".
@pytest.mark.parametrize(
    ("policy", "wire", "strategy"),
    [
        ("static", "native", Centralized()),
        ("ready", "bf16", Centralized()),
        ("planned", "fp16", Centralized()),
        ("ready", "native", Tree(2)),
    ],
)
def test_peers_train_like_plain_means(policy: Policy, wire: Wire, strategy: Strategy) -> None:
    unused, observing = policy != "static", policy == "ready"
    options: dict[str, Any] = {"check_finite": "count", "grad_stats": True} if observing else {}

    def case(communicator: Communicator) -> list[torch.Tensor]:
        model = Model()
        config = ReduceConfig(wire=wire, policy=policy, **options)
        reducer = Reducer(model.parameters(), communicator, config, caps=CAPS, find_unused_parameters=unused)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for step in range(STEPS):
            optimizer.zero_grad()
            reducer.prepare_for_forward()
            output = model(batch_of(communicator.rank, step), also_used(communicator.rank, step, unused))
            reducer.prepare_for_backward(output)
            output.square().mean().backward()
            reducer.finalize()
            if observing and step % 10 == 0:
                total = torch.stack([one.grad.double().norm() for one in model.parameters() if one.grad is not None])
                torch.testing.assert_close(inside(reducer).statistics.grad_norm().double(), total.norm())
            optimizer.step()
        assert len(reducer.plan) >= (1 if policy == "planned" else 2)
        reducer.close()
        return [one.detach().clone() for one in model.parameters()]

    group = LocalGroup(PEERS, strategy=strategy, timeout_s=20)
    results = group.run(case)
    wanted = plain(WIRES[wire], strategy, unused)
    for rank in range(PEERS):
        for ours, theirs in zip(results[rank], wanted, strict=True):
            assert torch.equal(ours, theirs), (rank, (ours - theirs).abs().max())


def test_a_ring_too_gives_every_peer_the_same_bytes() -> None:
    def case(communicator: Communicator) -> list[torch.Tensor]:
        model = Model()
        reducer = Reducer(model.parameters(), communicator, ReduceConfig(wire="bf16"), caps=CAPS)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(STEPS):
            optimizer.zero_grad()
            reducer.prepare_for_backward(output := model(batch_of(communicator.rank, step), True))
            output.square().mean().backward()
            optimizer.step()
        reducer.close()
        return [one.detach().clone() for one in model.parameters()]

    first, *others = LocalGroup(PEERS, strategy=Ring(), timeout_s=20).run(case)
    for other in others:
        assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))


def test_a_peer_that_dies_in_the_middle_is_named_and_the_group_can_be_used_again() -> None:
    def case(communicator: Communicator, dies: bool) -> int:
        model = Model()
        reducer = Reducer(model.parameters(), communicator, caps=CAPS)
        for step in range(10):
            reducer.prepare_for_backward(output := model(batch_of(communicator.rank, step), True))
            output.square().mean().backward()
            if dies and communicator.rank == 2 and step == 5:
                raise KeyError("disk full")
            model.zero_grad()
        reducer.close()
        return reducer.steps

    group = LocalGroup(PEERS, timeout_s=20)
    with pytest.raises(KeyError, match="disk full"):
        group.run(lambda communicator: case(communicator, True))
    assert group.run(lambda communicator: case(communicator, False)) == [10] * PEERS
