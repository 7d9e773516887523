"""Known models as lists of layers: shapes and arithmetic, from which follows when each gradient is ready.

They are written down from the papers, so that nothing has to be downloaded. Backward takes twice the forward's
arithmetic at a published rate for that model, or a similar one; a layer's gradients are ready when its share is done.
Layers that are bound by memory (the first ones of a convolutional network) take longer than their share, which hides
more of the communication at backward's end than these figures say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layer:
    """Parameters whose gradients become ready at once.

    Args:
        name: of the layer.
        shapes: of its parameters, in the order of registration; empty: it uses another layer's parameters (tied).
        flops: floating-point operations of forward for one sample, all in matrix products.
    """

    name: str
    shapes: tuple[Shape, ...]
    flops: int = 0


@dataclass(frozen=True)
class Workload:
    """One backward of one rank, undisturbed by communication.

    Args:
        numels: elements per parameter, in the order of registration.
        ready_ns: per parameter, when its gradient is ready since backward began.
        forward_ns: duration of forward.
    """

    numels: tuple[int, ...]
    ready_ns: tuple[int, ...]
    forward_ns: int


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model and how fast it is trained.

    Args:
        name: for the command line.
        title: for tables.
        make: makes its layers, in the order of forward.
        batch: samples per rank and step.
        sample: what a sample is.
        tflops: by name of an accelerator, the measured rate.
    """

    name: str
    title: str
    make: Callable[[], Iterator[Layer]]
    batch: int
    sample: str
    tflops: Mapping[str, float]

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """The layers, in the order of forward and of registration."""
        return tuple(self.make())

    @property
    def numels(self) -> tuple[int, ...]:
        """Elements per parameter, in the order of registration."""
        return tuple(math.prod(shape) for layer in self.layers for shape in layer.shapes)

    @property
    def ndims(self) -> tuple[int, ...]:
        """Dimensions per parameter, in the order of registration."""
        return tuple(len(shape) for layer in self.layers for shape in layer.shapes)

    @property
    def flops(self) -> int:
        """Floating-point operations of forward for one sample."""
        return sum(layer.flops for layer in self.layers)

    def workload(self, accelerator: str, batch: int | None = None) -> Workload:
        """Computes when gradients are ready on an accelerator.

        Args:
            accelerator: a name in `tflops`.
            batch: samples per rank; None: the model's own.

        Raises:
            ValueError: the model has no rate for the accelerator, or there are no samples.
        """
        if accelerator not in self.tflops:
            raise ValueError(f"no rate for {self.name} on {accelerator!r}: use one of {', '.join(self.tflops)}")
        samples = self.batch if batch is None else batch
        if samples < 1:
            raise ValueError(f"batch must be at least 1, got {samples}")
        flops_per_s = round(self.tflops[accelerator] * 10**12)
        ready: list[int] = []
        done = 0
        for layer in reversed(self.layers):
            done += 2 * layer.flops * samples
            ready += [done * 10**9 // flops_per_s] * len(layer.shapes)
        forward_ns = self.flops * samples * 10**9 // flops_per_s
        return Workload(numels=self.numels, ready_ns=tuple(reversed(ready)), forward_ns=forward_ns)


def resnet50() -> Iterator[Layer]:
    """ResNet-50 v1.5 (stride in the 3 x 3 convolutions), for 224 x 224 pixels.

    Source: He, Zhang, Ren and Sun, "Deep residual learning for image recognition", 2016, table 1.
    """

    def convolution(name: str, inputs: int, outputs: int, kernel: int, side: int) -> Iterator[Layer]:
        macs = inputs * outputs * kernel**2 * side**2
        yield Layer(name, ((outputs, inputs, kernel, kernel),), 2 * macs)
        yield Layer(f"{name} norm", ((outputs,), (outputs,)))

    yield from convolution("stem", 3, 64, 7, 112)
    inputs = 64
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512))):
        side = 56 >> stage
        for block in range(blocks):
            name = f"stage {stage + 1}.{block}"
            before = side * 2 if stage and not block else side
            yield from convolution(f"{name} conv 1", inputs, width, 1, before)
            yield from convolution(f"{name} conv 2", width, width, 3, side)
            yield from convolution(f"{name} conv 3", width, 4 * width, 1, side)
            if not block:
                yield from convolution(f"{name} shortcut", inputs, 4 * width, 1, side)
            inputs = 4 * width
    yield Layer("classifier", ((1000, inputs), (1000,)), 2 * inputs * 1000)


def vit_large() -> Iterator[Layer]:
    """ViT-L/16 for 224 x 224 pixels and 1,000 classes.

    Source: Dosovitskiy et al., "An image is worth 16 x 16 words", 2021, table 1.
    """
    width, depth, tokens = 1024, 24, 14 * 14 + 1
    yield Layer("class token", ((1, 1, width),))
    yield Layer("patches", ((width, 3, 16, 16), (width,)), 2 * (tokens - 1) * width * 3 * 16 * 16)
    yield Layer("positions", ((1, tokens, width),))
    for index in range(depth):
        yield from _attention(f"block {index}", width, tokens)
        yield from _feed_forward(f"block {index}", width, 4 * width, tokens)
    yield Layer("norm", ((width,), (width,)))
    yield Layer("classifier", ((1000, width), (1000,)), 2 * width * 1000)


