"""Steps that the caller ends: when `finalize_backward` is possible, what it does, and that nothing else ends one."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given as cases
from hypothesis import strategies as st
from support.inside import inside
from support.leaf_steps import CAPS, SHAPES, clear, drawn, given, launch, leaves
from support.loopback import Loopback

from fusedreduce import (
    Asynchronous,
    BoundedStaleness,
    CollectiveError,
    FusedReduceError,
    NonFiniteGradientError,
    ReduceConfig,
    Reducer,
    Synchronous,
    clip_grad_norm_,
)
from fusedreduce.buckets.grad_bucket import GradBucket
from fusedreduce.reducer.state import ReducerState

pytestmark = pytest.mark.usefixtures("path")

UNFINALIZED = "Expected to have finalized the prior backward pass before starting a new one"
NOTHING = "no gradient reduction requires finalization"
TOO_EARLY = "called before all DDP buckets were ready"
WITHIN = "cannot be finalized within its backward"


def _manual(config: ReduceConfig | None = None, steps: int = 0, **options: Any) -> tuple[Reducer, Loopback]:
    communicator = Loopback()
    parameters = [torch.randn(shape, requires_grad=True) for shape in SHAPES]
    reducer = Reducer(parameters, communicator, config, caps=CAPS, **options)
    reducer.require_manual_finalization(True)
    for seed in range(steps):
        launch(reducer, seed)
        reducer.finalize_backward()
        clear(parameters)
    return reducer, communicator


def _is_local(reducer: Reducer, seed: int = 1) -> bool:
    pairs = zip(reducer.parameters, drawn(seed), strict=True)
    return all(torch.equal(one.grad, own) for one, own in pairs)  # type: ignore[arg-type]


def _is_mean(reducer: Reducer, communicator: Loopback, seed: int = 1) -> bool:
    pairs = zip(reducer.parameters, drawn(seed), strict=True)
    return all(torch.equal(one.grad, communicator.mean(own)) for one, own in pairs)  # type: ignore[arg-type]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "unused search": {"find_unused_parameters": True},
    "static graph": {"static_graph": True},
    "lazy": {"lazy_bucket_allocation": True},
}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_backward_leaves_local_gradients_until_the_caller_ends_the_step(options: str, overlap: bool) -> None:
    reducer, communicator = _manual(ReduceConfig(overlap=overlap), **OPTIONS[options])
    for number in range(6):
        launch(reducer, number)
        assert communicator.under_way > 0 and reducer.steps == number
        assert _is_local(reducer, number)
        reducer.finalize_backward()
        assert communicator.under_way == 0 and reducer.steps == number + 1 and reducer.state is ReducerState.IDLE
        assert _is_mean(reducer, communicator, number)
        clear(reducer.parameters)


def test_views_hold_the_means_in_the_end() -> None:
    reducer, communicator = _manual(gradient_as_bucket_view=True)
    for number in range(4):
        launch(reducer, number)
        reducer.finalize_backward()
        assert _is_mean(reducer, communicator, number)
        reducer.zero_grad()


def test_an_explicit_finalize_ends_it_too() -> None:
    reducer, communicator = _manual()
    launch(reducer)
    reducer.finalize()
    assert _is_mean(reducer, communicator)
    with pytest.raises(FusedReduceError, match=NOTHING):
        reducer.finalize_backward()


USES: dict[str, Callable[[Reducer], object]] = {
    "check_finalized": Reducer.check_finalized,
    "forward": Reducer.prepare_for_forward,
    "prepare": lambda reducer: reducer.prepare_for_backward(given(reducer.parameters, drawn(2))),
    "norm": lambda reducer: inside(reducer).statistics.grad_norm(),
    "norms": lambda reducer: inside(reducer).statistics.grad_norms(),
    "measured": lambda reducer: inside(reducer).statistics.measured_norm(),
    "stats": lambda reducer: inside(reducer).statistics.grad_stats(),
    "reports": lambda reducer: inside(reducer).statistics.finite_check(),
    "clip": lambda reducer: clip_grad_norm_(reducer, 1e9),
    "step": lambda reducer: torch.optim.SGD(reducer.parameters, lr=1.0).step(),
    "step of some": lambda reducer: torch.optim.SGD(reducer.parameters[-1:], lr=1.0).step(),
    "closure": lambda reducer: torch.optim.SGD(reducer.parameters, lr=1.0).step(lambda: torch.zeros(())),
    "zero_grad": Reducer.zero_grad,
    "flush": Reducer.flush,
    "state_dict": Reducer.state_dict,
    "set_sync_mode": lambda reducer: reducer.set_sync_mode(Synchronous()),
}


@pytest.mark.parametrize("stats", [False, True])
@pytest.mark.parametrize("use", USES)
def test_what_would_use_the_gradients_raises_and_changes_nothing(use: str, stats: bool) -> None:
    reducer, communicator = _manual(ReduceConfig(grad_stats=stats), steps=2)
    before = [one.detach().clone() for one in reducer.parameters]
    launch(reducer)
    under_way, issued = communicator.under_way, len(communicator.calls)
    with pytest.raises(FusedReduceError, match=UNFINALIZED):
        USES[use](reducer)
    assert (communicator.under_way, len(communicator.calls)) == (under_way, issued)
    assert _is_local(reducer) and all(map(torch.equal, before, reducer.parameters))
    reducer.finalize_backward()
    assert _is_mean(reducer, communicator)


def test_a_forward_without_synchronisation_raises_too() -> None:
    reducer, communicator = _manual()
    launch(reducer)
    with pytest.raises(FusedReduceError, match=UNFINALIZED), reducer.no_sync():
        reducer.prepare_for_backward()
    reducer.finalize_backward()
    assert _is_mean(reducer, communicator)


def test_a_gradient_that_torch_has_cleared_meanwhile_is_an_error() -> None:
    reducer, _ = _manual()
    launch(reducer)
    torch.optim.SGD(reducer.parameters, lr=0.1).zero_grad()
    with pytest.raises(FusedReduceError, match="was replaced after it had been packed"):
        reducer.finalize_backward()
    assert reducer.state is ReducerState.FAILED
    with pytest.raises(FusedReduceError, match="reset"):
        reducer.finalize_backward()
    reducer.reset()
    launch(reducer, 2)
    reducer.finalize_backward()


# Within backward


class _Later(torch.autograd.Function):
    """Passes a loss on; `then` is called in backward once all that the loss depends on has its gradients."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, then: Callable[[], None]) -> torch.Tensor:
        ctx.then = then
        return leaf.clone()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.then()
        return torch.zeros(()), None


