"""`set_fsdp_comms`: FSDP2 with replicas (HSDP) on our wires, on 2 to 4 Gloo ranks."""

from __future__ import annotations

import functools
import itertools
import logging
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import wires
from support.fsdp_models import (
    POLICIES,
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
from support.logs import logged
from support.own_wires import NAME
from support.ranks import on_ranks
from support.timeouts import patient_group, wait_briefly
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from fusedreduce import AgreementError, CollectiveError, FSDPComms, FusedReduceError, set_fsdp_comms
from fusedreduce.comm.process_group import ProcessGroupCommunicator
from fusedreduce.kernels import counting
from fusedreduce.parallel.fsdp_shards import ReplicaGroup
from fusedreduce.wires import encoding_of

# What one rounding of every replica's contribution may be off by, and one more of their sum on three and more.
ONE_ROUNDING = {"bf16": 0.0035, "fp16": 0.0005, "int8": 0.010, "int4": 0.155}
TWO_ROUNDINGS = {"bf16": 0.0045, "bf16+fp32": 0.0045, "fp16": 0.0007, "fp16+fp32": 0.0007, "int8": 0.014, "int4": 0.18}

ONE, TWO = "1-D", "2-D"  # dimensions of the mesh that fully_shard is given


def _ours(
    shape: tuple[int, int], wire: str, how: str = TWO, model: nn.Module | None = None, **options: Any
) -> tuple[nn.Module, FSDPComms]:
    """A sharded model that has our wire between replicas."""
    mesh = mesh_of(*shape)
    made = sharded(mesh if how == TWO else mesh["shard"], model, **options)
    given: dict[str, Any] = {} if how == TWO else {"replicate_mesh": mesh["replicate"]}
    named = wires.settings(wire)
    return made, set_fsdp_comms(made, all_reduce=named["wire"], accumulation=named["accumulation"], **given)


def _replicas(module: Any) -> Any:
    """What torch all-reduces a module's shard over; None: it was sharded over one dimension."""
    return getattr(group_of(module).mesh_info, "replicate_process_group", None)


def _assert_not_set(model: nn.Module) -> None:
    assert not any(isinstance(_replicas(one), ReplicaGroup) for one in modules_of(model))


def as_hsdp(
    rank: int, world: int, shape: tuple[int, int], how: str, policy: str, factor: float | None, force_sum: bool
) -> None:
    """A native wire leaves what torch's HSDP leaves, to the bit."""
    expected = torchs(shape, policy, factor, force_sum=force_sum)
    ours, comms = _ours(shape, "native", how, **POLICIES[policy])
    set_factor(ours, factor, force_sum=force_sum)
    found = steps_of(ours)
    assert_everywhere(found)
    for name, one in found.items():
        assert torch.equal(one, expected[name]), name
    calls = 2 * len(modules_of(ours)) if shape[0] > 1 else 0
    counted = comms.stats()["all_reduce"]
    assert (counted["calls"], counted["collectives"], counted["calls_without_layout"]) == (calls, calls, 0)


def within(rank: int, world: int, shape: tuple[int, int], wire: str, policy: str, bound: float) -> None:
    """No parameter is off by more, and all ranks have the same bytes."""
    expected = torchs(shape, policy)
    model, comms = _ours(shape, wire, **POLICIES[policy])
    found = steps_of(model)
    assert_everywhere(found)
    errors = errors_of(found, expected)
    assert max(errors.values()) <= bound, errors
    assert comms.stats()["all_reduce"]["calls_without_layout"] == 0
    if wire in wires.ENCODED:
        # As torch's HSDP reduces them; among more than two replicas in another order.
        small = {name: one for name, one in errors.items() if expected[name].ndim < 2}
        assert max(small.values()) <= (0 if shape[0] == 2 else 1e-2 * bound), small


@grid(("world", "norms", "wire"), [*itertools.product([2, 3], [0, 1, 3], ["bf16", "int8", "int4"])])
@on_ranks()
def test_launches_collectives_and_bytes_of_a_call(rank: int, world: int, norms: int, wire: str) -> None:
    """Two launches, three among more replicas; norms beside an encoded matrix take one collective more, and none."""
    model: Any = nn.Sequential(*(nn.LayerNorm(512, bias=False) for _ in range(norms)), nn.Linear(512, 256, bias=False))
    fully_shard(model, mesh=mesh_of(world, 1))
    comms = set_fsdp_comms(model, all_reduce=wire)
    with counting.count_launches() as launches:
        model(torch.randn(2, 512, device="cpu")).sum().backward()
    encoding, matrix, rest = encoding_of(wire), 512 * 256, 512 * norms
    exchanges = 2 if encoding is not None and world > 2 else 1
    if encoding is None:
        functions, expected = ["pack", "unpack"], 2 * (matrix + rest)
    else:
        functions = ["encode", "decode"] if world == 2 else ["encode", "combine_encoded", "decode"]
        blocks = -(-matrix // encoding.block_numel // world) * world if world > 2 else matrix // encoding.block_numel
        expected = blocks * encoding.block_bytes + 4 * rest
    assert [one.function for one in launches] == functions
    counted = comms.stats()["all_reduce"]
    assert counted["collectives"] == exchanges + (encoding is not None and norms > 0)
    assert world > 2 or counted["wire_bytes"] == expected
    assert abs(counted["wire_bytes"] - expected) <= 0.02 * expected, (counted, expected)


@pytest.mark.parametrize(
    ("shape", "factor", "wire"),
    [
        *(((2, 2), None, wire) for wire in ("bf16", "int8", NAME.format("TOP16"))),
        *(((2, 2), 1.0, wire) for wire in ("fp16", "int4", NAME.format("SMALL8"))),
        *(((4, 1), None, wire) for wire in ("fp16+fp32", "int4", NAME.format("SMALL8"))),
        *(((4, 1), 1.0, wire) for wire in ("bf16+fp32", "int8")),
    ],
)
@on_ranks(4)
def test_every_parameter_has_blocks_of_its_own(
    rank: int, world: int, shape: tuple[int, int], wire: str, factor: float | None
) -> None:
    """What each call leaves in its flat shard is the definition: every parameter has blocks of its own."""
    model, _ = _ours(shape, wire, ONE)
    set_factor(model, factor, force_sum=factor is not None)
    checked, encodes = itertools.count(), encoding_of(wires.settings(wire)["wire"]) is not None
    replicas = mesh_of(*shape)["replicate"].get_group()

    def checking(group: Any) -> Callable[[Any, Any], None]:
        all_reduce = group.mesh_info.replicate_process_group.allreduce

        def check(tensors: Any, opts: Any) -> None:
            (flat,) = tensors
            before = [torch.empty_like(flat) for _ in range(shape[0])]
            dist.all_gather(before, flat, group=replicas)
            all_reduce(tensors, opts)
            divisors = [1.0 if factor is not None else float(shape[0])] * shape[0]
            begin = 0
            for one in group.fsdp_params:
                numel = one.padded_sharded_param_size.numel()
                rows = 1 if one.sharded_param.ndim > 1 else 0
                of_rank = [each[begin : begin + numel].view((1, numel) if rows else (numel,)) for each in before]
                is_encoded = wires.encoding_of(of_rank[0], wire) is not None
                travels = wire if is_encoded or not encodes else "native"
                expected = wires.reduced(of_rank, divisors, travels, "mean" if factor is None else "sum").view(-1)
                got = flat[begin : begin + numel]
                if shape[0] == 2 or is_encoded or travels in wires.EXCHANGED:
                    assert torch.equal(got, expected), (travels, numel)
                else:  # Gloo adds four up in an order of its own: some units in the last place of the largest, in fp32
                    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-8)
                begin += numel
                next(checked)
            assert begin == flat.numel()

        return check

    for module in modules_of(model):
        _replicas(module).allreduce = checking(group_of(module))
    steps_of(model)
    assert next(checked) == 2 * len(list(model.parameters()))


@functools.cache
def _torchs_micro_batches(policy: str) -> Any:
    return steps_of(sharded(mesh_of(2, 2), **POLICIES[policy]), steps=2, micro=3)


@grid(("policy", "how", "wire"), [*itertools.product(["fp32", "bf16 reduce"], [ONE, TWO], ["native", "int8"])])
@on_ranks(4)
def test_micro_batches_are_reduced_across_replicas_once(
    rank: int, world: int, wire: str, how: str, policy: str
) -> None:
    """set_requires_all_reduce(False) adds shards up on each replica, as torch's HSDP does, and reduces them once."""
    model, comms = _ours((2, 2), wire, how, **POLICIES[policy])
    plain = wire == "native"
    expected = _torchs_micro_batches(policy)
    for step in range(2):
        for module in modules_of(model):
            module.set_requires_all_reduce(False)
        loss_of(model, 3 * step).backward()
        if step == 0:
            assert all(one.grad is None for one in model.parameters())
        loss_of(model, 3 * step + 1).backward()
        for module in modules_of(model):
            module.set_requires_all_reduce(True)
        loss_of(model, 3 * step + 2).backward()
    found: Any = full_gradients(model)
    assert_everywhere(found)
    assert comms.stats()["all_reduce"]["calls"] == 2 * len(modules_of(model))
    for name, error in errors_of(found, expected).items():
        assert torch.equal(found[name], expected[name]) if plain else error <= 0.015, (name, error)


class Sometimes(nn.Module):
    """A layer that some steps do not use, one whose weight may be frozen, and one that FSDP ignores."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(48, 64)
        self.second = nn.Linear(48, 64)
        self.last = nn.Linear(64, 8)
        self.uses_second = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The first layer's output, and the second's where that is used."""
        hidden = self.first(x) + self.second(x) if self.uses_second else self.first(x)
        out: torch.Tensor = self.last(hidden)
        return out


def _sometimes_step(model: nn.Module, step: int) -> None:
    model(
        torch.randn(6, 48, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    ).square().sum().backward()


def _sometimes_trained(what: str, all_reduce: str | None) -> tuple[list[dict[str, torch.Tensor]], FSDPComms | None]:
    """Whole gradients of four steps of a model of which `what` says which have none; None: torch's own all-reduce."""
    torch.manual_seed(0)
    model: Any = Sometimes()
    options: dict[str, Any] = {}
    if what == "ignored":
        options["ignored_params"] = {model.second.weight, model.second.bias}
    if what == "frozen from the beginning":
        model.second.weight.requires_grad_(False)
    if what == "tied":
        model.second.weight = model.first.weight
    fully_shard(model, mesh=mesh_of(*(2, 2)), **options)
    comms = None if all_reduce is None else set_fsdp_comms(model, all_reduce=all_reduce)
    gradients = []
    for step in range(4):
        model.zero_grad()
        model.uses_second = not (what == "unused" and step % 2)
        if what == "frozen later":
            model.second.weight.requires_grad_(step < 2)
        if what == "frozen in turns":  # of as many elements, so that the length says nothing
            model.first.weight.requires_grad_(step % 2 == 0)
            model.second.weight.requires_grad_(step % 2 == 1)
        _sometimes_step(model, step)
        gradients.append(
            {name: one.grad.full_tensor() for name, one in model.named_parameters() if hasattr(one.grad, "full_tensor")}
        )
    return gradients, comms


@functools.cache
def _torchs_sometimes_trained(what: str) -> list[dict[str, torch.Tensor]]:
    return _sometimes_trained(what, None)[0]


@pytest.mark.parametrize(
    ("what", "wire"),
    [
        ("unused", "bf16"),
        *itertools.product(
            ["unused", "frozen from the beginning", "frozen later", "frozen in turns", "ignored", "tied"],
            ["native", "int8"],
        ),
    ],
)
@on_ranks(4)
def test_parameters_without_a_gradient(rank: int, world: int, wire: str, what: str) -> None:
    """Shards in which parameters are missing travel as bf16 if they are encoded, and are counted; none is mixed up."""
    theirs = _torchs_sometimes_trained(what)
    with logged("fusedreduce.parallel", logging.WARNING) as records:
        found, comms = _sometimes_trained(what, wire)
    assert comms is not None
    without = {"unused": 2}.get(what, 0) if wire in wires.ENCODED else 0
    assert comms.stats()["all_reduce"]["calls_without_layout"] == without
    assert len(records) == (without > 0 or what == "ignored"), records
    for expected, got in zip(theirs, found, strict=True):
        assert got.keys() == expected.keys() and got
        assert_everywhere(got)
        for name, error in errors_of(got, expected).items():
            assert error <= (0 if wire == "native" else 0.015), (name, error)


@pytest.mark.parametrize("wire", ["bf16", "int8"])
@on_ranks(4)
def test_modules_that_share_a_group_and_a_wire_of_a_part(rank: int, world: int, wire: str) -> None:
    """Modules that share a group of parameters have one hook; a later call for a part of the model counts there."""
    mesh = mesh_of(2, world // 2)
    found = []
    for ours in (False, True):
        torch.manual_seed(0)
        model: Any = Language()
        fully_shard([model.blocks[0], model.blocks[1]], mesh=mesh)
        fully_shard([model.norm, model.head], mesh=mesh)
        fully_shard(model, mesh=mesh)
        if ours:
            comms = set_fsdp_comms(model, all_reduce="native")
            again = set_fsdp_comms(model.blocks[0], all_reduce=wire)
        found.append(steps_of(model, steps=1))
    expected, got = found
    assert comms.stats()["all_reduce"]["calls"] == 2 and again.stats()["all_reduce"]["calls"] == 1
    for name, error in errors_of(got, expected).items():
        assert error <= (0.015 if name.startswith("blocks") else 0), name
    assert max(errors_of(got, expected).values()) > 0


@on_ranks(4)
def test_modules_without_replicas_are_left_to_torch(rank: int, world: int) -> None:
    """Modules that all ranks share, as experts may be, are left to torch; the others have our "int8"."""
    found = []
    for ours in (False, True):
        torch.manual_seed(0)
        model: Any = Language()
        fully_shard(model.blocks[0], mesh=mesh_of(1, world)["shard"])
        fully_shard(model, mesh=mesh_of(2, world // 2))
        if ours:
            comms = set_fsdp_comms(model, all_reduce="int8")
        found.append(steps_of(model))
    expected, got = found
    assert comms.stats()["all_reduce"]["calls"] == 2
    for name, error in errors_of(got, expected).items():
        assert error <= (0 if name.startswith("blocks.0") else 0.015), name
    assert max(errors_of(got, expected).values()) > 0


@on_ranks(4)
def test_an_optimizer_in_backward_steps_as_often_as_with_hsdp(rank: int, world: int) -> None:
    """Hooks of accumulated gradients are called where torch's HSDP calls them, and not for shards that are kept."""
    weights, calls = [], []
    for ours in (False, True):
        model = sharded(mesh_of(2, world // 2))
        if ours:
            set_fsdp_comms(model, all_reduce="native")
        count, optimizers = itertools.count(), {one: torch.optim.AdamW([one], lr=1e-2) for one in model.parameters()}

        def step(parameter: torch.Tensor, count: Any = count, optimizers: Any = optimizers) -> None:
            next(count)
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for one in model.parameters():
            one.register_post_accumulate_grad_hook(step)
        steps_of(model, steps=2, micro=2)
        weights.append([one.full_tensor() for one in model.parameters()])  # type: ignore[attr-defined]
        calls.append(next(count))
    assert calls[0] == calls[1] == 2 * len(weights[0])
    assert all(map(torch.equal, *weights))


@pytest.mark.parametrize("wire", ["native", "bf16"])
@on_ranks(4)
def test_a_hook_of_the_users_is_called_behind_the_replicas(rank: int, world: int, wire: str) -> None:
    """A hook of the user's is called with what the replicas have in common, whether it was set before or after."""
    seen: list[torch.Tensor] = []
    replicas = mesh_of(2, world // 2)["replicate"].get_group()
    for before in (False, True):
        made: Any = sharded(mesh_of(2, world // 2))
        modules = modules_of(made)
        comms = None if before else set_fsdp_comms(made, all_reduce=wire)
        for module in modules:
            module.set_all_reduce_hook(lambda flat: seen.append(flat.clone()))
        comms = comms or set_fsdp_comms(made, all_reduce=wire)
        seen.clear()
        assert_everywhere(steps_of(made, steps=1))
        assert comms.stats()["all_reduce"]["calls"] == len(seen) == len(modules)
        for flat in seen:
            others = [torch.empty_like(flat) for _ in range(2)]
            dist.all_gather(others, flat, group=replicas)
            assert torch.equal(*others)


@pytest.mark.parametrize("wire", ["native", "fp16", "bf16"])
@on_ranks(4)
def test_large_gradients_in_fp16(rank: int, world: int, wire: str) -> None:
    """Gradients whose sum fp16 cannot hold are averaged, as torch's HSDP averages them."""
    found = []
    for ours in (False, True):
        model: Any = nn.Linear(64, 64, bias=False)
        fully_shard(model, mesh=mesh_of(world, 1), **POLICIES["fp16 reduce"])
        if ours:
            set_fsdp_comms(model, all_reduce=wire)
        (20000 * model(torch.ones(1, 64))).sum().backward()
        found.append(model.weight.grad.full_tensor())
    assert torch.equal(found[0], torch.full((64, 64), 20000.0))
    assert ((found[1] - found[0]).abs() <= 0.004 * found[0]).all()


@pytest.mark.parametrize("wire", ["native", "int8"])
@on_ranks(4)
def test_an_iteration_that_is_reset_leaves_nothing(rank: int, world: int, wire: str) -> None:
    """`reset_iter_state`, which torch has since 2.13, drops what a given up iteration has added up."""
    found = []
    for ours in (False, True):
        model: Any = sharded(mesh_of(2, world // 2))
        if not hasattr(model, "reset_iter_state"):
            return
        if ours:
            set_fsdp_comms(model, all_reduce=wire)
        model.set_requires_all_reduce(False)
        loss_of(model, 0).backward()
        model.reset_iter_state()
        model.zero_grad()
        model.set_requires_all_reduce(True)
        found.append(steps_of(model, steps=1))
    assert max(errors_of(found[1], found[0]).values()) <= (0 if wire == "native" else 0.015)


@pytest.mark.parametrize(("wire", "policy"), [("native", "fp32"), ("int8", "bf16 parameters")])
@on_ranks(4)
def test_placements_norms_and_checkpoints_are_torchs(rank: int, world: int, wire: str, policy: str) -> None:
    """Placements, the clipped norm, checkpoints in both directions: as torch's HSDP. Training goes on from either."""
    mesh = mesh_of(2, world // 2)
    theirs = sharded(mesh, **POLICIES[policy])
    ours, _ = _ours((2, world // 2), wire, **POLICIES[policy])
    for model in (theirs, ours):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if model is theirs:
            expected = norm.full_tensor()
    torch.testing.assert_close(norm.full_tensor(), expected, rtol=0 if wire == "native" else 2e-2, atol=0)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert one.placements == other.placements and one.grad.placements == other.grad.placements  # type: ignore[attr-defined, union-attr]
    for source, target in ((ours, theirs), (theirs, ours)):
        folder = [tempfile.mkdtemp() if rank == 0 else None]
        dist.broadcast_object_list(folder)
        dcp_save({"model": get_model_state_dict(source)}, checkpoint_id=folder[0])
        with torch.no_grad():
            for one in target.parameters():
                one.zero_()
        state = get_model_state_dict(target)
        dcp_load({"model": state}, checkpoint_id=folder[0])
        target.load_state_dict(state)
        for one, other in zip(source.parameters(), target.parameters(), strict=True):
            assert torch.equal(one.full_tensor(), other.full_tensor())  # type: ignore[attr-defined]


@on_ranks(4)
def test_compiled_modules(rank: int, world: int) -> None:
    """torch.compile on the sharded blocks: hooks run outside of the graphs, and the errors stay."""
    expected = torchs((2, 2), "fp32")
    torch.manual_seed(0)
    model = Language()
    for block in model.blocks:
        block.compile(backend="aot_eager")
    made, comms = _ours((2, 2), "int8", model=model)
    errors = errors_of(steps_of(made), expected)
    assert max(errors.values()) <= 0.015, errors
    assert comms.stats()["all_reduce"]["calls"] == 2 * len(modules_of(made))


@pytest.mark.parametrize("what", ["wire", "wire of a shard", "accumulation", "model", "frozen"])
@on_ranks(4)
def test_replicas_that_disagree(rank: int, world: int, what: str) -> str:
    """Replicas with other settings, or another model, get one error on every rank; nothing is set."""
    mesh = mesh_of(2, world // 2)
    replica = int(rank == 3)  # alone among the others: rank 1 has its shard, rank 2 is beside it
    model: Any = Language(blocks=1 + replica if what == "model" else 1)
    if what == "frozen" and replica:
        model.norm.weight.requires_grad_(False)
    made = sharded(mesh, model)
    wire, accumulation = "bf16", "wire"
    if what == "wire" and replica:
        wire = "int8"
    if what == "wire of a shard" and rank % 2:  # replicas agree
        wire = "int8"
    if what == "accumulation" and replica:
        accumulation = "fp32"
    named = {
        "wire": "all_reduce",
        "wire of a shard": "all_reduce",
        "model": "params",
        "frozen": "norm.weight",
        "accumulation": "accumulation",
    }[what]
    with pytest.raises(AgreementError, match=named) as raised:
        set_fsdp_comms(made, all_reduce=wire, accumulation=accumulation)  # type: ignore[arg-type]
    if replica and what != "wire of a shard":
        assert "among the replicas 1, 3, here numbered from 0" in str(raised.value)
    _assert_not_set(made)
    return str(raised.value)


@on_ranks(4)
def test_ranks_that_hold_different_shards(rank: int, world: int) -> None:
    """Ranks that hold different shards are no replicas, of however many elements each is."""
    mesh = mesh_of(2, world // 2)
    model = sharded(mesh["shard"])
    with pytest.raises(AgreementError, match=r'shard: "0 of 2" on rank 0; "1 of 2" on rank 1'):
        set_fsdp_comms(model, all_reduce="native", replicate_mesh=mesh["shard"])
    _assert_not_set(model)


@on_ranks(4)
def test_nothing_is_set_where_some_replicas_disagree(rank: int, world: int) -> None:
    """Where the replicas of some modules disagree, those of others, which agree, are not set either."""
    mesh, all_replicas = mesh_of(2, world // 2), mesh_of(world, 1)
    torch.manual_seed(0)
    model: Any = Language()
    if rank == world - 1:
        model.norm.weight.requires_grad_(False)
    fully_shard(model.blocks[0], mesh=mesh)  # compared later, and by all alike
    fully_shard(model, mesh=all_replicas)
    with pytest.raises(AgreementError, match=r"norm\.weight: .*frozen on rank 3"):
        set_fsdp_comms(model, all_reduce="bf16")
    _assert_not_set(model)


@on_ranks(4)
def test_what_is_sharded_afterwards_is_named(rank: int, world: int) -> None:
    """What is sharded afterwards is named; what FSDP ignores is too, and what is frozen is not."""
    with logged("fusedreduce.parallel", logging.WARNING) as records:
        model = Language()
        model.norm.requires_grad_(False)
        for block in model.blocks:
            fully_shard(block, mesh=mesh_of(2, world // 2))
        set_fsdp_comms(model, all_reduce="bf16")
        fully_shard(model, mesh=mesh_of(2, world // 2))
        set_fsdp_comms(model, all_reduce="bf16")
        with torch.no_grad():
            loss_of(model)  # the root's parameters stay whole
        set_fsdp_comms(model, all_reduce="bf16")
    (said,) = records
    assert "no fully_shard has sharded tokens.weight, places.weight, head.weight, which" in said


@pytest.mark.parametrize("wire", ["native", "int8"])
@on_ranks(2)
def test_an_all_reduce_that_cannot_be_started(rank: int, world: int, wire: str) -> None:
    """It is named, and no other shard is reduced out of step with it."""
    model = sharded(mesh_of(world, 1)["shard"])
    set_fsdp_comms(model, all_reduce=wire, replicate_mesh=DeviceMesh.from_group(patient_group(), "cpu"))

    def refuses(*_: Any) -> None:
        raise RuntimeError("the connection is closed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessGroupCommunicator, "all_reduce_coalesced", refuses)
        with pytest.raises(CollectiveError, match=r"the all-reduce of the shard of .*the connection is closed"):
            loss_of(model).backward()
    with pytest.raises(FusedReduceError, match="an earlier reduction of a shard failed"):
        loss_of(model).backward()


@pytest.mark.parametrize("wire", ["native", "bf16", "int8"])
@on_ranks(2)
def test_a_replica_that_is_gone(rank: int, world: int, wire: str) -> None:
    """Who waits for a replica in vain is told which shard's reduction failed, and why none is tried again."""
    group = patient_group()
    replicas = DeviceMesh.from_group(group, "cpu")
    alone = mesh_of(world, 1)["shard"]
    model = sharded(alone)
    set_fsdp_comms(model, all_reduce=wire, replicate_mesh=replicas)
    if rank == 0:
        return
    wait_briefly()
    with pytest.raises(CollectiveError, match=rf"rank {rank}: .*(the shard of blocks\.1|the root module)"):
        loss_of(model).backward()
    with pytest.raises(FusedReduceError, match="an earlier reduction of a shard failed"):
        loss_of(model).backward()


@on_ranks(4)
def test_what_is_refused(rank: int, world: int) -> None:
    """What cannot be served is refused by name, before anything is changed."""
    mesh = mesh_of(2, world // 2)
    whole, flat = sharded(mesh), sharded(mesh["shard"])
    with pytest.raises(ValueError, match=r"no module of this Linear was sharded by .*fully_shard"):
        set_fsdp_comms(nn.Linear(2, 2), all_reduce="bf16")
    with pytest.raises(ValueError, match=r"the model was sharded over a mesh of one dimension, .*replicate_mesh="):
        set_fsdp_comms(flat, all_reduce="bf16")
    with pytest.raises(ValueError, match=r"sharded over a mesh that has replicas, .*leave out replicate_mesh"):
        set_fsdp_comms(whole, all_reduce="bf16", replicate_mesh=mesh["replicate"])
    with pytest.raises(ValueError, match=r'replicate_mesh must be .*got .*replicate_mesh=mesh\["replicate"\]'):
        set_fsdp_comms(flat, all_reduce="bf16", replicate_mesh=mesh)
    with pytest.raises(ValueError, match=r"replicate_mesh must be a DeviceMesh"):
        set_fsdp_comms(flat, all_reduce="bf16", replicate_mesh=mesh["replicate"].get_group())  # type: ignore[arg-type]
    hooked: Any = fully_shard(nn.Linear(8, 8), mesh=mesh["shard"])
    hooked.set_all_reduce_hook(lambda shard: None)
    with pytest.raises(ValueError, match=r"the root module has an all-reduce hook, .*leave set_all_reduce_hook out"):
        set_fsdp_comms(hooked, all_reduce="bf16", replicate_mesh=mesh["replicate"])
    with pytest.raises(ValueError, match=r"wire=\(.*\) and set_fsdp_comms exclude each other"):
        set_fsdp_comms(whole, all_reduce={"*": "bf16"})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"accumulation='fp32'.*'bf16' and 'fp16'"):
        set_fsdp_comms(whole, all_reduce="int8", accumulation="fp32")
    with pytest.raises(ValueError, match="wire"):
        set_fsdp_comms(whole, all_reduce="int7")
    for model in (whole, flat):
        _assert_not_set(model)
        assert (group_of(model).mesh_info.replicate_mesh_dim is None) == (model is flat)


HSDP = (
    *(((2, 2), policy, None, False) for policy in POLICIES),
    ((2, 2), "fp32", 2.0, False),  # the shard's size; Gloo has no other factor but by sums
    *(((2, 2), "fp32", factor, True) for factor in (None, 1.0, 2.0, 4.0)),
    *(((4, 1), "fp32", factor, False) for factor in (None, 1.0, 4.0)),
    ((1, 4), "fp32", None, False),
)


@pytest.mark.parametrize(
    ("shape", "policy", "factor", "force_sum", "how"),
    [
        pytest.param(*case, how, marks=[pytest.mark.full] if (number + (how == ONE)) % 2 else [])
        for number, case in enumerate(HSDP)
        for how in (ONE, TWO)
    ],
)
@on_ranks(4)
def test_a_native_wire_leaves_what_hsdp_leaves(
    rank: int, world: int, shape: tuple[int, int], how: str, policy: str, factor: float | None, force_sum: bool
) -> None:
    as_hsdp(rank, world, shape, how, policy, factor, force_sum)


@pytest.mark.parametrize("how", [ONE, TWO])
@pytest.mark.parametrize("factor", [None, 1.0])
@on_ranks(3)
def test_a_mean_over_three_replicas_is_hsdps(rank: int, world: int, how: str, factor: float | None) -> None:
    as_hsdp(rank, world, (3, 1), how, "fp32", factor, False)


@pytest.mark.parametrize(
    ("policy", "wire"),
    [
        pytest.param(policy, wire, marks=[pytest.mark.full] if policy != "fp32" and wire != "int8" else [])
        for policy in POLICIES
        for wire in ONE_ROUNDING
    ],
)
@on_ranks(4)
def test_errors_of_two_replicas(rank: int, world: int, wire: str, policy: str) -> None:
    bound = ONE_ROUNDING[wire] + {"bf16 reduce": 0.006, "fp16 reduce": 0.001, "bf16 parameters": 0.006}.get(policy, 0.0)
    within(rank, world, (2, 2), wire, policy, bound)


@pytest.mark.parametrize("wire", TWO_ROUNDINGS)
@on_ranks(4)
def test_errors_of_four_replicas(rank: int, world: int, wire: str) -> None:
    within(rank, world, (4, 1), wire, "fp32", TWO_ROUNDINGS[wire])
