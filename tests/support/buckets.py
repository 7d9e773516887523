"""Random buckets for the kernel tests: gradients at any address, poisoned buffers with sentinels around them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fusedreduce.kernels import reference
from fusedreduce.kernels.table import ChunkTable

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

# Elements before and after everything a kernel may write.
GUARD = 64
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SPECIAL = (0.0, -0.0, float("nan"), float("inf"), -float("inf"), 65504.0, 70000.0, 6e-8, 2.0**-25, 1.0 + 2.0**-9)
WILD = (1e-40, -3e-42, 2.0**-149, 3.4e38, 2.0**-126)


@dataclass
class Guarded:
    """A flat tensor in the middle of a larger one whose edges must not change."""

    inner: torch.Tensor
    outer: torch.Tensor
    before: torch.Tensor

    @classmethod
    def of(cls, values: torch.Tensor, shift: int = 0) -> Guarded:
        """`values` at an address `shift` elements off a 64-byte boundary, poison around it."""
        numel = values.numel()
        room = torch.empty(numel + 2 * GUARD + 128, dtype=values.dtype, device=values.device)
        aligned = (-room.data_ptr() // room.element_size()) % (64 // room.element_size())
        outer = room[aligned : aligned + numel + 2 * GUARD + shift]
        outer.view(_bits(values.dtype)).fill_(0x6DCB if values.dtype.itemsize > 1 else 0xCB)
        start = GUARD + shift
        outer[start : start + numel] = values.reshape(-1)
        return cls(outer[start : start + numel], outer, outer.clone())

    def assert_edges_untouched(self) -> None:
        """Every sentinel is still there, bit for bit."""
        start = self.inner.storage_offset() - self.outer.storage_offset()
        kind = _bits(self.outer.dtype)
        now, then = self.outer.view(kind), self.before.view(kind)
        assert torch.equal(now[:start], then[:start])
        assert torch.equal(now[start + self.inner.numel() :], then[start + self.inner.numel() :])


def inner(guarded: Iterable[Guarded | None]) -> list[torch.Tensor | None]:
    """What a kernel is given."""
    return [None if one is None else one.inner for one in guarded]


def poison(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A bit pattern that no computation here produces."""
    return torch.full((numel,), 0x2BAD, dtype=_bits(dtype)).view(dtype)


def _bits(dtype: torch.dtype) -> torch.dtype:
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal value for value, sign of zero included; NaN equals NaN."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    nan = expected.isnan()
    assert torch.equal(actual.isnan(), nan)
    kind = _bits(actual.dtype)
    same = (actual.view(kind) == expected.view(kind)) | nan
    if not same.all():
        where = int((~same).nonzero()[0, 0])
        raise AssertionError(
            f"{int((~same).sum())} of {actual.numel()} differ, first at {where}: "
            f"{actual.reshape(-1)[where].item()!r} instead of {expected.reshape(-1)[where].item()!r}"
        )


