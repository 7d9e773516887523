"""What training benchmarks feed to models: handwritten digits, and bytes of Python's own standard library.

    digits   the demo's data, scikit-learn's images of 8 x 8
    text     the standard library's *.py, one behind the other: wherever this runs, of the version that a record names

Batches depend on seed, step and rank alone, so that every variant sees the same.
"""

from __future__ import annotations

import functools
import sysconfig
from pathlib import Path

import torch
from torch import nn

from fusedreduce.cli import digits

BYTES = 256
SEQUENCES, PLACES = 8, 64
HELD_OUT = 20  # the last byte in so many is evaluated on, and not trained on

Batch = tuple[torch.Tensor, ...]


class Classifier(nn.Module):
    """A classifier whose forward is its loss; `smoothing` of the labels goes to all classes alike."""

    def __init__(self, module: nn.Module, smoothing: float = 0.0) -> None:
        super().__init__()
        self.module, self.smoothing = module, smoothing

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.module(images), labels, label_smoothing=self.smoothing)


@functools.cache
def _digits() -> tuple[digits.Digits, digits.Digits]:
    return digits.load()


def digits_batch(step: int, rank: int, ranks: int, seed: int = 0) -> Batch:
    """Images and labels of a rank at a step."""
    training = _digits()[0]
    taken = training.select(digits.batch_rows(step, len(training), rank, ranks, seed))
    return taken.images, taken.labels


def digits_evaluation() -> list[Batch]:
    """All images that are trained on: the loss that is minimised, without the noise of the last batches."""
    training = _digits()[0]
    return [(training.images, training.labels)]


@functools.cache
def text() -> torch.Tensor:
    """uint8 [bytes]."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return torch.frombuffer(
        bytearray(b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))), dtype=torch.uint8
    )


def windows(starts: list[int]) -> torch.Tensor:
    """int64 [starts, PLACES + 1]: the bytes from each start on."""
    return torch.stack([text()[start : start + PLACES + 1] for start in starts]).long()


def text_batch(step: int, rank: int, ranks: int, seed: int = 0) -> Batch:
    """SEQUENCES windows of a rank at a step, from anywhere in the part that is trained on."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) * ranks + rank)
    starts = torch.randint(_held_out() - PLACES, (SEQUENCES,), generator=generator)
    return (windows(starts.tolist()),)


def text_evaluation(batches: int = 16, sequences: int = 32) -> list[Batch]:
    """Windows of the part that is not trained on, at equal distances."""
    starts = torch.linspace(_held_out(), len(text()) - PLACES - 1, batches * sequences).long()
    return [(windows(some.tolist()),) for some in starts.split(sequences)]


def _held_out() -> int:
    return len(text()) - len(text()) // HELD_OUT
