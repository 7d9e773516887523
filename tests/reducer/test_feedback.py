"""Error feedback through a Reducer: what is owed from step to step, through everything that can happen in between."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from support.inside import inside, take_torch_path
from support.leaf_steps import CAPS, SCALER, clear, drawn, leaves, loss_scale, shadow_step, step
from support.loopback import Loopback, ThreadWorld
from support.wires import ENCODED, settings

from fusedreduce import (
    BoundedStaleness,
    BucketCaps,
    DataParallel,
    FusedGradScaler,
    LocalGroup,
    ReduceConfig,
    Reducer,
    clip_grad_norm_,
)
from fusedreduce.comm.protocol import Communicator

pytestmark = pytest.mark.usefixtures("path")

# A block and more, of either encoding, and one that is not encoded.
SHAPES = ((7, 41), (3,), (2, 300), (16, 16))
Tensors = list[torch.Tensor]


def _config(wire: str, **more: Any) -> ReduceConfig:
    return ReduceConfig(**settings(wire), error_feedback=True, **more)


def _gradients(rank: int, number: int, factor: float = 1.0) -> Tensors:
    return [factor * one for one in drawn(1000 * rank + number, SHAPES)]


def _owed(reducer: Reducer) -> Tensors:
    """What this rank's residuals add to the next step, of parameters and shard, fp64 in the parameters' shapes."""
    return inside(reducer).residuals_owed()


def _assert_owed(
    before: Sequence[Tensors], after: Sequence[Tensors], true: Tensors, held: Sequence[torch.Tensor | None], what: Any
) -> None:
    """decoded = true + what was owed - what is owed, per element, to fp32's rounding; what was not written stays owed.

    Args:
        before: by rank.
        after: by rank.
        true: the result without any rounding, fp64.
        held: the gradients.
        what: for the message.
    """
    for index, (expected, gradient) in enumerate(zip(true, held, strict=True)):
        was, now = (torch.stack([one[index] for one in each]).sum(0) for each in (before, after))
        largest = max(float(one.abs().max()) for one in (expected, was, now))
        error = now - was if gradient is None else gradient.double() - expected - was + now
        assert float(error.abs().max()) <= 2.0**-19 * largest, (what, index, error.abs().max(), largest)


# What is owed


OPS = ("plain", "not finite", "clip", "scale", "resize", "checkpoint", "unused", "unused here", "no_sync", "join")


@st.composite
def _runs(draw: st.DrawFn) -> tuple[str, int, bool, list[tuple[str, int]]]:
    ops = st.lists(st.tuples(st.sampled_from(OPS), st.integers(0, 3)), min_size=3, max_size=7)
    return draw(st.sampled_from(ENCODED)), draw(st.integers(1, 3)), draw(st.booleans()), draw(ops)


@hypothesis.given(_runs())
@hypothesis.example(("int8", 2, False, [("join", 0)]))  # seldom drawn
@hypothesis.settings(max_examples=30, deadline=None)
def test_decoded_minus_true_is_the_change_of_what_is_owed(drawn: tuple[str, int, bool, list[tuple[str, int]]]) -> None:
    wire, ranks, stochastic, ops = drawn
    config = _config(wire, stochastic_rounding=stochastic)

    def case(communicator: Communicator) -> list[Any]:
        rank = communicator.rank
        found: list[Any] = []

        def made() -> Reducer:
            one = Reducer(leaves(SHAPES), communicator, config, caps=CAPS, find_unused_parameters=True)
            inside(one).loss_scale.attach(SCALER)
            return one

        reducer = made()
        for number, (op, value) in enumerate(("plain", 0) if one is None else one for one in (None, *ops)):
            gradients: list[torch.Tensor | None] = [*_gradients(rank, number)]
            mine: list[torch.Tensor | None] = list(gradients)
            if op == "resize":
                reducer.set_bucket_size(BucketCaps(first_bytes=64, cap_bytes=600 << value))
            elif op == "checkpoint":
                owed = _owed(reducer)
                state = reducer.state_dict()
                reducer.close()
                reducer = made()
                reducer.load_state_dict(state)
                found.append(("plain", owed, _owed(reducer), [torch.zeros(shape) for shape in SHAPES], [None] * 4))
            elif op == "unused" or (op == "unused here" and rank == value % ranks):
                gradients[value] = mine[value] = None
            elif op == "not finite" and rank == value % ranks:
                chosen = gradients[value]
                assert chosen is not None
                chosen.view(-1)[2] = (math.nan, math.inf, -math.inf, math.nan)[value]
            before = _owed(reducer)
            if op == "join" and rank == ranks - 1 and ranks < 3:
                reducer.prepare_for_forward()
                shadow_step(reducer)
                mine = [None] * len(SHAPES)
            else:
                if op == "no_sync":
                    with reducer.no_sync():
                        step(reducer, _gradients(rank, 100 + number))
                    both = zip(_gradients(rank, number), _gradients(rank, 100 + number), strict=True)
                    mine = [one + other for one, other in both]
                step(reducer, gradients, scale=loss_scale(2.0**value) if op == "scale" else None)
            held: list[torch.Tensor | None] = [
                None if one.grad is None else one.grad.clone() for one in reducer.parameters
            ]
            found.append((op, before, _owed(reducer), mine, held))
            if op == "clip":
                owed, most = _owed(reducer), 10.0 * (value + 1)
                coefficient = min(1.0, most / (float(clip_grad_norm_(reducer, most)) + 1e-6))
                for one, other in zip(owed, _owed(reducer), strict=True):
                    assert torch.allclose(coefficient * one, other, rtol=1e-6, atol=0)
            clear(reducer.parameters)
        assert reducer.stats()["residuals_dropped"] == 0
        return found

    by_rank = ThreadWorld(ranks).results(case)
    for records in zip(*by_rank, strict=True):
        op = records[0][0]
        before, after = [one[1] for one in records], [one[2] for one in records]
        if op == "not finite":
            for one, other in zip(before, after, strict=True):
                assert all(map(torch.equal, one, other)), "a step that is skipped leaves what is owed as it was"
            continue
        active = [one for one in records if any(each is not None for each in one[3])]
        true = []
        for index, shape in enumerate(SHAPES):
            local = [record[3][index] for record in active if record[3][index] is not None]
            true.append(sum((one.double() / ranks for one in local), torch.zeros(shape, dtype=torch.float64)))
        for record in active or records:
            _assert_owed(before, after, true, record[4], op)


def test_the_running_mean_comes_to_that_of_the_gradients() -> None:
    """A signal of 0.1 beside noise of 1. Without feedback the errors of 400 steps are still there."""
    steps, shape, limits = 400, (16, 32), (0.0005, 0.003)
    wires: Any = {"parameter 0": "int8", "parameter 1": "int4"}
    signal = 0.1 * torch.randn(shape, generator=torch.Generator().manual_seed(99))

    def case(communicator: Communicator, config: ReduceConfig) -> tuple[torch.Tensor, torch.Tensor]:
        parameters, generator = leaves([shape, shape]), torch.Generator().manual_seed(communicator.rank)
        decoded, true = torch.zeros(2, *shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
        with Reducer(parameters, communicator, config) as reducer:
            for _ in range(steps):
                gradient = signal + torch.randn(shape, generator=generator)
                step(reducer, [gradient, gradient])
                decoded += torch.stack([one.grad for one in parameters if one.grad is not None])
                true += gradient
                clear(parameters)
            assert not config.error_feedback or reducer.stats()["residuals_dropped"] == 0
        return decoded, true

    def errors(ranks: int, config: ReduceConfig) -> list[float]:
        results = ThreadWorld(ranks).results(lambda one: case(one, config))
        true = torch.stack([one for _, one in results]).mean(0)
        assert all(torch.equal(decoded, results[0][0]) for decoded, _ in results)
        return [float((one - true).norm() / true.norm()) for one in results[0][0]]

    for error, limit in zip(errors(3, ReduceConfig(wire=wires, error_feedback=True)), limits, strict=True):
        assert error <= limit
    for error, limit in zip(errors(2, ReduceConfig(wire=wires)), limits, strict=True):
        assert error > 2 * limit


@pytest.mark.parametrize("path", ["interpreter"], indirect=True)
@pytest.mark.parametrize(("wire", "stochastic"), [("int8", True), ("int4", False)])
def test_the_kernels_owe_what_the_torch_path_does(
    wire: str, stochastic: bool, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    def case(communicator: Communicator) -> list[torch.Tensor]:
        config = _config(wire, stochastic_rounding=stochastic)
        with Reducer(leaves([(7, 41)]), communicator, config, find_unused_parameters=True) as reducer:
            for number in range(2):
                clear(reducer.parameters)
                step(reducer, [_gradients(communicator.rank, number)[0]])
            assert reducer.stats()["path"] == path
            held = reducer.parameters[0].grad
            assert held is not None
            return [held, *_owed(reducer)]

    by_kernels = ThreadWorld(3).results(case)
    take_torch_path(monkeypatch)
    path = "torch"
    for one, other in zip(by_kernels, ThreadWorld(3).results(case), strict=True):
        assert all(map(torch.equal, one, other))


# What becomes of it


@pytest.mark.parametrize(
    ("wire", "before", "after"),
    [("int8", 2, 3), ("int4", 2, 3), ("int4", 3, 2), ("int8", 3, 1), ("int8", 2, 2), ("int4", 3, 3)],
)
def test_a_checkpoint_of_any_number_of_ranks_keeps_the_sum(wire: str, before: int, after: int) -> None:
    """Lost ranks' residuals go to rank r mod W, new ranks begin with none. Any rank's file will do."""

    def train(reducer: Reducer, numbers: range) -> list[list[torch.Tensor | None]]:
        found = []
        for number in numbers:
            step(reducer, _gradients(reducer.communicator.rank, number))
            clip_grad_norm_(reducer, 5.0)
            found.append([None if one.grad is None else one.grad.clone() for one in reducer.parameters])
            clear(reducer.parameters)
        return found

    def save(communicator: Communicator) -> Any:
        with Reducer(leaves(SHAPES), communicator, _config(wire), caps=CAPS, find_unused_parameters=True) as reducer:
            train(reducer, range(6))
            owed = _owed(reducer)
            state = reducer.state_dict()
            assert _coefficient(reducer) == 1.0
            return owed, state, _owed(reducer), train(reducer, range(6, 9))

    saved = ThreadWorld(before).results(save)
    state = saved[0][1]
    for _, other, _, _ in saved:
        assert all(torch.equal(one, other["residuals"][name]) for name, one in state["residuals"].items())
    assert sorted(state["residuals"]) == ["parameter 0", "parameter 2", "parameter 3"]
    assert state["residuals"]["parameter 2"].shape == (before, 2, 300)

    def load(communicator: Communicator) -> Any:
        with Reducer(leaves(SHAPES), communicator, _config(wire), caps=CAPS, find_unused_parameters=True) as reducer:
            train(reducer, range(3))
            reducer.load_state_dict(state)
            return _owed(reducer), train(reducer, range(6, 9))

    loaded = ThreadWorld(after).results(load)
    for index in range(len(SHAPES)):
        owed, folded = (torch.stack([one[place][index] for one in saved]) for place in (0, 2))
        taken = torch.stack([one[0][index] for one in loaded])
        scale = 2.0**-22 * float(owed.abs().max())
        assert float((owed.sum(0) - folded.sum(0)).abs().max()) <= scale
        assert float((owed.sum(0) - taken.sum(0)).abs().max()) <= scale
        expected = torch.stack([folded[rank::after].sum(0) for rank in range(after)])
        assert float((expected - taken).abs().max()) <= scale
    if before == after:
        for (*_, went_on), (_, resumed) in zip(saved, loaded, strict=True):
            for one, other in zip(went_on, resumed, strict=True):
                assert all(
                    torch.equal(a, b) for a, b in zip(one, other, strict=True) if a is not None and b is not None
                )


def _coefficient(reducer: Reducer) -> float:
    return inside(reducer).residuals_factor


def test_a_clip_counts_once_and_that_of_a_step_that_is_skipped_does_not() -> None:
    reducer = Reducer(leaves([(16, 16), (3,)]), Loopback([]), _config("int4"))
    gradient, other = torch.randn(16, 16), torch.randn(3)
    for _ in range(2):  # behind the first step buckets are built anew
        clear(reducer.parameters)
        step(reducer, [gradient, other])
    norm = float(clip_grad_norm_(reducer, 4.0))
    assert _coefficient(reducer) == pytest.approx(4.0 / norm, rel=1e-5)
    clip_grad_norm_(reducer, 1.0)  # once more: 4 becomes 1
    assert _coefficient(reducer) == pytest.approx(1.0 / norm, rel=1e-5)
    owed = _owed(reducer)
    for index, coefficient in ((0, math.nan), (1, 0.0)):  # by a block that decodes to NaN, and by an infinity
        bad = [gradient.clone(), other.clone()]
        bad[index].view(-1)[0] = math.inf
        clear(reducer.parameters)
        step(reducer, bad)
        norm = float(clip_grad_norm_(reducer, 1.0))
        assert math.isnan(norm) == math.isnan(coefficient) and not math.isfinite(norm)
        assert all(map(torch.equal, owed, _owed(reducer)))
    clear(reducer.parameters)
    step(reducer, [gradient, other])
    assert _coefficient(reducer) == 1.0
    after, held = _owed(reducer), [one.grad for one in reducer.parameters]
    _assert_owed([owed], [after], [gradient.double(), other.double()], held, "after")


def test_a_norm_of_other_parameters_that_is_nan_leaves_residuals_alone() -> None:
    reducer = Reducer(leaves([(16, 16)]), Loopback([]), _config("int4"))
    step(reducer, [torch.randn(16, 16)])
    reducer.note_clip(lambda: torch.tensor(math.nan))
    assert _coefficient(reducer) == 1.0


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_clip_that_waits_for_the_optimizer_with_a_loss_scaler(ranks: int) -> None:
    """Among steps that overflow, in which scale and residuals are of other steps than gradients."""

    def case(communicator: Communicator) -> list[int]:
        torch.manual_seed(0)
        model, skipped = torch.nn.Linear(64, 32, bias=False), []
        with Reducer(model.parameters(), communicator, _config("int4")) as reducer:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
            scaler = FusedGradScaler(reducer, init_scale=2.0**112, growth_interval=2)
            for number in range(12):
                generator = torch.Generator().manual_seed(100 * number + communicator.rank)
                optimizer.zero_grad()
                loss = 2.0**14 * model(torch.randn(8, 64, generator=generator)).square().mean()
                owed = _owed(reducer)
                reducer.prepare_for_backward(loss)
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                made = _owed(reducer)
                norm = float(clip_grad_norm_(reducer, 0.05, optimizer))
                scaler.step(optimizer)
                before = scaler.get_scale()
                scaler.update()
                if scaler.get_scale() < before:
                    skipped.append(number)
                    assert all(map(torch.equal, owed, _owed(reducer)))
                else:
                    assert norm > 0.05 and not torch.equal(owed[0], made[0])
                    assert torch.allclose(_owed(reducer)[0], made[0] * (0.05 / (norm + 1e-6)), rtol=1e-6, atol=0)
            assert reducer.stats()["residuals_dropped"] == 0
        return skipped

    skipped = ThreadWorld(ranks).results(case)
    assert all(one == skipped[0] for one in skipped) and 1 < len(skipped[0]) < 9


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_a_spike_has_lost_is_dropped_and_counted(ranks: int) -> None:
    """It would come back as a multiple of an ordinary gradient; what shards have lost of it too."""

    def case(communicator: Communicator) -> list[tuple[float, int]]:
        found = []
        with Reducer(leaves(SHAPES), communicator, _config("int4"), caps=CAPS) as reducer:
            for number in range(6):
                step(reducer, _gradients(communicator.rank, number, 100.0 if number == 2 else 1.0))
                largest = max(
                    float(one.grad.norm() / one.numel() ** 0.5) for one in reducer.parameters if one.grad is not None
                )
                found.append((largest, int(reducer.stats()["residuals_dropped"])))
                clear(reducer.parameters)
        return found

    by_rank = ThreadWorld(ranks).results(case)
    largest, dropped = zip(*by_rank[0], strict=True)
    assert max(largest[:2]) < 2 and largest[2] > 50 and max(largest[3:]) < 2
    assert dropped[:3] == (0, 0, 0) and dropped[3] == dropped[5]
    of_sums = sum(one[5][1] for one in by_rank) - 3 * ranks
    assert (of_sums == 0) if ranks < 3 else (of_sums >= 3), "three parameters, and what each shard has of them"


def test_a_gradient_of_zeros_or_none_drops_nothing() -> None:
    """It says nothing about ordinary ones; the residual is sent."""

    def case(communicator: Communicator) -> None:
        parameters = leaves([(16, 16), (16, 16)])
        with Reducer(parameters, communicator, _config("int4"), find_unused_parameters=True) as reducer:
            step(reducer, [torch.randn(16, 16) for _ in parameters])
            clear(parameters)
            owed = _owed(reducer)
            step(reducer, [torch.zeros(16, 16), None if communicator.rank else torch.zeros(16, 16)])
            assert all(one.grad is not None and float(one.grad.norm()) > 0 for one in parameters)
            assert not any(map(torch.equal, owed, _owed(reducer)))
            assert reducer.stats()["residuals_dropped"] == 0

    ThreadWorld(2).results(case)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_bucket_that_is_skipped_keeps_what_is_owed(ranks: int) -> None:
    def case(communicator: Communicator) -> None:
        options: dict[str, Any] = {"find_unused_parameters": True, "skip_unused_buckets": True, "caps": CAPS}
        with Reducer(leaves(SHAPES), communicator, _config("int8"), **options) as reducer:
            for number in range(4):
                owed = _owed(reducer)
                gradients: list[torch.Tensor | None] = [*_gradients(communicator.rank, number)]
                if number > 1:
                    gradients[2] = None
                step(reducer, gradients)
                left = [float((now - was).abs().max()) for now, was in zip(_owed(reducer), owed, strict=True)]
                rounding = 2.0**-22 * float(owed[2].abs().max())
                assert (number > 1) == (left[2] <= rounding) and left[3] > 0, left
                clip_grad_norm_(reducer, 0.5 if number == 1 else math.inf)
                clear(reducer.parameters)

    ThreadWorld(ranks).results(case)


@pytest.mark.parametrize("after", [1, 2])
def test_steps_at_16_bits_leave_what_is_owed(after: int) -> None:
    """A clipped step's too, for an odd number of them and an even one."""

    def case(communicator: Communicator, other: Communicator) -> None:
        with Reducer(leaves(SHAPES), communicator, _config("int4", wire_after=after), caps=CAPS) as reducer:
            for number in range(after + 3):
                clear(reducer.parameters)
                step(reducer, _gradients(communicator.rank, number))
            clip_grad_norm_(reducer, 5.0)
            owed = _owed(reducer)
            assert any(bool(one.any()) for one in owed)
            reducer.set_communicator(other)
            for number in range(after):
                clear(reducer.parameters)
                step(reducer, _gradients(communicator.rank, number))
            assert not inside(reducer).wires_in_use.encoded
            assert all(float((one - was).abs().max()) <= 1e-7 for one, was in zip(_owed(reducer), owed, strict=True))

    first, second = LocalGroup(3, timeout_s=30), LocalGroup(3, timeout_s=30)
    first.run(lambda one: case(one, second.communicator(one.rank)))


