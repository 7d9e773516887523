"""Every kernel's PTX in the emulator, through the product's own launchers, against its definition, bit for bit.

Each variant is launched by Triton first and from then on as a kept launch; outputs are poisoned, and between sentinels.
"""

from __future__ import annotations

import itertools
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch

from fusedreduce.comm.local.strategies import Centralized, Ring, Tree
from fusedreduce.kernels import combine as combine_file
from fusedreduce.kernels import combine_encoded, decode, encode, pack, reference, reference_encoded, stats, unpack, walk
from fusedreduce.kernels.division import division
from fusedreduce.kernels.encodings import ENCODINGS, Encoding
from fusedreduce.kernels.table import ChunkTable, Partials, PointerTable, SourcePartials
from fusedreduce.kernels.variants import TRANSFERS, Tuning, tuned
from support.buckets import Guarded, inner, poison
from support.emulator.cases import CPU, Bucket, EncodedBucket, bits_of, values
from support.emulator.driver import EmulatingDriver
from support.emulator.ptx import PtxError
from support.encoded_buckets import contributed, guarded_bytes

Options: TypeAlias = tuple[bool, bool, bool]  # with statistics, with residuals, rounded stochastically
# Beside those of the architectures: smaller and larger tiles, fewer and more warps, hints.
TUNINGS = (Tuning(tile_bytes=4096, num_warps=2, hint="read"), Tuning(tile_bytes=16384, num_warps=8, hint="both"))
# Pairs of options, which the table of variants leaves out.
PAIRS: tuple[Options, ...] = ((True, True, False), (True, False, True), (False, True, True))
SMALL = (1, 0, 700, 2048, 64, 257, 3, 1500, 513)
_SHOWN = 20


