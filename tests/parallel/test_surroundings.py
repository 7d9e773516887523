"""Training in surroundings that scripts make: default device and dtype, inference mode, warnings as errors."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from support.ddp_models import Branches, ComplexNet, Zoo, batch, images, loss_of, mlp
from support.inside import take_torch_path
from support.ranks import on_ranks
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fusedreduce
from fusedreduce import (
    Asynchronous,
    BoundedStaleness,
    FusedGradScaler,
    FusedHookState,
    LocalGroup,
    ProcessGroupCommunicator,
    ReduceConfig,
    Reducer,
    SyncServer,
    collective,
)
from fusedreduce.comm.local.group import LocalCommunicator
from fusedreduce.parallel.sync_device import SyncDevice

STEPS = 4
CAP_MB = 0.004


class Program(NamedTuple):
    """A training of a few steps.

    Args:
        surface: "wrapper", "hook" or "reducer".
        config: of the reduction, as arguments.
        options: of the wrapper, torch's or ours, or of the reducer.
        feature: what is done beside training.
        model: makes the model.
        given: makes a rank's input of a step.
        compared: results are the same each time.
    """

    surface: str
    config: Mapping[str, Any] = {}
    options: Mapping[str, Any] = {}
    feature: str = ""
    model: Callable[[], nn.Module] = mlp
    given: Callable[[int, int], Any] | None = None
    compared: bool = True


class Embedded(nn.Module):
    """A table of sparse gradients in front of a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.table = nn.EmbeddingBag(40, 24, sparse=True, mode="sum")
        self.last = nn.Linear(24, 12)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.table(words))
        return result


def _words(rank: int, step: int) -> torch.Tensor:
    return torch.randint(40, (8, 3), generator=torch.Generator().manual_seed(7919 * step + rank))


def _branch(rank: int, step: int) -> tuple[torch.Tensor, int]:
    return batch(rank, step), (rank + step) % 2


WIRES: Mapping[str, Mapping[str, Any]] = {
    "native": {},
    "bf16": {"wire": "bf16"},
    "fp16": {"wire": "fp16"},
    "bf16+fp32": {"wire": "bf16", "accumulation": "fp32"},
    "int8": {"wire": "int8"},
    "int4": {"wire": "int4"},
    "stochastic": {"wire": "int4", "stochastic_rounding": True},
    "feedback": {"wire": "int8", "error_feedback": True},
    "later": {"wire": "int8", "wire_after": 2, "least_sqnr_db": 10.0},
}
VIEWS = {"gradient_as_bucket_view": True}
UNUSED = {"find_unused_parameters": True}
FEATURES: Mapping[str, Mapping[str, Any]] = {
    "clip": {"grad_stats": True},
    "folded clip": {},
    "scaler": {},
    "no_sync": {},
    "join": {},
    "statistics": {"grad_stats": True, "check_finite": "count"},
    "copies": {},
}
PROGRAMS: Mapping[str, Program] = {
    **{f"wrapper, {name}": Program("wrapper", wire) for name, wire in WIRES.items()},
    **{f"reducer, {name}": Program("reducer", wire) for name, wire in WIRES.items() if name in ("native", "int8")},
    **{
        f"hook, {name}": Program("hook", WIRES[name], options)
        for name, options in {"native": {}, "bf16": VIEWS, "fp16": {}, "bf16+fp32": {}, "int8": {}}.items()
    },
    **{f"wrapper, {name}, views": Program("wrapper", WIRES[name], VIEWS) for name in ("native", "bf16", "int8")},
    "reducer, views made late": Program("reducer", {}, {**VIEWS, "lazy_bucket_allocation": True}),
    "wrapper, planned": Program("wrapper", {"policy": "planned"}, compared=False),
    "wrapper, sum": Program("wrapper", {"op": "sum"}),
    "wrapper, zoo": Program("wrapper", {"wire": "bf16", "policy": "ready"}, model=Zoo, given=images),
    "hook, zoo": Program("hook", {"wire": "bf16"}, model=Zoo, given=images),
    "wrapper, complex": Program("wrapper", model=ComplexNet),
    "wrapper, sparse": Program("wrapper", {"wire": "bf16"}, model=Embedded, given=_words),
    "hook, sparse": Program("hook", {"wire": "bf16"}, model=Embedded, given=_words),
    "wrapper, unused": Program("wrapper", {}, UNUSED, model=Branches, given=_branch),
    "wrapper, unused, views": Program("wrapper", {}, {**UNUSED, **VIEWS}, model=Branches, given=_branch),
    "hook, unused": Program("hook", {"wire": "bf16"}, UNUSED, model=Branches, given=_branch),
    "wrapper, none unused": Program("wrapper", {}, UNUSED),
    "wrapper, static graph": Program("wrapper", {"wire": "bf16"}, {"static_graph": True}),
    "wrapper, torch's hook": Program("wrapper", feature="comm hook"),
    **{
        f"{surface}, {feature}": Program(surface, {"wire": wire, **more}, feature=feature)
        for feature, more in FEATURES.items()
        for surface, wire in (("wrapper", "native"), ("wrapper", "int8"), ("hook", "bf16"))
        if (surface, feature) not in (("hook", "folded clip"), ("hook", "copies"))
    },
    "wrapper, scaler, views": Program("wrapper", {}, VIEWS, feature="scaler"),
    "wrapper, no_sync, views": Program("wrapper", {}, VIEWS, feature="no_sync"),
    "wrapper, no_sync, unused": Program("wrapper", {}, UNUSED, "no_sync", Branches, _branch),
    "wrapper, stale": Program("wrapper", {"sync_mode": BoundedStaleness(1)}, feature="flush"),
    "wrapper, asynchronous": Program("wrapper", {"sync_mode": Asynchronous(2)}, feature="flush", compared=False),
}


