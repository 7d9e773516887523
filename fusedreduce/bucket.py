"""One bucket: its layout, the tables the kernels walk, its wire buffer, and where it stands."""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch

from .kernels.table import ChunkTable, PointerTable
from .planning.layout import Layout


class BucketState(enum.Enum):
    """Where a bucket stands within one step."""

    IDLE = "idle"  # nothing under way; the wire buffer is free
    TAKEN = "taken"  # given out to be packed; if that raises, never again
    LAUNCHED = "launched"  # packed, and its collective has been issued
    FAILED = "failed"  # the collective or a kernel raised; the wire buffer is not used again


class Bucket:
    """What is reduced together, for as long as its layout lives.

    The wire buffer belongs to the bucket alone and is allocated at its first step: two buckets under way can never
    meet in one buffer, and no step allocates after that.

    Args:
        layout: slots of the wire.
        dtypes: gradient dtype of each slot.
        wire_dtype: dtype that travels.
        device: where gradients and wire live.
        label: for messages, logs and profiler ranges.
    """

    def __init__(
        self,
        layout: Layout,
        dtypes: Sequence[torch.dtype],
        wire_dtype: torch.dtype,
        device: torch.device,
        label: str,
    ) -> None:
        self.layout = layout
        self.wire_dtype = wire_dtype
        self.device = device
        self.label = label
        self.chunks = ChunkTable(layout.numels, layout.offsets, dtypes, layout.numel)
        self.pointers = PointerTable()
        self.state = BucketState.IDLE
        self.allocations = 0
        self._wire: torch.Tensor | None = None
        self._unpacked: torch.cuda.Event | None = None

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of the divisor and the scale."""
        return torch.float64 if self.chunks.fp64 else torch.float32

    @property
    def wire_bytes(self) -> int:
        """Bytes that one reduction hands to the collective, padding included."""
        return self.layout.numel * self.wire_dtype.itemsize

    def wire(self) -> torch.Tensor:
        """The wire buffer; on CUDA the current stream waits until the last unpack has read it."""
        if self._wire is None:
            self._wire = torch.empty(self.layout.numel, dtype=self.wire_dtype, device=self.device)
            self.allocations += 1
        elif self._unpacked is not None:
            torch.cuda.current_stream(self.device).wait_event(self._unpacked)
        return self._wire

    def unpacked(self) -> torch.cuda.Event | None:
        """Marks the wire buffer as read by what was just launched on the current stream; the event (CUDA only)."""
        if self.device.type != "cuda":
            return None
        if self._unpacked is None:
            self._unpacked = torch.cuda.Event()
        self._unpacked.record(torch.cuda.current_stream(self.device))
        return self._unpacked


# What this many steps have not used belongs to a layout that is gone.
_KEEP_STEPS = 2


@dataclass
class _Cached:
    bucket: Bucket
    last_step: int


class BucketCache:
    """Buckets by what they depend on, for callers that are shown flat buffers again and again.

    A bucket that is still under way is never given out again: who asks for the same key meanwhile gets another one.
    """

    def __init__(self) -> None:
        self._cached: dict[Hashable, list[_Cached]] = {}
        self._step = 0

    def idle(self, key: Hashable, make: Callable[[], Bucket]) -> Bucket:
        """An idle bucket of this key, made if there is none."""
        cached = self._cached.setdefault(key, [])
        for one in cached:
            if one.bucket.state is BucketState.IDLE:
                break
        else:
            one = _Cached(make(), self._step)
            cached.append(one)
        one.bucket.state = BucketState.TAKEN
        one.last_step = self._step
        return one.bucket

    def end_step(self) -> None:
        """Forgets, with their wire buffers, the buckets that the last steps have not used."""
        for key, cached in list(self._cached.items()):
            cached[:] = [one for one in cached if one.last_step >= self._step - _KEEP_STEPS]
            if not cached:
                del self._cached[key]
        self._step += 1

    def keys(self) -> list[Hashable]:
        """What is cached now."""
        return list(self._cached)
