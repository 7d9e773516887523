"""DataParallel on CPU, with a thread per replica and with one: against one module on the whole batch.

fp64, so that what is compared differs by the order of a few additions: TOLERANCE of the largest element.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import pickle
import random
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import sweep
from support.data_parallel_models import (
    CLASSES,
    FEATURES,
    Calls,
    DefaultSubclass,
    DictSubclass,
    Experts,
    ListSubclass,
    NamedSubclass,
    Pair,
    Record,
    Seen,
    Slotted,
    Stores,
    Tied,
    TupleSubclass,
    batch,
    mlp,
)
from support.every_moment import Beside, at_line, moments
from support.inside import inside, is_dropped, runner_of, take_torch_path, turns_lock
from support.ranks import Program
from support.telling import addends
from support.timeouts import settles
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fusedreduce import FusedReduceError, ReduceConfig
from fusedreduce.comm.local.group import LocalGroup
from fusedreduce.config import Asynchronous, BoundedStaleness, Synchronous, SyncMode
from fusedreduce.parallel.data_parallel import DataParallel
from fusedreduce.parallel.replicas.local_sum import add_up, added_up_sparse, totals
from fusedreduce.parallel.replicas.replicate import Replicas
from fusedreduce.parallel.replicas.scatter_gather import flatten
from fusedreduce.parallel.replicas.thread_pool import Workers, let_openmp_threads_go, pause_openmp
from fusedreduce.reducer.reducer import Reducer

TOLERANCE = 1e-13
TIMEOUT_S = 60.0
BOTH_WAYS = pytest.mark.parametrize("threads", [True, False], ids=["threads", "one_thread"])
# On one device gradients are added up where they lie, unless something is to be observed, or a wire rounds.
BY_REDUCERS = ReduceConfig(check_finite="count")
BOTH_SUMS = pytest.mark.parametrize("reduce", [None, BY_REDUCERS], ids=["in_place", "reducers"])
Build = Callable[..., DataParallel]


def _replicas(dp: DataParallel) -> Replicas:
    return runner_of(dp).replicas


@pytest.fixture(autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The torch path, which is what CPU users get, unless the test is parametrized with another."""
    if getattr(request, "param", "torch") == "torch":
        take_torch_path(monkeypatch)


