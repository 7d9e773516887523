"""What a reducer has learned and holds, and what becomes of it when something changes: the table in docs/design.md.

The page is read, and each cell driven, with a reducer that has the state, not empty, and another one that is new.
*Kept*: it is as before the change, and the next step does with it what that of a reducer without the change does, and
that of a new one does not; *kept¹*: the next step adds nothing to it. *Forgotten*: it is as in a new reducer, and so is
what the next step does. *Folded*: it is part of something else now, all of it. *Refused*: the error names what to call
or to leave out, and the state is kept.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support.design import changes
from support.inside import MEASURE_EVERY, inside
from support.leaf_steps import CAPS, SCALER, averaging, clear, copies, leaves, loss_scale, step
from support.loopback import Call, Group, LoopbackPending
from support.object_graph import same_values
from support.rig import boom

from fusedreduce import (
    Asynchronous,
    BoundedStaleness,
    BucketCaps,
    FusedReduceError,
    ReduceConfig,
    Reducer,
    Synchronous,
)
from fusedreduce.reducer.state import ReducerState

pytestmark = [
    pytest.mark.usefixtures("path"),
    pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract:UserWarning"),
]

# A parameter that is encoded, one that is not, one that may be sparse, and one in a bucket of its own.
SHAPES = ((7, 41), (3,), (6, 4), (2, 300))
RARE, SPARSE, LAST = 1, 2, 3
Gradients = list[torch.Tensor | None]
Options = dict[str, Any]
VERBS = ("kept", "kept¹", "folded", "forgotten", "refused")
TABLE = changes()


class Ranks(Group):
    """A Group that notes the used maps that are summed."""

    def __init__(self, size: int, rank: int) -> None:
        super().__init__(size, rank)
        self.maps: list[list[int]] = []

    def all_reduce(self, tensor: torch.Tensor, op: Any = "sum") -> Any:
        if tensor.dtype is torch.int32:
            self.maps.append(tensor.tolist())
        return super().all_reduce(tensor, op)

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> LoopbackPending:
        """Each peer sends what it is sent: were it the same for all, no sum of a shard would lose anything."""
        self.calls.append(Call("all_to_all", input.dtype, input.numel()))
        parts = input.clone()
        return LoopbackPending(lambda: output.copy_(parts))


@dataclasses.dataclass
class Case:
    """A reducer, and what a test must know of it.

    Args:
        change: that it is to go through; "": none.
        reducer: it.
        folder: of its trace.
        opened: contexts of the reducer that are left at the end.
    """

    change: str
    reducer: Reducer
    folder: Path
    opened: ExitStack

    @property
    def ranks(self) -> Ranks:
        communicator = self.reducer.communicator
        assert isinstance(communicator, Ranks)
        return communicator


def gradients(reducer: Reducer, seed: int = 7) -> Gradients:
    """Of the parameters; none of RARE where unused ones are searched for."""
    generator = torch.Generator().manual_seed(seed)
    found: Gradients = [torch.randn(shape, generator=generator) for shape in SHAPES]
    if any(reducer.sparse):
        rows, places = torch.randn(2, 4, generator=generator), torch.tensor([[0, 3]])
        found[SPARSE] = torch.sparse_coo_tensor(places, rows, SHAPES[SPARSE], check_invariants=False)
    if reducer.find_unused_parameters:
        found[RARE] = None
    return found


def another(case: Case, mine: Gradients | None = None, **options: Any) -> None:
    """A step with gradients of its own alone, unless the reducer is closed."""
    if case.reducer.state is not ReducerState.CLOSED:
        clear(case.reducer.parameters)
        step(case.reducer, gradients(case.reducer) if mine is None else mine, **options)


def needed(case: Case) -> int:
    """Steps before the change: the first one shows the order by which the second one's plan is cut; the third one in a
    row that has lost too much by its encoding is the last one that is encoded."""
    return {"plan": 1, "wires in use": 3}.get(case.change, 2)


def steps(case: Case, count: int | None = None) -> None:
    """So many; None: as many as are needed. The last one is the same, whatever their number."""
    count = needed(case) if count is None else count
    for number in range(count - 1, -1, -1):
        another(case, gradients(case.reducer, 7 + number))


class State(NamedTuple):
    """A row of the table.

    Args:
        look: what the state is.
        bring: makes it, in a reducer that is new.
        use: what the next step does with it, given what `look` has found before; 0, if the step adds nothing to that.
        options: of the reducer.
        by_change: other ones, where a change needs them.
        size: number of ranks.
        fold: checks, after a change, that what `look` has found before it is part of something else.
        gone: of what `look` has found, and is forgotten, whether it was let go of.
    """

    look: Callable[[Case], Any]
    bring: Callable[[Case], None]
    use: Callable[[Case, Any], Any]
    options: Options = {}
    by_change: Mapping[str, Options] = {}
    size: int = 4
    fold: Callable[[Case, Any], None] | None = None
    gone: Callable[[Any], bool] = lambda before: True


# What each state is, how it comes about, and what shows that it is used


def _owed(case: Case) -> tuple[list[torch.Tensor], bool]:
    """By parameter, and whether shards owe a part of it."""
    _, shards = inside(case.reducer).residuals_held()
    return inside(case.reducer).residuals_owed(), any(bool(one.any()) for one in shards)


def _checkpoint(case: Case, before: Any) -> Any:
    return [tuple(one.shape) for one in case.reducer.state_dict(gather=False)["residuals"].values() if one.any()]


def _shards_folded(case: Case, before: Any) -> None:
    """What is owed is the same, and all of it by the parameters."""
    (expected, shards_owed), (found, shards_owe) = before, _owed(case)
    assert shards_owed and not shards_owe
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    owed = case.reducer.state_dict(gather=False)["residuals"]
    for number, total in enumerate(expected):
        kept = owed.get(case.reducer.names[number], torch.zeros(SHAPES[number]))
        torch.testing.assert_close(kept, total.float(), rtol=0, atol=1e-6)


def _place_of_sparse_sum(case: Case, before: Any) -> str:
    """A kind that is known is summed in its bucket's place, another one behind the exchange of kinds."""
    calls = len(case.ranks.calls)
    another(case)
    made = [one.kind for one in case.ranks.calls[calls:]]
    return "in its place" if made.index("sparse") < made.index("all_gather") else "late"


