"""Tests that run on CPU and on a GPU alike: each finds, on CPU, a fault that is planted in what it looks at.

A test is of that kind if it has the argument `device` (conftest.py). What runs on a GPU alone is listed here.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import triton
from cli import test_demo, test_doctor, test_wire_costs
from gpu import (
    test_gpu,
    test_gpu_data_parallel,
    test_gpu_encoded,
    test_gpu_graphs,
    test_gpu_large,
    test_gpu_local,
    test_gpu_modes,
    test_gpu_observed,
    test_gpu_streams,
)
from parallel import test_sync_server
from support import raw_calls
from support.inside import take_torch_path
from support.ranks import group_of_one
from torch.autograd.graph import Node

from fusedreduce.buckets.streams import Streams
from fusedreduce.cli.variants import variants
from fusedreduce.comm.local import operations
from fusedreduce.comm.local.strategies import Ring
from fusedreduce.config import ReduceConfig
from fusedreduce.kernels import dispatch, launchers
from fusedreduce.reducer import modes, parameter_hooks
from fusedreduce.trace import wire_costs
from fusedreduce.trace.step_profile import StepProfile

MARK = "pytest.mark.gpu"

_GRAPHS = "needs CUDA graphs; test_captured.py has the refusals, under a stand-in that captures"
ONLY_ON_A_GPU: Mapping[str, str] = {
    "test_gpu.py::test_no_compilation_after_the_first_launch": (
        "the interpreter compiles nothing; test_launch_path.py counts compilations against a stand-in driver"
    ),
    "test_gpu.py::test_what_is_launched_was_compiled_ahead_of_time": (
        "the interpreter compiles nothing; test_machine_code.py compares launches with what is examined, on a stand-in"
    ),
    "test_gpu_data_parallel.py::test_threads_are_refused": "of CPUs they are not",
    "test_gpu_graphs.py::test_a_module_whose_forward_and_backward_are_graphs_can_be_wrapped": _GRAPHS,
    "test_gpu_graphs.py::test_a_step_of_the_wrapper_is_refused_and_both_capture_and_wrapper_go_on": _GRAPHS,
    "test_gpu_graphs.py::test_a_step_with_the_hook_is_refused_and_the_next_one_works": _GRAPHS,
    "test_gpu_graphs.py::test_the_stall_monitor_looks_during_a_capture_and_does_not_invalidate_it": (
        "needs CUDA graphs; test_comm.py asks what the monitor's thread calls before it looks"
    ),
    "test_gpu_streams.py::test_the_current_stream_of_a_gpu_is_torchs": (
        "compares two readings of CUDA's own; test_streams.py replaces one, with handles that are made up"
    ),
    "test_collective_metrics.py::test_on_a_gpu_the_devices_time": (
        "the clock is CUDA's events; beside it they are stood in for"
    ),
    "test_gpu_local.py::test_a_collective_is_behind_what_a_peer_has_queued_and_the_peer_behind_the_collective": (
        "is about order between streams; on CPU whatever is done is done at once"
    ),
    "test_gpu_local.py::test_nothing_is_waited_for_on_the_host": "on CPU nothing goes on beside the host",
    "test_gpu_local.py::test_the_kernel_is_compiled_before_the_first_step": "the interpreter compiles nothing",
    "test_gpu_local.py::test_futures_are_ordered_with_streams": "is about order between streams",
    "test_gpu_local.py::test_memory_comes_back_also_where_nobody_waits": (
        "counts bytes of the GPU's allocator; test_local_group.py counts what is left on CPU"
    ),
    "test_gpu_local.py::test_peers_on_several_devices_end_with_the_same_bytes": (
        "needs two GPUs; test_combine.py does on one CPU what is done between devices"
    ),
    "test_gpu_ranks.py::test_two_processes_on_one_gpu_train_alike_and_unpacking_is_no_waiting": (
        "a fault that is planted here is not in the ranks' processes; beside it two on CPU do the same"
    ),
    "test_gpu_ranks.py::test_cuda_tensors_over_gloo_are_refused": "of CPU tensors they are not",
    "test_gpu_order.py::test_a_future_of_several_collectives_is_behind_each_of_them": (
        "is about order between streams; test_order.py finds its fault in the stand-ins' trace"
    ),
    "test_gpu_order.py::test_the_trace_is_that_of_the_stand_ins": "compares a GPU's trace with that of CPU stand-ins",
    "test_gpu_modes.py::test_gradients_are_those_of_torchs_wrapper": "torch's bf16 hook needs NCCL",
    "test_gpu_modes.py::test_torchs_mixed_precision_gives_the_gradients_of_a_bf16_model": "needs CUDA's events",
    "test_gpu_modes.py::test_lazy_wires_leave_their_memory_to_the_next_forward": (
        "counts bytes of the GPU's allocator; test_order.py looks at the stand-ins' trace"
    ),
    "test_gpu_nccl.py::test_ranks_over_nccl": "beside it the same cases over Gloo",
    "test_gpu_nccl.py::test_a_group_whose_peer_has_not_come_can_be_left": (
        "is about NCCL's kernels; test_environment.py looks at what is called"
    ),
}


class Planted(NamedTuple):
    """A test, a fault with which it must fail on CPU, and the rest of its arguments."""

    test: Callable[..., None]
    plant: Callable[[pytest.MonkeyPatch], None]
    arguments: Mapping[str, Any] = {}


@functools.cache
def functions_by_file() -> dict[Path, list[ast.FunctionDef]]:
    """The test functions of every file but this one."""
    found = {}
    for path in Path(__file__).resolve().parents[1].rglob("test_*.py"):
        text = path.read_text()
        if path.name != Path(__file__).name and (MARK in text or "(device: " in text or "    device: " in text):
            functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
            found[path] = [node for node in functions if node.name.startswith("test_")]
    return found


def wrapped(
    owner: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[pytest.MonkeyPatch], None]:
    """Has a function of `owner` be what `around` makes of it. RAW: on every path, as reducers call it."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        if owner is RAW:
            raw_calls.wrap(patch, name, around)
        else:
            patch.setattr(owner, name, around(getattr(owner, name)))

    return plant


