"""The package as users get it, and the order in which its files may import each other.

The rules about sources are functions from one parsed file to its faults, listed in RULES. Each holds for the
whole package and is shown to bite on snippets that break it (BAD). A new folder goes into FLOORS. How files of a folder
import each other, and their sizes, are rules about the whole package.
"""

from __future__ import annotations

import ast
import functools
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.utils._device

import fusedreduce
from fusedreduce.buckets.step_feature import StepFeature
from fusedreduce.reducer.modes.mode import Mode

ROOT = Path(__file__).resolve().parent.parent

# From the top: a file imports from lines below that of its room (a folder or a file of the root), or from its own room,
# where no two import each other (`folders_import_one_way`). What uses the library as anybody does stands above it.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("__main__",),
    ("cli",),
    ("integrations", "run", "simulation"),
    ("__init__", "_public"),
    ("optim",),
    ("parallel",),
    ("reducer",),
    ("buckets", "collective"),
    ("trace",),
    ("comm", "planning"),
    ("config", "errors"),
    ("wires",),
    ("kernels",),
)
# (file, what it imports all the same): the reason.
MAY_IMPORT_EACH_OTHER = {
    ("fusedreduce/comm/local/group.py", "fusedreduce.comm.local.process_group.LocalProcessGroup"): (
        "LocalCommunicator.process_group() is public, and what it makes holds a LocalCommunicator"
    ),
}
KERNELS_MAY_IMPORT = {"torch", "triton", "numpy"}
# What is pure, and so imports nothing but numpy and these of ours.
PURE = {"planning": {"planning", "config", "errors"}, "simulation": {"simulation", "planning"}}
MAY_GUARD_TRITON = ("fusedreduce/kernels/dispatch.py",)
# Where something is waited for other than by `wait_for`, and what that is.
MAY_WAIT: dict[str, set[str]] = {
    "fusedreduce/comm/waiting.py": {"pending.wait", "completed.wait"},
    # what a Pending's own `wait` is made of
    "fusedreduce/buckets/exchanged.py": {"super().wait"},
    "fusedreduce/comm/protocol.py": {"piece.wait", "one.wait", "torch.futures.collect_all"},
    "fusedreduce/buckets/phases.py": {"self._last().wait"},
    # and of what blocks, whose callers make the error
    "fusedreduce/comm/process_group.py": {"self.work.wait", "pending.wait"},
    "fusedreduce/collective/node_collectives.py": {"self._work.wait"},
    "fusedreduce/comm/local/group.py": {"pending.wait"},
    "fusedreduce/comm/local/process_group.py": {"pending.wait", "self.wait"},
    # threads of this process, and keys in a store
    "fusedreduce/comm/local/rendezvous.py": {"rendezvous.changed.wait"},
    "fusedreduce/comm/local/threads.py": {"end.wait"},
    "fusedreduce/parallel/replicas/thread_pool.py": {"round_.wait", "self._latest.wait"},
    "fusedreduce/collective/registration.py": {"self._changed.wait"},
    "fusedreduce/collective/peer_group.py": {"self._changed.wait"},
    "fusedreduce/collective/multi_node.py": {"self._changed.wait"},
    "fusedreduce/comm/stall_monitor.py": {"self._ends.wait"},
    # ranks that have been killed
    "fusedreduce/cli/launch.py": {"process.wait"},
    # handles of a session's operations, which a session's user waits for too
    "fusedreduce/collective/session.py": {
        "self.all_reduce_async(tensor, op).wait",
        "self.reduce_async(tensor, op, root).wait",
        "self.broadcast_async(tensor, root).wait",
        "self._call('finish', None, problem=problem).wait",
    },
}
# A file with fewer lines whose only importer is one other file belongs into that, unless it stands here: the reason.
FEWEST_LINES_ALONE = 60
SMALL_WITH_ONE_IMPORTER = {
    "fusedreduce/_public.py": "imports everything, when a public name is asked for; `import fusedreduce` must not",
    "fusedreduce/kernels/launchers.py": "imports triton, when the first launch needs it; `dispatch` must not",
}
# What makes a tensor on torch's default device unless told where: all that torch's own default device acts on.
MAKES_TENSORS = {maker.__name__ for maker in torch.utils._device._device_constructors()}
# Of these the dtype is that of what they are given, or always the same.
DTYPE_IS_GIVEN = re.compile(r"as_tensor|asarray|sparse_\w+|rand(perm|int)|tri[lu]_indices")
IMPORT_CALL = re.compile(r"\b(import_module|__import__)$")


