"""Values that tell places apart: sums of which show in what order they were added up."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Beside a number this large, one of about 1 loses bits in the arithmetic in which gradients of a dtype are added up.
_LARGE = {torch.float64: 2.0**40, torch.float32: 2.0**20, torch.bfloat16: 2.0**20, torch.float16: 2.0**14}


def addends(count: int, shape: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
    """`count` tensors, of three or more of which the sum depends on the order of additions in most elements.

    In each element one of them has a large number and the next one its negative, from another place on; the others have
    about 1, and what that loses beside the large one is gone when that is taken off again.
    """
    places, found = torch.randint(count, tuple(shape)), []
    for place in range(count):
        large = torch.where(places == place, _LARGE[dtype], -_LARGE[dtype])
        is_large = (places == place) | ((places + 1) % count == place)
        found.append(torch.where(is_large, large, torch.randn(tuple(shape))).to(dtype))
    return found
