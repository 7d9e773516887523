"""What the order checker looks at: training steps through every way in, on a device that is CUDA, or passes for it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.optim import SGD, AdamW, Optimizer

from fusedreduce import (
    Asynchronous,
    BoundedStaleness,
    DistributedDataParallel,
    FusedGradScaler,
    FusedHookState,
    ReduceConfig,
    Reducer,
    clip_grad_norm_,
    fused_hook,
)
from fusedreduce.comm.process_group import ProcessGroupCommunicator
from fusedreduce.planning.bucketing import BucketCaps
from support.cuda.order_trace import Recorder
from support.leaf_steps import ended

_TWO_LAYERS_MB, _ONE_LAYER_MB, ONE_WEIGHT_MB = 0.002, 0.001, 0.0005
_STEPS = 7
_STEADY = 3
_ONE_LAYER_BYTES = int(_ONE_LAYER_MB * 2**20)
# Plans are decided on before steps 14, 22 and 30, from what the ranks have measured: until then the host waits.
_STEPS_TO_PLAN = 34
# One step, from forward to the optimizer's.
Body = Callable[[Any, Optimizer, torch.Tensor], None]


class Case:
    """Training steps, the last of them steady.

    Args:
        model: builds it, without arguments.
        wrap: makes of it what is trained, given a recorder; None: our wrapper, with what follows.
        body: one step.
        optimizer: builds it, of parameters.
        to_none: how gradients are zeroed.
        permitted: what of the package may have the host wait, by name: why.
        steps: how many.
        ranks: that train, where there is no GPU.
        config, arguments: of the wrapper.
    """

    def __init__(
        self,
        *,
        model: Callable[[], nn.Module] | None = None,
        wrap: Callable[[nn.Module, Recorder], nn.Module] | None = None,
        body: Body | None = None,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
        to_none: bool = True,
        permitted: Mapping[str, str] | None = None,
        steps: int = _STEPS,
        ranks: int = 2,
        config: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        self._model = model or layers
        self._wrap = wrap or (lambda one, _: wrapped(one, config, **arguments))
        self._body = body or step
        self._optimizer = optimizer or (lambda parameters: SGD(parameters, lr=0.1))
        self._to_none = to_none
        self._steps = steps
        self.permitted = permitted or {}
        self.ranks = ranks

    def run(self, recorder: Recorder, device: torch.device) -> nn.Module:
        """Trains, on `device`; what was trained."""
        torch.manual_seed(0)
        model = self._wrap(self._model().to(device), recorder)
        optimizer = self._optimizer(model.parameters())
        batch = torch.randn(4, 16).to(device)
        for number in range(self._steps):
            if number == self._steps - _STEADY:
                recorder.steady()
            optimizer.zero_grad(set_to_none=self._to_none)
            self._body(model, optimizer, batch)
        return model


def wrapped(
    model: nn.Module, config: Mapping[str, Any] | None = None, *, cap_mb: float = _TWO_LAYERS_MB, **arguments: Any
) -> DistributedDataParallel:
    """Ours, with several buckets and, unless `config` says otherwise, one plan."""
    settings = ReduceConfig(**{"policy": "ready", "replan_every": 0, **(config or {})})
    return DistributedDataParallel(model, bucket_cap_mb=cap_mb, reduce=settings, **arguments)


def layers() -> nn.Module:
    """Four linear layers."""
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh())])


class Branches(nn.Module):
    """Two layers with a stream each, on which their gradients are accumulated.

    Args:
        late: the second is used from the third step on.
    """

    def __init__(self, *, late: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
        self._late = late
        self._forwards = 0
        self._streams: list[Any] = []
        self._nodes: list[Any] = []

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """The product of both."""
        self._forwards += 1
        used = 1 if self._late and self._forwards < 3 else 2
        current = torch.cuda.current_stream(features.device)
        parts = []
        for layer, stream in zip(self.layers[:used], self._streams, strict=False):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                parts.append(torch.tanh(layer(features)))
        for stream in self._streams:
            current.wait_stream(stream)
        return parts[0] * parts[-1]

    def on_streams(self, recorder: Recorder) -> Branches:
        """Makes the nodes that accumulate, which a wrapper would make on one stream, on two."""
        device = next(self.parameters()).device
        for layer in self.layers:
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                self._nodes += map(recorder.accumulator, layer.parameters())
            self._streams.append(stream)
        return self


class Transposed(nn.Module):
    """A layer whose gradient has other strides than its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.layer.weight.register_hook(lambda one: one.t().contiguous().t())

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """The layer's."""
        result: torch.Tensor = self.layer(features)
        return result


