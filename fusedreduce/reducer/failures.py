"""After a step has failed: whether the ranks of a reducer can go on together."""

from __future__ import annotations

import torch

from ..comm.protocol import Communicator
from ..comm.waiting import mark_lost
from ..errors import FusedReduceError


def compare(
    communicator: Communicator, device: torch.device, resets: int, issued: int, rounds: int, plan_state: str
) -> tuple[bool, int]:
    """Compares the ranks after a failure; each calls it, within the group's timeout.

    Args:
        communicator: the ranks.
        device: device whose timeout holds.
        resets: calls of reset() of this rank, this one included.
        issued: collectives that this rank has issued.
        rounds: synchronised steps that this rank has ended.
        plan_state: the plan in use, and whether it was learned.

    Returns:
        Whether all ranks have the same plan state, and the largest number of steps that one has ended.

    Raises:
        FusedReduceError: the group cannot be used any more; on every rank that called this.
    """
    mine = f"{issued} {rounds} {plan_state} {'failed' if communicator.lost else 'whole'}"
    try:
        texts = communicator.compare_aside(f"reset {resets}", mine, device)
    except RuntimeError as error:
        raise lost_error(communicator, f"not every rank called reset() in time: {error}") from error
    failed = ", ".join(str(rank) for rank, text in enumerate(texts) if text.endswith("failed"))
    if failed:
        raise lost_error(communicator, f"a collective failed, on ranks {failed}. {communicator.lost}".rstrip())
    by_rank = [text.split()[0] for text in texts]
    if len(set(by_rank)) > 1:
        raise lost_error(communicator, f"ranks have issued different numbers of collectives, by rank: {by_rank}")
    fields = [text.split(maxsplit=2) for text in texts]
    return len({rest for _, _, rest in fields}) == 1, max(int(ended) for _, ended, _ in fields)


def lost_error(communicator: Communicator, why: str) -> FusedReduceError:
    """The error for using a group that is lost, and marks it as lost.

    Args:
        communicator: the group.
        why: what has happened to it.
    """
    mark_lost(communicator, why)
    return FusedReduceError(
        f"rank {communicator.rank}: the process group cannot be used any more; make a new one on every rank, and "
        f"give it to set_communicator(), or to a wrapper's _update_process_group(). {why}"
    )
