"""DistributedDataParallel over a LocalGroup: ranks that are threads, without torch.distributed.

Ours, and torch's own with fused_hook. What is summed is compared bit for bit: a LocalGroup adds in rank order.
"""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.inside import inside_hook
from support.ranks import RankPool
from support.timeouts import PATIENT_S, in_time
from support.wires import EXCHANGED, settings
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fusedreduce
from fusedreduce import LocalGroup, ReduceConfig
from fusedreduce.buckets.exchanged import AccumulatedBucket, EncodedBucket
from fusedreduce.buckets.two_levels import TwoLevelBucket
from fusedreduce.comm.local.group import LocalCommunicator
from fusedreduce.comm.local.process_group import LocalProcessGroup
from fusedreduce.config import Wire
from fusedreduce.errors import CollectiveError

pytestmark = [
    pytest.mark.usefixtures("path"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # names that torch has newer ones for
]
STEPS = 15
RANKS = 3
KINDS = (fusedreduce.DistributedDataParallel, TorchDDP)


def normed(seed: int = 0) -> nn.Module:
    """A small model with running statistics. Draws from torch's one generator: not for threads."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def batches(rank: int, count: int = STEPS) -> Iterator[torch.Tensor]:
    """Inputs of a rank's own."""
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(count):
        yield torch.randn(8, 6, generator=generator)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return (output - 1).square().mean()


def trained(model: nn.Module, rank: int, group: dist.ProcessGroup | None, wire: Wire) -> dict[str, torch.Tensor]:
    """The model's state and its gradients after some steps under our wrapper."""
    config = fusedreduce.ReduceConfig(wire=wire, grad_stats=True)
    ddp = fusedreduce.DistributedDataParallel(model, process_group=group, reduce=config, bucket_cap_mb=3e-4)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    for given in batches(rank):
        optimizer.zero_grad()
        loss_of(ddp(given)).backward()
        optimizer.step()
    found = {name: value.detach().clone() for name, value in model.state_dict().items()}
    found |= {f"{name}.grad": one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    return {**found, "norm": ddp.grad_norm()}


def trained_over_gloo(rank: int, world: int, wire: Wire) -> dict[str, torch.Tensor]:
    return trained(normed(rank), rank, None, wire)


def plain(seed: int = 0) -> nn.Module:
    """No buffers: nothing is broadcast before a forward. Draws from torch's one generator: not for threads."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


class Branches(nn.Module):
    """The second one is used when asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, given: torch.Tensor, both: bool = True) -> torch.Tensor:
        output: torch.Tensor = self.first(given)
        return output + self.second(given) if both else output


def on_ranks(
    case: Callable[[LocalCommunicator, nn.Module], Any],
    make: Callable[[int], nn.Module] = plain,
    ranks: int = RANKS,
    timeout_s: float = 20.0,
) -> list[Any]:
    """`case(communicator, model)` in a thread per rank, each with a model of its own."""
    models = [make(rank) for rank in range(ranks)]
    with LocalGroup(ranks, timeout_s=timeout_s) as group:
        return group.run(lambda communicator: case(communicator, models[communicator.rank]))


def wrapped(
    communicator: LocalCommunicator,
    model: nn.Module,
    kind: type[TorchDDP] = fusedreduce.DistributedDataParallel,
    **options: Any,
) -> Any:
    options.setdefault("bucket_cap_mb", 3e-4)
    return kind(model, process_group=communicator.process_group(), **options)


def train(ddp: Any, rank: int, steps: int = 5, optimizer: torch.optim.Optimizer | None = None) -> list[torch.Tensor]:
    """The parameters behind some steps."""
    optimizer = optimizer or torch.optim.SGD(ddp.parameters(), lr=0.1)
    for given in batches(rank, steps):
        optimizer.zero_grad()
        loss_of(ddp(given)).backward()
        optimizer.step()
    return values(ddp)


def values(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def assert_same(results: Sequence[Sequence[torch.Tensor]]) -> None:
    """Every rank has the same bytes."""
    for mine in results:
        for one, first in zip(mine, results[0], strict=True):
            assert one.dtype is first.dtype and torch.equal(one, first)


def assert_averaged(ddp: nn.Module, local: nn.Module, communicator: LocalCommunicator) -> None:
    """`ddp` holds the mean of what the ranks' `local` models have: each is divided, then they are added in order.

    torch multiplies by the inverse.
    """
    ours = isinstance(ddp, fusedreduce.DistributedDataParallel)
    for parameter, alone in zip(ddp.parameters(), local.parameters(), strict=True):
        mine = torch.zeros_like(alone) if alone.grad is None else alone.grad
        mine = mine / RANKS if ours else mine * (1 / RANKS)
        pending, rows = communicator.all_gather(mine.view(-1))
        pending.wait()
        expected = rows[0].clone()
        for row in rows[1:]:
            expected += row
        assert parameter.grad is not None and torch.equal(parameter.grad.view(-1), expected)


# Training


def test_eight_ranks_train_as_one_device_that_averages_their_gradients() -> None:
    def case(communicator: LocalCommunicator, model: nn.Module) -> Mapping[str, torch.Tensor]:
        return trained(model, communicator.rank, communicator.process_group(), "native")

    results = on_ranks(case, normed, ranks=8)

    model = normed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for given in zip(*(batches(rank) for rank in range(8)), strict=True):
        means = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for rank, batch in enumerate(given):
            one = model if rank == 0 else copy.deepcopy(model)  # of the buffers rank 0's count
            one.zero_grad()
            loss_of(one(batch)).backward()
            for mean, parameter in zip(means, one.parameters(), strict=True):
                assert parameter.grad is not None
                mean += parameter.grad / 8
        for mean, parameter in zip(means, model.parameters(), strict=True):
            parameter.grad = mean
        optimizer.step()

    for name, value in model.state_dict().items():
        assert torch.equal(results[0][name], value), name
    for name, _ in model.named_parameters():
        assert_same([[one[name], one[f"{name}.grad"]] for one in results])


@pytest.mark.parametrize("wire", ["native", "bf16", "fp16"])
def test_two_ranks_give_the_bits_of_two_gloo_ranks(two: RankPool, wire: Wire) -> None:
    def case(communicator: LocalCommunicator, model: nn.Module) -> Mapping[str, torch.Tensor]:
        return trained(model, communicator.rank, communicator.process_group(), wire)

    gloo = two.run(trained_over_gloo, wire)
    for ours, theirs in zip(on_ranks(case, normed, ranks=2), gloo, strict=True):
        assert ours.keys() == theirs.keys()
        assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def test_it_works_beside_a_default_group(alone: None) -> None:
    assert_same(on_ranks(lambda communicator, model: train(wrapped(communicator, model), communicator.rank)))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": True},
        {"broadcast_buffers": False},
        {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
    ],
    ids=lambda options: "-".join(options) or "none",
)
@pytest.mark.parametrize("kind", KINDS, ids=["ours", "torch"])
def test_models_start_as_rank_0s_and_every_step_averages(kind: type[TorchDDP], options: dict[str, Any]) -> None:
    unused = "find_unused_parameters" in options

    def case(communicator: LocalCommunicator, model: nn.Module) -> list[torch.Tensor]:
        ddp = wrapped(communicator, model, kind, **options)
        assert isinstance(ddp.process_group, LocalProcessGroup) and not dist.is_initialized()
        assert ddp._get_ddp_logging_data()["backend_name"] == "local"
        for step, given in enumerate(batches(communicator.rank, 6)):
            local = copy.deepcopy(model)
            ddp.zero_grad()
            local.zero_grad()
            # In every third step rank 0 alone uses the second branch.
            arguments = (given, step % 3 > 0 or communicator.rank == 0) if unused else (given,)
            loss_of(local(*arguments)).backward()
            loss_of(ddp(*arguments)).backward()
            assert_averaged(ddp, local, communicator)
            torch.optim.SGD(ddp.parameters(), lr=0.1).step()
        return values(ddp)

    assert_same(on_ranks(case, lambda rank: Branches() if unused else (plain if options else normed)(rank)))


@pytest.mark.parametrize("initial", [True, False])
@pytest.mark.parametrize("unused", [True, False])
def test_join_with_uneven_inputs(initial: bool, unused: bool) -> None:
    def case(communicator: LocalCommunicator, model: nn.Module) -> list[torch.Tensor]:
        ddp = wrapped(communicator, model, find_unused_parameters=unused)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        expected = copy.deepcopy(model)
        with ddp.join(divide_by_initial_world_size=initial):
            for given in batches(communicator.rank, 2 + communicator.rank):
                optimizer.zero_grad()
                loss_of(ddp(given)).backward()
                optimizer.step()
        # The same alone: who has no inputs left counts as zeros, or not at all.
        others = torch.optim.SGD(expected.parameters(), lr=0.1)
        for step in range(1 + RANKS):
            here = [rank for rank in range(RANKS) if step < 2 + rank]
            others.zero_grad()
            for rank in here:
                given = next(itertools.islice(batches(rank, step + 1), step, None))
                (loss_of(expected(given)) / (RANKS if initial else len(here))).backward()
            others.step()
        for one, other in zip(values(ddp), values(expected), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        return values(ddp)

    assert_same(on_ranks(case))


def test_join_may_end_with_the_first_rank_that_has_no_inputs() -> None:
    def case(communicator: LocalCommunicator, model: nn.Module) -> str:
        ddp = wrapped(communicator, model)
        try:
            with ddp.join(throw_on_early_termination=True):
                train(ddp, communicator.rank, 2 + communicator.rank)
        except RuntimeError as error:
            return str(error)
        return "joined"

    first, *others = on_ranks(case)
    assert first == "Rank 0 exhausted all inputs." and all("at least one rank that exhausted" in one for one in others)


def test_a_step_is_sampled_once_whatever_forwards_follow() -> None:
    """Of a forward without a backward there is nothing to log: its times are of no step."""

    def case(communicator: LocalCommunicator, model: nn.Module) -> None:
        ddp = wrapped(communicator, model)
        for given in batches(communicator.rank, 3):
            loss_of(ddp(given)).backward()
        ddp(given)
        sampled = dict(ddp._get_ddp_logging_data())
        for _ in range(2):
            ddp(given)
        assert dict(ddp._get_ddp_logging_data()) == sampled
        assert sampled["iteration"] == 3 and sampled["avg_backward_compute_time"] > 0

    on_ranks(case)


def test_planned_buckets_a_trace_and_a_plan_to_keep(tmp_path: Path) -> None:
    def case(communicator: LocalCommunicator, model: nn.Module) -> tuple[list[torch.Tensor], str]:
        ddp = wrapped(communicator, model, reduce=ReduceConfig(policy="planned", wire="bf16"))
        train(ddp, communicator.rank, 12)
        with ddp.record_trace(tmp_path):
            found = train(ddp, communicator.rank, 3)
        again = wrapped(communicator, copy.deepcopy(model), reduce=ReduceConfig(plan=ddp.plan_json()))
        train(again, communicator.rank, 2)
        return found, ddp.plan_json()

    results = on_ranks(case, normed)
    assert_same([found for found, _ in results])
    assert len({plan for _, plan in results}) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"rank{rank}.json" for rank in range(RANKS)]


# Comm hooks

Hook = Callable[[dist.ProcessGroup], tuple[Any, Callable[..., Any]]]
HOOKS: dict[str, Hook] = {
    "allreduce": lambda group: (group, default_hooks.allreduce_hook),
    "fp16": lambda group: (group, default_hooks.fp16_compress_hook),
    "fp16 around": lambda group: (group, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "PowerSGD": lambda group: (
        powerSGD_hook.PowerSGDState(group, 1, start_powerSGD_iter=2, min_compression_rate=1),
        powerSGD_hook.powerSGD_hook,
    ),
    "quantized": lambda group: (group, quantization_hooks.quantization_pertensor_hook),
}


@pytest.mark.parametrize("kind", KINDS, ids=["ours", "torch"])
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchs_comm_hooks(hook: str, kind: type[TorchDDP]) -> None:
    def case(communicator: LocalCommunicator, model: nn.Module) -> list[torch.Tensor]:
        ddp = wrapped(communicator, model, kind)
        ddp.register_comm_hook(*HOOKS[hook](ddp.process_group))
        before = loss_of(ddp(next(batches(communicator.rank)))).item()
        found = train(ddp, communicator.rank, 10)
        assert loss_of(ddp(next(batches(communicator.rank)))).item() < before
        return found

    assert_same(on_ranks(case))


@pytest.mark.parametrize("wire", ["native", "bf16", "fp16", *EXCHANGED])
def test_our_hook_on_torchs_wrapper_gives_our_wrappers_bits(wire: str) -> None:
    def hooked(communicator: LocalCommunicator, model: nn.Module) -> list[torch.Tensor]:
        ddp = wrapped(communicator, model, TorchDDP)
        state = fusedreduce.FusedHookState(ddp.process_group, grad_stats=True, check_finite="raise", **settings(wire))
        ddp.register_comm_hook(state, fusedreduce.fused_hook)
        found = train(ddp, communicator.rank)
        assert state.stats()["steps"] == 5
        return [*found, state.grad_norm()]

    def ours(communicator: LocalCommunicator, model: nn.Module) -> list[torch.Tensor]:
        ddp = wrapped(communicator, model, reduce=ReduceConfig(grad_stats=True, **settings(wire)))
        return [*train(ddp, communicator.rank), ddp.grad_norm()]

    both = [on_ranks(hooked, normed), on_ranks(ours, normed)]
    for results in both:
        assert_same(results)
    assert_same([result[:-1] for results in both for result in results])
    # torch's fp32 sums of squares depend on where in memory a gradient lies, which differs between the two.
    torch.testing.assert_close(both[0][0][-1], both[1][0][-1], rtol=1e-6, atol=0)


@pytest.mark.parametrize("ranks", [4, 6])
def test_our_hook_exchanges_in_two_levels_as_our_wrapper_does(ranks: int) -> None:
    """Two and three nodes of two ranks; biases are not encoded."""

    def large(_: int) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 160), nn.ReLU(), nn.Linear(160, 3))

    def hooked(communicator: LocalCommunicator, model: nn.Module) -> list[torch.Tensor]:
        ddp = wrapped(communicator, model, TorchDDP)
        state = fusedreduce.FusedHookState(ddp.process_group, "int8", ranks_per_node=2, check_finite="raise")
        ddp.register_comm_hook(state, fusedreduce.fused_hook)
        found = train(ddp, communicator.rank, 5)
        assert max(one.collectives for one in inside_hook(state).buckets) == (4 if ranks == 4 else 5)
        return found

    def ours(communicator: LocalCommunicator, model: nn.Module) -> list[torch.Tensor]:
        config = ReduceConfig(wire="int8", ranks_per_node=2)
        return train(wrapped(communicator, model, reduce=config), communicator.rank, 5)

    assert_same(on_ranks(hooked, large, ranks) + on_ranks(ours, large, ranks))


