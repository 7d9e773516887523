"""A step whose end is not in backward: ranks that share one autograd thread, so that nothing may wait there."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from support.inside import OPTIMIZERS_HOOK, OPTIMIZERS_LISTENERS, inside
from support.leaf_steps import CAPS, SHAPES, assert_same, clear, copies, drawn, given, launch, leaves
from support.loopback import Loopback, ThreadWorld
from support.timeouts import PATIENT_S
from torch import nn
from torch.optim import optimizer as optimizers

from fusedreduce import (
    AgreementError,
    CollectiveError,
    FusedGradScaler,
    FusedReduceError,
    NonFiniteGradientError,
    ReduceConfig,
    Reducer,
    clip_grad_norm_,
)
from fusedreduce.comm.local.group import LocalCommunicator, LocalGroup
from fusedreduce.comm.protocol import Communicator
from fusedreduce.reducer.state import ReducerState

pytestmark = pytest.mark.usefixtures("path")


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("size", [1, 2, 8])
def test_peers_of_one_thread_share_one_backward_or_have_one_after_the_other(
    size: int, overlap: bool, together: bool
) -> None:
    with LocalGroup(size, one_thread=True, timeout_s=PATIENT_S) as group:
        config = ReduceConfig(overlap=overlap)
        options: dict[str, Any] = {"caps": CAPS, "find_unused_parameters": True, "agreed": True}
        reducers = [Reducer(leaves(SHAPES), one, config, **options) for one in group.communicators()]
        for number in range(12):
            own = [drawn(100 * number + rank) for rank in range(size)]
            losses = []
            for reducer, gradients in zip(reducers, own, strict=True):
                clear(reducer.parameters)
                losses.append(given(reducer.parameters, gradients))
                reducer.prepare_for_backward(losses[-1])
            for loss in [torch.stack(losses).sum()] if together else losses:
                loss.backward()
            for reducer, gradients in zip(reducers, own, strict=True):
                assert reducer.state is ReducerState.LAUNCHED and reducer.steps == number
                assert_same(copies(reducer.parameters), gradients, "still this rank's own")
            for reducer in reducers:
                reducer.finalize()
                assert reducer.state is ReducerState.IDLE and reducer.steps == number + 1
            parts = [[one / size for one in gradients] for gradients in own]
            means = [sum(each[1:], start=each[0]) for each in zip(*parts, strict=True)]
            for reducer in reducers:
                assert_same(copies(reducer.parameters), means, number)


# Who completes a launched step. One rank: its peers have always come.


def _launched(config: ReduceConfig | None = None) -> tuple[Reducer, Loopback]:
    communicator = Loopback()
    communicator.may_wait = False
    parameters = [torch.randn(shape, requires_grad=True) for shape in SHAPES]
    reducer = Reducer(parameters, communicator, config, caps=CAPS)
    launch(reducer)
    return reducer, communicator


def _mean_of(reducer: Reducer, communicator: Loopback, seed: int = 1) -> bool:
    pairs = zip(reducer.parameters, drawn(seed), strict=True)
    return all(torch.equal(one.grad, communicator.mean(own)) for one, own in pairs)  # type: ignore[arg-type]


# Calls of the reducer itself: the table of test_states.py.
READERS: dict[str, Callable[[Reducer], object]] = {
    "norm": lambda reducer: inside(reducer).statistics.grad_norm(),
    "norms": lambda reducer: inside(reducer).statistics.grad_norms(),
    "measured": lambda reducer: inside(reducer).statistics.measured_norm(),
    "stats": lambda reducer: inside(reducer).statistics.grad_stats(),
    "reports": lambda reducer: inside(reducer).statistics.finite_check(),
    "clip": lambda reducer: clip_grad_norm_(reducer, 1e9),
    "step": lambda reducer: torch.optim.SGD(reducer.parameters, lr=0.0).step(),
    "step of some": lambda reducer: torch.optim.SGD(reducer.parameters[-1:], lr=0.0).step(),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("stats", [False, True])
def test_what_needs_the_gradients_completes_the_step(reader: str, stats: bool) -> None:
    reducer, communicator = _launched(ReduceConfig(grad_stats=stats))
    assert communicator.under_way > 0
    READERS[reader](reducer)
    assert communicator.under_way == 0 and reducer.steps == 1
    assert _mean_of(reducer, communicator)
    if reader in ("norm", "step"):
        expected = torch.cat([one.grad.reshape(-1) for one in reducer.parameters if one.grad is not None]).double()
        torch.testing.assert_close(inside(reducer).statistics.grad_norm(), expected.norm(), rtol=1e-6, atol=0)


def test_another_models_optimizer_leaves_it_alone() -> None:
    reducer, communicator = _launched()
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1).step()
    assert reducer.state is ReducerState.LAUNCHED
    reducer.finalize()
    assert _mean_of(reducer, communicator)


def test_an_optimizer_steps_with_the_mean() -> None:
    reducer, communicator = _launched()
    before = [one.detach().clone() for one in reducer.parameters]
    torch.optim.SGD(reducer.parameters, lr=1.0).step()
    for parameter, was, own in zip(reducer.parameters, before, drawn(1), strict=True):
        assert torch.equal(parameter, was - communicator.mean(own))


def test_a_scaler_unscales_what_it_completes() -> None:
    layer = nn.Linear(3, 2)
    communicator = Loopback()
    communicator.may_wait = False
    reducer = Reducer(layer.parameters(), communicator)
    scaler = FusedGradScaler(reducer, init_scale=8.0)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    scale = 8.0
    for number in range(4):
        optimizer.zero_grad()
        inputs = torch.ones(4, 3) * (number + 1)
        local = torch.autograd.grad(layer(inputs).sum(), list(layer.parameters()))
        loss = scaler.scale(layer(inputs).sum())
        reducer.prepare_for_backward(loss)
        loss.backward()
        assert reducer.state is ReducerState.LAUNCHED
        scaler.unscale_(optimizer)
        # Its peers add 0.5 and -2 to what is scaled.
        for parameter, own in zip(layer.parameters(), local, strict=True):
            expected = ((own * scale / 3) + 0.5 - 2.0) / scale
            torch.testing.assert_close(parameter.grad, expected, rtol=1e-6, atol=1e-6)
        scaler.step(optimizer)
        scaler.update(scale := 4 * scale)


@pytest.mark.parametrize("how", ["replaced", "written to"])
def test_a_gradient_that_was_changed_in_between_is_an_error(how: str) -> None:
    reducer, communicator = _launched()
    gradient = reducer.parameters[1].grad
    assert gradient is not None
    if how == "replaced":
        reducer.parameters[1].grad = gradient.clone()
    else:
        gradient.add_(1)
    with pytest.raises(FusedReduceError, match=f"parameter 1.* was {how} after it had been packed"):
        torch.optim.SGD(reducer.parameters, lr=0.1).step()
    assert reducer.state is ReducerState.FAILED
    with pytest.raises(FusedReduceError, match="reset"):
        reducer.prepare_for_backward()
    reducer.reset()
    clear(reducer.parameters)
    launch(reducer, 2)
    reducer.finalize()
    assert _mean_of(reducer, communicator, 2)


def test_a_collective_that_fails_is_raised_where_it_is_waited_for() -> None:
    communicator = Loopback()
    communicator.may_wait = False
    communicator.fail_wait = 0
    parameters = [torch.randn(3, requires_grad=True)]
    reducer = Reducer(parameters, communicator)
    loss = given(parameters, [torch.ones(3)])
    reducer.prepare_for_backward(loss)
    loss.backward()
    with pytest.raises(CollectiveError, match="Connection closed"):
        torch.optim.SGD(parameters, lr=0.1).step()
    assert reducer.state is ReducerState.FAILED


def test_what_is_not_finite_is_raised_by_whoever_completes() -> None:
    communicator = Loopback()
    communicator.may_wait = False
    parameters = [torch.zeros(3, requires_grad=True)]
    reducer = Reducer(parameters, communicator, ReduceConfig(check_finite="raise"))
    loss = given(parameters, [torch.tensor([0.0, float("nan"), 0.0])])
    reducer.prepare_for_backward(loss)
    loss.backward()
    with pytest.raises(NonFiniteGradientError, match="element 1"):
        reducer.finalize()
    assert reducer.steps == 1
    reducer.check_finalized()


def test_gradients_are_not_completed_within_another_backward() -> None:
    reducer, communicator = _launched()
    other = torch.zeros(1, requires_grad=True)
    other.register_hook(lambda _: inside(reducer).statistics.grad_norm())
    with pytest.raises(FusedReduceError, match=r"within another backward.*finalize\(\)"):
        other.sum().backward()
    reducer.finalize()
    assert _mean_of(reducer, communicator)


def test_a_launched_step_ends_with_its_reducer() -> None:
    """Dropped; what else gives it up is in the table of test_states.py."""
    reducer, _ = _launched()
    parameters, alive = reducer.parameters, weakref.ref(reducer)
    del reducer
    gc.collect()
    assert alive() is None
    assert_same(copies(parameters), drawn(1))
    torch.optim.SGD(parameters, lr=0.0).step()


def test_partial_backwards_launch_with_the_last() -> None:
    communicator = Loopback()
    communicator.may_wait = False
    parameters = [torch.randn(shape, requires_grad=True) for shape in SHAPES]
    reducer = Reducer(parameters, communicator, caps=CAPS)
    gradients = drawn(1)
    losses = [
        given(parameters, [gradients[0], gradients[1], None, None]),
        given(parameters, [None, None, *gradients[2:]]),
    ]
    reducer.prepare_for_backward(losses)
    losses[0].backward()
    assert reducer.state.value == "armed"
    losses[1].backward()
    assert reducer.state.value == "launched"
    reducer.finalize()
    assert _mean_of(reducer, communicator)


def test_a_closure_is_refused_where_its_backward_cannot_end_with_reduceddrawn() -> None:
    reducer, communicator = _launched()
    optimizer = torch.optim.LBFGS(reducer.parameters)
    reducer.finalize()
    with pytest.raises(FusedReduceError, match=r"step\(closure\).*reducer.backward"):
        optimizer.step(lambda: torch.zeros(()))
    reducer.close()
    optimizer.step(lambda: torch.zeros(()))


def test_backward_of_the_reducer_completes_the_step() -> None:
    reducer, communicator = _launched()
    reducer.finalize()
    clear(reducer.parameters)
    loss = given(reducer.parameters, drawn(7))
    reducer.prepare_for_backward(loss)
    reducer.backward(loss)
    assert reducer.steps == 2 and _mean_of(reducer, communicator, 7)


@pytest.mark.filterwarnings("ignore:rank 0. close.. gives up a step:UserWarning")
def test_nobody_looks_at_optimizers_when_no_reducer_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # Reducers of other tests may be alive.
    OPTIMIZERS_LISTENERS.replace(monkeypatch, weakref.WeakKeyDictionary())
    OPTIMIZERS_HOOK.replace(monkeypatch, None)
    hooks = optimizers._global_optimizer_pre_hooks
    before = len(hooks)
    first, _ = _launched()
    second, _ = _launched()
    assert len(hooks) == before + 1
    first.close()
    assert len(hooks) == before + 1
    second.close()
    assert len(hooks) == before
    Reducer([torch.zeros(1, requires_grad=True)], Loopback())
    assert len(hooks) == before
    third, _ = _launched()
    assert len(hooks) == before + 1
    del third
    gc.collect()
    Reducer([torch.zeros(1, requires_grad=True)], Loopback())
    assert len(hooks) == before, "one that was forgotten needs it no more, either"


# Sparse gradients whose kind nobody knows yet: their sums start at the end of the step


TABLES = ("rows", "bag")


def _tables(communicator: Communicator) -> tuple[dict[str, nn.Embedding], Reducer, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = {name: nn.Embedding(6, 2, sparse=True) for name in TABLES}
    parameters = [table.weight for table in module.values()]
    sparse = [True] * len(parameters)
    reducer = Reducer(parameters, communicator, sparse=sparse, find_unused_parameters=True, agreed=True)
    return module, reducer, torch.optim.SGD(parameters, lr=1.0)


def _backward_through(module: Mapping[str, nn.Embedding], reducer: Reducer, used: Sequence[str], rank: int) -> None:
    loss = torch.zeros((), requires_grad=True)
    for name in used:
        loss = loss + module[name](torch.tensor([rank, 5])).sum()
    reducer.prepare_for_backward(loss)
    if used:
        loss.backward()
    else:
        reducer.end_without_backward()


def test_one_thread_completes_sums_that_come_late() -> None:
    steps: tuple[tuple[tuple[str, ...], ...], ...] = (
        (("rows",), (), ("rows",)),
        ((), ("bag",), ()),
        (TABLES, TABLES, TABLES),
    )
    with LocalGroup(3, one_thread=True, timeout_s=PATIENT_S) as group:
        ranks = [_tables(group.communicator(rank)) for rank in range(3)]
        for used in steps:
            for rank, (module, reducer, optimizer) in enumerate(ranks):
                optimizer.zero_grad()
                _backward_through(module, reducer, used[rank], rank)
            for _, reducer, _ in ranks:
                reducer.launch_late()
            for _, reducer, optimizer in ranks:
                optimizer.step()
                assert reducer.state is ReducerState.IDLE
            for name in TABLES:
                wanted = torch.zeros(6, 2)
                for rank in range(3):
                    if name in used[rank]:
                        wanted[[rank, 5]] += 1.0
                for module, _, _ in ranks:
                    gradient = module[name].weight.grad
                    assert (gradient is None) == (not wanted.any())
                    assert gradient is None or torch.equal(gradient.to_dense(), wanted / 3)


def test_one_thread_that_waits_for_a_sum_that_it_has_not_started_is_told_at_once() -> None:
    with LocalGroup(2, one_thread=True, timeout_s=PATIENT_S) as group:
        ranks = [_tables(group.communicator(rank)) for rank in range(2)]
        for rank, (module, reducer, _) in enumerate(ranks):
            _backward_through(module, reducer, TABLES, rank)
        began_s = time.monotonic()
        with pytest.raises(CollectiveError, match="rank 1 cannot arrive: the thread that waits drives them too"):
            ranks[0][1].finalize()
        assert time.monotonic() - began_s < PATIENT_S / 2


def test_one_thread_meets_gradients_of_several_kinds_on_every_rank() -> None:
    with LocalGroup(2, one_thread=True, timeout_s=PATIENT_S) as group:
        ranks = [_tables(group.communicator(rank)) for rank in range(2)]

        def make_dense(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            parameter.grad = parameter.grad.to_dense()

        ranks[1][0]["rows"].weight.register_post_accumulate_grad_hook(make_dense)
        for rank, (module, reducer, _) in enumerate(ranks):
            _backward_through(module, reducer, TABLES, rank)
        for _, reducer, _ in ranks:
            with pytest.raises(AgreementError, match="dense and torch.float32 on rank 1"):
                reducer.launch_late()
            assert reducer.state is ReducerState.FAILED


def test_late_sums_of_two_reducers_of_a_rank_come_in_the_same_order_on_every_rank() -> None:
    def case(communicator: LocalCommunicator) -> tuple[list[float], list[object]]:
        made = [_tables(communicator) for _ in range(2)]
        # What tells objects apart by their address is in another order on the next rank, soon or later.
        kept: list[object] = [object() for _ in range(100 * communicator.rank)]
        both = torch.optim.SGD([table.weight for module, _, _ in made for table in module.values()], lr=1.0)
        losses = []
        for number, (module, reducer, _) in enumerate(made):
            losses.append((number + 1) * module["rows"](torch.tensor([0])).sum())
            reducer.prepare_for_backward(losses[-1])
        sum(losses, torch.zeros(())).backward()
        both.step()
        gradients = [module["rows"].weight.grad for module, _, _ in made]
        return [0.0 if one is None else float(one.to_dense().sum()) for one in gradients], kept

    for _ in range(10):
        with LocalGroup(2, one_thread=True, timeout_s=PATIENT_S) as group:
            assert [found for found, _ in group.run(case)] == [[2.0, 4.0]] * 2


# A rank without a gradient


def test_a_rank_whose_outputs_reach_no_parameter_takes_part_with_zeros() -> None:
    def case(communicator: Communicator) -> list[torch.Tensor | None]:
        parameters = leaves(SHAPES)
        with Reducer(parameters, communicator, caps=CAPS, find_unused_parameters=True) as reducer:
            for number in range(4):
                clear(parameters)
                if (communicator.rank + number) % 2:
                    reducer.prepare_for_backward(torch.zeros((), requires_grad=True) * 2)
                    assert inside(reducer).unused_now == tuple(range(len(SHAPES)))
                    reducer.end_without_backward()
                else:
                    loss = given(parameters, [*drawn(number)[:-1], None])
                    reducer.prepare_for_backward(loss)
                    assert inside(reducer).unused_now == (len(SHAPES) - 1,)
                    loss.backward()
                assert reducer.steps == number + 1
        return [one.grad for one in parameters]

    for held in ThreadWorld(2).results(case):
        assert held[-1] is None
        for gradient, own in zip(held[:-1], drawn(3)[:-1], strict=True):
            assert torch.equal(gradient, own / 2)


def test_it_is_refused_where_a_gradient_is_expected() -> None:
    parameters = [torch.zeros(3, requires_grad=True), torch.zeros(2, requires_grad=True)]
    reducer = Reducer(parameters, Loopback(), find_unused_parameters=True)
    with pytest.raises(FusedReduceError, match="needs an armed step"):
        reducer.end_without_backward()
    loss = given(parameters, [torch.ones(3), None])
    reducer.prepare_for_backward(loss)
    with pytest.raises(FusedReduceError, match="a gradient is expected"):
        reducer.end_without_backward()
    loss.backward()
    assert reducer.steps == 1
