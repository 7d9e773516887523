"""TwoLevelBucket: encoded across nodes alone, where links are slow; fp32 within a node (fp64 for fp64 gradients).

    within the node   reduce-scatter: each of its L ranks gets the node's sum of its shard, and encodes it
    across nodes      the ranks with equal number l within their nodes exchange these encoded sums, as EncodedBucket
                      does: N = 2 nodes gather them; from 3 on all-to-all, the owner adds up and encodes, all-gather
    within the node   all-gather: each rank gets what its neighbours have; unpacking decodes it

Layout: N * L shards of whole blocks, l * N + n being that of rank l of node n; so the bytes of every phase, and of the
bucket in the end, lie in the order of shards. Example, 2 nodes of 2 ranks: rank 1 of either node gets its node's sum of
shards 2 and 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..comm.protocol import Communicator, Pending, Pieces
from ..kernels import dispatch, encoded
from ..kernels.encoded_table import EncodedTable
from ..kernels.encodings import Encoding
from ..kernels.table import ChunkTable, Gradients, Partials, PointerTable, Shape, SourcePartials
from .bucket import Bucket
from .exchanged import EncodedBucket
from .phases import Phase, Phases, two_levels


class TwoLevelBucket(EncodedBucket):
    """Blocks of elements as small integers with a scale each across nodes, fp32 elements within a node.

    Args:
        numels, dtypes, encoding, device, label, shapes, ranks, lazy: see EncodedBucket.
        phases: issues what follows the first phase, and says how many ranks a node has.
    """

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
        phases: Phases,
        lazy: bool,
    ) -> None:
        super().__init__(numels, dtypes, encoding, device, label, shapes, ranks=ranks, phases=phases, lazy=lazy)
        self.wire_dtype = self.compute_dtype
        self._per_node = phases.per_node
        self._nodes = self._added_up = ranks // phases.per_node
        self.collectives = len(two_levels(self._nodes))
        # Rows of data as of `chunks`, and in addition those of padding within blocks, which is on this wire.
        total, shard = self.layout.numel, self.chunks.shard_numel
        self._packed = ChunkTable(numels, self.layout.offsets, dtypes, total, shapes=shapes, shard_numel=shard)
        numel = total // self._per_node
        shape = (numel,), (1,)
        self._of_sum = EncodedTable([numel], [0], [self.wire_dtype], numel, encoding, self._nodes, shapes=[shape])
        # What the CPU path keeps with a pointer table is of one kind of launch.
        self._sum_pointers, self._decode_pointers = PointerTable(), PointerTable()

    @property
    def wire_numel(self) -> int:
        """Elements, as they travel within the node."""
        return self.layout.numel

    @property
    def padding_bytes(self) -> int:
        """Bytes of padding, as they travel within the node."""
        return self.layout.padding_numel * self.wire_dtype.itemsize

    def warm_up(self, *, stats: bool) -> None:
        """Compiles the kernels of blocks and those of elements, and puts the tables on the device."""
        super().warm_up(stats=stats)
        Bucket.warm_up(self, stats=stats)
        self._of_sum.places_on(self.device)
        for table in (self._of_sum, self._packed):
            table.on(self.device)

    def pack(self, gradients: Gradients, wire: torch.Tensor, divisor: float, partials: SourcePartials | None) -> None:
        """Casts the gradients to the wire's dtype; what is encoded is their sum within the node."""
        dispatch.unchecked(self.device, (self.wire_dtype,)).pack(
            gradients, self._packed, self.pointers, wire, divisor, partials
        )

    def unpack(
        self, gradients: Gradients, reduced: torch.Tensor, scale: torch.Tensor, partials: Partials | None
    ) -> None:
        """Decodes what was gathered from all nodes into the gradients."""
        encoded.unchecked(self.device, self.chunks.dtype_set).decode(
            gradients, self.chunks, self._decode_pointers, reduced, scale, partials
        )

    def reduce(self, wire: torch.Tensor, communicator: Communicator) -> tuple[Pending, torch.Tensor]:
        """Starts the phases of both levels. What is returned holds one bucket, or of two nodes both."""
        assert self._phases is not None
        both, of_all = self._nodes == 2, self.chunks.layout
        node, local = divmod(communicator.rank, self._per_node)
        total = wire.view(self._per_node, -1)[local]
        sent = self.buffer("sent", self._of_sum.layout.nbytes, torch.uint8)
        received = self.buffer("received", sent.numel() * (2 if both else 1), torch.uint8)
        gathered = self.buffer("gathered", of_all.nbytes * (2 if both else 1), torch.uint8)
        mine = sent.view(self._nodes, -1)[node]

        def add_up(ranks: Communicator) -> Pending:
            return ranks.reduce_scatter(wire)[0]

        def gather_sums(ranks: Communicator) -> Pending:
            self._encode_sum(total, sent)
            return ranks.all_gather(sent, received)[0]

        def gather_both(ranks: Communicator) -> Pending:
            nodes = zip(received.chunk(2), gathered.chunk(2), strict=True)
            return Pieces([ranks.all_gather(one, into)[0] for one, into in nodes], self.device)

        def spread_sums(ranks: Communicator) -> Pending:
            self._encode_sum(total, sent)
            return ranks.all_to_all(received, sent)

        def gather_totals(ranks: Communicator) -> Pending:
            encoded.unchecked(self.device, (mine.dtype,)).combine_encoded(received, self.chunks, mine)
            return ranks.all_gather(mine, sent)[0]

        def gather_all(ranks: Communicator) -> Pending:
            return ranks.all_gather(sent, gathered)[0]

        acts = [("reduce-scatter", add_up), ("all-gather", gather_sums), ("all-gather", gather_both)]
        if not both:
            acts[1:] = [("all-to-all", spread_sums), ("all-gather", gather_totals), ("all-gather", gather_all)]
        levels = two_levels(self._nodes)
        phases = [Phase(name, among, begin) for (name, begin), among in zip(acts, levels, strict=True)]
        return self._phases.start(phases, self.label, self.device), gathered

    def _encode_sum(self, total: torch.Tensor, sent: torch.Tensor) -> None:
        """Encodes the node's sum of this rank's shard."""
        encoded.unchecked(self.device, (sent.dtype,)).encode([total], self._of_sum, self._sum_pointers, sent, 1.0)
