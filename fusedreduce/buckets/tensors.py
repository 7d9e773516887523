"""How gradients lie in memory, as real numbers, and which of them are there."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack

import torch

from ..kernels.checks import is_dense
from ..kernels.table import Shape

_NONE = {type(None)}
_grad = operator.attrgetter("grad")
_version = operator.attrgetter("_version")


def no_autograd() -> AbstractContextManager[object]:
    """A context for what is ours: nothing in it becomes part of a graph, and tensors made in it can be used anywhere.

    A backward may run in inference mode (there autograd calls our hooks), the next one outside of it, where a tensor of
    that mode cannot be written any more.
    """
    if not torch.is_inference_mode_enabled():
        return torch.no_grad()
    contexts = ExitStack()
    contexts.enter_context(torch.inference_mode(False))  # which turns gradients on
    contexts.enter_context(torch.no_grad())
    return contexts


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the real and imaginary parts, for a complex one."""
    return dtype.to_real() if dtype.is_complex else dtype


def real_numel(parameter: torch.Tensor) -> int:
    """Real numbers in a gradient of `parameter`: two per complex element."""
    return parameter.numel() * (2 if parameter.is_complex() else 1)


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """The values as real numbers: a view, but a copy of a complex tensor that is conjugated lazily."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def memory_as_real(tensor: torch.Tensor) -> torch.Tensor:
    """What lies in memory as real numbers, always a view: of a lazily conjugated tensor the values before that."""
    if not tensor.is_complex():
        return tensor
    return torch.view_as_real(tensor.conj() if tensor.is_conj() else tensor)


def walkable_memory(gradient: torch.Tensor) -> torch.Tensor | None:
    """The memory that a kernel walks, as real numbers; None for a sparse or lazily negated gradient."""
    if gradient.layout is not torch.strided or gradient.is_neg():
        return None
    return memory_as_real(gradient).detach()


def writable_values(parameter: torch.Tensor) -> torch.Tensor:
    """The values of a parameter's gradient as real numbers, writable in place; a sparse gradient is coalesced first."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient.layout is torch.sparse_coo:
        if not gradient.is_coalesced():
            parameter.grad = gradient = gradient.coalesce()
        gradient = gradient.values()
    return memory_as_real(gradient).detach()


def like_parameter(view: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A real view of a buffer as a gradient of `parameter`: complex again, with a version counter of its own."""
    return (torch.view_as_complex(view) if parameter.is_complex() else view).data


def dense_shape(parameter: torch.Tensor) -> Shape:
    """Size and strides of `parameter`'s gradient in its slot, as real numbers: torch's gradient layout contract."""
    template = parameter.detach()
    if not is_dense(template):
        template = torch.empty(template.shape, dtype=template.dtype, device="meta")
    if template.is_complex():
        size = (*template.shape, 2)
        return size, (*(2 * stride for stride in template.stride()), 1)
    return tuple(template.shape), tuple(template.stride())


def any_gradient(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether any parameter has a gradient.

    By type: in the usual case, where all are None, a generator of `is not None` takes half as long again, and
    `None in gradients` would compare tensors element by element.
    """
    return not set(map(type, [parameter.grad for parameter in parameters])) <= _NONE


def none_missing(gradients: Iterable[torch.Tensor | None]) -> bool:
    """Whether no gradient is None; by type, as `any_gradient`."""
    return type(None) not in set(map(type, gradients))


def taken_over(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """The gradients of `parameters`.

    A copy takes the place of a gradient that was made in inference mode, which nothing outside of that mode may write
    through a view, and which may have no version. Call this outside of that mode (see `no_autograd`).
    """
    gradients: list[torch.Tensor | None] = list(map(_grad, parameters))
    try:
        foreign = any(map(torch.Tensor.is_inference, gradients))  # type: ignore[arg-type]
    except TypeError:  # None is none
        foreign = any(gradient is not None and gradient.is_inference() for gradient in gradients)
    if foreign:
        for parameter in parameters:
            if parameter.grad is not None and parameter.grad.is_inference():
                parameter.grad = parameter.grad.clone()
        gradients = list(map(_grad, parameters))
    return gradients


def versions_of(gradients: Sequence[torch.Tensor | None]) -> list[int]:
    """The version of each gradient, which torch counts up at every write in place; -1 for None."""
    try:
        return list(map(_version, gradients))
    except AttributeError:  # None has none
        return [-1 if gradient is None else gradient._version for gradient in gradients]
