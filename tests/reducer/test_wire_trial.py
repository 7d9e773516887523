"""Which wire ends a step first: the rule, and what is tried when."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusedreduce.reducer import wire_trial
from fusedreduce.wires import WIRES

GAINS = {"native": 0.02, "bf16": 0.02, "fp16": 0.02, "int8": 0.05, "int4": 0.10}
times = st.permutations(list(WIRES)).flatmap(
    lambda wires: st.lists(st.integers(1, 10**10), min_size=1, max_size=len(wires)).map(
        lambda took: dict(zip(wires, took, strict=False))
    )
)


def picked(took_ns: dict[str, float]) -> str:
    return wire_trial.pick({wire: [took] for wire, took in took_ns.items()})


def test_the_example_of_the_page() -> None:
    assert picked({"native": 100, "bf16": 99, "int8": 90}) == "int8"
    assert picked({"native": 100, "bf16": 98, "int8": 94}) == "bf16", "int8 saves 4 % of bf16's"
    assert picked({"native": 100, "bf16": 98.1, "int8": 95.1, "int4": 90.1}) == "native"
    assert picked({"bf16": 100, "native": 98}) == "native" and picked({"int4": 5}) == "int4"
    assert wire_trial.pick({"native": [100, 100], "bf16": [50, 99]}) == "native", "in both blocks"
    assert {wire: wire_trial.least_gain(wire) for wire in WIRES} == GAINS


@given(times)
def test_one_takes_the_place_of_those_before_it_where_it_is_shorter_by_its_share(took_ns: dict[str, int]) -> None:
    chosen, wires = picked({**took_ns}), list(took_ns)
    before = wires[: wires.index(chosen)]
    if before:  # shorter than whatever the rule takes of those before it
        other = picked({wire: took_ns[wire] for wire in before})
        assert took_ns[chosen] <= took_ns[other] * (1 - GAINS[chosen])
    for wire in wires[wires.index(chosen) + 1 :]:
        assert took_ns[wire] > took_ns[chosen] * (1 - GAINS[wire])
    assert picked({wire: 4.0 * took for wire, took in took_ns.items()}) == chosen, "no unit"


@given(times, st.data())
def test_the_model_leaves_the_wire_in_use_and_the_one_that_it_would_take(
    ends_ns: dict[str, int], data: st.DataObject
) -> None:
    held = data.draw(st.sampled_from(list(ends_ns)))
    left, taken, first = wire_trial.candidates(dict(ends_ns), held), picked({**ends_ns}), next(iter(ends_ns))
    assert {first, held, taken} <= set(left) and len(left) == min(len(ends_ns), wire_trial.MOST_TRIED)
    assert left == [wire for wire in ends_ns if wire in left], "in order of preference"
    if len({first, held, taken}) < len(left):
        assert min(ends_ns, key=lambda wire: ends_ns[wire]) in left


def trial(count: int) -> list[tuple[int, bool]]:
    tried: list[tuple[int, bool]] = []
    while (place := wire_trial.tried_in(len(tried), count)) is not None:
        tried.append((place, wire_trial.is_timed(len(tried), count)))
    return tried


@pytest.mark.parametrize("count", [2, 3, 5])
def test_each_candidate_has_as_many_timed_steps_there_and_back(count: int) -> None:
    tried = trial(count)
    timed = Counter(place for place, counts in tried if counts)
    assert len(timed) == count and len(set(timed.values())) == 1 and min(timed.values()) >= 5
    blocks = [place for at, (place, _) in enumerate(tried) if at % wire_trial.block(count) == 0]
    assert blocks == [*range(count), *reversed(range(count))]
    changes = [0] + [at for at in range(1, len(tried)) if tried[at][0] != tried[at - 1][0]]
    assert not any(tried[at][1] for at in changes), "a step in new buckets is not timed"
    assert len(tried) <= (40 if count > 3 else 32)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_wire_counts_by_the_median_of_each_of_its_blocks(count: int) -> None:
    """One step of each block is an outlier, and all steps of the second turn take ten times as long."""
    spans: list[int] = []
    for at, (place, counts) in enumerate(trial(count)):
        if counts:
            turn, first = at // (count * wire_trial.block(count)), at % wire_trial.block(count) == 1
            spans.append(10**9 if first else (place + 1) * 10**turn)
    assert wire_trial.medians(spans, count) == [[place + 1, 10 * (place + 1)] for place in range(count)]


def test_a_drift_of_all_steps_favours_no_wire() -> None:
    """Each step is 0.5 % quicker than the one before: of two equal wires the first stays."""
    steps = [int(10**9 * 0.995**at) for at in range(len(trial(2)))]
    spans = [took for took, (_, counts) in zip(steps, trial(2), strict=True) if counts]
    medians = wire_trial.medians(spans, 2)
    assert wire_trial.pick(dict(zip(("native", "bf16"), medians, strict=True))) == "native"


def test_a_window_is_another_one_from_a_fifth_on() -> None:
    assert not wire_trial.has_changed(120, 100) and wire_trial.has_changed(121, 100)
    assert not wire_trial.has_changed(84, 100) and wire_trial.has_changed(83, 100)
    assert wire_trial.shortens([97.5], "int8", [100], share=0.5) and not wire_trial.shortens([97.5], "int8", [100])
