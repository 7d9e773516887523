"""What a reducer accepts, what its ranks must have in common, and which reducer owns a parameter."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Protocol
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.utils.weak import WeakIdKeyDictionary

from ..comm.agreement import agree_on_parameters
from ..comm.protocol import Communicator
from ..comm.waiting import collective_failed
from ..config import ReduceConfig, SyncMode, is_synchronous
from ..errors import AgreementError
from ..kernels import dispatch
from ..planning.bucketing import BucketCaps


class Owner(Protocol):
    """A reducer, as far as its claim on parameters goes."""

    exclusive: bool
    shares_parameters: bool


_ACCEPTED = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.complex32}
)
# Open reducers by parameter. Two that stand alone would average it twice; wrappers may be nested, as torch's.
_owners: MutableMapping[torch.Tensor, WeakSet[Owner]] = WeakIdKeyDictionary()


def check_parameters(parameters: Sequence[object], names: Sequence[str], sparse: Sequence[bool]) -> None:
    """Refuses what cannot be reduced, before anything is hooked.

    Raises:
        ValueError: no parameters, a duplicate, one that needs no gradient or is no leaf, devices of several types, or
            lists of different lengths.
        TypeError: something that is no dense floating-point or complex tensor; DTensor and FSDP parameters.
        RuntimeError: a parameter that is not initialised yet.
    """
    if not parameters:
        raise ValueError("a reducer needs at least one parameter that requires a gradient")
    for what, others in (("names", names), ("sparse flags", sparse)):
        if len(others) != len(parameters):
            raise ValueError(f"got {len(others)} {what} for {len(parameters)} parameters")
    seen: dict[int, str] = {}
    kinds: dict[str, str] = {}
    for parameter, name in zip(parameters, names, strict=True):
        check_one(parameter, name)
        assert isinstance(parameter, torch.Tensor)
        if id(parameter) in seen:
            raise ValueError(f"{name} is the same tensor as {seen[id(parameter)]}: list shared parameters once")
        seen[id(parameter)] = name
        kinds.setdefault(parameter.device.type, name)
    if len(kinds) > 1:
        where = ", ".join(f"{name} on {kind}" for kind, name in kinds.items())
        raise ValueError(f"all parameters must be on devices of one type, got {where}")


def check_one(parameter: object, name: str) -> None:
    """The part of `check_parameters` that concerns one parameter."""
    if isinstance(parameter, UninitializedParameter):
        raise RuntimeError(
            "Modules with uninitialized parameters can't be used with `DistributedDataParallel`. Run a dummy forward "
            f"pass to correctly initialize the modules: {name} has no shape yet"
        )
    if not isinstance(parameter, torch.Tensor):
        raise TypeError(f"{name} is a {type(parameter).__name__}, not a tensor")
    kind = sharded_kind(parameter)
    if kind is not None:
        raise TypeError(
            f"{name} is a parameter of {kind}: it is reduced by what sharded it. Leave it out of this wrapper "
            "(_set_params_and_buffers_to_ignore_for_model), or wrap before sharding"
        )
    if not parameter.requires_grad or not parameter.is_leaf:
        raise ValueError(f"{name} is not a leaf that requires a gradient, so it will never get one")
    if parameter.layout is not torch.strided or parameter.dtype not in _ACCEPTED:
        raise TypeError(f"{name} is {parameter.dtype} with layout {parameter.layout}; gradients must be dense floats")


def check_mode(mode: SyncMode, present: Mapping[str, bool]) -> None:
    """Refuses what needs every step to end with its own averages, in a mode where it does not.

    Args:
        mode: the mode.
        present: what there is of that, by name.

    Raises:
        ValueError: with those that there are.
    """
    found = [name for name, there in present.items() if there]
    if found and not is_synchronous(mode):
        raise ValueError(
            f"sync_mode={mode!r} and {', '.join(found)} exclude each other: gradients would be read, written or taken "
            "for reduced ahead of the step that their averages come in. Use Synchronous()"
        )


def sharded_kind(parameter: torch.Tensor) -> str | None:
    """ "DTensor" or "FSDP" if somebody else shards and reduces `parameter`."""
    if type(parameter).__name__ == "FlatParameter" or getattr(parameter, "_is_flat_param", False):
        return "FSDP"
    if any(base.__name__ == "DTensor" for base in (*type(parameter).__mro__, *type(parameter.data).__mro__)):
        return "DTensor"
    return None


def sparse_parameters(module: nn.Module) -> set[int]:
    """Parameters of embeddings with sparse gradients, by id; torch's rule."""
    return {
        id(parameter)
        for one in module.modules()
        if isinstance(one, nn.Embedding | nn.EmbeddingBag) and one.sparse
        for parameter in one.parameters(recurse=False)
    }


