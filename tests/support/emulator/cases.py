"""Buckets for compiled kernels: every dtype in them has aligned and unaligned slots, tame values and wild ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fusedreduce.kernels.encoded_table import EncodedTable, Residuals
from fusedreduce.kernels.encodings import Encoding
from fusedreduce.kernels.table import ChunkTable
from support.buckets import FLOATS, Guarded, poison
from support.encoded_buckets import table_of

CPU = torch.device("cpu")
NUMELS = (1, 2, 3, 7, 13, 0, 64, 127, 257, 700, 2048, 4099, 1, 8197, 5, 3000)
ENCODED_NUMELS = (1, 3, 0, 64, 255, 257, 700, 4099, 8200, 63, 2048, 1000, 513, 129, 450, 300)
# Bits that a tie of a narrower type cuts off, and the tie.
_TIES = {
    torch.float32: ((16, 0x8000), (13, 0x1000)),
    torch.float64: ((45, 1 << 44), (42, 1 << 41), (29, 1 << 28)),
}
_EDGES = (
    *(0.0, -0.0, float("nan"), float("inf"), -float("inf")),
    *(65504.0, 65519.99, 65520.0, 70000.0, 6e-8, 2.0**-24, 2.0**-25, -(2.0**-25), 2.0**-25 * 1.0001, 1.0 + 2.0**-9),
    *(1e-40, -3e-42, 2.0**-149, 2.0**-133, 2.0**-134, 2.0**-134 * 1.001, 2.0**-150, 1.5 * 2.0**-149),
    *(3.4e38, 3.3895e38, 3.39e38, 3.3961775e38, 2.0**-126, 2.0**-127),
)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as integers of its width."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(kinds[tensor.element_size()])


def values(numel: int, dtype: torch.dtype, seed: int, *, wild: bool) -> torch.Tensor:
    """Tame: magnitudes from 2^-30 to 2^18, with ties of narrower types. Wild: any bits of the dtype, and edges."""
    draw = np.random.default_rng(seed)
    out = torch.from_numpy(draw.standard_normal(numel) * 2.0 ** draw.integers(-30, 18, numel)).to(dtype)
    raw = bits_of(out)
    for keep, tie in _TIES.get(dtype, ()):
        where = torch.from_numpy(draw.random(numel) < 0.15)
        raw[where] = (raw[where] >> keep << keep) | tie
        where = torch.from_numpy(draw.random(numel) < 0.05)  # one beside a tie
        raw[where] = ((raw[where] >> keep << keep) | tie) + int(draw.choice([-1, 1]))
    if wild:
        anything = torch.from_numpy(draw.integers(-(2**63), 2**63 - 1, numel)).to(raw.dtype)
        where = torch.from_numpy(draw.random(numel) < 0.4)
        raw[where] = anything[where]
        edges = torch.tensor(_EDGES, dtype=torch.float64).to(dtype)
        where = torch.from_numpy(draw.random(numel) < 0.2)
        out[where] = edges[torch.from_numpy(draw.integers(0, len(edges), int(where.sum())))]
    return out


@dataclass(frozen=True)
class Slots:
    """What gradients a bucket has: of each dtype the largest is aligned, the next largest is not, and so on."""

    numels: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    aligned: tuple[bool, ...]
    kept_aligned: tuple[bool, ...]  # of residuals, so that every pair of both occurs
    missing: tuple[bool, ...]
    wild: tuple[bool, ...]
    seed: int

    @classmethod
    def of(cls, seed: int, numels: Sequence[int], *, fp64: bool) -> Slots:
        """Those of one seed, in an order of its own; of the largest none is missing."""
        draw = np.random.default_rng(seed)
        order = [int(one) for one in draw.permutation(len(numels))]
        by_size = sorted(order, key=lambda slot: (-numels[slot], slot))
        ranks = [by_size.index(slot) for slot in order]
        dtypes = [torch.float64 if fp64 else FLOATS[(rank + seed) % 3] for rank in ranks]
        absent = set(draw.choice(np.arange(6, len(numels)), 2, replace=False).tolist())
        return cls(
            numels=tuple(numels[slot] for slot in order),
            dtypes=tuple(dtypes),
            aligned=tuple(rank // 3 % 2 == 0 for rank in ranks),
            kept_aligned=tuple(rank // 6 % 2 == 0 for rank in ranks),
            missing=tuple(rank in absent for rank in ranks),
            wild=tuple((rank + seed) % 2 == 0 for rank in ranks),
            seed=seed,
        )

    def guarded(self, shifts: Sequence[int], *, poisoned: bool = False, tame: bool = False) -> list[Guarded | None]:
        """Gradients so many elements off a 64-byte boundary; None: missing."""
        made: list[Guarded | None] = []
        for slot, (numel, dtype, shift) in enumerate(zip(self.numels, self.dtypes, shifts, strict=True)):
            wild = self.wild[slot] and not tame
            given = poison(numel, dtype) if poisoned else values(numel, dtype, self.seed * 100 + slot, wild=wild)
            made.append(None if self.missing[slot] else Guarded.of(given, shift))
        return made


class Bucket:
    """A flat bucket: a gradient and its slot on the wire lie alike with regard to 16 bytes, or never do.

    Args:
        seed: of its slots, values and gaps.
        fp64: gradients are, and all that is computed.
        numels: sizes of the gradients.
    """

    def __init__(self, seed: int, *, fp64: bool, numels: Sequence[int] = NUMELS) -> None:
        draw = np.random.default_rng(seed + 77)
        self.slots = Slots.of(seed, numels, fp64=fp64)
        self.compute = torch.float64 if fp64 else torch.float32
        self.wire_shift = int(draw.choice([0, 1, 3]))
        self.shifts = tuple(int(draw.choice([0, 0, 1, 3, 8, 2])) for _ in numels)
        offsets, end = [], 0
        for numel, shift, aligned in zip(self.slots.numels, self.shifts, self.slots.aligned, strict=True):
            gap = int(draw.choice([0, 0, 8, 200]))
            gap += (shift - self.wire_shift - end - gap + (0 if aligned else int(draw.choice([1, 3, 5])))) % 8
            offsets.append(end + gap)
            end += gap + numel
        chunk = (8192, 700, 2048)[seed % 3]
        self.chunks = ChunkTable(self.slots.numels, offsets, self.slots.dtypes, end + 9, chunk_numel=chunk)

    def gradients(self, *, poisoned: bool = False, tame: bool = False) -> list[Guarded | None]:
        """New ones, alike each time."""
        return self.slots.guarded(self.shifts, poisoned=poisoned, tame=tame)

    def wire(self, dtype: torch.dtype) -> Guarded:
        """What has travelled: parameters with any bits, with zeros alone, and tame ones."""
        made = values(self.chunks.wire_numel, dtype, self.slots.seed, wild=False)
        for slot, numel in enumerate(self.slots.numels):
            there = made[self.chunks.offsets[slot] :][:numel]
            if self.slots.wild[slot]:
                there.copy_(values(numel, dtype, self.slots.seed * 31 + slot, wild=True))
            elif slot % 4 == 0:
                there.zero_()
        return Guarded.of(made, self.wire_shift)


class EncodedBucket:
    """An encoded bucket with residuals and random bits; arguments as of `Bucket`."""

    def __init__(self, seed: int, encoding: Encoding, *, fp64: bool) -> None:
        draw = np.random.default_rng(seed + 77)
        self.slots = Slots.of(seed, ENCODED_NUMELS, fp64=fp64)
        count = len(ENCODED_NUMELS)
        self.chunks: EncodedTable = table_of(
            self.slots.numels,
            encoding,
            1 + seed % 3,
            self.slots.dtypes,
            keys=tuple(int(key) for key in draw.integers(0, 2**32, count)),
            chunk_numel=(8192, 2048)[seed % 2],
        )
        self._shifts = tuple(int(draw.choice([0, 8] if aligned else [1, 3])) for aligned in self.slots.aligned)
        self.draw = torch.from_numpy(
            np.concatenate([draw.integers(0, 2**32, 2), draw.integers(0, 2**40, 1), draw.integers(0, 2**32, 1)])
        )
        self._weights = torch.tensor([(1.0, 1.0), (1024.0, 2.0**-10), (0.3, 0.7)][seed % 3])
        self.scale = torch.tensor([(1.0, 1 / 3, 2.0**-16)[seed % 3]], dtype=torch.float64 if fp64 else torch.float32)

    def gradients(self, *, poisoned: bool = False) -> list[Guarded | None]:
        """New ones, alike each time; the longest of fp32 have blocks whose scale is at the edge of what is kept."""
        made = self.slots.guarded(self._shifts, poisoned=poisoned)
        for one in made:
            if one is not None and not poisoned and one.inner.numel() > 2000 and one.inner.dtype is torch.float32:
                one.inner[:1024] *= 2.0**-118
                one.inner[1024:1536] *= 2.0**100
                one.inner[-64:] = self.chunks.layout.encoding.levels * 2.0**-126
        return made

    def residuals(self, *, of_shard: bool = False) -> tuple[Residuals, list[Guarded]]:
        """Residuals of all gradients, or of a shard, and those that are written, poisoned."""
        numels = (self.chunks.layout.shard_numel,) if of_shard else self.slots.numels
        shifts = [0] if of_shard else [0 if aligned else 1 for aligned in self.slots.kept_aligned]
        live = [
            Guarded.of(values(numel, torch.float32, self.slots.seed + nth, wild=False) * 2.0**-8, shift)
            for nth, (numel, shift) in enumerate(zip(numels, shifts, strict=True))
        ]
        written = [Guarded.of(poison(numel, torch.float32), shift) for numel, shift in zip(numels, shifts, strict=True)]
        copies = [one.inner for one in written], [one.inner for one in live]
        return Residuals(copies, torch.tensor([1]), self._weights), written
