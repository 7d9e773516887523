"""A script that trains, and then forks ranks that train, as notebooks do."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

KEPT: list[nn.Module] = []


def train(rank: int, ranks: int, port: int, steps: int) -> None:
    KEPT.clear()  # in a rank that was forked, the wrapper of the process that forked it
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    model = DDP(nn.Linear(4, 2))
    for step in range(steps):
        model.zero_grad()
        model(torch.full((2, 4), float(step + rank))).square().mean().backward()
    KEPT.append(model)
    os.write(1, f"rank {rank} {model.module.weight.grad.tolist()}\n".encode())
    dist.destroy_process_group()


def main(wrapper: str, first_port: int, second_port: int) -> None:
    train(0, 1, first_port, 3)
    if wrapper == "freed":
        KEPT.clear()
    mp.start_processes(train, (2, second_port, 5), 2, start_method="fork")  # type: ignore[attr-defined]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
