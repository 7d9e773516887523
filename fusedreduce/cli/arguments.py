"""Values of the commands' options: checked, or refused in one line."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """Reads a whole number from `least` to `most`, for argparse."""

    def number(typed: str) -> int:
        if not typed.isdecimal() or int(typed) < least or (most is not None and int(typed) > most):
            to = "on" if most is None else f"to {most:,}"
            raise argparse.ArgumentTypeError(f"must be a whole number from {least} {to}, got {typed!r}")
        return int(typed)

    return number


def names(known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """Reads names with commas between them, or `all`, for argparse."""

    def chosen(typed: str) -> tuple[str, ...]:
        wanted = tuple(known) if typed == "all" else tuple(dict.fromkeys(typed.split(",")))
        for name in wanted:
            if name not in known:
                raise argparse.ArgumentTypeError(f"unknown name {name!r}: use {', '.join(known)} or all")
        return wanted

    return chosen


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
