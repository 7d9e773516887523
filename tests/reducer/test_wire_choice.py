"""Steps choose one of several wires: the same on every rank, whatever each of them measures and whatever happens."""

from __future__ import annotations

import gc
import logging
import re
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support.inside import MEASURE_EVERY, TRIAL_WINDOW, inside
from support.leaf_steps import clear, drawn, given, leaves, shadow_step, step, step_that_rank_1_fails
from support.loopback import Loopback, ThreadWorld
from support.wires import reduced

from fusedreduce import (
    AgreementError,
    Asynchronous,
    BoundedStaleness,
    BucketCaps,
    CollectiveError,
    DataParallel,
    FusedHookState,
    ReduceConfig,
    Reducer,
    Synchronous,
    SyncServer,
)
from fusedreduce.comm.protocol import Communicator
from fusedreduce.config import Wire
from fusedreduce.reducer import wire_trial
from fusedreduce.wires import WIRES, wire_for

pytestmark = pytest.mark.usefixtures("path")

NAMES = ("a", "b", "c", "d", "e")
SHAPES = ((7, 41), (300,), (2, 300), (16, 16), (5, 7))
CAPS = BucketCaps(first_bytes=1000, cap_bytes=3000)  # three buckets
SEVERAL = ("native", "bf16", "int8")
LINK = (5.0, 1.0)  # given, so that plans of models as small as these are planned, and the wires tried
SETTLED = 30  # steps, behind which the first trial is prepared
Took = Mapping[Wire, int]
MS = 10**6


def _gradients(number: int, rank: int) -> list[torch.Tensor]:
    return drawn(100 * number + rank, SHAPES)


def _reducer(communicator: Communicator, wires: Any = SEVERAL, took_ns: Took | None = None, **options: Any) -> Reducer:
    config = ReduceConfig(wire=wires, **{"link": LINK, **options.pop("config", {})})
    reducer = Reducer(leaves(SHAPES), communicator, config, names=NAMES, **{"caps": CAPS, **options})
    if took_ns is not None:
        inside(reducer).tell_step_times(lambda wire: took_ns[wire] * MS)
    return reducer


def _check(reducer: Reducer, number: int) -> None:
    """Gradients are what ranks make of them on the wires in use, to the bit."""
    ranks = reducer.communicator.size
    for index, wire in enumerate(inside(reducer).wires_in_use.wires):
        flat = [_gradients(number, rank)[index].view(1, -1) for rank in range(ranks)]
        expected = reduced(flat, [float(ranks)] * ranks, wire).view(SHAPES[index])
        gradient = reducer.parameters[index].grad
        assert gradient is not None and torch.equal(gradient, expected), (number, NAMES[index], wire)


def _steps(reducer: Reducer, numbers: range, checked: int = 1, *, forward: bool = False) -> list[Wire]:
    """Takes steps, and returns the wire of each. With `forward` each is prepared for that too: its time begins there.

    Checks what each leaves whose number is a multiple of `checked`, and the first of each wire.
    """
    found = [inside(reducer).tried_wire]
    for number in numbers:
        clear(reducer.parameters)
        if forward:
            reducer.prepare_for_forward()
        step(reducer, _gradients(number, reducer.communicator.rank))
        found.append(inside(reducer).tried_wire)
        if number % checked == 0 or found[-1] != found[-2]:
            _check(reducer, number)
    return found[1:]


def _until(reducer: Reducer, stage: str, first: int = 1, most: int = 200, *, forward: bool = False) -> int:
    """Steps until the choice is at this stage; returns the number of the next step.

    One in four is checked, and in each block of a trial the first.
    """
    for number in range(first, first + most):
        _steps(reducer, range(number, number + 1), checked=4, forward=forward)
        times = reducer.wire_times()
        assert times is not None
        if times.stage == stage:
            return number + 1
    raise AssertionError(f"{stage} was not reached")


def _alike(ranks: int, case: Callable[[Communicator], Any]) -> Any:
    """The result of a case that all ranks must share."""
    found = ThreadWorld(ranks).results(case)
    assert all(one == found[0] for one in found), found
    return found[0]


