"""Payloads: a caller's tensor as a flat, contiguous one in the dtype that sums are computed in, and results back.

fp16, bf16 and fp32 are computed in fp32, fp64 in fp64; integers in int32, int64 in int64, both modulo 2^n as torch's
sums are. A mean is the sum divided once, before the one rounding to the caller's dtype. Values travel in logical order,
because peers may have different strides for the same shape; each peer gets its result in its own tensor's strides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..comm.local.strategies import Strategy
from ..comm.protocol import ReduceOp
from .verdicts import OPS, Description

_COMPUTED_IN: Mapping[torch.dtype, torch.dtype] = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.uint8: torch.int32,
    torch.int8: torch.int32,
    torch.int16: torch.int32,
    torch.int32: torch.int32,
    torch.int64: torch.int64,
}


def problem_of_reduction(tensor: object, op: object) -> tuple[str, str] | None:
    """Why `tensor` cannot be reduced with `op`: (name of an error class, text); None if it can."""
    if not isinstance(op, str) or op not in OPS:
        return "InvalidArgument", f"unknown op {op!r}: use one of {', '.join(OPS)}"
    problem = problem_of_tensor(tensor)
    if problem is not None or not isinstance(tensor, torch.Tensor):
        return problem
    if tensor.dtype not in _COMPUTED_IN:
        accepted = ", ".join(dtype_name(one) for one in _COMPUTED_IN)
        return "UnsupportedDType", f"{op} of {dtype_name(tensor.dtype)} is not defined: use one of {accepted}"
    if op == "mean" and not tensor.is_floating_point():
        return (
            "UnsupportedDType",
            f"a mean of {dtype_name(tensor.dtype)} would not be an integer: convert to a float dtype, or use sum",
        )
    return None


def problem_of_tensor(tensor: object) -> tuple[str, str] | None:
    """Why `tensor` cannot be sent at all: (name of an error class, text); None if it can."""
    if not isinstance(tensor, torch.Tensor):
        return "InvalidArgument", f"expected a tensor, got {type(tensor).__name__}"
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        kind = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else str(tensor.layout)
        return "InvalidArgument", f"a {kind} tensor cannot be used, only dense tensors"
    if tensor.device.type not in ("cpu", "cuda"):
        return "InvalidArgument", f"a tensor on {tensor.device.type} cannot be used, only on cpu and cuda"
    return None


def root_problem(root: object, peers: int, needed: bool) -> tuple[str, str] | None:
    """Why `root` is not a peer's number, from 0 to `peers` - 1; None if it is, or if it is None and not `needed`."""
    if root is None and not needed:
        return None
    if isinstance(root, bool) or not isinstance(root, int) or not 0 <= root < peers:
        return "InvalidArgument", f"root must be the number of a peer, 0 to {peers - 1}, got {root!r}"
    return None


def wire_op(op: str) -> ReduceOp:
    """The operation of the collective that computes `op`."""
    ops: Mapping[str, ReduceOp] = {"sum": "sum", "mean": "sum", "min": "min", "max": "max", "product": "product"}
    return ops[op]


def flat(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies `tensor` into a new flat tensor on `device`, in the dtype that sums are computed in."""
    work = torch.empty(tensor.numel(), dtype=_COMPUTED_IN[tensor.dtype], device=device)
    work.view(tensor.shape).copy_(tensor.detach())
    return work


def reduced(work: torch.Tensor, like: torch.Tensor, op: str, peers: int) -> torch.Tensor:
    """Makes the result for a caller that passed `like`, from the reduced `work`, which is not written to."""
    result = torch.empty_like(like, requires_grad=False)
    if op == "mean":
        work = work / peers
    if work.dtype is torch.int32 and like.dtype.itemsize < 4:
        work = work.to(like.dtype)
    return result.copy_(work.view(like.shape))


def flat_bytes(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies `tensor` into a new flat tensor of bytes on `device`."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    work = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return work.copy_(tensor).view(-1).view(torch.uint8)


def empty_bytes(source: Description, device: torch.device) -> torch.Tensor:
    """Makes an uninitialised buffer for the bytes of the tensor that `source` describes."""
    assert source.shape is not None and source.dtype is not None
    numel = torch.Size(source.shape).numel()
    return torch.empty(numel * dtype_of(source.dtype).itemsize, dtype=torch.uint8, device=device)


def received(work: torch.Tensor, source: Description, device: torch.device) -> torch.Tensor:
    """Makes a tensor from the bytes that `source` sent, with its strides if those are dense; only reads `work`."""
    assert source.shape is not None and source.stride is not None and source.dtype is not None
    dtype = dtype_of(source.dtype)
    if is_dense(source.shape, source.stride):
        result = torch.empty_strided(source.shape, source.stride, dtype=dtype, device=device)
    else:
        result = torch.empty(source.shape, dtype=dtype, device=device)
    return result.copy_(work.view(dtype).view(source.shape))


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Returns whether a tensor of these strides covers one piece of memory without gaps or overlap."""
    expected = 1
    for step, length in sorted(zip(stride, shape, strict=True)):
        if length == 0:
            return False
        if length > 1:
            if step != expected:
                return False
            expected *= length
    return True


def copies(strategy: Strategy, peers: int, source: int) -> list[tuple[int, int]]:
    """The copies that send `source`'s result to all peers: a sum's additions backwards, with the source as the root.

    Returns:
        (from, to) of each copy, in order.

    Example: Tree(2), 4 peers, source 1 -> (1, 3), (1, 2), (2, 0).
    """
    [part] = [one for one in strategy.parts(peers, peers) if one.owner == 0]
    return [((into + source) % peers, (other + source) % peers) for into, other in reversed(part.adds)]


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without "torch.", such as "float32"."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a name that `dtype_name` returned.

    Raises:
        ValueError: there is no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not the name of a dtype")
    return dtype
