"""The pages of docs/frameworks: the scripts that they hold, and the commands that run them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "docs" / "frameworks"
MOST_LINES = 70  # of at most 96 characters: tests/test_docs_examples.py
WIRES = ("native", "bf16")


class Run(NamedTuple):
    """One run of a script: what to type, on each node."""

    lines: tuple[str, ...]
    reference: bool = False  # torch's own wrapper, which the others are compared with

    @property
    def exact(self) -> bool:
        """Whether it must end with the bits of the reference."""
        return not any(re.search(r"\bbf16\b", line) for line in self.lines)


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", (FOLDER / f"{page}.md").read_text(), re.S | re.M)


def scripts(page: str) -> dict[str, str]:
    """The complete scripts of a page, by the name in their first line."""
    found = {}
    for code in blocks(page, "python"):
        named = re.match(r"# (\w+\.py)\b", code)
        if named is None:
            raise ValueError(f"{page}.md: a script's first line names its file, got {code.splitlines()[0]!r}")
        found[named[1]] = code
    return found


def runs(page: str) -> dict[str, list[Run]]:
    """What `make integrations` runs, by script: each command of the page with torch's wrapper and each wire.

    A page shows the wire bf16. "torch" in its place gives the reference, except where `fusedreduce.run` has it. Lines
    that end with `# node 0` and `# node 1` belong together.
    """
    found: dict[str, list[Run]] = {name: [] for name in scripts(page)}
    for lines in _commands(page):
        (name,) = {one for one in found if any(one in line for line in lines)}
        if not found[name]:
            found[name].append(Run(_with(lines, "torch"), reference=True))
        wired = any("bf16" in line for line in lines)
        found[name] += [Run(_with(lines, wire)) for wire in WIRES] if wired else [Run(lines)]
    return found


def _with(lines: tuple[str, ...], wire: str) -> tuple[str, ...]:
    return tuple(re.sub(r"\bbf16\b", wire, line) for line in lines)


def _commands(page: str) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for line in re.sub(r" *\\\n *", " ", "".join(blocks(page, "sh"))).splitlines():
        node = re.search(r" +# node (\d)$", line)
        command = line[: node.start()] if node else line
        if node is None or node[1] == "0":
            found.append((command,))
        else:
            found[-1] += (command,)
    return found
