"""What copies cost on each wire: measured here, or of a recorded run scaled to other wires than its own.

What packing and unpacking took in a recorded run is multiplied by what a wire's kernels take per element, divided by
what those of the recorded wire take. That ratio is measured here, on the device type of the trace; where there is none,
it is that of the bytes of memory that the kernels read and write, at a copy's rate. The costs per bucket (Python, a
launch) stay as recorded.

Example, fp32 gradients recorded at bf16, where packing and unpacking took 0.1 ns per byte each: 0.4 ns per element. If
the casts to and from bf16 take 1 ns here, and to encode and decode int8 3 and 2, those count as 1.2 and 0.8 ns.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeAlias

import torch

from ..config import Wire
from ..kernels import cpu, cpu_encoded, dispatch, encoded
from ..kernels.encoded_table import EncodedTable
from ..kernels.encodings import ENCODINGS
from ..kernels.table import ChunkTable, PointerTable
from ..planning.cost_model import Costs, Linear, fit_copy
from ..planning.layout import aligned_layout, block_layout
from ..wires import PLAIN_WIRES, WIRES, encoding_of, wire_dtype
from .reader import RankTrace

# So many that caches do not decide, as gradients of a whole model are in none, nor launches on a GPU.
_NUMELS = {"cpu": 2**22, "cuda": 2**25}
_CALLS = {"cpu": 1, "cuda": 8}
_ROUNDS, _QUICK_ROUNDS = 11, 5
_SMALL_NUMEL = 2**16
# Less of the rate of packing than that no copy takes: the wire was the gradients themselves, and nothing was unpacked.
_LEAST_UNPACKING = 1 / 3
_LEAST_NUMEL = 1024
# Kernels that encode move bytes of memory at 0.73 to 0.80 of a copy's rate. Measured on an H100, beside a copy of as
# many fp32 elements: encoding takes 0.81 of it at int8 and 0.77 at int4, decoding 0.78 and 0.73.
_ENCODED_RATE_SHARE = 0.77
# Combining takes 1 + 1/W of what it does per contribution: more shards would change that by less than noise.
_MOST_SHARDS = 8
_DTYPES = {str(one).removeprefix("torch."): one for one in (torch.float64, torch.bfloat16, torch.float16)}
_Call: TypeAlias = Callable[[], object]


@dataclass(frozen=True)
class Kernels:
    """What the kernels of one wire take per element of a gradient: ns, or bytes of memory.

    Args:
        pack: to pack, or to encode.
        unpack: to unpack, or to decode as many contributions as every rank gets.
        combine: on three and more ranks, to add up the contributions to this rank's shard, per element of the bucket.
    """

    pack: float
    unpack: float
    combine: float = 0.0


_STAGES = tuple(field.name for field in dataclasses.fields(Kernels))


@dataclass(frozen=True)
class KernelTable:
    """The kernels of every wire.

    Args:
        by_wire: what they take.
        source: where that is from, as the end of a sentence.
    """

    by_wire: Mapping[Wire, Kernels]
    source: str

    def of(self, trace: RankTrace) -> Kernels:
        """What an average element of the run takes; parameters may have different wires."""
        rows = [(one.numel, self.by_wire[one.wire]) for one in trace.parameters if not one.alone]
        rows = rows or [(1, self.by_wire["native"])]
        numel = max(sum(count for count, _ in rows), 1)
        return Kernels(*(sum(count * getattr(one, name) for count, one in rows) / numel for name in _STAGES))


def seconds(device: torch.device, function: _Call) -> float:
    """Time of `function` in seconds; on CUDA until the device has finished."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    synchronize()
    began = time.perf_counter()
    function()
    synchronize()
    return time.perf_counter() - began