class Alternating(nn.Module):
    """In every second step another layer is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
        self._forwards = 0

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Two of the layers."""
        self._forwards += 1
        result: torch.Tensor = self.layers[1 + self._forwards % 2](self.layers[0](features))
        return result


class Embedded(nn.Module):
    """A layer with a sparse gradient, and a dense one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(16, 16, sparse=True), nn.Linear(16, 16)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Of the first column's signs."""
        result: torch.Tensor = self.layer(self.embedding((features[:, 0] > 0).long()))
        return result


def step(model: nn.Module, optimizer: Optimizer, batch: torch.Tensor) -> None:
    """The usual."""
    model(batch).square().mean().backward()
    optimizer.step()


def clipped(**options: Any) -> Body:
    """With clipping; `fold`: into the optimizer."""
    fold = options.pop("fold", False)

    def body(model: Any, optimizer: Optimizer, batch: torch.Tensor) -> None:
        model(batch).square().mean().backward()
        clip_grad_norm_(model, 0.01, optimizer if fold else None, **options)
        optimizer.step()

    return body


def scaled(*, clip: bool = False) -> Body:
    """With a loss scaler."""
    scaler_of = functools.cache(FusedGradScaler)

    def body(model: Any, optimizer: Optimizer, batch: torch.Tensor) -> None:
        scaler = scaler_of(model)
        scaler.scale(model(batch).square().mean()).backward()
        if clip:
            scaler.unscale_(optimizer)
            clip_grad_norm_(model, 0.01, optimizer)
        scaler.step(optimizer)
        scaler.update()

    return body


def weighted() -> Body:
    """With a divisor of its own in each step, through a Reducer."""
    reducer_of = functools.cache(lambda model: Reducer(model.parameters(), ProcessGroupCommunicator()))

    def body(model: Any, optimizer: Optimizer, batch: torch.Tensor) -> None:
        reducer = reducer_of(model)
        loss = model(batch).square().mean()
        reducer.prepare_for_backward(loss, divisor=1.0 + int(reducer.stats()["steps"]))
        loss.backward()
        optimizer.step()

    return body


def _lazy(config: Mapping[str, Any], hook: Callable[..., Any] | None = None, **options: Any) -> Case:
    """Through a Reducer whose wires last as long as a step: not every torch's wrapper has the argument."""

    @functools.cache
    def reducer_of(model: nn.Module) -> Reducer:
        settings = ReduceConfig(**{"policy": "ready", "replan_every": 0, **config})
        caps = BucketCaps(first_bytes=_ONE_LAYER_BYTES, cap_bytes=_ONE_LAYER_BYTES)
        communicator = ProcessGroupCommunicator()
        reducer = Reducer(model.parameters(), communicator, settings, caps=caps, lazy_bucket_allocation=True)
        if hook is not None:
            reducer.register_comm_hook(None, hook)
        return reducer

    def body(model: Any, optimizer: Optimizer, batch: torch.Tensor) -> None:
        reducer, loss = reducer_of(model), model(batch).square().mean()
        reducer.prepare_for_backward(loss)
        loss.backward()
        optimizer.step()

    return Case(wrap=lambda model, _: model, body=body, **options)


