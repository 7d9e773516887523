"""Tests look into the reducer through support/inside.py only, so that a new shape of it changes that one file.

The sources of tests and perf/ are parsed. What they may not name is found in the product's sources: private names of
the reducer, its buckets, the wrapper and the hook, the attributes of a reducer that lead inside, the modules of its
steps, and what a test replaces in any of these. A unit test, which makes its module's own object, is a named exception.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from support.inside import inside
from support.loopback import Loopback
from torch.nn.parallel import DistributedDataParallel

from fusedreduce import Reducer

ROOT = Path(__file__).resolve().parent.parent
# What a redesign of the reducer moves or renames.
PRODUCT = (
    *sorted((ROOT / "fusedreduce/reducer").rglob("*.py")),
    *sorted((ROOT / "fusedreduce/buckets").rglob("*.py")),
    *(ROOT / f"fusedreduce/parallel/{name}.py" for name in ("ddp", "ddp_methods", "wrapper_reducer")),
    *sorted((ROOT / "fusedreduce/parallel").glob("hook*.py")),
)
MODULES = frozenset(".".join(path.relative_to(ROOT).with_suffix("").parts) for path in PRODUCT)
# Where a reducer takes its steps: nothing of them is for a test to import.
ENGINE = frozenset(f"fusedreduce.reducer.{name}" for name in ("engine", "recording"))
# Attributes of a reducer that lead inside. Other objects have the latter ones too: these are found by what they are of.
PARTS = frozenset({"observed", "engine"})
PARTS_OF_A_REDUCER = frozenset({"wires", "units", "late", "times"})
# Classes whose private names ours take over, or which share them.
TORCHS = (DistributedDataParallel, torch.Tensor)
# (file, name): why that file may say that name.
ALLOWED = {
    # Units, of a module whose own objects the test makes
    ("tests/buckets/test_exchanged.py", "_phases"): "a bucket of its own gets phases that issue nothing",
    ("tests/reducer/test_asynchronous.py", "_strips"): "of the ledgers that are tested",
    ("tests/reducer/test_asynchronous.py", "_under_way"): "of the contributions that are tested",
    ("tests/reducer/test_other_ranks.py", "_Outcome"): "a FiniteCheck of its own gets one",
    ("tests/reducer/test_other_ranks.py", "_outcomes"): "a FiniteCheck of its own gets one",
    ("tests/reducer/test_own_pace.py", "wires"): "of a maker that the test makes up",
    # A fault is planted in a method, which is written anew
    ("tests/reducer/test_order.py", "_side"): "Streams.beside, without one of its waits",
    ("tests/reducer/test_order.py", "_state"): "BucketFeedback's counter, which two streams write",
    # Others that have an attribute of such a name
    ("tests/gpu/test_both_devices.py", "_nodes"): "of a model",
    ("tests/kernels/test_cpu.py", "_staged"): "of a kernel's pointers",
    ("tests/reducer/test_device_schedule.py", "_finish"): "of a LoopbackPending",
    ("tests/support/loopback.py", "_issue"): "of a LocalCommunicator",
    ("tests/support/cuda/fake_streams.py", "_order"): "of a future that stands in",
    ("tests/support/cuda/order_trace.py", "_under_way"): "of a recorder",
}


@cache
def private_names() -> tuple[frozenset[str], frozenset[str]]:
    """Private names of the product's: of attributes and methods; of functions, classes and constants of modules."""
    members: set[str] = set()
    globals_: set[str] = set()
    for path in PRODUCT:
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            match node:
                case ast.ClassDef(body=body):
                    members.update(one.name for one in body if isinstance(one, ast.FunctionDef))
                    members.update(_assigned(body))
                case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                    members.add(name)
        globals_.update(one.name for one in tree.body if isinstance(one, ast.FunctionDef | ast.ClassDef))
        globals_.update(_assigned(tree.body))
    torchs = {name for one in TORCHS for name in dir(one)}
    return (
        frozenset(name for name in members if _is_private(name) and name not in torchs),
        frozenset(name for name in globals_ if _is_private(name)),
    )


