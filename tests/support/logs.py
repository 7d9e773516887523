"""What is logged, in rank processes, which have no caplog."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def logged(name: str = "fusedreduce", level: int = logging.INFO) -> Iterator[list[str]]:
    """Context with the messages that the logger of this name, or one below it, gets from `level` on."""
    logger = logging.getLogger(name)
    kept: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: kept.append(record.getMessage())  # type: ignore[method-assign]
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield kept
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
