"""The asynchronous mode: whatever the ranks' speeds, what each was given is the sum of all averages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reducer.loopback_stage import Stage
from support.inside import CONTRIBUTIONS_BLOCK_NUMEL
from support.leaf_steps import clear
from support.sweep import sweep

from fusedreduce.buckets.reduction import Members
from fusedreduce.errors import CollectiveError, FusedReduceError
from fusedreduce.planning.layout import aligned_layout
from fusedreduce.reducer.modes.asynchronous_bucket import AsynchronousBucket, blocks_of
from fusedreduce.reducer.modes.contributions import Contributions

UNIT = {torch.float32: 2.0**-24, torch.float64: 2.0**-53, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}
WIRES = (None, torch.bfloat16)


def leaves() -> list[torch.Tensor]:
    """Of every kind: transposed, complex, 0-dim, empty, narrow; each bucket of its own dtype but the first."""
    made = [
        torch.zeros(3, 4),
        torch.zeros(5, 2).t(),
        torch.zeros(3, dtype=torch.complex64),
        torch.zeros(()),
        torch.zeros(0),
        torch.zeros(2, 3, dtype=torch.float64),
        torch.zeros(7, dtype=torch.bfloat16),
    ]
    return [one.detach().requires_grad_() for one in made]


PLAN = ((3, 0, 1, 2, 4), (5,), (6,))
NAMES = tuple(f"weight{number}" for number in range(len(leaves())))


@dataclass
class Rank:
    """One rank and what it has been given, in fp64 (complex128)."""

    parameters: list[torch.Tensor]
    contributions: Contributions
    given: list[torch.Tensor]
    local: list[torch.Tensor]
    largest: float = 0.0
    steps: int = 0
    roundings: int = 2
    unused: set[int] = field(default_factory=lambda: set(range(len(NAMES))))

    def count(self) -> None:
        for number, (total, parameter) in enumerate(zip(self.given, self.parameters, strict=True)):
            gradient = parameter.grad
            if gradient is not None:
                self.unused.discard(number)
                total += gradient.to(total.dtype)
                if gradient.numel():
                    self.largest = max(self.largest, float(gradient.abs().max()))


def build(
    stage: Stage, max_in_flight: int, wire: torch.dtype | None = None, plan: Sequence[Sequence[int]] = PLAN
) -> list[Rank]:
    return [build_one(stage, rank, max_in_flight, wire, plan) for rank in range(stage.size)]


def build_one(
    stage: Stage,
    rank: int,
    max_in_flight: int,
    wire: torch.dtype | None = None,
    plan: Sequence[Sequence[int]] = PLAN,
) -> Rank:
    parameters = leaves()
    ledgers = []
    for index, numbers in enumerate(plan):
        mine = tuple(parameters[number] for number in numbers)
        names = tuple(NAMES[number] for number in numbers)
        members = Members(index, tuple(numbers), mine, names, index == len(plan) - 1)
        first = mine[0].dtype
        own = first.to_real() if first.is_complex else first
        ledgers.append(
            AsynchronousBucket(members, stage.ranks[rank], wire or own, divisor=float(stage.size))  # type: ignore[arg-type]
        )
    totals = [
        torch.zeros(one.shape, dtype=torch.complex128 if one.is_complex() else torch.float64) for one in parameters
    ]
    return Rank(
        parameters,
        Contributions(ledgers, stage.ranks[rank], max_in_flight),  # type: ignore[arg-type]
        totals,
        [one.clone() for one in totals],
    )


def step(rank: Rank, generator: torch.Generator, used: Sequence[int], integer_of: int | None = None) -> None:
    """One backward and its end; `integer_of`: gradients are multiples of that."""
    for number, parameter in enumerate(rank.parameters):
        parameter.grad = None
        if number in used:
            shape = (*parameter.shape, 2) if parameter.is_complex() else tuple(parameter.shape)
            values = torch.randn(shape, generator=generator, dtype=torch.float64)
            if integer_of is not None:
                values = integer_of * (4 * values).round()
            if parameter.is_complex():
                values = torch.view_as_complex(values)
            gradient = values.to(parameter.dtype)
            if number % 2:  # of other strides than its parameter
                gradient = gradient.t().contiguous().t() if gradient.dim() == 2 else gradient
            parameter.grad = gradient
            rank.local[number] += gradient.to(rank.local[number].dtype)
            rank.unused.discard(number)
    rank.contributions.end_of_step()
    rank.steps += 1
    rank.count()


def averages(stage: Stage, rank: Rank) -> list[torch.Tensor]:
    """Per parameter the sum of all averages, from what the collectives have made."""
    sums = [torch.zeros_like(one) for one in rank.given]
    buckets = rank.contributions.ledgers
    for number, total in enumerate(stage.totals):
        one = buckets[number % len(buckets)]
        numels = [parameter.numel() * (2 if parameter.is_complex() else 1) for parameter in one.members.parameters]
        layout = aligned_layout(numels, wire_itemsize_bytes=total.dtype.itemsize)
        for slot, (which, parameter) in enumerate(zip(one.members.numbers, one.members.parameters, strict=True)):
            place = layout.slots[slot]
            flat = total[place.offset : place.offset + place.numel].double()
            if parameter.is_complex():
                value = torch.view_as_complex(flat.reshape(*parameter.shape, 2))
            else:  # slots are filled in the parameter's own order of memory
                value = torch.empty_strided(parameter.shape, parameter.stride(), dtype=torch.float64)
                value.as_strided((place.numel,), (1,)).copy_(flat)
            sums[which] += value
    return sums


Script = list[tuple[Any, ...]]
_numbers = st.integers(0, len(NAMES) - 1)


@st.composite
def scripts(draw: st.DrawFn) -> tuple[int, int, Script]:
    """World size, most contributions under way, and what happens: steps, sights, and now and then everybody drains."""
    world = draw(st.integers(1, 4))
    rank = st.integers(0, world - 1)
    happening = st.one_of(
        st.tuples(st.just("step"), rank, st.lists(_numbers, max_size=9)),
        st.tuples(st.just("step"), rank, st.just(list(range(len(NAMES))))),
        st.tuples(st.just("show"), rank, st.integers(1, 9)),
        st.tuples(st.just("drain")),
        st.tuples(st.just("state")),
    )
    return world, draw(st.integers(1, 3)), draw(st.lists(happening, max_size=24))


def play(stage: Stage, ranks: list[Rank], script: Script, seed: int, integer_of: int | None = None) -> None:
    """Everything, and a drain at the end."""
    generator = torch.Generator().manual_seed(seed)

    def drain(number: int) -> int:
        for parameter in ranks[number].parameters:
            parameter.grad = None
        landed = ranks[number].contributions.drain()
        ranks[number].count()
        return landed

    for what, *rest in [*script, ("drain",)]:
        if what == "step":
            step(ranks[rest[0]], generator, rest[1], integer_of)
        elif what == "show":
            stage.show(rest[0], rest[1])
        elif what == "state":
            for one in stage.together(lambda number: ranks[number].contributions.owed()):
                assert isinstance(one, dict), one
        else:
            before = [one.contributions.landed for one in ranks]
            landed = stage.together(drain)
            for one, had, drained in zip(ranks, before, landed, strict=True):
                assert isinstance(drained, int), drained
                assert one.contributions.landed == had + drained


def check(stage: Stage, ranks: list[Rank], *, exact: bool = False) -> None:
    """The sums, per rank; that all ranks have issued the same; that nothing is left."""
    everything = [sum(parts[1:], start=parts[0]) for parts in zip(*(one.local for one in ranks), strict=True)]
    for number, rank in enumerate(ranks):
        contributions = rank.contributions
        expected = averages(stage, rank)
        buckets = len(contributions.ledgers)
        assert contributions.issued == contributions.landed == len(stage.totals) // buckets
        assert contributions.empty and contributions.steps == rank.steps
        assert stage.ranks[number].under_way == 0
        assert stage.ranks[number].most_under_way <= contributions.max_in_flight * buckets
        for which, (got, wanted) in enumerate(zip(rank.given, expected, strict=True)):
            if exact:
                assert torch.equal(got, wanted), (number, which)
                assert torch.equal(got, everything[which] / stage.size), (number, which)
                continue
            # One rounding to the gradient's dtype per step, per landing and when draining, and as many to fp32 in the
            # strips; none of a number above twice what is here at most.
            own = rank.parameters[which].dtype
            unit = UNIT[own.to_real() if own.is_complex else own]
            largest = 1.0 + 2.0 * (rank.largest + 5.0 * (rank.steps + 1))
            roundings = rank.steps + contributions.landed + 2
            bound = 2.0 * roundings * largest * (unit + (UNIT[torch.float32] if unit > 1e-12 else 0.0))
            error = (got - wanted).abs()
            assert not error.numel() or float(error.max()) <= bound, (number, which, float(error.max()), bound)


@sweep(100)
@given(scripts(), st.sampled_from([*WIRES, "exact"]), st.integers(0, 1000))
def test_what_a_rank_was_given_is_the_sum_of_all_averages(
    script: tuple[int, int, Script], wire: torch.dtype | str | None, seed: int
) -> None:
    """Exactly that, with nobody left out, where nothing is rounded. What nobody has used gets no gradient."""
    world, most, happenings = script
    stage = Stage(world)
    if isinstance(wire, str):
        ranks = build(stage, most, plan=((3, 0, 1, 2, 4), (5,)))  # bf16 holds few integers
        play(stage, ranks, [(what, *(_not_six(one) for one in rest)) for what, *rest in happenings], seed, world)
    else:
        ranks = build(stage, most, wire)
        play(stage, ranks, happenings, seed)
    check(stage, ranks, exact=isinstance(wire, str))
    used = {number for what, *rest in happenings if what == "step" for number in rest[1]}
    for rank in ranks:
        assert rank.unused >= set(range(len(NAMES))) - used


def _not_six(one: Any) -> Any:
    return [number for number in one if number != 6] if isinstance(one, list) else one


def full(rank: Rank, value: float) -> None:
    """A step whose gradients are all `value`."""
    for parameter in rank.parameters:
        parameter.grad = torch.full_like(parameter, value).detach()
    rank.contributions.end_of_step()
    rank.count()


def test_the_example_of_the_module() -> None:
    stage = Stage(2)
    here, there = build(stage, 2)
    full(here, 3.0)
    full(there, 5.0)
    assert here.parameters[0].grad is not None and there.parameters[0].grad is not None
    assert here.parameters[0].grad.unique().tolist() == [3.0] and there.parameters[0].grad.unique().tolist() == [5.0]
    stage.show(0, 3)
    stage.show(1, 3)
    full(here, 1.0)
    full(there, 7.0)
    assert here.parameters[0].grad.unique().tolist() == [2.0] and there.parameters[0].grad.unique().tolist() == [6.0]
    for parameter in [*here.parameters, *there.parameters]:
        parameter.grad = None
    drained = stage.together(lambda number: (here, there)[number].contributions.drain())
    assert drained == [1, 1]
    for rank, owed in ((here, 3.0), (there, -3.0)):
        gradient = rank.parameters[0].grad
        assert gradient is not None and gradient.unique().tolist() == [owed]


def test_what_was_owed_over_a_checkpoint_is_not_contributed_again() -> None:
    """The example, with a checkpoint in place of the second step's landing: 3 + 2 + 3 all the same."""
    stage = Stage(2)
    ranks = build(stage, 1)
    for rank, value in zip(ranks, (3.0, 5.0), strict=True):
        full(rank, value)
    stage.together(lambda number: ranks[number].contributions.owed())
    for rank, value in zip(ranks, (1.0, 7.0), strict=True):
        full(rank, value)
        clear(rank.parameters)
    assert [rank.given[0].unique().tolist() for rank in ranks] == [[5.0], [11.0]], "what was owed is given"
    stage.together(lambda number: ranks[number].contributions.drain())
    for rank in ranks:
        rank.count()
        assert rank.given[0].unique().tolist() == [8.0], "the sum of both averages"