class Source(NamedTuple):
    """One file of the package: `path` as it is installed, and its syntax tree."""

    path: str
    tree: ast.Module

    @property
    def room(self) -> str:
        """The folder of the root, or the root's own file, that it belongs to."""
        return self.path.removesuffix(".py").split("/")[1]

    def in_any(self, prefixes: tuple[str, ...]) -> bool:
        return self.path.startswith(prefixes)

    def fault(self, node: ast.AST, what: str) -> str:
        return f"{self.path}:{getattr(node, 'lineno', 0)}: {what}"


def package_files(suffix: str) -> dict[str, Path]:
    """The checkout's files with this suffix, by the path that each is installed under."""
    found = {}
    for folder, installed in (("fusedreduce", "fusedreduce"), ("kernels", "fusedreduce/kernels")):
        for path in sorted((ROOT / folder).rglob(f"*{suffix}")):
            name = path.relative_to(ROOT / folder).as_posix()
            if not name.startswith("kernels/"):  # the symlink, which some versions of Python follow here
                found[f"{installed}/{name}"] = path
    return found


@functools.cache
def package_sources() -> list[Source]:
    return [Source(name, ast.parse(path.read_bytes())) for name, path in package_files(".py").items()]


def imports(source: Source, within: ast.AST | None = None) -> Iterator[tuple[ast.AST, str]]:
    """Every import, wherever it stands (in a function, under TYPE_CHECKING), as its full dotted name."""
    package = source.path.split("/")[:-1]
    for node in ast.walk(within or source.tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and IMPORT_CALL.search(ast.unparse(node.func)):
            yield from ((node, str(name.value)) for name in node.args[:1] if isinstance(name, ast.Constant))


def room_of(name: str) -> str | None:
    """The room that a dotted name belongs to; None if it is not ours."""
    first, *rest = name.split(".")
    if first != "fusedreduce":
        return None
    return rest[0] if rest and any(rest[0] in floor for floor in FLOORS) else "__init__"


def imports_go_down(source: Source) -> list[str]:
    """No file imports from a floor at or above its own, its own room excepted."""
    rank = {name: number for number, floor in enumerate(FLOORS) for name in floor}
    if source.room not in rank:
        return [source.fault(source.tree, f"{source.room} has no place in FLOORS")]
    found = ((node, name, room_of(name)) for node, name in imports(source))
    return [
        source.fault(node, f"imports {name}, which is not below {source.room}")
        for node, name, room in found
        if room is not None and room != source.room and rank[room] <= rank[source.room]
        if not {room, source.room} <= {"__init__", "_public"}
    ]


def folders_import_one_way(sources: Sequence[Source]) -> list[str]:
    """Within each folder, its files and subfolders import each other one way."""
    paths = [tuple(source.path.removesuffix(".py").split("/")) for source in sources]
    known = {path[:length] for path in paths for length in range(1, len(path) + 1)}
    graphs: defaultdict[tuple[str, ...], defaultdict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for source, path in zip(sources, paths, strict=True):
        for _, name in imports(source):
            target = tuple(name.split("."))
            shared = next((at for at, pair in enumerate(zip(path, target, strict=False)) if pair[0] != pair[1]), 0)
            if shared and (source.path, name) not in MAY_IMPORT_EACH_OTHER:
                entry = target[shared] if target[: shared + 1] in known else "__init__"
                graphs[path[:shared]][path[shared]].add(entry)
    faults = []
    for folder, graph in graphs.items():
        try:
            TopologicalSorter({entry: needed - {entry} for entry, needed in graph.items()}).prepare()
        except CycleError as error:
            faults.append(f"{'/'.join(folder)}: imports go round: {' <- '.join(error.args[1])}")
    return faults


def small_with_one_importer(sources: Sequence[Source], lines: Mapping[str, int]) -> dict[str, str]:
    """Files below FEWEST_LINES_ALONE that exactly one other file imports: path -> that file."""
    importers: defaultdict[str, set[str]] = defaultdict(set)
    for source in sources:
        for _, name in imports(source):
            parts = name.split(".")
            paths = ("/".join(parts[:length]) + ".py" for length in range(len(parts), 0, -1))
            importers[next((path for path in paths if path in lines), "")].add(source.path)
    small = {path for path, count in lines.items() if count < FEWEST_LINES_ALONE}
    return {
        path: next(iter(importers[path]))
        for path in sorted(small)
        if len(importers[path]) == 1 and not path.endswith(("/__init__.py", "/__main__.py"))
    }


def kernels_stand_alone(source: Source) -> list[str]:
    """kernels/ imports torch, triton, numpy, the standard library and its siblings only."""
    return _imports_outside(source, "kernels", KERNELS_MAY_IMPORT, {"kernels"})


def planning_and_simulation_are_pure(source: Source) -> list[str]:
    """planning/ imports numpy, the standard library, config and errors only; simulation/ planning besides itself."""
    return [fault for room, ours in PURE.items() for fault in _imports_outside(source, room, {"numpy"}, ours)]


def integrations_use_public_names(source: Source) -> list[str]:
    """integrations/ imports of ours what `fusedreduce` itself offers, and its own files."""
    if source.room != "integrations":
        return []
    public = {f"fusedreduce.{name}" for name in fusedreduce.__all__}
    return [
        source.fault(node, f"imports {name}, which is not one of fusedreduce's public names")
        for node, name in imports(source)
        if room_of(name) not in (None, "integrations") and name not in public
    ]


def _imports_outside(source: Source, room: str, others: set[str], ours: set[str]) -> list[str]:
    if source.room != room:
        return []
    allowed = others | sys.stdlib_module_names
    return [
        source.fault(node, f"imports {name}")
        for node, name in imports(source)
        if (room_of(name) not in ours if room_of(name) else name.split(".")[0] not in allowed)
    ]


def triton_is_guarded_once(source: Source) -> list[str]:
    """Only dispatch survives an `import triton` (or of a file that has one) that fails."""
    if source.in_any(MAY_GUARD_TRITON):
        return []
    guarded = (
        found for guard in ast.walk(source.tree) if _survives_import_error(guard) for found in imports(source, guard)
    )
    return [
        source.fault(node, f"imports {name} and carries on if that fails")
        for node, name in guarded
        if name.split(".")[0] == "triton" or room_of(name) == "kernels"
    ]


def _survives_import_error(node: ast.AST) -> bool:
    """Whether the node is a try, or a `with suppress(...)`, that catches ImportError."""
    if isinstance(node, ast.Try | ast.TryStar):
        caught = [ast.unparse(handler.type) if handler.type else "BaseException" for handler in node.handlers]
    elif isinstance(node, ast.With):
        caught = [text for item in node.items if "suppress(" in (text := ast.unparse(item.context_expr))]
    else:
        return False
    return any(re.search(r"\b(ImportError|ModuleNotFoundError|(Base)?Exception)\b", text) for text in caught)


def everything_is_annotated(source: Source) -> list[str]:
    """Every function but a @triton.jit one has its arguments and its result annotated.

    Linter and type checker are told to overlook this in the files with jit functions; this rule is not.
    """
    faults = []
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if any(re.match(r"(triton\.)?jit\b", ast.unparse(decorator)) for decorator in node.decorator_list):
            continue
        named = [*node.args.posonlyargs, *node.args.args]
        if named and named[0].arg in ("self", "cls"):
            named = named[1:]
        variadic = [argument for argument in (node.args.vararg, node.args.kwarg) if argument]
        bare = [a.arg for a in [*named, *node.args.kwonlyargs, *variadic] if a.annotation is None]
        bare += ["return"] if node.returns is None else []
        if bare:
            faults.append(source.fault(node, f"{node.name} lacks annotations: {', '.join(bare)}"))
    return faults


def one_function_waits(source: Source) -> list[str]:
    """Collectives and futures are waited for by `wait_for` alone; MAY_WAIT lists what else has a `wait`."""
    allowed = MAY_WAIT.get(source.path, set())
    return [
        source.fault(node, f"waits by {text}, and not by wait_for")
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute) and node.attr in ("wait", "wait_all", "collect_all")
        if (text := ast.unparse(node)) not in allowed
    ]


def tensors_name_device_and_dtype(source: Source) -> list[str]:
    """No tensor is made on the default device or of the default dtype, which are the user's to change."""
    faults = []
    for node in ast.walk(source.tree):
        name = re.fullmatch(r"torch\.(\w+)", ast.unparse(node.func)) if isinstance(node, ast.Call) else None
        if not isinstance(node, ast.Call) or not name:
            continue
        if name[1] in MAKES_TENSORS:
            wanted = {"device"} if DTYPE_IS_GIVEN.fullmatch(name[1]) else {"device", "dtype"}
            missing = sorted(wanted - {keyword.arg for keyword in node.keywords})
            faults += [source.fault(node, f"{name[0]} names no {' and no '.join(missing)}")] if missing else []
        elif name[1] == "load" or name[1].endswith("Tensor"):
            faults.append(source.fault(node, f"{name[0]} takes the default device or dtype"))
    imported = (found for found in imports(source) if found[1].rpartition(".")[0] == "torch")
    return faults + [
        source.fault(node, f"imports {name}: write it out, as a rule looks for that")
        for node, name in imported
        if name.rpartition(".")[2] in MAKES_TENSORS
    ]


Rule = Callable[[Source], list[str]]
RULES: tuple[Rule, ...] = (
    imports_go_down,
    kernels_stand_alone,
    planning_and_simulation_are_pure,
    integrations_use_public_names,
    triton_is_guarded_once,
    everything_is_annotated,
    one_function_waits,
    tensors_name_device_and_dtype,
)
# (the rule it breaks, where it would stand, the code)
BAD: tuple[tuple[Rule, str, str], ...] = (
    (imports_go_down, "fusedreduce/buckets/bucket.py", "from ..reducer.engine import Engine"),
    (imports_go_down, "fusedreduce/buckets/bucket.py", "from fusedreduce import parallel"),
    (imports_go_down, "fusedreduce/buckets/bucket.py", "def f() -> None:\n    import fusedreduce.parallel.hook"),
    (imports_go_down, "fusedreduce/buckets/bucket.py", "importlib.import_module('fusedreduce.parallel.hook')"),
    (imports_go_down, "fusedreduce/buckets/bucket.py", "if TYPE_CHECKING:\n    from ..reducer.plans import Plans"),
    (imports_go_down, "fusedreduce/comm/process_group.py", "from ..buckets.bucket import Bucket"),
    (imports_go_down, "fusedreduce/optim/grad_scaler.py", "from ..cli import main"),
    (imports_go_down, "fusedreduce/buckets/data_path.py", "from .. import fused_hook"),
    (imports_go_down, "fusedreduce/__init__.py", "from .cli import main"),
    (imports_go_down, "fusedreduce/kernels/pack.py", "from ..errors import FusedReduceError"),
    (imports_go_down, "fusedreduce/planning/planner.py", "from ..simulation.networks import link"),
    (imports_go_down, "fusedreduce/run/process.py", "from fusedreduce.simulation.models import MODELS"),
    (imports_go_down, "fusedreduce/unheard_of.py", ""),
    (kernels_stand_alone, "fusedreduce/kernels/pack.py", "from ..config import ReduceConfig"),
    (kernels_stand_alone, "fusedreduce/kernels/pack.py", "import fusedreduce"),
    (kernels_stand_alone, "fusedreduce/kernels/pack.py", "import scipy.special"),
    (planning_and_simulation_are_pure, "fusedreduce/planning/layout.py", "import torch"),
    (planning_and_simulation_are_pure, "fusedreduce/planning/layout.py", "from ..kernels.table import ChunkTable"),
    (planning_and_simulation_are_pure, "fusedreduce/planning/layout.py", "from fusedreduce.comm import protocol"),
    (planning_and_simulation_are_pure, "fusedreduce/simulation/simulate.py", "from ..trace.problem import problem"),
    (
        integrations_use_public_names,
        "fusedreduce/integrations/lightning.py",
        "from fusedreduce.optim.clip import x",
    ),
    (integrations_use_public_names, "fusedreduce/integrations/lightning.py", "from ..clip import clip_grad_norm_"),
    (triton_is_guarded_once, "fusedreduce/kernels/pack.py", "try: import triton\nexcept ImportError: ..."),
    (triton_is_guarded_once, "fusedreduce/parallel/hook.py", "try:\n    from ..kernels import pack\nexcept: ..."),
    (triton_is_guarded_once, "fusedreduce/parallel/hook.py", "with suppress(Exception):\n    import triton.language"),
    (everything_is_annotated, "fusedreduce/kernels/pack.py", "def pack(wire) -> None: ..."),
    (everything_is_annotated, "fusedreduce/kernels/pack.py", "def pack(*, wire: int): ..."),
    (one_function_waits, "fusedreduce/reducer/unused_parameters.py", "self._pending.wait()"),
    (one_function_waits, "fusedreduce/reducer/engine.py", "for future in installed:\n    future.wait()"),
    (one_function_waits, "fusedreduce/parallel/hook.py", "list(map(torch.futures.Future.wait, futures))"),
    (one_function_waits, "fusedreduce/parallel/hook.py", "torch.futures.wait_all(futures)"),
    (one_function_waits, "fusedreduce/comm/process_group.py", "dist.all_reduce(tensor, async_op=True).wait()"),
    (tensors_name_device_and_dtype, "fusedreduce/comm/numbers.py", "host = torch.tensor(numbers, dtype=dtype)"),
    (tensors_name_device_and_dtype, "fusedreduce/buckets/draws.py", "torch.tensor(rows, dtype=dtype).to(device)"),
    (tensors_name_device_and_dtype, "fusedreduce/kernels/encoded.py", "torch.ones(2, device=device)"),
    (tensors_name_device_and_dtype, "fusedreduce/optim/clip.py", "torch.as_tensor(largest)"),
    (tensors_name_device_and_dtype, "fusedreduce/kernels/cpu.py", "torch.Tensor([1.0])"),
    (tensors_name_device_and_dtype, "fusedreduce/kernels/cpu.py", "from torch import zeros"),
)
# (where it stands, code that breaks no rule)
GOOD: tuple[tuple[str, str], ...] = (
    ("fusedreduce/cli/__init__.py", "import fusedreduce\nimport torch.distributed\nprint(fusedreduce)"),
    ("fusedreduce/cli/demo.py", "try:\n    import matplotlib\nexcept ImportError: ..."),
    ("fusedreduce/__init__.py", "from .parallel.hook import fused_hook"),
    ("fusedreduce/integrations/lightning.py", "import lightning\nfrom fusedreduce import Reducer\nfrom . import parts"),
    ("fusedreduce/parallel/hook.py", "from torch.distributed import GradBucket\nfrom .buckets import data_path"),
    ("fusedreduce/comm/process_group.py", "import torch.distributed\nfrom .protocol import Communicator"),
    ("fusedreduce/reducer/unused_parameters.py", "wait_for(self._pending, what, self._communicator)"),
    ("fusedreduce/planning/layout.py", "import math\nimport numpy as np\nfrom ..errors import PlanError"),
    ("fusedreduce/kernels/dispatch.py", "try:\n    from . import pack\nexcept ImportError:\n    pack = None"),
    ("fusedreduce/kernels/pack.py", "import triton\n@triton.jit\ndef _pack(x, N: tl.constexpr): ..."),
    ("fusedreduce/kernels/cpu.py", "torch.zeros_like(sums), torch.from_numpy(rows), sums.new_zeros(2), torch.cat(all)"),
    ("fusedreduce/optim/clip.py", "torch.as_tensor(largest, device=device), torch.ones(1, dtype=dtype, device=device)"),
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_holds(rule: Rule) -> None:
    sources = package_sources()
    assert {"fusedreduce/__init__.py", "fusedreduce/kernels/reference.py"} <= {s.path for s in sources}
    assert [fault for source in sources for fault in rule(source)] == []


@pytest.mark.parametrize(("rule", "path", "code"), BAD)
def test_rule_bites(rule: Rule, path: str, code: str) -> None:
    assert rule(Source(path, ast.parse(code)))


@pytest.mark.parametrize(("path", "code"), GOOD)
def test_rules_let_pass(path: str, code: str) -> None:
    source = Source(path, ast.parse(code))
    assert [fault for rule in RULES for fault in rule(source)] == []


def test_folders_import_one_way() -> None:
    assert folders_import_one_way(package_sources()) == []


@pytest.mark.parametrize(
    "files",
    [
        {"comm/agreement.py": "from .protocol import Ranks", "comm/protocol.py": "from . import agreement"},
        {"buckets/a.py": "def f() -> None:\n    from .stats.b import c", "buckets/stats/b.py": "from ..a import d"},
        {"trace/a.py": "import fusedreduce.trace.b", "trace/b.py": "from .c import d", "trace/c.py": "from . import a"},
        {"collective/__init__.py": "from .session import Session", "collective/session.py": "from . import Session"},
    ],
)
def test_imports_that_go_round_are_found(files: Mapping[str, str]) -> None:
    assert folders_import_one_way([Source(f"fusedreduce/{path}", ast.parse(code)) for path, code in files.items()])


def test_no_file_is_too_small() -> None:
    lines = {path: len(file.read_text().splitlines()) for path, file in package_files(".py").items()}
    assert set(small_with_one_importer(package_sources(), lines)) == set(SMALL_WITH_ONE_IMPORTER)


def test_files_too_small_are_found() -> None:
    files = {
        "comm/one.py": "from ..errors import shortened",
        "comm/part.py": "",
        "comm/shared.py": "",
        "comm/two.py": "from . import part\nfrom .shared import a\nimport fusedreduce.comm.one",
        "comm/three.py": "def f() -> None:\n    from .shared import b",
    }
    sources = [Source(f"fusedreduce/{path}", ast.parse(code)) for path, code in files.items()]
    lines = {**dict.fromkeys((source.path for source in sources), 59), "fusedreduce/comm/one.py": 60}
    assert small_with_one_importer(sources, lines) == {"fusedreduce/comm/part.py": "fusedreduce/comm/two.py"}


def test_every_rule_is_shown_to_bite() -> None:
    assert {rule for rule, _, _ in BAD} == set(RULES)


def test_kernels_lie_outside_and_are_no_package() -> None:
    for link, target in {"fusedreduce/kernels": "../kernels", ".editable/fusedreduce": "../fusedreduce"}.items():
        assert os.readlink(ROOT / link) == target
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not (ROOT / "tests" / "__init__.py").exists()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the checkout, built from a copy: setuptools leaves files behind and picks up old ones."""
    copy = tmp_path_factory.mktemp("build") / "copy"
    without_caches = shutil.ignore_patterns("__pycache__")
    for folder in ("fusedreduce", "kernels", ".editable"):
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=without_caches)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy2(path, copy)
    out = tmp_path_factory.mktemp("wheel")
    _run("-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(copy), cwd=out)
    [built] = out.glob("*.whl")
    return built


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = wheel.name.split("-py3")[0] + ".dist-info"
        scripts = archive.read(f"{info}/entry_points.txt").decode()
        metadata = archive.read(f"{info}/METADATA").decode()
    expected = set(package_files(".py")) | {"fusedreduce/py.typed"}
    assert {name for name in names if not name.startswith(f"{info}/")} == expected
    assert f"{info}/licenses/LICENSE" in names
    assert "fusedreduce = fusedreduce.cli:main" in scripts
    assert "\nLicense-Expression: BSD-3-Clause\n" in metadata
    assert "\nRequires-Python: >=3.11\n" in metadata


PROBE = """
import json, sys
from importlib.util import find_spec
sys.path[:0] = sys.argv[1:]
found = [find_spec(name) for name in ("fusedreduce", "fusedreduce.kernels.reference", "kernels")]
print(json.dumps([one and str(one.origin) for one in found]))
"""


def test_wheel_installs_no_top_level_kernels(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    pip = ("-m", "pip", "--isolated", "install", "--no-index", "--no-deps", "--no-compile")
    _run(*pip, "--target", str(target), str(wheel), cwd=tmp_path)
    # -S: no .pth file is read, so the checkout's own editable install is out of sight, its import hook too.
    package, reference, kernels = json.loads(_run("-I", "-S", "-c", PROBE, str(target), cwd=tmp_path))
    assert Path(package) == target / "fusedreduce" / "__init__.py"
    assert Path(reference) == target / "fusedreduce" / "kernels" / "reference.py"
    assert kernels is None


def test_this_install_has_no_top_level_kernels(tmp_path: Path) -> None:
    package, reference, kernels = json.loads(_run("-I", "-c", PROBE, cwd=tmp_path))
    assert Path(package).name == "__init__.py"
    assert Path(reference).name == "reference.py"
    assert kernels is None


def test_type_checkers_see_this_install(tmp_path: Path) -> None:
    """Also an editable one: they read the folders on the path, and know nothing of import hooks."""
    program = "import fusedreduce, fusedreduce.kernels.encodings"
    mypy = ("-m", "mypy", "--config-file=", "--cache-dir=/dev/null", "--follow-imports=skip", "-c", program)
    assert _run("-I", *mypy, cwd=tmp_path) == "Success: no issues found in 1 source file"


def _run(*arguments: str, cwd: Path) -> str:
    """Run this interpreter on the arguments and return the last line that it printed."""
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(arguments)}\n{done.stdout}\n{done.stderr}"
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""


def test_the_public_names_import_no_compiler() -> None:
    """torch._dynamo takes a second: torch imports it itself when a module is wrapped. triton is for CUDA tensors."""
    program = """if True:
        import sys, torch, fusedreduce
        from fusedreduce import *
        from fusedreduce.kernels import dispatch, table
        chunks = table.ChunkTable([3], [0], [torch.float32], 3)
        dispatch.pack([torch.ones(3)], chunks, table.PointerTable(), torch.empty(3), 2.0)
        print([name for name in ("torch._dynamo", "triton") if name in sys.modules])
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"


def test_on_cpu_every_wire_works_without_triton_and_with_none_of_the_commands() -> None:
    program = """if True:
        import sys
        sys.modules["triton"] = None  # an import of it fails
        import torch, fusedreduce
        import fusedreduce.integrations.lightning_parts, fusedreduce.run.process
        from torch import nn
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        for wire in ("native", "bf16", "fp16", "int8", "int4"):
            config = fusedreduce.ReduceConfig(wire=wire, grad_stats=True, check_finite="raise")
            ddp = fusedreduce.DistributedDataParallel(nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 1)), reduce=config)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
            scaler = fusedreduce.FusedGradScaler(ddp, device="cpu")
            for step in range(3):
                optimizer.zero_grad()
                scaler.scale(ddp(torch.ones(4, 40)).square().mean()).backward()
                scaler.unscale_(optimizer)
                fusedreduce.clip_grad_norm_(ddp, 1.0)
                scaler.step(optimizer)
                scaler.update()
            assert ddp.reduce_stats()["steps"] == 3 and ddp.grad_norm() > 0
            state = fusedreduce.FusedHookState(wire=wire)
            theirs = nn.parallel.DistributedDataParallel(nn.Linear(40, 1))
            theirs.register_comm_hook(state, fusedreduce.fused_hook)
            theirs(torch.ones(4, 40)).sum().backward()
        torch.distributed.destroy_process_group()
        commands = ("fusedreduce.cli", "fusedreduce.simulation", "fusedreduce.kernels.aot")
        print("trained", *(name for name in sys.modules if name.startswith(commands)))
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.strip() == "trained", done.stderr


@pytest.mark.parametrize(("head", "cls"), [("| method | called |", Mode), ("| moment | when |", StepFeature)])
def test_a_table_of_the_design_page_has_every_method(head: str, cls: type) -> None:
    text = (ROOT / "docs" / "design.md").read_text()
    rows = itertools.takewhile(lambda row: row.startswith("|"), text.partition(head)[2].splitlines()[2:])
    methods = {name for name, one in vars(cls).items() if callable(one) and not name.startswith("_")}
    assert methods == {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