def gpt2(depth: int, width: int) -> Iterator[Layer]:
    """GPT-2 for 1,024 tokens; the embedding is also the output's matrix, so its gradient is ready last.

    Args:
        depth: number of blocks.
        width: of the embedding.

    Source: Radford et al., "Language models are unsupervised multitask learners", 2019, table 2.
    """
    tokens, words = 1024, 50257
    yield Layer("embedding", ((words, width),))
    yield Layer("positions", ((tokens, width),))
    for index in range(depth):
        yield from _attention(f"block {index}", width, tokens)
        yield from _feed_forward(f"block {index}", width, 4 * width, tokens)
    yield Layer("norm", ((width,), (width,)))
    yield Layer("output", (), 2 * tokens * width * words)


def gpt2_xl() -> Iterator[Layer]:
    """GPT-2 XL: 48 blocks of 1,600."""
    return gpt2(48, 1600)


def moe() -> Iterator[Layer]:
    """dMoE-XS: 6 layers of 64 experts, one of which each token visits; 1,024 tokens; every rank has all experts.

    Each expert's matrices are separate parameters, as in Mixtral's and Switch's public modules, and experts run one
    after the other. (MegaBlocks itself keeps a layer's experts in two tensors.)

    Source: Gale, Narayanan, Young and Zaharia, "MegaBlocks: efficient sparse training with mixture-of-experts", 2023,
    tables 1 and 2.
    """
    width, depth, tokens, words, experts = 512, 6, 1024, 51200, 64
    yield Layer("embedding", ((words, width),))
    yield Layer("positions", ((tokens, width),))
    for index in range(depth):
        name = f"block {index}"
        yield from _attention(name, width, tokens)
        yield Layer(f"{name} norm 2", ((width,), (width,)))
        yield Layer(f"{name} router", ((experts, width),), 2 * tokens * width * experts)
        for expert in range(experts):
            share = 2 * tokens * width * 4 * width // experts
            yield Layer(f"{name} expert {expert} in", ((4 * width, width),), share)
            yield Layer(f"{name} expert {expert} out", ((width, 4 * width),), share)
    yield Layer("norm", ((width,), (width,)))
    yield Layer("output", (), 2 * tokens * width * words)


def _attention(name: str, width: int, tokens: int) -> Iterator[Layer]:
    """Norm, projections to queries, keys and values with the attention itself, projection of its output."""
    scores = 2 * 2 * tokens**2 * width
    yield Layer(f"{name} norm 1", ((width,), (width,)))
    yield Layer(f"{name} qkv", ((3 * width, width), (3 * width,)), 2 * tokens * 3 * width**2 + scores)
    yield Layer(f"{name} projection", ((width, width), (width,)), 2 * tokens * width**2)


def _feed_forward(name: str, width: int, inner: int, tokens: int) -> Iterator[Layer]:
    yield Layer(f"{name} norm 2", ((width,), (width,)))
    yield Layer(f"{name} in", ((inner, width), (inner,)), 2 * tokens * width * inner)
    yield Layer(f"{name} out", ((width, inner), (width,)), 2 * tokens * width * inner)


TFLOP_PER_IMAGE_RESNET50 = 0.024535  # forward and backward
TFLOP_PER_IMAGE_VIT_G14 = 1.602  # the same: 40 layers, width 1,408, inner 6,144, 257 tokens (Zhai et al. 2022)
_MEGABLOCKS_SHARE = 0.21

MODELS: Mapping[str, Model] = MappingProxyType(
    {
        model.name: model
        for model in (
            Model(
                name="resnet50",
                title="ResNet-50",
                make=resnet50,
                batch=256,
                sample="images",
                # a100: 2,470 images/s on one GPU, 256 per GPU (NVIDIA DeepLearningExamples, PyTorch ResNet50 v1.5).
                # h100: 55,976 images/s on eight (MLPerf Training 3.0, Dell XE9680, result_0, epoch 2; MXNet, NVIDIA's
                # own fused kernels: PyTorch is slower and exposes less).
                tflops={"a100": 2470 * TFLOP_PER_IMAGE_RESNET50, "h100": 55976 / 8 * TFLOP_PER_IMAGE_RESNET50},
            ),
            Model(
                name="vit-l",
                title="ViT-L/16",
                make=vit_large,
                batch=128,  # 4,096 on 32 ranks
                sample="images",
                # ViT g/14 on one host of eight: 693 and 1,428 images/s (NVIDIA NeMo user guide, ViT, performance).
                tflops={"a100": 693 / 8 * TFLOP_PER_IMAGE_VIT_G14, "h100": 1428 / 8 * TFLOP_PER_IMAGE_VIT_G14},
            ),
            Model(
                name="gpt2-xl",
                title="GPT-2 XL",
                make=gpt2_xl,
                batch=8,  # 512 on 64 ranks
                sample="sequences of 1,024 tokens",
                # MPT-1B at 1,024 tokens on eight GPUs (MosaicML llm-foundry, scripts/train/benchmarking).
                tflops={"a100": 187.7, "h100": 415.1},
            ),
            Model(
                name="moe",
                title="dMoE-XS, 64 experts",
                make=moe,
                batch=64,  # MegaBlocks' micro batch
                sample="sequences of 1,024 tokens",
                # MegaBlocks' smallest dense model reaches 21 % of the A100's peak; the same share is taken of the
                # H100's, for want of a published figure.
                tflops={"a100": _MEGABLOCKS_SHARE * 312, "h100": _MEGABLOCKS_SHARE * 989},
            ),
        )
    }
)
