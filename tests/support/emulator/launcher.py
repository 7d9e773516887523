"""Triton's own launcher in C, on a CUDA driver that is a stub (stub_libcuda.c) and hands arguments to the emulator."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import triton.backends.nvidia

if TYPE_CHECKING:
    from support.emulator.driver import EmulatingDriver


def refusal() -> str:
    """Why Triton cannot make its launcher in this process, or not on the stub; empty: it can."""
    if shutil.which("gcc") is None:
        return "no gcc: Triton's launcher in C cannot be compiled"
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return "no Python.h: Triton's launcher in C cannot be compiled"
    if "/libcuda.so" in Path("/proc/self/maps").read_text():
        return "a driver for GPUs is loaded: Triton's launcher would find that one"
    return ""


class CLauncher:
    """Packs arguments for an EmulatingDriver; one in a process."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fusedreduce-stub-")  # Triton 3.6 links each launcher to it
        folder = Path(self._folder.name)
        library = folder / "libcuda.so.1"
        include = Path(triton.backends.nvidia.__file__).parent / "include"
        stub = Path(__file__).with_name("stub_libcuda.c")
        options = ("-shared", "-fPIC", "-O1", "-w", f"-I{include}", "-Wl,-soname,libcuda.so.1")
        subprocess.run(["gcc", *options, stub, "-o", library], check=True)
        # By its soname what Triton compiles finds the library that is loaded here.
        os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
        loaded = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        signature = ctypes.CFUNCTYPE(None, *[ctypes.c_uint] * 3, ctypes.POINTER(ctypes.c_void_p))
        self._callback = signature(self._launched)  # held, since C calls it
        loaded.stub_on_launch(self._callback)
        from triton.backends.nvidia.driver import CudaUtils

        self._utils = CudaUtils()
        self._pending: Any = None
        self._error: BaseException | None = None

    def utils(self) -> Any:
        """What Triton's launchers take from the active driver."""
        return self._utils

    def launcher(self, driver: EmulatingDriver, source: Any, metadata: Any) -> Callable[..., None]:
        """Triton's launcher of one kernel."""
        from triton.backends.nvidia.driver import CudaLauncher

        real = CudaLauncher(source, metadata)

        def launch(x: int, y: int, z: int, *rest: Any) -> None:
            self._pending, self._error = (driver, metadata, driver.memory(metadata.name, source, rest[6:])), None
            real(x, y, z, *rest)
            if self._error is not None:
                raise self._error
            assert self._pending is None, "nothing has reached the driver"

        return launch

    def _launched(self, grid: int, block: int, shared: int, parameters: Any) -> None:
        try:
            (driver, metadata, memory), self._pending = self._pending, None
            kernel = driver.kernel(metadata)
            assert (block, shared) == (kernel.threads, metadata.shared)
            kinds = [ctypes.c_double if kind == "f64" else ctypes.c_uint64 for _, kind in kernel.parameters]
            values = [kind.from_address(parameters[nth]).value for nth, kind in enumerate(kinds)]
            driver.packed_in_c += 1
            driver.carry_out(metadata, grid, values, memory)
        except BaseException as error:  # ctypes would swallow it
            self._error = error
