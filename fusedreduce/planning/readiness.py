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


class Average:
    """Exponential averages of a row of times.

    Args:
        count: how many there are.
        share: the weight of the latest sample, as (numerator, denominator).
    """

    def __init__(self, count: int, share: tuple[int, int] = (1, 2)) -> None:
        self._share = share
        self._values = np.full(count, MISSING_NS, dtype=np.int64)
        self.samples = 0

    def add(self, times_ns: Sequence[int]) -> None:
        """Adds one step's times, in ns; MISSING_NS leaves its average unchanged.

        Raises:
            ValueError: the number of times is wrong, or one is below MISSING_NS.
        """
        new = np.asarray(times_ns, dtype=np.int64)
        if new.shape != self._values.shape:
            raise ValueError(f"expected {len(self._values)} times, got {new.size}")
        if (new < MISSING_NS).any():
            raise ValueError(f"a time of {int(new.min())} ns: backward cannot make a gradient before it begins")
        part, whole = self._share
        # The difference is taken first, so that times of 1e15 ns do not overflow.
        moved = self._values + (new - self._values) * part // whole
        moved = np.where(self._values == MISSING_NS, new, moved)
        self._values = np.where(new == MISSING_NS, self._values, moved)
        self.samples += 1

    def values(self) -> list[int]:
        """Returns the averages in ns; MISSING_NS where there was no sample."""
        return [int(value) for value in self._values]

    def clear(self) -> None:
        """Removes all samples."""
        self._values = np.full_like(self._values, MISSING_NS)
        self.samples = 0


class Readiness:
    """One rank's average ready times.

    Args:
        parameters: how many.
    """

    def __init__(self, parameters: int) -> None:
        self.host = Average(parameters)
        self.device = Average(parameters)

    def add(self, host_ns: Sequence[int], device_ns: Sequence[int]) -> None:
        """Adds one step's times.

        Args:
            host_ns: per parameter, or MISSING_NS.
            device_ns: the same by device events; empty where there are none.
        """
        self.host.add(host_ns)
        if device_ns:
            self.device.add(device_ns)

    def best(self) -> npt.NDArray[np.int64]:
        """Returns the average per parameter in ns, by device events if there are any; MISSING_NS: not known."""
        source = self.device if self.device.samples else self.host
        return np.asarray(source.values(), dtype=np.int64)
