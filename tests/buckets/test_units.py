"""Loss scales through a Reducer: on during the wire, off in unpack, and never two units in one gradient.

Scales are powers of two, so that what comes out can be compared bit for bit with a step without one.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.grids import grid
from support.inside import inside
from support.leaf_steps import (
    CAPS,
    HOOKS,
    NUMELS,
    SCALER,
    TRAVELS,
    WIRE_DTYPES,
    Wire,
    assert_same,
    averaging,
    backward,
    clear,
    copies,
    flat_real,
    given,
    leaves,
    loss_scale,
    scaled,
    shadow_step,
    sparse_like,
    step,
    with_hooks,
)
from support.loopback import Loopback, ThreadWorld, constant, half
from torch.utils.checkpoint import checkpoint

from fusedreduce import BucketCaps, FusedReduceError, ReduceConfig, Reducer
from fusedreduce.buckets.loss_scale import LossScale
from fusedreduce.comm.protocol import Communicator
from fusedreduce.kernels import counting
from fusedreduce.optim.grad_scaler import FusedGradScaler
from fusedreduce.reducer.state import ReducerState

pytestmark = pytest.mark.usefixtures("path")

SCALE = 2.0**10


def _times(mine: torch.Tensor, by: float) -> torch.Tensor:
    return (mine.float() * by).to(mine.dtype)


def _zoo() -> tuple[list[torch.Tensor], list[bool]]:
    """Every kind of parameter that torch unscales, and which of them have sparse gradients."""
    found = [*leaves(), torch.zeros(20_000)]
    found += [torch.zeros(9, dtype=torch.bfloat16), torch.zeros(6, 5, dtype=torch.float64)]
    found += [torch.zeros(7, dtype=torch.complex64), torch.zeros(4, 3, 5, 5).to(memory_format=torch.channels_last)]
    found += [torch.zeros(20, 4)]
    return [one.detach().requires_grad_() for one in found], [False] * (len(found) - 1) + [True]


def _ordinary(parameter: torch.Tensor) -> torch.Tensor:
    """A gradient that no wire takes to its limits, scaled or not."""
    found = torch.empty_like(parameter.detach())
    real = torch.view_as_real(found) if found.is_complex() else found
    # Multiples of 1/64: their sums are exact, and never small.
    real.copy_(torch.randint(16, 80, real.shape) * (torch.randint(0, 2, real.shape) * 2 - 1) / 64)
    return found


def _reducer(
    parameters: Sequence[torch.Tensor],
    communicator: Communicator | None = None,
    *,
    wire: Wire = "native",
    views: bool = False,
    config: dict[str, Any] | None = None,
    **options: Any,
) -> Reducer:
    options.setdefault("caps", CAPS)
    reducer = Reducer(
        parameters,
        communicator or Loopback((half, half)),
        ReduceConfig(wire=wire, **(config or {})),
        gradient_as_bucket_view=views,
        **options,
    )
    inside(reducer).loss_scale.attach(SCALER)
    return reducer


class _Pair:
    """Two reducers with the same parameters: one of scaled losses, one without."""

    def __init__(
        self, parameters: Sequence[torch.Tensor], hook: str | None = None, size: int = 3, **options: Any
    ) -> None:
        self.parameters = list(parameters)
        self.twins = [one.detach().clone().requires_grad_() for one in parameters]
        peers = (half,) * (size - 1)
        self.reducers = [_reducer(one, Loopback(peers), **options) for one in (self.parameters, self.twins)]
        inside(self.reducers[1]).loss_scale.detach(SCALER)
        for reducer in self.reducers:
            if hook is not None:
                communicator: Any = reducer.communicator
                reducer.register_comm_hook(None, averaging(3, communicator.total, hook))

    def each(self, scale: LossScale | None) -> list[tuple[Reducer, LossScale | None]]:
        """The first with the scale."""
        return [(self.reducers[0], scale), (self.reducers[1], None)]

    def clear(self) -> None:
        """zero_grad."""
        clear([*self.parameters, *self.twins])

    def compare(self, what: object = "") -> None:
        """Bit for bit."""
        assert_same(copies(self.parameters), copies(self.twins), what)
        assert inside(self.reducers[0]).loss_scale.unscaled_now()


# The scale comes off


@pytest.mark.parametrize(
    ("wire", "views", "mode"), with_hooks("plain", "overlap off", "static graph", "find unused", "statistics")
)
def test_gradients_come_out_unscaled_bit_for_bit(wire: Wire, views: bool, mode: str) -> None:
    parameters, sparse = _zoo()
    pair = _Pair(
        parameters,
        hook=mode if mode in HOOKS else None,
        wire=wire,
        views=views,
        sparse=sparse,
        config={"overlap": mode != "overlap off", "grad_stats": mode == "statistics"},
        static_graph=mode == "static graph",
        find_unused_parameters=mode == "find unused",
    )
    scale = loss_scale(SCALE if mode != "fp16" else 2.0**4)
    for number in range(5):
        pair.clear()
        gradients: list[torch.Tensor | None] = [_ordinary(one) for one in parameters[:-1]]
        gradients.append(sparse_like(parameters[-1], [3, 7, 3]))
        if mode == "find unused":
            gradients[number] = gradients[9] = None
        now = scale if number != 3 else None
        for reducer, one in pair.each(now):
            step(reducer, gradients, scale=one)
        pair.compare((mode, number))
        assert mode == "find unused" or all(one.grad is not None and values_differ(one) for one in parameters)
        if mode == "statistics":
            ours, theirs = (inside(one).statistics.grad_stats() for one in pair.reducers)
            for key, value in theirs.items():
                assert "flushed" in key or ours[key] == pytest.approx(value, rel=1e-12)


def values_differ(parameter: torch.Tensor) -> bool:
    """Whether a gradient is more than zeros."""
    assert parameter.grad is not None
    return bool((parameter.grad.to_dense() != 0).any())


@pytest.mark.filterwarnings("ignore:grad and param do not obey")
@pytest.mark.parametrize("how", ["permuted", "with gaps"])
@pytest.mark.parametrize("numel", [24, 20_000])
@pytest.mark.parametrize(("wire", "views"), TRAVELS)
def test_gradients_with_other_strides(wire: Wire, views: bool, numel: int, how: str) -> None:
    shape = (4, numel // 4)
    parameters = [torch.zeros(5, requires_grad=True), torch.zeros(shape, requires_grad=True)]
    reducer = _reducer(parameters, Loopback((half,)), wire=wire, views=views)
    for _ in range(4):
        first, second = _ordinary(parameters[0]), _ordinary(parameters[1])
        clear(parameters)
        base = torch.zeros(shape[1], shape[0]).t() if how == "permuted" else torch.zeros(shape[0], 2 * shape[1])[:, ::2]
        parameters[1].grad = base
        step(reducer, [first, second], scale=loss_scale(SCALE))
        wired = WIRE_DTYPES[wire] or torch.float32
        for parameter, gradient in zip(parameters, (first, second), strict=True):
            sent = (gradient * SCALE / 2).to(wired)
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, (sent + sent * 0.5).float() / SCALE)


def test_the_scale_is_any_number_and_one_rounding_takes_it_off() -> None:
    """A scale that is no power of two: as torch's unscale_, times the reciprocal that it takes."""
    parameters = [torch.zeros(40, requires_grad=True), torch.zeros(8, dtype=torch.float64, requires_grad=True)]
    reducer, scale = _reducer(parameters), loss_scale(3.0 * 2**7 + 0.37)
    for _ in range(3):
        clear(parameters)
        gradients = [_ordinary(one) for one in parameters]
        step(reducer, list(gradients), scale=scale)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            third = gradient * scale.scale.item() / 3
            wire = third + third * 0.5 + third * 0.5
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, wire * scale.inverse.to(wire.dtype))


