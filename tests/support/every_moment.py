"""Every moment of a call: something else is done at its n-th line, for each n in turn. No clock decides anything."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from support import sweep

TIMEOUT_S = 45.0  # only a net


def moments(case: int, cases: int) -> Iterator[int]:
    """Lines at which one of `cases` that go through the same ones does it: all under `--full`, else its own share."""
    return itertools.count() if sweep.full else itertools.count(case % cases, cases)


class Beside:
    """A call in a thread of its own, begun at some moment of another thread.

    Args:
        call: is called once.
        locks: those that `call` may wait for. While the thread that begins it holds one, it goes on at once.
    """

    def __init__(self, call: Callable[[], object], locks: Sequence[Any] = ()) -> None:
        self._call = call
        self._locks = locks
        self._begun = threading.Lock()
        self._thread = threading.Thread(target=self._run)
        self._ended = threading.Event()
        self.error: BaseException | None = None

    def begin(self) -> None:
        """Begins the call, unless that was done, and waits for its end where it cannot wait for this thread."""
        if self._begun.acquire(blocking=False):
            self._thread.start()
            if not any(one._is_owned() for one in self._locks):
                self._wait()

    def end(self) -> None:
        """Begins the call, unless that was done, and waits for its end; raises what it has raised."""
        self.begin()
        self._wait()
        self._thread.join()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as error:
            self.error = error
        finally:
            self._ended.set()

    def _wait(self) -> None:
        assert self._ended.wait(TIMEOUT_S), "it waits for ever"


@contextmanager
def at_line(number: int, parts: Sequence[str], act: Callable[[], object]) -> Iterator[list[str]]:
    """Calls `act` before this thread executes its `number`-th line, from 0, of some files.

    Args:
        number: of the line; there may be fewer.
        parts: the files are those whose paths have one of these in them.
        act: what to do.

    Yields:
        Where it was called: "file:line"; empty if that has not happened.
    """
    left, where = number, list[str]()

    def lines(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if event == "line" and not where:
            if left == 0:
                where.append(f"{frame.f_code.co_filename.rpartition('fusedreduce/')[2]}:{frame.f_lineno}")
                act()
            left -= 1
        return lines

    def calls(frame: FrameType, event: str, _: object) -> Any:
        return lines if not where and any(part in frame.f_code.co_filename for part in parts) else None

    before = sys.gettrace()
    sys.settrace(calls)
    try:
        yield where
    finally:
        sys.settrace(before)


def announce_waits(monkeypatch: pytest.MonkeyPatch, *others: tuple[type, str]) -> threading.Event:
    """Returns an event that is set whenever another thread than the main one begins to wait.

    Args:
        monkeypatch: pytest's.
        others: what waits beside conditions: class and name of the method.
    """
    waits = threading.Event()

    def announcing(owner: type, name: str) -> None:
        known = getattr(owner, name)

        def wait(*arguments: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                waits.set()  # a condition's lock is still held: who changes what it waits for comes when it waits
            return known(*arguments)

        monkeypatch.setattr(owner, name, wait)

    for owner, name in ((threading.Condition, "wait"), *others):
        announcing(owner, name)
    return waits
