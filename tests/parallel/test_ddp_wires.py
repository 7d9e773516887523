"""The wrapper on wires whose contributions are exchanged and added up in fp32, on 2 and 3 Gloo ranks.

What it does on any wire: test_ddp.py, whose tables have these too.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel.test_ddp import join
from parallel.test_faults import survivors_raise
from support.ddp_models import (
    SMALL_CAP_MB,
    Interrupted,
    assert_averaged,
    assert_is_mean,
    assert_same_on_all_ranks,
    assert_step_averages,
    batch,
    loss_of,
    mlp,
    right_steps,
    train,
    wrapped,
)
from support.inside import MEASURE_EVERY, inside
from support.logs import logged
from support.own_wires import NAME
from support.ranks import RankPool, on_ranks
from support.timeouts import PATIENT_S, in_time, patient_group
from support.wires import ENCODED, EXCHANGED
from torch import nn
from torch.distributed import distributed_c10d as c10d

import fusedreduce
from fusedreduce import LocalGroup, reducer_of
from fusedreduce.buckets.exchanged import EncodedBucket, ExchangedBucket
from fusedreduce.buckets.two_levels import TwoLevelBucket
from fusedreduce.comm import backend_support
from fusedreduce.comm.process_group import ProcessGroupCommunicator
from fusedreduce.trace.reader import read
from fusedreduce.wires import wire_bytes


def long_run(rank: int, world: int, wire: str, steps: int) -> None:
    """Each step's averages, the same bytes on every rank; buckets of another size in the middle."""
    ddp = train(rank, mlp(), wire, steps=steps // 2)
    buckets = int(ddp.reduce_stats()["buckets"])
    ddp.set_bucket_size(1500)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for step in range(steps // 2, steps):
        assert_step_averages(ddp, batch(rank, step), wire)
        optimizer.step()
        if step == steps // 2 + 15:
            allocated = ddp.reduce_stats()["wire_allocations"]
    assert int(ddp.reduce_stats()["buckets"]) > buckets
    assert ddp.reduce_stats()["wire_allocations"] == allocated
    assert_same_on_all_ranks([parameter.detach() for parameter in ddp.parameters()])


@pytest.mark.parametrize(
    ("world", "wire"), [(2, "int8"), (3, "int4"), (3, NAME.format("SMALL8")), (3, NAME.format("LARGE4"))]
)
@on_ranks()
def test_what_was_sent_and_what_is_owed_come_to_the_means(rank: int, world: int, wire: Any) -> None:
    """What was sent of some 10 differs from the means by what is owed; in the end one rank has fewer inputs."""
    config = fusedreduce.ReduceConfig(wire=wire, error_feedback=True, stochastic_rounding=True)
    ddp = fusedreduce.DistributedDataParallel(mlp(), reduce=config, bucket_cap_mb=SMALL_CAP_MB)
    names = [name for name, one in ddp.module.named_parameters() if one.ndim > 1]
    sent = {name: torch.zeros((), dtype=torch.float64) for name in names}
    largest = dict.fromkeys(names, 0.0)
    with ddp.join():
        for step in range(10 - rank):
            local = copy.deepcopy(ddp.module)
            loss_of(local(batch(rank, step))).backward()
            loss_of(ddp(batch(rank, step))).backward()
            held, own = (dict(one.named_parameters()) for one in (ddp.module, local))
            for name in names if step < 10 - world + 1 else ():
                gradient, mean = held[name].grad, own[name].grad
                assert gradient is not None and mean is not None
                mean = mean.double() / world
                dist.all_reduce(mean)
                sent[name] = sent[name] + gradient.double() - mean
                largest[name] = max(largest[name], float(gradient.abs().max()))
            if step == 10 - world:  # the last one of all ranks
                state = ddp.reduce_state_dict()
            ddp.zero_grad()
    for name in names:
        owed = state["residuals"][name].double().sum(0)
        assert float((sent[name] + owed).abs().max()) <= 2.0**-20 * largest[name] < float(owed.abs().max())
        assert_same_on_all_ranks([*state["residuals"][name]])
    other = fusedreduce.DistributedDataParallel(mlp(), reduce=config, bucket_cap_mb=SMALL_CAP_MB)
    other.load_reduce_state_dict(state)
    again = other.reduce_state_dict()
    assert again["rounds"] == state["rounds"] == 10 - world + 1
    assert all(torch.equal(one, again["residuals"][name]) for name, one in state["residuals"].items())


@pytest.mark.parametrize(("world", "wire"), [(2, "int8"), (3, "int8"), (3, "bf16+fp32")])
@on_ranks()
def test_only_second_phases_are_on_the_private_group(rank: int, world: int, wire: str) -> None:
    """Two ranks gather each encoded bucket on the user's."""
    ddp = wrapped(mlp(), wire, policy="static")
    counts = {"user": 0, "private": 0}
    make = ProcessGroupCommunicator.all_gather

    def counted(self: Any, tensor: torch.Tensor, into: torch.Tensor | None = None) -> Any:
        counts["private" if self._whole is not None else "user"] += 1
        return make(self, tensor, into)

    for step in range(4):
        loss = loss_of(ddp(batch(rank, step)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ProcessGroupCommunicator, "all_gather", counted)
            counts.update(user=0, private=0)
            loss.backward()
    exchanged = sum(isinstance(one.bucket, ExchangedBucket) for one in inside(ddp).dense_reductions)
    assert exchanged >= 2
    assert counts == ({"user": exchanged, "private": 0} if world == 2 else {"user": 0, "private": exchanged})


@pytest.mark.parametrize("wire", ["int8", "bf16+fp32"])
@on_ranks(3)
def test_after_an_error_of_the_users_own_reset_helps(rank: int, world: int, wire: str) -> None:
    """An exception on every rank while a bucket is between its phases, or not, as the ranks' clocks have it."""
    ddp = wrapped(Interrupted(), wire, process_group=patient_group(), policy="static", bucket_cap_mb=0.001)
    model: Any = ddp.module
    right_steps(rank, ddp, wire=wire, steps=4)
    groups = len(c10d._world.pg_map)
    for number in range(2):
        model.armed = True
        ddp.zero_grad()
        loss = loss_of(ddp(batch(rank, 0)))
        if number:
            time.sleep(0.02 * rank)
        with pytest.raises(KeyError, match="of the user"):
            loss.backward()
        model.armed = False
        with in_time():
            ddp.reset()
        right_steps(rank, ddp, wire=wire, steps=3)
        assert len(c10d._world.pg_map) == groups, "groups of second phases are not kept over a reset"
    reducer_of(ddp).close()
    assert groups - len(c10d._world.pg_map) == 1, "close() destroys the group of second phases"


@pytest.mark.parametrize(("world", "wire"), [(2, "int8"), (3, "fp16+fp32")])
@on_ranks()
def test_gradients_are_no_views_and_rank_0_logs_it(rank: int, world: int, wire: str) -> None:
    with logged() as messages:
        ddp = wrapped(mlp(), wire, gradient_as_bucket_view=True)
    said = [message for message in messages if message.startswith("gradient_as_bucket_view=True has no effect with")]
    assert len(said) == (rank == 0)
    right_steps(rank, ddp, wire=wire, steps=4)
    buffers = inside(ddp).buffers()
    held = {one.untyped_storage().data_ptr() for one in buffers}
    for parameter in ddp.parameters():
        assert parameter.grad is not None and parameter.grad.untyped_storage().data_ptr() not in held


@pytest.mark.parametrize(("world", "wire"), [(2, "int8"), (3, "int8"), (2, NAME.format("TOP16"))])
@on_ranks()
def test_traces_are_recorded(rank: int, world: int, tmp_path: Path, wire: str) -> None:
    """A trace of some steps; its bytes on the wire are those of the encoding."""
    ddp = wrapped(mlp(), wire)
    right_steps(rank, ddp, wire=wire, steps=3)
    with ddp.record_trace(tmp_path):
        right_steps(rank, ddp, wire=wire, steps=5)
    dist.barrier()
    trace = read(tmp_path)[rank]
    assert len(trace.steps) == 5
    config = ddp.reduce_config
    sent = {name: wire_bytes(one, config.wire_of(one)) for name, one in ddp.module.named_parameters()}
    assert {one.name: one.wire_bytes for one in trace.parameters} == sent


def bits(rank: int, world: int, wire: str, group: Any = None, **options: Any) -> list[torch.Tensor]:
    """Gradients of some steps, and what they have made of the weights; without biases, which would travel native."""
    model = nn.Sequential(nn.Linear(24, 32, bias=False), nn.Tanh(), nn.Linear(32, 40, bias=False))
    generator = torch.Generator().manual_seed(0)  # the global one is that of all threads
    with torch.no_grad():
        for one in model.parameters():
            one.copy_(torch.randn(one.shape, generator=generator) / 5)
    ddp, found = wrapped(model, wire, process_group=group, policy="static", **options), []
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for step in range(3):
        ddp.zero_grad()
        loss_of(ddp(batch(rank, step))).backward()
        found += [one.grad.clone() for one in ddp.parameters()]
        optimizer.step()
    return found + [one.detach() for one in ddp.parameters()]


@pytest.mark.parametrize("wire", [*ENCODED, NAME.format("SMALL8"), NAME.format("LARGE4")])
@on_ranks(3)
def test_fp64_gradients_travel_encoded(rank: int, world: int, wire: str) -> None:
    """fp64 gradients travel encoded as well, in buckets of their own."""
    train(rank, mlp().double(), wire, lambda r, s: batch(r, s).double(), steps=4, bucket_cap_mb=SMALL_CAP_MB)


@on_ranks(3)
def test_wires_change_at_one_step_of_all_ranks_also_of_those_without_inputs(rank: int, world: int) -> None:
    """What a weight travels on in each step, in which ranks run out of inputs one after the other."""
    config = fusedreduce.ReduceConfig(wire={"*.bias": "native", "*": "int8"}, wire_after=3, least_sqnr_db=90.0)
    ddp = fusedreduce.DistributedDataParallel(mlp(), reduce=config, bucket_cap_mb=SMALL_CAP_MB)
    optimizer, found = torch.optim.SGD(ddp.parameters(), lr=0.05), list[str]()
    with pytest.MonkeyPatch.context() as patch, ddp.join():
        MEASURE_EVERY.replace(patch, 2)
        for step in range(7 + 4 * rank):
            optimizer.zero_grad()
            loss = loss_of(ddp(batch(rank, step)))
            found.append(ddp.wire_report()["0.weight"].wire)
            loss.backward()
            optimizer.step()
    expected = ["bf16"] * 3 + ["int8"] * 6 + ["bf16"] * 6
    assert found == expected[: 7 + 4 * rank]


@contextlib.contextmanager
def nodes_of(per_node: int, rank: int) -> Iterator[None]:
    """The environment of a rank as torchrun sets it on nodes with so many ranks each."""
    told = {"RANK": rank, "LOCAL_RANK": rank % per_node, "LOCAL_WORLD_SIZE": per_node}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in told.items():
            patch.setenv(name, str(value))
        yield


@on_ranks(4)
def test_two_levels_where_the_launcher_says_so(rank: int, world: int) -> None:
    """`long_run` on nodes of two ranks; steps without synchronisation, resets and the end of the wrapper."""
    wire = "int8"
    with nodes_of(2, rank):
        groups = len(c10d._world.pg_map)
        long_run(rank, world, wire, 40)
        ddp = wrapped(mlp(), wire, process_group=patient_group(), policy="static")
        right_steps(rank, ddp, wire=wire, steps=3)
        kinds = {type(one) for one in inside(ddp).buckets}
        assert TwoLevelBucket in kinds and EncodedBucket not in kinds
        own = len(c10d._world.pg_map)
        ddp.zero_grad()
        local = copy.deepcopy(ddp.module)
        with ddp.no_sync():
            loss_of(ddp(batch(rank, 50))).backward()
        for model in (ddp, local):
            loss_of(model(batch(rank, 51))).backward()
        loss_of(local(batch(rank, 50))).backward()
        assert_averaged(ddp.module, local, wire)
        for _ in range(2):
            with in_time():
                ddp.reset()
            right_steps(rank, ddp, wire=wire, steps=2)
            assert len(c10d._world.pg_map) == own
        reducer_of(ddp).close()
        own -= len(c10d._world.pg_map)
        del ddp
        gc.collect()
        another = wrapped(mlp(), wire)  # makes groups, and closes those of the wrapper that was dropped
        right_steps(rank, another, wire=wire, steps=1)
        assert len(c10d._world.pg_map) <= groups + 1 + 3
        dist.barrier()
        assert own == 3, "close() destroys the groups of phases"


@on_ranks(4)
def test_two_levels_and_ranks_without_inputs(rank: int, world: int) -> None:
    """Ranks with fewer inputs take part with zeros."""
    with nodes_of(2, rank):
        assert join(rank, world, "int8", (3, 5, 4, 7), True) < 2e-3


@on_ranks(4)
def test_ranks_without_inputs_take_part_where_a_backend_is_tried_in_the_middle(rank: int, world: int) -> None:
    """Ranks run out of inputs before and after a change of wires, by which the backend first has to add up fp32."""
    config = fusedreduce.ReduceConfig(wire={"*.bias": "bf16", "*": "int8"}, wire_after=3, policy="static")
    found, group = list[str](), patient_group()
    known = backend_support.SUMMABLE.pop(("gloo", "cpu"))
    try:
        with nodes_of(2, rank):
            ddp = fusedreduce.DistributedDataParallel(mlp(), reduce=config, process_group=group)
            with ddp.join():
                for step in range(1 + 2 * rank):
                    ddp.zero_grad()
                    loss = loss_of(ddp(batch(rank, step)))
                    found.append(ddp.wire_report()["0.weight"].wire)
                    loss.backward()
            ddp.zero_grad()
            local = copy.deepcopy(ddp.module)
            for model in (ddp, local):
                loss_of(model(batch(rank, 9))).backward()
            for kind, wire in (("weight", "int8"), ("bias", "bf16")):
                pairs = zip(ddp.module.named_parameters(), local.parameters(), strict=True)
                held = [(one.grad, other.grad) for (name, one), other in pairs if name.endswith(kind)]
                assert_is_mean([one for one, _ in held], [one for _, one in held], wire)
    finally:
        backend_support.SUMMABLE["gloo", "cpu"] = known
    assert found == (["bf16"] * 3 + ["int8"] * 4)[: 1 + 2 * rank]


@on_ranks(4)
def test_a_trace_of_one_rank_leaves_the_order_of_phases(rank: int, world: int, tmp_path: Path) -> None:
    """A trace on one rank only does not disturb the order of phases."""
    with nodes_of(2, rank):
        ddp = wrapped(mlp(), "int8")
        right_steps(rank, ddp, wire="int8", steps=3)
        with ddp.record_trace(tmp_path) if rank == 1 else contextlib.nullcontext():
            right_steps(rank, ddp, wire="int8", steps=4)
        dist.barrier()
    assert len(list(tmp_path.iterdir())) == 1


def two_level_bits(rank: int, world: int, wire: str, group: Any = None) -> list[torch.Tensor]:
    """`bits` on nodes of two ranks."""
    with nodes_of(2, rank) if group is None else contextlib.nullcontext():
        return bits(rank, world, wire, group, ranks_per_node=None if group is None else 2)


@pytest.mark.parametrize(
    ("world", "wire", "steps"),
    [pytest.param(2, "int8", 110, marks=pytest.mark.full), (3, "int4", 110), (3, "bf16+fp32", 40)],
)
@on_ranks()
def test_ranks_have_the_same_bytes_and_the_mean_in_a_hundred_steps(
    rank: int, world: int, wire: str, steps: int
) -> None:
    long_run(rank, world, wire, steps)


@pytest.mark.slow
def test_survivors_raise_in_time_and_name_phase_and_bucket(tmp_path: Path) -> None:
    """The last of three ranks ends when it has taken part in phase one of every bucket, and in no phase two."""
    named = r"all-gather of bucket \d+ \(\d\.weight"
    survivors_raise(tmp_path, 3, "int8", "copy", "between", "3", "wrapper", named=named)


def test_two_levels_of_threads_have_the_bits_of_gloo_ranks(path: str, four: RankPool) -> None:
    with LocalGroup(4, timeout_s=PATIENT_S) as group:
        local = group.run(lambda one: two_level_bits(one.rank, 4, "int4", one.process_group()))
    for ours, theirs in zip(local, four.run(two_level_bits, "int4"), strict=True):
        assert all(map(torch.equal, ours, theirs)) and len(ours) == len(theirs) == 8


@pytest.mark.parametrize("phase", [pytest.param(1, marks=pytest.mark.full), 2])
def test_survivors_of_two_levels_raise_in_time_and_name_phase_and_bucket(tmp_path: Path, phase: int) -> None:
    """The last of 2 x 2 ranks ends when so many phases of every bucket have been issued."""
    where = "(reduce-scatter within the node|all-gather across nodes|all-gather within the node)"
    named = rf"the {where} of bucket \d+ \(\d\.weight"
    survivors_raise(tmp_path, 4, "int8", "copy", f"phase {phase}", "3", "wrapper", named=named)


@pytest.mark.parametrize(
    "wire", [one if one in ("int4", "bf16+fp32") else pytest.param(one, marks=pytest.mark.full) for one in EXCHANGED]
)
def test_ranks_that_are_threads_have_the_bits_of_gloo_ranks(three: RankPool, wire: str) -> None:
    with LocalGroup(3, timeout_s=PATIENT_S) as group:
        local = group.run(lambda one: bits(one.rank, 3, wire, one.process_group()))
    for ours, theirs in zip(local, three.run(bits, wire), strict=True):
        assert all(map(torch.equal, ours, theirs)) and len(ours) == len(theirs) == 8