# The choice


@pytest.mark.parametrize(
    ("took_ms", "chosen", "ranks"),
    [
        ({"native": 100, "bf16": 70, "int8": 50}, "int8", 3),
        ({"native": 100, "bf16": 70, "int8": 67}, "bf16", 2),
        ({"native": 100, "bf16": 99, "int8": 96}, "native", 2),
    ],
)
def test_each_step_is_right_on_its_wire_and_the_rule_decides(took_ms: dict[Wire, int], chosen: str, ranks: int) -> None:
    def case(communicator: Communicator) -> tuple[Any, ...]:
        with _reducer(communicator, took_ns=took_ms) as reducer:
            wires = _steps(reducer, range(1, 96))
            times = reducer.wire_times()
            assert times is not None and times.stage == "chosen" and times.wire == chosen
            assert times.since is not None and times.since <= 80
            stats = reducer.stats()
            assert (stats["wire"], stats["wire_stage"]) == (chosen, "chosen")
            return wires, times.wire, times.since, tuple(times.measured_ms.items())

    wires, _, since, measured = _alike(ranks, case)
    assert dict(measured) == took_ms and set(wires[:SETTLED]) == {"native"} and set(wires[since:]) == {chosen}
    trial = wires[wires.index("bf16") - wire_trial.block(3) : since]
    blocks = [trial[at] for at in range(0, 6 * wire_trial.block(3), wire_trial.block(3))]
    assert blocks == ["native", "bf16", "int8", "int8", "bf16", "native"]


def test_ranks_that_measure_different_things_choose_the_same_wire() -> None:
    """Of each step the rank that began last counts, which waits for none: the shortest time."""

    def case(communicator: Communicator) -> Wire:
        by_rank: list[Took] = [{"native": 50, "bf16": 90, "int8": 95}, {"native": 90, "bf16": 40, "int8": 99}]
        with _reducer(communicator, took_ns=by_rank[communicator.rank]) as reducer:
            _until(reducer, "checking", forward=True)
            times = reducer.wire_times()
            assert times is not None
            assert times.measured_ms == {"native": 50, "bf16": 40, "int8": 95}
            return times.wire

    assert _alike(2, case) == "bf16"


