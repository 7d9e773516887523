"""Every code block of README.md, CONTRIBUTING.md and docs/ says what is so.

Blocks of Python run as they stand, in a process group of one where they use one, with the names of `given` for what a
fragment leaves out; ranks of a LocalGroup are threads of this process. What a diff leaves runs as well. The scripts of
docs/frameworks are compiled, and import from fusedreduce what there is; `make integrations` runs them. Of shell blocks
the targets, commands, modules, scripts and options exist.
"""

from __future__ import annotations

import ast
import dataclasses
import gc
import importlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fusedreduce
from fusedreduce.cli import bench
from fusedreduce.run.options import OTHERS, flag

ROOT = Path(__file__).resolve().parent.parent
# What the site shows between its two sidebars, without a bar to scroll, from 1280 pixels on (docs/_static/site.css).
WIDEST = tomllib.loads((ROOT / "docs" / "ruff.toml").read_text())["line-length"]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
LANGUAGES = {"python", "sh", "diff", "text", "json", "{toctree}"}
# What `make integrations` runs, in an environment with what it imports.
RUN_ELSEWHERE = {page for page in PAGES if page.parent.name == "frameworks" and page.name != "plain_torch.md"}
# Whose blocks are files that import each other: `test_a_wire_of_ones_own_is_one_file_and_one_line` runs them.
OF_FILES = ROOT / "docs" / "own_wire.md"
SCRIPTS_OF_TARGETS = {
    "conformance": "tests/conformance/run.py",
    "demo": "fusedreduce/cli/demo.py",
    "gpu-check": "perf/gpu_check.py",
    "versions": "tests/versions/run.py",
}


class Block(NamedTuple):
    """A fenced block of a page, and the number of its first line."""

    page: Path
    line: int
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(*languages: str) -> Iterator[Block]:
    for page in PAGES:
        text = page.read_text()
        for found in re.finditer(r"^( *)```(\S+)[^\n]*\n(.*?)^ *```$", text, re.M | re.S):
            if not languages or found[2] in languages:
                code = re.sub(f"^{found[1]}", "", found[3], flags=re.M)
                yield Block(page, text.count("\n", 0, found.start(3)) + 1, found[2], code)


def is_python(code: str) -> bool:
    try:
        ast.parse(code)
    except SyntaxError:
        return False
    return True


def left_by(diff: Block) -> Block:
    """What a diff leaves, a program or commands."""
    lines = [line for line in diff.code.splitlines() if not line.startswith("-")]
    shift = min(len(line[1:]) - len(line[1:].lstrip()) for line in lines if line[1:].strip())
    code = "".join(line[1 + shift :] + "\n" for line in lines)
    return diff._replace(code=code, language="python" if is_python(code) else "sh")


def imported(block: Block) -> Iterator[tuple[str, str]]:
    """Module and name of everything that a block imports."""
    for node in ast.walk(ast.parse(block.code)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)


def runs_here(block: Block) -> bool:
    tops = {module.partition(".")[0] for module, _ in imported(block)}
    return block.page not in (*RUN_ELSEWHERE, OF_FILES) and all(importlib.util.find_spec(top) for top in tops)


DIFFS = [left_by(block) for block in blocks("diff")]
PROGRAMS = [*blocks("python"), *(block for block in DIFFS if block.language == "python")]
COMMANDS = [*blocks("sh"), *(block for block in DIFFS if block.language == "sh")]


def given() -> dict[str, Any]:
    """What fragments take for granted, by the names that all pages use for it."""
    model = nn.Linear(8, 1)
    names = {name: getattr(fusedreduce, name) for name in fusedreduce.__all__}
    return names | {
        "__name__": "example",
        "fusedreduce": fusedreduce,
        "torch": torch,
        "model": model,
        "torch_ddp": nn.parallel.DistributedDataParallel(nn.Linear(8, 1)),
        "ddp": fusedreduce.DistributedDataParallel(model),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.01),
        "data": [torch.ones(4, 8), torch.zeros(4, 8)],
        "loss_of": lambda output: output.square().mean(),
        "train": lambda *_: None,
    }


