"""Canary: the day Triton's interpreter rounds to bf16 rightly, these fail, and interpreter_defects.py can go."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from fusedreduce.kernels import triton_versions

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")


@triton.jit
def _cast_kernel(source, destination, NUMEL: tl.constexpr):
    index = tl.arange(0, NUMEL)
    tl.store(destination + index, tl.load(source + index).to(destination.dtype.element_ty))


def _cast(values: list[float], source: torch.dtype, destination: torch.dtype) -> torch.Tensor:
    given = torch.tensor(values, dtype=torch.float64).to(source)
    out = torch.empty(len(values), dtype=destination)
    _cast_kernel[(1,)](given, out, len(values))
    return out


def test_the_interpreter_still_cuts_to_bf16() -> None:
    out = _cast([1.00390720, 1.99999988], torch.float32, torch.bfloat16)
    assert out.tolist() == [1.0, 1.9921875], "fp32 -> bf16 is right now: take interpreter_defects.py out"


def test_the_interpreter_still_converts_bf16_subnormals_wrongly() -> None:
    smallest = 2.0**-130
    out = _cast([smallest * 1.25, 1.0], torch.bfloat16, torch.float32)
    assert out[0].item() != smallest * 1.25, "bf16 subnormals are right now: take interpreter_defects.py out"


@pytest.mark.parametrize("destination", [torch.float16, torch.float32, torch.float64])
def test_the_other_casts_are_exact(destination: torch.dtype) -> None:
    values = [1.0 + 2.0**-11, 1.0 + 3 * 2.0**-11, 65519.9, 65520.0, 6e-8, 3e-8, -(2.0**-25), 1e-45]
    for source in (torch.float32, torch.float64):
        given = torch.tensor(values, dtype=torch.float64).to(source)
        if source is torch.float64 and destination is torch.float16:
            continue  # the kernels go through fp32 rounded to odd
        assert torch.equal(_cast(values, source, destination), given.to(destination))


@triton.jit
def _count_kernel(ends, counted):
    turns = 0
    for _ in tl.range(0, tl.load(ends), 2):
        turns += 1
    tl.store(counted, turns)


def test_a_loop_ends_at_a_scalar_on_triton_3_6(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the version here: numpy's refusal is put in, then mended."""
    as_here = interpreter._patch_lang_tensor

    def as_in_3_6(tensor: Any, scope: Any) -> None:
        as_here(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda scalar: scalar.handle.data.tolist())

    ends, counted = torch.tensor([7]), torch.zeros(1, dtype=torch.int64)
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", as_in_3_6)
    with pytest.raises(triton.runtime.errors.InterpreterError):
        _count_kernel[(1,)](ends, counted)
    monkeypatch.setattr(triton_versions, "VERSION", (3, 6))
    triton_versions.mend_interpreter()
    _count_kernel[(1,)](ends, counted)
    assert counted.item() == 4


@triton.jit
def _masked_kernel(source, destination, kept, NUMEL: tl.constexpr):
    index = tl.arange(0, NUMEL)
    mask = (index < NUMEL - 1) & (tl.load(kept) != 0)
    tl.store(destination + index, tl.load(source + index, mask=mask, other=0.0))


def test_masks_of_several_comparisons_on_triton_3_9(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the version here: its refusal is put in, then mended. (3.9 itself may be mended already.)"""
    builder = interpreter.InterpreterBuilder
    operate, load = builder.binary_op, builder.create_masked_load

    def operate_as_in_3_9(self: Any, left: Any, right: Any, operation: Any) -> Any:
        result = operate(self, left, right, operation)
        if operation is np.bitwise_and and left.dtype.scalar is not tl.int1:
            result.data = result.data.astype(np.int32)
        return result

    def load_as_in_3_9(self: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        if mask.data.dtype != bool:
            raise ValueError("mask has unsupported dtype")
        return load(self, pointers, mask, *others)

    out = torch.empty(4)
    if triton_versions.VERSION != (3, 9):
        monkeypatch.setattr(builder, "binary_op", operate_as_in_3_9)
        monkeypatch.setattr(builder, "create_masked_load", load_as_in_3_9)
        with pytest.raises(triton.runtime.errors.InterpreterError):
            _masked_kernel[(1,)](torch.ones(4), out, torch.tensor([1]), 4)
        monkeypatch.setattr(triton_versions, "VERSION", (3, 9))
    triton_versions.mend_interpreter()
    _masked_kernel[(1,)](torch.ones(4), out, torch.tensor([1]), 4)
    assert out.tolist() == [1.0, 1.0, 1.0, 0.0]
