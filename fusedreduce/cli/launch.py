"""Starts ranks with torch's own launcher (the one of torchrun), in this process, and reports a failure in one line.

The launcher puts every rank into a session of its own, so a terminal's Ctrl-C reaches this process alone. It is passed
on as a SIGTERM to each rank; a rank that does not end within _GRACE_S is killed (torch 2.11: within 30 s). A rank that
survives even that ends with this process: see `demo_worker`.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import traceback
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

_GRACE_S = 5
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_LOOPBACK = "127.0.0.1"


class Failure(Protocol):
    """The attributes of torch's ProcessFailure that are used."""

    @property
    def exitcode(self) -> int:
        """Exit status, or minus the signal that ended the process."""
        ...


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


def run_ranks(module: str, folder: Path, ranks: int, *, loopback: bool) -> None:
    """Runs `python -m module FOLDER` once per rank, and waits for all.

    Args:
        module: the program of a rank. It writes `rank<i>.error.json` into the folder when it fails.
        folder: its argument; the ranks' standard output goes to files in it.
        ranks: number of ranks, all on this machine.
        loopback: ranks use Gloo, for which the loopback interface is enough.

    Raises:
        RankFailedError: a rank failed, and the others have been ended; or ranks could not be started.
        InterruptedRunError: Ctrl-C, or another signal that asks to end.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        # As `torchrun --standalone`: a store on a port that the system chooses. A numeric address needs no name server.
        rdzv_backend="c10d",
        rdzv_endpoint=f"{_LOOPBACK}:0",
        local_addr=_LOOPBACK,
        max_restarts=0,
        signals_to_handle="SIGTERM",
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs"), redirects=Std.OUT),
    )
    if hasattr(config, "shutdown_timeout"):  # later than torch 2.11, which always waits 30 s
        config.shutdown_timeout = _GRACE_S
    received: list[signal.Signals] = []
    with (
        _quiet("torch.distributed.elastic", "torch.distributed.launcher"),
        _environment(loopback),
        _signals_raise(received, SignalException),
    ):
        try:
            elastic_launch(config, sys.executable)("-m", module, str(folder))
        except ChildFailedError as error:
            raise first_failure(error.failures, folder) from None
        except SignalException:
            raise InterruptedRunError(received[0] if received else signal.SIGTERM) from None
        except Exception as error:
            reason = f"the ranks could not be started: {one_line(error)}"
            raise RankFailedError(reason, traceback.format_exc()) from error


def one_line(error: BaseException) -> str:
    """The error's class and the first line of its message."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def first_failure(failures: Mapping[int, Failure], folder: Path) -> RankFailedError:
    """The failure that caused the others.

    In order: ranks that died without a reason, ranks that raised, ranks that the launcher ended (SIGTERM), and ranks
    whose reason is that they lost a peer.
    """

    def order(rank: int) -> tuple[int, float]:
        reason = reasons[rank]
        if reason is not None:
            return (3 if reason["lost_peer"] else 1, reason["time"])
        return (2 if failures[rank].exitcode == -signal.SIGTERM else 0, 0.0)

    reasons = {rank: _reason(folder, rank) for rank in failures}
    rank = min(failures, key=order)
    reason = reasons[rank]
    if reason is not None:
        return RankFailedError(f"rank {rank} failed: {reason['reason']}", reason["traceback"])
    status = failures[rank].exitcode
    how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    return RankFailedError(f"rank {rank} died: {how}", None)


def _reason(folder: Path, rank: int) -> dict[str, Any] | None:
    path = folder / f"rank{rank}.error.json"
    return json.loads(path.read_text()) if path.exists() else None


@contextmanager
def _signals_raise(received: list[signal.Signals], error: type[Exception]) -> Iterator[None]:
    """Raises `error` on the first signal, with a SIGTERM to pass on; ignores later ones, during the clean-up."""

    def handle(signum: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(signum))
        for one in _SIGNALS:
            signal.signal(one, signal.SIG_IGN)
        raise error(f"got {received[0].name}", signal.SIGTERM)

    # A signal that is ignored already stays so: under `nohup`, or in a script's background job.
    heeded = [one for one in _SIGNALS if signal.getsignal(one) is not signal.SIG_IGN]
    before = {one: signal.signal(one, handle) for one in heeded}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


@contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """Silences loggers, unless LOGLEVEL is set, which torch's launcher reads."""
    loggers = [logging.getLogger(name) for name in names] if "LOGLEVEL" not in os.environ else []
    before = [logger.propagate for logger in loggers]
    silent = logging.NullHandler()
    for logger in loggers:
        logger.propagate = False
        logger.addHandler(silent)
    try:
        yield
    finally:
        for logger, propagate in zip(loggers, before, strict=True):
            logger.propagate = propagate
            logger.removeHandler(silent)


@contextmanager
def _environment(loopback: bool) -> Iterator[None]:
    """Sets environment variables for the ranks; those that the user has set are not changed."""
    wanted = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if loopback and "lo" in (name for _, name in socket.if_nameindex()):
        # Otherwise Gloo resolves this machine's name, which may need a name server.
        wanted["GLOO_SOCKET_IFNAME"] = "lo"
    added = [name for name in wanted if name not in os.environ]
    os.environ.update({name: wanted[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