@pytest.fixture
def build() -> Iterator[Build]:
    """DataParallel on so many CPUs; closed at the end."""
    made: list[DataParallel] = []

    def make(module: nn.Module, world: int = 2, **options: Any) -> DataParallel:
        made.append(DataParallel(module, ["cpu"] * world, timeout_s=TIMEOUT_S, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def _gradients(module: nn.Module) -> list[torch.Tensor | None]:
    return [None if one.grad is None else one.grad.clone() for one in module.parameters()]


def _same(actual: nn.Module, expected: nn.Module) -> None:
    """Gradients are there on both, or on neither, and are equal but for the order of additions."""
    pairs = zip(actual.named_parameters(), expected.parameters(), strict=True)
    for (name, one), other in pairs:
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None and other.grad is not None:
            assert one.grad.layout is other.grad.layout, name
            _close(one.grad.to_dense(), other.grad.to_dense(), name)


def _close(one: torch.Tensor | None, other: torch.Tensor | None, what: str = "") -> None:
    assert one is not None and other is not None
    torch.testing.assert_close(one, other, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda text: f"{what}: {text}")


def _mse(module: Callable[..., Any], inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(module(inputs), targets)


# The truth: what one module does with the whole batch


@BOTH_WAYS
@BOTH_SUMS
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_gradients_are_those_of_the_whole_batch(
    build: Build, world: int, threads: bool, reduce: ReduceConfig | None
) -> None:
    module, one = mlp(), mlp()
    dp = build(module, world, threads=threads, reduce=reduce)
    for samples in (8, 11, 24):
        inputs, targets = batch(samples, seed=samples)
        _mse(dp, inputs, targets).backward()
        _mse(one, inputs, targets).backward()
        _same(module, one)
        module.zero_grad()
        one.zero_grad()


@BOTH_WAYS
@BOTH_SUMS
@pytest.mark.parametrize("together", [True, False], ids=["one_loss", "one_by_one"])
def test_forward_parallel_weighs_replicas_by_their_samples(
    build: Build, threads: bool, reduce: ReduceConfig | None, together: bool
) -> None:
    """What is there is not weighted again (a divisor of the whole `.grad` would)."""
    module, one = mlp(), mlp()
    dp = build(module, 3, threads=threads, reduce=reduce)
    for step in range(3):
        parts = [batch(samples, seed=10 * step + samples) for samples in (5, 1 + step, 3)]
        outputs = dp.forward_parallel([inputs for inputs, _ in parts])
        losses = [F.mse_loss(out, targets) for out, (_, targets) in zip(outputs, parts, strict=True)]
        for loss in [torch.stack(losses).sum()] if together else losses:
            loss.backward()
        _mse(one, torch.cat([inputs for inputs, _ in parts]), torch.cat([targets for _, targets in parts])).backward()
        _same(module, one)


def test_hundred_steps_equal_training_on_one_device(build: Build) -> None:
    module, one = mlp(), mlp()
    dp = build(module, 3)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, fused=True) for each in (module, one)]
    for step in range(100):
        inputs, targets = batch(random.Random(step).randrange(3, 20), seed=step)
        for each, optimizer in zip((dp, one), optimizers, strict=True):
            optimizer.zero_grad()
            _mse(each, inputs, targets).backward()
            optimizer.step()
    dp.verify_replicas()
    for mine, other in zip(module.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)  # 100 steps of Adam divide by small numbers


@pytest.mark.parametrize(
    ("path", "wire"), [("torch", "native"), ("torch", "fp16"), ("triton", "bf16")], indirect=["path"]
)
def test_both_ways_give_the_same_bytes(build: Build, wire: Any) -> None:
    found = []
    for threads in (True, False):
        module = mlp(torch.float32)
        dp = build(module, 3, threads=threads, reduce=ReduceConfig(wire=wire))
        for step in range(3):
            inputs, targets = batch(10, seed=step, dtype=torch.float32)
            _mse(dp, inputs, targets).backward()
        found.append(_gradients(module))
    for one, other in zip(*found, strict=True):
        assert one is not None and other is not None and torch.equal(one, other)


@given(st.data())
@sweep.sweep(100)
def test_adding_up_gives_what_reducers_give(data: st.DataObject) -> None:
    """Every element in exactly one share; the same bytes as through the reducers' wire."""
    world = data.draw(st.integers(1, 4))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]))
    shapes = data.draw(st.lists(st.sampled_from([(), (0,), (3,), (5, 7), (40,), (2, 3, 4)]), min_size=1, max_size=5))
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    drawn = [addends(world, shape, dtype) for shape in shapes]
    gradients = [
        [None if data.draw(st.booleans()) and data.draw(st.booleans()) else each[rank] for each in drawn]
        for rank in range(world)
    ]
    transposed = [[one.mT.contiguous().mT if one is not None and one.dim() > 1 else one for one in gradients[0]]]
    parameters = [[torch.zeros(shape, dtype=dtype, requires_grad=True) for shape in shapes] for _ in range(world)]
    for own, each in zip(parameters, gradients, strict=True):
        for parameter, gradient in zip(own, each, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()

    def reduce(communicator: Any) -> None:
        reducer = Reducer(
            parameters[communicator.rank],
            communicator,
            ReduceConfig(op="sum"),
            find_unused_parameters=True,
            agreed=True,
        )
        reducer.remove_hooks()
        reducer.prepare_for_backward()
        with torch.no_grad():
            for index in range(len(shapes)):
                inside(reducer).gradient_is_ready(index)

    with LocalGroup(world, timeout_s=TIMEOUT_S) as group:
        group.run(reduce)
    shares = data.draw(st.integers(1, 4))
    several = transposed + gradients[1:]
    for share in range(shares):
        add_up(several, share, shares)
    for total, parameter in zip(totals(several), parameters[0], strict=True):
        assert (total is None) == (parameter.grad is None)
        assert total is None or parameter.grad is None or torch.equal(total, parameter.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_adding_up_sparse_gradients_gives_what_ranks_give(world: int, dtype: torch.dtype) -> None:
    """Each with rows of its own, and some twice."""
    torch.manual_seed(world)
    gradients = [
        torch.sparse_coo_tensor(torch.tensor([[9, rank, 3, 3, 9]]), one, (12, 40), check_invariants=True)
        for rank, one in enumerate(addends(world, (5, 40), dtype))
    ]
    with LocalGroup(world, timeout_s=TIMEOUT_S) as group:
        found = group.run(lambda one: one.all_reduce_sparse(gradients[one.rank]).future().wait()[0].to_dense())
    dense = addends(world, (70,), dtype)
    total, beside, missing = added_up_sparse([[*each, None] for each in zip(gradients, dense, strict=True)])
    assert total is not None and total.is_coalesced() and total.dtype is dtype
    assert torch.equal(total.to_dense(), found[0])
    add_up([[one] for one in dense])
    assert beside is not None and torch.equal(beside, dense[0]) and missing is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_adding_up_keeps_to_the_order_of_replicas(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    replicas = [[one] for one in addends(4, (700,), dtype)]
    wide = [one.to(torch.float64 if dtype is torch.float64 else torch.float32) for (one,) in replicas]
    expected = (((wide[0] + wide[1]) + wide[2]) + wide[3]).to(dtype)
    add_up(replicas)
    assert torch.equal(replicas[0][0], expected)


def test_a_16_bit_wire_rounds_once(build: Build) -> None:
    module, one = mlp(torch.float32), mlp(torch.float32)
    dp = build(module, reduce=ReduceConfig(wire="bf16", op="mean"))  # op is a sum all the same
    inputs, targets = batch(8, dtype=torch.float32)
    _mse(dp, inputs, targets).backward()
    _mse(one, inputs, targets).backward()
    for mine, other in zip(module.parameters(), one.parameters(), strict=True):
        assert mine.grad is not None and other.grad is not None
        assert torch.equal(mine.grad, mine.grad.bfloat16().float())
        torch.testing.assert_close(mine.grad, other.grad, rtol=2**-6, atol=1e-3)


# Any module, any backward


class LastStates(nn.LSTM):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """The states of the last layer."""
        out: torch.Tensor = super().forward(inputs)[0]
        return out


def _two_forwards_in_one_loss(call: Callable[..., Any]) -> None:
    real, fake = batch(6, seed=1)[0], batch(7, seed=2)[0]
    (call(real).square().sum() - call(fake).sum() * call(real[:4]).mean()).backward()


def _backward_twice(call: Callable[..., Any]) -> None:
    loss = _mse(call, *batch(6))
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


def _squares_of(inputs: torch.Tensor) -> Callable[[Callable[..., Any]], None]:
    def program(call: Callable[..., Any]) -> None:
        call(inputs).square().sum().backward()

    return program


# How a module is made, and what is done with it.
PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Callable[[Callable[..., Any]], None]]] = {
    "two forwards in one loss": (mlp, _two_forwards_in_one_loss),
    "backward twice": (mlp, _backward_twice),
    "tied, frozen and listed parameters": (Tied, _squares_of(torch.linspace(-1, 1, 20).double().view(5, 4))),
    "sparse gradients": (
        lambda: nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2)).double(),
        _squares_of(torch.tensor([1, 4, 4, 7, 1])),
    ),
    "recurrent layers": (
        lambda: LastStates(3, 4, batch_first=True).double(),
        _squares_of(torch.linspace(-1, 1, 105).double().view(5, 7, 3)),
    ),
}


@BOTH_WAYS
@BOTH_SUMS
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_those_of_the_module_alone(
    build: Build, name: str, threads: bool, reduce: ReduceConfig | None
) -> None:
    make, program = PROGRAMS[name]
    torch.manual_seed(0)
    module = make()
    one = copy.deepcopy(module)
    program(build(module, threads=threads, reduce=reduce))
    program(one)
    _same(module, one)


@BOTH_WAYS
@BOTH_SUMS
def test_gradients_accumulate(build: Build, threads: bool, reduce: ReduceConfig | None) -> None:
    module, one = mlp(), mlp()
    dp = build(module, threads=threads, reduce=reduce)
    for step in range(6):
        inputs, targets = batch(5 + step, seed=step)
        local = step % 3 == 1
        if local:
            with dp.no_sync():
                loss = _mse(dp, inputs, targets)
            loss.backward()
        else:
            _mse(dp, inputs, targets).backward()
        _mse(one, inputs, targets).backward()
        _same(module, one)


