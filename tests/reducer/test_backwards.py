"""Which backwards a Reducer reduces: no_sync, several outputs, unused parameters, checkpoints, static graphs."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.grids import grid
from support.inside import inside
from support.leaf_steps import CAPS, clear
from support.loopback import Loopback, ThreadWorld, uses
from support.rig import LARGE, SMALL, Rig, assert_gradient, assert_mean, boom, drawn, drawn_like, run, state_of
from torch.utils.checkpoint import checkpoint

from fusedreduce import BucketCaps, FusedReduceError, Reducer
from fusedreduce.comm.protocol import Communicator
from fusedreduce.reducer.state import ReducerState

pytestmark = pytest.mark.usefixtures("path")


# Which backwards are reduced


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


@pytest.mark.parametrize("first", [0, 5])
def test_outputs_may_change_between_given_and_not_given(first: int) -> None:
    """Without them a step ends with its last gradient."""
    rig = Rig(SMALL, caps=CAPS)
    for step in range(first, first + 20):
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


@grid(
    ("calm", "outside", "first", "cap_bytes"),
    [*itertools.product((0, 1, 6), (0, 1, 2), (False, True), (8, 10**9))],
)
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
        if state_of(rig.reducer) is ReducerState.IDLE:
            rig.assert_mean(gradients)
        clear(rig.parameters)
    assert rig.reducer.stats()["steps"] == calm + 8


# find_unused_parameters


@pytest.mark.parametrize("views", [False, True])
def test_unused_parameters_get_the_mean_where_any_rank_used_them(views: bool) -> None:
    rig = Rig(
        ((3,), (4,), (5,), (2,)),
        communicator=Loopback([uses(1, 1, 0, 0)]),
        find_unused_parameters=True,
        gradient_as_bucket_view=views,
        caps=BucketCaps(cap_bytes=30),
    )
    kept = torch.full((2,), 7.0)
    for _ in range(8):
        clear(rig.parameters)
        rig.parameters[3].grad = kept
        gradients = rig.step([0])
        assert_gradient(rig.parameters[0].grad, rig.communicator.mean(gradients[0]))
        assert_gradient(rig.parameters[1].grad, rig.communicator.mean(torch.zeros(4)))
        assert rig.parameters[2].grad is None, "nobody used it"
        assert kept.tolist() == [7.0, 7.0]
        if views:
            assert_gradient(rig.parameters[3].grad, rig.communicator.mean(kept))  # as torch has it
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
        rig.reducer.prepare_for_backward(*([] if no_outputs and len(used) == 3 else [loss]))
        loss.backward()
        assert rig.communicator.count("all_reduce") - before == len(used) + 1, "and the map of what is used"
        assert rig.reducer.stats()["buckets_reduced"] == len(used)
        for index, parameter in enumerate(rig.parameters):
            if index in used:
                assert_gradient(parameter.grad, rig.communicator.mean(gradients[index]))
            else:
                assert parameter.grad is None
        clear(rig.parameters)


def test_which_parameters_are_unused_may_change_and_no_sync_counts() -> None:
    rig = Rig(((3,), (4,), (5,)), communicator=Loopback([uses(0, 0, 0)]), find_unused_parameters=True)
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
                assert_gradient(parameter.grad, rig.communicator.mean(local[index]), (step, index))
            else:
                assert parameter.grad is None
    assert not inside(rig.reducer).unused_are_always_the_same and rig.reducer.rebuilt is False


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
        assert_gradient(held, values / 2)


def test_a_parameter_that_no_search_finds_but_gets_a_gradient_is_named() -> None:
    rig = Rig(((3,), (4,)), names=["seen", "hidden"], find_unused_parameters=True)
    loss = rig.loss(rig.draw(), [0])
    rig.reducer.prepare_for_backward(loss)
    with pytest.raises(FusedReduceError, match=r"Parameter at index 1 with name hidden has been marked as ready twice"):
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


@grid(("forward", "width", "views", "cap_bytes"), [*itertools.product(_SHARING, (4, 130), (False, True), (8, 10**6))])
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


@grid(
    ("forward", "order", "calm", "exclusive", "cap_bytes"),
    [*itertools.product(_SHARING, ((0, 1), (1, 0)), (0, 1, 6), (True, False), (8, 10**6))],
)
def test_reentrant_checkpoints_that_share_a_weight_raise_or_are_right(
    forward: Callable[..., torch.Tensor], order: tuple[int, int], calm: int, exclusive: bool, cap_bytes: int
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
        communicator=Loopback([uses(1, 1, int(used_by_peers))]),
        static_graph=True,
        gradient_as_bucket_view=views,
        caps=BucketCaps(cap_bytes=8),
    )
    for _ in range(8):
        gradients = rig.step([1, 0])
        for index in range(2):
            assert_gradient(rig.parameters[index].grad, rig.communicator.mean(gradients[index]))
        if used_by_peers:
            assert_gradient(rig.parameters[2].grad, rig.communicator.mean(torch.zeros(5)))
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
    handle = rig.parameters[0].register_hook(boom)
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


def test_static_graph_needs_outputs() -> None:
    rig = Rig(((3,),), static_graph=True)
    with pytest.raises(ValueError, match="needs the forward.s outputs"):
        rig.reducer.prepare_for_backward()
