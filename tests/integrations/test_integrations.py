"""What can be said of fusedreduce/integrations and docs/frameworks without the packages that they are for.

`make integrations` runs the rest, with those.
"""

from __future__ import annotations

import builtins
import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pages
import pytest
import run_pages
import torch
from test_packaging import ROOT

import fusedreduce.integrations
from fusedreduce.integrations import lightning_parts

PAGES = [part.name for part in run_pages.PARTS if not part.cases]


@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
def test_a_missing_package_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any) -> ModuleType:
        if name.split(".")[0] in ("lightning", "lightning_fabric", "pytorch_lightning") and args[-1:] == (0,):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.delitem(sys.modules, f"fusedreduce.integrations.{package}", raising=False)
    with pytest.raises(ImportError, match=rf"needs the package {package}, 2\.6 or later.*No module named"):
        importlib.import_module(f"fusedreduce.integrations.{package}")


def test_the_folder_itself_imports_nothing() -> None:
    assert [name for name in vars(fusedreduce.integrations) if not name.startswith("__")] in ([], ["lightning_parts"])


def test_what_folds() -> None:
    weights = [torch.nn.Parameter(torch.ones(2))]
    folding = [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW]
    assert all(lightning_parts.can_fold(kind(weights, lr=0.1, fused=True)) for kind in folding)
    assert not any(lightning_parts.can_fold(kind(weights, lr=0.1)) for kind in folding)
    assert not lightning_parts.can_fold(torch.optim.Adagrad(weights, fused=True))
    mixed = torch.optim.AdamW([{"params": weights, "fused": False}], fused=True)
    assert not lightning_parts.can_fold(mixed)


def test_names_of_strategies() -> None:
    seen: dict[str, Any] = {}

    class Registry:
        def register(self, name: str, strategy: type, **kwargs: Any) -> None:
            seen[name] = (strategy, kwargs["reduce"].wire, kwargs.get("find_unused_parameters", False))

    lightning_parts.register(Registry(), str)
    assert seen["fused_ddp"] == (str, "native", False)
    assert seen["fused_ddp_bf16_find_unused_parameters_true"] == (str, "bf16", True)
    assert seen["fused_ddp_int4"] == (str, "int4", False)
    assert len(seen) == 10


def test_every_page_is_run_and_no_other() -> None:
    assert {path.stem for path in pages.FOLDER.glob("*.md")} - {"record", "plain_torch"} == set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_scripts_are_short_and_compile(page: str) -> None:
    found = pages.scripts(page)
    assert found
    for name, code in found.items():
        lines = code.splitlines()
        assert len(lines) <= pages.MOST_LINES, f"{name} has {len(lines)} lines"
        compile(code, f"{page}.md:{name}", "exec")


@pytest.mark.parametrize("page", PAGES)
def test_every_script_has_a_reference_and_both_kinds_of_run(page: str) -> None:
    for name, commands in pages.runs(page).items():
        assert [one.reference for one in commands] == [True, *[False] * (len(commands) - 1)], name
        assert any(one.exact for one in commands[1:]) and any(not one.exact for one in commands), name
        assert all(name in line for one in commands for line in one.lines)
        assert not any("bf16" in line or "fusedreduce.run" in line for line in commands[0].lines)


def test_what_is_compared() -> None:
    reference = {"losses": [1.0, 0.5], "weights": "a"}
    exact, rounded = pages.Run(("python x.py native",)), pages.Run(("python x.py bf16",))
    assert exact.exact and not rounded.exact
    assert "bit for bit" in run_pages.compared(exact, reference, dict(reference))
    assert "within 2.0e-02" in run_pages.compared(rounded, reference, {"losses": [1.0, 0.51], "weights": "b"})
    for one, found in (
        (exact, {"losses": [1.0, 0.51], "weights": "a"}),
        (exact, {"losses": [1.0, 0.5], "weights": "b"}),
        (exact, {**reference, "reducer": "torch._C._distributed_c10d"}),
        (exact, {**reference, "resumed": False}),
        (rounded, {"losses": [1.0, 0.6], "weights": "b"}),
        (rounded, reference),
    ):
        with pytest.raises(run_pages.Failed):
            run_pages.compared(one, reference, found)
    with pytest.raises(run_pages.Failed, match="other keys"):
        run_pages.compared(exact, {**reference, "keys": ["a"]}, {**reference, "keys": ["module.a"]})


def test_a_command_that_hangs_is_ended_with_what_it_started(tmp_path: Path) -> None:
    marker = f"fusedreduce-hangs-{tmp_path.name}"
    child = f"[sys.executable, '-c', 'import time; time.sleep(60)', '{marker}']"
    (tmp_path / "hangs.py").write_text(f"import subprocess, sys\nsubprocess.Popen({child}).wait()")
    with pytest.raises(run_pages.Failed, match="none within"):
        run_pages.execute((f"{sys.executable} hangs.py",), tmp_path, 0.7)
    assert marker not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout


def test_versions_are_pinned() -> None:
    pinned = (ROOT / "tests/integrations/constraints.txt").read_text()
    assert re.search(r"^torch==[\d.]+$", pinned, re.M), "no local version: it stands for the CPU build too"
    assert not re.search(r"^(?!#)(?!\S+==\S+$).+$", pinned, re.M)
    for name in (ROOT / "tests/integrations/requirements.txt").read_text().splitlines():
        if not name.startswith("#"):
            assert f"\n{name.split('[')[0]}==" in pinned, name


def test_the_record_reads_as_a_table() -> None:
    rows = [
        run_pages.Row("ray", "ray 1", "`python x.py`", "as | it is", 2.4, True),
        run_pages.Row("ray", "ray 1", "y", "no", 0, False),
    ]
    page = run_pages.record(rows, "| ray | old |\n| trainer | t 1 | kept |\n| part | x |\n")
    assert "| ray | ray 1 | `python x.py` | as / it is | 2 | " in page
    assert "| ray | ray 1 | y | **failed** no |  | " in page
    assert page.index("| trainer | t 1 | kept |\n") < page.index("| ray |")
    assert "old" not in page and page.count("| part |") == 1