def test_zero_grad_of_the_optimizer_leaves_nothing_behind(build: Build) -> None:
    module, one = mlp(), mlp()
    dp = build(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with dp.no_sync():
        _mse(dp, *batch(9, seed=1)).backward()
    optimizer.zero_grad()
    for each in (dp, one):
        _mse(each, *batch(6, seed=2)).backward()
    _same(module, one)


@BOTH_WAYS
def test_autograd_grad_and_backward_of_some_inputs(build: Build, threads: bool) -> None:
    module, one = mlp(), mlp()
    dp = build(module, threads=threads)
    inputs = batch(6)[0].requires_grad_()
    grads = []
    for each, owner in ((dp, module), (one, one)):
        grads.append(torch.autograd.grad(each(inputs).square().sum(), [inputs, *owner.parameters()]))
        assert all(parameter.grad is None for parameter in owner.parameters()), "nothing is accumulated"
        first = next(owner.parameters())
        each(inputs).square().sum().backward(inputs=[first])
        assert first.grad is not None and sum(one.grad is not None for one in owner.parameters()) == 1
    _same(module, one)
    for mine, other in zip(*grads, strict=True):
        _close(mine, other)


@BOTH_WAYS
@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_of_gradients_are_refused(build: Build, threads: bool) -> None:
    dp = build(mlp(), threads=threads)
    inputs, targets = batch(4)
    with pytest.raises(RuntimeError, match="create_graph=True"):
        _mse(dp, inputs, targets).backward(create_graph=True)
    _mse(dp, inputs, targets).backward()


def test_hooks_on_parameters_see_the_sum_once(build: Build) -> None:
    module, one = mlp(), mlp()
    dp = build(module)
    seen: list[torch.Tensor] = []
    for each in (module, one):
        weight = next(each.parameters())
        weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        weight.register_post_accumulate_grad_hook(lambda one: seen.append(one.grad.clone()))
    for each in (dp, one):
        _mse(each, *batch(8)).backward()
    _same(module, one)
    assert len(seen) == 2
    _close(seen[0], seen[1])


@BOTH_WAYS
def test_checkpoints_within_and_around(build: Build, threads: bool) -> None:
    for reentrant in (True, False):
        inner, one = mlp(), mlp()
        wrapped = Calls(lambda module, x, re=reentrant: checkpoint(module.inner, x, use_reentrant=re))
        wrapped.add_module("inner", inner)
        dp = build(wrapped, threads=threads)
        inputs, targets = batch(6)
        for each in (dp, one):
            _mse(each, inputs.clone().requires_grad_(), targets).backward()
        _same(inner, one)

        module, plain = mlp(), mlp()
        dp = build(module, threads=threads)
        F.mse_loss(checkpoint(dp, inputs.clone().requires_grad_(), use_reentrant=reentrant), targets).backward()
        _mse(plain, inputs, targets).backward()
        _same(module, plain)


def test_forward_without_gradients_does_not_touch_the_reducers(build: Build) -> None:
    module = mlp()
    dp = build(module, reduce=BY_REDUCERS)
    inputs, targets = batch(6)
    with torch.no_grad():
        assert not dp(inputs).requires_grad
    dp.eval()
    dp(inputs)
    assert [one.steps for one in dp.reducers] == [0, 0]
    _mse(dp, inputs, targets).backward()
    assert [one.steps for one in dp.reducers] == [1, 1]
    assert all(own.grad is None for one in dp.reducers for own in one.parameters), "replicas keep no gradients"


# Modes


def test_what_sums_that_come_later_refuse(build: Build) -> None:
    module: Any = mlp()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    dp = build(module, reduce=ReduceConfig(sync_mode=BoundedStaleness(1)))
    _mse(dp, *batch(7)).backward()
    with pytest.raises(ValueError, match="not both"):
        dp.flush(optimizer, step=optimizer.zero_grad)
    module[0].weight.requires_grad_(False)
    with pytest.raises(FusedReduceError, match=r"in flight: call flush\(\)"):
        dp(batch(6)[0])
    module[0].weight.requires_grad_(True)
    assert dp.flush(optimizer).steps == 1
    dp.set_sync_mode(Synchronous())
    assert dp.reducers == ()


# Which parameters


@BOTH_WAYS
@BOTH_SUMS
@pytest.mark.parametrize("zeros", [(0, 0), (0, 1), (1, 1)])
def test_replicas_use_different_parameters(
    build: Build, zeros: tuple[int, int], threads: bool, reduce: ReduceConfig | None
) -> None:
    module, one = Experts(), Experts()
    dp = build(module, threads=threads, reduce=reduce)
    first, second = (torch.tensor([[float(zero), 2.0], [float(zero), 3.0]], dtype=torch.float64) for zero in zeros)
    dp(torch.cat([first, second])).sum().backward()
    (one(first).sum() + one(second).sum()).backward()
    _same(module, one)
    assert module.never.weight.grad is None


# The module changes


def test_what_changes_of_the_module_is_seen(build: Build) -> None:
    layers = [(nn.Linear(6, 6), nn.Dropout(0.0), nn.Linear(6, 3)) for _ in range(2)]
    module: Any
    one: Any
    module, one = (nn.Sequential(*three).double() for three in layers)
    one.load_state_dict(module.state_dict())
    dp = build(module)
    calls: list[str] = []

    def compare() -> None:
        inputs, targets = batch(6)
        module.zero_grad()
        one.zero_grad()
        _mse(dp, inputs, targets).backward()
        _mse(one, inputs, targets).backward()
        _same(module, one)

    compare()
    for each in (module, one):
        each[1].p = 1.0  # everything is dropped
        each[0].register_forward_hook(lambda *_: calls.append(threading.current_thread().name))
    compare()
    assert len(calls) == 3, "hooks run once per replica"
    for each in (module, one):
        each[1].eval()
        each[0].weight.requires_grad_(False)
    compare()
    for each in (module, one):
        each[0].weight.requires_grad_(True)
        torch.manual_seed(3)
        each.append(nn.Linear(3, 3).double())
    compare()
    for each in (module, one):
        each[0].weight.data = each[0].weight.data.clone() * 2
        each.load_state_dict({name: value + 1 for name, value in each.state_dict().items()})
    compare()
    for each in (module, one):
        each.load_state_dict({name: value - 1 for name, value in each.state_dict().items()}, assign=True)
    compare()
    for each in (module, one):
        each[2].weight = nn.Parameter(torch.ones(3, 6, dtype=torch.float64))
    compare()
    dp.verify_replicas()
    module.float()
    one.float()
    inputs, targets = batch(6, dtype=torch.float32)
    module.zero_grad()
    _mse(dp, inputs, targets).backward()
    assert all(each.grad is not None and each.grad.dtype is torch.float32 for each in module.parameters())


def test_a_weight_changed_between_forward_and_backward(build: Build) -> None:
    module: Any = mlp()
    dp = build(module)
    loss = _mse(dp, *batch(6))
    with torch.no_grad():
        module[2].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    _mse(dp, *batch(6)).backward()


def test_buffers_follow_replica_0(build: Build) -> None:
    one: Any = nn.BatchNorm1d(3).double()
    module: Any = nn.BatchNorm1d(3).double()
    dp = build(module)
    inputs = torch.randn(9, 3, dtype=torch.float64)
    losses = [dp(inputs).square().sum(), dp(inputs + 1).square().sum()]  # both before either is run backward
    torch.stack(losses).sum().backward()
    one(inputs[:5])
    one((inputs + 1)[:5])
    _close(module.running_mean, one.running_mean)
    assert int(module.num_batches_tracked) == 2
    dp(inputs)
    first, second = (own[0] for own in _replicas(dp).trained_by)
    assert first is not second and first.data_ptr() == second.data_ptr() == module.weight.data_ptr()


def test_a_buffer_that_is_replaced_stays_so(build: Build) -> None:
    def call(module: Any, inputs: torch.Tensor) -> Any:
        module.total = module.total + inputs.sum()
        return inputs * module.weight

    module: Any = Calls(call)
    module.register_buffer("total", torch.zeros((), dtype=torch.float64))
    dp = build(module)
    dp(torch.ones(4, 2, dtype=torch.float64))
    dp(torch.ones(4, 2, dtype=torch.float64))
    assert float(module.total) == 8.0, "what replica 0 has seen"


# Inputs and outputs


_leaves = st.one_of(st.integers(), st.text(max_size=3), st.just(torch.ones(2)), st.none())
_nested = st.recursive(
    _leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.builds(Pair, inner, inner),
        st.builds(NamedSubclass, inner, inner),
        st.lists(inner, max_size=3).map(ListSubclass),
        st.lists(inner, max_size=3).map(TupleSubclass),
        st.dictionaries(st.text(max_size=2), inner, max_size=3).map(DictSubclass),
        st.dictionaries(st.text(max_size=2), inner, max_size=3).map(lambda found: DefaultSubclass(list, found)),
        st.builds(Record, inner, st.dictionaries(st.text(max_size=2), inner, max_size=2)),
    ),
    max_leaves=12,
)