@dataclass
class Emulation:
    """What was run, and what was wrong.

    Args:
        driver: active.
    """

    driver: EmulatingDriver
    compared: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def launch(self, function: Callable[..., object], *given: Any, **options: Any) -> None:
        """One call of a launcher; what the emulator finds is noted."""
        try:
            function(*given, **options)
        except PtxError as error:
            self._note(str(error))

    def same(self, what: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
        """Bit for bit; any NaN is as good as another."""
        actual, expected = actual.reshape(-1), expected.reshape(-1)
        equal = bits_of(actual) == bits_of(expected)
        if actual.is_floating_point():
            equal |= actual.isnan() & expected.isnan()
        self.compared[self.driver.label] += equal.numel()
        if not equal.all():
            first = int((~equal).nonzero()[0, 0])
            found = f"{actual[first].item()!r} instead of {expected[first].item()!r}"
            self._note(f"{self.driver.label}: {what}: {int((~equal).sum())} differ, first at {first}: {found}")

    def near(self, what: str, actual: torch.Tensor, expected: torch.Tensor, rtol: float) -> None:
        """Sums of squares, whose order is the kernel's."""
        self.compared[self.driver.label] += actual.numel()
        if not torch.allclose(actual, expected, rtol=rtol, atol=0, equal_nan=True):
            self._note(f"{self.driver.label}: {what}: {actual.tolist()[:8]} instead of {expected.tolist()[:8]}")

    def all_same(self, what: str, ours: Sequence[Guarded | None], theirs: Sequence[Guarded | None]) -> None:
        """Of tensors between sentinels, which must be there still."""
        for one, other in zip(ours, theirs, strict=True):
            if one is not None and other is not None:
                self.same(what, one.inner, other.inner)
                try:
                    one.assert_edges_untouched()
                except AssertionError:
                    self._note(f"{self.driver.label}: {what}: sentinels were written")

    def sums(self, ours: Partials | None, theirs: Partials | None) -> None:
        """Statistics of what was written."""
        if ours is not None and theirs is not None:
            self.same("first", ours.first_non_finite, theirs.first_non_finite)
            self.same("peaks", ours.peaks, theirs.peaks)
            self.near("sums", ours.sums, theirs.sums, 1e-6)

    def sources(self, ours: SourcePartials | None, theirs: SourcePartials | None) -> None:
        """Statistics of what was read."""
        if ours is not None and theirs is not None:
            self.same("first", ours.first_non_finite, theirs.first_non_finite)
            self.same("flushed", ours.flushed, theirs.flushed)

    def _note(self, line: str) -> None:
        if len(self.wrong) < _SHOWN:
            self.wrong.append(line)

    # One call each of ours and of the definition's.

    def pack(self, bucket: Bucket, wire: torch.dtype, divisor: float, *, with_stats: bool) -> None:
        """Gradients to a wire."""
        chunks, gradients = bucket.chunks, bucket.gradients()
        ours, theirs = (Guarded.of(poison(chunks.wire_numel, wire), bucket.wire_shift) for _ in range(2))
        mine, others = (_poisoned(chunks.new_source_partials(CPU)) if with_stats else None for _ in range(2))
        self._reach(gradients, "gradient", write=False)
        given = inner(gradients), chunks, PointerTable()
        self.launch(pack.pack, *given, ours.inner, divisor, mine)
        reference.pack(*given, theirs.inner, divisor, others)
        self.all_same("wire", [ours], [theirs])
        self.sources(mine, others)

    def unpack(self, bucket: Bucket, wire: Guarded, scalar: float, *, with_stats: bool) -> None:
        """A wire to gradients."""
        chunks, scale = bucket.chunks, torch.tensor([scalar], dtype=bucket.compute)
        ours, theirs = (bucket.gradients(poisoned=True) for _ in range(2))
        mine, others = (_poisoned(chunks.new_partials(CPU)) if with_stats else None for _ in range(2))
        self._reach(ours, "gradient", write=True)
        self.launch(unpack.unpack, inner(ours), chunks, PointerTable(), wire.inner, scale, mine)
        reference.unpack(inner(theirs), chunks, PointerTable(), wire.inner, scale, others)
        self.all_same("gradient", ours, theirs)
        self.same("wire is as it was", wire.outer, wire.before)
        self.sums(mine, others)

    def measure(self, bucket: Bucket) -> None:
        """Gradients as they are."""
        gradients, chunks = bucket.gradients(), bucket.chunks
        ours, theirs = (_poisoned(chunks.new_partials(CPU)) for _ in range(2))
        self._reach(gradients, "gradient", write=False)
        self.launch(walk.measure, inner(gradients), chunks, PointerTable(), ours)
        reference.measure(inner(gradients), chunks, PointerTable(), theirs)
        self.sums(ours, theirs)

    def scale(self, bucket: Bucket, scalar: float) -> None:
        """Gradients multiplied in place."""
        factor = torch.tensor([scalar], dtype=bucket.compute)
        ours, theirs = bucket.gradients(), bucket.gradients()
        self._reach(ours, "gradient", write=True)
        self.launch(walk.scale, inner(ours), bucket.chunks, PointerTable(), factor)
        reference.scale(inner(theirs), bucket.chunks, PointerTable(), factor)
        self.all_same("scaled", ours, theirs)

    def combine(
        self,
        seed: int,
        numel: int,
        dtype: torch.dtype,
        shifts: Sequence[int],
        strategy: Any,
        into: torch.dtype | None = None,
    ) -> None:
        """Tensors that lie so many elements off a boundary, added up; now and then, or as `into`, into another one."""
        tensors = [
            Guarded.of(values(numel, dtype, seed * 10 + nth, wild=seed % 2 == 0), shift)
            for nth, shift in enumerate(shifts)
        ]
        separate = into is not None or seed % 3 == 0
        outputs = [Guarded.of(poison(numel, into or dtype), shifts[0])] if separate else tensors
        scale, parts = (1.0, 1 / 3, 0.5)[seed % 3], strategy.parts(len(shifts), numel)
        wanted = torch.empty(numel, dtype=into or dtype)
        reference.combine([one.inner.clone() for one in tensors], [wanted], parts, scale)
        self._reach(tensors, "tensor", write=not separate)
        self.driver.reach(inner(outputs), "output", write=True)
        read, written = [one.inner for one in tensors], [one.inner for one in outputs]
        self.launch(combine_file.combine, read, written, parts, scale)
        self.all_same("sum", outputs, [Guarded.of(wanted)] * len(outputs))
        if separate and numel > 64:
            begins = (numel - 33, 5)
            # Every second time the second piece lies as the tensors do, but its elements do not.
            apart = 5 * (seed // 2 % 2)
            pieces = [
                Guarded.of(poison(size, into or dtype), shifts[0] + more)
                for size, more in ((32, 0), (numel - 40, apart))
            ]
            self.driver.reach(inner(pieces), "output of a piece", write=True)
            self.launch(combine_file.combine, read, [one.inner for one in pieces], parts, scale, begins=begins)
            found = [wanted[begin : begin + one.inner.numel()] for begin, one in zip(begins, pieces, strict=True)]
            self.all_same("piece", pieces, [Guarded.of(one) for one in found])
        if separate:
            for one in tensors:
                self.same("read alone", one.outer, one.before)

    def encode(self, bucket: EncodedBucket, divisor: float, options: Options) -> None:
        """Gradients to encoded bytes, with statistics, residuals and random bits."""
        with_stats, feedback, stochastic = options
        chunks, gradients = bucket.chunks, bucket.gradients()
        found = []
        for function in (encode.encode, reference_encoded.encode):
            into = guarded_bytes(chunks.layout.nbytes)
            kept, written = bucket.residuals() if feedback else (None, [])
            partials = _poisoned(chunks.new_source_partials(CPU)) if with_stats else None
            self._reach(gradients, "gradient", write=False)
            self._reach_residuals(kept)
            given = inner(gradients), chunks, PointerTable(), into.inner, divisor, partials
            self.launch(function, *given, residuals=kept, draw=bucket.draw if stochastic else None)
            found.append((into, written, partials))
        (ours, mine, one), (theirs, others, other) = found
        self.all_same("bytes", [ours], [theirs])
        self.all_same("residual", mine, others)
        self.sources(one, other)

    def combine_encoded(self, bucket: EncodedBucket, contributions: int, options: tuple[bool, bool]) -> None:
        """Contributions to one shard, added up and encoded again."""
        feedback, stochastic = options
        layout = bucket.chunks.layout
        shards = contributed(bucket.gradients(), bucket.chunks, contributions).view(-1, layout.shard_bytes)
        received = shards[:: layout.shards].contiguous().view(-1)
        found = []
        for function in (combine_encoded.combine_encoded, reference_encoded.combine_encoded):
            into = guarded_bytes(layout.shard_bytes)
            kept, written = bucket.residuals(of_shard=True) if feedback else (None, [])
            self.driver.forget()
            self._reach_residuals(kept)
            drawn = bucket.draw if stochastic else None
            self.launch(function, received, bucket.chunks, into.inner, residuals=kept, draw=drawn)
            found.append((into, written))
        (ours, mine), (theirs, others) = found
        self.all_same("sum", [ours], [theirs])
        self.all_same("residual of the sum", mine, others)

    def decode(self, bucket: EncodedBucket, contributions: int, *, with_stats: bool) -> None:
        """Buckets, added up, to gradients."""
        chunks = bucket.chunks
        encoded = contributed(bucket.gradients(), chunks, contributions)
        ours, theirs = (bucket.gradients(poisoned=True) for _ in range(2))
        mine, others = (_poisoned(chunks.new_partials(CPU)) if with_stats else None for _ in range(2))
        self._reach(ours, "gradient", write=True)
        self.launch(decode.decode, inner(ours), chunks, PointerTable(), encoded, bucket.scale, mine)
        reference_encoded.decode(inner(theirs), chunks, PointerTable(), encoded, bucket.scale, others)
        self.all_same("decoded", ours, theirs)
        self.sums(mine, others)

    def _reach(self, tensors: Iterable[Guarded | None], name: str, *, write: bool) -> None:
        self.driver.forget()
        self.driver.reach(inner(tensors), name, write=write)

    def _reach_residuals(self, kept: Any) -> None:
        if kept is not None:
            self.driver.reach(kept.copies[1], "live residual", write=False)
            self.driver.reach(kept.copies[0], "written residual", write=True)


def _poisoned(partials: Any) -> Any:
    for one in vars(partials).values():
        one.fill_(-77)
    return partials


# Parts, each of which launches its variants twice at least.


def run_pack(found: Emulation) -> None:
    """All that pack can launch, and a buffer packed in place, as a comm hook does."""
    for seed, ((wire, fp64, with_stats), exact) in enumerate(itertools.product(TRANSFERS, (True, False)), 1):
        bucket = Bucket(seed, fp64=fp64)
        rare = (1.0, 1024.0, 2.0**-20) if exact else (7.0, *((2.0**1023, 1e-310) if fp64 else (2.0**127, 1e-40)))
        for divisor in (2.0 if exact else 3.0, rare[seed % 3]):
            assert division(divisor, bucket.compute).exact == exact
            found.pack(bucket, wire, divisor, with_stats=with_stats)
    for divisor, with_stats in itertools.product((2.0, 3.0), (False, True)):
        buffer = values(20000, torch.float32, 5, wild=True)
        chunks = ChunkTable([9000, 1, 10999], [0, 9000, 9001], [torch.float32] * 3, 20000, begins=[0, 9000, 9001])
        into = Guarded.of(buffer, 1)
        partials = chunks.new_source_partials(CPU) if with_stats else None
        found.driver.forget()
        found.launch(pack.pack, [into.inner] * 3, chunks, PointerTable(), into.inner, divisor, partials)
        found.all_same("in place", [into], [Guarded.of(buffer / torch.tensor(divisor))])


def run_unpack(found: Emulation) -> None:
    """All that unpack can launch."""
    for seed, (wire, fp64, with_stats) in enumerate(TRANSFERS, 1001):
        bucket = Bucket(seed, fp64=fp64)
        given = bucket.wire(wire)
        rare = (3.0, 2.0**-16, 2.0**-130, float("nan"), 2.0**40)[seed % 5]
        for scalar in (1.0, 1 / 3, rare) if with_stats else (1 / 3, rare):
            found.unpack(bucket, given, scalar, with_stats=with_stats)


def run_walk(found: Emulation) -> None:
    """Measure and scale."""
    for fp64, seed in itertools.product((False, True), (2001, 2002, 2003)):
        bucket = Bucket(seed, fp64=fp64)
        found.measure(bucket)
        found.scale(bucket, (1 / 3, 2.0**-130, 2.0**30)[seed % 3])


def run_combine(found: Emulation) -> None:
    """Sums in the orders of all strategies, of tensors that are aligned together or are not."""
    orders = ((Centralized(), 1), (Ring(), 3), (Tree(2), 7), (Tree(1), 5), (Ring(), 8), (Tree(3), 9), (Tree(2), 9))
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    for seed, (dtype, (strategy, peers), together) in enumerate(itertools.product(dtypes, orders, (True, False)), 3001):
        draw = np.random.default_rng(seed)
        numel = (5000, 9001, 513, 65, 3, 6001, 1)[seed // 2 % 7]
        shifts = [3] * peers if together else [int(draw.integers(0, 8)) for _ in range(peers)]
        found.combine(seed, numel, dtype, shifts, strategy)
        if dtype.itemsize == 2 and not isinstance(strategy, Tree):
            for into in dtypes:
                if into is not dtype:
                    found.combine(seed, numel, dtype, shifts, strategy, into)


# (gradients are fp64, by product, options) that `run_encode` runs with each encoding: those of the table of variants,
# and pairs of options.
ENCODES: tuple[tuple[bool, bool, Options], ...] = (
    *((False, True, options) for options in (*encode.OPTIONS, *PAIRS)),
    (False, False, encode.OPTIONS[-1]),
    (True, True, encode.OPTIONS[0]),
    (True, False, encode.OPTIONS[-1]),
    (True, True, PAIRS[0]),
)


def run_encode(found: Emulation) -> None:
    """What encode is most often launched with."""
    for encoding, (seed, choice) in itertools.product(ENCODINGS.values(), enumerate(ENCODES, 4001)):
        _encode(found, seed, encoding, *choice)


def run_options(found: Emulation) -> None:
    """All the rest that encode can launch."""
    either = (False, True)
    every = itertools.product(either, either, itertools.product(either, either, either))
    rest = [choice for choice in every if choice not in ENCODES]
    for encoding, (seed, choice) in itertools.product(ENCODINGS.values(), enumerate(rest, 4101)):
        _encode(found, seed, encoding, *choice)


def _encode(found: Emulation, seed: int, encoding: Encoding, fp64: bool, exact: bool, options: Options) -> None:
    for turn in range(2):
        found.encode(EncodedBucket(seed + 500 * turn, encoding, fp64=fp64), 2.0 if exact else 3.0, options)


def run_combine_encoded(found: Emulation) -> None:
    """All that combine_encoded can launch."""
    every = itertools.product(ENCODINGS.values(), (False, True), (False, True))
    for seed, (encoding, feedback, stochastic) in enumerate(every, 5001):
        for contributions in (3, 1):
            bucket = EncodedBucket(seed + contributions, encoding, fp64=False)
            found.combine_encoded(bucket, contributions, (feedback, stochastic))


def run_decode(found: Emulation) -> None:
    """All that decode can launch, of one bucket and of several."""
    for seed, (encoding, fp64, with_stats) in enumerate(
        itertools.product(ENCODINGS.values(), (False, True), (False, True)), 6001
    ):
        for contributions in (3, 1):
            bucket = EncodedBucket(seed + contributions, encoding, fp64=fp64)
            found.decode(bucket, contributions, with_stats=with_stats)


def run_stats(found: Emulation) -> None:
    """The second stage, of parameters with no partials, one and many, and of more of them than a block holds."""
    for seed in (1, 2):
        _stats(found, seed, [0, 1, 2, 1500, 3, 1024, 1025, 1, 2049] + [1] * 1200)


def _stats(found: Emulation, seed: int, sizes: Sequence[int]) -> None:
    draw = np.random.default_rng(seed)
    ends = np.cumsum([0, *sizes])
    pairs = np.stack([ends[:-1], ends[1:]], 1).reshape(-1)
    spans, rows = torch.tensor([len(sizes), *pairs.tolist()], dtype=torch.int64), int(ends[-1])
    sums = torch.from_numpy(draw.random(rows) * 2.0 ** draw.integers(-200, 200, rows))
    peaks, first = sums.sqrt(), torch.from_numpy(np.where(draw.random(rows) < 0.02, draw.integers(0, 2**40, rows), -1))
    if seed == 2:
        peaks[torch.from_numpy(draw.random(rows) < 0.01)] = float("nan")
        sums[7], peaks[9] = float("inf"), float("inf")
    found.driver.forget()
    partials = Partials(sums, peaks, first)
    ours, theirs = stats.reduce_partials(partials, spans), reference.reduce_partials(partials, spans)
    found.same("first", ours.first_non_finite, theirs.first_non_finite)
    found.same("peaks", ours.parameter_peaks, theirs.parameter_peaks)
    found.same("total", ours.total[1:], theirs.total[1:])
    found.near("sums", ours.parameter_sums, theirs.parameter_sums, 1e-12)
    found.near("total sum", ours.total[:1], theirs.total[:1], 1e-12)
    flushed = torch.from_numpy(draw.integers(0, 2**36, rows))
    for given in (first, torch.full_like(first, -1)):
        sources = SourcePartials(given, flushed)
        one, other = stats.reduce_source_partials(sources, spans), reference.reduce_source_partials(sources, spans)
        found.same("first", one.first_non_finite, other.first_non_finite)
        found.same("flushed", one.flushed, other.flushed)
        found.same("lowest", one.first, other.first)


def run_tunings(found: Emulation) -> None:
    """Other launch shapes than the architectures': bench_kernels.py --tuning may find a better one."""
    for tuning, encoding in zip(TUNINGS, ENCODINGS.values(), strict=True):
        found.driver.prefix = f"{tuning.tile_bytes} x {tuning.num_warps} warps, "
        with tuned(tuning):
            for seed in (7001, 7002):
                flat, encoded = Bucket(seed, fp64=False, numels=SMALL), EncodedBucket(seed, encoding, fp64=False)
                found.pack(flat, torch.bfloat16, 3.0, with_stats=True)
                found.unpack(flat, flat.wire(torch.float16), 1 / 3, with_stats=True)
                found.measure(flat)
                found.scale(flat, 1 / 3)
                found.combine(seed, 5001, torch.bfloat16, [seed % 2, 1, 1], Ring())
                found.encode(encoded, 3.0, (True, True, True))
                found.combine_encoded(encoded, 3, (True, False))
                found.decode(encoded, 2, with_stats=True)
    found.driver.prefix = ""


PARTS: Mapping[str, Callable[[Emulation], None]] = {
    "pack": run_pack,
    "unpack": run_unpack,
    "walk": run_walk,
    "combine": run_combine,
    "encode": run_encode,
    "combine_encoded": run_combine_encoded,
    "decode": run_decode,
    "stats": run_stats,
    "tunings": run_tunings,
    "options": run_options,
}


def run_part(name: str, driver: EmulatingDriver) -> dict[str, Any]:
    """Runs one part, and tells what it was.

    Args:
        name: of PARTS.
        driver: active.

    Returns:
        how often each kernel was launched, and by a kept launch; how many Triton's C has packed; values
        compared, instructions run and there, seconds, and what was wrong.
    """
    for counted in (driver.by_label, driver.launched, driver.kept):
        counted.clear()
    found, begun_s, packed = Emulation(driver), time.process_time(), driver.packed_in_c
    try:
        PARTS[name](found)
    except PtxError as error:  # of a launch that `stats` makes
        found.wrong.append(str(error))
    executed = [kernel.coverage() for kernel in driver.by_label.values()]
    return {
        "launched": dict(driver.launched),
        "kept": dict(driver.kept),
        "packed in C": driver.packed_in_c - packed,
        "values": found.compared.total(),
        "executed": sum(ran for ran, _ in executed),
        "instructions": sum(whole for _, whole in executed),
        "wrong": found.wrong,
        "cpu_s": time.process_time() - begun_s,
    }


def _small() -> Bucket:
    return Bucket(1007, fp64=False, numels=SMALL)


def _encoded(name: str) -> EncodedBucket:
    return EncodedBucket(1007, ENCODINGS[name], fp64=False)


# Launches of kernels whose threads exchange values, to take barriers out of.
WITH_BARRIERS: Mapping[str, Callable[[Emulation], None]] = {
    "unpack": lambda found: found.unpack(_small(), _small().wire(torch.float32), 1.0, with_stats=True),
    "pack": lambda found: found.pack(_small(), torch.float16, 2.0, with_stats=True),
    "measure": lambda found: found.measure(_small()),
    "encode": lambda found: found.encode(_encoded("int8"), 2.0, (True, False, False)),
    "decode": lambda found: found.decode(_encoded("int4"), 2, with_stats=True),
    "stats": lambda found: _stats(found, 1, [0, 1, 1500, 3, 1025, 1]),
}


def without_barriers(name: str, driver: EmulatingDriver) -> dict[str, Any]:
    """Takes barriers out of compiled code, one at a time.

    Args:
        name: of WITH_BARRIERS.
        driver: active.

    Returns:
        of each kernel how many there are, and those without which nothing is found.
    """
    there: dict[str, int] = {}
    missed: dict[str, list[int]] = {}

    def edited(text: str) -> str:
        label, barriers = driver.label, list(re.finditer(r"bar\.sync\s+0;", text))
        there[label] = len(barriers)
        if label == target and nth < len(barriers):
            text = text[: barriers[nth].start()] + text[barriers[nth].end() :]
        return text

    def wrong() -> list[str]:
        driver.kernels.clear()
        found = Emulation(driver)
        try:
            WITH_BARRIERS[name](found)
        except PtxError as error:
            found.wrong.append(str(error))
        return found.wrong

    target, nth, driver.edit = "", 0, edited
    assert not wrong()
    for target, nth in [(label, nth) for label, number in there.items() for nth in range(number)]:
        if not any("race" in line or "never written" in line for line in wrong()):
            missed.setdefault(target, []).append(nth)
    driver.edit = None
    driver.kernels.clear()
    return {"there": there, "missed": missed}
