"""`set_fsdp_comms(reduce_scatter=...)`: FSDP2's reduce-scatter on our wires, on 2 to 4 Gloo ranks."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.fsdp_models import (
    POLICIES,
    WIDTH,
    Block,
    Language,
    assert_everywhere,
    errors_of,
    full_gradients,
    group_of,
    loss_of,
    mesh_of,
    modules_of,
    set_factor,
    sharded,
    steps_of,
    torchs,
)
from support.grids import grid
from support.own_wires import NAME
from support.ranks import on_ranks
from support.timeouts import patient_group, wait_briefly
from support.wires import decoded, in_order
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import Shard

from fusedreduce import AgreementError, CollectiveError, FSDPComms, FusedReduceError, set_fsdp_comms
from fusedreduce.comm.waiting import wait_for
from fusedreduce.kernels import counting
from fusedreduce.parallel import fsdp_shards
from fusedreduce.parallel.fsdp_buckets import reduce_scatter_bucket
from fusedreduce.parallel.fsdp_shards import ReduceScatter, shard_numel
from fusedreduce.wires import cast_of, encoding_of

# What one rounding of every rank's contribution may be off by.
BOUNDS = {"bf16": 0.003, "fp16": 0.0004, "int8": 0.010, "int4": 0.155}
WIRES = (*BOUNDS, NAME.format("TOP16"), NAME.format("SMALL8"))


def _mesh(world: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world,))


def _ours(
    mesh: DeviceMesh, wire: str, model: nn.Module | None = None, all_reduce: str | None = None, **options: Any
) -> tuple[nn.Module, FSDPComms]:
    made = sharded(mesh, model, **options)
    return made, set_fsdp_comms(made, reduce_scatter=wire, all_reduce=all_reduce)


def _counts(comms: FSDPComms) -> dict[str, Any]:
    return comms.stats()["reduce_scatter"]


def within(rank: int, world: int, wire: str, policy: str, bound: float) -> None:
    """No parameter is off by more from what torch leaves with a reduction in fp32."""
    reference = "bf16 parameters" if policy == "bf16 parameters" else "fp32"
    expected = torchs((world,), reference)
    model, comms = _ours(_mesh(world), wire, **POLICIES[policy])
    found = steps_of(model)
    errors = errors_of(found, expected)
    assert max(errors.values()) <= bound, errors
    assert _counts(comms)["calls"] == 2 * len(modules_of(model))
    assert _counts(comms)["calls_without_layout"] == 0
    if encoding_of(wire) is not None and policy == "fp32":  # norms and biases travel as they are
        small = {name: one for name, one in errors.items() if expected[name].ndim < 2}
        assert max(small.values()) <= 1e-6, small


def _expected(rows: Sequence[torch.Tensor], wire: str, encodes: bool, op: Any) -> torch.Tensor:
    """The definition: each contribution rounded once, their sum in fp32 in the order of ranks."""
    divisor = float(len(rows)) if op == dist.ReduceOp.AVG else 1.0
    if op == dist.ReduceOp.PREMUL_SUM:
        divisor = 1.0 / op.__getstate__()[1]
    encoding, cast = encoding_of(wire), cast_of(wire)
    if encodes and encoding is not None:
        return in_order([decoded(row.float() / divisor, encoding) for row in rows]).to(rows[0].dtype)
    before = 1.0
    if cast is not None and cast.torch_dtype is torch.float16:
        before = 2.0 ** max(1, (len(rows).bit_length() - 1) // 2)
    sent = [row.float() / before for row in rows]
    if cast is not None:
        sent = [(cast.rounding(one) if cast.rounding else one.to(cast.torch_dtype)).float() for one in sent]
    factor = torch.tensor(1.0 / (divisor / before), dtype=torch.float32)
    return (in_order(sent) * factor).to(rows[0].dtype)


@pytest.mark.parametrize(
    ("policy", "op", "wire"),
    [
        *(("fp32", "mean", wire) for wire in WIRES),
        *(("fp32", op, wire) for op in ("sum", "factor") for wire in ("fp16", "int8")),
        *(("bf16 reduce", "mean", wire) for wire in ("fp16", "int8")),
    ],
)
@on_ranks(3)
def test_every_parameter_has_blocks_of_its_own(rank: int, world: int, wire: str, policy: str, op: str) -> None:
    """What each call leaves in this rank's shard is the definition: every parameter has blocks of its own."""
    model, comms = _ours(_mesh(world), wire, **POLICIES[policy])
    set_factor(model, {"mean": None, "sum": 1.0, "factor": 5.0}[op], force_sum=op == "sum")
    checked = itertools.count()

    def checking(of: Any, scatter: ReduceScatter) -> Callable[..., None]:
        def check(output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any) -> None:
            before = input_tensor.clone()
            scatter(output_tensor, input_tensor, group, op)
            given = [torch.empty_like(before) for _ in range(world)]
            dist.all_gather(given, before)
            assert torch.equal(given[rank], before)
            begin, shard = 0, output_tensor.numel()
            for one in of.fsdp_params:
                numel = one.padded_sharded_param_size.numel()
                rows = [each.view(world, shard)[rank, begin : begin + numel] for each in given]
                encoding = encoding_of(wire)
                encodes = encoding is not None and numel >= encoding.block_numel and one.sharded_param.ndim > 1
                travels = wire if encodes or encoding is None else "native"
                got = output_tensor[begin : begin + numel]
                assert torch.equal(got, _expected(rows, travels, encodes, op)), (travels, numel)
                begin += numel
                next(checked)
            assert begin == shard

        return check

    for module in modules_of(model):
        group = group_of(module)
        scatter = group._reduce_scatter_comm
        assert isinstance(scatter, ReduceScatter)
        group._reduce_scatter_comm = _Spied(scatter, checking(group, scatter))
    steps_of(model)
    assert next(checked) == 2 * len(list(model.parameters()))
    assert _counts(comms)["calls_without_layout"] == 0


