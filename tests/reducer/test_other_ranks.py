"""Other ranks: what a reducer keeps of a group is forgotten with it, or stands in KEPT, and in docs/design.md.

A reducer with a history over one communicator is given another, of another size, rank and nodes. Then nothing that it
holds refers to the old one, and all that it holds is as in a reducer that is built for the new one.
"""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support.design import changes, rows
from support.inside import KEPT, MEASURE_EVERY, inside, owe_an_error
from support.leaf_steps import (
    CAPS,
    SCALER,
    assert_same,
    averaging,
    clear,
    copies,
    given,
    leaves,
    loss_scale,
    shadow_step,
    step,
)
from support.loopback import Group, ThreadRank
from support.object_graph import differences, walk
from support.rig import boom

from fusedreduce import (
    AgreementError,
    Asynchronous,
    BoundedStaleness,
    FusedReduceError,
    LocalGroup,
    NonFiniteGradientError,
    ReduceConfig,
    Reducer,
    clip_grad_norm_,
)
from fusedreduce.buckets.stats.non_finite import FiniteCheck, NonFiniteReport, _Outcome
from fusedreduce.buckets.wire_table import WireTable
from fusedreduce.comm.group import Group as Cell
from fusedreduce.comm.local.group import LocalCommunicator
from fusedreduce.comm.protocol import Communicator
from fusedreduce.errors import CollectiveError
from fusedreduce.run.process import sent_bytes
from fusedreduce.wires import wire_bytes

pytestmark = pytest.mark.usefixtures("path")

# A parameter that is encoded, one that is not, one that may be sparse, and one in a bucket of its own.
SHAPES = ((7, 41), (3,), (6, 4), (2, 300))
SPARSE = 2


Options = dict[str, Any]
KINDS: dict[str, Options] = {
    "native": {},
    "views": {"gradient_as_bucket_view": True},
    "statistics": {"config": ReduceConfig(wire="bf16", check_finite="raise", grad_stats=True)},
    "sum": {"config": ReduceConfig(wire="fp16", op="sum", check_finite="count")},
    "fp32": {"config": ReduceConfig(wire="bf16", accumulation="fp32")},
    "nodes": {"config": ReduceConfig(wire="int8")},
    "drawn": {"config": ReduceConfig(wire="int4", stochastic_rounding=True, wire_after=2, least_sqnr_db=200.0)},
    "owed": {"config": ReduceConfig(wire="int4", error_feedback=True, least_sqnr_db=200.0)},
    "stale": {"config": ReduceConfig(sync_mode=BoundedStaleness(2), check_finite="count")},
    "asynchronous": {"config": ReduceConfig(sync_mode=Asynchronous())},
    "unused": {"find_unused_parameters": True},
    "skipped": {"find_unused_parameters": True, "skip_unused_buckets": True},
    "static": {"static_graph": True},
    "sparse": {"sparse": [number == SPARSE for number in range(len(SHAPES))]},
    "planned": {"config": ReduceConfig(policy="planned", replan_every=50)},
    "hooked": {"hook": averaging(2, lambda buffer: buffer, "own")},
}


def _built(communicator: Communicator, kind: str) -> Reducer:
    options = dict(KINDS[kind])
    hook = options.pop("hook", None)
    reducer = Reducer(leaves(SHAPES), communicator, options.pop("config", None), caps=CAPS, **options)
    if hook is not None:
        reducer.register_comm_hook(None, hook)
    return reducer


def _gradients(reducer: Reducer, number: int) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(number)
    found: list[torch.Tensor | None] = [torch.randn(shape, generator=generator) for shape in SHAPES]
    if any(reducer.sparse):
        rows, places = torch.randn(2, 4, generator=generator), torch.tensor([[0, 3]])
        found[SPARSE] = torch.sparse_coo_tensor(places, rows, SHAPES[SPARSE], check_invariants=False)
    if reducer.find_unused_parameters:
        found[1] = None
    return found


def _steps(reducer: Reducer, count: int = 7) -> None:
    for number in range(count):
        clear(reducer.parameters)
        step(reducer, _gradients(reducer, number))
        reducer.finalize()


# Histories: what has happened to a reducer, after some steps, before it is given other ranks.


def _trained(reducer: Reducer) -> None:
    """Nothing else."""


def _armed(reducer: Reducer) -> None:
    reducer.prepare_for_backward(given(reducer.parameters, _gradients(reducer, 7)))


def _accumulated(reducer: Reducer) -> None:
    with reducer.no_sync():
        step(reducer, _gradients(reducer, 7))


def _joined(reducer: Reducer) -> None:
    shadow_step(reducer)


