"""Corners of the Reducer that once were wrong: programs that torch's DDP gets right, errors that nobody raised."""

from __future__ import annotations

import copy
import gc
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support import raw_calls
from support.inside import BACKWARD_BEGINS, inside
from support.leaf_steps import clear, leaves_all
from support.loopback import Loopback, ThreadWorld, constant
from torch import nn

import fusedreduce
from fusedreduce.buckets.dense import DenseReduction
from fusedreduce.comm.protocol import Communicator
from fusedreduce.errors import FusedReduceError
from fusedreduce.planning.bucketing import BucketCaps
from fusedreduce.reducer.reducer import Reducer
from fusedreduce.reducer.state import ReducerState

pytestmark = pytest.mark.usefixtures("path")


def leaves(count: int, numel: int = 4, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(numel, dtype=dtype, requires_grad=True) for _ in range(count)]


def plain_step(reducer: Reducer, parameters: list[torch.Tensor]) -> None:
    clear(parameters)
    loss = torch.stack([(parameter * (index + 1)).sum() for index, parameter in enumerate(parameters)]).sum()
    reducer.prepare_for_backward(loss)
    loss.backward()


def trained(parameters: list[torch.Tensor], communicator: Communicator, **options: object) -> Reducer:
    """A reducer in its steady state, with no gradients."""
    reducer = Reducer(parameters, communicator, **options)  # type: ignore[arg-type]
    for _ in range(6):
        plain_step(reducer, parameters)
    clear(parameters)
    return reducer


@pytest.mark.parametrize("again", [True, False])
def test_gradients_set_by_hand_from_autograd_grad_before_the_backward(again: bool) -> None:
    """Which is of another forward, or goes through the very output that autograd.grad went through."""
    parameters, communicator = leaves(3), Loopback()
    reducer = Reducer(parameters, communicator)
    for _ in range(8):
        clear(parameters)
        output = torch.stack([parameter.sum() for parameter in parameters]).sum()
        reducer.prepare_for_backward(output)
        by_hand = torch.autograd.grad(output * 2, parameters, retain_graph=True)
        for parameter, gradient in zip(parameters, by_hand, strict=True):
            parameter.grad = gradient.clone()
        if again:
            output = torch.stack([parameter.sum() for parameter in parameters]).sum()
            reducer.prepare_for_backward(output)
        (output * 1).backward()
        for parameter in parameters:
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, communicator.mean(torch.full((4,), 3.0)))


