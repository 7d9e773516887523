"""A launch through a kept kernel is the one that Triton would make, or Triton makes it.

As a script, without TRITON_INTERPRET, this file launches on the stand-in driver and prints what was the same. Another
Triton is tried with `PYTHONPATH=<where it was installed with pip --target> pytest tests/kernels/test_kept_launch.py`.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import triton
from support.cuda.fake_driver import FakeDriver, Launch, run_compiled
from support.cuda.launched import MIXED, Bucket, as_on_sm_90
from triton.runtime.jit import JITFunction

from fusedreduce.kernels import pack
from fusedreduce.kernels.kept_launch import KeptLaunch
from fusedreduce.kernels.triton_versions import KNOBS_OF_A_LAUNCH

pytestmark = pytest.mark.slow  # all of them, since whichever is first waits for what all look at


class Runs:
    """Counts calls of `JITFunction.run`, which a kept launch goes without."""

    def __init__(self) -> None:
        self.count = 0
        inner = JITFunction.run

        def run(*given: Any, **options: Any) -> Any:
            self.count += 1
            return inner(*given, **options)

        JITFunction.run = run

    def during(self, function: Callable[..., object], *arguments: Any) -> int:
        """Those of one call."""
        before = self.count
        function(*arguments)
        return self.count - before


def kept_launches(driver: FakeDriver, runs: Runs) -> list[dict[str, Any]]:
    """Everything a step launches, through kept kernels and as Triton launches it: how often that ran, what differed."""
    rows: list[dict[str, Any]] = []
    for dtypes, wire in ((MIXED, torch.float16), ((torch.float64,), torch.bfloat16)):
        for stats in (False, True):
            for number, divisor in enumerate((2.0, 7.0, 4.0)):
                driver.stream = number
                bucket = Bucket(3 + number, dtypes, wire, odd=number == 1)
                for name, (function, given) in bucket.calls(stats=stats, divisor=divisor).items():
                    function(*given)
                    driver.launches.clear()
                    kept = runs.during(function, *given)
                    ours = [_known(launch) for launch in driver.launches]
                    driver.launches.clear()
                    with patch.object(KeptLaunch, "launch", lambda *_: False):
                        plain = runs.during(function, *given)
                    theirs = [_known(launch) for launch in driver.launches]
                    rows.append(
                        {"name": name, "runs": [kept, plain], "launches": len(ours), "ours": ours, "theirs": theirs}
                    )
    return rows


def _known(launch: Launch) -> str:
    """A launch as text. The second stages make tensors for each call, so of them only what they are is compared."""
    fresh = not launch.kernel.startswith(("_pack", "_unpack", "_scale", "_measure"))
    arguments = tuple(
        (fresh or one.data_ptr(), one.shape, one.dtype) if isinstance(one, torch.Tensor) else one
        for one in launch.arguments
    )
    return repr(dataclasses.replace(launch, arguments=arguments))


def declined(driver: FakeDriver, runs: Runs) -> dict[str, list[int]]:
    """Calls of `JITFunction.run` in a launch while something is different, and in the second one after it."""
    function, given = Bucket(3, MIXED, torch.float16, odd=False).calls(stats=False)["pack"]
    runtime, compilation, kernel = triton.knobs.runtime, triton.knobs.compilation, pack._pack_kernel

    def watch(*_: Any, **__: Any) -> None:
        pass

    changes: dict[str, AbstractContextManager[object]] = {
        "nothing": nullcontext(),
        "an enter hook": patch.object(runtime, "launch_enter_hook", watch),
        "an exit hook": patch.object(runtime, "launch_exit_hook", watch),
        "a chained enter hook": patch.object(runtime.launch_enter_hook, "calls", [watch]),
        "a chained exit hook": patch.object(runtime.launch_exit_hook, "calls", [watch]),
        "a hook before runs": patch.object(kernel, "pre_run_hooks", [watch]),
        "debug": patch.object(runtime, "debug", True),
        "the kernel's debug": patch.object(kernel, "debug", True),
        **{name: patch.object(compilation, name, "other") for name in KNOBS_OF_A_LAUNCH},
        "another driver": patch.object(triton.runtime.driver, "_active", FakeDriver(driver.target)),
    }
    found = {}
    # What it would compile for is not compiled.
    with patch.object(runtime, "jit_cache_hook", lambda **_: True):
        for name, change in changes.items():
            function(*given)
            with change:
                during = runs.during(function, *given)
            function(*given)
            found[name] = [during, runs.during(function, *given)]
    return found


def main() -> None:
    driver = as_on_sm_90()
    runs = Runs()
    kept = kept_launches(driver, runs)
    json.dump({"kept": kept, "declined": declined(driver, runs)}, sys.stdout)


@pytest.fixture(scope="module")
def observed() -> Any:
    if not KNOBS_OF_A_LAUNCH:
        pytest.skip(f"launches are not kept with Triton {triton.__version__}")
    return run_compiled(__file__)


def test_a_kept_launch_is_the_launch_that_triton_would_make(observed: Any) -> None:
    names = {row["name"] for row in observed["kept"]}
    assert names == {"pack", "unpack", "measure", "scale", "reduce", "reduce_source"}
    for row in observed["kept"]:
        assert row["runs"] == [0, row["launches"]] and row["launches"], row["name"]
        assert row["ours"] == row["theirs"], row["name"]


def test_whatever_triton_asks_at_each_launch_is_asked(observed: Any) -> None:
    assert observed["declined"].pop("nothing") == [0, 0]
    assert len(observed["declined"]) == 8 + len(KNOBS_OF_A_LAUNCH)
    for name, runs in observed["declined"].items():
        assert runs == [1, 0], name


if __name__ == "__main__":
    main()