def test_a_model_too_small_to_encode_and_a_function_that_encodes_nothing_owe_nothing() -> None:
    for wire in ("int8", lambda name, parameter: "bf16"):
        config = ReduceConfig(wire=wire, error_feedback=True, stochastic_rounding=True)
        reducer = Reducer(leaves([(3,), (5, 7)]), Loopback([]), config)
        for _ in range(2):
            step(reducer, [torch.randn(3), torch.randn(5, 7)])
            clear(reducer.parameters)
        assert reducer.state_dict()["residuals"] == {}
        reducer.load_state_dict(reducer.state_dict())


@pytest.mark.parametrize("threads", [True, False])
def test_data_parallel_goes_on_from_a_checkpoint_of_all_its_replicas(threads: bool) -> None:
    """Bit for bit, also what it draws."""
    config = _config("int4", stochastic_rounding=True)

    def made() -> DataParallel:
        torch.manual_seed(0)
        return DataParallel(torch.nn.Linear(64, 64), ["cpu"] * 3, reduce=config, threads=threads)

    def run(model: DataParallel, numbers: range) -> list[torch.Tensor]:
        found = []
        for number in numbers:
            generator = torch.Generator().manual_seed(number)
            model.zero_grad()
            model(torch.randn(6, 64, generator=generator)).square().mean().backward()
            norm = float(clip_grad_norm_(model, 0.01))
            for reducer in model.reducers:
                assert _coefficient(reducer) == pytest.approx(0.01 / norm, rel=1e-4)
            found += [one.grad.clone() for one in model.module.parameters() if one.grad is not None]
        return found

    with made() as model:
        found, state = run(model, range(3)), model.reduce_state_dict()
        whole = found + run(model, range(3, 5))
    assert state["replicas"][0]["residuals"]["weight"].shape == (3, 64, 64)
    with made() as model:
        model.load_reduce_state_dict(state)
        assert all(map(torch.equal, found + run(model, range(3, 5)), whole))
    with DataParallel(torch.nn.Linear(64, 64), ["cpu"] * 2) as other, pytest.raises(ValueError, match="of 1 replic"):
        other.load_reduce_state_dict(state)


