"""Encoded buckets as kernels: encode, decode and combine, in ns per element, beside a copy of the same elements.

    python perf/bench_encoded.py                # the GPU if there is one, else CPU; a JSON in perf/results
    python perf/bench_encoded.py --rehearse --out out/encoded

A call encodes (decodes, combines) one bucket of fp32 gradients; `copy` is `copy_` of as many fp32 elements. Sets of
buffers take turns, so that none is in the cache. `again` is encode and decode once more: how the two differ is the
noise. `pack + unpack, bf16` is what a wire of 16 bits costs: docs/wires.md has from it when a smaller one pays. How is
timed: timing.py. What was decoded is compared with the definition first, bit for bit.

What is demanded, on CPU with one thread: encode and decode in at most 1.5 ns (int8) and 2.5 ns (int4) per element, of
tensors of 65,536 elements and more.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence
from typing import Any

import kernel_cases
import records
import report_tables
import timing
import torch
from records import BenchError, demand
from report_wires import BF16, BOTH

from fusedreduce.kernels import dispatch, encoded, reference_encoded
from fusedreduce.kernels.encoded_table import EncodedTable
from fusedreduce.kernels.encodings import ENCODINGS, Encoding
from fusedreduce.kernels.table import ChunkTable, PointerTable
from fusedreduce.planning.layout import aligned_layout, block_layout

MOST_NS = {"int8": 1.5, "int4": 2.5}
LISTS = ((1, 6_553_600), (100, 65_536), (6553, 1000))  # tensors, elements of each
REHEARSED_LISTS = ((3, 5000),)
SHARDS = 2  # of a bucket, and contributions that are combined
ROUNDS, REHEARSED_ROUNDS = 11, 3
LARGE_NUMEL = 65536
AGAIN, COPY = "again", "copy"


class Bucket:
    """One set of buffers: gradients, what they are encoded to, and what is decoded."""

    def __init__(self, numels: Sequence[int], encoding: Encoding, device: torch.device, seed: int) -> None:
        layout = block_layout(numels, block_numel=encoding.block_numel, shard_align=encoding.shard_align, shards=SHARDS)
        kinds = [torch.float32] * len(numels)
        shapes = [((numel,), (1,)) for numel in numels]
        self.table = EncodedTable(layout.numels, layout.offsets, kinds, layout.numel, encoding, SHARDS, shapes=shapes)
        generator = torch.Generator(device).manual_seed(seed)
        self.source = torch.randn(sum(numels), generator=generator, device=device)
        self.gradients = self.source.split(list(numels))
        self.result = torch.empty_like(self.source)
        self.results = self.result.split(list(numels))
        self.sent, self.received = PointerTable(), PointerTable()
        nbytes = self.table.layout.nbytes
        self.encoded = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.shard = torch.empty(nbytes // SHARDS, dtype=torch.uint8, device=device)
        self.one = torch.ones(1, device=device)
        plain = aligned_layout(numels, wire_itemsize_bytes=2)
        self.chunks = ChunkTable(plain.numels, plain.offsets, kinds, plain.numel, shapes=shapes)
        self.wire = torch.empty(plain.numel, dtype=torch.bfloat16, device=device)
        self.packed, self.unpacked = PointerTable(), PointerTable()
        self.plain, self.blocks = (one.unchecked(device, (torch.float32,)) for one in (dispatch, encoded))

    def encode(self) -> None:
        """As a reducer would: the arguments are known to be right."""
        self.blocks.encode(self.gradients, self.table, self.sent, self.encoded, 2.0)

    def decode(self) -> None:
        """Into other gradients than were encoded."""
        self.blocks.decode(self.results, self.table, self.received, self.encoded, self.one)

    def both(self) -> None:
        """One after the other."""
        self.encode()
        self.decode()

    def bf16(self) -> None:
        """The same to and from 16 bits."""
        self.plain.pack(self.gradients, self.chunks, self.packed, self.wire, 2.0)
        self.plain.unpack(self.results, self.chunks, self.unpacked, self.wire, self.one)

    def combine(self) -> None:
        """The shards of this bucket, as if they were contributions to one."""
        self.blocks.combine_encoded(self.encoded, self.table, self.shard)

    def copy(self) -> None:
        """The limit."""
        self.result.copy_(self.source)

    def check(self) -> None:
        """Raises BenchError unless what was decoded is right."""
        bucket, wanted = torch.empty_like(self.encoded), torch.empty_like(self.result)
        reference_encoded.encode(self.gradients, self.table, PointerTable(), bucket, 2.0)
        pieces = wanted.split([one.numel() for one in self.results])
        reference_encoded.decode(pieces, self.table, PointerTable(), bucket, self.one)
        if not torch.equal(self.result, wanted):
            raise BenchError("what was decoded is not what the definition decodes")


def measure_row(count: int, numel: int, encoding: Encoding, device: torch.device, *, rounds: int) -> dict[str, Any]:
    """One list of so many tensors.

    Raises:
        BenchError: what was decoded is wrong.
    """
    elements = count * numel
    sets = max(1, min(timing.MOST_SETS, -(-timing.CACHES * timing.cache_bytes(device) // (8 * elements))))
    buckets = [Bucket([numel] * count, encoding, device, seed) for seed in range(sets)]
    calls: dict[str, list[timing.Call]] = {
        BOTH: [one.both for one in buckets],
        AGAIN: [one.both for one in buckets],
        "encode": [one.encode for one in buckets],
        "decode": [one.decode for one in buckets],
        f"combine {SHARDS}": [one.combine for one in buckets],
        BF16: [one.bf16 for one in buckets],
        COPY: [one.copy for one in buckets],
    }
    check = timing.Check(poison=functools.partial(buckets[0].result.fill_, -9.0), check=buckets[0].check)
    times = timing.measure(calls, device, rounds=rounds, checks={BOTH: check})
    found = {}
    for name, seconds in times.items():
        worked = elements // SHARDS if name.startswith("combine") else elements
        found[name] = {
            **records.spread([one / worked for one in seconds], "ns"),
            "ratio": statistics.median(mine / copy for mine, copy in zip(seconds, times[COPY], strict=True)),
        }
    return {
        "part": "encoded",
        "case": f"{encoding.name}, {count}x{numel}",
        "encoding": encoding.name,
        "numel": numel,
        "elements": elements,
        "shards": SHARDS,
        "sets": sets,
        "variants": found,
    }


def demands(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is demanded of rows of a CPU."""
    return [
        demand(
            row["case"] + ": encode + decode", row["variants"][BOTH]["ns"], "<=", MOST_NS[row["encoding"]], unit=" ns"
        )
        for row in rows
        if row["numel"] >= LARGE_NUMEL
    ]


def main() -> int:
    """Measures, prints the table, writes one JSON."""
    parser = records.Parser(description=__doc__)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_record()
    asked = parser.parse_args()
    device = records.pick_device(asked.device)
    kernel_cases.prove_path(device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    lists, rounds = (REHEARSED_LISTS, REHEARSED_ROUNDS) if asked.rehearse else (LISTS, ROUNDS)
    rows = [
        measure_row(count, numel, encoding, device, rounds=rounds)
        for encoding in ENCODINGS.values()
        for count, numel in lists
    ]
    judged = demands(rows) if device.type == "cpu" else []
    return report_tables.publish(asked, "encoded", device, rows=rows, demands=judged, rounds=rounds)


if __name__ == "__main__":
    records.entry(main)