def _raised(reducer: Reducer) -> None:
    """In a backward of the user's, with some buckets launched."""
    with reducer.parameters[0].register_hook(boom), pytest.raises(ZeroDivisionError):
        step(reducer, _gradients(reducer, 7))


def _lost(reducer: Reducer) -> None:
    communicator: Any = reducer.communicator
    communicator.fail_wait = communicator.count("all_reduce")
    for made in communicator.made:
        made.fail_wait = made.count("all_reduce")
    with suppress(CollectiveError):  # where bytes are exchanged no all-reduce fails
        _steps(reducer, 3)
    communicator.lost = "a peer has died"
    with pytest.raises(FusedReduceError, match="a peer has died"):
        reducer.reset()


def _launched(reducer: Reducer) -> None:
    """Where nothing may be waited for in a backward."""
    communicator: Any = reducer.communicator
    communicator.may_wait = False
    reducer.set_communicator(communicator)
    _steps(reducer, 2)
    step(reducer, _gradients(reducer, 2))


def _scaled(reducer: Reducer) -> None:
    """By a loss scaler, with a gradient that is not finite in the last step, and clipped in the others."""
    inside(reducer).loss_scale.attach(SCALER)
    for number in range(7):
        clear(reducer.parameters)
        gradients = _gradients(reducer, number)
        if number == 6:
            gradients[0] = torch.full(SHAPES[0], torch.inf)
        step(reducer, gradients, scale=loss_scale(4.0))
        reducer.finalize()
        if number < 6:
            clip_grad_norm_(reducer, 0.5)
    inside(reducer).loss_scale.detach(SCALER)


def _resized(reducer: Reducer) -> None:
    reducer.set_bucket_size(CAPS)
    reducer.set_sync_mode(reducer.config.sync_mode)


def _not_finite(reducer: Reducer) -> None:
    gradients = _gradients(reducer, 7)
    gradients[0] = torch.full(SHAPES[0], torch.nan)
    try:
        step(reducer, gradients)
    except NonFiniteGradientError:
        assert reducer.config.check_finite == "raise"


HISTORIES: dict[str, Callable[[Reducer], None]] = {
    "trained": _trained,
    "armed": _armed,
    "accumulated": _accumulated,
    "joined": _joined,
    "raised": _raised,
    "lost": _lost,
    "launched": _launched,
    "scaled": _scaled,
    "resized": _resized,
    "not finite": _not_finite,
}
# What modes and options exclude.
IMPOSSIBLE = {
    ("asynchronous", "joined"),
    ("asynchronous", "resized"),
    ("asynchronous", "launched"),
    ("hooked", "resized"),
    ("stale", "joined"),
    ("stale", "resized"),
}
# What these add to a reducer is fixed when it is built: few of their histories tell more than others do.
ALIKE = ("views", "sum", "fp32", "hooked")
PAIRS = [
    pytest.param(
        kind,
        history,
        id=f"{kind}-{history}",
        marks=[pytest.mark.full] if kind in ALIKE and history not in ("trained", "raised", "scaled") else [],
    )
    for kind in KINDS
    for history in HISTORIES
    if (kind, history) not in IMPOSSIBLE
]


@contextmanager
def _filled() -> Iterator[None]:
    """What is allocated is filled, so that two reducers may be compared."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _leaf(found: object) -> str:
    return repr(found) if isinstance(found, Group | WireTable) else ""


def _switched(kind: str, history: str) -> tuple[Reducer, Group]:
    """A reducer with a history in a group of 6 ranks on 3 nodes, in one of 4 now; and the old group."""
    old = Group(6, rank=4, per_node=2)
    reducer = _built(old, kind)
    _steps(reducer)
    HISTORIES[history](reducer)
    clear(reducer.parameters)
    with _filled():
        reducer.set_communicator(Group(4, rank=1))
    return reducer, old


def _differing(kind: str, history: str) -> dict[str, tuple[str, str]]:
    """What a reducer of other ranks holds that one which is built for them does not, and the other way round."""
    reducer, old = _switched(kind, history)
    olds = {id(old), *map(id, old.made)}
    assert [path for path, found in walk(reducer, _leaf) if id(found) in olds] == []
    with _filled():
        fresh = _built(Group(4, rank=1), kind)
    return differences(reducer, fresh, _leaf)


@pytest.fixture(autouse=True)
def measured_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """What encodings lose, within a few steps."""
    MEASURE_EVERY.replace(monkeypatch, 2)


@pytest.mark.parametrize(("kind", "history"), PAIRS)
def test_a_reducer_of_other_ranks_is_as_new(kind: str, history: str) -> None:
    """Nothing that it holds refers to the old communicator, or one made of that; nothing differs that is not KEPT."""
    kept = re.compile("|".join(KEPT))
    assert {path: found for path, found in _differing(kind, history).items() if not kept.fullmatch(path)} == {}


def test_what_is_kept_is_kept() -> None:
    pairs = [("drawn", "trained"), ("owed", "scaled"), ("statistics", "not finite"), ("stale", "scaled")]
    pairs += [("skipped", "trained"), ("native", "accumulated"), ("statistics", "armed")]
    met = {path for pair in pairs for path in _differing(*pair)}
    assert [pattern for pattern in KEPT if not any(re.fullmatch(pattern, path) for path in met)] == []


# Ranks that are threads, whose histories differ


class Placed(ThreadRank):
    """A rank of a LocalGroup on nodes.

    Args:
        communicator: its own.
        per_node: ranks of each node.
    """

    def __init__(self, communicator: LocalCommunicator, per_node: int) -> None:
        super().__init__(communicator)
        self._per_node = per_node

    def ranks_per_node(self, device: torch.device) -> int:
        return self._per_node


def _averages(reducer: Reducer) -> list[torch.Tensor | None]:
    """The gradients of some steps, each rank's own before them; and what a checkpoint says of the steps."""
    found: list[torch.Tensor | None] = []
    for number in range(6):
        clear(reducer.parameters)
        step(reducer, _gradients(reducer, 100 * reducer.communicator.rank + number))
        found += copies(reducer.parameters)
    found += copies(reducer.parameters) if reducer.flush().steps else []
    rounds = {} if not inside(reducer).mode.together else reducer.state_dict()
    return [*found, torch.tensor(rounds.get("rounds", 0))]


