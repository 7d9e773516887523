"""The models that the step benchmark trains, and what each rank feeds them. A model's forward returns its loss.

    mlp                  four layers on images of 28 x 28
    resnet18             He et al., table 1, on images of 64 x 64: 62 parameters, 11,689,512 elements
    mlp-8m               eight layers of width 1,024: 16 parameters, 8,396,800 elements
    gpt2-tiny            4 layers of width 128, 1,024 words
    gpt2-7m              8 layers of width 256, 2,048 words: 6,859,264 elements
    gpt2-small, -medium  Radford et al., with the output tied to the embedding: 124,439,808 and 354,823,168 elements
    many:COUNTxNUMEL     parameters that are each used once; nothing but their gradients takes time

Weights are the same on every rank, and data are not: an exchange that does nothing would be noticed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import harness
import timing
import torch
from records import BenchError
from torch import nn
from torch.nn import functional

MANY = "many:"
IMAGES, CLASSES = 8, 1000
WIDE, WIDE_ROWS = (1024,) * 9, 256
SEED, WEIGHT_SCALE = 0, 0.02


class Mlp(nn.Module):
    """Vectors of the first width to as many classes as the last, pixels to ten of them if nothing else is said."""

    def __init__(self, widths: Sequence[int] = (784, 512, 512, 256, 10)) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for width, following in zip(widths, widths[1:], strict=False):
            layers += [nn.Linear(width, following), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.layers(pixels), labels)


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions beside their input, which a 1 x 1 convolution fits where shapes differ."""

    def __init__(self, channels: int, wider: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, wider, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(wider)
        self.conv2 = nn.Conv2d(wider, wider, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(wider)
        self.beside: nn.Module = nn.Identity()
        if channels != wider or stride != 1:
            self.beside = nn.Sequential(nn.Conv2d(channels, wider, 1, stride, bias=False), nn.BatchNorm2d(wider))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        inner = functional.relu(self.norm1(self.conv1(given)))
        return functional.relu(self.norm2(self.conv2(inner)) + self.beside(given))


class ResNet18(nn.Module):
    """Four stages of two blocks."""

    def __init__(self) -> None:
        super().__init__()
        stem = (nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        blocks, channels = [], 64
        for wider, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            blocks += [ResidualBlock(channels, wider, stride), ResidualBlock(wider, wider, 1)]
            channels = wider
        self.body = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(channels, CLASSES)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.head(self.body(images)), labels)


@dataclass(frozen=True, kw_only=True)
class Gpt2Sizes:
    """Of one GPT-2; `tokens` is how many of a sequence's places a batch fills, on CPU and on a GPU."""

    layers: int
    width: int
    heads: int
    words: int = 50257
    places: int = 1024
    tokens: tuple[int, int] = (64, 512)
    sequences: int = 2


GPT2: Mapping[str, Gpt2Sizes] = {
    "gpt2-tiny": Gpt2Sizes(layers=4, width=128, heads=4, words=1024, places=64, tokens=(64, 64)),
    "gpt2-7m": Gpt2Sizes(layers=8, width=256, heads=8, words=2048, places=64, tokens=(64, 64), sequences=4),
    "gpt2-small": Gpt2Sizes(layers=12, width=768, heads=12),
    "gpt2-medium": Gpt2Sizes(layers=24, width=1024, heads=16),
}


class Gpt2Block(nn.Module):
    """Attention and a layer four times as wide, each beside its input."""

    def __init__(self, sizes: Gpt2Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.heads = sizes.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = given.shape
        split = self.attend(self.norm1(given)).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        heard = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        given = given + self.project(heard.transpose(1, 2).reshape(batch, tokens, width))
        widened = functional.gelu(self.widen(self.norm2(given)), approximate="tanh")
        after: torch.Tensor = given + self.narrow(widened)
        return after


class Gpt2(nn.Module):
    """Predicts each next word; the output's weights are the embedding's."""

    def __init__(self, sizes: Gpt2Sizes) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(sizes.words, sizes.width), nn.Embedding(sizes.places, sizes.width)
        self.blocks = nn.Sequential(*(Gpt2Block(sizes) for _ in range(sizes.layers)))
        self.norm = nn.LayerNorm(sizes.width)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=WEIGHT_SCALE)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        given, following = words[:, :-1], words[:, 1:]
        hidden = self.words(given) + self.places.weight[: given.shape[1]]
        logits = functional.linear(self.norm(self.blocks(hidden)), self.words.weight)
        loss: torch.Tensor = functional.cross_entropy(logits.flatten(0, 1), following.flatten())
        return loss


_MAKE: Mapping[str, Callable[[], nn.Module]] = {
    "mlp": Mlp,
    "mlp-8m": lambda: Mlp(WIDE),
    "resnet18": ResNet18,
    **{name: functools.partial(Gpt2, sizes) for name, sizes in GPT2.items()},
}
NAMES = tuple(_MAKE)


def shape_of(name: str) -> harness.Shape | None:
    """COUNT and NUMEL of `many:COUNTxNUMEL`; None: another model.

    Raises:
        BenchError: no such model.
    """
    if name.startswith(MANY):
        count, _, numel = name.removeprefix(MANY).partition("x")
        if not (count.isdecimal() and numel.isdecimal() and int(count) * int(numel)):
            raise BenchError(f"{name!r} is not many:COUNTxNUMEL with two numbers of at least 1")
        return int(count), int(numel)
    if name not in _MAKE:
        raise BenchError(f"unknown model {name!r}: use one of {', '.join(NAMES)}, many:COUNTxNUMEL")
    return None


def build(name: str) -> nn.Module:
    """A model on the CPU, in fp32, with the same weights whenever and wherever it is built.

    Raises:
        BenchError: no such model.
    """
    shape = shape_of(name)
    if shape is not None:
        return harness.Many(*shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        return _MAKE[name]()


def batch(name: str, rank: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """What this rank feeds a model: `loss = model(*batch)`.

    Raises:
        BenchError: no such model.
    """
    shape = shape_of(name)
    if shape is not None:
        return (harness.inputs(rank, shape).to(device),)
    generator = torch.Generator().manual_seed(rank)
    if name == "mlp":
        return _images((64, 784), 10, generator, device)
    if name == "mlp-8m":
        return _images((WIDE_ROWS, WIDE[0]), WIDE[-1], generator, device)
    if name == "resnet18":
        return _images((IMAGES, 3, 64, 64), CLASSES, generator, device)
    sizes = GPT2[name]
    tokens = sizes.tokens[device.type == "cuda"]
    return (torch.randint(sizes.words, (sizes.sequences, tokens + 1), generator=generator).to(device),)


def check_memory(name: str, variants: int, copies: int, sharing: int, device: torch.device, remedy: str) -> None:
    """Before anything is taken.

    Args:
        copies: of the model that each variant has: weights, gradients, buckets, the optimizer's state. Beside these
            there are two of what must come out.
        sharing: how many ranks share the device.
        remedy: what a user can do.

    Raises:
        BenchError: there is too little memory.
    """
    with torch.device("meta"):
        model_bytes = sum(one.numel() * one.element_size() for one in build(name).parameters())
    needed_bytes, free_bytes = sharing * (copies * variants + 2) * model_bytes, timing.free_bytes(device)
    if needed_bytes > free_bytes:
        needed = f"needs about {needed_bytes / 1e9:.1f} GB of {device.type} memory"
        raise BenchError(f"{name} with {variants} variants {needed}, {free_bytes / 1e9:.1f} GB are free: {remedy}")


def _images(
    shape: tuple[int, ...], classes: int, generator: torch.Generator, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    pixels = torch.randn(shape, generator=generator)
    return pixels.to(device), torch.randint(classes, shape[:1], generator=generator).to(device)