Gradients = Sequence[torch.Tensor | None]


def _nobody_runs(reducer: Reducer, gradients: Gradients, scale: LossScale | None, number: int) -> None:
    loss = given(reducer.parameters, gradients)
    reducer.prepare_for_backward(loss)
    if number % 3 == 2:
        scaled(reducer, loss, loss_scale(32.0))  # and no backward
        loss = given(reducer.parameters, gradients)
        reducer.prepare_for_backward(loss)
    backward(reducer, loss, scale)


def _another_forward(reducer: Reducer, gradients: Gradients, scale: LossScale | None, number: int) -> None:
    """Between scale and backward; a static graph's first step ends with it."""
    loss = given(reducer.parameters, gradients)
    reducer.prepare_for_backward(loss)
    total = loss if scale is None else scaled(reducer, loss, scale)
    reducer.prepare_for_backward(given(reducer.parameters, gradients))
    total.backward()
    with torch.no_grad():
        inside(reducer).end_first_static_step()


def _several_backwards(reducer: Reducer, gradients: Gradients, scale: LossScale | None, number: int) -> None:
    """Of two outputs that share no parameter."""
    losses = [given(reducer.parameters, gradients, part) for part in ((6, 5, 4, 3), (2, 1, 0))]
    reducer.prepare_for_backward(losses)
    for loss in losses:
        backward(reducer, loss, scale)


