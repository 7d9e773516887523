"""Folders and files that the commands write."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def writable(parser: argparse.ArgumentParser, out: Path) -> Path:
    """Makes a folder, and ends the command with status 2 if no file can be written there.

    Args:
        parser: reports the error.
        out: the folder given by --out.

    Returns:
        `out`.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            return out
    except OSError as error:
        parser.error(f"argument --out: {str(out)!r} is not a folder that can be written to: {error.strerror}")


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
