"""How long this thread's kernels took to compile, so that a construction that takes long can say so.

Before ranks train each of them compiles its kernels, or finds them in Triton's cache. Eight ranks that share neither a
cache nor enough cores wait long without a word.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class _Spent(threading.local):
    seconds = 0.0
    within = False


_spent = _Spent()
_clock = time.perf_counter


@contextmanager
def counted() -> Iterator[None]:
    """Counts the time within, once where it is entered within itself; kernels are compiled here, and launched once."""
    if _spent.within:
        yield
        return
    _spent.within, begin = True, _clock()
    try:
        yield
    finally:
        _spent.within = False
        _spent.seconds += _clock() - begin


def take() -> float:
    """Seconds counted by this thread since the last call."""
    seconds, _spent.seconds = _spent.seconds, 0.0
    return seconds
