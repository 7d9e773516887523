"""Wires that change between two steps: the first steps at 16 bits, and parameters whose encoding loses too much."""

from __future__ import annotations

import functools
import logging
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.cuda.fake_driver import CHECKOUT
from support.inside import MEASURE_EVERY, inside
from support.leaf_steps import CAPS, clear, drawn, leaves, shadow_step, step, step_that_rank_1_fails
from support.loopback import Loopback, ThreadWorld
from support.wires import reduced

from fusedreduce import AgreementError, BucketCaps, DataParallel, ReduceConfig, Reducer, Synchronous
from fusedreduce.buckets.exchanged import EncodedBucket
from fusedreduce.buckets.phases import Phases
from fusedreduce.comm.group import Group
from fusedreduce.comm.protocol import Communicator
from fusedreduce.config import Wire
from fusedreduce.kernels.encodings import ENCODINGS
from fusedreduce.reducer.wire_schedule import ParameterWire, sqnr_db

pytestmark = pytest.mark.usefixtures("path")

CPU = torch.device("cpu")
NAMES = ("a", "b", "c", "d", "e")
SHAPES = ((7, 41), (300,), (2, 300), (16, 16), (5, 7))
AFTER = 3
Gradients = Callable[[int, int], list[torch.Tensor]]


def _gradients(number: int, rank: int) -> list[torch.Tensor]:
    return drawn(100 * number + rank, SHAPES)


def _reducer(communicator: Communicator, config: ReduceConfig, **options: Any) -> Reducer:
    parameters = leaves(SHAPES)
    return Reducer(parameters, communicator, config, names=NAMES, **{"caps": CAPS, **options})


def _check(reducer: Reducer, local: Sequence[Sequence[torch.Tensor]], wires: Sequence[Wire], what: object) -> None:
    """Gradients are what ranks with `local` make of them on these wires, to the bit, and buckets have one wire each."""
    ranks = len(local)
    for index, wire in enumerate(wires):
        flat = [one[index].view(1, -1) for one in local]
        expected = reduced(flat, [float(ranks)] * ranks, wire).view(SHAPES[index])
        gradient = reducer.parameters[index].grad
        assert gradient is not None and torch.equal(gradient, expected), (what, NAMES[index], wire)
    assert all(len({wires[number] for number in members}) == 1 for members in reducer.plan), what


def _steps(
    reducer: Reducer, numbers: range, wires: Callable[[int], Sequence[Wire]], draw: Gradients = _gradients
) -> None:
    """Steps of these numbers, on the wires of each."""
    rank, ranks = reducer.communicator.rank, reducer.communicator.size
    for number in numbers:
        clear(reducer.parameters)
        step(reducer, draw(number, rank))
        assert inside(reducer).wires_in_use.wires == tuple(wires(number)), number
        _check(reducer, [draw(number, one) for one in range(ranks)], wires(number), number)


ENCODED: tuple[Wire, ...] = ("int8", "native", "int8", "int8", "native")
AT_16: tuple[Wire, ...] = ("bf16", "native", "bf16", "bf16", "native")


def _after(number: int) -> tuple[Wire, ...]:
    """Of `wire_after`, in a step that is counted from 1."""
    return AT_16 if number <= AFTER else ENCODED


# The first steps at 16 bits


@pytest.mark.parametrize(("ranks", "policy"), [(1, "ready"), (2, "planned"), (3, "planned"), (3, "static")])
def test_the_first_steps_are_those_of_bf16_and_the_next_ones_of_int8(ranks: int, policy: Any) -> None:
    """In the order of readiness, with what is measured for plans until then forgotten."""

    def case(communicator: Communicator) -> None:
        config = ReduceConfig(wire="int8", wire_after=AFTER, policy=policy, link=(5.0, 1.0))
        with _reducer(communicator, config) as reducer:
            _steps(reducer, range(1, 20), _after)
            assert reducer.wire_report() == {
                name: ParameterWire(wire, None) for name, wire in zip(NAMES, ENCODED, strict=True)
            }

    ThreadWorld(ranks).results(case)


