"""DistributedDataParallel over a group of one, or of threads: what the wrapper itself keeps, clears and forgets."""

from __future__ import annotations

import copy
import json
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from fusedreduce import Asynchronous, BoundedStaleness, BucketCaps, DistributedDataParallel, LocalGroup, ReduceConfig
from fusedreduce.comm.local.group import LocalCommunicator

pytestmark = [
    pytest.mark.usefixtures("path"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # broadcast_buffers has a newer name
]
STATIC = ReduceConfig(policy="static")


def three_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3), nn.Linear(3, 2))


def buckets(ddp: Any, steps: int = 3) -> list[list[int]]:
    """Those of the plan behind some steps."""
    for _ in range(steps):
        ddp(torch.ones(4, 7)).square().sum().backward()
    found: list[list[int]] = json.loads(ddp.plan_json())["buckets"]
    return found


@pytest.mark.parametrize("size", [1, 70, BucketCaps(first_bytes=1, cap_bytes=200)], ids=str)
def test_what_is_made_of_a_wrapper_has_the_bucket_size_that_was_set(alone: None, size: int | BucketCaps) -> None:
    ddp = DistributedDataParallel(three_layers(), reduce=STATIC)
    assert len(buckets(ddp)) == 1
    ddp.set_bucket_size(size)
    wanted = buckets(ddp)
    assert len(wanted) > 1
    for made in (copy.deepcopy(ddp), pickle.loads(pickle.dumps(ddp))):
        assert buckets(made) == wanted and made.bucket_bytes_cap == ddp.bucket_bytes_cap


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("place", ["ignored", "frozen later"])
def test_zero_grad_fills_the_gradients_that_are_in_no_bucket(alone: None, views: bool, place: str) -> None:
    module = three_layers()
    if place == "ignored":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["1.weight"])
    ddp = DistributedDataParallel(module, reduce=STATIC, gradient_as_bucket_view=views)
    for _ in range(2):
        ddp(torch.ones(4, 7)).square().sum().backward()
    module[1].weight.requires_grad_(place == "ignored")
    held = [parameter.grad for parameter in module.parameters()]
    ddp.zero_grad(set_to_none=False)
    for parameter, gradient in zip(module.parameters(), held, strict=True):
        assert gradient is not None and parameter.grad is not None and parameter.grad.eq(0).all()
        assert parameter.grad.data_ptr() == gradient.data_ptr()


@pytest.mark.parametrize("broadcast", [True, False])
def test_flush_takes_rank_0s_buffers_where_they_are_broadcast_and_leaves_them_else(broadcast: bool) -> None:
    modules = [three_layers() for _ in range(3)]
    for rank, module in enumerate(modules):
        module.register_buffer("place", torch.tensor([10.0 + rank]))

    def case(communicator: LocalCommunicator) -> list[float]:
        module = modules[communicator.rank]
        ddp = DistributedDataParallel(
            module,
            reduce=ReduceConfig(sync_mode=Asynchronous()),
            process_group=communicator.process_group(),
            broadcast_buffers=broadcast,
            init_sync=False,
        )
        for _ in range(1 + communicator.rank):  # as often as a rank likes: nothing in forward is a collective
            ddp(torch.ones(4, 7)).square().sum().backward()
        assert module.get_buffer("place").tolist() == [10.0 + communicator.rank]
        ddp.flush()
        found: list[float] = module.get_buffer("place").tolist()
        return found

    with LocalGroup(3, timeout_s=60.5) as group:
        assert group.run(case) == ([[10.0]] * 3 if broadcast else [[10.0], [11.0], [12.0]])


@pytest.mark.parametrize("mode", [BoundedStaleness(1), Asynchronous()], ids=str)
def test_a_copy_says_that_it_has_nothing_of_what_is_under_way(alone: None, mode: Any) -> None:
    ddp = DistributedDataParallel(three_layers(), reduce=ReduceConfig(sync_mode=mode))
    ddp(torch.ones(4, 7)).square().sum().backward()
    with pytest.warns(UserWarning, match="the copy has none of that"):
        pickle.dumps(ddp)
    ddp.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        pickle.dumps(ddp)
