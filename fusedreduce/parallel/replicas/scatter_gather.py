"""Scatters arguments over replicas, and gathers their outputs. Pure functions.

Arguments and outputs may be any pytree, dataclasses, and subclasses of dict, list and tuple that hold a tensor.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten, tree_unflatten

from ...comm.local.strategies import balanced
from ...reducer.unused_parameters import contains_itself


@dataclass(frozen=True)
class Nested:
    """A nested value, taken apart.

    Args:
        leaves: tensors and others, in order.
        rebuild: builds the same structure from other leaves.
        shape: the structure; equal for two values whose leaves correspond.
    """

    leaves: list[Any]
    rebuild: Callable[[Sequence[Any]], Any]
    shape: object


def flatten(value: object) -> Nested:
    """Takes a nested value apart into its leaves and its structure."""
    outer, spec = tree_flatten(value, is_leaf=_is_packed)
    parts = [_taken_apart(leaf) for leaf in outer]
    if all(part is None for part in parts):
        return Nested(outer, lambda leaves: tree_unflatten(list(leaves), spec), spec)
    leaves: list[Any] = []
    for leaf, part in zip(outer, parts, strict=True):
        leaves += [leaf] if part is None else part.leaves

    def rebuild(new: Sequence[Any]) -> Any:
        left = list(new)
        built = []
        for part in parts:
            count = 1 if part is None else len(part.leaves)
            mine, left[:count] = left[:count], []
            built.append(mine[0] if part is None else part.rebuild(mine))
        return tree_unflatten(built, spec)

    return Nested(leaves, rebuild, (spec, tuple(None if part is None else part.shape for part in parts)))


def is_batched(leaf: object) -> bool:
    """Whether a leaf holds samples: a tensor with at least one dimension."""
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


def samples_of(leaves: Sequence[object], names: Sequence[str], dim: int) -> int:
    """The number of samples in the batched leaves, along `dim`; 0 if no leaf is batched.

    Args:
        leaves: of the arguments.
        names: of the leaves, for messages.
        dim: the dimension.

    Raises:
        ValueError: the numbers differ, or a tensor has no such dimension.
    """
    found: dict[int, str] = {}
    for leaf, name in zip(leaves, names, strict=True):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
            if not -leaf.dim() <= dim < leaf.dim():
                raise ValueError(f"{name} has shape {tuple(leaf.shape)}, so no dimension {dim} to scatter along")
            found.setdefault(leaf.shape[dim], name)
    if len(found) > 1:
        shown = ", ".join(f"{name} has {samples}" for samples, name in found.items())
        raise ValueError(
            f"inputs have different numbers of samples along dimension {dim}: {shown}. Every tensor with dimensions "
            "is scattered: pass others as 0-dim tensors or as attributes of the module, or use forward_parallel"
        )
    return next(iter(found), 0)


def refuse_packed(leaves: Iterable[object]) -> None:
    """Refuses packed sequences: tuples of tensors whose first dimension is no batch.

    Raises:
        TypeError: one is among the leaves of the arguments.
    """
    if any(map(_is_packed, leaves)):
        raise TypeError("a PackedSequence cannot be scattered: pass the padded batch, and pack in the module's forward")


def scattered(args: tuple[Any, ...], kwargs: dict[str, Any], parts: int, dim: int) -> list[tuple[Nested, list[Any]]]:
    """Scatters arguments.

    Args:
        args: positional ones.
        kwargs: keyword ones.
        parts: number of replicas.
        dim: dimension along which samples lie.

    Returns:
        Per part, the arguments' structure and its leaves: slices of batched tensors, all others unchanged.

    Raises:
        ValueError: no batched tensor, fewer samples than parts, or a tensor that `samples_of` refuses.
        TypeError: a packed sequence.
    """
    nested = flatten((args, kwargs))
    refuse_packed(nested.leaves)
    samples = samples_of(nested.leaves, [f"tensor {number}" for number in range(len(nested.leaves))], dim)
    if not any(map(is_batched, nested.leaves)):
        if parts == 1:
            return [(nested, list(nested.leaves))]
        raise ValueError("the arguments of forward have no tensor with dimensions, so there is no batch to scatter")
    if samples < parts:
        raise ValueError(
            f"a batch of {samples} samples cannot be divided among {parts} devices, each of which needs at least one"
        )
    sizes = [end - begin for begin, end in balanced(samples, parts)]
    columns = [
        list(leaf.split(sizes, dim)) if is_batched(leaf) and parts > 1 else [leaf] * parts for leaf in nested.leaves
    ]
    return [(nested, [column[part] for column in columns]) for part in range(parts)]


def one_each(inputs: Sequence[Any], dim: int) -> tuple[list[tuple[Nested, list[Any]]], list[int]]:
    """Takes apart arguments that are given per replica.

    Args:
        inputs: per replica one argument, or a tuple or list of arguments.
        dim: dimension along which samples lie.

    Returns:
        Per replica the arguments' structure and its leaves, as `scattered` returns them; and per replica the number of
        samples, which is 1 where nothing is batched.

    Raises:
        ValueError: an input without samples, or with a tensor that `samples_of` refuses.
        TypeError: a packed sequence.
    """
    given: list[tuple[Nested, list[Any]]] = []
    samples: list[int] = []
    for number, one in enumerate(inputs):
        nested = flatten(
            (tuple(one) if isinstance(one, tuple | list) and type(one) is not PackedSequence else (one,), {})
        )
        refuse_packed(nested.leaves)
        names = [f"tensor {at} of input {number}" for at in range(len(nested.leaves))]
        batched = any(map(is_batched, nested.leaves))
        samples.append(samples_of(nested.leaves, names, dim) if batched else 1)
        if samples[-1] == 0:
            raise ValueError(f"input {number} has no samples")
        given.append((nested, list(nested.leaves)))
    return given, samples


@dataclass(frozen=True)
class Piece:
    """One leaf of the gathered output.

    Args:
        leaves: one per replica.
        path: for messages.
    """

    leaves: list[Any]
    path: str

    @property
    def is_tensor(self) -> bool:
        """Whether the leaves are tensors."""
        return isinstance(self.leaves[0], torch.Tensor)


def pieces(outputs: Sequence[Nested], dim: int) -> list[Piece]:
    """The replicas' outputs, leaf by leaf.

    Args:
        outputs: by replica.
        dim: dimension along which tensors will be concatenated.

    Raises:
        ValueError: outputs are nested differently, or a leaf is a tensor on some replicas only, or shapes do not fit.
    """
    for replica, one in enumerate(outputs):
        if one.shape != outputs[0].shape or len(one.leaves) != len(outputs[0].leaves):
            raise ValueError(
                f"replica {replica}'s output is nested differently from replica 0's: {one.shape}, expected "
                f"{outputs[0].shape}. Use forward_parallel, which does not gather outputs"
            )
    found = [Piece([one.leaves[at] for one in outputs], f"output {at}") for at in range(len(outputs[0].leaves))]
    for piece in found:
        kinds = {isinstance(leaf, torch.Tensor) for leaf in piece.leaves}
        if len(kinds) > 1:
            raise ValueError(f"{piece.path} is a tensor on some replicas and something else on others")
        if piece.is_tensor and len({_beside(tensor.shape, dim) for tensor in piece.leaves}) > 1:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in piece.leaves)
            raise ValueError(
                f"{piece.path} cannot be concatenated along dimension {dim}: replicas returned shapes {shapes}. Use "
                "forward_parallel, which does not gather outputs"
            )
    return found


def same_on_all(piece: Piece) -> Any:
    """The value of a leaf that is no tensor.

    Raises:
        ValueError: it differs between replicas.
    """
    first = piece.leaves[0]
    for replica, leaf in enumerate(piece.leaves):
        if leaf is not first and not (type(leaf) is type(first) and _equal(leaf, first)):
            raise ValueError(
                f"{piece.path} is no tensor and differs between replicas ({first!r} on replica 0, {leaf!r} on replica "
                f"{replica}): return a tensor, or use forward_parallel, which does not gather outputs"
            )
    return first


def joined(tensors: Sequence[torch.Tensor], dim: int, device: torch.device) -> torch.Tensor:
    """The replicas' tensors concatenated along `dim` on `device`; 0-dim ones stacked to a vector."""
    here = [tensor.to(device, non_blocking=True) for tensor in tensors]
    if here[0].dim() == 0:
        return torch.stack(here)
    return torch.cat(here, dim) if len(here) > 1 else here[0]


