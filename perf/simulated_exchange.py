"""Several ranks' exchange of one encoded bucket in one process, by the kernels and in the order that ranks call them.

Two ranks: all-gather, and decode adds both up. Three and more: shards, combine_encoded, decode. Nothing travels; what
an element becomes does not depend on where.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusedreduce.kernels import encoded
from fusedreduce.kernels.encoded_table import EncodedTable, Residuals
from fusedreduce.kernels.encodings import Encoding
from fusedreduce.kernels.table import PointerTable
from fusedreduce.planning.layout import block_layout


class SimulatedExchange:
    """The exchange of gradients of given shapes, step after step.

    Args:
        parameters: with the shapes of gradients, fp32.
        encoding: of contributions, and of their sums.
        ranks: that exchange.
        stochastic: codes are rounded stochastically.
        feedback: what a rank loses to its encoding is added in the next step. Two ranks alone.
        seed: of the draws.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        encoding: Encoding,
        ranks: int,
        *,
        stochastic: bool = False,
        feedback: bool = False,
        seed: int = 0,
    ) -> None:
        assert not feedback or ranks == 2, "a sum that is encoded again has a residual of its own"
        self._ranks, self._two_phases = ranks, ranks > 2
        shards = ranks if self._two_phases else 1
        numels = [one.numel() for one in parameters]
        layout = block_layout(numels, block_numel=encoding.block_numel, shard_align=encoding.shard_align, shards=shards)
        kinds = [torch.float32] * len(numels)
        self._table = EncodedTable(numels, layout.offsets, kinds, layout.numel, encoding, shards)
        self._sent = torch.empty(ranks, self._table.layout.nbytes, dtype=torch.uint8)
        self._summed = torch.empty(shards, self._table.layout.shard_bytes, dtype=torch.uint8)
        self._received = torch.empty(ranks, self._table.layout.shard_bytes, dtype=torch.uint8)
        self._pointers = PointerTable()
        self._one = torch.ones(1)
        self._draw = torch.tensor([seed, 0, 0, 0]) if stochastic else None
        self._residuals = [self._no_residuals(numels) for _ in range(ranks)] if feedback else None

    @staticmethod
    def _no_residuals(numels: Sequence[int]) -> Residuals:
        first, second = ([torch.zeros(numel) for numel in numels] for _ in range(2))
        return Residuals((first, second), torch.zeros(1, dtype=torch.int64), torch.ones(2))

    def mean(
        self, gradients: Sequence[Sequence[torch.Tensor]], results: Sequence[torch.Tensor], divisor: float | None = None
    ) -> None:
        """Writes every rank's mean into `results`.

        Args:
            gradients: of each rank.
            results: like the gradients of one rank.
            divisor: of the sum; None: the number of ranks.
        """
        for rank, (mine, sent) in enumerate(zip(gradients, self._sent, strict=True)):
            residuals = None if self._residuals is None else self._residuals[rank]
            draw = self._drawn_by(2 * rank)
            divisor = divisor or float(self._ranks)
            encoded.encode(mine, self._table, self._pointers, sent, divisor, residuals=residuals, draw=draw)
            if residuals is not None:
                residuals.live.bitwise_xor_(1)
        gathered = self._combined() if self._two_phases else self._sent
        encoded.decode(results, self._table, self._pointers, gathered.view(-1), self._one)
        if self._draw is not None:
            self._draw[2] += 1

    def _combined(self) -> torch.Tensor:
        for owner, output in enumerate(self._summed):
            torch.stack([sent.view(self._ranks, -1)[owner] for sent in self._sent], out=self._received)
            draw = self._drawn_by(2 * owner + 1)
            encoded.combine_encoded(self._received.view(-1), self._table, output, draw=draw)
        return self._summed

    def _drawn_by(self, stream: int) -> torch.Tensor | None:
        if self._draw is not None:
            self._draw[1] = stream
        return self._draw