@pytest.fixture
def torchrun_of_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A folder to work in, torchrun's variables, and torch's fake backend, for the reason in ranks.group_of_one."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    init = dist.init_process_group

    def started(*_: object, **__: object) -> None:
        init("fake", store=FakeStore(), rank=0, world_size=1)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dist, "init_process_group", started)
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in (variables | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"}).items():
        monkeypatch.setenv(name, value)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("block", [one for one in PROGRAMS if runs_here(one)], ids=str)
def test_an_example_runs_and_leaves_no_thread(path: str, torchrun_of_one: None, block: Block) -> None:
    before = threading.active_count()
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "example"}
    if not re.search(r"init_process_group\(|LocalGroup\(|[^d]DataParallel\(|SyncServer\(", block.code):
        dist.init_process_group("fake")
        names = given()
    exec(compile("\n" * (block.line - 1) + block.code, str(block.page), "exec"), names)
    names.clear()
    gc.collect()
    assert threading.active_count() == before, f"threads of the example at {block} are still there"


def test_what_runs_elsewhere_compiles_and_imports_what_there_is() -> None:
    for block in PROGRAMS:
        compile("\n" * (block.line - 1) + block.code, str(block.page), "exec")
        for module, name in imported(block):
            if module.startswith("fusedreduce.integrations."):  # it imports what is not installed here
                assert importlib.util.find_spec(module), f"{block}: there is no {module}"
            elif module.partition(".")[0] == "fusedreduce":
                assert not name or hasattr(importlib.import_module(module), name), f"{block}: {module} has no {name}"


@pytest.mark.parametrize("block", COMMANDS, ids=str)
def test_a_command_exists_with_its_options(block: Block) -> None:
    for line in block.code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and "=" in words[0]:
            del words[0]
        if words:
            fault = fault_of(words)
            assert not fault, f"{block}: {line.strip()}: {fault}"


def fault_of(words: list[str]) -> str:
    """What is wrong with a command of ours; "" for others'."""
    match words:
        case ["srun", *rest]:
            programs = [place for place, word in enumerate(rest) if word in ("python", "torchrun", "fusedreduce")]
            return fault_of(rest[programs[0] :]) if programs else ""
        case ["make", target, *arguments]:
            targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
            if target not in targets:
                return f"make has no target {target}"
            options = [word for one in arguments for word in shlex.split(one.partition("=")[2])]
            return missing_option(options, ROOT / SCRIPTS_OF_TARGETS[target]) if any(options) else ""
        case ["pip", "install", *what]:
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            asked = [extra for one in what for extra in re.findall(r"^(?:\.|fusedreduce)\[(.*)\]$", one)]
            return "".join(f"there is no extra {extra}" for extra in asked if extra not in extras)
        case ["fusedreduce", "bench", name, *options]:
            script = bench.scripts(ROOT).get(name)
            return missing_option(options, script) if script else f"there is no benchmark {name}"
        case ["fusedreduce", "run", *options]:
            return missing_option(options, ROOT / "fusedreduce" / "run" / "__init__.py")
        case ["fusedreduce", command, *options] if not command.startswith("-"):
            script = ROOT / "fusedreduce" / "cli" / f"{command}.py"
            return missing_option(options, script) if script.is_file() else f"there is no command {command}"
        case ["python" | "torchrun", *rest] if "-m" in rest:
            module, *options = rest[rest.index("-m") + 1 :]
            if module in ("fusedreduce", "fusedreduce.cli"):
                return fault_of(["fusedreduce", *options])
            spec = importlib.util.find_spec(module) if module.startswith("fusedreduce.") else None
            if spec is None or spec.origin is None:
                return f"there is no module {module}" if module.startswith("fusedreduce.") else ""
            return missing_option(options, Path(spec.origin))
    return ""


