"""Bucket: its layout, the tables that the kernels walk, its wire buffer and its state."""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Collection, MutableMapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ..comm.protocol import Communicator, Pending
from ..kernels import dispatch
from ..kernels.cast import CastWire
from ..kernels.current_stream import current_stream
from ..kernels.table import ChunkTable, Gradients, Partials, PointerTable, Shape, SourcePartials
from ..planning.layout import Layout


class BucketState(enum.Enum):
    """The state of a bucket within one step."""

    IDLE = "idle"  # not in flight: the wire buffer is free
    TAKEN = "taken"  # checked out of a BucketCache to be packed; if that raises, it is never used again
    LAUNCHED = "launched"  # packed, and its collective has been issued
    FAILED = "failed"  # the collective or a kernel raised; the wire buffer is not used again


class Bucket:
    """Gradients that are reduced together: a layout, its tables and a wire buffer.

    The wire buffer belongs to the bucket alone: two buckets in flight never share one. It is allocated at the bucket's
    first step and kept; if `lazy`, it is allocated in each step and released at its end.

    Args:
        layout: slots of the wire, in elements.
        dtypes: real gradient dtype of each slot.
        wire_dtype: dtype of the wire.
        device: of gradients and wire.
        label: for messages, logs and profiler ranges.
        shapes: size and strides of each slot's gradient, where they are always the same.
        chunks: the layout's chunk table; None: it is built.
        split: wire / result, a power of two (see `data_path.divisor_split`).
        cast: how gradients are rounded to the wire; None: to nearest.
        lazy: release the wire buffer at the end of each step.

    Attributes:
        collective: what adds contributions up, for messages.
        collectives: how many that takes.
        sent_split: contribution / this rank's share of the result: `split`, unless that is taken off before unpacking.
    """

    collective = "all-reduce"
    collectives = 1

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
        cast: CastWire | None = None,
        lazy: bool = False,
    ) -> None:
        self.layout = layout
        self.wire_dtype = wire_dtype
        self.device = device
        self.on_cuda = device.type == "cuda"
        self.label = label
        self.split = self.sent_split = split
        self._lazy = lazy
        self.chunks = chunks or ChunkTable(
            layout.numels, layout.offsets, dtypes, layout.numel, shapes=shapes, cast=cast
        )
        self.compute_dtype = self.chunks.compute_dtype
        self.pointers = PointerTable()
        self.state = BucketState.IDLE
        self.allocations = 0
        self.uses = 0
        self._buffers: dict[str, torch.Tensor] = {}
        self._unpacked: torch.cuda.Event | None = None

    def twin(self) -> Bucket:
        """Another bucket for the same gradients, with a wire and a pointer table of its own."""
        twin = copy.copy(self)
        twin.pointers = PointerTable()
        twin.state = BucketState.IDLE
        twin.allocations = twin.uses = 0
        twin._buffers, twin._unpacked = {}, None
        return twin

    @property
    def wire_numel(self) -> int:
        """Elements of the wire buffer."""
        return self.layout.numel

    @property
    def wire_bytes(self) -> int:
        """Bytes that this rank sends to an all-reduce, or to what takes its place; padding included."""
        return self.wire_numel * self.wire_dtype.itemsize

    @property
    def padding_bytes(self) -> int:
        """Bytes of these that belong to no gradient."""
        return self.layout.padding_numel * self.wire_dtype.itemsize

    def collective_text(self) -> str:
        """Names its collective in messages."""
        return f"the {self.collective} of {self.label}"

    def spans(self) -> list[tuple[int, int]]:
        """Per slot its rows of statistics, [begin, end)."""
        return self.chunks.row_spans()

    def wire(self) -> torch.Tensor:
        """The wire buffer; on CUDA the current stream waits until the last unpack has read it."""
        wire = self._buffers.get("wire")
        if wire is None:
            return self.buffer("wire", self.wire_numel, self.wire_dtype)
        if self._unpacked is not None:
            current_stream(self.device).wait_event(self._unpacked)
        return wire

    def buffer(self, name: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A buffer that lives as long as the wire, allocated when it is first asked for."""
        found = self._buffers.get(name)
        if found is None:
            found = self._buffers[name] = torch.empty(numel, dtype=dtype, device=self.device)
            self.allocations += 1
        return found

    def check(self, communicator: Communicator) -> None:
        """Raises UnsupportedWireError, on every rank, if the ranks' backend cannot add contributions up."""
        communicator.check_wire(self.wire_dtype, self.device)

    def warm_up(self, *, stats: bool) -> None:
        """Compiles the kernels that `pack` and `unpack` call; `stats`: those with statistics too."""
        dispatch.warm_up(self.device, self.wire_dtype, fp64=self.chunks.fp64, stats=stats, cast=self.chunks.cast)

    def pack(self, gradients: Gradients, wire: torch.Tensor, divisor: float, partials: SourcePartials | None) -> None:
        """Writes this rank's contribution; arguments as of `dispatch.pack`."""
        dispatch.unchecked(self.device, (self.wire_dtype,)).pack(
            gradients, self.chunks, self.pointers, wire, divisor, partials
        )

    def reduce(self, wire: torch.Tensor, communicator: Communicator) -> tuple[Pending, torch.Tensor]:
        """Starts to add contributions up.

        Args:
            wire: this rank's.
            communicator: the ranks.

        Returns:
            What is in flight, and the buffer that `unpack` takes when it is done.

        Raises:
            RuntimeError: a collective could not be started.
        """
        return communicator.all_reduce(wire), wire

    def unpack(
        self, gradients: Gradients, reduced: torch.Tensor, scale: torch.Tensor, partials: Partials | None
    ) -> None:
        """Writes gradients from what `reduce` has returned; arguments as of `dispatch.unpack`."""
        dispatch.unchecked(self.device, self.chunks.dtype_set).unpack(
            gradients, self.chunks, self.pointers, reduced, scale, partials
        )

    def not_written(self, slots: Collection[int]) -> None:
        """Called in a step that does not write the gradients of `slots`, because no rank has used them."""

    def unpacked(self) -> torch.cuda.Event | None:
        """Records that the current stream has read the wire buffer with what was launched so far.

        Returns:
            The event; None on CPU.
        """
        if not self.on_cuda:
            return None
        stream = current_stream(self.device)
        if self._unpacked is None:
            self._unpacked = torch.cuda.Event()
        self._unpacked.record(stream)
        return self._unpacked

    def release(self) -> None:
        """Drops buffers that last as long as a step. On CUDA the current stream is behind all that has used them.

        What another stream allocated is kept until the current one has come here. What the current stream allocated is
        free at once: if it were kept for the stream that unpacks, the next forward, which the host enqueues before the
        device has come so far, would have to allocate other memory.
        """
        if not self._lazy:
            return
        if self.on_cuda:
            stream = current_stream(self.device)
            for buffer in self._buffers.values():
                buffer.record_stream(stream)
        self._buffers, self.pointers.kept = {}, None  # on CPU views of the wire are kept there


class BucketKey(NamedTuple):
    """What the layout and the tables of a comm hook's bucket depend on; `shapes` of the parameters on encoded wires."""

    position: int
    numel: int
    dtype: torch.dtype
    device: torch.device
    shapes: tuple[torch.Size, ...] = ()


class BucketCache:
    """Buckets for a comm hook, which several DDP modules call with the same flat buffers again and again.

    A buffer is identified by its address, and by its parameters if the address is new. A parameter is in one bucket at
    a time: when it comes in another one, DDP has rebuilt its buckets, and the old Bucket is dropped with its wire
    buffer. A Bucket in flight is never checked out a second time: a caller gets another one meanwhile.
    """

    def __init__(self) -> None:
        # Weak: after a module is gone its address may belong to another one's buffer, and on this rank alone.
        self._by_address: MutableMapping[tuple[BucketKey, int], Bucket] = WeakValueDictionary()
        self._entries: MutableMapping[torch.Tensor, _Entry] = WeakIdKeyDictionary()

    def find(self, key: BucketKey, address: int) -> Bucket | None:
        """Checks out the idle bucket that was last used for the buffer at `address`; None: there is none."""
        bucket = self._by_address.get((key, address))
        if bucket is None or bucket.state is not BucketState.IDLE:
            return None
        bucket.state = BucketState.TAKEN
        return bucket

    def knows(self, key: BucketKey, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether one of `parameters` is in a bucket of this key already."""
        return any(entry.key == key for entry in self._entries_of(parameters))

    def check_out(
        self, key: BucketKey, address: int, parameters: Sequence[torch.Tensor], make: Callable[[], Bucket]
    ) -> Bucket:
        """Checks out an idle bucket for `parameters`, and binds it to `address`.

        Args:
            key: what the bucket depends on.
            address: of the buffer.
            parameters: whose gradients the buffer holds.
            make: builds a bucket if no idle one exists.

        Returns:
            The bucket, in state TAKEN.
        """
        entry = None
        for old in self._entries_of(parameters):
            if old.key == key:
                entry = entry or old
            else:
                old.buckets.clear()
        entry = entry or _Entry(key, [])
        for parameter in parameters:
            self._entries[parameter] = entry
        bucket = next((one for one in entry.buckets if one.state is BucketState.IDLE), None)
        if bucket is None:
            bucket = make()
            entry.buckets.append(bucket)
        bucket.state = BucketState.TAKEN
        alive = {id(one) for one in self.buckets()}
        for where, one in list(self._by_address.items()):
            if one is bucket or id(one) not in alive:
                del self._by_address[where]
        self._by_address[key, address] = bucket
        return bucket

    def buckets(self) -> list[Bucket]:
        """Every bucket of the cache."""
        return [one for entry in set(self._entries.values()) for one in entry.buckets]

    def _entries_of(self, parameters: Sequence[torch.Tensor]) -> list[_Entry]:
        return [self._entries[parameter] for parameter in parameters if parameter in self._entries]


@dataclass(eq=False)
class _Entry:
    """The key of some parameters' bucket, and the Buckets for it."""

    key: BucketKey
    buckets: list[Bucket]