def test_other_wires_stay_beside_those_that_change() -> None:
    config = ReduceConfig(wire={"a": "int8", "b": "fp16", "c": "int4", "d": "bf16"}, wire_after=AFTER)

    def wires(number: int) -> tuple[Wire, ...]:
        early = number <= AFTER
        return ("bf16" if early else "int8", "fp16", "bf16" if early else "int4", "bf16", "native")

    def case(communicator: Communicator) -> None:
        with _reducer(communicator, config, caps=BucketCaps(cap_bytes=2**20)) as reducer:
            _steps(reducer, range(1, AFTER + 1), wires)
            assert len(reducer.plan) == 3
            _steps(reducer, range(AFTER + 1, AFTER + 4), wires)
            assert len(reducer.plan) == 5

    ThreadWorld(3).results(case)


@pytest.mark.parametrize(("at", "ranks"), [(1, 2), (2, 3), (AFTER, 2), (AFTER, 3), (AFTER + 1, 3), (AFTER + 2, 2)])
def test_a_step_that_ends_on_some_ranks_only_leaves_all_on_the_same_wires(ranks: int, at: int) -> None:
    """Rank 1 raises behind its last collective; the others end that step, and count it."""

    def case(communicator: Communicator) -> list[str]:
        found = []
        with _reducer(communicator, ReduceConfig(wire="int8", wire_after=AFTER)) as reducer:
            _steps(reducer, range(1, at), _after)
            step_that_rank_1_fails(reducer, _gradients(at, communicator.rank))
            reducer.reset()
            for number in range(20, 27):
                clear(reducer.parameters)
                step(reducer, _gradients(number, communicator.rank))
                wires = inside(reducer).wires_in_use.wires
                _check(reducer, [_gradients(number, one) for one in range(ranks)], wires, number)
                found.append(wires[0])
        return found

    by_rank = ThreadWorld(ranks).results(case)
    # Where ranks had counted differently they count anew.
    left = AFTER if at <= AFTER else 0
    assert all(found == ["bf16"] * left + ["int8"] * (7 - left) for found in by_rank), by_rank


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_without_inputs_count_along(ranks: int) -> None:
    """The last rank has inputs for one step; it comes back for more when the others have changed wires."""

    def case(communicator: Communicator) -> None:
        with _reducer(communicator, ReduceConfig(wire="int8", wire_after=AFTER)) as reducer:
            for number in range(1, 7):
                if communicator.rank == ranks - 1 and number > 1:
                    shadow_step(reducer)
                else:
                    step(reducer, _gradients(number, communicator.rank))
            _steps(reducer, range(7, 10), _after)

    ThreadWorld(ranks).results(case)


def test_local_backwards_are_not_counted_and_other_ranks_begin_anew() -> None:
    def case(communicator: Communicator) -> None:
        with _reducer(communicator, ReduceConfig(wire="int8", wire_after=AFTER)) as reducer:
            for _ in range(4):
                with reducer.no_sync():
                    step(reducer, _gradients(50, communicator.rank))
            _steps(reducer, range(1, AFTER + 3), _after)
            reducer.set_bucket_size(10_000)
            _steps(reducer, range(AFTER + 3, AFTER + 5), _after)
            reducer.set_communicator(communicator)
            _steps(reducer, range(1, AFTER + 3), _after)

    ThreadWorld(3).results(case)


@pytest.mark.parametrize("taken", [2, 5])
def test_a_checkpoint_keeps_count(taken: int) -> None:
    config = ReduceConfig(wire="int8", wire_after=AFTER)

    def case(communicator: Communicator) -> None:
        with _reducer(communicator, config) as reducer:
            _steps(reducer, range(1, taken + 1), _after)
            state = reducer.state_dict()
        with _reducer(communicator, config) as again:
            again.load_state_dict(state)
            _steps(again, range(taken + 1, taken + 5), _after)

    ThreadWorld(2).results(case)


def test_a_checkpoint_that_one_rank_has_not_loaded_is_an_error_on_every_rank() -> None:
    config = ReduceConfig(wire="int8", wire_after=AFTER)

    def case(communicator: Communicator) -> None:
        with _reducer(communicator, config) as reducer:
            _steps(reducer, range(1, 3), _after)
            state = reducer.state_dict()
        with _reducer(communicator, config) as again:
            if communicator.rank == 1:
                again.load_state_dict(state)
            step(again, _gradients(3, communicator.rank))

    for error in ThreadWorld(2).run(case):
        assert isinstance(error, AgreementError) and "steps before encoding" in str(error)