def describe(parameter: torch.Tensor, name: str, sparse: bool) -> str:
    """All that must be the same on every rank, as text."""
    extra = ", sparse" if sparse else ""
    return (
        f"{name}: sizes {tuple(parameter.shape)}, strides {tuple(parameter.stride())}, {parameter.dtype}, "
        f"{parameter.device.type}{extra}"
    )


def settings(config: ReduceConfig, caps: BucketCaps, flags: dict[str, object]) -> dict[str, object]:
    """The options that must be the same on every rank, by name."""
    listed = hex(hash(caps.listed_bytes)) if len(caps.listed_bytes) > 16 else list(caps.listed_bytes)
    sizes = {"first_bucket_bytes": caps.first_bytes, "bucket_cap_bytes": caps.cap_bytes, "bucket_caps_bytes": listed}
    return {**config.to_dict(), **sizes, "planned_bytes": caps.planned_bytes, **flags}


def agree(
    communicator: Communicator,
    descriptions: Sequence[str],
    settings: dict[str, object],
    device: torch.device,
    problem: str = "",
) -> bool:
    """Compares parameters and settings across ranks. A collective.

    Args:
        communicator: the ranks.
        descriptions: see `describe`; of every parameter.
        settings: see `settings`.
        device: where the backend takes tensors.
        problem: why this rank cannot take part, for all others to read.

    Returns:
        Whether all ranks' sums have the same last bits.

    Raises:
        AgreementError: on every rank.
        CollectiveError: a peer did not answer.
    """
    try:
        arithmetic = dispatch.arithmetic(device)
        return agree_on_parameters(communicator, descriptions, settings, device, problem, arithmetic)
    except AgreementError:
        raise
    except RuntimeError as error:
        what = "comparing model and settings across ranks failed"
        raise collective_failed(what, communicator, error) from error


def enter(owner: Owner, parameters: Sequence[torch.Tensor], names: Sequence[str], *, exclusive: bool) -> bool:
    """Registers `owner` with its parameters; says whether another reducer is around one of them (nested wrappers).

    Raises:
        ValueError: `owner` stands alone, and so does another open one that holds one of them.
    """
    shared = False
    for parameter, name in zip(parameters, names, strict=True):
        for other in _owners.get(parameter, ()):
            shared = True
            if exclusive and other.exclusive:
                raise ValueError(
                    f"{name} belongs to another open Reducer, which would average it too: close() it first"
                )
    for parameter in parameters:
        owners = _owners.setdefault(parameter, WeakSet())
        for other in owners:
            other.shares_parameters = True
        owners.add(owner)
    return shared


def shared(owner: Owner, parameters: Sequence[torch.Tensor]) -> bool:
    """Whether another open reducer is around one of `parameters` now."""
    return any(other is not owner for parameter in parameters for other in _owners.get(parameter, ()))


def leave(owner: Owner, parameters: Sequence[torch.Tensor]) -> None:
    """Undoes `enter`."""
    for parameter in parameters:
        _owners.get(parameter, WeakSet()).discard(owner)
