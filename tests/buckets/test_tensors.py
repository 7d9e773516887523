"""How gradients lie in memory, and which are there: what each helper promises, against the obvious way to say it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusedreduce.buckets.data_path import divisor_split, fp16_split
from fusedreduce.buckets.loss_scale import LossScale
from fusedreduce.buckets.tensors import (
    any_gradient,
    as_real,
    memory_as_real,
    none_missing,
    versions_of,
    walkable_memory,
    writable_values,
)

_WIRES = (torch.float32, torch.float16, torch.bfloat16)


def _complex(conjugated: bool) -> torch.Tensor:
    tensor = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    return tensor.conj() if conjugated else tensor


@pytest.mark.parametrize("conjugated", [False, True])
def test_real_values_are_the_tensors_own_and_real_memory_is_written_through(conjugated: bool) -> None:
    tensor = _complex(conjugated)
    values = as_real(tensor)
    assert torch.equal(torch.view_as_complex(values), tensor.resolve_conj())
    memory = memory_as_real(tensor)
    assert memory.data_ptr() == tensor.data_ptr() and torch.equal(memory, torch.tensor([[1.0, 2.0], [3.0, -4.0]]))
    memory.zero_()
    assert not tensor.any()


def test_real_tensors_are_passed_through() -> None:
    tensor = torch.ones(3)
    assert as_real(tensor) is tensor and memory_as_real(tensor) is tensor


def test_memory_that_a_kernel_cannot_walk_is_none() -> None:
    negated = torch.imag(_complex(conjugated=True))
    assert negated.is_neg() and walkable_memory(negated) is None
    assert walkable_memory(torch.eye(2).to_sparse()) is None
    assert walkable_memory(torch.ones(2, requires_grad=True)) is not None


def test_values_of_a_sparse_gradient_are_added_up_and_writable() -> None:
    parameter = torch.zeros(3, requires_grad=True)
    parameter.grad = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor([2.0, 3.0]), (3,))
    writable_values(parameter).mul_(2)
    assert torch.equal(parameter.grad.to_dense(), torch.tensor([0.0, 10.0, 0.0]))


@given(present=st.lists(st.booleans(), min_size=1, max_size=6), written=st.integers(0, 3))
def test_which_gradients_are_there_and_at_which_version(present: list[bool], written: int) -> None:
    parameters = [torch.zeros(2, requires_grad=True) for _ in present]
    for parameter, there in zip(parameters, present, strict=True):
        parameter.grad = torch.zeros(2) if there else None
        for _ in range(written * there):
            assert parameter.grad is not None
            parameter.grad.add_(1)
    assert any_gradient(parameters) == any(present)
    gradients = [parameter.grad for parameter in parameters]
    assert none_missing(gradients) == all(present)
    assert versions_of(gradients) == [written if there else -1 for there in present]


@given(wire=st.sampled_from(_WIRES), gradients=st.sets(st.sampled_from(_WIRES), min_size=1), ranks=st.integers(1, 4096))
def test_only_an_fp16_wire_of_wider_gradients_splits_the_divisor(
    wire: torch.dtype, gradients: set[torch.dtype], ranks: int
) -> None:
    splits = wire is torch.float16 and torch.float16 not in gradients
    for op in ("mean", "sum"):
        assert divisor_split(wire, gradients, ranks, op) == (fp16_split(ranks, op) if splits else 1.0)
    assert divisor_split(torch.float16, {torch.float32}, 8) == 4.0


def test_a_loss_scales_inverse_is_the_one_that_torch_takes() -> None:
    scale = LossScale.of(torch.tensor([3.0]))
    assert scale.inverse.dtype is torch.float32
    assert torch.equal(scale.inverse, scale.scale.double().reciprocal().float())
