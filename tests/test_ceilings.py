"""How much there is to a reducer and to a step: no figure grows unnoticed, and what is large says why.

What was there stands in ceilings.json, figure by figure and with where it was. As a script, this file writes that anew:

    python tests/test_ceilings.py            # refuses what has grown
    python tests/test_ceilings.py --raise    # for what the commit's message gives the reason of

It is looked at in a process of its own, in which nothing else is patched or installed. The collectives are those of
torch's fake backend, which are done at once: all runs on one thread, in one order.
"""

from __future__ import annotations

import ast
import copy
import functools
import json
import sys
import threading
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support.cuda.fake_driver import run_compiled
from support.inside import take_torch_path
from support.made_of import Holders, Made, held_by_modules, made_of
from support.ranks import fake_group
from support.walked import PACKAGE, Walk, walked
from test_packaging import package_sources
from torch import nn

import fusedreduce
from fusedreduce import FusedHookState, ReduceConfig, reducer_of
from fusedreduce.reducer.state import ARMED, IDLE, LAUNCHED

pytestmark = pytest.mark.slow  # the fixture trains

RECORD = Path(__file__).with_name("ceilings.json")
STEPS = 40  # among the first ones are steps that learn a plan
SLOW_TO_START = (1e7, 1000.0)  # a link on which one bucket is best, however long a loaded machine takes to compute
SLOW_TO_SEND = (1.0, 0.001)  # several

# What runs more than once in a steady step of a wrapper, though nothing has changed since it ran.
REPEATED = {"Reducer.agree": 0, "Reducer.rebuild": 0, "Plans.next": 0, "Scheduler.decide": 0}

# Where each of these is held. In a list or a mapping: "[]".
HOLDERS: dict[str, set[str]] = {
    "communicator": {
        "Group.communicator",
        "fusedreduce.comm.process_group._supports[]",  # what the group's backend can do; weakly
    },
    "parameters": {
        "Parameters.tensors",
        "WrapperReducer.parameters",  # for users
        "fusedreduce.reducer.validation._owners",  # which reducer has which parameter; weakly
    },
    "names": {
        "Parameters.names",
        "WrapperReducer.names",  # for users
    },
}

# An object has at most so many attributes, or stands here: with how many (one that is a step: 40), and why.
MOST_ATTRIBUTES = 25
LARGE_OBJECTS: dict[str, tuple[int, str]] = {
    "Engine": (55, "has what all steps share: what a step has to itself is ArmedStep, and its readiness Step"),
}
# A class has at most so many statements, or stands here.
MOST_STATEMENTS = 450
LARGE_CLASSES: dict[str, tuple[int, str]] = {
    "fusedreduce/reducer/engine.py:Engine": (631, "is a step from its beginning to its end, read from top to bottom"),
    "fusedreduce/reducer/reducer.py:Reducer": (458, "is what users call, and each change between two steps"),
}

# Whose statements are counted together: by how a file's path begins.
STATEMENTS = {
    "statements of the step": (
        "fusedreduce/reducer/",
        "fusedreduce/buckets/",
        "fusedreduce/parallel/ddp",
        "fusedreduce/parallel/hook",
    ),
    "statements of its doors": (
        "fusedreduce/parallel/create.py",
        "fusedreduce/parallel/install.py",
        "fusedreduce/parallel/logging_data.py",
        "fusedreduce/parallel/torch_reducer.py",
        "fusedreduce/parallel/wrapper_reducer.py",
    ),
}
OTHER_PRODUCTS = ("data_parallel.py", "fsdp", "replicas/", "sync_", "__init__.py")  # of parallel/


class Figures(NamedTuple):
    """Figures of one row, by name, and what they are made of: by place, one number or several."""

    totals: Mapping[str, int]
    where: Mapping[str, list[int]]


class Found(NamedTuple):
    """What is there now."""

    rows: Mapping[str, Figures]
    holders: Mapping[str, Mapping[str, str]]  # kind -> place -> the way to one that has it there
    repeated: Mapping[str, int]  # how often each function runs in a wrapper's step
    attributes: Mapping[str, int]  # the most of an object, by class