@given(_nested)
@sweep.sweep(100)
def test_flatten_takes_apart_and_builds_again(value: object) -> None:
    nested = flatten(value)
    again = flatten(nested.rebuild(nested.leaves))
    assert again.shape == nested.shape
    assert len(again.leaves) == len(nested.leaves)
    assert all(one is other for one, other in zip(again.leaves, nested.leaves, strict=True))


CONTAINERS: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], Any], Callable[[Any], Any]]] = {
    "dict": (lambda a, b: DictSubclass(a=a, b=b), lambda box: (box["a"], box["b"])),
    "defaultdict": (lambda a, b: DefaultSubclass(list, a=a, b=b), lambda box: (box["a"], box["b"])),
    "list": (lambda a, b: ListSubclass([a, b]), tuple),
    "tuple": (lambda a, b: TupleSubclass([a, b]), tuple),
    "namedtuple": (NamedSubclass, tuple),
    "in a dict": (lambda a, b: {"x": [DictSubclass(a=a, b=[b])]}, lambda box: (box["x"][0]["a"], box["x"][0]["b"][0])),
    "in a dataclass": (lambda a, b: Record(a, DictSubclass(b=b)), lambda box: (box.logits, box.extra["b"])),
}


@BOTH_WAYS
@pytest.mark.parametrize("kind", CONTAINERS)
def test_subclasses_of_containers_are_scattered_and_gathered(build: Build, threads: bool, kind: str) -> None:
    pack, unpack = CONTAINERS[kind]

    def noted(box: Any) -> Any:
        if kind in ("dict", "list", "tuple"):  # (copies of a defaultdict have no attributes, nor has what pytree knows)
            box.note = "kept"
        return box

    def call(module: Calls, box: Any) -> Any:
        first, second = unpack(box)
        assert getattr(box, "note", "") == getattr(noted(copy.copy(box)), "note", ""), "an attribute is lost"
        sizes.append(len(first))
        return noted(pack(first * module.weight, second + module.weight))

    sizes: list[int] = []
    inputs, targets = batch(7)
    module, alone = Calls(call), Calls(call)
    mine, other = (each(noted(pack(inputs, targets))) for each in (build(module, 2, threads=threads), alone))
    assert sorted(sizes) == [3, 4, 7]
    assert type(mine) is type(other) and getattr(mine, "note", "") == getattr(other, "note", "")
    for ours, theirs in zip(unpack(mine), unpack(other), strict=True):
        assert torch.equal(ours, theirs)
    for box in (mine, other):
        sum(part.square().sum() for part in unpack(box)).backward()
    _same(module, alone)


def test_containers_without_tensors_are_handed_on_as_they_are(build: Build) -> None:
    ring = DictSubclass(a=1)
    ring["all"] = ring
    given = (DictSubclass(a=1), time.gmtime(0))

    def call(module: Calls, x: torch.Tensor, *others: Any) -> torch.Tensor:
        assert others[:-1] == given and list(map(type, others[:-1])) == list(map(type, given)) and others[-1] is ring
        return x * module.weight

    assert len(build(Calls(call))(torch.ones(4, 2, dtype=torch.float64), *given, ring)) == 4