def missing_option(words: list[str], script: Path) -> str:
    """The first option, up to another program's name, that neither the sources of `script` nor ReduceConfig names."""
    sources = script.parent.glob("*.py") if script.name == "__init__.py" else [script, *script.parent.glob("simul*.py")]
    text = "".join(source.read_text() for source in sources)
    fields = {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(fusedreduce.ReduceConfig)}
    fields |= {flag(name) for name in OTHERS}
    for word in words:
        if word in ("--", "-m") or word.endswith(".py"):
            break
        option = word.partition("=")[0]
        if option.startswith("--") and option not in {"--help", *fields} and f'"{option}"' not in text:
            return f"there is no option {option}"
    return ""


@pytest.mark.parametrize(
    "command",
    [
        "make tests",
        "make conformance ARGS='--worlds 3'",
        "pip install '.[demos]'",
        "fusedreduce benchmark",
        "fusedreduce bench kernel",
        "fusedreduce plan --simulated",
        "fusedreduce run --wires int8 train.py",
        "python -m fusedreduce.kernels.aots",
        "torchrun --nproc-per-node=2 -m fusedreduce.kernels.aot --archs",
        "srun --nodes=4 torchrun --nnodes=4 -m fusedreduce.runs train.py",
    ],
)
def test_a_wrong_command_is_found(command: str) -> None:
    assert fault_of(shlex.split(command))


@pytest.mark.parametrize("page", ["README.md", "docs/start.md"])
def test_launches_are_shown_for_several_machines_before_one(page: str) -> None:
    launches = [block.code for block in blocks("sh") if block.page == ROOT / page and "torchrun " in block.code]
    assert len(launches) > 1 and "--nnodes=" in launches[0] and "--rdzv-endpoint=HOST:" in launches[0]


def test_code_is_no_wider_than_the_site_shows() -> None:
    wide = [
        f"{block.page.relative_to(ROOT)}:{block.line + nth}: {len(line)} characters"
        for block in blocks()
        for nth, line in enumerate(block.code.splitlines())
        if len(line) > WIDEST
    ]
    assert not wide, "\n".join(wide)


def test_every_block_names_its_language_and_every_page_is_read() -> None:
    assert {block.language for block in blocks()} <= LANGUAGES
    fences = sum(len(re.findall(r"^ *```", page.read_text(), re.M)) for page in PAGES)
    assert fences == 2 * len(list(blocks()))
    ran = [block.page.stem for block in PROGRAMS if runs_here(block)]
    least = {"modes": 5, "in_process": 7, "plain_torch": 3, "README": 2, "start": 1, "wires": 1, "kernels": 1}
    assert all(ran.count(page) >= count for page, count in least.items())


def test_the_example_of_the_kernels_does_what_its_comments_say() -> None:
    packer, _, packing, encoding = (block.code for block in blocks("python") if block.page.name == "kernels.md")
    first: dict[str, Any] = {}
    exec(packer, first)
    assert first["gradients"][0].abs().max() < 1.5, "divided by 4"
    seen: dict[str, Any] = {}
    exec(packing, seen)
    gradients, totals = seen["gradients"], seen["totals"]
    assert gradients[2] is None and gradients[0].abs().max() < 1.0, "divided by 4, and halved"
    stored = torch.stack([4.0 * one.double().square().sum() for one in gradients[:1]])
    torch.testing.assert_close(totals.parameter_sums[:1], stored, rtol=1e-6, atol=0)
    exec(encoding.replace("bucket = ", "before = [one.clone() for one in weights]\nbucket = ", 1), seen)
    for before, after in zip(seen["before"], seen["weights"], strict=True):
        assert 0 < (before - after).abs().max() < before.abs().max() / 127