def model() -> nn.Sequential:
    """16 parameters."""
    torch.manual_seed(0)
    return nn.Sequential(*[part for _ in range(8) for part in (nn.Linear(64, 64), nn.ReLU())])


def step(module: nn.Module) -> None:
    """One."""
    for parameter in module.parameters():
        parameter.grad = None
    module(torch.ones(4, 64)).square().mean().backward()


def wrapper(**options: Any) -> fusedreduce.DistributedDataParallel:
    """One whose plan is settled."""
    ddp = fusedreduce.DistributedDataParallel(model(), reduce=ReduceConfig(**{"link": SLOW_TO_START, **options}))
    for _ in range(STEPS):
        step(ddp)
    return ddp


def steady_walk(module: nn.Module) -> Walk:
    """Of three steps the shortest: what is freed in between may call something."""
    return min((walked(lambda: step(module)) for _ in range(3)), key=lambda walk: walk.calls)


def look(ddp: fusedreduce.DistributedDataParallel) -> Made:
    """What its reducer is made of."""
    reducer = reducer_of(ddp)
    return made_of(reducer, reducer.communicator, reducer.parameters, reducer.names)


def moments(ddp: fusedreduce.DistributedDataParallel) -> dict[str, Made]:
    """The same between two steps, before a backward and behind one that is to be ended by hand."""
    reducer = reducer_of(ddp)
    assert reducer.state is IDLE
    found = {"between steps": look(ddp)}
    reducer.require_manual_finalization(True)
    ddp.zero_grad()
    loss = ddp(torch.ones(4, 64)).square().mean()
    assert reducer.state is ARMED
    found["armed"] = look(ddp)
    loss.backward()
    assert reducer.state is LAUNCHED
    found["launched"] = look(ddp)
    reducer.finalize_backward()
    return found


def statements(tree: ast.AST) -> int:
    """How many there are, without docstrings."""
    found = 0
    for node in ast.walk(tree):
        found += isinstance(node, ast.stmt)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found -= ast.get_docstring(node, clean=False) is not None
    return found


def statement_rows() -> dict[str, Figures]:
    """By STATEMENTS."""
    found = {}
    for name, beginnings in STATEMENTS.items():
        where = {source.path: [statements(source.tree)] for source in package_sources() if source.in_any(beginnings)}
        found[name] = Figures({"statements": sum(count for (count,) in where.values())}, where)
    return found


def of_walk(walk: Walk) -> Figures:
    """How long it is, and how many calls into each file."""
    totals = {"moves": walk.moves, "calls": walk.calls, "files": len(walk.files)}
    return Figures(totals, {file: [count] for file, count in sorted(walk.files.items())})


def of_made(made: Made) -> Figures:
    """How much it is, and of each class how many objects and attributes."""
    return Figures(dict(zip(("objects", "classes", "attributes"), made.figures, strict=True)), made.classes)


def measured() -> Found:
    """Needs a group."""
    rows, made = statement_rows(), list[Made]()
    one = wrapper(wire="bf16")
    assert len(reducer_of(one).plan) == 1
    walk = steady_walk(one)
    rows["a wrapper's step"] = of_walk(walk)

    hooked = nn.parallel.DistributedDataParallel(model(), gradient_as_bucket_view=True)
    state = FusedHookState(wire="bf16")
    hooked.register_comm_hook(state, fusedreduce.fused_hook)
    for _ in range(STEPS):
        step(hooked)
    rows["a hook's step"] = of_walk(steady_walk(hooked))

    encoded = wrapper(wire="int8", error_feedback=True, stochastic_rounding=True, grad_stats=True, check_finite="count")
    for name, ddp in (("bf16", one), ("int8, all options", encoded)):
        for moment, what in moments(ddp).items():
            rows[f"{name}, {moment}"] = of_made(what)
            made.append(what)

    several = wrapper(wire="bf16", link=SLOW_TO_SEND)
    assert len(reducer_of(several).plan) > 1
    # Where there is one bucket, it has all parameters.
    apart = [*moments(several).values(), *made[3:]]
    reducer = reducer_of(several)
    outside = held_by_modules(reducer.communicator, reducer.parameters, reducer.names)
    holders = merged([*(each.holders for each in apart), outside])
    names = [name for name, _ in hooked.named_parameters()]
    made.append(made_of(state, reducer.communicator, list(hooked.parameters()), names))
    largest: defaultdict[str, int] = defaultdict(int)
    for each in made:
        for kind, count in each.largest().items():
            largest[kind] = max(largest[kind], count)
    return Found(rows, holders, walk.functions, largest)


