"""What one kernel benchmark works on: gradients of a layer list in buckets, some sets of them, and what must come out.

Every set has gradients, wires and address tables of its own, and other values. Gradients of a set lie in one piece of
memory, each where an allocation of its own would begin. What must come out is computed by `kernels.reference` on the
same device, and compared bit for bit; what the reference is compared with are tests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import layers
import numpy as np
import timing
import torch
from records import BenchError

from fusedreduce.kernels import reference
from fusedreduce.kernels.table import (
    ChunkTable,
    Partials,
    PointerTable,
    SourcePartials,
    new_partials,
    new_source_partials,
)
from fusedreduce.planning.bucketing import DEFAULT_CAP_BYTES
from fusedreduce.planning.layout import aligned_layout

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHORT = {dtype: name for name, dtype in DTYPES.items()}
WAYS = ("bucket", "buckets", "whole")
BLOCK_NUMEL = 2**24  # compared at a time: no temporary as large as a model
T = TypeVar("T")


@dataclass(frozen=True)
class Pair:
    """Dtype of gradients, and of what travels."""

    gradients: torch.dtype
    wire: torch.dtype

    @staticmethod
    def parse(text: str) -> Pair:
        """'fp32-bf16', 'bf16-native'.

        Raises:
            BenchError: an unknown dtype.
        """
        gradients, _, wire = text.partition("-")
        wire = gradients if wire == "native" else wire
        if gradients not in DTYPES or wire not in DTYPES:
            raise BenchError(f"unknown dtypes {text!r}: GRADIENTS-WIRE, each of {', '.join(DTYPES)}, or wire native")
        return Pair(DTYPES[gradients], DTYPES[wire])

    @property
    def name(self) -> str:
        """As it is parsed."""
        return f"{SHORT[self.gradients]}-{SHORT[self.wire]}"

    @property
    def element_bytes(self) -> int:
        """That pack or unpack must move per element: each side once."""
        return self.gradients.itemsize + self.wire.itemsize


@dataclass(frozen=True)
class Bucket:
    """One bucket of one set. Its parts of `results` and `sources` are those of the set."""

    gradients: list[torch.Tensor]
    chunks: ChunkTable
    pointers: PointerTable
    wire: torch.Tensor
    results: Partials
    sources: SourcePartials


@dataclass(frozen=True)
class BufferSet:
    """What one call works on; `memory` holds all gradients."""

    memory: torch.Tensor
    gradients: list[torch.Tensor]
    buckets: list[Bucket]
    results: Partials
    sources: SourcePartials


class Workload:
    """Gradients of a layer list, cut into buckets in one way.

    Args:
        model: see layers.py.
        pair: dtypes.
        way: "whole" (all gradients in one bucket), "buckets" (as DDP cuts them; a call is all of them), or "bucket"
            (that one of them whose size is nearest to the limit).
        device: where everything is.
        divisor: of pack.

    Raises:
        BenchError: unknown model, or too little memory.
    """

    def __init__(
        self,
        model: str,
        pair: Pair,
        way: str,
        device: torch.device,
        *,
        divisor: float = 8.0,
    ) -> None:
        self.model, self.pair, self.way, self.device, self.divisor = model, pair, way, device, divisor
        of_model = layers.shapes(model)
        members = _cut(of_model, pair.gradients.itemsize, way)
        self._counts = [len(bucket) for bucket in members]
        self.sizes = [of_model[index] for bucket in members for index in bucket]
        self.numels = [math.prod(size) for size in self.sizes]
        self.numel = sum(self.numels)
        self.bytes = self.numel * pair.element_bytes
        self.gradient_bytes = self.numel * pair.gradients.itemsize
        self.bucket_numels = [sum(numels) for numels in self.split(self.numels)]
        layouts = [aligned_layout(numels, wire_itemsize_bytes=pair.wire.itemsize) for numels in self.split(self.numels)]
        self.tables = [
            ChunkTable(
                layout.numels,
                layout.offsets,
                [pair.gradients] * len(layout.slots),
                layout.numel,
                shapes=[(size, _strides(size)) for size in sizes],
            )
            for layout, sizes in zip(layouts, self.split(self.sizes), strict=True)
        ]
        memory_bytes = self.gradient_bytes + len(self.sizes) * layers.ALLOCATION_BYTES
        wire_bytes = sum(table.wire_numel for table in self.tables) * pair.wire.itemsize
        self.set_bytes = memory_bytes + wire_bytes
        # Besides the limits' copies of as much: what must come out, and wires without padding.
        held_bytes = self.set_bytes + self.bytes + max(memory_bytes, wire_bytes) + self.padded * wire_bytes
        # Bucket buffers of baselines, and a comparison's temporaries.
        besides_bytes = 2 * 4 * max(self.bucket_numels) + 16 * BLOCK_NUMEL
        self.count = timing.rotation(self.set_bytes, device, held_bytes=held_bytes, besides_bytes=besides_bytes)
        self.cold = timing.is_cold(self.count, self.set_bytes, device)
        self.sets: list[BufferSet] = []
        self.one = torch.ones(1, device=device)

    def allocate(self) -> Workload:
        """Makes the sets; before, this is a plan that takes no memory."""
        self.sets = [self._set(seed) for seed in range(self.count)]
        return self

    def release(self) -> None:
        """Lets go of the sets."""
        self.sets = []
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def split(self, members: Sequence[T]) -> list[list[T]]:
        """What belongs to each gradient, by bucket."""
        ends = np.cumsum(self._counts)
        return [list(members[end - count : end]) for count, end in zip(self._counts, ends, strict=True)]

    @property
    def padded(self) -> bool:
        """Whether wires have elements that belong to no gradient."""
        return sum(table.wire_numel for table in self.tables) > self.numel

    def spans(self) -> torch.Tensor:
        """Rows of each gradient among those of all buckets, for one second stage; a new tensor at every call."""
        pairs, before = [], 0
        for table in self.tables:
            pairs.append(np.stack([table.first_rows[:-1], table.first_rows[1:]], axis=1) + before)
            before += table.data_rows
        flat = np.concatenate(pairs).reshape(-1)
        return torch.from_numpy(np.concatenate([[len(self.sizes)], flat])).to(self.device)

    def _set(self, seed: int) -> BufferSet:
        misaligned = self.model == "misaligned"
        gradients = layers.gradients(self.sizes, self.pair.gradients, self.device, seed, misaligned)
        memory = gradients[0]._base
        assert memory is not None
        rows = sum(table.data_rows for table in self.tables)
        results, sources = new_partials(rows, self.device), new_source_partials(rows, self.device)
        buckets, first = [], 0
        for table, members in zip(self.tables, self.split(gradients), strict=True):
            wire = torch.zeros(table.wire_numel, dtype=self.pair.wire, device=self.device)
            end = first + table.data_rows
            parts = results.part(first, end), sources.part(first, end)
            buckets.append(Bucket(members, table, PointerTable(), wire, *parts))
            first = end
        return BufferSet(memory, gradients, buckets, results, sources)

    def packed(self) -> list[list[torch.Tensor]]:
        """The wires that pack must leave, by set and bucket."""
        return [[packed(bucket, self.divisor) for bucket in one.buckets] for one in self.sets]

    def compact(self, wires: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The same without padding, as baselines lay buckets out."""
        if not self.padded:
            return list(wires)
        found = []
        for table, wire in zip(self.tables, wires, strict=True):
            slots = zip(table.offsets, table.numels, strict=True)
            found.append(torch.cat([wire[offset : offset + numel] for offset, numel in slots]))
        return found

    def unpacked(self) -> list[torch.Tensor]:
        """The memory of each set as unpack of what its wires hold must leave it, after `spoil_gradients`."""
        found = []
        for one in self.sets:
            memory = torch.full_like(one.memory, math.nan)
            places = self.split([moved(gradient, memory) for gradient in one.gradients])
            for bucket, gradients in zip(one.buckets, places, strict=True):
                reference.unpack(gradients, bucket.chunks, PointerTable(), bucket.wire, self.one)
            found.append(memory)
        return found

    def spoil_wires(self) -> None:
        """NaN in every wire."""
        for one in self.sets:
            for bucket in one.buckets:
                bucket.wire.fill_(math.nan)

    def spoil_gradients(self) -> None:
        """NaN in every gradient, and between them."""
        for one in self.sets:
            one.memory.fill_(math.nan)

    def check_wires(self, name: str, expected: Sequence[Sequence[torch.Tensor]], units: int = 0) -> None:
        """Raises BenchError unless wires begin with these, up to so many units in the last place."""
        for one, wires in zip(self.sets, expected, strict=True):
            for bucket, wire in zip(one.buckets, wires, strict=True):
                same(name, bucket.wire[: wire.numel()], wire, units)

    def check_gradients(self, name: str, expected: Sequence[torch.Tensor]) -> None:
        """Raises BenchError unless gradients are these, and nothing between them was written."""
        for one, memory in zip(self.sets, expected, strict=True):
            same(name, one.memory, memory)