def kernel_table(trace: RankTrace) -> KernelTable:
    """Measures the kernels of every wire, for gradients like those of a trace; else counts the bytes that they move."""
    dtype = _dtype(trace)
    if trace.device != "cpu" and not (trace.device == "cuda" and torch.cuda.is_available()):
        return _counted(trace, dtype, f"there is no {trace.device} device here")
    numel = _NUMELS[trace.device]
    dense = [one.numel for one in trace.parameters if not one.alone] or [numel]
    # DDP's buckets are flat.
    mean = numel if trace.source == "hook" else min(max(sum(dense) // len(dense), _LEAST_NUMEL), numel)
    device = torch.device(trace.device)
    try:
        found = measured(device, dtype, [mean] * (numel // mean), trace.ranks)
    except (RuntimeError, dispatch.UnsupportedPairError) as error:
        return _counted(trace, dtype, f"the kernels do not run here: {type(error).__name__}")
    shown = ", ".join(f"{wire} {_sum(one):.3g}" for wire, one in found.items())
    where = "one thread" if trace.device == "cpu" else torch.cuda.get_device_name(device)
    return KernelTable(found, f"measured here on {where}, in ns per {_name(dtype)} element: {shown}.")


def kernel_tables(trace: RankTrace) -> Callable[[int], KernelTable]:
    """`kernel_table` by number of ranks, measured once for all numbers between which combining hardly differs."""

    @functools.cache
    def of(ranks: int) -> KernelTable:
        return kernel_table(dataclasses.replace(trace, ranks=ranks))

    return lambda ranks: of(min(ranks, _MOST_SHARDS))


def counted(dtype: torch.dtype, ranks: int) -> dict[Wire, Kernels]:
    """Bytes of memory that each wire's kernels read and write per element of gradients of a dtype."""
    own = dtype.itemsize
    found: dict[Wire, Kernels] = {}
    for wire in WIRES:
        sent = sent_bytes(wire, dtype)
        if wire in PLAIN_WIRES:
            found[wire] = Kernels(own + sent, sent + own)
        elif ranks <= 2:
            found[wire] = Kernels(own + sent, ranks * sent + own)
        else:
            found[wire] = Kernels(own + sent, sent + own, sent + sent / ranks)
    return found


def paced(moved: Mapping[Wire, Kernels]) -> dict[Wire, Kernels]:
    """Bytes that a copy would move in the time in which these kernels move theirs, from `counted`."""
    shares = {wire: _ENCODED_RATE_SHARE if wire in ENCODINGS else 1.0 for wire in moved}
    return {
        wire: Kernels(took.pack / shares[wire], took.unpack / shares[wire], took.combine / shares[wire])
        for wire, took in moved.items()
    }


def measured(
    device: torch.device,
    dtype: torch.dtype,
    numels: Sequence[int],
    ranks: int,
    *,
    rounds: int = _ROUNDS,
    alone: bool = True,
    timer: Callable[[torch.device, _Call], float] = seconds,
) -> dict[Wire, Kernels]:
    """Measures each wire's kernels on one bucket, in turns; on CPU on one thread, as torchrun starts ranks.

    Args:
        device: where.
        dtype: of the gradients.
        numels: of the gradients.
        ranks: how many would exchange them.
        rounds: of which the lower quartile counts: what else the machine does makes some of them longer.
        alone: on CPU on one thread; False: on as many as the process has.
        timer: gives the seconds that a call takes.

    Returns:
        What the kernels take, in ns per element.
    """
    calls = _CALLS[device.type]
    with _alone(device) if alone or device.type == "cuda" else nullcontext():
        stages = _stages(device, dtype, numels, ranks)
        for stage in stages.values():
            stage()  # compiles, and reads the gradients once
        times: dict[tuple[Wire, str], list[float]] = {key: [] for key in stages}
        for _ in range(rounds):
            for key, stage in stages.items():
                times[key].append(timer(device, functools.partial(_repeat, stage, calls)))
    elements = sum(numels) * calls
    found: dict[Wire, dict[str, float]] = {}
    for (wire, name), taken in times.items():
        found.setdefault(wire, {"unpack": 0.0})[name] = 1e9 * sorted(taken)[rounds // 4] / elements
    return {wire: Kernels(**by_stage) for wire, by_stage in found.items()}


def copy_costs(device: torch.device, ranks: int) -> dict[Wire, tuple[Linear, Linear]]:
    """Measures packing and unpacking of fp32 gradients on this device; else counts bytes, at the rate of its copies.

    Args:
        device: where.
        ranks: how many exchange them.

    Returns:
        By wire, their costs by bytes on the wire; unpacking includes what combining takes.
    """
    sizes = (_SMALL_NUMEL, _NUMELS[device.type])
    try:
        rows = [(numel, measured(device, torch.float32, [numel], ranks, rounds=_QUICK_ROUNDS)) for numel in sizes]
    except (RuntimeError, dispatch.UnsupportedPairError):  # as `kernel_table`
        rows = [(numel, _at_a_copys_rate(device, numel, ranks)) for numel in sizes]
    samples: dict[Wire, tuple[list[tuple[int, int]], list[tuple[int, int]]]] = {}
    for numel, found in rows:
        for wire, took in found.items():
            size_bytes = round(numel * sent_bytes(wire, torch.float32))
            packs, unpacks = samples.setdefault(wire, ([], []))
            packs.append((size_bytes, round(numel * took.pack)))
            unpacks.append((size_bytes, round(numel * (took.unpack + took.combine))))
    return {wire: (fit_copy(packs), fit_copy(unpacks)) for wire, (packs, unpacks) in samples.items()}


def _at_a_copys_rate(device: torch.device, numel: int, ranks: int) -> dict[Wire, Kernels]:
    """What kernels take, in ns per element, that move their bytes as quickly as a copy of so many elements does."""
    source = torch.zeros(numel, dtype=torch.float32, device=device)
    copy = functools.partial(torch.empty_like(source).copy_, source)
    copy()
    pace = 1e9 * statistics.median(seconds(device, copy) for _ in range(_QUICK_ROUNDS)) / (2 * source.nbytes)
    moved = paced(counted(torch.float32, ranks))
    return {wire: Kernels(pace * took.pack, pace * took.unpack, pace * took.combine) for wire, took in moved.items()}


def sent_bytes(wire: Wire, dtype: torch.dtype) -> float:
    """Bytes on the wire of an element of a gradient, without padding."""
    encoding = encoding_of(wire)
    return encoding.block_bytes / encoding.block_numel if encoding else (wire_dtype(wire) or dtype).itemsize


def on_other_wire(
    costs: Costs, before: tuple[int, Kernels], after: tuple[int, Kernels], *, phases: int, combined: bool
) -> Costs:
    """The costs of a run on another wire.

    Args:
        costs: of the recorded run, whose link is that of one phase.
        before: bytes of the recorded run on its wire, and what its kernels take.
        after: those of the other wire.
        phases: how many collectives a bucket takes, each with a latency of its own.
        combined: unpacking includes what combining takes; False: the link does.
    """
    (bytes_before, ours), (bytes_after, theirs) = before, after
    link = Linear(fixed_ns=phases * costs.wire.fixed_ns, fs_per_byte=costs.wire.fs_per_byte)
    if before == after:
        return dataclasses.replace(costs, wire=link)
    unpacked = costs.unpack.fs_per_byte > _LEAST_UNPACKING * costs.pack.fs_per_byte
    # Of both stages together: a ratio of one alone would be of what is hardly there, where little was unpacked.
    recorded = costs.pack.fs_per_byte + (costs.unpack.fs_per_byte if unpacked else 0)
    pace = recorded * bytes_before / (ours.pack + (ours.unpack if unpacked else 0.0)) / max(bytes_after, 1)
    unpack = theirs.unpack + (theirs.combine if combined else 0.0)
    return Costs(
        wire=link,
        pack=Linear(fixed_ns=costs.pack.fixed_ns, fs_per_byte=round(pace * theirs.pack)),
        unpack=Linear(fixed_ns=costs.unpack.fixed_ns, fs_per_byte=round(pace * unpack)),
    )


def _counted(trace: RankTrace, dtype: torch.dtype, reason: str) -> KernelTable:
    found = paced(counted(dtype, trace.ranks))
    shown = ", ".join(f"{wire} {_sum(one):.4g}" for wire, one in found.items())
    return KernelTable(found, f"counted, as {reason}, in bytes at a copy's rate per {_name(dtype)} element: {shown}.")


def _sum(one: Kernels) -> float:
    return one.pack + one.unpack + one.combine


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(trace: RankTrace) -> torch.dtype:
    """That of most elements; of others than the kernels take, fp32."""
    elements: Counter[str] = Counter()
    for one in trace.parameters:
        elements[one.group.partition(" ")[0]] += one.numel
    return _DTYPES.get(elements.most_common(1)[0][0], torch.float32)


@contextmanager
def _alone(device: torch.device) -> Iterator[None]:
    """On this device, or on one thread of the CPU."""
    threads = torch.get_num_threads()
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        if device.type == "cpu":
            torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def _repeat(call: _Call, times: int) -> None:
    for _ in range(times):
        call()


def _stages(
    device: torch.device, dtype: torch.dtype, numels: Sequence[int], ranks: int
) -> dict[tuple[Wire, str], _Call]:
    """The calls of every wire's kernels on the same gradients."""
    generator = torch.Generator(device).manual_seed(0)  # the program's own random numbers stay as they are
    source, result = (
        torch.randn(sum(numels), generator=generator, dtype=torch.float32, device=device).to(dtype),
        torch.empty(sum(numels), dtype=dtype, device=device),
    )
    gradients, results = source.split(list(numels)), result.split(list(numels))
    kinds, shapes = [dtype] * len(numels), [((numel,), (1,)) for numel in numels]
    divisor = float(max(ranks, 2))  # by 1, packing in place would be nothing
    one = torch.ones(1, dtype=torch.float64 if dtype is torch.float64 else torch.float32, device=device)
    # Not by `dispatch` on CPU: in Triton's interpreter a kernel takes seconds, while the cast to bf16 is torch's.
    on_cpu = device.type == "cpu"
    plain = cpu if on_cpu else dispatch.unchecked(device, (dtype,))
    blocks = cpu_encoded if on_cpu else encoded.unchecked(device, (dtype,))
    found: dict[tuple[Wire, str], _Call] = {}
    for wire in PLAIN_WIRES:
        sent = wire_dtype(wire) or dtype
        layout = aligned_layout(numels, wire_itemsize_bytes=sent.itemsize)
        chunks = ChunkTable(layout.numels, layout.offsets, kinds, layout.numel, shapes=shapes)
        buffer = torch.zeros(layout.numel, dtype=sent, device=device)
        found[wire, "pack"] = functools.partial(plain.pack, gradients, chunks, PointerTable(), buffer, divisor)
        found[wire, "unpack"] = functools.partial(plain.unpack, results, chunks, PointerTable(), buffer, one)
    shards = 1 if ranks <= 2 else min(ranks, _MOST_SHARDS)
    for wire, encoding in ENCODINGS.items():
        align = encoding.shard_align
        layout = block_layout(numels, block_numel=encoding.block_numel, shard_align=align, shards=shards)
        table = EncodedTable(layout.numels, layout.offsets, kinds, layout.numel, encoding, shards, shapes=shapes)
        contributions = ranks if ranks <= 2 else 1
        buckets = torch.zeros(contributions * table.layout.nbytes, dtype=torch.uint8, device=device)
        bucket, total = buckets[: table.layout.nbytes], torch.empty_like(buckets[: table.layout.shard_bytes])
        found[wire, "pack"] = functools.partial(blocks.encode, gradients, table, PointerTable(), bucket, divisor)
        if ranks > 2:
            found[wire, "combine"] = functools.partial(blocks.combine_encoded, bucket, table, total)
        found[wire, "unpack"] = functools.partial(blocks.decode, results, table, PointerTable(), buckets, one)
    return found