def _mark(case: Case) -> None:
    """A backward under no_sync, of the parameter that the next step does not use."""
    steps(case)
    clear(case.reducer.parameters)
    mine: Gradients = [torch.ones(shape) if number == RARE else None for number, shape in enumerate(SHAPES)]
    with case.reducer.no_sync():
        step(case.reducer, mine)


def _map_of_step(case: Case, before: Any) -> list[int]:
    step(case.reducer, gradients(case.reducer))
    return case.ranks.maps[-1]


def _set_aside(case: Case) -> None:
    """Averages, by a backward under no_sync."""
    steps(case)
    clear(case.reducer.parameters)
    case.reducer.flush()
    with case.reducer.no_sync():
        step(case.reducer, gradients(case.reducer, 99))


def _stash(case: Case) -> Gradients:
    return [None if one is None else one.clone() for one in inside(case.reducer).stash]


def _put_back(case: Case, before: Any) -> Gradients:
    """`.grad` after a step that leaves no averages of its own."""
    if not inside(case.reducer).stash:
        clear(case.reducer.parameters)
    step(case.reducer, gradients(case.reducer))
    return copies(case.reducer.parameters)


def _stash_folded(case: Case, before: list[torch.Tensor]) -> None:
    local = gradients(case.reducer, 99)
    assert not inside(case.reducer).stash
    for gradient, mine, average in zip(copies(case.reducer.parameters), local, before, strict=True):
        assert gradient is not None and mine is not None
        torch.testing.assert_close(gradient, mine + average)


def _flushed(case: Case, before: Any) -> Any:
    """The averages that a flush applies."""
    clear(case.reducer.parameters)
    applied = case.reducer.flush().steps
    return applied, copies(case.reducer.parameters)


def _under_way(case: Case) -> Any:
    counted = case.reducer.stats()
    communicators = {one for one in case.ranks.made if not one.closed}
    return case.reducer.pending(), counted.get("steps_under_way"), counted.get("contributions"), communicators


def _copied(case: Case) -> None:
    """With a gradient whose strides are not its parameter's, which is copied."""
    case.reducer.parameters[0].grad = torch.zeros(*reversed(SHAPES[0])).t()
    step(case.reducer, gradients(case.reducer))
    steps(case, needed(case) - 1)


def _counters(case: Case) -> list[int | str]:
    counted = case.reducer.stats()
    return [counted[name] for name in ("steps", "restrided", "wire_allocations", "buckets_reduced")]


def _counted_on(case: Case, before: list[int]) -> int:
    another(case)
    return case.reducer.steps - before[0]


def _round(case: Case) -> int:
    return inside(case.reducer).rounds


def _next_round(case: Case, before: int) -> int:
    step(case.reducer, gradients(case.reducer))
    return _round(case) - before


