"""Encoded wires on a GPU, and small on CPU: the reference's bits, one launch each, peers on one device, no wait.

What is drawn is on CPU, and so is the reference. test_both_devices.py plants a fault in each.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from gpu.test_gpu import drawn
from support.buckets import assert_same
from support.encoded_buckets import EncodedCase
from support.encoded_checks import (
    assert_combine_equals_the_reference,
    assert_decode_equals_the_reference,
    assert_encode_equals_the_reference,
)
from support.leaf_steps import given
from support.on_device import no_wait, own_stream, paths, pick, synchronize
from support.wires import EXCHANGED, reduced, settings
from torch import nn

from fusedreduce import BucketCaps, DistributedDataParallel, ReduceConfig, Reducer
from fusedreduce.comm.local.group import LocalCommunicator, LocalGroup
from fusedreduce.kernels import counting, encoded
from fusedreduce.kernels.encodings import ENCODINGS

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of overflows and NaNs
SCALES = (1.0, 3.0, 1.0 / 65536.0)
# More than a block of either encoding, a part of one, and what is never encoded.
SHAPES = ((7, 41), (3,), (2, 300), (300,), (5, 7), (1, 1031))


def encoded_case(seed: int, most_numel: int) -> EncodedCase:
    """A bucket of any size and alignment, with any option, the same for the same seed."""
    draw = random.Random(seed)
    bits = (draw.getrandbits(32), draw.getrandbits(32), draw.getrandbits(40), draw.getrandbits(32))
    return EncodedCase(
        bucket=drawn(seed, most_numel),
        encoding=draw.choice(list(ENCODINGS.values())),
        shards=draw.randint(1, 3),
        tail_bytes=draw.choice([0, 0, 16, 4112]),
        contributions=draw.randint(1, 3),
        shaped=draw.random() < 0.5,
        with_residuals=draw.random() < 0.4,
        weights=draw.choice([(1.0, 1.0), (1024.0, 2.0**-10), (0.3, 0.7)]),
        draw=bits if draw.random() < 0.4 else None,
    )


@pytest.mark.parametrize("size", ["small", "large"])
def test_random_encoded_buckets_equal_the_reference_bit_for_bit(device: torch.device, size: str) -> None:
    """Bytes, residuals and gradients; on CPU test_encoded_kernels.py has many more examples."""
    count = {"small": pick(device, cpu=6, cuda=80), "large": pick(device, cpu=1, cuda=12)}[size]
    most_numel = 300 if size == "small" else pick(device, cpu=5_000, cuda=500_000)
    launched = []
    for seed in range(count):
        case = encoded_case(seed, most_numel)
        with counting.count_launches() as counted:
            try:
                equals_the_reference(case, device, SCALES[seed % len(SCALES)])
            except AssertionError as error:
                error.add_note(str(case))
                raise
        assert {one.path for one in counted} <= paths(device)
        launched += [one.launches for one in counted if one.path != "torch"]
        assert max(launched, default=0) <= 1
    assert launched


def equals_the_reference(case: EncodedCase, device: torch.device, scalar: float) -> None:
    assert_encode_equals_the_reference(case, encoded.encode, device)
    assert_combine_equals_the_reference(case, encoded.combine_encoded, device)
    assert_decode_equals_the_reference(case, scalar, encoded.decode, device)


def _drawn(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) * 10.0 ** (index - 3) for index, shape in enumerate(SHAPES)]


@pytest.mark.parametrize("wire", EXCHANGED)
def test_peers_on_one_device_get_the_bits_of_the_definition(device: torch.device, wire: str) -> None:
    """Both phases, in several buckets."""
    steps, peers = pick(device, cpu=(1, 3), cuda=(20, 4))

    def case(communicator: LocalCommunicator) -> list[list[torch.Tensor]]:
        parameters = [torch.zeros(shape, device=device, requires_grad=True) for shape in SHAPES]
        caps, found = BucketCaps(first_bytes=64, cap_bytes=2000), []
        with Reducer(parameters, communicator, ReduceConfig(**settings(wire)), caps=caps) as reducer:
            for number in range(steps):
                loss = given(parameters, [one.to(device) for one in _drawn(peers * number + communicator.rank)])
                reducer.prepare_for_backward(loss)
                loss.backward()
                reducer.finalize()
                found.append([one.grad.cpu() for one in parameters if one.grad is not None])
                for one in parameters:
                    one.grad = None
            assert reducer.stats()["path"] in paths(device)
        return found

    local = [[_drawn(peers * number + rank) for rank in range(peers)] for number in range(steps)]
    expected = [[reduced(one, [peers] * peers, wire) for one in zip(*of_step, strict=True)] for of_step in local]
    for held in LocalGroup(peers, timeout_s=60).run(case):
        for ours, theirs in zip(held, expected, strict=True):
            for mine, wanted in zip(ours, theirs, strict=True):
                assert_same(mine, wanted)


@pytest.mark.parametrize("wire", ["int8", "int4"])
def test_the_wrapper_with_an_encoded_wire_never_waits_for_the_gpu(device: torch.device, group: None, wire: Any) -> None:
    torch.manual_seed(0)
    with own_stream(device):
        model = nn.Sequential(*[nn.Linear(24, 24, bias=layer == 0) for layer in range(4)]).to(device)
        cap_mb = 0.004
        ddp = DistributedDataParallel(model, bucket_cap_mb=cap_mb, reduce=ReduceConfig(wire=wire, grad_stats=True))
        steps = pick(device, cpu=2, cuda=5)
        for step in range(steps):
            batch = torch.randn(8, 24, device=device)
            with ddp.no_sync():
                ddp.zero_grad()
                ddp(batch).square().mean().backward()
                local = _gradients(model)
            ddp.zero_grad()
            loss = ddp(batch).square().mean()
            if step < steps - 2:
                loss.backward()
            else:
                with no_wait(device), counting.count_launches() as counted:
                    loss.backward()
                assert {one.function for one in counted} >= {"encode", "decode"}
                assert {one.path for one in counted} <= paths(device)
            synchronize(device)
            for ours, mine in zip(_gradients(model), local, strict=True):
                assert_same(ours.cpu(), reduced([mine.cpu()], [1.0], wire))


def _gradients(model: nn.Module) -> Sequence[torch.Tensor]:
    return [one.grad.clone() for one in model.parameters() if one.grad is not None]
