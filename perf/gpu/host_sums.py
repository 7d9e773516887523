"""Sums over ranks through the host's memory: two processes that share one GPU can reduce, which NCCL refuses.

Gloo sums CPU tensors only as far as fusedreduce is concerned: the end of its collectives on CUDA tensors is not ordered
with streams. So each collective copies to the host, which waits for the GPU, sums there and copies back. It is slow.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from fusedreduce.comm.process_group import ProcessGroupCommunicator
from fusedreduce.comm.protocol import ReduceOp

CPU = torch.device("cpu")


class _Done:
    """A collective that is over: what is left is the copy back, on the stream that issued it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._copied = torch.cuda.Event() if tensor.is_cuda else None
        if self._copied is not None:
            self._copied.record()

    def notify(self, done: Callable[[], None]) -> None:
        done()

    def future(self) -> torch.futures.Future[list[torch.Tensor]]:
        devices: list[int | str | torch.device] = [self._tensor.device] if self._tensor.is_cuda else []
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(devices=devices)
        self.wait()
        future.set_result([self._tensor])
        return future

    def ready(self) -> bool:
        return True

    def wait(self) -> None:
        if self._copied is not None:
            torch.cuda.current_stream(self._tensor.device).wait_event(self._copied)


class HostSums:
    """A Communicator over the default group, which must be Gloo's."""

    def __init__(self) -> None:
        self._group = ProcessGroupCommunicator()
        self.lost = ""
        self.sums = 0

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def size(self) -> int:
        return self._group.size

    def timeout_s(self, device: torch.device | None = None) -> float:
        return self._group.timeout_s(CPU)

    def check_wire(self, dtype: torch.dtype, device: torch.device) -> None:
        self._group.check_wire(dtype, CPU)

    def waits_in_backward(self, device: torch.device) -> bool:
        return True

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> _Done:
        self.sums += op == "sum"
        host = tensor.to(CPU, copy=True)
        self._group.all_reduce(host, op).wait()
        tensor.copy_(host)
        return _Done(tensor)

    def reduce(self, tensor: torch.Tensor, root: int, op: ReduceOp = "sum") -> _Done:
        return self.all_reduce(tensor, op)

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> _Done:
        host = torch.empty_like(output, device=CPU)
        self._group.all_to_all(host, input.to(CPU)).wait()
        output.copy_(host)
        return _Done(output)

    def all_reduce_sparse(self, tensor: torch.Tensor) -> _Done:
        raise NotImplementedError("no sparse gradients here")

    def all_gather(self, tensor: torch.Tensor) -> tuple[_Done, torch.Tensor]:
        pending, rows = self._group.all_gather(tensor.to(CPU, copy=True))
        pending.wait()
        gathered = rows.to(tensor.device)
        return _Done(gathered), gathered

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        host = tensor.to(CPU, copy=True)
        self._group.broadcast(host, source)
        tensor.copy_(host)

    def all_gather_bytes(self, payload: bytes, capacity_bytes: int, device: torch.device) -> list[bytes]:
        return self._group.all_gather_bytes(payload, capacity_bytes, CPU)

    def apart(self, devices: Collection[torch.device] = ()) -> HostSums:
        return self

    def close(self) -> None:
        """Nothing to give back."""

    def compare_aside(self, key: str, text: str, device: torch.device) -> list[str]:
        return self._group.compare_aside(key, text, CPU)