def joined(**options: Any) -> Body:
    """Within `join`, where this rank always has inputs."""

    def body(model: Any, optimizer: Optimizer, batch: torch.Tensor) -> None:
        with model.join(**options):
            step(model, optimizer, batch)

    return body


def accumulated(model: Any, optimizer: Optimizer, batch: torch.Tensor) -> None:
    """Two micro-batches."""
    with model.no_sync():
        model(batch).square().mean().backward()
    step(model, optimizer, batch)


def measured(model: Any, optimizer: Optimizer, batch: torch.Tensor) -> None:
    """Asks for a norm, which is measured, while device 0 is current."""
    with torch.cuda.device(0):
        step(model, optimizer, batch)
        model.grad_norm()


def flushed(model: Any, optimizer: Optimizer, batch: torch.Tensor) -> None:
    """Late averages land at once, while device 0 is current."""
    model(batch).square().mean().backward()
    with torch.cuda.device(0):
        model.flush(optimizer)


def watched(model: Any, optimizer: Optimizer, batch: torch.Tensor) -> None:
    """A hook on the first layer, whose gradient is the last to come, reads that of the last one, which is packed."""
    first, *_, last = model.parameters()
    handle = first.register_hook(lambda _: (last.grad.norm(), None)[1])
    step(model, optimizer, batch)
    handle.remove()


