"""Peers: one reducer per replica, in a LocalGroup.

The reducers have no autograd hooks: however many outputs a loss is made of, each replica's gradients are accumulated
first, then `launch` reduces them once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from ...comm.local.group import LocalCommunicator, LocalGroup
from ...config import Asynchronous, ReduceConfig, is_synchronous
from ...planning.bucketing import MIB, BucketCaps
from ...reducer.reducer import Reducer
from .replicate import Replicas
from .thread_pool import Workers

T = TypeVar("T")

# Without a network large buckets gain nothing; small ones stay in the cache from pack to unpack.
_CAPS = BucketCaps(first_bytes=MIB, cap_bytes=4 * MIB)


class Peers:
    """The reducers of all replicas.

    Args:
        replicas: the modules.
        devices: where they are.
        workers: one thread per replica, or a single one, which drives all reducers.
        config: how gradients are reduced; op "sum".
        timeout_s: seconds that replicas wait for each other in a reduction.
        threads: whether there is a worker per replica.

    Raises:
        ValueError, TypeError: parameters or a mode that cannot be reduced.
    """

    def __init__(
        self,
        replicas: Replicas,
        devices: Sequence[torch.device],
        workers: Workers,
        config: ReduceConfig,
        timeout_s: float,
        *,
        threads: bool,
    ) -> None:
        self.config = config
        self._threads = threads
        config.check_beside(not threads and "threads=False")
        self._replicas = replicas
        self._devices = tuple(devices)
        self._workers = workers
        self._timeout_s = timeout_s
        self._group: LocalGroup | None = None
        self._communicators: list[LocalCommunicator] = []
        self._reducers: list[Reducer] = []
        # Now, so that a wrong mode or setting is raised by the constructor.
        if not self.adds_up:
            self.connect()

    @property
    def synchronous(self) -> bool:
        """Whether every reduction is finished within its backward."""
        return is_synchronous(self.config.sync_mode)

    @property
    def asynchronous(self) -> bool:
        """Whether replicas contribute at their own pace."""
        return isinstance(self.config.sync_mode, Asynchronous)

    @property
    def adds_up(self) -> bool:
        """Whether gradients are added in place, without reducers."""
        config = self.config
        plain = config.wire == "native" and not config.grad_stats and config.check_finite == "off"
        return plain and self.synchronous and len(set(self._devices)) == 1

    @property
    def reducers(self) -> list[Reducer]:
        """The reducer of each replica."""
        if not self._reducers:
            self.connect()
        return self._reducers

    def steps_in_flight(self) -> int:
        """Number of steps in flight."""
        return max((int(one.stats().get("steps_under_way", 0)) for one in self._reducers), default=0)

    def attach_scalers(self, scalers: Sequence[object]) -> None:
        """Leaves gradients that are not finite under a loss scale to these scalers."""
        for reducer in self._reducers:
            for scaler in scalers:
                reducer.observed.units.attach(scaler)

    def note_clip(self, coefficient: Callable[[], torch.Tensor]) -> None:
        """See `Reducer.note_clip`."""
        for reducer in self._reducers:
            reducer.note_clip(coefficient)

    # Together

    def each(self, call: Callable[[int, Reducer], T]) -> list[T]:
        """Calls `call(replica, reducer)` for all replicas, each in its thread.

        Returns:
            The results by replica; empty if there are no reducers.
        """
        jobs = [functools.partial(call, number, one) for number, one in enumerate(self._reducers)]
        if self._threads or not jobs:
            return self._workers.run(jobs, self.abort) if jobs else []
        return self._workers.run([lambda: [job() for job in jobs]])[0]

    def abort(self, replica: int, error: BaseException) -> None:
        """Aborts the group's collectives, for a replica that has raised."""
        if self._communicators:
            self._communicators[replica].abort(error)

    def set_sync_mode(self, config: ReduceConfig) -> None:
        """Changes the mode from the next step on; see `Reducer.set_sync_mode`."""
        before = self.config
        config.check_beside(not self._threads and "threads=False")
        for reducer in self._reducers:  # in this thread, as in `load_state`
            reducer.set_sync_mode(config.sync_mode)
        self.disconnect()
        self.config = config
        if not self.adds_up:
            try:
                self.connect()
            except BaseException:
                self.config = before
                raise

    def state(self) -> dict[str, Any]:
        """Checkpoint of the replicas' reducers; see `Reducer.state_dict`."""
        states = self.each(lambda _, reducer: reducer.state_dict(gather=False))
        kept = states if self.asynchronous else states[:1]  # in other modes the same of all replicas
        if kept and "residuals" in kept[0]:
            names = kept[0]["residuals"]
            kept[0]["residuals"] = {name: torch.stack([one["residuals"][name] for one in states]) for name in names}
        return {"replicas": kept} if any(kept) else {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resumes from what `state` returned.

        Raises:
            ValueError: it is damaged, or belongs to another model, number of devices or mode.
        """
        kept = state.get("replicas", ())
        if state and not (kept and self._reducers):
            raise ValueError(
                f"the state holds what is in flight of {len(kept)} replicas, and this mode is {self.config.sync_mode}: "
                "load it in the mode that it was saved in, or call flush() before saving"
            )
        # In this thread: a replica's thread that raises would give up the group's collectives.
        for replica, reducer in enumerate(self._reducers):
            reducer.load_state_dict(kept[replica % len(kept)] if kept else {})

    # Lifecycle

    def connect(self) -> None:
        """Makes new reducers in a new group; the old ones may be out of step."""
        self.disconnect()
        count = len(self._devices)
        if not self._replicas.trained:
            return
        self._group = LocalGroup(count, timeout_s=self._timeout_s, one_thread=not self._threads)
        self._communicators = [self._group.communicator(number) for number in range(count)]
        for number, communicator in enumerate(self._communicators):
            reducer = Reducer(
                self._replicas.trained_by[number],
                communicator,
                self.config,
                names=self._replicas.names,
                sparse=self._replicas.sparse,
                caps=_CAPS,
                # Replicas may use different parameters for their samples. It also keeps the plan fixed.
                find_unused_parameters=True,
                agreed=True,
            )
            reducer.remove_hooks()
            self._reducers.append(reducer)

    def disconnect(self) -> None:
        """Closes the reducers and their group. After an interrupt within it, the next call completes it."""
        while self._reducers:
            self._reducers[-1].close()
            self._reducers.pop()
        if self._group is not None:
            self._group.close()
        self._group, self._communicators = None, []


def launch(reducer: Reducer) -> None:
    """Launches the reduction of the gradients as they are, in the order of the buckets."""
    reducer.prepare_for_backward()
    for index in reversed(range(len(reducer.parameters))):
        reducer.engine.on_gradient(index)