class _Spied:
    """A reduce-scatter, watched."""

    def __init__(self, inner: ReduceScatter, call: Callable[..., None]) -> None:
        self.allocate, self._call = inner.allocate, call

    def __call__(self, **arguments: Any) -> None:
        self._call(**arguments)


@pytest.mark.parametrize(
    ("shape", "factor", "how"),
    [
        *(((4,), factor, how) for factor in (None, 3.0) for how in ("", "sum")),
        *(((2, 2), factor, "") for factor in (None, 2.0, 4.0)),
        ((1, 4), None, "sum"),
    ],
)
@on_ranks(4)
def test_it_divides_as_torch_does(
    rank: int, world: int, shape: tuple[int, ...], factor: float | None, how: str
) -> None:
    """By whatever torch divides, it is divided once: gradients of bf16 parameters the bf16 wire rounds no further."""
    policy = "bf16 parameters"
    mesh = mesh_of(*shape) if len(shape) > 1 else _mesh(*shape)
    models = sharded(mesh, **POLICIES[policy]), _ours(mesh, "bf16", **POLICIES[policy])[0]
    # Gloo has no sum of products, which our own reduce-scatter does not need.
    set_factor(models[0], factor, force_sum=how == "sum" or factor not in (None, shape[-1]))
    set_factor(models[1], factor, force_sum=how == "sum")
    expected, found = (steps_of(model, steps=1) for model in models)
    errors = errors_of(found, expected)
    assert max(errors.values()) <= 1e-6, errors
    if len(shape) > 1:
        assert_everywhere(found)


