"""How many Python functions a bucket calls on the CUDA path, which decides how long the host takes for one.

As a script, without TRITON_INTERPRET, this file takes steps on stand-ins for streams and for Triton's driver, on CPU
tensors that the reducer takes for CUDA ones: it goes all the way to the launch, which does nothing.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import json
import sys
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.cuda.fake_driver import run_compiled
from support.cuda.launched import as_on_sm_90
from support.inside import STREAMS_OF_BUCKETS
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import fusedreduce
from fusedreduce.buckets import bucket, streams
from fusedreduce.kernels import current_stream, dispatch

PARAMETERS, FEW, MANY = 128, 4, 64
CUDA = torch.device("cuda", 0)
MOST_CALLS = 120
OPTIONS: list[dict[str, Any]] = [{"wire": "bf16"}, {"wire": "bf16", "grad_stats": True}, {"wire": "int8"}]


class _Nothing:
    """A stand-in for streams, events and contexts, each of whose methods does nothing."""

    cuda_stream = 1
    device = CUDA

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, other: object) -> None:
        pass

    wait_event = wait_stream

    def record(self, stream: object = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def _as_on_cuda() -> None:
    as_on_sm_90().launcher_cls = lambda source, metadata: lambda *_: None  # type: ignore[method-assign]
    current: Any = _Nothing()
    for name in ("Stream", "Event", "stream", "device"):
        setattr(torch.cuda, name, _Nothing)
    torch.cuda.current_stream = lambda device=None: current
    current_stream.raw_stream = None
    torch.cuda.is_current_stream_capturing = lambda: False
    dispatch.path_for = lambda device, written: "triton"
    STREAMS_OF_BUCKETS.replace(pytest.MonkeyPatch(), lambda buckets, _: streams.Streams(buckets))
    make = bucket.Bucket.__init__

    def made(self: Any, *given: Any, **options: Any) -> None:
        make(self, *given, **options)
        self.on_cuda = True

    bucket.Bucket.__init__ = made  # type: ignore[method-assign]


def calls_of_a_step(buckets: int, options: dict[str, Any]) -> collections.Counter[str]:
    """Python functions that a step calls, of a model whose gradients go into so many buckets."""
    model = nn.ModuleList([nn.Linear(32, 16, bias=False) for _ in range(PARAMETERS)])
    megabytes = PARAMETERS // buckets * 32 * 16 * 4 / 2**20
    config = fusedreduce.ReduceConfig(policy="static", **options)
    wrapper = fusedreduce.DistributedDataParallel(_Summed(model), bucket_cap_mb=megabytes, reduce=config)
    counts: collections.Counter[str] = collections.Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            counts[frame.f_code.co_qualname] += 1

    for _ in range(4):
        counts.clear()
        wrapper.zero_grad()
        gc.collect()
        sys.setprofile(count)
        wrapper(torch.ones(1, 32, device="cpu")).backward()
        sys.setprofile(None)
    assert wrapper.reduce_stats()["buckets"] == buckets
    return counts


class _Summed(nn.Module):
    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(batch).sum() for layer in self.layers]).sum()


def main() -> None:
    _as_on_cuda()
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    found = []
    for options in OPTIONS:
        few, many = (calls_of_a_step(buckets, options) for buckets in (FEW, MANY))
        many.subtract(few)
        found.append({name: number / (MANY - FEW) for name, number in many.items() if number})
    json.dump(found, sys.stdout)
    sys.stdout.flush()
    with contextlib.suppress(ValueError):
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def calls() -> list[dict[str, float]]:
    """Of a bucket with each of OPTIONS, by function; one process counts them all."""
    return run_compiled(__file__)  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(OPTIONS)), ids=lambda number: str(OPTIONS[number]))
def test_a_bucket_calls_few_python_functions_on_cuda(calls: list[dict[str, float]], number: int) -> None:
    found = calls[number]
    assert found["Variant.launch"] == 2, "pack and unpack"
    # Of one or two buckets gradients may lie where they have lain before, or not, and need no table of addresses.
    total = round(sum(found.values()))
    assert 50 < total <= MOST_CALLS, "\n".join(f"{of:6.2f} {name}" for name, of in sorted(found.items()))


if __name__ == "__main__":
    main()
