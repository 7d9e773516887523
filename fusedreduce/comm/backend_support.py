"""BackendSupport: which collectives a backend has. torch's own backends are known; another one is tried once."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from ..errors import UnsupportedWireError
from .protocol import Communicator
from .waiting import collective_failed

_ALL_FLOATS = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})
# The dtypes that each backend can sum, by device type. Those that can sum any have an all-to-all too.
_SUMMABLE: dict[tuple[str, str], frozenset[torch.dtype]] = {
    ("gloo", "cpu"): _ALL_FLOATS,
    # It can, but its collectives are not ordered with CUDA streams, on which unpack would run.
    ("gloo", "cuda"): frozenset(),
    ("nccl", "cuda"): _ALL_FLOATS,
    ("mpi", "cpu"): frozenset({torch.float32, torch.float64}),
}
_REFUSAL = re.compile(r"type|dtype|support|implement", re.IGNORECASE)
Collective = Callable[[torch.Tensor], object]  # waits; of one element per rank


class BackendSupport:
    """Which collectives the backends of a group have, as far as was asked: the same on every rank."""

    def __init__(self) -> None:
        self._refusals: dict[tuple[str, torch.dtype, torch.device], str] = {}  # empty: none

    def check_sum(
        self, communicator: Communicator, backend: str, dtype: torch.dtype, device: torch.device, collective: Collective
    ) -> None:
        """Raises UnsupportedWireError if `backend` cannot sum tensors of `dtype` on `device`."""
        summable = _SUMMABLE.get((backend, device.type))
        known = None
        if summable is not None:
            names = ", ".join(sorted(map(str, summable))) or "no dtype that fusedreduce could use"
            known = "" if dtype in summable else f"there it can sum {names}"
        what = f"cannot all-reduce {dtype}"
        self._check(communicator, backend, what, dtype, device, known, collective)

    def check_exchange(
        self, communicator: Communicator, backend: str, device: torch.device, collective: Collective
    ) -> None:
        """Raises UnsupportedWireError if `backend` has no all-to-all of bytes on `device`."""
        summable = _SUMMABLE.get((backend, device.type))
        known = None if summable is None else "" if summable else "it is not ordered with the device's streams"
        what = "has no all-to-all, by which three and more ranks exchange what they add up in fp32,"
        self._check(communicator, backend, what, torch.uint8, device, known, collective)

    def _check(
        self,
        communicator: Communicator,
        backend: str,
        what: str,
        dtype: torch.dtype,
        device: torch.device,
        known: str | None,
        collective: Collective,
    ) -> None:
        key = what, dtype, device
        if key not in self._refusals:
            tried = torch.zeros(communicator.size, dtype=dtype, device=device)
            self._refusals[key] = (
                known if known is not None else _refusal(communicator, f"{backend} {what}", tried, collective)
            )
        if reason := self._refusals[key]:
            raise UnsupportedWireError(
                f"backend {backend!r} {what} on {device.type} ({reason}); choose another wire, or another backend for "
                "this device"
            )


def _refusal(communicator: Communicator, what: str, tried: torch.Tensor, collective: Collective) -> str:
    try:
        collective(tried)
    except (RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, RuntimeError) and not _REFUSAL.search(str(error)):  # a rank that died, not a refusal
            raise collective_failed(f"trying whether {what} failed", communicator, error) from error
        return f"{type(error).__name__}: {error}"
    return ""
