"""EncodedTable: the rows of a bucket whose elements travel in encoded blocks, and Residuals, what is lost.

It is a ChunkTable of the decoded elements, so `measure` and `scale` take it too. Its slots begin where a block does,
and no row crosses a shard; `places` says where the blocks of each row lie in the encoded bytes.

Example, int8, one shard, one slot of 300 elements, 1024 in all:
    rows    (0, 0, 300, 0, 0)  data, two blocks;  (1, 0, 512, 512, 4)  padding, two blocks
    places  (0, 16, 0, 0)                         (8, 528, 0, 0)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch.autograd.graph import increment_version

from .encodings import EncodedLayout, Encoding
from .table import CHUNK_NUMEL, ChunkTable, PointerTable, Shape


class EncodedTable(ChunkTable):
    """The rows of one encoded layout, which never change.

    Args:
        numels: number of elements of each slot.
        offsets: first element of each slot in the bucket, a multiple of the encoding's block; slots ascend and do not
            overlap, and neither do the blocks that they begin.
        dtypes: gradient dtype of each slot: fp32, bf16 and fp16 in any mix, or fp64 alone.
        wire_numel: elements of the bucket, a multiple of `shards` x the encoding's `shard_align`.
        encoding: of its blocks.
        shards: equal parts of the bucket.
        chunk_numel: largest number of elements per row, a multiple of the encoding's block.
        shapes: size and strides of each slot's gradient, if they are always the same; saves work on CPU.
        keys: numbers of the parameters, [0, 2**32), for stochastic rounding: the same whatever the plan; None: the
            slots' positions.
        tail_bytes: see EncodedLayout.

    Attributes:
        layout: where blocks lie in the encoded bytes.

    Raises:
        ValueError: slots overlap, leave the bucket or begin within a block; a size is negative, or no multiple.
        TypeError: a dtype that the kernels do not take, or fp64 mixed with others.
    """

    def __init__(
        self,
        numels: Sequence[int],
        offsets: Sequence[int],
        dtypes: Sequence[torch.dtype],
        wire_numel: int,
        encoding: Encoding,
        shards: int,
        *,
        chunk_numel: int = CHUNK_NUMEL,
        shapes: Sequence[Shape] | None = None,
        keys: Sequence[int] | None = None,
        tail_bytes: int = 0,
    ) -> None:
        self.layout = EncodedLayout.of(encoding, wire_numel, shards, tail_bytes)
        block = encoding.block_numel
        if chunk_numel % block:
            raise ValueError(f"chunk_numel must be a multiple of a block, {block} elements, got {chunk_numel}")
        super().__init__(
            numels,
            offsets,
            dtypes,
            wire_numel,
            chunk_numel=chunk_numel,
            shapes=shapes,
            block_numel=block,
            shard_numel=self.layout.shard_numel or None,
        )
        self.keys = tuple(keys) if keys is not None else tuple(range(len(self)))
        if len(self.keys) != len(self):
            raise ValueError(f"{len(self.keys)} keys for {len(self)} slots: give one of each per slot")
        if any(not 0 <= key < 2**32 for key in self.keys):
            raise ValueError(f"keys must be in [0, 2**32), got {self.keys}")
        slot, blocks = self.rows[:, 0], self.rows[:, 3] // block
        shard, nth = blocks // max(self.layout.shard_blocks, 1), blocks % max(self.layout.shard_blocks, 1)
        scales = shard * self.layout.shard_bytes + nth * encoding.scale_bytes
        codes = shard * self.layout.shard_bytes + self.layout.scales_bytes + nth * encoding.code_bytes
        key = np.asarray([*self.keys, 0], dtype=np.int64)[slot]
        # int64 [rows, 4]: byte of the first scale, byte of the first code, the parameter's number, the first element.
        self.places: npt.NDArray[np.int64] = np.stack([scales, codes, key, self.rows[:, 1]], axis=1)
        self._places: dict[torch.device, torch.Tensor] = {}
        self._geometry: dict[tuple[int, torch.device], torch.Tensor] = {}

    def places_on(self, device: torch.device) -> torch.Tensor:
        """`places` on a device; uploaded at the first call."""
        found = self._places.get(device)
        if found is None:
            found = self._places[device] = torch.from_numpy(self.places).to(device)
        return found

    def geometry(self, contributions: int, device: torch.device) -> torch.Tensor:
        """What kernels that add contributions up read; uploaded at the first call.

        Args:
            contributions: how many are added up.
            device: where it is needed.

        Returns:
            int64 [4]: contributions, bytes of an encoded bucket, bytes of a shard, bytes of a shard's scales.
        """
        found = self._geometry.get((contributions, device))
        if found is None:
            values = contributions, self.layout.nbytes, self.layout.shard_bytes, self.layout.scales_bytes
            found = self._geometry[contributions, device] = torch.tensor(values, dtype=torch.int64, device=device)
        return found


@dataclass
class Residuals:
    """What earlier steps have lost to the encoding, per parameter, in two copies: one is read, the other written.

    Args:
        copies: two lists of P flat fp32 tensors, an element for each of the gradient's, in the order of memory.
        live: int64 [1] on the device, 0 or 1: which copy is read.
        weights: fp32 [2] on the device: what residuals are multiplied by when they are read, and when they are written.
            Where a gradient carries a loss scale S and the last step was clipped by c: (S * c, 1 / S).
    """

    copies: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]
    live: torch.Tensor
    weights: torch.Tensor
    tables: tuple[PointerTable, PointerTable] = field(default_factory=lambda: (PointerTable(), PointerTable()))


def uploaded(residuals: Residuals | None, device: torch.device) -> tuple[torch.Tensor | None, ...]:
    """Arguments of a kernel for residuals: the addresses of both copies, `live` and `weights`."""
    if residuals is None:
        return None, None, None, None
    first, second = (table.upload(copy, device) for table, copy in zip(residuals.tables, residuals.copies, strict=True))
    return first, second, residuals.live, residuals.weights


def launched(residuals: Residuals | None, output: torch.Tensor) -> None:
    """Marks what a launch on the current stream reads and writes beside gradients."""
    increment_version(output)
    if residuals is not None:
        for table, copy in zip(residuals.tables, residuals.copies, strict=True):
            table.launched()
            increment_version(copy)
