"""ReplicaRunner: runs forward and backward of a module's replicas, and hands their gradients to what sums them.

    threads      each replica has a worker thread, for its forward, its backward and its part of the reduction
    one thread   forwards run one after another in the caller's thread, then one backward for all (CUDA devices work at
                 once); a worker thread drives all reducers

A backward first runs every replica's graph, and then sums, in one of two ways: LocalSum adds up on the first device,
where nothing has to be sent (all replicas on one device, wire "native", each step's own sums) and no statistics are
collected; Peers has a reducer per replica. Where both can, the result is the same, bit for bit.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...buckets.gradient_table import GradientTable
from ...buckets.loss_scale import LossScale
from ...config import FlushReport, ReduceConfig, is_synchronous
from ...errors import CollectiveError, FusedReduceError
from .local_sum import LocalSum
from .module_gradients import ModuleGradients, Scaling
from .peers import Peers
from .replicate import Replicas
from .scatter_gather import Nested
from .thread_pool import Turns, Workers, modes_are_active

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


class ReplicaRunner:
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
        sums: what sums their gradients.
        real: the user's module's own gradients.
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
        self._timeout_s = timeout_s
        self.real = ModuleGradients(self.replicas.trained, self.replicas.names, scaling)
        self._tables = [GradientTable.of(own) for own in self.replicas.trained_by]
        self._stash: list[list[torch.Tensor | None]] = []
        self._begun = False
        config.check_beside("DataParallel", not threads and "threads=False")
        self._use(config)

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
        jobs = [
            self._named(number)(functools.partial(self._forward, number, *one)) for number, one in enumerate(inputs)
        ]
        if self.runs_in_threads:
            return self._workers.run(jobs)
        return [job() for job in jobs]

    def _forward(self, replica: int, nested: Nested, leaves: Sequence[Any]) -> Any:
        device = self._devices[replica]
        with _on(device):
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
        replicas = range(len(self._devices))
        backward = functools.partial(self._backward, roots=roots, scale=scale, keep_graph=keep_graph)
        stash: list[list[torch.Tensor | None]] = []  # for the next step
        with self._aborting_on_error():
            if self._threads and not together:
                self._workers.run([self._named(one)(functools.partial(backward, [one])) for one in replicas])
            else:
                backward(replicas)
            if reduce:
                found = self.sums.reduce(scale, self.real.observed.units.scalers())
            elif self.sums.delayed:
                found = [None] * len(self.replicas.trained)
                stash = [self.replicas.gradients_of(replica) for replica in replicas]
            else:
                found = self.sums.add_up()
        self._stash = stash
        self.replicas.clear_gradients()
        self.real.local_backward_expected = bool(stash)
        if not stash:
            self.real.end_backward(scale, self.sums.steps_in_flight())
        return found

    def _backward(
        self, replicas: Sequence[int], roots: Sequence[Roots], scale: LossScale | None, *, keep_graph: bool
    ) -> None:
        """Runs one backward, of some replicas. Leaves their gradients, unscaled, in `.grad`, with those stashed."""
        for replica in replicas:
            kept = self._stash[replica] if self._stash and scale is None else itertools.repeat(None)
            for one, gradient in zip(self.replicas.trained_by[replica], kept, strict=False):
                one.grad = gradient
        tensors = [tensor for replica in replicas for tensor in roots[replica].tensors]
        gradients = [gradient for replica in replicas for gradient in roots[replica].gradients]
        if tensors:
            torch.autograd.backward(tensors, gradients, retain_graph=keep_graph)
        if scale is None:
            return
        for replica in replicas:
            with _on(self._devices[replica]):
                self._tables[replica].multiply(scale.inverse)
                if self._stash:
                    own = self.replicas.trained_by[replica]
                    _set_sums(own, self._stash[replica], self.replicas.gradients_of(replica))

    def drop_stash(self) -> None:
        """Drops the gradients that are stashed for the next step.

        Not what replicas have in `.grad`, which may be of another thread: a step of `flush` runs in replica 0's.
        """
        self._stash = []
        self.real.local_backward_expected = False

    # Modes

    def set_sync_mode(self, config: ReduceConfig) -> None:
        """Changes the mode from the next backward on."""
        self._check_no_stash("set_sync_mode()")
        config.check_beside(not self._threads and "threads=False")
        self.sums.check_mode(config.sync_mode)
        self.sums.close()
        self._use(config)

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
            return self.sums.flush(self._add_to_module, step)

    def _add_to_module(self) -> None:
        """Adds replica 0's gradients, which are the sums of a step in flight, to those of the module's parameters."""
        self.real.end_flushed_step(max(0, len(self.real.late.scales) - 1))
        self.real.drop_stepped()
        trained = self.replicas.trained
        _set_sums(trained, [one.grad for one in trained], self.replicas.gradients_of(0))

    def state(self) -> dict[str, Any]:
        """Checkpoint of the steps in flight."""
        self._check_no_stash("reduce_state_dict()")
        state = self.sums.state()
        if state:
            scales = self.real.late.scales
            state["loss_scales"] = [None if one is None else float(one.scale.item()) for one in scales]
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        """Resumes from what `state` returned.

        Raises:
            ValueError: it is damaged, or belongs to another model, number of devices or mode.
        """
        self._check_no_stash("load_reduce_state_dict()")
        scales = state.get("loss_scales", ())
        if not all(one is None or float(one) > 0 for one in scales):
            raise ValueError(f"damaged state of a DataParallel: loss scales {scales}, expected positive numbers")
        made = functools.partial(torch.tensor, dtype=torch.float32, device=self._devices[0])
        found = [None if one is None else LossScale.of(made([float(one)])) for one in scales]
        self.sums.load_state(state)
        self.real.set_delayed(late=self.sums.delayed)
        self.real.late.scales.extend(found)

    def release(self) -> None:
        """Closes the reducers and their group."""
        self.sums.close()
        self.real.set_delayed(late=False)

    # Within

    def _use(self, config: ReduceConfig) -> None:
        """Sums by `config` from now on.

        Raises:
            ValueError, TypeError: parameters or a mode that cannot be reduced.
        """
        plain = config.wire == "native" and not config.grad_stats and config.check_finite == "off"
        adds_up = plain and is_synchronous(config.sync_mode) and len(set(self._devices)) == 1
        if adds_up or not self.replicas.trained:
            self.sums = LocalSum(self.replicas, self._workers, config, threads=self._threads)
        else:
            self.sums = Peers(self.replicas, self._workers, config, self._timeout_s, threads=self._threads)
        self.real.note_clip = self.sums.note_clip
        self.real.set_delayed(late=self.sums.delayed)

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
        self.sums.abort(0, error or FusedReduceError("interrupted"))  # nobody waits for one that will not come
        self._workers.wait_until_idle()
        self.drop_stash()
        self.replicas.clear_gradients()
        self.sums.close()
        self.real.set_delayed(late=self.sums.delayed)
        self._begun = False

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


def _set_sums(
    parameters: Sequence[torch.Tensor],
    ones: Sequence[torch.Tensor | None],
    others: Sequence[torch.Tensor | None],
) -> None:
    """Sets each parameter's gradient to the sum of two, either of which may be None; in place of the first one."""
    with torch.no_grad():
        for parameter, one, other in zip(parameters, ones, others, strict=True):
            if one is None or other is None:
                parameter.grad = other if one is None else one
            else:
                parameter.grad = one.add_(other) if one.layout is torch.strided else one + other


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
