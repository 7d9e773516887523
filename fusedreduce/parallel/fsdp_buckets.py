"""Buckets of a reduce-scatter: each rank's contribution to every shard, which the shard's rank adds up in fp32.

    pack      [ranks x shard] gradients -> wire, each shard's slots one after the other      one launch, one rounding
    reduce    all-to-all: this rank gets every rank's contribution to its shard
    unpack    their sum, in fp32 and in the order of ranks, -> the shard                     one launch

`pack` takes the gradients of all shards, shard by shard; `unpack` writes those of one. What stays as it is beside
encoded gradients takes a launch more on each side, and travels behind its shard's blocks. A ring that reduces 16-bit
elements rounds at every hop; here a contribution is rounded once, and their sum not at all where it is written as fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, compress, cycle

import torch

from ..buckets.bucket import Bucket
from ..buckets.data_path import accumulated_split, prepare
from ..comm.protocol import Communicator, Pending
from ..config import Wire
from ..kernels import dispatch, encoded
from ..kernels.cast import CastWire
from ..kernels.encoded_table import EncodedTable
from ..kernels.encodings import Encoding
from ..kernels.parts import in_rank_order
from ..kernels.table import Gradients, Partials, PointerTable, SourcePartials
from ..planning.layout import Layout, aligned_layout, block_layout
from ..wires import cast_of, encoding_of, wire_dtype


def reduce_scatter_bucket(
    shard: torch.Tensor,
    wire: Wire,
    numels: Sequence[int],
    is_encoded: Sequence[bool],
    label: str,
    ranks: int,
) -> Bucket:
    """Builds the bucket of a reduce-scatter.

    Args:
        shard: like one of the shards, real.
        wire: what contributions travel as.
        numels: elements of the gradients that lie in a shard, one after the other.
        is_encoded: which of them are encoded, on an encoded wire.
        label: for messages.
        ranks: how many shards there are.
    """
    device, dtype, encoding = shard.device, shard.dtype, encoding_of(wire)
    if encoding is not None and any(is_encoded):
        made: Bucket = ScatteredEncodedBucket(numels, is_encoded, dtype, encoding, device, label, ranks=ranks)
    else:
        sent = wire_dtype(wire) or dtype
        # Elements travel undivided: gradients of bf16 need no rounding then. On an fp16 wire, where large ones would
        # overflow, they are divided by a power of two.
        narrow = sent is torch.float16 and dtype is not sent
        before = ranks / accumulated_split(sent, ranks) if narrow else 1.0
        cast = cast_of(wire) if sent is not dtype else None
        (numel,) = numels  # nothing in them needs a place of its own
        made = ScatteredBucket(numel, dtype, sent, device, label, ranks=ranks, before=before, cast=cast)
    prepare(made)
    return made


class _ShardsBucket(Bucket):
    """A bucket whose wire is this rank's contribution to the shards of all ranks, one after the other."""

    collective = "reduce-scatter"

    def reduce(self, wire: torch.Tensor, communicator: Communicator) -> tuple[Pending, torch.Tensor]:
        """Starts to exchange contributions; returns those to this rank's shard."""
        received = self.buffer("received", wire.numel(), wire.dtype)
        into, sent = (one.view(torch.uint8) for one in (received, wire))  # what every backend exchanges
        return communicator.all_to_all(into, sent), received


class ScatteredBucket(_ShardsBucket):
    """Elements, which travel as another dtype or as they are.

    Args:
        numel: elements of a shard.
        dtype: of the gradients, real.
        wire_dtype: the same, or a 16-bit one.
        device: of gradients and wire.
        label: for messages.
        ranks: how many shards there are.
        before: what contributions are divided by; the rest of the divisor comes off their sum, in fp32.
        cast: how gradients are rounded to the wire; None: to nearest.
    """

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        wire_dtype: torch.dtype,
        device: torch.device,
        label: str,
        *,
        ranks: int,
        before: float = 1.0,
        cast: CastWire | None = None,
    ) -> None:
        layout = _repeated(aligned_layout([numel], wire_itemsize_bytes=wire_dtype.itemsize), ranks)
        super().__init__(layout, [dtype] * ranks, wire_dtype, device, label, cast=cast, lazy=True)
        self._ranks, self._numel = ranks, numel
        self._before, self._split = before, 1.0
        self._tables = dispatch.new_combine_tables() if self.on_cuda else None
        self._parts = in_rank_order(numel, ranks)

    def warm_up(self, *, stats: bool) -> None:
        """Compiles the cast kernels and the one that adds contributions up."""
        super().warm_up(stats=stats)
        dispatch.warm_up_combine(self.device, self.wire_dtype, self.chunks.dtypes[0])

    def pack(self, gradients: Gradients, wire: torch.Tensor, divisor: float, partials: SourcePartials | None) -> None:
        """Writes this rank's contributions, divided by what their sum is not to be."""
        self._split = divisor / self._before
        super().pack(gradients, wire, self._before, partials)

    def unpack(
        self, gradients: Gradients, reduced: torch.Tensor, scale: torch.Tensor, partials: Partials | None
    ) -> None:
        """Adds the contributions to this rank's shard up, into its gradients; nothing scales them, nor counts."""
        contributions = list(reduced.view(self._ranks, -1)[:, : self._numel])
        shard = [gradient for gradient in gradients if gradient is not None]
        dispatch.combine(contributions, shard, self._parts, 1.0 / self._split, self._tables)


