"""Steps on a rank that has run out of inputs: what they leave alone there, and what they are for the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.inside import inside
from support.leaf_steps import (
    CAPS,
    Scaler,
    assert_same,
    clear,
    copies,
    drawn,
    ended,
    given,
    leaves,
    loss_scale,
    shadow_step,
    step,
)
from support.loopback import Loopback, ThreadWorld

from fusedreduce import Asynchronous, BoundedStaleness, ReduceConfig, Reducer
from fusedreduce.comm.protocol import Communicator
from fusedreduce.errors import CollectiveError, FusedReduceError
from fusedreduce.reducer.state import ReducerState

pytestmark = pytest.mark.usefixtures("path")

SHAPES = ((7, 41), (3,), (2, 300), (16, 16))
CONFIGS: dict[str, dict[str, Any]] = {
    "native": {"wire": "native", "grad_stats": True, "check_finite": "raise"},
    "bf16": {"wire": "bf16", "grad_stats": True},
    "fp16": {"wire": "fp16", "accumulation": "fp32"},
    "int8": {"wire": "int8", "check_finite": "count"},
    "int4": {"wire": "int4", "error_feedback": True, "stochastic_rounding": True},
}


def _made(communicator: Communicator, name: str, views: bool = False, **options: Any) -> Reducer:
    config = ReduceConfig(**CONFIGS[name])
    return Reducer(leaves(SHAPES), communicator, config, caps=CAPS, gradient_as_bucket_view=views, **options)


def _own(reducer: Reducer) -> dict[str, Any]:
    """What a rank can be asked of its own latest step."""
    return {
        "gradients": [None if one.grad is None else (id(one.grad), one.grad.tolist()) for one in reducer.parameters],
        "steps": reducer.steps,
        "times": inside(reducer).times(),
        "order": reducer.last_order,
        "unused": reducer.last_unused,
        "backward": reducer.get_backward_stats(),
        "by-products": inside(reducer).statistics.has_by_products(),
        "statistics": inside(reducer).statistics.grad_stats(),
        "residuals": [copy.tolist() for copy in inside(reducer).residuals_of(2)],
        "dropped": reducer.stats().get("residuals_dropped", 0),
    }


@pytest.mark.parametrize(
    ("name", "views", "ranks"),
    [*((name, False, 3) for name in CONFIGS), ("native", True, 3), ("int8", False, 2), ("int4", False, 2)],
)
def test_nothing_of_it_stays_on_that_rank(name: str, views: bool, ranks: int) -> None:
    def case(communicator: Communicator) -> list[list[torch.Tensor | None]]:
        rank, last = communicator.rank, ranks - 1
        found = []
        with _made(communicator, name, views) as reducer:
            for number in range(6):
                if rank == last and number in (3, 4):
                    before, rounds = _own(reducer), inside(reducer).rounds
                    shadow_step(reducer)
                    assert _own(reducer) == before
                    assert inside(reducer).rounds == rounds + 1
                    continue
                clear(reducer.parameters)
                step(reducer, drawn(10 * number + rank, SHAPES))
                reducer.finalize()
                found.append(copies(reducer.parameters))
        return found

    first, *_, last = ThreadWorld(ranks).results(case)
    assert (len(first), len(last)) == (6, 4)
    for mine, theirs in zip([*first[:3], first[5]], last, strict=True):
        assert_same(mine, theirs, name)


@pytest.mark.parametrize("name", ["native", "bf16", "fp16"])
def test_gradients_of_no_sync_wait_for_the_next_step_of_their_own(name: str) -> None:
    """Its part of the others' mean, which is divided by all ranks, is zero."""

    def case(communicator: Communicator) -> list[list[torch.Tensor | None]]:
        found = []
        with _made(communicator, name) as reducer:
            if communicator.rank == 1:
                with reducer.no_sync():
                    step(reducer, [torch.full(shape, 64.0) for shape in SHAPES])
                shadow_step(reducer)
            else:
                step(reducer, [torch.full(shape, 2.0) for shape in SHAPES])
                reducer.finalize()
                found.append(copies(reducer.parameters))
                clear(reducer.parameters)
            step(reducer, [torch.full(shape, 4.0) for shape in SHAPES])
            reducer.finalize()
            found.append(copies(reducer.parameters))
        return found

    first, second = ThreadWorld(2).results(case)
    assert_same(first[0], [torch.full(shape, 1.0) for shape in SHAPES], "without the other rank's")
    for held in (first[1], second[0]):
        assert_same(held, [torch.full(shape, 36.0) for shape in SHAPES], "with them")


@pytest.mark.parametrize("attached", [False, True])
def test_a_loss_scale_of_before_is_no_matter(attached: bool) -> None:
    """Local gradients of a scaled loss lie there: an unscaled step would be refused."""
    scaler = Scaler()

    def case(communicator: Communicator) -> list[torch.Tensor | None]:
        with _made(communicator, "native") as reducer:
            if attached:
                inside(reducer).loss_scale.attach(scaler)
            scale = loss_scale(8.0) if attached else None
            if communicator.rank == 1:
                with reducer.no_sync():
                    step(reducer, [torch.full(shape, 2.0) for shape in SHAPES], scale=scale)
                shadow_step(reducer)
            else:
                step(reducer, [torch.full(shape, 2.0) for shape in SHAPES], scale=scale)
                reducer.finalize()
                clear(reducer.parameters)
            step(reducer, [torch.full(shape, 2.0) for shape in SHAPES], scale=scale)
            reducer.finalize()
            return copies(reducer.parameters)

    for held in ThreadWorld(2).results(case):
        assert_same(held, [torch.full(shape, 3.0) for shape in SHAPES], "the sum of both")


