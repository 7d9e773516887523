"""Stands in for the functions that a reducer calls and that check nothing, whatever path it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fusedreduce.kernels import cpu, cpu_encoded, few_ops, launchers


def wrap(patch: pytest.MonkeyPatch, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Has the function of that name on every path be what `around` makes of it."""
    for owner in (one for one in (cpu, cpu_encoded, few_ops, launchers) if hasattr(one, name)):
        patch.setattr(owner, name, around(getattr(owner, name)))


def replace(patch: pytest.MonkeyPatch, name: str, by: Callable[..., Any]) -> None:
    """Has `by` be called instead of the function of that name, on every path."""
    wrap(patch, name, lambda _: by)