def _backward_with(reducer: Reducer, seed: int, then: Callable[[], None], *, first: bool = False) -> None:
    """A backward in which `then` is called behind the parameters' hooks, or ahead of them."""
    # The engine runs what was built last first.
    leaf = torch.zeros((), requires_grad=True)
    late = None if first else _Later.apply(leaf, then)
    loss = given(reducer.parameters, drawn(seed))
    reducer.prepare_for_backward(loss)
    (loss + (_Later.apply(leaf, then) if late is None else late)).backward()


def test_a_hook_ends_the_step_within_its_backward() -> None:
    reducer, communicator = _manual(steps=2)
    seen = []

    def then() -> None:
        assert _is_local(reducer) and communicator.under_way > 0
        reducer.finalize_backward()
        seen.append(_is_mean(reducer, communicator))
        torch.optim.SGD(reducer.parameters, lr=0.0).step()

    _backward_with(reducer, 1, then)
    assert seen == [True] and _is_mean(reducer, communicator) and reducer.steps == 3
    with pytest.raises(FusedReduceError, match=NOTHING):
        reducer.finalize_backward()
    clear(reducer.parameters)
    launch(reducer, 5)
    reducer.finalize_backward()
    assert _is_mean(reducer, communicator, 5)


def test_an_optimizer_in_a_hook_does_not_step_ahead_of_the_end() -> None:
    reducer, communicator = _manual(steps=2)

    def then() -> None:
        with pytest.raises(FusedReduceError, match=UNFINALIZED):
            torch.optim.SGD(reducer.parameters, lr=1.0).step()

    _backward_with(reducer, 1, then)
    reducer.finalize_backward()
    assert _is_mean(reducer, communicator)