def test_draining_takes_along_what_waited_to_be_issued() -> None:
    """Of a rank that is ahead: it meets zeros of those that have taken fewer steps."""
    stage = Stage(2)
    fast, slow = build(stage, 1)
    for _ in range(4):
        full(fast, 2.0)
    full(slow, 6.0)
    assert fast.contributions.waits
    drained = stage.together(lambda number: (fast, slow)[number].contributions.drain())
    assert drained == [2, 2]
    assert fast.contributions.empty and slow.contributions.empty, "nothing waits any more"


def test_draining_adds_to_gradients_that_wait_for_a_step() -> None:
    stage = Stage(2)
    here, there = build(stage, 2)
    full(here, 3.0)
    full(there, 5.0)
    before = here.parameters[0].grad
    stage.together(lambda number: (here, there)[number].contributions.drain())
    assert before is not None and here.parameters[0].grad is before and before.unique().tolist() == [4.0]


def test_a_fast_rank_merges_what_it_may_not_issue_and_waits_for_nobody() -> None:
    stage = Stage(2)
    fast, slow = build(stage, 2)
    for _ in range(10):
        full(fast, 1.0)
        assert fast.contributions.under_way <= 2
    assert (fast.contributions.issued, fast.contributions.merged, fast.contributions.waits) == (2, 7, True)
    assert fast.parameters[0].grad is not None and fast.parameters[0].grad.unique().tolist() == [1.0]
    full(slow, 11.0)
    stage.show(0, 3)
    full(fast, 1.0)  # (11 - 1) / 2 on top, and what waited goes out: nine gradients of 1
    assert fast.parameters[0].grad.unique().tolist() == [6.0]
    assert (fast.contributions.issued, fast.contributions.landed, fast.contributions.waits) == (3, 1, False)
    stage.show(1, 3)
    for _ in range(2):
        full(slow, 11.0)
    assert float(stage.totals[2 * 3][0]) == 0.5 * 9 + 0.5 * 11