def _largest_round(case: Case, before: int) -> None:
    """A peer has ended three steps more."""
    assert _round(case) == before + 3


def _attach(case: Case) -> None:
    steps(case)
    inside(case.reducer).loss_scale.attach(SCALER)


def _unscaled(case: Case, before: Any) -> float:
    """The scale that is left on gradients after a step of a scaled loss."""
    reducer, mine = case.reducer, gradients(case.reducer)
    another(case, mine, scale=loss_scale(4.0))
    reducer.flush()
    gradient, own, size = reducer.parameters[LAST].grad, mine[LAST], case.ranks.size
    assert gradient is not None and own is not None
    return round(float(gradient.norm() / own.norm()) * size / (1 + 0.5 * (size - 1)))


SCALE = loss_scale(4.0)


def _scale_gradients(case: Case) -> None:
    _attach(case)
    clear(case.reducer.parameters)
    with case.reducer.no_sync():
        step(case.reducer, gradients(case.reducer), scale=SCALE)


def _added_to(case: Case, before: Any) -> str:
    """What becomes of another backward by the same scale."""
    inside(case.reducer).loss_scale.attach(SCALER)
    for parameter in case.reducer.parameters:
        parameter.grad = torch.ones_like(parameter) if parameter.grad is None else parameter.grad
    try:
        step(case.reducer, gradients(case.reducer), scale=SCALE)
    except FusedReduceError as error:
        return "refused" if "added scaled gradients to unscaled ones" in str(error) else str(error)
    return "averaged"


INFINITE: Gradients = [torch.full(shape, torch.inf) for shape in SHAPES]


def _report(case: Case) -> None:
    step(case.reducer, INFINITE)
    steps(case, 0 if case.change == "plan" else needed(case))
    case.reducer.flush()


def _reports(case: Case) -> list[str]:
    return [str(one) for one in inside(case.reducer).statistics.finite_check().reports]


def _one_more_report(case: Case, before: list[str]) -> int:
    another(case, INFINITE)
    if inside(case.reducer).delays:
        case.reducer.flush()
    return len(_reports(case)) - len(before)


def _counts_in_step(case: Case, before: Any) -> bool:
    """Whether the next step counts, and so launches no bucket before its end."""
    launched: list[int] = []
    with case.reducer.parameters[0].register_hook(lambda _: launched.append(inside(case.reducer).buckets_launched)):
        another(case)
    return launched == [0]


def _measure(case: Case) -> None:
    steps(case, {"plan": 14, "wires in use": 3}.get(case.change, 13))


def _measured(case: Case) -> Any:
    scheduler = inside(case.reducer).scheduler
    return scheduler.schedule.round, scheduler.schedule.costs, scheduler.readiness.best().tolist()


def _next_measurement(case: Case, before: Any) -> int:
    reducer = case.reducer
    if inside(reducer).delays:  # in which nothing is measured
        reducer.set_sync_mode(Synchronous())
    for _ in range(1 if reducer.rebuilt else 2):  # an order must be known
        another(case)
    return int(inside(reducer).scheduler.schedule.round - before[0])


def _order(case: Case) -> tuple[bool, tuple[int, ...]]:
    return case.reducer.rebuilt, inside(case.reducer).scheduler.schedule.arrival


def _broadcasts(case: Case, before: Any) -> int:
    """Of an order, within a step and the forward behind it."""
    counted = case.ranks.count("broadcast")
    another(case)
    case.reducer.prepare_for_forward()
    return case.ranks.count("broadcast") - counted


def _communicators(case: Case) -> set[Any]:
    return inside(case.reducer).communicators_of_phases


def _issued_on(case: Case, before: set[Any]) -> bool:
    """Whether the next step's later phases use the communicators of before."""
    calls = {one: len(one.calls) for one in before}
    another(case)
    return any(len(one.calls) > count for one, count in calls.items())


def _closed(communicators: set[Any]) -> bool:
    return all(one.closed for one in communicators)


def _record(case: Case) -> None:
    case.opened.enter_context(case.reducer.record_trace(case.folder))
    steps(case)


def _recorded(case: Case) -> list[int]:
    return inside(case.reducer).steps_recorded


def _written(case: Case, before: list[int]) -> int:
    """How many further steps the file has; that it has those of before."""
    another(case)
    case.opened.close()
    found = [one["step"] for file in case.folder.iterdir() for one in json.loads(file.read_text())["steps"]]
    return len(found) - len(before) if found[: len(before)] == before else -1


def _by_hand(case: Case) -> None:
    steps(case)
    case.reducer.require_manual_finalization(True)


