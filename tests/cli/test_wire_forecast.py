"""The forecast of a wire counts the bytes, and takes the buckets, that a reducer on that wire really has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from support.ranks import RankPool
from support.traces import COSTS
from torch import nn

import fusedreduce
from fusedreduce import ReduceConfig, reducer_of
from fusedreduce.cli import wire_forecast
from fusedreduce.cli.wire_forecast import Gradient
from fusedreduce.config import Wire
from fusedreduce.planning.bucketing import BucketCaps
from fusedreduce.planning.plan import Plan
from fusedreduce.planning.timeline import MISSING_NS
from fusedreduce.trace.problem import on_wire, problem, ready_times_ns
from fusedreduce.trace.reader import read
from fusedreduce.wires import WIRES

CAP_MB = 0.1  # MiB: several buckets


def model() -> nn.Module:
    """Blocks that are filled up, biases and a matrix too small to encode, a convolution, odd sizes."""
    return nn.Sequential(
        nn.Conv2d(1, 37, 3, bias=False),
        nn.Flatten(),
        nn.Linear(37 * 36, 33),
        nn.LayerNorm(33),
        nn.Linear(33, 5, bias=False),
        nn.Linear(5, 301),
        nn.Linear(301, 130),
    )


def trained(rank: int, world: int, folder: str, wire: Wire) -> tuple[int, Plan]:
    """What is sent in a step, and the buckets; some steps are recorded."""
    options: dict[str, Any] = {} if wire in ("int8", "int4") else {"bucket_cap_mb": CAP_MB}
    ddp = fusedreduce.DistributedDataParallel(model(), reduce=ReduceConfig(wire=wire), **options)
    generator = torch.Generator().manual_seed(rank)

    def step() -> None:
        ddp(torch.randn(4, 1, 8, 8, generator=generator)).square().mean().backward()

    for _ in range(3):
        step()
    with ddp.record_trace(str(Path(folder, wire))):
        for _ in range(2):
            step()
    reducer = reducer_of(ddp)
    return int(reducer.stats()["wire_bytes"]), reducer.plan


def check(ranks: RankPool, folder: Path) -> None:
    found = {wire: ranks.run(trained, str(folder), wire)[0] for wire in WIRES}
    native = read(folder / "native")
    sizes = [(one.numel(), one.ndim) for one in model().parameters()]
    ready = ready_times_ns(native[0])
    assert MISSING_NS not in ready
    unrecorded = [
        wire_forecast.as_trace(
            [Gradient(*size, ready_ns) for size, ready_ns in zip(sizes, ready, strict=True)],
            ranks=ranks.world,
            device="cpu",
        )
    ]
    for wire, (sent_bytes, plan) in found.items():
        for traces in (native, read(folder / wire), unrecorded):
            on = [on_wire(trace, wire) for trace in traces]
            assert sum(wire_forecast.padded(plan, on[0], problem(on, COSTS)).wire_bytes) == sent_bytes, wire
        if wire_forecast.two_phases(on[0]):  # no plan follows measured times: the forecast has the very buckets
            forecast = wire_forecast.on_wire(native, wire, COSTS, BucketCaps())
            assert {frozenset(members) for members in forecast.plan} == {frozenset(members) for members in plan}
            assert forecast.sent_bytes == sent_bytes
    assert found["native"][0] > found["bf16"][0] > found["int8"][0] > found["int4"][0]


def test_bytes_are_those_of_two_ranks(two: RankPool, tmp_path: Path) -> None:
    check(two, tmp_path)


def test_bytes_are_those_of_three_ranks_that_exchange_shards(three: RankPool, tmp_path: Path) -> None:
    check(three, tmp_path)