def test_a_choice_that_the_next_steps_do_not_bear_out_is_undone() -> None:
    """And not made again at the next look at the plan."""

    def case(communicator: Communicator) -> tuple[list[Wire], Wire]:
        took_ms = {"native": 100, "bf16": 70}
        config = {"replan_every": wire_trial.WINDOW}
        with _reducer(communicator, ("native", "bf16"), took_ms, config=config) as reducer:
            number = _until(reducer, "checking")
            assert inside(reducer).tried_wire == "bf16"
            took_ms["bf16"] = 100
            wires = _steps(reducer, range(number, number + wire_trial.CHECKED + 3))
            number = _until(reducer, "chosen", number + len(wires))
            assert reducer.choice is not None and "int8, which was not tried, is expected" in reducer.choice.smaller
            later = _steps(reducer, range(number, number + 3 * wire_trial.WINDOW))
            assert set(later) == {"native"}
            return wires, inside(reducer).tried_wire

    wires, held = _alike(2, case)
    assert held == "native" and wires[-1] == "native" and wires.count("bf16") >= wire_trial.CHECKED


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.full)])
def test_steps_that_take_longer_have_the_wires_tried_again(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a window, and less and less often where no other wire comes of it."""
    window = 12
    TRIAL_WINDOW.replace(monkeypatch, window)

    def case(communicator: Communicator) -> list[int]:
        took_ms = {"native": 100, "bf16": 99, "int8": 98}
        with _reducer(communicator, took_ns=took_ms) as reducer:
            number = _until(reducer, "chosen")
            assert inside(reducer).tried_wire == "native"
            took_ms |= {"native": 400, "bf16": 220, "int8": 120}
            begun = number
            number = _until(reducer, "trying", number)
            assert number - begun <= window + SETTLED + 6
            number = _until(reducer, "chosen", number)
            assert inside(reducer).tried_wire == "int8"
            waits = []
            for factor in (2, 4, 8):
                took_ms |= {"native": 400 * factor, "bf16": 220 * factor, "int8": 120 * factor}
                begun = number
                number = _until(reducer, "trying", number)
                waits.append(number - begun)
                number = _until(reducer, "chosen", number)
            return waits

    first, second, third = _alike(ranks, case)
    assert first < 2 * window + SETTLED and second - first >= window and third - second >= 2 * window


@pytest.mark.parametrize(
    ("wires", "took_ms", "said"),
    [
        # Of 100 s, in which what a slow machine measures of kernels and of a backward is nothing.
        (
            SEVERAL,
            (100_000, 90_000, 88_000),
            "wire bf16 .* int8 88000.00 ms; int8 was not 5% shorter in both its blocks; int4, which .*",
        ),
        (SEVERAL, (100_000, 99_000, 98_000), "wire native .*; int4, which was not tried, is expected to take as long"),
        (("native", "bf16"), (100, 70), "wire bf16 .*bf16 70.00 ms; int8 was not tried, and the model .* is off by .*"),
        (("native", "int4"), (100, 70), "wire int4 .* native 100.00 ms, int4 70.00 ms"),
        (
            ("bf16", "native"),
            (100_000, 99_000),
            "wire bf16 .* native 99000.00 ms; native was not 2% shorter in both.*; int8, .*",
        ),
    ],
)
def test_the_line_of_a_choice_says_why_and_what_is_not_known(
    wires: tuple[Wire, ...], took_ms: tuple[int, ...], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    def case(communicator: Communicator) -> None:
        with _reducer(communicator, wires, dict(zip(wires, took_ms, strict=True))) as reducer:
            _until(reducer, "checking")

    with caplog.at_level(logging.INFO):
        ThreadWorld(2).results(case)
    (line,) = [one.getMessage() for one in caplog.records if one.name.endswith("wire_choice")]
    assert re.fullmatch(said, line), line


# What happens meanwhile


@pytest.mark.parametrize(
    ("stage", "ranks"), [("measuring", 2), ("preparing", 2), ("trying", 3), ("checking", 3), ("chosen", 2)]
)
def test_a_reset_gives_up_the_trial_on_every_rank_and_keeps_the_wire(stage: str, ranks: int) -> None:
    """Rank 1 raises behind its last collective; the others end that step, and count it."""

    def case(communicator: Communicator) -> Any:
        took_ms = {"native": 100, "bf16": 70, "int8": 20}
        with _reducer(communicator, took_ns=took_ms) as reducer:
            number = _until(reducer, stage)
            if stage == "trying":  # within a block of another wire, of one that is exchanged in phases
                while inside(reducer).tried_wire != "int8":
                    _steps(reducer, range(number, number + 1))
                    number += 1
            step_that_rank_1_fails(reducer, _gradients(number, communicator.rank))
            reducer.reset()
            wires = _steps(reducer, range(number + 1, number + 10))
            _until(reducer, "chosen", number + 10)
            return wires, inside(reducer).tried_wire

    wires, chosen = _alike(ranks, case)
    assert chosen == "int8" and set(wires) <= {"native"} | ({"int8"} if stage in ("checking", "chosen") else set())


@pytest.mark.parametrize("within", [1, 2, 7, 32, 33, 54, 55])
def test_a_step_that_ends_on_some_ranks_only_leaves_all_on_one_wire(within: int) -> None:
    """Wherever one rank has decided, and the other has not yet: a stage ends, a block, or times are shared."""

    def case(communicator: Communicator) -> Any:
        with _reducer(communicator, took_ns={"native": 100, "bf16": 70, "int8": 20}) as reducer:
            last = SETTLED + within
            _steps(reducer, range(1, last))
            step_that_rank_1_fails(reducer, _gradients(last, communicator.rank))
            if communicator.rank != 1:
                reducer.prepare_for_forward()  # which decides what is next
            reducer.reset()
            wires = _steps(reducer, range(last + 1, last + 5))
            _until(reducer, "chosen", last + 5)
            return wires, inside(reducer).tried_wire

    assert _alike(2, case)[1] == "int8"


@pytest.mark.parametrize("within", [33, 55])
def test_what_one_rank_alone_has_decided_is_forgotten(within: int) -> None:
    """Also how often trials came to nothing, which says when the next one may be."""

    def case(communicator: Communicator) -> int:
        took_ms = {"native": 100, "bf16": 99, "int8": 98}
        with _reducer(communicator, took_ns=took_ms) as reducer:
            last = SETTLED + within
            _steps(reducer, range(1, last))
            step_that_rank_1_fails(reducer, _gradients(last, communicator.rank))
            if communicator.rank != 1:
                reducer.prepare_for_forward()
            reducer.reset()
            number = _until(reducer, "chosen", last + 1)
            took_ms |= {"native": 200, "bf16": 198, "int8": 196}
            return _until(reducer, "trying", number)

    assert _alike(2, case)


def test_what_a_decision_raises_leaves_the_reducer_failed() -> None:
    """A rank that has not decided what its peers have must not go on as if nothing had happened."""

    def case(communicator: Communicator) -> str:
        with _reducer(communicator, took_ns={"native": 100, "bf16": 70, "int8": 20}) as reducer:
            number = _until(reducer, "preparing")  # whose step shares numbers, read before the next
            if communicator.rank == 1:
                inside(reducer).fail_to_decide(MemoryError())
                with pytest.raises(MemoryError):
                    reducer.prepare_for_forward()
            else:
                reducer.prepare_for_forward()
            state = reducer.state.value
            reducer.reset()
            _steps(reducer, range(number + 1, number + 4))
            return state

    assert ThreadWorld(2).results(case) == ["idle", "failed"]


def test_a_trace_that_cannot_be_begun_anew_ends_no_step(tmp_path: Path) -> None:
    def case(communicator: Communicator) -> None:
        folder = tmp_path / str(communicator.rank)
        after = {"wire_after": 3}
        with suppress(OSError), _reducer(communicator, "int8", config=after) as reducer, reducer.record_trace(folder):
            step(reducer, _gradients(1, communicator.rank))
            if communicator.rank == 1:
                folder.rmdir()
                folder.write_text("no folder")
            for number in range(2, 8):
                clear(reducer.parameters)
                step(reducer, _gradients(number, communicator.rank))
                _check(reducer, number)

    ThreadWorld(2).results(case)


def test_a_reducer_of_several_wires_is_gone_with_its_last_reference() -> None:
    gc.disable()
    try:
        reducer = _reducer(Loopback([]))
        alive = weakref.ref(reducer)
        del reducer
        assert alive() is None
    finally:
        gc.enable()


def test_a_rank_that_dies_in_a_trial_is_an_error_on_the_others() -> None:
    def case(communicator: Communicator) -> None:
        reducer = _reducer(communicator, took_ns={"native": 100, "bf16": 70, "int8": 20})
        number = _until(reducer, "trying") + 8
        if communicator.rank == 1:
            raise SystemExit
        step(reducer, _gradients(number, 0))
        for more in range(number + 1, number + 30):
            step(reducer, _gradients(more, 0))

    first, second = ThreadWorld(2).run(case)
    assert isinstance(first, CollectiveError) and isinstance(second, SystemExit)


def test_ranks_without_inputs_count_along_and_say_nothing_about_times() -> None:
    def case(communicator: Communicator) -> Any:
        with _reducer(communicator, took_ns={"native": 100, "bf16": 70, "int8": 20}) as reducer:
            for number in range(1, 100):
                if communicator.rank == 1 and number > 3 and number % 3:
                    shadow_step(reducer)
                else:
                    step(reducer, _gradients(number, communicator.rank))
            times = reducer.wire_times()
            assert times is not None
            return times.wire, times.stage, times.measured_ms

    assert _alike(2, case) == ("int8", "chosen", {"native": 100, "bf16": 70, "int8": 20})


def test_a_checkpoint_holds_the_chosen_wire_and_none_that_is_being_tried() -> None:
    def case(communicator: Communicator) -> Any:
        took_ms = {"native": 100, "bf16": 70, "int8": 20}
        with _reducer(communicator, took_ns=took_ms) as reducer:
            number = _until(reducer, "trying") + 8
            _steps(reducer, range(number - 8, number))
            assert inside(reducer).tried_wire == "bf16"
            early = reducer.state_dict()
            _until(reducer, "chosen", number)
            late = reducer.state_dict()
        for state, wire in ((early, "native"), (late, "int8")):
            with _reducer(communicator, took_ns=took_ms) as again:
                again.load_state_dict(state)
                assert set(_steps(again, range(1, SETTLED))) == {wire}
                _until(again, "chosen", SETTLED)
        with _reducer(communicator, ("native", "bf16"), took_ms) as other:
            other.load_state_dict(late)
            assert _steps(other, range(1, 3)) == ["native"] * 2, "int8 is not allowed there"
        with _reducer(communicator, "bf16") as fixed:
            fixed.load_state_dict(late)
            step(fixed, _gradients(1, communicator.rank))
        return early, late

    assert _alike(2, case) == ({"wire": "native"}, {"wire": "int8"})


def test_a_checkpoint_that_one_rank_has_not_loaded_is_an_error_on_every_rank() -> None:
    def case(communicator: Communicator) -> None:
        with _reducer(communicator) as reducer:
            if communicator.rank == 1:
                reducer.load_state_dict({"wire": "int8"})
            step(reducer, _gradients(1, communicator.rank))

    for error in ThreadWorld(2).run(case):
        assert isinstance(error, AgreementError) and "wire chosen" in str(error)


def test_ranks_with_other_lists_are_told_so() -> None:
    lists = (("native", "bf16"), ("native", "int8"), "native")

    def case(communicator: Communicator) -> None:
        with _reducer(communicator, lists[communicator.rank]) as reducer:
            step(reducer, _gradients(1, communicator.rank))

    for error in ThreadWorld(3).run(case):
        assert isinstance(error, AgreementError) and "native,int8" in str(error)


def test_other_ranks_sizes_and_modes_begin_anew() -> None:
    at = SETTLED + 10

    def case(communicator: Communicator) -> Any:
        with _reducer(communicator, took_ns={"native": 100, "bf16": 70, "int8": 20}) as reducer:
            _steps(reducer, range(1, at))
            reducer.set_bucket_size(10_000)
            _until(reducer, "chosen", at)
            assert inside(reducer).tried_wire == "int8"
            reducer.set_communicator(communicator)
            assert _steps(reducer, range(1, 4)) == ["native"] * 3
            number = _until(reducer, "chosen", 4)
            reducer.set_sync_mode(BoundedStaleness(1))
            clear(reducer.parameters)
            step(reducer, _gradients(number, communicator.rank))
            reducer.flush()
            times = reducer.wire_times()
            assert times is not None and times.why.startswith("with sync_mode=BoundedStaleness")
            assert times.wire == inside(reducer).tried_wire == "native"
            reducer.set_sync_mode(Synchronous())
            _until(reducer, "chosen", number + 1)
            return inside(reducer).tried_wire

    assert _alike(2, case) == "int8"


@pytest.mark.parametrize(("keeps", "lazy"), [(True, False), (False, True)])
def test_views_are_there_at_native_alone(lazy: bool, keeps: bool) -> None:
    def case(communicator: Communicator) -> Any:
        took_ms = {"native": 20, "bf16": 70, "int8": 90}
        options: dict[str, Any] = {"gradient_as_bucket_view": True, "lazy_bucket_allocation": lazy}
        with _reducer(communicator, ("bf16", "native", "int8"), took_ms, **options) as reducer:
            for number in range(1, 70):
                if keeps:
                    reducer.zero_grad()
                else:
                    clear(reducer.parameters)
                step(reducer, _gradients(number, communicator.rank))
                _check(reducer, number)
                assert inside(reducer).has_views == (inside(reducer).tried_wire == "native")
            return inside(reducer).tried_wire

    assert _alike(2, case) == "native"


def test_gradients_of_backwards_that_were_not_reduced_travel_on_the_next_wire() -> None:
    """Accumulated on one wire, reduced on another."""

    def case(communicator: Communicator) -> None:
        rank = communicator.rank
        with _reducer(communicator, took_ns={"native": 100, "bf16": 70, "int8": 20}) as reducer:
            for number in range(1, 70):
                clear(reducer.parameters)
                with reducer.no_sync():
                    step(reducer, [one / 2 for one in _gradients(number, rank)])
                step(reducer, [one / 2 for one in _gradients(number, rank)])
                _check(reducer, number)

    ThreadWorld(2).results(case)


def test_parameters_return_from_an_encoding_to_a_wire_that_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where steps choose an encoding, it has a limit by itself. (In buckets that the plan of each wire shares anew.)"""
    MEASURE_EVERY.replace(monkeypatch, 4)

    def planted(number: int, rank: int) -> list[torch.Tensor]:
        found = _gradients(number, rank)
        found[2].view(-1)[::256] = 300.0
        return found

    def case(communicator: Communicator) -> Any:
        with _reducer(communicator, ("native", "int8"), {"native": 100, "int8": 20}, caps=None) as reducer:
            for number in range(1, 120):
                clear(reducer.parameters)
                step(reducer, planted(number, communicator.rank))
                report = reducer.wire_report()
                if report["a"].wire == "native":
                    assert {one.sqnr_db for one in report.values()} == {None}, "nothing is lost on the wire in use"
                if report["c"].wire == "native":
                    expected = reduced([planted(number, rank)[2] for rank in range(2)], [2.0, 2.0], "native")
                    assert torch.equal(reducer.parameters[2].grad, expected), number  # type: ignore[arg-type]
            return {name: one.wire for name, one in reducer.wire_report().items()}

    assert _alike(2, case) == {"a": "int8", "b": "native", "c": "native", "d": "int8", "e": "native"}


def test_encodings_are_tried_behind_the_steps_at_16_bits() -> None:
    def case(communicator: Communicator) -> Any:
        took_ms = {"native": 100, "int8": 20}
        with _reducer(communicator, ("native", "int8"), took_ms, config={"wire_after": 40}) as reducer:
            wires = _steps(reducer, range(1, 120))
            return wires.index("int8"), wires[-1]

    first, last = _alike(2, case)
    assert first >= 48 and last == "int8"


def test_the_plan_rests_while_wires_are_tried_and_is_measured_on_the_chosen_one() -> None:
    def case(communicator: Communicator) -> Any:
        took_ms = {"native": 100, "bf16": 70, "int8": 20}
        with _reducer(communicator, took_ns=took_ms) as reducer:
            number = _until(reducer, "trying")
            _steps(reducer, range(number, number + 10))
            resting = inside(reducer).plan_rounds
            _steps(reducer, range(number + 10, number + 20))
            assert inside(reducer).plan_rounds == resting
            number = _until(reducer, "chosen", number + 20)
            _steps(reducer, range(number, number + 20))
            assert inside(reducer).plan_rounds >= resting + 20
            assert reducer.forecast() is not None, "the link's costs were kept"
            times = reducer.wire_times()
            assert times is not None
            return sorted(times.expected_ms)

    assert _alike(2, case) == sorted(WIRES)


def test_nothing_of_the_program_is_drawn_or_set() -> None:
    """Kernels are timed with random numbers of their own, on the threads that the program has."""

    def case(communicator: Communicator) -> None:
        with _reducer(communicator, took_ns={"native": 100, "bf16": 70, "int8": 20}) as reducer:
            number = _until(reducer, "preparing")
            _steps(reducer, range(number, number + 3))

    torch.manual_seed(3)
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    ThreadWorld(2).results(case)
    assert torch.get_num_threads() == threads and torch.equal(torch.get_rng_state(), state)


# Where steps do not choose


@pytest.mark.parametrize(
    ("config", "options", "why"),
    [
        ({"policy": "static"}, {}, "policy='static' measures nothing"),
        ({"overlap": False}, {}, "overlap=False"),
        ({"sync_mode": BoundedStaleness(1)}, {}, "sync_mode=BoundedStaleness(max_staleness=1)"),
        ({"sync_mode": Asynchronous()}, {}, "sync_mode=Asynchronous(max_in_flight=2)"),
        ({}, {"find_unused_parameters": True}, "find_unused_parameters=True"),
        ({"link": None}, {}, "less than 1 MiB"),
    ],
)
def test_where_steps_are_not_measured_the_first_wire_is_used_and_that_is_said_once(
    config: dict[str, Any], options: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    def case(communicator: Communicator) -> None:
        with _reducer(communicator, ("bf16", "native"), config=config, **options) as reducer:
            for number in range(1, 30):
                clear(reducer.parameters)
                step(reducer, _gradients(number, communicator.rank))
                assert inside(reducer).tried_wire == "bf16"
            reducer.flush(*([torch.optim.SGD(reducer.parameters, 0.0)] if "Async" in why else []))
            times = reducer.wire_times()
            assert times is not None and times.stage == "not chosen by steps" and why in times.why

    with caplog.at_level(logging.WARNING):
        ThreadWorld(2).results(case)
    (said,) = [one.getMessage() for one in caplog.records if "no other is tried" in one.getMessage()]
    assert said.startswith("wire bf16 is used, and no other is tried: ") and why in said


def test_with_unused_parameters_a_graph_that_is_declared_static_is_measured_after_all() -> None:
    def case(communicator: Communicator) -> str:
        with _reducer(communicator, find_unused_parameters=True) as reducer:
            before = reducer.wire_times()
            reducer.set_static_graph()
            _steps(reducer, range(1, 60))
            times = reducer.wire_times()
            assert before is not None and "find_unused_parameters" in before.why and times is not None
            return times.stage

    assert _alike(2, case) == "trying"


def test_a_rank_that_may_follow_no_clock_keeps_all_on_the_first_wire() -> None:
    deterministic = torch.are_deterministic_algorithms_enabled

    def case(communicator: Communicator) -> str:
        with _reducer(communicator, took_ns={"native": 100, "bf16": 70, "int8": 20}) as reducer:
            _steps(reducer, range(1, 60))
            times = reducer.wire_times()
            assert times is not None and times.wire == "native"
            return times.why

    torch.use_deterministic_algorithms(True)
    try:
        assert _alike(2, case) == "a rank uses deterministic algorithms" and deterministic()
    finally:
        torch.use_deterministic_algorithms(False)


def test_steps_that_the_program_ends_choose_no_wire_also_behind_a_reset() -> None:
    def case(communicator: Communicator) -> str:
        with _reducer(communicator, took_ns={"native": 100, "bf16": 70, "int8": 20}) as reducer:
            number = _until(reducer, "chosen")
            reducer.require_manual_finalization(True)
            for again in (number, number + 1):
                clear(reducer.parameters)
                loss = given(reducer.parameters, _gradients(again, communicator.rank))
                reducer.prepare_for_backward(loss)
                loss.backward()
                reducer.finalize_backward()
                _check(reducer, again)
                reducer.reset()
            times = reducer.wire_times()
            assert times is not None and inside(reducer).tried_wire == times.wire == "native"
            assert times.why.startswith("with manual finalization")
            reducer.require_manual_finalization(False)
            _until(reducer, "chosen", number + 2)
            return inside(reducer).tried_wire

    assert _alike(2, case) == "int8"


def test_steps_that_end_by_themselves_again_have_the_groups_of_all_their_wires() -> None:
    """Also those that are prepared for backward alone: between the change of the wire and its first step."""

    def case(communicator: Communicator) -> Wire:
        with _reducer(communicator, ("native", "int8"), {"native": 100, "int8": 20}) as reducer:
            reducer.require_manual_finalization(True)
            for number in range(1, SETTLED):
                clear(reducer.parameters)
                step(reducer, _gradients(number, communicator.rank))
                reducer.finalize_backward()
            reducer.require_manual_finalization(False)
            _until(reducer, "chosen", SETTLED)
            return inside(reducer).tried_wire

    assert _alike(3, case) == "int8"


def test_one_rank_and_wires_of_equal_bytes_leave_nothing_to_choose() -> None:
    with _reducer(Loopback([])) as reducer:
        times = reducer.wire_times()
        assert times is not None and "one rank" in times.why

    def case(communicator: Communicator) -> None:
        parameters = [one.detach().bfloat16().requires_grad_() for one in leaves(SHAPES)]
        config = ReduceConfig(wire=("native", "bf16", "fp16"), link=LINK)
        with Reducer(parameters, communicator, config, names=NAMES, caps=CAPS) as reducer:
            times = reducer.wire_times()
            assert times is not None and times.why == "as many bytes travel on each of them"

    ThreadWorld(2).results(case)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"wire": ("native", "native")}, "several wires must be different ones"),
        ({"wire": ("bf16",)}, "at least two"),
        ({"wire": ("native", "bf17")}, "unknown wire 'bf17'"),
        ({"wire": ("native", ("*", "bf16"))}, r"a tuple of wires, of which steps choose one, as \('native', 'bf16'\)"),
        ({"wire": "native,bf16"}, "unknown wire 'native,bf16'.*write wire=.'native', 'bf16'."),
        ({"wire": "auto", "plan": "{}"}, "wire=.*and plan=.* exclude each other: a plan is of one wire"),
        ({"wire": ("native", "int8"), "error_feedback": True}, "error_feedback=True.*Give it one wire"),
        ({"wire": ("native", "bf16"), "least_sqnr_db": 30.0}, "for the wires 'int8' and 'int4'"),
    ],
)
def test_what_is_no_list_or_goes_with_none_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ReduceConfig(**options)


