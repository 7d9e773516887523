"""Post-hooks on AccumulateGrad nodes: they call the reducer when a gradient has been accumulated.

The hooks are on the node, not on the tensor, so that they run after the user's own post-accumulate hooks, also those
registered later, and see the `.grad` that these leave. A node lives only while something references it, so this module
does. A node references its parameter; nothing here references the reducer strongly.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from ..errors import FusedReduceError

# Each forward tries to renew one of so many nodes, in turn, until the old graphs are gone.
_PROBED_NODES = 4
_HooksOfNode: TypeAlias = Callable[[], Mapping[int, object] | None]


class ParameterHooks:
    """Hooks on some or all parameters, for as long as `owner` lives or until `remove()`.

    A hook costs 3 to 8 us when it fires and 4 us to install.

    Args:
        owner: the reducer; referenced weakly.
        parameters: leaves that require a gradient.
        on_gradient: called as on_gradient(owner, index) on an autograd thread when that `.grad` has been accumulated.

    Attributes:
        nodes: the AccumulateGrad node of each parameter.
    """

    def __init__(
        self, owner: object, parameters: Sequence[torch.Tensor], on_gradient: Callable[[Any, int], None]
    ) -> None:
        self._parameters = parameters
        self._dtypes: list[torch.dtype] | None = [parameter.dtype for parameter in parameters]
        self._devices = [parameter.device for parameter in parameters]
        self.nodes: list[Node] = [_accumulator(parameter) for parameter in parameters]
        # By parameter, nodes whose hook was removed, and what gives their remaining post-hooks.
        self._used_nodes: dict[int, _HooksOfNode] = {}
        self._forwards = 0
        self._owner = weakref.ref(owner)
        self._on_gradient = on_gradient
        self._handles: dict[int, RemovableHandle] = {}
        self._finalizer = weakref.finalize(owner, _remove, self._handles)
        self._finalizer.atexit = False
        self.hook_all()

    def hook_all(self) -> None:
        """Hooks every parameter."""
        self.hook(range(len(self.nodes)))

    def hook(self, indices: Iterable[int]) -> None:
        """Hooks these parameters and no others; may be called while a backward runs."""
        wanted = set(indices)
        for index in [index for index in self._handles if index not in wanted]:
            handle = self._handles.pop(index)
            handle.remove()
            self._used_nodes[index] = handle.hooks_dict_ref
        for index in wanted.difference(self._handles):
            self._handles[index] = self.nodes[index].register_hook(_hook(self._owner, index, self._on_gradient))
            self._used_nodes.pop(index, None)

    def renew_nodes(self, on_stream: Callable[[int], AbstractContextManager[object] | None]) -> None:
        """Replaces nodes whose hooks were removed, between two graphs; does nothing while old graphs live.

        A node that has had a hook calls into Python in every later backward, hooked or not (1.4 us). It is freed with
        the last graph that contains it, which the loss of the step before keeps alive in some training loops.

        Args:
            on_stream: gives, by parameter, a context in which the stream of its node is current, because a new node
                keeps the current stream for life; None: the stream is not known.
        """
        if not self._used_nodes or not _makes_nodes():
            return
        # A few in turn, because a graph that is kept for long may contain one of them. Not all of them, because probing
        # leaves something on a node as well.
        asked = list(itertools.islice(self._used_nodes, _PROBED_NODES))
        self._forwards += 1
        if self._renew(asked[self._forwards % len(asked)], on_stream):
            for index in self._used_nodes:
                self._renew(index, on_stream)
            self._used_nodes.clear()

    def _renew(self, index: int, on_stream: Callable[[int], AbstractContextManager[object] | None]) -> bool:
        """Drops the reference to a parameter's node and gets its node again; returns whether that is a new one.

        A node is kept where others have hooked it, because they may rely on this reference, and where the parameter is
        frozen.
        """
        parameter, within = self._parameters[index], on_stream(index)
        if (
            within is None
            or not parameter.requires_grad
            or self._used_nodes[index]()
            or _has_prehooks(self.nodes[index])
        ):
            return False
        _notes(self.nodes[index])[_HAD_HOOK] = True
        self.nodes[index] = self.nodes[index - 1]  # any other: this one is then referenced by graphs alone
        with within:
            self.nodes[index] = _accumulator(parameter)
        return _HAD_HOOK not in _notes(self.nodes[index])

    def users_hook_gradients(self) -> bool:
        """Whether a user's hook may set a gradient to None before ours sees it (30 ns per parameter)."""
        return any(map(_post_accumulate_grad_hooks, self._parameters))

    def allow_other_dtypes(self) -> None:
        """Parameters change their dtype during a step (torch's mixed precision)."""
        self._dtypes = None

    @property
    def dtypes_change(self) -> bool:
        """Whether parameters may change their dtype."""
        return self._dtypes is None

    def check_nodes(self, names: Sequence[str]) -> None:
        """Checks that no parameter has changed its dtype or device, and so has a new node without our hook.

        Args:
            names: of the parameters, for the message.

        Raises:
            FusedReduceError: a parameter has another dtype or device.
        """
        dtypes = self._dtypes
        if dtypes is None:
            return
        now = [parameter.dtype for parameter in self._parameters]
        devices = [parameter.device for parameter in self._parameters]
        if now != dtypes or devices != self._devices:
            kinds = zip(now, dtypes, devices, self._devices, strict=True)
            index = next(i for i, (a, b, c, d) in enumerate(kinds) if a != b or c != d)
            raise FusedReduceError(
                f"{names[index]} was {dtypes[index]} on {self._devices[index]} when the model was wrapped, and is "
                f"{now[index]} on {devices[index]} now: its gradients would not be reduced. Convert and move the model "
                "before you wrap it"
            )

    def remove(self) -> None:
        """Removes every hook for good; a second call does nothing."""
        self._finalizer()


def _notes(node: Node) -> dict[str, object]:
    """A node's metadata, which lives as long as the node."""
    metadata: Any = node.metadata  # torch's stub takes the property for a method
    notes: dict[str, object] = metadata
    return notes


def _makes_nodes() -> bool:
    """Whether an operator called now makes a node of the ordinary graph, and no mode or tracer records it."""
    return not (
        torch.is_inference_mode_enabled()
        or torch._C._functorch.peek_interpreter_stack() is not None  # torch.func
        or torch._C._len_torch_dispatch_stack()
        or torch._C._get_tracing_state() is not None
    )


def _has_prehooks(node: Node) -> bool:
    handle = node.register_prehook(_nothing)  # only a handle shows the others
    handle.remove()
    return bool(handle.hooks_dict_ref())


def _nothing(_gradients: object) -> None:
    """A hook that changes nothing."""


def _accumulator(parameter: torch.Tensor) -> Node:
    with torch.enable_grad():
        function = parameter.view_as(parameter).grad_fn
    assert function is not None
    node = function.next_functions[0][0]
    assert node is not None
    return node


def _hook(owner: weakref.ref[Any], index: int, on_gradient: Callable[[Any, int], None]) -> Callable[..., None]:
    def hook(_inputs: object, _outputs: object) -> None:
        alive = owner()
        if alive is not None:
            on_gradient(alive, index)

    return hook


def _remove(handles: dict[int, RemovableHandle]) -> None:
    for handle in handles.values():
        handle.remove()
    handles.clear()


_HAD_HOOK = "fusedreduce: has had a hook"
_post_accumulate_grad_hooks = operator.attrgetter("_post_accumulate_grad_hooks")