@dataclass(frozen=True)
class Case:
    """What one example of a kernel test consists of."""

    numels: tuple[int, ...]
    gaps: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    wire: torch.dtype
    shifts: tuple[int, ...]
    wire_shift: int
    missing: tuple[bool, ...]
    chunk_numel: int
    tile_bytes: int
    scalar: float
    seed: int
    special: bool

    def table(self, **more: Any) -> ChunkTable:
        """The chunk table of these slots, with `more` of its arguments."""
        offsets, end = [], 0
        for numel, gap in zip(self.numels, self.gaps, strict=False):
            offsets.append(end + gap)
            end += gap + numel
        return ChunkTable(self.numels, offsets, self.dtypes, end + self.gaps[-1], chunk_numel=self.chunk_numel, **more)

    def gradients(self, device: torch.device | str = "cpu", *, poisoned: bool = False) -> list[Guarded | None]:
        """Of every slot, at its address, between sentinels; None where it is missing."""
        made: list[Guarded | None] = []
        for slot, (missing, shift) in enumerate(zip(self.missing, self.shifts, strict=True)):
            values = poison(self.numels[slot], self.dtypes[slot]) if poisoned else self.values(slot)
            made.append(None if missing else Guarded.of(values.to(device), shift))
        return made

    def travelled(self, between: float) -> torch.Tensor:
        """A wire with the values of all slots, missing ones too; `between` them this."""
        chunks = self.table()
        wire = torch.full((chunks.wire_numel,), between, dtype=self.wire)
        for slot, numel in enumerate(self.numels):
            wire[chunks.offsets[slot] :][:numel] = reference.round_once(self.values(slot), self.wire)
        return wire

    @property
    def compute(self) -> torch.dtype:
        """fp64 for fp64 gradients, else fp32."""
        return torch.float64 if torch.float64 in self.dtypes else torch.float32

    def values(self, slot: int) -> torch.Tensor:
        """Random gradient values of one slot: magnitudes from 2^-30 to 2^18, special ones in between."""
        generator = torch.Generator().manual_seed(self.seed * 1009 + slot)
        numel, dtype = self.numels[slot], self.dtypes[slot]
        values = torch.randn(numel, generator=generator, dtype=torch.float64)
        values *= 2.0 ** torch.randint(-30, 18, (numel,), generator=generator)
        if self.special and numel:
            pool = torch.tensor(SPECIAL + (WILD if self._wild else ()), dtype=torch.float64)
            count = min(numel, 12)
            where = torch.randperm(numel, generator=generator)[:count]
            values[where] = pool[torch.randint(0, len(pool), (count,), generator=generator)]
        return values.to(dtype)

    @property
    def _wild(self) -> bool:
        # The interpreter's bf16 subnormals are a known defect: see interpreter_defects.py.
        return torch.bfloat16 not in (*self.dtypes, self.wire)


def divisors() -> SearchStrategy[float]:
    """Numbers of ranks and parts of them, any others, and all powers of two, those without a normal reciprocal too."""
    from hypothesis import strategies as st  # what else is here needs none

    return st.one_of(
        st.integers(1, 5000).map(float),
        st.tuples(st.integers(1, 5000), st.sampled_from([0.5, 2.0, 4.0, 64.0])).map(lambda drawn: drawn[0] / drawn[1]),
        st.floats(1e-3, 1e6),
        st.integers(-149, 127).map(lambda power: 2.0**power),
    )


def cases(scalars: Sequence[float] | SearchStrategy[float], fp64: bool | None = None) -> SearchStrategy[Case]:
    """Buckets of 1 to 6 slots: 0 and 1 element, primes, one large beside tiny ones; all dtypes and alignments."""
    from hypothesis import strategies as st

    scalar = st.sampled_from(scalars) if isinstance(scalars, Sequence) else scalars

    @st.composite
    def drawn(draw: st.DrawFn) -> Case:
        wide = draw(st.booleans()) if fp64 is None else fp64
        slots = draw(st.integers(1, 6))
        size = st.one_of(st.sampled_from([0, 1, 2, 3, 7, 13, 64, 127, 257]), st.integers(0, 700))
        numels = draw(st.lists(size, min_size=slots, max_size=slots))
        if draw(st.integers(0, 4)) == 0:
            numels[draw(st.integers(0, slots - 1))] = draw(st.integers(2000, 5000))
        dtype = st.just(torch.float64) if wide else st.sampled_from(FLOATS)
        wires = (torch.float64, torch.bfloat16, torch.float16) if wide else FLOATS
        few = st.sampled_from([0, 0, 0, 1, 3, 8])
        return Case(
            numels=tuple(numels),
            gaps=tuple(draw(st.lists(few, min_size=slots + 1, max_size=slots + 1))),
            dtypes=tuple(draw(st.lists(dtype, min_size=slots, max_size=slots))),
            wire=draw(st.sampled_from(wires)),
            shifts=tuple(draw(st.lists(few, min_size=slots, max_size=slots))),
            wire_shift=draw(few),
            missing=tuple(draw(st.lists(st.sampled_from([False] * 5 + [True]), min_size=slots, max_size=slots))),
            chunk_numel=draw(st.sampled_from([8192, 700, 64])),
            tile_bytes=draw(st.sampled_from([4096, 1024])),
            scalar=draw(scalar),
            seed=draw(st.integers(0, 2**20)),
            special=draw(st.booleans()),
        )

    return drawn()
