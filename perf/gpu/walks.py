"""A small program for tools that watch every access: each kernel a few times, results compared on the host.

    python perf/gpu/walks.py sectors    six launches: pack and unpack of one tensor, of GPT-2's layers, of 1,000 x 1,000
    python perf/gpu/walks.py accesses   every kernel on small buckets of all dtypes and alignments

Whatever a kernel reads was copied from the host or written by a kernel of ours: nothing else has to be watched.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import layers
import torch
from records import BenchError, entry, pick_device

from fusedreduce.kernels import dispatch, reference
from fusedreduce.kernels.table import ChunkTable, PointerTable

# Name, whether it is one tensor or a layer list, elements of the one.
LISTS = ("one", "gpt2", "tiny")
ONE_NUMEL = 2**28  # 1 GiB of fp32
SIZES = (0, 1, 7, 64, 257, 700, 3001)
KINDS = (torch.float32, torch.bfloat16, torch.float16)
ALIGN_NUMEL = 64


def shapes_of(name: str) -> list[tuple[int, ...]]:
    """Of the gradients in one list."""
    return [(ONE_NUMEL,)] if name == "one" else list(layers.shapes(name))


def numel_of(name: str) -> int:
    """Elements of one list."""
    return sum(torch.Size(shape).numel() for shape in shapes_of(name))


def table(numels: Sequence[int], kinds: Sequence[torch.dtype]) -> ChunkTable:
    """Slots at multiples of 128 bytes of a 16-bit wire."""
    offsets, end = [], 0
    for numel in numels:
        offsets.append(end)
        end += -(-numel // ALIGN_NUMEL) * ALIGN_NUMEL
    return ChunkTable(numels, offsets, kinds, end)


def sectors(device: torch.device) -> None:
    """Pack and unpack of each list, fp32 to bf16 and back: two launches each."""
    for name in LISTS:
        shapes = shapes_of(name)
        gradients = layers.gradients(shapes, torch.float32, device, 0)
        numels = [one.numel() for one in gradients]
        chunks = table(numels, [torch.float32] * len(numels))
        wire = torch.empty(chunks.wire_numel, dtype=torch.bfloat16, device=device)
        one, pointers = torch.tensor([1.0]).to(device), PointerTable()
        expected = (gradients[0].reshape(-1)[:100_000] / 2).bfloat16().float()
        dispatch.pack(gradients, chunks, pointers, wire, 2.0)
        dispatch.unpack(gradients, chunks, pointers, wire, one)
        if not torch.equal(gradients[0].reshape(-1)[:100_000], expected):
            raise BenchError(f"{name}: the gradients are wrong")
        del gradients, wire


def accesses(device: torch.device) -> None:
    """Every kernel, every branch."""
    for fp64 in (False, True):
        kinds = [torch.float64] * len(SIZES) if fp64 else [KINDS[n % 3] for n in range(len(SIZES))]
        for shift, wire_kind in enumerate((torch.float64 if fp64 else torch.float32, torch.bfloat16, torch.float16)):
            _accesses(device, kinds, wire_kind, shift)


def _accesses(device: torch.device, kinds: Sequence[torch.dtype], wire_kind: torch.dtype, shift: int) -> None:
    generator = torch.Generator().manual_seed(shift)
    rooms = [torch.randn(numel + shift, generator=generator).to(kind) for numel, kind in zip(SIZES, kinds, strict=True)]
    rooms[3][shift + 5] = float("nan")  # the branch that looks again
    given = [room[shift:] for room in rooms]
    chunks = table(SIZES, kinds)
    scale = torch.tensor([0.7], dtype=chunks.compute_dtype).to(device)
    gradients = [room.to(device, copy=True)[shift:] for room in rooms]
    wire = torch.empty(chunks.wire_numel, dtype=wire_kind, device=device)
    pointers, spans = PointerTable(), chunks.spans(device)
    sources, results = chunks.new_source_partials(device), chunks.new_partials(device)
    for partials in (None, sources):
        for divisor in (2.0, 3.0):  # by product, then by division
            dispatch.pack(gradients, chunks, pointers, wire, divisor, partials)
    dispatch.unpack(gradients, chunks, pointers, wire, scale)
    dispatch.unpack(gradients, chunks, pointers, wire, scale, results)
    dispatch.measure(gradients, chunks, pointers, results)
    dispatch.scale(gradients, chunks, pointers, scale)
    dispatch.scale(gradients, chunks, pointers, scale, results)
    dispatch.reduce_partials(results, spans)
    dispatch.reduce_source_partials(sources, spans)
    expected = torch.empty(chunks.wire_numel, dtype=wire_kind)
    reference.pack(given, chunks, PointerTable(), expected, 3.0)
    if not torch.equal(wire.cpu().nan_to_num(7.0), expected.nan_to_num(7.0)):
        raise BenchError(f"pack to {wire_kind} is wrong")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("sectors", "accesses"))
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    device = pick_device(arguments.device)
    {"sectors": sectors, "accesses": accesses}[arguments.what](device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    print(f"walked: {arguments.what}", flush=True)
    return 0


if __name__ == "__main__":
    entry(main)
