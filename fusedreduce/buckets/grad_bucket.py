"""GradBucket: what a comm hook is shown, with the six methods of torch's (which cannot be built from Python)."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class GradBucket:
    """One bucket: flat, dense (except for a sparse gradient), of one dtype, without padding, not yet divided.

    Args:
        index: place in the launch order.
        buffer: the gradients, one after the other, each in its memory order.
        gradients: per parameter its part of the buffer.
        parameters: the bucket's parameters.
        is_last: whether it is the step's last bucket.
    """

    def __init__(
        self,
        index: int,
        buffer: torch.Tensor,
        gradients: Sequence[torch.Tensor],
        parameters: Sequence[torch.Tensor],
        is_last: bool,
    ) -> None:
        self._index = index
        self._buffer = buffer
        self._gradients = list(gradients)
        self._parameters = list(parameters)
        self._is_last = is_last

    def index(self) -> int:
        """The bucket's place in the launch order; after the first step it may hold other parameters."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """The flat gradients, as they are to be reduced."""
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """Views into the first buffer, with the shape and strides of the parameters."""
        return list(self._gradients)

    def parameters(self) -> list[torch.Tensor]:
        """The parameters, in the order of the gradients."""
        return list(self._parameters)

    def is_last(self) -> bool:
        """Whether this is the step's last bucket."""
        return self._is_last

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replaces the buffer that `buffer` returns.

        Args:
            buffer: a tensor of as many elements.
        """
        self._buffer = buffer