def test_states_with_other_options_over_one_group_have_levels_of_their_own() -> None:
    options: list[dict[str, Any]] = [
        {"wire": "bf16", "accumulation": "fp32"},
        {"wire": "int8", "ranks_per_node": 1},
        {"wire": "int8", "ranks_per_node": 2},
    ]

    def case(communicator: LocalCommunicator, _: nn.Module) -> list[type]:
        group, held = communicator.process_group(), []
        for some in options:
            ddp = TorchDDP(nn.Linear(64, 64, bias=False), process_group=group)
            state = fusedreduce.FusedHookState(group, **some)
            ddp.register_comm_hook(state, fusedreduce.fused_hook)
            ddp(torch.ones(1, 64)).sum().backward()
            held.append((ddp, state))
        return [type(bucket) for _, state in held for bucket in inside_hook(state).buckets]

    assert on_ranks(case, ranks=4) == [[AccumulatedBucket, EncodedBucket, TwoLevelBucket]] * 4


# What goes wrong


WAITS: dict[str, Callable[[LocalCommunicator, nn.Module], Any]] = {
    "ours": lambda communicator, model: wrapped(communicator, model),
    "torch": lambda communicator, model: wrapped(communicator, model, TorchDDP),
    "ours, a comm hook": lambda communicator, model: hooked(communicator, model, KINDS[0], HOOKS["allreduce"]),
    "torch, a comm hook": lambda communicator, model: hooked(communicator, model, TorchDDP, HOOKS["PowerSGD"]),
    "torch, ours": lambda communicator, model: hooked(
        communicator, model, TorchDDP, lambda group: (fusedreduce.FusedHookState(group), fusedreduce.fused_hook)
    ),
}


