"""`set_fsdp_comms`: FSDP2 with replicas (HSDP) on our wires, on 2 to 4 Gloo ranks."""

from __future__ import annotations

import itertools

import pytest
from parallel import fsdp_cases
from parallel.fsdp_cases import ONE, TWO
from support.fsdp_models import POLICIES
from support.grids import grid
from support.own_wires import NAME
from support.ranks import RankPool

# What one rounding of every replica's contribution may be off by, and one more of their sum on three and more.
ONE_ROUNDING = {"bf16": 0.0035, "fp16": 0.0005, "int8": 0.010, "int4": 0.155}
TWO_ROUNDINGS = {"bf16": 0.0045, "bf16+fp32": 0.0045, "fp16": 0.0007, "fp16+fp32": 0.0007, "int8": 0.014, "int4": 0.18}


@pytest.mark.parametrize("how", [ONE, TWO])
@pytest.mark.parametrize(
    ("shape", "policy", "factor", "force_sum"),
    [
        *(((2, 2), policy, None, False) for policy in POLICIES),
        ((2, 2), "fp32", 2.0, False),  # the shard's size; Gloo has no other factor but by sums
        *(((2, 2), "fp32", factor, True) for factor in (None, 1.0, 2.0, 4.0)),
        *(((4, 1), "fp32", factor, False) for factor in (None, 1.0, 4.0)),
        ((1, 4), "fp32", None, False),
    ],
)
def test_a_native_wire_leaves_what_hsdp_leaves(
    four: RankPool, shape: tuple[int, int], how: str, policy: str, factor: float | None, force_sum: bool
) -> None:
    four.run(fsdp_cases.as_hsdp, shape, how, policy, factor, force_sum)


@pytest.mark.parametrize("how", [ONE, TWO])
@pytest.mark.parametrize("factor", [None, 1.0])
def test_a_mean_over_three_replicas_is_hsdps(three: RankPool, how: str, factor: float | None) -> None:
    three.run(fsdp_cases.as_hsdp, (3, 1), how, "fp32", factor, False)


@pytest.mark.parametrize("wire", ONE_ROUNDING)
@pytest.mark.parametrize("policy", POLICIES)
def test_errors_of_two_replicas(four: RankPool, wire: str, policy: str) -> None:
    bound = ONE_ROUNDING[wire] + {"bf16 reduce": 0.006, "fp16 reduce": 0.001, "bf16 parameters": 0.006}.get(policy, 0.0)
    four.run(fsdp_cases.within, (2, 2), wire, policy, bound)


@pytest.mark.parametrize("wire", TWO_ROUNDINGS)
def test_errors_of_four_replicas(four: RankPool, wire: str) -> None:
    four.run(fsdp_cases.within, (4, 1), wire, "fp32", TWO_ROUNDINGS[wire])


@pytest.mark.parametrize("factor", [None, 1.0])
@pytest.mark.parametrize(
    ("shape", "wire"),
    [
        *(((2, 2), wire) for wire in ("bf16", "fp16", "int8", "int4")),
        *(((4, 1), wire) for wire in ("bf16+fp32", "fp16+fp32", "int8", "int4")),
        ((2, 2), NAME.format("TOP16")),
        *((shape, NAME.format("SMALL8")) for shape in ((2, 2), (4, 1))),
    ],
)
def test_every_parameter_has_blocks_of_its_own(
    four: RankPool, shape: tuple[int, int], wire: str, factor: float | None
) -> None:
    four.run(fsdp_cases.to_the_bit, shape, wire, factor)


@grid(("policy", "how", "wire"), [*itertools.product(["fp32", "bf16 reduce"], [ONE, TWO], ["native", "int8"])])
def test_micro_batches_are_reduced_across_replicas_once(four: RankPool, wire: str, how: str, policy: str) -> None:
    four.run(fsdp_cases.deferred, (2, 2), wire, how, policy)


@pytest.mark.parametrize("wire", ["native", "bf16", "int8"])
@pytest.mark.parametrize(
    "what", ["unused", "frozen from the beginning", "frozen later", "frozen in turns", "ignored", "tied"]
)
def test_parameters_without_a_gradient(four: RankPool, wire: str, what: str) -> None:
    four.run(fsdp_cases.unused, (2, 2), wire, what)


@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_modules_that_share_a_group_and_a_wire_of_a_part(four: RankPool, wire: str) -> None:
    four.run(fsdp_cases.several_modules, wire)


@pytest.mark.parametrize(("wire", "policy"), [("native", "fp32"), ("int8", "fp32"), ("int8", "bf16 parameters")])
def test_placements_norms_and_checkpoints_are_torchs(four: RankPool, wire: str, policy: str) -> None:
    four.run(fsdp_cases.like_native, wire, policy)


@pytest.mark.parametrize("wire", ["native", "bf16", "int8", "int4"])
def test_what_is_not_finite_reaches_every_rank(four: RankPool, wire: str) -> None:
    four.run(fsdp_cases.non_finite, wire)


def test_modules_without_replicas_are_left_to_torch(four: RankPool) -> None:
    four.run(fsdp_cases.some_without_replicas, "int8")


def test_an_optimizer_in_backward_steps_as_often_as_with_hsdp(four: RankPool) -> None:
    four.run(fsdp_cases.optimizer_in_backward, "native")


@pytest.mark.parametrize("wire", ["native", "bf16"])
def test_a_hook_of_the_users_is_called_behind_the_replicas(four: RankPool, wire: str) -> None:
    four.run(fsdp_cases.beside_a_hook, wire)


@pytest.mark.parametrize("wire", ["native", "fp16", "bf16"])
def test_large_gradients_in_fp16(four: RankPool, wire: str) -> None:
    four.run(fsdp_cases.large_in_fp16, wire)


@pytest.mark.parametrize("wire", ["native", "int8"])
def test_an_iteration_that_is_reset_leaves_nothing(four: RankPool, wire: str) -> None:
    four.run(fsdp_cases.reset, wire)


def test_compiled_modules(four: RankPool) -> None:
    four.run(fsdp_cases.compiled, "int8")


@pytest.mark.parametrize("what", ["wire", "wire of a shard", "accumulation", "model", "frozen"])
def test_replicas_that_disagree(four: RankPool, what: str) -> None:
    four.run(fsdp_cases.disagreeing, what)


def test_what_is_sharded_afterwards_is_named(four: RankPool) -> None:
    four.run(fsdp_cases.before_the_root)


def test_ranks_that_hold_different_shards(four: RankPool) -> None:
    four.run(fsdp_cases.no_replicas)


def test_nothing_is_set_where_some_replicas_disagree(four: RankPool) -> None:
    four.run(fsdp_cases.one_mesh_is_refused)


@pytest.mark.parametrize("wire", ["native", "bf16", "int8"])
def test_a_replica_that_is_gone(two: RankPool, wire: str) -> None:
    two.run(fsdp_cases.a_replica_is_gone, wire)


def test_what_is_refused(four: RankPool) -> None:
    four.run(fsdp_cases.refused)