@BOTH_WAYS
def test_nested_arguments_and_outputs(build: Build, threads: bool) -> None:
    def call(module: Calls, pair: Pair, *, extra: dict[str, Any], factor: torch.Tensor, name: str) -> Any:
        logits = (pair.logits * module.weight + extra["bias"][0]) * factor
        return {
            "pair": Pair(logits, pair.hidden),
            "record": Record(logits.sum(dim=1), {"name": name, "ids": pair.hidden.argmax(dim=1), "none": None}),
            "list": [extra["bias"][0]],
        }

    def give(dp: Callable[..., Any]) -> Any:
        extra = {"bias": [torch.arange(7.0, dtype=torch.float64).reshape(7, 1)]}
        pair = Pair(inputs, targets)
        return dp(pair, extra=extra, factor=torch.tensor(3.0, dtype=torch.float64), name="x")

    inputs, targets = batch(7)
    module, one = Calls(call), Calls(call)
    found = give(build(module, 3, threads=threads)), give(one)
    for mine, other in zip(*(flatten(each).leaves for each in found), strict=True):
        assert type(mine) is type(other)
        if isinstance(mine, torch.Tensor):
            assert torch.equal(mine, other) and mine.requires_grad == other.requires_grad
    for each in found:
        (each["pair"].logits.sum() + each["record"].logits.square().sum()).backward()
    _same(module, one)


@BOTH_WAYS
def test_another_dimension_and_inputs_that_are_returned(build: Build, threads: bool) -> None:
    module, one = (Calls(lambda module, x: (x, x * module.weight)) for _ in range(2))
    dp = build(module, 2, dim=1, threads=threads)
    found = []
    for each in (dp, one):
        inputs = torch.arange(10.0, dtype=torch.float64).reshape(2, 5).requires_grad_()
        same, out = each(inputs)
        assert torch.equal(same, inputs)
        (same.square().sum() + out.sum()).backward()
        found.append(inputs.grad)
    _same(module, one)
    _close(found[0], found[1])


def test_outputs_may_be_changed_in_place(build: Build) -> None:
    module, one = mlp(), mlp()
    for world in (1, 2):
        dp = build(module, world)
        for each in (dp, one):
            out = each(batch(4)[0])
            out.mul_(3).relu_()
            out.sum().backward()
        _same(module, one)
        outputs = dp.forward_parallel([batch(4)[0]] * world)
        for out in outputs:
            out.mul_(2)
        module.zero_grad()
        one.zero_grad()


@BOTH_WAYS
def test_scalar_outputs_make_a_vector(build: Build, threads: bool) -> None:
    module, one = (Calls(lambda module, x: (x * module.weight).mean()) for _ in range(2))
    dp = build(module, threads=threads)
    inputs = torch.arange(6.0, dtype=torch.float64)
    with pytest.warns(UserWarning, match="scalar"):
        out = dp(inputs)
    assert out.shape == (2,)
    out.mean().backward()
    one(inputs).backward()
    _same(module, one)


def test_outputs_that_cannot_be_gathered(build: Build) -> None:
    inputs = torch.arange(4.0, dtype=torch.float64)
    dp = build(Calls(lambda _, x: float(x[0])))
    with pytest.raises(ValueError, match="differs between replicas.*forward_parallel"):
        dp(inputs)
    assert dp.forward_parallel([inputs[:2], inputs[2:]]) == [0.0, 2.0]
    dp = build(Calls(lambda _, x: [x] * (1 + int(x[0] > 0))))
    with pytest.raises(ValueError, match="nested differently from"):
        dp(inputs)
    dp = build(Calls(lambda _, x: x if x[0] > 0 else "none"))
    with pytest.raises(ValueError, match="some replicas"):
        dp(inputs)
    with pytest.raises(ValueError, match=r"output 1 cannot be concatenated.*\(1, 3, 4\), \(1, 2, 4\)"):
        build(nn.LSTM(3, 4, batch_first=True))(torch.ones(5, 7, 3))


def test_gradients_enter_the_input_of_forward_parallel_weighted(build: Build) -> None:
    """What the inputs were made of gets the gradient of the same mean as the parameters do."""
    before = nn.Linear(FEATURES, FEATURES).double()
    module = mlp()
    one, before_one = copy.deepcopy(module), copy.deepcopy(before)
    dp = build(module)
    inputs, targets = batch(5)
    cut = [slice(0, 1), slice(1, 5)]
    outputs = dp.forward_parallel([before(inputs[part]) for part in cut])
    torch.stack([F.mse_loss(out, targets[part]) for out, part in zip(outputs, cut, strict=True)]).sum().backward()
    _mse(lambda x: one(before_one(x)), inputs, targets).backward()
    _same(module, one)
    _same(before, before_one)


# Bad input