# Surroundings


@contextlib.contextmanager
def hostile_device() -> Iterator[None]:
    """A default device, of this thread, that is not the model's."""
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def hostile() -> Iterator[None]:
    """Such a default device, a default dtype, of the process, that is not the model's either, and `python -W error`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with hostile_device(), warnings.catch_warnings():
            warnings.simplefilter("error")
            yield
    finally:
        torch.set_default_dtype(before)


def _inference(*steps: int) -> Callable[[int], AbstractContextManager[None]]:
    """These steps are in inference mode."""
    return lambda step: torch.inference_mode() if step in steps else nullcontext()


class Surroundings(NamedTuple):
    """What is around a whole program, its threads, each backward, and the clipping and optimizer's step behind it.

    `gradients`: hooks of the user's on parameters give gradients that were made in inference mode.
    """

    everything: Callable[[], AbstractContextManager[None]] = nullcontext
    thread: Callable[[], AbstractContextManager[None]] = nullcontext
    backward: Callable[[int], AbstractContextManager[None]] = lambda _: nullcontext()
    update: Callable[[int], AbstractContextManager[None]] = lambda _: nullcontext()
    gradients: bool = False


SURROUNDINGS: Mapping[str, Surroundings] = {
    "defaults, warnings, inference mode": Surroundings(
        hostile, hostile_device, backward=_inference(0, 1, 3), update=_inference(1)
    ),
    "gradients of inference mode": Surroundings(gradients=True),
}


# With three ranks sums are encoded once more.
PHASES = tuple(name for name in PROGRAMS if name.split(", ")[-1] in ("int8", "bf16+fp32", "feedback"))


def run(rank: int, world: int, name: str) -> None:
    """The program gives the same results in all surroundings."""
    program = PROGRAMS[name]
    compare(lambda around: _trained(rank, program, around), compared=program.compared)


def compare(train: Callable[[Surroundings], Sequence[torch.Tensor]], *, compared: bool = True) -> None:
    """Results are the same in all surroundings as in none: byte for byte, dtypes and devices too."""
    plain = train(Surroundings())
    for name, around in SURROUNDINGS.items():
        try:
            found = train(around)
        except Exception as error:
            error.add_note(f"within: {name}")
            raise
        assert len(plain) == len(found) > 0
        for number, (expected, got) in enumerate(zip(plain, found, strict=True)) if compared else ():
            assert got.dtype is expected.dtype and got.device == expected.device, f"result {number} within {name}"
            same = torch.equal(expected.view(torch.uint8), got.view(torch.uint8))
            assert same, f"result {number} differs within {name}"


def _trained(rank: int, program: Program, surroundings: Surroundings) -> list[torch.Tensor]:
    """Gradients of each step as they are before the optimizer's, then the weights."""
    model = program.model()
    given = [(program.given or batch)(rank, step) for step in range(2 * STEPS)]
    results: list[torch.Tensor] = []
    _hook(model, surroundings)
    with surroundings.everything():
        _train(rank, program, model, given, surroundings, results)
    return results + [_plain(parameter) for parameter in model.parameters()]


