"""The Reducer alone, around plain backwards in this process; its peers are scripted, or threads.

All on the torch path, which is what CPU users get, but for what takes `path`: those also run the interpreted kernels.
"""

from __future__ import annotations

import gc
import json
import random
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
import torch
from support.leaf_steps import CAPS, TRAVELS, WIRE_DTYPES, Wire, clear, shadow_step, sparse_like
from support.leaf_steps import step as leaf_step
from support.loopback import PEERS, Call, Counted, Loopback, Peer, ThreadWorld, constant
from support.rig import SMALL, Rig, assert_mean, drawn, drawn_like, loss_with, run
from torch.utils.checkpoint import checkpoint

from fusedreduce import AgreementError, BucketCaps, CollectiveError, FusedReduceError, ReduceConfig, Reducer
from fusedreduce.buckets.grad_bucket import GradBucket
from fusedreduce.comm.agreement import agree_on_parameters
from fusedreduce.comm.protocol import Communicator
from fusedreduce.kernels import dispatch, runs
from fusedreduce.planning.schedule import FIRST_PROFILED
from fusedreduce.reducer.state import ReducerState
from fusedreduce.reducer.step_cycle import StepCycle

pytestmark = pytest.mark.usefixtures("path")

LARGE = runs.LARGE_NUMEL + 5


