"""A Triton driver without a GPU: kernels compile for a real architecture, launches are only noted.

CPU tensors so pass through the whole of Triton's launch path: binding, specialisation, compilation, argument order.
That works only in a process without TRITON_INTERPRET, so tests run such code with `run_compiled`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

CHECKOUT = str(Path(__file__).resolve().parents[3])


def run_compiled(script: str | Path, *arguments: str, timeout_s: float = 300) -> Any:
    """Runs a script in a process of its own, without the interpreter, and returns the JSON that it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # The package need not be installed.
    search = [CHECKOUT, f"{CHECKOUT}/tests"]
    environment["PYTHONPATH"] = os.pathsep.join([*search, *filter(None, [environment.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, str(script), *arguments], env=environment, capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, f"{script} ended with status {done.returncode}:\n{done.stderr[-4000:]}"
    return json.loads(done.stdout)


@dataclass(frozen=True)
class Launch:
    """One launch as the driver would get it; `arguments` has every parameter of the kernel, constexprs too.

    `compiled` is the hash by which Triton's cache knows the compilation, `shown` what launch hooks are told.
    """

    kernel: str
    compiled: str
    grid: tuple[int, int, int]
    stream: int
    metadata: Any
    shown: Any
    arguments: tuple[Any, ...]

    def addresses(self) -> list[int]:
        """Of the tensors among the arguments, in order."""
        return [argument.data_ptr() for argument in self.arguments if isinstance(argument, torch.Tensor)]


@dataclass
class FakeDriver:
    """What Triton asks of its active driver on the way from `kernel[grid](...)` to the launch, and no more."""

    target: GPUTarget
    launches: list[Launch] = field(default_factory=list)
    stream: int = 0

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return self.stream

    @property
    def utils(self) -> FakeDriver:
        return self

    def get_device_properties(self, device: int) -> Mapping[str, int]:
        return {"max_shared_mem": 64 * 1024}

    def load_binary(self, name: str, binary: bytes, shared_bytes: int, device: int) -> tuple[str, str, int, int, int]:
        """Module, function, registers, spills, most threads of a program."""
        assert binary, f"{name} was compiled to nothing"
        return name, name, 0, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        def launch(
            x: int,
            y: int,
            z: int,
            stream: int,
            function: str,
            packed: Any,
            shown: Any,
            enter: Any,
            leave: Any,
            *given: Any,
        ) -> None:
            # As Triton's own does: an empty chain of hooks shows nobody anything.
            shown = shown if any(getattr(hook, "calls", hook) for hook in (enter, leave)) else None
            self.launches.append(Launch(function, metadata.hash, (x, y, z), stream, packed, shown, given))

        return launch


def activate(target: GPUTarget) -> FakeDriver:
    """Makes a new fake driver the active one."""
    driver = FakeDriver(target)
    triton.runtime.driver.set_active(driver)
    return driver


@dataclass
class Compilations:
    """Kernels compiled by launches since this was made, by name, in order."""

    names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        triton.knobs.runtime.jit_post_compile_hook = self._compiled

    def _compiled(self, *, fn: Any, **about: Any) -> None:
        self.names.append(fn.name)


def at_odd_address(tensor: torch.Tensor) -> torch.Tensor:
    """A copy one element beyond where memory was allocated: aligned to the itemsize and to no more."""
    copy = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape).copy_(tensor)
    assert copy.data_ptr() % 16, "torch allocates at multiples of 16 bytes at least"
    return copy
