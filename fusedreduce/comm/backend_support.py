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
SUMMABLE: dict[tuple[str, str], frozenset[torch.dtype]] = {
    ("gloo", "cpu"): _ALL_FLOATS,
    # It can, but its collectives are not ordered with CUDA streams, on which unpack would run.
    ("gloo", "cuda"): frozenset(),
    ("nccl", "cuda"): _ALL_FLOATS,
    ("mpi", "cpu"): frozenset({torch.float32, torch.float64}),
}
_REFUSAL = re.compile(r"type|dtype|support|implement", re.IGNORECASE)


class BackendSupport:
    """Which collectives the backends of one group have, as far as they were tried: the same on every rank."""

    def __init__(self) -> None:
        self._tried: dict[tuple[str, torch.device], str] = {}  # why it was refused; empty: it was not

    def check(
        self,
        communicator: Communicator,
        backend: str,
        verb: str,
        dtype: torch.dtype,
        device: torch.device,
        collective: Callable[[], object],
        advice: str = "choose another wire",
    ) -> None:
        """Checks that a backend has a collective.

        Args:
            communicator: the ranks.
            backend: its name.
            verb: what the collective does, for the error.
            dtype: of the tensors.
            device: of the tensors.
            collective: tries it, and waits; called if the backend is not known.
            advice: what to do where it has not.

        Raises:
            UnsupportedWireError: it has not; on every rank.
            CollectiveError: a peer did not answer.
        """
        summable = SUMMABLE.get((backend, device.type))
        if summable is None:
            if (verb, device) not in self._tried:
                self._tried[verb, device] = _refusal(communicator, f"{backend} can {verb}", collective)
            refusal = self._tried[verb, device]
        elif not summable:
            refusal = "its collectives are not ordered with the device's streams"
        elif dtype in (*summable, torch.uint8):  # bytes are only exchanged
            refusal = ""
        else:
            refusal = f"there it can sum {', '.join(sorted(map(str, summable)))}"
        if refusal:
            raise UnsupportedWireError(
                f"backend {backend!r} cannot {verb} on {device.type} ({refusal}); {advice}, or another backend for "
                "this device"
            )


def _refusal(communicator: Communicator, what: str, collective: Callable[[], object]) -> str:
    try:
        collective()
    except (RuntimeError, TypeError, ValueError) as error:
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, RuntimeError) and not _REFUSAL.search(text):  # a rank that died, not a refusal
            raise collective_failed(f"trying whether {what} failed", communicator, error) from error
        return text
    return ""