def _assigned(body: list[ast.stmt]) -> Iterator[str]:
    for one in body:
        targets = one.targets if isinstance(one, ast.Assign) else [getattr(one, "target", None)]
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


class Accesses(ast.NodeVisitor):
    """Finds where a source looks inside: (line, name).

    Args:
        source: of a test.
    """

    def __init__(self, source: str) -> None:
        self.found: list[tuple[int, str]] = []
        self._members, self._globals = private_names()
        self._product: dict[str, str] = {}  # what stands in the source for something of the product's: its name there
        self._others: set[str] = set()  # what stands for something else that is imported, or for a class of the source
        self._classes = 0  # around the node
        tree = ast.parse(source)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                self._note_import(node)
            elif isinstance(node, ast.Import):
                self._others.update(one.asname or one.name.partition(".")[0] for one in node.names)
            elif isinstance(node, ast.ClassDef):
                self._others.add(node.name)
        self.visit(tree)

    def _note_import(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        for one in node.names:
            is_module = f"{module}.{one.name}" in MODULES
            if is_module or module in MODULES:
                self._product[one.asname or one.name] = one.name
                if module in ENGINE or f"{module}.{one.name}" in ENGINE or _is_private(one.name):
                    self.found.append((node.lineno, one.name))
            else:
                self._others.add(one.asname or one.name)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Within, `self` is the test's own."""
        self._classes += 1
        self.generic_visit(node)
        self._classes -= 1

    def visit_Constant(self, node: ast.Constant) -> None:
        """The name of a module of the engine."""
        if node.value in ENGINE:
            self.found.append((node.lineno, str(node.value)))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """A private name, a part of a reducer, or what is put in the place of something of the product's."""
        if isinstance(node.ctx, ast.Store) and _is_view(node.value):
            inside = True
        elif self._is_of_product(node.value):
            inside = isinstance(node.ctx, ast.Store) or node.attr in self._globals | self._members
        elif node.attr in PARTS_OF_A_REDUCER:
            inside = _is_reducer(node.value)
        else:
            inside = self._is_member(node.value, node.attr)
        if inside:
            self.found.append((node.lineno, node.attr))
        of = node.value
        # A part of what has another name is known by being looked into.
        if isinstance(of, ast.Attribute) and of.attr in PARTS_OF_A_REDUCER and self._may_be_a_reducer(of.value):
            self.found.append((node.lineno, of.attr))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """What is replaced or asked for by its name: setattr(owner, name, ...), as a function or of a patch."""
        call = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if call in ("setattr", "delattr", "getattr", "object") and node.args:
            owner, name = node.args[0], node.args[1] if len(node.args) > 1 else None
            text = str(name.value) if isinstance(name, ast.Constant) else ast.unparse(owner)
            if _is_view(owner):
                inside = call != "getattr"
            elif self._is_of_product(owner):
                # What users call keeps its name.
                inside = call != "getattr" and (self._product[_root(owner)] != "Reducer" or _is_private(text))
            else:
                inside = self._is_member(owner, text) or _names_product(owner)
            if inside:
                self.found.append((node.lineno, text))
        self.generic_visit(node)

    def _may_be_a_reducer(self, node: ast.expr) -> bool:
        return not _is_reducer(node) and _root(node) not in ("", "self", *self._others)

    def _is_of_product(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id in self._product

    def _is_member(self, owner: ast.expr, name: str) -> bool:
        """Whether this may be an attribute of an object of the product's."""
        own = isinstance(owner, ast.Name) and owner.id in ("self", "cls") and self._classes > 0
        return name in self._members | PARTS and not own and _root(owner) not in self._others


def _root(node: ast.expr) -> str:
    """The name that a chain of attributes begins with; "" where it begins with something else."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _is_view(node: ast.expr) -> bool:
    """Whether it was got through `inside`, which has a name for what tests set."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("inside", "inside_hook")


def _is_reducer(node: ast.expr) -> bool:
    """Whether it is called one, or made by what makes one."""
    node = node.func if isinstance(node, ast.Call) else node
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name in ("Reducer", "reducer_of") or name.endswith("reducer")


def _names_product(node: ast.expr) -> bool:
    """Whether it is the dotted name of something in a module of the product's."""
    if not isinstance(node, ast.Constant | ast.JoinedStr):
        return False
    text = ast.unparse(node).lstrip("f").strip("'\"")
    return any(text.startswith(f"{module}.") for module in MODULES)


def sources() -> list[Path]:
    """Tests and measurements, without the one file that may, and this one."""
    found = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "perf").rglob("*.py")]
    return sorted(set(found) - {ROOT / "tests/support/inside.py", Path(__file__)})


