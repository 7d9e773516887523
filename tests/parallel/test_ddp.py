"""fusedreduce.DistributedDataParallel, and what fused_hook does as well, on 2 and 3 Gloo ranks with their own inputs.

What is used of a model and what is not, no_sync, views, overlap, join. What is the hook's alone: test_hook.py.
"""

from __future__ import annotations

import collections
import copy
import functools
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.data_parallel_models import (
    DefaultSubclass,
    DictSubclass,
    ListSubclass,
    NamedSubclass,
    Pair,
    Record,
    TupleSubclass,
)
from support.ddp_models import (
    PARITY,
    SMALL_CAP_MB,
    STEPS,
    SURFACES,
    WIRES,
    Branches,
    Checkpointed,
    Collectives,
    assert_averaged,
    assert_same_on_all_ranks,
    assert_step_averages,
    batch,
    gradients,
    loss_of,
    mlp,
    parity_with_torch,
    train,
    training_cells,
    wrapped,
)
from support.grids import grid
from support.ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import fusedreduce
from fusedreduce import reducer_of
from fusedreduce.kernels import counting


@on_ranks(2)
def test_torchs_reducer_is_never_built_and_the_wrapper_is_torchs_class(rank: int, world: int) -> None:
    """torch's own Reducer and Logger are never built, not by a copy either; yet the wrapper is torch's class."""

    def built(*_: object, **__: object) -> None:
        raise AssertionError("a C++ Reducer or Logger was built")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "Reducer", built)
        patch.setattr(dist, "Logger", built)
        with pytest.raises(AssertionError, match="was built"):
            TorchDDP(mlp())
        ddp = train(rank, mlp(), "bf16", steps=3)
        copy.deepcopy(ddp)
    assert isinstance(ddp, TorchDDP)


# Graphs in which not everything is used


class Custom:
    """An output as a node of our own, known to pytree."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


pytree.register_pytree_node(
    Custom, lambda box: ([box.value], None), lambda leaves, _: Custom(list(leaves)[0]), serialized_type_name="Custom"
)


class OrderedSubclass(collections.OrderedDict[str, Any]): ...


def _ring(value: torch.Tensor) -> dict[str, Any]:
    output: dict[str, Any] = {"value": value}
    output["all"] = [output]
    return output


CONTAINERS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "tensor": (lambda value: value, lambda output: output),
    "dataclass": (lambda value: Record(value, {}), lambda output: output.logits),
    "namedtuple": (lambda value: Pair(value, value.detach()), lambda output: output.logits),
    "dict": (lambda value: {"a": [1, {"b": value}]}, lambda output: output["a"][1]["b"]),
    "custom": (Custom, lambda output: output.value),
    "subclass of a namedtuple": (lambda value: NamedSubclass(value, value.detach()), lambda output: output.logits),
    "subclass of dict": (lambda value: DictSubclass(value=value), lambda output: output["value"]),
    "subclass of OrderedDict": (lambda value: OrderedSubclass(value=value), lambda output: output["value"]),
    "subclass of defaultdict": (lambda value: DefaultSubclass(None, value=value), lambda output: output["value"]),
    "subclass of list": (lambda value: ListSubclass([value]), lambda output: output[0]),
    "subclass of tuple": (lambda value: TupleSubclass([value]), lambda output: output[0]),
    "subclass in a list": (lambda value: [DictSubclass(value=[value])], lambda output: output[0]["value"][0]),
    "subclass in a dataclass": (
        lambda value: Record(value.detach(), {"x": TupleSubclass([value])}),
        lambda output: output.extra["x"][0],
    ),
    "one that contains itself": (_ring, lambda output: output["all"][0]["value"]),
}


def unused(rank: int, world: int, wire: str, container: str = "tensor", surface: str = "wrapper") -> None:
    """Locally unused gets the mean; globally unused keeps .grad untouched, be it None or a tensor."""
    pack, unpack = CONTAINERS[container]
    ddp = wrapped(Branches(pack), wire, surface=surface, find_unused_parameters=True, bucket_cap_mb=0.001)
    layers: Any = ddp.module.layers
    kept = torch.full_like(layers[2].bias, float(rank))
    for step in range(STEPS):
        which = (rank + step) % 2 if step < 3 else 0
        local = copy.deepcopy(ddp.module)
        loss_of(unpack(local((batch(rank, step), which)))).backward()
        ddp.zero_grad()
        layers[2].bias.grad = kept
        loss_of(unpack(ddp((batch(rank, step), which)))).backward()
        assert layers[2].bias.grad is kept and kept.unique().tolist() == [rank]
        layers[2].bias.grad = None
        assert_averaged(ddp.module, local, wire)


@pytest.mark.parametrize("container", CONTAINERS)
@on_ranks(2)
def test_a_static_graph_is_learned_through_any_container(rank: int, world: int, container: str) -> None:
    """What is used is learned from the first step, whose end is seen through the output."""
    pack, unpack = CONTAINERS[container]
    ddp = wrapped(Branches(pack), static_graph=True, bucket_cap_mb=0.001)
    for step in range(STEPS):
        assert_step_averages(ddp, (batch(rank, step), rank % 2), loss=lambda output: loss_of(unpack(output)))


class Opaque:
    """An output into which neither torch's walk nor ours looks."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