class Norms(nn.Module):
    """A matrix and vectors on both sides of it: a module of one reduction."""

    def __init__(self, width: int, vectors: int) -> None:
        super().__init__()
        made = [nn.Parameter(torch.ones(width)) for _ in range(vectors)]
        self.before = nn.ParameterList(made[: vectors // 2])
        self.matrix = nn.Parameter(torch.ones(width, 512))
        self.after = nn.ParameterList(made[vectors // 2 :])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the matrix makes of `x`, times all vectors."""
        out = x @ self.matrix.t()
        for one in (*self.before, *self.after):
            out = out * one
        return out


@grid(("world", "vectors", "wire"), [*itertools.product([2, 4], [0, 1, 4], ["bf16", "int8", "int4"])])
@on_ranks()
def test_launches_collectives_and_bytes_of_a_call(rank: int, world: int, wire: str, vectors: int) -> None:
    """Launches, collectives and their input: what a block takes of each shard's matrix, and what vectors do."""
    model: Any = fully_shard(Norms(256 * world, vectors), mesh=_mesh(world))
    comms = set_fsdp_comms(model, reduce_scatter=wire)
    with counting.count_launches() as launches:
        model(torch.ones(2, 512)).sum().backward()
    matrix, others = 512 * 256, 256 * vectors  # elements of a shard
    encoding = encoding_of(wire)
    if encoding is None:
        expected, functions = (matrix + others) * 2, ["pack", "combine"]
    else:
        expected, functions = matrix // encoding.block_numel * encoding.block_bytes + 4 * others, ["encode", "decode"]
        if vectors:
            functions = ["encode", "combine", "decode", "combine"]
    assert [one.function for one in launches] == functions
    assert _counts(comms) == {
        "wire": wire,
        "calls": 1,
        "calls_without_layout": 0,
        "collectives": 1,
        "wire_bytes": world * expected,
    }


@functools.cache
def _torchs_micro_batches(shape: tuple[int, int]) -> Any:
    return steps_of(sharded(mesh_of(*shape)), micro=3)


@pytest.mark.parametrize(("wire", "all_reduce", "bound"), [("bf16", None, 0.003), ("int8", "int8", 0.014)])
@on_ranks(4)
def test_beside_replicas(rank: int, world: int, wire: str, all_reduce: str | None, bound: float) -> None:
    """HSDP: within a node by our reduce-scatter, across by torch's all-reduce or ours; micro-batches add up."""
    shape = (2, world // 2)
    expected = _torchs_micro_batches(shape)
    model, comms = _ours(mesh_of(*shape), wire, all_reduce=all_reduce)
    found = steps_of(model, micro=3)
    assert_everywhere(found)
    errors = errors_of(found, expected)
    assert max(errors.values()) <= bound, errors
    stats, calls = comms.stats(), len(modules_of(model))
    assert stats["reduce_scatter"]["calls"] == 6 * calls
    assert ("all_reduce" in stats) == (all_reduce is not None)
    if all_reduce is not None:
        assert stats["all_reduce"]["calls"] == 2 * calls


class Odd(nn.Module):
    """Weights of fewer rows than ranks, a single element; and a layer that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.few = nn.Linear(600, 3)
        self.scale = nn.Parameter(torch.ones(1))
        self.wide = nn.Linear(600, 8)
        self.uses_wide = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of both layers."""
        out: torch.Tensor = self.few(x).sum() * self.scale.sum()
        return out + self.wide(x).square().sum() if self.uses_wide else out


@pytest.mark.parametrize("wire", ["bf16", "int8"])
@pytest.mark.parametrize("what", ["all", "ignored", "frozen", "tied", "unused", "columns"])
@on_ranks(4)
def test_odd_parameters(rank: int, world: int, wire: str, what: str) -> None:
    """Uneven and empty shards, frozen, tied, unused and ignored parameters, and those sharded in another dimension."""
    found = []
    for ours in (False, True):
        torch.manual_seed(0)
        model: Any = Odd()
        options: dict[str, Any] = {}
        if what == "ignored":
            options["ignored_params"] = {model.wide.weight, model.wide.bias}
        if what == "frozen":
            model.few.weight.requires_grad_(False)
        if what == "tied":
            model.few = nn.Linear(600, 8)
            model.few.weight = model.wide.weight
        if what == "columns":
            options["shard_placement_fn"] = lambda one: Shard(1) if one.ndim > 1 else None
        fully_shard(model, mesh=_mesh(world), **options)
        comms = set_fsdp_comms(model, reduce_scatter=wire) if ours else None
        model.uses_wide = what != "unused"
        for step in range(2):
            model(torch.randn(5, 600, generator=torch.Generator().manual_seed(10 * step + rank))).backward()
        gradients = {name: getattr(one.grad, "full_tensor", lambda: None)() for name, one in model.named_parameters()}
        found.append({name: one for name, one in gradients.items() if one is not None})
    assert comms is not None
    encodes = encoding_of(wire) is not None
    assert _counts(comms)["calls_without_layout"] == (2 if what == "unused" and encodes else 0)
    expected, got = found
    assert got.keys() == expected.keys() and got
    errors = errors_of(got, expected)
    assert max(errors.values()) <= 0.012, errors


@on_ranks(4)
def test_parts_of_a_model_and_torchs_own_again(rank: int, world: int) -> None:
    """Modules that share parameters' group; a part of the model with a "bf16" of its own; torch's own put back."""
    mesh = _mesh(world)
    torch.manual_seed(0)
    model: Any = Language()
    fully_shard([model.blocks[0], model.blocks[1]], mesh=mesh)
    fully_shard(model, mesh=mesh)
    expected = steps_of(model, steps=1)
    set_fsdp_comms(model, reduce_scatter="int8")
    again = set_fsdp_comms(model.blocks[0], reduce_scatter="bf16")
    model.zero_grad()
    got = steps_of(model, steps=1)
    assert _counts(again)["calls"] == 1 and _counts(again)["wire"] == "bf16"
    assert 0 < max(errors_of(got, expected).values()) <= 0.012
    torchs = set_fsdp_comms(model, reduce_scatter="native")
    model.zero_grad()
    again = steps_of(model, steps=1)
    assert all(torch.equal(again[name], one) for name, one in expected.items())
    assert _counts(torchs)["calls"] == 0


@pytest.mark.parametrize("wire", ["bf16", "int8"])
@on_ranks(4)
def test_complex_parameters(rank: int, world: int, wire: str) -> None:
    """Complex gradients travel as pairs, and are not encoded, in both reductions."""
    found: list[dict[str, torch.Tensor]] = []
    mesh = mesh_of(2, world // 2)
    for ours in (False, True):
        torch.manual_seed(0)
        model: Any = nn.Linear(40, 8 * world, bias=False, dtype=torch.complex64)
        fully_shard(model, mesh=mesh)
        comms = set_fsdp_comms(model, reduce_scatter=wire, all_reduce=wire) if ours else None
        generator = torch.Generator().manual_seed(rank)
        model(torch.randn(4, 40, dtype=torch.complex64, generator=generator)).abs().sum().backward()
        found.append({"weight": torch.view_as_real(model.weight.grad.full_tensor())})
    assert max(errors_of(found[1], found[0]).values()) <= (0.005 if wire == "bf16" else 1e-6)
    assert comms is not None
    for counts in comms.stats().values():
        assert (counts["calls"], counts["calls_without_layout"]) == (1, 0)


@pytest.mark.skipif(not hasattr(_fsdp_common, "ShardPlacementResult"), reason="needs torch 2.12")
@pytest.mark.parametrize("wire", ["bf16", "int8"])
@on_ranks(4)
def test_a_module_of_several_meshes(rank: int, world: int, wire: str) -> None:
    """A module whose parameters are sharded over several meshes: each group of them is reduced apart."""
    found: list[Any] = []
    whole, half = mesh_of(1, world)["shard"], mesh_of(2, world // 2)["shard"]
    infos = [_fsdp_common.FSDPMeshInfo(mesh, shard_mesh_dim=0) for mesh in (whole, half)]
    for ours in (False, True):
        torch.manual_seed(0)
        model: Any = Block()

        def placed(parameter: nn.Parameter, down: nn.Parameter = model.down.weight) -> Any:
            return _fsdp_common.ShardPlacementResult(placement=Shard(0), mesh_info=infos[parameter is down])

        fully_shard(model, mesh=whole, shard_placement_fn=placed)
        comms = set_fsdp_comms(model, reduce_scatter=wire) if ours else None
        model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank))).square().sum().backward()
        found.append(full_gradients(model))
    errors = errors_of(*found[::-1])
    assert 0 < max(errors.values()) <= 0.012, errors
    assert comms is not None and _counts(comms)["calls"] == 2


@pytest.mark.parametrize("wire", ["bf16", "int8"])
@on_ranks(2)
def test_a_call_that_is_broken_off(rank: int, world: int, wire: str) -> None:
    """A call that is interrupted leaves nothing that the next one would use."""
    model = _ours(_mesh(world), wire)[0]
    group = group_of(modules_of(model)[0])
    scatter, numel = group._reduce_scatter_comm, sum(map(shard_numel, group.fsdp_params))
    given = torch.randn(world * numel, generator=torch.Generator().manual_seed(rank))
    arguments = {"input_tensor": given, "group": dist.group.WORLD, "op": dist.ReduceOp.AVG}

    def interrupted(*waited: Any) -> None:
        wait_for(*waited)
        raise KeyboardInterrupt

    expected, found = torch.empty(numel), torch.empty(numel)
    scatter(output_tensor=expected, **arguments)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp_shards, "wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt):
            scatter(output_tensor=found, **arguments)
    scatter(output_tensor=found, **arguments)
    assert torch.equal(found, expected)
    assert scatter.shard.counts["calls_without_layout"] == 0


@pytest.mark.parametrize("wire", ["fp16", "int8"])
@on_ranks(3)
def test_a_factor_that_changes_between_steps(rank: int, world: int, wire: str) -> None:
    """The divide factor is that of each backward, and a factor that changes makes no bucket anew."""
    models = sharded(_mesh(world)), _ours(_mesh(world), wire)[0]
    group = group_of(modules_of(models[1])[0])
    buckets = []
    for step in range(3):
        for model in models:
            model.zero_grad()
            set_factor(model, 3.0 + step, force_sum=model is models[0])  # Gloo has no sum of products
            loss_of(model, step).backward()
        buckets += group._reduce_scatter_comm.shard.buckets.values()
        errors = errors_of(full_gradients(models[1]), full_gradients(models[0]))  # type: ignore[arg-type]
        assert max(errors.values()) <= 0.012, errors
    assert len(set(map(id, buckets))) == 1


@pytest.mark.parametrize("what", ["frozen in the first", "frozen in the second", "swapped"])
@on_ranks(4)
def test_ranks_of_several_meshes_that_disagree(rank: int, world: int, what: str) -> str:
    """What ranks of one mesh differ in, those that share another mesh with them are told too."""
    torch.manual_seed(0)
    model: Any = Language()
    last = rank == world - 1
    swapped = what == "frozen in the second" or (what == "swapped" and last)
    expert, other = model.blocks[1 if swapped else 0], model.blocks[0 if swapped else 1]
    if last and what != "swapped":
        expert.norm.weight.requires_grad_(False)
    meshes = mesh_of(2, world // 2)["shard"], _mesh(world)
    fully_shard(expert, mesh=meshes[0])
    fully_shard(other, mesh=meshes[1])
    if what != "swapped":  # else the root's mesh would be the first on all ranks
        fully_shard(model, mesh=meshes[1])
    with pytest.raises(AgreementError, match=r"blocks\..\.norm\.weight: ") as raised:
        set_fsdp_comms(model, reduce_scatter="bf16")
    return str(raised.value)


@pytest.mark.parametrize("wire", ["bf16", "int8", "int4"])
@on_ranks(4)
def test_what_is_not_finite_reaches_every_rank(rank: int, world: int, wire: str) -> None:
    """Within a node by our reduce-scatter, across by our all-reduce, in every parameter that it has reached."""
    model, _ = _ours(mesh_of(2, world // 2), wire, all_reduce=wire)
    (loss_of(model) * (float("inf") if rank == world - 1 else 1.0)).backward()
    found: Any = full_gradients(model)
    for name, one in found.items():
        assert not bool(one.isfinite().all()), name


def as_before(rank: int, world: int, wire: str, what: str) -> None:
    """Features of FSDP2 that our reduce-scatter is called by: as often, and with errors of the wire alone."""
    policy = {"offloaded": "offloaded", "zero2": "zero2"}.get(what, "fp32")
    found = []
    for ours in (False, True):
        torch.manual_seed(0)
        model: Any = Language()
        if what == "compiled":
            for block in model.blocks:
                block.compile(backend="aot_eager")
        sharded(_mesh(world), model, **POLICIES[policy])
        if what == "another group" and ours:
            model.set_separate_reduce_scatter_group(True)
        comms = set_fsdp_comms(model, reduce_scatter=wire) if ours else None
        if what == "accumulated":
            for step in range(3):
                model.set_requires_gradient_sync(step == 2)
                loss_of(model, step).backward()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        steps_of(model)
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append({"norm": norm.full_tensor(), **full_gradients(model)})
    assert comms is not None
    backwards = 3 if what == "accumulated" else 2
    assert _counts(comms)["calls"] == backwards * len(modules_of(model))
    errors = errors_of(*found[::-1])
    assert max(errors.values()) <= 0.012, errors


@pytest.mark.parametrize("what", ["wire", "model", "frozen", "nodes"])
@on_ranks(4)
def test_ranks_that_disagree(rank: int, world: int, what: str) -> str:
    """Ranks with other settings, or another model, get one error on every rank; nothing is set."""
    last = rank == world - 1
    torch.manual_seed(0)
    model: Any = Language(blocks=2 if last and what == "model" else 1)
    if last and what == "frozen":
        model.norm.weight.requires_grad_(False)
    made = sharded(_mesh(world), model)
    asked: dict[str, Any] = {"reduce_scatter": "int8" if last and what == "wire" else "bf16"}
    named = {"wire": "reduce_scatter", "model": "params", "frozen": "norm.weight", "nodes": "4 ranks"}[what]
    if what == "nodes":
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2")
        named = (
            r"since 2 ranks of each node take part\. Shard within a node, .* of \(2, 2\) ranks, and give all_reduce="
        )
    try:
        with pytest.raises(AgreementError, match=named) as raised:
            set_fsdp_comms(made, **asked)
    finally:
        for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
    assert not any(isinstance(group_of(one)._reduce_scatter_comm, ReduceScatter) for one in modules_of(made))
    return str(raised.value)


@pytest.mark.parametrize("wire", ["bf16", "int8"])
@on_ranks(2)
def test_a_rank_that_is_gone(rank: int, world: int, wire: str) -> None:
    """Who waits for a rank in vain is told which shard's reduction failed, and why none is tried again."""
    group = patient_group()
    model = Block()
    fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"), reshard_after_forward=False)
    set_fsdp_comms(model, reduce_scatter=wire)
    loss = model(torch.randn(2, WIDTH)).sum()
    if rank == 0:
        return
    wait_briefly()
    with pytest.raises(CollectiveError, match=rf"rank {rank}: .*reduce-scatter of the shard of the root module"):
        loss.backward()
    scatter, flat = group_of(model)._reduce_scatter_comm, torch.zeros(world)
    with pytest.raises(FusedReduceError, match="an earlier reduction of a shard failed"):
        scatter(output_tensor=flat[:1], input_tensor=flat, group=group, op=dist.ReduceOp.AVG)


class _Custom:
    """A reduce-scatter of the user's."""


@on_ranks(2)
def test_what_is_refused(rank: int, world: int) -> None:
    """What cannot be served is refused by name, before anything is changed."""
    model = sharded(_mesh(world))
    with pytest.raises(ValueError, match='sets nothing: give it all_reduce="bf16", reduce_scatter="bf16", or both'):
        set_fsdp_comms(model)
    given: list[dict[str, Any]] = [{"accumulation": "fp32"}, {"replicate_mesh": _mesh(world)}]
    for options in given:
        with pytest.raises(ValueError, match="are those of all_reduce, which is missing"):
            set_fsdp_comms(model, reduce_scatter="bf16", **options)
    with pytest.raises(ValueError, match="unknown wire 'int7'"):
        set_fsdp_comms(model, reduce_scatter="int7")
    with pytest.raises(ValueError, match=r"wire=\(.*\) and set_fsdp_comms exclude each other"):
        set_fsdp_comms(model, reduce_scatter={"*": "bf16"})  # type: ignore[arg-type]
    group = group_of(modules_of(model)[0])
    torchs, group._reduce_scatter_comm = group._reduce_scatter_comm, _Custom()
    with pytest.raises(ValueError, match="the root module has a custom reduce-scatter, a _Custom, which"):
        set_fsdp_comms(model, reduce_scatter="bf16")
    group._reduce_scatter_comm = torchs
    assert not any(isinstance(group_of(one)._reduce_scatter_comm, ReduceScatter) for one in modules_of(model))


@pytest.mark.parametrize("wire", BOUNDS)
@on_ranks(2)
def test_errors_of_two_ranks(rank: int, world: int, wire: str) -> None:
    within(rank, world, wire, "fp32", BOUNDS[wire])


@pytest.mark.parametrize(
    ("policy", "wire"),
    [*(("fp32", wire) for wire in BOUNDS), *((policy, "int8") for policy in ("bf16 parameters", "offloaded"))],
)
@on_ranks(4)
def test_errors_of_four_ranks(rank: int, world: int, wire: str, policy: str) -> None:
    within(rank, world, wire, policy, BOUNDS[wire])


@pytest.mark.parametrize("world", [2, 3, 4])
@on_ranks()
def test_gradients_of_bf16_lose_nothing_on_a_bf16_wire(rank: int, world: int) -> None:
    within(rank, world, "bf16", "bf16 parameters", 1e-7)


@pytest.mark.parametrize("what", ["compiled", "offloaded", "zero2", "accumulated"])
@on_ranks(2)
def test_what_else_fsdp_does(rank: int, world: int, what: str) -> None:
    as_before(rank, world, "int8", what)


@pytest.mark.skipif(not hasattr(FSDPModule, "set_separate_reduce_scatter_group"), reason="needs torch 2.13")
@on_ranks(2)
def test_a_group_of_its_own_for_the_reduce_scatter(rank: int, world: int) -> None:
    as_before(rank, world, "int8", "another group")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_what_is_not_encoded_is_summed_to_the_bit_in_any_dtype(dtype: torch.dtype) -> None:
    """In shards at any address, some of whose gradients are empty; without collectives."""
    numels, is_encoded, ranks = [7, 640, 0, 3, 300], [False, True, False, False, False], 3
    shard = sum(numels)
    flats = [torch.randn(ranks * shard + 1).to(dtype)[1:] for _ in range(ranks)]
    sent = []
    for flat in flats:
        bucket = reduce_scatter_bucket(flat[:shard], "int8", numels, is_encoded, "a shard", ranks)
        wire = torch.full((bucket.wire_numel,), 0xA5, dtype=torch.uint8)
        bucket.pack(flat.split(numels * ranks), wire, 2.5, None)
        sent.append(wire.view(ranks, -1))
    compute = torch.float64 if dtype is torch.float64 else torch.float32
    into = torch.empty(shard + 1, dtype=dtype)[1:]
    received = torch.cat([wires[ranks - 1] for wires in sent])
    bucket.unpack(into.split(numels), received, torch.ones(1, dtype=compute), None)
    rows = [flat.view(ranks, shard)[-1].to(compute) for flat in flats]
    expected = (((rows[0] + rows[1]) + rows[2]) * torch.tensor(1 / 2.5, dtype=compute)).to(dtype)
    for got, wanted, one in zip(into.split(numels), expected.split(numels), is_encoded, strict=True):
        error = float((got - wanted).double().norm() / wanted.double().norm().clamp(min=1e-9))
        assert error <= BOUNDS["int8"] if one else torch.equal(got, wanted), (len(got), error)