# Ranks of the first group and of the second, and per node of each.
MORE, FEWER = (2, 3, 1, 1), (3, 2, 1, 1)
OTHER_NODES = [(4, 6, 2, 3), (6, 4, 3, 1), (4, 4, 1, 2)]
OF_THREADS = [kind for kind in KINDS if kind not in ("asynchronous", "hooked", "owed")]
CELLS = [(kind, change) for kind in OF_THREADS for change in (MORE, FEWER)]
CELLS += [("nodes", change) for change in OTHER_NODES]


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        pytest.param(
            *cell,
            id=f"{cell[0]}-{'-'.join(map(str, cell[1]))}",
            marks=[pytest.mark.full] if cell[0] in ALIKE and cell[1] is FEWER else [],
        )
        for cell in CELLS
    ],
)
def test_ranks_with_other_histories_average_as_ranks_that_are_all_new(kind: str, change: Sequence[int]) -> None:
    """Each rank has a history of its own in the first group; those that only the second has are new."""
    before, after, nodes_before, nodes_after = change
    alone = ["accumulated", "raised", "armed"]  # that a rank may have by itself
    with LocalGroup(before, timeout_s=30) as first, LocalGroup(after, timeout_s=30) as second:
        firsts = [Placed(one, nodes_before) for one in first.communicators()]

        def case(communicator: LocalCommunicator, *, new: bool) -> list[torch.Tensor | None]:
            group, rank = Placed(communicator, nodes_after), communicator.rank
            if new or rank >= before:
                return _averages(_built(group, kind))
            reducer = _built(firsts[rank], kind)
            _steps(reducer)
            if rank % 2 and kind not in ("stale",):
                HISTORIES[alone[rank % 3]](reducer)
            clear(reducer.parameters)
            reducer.set_communicator(group)
            return _averages(reducer)

        # Ranks that the second group has not take part in the first one too.
        leavers = [firsts[rank] for rank in range(after, before)]
        with ThreadPoolExecutor(max(len(leavers), 1)) as pool:
            left = [pool.submit(lambda one: _steps(_built(one, kind)), one) for one in leavers]
            found = second.run(functools.partial(case, new=False))
            for one in left:
                one.result()
        expected = second.run(functools.partial(case, new=True))
    for rank in range(after):
        assert_same(found[rank], expected[rank], (kind, rank))
        assert_same(found[rank], found[0], (kind, rank))


# What differs between the ranks of the new group: all of them say so.
DIFFERENT: dict[str, tuple[Callable[[Reducer], None], str]] = {
    "limits": (lambda reducer: reducer.set_bucket_size(1000), "cap_bytes"),
    "mode": (lambda reducer: reducer.set_sync_mode(BoundedStaleness(1)), "sync_mode"),
    "steps": (lambda reducer: reducer.load_state_dict({**reducer.state_dict(), "rounds": 1}), "steps before encoding"),
}


