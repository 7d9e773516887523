"""Runs torch's own DDP tests, those inside the installed torch, against our DistributedDataParallel or our hook.

    python tests/conformance/run.py                            # 2 Gloo ranks on CPU: torch's class, then ours
    python tests/conformance/run.py --world 3 --tests no_sync  # 3 ranks; tests whose names match
    python tests/conformance/run.py --install                  # the same, torch's class under install() for ours
    python tests/conformance/run.py --hook bf16                # torch's class with torch's bf16 hook, then with ours

Ours is asked for what torch passes in the same run, except for what docs/conformance.md lists. The exit status is 1 if
any other test fails, passes without having used ours, or has ours build a C++ Reducer, or if nothing passes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import unittest
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
EXCEPTIONS = ROOT / "docs" / "conformance.md"
Put = Callable[[Callable[[str], object]], None]  # see subjects.py


@dataclass
class Result:
    """One test against one subject."""

    test: str
    subject: str  # "torch", "ours" or a wire of our hook
    status: str = "failed"  # or "passed", "skipped", "too slow"
    detail: str = ""
    seconds: float = 0.0
    events: Counter[str] = field(default_factory=Counter)  # built, cpp_reducer, hook_called
    fault: str = ""


@dataclass
class Running:
    """A test under way. Its process leads a session, which its ranks belong to."""

    result: Result
    folder: Path
    process: Any
    began: float


def run(
    todo: deque[tuple[str, str]], puts: Mapping[str, Put], jobs: int, limit_s: float, out: Path
) -> Iterator[Result]:
    """Runs (test, subject) pairs, `jobs` at a time; the caller may add pairs whenever a result comes."""
    running: list[Running] = []
    try:
        while todo or running:
            while todo and len(running) < jobs:
                test, subject = todo.popleft()
                running.append(_start(Result(test, subject), puts[subject], out))
            wait([one.process.sentinel for one in running], timeout=1.0)
            for one in list(running):
                seconds = time.monotonic() - one.began
                if not one.process.is_alive() or seconds > limit_s:
                    running.remove(one)
                    yield _end(one, seconds)
    finally:
        for one in running:
            _kill(one)


def _start(result: Result, put: Put, out: Path) -> Running:
    folder = out / result.subject / result.test
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "tmp").mkdir(parents=True)
    process = multiprocessing.get_context("fork").Process(target=_run_one, args=(result.test, put, folder))
    process.start()
    return Running(result, folder, process, time.monotonic())


def _run_one(test: str, put: Put, folder: Path) -> None:
    """The process of one test: what it changes, and leaves behind, stays in it and in its folder."""
    from torch_tests import DDPTests

    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    log, events = os.open(folder / "log", flags), os.open(folder / "events", flags)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder / "tmp")
    put(lambda event: os.write(events, f"{event}\n".encode()))
    outcome = unittest.TestResult()
    unittest.TestSuite([DDPTests(test)]).run(outcome)
    faults = [text for _, text in outcome.errors + outcome.failures]
    skips = [text for _, text in outcome.skipped]
    status = "failed" if faults else "skipped" if skips else "passed"
    print(*faults, *skips, flush=True)
    (folder / "result.json").write_text(json.dumps([status, *faults, *skips]))


def _end(one: Running, seconds: float) -> Result:
    result, too_slow = one.result, one.process.is_alive()
    _kill(one)
    result.seconds = round(seconds, 1)
    shutil.rmtree(one.folder / "tmp", ignore_errors=True)
    with suppress(FileNotFoundError):
        result.events = Counter((one.folder / "events").read_text().split())
    if (one.folder / "result.json").exists():
        result.status, *texts = json.loads((one.folder / "result.json").read_text())
        errors = re.findall(r"^[\w.]*(?:Error|Exception)\b.*", "\n".join(texts), re.M)
        # The error itself says more than that a rank failed, or what its peers saw of that.
        errors.sort(key=lambda line: (line.startswith("RuntimeError: Process"), "gloo" in line))
        result.detail = (errors + texts + [""])[0]
    elif too_slow:
        result.status, result.detail = "too slow", f"killed after {seconds:.0f} s"
    else:
        result.detail = f"the test's process ended with {one.process.exitcode}; see its log"
    return result


def _kill(one: Running) -> None:
    """Ends a test's process and any rank that it left behind."""
    with suppress(ProcessLookupError):
        os.killpg(one.process.pid, signal.SIGKILL)
    one.process.join()