def test_checkpoints_of_different_steps_are_an_error_on_every_rank() -> None:
    """Also where ranks have compared their settings before."""

    def case(communicator: Communicator) -> None:
        with _reducer(communicator, ReduceConfig(wire="int8", wire_after=AFTER)) as reducer:
            _steps(reducer, range(1, 2), _after)
            early = reducer.state_dict()
            _steps(reducer, range(2, 3), _after)
            reducer.load_state_dict(early if communicator.rank == 1 else reducer.state_dict())
            step(reducer, _gradients(3, communicator.rank))

    for error in ThreadWorld(2).run(case):
        assert isinstance(error, AgreementError) and "steps before encoding" in str(error)


def test_a_given_plan_is_split_where_wires_part() -> None:
    parameters: dict[str, Wire] = {"b": "bf16", "*": "int8"}
    config = ReduceConfig(wire=parameters, wire_after=AFTER)
    with _reducer(Loopback(), config, caps=BucketCaps(cap_bytes=2**20)) as reducer:
        for number in range(3):
            step(reducer, _gradients(number, 0))
        plan = reducer.plan_json()
        assert sorted(map(len, reducer.plan)) == [1, 4]
    given = ReduceConfig(wire=parameters, wire_after=AFTER, plan=plan)
    with _reducer(Loopback(), given, caps=BucketCaps(cap_bytes=2**20)) as reducer:
        for number in range(6):
            step(reducer, _gradients(number, 0))
        assert sorted(map(len, reducer.plan)) == [1, 1, 3] and inside(reducer).wires_in_use[1] == "bf16"


@pytest.mark.parametrize("threads", [True, False])
def test_replicas_of_one_process_change_wires_together(threads: bool, often: int) -> None:
    """Also where one thread drives all of them, so that no measurement may be waited for before all have issued it."""
    torch.manual_seed(0)
    module, ranks, last = torch.nn.Linear(40, 40), 3, 2 + 3 * often
    config = ReduceConfig(wire={"bias": "native", "*": "int8"}, wire_after=2, least_sqnr_db=90.0)
    parallel = DataParallel(module, ["cpu"] * ranks, reduce=config, threads=threads, timeout_s=20.0)
    try:
        for number in range(1, last + 3):
            samples = torch.randn(4 * ranks, 40)
            parallel.zero_grad()
            parallel(samples).square().sum().backward()
            local = []
            for part in samples.chunk(ranks):
                loss = torch.func.functional_call(module, dict(module.named_parameters()), (part,))
                local.append(torch.autograd.grad(loss.square().sum(), module.weight)[0])
            wire = "int8" if 2 < number <= last else "bf16"
            held = module.weight.grad
            assert held is not None and torch.equal(held, reduced(local, [1.0] * ranks, wire, "sum")), number
    finally:
        parallel.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"wire": "int8", "wire_after": -1}, "wire_after must be a whole number"),
        ({"wire": "int8", "wire_after": 2.0}, "wire_after must be a whole number"),
        ({"wire": "bf16", "wire_after": 2}, "wire_after=2 and wire='bf16' exclude each other: .*'int8' and 'int4'"),
        ({"wire": {"*": "bf16"}, "least_sqnr_db": 0.0}, "least_sqnr_db=0.0 and wire=.* exclude each other"),
        ({"wire": "int8", "least_sqnr_db": math.nan}, "least_sqnr_db must be a finite number"),
        ({"wire": "int8", "least_sqnr_db": "30"}, "least_sqnr_db must be a finite number"),
    ],
)
def test_what_is_no_number_or_has_no_effect_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ReduceConfig(**options)


@pytest.mark.parametrize("wire", ["int8", lambda name, parameter: "bf16"])
def test_a_model_too_small_to_encode_and_a_function_that_encodes_nothing_are_reduced(wire: Any) -> None:
    config = ReduceConfig(wire=wire, wire_after=1, least_sqnr_db=35.0)
    reducer = Reducer(leaves([(3,), (5, 7)]), Loopback([]), config)
    for _ in range(3):
        local = [torch.randn(3), torch.randn(5, 7)]
        step(reducer, local)
        expected = [one.bfloat16().float() if callable(wire) else one for one in local]
        for parameter, mean in zip(reducer.parameters, expected, strict=True):
            assert parameter.grad is not None and torch.equal(parameter.grad, mean)
        clear(reducer.parameters)
    reducer.set_sync_mode(Synchronous())


# What encodings lose