def parts_of(gradient: torch.Tensor, tensors: Sequence[torch.Tensor], dim: int) -> list[torch.Tensor]:
    """The gradient of a tensor made by `joined`, split into those of `tensors`."""
    if tensors[0].dim() == 0:
        return list(gradient.unbind())
    return list(gradient.split([tensor.shape[dim] for tensor in tensors], dim)) if len(tensors) > 1 else [gradient]


def warn_of_scalars(found: Sequence[Piece]) -> None:
    """Warns of 0-dim outputs, as torch.nn.DataParallel does."""
    if any(piece.is_tensor and piece.leaves[0].dim() == 0 for piece in found):
        warnings.warn(
            "the module returned a scalar (0-dim tensor) on each replica: they are gathered into a vector with one "
            "element per device. The mean of this vector is not the batch's mean if replicas have different numbers of "
            "samples",
            stacklevel=4,
        )


def _taken_apart(leaf: object) -> Nested | None:
    """What pytree takes for a leaf, but is a dataclass or a container of a kind of its own; None: it is a leaf."""
    if isinstance(leaf, dict | list | tuple) and not _is_packed(leaf):
        return _contained(leaf)
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        return _fields(leaf)
    return None


def _contained(container: Any) -> Nested | None:
    if contains_itself(container):
        return None
    keys = list(container) if isinstance(container, dict) else range(len(container))
    inner = flatten([container[key] for key in keys])
    if not any(isinstance(leaf, torch.Tensor | PackedSequence) for leaf in inner.leaves):
        return None  # such as a torch.Size

    def rebuild(leaves: Sequence[Any]) -> Any:
        values = inner.rebuild(leaves)
        made: Any
        if isinstance(container, tuple):
            made = tuple.__new__(type(container), values)
            if hasattr(container, "__dict__"):
                vars(made).update(vars(container))
            return made
        made = copy.copy(container)
        for key, value in zip(keys, values, strict=True):
            made[key] = value
        return made

    return Nested(inner.leaves, rebuild, (type(container), tuple(keys), inner.shape))


def _fields(instance: Any) -> Nested:
    names = [field.name for field in dataclasses.fields(instance)]
    inner = flatten([getattr(instance, name) for name in names])

    def rebuild(leaves: Sequence[Any]) -> Any:
        made = copy.copy(instance)
        for name, value in zip(names, inner.rebuild(leaves), strict=True):
            object.__setattr__(made, name, value)
        return made

    return Nested(inner.leaves, rebuild, (type(instance), inner.shape))


def _beside(shape: Sequence[int], dim: int) -> tuple[int, ...] | None:
    """The sizes in which tensors to concatenate along `dim` must agree; None if they have no such dimension."""
    if not shape:
        return ()
    if not -len(shape) <= dim < len(shape):
        return None
    sizes = list(shape)
    sizes[dim] = -1
    return tuple(sizes)


def _is_packed(value: object) -> bool:
    return isinstance(value, PackedSequence)


def _equal(one: object, other: object) -> bool:
    try:
        return bool(one == other)
    except Exception:  # arrays, say, whose comparison has no single truth value
        return False
