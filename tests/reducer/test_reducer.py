"""The Reducer alone, around plain backwards in this process; its peers are scripted, or threads.

All on the torch path, which is what CPU users get, but for what takes `path`: those also run the interpreted kernels.
"""

from __future__ import annotations

import gc
import json
import logging
import random
import re
import time
import warnings
import weakref
from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch
from support.inside import GRADIENT_IS_READY
from support.leaf_steps import CAPS, TRAVELS, WIRE_DTYPES, Wire, assert_same, clear
from support.loopback import Loopback, ThreadWorld
from support.rig import LARGE, SMALL, Rig, assert_gradient, assert_mean, drawn, drawn_like, loss_with, run, state_of

from fusedreduce import AgreementError, BucketCaps, ReduceConfig, Reducer
from fusedreduce.comm.protocol import Communicator
from fusedreduce.kernels import counting
from fusedreduce.reducer.state import ReducerState

pytestmark = pytest.mark.usefixtures("path")


@pytest.fixture
def fired(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the parameters whose hooks have called a reducer that is built within the test."""
    seen: list[int] = []
    original = GRADIENT_IS_READY.present

    def on_accumulated(engine: Any, index: int, *others: object) -> None:
        seen.append(index)
        original(engine, index, *others)

    GRADIENT_IS_READY.replace(monkeypatch, on_accumulated)
    return seen


# The mean


@pytest.mark.parametrize("path", ["torch", "interpreter"], indirect=True)
@pytest.mark.parametrize("wire", ["native", "bf16", "fp16"])
def test_a_training_loop_gets_the_mean_and_nothing_leaks(path: str, wire: Wire) -> None:
    rig = Rig(SMALL, config=ReduceConfig(wire=wire), caps=CAPS)
    for step in range(100 if path == "torch" else 6):
        rig.train()
        assert rig.reducer.stats()["steps"] == step + 1 and rig.reducer.state is ReducerState.IDLE
        rig.reducer.finalize()
    assert rig.reducer.stats()["path"] == ("torch" if wire == "bf16" else path)


@pytest.mark.parametrize(("wire", "views"), TRAVELS)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", [0, *(pytest.param(one, marks=pytest.mark.full) for one in (1, 2))])
def test_random_steps_get_the_mean(wire: Wire, views: bool, overlap: bool, seed: int, fired: list[int]) -> None:
    """Zeroed in any way at any time, any order of use, no_sync, several partial backwards."""
    draw = random.Random(f"{wire} {views} {overlap} {seed}")
    parameters, communicator = drawn((*SMALL, (LARGE,), (2, LARGE))), Loopback()
    count = len(parameters)
    reducer = Reducer(
        parameters,
        communicator,
        ReduceConfig(wire=wire, overlap=overlap),
        caps=CAPS,
        gradient_as_bucket_view=views,
    )

    def zero(how: str) -> None:
        if how == "none":
            clear(parameters)
        elif how == "reducer":
            reducer.zero_grad()
        elif how == "in place":
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.zero_()

    for step in range(40):
        calm = step % 20 < 8
        how = "none" if calm else draw.choice(["none", "none", "in place", "reducer", "keep"])
        when = "before" if calm else draw.choice(["before", "between"])
        if when == "before":
            zero(how)
        if not calm and draw.random() < 0.2:
            with reducer.no_sync():
                run(reducer, drawn_like(parameters))
        gradients = drawn_like(parameters)
        ready = list(range(count))[::-1] if calm or draw.random() < 0.5 else draw.sample(range(count), count)
        cut = count if calm or draw.random() < 0.7 else draw.randrange(1, count)
        losses = [loss_with(parameters, gradients, part) for part in (ready[:cut], ready[cut:]) if part]
        reducer.prepare_for_backward(losses)
        if when == "between":
            zero(how)
        local = [
            gradient if parameter.grad is None else parameter.grad + gradient
            for parameter, gradient in zip(parameters, gradients, strict=True)
        ]
        fired.clear()
        for loss in losses:
            loss.backward()
        assert sorted(fired) == list(range(count))
        assert_mean(reducer, local)
        reducer.check_finalized()


@pytest.mark.parametrize(
    ("path", "wire"), [("torch", "native"), ("torch", "bf16"), ("interpreter", "native")], indirect=["path"]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128])
def test_every_dtype_is_reduced(path: str, wire: Wire, dtype: torch.dtype) -> None:
    rig = Rig(((3,), (4, 5), ()), dtype=dtype, config=ReduceConfig(wire=wire))
    for _ in range(3):
        rig.train()


def test_a_conjugated_gradient_is_reduced_as_what_it_stands_for() -> None:
    (parameter,), communicator = drawn(((6,),), torch.complex64), Loopback()
    reducer = Reducer([parameter], communicator)
    gradient = torch.randn(6, dtype=torch.complex64)
    parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", gradient.clone().conj()))
    run(reducer, [gradient])
    assert parameter.grad is not None
    assert_gradient(parameter.grad.resolve_conj(), communicator.mean(gradient.conj().resolve_conj()))


@pytest.mark.parametrize("views", [False, True])
def test_gradients_keep_the_strides_of_their_parameters(views: bool) -> None:
    weight = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last).requires_grad_()
    turned = torch.randn(6, 2).t().requires_grad_()
    parameters, communicator = [weight, turned], Loopback()
    reducer = Reducer(parameters, communicator, gradient_as_bucket_view=views)
    for _ in range(5):
        gradients = [torch.randn(4, 3, 5, 5), torch.randn(2, 6)]
        run(reducer, gradients)
        assert_mean(reducer, gradients)
        for parameter in parameters:
            assert parameter.grad is not None and parameter.grad.stride() == parameter.stride()
        clear(parameters)


def test_a_lazily_negated_gradient_without_elements_is_reduced() -> None:
    rig = Rig(((0,), (3,)))
    rig.parameters[0].register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", torch._neg_view(p.grad)))
    for _ in range(2):
        rig.train()


def test_a_gradient_that_had_other_strides_once_leaves_nothing_behind() -> None:
    rig = Rig(((128, 129), (3,)))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="grad and param do not obey")
        for step in range(9):
            gradients = rig.draw()
            if step % 4 == 1:
                rig.parameters[0].grad = torch.zeros(129, 128).t()
            rig.run(gradients)
            rig.take(gradients)
    assert rig.reducer.stats()["restrided"] == 2


def test_mixed_dtypes_share_buckets_on_a_16_bit_wire_from_the_second_step_on() -> None:
    def plans(wire: Wire, policy: Literal["ready", "static"]) -> list[list[set[torch.dtype]]]:
        parameters = [one for dtype in (torch.float32, torch.bfloat16) for one in drawn(((3,), (4,)), dtype)]
        communicator = Loopback()
        seen = []
        with Reducer(parameters, communicator, ReduceConfig(wire=wire, policy=policy)) as reducer:
            for _ in range(6):
                gradients = drawn_like(parameters)
                run(reducer, gradients, [2, 0, 3, 1])
                assert_mean(reducer, gradients)
                seen.append([{parameters[index].dtype for index in members} for members in reducer.plan])
                clear(parameters)
        return seen

    alone = [{torch.float32}, {torch.bfloat16}]
    for wire, policy, together in (("bf16", "ready", True), ("bf16", "static", False), ("native", "ready", False)):
        first, *later = plans(wire, policy)  # type: ignore[arg-type]
        assert sorted(first, key=str) == sorted(alone, key=str)
        for one in later:
            assert (
                one == [{torch.float32, torch.bfloat16}] if together else sorted(one, key=str) == sorted(alone, key=str)
            )


def test_buckets_are_cut_in_the_order_of_readiness_and_launched_in_it() -> None:
    rig = Rig(((10,),) * 6, caps=BucketCaps(first_bytes=40, cap_bytes=80))
    order = [3, 0, 5, 1, 4, 2]
    for step in range(3):
        rig.step(order)
        assert rig.reducer.plan == (((0, 1, 2, 3, 4, 5),) if step == 0 else ((3,), (0, 5), (1, 4), (2,)))
        assert rig.reducer.stats()["buckets_reduced"] == (1 if step == 0 else 4)
    assert rig.communicator.count("broadcast") == 1 and rig.communicator.count("all_reduce") == 1 + 4 + 4
    assert rig.communicator.count("gather") == 2, "model and settings are compared once"


@pytest.mark.parametrize("overlap", [True, False])
def test_overlap_is_when_collectives_start(overlap: bool) -> None:
    rig = Rig(((10,),) * 4, config=ReduceConfig(overlap=overlap), caps=BucketCaps(cap_bytes=40))
    under_way: list[int] = []
    rig.parameters[0].register_hook(lambda gradient: under_way.append(rig.communicator.under_way))
    for _ in range(6):
        rig.train()
    assert under_way[1:] == [3 if overlap else 0] * 5


def test_only_parameters_without_elements() -> None:
    rig = Rig(((0,), (3, 0)))
    for _ in range(5):
        rig.step()
        assert all(parameter.grad is not None and parameter.grad.numel() == 0 for parameter in rig.parameters)
        clear(rig.parameters)


def test_sparse_gradients_are_averaged_beside_dense_ones() -> None:
    embedding, communicator = torch.nn.EmbeddingBag(10, 3, sparse=True), Loopback()
    (dense,) = drawn(((4,),))
    reducer = Reducer([embedding.weight, dense], communicator, sparse=[True, False])
    for step in range(6):
        index = torch.tensor([[step % 10, 3]])
        local = torch.autograd.grad(embedding(index).sum(), embedding.weight)[0]
        loss = embedding(index).sum() + dense.sum()
        reducer.prepare_for_backward(loss)
        loss.backward()
        assert embedding.weight.grad is not None and embedding.weight.grad.layout is torch.sparse_coo
        expected = communicator.sparse_total(local / communicator.size)
        assert_gradient(embedding.weight.grad.to_dense(), expected.to_dense())
        assert_gradient(dense.grad, communicator.mean(torch.ones(4)))
        clear([embedding.weight, dense])
    assert reducer.stats()["wire_bytes"] == 16 and communicator.count("sparse") == 6


@pytest.mark.parametrize(("given", "error"), [(True, AgreementError), (False, TypeError)])
def test_a_gradient_of_the_other_layout_is_refused_by_name(given: bool, error: type[Exception]) -> None:
    embedding = torch.nn.EmbeddingBag(10, 3, sparse=not given)
    reducer = Reducer([embedding.weight], Loopback(), names=["bag.weight"], sparse=[given])
    loss = embedding(torch.tensor([[1, 2]])).sum()
    reducer.prepare_for_backward(loss)
    with pytest.raises(error, match=r"gradient of bag\.weight .*(dense|sparse)"):
        loss.backward()
    assert state_of(reducer) is ReducerState.FAILED


@pytest.mark.parametrize(("wire", "views"), [("native", False), ("native", True), ("bf16", False)])
def test_ranks_with_gradients_orders_and_backwards_of_their_own_agree(wire: Wire, views: bool) -> None:
    """Three ranks, each with other values, another order of arrival, and other partial backwards."""
    shapes, steps, world = (*SMALL, (LARGE,)), 25, 3

    def drawn(rank: int, step: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(rank * 1000 + step)
        return [torch.randn(shape, generator=generator) for shape in shapes]

    def case(communicator: Communicator) -> list[list[torch.Tensor]]:
        draw = random.Random(communicator.rank)
        parameters = [torch.ones(shape, requires_grad=True) for shape in shapes]
        reducer = Reducer(parameters, communicator, ReduceConfig(wire=wire), caps=CAPS, gradient_as_bucket_view=views)
        held = []
        for step in range(steps):
            gradients = drawn(communicator.rank, step)
            order = list(range(len(shapes)))
            if step > 8:
                draw.shuffle(order)
            cut = draw.randrange(1, len(shapes)) if step > 15 else len(shapes)
            losses = [loss_with(parameters, gradients, part) for part in (order[:cut], order[cut:]) if part]
            reducer.prepare_for_forward()
            reducer.prepare_for_backward(losses)
            for loss in losses:
                loss.backward()
            reducer.finalize()
            held.append([parameter.grad.clone() for parameter in parameters if parameter.grad is not None])
            clear(parameters)
        return held

    results = ThreadWorld(world).results(case)
    for step in range(steps):
        local = [drawn(rank, step) for rank in range(world)]
        for index in range(len(shapes)):
            parts = [(one[index] / world).to(WIRE_DTYPES[wire] or torch.float32) for one in local]
            for rank in range(world):
                total = (parts[0].float() + parts[1].float() + parts[2].float()).to(parts[0].dtype)  # rounded once
                assert_gradient(results[rank][step][index], total.float(), (rank, step, index))


# Construction and the end


@pytest.mark.parametrize(
    ("arguments", "options", "kind", "words"),
    [
        ([], {}, ValueError, "at least one parameter"),
        ([torch.ones(3)], {}, ValueError, "parameter 0 is not a leaf that requires"),
        ([torch.ones(3, requires_grad=True) * 2], {}, ValueError, "not a leaf"),
        (["weight"], {}, TypeError, "parameter 0 is a str"),
        ([torch.ones(3, requires_grad=True)] * 2, {"names": ["a", "b"]}, ValueError, "b is the same tensor as a"),
        ([torch.ones(3, requires_grad=True)], {"names": ["a", "b"]}, ValueError, "got 2 names for 1 parameters"),
        ([torch.ones(3, requires_grad=True)], {"sparse": []}, ValueError, "got 0 sparse flags for 1"),
        (
            [torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True, device="meta")],
            {},
            ValueError,
            "devices of one type, got parameter 0 on cpu, parameter 1 on meta",
        ),
        ([torch.eye(3).to_sparse().requires_grad_()], {}, TypeError, "sparse_coo"),
        ([torch.nn.parameter.UninitializedParameter()], {}, RuntimeError, "dummy forward"),
    ],
)
def test_bad_input_is_refused_before_anything_is_hooked(
    arguments: list[Any], options: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        Reducer(arguments, Loopback(), **options)
    for one in arguments:
        if type(one) is torch.Tensor and one.is_leaf and one.requires_grad and one.layout is torch.strided:
            Reducer([one], Loopback()).close()


def test_views_of_a_16_bit_wire_are_none_and_the_log_counts_real_bytes(caplog: pytest.LogCaptureFixture) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.complex64, torch.float32)
    parameters = [torch.zeros(64, dtype=dtype, requires_grad=True) for dtype in dtypes]
    config = ReduceConfig(wire="bf16")
    options: dict[str, Any] = {"sparse": [False, False, False, True], "gradient_as_bucket_view": True}
    # fp32, bf16, complex64: 4 + 2 + 8 bytes an element as gradients, 2 + 2 + 4 on the wire.
    with caplog.at_level(logging.INFO):
        reducer = Reducer(parameters, Loopback(), config, **options)
        Reducer([torch.zeros(4, requires_grad=True)], Loopback(rank=1), config, gradient_as_bucket_view=True)
    (said,) = caplog.messages
    assert re.search(r" 512 bytes at the start of backward and 1408 at its end; .* take 896 ", said)
    assert reducer.gradient_as_bucket_view and not reducer.has_views
    assert reducer.stats()["wire_bytes"] == 512


def test_two_open_reducers_on_one_parameter_are_refused() -> None:
    first, second = drawn(((3,), (4,)))
    reducer = Reducer([first], Loopback())
    with pytest.raises(ValueError, match="b belongs to another open Reducer"):
        Reducer([second, first], Loopback(), names=["a", "b"])
    with Reducer([second], Loopback()):
        pass
    reducer.close()
    with Reducer([second, first], Loopback()):
        pass
    dropped = Reducer([first], Loopback())
    del dropped
    Reducer([first], Loopback()).close()


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is freed within is freed by reference counts alone."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("end", ["del", "close"])
@pytest.mark.parametrize("steps", [0, 1, 7])
def test_memory_is_back_when_the_reducer_is_gone(no_collector: None, views: bool, end: str, steps: int) -> None:
    rig = Rig((*SMALL, (LARGE,)), caps=CAPS, gradient_as_bucket_view=views)
    rig.warm(steps)
    gone = weakref.ref(rig.reducer)
    if end == "close":
        rig.reducer.close()
        assert [wire for wire in rig.communicator.wires if wire() is not None] == [], "close() gives the wires up"
    del rig.reducer
    assert gone() is None
    assert [wire for wire in rig.communicator.wires if wire() is not None] == []
    calls = len(rig.communicator.calls)
    gradients = rig.draw()
    rig.loss(gradients).backward()
    assert_same([one.grad for one in rig.parameters], gradients, "no hook is left")
    assert len(rig.communicator.calls) == calls
    models = [weakref.ref(parameter) for parameter in rig.parameters]
    del rig.parameters
    assert [one for one in models if one() is not None] == []


def test_a_graph_that_outlives_the_reducer_does_not_keep_it(no_collector: None) -> None:
    rig = Rig(SMALL)
    gradients = rig.draw()
    loss = rig.loss(gradients)
    rig.reducer.prepare_for_backward(loss)
    gone = weakref.ref(rig.reducer)
    del rig.reducer
    assert gone() is None
    loss.backward()
    assert_same([one.grad for one in rig.parameters], gradients)


# Numbers


def test_backward_stats_and_bucket_times_are_of_the_latest_step() -> None:
    rig = Rig(((3,), (4,), (5,), (6,)), caps=BucketCaps(cap_bytes=20))
    assert rig.reducer.get_backward_stats() == [0, 0, 0, 0]
    seen = []
    for step in range(15):
        gradients = rig.draw()
        loss = rig.loss(gradients, [2, 0, 3, 1])
        rig.reducer.prepare_for_backward(loss)
        pause_s = 0.001 * (step + 1)
        time.sleep(pause_s)
        loss.backward()
        ready = rig.reducer.get_backward_stats()
        seen.append(ready)
        assert all(pause_s * 1e9 <= one < 5e9 for one in ready), "ns from the end of forward on"
        assert ready[2] <= ready[0] <= ready[3] <= ready[1]
        times = rig.reducer.bucket_times()
        assert len(times) == len(rig.reducer.plan)
        assert all(0 <= one <= launched < 5e9 for one, launched in times), "since backward began, in every step"
        assert times == sorted(times, key=lambda one: one[1])
        clear(rig.parameters)
    assert len(set(map(tuple, seen))) == 15


@pytest.mark.parametrize("wire", ["native", "bf16", "fp16"])
def test_stats(wire: Wire) -> None:
    rig = Rig(
        ((300,), (256, 4), (200,), (3, 90), (250,)), config=ReduceConfig(wire=wire), caps=BucketCaps(cap_bytes=2000)
    )
    seen = []
    for _ in range(30):
        rig.step()
        clear(rig.parameters)
        seen.append(rig.reducer.stats())
    stats = seen[-1]
    itemsize = (WIRE_DTYPES[wire] or torch.float32).itemsize
    numel = sum(parameter.numel() for parameter in rig.parameters)
    assert stats["wire_bytes"] == numel * itemsize + int(stats["padding_bytes"])
    assert int(stats["padding_bytes"]) <= 0.02 * int(stats["wire_bytes"]), "tensors average 1 KiB and more"
    sent = [call for call in rig.communicator.calls if call.kind == "all_reduce"][-int(stats["buckets"]) :]
    assert sum(call.numel * call.dtype.itemsize for call in sent) == stats["wire_bytes"]
    assert stats["steps"] == 30 and stats["buckets_reduced"] == stats["buckets"] == len(rig.reducer.plan) > 1
    assert rig.communicator.count("all_reduce") == 1 + 29 * len(rig.reducer.plan)
    assert rig.communicator.count("max") == 5, "three probes, the numbers, and the plan that follows from them"
    assert stats["collectives"] == rig.communicator.count("all_reduce") + rig.communicator.count("max") + 1, "the order"
    assert stats["state"] == "idle" and stats["path"] == "torch" and stats["restrided"] == 0
    allocations = [one["wire_allocations"] for one in seen]
    assert allocations[0] == 1 and set(allocations[1:]) == {1 + len(rig.reducer.plan)}, "none in the steady state"
    assert json.dumps(stats)


def test_a_step_launches_two_kernels_and_one_collective_per_bucket() -> None:
    rig = Rig(SMALL, config=ReduceConfig(wire="bf16"), caps=CAPS)
    for _ in range(8):
        before = rig.communicator.count("all_reduce")
        with counting.count_launches() as launches:
            rig.step()
        buckets = len(rig.reducer.plan)
        assert [one.function for one in launches] == ["pack"] * buckets + ["unpack"] * buckets
        assert rig.communicator.count("all_reduce") - before == buckets
        clear(rig.parameters)
    assert buckets > 2
