"""Elements behind 2^31 of one gradient: a few rows of a table of so many, in memory reserved and not touched."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import torch

from fusedreduce.kernels import decode, encode, pack, reference, reference_encoded, unpack, walk
from fusedreduce.kernels.encoded_table import Residuals
from fusedreduce.kernels.encodings import INT8
from fusedreduce.kernels.table import ChunkTable, PointerTable
from support.emulator.cases import CPU
from support.emulator.driver import EmulatingDriver
from support.emulator.kernels import Emulation
from support.encoded_buckets import table_of

NUMEL = 2**31 + 2**20 + 5
TOUCHED = 3 * 8192
_NORESERVE = 0x4000  # of mmap, on Linux; from Python 3.13 on mmap has it


def _room(numel: int, dtype: torch.dtype) -> torch.Tensor:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    return torch.frombuffer(mmap.mmap(-1, numel * dtype.itemsize, flags=flags), dtype=dtype, count=numel)


def _few_rows(chunks: Any) -> Any:
    keep = np.r_[0:2, chunks.data_rows - 3 : chunks.data_rows]
    chunks.rows, chunks.data_rows = np.ascontiguousarray(chunks.rows[keep]), len(keep)
    if hasattr(chunks, "places"):
        chunks.places = np.ascontiguousarray(chunks.places[keep])
    return chunks


def compared_behind_2_31(driver: EmulatingDriver) -> dict[str, Any]:
    """Pack, unpack, measure, encode and decode there, against the definition.

    Returns:
        values compared, and what was wrong.
    """
    found, generator = Emulation(driver), torch.Generator().manual_seed(3)
    driver.races = False  # a shadow of each byte would take as many
    both = slice(0, TOUCHED - 8192), slice(NUMEL - TOUCHED - 1000, NUMEL)

    def ends(what: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        for part in both:
            found.same(what, ours[part], theirs[part])

    gradient = _room(NUMEL, torch.float32)
    gradient[:TOUCHED], gradient[-TOUCHED:] = (torch.randn(TOUCHED, generator=generator) for _ in range(2))
    gradient[NUMEL - 2] = float("nan")
    chunks = _few_rows(ChunkTable([NUMEL], [0], [torch.float32], NUMEL))
    wire, wanted = (_room(NUMEL, torch.bfloat16) for _ in range(2))
    sources, others = chunks.new_source_partials(CPU), chunks.new_source_partials(CPU)
    driver.reach([gradient], "gradient", write=False)
    found.launch(pack.pack, [gradient], chunks, PointerTable(), wire, 3.0, sources)
    reference.pack([gradient], chunks, PointerTable(), wanted, 3.0, others)
    ends("pack", wire, wanted)
    found.sources(sources, others)
    assert others.first_non_finite.tolist()[-1] == NUMEL - 2
    back, theirs = (_room(NUMEL, torch.float32) for _ in range(2))
    factor, partials, expected = torch.tensor([0.3]), chunks.new_partials(CPU), chunks.new_partials(CPU)
    driver.forget()
    driver.reach([back], "gradient", write=True)
    found.launch(unpack.unpack, [back], chunks, PointerTable(), wire, factor, partials)
    reference.unpack([theirs], chunks, PointerTable(), wire, factor, expected)
    ends("unpack", back, theirs)
    found.sums(partials, expected)
    partials = chunks.new_partials(CPU)
    found.launch(walk.measure, [back], chunks, PointerTable(), partials)
    found.sums(partials, expected)
    del wanted, theirs, back, wire

    gradient[NUMEL - 2] = 1.0
    table = _few_rows(table_of((NUMEL,), INT8, shaped=False))
    live, draw = _room(NUMEL, torch.float32), torch.tensor([1, 2, 3, 4])
    live[-TOUCHED:] = torch.randn(TOUCHED, generator=generator) * 0.01
    made = []
    for function in (encode.encode, reference_encoded.encode):
        bucket, written = _room(table.layout.nbytes, torch.uint8), _room(NUMEL, torch.float32)
        kept = Residuals(([live], [written]), torch.tensor([0]), torch.tensor([0.3, 0.7]))
        driver.forget()
        driver.reach([gradient, live], "gradient and residual", write=False)
        driver.reach([written], "written residual", write=True)
        sources = table.new_source_partials(CPU)
        found.launch(function, [gradient], table, PointerTable(), bucket, 2.0, sources, residuals=kept, draw=draw)
        made.append((bucket, written))
    codes = table.layout.scales_bytes
    for part in (slice(0, 2000), slice(codes - 500, codes + 40000), slice(table.layout.nbytes - 300_000, None)):
        found.same("encode", made[0][0][part], made[1][0][part])
    ends("residual", made[0][1], made[1][1])
    ours, theirs = (_room(NUMEL, torch.float32) for _ in range(2))
    driver.forget()
    driver.reach([ours], "gradient", write=True)
    found.launch(decode.decode, [ours], table, PointerTable(), made[0][0], torch.ones(1), None)
    reference_encoded.decode([theirs], table, PointerTable(), made[0][0], torch.ones(1), None)
    ends("decode", ours, theirs)
    assert bool(theirs[-100:].any())
    driver.races = True
    return {"values": found.compared.total(), "wrong": found.wrong}
