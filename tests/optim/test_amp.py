"""FusedGradScaler against torch.amp.GradScaler, on a real Reducer alone, on wrappers in a group of one, and on 2 ranks.

Scales are powers of two, so taking them off is exact, and at wire "native" everything must be torch's, bit for bit.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import pickle
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from optim.test_clip import Operators
from support import sweep
from support.inside import inside
from support.leaf_steps import assert_same, clear, copies
from support.loopback import Loopback
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim import SGD, Adam, AdamW, Optimizer

import fusedreduce
from fusedreduce import FusedReduceError, Reducer
from fusedreduce.kernels import counting
from fusedreduce.optim import grad_scaler
from fusedreduce.optim.clip import clip_grad_norm_
from fusedreduce.optim.grad_scaler import FusedGradScaler

pytestmark = pytest.mark.usefixtures("path")

MakeOptimizer = Callable[[Sequence[torch.Tensor]], Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adamw, fused": lambda held: AdamW(held, lr=0.01, fused=True),
    "adam": lambda held: Adam(held, lr=0.01),
    "sgd, fused": lambda held: SGD(held, lr=1e-3, fused=True),
    "momentum": lambda held: SGD(held, lr=1e-4, momentum=0.9),
    "adagrad": lambda held: torch.optim.Adagrad(held, lr=0.01),
}


def _model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def _batch(step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step))


def _loss(model: nn.Module, step: int) -> torch.Tensor:
    """With noise for targets: gradients stay as large as they are."""
    loss: torch.Tensor = (model(_batch(step)) - _batch(step)[:, :3].flip(0)).square().mean() * 32.0
    return loss


class Side:
    """A model, a reducer or none, and a scaler."""

    def __init__(self, *, ours: bool, seed: int = 0, **options: Any) -> None:
        self.model = _model(seed)
        self.held = list(self.model.parameters())
        self.communicator = Loopback(())
        self.reducer = Reducer(self.held, self.communicator) if ours else None
        self.scaler: torch.amp.GradScaler
        if self.reducer is None:
            self.scaler = torch.amp.GradScaler("cpu", **options)
        else:
            self.scaler = FusedGradScaler(self.reducer, **options)

    def loss(self, step: int) -> torch.Tensor:
        """Of one batch, the reducer armed."""
        loss = _loss(self.model, step)
        if self.reducer is not None:
            self.reducer.prepare_for_backward(loss)
        return loss

    def finish(self, optimizer: Optimizer) -> None:
        """The step, or none, and what follows for the scale."""
        self.scaler.step(optimizer)
        self.scaler.update()

    def zero(self) -> None:
        """None everywhere."""
        clear(self.held)


def _sides(**options: Any) -> tuple[Side, Side]:
    return Side(ours=True, **options), Side(ours=False, **options)


# Training


@pytest.mark.parametrize("unscale", [True, False])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_is_torchs_bit_for_bit(kind: str, unscale: bool) -> None:
    """From a scale near fp32's end, which overflows, is backed off from and grown into again."""
    sides = _sides(init_scale=2.0**125, growth_interval=3)
    optimizers = [OPTIMIZERS[kind](side.held) for side in sides]
    scales: list[float] = []
    for step in range(200 if sweep.full else 60):
        losses = []
        for side, optimizer in zip(sides, optimizers, strict=True):
            optimizer.zero_grad()
            loss = side.loss(step)
            side.scaler.scale(loss).backward()
            if unscale:
                side.scaler.unscale_(optimizer)
            side.finish(optimizer)
            losses.append(loss.item())
        assert losses[0] == losses[1] and math.isfinite(losses[0])
        assert_same(sides[0].held, sides[1].held)
        scales.append(sides[0].scaler.get_scale())
        assert scales[-1] == sides[1].scaler.get_scale()
    changes = [after / before for before, after in zip(scales, scales[1:], strict=False)]
    assert changes.count(0.5) >= 10 and changes.count(2.0) >= 10, "the case does not do what it is for"


