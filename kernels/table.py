"""Tables the kernels walk: ChunkTable (what a layout looks like) and PointerTable (where the gradients are now).

ChunkTable rows are int64 (parameter, begin, end, offset, dtype code): elements [begin, end) of that parameter's
memory belong at [offset, offset + end - begin) of the wire. It is built once per layout with numpy and uploaded
once per device. Cutting every slot into chunks of at most `chunk_numel` elements balances one tensor of 500 MB
beside 300 biases. Padding is rows of a parameter that never has an address, so pack writes zeros there.

Example: slots of 5 and 3 elements at offsets 0 and 8, wire of 16, chunk_numel 4, both fp32:
    (0, 0, 4, 0, 0)  (0, 4, 5, 4, 0)  (1, 0, 3, 8, 0)   data
    (2, 0, 3, 5, 4)  (2, 0, 4, 11, 4)  (2, 4, 5, 15, 4)  padding, parameter 2 = none, code 4
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

DTYPE_CODES: Mapping[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
# fp64 gradients travel as fp64, bf16 or fp16.
WIRE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# In place of a dtype code: the row is padding and has no partials.
PADDING_CODE = 4
CHUNK_NUMEL = 8192
# Size and strides of a tensor that is dense in memory.
Shape = tuple[tuple[int, ...], tuple[int, ...]]


# What tells second stages which rows are whose: int64 [1 + 2 P] on the partials' device: P, then the begin and end row
# of each parameter, in any order of the caller's; begin == end where it has none.
Spans: TypeAlias = torch.Tensor


@dataclass(frozen=True)
class Partials:
    """By-products of unpack, measure or scale, one entry per data row of the table.

    Args:
        sums: fp64 [rows], sums of squares of the values as stored.
        peaks: fp64 [rows], largest absolute values as stored; NaN where one is NaN.
        first_non_finite: int64 [rows], index within the parameter's memory of the first NaN or Inf, -1 for none.
    """

    sums: torch.Tensor
    peaks: torch.Tensor
    first_non_finite: torch.Tensor

    def part(self, begin: int, end: int) -> Partials:
        """Views of rows [begin, end)."""
        return Partials(self.sums[begin:end], self.peaks[begin:end], self.first_non_finite[begin:end])


@dataclass(frozen=True)
class SourcePartials:
    """By-products of pack, one entry per data row of the table: what is wrong with gradients before any rank is added.

    Args:
        first_non_finite: int64 [rows], index within the parameter's memory of the first NaN or Inf of the gradient as
            it was given (an overflow on the wire is not the gradient's fault), -1 for none.
        flushed: int64 [rows], how many elements are not 0 in the gradient and 0 on the wire; counted only where
            `may_flush`, else 0.
    """

    first_non_finite: torch.Tensor
    flushed: torch.Tensor

    def part(self, begin: int, end: int) -> SourcePartials:
        """Views of rows [begin, end)."""
        return SourcePartials(self.first_non_finite[begin:end], self.flushed[begin:end])


@dataclass(frozen=True)
class Totals:
    """Second stage of Partials: see `kernels.stats.reduce_partials`.

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
    """Second stage of SourcePartials: see `kernels.stats.reduce_source_partials`.

    Args:
        first_non_finite: int64 [P], index within the parameter's memory of its first NaN or Inf, -1 for none.
        flushed: int64 [P], elements that the wire's dtype made 0.
        first: int64 [2], the lowest parameter with a non-finite value and its index there; (-1, -1) for none.
    """

    first_non_finite: torch.Tensor
    flushed: torch.Tensor
    first: torch.Tensor


def new_partials(rows: int, device: torch.device) -> Partials:
    """Uninitialised; launches write every data row of their tables."""
    return Partials(
        sums=torch.empty(rows, dtype=torch.float64, device=device),
        peaks=torch.empty(rows, dtype=torch.float64, device=device),
        first_non_finite=torch.empty(rows, dtype=torch.int64, device=device),
    )


def new_source_partials(rows: int, device: torch.device) -> SourcePartials:
    """Uninitialised; pack writes every data row of its table."""
    return SourcePartials(
        first_non_finite=torch.empty(rows, dtype=torch.int64, device=device),
        flushed=torch.empty(rows, dtype=torch.int64, device=device),
    )


def may_flush(gradient: torch.dtype, wire: torch.dtype) -> bool:
    """Whether what the wire makes 0 is counted: where its dtype is narrower."""
    return wire.itemsize < gradient.itemsize


class ChunkTable:
    """The static half: rows of one layout.

    Args:
        numels: elements of each slot.
        offsets: first wire element of each slot; slots ascend and do not overlap.
        dtypes: gradient dtype of each slot: fp32, bf16 and fp16 in any mix, or fp64 alone.
        wire_numel: elements of the wire buffer; what no slot covers is padding.
        begins: first element of each slot within its memory (default 0; a comm hook's slots share one buffer).
        chunk_numel: at most this many elements per row.
        shapes: size and strides of each slot's gradient where they are always the same; saves work on CPU.

    Raises:
        ValueError: slots overlap, leave the wire, or a size is negative.
        TypeError: a dtype the kernels do not take, or fp64 mixed with others.
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
    ) -> None:
        if not 0 < chunk_numel < 2**30:
            raise ValueError(f"chunk_numel must be in [1, 2**30), got {chunk_numel}")
        self.numels = tuple(numels)
        self.offsets = tuple(offsets)
        self.dtypes = tuple(dtypes)
        self.begins = tuple(begins) if begins is not None else (0,) * len(self.numels)
        # Slots that name their begin share one buffer, which is longer than any of them.
        self.shared = begins is not None
        self.wire_numel = wire_numel
        self.chunk_numel = chunk_numel
        if not len(self.numels) == len(self.offsets) == len(self.dtypes) == len(self.begins):
            raise ValueError(
                f"{len(self.numels)} sizes, {len(self.offsets)} offsets, {len(self.dtypes)} dtypes and "
                f"{len(self.begins)} begins: give one of each per slot"
            )
        self.shapes = None if shapes is None else tuple(shapes)
        self.fp64 = _checked_fp64(self.dtypes)
        numel = np.asarray(self.numels, dtype=np.int64)
        offset = np.asarray(self.offsets, dtype=np.int64)
        begin = np.asarray(self.begins, dtype=np.int64)
        gaps = _checked_gaps(numel, offset, begin, wire_numel)
        self.gaps: tuple[tuple[int, int], ...] = tuple((int(lo), int(hi)) for lo, hi in gaps)
        code = np.asarray([DTYPE_CODES[dtype] for dtype in self.dtypes], dtype=np.int64)
        data, counts = _cut(np.arange(len(numel)), begin, numel, offset, code, chunk_numel)
        none = np.full(len(gaps), len(numel))
        zeros = np.zeros(len(gaps), dtype=np.int64)
        padding, _ = _cut(none, zeros, gaps[:, 1] - gaps[:, 0], gaps[:, 0], zeros + PADDING_CODE, chunk_numel)
        self.rows: npt.NDArray[np.int64] = np.concatenate([data, padding])
        self.data_rows = len(data)
        # Slot s has the data rows [first_rows[s], first_rows[s + 1]).
        self.first_rows: npt.NDArray[np.int64] = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self._on_device: dict[torch.device, torch.Tensor] = {}

    def __len__(self) -> int:
        """Number of slots."""
        return len(self.numels)

    def on(self, device: torch.device) -> torch.Tensor:
        """The rows on `device`; uploaded at the first call."""
        uploaded = self._on_device.get(device)
        if uploaded is None:
            uploaded = self._on_device[device] = torch.from_numpy(self.rows).to(device)
        return uploaded

    def spans(self, device: torch.device) -> Spans:
        """Which partials of one launch are whose, slots in order; a new tensor at every call."""
        pairs = np.stack([self.first_rows[:-1], self.first_rows[1:]], axis=1)
        return torch.from_numpy(np.concatenate([[len(self)], pairs.reshape(-1)])).to(device)

    def new_partials(self, device: torch.device) -> Partials:
        """Partials for one launch of unpack, measure or scale."""
        return new_partials(self.data_rows, device)

    def new_source_partials(self, device: torch.device) -> SourcePartials:
        """Partials for one launch of pack."""
        return new_source_partials(self.data_rows, device)


def _checked_fp64(dtypes: Sequence[torch.dtype]) -> bool:
    kinds = set(dtypes)
    unknown = kinds - set(DTYPE_CODES)
    if unknown:
        names = ", ".join(sorted(map(str, unknown)))
        accepted = ", ".join(map(str, DTYPE_CODES))
        raise TypeError(f"gradients of {names} cannot be packed; accepted: {accepted} (complex: pass view_as_real)")
    if torch.float64 in kinds and len(kinds) > 1:
        raise TypeError("torch.float64 gradients need a bucket of their own; put the other dtypes into another one")
    return torch.float64 in kinds


def _checked_gaps(
    numel: npt.NDArray[np.int64], offset: npt.NDArray[np.int64], begin: npt.NDArray[np.int64], wire_numel: int
) -> npt.NDArray[np.int64]:
    """The [begin, end) ranges of the wire that no slot covers, as rows."""
    if (numel < 0).any() or (offset < 0).any() or (begin < 0).any() or wire_numel < 0:
        raise ValueError("sizes, offsets and begins must not be negative")
    ends = np.concatenate([[0], offset + numel])
    begins = np.concatenate([offset, [wire_numel]])
    if (begins < ends).any():
        slot = int(np.argmax(begins < ends))
        where = f"slot {slot} begins at {begins[slot]}" if slot < len(numel) else f"the wire ends at {wire_numel}"
        raise ValueError(f"{where}, but slot {slot - 1} ends at {ends[slot]}: slots must ascend and not overlap")
    gaps = np.stack([ends, begins], axis=1)
    return gaps[gaps[:, 0] < gaps[:, 1]]


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
    """The moving half: where the gradients of one bucket are now.

    Uploads only when an address changed. What a launch in flight reads is never overwritten: a change takes a
    generation that no launch reads any more, or a new one, rather than wait.
    """

    def __init__(self) -> None:
        self._held: tuple[object, ...] | None = None
        self._chunks: ChunkTable | None = None
        self._wire: tuple[int, torch.dtype] | None = None
        self._generations: list[_Upload] = []
        self._captured: list[_Upload] = []
        self._current: _Upload | None = None
        self._views: tuple[tuple[int, torch.dtype, ChunkTable], list[torch.Tensor]] | None = None
        self.uploads = 0

    def holds(
        self, gradients: Sequence[torch.Tensor | None], chunks: ChunkTable, wire: torch.Tensor | None = None
    ) -> bool:
        """Whether the last launch had these tensors (address, dtype, size), this layout and, if given, this wire."""
        if self._chunks is not chunks or (wire is not None and self._wire != (wire.data_ptr(), wire.dtype)):
            return False
        return self._held == _identities(gradients)

    def remember(
        self, gradients: Sequence[torch.Tensor | None], chunks: ChunkTable, wire: torch.Tensor | None = None
    ) -> None:
        """Notes what a launch was checked for, without uploading it (the torch reference needs no table)."""
        held = _identities(gradients)
        if held != self._held:
            self._held = held
            self._current = None
            self._wire = None
        if self._chunks is not chunks:
            self._chunks = chunks
            self._wire = None
        if wire is not None:
            self._wire = (wire.data_ptr(), wire.dtype)

    def views(self, chunks: ChunkTable, wire: torch.Tensor) -> list[torch.Tensor]:
        """The slots of `wire`, each with its gradient's shape; made once per wire (1 us a piece). Keeps it alive."""
        assert chunks.shapes is not None
        key = (wire.data_ptr(), wire.dtype, chunks)
        if self._views is None or self._views[0] != key:
            slots = zip(chunks.shapes, chunks.offsets, strict=True)
            base = wire.storage_offset()
            self._views = key, [wire.as_strided(size, stride, base + offset) for (size, stride), offset in slots]
        return self._views[1]

    def upload(
        self,
        gradients: Sequence[torch.Tensor | None],
        chunks: ChunkTable,
        device: torch.device,
        wire: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Addresses of `gradients` on `device`, theirs: int64 [P + 1], 0 where one is None, and 0 at the end.

        The last entry is what padding rows point to. `wire`: of pack and unpack.
        """
        self.remember(gradients, chunks, wire)
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        current = self._current
        if current is None or current.device.device != device:
            addresses = [0 if gradient is None else gradient.data_ptr() for gradient in gradients]
            current = self._uploaded(torch.tensor([*addresses, 0], dtype=torch.int64), device, capturing)
            self.uploads += 1
            # What a capture uploads is filled by its replays only: no eager launch may read it.
            self._current = None if capturing else current
        elif capturing and current in self._generations:
            # A graph will read it at every replay: it is never filled with anything else.
            self._generations.remove(current)
            self._captured.append(current)
        return current.device

    def launched(self) -> None:
        """Marks the table as read by what was just launched on the current stream (CUDA only)."""
        current = self._current
        if current is not None and current.device.is_cuda and not torch.cuda.is_current_stream_capturing():
            stream = torch.cuda.current_stream(current.device.device)
            event = current.readers.setdefault(stream.cuda_stream, torch.cuda.Event())
            event.record(stream)

    def _uploaded(self, values: torch.Tensor, device: torch.device, capturing: bool) -> _Upload:
        if device.type == "cpu":
            return _Upload(values, values)
        if capturing:
            host = values.pin_memory()  # read at every replay, as is the copy of it
            upload = _Upload(host, host.to(device, non_blocking=True))
            self._captured.append(upload)
            return upload
        for upload in self._generations:
            if upload.device.device == device and upload.host.numel() == values.numel() and upload.unread():
                break
        else:
            upload = _Upload(values.pin_memory(), torch.empty_like(values, device=device))
            self._generations.append(upload)
        upload.host.copy_(values)
        upload.device.copy_(upload.host, non_blocking=True)
        return upload


@dataclass(eq=False)
class _Upload:
    """One generation of addresses: pinned source, device copy, and per stream the last launch that read it."""

    host: torch.Tensor
    device: torch.Tensor
    readers: dict[int, torch.cuda.Event] = field(default_factory=dict)

    def unread(self) -> bool:
        """Whether what was uploaded here has been read by all that were to read it."""
        return bool(self.readers) and all(event.query() for event in self.readers.values())


def _identities(gradients: Sequence[torch.Tensor | None]) -> tuple[object, ...]:
    """What tells whether tensors are the ones that were checked; 0.2 us each."""
    return tuple([None if g is None else (g.data_ptr(), g.dtype, g.numel(), g.is_contiguous()) for g in gradients])
