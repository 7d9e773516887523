"""Plans that follow the clock, on 2 and 3 Gloo ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from parallel import ddp_schedule_cases
from support.ranks import RankPool


@pytest.mark.full
def test_two_hundred_steps_with_random_sleeps_and_a_new_plan_every_ten(three: RankPool) -> None:
    changes = three.run(ddp_schedule_cases.random_sleeps, 200)
    assert len(set(changes)) == 1, "the ranks' plans changed at the same steps"
    assert changes[0][0] >= 10, f"plans must have changed for this to prove anything, got {changes[0]}"


@pytest.mark.parametrize("policy", ["ready", "planned", "static"])
def test_mixed_dtypes_are_launched_as_they_become_ready(two: RankPool, policy: str) -> None:
    """torch 2.13 launches fp32, fp64, bf16 here: what was left under the cap comes in the order of a hash map."""
    assert two.run(ddp_schedule_cases.mixed_dtypes, policy) == [["bfloat16", "float64", "float32"]] * 2


@pytest.mark.parametrize("divide_by_initial", [True, False])
@pytest.mark.parametrize("leaves", [[0, 14, 30], [30, 5, 11], [12, 30, 13], [14, 15, 30], [10, 3, 24]])
def test_ranks_without_inputs_take_part_in_plans(three: RankPool, leaves: list[int], divide_by_initial: bool) -> None:
    assert len(set(three.run(ddp_schedule_cases.join_with_plans, leaves, divide_by_initial))) == 1


def test_saved_plans(two: RankPool) -> None:
    two.run(ddp_schedule_cases.saved_plans)


def test_deterministic_algorithms(two: RankPool) -> None:
    two.run(ddp_schedule_cases.deterministic)


@pytest.mark.parametrize("fails_at", [*range(9, 16), *range(18, 23)])
def test_a_step_that_fails_in_any_round_of_an_agreement_can_be_reset(two: RankPool, fails_at: int) -> None:
    two.run(ddp_schedule_cases.reset_between, fails_at)


@pytest.mark.parametrize("wire", ["native", "bf16"])
def test_a_trace_of_torchs_ddp_with_the_hook(two: RankPool, tmp_path: Path, wire: str) -> None:
    recorded = two.run(ddp_schedule_cases.hook_trace, str(tmp_path), wire)
    # The first step shows the buckets, the second may come in others: torch lays them out anew after its first.
    assert recorded in ([[3, 4, 5, 6, 2, 3, 4]] * 2, [[2, 3, 4, 5, 6, 2, 3, 4]] * 2)


def test_a_trace_of_the_wrapper(two: RankPool, tmp_path: Path) -> None:
    two.run(ddp_schedule_cases.wrapper_trace, str(tmp_path))


@pytest.mark.parametrize(
    ("wire", "options"),
    [
        ("native", {}),
        ("native", {"gradient_as_bucket_view": True}),
        ("native", {"find_unused_parameters": True}),
        ("native", {"static_graph": True}),
        ("bf16", {}),
    ],
)
def test_bucket_sizes_change_between_steps(two: RankPool, wire: str, options: dict[str, bool]) -> None:
    two.run(ddp_schedule_cases.bucket_sizes, wire, options)


def test_different_bucket_sizes_are_the_same_error_on_every_rank(two: RankPool) -> None:
    first, second = two.run(ddp_schedule_cases.different_bucket_sizes)
    assert first == second


def test_copies_have_the_bucket_size_in_use(two: RankPool) -> None:
    two.run(ddp_schedule_cases.copied_bucket_sizes)


def test_bucket_sizes_change_with_join(two: RankPool) -> None:
    two.run(ddp_schedule_cases.bucket_sizes_with_join)


@pytest.mark.parametrize("change", ["set_sync_mode", "set_bucket_size"])
def test_a_change_on_one_rank_only_ends_on_both(two: RankPool, change: str) -> None:
    first, second = two.run(ddp_schedule_cases.a_change_on_one_rank, change)
    assert "comparing model and settings across ranks failed" in first
    assert "the all-reduce of bucket 0 (2.bias, 2.weight, 1.bias, 1.weight) failed" in second


def test_a_bucket_size_after_a_rank_has_joined_ends_on_both(two: RankPool) -> None:
    _, second = two.run(ddp_schedule_cases.a_bucket_size_after_a_rank_has_joined)
    assert "comparing model and settings across ranks failed" in second
