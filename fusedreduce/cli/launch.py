"""Ranks as processes of this machine: started together, ended together, a failure reported in one line.

Every rank has a session of its own, so a terminal's Ctrl-C reaches the launcher alone, which ends the ranks. A rank
that the launcher cannot end any more, because it was killed itself, is ended by the operating system.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from .report import one_line

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_LAUNCHER = "FUSEDREDUCE_LAUNCHER_PID"
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.05


class RankFailedError(Exception):
    """A rank died or raised an error.

    Args:
        reason: which rank and why, in one line.
        details: its traceback; None: there is none.
    """

    def __init__(self, reason: str, details: str | None) -> None:
        super().__init__(reason)
        self.details = details


class InterruptedRunError(Exception):
    """A signal ended the run; every rank has ended.

    Args:
        signum: the signal.
    """

    def __init__(self, signum: signal.Signals) -> None:
        super().__init__(f"interrupted by {signum.name}")
        self.signum = signum


def run_ranks(module: str, folder: Path, arguments: Sequence[str], ranks: int, *, loopback: bool) -> None:
    """Runs `python -m module FOLDER ARGUMENTS` once per rank, with RANK and WORLD_SIZE set, and waits for all.

    Args:
        module: the program of a rank; it calls `as_rank`. Its standard output is dropped.
        folder: where ranks leave files.
        arguments: the same for every rank.
        ranks: number of ranks, all on this machine.
        loopback: ranks use Gloo, for which the loopback interface is enough.

    Raises:
        RankFailedError: a rank failed, and the others have been ended.
        InterruptedRunError: Ctrl-C, or another signal that asks to end.
    """
    # What the user has set is not changed.
    environment = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ}
    if loopback and "lo" in (name for _, name in socket.if_nameindex()):
        # Otherwise Gloo resolves this machine's name, which may need a name server.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    environment |= {"WORLD_SIZE": str(ranks), _LAUNCHER: str(os.getpid())}
    command = [sys.executable, "-m", module, str(folder), *arguments]
    started: list[subprocess.Popen[bytes]] = []
    with _signals_noted() as signals:
        try:
            try:
                for rank in range(ranks):
                    own = {**environment, "RANK": str(rank)}
                    process = subprocess.Popen(command, env=own, stdout=subprocess.DEVNULL, start_new_session=True)
                    started.append(process)
            except OSError as error:
                raise RankFailedError(f"the ranks could not be started: {one_line(error)}", None) from error
            _wait(started, folder, signals)
        finally:
            for process in started:
                process.kill()
            for process in started:
                process.wait()


def as_rank(folder: Path, work: Callable[[int, int], None]) -> NoReturn:
    """Runs `work(rank, ranks)` in a process that `run_ranks` has started, and ends it.

    An exception's reason is left in `folder` for the launcher.
    """
    launcher_pid = int(os.environ[_LAUNCHER])
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    rank = int(os.environ["RANK"])
    status = 1
    try:
        if os.getppid() == launcher_pid:
            work(rank, int(os.environ["WORLD_SIZE"]))
            status = 0
    except Exception as error:
        _reason_file(folder, rank).write_text(f"{one_line(error)}\n{traceback.format_exc()}")
    # No ordinary exit. After a failure, destroying a process group may wait for a peer that is gone. After success,
    # torch 2.13 aborts now and then, with or without the hook: a Gloo thread frees its last tensor while the
    # interpreter is shut down ("terminate called without an active exception").
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def first_failure(statuses: Mapping[int, int], folder: Path) -> RankFailedError:
    """The failure that caused the others: of a rank that left no reason, else of the one that left it first.

    Args:
        statuses: exit status of each rank that failed, or minus the signal that ended it.
        folder: where ranks leave their reasons.
    """

    def order(rank: int) -> int:
        path = _reason_file(folder, rank)
        return path.stat().st_mtime_ns if path.exists() else 0

    rank = min(statuses, key=order)
    path = _reason_file(folder, rank)
    if path.exists():
        reason, _, details = path.read_text().partition("\n")
        return RankFailedError(f"rank {rank} failed: {reason}", details)
    status = statuses[rank]
    how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    return RankFailedError(f"rank {rank} died: {how}", None)


def _reason_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.error.txt"


def _wait(started: Sequence[subprocess.Popen[bytes]], folder: Path, signals: Sequence[signal.Signals]) -> None:
    """Waits until all ranks have ended, one has failed, or a signal has come."""
    while True:
        if signals:
            raise InterruptedRunError(signals[0])
        statuses = {rank: process.poll() for rank, process in enumerate(started)}
        if failed := {rank: status for rank, status in statuses.items() if status}:
            raise first_failure(failed, folder)
        if None not in statuses.values():
            return
        time.sleep(_POLL_S)


@contextmanager
def _signals_noted() -> Iterator[list[signal.Signals]]:
    """Signals that ask to end are noted, not raised: between the start of a rank and its being known none may be."""
    noted: list[signal.Signals] = []

    def handle(signum: int, frame: FrameType | None) -> None:
        noted.append(signal.Signals(signum))

    # A signal that is ignored already stays so: under `nohup`, or in a script's background job.
    heeded = [one for one in _SIGNALS if signal.getsignal(one) is not signal.SIG_IGN]
    before = {one: signal.signal(one, handle) for one in heeded}
    try:
        yield noted
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
