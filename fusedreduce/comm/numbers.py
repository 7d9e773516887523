"""Numbers that ranks tell each other: from Python's lists to where a backend takes tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def on_device(numbers: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`numbers` as a tensor of `dtype` on `device`, [len(numbers)]; on CUDA without a wait of the host's."""
    host = torch.tensor(numbers, dtype=dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
