"""Packer: tensors into one flat wire and back, one launch each way.

    packer = Packer(gradients, torch.bfloat16)
    wire = packer.pack(gradients, divisor=world_size)    # flatten, divide, cast
    torch.distributed.all_reduce(wire)
    packer.unpack(wire, gradients)                       # unflatten, cast

Bytes moved per element: the tensor's itemsize and the wire's, each way; plus 40 bytes of tables per 8,192 elements.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import dispatch
from .table import ChunkTable, Gradients, Partials, PointerTable, SourcePartials

_ALIGN_BYTES = 16  # one vector access


class Packer:
    """Packs tensors of the same sizes, dtypes, strides and device again and again.

    On CUDA tensors `pack` and `unpack` are one kernel launch each on the current stream, whatever the number of
    tensors; on CPU tensors a few torch operators, with the same result (see `kernels.dispatch`). Nothing is allocated
    by either but a table of addresses, uploaded when one has changed, and a `scale` given as a number other than 1.

    Args:
        tensors: P tensors like those that will be packed, on one device, dense in memory (any order of dimensions):
            fp32, bf16 and fp16 in any mix, or fp64 alone.
        wire_dtype: fp32, bf16 or fp16 (of fp64 tensors fp64, bf16 or fp16); None: what holds every tensor's values
            exactly.

    Attributes:
        wire: [numel] on the tensors' device, which each `pack` writes anew. Two packs in flight take two packers.
        offsets: of each tensor's first element in the wire, at multiples of 16 bytes; what lies between is zeros.
        chunks: the layout's table, for `dispatch.measure` and `dispatch.scale`, and for partials.

    Raises:
        ValueError: no tensors, or on several devices.
        TypeError: a dtype that the kernels do not take, or fp64 mixed with others.

    Example::

        >>> packer = Packer([torch.tensor([1.0, 3.0]), torch.tensor([5.0]).half()], torch.bfloat16)
        >>> packer.pack([torch.tensor([1.0, 3.0]), torch.tensor([5.0]).half()], divisor=2.0)[[0, 1, 8]]
        tensor([0.5000, 1.5000, 2.5000], dtype=torch.bfloat16)
    """

    def __init__(self, tensors: Sequence[torch.Tensor], wire_dtype: torch.dtype | None = None) -> None:
        devices = {one.device for one in tensors}
        if len(devices) != 1:
            found = ", ".join(sorted(map(str, devices))) or "no tensors"
            raise ValueError(f"a Packer takes tensors on one device, got {found}: make one for each device")
        (device,) = devices
        dtypes = [one.dtype for one in tensors]
        if wire_dtype is None:
            wire_dtype = dtypes[0] if len(set(dtypes)) == 1 else torch.float32
        align, offsets, end = _ALIGN_BYTES // wire_dtype.itemsize, [], 0
        for one in tensors:
            offsets.append(end)
            end = -(-(end + one.numel()) // align) * align
        shapes = [(tuple(one.shape), one.stride()) for one in tensors]
        self.chunks = ChunkTable([one.numel() for one in tensors], offsets, dtypes, end, shapes=shapes)
        self.offsets = tuple(offsets)
        self.wire = torch.empty(end, dtype=wire_dtype, device=device)
        self._pointers = PointerTable()
        self._unit = torch.ones(1, dtype=self.chunks.compute_dtype, device=device)

    def pack(self, tensors: Gradients, divisor: float = 1.0, partials: SourcePartials | None = None) -> torch.Tensor:
        """Flattens, divides and casts, with one rounding: wire = round(tensor / divisor).

        Args:
            tensors: P, as in the constructor; None: its place is filled with zeros.
            divisor: what to divide by, in fp32 (fp64 for fp64 tensors).
            partials: from `chunks.new_source_partials`, filled in the same launch; None: no statistics.

        Returns:
            `wire`.

        Raises:
            ValueError, TypeError: tensors are other than in the constructor; nothing is written then.
        """
        dispatch.pack(tensors, self.chunks, self._pointers, self.wire, divisor, partials)
        return self.wire

    def unpack(
        self,
        wire: torch.Tensor,
        tensors: Gradients,
        scale: float | torch.Tensor = 1.0,
        partials: Partials | None = None,
    ) -> None:
        """Unflattens, multiplies and casts, with one rounding: tensor = round(wire * scale).

        Args:
            wire: [numel] as `pack` returned it, or another one of its dtype.
            tensors: P, as in the constructor, written; None: skipped.
            scale: a number, or one element on the device, fp32 (fp64 for fp64 tensors), which the host never reads.
            partials: from `chunks.new_partials`, filled in the same launch from what is written; None: no statistics.

        Raises:
            ValueError, TypeError: arguments that do not fit together; nothing is written then.
        """
        if not isinstance(scale, torch.Tensor):
            scale = self._unit if scale == 1.0 else torch.full_like(self._unit, scale)
        dispatch.unpack(tensors, self.chunks, self._pointers, wire, scale, partials)
