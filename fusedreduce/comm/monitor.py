"""StallMonitor: names the bucket whose reduction does not finish, before the backend's watchdog ends the process.

On NCCL `wait()` only orders streams, so a dead peer is found by nobody until the watchdog aborts, and the watchdog
knows collectives, not buckets. A daemon thread asks each reduction's event whether it is done (a query: the GPU is
never waited for) and logs the bucket once when it is overdue.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

_logger = logging.getLogger(__name__)


@dataclass
class _Watched:
    what: str
    done: Callable[[], bool]
    since_s: float
    report_after_s: float
    reported: bool = False


class StallMonitor:
    """Watches reductions by polling; the thread starts with the first and ends when none is left.

    Args:
        poll_s: seconds between two looks.
        clock: seconds, monotonic; tests give their own.
    """

    def __init__(self, poll_s: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._poll_s = poll_s
        self._clock = clock
        self._lock = threading.Lock()
        self._watched: dict[object, _Watched] = {}
        self._thread: threading.Thread | None = None

    def watch(self, key: object, what: str, done: Callable[[], bool], report_after_s: float) -> None:
        """Logs `what` as an error, once, if `done()` is still false after `report_after_s` seconds.

        A key that is watched already starts again: a bucket's event belongs to its latest step.
        """
        with self._lock:
            self._watched[key] = _Watched(what, done, self._clock(), report_after_s)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="fusedreduce-stall-monitor", daemon=True)
                self._thread.start()

    def look(self) -> int:
        """One look at everything watched; returns how many reductions are still under way."""
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
                    "%s has not finished after %.1f s: a peer has probably died, left or fallen behind",
                    one.what,
                    now - one.since_s,
                )
        with self._lock:
            return len(self._watched)

    def forget_all(self) -> None:
        """Stops watching everything that is watched now."""
        with self._lock:
            self._watched.clear()

    def _run(self) -> None:
        while True:
            time.sleep(self._poll_s)
            if self.look() == 0:
                with self._lock:
                    if not self._watched:
                        self._thread = None
                        return
