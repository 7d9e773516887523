"""One bucket: its layout, the tables the kernels walk, its wire buffer, and where it stands."""

from __future__ import annotations

import enum
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ..kernels.table import ChunkTable, PointerTable, Shape
from ..planning.layout import Layout


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
        shapes: size and strides of each slot's gradient, where they are always the same.
        chunks: the layout's table, where there is one already.
        split: power of two by which the wire holds more than the result (see `exchange.divisor_split`).
    """

    def __init__(
        self,
        layout: Layout,
        dtypes: Sequence[torch.dtype],
        wire_dtype: torch.dtype,
        device: torch.device,
        label: str,
        shapes: Sequence[Shape] | None = None,
        chunks: ChunkTable | None = None,
        split: float = 1.0,
    ) -> None:
        self.layout = layout
        self._dtypes = dtypes
        self.wire_dtype = wire_dtype
        self.device = device
        self.label = label
        self.split = split
        self.chunks = chunks or ChunkTable(layout.numels, layout.offsets, dtypes, layout.numel, shapes=shapes)
        self.pointers = PointerTable()
        self.state = BucketState.IDLE
        self.allocations = 0
        self.uses = 0
        self._wire: torch.Tensor | None = None
        self._unpacked: torch.cuda.Event | None = None

    def twin(self) -> Bucket:
        """Another one for the same gradients, with a wire and addresses of its own."""
        return Bucket(
            self.layout, self._dtypes, self.wire_dtype, self.device, self.label, chunks=self.chunks, split=self.split
        )

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


@dataclass(frozen=True)
class BucketKey:
    """What a bucket's layout and tables depend on."""

    index: int
    numel: int
    dtype: torch.dtype
    wire_dtype: torch.dtype
    device: torch.device


class BucketCache:
    """Buckets for a caller that is shown flat buffers again and again, by several DDP modules.

    What a buffer holds is known by its parameters, which are asked for only when its address is new. A parameter lies
    in one bucket at a time: when it is shown in another one, DDP has laid its buckets out anew, and the old one is
    given up with its wire buffer. One that is under way is never given out again: who asks meanwhile gets another one.
    """

    def __init__(self) -> None:
        # Weak: the address of a module that is gone may be another one's buffer by now, and on this rank alone.
        self._by_address: MutableMapping[tuple[BucketKey, int], Bucket] = WeakValueDictionary()
        self._homes: MutableMapping[torch.Tensor, _Home] = WeakIdKeyDictionary()

    def find(self, key: BucketKey, address: int) -> Bucket | None:
        """The idle bucket that was last used for the buffer at `address`; taken then."""
        bucket = self._by_address.get((key, address))
        if bucket is None or bucket.state is not BucketState.IDLE:
            return None
        bucket.state = BucketState.TAKEN
        return bucket

    def knows(self, key: BucketKey, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether one of `parameters` lies in such a bucket already."""
        return any(home.key == key for home in self._homes_of(parameters))

    def check_out(
        self, key: BucketKey, address: int, parameters: Sequence[torch.Tensor], make: Callable[[], Bucket]
    ) -> Bucket:
        """An idle bucket for `parameters`, made if there is none; bound to `address` from now on."""
        home = None
        for old in self._homes_of(parameters):
            if old.key == key:
                home = home or old
            else:
                old.buckets.clear()
        home = home or _Home(key, [])
        for parameter in parameters:
            self._homes[parameter] = home
        bucket = next((one for one in home.buckets if one.state is BucketState.IDLE), None)
        if bucket is None:
            bucket = make()
            home.buckets.append(bucket)
        bucket.state = BucketState.TAKEN
        alive = {id(one) for one in self.buckets()}
        for where, one in list(self._by_address.items()):
            if one is bucket or id(one) not in alive:
                del self._by_address[where]
        self._by_address[key, address] = bucket
        return bucket

    def buckets(self) -> list[Bucket]:
        """Everything that is kept now."""
        return [one for home in set(self._homes.values()) for one in home.buckets]

    def _homes_of(self, parameters: Sequence[torch.Tensor]) -> list[_Home]:
        return [self._homes[parameter] for parameter in parameters if parameter in self._homes]


@dataclass(eq=False)
class _Home:
    """Where some parameters lie: what their bucket is, and the Buckets for it."""

    key: BucketKey
    buckets: list[Bucket]
