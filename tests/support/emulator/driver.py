"""A Triton driver that runs what is launched in the emulator, on CPU tensors.

Kernels pass through the whole of Triton's launch path, as with `cuda/fake_driver.py`; here the launch is carried out.
That works only in a process without TRITON_INTERPRET, so tests run such code with `run_compiled`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.cache import get_cache_manager

from fusedreduce.kernels import kept_launch, variants
from fusedreduce.kernels.variants import Variant
from support.cuda.fake_driver import FakeDriver
from support.emulator.machine import load, run
from support.emulator.memory import Memory
from support.emulator.ptx import Kernel, PtxError

# Arguments that a kernel writes, by its name; of a kernel that is not here any.
WRITTEN: Mapping[str, frozenset[str]] = {
    name: frozenset(written.split())
    for name, written in {
        "_pack_kernel": "wire first_non_finite flushed",
        "_unpack_kernel": "partial_sums partial_peaks first_non_finite",
        "_walk_kernel": "partial_sums partial_peaks first_non_finite",
        "_combine_kernel": "",
        "_encode_kernel": "encoded first_non_finite flushed",
        "_combine_encoded_kernel": "output",
        "_decode_kernel": "partial_sums partial_peaks first_non_finite",
        "_parameter_totals_kernel": "parameter_sums parameter_peaks parameter_first",
        "_total_kernel": "total",
        "_parameter_sources_kernel": "parameter_first parameter_flushed",
        "_first_source_kernel": "first",
    }.items()
}


@dataclass
class EmulatingDriver(FakeDriver):
    """What Triton asks of its active driver.

    Args:
        races: look for them in global memory.
        packing: Triton's own launcher, which packs arguments (a `launcher.CLauncher`); None: they are packed here.
        edit: changes the PTX before it is read, for tests that take something out of it.
    """

    races: bool = True
    packing: Any = None
    edit: Callable[[str], str] | None = None
    kernels: dict[str, Kernel] = field(default_factory=dict)
    prefix: str = ""  # of the labels of what is launched now
    label: str = ""
    by_label: dict[str, Kernel] = field(default_factory=dict)
    launched: Counter[str] = field(default_factory=Counter)
    kept: Counter[str] = field(default_factory=Counter)
    packed_in_c: int = 0
    _reached: list[tuple[torch.Tensor, str, bool]] = field(default_factory=list)

    @property
    def utils(self) -> Any:
        """Itself, or what the launcher in C needs."""
        return self if self.packing is None else self.packing.utils()

    def reach(self, tensors: Iterable[torch.Tensor | None], name: str, *, write: bool) -> None:
        """Memory that the next kernels get at through tables."""
        self._reached += [(one, f"{name} {slot}", write) for slot, one in enumerate(tensors) if one is not None]

    def forget(self) -> None:
        """No memory is reached through tables any more."""
        self._reached.clear()

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        """A launcher as Triton's driver makes one for each compiled kernel."""
        if self.packing is not None:
            launcher: Callable[..., None] = self.packing.launcher(self, source, metadata)
            return launcher

        def launch(x: int, y: int, z: int, *rest: Any) -> None:
            assert (y, z) == (1, 1)
            values = []
            # Behind stream, function, metadata twice and two hooks come the arguments.
            for value, kind in zip(rest[6:], source.signature.values(), strict=True):
                if kind.startswith("*"):
                    values.append(0 if value is None else value.data_ptr())
                elif kind != "constexpr":
                    values.append(value)
            # The last two are Triton's scratch memories, which no kernel here has.
            self.carry_out(metadata, x, [*values, 0, 0], self.memory(metadata.name, source, rest[6:]))

        return launch

    def memory(self, name: str, source: Any, given: Sequence[Any]) -> Memory:
        """What a launch with these arguments may touch."""
        memory = Memory()
        for argument, value in zip(source.signature, given, strict=True):
            if isinstance(value, torch.Tensor):
                memory.allow(value, argument, write=argument in WRITTEN.get(name, {argument}))
        for tensor, label, write in self._reached:
            memory.allow(tensor, label, write=write)
        return memory

    def kernel(self, metadata: Any) -> Kernel:
        """A compiled kernel, as Triton's cache has it."""
        found = self.kernels.get(metadata.hash)
        if found is None:
            path = get_cache_manager(metadata.hash).get_file(f"{metadata.name}.ptx")
            assert path is not None, f"Triton's cache lacks the PTX of {metadata.name}"
            text = Path(path).read_text()
            found = self.kernels[metadata.hash] = load(text if self.edit is None else self.edit(text))
        return found

    def carry_out(self, metadata: Any, programs: int, values: Sequence[int | float], memory: Memory) -> None:
        """Runs one launch."""
        kernel = self.kernel(metadata)
        self.by_label[self.label] = kernel
        self.launched[self.label] += 1
        try:
            run(kernel, programs, values, memory, metadata.shared, races=self.races)
        except PtxError as error:
            raise PtxError(f"{self.label or metadata.name}: {error}") from error


def activate(arch: int, **options: Any) -> EmulatingDriver:
    """An emulating driver, active, with CPU tensors taken for those of an NVIDIA architecture."""
    driver = EmulatingDriver(GPUTarget("cuda", arch, 32), **options)
    variants.current_target = lambda device: ("cuda", arch)
    triton.runtime.driver.set_active(driver)
    launch, keep = Variant.launch, kept_launch.KeptLaunch.launch

    def labelled(self: Variant, programs: int, arguments: Any) -> None:
        driver.label = driver.prefix + self.label
        before = driver.launched.total()
        launch(self, programs, arguments)
        assert driver.launched.total() == before + 1, f"{self.label} was launched, and nothing has run"

    def counted(self: kept_launch.KeptLaunch, programs: int, arguments: Sequence[object]) -> bool:
        done = keep(self, programs, arguments)
        driver.kept[driver.label] += done
        return done

    Variant.launch = labelled  # type: ignore[method-assign]
    kept_launch.KeptLaunch.launch = counted  # type: ignore[method-assign]
    return driver
