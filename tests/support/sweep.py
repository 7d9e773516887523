"""How many examples sweeps take that cost seconds: all of them under `--full`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hypothesis import settings

full = False  # set by conftest.py
SHARE = 5


def sweep(examples: int) -> settings:
    """Settings with `examples` under `pytest --full`, and a fifth of that otherwise."""
    from hypothesis import settings  # not on every machine with a GPU

    return settings(max_examples=examples if full else examples // SHARE)