class Spy(torch.autograd.Function):
    """The identity; its backward calls a function, as a user's collective would be issued there."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, call: Callable[[], object]) -> torch.Tensor:
        ctx.call = call
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.call()
        return gradients[0], None


def spied(value: torch.Tensor, call: Callable[[], object]) -> torch.Tensor:
    result: torch.Tensor = Spy.apply(value, call)
    return result


def test_an_order_that_changes_on_one_rank_launches_at_the_place_of_the_old_one() -> None:
    """Peers issue the bucket's collective before the user's own; at the end of backward it would meet that one."""
    (one, other, last), communicator = leaves(3), Loopback()
    reducer = Reducer([one, other, last], communicator, caps=BucketCaps(first_bytes=32, cap_bytes=32))
    for step in range(9):
        for parameter in (one, other, last):
            parameter.grad = None
        launched: list[int] = []
        before = communicator.count("all_reduce")

        def note(seen: list[int] = launched) -> None:
            seen.append(communicator.count("all_reduce"))

        head = spied(last * 1, note)
        inner, outer = (other, one) if step == 7 else (one, other)
        loss = ((head * inner) * outer).sum()
        reducer.prepare_for_backward(loss)
        loss.backward()
        if step > 0:
            assert launched == [before + 1], step
            assert [len(members) for members in reducer.plan] == [2, 1]
        local = (one * other * last).sum()
        for parameter, gradient in zip((one, other, last), torch.autograd.grad(local, (one, other, last)), strict=True):
            torch.testing.assert_close(parameter.grad, communicator.mean(gradient))


def test_a_backward_around_forwards_outputs_is_reduced_as_any_other() -> None:
    parameters, communicator = leaves(3), Loopback()
    reducer = trained(parameters, communicator)
    for _ in range(3):
        reducer.prepare_for_backward(torch.stack([parameter.sum() for parameter in parameters]).sum())
        torch.stack([(parameter * 2).sum() for parameter in parameters]).sum().backward()
        for parameter in parameters:
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, communicator.mean(torch.full((4,), 2.0)))
            parameter.grad = None
    reducer.prepare_for_backward(torch.stack([parameter.sum() for parameter in parameters]).sum())
    (parameters[0] * 2).sum().backward()
    with pytest.raises(FusedReduceError, match="did not receive grad for rank 0: 1 2"):
        reducer.prepare_for_backward(parameters[0].sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_with_other_strides_or_lazily_negated_of_every_dtype(dtype: torch.dtype) -> None:
    parameters = [torch.randn(3, 4, dtype=dtype, requires_grad=True), torch.randn(2, dtype=dtype, requires_grad=True)]
    communicator = Loopback()
    reducer = Reducer(parameters, communicator)
    turned = torch.randn(4, 3, dtype=dtype).t()
    source = torch.randn(2, dtype=torch.complex64)
    parameters[0].register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", turned.clone().t().clone().t()))
    if dtype is torch.float32:
        assert source.conj().imag.is_neg()
        parameters[1].register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", source.clone().conj().imag))
    for _ in range(6):
        plain_step(reducer, parameters)
        assert parameters[0].grad is not None and parameters[1].grad is not None
        assert torch.equal(parameters[0].grad, communicator.mean(turned))
        if dtype is torch.float32:
            assert torch.equal(parameters[1].grad, communicator.mean(source.conj().imag.resolve_neg()))


def test_gradients_that_share_memory_across_buckets() -> None:
    parameters, communicator = leaves(3), Loopback()
    reducer = Reducer(parameters, communicator, caps=BucketCaps(first_bytes=16, cap_bytes=16))
    for _ in range(7):
        clear(parameters)
        loss = (torch.cat(parameters) * torch.arange(12.0)).sum()
        reducer.prepare_for_backward(loss)
        loss.backward()
        for index, parameter in enumerate(parameters):
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, communicator.mean(torch.arange(12.0)[4 * index : 4 * index + 4]))


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("hooked", [False, True])
def test_what_is_written_to_a_gradient_under_way_is_an_error(hooked: bool, views: bool, inference: bool) -> None:
    def write() -> None:
        assert one.grad is not None
        one.grad.add_(1.0)

    one, other = parameters = leaves(2)
    caps = BucketCaps(first_bytes=16, cap_bytes=16)
    reducer = Reducer(parameters, Loopback(), gradient_as_bucket_view=views, caps=caps)
    if hooked:
        reducer.register_comm_hook(None, leaves_all)
    for call in (lambda: None, lambda: None, write):
        clear(parameters)
        loss = (one * spied(other * 1, call)).sum()
        reducer.prepare_for_backward(loss)
        with torch.inference_mode() if inference else nullcontext():
            if call is write:
                with pytest.raises(FusedReduceError, match="parameter 0 .* was written to after it had been packed"):
                    loss.backward()
            else:
                loss.backward()
    assert reducer.state is ReducerState.FAILED


def test_after_a_first_step_that_failed_on_one_rank_all_learn_anew() -> None:
    def rank(communicator: Communicator) -> list[float]:
        parameters = [torch.ones(4, requires_grad=True) for _ in range(3)]
        reducer = Reducer(parameters, communicator, exclusive=False)
        loss = torch.stack([parameter.sum() for parameter in parameters]).sum()
        reducer.prepare_for_backward(loss)
        if communicator.rank == 1:
            assert isinstance(inside(reducer).reductions[0], DenseReduction)

            def bad() -> None:
                raise FusedReduceError("on this rank alone")

            inside(reducer).fail_at_the_end(0, bad)
        fails = pytest.raises(FusedReduceError, match="on this rank alone")
        with fails if communicator.rank == 1 else nullcontext():
            loss.backward()
        reducer.reset()
        for _ in range(3):
            plain_step(reducer, parameters)
        return [float(parameter.grad[0]) for parameter in parameters if parameter.grad is not None]

    assert ThreadWorld(2).run(rank) == [[1.0, 2.0, 3.0]] * 2


def test_pre_hooks_do_not_pile_up_on_an_output_that_lives_on(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[bool] = []
    original = BACKWARD_BEGINS.present

    def begins(engine: Any) -> None:
        begun.append(True)
        original(engine)

    BACKWARD_BEGINS.replace(monkeypatch, begins)
    parameters = leaves(2)
    reducer = Reducer(parameters, Loopback())
    kept = torch.ones(3, requires_grad=True) * 2
    for _ in range(5):
        clear(parameters)
        loss = torch.stack([parameter.sum() for parameter in parameters]).sum()
        reducer.prepare_for_backward((loss, kept))
        loss.backward()
    assert inside(reducer).outputs_watched == 2
    begun.clear()
    reducer.prepare_for_backward((torch.stack([p.sum() for p in parameters]).sum(), kept))
    kept.sum().backward()
    assert begun == [True]


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}])
def test_a_wrapper_is_freed_without_the_garbage_collector(alone: None, options: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    ddp = fusedreduce.DistributedDataParallel(model, **options)
    for _ in range(7):
        ddp.zero_grad()
        ddp(torch.ones(2, 3)).sum().backward()
    with torch.no_grad():
        output = ddp(torch.ones(2, 3))
    seen = [
        weakref.ref(output),
        weakref.ref(ddp),
        weakref.ref(fusedreduce.reducer_of(ddp)),
        weakref.ref(model[0].weight),
    ]
    gc.disable()
    try:
        del output
        assert seen[0]() is None, "the last output of an evaluation is kept"
        del ddp, model
        assert [one() for one in seen] == [None] * 4
    finally:
        gc.enable()


def test_the_outputs_of_the_last_forward_are_not_kept(alone: None) -> None:
    """Until the next forward has made its own there would be two graphs in memory."""
    ddp = fusedreduce.DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
    gc.disable()
    try:
        for _ in range(3):
            output = ddp(torch.ones(2, 3))
            kept = weakref.ref(output)
            output.sum().backward()
            del output
            assert kept() is None
    finally:
        gc.enable()


def test_wrapping_again_is_no_nesting(alone: None) -> None:
    model = nn.Linear(3, 4)
    for _ in range(2):
        ddp = fusedreduce.DistributedDataParallel(model)
        for _ in range(7):
            ddp.zero_grad()
            ddp(torch.ones(2, 3)).sum().backward()
        assert not inside(ddp).shares_parameters
        del ddp


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("in_turns", [False, True])
def test_two_wrappers_of_one_model_warn_of_nothing(alone: None, in_turns: bool, accumulates: bool) -> None:
    """What one averages, or adds up on purpose, reaches the hooks of the other too."""
    model = nn.Linear(3, 4)
    alike = copy.deepcopy(model)
    wrappers = [fusedreduce.DistributedDataParallel(model) for _ in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(12):
            ddp = wrappers[step % 2 if in_turns else step // 6]
            for each, local in ((ddp, ddp.no_sync), (alike, nullcontext)):
                each.zero_grad()
                if accumulates:
                    with local():
                        each(torch.full((2, 3), float(step))).sum().backward()
                each(torch.ones(2, 3)).sum().backward()
            assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), alike.parameters(), strict=True))  # type: ignore[arg-type]


def test_a_gradient_that_neither_of_two_wrappers_averages_is_warned_of(alone: None) -> None:
    model = nn.Linear(3, 4)
    wrappers = [fusedreduce.DistributedDataParallel(model) for _ in range(2)]
    for ddp in wrappers:
        ddp(torch.ones(2, 3)).sum().backward()
    with pytest.warns(UserWarning, match="had been averaged .* so ranks now differ, unless something else averages it"):
        model(torch.ones(2, 3)).sum().backward()


def test_a_forward_under_torch_func(alone: None) -> None:
    ddp = fusedreduce.DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)))
    weights = torch.linalg.multi_dot([layer.weight for layer in reversed(ddp.module)]).detach()
    gradient = torch.func.grad(lambda inputs: ddp(inputs).sum())(torch.ones(2, 3)).detach()
    torch.testing.assert_close(gradient, weights.expand(2, 3))
    for _ in range(4):
        ddp.zero_grad()
        ddp(torch.ones(2, 3)).sum().backward()
        assert torch.equal(ddp.module[1].bias.grad, torch.full((1,), 2.0))


@pytest.mark.parametrize("views", [False, True])
def test_what_is_added_to_a_gradient_before_its_buckets_launch_is_reduced_with_it(views: bool) -> None:
    def write() -> None:
        assert large.grad is not None
        large.grad.add_(1.0)

    large, small = parameters = [torch.randn(20_000, requires_grad=True), torch.randn(1, requires_grad=True)]
    reducer = Reducer(parameters, Loopback([constant(0.0)]), gradient_as_bucket_view=views)
    for _ in range(6):
        clear(parameters)
        loss = (large * spied(small * 1, write)).sum()
        reducer.prepare_for_backward(loss)
        loss.backward()
        assert large.grad is not None and torch.equal(large.grad, (small.detach() + 1.0).expand(20_000) / 2)


@pytest.mark.parametrize("ends", ["give_up_step", "close"])
@pytest.mark.parametrize("devices", [1, 2])
def test_a_hook_that_waited_while_the_step_was_given_up_does_nothing(devices: int, ends: str) -> None:
    """Autograd has a thread per device: one raises, its caller calls reset(), and another one is still at the lock."""
    (parameter,), communicator = leaves(1), Loopback()
    reducer = trained([parameter], communicator)
    inside(reducer).pretend_threads_of_autograd(devices > 1)
    reducer.prepare_for_backward(parameter.sum())
    parameter.grad = torch.ones(4)
    before = communicator.count("all_reduce")
    raised: list[BaseException] = []

    def hook() -> None:
        try:
            inside(reducer).gradient_is_ready(0)
        except BaseException as error:
            raised.append(error)

    with inside(reducer).lock:
        late = threading.Thread(target=hook)
        late.start()
        late.join(0.2)
        getattr(reducer, ends)()
    late.join(10)
    assert not late.is_alive() and not raised and communicator.count("all_reduce") == before
    if ends == "give_up_step":
        assert reducer.state is ReducerState.IDLE and not inside(reducer).step_has_begun


class _Generous:
    """A lock that lets those who wait for it have it before the next line runs."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        time.sleep(0.1)


