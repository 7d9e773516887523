"""Parameters: all parameters of a reducer, with what each part of it asks of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Parameters:
    """All parameters of a reducer, by number. Made once, and shared by all its parts.

    Args:
        tensors: the parameters.
        names: their names; left out where nobody asks.
        sparse: per parameter whether its gradient is sparse; left out where nobody asks.
    """

    tensors: tuple[torch.Tensor, ...]
    names: tuple[str, ...] = ()
    sparse: tuple[bool, ...] = ()

    @property
    def device(self) -> torch.device:
        """The first one's, where what all have in common is."""
        return self.tensors[0].device

    def locate(self, number: int, index: int) -> tuple[str, int]:
        """Name and element of `index` within the memory of parameter `number`; a complex element is a pair there."""
        return self.names[number], index // 2 if self.tensors[number].is_complex() else index
