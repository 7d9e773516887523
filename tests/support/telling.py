"""Values that tell places apart: sums of which show in what order they were added up."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Beside a number this large, one of about 1 loses bits in the arithmetic in which gradients of a dtype are added up.
_LARGE = {torch.float64: 2.0**40, torch.float32: 2.0**20, torch.bfloat16: 2.0**20, torch.float16: 2.0**15}


def addends(count: int, shape: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
    """`count` tensors, of three or more of which the sum depends on the order of additions in most elements.

    One has numbers of about 1, the next a large one, the next its negative, and so on, from another place on in every
    element: what the small number loses beside the large one is gone when that is taken off again.
    """
    turns, found = torch.randint(3, tuple(shape)), []
    for place in range(count):
        kind = (turns + place) % 3
        large = torch.where(kind == 1, _LARGE[dtype], -_LARGE[dtype])
        found.append(torch.where(kind == 0, torch.randn(tuple(shape)), large).to(dtype))
    return found
