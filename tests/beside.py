"""`pytest --beside`: a second pytest process runs some of the tests beside the first, which reports them as its own.

Much of their time, tests with rank processes wait for sleeps and timeouts, and those of the kernels keep one core
busy: on two cores, both at once take little longer than one of them. The second process runs what was collected from
the files in BESIDE, which start no rank processes (but for test_link.py's, which wait for imports most of their few
seconds) and demand nothing of a clock that a busy machine would not give. It writes its reports to a file, and the
first, when it is through with everything else, reads them: one list of tests, one summary, one JUnit file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

BESIDE = frozenset(
    f"test_{name}.py"
    for name in (
        "aot",
        "assignment",
        "asynchronous",
        "both_devices",
        "burn_rows",
        "cli_trace",
        "clip",
        "collective",
        "combine",
        "costs",
        "data_parallel",
        "data_parallel_scaled",
        "deferred_end",
        "dispatch",
        "docs_examples",
        "doctor",
        "finite",
        "gpu",
        "gpu_local",
        "gpu_observed",
        "integrations",
        "installed",
        "kernels",
        "launch_path",
        "layout",
        "link",
        "local_group",
        "local_reducer",
        "modes",
        "modes_scaled",
        "observed",
        "op",
        "order",
        "order_check",
        "packaging",
        "planner",
        "reducer",
        "reference",
        "resync",
        "run",
        "schedule",
        "simulate",
        "sources",
        "stats",
        "strategies",
        "sums",
        "sync_server",
        "table",
        "trace",
        "units",
    )
)

# Of the second process, after its last report; if only some tests of a file were asked for, it may have to run others.
_END_TIMEOUT_S = 300.0


class Reporter:
    """In the second process: writes each report, and a line without one when a test has ended."""

    def __init__(self, config: pytest.Config, path: str) -> None:
        self._config = config
        self._path = path
        self._parent = os.getppid()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._write(report.nodeid, self._config.hook.pytest_report_to_serializable(config=self._config, report=report))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._write(nodeid, None)
        if os.getppid() != self._parent:  # killed: nobody reads this
            pytest.exit("the first process has ended")

    def _write(self, nodeid: str, report: dict[str, Any] | None) -> None:
        with open(self._path, "a") as file:
            file.write(json.dumps([nodeid, report]) + "\n")


class Beside:
    """In the first process: starts the second one on what was collected, and takes its reports."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._folder = tempfile.TemporaryDirectory(prefix="fusedreduce-beside-")
        self._log, self._path = (Path(self._folder.name) / name for name in ("log", "reports"))
        self._path.touch()
        self._reports = self._path.open()
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting: defaultdict[str, list[pytest.TestReport]] = defaultdict(list)
        self._ended: set[str] = set()
        self._end = ""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """What runs beside comes last here, and starts now there."""
        items.sort(key=_is_beside)
        files = dict.fromkeys(str(item.path) for item in items if _is_beside(item))
        if files and not self._config.option.collectonly:
            chosen = ["-m", self._config.option.markexpr, "-k", self._config.option.keyword]
            command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--report-to={self._path}"]
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    [*command, *chosen, *files], stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """A test that runs beside is reported and not run."""
        if not _is_beside(item):
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        while item.nodeid not in self._ended and (line := self._line()):
            self._take(line)
        reports = self._waiting.pop(item.nodeid, [])
        for report in reports if item.nodeid in self._ended else [*reports, self._lost(item)]:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """A second process that does not end as pytest does, after its last report, fails this one."""
        if self._process is None or session.shouldfail or session.shouldstop or session.testscollected == 0:
            return
        if session.exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return  # interrupted: nobody waits
        try:
            status: object = self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            status = "none"
        if status not in (0, 1):
            self._end = f"the process beside this one ended with status {status}:\n{self._tail()}"
            session.exitstatus = pytest.ExitCode.INTERNAL_ERROR

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._end:
            terminalreporter.section("second process", red=True)
            terminalreporter.write_line(self._end)

    def pytest_unconfigure(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
        self._reports.close()
        self._folder.cleanup()

    def _line(self) -> str:
        """Its next line; "" if it has ended and there is none."""
        assert self._process is not None
        line = ""
        while not line.endswith("\n"):
            ended = self._process.poll() is not None  # asked before reading: what was written last is not lost
            line += self._reports.readline()
            if ended and not line.endswith("\n"):
                return ""
            if not line:
                time.sleep(0.02)
        return line

    def _take(self, line: str) -> None:
        nodeid, data = json.loads(line)
        if data is None:
            self._ended.add(nodeid)
            return
        if isinstance(data["longrepr"], list):  # why a test was skipped: a tuple to pytest, and JSON has none
            data["longrepr"] = tuple(data["longrepr"])
        report = self._config.hook.pytest_report_from_serializable(config=self._config, data=data)
        self._waiting[nodeid].append(report)

    def _lost(self, item: pytest.Item) -> pytest.TestReport:
        why = f"the process beside this one ended without a report:\n{self._tail()}"
        return pytest.TestReport(item.nodeid, item.location, {}, outcome="failed", longrepr=why, when="call")

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]


def _is_beside(item: pytest.Item) -> bool:
    return item.path.name in BESIDE


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--beside", action="store_true", help="run tests that need no ranks in a second process")
    parser.addoption("--report-to", metavar="FILE", help="in that process: where its reports go")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.report_to:
        config.pluginmanager.register(Reporter(config, config.option.report_to))
    elif config.option.beside:
        config.pluginmanager.register(Beside(config))