@on_ranks(2)
def test_an_output_without_tensors_is_an_error_on_every_rank(rank: int, world: int, option: str) -> None:
    """Every rank is told in the backward itself, whichever parameters it has used; a forward alone is no error."""
    options: dict[str, Any] = {option: True}
    ddp = wrapped(Branches(Opaque), bucket_cap_mb=0.001, **options)
    for step in range(3):
        ddp((batch(rank, step), 0))
    for step in range(2):
        output = ddp((batch(rank, step), (rank + step) % 2))
        with pytest.raises(fusedreduce.FusedReduceError, match=rf"rank {rank}: {option}=True .* of type Opaque: "):
            loss_of(output.value).backward()
        ddp.reset()
        ddp.zero_grad()
    ddp.module.pack = lambda value: value
    assert_step_averages(ddp, (batch(rank, 9), rank % 2))


@on_ranks(2)
def test_no_rank_waits_for_one_whose_layer_has_lost_its_hooks(rank: int, world: int) -> None:
    """A layer that each rank uses in every other step is converted and back: no rank waits for one that raises."""
    ddp = wrapped(Branches(), find_unused_parameters=True, bucket_cap_mb=0.001)
    for step in range(3):
        loss_of(ddp((batch(rank, step), (rank + step) % 2))).backward()
    ddp.module.layers[0].double().float()
    told = []
    for step in range(4):
        try:
            loss_of(ddp((batch(rank, step), (rank + step) % 2))).backward()
        except fusedreduce.FusedReduceError as error:
            told.append(str(error))
    assert len(told) >= 3 and all("layers.0.weight was converted, moved or set" in text for text in told)
    assert reducer_of(ddp).steps == 7


def checkpoints(rank: int, world: int, wire: str, surface: str = "wrapper") -> None:
    """Reentrant and not; a weight that several share needs static_graph where they are reentrant."""
    train(rank, Checkpointed(reentrant=True), wire, surface=surface)
    train(rank, Checkpointed(reentrant=False), wire, surface=surface)
    train(rank, Checkpointed(reentrant=False, times=3), wire, surface=surface)
    train(rank, Checkpointed(reentrant=True, times=3), wire, surface=surface, static_graph=True)
    train(rank, Checkpointed(reentrant=False), wire, surface=surface, find_unused_parameters=True)


def static_graph(rank: int, world: int, wire: str, surface: str = "wrapper") -> None:
    """All is delayed in the first step; unused parameters need no search; so with each kind of bucket."""
    options: dict[str, Any] = {"surface": surface, "static_graph": True}
    train(rank, mlp(), wire, **options)
    train(rank, Branches(), wire, lambda r, s: (batch(r, s), r % 2), bucket_cap_mb=0.001, **options)
    if wire == "native":
        train(rank, mlp(), wire, gradient_as_bucket_view=True, **options)
        train(rank, Checkpointed(reentrant=True, times=2), wire, gradient_as_bucket_view=True, **options)


def accumulate(rank: int, ddp: Any, wire: str) -> None:
    """Each step two micro-batches, the first under no_sync: what is averaged is their sum."""
    before = int(ddp.reduce_stats()["steps"])
    for step in range(STEPS):
        local = copy.deepcopy(ddp.module)
        ddp.zero_grad()
        with ddp.no_sync():
            loss = loss_of(ddp(batch(rank, 2 * step)))
            with Collectives() as issued:
                loss.backward()
        assert not issued.payload_bytes
        loss_of(local(batch(rank, 2 * step))).backward()
        for mine, other in zip(gradients(ddp), gradients(local), strict=True):
            assert torch.equal(mine, other), "under no_sync gradients are this rank's own"
        loss_of(ddp(batch(rank, 2 * step + 1))).backward()
        loss_of(local(batch(rank, 2 * step + 1))).backward()
        assert_averaged(ddp.module, local, wire)
    assert ddp.reduce_stats()["steps"] == before + STEPS


def no_sync(rank: int, world: int, wire: str, surface: str = "wrapper") -> None:
    """Accumulation from the start, and after plain steps, in which fewer hooks are there."""
    accumulate(rank, wrapped(mlp(), wire, surface=surface), wire)
    accumulate(rank, train(rank, mlp(), wire, surface=surface), wire)
    if wire == "native":
        accumulate(rank, wrapped(mlp(), surface=surface, gradient_as_bucket_view=True), wire)


