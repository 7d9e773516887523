"""The page for those who depend on fusedreduce lists the private names of torch that the package uses, all of them."""

from __future__ import annotations

import ast
import contextlib
import inspect
import pydoc
import re
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import fusedreduce

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "depending.md"
PRIVATE = re.compile(r"_[A-Za-z][A-Za-z0-9_]*[A-Za-z0-9_]")
PATH = re.compile(r"torch\.[\w.]*\b_[a-zA-Z][\w.]*")
# Classes of torch's whose private names ours take over, set or override, so that the package defines them too.
TAKEN_OVER: tuple[type, ...] = (
    DistributedDataParallel,
    dist.Reducer,  # type: ignore[attr-defined]
    dist.Logger,  # type: ignore[attr-defined]
    dist.ProcessGroup,
    Join,
    torch.Tensor,
    torch.nn.Module,
    torch.amp.GradScaler,
    torch.optim.Optimizer,
)
# Names that look as if they were torch's: whose they are.
OTHERS = {
    "_after_closure": "Lightning",
    "_backward_hooks": "ours",
    "_ddp_comm_hook": "Lightning",
    "_ddp_comm_state": "Lightning",
    "_ddp_comm_wrapper": "Lightning",
    "_ddp_kwargs": "Lightning",
    "_determine_ddp_device_ids": "Lightning",
    "_exit": "os",
    "_find_unused_parameters_true": "Lightning",
    "_fusedreduce_making": "ours",
    "_getframe": "sys",
    "_grad": "ours",
    "_grad_fn": "ours",
    "_is_owned": "threading",
    "_patch_lang_tensor": "Triton",
    "_slotnames": "copyreg",
}


@cache
def nodes() -> list[ast.AST]:
    """All of the package's sources."""
    files = (path for folder in ("fusedreduce", "kernels") for path in (ROOT / folder).rglob("*.py"))
    own = [path for path in files if not path.is_relative_to(ROOT / "fusedreduce" / "kernels")]
    return [node for path in own for node in ast.walk(ast.parse(path.read_text()))]


def private_names() -> set[str]:
    """Names with an underscore in front that the package does not define itself, or that classes of torch have."""
    used, defined = set[str](), set[str]()
    for node in nodes():
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                defined.add(name)
            case ast.Attribute(attr=name):
                used.add(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                defined.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                defined.add(name)
            case ast.ImportFrom(module=str(module), level=0, names=names):
                used.update(module.split("."), (one.name for one in names))
            case ast.Import(names=names):
                used.update(part for one in names for part in one.name.split("."))
            case ast.Constant(value=str(name)):
                used.add(name)
    theirs = set[str]()
    for kind in TAKEN_OVER:
        theirs |= set(dir(kind))
        with contextlib.suppress(OSError):  # C++ has no source
            theirs |= set(re.findall(r"self\.(_\w+)", inspect.getsource(kind)))
    found = (used - defined) | ((used | defined) & theirs)
    return {name for name in found if PRIVATE.fullmatch(name)}


@cache
def private_paths() -> set[str]:
    """What the package reaches through private modules of torch's, written out."""
    found = set[str]()
    inner = {id(node.value) for node in nodes() if isinstance(node, ast.Attribute)}
    for node in nodes():
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            found.add(ast.unparse(node))
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {f"{node.module}.{one.name}" for one in node.names}
        elif isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
    return {path for path in found if PATH.fullmatch(path)}


def listed() -> set[str]:
    """The names in the page's table."""
    section = PAGE.read_text().partition("## Private names of torch")[2].partition("\n## ")[0]
    rows = [line.split("|")[2] for line in section.splitlines() if line.startswith("| ")]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def test_the_page_lists_every_private_name_of_torchs() -> None:
    names = private_names()
    assert OTHERS.keys() <= names, "one that is no longer used"
    shown = {part for name in listed() for part in name.split(".") if PRIVATE.fullmatch(part)}
    assert shown == names - OTHERS.keys()
    assert {name for name in listed() if name.startswith("torch.")} == private_paths()


def test_what_this_torch_has_of_them_is_where_the_page_says() -> None:
    for path in private_paths():
        if "._cuda_" not in path or torch.cuda._is_compiled():
            assert pydoc.locate(path) is not None, path


def test_the_page_names_this_version() -> None:
    minor = ".".join(fusedreduce.__version__.split(".")[:2])
    assert f"`fusedreduce>={minor},<" in PAGE.read_text()
