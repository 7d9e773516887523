"""Steps of a Reducer over leaves whose gradients are given, to the bit: what tests of by-products share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar

import pytest
import torch

from fusedreduce import BucketCaps, Reducer
from fusedreduce.buckets.grad_bucket import GradBucket
from fusedreduce.buckets.loss_scale import LossScale
from fusedreduce.reducer.state import ReducerState

from .inside import inside

T = TypeVar("T")
Wire = Literal["native", "bf16", "fp16"]
# (wire, gradients are views): every way in which a dense bucket travels.
TRAVELS: tuple[tuple[Wire, bool], ...] = (("native", False), ("native", True), ("bf16", False), ("fp16", False))
# None: a gradient travels in its own dtype.
WIRE_DTYPES: dict[str, torch.dtype | None] = {"native": None, "bf16": torch.bfloat16, "fp16": torch.float16}
# Several buckets, some with several parameters: of `leaves()`, and of other small ones.
CAPS = BucketCaps(first_bytes=64, cap_bytes=150)
NUMELS = (3, 35, 1, 40, 24, 7, 60)
SHAPES = ((3,), (5, 7), (1,), (40,))


class Scaler:
    """Stands for a loss scaler, where it only matters that there is one."""


SCALER = Scaler()


class _Given(torch.autograd.Function):
    """Zero; the parameter's gradient is what was given, times the loss's scale."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.gradient = gradient
        return torch.zeros((), dtype=torch.float64)

    @staticmethod
    def backward(ctx: Any, *scales: torch.Tensor) -> tuple[torch.Tensor, None]:
        return times(ctx.gradient, scales[0].item()), None


def times(gradient: torch.Tensor, scale: float) -> torch.Tensor:
    """A new tensor; parts of complex numbers by themselves, so that one part's NaN is not the other's."""
    if gradient.is_complex():
        return torch.view_as_complex(torch.view_as_real(gradient) * scale)
    return gradient * scale


def given(
    parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None], ready: Sequence[int] | None = None
) -> torch.Tensor:
    """A loss with these gradients, None for one that takes no part; ready in that order (default: backwards)."""
    order = range(len(parameters) - 1, -1, -1) if ready is None else ready
    terms = []
    for index in reversed(order):
        gradient = gradients[index]
        if gradient is not None:
            terms.append(_Given.apply(parameters[index], gradient))
    return torch.stack(terms).sum()


def step(
    reducer: Reducer,
    gradients: Sequence[torch.Tensor | None],
    ready: Sequence[int] | None = None,
    *,
    scale: LossScale | None = None,
    divisor: float | None = None,
) -> None:
    """One forward and backward; of a scaled loss, as a loss scaler tells it."""
    loss = given(reducer.parameters, gradients, ready)
    reducer.prepare_for_backward(loss, divisor=divisor)
    backward(reducer, loss, scale)


def backward(reducer: Reducer, loss: torch.Tensor, scale: LossScale | None = None) -> None:
    """Of `loss`, scaled or not."""
    (loss if scale is None else scaled(reducer, loss, scale)).backward()


def scaled(reducer: Reducer, loss: torch.Tensor, scale: LossScale) -> torch.Tensor:
    """`loss` times `scale`, whose backward tells the reducer, which unscales nothing unless a scaler is attached."""
    product = loss * scale.scale.double().reshape(())
    function = product.grad_fn
    assert function is not None
    function.register_prehook(lambda _: reducer.begin_scaled(scale))
    return product


def loss_scale(value: float) -> LossScale:
    """As a loss scaler makes it."""
    return LossScale.of(torch.tensor([value], dtype=torch.float32))


def launch(reducer: Reducer, seed: int = 1) -> None:
    """A step of gradients `drawn` by `seed`, whose end is to come."""
    step(reducer, drawn(seed))
    assert reducer.state is ReducerState.LAUNCHED


def step_that_rank_1_fails(reducer: Reducer, gradients: Sequence[torch.Tensor | None]) -> None:
    """A step in which rank 1 raises behind its last collective; the others end it, and count it."""

    def raises() -> None:
        raise ZeroDivisionError

    if reducer.communicator.rank != 1:
        step(reducer, gradients)
        return
    reducer.prepare_for_forward()
    inside(reducer).fail_at_the_end(0, raises)
    with pytest.raises(ZeroDivisionError):
        step(reducer, gradients)


def shadow_step(reducer: Reducer) -> None:
    """What torch's join does in place of a step of a rank that has no inputs any more."""
    reducer.check_finalized()
    reducer.follow_ranks()  # torch has buckets rebuilt before it exchanges buffers
    reducer.step_without_inputs()


