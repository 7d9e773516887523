"""Dispatch: runs the Triton kernels or torch operators, by device.

    CUDA (or ROCm) tensors                     triton       the compiled kernels
    the same where Triton cannot launch        torch        few_ops.py
    CPU tensors                                torch        cpu.py
    CPU tensors under TRITON_INTERPRET=1       interpreter  the kernels, in Triton's interpreter (slow: for tests)

The interpreter rounds fp32 -> bf16 by truncation, so a function that writes bf16 there takes the torch path: dispatch
never leaves a wrong gradient. This module's functions check their arguments; those of `unchecked` take the same ones
and check nothing, which is for callers whose arguments are right by how they were made.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from . import compile_time, cpu, cpu_stats, few_ops
from .cast import CastWire
from .checks import check_combine, check_transfer, check_walk
from .parts import Part, in_rank_order
from .table import ChunkTable, Gradients, Partials, PointerTable, SourcePartials, SourceTotals, Spans, Totals

if TYPE_CHECKING:
    from .combine import CombineTables

_logger = logging.getLogger(__name__)
Path = Literal["triton", "interpreter", "torch"]
_LONG_COMPILATION_S = 5.0


class UnsupportedPairError(TypeError):
    """This architecture cannot run the kernels."""


class Kernels(Protocol):
    """The functions of one path. They take the arguments of this module's, and check nothing."""

    def pack(
        self,
        gradients: Gradients,
        chunks: ChunkTable,
        pointers: PointerTable,
        wire: torch.Tensor,
        divisor: float,
        partials: SourcePartials | None = None,
    ) -> None:
        """Flattens, divides and casts `gradients` into `wire`."""

    def unpack(
        self,
        gradients: Gradients,
        chunks: ChunkTable,
        pointers: PointerTable,
        wire: torch.Tensor,
        scale: torch.Tensor,
        partials: Partials | None = None,
    ) -> None:
        """Unflattens, scales and casts `wire` into `gradients`."""

    def measure(self, gradients: Gradients, chunks: ChunkTable, pointers: PointerTable, partials: Partials) -> None:
        """Fills `partials` with statistics of the gradients."""

    def scale(self, gradients: Gradients, chunks: ChunkTable, pointers: PointerTable, factor: torch.Tensor) -> None:
        """Multiplies the gradients by `factor`, in place."""


@functools.cache
def _triton() -> Any:
    """What launches kernels, imported when the first launch needs it (0.2 s); None without triton."""
    try:
        from . import launchers
    except ImportError:  # no triton on this platform: the torch path serves every device
        return None
    return launchers


@functools.cache
def unchecked(device: torch.device, written: tuple[torch.dtype, ...] | frozenset[torch.dtype]) -> Kernels:
    """The functions on a device's path, found once: to find them again calls nothing in Python.

    Args:
        device: of the tensors.
        written: dtypes that the function writes.

    Returns:
        Functions that take the arguments of this module's, and check none of them: a wrong one may have them write out
        of bounds.

    Raises:
        UnsupportedPairError: see `path_for`.
    """
    return _on_path(device, written)


def _on_path(device: torch.device, written: Collection[torch.dtype]) -> Kernels:
    if path_for(device, written) == "torch":
        return cpu if device.type == "cpu" else few_ops
    return cast(Kernels, _triton())


def path_for(device: torch.device, written: Collection[torch.dtype]) -> Path:
    """The path that a function takes.

    Args:
        device: of the tensors.
        written: dtypes that the function writes.

    Returns:
        "triton", "interpreter" or "torch".

    Raises:
        UnsupportedPairError: the kernels cannot be compiled for this GPU's architecture.
    """
    # Its interpreter is asked for before triton is imported, or by who has imported it.
    if device.type != "cuda" and "triton" not in sys.modules and "TRITON_INTERPRET" not in os.environ:
        return "torch"
    if device.type == "cuda":
        return "torch" if without_kernels(device) else "triton"
    interpreted = _triton() is not None and _triton().variants.interpreted()
    return "interpreter" if device.type == "cpu" and interpreted and torch.bfloat16 not in written else "torch"