def _left_launched(case: Case, before: Any) -> bool:
    another(case)
    return case.reducer.state is ReducerState.LAUNCHED


STALE: Options = {"config": ReduceConfig(sync_mode=BoundedStaleness(1))}
UNUSED: Options = {"find_unused_parameters": True}
PLANNED: Options = {
    # With such a link one bucket is best, whatever the clock says of this machine.
    "config": ReduceConfig(policy="planned", link=(1e6, 1.0)),
    "caps": BucketCaps(first_bytes=64, cap_bytes=150, planned_bytes=10**6),
}
# Exchanged in phases, also where it returns to 16 bits.
EXCHANGED = ReduceConfig(wire={"parameter 3": "int8", "*": "bf16"}, accumulation="fp32")
STATES = {
    "residuals": State(
        _owed,
        steps,
        _checkpoint,
        {"config": ReduceConfig(wire="int4", error_feedback=True)},
        fold=_shards_folded,
    ),
    "kinds of sparse gradients": State(
        lambda case: inside(case.reducer).sparse_kinds,
        steps,
        _place_of_sparse_sum,
        {"sparse": [number == SPARSE for number in range(len(SHAPES))]},
    ),
    "marks of used parameters": State(
        lambda case: inside(case.reducer).used_marks,
        _mark,
        _map_of_step,
        UNUSED,
        {"plan": {**UNUSED, "static_graph": True}},
    ),
    "stash": State(_stash, _set_aside, _put_back, STALE, fold=_stash_folded),
    "steps in flight": State(_under_way, steps, _flushed, STALE),
    "contributions": State(
        _under_way,
        steps,
        _flushed,
        {"config": ReduceConfig(sync_mode=Asynchronous())},
        gone=lambda before: _closed(before[-1]),
    ),
    "counters": State(_counters, _copied, _counted_on),
    "number of steps, for draws and reports": State(_round, steps, _next_round, fold=_largest_round),
    "loss scalers": State(lambda case: inside(case.reducer).loss_scale.scalers(), _attach, _unscaled),
    "loss scale on `.grad`": State(
        lambda case: inside(case.reducer).loss_scale.unscaled_now(), _scale_gradients, _added_to
    ),
    "reports": State(_reports, _report, _one_more_report, {"config": ReduceConfig(check_finite="count")}),
    "counts of a static graph": State(
        lambda case: inside(case.reducer).gradients_counted, steps, _counts_in_step, {"static_graph": True}
    ),
    "order of readiness": State(_order, _measure, _broadcasts, PLANNED, size=2),
    "measurements": State(_measured, _measure, _next_measurement, PLANNED, size=2),
    "communicators of phases": State(_communicators, steps, _issued_on, {"config": EXCHANGED}, gone=_closed),
    "trace": State(_recorded, _record, _written),
    "manual finalization": State(lambda case: inside(case.reducer).ended_by_hand, _by_hand, _left_launched),
}


# The changes


def _built(name: str, change: str, folder: Path, opened: ExitStack) -> Case:
    """A reducer that is new; with "wires in use" it returns to 16 bits after three steps."""
    state = STATES[name]
    options = dict(state.by_change.get(change, state.options))
    config = options.pop("config", ReduceConfig())
    if change == "wires in use":
        encoded = config.wire if config.wire != "native" else "int8"
        config = dataclasses.replace(config, wire=encoded, least_sqnr_db=200.0)
    caps = options.pop("caps", CAPS)
    reducer = Reducer(leaves(SHAPES), Ranks(state.size, rank=1), config, caps=caps, **options)
    return Case(change, reducer, folder, opened)


def _next_forward(case: Case) -> None:
    case.reducer.prepare_for_forward()


def _other_limits(case: Case) -> None:
    case.reducer.set_bucket_size(10 if len(case.reducer.plan) < len(SHAPES) else 4000)
    case.reducer.prepare_for_forward()


def _other_mode(case: Case) -> None:
    delays = inside(case.reducer).delays
    case.reducer.set_sync_mode(Synchronous() if delays else BoundedStaleness(1))
    case.reducer.prepare_for_forward()


def _hooked(case: Case) -> None:
    ranks = case.ranks

    def total(buffer: torch.Tensor) -> torch.Tensor:
        ranks.calls.append(Call("sparse" if buffer.is_sparse else "all_reduce", buffer.dtype, buffer.numel()))
        return ranks.total(buffer)

    case.reducer.register_comm_hook(None, averaging(ranks.size, total, "own"))


