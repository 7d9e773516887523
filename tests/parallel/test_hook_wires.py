"""fused_hook on wires whose contributions are exchanged and added up in fp32, on 2 and 3 Gloo ranks.

What it does on any wire: test_ddp.py, test_ddp_observed.py and test_local_ddp.py, whose tables have these too.
"""

from __future__ import annotations

import copy
import itertools
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel import hook_cases, hook_wire_cases
from parallel.test_faults import survivors_raise
from parallel.test_hook_alone import FakeBucket
from parallel.test_hook_observed import Shown
from support.grids import grid
from support.ranks import RankPool, fake_group, group_of_one
from support.wires import EXCHANGED, settings
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fusedreduce
from fusedreduce.comm.process_group import ProcessGroupCommunicator
from fusedreduce.kernels.encodings import ENCODINGS


@grid(("world", "cap_mb", "wire"), [*itertools.product((2, 3), (0.004, 25), EXCHANGED)])
def test_bits_are_the_definitions_and_the_wrappers_whatever_the_buckets(
    two: RankPool, three: RankPool, world: int, wire: str, cap_mb: float
) -> None:
    case = hook_wire_cases.one_bucket if cap_mb > 1 else hook_wire_cases.same_bits
    {2: two, 3: three}[world].run(case, wire)


def test_a_hundred_steps_with_collectives_of_the_users_own(three: RankPool) -> None:
    three.run(hook_wire_cases.long_run, "int8")


