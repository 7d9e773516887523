"""A pytest plugin: a line of JSON about each test as soon as it has ended, and an end for one that does not end.

    GPU_CHECK_OUTCOMES=tests.jsonl PYTHONPATH=perf pytest -p outcomes -m gpu

Lines are {"collected": [ids]}, then by test {"began": id}, {"failing": id, "why": ...} if it does, and {"ended": id,
"outcome": ..., "seconds": ..., "why": ..., "properties": {...}}.

With pytest-xdist each of its processes writes what it runs, and the one that hands tests out nothing.

A test that takes longer than `LIMIT_S` ends the process, with all threads' stacks on stderr. So does one after which
the GPU does not answer: every other test of the process would fail with it. Who started the process (gpu_check.py)
begins another one with the tests that are left.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys

import pytest

OUTCOMES = "GPU_CHECK_OUTCOMES"
LIMIT = "GPU_CHECK_TEST_LIMIT_S"
LIMIT_S = float(os.environ.get(LIMIT, "90"))
BROKEN = 70  # exit status: the GPU does not answer
_STDERR = os.fdopen(os.dup(2), "w")  # before pytest captures it
_phases: list[pytest.TestReport] = []


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        config.pluginmanager.unregister(sys.modules[__name__])


def pytest_collection_finish(session: pytest.Session) -> None:
    _write(collected=[item.nodeid for item in session.items])


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _write(ended=report.nodeid, outcome="failed", seconds=0.0, why=_why(report), properties={})


def pytest_runtest_logstart(nodeid: str) -> None:
    _phases.clear()
    _write(began=nodeid)
    _begin_the_limit()


def pytest_exception_interact(report: pytest.CollectReport | pytest.TestReport) -> None:
    # pytest's own plugin has just cancelled the limit, and what is torn down after a fault of the GPU may hang.
    if isinstance(report, pytest.TestReport):
        _begin_the_limit()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _phases.append(report)
    if report.failed:  # what is torn down next may end the process
        _write(failing=report.nodeid, why=_why(report))


def pytest_runtest_logfinish(nodeid: str) -> None:
    told = next((one for kind in ("failed", "skipped") for one in _phases if one.outcome == kind), _phases[-1])
    _begin_the_limit()  # for what the test has queued and not waited for
    broken = _fault_of_the_gpu()
    faulthandler.cancel_dump_traceback_later()
    _write(
        ended=nodeid,
        outcome="failed" if broken else told.outcome,
        seconds=round(sum(one.duration for one in _phases), 2),
        why="" if told.passed and not broken else f"{_why(told)} {broken}".strip(),
        properties=dict(_phases[-1].user_properties),
    )
    if broken:
        os._exit(BROKEN)


def _fault_of_the_gpu() -> str:
    """What it says in place of an answer; empty if it answers, or nobody has asked it for anything."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            return f"the GPU does not answer any more: {error}"
    return ""


def _begin_the_limit() -> None:
    faulthandler.dump_traceback_later(LIMIT_S, exit=True, file=_STDERR)


def _why(report: pytest.CollectReport | pytest.TestReport) -> str:
    """The reason of a skip, else the last lines."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2]
    return str(report.longreprtext[-1000:])


def _write(**line: object) -> None:
    with open(os.environ[OUTCOMES], "a") as file:
        file.write(json.dumps(line) + "\n")
