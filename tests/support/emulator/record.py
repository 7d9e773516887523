"""What has run of each architecture's kernels: emulated.json, and a table of docs/kernels.md.

    PYTHONPATH=tests python -m support.emulator.record          # runs everything, and writes both
    PYTHONPATH=tests python -m support.emulator.record --page   # the table alone, of what was recorded

`make emulate` is the first; test_emulated_kernels.py compares.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fusedreduce.kernels.aot import TARGETS
from support.cuda.fake_driver import CHECKOUT, run_compiled
from support.machine_code.record import RECORD as COMPILED
from support.machine_code.record import load as load_compiled

RECORD = Path(__file__).with_name("emulated.json")
PAGE = Path(CHECKOUT) / "docs" / "kernels.md"
SCRIPT = Path(CHECKOUT) / "tests" / "kernels" / "test_emulated_kernels.py"
EMULATED = tuple(name for name, target in TARGETS.items() if target.key[0] == "cuda")
# Where every test marked `gpu` has passed, by architecture.
ON_HARDWARE: Mapping[str, str] = {"sm_90": "H100, torch 2.11, Triton 3.6: every GPU test, at commit f75abe7"}
_BEGIN, _END = "<!-- begin emulated: written by make emulate -->", "<!-- end emulated -->"


def entry(found: Mapping[str, Any]) -> list[int]:
    """What is recorded of one part: kernels that were run, values that were compared."""
    return [len(found["launched"]), found["values"]]


def load() -> dict[str, dict[str, list[int]]]:
    """Of each architecture each part's entry."""
    recorded: dict[str, dict[str, list[int]]] = json.loads(RECORD.read_text())
    return recorded


def table() -> str:
    """A row for each architecture that kernels are compiled for."""
    recorded, compiled = load(), load_compiled(COMPILED.read_text())
    lines = ["| architecture | compiled | run by the emulator | run on hardware |", "|---|---|---|---|"]
    for name, target in TARGETS.items():
        kernels = sum(place.target == name and row.unsupported is None for place, row in compiled.rows.items())
        parts = recorded.get(name, {}).values()
        run = f"{sum(one for one, _ in parts)} kernels, {sum(one for _, one in parts):,} values"
        none = "-" if target.key[0] == "cuda" else "it reads PTX alone"
        there = f"{kernels or 'by make versions'} | {run if parts else none} | {ON_HARDWARE.get(name, 'not yet')}"
        lines.append(f"| {name} | {there} |")
    return "\n".join(lines)


def written(page: str) -> str:
    """The page with this table between its markers."""
    assert page.count(_BEGIN) == page.count(_END) == 1, f"{PAGE.name} lacks the markers"
    return re.sub(f"{_BEGIN}.*{_END}", lambda _: f"{_BEGIN}\n\n{table()}\n\n{_END}", page, flags=re.DOTALL)


def main() -> int:
    """Runs, and writes; 1 if something was wrong, which is then not recorded."""
    from support.emulator.kernels import PARTS

    faults = []
    if "--page" not in sys.argv:
        recorded = {}
        for name in EMULATED:
            found = run_compiled(SCRIPT, name, *PARTS, timeout_s=1500)
            recorded[name] = {part: entry(found[part]) for part in PARTS}
            cpu_s = sum(found[part]["cpu_s"] for part in PARTS)
            run, there = (sum(found[part][what] for part in PARTS) for what in ("executed", "instructions"))
            kernels, values = map(sum, zip(*recorded[name].values(), strict=True))
            print(f"{name}: {kernels} kernels, {values:,} values, {run} of {there} instructions, {cpu_s:.0f} s of CPU")
            faults += [f"{name}, {part}: {line}" for part in PARTS for line in found[part]["wrong"]]
        print("\n".join(faults) or "nothing was wrong")
        if not faults:
            RECORD.write_text(json.dumps(recorded, indent=1) + "\n")
    if not faults:
        PAGE.write_text(written(PAGE.read_text()))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