@pytest.mark.parametrize("wire", ["int8", "int4", "bf16+fp32"])
@pytest.mark.parametrize("world", [2, 3])
def test_collectives_bytes_and_allocations(two: RankPool, three: RankPool, world: int, wire: str) -> None:
    for seen in {2: two, 3: three}[world].run(hook_wire_cases.counted, wire):
        each = {"Bucket": 1, "AccumulatedBucket": 2, "EncodedBucket": min(world, 3) - 1, "PartlyEncodedBucket": world}
        assert seen["collectives"] == seen["issued"] == sum(each[kind] for kind in seen["buckets"])
        assert len(seen["buckets"]) >= 2 and seen["allocations"] == 0 and seen["path"] == "torch"
        assert "PartlyEncodedBucket" in seen["buckets"] or wire == "bf16+fp32"
        encoding = ENCODINGS.get(wire)
        block, block_bytes = (encoding.block_numel, encoding.block_bytes) if encoding else (1, 2)
        least = sum(-(-numel // block) * block_bytes for numel in seen["numels"] if numel >= max(block, 100))
        padding = len(seen["buckets"]) * world * block_bytes * 1024 / block
        assert least < seen["wire_bytes"] < least + 4 * 100 + padding


@pytest.mark.parametrize(
    "case",
    [
        hook_cases.two_modules_one_state,
        hook_cases.shared_and_separate_states,
        hook_cases.gradient_accumulation_dtype_of_autocast,
        hook_cases.create_graph,
        hook_wire_cases.last_bucket_comes_early,
        hook_wire_cases.scaled,
        hook_wire_cases.nested,
        hook_wire_cases.dropped_state,
        hook_wire_cases.shared_by_one_rank,
        hook_wire_cases.sparse_and_shared_by_one_rank,
    ],
    ids=lambda case: case.__name__,
)
def test_what_a_hook_meets_works_at_three_ranks(three: RankPool, case: Any) -> None:
    three.run(case, "int8")


def test_states_over_one_group_share_the_groups_of_phases(three: RankPool) -> None:
    assert three.run(hook_wire_cases.groups_of_states, "int8") == [1, 1, 1]


@pytest.mark.parametrize("world", [2, 3])
def test_traces_are_recorded(two: RankPool, three: RankPool, tmp_path: Path, world: int) -> None:
    {2: two, 3: three}[world].run(hook_wire_cases.traced, "int8", str(tmp_path))
    assert len(list(tmp_path.iterdir())) == world


# What goes wrong


@pytest.mark.parametrize("when", ["pack", "between"])
def test_a_rank_that_raises_alone_is_an_error_on_every_rank_in_time(three: RankPool, when: str) -> None:
    """Its peers have what it had issued before, and say in which phase of which bucket they have waited for it."""
    for rank, (kind, text) in enumerate(three.run(hook_wire_cases.raises_alone, "int8", when)):
        if rank == 1:
            assert (kind, text) == ("MemoryError", "only here")
        else:
            phase = {"pack": "all-(to-all|reduce)", "between": "all-(gather|reduce)"}[when]
            assert kind == "CollectiveError"
            assert re.search(rf"rank {rank}: .*the {phase} of bucket 1 \(\d parameters of shapes", text), text


def test_a_late_peer_is_an_error_on_every_rank_and_a_new_group_helps(three: RankPool) -> None:
    for rank, text in enumerate(three.run(hook_wire_cases.late_peer, "int8")):
        assert re.search(rf"rank {rank}: .*all-(to-all|gather|reduce) of bucket \d \(\d parameters", text), text


def test_survivors_raise_in_time_and_name_phase_and_bucket(tmp_path: Path) -> None:
    """The last of three ranks ends when it has taken part in phase one of every bucket, and in no phase two."""
    named = r"all-gather of bucket \d+ \(\d parameters of shapes"
    survivors_raise(tmp_path, 3, "int8", "view", "between", "3", named=named)


def test_ranks_of_different_wires_are_all_told_and_the_next_state_works(three: RankPool) -> None:
    for text in three.run(hook_wire_cases.disagreement, "int8", "int4"):
        assert 'wire: "int8" on ranks 0, 1; "int4" on rank 2' in text


# One rank


@pytest.mark.parametrize("wire", EXCHANGED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_a_mean_over_one_rank_is_within_a_rounding(wire: str, dtype: torch.dtype) -> None:
    with group_of_one():
        state = fusedreduce.FusedHookState(**settings(wire))
        weight = torch.zeros(40, 25, dtype=dtype)
        for _ in range(2):
            buffer = torch.linspace(-1.0, 1.0, 1000).to(dtype)
            before = buffer.clone()
            result = fusedreduce.fused_hook(state, FakeBucket(buffer, weight)).wait()  # type: ignore[arg-type]
            assert result.data_ptr() == buffer.data_ptr() and result.dtype is dtype
            bound = {"int8": 1 / 254, "int4": 1.01 / 14}.get(wire, 2**-9) + (1e-2 if dtype is torch.bfloat16 else 1e-3)
            assert float((result - before).abs().max()) <= bound


@pytest.mark.parametrize("wire", EXCHANGED)
def test_a_buffer_that_is_not_that_of_its_parameters_is_refused(wire: str) -> None:
    with group_of_one():
        state, buffer = fusedreduce.FusedHookState(**settings(wire)), torch.ones(1000)
        with pytest.raises(ValueError, match=r"has 1000 elements, but a wire that is exchanged needs those of its par"):
            fusedreduce.fused_hook(state, FakeBucket(buffer, torch.ones(30, 30)))  # type: ignore[arg-type]
        assert buffer.eq(1.0).all()
        assert fusedreduce.fused_hook(state, FakeBucket(buffer, torch.ones(40, 25))).wait().numel() == 1000  # type: ignore[arg-type]


class OfAGroupThatIsGone:
    """An exchange that its peers have not taken part in."""

    def notify(self, done: Callable[[], None]) -> None:
        """Nobody is told."""

    def ready(self) -> bool:
        return False

    def future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return torch.futures.Future()

    def wait(self) -> None:
        raise RuntimeError("the peers of the old group are gone")


@pytest.mark.parametrize("wire", EXCHANGED)
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_new_group_is_not_told_of_exchanges_that_the_old_one_left_open(
    monkeypatch: pytest.MonkeyPatch, wire: str, ranks: int
) -> None:
    """A backward that raised midway on every rank; then they, or the one that is left, go on with the same state."""
    monkeypatch.setattr(ProcessGroupCommunicator, "apart", lambda self, *_: ProcessGroupCommunicator(self.group))
    state, weight = fusedreduce.FusedHookState(**settings(wire)), torch.ones(40, 25)

    def show(*, last: bool) -> torch.futures.Future[torch.Tensor]:
        bucket: Any = Shown(0, [weight], last=last)
        return fusedreduce.fused_hook(state, bucket)

    with fake_group(3), monkeypatch.context() as patch:
        show(last=True).wait()
        patch.setattr(ProcessGroupCommunicator, "all_to_all", lambda *_: OfAGroupThatIsGone())
        show(last=False)
    with fake_group(ranks):
        for _ in range(3):
            assert show(last=True).wait().isfinite().all()


@pytest.mark.parametrize("wire", EXCHANGED)
def test_states_are_copied_and_pickled_with_their_wire(wire: str) -> None:
    state = fusedreduce.FusedHookState(**settings(wire))
    for other in (pickle.loads(pickle.dumps(state)), copy.copy(state), copy.deepcopy(state)):
        assert other.config == state.config and other.config.accumulation == settings(wire)["accumulation"]


def test_an_accumulation_without_a_wire_of_16_bits_is_refused() -> None:
    for wire in ("native", "int8"):
        with pytest.raises(ValueError, match=f"accumulation='fp32' and wire='{wire}' exclude each other"):
            fusedreduce.FusedHookState(wire=wire, accumulation="fp32")


@pytest.mark.parametrize("wire", EXCHANGED)
def test_our_own_reducers_refuse_it_before_anything_is_changed(wire: str) -> None:
    bf16 = fusedreduce.ReduceConfig(wire="bf16")
    name, _, accumulation = wire.partition("+")
    option = f"accumulation='{accumulation}'" if accumulation else f"wire='{name}'"
    told = f"{option} and fused_hook on a reducer of fusedreduce exclude each other: later phases"
    with group_of_one():
        state = fusedreduce.FusedHookState(**settings(wire))
        reducer = fusedreduce.Reducer([nn.Parameter(torch.ones(3))], fusedreduce.ProcessGroupCommunicator())
        with pytest.raises(ValueError, match=told):
            reducer.register_comm_hook(state, fusedreduce.fused_hook)
        reducer.close()
        fusedreduce.install(bf16)
        try:
            for ddp in (fusedreduce.DistributedDataParallel(nn.Linear(3, 2)), TorchDDP(nn.Linear(3, 2))):
                before = fusedreduce.reducer_of(ddp).config
                with pytest.raises(ValueError, match=told):
                    ddp.register_comm_hook(state, fusedreduce.fused_hook)
                assert fusedreduce.reducer_of(ddp).config is before
                ddp.register_comm_hook(fusedreduce.FusedHookState(wire="bf16"), fusedreduce.fused_hook)
                ddp(torch.ones(1, 3)).sum().backward()
                assert ddp.module.weight.grad.eq(1.0).all()
            assert before == bf16
        finally:
            fusedreduce.uninstall()


def test_wires_by_parameter_are_the_wrappers() -> None:
    for wire in ({"*": "int8"}, lambda name, parameter: "int8"):
        with pytest.raises(ValueError, match="fused_hook has one wire for all parameters. Use DistributedDataParallel"):
            fusedreduce.FusedHookState(wire=wire)  # type: ignore[arg-type]
