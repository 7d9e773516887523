"""The wrapper on wires whose contributions are exchanged and added up in fp32, on 2 and 3 Gloo ranks.

What it does on any wire: test_ddp.py, whose tables have these too.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from parallel import ddp_fault_cases, ddp_wire_cases
from parallel.test_faults import survivors_raise
from support.ranks import RankPool
from support.timeouts import PATIENT_S
from support.wires import ENCODED, EXCHANGED

from fusedreduce import LocalGroup


@pytest.mark.parametrize(
    ("world", "wire"), [pytest.param(2, "int8", marks=pytest.mark.full), (3, "int4"), (3, "bf16+fp32")]
)
def test_ranks_have_the_same_bytes_and_the_mean_in_a_hundred_steps(
    two: RankPool, three: RankPool, world: int, wire: str
) -> None:
    {2: two, 3: three}[world].run(ddp_wire_cases.long_run, wire)


@pytest.mark.parametrize(("world", "wire"), [(2, "int8"), (3, "int4")])
def test_what_was_sent_and_what_is_owed_come_to_the_means(
    two: RankPool, three: RankPool, world: int, wire: str
) -> None:
    {2: two, 3: three}[world].run(ddp_wire_cases.feedback, wire)


@pytest.mark.parametrize("wire", ["int8", "bf16+fp32"])
def test_collectives_of_the_users_own_in_between(three: RankPool, wire: str) -> None:
    three.run(ddp_wire_cases.own_collectives, wire)


def test_only_second_phases_are_on_the_private_group(two: RankPool, three: RankPool) -> None:
    for user, private, exchanged in two.run(ddp_wire_cases.gathers, "int8"):
        assert user == exchanged >= 2 and private == 0, "two ranks gather each encoded bucket"
    for wire in ("int8", "bf16+fp32"):
        for user, private, exchanged in three.run(ddp_wire_cases.gathers, wire):
            assert user == 0 and private == exchanged >= 2


def test_wires_change_at_one_step_of_all_ranks_also_of_those_without_inputs(three: RankPool) -> None:
    expected = ["bf16"] * 3 + ["int8"] * 6 + ["bf16"] * 6
    for rank, found in enumerate(three.run(ddp_wire_cases.changing_wires)):
        assert found == expected[: 7 + 4 * rank], rank


@pytest.mark.parametrize("wire", ["int8", "bf16+fp32"])
def test_after_an_error_of_the_users_own_reset_helps(three: RankPool, wire: str) -> None:
    assert three.run(ddp_wire_cases.reset_and_on, wire) == [1, 1, 1], "close() destroys the group of second phases"


@pytest.mark.parametrize("before", [0, 6])
def test_reset_helps_two_ranks_too(two: RankPool, before: int) -> None:
    two.run(ddp_fault_cases.user_error_in_backward, before, "int8")


def test_a_late_peer_is_an_error_on_every_rank_and_a_new_group_helps(three: RankPool) -> None:
    for rank, message in enumerate(three.run(ddp_wire_cases.late_peer, "int8")):
        assert re.search(rf"rank {rank}: .*all-(to-all|gather|reduce) of bucket \d \(\d\.(weight|bias)", message), (
            message
        )


def test_survivors_raise_in_time_and_name_phase_and_bucket(tmp_path: Path) -> None:
    """The last of three ranks ends when it has taken part in phase one of every bucket, and in no phase two."""
    named = r"all-gather of bucket \d+ \(\d\.weight"
    survivors_raise(tmp_path, 3, "int8", "copy", "between", "3", "wrapper", named=named)


def test_two_levels_where_the_launcher_says_so(four: RankPool) -> None:
    assert four.run(ddp_wire_cases.two_levels, "int8") == [3, 3, 3, 3], "close() destroys the groups of phases"


def test_two_levels_and_ranks_without_inputs(four: RankPool) -> None:
    four.run(ddp_wire_cases.two_levels_join, "int8")


def test_ranks_without_inputs_take_part_where_a_backend_is_tried_in_the_middle(four: RankPool) -> None:
    found = four.run(ddp_wire_cases.joined_ranks_of_an_unlisted_backend)
    assert found == [(["bf16"] * 3 + ["int8"] * 4)[: 1 + 2 * rank] for rank in range(4)]


def test_a_trace_of_one_rank_leaves_the_order_of_phases(four: RankPool, tmp_path: Path) -> None:
    four.run(ddp_wire_cases.two_levels_traced, "int8", str(tmp_path))


def test_two_levels_of_threads_have_the_bits_of_gloo_ranks(four: RankPool) -> None:
    with LocalGroup(4, timeout_s=PATIENT_S) as group:
        local = group.run(lambda one: ddp_wire_cases.two_level_bits(one.rank, 4, "int4", one.process_group()))
    for ours, theirs in zip(local, four.run(ddp_wire_cases.two_level_bits, "int4"), strict=True):
        assert all(map(torch.equal, ours, theirs)) and len(ours) == len(theirs) == 14


@pytest.mark.parametrize("phase", [pytest.param(1, marks=pytest.mark.full), 2])
def test_survivors_of_two_levels_raise_in_time_and_name_phase_and_bucket(tmp_path: Path, phase: int) -> None:
    """The last of 2 x 2 ranks ends when so many phases of every bucket have been issued."""
    where = "(reduce-scatter within the node|all-gather across nodes|all-gather within the node)"
    named = rf"the {where} of bucket \d+ \(\d\.weight"
    survivors_raise(tmp_path, 4, "int8", "copy", f"phase {phase}", "3", "wrapper", named=named)


@pytest.mark.parametrize(("first", "other"), [("int8", "int4"), ("native", "int8"), ("bf16", "bf16+fp32")])
def test_ranks_of_different_wires_are_all_told(three: RankPool, first: str, other: str) -> None:
    messages = three.run(ddp_wire_cases.disagreement, first, other)
    assert len(set(messages)) == 1 and "rank 2" in messages[0]
    assert ("accumulation" if "+" in other else "wire") in messages[0]


def test_hooks_views_and_modes_are_refused(two: RankPool, three: RankPool) -> None:
    two.run(ddp_wire_cases.refused, "int8")
    three.run(ddp_wire_cases.refused, "fp16+fp32")


def test_traces_are_recorded(two: RankPool, three: RankPool, tmp_path: Path) -> None:
    for world, pool in ((2, two), (3, three)):
        folder = tmp_path / str(world)
        folder.mkdir()
        pool.run(ddp_wire_cases.traced, "int8", str(folder))
        assert len(list(folder.iterdir())) == world


@pytest.mark.parametrize(
    "wire", [one if one in ("int4", "bf16+fp32") else pytest.param(one, marks=pytest.mark.full) for one in EXCHANGED]
)
def test_ranks_that_are_threads_have_the_bits_of_gloo_ranks(three: RankPool, wire: str) -> None:
    with LocalGroup(3, timeout_s=PATIENT_S) as group:
        local = group.run(lambda one: ddp_wire_cases.bits(one.rank, 3, wire, one.process_group()))
    for ours, theirs in zip(local, three.run(ddp_wire_cases.bits, wire), strict=True):
        assert all(map(torch.equal, ours, theirs)) and len(ours) == len(theirs) == 14


@pytest.mark.parametrize("wire", ENCODED)
def test_fp64_gradients_travel_encoded(three: RankPool, wire: str) -> None:
    three.run(ddp_wire_cases.wide, wire)


def test_a_copy_has_buckets_of_its_own(three: RankPool) -> None:
    three.run(ddp_wire_cases.own_copy, "int8")
