"""Gradients that are views of a bucket's buffer (gradient_as_bucket_view)."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class GradientView:
    """A gradient that is a view of a buffer. Others may put other data behind the tensor (`grad.data = ...`)."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.dtype = tensor.dtype
        self._address = tensor.data_ptr()
        self._data = tensor.data

    def is_held_by(self, gradient: torch.Tensor | None) -> bool:
        """Whether `gradient` is this view, still with its own data."""
        return gradient is self.tensor and self.tensor.data_ptr() == self._address

    def restored(self) -> torch.Tensor:
        """The view with its own data."""
        if self.tensor.data_ptr() != self._address:
            self.tensor = self._data.data
        return self.tensor


def which_are(gradients: Sequence[torch.Tensor | None], views: Sequence[GradientView]) -> list[bool]:
    """Per gradient whether it is its view; empty where there are no views yet."""
    return [view.is_held_by(gradient) for gradient, view in zip(gradients, views, strict=False)]
