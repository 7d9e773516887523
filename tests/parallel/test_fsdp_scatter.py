"""`set_fsdp_comms(reduce_scatter=...)`: FSDP2's reduce-scatter on our wires, on 2 to 4 Gloo ranks."""

from __future__ import annotations

import pytest
from parallel import fsdp_scatter_cases
from support.own_wires import NAME
from support.ranks import RankPool
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_common

# What one rounding of every rank's contribution may be off by.
BOUNDS = {"bf16": 0.003, "fp16": 0.0004, "int8": 0.010, "int4": 0.155}
WIRES = (*BOUNDS, NAME.format("TOP16"), NAME.format("SMALL8"))


@pytest.mark.parametrize("wire", BOUNDS)
def test_errors_of_two_ranks(two: RankPool, wire: str) -> None:
    two.run(fsdp_scatter_cases.within, wire, "fp32", BOUNDS[wire])


@pytest.mark.parametrize("wire", BOUNDS)
@pytest.mark.parametrize("policy", ["fp32", "bf16 parameters", "offloaded"])
def test_errors_of_four_ranks(four: RankPool, wire: str, policy: str) -> None:
    four.run(fsdp_scatter_cases.within, wire, policy, BOUNDS[wire])


@pytest.mark.parametrize("world", [2, 3, 4])
def test_gradients_of_bf16_lose_nothing_on_a_bf16_wire(
    two: RankPool, three: RankPool, four: RankPool, world: int
) -> None:
    {2: two, 3: three, 4: four}[world].run(fsdp_scatter_cases.within, "bf16", "bf16 parameters", 1e-7)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(
    ("policy", "op"), [("fp32", "mean"), ("fp32", "sum"), ("fp32", "factor"), ("bf16 reduce", "mean")]
)
def test_every_parameter_has_blocks_of_its_own(three: RankPool, wire: str, policy: str, op: str) -> None:
    three.run(fsdp_scatter_cases.to_the_bit, wire, policy, op)


@pytest.mark.parametrize(
    ("shape", "factor", "how"),
    [
        *(((4,), factor, "") for factor in (None, 1.0, 3.0, 4.0)),
        *(((4,), factor, "sum") for factor in (None, 3.0)),
        ((3,), None, ""),
        *(((2, 2), factor, "") for factor in (None, 1.0, 2.0, 4.0)),
        ((1, 4), None, "sum"),
    ],
)
def test_it_divides_as_torch_does(
    three: RankPool, four: RankPool, shape: tuple[int, ...], factor: float | None, how: str
) -> None:
    (three if shape == (3,) else four).run(fsdp_scatter_cases.divides_as_torch, shape, factor, how)


@pytest.mark.parametrize("wire", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("world", [2, 4])
def test_launches_collectives_and_bytes_of_a_call(
    two: RankPool, four: RankPool, wire: str, world: int, has_bias: bool
) -> None:
    {2: two, 4: four}[world].run(fsdp_scatter_cases.bytes_of, wire, has_bias)


@pytest.mark.parametrize(
    ("wire", "all_reduce", "bound"), [("bf16", None, 0.003), ("bf16", "int8", 0.012), ("int8", "int8", 0.014)]
)
def test_beside_replicas(four: RankPool, wire: str, all_reduce: str | None, bound: float) -> None:
    four.run(fsdp_scatter_cases.beside_replicas, wire, all_reduce, bound)


@pytest.mark.parametrize("wire", ["bf16", "int8"])
@pytest.mark.parametrize("what", ["all", "ignored", "frozen", "tied", "unused", "columns"])
def test_odd_parameters(four: RankPool, wire: str, what: str) -> None:
    four.run(fsdp_scatter_cases.odd_parameters, wire, what)


def test_parts_of_a_model_and_torchs_own_again(four: RankPool) -> None:
    four.run(fsdp_scatter_cases.several_modules, "bf16")


@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_complex_parameters(four: RankPool, wire: str) -> None:
    four.run(fsdp_scatter_cases.complex_parameters, wire)


@pytest.mark.skipif(not hasattr(_fsdp_common, "ShardPlacementResult"), reason="needs torch 2.12")
@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_a_module_of_several_meshes(four: RankPool, wire: str) -> None:
    four.run(fsdp_scatter_cases.several_meshes, wire)


@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_a_call_that_is_broken_off(two: RankPool, wire: str) -> None:
    two.run(fsdp_scatter_cases.broken_off, wire)


@pytest.mark.parametrize("what", ["frozen in the first", "frozen in the second", "swapped"])
def test_ranks_of_several_meshes_that_disagree(four: RankPool, what: str) -> None:
    four.run(fsdp_scatter_cases.experts_that_disagree, what)


@pytest.mark.parametrize("wire", ["bf16", "fp16", "int8"])
def test_a_factor_that_changes_between_steps(three: RankPool, wire: str) -> None:
    three.run(fsdp_scatter_cases.changing_factor, wire)


@pytest.mark.parametrize("wire", ["bf16", "int8", "int4"])
def test_what_is_not_finite_reaches_the_shard(four: RankPool, wire: str) -> None:
    four.run(fsdp_scatter_cases.non_finite, wire)


@pytest.mark.parametrize("what", ["compiled", "offloaded", "zero2", "accumulated"])
def test_what_else_fsdp_does(two: RankPool, what: str) -> None:
    two.run(fsdp_scatter_cases.as_before, "int8", what)


@pytest.mark.skipif(not hasattr(FSDPModule, "set_separate_reduce_scatter_group"), reason="needs torch 2.13")
def test_a_group_of_its_own_for_the_reduce_scatter(two: RankPool) -> None:
    two.run(fsdp_scatter_cases.as_before, "int8", "another group")


@pytest.mark.parametrize("what", ["wire", "model", "frozen", "nodes"])
def test_ranks_that_disagree(four: RankPool, what: str) -> None:
    four.run(fsdp_scatter_cases.disagreeing, what)


@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_a_rank_that_is_gone(two: RankPool, wire: str) -> None:
    two.run(fsdp_scatter_cases.a_rank_is_gone, wire)


def test_what_is_refused(two: RankPool) -> None:
    two.run(fsdp_scatter_cases.refused)
