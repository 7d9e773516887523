"""What a step walks: calls of this package's Python functions, between which files, on all threads."""

from __future__ import annotations

import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import fusedreduce

PACKAGE = Path(fusedreduce.__file__).parent
# The symlink and what it leads to: a file of kernels/ may be known by either.
_FOLDERS = {f"{PACKAGE}/": "", f"{(PACKAGE / 'kernels').resolve()}/": "kernels/"}
_INLINED = {"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"}  # calls for some versions of Python alone


class Call(NamedTuple):
    """One call: the function's file, within the package, and its qualified name."""

    file: str
    function: str


@dataclass(frozen=True)
class Walk:
    """What was called, in order, by thread."""

    threads: tuple[tuple[Call, ...], ...]

    @property
    def calls(self) -> int:
        return sum(map(len, self.threads))

    @property
    def moves(self) -> int:
        """How often a call is into another file than the call before it."""
        return sum(one.file != other.file for calls in self.threads for one, other in pairwise(calls))

    @property
    def files(self) -> dict[str, int]:
        """How many calls into each file."""
        return dict(Counter(call.file for calls in self.threads for call in calls))

    @property
    def functions(self) -> dict[str, int]:
        """How many calls of each function."""
        return dict(Counter(call.function for calls in self.threads for call in calls))


def walked(step: Callable[[], object]) -> Walk:
    """Runs it.

    Threads that exist before are looked at from Python 3.12 on, new ones always.

    Args:
        step: what to look at.
    """
    threads: defaultdict[int, list[Call]] = defaultdict(list)

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name not in _INLINED:
            path = frame.f_code.co_filename
            for folder, name in _FOLDERS.items():
                if path.startswith(folder):
                    call = Call(name + path[len(folder) :], frame.f_code.co_qualname)
                    threads[threading.get_ident()].append(call)

    before, before_of_new = sys.getprofile(), threading.getprofile()
    everywhere: Callable[..., None] = getattr(threading, "setprofile_all_threads", threading.setprofile)
    everywhere(note)
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
        everywhere(before_of_new)
        sys.setprofile(before)
    return Walk(tuple(map(tuple, threads.values())))