@pytest.mark.parametrize("different", DIFFERENT)
def test_settings_are_compared_anew(different: str) -> None:
    """Also on ranks that have agreed before: one of them has changed a setting, or the new rank has another."""
    change, named = DIFFERENT[different]
    config = ReduceConfig(wire="int8", wire_after=3) if different == "steps" else ReduceConfig(wire="bf16")

    def built(communicator: Communicator) -> Reducer:
        return Reducer(leaves(SHAPES), communicator, config, caps=CAPS)

    with LocalGroup(2, timeout_s=30) as first, LocalGroup(3, timeout_s=30) as second:
        firsts = first.communicators()

        def case(communicator: LocalCommunicator, differs: int) -> str:
            rank, again = communicator.rank, communicator.apart()
            reducer = built(firsts[rank] if rank < 2 else communicator)
            if rank < 2:
                _steps(reducer)
                clear(reducer.parameters)
                reducer.set_communicator(communicator)
            if rank == differs:
                change(reducer)
            with pytest.raises(AgreementError) as raised:
                step(reducer, _gradients(reducer, 0))
            # And with the same settings they go on.
            if different == "steps":
                reducer.set_communicator(again)
            elif rank != differs:
                change(reducer)
            step(reducer, _gradients(reducer, 0))
            return str(raised.value)

        for differs in (0, 2):
            firsts = first.communicators()
            texts = second.run(functools.partial(case, differs=differs))
            assert len(set(texts)) == 1 and named in texts[0], texts


def test_a_trace_is_of_one_group(tmp_path: Path) -> None:
    """Steps with other ranks are not kept, and the costs that those have agreed on are not written."""
    reducer = _built(Group(6, rank=4), "planned")
    with reducer.record_trace(tmp_path):
        _steps(reducer, 3)
        reducer.set_communicator(Group(4, rank=1))
        _steps(reducer, 3)
    (file,) = tmp_path.iterdir()
    trace = json.loads(file.read_text())
    assert (file.name, trace["rank"], trace["ranks"]) == ("rank4.json", 4, 6)
    assert [one["step"] for one in trace["steps"]] == [1, 2, 3] and trace["costs"] is None
    with reducer.record_trace(tmp_path):
        _steps(reducer, 2)
    assert [one["step"] for one in json.loads((tmp_path / "rank1.json").read_text())["steps"]] == [4, 5]


def test_bytes_sent_are_those_of_every_group() -> None:
    """With each the first steps are at 16 bits once more."""
    config = ReduceConfig(wire="int8", wire_after=2)
    reducer = Reducer(leaves(SHAPES), Group(6, rank=4), config, caps=CAPS)
    encoded = sum(map(wire_bytes, reducer.parameters, inside(reducer).wires_agreed.wires))
    at_16_bits = sum(map(wire_bytes, reducer.parameters, inside(reducer).wires_in_use.wires))
    assert encoded < at_16_bits
    _steps(reducer, 5)
    reducer.set_communicator(Group(4, rank=1))
    _steps(reducer, 3)
    assert sent_bytes(reducer) == 4 * at_16_bits + 4 * encoded


def test_an_error_that_was_to_be_raised_is_not_one_of_other_ranks() -> None:
    """Such as one of a step whose end another reducer's error has skipped."""
    reducer = _built(Group(6, rank=4), "statistics")
    finite = inside(reducer).statistics.finite_check()
    owe_an_error(finite, NonFiniteReport(3, (), ("parameter 0",)))
    reducer.set_communicator(Group(4, rank=1))
    finite.check()


def test_a_report_is_logged_by_the_rank_of_its_own_group(caplog: pytest.LogCaptureFixture) -> None:
    """On CUDA it may be made when other ranks have followed. There rank 4 had the infinity."""

    def locate(number: int, index: int) -> tuple[str, int]:
        return f"parameter {number}", index

    cell = Cell(Group(6, rank=4))
    check = FiniteCheck(locate, cell, raises=False)
    ranks = torch.tensor([[-1, -1]] * 4 + [[0, 7]] + [[-1, -1]])
    count, first = torch.ones(1, dtype=torch.float64), torch.tensor([7])
    check._outcomes.append(_Outcome(3, 4, ranks, count, first, None, False, locate))
    cell.communicator = Group(4, rank=1)
    check.drop_step()
    check.make_reports()
    ((_, level, text),) = caplog.record_tuples
    assert level == logging.WARNING and text.startswith("rank 4: step 3: ") and "rank 4, parameter 0, element 7" in text


def test_the_table_in_the_design_names_tests_and_what_is_kept() -> None:
    _, *table = rows("Other ranks")
    defined = "".join(file.read_text() for file in Path(__file__).parents[1].rglob("test_*.py"))
    assert [row[-1] for row in table if f"def {row[-1].strip('`')}(" not in defined] == []
    stays = {state for (state, change), does in changes().items() if change == "another group" and does != "forgotten"}
    kept = {row[0] for row in table if row[2].startswith("kept")}
    assert kept <= set(KEPT.values()) <= kept | stays
