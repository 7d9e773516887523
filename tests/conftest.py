"""Where Triton's interpreter is switched on: before anything imports triton, unless told otherwise or on a GPU."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from ranks import RankPool

if "TRITON_INTERPRET" not in os.environ and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

pytest_plugins = ["beside"]

# Interpreted kernels are slow and their speed says nothing; the examples are what counts.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("default")


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one."""
    from ranks import group_of_one  # not before TRITON_INTERPRET is set

    with group_of_one():
        yield


@pytest.fixture(scope="module")
def two() -> Iterator[RankPool]:
    """Two ranks on the torch path."""
    yield from _pool(2)


@pytest.fixture(scope="module")
def three() -> Iterator[RankPool]:
    """Three ranks on the torch path."""
    yield from _pool(3)


def _pool(world: int) -> Iterator[RankPool]:
    from ranks import RankPool

    pool = RankPool(world)
    yield pool
    pool.close()


def pytest_collection_finish() -> None:
    """What has been imported stays: the garbage collector, a sixth of the time otherwise, need not look at it again."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked gpu skip, and are counted as skipped, where there is no GPU."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu") is not None:
                item.add_marker(pytest.mark.skip(reason="no CUDA GPU on this machine"))
