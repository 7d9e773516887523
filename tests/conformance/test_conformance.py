"""A subset of torch's own DDP tests, run against ours. `make conformance` runs all, torch's class beside ours."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

RUN = Path(__file__).resolve().with_name("run.py")
# The quickest of each kind, about half a second each.
SUBSET = {
    "test_DistributedDataParallelCPU": "the same step as one process on the whole batch",
    "test_DistributedDataParallelCPU_grad_is_view": "gradients that live in the buckets",
    "test_accumulate_gradients_no_sync_grad_is_view": "accumulation under no_sync",
    "test_ddp_control_flow_same_across_ranks": "parameters unused by all ranks",
    "test_ddp_shared_grad_acc_unused_params": "parameters unused, and one used twice",
    "test_ddp_multiple_nested_unused_params_error": "unused parameters named in an error",
    "test_ddp_new_tensor_in_fwd_static_graph": "static graph",
    "test_ddp_grad_div_uneven_inputs": "join, with both divisors",
    "test_ddp_hook_parity_allreduce": "comm hooks",
    "test_ddp_apply_optim_in_backward_ignored_params": "optimizers in backward, ignored parameters",
    "test_ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none": "mixed precision",
    "test_ddp_broadcast_buffer": "buffers",
    "test_ddp_python_error_logged": "errors that are logged",
    "test_ddp_remove_autograd_hooks": "a second wrapper after an error in backward",
}


@pytest.fixture(scope="module", params=["class", pytest.param("install", marks=pytest.mark.full)])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Each test's result, from one run of them all: with our class, and with torch's under install."""
    out = tmp_path_factory.mktemp("conformance")
    names = f"^({'|'.join(SUBSET)})$"
    # In a process of its own, as the runner maps CUDA to the CPU for the whole of one.
    command = [sys.executable, str(RUN), "--without-torch", "--tests", names, "--out", str(out)]
    command += ["--install"] if request.param == "install" else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (out / "results.json").exists(), done.stdout + done.stderr
    return {result["test"]: result for result in json.loads((out / "results.json").read_text())}


@pytest.mark.parametrize("test", SUBSET)
def test_ours_passes(results: dict[str, dict[str, Any]], test: str) -> None:
    result = results[test]
    assert result["status"] == "passed", result["detail"]
    assert result["events"].get("built"), "vacuous: ours was never built"
    assert not result["events"].get("cpp_reducer"), "ours built a C++ Reducer"