# Gradients as views, no overlap


class Copies(TorchDispatchMode):
    """Names of operators that copy."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if any(part in func.__name__ for part in ("copy", "clone")):
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@on_ranks(2)
def test_views(rank: int, world: int) -> None:
    """Gradients live in the wire buffer: with zero_grad(set_to_none=False) nothing is copied, nothing moves."""
    ddp = train(rank, mlp(), set_to_none=False, gradient_as_bucket_view=True)
    held = [parameter.grad for parameter in ddp.parameters()]
    addresses = [one.data_ptr() for one in held if one is not None]
    for step in range(3):
        local = copy.deepcopy(ddp.module)
        ddp.zero_grad(set_to_none=False)
        for parameter, one in zip(ddp.parameters(), held, strict=True):
            assert one is not None and parameter.grad is one and not one.any()
        output = loss_of(ddp(batch(rank, step)))
        with Copies() as copies, counting.count_launches() as launches:
            output.backward()
        assert not copies.names
        assert not [one.function for one in launches if one.function == "unpack"]
        loss_of(local(batch(rank, step))).backward()
        assert_averaged(ddp.module, local)
        assert all(p.grad is one for p, one in zip(ddp.parameters(), held, strict=True))
        assert addresses == [one.data_ptr() for one in held if one is not None]


@pytest.mark.parametrize("as_view", [False, True])
@on_ranks(2)
def test_gradients_with_a_graph_are_averaged(rank: int, world: int, as_view: bool) -> None:
    """Gradients have torch's bits, of a backward without a graph: with one, torch's DDP raises for this model."""
    ours, theirs = wrapped(mlp(), gradient_as_bucket_view=as_view), TorchDDP(mlp(), bucket_cap_mb=SMALL_CAP_MB)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(STEPS):
            for ddp in (ours, theirs):
                ddp.zero_grad()
                loss_of(ddp(batch(rank, step))).backward(create_graph=ddp is ours)
            assert all(map(torch.equal, gradients(ours), gradients(theirs)))
            assert {one.grad is not None and one.grad.requires_grad for one in ours.parameters()} == {not as_view}
    texts = [str(one.message) for one in caught if str(one.message).startswith("Using DistributedDataParallel with")]
    assert len(texts) == 1 and "gradients of gradients (double backward)" in texts[0], caught


@on_ranks(2)
def test_gradients_of_gradients_are_each_ranks_own(rank: int, world: int) -> None:
    """They are this rank's own, and those of torch's DDP are divided by the ranks; it can do one parameter."""
    ours, theirs = (make(nn.Linear(24, 3, bias=False)) for make in (wrapped, TorchDDP))
    theirs.load_state_dict(ours.state_dict())
    local = copy.deepcopy(ours.module)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for ddp in (ours, theirs):
            loss_of(ddp(batch(rank, 0))).backward(create_graph=True)
            mean = ddp.module.weight.grad
            found.append((mean.detach().clone(), *torch.autograd.grad(mean.square().sum(), ddp.module.weight)))
    (own,) = torch.autograd.grad(loss_of(local(batch(rank, 0))), local.weight, create_graph=True)
    (expected,) = torch.autograd.grad(own, local.weight, grad_outputs=2 * found[0][0])
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], expected) and torch.equal(found[1][1] * world, expected)


# Join


def join(
    rank: int, world: int, wire: str, batches: Sequence[int], by_initial: bool, kind: str = "plain", **options: Any
) -> float:
    """Rank r has batches[r] inputs; the worst difference of a parameter to the same training in one process, fp64."""

    def make() -> nn.Module:
        return Branches() if kind == "branches" else mlp()

    def loss(model: nn.Module, who: int, step: int) -> torch.Tensor:
        features = batch(who, step).to(next(model.parameters()).dtype)
        output = model((features, who % 2)) if kind == "branches" else model(features)
        square: torch.Tensor = output.square().mean()
        return square

    ddp = wrapped(make(), wire, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    with ddp.join(divide_by_initial_world_size=by_initial):
        for step in range(batches[rank]):
            optimizer.zero_grad()
            loss(ddp, rank, step).backward()
            optimizer.step()
    alone = make().double()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.05)
    for step in range(max(batches)):
        optimizer.zero_grad()
        present = [other for other in range(world) if step < batches[other]]
        for other in present:
            (loss(alone, other, step) / (world if by_initial else len(present))).backward()
        optimizer.step()
    assert_same_on_all_ranks([parameter.detach() for parameter in ddp.parameters()])
    pairs = zip(ddp.parameters(), alone.parameters(), strict=True)
    worst = max(float((ours.detach().double() - reference).abs().max()) for ours, reference in pairs)
    # the wrapper can be used after it
    local = copy.deepcopy(ddp.module)
    ddp.zero_grad()
    loss(ddp, rank, 100).backward()
    loss(local, rank, 100).backward()
    assert_averaged(ddp.module, local, wire)
    return worst


@grid(("world", "wire", "surface"), [*itertools.product((2, 3), WIRES, SURFACES)])
@on_ranks()
def test_parity_with_torch_over_a_hundred_steps(rank: int, world: int, wire: str, surface: str) -> None:
    """On one wire; some on the others."""
    worst = parity_with_torch(rank, wire, 110 if wire == "bf16" else 20, surface)
    assert worst <= PARITY[world, wire]
    assert wire == "native" or worst > 0, "a 16-bit wire that rounds nothing is no 16-bit wire"


TRAINING = (checkpoints, static_graph, no_sync, unused)


@grid(("world", "case", "surface", "wire"), training_cells(TRAINING))
@on_ranks()
def test_training_gives_the_mean(rank: int, world: int, case: Any, surface: str, wire: str) -> None:
    case(rank, world, wire, surface=surface)


@pytest.mark.parametrize("container", CONTAINERS)
@on_ranks(2)
def test_unused_parameters_are_found_through_any_container(rank: int, world: int, container: str) -> None:
    unused(rank, world, "native", container)


# (inputs per rank, a 16-bit wire's tolerance is its unit times a few steps of 0.05; an encoded one's, two half quanta)
@pytest.mark.parametrize(
    ("wire", "tolerance", "by_initial"),
    [
        ("native", 1e-6, True),
        ("native", 1e-6, False),
        ("bf16", 2e-3, True),
        ("fp16", 2e-4, False),
        ("fp16+fp32", 2e-4, True),
        ("int8", 2e-3, False),
        ("int4", 2e-3 * 127 / 7, True),
    ],
)
@on_ranks(3)
def test_join_with_uneven_inputs_and_both_divisors(
    rank: int, world: int, wire: str, tolerance: float, by_initial: bool
) -> None:
    assert join(rank, world, wire, (3, 9, 5), by_initial) < tolerance


@pytest.mark.parametrize(
    ("world", "wire", "tolerance"),
    [
        *((2, *one) for one in [("native", 1e-6), ("bf16", 2e-3), ("fp16", 2e-4), ("int8", 2e-3)]),
        *((3, *one) for one in [("int8", 2e-3), ("fp16+fp32", 2e-4)]),  # sums take two phases
    ],
)
@on_ranks()
def test_join_with_uneven_inputs_through_the_hook(rank: int, world: int, wire: str, tolerance: float) -> None:
    assert join(rank, world, wire, (3, 7, 0)[:world], True, surface="hook") < tolerance


JOINS: dict[str, tuple[tuple[int, int], str, dict[str, Any]]] = {
    "rank 0 stays": ((7, 2), "plain", {}),
    "before the first step": ((0, 6), "plain", {}),
    "before the first step, rank 0 stays": ((6, 0), "plain", {}),
    "after one step": ((1, 6), "plain", {}),
    "with unused parameters": ((3, 8), "branches", {"find_unused_parameters": True, "bucket_cap_mb": 0.001}),
    "with unused parameters, rank 0 stays": ((8, 3), "branches", {"find_unused_parameters": True}),
    "unused, before the first step": ((0, 3), "branches", {"find_unused_parameters": True}),
    "with a static graph": ((3, 8), "plain", {"static_graph": True}),
    "static, before the first step": ((0, 4), "plain", {"static_graph": True}),
    "with views": ((3, 8), "plain", {"gradient_as_bucket_view": True}),
}


@pytest.mark.parametrize("when", JOINS)
@on_ranks(2)
def test_ranks_may_leave_a_join_at_any_time(rank: int, world: int, when: str) -> None:
    batches, kind, options = JOINS[when]
    assert join(rank, world, "native", batches, True, kind, **options) < 1e-6


@pytest.mark.parametrize("debugged", [pytest.param("INFO", marks=pytest.mark.full), "DETAIL"], indirect=True)
@pytest.mark.parametrize(
    "case",
    [
        functools.partial(unused, wire="bf16"),
        functools.partial(no_sync, wire="native"),
        functools.partial(static_graph, wire="native"),
        functools.partial(join, wire="native", batches=(3, 5), by_initial=True),
    ],
    ids=lambda case: f"{case.func.__name__}-{case.keywords['wire']}",
)
@on_ranks(pool="debugged")
def test_the_wrapper_works_under_torchs_debugging(rank: int, world: int, case: Any) -> None:
    case(rank, world)
