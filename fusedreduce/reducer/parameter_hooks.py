"""Post-hooks on AccumulateGrad nodes: how the reducer learns that a gradient is there.

On the node, not on the tensor: the hook runs after the user's own post-accumulate hooks, also those registered later,
and so sees what they made of `.grad`. A node lives only while somebody holds it, so it is held here; it holds its
parameter, and nothing here holds the reducer.
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

# Nodes of which one is asked for in each forward until the old graphs are gone.
_ASKED = 4
_HooksOfNode: TypeAlias = Callable[[], Mapping[int, object] | None]


class ParameterHooks:
    """Hooks on some or all parameters, for as long as `owner` lives or until `remove()`.

    A hook costs 3 to 8 us when it fires and 4 us to install.

    Args:
        owner: held weakly.
        parameters: leaves that require a gradient.
        on_gradient: called as on_gradient(owner, index) on an autograd thread when that `.grad` has been accumulated.
    """

    def __init__(
        self, owner: object, parameters: Sequence[torch.Tensor], on_gradient: Callable[[Any, int], None]
    ) -> None:
        self._parameters = parameters
        self._dtypes: list[torch.dtype] | None = [parameter.dtype for parameter in parameters]
        self._devices = [parameter.device for parameter in parameters]
        self.nodes: list[Node] = [_accumulator(parameter) for parameter in parameters]
        # Nodes whose hook was removed, each with its post-hooks.
        self._worn: dict[int, _HooksOfNode] = {}
        self._forwards = 0
        self._owner = weakref.ref(owner)
        self._on_gradient = on_gradient
        self._handles: dict[int, RemovableHandle] = {}
        self._finalizer = weakref.finalize(owner, _remove, self._handles)
        self._finalizer.atexit = False
        self.hook_all()

    def hook_all(self) -> None:
        """Every parameter tells."""
        self.hook(range(len(self.nodes)))

    def hook(self, indices: Iterable[int]) -> None:
        """From now on these parameters have a hook, and no others; may be called while a backward runs."""
        wanted = set(indices)
        for index in [index for index in self._handles if index not in wanted]:
            handle = self._handles.pop(index)
            handle.remove()
            self._worn[index] = handle.hooks_dict_ref
        for index in wanted.difference(self._handles):
            self._handles[index] = self.nodes[index].register_hook(_hook(self._owner, index, self._on_gradient))
            self._worn.pop(index, None)

    def renew_nodes(self, on_stream: Callable[[int], AbstractContextManager[object] | None]) -> None:
        """Between two graphs: takes new nodes where hooks were removed, and does nothing while old graphs live.

        A node that has had a hook goes through Python in every backward from then on, hooked or not (1.4 us). It ends
        with the last graph that it is part of: the loss of the step before keeps one, in some training loops.

        Args:
            on_stream: within it the current stream is the one that the parameter's node had, which a new one keeps for
                life as well; None: not known.
        """
        if not self._worn or not _makes_nodes():
            return
        # Some in turn, as a graph that is kept for long may hold one; not all, as asking leaves a trace as well.
        asked = list(itertools.islice(self._worn, _ASKED))
        self._forwards += 1
        if self._renew(asked[self._forwards % len(asked)], on_stream):
            for index in self._worn:
                self._renew(index, on_stream)
            self._worn.clear()

    def _renew(self, index: int, on_stream: Callable[[int], AbstractContextManager[object] | None]) -> bool:
        """Lets a node go and takes what is the parameter's node then; whether that is another one.

        A node stays with hooks of others, who may count on its being held here, and where the parameter is frozen.
        """
        parameter, within = self._parameters[index], on_stream(index)
        if within is None or not parameter.requires_grad or self._worn[index]() or _has_prehooks(self.nodes[index]):
            return False
        _notes(self.nodes[index])[_WORN] = True
        self.nodes[index] = self.nodes[index - 1]  # any other, so that this one is held by graphs alone
        with within:
            self.nodes[index] = _accumulator(parameter)
        return _WORN not in _notes(self.nodes[index])

    def users_hook_gradients(self) -> bool:
        """Whether a user's hook may take a gradient away before ours would see it (30 ns per parameter)."""
        return any(map(_post_accumulate_grad_hooks, self._parameters))

    def allow_other_dtypes(self) -> None:
        """Parameters change their dtype during a step (torch's mixed precision)."""
        self._dtypes = None

    @property
    def dtypes_change(self) -> bool:
        """Whether parameters may change their dtype."""
        return self._dtypes is None

    def check_nodes(self, names: Sequence[str]) -> None:
        """A parameter whose dtype or device has changed has a new AccumulateGrad node, which nobody hooks.

        Args:
            names: of the parameters, for the message.

        Raises:
            FusedReduceError: there is one.
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
                f"{names[index]} was {dtypes[index]} on {self._devices[index]} when it was wrapped and is "
                f"{now[index]} on {devices[index]} now: its gradients would not be reduced. Convert and move a model "
                "before wrapping it"
            )

    def remove(self) -> None:
        """Removes every hook for good; a second call does nothing."""
        self._finalizer()


def _notes(node: Node) -> dict[str, object]:
    """What is kept with a node for as long as it lives."""
    notes: Any = node.metadata  # torch's stub takes the property for a method
    found: dict[str, object] = notes
    return found


def _makes_nodes() -> bool:
    """Whether an operator called now makes a node of the ordinary graph, and nobody else sees it."""
    return not (
        torch.is_inference_mode_enabled()
        or torch._C._functorch.peek_interpreter_stack() is not None  # torch.func
        or torch._C._len_torch_dispatch_stack()
        or torch._C._get_tracing_state() is not None
    )


def _has_prehooks(node: Node) -> bool:
    handle = node.register_prehook(_nothing)  # the only way to see the others
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


_WORN = "fusedreduce: has had a hook"
_post_accumulate_grad_hooks = operator.attrgetter("_post_accumulate_grad_hooks")