def hooked(communicator: LocalCommunicator, model: nn.Module, kind: type[TorchDDP], hook: Hook) -> Any:
    ddp = wrapped(communicator, model, kind)
    ddp.register_comm_hook(*hook(ddp.process_group))
    return ddp


@pytest.mark.parametrize("make", [normed, plain], ids=["in forward", "in backward"])
@pytest.mark.parametrize("how", WAITS)
def test_a_rank_that_does_not_come_is_named_within_the_timeout(how: str, make: Callable[[int], nn.Module]) -> None:
    """With buffers the others wait in forward, without them in backward."""

    def case(communicator: LocalCommunicator, model: nn.Module) -> str:
        ddp = WAITS[how](communicator, model)
        train(ddp, communicator.rank, 3)
        communicator.all_gather_bytes(b"", 0, torch.device("cpu"))
        communicator.group.timeout_s = 0.15
        if communicator.rank == 1:
            return "rank 1 did not issue it"
        with in_time(), pytest.raises(RuntimeError) as found:
            train(ddp, communicator.rank, 3)
        return str(found.value)

    for said in on_ranks(case, make):  # on a busy machine another may be late too
        assert re.search(r"ranks? (0, )?1(, 2)? did not issue it", said)


@pytest.mark.parametrize("how", WAITS)
def test_a_rank_that_dies_ends_the_others_at_once(how: str) -> None:
    said: dict[int, str] = {}

    def case(communicator: LocalCommunicator, model: nn.Module) -> None:
        ddp = WAITS[how](communicator, model)
        train(ddp, communicator.rank, 3)
        if communicator.rank == 1:
            raise KeyError("the data set has ended")
        try:
            train(ddp, communicator.rank, 3)
        except RuntimeError as error:
            said[communicator.rank] = str(error)
            raise

    with in_time(), pytest.raises(KeyError, match="the data set has ended"):
        on_ranks(case, timeout_s=2 * PATIENT_S)
    assert said.keys() == {0, 2} and all("rank 1 gave up: KeyError" in one for one in said.values())


