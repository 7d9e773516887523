"""all_reduce: a differentiable all-reduce over a communicator.

    mean = fusedreduce.all_reduce(activations.mean(0), communicator, "mean")     # of the batch on all ranks

y = sum over ranks of x, so with L = sum over ranks of their losses, dL/dx is the sum over ranks of dL/dy on each: the
backward is the same all-reduce of the gradients; of a mean, the mean. `torch.distributed.nn.functional.all_reduce` does
that too, but is deprecated, and what torch names instead is private; neither takes a mean over a LocalGroup.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from .protocol import Communicator
from .waiting import wait_for

DifferentiableOp = Literal["sum", "mean"]


def all_reduce(tensor: torch.Tensor, communicator: Communicator, op: DifferentiableOp = "sum") -> torch.Tensor:
    """Reduces `tensor` over all ranks; its backward, and that one's, reduce the gradients by the same operation.

    Every rank calls it at the same place, and runs a backward through the result if any rank does. Blocks until all
    ranks have come, on CUDA not for the device.

    Args:
        tensor: fp32, fp16, bf16 or fp64, of any strides; the same shape and dtype on all ranks. Is not changed.
        communicator: the ranks.
        op: "sum", or "mean": tensors are divided by the number of ranks before they are added up.

    Returns:
        A new contiguous tensor of `tensor`'s shape and dtype.

    Raises:
        ValueError: another `op`; or a backward would have to wait for ranks that share its thread (a LocalGroup on
            CUDA).
        UnsupportedWireError: tensors of this dtype cannot be summed on this device; on every rank.
        CollectiveError: a rank did not come within the timeout; or, over a LocalGroup, ranks came with different
            tensors. (torch.distributed does not compare them, and Gloo may end the process.)
    """
    if op not in ("sum", "mean"):
        raise ValueError(f"op must be 'sum' or 'mean', got {op!r}")
    communicator.check_wire(tensor.dtype, tensor.device)
    if torch.is_grad_enabled() and tensor.requires_grad and not communicator.waits_in_backward(tensor.device):
        raise ValueError(
            f"a backward on {tensor.device} cannot wait for the other ranks, which need its thread: give a tensor that "
            "requires no gradient"
        )
    result: torch.Tensor = _AllReduce.apply(tensor, communicator, op)
    return result


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, communicator: Communicator, op: DifferentiableOp) -> torch.Tensor:
        ctx.communicator, ctx.op = communicator, op
        total = tensor.clone(memory_format=torch.contiguous_format)
        if op == "mean":
            total.div_(communicator.size)
        wait_for(communicator.all_reduce(total), "a differentiable all-reduce", communicator)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _AllReduce.apply(*gradients, ctx.communicator, ctx.op), None, None
