"""Stochastic rounding through a Reducer: what it draws by, its mean, the same bytes everywhere, and checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.inside import inside
from support.leaf_steps import CAPS, assert_same, clear, copies, drawn, leaves, shadow_step, step
from support.loopback import ThreadWorld
from support.wires import ENCODED, settings

from fusedreduce import BucketCaps, LocalGroup, ReduceConfig, Reducer
from fusedreduce.comm.protocol import Communicator
from fusedreduce.kernels import encoded
from fusedreduce.kernels.encoded_table import EncodedTable
from fusedreduce.kernels.encodings import ENCODINGS
from fusedreduce.kernels.table import PointerTable

pytestmark = pytest.mark.usefixtures("path")

# A block and more, of either encoding, and one that is not encoded.
SHAPES = ((7, 41), (3,), (2, 300), (16, 16))
ONE_BUCKET = BucketCaps(first_bytes=2**20, cap_bytes=2**20)
SEED = 2**32 - 5


def _config(wire: Any, **more: Any) -> ReduceConfig:
    return ReduceConfig(wire=wire, stochastic_rounding=True, seed=SEED, **more)


def _gradients(rank: int, number: int) -> list[torch.Tensor]:
    return drawn(1000 * rank + number, SHAPES)


def _train(reducer: Reducer, numbers: Sequence[int]) -> list[list[torch.Tensor | None]]:
    """The gradients after each of these steps."""
    found = []
    for number in numbers:
        step(reducer, _gradients(reducer.communicator.rank, number))
        found.append(copies(reducer.parameters))
        clear(reducer.parameters)
    return found


def _drawn(gradient: torch.Tensor, wire: str, rank: int, number: int, parameter: int) -> torch.Tensor:
    """A rank's contribution to a mean over two, as both decode it."""
    table = EncodedTable([gradient.numel()], [0], [gradient.dtype], 4096, ENCODINGS[wire], 1, keys=[parameter])
    sent, decoded = torch.empty(table.layout.nbytes, dtype=torch.uint8), torch.empty_like(gradient)
    draw = torch.tensor([SEED, 2 * rank, number, 0])
    encoded.encode([gradient], table, PointerTable(), sent, 2.0, draw=draw)
    encoded.decode([decoded], table, PointerTable(), sent, torch.ones(1))
    return decoded


@pytest.mark.parametrize("wire", ENCODED)
def test_contributions_are_drawn_by_seed_rank_parameter_and_step_whatever_the_plan(wire: str) -> None:
    def case(communicator: Communicator, caps: BucketCaps) -> list[list[torch.Tensor | None]]:
        with Reducer(leaves(SHAPES), communicator, _config(wire), caps=caps) as reducer:
            return _train(reducer, range(4))

    apart, together = ThreadWorld(2).results(lambda one: (case(one, CAPS), case(one, ONE_BUCKET)))
    for number in range(4):
        local = [_gradients(rank, number) for rank in range(2)]
        for index in (0, 2, 3):
            parts = [_drawn(local[rank][index], wire, rank, number, index) for rank in range(2)]
            for held in (*apart, *together):
                gradient = held[number][index]
                assert gradient is not None and torch.equal(gradient, parts[0] + parts[1]), (number, index)


@pytest.mark.parametrize(("wire", "ranks"), [("int8", 1), ("int4", 2), ("int8", 3), ("int4", 3)])
def test_the_mean_over_steps_comes_to_the_gradients_own(wire: str, ranks: int) -> None:
    """Within 6 standard deviations of a mean of so many draws; rounding to nearest stays where it was."""
    steps, gradient = 200, _gradients(0, 0)[3]

    def case(communicator: Communicator, config: ReduceConfig, steps: int) -> torch.Tensor:
        parameters = leaves([(16, 16)])
        total = torch.zeros(16, 16, dtype=torch.float64)
        with Reducer(parameters, communicator, config) as reducer:
            for _ in range(steps):
                step(reducer, [gradient])
                held = parameters[0].grad
                assert held is not None
                total += held
                clear(parameters)
        return total / steps

    stochastic = ThreadWorld(ranks).results(lambda one: case(one, _config(wire), steps))
    nearest = ThreadWorld(ranks).results(lambda one: case(one, ReduceConfig(**settings(wire)), 2))
    encoding = ENCODINGS[wire]
    blocks = gradient.double().abs().view(-1, encoding.block_numel)
    quantum = (blocks.amax(1, keepdim=True) * (1 + 2.0**-7) / encoding.levels).expand_as(blocks).reshape(16, 16)
    # One draw's variance is at most a quarter of a quantum's square; that of a sum in two phases is twice that.
    bound = 6 * quantum * (0.5 / steps) ** 0.5 * 2**-0.5 * (2 if ranks > 2 else 1) ** 0.5
    for mean in stochastic:
        assert bool(((mean - gradient.double()).abs() <= bound).all())
        assert torch.equal(mean, stochastic[0])
    assert float((nearest[0] - gradient.double()).norm()) > 4 * float((stochastic[0] - gradient.double()).norm())