def _gradient_by_hand(reducer: Reducer, gradients: Gradients, scale: LossScale | None, number: int) -> None:
    """torch.autograd.grad leaves nothing in .grad, and has no unit; as for a gradient penalty."""
    loss = given(reducer.parameters, gradients)
    reducer.prepare_for_backward(loss)
    torch.autograd.grad(loss * 1, reducer.parameters, retain_graph=True)
    backward(reducer, loss, scale)


def _only_looks_the_same(reducer: Reducer, gradients: Gradients, scale: LossScale | None, number: int) -> None:
    """A new object after load_state_dict, of the same value."""
    with reducer.no_sync():
        step(reducer, gradients, scale=scale)
    again = None if scale is None else loss_scale(scale.scale.item())
    step(reducer, [None if one is None else one * 2 for one in gradients], scale=again)


WAYS = (_nobody_runs, _another_forward, _gradient_by_hand, _several_backwards, _only_looks_the_same)


# A static graph has one backward in every step.
@grid(
    ("wire", "views", "way", "static"),
    [
        (*travel, way, static)
        for travel in TRAVELS
        for static in (False, True)
        for way in (WAYS[:3] if static else WAYS)
    ],
)
def test_a_step_in_any_way(wire: Wire, views: bool, way: Callable[..., None], static: bool) -> None:
    """With the scale, another one, or none; zeroed to None or in place."""
    pair, scale = _Pair(leaves(), wire=wire, views=views, static_graph=static), loss_scale(SCALE)
    for number in range(12):
        if number % 3:
            pair.clear()
        else:
            for reducer in pair.reducers:
                reducer.zero_grad()
        gradients = [_ordinary(one) for one in pair.parameters]
        now = [scale, loss_scale(4.0)][number % 5 == 4] if number % 4 != 3 else None
        for reducer, one in pair.each(now):
            way(reducer, gradients, one, number)
        pair.compare(number)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(("wire", "views"), TRAVELS)
def test_checkpoints(wire: Wire, views: bool, reentrant: bool) -> None:
    weights = [torch.randn(6, 6).mul_(0.5).requires_grad_() for _ in range(3)]
    pair, scale = _Pair(weights, wire="native" if views else wire, views=views), loss_scale(64.0)
    with torch.no_grad():
        for twin, weight in zip(pair.twins, weights, strict=True):
            twin.copy_(weight)
    worst = 0.0
    for number in range(8):
        pair.clear()
        features = torch.randn(4, 6)
        for reducer, one in pair.each(scale):
            first, second, third = reducer.parameters
            hidden = torch.tanh(features @ first)
            hidden = checkpoint(lambda x, w=second: torch.tanh(x @ w), hidden, use_reentrant=reentrant)
            loss = (hidden @ third).square().sum().double()
            reducer.prepare_for_backward(loss)
            backward(reducer, loss, one)
        if wire == "fp16":  # small ones are subnormal without the scale
            for ours, twin in zip(pair.parameters, pair.twins, strict=True):
                assert ours.grad is not None and twin.grad is not None
                worst = max(worst, float((ours.grad - twin.grad).abs().max()))
        else:
            pair.compare(number)
    assert worst <= 2.0**-24


# Accumulation


