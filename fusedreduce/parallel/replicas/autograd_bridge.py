"""Joined: one autograd node around all replicas, so that the graph outside sees one module with its real parameters.

    forward      gathers the replicas' outputs; each replica keeps a graph of its own, with its own leaves
    backward     scatters the gradient and runs each replica's graph; the gradient of a real parameter is the sum over
                 replicas

Outside of this node autograd works as usual: accumulation, hooks on parameters, several forwards in one loss, several
losses of one forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .runner import ReplicaRunner, Roots
from .scatter_gather import Nested, joined, parts_of


@dataclass(frozen=True)
class Output:
    """One output of the joined node.

    Args:
        replicas: numbers of the replicas whose outputs it is made of.
        tensors: these outputs.
        device: where it is gathered.
    """

    replicas: Sequence[int]
    tensors: list[torch.Tensor]
    device: torch.device


class ForwardRun:
    """A forward of all replicas, whose outputs `connect` makes part of the graph outside.

    Args:
        runner: the replicas.
        inputs: see `ReplicaRunner.forward`.

    Attributes:
        records_graph: whether a graph is recorded.
        together: see `ReplicaRunner.backward`.
        outputs: by replica.
        leaves: per replica, detached copies of its inputs that require a gradient, which it was given in their place.
    """

    def __init__(self, runner: ReplicaRunner, inputs: Sequence[tuple[Nested, list[Any]]]) -> None:
        enabled = torch.is_grad_enabled()
        self._sources: list[torch.Tensor] = []  # inputs that require a gradient, in the outer graph
        self.leaves: list[list[torch.Tensor]] = []
        for _, leaves in inputs:
            mine = []
            for at, leaf in enumerate(leaves):
                if enabled and isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    self._sources.append(leaf)
                    leaves[at] = leaf.detach().requires_grad_()
                    mine.append(leaves[at])
            self.leaves.append(mine)
        self.runner = runner
        self.records_graph = enabled and bool(runner.replicas.trained or self._sources)
        self.together = not runner.runs_in_threads
        self.outputs = runner.forward(inputs)

    def connect(
        self,
        graph: Sequence[tuple[int, Output]],
        results: list[Any],
        dim: int,
        weights: Sequence[float] | None,
        *,
        reduce: bool,
    ) -> None:
        """Ends the forward: connects outputs to the outer graph.

        Args:
            graph: outputs that require a gradient, and the position of each in `results`.
            results: the connected outputs are stored there.
            dim: see `Call`.
            weights: see `Call`.
            reduce: see `ReplicaRunner.backward`.
        """
        self.runner.replicas.keep_buffers()
        if graph:
            call = Call(self, [one for _, one in graph], dim, weights, reduce=reduce)
            made = Joined.apply(call, *self.runner.replicas.trained, *self._sources)
            for (at, _), tensor in zip(graph, made, strict=True):
                results[at] = tensor


class Call:
    """What the node knows of its forward, and its backward.

    Args:
        run: the forward.
        outputs: those that require a gradient.
        dim: dimension along which outputs are joined.
        weights: per replica, its share of all samples, by which gradients are multiplied; None: outputs are joined.
        reduce: see `ReplicaRunner.backward`.
    """

    def __init__(
        self, run: ForwardRun, outputs: list[Output], dim: int, weights: Sequence[float] | None, *, reduce: bool
    ) -> None:
        self.runner = run.runner
        self.outputs = outputs
        self._leaves = run.leaves
        self._dim = dim
        self._weights = weights
        self._reduce = reduce
        self._together = run.together
        self._count = len(run.leaves)
        self._freed = [False] * self._count

    def gathered(self) -> list[torch.Tensor]:
        """The gathered outputs."""
        tensors = []
        for one in self.outputs:
            # Detached: the replicas' graphs must not be part of the outer graph.
            tensors.append(joined([tensor.detach() for tensor in one.tensors], self._dim, one.device))
        return tensors

    def backward(
        self, gradients: Sequence[torch.Tensor | None], *, keep_graph: bool
    ) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
        """Runs the replicas' backwards.

        Args:
            gradients: of each output; None: it has none.
            keep_graph: another backward may follow.

        Returns:
            Gradients of the real parameters, and of the inputs that require one.

        Raises:
            RuntimeError: a replica's graph has been freed by an earlier backward.
            FusedReduceError: called within the replicas' own forward or backward.
        """
        with self.runner.turn():
            return self._backward(gradients, keep_graph=keep_graph)

    def _backward(
        self, gradients: Sequence[torch.Tensor | None], *, keep_graph: bool
    ) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
        roots = [Roots([], []) for _ in range(self._count)]
        for one, gradient in zip(self.outputs, gradients, strict=True):
            if gradient is not None:
                parts = parts_of(gradient, one.tensors, self._dim)
                for replica, tensor, part in zip(one.replicas, one.tensors, parts, strict=True):
                    self._add(roots[replica], replica, tensor, part)
        used = [bool(one.tensors) for one in roots]
        if any(now and before for now, before in zip(used, self._freed, strict=True)):
            raise RuntimeError(
                "Trying to backward through the graph of a DataParallel module a second time (or to directly access "
                "saved tensors after they have already been freed). Specify retain_graph=True if you need to backward "
                "through it a second time"
            )
        try:
            summed = self.runner.backward(roots, keep_graph=keep_graph, reduce=self._reduce, together=self._together)
            found = [leaf.grad for leaves in self._leaves for leaf in leaves]
        finally:
            for leaves in self._leaves:
                for leaf in leaves:
                    leaf.grad = None
        if not keep_graph:
            self._freed = [before or now for before, now in zip(self._freed, used, strict=True)]
        return summed, found

    def _add(self, roots: Roots, replica: int, tensor: torch.Tensor, gradient: torch.Tensor) -> None:
        if not tensor.requires_grad:
            return
        gradient = gradient.to(tensor.device, non_blocking=True)
        if self._weights is not None and self._weights[replica] != 1.0:
            gradient = gradient * self._weights[replica]
        roots.tensors.append(tensor)
        roots.gradients.append(gradient)


class Joined(torch.autograd.Function):
    """The autograd node. Its inputs are a Call, the real parameters, and the inputs that require a gradient."""

    @staticmethod
    def forward(ctx: Any, call: Call, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns the gathered outputs."""
        ctx.call = call
        ctx.joins = 1 + len(call.runner.replicas.trained)  # number of inputs that are not the user's
        ctx.set_materialize_grads(False)
        return tuple(call.gathered())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Runs the replicas' own graphs.

        Raises:
            RuntimeError: create_graph=True; or a replica's graph has been freed.
            FusedReduceError: called within the replicas' own forward or backward.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                "backward with create_graph=True reached a DataParallel module, whose replicas' gradients are summed "
                "outside of autograd, so that they have no gradients themselves. Use .module for this loss"
            )
        keep_graph = bool(torch._C._autograd._get_current_graph_task_keep_graph())
        summed, of_inputs = ctx.call.backward(gradients, keep_graph=keep_graph)
        return (None, *summed, *of_inputs)
