"""Files that are written in one piece: traces, and what the commands make of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a file atomically: a reader finds the old file or the new one, and an error leaves the old one.

    Args:
        path: the file.
        write: called with the path to write to, a temporary file beside it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """Writes a text file atomically, with a line feed at its end.

    Args:
        path: the file.
        text: its content without the last line feed.
    """
    replace_file(path, lambda temporary: temporary.write_text(text + "\n"))
