"""Every moment of a call: something else is done at its n-th line, for each n in turn. No clock decides anything."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from fusedreduce.comm.local.rendezvous import Rendezvous

TIMEOUT_S = 60.0  # only a net


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
        self._ended = threading.Event()
        self.error: BaseException | None = None

    def begin(self) -> None:
        """Begins the call, unless that was done, and waits for its end where it cannot wait for this thread."""
        if self._begun.acquire(blocking=False):
            threading.Thread(target=self._run).start()
            if not any(one._is_owned() for one in self._locks):
                self._wait()

    def end(self) -> None:
        """Begins the call, unless that was done, and waits for its end; raises what it has raised."""
        self.begin()
        self._wait()
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


class _Announced(threading.Condition):
    """A condition that says when somebody begins to wait for it, whose lock is then still held."""

    def __init__(self, lock: threading.RLock, waits: threading.Event) -> None:
        super().__init__(lock)
        self._waits = waits

    def wait(self, timeout: float | None = None) -> bool:
        self._waits.set()
        return super().wait(timeout)


def announce_waits(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Returns an event that is set whenever a rank of a LocalGroup begins to wait for others in a collective."""
    waits, known = threading.Event(), Rendezvous.__post_init__

    def made(self: Rendezvous) -> None:
        known(self)
        self.changed = _Announced(self.lock, waits)

    monkeypatch.setattr(Rendezvous, "__post_init__", made)
    return waits
