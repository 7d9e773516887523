"""A progress bar in plain ASCII."""

from __future__ import annotations

import os
from typing import TextIO

_WIDTH = 40
_COLUMNS = 80  # if the terminal does not report its width


class Progress:
    """Redraws one line on a terminal; elsewhere writes a line at every 10 %.

    Args:
        total: number of steps.
        stream: where to write.
    """

    def __init__(self, total: int, stream: TextIO) -> None:
        self._total = total
        self._stream = stream
        self._live = stream.isatty()
        self._shown = -1

    def show(self, done: int) -> None:
        """Shows that `done` steps are done."""
        percent = 100 * done // self._total
        mark = percent if self._live else percent // 10
        if mark == self._shown and done != self._total:
            return
        self._shown = mark
        if self._live:
            numbers = f"{percent:3d} %  step {done}/{self._total}"
            # A line that wraps cannot be redrawn.
            width = max(0, min(_WIDTH, self._columns() - len(f"training [] {numbers}") - 1))
            filled = width * done // self._total
            bar = "#" * filled + "." * (width - filled)
            self._stream.write(f"\rtraining [{bar}] {numbers}")
            self._stream.write("\n" if done == self._total else "")
        else:
            self._stream.write(f"training {percent:3d} %  step {done}/{self._total}\n")
        self._stream.flush()

    def _columns(self) -> int:
        return os.get_terminal_size(self._stream.fileno()).columns or _COLUMNS
