"""On hardware: CUDA graphs in a process that reduces gradients. Steps are refused within a capture, and harm none."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fusedreduce

pytestmark = pytest.mark.gpu


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[torch.device]:
    """An NCCL group of one, and its device."""
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield torch.device("cuda", torch.cuda.current_device())
    dist.destroy_process_group()


def test_the_stall_monitor_looks_during_a_capture_and_does_not_invalidate_it(alone: torch.device) -> None:
    ddp = fusedreduce.DistributedDataParallel(nn.Linear(64, 64).to(alone))
    batch, values = torch.randn(8, 64, device=alone), torch.zeros(4, device=alone)
    reducer: Any = ddp.reducer
    watched = reducer.reducer._pipeline._monitor._watched
    graph = torch.cuda.CUDAGraph()
    ddp(batch).sum().backward()
    assert watched, "the monitor looks once a second: the step is still watched when the capture begins"
    with torch.cuda.graph(graph):  # in the mode "global"
        values.add_(1.0)
        time.sleep(3.0)
        values.mul_(2.0)
    assert not watched, "it has looked meanwhile"
    for expected in (2.0, 6.0):
        graph.replay()
        assert values.tolist() == [expected] * 4