def test_threads_and_memory_come_back() -> None:
    before = threading.active_count()
    kept: list[weakref.ref[Any]] = []

    def case(communicator: LocalCommunicator, model: nn.Module) -> None:
        for kind in KINDS:
            ddp = wrapped(communicator, copy.deepcopy(model), kind)
            ddp.register_comm_hook(*HOOKS["allreduce"](ddp.process_group))
            train(ddp, communicator.rank)
            kept.extend(map(weakref.ref, [communicator, ddp, *ddp.parameters(), ddp.process_group]))

    on_ranks(case, normed)
    TorchDDP._active_ddp_module = None  # torch's own in threads may leave one there
    gc.collect()
    assert threading.active_count() <= before  # one of another test may have ended
    assert [one() for one in kept if one() is not None] == []


def test_a_wrapper_in_a_thread_is_not_the_processs_active_one() -> None:
    class Asks(nn.Linear):
        def forward(self, given: torch.Tensor) -> torch.Tensor:
            assert TorchDDP._get_active_ddp_module() is None
            return super().forward(given)

    TorchDDP._active_ddp_module = None
    on_ranks(lambda communicator, model: train(wrapped(communicator, model), communicator.rank), lambda _: Asks(6, 3))


def test_a_wrapper_is_neither_pickled_nor_copied() -> None:
    def case(communicator: LocalCommunicator, model: nn.Module) -> None:
        ddp = wrapped(communicator, model)
        for attempt in (pickle.dumps, copy.deepcopy):
            with pytest.raises(RuntimeError, match="over a LocalGroup can be neither pickled nor copied"):
                attempt(ddp)
            with pytest.raises(TypeError, match="lives in this process only"):
                attempt(ddp.process_group)
        pickle.dumps(ddp.module)

    on_ranks(case)


