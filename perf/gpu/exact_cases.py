"""Random buckets for the exact check, and comparison without leaving the device.

Slots of 0 to many elements at any address, missing ones, gaps, all dtypes, values that are special; what a kernel may
write lies between sentinels, and is poison before.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from records import BenchError

from fusedreduce.kernels.table import ChunkTable

GUARD_NUMEL = 64
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
WIDE_WIRES = (torch.float64, torch.bfloat16, torch.float16)
SPECIAL = (0.0, -0.0, float("nan"), float("inf"), -float("inf"), 65504.0, 70000.0, 6e-8, 2.0**-25, 1.0 + 2.0**-9)
SUBNORMAL = (1e-40, -3e-42, 2.0**-149, 3.4e38, 2.0**-126)
DIVISORS = (1.0, 2.0, 3.0, 7.0, 1024.0)
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
POISON = 0x2BAD


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """One random case. `values[slot]` is None where the gradient is missing."""

    numels: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    shifts: tuple[int, ...]
    values: tuple[torch.Tensor | None, ...]
    chunks: ChunkTable
    wire: torch.dtype
    scalar: float
    label: str

    @property
    def compute(self) -> torch.dtype:
        return self.chunks.compute_dtype


class Guarded:
    """`numel` poisoned elements, `shift` elements past an aligned address, between sentinels."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, shift: int = 0) -> None:
        begin = GUARD_NUMEL + shift
        kind = BITS[dtype.itemsize]
        self._bits = torch.full((numel + 2 * GUARD_NUMEL + shift,), POISON, dtype=kind, device=device)
        self._edges = (self._bits[:begin], self._bits[begin + numel :])
        self.inner = self._bits.view(dtype)[begin : begin + numel]

    def check_edges(self, what: str) -> None:
        """Raises BenchError if a sentinel has changed."""
        for where, edge in zip(("before", "after"), self._edges, strict=True):
            if not bool((edge == POISON).all()):
                raise BenchError(f"{what}: something was written {where} its place")


def buckets(count: int, seed: int, device: torch.device, most_numel: int, *, subnormal: bool) -> Iterator[Bucket]:
    """The same `count` cases for the same seed."""
    for number in range(count):
        yield _bucket(random.Random(seed * 1_000_003 + number), number, device, most_numel, subnormal)


def _bucket(draw: random.Random, number: int, device: torch.device, most_numel: int, subnormal: bool) -> Bucket:
    wide = draw.random() < 0.2
    slots = draw.randint(1, 6) if draw.random() < 0.8 else draw.randint(40, 120)
    most = most_numel if slots <= 6 else max(64, most_numel // 100)
    # Sizes of every magnitude: an even draw would have hardly a small one.
    pool = [one for one in (0, 1, 2, 3, 7, 13, 64, 127, 257, 700) if one <= most]
    numels = [draw.choice([*pool, int(most ** draw.uniform(0.3, 1.0))]) for _ in range(slots)]
    dtypes = [torch.float64 if wide else draw.choice(FLOATS) for _ in range(slots)]
    offsets, end = [], 0
    for numel in numels:
        end += draw.choice((0, 0, 0, 1, 3, 8))
        offsets.append(end)
        end += numel
    end += draw.choice((0, 0, 5))
    chunk_numel = draw.choice((8192, 8192, 700, 64))
    wire = draw.choice(WIDE_WIRES if wide else FLOATS)
    generator = torch.Generator().manual_seed(draw.getrandbits(30))
    special = SPECIAL + (SUBNORMAL if subnormal else ())
    values = [
        None if draw.random() < 0.1 else _values(numel, dtype, generator, special if draw.random() < 0.5 else ())
        for numel, dtype in zip(numels, dtypes, strict=True)
    ]
    chunks = ChunkTable(numels, offsets, dtypes, end, chunk_numel=chunk_numel)
    return Bucket(
        numels=tuple(numels),
        dtypes=tuple(dtypes),
        shifts=tuple(draw.choice((0, 0, 0, 1, 3, 8)) for _ in range(slots)),
        values=tuple(None if one is None else one.to(device) for one in values),
        chunks=chunks,
        wire=wire,
        scalar=draw.choice(DIVISORS),
        label=f"case {number} ({slots} slots, wire {str(wire).removeprefix('torch.')}, chunks of {chunk_numel})",
    )


def _values(numel: int, dtype: torch.dtype, generator: torch.Generator, special: Sequence[float]) -> torch.Tensor:
    """Magnitudes from 2^-30 to 2^18, special ones in between."""
    values = torch.randn(numel, generator=generator, dtype=torch.float64)
    values *= 2.0 ** torch.randint(-30, 18, (numel,), generator=generator)
    if special and numel:
        count = min(numel, 12)
        where = torch.randperm(numel, generator=generator)[:count]
        pool = torch.tensor(special, dtype=torch.float64)
        values[where] = pool[torch.randint(0, len(pool), (count,), generator=generator)]
    return values.to(dtype)


def differing(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Where two flat tensors differ: bit for bit, but any NaN is like any other."""
    kind = BITS[expected.element_size()]
    return (actual.view(kind) != expected.view(kind)) & ~(actual.isnan() & expected.isnan())


def same(what: str, actual: torch.Tensor, expected: torch.Tensor, begin: int = 0) -> None:
    """Raises BenchError at the first element that differs; `begin` is the index of the first."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise BenchError(
            f"{what}: {tuple(actual.shape)} of {actual.dtype}, not {tuple(expected.shape)} of {expected.dtype}"
        )
    bad = differing(actual, expected)
    count = int(bad.sum())
    if count:
        first = int(bad.to(torch.uint8).argmax())
        raise BenchError(
            f"{what}: {count} of {actual.numel()} differ, the first at {begin + first}: "
            f"{actual[first].item()!r} instead of {expected[first].item()!r}"
        )