def leaves(shapes: Sequence[int | tuple[int, ...]] = NUMELS, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Parameters that hold zeros."""
    return [torch.zeros(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def drawn(
    seed: int, shapes: Sequence[int | tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """Random gradients."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def clear(parameters: Sequence[torch.Tensor]) -> None:
    """zero_grad(set_to_none=True)."""
    for parameter in parameters:
        parameter.grad = None


def copies(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor | None]:
    """Of all gradients, sparse ones as dense."""
    return [None if one.grad is None else one.grad.detach().clone().to_dense() for one in parameters]


def assert_same(
    actual: Sequence[torch.Tensor | None], expected: Sequence[torch.Tensor | None], what: object = ""
) -> None:
    """Bit for bit, and of the same dtype; None where None is expected."""
    for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert (one is None) == (other is None), (what, index, one, other)
        if one is not None and other is not None:
            assert one.dtype is other.dtype and one.shape == other.shape, (what, index, one.dtype, one.shape)
            assert torch.equal(one, other), (what, index, one.reshape(-1)[:4], other.reshape(-1)[:4])


def values(gradient: torch.Tensor) -> torch.Tensor:
    """Every element, flat, in fp64 (complex128 for a complex one); of a sparse one those that it has."""
    dense = gradient.detach()
    if dense.layout is torch.sparse_coo:
        dense = dense.coalesce().values()
    return dense.reshape(-1).to(torch.complex128 if dense.is_complex() else torch.float64)


def exact_norms(parameters: Sequence[torch.Tensor], norm_type: float) -> list[float]:
    """Of each `.grad` as it is now, and last of all of them, in fp64; 0 where there is none."""
    found: list[float] = []
    for parameter in parameters:
        absolute = torch.zeros(0) if parameter.grad is None else values(parameter.grad).abs()
        if norm_type == math.inf:
            found.append(absolute.amax().item() if absolute.numel() else 0.0)
        else:
            found.append(math.sqrt(math.fsum(absolute.square().tolist())))
    return [*found, max(found) if norm_type == math.inf else math.sqrt(math.fsum(one * one for one in found))]


def assert_close(actual: Sequence[torch.Tensor | float], expected: Sequence[float], what: object = "") -> None:
    """Within 1e-6 relative, the worst one."""
    for index, (one, exact) in enumerate(zip(actual, expected, strict=True)):
        number = float(one)
        assert abs(number - exact) <= 1e-6 * exact, f"{what}: number {index} is {number}, should be {exact}"


def bits(tensor: torch.Tensor) -> list[int]:
    """To compare bit for bit."""
    found: list[int] = tensor.reshape(-1).to(torch.float64).view(torch.int64).tolist()
    return found


def real_numel(parameter: torch.Tensor) -> int:
    """Elements as they travel: a complex one is two."""
    return parameter.numel() * (2 if parameter.is_complex() else 1)


def flat_real(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as they travel."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)


def sparse_like(parameter: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """A sparse gradient; a row may be named twice."""
    picked = torch.randn(len(rows), *parameter.shape[1:], dtype=parameter.dtype)
    if not picked.is_complex():
        picked = (picked * 64).round() / 64  # whose sums are exact, in whatever order
    return torch.sparse_coo_tensor(torch.tensor([list(rows)]), picked, tuple(parameter.shape), check_invariants=False)


def ended(value: T) -> torch.futures.Future[T]:
    """What a comm hook returns whose work is done."""
    future: torch.futures.Future[T] = torch.futures.Future()
    future.set_result(value)
    return future


def leaves_all(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A comm hook, as of one rank."""
    return ended(bucket.buffer())


def averaging(size: int, sums: Callable[[torch.Tensor], torch.Tensor], how: str) -> Any:
    """A comm hook: divides, sums, and returns its own buffer, a new tensor, or one of fp16."""

    def hook(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        mean = sums(buffer.clone() / size)
        if how == "own":
            mean = buffer.copy_(mean)
        elif how == "fp16" and not mean.is_sparse:
            mean = mean.half()
        future = ended(mean)
        # What `then` returns is of torch's own class, not of the one that torch.futures adds to it.
        return future.then(lambda done: done.value()) if how == "new" else future

    return hook


HOOKS = ("own", "new", "fp16")


def with_hooks(*options: str | None) -> list[tuple[Wire, bool, str | None]]:
    """(wire, views, option): each of TRAVELS with each of `options`, and HOOKS where no wire of ours is asked for."""
    hooked = [(*travel, hook) for travel in TRAVELS if travel[0] == "native" for hook in HOOKS]
    return [(*travel, option) for travel in TRAVELS for option in options] + hooked
