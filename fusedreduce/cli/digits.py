"""The demo's data and model: scikit-learn's handwritten digits, and a small convolutional network.

    images   [N, 1, 8, 8] float32, 0..1      1,797 real scans, shipped inside scikit-learn: nothing is downloaded
    labels   [N] int64, 0..9

A fifth of every class is held out, the same on every rank and in every run. The rest is shuffled and divided among
ranks in each epoch, so that ranks never share an image within an epoch and all see the same number of batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

BATCH_IMAGES = 32  # per rank and step
HELD_OUT = 5  # one image in five
TRAINING_IMAGES = 1438  # the rest of 1,797
_PEAK_LEARNING_RATE = 0.01


@dataclass(frozen=True)
class Digits:
    """Images [N, 1, 8, 8] and their labels [N]."""

    images: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device) -> Digits:
        """A copy on `device`."""
        return Digits(self.images.to(device), self.labels.to(device))

    def select(self, rows: torch.Tensor) -> Digits:
        """The rows with these indices."""
        return Digits(self.images[rows], self.labels[rows])


def load() -> tuple[Digits, Digits]:
    """Loads the digits as (training, held out), the same in every process."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    generator = np.random.default_rng(0)
    held_out = np.zeros(len(labels), dtype=bool)
    for digit in np.unique(labels):
        rows = generator.permutation(np.flatnonzero(labels == digit))
        held_out[rows[: round(len(rows) / HELD_OUT)]] = True
    images = torch.from_numpy((pixels / 16.0).astype(np.float32)).reshape(-1, 1, 8, 8)
    targets = torch.from_numpy(labels.astype(np.int64))
    test = torch.from_numpy(held_out)
    training = Digits(images[~test], targets[~test])
    assert len(training) == TRAINING_IMAGES, f"expected {TRAINING_IMAGES} training images, got {len(training)}"
    return training, Digits(images[test], targets[test])


def batches_per_epoch(images: int, ranks: int) -> int:
    """The number of whole batches that every rank gets out of `images`; the rest waits for another epoch."""
    return images // ranks // BATCH_IMAGES


def batch_rows(step: int, images: int, rank: int, ranks: int, seed: int) -> torch.Tensor:
    """The training images of `rank` at `step`: indices [BATCH_IMAGES].

    With 4 images and 2 ranks, an epoch's order 3 1 0 2 gives rank 0 the images 3 and 0, and rank 1 the images 1 and 2.
    """
    epoch, batch = divmod(step, batches_per_epoch(images, ranks))
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    shard = torch.randperm(images, generator=generator, device="cpu")[rank::ranks]
    return shard[batch * BATCH_IMAGES : (batch + 1) * BATCH_IMAGES]


def build_model(seed: int) -> nn.Module:
    """The network, 40,394 parameters in 10 tensors; a seed gives the same initial weights everywhere."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(256, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )


def build_optimizer(model: nn.Module, steps: int) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """The optimizer and schedule of every variant: AdamW, its learning rate rising and falling once over `steps`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=_PEAK_LEARNING_RATE, weight_decay=0.05, fused=True)
    # OneCycleLR divides by zero below 4 steps; a run that short is about plumbing, not accuracy.
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _PEAK_LEARNING_RATE, total_steps=max(steps, 4))
    return optimizer, schedule
