"""SyncServer: gradients averaged over devices of this process, each of which announces what it will produce.

    server = SyncServer(2)
    with server.device(rank, model.named_parameters()) as device:     # in a thread per device
        for batch in data:
            device.announce(loss := model(batch))               # None: no gradients this time
            loss.backward()
            device.sync()                                       # every .grad is the mean over both devices now
            optimizer.step()

The time from announce to sync is an *epoch*. Each device counts its own epochs, and the n-th epochs of all devices are
reduced together. A device announces the parameters that the graph of its loss reaches: a parameter that k of n devices
produce is averaged over n, with zeros for the others, which get the result too; a parameter that no device produces
keeps its `.grad`.

Each device is a rank of a LocalGroup, with a Reducer of its own. An epoch that cannot be finished (a device raised, was
closed, or did not come in time) is given up for all: every device in it raises, and a device that comes to it later
raises at once. Later epochs work again, in a *generation* of new communicators.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NoReturn, TypeVar

import torch
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from ..comm.local.group import LocalCommunicator, LocalGroup
from ..comm.local.threads import run_in_threads
from ..config import ReduceConfig, Synchronous
from ..errors import CollectiveError, FusedReduceError, shortened
from ..planning.bucketing import BucketCaps
from ..reducer.reducer import Reducer
from ..reducer.step_cycle import ReducerState
from ..reducer.unused_parameters import tensors_in

T = TypeVar("T")
_NAMES_SHOWN = 20


class DeviceState(enum.Enum):
    """State of a SyncDevice."""

    IDLE = "between epochs"  # a backward raises
    ANNOUNCED = "in an epoch"  # from announce to sync
    CLOSED = "closed"  # cannot be used again


@dataclass(frozen=True, eq=False)
class _Generation:
    """The epochs that use the same communicators: from `first` on, until one is given up.

    Args:
        communicators: by rank, made together.
        first: number of the first epoch.
    """

    communicators: list[LocalCommunicator]
    first: int


@dataclass(frozen=True)
class _Failure:
    """Why an epoch was given up."""

    text: str
    cause: BaseException | None


class SyncServer:
    """Averages the gradients of `world_size` devices of this process.

    Args:
        world_size: number of devices.
        op: "mean" over all devices, or "sum"; None: `config.op`.
        config: how gradients are reduced; None: ReduceConfig().
        caps: size limits of buckets; None: torch's.
        timeout_s: seconds that a device waits for the others.

    Raises:
        ValueError: a world size below 1, a timeout not above 0, an unknown op, a mode other than Synchronous.
    """

    def __init__(
        self,
        world_size: int,
        *,
        op: Literal["mean", "sum"] | None = None,
        config: ReduceConfig | None = None,
        caps: BucketCaps | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        self.config = config or ReduceConfig()
        if op is not None:
            self.config = dataclasses.replace(self.config, op=op)
        if self.config.sync_mode != Synchronous():
            raise ValueError(
                f"SyncServer takes sync_mode=Synchronous() only, since an epoch ends with its own averages; got "
                f"{self.config.sync_mode}"
            )
        self._caps = caps
        self._lock = threading.RLock()
        self._group = LocalGroup(world_size, timeout_s=timeout_s)
        self._devices: dict[int, SyncDevice] = {}
        self._departed: dict[int, int] = {}  # devices that are closed and not started again: rank -> last epoch
        self._last_epoch = 0  # of any device
        self._failures: dict[int, _Failure] = {}  # of epochs that were given up, and not every device has come to
        self._closed = False
        self._generation = self._new_generation()

    @property
    def world_size(self) -> int:
        """Number of devices."""
        return self._group.size

    def device(self, rank: int, named_parameters: Iterable[tuple[str, torch.Tensor]]) -> SyncDevice:
        """Starts a device. After `SyncDevice.close` the same rank may be started again.

        Args:
            rank: of the device, from 0.
            named_parameters: of its model, as `model.named_parameters()` gives them. Names and their order must be the
                same on every device; the first epoch compares them. A shared parameter counts once, under its first
                name; parameters that need no gradient are left out.

        Returns:
            The device, for one thread at a time.

        Raises:
            ValueError: no such rank, no parameter that requires a gradient, a name twice, or parameters that another
                server or reducer reduces.
            TypeError: parameters without names.
            FusedReduceError: the server is closed, or the device has been started already.
        """
        kept: dict[str, torch.Tensor] = {}
        seen: set[int] = set()
        for pair in named_parameters:
            # Names let the first epoch check which parameters belong together; an order alone could not be checked.
            if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], torch.Tensor)):
                raise TypeError(
                    "device: expected pairs of a name and a parameter, as model.named_parameters() gives them, got "
                    f"{type(pair).__name__}"
                )
            name, parameter = pair
            if name in kept:
                raise ValueError(f"device: two parameters are named {name}")
            if parameter.requires_grad and id(parameter) not in seen:
                kept[name] = parameter
                seen.add(id(parameter))
        if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < self.world_size:
            raise ValueError(f"device: rank must be one of 0 to {self.world_size - 1}, got {rank!r}")
        with self._lock:
            self._check_open()
            if rank in self._devices:
                raise FusedReduceError(f"device {rank} has been started already: close() it before starting it again")
            if rank in self._departed:
                self._generation = self._new_generation()  # the others join it with their next epoch
            device = SyncDevice(self, rank, list(kept.values()), list(kept))
            self._departed.pop(rank, None)
            self._devices[rank] = device
            return device

    def run(self, case: Callable[[SyncDevice], T]) -> list[T]:
        """Calls `case(device)` in a thread for each device, and waits for all.

        Args:
            case: the training loop of one device.

        Returns:
            The results in rank order.

        Raises:
            FusedReduceError: not every device has been started, or the server is closed.
            BaseException: the first error of a device, after all threads have ended. The epoch is given up for the
                others; their own errors are added as notes.
        """
        with self._lock:
            self._check_open()
            devices = [self._devices.get(rank) for rank in range(self.world_size)]
            missing = [rank for rank, device in enumerate(devices) if device is None]
        if missing:
            raise FusedReduceError(
                f"{_devices_text(missing)} not started: call SyncServer.device(rank, named_parameters) before run()"
            )
        present = [device for device in devices if device is not None]

        def give_up(rank: int | None, error: BaseException) -> None:
            for device in present if rank is None else [present[rank]]:
                device.abort(error)

        try:
            return run_in_threads("device", [functools.partial(case, device) for device in present], give_up)
        except BaseException:
            with self._lock:
                for device in present:
                    device._catch_up()  # whoever called this is told here
            raise

    def close(self) -> None:
        """Closes every device; a device that waits in an epoch raises. May be called twice."""
        with self._lock:
            self._closed = True
            devices = list(self._devices.values())
        self._group.close()  # before the reducers, whose locks are held by those who wait
        for device in devices:
            device.close()

    def __enter__(self) -> SyncServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Called by devices

    def _check_open(self) -> None:
        if self._closed:
            raise FusedReduceError("this SyncServer is closed: make a new one")

    def _new_generation(self) -> _Generation:
        return _Generation(self._group.communicators(), self._last_epoch + 1)

    def _begin(self, device: SyncDevice) -> None:
        """A device begins its next epoch. Under the lock.

        Raises:
            CollectiveError: it was given up already; or another device is closed and will not come, and none has begun.
        """
        epoch = device.epoch + 1
        if epoch in self._failures:
            device.epoch = epoch
            self._raise_failure(device)
        missing = [rank for rank, last in sorted(self._departed.items()) if last < epoch]
        if missing:
            raise CollectiveError(
                f"device {device.rank}: {_devices_text(missing)} closed, so no epoch can be finished: "
                "start the closed ones again with SyncServer.device, or close this device too"
            )
        device.epoch = epoch
        self._last_epoch = max(self._last_epoch, epoch)
        if self._failures:
            known = min(one.epoch for one in self._devices.values())
            self._failures = {epoch: failure for epoch, failure in self._failures.items() if epoch >= known}

    def _raise_failure(self, device: SyncDevice) -> NoReturn:
        """The epoch that a device is in was given up. Under the lock."""
        failure = self._failures[device.epoch]
        raise CollectiveError(f"device {device.rank}: {failure.text}") from failure.cause

    def _give_up(self, epoch: int, device: SyncDevice, error: BaseException) -> None:
        """An epoch cannot be finished, as `device` has found; the first reason counts. Under the lock."""
        if epoch in self._failures:
            return
        why = f"device {device.rank} raised {type(error).__name__}: {error}"
        if isinstance(error, CollectiveError):
            missing = self._missing(epoch)
            why = f"{f'{missing}. ' if missing else ''}{error}"
        self._failures[epoch] = failure = _Failure(f"epoch {epoch} was given up: {why}", error)
        self._last_epoch = max(self._last_epoch, epoch)
        # Of its epochs, a device may have one to end still that others have done their part in, also after a later one
        # was given up.
        generation = self._generation if epoch >= self._generation.first else device.generation
        if any(one is not device and one.epoch >= epoch for one in self._devices.values()):
            # Whoever is in it has all of the epoch before. If nobody is, some may be in that, and shall end it.
            generation.communicators[device.rank].abort(CollectiveError(failure.text))
        if generation is self._generation and not self._closed:
            self._generation = self._new_generation()

    def _missing(self, epoch: int) -> str:
        """The text on which devices an epoch waits for, and why. Under the lock."""
        found = []
        for rank in range(self.world_size):
            device = self._devices.get(rank)
            if device is None:
                found.append(f"device {rank} is not started")
            elif device.epoch < epoch:
                found.append(f"device {rank} has not announced epoch {epoch}")
            elif device.epoch == epoch and device.state is DeviceState.ANNOUNCED:
                owed = device.owed()
                if owed:
                    found.append(f"device {rank} has not produced the gradients of {shortened(owed, _NAMES_SHOWN)}")
                elif device.owes_sync():
                    found.append(f"device {rank} announced nothing, and has not called sync()")
        announced = {
            name: None
            for device in self._devices.values()
            if device.epoch == epoch and device.state is DeviceState.ANNOUNCED
            for name in device.announced()
        }
        if found and announced:
            found.append(f"{shortened(announced, _NAMES_SHOWN)} cannot be averaged")
        return "; ".join(found)

    def _leave(self, device: SyncDevice) -> None:
        """A device is closed: those that wait for it, or would, raise."""
        with self._lock:
            if self._devices.get(device.rank) is not device:
                return
            epoch = device.epoch + device.has_given
            lost = {one.epoch for one in self._devices.values() if one is not device and one.epoch >= epoch}
            if not device.has_given:
                lost.add(epoch)
            for one in sorted(lost):
                self._give_up(one, device, FusedReduceError("the device was closed"))
            del self._devices[device.rank]
            self._departed[device.rank] = device.epoch


class SyncDevice:
    """One device of a SyncServer; made by `SyncServer.device`, used by one thread at a time, closed at the end.

    As a context manager it gives the epoch up for all devices if the body raises, and closes the device.

    Attributes:
        rank: number of the device, from 0.
        reducer: reduces its gradients.
        epoch: number of its latest epoch; 0 before the first.
        state: between epochs, in an epoch, or closed.
    """

    def __init__(self, server: SyncServer, rank: int, parameters: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        self.rank = rank
        self.state = DeviceState.IDLE
        self._server = server
        self.generation = server._generation
        self.epoch = self.generation.first - 1
        self._local = False  # under no_sync
        self._announced: frozenset[int] = frozenset()
        self._arrived: set[int] = set()
        self._prepared = False  # the reducer is prepared for the latest epoch
        self._syncs = False  # sync() was called in an epoch for which nothing was announced
        self.reducer = Reducer(
            parameters,
            self.generation.communicators[rank],
            server.config,
            names=names,
            caps=server._caps,
            find_unused_parameters=True,
        )
        self.reducer.cycle.advises = False
        # A gradient accumulation node, and with it its hooks, lives only as long as it is referenced.
        self._nodes = [get_gradient_edge(parameter).node for parameter in parameters]
        self._handles = _hook(self, self._nodes)
        weakref.finalize(self, _remove, self._handles).atexit = False

    # An epoch

    def announce(self, outputs: object) -> None:
        """Begins an epoch: the next backward is to produce gradients of the parameters that `outputs` depends on.

        Args:
            outputs: the loss, or tensors in any pytree; None: this device produces no gradients, and calls `sync`.

        Raises:
            FusedReduceError: the last epoch is not synced yet, or its backward was not completed; or this device is
                closed.
            CollectiveError: the epoch was given up by another device; or not all came in time (first epoch only).
            AgreementError: devices were given different models; raised on all of them.
            TypeError: outputs without a tensor.
        """
        tensors = tensors_in(outputs)
        if not tensors and outputs is not None:
            raise TypeError(
                f"device {self.rank}: announce() takes the loss, tensors or None, got {type(outputs).__name__}"
            )
        server = self._server
        with server._lock:
            self._check_open()
            self._recover()
            server._begin(self)
            moved = self.generation is not server._generation and self.epoch >= server._generation.first
            if moved:
                self.generation = server._generation
            self._announced, self._arrived = frozenset(), set()
            self._prepared = self._syncs = False
            self.state = DeviceState.ANNOUNCED
        try:
            if moved:
                self.reducer.set_communicator(self.generation.communicators[self.rank])
            # With no tensor at all the reducer would expect every gradient.
            self.reducer.prepare_for_backward(tensors or [torch.zeros(())])
            self._announced = frozenset(range(len(self._nodes))).difference(self.reducer.cycle.unused_now)
            self._prepared = True
        except BaseException as error:
            self._raise(error)

    def sync(self) -> None:
        """Ends the epoch: waits for the other devices, then every `.grad` holds the average.

        Raises:
            FusedReduceError: no epoch has begun, or gradients that were announced have not been produced.
            CollectiveError: the epoch was given up; names the device and its error. The next epoch can begin.
        """
        with self._server._lock:
            self._check_open()
            if self.state is not DeviceState.ANNOUNCED:
                raise FusedReduceError(
                    f"device {self.rank}: sync() before announce(): no epoch has begun. Call announce(loss) first"
                )
        reducer, failed = self.reducer, False
        try:
            if reducer.state is ReducerState.ARMED and not self._announced:
                self._syncs = True
                with torch.no_grad():
                    reducer.end_without_backward()
            failed = reducer.state is ReducerState.FAILED
            reducer.finalize()
        except BaseException as error:
            if failed:  # the backward has raised this error already
                self._raise(CollectiveError(str(error)))
            self._raise(self._incomplete() if reducer.state is ReducerState.ARMED else error)
        if reducer.state is ReducerState.ARMED:
            with self._server._lock:
                self._raise_if_given_up()
            raise FusedReduceError(
                f"device {self.rank}: sync() before the backward that was announced for epoch {self.epoch}, of "
                f"{shortened(self.owed(), _NAMES_SHOWN)}: call backward() first"
            )
        self.state = DeviceState.IDLE

    def backward(self, loss: torch.Tensor | None) -> None:
        """Calls announce(loss), loss.backward() and sync().

        Args:
            loss: of this device; None: it produces no gradients in this epoch.

        Raises:
            BaseException: an error of the backward, which gives the epoch up for all devices.
            FusedReduceError, CollectiveError, AgreementError, TypeError: see `announce` and `sync`.
        """
        self.announce(loss)
        if loss is not None and loss.requires_grad:
            try:
                loss.backward()
            except BaseException as error:
                self._raise(error)
        self.sync()

    def abort(self, error: BaseException) -> None:
        """Gives this device's epoch up: the other devices raise an error that names this one.

        That is the epoch that the device is in; or the next one, if it is in none or has done its part already.

        Args:
            error: the reason, for the other devices' messages.
        """
        with self._server._lock:
            if self.state is not DeviceState.CLOSED:
                self._give_up(error, given=self.has_given)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards within the context are not reduced; the next epoch reduces the accumulated gradients.

        Yields:
            None.

        Raises:
            FusedReduceError: called within an epoch, or the device is closed.
        """
        with self._server._lock:
            self._check_open()
            if self.state is not DeviceState.IDLE:
                raise FusedReduceError(
                    f"device {self.rank}: no_sync() between announce() and sync(): finish epoch {self.epoch} with "
                    "sync() first"
                )
        self.reducer.expect_local_backward()
        self._local = True
        try:
            yield
        finally:
            self._local = False

    def close(self) -> None:
        """Leaves the server, and removes the hooks. Devices that wait for this one raise. May be called twice."""
        self._server._leave(self)
        self.state = DeviceState.CLOSED
        _remove(self._handles)
        self.reducer.close()

    def __enter__(self) -> SyncDevice:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None:
            self.abort(error)
        self.close()

    # For messages; called by any thread

    def announced(self) -> list[str]:
        """Names of the parameters that were announced for the latest epoch."""
        return [self.reducer.names[index] for index in sorted(self._announced)]

    def owed(self) -> list[str]:
        """Names of the parameters that were announced and have no gradient yet."""
        return [self.reducer.names[index] for index in sorted(self._announced.difference(self._arrived))]

    def owes_sync(self) -> bool:
        """True if announce(None) was called, and sync() was not."""
        return self._prepared and not self._announced and not self._syncs

    # Private

    def _before_gradient(self, index: int) -> None:
        """Called by a hook before a backward accumulates a parameter's gradient."""
        if self._local:
            return
        name = self.reducer.names[index]
        if self.state is not DeviceState.ANNOUNCED:
            raise FusedReduceError(
                f"device {self.rank}: backward reached {name}, but no epoch has begun, so its gradient would not be "
                "averaged: call announce(loss) before loss.backward(), or use no_sync() to keep gradients local"
            )
        state = self.reducer.state
        if state is ReducerState.ARMED and index in self._announced:
            self._arrived.add(index)
        elif state is ReducerState.ARMED:
            error = FusedReduceError(
                f"device {self.rank}: backward reached {name}, which was not announced for epoch {self.epoch}: "
                "announce every tensor that a backward of this epoch begins at"
            )
            with self._server._lock:
                # If everything that was announced has been launched, the others have their averages without this.
                given = bool(self._announced) and not self.owed() and self.reducer.config.overlap
                self._give_up(error, given=given)
            raise error
        elif state is not ReducerState.FAILED:
            raise FusedReduceError(
                f"device {self.rank}: a second backward before sync(): epoch {self.epoch} has averaged {name} already. "
                "Call sync() and announce() between two backwards"
            )

    def _check_open(self) -> None:
        self._server._check_open()
        if self.state is DeviceState.CLOSED:
            raise FusedReduceError(f"device {self.rank} is closed: start it again with SyncServer.device")

    @property
    def has_given(self) -> bool:
        """True if the other devices can finish this device's latest epoch without it."""
        if self.state is not DeviceState.ANNOUNCED:
            return True
        waits = (ReducerState.ARMED, ReducerState.FAILED)
        return self._prepared and self.reducer.state not in waits and self.epoch not in self._server._failures

    def _recover(self) -> None:
        """Before announce: raises unless the last epoch was synced, or was given up and this device has raised that."""
        if self.state is not DeviceState.ANNOUNCED:
            return
        state = self.reducer.state
        if state is ReducerState.FAILED:
            self._give_up(CollectiveError("its backward failed"), given=False)  # and raised
            return
        self._raise_if_given_up()
        if state is ReducerState.ARMED:  # else the backward is complete, and check_finalized might wait for others
            try:
                self.reducer.check_finalized()
            except FusedReduceError:
                self._raise(self._incomplete())
        raise FusedReduceError(
            f"device {self.rank}: announce() twice: epoch {self.epoch} is not synced yet. Call sync() first"
        )

    def _incomplete(self) -> FusedReduceError:
        """The error in place of the reducer's, which would suggest options that SyncServer sets itself."""
        owed = self.owed()
        missing = f"without the gradients of {shortened(owed, _NAMES_SHOWN)}, which were announced"
        lacks = missing if owed else "before it was complete"
        return FusedReduceError(
            f"device {self.rank}: the backward of epoch {self.epoch} ended {lacks}: announce exactly the tensors that "
            "backwards begin at, and run all of these backwards before sync()"
        )

    def _raise_if_given_up(self) -> None:
        """Raises the others' error, if the epoch that this device is in was given up."""
        if self.epoch in self._server._failures:
            self.state = DeviceState.IDLE
            self._server._raise_failure(self)

    def _raise(self, error: BaseException) -> NoReturn:
        """This device cannot finish its epoch: gives it up for all, and raises."""
        with self._server._lock:
            if self.state is DeviceState.CLOSED:
                raise CollectiveError(f"device {self.rank}: closed in epoch {self.epoch}. {error}") from error
            if self.state is DeviceState.ANNOUNCED:  # else a hook has done so
                self._give_up(error, given=self.has_given)
            if isinstance(error, CollectiveError):
                self._server._raise_failure(self)
        raise error

    def _give_up(self, error: BaseException, *, given: bool) -> None:
        """The epoch that this device is in cannot be finished, or the next one. Under the server's lock.

        Args:
            error: why.
            given: the others need nothing more of it for the one it is in.
        """
        self.epoch += given
        self._server._give_up(self.epoch, self, error)
        self.state = DeviceState.IDLE

    def _catch_up(self) -> None:
        """This device's caller knows of every epoch that was given up. Under the server's lock."""
        self.epoch = max(self.epoch, self._server._generation.first - 1)
        if self.epoch in self._server._failures:
            self.state = DeviceState.IDLE


def _hook(device: SyncDevice, nodes: Sequence[Node]) -> list[RemovableHandle]:
    """Registers hooks that run before gradients are accumulated. They reference the device weakly."""
    weak = weakref.ref(device)

    def hook(index: int) -> Callable[[object], None]:
        def before(_: object) -> None:
            alive = weak()
            if alive is not None:
                alive._before_gradient(index)

        return before

    return [node.register_prehook(hook(index)) for index, node in enumerate(nodes)]


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


def _devices_text(ranks: Sequence[int]) -> str:
    """ "device 3 is" or "devices 0 and 2 are"."""
    listed = " and ".join([", ".join(map(str, ranks[:-1])), str(ranks[-1])]) if len(ranks) > 1 else str(ranks[0])
    return f"device{'s' if len(ranks) > 1 else ''} {listed} {'are' if len(ranks) > 1 else 'is'}"