def _bucket(numels: Sequence[int], wire: str, dtype: torch.dtype = torch.float32) -> EncodedBucket:
    phases = Phases(Group(Loopback()), CPU)
    shapes = [((numel,), (1,)) for numel in numels]
    dtypes = [dtype] * len(numels)
    return EncodedBucket(numels, dtypes, ENCODINGS[wire], CPU, "bucket 0", shapes, ranks=3, phases=phases, lazy=False)


def _expected_db(wire: Wire, cumulative: Callable[[np.ndarray], np.ndarray], variance: float) -> float:
    """Of independent values: errors are uniform within a quantum, which is a block's largest value / levels."""
    at = np.linspace(0.0, 60.0, 600_001)
    largest_squared = float(np.trapezoid(2 * at * (1 - cumulative(at) ** ENCODINGS[wire].block_numel), at))
    return 10 * math.log10(12 * variance * ENCODINGS[wire].levels ** 2 / largest_squared)


def _gaussian(at: np.ndarray) -> np.ndarray:
    return np.asarray(torch.erf(torch.from_numpy(at) / math.sqrt(2)).numpy())


def _laplace(at: np.ndarray) -> np.ndarray:
    return np.asarray(1 - np.exp(-at))


def test_the_ratio_is_that_of_theory_and_of_the_page() -> None:
    page = Path(CHECKOUT, "docs", "wires.md").read_text()
    generator = torch.Generator().manual_seed(0)
    numel = 2**18
    laplace = (
        torch.empty(numel).exponential_(generator=generator) * (torch.rand(numel, generator=generator) - 0.5).sign()
    )
    gaussian = torch.randn(numel, generator=generator)
    drawn = {"Gaussian": (gaussian, _gaussian, 1.0), "Laplace": (laplace, _laplace, 2.0)}
    for named, (values, cumulative, variance) in drawn.items():
        row = re.search(rf"^\| {named} \| ([\d.]+) \| ([\d.]+) \|$", page, re.M)
        assert row is not None, named
        for wire, written in zip(ENCODINGS, row.groups(), strict=True):
            found = sqnr_db(_bucket([numel], wire), [values]).item()
            assert found == pytest.approx(_expected_db(wire, cumulative, variance), abs=1.0)
            assert f"{found:.1f}" == written, (named, wire)


