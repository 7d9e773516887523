"""Variants: the compilations of all kernels, which `dispatch` launches and `aot` compiles ahead of time.

A Variant is a kernel with everything that determines its code: argument types, constexprs, warps, options. No pointer
is specialised on its alignment, no kernel takes an integer argument, and a float's type does not depend on its value:
addresses, sizes and divisors of a step can never cause a compilation. One Variant is one compilation per device.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import triton

from .encodings import Encoding
from .kept_launch import KeptLaunch
from .table import Partials, SourcePartials
from .triton_versions import mend_interpreter, settle_key

# Arguments of kernels that walk gradients, with Triton's names of their types.
TABLES: Mapping[str, str] = {"addresses": "*i64", "rows": "*i64"}
PARTIALS: Mapping[str, str] = {"partial_sums": "*fp64", "partial_peaks": "*fp64", "first_non_finite": "*i64"}
SOURCE_PARTIALS: Mapping[str, str] = {"first_non_finite": "*i64", "flushed": "*i64"}
POINTERS = [*TABLES, "wire", "scalar", *PARTIALS, "flushed"]
RESIDUALS: Mapping[str, str] = {"first_copy": "*i64", "second_copy": "*i64", "live": "*i64", "weights": "*fp32"}
# Branches of kernels that read and write residuals.
KEPT: tuple[tuple[str | None, str | None], ...] = (("fp32", None), (None, "fp32"))
ENCODED_POINTERS = [*POINTERS, "places", "encoded", "geometry", "output", *RESIDUALS, "draw"]
STATS_POINTERS = [
    "spans",
    "sums",
    "peaks",
    "first_non_finite",
    "flushed",
    "parameter_sums",
    "parameter_peaks",
    "parameter_first",
    "parameter_flushed",
    "total",
    "first",
]
# Dtypes of gradients in one table, by whether they are fp64, which is not mixed with others.
GRADIENTS: Mapping[bool, tuple[str, ...]] = {False: ("fp32", "bf16", "fp16"), True: ("fp64",)}

TRITON_NAMES: Mapping[torch.dtype, str] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float64: "fp64",
    torch.int64: "i64",
    torch.int8: "i8",
    torch.uint8: "u8",
}


@dataclass(frozen=True)
class Tuning:
    """Launch shape of one architecture.

    Args:
        tile_bytes: size of a tile on its wider side.
        num_warps: warps of a program.
        hint: cache lines that pack and unpack mark to be evicted first: none (""), those that they read ("read"), or
            also those that they write ("both").
    """

    tile_bytes: int
    num_warps: int
    hint: Literal["", "read", "both"] = ""


# Keyed by Triton's (backend, architecture); found offline, never while training. Each thread has four 16-byte loads in
# flight on the wider side.
TUNING: Mapping[tuple[str, int | str], Tuning] = {
    ("cuda", 80): Tuning(tile_bytes=8192, num_warps=4),
    ("cuda", 90): Tuning(tile_bytes=8192, num_warps=4),
    ("cuda", 100): Tuning(tile_bytes=8192, num_warps=4),
    ("hip", "gfx942"): Tuning(tile_bytes=16384, num_warps=4),
    ("hip", "gfx1100"): Tuning(tile_bytes=8192, num_warps=4),  # wavefronts of 32, not of 64
}
# The interpreter costs per operation, not per element: one large tile is cheapest.
INTERPRETER_TUNING = Tuning(tile_bytes=16384, num_warps=4)

# What the kernels cannot be compiled for, as tried with Triton 3.7 and 3.6. Everything else compiles, for compute
# capabilities 6.0 to 12.1 (below 8.0 bf16 is rounded in integer arithmetic: to nearest even and keeping NaN, like the
# hardware from there on; the assembler of 3.6 does not know 11.0) and AMD's gfx908, gfx90a, gfx942, gfx950 and RDNA.
UNSUPPORTED = frozenset(
    ("hip", name) for name in ("gfx803", "gfx900", "gfx902", "gfx904", "gfx906", "gfx909", "gfx90c", "gfx940", "gfx941")
)
_NO_CODE = "Triton generates no code for this architecture (of AMD's data-centre line it knows gfx908 and later)"

# Of AMD's, the data-centre line; see `warp_size`.
WARP_SIZE: Mapping[str, int] = {"cuda": 32, "hip": 64, "interpreter": 32}


@functools.cache  # that is settled when kernels are imported
def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter, on CPU tensors (TRITON_INTERPRET=1)."""
    return bool(triton.knobs.runtime.interpret)


