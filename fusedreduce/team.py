"""Team: a module's replicas, what runs them, and what sums their gradients.

    threads      each replica has a worker thread, for its forward, its backward and its part of the reduction
    one thread   forwards one after another in the caller's, one backward for all (on CUDA devices they run at once);
                 a worker thread drives all reducers

Replicas' gradients live from a backward to the reduction at its end. The reducers' own hooks are not used: whatever
outputs take part in a loss, and however often, first all is accumulated, then reduced once.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .comm.local import LocalCommunicator, LocalGroup
from .config import ReduceConfig
from .errors import CollectiveError
from .planning.assignment import MIB, BucketCaps
from .reducer import Reducer
from .replicas import Replicas
from .scatter import Nested
from .workers import Workers, modes_are_active

# Nothing is gained by large buckets where there is no network; small ones stay in the cache from pack to unpack.
_CAPS = BucketCaps(first_bytes=MIB, cap_bytes=4 * MIB)


@dataclass(frozen=True)
class Roots:
    """What a backward begins with on one replica.

    Args:
        tensors: outputs of its forward.
        gradients: theirs.
    """

    tensors: list[torch.Tensor]
    gradients: list[torch.Tensor]


class Team:
    """Replicas of `module` on `devices`.

    Args:
        module: the real one.
        devices: of one type.
        workers: as many as devices, or one, which then drives all reducers.
        config: how gradients travel; op "sum".
        timeout_s: how long replicas wait for each other in a reduction.

    Raises:
        ValueError, TypeError: what cannot be replicated or reduced.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[torch.device],
        workers: Workers,
        config: ReduceConfig,
        timeout_s: float,
        *,
        threads: bool,
    ) -> None:
        self.replicas = Replicas(module, devices)
        self.config = config
        self._devices = tuple(devices)
        self._workers = workers
        self._timeout_s = timeout_s
        self._threads = threads
        self._group: LocalGroup | None = None
        self._communicators: list[LocalCommunicator] = []
        self.reducers: list[Reducer] = []
        self._meet()

    # Forward

    def forward(self, inputs: Sequence[tuple[Nested, list[Any]]]) -> list[Any]:
        """Each replica's output for its arguments, which are moved to its device."""
        jobs = [functools.partial(self._forward, number, *one) for number, one in enumerate(inputs)]
        if self._threads and not modes_are_active():
            return self._workers.run(jobs)
        return [job() for job in jobs]

    def _forward(self, replica: int, nested: Nested, leaves: Sequence[Any]) -> Any:
        device = self._devices[replica]
        with self._named(replica), _on(device):
            here = [one.to(device, non_blocking=True) if isinstance(one, torch.Tensor) else one for one in leaves]
            args, kwargs = nested.rebuild(here)
            return self.replicas.modules[replica](*args, **kwargs)

    # Backward

    def backward(self, roots: Sequence[Roots], *, keep_graph: bool, reduce: bool) -> list[torch.Tensor | None]:
        """Runs each replica's backward, and gives the sum of their parameters' gradients, in the order of `trained`.

        Args:
            roots: per replica; one without tensors takes part with nothing.
            keep_graph: another backward may follow.
            reduce: False: in synchronous mode gradients are summed without the wire's rounding. In others they wait
                for the next backward.

        Raises:
            Exception: what a replica's backward or the reduction has raised. No gradients are left then.
        """
        try:
            if self._threads:
                jobs = [
                    functools.partial(self._backward, number, one, keep_graph=keep_graph, reduce=reduce)
                    for number, one in enumerate(roots)
                ]
                self._workers.run(jobs, self._gave_up)
            else:
                together = Roots(
                    [tensor for one in roots for tensor in one.tensors],
                    [gradient for one in roots for gradient in one.gradients],
                )
                _run_backward(together, keep_graph=keep_graph)
                if reduce and self.reducers:
                    streams = [torch.cuda.current_stream(one) for one in self._devices if one.type == "cuda"]
                    self._workers.run([functools.partial(self._reduce_all, streams)], self._gave_up)
        except BaseException:
            self.drop_gradients()
            self._meet()
            raise
        if not reduce and not self.synchronous:
            return [None] * len(self.replicas.trained)
        found = self._taken() if reduce else self._summed()
        self.drop_gradients()
        return found

    def _backward(self, replica: int, roots: Roots, *, keep_graph: bool, reduce: bool) -> None:
        with self._named(replica), _on(self._devices[replica]):
            _run_backward(roots, keep_graph=keep_graph)
            if reduce and self.reducers:
                reducer = self.reducers[replica]
                _launch(reducer)
                reducer.finalize()

    def _reduce_all(self, streams: Sequence[torch.cuda.Stream]) -> None:
        """All reducers in one thread: none waits before all have launched."""
        with contextlib.ExitStack() as stack:
            for stream in streams:
                stack.enter_context(torch.cuda.stream(stream))
            for reducer in self.reducers:
                _launch(reducer)
            for reducer in self.reducers:
                reducer.finalize()

    def _taken(self) -> list[torch.Tensor | None]:
        """Replica 0's gradients, which are the sums; a parameter that no replica has used has none."""
        return [one.grad for one in self.replicas.trained_by[0]]

    def _summed(self) -> list[torch.Tensor | None]:
        """The sums without a reduction: nothing is rounded to a wire."""
        sums: list[torch.Tensor | None] = []
        with torch.no_grad():
            for each in zip(*self.replicas.trained_by, strict=True):
                total: torch.Tensor | None = None
                for gradient in (one.grad for one in each):
                    if gradient is not None:
                        moved = gradient.to(self._devices[0])
                        total = moved if total is None else total.add_(moved) if not moved.is_sparse else total + moved
                sums.append(total)
        return sums

    def drop_gradients(self) -> None:
        """Replicas have none, as between two backwards."""
        for own in self.replicas.trained_by:
            for one in own:
                one.grad = None

    # Modes

    @property
    def synchronous(self) -> bool:
        """Whether every reduction is finished within its backward."""
        mode = getattr(self.config, "sync_mode", None)
        return mode is None or type(mode).__name__ == "Synchronous"

    def each(self, call: Callable[[int, Reducer], Any]) -> list[Any]:
        """`call(replica, reducer)` for all of them, each in its thread."""
        jobs = [functools.partial(call, number, one) for number, one in enumerate(self.reducers)]
        if self._threads:
            return self._workers.run(jobs, self._gave_up)
        return self._workers.run([lambda: [job() for job in jobs]])[0]

    def close(self) -> None:
        """Gives the reducers and their group up."""
        for reducer in self.reducers:
            reducer.close()
        if self._group is not None:
            self._group.close()

    # Within

    def _meet(self) -> None:
        """New reducers, in a new group: the old ones may be out of step."""
        self.close()
        count = len(self._devices)
        self._group, self.reducers, self._communicators = None, [], []
        if not self.replicas.trained:
            return
        self._group = LocalGroup(count, timeout_s=self._timeout_s, one_thread=not self._threads)
        self._communicators = [self._group.communicator(number) for number in range(count)]
        for number, communicator in enumerate(self._communicators):
            reducer = Reducer(
                self.replicas.trained_by[number],
                communicator,
                self.config,
                names=self.replicas.names,
                sparse=self.replicas.sparse,
                caps=_CAPS,
                # Replicas with other samples may use other parameters. The plan is fixed by this, too.
                find_unused_parameters=True,
                agreed=True,
            )
            reducer.remove_hooks()
            self.reducers.append(reducer)

    def _gave_up(self, replica: int, error: BaseException) -> None:
        if self._communicators:
            self._communicators[replica].abort(error)

    @contextlib.contextmanager
    def _named(self, replica: int) -> Iterator[None]:
        """Errors say which replica raised them."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, CollectiveError):
                error.add_note(f"raised in replica {replica} of {len(self._devices)}, on {self._devices[replica]}")
            raise


def _run_backward(roots: Roots, *, keep_graph: bool) -> None:
    if roots.tensors:
        torch.autograd.backward(roots.tensors, roots.gradients, retain_graph=keep_graph)


def _launch(reducer: Reducer) -> None:
    """Reduces the gradients as they are, in the order of the buckets."""
    reducer.prepare_for_backward()
    for index in reversed(range(len(reducer.parameters))):
        reducer.on_gradient(index)


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