@pytest.mark.parametrize(
    ("devices", "message"),
    [([], "at least one device"), (["cpu", "cuda:0"], "of one type"), (["meta", "meta"], "CPUs or CUDA")],
)
def test_bad_devices(devices: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataParallel(mlp(), devices)


def test_bad_modules() -> None:
    with pytest.raises(ValueError, match="not initialised"):
        DataParallel(nn.LazyLinear(3), ["cpu"])
    with pytest.raises(ValueError, match="weight is on meta"):
        DataParallel(nn.Linear(3, 3, device="meta"), ["cpu"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.Linear(3, 3))
    with pytest.raises(TypeError, match="TorchScript"):
        DataParallel(scripted, ["cpu"])
    with pytest.raises(TypeError, match=r"nn\.Module"):
        DataParallel(lambda x: x, ["cpu"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout_s"):
        DataParallel(mlp(), ["cpu"], timeout_s=0)


def test_bad_inputs(build: Build) -> None:
    dp = build(mlp(), 3)
    inputs, _ = batch(6)
    with pytest.raises(ValueError, match="2 samples cannot be divided among 3"):
        dp(inputs[:2])
    with pytest.raises(ValueError, match="2 inputs, expected one for each of 3 devices"):
        dp.forward_parallel([inputs, inputs])
    with pytest.raises(ValueError, match="4 inputs, expected one for each of 3 devices"):
        dp.forward_parallel([inputs] * 4)
    with pytest.raises(ValueError, match="input 1 has no samples"):
        dp.forward_parallel([inputs, inputs[:0], inputs])
    with pytest.raises(ValueError, match="different numbers of samples.*6.*5"):
        dp(inputs, inputs[:5])
    with pytest.raises(ValueError, match="no tensor with dimensions"):
        dp(3)
    packed = nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    for hidden in (packed, [packed], DictSubclass(x=[packed])):
        with pytest.raises(TypeError, match="PackedSequence"):
            dp(hidden)
        with pytest.raises(TypeError, match="PackedSequence"):
            dp.forward_parallel([hidden] * 3)
    with pytest.raises(ValueError, match="no dimension 1"):
        build(mlp(), 2, dim=1)(torch.ones(3, dtype=torch.float64))
    dp.close()
    dp.close()
    for call in (lambda: dp(inputs), lambda: dp.forward_parallel([inputs] * 3), dp.verify_replicas):
        with pytest.raises(ValueError, match="closed"):
            call()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_replicas_that_share_a_device_are_slower_and_it_says_so(
    build: Build, world: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, when it is made; not where one replica has all threads."""
    dp = build(mlp(), world)
    for _ in range(2):
        _mse(dp, *batch(6)).backward()
    said = [(one.levelname, one.name, one.message) for one in caplog.records]
    if world == 1:
        assert said == []
        return
    ((level, name, message),) = said
    assert (level, name) == ("WARNING", "fusedreduce.parallel.data_parallel")
    assert message.startswith(f"{world} replicas share cpu, which takes as long as one replica with all of its threads")
    for instead in ("the module itself", "a GPU per replica", "a process per device with DistributedDataParallel"):
        assert instead in message


def test_verify_finds_a_planted_difference(build: Build) -> None:
    module = mlp()
    dp = build(module, 3)
    dp.verify_replicas()
    planted = _replicas(dp).trained_by[2][2]
    planted.data = planted.detach().clone()
    planted.data[0, 0] += 1e-9
    with pytest.raises(FusedReduceError, match=r"2\.weight on replica 2"):
        dp.verify_replicas()
    dp(batch(6)[0])  # mends it
    dp.verify_replicas()


# What goes wrong


@BOTH_WAYS
def test_an_error_in_a_forward(build: Build, threads: bool) -> None:
    def call(module: Calls, inputs: torch.Tensor) -> torch.Tensor:
        if inputs[0] == 4.0:
            raise KeyError("a fault of its own")
        return inputs * module.weight

    dp = build(Calls(call), threads=threads)
    with pytest.raises(KeyError, match="a fault of its own") as caught:
        dp(torch.tensor([1.0, 2.0, 4.0, 5.0], dtype=torch.float64))
    assert any("replica 1 of 2, on cpu" in note for note in caught.value.__notes__)
    dp(torch.ones(4, dtype=torch.float64)).sum().backward()


@BOTH_WAYS
def test_an_error_in_a_backward(build: Build, threads: bool) -> None:
    def fails(_: torch.Tensor) -> None:
        raise KeyError("a fault of its own")

    def call(module: Calls, inputs: torch.Tensor) -> torch.Tensor:
        out = inputs * module.weight / 2
        if inputs[0] == 4.0:
            out.register_hook(fails)
        return out

    module, one = Calls(call), Calls(call)
    dp = build(module, threads=threads)
    began = time.monotonic()
    for _ in range(2):
        with pytest.raises(KeyError, match="a fault of its own"):
            dp(torch.tensor([1.0, 2.0, 4.0, 5.0], dtype=torch.float64)).sum().backward()
        assert module.weight.grad is None
        inputs = torch.ones(4, dtype=torch.float64)
        for each in (dp, one):
            each(inputs).sum().backward()
        _same(module, one)
        module.zero_grad()
        one.zero_grad()
    assert time.monotonic() - began < TIMEOUT_S / 2, "nobody waited for a replica that had given up"


@BOTH_WAYS
def test_an_error_in_the_reduction(build: Build, threads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module, one = mlp(), mlp()
    dp = build(module, 3, threads=threads, reduce=BY_REDUCERS)
    original = Reducer.prepare_for_backward

    def prepare(self: Reducer, *args: Any, **kwargs: Any) -> None:
        if self is faulty:
            raise MemoryError("no room")
        original(self, *args, **kwargs)

    faulty: Reducer | None = dp.reducers[1]
    monkeypatch.setattr(Reducer, "prepare_for_backward", prepare)
    began = time.monotonic()
    with pytest.raises(MemoryError, match="no room"):
        _mse(dp, *batch(6)).backward()
    assert time.monotonic() - began < TIMEOUT_S / 2
    assert all(parameter.grad is None for parameter in module.parameters())
    faulty = None
    for each in (dp, one):
        _mse(each, *batch(7, seed=1)).backward()
    _same(module, one)


def test_an_interrupt_waits_for_the_workers(build: Build) -> None:
    """Nobody writes gradients afterwards."""

    def slow(gradient: torch.Tensor) -> None:
        started.release()
        sent.wait(TIMEOUT_S)
        time.sleep(0.2)
        ended.append(1)

    def call(module: Calls, inputs: torch.Tensor) -> torch.Tensor:
        out = inputs * module.weight
        out.register_hook(slow)
        return out

    started, sent, ended = threading.Semaphore(0), threading.Event(), list[int]()
    module = Calls(call)
    dp = build(module)
    out = dp(torch.ones(4, dtype=torch.float64)).sum()
    main = threading.get_ident()

    def interrupt() -> None:
        for _ in range(2):  # a job that has not begun never would
            started.acquire()
        signal.pthread_kill(main, signal.SIGINT)
        sent.set()

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        out.backward()
    assert len(ended) == 2 and module.weight.grad is None
    dp(torch.ones(4, dtype=torch.float64)).sum().backward()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # where one comes within a callback
@BOTH_WAYS
@pytest.mark.parametrize("late", [0, 1])
def test_interrupts_at_any_moment(build: Build, threads: bool, late: int) -> None:
    """Nothing waits for ever, and the next backward gives what it should. Some come while another is dealt with."""
    module, one = mlp(), mlp()
    inputs, targets = batch(8)
    _mse(one, inputs, targets).backward()
    config = ReduceConfig(sync_mode=BoundedStaleness(late), check_finite="count")
    armed, main, chance = threading.Event(), threading.get_ident(), random.Random(late)

    def on_signal(*_: object) -> None:
        if armed.is_set():
            raise KeyboardInterrupt

    def interrupt(delays: list[float]) -> None:
        for delay in delays:
            time.sleep(delay)
            signal.pthread_kill(main, signal.SIGINT)

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        for _ in range(6):
            dp = build(module, 2, threads=threads, reduce=config)
            delays = [chance.random() * 0.004 for _ in range(chance.choice([1, 1, 2]))]
            kicker = threading.Thread(target=interrupt, args=(delays,))
            with contextlib.suppress(KeyboardInterrupt):
                armed.set()
                kicker.start()
                while kicker.is_alive():
                    _mse(dp, inputs, targets).backward()
            with contextlib.suppress(KeyboardInterrupt):
                armed.clear()
            armed.clear()
            kicker.join()
            for _ in range(1 + late):
                dp.zero_grad()
                _mse(dp, inputs, targets).backward()
            _same(module, one)
            dp.close()
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("mode", [Synchronous(), BoundedStaleness(1), Asynchronous(1)], ids=str)
def test_inputs_get_gradients_where_nothing_is_trained(build: Build, mode: SyncMode) -> None:
    """Nothing is in flight afterwards, and nothing waits to be reduced."""
    dp = build(nn.ReLU(), reduce=ReduceConfig(sync_mode=mode))
    inputs = torch.tensor([-1.0, 2.0, 3.0], requires_grad=True)
    for synchronised in (True, False):
        with contextlib.nullcontext() if synchronised else dp.no_sync():
            dp(inputs).sum().backward()
        assert dp.reducers == () and dp.reduce_state_dict() == {} and dp.flush().steps == 0
        dp.set_sync_mode(mode)
    assert inputs.grad is not None and inputs.grad.tolist() == [0.0, 2.0, 2.0]


@BOTH_WAYS
def test_a_step_of_flush_that_raises(build: Build, threads: bool) -> None:
    """What had not landed is given up, and the next backward works."""
    module, one = mlp(), mlp()
    dp = build(module, threads=threads, reduce=ReduceConfig(sync_mode=BoundedStaleness(2)))
    for _ in range(2):
        _mse(dp, *batch(6)).backward()
    with pytest.raises(ZeroDivisionError):
        dp.flush(step=lambda: 1 // 0)  # type: ignore[arg-type]
    dp.zero_grad()
    _mse(dp, *batch(7)).backward()
    _mse(one, *batch(7)).backward()
    assert dp.flush().steps == 1
    _same(module, one)


def test_calls_within_itself_are_errors_and_no_deadlocks(build: Build) -> None:
    dp = build(Calls(lambda module, x: dp(x)))
    with pytest.raises(FusedReduceError, match="within its own replicas"):
        dp(torch.ones(4))
    stale = build(mlp(), reduce=ReduceConfig(sync_mode=BoundedStaleness(1)))
    _mse(stale, *batch(6)).backward()
    with pytest.raises(FusedReduceError, match=r"flush\(\) calls"):
        stale.flush(step=lambda: stale(batch(6)[0]))


@BOTH_SUMS
def test_backward_after_close_is_an_error(build: Build, reduce: ReduceConfig | None) -> None:
    dp = build(mlp(), reduce=reduce)
    loss = _mse(dp, *batch(6))
    dp.close()
    another = build(dp.module, reduce=reduce)  # has the parameters now
    with pytest.raises(FusedReduceError, match="this DataParallel is closed: its outputs"):
        loss.backward()
    for use in (lambda: dp.reducers, lambda: dp.gradients, dp.flush, dp.reduce_state_dict):
        with pytest.raises(ValueError, match="this DataParallel is closed: make a new one"):
            use()
    _mse(another, *batch(6)).backward()


@BOTH_WAYS
@BOTH_SUMS
def test_close_at_any_moment_of_a_step(build: Build, threads: bool, reduce: ReduceConfig | None) -> None:
    """It waits for what runs; what comes later raises. Nothing is made anew."""
    module, other = mlp(), mlp()
    inputs, targets = batch(6)
    _mse(other, inputs, targets).backward()
    before = threading.active_count()
    for moment in moments(int(reduce is None), 2):
        module.zero_grad()
        dp = build(module, threads=threads, reduce=reduce)
        closes = Beside(dp.close, [turns_lock(dp)])
        said = list[str]()
        with at_line(moment, ["parallel/data_parallel", "replicas/runner", "replicas/autograd"], closes.begin) as where:
            try:
                loss = _mse(dp, inputs, targets)
                loss.backward()
            except (ValueError, FusedReduceError) as error:
                said.append(f"{type(error).__name__}: {error}")
        closes.end()
        if said:
            assert said[0] in (
                "ValueError: this DataParallel is closed: make a new one of its .module",
                "FusedReduceError: this DataParallel is closed: its outputs cannot be run backward any more",
            ), (moment, where, said)
            assert all(one.grad is None for one in module.parameters())
        else:
            _same(module, other)
        assert is_dropped(dp), (moment, where)
        assert threading.active_count() == before, (moment, where)
        if not where:
            break
    assert moment > 20


# A process of its own forks: in a child of one with a long history torch crashes now and then.
FORKS = """
import copy, os, torch
from torch import nn
from fusedreduce.parallel.data_parallel import DataParallel
torch.manual_seed(0)
module = nn.Sequential(nn.PReLU(), nn.LayerNorm(6), nn.PReLU()).double()
plain, data = copy.deepcopy(module), torch.randn(7, 6, dtype=torch.float64)
dp = DataParallel(module, ["cpu"] * 2, timeout_s=20.0)
dp(data)
child = os.fork()
dp(data).square().sum().backward()
plain(data).square().sum().backward()
for one, other in zip(module.parameters(), plain.parameters()):
    torch.testing.assert_close(one.grad, other.grad, rtol=1e-13, atol=1e-13)
if child:
    assert os.waitpid(child, 0) == (child, 0)
"""


def test_a_forked_process_has_threads_of_its_own() -> None:
    Program(FORKS).printed()


def test_openmp_threads_are_let_go_and_none_are_left() -> None:
    """Else they spin beside the workers; and more of them than cores would keep the caller's from it for good."""
    if pause_openmp() is None:
        pytest.skip("torch's OpenMP cannot pause")

    def settles_at(expected: int) -> bool:
        return settles(lambda: len(os.listdir("/proc/self/task")) == expected)  # an ended one is listed a little longer

    def work() -> None:
        torch.ones(1 << 18).add_(1)

    intra_op = torch.get_num_threads()
    try:
        for count in (2, 4):
            torch.set_num_threads(count)
            let_openmp_threads_go()
            time.sleep(0.1)
            alone = len(os.listdir("/proc/self/task"))
            workers = Workers(2, "test")
            work()
            assert settles_at(alone + 2 + count - 1)
            workers.run([work, work])
            assert settles_at(alone + 2)
            workers.stop_threads()
    finally:
        torch.set_num_threads(intra_op)


# What threads take over


def test_workers_take_the_callers_modes_over(build: Build) -> None:
    seen = Seen()
    dp = build(Calls(seen), 2)
    inputs = torch.ones(4, dtype=torch.float64)
    dp(inputs)
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        dp(inputs)
    with torch.inference_mode():
        dp(inputs)
    assert len(set(seen.threads)) == 2 and threading.current_thread().name not in seen.threads
    modes = [mode[:4] for mode in seen.modes]
    assert modes[0:2] == [(True, False, False, torch.bfloat16)] * 2
    assert modes[2:4] == [(False, False, True, torch.float16)] * 2
    assert [mode[:2] for mode in modes[4:6]] == [(False, True)] * 2


def test_intra_op_threads_are_divided_and_the_default_is_put_back(build: Build) -> None:
    def in_new_thread() -> int:
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        return found[0]

    before, default = torch.get_num_threads(), in_new_thread()
    seen = Seen()
    dp = build(Calls(seen), 3)
    try:
        for total, expected in ((5, [1, 2, 2]), (1, [1, 1, 1])):
            torch.set_num_threads(total)
            dp(torch.ones(6, dtype=torch.float64))
            assert sorted(mode[4] for mode in seen.modes[-3:]) == expected
            assert torch.get_num_threads() == total
            assert in_new_thread() == total
    finally:
        torch.set_num_threads(default)
        torch.set_num_threads(before)


def test_what_threads_cannot_take_over_runs_in_the_caller(build: Build) -> None:
    seen = Seen()
    dp = build(Calls(seen), 2)
    with torch.autograd.graph.save_on_cpu():
        dp(torch.ones(4, dtype=torch.float64)).sum().backward()
    assert set(seen.threads) == {threading.current_thread().name}


def test_dropout_is_reproducible_in_one_thread(build: Build) -> None:
    dp = build(nn.Dropout(0.5), 2, threads=False)
    found = []
    for _ in range(5):
        torch.manual_seed(0)
        found.append(dp(torch.ones(50, 10)))
    assert all(torch.equal(one, found[0]) for one in found)


def test_training_after_a_forward_in_inference_mode(build: Build) -> None:
    module = nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4)).double()
    dp = build(module, 3)
    with torch.inference_mode():
        dp(batch(6)[0])
    module.append(nn.Linear(4, CLASSES).double())
    with torch.inference_mode():
        dp(batch(6)[0])
    _mse(dp, *batch(6)).backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


@pytest.mark.parametrize("kind", [Slotted, Stores])
def test_attributes_of_unusual_kinds(build: Build, kind: type[nn.Module]) -> None:
    module, one = kind(), kind()
    dp = build(module)
    inputs = batch(6)[0]
    for later in (None, 1.0):
        if later is not None and kind is Slotted:
            for each in (module, one):
                setattr(each, "later", later)  # noqa: B010  # no attribute that a checker knows
        for each in (dp, one):
            each(inputs).square().mean().backward()
        _same(module, one)
    if isinstance(module, Slotted):
        del module.later, one.later
        assert torch.equal(dp(inputs[:2]), torch.cat([one(row[None]) for row in inputs[:2]]))
    copy.deepcopy(module)


def test_a_graph_keeps_the_replicas_and_nothing_else_does(build: Build) -> None:
    module = Stores()
    dp = DataParallel(module, ["cpu", "cpu"], timeout_s=TIMEOUT_S)
    loss = dp(batch(6)[0]).sum()
    engine, stored = weakref.ref(runner_of(dp)), weakref.ref(_replicas(dp).modules[1].last)
    before = threading.active_count()
    del dp
    assert engine() is not None
    loss.backward()
    assert module.layer.weight.grad is not None and module.last is None
    del loss
    gc.collect()
    assert engine() is None and stored() is None
    assert settles(lambda: threading.active_count() == before - 2)


def test_two_on_one_module(build: Build) -> None:
    module, one = mlp(), mlp()
    first, second = build(module), build(module, 3, reduce=BY_REDUCERS)
    (_mse(first, *batch(6)) + _mse(second, *batch(7))).backward()
    (_mse(one, *batch(6)) + _mse(one, *batch(7))).backward()
    _same(module, one)


# Beside it


def test_state_dict_round_trip(build: Build) -> None:
    module: Any = mlp()
    dp = build(module)
    assert list(dp.state_dict()) == [f"module.{name}" for name in module.state_dict()]
    assert all(one is other for one, other in zip(dp.parameters(), module.parameters(), strict=True))
    other = build(nn.Sequential(*(copy.deepcopy(list(module)))))
    for parameter in other.parameters():
        nn.init.zeros_(parameter)
    other.load_state_dict(dp.state_dict())
    inputs = batch(5)[0]
    assert torch.equal(other(inputs), dp(inputs))


@pytest.mark.parametrize("way", [copy.deepcopy, lambda dp: pickle.loads(pickle.dumps(dp))], ids=["deepcopy", "pickle"])
def test_copies_have_replicas_of_their_own(build: Build, way: Callable[[DataParallel], DataParallel]) -> None:
    module = mlp()
    dp = build(module)
    inputs, targets = batch(5)
    _mse(dp, inputs, targets).backward()
    module.zero_grad()
    with way(dp) as other:
        _mse(other, inputs, targets).backward()
        assert all(parameter.grad is None for parameter in module.parameters())
        _mse(dp, inputs, targets).backward()
        _same(other.module, module)


def test_one_within_another() -> None:
    with DataParallel(mlp(), ["cpu"]) as inner, pytest.raises(ValueError, match="0 is a DataParallel"):
        DataParallel(nn.Sequential(inner), ["cpu", "cpu"])


def test_it_goes_without_the_garbage_collector() -> None:
    before = threading.active_count()
    gc.collect()
    gc.disable()
    try:
        module = mlp()
        dp = DataParallel(module, ["cpu", "cpu"], reduce=BY_REDUCERS)
        loss = _mse(dp, *batch(6))
        loss.backward()
        replica = weakref.ref(_replicas(dp).trained_by[0][0])
        reducer = weakref.ref(dp.reducers[0])
        alive = weakref.ref(dp)
        del dp, loss
        assert alive() is None and replica() is None and reducer() is None
        assert settles(lambda: threading.active_count() == before)
    finally:
        gc.enable()


def test_compile_leaves_it_alone(build: Build) -> None:
    dp = build(mlp())
    compiled = torch.compile(dp, backend="eager")
    inputs, _ = batch(6)
    assert torch.equal(compiled(inputs), dp(inputs))


def test_repr(build: Build) -> None:
    assert "devices=['cpu', 'cpu']" in repr(build(mlp()))
    assert build(mlp())(batch(4)[0]).shape == (4, CLASSES)