if interpreted():
    mend_interpreter()


def current_target(device: torch.device) -> tuple[str, int | str]:
    """Triton's target for tensors on a device.

    Args:
        device: of the tensors.

    Returns:
        (backend, architecture): ("cuda", 90), ("hip", "gfx942"); ("interpreter", "") in the interpreter.

    Raises:
        ValueError: CPU tensors without the interpreter, which no kernel can read.
    """
    if device.type == "cuda":
        return _target_of(device)
    if interpreted():
        return "interpreter", ""
    raise ValueError(
        f"Triton kernels cannot read tensors on {device}: pass CUDA tensors, call fusedreduce.kernels.dispatch (which "
        "takes the torch path there), or set TRITON_INTERPRET=1 before the first import of triton"
    )


@functools.cache
def _target_of(device: torch.device) -> tuple[str, int | str]:
    if torch.version.hip is not None:
        return "hip", torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return "cuda", major * 10 + minor


@functools.cache
def variant_on(device: torch.device, make: Callable[..., Variant], *choice: object) -> Variant:
    """Finds a variant for a device's architecture, once: to find it again calls nothing in Python.

    Args:
        device: of the tensors.
        make: takes `choice`, then the launch shape and Triton's name of the backend.
        choice: what else determines the variant.
    """
    target = current_target(device)
    return make(*choice, _tuned or tuning_for(target), target[0])


# In place of every architecture's; see `tuned`.
_tuned: Tuning | None = None


@contextlib.contextmanager
def tuned(tuning: Tuning) -> Iterator[None]:
    """Context manager: all launches take this launch shape, in all threads. For sweeps and tests.

    Args:
        tuning: the launch shape.
    """
    global _tuned
    before = _tuned
    _tuned = tuning
    variant_on.cache_clear()
    try:
        yield
    finally:
        _tuned = before
        variant_on.cache_clear()


def unsupported(target: tuple[str, int | str]) -> str | None:
    """Why `target`, Triton's (backend, architecture), cannot run the kernels; None if it can."""
    return _NO_CODE if target in UNSUPPORTED else None


def warp_size(target: tuple[str, int | str]) -> int:
    """Threads of a warp, by Triton's (backend, architecture): AMD's names of five digits and more have 32."""
    return 32 if target[0] == "hip" and len(str(target[1])) > len("gfx942") else WARP_SIZE[target[0]]


def tuning_for(target: tuple[str, int | str]) -> Tuning:
    """The launch shape of an architecture; of one that is not in TUNING, that of the nearest older one."""
    if target[0] == "interpreter":
        return INTERPRETER_TUNING
    if target in TUNING:
        return TUNING[target]
    if target[0] == "hip":
        return TUNING["hip", "gfx942" if warp_size(target) == WARP_SIZE["hip"] else "gfx1100"]
    older = [key for key in TUNING if key[0] == "cuda" and int(key[1]) < int(target[1])]
    return TUNING[max(older, key=lambda key: int(key[1]))] if older else TUNING["cuda", 80]


_interpreter_lock = threading.Lock()
_HERE = nullcontext()


@dataclass(frozen=True)
class Variant:
    """One compilation: `kernel` with these argument types, constexprs and options.

    Args:
        kernel: the jit function.
        signature: every argument with Triton's name of its type ("*fp32", "constexpr").
        constexprs: values of the constexpr arguments.
        num_warps: warps of a program.
        branches: dtype branches that the machine code must have, as (source, destination); the destination is None if a
            branch only reads.
        label: name in messages and records.
        options: Triton's compile options.
    """

    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    num_warps: int
    branches: tuple[tuple[str | None, str | None], ...]
    label: str
    options: Mapping[str, Any] = field(default_factory=lambda: {"enable_fp_fusion": True})
    _kept: dict[torch.device, KeptLaunch] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for function in (self.kernel, *self.constexprs.values()):
            settle_key(function)

    def launch(self, programs: int, arguments: Sequence[torch.Tensor | float | None]) -> None:
        """Launches the kernel on the first argument's device, on its current stream.

        Args:
            programs: how many.
            arguments: those that are no constexprs, in the kernel's order, a tensor first; None: absent.
        """
        first = arguments[0]
        assert isinstance(first, torch.Tensor)
        device = first.device
        with _launch_on(device):
            kept = self._kept.get(device)
            if kept is not None and kept.launch(programs, arguments):
                return
            options = {**self.constexprs, "num_warps": self.num_warps, **self.options}
            compiled = self.kernel[(programs,)](*arguments, **options)
            if KeptLaunch.serves(compiled):
                constants = (self.constexprs[name] for name in self.kernel.arg_names[len(arguments) :])
                self._kept[device] = KeptLaunch(self.kernel, compiled, constants)