def given(owner: Any, name: str, change: Callable[..., tuple[Any, ...]]) -> Callable[[pytest.MonkeyPatch], None]:
    """Has a function of `owner` given what `change` makes of its positional arguments."""
    return wrapped(owner, name, lambda right: lambda *arguments, **options: right(*change(*arguments), **options))


def spoiled(owner: Any, name: str, spoil: Callable[..., object]) -> Callable[[pytest.MonkeyPatch], None]:
    """Has what a function of `owner` leaves spoiled; `spoil` takes its result and its positional arguments."""

    def around(right: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(*arguments: Any, **options: Any) -> Any:
            result = right(*arguments, **options)
            spoil(result, *arguments)
            return result

        return wrong

    return wrapped(owner, name, around)


def twice(owner: Any, name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Has a function of `owner` called once more."""

    def around(right: Callable[..., Any]) -> Callable[..., Any]:
        def both(*arguments: Any, **options: Any) -> Any:
            right(*arguments, **options)
            return right(*arguments, **options)

        return both

    return wrapped(owner, name, around)


def replaced(owner: Any, name: str, by: Any) -> Callable[[pytest.MonkeyPatch], None]:
    """Has an attribute of `owner` be something else."""
    return lambda patch: patch.setattr(owner, name, by)


def _flip_a_bit(tensor: torch.Tensor) -> None:
    if tensor.numel():
        tensor.view(torch.uint8)[-1] ^= 1


def _add_a_second(_: None, profile: StepProfile, bucket: int) -> None:
    profile.marks.buckets[bucket].end_ns += 10**9


def _one_rank_less(tensors: Sequence[torch.Tensor], *rest: Any) -> tuple[Any, ...]:
    tensors[-1].zero_()
    return (tensors, *rest)


def _another_node(parameter: torch.Tensor) -> Node:
    node = torch.ones(1, requires_grad=True).view(1).grad_fn
    assert node is not None
    return node


RAW = object()
NAMES = list(variants(("native", "bf16", "fp16")))
TWO_ROWS_MISSING = {"device": "cpu", "variants": [{"name": name, "path": "torch"} for name in NAMES[:-2]]}
A_BIT_OF_PACK = spoiled(launchers, "pack", lambda _, *arguments: _flip_a_bit(arguments[3]))
LAST_NOT_UNPACKED = given(RAW, "unpack", lambda gradients, *rest: ([*gradients[:-1], None], *rest))
HALF = given(RAW, "pack", lambda *arguments: (*arguments[:4], 2 * arguments[4], *arguments[5:]))
NORMS = spoiled(dispatch, "reduce_partials", lambda totals, *_: totals.parameter_sums.mul_(1.001))
ONE_RANK_LESS = given(dispatch, "combine", _one_rank_less)
ONE_RANK_MORE = replaced(ReduceConfig, "divisor", lambda self, size: size + 1.0)
A_STEP_LATER = replaced(modes, "staleness", lambda mode: 2)
BF16: Mapping[str, Any] = {"wire": "bf16"}

PLANTED = {
    "pack: one bit": Planted(
        test_gpu.test_random_buckets_equal_the_reference_bit_for_bit, A_BIT_OF_PACK, {"size": "small"}
    ),
    "scale: a gradient is left as it is": Planted(
        test_gpu.test_random_buckets_equal_the_reference_bit_for_bit,
        given(launchers, "scale", lambda gradients, *rest: ([*gradients[:-1], None], *rest)),
        {"size": "small"},
    ),
    "pack: one bit of a pattern": Planted(
        test_gpu_large.test_every_bit_pattern, A_BIT_OF_PACK, {"wire_dtype": torch.float16, "divisor": 3.0}
    ),
    "pack: one bit far out": Planted(test_gpu_large.test_slots_past_2_to_the_31, A_BIT_OF_PACK),
    "norms: a thousandth, of many": Planted(
        test_gpu_large.test_the_sum_of_more_than_2_to_the_31_squares_and_a_nan_out_there, NORMS
    ),
    "graphs: one bit": Planted(
        test_gpu_graphs.test_a_captured_pack_and_unpack_do_their_work_at_every_replay, A_BIT_OF_PACK
    ),
    "pack: two launches": Planted(
        test_gpu.test_random_buckets_equal_the_reference_bit_for_bit, twice(launchers, "pack"), {"size": "small"}
    ),
    "wrapper: a gradient is not written": Planted(
        test_gpu.test_the_wrapper_on_a_stream_of_its_own, LAST_NOT_UNPACKED, {**BF16, "views": False}
    ),
    "wrapper: two launches to unpack": Planted(
        test_gpu.test_the_wrapper_launches_two_kernels_per_bucket_and_never_waits_for_the_gpu,
        twice(RAW, "unpack"),
        BF16,
    ),
    "encode: one bit": Planted(
        test_gpu_encoded.test_random_encoded_buckets_equal_the_reference_bit_for_bit,
        spoiled(launchers, "encode", lambda _, *arguments: _flip_a_bit(arguments[3])),
        {"size": "small"},
    ),
    "encode: two launches": Planted(
        test_gpu_encoded.test_random_encoded_buckets_equal_the_reference_bit_for_bit,
        twice(launchers, "encode"),
        {"size": "small"},
    ),
    "encoded peers: a byte of a sum": Planted(
        test_gpu_encoded.test_peers_on_one_device_get_the_bits_of_the_definition,
        spoiled(RAW, "combine_encoded", lambda _, *arguments: _flip_a_bit(arguments[2][:1])),
        {"wire": "int8"},
    ),
    "encoded wrapper: a gradient is not written": Planted(
        test_gpu_encoded.test_the_wrapper_with_an_encoded_wire_never_waits_for_the_gpu,
        given(RAW, "decode", lambda gradients, *rest: ([*gradients[:-1], None], *rest)),
        {"wire": "int8"},
    ),
    "hook: half": Planted(test_gpu.test_the_hook_on_a_stream_of_its_own, HALF, BF16),
    "hook: norms": Planted(test_gpu.test_what_the_hook_finds_out_costs_no_wait, NORMS, BF16),
    "trace: a second too late": Planted(
        test_gpu.test_a_trace_has_the_devices_times, spoiled(StepProfile, "unpacked", _add_a_second)
    ),
    "combine: one bit": Planted(
        test_gpu_local.test_the_kernel_has_the_references_bits,
        spoiled(launchers, "combine", lambda _, tensors, outputs, *rest: _flip_a_bit(outputs[-1])),
        {"strategy": Ring()},
    ),
    "peers: one rank less": Planted(
        test_gpu_local.test_eight_peers_on_one_device_end_with_the_same_bytes, ONE_RANK_LESS, {"strategy": Ring()}
    ),
    "peers: nothing is scattered": Planted(
        test_gpu_local.test_eight_peers_get_their_parts_and_hand_them_on,
        lambda patch: patch.setitem(operations.OPERATIONS, "reduce_scatter", lambda *_: None),
        {"strategy": Ring()},
    ),
    "peers: nothing is broadcast": Planted(
        test_gpu_local.test_every_other_collective,
        lambda patch: patch.setitem(operations.OPERATIONS, "broadcast", lambda *_: None),
    ),
    "clipping: two second stages": Planted(
        test_gpu_observed.test_a_clipped_and_scaled_step_never_waits_for_the_gpu,
        twice(dispatch, "reduce_partials"),
        {**BF16, "views": False},
    ),
    "scaling: a gradient is zero": Planted(
        test_gpu_observed.test_scaled_training_equals_torchs,
        spoiled(RAW, "unpack", lambda _, gradients, *rest: gradients[-1].zero_()),
        {"wire": "native"},
    ),
    "attribution: the next element": Planted(
        test_gpu_observed.test_a_planted_nan_is_found,
        spoiled(dispatch, "reduce_source_partials", lambda totals, *_: totals.first[1].add_(1)),
        {"wire": "native"},
    ),
    "norms: a thousandth": Planted(test_gpu_observed.test_a_planted_nan_is_found, NORMS, {"wire": "native"}),
    "replicas: one less": Planted(
        test_gpu_data_parallel.test_gradients_are_those_of_the_whole_batch,
        ONE_RANK_LESS,
        {"which": 0, "reduce": ReduceConfig(check_finite="count")},
    ),
    "replicas: one less, in training": Planted(test_gpu_data_parallel.test_training_on_a_side_stream, ONE_RANK_LESS),
    "replicas: one less, of two parameters": Planted(
        test_gpu_data_parallel.test_replicas_use_different_parameters, ONE_RANK_LESS
    ),
    "replicas: a step later": Planted(test_gpu_data_parallel.test_bounded_staleness_and_amp, A_STEP_LATER),
    "options: one rank more": Planted(
        test_gpu_modes.test_gradients_are_those_without_a_wrapper, ONE_RANK_MORE, {"way": "unused"}
    ),
    "join: one rank more": Planted(test_gpu_modes.test_join_trains_as_without_it, ONE_RANK_MORE),
    "staleness: a step later": Planted(
        test_gpu_modes.test_bounded_staleness_gives_the_gradients_of_the_step_before, A_STEP_LATER, BF16
    ),
    "asynchronous: one rank more": Planted(
        test_gpu_modes.test_asynchronous_alone_has_nothing_to_correct, ONE_RANK_MORE
    ),
    "streams: pack does not wait": Planted(
        test_gpu_streams.test_pack_waits_for_the_late_one_of_two_streams,
        replaced(Streams, "wait_for_gradients", lambda *_: None),
        {**BF16, "views": False},
    ),
    "streams: nobody is late": Planted(
        test_gpu_streams.test_without_that_wait_some_steps_are_wrong, replaced(test_gpu_streams, "SLOW_CYCLES", 0)
    ),
    "streams: other nodes": Planted(
        test_gpu_streams.test_pack_waits_for_the_late_one_of_two_streams,
        replaced(parameter_hooks, "_accumulator", _another_node),
        {**BF16, "views": False},
    ),
    "streams: nodes that nobody holds": Planted(
        test_gpu_streams.test_without_that_wait_some_steps_are_wrong,
        spoiled(test_gpu_streams.Branches, "__init__", lambda _, model, *rest: model._nodes.clear()),
    ),
    "demo: two rows missing": Planted(
        test_demo.test_every_row_says_where_it_ran,
        replaced(test_demo.Finished, "json", TWO_ROWS_MISSING),
        {"finished_there": test_demo.Finished(0, "", "", Path())},
    ),
    "doctor: one wrong bit": Planted(
        test_doctor.test_the_kernels_leave_the_right_bits,
        wrapped(RAW, "unpack", lambda right: test_doctor.flip(right, 0)),
    ),
    "plan: nothing is unpacked": Planted(
        test_wire_costs.test_gradients_of_every_dtype_are_measured,
        replaced(wire_costs, "_stages", lambda *_, **__: {("bf16", "pack"): lambda: None}),
        {"dtype": torch.float16},
    ),
    "server: one rank less": Planted(test_sync_server.test_eight_devices_on_one, ONE_RANK_LESS),
}


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter's overflows and NaNs
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    planted = PLANTED[name]
    arguments = {"device": torch.device("cpu"), **planted.arguments}
    takes = inspect.signature(planted.test).parameters
    arguments |= {key: value for key, value in (("group", None), ("tmp_path", tmp_path)) if key in takes}
    if "monkeypatch" in takes:
        arguments["monkeypatch"] = monkeypatch
    if hasattr(sys.modules[planted.test.__module__], "torch_path"):
        take_torch_path(monkeypatch)
    planted.plant(monkeypatch)
    with group_of_one(), pytest.raises((AssertionError, pytest.fail.Exception)):
        planted.test(**arguments)


def test_every_test_of_both_devices_has_its_fault() -> None:
    found = {
        f"{path.name}::{test.name}"
        for path, tests in functions_by_file().items()
        for test in tests
        if "device" in [argument.arg for argument in test.args.args]
    }
    assert {f"{one.test.__module__.rpartition('.')[2]}.py::{one.test.__name__}" for one in PLANTED.values()} == found


def test_what_runs_on_a_gpu_alone_is_listed_with_the_reason() -> None:
    found = set()
    for path, tests in functions_by_file().items():
        alone = [test.name for test in tests if MARK in map(ast.unparse, test.decorator_list)]
        assert path.read_text().count(f"{MARK}\n") == len(alone), f"{path.name}: mark tests one by one"
        found |= {f"{path.name}::{name}" for name in alone}
    assert found == set(ONLY_ON_A_GPU)
