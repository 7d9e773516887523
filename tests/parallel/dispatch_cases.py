"""What ranks run in test_dispatch.py: torch's class and subclasses of it under `install`, beside torch's reducer."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from support import ddp_subclasses
from support.ddp_subclasses import is_torchs
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import fusedreduce
from fusedreduce import ReduceConfig, reducer_of

STEPS = 4


@contextmanager
def installed_for(config: ReduceConfig | None = None) -> Iterator[None]:
    fusedreduce.install(config)
    try:
        yield
    finally:
        fusedreduce.uninstall()


def model() -> nn.Module:
    """With buffers, which ranks change each in its way, and a parameter that not every step uses."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def batches(rank: int, count: int = STEPS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1 + rank)
    return [torch.randn(5, 4, generator=generator) for _ in range(count)]


def trained(wrapper: DDP, rank: int, *, count: int = STEPS, accumulate: bool = False) -> dict[str, torch.Tensor]:
    """The model's state after some steps, on inputs of this rank's own."""
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1, momentum=0.9)
    for inputs in batches(rank, count):
        step: Any = getattr(type(wrapper), "train_step", None)
        if accumulate:
            with wrapper.no_sync():
                wrapper(2 * inputs).square().mean().backward()
            wrapper(inputs).square().mean().backward()
            optimizer.step()
            wrapper.zero_grad()
        elif step is not None:
            step(wrapper, inputs, optimizer)
        else:
            wrapper.zero_grad()
            wrapper(inputs).square().mean().backward()
            optimizer.step()
    return {name: value.clone() for name, value in wrapper.module.state_dict().items()}


def assert_same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert list(got) == list(wanted)
    for name, value in wanted.items():
        assert torch.equal(got[name], value), name


OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0001},
    {"find_unused_parameters": True},
)


def every_class_has_torchs_bits(rank: int, world: int) -> None:
    for kind in ddp_subclasses.REDUCED:
        for options in OPTIONS:
            plain = kind(model(), **options)
            with installed_for():
                made = kind(model(), **options)
            assert is_torchs(plain) and type(made) is kind and reducer_of(made).config == ReduceConfig()
            assert_same(trained(made, rank), trained(plain, rank))
            assert reducer_of(made).steps == STEPS
    assert ddp_subclasses.Forwarding.outputs_seen > 0


def accumulation_has_torchs_bits(rank: int, world: int) -> None:
    for kind in (DDP, ddp_subclasses.Forwarding):
        plain = kind(model())
        with installed_for():
            made = kind(model())
        assert_same(trained(made, rank, accumulate=True), trained(plain, rank, accumulate=True))
        assert reducer_of(made).steps == STEPS


def join_has_torchs_bits(rank: int, world: int) -> None:
    """Rank 1 has fewer inputs."""
    found = []
    for installs in (False, True):
        for kind in (DDP, ddp_subclasses.Forwarding):
            for initial in (True, False):
                if installs:
                    fusedreduce.install()
                made = kind(model())
                fusedreduce.uninstall()
                assert is_torchs(made) is not installs
                with made.join(divide_by_initial_world_size=initial):
                    found.append(trained(made, rank, count=STEPS - 2 * rank))
                # What rank 1 has at its end is not what it has when all have joined.
                found[-1] = {name: value.clone() for name, value in made.module.state_dict().items()}
    for got, wanted in zip(found[4:], found[:4], strict=True):
        assert_same(got, wanted)


def copies_and_pickles_have_torchs_bits(rank: int, world: int) -> None:
    """Also after `uninstall`, and under other settings; a pickle takes those of the process that loads it."""
    ways: list[Callable[[DDP], DDP]] = [copy.deepcopy, copy.copy, lambda made: pickle.loads(pickle.dumps(made))]
    for kind in (DDP, ddp_subclasses.Forwarding, ddp_subclasses.Trainer):
        for way in ways:
            plain = kind(model())
            with installed_for():
                made = kind(model())
                trained(made, rank, count=2)
                copied = way(made)
                again = way(copied)
            trained(plain, rank, count=2)
            assert type(copied) is type(again) is kind
            assert reducer_of(copied).config == reducer_of(again).config == ReduceConfig()
            wanted = trained(way(plain), rank)
            assert_same(trained(again, rank), wanted)
            assert reducer_of(again).steps == STEPS


def wrong_guesses_reduce(rank: int, world: int) -> None:
    """A method that is not what its code looks like: whoever reduces then, the weights are torch's."""
    for name in ddp_subclasses.DISPATCHED:
        kind = ddp_subclasses.replacing(name, seen=False)
        plain = kind(model())
        with installed_for():
            made = kind(model())
            loads = copy.deepcopy(made)
        assert is_torchs(made) is (name == "_ddp_init_helper"), name
        wanted = trained(plain, rank)
        assert_same(trained(made, rank), wanted)
        assert_same(trained(loads, rank), wanted)


def what_is_left_to_torch_takes_our_hook(rank: int, world: int) -> None:
    """The line that is written for it works, bit for bit."""
    for name in ("register_comm_hook", "_ddp_init_helper", "_post_forward"):
        kind = ddp_subclasses.replacing(name, seen=True)
        plain = kind(model())
        with installed_for():
            made = kind(model())
            assert is_torchs(made)
            state = fusedreduce.FusedHookState(wire="native")
            made.register_comm_hook(state, fusedreduce.fused_hook)
        assert_same(trained(made, rank), trained(plain, rank))
        assert state.stats()["steps"] == STEPS


def flush_knows_the_buffers(rank: int, world: int) -> None:
    """In the asynchronous mode forward broadcasts none."""
    with installed_for(ReduceConfig(sync_mode=fusedreduce.Asynchronous())):
        made = DDP(model())
    assert not made.will_sync_module_buffers()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    for inputs in batches(rank):
        optimizer.zero_grad()
        made(inputs).square().mean().backward()
        optimizer.step()
    mean: Any = made.module.get_buffer("1.running_mean")
    of_ranks = [torch.empty_like(mean) for _ in range(world)]
    dist.all_gather(of_ranks, mean)
    assert not torch.equal(*of_ranks)
    reducer_of(made).flush(optimizer)
    for value in made.module.state_dict().values():
        of_ranks = [torch.empty_like(value) for _ in range(world)]
        dist.all_gather(of_ranks, value)
        assert torch.equal(*of_ranks)
