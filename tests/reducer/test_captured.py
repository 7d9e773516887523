"""Steps are refused while a CUDA graph is being captured: before anything of the capture is touched, and unharmed.

There is no capture on a CPU: torch is made to say so, and the reducer that it is on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.comm_hooks import Shown
from support.inside import inside
from support.leaf_steps import CAPS, Wire, clear, given, leaves
from support.loopback import Loopback
from torch import nn

import fusedreduce
from fusedreduce import (
    Asynchronous,
    BoundedStaleness,
    FusedReduceError,
    LocalGroup,
    ReduceConfig,
    Reducer,
    Synchronous,
    clip_grad_norm_,
)
from fusedreduce.config import SyncMode
from fusedreduce.reducer.state import ReducerState

pytestmark = pytest.mark.usefixtures("path")

MODES = (Synchronous(), BoundedStaleness(1), Asynchronous())
NUMELS = (3, 35, 60)


class Pair:
    """Two reducers that do the same steps, one of them through a capture in between.

    Args:
        mode: of both.
    """

    def __init__(self, mode: SyncMode) -> None:
        self.communicators = (Loopback(), Loopback())
        self.reducers = [
            Reducer(
                leaves(NUMELS),
                communicator,
                ReduceConfig(wire="bf16", sync_mode=mode),
                caps=CAPS,
            )
            for communicator in self.communicators
        ]
        self._steps = 0

    def step(self) -> None:
        """Of both, and their gradients are the same."""
        self._steps += 1
        found = []
        for reducer in self.reducers:
            clear(list(reducer.parameters))
            loss = self.loss(reducer)
            reducer.prepare_for_forward()
            reducer.prepare_for_backward(loss)
            reducer.backward(loss)
            found.append([parameter.grad for parameter in reducer.parameters])
        for one, other in zip(*found, strict=True):
            assert (one is None) == (other is None)
            assert one is None or other is None or torch.equal(one, other)
        assert self.communicators[0].calls == self.communicators[1].calls

    def loss(self, reducer: Reducer) -> torch.Tensor:
        """Of the step that comes."""
        generator = torch.Generator().manual_seed(self._steps)
        return given(reducer.parameters, [torch.randn(numel, generator=generator) for numel in NUMELS])


def _captured(patched: pytest.MonkeyPatch, reducer: Reducer) -> None:
    patched.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    inside(reducer).pretend_captured_on(patched, torch.device("cuda", 0))


DOORS: dict[str, Callable[[Reducer, torch.Tensor], object]] = {
    "prepare_for_forward": lambda reducer, loss: reducer.prepare_for_forward(),
    "begin_forward": lambda reducer, loss: inside(reducer).begin_forward(),
    "prepare_for_backward": lambda reducer, loss: reducer.prepare_for_backward(loss),
    "finalize": lambda reducer, loss: reducer.finalize(),
    "flush": lambda reducer, loss: reducer.flush(),
    "state_dict": lambda reducer, loss: reducer.state_dict(),
    "clip_grad_norm_": lambda reducer, loss: clip_grad_norm_(reducer, 1.0),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: type(mode).__name__)
def test_every_way_into_a_reducer_is_closed_and_it_goes_on_after(
    mode: SyncMode, door: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(mode)
    reducer = pair.reducers[0]
    for _ in range(3):
        pair.step()
    before = [parameter.grad for parameter in reducer.parameters]
    with monkeypatch.context() as patched:
        _captured(patched, reducer)
        with pytest.raises(FusedReduceError, match="a CUDA graph is being captured.*make_graphed_callables"):
            DOORS[door](reducer, pair.loss(reducer))
    assert reducer.state is ReducerState.IDLE
    assert all(parameter.grad is one for parameter, one in zip(reducer.parameters, before, strict=True))
    for _ in range(3):
        pair.step()


@pytest.mark.parametrize("door", ["finalize", "flush", "state_dict", "zero_grad"])
def test_a_launched_step_is_not_completed_within_a_capture(door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalGroup(1, one_thread=True) as group:
        parameter = torch.zeros(3, requires_grad=True)
        reducer = Reducer([parameter], group.communicator(0))
        loss = given([parameter], [torch.ones(3)])
        reducer.prepare_for_backward(loss)
        loss.backward()
        with monkeypatch.context() as patched:
            _captured(patched, reducer)
            with pytest.raises(FusedReduceError, match="a CUDA graph is being captured"):
                getattr(reducer, door)()
        assert reducer.state is ReducerState.LAUNCHED
        reducer.finalize()
        assert parameter.grad is not None and parameter.grad.tolist() == [1.0] * 3


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: type(mode).__name__)
def test_a_backward_alone_is_refused_before_it_makes_a_gradient(
    mode: SyncMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(mode)
    reducer = pair.reducers[0]
    for _ in range(3):
        pair.step()
    clear(list(reducer.parameters))
    loss = pair.loss(reducer)
    reducer.prepare_for_backward(loss)
    with monkeypatch.context() as patched:
        _captured(patched, reducer)
        with pytest.raises(FusedReduceError, match="a CUDA graph is being captured"):
            loss.backward()
    assert reducer.state is ReducerState.ARMED
    assert all(parameter.grad is None for parameter in reducer.parameters)
    for _ in range(3):
        pair.step()


@pytest.mark.parametrize("synced", [True, False], ids=["a step", "no_sync"])
def test_a_forward_of_the_wrapper_is_refused_and_the_next_step_works(
    alone: None, synced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(3, 2)
    ddp = fusedreduce.DistributedDataParallel(model, reduce=ReduceConfig(wire="bf16"))
    batch = torch.ones(4, 3)
    ddp(batch).sum().backward()
    facade: Any = ddp.reducer
    collectives = facade.reducer.stats()["collectives"]
    with monkeypatch.context() as patched:
        _captured(patched, facade.reducer)
        ddp.require_backward_grad_sync = synced
        with pytest.raises(FusedReduceError, match="a CUDA graph is being captured"):
            ddp(batch)
        ddp.require_backward_grad_sync = True
        with torch.no_grad():
            assert ddp(batch).shape == (4, 2), "nothing is reduced where there is no gradient"
    assert facade.reducer.stats()["collectives"] == collectives
    ddp.zero_grad()
    ddp(batch).sum().backward()
    assert model.weight.grad is not None and model.weight.grad.tolist() == [[4.0] * 3] * 2


class OnCuda(torch.Tensor):
    """Says that it is on a GPU."""

    device = torch.device("cuda", 0)


@pytest.mark.parametrize("options", [{}, {"grad_stats": True}, {"check_finite": "count"}], ids=str)
@pytest.mark.parametrize("wire", ["native", "bf16", "fp16"])
def test_the_hook_refuses_and_the_next_step_works(
    alone: None, wire: Wire, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = fusedreduce.FusedHookState(wire=wire, **options)
    parameters = [torch.full((3,), 2.0)]
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        shown: Any = Shown(0, parameters, last=True, buffer=torch.ones(3).as_subclass(OnCuda))
        with pytest.raises(FusedReduceError, match="a CUDA graph is being captured"):
            fusedreduce.fused_hook(state, shown)
    assert state.stats()["collectives"] == 0 and shown.buffer().tolist() == [1.0] * 3
    shown = Shown(0, parameters, last=True)
    assert fusedreduce.fused_hook(state, shown).wait().tolist() == [2.0] * 3
    assert state.stats()["collectives"] == (2 if "check_finite" in options else 1)