def test_several_optimizers_of_one_wrapper_skip_for_their_own_parameters_alone() -> None:
    sides = _sides(init_scale=16.0, growth_interval=3)
    pairs = [(AdamW(side.held[:2], fused=True), SGD(side.held[2:], 0.1, momentum=0.9)) for side in sides]
    skipped = [0, 0]
    for step in range(30):
        for side, pair in zip(sides, pairs, strict=True):
            side.zero()
            loss = side.loss(step)
            if step % 5 == 3:
                loss = loss + (side.held[step % 4] * math.inf).sum()
            side.scaler.scale(loss).backward()
            if step % 2:
                side.scaler.unscale_(pair[0])
            for index, optimizer in enumerate(pair):
                held = sides[0].held[2 * index : 2 * index + 2]
                before = [one.detach().clone() for one in held]
                side.scaler.step(optimizer)
                skipped[index] += side is sides[0] and all(map(torch.equal, before, held))
            side.scaler.update()
        assert_same(sides[0].held, sides[1].held)
        assert sides[0].scaler.state_dict() == sides[1].scaler.state_dict()
    assert skipped[0] >= 2 and skipped[1] >= 2 and sum(skipped) == 6


def test_two_wrappers_two_losses_and_one_scaler() -> None:
    """torch's documented recipe; each backward is one wrapper's, and the other holds unscaled gradients by then."""
    sides = [_sides(seed=seed, init_scale=256.0) for seed in (0, 1)]
    reducers = [ours.reducer for ours, _ in sides]
    scalers = [FusedGradScaler([one for one in reducers if one is not None], init_scale=256.0), sides[0][1].scaler]
    optimizers = [[AdamW(side.held, fused=True) for side in pair] for pair in sides]
    for step in range(10):
        for which, scaler in enumerate(scalers):
            for pair in sides:
                pair[which].zero()
            for pair in sides:
                scaler.scale(pair[which].loss(step)).backward()
            scaler.unscale_(optimizers[0][which])
            for steppers in optimizers:
                scaler.step(steppers[which])
            scaler.update()
        for ours, theirs in sides:
            assert_same(ours.held, theirs.held)


def test_parameters_outside_of_the_wrapper() -> None:
    sides = _sides(init_scale=2.0**10, growth_interval=4)
    extras = [torch.ones(3, requires_grad=True) for _ in sides]
    optimizers = [AdamW([*side.held, extra], fused=True) for side, extra in zip(sides, extras, strict=True)]
    for step in range(20):
        for side, extra, optimizer in zip(sides, extras, optimizers, strict=True):
            optimizer.zero_grad()
            factor = math.inf if step % 7 >= 5 else step
            loss = side.loss(step) * (math.inf if step % 7 == 6 else 1.0)  # in both: still one flag
            side.scaler.scale(loss + (extra * factor).square().sum()).backward()
            side.scaler.unscale_(optimizer)
            if factor != math.inf:
                assert extra.grad is not None and torch.equal(extra.grad, extra.detach() * 2 * step * step)
            side.finish(optimizer)
        assert torch.equal(extras[0], extras[1])
        assert_same(sides[0].held, sides[1].held)
        assert sides[0].scaler.get_scale() == sides[1].scaler.get_scale()
    assert sides[0].communicator.count("max") == 20, "ranks agree only where a parameter is not reduced"


@pytest.mark.parametrize("there", [True, False])
def test_a_peers_inf_is_heard_by_a_rank_with_or_without_a_gradient_there(there: bool) -> None:
    """Whether ranks are asked cannot depend on what this one has: the others would wait for it."""
    side = Side(ours=True, init_scale=16.0)
    extra = torch.ones(3, requires_grad=True)
    optimizer = AdamW([*side.held, extra], fused=True)
    one = torch.ones((), dtype=torch.float64).view(torch.int64)
    side.communicator.numbers = lambda mine: torch.full_like(mine, int(one))
    loss = side.loss(0)
    side.scaler.scale(loss + extra.sum() if there else loss).backward()
    before = [held.detach().clone() for held in side.held]
    side.finish(optimizer)
    assert (extra.grad is not None) == there and side.communicator.count("max") == 1
    assert_same(before, side.held)
    assert side.scaler.get_scale() == 8.0


