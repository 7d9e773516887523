"""SyncDevice: one device of a SyncServer, its reducer, and the hooks that compare gradients with what was announced."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import torch
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from ..config import ReduceConfig
from ..errors import CollectiveError, FusedReduceError, shortened
from ..planning.bucketing import BucketCaps
from ..reducer.reducer import Reducer
from ..reducer.state import ReducerState
from ..reducer.unused_parameters import tensors_in
from .sync_epochs import NAMES_SHOWN, DeviceState, Epochs


class SyncDevice:
    """One device of a SyncServer; made by `SyncServer.device`, used by one thread at a time, closed at the end.

    As a context manager it gives the epoch up for all devices if the body raises, and closes the device.

    Attributes:
        rank: number of the device, from 0.
        reducer: reduces its gradients.
        epoch: number of its latest epoch; 0 before the first.
        state: between epochs, in an epoch, or closed.
        caps: size limits of its buckets, from the next epoch on; None: torch's.
    """

    def __init__(
        self,
        epochs: Epochs[SyncDevice],
        rank: int,
        parameters: Sequence[torch.Tensor],
        names: Sequence[str],
        config: ReduceConfig,
        caps: BucketCaps | None,
    ) -> None:
        self.rank = rank
        self.state = DeviceState.IDLE
        self.caps = caps
        self._epochs = epochs
        self.generation = epochs.generation
        self.epoch = self.generation.first - 1
        self._local = False  # under no_sync
        self._announced: frozenset[int] = frozenset()
        self._arrived: set[int] = set()
        self._prepared = False  # the reducer is prepared for the latest epoch
        self._syncs = False  # sync() was called in an epoch for which nothing was announced
        self.reducer = Reducer(
            parameters,
            self.generation.communicators[rank],
            config,
            names=names,
            caps=caps,
            find_unused_parameters=True,
        )
        self.reducer.engine.advises = False
        # In a backward that waits when the server is closed: as every other call, it raises that.
        self.reducer.engine.on_error = lambda _: epochs.check_open()
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
            FusedReduceError: the last epoch is not synced yet, or its backward was not completed; or this device or the
                server is closed.
            CollectiveError: the epoch was given up by another device; or not all came in time (first epoch only).
            AgreementError: devices were given different models; raised on all of them.
            TypeError: outputs without a tensor.
        """
        tensors = tensors_in(outputs)
        if not tensors and outputs is not None:
            raise TypeError(
                f"device {self.rank}: announce() takes the loss, tensors or None, got {type(outputs).__name__}"
            )
        epochs = self._epochs
        with epochs.lock:
            self._check_open()
            self._recover()
            epochs.begin(self)
            moved = self.generation is not epochs.generation and self.epoch >= epochs.generation.first
            if moved:
                self.generation = epochs.generation
            self._announced, self._arrived = frozenset(), set()
            self._prepared = self._syncs = False
            self.state = DeviceState.ANNOUNCED
        try:
            if moved:
                self.reducer.set_communicator(self.generation.communicators[self.rank])
            if self.caps is not None and self.caps != self.reducer.caps:
                self.reducer.set_bucket_size(self.caps)
            # With no tensor at all the reducer would expect every gradient.
            self.reducer.prepare_for_backward(tensors or [torch.zeros((), dtype=torch.float32, device="cpu")])
            self._announced = frozenset(range(len(self._nodes))).difference(self.reducer.engine.armed.unused)
            self._prepared = True
        except BaseException as error:
            self._raise(error)

    def sync(self) -> None:
        """Ends the epoch: waits for the other devices, then every `.grad` holds the average.

        Raises:
            FusedReduceError: no epoch has begun, or gradients that were announced have not been produced; or the server
                was closed, at whatever moment of the epoch.
            CollectiveError: the epoch was given up; names the device and its error. The next epoch can begin.
        """
        with self._epochs.lock:
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
        with self._epochs.lock:
            self._check_open()
            if reducer.state is ReducerState.ARMED:
                self._raise_if_given_up()
                raise FusedReduceError(
                    f"device {self.rank}: sync() before the backward that was announced for epoch {self.epoch}, of "
                    f"{shortened(self._missing_gradients(), NAMES_SHOWN)}: call backward() first"
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
        with self._epochs.lock:
            if self.state is not DeviceState.CLOSED:
                self._abort_epoch(error, contributed=self.contributed)

    def interrupt(self, error: BaseException) -> None:
        """As `abort`, from another thread than the device's own: this device raises too."""
        with self._epochs.lock:
            if self.state is not DeviceState.CLOSED:
                self._epochs.abort(self.epoch + self.contributed, self, error, from_outside=True)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards within the context are not reduced; the next epoch reduces the accumulated gradients.

        Yields:
            None.

        Raises:
            FusedReduceError: called within an epoch, or the device is closed.
        """
        with self._epochs.lock:
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
        with self._epochs.lock:
            self._epochs.leave(self)
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

    def missing(self) -> str:
        """What the others wait for, such as "has not produced the gradients of w"; empty if it has done its part."""
        if missing := self._missing_gradients():
            return f"has not produced the gradients of {shortened(missing, NAMES_SHOWN)}"
        if self._prepared and not self._announced and not self._syncs:
            return "announced nothing, and has not called sync()"
        return ""

    # Private

    def _missing_gradients(self) -> list[str]:
        """Names of the parameters that were announced and have no gradient yet."""
        return [self.reducer.names[index] for index in sorted(self._announced.difference(self._arrived))]

    def _before_gradient(self, index: int) -> None:
        """Called by a hook before a backward accumulates a parameter's gradient."""
        if self._local:
            return
        name = self.reducer.names[index]
        if self.state is not DeviceState.ANNOUNCED:
            self._check_open()
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
            with self._epochs.lock:
                self._check_open()
                # If everything that was announced has been launched, the others have their averages without this.
                launched = bool(self._announced) and not self._missing_gradients() and self.reducer.config.overlap
                self._abort_epoch(error, contributed=launched)
            raise error
        elif state is not ReducerState.FAILED:
            self._check_open()
            raise FusedReduceError(
                f"device {self.rank}: a second backward before sync(): epoch {self.epoch} has averaged {name} already. "
                "Call sync() and announce() between two backwards"
            )

    def _check_open(self) -> None:
        self._epochs.check_open()
        if self.state is DeviceState.CLOSED:
            raise FusedReduceError(f"device {self.rank} is closed: start it again with SyncServer.device")

    @property
    def contributed(self) -> bool:
        """True if the other devices can finish this device's latest epoch without it."""
        if self.state is not DeviceState.ANNOUNCED:
            return True
        waits = (ReducerState.ARMED, ReducerState.FAILED)
        return self._prepared and self.reducer.state not in waits and self.epoch not in self._epochs.failures

    def _recover(self) -> None:
        """Before announce: raises unless the last epoch was synced, or was given up and this device has raised that."""
        if self.state is not DeviceState.ANNOUNCED:
            return
        state = self.reducer.state
        if state is ReducerState.FAILED:
            self._abort_epoch(CollectiveError("its backward failed"), contributed=False)  # and raised
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
        missing = shortened(self._missing_gradients(), NAMES_SHOWN)
        lacks = f"without the gradients of {missing}, which were announced" if missing else "before it was complete"
        return FusedReduceError(
            f"device {self.rank}: the backward of epoch {self.epoch} ended {lacks}: announce exactly the tensors that "
            "backwards begin at, and run all of these backwards before sync()"
        )

    def _raise_if_given_up(self) -> None:
        """Raises the others' error, if the epoch that this device is in was given up."""
        if self.epoch in self._epochs.failures:
            self.state = DeviceState.IDLE
            self._epochs.raise_failure(self)

    def _raise(self, error: BaseException) -> NoReturn:
        """This device cannot finish its epoch: gives it up for all, and raises."""
        with self._epochs.lock:
            if isinstance(error, FusedReduceError):
                self._check_open()  # closed meanwhile by another thread, which is then why
            if self.state is DeviceState.ANNOUNCED:  # else a hook has done so
                self._abort_epoch(error, contributed=self.contributed)
            if isinstance(error, CollectiveError):
                self._epochs.raise_failure(self)
        raise error

    def _abort_epoch(self, error: BaseException, *, contributed: bool) -> None:
        """The epoch that this device is in cannot be finished, or the next one. Under the lock of the epochs.

        Args:
            error: why.
            contributed: the others need nothing more of it for the one it is in.
        """
        self.epoch += contributed
        self._epochs.abort(self.epoch, self, error)
        self.state = DeviceState.IDLE

    def rejoin(self) -> None:
        """This device's caller knows of every epoch that was given up. Under the lock of the epochs."""
        self.epoch = max(self.epoch, self._epochs.generation.first - 1)
        if self.state is not DeviceState.CLOSED and self.epoch in self._epochs.failures:
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
