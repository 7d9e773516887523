"""The wrapper when a step goes wrong: errors in hooks and models, unfinished steps, ranks that differ or leave."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from parallel import ddp_fault_cases
from parallel.test_faults import survivors_raise
from support.ranks import RankPool
from support.timeouts import FAULT_S

# At the first step, in one bucket and with every parameter hooked; and when only the last of each bucket is.
BEFORE = (0, 6)


@pytest.fixture(scope="module")
def detailed() -> Iterator[RankPool]:
    """Two ranks with torch's checks of every collective."""
    pool = RankPool(2, {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    yield pool
    pool.close()


@pytest.mark.parametrize("as_view", [False, True])
@pytest.mark.parametrize(("before", "bucket"), [(0, 0), (6, 0), (6, 1)])
def test_a_hook_that_raises_everywhere_raises_its_own_error_and_reset_helps(
    two: RankPool, before: int, bucket: int, as_view: bool
) -> None:
    two.run(ddp_fault_cases.hook_fails_everywhere, before, bucket, as_view)


@pytest.mark.parametrize("before", BEFORE)
def test_a_hook_that_raises_on_one_rank_ruins_the_group_and_a_new_one_helps(two: RankPool, before: int) -> None:
    two.run(ddp_fault_cases.hook_fails_on_one_rank, before)


@pytest.mark.parametrize("wire", ["native", "bf16"])
@pytest.mark.parametrize("before", BEFORE)
def test_after_an_error_of_the_users_own_reset_helps(two: RankPool, before: int, wire: str) -> None:
    two.run(ddp_fault_cases.user_error_in_backward, before, wire)


@pytest.mark.parametrize("wire", ["native", "bf16"])
def test_a_failed_step_leaves_each_bucket_reduced_or_local(two: RankPool, wire: str) -> None:
    survivor, failed = two.run(ddp_fault_cases.user_error_on_one_rank, wire)
    assert survivor == (1, 1), "the bucket before the error is reduced, the one after it is not"
    assert failed == (0, 2)


@pytest.mark.parametrize("level", ["OFF", "DETAIL"])
@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("wire", ["native", "bf16"])
def test_an_unfinished_backward_names_every_missing_parameter(
    two: RankPool, detailed: RankPool, wire: str, before: int, level: str
) -> None:
    pool = two if level == "OFF" else detailed
    for rank, messages in enumerate(pool.run(ddp_fault_cases.unfinished, before, wire)):
        for message in messages:
            assert "finished reduction in the prior iteration" in message and f"rank {rank}: " in message
            assert all(name in message for name in ddp_fault_cases.MISSING)
            assert "layers.0" not in message
            assert "find_unused_parameters=True" in message and "reset()" in message


@pytest.mark.parametrize("before", BEFORE)
def test_a_parameter_marked_ready_twice_is_named_with_the_usual_causes(two: RankPool, before: int) -> None:
    for message in two.run(ddp_fault_cases.marked_twice, before):
        assert re.search(r"second\.(weight|bias)", message)
        assert "reentrant checkpoints" in message and "static_graph=True" in message


@pytest.mark.parametrize(("before", "both_miss"), [(0, True), (0, False), (6, False)])
def test_different_control_flow_is_an_error_on_every_rank(two: RankPool, before: int, both_miss: bool) -> None:
    messages = two.run(ddp_fault_cases.different_control_flow, before, both_miss)
    if both_miss:
        for rank, message in enumerate(messages):
            assert f"layers.{1 - rank}.weight" in message and "layers.2.bias" in message
    else:
        assert re.search(r"bucket \d+ \(layers", messages[0])
        assert "layers.1.weight, layers.1.bias, layers.2.weight, layers.2.bias" in messages[1]


@pytest.mark.parametrize("how", ddp_fault_cases.UNUSED)
def test_a_late_peer_is_named_where_parameters_are_unused_and_its_group_is_given_up(two: RankPool, how: str) -> None:
    messages = two.run(ddp_fault_cases.late_peer_with_unused, how)
    waited = rf" failed after [\d.]+ s\..* (Timed out waiting {1000 * FAULT_S:.0f}ms|Application timeout)"
    assert re.search(rf"^CollectiveError: rank 0: .*{waited}", messages[0]), messages
    assert re.search(r"bucket \d+ \(layers\.\d\.(weight|bias)", messages[0]), messages
    assert messages[1].startswith("CollectiveError: rank 1: "), messages


def test_a_group_that_one_wrapper_has_lost_is_lost_for_all(two: RankPool) -> None:
    two.run(ddp_fault_cases.lost_for_every_wrapper)


@pytest.mark.parametrize(
    ("world", "wire", "as_view", "fault", "step"),
    [(3, "bf16", "copy", "leave", 5)],
)
def test_survivors_raise_in_time_and_name_the_bucket(
    tmp_path: Path, world: int, wire: str, as_view: str, fault: str, step: int
) -> None:
    named = r"all-reduce of bucket \d+ \((\d\.(weight|bias)(, )?)+\)"
    survivors_raise(tmp_path, world, wire, as_view, fault, str(step), "wrapper", named=named)
