"""Unused parameters of a step: found locally by a graph search, and globally by one small all-reduce."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Final

import torch
from torch.autograd.graph import Node, get_gradient_edge
from torch.profiler import record_function
from torch.utils._pytree import SUPPORTED_NODES, tree_leaves

from ..buckets.parameters import Parameters
from ..buckets.step_feature import StepFeature
from ..comm.group import Group
from ..comm.numbers import on_device
from ..comm.protocol import Communicator, Pending
from ..comm.waiting import wait_for

# In place of the outputs of a forward that the caller does not know.
NOT_GIVEN: Final = object()
# Types of values that are no containers: an output may have thousands.
_PLAIN: Final = frozenset({type(None), bool, int, float, str})


def tensors_in(output: object, limit: int | None = None) -> list[torch.Tensor]:
    """The tensors in a forward's output: the output itself, or within containers, level by level.

    Args:
        output: anything. Containers are lists, tuples, dicts and dataclasses, with their subclasses, as torch's DDP
            takes them, and registered pytree nodes. They may contain themselves.
        limit: look at no more values than this, and pass over what raises; None: at all, and let it raise.

    Returns:
        Its tensors.
    """
    todo: list[object] = [output]
    entered: set[int] = set()  # by id: `todo` keeps each value alive
    found: list[torch.Tensor] = []
    for value in todo:  # grows meanwhile
        if type(value) in _PLAIN:
            continue
        try:
            if isinstance(value, torch.Tensor):
                found.append(value)
            elif id(value) not in entered and (limit is None or len(todo) < limit):
                entered.add(id(value))
                todo.extend(islice(_inner(value), None if limit is None else limit - len(todo)))
        except Exception:
            if limit is None:
                raise
    return found


def contains_itself(output: object) -> bool:
    """Whether a container in `output` is within itself, so that a recursive walk does not end."""
    todo: list[tuple[object, bool]] = [(output, False)]
    around: set[int] = set()  # containers that the walk is in
    done: dict[int, object] = {}
    while todo:
        value, left = todo.pop()
        if left:
            around.discard(id(value))
        elif id(value) in around:
            return True
        elif id(value) not in done and not isinstance(value, torch.Tensor) and (inner := [*_inner(value)]):
            around.add(id(value))
            done[id(value)] = value
            todo += [(value, True), *((other, False) for other in inner if type(other) not in _PLAIN)]
    return False


def _inner(value: object) -> Iterable[object]:
    """The values in a container; none if it is not one."""
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, dict):
        return value.values()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return (getattr(value, field.name, None) for field in dataclasses.fields(value))
    return tree_leaves(value, is_leaf=lambda node: node is not value) if type(value) in SUPPORTED_NODES else ()


def unreachable(outputs: Iterable[torch.Tensor], nodes: Sequence[Node]) -> list[int]:
    """Which of `nodes` the autograd graph of `outputs` does not contain, ascending."""
    with record_function("fusedreduce::search_unused_parameters"):
        wanted = {node: index for index, node in enumerate(nodes)}
        missing = set(wanted.values())
        # A parameter that is returned as it is has no grad_fn; its edge leads to its AccumulateGrad node all the same.
        todo = []
        for tensor in outputs:
            if tensor.requires_grad:
                node = get_gradient_edge(tensor).node
                if node in wanted:
                    missing.discard(wanted[node])
                else:
                    todo.append(node)
        seen: set[Node] = set(todo)
        while todo and missing:
            node = todo.pop()
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    if following in wanted:
                        missing.discard(wanted[following])
                    else:
                        todo.append(following)
        return sorted(missing)


class UsedSum:
    """Which parameters got a gradient in one step.

    Args:
        here: per parameter whether this rank has one.
        reduced: int32 per parameter: on how many ranks, once `pending` is done.
        pending: the sum over all ranks.
        communicator: the ranks that it is over.
    """

    def __init__(self, here: bytearray, reduced: torch.Tensor, pending: Pending, communicator: Communicator) -> None:
        self._here = here
        self.reduced = reduced
        self._pending = pending
        self._communicator = communicator
        self._globally: list[bool] | None = None

    def nowhere(self, indices: Sequence[int], label: Callable[[], str]) -> frozenset[int]:
        """The globally unused parameters among `indices`. Waits for the sum if one of them is unused on this rank.

        Args:
            indices: of parameters.
            label: names them in the error, if the sum fails.

        Raises:
            CollectiveError: a peer died, left, or did not answer.
        """
        if all(self._here[index] for index in indices):
            return frozenset()
        if self._globally is None:
            self.complete(lambda: f"the exchange of used parameters between the ranks, for {label()},")
            self._globally = [count > 0 for count in self.reduced.tolist()]
        return frozenset(index for index in indices if not self._globally[index])

    def complete(self, what: str | Callable[[], str] = "the exchange of used parameters between the ranks") -> None:
        """Waits for the sum; raises CollectiveError with `what`."""
        wait_for(self._pending, what, self._communicator)


class UsedMap(StepFeature):
    """Which parameters got a gradient since the last reduction, on this rank and on any.

        marked      by each gradient, under no_sync as well: the next step reduces that one
        summed      behind the last bucket; what no rank has used is left as it is, None or what it was
        cleared     at the end of a step of this rank's own, not of one without inputs (join)

    A static graph's sum is that of its first step, and stays.

    Args:
        parameters: all parameters of the reducer.
        group: the ranks.
        always: exchange it in every step (find_unused_parameters).
        static: every step uses the same parameters equally often (static_graph): it is exchanged in the first step,
            in which gradients are counted, and none is final before the end.

    Attributes:
        fires: of a static graph: how many gradients each parameter gets; None: not known yet.
        counts: how many it has got in the first step so far.
        alone: ranks are in different steps (Asynchronous): nothing is exchanged.
        last: int32 per parameter, on how many ranks it was used in the latest step; None: not known.
    """

    def __init__(self, parameters: Parameters, group: Group, *, always: bool, static: bool) -> None:
        self._parameters = parameters
        self._group = group
        self.always = always
        self.static = static
        self.alone = False
        self.dropped()

    def dropped(self) -> None:
        """Forgets everything."""
        self._used = bytearray(len(self._parameters.tensors))
        self._sum: UsedSum | None = None
        self._first_done = False
        self.last: torch.Tensor | None = None
        self.fires: list[int] | None = None
        self.counts = [0] * len(self._parameters.tensors)

    @property
    def kept(self) -> bool:
        """Whether the map is kept at all."""
        return (self.always or self.static) and not self.alone

    in_use = kept

    @property
    def counting(self) -> bool:
        """Whether this is a static graph's first step."""
        return self.static and self.fires is None

    def asks(self) -> bool:
        """Whether this step sums the map over all ranks."""
        return not self.alone and (self.always or (self.static and not self._first_done))

    def mark(self, index: int) -> None:
        """Marks a parameter as used; also under no_sync, because the next step reduces that gradient."""
        self._used[index] = 1

    def here(self, index: int) -> bool:
        """Whether this rank has marked the parameter."""
        return bool(self._used[index])

    def local(self) -> torch.Tensor:
        """int32 [parameters] on the device, 1 where this rank has a gradient."""
        return on_device(list(self._used), torch.int32, self._parameters.device)

    def behind(self) -> int:
        """Starts the sum over all ranks, where one is due."""
        if not self.asks():
            return 0
        reduced, communicator = self.local(), self._group.communicator
        self._sum = UsedSum(self._used, reduced, communicator.all_reduce(reduced), communicator)
        return 1

    def sum_of_step(self) -> UsedSum:
        """The sum of the launched step; only where the map is kept, else every parameter counts as used."""
        assert self._sum is not None, "the sum was not started"
        return self._sum

    def detach_sum(self) -> UsedSum | None:
        """`sum_of_step` for a step that ends later; None: every parameter counts as used."""
        self._first_done = True
        return self.sum_of_step() if self.kept else None

    def complete(self) -> None:
        """Waits for the sum, so that its buffer may be freed."""
        if self._sum is not None:
            self._sum.complete()
            self.last = self._sum.reduced
        self._first_done = True

    def clear_marks(self) -> None:
        """Clears the marks, at the end of a step of this rank's own."""
        if self.always:
            self._used = bytearray(len(self._parameters.tensors))
            self._sum = None