def _cut(sizes: Sequence[layers.Size], itemsize: int, way: str) -> list[list[int]]:
    if way == "whole":
        return [list(range(len(sizes) - 1, -1, -1))]
    cut = layers.buckets(sizes, itemsize)
    if way == "buckets":
        return cut
    assert way == "bucket", way
    return [
        min(cut, key=lambda members: abs(sum(math.prod(sizes[one]) for one in members) * itemsize - DEFAULT_CAP_BYTES))
    ]


def _strides(size: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(size[place + 1 :]) for place in range(len(size)))


def packed(bucket: Bucket, divisor: float) -> torch.Tensor:
    """The wire that pack must leave."""
    wire = torch.full_like(bucket.wire, math.nan)
    reference.pack(bucket.gradients, bucket.chunks, PointerTable(), wire, divisor)
    return wire


def moved(gradient: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """What lies at the gradient's place in another memory."""
    return memory.as_strided(gradient.size(), gradient.stride(), gradient.storage_offset())


def same(name: str, actual: torch.Tensor, expected: torch.Tensor, units: int = 0) -> None:
    """Raises BenchError unless all bits are equal, or values within so many units in the last place of `expected`."""
    bits = {2: torch.int16, 4: torch.int32}[expected.dtype.itemsize]
    if torch.equal(actual.view(bits), expected.view(bits)):
        return
    for part, wanted in zip(actual.split(BLOCK_NUMEL), expected.split(BLOCK_NUMEL), strict=True):
        # Of one sign, bits are ordered as numbers are.
        off = (part.view(bits).long() - wanted.view(bits).long()).abs()
        wrong = off > units
        if bool(wrong.any()):
            where = int(wrong.nonzero()[0])
            raise BenchError(
                f"{name} is wrong: {int(wrong.sum())} of {part.numel()} differ, the first is "
                f"{float(part[where])!r} instead of {float(wanted[where])!r}"
            )