def without_kernels(device: torch.device) -> str:
    """Finds out, once, whether Triton can launch kernels on a CUDA device, by launching one; logs why it cannot.

    Triton builds its launcher with a C compiler, or takes it from its cache, and looks for the driver's library. Within
    the capture of a CUDA graph, which would record that launch, it is taken for granted.

    Args:
        device: a CUDA device.

    Returns:
        Why torch operators are to take their place; empty: nothing is in the way.

    Raises:
        UnsupportedPairError: the kernels cannot be compiled for this GPU's architecture.
        RuntimeError: of torch's: there is no memory, or a kernel before this one has failed.
    """
    why = _without.get(device)
    if why is None:
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return ""
        with _disable_current_modes(), compile_time.counted():
            why = _without[device] = _why_not(device)
        if why:
            text = "torch operators take the place of kernels on %s, with the same gradients but slower: %s"
            _logger.warning(text, device, why)
    return why


def _why_not(device: torch.device) -> str:
    kernels = _triton()
    if kernels is None:
        return "triton cannot be imported. Install it: pip install triton"
    if kernels.variants.interpreted():
        return "Triton's interpreter cannot read a GPU's memory. Unset TRITON_INTERPRET, which is for tests"
    try:
        target = kernels.variants.current_target(device)
        reason = kernels.variants.unsupported(target)
        if reason is not None:
            raise UnsupportedPairError(f"{device} ({target[0]} {target[1]}) cannot run the kernels: {reason}")
        gradient, wire = (torch.zeros(1, dtype=torch.float32, device=device) for _ in range(2))
        kernels.pack([gradient], ChunkTable([1], [0], [torch.float32], 1), PointerTable(), wire, 1.0)
    except (UnsupportedPairError, torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:  # triton's own have no base but this
        return (
            f"triton cannot launch a kernel ({type(error).__name__}: {' '.join(str(error).split())[:200]}). "
            "Install a C compiler and Python's headers, if they are missing: apt-get install gcc python3-dev"
        )
    return ""


# By CUDA device, what `without_kernels` has found out.
_without: dict[torch.device, str] = {}


def pack(
    gradients: Gradients,
    chunks: ChunkTable,
    pointers: PointerTable,
    wire: torch.Tensor,
    divisor: float,
    partials: SourcePartials | None = None,
) -> None:
    """Flattens, divides and casts `gradients` into `wire`.

    Args:
        gradients: P tensors on one device, dense in memory (any order of dimensions), at any address; None: no
            gradient, its slot is filled with zeros.
        chunks: the layout's table, with the size, dtype and wire offset of each gradient.
        pointers: this bucket's address table; belongs to this bucket alone.
        wire: output [chunks.wire_numel], contiguous: fp32, bf16 or fp16 (fp64 gradients: fp64, bf16 or fp16).
        divisor: what to divide by, rounded to fp32 (fp64 for fp64 gradients).
        partials: from `chunks.new_source_partials`, filled in the same launch; None: no statistics. Of a gradient
            packed in place the first non-finite value is found for divisors of at least 1 only.

    Raises:
        ValueError, TypeError: arguments that do not fit together; nothing is written then.
        UnsupportedPairError: see `path_for`.
    """
    check_transfer(gradients, chunks, pointers, wire, None, partials)
    with torch.no_grad():  # values alone are read, of gradients that require one too
        _on_path(wire.device, (wire.dtype,)).pack(gradients, chunks, pointers, wire, divisor, partials)


def unpack(
    gradients: Gradients,
    chunks: ChunkTable,
    pointers: PointerTable,
    wire: torch.Tensor,
    scale: torch.Tensor,
    partials: Partials | None = None,
) -> None:
    """Unflattens, scales and casts `wire` into `gradients`.

    A gradient of the wire's dtype may be a view of its own slot of the wire; it is scaled in place then.

    Args:
        gradients: P tensors on one device, dense in memory (any order of dimensions), at any address; None: no
            gradient, its slot is skipped.
        chunks: the layout's table, with the size, dtype and wire offset of each gradient.
        pointers: this bucket's address table; belongs to this bucket alone.
        wire: input [chunks.wire_numel], contiguous: fp32, bf16 or fp16 (fp64 gradients: fp64, bf16 or fp16).
        scale: one element on the device, fp32 (fp64 for fp64 gradients).
        partials: from `chunks.new_partials`, filled in the same launch from the values as stored; None: no statistics.

    Raises:
        ValueError, TypeError: arguments that do not fit together; nothing is written then.
        UnsupportedPairError: see `path_for`.
    """
    check_transfer(gradients, chunks, pointers, wire, scale, partials)
    with torch.no_grad():
        _on_path(wire.device, chunks.dtype_set).unpack(gradients, chunks, pointers, wire, scale, partials)


def measure(
    gradients: Gradients,
    chunks: ChunkTable,
    pointers: PointerTable,
    partials: Partials,
) -> None:
    """Fills `partials` with statistics of gradients as they are; writes nothing else.

    Args:
        gradients: P tensors on one device, dense in memory (any order of dimensions), at any address; None: no
            gradient, which counts as zeros.
        chunks: the layout's table, with the size and dtype of each gradient. Its wire offsets are not used.
        pointers: the address table of these gradients.
        partials: output, from `chunks.new_partials`, on the gradients' device.

    Raises:
        ValueError, TypeError: arguments that do not fit together; nothing is written then.
        UnsupportedPairError: see `path_for`.
    """
    check_walk(gradients, chunks, pointers, partials)
    # dtypes as written, not read: the interpreter reads some numbers of bf16 wrongly too.
    _on_path(partials.sums.device, chunks.dtype_set).measure(gradients, chunks, pointers, partials)


def scale(
    gradients: Gradients,
    chunks: ChunkTable,
    pointers: PointerTable,
    factor: torch.Tensor,
) -> None:
    """Multiplies gradients by `factor`, in place.

    Args:
        gradients: P tensors on one device, dense in memory (any order of dimensions), at any address; None: no
            gradient, nothing is done.
        chunks: the layout's table, with the size and dtype of each gradient. Its wire offsets are not used.
        pointers: the address table of these gradients.
        factor: one element on the device, fp32 (fp64 for fp64 gradients).

    Raises:
        ValueError, TypeError: arguments that do not fit together; nothing is written then.
        UnsupportedPairError: see `path_for`.
    """
    check_walk(gradients, chunks, pointers, factor)
    _on_path(factor.device, chunks.dtype_set).scale(gradients, chunks, pointers, factor)


def new_combine_tables() -> CombineTables | None:
    """Tables for `combine` to keep between its launches on one stream.

    Returns:
        Empty tables; None without Triton.
    """
    return None if _triton() is None else _triton().CombineTables()


def combine(
    tensors: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    parts: tuple[Part, ...],
    scale: float = 1.0,
    tables: CombineTables | None = None,
    *,
    begins: tuple[int, ...] | None = None,
) -> None:
    """Adds `tensors` up and writes the sum, times `scale`, into each of `outputs`, or a piece of it into each.

    Tensors on several devices take the torch path, where partial sums are copied from device to device. So do CPU
    tensors under TRITON_INTERPRET=1, since ranks of one process would wait for the interpreter at every collective.

    Args:
        tensors: P contiguous tensors of one dtype (fp32, bf16, fp16, fp64) and size, at any address.
        outputs: at least one of the same dtype and size, or for bf16 and fp16 all of another dtype; each is one of
            `tensors` or overlaps none.
        parts: ranges that cover every element once, in order, each with its order of additions.
        scale: a finite factor.
        tables: from `new_combine_tables`, kept from launch to launch on one stream; None: made for this call.
        begins: of each output its first element in `tensors`: it has as many as it holds, and overlaps neither them
            nor another output. Elements that none has are not added up. None: each output has all.

    Raises:
        ValueError, TypeError: arguments that do not fit together; nothing is written then.
        UnsupportedPairError: see `path_for`.
    """
    check_combine(tensors, outputs, parts, begins)
    device, written = tensors[0].device, outputs[0].dtype
    one_device = all(one.device == device for one in (*tensors, *outputs))
    widens = written is not tensors[0].dtype
    if one_device and path_for(device, (written,)) == "triton" and _triton().serves(parts, widens=widens):
        _triton().combine(tensors, outputs, parts, scale, tables, begins=begins)
    else:
        on_cpu = all(one.device.type == "cpu" for one in (*tensors, *outputs))
        (cpu if on_cpu else few_ops).combine(tensors, outputs, parts, scale, begins=begins)


def reduce_partials(partials: Partials, spans: Spans) -> Totals:
    """Adds partials of any number of launches up per parameter and in total.

    Args:
        partials: fp64 and int64 [rows], as unpack or measure filled them.
        spans: int64 [1 + 2 P] on their device: P, then begin and end row of each parameter.

    Returns:
        Totals [P], parameters in the order of `spans`.
    """
    second_stage = cpu_stats if path_for(partials.sums.device, ()) == "torch" else _triton()
    totals: Totals = second_stage.reduce_partials(partials, spans)
    return totals


def reduce_source_partials(partials: SourcePartials, spans: Spans) -> SourceTotals:
    """Reduces partials of any number of packs per parameter and in total.

    Args:
        partials: int64 [rows], as pack filled them.
        spans: int64 [1 + 2 P] on their device: P, then begin and end row of each parameter.

    Returns:
        SourceTotals [P], parameters in the order of `spans`.
    """
    second_stage = cpu_stats if path_for(partials.flushed.device, ()) == "torch" else _triton()
    totals: SourceTotals = second_stage.reduce_source_partials(partials, spans)
    return totals


def arithmetic(device: torch.device) -> str:
    """Describes what determines the last bits of sums: if ranks have the same text, equal gradients have equal sums.

    Args:
        device: of the gradients.

    Returns:
        Versions, and architecture or CPU capability, as text.
    """
    path = path_for(device, ())
    if path == "torch":
        if device.type == "cuda":
            return f"torch {torch.__version__}, CUDA {torch.version.cuda}, {torch.cuda.get_device_name(device)}"
        capability = torch.backends.cpu.get_cpu_capability()
        return f"torch {torch.__version__}, numpy {np.__version__}, {device.type}, {capability}"
    variants = _triton().variants
    target = variants.current_target(device)
    tuning = variants.tuning_for(target)
    where = f"triton {variants.triton.__version__}, {' '.join(map(str, target)).strip()}"
    return f"{where}, tiles of {tuning.tile_bytes} bytes, {tuning.num_warps} warps"


@functools.cache
@compile_time.counted()
def warm_up(
    device: torch.device, wire: torch.dtype, *, fp64: bool = False, stats: bool = False, cast: CastWire | None = None
) -> None:
    """Compiles pack and unpack for one wire by running them on one element, once; does nothing on the torch path.

    Args:
        device: whose architecture is compiled for, with its index.
        wire: dtype of the wire buffer.
        fp64: gradients are fp64; else fp32, bf16 and fp16.
        stats: with statistics too, and the kernels that measure, scale and add up.
        cast: how pack rounds; None: to nearest.

    Raises:
        UnsupportedPairError: see `path_for`.
    """
    dtype = torch.float64 if fp64 else torch.float32
    if path_for(device, (wire,)) != "triton":
        return
    gradients = [torch.zeros(1, dtype=dtype, device=device)]
    chunks = ChunkTable([1], [0], [dtype], 1, cast=cast)
    buffer = torch.empty(1, dtype=wire, device=device)
    one = torch.ones(1, dtype=dtype, device=device)
    unpack(gradients, chunks, PointerTable(), buffer, one)
    for divisor in (1.0, 3.0):  # by product and by division: a step's divisor may be any number
        pack(gradients, chunks, PointerTable(), buffer, divisor)
    if stats:
        sources, results, spans = chunks.new_source_partials(device), chunks.new_partials(device), chunks.spans(device)
        for divisor in (1.0, 3.0):
            pack(gradients, chunks, PointerTable(), buffer, divisor, sources)
        unpack(gradients, chunks, PointerTable(), buffer, one, results)
        measure(gradients, chunks, PointerTable(), results)
        scale(gradients, chunks, PointerTable(), one)
        reduce_partials(results, spans)
        reduce_source_partials(sources, spans)


@functools.cache
@compile_time.counted()
def warm_up_combine(device: torch.device, dtype: torch.dtype, written: torch.dtype | None = None) -> None:
    """Compiles `combine` for contributions that are added one after another, once; does nothing on the torch path.

    Args:
        device: whose architecture is compiled for, with its index.
        dtype: of the contributions.
        written: of their sum; None: the same.

    Raises:
        UnsupportedPairError: see `path_for`.
    """
    if path_for(device, (written or dtype,)) == "triton":
        both = [torch.zeros(1, dtype=dtype, device=device) for _ in range(2)]
        total = torch.empty(1, dtype=written or dtype, device=device)
        combine(both, [total], in_rank_order(1, 2), 1.0, new_combine_tables())


def report_compilation() -> None:
    """Logs how long this thread's kernels took to compile since the last call, if that was above 5 s."""
    seconds = compile_time.take()
    if seconds > _LONG_COMPILATION_S and (kernels := _triton()) is not None:
        _logger.warning(
            "compiling kernels took %.1f s. Triton keeps them in %s, where the next start finds them. If each start "
            "takes that long: set TRITON_CACHE_DIR to a directory that outlives the job, on a disk of this machine, "
            "the same for all of its ranks",
            seconds,
            kernels.variants.triton.knobs.cache.dir,
        )
