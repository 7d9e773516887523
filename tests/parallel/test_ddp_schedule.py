"""Plans that follow the clock, on 2 and 3 Gloo ranks."""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ddp_models import assert_is_mean, assert_same_on_all_ranks, gradients
from support.inside import LEAST_PLANNED_BYTES, inside
from support.ranks import on_ranks
from support.timeouts import patient_group, wait_briefly
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fusedreduce
from fusedreduce import reducer_of
from fusedreduce.planning import schedule
from fusedreduce.planning.plan import Plan
from fusedreduce.planning.plan_file import plan_hash
from fusedreduce.planning.timeline import Problem
from fusedreduce.trace.reader import read

WIDTH = 64


def planned(**options: Any) -> fusedreduce.ReduceConfig:
    """Re-plans as often as it may, small as these models are."""
    LEAST_PLANNED_BYTES.set(0)
    options.setdefault("policy", "planned")
    return fusedreduce.ReduceConfig(**{"replan_every": 10, **options})


def same_everywhere(value: int) -> bool:
    """Whether all ranks hold the same number."""
    held = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(held, torch.tensor([value]))
    return len({int(one) for one in held}) == 1


def assert_averaged(ddp: nn.Module, alone: nn.Module) -> None:
    """Every gradient is the mean of the ranks', the same bytes on all; as one tensor, because collectives cost time."""
    ours, mine = ([torch.cat([one.flatten() for one in gradients(module)])] for module in (ddp, alone))
    assert_same_on_all_ranks(ours)
    assert_is_mean(ours, mine, "native", 1.0)


def layers(count: int = 12) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(count)])


class Sleeper:
    """Sleeps in backward, before each of a model's layers, as long as its own dice say; now and then another layer."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._random = random.Random(seed)
        self.slow = 0
        for index, layer in enumerate(model.children()):
            layer.register_full_backward_hook(self._hook(index))

    def _hook(self, index: int) -> Any:
        def hook(*_: object) -> None:
            time.sleep(self._random.random() * (0.004 if index == self.slow else 0.0005))

        return hook


def drawn_plan(problem: Problem, others: Mapping[str, Plan]) -> tuple[str, Plan]:
    """In place of the best plan, which on a busy machine may stay the same: one that the times alone decide on."""
    dice = random.Random(repr(problem.ready_ns))
    order = [number for members in others["ready"] for number in members]
    cuts = [0, *sorted(dice.sample(range(1, len(order)), 5)), len(order)]
    return "drawn", tuple(tuple(order[begin:end]) for begin, end in itertools.pairwise(cuts))


@contextlib.contextmanager
def drawn_plans() -> Iterator[None]:
    """Within it every report changes the plan."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "best_plan", drawn_plan)
        patch.setattr(schedule, "GAIN_PERCENT", -1_000_000)
        yield


@pytest.mark.full
@on_ranks(3)
@drawn_plans()
def test_two_hundred_steps_with_random_sleeps_and_a_new_plan_every_ten(rank: int, world: int) -> tuple[int, int]:
    """Gradients are checked in every step; the ranks' plans change equally often."""
    changes, plans = _random_sleeps(rank, 200)
    assert changes >= 10, f"plans must have changed for this to prove anything, got {changes}"
    return changes, plans


def _random_sleeps(rank: int, steps: int) -> tuple[int, int]:
    """How often the plan changed, and how many different ones there were."""
    model = layers()
    alone = copy.deepcopy(model)
    ddp = fusedreduce.DistributedDataParallel(model, bucket_cap_mb=0.1, reduce=planned(wire="native"))
    sleeper = Sleeper(model, seed=rank)
    dice = random.Random(7)  # the same on all ranks: where it is slow changes, as a model's use does
    reducer = reducer_of(ddp)
    plans = set()
    for step in range(steps):
        if step % 20 == 0:
            sleeper.slow = dice.randrange(12)
        inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))
        ddp.zero_grad()
        alone.zero_grad()
        ddp(inputs).square().mean().backward()
        alone(inputs).square().mean().backward()
        assert same_everywhere(plan_hash(reducer.plan)), "a plan of one's own"
        assert_averaged(ddp, alone)
        launched = [launch for _, launch in reducer.bucket_times()]
        assert launched == sorted(launched) and min(launched) >= 0, "out of the plan's order"
        plans.add(reducer.plan)
    assert reducer.stats()["steps"] == steps
    return int(reducer.stats()["plans"]), len(plans)