def merged(found: list[Holders]) -> dict[str, dict[str, str]]:
    """Each place once, with one of the ways to it."""
    holders: dict[str, dict[str, str]] = {kind: {} for kind in HOLDERS}
    for each in found:
        for kind, places in each.items():
            for place, ways in places.items():
                holders[kind].setdefault(place, ways[0])
    return holders


def grown(rows: Mapping[str, Figures], ceilings: Mapping[str, Figures]) -> list[str]:
    """A sentence for each figure that is above its ceiling: by how much, and where."""
    faults = []
    for name, (totals, where) in rows.items():
        known = ceilings.get(name, Figures({}, {}))
        for kind, count in totals.items():
            most = known.totals.get(kind, 0)
            if count > most:
                before = known.where
                more = [
                    f"{place} {_text(before.get(place))} -> {_text(counts)}"
                    for place, counts in where.items()
                    if place not in before or any(now > then for now, then in zip(counts, before[place], strict=True))
                ]
                faults.append(
                    f"{name}: {count} {kind}, {count - most} more than the ceiling of {most}. Where there is more: "
                    f"{'; '.join(more) or 'nowhere, the order has changed'}"
                )
    return faults


def _text(counts: list[int] | None) -> str:
    return "/".join(map(str, counts or [0]))


def strange(found: Mapping[str, Mapping[str, str]], known: Mapping[str, set[str]]) -> list[str]:
    """A sentence for each place that is not in the table, and for each that is, and is no more."""
    faults = []
    for kind, places in found.items():
        faults += [
            f"{place} holds the {kind}, found at {way}, and is not in HOLDERS: have it ask who is"
            for place, way in places.items()
            if place not in known[kind]
        ]
        gone = sorted(known[kind] - set(places))
        faults += [f"{place} does not hold the {kind} any more: take it out of HOLDERS" for place in gone]
    return faults


def too_large(what: str, found: Mapping[str, int], most: int, known: Mapping[str, tuple[int, str]]) -> list[str]:
    """A sentence for each that is larger than it may be, and for each named exception that is none any more."""
    faults = []
    for name, count in found.items():
        limit = known[name][0] if name in known else most
        if count > limit:
            faults.append(f"{name} has {count} {what}, {count - limit} more than the {limit} that it may have")
    for name, (limit, _) in known.items():
        count = found.get(name, 0)
        if count <= most:
            faults.append(f"{name} has {count} {what}: it need not be named as an exception")
        elif count < limit:
            faults.append(f"{name} has {count} {what}: name it as an exception with so many, no longer with {limit}")
    return faults


def class_statements(trees: Mapping[str, ast.AST]) -> dict[str, int]:
    """By path and name of the class."""
    return {
        f"{path}:{node.name}": statements(node) - 1
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }


def recorded() -> dict[str, Figures]:
    """The ceilings."""
    return {name: Figures(row["most"], row["where"]) for name, row in json.loads(RECORD.read_text()).items()}


