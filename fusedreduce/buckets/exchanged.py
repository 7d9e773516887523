"""Buckets whose contributions are exchanged and added up here, in fp32 and in the order of ranks, whatever travels.

    AccumulatedBucket   16-bit elements, as the all-reduce of them would send; two phases (see phases.py)
    EncodedBucket       8 or 4 bits an element, with scales. Up to two ranks gather each other's contribution, which
                        unpacking adds up; more exchange shards in two phases

A collective that reduces 16-bit elements rounds at every hop. Here a contribution is rounded once, its sum once more
where there are two phases, and every rank decodes the same bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence

import torch

from ..comm.protocol import Communicator, Pending
from ..kernels import dispatch, encoded
from ..kernels.encoded_table import EncodedTable
from ..kernels.encodings import Encoding
from ..kernels.parts import in_rank_order
from ..kernels.table import Gradients, Partials, PointerTable, Shape, SourcePartials
from ..planning.layout import aligned_layout, block_layout
from .bucket import Bucket
from .draws import BucketDraws
from .feedback import BucketFeedback
from .phases import Phase, Phases


class ExchangedBucket(Bucket):
    """A bucket whose wire is this rank's contribution, cut into a shard per rank."""

    collective = "exchange"
    collectives = 2

    def check(self, communicator: Communicator) -> None:
        """Asks for sums of fp32, or fp64 for fp64: a backend whose collectives can be used on this device has them.

        It adds up within a node at most; `Phases.open` asks whether it can exchange.
        """
        communicator.check_wire(self.compute_dtype, self.device)

    def _exchange(self, wire: torch.Tensor, communicator: Communicator, phases: Phases | None) -> Pending:
        """Starts both phases; `wire` holds the sum in the end."""
        assert phases is not None
        received = self.buffer("received", wire.numel(), wire.dtype)
        contributions = received.view(communicator.size, -1)
        mine = wire.view(communicator.size, -1)[communicator.rank]
        into, sent, total = (one.view(torch.uint8) for one in (received, wire, mine))  # what every backend exchanges

        def gather_sums(ranks: Communicator) -> Pending:
            self.add_up(contributions, mine)  # no reference to `communicator`: a backend's thread may free this one
            return ranks.all_gather(total, sent)[0]

        first = Phase("all-to-all", "all", lambda ranks: ranks.all_to_all(into, sent))
        return phases.start([first, Phase("all-gather", "all", gather_sums)], self.label, self.device)

    def add_up(self, received: torch.Tensor, sum_of_shard: torch.Tensor) -> None:
        """Writes the sum of the contributions [ranks, shard] to this rank's shard."""
        raise NotImplementedError


