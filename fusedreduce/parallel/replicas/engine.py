"""Team: a module's replicas, what runs them, and what sums their gradients.

    threads      each replica has a worker thread, for its forward, its backward and its part of the reduction
    one thread   forwards one after another in the caller's, one backward for all (on CUDA devices they run at once);
                 a worker thread drives all reducers

Replicas' gradients live from a backward to the reduction at its end (peers.py). Where nothing travels (one device, in
the gradients' own dtype) and nothing is to be observed there are no reducers: gradients are added up where they lie,
which gives the same bytes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...buckets.gradient_table import GradientTable
from ...buckets.loss_scale import LossScale
from ...buckets.tensors import any_gradient
from ...config import FlushReport, ReduceConfig
from ...errors import CollectiveError, FusedReduceError
from ...reducer.reducer import Reducer
from .local_sum import add_up, added_up_sparse, is_sparse, totals
from .module_gradients import RealGradients, Scaling
from .peers import Peers, launch
from .replicate import Replicas
from .scatter_gather import Nested
from .thread_pool import Turns, Workers, modes_are_active

# From so many elements on, adding up is divided among the workers.
_SHARED_NUMEL = 1 << 17
_NO_SYNC_WAITS = (
    "while gradients of backwards under no_sync() wait here: first run the synchronised backward that they belong to, "
    "or zero_grad() of the DataParallel module"
)


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
        threads: there is a worker per replica.
        turns: whose it is to use the replicas.
        scaling: the loss scale of the backward that runs.

    Raises:
        ValueError, TypeError: what cannot be replicated or reduced.

    Attributes:
        replicas: the modules.
        peers: their reducers.
        real: the module's own gradients; None where there is nothing to train.
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
        turns: Turns,
        scaling: Scaling,
    ) -> None:
        self._threads = threads
        self._turns = turns
        self._scaling = scaling
        self.replicas = Replicas(module, devices)
        self._devices = tuple(devices)
        self._workers = workers
        self.peers = Peers(self.replicas, devices, workers, config, timeout_s, threads=threads)
        trained = self.replicas.trained
        self.real = RealGradients(trained, self.replicas.names, scaling) if trained else None
        self._attend()
        self._tables = [GradientTable(own) for own in self.replicas.trained_by] if trained else []
        self._held: list[list[torch.Tensor | None]] = []
        self._begun = False

    def turn(self) -> contextlib.AbstractContextManager[bool]:
        """To be entered for a backward; see Turns."""
        return self._turns.take(self._workers)

    @property
    def runs_in_threads(self) -> bool:
        """Whether a forward now would. Else one backward is to be run for all of its replicas."""
        return self._threads and not modes_are_active()

    # Forward

    def forward(self, inputs: Sequence[tuple[Nested, list[Any]]]) -> list[Any]:
        """Each replica's output for its arguments, which are moved to its device."""
        jobs = [functools.partial(self._forward, number, *one) for number, one in enumerate(inputs)]
        if self.runs_in_threads:
            return self._workers.run(jobs)
        return [job() for job in jobs]

    def _forward(self, replica: int, nested: Nested, leaves: Sequence[Any]) -> Any:
        device = self._devices[replica]
        with self._named(replica), _on(device):
            here = [one.to(device, non_blocking=True) if isinstance(one, torch.Tensor) else one for one in leaves]
            args, kwargs = nested.rebuild(here)
            return self.replicas.modules[replica](*args, **kwargs)

    # Backward

    def backward(
        self, roots: Sequence[Roots], *, keep_graph: bool, reduce: bool, together: bool
    ) -> list[torch.Tensor | None]:
        """Runs each replica's backward, and gives the sum of their parameters' gradients, in the order of `trained`.

        A loss scale comes off each replica's gradients before anything else is done to them.

        Args:
            roots: per replica; one without tensors takes part with nothing.
            keep_graph: another backward may follow.
            reduce: False: in synchronous mode gradients are summed without the wire's rounding. In others they wait
                for the next backward.
            together: one backward for all replicas, in this thread: as what it runs may be the forward again (of a
                checkpoint around the module).

        Raises:
            Exception: what a replica's backward or the reduction has raised. No gradients are left then.
        """
        if self._begun:
            self._give_up(None)
        scale = self._scaling.running()
        reducers: Sequence[Reducer] = ()
        if reduce and self.real is not None and not self.peers.adds_up:
            reducers = self.peers.reducers
            if scale is not None:
                self.peers.excuse(self.real.observed.units.scalers())
        held: list[list[torch.Tensor | None]] = []  # for the next step, apart from what reducers leave
        with self._given_up_on_error():
            reduced = self._run_backwards(roots, reducers, scale, keep_graph=keep_graph, together=together)
            if reduced:
                found = self._of(0)
            elif reducers or self.peers.synchronous:
                found = self._added_up()
            else:
                found = [None] * len(self.replicas.trained)
                held = [self._of(replica) for replica in range(len(self._devices))]
        self._held = held
        self._clear()
        if self.real is not None:
            self.real.local_backward_expected = bool(held)
            if not held:
                keeps = reduced and not (self.peers.synchronous or self.peers.asynchronous)
                self.real.ended(scale, self.peers.under_way() if keeps else 0, keeps=keeps)
        return found

    def _run_backwards(
        self,
        roots: Sequence[Roots],
        reducers: Sequence[Reducer],
        scale: LossScale | None,
        *,
        keep_graph: bool,
        together: bool,
    ) -> bool:
        """Whether the reducers have taken the gradients; without reducers, no."""
        replicas = range(len(self._devices))
        # A step that overflows in one replica is skipped by all, so that nothing is contributed to a later one.
        looks = bool(reducers) and scale is not None and self.peers.asynchronous
        if self._threads and not together:
            jobs = [
                functools.partial(
                    self._backward, number, roots[number], reducers, scale, keep_graph=keep_graph, reduce=not looks
                )
                for number in replicas
            ]
            self._workers.run(jobs, self.peers.gave_up)
            if not looks:
                return bool(reducers)
        else:
            for number in replicas:
                self._begin(number, reducers, scale)
            all_roots = Roots(
                [tensor for one in roots for tensor in one.tensors],
                [gradient for one in roots for gradient in one.gradients],
            )
            _run_backward(all_roots, keep_graph=keep_graph)
            for number in replicas:
                with _on(self._devices[number]):
                    self._unscale(number, scale)
        if not reducers or (looks and not self._all_finite()):
            return False
        if self._threads:
            self._workers.run([functools.partial(_reduce, one) for one in reducers], self.peers.gave_up)
        else:
            streams = [torch.cuda.current_stream(one) for one in self._devices if one.type == "cuda"]
            self._workers.run([functools.partial(_reduce_all, reducers, streams)], self.peers.gave_up)
        return True

    def _all_finite(self) -> bool:
        return not any(bool(table.measure().total[2] > 0) for table in self._tables)

    def _backward(
        self,
        replica: int,
        roots: Roots,
        reducers: Sequence[Reducer],
        scale: LossScale | None,
        *,
        keep_graph: bool,
        reduce: bool,
    ) -> None:
        with self._named(replica), _on(self._devices[replica]):
            self._begin(replica, reducers, scale)
            _run_backward(roots, keep_graph=keep_graph)
            self._unscale(replica, scale)
            if reducers and reduce:
                _reduce(reducers[replica])

    def _begin(self, replica: int, reducers: Sequence[Reducer], scale: LossScale | None) -> None:
        """Before its backward: what is there now does not belong to the step, but for what was held for it."""
        own = self.replicas.trained_by[replica]
        for one in own:
            one.grad = None
        if reducers:
            reducers[replica].prepare_for_backward()
        if self._held and scale is None:
            for one, gradient in zip(own, self._held[replica], strict=True):
                one.grad = gradient

    def _unscale(self, replica: int, scale: LossScale | None) -> None:
        """After its backward: in the unit of what was held."""
        if scale is None or self.real is None:
            return
        self._tables[replica].multiply(scale.inverse)
        if self._held:
            with torch.no_grad():
                for one, gradient in zip(self.replicas.trained_by[replica], self._held[replica], strict=True):
                    one.grad = _sum(gradient, one.grad)

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
        if self.real is not None:
            self.real.local_backward_expected = False
        self._clear()

    def _clear(self) -> None:
        for own in self.replicas.trained_by:
            for one in own:
                one.grad = None

    # Modes

    def set_sync_mode(self, config: ReduceConfig) -> None:
        """Goes on with another mode."""
        self._check_nothing_held("set_sync_mode()")
        self.peers.set_sync_mode(config)
        self._attend()

    def flush(self, step: Callable[[], None] | None) -> FlushReport:
        """Lands what is under way; the averages are added to the real parameters' gradients.

        Args:
            step: called after each landing.
        """
        if self._begun:
            self._give_up(None)
        self._check_nothing_held("flush()")
        with self._given_up_on_error():
            return self._flush_asynchronous(step) if self.peers.asynchronous else self._flush_steps(step)

    def _flush_steps(self, step: Callable[[], None] | None) -> FlushReport:

        def landed(replica: int) -> None:
            if replica == 0 and self.real is not None:
                self.real.landed(max(0, len(self.real.late.scales) - 1))
                self._pass_on(self.real)
                if step is not None:
                    step()
            for one in self.replicas.trained_by[replica]:
                one.grad = None

        reports = self.peers.each(lambda replica, reducer: reducer.flush(step=functools.partial(landed, replica)))
        return reports[0] if reports else FlushReport()

    def _flush_asynchronous(self, step: Callable[[], None] | None) -> FlushReport:
        """One correction for all that is under way. Reducers then average parameters, which replicas have in common."""
        with torch.no_grad():
            before = [one.detach().clone() for one in self.replicas.trained]
            reports = self.peers.each(lambda _, reducer: reducer.flush())
            for one, value in zip(self.replicas.trained, before, strict=True):
                one.data.copy_(value)  # their mean, but for a rounding
        if self.real is not None:
            self.real.landed(0)
            self._pass_on(self.real)
        self._clear()
        if step is not None and any_gradient(self.replicas.trained):
            step()
        return reports[0] if reports else FlushReport()

    def _pass_on(self, real: RealGradients) -> None:
        """Adds replica 0's gradients to the real parameters'."""
        real.drop_stepped()
        with torch.no_grad():
            for one, gradient in zip(self.replicas.trained, self._of(0), strict=True):
                one.grad = _sum(one.grad, gradient)

    def state(self) -> dict[str, Any]:
        """What is under way."""
        self._check_nothing_held("reduce_state_dict()")
        state = self.peers.state()
        if state and self.real is not None:
            scales = self.real.late.scales
            state["loss_scales"] = [None if one is None else float(one.scale.item()) for one in scales]
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes on with it."""
        self._check_nothing_held("load_reduce_state_dict()")
        scales = state.get("loss_scales", [])
        known = isinstance(scales, list) and all(one is None or isinstance(one, float) and one > 0 for one in scales)
        if not known:
            raise ValueError(f"a damaged state of a DataParallel: loss_scales are {scales!r}")
        self.peers.load_state(state)
        self._attend()
        if self.real is not None:
            device = self._devices[0]
            self.real.late.scales.extend(None if one is None else _loss_scale(one, device) for one in scales)

    def close(self) -> None:
        """Gives the reducers and their group up."""
        self.peers.part()
        if self.real is not None:
            self.real.attend(late=False)

    # Within

    @contextlib.contextmanager
    def _given_up_on_error(self) -> Iterator[None]:
        """What is begun within it is given up where it raises, steps under way too; an interrupt may leave that to the
        next call."""
        self._begun = True
        try:
            yield
        except BaseException as error:
            self._give_up(error)
            raise
        self._begun = False

    def _give_up(self, error: BaseException | None) -> None:
        self.peers.gave_up(0, error or FusedReduceError("interrupted"))  # nobody waits for one that will not come
        self._workers.settle()
        self.drop_gradients()
        self.peers.part()
        self._attend()
        self._begun = False

    def _attend(self) -> None:
        if self.real is not None:
            self.real.attend(late=not self.peers.synchronous)

    def _check_nothing_held(self, what: str) -> None:
        if self._held:
            raise FusedReduceError(f"{what} {_NO_SYNC_WAITS}")

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


def _reduce(reducer: Reducer) -> None:
    launch(reducer)
    reducer.finalize()


def _reduce_all(reducers: Sequence[Reducer], streams: Sequence[torch.cuda.Stream]) -> None:
    """All reducers in one thread: none waits before all have launched."""
    with contextlib.ExitStack() as stack:
        for stream in streams:
            stack.enter_context(torch.cuda.stream(stream))
        for reducer in reducers:
            launch(reducer)
        for reducer in reducers:
            reducer.launch_late()
        for reducer in reducers:
            reducer.finalize()


def _sum(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one.add_(other) if one.layout is torch.strided else one + other


def _loss_scale(value: float, device: torch.device) -> LossScale:
    return LossScale.of(torch.tensor([value], dtype=torch.float32, device=device))


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
