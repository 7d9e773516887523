"""What users do to a Reducer's gradients, within backward and between: in place, by hooks, and by a comm hook."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.leaf_steps import CAPS, assert_same, clear, ended
from support.loopback import Loopback, uses
from support.rig import LARGE, SMALL, Rig, assert_gradient, drawn, drawn_like, run, state_of

from fusedreduce import BucketCaps, FusedReduceError, Reducer
from fusedreduce.buckets.grad_bucket import GradBucket
from fusedreduce.kernels import counting
from fusedreduce.reducer.state import ReducerState

pytestmark = pytest.mark.usefixtures("path")


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
        with counting.count_launches() as launches:
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
    assert state_of(rig.reducer) is ReducerState.FAILED
    handle.remove()
    rig.reducer.reset()
    clear(rig.parameters)
    rig.run(gradients)
    assert state_of(rig.reducer) is ReducerState.IDLE


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
    return ended((bucket.buffer() + 0.5) / 2 if len(state) % 2 else bucket.buffer().add_(0.5).div_(2))


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
        assert_same([one.grad for one in parameters], [(one + 0.5) / 2 for one in gradients])
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
        communicator=Loopback([uses(1, 1, 0)]),
        find_unused_parameters=True,
        gradient_as_bucket_view=views,
    )
    shown: dict[int, torch.Tensor] = {}

    def hook(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
        shown.update({id(parameter): gradient.clone() for parameter, gradient in pairs})
        return ended(bucket.buffer().add_(0.5).div_(2))

    rig.reducer.register_comm_hook(None, hook)
    for used in ([0, 1, 2], [0], [2, 0], [0]):
        clear(rig.parameters)
        gradients = rig.step(used)
        for index, parameter in enumerate(rig.parameters):
            local = gradients[index] if index in used else torch.zeros_like(gradients[index])
            assert_gradient(shown[id(parameter)], local, f"parameter {index} of a step that uses {used}")
            if index < 2 or index in used:
                assert_gradient(parameter.grad, (local + 0.5) / 2)
            else:
                assert parameter.grad is None, "nobody used it"


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
        (lambda _, bucket: ended(torch.zeros(8)), ValueError, "holds 8 elements, expected the bucket's 7"),
        (lambda _, bucket: bucket.buffer(), TypeError, "should be a torch.futures.Future, got Tensor"),
    ],
)
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("later", [False, True])
def test_a_comm_hook_that_fails_leaves_a_reducer_that_says_so_and_can_be_reset(
    hook: Any, kind: type[Exception], words: str, later: bool, views: bool
) -> None:
    """For its first bucket, or for the last of two (`later`), whose first may be reduced by then."""
    parameters, broken = drawn(((7,), (3,)) if later else ((3,), (4,))), [False]
    caps = BucketCaps(first_bytes=4, cap_bytes=4) if later else BucketCaps()
    reducer = Reducer(parameters, Loopback(), caps=caps, gradient_as_bucket_view=views)
    seen: list[Any] = []

    def shown(state: list[Any], bucket: Any) -> torch.futures.Future[torch.Tensor]:
        fails = broken[0] and (bucket.is_last() or not later)
        return (hook if fails else _mean_hook)(state, bucket)

    reducer.register_comm_hook(seen, shown)
    for _ in range(2):
        gradients = drawn_like(parameters)
        run(reducer, gradients)
        clear(parameters)
        broken[0] = True
        with pytest.raises(kind, match=words):
            run(reducer, gradients)
        assert state_of(reducer) is ReducerState.FAILED
        failed = reducer.plan[-1] if later else range(2)
        assert_same([parameters[one].grad for one in failed], [gradients[one] for one in failed], "this rank's own")
        with pytest.raises(FusedReduceError, match=rf"call reset\(\) on every rank.*{kind.__name__}"):
            reducer.prepare_for_backward()
        broken[0] = False
        reducer.reset()
        clear(parameters)
        run(reducer, gradients)
        assert_same([one.grad for one in parameters], [(one + 0.5) / 2 for one in gradients])
        clear(parameters)
