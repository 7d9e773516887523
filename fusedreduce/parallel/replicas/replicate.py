"""Replicas: shallow copies of a module, one per device, that compute with its parameters.

A copy (shell) has the attributes that the user's module has when a forward begins, and parameters of its own. On the
module's device these are other Parameter objects on the same memory, with the same version counter: they see what an
optimizer writes at once, and have gradients of their own. On other devices they are copied in place before each
forward. So are buffers, except those of replica 0, which are the module's own. Other attributes that a forward sets are
lost with the next forward; module hooks are shared, and run once per replica. All of that is as in
torch.nn.DataParallel.
"""

from __future__ import annotations

import copyreg
import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from ...errors import FusedReduceError, shortened
from ...reducer import validation

_NAMES_SHOWN = 8
_CONTAINERS = (list, tuple)
_MISSING = object()


@dataclass
class _Layer:
    """One submodule of the user's module, and its shells.

    Args:
        real: the user's submodule.
        shells: its copies, by replica.
        parameters: its parameters when the shells were made.
        modules: its children then.
        buffers: names of its buffers then.
        slots: names of attributes declared in __slots__.
    """

    real: nn.Module
    shells: list[nn.Module] = field(default_factory=list)
    parameters: list[nn.Parameter | None] = field(default_factory=list)
    modules: list[nn.Module | None] = field(default_factory=list)
    buffers: list[str] = field(default_factory=list)
    slots: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.slots = copyreg._slotnames(type(self.real))  # type: ignore[attr-defined]
        self.parameters = list(self.real._parameters.values())
        self.modules = list(self.real._modules.values())
        self.buffers = list(self.real._buffers)

    def is_unchanged(self) -> bool:
        """Whether the submodule still has the same parameters, children and buffer names."""
        real = self.real
        return (
            type(real) is type(self.shells[0])
            and _same(real._parameters.values(), self.parameters)
            and _same(real._modules.values(), self.modules)
            and list(real._buffers) == self.buffers
        )


class Replicas:
    """One replica of `module` per device.

    Args:
        module: the user's, on the first device as a whole.
        devices: of one type.

    Raises:
        ValueError: a module that `check_module` refuses.
        TypeError: a TorchScript module.

    Attributes:
        devices: of the replicas.
        modules: the replicas.
        trained: the module's parameters that require a gradient, without repetition.
        names: their names.
        sparse: whether each one's gradient is sparse.
        numel: their elements in total.
        trained_by: per replica, its parameters that correspond to `trained`.
    """

    def __init__(self, module: nn.Module, devices: Sequence[torch.device]) -> None:
        check_module(module, devices[0])
        self.devices = tuple(devices)
        named = dict(module.named_parameters())
        self._parameters = list(named.values())
        self._names = list(named)
        self._kinds = [_kind(one) for one in self._parameters]
        self._shared = [device == devices[0] for device in devices]
        self._layers = [_Layer(one) for one in module.modules()]
        self._own: list[list[nn.Parameter]] = []
        # Per replica: its parameters and submodules, by the id of the user's that they replace.
        self._mine: list[dict[int, Any]] = []
        for device in devices:
            own = [_own_parameter(one, device) for one in self._parameters]
            mine: dict[int, Any] = {id(one): other for one, other in zip(self._parameters, own, strict=True)}
            for layer in self._layers:
                shell = type(layer.real).__new__(type(layer.real))
                layer.shells.append(shell)
                mine[id(layer.real)] = shell
                vars(shell).update(_buffers={})
            self._own.append(own)
            self._mine.append(mine)
        self.modules = list(self._layers[0].shells)
        trained = [number for number, one in enumerate(self._parameters) if one.requires_grad]
        self.trained = tuple(self._parameters[number] for number in trained)
        self.numel = sum(one.numel() for one in self.trained)
        self.names = tuple(self._names[number] for number in trained)
        sparse = validation.sparse_parameters(module)
        self.sparse = tuple(id(one) in sparse for one in self.trained)
        self.trained_by = [tuple(own[number] for number in trained) for own in self._own]

    def update_from_module(self, *, broadcast_buffers: bool) -> bool:
        """Updates the replicas from the module, before a forward.

        Args:
            broadcast_buffers: copy the module's buffers to all replicas.

        Returns:
            False if that is impossible, because parameters were replaced, frozen or converted, or modules added: new
            replicas are needed then.
        """
        if [_kind(one) for one in self._parameters] != self._kinds:
            return False
        if not all(layer.is_unchanged() for layer in self._layers):
            return False
        self._update_parameters()
        self._update_buffers(broadcast_buffers=broadcast_buffers)
        for replica, mine in enumerate(self._mine):
            for layer in self._layers:
                _fill(layer.shells[replica], layer.real, mine)
                for name in layer.slots:
                    _fill_slot(layer.shells[replica], layer.real, name, mine)
        return True

    def keep_buffers(self) -> None:
        """After a forward: assigns buffers that replica 0 has replaced to the user's module."""
        for layer in self._layers:
            for name in layer.buffers:
                made = layer.shells[0]._buffers.get(name)
                if made is not layer.real._buffers[name]:
                    layer.real._buffers[name] = made

    def gradients_of(self, replica: int) -> list[torch.Tensor | None]:
        """What a replica's trained parameters have in `.grad`."""
        return [one.grad for one in self.trained_by[replica]]

    def clear_gradients(self) -> None:
        """Sets every replica's gradients to None."""
        for own in self.trained_by:
            for one in own:
                one.grad = None

    def verify(self) -> None:
        """Compares every replica's parameters with the module's, byte for byte.

        Raises:
            FusedReduceError: some differ, with their names and replicas.
        """
        wrong = [
            f"{name} on replica {replica} ({self.devices[replica]})"
            for replica, own in enumerate(self._own)
            for name, real, other in zip(self._names, self._parameters, own, strict=True)
            if not _same_bytes(real, other)
        ]
        if wrong:
            raise FusedReduceError(f"replicas differ from the module: {shortened(wrong, _NAMES_SHOWN)}")

    def _update_parameters(self) -> None:
        real = list(map(torch.Tensor.data_ptr, self._parameters))
        for own, shared in zip(self._own, self._shared, strict=True):
            if not shared:
                with torch.no_grad():
                    # By .data, without raising versions: a graph yet to run backward may have saved these tensors.
                    torch._foreach_copy_([one.data for one in own], list(self._parameters))
            elif list(map(torch.Tensor.data_ptr, own)) != real:
                for one, parameter in zip(own, self._parameters, strict=True):
                    if one.data_ptr() != parameter.data_ptr():
                        one.data = parameter.detach()

    def _update_buffers(self, *, broadcast_buffers: bool) -> None:
        into: list[torch.Tensor] = []
        source: list[torch.Tensor] = []
        for layer in self._layers:
            for name in layer.buffers:
                buffer = layer.real._buffers[name]
                for replica, shell in enumerate(layer.shells):
                    held, device = shell._buffers, self.devices[replica]
                    known = held.get(name)
                    if replica == 0 or buffer is None:
                        held[name] = buffer
                    elif known is None or not _alike(known, buffer):
                        with torch.inference_mode(False):  # it outlives this forward
                            held[name] = buffer.detach().to(device, copy=True)
                    elif broadcast_buffers:
                        # By .data, as parameters above: batch norm's backward checks versions.
                        into.append(known.data)
                        source.append(buffer)
        if into:
            with torch.no_grad():
                torch._foreach_copy_(into, source)