def test_several_that_have_come_land_in_one_step_in_order() -> None:
    stage = Stage(2)
    here, there = build(stage, 3)
    for value in (1.0, 2.0, 3.0):
        full(here, value)
    for value in (5.0, 8.0, 11.0):
        full(there, value)
    stage.show(0, 9)
    full(here, 100.0)
    assert here.parameters[0].grad is not None
    assert here.parameters[0].grad.unique().tolist() == [100.0 + 2.0 + 3.0 + 4.0]
    assert here.contributions.landed == 3


def test_a_later_one_does_not_overtake_an_earlier_one() -> None:
    stage = Stage(1)
    (rank,) = build(stage, 2)
    full(rank, 1.0)
    full(rank, 1.0)
    late = rank.contributions._under_way[0].in_flight[1].pending
    late.ready = lambda: False  # type: ignore[method-assign]
    stage.show(0, 6)
    full(rank, 1.0)
    assert rank.contributions.landed == 0, "one bucket of the first has not come"


def test_a_buffer_that_is_used_again_gives_nothing_for_a_parameter_without_a_gradient() -> None:
    stage = Stage(2)
    here, there = build(stage, 1)
    full(here, 3.0)
    full(there, 5.0)
    for _ in range(3):  # what lands leaves its surplus in a buffer, which the step after the next one gets
        stage.show(0, 3)
        step(here, torch.Generator(), ())
        stage.show(1, 3)
        full(there, 5.0)
    assert [float(total.max()) for total in stage.totals] == [4.0] * 3 + [2.5] * 9


