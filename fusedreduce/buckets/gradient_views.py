"""Gradients that are views of a bucket's buffer (gradient_as_bucket_view)."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch

from .tensors import dense_shape, like_parameter


class GradientViews:
    """One view per gradient, and a check that it still is one: a user may replace its data (`grad.data = ...`).

    Args:
        buffer: what they are views of.
        parameters: whose gradients they are.
        offsets: where each gradient begins, in real elements.

    Attributes:
        slots: each gradient's memory, as real numbers.
        tensors: the gradients, with version counters of their own, so that an all-reduce of the buffer changes none.
    """

    def __init__(self, buffer: torch.Tensor, parameters: Sequence[torch.Tensor], offsets: Sequence[int]) -> None:
        self.buffer = buffer
        places = zip(map(dense_shape, parameters), offsets, strict=True)
        self.slots = [buffer.as_strided(size, strides, offset) for (size, strides), offset in places]
        self.tensors = list(map(like_parameter, self.slots, parameters))
        self.dtypes = [tensor.dtype for tensor in self.tensors]
        self._addresses = [tensor.data_ptr() for tensor in self.tensors]
        self._data = [tensor.data for tensor in self.tensors]

    def hold(self, slot: int, gradient: torch.Tensor | None) -> bool:
        """Whether `gradient` is the view of this slot, still with its own data."""
        return gradient is self.tensors[slot] and gradient.data_ptr() == self._addresses[slot]

    def hold_all(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        """Whether every gradient is the view of its slot, still with its own data."""
        same = all(map(operator.is_, gradients, self.tensors))
        return same and list(map(torch.Tensor.data_ptr, self.tensors)) == self._addresses

    def all_restored(self) -> Sequence[torch.Tensor]:
        """`restored` of every slot."""
        if list(map(torch.Tensor.data_ptr, self.tensors)) != self._addresses:
            return [self.restored(slot) for slot in range(len(self.tensors))]
        return self.tensors

    def restored(self, slot: int) -> torch.Tensor:
        """The view of this slot; made anew if its data was replaced."""
        if self.tensors[slot].data_ptr() != self._addresses[slot]:
            self.tensors[slot] = self._data[slot].data
        return self.tensors[slot]
