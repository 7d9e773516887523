"""Tables that the kernels read: ChunkTable (a bucket's layout) and PointerTable (the gradients' addresses).

ChunkTable rows are int64 (parameter, begin, end, offset, dtype code): elements [begin, end) of that parameter's
memory belong at [offset, offset + end - begin) of the wire. It is built once per layout with numpy and uploaded
once per device. Cutting every slot into chunks of at most `chunk_numel` elements balances one tensor of 500 MB
beside 300 biases. Padding is rows of a parameter that never has an address, so pack writes zeros there.

Example: slots of 5 and 3 elements at offsets 0 and 8, wire of 16, chunk_numel 4, both fp32:
    (0, 0, 4, 0, 0)  (0, 4, 5, 4, 0)  (1, 0, 3, 8, 0)   data
    (2, 0, 3, 5, 4)  (2, 0, 4, 11, 4)  (2, 4, 5, 15, 4)  padding, parameter 2 = none, code 4
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from .cast import CastWire
from .current_stream import current_stream

DTYPE_CODES: Mapping[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
# fp64 gradients travel as fp64, bf16 or fp16.
WIRE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Stands in place of a dtype code in padding rows, which have no partials.
PADDING_CODE = 4
CHUNK_NUMEL = 8192
# Tables of addresses that are kept before one is overwritten: pack's, unpack's and one to spare.
GENERATIONS = 3
# Size and strides of a tensor that is dense in memory.
Shape = tuple[tuple[int, ...], tuple[int, ...]]
# By slot; None: no gradient.
Gradients: TypeAlias = Sequence[torch.Tensor | None]


# Which rows belong to which parameter, for second stages: int64 [1 + 2 P] on the partials' device: P, then the begin
# and end row of each parameter, in any order; begin == end if it has no rows.
Spans: TypeAlias = torch.Tensor


@dataclass(frozen=True)
class Partials:
    """Statistics from unpack or measure, one entry per data row of the table.

    Args:
        sums: fp64 [rows], sums of squares of the values as stored.
        peaks: fp64 [rows], largest absolute values as stored; NaN where one is NaN.
        first_non_finite: int64 [rows], index within the parameter's memory of the first NaN or Inf, -1 for none.
    """

    sums: torch.Tensor
    peaks: torch.Tensor
    first_non_finite: torch.Tensor

    def part(self, begin: int, end: int | None) -> Partials:
        """Views of rows [begin, end); None: to the last one."""
        return Partials(self.sums[begin:end], self.peaks[begin:end], self.first_non_finite[begin:end])


@dataclass(frozen=True)
class SourcePartials:
    """Statistics from pack, of this rank's gradients before the reduction; one entry per data row of the table.

    Args:
        first_non_finite: int64 [rows], index within the parameter's memory of the first NaN or Inf in the gradient (not
            on the wire, where finite values may overflow), -1 for none.
        flushed: int64 [rows], number of elements that are not 0 in the gradient and 0 on the wire; counted only if
            `may_flush`, else 0.
    """

    first_non_finite: torch.Tensor
    flushed: torch.Tensor

    def part(self, begin: int, end: int | None) -> SourcePartials:
        """Views of rows [begin, end); None: to the last one."""
        return SourcePartials(self.first_non_finite[begin:end], self.flushed[begin:end])


@dataclass(frozen=True)
class Totals:
    """Partials added up per parameter and in total: the result of `kernels.stats.reduce_partials`.

    Args:
        parameter_sums: fp64 [P], sum of squares of each parameter's values.
        parameter_peaks: fp64 [P], largest absolute value; NaN where one is NaN.
        first_non_finite: int64 [P], index within the parameter's memory of its first NaN or Inf, -1 for none.
        total: fp64 [3], sum of parameter_sums in their order, largest of parameter_peaks (NaN where one is NaN), and
            how many parameters have a non-finite value.
    """

    parameter_sums: torch.Tensor
    parameter_peaks: torch.Tensor
    first_non_finite: torch.Tensor
    total: torch.Tensor


@dataclass(frozen=True)
class SourceTotals:
    """SourcePartials per parameter and in total: the result of `kernels.stats.reduce_source_partials`.

    Args:
        first_non_finite: int64 [P], index within the parameter's memory of its first NaN or Inf, -1 for none.
        flushed: int64 [P], number of elements that the wire's dtype made 0.
        first: int64 [2], the lowest parameter with a non-finite value and its index there; (-1, -1) for none.
    """

    first_non_finite: torch.Tensor
    flushed: torch.Tensor
    first: torch.Tensor


def new_partials(rows: int, device: torch.device) -> Partials:
    """Partials [rows], uninitialised: launches write every data row of their tables."""
    return Partials(
        sums=torch.empty(rows, dtype=torch.float64, device=device),
        peaks=torch.empty(rows, dtype=torch.float64, device=device),
        first_non_finite=torch.empty(rows, dtype=torch.int64, device=device),
    )


def new_source_partials(rows: int, device: torch.device) -> SourcePartials:
    """SourcePartials [rows], uninitialised: pack writes every data row of its table."""
    return SourcePartials(
        first_non_finite=torch.empty(rows, dtype=torch.int64, device=device),
        flushed=torch.empty(rows, dtype=torch.int64, device=device),
    )


def may_flush(gradient: torch.dtype, wire: torch.dtype) -> bool:
    """Whether elements flushed to zero are counted: if the wire's dtype has fewer bytes than the gradient's."""
    return wire.itemsize < gradient.itemsize


class ChunkTable:
    """The rows of one layout, which never change.

    Args:
        numels: number of elements of each slot.
        offsets: first wire element of each slot; slots ascend and do not overlap.
        dtypes: gradient dtype of each slot: fp32, bf16 and fp16 in any mix, or fp64 alone.
        wire_numel: number of elements of the wire buffer; elements that no slot covers are padding.
        begins: first element of each slot within its memory; None: 0. (A comm hook's slots share one buffer.)
        chunk_numel: largest number of elements per row.
        shapes: size and strides of each slot's gradient, if they are always the same; saves work on CPU.
        block_numel: slots begin at multiples of it, and padding that fills up a slot's last block has no rows.
        shard_numel: rows end where a multiple of it does; None: nowhere else.
        cast: how pack rounds, to the wire's dtype; None: to nearest.

    Raises:
        ValueError: slots overlap, leave the wire, or a size is negative.
        TypeError: a dtype that the kernels do not take, or fp64 mixed with others.
    """

    def __init__(
        self,
        numels: Sequence[int],
        offsets: Sequence[int],
        dtypes: Sequence[torch.dtype],
        wire_numel: int,
        *,
        begins: Sequence[int] | None = None,
        chunk_numel: int = CHUNK_NUMEL,
        shapes: Sequence[Shape] | None = None,
        block_numel: int = 1,
        shard_numel: int | None = None,
        cast: CastWire | None = None,
    ) -> None:
        if not 0 < chunk_numel < 2**30:
            raise ValueError(f"chunk_numel must be in [1, 2**30), got {chunk_numel}")
        self.numels = tuple(numels)
        self.offsets = tuple(offsets)
        self.dtypes = tuple(dtypes)
        self.begins = tuple(begins) if begins is not None else (0,) * len(self.numels)
        # Slots with begins share one buffer, which is longer than any of them.
        self.shared = begins is not None
        self.wire_numel = wire_numel
        self.chunk_numel = chunk_numel
        self.shard_numel = shard_numel
        self.cast = cast if cast is not None and cast.rounding is not None else None
        if not len(self.numels) == len(self.offsets) == len(self.dtypes) == len(self.begins):
            raise ValueError(
                f"{len(self.numels)} sizes, {len(self.offsets)} offsets, {len(self.dtypes)} dtypes and "
                f"{len(self.begins)} begins: give one of each per slot"
            )
        self.shapes = None if shapes is None else tuple(shapes)
        self.fp64 = _checked_fp64(self.dtypes)
        self.compute_dtype = torch.float64 if self.fp64 else torch.float32
        self.dtype_set = frozenset(self.dtypes)
        numel = np.asarray(self.numels, dtype=np.int64)
        offset = np.asarray(self.offsets, dtype=np.int64)
        begin = np.asarray(self.begins, dtype=np.int64)
        gaps = _checked_gaps(numel, offset, begin, wire_numel, block_numel)
        self.gaps: tuple[tuple[int, int], ...] = tuple((int(lo), int(hi)) for lo, hi in gaps)
        # All gradients lie in one buffer as they do on the wire: a comm hook's, or there is but one.
        in_order = self.offsets == self.begins and (self.shared or len(self.numels) == 1)
        self.one_buffer = in_order and not self.gaps
        code = np.asarray([DTYPE_CODES[dtype] for dtype in self.dtypes], dtype=np.int64)
        ranges = _divided(np.arange(len(numel)), begin, numel, offset, code, shard_numel)
        data, counts = _cut(*ranges, chunk_numel)
        counts = np.bincount(ranges[0], counts, len(numel)).astype(np.int64)
        none = np.full(len(gaps), len(numel))
        zeros = np.zeros(len(gaps), dtype=np.int64)
        lengths = gaps[:, 1] - gaps[:, 0]
        padding, _ = _cut(*_divided(none, zeros, lengths, gaps[:, 0], zeros + PADDING_CODE, shard_numel), chunk_numel)
        self.rows: npt.NDArray[np.int64] = np.concatenate([data, padding])
        self.data_rows = len(data)
        # Slot s has the data rows [first_rows[s], first_rows[s + 1]).
        self.first_rows: npt.NDArray[np.int64] = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self._on_device: dict[torch.device, torch.Tensor] = {}

    def __len__(self) -> int:
        """Number of slots."""
        return len(self.numels)

    def on(self, device: torch.device) -> torch.Tensor:
        """The rows on a device; uploaded at the first call.

        Args:
            device: where they are needed.

        Returns:
            int64 [rows, 5]: parameter, begin, end, offset, dtype code.
        """
        uploaded = self._on_device.get(device)
        if uploaded is None:
            uploaded = self._on_device[device] = torch.from_numpy(self.rows).to(device)
        return uploaded

    def row_spans(self) -> list[tuple[int, int]]:
        """Per slot its rows of statistics, [begin, end)."""
        return list(itertools.pairwise(self.first_rows.tolist()))

    def spans(self, device: torch.device) -> Spans:
        """The rows of each slot in the partials of one launch; a new tensor at every call.

        Args:
            device: of the partials.

        Returns:
            int64 [1 + 2 P]: P, then begin and end row of each slot.
        """
        pairs = np.stack([self.first_rows[:-1], self.first_rows[1:]], axis=1)
        return torch.from_numpy(np.concatenate([[len(self)], pairs.reshape(-1)])).to(device)

    def new_partials(self, device: torch.device) -> Partials:
        """Uninitialised Partials for one launch of unpack or measure, on `device`."""
        return new_partials(self.data_rows, device)

    def new_source_partials(self, device: torch.device) -> SourcePartials:
        """Uninitialised SourcePartials for one launch of pack, on `device`."""
        return new_source_partials(self.data_rows, device)


def _checked_fp64(dtypes: Sequence[torch.dtype]) -> bool:
    kinds = set(dtypes)
    unknown = kinds - set(DTYPE_CODES)
    if unknown:
        names = ", ".join(sorted(map(str, unknown)))
        accepted = ", ".join(map(str, DTYPE_CODES))
        raise TypeError(f"gradients of {names} cannot be packed; accepted: {accepted} (complex: pass view_as_real)")
    if torch.float64 in kinds and len(kinds) > 1:
        raise TypeError("torch.float64 gradients need a bucket of their own: put other dtypes into another bucket")
    return torch.float64 in kinds


def _checked_gaps(
    numel: npt.NDArray[np.int64],
    offset: npt.NDArray[np.int64],
    begin: npt.NDArray[np.int64],
    wire_numel: int,
    block_numel: int,
) -> npt.NDArray[np.int64]:
    """The [begin, end) ranges of the wire that no slot, filled up to whole blocks, covers, as rows."""
    if (numel < 0).any() or (offset < 0).any() or (begin < 0).any() or wire_numel < 0:
        raise ValueError("sizes, offsets and begins must not be negative")
    if (offset % block_numel).any():
        raise ValueError(f"slots begin at multiples of a block, {block_numel} elements, got {offset.tolist()}")
    ends = np.concatenate([[0], offset + -(-numel // block_numel) * block_numel])
    begins = np.concatenate([offset, [wire_numel]])
    if (begins < ends).any():
        slot = int(np.argmax(begins < ends))
        where = f"slot {slot} begins at {begins[slot]}" if slot < len(numel) else f"the wire ends at {wire_numel}"
        raise ValueError(f"{where}, but slot {slot - 1} ends at {ends[slot]}: slots must ascend and not overlap")
    gaps = np.stack([ends, begins], axis=1)
    return gaps[gaps[:, 0] < gaps[:, 1]]


# Parameter, begin, elements, offset and dtype code of each.
_Ranges: TypeAlias = tuple[
    npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]
]


def _divided(
    parameter: npt.NDArray[np.int64],
    begin: npt.NDArray[np.int64],
    numel: npt.NDArray[np.int64],
    offset: npt.NDArray[np.int64],
    code: npt.NDArray[np.int64],
    shard_numel: int | None,
) -> _Ranges:
    """Ranges that cross no shard, in the order of the slots that they are parts of."""
    if shard_numel is None or not len(numel):
        return parameter, begin, numel, offset, code
    first = offset // shard_numel
    parts = np.maximum((offset + numel - 1) // shard_numel - first + 1, 1)
    slot = np.repeat(np.arange(len(numel)), parts)
    shard = first[slot] + np.arange(len(slot)) - np.repeat(np.cumsum(parts) - parts, parts)
    low = np.maximum(offset[slot], shard * shard_numel)
    high = np.minimum((offset + numel)[slot], (shard + 1) * shard_numel)
    return parameter[slot], begin[slot] + low - offset[slot], np.maximum(high - low, 0), low, code[slot]


def _cut(
    parameter: npt.NDArray[np.int64],
    begin: npt.NDArray[np.int64],
    numel: npt.NDArray[np.int64],
    offset: npt.NDArray[np.int64],
    code: npt.NDArray[np.int64],
    chunk_numel: int,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Cuts slots into rows of at most chunk_numel elements; returns rows [C, 5] and the number of rows per slot."""
    counts = -(-numel // chunk_numel)
    slot = np.repeat(np.arange(len(numel)), counts)
    first_row = np.concatenate([[0], np.cumsum(counts)])[:-1]
    done = (np.arange(len(slot)) - first_row[slot]) * chunk_numel
    rows = np.stack(
        [
            parameter[slot],
            begin[slot] + done,
            begin[slot] + np.minimum(done + chunk_numel, numel[slot]),
            offset[slot] + done,
            code[slot],
        ],
        axis=1,
    )
    return np.ascontiguousarray(rows, dtype=np.int64), counts


class PointerTable:
    """The addresses of one bucket's gradients, on the device.

    They are uploaded only when they are other than any of the last few: gradients that change places from step to step,
    or those that unpack writes where pack has read others, need no upload each time. A table that a launch in flight
    reads is never overwritten: a change goes into a generation that no launch reads any more, or into a new one,
    without waiting.

    Attributes:
        uploads: number of uploads so far.
    """

    def __init__(self) -> None:
        self._checked: tuple[object, ...] | None = None
        self._chunks: ChunkTable | None = None
        self._wire: tuple[int, torch.dtype] | None = None
        self._generations: list[Upload] = []  # least recently used first
        self._captured: list[Upload] = []
        self._current: Upload | None = None
        self.uploads = 0
        self.kept: Any = None  # what `cpu` keeps with these gradients

    def holds(self, gradients: Gradients, chunks: ChunkTable, wire: torch.Tensor | None = None) -> bool:
        """Whether the latest checks were of the same tensors (address, dtype, shape), layout and, if given, wire.

        Args:
            gradients: P tensors; None: no gradient.
            chunks: the layout's table.
            wire: the wire buffer.

        Returns:
            True if the arguments need no check.
        """
        if self._chunks is not chunks or (wire is not None and self._wire != (wire.data_ptr(), wire.dtype)):
            return False
        return self._checked == _identities(gradients)

    def remember(self, gradients: Gradients, chunks: ChunkTable, wire: torch.Tensor | None = None) -> None:
        """Records arguments that have been checked.

        Args:
            gradients: P tensors; None: no gradient.
            chunks: the layout's table.
            wire: the wire buffer, of pack and unpack.
        """
        if not self.holds(gradients, chunks):
            self._checked, self._chunks, self._wire = _identities(gradients), chunks, None
        if wire is not None:
            self._wire = (wire.data_ptr(), wire.dtype)

    def upload(self, gradients: Gradients, device: torch.device) -> torch.Tensor:
        """The gradients' addresses on the device, uploaded if they are not there.

        Args:
            gradients: P tensors; None: no gradient.
            device: the gradients'.

        Returns:
            int64 [P + 1]: the address, 0 for None; the last entry is 0, for padding rows.
        """
        addresses = _addresses(gradients)
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        current = self._current
        if current is None or not current.serves(addresses, device):
            current = next((one for one in self._generations if one.serves(addresses, device)), None)
            if current is None:
                with torch.inference_mode(False):  # it outlives the caller's
                    current = self._uploaded(addresses, device, capturing)
                self.uploads += 1
            elif not capturing:
                self._generations.remove(current)
                self._generations.append(current)
            # A table uploaded in a capture is filled by replays only: no eager launch may read it.
            self._current = None if capturing else current
        if capturing and current in self._generations:
            # The graph will read it at every replay, so it is never filled with other addresses.
            self._generations.remove(current)
            self._captured.append(current)
        return current.device

    def launched(self) -> None:
        """Marks the table as read by what was just launched on the current stream (CUDA only)."""
        current = self._current
        if current is not None and current.device.is_cuda and not torch.cuda.is_current_stream_capturing():
            stream = current_stream(current.device.device)
            current.readers[stream.cuda_stream].record(stream)

    def _uploaded(self, addresses: list[int], device: torch.device, capturing: bool) -> Upload:
        values = torch.tensor([*addresses, 0], dtype=torch.int64, device="cpu")
        if device.type == "cpu":
            return Upload(addresses, values, values)
        if capturing:
            host = values.pin_memory()  # copied again by every replay
            upload = Upload(addresses, host, host.to(device, non_blocking=True))
            self._captured.append(upload)
            return upload
        unread = (one for one in self._generations if one.device.device == device and one.unread())
        known = next(unread, None) if len(self._generations) >= GENERATIONS else None
        if known is None:
            upload = Upload(addresses, values.pin_memory(), torch.empty_like(values, device=device))
        else:
            upload = known
            self._generations.remove(upload)
            upload.addresses = addresses
            upload.host.copy_(values)
        self._generations.append(upload)
        upload.device.copy_(upload.host, non_blocking=True)
        return upload


@dataclass(eq=False)
class Upload:
    """One generation of addresses: pinned source, device copy, and per stream the last launch that read it."""

    addresses: list[int]
    host: torch.Tensor
    device: torch.Tensor
    readers: defaultdict[int, torch.cuda.Event] = field(default_factory=lambda: defaultdict(torch.cuda.Event))

    def serves(self, addresses: list[int], device: torch.device) -> bool:
        """Whether these addresses are on that device."""
        return self.addresses == addresses and self.device.device == device

    def unread(self) -> bool:
        """Whether all launches that read this generation have ended."""
        return bool(self.readers) and all(event.query() for event in self.readers.values())


def _addresses(gradients: Gradients) -> list[int]:
    """0 for None; 0.06 us each where there is none."""
    try:
        return list(map(torch.Tensor.data_ptr, gradients))  # type: ignore[arg-type]
    except TypeError:
        return [0 if gradient is None else gradient.data_ptr() for gradient in gradients]


def _identities(gradients: Gradients) -> tuple[object, ...]:
    """Keys that are equal if tensors are the ones that were checked; 0.2 us each."""
    return tuple([None if g is None else (g.data_ptr(), g.dtype, g.shape, g.stride()) for g in gradients])