@pytest.mark.parametrize(
    ("leaves", "divide_by_initial"),
    [([0, 14, 30], True), ([30, 5, 11], False), ([12, 30, 13], True), ([14, 15, 30], False), ([10, 3, 24], True)],
)
@on_ranks(3)
def test_ranks_without_inputs_take_part_in_plans(
    rank: int, world: int, leaves: list[int], divide_by_initial: bool
) -> int:
    """Ranks run out of inputs at different steps, before, while and after the others agree on plans."""
    model = layers(6)
    alone = copy.deepcopy(model)
    ddp = fusedreduce.DistributedDataParallel(model, bucket_cap_mb=0.03, reduce=planned(replan_every=8))
    Sleeper(model, seed=rank)
    reducer = reducer_of(ddp)
    with ddp.join(divide_by_initial_world_size=divide_by_initial):
        for step in range(leaves[rank]):
            inputs = torch.full((2, WIDTH), float(rank + step + 1))
            ddp.zero_grad()
            alone.zero_grad()
            ddp(inputs).mean().backward()
            here = [one for one in range(world) if step < leaves[one]]
            total = [torch.zeros_like(parameter) for parameter in alone.parameters()]
            for other in here:
                alone.zero_grad()
                alone(torch.full((2, WIDTH), float(other + step + 1))).mean().backward()
                for sum_, parameter in zip(total, alone.parameters(), strict=True):
                    assert parameter.grad is not None
                    sum_ += parameter.grad
            divisor = world if divide_by_initial else len(here)
            for sum_, parameter in zip(total, ddp.parameters(), strict=True):
                torch.testing.assert_close(parameter.grad, sum_ / divisor, rtol=1e-5, atol=1e-7)
    assert same_everywhere(plan_hash(reducer.plan))
    return int(reducer.stats()["plans"])


@pytest.mark.parametrize("fails_at", [*range(9, 14), *range(18, 23)])
@on_ranks(2)
@drawn_plans()
def test_a_step_that_fails_in_any_round_of_an_agreement_can_be_reset(rank: int, world: int, fails_at: int) -> None:
    """A rank's step fails in any round of an agreement, after its collectives; all reset, and go on together."""
    ddp = fusedreduce.DistributedDataParallel(layers(6), bucket_cap_mb=0.03, reduce=planned())
    Sleeper(ddp.module, seed=rank)
    alone = layers(6)
    for step in range(fails_at + 16):
        inputs = torch.randn(4, WIDTH)
        ddp.zero_grad()
        alone.zero_grad()
        alone(inputs).sum().backward()
        loss = ddp(inputs).sum()
        if step == fails_at:
            first = next(iter(ddp.parameters()))
            handle = None
            if rank == 1:
                last = list(ddp.parameters())[-1]

                def spoil(_: torch.Tensor, last: torch.Tensor = last) -> None:
                    assert last.grad is not None
                    last.grad.add_(1.0)  # after it has been packed

                handle = first.register_post_accumulate_grad_hook(spoil)
            if rank == 1:
                with pytest.raises(fusedreduce.FusedReduceError, match="after it had been packed"):
                    loss.backward()
            else:
                loss.backward()
            if handle is not None:
                handle.remove()
            ddp.reset()
            continue
        loss.backward()
        assert same_everywhere(plan_hash(reducer_of(ddp).plan))
        assert_averaged(ddp, alone)
    assert int(reducer_of(ddp).stats()["plans"]) >= 1


def training(ddp: nn.Module, alone: nn.Module, rank: int, steps: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Steps of both modules on inputs of the rank's own: after each one its number and the inputs."""
    for step in range(steps):
        inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))
        ddp.zero_grad()
        alone.zero_grad()
        ddp(inputs).sum().backward()
        alone(inputs).sum().backward()
        yield step, inputs


@pytest.mark.parametrize(("world", "wire"), [(2, "native"), (2, "bf16"), (3, "int8")])
@on_ranks()
def test_a_trace_of_torchs_ddp_with_the_hook(rank: int, world: int, tmp_path: Path, wire: str) -> list[int]:
    """torch's DDP with our hook, recorded twice; gradients are checked while it is. The numbers of recorded steps."""
    model = layers(6)
    alone = copy.deepcopy(model)
    ddp = TorchDDP(model, bucket_cap_mb=0.03, gradient_as_bucket_view=True)
    state = fusedreduce.FusedHookState(wire=wire)
    ddp.register_comm_hook(state, fusedreduce.fused_hook)
    slow = Sleeper(model, seed=rank)
    slow.slow = 5  # the layer whose gradients come first

    def train(steps: int) -> None:
        for step, inputs in training(ddp, alone, rank, steps):
            if step % 3 == 1:
                with ddp.no_sync():
                    ddp(inputs).sum().backward()  # not synchronised, so no step of the trace
                    alone(inputs).sum().backward()
                continue
            assert_same_on_all_ranks(gradients(ddp))
            assert_is_mean(gradients(ddp), gradients(alone), wire)

    first = tmp_path / "first"
    with state.record_trace(first):
        train(6)
        with pytest.raises(fusedreduce.FusedReduceError, match="already"), state.record_trace(first):
            raise AssertionError
    train(2)
    with state.record_trace(tmp_path / "second", limit=3):
        train(8)
    dist.barrier()
    found = []
    for name in ("first", "second"):
        (trace, *_) = [one for one in read(tmp_path / name) if one.rank == rank]
        assert trace.source == "hook" and trace.ranks == world and len(trace.parameters) == 12
        assert max(one.ready_ns for one in trace.parameters) < 1e9
        late = 0
        for step in trace.steps:
            if step.ready_ns is None:  # its first bucket was handed over before the parameters were hooked
                assert step is trace.steps[0]
                continue
            assert min(step.ready_ns) >= 0
            # In this step, not in the one before or after: within backward, but for the last hook itself.
            late += max(step.ready_ns) > step.marks.backward_end_ns + 2_000_000
            order = sorted(range(12), key=step.ready_ns.__getitem__, reverse=True)
            assert order[-2:] in ([10, 11], [11, 10]), "numbered against the order in which they come"
            for bucket in step.marks.buckets:
                assert 0 <= bucket.ready_ns <= bucket.pack_ns <= bucket.launch_ns <= bucket.done_ns <= bucket.end_ns
                assert wire == "native" or bucket.done_ns <= bucket.unpack_ns <= bucket.end_ns
        assert late <= 1, "that hook may lose the processor once"
        found += [step.step for step in trace.steps]
    # The first step shows the buckets, the second may come in others: torch lays them out anew after its first.
    assert found in ([3, 4, 5, 6, 2, 3, 4], [2, 3, 4, 5, 6, 2, 3, 4])
    return found


