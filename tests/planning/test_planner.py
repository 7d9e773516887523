"""The planner against brute force over the same space of plans, in integers; and the model against its formulas."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.sweep import sweep

from fusedreduce.planning import several_groups
from fusedreduce.planning.cost_model import FREE, FS_PER_NS, Costs, Linear
from fusedreduce.planning.cuts import earliest
from fusedreduce.planning.plan import Plan
from fusedreduce.planning.planner import choose, optimum
from fusedreduce.planning.timeline import MISSING_NS, Problem, ready_order, timeline

MIB = 1024 * 1024
Score = tuple[int, int]
times = st.one_of(st.integers(0, 60), st.sampled_from([MISSING_NS, 0, 30, 10**15]))
bytes_ = st.one_of(st.sampled_from([0, 1]), st.integers(0, 12))
lines = st.builds(
    Linear,
    fixed_ns=st.one_of(st.sampled_from([0, 1, 3]), st.integers(0, 40)),
    fs_per_byte=st.one_of(st.sampled_from([0, FS_PER_NS, 3 * FS_PER_NS]), st.integers(0, 10 * FS_PER_NS)),
)
free = st.just(FREE)
caps = st.sampled_from([1, 5, 12, 20, 40, 2**62])


@st.composite
def problems(
    draw: st.DrawFn, most: int, groups: int = 1, pack: st.SearchStrategy[Linear] = lines, least: int = 0
) -> Problem:
    count = draw(st.integers(least, most))

    def each(values: st.SearchStrategy[int]) -> tuple[int, ...]:
        return tuple(draw(st.lists(values, min_size=count, max_size=count)))

    alone = draw(st.sets(st.integers(0, count - 1), max_size=2)) if groups > 1 and count else set()
    return Problem(
        ready_ns=each(times),
        wire_bytes=each(bytes_),
        size_bytes=each(bytes_),
        groups=each(st.integers(0, groups - 1)),
        alone=frozenset(alone),
        cap_bytes=draw(caps),
        costs=Costs(wire=draw(lines), pack=draw(pack), unpack=draw(lines)),
    )


def _problem(
    ready_ns: Sequence[int], sizes: Sequence[int], wire: tuple[int, int], *, pack: Linear = FREE, cap_bytes: int = 2**62
) -> Problem:
    """One group; sizes for the wire and the cap alike."""
    count = len(ready_ns)
    return Problem(
        ready_ns=tuple(ready_ns),
        wire_bytes=tuple(sizes),
        size_bytes=tuple(sizes),
        groups=(0,) * count,
        alone=frozenset(),
        cap_bytes=cap_bytes,
        costs=Costs(wire=Linear(fixed_ns=wire[0], fs_per_byte=wire[1]), pack=pack),
    )


def _grouped(
    ready_ns: list[int], sizes: list[int], groups: Sequence[str], wire: tuple[int, int], pack: Linear = FREE
) -> Problem:
    return dataclasses.replace(_problem(ready_ns, sizes, wire, pack=pack), groups=tuple(groups))


def _lanes(problem: Problem) -> list[list[int]]:
    """Parameters that may share buckets, in ready order."""
    order = ready_order(problem.ready_ns)
    shared = sorted({problem.groups[number] for number in order}, key=repr)
    lanes = [[n for n in order if problem.groups[n] == group and n not in problem.alone] for group in shared]
    return [lane for lane in lanes if lane] + [[n] for n in order if n in problem.alone]


def _cuts(problem: Problem, lane: list[int]) -> Iterator[list[tuple[int, ...]]]:
    """Every way to cut a lane into buckets within the cap."""
    for count in range(len(lane)):
        for cuts in itertools.combinations(range(1, len(lane)), count):
            buckets = [tuple(lane[a:b]) for a, b in itertools.pairwise([0, *cuts, len(lane)])]
            if all(len(bucket) == 1 or _fits(problem, bucket) for bucket in buckets):
                yield buckets


def _fits(problem: Problem, bucket: Sequence[int]) -> bool:
    return sum(problem.size_bytes[number] for number in bucket) <= problem.cap_bytes


def _launched(problem: Problem, buckets: Sequence[tuple[int, ...]]) -> Plan:
    """Buckets by the readiness of their last member."""
    place = {number: position for position, number in enumerate(ready_order(problem.ready_ns))}
    return tuple(sorted(buckets, key=lambda bucket: max(map(place.__getitem__, bucket))))


def _score(problem: Problem, plan: Plan) -> Score:
    return timeline(plan, problem).last_done, len(plan)


def _brute(problem: Problem) -> Score:
    ways = itertools.product(*(list(_cuts(problem, lane)) for lane in _lanes(problem)))
    return min(_score(problem, _launched(problem, [bucket for part in way for bucket in part])) for way in ways)


def _brute_of_one(problem: Problem) -> Score:
    """The same for one group, with the model written out once more."""
    order = ready_order(problem.ready_ns)
    last = max(problem.ready_ns, default=0)
    pack, wire = problem.costs.pack, problem.costs.wire

    def after(begin: int, packs: int, done: int) -> Score:
        if begin == len(order):
            return done, 0
        found = []
        sent = 0
        for end in range(begin + 1, len(order) + 1):
            number = order[end - 1]
            sent += problem.wire_bytes[number]
            if end > begin + 1 and not _fits(problem, order[begin:end]):
                break
            ready = problem.ready_ns[number] if problem.ready_ns[number] != MISSING_NS else max(last, 0)
            packed = packs + pack.fixed_ns * FS_PER_NS + pack.fs_per_byte * sent
            free = max(done, ready * FS_PER_NS + packed) + wire.fixed_ns * FS_PER_NS + wire.fs_per_byte * sent
            score = after(end, packed, free)
            found.append((score[0], score[1] + 1))
        return min(found)

    return after(0, 0, 0)


def _check(problem: Problem, plan: Plan) -> None:
    """What holds of every plan that the planner makes."""
    place = {number: position for position, number in enumerate(ready_order(problem.ready_ns))}
    assert sorted(number for bucket in plan for number in bucket) == list(range(len(problem.ready_ns)))
    assert list(plan) == sorted(plan, key=lambda bucket: place[bucket[-1]]), "launched by their last member"
    for bucket in plan:
        assert list(bucket) == sorted(bucket, key=place.__getitem__), "members in ready order"
        assert len({problem.groups[number] for number in bucket}) == 1
        assert len(bucket) == 1 or (_fits(problem, bucket) and not problem.alone.intersection(bucket))
    for lane in _lanes(problem):
        buckets = [bucket for bucket in plan if set(bucket) <= set(lane)]
        assert [number for bucket in buckets for number in bucket] == lane, "runs of the lane"


@given(problems(12))
@sweep(500)
@example(_problem([], [], (1, 1)))
@example(_problem([MISSING_NS], [5], (1, 1)))
@example(_problem([0] * 12, [0] * 12, (0, 0)))
@example(_problem([MISSING_NS] * 12, [3] * 12, (1, FS_PER_NS)))
@example(_problem([10**15] * 12, [2**40] * 12, (10**9, 10**9)))
@example(_problem(range(12), [4] * 12, (0, FS_PER_NS), cap_bytes=1))
# Ends that tie with fewer buckets, where a search that only compares ends stops.
@example(_problem([0, 2, 4], [4, 4, 3], (3, FS_PER_NS), pack=Linear(fixed_ns=3, fs_per_byte=FS_PER_NS)))
@example(
    _problem(
        [4, 5, 8, 9], [2, 1, 2, 2], (1, 3 * FS_PER_NS), pack=Linear(fixed_ns=1, fs_per_byte=FS_PER_NS), cap_bytes=5
    )
)
def test_one_group_is_as_good_as_brute_force_with_no_more_buckets(problem: Problem) -> None:
    plan = optimum(problem)
    _check(problem, plan)
    assert _score(problem, plan) == _brute_of_one(problem)


@st.composite
def long_problems(draw: st.DrawFn, most: int, pack: st.SearchStrategy[Linear]) -> Problem:
    """Backward and wire of like length, where cutting matters most."""
    count = draw(st.integers(1, most))
    sizes = draw(st.lists(st.integers(0, 2000), min_size=count, max_size=count))
    gaps = draw(st.lists(st.integers(0, 3000), min_size=count, max_size=count))
    wire = draw(st.integers(0, 200)), draw(st.integers(0, 3 * FS_PER_NS))
    cap_bytes = draw(st.sampled_from([4000, 2**62]))
    return _problem(list(itertools.accumulate(gaps)), sizes, wire, pack=draw(pack), cap_bytes=cap_bytes)


@given(long_problems(200, free))
@sweep(100)
def test_without_packing_it_is_the_dynamic_programme_over_cuts(problem: Problem) -> None:
    """f(j) = min over i < j of max(f(i), t_j) + alpha + beta (S_j - S_i)."""
    wire, order = problem.costs.wire, ready_order(problem.ready_ns)
    sums = [0, *itertools.accumulate(problem.wire_bytes[number] for number in order)]
    done = [0]
    for end, number in enumerate(order, 1):
        ready = problem.ready_ns[number] * FS_PER_NS
        starts = (i for i in range(end) if i == end - 1 or sums[end] - sums[i] <= problem.cap_bytes)
        done.append(min(max(done[i], ready) + wire.fs(sums[end] - sums[i]) for i in starts))
    assert timeline(optimum(problem), problem).last_done == done[-1]


@given(long_problems(40, lines))
@sweep(200)
@example(_problem(range(0, 2000, 50), [50] * 40, (1, FS_PER_NS), pack=Linear(fixed_ns=2, fs_per_byte=0)))
@example(_problem(range(0, 2000, 50), [50] * 40, (2, FS_PER_NS), pack=Linear(fixed_ns=1, fs_per_byte=1000)))
def test_with_packing_it_is_the_dynamic_programme_over_cuts_and_counts(problem: Problem) -> None:
    wire, pack = problem.costs.wire, problem.costs.pack
    order = ready_order(problem.ready_ns)
    sums = [0, *itertools.accumulate(problem.wire_bytes[number] for number in order)]
    done = {(0, 0): 0}
    for end, number in enumerate(order, 1):
        ready = problem.ready_ns[number] * FS_PER_NS + pack.fs_per_byte * sums[end]
        for start in range(end):
            if start < end - 1 and sums[end] - sums[start] > problem.cap_bytes:
                continue
            for count in range(start + 1):
                if (start, count) in done:
                    packed = ready + (count + 1) * pack.fixed_ns * FS_PER_NS
                    at = max(done[start, count], packed) + wire.fs(sums[end] - sums[start])
                    done[end, count + 1] = min(at, done.get((end, count + 1), at))
    plan = optimum(problem)
    assert _score(problem, plan) == min((at, count) for (end, count), at in done.items() if end == len(order))


def _filled(problem: Problem, *, last_first: bool) -> Plan:
    """Each group cut at the cap, from the first or from the last parameter on."""
    buckets = []
    for lane in _lanes(problem):
        open_: list[int] = []
        for number in reversed(lane) if last_first else lane:
            if open_ and not _fits(problem, [*open_, number]):
                buckets.append(tuple(open_))
                open_ = []
            open_.append(number)
        buckets.append(tuple(open_))
    return _launched(problem, buckets)


@given(problems(30, groups=3))
@sweep(300)
def test_several_groups_are_never_worse_than_each_cut_at_the_cap_or_by_itself(problem: Problem) -> None:
    plan = optimum(problem)
    _check(problem, plan)
    lanes = several_groups.groups_of(problem)
    rivals = [_filled(problem, last_first=flag) for flag in (False, True)]
    rivals.append(several_groups.plan_of(lanes, [earliest(lane) for lane in lanes]))
    assert all(_score(problem, plan) <= _score(problem, rival) for rival in rivals)


@given(problems(10, groups=2, least=1), st.data())
@sweep(300)
def test_any_plan_keeps_to_the_rules_of_the_model(problem: Problem, data: st.DataObject) -> None:
    names = data.draw(st.permutations(range(len(problem.ready_ns))))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(names)), max_size=4)) - {len(names)})
    plan = tuple(tuple(names[a:b]) for a, b in itertools.pairwise([0, *cuts, len(names)]))
    found, costs = timeline(plan, problem), problem.costs
    packs = free = 0
    end = found.backward_end
    for k, bucket in enumerate(plan):
        size = sum(problem.wire_bytes[number] for number in bucket)
        packs += costs.pack.fs(size)
        assert found.packed[k] == max(found.ready[: k + 1]) + packs, "head of line"
        assert found.done[k] == max(free, found.packed[k]) + costs.wire.fs(size), "one channel"
        assert found.unpacked[k] == max(end, found.done[k]) + costs.unpack.fs(size), "after backward"
        free, end = found.done[k], found.unpacked[k]
    assert found.backward_end == max(*problem.ready_ns, 0) * FS_PER_NS + packs
    assert found.last_done == free and found.finish == end


def test_the_example_of_the_models_docstring() -> None:
    costs = Costs(
        wire=Linear(fixed_ns=4, fs_per_byte=FS_PER_NS),
        pack=Linear(fixed_ns=1, fs_per_byte=FS_PER_NS),
        unpack=Linear(fixed_ns=0, fs_per_byte=FS_PER_NS),
    )
    problem = dataclasses.replace(_problem([0, 10], [1, 1], (0, 0)), costs=costs)
    two, one = timeline(((0,), (1,)), problem), timeline(((0, 1),), problem)
    assert [ns * FS_PER_NS for ns in (2, 14, 7, 19, 15, 20)] == [*two.packed, *two.done, *two.unpacked]
    assert two.backward_end == 14 * FS_PER_NS
    assert [ns * FS_PER_NS for ns in (13, 19, 21)] == [*one.packed, *one.done, *one.unpacked]


def test_a_late_bucket_in_front_holds_up_the_line() -> None:
    problem = _problem([0, 50], [10, 10], (5, FS_PER_NS))
    found = timeline(((1,), (0,)), problem)
    assert found.packed == (50 * FS_PER_NS, 50 * FS_PER_NS) and found.last_done == 80 * FS_PER_NS
    assert timeline(((0,), (1,)), problem).last_done == 65 * FS_PER_NS


def test_no_parameters_take_no_time() -> None:
    found = timeline((), _problem([], [], (5, 5)))
    assert (found.done, found.backward_end, found.last_done, found.finish) == ((), 0, 0, 0)


@pytest.mark.parametrize("plan", [((0,),), ((0, 1), (1,)), ((0, 1), ()), ((0, 2),), ((0, 1, 1),), ()])
def test_a_plan_of_other_parameters_is_refused(plan: Plan) -> None:
    problem = _problem([0, 0], [1, 1], (0, 0))
    with pytest.raises(ValueError, match="must name each of 2 parameters once, in buckets that are not empty"):
        timeline(plan, problem)
    with pytest.raises(ValueError, match="must name each of 2 parameters once"):
        choose(problem, {"good": ((0, 1),), "bad": plan})


@given(problems(9, groups=3), st.data())
@sweep(300)
def test_the_numbering_does_not_matter_where_times_differ(problem: Problem, data: st.DataObject) -> None:
    count = len(problem.ready_ns)
    distinct = data.draw(st.lists(st.integers(-1, 10**6), min_size=count, max_size=count, unique=True))
    problem = dataclasses.replace(problem, ready_ns=tuple(distinct))
    names = data.draw(st.permutations(range(count)))  # the number that `new` had before
    other = dataclasses.replace(
        problem,
        ready_ns=tuple(problem.ready_ns[old] for old in names),
        wire_bytes=tuple(problem.wire_bytes[old] for old in names),
        size_bytes=tuple(problem.size_bytes[old] for old in names),
        groups=tuple(problem.groups[old] for old in names),
        alone=frozenset(new for new, old in enumerate(names) if old in problem.alone),
    )
    assert tuple(tuple(names[new] for new in bucket) for bucket in optimum(other)) == optimum(problem)


@given(problems(20, groups=3))
@sweep(200)
def test_the_same_problem_has_the_same_plan(problem: Problem) -> None:
    again = dataclasses.replace(problem)
    assert optimum(again) == optimum(problem)
    renamed = dataclasses.replace(problem, groups=tuple(f"group {group}" for group in problem.groups))
    assert optimum(renamed) == optimum(problem), "what groups are called, and how that hashes"


@given(problems(10, groups=2, least=1), st.data())
@sweep(300)
def test_the_chosen_plan_is_never_worse_than_another(problem: Problem, data: st.DataObject) -> None:
    plans: dict[str, Plan] = {"optimum": optimum(problem), "from the front": _filled(problem, last_first=False)}
    plans["from the back"] = _filled(problem, last_first=True)
    plans["single"] = tuple((number,) for number in data.draw(st.permutations(range(len(problem.ready_ns)))))
    plans = {name: plans[name] for name in data.draw(st.permutations(list(plans)))}
    name, plan = choose(problem, plans)
    assert plan == plans[name]
    found = {one: timeline(other, problem) for one, other in plans.items()}
    scores = {one: (found[one].finish, found[one].last_done, len(other)) for one, other in plans.items()}
    assert scores[name] == min(scores.values())
    assert name == next(one for one in plans if scores[one] == scores[name]), "the first named of equals"


def test_nothing_to_choose_from_is_refused() -> None:
    with pytest.raises(ValueError, match="candidates must name at least one plan"):
        choose(_problem([0], [1], (0, 0)), {})


def test_ready_order() -> None:
    assert ready_order([]) == []
    assert ready_order([30, 10, 20]) == [1, 2, 0]
    assert ready_order([5, 5, 0, 5]) == [2, 3, 1, 0], "backward runs from the end"
    assert ready_order([MISSING_NS, 10**15, MISSING_NS, 0]) == [3, 1, 2, 0]
    assert ready_order([MISSING_NS] * 3) == [2, 1, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wire_bytes": (1,)}, "wire_bytes has 1 entries for 2 parameters"),
        ({"size_bytes": (1, 2, 3)}, "size_bytes has 3 entries for 2 parameters"),
        ({"groups": ()}, "groups has 0 entries for 2 parameters"),
        ({"ready_ns": (0, -2)}, "ready_ns must be ints of at least -1, got -2 at 1"),
        ({"ready_ns": (0.5, 1)}, "ready_ns must be ints of at least -1, got 0.5 at 0"),
        ({"wire_bytes": (1, -1)}, "wire_bytes must be ints of at least 0, got -1 at 1"),
        ({"wire_bytes": (1, True)}, "wire_bytes must be ints of at least 0, got True at 1"),
        ({"size_bytes": ("1", 1)}, "size_bytes must be ints of at least 0, got '1' at 0"),
        ({"cap_bytes": 0}, "cap_bytes must be ints of at least 1, got 0"),
        ({"cap_bytes": 1.5}, "cap_bytes must be ints of at least 1, got 1.5"),
        ({"alone": frozenset({1, 2, -1})}, r"alone names \[-1, 2\], but there are 2 parameters"),
    ],
)
def test_a_problem_checks_itself(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(_problem([0, 1], [1, 1], (1, 1)), **options)


def _transformer(count: int, backward_ns: int) -> tuple[list[int], list[int]]:
    """Ready times and bytes of matrices and vectors, twelve a layer, backward at a steady pace from the end."""
    layer = [131_072] * 4 + [352_256] * 3 + [4096] * 5
    sizes = [layer[number % 12] for number in range(count)]
    total, at = sum(sizes), 0
    ready = []
    for size in reversed(sizes):
        at += size
        ready.append(backward_ns * at // total)
    return ready[::-1], sizes


PACK = Linear(fixed_ns=8000, fs_per_byte=600)
# Latency in ns; time on the wire by that of backward; cap; cost of packing.
CASES: dict[str, tuple[int, float, int, Linear]] = {
    "compute-bound": (30_000, 0.1, 25 * MIB, PACK),
    "balanced": (30_000, 1.0, 25 * MIB, PACK),
    "balanced, no cap": (30_000, 1.0, 2**62, PACK),
    "wire-bound": (30_000, 5.0, 25 * MIB, PACK),
    "every parameter above the cap": (30_000, 1.0, 1, PACK),
    "no latency": (0, 1.0, 2**62, PACK),
    "no latency, free packing": (0, 1.0, 2**62, FREE),
    "a wire as slow as can be": (30_000, 10.0**8, 2**62, PACK),
}


def _large(case: str, count: int = 20_000) -> Problem:
    latency_ns, load, cap_bytes, pack = CASES[case]
    ready, sizes = _transformer(count, 500_000_000)
    fs_per_byte = int(load * 500_000_000 * FS_PER_NS / sum(sizes))
    return _problem(ready, sizes, (latency_ns, fs_per_byte), pack=pack, cap_bytes=cap_bytes)


def _within(seconds: float, problem: Problem) -> Plan:
    """Its plan, made in that time of this process in one of three tries: other work is not what is tested."""
    found = []
    for _ in range(3):
        fresh = dataclasses.replace(problem)
        begin = time.process_time()
        plan = optimum(fresh)
        found.append(time.process_time() - begin)
        if found[-1] < seconds:
            return plan
    raise AssertionError(found)


@pytest.mark.parametrize("case", CASES)
def test_twenty_thousand_parameters_of_one_group_take_well_under_a_second(case: str) -> None:
    """25 to 45 ms were measured on one core of a small virtual machine."""
    _within(0.4, _large(case))


@pytest.mark.parametrize("groups", [2, 10, 1000])
@pytest.mark.parametrize("case", ["compute-bound", "balanced", "wire-bound"])
def test_twenty_thousand_parameters_of_several_groups_take_a_second(case: str, groups: int) -> None:
    problem = _large(case)
    mixed = tuple(number // 12 % groups for number in range(20_000))
    problem = dataclasses.replace(problem, groups=mixed, alone=frozenset({0, 10_000}))
    assert _score(problem, _within(2, problem)) <= _score(problem, _filled(problem, last_first=True))
