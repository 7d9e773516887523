"""Runs each of several ranks, or devices, in a thread of its own, and waits until all threads have ended."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from ...errors import CollectiveError

T = TypeVar("T")
# How often a caller looks for interrupts: a signal that came before its wait, or to another thread, ends no wait.
_POLL_S = 0.1


def run_in_threads(
    peer: str, cases: Sequence[Callable[[], T]], abort: Callable[[int | None, BaseException], None]
) -> list[T]:
    """Runs each case in a thread of its own.

    Args:
        peer: what a case is called in messages and in names of threads: "rank".
        cases: one per peer.
        abort: called with a peer's number and the error that it raised, in its thread, or with None and what
            interrupted the caller. It must see to it that the other peers do not wait for that one.

    Returns:
        What each case returned, in order.

    Raises:
        BaseException: the first error that a peer raised of its own, once all threads have ended. (A CollectiveError
            with a cause is what another raises because of it.) Others of these are added as notes.
    """
    results: dict[int, T] = {}
    errors: list[tuple[int, BaseException]] = []
    # Not Thread.join: once interrupted, it takes a running thread for a stopped one (CPython 3.11).
    ended = [threading.Event() for _ in cases]

    def work(number: int) -> None:
        try:
            results[number] = cases[number]()
        except BaseException as error:
            errors.append((number, error))
            abort(number, error)
        finally:
            ended[number].set()

    threads = [
        threading.Thread(target=work, args=(number,), name=f"fusedreduce-{peer}-{number}")
        for number in range(len(cases))
    ]
    try:
        for thread in threads:
            thread.start()
        for end in ended:
            while not end.wait(_POLL_S):
                pass
    except BaseException as error:
        abort(None, error)
        for thread, end in zip(threads, ended, strict=True):
            if thread.ident is not None:
                end.wait()
        raise
    finally:
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    if errors:
        # A CollectiveError with a cause is what another peer raises because of that one.
        own = [one for one in errors if not (isinstance(one[1], CollectiveError) and one[1].__cause__)] or errors[:1]
        first = own[0][1]
        for number, other in own[1:]:
            first.add_note(f"{peer} {number} raised {type(other).__name__}: {other}")
        raise first
    return [results[number] for number in range(len(cases))]
