"""Numbers that ranks exchange: from Python lists to tensors on the device that a backend takes."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def on_device(numbers: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Makes a tensor of numbers; on CUDA the copy does not block the host.

    Args:
        numbers: to be put into the tensor.
        dtype: of the tensor.
        device: of the tensor.

    Returns:
        A tensor, [len(numbers)].
    """
    host = torch.tensor(numbers, dtype=dtype, device="cpu")
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
