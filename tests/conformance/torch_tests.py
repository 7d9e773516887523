"""torch's own DDP tests, found in the installed torch and made to run on CPU with Gloo.

Nearly all of them are marked as needing GPUs, yet what they check does not depend on one. Importing this file changes
torch for this process and those forked from it: marks are lifted, every CUDA device is the CPU, streams and events do
nothing. BACKEND and WORLD_SIZE must be in the environment by then: torch's file reads them when it is imported.
"""

from __future__ import annotations

import inspect
import multiprocessing
import os
import re
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.testing._internal import common_distributed, common_utils

WORLD = int(os.environ["WORLD_SIZE"])

# Replaced before torch's file imports them. (IS_LINUX marks tests left out on torch's own CI only.)
vars(common_distributed).update(
    skip_if_lt_x_gpu=lambda *_arguments, **_options: lambda test: test,
    skip_if_no_gpu=lambda test: test,
    init_multigpu_helper=lambda world, _backend: {rank: [rank] for rank in range(world)},
)
common_utils.IS_LINUX = False

from torch.testing._internal.distributed import distributed_test  # noqa: E402

# A test uses DDP if its source says so; its tier is the deepest of these that the source touches, or else "public".
_USES_DDP = re.compile(r"DistributedDataParallel|\bDDP\(")
_TIERS = {
    "internals": re.compile(
        r"\.reducer\b|\bReducer\(|\._rebuild_buckets|_compute_bucket_assignment|_verify_param_shape_across_processes|"
        r"_register_builtin_comm_hook|_check_reducer_finalized"
    ),
    "logging": re.compile(r"_get_ddp_logging_data|_set_ddp_runtime_logging|verify_ddp_error_logged|\.logger\b"),
    "semi": re.compile(
        r"_MixedPrecision|_apply_optimizer_in_backward|_ddp_params_and_buffers_to_ignore|parameters_to_ignore|"
        r"\._(set_params_and_buffers_to_ignore|register_buffer_comm_hook|register_fused_optim|remove_autograd_hooks|"
        r"get_data_parallel_params|update_process_group|set_static_graph|set_ddp_sink_clone|build_debug_param|"
        r"sync_module_states)"
    ),
}


class DDPTests(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """torch's tests, their ranks forked from this process and so with everything that was changed in it."""

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(multiprocessing.get_context("fork").Process)

    def _check_return_codes(self, fn: Callable[..., Any], elapsed_time: float) -> None:
        """torch looks at the first rank's exit code; here a crash of any rank fails the test."""
        super()._check_return_codes(fn, elapsed_time)
        assert [process.exitcode for process in self.processes] == [0] * WORLD


def find_tests() -> dict[str, str]:
    """Every test that uses DDP -> its tier."""
    found = {}
    for name in sorted(name for name in dir(DDPTests) if name.startswith("test_")):
        source = _source(name, set())
        if _USES_DDP.search(source):
            found[name] = next((tier for tier, touches in _TIERS.items() if touches.search(source)), "public")
    return found


def _source(name: str, seen: set[str]) -> str:
    """The source of a test and of all helpers of the suite that it calls."""
    seen.add(name)
    method = inspect.unwrap(getattr(DDPTests, name, None))  # type: ignore[arg-type]
    if not inspect.isfunction(method) or method.__module__ != distributed_test.__name__:
        return ""
    source = inspect.getsource(method)
    return source + "".join(
        _source(helper, seen) for helper in re.findall(r"\bself\.(\w+)", source) if helper not in seen
    )


class _CudaIsCpu(TorchFunctionMode):
    """Every operator that is asked for a CUDA device works on the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to:
            args = (args[0], *map(_on_cpu, args[1:]))
        if func is torch.conv2d:  # one test convolves a megapixel, for minutes; a corner of it serves as well
            args = (args[0][..., :32, :32], *args[1:])
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _on_cpu(kwargs["device"])}
        return func(*args, **kwargs)


def _on_cpu(value: Any) -> Any:
    """The CPU in place of what names a CUDA device; anything else as it is."""
    is_index = isinstance(value, int) and not isinstance(value, bool)
    return "cpu" if is_index or str(value).startswith("cuda") and isinstance(value, str | torch.device) else value


class _Inert:
    """Stands for a stream, an event, or a guard that makes one current."""

    def __init__(self, *_arguments: object, **_options: object) -> None: ...

    def __enter__(self) -> _Inert:
        return self

    def __exit__(self, *_error: object) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_arguments, **_options: None


def _inert(name: str) -> Any:
    """A class or function of its own for each name: Dynamo looks torch's up by identity."""
    return type(name, (_Inert,), {}) if name[0].isupper() else lambda *_arguments, **_options: _Inert()


vars(torch).update({name: _inert(name) for name in ("Stream", "Event")})
vars(torch.accelerator).update(current_stream=_inert("current_stream"))
_NAMES = ("Stream", "Event", "stream", "current_stream", "set_device", "synchronize")
vars(torch.cuda).update({name: _inert(name) for name in _NAMES}, current_device=lambda: 0, device_count=lambda: WORLD)
# Not an operator, so out of the mode's reach.
_module_to = torch.nn.Module.to
torch.nn.Module.to = lambda self, *args, **kwargs: _module_to(  # type: ignore[method-assign]
    self, *map(_on_cpu, args), **kwargs
)
# Two cores and several ranks: torch's ten seconds can be too few.
distributed_test.Barrier.sync.__func__.__defaults__ = (None, 60)  # type: ignore[attr-defined]
_CudaIsCpu().__enter__()