def as_json(rows: Mapping[str, Figures]) -> str:
    """A row's figures on one line, and where they are on another."""
    lines = [
        f'{json.dumps(name)}: {{\n  "most": {json.dumps(totals)},\n  "where": {json.dumps(where, sort_keys=True)}\n}}'
        for name, (totals, where) in rows.items()
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


@contextmanager
def two_ranks() -> Iterator[None]:
    """On the torch path, which is what users on CPU get."""
    with fake_group(2), pytest.MonkeyPatch.context() as patch:
        take_torch_path(patch)
        yield


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """Two ranks of a fake group on the torch path, for the whole module."""
    with two_ranks():
        yield


@pytest.fixture(scope="module")
def found() -> Found:
    """What is there now."""
    rows, *others = run_compiled(__file__, "--print")
    return Found({name: Figures(*row) for name, row in rows.items()}, *others)


@pytest.fixture(scope="module")
def ddp(group: None) -> fusedreduce.DistributedDataParallel:
    """A wrapper in whose reducer tests plant something, and take it out again."""
    return wrapper(wire="bf16", link=SLOW_TO_SEND)


def test_nothing_has_grown(found: Found) -> None:
    faults = grown(found.rows, recorded())
    assert faults == []
    assert set(recorded()) == set(found.rows)


def test_a_reducer_has_one_cell_for_its_ranks_and_one_value_for_its_parameters(found: Found) -> None:
    """A second one would be a place that HOLDERS takes for the first."""
    reducers = {name: row.where for name, row in found.rows.items() if "objects" in row.totals}
    assert reducers
    counts = {name: [where[kind][0] for kind in ("Group", "Parameters")] for name, where in reducers.items()}
    assert counts == dict.fromkeys(reducers, [1, 1])


def test_each_has_its_holders_and_no_other(found: Found) -> None:
    faults = strange(found.holders, HOLDERS)
    assert faults == []


def test_what_runs_more_than_once_in_a_steady_step_is_listed(found: Found) -> None:
    assert {name: found.repeated.get(name, 0) for name in REPEATED} == REPEATED


def test_no_object_has_too_many_attributes(found: Found) -> None:
    faults = too_large("attributes", found.attributes, MOST_ATTRIBUTES, LARGE_OBJECTS)
    assert faults == []


def test_no_class_has_too_many_statements() -> None:
    trees = {source.path: source.tree for source in package_sources()}
    faults = too_large("statements", class_statements(trees), MOST_STATEMENTS, LARGE_CLASSES)
    assert faults == []


def test_every_file_of_both_doors_is_counted() -> None:
    counted = sum(STATEMENTS.values(), ())
    others = tuple(f"fusedreduce/parallel/{name}" for name in OTHER_PRODUCTS)
    rest = [one.path for one in package_sources() if one.in_any(("fusedreduce/parallel/",)) and not one.in_any(counted)]
    assert [path for path in rest if not path.startswith(others)] == []


# That each count notices


class _Pair(NamedTuple):
    first: object
    second: object


class _Ours(NamedTuple):
    first: object
    second: object


_Ours.__module__ = "fusedreduce.planted"


class _Slotted:
    """As a class of the package's."""

    __module__ = "fusedreduce.planted"
    __slots__ = ("kept",)

    def __init__(self, kept: object) -> None:
        self.kept = kept


class _Wrapped:
    def __init__(self, inner: object) -> None:
        self.inner = inner


class _List(list[Any]):
    pass


class _Mapped(Mapping[int, Any]):
    """A mapping that keeps what it has out of sight of who does not look into attributes."""

    def __init__(self, items: list[Any]) -> None:
        self._items = deque(items)

    def __getitem__(self, number: int) -> Any:
        return self._items[number]

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self._items)))

    def __len__(self) -> int:
        return len(self._items)


ONE: dict[str, Callable[[Any], object]] = {
    "attribute": lambda one: one,
    "copy": copy.copy,
    "its group": lambda one: one.group,
    "its group's method": lambda one: one.group.allreduce,
    "tuple": lambda one: (1, one),
    "named tuple": lambda one: _Pair(1, one),
    "list in a list": lambda one: [[one]],
    "key": lambda one: {one: 1},
    "closure": lambda one: lambda: one,
    "default argument": lambda one: lambda kept=one: kept,
    "partial": lambda one: functools.partial(print, end=one),
    "bound method": lambda one: one.all_reduce,
    "weak reference": weakref.ref,
    "namespace": lambda one: types.SimpleNamespace(one=one),
    "slot": _Slotted,
    "in an object of no package": _Wrapped,
}
ALL: dict[str, Callable[[list[Any]], object]] = {
    "tuple": tuple,
    "backwards": lambda every: every[::-1],
    "set": frozenset,
    "subclass of a list": _List,
    "mapping of its own": _Mapped,
    "values": lambda every: dict(enumerate(every)),
    "keys": lambda every: {one: number for number, one in enumerate(every)},
    "pairs": lambda every: [(number, one) for number, one in enumerate(every)],
    "with others": lambda every: [0.5, *every, "more"],
    "in two halves": lambda every: (every[:5], every[5:]),
    "closure": lambda every: lambda: every[:],
    "slot": lambda every: _Slotted(every[:]),
}
PLANTS: list[Any] = [
    *(pytest.param("communicator", make, id=f"communicator, {name}") for name, make in ONE.items()),
    *(pytest.param("parameters", make, id=f"parameters, {name}") for name, make in ALL.items()),
    *(pytest.param("names", make, id=f"names, {name}") for name, make in ALL.items()),
    pytest.param("parameters", lambda every: [one.detach() for one in every], id="parameters, detached"),
    pytest.param("parameters", lambda every: [weakref.ref(one) for one in every], id="parameters, weakly"),
]


