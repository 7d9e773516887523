"""What ranks run in test_run_ranks.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from run import run_train
from support.ddp_subclasses import is_torchs
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

import fusedreduce
from fusedreduce import ReduceConfig, reducer_of

BF16 = ReduceConfig(wire="bf16")


@contextmanager
def installed_for(config: ReduceConfig, *, fallback: bool = False) -> Iterator[None]:
    fusedreduce.install(config, fallback=fallback)
    try:
        yield
    finally:
        fusedreduce.uninstall()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def trained(wrapper: nn.Module, rank: int, steps: int = 20) -> list[torch.Tensor]:
    """The weights after some steps, on inputs of this rank's own."""
    generator = torch.Generator().manual_seed(rank)
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        wrapper(torch.randn(4, 16, generator=generator, device="cpu")).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in wrapper.parameters()]


def register(wrapper: DDP, hook: str) -> None:
    if hook == "built in":
        wrapper._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)  # type: ignore[attr-defined]
    elif hook == "powersgd":
        state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=4, min_compression_rate=0.5)
        wrapper.register_comm_hook(state, powerSGD_hook)
    else:
        wrapper.register_comm_hook(None, default_hooks.fp16_compress_hook)


def weights_of_script(rank: int, world: int) -> str:
    """What the script prints with torch's class, in these processes."""
    try:
        return run_train.weights(wrap="torch", epochs=4, workers=0)
    finally:
        run_train.KEPT.clear()


def default_device_set_late(rank: int, world: int) -> None:
    """A script that sets a default device behind the wrapper, which is not its model's, trains as without."""
    wanted = trained(DDP(model()), rank)
    with installed_for(ReduceConfig()):
        wrapper = DDP(model())
        torch.set_default_device("meta")
        try:
            found = trained(wrapper, rank)
        finally:
            torch.set_default_device(None)
    assert all(map(torch.equal, wanted, found))


def hooks_win(rank: int, world: int) -> None:
    """The weights are those of torch's class with that hook, whatever wire was installed."""
    for hook in ("built in", "powersgd", "python"):
        plain = DDP(model())
        register(plain, hook)
        with installed_for(BF16):
            made = DDP(model())
        register(made, hook)
        assert reducer_of(made).config.wire == "native"
        for got, wanted in zip(trained(made, rank), trained(plain, rank), strict=True):
            assert torch.equal(got, wanted), hook


def refusals_are_shared(rank: int, world: int) -> None:
    """Where one rank would be refused all have torch's class, and without fallback all an error."""
    with installed_for(BF16):
        for init_sync in (True, False):
            arguments: dict[str, Any] = {"init_sync": init_sync, "bucket_cap_mb": -1 if rank == 1 else 25}
            if init_sync:
                with pytest.raises((ValueError, fusedreduce.AgreementError), match="bucket_cap_mb"):
                    DDP(model(), **arguments)
            fusedreduce.install(BF16, fallback=True)
            made = DDP(model(), **arguments)
            assert is_torchs(made)
            plain = trained(made, rank)
            fusedreduce.install(BF16)
        fusedreduce.install(ReduceConfig(), fallback=True)
        ours = DDP(model(), init_sync=False)
        assert not is_torchs(ours)
        assert all(map(torch.equal, trained(ours, rank), plain))
        fusedreduce.install(BF16, fallback=rank == 0)
        with pytest.raises(fusedreduce.AgreementError, match="fallback is asked for on rank 0 only"):
            DDP(model())
        fusedreduce.install(BF16, fallback=True)
        # Ranks that were given different models are no refusal: torch's class would raise it too.
        with pytest.raises(fusedreduce.AgreementError, match="appears not to match|same model"):
            DDP(nn.Linear(2, 2 + rank))
