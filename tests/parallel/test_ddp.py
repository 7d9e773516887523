"""fusedreduce.DistributedDataParallel, and what fused_hook does as well, on 2 and 3 Gloo ranks with their own inputs.

What is the hook's alone: test_hook.py.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
from parallel import ddp_cases, ddp_hook_cases, ddp_manual_cases, ddp_module_cases, ddp_surface_cases
from support.grids import grid
from support.ranks import RankPool
from support.wires import ENCODED

WIRES = ("native", "bf16", "fp16")
SURFACES = ("wrapper", "hook")


@grid(("world", "wire", "surface"), [*itertools.product((2, 3), WIRES, SURFACES)])
def test_parity_with_torch_over_a_hundred_steps(
    two: RankPool, three: RankPool, world: int, wire: str, surface: str
) -> None:
    case = ddp_cases.hook_parity if surface == "hook" else ddp_cases.parity_with_torch
    worst = {2: two, 3: three}[world].run(case, wire, 110)
    assert max(worst) <= ddp_cases.PARITY[world, wire]
    assert wire == "native" or min(worst) > 0, "a 16-bit wire that rounds nothing is no 16-bit wire"


def test_torchs_reducer_is_never_built_and_the_wrapper_is_torchs_class(two: RankPool) -> None:
    two.run(ddp_cases.no_cpp_reducer)


TRAINING = [
    ddp_cases.checkpoints,
    ddp_cases.static_graph,
    ddp_cases.no_sync,
    ddp_cases.unused,
    ddp_module_cases.zoo,
    ddp_module_cases.sparse,
]


@grid(
    ("case", "surface", "wire"),
    [*itertools.product(TRAINING, SURFACES, WIRES), *itertools.product(TRAINING, ["wrapper"], ["int4"])],
)
def test_training_gives_the_mean(two: RankPool, case: Any, surface: str, wire: str) -> None:
    two.run(functools.partial(case, surface=surface), wire)


@grid(("case", "surface", "wire"), [*itertools.product(TRAINING, SURFACES, ["int8", "bf16+fp32"])])
def test_training_gives_the_mean_at_three_ranks(three: RankPool, case: Any, surface: str, wire: str) -> None:
    three.run(functools.partial(case, surface=surface), wire)


@pytest.mark.parametrize("wire", ["native", "bf16", "int8"])
@pytest.mark.parametrize(
    "case",
    [
        ddp_cases.static_graph_begins_under_no_sync,
        ddp_cases.partial_backwards,
        ddp_module_cases.mixed_precision,
        ddp_module_cases.modules_together,
        ddp_module_cases.user_hooks,
        ddp_module_cases.taken_gradients,
        ddp_module_cases.turned_order,
        ddp_module_cases.around_forward,
        ddp_surface_cases.copies,
    ],
    ids=lambda case: case.__name__,
)
def test_what_ddp_does_works(two: RankPool, case: Any, wire: str) -> None:
    two.run(case, wire)


@pytest.mark.parametrize(
    "case",
    [
        ddp_cases.skipped_buckets,
        ddp_cases.views,
        ddp_module_cases.ignored,
        ddp_module_cases.delayed,
        ddp_module_cases.all_delayed,
        ddp_module_cases.buffers,
        ddp_surface_cases.no_init_sync,
        ddp_surface_cases.refused,
        ddp_hook_cases.hooks_refused,
        ddp_hook_cases.hook_that_ends_behind_backward,
        ddp_surface_cases.logged_error,
    ],
    ids=lambda case: case.__name__,
)
def test_what_has_nothing_to_do_with_the_wire_works(two: RankPool, case: Any) -> None:
    two.run(case)


@pytest.mark.parametrize("wire", ["native", "bf16", "int8", "bf16+fp32"])
def test_the_group_can_be_changed_and_changed_back(three: RankPool, wire: str) -> None:
    three.run(ddp_surface_cases.changed_group, wire)


@pytest.mark.parametrize("container", ddp_cases.CONTAINERS)
def test_unused_parameters_are_found_through_any_container(two: RankPool, container: str) -> None:
    two.run(ddp_cases.unused, "native", container)


@pytest.mark.parametrize("container", ddp_cases.CONTAINERS)
def test_a_static_graph_is_learned_through_any_container(two: RankPool, container: str) -> None:
    two.run(ddp_cases.static_graph_of_containers, container)


@pytest.mark.parametrize("kind", ["native", "bf16", "search", "static"])
def test_a_model_that_was_converted_and_back_is_an_error_on_every_rank(two: RankPool, kind: str) -> None:
    two.run(ddp_cases.converted_and_back, kind)


def test_no_rank_waits_for_one_whose_layer_has_lost_its_hooks(two: RankPool) -> None:
    two.run(ddp_cases.lost_where_unused_differs)


def test_a_model_may_be_wrapped_again_while_the_old_wrapper_lives(two: RankPool) -> None:
    two.run(ddp_cases.wrapped_again)


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
def test_an_output_without_tensors_is_an_error_on_every_rank(two: RankPool, option: str) -> None:
    two.run(ddp_cases.opaque_outputs, option)


def test_unused_parameters_whose_gradients_are_views(three: RankPool) -> None:
    three.run(ddp_cases.unused_views)


@pytest.mark.parametrize("as_view", [False, True])
def test_gradients_with_a_graph_are_averaged(two: RankPool, as_view: bool) -> None:
    two.run(ddp_cases.create_graph, as_view)


def test_gradients_of_gradients_are_each_ranks_own(two: RankPool) -> None:
    two.run(ddp_cases.gradients_of_gradients)


@pytest.mark.parametrize("wire", [*WIRES, *ENCODED])
def test_overlap_can_be_turned_off(two: RankPool, wire: str) -> None:
    for overlapped, at_the_end in two.run(ddp_cases.overlap, wire):
        assert overlapped >= 1 and at_the_end == 0


# (inputs per rank, a 16-bit wire's tolerance is its unit times a few steps of 0.05; an encoded one's, two half quanta)
@pytest.mark.parametrize("by_initial", [True, False])
@pytest.mark.parametrize(
    ("wire", "tolerance"),
    [
        ("native", 1e-6),
        ("bf16", 2e-3),
        ("fp16", 2e-4),
        ("fp16+fp32", 2e-4),
        ("int8", 2e-3),
        ("int4", 2e-3 * 127 / 7),
    ],
)
def test_join_with_uneven_inputs_and_both_divisors(
    three: RankPool, wire: str, tolerance: float, by_initial: bool
) -> None:
    assert max(three.run(ddp_cases.join, wire, (3, 9, 5), by_initial)) < tolerance


@pytest.mark.parametrize(("wire", "tolerance"), [("native", 1e-6), ("bf16", 2e-3), ("fp16", 2e-4), ("int8", 2e-3)])
def test_join_with_uneven_inputs_through_the_hook(two: RankPool, wire: str, tolerance: float) -> None:
    case = functools.partial(ddp_cases.join, surface="hook")
    assert max(two.run(case, wire, (3, 5), True)) < tolerance


@pytest.mark.parametrize(("wire", "tolerance"), [("int8", 2e-3), ("fp16+fp32", 2e-4)])
def test_join_through_the_hook_where_sums_take_two_phases(three: RankPool, wire: str, tolerance: float) -> None:
    case = functools.partial(ddp_cases.join, surface="hook")
    assert max(three.run(case, wire, (3, 7, 0), True)) < tolerance


JOINS: dict[str, tuple[tuple[int, int], str, dict[str, Any]]] = {
    "rank 0 stays": ((7, 2), "plain", {}),
    "before the first step": ((0, 6), "plain", {}),
    "before the first step, rank 0 stays": ((6, 0), "plain", {}),
    "after one step": ((1, 6), "plain", {}),
    "with unused parameters": ((3, 8), "branches", {"find_unused_parameters": True, "bucket_cap_mb": 0.001}),
    "with unused parameters, rank 0 stays": ((8, 3), "branches", {"find_unused_parameters": True}),
    "unused, before the first step": ((0, 3), "branches", {"find_unused_parameters": True}),
    "with a static graph": ((3, 8), "plain", {"static_graph": True}),
    "static, before the first step": ((0, 4), "plain", {"static_graph": True}),
    "with views": ((3, 8), "plain", {"gradient_as_bucket_view": True}),
}


@pytest.mark.parametrize("when", JOINS)
def test_ranks_may_leave_a_join_at_any_time(two: RankPool, when: str) -> None:
    batches, kind, options = JOINS[when]
    assert max(two.run(functools.partial(ddp_cases.join, **options), "native", batches, True, kind)) < 1e-6


def test_sparse_gradients_through_a_comm_hook(two: RankPool) -> None:
    two.run(ddp_module_cases.sparse, "native", True)


@pytest.mark.parametrize("as_view", [False, True])
@pytest.mark.parametrize("name", ddp_hook_cases.HOOKS)
def test_a_comm_hook_gives_what_it_gives_on_torchs_class(two: RankPool, name: str, as_view: bool) -> None:
    two.run(ddp_hook_cases.hook_parity, name, as_view)


@pytest.mark.parametrize("as_view", [False, True])
def test_what_a_comm_hook_sees(two: RankPool, as_view: bool) -> None:
    two.run(ddp_hook_cases.what_a_hook_sees, as_view)


@pytest.mark.parametrize("init_sync", [True, False])
@pytest.mark.parametrize("kind", ddp_surface_cases.DIFFERENCES)
def test_different_models_are_refused_by_every_rank_with_one_text(three: RankPool, kind: str, init_sync: bool) -> None:
    messages = three.run(ddp_surface_cases.disagreement, kind, init_sync)
    assert len(set(messages)) == 1
    assert ddp_surface_cases.DIFFERENCES[kind] in messages[0] and "rank 2" in messages[0]


@pytest.mark.parametrize("kind", ddp_surface_cases.PROBLEMS)
def test_one_ranks_problem_is_told_to_every_rank(two: RankPool, kind: str) -> None:
    messages = two.run(ddp_surface_cases.disagreement, kind, True)
    assert len(set(messages)) == 1
    assert ddp_surface_cases.PROBLEMS[kind] in messages[0] and "rank 1" in messages[0]


def test_every_stage_has_a_range_in_the_profiler(two: RankPool) -> None:
    for names in two.run(ddp_surface_cases.profiled):
        for stage in ("pack", "all_reduce", "unpack"):
            ranges = [name for name in names if name.startswith(f"fusedreduce::{stage} bucket ")]
            assert len(ranges) == 2 and any("0.weight" in name for name in ranges)
        assert "fusedreduce::search_unused_parameters" in names and "DistributedDataParallel.forward" in names


@pytest.mark.parametrize("kind", ["plain", "views", "unused", "static", "hook"])
def test_logging_data_has_torchs_keys_and_values(two: RankPool, kind: str) -> None:
    for ours, theirs in two.run(ddp_surface_cases.logging_data, kind):
        assert ours == theirs


# Last: what torch.compile leaves behind in the processes is nobody else's concern.
@pytest.mark.parametrize("wire", ["native", "bf16"])
@pytest.mark.parametrize("inside", [True, False])
def test_torch_compile_gives_right_gradients_and_no_more_graph_breaks(two: RankPool, inside: bool, wire: str) -> None:
    for ours, theirs in two.run(ddp_surface_cases.compiled, inside, wire):
        assert 1 <= ours <= theirs


def test_a_backward_of_compiled_autograd_is_refused_and_the_next_one_works(two: RankPool) -> None:
    for rank, texts in enumerate(two.run(ddp_surface_cases.compiled_autograd)):
        assert len(texts) == 4
        assert all(text.startswith(f"rank {rank}: compiled autograd runs this backward") for text in texts)


# Steps that the caller ends


@pytest.mark.parametrize("wire", [*WIRES, "int8"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": True},
        {"overlap": False, "policy": "static"},
    ],
    ids=lambda options: " ".join(options) or "plain",
)
def test_steps_that_the_caller_ends_have_the_same_bits(two: RankPool, wire: str, options: dict[str, Any]) -> None:
    two.run(functools.partial(ddp_manual_cases.manual, **options), wire)


@pytest.mark.parametrize(
    "case",
    [
        ddp_manual_cases.manual_after_or_within,
        ddp_manual_cases.manual_refused,
        ddp_manual_cases.manual_scaled,
        ddp_manual_cases.manual_copied,
        ddp_manual_cases.manual_join,
    ],
    ids=lambda case: case.__name__,
)
def test_the_end_of_a_step_is_the_callers(two: RankPool, case: Any) -> None:
    two.run(case)


@pytest.mark.skipif(not ddp_manual_cases.IN_TORCH, reason="torch has it from 2.15 on")
@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"gradient_as_bucket_view": True}], ids=str)
def test_the_end_of_a_step_is_refused_where_torch_refuses_it(two: RankPool, options: dict[str, Any]) -> None:
    two.run(functools.partial(ddp_manual_cases.as_torch, **options))


@pytest.mark.skipif(not ddp_manual_cases.IN_TORCH, reason="torch has it from 2.15 on")
@pytest.mark.parametrize("stats", [False, True])
@pytest.mark.parametrize("wire", WIRES)
def test_torchs_class_ends_the_step_of_our_hook(two: RankPool, wire: str, stats: bool) -> None:
    two.run(ddp_manual_cases.manual_hook, wire, stats)


@pytest.mark.skipif(not ddp_manual_cases.IN_TORCH, reason="torch has it from 2.15 on")
def test_wires_are_lazy_as_torchs_argument_says(two: RankPool) -> None:
    two.run(ddp_manual_cases.lazy)
