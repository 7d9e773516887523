"""Readiness: when gradients become ready, averaged over the steps in which that was measured.

All times are ns since this rank's backward began, less the time of earlier packing, by the host's clock. On CUDA that
is when work was enqueued, so device times are kept as well, and used instead where there are any.

Example, weight 1/2: 100 and then 200 give 150.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .timeline import MISSING_NS


class Readiness:
    """One rank's average ready times.

    Args:
        parameters: how many.
    """

    def __init__(self, parameters: int) -> None:
        self._missing = np.full(parameters, MISSING_NS, dtype=np.int64)
        self._host = self._missing
        self._device: npt.NDArray[np.int64] | None = None

    def add(self, host_ns: Sequence[int], device_ns: Sequence[int]) -> None:
        """Adds one step's times; MISSING_NS leaves a parameter's average unchanged.

        Args:
            host_ns: per parameter, or MISSING_NS.
            device_ns: the same by device events; empty where there are none.

        Raises:
            ValueError: the number of times is wrong, or one is below MISSING_NS.
        """
        self._host = _averaged(self._host, host_ns)
        if device_ns:
            self._device = _averaged(self._missing if self._device is None else self._device, device_ns)

    def best(self) -> npt.NDArray[np.int64]:
        """Returns the average per parameter in ns, by device events if there are any; MISSING_NS: not known."""
        return self._host if self._device is None else self._device


def _averaged(before: npt.NDArray[np.int64], times_ns: Sequence[int]) -> npt.NDArray[np.int64]:
    new = np.asarray(times_ns, dtype=np.int64)
    if new.shape != before.shape:
        raise ValueError(f"expected {len(before)} times, got {new.size}")
    if (new < MISSING_NS).any():
        raise ValueError(f"a time of {int(new.min())} ns: backward cannot make a gradient before it begins")
    # The difference is taken first, so that times of 1e15 ns do not overflow.
    moved = np.where(before == MISSING_NS, new, before + (new - before) // 2)
    return np.where(new == MISSING_NS, before, moved)
