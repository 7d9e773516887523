"""What a step of one bucket launches, for scripts that pass it through Triton's launch path to a stand-in driver."""

from __future__ import annotations

from typing import Any

import torch
from triton.backends.compiler import GPUTarget

from fusedreduce.kernels import combine_encoded, decode, encode, pack, unpack, variants, walk
from fusedreduce.kernels import stats as stats_file
from fusedreduce.kernels.encoded_table import Residuals
from fusedreduce.kernels.encodings import INT8
from fusedreduce.kernels.table import ChunkTable, Partials, PointerTable, SourcePartials
from support.cuda.fake_driver import FakeDriver, activate, at_odd_address
from support.encoded_buckets import table_of

MIXED = (torch.float32, torch.bfloat16, torch.float16)


def as_on_sm_90() -> FakeDriver:
    """The stand-in driver, active, with CPU tensors taken for those of an sm_90."""
    variants.current_target = lambda device: ("cuda", 90)
    return activate(GPUTarget("cuda", 90, 32))


class Bucket:
    """Gradients of one bucket and everything a step passes to the kernels, each tensor at an odd address if asked."""

    def __init__(self, parameters: int, dtypes: tuple[torch.dtype, ...], wire: torch.dtype, *, odd: bool) -> None:
        place = at_odd_address if odd else torch.clone
        generator = torch.Generator().manual_seed(parameters)
        numels = torch.randint(0, 300, (parameters,), generator=generator).tolist()
        numels[0] = 20_000 + parameters  # several chunks
        kinds = [dtypes[slot % len(dtypes)] for slot in range(parameters)]
        self.gradients: list[torch.Tensor | None] = [
            place(torch.zeros(numel, dtype=kind)) for numel, kind in zip(numels, kinds, strict=True)
        ]
        offsets = [0, *torch.tensor(numels).cumsum(0).tolist()]
        self.chunks = ChunkTable(numels, offsets[:-1], kinds, offsets[-1] + 5)
        self.pointers = PointerTable()
        self.wire = place(torch.zeros(offsets[-1] + 5, dtype=wire))
        self.scalar = place(torch.ones(1, dtype=torch.float64 if torch.float64 in dtypes else torch.float32))
        cpu = torch.device("cpu")
        new, sources = self.chunks.new_partials(cpu), self.chunks.new_source_partials(cpu)
        self.partials = Partials(place(new.sums), place(new.peaks), place(new.first_non_finite))
        self.sources = SourcePartials(place(sources.first_non_finite), place(sources.flushed))
        self.spans = place(self.chunks.spans(cpu))

    def calls(self, *, stats: bool, divisor: float = 2.0) -> dict[str, tuple[Any, tuple[Any, ...]]]:
        """Everything that a step calls, with its arguments."""
        partials, sources = (self.partials, self.sources) if stats else (None, None)
        both = self.gradients, self.chunks, self.pointers
        calls: dict[str, tuple[Any, tuple[Any, ...]]] = {
            "pack": (pack.pack, (*both, self.wire, divisor, sources)),
            "unpack": (unpack.unpack, (*both, self.wire, self.scalar, partials)),
            "scale": (walk.scale, (*both, self.scalar)),
        }
        if stats:
            calls["measure"] = walk.measure, (*both, self.partials)
            calls["reduce"] = stats_file.reduce_partials, (self.partials, self.spans)
            calls["reduce_source"] = stats_file.reduce_source_partials, (self.sources, self.spans)
        return calls

    def expected_addresses(self, *, stats: bool) -> dict[str, list[int]]:
        """In the order of the kernels' signatures."""
        device = self.wire.device
        tables = [self.pointers.upload(self.gradients, device), self.chunks.on(device)]
        partials = list(vars(self.partials).values()) if stats else []
        sources = list(vars(self.sources).values()) if stats else []
        expected = {
            "pack": [*tables, self.wire, *sources],
            "unpack": [*tables, self.wire, self.scalar, *partials],
            "scale": [*tables, self.scalar],
        }
        if stats:
            expected["measure"] = [*tables, *partials]
        return {name: [tensor.data_ptr() for tensor in tensors] for name, tensors in expected.items()}


class EncodedBucket:
    """Gradients of one encoded bucket in three shards, and everything that encode, combine_encoded and decode take."""

    def __init__(self, parameters: int, *, options: bool, odd: bool) -> None:
        place = at_odd_address if odd else torch.clone
        numels = tuple(20_000 if slot == 0 else 7 * slot % 300 for slot in range(parameters))
        kinds = tuple(MIXED[slot % len(MIXED)] for slot in range(parameters))
        self.chunks = table_of(numels, INT8, 3, kinds)
        self.gradients = [place(torch.zeros(numel, dtype=kind)) for numel, kind in zip(numels, kinds, strict=True)]
        layout = self.chunks.layout
        self.bucket = torch.zeros(layout.nbytes, dtype=torch.uint8)
        self.shard = torch.zeros(layout.shard_bytes, dtype=torch.uint8)
        self.scale = place(torch.ones(1))
        self.partials = self.chunks.new_partials(torch.device("cpu")) if options else None
        self.sources = self.chunks.new_source_partials(torch.device("cpu")) if options else None
        kept = [[place(torch.zeros(numel)) for numel in numels] for _ in range(2)]
        whole = [[torch.zeros(layout.shard_numel)] for _ in range(2)]
        live, weights = place(torch.tensor([0])), place(torch.ones(2))
        draw = place(torch.tensor([1, 2, 3, 4]))
        self.extra: dict[str, Any] = {}
        self.of_shard: dict[str, Any] = {}
        if options:
            self.extra = {"residuals": Residuals((kept[0], kept[1]), live, weights), "draw": draw}
            self.of_shard = {"residuals": Residuals((whole[0], whole[1]), live, weights), "draw": draw}

    def launch(self, divisor: float, contributions: int) -> None:
        """All three, one after the other."""
        pointers, several = PointerTable(), self.bucket.repeat(contributions)
        encode.encode(self.gradients, self.chunks, pointers, self.bucket, divisor, self.sources, **self.extra)
        combine_encoded.combine_encoded(self.bucket, self.chunks, self.shard, **self.of_shard)
        decode.decode(self.gradients, self.chunks, pointers, several, self.scale, self.partials)