def test_a_wire_of_ones_own_is_one_file_and_one_line(tmp_path: Path) -> None:
    in_torch, line, test, in_triton, compiled, blocks_of_64 = (
        one.code for one in blocks("python") if one.page == OF_FILES
    )
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)]), "PATH": os.environ["PATH"]}
    (tmp_path / "test_my_wire.py").write_text(test)
    (tmp_path / "compiles.py").write_text(compiled)
    (tmp_path / "line.py").write_text(f"{line}assert config.wire_dtype(None).itemsize == 2\n")
    # pytest imports what it is given, so the line has run before the test in the same process.
    rounds_to_nearest = re.sub(r"(?m)^    return torch.where.*", "    return values.to(torch.bfloat16)", in_torch)
    for code, more, end in (
        (in_torch, [], "2 passed"),
        (in_triton + blocks_of_64, ["compiles.py"], "2 passed"),
        (rounds_to_nearest, [], "2 failed"),
    ):
        (tmp_path / "my_wire.py").write_text(code)
        pytest_run = [sys.executable, "-B", "-m", "pytest", "-q", "-p", "no:cacheprovider", "line.py", *more]
        done = subprocess.run(
            [*pytest_run, "test_my_wire.py"], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert re.search(rf"^{end}\b", done.stdout, re.M), f"{done.stdout}{done.stderr}"
        assert done.returncode == ("failed" in end)


def test_the_reference_has_every_public_name() -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.rst"))
    documented = set(
        re.findall(r"^\.\. (?:auto(?:class|function|exception|module)|data):: (?:\w+\.)*(\w+)$", pages, re.M)
    )
    assert set(fusedreduce.__all__) <= documented
    errors = {
        name for name in fusedreduce.collective.__all__ if name in vars(fusedreduce.collective.errors)
    }  # one automodule has all of them
    assert set(fusedreduce.collective.__all__) - errors <= documented and "errors" in documented


def test_every_name_of_ours_in_the_tables_of_names_is_used_by_a_program_of_that_page() -> None:
    """The programs run, so every name resolves. `option=` is an argument of some call there."""
    used: set[str] = set()
    for block in blocks("python"):
        if block.page.name == "names.md":
            for node in ast.walk(ast.parse(block.code)):
                if isinstance(node, ast.Attribute | ast.Name):
                    used.add(ast.unparse(node))
                elif isinstance(node, ast.keyword):
                    used |= {f"{node.arg}=", f"{node.arg}={ast.unparse(node.value)}".replace("'", '"')}
    text = (ROOT / "docs" / "names.md").read_text()
    rows = [line.strip("|").split(" | ") for line in text.splitlines() if re.match(r"\| (?!of )", line)]
    assert len(rows) > 90 and all(len(cells) == 2 for cells in rows), "a table of two columns"
    prose = text.partition("## Samplers")[2].partition("## The programs")[0]
    codes = [code for _, ours in rows for code in re.findall("`([^`]+)`", ours)] + re.findall("`([^`]+)`", prose)
    named = {code.partition("(")[0] for code in codes}
    assert len(named) > 120 and not named - used


def test_the_site_has_at_most_nine_parts_and_every_page_is_in_one() -> None:
    docs = ROOT / "docs"
    parts = toctree(docs / "index.md")
    assert 0 < len(parts) <= 9
    reached, left = {docs / "index.md"}, [docs / "index.md"]
    while left:
        page = left.pop()
        found = {one for pattern in toctree(page) for one in docs.glob(str((page.parent / pattern).relative_to(docs)))}
        left += found - reached
        reached |= found
    assert reached == {*docs.rglob("*.md"), *docs.rglob("*.rst")}


def toctree(page: Path) -> list[str]:
    """The files that a page's toctree names, as patterns: of Markdown and reStructuredText."""
    (code,) = re.findall(r"```\{toctree\}\n(.*?)```", page.read_text(), re.S) or [""]
    entries = [line for line in code.splitlines() if line and not line.startswith(":")]
    return [entry.rpartition("<")[2].rstrip(">") + ".*" for entry in entries]