def check_module(module: nn.Module, device: torch.device) -> None:
    """Raises if a module cannot be replicated.

    Args:
        module: the user's.
        device: where all of its tensors must be.

    Raises:
        ValueError: a tensor that is not initialised, or sharded, or not on `device` (but on "meta", say).
        TypeError: a TorchScript module.
    """
    for name, one in module.named_modules():
        if isinstance(one, torch.jit.ScriptModule):
            raise TypeError(f"{name or 'the module'} is a TorchScript module, which cannot be replicated")
    named: Iterator[tuple[str, torch.Tensor]]
    named = itertools.chain(module.named_parameters(), module.named_buffers())
    for name, tensor in named:
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            raise ValueError(f"{name} is not initialised and has no shape: run a forward of the module first")
        sharded = validation.sharded_kind(tensor)
        if sharded is not None:
            raise ValueError(f"{name} is a {sharded}, which is sharded already and cannot be replicated")
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, expected the first device, {device}")


def _fill(shell: nn.Module, real: nn.Module, mine: dict[int, Any]) -> None:
    """Copies the submodule's attributes to a shell, replacing parameters and modules by the replica's."""
    buffers = shell._buffers
    for name in buffers.keys() - real._buffers.keys():
        del buffers[name]
    attributes = vars(shell)
    attributes.clear()
    attributes.update(vars(real))
    for name, value in vars(real).items():
        attributes[name] = _translated(value, mine)
    attributes["_parameters"] = {name: _of(one, mine) for name, one in real._parameters.items()}
    attributes["_modules"] = {name: _of(one, mine) for name, one in real._modules.items()}
    attributes["_buffers"] = buffers


def _fill_slot(shell: nn.Module, real: nn.Module, name: str, mine: dict[int, Any]) -> None:
    """Copies an attribute that the class declares in __slots__."""
    value = getattr(real, name, _MISSING)
    if value is not _MISSING:
        object.__setattr__(shell, name, _translated(value, mine))
    elif getattr(shell, name, _MISSING) is not _MISSING:
        object.__delattr__(shell, name)


def _translated(value: Any, mine: dict[int, Any]) -> Any:
    """The replica's counterpart of an attribute's value."""
    if id(value) in mine:
        return mine[id(value)]
    if type(value) in _CONTAINERS and any(id(one) in mine for one in value):
        return type(value)(mine.get(id(one), one) for one in value)
    return value


def _of(one: object, mine: dict[int, Any]) -> Any:
    return None if one is None else mine[id(one)]


def _own_parameter(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    # A detached tensor shares the version counter too.
    data = parameter.detach()
    made = nn.Parameter(data if data.device == device else data.to(device), requires_grad=parameter.requires_grad)
    for name, value in vars(parameter).items():
        setattr(made, name, value)
    return made


def _same(values: Any, known: Any) -> bool:
    return len(values) == len(known) and all(map(operator.is_, values, known))


def _kind(parameter: torch.Tensor) -> tuple[object, ...]:
    return parameter.dtype, parameter.device, parameter.requires_grad, parameter.shape, parameter.stride()


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype is other.dtype


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype is not other.dtype:
        return False
    first, second = (tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(first, second)
