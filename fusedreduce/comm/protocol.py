"""Communicator: the little that a reduction needs of a group of ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Literal, Protocol

import torch

ReduceOp = Literal["sum", "max", "min", "product"]


class Pending(Protocol):
    """A collective under way. Whoever holds it keeps the tensor alive."""

    def notify(self, done: Callable[[], None]) -> None:
        """Has `done()` called once when the collective ends, or at once if it has, by any thread; on CPU only.

        It may never be called: nothing may depend on it but measurements.
        """
        ...

    def future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Done when the result may be used (on CUDA: by streams that wait as the future's callbacks do)."""
        ...

    def ready(self) -> bool:
        """Whether `wait` would return, or raise, at once: without blocking this thread."""
        ...

    def wait(self) -> None:
        """Blocks until the tensor holds the result; on CUDA only orders the current stream behind it.

        Raises:
            RuntimeError: a peer died, left, or did not answer within the group's timeout.
        """
        ...


class Ranks(Protocol):
    """What an error needs to know of a group of ranks.

    `lost`: why no collective of the group can be relied on any more; empty while none has failed. See `wait_for`.
    """

    lost: str

    @property
    def rank(self) -> int:
        """This process's rank within the group."""
        ...

    def timeout_s(self, device: torch.device | None = None) -> float:
        """Seconds after which a collective on `device` fails (None: on one that the group has a backend for)."""
        ...


class Communicator(Ranks, Protocol):
    """A group of ranks that issue the same collectives in the same order."""

    @property
    def size(self) -> int:
        """Ranks in the group."""
        ...

    def check_wire(self, dtype: torch.dtype, device: torch.device) -> None:
        """Raises UnsupportedWireError, on every rank alike, if `dtype` cannot be summed on `device`."""
        ...

    def waits_in_backward(self, device: torch.device) -> bool:
        """Whether `Pending.wait` may be called from autograd's hooks and callbacks.

        Not where ranks share an autograd thread: what one of them waits for there, another could never issue.
        """
        ...

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Pending:
        """Starts the reduction of `tensor` over all ranks, elementwise and in place."""
        ...

    def reduce(self, tensor: torch.Tensor, root: int, op: ReduceOp = "sum") -> Pending:
        """As `all_reduce`, but only rank `root`'s tensor holds the result; the others' hold anything."""
        ...

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> Pending:
        """Starts the exchange of equal parts: `output`, [ranks * n], gets part `rank` of each rank's `input`."""
        ...

    def all_reduce_sparse(self, tensor: torch.Tensor) -> Pending:
        """Starts the sum of a sparse COO tensor over all ranks; the future's value holds the result."""
        ...

    def all_gather(self, tensor: torch.Tensor) -> tuple[Pending, torch.Tensor]:
        """Starts gathering `tensor`, [n], from all ranks; the tensor that will hold it: [ranks, n]."""
        ...

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Overwrites `tensor` on every rank with that of rank `source`; blocks as `Pending.wait` does."""
        ...

    def all_gather_bytes(self, payload: bytes, capacity_bytes: int, device: torch.device) -> list[bytes]:
        """Every rank's payload, in rank order; blocks. Payloads are at most `capacity_bytes` long."""
        ...

    def apart(self, devices: Collection[torch.device] = ()) -> Communicator:
        """A communicator of the same ranks whose collectives keep no place relative to this one's.

        Every rank calls this at the same place, and `close` on what it got.

        Args:
            devices: those whose tensors it is for. Where ranks have to connect before the first collective of a
                device, they have when this returns.

        Raises:
            RuntimeError: a rank did not come within the timeout, or they could not be connected.
        """
        ...

    def close(self) -> None:
        """Gives back what `apart` made; nothing on other communicators."""
        ...

    def compare_aside(self, key: str, text: str, device: torch.device) -> list[str]:
        """Every rank's `text`, in rank order, without a collective: for ranks that may be out of step.

        Args:
            key: the same on every rank, and new each time.
            text: this rank's.
            device: whose timeout holds.

        Raises:
            RuntimeError: a rank did not come within the timeout.
        """
        ...
