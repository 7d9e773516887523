"""The wrapper's agreement, refusals, copies, groups, logging and torch.compile, on 2 and 3 Gloo ranks."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ddp_models import (
    SMALL_CAP_MB,
    STEPS,
    assert_averaged,
    assert_same_on_all_ranks,
    assert_step_averages,
    batch,
    gradients,
    loss_of,
    mlp,
    train,
    wrapped,
)
from support.ranks import on_ranks
from support.timeouts import patient_group
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel import distributed as torch_ddp
from torch.optim.swa_utils import AveragedModel

import fusedreduce
from fusedreduce.parallel import ddp_arguments

# Agreement


def _odd(kind: str) -> tuple[nn.Module, fusedreduce.ReduceConfig]:
    """The model and settings of the rank that differs in `kind`."""
    model: Any = mlp()
    config = fusedreduce.ReduceConfig()
    if kind == "shape":
        model[2] = nn.Linear(32, 41)
        model[4] = nn.Linear(41, 12)
    elif kind == "requires_grad":
        model[2].bias.requires_grad_(False)
    elif kind == "wire":
        config = fusedreduce.ReduceConfig(wire="bf16")
    elif kind == "nothing to train":
        model.requires_grad_(False)
    elif kind == "uninitialised":
        model[4] = nn.LazyLinear(12)
    elif kind == "DTensor":
        from torch.distributed.tensor import DTensor, Replicate

        sharded = DTensor.from_local(model[4].weight.detach(), _own_mesh(), [Replicate()], run_check=False)
        model[4].weight = nn.Parameter(sharded)
    else:
        assert kind == "nothing", kind
    return model, config


def _own_mesh() -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    assert group is not None
    return DeviceMesh.from_group(group, "cpu")


# What the error says beside the ranks. All that is compared: reducer/test_failures.py.
DIFFERENCES = {
    "shape": "sizes (41, 32)",
    "requires_grad": "inconsistent 5 params",
    "wire": "'native' on ranks 0, 1; 'bf16' on rank 2",
}
PROBLEMS = {
    "nothing to train": "parameter that requires a gradient",
    "uninitialised": "uninitialized",
    "DTensor": "DTensor",
}


@pytest.mark.parametrize("init_sync", [True, False])
@pytest.mark.parametrize("kind", DIFFERENCES)
@on_ranks(3)
def test_different_models_are_refused_by_every_rank_with_one_text(
    rank: int, world: int, kind: str, init_sync: bool
) -> str:
    message = disagreement(rank, world, kind, init_sync)
    assert DIFFERENCES[kind] in message and "rank 2" in message
    return message


@pytest.mark.parametrize("kind", PROBLEMS)
@on_ranks(2)
def test_one_ranks_problem_is_told_to_every_rank(rank: int, world: int, kind: str) -> str:
    message = disagreement(rank, world, kind, True)
    assert PROBLEMS[kind] in message and "rank 1" in message
    return message


def disagreement(rank: int, world: int, kind: str, init_sync: bool) -> str:
    """The last rank differs: the error, which precedes torch's own check, or is the first forward's."""
    group = patient_group()
    model, config = _odd(kind if rank == world - 1 else "nothing")

    def check(*_: object) -> None:
        raise AssertionError("torch's own check was reached")

    options: dict[str, Any] = {"bucket_cap_mb": SMALL_CAP_MB, "process_group": group}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_ddp, "_verify_param_shape_across_processes", check)
        if init_sync:
            with pytest.raises(fusedreduce.AgreementError) as caught:
                fusedreduce.DistributedDataParallel(model, reduce=config, **options)
        else:
            ddp = fusedreduce.DistributedDataParallel(model, reduce=config, init_sync=False, **options)
            given = batch(rank, 0)
            with torch.no_grad():
                ddp(given)  # asks for no gradient, so for no agreement
            with pytest.raises(fusedreduce.AgreementError) as caught:
                ddp(given)
    return str(caught.value)


@on_ranks(2)
def test_no_init_sync(rank: int, world: int) -> None:
    """init_sync=False: no collective in the constructor, and weights stay each rank's own."""
    from support.ddp_models import Collectives

    model = mlp(rank)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with Collectives() as issued:
        ddp = wrapped(model, "bf16", init_sync=False)
    assert not issued.payload_bytes
    assert all(torch.equal(one, parameter) for one, parameter in zip(before, model.parameters(), strict=True))
    for step in range(STEPS):
        assert_step_averages(ddp, batch(rank, step), "bf16")


