"""Checks of arguments, before anything is read or written: `dispatch` and `encoded` make them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .encoded_table import EncodedTable, Residuals
from .parts import Part
from .table import DTYPE_CODES, WIRE_DTYPES, ChunkTable, Gradients, Partials, PointerTable, Shape, SourcePartials


def check_transfer(
    gradients: Gradients,
    chunks: ChunkTable,
    pointers: PointerTable,
    wire: torch.Tensor,
    scale: torch.Tensor | None,
    partials: Partials | SourcePartials | None,
) -> None:
    """Raises if the arguments of pack or unpack do not fit together.

    Wire, scale and partials are checked every time; gradients one by one only if one of them, or the layout, has
    changed since the last launch with `pointers`.

    Args:
        gradients: P tensors; None: no gradient.
        chunks: the layout's table.
        pointers: the bucket's address table.
        wire: [chunks.wire_numel].
        scale: of unpack; None: pack.
        partials: statistics; None: none.

    Raises:
        ValueError: wrong count, size, device, layout, or memory that overlaps.
        TypeError: wrong dtype.
    """
    _check_count(gradients, chunks)
    _check_wire(wire, chunks)
    if scale is not None:
        _check_scalar("scale", scale, chunks)
        _check_device("scale", scale, wire.device)
        _check_apart("scale", scale, wire)
    if partials is not None:
        _check_partials(partials, chunks, wire.device)
    _check_gradients(gradients, chunks, pointers, wire.device, wire)


def check_walk(gradients: Gradients, chunks: ChunkTable, pointers: PointerTable, rest: Partials | torch.Tensor) -> None:
    """Raises if the arguments of measure or scale do not fit together, as `check_transfer` does.

    Args:
        gradients: P tensors; None: no gradient.
        chunks: the layout's table.
        pointers: the address table.
        rest: the partials of measure, or the factor of scale.

    Raises:
        ValueError: wrong count, size, device, layout, or memory that overlaps.
        TypeError: wrong dtype.
    """
    _check_count(gradients, chunks)
    if isinstance(rest, Partials):
        device = rest.sums.device
        _check_partials(rest, chunks, device)
    else:
        device = rest.device
        _check_scalar("factor", rest, chunks)
    _check_gradients(gradients, chunks, pointers, device)


def check_combine(
    tensors: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    parts: Sequence[Part],
    begins: Sequence[int] | None,
) -> None:
    """Raises if the arguments of combine do not fit together. Overlapping memory is not looked for.

    Args:
        tensors: to add up.
        outputs: to write.
        parts: ranges of elements with their orders of additions.
        begins: of each output its first element; None: each has all.

    Raises:
        ValueError: no tensors or outputs, different sizes, not contiguous, parts that do not cover every element once,
            outputs that do not lie within the tensors.
        TypeError: different dtypes, or one that the kernels do not take; outputs of another dtype than tensors of more
            than 16 bits.
    """
    if not tensors or not outputs:
        raise ValueError("combine needs at least one tensor and one output")
    first = tensors[0]
    if first.dtype not in DTYPE_CODES:
        raise TypeError(f"tensors of {first.dtype} cannot be combined; accepted: {', '.join(map(str, DTYPE_CODES))}")
    written = outputs[0].dtype if first.itemsize == 2 and outputs[0].dtype in DTYPE_CODES else first.dtype
    for one in tensors:
        if one.dtype is not first.dtype:
            raise TypeError(f"combine adds tensors of one dtype, not {first.dtype} and {one.dtype}")
    for one in outputs:
        if one.dtype is not written:
            raise TypeError(
                f"outputs must all be of {first.dtype}, or for 16-bit tensors all of one of "
                f"{_names(tuple(DTYPE_CODES))}, not {one.dtype}"
            )
    for one in (*tensors, *outputs):
        if not one.is_contiguous():
            raise ValueError(f"combine takes contiguous tensors, not strides {one.stride()}")
    for one in (*tensors, *outputs) if begins is None else tensors:
        if one.numel() != first.numel():
            raise ValueError(f"combine adds tensors of one size, not {first.numel()} and {one.numel()} elements")
    if begins is not None:
        if len(begins) != len(outputs):
            raise ValueError(f"got {len(outputs)} outputs, and the first elements of {len(begins)}")
        for begin, one in zip(begins, outputs, strict=True):
            if not 0 <= begin <= begin + one.numel() <= first.numel():
                end = begin + one.numel()
                raise ValueError(f"an output has elements {begin} to {end} of tensors of {first.numel()}")
    ends = [0, *(part.end for part in parts)]
    if [part.begin for part in parts] != ends[:-1] or ends[-1] != first.numel():
        raise ValueError(f"the parts end at {ends[1:]} and do not cover {first.numel()} elements once, in order")


def check_encode(
    gradients: Gradients,
    chunks: EncodedTable,
    pointers: PointerTable,
    encoded: torch.Tensor,
    partials: SourcePartials | None,
    residuals: Residuals | None,
    draw: torch.Tensor | None,
) -> None:
    """Raises if the arguments of encode do not fit together, as `check_transfer` does.

    Args:
        gradients: P tensors; None: no gradient.
        chunks: the layout's table.
        pointers: the bucket's address table.
        encoded: uint8 [chunks.layout.nbytes].
        partials: statistics; None: none.
        residuals: of P parameters; None: none.
        draw: of stochastic rounding; None: rounding to nearest.

    Raises:
        ValueError: wrong count, size, device, layout, or memory that overlaps.
        TypeError: wrong dtype.
    """
    _check_count(gradients, chunks)
    _check_bytes("encoded bucket", encoded, chunks.layout.nbytes, encoded.device)
    if partials is not None:
        _check_partials(partials, chunks, encoded.device)
    if residuals is not None:
        _check_residuals(residuals, chunks.numels, encoded.device)
    if draw is not None:
        _check_draw(draw, encoded.device)
    _check_gradients(gradients, chunks, pointers, encoded.device, encoded)


def check_combine_encoded(
    received: torch.Tensor,
    chunks: EncodedTable,
    output: torch.Tensor,
    residuals: Residuals | None,
    draw: torch.Tensor | None,
) -> None:
    """Raises if the arguments of combine_encoded do not fit together.

    Args:
        received: uint8 [contributions x chunks.layout.shard_bytes].
        chunks: the layout's table.
        output: uint8 [chunks.layout.shard_bytes].
        residuals: of one tensor [chunks.layout.shard_numel]; None: none.
        draw: of stochastic rounding; None: rounding to nearest.

    Raises:
        ValueError: wrong size, device, layout, or memory that overlaps.
        TypeError: wrong dtype.
    """
    layout = chunks.layout
    _check_bytes("output", output, layout.shard_bytes, output.device)
    _check_contributions("received shards", received, layout.shard_bytes, output.device)
    first, last = received.data_ptr(), output.data_ptr() + output.numel()
    if output.numel() and first < last and output.data_ptr() < first + received.numel():
        raise ValueError("the output overlaps the received shards: give it memory of its own")
    if residuals is not None:
        _check_residuals(residuals, (layout.shard_numel,), output.device)
        if any(one.data_ptr() % 16 for copy in residuals.copies for one in copy):
            raise ValueError("residuals of a shard begin at addresses that are multiples of 16: clone them")
    if draw is not None:
        _check_draw(draw, output.device)


def check_decode(
    gradients: Gradients,
    chunks: EncodedTable,
    pointers: PointerTable,
    encoded: torch.Tensor,
    scale: torch.Tensor,
    partials: Partials | None,
) -> None:
    """Raises if the arguments of decode do not fit together, as `check_transfer` does.

    Args:
        gradients: P tensors; None: no gradient.
        chunks: the layout's table.
        pointers: the bucket's address table.
        encoded: uint8 [contributions x chunks.layout.nbytes].
        scale: one element of the compute dtype.
        partials: statistics; None: none.

    Raises:
        ValueError: wrong count, size, device, layout, or memory that overlaps.
        TypeError: wrong dtype.
    """
    _check_count(gradients, chunks)
    _check_contributions("encoded buckets", encoded, chunks.layout.nbytes, encoded.device)
    _check_scalar("scale", scale, chunks)
    _check_device("scale", scale, encoded.device)
    if partials is not None:
        _check_partials(partials, chunks, encoded.device)
    _check_gradients(gradients, chunks, pointers, encoded.device, encoded)


def _check_bytes(what: str, tensor: torch.Tensor, nbytes: int, device: torch.device) -> None:
    _check_device(what, tensor, device)
    if tensor.dtype is not torch.uint8:
        raise TypeError(f"the {what} is {tensor.dtype}, expected torch.uint8")
    if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.numel() != nbytes:
        raise ValueError(
            f"the {what} must be contiguous with shape ({nbytes},), got shape {tuple(tensor.shape)} and strides "
            f"{tensor.stride()}"
        )
    if tensor.data_ptr() % 16:
        raise ValueError(f"the {what} begins at an address that is no multiple of 16: clone it")


def _check_contributions(what: str, tensor: torch.Tensor, nbytes: int, device: torch.device) -> None:
    """Bytes of one contribution or several, one after the other."""
    number = tensor.numel() // nbytes if nbytes else 0
    _check_bytes(what, tensor, max(number, 1) * nbytes, device)


def _check_residuals(residuals: Residuals, numels: Sequence[int], device: torch.device) -> None:
    for name, dtype, length in (("live", torch.int64, 1), ("weights", torch.float32, 2)):
        tensor: torch.Tensor = getattr(residuals, name)
        _check_device(f"residuals.{name}", tensor, device)
        if tensor.dtype is not dtype or tuple(tensor.shape) != (length,) or not tensor.is_contiguous():
            raise ValueError(
                f"residuals.{name} must be {dtype} of shape ({length},), got {tensor.dtype} of {tuple(tensor.shape)}"
            )
    for copy in residuals.copies:
        if [one.numel() for one in copy] != list(numels):
            raise ValueError(
                f"residuals have {[one.numel() for one in copy]} elements, their slots expect {list(numels)}"
            )
        for slot, one in enumerate(copy):
            _check_device(f"residual {slot}", one, device)
            if one.dtype is not torch.float32 or one.dim() != 1 or not one.is_contiguous():
                raise ValueError(
                    f"residual {slot} must be torch.float32, flat and contiguous, got {one.dtype} of "
                    f"shape {tuple(one.shape)}"
                )


def _check_draw(draw: torch.Tensor, device: torch.device) -> None:
    _check_device("draw", draw, device)
    if draw.dtype is not torch.int64 or tuple(draw.shape) != (4,) or not draw.is_contiguous():
        raise ValueError(f"draw must be torch.int64 of shape (4,), got {draw.dtype} of {tuple(draw.shape)}")


def _check_count(gradients: Gradients, chunks: ChunkTable) -> None:
    if len(gradients) != len(chunks):
        raise ValueError(f"got {len(gradients)} gradients for a layout of {len(chunks)} slots")


def _check_scalar(what: str, scalar: torch.Tensor, chunks: ChunkTable) -> None:
    compute = chunks.compute_dtype
    if scalar.dtype != compute or scalar.numel() != 1:
        raise TypeError(f"the {what} must be one element of {compute}, got {scalar.numel()} elements of {scalar.dtype}")


def _check_wire(wire: torch.Tensor, chunks: ChunkTable) -> None:
    accepted: tuple[torch.dtype, ...] = (*WIRE_DTYPES[1:], torch.float64) if chunks.fp64 else WIRE_DTYPES
    accepted = accepted if chunks.cast is None else (chunks.cast.torch_dtype,)
    if wire.dtype not in accepted:
        raise TypeError(f"the wire buffer is {wire.dtype}, expected one of {_names(accepted)} for these gradients")
    if wire.requires_grad:
        raise ValueError("the wire buffer requires a gradient; pass wire.detach()")
    if wire.dim() != 1 or not wire.is_contiguous() or wire.numel() != chunks.wire_numel:
        raise ValueError(
            f"the wire buffer must be contiguous with shape ({chunks.wire_numel},), "
            f"got shape {tuple(wire.shape)} and strides {wire.stride()}"
        )


def _check_apart(what: str, tensor: torch.Tensor, wire: torch.Tensor) -> None:
    begin, end = wire.data_ptr(), wire.data_ptr() + wire.numel() * wire.element_size()
    if wire.numel() and begin <= tensor.data_ptr() < end:
        raise ValueError(f"the {what} lies inside the wire buffer: give it memory of its own")


def _check_device(what: str, tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"the {what} is on {tensor.device}, the other tensors on {device}: move them together")


def _check_partials(partials: Partials | SourcePartials, chunks: ChunkTable, device: torch.device) -> None:
    for name, tensor in vars(partials).items():
        what, dtype = f"partials.{name}", torch.float64 if name in ("sums", "peaks") else torch.int64
        _check_device(what, tensor, device)
        if tensor.dtype != dtype or tuple(tensor.shape) != (chunks.data_rows,) or not tensor.is_contiguous():
            raise ValueError(
                f"{what} must be contiguous {dtype} of shape ({chunks.data_rows},), got {tensor.dtype} of "
                f"{tuple(tensor.shape)}: use ChunkTable.new_partials (pack: new_source_partials)"
            )


def _check_gradients(
    gradients: Gradients,
    chunks: ChunkTable,
    pointers: PointerTable,
    device: torch.device,
    wire: torch.Tensor | None = None,
) -> None:
    """Checks gradients one by one, and that nothing overlaps, unless the latest checks were of the same arguments."""
    try:
        if pointers.holds(gradients, chunks, wire):
            return
    except RuntimeError:  # a sparse or fake tensor has no address; it is named here
        pass
    for slot, gradient in enumerate(gradients):
        if gradient is not None:
            _check_gradient(slot, gradient, chunks, device)
    _check_overlap(gradients, chunks, wire)
    pointers.remember(gradients, chunks, wire)


def _check_gradient(slot: int, gradient: torch.Tensor, chunks: ChunkTable, device: torch.device) -> None:
    what = f"gradient {slot}"
    if gradient.layout != torch.strided:
        raise TypeError(f"{what} has layout {gradient.layout}; only dense (strided) gradients can be packed")
    if gradient.dtype != chunks.dtypes[slot]:
        raise TypeError(f"{what} is {gradient.dtype}, its slot expects {chunks.dtypes[slot]}")
    _check_device(what, gradient, device)
    needed = chunks.begins[slot] + chunks.numels[slot]
    if gradient.numel() < needed or (chunks.begins[slot] == 0 and not chunks.shared and gradient.numel() != needed):
        raise ValueError(f"{what} has {gradient.numel()} elements, its slot expects {needed}")
    if gradient.is_neg() or gradient.is_conj():
        raise ValueError(
            f"{what} is a lazily negated or conjugated view; pass gradient.resolve_neg() or resolve_conj()"
        )
    if gradient.data_ptr() % gradient.element_size():
        raise ValueError(
            f"{what} lies at an address that is no multiple of its element size, {gradient.element_size()} bytes: "
            "clone it"
        )
    if not is_dense(gradient):
        raise ValueError(
            f"{what} (shape {tuple(gradient.shape)}, strides {gradient.stride()}) has gaps or repeats in memory; "
            "pass gradient.contiguous()"
        )
    if chunks.shapes is not None and not _has_shape(gradient, chunks.shapes[slot]):
        size, strides = chunks.shapes[slot]
        raise ValueError(
            f"{what} has shape {tuple(gradient.shape)} and strides {gradient.stride()}, the table was given shape "
            f"{tuple(size)} and strides {tuple(strides)} for its slot: give the table none if they vary"
        )


def _has_shape(gradient: torch.Tensor, shape: Shape) -> bool:
    """Whether a dense tensor has this size, and these strides where they say something."""
    size, strides = shape
    if tuple(gradient.shape) != tuple(size):
        return False
    pairs = zip(size, gradient.stride(), strides, strict=True)
    return gradient.numel() == 0 or all(length == 1 or its == known for length, its, known in pairs)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements fill a range of memory without gaps, each once, in any order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _check_overlap(gradients: Gradients, chunks: ChunkTable, wire: torch.Tensor | None = None) -> None:
    ranges = []
    for slot, gradient in enumerate(gradients):
        if gradient is not None and chunks.numels[slot] > 0:
            begin = gradient.data_ptr() + chunks.begins[slot] * gradient.element_size()
            ranges.append((begin, begin + chunks.numels[slot] * gradient.element_size(), slot))
    ranges.sort()
    for (_, end, slot), (begin, _, other) in zip(ranges, ranges[1:], strict=False):
        if begin < end:
            raise ValueError(f"gradients {slot} and {other} overlap in memory: clone one of them")
    if wire is None:
        return
    wire_begin = wire.data_ptr()
    wire_end = wire_begin + wire.numel() * wire.element_size()
    for begin, end, slot in ranges:
        in_place = (
            wire.dtype == chunks.dtypes[slot] and begin == wire_begin + chunks.offsets[slot] * wire.element_size()
        )
        if begin < wire_end and wire_begin < end and not in_place:
            raise ValueError(
                f"gradient {slot} overlaps the wire buffer; that is allowed only in place, with the wire's dtype and "
                "the slot's own offset"
            )


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(dtype) for dtype in dtypes)
