"""What a reducer accepts, what its ranks must have in common, and which reducer owns a parameter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.utils.weak import WeakIdKeyDictionary

from ..comm.agreement import ON_EVERY_MACHINE, agree_on_parameters
from ..comm.protocol import Communicator
from ..comm.waiting import naming_failure
from ..config import ReduceConfig, Wire
from ..errors import AgreementError, FusedReduceError
from ..kernels import dispatch, encoded
from ..planning.bucketing import BucketCaps
from ..wires import described, encoding_of


class Owner(Protocol):
    """A reducer, as an owner of parameters."""

    exclusive: bool
    shares_parameters: bool

    @property
    def takes_gradients(self) -> bool:
        """Whether gradients that come now are averaged, or accumulate on purpose."""
        ...


_ACCEPTED = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.complex32}
)
# Open reducers by parameter. Two exclusive ones would average it twice; wrappers may be nested, as torch's.
_owners: MutableMapping[torch.Tensor, WeakSet[Owner]] = WeakIdKeyDictionary()


def check_communicator(communicator: object) -> None:
    """Raises TypeError, with what to write, for what is no communicator: options, a process group, nothing."""
    if not isinstance(getattr(communicator, "rank", None), int):  # of a process group it is a method
        raise TypeError(
            f"communicator must be the ranks to average over, got {communicator!r}: write "
            "Reducer(parameters, fusedreduce.ProcessGroupCommunicator(), config)"
        )


def check_parameters(parameters: Sequence[object], names: Sequence[str], sparse: Sequence[bool]) -> None:
    """Refuses parameters that cannot be reduced, before anything is hooked.

    Args:
        parameters: the reducer's.
        names: their names.
        sparse: per parameter whether its gradient is sparse.

    Raises:
        ValueError: there are no parameters, one is given twice, requires no gradient or is not a leaf, devices are of
            several types, or lists have different lengths.
        TypeError: one is not a dense floating-point or complex tensor, or is a DTensor's or FSDP's.
        RuntimeError: one is not initialised yet.
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
            f"{name} is a parameter of {kind}, which reduces its gradient itself. Leave it out of this wrapper "
            "(_set_params_and_buffers_to_ignore_for_model), or wrap before sharding"
        )
    if not parameter.requires_grad or not parameter.is_leaf:
        raise ValueError(
            f"{name} is not a leaf that requires a gradient, so it will never get one: leave it out, or set "
            "requires_grad=True on a leaf"
        )
    if parameter.layout is not torch.strided or parameter.dtype not in _ACCEPTED:
        raise TypeError(
            f"{name} is {parameter.dtype} with layout {parameter.layout}, expected a dense floating-point or complex "
            "parameter: set requires_grad=False, or leave it out"
        )


def check_comm_hook(state: object) -> None:
    """Refuses a FusedHookState whose wire is exchanged.

    fused_hook issues the later phases behind the last bucket: here that is within backward, under the reducer's lock,
    and the hook is not shown a sparse gradient that no rank has.

    Args:
        state: the comm hook's first argument.

    Raises:
        ValueError: it is such a state.
    """
    config = getattr(state, "config", None)
    if isinstance(config, ReduceConfig):
        config.check_beside("fused_hook on a reducer of fusedreduce", wires=config.named_wires())


def no_views_text(config: ReduceConfig, wire_bytes: int, gradient_bytes: int) -> str:
    """What is logged where gradients are no views of their buckets, with what that takes in memory."""
    return (
        f"gradient_as_bucket_view=True has no effect with wire={config.wire_text!r}: gradients can be views of "
        f"wire='native' only. Wire and gradients take {wire_bytes} bytes at the start of backward and "
        f"{wire_bytes + gradient_bytes} at its end; as views with wire='native' they would take {gradient_bytes} at "
        "both"
    )


def sharded_kind(parameter: torch.Tensor) -> str | None:
    """Returns "DTensor" or "FSDP" if one of these shards and reduces `parameter`, else None."""
    if type(parameter).__name__ == "FlatParameter" or getattr(parameter, "_is_flat_param", False):
        return "FSDP"
    if any(base.__name__ == "DTensor" for base in (*type(parameter).__mro__, *type(parameter.data).__mro__)):
        return "DTensor"
    return None


def sparse_parameters(module: nn.Module) -> set[int]:
    """The ids of the parameters of embeddings with sparse=True, as torch's DDP finds them."""
    return {
        id(parameter)
        for one in module.modules()
        if isinstance(one, nn.Embedding | nn.EmbeddingBag) and one.sparse
        for parameter in one.parameters(recurse=False)
    }


