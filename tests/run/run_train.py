"""A training script as anybody writes it, which knows torch alone. Prints what the last weights are."""

from __future__ import annotations

import argparse
import hashlib
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

KEPT: list[nn.Module] = []  # a script's wrapper is often global, and lives as long as its process


def train(rank: int, arguments: argparse.Namespace) -> None:
    if arguments.launch != ["env"]:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(arguments.ranks)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(arguments.port)}
    dist.init_process_group("gloo")
    # One write: ranks share stdout.
    os.write(1, f"rank {dist.get_rank()} {weights(arguments.wrap, arguments.epochs, arguments.workers)}\n".encode())
    dist.destroy_process_group()


def weights(wrap: str, epochs: int, workers: int) -> str:
    """Trains, and tells the wrapper's and its reducer's module, and what the last weights are."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 32), torch.randn(64, 8))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=workers)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    wrapper: nn.Module = model
    if wrap != "none":
        wrapper = DDP(model)
    KEPT.append(wrapper)
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for inputs, wanted in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(wrapper(inputs), wanted).backward()
            optimizer.step()
    digest = hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in model.parameters())).hexdigest()
    reducer = getattr(wrapper, "reducer", None)
    return f"{type(wrapper).__module__} {type(reducer).__module__} {digest}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--launch", nargs="+", default=["env"])  # or spawn, forkserver
    parser.add_argument("--wrap", default="torch", choices=("torch", "none"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--port", type=int, default=29500)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=4)
    arguments = parser.parse_args()
    for method in arguments.launch:
        if method == "env":
            train(0, arguments)
        else:
            mp.start_processes(  # type: ignore[attr-defined]
                train, args=(arguments,), nprocs=arguments.ranks, start_method=method
            )


if __name__ == "__main__":
    main()
