"""A pytest plugin: which functions of the product each test executes, on ranks too; for tests/where.py.

A function is named by its file and the line where it begins. What C++ threads call is not seen, nor what a program does
that a test starts by its path.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "EXECUTED_BY_TESTS"  # of the environment: where each process of pytest leaves what it has found
Functions = set[tuple[str, int]]

_codes: dict[int, CodeType] = {}  # by id: a long code takes time to hash
_by_test: defaultdict[str, Functions] = defaultdict(set)
_running: Functions = set()  # of the present test, on its ranks
_left_out: set[str] = set()  # by `make quick`


@contextmanager
def recorded(into: Functions) -> Iterator[None]:
    """Context in which every call of this process's threads counts; they stand in `into` when it ends."""
    _codes.clear()
    threading.settrace(_called)
    sys.settrace(_called)
    try:
        yield
    finally:
        sys.settrace(None)
        threading.settrace(None)
        for code in list(_codes.values()):
            if (file := _of_product(code.co_filename)) is not None:
                into.add((file, code.co_firstlineno))


def recording(case: Callable[..., Any]) -> Callable[..., Any]:
    """What ranks are to run for a case: the same, or, where calls are recorded, that with these beside its result."""
    return functools.partial(_with_calls, case) if os.environ.get(FOLDER) else case


def result_of(value: Any) -> Any:
    """What a case has returned on a rank that ran `recording` of it."""
    if not os.environ.get(FOLDER):
        return value
    result, calls = value
    _running.update(calls)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    """A test with its fixtures: what those of a module do counts for its first test."""
    _running.clear()
    with recorded(_running):
        result = yield
    name = item.nodeid.removeprefix("tests/").partition("[")[0]
    _by_test[name].update(_running)
    if any(item.get_closest_marker(mark) for mark in ("gpu", "slow", "ranks")):
        _left_out.add(name)
    return result


def pytest_sessionfinish() -> None:
    """Writes what was found."""
    file = Path(os.environ[FOLDER]) / f"{os.environ.get('PYTEST_XDIST_WORKER', 'main')}.json"
    found = {test: {"quick": test not in _left_out, "calls": sorted(calls)} for test, calls in _by_test.items()}
    file.write_text(json.dumps(found))


def _with_calls(case: Callable[..., Any], *arguments: Any) -> tuple[Any, Functions]:
    found: Functions = set()
    with recorded(found):
        result = case(*arguments)
    return result, found


def _called(frame: FrameType, event: str, argument: Any) -> None:
    code = frame.f_code
    _codes[id(code)] = code


@functools.cache
def _of_product(file: str) -> str | None:
    path = Path(os.path.realpath(file))
    inside = any(path.is_relative_to(ROOT / folder) for folder in ("fusedreduce", "kernels"))
    return str(path.relative_to(ROOT)) if inside else None
