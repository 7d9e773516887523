"""The wrapper where averages come later than their own step, and where they are sums; on 2 Gloo ranks."""

from __future__ import annotations

import pytest
from parallel import ddp_mode_cases
from support.ranks import RankPool


@pytest.mark.parametrize(
    ("k", "wire", "find_unused"), [(1, "native", False), (3, "bf16", False), (2, "fp16", True), (1, "native", True)]
)
def test_gradients_are_those_of_the_synchronous_mode_k_steps_later(
    two: RankPool, k: int, wire: str, find_unused: bool
) -> None:
    two.run(ddp_mode_cases.synchronous_mode_k_steps_later, k, wire, find_unused)


@pytest.mark.parametrize("k", [1, 3])
def test_training_goes_on_from_a_checkpoint_of_any_step(two: RankPool, k: int) -> None:
    two.run(ddp_mode_cases.resumed, k)


def test_what_excludes_stale_gradients_is_refused_on_every_rank(two: RankPool) -> None:
    two.run(ddp_mode_cases.refusals)


def test_modes_change_between_steps(two: RankPool) -> None:
    two.run(ddp_mode_cases.modes_change)


def test_a_copy_says_that_it_has_nothing_of_what_is_under_way(two: RankPool) -> None:
    two.run(ddp_mode_cases.copied_under_way)


def test_different_modes_are_an_error_on_every_rank(two: RankPool) -> None:
    two.run(ddp_mode_cases.different_modes)


@pytest.mark.parametrize("wire", ["native", "fp16"])
def test_a_sum_counts_no_ranks(two: RankPool, wire: str) -> None:
    two.run(ddp_mode_cases.sums, wire)
