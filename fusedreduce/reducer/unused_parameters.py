"""Parameters without a gradient in this step: found locally by a graph search, agreed on by one small all-reduce."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import torch
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils._pytree import tree_leaves

from ..comm.numbers import on_device
from ..comm.protocol import Communicator, Pending
from ..comm.waiting import wait_for


def tensors_in(output: object) -> list[torch.Tensor]:
    """Every tensor in a forward's output: itself, or in any pytree and in dataclasses."""
    if isinstance(output, torch.Tensor):
        return [output]
    found: list[torch.Tensor] = []
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for field in dataclasses.fields(leaf):
                found.extend(tensors_in(getattr(leaf, field.name, None)))
    return found


def unreachable(outputs: Iterable[torch.Tensor], nodes: Sequence[Node]) -> list[int]:
    """Which of `nodes` the autograd graph of `outputs` does not contain, ascending."""
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
        communicator: those.
    """

    def __init__(self, here: bytearray, reduced: torch.Tensor, pending: Pending, communicator: Communicator) -> None:
        self._here = here
        self.reduced = reduced
        self._pending = pending
        self._communicator = communicator
        self._globally: list[bool] | None = None

    def here(self, index: int) -> bool:
        """Whether this rank has one."""
        return bool(self._here[index])

    def nowhere(self, indices: Sequence[int], label: Callable[[], str]) -> frozenset[int]:
        """Those of `indices` that no rank has one for. Waits for the sum, and only where this rank lacks one.

        Args:
            indices: of parameters.
            label: names them, if the sum fails.
        """
        if all(map(self.here, indices)):
            return frozenset()
        if self._globally is None:
            self.complete(lambda: f"asking all ranks which parameters they have used, of {label()},")
            self._globally = [count > 0 for count in self.reduced.tolist()]
        return frozenset(index for index in indices if not self._globally[index])

    def complete(self, what: str | Callable[[], str] = "asking all ranks which parameters they have used") -> None:
        """Waits for the sum; `what` is for the error."""
        wait_for(self._pending, what, self._communicator)


class UsedMap:
    """Which parameters got a gradient since the last reduction: here, and on any rank.

    Args:
        count: number of parameters.
        device: where the backend takes tensors.
        communicator: the ranks to ask.
        always: in every step (find_unused_parameters).
        first: in the first step, whose answer then holds (a static graph).
    """

    def __init__(
        self, count: int, device: torch.device, communicator: Communicator, *, always: bool, first: bool
    ) -> None:
        self._count = count
        self._device = device
        self._communicator = communicator
        self.always = always
        self.first = first
        self.alone = False  # ranks are in different steps: none asks the others
        self.restart()

    def restart(self) -> None:
        """A step was given up on all ranks: nobody has been asked anything."""
        self._used = bytearray(self._count)
        self._sum: UsedSum | None = None
        self._settled = False
        self.last: torch.Tensor | None = None  # per parameter on how many ranks it was used in the latest step

    def set_communicator(self, communicator: Communicator) -> None:
        """Goes on with other ranks, from the next `restart` on."""
        self._communicator = communicator

    @property
    def kept(self) -> bool:
        """Whether gradients are to be noted at all."""
        return (self.always or self.first) and not self.alone

    def asks(self) -> bool:
        """Whether this step sums it over all ranks."""
        return not self.alone and (self.always or (self.first and not self._settled))

    def mark(self, index: int) -> None:
        """Notes a gradient; also under no_sync, whose gradients the next reduction will contain."""
        self._used[index] = 1

    def here(self, index: int) -> bool:
        """Whether this rank has a gradient that is to be reduced."""
        return bool(self._used[index])

    def local(self) -> torch.Tensor:
        """int32 [count] on the device, 1 where this rank has a gradient."""
        return on_device(list(self._used), torch.int32, self._device)

    def start(self) -> None:
        """Starts the sum over all ranks; every rank calls this at the same place."""
        reduced = self.local()
        self._sum = UsedSum(self._used, reduced, self._communicator.all_reduce(reduced), self._communicator)

    def sum_of_step(self) -> UsedSum | None:
        """What is known of the step that is launched; None: every parameter is in use."""
        if not self.kept:
            return None
        assert self._sum is not None, "the sum was not started"
        return self._sum

    def detach_sum(self) -> UsedSum | None:
        """As `sum_of_step`, for a step that ends later."""
        self._settled = True
        return self.sum_of_step()

    def complete(self) -> None:
        """Has the sum done, so that its buffer may go."""
        if self._sum is not None:
            self._sum.complete()
            self.last = self._sum.reduced
        self._settled = True

    def clear_marks(self) -> None:
        """A new step: nothing is used yet."""
        self._used = bytearray(self._count)
        self._sum = None