def test_no_optimizer_takes_a_closure() -> None:
    """Its backward would leave the gradients of this rank, with which the optimizer would step."""
    reducer, _ = _manual(steps=1)
    before = [one.detach().clone() for one in reducer.parameters]

    def closure() -> float:
        launch(reducer)
        return 0.0

    with pytest.raises(FusedReduceError, match=r"step\(closure\) with manual finalization"):
        torch.optim.SGD(reducer.parameters, lr=1.0).step(closure)
    assert all(map(torch.equal, before, reducer.parameters))


def test_a_comm_hook_may_step_the_optimizer_of_its_bucket() -> None:
    communicator = Loopback()
    parameters = leaves(SHAPES)
    reducer = Reducer(parameters, communicator, caps=CAPS)
    stepped = []

    def hook(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        torch.optim.SGD(bucket.parameters(), lr=0.0).step()
        stepped.append(bucket.index())
        return _averaged(communicator, bucket)

    reducer.register_comm_hook(None, hook)
    reducer.require_manual_finalization(True)
    for number in range(3):
        launch(reducer, number)
        reducer.finalize_backward()
        clear(parameters)
    assert len(stepped) > 3


def test_too_early_in_a_backward_is_an_error_that_does_no_harm() -> None:
    reducer, communicator = _manual(steps=2)
    texts = []

    def early() -> None:
        with pytest.raises(FusedReduceError) as caught:
            reducer.finalize_backward()
        texts.append(str(caught.value))

    for one in reducer.parameters:  # torch calls these ahead of the reducer's own, and so early for the last one too
        one.register_post_accumulate_grad_hook(lambda _: early())
    loss = given(reducer.parameters, drawn(1))
    reducer.prepare_for_backward(loss)
    early()
    loss.backward()
    assert len(texts) == 1 + len(SHAPES)
    assert all(NOTHING in text for text in texts[:2]) and all(TOO_EARLY in text for text in texts[2:])
    reducer.finalize_backward()
    assert _is_mean(reducer, communicator)


def test_a_finite_check_raises_where_the_step_ends() -> None:
    reducer, communicator = _manual(ReduceConfig(check_finite="raise"))
    loss = given(reducer.parameters, [torch.full(shape, float("nan")) for shape in SHAPES])
    reducer.prepare_for_backward(loss)
    loss.backward()
    with pytest.raises(NonFiniteGradientError):
        reducer.finalize_backward()
    assert communicator.under_way == 0


def test_a_peer_that_dies_in_between_is_raised_where_the_step_ends() -> None:
    reducer, communicator = _manual(steps=2)
    communicator.fail_wait = communicator.count("all_reduce")
    launch(reducer)
    with pytest.raises(CollectiveError, match="Connection closed"):
        reducer.finalize_backward()
    assert reducer.state is ReducerState.FAILED


# When it has to be after backward


def _asked_within(reducer: Reducer, seed: int) -> tuple[bool, str]:
    """What `should_finalize_after_backward` says after forward, and what an attempt within backward raises."""
    said: list[bool] = []
    texts: list[str] = []

    def then() -> None:
        said.append(reducer.should_finalize_after_backward)
        try:
            reducer.finalize_backward()
        except FusedReduceError as error:
            texts.append(str(error))

    _backward_with(reducer, seed, then)
    if texts:
        reducer.finalize_backward()
    clear(reducer.parameters)
    return said[0], "".join(texts)


@pytest.mark.parametrize(
    ("options", "then"),
    [
        ({}, [True, False, False]),
        ({"static_graph": True}, [True, False, False]),
        ({"find_unused_parameters": True}, [True, True, True]),
    ],
    ids=["plain", "static", "unused"],
)
def test_it_says_when_it_has_to_be_after_backward(options: dict[str, Any], then: list[bool]) -> None:
    reducer, _ = _manual(**options)
    for number, wanted in enumerate(then):
        said, text = _asked_within(reducer, number)
        assert said is wanted
        assert bool(text) is wanted and (not wanted or WITHIN in text or TOO_EARLY in text)


def test_a_profiled_step_has_to_end_after_backward(tmp_path: Path) -> None:
    reducer, communicator = _manual(steps=2)
    with reducer.record_trace(tmp_path):
        said, text = _asked_within(reducer, 5)
        assert said and WITHIN in text
    assert _asked_within(reducer, 6) == (False, "")
    assert communicator.under_way == 0


def test_ranks_that_share_a_thread_end_it_after_backward() -> None:
    communicator = Loopback()
    communicator.may_wait = False
    parameters = [torch.randn(shape, requires_grad=True) for shape in SHAPES]
    reducer = Reducer(parameters, communicator, caps=CAPS, agreed=True)
    reducer.require_manual_finalization(True)
    for number in range(3):
        said, text = _asked_within(reducer, number)
        assert said and WITHIN in text


# Switching it


@pytest.mark.parametrize("manual", [False, True])
def test_it_is_switched_between_steps_only(manual: bool) -> None:
    reducer, communicator = _manual()
    reducer.require_manual_finalization(manual)
    loss = given(reducer.parameters, drawn(1))
    reducer.prepare_for_backward(loss)
    with pytest.raises(FusedReduceError, match="cannot be called after forward while a backward pass is expected"):
        reducer.require_manual_finalization(not manual)
    reducer.require_manual_finalization(manual)  # changes nothing
    loss.backward()
    if manual:
        with pytest.raises(FusedReduceError, match="cannot be called after forward"):
            reducer.require_manual_finalization(False)
        reducer.finalize_backward()
    else:
        with pytest.raises(FusedReduceError, match="manual backward finalization is not required"):
            reducer.finalize_backward()
    assert _is_mean(reducer, communicator)
    reducer.require_manual_finalization(not manual)
    assert reducer.should_finalize_after_backward is not manual, "the first step's order is still to be adopted"


def test_modes_with_delayed_averages_refuse_it() -> None:
    for mode in (BoundedStaleness(1), Asynchronous()):
        reducer = Reducer([torch.zeros(3, requires_grad=True)], Loopback(), ReduceConfig(sync_mode=mode))
        with pytest.raises(ValueError, match="manual backward finalization exclude each other"):
            reducer.require_manual_finalization(True)
        assert not reducer.should_finalize_after_backward
        reducer.require_manual_finalization(False)
    reducer, communicator = _manual(steps=1)
    with pytest.raises(ValueError, match="manual backward finalization exclude each other"):
        reducer.set_sync_mode(BoundedStaleness(1))
    launch(reducer)
    reducer.finalize_backward()
    assert _is_mean(reducer, communicator)


@cases(st.lists(st.sampled_from(["forward", "backward", "finalize", "on", "off"]), max_size=14))
def test_any_order_of_calls_has_one_outcome(calls: list[str]) -> None:
    """Against a model: whether a backward is expected, whether a step is to be ended, and by whom."""
    reducer, communicator = _manual()
    expected, pending, manual, seed = False, False, True, 0
    losses: list[torch.Tensor] = []
    for call in calls:
        refused = ""
        if call == "backward":
            if not expected:
                continue  # a local one: gradients of its own
            losses[-1].backward()
            expected, pending = False, manual
        elif call == "forward":
            refused = UNFINALIZED if pending else ""
            with _raises(refused):
                seed += 1
                loss = given(reducer.parameters, drawn(seed))
                reducer.prepare_for_backward(loss)
                clear(reducer.parameters)
                losses.append(loss)
                expected = True
            seed = len(losses)
        elif call == "finalize":
            refused = "is not required" if not manual else "" if pending else NOTHING
            with _raises(refused):
                reducer.finalize_backward()
                pending = False
        else:
            switches = manual != (call == "on")
            refused = "cannot be called after forward" if switches and (expected or pending) else ""
            with _raises(refused):
                reducer.require_manual_finalization(call == "on")
                manual = call == "on"
        assert (reducer.state is ReducerState.LAUNCHED) is pending
        assert (reducer.state is ReducerState.ARMED) is expected
        if losses and not expected:
            assert _is_local(reducer, seed) if pending else _is_mean(reducer, communicator, seed)


def _raises(pattern: str) -> AbstractContextManager[object]:
    return pytest.raises(FusedReduceError, match=pattern) if pattern else nullcontext()


# Wires that last as long as a step


@pytest.mark.parametrize(("wire", "hook"), [("native", False), ("bf16", False), ("fp16", False), ("native", True)])
def test_lazy_wires_are_released_at_the_end_of_a_step(wire: Any, hook: bool) -> None:
    runs: list[list[Any]] = []
    for lazy in (False, True):
        communicator = Loopback()
        parameters = leaves(SHAPES)
        reducer = Reducer(parameters, communicator, ReduceConfig(wire=wire), caps=CAPS, lazy_bucket_allocation=lazy)
        if hook:
            reducer.register_comm_hook(communicator, _averaged)
        averages: list[Any] = []
        for number in range(5):
            loss = given(parameters, drawn(number))
            reducer.prepare_for_backward(loss)
            assert bool(_alive(communicator)) is (number > 1 and not lazy)  # the first plan's wires are gone
            loss.backward()
            assert bool(_alive(communicator)) is (not lazy)
            averages.append([parameter.grad for parameter in parameters])
            clear(parameters)
        runs.append(averages)
        wires = int(reducer.stats()["wire_allocations"])
        assert hook or (wires > 2 * len(reducer.plan)) is lazy
    assert all(map(torch.equal, sum(runs[0], []), sum(runs[1], [])))


def _averaged(communicator: Loopback, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    reduced = communicator.all_reduce(bucket.buffer().div_(communicator.size)).future()
    return reduced.then(lambda done: done.value()[0])


def _alive(communicator: Loopback) -> list[torch.Tensor]:
    gc.collect()
    return [one for wire in communicator.wires if (one := wire()) is not None and one.is_floating_point()]


def test_lazy_wires_of_steps_in_flight() -> None:
    communicator = Loopback()
    parameters = leaves(SHAPES)
    config = ReduceConfig(sync_mode=BoundedStaleness(2))
    reducer = Reducer(parameters, communicator, config, caps=CAPS, lazy_bucket_allocation=True)
    for number in range(6):
        loss = given(parameters, drawn(number))
        reducer.prepare_for_backward(loss)
        loss.backward()
        if number >= 2:
            assert all(
                torch.equal(one.grad, communicator.mean(own))  # type: ignore[arg-type]
                for one, own in zip(parameters, drawn(number - 2), strict=True)
            )
        clear(parameters)
        assert number < 2 or len(_alive(communicator)) == 2 * len(reducer.plan)
    reducer.flush()
    assert not _alive(communicator)


def test_lazy_wires_have_no_effect_with_views_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        reducer = Reducer(
            [torch.zeros(3, requires_grad=True)], Loopback(), gradient_as_bucket_view=True, lazy_bucket_allocation=True
        )
    (said,) = caplog.messages
    assert "lazy_bucket_allocation=True has no effect where gradients are views" in said
    for _ in range(3):
        loss = given(reducer.parameters, [torch.ones(3)])
        reducer.prepare_for_backward(loss)
        loss.backward()
        reducer.zero_grad()
    assert reducer.stats()["wire_allocations"] == 2, "one for each plan"
