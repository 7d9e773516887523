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
import functools
from collections.abc import Callable, Iterable
from typing import Literal, TypeVar

import torch

from ..comm.local.group import LocalGroup
from ..comm.local.threads import run_in_threads
from ..config import ReduceConfig, checked
from ..errors import FusedReduceError
from ..planning.bucketing import BucketCaps
from .sync_device import SyncDevice
from .sync_epochs import DeviceState, Epochs, devices_text

T = TypeVar("T")


class SyncServer:
    """Averages the gradients of `world_size` devices of this process.

    Args:
        world_size: number of devices.
        op: "mean" over all devices, or "sum"; None: `config.op`.
        config: how gradients are reduced; None: ReduceConfig().
        caps: size limits of buckets; None: torch's. Later: `set_bucket_size`.
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
        self.config = checked(config, "config")
        if op is not None:
            self.config = dataclasses.replace(self.config, op=op)
        self.config.check_beside("SyncServer")
        self._caps = caps
        self._group = LocalGroup(world_size, timeout_s=timeout_s)
        self._epochs: Epochs[SyncDevice] = Epochs(self._group)

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
        with self._epochs.lock:
            self._epochs.check_startable(rank)
            device = SyncDevice(self._epochs, rank, list(kept.values()), list(kept), self.config, self._caps)
            self._epochs.enter(device)
            return device

    def set_bucket_size(self, size: int | BucketCaps) -> None:
        """Changes the size limits of buckets, from the next epoch on. Call it once, while no device is in an epoch.

        Args:
            size: limit of every bucket in bytes of gradients; or BucketCaps. See `Reducer.set_bucket_size`.

        Raises:
            TypeError, ValueError: not a number of bytes from 1; or `config` has a plan.
            FusedReduceError: a device is in an epoch, or the server is closed.
        """
        caps = BucketCaps.of(size)
        self.config.check_beside("set_bucket_size()", self.config.plan is not None and "plan=")
        with self._epochs.lock:
            self._epochs.check_open()
            devices, given_up = self._epochs.devices.values(), self._epochs.failures
            inside = [one for one in devices if one.state is DeviceState.ANNOUNCED and one.epoch not in given_up]
            if inside:
                raise FusedReduceError(
                    f"{devices_text(sorted(one.rank for one in inside))} in an epoch, which would end in other buckets "
                    "than it began in: call set_bucket_size() after sync() of every device"
                )
            self._caps = caps
            for device in devices:
                device.caps = caps

    def run(self, case: Callable[[SyncDevice], T]) -> list[T]:
        """Calls `case(device)` in a thread for each device, and waits for all.

        Args:
            case: the training loop of one device.

        Returns:
            The results in rank order.

        Raises:
            FusedReduceError: not every device has been started, or the server is closed.
            BaseException: the first error that a device raised of its own, after all threads have ended. The epoch is
                given up for the others; their own errors are added as notes.
        """
        with self._epochs.lock:
            self._epochs.check_open()
            devices = [self._epochs.devices.get(rank) for rank in range(self.world_size)]
            missing = [rank for rank, device in enumerate(devices) if device is None]
        if missing:
            raise FusedReduceError(
                f"{devices_text(missing)} not started: call SyncServer.device(rank, named_parameters) before run()"
            )
        present = [device for device in devices if device is not None]

        def abort(rank: int | None, error: BaseException) -> None:
            if rank is not None:
                present[rank].abort(error)
                return
            for device in present:
                device.interrupt(error)

        try:
            return run_in_threads("device", [functools.partial(case, device) for device in present], abort)
        except BaseException:
            with self._epochs.lock:
                for device in present:
                    device.rejoin()  # whoever called this is told here
            raise

    def close(self) -> None:
        """Closes every device. A device in an epoch raises what every later call does. May be called twice.

        Example: `FusedReduceError: this SyncServer is closed: make a new one`, whether it waits or comes to it later.
        """
        self._epochs.close()
        self._group.close()  # before the reducers, whose locks are held by those who wait
        for device in list(self._epochs.devices.values()):
            device.close()

    def __enter__(self) -> SyncServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