@pytest.mark.parametrize("changes", ["between", "before the last", "never"])
@pytest.mark.parametrize(("wire", "views"), TRAVELS)
def test_four_micro_batches_with_a_scale_that_changes_in_between(wire: Wire, views: bool, changes: str) -> None:
    parameters, sparse = _zoo()
    # Four ranks: their division is exact, so that sparse gradients may be summed in any order.
    pair = _Pair(parameters, size=4, wire=wire, views=views, sparse=sparse)
    first, second = loss_scale(64.0), loss_scale(512.0)
    for number in range(4):
        if number % 2:
            for reducer in pair.reducers:
                reducer.zero_grad()
        else:
            pair.clear()
        for micro in range(4):
            gradients: list[torch.Tensor | None] = [_ordinary(one) for one in parameters[:-1]]
            gradients.append(sparse_like(parameters[-1], [micro, 7, 3]))
            scale = second if micro >= {"between": 2, "before the last": 3, "never": 0}[changes] else first
            for reducer, one in pair.each(scale):
                if micro < 3:
                    with reducer.no_sync():
                        step(reducer, gradients, scale=one)
                else:
                    step(reducer, gradients, scale=one)
            if micro < 3:
                assert not inside(pair.reducers[0]).loss_scale.unscaled_now()
                for ours, twin in zip(copies(parameters), copies(pair.twins), strict=True):
                    assert ours is not None and twin is not None
                    assert torch.equal(ours, twin * scale.scale.item()), "these keep their scale"
        pair.compare(number)


@pytest.mark.parametrize("how", ["none", "in place", "by the reducer", "some"])
@pytest.mark.parametrize(("wire", "views"), TRAVELS)
def test_zeroed_in_any_way(wire: Wire, views: bool, how: str) -> None:
    pair, scale = _Pair(leaves(), wire=wire, views=views), loss_scale(SCALE)
    for number in range(6):
        for reducer in pair.reducers:
            if how == "none":
                clear(reducer.parameters)
            elif how == "by the reducer":
                reducer.zero_grad()
            else:
                for index, parameter in enumerate(reducer.parameters):
                    if parameter.grad is not None:
                        parameter.grad = None if how == "some" and index % 2 else parameter.grad.zero_()
        gradients = [_ordinary(one) for one in pair.parameters]
        for reducer, one in pair.each(scale if number % 3 else None):
            step(reducer, gradients, scale=one)
        pair.compare(number)


# Mixed units


def _local(reducer: Reducer, scale: LossScale | None) -> None:
    with reducer.no_sync():
        _synchronised(reducer, scale)


def _synchronised(reducer: Reducer, scale: LossScale | None) -> None:
    step(reducer, [_ordinary(one) for one in reducer.parameters], scale=scale)


MIXED: dict[str, tuple[Callable[[Reducer, LossScale | None], None], bool, Any, bool]] = {
    # (first backward, of a scaled loss?), (second one, of a scaled loss?)
    "scaled onto unscaled": (_synchronised, False, _synchronised, True),
    "scaled onto what a scaled step has unscaled": (_synchronised, True, _synchronised, True),
    "scaled onto unscaled ones that wait": (_local, False, _synchronised, True),
    "unscaled onto scaled ones that wait": (_local, True, _synchronised, False),
    "scaled under no_sync onto unscaled": (_synchronised, True, _local, True),
    "unscaled under no_sync onto scaled ones that wait": (_local, True, _local, False),
    "scaled under no_sync onto unscaled ones that wait": (_local, False, _local, True),
}


@pytest.mark.parametrize("warm", [0, 7])
@pytest.mark.parametrize("mix", MIXED)
@pytest.mark.parametrize(("wire", "views"), TRAVELS[:2])
def test_mixed_units_are_an_error_before_anything_is_packed(wire: Wire, views: bool, mix: str, warm: int) -> None:
    first, first_scaled, second, second_scaled = MIXED[mix]
    # One that is packed by itself, as soon as it is there.
    parameters, scale = leaves((*NUMELS, 20_000)), loss_scale(SCALE)
    reducer = _reducer(parameters, wire=wire, views=views)
    for _ in range(warm):
        _synchronised(reducer, scale)
        clear(parameters)
    first(reducer, scale if first_scaled else None)
    with (
        counting.count_launches() as launches,
        pytest.raises(FusedReduceError, match=r"zero_grad\(\).*no_sync\(\)"),
    ):
        second(reducer, scale if second_scaled else None)
    assert not [one for one in launches if one.function in ("pack", "unpack")]
    if reducer.state is ReducerState.FAILED:
        reducer.reset()
    clear(parameters)
    gradients = [_ordinary(one) for one in parameters]
    step(reducer, list(gradients), scale=scale)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert parameter.grad is not None and torch.allclose(parameter.grad, gradient * 2 / 3, rtol=0.02)