def elsewhere() -> Body:
    """On a stream of its own; backward is called on another one than forward was."""
    stream_on = functools.cache(lambda device: torch.cuda.Stream(device))

    def body(model: Any, optimizer: Optimizer, batch: torch.Tensor) -> None:
        stream, current = stream_on(batch.device), torch.cuda.current_stream(batch.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            loss = model(batch).square().mean()
        current.wait_stream(stream)
        loss.backward()
        optimizer.step()

    return body


def _fused(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return AdamW(parameters, lr=1e-3, fused=True)


def _hooked(
    *, views: bool = False, cap_mb: float = _TWO_LAYERS_MB, **options: Any
) -> Callable[[nn.Module, Recorder], nn.Module]:
    """torch's wrapper, with our hook."""

    def wrap(model: nn.Module, recorder: Recorder) -> nn.Module:
        ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=cap_mb, gradient_as_bucket_view=views)
        ddp.register_comm_hook(FusedHookState(**options), recorder.comm_hook(fused_hook))
        return ddp

    return wrap


def _branched(
    config: Mapping[str, Any], *, cap_mb: float = _ONE_LAYER_MB, **arguments: Any
) -> Callable[[nn.Module, Recorder], nn.Module]:
    """Branches, by default with a bucket for each."""

    def wrap(model: nn.Module, recorder: Recorder) -> nn.Module:
        assert isinstance(model, Branches)
        return wrapped(model.on_streams(recorder), config, cap_mb=cap_mb, **arguments)

    return wrap


def _compressed(model: nn.Module, _: Recorder) -> nn.Module:
    ddp = wrapped(model)
    ddp.register_comm_hook(None, fp16_compress_hook)
    return ddp


def _doubled_beside(model: nn.Module, _: Recorder) -> nn.Module:
    """With a hook that works on a stream of its own and joins it at the end of backward, as torch's mixed precision."""
    stream_on = functools.cache(torch.cuda.Stream)

    def double(state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        buffer: torch.Tensor = bucket.buffer()
        stream, current = stream_on(buffer.device), torch.cuda.current_stream(buffer.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            buffer.mul_(2.0)

        def join() -> None:
            torch.cuda.current_stream(buffer.device).wait_stream(stream)

        torch.autograd.Variable._execution_engine.queue_callback(join)
        return ended(buffer)

    ddp = wrapped(model)
    ddp.register_comm_hook(None, lambda state, bucket: double(state, bucket))
    return ddp


_BF16: Mapping[str, Any] = {"wire": "bf16"}
_OBSERVED: Mapping[str, Any] = {"grad_stats": True, "check_finite": "count"}
_FED_BACK: Mapping[str, Any] = {"wire": "int4", "error_feedback": True, "stochastic_rounding": True}
_SETTLES = {"unused_parameters.py: nowhere": "which rank has used a parameter that this one has not (docs/limits.md)"}
_KINDS = {"sparse_kinds.py: agreed_kind": "of what kind sparse gradients are, on all ranks (docs/limits.md)"}
_ASKS = {"asynchronous_bucket.py: anywhere": "the same, of a contribution that has come"}
_COUNTS = {"engine.py: _counted_ranks": "how many ranks still have inputs divides the gradients (docs/limits.md)"}
_DECIDES = {"grad_scaler.py: step": "torch's GradScaler.step asks whether to step, unless the optimizer is fused"}
_RAISES = {"non_finite.py: _report": "check_finite='raise' waits at the end of each step, to raise in it"}
_LOOKS = {"asynchronous.py: end_step": "an asynchronous step under a scaler is skipped at once, or not"}

# By name. Every way in, every mode; what the host waits for is named.
CASES: Mapping[str, Callable[[], Case]] = {
    "native": lambda: Case(),
    "bf16": lambda: Case(config=_BF16),
    "gradients stay": lambda: Case(config=_BF16, to_none=False),
    "views": lambda: Case(gradient_as_bucket_view=True),
    "views stay": lambda: Case(gradient_as_bucket_view=True, to_none=False),
    "observed": lambda: Case(config={**_BF16, **_OBSERVED}),
    "observed views": lambda: Case(config=_OBSERVED, gradient_as_bucket_view=True),
    "raises": lambda: Case(config={**_BF16, "check_finite": "raise"}, permitted=_RAISES),
    "streams": lambda: Case(model=Branches, wrap=_branched({**_BF16, **_OBSERVED})),
    "forward elsewhere": lambda: Case(config=_BF16, body=elsewhere()),
    "planned": lambda: Case(config={"policy": "planned"}, steps=_STEPS_TO_PLAN),
    "accumulated": lambda: Case(body=accumulated),
    "static graph": lambda: Case(static_graph=True),
    "other strides": lambda: Case(model=Transposed, config=_BF16),
    "watched": lambda: Case(config=_BF16, body=watched),
    "measured": lambda: Case(config=_BF16, body=measured),
    "hook": lambda: Case(wrap=_hooked()),
    "hook bf16": lambda: Case(wrap=_hooked(wire="bf16", **_OBSERVED)),
    "hook fp16 views": lambda: Case(wrap=_hooked(wire="fp16", views=True)),
    "hook native views": lambda: Case(wrap=_hooked(views=True, **_OBSERVED)),
    "hook sparse": lambda: Case(model=Embedded, wrap=_hooked(wire="bf16")),
    "another hook": lambda: Case(wrap=_compressed),
    "a hook beside": lambda: Case(wrap=_doubled_beside),
    "one step late": lambda: Case(config={**_BF16, "sync_mode": BoundedStaleness(1)}),
    "two steps late": lambda: Case(config={**_OBSERVED, "sync_mode": BoundedStaleness(2)}),
    "asynchronous": lambda: Case(config={**_BF16, "sync_mode": Asynchronous()}),
    "asynchronous scaled": lambda: Case(
        config={"sync_mode": Asynchronous()}, body=scaled(), optimizer=_fused, permitted=_LOOKS
    ),
    "clipped": lambda: Case(body=clipped()),
    "clipped by the optimizer": lambda: Case(body=clipped(fold=True), optimizer=_fused),
    "clipped by the reduction": lambda: Case(body=clipped(fold=True, reuse_norm=True), optimizer=_fused),
    "scaled": lambda: Case(config=_BF16, body=scaled(), optimizer=_fused),
    "scaled and clipped": lambda: Case(config={"wire": "fp16"}, body=scaled(clip=True), optimizer=_fused),
    "scaled views": lambda: Case(config=_OBSERVED, body=scaled(), optimizer=_fused, gradient_as_bucket_view=True),
    "scaled, not fused": lambda: Case(body=scaled(), permitted=_DECIDES),
    "all used": lambda: Case(find_unused_parameters=True),
    "some unused": lambda: Case(model=Alternating, find_unused_parameters=True, permitted=_SETTLES),
    "some unused, late": lambda: Case(
        model=Alternating,
        find_unused_parameters=True,
        config={"sync_mode": BoundedStaleness(1)},
        permitted=_SETTLES,
    ),
    "some unused, asynchronous": lambda: Case(
        model=Alternating, find_unused_parameters=True, config={"sync_mode": Asynchronous()}, permitted=_ASKS
    ),
    "some unused, summed views": lambda: Case(
        model=Alternating,
        find_unused_parameters=True,
        gradient_as_bucket_view=True,
        config={"op": "sum"},
        to_none=False,
        permitted=_SETTLES,
    ),
    "weighted": lambda: Case(wrap=lambda model, _: model, body=weighted()),
    "joined": lambda: Case(body=joined()),
    "joined, divided": lambda: Case(body=joined(divide_by_initial_world_size=False), permitted=_COUNTS),
    "sparse": lambda: Case(model=Embedded, permitted=_KINDS),
    "first used late": lambda: Case(
        model=lambda: Branches(late=True),
        wrap=_branched(_BF16, cap_mb=1, find_unused_parameters=True),
    ),
    "int8": lambda: Case(config={"wire": "int8", **_OBSERVED}),
    "int8 on four": lambda: Case(config={"wire": "int8", **_OBSERVED}, ranks=4, cap_mb=ONE_WEIGHT_MB),
    "int4 with feedback": lambda: Case(config=_FED_BACK, body=scaled(clip=True), optimizer=_fused),
    "int4 with feedback on four": lambda: Case(config=_FED_BACK, body=clipped(), ranks=4, cap_mb=ONE_WEIGHT_MB),
    "int8 in two levels": lambda: Case(config={"wire": "int8", "ranks_per_node": 2}, ranks=4),
    "int8 in two levels on eight": lambda: Case(
        config={"wire": "int8", "ranks_per_node": 2}, ranks=8, cap_mb=ONE_WEIGHT_MB
    ),
    "bf16 added up in fp32": lambda: Case(config={**_BF16, "accumulation": "fp32"}, ranks=4, cap_mb=ONE_WEIGHT_MB),
    "streams, added up in fp32": lambda: Case(
        model=Branches, wrap=_branched({**_BF16, "accumulation": "fp32"}), ranks=4
    ),
    "streams, int8 on four": lambda: Case(model=Branches, wrap=_branched({"wire": "int8"}), ranks=4),
    "hook int8": lambda: Case(wrap=_hooked(wire="int8", views=True)),
    "hook int8 on four": lambda: Case(wrap=_hooked(wire="int8", cap_mb=ONE_WEIGHT_MB, **_OBSERVED), ranks=4),
    "hook int8 in two levels": lambda: Case(wrap=_hooked(wire="int8", ranks_per_node=2, cap_mb=ONE_WEIGHT_MB), ranks=4),
    "hook bf16 added up in fp32": lambda: Case(wrap=_hooked(wire="bf16", accumulation="fp32"), ranks=4),
    "lazy": lambda: _lazy(_BF16),
    "lazy, one step late": lambda: _lazy({**_BF16, "sync_mode": BoundedStaleness(1)}),
    "lazy, int8": lambda: _lazy({"wire": "int8"}),
    "lazy, int8 on four": lambda: _lazy({"wire": "int8"}, ranks=4),
    "lazy, another hook": lambda: _lazy({}, fp16_compress_hook),
    "flushed": lambda: Case(config={**_OBSERVED, "sync_mode": BoundedStaleness(1)}, body=flushed),
}

# With one rank, on a GPU and without one, these must do the same. (What orders a hook's futures, torch does in C++.)
AGREED = ("native", "bf16", "observed", "views", "clipped by the optimizer", "one step late")
