"""Failures: what went wrong with a reducer's step, and whether its ranks can go on together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .comm.protocol import Communicator
from .errors import CollectiveError, FusedReduceError


class Failures:
    """Of one reducer. Called under its lock.

    Attributes:
        text: of what went wrong; empty: nothing has.
        of_collective: it was a collective: its group cannot be used any more.
    """

    def __init__(self) -> None:
        self.text = ""
        self.of_collective = False
        self._resets = 0

    def note(self, error: BaseException) -> None:
        """A hook, kernel or collective has raised."""
        self.text = f"{type(error).__name__}: {error}"
        self.of_collective = isinstance(error, CollectiveError)

    def forget(self) -> None:
        """That step was given up."""
        self.text, self.of_collective = "", False

    def use_other_ranks(self) -> None:
        """Another communicator was set, on which nothing has been compared."""
        self._resets = 0

    def compare(self, communicator: Communicator, device: torch.device, issued: int, stand: str, failed: bool) -> bool:
        """Whether all ranks stand at the same place; each calls it, within the group's timeout.

        Args:
            communicator: the ranks.
            device: where its backend takes tensors.
            issued: collectives of this rank.
            stand: the rest of what tells places apart.
            failed: a collective has.

        Raises:
            FusedReduceError: the group cannot be used any more; on every rank that came.
        """
        self._resets += 1
        mine = f"{issued} {stand} {'failed' if failed else 'whole'}"
        try:
            held = communicator.compare_aside(f"reset {self._resets}", mine, device)
        except RuntimeError as error:
            raise self._lost(communicator, f"not every rank called reset() in time: {error}") from error
        if any(one.endswith("failed") for one in held):
            which = _where(held, lambda one: one.endswith("failed"))
            raise self._lost(communicator, f"a collective failed, on ranks {which}")
        by_rank = [one.split()[0] for one in held]
        if len(set(by_rank)) > 1:
            raise self._lost(communicator, f"ranks have issued different numbers of collectives, by rank: {by_rank}")
        return len(set(held)) == 1

    def lost_text(self, rank: int) -> str:
        """What to tell who wants to go on without another communicator."""
        return (
            f"rank {rank}: the process group cannot be used any more; give every rank a new one (set_communicator, or "
            f"a wrapper's _update_process_group). {self.text}"
        )

    def _lost(self, communicator: Communicator, why: str) -> FusedReduceError:
        self.text = why
        return FusedReduceError(self.lost_text(communicator.rank))


def _where(held: Sequence[str], is_so: Callable[[str], bool]) -> str:
    return ", ".join(str(rank) for rank, one in enumerate(held) if is_so(one))