def _reset(case: Case) -> None:
    """Of a step that has raised with buckets in flight; a peer has ended three steps more."""

    def peers(text: str) -> list[str]:
        issued, rounds, rest = text.split(maxsplit=2)
        ahead = f"{issued} {int(rounds) + 3} {rest}"
        return [text if rank == case.ranks.rank else ahead for rank in range(case.ranks.size)]

    with case.reducer.parameters[0].register_hook(boom), suppress(ZeroDivisionError, FusedReduceError):
        step(case.reducer, gradients(case.reducer, 55))
    assert case.reducer.state in (ReducerState.ARMED, ReducerState.FAILED)
    case.ranks.aside = peers
    case.reducer.reset()
    case.reducer.prepare_for_forward()


def _other_group(case: Case) -> None:
    case.reducer.set_communicator(Ranks(3, rank=2))


def _close(case: Case) -> None:
    case.reducer.close()


ACTS: Mapping[str, Callable[[Case], None]] = {
    "plan": _next_forward,
    "wires in use": _next_forward,
    "limits": _other_limits,
    "mode": _other_mode,
    "comm hook": _hooked,
    "reset": _reset,
    "another group": _other_group,
    "close": _close,
}


@pytest.fixture(autouse=True)
def measured_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """What encodings lose, in every step."""
    MEASURE_EVERY.replace(monkeypatch, 1)


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def _cells(driven: Callable[[str, str], bool]) -> list[Any]:
    cells = [cell for cell, says in TABLE.items() if driven(cell[1], says)]
    return [pytest.param(*cell, id="-".join(cell).replace(" ", "_")) for cell in cells]


def test_the_table_has_every_state_and_says_only_what_is_driven() -> None:
    assert [*dict.fromkeys(state for state, _ in TABLE)] == [*STATES]
    assert [*dict.fromkeys(change for _, change in TABLE)] == [*ACTS]
    assert {says.partition(":")[0] for says in TABLE.values()} == {*VERBS, "-"}


@pytest.mark.parametrize(("name", "change"), _cells(lambda _, says: says != "-"))
def test_a_change_does_with_a_state_what_the_page_says(
    name: str, change: str, tmp_path: Path, opened: ExitStack
) -> None:
    verb, _, named = TABLE[name, change].partition(": ")
    state = STATES[name]

    def built(change: str, folder: str) -> Case:
        (tmp_path / folder).mkdir()
        return _built(name, change, tmp_path / folder, opened.enter_context(ExitStack()))

    case, new = built(change, "changed"), built(change, "new")
    state.bring(case)
    before = state.look(case)
    assert not same_values(before, state.look(new)), "there is nothing to keep or forget"
    plan, wires, config = case.reducer.plan, inside(case.reducer).wires_in_use, case.reducer.config
    if verb == "refused":
        with pytest.raises((FusedReduceError, ValueError)) as raised:
            ACTS[change](case)
        assert named and named in str(raised.value)
        assert (case.reducer.plan, case.reducer.config, case.reducer.state) == (plan, config, ReducerState.IDLE)
    else:
        ACTS[change](case)
    after = state.look(case)
    assert change != "wires in use" or inside(case.reducer).wires_in_use != wires
    assert change not in ("plan", "limits") or (case.reducer.plan == plan) == (verb == "refused")

    if verb == "folded":
        assert state.fold is not None
        state.fold(case, before)
    elif verb == "forgotten":
        assert not same_values(after, before) and state.gone(before)
        if change == "close":
            new.reducer.close()
            assert same_values(after, state.look(new))
        else:
            assert same_values(state.use(case, before), state.use(new, before))
    else:
        untouched = built("", "untouched")
        state.bring(untouched)
        expected, of_new = state.use(untouched, state.look(untouched)), state.use(new, before)
        used = state.use(case, before)
        assert same_values(after, before)
        assert not same_values(expected, of_new)
        assert not same_values(expected, 0) and same_values(used, 0) if verb == "kept¹" else same_values(used, expected)


@pytest.mark.parametrize(("name", "change"), _cells(lambda change, says: says == "-" and change != "close"))
def test_what_the_page_leaves_out_cannot_be(name: str, change: str, tmp_path: Path, opened: ExitStack) -> None:
    if change == "wires in use":
        with pytest.raises(ValueError, match="exclude each other"):
            _built(name, change, tmp_path, opened)
        return
    case = _built(name, change, tmp_path, opened)
    STATES[name].bring(case)
    plan = case.reducer.plan
    ACTS[change](case)
    assert case.reducer.plan == plan and not case.reducer.rebuilt
