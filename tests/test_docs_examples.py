"""The examples of docs/modes.md, docs/in_process.md and of the README's section on them run as they stand.

Ranks are threads of this process. Where an example starts torch.distributed, it gets torch's fake backend (see
ranks.group_of_one).
"""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("docs/modes.md", "docs/in_process.md", "README.md")
_IN_PROCESS = re.compile(r"LocalGroup\(|[^d]DataParallel\(")


def examples() -> Iterator[Any]:
    """Every block of Python of these pages that imports what it uses; of the README, those that need no launcher."""
    for page in PAGES:
        text = (ROOT / page).read_text()
        for begin in re.finditer(r"```python\n(.*?)```", text, re.S):
            code = begin[1]
            if "import" not in code or (page == "README.md" and not _IN_PROCESS.search(code)):
                continue
            line = text[: begin.start(1)].count("\n") + 1
            yield pytest.param(page, line, code, id=f"{Path(page).stem}-{line}")


@pytest.fixture
def fake_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    init = dist.init_process_group

    def started(backend: str, *, rank: int, world_size: int, **_: object) -> None:
        init("fake", store=FakeStore(), rank=rank, world_size=world_size)

    monkeypatch.setattr(dist, "init_process_group", started)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "")  # so that what an example sets goes again
        monkeypatch.delenv(name)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(("page", "line", "code"), list(examples()))
def test_an_example_runs_and_leaves_no_thread(fake_group: None, page: str, line: int, code: str) -> None:
    before = threading.active_count()
    torch.manual_seed(0)
    exec(compile("\n" * (line - 1) + code, str(ROOT / page), "exec"), {"__name__": "example"})
    gc.collect()
    assert threading.active_count() == before, f"threads of the example at {page}:{line} are still there"


def test_every_page_has_examples() -> None:
    pages = [one.values[0] for one in examples()]
    assert {page: pages.count(page) for page in PAGES}.keys() == set(PAGES)
    assert pages.count("docs/modes.md") >= 4 and pages.count("docs/in_process.md") >= 6
    assert pages.count("README.md") == 2
