"""Failures: what went wrong with a reducer's step, and whether its ranks can go on together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..comm.protocol import Communicator
from ..comm.waiting import mark_lost
from ..errors import CollectiveError, FusedReduceError


class Failures:
    """Of one reducer. Called under its lock.

    `text`: of what went wrong; empty: nothing has.
    """

    def __init__(self) -> None:
        self.text = ""
        self._resets = 0

    def note(self, error: BaseException, communicator: Communicator) -> None:
        """A hook, kernel or collective has raised."""
        self.text = f"{type(error).__name__}: {error}"
        if isinstance(error, CollectiveError):
            mark_lost(communicator, str(error))

    def clear_failure(self) -> None:
        """That step was given up."""
        self.text = ""

    def restart_count(self) -> None:
        """Another communicator was set, on which nothing has been compared."""
        self._resets = 0

    def compare(self, communicator: Communicator, device: torch.device, issued: int, stand: str) -> bool:
        """Whether all ranks stand at the same place; each calls it, within the group's timeout.

        Args:
            communicator: the ranks.
            device: where its backend takes tensors.
            issued: collectives of this rank.
            stand: the rest of what tells places apart.

        Raises:
            FusedReduceError: the group cannot be used any more; on every rank that came.
        """
        self._resets += 1
        mine = f"{issued} {stand} {'failed' if communicator.lost else 'whole'}"
        try:
            held = communicator.compare_aside(f"reset {self._resets}", mine, device)
        except RuntimeError as error:
            raise lost_error(communicator, f"not every rank called reset() in time: {error}") from error
        if any(one.endswith("failed") for one in held):
            which = _where(held, lambda one: one.endswith("failed"))
            raise lost_error(communicator, f"a collective failed, on ranks {which}. {communicator.lost}".rstrip())
        by_rank = [one.split()[0] for one in held]
        if len(set(by_rank)) > 1:
            raise lost_error(communicator, f"ranks have issued different numbers of collectives, by rank: {by_rank}")
        return len(set(held)) == 1


def lost_error(communicator: Communicator, why: str) -> FusedReduceError:
    """The error for going on without another communicator; marks the group as lost."""
    mark_lost(communicator, why)
    return FusedReduceError(
        f"rank {communicator.rank}: the process group cannot be used any more; give every rank a new one "
        f"(set_communicator(), or a wrapper's _update_process_group). {why}"
    )


def _where(held: Sequence[str], is_so: Callable[[str], bool]) -> str:
    return ", ".join(str(rank) for rank, one in enumerate(held) if is_so(one))