def test_a_backward_is_of_the_scale_that_its_loss_was_given() -> None:
    """Whatever the scale is by then."""
    side, plain = Side(ours=True, init_scale=2.0**9), Side(ours=False)
    assert side.reducer is not None
    for micro in range(3):
        _loss(plain.model, micro).backward()
        with side.reducer.no_sync() if micro < 2 else contextlib.nullcontext():
            (scaled,) = side.scaler.scale(
                [side.loss(micro)]
            )  # of one tensor torch keeps the scale itself, for backward
            side.scaler.update(2.0**micro)
            scaled.backward()
    assert_same(copies(side.held), copies(plain.held))


def test_a_scale_that_is_no_power_of_two_is_off_by_the_rounding_of_torchs() -> None:
    sides = _sides(init_scale=1000.0)
    for side in sides:
        side.scaler.scale(side.loss(0)).backward()
        side.scaler.unscale_(SGD(side.held, 0.1))
    assert_same(copies(sides[0].held), copies(sides[1].held))


def test_momentum_is_not_begun_by_a_skipped_step() -> None:
    """torch's fused SGD keeps a buffer of whatever was in memory; here it trains as the one that is not fused."""
    sides = _sides(init_scale=4.0, growth_interval=1000)
    optimizers: list[Optimizer] = []
    for side, fused in zip(sides, (True, None), strict=True):
        groups: list[dict[str, Any]] = [{"params": side.held[:2]}, {"params": side.held[2:], "momentum": 0.0}]
        optimizers.append(SGD(groups, 1e-3, momentum=0.9, fused=fused))
    seen: list[bool] = []
    optimizers[0].register_step_pre_hook(lambda optimizer, *_: seen.append(hasattr(optimizer, "found_inf")))
    for step in range(8):
        for side, optimizer in zip(sides, optimizers, strict=True):
            optimizer.zero_grad()
            loss = side.loss(step) * (math.inf if step in (0, 1, 4) else 1.0)
            side.scaler.scale(loss).backward()
            if side.reducer is not None:
                clip_grad_norm_(side.reducer, 1e6, optimizer)
            side.scaler.step(optimizer)
            if step < 2:
                assert not any("momentum_buffer" in state for state in optimizer.state.values())
            side.scaler.update()
        for mine, other in zip(sides[0].held, sides[1].held, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)
    assert seen == [False, True, True, True, True, True], "steps 0 and 1 never came, step 2 was decided on the host"


# The rules, torch's and ours


def test_torchs_rules_hold() -> None:
    for side in _sides(init_scale=4.0):
        optimizer = SGD(side.held, 0.1)
        for early in (side.scaler.unscale_, side.scaler.step):
            with pytest.raises(AssertionError, match="_scale is None"):
                early(optimizer)
        with pytest.raises(AssertionError, match="_scale is None"):
            side.scaler.update()
        side.scaler.scale(side.loss(0)).backward()
        with pytest.raises(RuntimeError, match="Closure use"):
            side.scaler.step(optimizer, closure=lambda: 0.0)
        with pytest.raises(AssertionError, match="No inf checks were recorded prior to update"):
            side.scaler.update()
        side.scaler.unscale_(optimizer)
        with pytest.raises(RuntimeError, match="already been called on this optimizer"):
            side.scaler.unscale_(optimizer)
        side.scaler.step(optimizer)
        with pytest.raises(RuntimeError, match="after step"):
            side.scaler.unscale_(optimizer)
        with pytest.raises(RuntimeError, match="already been called since"):
            side.scaler.step(optimizer)
        side.scaler.update()


