"""A progress bar in plain ASCII."""

from __future__ import annotations

from typing import TextIO

_WIDTH = 40


class Progress:
    """Redraws one line on a terminal; elsewhere writes a line at every tenth of the way.

    Args:
        total: what 100 % is.
        stream: where to.
    """

    def __init__(self, total: int, stream: TextIO) -> None:
        self._total = total
        self._stream = stream
        self._live = stream.isatty()
        self._shown = -1

    def show(self, done: int) -> None:
        """Says that `done` of the total are done."""
        percent = 100 * done // self._total
        mark = percent if self._live else percent // 10
        if mark == self._shown and done != self._total:
            return
        self._shown = mark
        if self._live:
            filled = _WIDTH * done // self._total
            bar = "#" * filled + "." * (_WIDTH - filled)
            self._stream.write(f"\rtraining [{bar}] {percent:3d} %  step {done}/{self._total}")
            self._stream.write("\n" if done == self._total else "")
        else:
            self._stream.write(f"training {percent:3d} %  step {done}/{self._total}\n")
        self._stream.flush()