def test_a_parameter_that_was_unused_here_is_given_what_others_had() -> None:
    stage = Stage(2)
    here, there = build(stage, 1)
    generator = torch.Generator().manual_seed(0)
    step(here, generator, [0])
    step(there, generator, [0, 1, 2])
    stage.show(0, 3)
    step(here, generator, [0])
    for number in (1, 2):
        gradient = here.parameters[number].grad
        assert gradient is not None and gradient.stride() == here.parameters[number].stride()
        assert torch.equal(gradient, (there.local[number] / 2).to(gradient.dtype))
    assert here.parameters[3].grad is None and here.parameters[5].grad is None, "nobody has used them"


def test_a_gradient_that_is_conjugated_or_negated_lazily_is_corrected_too() -> None:
    stage = Stage(2)
    here, there = build(stage, 1)
    full(here, 0.0)
    full(there, 2.0)
    stage.show(0, 3)
    here.parameters[2].grad = torch.full((3,), 1.0 + 2.0j).conj()
    here.parameters[0].grad = torch._neg_view(torch.ones(3, 4))
    here.contributions.end_of_step()
    assert torch.equal(here.parameters[2].grad.resolve_conj(), torch.full((3,), 2.0 - 2.0j))
    assert torch.equal(here.parameters[0].grad.resolve_neg(), torch.zeros(3, 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_correction_is_rounded_once(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    stage = Stage(2)
    parameters = [torch.zeros(4096, dtype=dtype).requires_grad_() for _ in range(2)]
    pair = []
    for rank, parameter in enumerate(parameters):
        members = Members(0, (0,), (parameter,), ("w",), True)
        ranks: Any = stage.ranks[rank]
        bucket = AsynchronousBucket(members, ranks, torch.float32, divisor=2.0)
        pair.append(Contributions([bucket], ranks, 1))
    first = [torch.randn(4096).to(dtype) for _ in range(2)]
    for contributions, parameter, gradient in zip(pair, parameters, first, strict=True):
        parameter.grad = gradient.clone()
        contributions.end_of_step()
    stage.show(0, 1)
    second = torch.randn(4096).to(dtype)
    parameters[0].grad = second.clone()
    pair[0].end_of_step()
    average = first[0].float() / 2 + first[1].float() / 2
    expected = (second.double() + (average - first[0].float()).double()).to(dtype)
    assert torch.equal(parameters[0].grad, expected)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=12), st.integers(1, 24))
def test_blocks_cover_every_slot_once(numels: list[int], most: int) -> None:
    layout = aligned_layout(numels, wire_itemsize_bytes=4)
    blocks = blocks_of(layout, most)
    covered = [0] * layout.numel
    whole: list[int] = []
    for block in blocks:
        for at in range(block.begin, block.end):
            covered[at] += 1
        whole.extend(block.slots)
        for slot in block.slots:
            place = layout.slots[slot]
            assert place.numel == 0 or block.begin <= place.offset <= place.offset + place.numel <= block.end
    parts = {block.part for block in blocks if block.part is not None}
    assert sorted([*whole, *parts]) == list(range(len(numels)))
    for place in layout.slots:
        assert covered[place.offset : place.offset + place.numel] == [1] * place.numel
    assert max(covered, default=0) <= 1


def test_blocks_do_not_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for most in (1, 5, 1 << 20):
        CONTRIBUTIONS_BLOCK_NUMEL.replace(monkeypatch, most)
        stage = Stage(3)
        ranks = build(stage, 2, torch.bfloat16)
        generator = torch.Generator().manual_seed(1)
        for number in (0, 1, 2, 0, 1, 0, 2):
            step(ranks[number], generator, range(len(NAMES)))
            stage.show(number, 4)
        for parameter in [parameter for rank in ranks for parameter in rank.parameters]:
            parameter.grad = None
        stage.together(lambda number, ranks=ranks: ranks[number].contributions.drain())  # type: ignore[misc]
        for rank in ranks:
            rank.count()
        found.append([one for rank in ranks for one in rank.given])
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_buffers_are_made_once_and_only_as_many_as_may_be_under_way() -> None:
    stage = Stage(2)
    ranks = build(stage, 2)
    generator = torch.Generator().manual_seed(2)
    for turn in range(60):
        for number in (0, 1) if turn % 5 == 0 else (0,):
            step(ranks[number], generator, range(len(NAMES)))
            stage.show(number, 3)
        if turn % 20 == 19:
            assert all(stage.together(lambda number: ranks[number].contributions.drain()))
    for one in (*ranks[0].contributions.ledgers, *ranks[1].contributions.ledgers):
        assert one.wires_made <= 2
        assert len(one._strips) + ranks[0].contributions.under_way + ranks[0].contributions.waits <= 2 + 1 + 1, (
            "open, owed"
        )


# State


def restored(stage: Stage, rank: int, owed: dict[int, torch.Tensor], **options: Any) -> Rank:
    made = build_one(stage, rank, 1, **options)
    made.contributions.owe(owed)
    return made


def test_what_is_owed_can_be_kept_and_given_under_another_plan() -> None:
    stage = Stage(2)
    ranks = build(stage, 2)
    generator = torch.Generator().manual_seed(4)
    for number in (0, 1, 0, 0, 0):
        step(ranks[number], generator, [0, 1, 2, 5, 6])
    states = stage.together(lambda number: ranks[number].contributions.owed())
    assert all(set(one) == {0, 1, 2, 5, 6} for one in states)
    later = Stage(2)
    copies = [restored(later, rank, one, plan=((6,), (5,), (2, 1), (0, 3, 4))) for rank, one in enumerate(states)]
    for rank, copy in zip(ranks, copies, strict=True):
        for one in (rank, copy):
            full(one, 1.0)
        for mine, theirs in zip(rank.parameters, copy.parameters, strict=True):
            assert mine.grad is not None and theirs.grad is not None and torch.equal(mine.grad, theirs.grad)
        assert rank.parameters[0].grad is not None and rank.parameters[0].grad.unique().numel() > 1


# Failures


def test_a_collective_that_failed_is_raised_by_the_step_that_notices() -> None:
    stage = Stage(2)
    ranks = build(stage, 2)
    full(ranks[0], 1.0)
    full(ranks[0], 1.0)
    stage.fail = 1
    full(ranks[1], 1.0)
    stage.shown[1] = 3
    with pytest.raises(CollectiveError, match=r"rank 1: the all-reduce of bucket 1.*weight5"):
        full(ranks[1], 1.0)
    with pytest.raises(FusedReduceError, match="an asynchronous step failed before"):
        full(ranks[1], 1.0)
    for error in stage.together(lambda number: ranks[number].contributions.drain()):
        assert isinstance(error, FusedReduceError) and "rank 1: rank 1: the all-reduce" in str(error)


def test_one_that_cannot_be_issued_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(1)
    (rank,) = build(stage, 1)

    def refuse(tensor: torch.Tensor, op: str = "sum") -> None:
        raise RuntimeError("Connection refused")

    monkeypatch.setattr(stage.ranks[0], "all_reduce", refuse)
    with pytest.raises(CollectiveError, match="could not be started"):
        full(rank, 1.0)


def test_a_rank_that_does_not_come_to_drain_is_an_error_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(2)
    ranks = build(stage, 1)
    monkeypatch.setattr("reducer.loopback_stage.TIMEOUT_S", 0.1)
    found = stage.together(lambda number: ranks[0].contributions.drain() if number == 0 else None)
    assert isinstance(found[0], CollectiveError) and "flush" in str(found[0])


@pytest.mark.parametrize("spoil", [lambda one: one.to_sparse(), lambda one: one.double()])
def test_a_gradient_that_cannot_be_taken_changes_nothing(spoil: Callable[[torch.Tensor], torch.Tensor]) -> None:
    stage = Stage(2)
    rank = build(stage, 1)[0]
    parameter = rank.parameters[1]
    bad = spoil(torch.ones(2, 5))
    if bad.dtype is parameter.dtype:
        parameter.grad = bad
    else:
        rank.contributions.ledgers[0].members = dataclasses.replace(
            rank.contributions.ledgers[0].members, parameters=tuple(map(_shown, rank.parameters[:5]))
        )
    with pytest.raises(TypeError, match="weight"):
        rank.contributions.end_of_step()
    assert rank.contributions.empty and rank.contributions.steps == 0


def _shown(parameter: torch.Tensor) -> Any:
    return _Shown(parameter)


class _Shown:
    """A parameter whose gradient has another dtype; torch itself lets nobody assign one."""

    dtype = torch.float32

    def __init__(self, parameter: torch.Tensor) -> None:
        self.grad = torch.ones(parameter.shape, dtype=torch.float64)