def test_what_has_no_step_takes_one_wire() -> None:
    config = ReduceConfig(wire="auto")
    assert config.wire == ("native", "bf16") and ReduceConfig(wire=("native", "bf16")) == config
    with pytest.raises(ValueError, match=r"wire=\('native', 'bf16'\) and fused_hook exclude each other"):
        FusedHookState(None, wire="auto")
    with pytest.raises(ValueError, match="SyncServer exclude each other"):
        SyncServer(2, config=config)
    with pytest.raises(ValueError, match="DataParallel exclude each other"):
        DataParallel(torch.nn.Linear(2, 2), ["cpu", "cpu"], reduce=config)
    with _reducer(Loopback([])) as reducer, pytest.raises(ValueError, match="a comm hook exclude each other"):
        reducer.register_comm_hook(None, lambda state, bucket: torch.futures.Future())


def test_what_a_wire_of_several_encodes_is_what_it_encodes_alone() -> None:
    def case(communicator: Communicator) -> None:
        with _reducer(communicator, ("int4", "int8"), {"int4": 10, "int8": 50}) as reducer:
            step(reducer, _gradients(1, communicator.rank))
            expected = tuple(wire_for(one, "int4") for one in reducer.parameters)
            assert inside(reducer).wires_in_use.wires == expected

    ThreadWorld(2).results(case)


def test_a_trace_is_of_the_latest_wire(tmp_path: Any) -> None:
    from fusedreduce.trace.reader import read

    def case(communicator: Communicator) -> None:
        with _reducer(communicator, took_ns={"native": 100, "bf16": 70, "int8": 20}) as reducer:
            with reducer.record_trace(tmp_path, limit=500):
                _steps(reducer, range(1, 90))
            assert inside(reducer).tried_wire == "int8"

    ThreadWorld(2).results(case)
    first, second = read(tmp_path)
    for trace in (first, second):
        assert [one.wire for one in trace.parameters] == ["int8", "native", "int8", "int8", "native"]
        assert 10 < len(trace.steps) < 60 and trace.config["wire"] == "int8"
