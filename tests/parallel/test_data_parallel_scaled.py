"""DataParallel: what is its own of loss scales, clipping and checkpoints; what every surface has is in tests/grid."""

from __future__ import annotations

import collections
import contextlib
import itertools
import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support.data_parallel_models import Calls, batch, mlp
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fusedreduce
from fusedreduce import FusedGradScaler, FusedReduceError, ReduceConfig, clip_grad_norm_
from fusedreduce.config import Asynchronous, BoundedStaleness, Synchronous, SyncMode
from fusedreduce.parallel.data_parallel import DataParallel

pytestmark = pytest.mark.usefixtures("path")

TIMEOUT_S = 20.0
FP32: dict[str, Any] = {"dtype": torch.float32}


@contextlib.contextmanager
def _parallel(
    module: nn.Module, mode: SyncMode | None = None, world: int = 2, **options: Any
) -> Iterator[DataParallel]:
    config = ReduceConfig(sync_mode=mode or Synchronous(), **options.pop("reduce", {}))
    with DataParallel(module, ["cpu"] * world, timeout_s=TIMEOUT_S, reduce=config, **options) as dp:
        yield dp


class Weight:
    """One weight; a step's gradient is what each sample is."""

    def __init__(self, mode: SyncMode, **scaler: Any) -> None:
        self.module = Calls(lambda module, x: x * module.weight)
        self.module.float()
        with torch.no_grad():
            self.module.weight.zero_()
        config = ReduceConfig(sync_mode=mode)
        self.dp = DataParallel(self.module, ["cpu"] * 2, timeout_s=TIMEOUT_S, reduce=config)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=1.0)
        self.scaler = FusedGradScaler(self.dp, **{"init_scale": 1024.0, "growth_interval": 1000, **scaler})

    def backward(self, *values: float) -> None:
        self.scaler.scale(self.dp(torch.tensor(values)).sum()).backward()

    def finish(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def weight(self) -> float:
        return float(self.module.weight.item())


@pytest.mark.parametrize("mode", [BoundedStaleness(1), Asynchronous(2)], ids=str)
@pytest.mark.parametrize("overflows", [True, False])
def test_the_step_of_flush_moves_the_scale(mode: SyncMode, overflows: bool) -> None:
    """It steps with what flush has applied, also where no step in flight had a scale of its own."""
    loop = Weight(mode, growth_interval=1)
    scales = []

    def finish() -> None:
        assert loop.module.weight.grad is not None
        if overflows:
            loop.module.weight.grad.fill_(math.inf)
        scales.append(loop.scaler.get_scale())
        loop.finish()
        scales.append(loop.scaler.get_scale())

    with loop.dp:
        loop.backward(1.0, 2.0)
        loop.dp.flush(step=finish)
    assert scales == [1024.0, 512.0 if overflows else 2048.0]


@pytest.mark.parametrize("mode", [Synchronous(), BoundedStaleness(1), Asynchronous(2)], ids=str)
def test_backwards_with_and_without_a_scale_add_up(mode: SyncMode) -> None:
    """What comes out is unscaled: nothing is mixed, where a wrapper would have to refuse it."""
    loop = Weight(mode)
    with loop.dp:
        with loop.dp.no_sync():
            loop.backward(1.0, 2.0)
            loop.dp(torch.tensor([4.0, 8.0])).sum().backward()
        loop.scaler.update(64.0)
        with loop.dp.no_sync():
            loop.backward(16.0, 32.0)
        loop.backward(64.0, 128.0)
        if not isinstance(mode, BoundedStaleness):
            loop.optimizer.step()
            loop.optimizer.zero_grad()
        loop.dp.flush(step=loop.finish)
        assert loop.weight() == -255.0


def test_inputs_keep_the_scale_for_what_is_before_them() -> None:
    loop = Weight(Synchronous())
    before = torch.ones(2, requires_grad=True)
    with loop.dp:
        with torch.no_grad():
            loop.module.weight.fill_(3.0)
        loop.scaler.scale(loop.dp(before).sum()).backward()
        assert before.grad is not None and before.grad.tolist() == [3072.0] * 2
        assert loop.module.weight.grad is not None and loop.module.weight.grad.item() == 2.0


def test_a_loss_that_goes_around_the_replicas_is_refused() -> None:
    loop = Weight(Synchronous())
    with loop.dp:
        out = loop.dp(torch.ones(2)).sum()
        for around in (loop.module.weight.square().sum(), loop.module(torch.ones(2)).sum()):
            with pytest.raises(FusedReduceError, match="not only through its replicas, weight"):
                loop.scaler.scale(out + around)
        with pytest.raises(FusedReduceError, match="not only through"):
            loop.scaler.scale(loop.dp(torch.ones(2) * loop.module.weight).sum())
        # As the message says:
        loop.backward(1.0, 2.0)
        (loop.module.weight - 1).square().sum().backward()
        assert loop.module.weight.grad is not None and loop.module.weight.grad.item() == 3.0 - 2.0


@pytest.mark.parametrize("scaler", ["torch", "ours"])
@pytest.mark.parametrize("fused", [False, True])
def test_training_equals_one_device(scaler: str, fused: bool) -> None:
    module, one = mlp(**FP32), mlp(**FP32)
    with _parallel(module, world=3) as dp:
        for each, owner in ((dp, module), (one, one)):
            optimizer = torch.optim.AdamW(owner.parameters(), lr=1e-2, fused=fused)
            made: Any = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
            if each is dp and scaler == "ours":
                made = FusedGradScaler(dp, init_scale=256.0, growth_interval=3)
            for step in range(12):
                inputs, targets = batch(7, seed=step, **FP32)
                if step == 5:
                    targets[4] = 1e38
                made.scale(F.mse_loss(each(inputs), targets)).backward()
                made.unscale_(optimizer)
                if each is dp:
                    clip_grad_norm_(dp, 0.5, optimizer if fused else None)
                else:
                    nn.utils.clip_grad_norm_(one.parameters(), 0.5)
                made.step(optimizer)
                made.update()
                optimizer.zero_grad()
            assert made.get_scale() == 256.0 * 2**3 / 2
    for mine, other in zip(module.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_what_a_scaler_refuses() -> None:
    with _parallel(mlp(torch.float16)) as dp, pytest.raises(ValueError, match="FP16"):
        FusedGradScaler(dp)
    with _parallel(nn.ReLU()) as dp, pytest.raises(ValueError, match="requires a gradient"):
        FusedGradScaler(dp)
    with _parallel(mlp(**FP32)) as dp:
        scaler = FusedGradScaler(dp)
        optimizer = torch.optim.SGD(dp.parameters(), lr=0.1)
        with pytest.raises(ValueError, match="flush\\(optimizer\\)"):
            dp.flush(optimizer)
    with pytest.raises(ValueError, match="closed"):
        scaler.scale(torch.ones(1, requires_grad=True).sum())


@pytest.mark.parametrize("check", ["raise", "count"])
def test_an_overflow_under_a_scaler_is_its_own_affair(check: Any) -> None:
    module = Calls(lambda module, x: x * module.weight)
    with _parallel(module, reduce={"check_finite": check}) as dp:
        scaler = FusedGradScaler(dp, init_scale=4.0)
        scaler.scale(dp(torch.tensor([1.0, math.inf], dtype=torch.float64)).sum()).backward()
        scaler.step(torch.optim.SGD(dp.parameters(), lr=1.0))
        scaler.update()
        assert scaler.get_scale() == 2.0


def test_a_scaled_backward_that_raises_leaves_no_scale_behind() -> None:
    def call(module: Calls, x: torch.Tensor) -> torch.Tensor:
        out = x * module.weight
        if x[0] < 0:
            out.register_hook(lambda _: 1 / 0)
        return out

    loop = Weight(Synchronous())
    loop.module.call = call
    with loop.dp:
        with pytest.raises(ZeroDivisionError):
            loop.backward(-1.0, 1.0)
        loop.dp(torch.tensor([1.0, 2.0])).sum().backward()
        assert loop.module.weight.grad is not None and loop.module.weight.grad.item() == 3.0


def test_threads_of_the_user_have_scales_of_their_own() -> None:
    module, one = mlp(), mlp()
    with _parallel(module) as dp:
        scaler = FusedGradScaler(dp, init_scale=1024.0)

        def train(number: int) -> None:
            for step in range(5):
                loss = F.mse_loss(dp(batch(8, seed=10 * number + step)[0]), batch(8)[1])
                (scaler.scale(loss) if number % 2 else loss).backward()

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(train, range(4)))
    for seed in (10 * number + step for number in range(4) for step in range(5)):
        F.mse_loss(one(batch(8, seed=seed)[0]), batch(8)[1]).backward()
    for mine, other in zip(module.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_it_is_unscaled_once(reentrant: bool) -> None:
    loop = Weight(Synchronous())
    with loop.dp:
        inputs = torch.tensor([1.0, 2.0], requires_grad=True)
        out = checkpoint(loop.dp, inputs, use_reentrant=reentrant)
        loop.scaler.scale(out.sum()).backward()
        assert loop.module.weight.grad is not None and loop.module.weight.grad.item() == 3.0


# Clipping and norms


@pytest.mark.parametrize("set_to_none", [True, False])
def test_clipping_too_early(set_to_none: bool) -> None:
    with _parallel(mlp(), BoundedStaleness(1)) as dp:
        with pytest.raises(FusedReduceError, match="before any"):
            clip_grad_norm_(dp, 1.0)
        with dp.no_sync():
            F.mse_loss(dp(batch(6)[0]), batch(6)[1]).backward()
        F.mse_loss(dp(batch(6)[0]), batch(6)[1]).backward()
        with dp.no_sync():
            F.mse_loss(dp(batch(6)[0]), batch(6)[1]).backward()
        with pytest.raises(FusedReduceError, match="not been reduced"):
            clip_grad_norm_(dp, 1.0)
        dp.zero_grad(set_to_none)
        clip_grad_norm_(dp, 1.0)


# What an optimizer has stepped with


@pytest.mark.parametrize("late", [1, 2])
def test_while_flush_runs_no_thread_touches_another_replicas_gradients(late: int) -> None:
    """If two threads set one `.grad` to None, it may be freed twice: torch frees it without the interpreter's lock."""
    touched: collections.defaultdict[int, set[int]] = collections.defaultdict(set)  # by id of a parameter: threads

    class Watched(nn.Parameter):
        def __getattribute__(self, name: str) -> Any:
            if name == "grad":
                touched[id(self)].add(threading.get_ident())
            return super().__getattribute__(name)

        def __setattr__(self, name: str, value: Any) -> None:
            if name == "grad":
                touched[id(self)].add(threading.get_ident())
            super().__setattr__(name, value)

    module = mlp()
    with _parallel(module, BoundedStaleness(late), 3) as dp:
        for step in range(late):
            F.mse_loss(dp(batch(7, seed=step)[0]), batch(7, seed=step)[1]).backward()
        replicas = [reducer.parameters for reducer in dp.reducers]
        for parameter in itertools.chain(*replicas):
            parameter.__class__ = Watched
        assert dp.flush(step=dp.zero_grad).steps == late
        threads = [set().union(*(touched[id(one)] for one in own)) for own in replicas]
    assert [len(one) for one in threads] == [1, 1, 1] and len(set().union(*threads)) == 3


# Steps under way in a checkpoint


@pytest.mark.parametrize("mode", [BoundedStaleness(2), Asynchronous(2)], ids=str)
@pytest.mark.parametrize("world", [1, 3])
def test_a_checkpoint_of_something_else_is_refused(mode: SyncMode, world: int) -> None:
    with _parallel(mlp(**FP32), mode, world) as dp:
        F.mse_loss(dp(batch(7, **FP32)[0]), batch(7, **FP32)[1]).backward()
        state = dp.reduce_state_dict()
    for other_world in (2, 4):
        with _parallel(mlp(**FP32), mode, other_world) as dp, pytest.raises(ValueError, match="of world_size"):
            dp.load_reduce_state_dict(state)
    wrong = Asynchronous() if isinstance(mode, BoundedStaleness) else BoundedStaleness(2)
    for another in (wrong, Synchronous()):
        with _parallel(mlp(**FP32), another, world) as dp, pytest.raises(ValueError, match="mode"):
            dp.load_reduce_state_dict(state)
    with _parallel(nn.Linear(2, 2), mode, world) as dp:
        with pytest.raises(ValueError, match="another model"):
            dp.load_reduce_state_dict(state)
        dp(torch.ones(world, 2)).sum().backward()
        dp.flush()
        assert all(one.grad is not None for one in dp.parameters()), "it goes on as if nothing had been loaded"


def test_resuming_after_an_error() -> None:
    """What was in flight is given up with the backward that raised, and a checkpoint takes its place."""

    def call(module: Calls, x: torch.Tensor) -> torch.Tensor:
        out = x * module.weight
        if x[0] == 8.0:
            out.register_hook(lambda _: 1 / 0)
        return out

    module = Calls(call)
    with _parallel(module, BoundedStaleness(1)) as dp:
        dp(torch.ones(2, dtype=torch.float64)).sum().backward()
        state = dp.reduce_state_dict()
        with pytest.raises(ZeroDivisionError):
            dp(torch.full((2,), 8.0, dtype=torch.float64)).sum().backward()
        dp.load_reduce_state_dict(state)
        assert dp.flush().steps == 1
        assert module.weight.grad is not None and module.weight.grad.item() == 2.0


def test_states_that_are_none() -> None:
    with _parallel(mlp()) as dp:
        assert dp.reduce_state_dict() == {}
        dp.load_reduce_state_dict({})
    with _parallel(mlp(), BoundedStaleness(1)) as dp:
        for damaged in ("version", "replicas", "loss_scales"):
            with pytest.raises(ValueError, match="of 0 replicas"):
                dp.load_reduce_state_dict({damaged: []})
        with pytest.raises(ValueError, match="version 9"):
            dp.load_reduce_state_dict({"replicas": [{"version": 9}]})
        with dp.no_sync():
            F.mse_loss(dp(batch(6)[0]), batch(6)[1]).backward()
        with pytest.raises(FusedReduceError, match=r"reduce_state_dict\(\) is not possible while"):
            dp.reduce_state_dict()
        dp.zero_grad()
        state = dp.reduce_state_dict()
        assert len(state["replicas"]) == 1 and state["loss_scales"] == []
    assert fusedreduce.DataParallel is DataParallel
