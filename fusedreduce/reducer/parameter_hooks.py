"""Post-hooks on AccumulateGrad nodes: they call the reducer when a gradient has been accumulated.

The hooks are on the node, not on the tensor, so that they run after the user's own post-accumulate hooks, also those
registered later, and see the `.grad` that these leave. A node lives only while something references it, so this module
does. A node references its parameter; nothing here references the reducer strongly.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from ..buckets.parameters import Parameters
from ..errors import FusedReduceError


class TakesGradients:
    """A reducer, or a trace."""

    @staticmethod
    def on_accumulated(owner: weakref.ref[Any], index: int, *_: object) -> None:
        """What autograd calls, on a thread of its own, when the `.grad` of a parameter has been accumulated."""
        alive = owner()
        if alive is not None:
            alive.on_gradient(index)

    def on_gradient(self, index: int) -> None:
        """The `.grad` of parameter `index` has been accumulated."""
        raise NotImplementedError


class ParameterHooks:
    """Hooks on all parameters, for as long as `owner` lives or until `remove()`.

    Args:
        owner: is called; referenced weakly.
        parameters: leaves that require a gradient.

    Attributes:
        nodes: the AccumulateGrad node of each parameter.
    """

    def __init__(self, owner: TakesGradients, parameters: Parameters) -> None:
        self._parameters = parameters
        self._dtypes: list[torch.dtype] | None = [parameter.dtype for parameter in parameters.tensors]
        self._devices = [parameter.get_device() for parameter in parameters.tensors]  # -1: CPU
        self.nodes: list[Node] = [_accumulator(parameter) for parameter in parameters.tensors]
        alive = weakref.ref(owner)
        hook = type(owner).on_accumulated
        handles = [node.register_hook(functools.partial(hook, alive, index)) for index, node in enumerate(self.nodes)]
        self._finalizer = weakref.finalize(owner, _remove, handles)
        self._finalizer.atexit = False

    def allow_other_dtypes(self) -> None:
        """Parameters change their dtype during a step (torch's mixed precision)."""
        self._dtypes = None

    def check_nodes(self) -> None:
        """Checks that no parameter has changed its dtype or moved between devices: its new node has no hook of ours.

        Raises:
            FusedReduceError: a parameter has another dtype or device.
        """
        dtypes, tensors = self._dtypes, self._parameters.tensors
        if dtypes is None:
            return
        now, devices = list(map(_dtype, tensors)), list(map(torch.Tensor.get_device, tensors))
        if now != dtypes or devices != self._devices:
            kinds = zip(now, dtypes, devices, self._devices, strict=True)
            index = next(i for i, (a, b, c, d) in enumerate(kinds) if a != b or c != d)
            where = "cpu" if self._devices[index] < 0 else f"device {self._devices[index]}"
            raise FusedReduceError(
                f"{self._parameters.names[index]} was {dtypes[index]} on {where} when the model was wrapped, and is "
                f"{now[index]} on {tensors[index].device} now: its gradients would not be reduced. Convert and move "
                "the model before you wrap it"
            )

    def check_accumulators(self, numbers: Iterable[int]) -> bool:
        """Checks that gradients of some parameters would reach our hooks. (A conversion there and back is such a case.)

        Args:
            numbers: of the parameters.

        Returns:
            Whether that can be said: not where parameters change their dtype during a step.

        Raises:
            FusedReduceError: a parameter has another AccumulateGrad node than the one that was hooked.
        """
        if self._dtypes is None:
            return False
        for index in numbers:
            node = _accumulator_now(self._parameters.tensors[index])
            if node is not None and node is not self.nodes[index]:
                raise FusedReduceError(
                    f"{self._parameters.names[index]} was converted, moved or set (and maybe back) since the model was "
                    "wrapped, by which a parameter loses its hooks: its gradients are not reduced. Do that before you "
                    "wrap the model, to a copy of it, or wrap it anew"
                )
        return True

    def remove(self) -> None:
        """Removes every hook for good; a second call does nothing."""
        self._finalizer()


def _accumulator(parameter: torch.Tensor) -> Node:
    node = _accumulator_now(parameter)
    assert node is not None
    return node


def _accumulator_now(parameter: torch.Tensor) -> Node | None:
    """The AccumulateGrad node of a parameter; None: it is frozen, or this runs under a transform of torch.func."""
    with torch.inference_mode(False), torch.enable_grad():
        function = parameter.view_as(parameter).grad_fn
    return None if function is None else function.next_functions[0][0]


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


_dtype = operator.attrgetter("dtype")