@pytest.mark.parametrize("mix", ["scaled first", "unscaled first", "two scales"])
def test_several_backwards_of_one_step_in_several_units_are_an_error(mix: str) -> None:
    parameters = leaves()
    reducer = _reducer(parameters)
    for number in range(9):
        clear(parameters)
        gradients = [_ordinary(one) for one in parameters]
        losses = [given(parameters, gradients, part) for part in ((6, 5, 4, 3), (2, 1, 0))]
        reducer.prepare_for_backward(losses)
        scales = {
            "scaled first": (loss_scale(2.0), None),
            "unscaled first": (None, loss_scale(2.0)),
            "two scales": (loss_scale(2.0), loss_scale(4.0)),
        }[mix]
        if number % 3 == 0:  # whatever hooks are on
            backward(reducer, losses[0], scales[0])
            with pytest.raises(FusedReduceError, match="update" if mix == "two scales" else "no_sync"):
                backward(reducer, losses[1], scales[1])
            reducer.reset()
        else:
            scale = loss_scale(2.0)
            for loss in losses:
                backward(reducer, loss, scale)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                third = gradient * 2 / 3
                assert parameter.grad is not None
                assert torch.equal(parameter.grad, (third + third * 0.5 + third * 0.5) / 2)


def test_a_reducer_that_takes_no_part_in_a_scaled_backward_keeps_its_gradients() -> None:
    """Two models of one training; every backward of a scaled loss tells both reducers."""
    both, scale = [leaves(), leaves()], loss_scale(SCALE)
    reducers = [_reducer(one) for one in both]
    for number in range(8):
        clear([*both[0], *both[1]])
        for index in (0, 1) if number % 2 else (1, 0):
            parameters, reducer = both[index], reducers[index]
            gradients = [_ordinary(one) for one in parameters]
            loss = given(parameters, gradients)
            reducer.prepare_for_backward(loss)
            other = reducers[1 - index]
            before = copies(other.parameters)
            product = scaled(reducer, loss, scale)
            assert product.grad_fn is not None
            product.grad_fn.register_prehook(lambda _, other=other: other.begin_scaled(scale))
            product.backward()
            assert_same(copies(other.parameters), before)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                third = gradient * SCALE / 3
                assert parameter.grad is not None
                assert torch.equal(parameter.grad, (third + third * 0.5 + third * 0.5) / SCALE)


def test_a_reducer_under_no_sync_that_takes_no_part_keeps_its_unit() -> None:
    """A generator's forward under no_sync feeds a discriminator, whose scaled backward does not reach it."""
    parameters, scale = leaves(), loss_scale(SCALE)
    reducer, other = _reducer(parameters), _reducer(leaves())
    for number in range(9):
        clear([*parameters, *other.parameters])
        waits = number % 3 == 0
        _synchronised(reducer, scale if number % 2 else None)
        before = copies(parameters)
        if waits:
            clear(parameters)
        with reducer.no_sync():
            reducer.prepare_for_backward(given(parameters, [_ordinary(one) for one in parameters]))
        loss = given(other.parameters, [_ordinary(one) for one in other.parameters])
        other.prepare_for_backward(loss)
        product = scaled(other, loss, scale)
        assert product.grad_fn is not None
        product.grad_fn.register_prehook(lambda _: reducer.begin_scaled(scale))
        product.backward()
        assert inside(reducer).loss_scale.unscaled_now()
        if not waits:
            assert_same(copies(parameters), before)


def test_a_local_backward_through_some_of_the_parameters_has_a_unit_too() -> None:
    parameters = leaves()
    pair = _Pair(parameters)
    for _ in range(7):
        pair.clear()
        gradients = [_ordinary(one) for one in parameters]
        for reducer, one in pair.each(loss_scale(SCALE)):
            step(reducer, list(gradients), scale=one)
    pair.clear()
    some = [None if index == 1 else _ordinary(one) for index, one in enumerate(parameters)]
    gradients = [_ordinary(one) for one in parameters]
    for reducer, one in pair.each(loss_scale(64.0)):
        with reducer.no_sync():
            step(reducer, some, scale=one)
        assert inside(reducer).loss_scale.unscaled_now() is (one is None)
        step(reducer, list(gradients), scale=None if one is None else loss_scale(256.0))
    pair.compare()


# Backwards that raise


