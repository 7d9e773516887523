"""`make integrations`: every script of docs/frameworks, and the cases beside this file, with the real packages.

    python tests/integrations/run_pages.py            everything
    python tests/integrations/run_pages.py ray        the pages and cases so called

What was run is written into docs/frameworks/record.md, in the place of what the same parts had there.

Each script runs as its page says, with torch's wrapper and with ours, at wire native and bf16, and by `fusedreduce.run`
where the page has that. Losses and weights must be equal bit for bit at native; with bf16 every loss must be within
BF16_BOUND of torch's. Each command runs in a PID namespace of its own, where that is allowed, and is killed with all
that it has started after its time.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pages import FOLDER, ROOT, Run, runs, scripts

HERE = Path(__file__).resolve().parent
RECORD = FOLDER / "record.md"
# Of a loss, relative. These trainings amplify differences: AdamW makes steps of one size of gradients of any size.
BF16_BOUND = 0.05
OWN_NETWORKS = ("unshare", "-Urnpf", "--kill-child", "--mount-proc")
OWN_PROCESSES = ("unshare", "-Urpf", "--kill-child", "--mount-proc")


class Part(NamedTuple):
    """A page, or a file of cases."""

    name: str
    packages: tuple[str, ...]
    timeout_s: float = 150.0  # of one command
    cases: tuple[str, ...] = ()  # arguments of torchrun; none: a page


PARTS = (
    Part("lightning", ("lightning",)),
    Part("accelerate", ("accelerate",)),
    Part("trainer", ("transformers", "accelerate")),
    Part("torchrun", ("torch",)),
    Part("compile_and_checkpoint", ("torch",)),
    Part("fsdp", ("torch",)),
    Part("ray", ("ray",), timeout_s=400.0),
    Part("lightning_cases", ("lightning",), 300.0, ("lightning_cases.py", "lightning")),
    Part("pytorch_lightning_cases", ("pytorch-lightning",), 300.0, ("lightning_cases.py", "pytorch_lightning")),
    Part("accelerate_cases", ("accelerate", "transformers"), 300.0, ("accelerate_cases.py",)),
    Part("compile_cases", ("torch",), 300.0, ("compile_cases.py",)),
)


class Row(NamedTuple):
    """One line of the record."""

    part: str
    packages: str
    what: str
    result: str
    seconds: float
    passed: bool


class Failed(Exception):
    """A command failed, ran out of time, or ended with other numbers than it should."""


def main() -> int:
    """Runs the parts that are named, or all; the exit status."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as SIGINT does: what runs is ended on the way out
    asked = sys.argv[1:]
    unknown = set(asked) - {part.name for part in PARTS}
    if unknown:
        sys.exit(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(part.name for part in PARTS)}")
    rows: list[Row] = []
    for part in PARTS:
        if not asked or part.name in asked:
            for row in run_cases(part) if part.cases else run_page(part):
                print(f"{'ok    ' if row.passed else 'FAILED'} {row.part}: {row.what}: {row.result}", flush=True)
                rows.append(row)
    RECORD.write_text(record(rows, RECORD.read_text() if RECORD.exists() else ""))
    print(f"written: {RECORD.relative_to(ROOT)}")
    failed = sum(not row.passed for row in rows)
    print(f"{len(rows) - failed} passed, {failed} failed")
    return 1 if failed else 0


def run_page(part: Part) -> Iterator[Row]:
    """Every command of a page."""
    versions = versions_of(part)
    for name, commands in runs(part.name).items():
        reference: dict[str, Any] | None = None
        for run in commands:
            begin = time.monotonic()
            try:
                with tempfile.TemporaryDirectory() as folder:
                    Path(folder, name).write_text(scripts(part.name)[name])
                    found = last_json(execute(run.lines, Path(folder), part.timeout_s))[-1]
                if run.reference:
                    reference = found
                result = compared(run, reference, found)
                passed = True
            except Failed as error:
                result, passed = str(error), False
            yield Row(part.name, versions, shown(run), result, time.monotonic() - begin, passed)


def compared(run: Run, reference: dict[str, Any] | None, found: dict[str, Any]) -> str:
    """What a run has shown.

    Raises:
        Failed: it is not what the reference has, or there is none.
    """
    if reference is None:
        raise Failed("nothing to compare with")
    notes = "".join(f", {key} {found[key]}" for key in ("backend",) if key in found)
    notes += ", went on from its checkpoint" if found.get("resumed") else ""
    if run.reference:
        return f"{len(found['losses'])} losses{notes}"
    reducer = found.get("reducer", "fusedreduce.")
    if not reducer.startswith("fusedreduce."):
        raise Failed(f"the reducer was {reducer}'s, not ours")
    if found.get("keys") != reference.get("keys"):
        raise Failed(f"other keys: {found['keys']}, torch's are {reference['keys']}")
    if not found.get("resumed", True):
        raise Failed("it did not go on from a checkpoint")
    pairs = list(zip(reference["losses"], found["losses"], strict=True))
    if run.exact:
        if any(theirs != mine for theirs, mine in pairs):
            raise Failed(f"losses differ: {pairs}")
        if found["weights"] != reference["weights"]:
            raise Failed("weights differ")
        return f"{len(pairs)} losses and the weights equal to torch's, bit for bit{notes}"
    apart = max(abs(theirs - mine) / abs(theirs) for theirs, mine in pairs)
    if not 0 < apart <= BF16_BOUND:
        raise Failed(f"losses are {apart:.1e} apart, allowed are more than 0 and at most {BF16_BOUND}: {pairs}")
    return f"{len(pairs)} losses within {apart:.1e} of torch's{notes}"


