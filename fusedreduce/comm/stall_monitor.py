"""StallMonitor: logs which bucket's reduction is overdue, before the backend's watchdog ends the process.

On NCCL `wait()` only orders streams, so nothing notices a dead rank until the watchdog aborts, and the watchdog knows
collectives, not buckets. A daemon thread queries each reduction's event (a query does not wait for the GPU), and logs
the bucket once when it is overdue.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from .protocol import Ranks
from .waiting import end_at_exit

_logger = logging.getLogger(__name__)
# Of the group's timeout, at which the backend's watchdog ends the process.
_STALL_SHARE_OF_TIMEOUT = 0.8
MAPS = Path("/proc/self/maps")
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED; the same in HIP


@dataclass
class _Watched:
    what: str
    done: Callable[[], bool]
    since_s: float
    report_after_s: float
    reported: bool = False


def stall_report_after_s(configured_s: float | None, ranks: Ranks, device: torch.device) -> float:
    """Seconds after which a reduction is reported as overdue.

    Args:
        configured_s: ReduceConfig.stall_report_s; None: a share of the group's timeout.
        ranks: the group that reduces.
        device: device of the reduction. On CPU nothing is watched, because waiting there raises by itself.

    Returns:
        Seconds; 0.0 on CPU.
    """
    if device.type == "cpu":
        return 0.0
    return _STALL_SHARE_OF_TIMEOUT * ranks.timeout_s(device) if configured_s is None else configured_s


class StallMonitor:
    """Watches reductions by polling; its thread starts with the first reduction and ends when none is left.

    Args:
        poll_s: seconds between two polls.
        clock: seconds, monotonic; tests give their own.
    """

    def __init__(self, poll_s: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._poll_s = poll_s
        self._clock = clock
        self._lock = threading.Lock()
        self._watched: dict[object, _Watched] = {}
        self._thread: threading.Thread | None = None
        self._ends = threading.Event()  # with the process

    def watch(
        self, key: object, what: str, done: Callable[[], bool], report_after_s: float, device: torch.device
    ) -> None:
        """Logs `what` as an error, once, if `done()` is still false after `report_after_s` seconds.

        A key that is watched already starts again, because a bucket's event belongs to its latest step.

        Args:
            key: identifies the reduction.
            what: names it in the log.
            done: whether it has finished; called in the monitor's thread.
            report_after_s: seconds after which it is overdue.
            device: one that this process uses.
        """
        with self._lock:
            self._watched[key] = _Watched(what, done, self._clock(), report_after_s)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, args=(device,), name="fusedreduce-stall-monitor", daemon=True
                )
                end_at_exit(self._thread, self._ends.set)
                self._thread.start()

    def poll(self) -> int:
        """Polls every reduction once; returns how many are still in flight."""
        with self._lock:
            watched = list(self._watched.items())
        now = self._clock()
        for key, one in watched:
            if one.done():
                with self._lock:
                    if self._watched.get(key) is one:
                        del self._watched[key]
            elif not one.reported and now - one.since_s >= one.report_after_s:
                one.reported = True
                _logger.error(
                    "%s has not finished after %.1f s: another rank has probably died, left or fallen behind",
                    one.what,
                    now - one.since_s,
                )
        with self._lock:
            return len(self._watched)

    def _run(self, device: torch.device) -> None:
        if device.type == "cuda":
            _prepare_thread(device)
        while not self._ends.wait(self._poll_s):
            if self.poll() == 0:
                with self._lock:
                    if not self._watched:
                        self._thread = None
                        return


def _loaded(library: str) -> str:
    """The path from which this process has loaded a library; its name where it has not.

    By its name the loader finds a system's copy, which has a state of its own, beside the one in torch's wheel. Where
    both are loaded it is torch's that counts.
    """
    try:
        lines = MAPS.read_text(errors="surrogateescape").split("\n")
    except OSError:
        return library
    paths = [line[line.index("/") :].removesuffix(" (deleted)") for line in lines if "/" in line]
    of_torch = f"{Path(torch.__file__).resolve().parent}/"
    found = [path for path in paths if path.rpartition("/")[2].startswith(library)]
    return min(found, key=lambda path: not path.startswith(of_torch), default=library)


def _prepare_thread(device: torch.device) -> None:
    """Lets this thread query events of `device` at any time, without making a context on another device.

    In a thread's default capture mode, an event query is an error while any other thread captures a CUDA graph, and
    invalidates that capture. A new thread's device is 0, so that on the other ranks of a machine the first query would
    make a context on rank 0's GPU, which takes half a GB.
    """
    # The driver's function, because the runtime's would make that context.
    name, function = "libcuda.so.1", "cuThreadExchangeStreamCaptureMode"
    if torch.version.hip is not None:
        name, function = _loaded("libamdhip64.so"), "hipThreadExchangeStreamCaptureMode"
    problem = ""
    try:
        status = getattr(ctypes.CDLL(name), function)(ctypes.byref(ctypes.c_int(_RELAXED)))
        if status != 0:
            problem = f"{function} returned status {status}"
    except (OSError, AttributeError) as error:
        problem = str(error)
    if problem:
        _logger.warning(
            "the stall monitor cannot set its thread's capture mode (%s): it may invalidate a CUDA graph that you "
            "capture within seconds of a step",
            problem,
        )
    torch.cuda.set_device(device)