class AccumulatedBucket(ExchangedBucket):
    """Elements of 16 bits that are added up in fp32.

    Args:
        numels: elements of each gradient.
        dtypes: real gradient dtype of each.
        wire_dtype: bf16 or fp16.
        device: of gradients and wire.
        label: for messages.
        shapes: size and strides of each gradient.
        split: what contributions are multiplied by (see `data_path.accumulated_split`); their sum is divided by it in
            fp32. One below 1, for op="sum", is divided out by unpacking: the wire may not hold that sum.
        ranks: how many take part; three or more, else an all-reduce rounds no more often.
        phases: issues what follows the first phase.
        lazy: release the buffers at the end of each step.
    """

    def __init__(
        self,
        numels: Sequence[int],
        dtypes: Sequence[torch.dtype],
        wire_dtype: torch.dtype,
        device: torch.device,
        label: str,
        shapes: Sequence[Shape],
        *,
        split: float,
        ranks: int,
        phases: Phases | None,
        lazy: bool,
    ) -> None:
        layout = aligned_layout(numels, wire_itemsize_bytes=wire_dtype.itemsize, shards=ranks)
        super().__init__(layout, dtypes, wire_dtype, device, label, shapes, split=min(split, 1.0), lazy=lazy)
        self.sent_split = split
        self._phases = phases
        self._tables = dispatch.new_combine_tables() if self.on_cuda else None
        self._parts = in_rank_order(layout.numel // ranks, ranks)

    def warm_up(self, *, stats: bool) -> None:
        """Compiles the cast kernels and the one that adds contributions up."""
        super().warm_up(stats=stats)
        dispatch.warm_up_combine(self.device, self.wire_dtype)

    def reduce(self, wire: torch.Tensor, communicator: Communicator) -> tuple[Pending, torch.Tensor]:
        """Starts to exchange contributions, whose sum replaces them on the wire."""
        return self._exchange(wire, communicator, self._phases), wire

    def add_up(self, received: torch.Tensor, sum_of_shard: torch.Tensor) -> None:
        contributions, scale = list(received), self.split / self.sent_split
        dispatch.combine(contributions, [sum_of_shard], self._parts, scale, self._tables)


class EncodedBucket(ExchangedBucket):
    """Blocks of elements as small integers with a scale each.

    Args:
        numels: elements of each gradient.
        dtypes: real gradient dtype of each.
        encoding: of the blocks.
        device: of gradients and wire.
        label: for messages.
        shapes: size and strides of each gradient.
        ranks: how many take part.
        phases: issues what follows the first phase.
        lazy: release the buffers at the end of each step.
        keys: numbers of the parameters, for stochastic rounding: the same whatever the plan.
        draws: what contributions and what sums are drawn by; None: codes are rounded to nearest.

    Attributes:
        measured: contributions are encoded once more in some steps, rounded to nearest, to see what is lost.
    """

    chunks: EncodedTable
    measured = False

    def __init__(
        self,
        numels: Sequence[int],
        dtypes: Sequence[torch.dtype],
        encoding: Encoding,
        device: torch.device,
        label: str,
        shapes: Sequence[Shape],
        *,
        ranks: int,
        phases: Phases | None,
        lazy: bool,
        keys: Sequence[int] | None = None,
        draws: BucketDraws | None = None,
    ) -> None:
        self._ranks = self._added_up = ranks
        self.collectives = 1 if ranks <= 2 else 2
        self._phases = phases
        self._draws = draws or BucketDraws(None, None)
        self._feedback: BucketFeedback | None = None
        self._feeds: BucketFeedback | None = None  # the step under way
        shards = 1 if ranks <= 2 else ranks
        align = encoding.shard_align
        layout = block_layout(numels, block_numel=encoding.block_numel, shard_align=align, shards=shards)
        numel, offsets = layout.numel, layout.offsets
        table = EncodedTable(layout.numels, offsets, dtypes, numel, encoding, shards, shapes=shapes, keys=keys)
        super().__init__(layout, dtypes, torch.uint8, device, label, shapes, table, lazy=lazy)

    def feed_back(self, feedback: BucketFeedback) -> None:
        """Adds what is lost of each step to the next one, from the next `pack` on."""
        self._feedback = feedback

    @property
    def wire_numel(self) -> int:
        """Encoded bytes."""
        return self.chunks.layout.nbytes

    @property
    def padding_bytes(self) -> int:
        """Bytes of the wire that belong to no block with elements of a gradient."""
        block = self.chunks.layout.encoding
        used = sum(-(-numel // block.block_numel) for numel in self.layout.numels)
        return self.wire_bytes - used * block.block_bytes

    def warm_up(self, *, stats: bool) -> None:
        """Compiles the kernels that encode and decode, as its options need them, and puts its tables on the device."""
        encoding, fp64, stochastic = self.chunks.layout.encoding, self.chunks.fp64, self._draws.sum is not None
        feedback = self._feedback is not None
        encoded.warm_up(self.device, encoding, fp64=fp64, stats=stats, feedback=feedback, stochastic=stochastic)
        if feedback:
            # Sums are of fp32, and a rank without inputs has no feedback.
            for of_fp64 in {fp64, False}:
                encoded.warm_up(self.device, encoding, fp64=of_fp64, stats=stats, stochastic=stochastic)
        self.chunks.places_on(self.device)
        for contributions in {1, self._added_up}:
            self.chunks.geometry(contributions, self.device)
        if self.measured:
            for of_fp64 in {fp64, False}:
                encoded.warm_up(self.device, encoding, fp64=of_fp64)
            self._flat.on(self.device)
            self._flat.places_on(self.device)
            self._flat.geometry(1, self.device)

    def pack(self, gradients: Gradients, wire: torch.Tensor, divisor: float, partials: SourcePartials | None) -> None:
        """Encodes the gradients; with error feedback, what the last step has lost is added to them first."""
        self._feeds, residuals = self._feedback, None
        if self._feeds is not None and self._feeds.idle:
            self._feeds = None
        if self._feeds is not None:
            self._feeds.before_encode(gradients, divisor)
            residuals = self._feeds.of_parameters
        encoded.unchecked(self.device, (wire.dtype,)).encode(
            gradients,
            self.chunks,
            self.pointers,
            wire,
            divisor,
            partials,
            residuals=residuals,
            draw=self._draws.contribution,
        )

    def reduce(self, wire: torch.Tensor, communicator: Communicator) -> tuple[Pending, torch.Tensor]:
        """Up to two ranks gather their contributions, and all are returned; more exchange them, and the sum is."""
        if self._ranks <= 2:
            gathered = self.buffer("received", self._ranks * wire.numel(), wire.dtype)
            return communicator.all_gather(wire, gathered)[0], gathered
        return self._exchange(wire, communicator, self._phases), wire

    def decode_flat(self, wire: torch.Tensor, into: torch.Tensor) -> None:
        """Decodes one bucket into fp32 [layout.numel]."""
        slots = [into[slot.offset : slot.offset + slot.numel] for slot in self.layout.slots]
        unit = torch.ones(1, dtype=torch.float32, device=self.device)
        encoded.decode(slots, self._flat, PointerTable(), wire, unit)

    @functools.cached_property
    def _flat(self) -> EncodedTable:
        """The bucket's rows, of gradients in fp32."""
        of, dtypes = self.chunks, [torch.float32] * len(self.layout.numels)
        return EncodedTable(of.numels, of.offsets, dtypes, of.wire_numel, of.layout.encoding, of.layout.shards)

    def unpack(
        self, gradients: Gradients, reduced: torch.Tensor, scale: torch.Tensor, partials: Partials | None
    ) -> None:
        """Decodes the sum, or both of two ranks' contributions and adds them up, into the gradients."""
        encoded.unchecked(self.device, self.chunks.dtype_set).decode(
            gradients, self.chunks, self.pointers, reduced, scale, partials
        )

    def not_written(self, slots: Collection[int]) -> None:
        """Keeps their residuals for the next step, where there is error feedback."""
        if self._feedback is not None and not self._feedback.idle:
            self._feedback.keep(slots)

    def add_up(self, received: torch.Tensor, sum_of_shard: torch.Tensor) -> None:
        received, residuals = received.view(-1), None
        if self._feeds is not None:
            self._feeds.before_combine(received, self.buffer("sum", self.chunks.layout.shard_numel, torch.float32))
            residuals = self._feeds.of_sum
        encoded.unchecked(self.device, (received.dtype,)).combine_encoded(
            received, self.chunks, sum_of_shard, residuals=residuals, draw=self._draws.sum
        )
