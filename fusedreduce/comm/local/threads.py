"""A thread for each of several peers, until all have come to their end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from ...errors import CollectiveError

T = TypeVar("T")


def run_in_threads(
    peer: str, cases: Sequence[Callable[[], T]], give_up: Callable[[int | None, BaseException], None]
) -> list[T]:
    """What each case returned, which had a thread of its own.

    Args:
        peer: what a case is called, in messages and names of threads: "rank".
        cases: one per peer.
        give_up: told of what the peer with a number raised, in its thread, or of what interrupted the caller (None):
            sees to it that the others do not wait for it.

    Raises:
        BaseException: the first that a peer raised, after all threads have ended. What others raised of their own is
            added as notes.
    """
    results: dict[int, T] = {}
    errors: list[tuple[int, BaseException]] = []
    # Not `join`: once interrupted, it takes a thread that runs for one that has stopped (CPython 3.11).
    ended = [threading.Event() for _ in cases]

    def work(number: int) -> None:
        try:
            results[number] = cases[number]()
        except BaseException as error:
            errors.append((number, error))
            give_up(number, error)
        finally:
            ended[number].set()

    threads = [
        threading.Thread(target=work, args=(number,), name=f"fusedreduce-{peer}-{number}")
        for number in range(len(cases))
    ]
    try:
        for thread in threads:
            thread.start()
        for one in ended:
            one.wait()
    except BaseException as error:
        give_up(None, error)
        for thread, one in zip(threads, ended, strict=True):
            if thread.ident is not None:
                one.wait()
        raise
    finally:
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    if errors:
        _, first = errors[0]
        for number, other in errors[1:]:
            if not isinstance(other, CollectiveError):
                first.add_note(f"{peer} {number} raised {type(other).__name__}: {other}")
        raise first
    return [results[number] for number in range(len(cases))]