def _hook(model: nn.Module, around: Surroundings) -> None:
    for parameter in model.parameters() if around.gradients else ():
        if parameter.requires_grad:
            parameter.register_hook(torch.inference_mode()(torch.clone))


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Its values, flat."""
    found = tensor.detach()
    found = found.to_dense() if found.is_sparse else found
    found = torch.view_as_real(found) if found.is_complex() else found
    return found.clone(memory_format=torch.contiguous_format).reshape(-1)


def _wrapped(program: Program, model: nn.Module) -> Any:
    config, options = dict(program.config), dict(program.options)
    if program.surface == "reducer":
        held = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return Reducer(held, ProcessGroupCommunicator(), ReduceConfig(**config), **options)
    options["bucket_cap_mb"] = CAP_MB
    if program.surface == "wrapper":
        config.setdefault("policy", "ready")
        return fusedreduce.DistributedDataParallel(model, reduce=ReduceConfig(**config), **options)
    ddp = TorchDDP(model, **options)
    ddp.register_comm_hook(FusedHookState(**config), fusedreduce.fused_hook)
    return ddp


def _train(
    rank: int,
    program: Program,
    model: nn.Module,
    given: Sequence[Any],
    around: Surroundings,
    results: list[torch.Tensor],
) -> None:
    feature = program.feature
    ddp = _wrapped(program, model)
    if feature == "comm hook":
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if feature == "copies":
        pickle.dumps(FusedHookState(dist.group.WORLD))
        ddp = pickle.loads(pickle.dumps(copy.deepcopy(ddp)))
        model.load_state_dict(ddp.module.state_dict())
    scaler: torch.amp.GradScaler | None = None
    if feature == "scaler":
        ours = isinstance(ddp, fusedreduce.DistributedDataParallel)
        scaler = FusedGradScaler(ddp, init_scale=1024.0) if ours else torch.amp.GradScaler("cpu", init_scale=1024.0)
    trained: nn.Module = model if isinstance(ddp, Reducer) else ddp.module
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.05, fused=feature == "folded clip")
    steps = STEPS - rank if feature == "join" else STEPS
    with ddp.join() if feature == "join" else nullcontext():
        for step in range(steps):
            if feature == "no_sync" and step % 2 == 0:
                with ddp.no_sync():
                    loss = loss_of(ddp(given[STEPS + step]))
                    with around.backward(step):
                        loss.backward()
            _backward(ddp, model, given[step], scaler, around.backward(step))
            results += _gradients(trained)
            with (around.backward if program.surface == "hook" else around.update)(step):
                _update(ddp, feature, optimizer, scaler, results)
                # torch's DDP leaves gradients that only inference mode may write.
                optimizer.zero_grad(set_to_none=step % 2 == 0 or program.surface == "hook")
    if feature == "flush":
        ddp.flush(step=optimizer.step)
    if isinstance(ddp, fusedreduce.DistributedDataParallel):
        file = io.BytesIO()
        torch.save(ddp.reduce_state_dict(), file)
        file.seek(0)
        ddp.load_reduce_state_dict(torch.load(file, map_location="cpu"))


def _update(
    ddp: Any,
    feature: str,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    results: list[torch.Tensor],
) -> None:
    if feature in ("clip", "folded clip"):
        folded = optimizer if feature == "folded clip" else None
        results.append(_plain(fusedreduce.clip_grad_norm_(ddp, 0.1, folded, reuse_norm=True)).float())
    if feature == "statistics" and isinstance(ddp, fusedreduce.DistributedDataParallel):
        results.append(torch.tensor(list(ddp.grad_stats().values()), dtype=torch.float64, device="cpu"))
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()


def _backward(
    ddp: Any, model: nn.Module, given: Any, scaler: torch.amp.GradScaler | None, around: AbstractContextManager[None]
) -> None:
    if isinstance(ddp, Reducer):
        ddp.prepare_for_forward()
        loss = loss_of(model(given))
        ddp.prepare_for_backward(loss)
    else:
        loss = loss_of(ddp(given))
    loss = loss if scaler is None else scaler.scale(loss)
    with around:
        loss.backward()
    if isinstance(ddp, Reducer):
        ddp.finalize()


# Ranks that are threads of this process


def data_parallel(around: Surroundings, **options: Any) -> list[torch.Tensor]:
    """A DataParallel of two replicas."""
    model, given, results = mlp(), [batch(0, step) for step in range(STEPS)], list[torch.Tensor]()
    _hook(model, around)
    with around.everything():
        parallel = fusedreduce.DataParallel(model, ["cpu", "cpu"], timeout_s=60.0, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step, rows in enumerate(given):
            loss = loss_of(parallel(rows))
            with around.backward(step):
                loss.backward()
            results += _gradients(model)
            with around.update(step):
                fusedreduce.clip_grad_norm_(parallel, 0.1)
                optimizer.step()
                optimizer.zero_grad()
        parallel.close()
    return results + [_plain(parameter) for parameter in model.parameters()]


def sync_server(around: Surroundings, **config: Any) -> list[torch.Tensor]:
    """A SyncServer of two devices; the second one announces nothing in the second epoch."""
    models, given = [mlp(), mlp()], [[batch(rank, step) for step in range(STEPS)] for rank in range(2)]

    for model in models:
        _hook(model, around)

    def epochs(device: SyncDevice) -> list[torch.Tensor]:
        model, results = models[device.rank], list[torch.Tensor]()
        with around.thread():
            for step in range(STEPS):
                model.zero_grad()
                loss = None if step == device.rank == 1 else loss_of(model(given[device.rank][step]))
                device.announce(loss)
                if loss is not None:
                    with around.backward(step):
                        loss.backward()
                device.sync()
                results += _gradients(model)
        return results

    with SyncServer(2, config=ReduceConfig(**config), timeout_s=60.0) as server:
        for rank in range(2):
            server.device(rank, models[rank].named_parameters())
        with around.everything():
            return [result for results in server.run(epochs) for result in results]


def small() -> nn.Module:
    """One layer."""
    torch.manual_seed(2)
    return nn.Linear(24, 3)


def local_reducers(around: Surroundings, model: Callable[[], nn.Module] = mlp, **config: Any) -> list[torch.Tensor]:
    """Reducers over the ranks of a LocalGroup."""
    models, given = [model(), model()], [[batch(rank, step) for step in range(STEPS)] for rank in range(2)]

    for model in models:
        _hook(model, around)

    def train(communicator: LocalCommunicator) -> list[torch.Tensor]:
        own, results = models[communicator.rank], list[torch.Tensor]()
        with around.thread(), Reducer(own.parameters(), communicator, ReduceConfig(**config)) as reducer:
            for step in range(STEPS):
                own.zero_grad()
                _backward(reducer, own, given[communicator.rank][step], None, around.backward(step))
                results += _gradients(own)
        return results

    with LocalGroup(2, timeout_s=60.0) as group, around.everything():
        return [result for results in group.run(train) for result in results]


def session(around: Surroundings) -> list[torch.Tensor]:
    """Operations of a session of two peers."""
    given = [batch(peer, 0) for peer in range(2)]

    def operate(communicator: LocalCommunicator) -> list[torch.Tensor]:
        peer, options = communicator.rank, collective.CollectiveConfig(world_size=2, timeout_s=60.0)
        with around.thread():
            held = collective.register(peer, config=options, group=group)
            results = [held.all_reduce(given[peer], "mean"), held.broadcast(given[peer] if peer == 0 else None, 0)]
            held.finish()
        return [_plain(result) for result in results]

    with LocalGroup(2, timeout_s=60.0) as group, around.everything():
        return [result for results in group.run(operate) for result in results]


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [_plain(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]


IN_PROCESS: Mapping[str, Callable[[Surroundings], list[torch.Tensor]]] = {
    "data parallel": data_parallel,
    "data parallel, one thread": lambda around: data_parallel(around, threads=False),
    "data parallel, int8": lambda around: data_parallel(around, reduce=ReduceConfig(wire="int8")),
    "sync server": sync_server,
    "sync server, bf16": lambda around: sync_server(around, wire="bf16"),
    "local group": local_reducers,
    "local group, int4": lambda around: local_reducers(around, wire="int4", stochastic_rounding=True),
    "session": session,
}


@pytest.mark.parametrize("program", PROGRAMS)
@on_ranks(2)
def test_ranks_train_as_ever(rank: int, world: int, program: str) -> None:
    run(rank, world, program)


@pytest.mark.parametrize("program", PHASES)
@on_ranks(3)
def test_three_ranks_train_as_ever(rank: int, world: int, program: str) -> None:
    run(rank, world, program)


@pytest.mark.parametrize("program", IN_PROCESS)
def test_threads_train_as_ever(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    take_torch_path(monkeypatch)
    compare(IN_PROCESS[program])


def test_interpreted_kernels_train_as_ever() -> None:
    compare(lambda around: local_reducers(around, model=small, wire="int4", stochastic_rounding=True))
