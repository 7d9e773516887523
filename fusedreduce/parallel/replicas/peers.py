"""Peers: a sum by one reducer per replica, in a LocalGroup.

The reducers have no autograd hooks: however many outputs a loss is made of, each replica's gradients are accumulated
first, then reduced once.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from ...buckets.loss_scale import LossScale
from ...buckets.tensors import any_gradient
from ...comm.local.group import LocalCommunicator, LocalGroup
from ...config import Asynchronous, FlushReport, ReduceConfig, SyncMode, is_synchronous
from ...planning.bucketing import MIB, BucketCaps
from ...reducer.reducer import Reducer
from .local_sum import LocalSum
from .replicate import Replicas
from .thread_pool import Workers

T = TypeVar("T")

# Without a network large buckets gain nothing; small ones stay in the cache from pack to unpack.
_CAPS = BucketCaps(first_bytes=MIB, cap_bytes=4 * MIB)


class Peers(LocalSum):
    """The reducers of all replicas, of which at least one parameter is trained.

    Args:
        replicas, workers, threads: see `LocalSum`; a single worker drives all reducers.
        config: how gradients are reduced; op "sum".
        timeout_s: seconds that replicas wait for each other in a reduction.

    Raises:
        ValueError, TypeError: parameters or a mode that cannot be reduced.
    """

    def __init__(
        self, replicas: Replicas, workers: Workers, config: ReduceConfig, timeout_s: float, *, threads: bool
    ) -> None:
        super().__init__(replicas, workers, config, threads=threads)
        self.delayed = not is_synchronous(config.sync_mode)
        self._asynchronous = isinstance(config.sync_mode, Asynchronous)  # replicas contribute at their own pace
        self._timeout_s = timeout_s
        self._communicators: list[LocalCommunicator] = []
        self._reducers: list[Reducer] = []
        self._connect()  # now, so that a wrong mode or setting is raised by the constructor

    @property
    def reducers(self) -> Sequence[Reducer]:
        """The reducer of each replica; new ones if the last were closed."""
        if not self._reducers:
            self._connect()
        return self._reducers

    def reduce(self, scale: LossScale | None, scalers: Sequence[object]) -> list[torch.Tensor | None]:
        """Has every reducer reduce its replica's gradients; gives what replica 0 then has in `.grad`."""
        reducers = self.reducers
        if scale is not None:
            for reducer in reducers:
                for scaler in scalers:
                    reducer.observed.units.attach(scaler)
            # A step that overflows in one replica is skipped by all: in this mode it would contribute to later steps.
            if self._asynchronous and any(bool(one.observed.table.measure().total[2] > 0) for one in reducers):
                return self.add_up()
        streams = [torch.cuda.current_stream(one) for one in self._replicas.devices if one.type == "cuda"]
        shares = [[one] for one in reducers] if self._threads else [reducers]
        self._workers.run([functools.partial(_reduce, share, streams) for share in shares], self.abort)
        return self._replicas.gradients_of(0)

    def note_clip(self, coefficient: Callable[[], torch.Tensor]) -> None:
        """Passes the coefficient on to every reducer, which clips its residuals by it."""
        for reducer in self._reducers:
            reducer.note_clip(coefficient)

    # What outlives a step

    def steps_in_flight(self) -> int:
        """The most steps that one of the reducers has in flight; none in other modes than BoundedStaleness."""
        if not self.delayed:
            return 0
        return max((int(one.stats().get("steps_under_way", 0)) for one in self._reducers), default=0)

    def check_mode(self, mode: SyncMode) -> None:
        """Has every reducer change to `mode`, which raises if it cannot; they are to be closed then."""
        for reducer in self._reducers:  # in this thread, as in `load_state`
            reducer.set_sync_mode(mode)

    def flush(self, apply: Callable[[], None], step: Callable[[], None] | None) -> FlushReport:
        """Flushes every reducer. Asynchronous replicas have one correction for all contributions in flight."""
        trained = self._replicas.trained

        def applied(replica: int) -> None:
            if replica == 0:
                apply()
                if step is not None:
                    step()
            for one in self._replicas.trained_by[replica]:
                one.grad = None

        if not self._asynchronous:
            return self._each(lambda replica, reducer: reducer.flush(step=functools.partial(applied, replica)))[0]
        with torch.no_grad():
            before = [one.detach().clone() for one in trained]
            report = self._each(lambda _, reducer: reducer.flush())[0]
            # Replicas share parameters; the reducers' mean over equal ones may differ by a rounding.
            for one, value in zip(trained, before, strict=True):
                one.data.copy_(value)
        apply()
        self._replicas.clear_gradients()
        if step is not None and any_gradient(trained):
            step()
        return report

    def state(self) -> dict[str, Any]:
        """The reducers' states: of every replica in the asynchronous mode, else replica 0's with all residuals."""
        states = self._each(lambda _, reducer: reducer.state_dict(gather=False))
        kept = states if self._asynchronous else states[:1]  # in other modes the same of all replicas
        if "residuals" in kept[0]:
            names = kept[0]["residuals"]
            kept[0]["residuals"] = {name: torch.stack([one["residuals"][name] for one in states]) for name in names}
        return {"replicas": kept} if any(kept) else {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Loads each replica's state into its reducer; the same into all where one was saved."""
        kept = state.get("replicas", ())
        if not kept:
            super().load_state(state)
        # In this thread: a replica's thread that raises would give up the group's collectives.
        for replica, reducer in enumerate(self.reducers):
            reducer.load_state_dict(kept[replica % len(kept)] if kept else {})

    # Lifecycle

    def abort(self, replica: int, error: BaseException) -> None:
        """Ends the epoch of the reducers' group: every collective raises on every replica, because of `error`."""
        if self._communicators:
            self._communicators[replica].abort(error)

    def close(self) -> None:
        """Closes the reducers, which may be out of step, and their group."""
        while self._reducers:
            self._reducers[-1].close()
            self._reducers.pop()
        if self._communicators:
            self._communicators[0].group.close()
        self._communicators = []

    # Within

    def _connect(self) -> None:
        self.close()  # what an interrupt has left
        devices, names = self._replicas.devices, self._replicas.names
        group = LocalGroup(len(devices), timeout_s=self._timeout_s, one_thread=not self._threads)
        self._communicators = [group.communicator(number) for number in range(len(devices))]
        for own, communicator in zip(self._replicas.trained_by, self._communicators, strict=True):
            reducer = Reducer(
                own,
                communicator,
                self._config,
                names=names,
                sparse=self._replicas.sparse,
                caps=_CAPS,
                # Replicas may use different parameters for their samples. It also keeps the plan fixed.
                find_unused_parameters=True,
                agreed=True,
            )
            reducer.remove_hooks()
            self._reducers.append(reducer)

    def _each(self, call: Callable[[int, Reducer], T]) -> list[T]:
        """The results of `call(replica, reducer)` for all replicas, each in its thread."""
        jobs = [functools.partial(call, number, one) for number, one in enumerate(self.reducers)]
        if self._threads:
            return self._workers.run(jobs, self.abort)
        return self._workers.run([lambda: [job() for job in jobs]])[0]


def _reduce(reducers: Sequence[Reducer], streams: Sequence[torch.cuda.Stream]) -> None:
    """Reduces the gradients of some replicas as they are, of which none may wait before all have launched."""
    with contextlib.ExitStack() as stack:
        for stream in streams:
            stack.enter_context(torch.cuda.stream(stream))
        for reducer in reducers:
            _arm(reducer)
        for reducer in reducers:
            for index in reversed(range(len(reducer.parameters))):  # in the order of the buckets
                reducer.engine.on_gradient(index)
        for reducer in reducers:
            reducer.launch_late()
        for reducer in reducers:
            reducer.finalize()


def _arm(reducer: Reducer) -> None:
    gradients = [one.grad for one in reducer.parameters]
    for one in reducer.parameters:
        one.grad = None  # else a mode whose sums come later takes it for an earlier step's
    reducer.prepare_for_backward()
    for one, gradient in zip(reducer.parameters, gradients, strict=True):
        one.grad = gradient
