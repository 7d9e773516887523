"""Gradients that are accumulated on several streams: on a GPU, and on CPU under stand-ins for streams."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from support.cuda.stand_in_streams import stand_in_streams
from support.inside import WAITS_FOR_GRADIENTS
from support.on_device import torch_path as torch_path
from torch import nn

import fusedreduce
from fusedreduce.config import Wire
from fusedreduce.kernels.current_stream import current_stream

# Wires, and whether gradients are views of the buckets.
TRAVELS: list[tuple[Wire, bool]] = [("native", False), ("native", True), ("bf16", False), ("fp16", False)]
SENT = {"native": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SLOW_CYCLES = 20_000_000  # 10 ms and more
WIDTH = 256
STEPS = 10


def streams_of(device: torch.device) -> AbstractContextManager[None]:
    """Within: torch.cuda has streams."""
    return nullcontext() if device.type == "cuda" else stand_in_streams()


class _Slow(torch.autograd.Function):
    """Its backward keeps the stream of its forward waiting."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, cycles: int) -> torch.Tensor:
        ctx.cycles, ctx.stream = cycles, torch.cuda.current_stream()
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        with torch.cuda.stream(ctx.stream):  # autograd has made it current already
            torch.cuda._sleep(ctx.cycles)
        return gradients[0], None


class Branches(nn.Module):
    """Two halves of one bucket, run forward, and so backward, on a stream each.

    A gradient is accumulated on the stream that was current when its AccumulateGrad node was made, wherever it comes
    from. A wrapper makes the nodes that nobody holds, and keeps all of them: made by it, they would all have one
    stream. So they are made here, each under its branch's stream, and held.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(WIDTH, WIDTH, device=device) for _ in range(2))
        self.cycles = [0, 0]
        self.streams = [torch.cuda.Stream(device), torch.cuda.Stream(device)]
        self._nodes: list[object] = []
        for layer, stream in zip((self.first, self.second), self.streams, strict=True):
            with torch.cuda.stream(stream):
                functions = [parameter.view_as(parameter).grad_fn for parameter in layer.parameters()]
                self._nodes += [function.next_functions[0][0] for function in functions if function is not None]

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        current = torch.cuda.current_stream()
        parts = []
        for layer, stream, cycles in zip((self.first, self.second), self.streams, self.cycles, strict=True):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                parts.append(_Slow.apply(layer(features), cycles))
        for stream in self.streams:
            current.wait_stream(stream)
        return torch.tanh(parts[0]) * torch.tanh(parts[1])


def late_steps(device: torch.device, wire: Wire = "bf16", views: bool = False) -> int:
    """How many of STEPS steps were wrong, each with one of two streams late."""
    torch.manual_seed(0)
    model = Branches(device)
    config = fusedreduce.ReduceConfig(wire=wire)
    ddp = fusedreduce.DistributedDataParallel(model, gradient_as_bucket_view=views, reduce=config)
    wrong = 0
    for step in range(STEPS):
        batch = torch.randn(32, WIDTH, device=device)
        model.cycles = [0, 0]
        ddp.zero_grad()
        with ddp.no_sync():
            ddp(batch).square().mean().backward()
        local = [one.grad.clone() for one in model.parameters() if one.grad is not None]
        for one in model.parameters():
            # A gradient that is packed too early is what its memory held before: not the very same gradient, please.
            assert one.grad is not None
            one.grad.fill_(float("nan"))
        torch.cuda.synchronize(device)
        # Each stream is the late one in turn.
        model.cycles = [SLOW_CYCLES, 0] if step % 2 else [0, SLOW_CYCLES]
        ddp.zero_grad()
        ddp(batch).square().mean().backward()
        averaged = [one.grad.clone() for one in model.parameters() if one.grad is not None]
        torch.cuda.synchronize(device)
        rounded = [one.to(SENT[wire]).float() for one in local]
        wrong += not all(torch.equal(ours, mine) for ours, mine in zip(averaged, rounded, strict=True))
    return wrong


@pytest.mark.parametrize(("wire", "views"), TRAVELS)
def test_pack_waits_for_the_late_one_of_two_streams(device: torch.device, group: None, wire: Wire, views: bool) -> None:
    with streams_of(device):
        assert late_steps(device, wire, views) == 0


def test_without_that_wait_some_steps_are_wrong(
    device: torch.device, group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the test above would show nothing. A bucket is packed behind the gradient that comes last, on that one's
    stream: in every second step the other stream is the late one."""
    WAITS_FOR_GRADIENTS.replace(monkeypatch, lambda *_: None)
    with streams_of(device):
        assert late_steps(device) >= 1


@pytest.mark.gpu
def test_the_current_stream_of_a_gpu_is_torchs() -> None:
    """Outside and within side streams, of torch's pool and a foreign one."""
    device = torch.device("cuda", torch.cuda.current_device())
    foreign = torch.cuda.ExternalStream(torch.cuda.Stream(device).cuda_stream, device)
    for stream in (torch.cuda.default_stream(device), torch.cuda.Stream(device), foreign, torch.cuda.Stream(device)):
        with torch.cuda.stream(stream):
            for _ in range(2):
                ours, theirs = current_stream(device), torch.cuda.current_stream(device)
                assert (ours.cuda_stream, ours.device) == (theirs.cuda_stream, theirs.device)
                assert ours.cuda_stream == stream.cuda_stream
