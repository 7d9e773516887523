"""Which of the two implementations runs: Triton kernels or their torch reference.

    CUDA (or ROCm) tensors                     triton       the compiled kernels
    CPU tensors                                torch        reference.py
    CPU tensors under TRITON_INTERPRET=1       interpreter  the kernels, in Triton's interpreter (slow: for tests)

The interpreter rounds fp32 -> bf16 by cutting bits off, so whatever writes bf16 there takes the torch path: dispatch
never hands out a wrong gradient. Signatures are the launchers'.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from . import reference, reference_combine, reference_stats
from .parts import Part
from .support import unsupported
from .table import ChunkTable, Partials, PointerTable, SourcePartials, SourceTotals, Spans, Totals

if TYPE_CHECKING:
    from .combine import CombineTables

_triton_pack: ModuleType | None
try:
    from triton import __version__ as _triton_version

    from . import combine as _triton_combine
    from . import measure as _triton_measure
    from . import pack as _triton_pack
    from . import scale as _triton_scale
    from . import stats as _triton_stats
    from . import unpack as _triton_unpack
    from . import variants as _variants
except ImportError:  # no triton on this platform: the torch path serves every device
    _triton_pack = None

_logger = logging.getLogger(__name__)
Path = Literal["triton", "interpreter", "torch"]


class UnsupportedPairError(TypeError):
    """This architecture cannot run the kernel for these dtypes."""


@dataclass(frozen=True)
class Launch:
    """One call that was counted: which function, which path, and how many kernels or torch operators it ran."""

    function: Literal["pack", "unpack", "measure", "scale", "combine", "reduce_partials", "reduce_source_partials"]
    path: Path
    launches: int


def path_for(device: torch.device, written: Iterable[torch.dtype], read: Iterable[torch.dtype] = ()) -> Path:
    """The path that a function writing dtypes `written` and reading `read` takes for tensors on `device`.

    Raises:
        UnsupportedPairError: a GPU whose architecture cannot have one of the dtypes.
    """
    if _triton_pack is None:
        _warn_without_triton(device.type)
        return "torch"
    if device.type == "cuda" and _variants.interpreted():
        return "torch"  # the interpreter reads addresses on the host
    if device.type == "cuda":
        written, read = tuple(written), tuple(read)
        _refuse_unsupported(device, frozenset((*written, *read)))
        return "triton"
    if device.type == "cpu" and _variants.interpreted() and torch.bfloat16 not in tuple(written):
        return "interpreter"
    return "torch"


def pack(
    gradients: Sequence[torch.Tensor | None],
    chunks: ChunkTable,
    pointers: PointerTable,
    wire: torch.Tensor,
    divisor: torch.Tensor,
    partials: SourcePartials | None = None,
    *,
    vouched: bool = False,
    done: Collection[int] = (),
) -> None:
    """Flattens, divides and casts `gradients` into `wire`; see `kernels.pack.pack`.

    `done`: first slots of the groups that `pack_early` has packed.
    """
    path = path_for(wire.device, (wire.dtype,), chunks.dtypes)
    options: dict[str, Any] = {"vouched": vouched}
    if path == "torch":
        options["done"] = done
    function = reference.pack if path == "torch" else _triton_pack.pack  # type: ignore[union-attr]
    _call("pack", path, function, gradients, chunks, pointers, wire, divisor, partials, **options)


def early_groups(chunks: ChunkTable, wire_dtype: torch.dtype, device: torch.device) -> list[range]:
    """Groups of slots worth packing as soon as all of their gradients are there: on CPU, where they are in the cache.

    All slots, ascending; a large one is a group of its own. Elsewhere none: a launch for each would cost more.
    """
    if device.type != "cpu" or path_for(device, (wire_dtype,), chunks.dtypes) != "torch":
        return []
    return [run.slots for run in reference.runs(chunks)]


def copies_small(chunks: ChunkTable, wire_dtype: torch.dtype, device: torch.device) -> bool:
    """Whether vouched gradients in groups of several slots may have any strides."""
    on_cpu = device.type == "cpu" and path_for(device, (wire_dtype,), chunks.dtypes) == "torch"
    return on_cpu and reference.uses_views(chunks, wire_dtype)


def pack_early(
    gradients: Sequence[torch.Tensor],
    group: int,
    chunks: ChunkTable,
    pointers: PointerTable,
    wire: torch.Tensor,
    divisor: torch.Tensor,
) -> None:
    """Packs one of `early_groups`; the caller answers for what `pack` checks, and names its first slot as `done`."""
    run = reference.runs(chunks)[group]
    _call("pack", "torch", reference.pack_run, gradients, run, chunks, pointers, wire, divisor, vouched=True)


def divide(gradient: torch.Tensor, divisor: float, out: torch.Tensor) -> None:
    """`pack_early` of one gradient on a wire of its own dtype, fp32 or fp64: `out` is its slot, shaped as it is."""
    _call("pack", "torch", reference.divide, gradient, divisor, out)


def unpack(
    gradients: Sequence[torch.Tensor | None],
    chunks: ChunkTable,
    pointers: PointerTable,
    wire: torch.Tensor,
    scale: torch.Tensor,
    partials: Partials | None = None,
    *,
    vouched: bool = False,
) -> None:
    """Unflattens, scales and casts `wire` into `gradients`; see `kernels.unpack.unpack`."""
    path = path_for(wire.device, chunks.dtypes, (wire.dtype,))
    function = reference.unpack if path == "torch" else _triton_unpack.unpack
    _call("unpack", path, function, gradients, chunks, pointers, wire, scale, partials, vouched=vouched)


def measure(
    gradients: Sequence[torch.Tensor | None],
    chunks: ChunkTable,
    pointers: PointerTable,
    partials: Partials,
    *,
    vouched: bool = False,
) -> None:
    """Partials of gradients as they are; see `kernels.measure.measure`."""
    # The interpreter reads some numbers of bf16 wrongly too.
    path = path_for(partials.sums.device, chunks.dtypes)
    function = reference.measure if path == "torch" else _triton_measure.measure
    _call("measure", path, function, gradients, chunks, pointers, partials, vouched=vouched)


def scale(
    gradients: Sequence[torch.Tensor | None],
    chunks: ChunkTable,
    pointers: PointerTable,
    factor: torch.Tensor,
    partials: Partials | None = None,
    *,
    vouched: bool = False,
) -> None:
    """Multiplies gradients in place; see `kernels.scale.scale`."""
    path = path_for(factor.device, chunks.dtypes)
    function = reference.scale if path == "torch" else _triton_scale.scale
    _call("scale", path, function, gradients, chunks, pointers, factor, partials, vouched=vouched)


def new_combine_tables() -> CombineTables | None:
    """What `combine` keeps between its launches on one stream; None where the torch path serves every device."""
    return None if _triton_pack is None else _triton_combine.CombineTables()


def combine(
    tensors: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    parts: tuple[Part, ...],
    scale: float = 1.0,
    tables: CombineTables | None = None,
) -> None:
    """Adds `tensors` up and writes the sum into each of `outputs`; see `kernels.combine.combine`.

    Tensors on several devices take the torch path: partial sums travel as the parts say. So do CPU tensors in the
    interpreter: peers in one process would wait for it at every collective.
    """
    first = tensors[0]
    one_device = all(one.device == first.device for one in (*tensors, *outputs))
    if one_device and path_for(first.device, (first.dtype,)) == "triton" and _triton_combine.serves(parts):
        _call("combine", "triton", _triton_combine.combine, tensors, outputs, parts, scale, tables)
    else:
        _call("combine", "torch", reference_combine.combine, tensors, outputs, parts, scale)


def reduce_partials(partials: Partials, spans: Spans) -> Totals:
    """Adds partials up per parameter and in total; see `kernels.stats.reduce_partials`."""
    path = path_for(partials.sums.device, ())
    function = reference_stats.reduce_partials if path == "torch" else _triton_stats.reduce_partials
    totals: Totals = _call("reduce_partials", path, function, partials, spans)
    return totals


def reduce_source_partials(partials: SourcePartials, spans: Spans) -> SourceTotals:
    """Brings partials of pack together per parameter; see `kernels.stats.reduce_source_partials`."""
    path = path_for(partials.flushed.device, ())
    function = reference_stats.reduce_source_partials if path == "torch" else _triton_stats.reduce_source_partials
    totals: SourceTotals = _call("reduce_source_partials", path, function, partials, spans)
    return totals


def arithmetic(device: torch.device) -> str:
    """What decides the last bits of sums on `device`: equal here and on a peer, equal gradients have equal sums."""
    path = path_for(device, ())
    if path == "torch":
        capability = torch.backends.cpu.get_cpu_capability()
        return f"torch {torch.__version__}, numpy {np.__version__}, {device.type}, {capability}"
    target = _variants.current_target(device)
    tuning = _variants.tuning_for(target)
    where = " ".join(map(str, target)).strip()
    return f"triton {_triton_version}, {where}, tiles of {tuning.tile_bytes} bytes, {tuning.num_warps} warps"


def warm_up(device: torch.device, wire: torch.dtype, *, fp64: bool = False, stats: bool = False) -> None:
    """Compiles pack and unpack for one wire by running them on one element, so that no step has to.

    `stats`: with by-products too, and what measures, scales and adds up. A no-op where the torch path runs.
    """
    dtype = torch.float64 if fp64 else torch.float32
    if path_for(device, (wire,), (dtype,)) != "triton":
        return
    gradients = [torch.zeros(1, dtype=dtype, device=device)]
    chunks = ChunkTable([1], [0], [dtype], 1)
    buffer = torch.empty(1, dtype=wire, device=device)
    one = torch.ones(1, dtype=dtype, device=device)
    pack(gradients, chunks, PointerTable(), buffer, one)
    unpack(gradients, chunks, PointerTable(), buffer, one)
    if stats:
        sources, results, spans = chunks.new_source_partials(device), chunks.new_partials(device), chunks.spans(device)
        pack(gradients, chunks, PointerTable(), buffer, one, sources)
        unpack(gradients, chunks, PointerTable(), buffer, one, results)
        measure(gradients, chunks, PointerTable(), results)
        for partials in (None, results):
            scale(gradients, chunks, PointerTable(), one, partials)
        reduce_partials(results, spans)
        reduce_source_partials(sources, spans)


@contextmanager
def count_launches() -> Iterator[list[Launch]]:
    """Counts every pack, unpack and reduce_partials of the process, on any thread, while the context is open.

    A kernel counts as one launch, on the torch path every operator that does work. Dispatch modes that are active on
    the calling thread do not see what is counted here.
    """
    counted: list[Launch] = []
    with _lock:
        _counting.append(counted)
    try:
        yield counted
    finally:
        with _lock:
            _counting.remove(counted)


_lock = threading.Lock()
_counting: list[list[Launch]] = []


_ALLOCATIONS = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"))


def does_work(operator: Any) -> bool:
    """Whether a torch operator launches anything: no views, no bare allocations, no marks for the profiler."""
    return not (operator.is_view or operator.namespace == "profiler" or operator._opname in _ALLOCATIONS)


class OperatorCounter(TorchDispatchMode):
    """Counts the torch operators that do work, as dispatched on this thread and on the autograd threads it starts.

    A foreach operator counts as one call, however many kernels it launches. The kernels of this package are not seen
    here but by `count_launches`.

    Attributes:
        calls: how many so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.calls += does_work(func)
        return func(*args, **(kwargs or {}))


def _call(name: Any, path: Path, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    if not _counting:
        return function(*arguments, **options)
    # Modes of the caller's would count the same operators again, and those with which the interpreter plays a kernel.
    with _disable_current_modes(), OperatorCounter() as operators:
        before = 0 if path == "torch" else _variants.launches()
        result = function(*arguments, **options)
    launches = operators.calls if path == "torch" else _variants.launches() - before
    with _lock:
        for counted in _counting:
            counted.append(Launch(name, path, launches))
    return result


@functools.cache
def _refuse_unsupported(device: torch.device, dtypes: frozenset[torch.dtype]) -> None:
    target = _variants.current_target(device)
    reason = unsupported(target, dtypes)
    if reason is not None:
        names = ", ".join(sorted(map(str, dtypes)))
        raise UnsupportedPairError(f"{device} ({target[0]} {target[1]}) cannot run the kernels for {names}: {reason}")


@functools.cache
def _warn_without_triton(device_type: str) -> None:
    if device_type == "cuda":
        _logger.warning("triton cannot be imported: gradients on CUDA take the slower torch path")
