"""Folders that the commands write to."""

from __future__ import annotations

import argparse
import tempfile
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
