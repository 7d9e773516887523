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