def describe(parameter: torch.Tensor, name: str, sparse: bool) -> str:
    """What must be the same on every rank of a parameter, as text."""
    extra = ", sparse" if sparse else ""
    return (
        f"{name}: sizes {tuple(parameter.shape)}, strides {tuple(parameter.stride())}, {parameter.dtype}, "
        f"{parameter.device.type}{extra}"
    )


def settings(config: ReduceConfig, caps: BucketCaps, flags: dict[str, object]) -> dict[str, object]:
    """The options that must be the same on every rank, by name."""
    listed = hex(hash(caps.listed_bytes)) if len(caps.listed_bytes) > 16 else list(caps.listed_bytes)
    values = config.to_dict()
    values["wire"] = ",".join(map(described, config.allowed))  # one that is given is compared by parameter
    sizes = {"first_bucket_bytes": caps.first_bytes, "bucket_cap_bytes": caps.cap_bytes, "bucket_caps_bytes": listed}
    return {**values, **sizes, "planned_bytes": caps.planned_bytes, **flags}


def agree(
    communicator: Communicator,
    descriptions: Sequence[str],
    settings: dict[str, object],
    device: torch.device,
    problem: str = "",
    wires: Mapping[str, Wire] | None = None,
) -> bool:
    """Compares parameters and settings across ranks. A collective.

    Args:
        communicator: the ranks.
        descriptions: what `describe` returns for each parameter.
        settings: what `settings` returns.
        device: device for the collective's tensors.
        problem: why this rank cannot take part, which the others then report; empty: it can.
        wires: the wire of each parameter, by name.

    Returns:
        Whether all ranks' sums have the same last bits.

    Raises:
        AgreementError: they differ, or a rank had a problem; on every rank.
        CollectiveError: a peer did not answer.
    """
    with comparing(communicator):
        try:
            arithmetic = dispatch.arithmetic(device)
        except dispatch.UnsupportedPairError as error:
            arithmetic, problem = "", problem or str(error)
        return agree_on_parameters(
            communicator,
            descriptions,
            settings,
            device,
            problem,
            arithmetic,
            {name: described(wire) for name, wire in (wires or {}).items()},
        )


def comparing(communicator: Communicator) -> AbstractContextManager[None]:
    """Context of the first collectives of a wrapper, which fail if another rank's first collective is torch's.

    Args:
        communicator: the ranks.
    """
    failed = "comparing model and settings across ranks failed"
    torchs = f"if a rank reduces with torch's own class: {ON_EVERY_MACHINE}"
    return naming_failure(f"{failed} ({torchs})", communicator, but=AgreementError)


def check_encoding(parameters: Iterable[torch.Tensor], wires: Iterable[Wire]) -> None:
    """Checks that each parameter whose wire is encoded is on a device where gradients can be encoded.

    Args:
        parameters: the parameters.
        wires: the wire of each.

    Raises:
        FusedReduceError: one is on a GPU on which the kernels cannot run.
    """
    pairs = zip(parameters, wires, strict=True)
    for device in dict.fromkeys(parameter.device for parameter, wire in pairs if encoding_of(wire)):
        why = encoded.refusal(device)
        if why:
            raise FusedReduceError(f"{device} cannot encode gradients: {why}")


def enter(owner: Owner, parameters: Sequence[torch.Tensor], names: Sequence[str], *, exclusive: bool) -> None:
    """Registers `owner` as a reducer of `parameters`.

    Args:
        owner: the reducer.
        parameters: its parameters.
        names: their names, for messages.
        exclusive: refuse parameters that another exclusive reducer has.

    Raises:
        ValueError: `owner` is exclusive, and so is another open reducer that has one of them.
    """
    for parameter, name in zip(parameters, names, strict=True):
        for other in _owners.get(parameter, ()):
            if exclusive and other.exclusive:
                raise ValueError(
                    f"{name} belongs to another open Reducer, which would average it a second time: close() that one "
                    "first"
                )
    for parameter in parameters:
        owners = _owners.setdefault(parameter, WeakSet())
        for other in owners:
            other.shares_parameters = True
        owners.add(owner)


def shared(owner: Owner, parameters: Sequence[torch.Tensor]) -> bool:
    """Whether another open reducer has one of `parameters` now (nested wrappers)."""
    return any(other is not owner for parameter in parameters for other in _owners.get(parameter, ()))


def averaged_elsewhere(owner: Owner, parameter: torch.Tensor) -> Owner | None:
    """The other open reducer that takes the gradient that `parameter` has got now; None: there is none."""
    others = _owners.get(parameter, ())
    return next((other for other in others if other is not owner and other.takes_gradients), None)


def leave(owner: Owner, parameters: Sequence[torch.Tensor]) -> None:
    """Undoes `enter`."""
    for parameter in parameters:
        _owners.get(parameter, WeakSet()).discard(owner)
