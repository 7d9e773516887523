"""Nodes: how many consecutive ranks of a group each node has.

torchrun numbers processes node by node: RANK = node * LOCAL_WORLD_SIZE + LOCAL_RANK. A group of some of them has as
many per node as share that node, where each node has equally many and they follow one another.

Example, LOCAL_WORLD_SIZE = 4: ranks 0 to 7 are 4 per node; a group of ranks 0, 2, 4 and 6 has 2.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import groupby

import torch

from .protocol import Communicator

_MOST_DIGITS = 9


def launched_per_node(members: Sequence[int], rank: int, environment: Mapping[str, str]) -> int:
    """How many consecutive members each node has, as the environment of one process says.

    Args:
        members: ranks of the default group, in the order of the group in question.
        rank: of this process in the default group.
        environment: RANK, LOCAL_RANK and LOCAL_WORLD_SIZE, as torchrun sets them.

    Returns:
        The number; 1 where a variable is missing or they do not fit together, or nodes have different numbers.
    """
    told = [environment.get(name, "") for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    if not all(one.isdecimal() and len(one) <= _MOST_DIGITS for one in told):
        return 1
    its_rank, local_rank, per_node = map(int, told)
    if its_rank != rank or not per_node or local_rank != rank % per_node:
        return 1
    runs = [(node, len(list(run))) for node, run in groupby(one // per_node for one in members)]
    counts = {count for _, count in runs}
    return counts.pop() if len(counts) == 1 and len({node for node, _ in runs}) == len(runs) else 1


def agreed_per_node(communicator: Communicator, members: Sequence[int], rank: int, device: torch.device) -> int:
    """What `launched_per_node` says of this process's environment; 1 if not all ranks are told the same. It blocks.

    Args:
        communicator: the group.
        members: its ranks in the default group.
        rank: of this process in the default group.
        device: where the backend takes tensors.

    Raises:
        RuntimeError: a rank did not answer.
    """
    mine = str(launched_per_node(members, rank, os.environ)).encode()
    told = communicator.all_gather_bytes(mine, _MOST_DIGITS, device)
    return int(mine) if set(told) == {mine} else 1


def node_of(rank: int, per_node: int) -> range:
    """The ranks of a rank's node."""
    first = rank // per_node * per_node
    return range(first, first + per_node)


def peers_across(rank: int, per_node: int, ranks: int) -> range:
    """Of each node the rank with as many before it as `rank` has on its own."""
    return range(rank % per_node, ranks, per_node)
