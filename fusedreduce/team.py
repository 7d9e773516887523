"""Team: a module's replicas, what runs them, and what sums their gradients.

    threads      each replica has a worker thread, for its forward, its backward and its part of the reduction
    one thread   forwards one after another in the caller's, one backward for all (on CUDA devices they run at once);
                 a worker thread drives all reducers

Replicas' gradients live from a backward to the reduction at its end. The reducers' own hooks are not used: whatever
outputs take part in a loss, and however often, first all is accumulated, then reduced once. Where nothing travels (one
device, in the gradients' own dtype) and nothing is to be observed there are no reducers: gradients are added up where
they lie, which gives the same bytes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from .comm.local import LocalCommunicator, LocalGroup
from .config import ReduceConfig
from .errors import CollectiveError, FusedReduceError
from .modes import Asynchronous, FlushReport, SyncMode, is_synchronous
from .planning.assignment import MIB, BucketCaps
from .reducer import Reducer
from .replicas import Replicas
from .scatter import Nested
from .summed import add_up, added_up_sparse, is_sparse, totals
from .workers import Workers, modes_are_active

T = TypeVar("T")

# From so many elements on, adding up is divided among the workers.
_SHARED_NUMEL = 1 << 17
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
        self._threads = threads
        self._check_mode(config.sync_mode)
        self.replicas = Replicas(module, devices)
        self.config = config
        self._devices = tuple(devices)
        self._workers = workers
        self._timeout_s = timeout_s
        self._group: LocalGroup | None = None
        self._communicators: list[LocalCommunicator] = []
        self._reducers: list[Reducer] = []
        self._held: list[list[torch.Tensor | None]] = []
        # What a wrong mode or setting has to say is said now.
        if not self.adds_up:
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
        reduce = reduce and bool(self.replicas.trained)
        by_reducers = reduce and not self.adds_up
        reducers = self.reducers if by_reducers else []
        held: list[list[torch.Tensor | None]] = []  # for the next step, apart from what reducers leave
        try:
            if self._threads:
                jobs = [
                    functools.partial(self._backward, number, one, reducers, keep_graph=keep_graph)
                    for number, one in enumerate(roots)
                ]
                self._workers.run(jobs, self._gave_up)
            else:
                for number in range(len(self._devices)):
                    if reducers:
                        self._arm(number, reducers[number])
                    else:
                        self._take_back(number)
                together = Roots(
                    [tensor for one in roots for tensor in one.tensors],
                    [gradient for one in roots for gradient in one.gradients],
                )
                _run_backward(together, keep_graph=keep_graph)
                if reducers:
                    streams = [torch.cuda.current_stream(one) for one in self._devices if one.type == "cuda"]
                    self._workers.run([functools.partial(self._reduce_all, streams)], self._gave_up)
            if by_reducers:
                found = self._of(0)
            elif self.synchronous:
                found = self._added_up()
            else:
                found = [None] * len(self.replicas.trained)
                held = [self._of(replica) for replica in range(len(self._devices))]
        except BaseException:
            self._held = []
            self._clear()
            self._part()
            raise
        self._held = held
        self._clear()
        return found

    def _backward(self, replica: int, roots: Roots, reducers: Sequence[Reducer], *, keep_graph: bool) -> None:
        with self._named(replica), _on(self._devices[replica]):
            if not reducers:
                self._take_back(replica)
                _run_backward(roots, keep_graph=keep_graph)
                return
            reducer = reducers[replica]
            self._arm(replica, reducer)
            _run_backward(roots, keep_graph=keep_graph)
            _launch(reducer)
            reducer.finalize()

    def _arm(self, replica: int, reducer: Reducer) -> None:
        """Before its backward: what is there now does not belong to the step, but for what was held for it."""
        reducer.prepare_for_backward()
        self._take_back(replica)

    def _take_back(self, replica: int) -> None:
        if self._held:
            for one, gradient in zip(self.replicas.trained_by[replica], self._held[replica], strict=True):
                one.grad = gradient

    def _reduce_all(self, streams: Sequence[torch.cuda.Stream]) -> None:
        """All reducers in one thread: none waits before all have launched."""
        with contextlib.ExitStack() as stack:
            for stream in streams:
                stack.enter_context(torch.cuda.stream(stream))
            for reducer in self.reducers:
                _launch(reducer)
            for reducer in self.reducers:
                reducer.finalize()

    def _added_up(self) -> list[torch.Tensor | None]:
        """The sums, in what the replicas' gradients were, or some of them."""
        device = self._devices[0]
        gradients = [
            [None if one is None else one.to(device) for one in self._of(replica)]
            for replica in range(len(self._devices))
        ]
        if is_sparse(gradients):
            return added_up_sparse(gradients)
        shares = len(self._devices) if self._threads and self.replicas.numel >= _SHARED_NUMEL else 1
        if shares > 1:
            self._workers.run([functools.partial(add_up, gradients, share, shares) for share in range(shares)])
        else:
            add_up(gradients)
        return totals(gradients)

    def _of(self, replica: int) -> list[torch.Tensor | None]:
        return [one.grad for one in self.replicas.trained_by[replica]]

    def drop_gradients(self) -> None:
        """Replicas have none, and keep none for the next step."""
        self._held = []
        self._clear()

    def _clear(self) -> None:
        for own in self.replicas.trained_by:
            for one in own:
                one.grad = None

    # Modes

    @property
    def synchronous(self) -> bool:
        """Whether every reduction is finished within its backward."""
        return is_synchronous(self.config.sync_mode)

    @property
    def adds_up(self) -> bool:
        """Whether gradients are added up where they lie."""
        config = self.config
        plain = config.wire == "native" and not config.grad_stats and config.check_finite == "off"
        return plain and self.synchronous and len(set(self._devices)) == 1

    @property
    def reducers(self) -> list[Reducer]:
        """One per replica."""
        if not self._reducers:
            self._meet()
        return self._reducers

    def steps_under_way(self) -> int:
        """Of which the averages have not come yet."""
        return max((int(one.stats().get("steps_under_way", 0)) for one in self._reducers), default=0)

    def set_sync_mode(self, config: ReduceConfig) -> None:
        """Goes on with another mode; see `Reducer.set_sync_mode`."""
        before = self.config
        self._check_mode(config.sync_mode)
        self.each(lambda _, reducer: reducer.set_sync_mode(config.sync_mode))
        self._part()
        self.config = config
        if not self.adds_up:
            try:
                self._meet()
            except BaseException:
                self.config = before
                raise

    def each(self, call: Callable[[int, Reducer], T]) -> list[T]:
        """`call(replica, reducer)` for all that there are, each in its thread."""
        jobs = [functools.partial(call, number, one) for number, one in enumerate(self._reducers)]
        if self._threads or not jobs:
            return self._workers.run(jobs, self._gave_up) if jobs else []
        return self._workers.run([lambda: [job() for job in jobs]])[0]

    def flush(self, step: Callable[[], None] | None) -> FlushReport:
        """Lands what is under way; the averages are added to the real parameters' gradients.

        Args:
            step: called after each landing.
        """
        if self._held:
            raise FusedReduceError(
                "flush() while gradients of backwards under no_sync() wait here: first run the synchronised backward "
                "that they belong to, or zero_grad() of the DataParallel module"
            )

        if isinstance(self.config.sync_mode, Asynchronous):
            return self._flush_asynchronous(step)

        def landed(replica: int) -> None:
            if replica == 0:
                self._pass_on()
                if step is not None:
                    step()
            for one in self.replicas.trained_by[replica]:
                one.grad = None

        reports = self.each(lambda replica, reducer: reducer.flush(step=functools.partial(landed, replica)))
        return reports[0] if reports else FlushReport()

    def _flush_asynchronous(self, step: Callable[[], None] | None) -> FlushReport:
        """One correction for all that is under way. Reducers then average parameters, which replicas have in common."""
        with torch.no_grad():
            before = [one.detach().clone() for one in self.replicas.trained]
            reports = self.each(lambda _, reducer: reducer.flush())
            for one, value in zip(self.replicas.trained, before, strict=True):
                one.data.copy_(value)  # their mean, but for a rounding
        self._pass_on()
        self._clear()
        if step is not None:
            step()
        return reports[0] if reports else FlushReport()

    def _pass_on(self) -> None:
        """Adds replica 0's gradients to the real parameters'."""
        with torch.no_grad():
            for real, gradient in zip(self.replicas.trained, self._of(0), strict=True):
                if gradient is not None:
                    real.grad = gradient if real.grad is None else real.grad.add_(gradient)

    def close(self) -> None:
        """Gives the reducers and their group up."""
        self._part()

    # Within

    def _check_mode(self, mode: SyncMode) -> None:
        if isinstance(mode, Asynchronous) and not self._threads:
            raise ValueError(
                "sync_mode=Asynchronous() needs a thread per replica, as on CPU: where one thread drives all of them, "
                "none can be ahead of another"
            )

    def _part(self) -> None:
        for reducer in self._reducers:
            reducer.close()
        if self._group is not None:
            self._group.close()
        self._group, self._reducers, self._communicators = None, [], []

    def _meet(self) -> None:
        """New reducers, in a new group: the old ones may be out of step."""
        self._part()
        count = len(self._devices)
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
            self._reducers.append(reducer)

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