class _Raising(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise KeyError("the user's own")


@grid(
    ("wire", "views", "when", "local"),
    [
        (*travel, when, on)
        for travel in TRAVELS
        for when in ("before any gradient", "after some")
        for on in (False, True)
    ],
)
def test_an_unscaled_backward_behind_a_scaled_one_that_raised(wire: Wire, views: bool, when: str, local: bool) -> None:
    pair, scale = _Pair(leaves(), wire=wire, views=views), loss_scale(SCALE)
    reducer = pair.reducers[0]
    for number in range(8):
        if number in (0, 5):
            clear(pair.parameters)
            gradients = [_ordinary(one) for one in pair.parameters]
            part = (6, 5, 4) if when == "after some" else ()
            loss = _Raising.apply(given(pair.parameters, gradients, (3, 2, 1, 0)))
            if part:
                loss = loss + given(pair.parameters, gradients, part)
            with reducer.no_sync() if local else contextlib.nullcontext():
                reducer.prepare_for_backward(loss)
                with pytest.raises(KeyError):
                    backward(reducer, loss, scale)
            assert all(one.grad is None for one in pair.parameters[:4])
            if any(one.grad is not None for one in pair.parameters) or inside(reducer).ends_asked_for:
                reducer.reset()
        pair.clear()
        gradients = [_ordinary(one) for one in pair.parameters]
        for one, now in pair.each(None if number in (0, 5) else scale):
            step(one, gradients, scale=now)
        pair.compare(number)


# What cannot be unscaled


def test_a_hook_that_writes_gradients_itself_takes_no_scale() -> None:
    parameters = leaves()
    reducer = _reducer(parameters)
    communicator: Any = reducer.communicator
    reducer.register_comm_hook(None, averaging(3, communicator.total, "own"))
    reducer.leave_gradients_to_hook()
    with pytest.raises(FusedReduceError, match="cannot remove the loss scale"):
        _synchronised(reducer, loss_scale(SCALE))


def test_what_waits_in_a_bucket_that_is_passed_over_cannot_be_unscaled() -> None:
    parameters = leaves((40, 40, 40))
    reducer = _reducer(
        parameters,
        find_unused_parameters=True,
        skip_unused_buckets=True,
        caps=BucketCaps(first_bytes=160, cap_bytes=160),
    )
    scale = loss_scale(SCALE)
    with reducer.no_sync():
        step(reducer, [_ordinary(parameters[0]), None, None], scale=scale)
    with pytest.raises(FusedReduceError, match=r"parameter 0.*zero_grad\(\)"):
        step(reducer, [None, _ordinary(parameters[1]), _ordinary(parameters[2])], scale=scale)
    reducer.reset()
    clear(parameters)
    step(reducer, [None, _ordinary(parameters[1]), _ordinary(parameters[2])], scale=scale)
    assert parameters[0].grad is None and parameters[1].grad is not None


# Ranks


@pytest.mark.parametrize(("wire", "views"), TRAVELS)
def test_a_rank_that_has_joined_adds_nothing_to_scaled_sums(wire: Wire, views: bool) -> None:
    def case(communicator: Communicator) -> list[list[torch.Tensor | None]]:
        parameters, scale = leaves(), loss_scale(SCALE)
        torch.manual_seed(communicator.rank)
        reducer = _reducer(parameters, communicator, wire=wire, views=views, config={"check_finite": "raise"})
        found = []
        for number in range(6):
            clear(parameters)
            gradients = [_ordinary(one) for one in parameters]
            if number == 5:
                gradients[1][3] = float("nan") if communicator.rank == 0 else 1.0
            if communicator.rank == 2 and number > 2:
                shadow_step(reducer)
            else:
                step(reducer, gradients, scale=scale)
                found.append(copies(parameters))
        reports = inside(reducer).statistics.finite_check().reports
        assert [(one.step, one.reduced) for one in reports] == [(6, ("parameter 1",))]
        return found

    first, second, third = ThreadWorld(3).run(case)
    assert isinstance(first, list) and isinstance(third, list), (first, second, third)
    for number in range(5):
        assert_same(first[number], second[number])
    assert_same(first[0], third[0])


@pytest.mark.parametrize("on", [False, True])
def test_small_gradients_survive_an_fp16_wire_of_eight_ranks(on: bool) -> None:
    """1e-7 is 1.7 of fp16's smallest number: an eighth of it is none, a half is one, and with a scale it is exact."""
    draw = random.Random(5)
    parameters = leaves((500, 41, 7))
    peers = [functools.partial(_times, by=draw.uniform(0.5, 1.5)) for _ in range(7)]
    reducer = _reducer(parameters, Loopback(peers), wire="fp16", config={"grad_stats": True})
    for _ in range(4):
        clear(parameters)
        gradients = [torch.randn_like(one) * 1e-7 for one in parameters]
        step(reducer, list(gradients), scale=loss_scale(2.0**16) if on else None)
        flushed, numel, worst = 0, 0, 0.0
        for parameter, gradient in zip(parameters, gradients, strict=True):
            sent = (gradient * (2.0**16 if on else 1.0) / 2).half()
            flushed += int(((gradient != 0) & (sent == 0)).sum())
            numel += gradient.numel()
            wire = sent.clone()
            for peer in peers:
                wire += peer(sent)
            expected = wire.float() / 4 * (2.0**-16 if on else 1.0)
            assert parameter.grad is not None and torch.equal(parameter.grad, expected)
            factor = 1 + sum(float(peer(torch.ones(1))) for peer in peers)
            off = (parameter.grad - gradient * factor / 8).abs() / (gradient.abs() * factor / 8 + 1e-12)
            worst = max(worst, float(off.max()))
        stats = inside(reducer).statistics.grad_stats(per_parameter=False)
        assert stats["grad_flushed"] == pytest.approx(flushed / numel, abs=1e-12)
        if on:
            assert flushed == 0 and worst < 0.05
        else:
            assert 0.1 < flushed / numel < 0.6, "with a division by 8 ahead of the sum 98 % would be"
    assert flat_real(parameters[0]).numel() == 500


@pytest.mark.parametrize(
    ("warm", "factor", "words"),
    [(0, 0.0, r"reset\(\) on every rank and zero_grad\(\)"), (8, 1.0, "added scaled gradients to unscaled ones")],
)
def test_an_unscaled_local_backward_through_one_parameter_is_found(warm: int, factor: float, words: str) -> None:
    """Its zeros too: ranks would not agree on values that are each rank's own: one would raise, and its peers wait."""
    parameters, scale = leaves((4,) * 6), loss_scale(1024.0)
    reducer = _reducer(parameters)
    for _ in range(warm):
        _synchronised(reducer, scale)
        clear(parameters)
    with reducer.no_sync():
        reducer.prepare_for_backward()
        (parameters[0] * factor).sum().backward()
    with pytest.raises(FusedReduceError, match=words):
        _synchronised(reducer, scale)


def test_a_second_scaled_backward_of_one_forward_is_seen_by_every_parameter() -> None:
    """It adds scaled gradients, on this rank only, to what has been reduced and unscaled."""
    parameters, scale = leaves((4,) * 6), loss_scale(1024.0)
    reducer = _reducer(parameters)
    for _ in range(8):
        clear(parameters)
        _synchronised(reducer, scale)
    with pytest.raises(FusedReduceError, match="added scaled gradients to unscaled ones"):
        backward(reducer, parameters[0].sum(), scale)


def test_a_hook_that_hands_16_bit_numbers_on_flushes_nothing() -> None:
    """The scale comes off in the gradients' own dtype."""
    (parameter,) = leaves((3,))
    reducer = _reducer([parameter], Loopback(()))

    def hook(_: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer().half())
        return future

    reducer.register_comm_hook(None, hook)
    step(reducer, [torch.full((3,), 1e-9)], scale=loss_scale(65536.0))
    assert parameter.grad is not None
    assert parameter.grad.tolist() == pytest.approx([1e-9] * 3, rel=1e-3)


@pytest.mark.parametrize("views", [False, True])
def test_a_scaler_that_is_made_between_forward_and_backward(views: bool) -> None:
    """Also where no output is known, so that only the parameters' hooks see the backward."""
    parameters = leaves((3, 2))
    reducer = Reducer(parameters, Loopback([constant(0.0)]), gradient_as_bucket_view=views)
    for number in range(3):
        clear(parameters)
        loss = torch.stack([2.0 * leaf.sum() for leaf in parameters]).sum()
        reducer.prepare_for_backward()
        if number == 1:
            scaler = FusedGradScaler(reducer, device="cpu", init_scale=1024.0)
        (scaler.scale(loss) if number else loss).backward()
        reducer.finalize()
        for leaf in parameters:
            assert leaf.grad is not None and leaf.grad.eq(1.0).all(), number