@pytest.mark.parametrize("wire", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_each_slot_has_its_own_ratio_and_nothing_else_is_touched(wire: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    numels = (700, 300, 2048, 513, 256)
    gradients: list[torch.Tensor | None] = [torch.randn(one, generator=generator).to(dtype) for one in numels]
    together = [None if one is None else one.clone() for one in gradients]
    alone = [sqnr_db(_bucket([numel], wire, dtype), [one]).item() for numel, one in zip(numels, gradients, strict=True)]
    together[1], together[3], together[4] = (
        None,
        torch.full((513,), math.nan, dtype=dtype),
        torch.zeros(256, dtype=dtype),
    )
    bucket = _bucket(numels, wire, dtype)
    bucket.wire().fill_(7)
    found = sqnr_db(bucket, together).tolist()
    assert found[0] == alone[0] and found[2] == alone[2] and found[1] == found[3] == found[4] == math.inf
    assert (bucket.wire() == 7).all() and torch.equal(together[0], gradients[0])  # type: ignore[arg-type]


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> int:
    """Measures every fourth step."""
    MEASURE_EVERY.replace(monkeypatch, 4)
    return 4


def _planted(number: int, rank: int) -> list[torch.Tensor]:
    """On rank 1 each block of "c" has one value that leaves of the others a code of 0."""
    found = _gradients(number, rank)
    if rank == 1:
        found[2].view(-1)[::256] = 300.0
    return found


@pytest.mark.parametrize(("ranks", "after"), [(2, 2), (3, 0)])
def test_a_parameter_that_loses_too_much_returns_on_every_rank_at_one_step(
    ranks: int, after: int, often: int, caplog: pytest.LogCaptureFixture
) -> None:
    config = ReduceConfig(wire="int8", least_sqnr_db=35.0, wire_after=after)
    last = after + 3 * often  # the third measurement in a row
    returned: tuple[Wire, ...] = ("int8", "native", "bf16", "int8", "native")

    def wires(number: int) -> tuple[Wire, ...]:
        return AT_16 if number <= after else ENCODED if number <= last else returned

    def case(communicator: Communicator) -> dict[str, ParameterWire]:
        with _reducer(communicator, config) as reducer:
            _steps(reducer, range(1, last + 8), wires, _planted)
            return reducer.wire_report()

    with caplog.at_level(logging.WARNING):
        found = ThreadWorld(ranks).results(case)
    assert all(one == found[0] for one in found)
    report = found[0]
    assert report["c"].wire == "bf16" and report["c"].sqnr_db is not None and report["c"].sqnr_db < 35
    assert report["a"].sqnr_db is not None and report["a"].sqnr_db > 35 and report["b"].sqnr_db is None
    (said,) = [one.getMessage() for one in caplog.records]
    ratio = f"{report['c'].sqnr_db:.1f} dB"
    assert said.startswith(f"c returns from int8 to bf16: its signal-to-quantization-noise ratio is {ratio}")


@pytest.mark.parametrize("wire", ["int8", "int4"])
def test_in_two_levels_the_same_is_measured(wire: Wire, often: int) -> None:
    """Each rank's own contribution, though the bucket's wire is of elements there."""

    def case(communicator: Communicator, per_node: int) -> dict[str, ParameterWire]:
        config = ReduceConfig(wire=wire, least_sqnr_db=10.0, ranks_per_node=per_node)
        with _reducer(communicator, config) as reducer:
            for number in range(1, often + 2):
                clear(reducer.parameters)
                step(reducer, _gradients(number, communicator.rank))
            assert inside(reducer).phases.per_node == per_node
            return reducer.wire_report()

    one, two = (ThreadWorld(4).results(functools.partial(case, per_node=per_node)) for per_node in (1, 2))
    assert one == two and one[0]["a"].sqnr_db is not None and one[0]["a"].sqnr_db > 10


def test_a_single_measurement_decides_nothing_and_nothing_is_measured_unless_asked(often: int) -> None:
    def rare(number: int, rank: int) -> list[torch.Tensor]:
        return _planted(number, rank) if number % (3 * often) else _gradients(number, rank)

    def case(communicator: Communicator) -> None:
        with _reducer(communicator, ReduceConfig(wire="int8", least_sqnr_db=35.0)) as reducer:
            before = int(reducer.stats()["collectives"])
            _steps(reducer, range(1, 8 * often), lambda number: ENCODED, rare)
            measured = int(reducer.stats()["collectives"]) - before
        with _reducer(communicator, ReduceConfig(wire="int8")) as reducer:
            before = int(reducer.stats()["collectives"])
            _steps(reducer, range(1, 8 * often), lambda number: ENCODED, rare)
            assert measured - (int(reducer.stats()["collectives"]) - before) == 7

    ThreadWorld(2).results(case)


def test_when_every_parameter_has_returned_nothing_is_measured_any_more(often: int) -> None:
    config = ReduceConfig(wire="int4", least_sqnr_db=90.0)

    def wires(number: int) -> tuple[Wire, ...]:
        return ("int4", "native", "int4", "int4", "native") if number <= 3 * often else AT_16

    def case(communicator: Communicator) -> None:
        with _reducer(communicator, config, find_unused_parameters=True) as reducer:
            _steps(reducer, range(1, 6 * often), wires)
            assert not inside(reducer).measures_wires and not inside(reducer).may_change_wires

    ThreadWorld(3).results(case)


@pytest.mark.parametrize("at", [2, 3, 6, 14, 15])
def test_ranks_without_inputs_and_failed_steps_fall_anywhere(often: int, at: int) -> None:
    """Around measurements and what follows from them: all ranks stay on the same wires."""

    def raises() -> None:
        raise ZeroDivisionError

    def case(communicator: Communicator) -> list[tuple[Wire, ...]]:
        found = []
        with _reducer(communicator, ReduceConfig(wire="int8", least_sqnr_db=35.0, wire_after=2)) as reducer:
            for number in range(1, 34):
                clear(reducer.parameters)
                fails = number == at and communicator.rank == 0
                if fails:
                    reducer.prepare_for_forward()
                    inside(reducer).fail_at_the_end(-1, raises)
                if communicator.rank == 2 and number % 3:
                    shadow_step(reducer)
                elif fails:
                    with pytest.raises(ZeroDivisionError):
                        step(reducer, _planted(number, 0))
                else:
                    step(reducer, _planted(number, communicator.rank))
                if number == at:
                    reducer.reset()
                found.append(inside(reducer).wires_in_use.wires)
        return found

    first, *others = ThreadWorld(3).results(case)
    assert all(one[at:] == first[at:] for one in others) and first[-1][2] == "bf16" and first[-1][0] == "int8"
