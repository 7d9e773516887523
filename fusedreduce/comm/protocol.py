"""Communicator: what a reduction needs of a group of ranks."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, Protocol

import torch

ReduceOp = Literal["sum", "max", "min", "product"]


class Pending(Protocol):
    """A collective in flight. It keeps its tensors alive."""

    def notify(self, done: Callable[[], None]) -> None:
        """Has `done()` called once when the collective ends, by any thread; on CPU only.

        Args:
            done: called immediately if the collective has ended. It may never be called: use it for measurements only.
        """
        ...

    def future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Returns a future that completes when the result may be used (on CUDA: on the streams of its callbacks)."""
        ...

    def ready(self) -> bool:
        """Returns whether `wait` would return, or raise, without blocking this thread."""
        ...

    def wait(self) -> None:
        """Blocks until the tensor holds the result; on CUDA only orders the current stream behind it.

        May be called several times, and on some ranks only, so it must not issue another collective.

        Raises:
            RuntimeError: a rank died, left, or did not answer within the group's timeout.
        """
        ...


class Pieces:
    """Several collectives in flight as one `Pending`.

    Args:
        pieces: in the order in which they were issued.
        device: of their tensors.
        names: of pieces, for errors of the future; "": it needs none.
    """

    def __init__(self, pieces: Sequence[Pending], device: torch.device, names: Sequence[str] = ()) -> None:
        self._pieces = tuple(pieces)
        self._device = device
        self._names = names or ("",) * len(pieces)

    def notify(self, done: Callable[[], None]) -> None:
        """Calls `done` when the last of them has ended."""
        ended = itertools.count(1)
        for piece in self._pieces:
            piece.notify(lambda: done() if next(ended) == len(self._pieces) else None)

    def future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of all results, in order; it fails if one of them does."""
        devices: list[int | str | torch.device] | None = [self._device] if self._device.type == "cuda" else None
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(devices=devices)
        # An error that was set from Python is a value to `collect_all`; one that a callback raises is not.
        named = zip(self._pieces, self._names, strict=True)
        parts = [one.future().then(functools.partial(_value, name)) for one, name in named]
        all_ended = torch.futures.collect_all(parts)
        all_ended.add_done_callback(functools.partial(_complete, future, parts, self._device))
        return future

    def ready(self) -> bool:
        """Whether all are ready."""
        return all(piece.ready() for piece in self._pieces)

    def wait(self) -> None:
        """Waits for each in turn."""
        for piece in self._pieces:
            piece.wait()


def _value(name: str, done: torch.futures.Future[list[torch.Tensor]]) -> list[torch.Tensor]:
    try:
        return done.value()
    except RuntimeError as error:
        raise RuntimeError(f"{name}: {error}" if name else str(error)) from error


def _complete(
    future: torch.futures.Future[list[torch.Tensor]],
    parts: Sequence[torch.futures.Future[list[torch.Tensor]]],
    device: torch.device,
    all_ended: torch.futures.Future[Any],
) -> None:
    """Called when all parts have ended, or one has failed, maybe by a backend's thread.

    On CUDA `collect_all` orders nothing: its future has no devices. The stream on which this sets the result waits for
    each part, as do those of callbacks then.
    """
    on_cuda = device.type == "cuda"
    with torch.cuda.stream(torch.cuda.Stream(device)) if on_cuda else contextlib.nullcontext():
        try:
            all_ended.value()
            result = [tensor for one in parts for tensor in one.wait()]
        except RuntimeError as error:
            future.set_exception(error)  # type: ignore[arg-type]  # torch's annotation is wrong
        else:
            future.set_result(result)


class Ranks(Protocol):
    """What an error message needs to know of a group of ranks.

    Attributes:
        lost: why no collective of the group can be relied on any more; empty while none has failed. `wait_for` sets it.
    """

    lost: str

    @property
    def rank(self) -> int:
        """This process's rank within the group."""
        ...

    def timeout_s(self, device: torch.device | None = None) -> float:
        """Returns the seconds after which a collective on `device` fails.

        Args:
            device: None: one that the group has a backend for.
        """
        ...


