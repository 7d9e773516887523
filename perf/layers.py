"""Gradient shapes of known models (`fusedreduce.simulation.models` has them), and how they share buckets.

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
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from records import BenchError

from fusedreduce.planning.bucketing import DEFAULT_CAP_BYTES, assign_by_size
from fusedreduce.simulation import models

Size = tuple[int, ...]

ALLOCATION_BYTES = 512  # what torch's CUDA allocator aligns to
_MANY = re.compile(r"(\d+)x(\d+)")


def _of(layers: Iterator[models.Layer]) -> list[Size]:
    return [shape for layer in layers for shape in layer.shapes]


_MODELS: Mapping[str, Callable[[], list[Size]]] = {
    "resnet50": lambda: _of(models.resnet50()),
    "vit_l16": lambda: _of(models.vit_large()),
    "gpt2": lambda: _of(models.gpt2(12, 768)),
    "gpt2_xl": lambda: _of(models.gpt2_xl()),
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


def buckets(sizes: Sequence[Size], itemsize: int, cap_bytes: int = DEFAULT_CAP_BYTES) -> list[list[int]]:
    """Which gradients DDP puts into one bucket after its first step, in the order in which it reduces them.

    Gradients come last parameter first; a bucket is closed once it has reached `cap_bytes`.
    """
    sizes_bytes = [math.prod(size) * itemsize for size in sizes]
    backwards = range(len(sizes) - 1, -1, -1)
    return [
        list(members) for members in assign_by_size(sizes_bytes, [None] * len(sizes), (cap_bytes,), order=backwards)
    ]


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
    generator = torch.Generator(device).manual_seed(seed)
    for part in memory.split(2**24):  # no second copy of a large model
        part.normal_(generator=generator)
        part.copy_(torch.where(part.abs() < 2.0**-10, 2.0**-10, part))
    return [memory[start : start + math.prod(size)].view(size) for start, size in zip(starts, sizes, strict=True)]