@pytest.fixture
def fired(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the parameters whose hooks have called a reducer that is built within the test."""
    seen: list[int] = []
    original = StepCycle.on_gradient

    def on_gradient(self: StepCycle, index: int) -> None:
        seen.append(index)
        original(self, index)

    monkeypatch.setattr(StepCycle, "on_gradient", on_gradient)
    return seen


def _state(reducer: Reducer) -> ReducerState:
    return reducer.state  # behind a call: mypy believes that it cannot change


def _same(actual: torch.Tensor | None, expected: torch.Tensor, what: object = "") -> None:
    assert actual is not None, what
    assert actual.dtype is expected.dtype and actual.shape == expected.shape
    assert torch.equal(actual, expected), f"{what}: {actual.reshape(-1)[:4]} instead of {expected.reshape(-1)[:4]}"


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
@pytest.mark.parametrize("seed", range(3))
def test_random_steps_get_the_mean(wire: Wire, views: bool, overlap: bool, seed: int, fired: list[int]) -> None:
    """Zeroed in any way at any time, any order of use, no_sync, several partial backwards."""
    draw = random.Random(seed)
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


@pytest.mark.parametrize("path", ["torch", "interpreter"], indirect=True)
@pytest.mark.parametrize("wire", ["native", "bf16"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128])
def test_every_dtype_is_reduced(path: str, wire: Wire, dtype: torch.dtype) -> None:
    rig = Rig(((3,), (4, 5), ()), dtype=dtype, config=ReduceConfig(wire=wire))
    for _ in range(5):
        rig.train()


def test_a_conjugated_gradient_is_reduced_as_what_it_stands_for() -> None:
    (parameter,), communicator = drawn(((6,),), torch.complex64), Loopback()
    reducer = Reducer([parameter], communicator)
    gradient = torch.randn(6, dtype=torch.complex64)
    parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", gradient.clone().conj()))
    run(reducer, [gradient])
    assert parameter.grad is not None
    _same(parameter.grad.resolve_conj(), communicator.mean(gradient.conj().resolve_conj()))


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


def test_gradients_with_other_strides_are_reduced_and_counted() -> None:
    rig = Rig(((128, 129), (4, 6), (3,)))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="grad and param do not obey")
        for _ in range(5):
            gradients = rig.draw()
            rig.parameters[0].grad = torch.zeros(129, 128).t()
            rig.parameters[1].grad = torch.zeros(6, 4).t()
            rig.run(gradients)
            rig.take(gradients)
    assert int(rig.reducer.stats()["restrided"]) >= 10, "two of three in each step"


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


def test_strict_caps_hold() -> None:
    rig = Rig(
        ((10,), (20,), (5,), (30,), (1,)),
        config=ReduceConfig(cap_policy="strict"),
        caps=BucketCaps(first_bytes=40, cap_bytes=100),
    )
    for _ in range(2):
        rig.step()
    assert all(
        size <= 100 or len(plan) == 1 for size, plan in zip(rig.reducer.bucket_bytes(), rig.reducer.plan, strict=True)
    )
    assert max(rig.reducer.bucket_bytes()) == 120 and len(rig.reducer.plan) > 2


@pytest.mark.parametrize("overlap", [True, False])
def test_overlap_is_when_collectives_start(overlap: bool) -> None:
    rig = Rig(((10,),) * 4, config=ReduceConfig(overlap=overlap), caps=BucketCaps(cap_bytes=40))
    under_way: list[int] = []
    rig.parameters[0].register_hook(lambda gradient: under_way.append(rig.communicator.under_way))
    for _ in range(6):
        rig.train()
    assert under_way[1:] == [3 if overlap else 0] * 5


def test_tied_and_zero_element_parameters() -> None:
    weight, empty, other = parameters = drawn(((4, 4), (0, 3), (4,)))
    communicator = Loopback()
    reducer = Reducer(parameters, communicator)
    for _ in range(6):
        x = torch.randn(4)
        local = torch.autograd.grad((weight @ (weight @ x)).sum(), weight)[0]
        loss = (weight @ (weight @ x)).sum() + empty.sum() + other.sum()
        reducer.prepare_for_backward(loss)
        loss.backward()
        assert_mean(reducer, [local, torch.zeros(0, 3), torch.ones(4)])
        clear(parameters)


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
        expected = local.to_dense() / communicator.size * (2 * communicator.size - 1)
        torch.testing.assert_close(embedding.weight.grad.to_dense(), expected, atol=0, rtol=2**-22)
        _same(dense.grad, communicator.mean(torch.ones(4)))
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
    assert _state(reducer) is ReducerState.FAILED


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
                _same(results[rank][step][index], total.float(), (rank, step, index))


# Which backwards are reduced


def test_no_sync_accumulates_and_the_next_step_reduces_the_sum() -> None:
    rig = Rig(SMALL, config=ReduceConfig(wire="bf16"), caps=CAPS)
    for _ in range(6):
        parts = [rig.draw() for _ in range(3)]
        before = rig.communicator.count("all_reduce")
        with rig.reducer.no_sync(), rig.reducer.no_sync():
            for part in parts[:2]:
                rig.run(part)
        with rig.reducer.no_sync():
            pass
        assert rig.communicator.count("all_reduce") == before
        rig.run(parts[2])
        rig.take([(a + b) + c for a, b, c in zip(*parts, strict=True)])


def test_an_inner_no_sync_leaves_the_outer_one_on() -> None:
    """A helper that uses it may be called within it."""
    rig = Rig(SMALL, caps=CAPS)
    for _ in range(3):
        parts = [rig.draw() for _ in range(3)]
        before = rig.communicator.count("all_reduce")
        with rig.reducer.no_sync():
            with rig.reducer.no_sync():
                rig.run(parts[0])
            rig.run(parts[1])
        assert rig.communicator.count("all_reduce") == before, "a backward behind the inner one was reduced"
        rig.run(parts[2])
        rig.take([(a + b) + c for a, b, c in zip(*parts, strict=True)])


def test_without_outputs_a_step_ends_with_its_last_gradient() -> None:
    rig = Rig(SMALL, caps=CAPS)
    for _ in range(8):
        gradients = rig.draw()
        rig.reducer.prepare_for_backward()
        rig.loss(gradients).backward()
        rig.take(gradients)


def test_outputs_may_change_between_given_and_not_given() -> None:
    rig = Rig(SMALL, caps=CAPS)
    for step in range(20):
        gradients = rig.draw()
        loss = rig.loss(gradients)
        rig.reducer.prepare_for_backward(loss if step % 7 < 5 else None)
        loss.backward()
        rig.take(gradients)


def test_two_outputs_one_backward_and_outputs_in_any_container() -> None:
    rig = Rig(((3,), (4,)))
    for step in range(8):
        gradients = rig.draw()
        losses = [rig.loss(gradients, [index]) for index in range(2)]
        outputs: Any = [tuple(losses), {"a": losses[0], "b": [losses[1], None, 3]}, losses][step % 3]
        rig.reducer.prepare_for_backward(outputs)
        torch.autograd.backward(losses)
        rig.take(gradients)


def test_several_partial_backwards_complete_one_step() -> None:
    rig = Rig(SMALL, caps=CAPS)
    for step in range(16):
        gradients = rig.draw()
        order = list(range(len(rig.parameters)))
        cuts = [order] if step % 8 < 5 else [order[4:], order[:2], order[2:4]]
        losses = [rig.loss(gradients, cut) for cut in cuts]
        rig.reducer.prepare_for_backward(losses)
        steps = rig.reducer.stats()["steps"]
        for number, loss in enumerate(losses):
            assert rig.reducer.stats()["steps"] == steps, f"done after {number} of {len(losses)} backwards"
            loss.backward()
        rig.take(gradients)


def test_a_forward_whose_output_is_thrown_away_changes_nothing() -> None:
    rig = Rig(((3,), (4,)))
    for _ in range(6):
        rig.reducer.prepare_for_backward(rig.loss(rig.draw()))
        rig.train()


def test_a_gradient_after_the_step_is_warned_about() -> None:
    rig = Rig(((3,), (4,)))
    loss = rig.loss(rig.draw())
    rig.reducer.prepare_for_backward(loss)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss.backward(retain_graph=True)
        with rig.reducer.no_sync():
            rig.step()
        rig.step()
    with pytest.warns(UserWarning, match="got a gradient after this step's gradients had been averaged"):
        loss.backward()


@pytest.mark.parametrize("calm", [0, 1, 6])
@pytest.mark.parametrize("outside", [0, 1, 2])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("cap_bytes", [8, 10**9])
def test_a_loss_that_uses_a_parameter_beside_the_outputs_is_right_or_raises(
    calm: int, outside: int, first: bool, cap_bytes: int
) -> None:
    """The parameter may get its gradient before the backward reaches an output, or after."""
    rig = Rig(
        ((3,), (LARGE,), (5,)), names=["a", "b", "c"], caps=BucketCaps(first_bytes=cap_bytes, cap_bytes=cap_bytes)
    )
    for step in range(calm + 8):
        gradients = rig.draw()
        inside = [index for index in range(3) if step < calm or index != outside]
        if first:
            output = rig.loss(gradients, inside)
        if step >= calm:
            penalty = rig.loss(gradients, [outside])
        if not first:
            output = rig.loss(gradients, inside)
        error = _error_of(rig.reducer.prepare_for_backward, output)
        if error is None:
            error = _error_of((output if step < calm else output + penalty).backward)
        if error is not None:
            assert step >= calm > 0, "right from the start every parameter is hooked"
            assert f"{rig.reducer.names[outside]}" in str(error)
            return
        if _state(rig.reducer) is ReducerState.IDLE:
            rig.take(gradients)
    assert rig.reducer.stats()["steps"] == calm + 8


@pytest.mark.parametrize("calm", [1, 6])
def test_a_backward_from_elsewhere_is_right_or_raises(calm: int) -> None:
    rig = Rig(((3,), (LARGE,), (5,)), caps=CAPS)
    for step in range(calm + 8):
        gradients = rig.draw()
        loss = rig.loss(gradients)
        other = loss if step < calm else rig.loss(gradients)
        rig.reducer.prepare_for_backward(loss)
        error = _error_of(other.backward)
        if error is not None:
            assert "did not begin at an output of forward" in str(error)
            rig.reducer.reset()
            rig.communicator.under_way = 0
            clear(rig.parameters)
            rig.reducer.prepare_for_backward(loss)
            other = rig.loss(gradients)
            other.backward()
        rig.take(gradients)


# find_unused_parameters


def _uses(*counts: int) -> Peer:
    """A peer that adds 0.5 to every sum, and uses each parameter as often as told."""
    wanted = torch.tensor(counts, dtype=torch.int32)
    return lambda mine: wanted.clone() if mine.dtype is torch.int32 else torch.full_like(mine, 0.5)


@pytest.mark.parametrize("views", [False, True])
def test_unused_parameters_get_the_mean_where_any_rank_used_them(views: bool) -> None:
    rig = Rig(
        ((3,), (4,), (5,), (2,)),
        communicator=Loopback([_uses(1, 1, 0, 0)]),
        find_unused_parameters=True,
        gradient_as_bucket_view=views,
        caps=BucketCaps(cap_bytes=30),
    )
    kept = torch.full((2,), 7.0)
    for _ in range(8):
        clear(rig.parameters)
        rig.parameters[3].grad = kept
        gradients = rig.step([0])
        _same(rig.parameters[0].grad, rig.communicator.mean(gradients[0]))
        _same(rig.parameters[1].grad, rig.communicator.mean(torch.zeros(4)))
        assert rig.parameters[2].grad is None, "nobody used it"
        assert kept.tolist() == [7.0, 7.0]
        if views:
            _same(rig.parameters[3].grad, rig.communicator.mean(kept))  # as torch has it
        else:
            assert rig.parameters[3].grad is kept
        assert rig.reducer.last_unused == (1, 2, 3)


@pytest.mark.parametrize("no_outputs", [True, False])
def test_unused_buckets_may_be_left_out(no_outputs: bool) -> None:
    rig = Rig(
        ((3,), (4,), (5,)),
        find_unused_parameters=True,
        skip_unused_buckets=True,
        caps=BucketCaps(cap_bytes=8),
    )
    for used in ([0, 1, 2], [1], [0, 2], [2, 1, 0], [0]):
        gradients = rig.draw()
        before = rig.communicator.count("all_reduce")
        loss = rig.loss(gradients, used)
        rig.reducer.prepare_for_backward(None if no_outputs and len(used) == 3 else loss)
        loss.backward()
        assert rig.communicator.count("all_reduce") - before == len(used) + 1, "and the map of what is used"
        assert rig.reducer.stats()["buckets_reduced"] == len(used)
        for index, parameter in enumerate(rig.parameters):
            if index in used:
                _same(parameter.grad, rig.communicator.mean(gradients[index]))
            else:
                assert parameter.grad is None
        clear(rig.parameters)


def test_which_parameters_are_unused_may_change_and_no_sync_counts() -> None:
    rig = Rig(((3,), (4,), (5,)), communicator=Loopback([_uses(0, 0, 0)]), find_unused_parameters=True)
    for step in range(12):
        clear(rig.parameters)
        gradients = rig.draw()
        local: dict[int, torch.Tensor] = {}
        if step % 3 == 0:
            with rig.reducer.no_sync():
                rig.run(gradients, [step % 2])
            local[step % 2] = gradients[step % 2]
        used = [index for index in range(3) if (step + 1) >> index & 1] or [2]
        rig.run(gradients, used)
        for index in used:
            local[index] = local[index] + gradients[index] if index in local else gradients[index]
        for index, parameter in enumerate(rig.parameters):
            if index in local:
                _same(parameter.grad, rig.communicator.mean(local[index]), (step, index))
            else:
                assert parameter.grad is None
    assert not rig.reducer.cycle.unused_always_same and rig.reducer.rebuilt is False


@pytest.mark.parametrize("first", ["own", "common"])
def test_ranks_with_different_unused_parameters_agree(first: str) -> None:
    """Which of its gradients comes first: the one that only this rank has, or one that all have."""

    def case(communicator: Communicator) -> list[torch.Tensor | None]:
        parameters = [torch.ones(3, requires_grad=True) for _ in range(4)]
        reducer = Reducer(parameters, communicator, find_unused_parameters=True, caps=BucketCaps(cap_bytes=12))
        for _ in range(5):
            clear(parameters)
            used = [communicator.rank, 2] if first == "own" else [2, communicator.rank]
            run(reducer, [torch.full((3,), 1.0 + communicator.rank)] * 4, used)
        return [parameter.grad for parameter in parameters]

    for held in ThreadWorld(2).run(case):
        assert [None if one is None else one.tolist() for one in held] == [[0.5] * 3, [1.0] * 3, [1.5] * 3, None]


def test_a_gradient_that_only_a_peer_has_lies_as_its_parameter_does() -> None:
    values = torch.randn(129, 128)

    def case(communicator: Communicator) -> torch.Tensor | None:
        turned = torch.zeros(128, 129).t().requires_grad_()
        parameters = [turned, torch.zeros(3, requires_grad=True)]
        reducer = Reducer(parameters, communicator, find_unused_parameters=True)
        run(reducer, [values, torch.ones(3)], [0, 1] if communicator.rank else [1])
        assert turned.grad is not None and turned.grad.stride() == turned.stride()
        return turned.grad

    for held in ThreadWorld(2).results(case):
        _same(held, values / 2)


def test_a_parameter_that_no_search_finds_but_gets_a_gradient_is_named() -> None:
    rig = Rig(((3,), (4,)), names=["seen", "hidden"], find_unused_parameters=True)
    loss = rig.loss(rig.draw(), [0])
    rig.reducer.prepare_for_backward(loss)
    with pytest.raises(FusedReduceError, match=r"hidden \(index 1\).*marked.*ready twice"):
        (loss + rig.parameters[1].sum()).backward()


# Checkpoints and static graphs


def _reentrant(function: Callable[..., torch.Tensor], *arguments: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = checkpoint(function, *arguments, use_reentrant=True)
    return result


def _error_of(function: Callable[..., object], *arguments: object) -> FusedReduceError | None:
    """What `function` raised of ours."""
    try:
        function(*arguments)
    except FusedReduceError as error:
        return error
    return None


def _two_checkpoints(weight: torch.Tensor, bias: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    def layer(y: torch.Tensor) -> torch.Tensor:
        return torch.tanh(y @ weight)

    return (_reentrant(layer, _reentrant(layer, x)) + bias).sum()


def _nested_checkpoints(weight: torch.Tensor, bias: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    def inner(y: torch.Tensor) -> torch.Tensor:
        return torch.tanh(y @ weight)

    return (_reentrant(lambda y: _reentrant(inner, y) @ weight, x) + bias).sum()


def _checkpoints_around(weight: torch.Tensor, bias: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    def layer(y: torch.Tensor) -> torch.Tensor:
        return torch.tanh(y @ weight)

    return _reentrant(layer, _reentrant(layer, x) + bias).sum()


_SHARING = (_two_checkpoints, _nested_checkpoints, _checkpoints_around)


def _shared(forward: Callable[..., torch.Tensor], parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """What the gradients are without a reducer."""
    alone = [parameter.detach().clone().requires_grad_() for parameter in parameters]
    x = torch.ones(2, len(parameters[1]), requires_grad=True)
    forward(*alone, x).backward()
    return [one.grad for one in alone if one.grad is not None]


@pytest.mark.parametrize("forward", _SHARING)
@pytest.mark.parametrize("width", [4, 130])
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("cap_bytes", [8, 10**6])
def test_reentrant_checkpoints_that_share_a_weight_are_right_with_a_static_graph(
    forward: Callable[..., torch.Tensor], views: bool, cap_bytes: int, width: int
) -> None:
    parameters, communicator = drawn(((width, width), (width,))), Loopback()
    local = _shared(forward, parameters)
    reducer = Reducer(
        parameters,
        communicator,
        static_graph=True,
        gradient_as_bucket_view=views,
        caps=BucketCaps(cap_bytes=cap_bytes),
    )
    for _ in range(10):
        loss = forward(*parameters, torch.ones(2, width, requires_grad=True))
        reducer.prepare_for_backward(loss)
        loss.backward()
        assert_mean(reducer, local)
        clear(parameters)


@pytest.mark.parametrize("forward", _SHARING)
@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
@pytest.mark.parametrize("calm", [0, 1, 6])
@pytest.mark.parametrize("exclusive", [True, False])
@pytest.mark.parametrize("cap_bytes", [8, 10**6])
def test_reentrant_checkpoints_that_share_a_weight_raise_or_are_right(
    forward: Callable[..., torch.Tensor], order: list[int], calm: int, exclusive: bool, cap_bytes: int
) -> None:
    """Also after steps in which each parameter got one gradient; also within a wrapper."""
    parameters, communicator = drawn(((4, 4), (4,))), Loopback()
    local = _shared(forward, parameters)
    reducer = Reducer(
        parameters, communicator, exclusive=exclusive, names=["weight", "bias"], caps=BucketCaps(cap_bytes=cap_bytes)
    )
    nested = None if exclusive else Reducer(parameters, Loopback(), exclusive=False)
    for _ in range(calm):
        gradients = drawn_like(parameters)
        run(reducer, gradients, order)
        assert_mean(reducer, gradients)
        clear(parameters)
    loss = forward(*parameters, torch.ones(2, 4, requires_grad=True))
    reducer.prepare_for_backward(loss)
    error = _error_of(loss.backward) or _error_of(reducer.check_finalized)
    if error is None:
        assert_mean(reducer, local)
        reducer.check_finalized()
    else:
        assert "weight" in str(error) and reducer.stats()["state"] == "failed"
    assert nested is None or nested.stats()["steps"] == 0, "it was there, and not used"


def test_checkpoints_that_share_nothing_are_right() -> None:
    first, second, communicator = *drawn(((4, 4), (4, 4))), Loopback()
    parameters = [first, second]
    reducer = Reducer(parameters, communicator, caps=BucketCaps(cap_bytes=8))
    local: list[torch.Tensor] = []
    for step in range(8):
        x = torch.ones(2, 4, requires_grad=True)
        loss = _reentrant(lambda y: y @ second, _reentrant(lambda y: torch.tanh(y @ first), x)).sum()
        if step == 0:
            alone = [one.detach().clone().requires_grad_() for one in parameters]
            (torch.tanh(torch.ones(2, 4) @ alone[0]) @ alone[1]).sum().backward()
            local = [one.grad for one in alone if one.grad is not None]
        reducer.prepare_for_backward(loss)
        loss.backward()
        assert_mean(reducer, local)
        clear(parameters)


def test_a_static_graph_may_begin_under_no_sync() -> None:
    weight, bias = parameters = drawn(((4, 4), (4,)))
    communicator, local = Loopback(), _shared(_two_checkpoints, parameters)
    reducer = Reducer(parameters, communicator, static_graph=True, caps=BucketCaps(cap_bytes=8))
    for step in range(8):
        for last in (False, True) if step % 2 == 0 else (True,):
            loss = _two_checkpoints(weight, bias, torch.ones(2, 4, requires_grad=True))
            if last:
                reducer.prepare_for_backward(loss)
            else:
                with reducer.no_sync():
                    reducer.prepare_for_backward(loss)
            loss.backward()
        for parameter, one in zip(parameters, local, strict=True):
            assert parameter.grad is not None
            expected = communicator.mean(one * 2 if step % 2 == 0 else one)
            torch.testing.assert_close(parameter.grad, expected, atol=1e-6, rtol=0)  # sums in another order
        clear(parameters)


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("used_by_peers", [True, False])
def test_a_static_graph_knows_its_unused_parameters(views: bool, used_by_peers: bool) -> None:
    rig = Rig(
        ((3,), (4,), (5,)),
        communicator=Loopback([_uses(1, 1, int(used_by_peers))]),
        static_graph=True,
        gradient_as_bucket_view=views,
        caps=BucketCaps(cap_bytes=8),
    )
    for _ in range(8):
        gradients = rig.step([1, 0])
        for index in range(2):
            _same(rig.parameters[index].grad, rig.communicator.mean(gradients[index]))
        if used_by_peers:
            _same(rig.parameters[2].grad, rig.communicator.mean(torch.zeros(5)))
        else:
            assert rig.parameters[2].grad is None
        clear(rig.parameters)


def test_a_static_graphs_order_is_that_of_each_parameters_last_gradient() -> None:
    weight, bias = parameters = drawn(((4, 4), (4,)))
    reducer = Reducer(parameters, Loopback(), static_graph=True, caps=BucketCaps(cap_bytes=8))
    counted: list[int] = []
    for index, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(lambda _, index=index: counted.append(index))
    loss = _checkpoints_around(weight, bias, torch.ones(2, 4, requires_grad=True))
    reducer.prepare_for_backward(loss)
    loss.backward()
    assert counted == [0, 1, 0], "the weight is not ready with its first gradient"
    reducer.prepare_for_forward()
    assert reducer.last_order == (1, 0) and reducer.plan == ((1,), (0,))


def test_a_static_graph_whose_first_step_failed_is_counted_anew() -> None:
    rig = Rig(((3,), (4,), (5,)), static_graph=True, caps=BucketCaps(cap_bytes=8))
    handle = rig.parameters[0].register_hook(_boom)
    with pytest.raises(ZeroDivisionError):
        rig.step()
    handle.remove()
    rig.reducer.reset()
    for _ in range(4):
        rig.train()


def test_a_static_graph_that_changes_raises() -> None:
    parameters = drawn(((3,), (4,)))
    for steps in (1, 7):
        reducer = Reducer(parameters, Loopback(), names=["first", "second"], static_graph=True)
        for _ in range(steps):
            run(reducer, drawn_like(parameters))
            clear(parameters)
        run(reducer, drawn_like(parameters), [0])
        with pytest.raises(FusedReduceError, match=r"static_graph(.|\n)*rank 0: second"):
            reducer.prepare_for_forward()
        reducer.close()
        clear(parameters)


def test_static_graph_needs_outputs_and_comes_before_the_first_backward() -> None:
    rig = Rig(((3,),), static_graph=True)
    with pytest.raises(ValueError, match="needs the forward.s outputs"):
        rig.reducer.prepare_for_backward()
    rig = Rig(((3,),))
    rig.reducer.set_static_graph()
    rig.step()
    rig.reducer.set_static_graph()
    rig = Rig(((3,),))
    rig.step()
    with pytest.raises(RuntimeError, match="before training loop starts"):
        rig.reducer.set_static_graph()


# What users do to gradients


@pytest.mark.parametrize("views", [False, True])
def test_gradients_are_views_of_the_wire_and_zero_grad_keeps_them(views: bool) -> None:
    rig = Rig((*SMALL, (LARGE,)), caps=CAPS, gradient_as_bucket_view=views)
    for _ in range(2):
        clear(rig.parameters)
        rig.step()
    addresses = [parameter.grad.data_ptr() for parameter in rig.parameters if parameter.grad is not None]
    for _ in range(4):
        rig.reducer.zero_grad()
        assert all(parameter.grad is not None and not parameter.grad.any() for parameter in rig.parameters)
        gradients = rig.draw()
        with dispatch.count_launches() as launches:
            rig.run(gradients)
        rig.assert_mean(gradients)
        assert addresses == [parameter.grad.data_ptr() for parameter in rig.parameters if parameter.grad is not None]
        if views:
            assert not [one for one in launches if one.function == "unpack"], "there is nothing to copy out of the wire"
    storages = {one.grad.untyped_storage().data_ptr() for one in rig.parameters if one.grad is not None and one.numel()}
    assert len(storages) == (len(rig.reducer.plan) if views else sum(1 for one in rig.parameters if one.numel()))


def test_data_behind_a_view_is_reduced_and_the_view_comes_back() -> None:
    rig = Rig(((3,), (4,)), gradient_as_bucket_view=True)
    for step in range(8):
        rig.reducer.zero_grad()
        for parameter in rig.parameters[: step % 3]:
            if parameter.grad is not None:
                parameter.grad.data = torch.full_like(parameter, 2.0)
        before = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in rig.parameters]
        gradients = rig.step()
        rig.assert_mean([a + b for a, b in zip(before, gradients, strict=True)])


def test_zero_grad_zeroes_a_gradient_that_was_put_in_a_views_place() -> None:
    rig = Rig(((3,), (4,)), gradient_as_bucket_view=True)
    for _ in range(5):
        rig.step()
        rig.parameters[1].grad = torch.ones(4)
        rig.reducer.zero_grad()
        assert all(parameter.grad is not None and not parameter.grad.any() for parameter in rig.parameters)
        rig.train()


def test_data_put_behind_a_view_during_backward_is_reduced() -> None:
    rig = Rig(((3,), (4,)), gradient_as_bucket_view=True)

    def double(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.data = parameter.grad.data * 2

    rig.parameters[1].register_post_accumulate_grad_hook(double)
    for _ in range(8):
        rig.reducer.zero_grad()
        gradients = rig.step()
        rig.assert_mean([gradients[0], gradients[1] * 2])


def _ten_times(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(10)


@pytest.mark.parametrize("at", [0, 2, 6])
@pytest.mark.parametrize("which", [[0], [1], [2], [0, 1, 2]])
@pytest.mark.parametrize("views", [False, True])
def test_a_hook_that_scales_the_gradient_is_reduced_whenever_it_is_registered(
    at: int, which: list[int], views: bool
) -> None:
    rig = Rig(((3,), (LARGE,), (5,)), gradient_as_bucket_view=views)
    for step in range(10):
        if step == at:
            for index in which:
                rig.parameters[index].register_post_accumulate_grad_hook(_ten_times)
        gradients = rig.step()
        scaled = [one * 10 if step >= at and index in which else one for index, one in enumerate(gradients)]
        rig.take(scaled)


@pytest.mark.parametrize("at", [0, 6])
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("cap_bytes", [8, 10**9])
def test_a_hook_that_drops_the_gradient_makes_it_zero(at: int, which: int, cap_bytes: int) -> None:
    """As a gradient of zeros on this rank: the peers' mean."""
    rig = Rig(
        ((3,), (LARGE,), (5,)), names=["a", "b", "c"], caps=BucketCaps(first_bytes=cap_bytes, cap_bytes=cap_bytes)
    )
    for step in range(10):
        if step == at:
            rig.parameters[which].register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        gradients = rig.draw()
        loss = rig.loss(gradients)
        rig.reducer.prepare_for_backward(loss)
        loss.backward()
        local = [torch.zeros_like(g) if step >= at and i == which else g for i, g in enumerate(gradients)]
        rig.take(local)
    assert rig.reducer.stats()["steps"] == 10


@pytest.mark.parametrize("how", ["written to", "replaced"])
@pytest.mark.parametrize("numel", [5, LARGE])
def test_a_gradient_that_changes_after_it_was_packed_is_named(how: str, numel: int) -> None:
    rig = Rig(((3,), (4,), (numel,)), names=["a", "b", "c"], caps=BucketCaps(cap_bytes=8))
    rig.warm(2)

    def meddle(_: torch.Tensor) -> None:
        gradient = rig.parameters[2].grad
        assert gradient is not None, "it is ready first"
        if how == "replaced":
            rig.parameters[2].grad = gradient.clone()
        else:
            gradient.add_(1)

    handle = rig.parameters[0].register_post_accumulate_grad_hook(meddle)
    gradients = rig.draw()
    with pytest.raises(FusedReduceError, match=rf"rank 0: the gradient of c \(parameter 2\) was {how} after"):
        rig.run(gradients)
    assert _state(rig.reducer) is ReducerState.FAILED
    handle.remove()
    rig.reducer.reset()
    clear(rig.parameters)
    rig.run(gradients)
    assert _state(rig.reducer) is ReducerState.IDLE


@pytest.mark.parametrize("views", [False, True])
def test_zero_grad_in_place_between_forward_and_backward_with_a_flipped_order(views: bool) -> None:
    """What fooled a prototype: gradients that were there before looked like gradients of this backward."""
    rig = Rig(((3,), (4,), (LARGE,), (5,)), caps=BucketCaps(cap_bytes=8), gradient_as_bucket_view=views)
    for step in range(14):
        if step % 7 != 6:
            clear(rig.parameters)
        gradients = rig.draw()
        loss = rig.loss(gradients, [0, 1, 2, 3] if step % 7 == 6 else [3, 2, 1, 0])
        rig.reducer.prepare_for_backward(loss)
        if step % 7 == 6:
            for parameter in rig.parameters:
                assert parameter.grad is not None
                parameter.grad.zero_()
        loss.backward()
        rig.assert_mean(gradients)


def test_a_backward_that_misses_a_parameter_names_all_missing_at_the_next_forward() -> None:
    for steps in (0, 6):
        parameters = drawn(((3,), (4,), (5,)))
        reducer = Reducer(parameters, Loopback(), names=["a", "b", "c"])
        for _ in range(steps):
            run(reducer, drawn_like(parameters))
            clear(parameters)
        run(reducer, drawn_like(parameters), [1])
        for check in (reducer.check_finalized, reducer.finalize, reducer.prepare_for_forward):
            with pytest.raises(FusedReduceError, match="rank 0: a, c"):
                check()
        with pytest.raises(FusedReduceError, match="find_unused_parameters=True"):
            reducer.prepare_for_backward()
        reducer.reset()
        run(reducer, drawn_like(parameters))
        reducer.check_finalized()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_parameter_that_was_converted_after_wrapping_is_named(dtype: torch.dtype) -> None:
    rig = Rig(((3,), (4,)), names=["a", "b"])
    rig.step()
    clear(rig.parameters)
    rig.parameters[1].data = rig.parameters[1].data.to(dtype)
    with pytest.raises(
        FusedReduceError, match=rf"b was torch.float32 on cpu when the model was wrapped, and is {dtype}"
    ):
        rig.step()


# Comm hooks


def _mean_hook(state: list[Any], bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A peer's 0.25 in every element; whether the result lies in the bucket changes from call to call."""
    state.append((bucket.index(), bucket.buffer().dtype, bucket.is_last(), len(bucket.parameters())))
    assert bucket.buffer().is_contiguous() and bucket.buffer().numel() == sum(g.numel() for g in bucket.gradients()) * (
        2 if bucket.parameters()[0].is_complex() else 1
    )
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    if len(state) % 2:
        future.set_result((bucket.buffer() + 0.5) / 2)
    else:
        future.set_result(bucket.buffer().add_(0.5).div_(2))
    return future


@pytest.mark.parametrize("views", [False, True])
def test_a_comm_hook_takes_the_place_of_the_wire(views: bool) -> None:
    parameters = [*drawn(SMALL), *drawn(((4, 3), (2,)), torch.float64)]
    communicator, seen = Loopback(), list[Any]()
    reducer = Reducer(parameters, communicator, caps=CAPS, gradient_as_bucket_view=views)
    reducer.register_comm_hook(seen, _mean_hook)
    for step in range(9):
        gradients = drawn_like(parameters)
        seen.clear()
        run(reducer, gradients)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            _same(parameter.grad, (gradient + 0.5) / 2)
        assert [one[0] for one in seen] == list(range(len(reducer.plan)))
        assert [one[2] for one in seen] == [False] * (len(seen) - 1) + [True]
        if step % 3:
            clear(parameters)
        else:
            reducer.zero_grad()
    assert communicator.count("all_reduce") == 0 and reducer.stats()["wire_bytes"] == 0
    with pytest.raises(RuntimeError, match="only be called once"):
        reducer.register_comm_hook(None, _mean_hook)


@pytest.mark.parametrize("views", [False, True])
def test_a_comm_hook_is_shown_zeros_where_there_is_no_gradient(views: bool) -> None:
    """And of a parameter that no rank has used nothing is copied out of what it returns."""
    rig = Rig(
        ((3,), (4,), (5,)),
        communicator=Loopback([_uses(1, 1, 0)]),
        find_unused_parameters=True,
        gradient_as_bucket_view=views,
    )
    shown: dict[int, torch.Tensor] = {}

    def hook(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
        shown.update({id(parameter): gradient.clone() for parameter, gradient in pairs})
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer().add_(0.5).div_(2))
        return future

    rig.reducer.register_comm_hook(None, hook)
    for used in ([0, 1, 2], [0], [2, 0], [0]):
        clear(rig.parameters)
        gradients = rig.step(used)
        for index, parameter in enumerate(rig.parameters):
            local = gradients[index] if index in used else torch.zeros_like(gradients[index])
            _same(shown[id(parameter)], local, f"parameter {index} of a step that uses {used}")
            if index < 2 or index in used:
                _same(parameter.grad, (local + 0.5) / 2)
            else:
                assert parameter.grad is None, "nobody used it"


def test_a_comm_hook_and_a_wire_exclude_each_other() -> None:
    reducer = Reducer(drawn(((3,),)), Loopback(), ReduceConfig(wire="bf16"))
    with pytest.raises(ValueError, match="exclude each other"):
        reducer.register_comm_hook(None, _mean_hook)


def _wrong_numel(_: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(torch.zeros(bucket.buffer().numel() + 1))
    return future


def _failed_future(_: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_exception(ValueError("of the hook"))  # type: ignore[arg-type]
    return future


def _raises(_: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    raise KeyError("of the hook")


@pytest.mark.parametrize(
    ("hook", "kind", "words"),
    [
        (_raises, KeyError, "of the hook"),
        (_failed_future, ValueError, "of the hook"),
        (_wrong_numel, ValueError, "holds 8 elements, expected the bucket's 7"),
        (lambda _, bucket: bucket.buffer(), TypeError, "should be a torch.futures.Future, got Tensor"),
    ],
)
def test_a_comm_hook_that_fails_leaves_a_reducer_that_says_so_and_can_be_reset(
    hook: Any, kind: type[Exception], words: str
) -> None:
    parameters, broken = drawn(((3,), (4,))), [False]
    reducer = Reducer(parameters, Loopback())
    seen: list[Any] = []
    reducer.register_comm_hook(seen, lambda state, bucket: (hook if broken[0] else _mean_hook)(state, bucket))
    for _ in range(2):
        gradients = drawn_like(parameters)
        run(reducer, gradients)
        clear(parameters)
        broken[0] = True
        with pytest.raises(kind, match=words):
            run(reducer, gradients)
        assert _state(reducer) is ReducerState.FAILED
        for parameter, gradient in zip(parameters, gradients, strict=True):
            _same(parameter.grad, gradient, "still this rank's own")
        with pytest.raises(FusedReduceError, match=rf"call reset\(\) on every rank.*{kind.__name__}"):
            reducer.prepare_for_backward()
        broken[0] = False
        reducer.reset()
        clear(parameters)
        run(reducer, gradients)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            _same(parameter.grad, (gradient + 0.5) / 2)
        clear(parameters)


# Failures


@pytest.mark.parametrize("which", ["fail_issue", "fail_wait"])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_collective_that_fails_needs_a_new_group(which: str, number: int) -> None:
    rig = Rig(((3,), (4,), (LARGE,)), names=["a", "b", "c"], caps=BucketCaps(cap_bytes=8))
    rig.warm(2)
    setattr(rig.communicator, which, rig.communicator.count("all_reduce") + number)
    told: list[str] = []
    rig.reducer.cycle.on_error = told.append
    gradients = rig.draw()
    name = "cba"[number]
    with pytest.raises(CollectiveError, match=rf"rank 0: the all-reduce of bucket {number} \({name}\).*Connection"):
        rig.run(gradients)
    assert _state(rig.reducer) is ReducerState.FAILED and len(told) == 1
    for index, (parameter, gradient) in enumerate(zip(rig.parameters, gradients, strict=True)):
        if parameter.grad is None:  # backward ended before it came to this one
            assert which == "fail_issue" and 2 - index > number
            continue
        reduced = torch.equal(parameter.grad, rig.communicator.mean(gradient))
        assert reduced or torch.equal(parameter.grad, gradient), f"{index}: neither reduced nor local"
        assert reduced == (which == "fail_wait" and 2 - index < number)
    with pytest.raises(FusedReduceError, match="process group cannot be used any more"):
        rig.reducer.prepare_for_backward()
    with pytest.raises(FusedReduceError, match="a collective failed, on ranks 0, 1, 2"):
        rig.reducer.reset()
    assert _state(rig.reducer) is ReducerState.LOST
    with pytest.raises(FusedReduceError, match="process group cannot be used any more"):
        rig.reducer.prepare_for_forward()
    fresh = Loopback([constant(4.0)])
    rig.reducer.set_communicator(fresh)
    for _ in range(6):
        clear(rig.parameters)
        rig.run(gradients)
        rig.assert_mean(gradients)
    assert fresh.count("broadcast") == 1 and fresh.count("gather") == 2, "agreed and learned anew"
    assert rig.reducer.stats()["collectives"] == 1 + 5 * 3 + 1, "and the order"


def test_a_failing_agreement_or_broadcast_names_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(((3,), (4,)))

    def gone(*_: object) -> Any:
        raise RuntimeError("Connection closed by peer")

    with monkeypatch.context() as patch:
        patch.setattr(rig.communicator, "all_gather_bytes", gone)
        with pytest.raises(CollectiveError, match="rank 0: comparing model and settings .*Connection closed"):
            rig.step()
    with pytest.raises(FusedReduceError, match=r"set_communicator\(\).* comparing model and settings"):
        rig.step()
    rig.communicator = Loopback()
    rig.reducer.set_communicator(rig.communicator)
    rig.step()
    with monkeypatch.context() as patch:
        patch.setattr(rig.communicator, "broadcast", gone)
        with pytest.raises(CollectiveError, match="rank 0: broadcasting the order of readiness failed"):
            rig.step()


@pytest.mark.parametrize(("stage", "views"), [("pack", False), ("pack", True), ("unpack", False)])
def test_a_kernel_that_fails_leaves_a_reducer_that_can_be_reset(
    views: bool, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(((3,), (4,), (LARGE,)), gradient_as_bucket_view=views, caps=BucketCaps(cap_bytes=8))
    rig.warm(2)
    gradients = rig.draw()

    def out_of_memory(*_: object, **__: object) -> None:
        raise MemoryError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(dispatch, stage, out_of_memory)
        with pytest.raises(MemoryError):
            rig.run(gradients)
    assert _state(rig.reducer) is ReducerState.FAILED
    for parameter, gradient in zip(rig.parameters, gradients, strict=True):
        if parameter.grad is not None:
            # What is a view of the wire is divided already.
            local = (
                gradient / rig.communicator.size if views and not torch.equal(parameter.grad, gradient) else gradient
            )
            _same(parameter.grad, local, "all local, not half written")
    with pytest.raises(FusedReduceError, match="MemoryError: out of memory"):
        rig.reducer.check_finalized()
    rig.reducer.reset()
    rig.communicator.under_way = 0  # what was given up is never waited for
    for _ in range(6):
        clear(rig.parameters)
        rig.run(gradients)
        rig.assert_mean(gradients)


def test_a_backward_of_the_users_that_raises_can_be_reset() -> None:
    rig = Rig(((3,), (4,), (LARGE,)), names=["a", "b", "c"], caps=BucketCaps(cap_bytes=8))
    for step in range(12):
        gradients = rig.draw()
        if step in (1, 8):
            handle = rig.parameters[1].register_hook(_boom)
            with pytest.raises(ZeroDivisionError):
                rig.run(gradients)
            handle.remove()
            with pytest.raises(FusedReduceError, match="rank 0: a, b"):
                rig.reducer.prepare_for_forward()
            rig.reducer.reset()
            rig.communicator.under_way = 0  # what was given up is never waited for
            clear(rig.parameters)
        rig.run(gradients)
        rig.take(gradients)


def _boom(_: torch.Tensor) -> torch.Tensor:
    raise ZeroDivisionError


def test_reset_compares_how_far_each_rank_has_come() -> None:
    rig = Rig(((3,),))
    rig.step()
    rig.reducer.reset()
    assert _state(rig.reducer) is ReducerState.IDLE
    rig.communicator.aside = lambda text: [text, "7 whole", text]
    with pytest.raises(FusedReduceError, match=r"different numbers of collectives, by rank: \['1', '7', '1'\]"):
        rig.reducer.reset()
    assert _state(rig.reducer) is ReducerState.LOST
    rig.communicator.aside = lambda text: [text, text, text]
    with pytest.raises(FusedReduceError, match="a collective failed, on ranks 0, 1, 2. ranks have issued different"):
        rig.reducer.reset()
    keys = [call.kind for call in rig.communicator.calls if call.kind.startswith("aside")]
    assert len(set(keys)) == len(keys) == 3, "a key is never used twice"

    other = Loopback()
    other.aside = lambda text: [text, text.replace("whole", "failed"), text]
    rig.reducer.set_communicator(other)
    with pytest.raises(FusedReduceError, match="a collective failed, on ranks 1"):
        rig.reducer.reset()

    def late(_: str) -> list[str]:
        raise RuntimeError("timed out")

    third = Loopback()
    third.aside = late
    rig.reducer.set_communicator(third)
    with pytest.raises(FusedReduceError, match=r"not every rank called reset\(\) in time: timed out"):
        rig.reducer.reset()


def test_in_a_new_group_resets_are_counted_anew() -> None:
    """Ranks meet there by the count, and one that is new to all of them has reset nothing yet."""
    old, group, fresh = Loopback(), Loopback(), Loopback()
    reducer = Reducer(drawn(((3,),)), old)
    for _ in range(2):
        reducer.reset()
    reducer.set_communicator(group)
    reducer.reset()
    Reducer(drawn(((3,),)), fresh).reset()
    assert old.count("aside reset 2") == 1
    assert [call.kind for call in group.calls] == [call.kind for call in fresh.calls] == ["aside reset 1"]


def test_reset_forgets_the_divisor_and_the_futures_of_the_step_that_was_given_up() -> None:
    rig = Rig(((3,), (4,)))
    failed: torch.futures.Future[Any] = torch.futures.Future()
    failed.set_exception(ValueError("of the step that was given up"))
    rig.reducer.pipeline.divide_by_ranks_counted(Counted(1.0))
    rig.reducer.pipeline.wait_at_end([failed])
    rig.reducer.reset()
    gradients = rig.step()
    rig.assert_mean(gradients)


def test_reset_drops_gradients_that_a_collective_may_still_write() -> None:
    rig = Rig(((3,), (4,)), gradient_as_bucket_view=True)
    rig.step()
    rig.reducer.reset()
    assert [parameter.grad for parameter in rig.parameters] == [None, None]


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


def test_views_of_a_16_bit_wire_are_none_and_a_warning_counts_real_bytes() -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.complex64, torch.float32)
    parameters = [torch.zeros(64, dtype=dtype, requires_grad=True) for dtype in dtypes]
    config = ReduceConfig(wire="bf16")
    options: dict[str, Any] = {"sparse": [False, False, False, True], "gradient_as_bucket_view": True}
    # fp32, bf16, complex64: 4 + 2 + 8 bytes an element as gradients, 2 + 2 + 4 on the wire.
    with pytest.warns(UserWarning, match=r" 512 bytes at the start of backward and 1408 at its end; .* take 896 "):
        reducer = Reducer(parameters, Loopback(), config, **options)
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


def test_close_may_be_called_twice_and_ends_everything() -> None:
    parameters, communicator = drawn(SMALL), Loopback()
    with Reducer(parameters, communicator, gradient_as_bucket_view=True) as reducer:
        gradients = drawn_like(parameters)
        run(reducer, gradients)
        reducer.close()
    reducer.close()
    assert reducer.stats()["state"] == "closed"
    assert_mean(reducer, gradients)
    calls = len(communicator.calls)
    with pytest.raises(FusedReduceError, match="closed"):
        reducer.prepare_for_backward()
    with pytest.raises(FusedReduceError, match="closed"):
        reducer.reset()
    clear(parameters)
    loss_with(parameters, gradients).backward()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        _same(parameter.grad, gradient)
    assert len(communicator.calls) == calls
    assert _state(reducer) is ReducerState.CLOSED


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
    for parameter, gradient in zip(rig.parameters, gradients, strict=True):
        _same(parameter.grad, gradient, "no hook is left")
    assert len(rig.communicator.calls) == calls
    models = [weakref.ref(parameter) for parameter in rig.parameters]
    del rig.parameters, parameter
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
    for parameter, gradient in zip(rig.parameters, gradients, strict=True):
        _same(parameter.grad, gradient)


# Ranks without inputs


def _issued(inputs: int, **options: Any) -> tuple[list[Call], int]:
    """What a rank issues and counts in 25 steps, of which it has inputs for the first; its peers have for all."""
    parameters, communicator = drawn((*SMALL, (6, 2))), Loopback()
    count = len(parameters)
    communicator.order = lambda _: torch.arange(count).flip(0)
    kind = torch.tensor([0, 1, 0])  # sparse, of one sparse dimension, fp32
    communicator.gathered = lambda _, mine: kind if mine.numel() == len(kind) else mine
    sparse = [False] * (count - 1) + [True]
    # With "planned" what follows depends on numbers that all ranks share, and here are this rank's own.
    config = ReduceConfig(policy="ready", check_finite="count")
    with Reducer(parameters, communicator, config, caps=CAPS, sparse=sparse, **options) as reducer:
        for step in range(25):
            clear(parameters)
            if step < inputs:
                leaf_step(reducer, [*drawn_like(parameters[:-1]), sparse_like(parameters[-1], [1, 2])])
            else:
                shadow_step(reducer)
        return communicator.calls, int(reducer.stats()["collectives"])


@pytest.mark.parametrize("option", ["", "find_unused_parameters", "static_graph"])
@pytest.mark.parametrize("inputs", [0, 1, 10])
def test_a_rank_without_inputs_issues_what_the_others_do(inputs: int, option: str) -> None:
    """From any step on: before an order is known, before anybody has had a sparse gradient, among profiled steps."""
    options = {option: True} if option else {}
    assert _issued(inputs, **options)[0] == _issued(25, **options)[0]


@pytest.mark.parametrize("option", ["", "find_unused_parameters", "static_graph"])
@pytest.mark.parametrize("inputs", [0, 1, 10])
def test_a_rank_without_inputs_counts_the_collectives_that_it_takes_part_in(inputs: int, option: str) -> None:
    """reset() compares these counts: where they differ it gives the group up."""
    options = {option: True} if option else {}
    assert _issued(inputs, **options)[1] == _issued(25, **options)[1]


# Numbers


# A step comes before round 0.
FIRST_STEPS = [number + 1 for number in FIRST_PROFILED]


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
        with dispatch.count_launches() as launches:
            rig.step()
        buckets = len(rig.reducer.plan)
        assert [one.function for one in launches] == ["pack"] * buckets + ["unpack"] * buckets
        assert rig.communicator.count("all_reduce") - before == buckets
        clear(rig.parameters)
    assert buckets > 2


# Agreement across ranks


def _refused(communicator: Loopback, parameters: list[torch.Tensor], **options: Any) -> str:
    reducer = Reducer(parameters, communicator, **options)
    with pytest.raises(AgreementError) as caught:
        reducer.prepare_for_backward(loss_with(parameters, drawn_like(parameters)))
    reducer.close()
    assert isinstance(caught.value, ValueError) and communicator.count("all_reduce") == 0
    return str(caught.value)


@pytest.mark.parametrize(
    ("shapes", "dtypes", "words"),
    [
        ((((3,), (4,)), ((3,),)), (torch.float32,) * 2, "Rank 0 has 2 params, while rank 1 has inconsistent 1 params"),
        ((((3,), (4,)), ((3,), (5,))), (torch.float32,) * 2, r"parameter 1 .*\(4,\).*on rank 0; .*\(5,\).*on rank 1"),
        ((((3,), (4,)), ((4,), (3,))), (torch.float32,) * 2, r"parameter 0 .*\(3,\).*on rank 0; .*\(4,\).*on rank 1"),
        ((((3,),), ((3,),)), (torch.float32, torch.float64), r"parameter 0 .*float32.*rank 0; .*float64.*rank 1"),
    ],
)
def test_another_model_on_another_rank_is_the_same_error_everywhere(
    shapes: Any, dtypes: tuple[torch.dtype, torch.dtype], words: str
) -> None:
    def case(communicator: Communicator) -> None:
        parameters = drawn(shapes[communicator.rank], dtypes[communicator.rank])
        Reducer(parameters, communicator).prepare_for_backward(loss_with(parameters, parameters))

    first, second = ThreadWorld(2).run(case)
    assert isinstance(first, AgreementError) and isinstance(second, AgreementError)
    assert str(first) == str(second)
    with pytest.raises(AgreementError, match=words):
        raise first


def test_other_strides_and_sparse_flags_are_another_model() -> None:
    def case(communicator: Communicator) -> None:
        turned = torch.ones(3, 2).t() if communicator.rank else torch.ones(2, 3)
        sparse = [communicator.rank == 2]
        Reducer([turned.requires_grad_()], communicator, sparse=sparse).prepare_for_backward(turned.sum())

    errors = ThreadWorld(3).run(case)
    assert all(isinstance(error, AgreementError) for error in errors) and len(set(map(str, errors))) == 1
    assert "strides (3, 1)" in str(errors[0]) and "strides (1, 2)" in str(errors[0]) and "sparse" in str(errors[0])


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"config": ReduceConfig(wire="bf16")}, "wire"),
        ({"config": ReduceConfig(overlap=False)}, "overlap"),
        ({"config": ReduceConfig(policy="static")}, "policy"),
        ({"config": ReduceConfig(cap_policy="strict")}, "cap_policy"),
        ({"caps": BucketCaps(first_bytes=5)}, "first_bucket_bytes"),
        ({"caps": BucketCaps(cap_bytes=5)}, "bucket_cap_bytes"),
        ({"caps": BucketCaps(listed_bytes=(5, 6))}, "bucket_caps_bytes"),
        ({"caps": BucketCaps(planned_bytes=5)}, "planned_bytes"),
        ({"find_unused_parameters": True}, "find_unused_parameters"),
        ({"static_graph": True}, "static_graph"),
        ({"gradient_as_bucket_view": True}, "gradient_as_bucket_view"),
        ({"skip_unused_buckets": True}, "skip_unused_buckets"),
    ],
)
def test_other_settings_on_another_rank_are_named_everywhere(options: dict[str, Any], name: str) -> None:
    def case(communicator: Communicator) -> None:
        parameters = drawn(((3,),))
        mine = options if communicator.rank == 1 else {}
        Reducer(parameters, communicator, **mine).prepare_for_backward(loss_with(parameters, parameters))

    errors = ThreadWorld(3).run(case)
    assert all(isinstance(error, AgreementError) for error in errors) and len(set(map(str, errors))) == 1
    assert f" {name}: " in str(errors[0]) and "ranks 0, 2" in str(errors[0]) and "rank 1" in str(errors[0])


def test_long_lists_of_caps_are_compared_too() -> None:
    def case(communicator: Communicator) -> None:
        parameters = drawn(((3,),))
        caps = BucketCaps(listed_bytes=(*range(1, 5000), 1 + communicator.rank // 2))
        Reducer(parameters, communicator, caps=caps).prepare_for_backward(loss_with(parameters, parameters))

    errors = ThreadWorld(4).run(case)
    assert all("bucket_caps_bytes" in str(error) for error in errors) and len(set(map(str, errors))) == 1


def test_a_peers_problem_is_told_to_all() -> None:
    def case(communicator: Communicator) -> None:
        problem = "its disk is full" if communicator.rank == 2 else ""
        agree_on_parameters(communicator, ["weight"], {}, torch.device("cpu"), problem)

    errors = ThreadWorld(3).run(case)
    assert len(set(map(str, errors))) == 1
    assert "not every rank can reduce its model. rank 2: its disk is full" in str(errors[0])


def test_what_is_no_settings_is_named() -> None:
    communicator = Loopback()
    communicator.payload = lambda rank, mine: b"GET / HTTP/1.1"
    assert "a rank sent b'GET / HTTP/1.1' in place of its settings" in _refused(communicator, drawn(((3,),)))


def test_ranks_adopt_the_order_of_rank_0() -> None:
    def case(communicator: Communicator) -> tuple[Any, list[list[float]]]:
        parameters = [torch.ones(2, requires_grad=True) for _ in range(4)]
        reducer = Reducer(parameters, communicator, ReduceConfig(policy="static"), caps=BucketCaps(cap_bytes=8))
        order = [2, 0, 3, 1] if communicator.rank == 0 else [0, 1, 2, 3]
        for _ in range(8):
            clear(parameters)
            run(reducer, [torch.full((2,), float(communicator.rank + k)) for k in range(4)], order)
        return reducer.plan, [parameter.grad.tolist() for parameter in parameters if parameter.grad is not None]

    for plan, gradients in ThreadWorld(3).run(case):
        assert plan == ((2,), (0,), (3,), (1,))
        assert gradients == [[1.0 + k] * 2 for k in range(4)]


def test_the_order_that_is_broadcast_is_the_one_that_counts() -> None:
    parameters, communicator = drawn(((3,), (4,), (5,))), Loopback(PEERS, rank=1)
    communicator.order = lambda mine: torch.tensor([1, 2, 0])
    reducer = Reducer(parameters, communicator, caps=BucketCaps(cap_bytes=8))
    for _ in range(6):
        gradients = drawn_like(parameters)
        run(reducer, gradients)
        assert_mean(reducer, gradients)
        clear(parameters)
    assert reducer.plan == ((1,), (2,), (0,)), "whatever this rank saw"
