"""Engine: runs forward and backward of a module's replicas, and sums their gradients.

    threads      each replica has a worker thread, for its forward, its backward and its part of the reduction
    one thread   forwards run one after another in the caller's thread, then one backward for all (CUDA devices work at
                 once); a worker thread drives all reducers

Replicas have gradients from a backward to the reduction at its end (peers.py). If nothing has to be sent (all replicas
on one device, wire "native") and no statistics are collected, there are no reducers: gradients are added in place
(local_sum.py), with the same result, bit for bit.
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
from .module_gradients import ModuleGradients, Scaling
from .peers import Peers, launch
from .replicate import Replicas
from .scatter_gather import Nested
from .thread_pool import Turns, Workers, modes_are_active

# The number of elements from which on a local sum is divided among the workers.
_SHARED_NUMEL = 1 << 17
_NO_SYNC_STASH = (
    "is not possible while gradients of backwards under no_sync() wait to be reduced: first run a synchronised "
    "backward, or call zero_grad() of the DataParallel module"
)


@dataclass(frozen=True)
class Roots:
    """Roots of one replica's backward.

    Args:
        tensors: outputs of its forward.
        gradients: of these outputs.
    """

    tensors: list[torch.Tensor]
    gradients: list[torch.Tensor]


class Engine:
    """Replicas of `module` on `devices`.

    Args:
        module: the user's.
        devices: of one type.
        workers: one thread per device, or a single one, which drives all reducers.
        config: how gradients are reduced; op "sum".
        timeout_s: seconds that replicas wait for each other in a reduction.
        threads: whether there is a worker per replica.
        turns: lets one thread at a time use the replicas.
        scaling: knows the loss scale of the backward that runs.

    Raises:
        ValueError, TypeError: a module that cannot be replicated or reduced.

    Attributes:
        replicas: the modules.
        peers: their reducers.
        real: the user's module's own gradients; None if nothing is to be trained.
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
        self.real = ModuleGradients(trained, self.replicas.names, scaling) if trained else None
        if self.real is not None:
            self.real.note_clip = self.peers.note_clip
        self._set_delayed()
        self._tables = [GradientTable.of(own) for own in self.replicas.trained_by] if trained else []
        self._stash: list[list[torch.Tensor | None]] = []
        self._begun = False

    def turn(self) -> contextlib.AbstractContextManager[bool]:
        """Context manager to hold during a backward; see Turns."""
        return self._turns.lock_for(self._workers)

    @property
    def runs_in_threads(self) -> bool:
        """True if forward uses one thread per replica now; else one backward has to run for all replicas."""
        return self._threads and not modes_are_active()

    # Forward

    def forward(self, inputs: Sequence[tuple[Nested, list[Any]]]) -> list[Any]:
        """Runs all replicas.

        Args:
            inputs: per replica, the structure of its arguments and their leaves, which are moved to its device.

        Returns:
            Each replica's output.
        """
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
        """Runs each replica's backward.

        Each replica's gradients are divided by the loss scale first, if there is one.

        Args:
            roots: per replica; a replica without tensors contributes nothing.
            keep_graph: another backward may follow.
            reduce: False: in the synchronous mode gradients are summed without the wire's rounding; in others they are
                stashed for the next backward.
            together: one backward for all replicas in this thread, since it may run a forward again (of a checkpoint
                around the module).

        Returns:
            The sum over replicas of each parameter's gradient, in the order of `trained`; None: no gradient.

        Raises:
            Exception: the error of a replica's backward or of the reduction. All gradients are dropped then.
        """
        self._workers.refuse_closed()  # before reducers are made anew, whose parameters may have another owner by now
        if self._begun:
            self._abort(None)
        scale = self._scaling.running()
        reducers: Sequence[Reducer] = ()
        if reduce and self.real is not None and not self.peers.adds_up:
            reducers = self.peers.reducers
            if scale is not None:
                self.peers.attach_scalers(self.real.observed.units.scalers())
        stash: list[list[torch.Tensor | None]] = []  # for the next step
        with self._aborting_on_error():
            reduced = self._run_backwards(roots, reducers, scale, keep_graph=keep_graph, together=together)
            if reduced:
                found = self._of(0)
            elif reducers or self.peers.synchronous:
                found = self._sum_locally()
            else:
                found = [None] * len(self.replicas.trained)
                stash = [self._of(replica) for replica in range(len(self._devices))]
        self._stash = stash
        self._clear()
        if self.real is not None:
            self.real.local_backward_expected = bool(stash)
            if not stash:
                keeps = reduced and not (self.peers.synchronous or self.peers.asynchronous)
                self.real.end_backward(scale, self.peers.steps_in_flight() if keeps else 0, keeps=keeps)
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
        """Returns whether reducers have reduced the gradients."""
        replicas = range(len(self._devices))
        # A step that overflows in one replica is skipped by all: in this mode it would contribute to later steps.
        looks = bool(reducers) and scale is not None and self.peers.asynchronous
        if self._threads and not together:
            jobs = [
                functools.partial(
                    self._backward, number, roots[number], reducers, scale, keep_graph=keep_graph, reduce=not looks
                )
                for number in replicas
            ]
            self._workers.run(jobs, self.peers.abort)
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
            self._workers.run([functools.partial(_reduce, one) for one in reducers], self.peers.abort)
        else:
            streams = [torch.cuda.current_stream(one) for one in self._devices if one.type == "cuda"]
            self._workers.run([functools.partial(_reduce_all, reducers, streams)], self.peers.abort)
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
        """Before a replica's backward: drops gradients, except those stashed for this step."""
        own = self.replicas.trained_by[replica]
        for one in own:
            one.grad = None
        if reducers:
            reducers[replica].prepare_for_backward()
        if self._stash and scale is None:
            for one, gradient in zip(own, self._stash[replica], strict=True):
                one.grad = gradient

    def _unscale(self, replica: int, scale: LossScale | None) -> None:
        """After a replica's backward: divides its gradients by the loss scale, then adds those stashed."""
        if scale is None or self.real is None:
            return
        self._tables[replica].multiply(scale.inverse)
        if self._stash:
            with torch.no_grad():
                for one, gradient in zip(self.replicas.trained_by[replica], self._stash[replica], strict=True):
                    one.grad = _sum(gradient, one.grad)

    def _sum_locally(self) -> list[torch.Tensor | None]:
        """Sums without reducers, in place of some replicas' gradients."""
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
        """Drops the replicas' gradients, and those stashed for the next step."""
        self._stash = []
        if self.real is not None:
            self.real.local_backward_expected = False
        self._clear()

    def _clear(self) -> None:
        for own in self.replicas.trained_by:
            for one in own:
                one.grad = None

    # Modes

    def set_sync_mode(self, config: ReduceConfig) -> None:
        """Changes the mode from the next backward on."""
        self._check_no_stash("set_sync_mode()")
        self.peers.set_sync_mode(config)
        self._set_delayed()

    def flush(self, step: Callable[[], None] | None) -> FlushReport:
        """Applies the sums of all steps in flight, adding them to the gradients of the module's parameters.

        Args:
            step: called after each step's sums have been applied.

        Returns:
            How many steps were applied, and how far parameters were apart.
        """
        if self._begun:
            self._abort(None)
        self._check_no_stash("flush()")
        with self._aborting_on_error():
            return self._flush_asynchronous(step) if self.peers.asynchronous else self._flush_steps(step)

    def _flush_steps(self, step: Callable[[], None] | None) -> FlushReport:

        def applied(replica: int) -> None:
            if replica == 0 and self.real is not None:
                self.real.end_flushed_step(max(0, len(self.real.late.scales) - 1))
                self._add_to_module(self.real)
                if step is not None:
                    step()
            for one in self.replicas.trained_by[replica]:
                one.grad = None

        reports = self.peers.each(lambda replica, reducer: reducer.flush(step=functools.partial(applied, replica)))
        return reports[0] if reports else FlushReport()

    def _flush_asynchronous(self, step: Callable[[], None] | None) -> FlushReport:
        """Applies one correction for all contributions in flight. (Replicas share parameters, so these stay.)"""
        with torch.no_grad():
            before = [one.detach().clone() for one in self.replicas.trained]
            reports = self.peers.each(lambda _, reducer: reducer.flush())
            for one, value in zip(self.replicas.trained, before, strict=True):
                one.data.copy_(value)  # the reducers' mean over equal parameters may differ by a rounding
        if self.real is not None:
            self.real.end_flushed_step(0)
            self._add_to_module(self.real)
        self._clear()
        if step is not None and any_gradient(self.replicas.trained):
            step()
        return reports[0] if reports else FlushReport()

    def _add_to_module(self, real: ModuleGradients) -> None:
        """Adds replica 0's gradients to those of the module's parameters."""
        real.drop_stepped()
        with torch.no_grad():
            for one, gradient in zip(self.replicas.trained, self._of(0), strict=True):
                one.grad = _sum(one.grad, gradient)

    def state(self) -> dict[str, Any]:
        """Checkpoint of the steps in flight."""
        self._check_no_stash("reduce_state_dict()")
        state = self.peers.state()
        if state and self.real is not None:
            scales = self.real.late.scales
            state["loss_scales"] = [None if one is None else float(one.scale.item()) for one in scales]
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        """Resumes from what `state` returned.

        Raises:
            ValueError: it is damaged, or belongs to another model, number of devices or mode.
        """
        self._check_no_stash("load_reduce_state_dict()")
        device, scales = self._devices[0], state.get("loss_scales", ())
        if not all(one is None or float(one) > 0 for one in scales):
            raise ValueError(f"damaged state of a DataParallel: loss scales {scales}, expected positive numbers")
        found = [None if one is None else _loss_scale(float(one), device) for one in scales]
        self.peers.load_state(state)
        self._set_delayed()
        if self.real is not None:
            self.real.late.scales.extend(found)

    def release(self) -> None:
        """Closes the reducers and their group."""
        self.peers.disconnect()
        if self.real is not None:
            self.real.set_delayed(late=False)

    # Within

    @contextlib.contextmanager
    def _aborting_on_error(self) -> Iterator[None]:
        """What is begun within it is given up where it raises, steps under way too; an interrupt may leave that to the
        next call."""
        self._begun = True
        try:
            yield
        except BaseException as error:
            self._abort(error)
            raise
        self._begun = False

    def _abort(self, error: BaseException | None) -> None:
        self.peers.abort(0, error or FusedReduceError("interrupted"))  # nobody waits for one that will not come
        self._workers.wait_until_idle()
        self.drop_gradients()
        self.peers.disconnect()
        self._set_delayed()
        self._begun = False

    def _set_delayed(self) -> None:
        if self.real is not None:
            self.real.set_delayed(late=not self.peers.synchronous)

    def _check_no_stash(self, what: str) -> None:
        if self._stash:
            raise FusedReduceError(f"{what} {_NO_SYNC_STASH}")

    @contextlib.contextmanager
    def _named(self, replica: int) -> Iterator[None]:
        """Adds a note to errors that says which replica raised them."""
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
    """Reduces with all reducers in one thread, where none may wait before all have launched."""
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
