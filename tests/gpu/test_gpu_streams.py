"""Gradients that are accumulated on several streams: on a GPU, and on CPU under stand-ins for streams."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import stage_streams
import torch
from support.stand_in_streams import stand_in_streams
from torch import nn

import fusedreduce
from fusedreduce.buckets.streams import Streams
from fusedreduce.config import Wire
from fusedreduce.kernels import dispatch

# Wires, and whether gradients are views of the buckets.
TRAVELS: list[tuple[Wire, bool]] = [("native", False), ("native", True), ("bf16", False), ("fp16", False)]


@pytest.fixture(autouse=True)
def torch_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPU not the interpreter: a gradient here has 65,536 elements."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(dispatch, "_triton", lambda: None)


def streams_of(device: torch.device) -> AbstractContextManager[None]:
    """Within: torch.cuda has streams."""
    return nullcontext() if device.type == "cuda" else stand_in_streams()


@pytest.mark.parametrize(("wire", "views"), TRAVELS)
def test_pack_waits_for_the_late_one_of_two_streams(device: torch.device, group: None, wire: Wire, views: bool) -> None:
    with streams_of(device):
        assert stage_streams.late_steps(device, wire, views) == 0


def test_gradients_have_the_streams_on_which_their_nodes_were_made(
    device: torch.device, group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[set[int]] = []
    record = Streams.record

    def note(self: Streams, parameter: int, where: torch.device) -> None:
        record(self, parameter, where)
        recorded.append(set(self._made[0]))

    monkeypatch.setattr(Streams, "record", note)
    with streams_of(device):
        model = stage_streams.Branches(device)
        ddp = fusedreduce.DistributedDataParallel(model)
        ddp(torch.randn(8, stage_streams.WIDTH, device=device)).square().mean().backward()
        assert len(recorded) == len(list(model.parameters())), "each parameter's stream is recorded once"
        assert recorded[-1] == {stream.cuda_stream for stream in model.streams} and len(recorded[-1]) == 2


def test_the_wrapper_keeps_nodes_that_somebody_holds(device: torch.device, group: None) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to(device)
    held = [one.view_as(one).grad_fn.next_functions[0][0] for one in model.parameters()]  # type: ignore[union-attr]
    ddp = fusedreduce.DistributedDataParallel(model)
    reducer: Any = ddp.reducer
    kept = reducer.reducer.cycle.hooks.nodes
    assert len(kept) == 4 and all(mine is theirs for mine, theirs in zip(kept, held, strict=True))
