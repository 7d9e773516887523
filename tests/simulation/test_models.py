"""Known models: what is known of them from elsewhere (parameters, arithmetic), and when their gradients are ready."""

from __future__ import annotations

import math

import pytest

from fusedreduce.simulation import models
from fusedreduce.simulation.models import MODELS, Layer, Model, Workload
from fusedreduce.simulation.networks import ACCELERATORS


# torchvision's documentation has ResNet-50's and ViT-L/16's, Radford et al. GPT-2 XL's 1.5 billion, MegaBlocks' table 2
# the 839 million of dMoE-XS.
@pytest.mark.parametrize(
    ("name", "tensors", "elements"),
    [
        ("resnet50", 161, 25_557_032),
        ("vit-l", 296, 304_326_632),
        ("gpt2-xl", 580, 1_557_611_200),
        ("moe", 826, 838_558_720),
    ],
)
def test_parameters(name: str, tensors: int, elements: int) -> None:
    assert len(MODELS[name].numels) == tensors
    assert sum(MODELS[name].numels) == elements


# torchvision gives 4.09 and 61.55 billion products (a product is two operations); MegaBlocks' table 1 gives 316
# billion operations of forward and backward for a sequence of Transformer-XS, of which dMoE-XS does as many, the
# router's apart.
@pytest.mark.parametrize(
    ("name", "flops", "within"),
    [("resnet50", 2 * 4.09e9, 0.001), ("vit-l", 2 * 61.55e9, 0.001), ("moe", 316e9 / 3, 0.005)],
)
def test_arithmetic(name: str, flops: float, within: float) -> None:
    assert MODELS[name].flops == pytest.approx(flops, rel=within)


def test_arithmetic_of_gpt2_is_two_operations_per_parameter_and_token_and_attention() -> None:
    model = MODELS["gpt2-xl"]
    positions = 1024 * 1600
    attention = 48 * 4 * 1024**2 * 1600
    assert model.flops == pytest.approx(2 * 1024 * (sum(model.numels) - positions) + attention, rel=0.001)


def test_the_rates_of_resnet50_and_vit_are_their_images() -> None:
    assert 3 * MODELS["resnet50"].flops / 1e12 == pytest.approx(models.TFLOP_PER_IMAGE_RESNET50, rel=1e-4)
    width, depth, inner, tokens = 1408, 40, 6144, 257
    macs = depth * (tokens * (4 * width**2 + 2 * width * inner) + 2 * tokens**2 * width) + 256 * 14**2 * 3 * width
    assert 3 * 2 * macs / 1e12 == pytest.approx(models.TFLOP_PER_IMAGE_VIT_G14, rel=1e-3)
    workload = MODELS["resnet50"].workload("a100")
    assert 256 / (workload.forward_ns + max(workload.ready_ns)) * 1e9 == pytest.approx(2470, rel=1e-3)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("accelerator", ACCELERATORS)
def test_no_rate_is_above_what_the_accelerator_could_do(name: str, accelerator: str) -> None:
    assert 0.1 < MODELS[name].tflops[accelerator] / ACCELERATORS[accelerator].peak_tflops < 0.65


@pytest.mark.parametrize("name", MODELS)
def test_gradients_come_in_the_reverse_of_the_order_of_registration(name: str) -> None:
    workload = MODELS[name].workload("a100")
    assert len(workload.ready_ns) == len(workload.numels)
    assert list(workload.ready_ns) == sorted(workload.ready_ns, reverse=True)
    assert workload.ready_ns[0] == max(workload.ready_ns) == pytest.approx(2 * workload.forward_ns, abs=2)


@pytest.mark.parametrize("name", ["gpt2-xl", "moe"])
def test_a_tied_embedding_is_ready_last_though_backward_begins_with_it(name: str) -> None:
    model = MODELS[name]
    workload = model.workload("h100")
    assert model.layers[-1].shapes == () and model.layers[-1].flops > 0
    assert workload.numels[0] == math.prod(model.layers[0].shapes[0]) == max(workload.numels)
    assert workload.ready_ns[0] == max(workload.ready_ns)
    assert min(workload.ready_ns) > 0, "the output's arithmetic comes before the first gradient"


def test_a_small_model_by_hand() -> None:
    """Backward: 2 x 30 operations of the last layer, then 2 x 10 of the first, for 5 samples at 10^9 a second."""

    def layers() -> tuple[Layer, ...]:
        return (Layer("in", ((2, 3), (2,)), 10), Layer("norm", ((2,),)), Layer("out", ((4, 2),), 30))

    model = Model(name="m", title="", make=lambda: iter(layers()), batch=5, sample="", tflops={"slow": 0.001})
    assert model.workload("slow") == Workload(numels=(6, 2, 2, 8), ready_ns=(400, 400, 300, 300), forward_ns=200)
    assert model.workload("slow", batch=1).ready_ns == (80, 80, 60, 60)
    assert model.workload("slow", batch=10).forward_ns == 400


def test_what_cannot_be_computed_is_refused() -> None:
    with pytest.raises(ValueError, match="no rate for resnet50 on 'tpu': use one of a100, h100"):
        MODELS["resnet50"].workload("tpu")
    with pytest.raises(ValueError, match="batch must be at least 1, got 0"):
        MODELS["resnet50"].workload("a100", batch=0)
