"""The kernel benchmarks' own parts: layer lists, timing, baselines, verdicts. Their numbers are nobody's test."""

from __future__ import annotations

import math

import perf_path
import pytest
import torch

# isort: split
import layers
from records import BenchError

assert perf_path.PERF.is_dir()


@pytest.mark.parametrize(
    ("name", "tensors", "numel"),
    [
        ("resnet50", 161, 25_557_032),
        ("vit_l16", 296, 304_326_632),
        ("gpt2", 148, 124_439_808),
        ("gpt2_xl", 580, 1_557_611_200),
        ("tiny", 1000, 1_000_000),
        ("one", 1, 64 * 2**20),
        ("misaligned", 32, 16 * 2**20),
        ("2000x8", 2000, 16_000),
    ],
)
def test_layer_lists_have_the_published_sizes(name: str, tensors: int, numel: int) -> None:
    sizes = layers.shapes(name)
    assert (len(sizes), sum(map(math.prod, sizes))) == (tensors, numel)


@pytest.mark.parametrize("name", ["bert", "0x5", "5x", ""])
def test_an_unknown_model_is_one_clear_line(name: str) -> None:
    with pytest.raises(BenchError, match="unknown model"):
        layers.shapes(name)


def test_buckets_are_ddps() -> None:
    cut = layers.buckets([(4,), (3, 2), (5,), (1,)], itemsize=4, cap_bytes=24)
    assert cut == [[3, 2], [1], [0]]
    assert layers.buckets([(4,), (3, 2), (5,), (1,)], 4, 24, first_bytes=4) == [[3], [2, 1], [0]]
    of_gpt2 = layers.buckets(layers.shapes("gpt2"), 4)
    assert sorted(member for members in of_gpt2 for member in members) == list(range(148))


@pytest.mark.parametrize("misaligned", [False, True])
def test_gradients_lie_as_allocations_would(misaligned: bool) -> None:
    made = layers.gradients([(3, 5), (1,), (200,)], torch.bfloat16, "cpu", seed=1, misaligned=misaligned)
    assert [tuple(one.shape) for one in made] == [(3, 5), (1,), (200,)]
    places = [one.data_ptr() - made[0].data_ptr() for one in made]
    assert [place % layers.ALLOCATION_BYTES for place in places] == [0, 0, 0]
    assert made[0].storage_offset() == int(misaligned)
    assert all(one.is_contiguous() and one.abs().min() >= 2.0**-10 for one in made)
    again = layers.gradients([(3, 5), (1,), (200,)], torch.bfloat16, "cpu", seed=1, misaligned=misaligned)
    assert all(map(torch.equal, made, again))
