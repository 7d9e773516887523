"""Peers: one reducer per replica, in a group of this process.

The reducers' own hooks are not used: whatever outputs take part in a loss, and however often, first all is accumulated,
then `launch` reduces it once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from ...comm.local.group import LocalCommunicator, LocalGroup
from ...config import Asynchronous, ReduceConfig, SyncMode, is_synchronous
from ...planning.bucketing import MIB, BucketCaps
from ...reducer.reducer import Reducer
from .replicate import Replicas
from .thread_pool import Workers

T = TypeVar("T")

# Nothing is gained by large buckets where there is no network; small ones stay in the cache from pack to unpack.
_CAPS = BucketCaps(first_bytes=MIB, cap_bytes=4 * MIB)
_VERSION = 1


class Peers:
    """The reducers of all replicas.

    Args:
        replicas: theirs.
        devices: where those are.
        workers: as many, or one, which then drives all reducers.
        config: how gradients travel; op "sum".
        timeout_s: how long replicas wait for each other in a reduction.
        threads: there is a worker per replica.

    Raises:
        ValueError, TypeError: what cannot be reduced.
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
        self._check_mode(config.sync_mode)
        self._replicas = replicas
        self._devices = tuple(devices)
        self._workers = workers
        self._timeout_s = timeout_s
        self._group: LocalGroup | None = None
        self._communicators: list[LocalCommunicator] = []
        self._reducers: list[Reducer] = []
        # What a wrong mode or setting has to say is said now.
        if not self.adds_up:
            self.meet()

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
        """Whether gradients are added up where they lie, and no reducers are needed."""
        config = self.config
        plain = config.wire == "native" and not config.grad_stats and config.check_finite == "off"
        return plain and self.synchronous and len(set(self._devices)) == 1

    @property
    def reducers(self) -> list[Reducer]:
        """One per replica."""
        if not self._reducers:
            self.meet()
        return self._reducers

    def under_way(self) -> int:
        """Steps of which the averages have not come yet."""
        return max((int(one.stats().get("steps_under_way", 0)) for one in self._reducers), default=0)

    def excuse(self, scalers: Sequence[object]) -> None:
        """What is not finite under a loss scale is that scaler's affair."""
        for reducer in self._reducers:
            for scaler in scalers:
                reducer.observed.units.attach(scaler)

    # Together

    def each(self, call: Callable[[int, Reducer], T]) -> list[T]:
        """`call(replica, reducer)` for all that there are, each in its thread."""
        jobs = [functools.partial(call, number, one) for number, one in enumerate(self._reducers)]
        if self._threads or not jobs:
            return self._workers.run(jobs, self.gave_up) if jobs else []
        return self._workers.run([lambda: [job() for job in jobs]])[0]

    def gave_up(self, replica: int, error: BaseException) -> None:
        """A replica has raised: the others wait for it no longer."""
        if self._communicators:
            self._communicators[replica].abort(error)

    def set_sync_mode(self, config: ReduceConfig) -> None:
        """Goes on with another mode; see `Reducer.set_sync_mode`."""
        before = self.config
        self._check_mode(config.sync_mode)
        self.each(lambda _, reducer: reducer.set_sync_mode(config.sync_mode))
        self.part()
        self.config = config
        if not self.adds_up:
            try:
                self.meet()
            except BaseException:
                self.config = before
                raise

    def state(self) -> dict[str, Any]:
        """What is under way; see `Reducer.state_dict`."""
        if self.synchronous or not self._reducers:
            return {}
        states = self.each(lambda _, reducer: reducer.state_dict())
        # What is under way in BoundedStaleness is the same everywhere.
        kept = states if self.asynchronous else states[:1]
        return {"version": _VERSION, "devices": len(self._devices), "replicas": kept}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on with it.

        Raises:
            ValueError: it is damaged, or of another model, number of devices or mode.
        """
        if not state:
            return
        try:
            version, devices, kept = state["version"], state["devices"], list(state["replicas"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"a damaged state of a DataParallel: {type(error).__name__}: {error}") from error
        if version != _VERSION:
            raise ValueError(f"not a state of a DataParallel: version {version!r}, expected {_VERSION}")
        if devices != len(self._devices):
            raise ValueError(
                f"the state is of {devices} devices, there are {len(self._devices)} now: what is under way is of "
                "that many parts. flush() before saving, where the number of devices may change"
            )
        if self.synchronous or len(kept) != (devices if self.asynchronous else 1):
            raise ValueError(
                f"the state was saved in another mode than {self.config.sync_mode}: load it in that one, or flush() "
                "before saving"
            )
        self.each(lambda replica, reducer: reducer.load_state_dict(kept[replica if self.asynchronous else 0]))

    # Lifecycle

    def meet(self) -> None:
        """New reducers, in a new group: the old ones may be out of step."""
        self.part()
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
                # Replicas with other samples may use other parameters. The plan is fixed by this, too.
                find_unused_parameters=True,
                agreed=True,
            )
            reducer.remove_hooks()
            self._reducers.append(reducer)

    def part(self) -> None:
        """Gives the reducers and their group up; where an interrupt kept it from that, the next call does."""
        while self._reducers:
            self._reducers[-1].close()
            self._reducers.pop()
        if self._group is not None:
            self._group.close()
        self._group, self._communicators = None, []

    def _check_mode(self, mode: SyncMode) -> None:
        if isinstance(mode, Asynchronous) and not self._threads:
            raise ValueError(
                "sync_mode=Asynchronous() needs a thread per replica, as on CPU: where one thread drives all of them, "
                "none can be ahead of another"
            )


def launch(reducer: Reducer) -> None:
    """Reduces the gradients as they are, in the order of the buckets."""
    reducer.prepare_for_backward()
    for index in reversed(range(len(reducer.parameters))):
        reducer.on_gradient(index)
