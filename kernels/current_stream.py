"""current_stream: the stream on which a launch goes, without an object made anew for each question."""

from __future__ import annotations

from collections.abc import Callable

import torch

raw_stream: Callable[[int], int] | None
try:
    raw_stream = torch._C._cuda_getCurrentRawStream
except AttributeError:  # a torch that was built without CUDA or ROCm
    raw_stream = None
_streams: dict[tuple[int, int], torch.cuda.Stream] = {}


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """torch.cuda.current_stream, which takes 6 us to make its object, by the stream's handle, which takes 0.2 us.

    Args:
        device: a CUDA device, with its index.
    """
    if raw_stream is None:
        return torch.cuda.current_stream(device)
    key = device.index, raw_stream(device.index)
    stream = _streams.get(key)
    if stream is None:
        stream = _streams[key] = torch.cuda.current_stream(device)
    return stream