def run_cases(part: Part) -> Iterator[Row]:
    """A file of cases on two ranks, which says for each what it has found."""
    versions, begin = versions_of(part), time.monotonic()
    command = f"torchrun --standalone --nproc-per-node=2 {HERE / part.cases[0]} {' '.join(part.cases[1:])}"
    try:
        with tempfile.TemporaryDirectory() as folder:
            found = last_json(execute((command,), Path(folder), part.timeout_s))
        for one in found:
            yield Row(part.name, versions, one["case"], one["found"], 0.0, True)
        yield Row(part.name, versions, "all", f"{len(found)} cases", time.monotonic() - begin, True)
    except Failed as error:
        yield Row(part.name, versions, "all", str(error), time.monotonic() - begin, False)


def execute(lines: tuple[str, ...], folder: Path, timeout_s: float) -> str:
    """What a command prints, or two on two nodes. Whatever happens, nothing of it is left running.

    Raises:
        Failed: it fails, or takes longer.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "HF_HUB_OFFLINE": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    environment["PYTHONPATH"] = str(ROOT)
    environment["TMPDIR"] = str(folder)
    if len(lines) > 1:
        command = [*OWN_NETWORKS, "sh", str(HERE / "two_nodes.sh"), *lines]
    else:
        command = [*(OWN_PROCESSES if has_namespaces() else ()), "sh", "-c", f"exec {lines[0]}"]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            status: object = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = f"none within {timeout_s:.0f} s"
        finally:
            end(process)
        output.seek(0)
        text = output.read()
    if status != 0:
        print(text[-6000:], file=sys.stderr)
        raise Failed(f"exit status {status}")
    return text


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a command, first as torchrun wants to be asked, so that it ends its ranks, then for good."""
    for number, patience_s in ((signal.SIGTERM, 15.0), (signal.SIGKILL, None)):
        if process.poll() is None:
            os.killpg(process.pid, number)
            try:
                process.wait(patience_s)
            except subprocess.TimeoutExpired:
                continue


def has_namespaces() -> bool:
    """Whether an ordinary user may make namespaces here."""
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*OWN_PROCESSES, "true"], capture_output=True, check=False).returncode == 0


def last_json(text: str) -> list[dict[str, Any]]:
    """The lines of JSON that a run has printed."""
    found = [json.loads(line) for line in text.splitlines() if line.startswith(('{"losses"', '{"case"'))]
    if not found:
        raise Failed(f"it printed no result: {text[-500:]!r}")
    return found


def shown(run: Run) -> str:
    """A command as the record shows it."""
    words = [word for word in run.lines[0].split() if "=" not in word or word.startswith("--nproc")]
    return "`" + " ".join(words) + "`" + (" on two nodes" if len(run.lines) > 1 else "")


def versions_of(part: Part) -> str:
    """The packages of a part, with their versions."""
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in part.packages)


def record(rows: list[Row], before: str) -> str:
    """The page, with the rows of `before` where a part was not run now."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    machine = f"{platform.python_version()}, {os.cpu_count()} cores"
    when = f"{datetime.date.today()} {commit or 'unknown'}"
    order = [part.name for part in PARTS]
    kept = set(order) - {row.part for row in rows}
    lines = [one for one in before.splitlines() if one.removeprefix("| ").split(" | ")[0] in kept]
    for row in rows:
        result = ("" if row.passed else "**failed** ") + row.result.replace("|", "/").replace("\n", " ")
        seconds = f"{row.seconds:.0f}" if row.seconds else ""
        lines.append(f"| {row.part} | {row.packages} | {row.what} | {result} | {seconds} | {when} |")
    lines.sort(key=lambda one: order.index(one.split(" | ")[0][2:]))
    return f"""# The last runs of `make integrations`

Written by the runs, not by hand. 2 ranks, CPU, Gloo, torch {importlib.metadata.version("torch")}, Python {machine}.

| part | package | what | result | s | when, of which commit |
|---|---|---|---|---|---|
""" + "".join(f"{one}\n" for one in lines)


if __name__ == "__main__":
    sys.exit(main())