def test_a_static_graph_is_not_learned_from_it() -> None:
    """The first step of a rank may be one without inputs."""

    def case(communicator: Communicator) -> list[torch.Tensor | None]:
        with _made(communicator, "native", static_graph=True) as reducer:
            for number in range(3):
                if communicator.rank == 1 and number == 0:
                    shadow_step(reducer)
                    continue
                clear(reducer.parameters)
                step(reducer, [torch.full(shape, 2.0 + number) for shape in SHAPES])
                reducer.finalize()
            return copies(reducer.parameters)

    for held in ThreadWorld(2).results(case):
        assert_same(held, [torch.full(shape, 4.0) for shape in SHAPES], "its second own step")


def test_it_is_neither_profiled_nor_traced(tmp_path: Path) -> None:
    """Its times would be the largest, which decide."""

    def case(communicator: Communicator) -> None:
        with _made(communicator, "bf16") as reducer, reducer.record_trace(tmp_path / str(communicator.rank)):
            profiles = []
            for _ in range(12):
                if communicator.rank == 1:
                    shadow_step(reducer)
                    assert not inside(reducer).is_profiled
                else:
                    step(reducer, drawn(1, SHAPES))
                    reducer.finalize()
                profiles.append(inside(reducer).rounds)
            assert profiles == list(range(1, 13))
        if communicator.rank == 1:
            assert not list(tmp_path.rglob("1/*step*"))

    ThreadWorld(2).results(case)


def _values(reducer: Reducer) -> list[Any]:
    return [None if one.grad is None else one.grad.tolist() for one in reducer.parameters]


@pytest.mark.parametrize("which", ["fail_issue", "fail_wait"])
@pytest.mark.parametrize("views", [False, True])
def test_a_failure_gives_back_what_is_the_ranks_own(which: str, views: bool) -> None:
    """Also where views lay in a wire to which a collective writes later. The reducer says that it needs a reset."""
    communicator = Loopback()
    with _made(communicator, "native", views) as reducer:
        for _ in range(2):
            step(reducer, drawn(1, SHAPES))
        own, values = [one.grad for one in reducer.parameters], _values(reducer)
        setattr(communicator, which, communicator.count("all_reduce") + 2)
        with pytest.raises(CollectiveError):
            shadow_step(reducer)
        if views:
            for one in own:
                assert one is not None
                one.data.fill_(9.0)  # what was in flight lands
        assert _values(reducer) == values
        assert reducer.state is ReducerState.FAILED


def test_another_failure_is_told_by_the_next_step() -> None:
    """The group is not lost: a reset is enough."""
    planted: list[str] = []

    def hook(_: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        if planted:
            raise ValueError(planted.pop())
        return ended(bucket.buffer())

    with Reducer(leaves(SHAPES), Loopback(), caps=CAPS) as reducer:
        reducer.register_comm_hook(None, hook)
        step(reducer, drawn(1, SHAPES))
        planted.append("planted")
        with pytest.raises(ValueError, match="planted"):
            shadow_step(reducer)
        for again in (lambda: step(reducer, drawn(1, SHAPES)), lambda: shadow_step(reducer)):
            with pytest.raises(FusedReduceError, match="reset"):
                again()
        reducer.reset()
        shadow_step(reducer)
        step(reducer, drawn(1, SHAPES))


def test_a_step_that_is_armed_keeps_its_divisor() -> None:
    """A forward without backward may come before."""
    with _made(Loopback(), "native") as reducer:
        found = []
        for joins in (False, True):
            clear(reducer.parameters)
            loss = given(reducer.parameters, [torch.full(shape, 8.0) for shape in SHAPES])
            reducer.prepare_for_backward(loss, divisor=64.0)
            if joins:
                reducer.step_without_inputs()
            loss.backward()
            found.append(copies(reducer.parameters))
        assert_same(found[1], found[0])


def test_what_a_comm_hook_has_left_is_given_back() -> None:
    """Its gradients may lie in the hook's own buffer."""

    def leaves_its_own(_: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            parameter.grad = gradient
        return ended(bucket.buffer())

    with Reducer(leaves(SHAPES), Loopback(), caps=CAPS) as reducer:
        reducer.register_comm_hook(None, leaves_its_own)
        for _ in range(2):
            clear(reducer.parameters)
            step(reducer, drawn(1, SHAPES))
        values = _values(reducer)
        shadow_step(reducer)
        assert _values(reducer) == values


def test_a_converted_parameter_is_named_before_anything_is_written() -> None:
    with _made(Loopback(), "bf16") as reducer:
        step(reducer, drawn(1, SHAPES))
        reducer.parameters[1].data = reducer.parameters[1].data.half()
        with pytest.raises(FusedReduceError, match=r"parameter 1 was torch.float32 .* and is torch.float16"):
            reducer.step_without_inputs()


def test_where_the_others_begin_no_step_it_is_refused() -> None:
    with _made(Loopback(), "native") as reducer:
        with reducer.no_sync(), pytest.raises(FusedReduceError, match=r"within no_sync\(\)"):
            reducer.step_without_inputs()
        loss = given(reducer.parameters, drawn(1, SHAPES))
        reducer.prepare_for_backward(loss)
        found = []

        def within(_: object) -> None:
            with pytest.raises(FusedReduceError, match="within a backward"):
                reducer.step_without_inputs()
            found.append(True)

        assert loss.grad_fn is not None
        loss.grad_fn.register_prehook(within)
        loss.backward()
        assert found
    for mode in (BoundedStaleness(1), Asynchronous()):
        with (
            Reducer(leaves(SHAPES), Loopback(), ReduceConfig(sync_mode=mode)) as reducer,
            pytest.raises(ValueError, match="join exclude each other"),
        ):
            reducer.step_without_inputs()