class Communicator(Ranks, Protocol):
    """A group of ranks that issue the same collectives in the same order."""

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        ...

    def check_wire(self, dtype: torch.dtype, device: torch.device) -> None:
        """Raises UnsupportedWireError, on every rank, if tensors of `dtype` cannot be summed on `device`."""
        ...

    def check_exchange(self, device: torch.device) -> None:
        """Raises UnsupportedWireError, on every rank, if there is no `all_to_all` on `device`."""
        ...

    def waits_in_backward(self, device: torch.device) -> bool:
        """Returns whether `Pending.wait` may be called from autograd's hooks and callbacks on `device`.

        It may not where ranks share an autograd thread: a rank that waits there keeps the others from issuing theirs.
        """
        ...

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Pending:
        """Starts the elementwise reduction of `tensor` over all ranks, in place.

        Args:
            tensor: dense and contiguous; the same dtype and number of elements on all ranks.
            op: the operation.

        Returns:
            The collective in flight.
        """
        ...

    def reduce(self, tensor: torch.Tensor, root: int, op: ReduceOp = "sum") -> Pending:
        """Starts a reduction as `all_reduce` does, of which only rank `root`'s tensor holds the result.

        Args:
            tensor: as for `all_reduce`; its contents are undefined afterwards on the other ranks.
            root: the rank that gets the result.
            op: the operation.

        Returns:
            The collective in flight.
        """
        ...

    def reduce_scatter(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> tuple[Pending, torch.Tensor]:
        """Starts a reduction as `all_reduce` does, of which each rank gets the part of its number, in place.

        Args:
            tensor: [ranks * n], as for `all_reduce`; its contents are undefined afterwards outside of the result.
            op: the operation.

        Returns:
            The collective in flight, and the part that will hold the result: [n], elements rank * n to (rank + 1) * n
            of `tensor`, in its memory.
        """
        ...

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> Pending:
        """Starts the exchange of equal parts: `output` gets part `rank` of each rank's `input`.

        Args:
            output: [ranks * n]; dense and contiguous.
            input: as `output`, and not the same memory.

        Returns:
            The collective in flight.
        """
        ...

    def all_reduce_sparse(self, tensor: torch.Tensor) -> Pending:
        """Starts the sum of a sparse COO tensor over all ranks.

        Args:
            tensor: the same shape and dtype on all ranks.

        Returns:
            The collective in flight; its future's value is a list of the result.
        """
        ...

    def all_gather(self, tensor: torch.Tensor, into: torch.Tensor | None = None) -> tuple[Pending, torch.Tensor]:
        """Starts gathering a tensor from all ranks.

        Args:
            tensor: [n], dense and contiguous; the same dtype and n on all ranks.
            into: [ranks * n], dense and contiguous; may contain `tensor` as the part of this rank's number. None: new
                memory.

        Returns:
            The collective in flight, and the tensor that will hold the result, [ranks, n].
        """
        ...

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Overwrites `tensor` on every rank with that of rank `source`; blocks as `Pending.wait` does.

        Args:
            tensor: dense and contiguous; the same dtype and number of elements on all ranks.
            source: a rank.
        """
        ...

    def send(self, tensor: torch.Tensor, destination: int) -> Pending:
        """Starts sending `tensor` to one rank, which calls `recv`; the others take no part.

        The n-th send from one rank to another meets the n-th `recv` there, whatever else the two have issued. Over
        torch.distributed its end is known to `wait` only: it is not `ready` before, and has no `future`.

        Args:
            tensor: dense and contiguous; not to be changed before the end.
            destination: another rank.

        Returns:
            The transfer in flight, which may not end before the other rank has issued its `recv`.

        Raises:
            ValueError: `destination` is this rank, or there is no such rank.
        """
        ...

    def recv(self, tensor: torch.Tensor, source: int) -> Pending:
        """Starts overwriting `tensor` with what rank `source` sends; see `send`.

        Args:
            tensor: dense and contiguous; the dtype and number of elements of what is sent.
            source: another rank.

        Returns:
            The transfer in flight.

        Raises:
            ValueError: `source` is this rank, or there is no such rank.
        """
        ...

    def all_gather_bytes(self, payload: bytes, capacity_bytes: int, device: torch.device) -> list[bytes]:
        """Gathers every rank's payload; blocks.

        Args:
            payload: this rank's.
            capacity_bytes: the most that any rank's payload has; the same on all ranks.
            device: where the backend takes tensors.

        Returns:
            The payloads, in rank order.

        Raises:
            ValueError: `payload` is longer than `capacity_bytes`.
        """
        ...

    def ranks_per_node(self, device: torch.device) -> int:
        """Returns how many consecutive ranks each node has; 1 where what launched them says nothing. It may block.

        Every rank calls it, and gets the same.

        Args:
            device: where the backend takes tensors.

        Raises:
            RuntimeError: a rank did not call it within the timeout.
        """
        ...

    def apart(self, devices: Collection[torch.device] = (), ranks: Sequence[int] | None = None) -> Communicator:
        """Duplicates the communicator (MPI_Comm_dup), or splits it: its collectives are not ordered with this one's.

        Every rank calls this at the same place, and later `close` on the result.

        Args:
            devices: of the tensors that it is for. Where ranks have to connect before the first collective on a device,
                they have connected when this returns.
            ranks: ascending, this one and those that give the same; every rank is in one such group (MPI_Comm_split).
                None: all.

        Returns:
            A communicator of those ranks, in their order.

        Raises:
            RuntimeError: a rank did not call it within the timeout, or the ranks could not be connected.
        """
        ...

    def close(self) -> None:
        """Releases what `apart` made; does nothing on other communicators."""
        ...

    def compare_aside(self, key: str, text: str, device: torch.device) -> list[str]:
        """Exchanges texts without a collective, through a store: for ranks that may be out of step. Blocks.

        Args:
            key: of this exchange: the same on every rank, and new each time.
            text: this rank's.
            device: whose timeout applies.

        Returns:
            Every rank's text, in rank order.

        Raises:
            RuntimeError: a rank did not call it within the timeout; ranks that are late raise it too.
        """
        ...


def check_peer(what: str, peer: int, rank: int, size: int) -> None:
    """Raises ValueError unless `peer` is one of `size` ranks and not `rank`; `what` names it in the message."""
    if isinstance(peer, bool) or not isinstance(peer, int) or not 0 <= peer < size or peer == rank:
        raise ValueError(f"{what} must be one of 0 to {size - 1} and not this rank, {rank}; got {peer!r}")