def places(made: Made) -> dict[str, set[str]]:
    """As HOLDERS."""
    return {kind: set(found) for kind, found in made.holders.items()}


def held(reducer: Any, kind: str) -> Any:
    """What of this kind the reducer has."""
    what = getattr(reducer, kind)
    return what if kind == "communicator" else list(what)


@pytest.mark.parametrize(("kind", "make"), PLANTS)
def test_another_holder_is_found_and_named(
    ddp: fusedreduce.DistributedDataParallel, monkeypatch: pytest.MonkeyPatch, kind: str, make: Callable[[Any], object]
) -> None:
    before, reducer = places(look(ddp)), reducer_of(ddp)
    planted = make(held(reducer, kind))
    monkeypatch.setattr(reducer, "planted", planted, raising=False)
    (fault,) = strange(merged([look(ddp).holders]), before)
    assert f" holds the {kind}, found at .planted" in fault
    assert fault.startswith("_Slotted.kept" if isinstance(planted, _Slotted) else "WrapperReducer.planted")


@pytest.mark.parametrize("kind", ["parameters", "names"])
def test_who_has_all_but_one_is_no_holder(
    ddp: fusedreduce.DistributedDataParallel, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    before, reducer = places(look(ddp)), reducer_of(ddp)
    monkeypatch.setattr(reducer, "planted", held(reducer, kind)[1:], raising=False)
    assert not strange(merged([look(ddp).holders]), before)


def test_a_module_and_a_class_that_hold_are_found(
    ddp: fusedreduce.DistributedDataParallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    reducer = reducer_of(ddp)
    arguments = reducer.communicator, reducer.parameters, reducer.names
    before = merged([held_by_modules(*arguments)])
    monkeypatch.setattr(fusedreduce.config, "planted", {1: reducer.communicator}, raising=False)
    monkeypatch.setattr(ReduceConfig, "planted", list(reducer.names), raising=False)
    after = merged([held_by_modules(*arguments)])
    assert set(after["communicator"]) - set(before["communicator"]) == {"fusedreduce.config.planted[]"}
    assert set(after["names"]) - set(before["names"]) == {"class ReduceConfig.planted"}


def test_a_holder_that_is_gone_is_to_be_taken_out() -> None:
    faults = strange({"names": {}}, {"names": {"Plans._names"}})
    assert faults == ["Plans._names does not hold the names any more: take it out of HOLDERS"]


@pytest.mark.parametrize(
    ("planted", "more"),
    [
        pytest.param(1, (0, 0, 1), id="a number"),
        pytest.param([1, 2], (0, 0, 1), id="a list"),
        pytest.param((1, 2), (0, 0, 1), id="a tuple of numbers"),
        pytest.param((1, "two"), (1, 0, 3), id="a tuple"),
        pytest.param([(1, "two")], (0, 0, 1), id="tuples of values in a list"),
        pytest.param([(1, [])], (1, 0, 3), id="a tuple in a list"),
        pytest.param(_Slotted(1), (1, 1, 2), id="slots"),
        pytest.param(_Slotted(_Slotted((1, "two"))), (3, 1, 5), id="slots in slots"),
        pytest.param(_Pair(1, 2), (0, 0, 1), id="a named tuple of no package"),
        pytest.param(_Ours(1, 2), (1, 1, 3), id="a named tuple"),
        pytest.param(types.SimpleNamespace(one=1, two=2), (1, 1, 3), id="a namespace"),
        pytest.param(functools.partial(print, 1, 2), (1, 0, 3), id="a partial function"),
        pytest.param((lambda one, two: lambda: one + two)(1, 2), (1, 1, 3), id="a closure"),
    ],
)
def test_what_keeps_state_is_counted(
    ddp: fusedreduce.DistributedDataParallel,
    monkeypatch: pytest.MonkeyPatch,
    planted: object,
    more: tuple[int, int, int],
) -> None:
    before = look(ddp)
    monkeypatch.setattr(reducer_of(ddp), "planted", planted, raising=False)
    after = look(ddp)
    assert tuple(now - then for now, then in zip(after.figures, before.figures, strict=True)) == more
    faults = grown({"bf16": of_made(after)}, {"bf16": of_made(before)})
    assert len(faults) == sum(count > 0 for count in more)
    assert all("Where there is more: WrapperReducer 1/" in fault for fault in faults)


def _planted_function() -> Callable[..., None]:
    """A function that seems to stand in a file of the package."""
    scope: dict[str, Any] = {}
    exec(compile("def planted(*_): pass", str(PACKAGE / "reducer" / "planted.py"), "exec"), scope)
    function: Callable[..., None] = scope["planted"]
    return function


@pytest.mark.parametrize("aside", [False, True], ids=["here", "on another thread"])
def test_one_more_call_in_a_step_is_noticed(ddp: fusedreduce.DistributedDataParallel, aside: bool) -> None:
    before, planted = of_walk(steady_walk(ddp)), _planted_function()

    def elsewhere(*_: object) -> None:
        thread = threading.Thread(target=planted)
        thread.start()
        thread.join()

    handle = ddp.module.register_forward_pre_hook(elsewhere if aside else planted)
    faults = grown({"a step": of_walk(steady_walk(ddp))}, {"a step": before})
    handle.remove()
    calls = before.totals["calls"]
    assert (
        f"a step: {calls + 1} calls, 1 more than the ceiling of {calls}. Where there is more: reducer/planted.py 0 -> 1"
    ) in faults
    assert not grown({"a step": of_walk(steady_walk(ddp))}, {"a step": before})


def test_statements_are_counted_without_docstrings() -> None:
    source = 'class One:\n    """A."""\n    x = 1\n    def f(self):\n        """B."""\n        if self: return 1\n'
    assert statements(ast.parse(f'"""C."""\n{source}')) == 5


def test_a_large_class_and_a_large_object_are_named_with_what_they_have() -> None:
    large = "class Large:\n" + "    x = 1\n" * 451
    counts = class_statements({"one.py": ast.parse(large), "two.py": ast.parse("class Small:\n    x = 1")})
    faults = too_large("statements", counts, MOST_STATEMENTS, {})
    assert faults == ["one.py:Large has 451 statements, 1 more than the 450 that it may have"]
    assert not too_large("statements", counts, MOST_STATEMENTS, {"one.py:Large": (451, "it is the engine")})
    assert too_large("attributes", {"Step": 41}, 25, {"Step": (40, "a step")}) == [
        "Step has 41 attributes, 1 more than the 40 that it may have"
    ]
    assert too_large("attributes", {"Step": 39}, 25, {"Step": (40, "a step")}) == [
        "Step has 39 attributes: name it as an exception with so many, no longer with 40"
    ]
    assert too_large("attributes", {"Step": 25}, 25, {"Step": (40, "a step")}) == [
        "Step has 25 attributes: it need not be named as an exception"
    ]


def main(arguments: list[str]) -> None:
    """Prints what is there now, or writes the record."""
    with two_ranks():
        now = measured()
    above = grown(now.rows, recorded()) if RECORD.exists() else []
    if arguments == ["--print"]:
        print(json.dumps(now))
    elif above and arguments != ["--raise"]:
        sys.exit("\n".join(above))
    else:
        RECORD.write_text(as_json(now.rows))
        for fault in strange(now.holders, HOLDERS):
            print(fault)


if __name__ == "__main__":
    main(sys.argv[1:])