@pytest.mark.parametrize("fused", [True, False])
def test_a_step_without_a_backward_is_as_torchs(fused: bool) -> None:
    told = []
    for side in _sides(init_scale=4.0):
        optimizer = SGD(side.held, 0.1, momentum=0.9, fused=fused)
        for backward in (False, True, False):
            optimizer.zero_grad()
            scaled = side.scaler.scale(side.loss(0) * (math.inf if backward else 1.0))
            if backward:
                scaled.backward()
            for call in (lambda: side.scaler.step(optimizer), side.scaler.update):  # noqa: B023
                try:
                    call()
                    told.append("fine")
                except AssertionError as error:
                    told.append(str(error))
            if not backward:
                side.scaler._per_optimizer_states.clear()
        told.append(str(side.scaler.state_dict()))
    assert told[: len(told) // 2] == told[len(told) // 2 :]


def test_state_dict_and_pickle_are_torchs() -> None:
    sides = _sides(init_scale=8.0, growth_interval=2)
    for side in sides:
        optimizer = SGD(side.held, 0.1)
        for step in range(3):
            optimizer.zero_grad()
            side.scaler.scale(side.loss(step)).backward()
            side.finish(optimizer)
    ours, theirs = (side.scaler for side in sides)
    state = ours.state_dict()
    assert state == theirs.state_dict() and state["scale"] == 16.0 and state["_growth_tracker"] == 1
    theirs.load_state_dict(state)
    ours.scale(torch.ones((), requires_grad=True))  # and the scale of before is known
    ours.load_state_dict({**state, "scale": 32.0})
    assert isinstance(ours, FusedGradScaler) and sides[0].reducer is not None
    for scaler in (ours, pickle.loads(pickle.dumps(ours)), copy.deepcopy(ours)):
        assert scaler.state_dict() == ours.state_dict() and scaler.get_scale() == 32.0
        if scaler is not ours:
            with pytest.raises(FusedReduceError, match="attach"):
                scaler.scale(torch.ones(()))
            scaler.attach(sides[0].reducer)
        sides[0].zero()
        scaler.scale(sides[0].loss(9)).backward()
        _same_gradients(sides[0].held, 9, sides[0].model)


def _same_gradients(held: Sequence[torch.Tensor], step: int, model: nn.Module) -> None:
    plain = copy.deepcopy(model)
    plain.zero_grad()
    _loss(plain, step).backward()
    assert_same(copies(held), copies(list(plain.parameters())))


def test_disabled_it_does_nothing() -> None:
    sides = _sides(enabled=False)
    for side in sides:
        optimizer = AdamW(side.held, fused=True)
        for step in range(3):
            optimizer.zero_grad()
            loss = side.loss(step)
            assert side.scaler.scale(loss) is loss
            loss.backward()
            side.scaler.unscale_(optimizer)
            side.scaler.unscale_(optimizer)
            side.finish(optimizer)
        assert side.scaler.state_dict() == {} and side.scaler.get_scale() == 1.0 and not side.scaler.is_enabled()
        side.scaler.load_state_dict({})
        pickle.dumps(side.scaler)
    assert_same(sides[0].held, sides[1].held)
    assert sides[0].reducer is not None and not inside(sides[0].reducer).loss_scale.attached
    half = Reducer([torch.ones(2, dtype=torch.float16, requires_grad=True)], Loopback(()))
    FusedGradScaler(half, enabled=False)


def test_a_step_that_raises_leaves_no_attributes() -> None:
    side = Side(ours=True, init_scale=4.0)
    optimizer = AdamW(side.held, fused=True)
    side.scaler.scale(side.loss(0) * math.inf).backward()
    optimizer.param_groups[0]["eps"] = "wrong"
    with pytest.raises(TypeError):
        side.scaler.step(optimizer)
    assert not hasattr(optimizer, "found_inf") and not hasattr(optimizer, "grad_scale")
    optimizer.param_groups[0]["eps"] = 1e-8
    side.finish(optimizer)
    assert side.scaler.get_scale() == 2.0


def test_scale_takes_what_torchs_takes() -> None:
    side = Side(ours=True, init_scale=4.0)

    def losses() -> list[torch.Tensor]:
        side.zero()
        output = side.model(_batch(0))
        assert side.reducer is not None
        side.reducer.prepare_for_backward(output)
        return [output.square().mean(), output.sum()]

    wanted = None
    for wrap in (list, tuple, lambda held: (one for one in held), lambda held: [held[:1], (held[1],)]):
        scaled = side.scaler.scale(wrap(losses()))
        flat: list[torch.Tensor] = []
        for one in scaled:
            flat += [one] if isinstance(one, torch.Tensor) else list(one)
        assert type(scaled) is (type(wrap([])) if wrap in (list, tuple) else type(scaled))
        torch.stack(flat).sum().backward()
        found = [one.grad.clone() for one in side.held if one.grad is not None]
        wanted = wanted or found
        assert_same(found, wanted)
    with pytest.raises(ValueError, match="must be a Tensor or an iterable"):
        list(side.scaler.scale([1.0]))  # type: ignore[list-item]


def test_a_gradient_cannot_be_scaled_in_place_of_the_loss() -> None:
    """Nobody could tell that backward from one of an unscaled loss."""
    side = Side(ours=True)
    with pytest.raises(ValueError, match="no grad_fn.*scale the loss"):
        side.scaler.scale(torch.ones(3))
    with torch.no_grad():  # as validation does
        assert side.scaler.scale(torch.ones(3)).tolist() == [2.0**16] * 3


def test_what_cannot_be_attached_is_refused(alone: None) -> None:
    reducer = Reducer([torch.ones(2, requires_grad=True)], Loopback(()))
    torchs = TorchDDP(_model())
    torchs.register_comm_hook(fusedreduce.FusedHookState(), fusedreduce.fused_hook)
    for wrong in (torchs, _model(), 3.0, [reducer, torchs]):
        with pytest.raises(TypeError, match=r"torch\.amp\.GradScaler"):
            FusedGradScaler(wrong)  # type: ignore[arg-type]
    for none in ([], [reducer, reducer]):
        with pytest.raises(ValueError, match="each once"):
            FusedGradScaler(none)
    half = Reducer([torch.ones(2, dtype=torch.float16, requires_grad=True)], Loopback(()), names=["head"])
    with pytest.raises(ValueError, match=r"Attempting to unscale FP16 gradients.*head"):
        FusedGradScaler(half)
    with pytest.raises(AssertionError, match="growth factor"):
        FusedGradScaler(reducer, growth_factor=1.0)


def test_parameters_that_two_wrappers_reduce_are_refused(alone: None) -> None:
    """Gradients would be off by the scale; at construction, and where the second wrapper comes later."""
    model = nn.Sequential(nn.Linear(6, 8), fusedreduce.DistributedDataParallel(nn.Linear(8, 3)))
    inner, outer = model[1], fusedreduce.DistributedDataParallel(model)
    for given in (outer, inner, [outer, inner]):
        with pytest.raises(ValueError, match=r"shares parameters with another one.*torch\.amp\.GradScaler"):
            FusedGradScaler(given)  # type: ignore[arg-type]
    FusedGradScaler(outer, enabled=False)
    ddp = fusedreduce.DistributedDataParallel(_model())
    scaler = FusedGradScaler(ddp)
    scaler.scale(_loss(ddp, 0)).backward()
    around = fusedreduce.DistributedDataParallel(nn.Sequential(ddp))
    around.zero_grad()
    with pytest.raises(ValueError, match="shares parameters"):
        scaler.scale(_loss(around, 1))
    with pytest.raises(ValueError, match="shares parameters"):
        scaler.attach(around)
    fusedreduce.reducer_of(around).close()
    scaler.scale(_loss(ddp, 1)).backward()
    _same_gradients(list(ddp.parameters()), 1, ddp.module)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_optimizer_that_steps_in_backward_is_refused(alone: None) -> None:
    ddp = fusedreduce.DistributedDataParallel(_model())
    scaler = FusedGradScaler(ddp)
    ddp._register_fused_optim(SGD, lr=0.1)
    with pytest.raises(ValueError, match="its optimizer steps within backward, before the loss scale is removed"):
        scaler.scale(_loss(ddp, 0))
    with pytest.raises(ValueError, match="steps within backward"):
        FusedGradScaler(ddp)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.skipif(
    torch.backends.cuda.is_built() and not torch.cuda.is_available(), reason="torch makes a stream and finds no driver"
)
def test_an_optimizer_that_steps_in_backward_is_refused_once_it_is_found(alone: None) -> None:
    # Not above: it warns when it is imported.
    from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward

    model = _model()
    _apply_optimizer_in_backward(SGD, model.parameters(), {"lr": 0.1})
    ddp = fusedreduce.DistributedDataParallel(model)
    scaler = FusedGradScaler(ddp)
    loss = _loss(ddp, 0)  # the first forward finds those optimizers
    with pytest.raises(ValueError, match="steps within backward"):
        scaler.scale(loss)


def test_a_wrapper_that_was_compiled_is_taken_for_what_it_is(alone: None) -> None:
    ddp = fusedreduce.DistributedDataParallel(_model())
    compiled: Any = torch.compile(ddp, backend="eager")
    for given in (compiled, [compiled]):
        scaler = FusedGradScaler(given, init_scale=2.0**9)
        ddp.zero_grad()
        scaler.scale(_loss(ddp, 0)).backward()
        _same_gradients(list(ddp.parameters()), 0, ddp.module)
    with pytest.raises(ValueError, match="each once"):
        FusedGradScaler([ddp, compiled])


def test_wrappers_that_are_given_up_have_no_scaler_any_more() -> None:
    """Nor is one left by a scaler that is gone."""
    sides = [Side(ours=True, seed=seed) for seed in (0, 1)]
    (first, second) = (side.reducer for side in sides)
    assert first is not None and second is not None
    scaler = sides[0].scaler
    assert isinstance(scaler, FusedGradScaler) and inside(first).loss_scale.scalers() == [scaler]
    with pytest.raises(ValueError, match="each once"):
        scaler.attach([second, second])
    assert inside(first).loss_scale.scalers() == [scaler]
    scaler.attach(second)
    assert not inside(first).loss_scale.attached and scaler in inside(second).loss_scale.scalers()
    # Another scaler's business by now: what waits for `scaler` does not vouch for the first one's gradients.
    scaler.scale(sides[1].loss(0)).backward()
    scaler.unscale_(SGD(sides[1].held, 0.1))
    assert grad_scaler.is_unscaled(second) and not grad_scaler.is_unscaled(first)
    del scaler, sides[0].scaler, sides[1].scaler
    assert not inside(second).loss_scale.attached


# Units


def test_an_inf_that_came_after_backward_skips_the_step() -> None:
    sides = _sides(init_scale=4.0)
    for side in sides:
        optimizer = SGD(side.held, 0.1)
        for step in range(2):
            optimizer.zero_grad()
            side.scaler.scale(side.loss(step)).backward()
            if step:
                assert side.held[0].grad is not None
                side.held[0].grad.div_(0.0)
            before = [one.detach().clone() for one in side.held]
            side.finish(optimizer)
        assert_same(before, side.held)
        assert side.scaler.get_scale() == 2.0


@pytest.mark.parametrize("call", ["unscale_", "step"])
def test_unscaling_what_was_never_reduced_raises_and_can_be_made_good(call: str) -> None:
    side = Side(ours=True, init_scale=4.0)
    optimizer = SGD(side.held, 0.1, fused=True)
    assert side.reducer is not None
    with side.reducer.no_sync():
        side.scaler.scale(side.loss(0)).backward()
    before = [one.grad.clone() for one in side.held if one.grad is not None]
    with pytest.raises(FusedReduceError, match=r"no_sync\(\)"):
        getattr(side.scaler, call)(optimizer)
    assert_same(before, [one.grad for one in side.held if one.grad is not None])
    side.scaler.scale(side.loss(1)).backward()
    getattr(side.scaler, call)(optimizer)


def test_torchs_own_unscale_by_way_of_the_base_class_unscales_nothing_twice() -> None:
    side = Side(ours=True, init_scale=4.0)
    optimizer = SGD(side.held, 0.1)
    side.scaler.scale(side.loss(0)).backward()
    torch.amp.GradScaler.unscale_(side.scaler, optimizer)
    _same_gradients(side.held, 0, side.model)


def test_a_scaler_made_after_a_forward_looks_itself() -> None:
    """Nothing was collected in that step; the first look costs a pass."""
    side = Side(ours=False)
    reducer = Reducer(side.held, Loopback(()))
    loss = _loss(side.model, 0)
    reducer.prepare_for_backward(loss)
    scaler = FusedGradScaler(reducer, init_scale=4.0)
    scaler.scale(loss * math.inf).backward()
    before = [one.detach().clone() for one in side.held]
    scaler.step(AdamW(side.held, fused=True))
    scaler.update()
    assert_same(before, side.held)
    assert scaler.get_scale() == 2.0


# What it costs


@pytest.mark.parametrize("clip", [True, False])
def test_a_scaled_step_waits_for_nothing_and_looks_at_no_gradient(clip: bool) -> None:
    """From backward's end to update's: host waits, operators outside of kernels, and launches."""
    counts = []
    for side in _sides(init_scale=4.0):
        optimizer = AdamW(side.held, fused=True)
        for step in range(4):
            optimizer.zero_grad()
            side.scaler.scale(side.loss(step)).backward()
            with Operators() as operators, counting.count_launches() as launches:
                side.scaler.unscale_(optimizer)
                if clip and side.reducer is not None:
                    clip_grad_norm_(side.reducer, 0.1, optimizer)
                elif clip:
                    torch.nn.utils.clip_grad_norm_(side.held, 0.1)
                side.finish(optimizer)
        counts.append((operators.waits, len(operators.names), [one.function for one in launches]))
        passes = {"_amp_foreach_non_finite_check_and_unscale_", "_foreach_norm", "_foreach_mul_"}
        taken = passes & set(operators.names)
        assert taken == (set() if side.reducer is not None else passes if clip else {min(passes)})
    # torch's hold its passes; ours are on single numbers, beside one launch that adds by-products up.
    assert counts == [(0, 18 if clip else 12, ["reduce_partials"]), (0, 20 if clip else 12, [])]


def test_a_momentum_that_begins_waits_once() -> None:
    side = Side(ours=True, init_scale=4.0)
    optimizer = SGD(side.held, 0.1, momentum=0.9, fused=True)
    waits = []
    for step in range(3):
        optimizer.zero_grad()
        side.scaler.scale(side.loss(step)).backward()
        with Operators() as operators, counting.count_launches():
            side.finish(optimizer)
        waits.append(operators.waits)
    assert waits == [1, 0, 0]


# Wrappers, and ranks


def test_a_wrapper_that_was_pickled_can_be_attached(alone: None) -> None:
    ddp = fusedreduce.DistributedDataParallel(_model())
    scaler = FusedGradScaler(ddp, init_scale=2.0**9)
    scaler.scale(_loss(ddp, 0)).backward()
    loaded = pickle.loads(pickle.dumps(ddp))
    scaler.attach(loaded)
    loaded.zero_grad()
    scaler.scale(_loss(loaded, 1)).backward()
    _same_gradients(list(loaded.parameters()), 1, loaded.module)


def test_a_loss_that_is_kept_keeps_no_reducer() -> None:
    side = Side(ours=True)
    kept = side.scaler.scale(side.loss(0))
    alive = weakref.ref(side.reducer)
    del side
    gc.collect()
    assert alive() is None and kept.grad_fn is not None
