"""What Triton's interpreter gets wrong, in one place; test_interpreter_defects.py fails when Triton mends it.

fp32 -> bf16 cuts the low bits off instead of rounding to nearest, and bf16 subnormals are converted wrongly in both
directions, as are NaNs whose payload lies in the cut bits. Everything else that the kernels use is exact.
"""

from __future__ import annotations

import torch

from fusedreduce.kernels import reference
from fusedreduce.kernels.cast import CastWire

_store_rounded = reference.store_rounded


def store_as_interpreted(destination: torch.Tensor, values: torch.Tensor, cast: CastWire | None = None) -> None:
    """reference.store_rounded as the interpreter computes it, for values that are not bf16 subnormals."""
    if destination.dtype is not torch.bfloat16 or values.dtype is torch.bfloat16:
        _store_rounded(destination, values, cast)
        return
    single = _round_to_odd(values) if values.dtype is torch.float64 else values.float()
    destination.copy_((single.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16))


def _round_to_odd(values: torch.Tensor) -> torch.Tensor:
    """fp64 -> fp32 by the definition: cut off, then set the last bit if anything was lost."""
    nearest = values.to(torch.float32)
    above = nearest.to(torch.float64).abs() > values.abs()
    bits = nearest.view(torch.int32)
    cut = torch.where(above, bits - 1, bits)
    lost = (cut.view(torch.float32).to(torch.float64) != values) & values.isfinite()
    return torch.where(lost, cut | 1, torch.where(values.isfinite(), cut, bits)).view(torch.float32)