def test_residuals_take_eight_bytes_an_element_and_a_shard_eight_more_of_its_own() -> None:
    reducer = Reducer(leaves([(64, 64), (3,)]), Loopback([torch.clone] * 3), _config("int8"))
    step(reducer, [torch.randn(64, 64), torch.randn(3)])
    held, shards = inside(reducer).residuals_held()
    assert sum(one.numel() * one.itemsize for one in held) == 8 * 64 * 64
    assert sum(one.numel() * one.itemsize for one in shards) == 8 * 64 * 64 // 4


def test_states_and_settings_that_are_refused() -> None:
    with pytest.raises(ValueError, match="error_feedback=True and wire='bf16' exclude each other"):
        ReduceConfig(wire="bf16", error_feedback=True)
    reducer = Reducer(leaves(SHAPES), Loopback([]), _config("int4"))
    step(reducer, _gradients(0, 0))
    state = reducer.state_dict()
    with pytest.raises(ValueError, match="residuals of error feedback, which is off here"):
        Reducer(leaves(SHAPES), Loopback([]), ReduceConfig(wire="int4")).load_state_dict(state)
    stale = Reducer(leaves(SHAPES), Loopback([]), ReduceConfig(sync_mode=BoundedStaleness(1)))
    with pytest.raises(ValueError, match="residuals of error feedback, which is off here"):
        stale.load_state_dict(state)
    owed = _owed(reducer)
    for wrong in ({"other": torch.zeros(1, 7, 41)}, {"parameter 0": torch.zeros(7, 41)}, {"parameter 0": 3}):
        with pytest.raises(ValueError, match="of another model|damaged"):
            reducer.load_state_dict({**state, "residuals": wrong})
        assert all(map(torch.equal, owed, _owed(reducer)))
    reducer.load_state_dict({key: value for key, value in state.items() if key != "residuals"})
    assert not any(one.any() for one in _owed(reducer))
