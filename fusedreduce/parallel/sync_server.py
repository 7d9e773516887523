"""SyncServer: gradients averaged over devices of this process, each of which says first what it will produce.

    server = SyncServer(2)
    with server.device(rank, model.named_parameters()) as device:     # in a thread per device
        for batch in data:
            device.announce(loss := model(batch))               # None: nothing this time
            loss.backward()
            device.sync()                                       # every .grad is the mean over both devices now
            optimizer.step()

What lies between announce and sync is an *epoch*. Each device counts its own, and the n-th of all devices meet; none
resets what others count by. Announced is what the graph of the loss reaches: a parameter that k of n devices produce
is averaged over n, with zeros for the others, who get the result too; one that nobody produces keeps its `.grad`.

Each device is a rank of a LocalGroup with a Reducer of its own, which does the reducing. An epoch that cannot be
finished (a device raised, was closed, or did not come in time) is given up for all: whoever is in it raises, and so
does, at once, whoever comes to it later. The next epochs meet again, in a *generation* of new communicators.
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
from ..errors import CollectiveError, FusedReduceError
from ..planning.bucketing import BucketCaps
from ..reducer.reducer import Reducer, ReducerState
from ..reducer.unused_parameters import tensors_in

T = TypeVar("T")
_NAMES_SHOWN = 20


class DeviceState(enum.Enum):
    """Where a device stands."""

    IDLE = "between epochs"  # no backward may come
    ANNOUNCED = "in an epoch"  # from announce to sync
    CLOSED = "closed"  # for good


@dataclass(frozen=True, eq=False)
class _Generation:
    """Epochs that meet on the same communicators: from `first` on, until one is given up.

    Args:
        communicators: by rank; made together, so that they meet.
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
    """`world_size` devices of this process that average their gradients.

    Args:
        world_size: how many devices.
        op: "mean" over all devices, or "sum"; None: what `config` says.
        config: how gradients are reduced.
        caps: limits of the buckets.
        timeout_s: how long a device waits for the others.

    Raises:
        ValueError: a world size below 1, a timeout that is not above 0, an unknown op, a mode other than synchronous.
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
            raise ValueError(f"SyncServer: an epoch ends with its own averages, so {self.config.sync_mode} is refused")
        self._caps = caps
        self._lock = threading.RLock()
        self._group = LocalGroup(world_size, timeout_s=timeout_s)
        self._devices: dict[int, SyncDevice] = {}
        self._departed: dict[int, int] = {}  # closed and not started again: rank -> its last epoch
        self._last_epoch = 0  # of any device
        self._failures: dict[int, _Failure] = {}  # of epochs that were given up, and not every device has come to
        self._closed = False
        self._generation = self._new_generation()

    @property
    def world_size(self) -> int:
        """Number of devices."""
        return self._group.size

    def device(self, rank: int, named_parameters: Iterable[tuple[str, torch.Tensor]]) -> SyncDevice:
        """Takes a device's place; it is left by `close`, and may be taken again then.

        Args:
            rank: which device, from 0.
            named_parameters: its model's, as `model.named_parameters()` gives them. Names and their order must be the
                same on every device; the first epoch compares them. A shared parameter counts once, under its first
                name; those that need no gradient are left out.

        Raises:
            ValueError: no such rank, nothing to reduce, a name twice, or parameters that another server or reducer
                holds.
            TypeError: parameters without names.
            FusedReduceError: the server is closed, or the place is taken.
        """
        kept: dict[str, torch.Tensor] = {}
        seen: set[int] = set()
        for pair in named_parameters:
            # Without names only an order could say which parameters belong together, and nothing would check that.
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
        """`case(device)` in a thread for each device; what each returned, in rank order.

        Raises:
            FusedReduceError: not every device has been started.
            BaseException: the first that a device raised, after all threads have ended. The others' epoch was given up
                then; what they raised of their own is added as notes.
        """
        with self._lock:
            self._check_open()
            devices = [self._devices.get(rank) for rank in range(self.world_size)]
            missing = [rank for rank, device in enumerate(devices) if device is None]
        if missing:
            raise FusedReduceError(f"{_devices_text(missing)} not started: device(rank, parameters) before run")
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
        """Closes every device; who waits in an epoch raises. May be called twice."""
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

    # What devices ask

    def _check_open(self) -> None:
        if self._closed:
            raise FusedReduceError("this SyncServer is closed")

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
                f"device {device.rank}: {_devices_text(missing)} closed, so no epoch could be finished: "
                "start again with SyncServer.device, or close this device too"
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
        """Whom the devices of an epoch wait for. Under the lock."""
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
                    found.append(f"device {rank} has not produced the gradients of {_names_text(owed)}")
                elif device.owes_sync():
                    found.append(f"device {rank} announced nothing, and has not called sync()")
        announced = {
            name: None
            for device in self._devices.values()
            if device.epoch == epoch and device.state is DeviceState.ANNOUNCED
            for name in device.announced()
        }
        if found and announced:
            found.append(f"{_names_text(list(announced))} cannot be averaged")
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

    As a context manager: what is raised within gives the epoch up for all devices.

    Attributes:
        rank: which device.
        reducer: what reduces its gradients.
        epoch: number of its latest one; 0 before the first.
        state: where it stands.
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
        self._prepared = False  # the reducer is, for the latest epoch
        self._syncs = False  # sync() has been called where nothing was announced
        self.reducer = Reducer(
            parameters,
            self.generation.communicators[rank],
            server.config,
            names=names,
            caps=server._caps,
            find_unused_parameters=True,
        )
        self.reducer.advises = False
        # Held, since a node lives only while somebody holds it. The reducer holds the same ones.
        self._nodes = [get_gradient_edge(parameter).node for parameter in parameters]
        self._handles = _hook(self, self._nodes)
        weakref.finalize(self, _remove, self._handles).atexit = False

    # An epoch

    def announce(self, outputs: object) -> None:
        """Begins an epoch: the next backward produces the gradients that the graph of `outputs` reaches.

        Args:
            outputs: the loss, or tensors in any pytree; None: this device has nothing to produce, and calls `sync`.

        Raises:
            FusedReduceError: the last epoch is not synced yet, or its backward was not completed; or this device is
                closed.
            CollectiveError: the epoch was given up by another device; or not all came in time (first epoch only).
            AgreementError: devices were given different models; on all of them.
            TypeError: something else than tensors.
        """
        tensors = tensors_in(outputs)
        if not tensors and outputs is not None:
            raise TypeError(f"announce: expected the loss, tensors or None, got {type(outputs).__name__}")
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
            # Without a tensor nothing would be searched, and everything expected.
            self.reducer.prepare_for_backward(tensors or [torch.zeros(())])
            self._announced = frozenset(range(len(self._nodes))).difference(self.reducer.unused_now)
            self._prepared = True
        except BaseException as error:
            self._raise(error)

    def sync(self) -> None:
        """Ends the epoch: every `.grad` holds the average then. Waits for the other devices.

        Raises:
            FusedReduceError: nothing was announced, or what was has not been produced yet.
            CollectiveError: the epoch was given up, with the device and why; the next one can begin.
        """
        with self._server._lock:
            self._check_open()
            if self.state is not DeviceState.ANNOUNCED:
                raise FusedReduceError(f"device {self.rank}: sync() before announce(): no epoch has begun")
        reducer, failed = self.reducer, False
        try:
            if reducer.state is ReducerState.ARMED and not self._announced:
                self._syncs = True
                with torch.no_grad():
                    reducer.end_without_backward()
            failed = reducer.state is ReducerState.FAILED
            reducer.finalize()
        except BaseException as error:
            if failed:  # what a backward has raised already is told again, by the reducer
                self._raise(CollectiveError(str(error)))
            self._raise(self._incomplete() if reducer.state is ReducerState.ARMED else error)
        if reducer.state is ReducerState.ARMED:
            with self._server._lock:
                self._raise_if_given_up()
            raise FusedReduceError(
                f"device {self.rank}: sync() before the backward that was announced for epoch {self.epoch}, of "
                f"{_names_text(self.owed())}"
            )
        self.state = DeviceState.IDLE

    def backward(self, loss: torch.Tensor | None) -> None:
        """announce(loss), loss.backward() and sync().

        Args:
            loss: of this device; None: it has none in this epoch.

        Raises:
            BaseException: what the backward raised, which gives the epoch up for all.
            FusedReduceError, CollectiveError, AgreementError: see `announce` and `sync`.
        """
        self.announce(loss)
        if loss is not None and loss.requires_grad:
            try:
                loss.backward()
            except BaseException as error:
                self._raise(error)
        self.sync()

    def abort(self, error: BaseException) -> None:
        """Gives this device's epoch up: the other devices raise, naming it.

        That is the epoch it is in; if it has done its part there, or is in none, the next one.

        Args:
            error: why.
        """
        with self._server._lock:
            if self.state is not DeviceState.CLOSED:
                self._give_up(error, given=self.has_given)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards within stay on this device; the next epoch reduces their sum.

        Raises:
            FusedReduceError: within an epoch.
        """
        with self._server._lock:
            self._check_open()
            if self.state is not DeviceState.IDLE:
                raise FusedReduceError(f"device {self.rank}: no_sync() between announce() and sync()")
        self.reducer.expect_local_backward()
        self._local = True
        try:
            yield
        finally:
            self._local = False

    def close(self) -> None:
        """Leaves the server, and takes the hooks off. Who waits for this device raises. May be called twice."""
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

    # For messages, by any thread

    def announced(self) -> list[str]:
        """Names of the parameters that were announced for the latest epoch."""
        return [self.reducer.names[index] for index in sorted(self._announced)]

    def owed(self) -> list[str]:
        """Names of the parameters that were announced and have no gradient yet."""
        return [self.reducer.names[index] for index in sorted(self._announced.difference(self._arrived))]

    def owes_sync(self) -> bool:
        """Whether nothing was announced, and that is all that the others have had of it."""
        return self._prepared and not self._announced and not self._syncs

    # Within

    def _gradient_comes(self, index: int) -> None:
        """A backward is about to give a parameter its gradient; by its hook."""
        if self._local:
            return
        name = self.reducer.names[index]
        if self.state is not DeviceState.ANNOUNCED:
            raise FusedReduceError(
                f"device {self.rank}: a backward comes to {name}, but no epoch has begun, so nobody would average it: "
                "announce(loss) before loss.backward(). Within no_sync() it would stay on this device"
            )
        state = self.reducer.state
        if state is ReducerState.ARMED and index in self._announced:
            self._arrived.add(index)
        elif state is ReducerState.ARMED:
            error = FusedReduceError(
                f"device {self.rank}: a backward comes to {name}, which was not announced for epoch {self.epoch}: "
                "announce every tensor that a backward of this epoch begins at"
            )
            with self._server._lock:
                # Where all that was announced has been launched, the others have their averages, without this one.
                given = bool(self._announced) and not self.owed() and self.reducer.config.overlap
                self._give_up(error, given=given)
            raise error
        elif state is not ReducerState.FAILED:
            raise FusedReduceError(
                f"device {self.rank}: a second backward before sync(): epoch {self.epoch} has averaged {name} already. "
                "sync() and announce() between two backwards"
            )

    def _check_open(self) -> None:
        self._server._check_open()
        if self.state is DeviceState.CLOSED:
            raise FusedReduceError(f"device {self.rank} is closed: start it again with SyncServer.device")

    @property
    def has_given(self) -> bool:
        """Whether the others need nothing more of it for its latest epoch."""
        if self.state is not DeviceState.ANNOUNCED:
            return True
        waits = (ReducerState.ARMED, ReducerState.FAILED)
        return self._prepared and self.reducer.state not in waits and self.epoch not in self._server._failures

    def _recover(self) -> None:
        """An epoch may only begin after the last one was synced, or was given up and this device has said so."""
        if self.state is not DeviceState.ANNOUNCED:
            return
        state = self.reducer.state
        if state is ReducerState.FAILED:
            self._give_up(CollectiveError("its backward failed"), given=False)  # and raised
            return
        self._raise_if_given_up()
        if state is ReducerState.ARMED:  # else the backward is done, and finalize could wait
            try:
                self.reducer.check_finalized()
            except FusedReduceError:
                self._raise(self._incomplete())
        raise FusedReduceError(
            f"device {self.rank}: announce() twice: epoch {self.epoch} is not synced yet. Call sync() first"
        )

    def _incomplete(self) -> FusedReduceError:
        """In place of the reducer's error, which tells of options that are set here."""
        owed = self.owed()
        lacks = f"without the gradients of {_names_text(owed)}, which were announced" if owed else "before it was done"
        return FusedReduceError(
            f"device {self.rank}: the backward of epoch {self.epoch} has ended {lacks}: announce just what one or more "
            "backwards begin at, and run them all before sync()"
        )

    def _raise_if_given_up(self) -> None:
        """Raises what the others have raised, in the epoch that this device is in."""
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
    """Has the device told before a parameter gets a gradient; graphs that outlive it do not keep it."""
    alive = weakref.ref(device)

    def hook(index: int) -> Callable[[object], None]:
        def comes(_: object) -> None:
            one = alive()
            if one is not None:
                one._gradient_comes(index)

        return comes

    return [node.register_prehook(hook(index)) for index, node in enumerate(nodes)]


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


def _devices_text(ranks: Sequence[int]) -> str:
    """ "device 3 is" or "devices 0 and 2 are"."""
    listed = " and ".join([", ".join(map(str, ranks[:-1])), str(ranks[-1])]) if len(ranks) > 1 else str(ranks[0])
    return f"device{'s' if len(ranks) > 1 else ''} {listed} {'are' if len(ranks) > 1 else 'is'}"


def _names_text(names: Sequence[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