@on_ranks(2)
def test_a_trace_of_the_wrapper(rank: int, world: int, tmp_path: Path) -> None:
    """A trace has what happened, and recording changes no gradient."""
    ddp = fusedreduce.DistributedDataParallel(layers(6), bucket_cap_mb=0.03, reduce=planned(policy="ready"))
    alone = layers(6)
    Sleeper(ddp.module, seed=rank)

    def train(steps: int) -> None:
        for _ in training(ddp, alone, rank, steps):
            assert_averaged(ddp, alone)

    with ddp.record_trace(str(tmp_path), limit=14):
        train(16)
    costs = inside(ddp).scheduler.schedule.costs
    train(1)
    dist.barrier()
    (trace, *_) = [one for one in read(tmp_path) if one.rank == rank]
    assert trace.source == "wrapper" and [step.step for step in trace.steps] == list(range(1, 15))
    assert all(step.ready_ns is not None for step in trace.steps)
    assert trace.costs == costs is not None
    assert [one.name for one in trace.parameters] == [name for name, _ in ddp.module.named_parameters()]
    for step in trace.steps:
        marks = step.marks.buckets
        assert len(marks) == len(trace.plans[step.plan])
        for bucket in marks:
            times = [bucket.ready_ns, bucket.pack_ns, bucket.launch_ns, bucket.done_ns, bucket.unpack_ns, bucket.end_ns]
            assert times[0] >= 0 and times == sorted(times)
        assert max(one.launch_ns for one in marks) <= step.marks.backward_end_ns <= min(one.unpack_ns for one in marks)
        assert -5_000_000_000 < step.marks.forward_ns - step.marks.began_ns <= 0


@pytest.mark.parametrize("change", ["set_sync_mode", "set_bucket_size"])
@on_ranks(2)
def test_a_change_on_one_rank_only_ends_on_both(rank: int, world: int, change: str) -> None:
    """Collectives that do not match, as with every call that all ranks are to make: an error within the timeout."""
    ddp = _over_its_own_group()
    _train(ddp, 3)
    wait_briefly()
    if rank == 0:
        getattr(ddp, change)(10_000 if change == "set_bucket_size" else fusedreduce.Synchronous())
    with pytest.raises(fusedreduce.CollectiveError) as raised:
        _train(ddp, 1)
    failed = (
        "comparing model and settings across ranks failed",
        "the all-reduce of bucket 0 (2.bias, 2.weight, 1.bias, 1.weight) failed",
    )
    assert failed[rank] in str(raised.value)


@on_ranks(2)
def test_a_bucket_size_after_a_rank_has_joined_ends_on_both(rank: int, world: int) -> None:
    """The rank without inputs cannot compare it: an error within the timeout, torch's own on that rank."""
    ddp = _over_its_own_group()

    def train() -> None:
        with ddp.join():
            for step in range(3 + 3 * rank):
                if step == 4:
                    wait_briefly()
                    ddp.set_bucket_size(1)
                _train(ddp, 1)

    with pytest.raises(RuntimeError) as raised:
        train()
    assert rank == 0 or "comparing model and settings across ranks failed" in str(raised.value)


def _over_its_own_group() -> fusedreduce.DistributedDataParallel:
    return fusedreduce.DistributedDataParallel(layers(3), process_group=patient_group(), bucket_cap_mb=0.03)


def _train(ddp: nn.Module, steps: int) -> None:
    for _ in range(steps):
        ddp.zero_grad()
        ddp(torch.ones(4, WIDTH)).square().mean().backward()