class ScatteredEncodedBucket(_ShardsBucket):
    """Blocks of elements as small integers with a scale each, and behind them what is not encoded.

    Args:
        numels: elements of each of a shard's gradients, flat. Those of all shards lie one after the other.
        is_encoded: which of these are; the others travel in their own dtype, undivided.
        dtype, device, label, ranks: see ScatteredBucket.
        encoding: of the blocks.
    """

    chunks: EncodedTable

    def __init__(
        self,
        numels: Sequence[int],
        is_encoded: Sequence[bool],
        dtype: torch.dtype,
        encoding: Encoding,
        device: torch.device,
        label: str,
        *,
        ranks: int,
    ) -> None:
        is_other = [not one for one in is_encoded]
        shard = block_layout(
            list(compress(numels, is_encoded)), block_numel=encoding.block_numel, shard_align=encoding.shard_align
        )
        tail = aligned_layout(list(compress(numels, is_other)), wire_itemsize_bytes=dtype.itemsize)
        tail_bytes = tail.numel * dtype.itemsize
        layout, dtypes = _repeated(shard, ranks), [dtype] * len(shard.numels)
        sent = EncodedTable(
            layout.numels, layout.offsets, dtypes * ranks, layout.numel, encoding, ranks, tail_bytes=tail_bytes
        )
        self._shard = EncodedTable(shard.numels, shard.offsets, dtypes, shard.numel, encoding, 1, tail_bytes=tail_bytes)
        super().__init__(layout, dtypes * ranks, torch.uint8, device, label, chunks=sent, lazy=True)
        self._ranks, self._is_encoded, self._is_other = ranks, tuple(is_encoded), tuple(is_other)
        self._outputs = PointerTable()  # of the shard that `unpack` writes
        self._tail, self._split = tail, 1.0
        self._tables = dispatch.new_combine_tables() if self.on_cuda else None
        self._sum = in_rank_order(tail.numel, ranks)
        # Where what is not encoded lies in the gradients of all shards, and where it goes to.
        begins = tuple(compress(accumulate(numels, initial=0), is_other))
        self._begins = tuple(rank * sum(numels) + begin for rank in range(ranks) for begin in begins)
        self._copy = in_rank_order(ranks * sum(numels), 1)

    @property
    def wire_numel(self) -> int:
        """Bytes of blocks and of what is not encoded."""
        return self.chunks.layout.nbytes

    def warm_up(self, *, stats: bool) -> None:
        """Compiles the kernels that it calls, and puts the tables of blocks on the device."""
        encoded.warm_up(self.device, self.chunks.layout.encoding, fp64=self.chunks.fp64, stats=stats)
        if self._tail.numel:
            dispatch.warm_up_combine(self.device, self.chunks.dtypes[0])
        for table, contributions in ((self.chunks, 1), (self._shard, self._ranks)):
            table.on(self.device)
            table.places_on(self.device)
            table.geometry(contributions, self.device)

    def pack(self, gradients: Gradients, wire: torch.Tensor, divisor: float, partials: SourcePartials | None) -> None:
        """Encodes the gradients of all shards, and copies those that are not encoded behind their shard's blocks."""
        kernels = encoded.unchecked(self.device, (wire.dtype,))
        mine = list(compress(gradients, cycle(self._is_encoded)))
        kernels.encode(mine, self.chunks, self.pointers, wire, divisor, partials)
        self._split = divisor
        if self._tail.numel:
            first = gradients[0]
            assert first is not None
            flat = first.as_strided((self._copy[0].end,), (1,))
            slots = [(slot.offset, slot.offset + slot.numel) for slot in self._tail.slots]
            places = [tail[begin:end] for tail in self._tails(wire) for begin, end in slots]
            dispatch.combine([flat], places, self._copy, 1.0, self._tables, begins=self._begins)

    def unpack(
        self, gradients: Gradients, reduced: torch.Tensor, scale: torch.Tensor, partials: Partials | None
    ) -> None:
        """Decodes the contributions to this rank's shard and adds them up, into its gradients."""
        kernels = encoded.unchecked(self.device, self._shard.dtype_set)
        kernels.decode(
            list(compress(gradients, self._is_encoded)), self._shard, self._outputs, reduced, scale, partials
        )
        if self._tail.numel:
            mine = [gradient for gradient in compress(gradients, self._is_other) if gradient is not None]
            begins = self._tail.offsets
            dispatch.combine(self._tails(reduced), mine, self._sum, 1.0 / self._split, self._tables, begins=begins)

    def release(self) -> None:
        """Drops the buffers."""
        super().release()
        self._outputs.kept = None

    def _tails(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Of a buffer of shards, or of contributions to one, what lies behind the blocks of each."""
        rows = buffer.view(self.chunks.dtypes[0]).view(self._ranks, -1)
        return list(rows[:, rows.shape[1] - self._tail.numel :])


def _repeated(shard: Layout, ranks: int) -> Layout:
    """The slots of a shard once for each rank."""
    offsets = tuple(rank * shard.numel + offset for rank in range(ranks) for offset in shard.offsets)
    return Layout(shard.numels * ranks, offsets, ranks * shard.numel)
