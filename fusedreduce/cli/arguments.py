"""Values of the commands' options: checked, or refused in one line."""

from __future__ import annotations

import argparse
import importlib.util
import math
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path

from fusedreduce.planning.bucketing import MIB, BucketCaps


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


def bucket_caps(typed: str) -> BucketCaps:
    """Reads one limit of all buckets in MiB, as torch's bucket_cap_mb, for argparse."""
    try:
        cap_bytes = float(typed) * MIB
    except ValueError:
        cap_bytes = math.nan
    if not (math.isfinite(cap_bytes) and cap_bytes >= 1):
        raise argparse.ArgumentTypeError(f"must be MiB, at least one byte, got {typed!r}")
    return BucketCaps(first_bytes=int(cap_bytes), cap_bytes=int(cap_bytes), planned_bytes=int(cap_bytes))


def require(parser: argparse.ArgumentParser, *modules: str) -> None:
    """Ends the command with status 2 if a module of the demo extra cannot be imported."""
    missing = [name for name in modules if not _importable(name)]
    if missing:
        parser.error(f"{' and '.join(missing)} cannot be imported: pip install '.[demo]' in the clone")


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


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