@pytest.mark.parametrize(("wire", "ranks"), [("int8", 3), ("int4", 2)])
def test_a_run_goes_on_from_a_checkpoint_bit_for_bit(wire: str, ranks: int) -> None:
    """And every rank has the same bytes. Phase two draws by bucket, so the plan is one that no order changes."""

    def at_once(communicator: Communicator) -> list[list[torch.Tensor | None]]:
        with Reducer(leaves(SHAPES), communicator, _config(wire), caps=CAPS, find_unused_parameters=True) as reducer:
            return _train(reducer, range(8))

    def in_two(communicator: Communicator) -> list[list[torch.Tensor | None]]:
        with Reducer(leaves(SHAPES), communicator, _config(wire), caps=CAPS, find_unused_parameters=True) as reducer:
            found = _train(reducer, range(4))
            state = reducer.state_dict()
        with Reducer(leaves(SHAPES), communicator, _config(wire), caps=CAPS, find_unused_parameters=True) as reducer:
            reducer.load_state_dict(state)
            return found + _train(reducer, range(4, 8))

    whole, halves = ThreadWorld(ranks).results(at_once), ThreadWorld(ranks).results(in_two)
    for held in (*whole, *halves):
        for number, (gradients, expected) in enumerate(zip(held, whole[0], strict=True)):
            assert_same(gradients, expected, number)
    assert not torch.equal(whole[0][0][0], whole[0][4][0])


def test_a_joined_rank_counts_its_steps_and_the_number_loads_on_any_number_of_ranks() -> None:
    def case(communicator: Communicator) -> dict[str, Any]:
        with Reducer(leaves(SHAPES), communicator, _config("int8"), caps=CAPS) as reducer:
            for number in range(5):
                if communicator.rank == 1 and number > 2:
                    shadow_step(reducer)
                else:
                    _train(reducer, [number])
                    reducer.prepare_for_forward()
            draws = inside(reducer).draws
            assert draws is not None
            inside(reducer).begin_round()
            (contribution, of_sum) = draws.of_bucket(1, torch.device("cpu"))
            assert contribution is not None and of_sum is not None
            assert contribution.tolist() == [SEED, 2 * communicator.rank, 5, 0]
            assert of_sum.tolist() == [SEED, 2 * communicator.rank + 1, 5, 1]
            return reducer.state_dict()

    states = ThreadWorld(3).results(case)
    assert all(one == states[0] for one in states) and states[0]["rounds"] == 5

    def load(communicator: Communicator) -> int:
        with Reducer(leaves(SHAPES), communicator, _config("int8")) as reducer:
            reducer.load_state_dict(states[0])
            return inside(reducer).rounds

    assert ThreadWorld(2).results(load) == [5, 5]


def test_another_communicator_brings_another_rank() -> None:
    def case(communicator: Communicator, other: Communicator) -> Any:
        with Reducer(leaves(SHAPES), communicator, _config("int4"), caps=CAPS) as reducer:
            _train(reducer, [0, 1])
            reducer.set_communicator(other)
            step(reducer, _gradients(other.rank, 2))
            return reducer.parameters[3].grad

    # Whose steps are counted from 0, for all ranks alike, also one that is new.
    first, second = LocalGroup(2, timeout_s=30), LocalGroup(2, timeout_s=30)
    expected = [_drawn(_gradients(rank, 2)[3], "int4", rank, 0, 3) for rank in range(2)]
    for gradient in first.run(lambda one: case(one, second.communicator(1 - one.rank))):
        assert torch.equal(gradient, expected[0] + expected[1])


def test_what_is_refused() -> None:
    for wire in ("native", "bf16"):
        with pytest.raises(ValueError, match=f"stochastic_rounding=True and wire='{wire}' exclude each other"):
            ReduceConfig(**settings(wire), stochastic_rounding=True)
    with pytest.raises(ValueError, match="stochastic_rounding must be True or False, got 1"):
        ReduceConfig(wire="int8", stochastic_rounding=1)  # type: ignore[arg-type]
    for seed in (-1, 2**32, 0.0, True):
        with pytest.raises(ValueError, match="seed must be a whole number in"):
            ReduceConfig(seed=seed)  # type: ignore[arg-type]