@on_ranks(2)
def test_refused(rank: int, world: int) -> None:
    """What is refused on every rank alike, with torch's error where torch refuses it too."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor

    ours = fusedreduce.DistributedDataParallel
    mesh = init_device_mesh("cpu", (world,))
    model: Any = mlp()
    model[4].weight = nn.Parameter(distribute_tensor(model[4].weight.detach(), mesh))
    with pytest.raises(TypeError, match=r"4\.weight is a parameter of DTensor"):
        ours(model)
    sharded: Any = mlp()
    fully_shard(sharded[2], mesh=mesh)
    with pytest.raises(TypeError, match=r"2\.weight is a parameter of (FSDP|DTensor)"):
        ours(sharded)
    flat = mlp()
    flat.register_parameter("_flat_param", _flat_parameter())
    with pytest.raises(TypeError, match="_flat_param is a parameter of FSDP"):
        ours(flat)
    two_dimensional = init_device_mesh("cpu", (world, 1), mesh_dim_names=("a", "b"))
    with pytest.raises(RuntimeError, match="Only 1D device mesh is supported"):
        ours(mlp(), device_mesh=two_dimensional)
    with pytest.raises(RuntimeError, match="both process_group and device_mesh"):
        ours(mlp(), device_mesh=mesh, process_group=dist.group.WORLD)
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"), pytest.raises(RuntimeError, match="python_reducer"):
        ours(mlp())
    # An argument that a later torch adds: refused, but for its default.
    known = inspect.signature(TorchDDP.__init__)
    later = inspect.Parameter("later", inspect.Parameter.KEYWORD_ONLY, default=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ddp_arguments, "TORCH_SIGNATURE", known.replace(parameters=[*known.parameters.values(), later]))
        with pytest.raises(TypeError, match="later=3 is an argument of torch .* does not know"):
            ours(mlp(), later=3)  # type: ignore[call-arg]
        train(rank, mlp(), steps=2)
    # nothing was left behind on any rank
    train(rank, mlp(), device_mesh=mesh)


def _flat_parameter() -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(3))
    parameter._is_flat_param = True  # type: ignore[attr-defined]
    return parameter


# Copies, groups


@pytest.mark.parametrize(("world", "wire"), [(2, "native"), (2, "bf16"), (2, "int8"), (3, "int8")])
@on_ranks()
def test_copies(rank: int, world: int, wire: str) -> None:
    """A deep copy, an AveragedModel's copy and a pickled one are trained like the original; state dicts fit torch's."""
    ddp = train(rank, mlp(), wire)
    loaded = pickle.loads(pickle.dumps(ddp))
    assert loaded.reduce_config == ddp.reduce_config and isinstance(loaded, fusedreduce.DistributedDataParallel)
    averaged: Any = AveragedModel(ddp)
    averaged.update_parameters(ddp)
    file = io.BytesIO()
    torch.save(ddp.state_dict(), file)
    file.seek(0)
    fresh, theirs = wrapped(mlp(7), wire), TorchDDP(mlp(8))
    for one in (fresh, theirs):
        one.load_state_dict(torch.load(file))
        file.seek(0)
    assert list(theirs.state_dict()) == list(ddp.state_dict())
    models = [ddp, copy.deepcopy(ddp), loaded, averaged.module, fresh]
    for step in range(STEPS):
        local = copy.deepcopy(ddp.module)
        loss_of(local(batch(rank, step))).backward()
        for model in models:
            model.zero_grad()
            loss_of(model(batch(rank, step))).backward()
            assert_averaged(model.module, local, wire)
        for model in models:
            torch.optim.SGD(model.parameters(), lr=0.05).step()
    for model in models[1:]:
        pairs = zip(ddp.parameters(), model.parameters(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
    group = dist.new_group(list(range(world)))
    with pytest.raises(RuntimeError, match="only supported when using DDP with the default process group"):
        pickle.dumps(wrapped(mlp(), wire, process_group=group))


# Profiler and logging


@on_ranks(2)
def test_every_stage_has_a_range_in_the_profiler(rank: int, world: int) -> None:
    """Names of the ranges in one late step."""
    ddp = wrapped(mlp(), "bf16", find_unused_parameters=True)
    for step in range(3):
        loss_of(ddp(batch(rank, step))).backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        loss_of(ddp(batch(rank, 3))).backward()
    names = sorted({event.name for event in profile.events() if "::" in event.name or "Distributed" in event.name})
    for stage in ("pack", "all_reduce", "unpack"):
        ranges = [name for name in names if name.startswith(f"fusedreduce::{stage} bucket ")]
        assert len(ranges) == 2 and any("0.weight" in name for name in ranges)
    assert "fusedreduce::search_unused_parameters" in names and "DistributedDataParallel.forward" in names


# Times, and what is given in other words.
_MEASURED = ("_time", "_time_start", "_time_end")


@pytest.mark.parametrize("kind", ["plain", "views", "unused", "static", "hook"])
@on_ranks(2)
def test_logging_data_has_torchs_keys_and_values(rank: int, world: int, kind: str) -> None:
    """Our logging data and torch's after the same steps of the same model; times are left out, their keys kept."""
    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "views": {"gradient_as_bucket_view": True, "bucket_cap_mb": SMALL_CAP_MB},
        "unused": {"find_unused_parameters": True},
        "static": {"static_graph": True, "bucket_cap_mb": SMALL_CAP_MB},
        "hook": {"bucket_cap_mb": SMALL_CAP_MB},
    }
    found = []
    models = [cls(mlp(), **kinds[kind]) for cls in (fusedreduce.DistributedDataParallel, TorchDDP)]
    for ddp in models:
        if kind == "hook":
            ddp.register_comm_hook(None, default_hooks.allreduce_hook)
        for step in range(5):
            loss_of(ddp(batch(rank, step))).backward()
        ddp(batch(rank, 6))
        data = dict(ddp._get_ddp_logging_data())
        times = {name: data[name] for name in data if name.endswith(_MEASURED)}
        assert all(value > 0 for name, value in times.items()), times
        for part in ("forward_compute", "backward_compute", "backward_comm"):
            if f"{part}_time_end" in times:
                assert times[f"{part}_time_end"] >= times[f"{part}_time_start"]
        assert times["backward_compute_comm_overlap_time"] <= times["backward_compute_time"]
        found.append({name: "time" if name in times else value for name, value in data.items()})
    ours, theirs = found[0], found[1]
    assert ours == theirs


