"""How long a communicator waits is what its group was given: with fractions of a second, and beyond a day."""

from __future__ import annotations

import datetime

import pytest
import torch
import torch.distributed as dist
from support.ranks import RankPool

from fusedreduce import LocalGroup, ProcessGroupCommunicator

CPU = torch.device("cpu")
TIMEOUTS = (datetime.timedelta(seconds=90.75), datetime.timedelta(days=1, hours=3, milliseconds=250))


def of_groups(rank: int, world: int) -> list[float]:
    found = []
    for timeout in TIMEOUTS:
        group = dist.new_group(timeout=timeout)
        communicator = ProcessGroupCommunicator(group)
        apart = communicator.apart()
        found += [communicator.timeout_s(CPU), apart.timeout_s(CPU)]
        apart.close()
        dist.destroy_process_group(group)
    return found


def test_of_groups_of_torch_and_of_what_is_made_apart_from_them(two: RankPool) -> None:
    assert two.run(of_groups) == [[90.75, 90.75, 97_200.25, 97_200.25]] * 2


@pytest.mark.parametrize("timeout_s", [0.25, 97_200.25])
def test_of_ranks_that_are_threads(timeout_s: float) -> None:
    with LocalGroup(2, timeout_s=timeout_s) as group:
        communicator = group.communicator(1)
        assert communicator.timeout_s(CPU) == communicator.apart().timeout_s(CPU) == timeout_s