def judge(result: Result, used: str) -> str:
    """What is wrong with a result of ours; "" if nothing is. `used`: the event that shows that ours was in use."""
    if result.status != "passed":
        return f"{result.status}: {result.detail}"
    if not result.events[used]:
        return "passed without having used ours"
    return "ours built a C++ Reducer" if result.events["cpp_reducer"] else ""


def print_row(result: Result, tier: str, torch_status: str) -> None:
    """One line of the table: how a test ended."""
    statuses = (result.status, "-") if result.subject == "torch" else (torch_status, result.status)
    events = "/".join(str(result.events[event]) for event in ("built", "cpp_reducer", "hook_called"))
    columns = f"{statuses[0]:>9} {statuses[1]:>9} {result.seconds:6.1f}  {events:>29}  {tier:10} {result.test}"
    print(f"{columns}  {result.fault or result.detail}".rstrip(), flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--hook", choices=("native", "bf16", "fp16"), help="test our hook at this wire")
    parser.add_argument("--install", action="store_true", help="test torch's class under fusedreduce.install()")
    parser.add_argument("--ddp", default="fusedreduce:DistributedDataParallel", help="module:class to test")
    parser.add_argument("--tests", default="", help="regular expression on the names")
    parser.add_argument("--tiers", default="public,semi,logging,internals", help="default: %(default)s")
    parser.add_argument("--without-torch", action="store_true", help="ask for every test, whether torch passes or not")
    parser.add_argument("--jobs", type=int, default=2, help="tests at a time (default: 2)")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds a test may take (default: 600)")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "conformance", help="for logs and results.json")
    return parser.parse_args()


def main() -> int:
    arguments = _arguments()
    out = arguments.out.resolve()
    # Before torch, triton and torch's tests are imported: they read these then.
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(arguments.world), CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    os.environ.update(TORCHINDUCTOR_COMPILE_THREADS="1")
    os.environ.pop("TRITON_INTERPRET", None)
    import subjects
    import torch_tests

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the tests under way are ended
    ours, used = arguments.hook or "ours", "hook_called" if arguments.hook else "built"
    put = subjects.put_installed if arguments.install else partial(subjects.put_class, arguments.ddp)
    puts: dict[str, Put] = {"torch": subjects.put_torch, ours: put}
    if arguments.hook:
        hooks = {"torch": subjects.torch_hook, ours: subjects.our_hook}
        puts = {subject: partial(subjects.put_hook, partial(hook, ours)) for subject, hook in hooks.items()}
    tiers = {
        test: tier
        for test, tier in torch_tests.find_tests().items()
        if re.search(arguments.tests, test) and tier in arguments.tiers.split(",")
    }
    todo = deque((test, ours if arguments.without_torch else "torch") for test in tiers)
    results = []
    print(f"{'torch':>9} {ours:>9}    sec  built/C++ reducers/hook calls  {'tier':10} test")
    for result in run(todo, puts, arguments.jobs, arguments.limit, out):
        results.append(result)
        if result.subject == ours:
            result.fault = judge(result, used)
        elif result.status == "passed" and result.events[used]:
            todo.appendleft((result.test, ours))
            continue
        print_row(result, tiers[result.test], "-" if arguments.without_torch else "passed")
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps([vars(result) for result in results], indent=1))

    # Rows | `test_name` | reason |; only a test of C++ internals can be one.
    listed = re.findall(r"^\| `(test_\w+)` \| .+ \|$", EXCEPTIONS.read_text(), re.M)
    excepted = {test for test in listed if tiers.get(test) in ("internals", "logging")}
    faults = [result for result in results if result.fault and result.test not in excepted]
    for result in results:
        if result.fault:
            print(f"{'FAULT' if result in faults else 'exception'} {result.test}: {result.fault}")
    passed = Counter((one.subject, bool(one.events[used])) for one in results if one.status == "passed")
    reducers = sum(one.events["cpp_reducer"] for one in results)
    counts = f"{ours} {passed[ours, True]}, torch {passed['torch', True]}"
    print(f"{counts}, C++ reducers {reducers}, vacuous {passed[ours, False]}")
    return 1 if faults or not passed[ours, True] else 0


if __name__ == "__main__":
    sys.exit(main())
