"""What two processes that share a GPU do. NCCL refuses that, so sums go through the host, by Gloo.

Gloo sums CPU tensors only as far as fusedreduce is concerned: the end of its collectives on CUDA tensors is not ordered
with streams. So each collective here copies to the host, sums there, copies back and waits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from support.inside import inside
from torch import nn

import fusedreduce
from fusedreduce.comm.process_group import ProcessGroupCommunicator
from fusedreduce.comm.protocol import ReduceOp
from fusedreduce.planning.bucketing import BucketCaps

CPU = torch.device("cpu")
WIDTH = 256


class HostSums(ProcessGroupCommunicator):
    """Gloo's default group, for tensors of any device."""

    def timeout_s(self, device: torch.device | None = None) -> float:
        return super().timeout_s(CPU)

    def check_wire(self, dtype: torch.dtype, device: torch.device) -> None:
        super().check_wire(dtype, CPU)

    def check_exchange(self, device: torch.device) -> None:
        super().check_exchange(CPU)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp | Literal["avg"] = "sum") -> Any:
        host = tensor.to(CPU, copy=True)
        work = super().all_reduce(host, op)
        work.wait()
        tensor.copy_(host)
        _wait_for(tensor.device)
        return work

    def all_gather(self, tensor: torch.Tensor, into: torch.Tensor | None = None) -> Any:
        work, gathered = super().all_gather(tensor.to(CPU))
        work.wait()
        return work, gathered.to(tensor.device)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        host = tensor.to(CPU, copy=True)
        super().broadcast(host, source)
        tensor.copy_(host)

    def compare_aside(self, key: str, text: str, device: torch.device) -> list[str]:
        return super().compare_aside(key, text, CPU)

    def apart(self, devices: Collection[torch.device] = (), ranks: Sequence[int] | None = None) -> HostSums:
        return self


def train(rank: int, world: int, device_type: str, steps: int) -> dict[str, Any]:
    """Steps of ours, and beside it of the same model with gradients averaged by the definition.

    Returns:
        "weights": a digest after each step; "path": that of the reduction; "unpack_ms": what the planner takes
        unpacking the largest bucket for.
    """
    device = _device(device_type)
    ours, plain = (_mlp().to(device) for _ in range(2))
    config = fusedreduce.ReduceConfig(wire="bf16", grad_stats=True)
    caps = BucketCaps(first_bytes=2**18, cap_bytes=2**19)
    digests = []
    with fusedreduce.Reducer(ours.parameters(), HostSums(), config, caps=caps) as reducer:
        optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True) for model in (ours, plain)]
        for step in range(steps):
            batch = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank)).to(device)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = ours(batch).square().mean()
            reducer.prepare_for_backward(loss)
            loss.backward()
            plain(batch).square().mean().backward()
            for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
                assert one.grad is not None and other.grad is not None
                wire = (other.grad.float() / world).bfloat16().cpu()
                dist.all_reduce(wire)
                other.grad.copy_(wire.float())
                assert torch.equal(one.grad, other.grad), f"step {step}"
            for optimizer in optimizers:
                optimizer.step()
            digests.append(_digest(ours))
            assert digests[-1] == _digest(plain), f"step {step}"
        path = str(reducer.stats()["path"])
        schedule = inside(reducer).scheduler.schedule
        assert schedule.costs is not None, f"no costs were agreed on in {steps} steps"
        sizes = [sum(schedule.model.wire_bytes[number] for number in members) for members in reducer.plan]
        unpack_ms = schedule.costs.unpack.fs(max(sizes)) / 1e12
    return {"weights": digests, "path": path, "unpack_ms": unpack_ms}


def peak_of_steps(rank: int, world: int, lazy: bool) -> tuple[int, int]:
    """The most that is allocated on the GPU in steady steps, for which the host never waits; the bytes of all wires."""
    device = _device("cuda")
    batch = torch.randn(8192, 2048, device=device)
    layers = [layer for _ in range(8) for layer in (nn.Linear(2048, 2048), nn.Tanh())]
    net = nn.Sequential(*layers).to(device)
    config = fusedreduce.ReduceConfig(wire="bf16", policy="ready", replan_every=0)
    reducer = fusedreduce.Reducer(net.parameters(), ProcessGroupCommunicator(), config, lazy_bucket_allocation=lazy)
    for step in range(8):
        if step == 3:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        net.zero_grad()
        loss = net(batch).square().mean()
        reducer.prepare_for_backward(loss)
        loss.backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(), 2 * sum(parameter.numel() for parameter in net.parameters())


def over_gloo(rank: int, world: int) -> str:
    """What the wrapper says of CUDA tensors over Gloo."""
    device = _device("cuda")
    try:
        ddp = fusedreduce.DistributedDataParallel(_mlp().to(device))
        ddp(torch.randn(4, WIDTH, device=device)).sum().backward()
    except fusedreduce.FusedReduceError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _device(device_type: str) -> torch.device:
    if device_type == "cuda":
        torch.cuda.set_device(0)
    return torch.device(device_type)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])


def _digest(model: nn.Module) -> str:
    data = b"".join(one.detach().cpu().numpy().tobytes() for one in model.parameters())
    return hashlib.blake2b(data, digest_size=16).hexdigest()
