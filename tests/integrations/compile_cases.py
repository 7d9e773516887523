"""Cases for `make integrations`: torch.compile of the wrapper and of the module within, with torch's wrapper and ours.

torchrun --standalone --nproc-per-node=2 compile_cases.py
"""

import shutil
import sys
from collections.abc import Callable
from typing import Any

import cases
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fusedreduce

BACKEND = "inductor" if shutil.which("g++") else "aot_eager"
Results = tuple[list[float], list[torch.Tensor]]


def train(cls: Any, *, whole: bool, **kwargs: Any) -> Results:
    """Eight steps."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    middle = [layer for _ in range(3) for layer in (nn.Linear(512, 512), nn.GELU())]
    model: Any = nn.Sequential(nn.Linear(16, 512), nn.GELU(), *middle, nn.Linear(512, 4))
    if not whole:
        model = torch.compile(model, backend=BACKEND)
    ddp = cls(model, **kwargs)
    called = torch.compile(ddp, backend=BACKEND) if whole else ddp
    optimizer, losses = torch.optim.AdamW(ddp.parameters(), lr=1e-3), []
    for step in range(8):
        inputs = torch.randn(32, 16, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        loss = functional.cross_entropy(called(inputs), inputs[:, :4].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [one.detach() for one in ddp.parameters()]


def demand_same(**kwargs: Any) -> str:
    """Raises unless both classes end with the same bits."""
    theirs, mine = train(TorchDDP, **kwargs), train(fusedreduce.DistributedDataParallel, **kwargs)
    assert theirs[0] == mine[0], (theirs[0], mine[0])
    assert all(torch.equal(a, b) for a, b in zip(theirs[1], mine[1], strict=True))
    return f"{len(mine[0])} losses and the weights equal, bit for bit, backend {BACKEND}"


def compiled_wrapper() -> str:
    """torch.compile(ddp)."""
    return demand_same(whole=True)


def compiled_wrapper_small_buckets() -> str:
    """Small enough for Dynamo to split the graph. (Below 1 MiB, its first bucket, it fails, with torch's too.)"""
    return demand_same(whole=True, bucket_cap_mb=1)


def compiled_module() -> str:
    """torch.compile of the module, then the wrapper."""
    return demand_same(whole=False)


CASES: tuple[Callable[[], str], ...] = (compiled_wrapper, compiled_wrapper_small_buckets, compiled_module)


def main() -> None:
    """Runs the cases, or those named on the command line."""
    cases.run(CASES, sys.argv[1:])


if __name__ == "__main__":
    main()
