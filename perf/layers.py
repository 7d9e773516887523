"""Gradient shapes of known models, written out from the published architectures, and how they share buckets.

resnet50    25,557,032   161 tensors  bottleneck blocks 3 4 6 3, batch norm, 1,000 classes
vit_l16    304,326,632   296 tensors  24 layers of 1,024, patches of 16 x 16, 1,000 classes
gpt2       124,439,808   148 tensors  12 layers of 768, the head is the embedding
gpt2_xl  1,557,611,200   580 tensors  48 layers of 1,600
tiny         1,000,000  1000 tensors  of 1,000
one         67,108,864     1 tensor
misaligned  16,777,216    32 tensors  512 x 1,024, each one element past where an allocation begins
COUNTxNUMEL                           that many tensors of that many elements
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence

import torch
from records import BenchError

from fusedreduce.planning.bucketing import DEFAULT_CAP_BYTES, assign_by_size

Size = tuple[int, ...]

ALLOCATION_BYTES = 512  # what torch's CUDA allocator aligns to
_MANY = re.compile(r"(\d+)x(\d+)")


def _resnet50() -> list[Size]:
    shapes: list[Size] = [(64, 3, 7, 7), (64,), (64,)]
    width_in = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            width_out = 4 * width
            for conv in ((width, width_in, 1, 1), (width, width, 3, 3), (width_out, width, 1, 1)):
                shapes += [conv, conv[:1], conv[:1]]
            if block == 0:
                shapes += [(width_out, width_in, 1, 1), (width_out,), (width_out,)]
            width_in = width_out
    return [*shapes, (1000, width_in), (1000,)]


def _vit_l16() -> list[Size]:
    width = 1024
    layer: list[Size] = [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)]
    layer += [(width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    before: list[Size] = [(1, 1, width), (width, 3, 16, 16), (width,), (1, 197, width)]
    return [*before, *layer * 24, (width,), (width,), (1000, width), (1000,)]


def _gpt2(layers: int, width: int) -> list[Size]:
    layer: list[Size] = [(width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,)]
    layer += [(width,), (width,), (width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return [(50257, width), (1024, width), *layer * layers, (width,), (width,)]


_MODELS: Mapping[str, Callable[[], list[Size]]] = {
    "resnet50": _resnet50,
    "vit_l16": _vit_l16,
    "gpt2": lambda: _gpt2(12, 768),
    "gpt2_xl": lambda: _gpt2(48, 1600),
    "tiny": lambda: [(1000,)] * 1000,
    "one": lambda: [(64 * 2**20,)],
    "misaligned": lambda: [(512, 1024)] * 32,
}
NAMES = tuple(_MODELS)


def shapes(name: str) -> list[Size]:
    """Sizes of a model's gradients, in the order of its parameters.

    Raises:
        BenchError: no such model.
    """
    if name in _MODELS:
        return _MODELS[name]()
    many = _MANY.fullmatch(name)
    if many is None or not int(many[1]) * int(many[2]):
        raise BenchError(f"unknown model {name!r}; there are {', '.join(NAMES)}, and COUNTxNUMEL such as 2000x8")
    return [(int(many[2]),)] * int(many[1])


def buckets(
    sizes: Sequence[Size], itemsize: int, cap_bytes: int = DEFAULT_CAP_BYTES, first_bytes: int | None = None
) -> list[list[int]]:
    """Which gradients DDP puts into one bucket after its first step, in the order in which it reduces them.

    Gradients come last parameter first; a bucket is closed once it has reached `cap_bytes`. `first_bytes`: another
    limit for the first one.
    """
    limits = (cap_bytes,) if first_bytes is None else (first_bytes, cap_bytes)
    sizes_bytes = [math.prod(size) * itemsize for size in sizes]
    backwards = range(len(sizes) - 1, -1, -1)
    return [list(members) for members in assign_by_size(sizes_bytes, [None] * len(sizes), limits, order=backwards)]


def gradients(
    sizes: Sequence[Size], dtype: torch.dtype, device: torch.device | str, seed: int, misaligned: bool = False
) -> list[torch.Tensor]:
    """Normally distributed gradients, each as aligned as an allocation of its own would be.

    They lie in one allocation, so that how much memory they take does not depend on an allocator. `misaligned`: each
    begins one element later. No element is 0 or rounds to 0 in a 16-bit dtype.
    """
    device = torch.device(device)
    step = ALLOCATION_BYTES // dtype.itemsize
    starts, end = [], 0
    for size in sizes:
        starts.append(end + int(misaligned))
        end = -(-(starts[-1] + math.prod(size)) // step) * step
    memory = torch.empty(end, dtype=dtype, device=device)
    fill(memory, seed)
    return [memory[start : start + math.prod(size)].view(size) for start, size in zip(starts, sizes, strict=True)]


def fill(memory: torch.Tensor, seed: int) -> None:
    """Writes what `gradients` consists of, a piece at a time: no second copy of a large model."""
    generator = torch.Generator(memory.device).manual_seed(seed)
    for part in memory.split(2**24):
        part.normal_(generator=generator)
        part.copy_(torch.where(part.abs() < 2.0**-10, 2.0**-10, part))