def _launch_on(device: torch.device) -> AbstractContextManager[object]:
    # Triton launches on the current device, which need not be the tensors'. The interpreter replaces triton.language
    # while a kernel runs, so two threads must not be in it at once.
    if device.type == "cuda":
        return _HERE if torch.cuda.current_device() == device.index else torch.cuda.device(device)
    return _interpreter_lock if interpreted() else _HERE


def lanes(tuning: Tuning, backend: str) -> int:
    """Elements that the narrow piece moves at once: one per thread (two where AMD's warps have 32)."""
    return tuning.num_warps * WARP_SIZE[backend]


# Variants of pack and unpack: (wire, gradients are fp64, with statistics).
TRANSFERS: tuple[tuple[torch.dtype, bool, bool], ...] = tuple(
    (wire, fp64, stats)
    for wire, fp64 in (
        (torch.float32, False),
        (torch.bfloat16, False),
        (torch.float16, False),
        (torch.float64, True),
        (torch.bfloat16, True),
        (torch.float16, True),
    )
    for stats in (False, True)
)


def walk_variant(
    name: str,
    kernel: Any,
    arguments: Mapping[str, str],
    switches: Mapping[str, Any],
    tuning: Tuning,
    backend: str,
    *,
    branches: tuple[tuple[str, str | None], ...],
    label: str,
) -> Variant:
    """A variant of a kernel that reads or writes gradients through tables."""
    constexprs = {**switches, "TILE_BYTES": tuning.tile_bytes, "LANES": lanes(tuning, backend)}
    return Variant(
        kernel=kernel,
        signature={**arguments, **dict.fromkeys(constexprs, "constexpr")},
        constexprs=constexprs,
        num_warps=tuning.num_warps,
        branches=branches,
        label=f"{name}[{label}]",
    )


def encoded_variant(
    name: str,
    kernel: Any,
    arguments: Mapping[str, str],
    switches: Mapping[str, bool],
    encoding: Encoding,
    tuning: Tuning,
    backend: str,
    *,
    branches: tuple[tuple[str | None, str | None], ...],
    words: Mapping[str, bool],
) -> Variant:
    """A variant of a kernel of encoded buckets, without fused arithmetic: codes are those of the definition."""
    options = {"feedback": switches.get("FEEDBACK", False), "stochastic": switches.get("STOCHASTIC", False)}
    constexprs = {
        **switches,
        "BITS": encoding.bits,
        "BLOCK": encoding.block_numel,
        "TILE_BYTES": tuning.tile_bytes,
        "LANES": lanes(tuning, backend),
    }
    constexprs = {key: constexprs[key] for key in kernel.arg_names if key in constexprs}
    label = ", ".join([encoding.name, *(word for word, there in {**words, **options}.items() if there)])
    return Variant(
        kernel=kernel,
        signature={**arguments, **dict.fromkeys(constexprs, "constexpr")},
        constexprs=constexprs,
        num_warps=tuning.num_warps,
        branches=branches,
        label=f"{name}[{label}]",
        options={"enable_fp_fusion": False},
    )


def absent(outputs: Mapping[str, str]) -> dict[str, str]:
    """The signature of outputs that are not written."""
    return dict.fromkeys(outputs, "constexpr")


def partials_of(partials: Partials | None) -> tuple[torch.Tensor | None, ...]:
    """Arguments of a kernel for PARTIALS."""
    return (None,) * 3 if partials is None else (partials.sums, partials.peaks, partials.first_non_finite)


def sources_of(partials: SourcePartials | None) -> tuple[torch.Tensor | None, ...]:
    """Arguments of a kernel for SOURCE_PARTIALS."""
    return (None, None) if partials is None else (partials.first_non_finite, partials.flushed)
