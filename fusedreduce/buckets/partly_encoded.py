"""PartlyEncodedBucket: gradients of which some are encoded, and the others travel as they are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import TypeVar

import torch

from ..comm.protocol import Communicator, Pending, Pieces
from ..kernels.table import Gradients, Partials, SourcePartials
from .bucket import Bucket
from .exchanged import ExchangedBucket

_Rows = TypeVar("_Rows", SourcePartials, Partials)


class PartlyEncodedBucket(ExchangedBucket):
    """Two parts, each with a wire and collectives of its own; those of the encoded one come first.

    Args:
        encoded: of the encoded gradients.
        rest: of the others.
        is_encoded: per gradient whether it is.
    """

    def __init__(self, encoded: Bucket, rest: Bucket, is_encoded: Sequence[bool]) -> None:
        table = encoded.chunks
        super().__init__(encoded.layout, table.dtypes, encoded.wire_dtype, encoded.device, encoded.label, chunks=table)
        self.collectives = encoded.collectives + rest.collectives
        self._encoded, self._rest = encoded, rest
        self._is_encoded = tuple(is_encoded)
        self._is_other = tuple(not one for one in is_encoded)

    def check(self, communicator: Communicator) -> None:
        """Asks for what the gradients need that are not encoded."""
        self._rest.check(communicator)

    @property
    def wire_bytes(self) -> int:
        """Bytes of both parts."""
        return self._encoded.wire_bytes + self._rest.wire_bytes

    def spans(self) -> list[tuple[int, int]]:
        """The rows of encoded gradients come first."""
        first, encoded = self.chunks.data_rows, iter(self._encoded.spans())
        rest = ((first + begin, first + end) for begin, end in self._rest.spans())
        return [next(encoded if is_encoded else rest) for is_encoded in self._is_encoded]

    def wire(self) -> torch.Tensor:
        """The wire of the encoded part."""
        return self._encoded.wire()

    def pack(self, gradients: Gradients, wire: torch.Tensor, divisor: float, partials: SourcePartials | None) -> None:
        """Packs each part's gradients to its own wire."""
        first, second = self._rows(partials)
        self._encoded.pack(list(compress(gradients, self._is_encoded)), wire, divisor, first)
        self._rest.pack(list(compress(gradients, self._is_other)), self._rest.wire(), divisor, second)

    def reduce(self, wire: torch.Tensor, communicator: Communicator) -> tuple[Pending, torch.Tensor]:
        """Starts both parts' collectives, the encoded one's first."""
        pending, reduced = self._encoded.reduce(wire, communicator)
        others, _ = self._rest.reduce(self._rest.wire(), communicator)
        self.allocations = self._encoded.allocations + self._rest.allocations
        names = ["", f"the {self._rest.collective} of {self.label}"]
        return Pieces([pending, others], self.device, names), reduced

    def unpack(
        self, gradients: Gradients, reduced: torch.Tensor, scale: torch.Tensor, partials: Partials | None
    ) -> None:
        """Unpacks each part's gradients from its own wire."""
        first, second = self._rows(partials)
        self._encoded.unpack(list(compress(gradients, self._is_encoded)), reduced, scale, first)
        self._rest.unpack(list(compress(gradients, self._is_other)), self._rest.wire(), scale, second)

    def unpacked(self) -> torch.cuda.Event | None:
        """Records that both wires have been read; returns the later event."""
        self._encoded.unpacked()
        return self._rest.unpacked()

    def release(self) -> None:
        """Drops both parts' buffers."""
        self._encoded.release()
        self._rest.release()

    def _rows(self, partials: _Rows | None) -> tuple[_Rows | None, _Rows | None]:
        rows = self.chunks.data_rows
        return (None, None) if partials is None else (partials.part(0, rows), partials.part(rows, None))