@on_ranks(2)
def test_logged_error(rank: int, world: int) -> None:
    """An error is noted before it is raised."""
    model: Any = nn.ModuleList([nn.Linear(24, 4), nn.Linear(24, 4)])
    model.forward = lambda features: model[0](features)
    ddp = wrapped(model)
    loss_of(ddp(batch(rank, 0))).backward()
    with pytest.raises(RuntimeError, match="1.weight, 1.bias") as caught:
        ddp(batch(rank, 1))
    data = ddp._get_ddp_logging_data()
    assert data["has_error"] == 1 and data["error"] == str(caught.value)


# torch.compile: last, for what it leaves behind in the processes is nobody else's concern


class Broken(nn.Module):
    """A model with one graph break of its own; two buckets of at least 1 MiB, which DDPOptimizer wants."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = mlp(), nn.Linear(12, 24000)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden = self.body(features)
        torch._dynamo.graph_break()
        result: torch.Tensor = self.head(torch.tanh(hidden))
        return result


@pytest.mark.parametrize(("inside", "wire"), [(True, "native"), (False, "bf16")])
@on_ranks(2)
def test_torch_compile_gives_right_gradients_and_no_more_graph_breaks(
    rank: int, world: int, inside: bool, wire: str
) -> None:
    """Graph breaks of ours and of torch's, the wrapper compiled or (inside) the module; gradients are checked."""
    breaks = []
    for ours in (True, False):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(12)
        model = Broken()
        target: Any = torch.compile(model, backend="aot_eager") if inside else model
        ddp: Any = wrapped(target, wire, bucket_cap_mb=1) if ours else TorchDDP(target, bucket_cap_mb=1)
        run: Any = ddp if inside else torch.compile(ddp, backend="aot_eager")
        for step in range(4):
            local = copy.deepcopy(model)
            run.zero_grad()
            loss_of(run(batch(rank, step))).backward()
            loss_of(local(batch(rank, step))).backward()
            assert_averaged(model, local, wire if ours else "native", factor=4.0)
            assert_same_on_all_ranks(gradients(model))
        breaks.append(sum(torch._dynamo.utils.counters["graph_break"].values()))
    torch._dynamo.reset()
    assert 1 <= breaks[0] <= breaks[1]


@on_ranks(2)
def test_a_backward_of_compiled_autograd_is_refused_and_the_next_one_works(rank: int, world: int) -> None:
    """What a backward raises that is compiled itself; others are right, also behind it, and with that switched on."""
    torch._dynamo.reset()
    torch.manual_seed(12)
    model = mlp()
    ddp = wrapped(model, bucket_cap_mb=1)

    def backward(step: int) -> None:
        loss_of(ddp(batch(rank, step))).backward()

    def checked(step: int, run: Any = backward) -> None:
        local = copy.deepcopy(model)
        ddp.zero_grad()
        run(step)
        loss_of(local(batch(rank, step))).backward()
        assert_averaged(model, local, "native", factor=4.0)

    def within(step: int) -> None:
        loss = loss_of(ddp(batch(rank, step)))
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            loss.backward()

    with torch._dynamo.config.patch(compiled_autograd=True):
        whole = torch.compile(backward, backend="eager")
    texts = []
    for step, refused in enumerate((within, whole) * 2):
        ddp.zero_grad()
        with pytest.raises(fusedreduce.FusedReduceError) as caught:
            refused(step)
        texts.append(str(caught.value))
        assert all(one.grad is None for one in model.parameters())
        checked(step)
    with torch._dynamo.config.patch(compiled_autograd=True):
        forward: Any = torch.compile(ddp, backend="eager")
    step_of: Any = torch.compile(backward, backend="eager")
    for step in range(3):
        checked(step, lambda step: loss_of(forward(batch(rank, step))).backward())
        checked(step, step_of)
    torch._dynamo.reset()
    assert len(texts) == 4
    assert all(text.startswith(f"rank {rank}: compiled autograd runs this backward") for text in texts)
