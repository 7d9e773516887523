"""Random encoded buckets: the gradients of `buckets`, in blocks and shards, with residuals and random bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fusedreduce.kernels import reference_encoded
from fusedreduce.kernels.encoded_table import EncodedTable, Residuals
from fusedreduce.kernels.encodings import ENCODINGS, Encoding
from fusedreduce.kernels.table import PointerTable, Shape
from fusedreduce.planning.layout import block_layout
from support.buckets import Case, Guarded, cases, divisors, poison
from support.own_wires import OWN_ENCODINGS

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

CPU = torch.device("cpu")
UNWRITTEN = 0xA5  # a byte


def table_of(
    numels: tuple[int, ...],
    encoding: Encoding,
    shards: int = 1,
    dtypes: tuple[torch.dtype, ...] | None = None,
    *,
    keys: tuple[int, ...] | None = None,
    chunk_numel: int = 8192,
    shaped: bool = True,
    tail_bytes: int = 0,
) -> EncodedTable:
    """The table of these parameters, laid out one after the other."""
    layout = block_layout(numels, block_numel=encoding.block_numel, shard_align=encoding.shard_align, shards=shards)
    shapes: list[Shape] | None = [((numel,), (1,)) for numel in numels] if shaped else None
    kinds = dtypes or (torch.float32,) * len(numels)
    return EncodedTable(
        numels,
        layout.offsets,
        kinds,
        layout.numel,
        encoding,
        shards,
        keys=keys,
        chunk_numel=chunk_numel,
        shapes=shapes,
        tail_bytes=tail_bytes,
    )


@dataclass(frozen=True)
class EncodedCase:
    """What one example of a test consists of; of `bucket`, gaps and wire are not used."""

    bucket: Case
    encoding: Encoding
    shards: int
    tail_bytes: int
    contributions: int
    shaped: bool
    with_residuals: bool
    weights: tuple[float, float]
    draw: tuple[int, int, int, int] | None

    def table(self) -> EncodedTable:
        """The table of these slots."""
        chunk = max(self.bucket.chunk_numel // self.encoding.block_numel, 4) * self.encoding.block_numel
        keys = tuple((slot * 40503 + self.bucket.seed) % 2**32 for slot in range(len(self.bucket.numels)))
        return table_of(
            self.bucket.numels,
            self.encoding,
            self.shards,
            self.bucket.dtypes,
            keys=keys,
            chunk_numel=chunk,
            shaped=self.shaped,
            tail_bytes=self.tail_bytes,
        )

    def residuals(self, numels: tuple[int, ...], device: torch.device = CPU) -> Residuals | None:
        """Residuals with the second copy live, the first poisoned; None: no error feedback."""
        if not self.with_residuals:
            return None
        generator = torch.Generator().manual_seed(self.bucket.seed)
        live = [(torch.randn(numel, generator=generator) * 2.0**-8).to(device) for numel in numels]
        written = [poison(numel, torch.float32).to(device) for numel in numels]
        return Residuals((written, live), torch.tensor([1], device=device), torch.tensor(self.weights, device=device))

    def drawn(self, device: torch.device = CPU) -> torch.Tensor | None:
        """What random bits depend on; None: rounding to nearest."""
        return None if self.draw is None else torch.tensor(self.draw, device=device)


def encoded_cases() -> SearchStrategy[EncodedCase]:
    """Buckets as of `cases`, with every encoding, 1 to 3 shards with and without a tail, and all options."""
    from hypothesis import strategies as st

    @st.composite
    def drawn(draw: st.DrawFn) -> EncodedCase:
        number = st.integers(0, 2**32 - 1)
        stochastic = draw(st.integers(0, 2)) == 0
        return EncodedCase(
            bucket=draw(cases(divisors())),
            encoding=draw(st.sampled_from([*ENCODINGS.values(), *OWN_ENCODINGS])),
            shards=draw(st.integers(1, 3)),
            tail_bytes=draw(st.sampled_from([0, 0, 16, 4112])),
            contributions=draw(st.integers(1, 3)),
            shaped=draw(st.booleans()),
            with_residuals=draw(st.integers(0, 2)) == 0,
            weights=draw(st.sampled_from([(1.0, 1.0), (1024.0, 2.0**-10), (0.3, 0.7)])),
            draw=(draw(number), draw(number), draw(st.integers(0, 2**40)), draw(number)) if stochastic else None,
        )

    return drawn()


def guarded_bytes(nbytes: int, device: torch.device = CPU) -> Guarded:
    """Poisoned bytes between sentinels, at an address that is a multiple of 64."""
    return Guarded.of(torch.full((nbytes,), UNWRITTEN, dtype=torch.uint8, device=device))


def contributed(gradients: Sequence[Guarded | None], chunks: EncodedTable, number: int) -> torch.Tensor:
    """Encodings, by the definition, of the gradients and multiples of them."""
    made = [guarded_bytes(chunks.layout.nbytes).inner for _ in range(number)]
    for factor, into in enumerate(made, 1):
        multiples = [None if one is None else one.inner * factor for one in gradients]
        reference_encoded.encode(multiples, chunks, PointerTable(), into, 3.0)
    return torch.cat(made)
