"""wait_for: the one place where the package waits for collectives and for the futures of comm hooks.

As the process ends it waits for threads too, Gloo's and daemon threads of this package. A collective's wait is over
before Gloo's thread has dropped what it holds of Python: the tensors, the context of the backward that issued it,
callbacks of its future. A thread that wants the interpreter's lock for that, or behind an operator of torch, when the
interpreter has begun to end is ended within C++, and the process with it: "terminate called without an active
exception", exit status -6.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch

from ..errors import CollectiveError, FusedReduceError
from .protocol import Ranks

# Added to the timeout, because the backend's own error says more than ours can.
GRACE_S = 3.0
_GLOO_THREAD = "pt_gloo_runloop"
EXIT_S = 5.0  # for which the end of a process waits at most, for each of both kinds of threads
_ends: MutableMapping[threading.Thread, Callable[[], object]] = WeakKeyDictionary()


class Waits(Protocol):
    """A collective in flight: a `Pending`, or a torch Work."""

    def wait(self) -> Any:
        """Blocks until its tensors hold the result; on CUDA only orders the current stream behind it."""
        ...


def wait_for(pending: Waits | torch.futures.Future[Any], what: str | Callable[[], str], communicator: Ranks) -> Any:
    """Waits for a collective or a future; on CUDA only the current stream waits for the device.

    A failure marks the group as lost (`communicator.lost`), so that `Reducer.reset` refuses it on every rank.

    Args:
        pending: what is waited for, no longer than the group's timeout.
        what: names it in the error ("the all-reduce of bucket 3 (...)"); a function is called only for an error.
        communicator: the ranks that take part.

    Returns:
        A future's value; what `pending.wait()` returns otherwise.

    Raises:
        CollectiveError: it failed or timed out; with this rank, `what`, and the seconds waited.
        FusedReduceError: an error of ours that a callback has set in a future, unchanged.
    """
    began_s = time.monotonic()
    try:
        if isinstance(pending, torch._C.Future):
            _wait_for_future(pending, communicator)
        return pending.wait()
    except RuntimeError as error:
        if isinstance(error, FusedReduceError) and isinstance(pending, torch._C.Future):
            if isinstance(error, CollectiveError):
                mark_lost(communicator, str(error))
            raise
        named = what if isinstance(what, str) else what()
        named = f"{named} failed after {time.monotonic() - began_s:.1f} s"
        raise collective_failed(named, communicator, error) from error


@contextmanager
def naming_failure(what: str, communicator: Ranks, but: type[RuntimeError] | tuple[()] = ()) -> Iterator[None]:
    """Makes a RuntimeError of what it encloses a `collective_failed` with `what`; those of class `but` stay."""
    try:
        yield
    except but:
        raise
    except RuntimeError as error:
        raise collective_failed(what, communicator, error) from error


def collective_failed(what: str, communicator: Ranks, cause: BaseException) -> CollectiveError:
    """Makes the error for a collective that could not be issued or waited for, and marks the group as lost."""
    error = collective_error(what, communicator.rank, cause)
    mark_lost(communicator, str(error))
    return error


def mark_lost(communicator: Ranks, why: str) -> None:
    """Records why no collective of the group can be relied on any more; the first reason stays."""
    communicator.lost = communicator.lost or why


def collective_error(what: str, rank: int, cause: BaseException) -> CollectiveError:
    """Makes the error for a collective that failed with `cause`; `collective_failed` also marks the group as lost."""
    return CollectiveError(
        f"rank {rank}: {what}. A rank died, left, or did not answer within the process group's timeout. Cause: {cause}"
    )


def _wait_for_future(future: torch._C.Future[Any], communicator: Ranks) -> None:
    if future.done():
        return
    completed = threading.Event()
    future.add_done_callback(lambda _: completed.set())
    timeout_s = communicator.timeout_s()
    if not completed.wait(timeout_s + GRACE_S):
        raise RuntimeError(f"it was not completed within {timeout_s:g} s, the process group's timeout")


def end_at_exit(thread: threading.Thread, end: Callable[[], object]) -> None:
    """Has `end()` called, and the thread joined, as the process ends.

    Args:
        thread: a daemon thread, which may not have been started yet.
        end: tells it to end; must not reference it.
    """
    _ends[thread] = end


def end_threads() -> None:
    """Ends the threads of `end_at_exit`, and joins them."""
    until_s = time.monotonic() + EXIT_S
    threads = [(thread, end) for thread in threading.enumerate() if (end := _ends.get(thread)) is not None]
    for _, end in threads:
        end()
    for thread, _ in threads:
        thread.join(max(until_s - time.monotonic(), 0.0))


def let_gloo_threads_rest() -> None:
    """Waits until every thread of Gloo's, of any group, sleeps without having been woken for a while.

    Called with the interpreter's lock, which it gives up for that while. A thread that waits for the lock wakes at each
    switch interval, one that has no work or waits for a peer does not.
    """
    until_s = time.monotonic() + EXIT_S
    before = None
    while (threads := _gloo_threads()) and time.monotonic() < until_s:
        if threads == before and all("S (sleeping)" in text for text in threads.values()):
            return
        before = threads
        time.sleep(min(max(0.01, 2 * sys.getswitchinterval()), EXIT_S))


def _gloo_threads() -> dict[str, str]:
    """Of each thread of Gloo's in this process: whether it sleeps, and how often it has been switched to, as text."""
    found = {}
    with suppress(OSError):  # there is no /proc
        for task in Path("/proc/self/task").iterdir():
            with suppress(OSError):  # it has ended
                status = (task / "status").read_text(errors="replace").splitlines()  # names may be cut within a letter
                if status[0].endswith(_GLOO_THREAD):
                    found[task.name] = " ".join(line for line in status if line.startswith("State") or "ctxt_" in line)
    return found


atexit.register(let_gloo_threads_rest)
atexit.register(end_threads)