def test_a_communicator_is_no_process_group() -> None:
    def case(communicator: LocalCommunicator, model: nn.Module) -> None:
        with pytest.raises(TypeError, match=r"give communicator.process_group\(\)"):
            fusedreduce.DistributedDataParallel(model, process_group=communicator)  # type: ignore[arg-type]

    on_ranks(case)


def test_where_one_thread_drives_all_ranks_the_constructor_says_so() -> None:
    with LocalGroup(2, one_thread=True, timeout_s=0.2) as group:
        first, _ = [group.communicator(rank) for rank in range(2)]
        with pytest.raises(CollectiveError, match="rank 1"):
            fusedreduce.DistributedDataParallel(plain(), process_group=first.process_group())


def test_where_ranks_share_an_autograd_thread_nothing_waits_in_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA: our wrapper ends its steps later, and whatever would wait says that it cannot."""
    monkeypatch.setattr(LocalCommunicator, "waits_in_backward", lambda self, device: False)

    def ours(communicator: LocalCommunicator, model: nn.Module) -> list[torch.Tensor]:
        ddp = wrapped(communicator, model)
        with ddp.join(divide_by_initial_world_size=False):
            train(ddp, communicator.rank, 3 + communicator.rank)
        return values(ddp)

    assert_same(on_ranks(ours, normed))
    for how in WAITS:
        if how == "ours":
            continue

        def case(communicator: LocalCommunicator, model: nn.Module, how: str = how) -> str:
            ddp = WAITS[how](communicator, model)
            with pytest.raises(RuntimeError) as found:
                train(ddp, communicator.rank)
            return str(found.value)

        for said in on_ranks(case):
            assert "on a thread that these ranks share" in said or "backward needs the same thread" in said


# The group, for torch's functions


def test_what_torchs_functions_can_do_with_the_group() -> None:
    def case(communicator: LocalCommunicator, model: nn.Module) -> None:
        rank, group = communicator.rank, communicator.process_group()
        assert (group.rank(), group.size(), group.name(), dist.get_world_size(group)) == (rank, RANKS, "local", RANKS)
        total = torch.tensor(rank + 1.0)
        dist.all_reduce(total, group=group)
        assert total.item() == 6
        for op, wanted in ((dist.ReduceOp.MAX, 3.0), (dist.ReduceOp.MIN, 1.0), (dist.ReduceOp.PRODUCT, 6.0)):
            one = torch.full((2, 2), rank + 1.0)
            work = dist.all_reduce(one, op, group=group, async_op=True)
            assert work is not None and work.wait() and work.is_completed() and work.is_success()
            assert work.exception() is None and work.result()[0] is one and one.eq(wanted).all()
        several = [torch.full((2,), complex(rank, 1)), torch.full((1,), float(rank))]
        group.allreduce(several).wait()
        assert several[0].tolist() == [3 + 3j] * 2 and several[1].tolist() == [3.0]
        sent = torch.full((2, 1), complex(rank))
        dist.broadcast(sent, group_src=1, group=group)
        assert sent.tolist() == [[1], [1]]
        rows = [torch.empty(1, 2) for _ in range(RANKS)]
        dist.all_gather(rows, torch.full((2, 1), float(rank)).t(), group=group)
        assert [row.tolist() for row in rows] == [[[0, 0]], [[1, 1]], [[2, 2]]]
        flat = torch.empty(2 * RANKS)
        dist.all_gather_into_tensor(flat, torch.full((2,), float(rank)), group=group)
        assert flat.tolist() == [0, 0, 1, 1, 2, 2]
        objects: list[Any] = [None] * RANKS
        dist.all_gather_object(objects, {"rank": rank}, group=group)
        assert objects == [{"rank": one} for one in range(RANKS)]
        objects = [rank, "x" * rank]
        dist.broadcast_object_list(objects, group_src=2, group=group)
        assert objects == [2, "xx"]
        reduced = torch.tensor([rank + 1.0])
        dist.reduce(reduced, group_dst=1, group=group)
        assert rank != 1 or reduced.item() == 6
        both = [torch.tensor([value], device="cpu") for value in (rank + 1.0, 2.0 * rank)]
        group.allreduce_coalesced(both).wait()
        assert [one.item() for one in both] == [6, 6]
        dealt = torch.empty(RANKS)
        dist.all_to_all_single(dealt, torch.arange(RANKS) + 10.0 * rank, group=group)
        assert dealt.tolist() == [10.0 * one + rank for one in range(RANKS)]
        kept, part = torch.arange(2 * RANKS).view(2, RANKS) + rank, torch.empty(1, 2, dtype=torch.int64)
        dist.reduce_scatter_tensor(part, kept, group=group)
        assert part.tolist() == [[6 * rank + 3, 6 * rank + 6]] and kept[0, 0].item() == rank
        after, before = (rank + 1) % RANKS, (rank - 1) % RANKS
        received = torch.zeros(2, dtype=torch.complex64)
        work = dist.isend(torch.full((2,), complex(rank)), group=group, group_dst=after)
        other = dist.irecv(received, group=group, group_src=before)
        assert (
            work is not None
            and work.wait()
            and other is not None
            and other.wait()
            and received.tolist() == [before] * 2
        )
        indices = torch.tensor([[rank, RANKS]])
        sparse = torch.sparse_coo_tensor(indices, torch.ones(2), (RANKS + 1,), check_invariants=True)
        dist.all_reduce(sparse, group=group)
        assert sparse.to_dense().tolist() == [1.0] * RANKS + [RANKS]
        dist.barrier(group=group)

    on_ranks(case)


def test_a_future_is_done_well_or_not() -> None:
    def case(communicator: LocalCommunicator, model: nn.Module) -> None:
        group, one = communicator.process_group(), torch.ones(2)
        future = group.allreduce([one]).get_future()
        assert future.done() and future.value()[0] is one and one.tolist() == [RANKS] * 2
        work = group.allreduce([torch.ones(2 + communicator.rank)])
        assert work.get_future().done() and not work.is_success()
        for future in (work.get_future(), work.get_future().then(lambda future: future.value())):
            with pytest.raises(RuntimeError, match="ranks issued different collectives"):
                future.wait()
        with pytest.raises(CollectiveError, match="ranks issued different collectives"):
            work.synchronize()
        assert isinstance(work.exception(), CollectiveError)

    on_ranks(case)


def test_a_result_lands_once_however_often_it_is_waited_for() -> None:
    def case(communicator: LocalCommunicator, model: nn.Module) -> None:
        rows = [torch.empty(2) for _ in range(RANKS)]
        mine = torch.full((2,), float(communicator.rank))
        work = dist.all_gather(rows, mine, group=communicator.process_group(), async_op=True)
        assert work is not None and work.wait() and rows[2].tolist() == [2.0, 2.0]
        rows[2].fill_(-1.0)
        assert work.is_success() and work.wait()
        assert rows[2].tolist() == [-1.0, -1.0], "the result is the caller's"

    on_ranks(case)


def test_what_the_group_cannot_do_says_so() -> None:
    def case(communicator: LocalCommunicator, model: nn.Module) -> None:
        group, one = communicator.process_group(), torch.ones(RANKS)
        for attempt, said in (
            (lambda: dist.reduce_scatter(torch.ones(1), [one] * RANKS, group=group), "has no reduce_scatter"),
            (lambda: dist.all_reduce(one, dist.ReduceOp.AVG, group=group), "AVG is not supported; use one of sum, max"),
            (lambda: dist.all_to_all_single(one, one, [1, 0, 2], [1, 0, 2], group=group), "equal parts"),
            (lambda: group.allreduce([one.to_sparse()], dist.ReduceOp.MAX), "only sum sparse tensors"),
            (lambda: group.send([one], (communicator.rank + 1) % RANKS, 7), "has no tags"),
            (lambda: dist.irecv(one, group=group), "has no recv_anysource"),
        ):
            with pytest.raises(NotImplementedError, match=said):
                attempt()
        # torch looks these up in its own table, which knows of no group of ours.
        for attempt in (
            lambda: dist.get_rank(group),
            lambda: dist.get_backend(group),
            lambda: dist.get_global_rank(group, 0),
            lambda: dist.broadcast(one, src=0, group=group),
            lambda: Join([wrapped(communicator, model)]),
        ):
            with pytest.raises(ValueError, match=r"not (been |)(initialized|registered)"):
                attempt()

    on_ranks(case)