def test_a_hook_that_waited_while_another_one_failed_launches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the bucket behind the failed one would be launched, on this rank alone."""
    parameters, communicator = leaves(2), Loopback()
    reducer = Reducer(parameters, communicator, caps=BucketCaps(first_bytes=4, cap_bytes=4))
    for _ in range(3):
        reducer.prepare_for_backward(loss := sum(one.sum() for one in parameters))
        loss.backward()  # type: ignore[union-attr]
    assert len(reducer.plan) == 2
    inside(reducer).pretend_threads_of_autograd(True)
    inside(reducer).replace_lock(_Generous())
    reducer.prepare_for_backward(sum(one.sum() for one in parameters))
    before = communicator.count("all_reduce")
    waiting = threading.Thread(target=inside(reducer).gradient_is_ready, args=(reducer.plan[1][0],))

    def out_of_memory(*_: object, **__: object) -> None:
        waiting.start()
        waiting.join(0.2)  # it is at the lock
        raise MemoryError

    raw_calls.replace(monkeypatch, "pack", out_of_memory)
    raw_calls.replace(monkeypatch, "measure", out_of_memory)
    for one in parameters:
        one.grad = torch.ones(4)
    with pytest.raises(MemoryError), torch.no_grad():
        inside(reducer).gradient_is_ready(reducer.plan[0][0])
    waiting.join(10)
    assert not waiting.is_alive() and reducer.state is ReducerState.FAILED
    assert communicator.count("all_reduce") == before


def test_a_model_that_converts_itself_within_forward_is_refused_before_backward(alone: None) -> None:
    class Converts(nn.Linear):
        steps = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.steps += 1
            if self.steps == 4:
                self.double()
            return super().forward(x.to(self.weight.dtype))

    ddp = fusedreduce.DistributedDataParallel(Converts(3, 2))
    for _ in range(3):
        ddp(torch.ones(2, 3)).sum().backward()
    with pytest.raises(FusedReduceError, match="was torch.float32 on cpu when the model was wrapped"):
        ddp(torch.ones(2, 3))