def accesses() -> list[tuple[str, int, str]]:
    """(file, line, name) of all."""
    return [
        (str(path.relative_to(ROOT)), line, name)
        for path in sources()
        for line, name in Accesses(path.read_text()).found
    ]


def test_tests_look_into_the_reducer_through_inside_alone() -> None:
    assert ENGINE <= MODULES, "its modules have other names now"
    found = accesses()
    assert [f"{file}:{line}: {name}" for file, line, name in found if (file, name) not in ALLOWED] == []
    met = {(file, name) for file, _, name in found}
    assert [one for one in ALLOWED if one not in met] == [], "no exception is needed any more"


PLANTED = {
    "a private attribute": "def f(reducer):\n    return reducer._plans",
    "a private attribute of a wrapper's": "from fusedreduce import reducer_of\nx = reducer_of(ddp)._plans.kinds",
    "a part": "assert rig.reducer.engine.steps == 1",
    "a part of what is looked for": "norm = reducer_of(ddp).observed",
    "a part that others have too": "table = reducer.wires",
    "the same in another's hands": "assert one.late.withheld",
    "a part by its name": "getattr(reducer, 'engine')",
    "a part that is set": "reducer.engine.lock = lock",
    "a private one that is set by its name": "monkeypatch.setattr(reducer.mode, '_communicator', None)",
    "a class of the engine": "from fusedreduce.reducer.engine import Engine",
    "its module": "from fusedreduce.reducer import engine",
    "a private function": "from fusedreduce.buckets.feedback import _State",
    "a method that is replaced": (
        "from fusedreduce.buckets.bucket import Bucket\nmonkeypatch.setattr(Bucket, 'unpacked', None)"
    ),
    "one that is assigned": "from fusedreduce.buckets.phases import Phases\nPhases.issue_all = leave",
    "a setting": "from fusedreduce.reducer import wire_schedule\nwire_schedule.MEASURE_EVERY = 2",
    "a private setting": "from fusedreduce.reducer import plans as p\nx = p._LEAST_PLANNED_BYTES",
    "one by a dotted name": "monkeypatch.setattr('fusedreduce.parallel.hook_reduction.agree', None)",
    "one whose name is put together": "monkeypatch.setattr(f'fusedreduce.parallel.hook_stats.{name}', None)",
    "one of the engine's, imported by a name": "importlib.import_module('fusedreduce.reducer.engine')",
    "what is set through a view": "inside(reducer).reductions[0].check_unchanged = fails",
    "replaced through a view": "monkeypatch.setattr(inside(reducer).mode, 'finish', None)",
    "within a replaced method": "def launch(self):\n    self._buffers = {}",
}


@pytest.mark.parametrize("source", PLANTED.values(), ids=PLANTED)
def test_one_that_is_planted_is_found(source: str) -> None:
    assert Accesses(source).found


def test_what_a_test_has_itself_is_no_access() -> None:
    source = """
import itertools, os
from fusedreduce import Reducer
from fusedreduce.reducer.reducer import Reducer as ours

class Rank:
    def __init__(self, communicator):
        self._communicator = communicator
        self.wires = []
        self.wires.append(self._communicator)

monkeypatch.setattr(ours, "prepare_for_backward", None)
monkeypatch.setattr(os, "_exit", None)
x = itertools.cycle(Rank(1).wires)
inside(reducer).statistics.grad_norm()
reducer.observe, reducer.stats(), table.wires
"""
    assert Accesses(source).found == []


def test_the_users_way_to_the_statistics_stays() -> None:
    """docs/frameworks/plain_torch.md names it; no other test does."""
    with Reducer([torch.zeros(3, requires_grad=True)], Loopback()) as reducer:
        assert reducer.observed is inside(reducer).statistics
