"""fused_hook on torch's own DDP: 2 and 3 Gloo ranks, different inputs on each."""

from __future__ import annotations

import pytest
from parallel import hook_cases
from parallel.ddp_cases import PARITY, hook_parity
from support.ranks import RankPool

WIRES = ("native", "bf16", "fp16")


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(
    "case",
    [
        hook_cases.two_modules_one_state,
        hook_cases.non_finite_survives,
        hook_cases.user_collectives_in_backward,
        hook_cases.gradient_accumulation_dtype_of_autocast,
        hook_cases.create_graph,
        hook_cases.shared_and_separate_states,
    ],
    ids=lambda case: case.__name__,
)
def test_what_a_hook_meets_works(two: RankPool, case: object, wire: str) -> None:
    assert callable(case)
    two.run(case, wire)


def test_the_groups_own_size_divides(three: RankPool) -> None:
    three.run(hook_cases.subgroup_size_counts, "native")


def test_fp16_divides_before_it_casts_and_torch_does_not(two: RankPool) -> None:
    for ours, theirs in two.run(hook_cases.fp16_divides_before_it_casts):
        assert ours == [40000.0] * 3
        assert theirs == [float("inf")] * 3


@pytest.mark.parametrize("wire", WIRES)
def test_launches_collectives_and_bytes_are_as_promised(two: RankPool, wire: str) -> None:
    for seen in two.run(hook_cases.counted, wire):
        assert seen["buckets"] >= 2 and seen["collectives"] == seen["buckets"]
        functions = [function for function, _, _ in seen["launches"]]
        assert functions.count("pack") == seen["buckets"]
        assert functions.count("unpack") == (0 if wire == "native" else seen["buckets"])
        assert seen["wire_bytes"] == seen["numel"] * (4 if wire == "native" else 2)
        assert len(seen["issued"]) == seen["buckets"] and sum(seen["issued"]) == seen["wire_bytes"]
        assert seen["allocations"] == 0


@pytest.mark.parametrize("wire", ["native", "fp16"])
def test_one_kernel_launch_before_and_one_after_the_collective(wire: str) -> None:
    """The same steps through Triton's interpreter: each pack and each unpack is one kernel."""
    pool = RankPool(2, {"TRITON_INTERPRET": "1"})
    try:
        for seen in pool.run(hook_cases.counted, wire):
            assert {path for _, path, _ in seen["launches"]} == {"interpreter"}
            assert all(launches == 1 for _, _, launches in seen["launches"])
            assert len(seen["launches"]) == seen["buckets"] * (1 if wire == "native" else 2)
        assert max(pool.run(hook_parity, wire, 4)) <= PARITY[2, wire]
    finally:
        pool.close()


@pytest.mark.parametrize("as_view", [False, True])
def test_disagreeing_ranks_all_raise_and_lose_nothing(three: RankPool, as_view: bool) -> None:
    for kind, message, kept, usable in three.run(hook_cases.disagreement, as_view):
        assert kind == "AgreementError"
        assert 'wire: "fp16" on ranks 0, 1; "bf16" on rank 2' in message
        assert kept, "gradients must stay what they were on this rank"
        assert usable, "the next step must work"


def test_a_wire_the_backend_cannot_sum_is_refused_on_every_rank(two: RankPool) -> None:
    for kind, message, kept in two.run(hook_cases.unsupported_wire):
        assert kind == "UnsupportedWireError" and kept
        assert "'gloo' cannot all-reduce torch.bfloat16 on cpu" in message and "choose another wire" in message


def test_a_backend_in_no_table_is_asked(two: RankPool) -> None:
    for _, failed in two.run(hook_cases.unlisted_backend):
        assert any("torch.float8_e4m3fn" in one for one in failed), failed
        assert not any("bfloat16" in one or "float32:" in one for one in failed)


@pytest.mark.parametrize("door", ["hook", "wrapper"])
def test_a_backend_that_cannot_exchange_is_refused_before_anything_is_reduced(three: RankPool, door: str) -> None:
    for kind, message, kept in three.run(hook_cases.without_all_to_all, door):
        assert kind == "UnsupportedWireError" and kept, (kind, message)
        refusal = "'gloo' cannot exchange bytes (all-to-all) on cpu (RuntimeError: Backend mine does not support"
        assert refusal in message and "accumulation='wire'" in message, message


def test_pickling_and_copying(two: RankPool) -> None:
    two.run(hook_cases.pickled)


def test_models_of_different_dtype_are_refused_on_every_rank(two: RankPool) -> None:
    for message in two.run(hook_cases.models_of_different_dtype):
        assert "bucket 0: " in message and "torch.bfloat16" in message and "torch.float32" in message


def test_a_layer_of_another_dtype_in_a_later_bucket_is_refused_on_every_rank(two: RankPool) -> None:
    for message in two.run(hook_cases.layers_of_different_dtype):
        assert "bucket 1: " in message and "torch.bfloat16" in message and "torch.float16" in message


def test_a_buckets_name_follows_ddps_new_layout(two: RankPool) -> None:
    for labels in two.run(hook_cases.names_follow_the_buckets):
        assert labels[0] != labels[1] == labels[2]
        assert all("bucket 0 (6 parameters of shapes (" in label for label in labels)
