"""AsynchronousBucket: this rank's contributions to one bucket, and the corrections that follow from them.

    gather(strip)            strip = gradients, or strip + gradients, in fp32 (fp64 for fp64)
    send(strip)              strip / divisor -> wire, rounded once; all-reduce, asynchronous
    apply_correction(...)      strip = strip - average, then gradient = round(gradient - strip): once

A strip is a flat accumulator with the layout of the wire. First it holds the sum of this rank's own gradients, which
the rank has used. When the average is known, the strip becomes the surplus, own sum minus average, which is subtracted
from the gradients of that time. Example: gradients 3 and 5 on two ranks, average 4. The first rank has used 3: its
surplus is -1, so 1 is added; the second has used 5: 1 is subtracted. Gradients of 10 and 20 become 11 and 19.

On CPU `apply_correction` goes through wire, strip and gradients block by block, so that a block stays in the cache: per
element 4 bytes of fp32 gradient, 4 of strip and the wire are read, 8 bytes are written.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from ...buckets import data_path
from ...buckets.bucket import Bucket, BucketState
from ...buckets.data_path import InFlight
from ...buckets.reduction import Members
from ...buckets.tensors import as_real, dense_shape, real_dtype, real_numel, taken_over
from ...comm.protocol import Communicator
from ...comm.waiting import wait_for
from ...kernels.cast import CastWire
from ...planning.layout import Layout, aligned_layout, flat_layout

# Elements of a block on CPU: 256 KiB of fp32, three of which fit into a core's second cache.
_BLOCK_NUMEL = 65536


@dataclass(frozen=True, eq=False)
class Strip:
    """An accumulator for one bucket's gradients.

    Args:
        flat: fp32 or fp64, with the layout of the wire; zeros between the slots.
        views: per slot its part, real, with the shape of the gradient.
    """

    flat: torch.Tensor
    views: list[torch.Tensor]


@dataclass(frozen=True)
class _Block:
    """Elements [begin, end) of a strip: all of the gradients `slots`, or a part of the gradient `part`."""

    begin: int
    end: int
    slots: range
    part: int | None = None


class AsynchronousBucket:
    """One bucket in the asynchronous mode. Its buffers are pooled: a wire and a strip for each contribution in flight,
    a strip for the next one, and one for the correction that is outstanding in `drain`.

    Args:
        members: dense parameters.
        communicator: the ranks.
        wire_dtype: dtype of the wire.
        divisor: what each rank's contribution is divided by.
        cast: how contributions are rounded to the wire; None: to nearest.

    Attributes:
        wires_made: number of wire buffers allocated.
    """

    def __init__(
        self,
        members: Members,
        communicator: Communicator,
        wire_dtype: torch.dtype,
        *,
        divisor: float,
        cast: CastWire | None = None,
    ) -> None:
        self.members = members
        self._communicator = communicator
        self._wire_dtype = wire_dtype
        self._divisor = divisor
        self._cast = cast
        self._shapes = [dense_shape(parameter) for parameter in members.parameters]
        numels = [real_numel(parameter) for parameter in members.parameters]
        self._layout = aligned_layout(numels, wire_itemsize_bytes=wire_dtype.itemsize)
        fp64 = any(real_dtype(parameter.dtype) is torch.float64 for parameter in members.parameters)
        self._dtype = torch.float64 if fp64 else torch.float32
        self._blocks = blocks_of(self._layout, _BLOCK_NUMEL if members.device.type == "cpu" else None)
        self._strips: list[Strip] = []
        self._wires: list[Bucket] = []
        self.wires_made = 0
        self._wires.append(self._bucket())  # a kernel is compiled now, not within backward

    @property
    def wire_bytes(self) -> int:
        """Bytes of one contribution's collective, padding included."""
        return self._layout.numel * self._wire_dtype.itemsize

    @property
    def padding_bytes(self) -> int:
        """Bytes of padding among them."""
        return self._layout.padding_numel * self._wire_dtype.itemsize

    # Buffers

    def strip(self) -> Strip:
        """A free strip; its content is undefined, but for the zeros between its slots."""
        if self._strips:
            return self._strips.pop()
        flat = torch.zeros(self._layout.numel, dtype=self._dtype, device=self.members.device)
        slots = zip(self._shapes, self._layout.offsets, strict=True)
        return Strip(flat, [flat.as_strided(size, strides, offset) for (size, strides), offset in slots])

    def _bucket(self) -> Bucket:
        """A bucket with a free wire."""
        if self._wires:
            return self._wires.pop()
        layout = flat_layout(self._layout.numel)
        made = Bucket(layout, [self._dtype], self._wire_dtype, self.members.device, self.members.label, cast=self._cast)
        data_path.prepare(made)
        self.wires_made += 1
        return made

    # The data path

    def check(self) -> None:
        """Checks the gradients before anything is written.

        Raises:
            TypeError: one is sparse, or has another dtype than its parameter.
        """
        gradients = taken_over(self.members.parameters)
        for gradient, parameter, name in zip(gradients, self.members.parameters, self.members.names, strict=True):
            if gradient is not None and (gradient.layout is not torch.strided or gradient.dtype is not parameter.dtype):
                raise TypeError(
                    f"rank {self._communicator.rank}: the gradient of {name} is {gradient.dtype}, {gradient.layout}; "
                    f"the asynchronous mode expects a dense one of {parameter.dtype}. Use another sync_mode here"
                )

    def gather(self, strip: Strip, *, add: bool) -> list[int]:
        """Copies the gradients into `strip`, or adds them; returns the numbers of the parameters that have one."""
        views: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        numbers: list[int] = []
        for number, parameter, view in zip(self.members.numbers, self.members.parameters, strip.views, strict=True):
            if parameter.grad is not None:
                views.append(view)
                gradients.append(as_real(_plain(parameter)))
                numbers.append(number)
            elif not add:
                view.zero_()
        if views and add:
            torch._foreach_add_(views, gradients)
        elif views:
            torch._foreach_copy_(views, gradients)
        return numbers

    def send(self, strip: Strip) -> InFlight:
        """Packs `strip` and starts its sum over all ranks; raises CollectiveError if that cannot be started."""
        return data_path.start(self._bucket(), [strip.flat], self._communicator, divisor=self._divisor)

    def complete(self, in_flight: InFlight) -> None:
        """Waits for the sum; raises CollectiveError with the bucket's name."""
        wait_for(in_flight.pending, self.members.all_reduce_text, self._communicator)

    def anywhere(self, in_flight: InFlight, numbers: Collection[int]) -> list[int]:
        """Those parameters of `numbers`, without a gradient on this rank, that another rank had one for, not all zeros.

        The host reads the sum, and on CUDA waits for it.
        """
        slots = [slot for slot, number in enumerate(self.members.numbers) if number in numbers]
        if not slots:
            return []
        places = self._layout.slots
        parts = [in_flight.wire[places[slot].offset :][: places[slot].numel] for slot in slots]
        found = torch.stack([part.any() for part in parts]).tolist()
        return [self.members.numbers[slot] for slot, there in zip(slots, found, strict=True) if there]

    def apply_correction(self, strip: Strip, in_flight: InFlight, numbers: Collection[int]) -> None:
        """Subtracts the surplus of `strip` from the gradients; missing ones of `numbers` are made.

        Here and below what was given returns to the pool. (On CUDA it is free for later work of the same stream.)
        """
        gradients = self._gradients(numbers)
        for block in self._blocks:
            self._make_surplus(strip, in_flight, block)
            self._subtract_surplus(strip, gradients, block)
        self._release(strip, in_flight)

    def add_correction(self, total: Strip, strip: Strip, in_flight: InFlight) -> None:
        """Adds the surplus of `strip` to `total`."""
        for block in self._blocks:
            self._make_surplus(strip, in_flight, block)
            total.flat[block.begin : block.end].add_(strip.flat[block.begin : block.end])
        self._release(strip, in_flight)

    def subtract_surplus(self, surplus: Strip, numbers: Collection[int]) -> None:
        """Subtracts a surplus from the gradients; missing ones of `numbers` are made."""
        gradients = self._gradients(numbers)
        for block in self._blocks:
            self._subtract_surplus(surplus, gradients, block)
        self._strips.append(surplus)

    def correction(self, strip: Strip, slot: int) -> torch.Tensor:
        """What a surplus adds to the gradient of a slot: fp32 or fp64, complex for a complex parameter."""
        added = strip.views[slot].neg()
        return torch.view_as_complex(added) if self.members.parameters[slot].is_complex() else added

    # Within

    def _make_surplus(self, strip: Strip, in_flight: InFlight, block: _Block) -> None:
        into = strip.flat[block.begin : block.end]
        torch.sub(into, in_flight.wire[block.begin : block.end], out=into)

    def _release(self, strip: Strip, in_flight: InFlight) -> None:
        in_flight.bucket.unpacked()
        in_flight.bucket.state = BucketState.IDLE
        self._wires.append(in_flight.bucket)
        self._strips.append(strip)

    def _gradients(self, numbers: Collection[int]) -> list[torch.Tensor | None]:
        """The gradients as real tensors that can be written in place; missing ones of `numbers` are made."""
        for number, parameter in zip(self.members.numbers, self.members.parameters, strict=True):
            if parameter.grad is None and number in numbers:
                parameter.grad = torch.zeros_like(parameter.detach())
        return [None if one.grad is None else as_real(_plain(one)) for one in self.members.parameters]

    def _subtract_surplus(self, strip: Strip, gradients: Sequence[torch.Tensor | None], block: _Block) -> None:
        if block.part is not None:
            gradient = gradients[block.part]
            if gradient is None:
                return
            offset, numel = self._layout.offsets[block.part], self._layout.numels[block.part]
            if gradient.stride() == strip.views[block.part].stride():
                begin = gradient.storage_offset() + block.begin - offset
                part = gradient.as_strided((block.end - block.begin,), (1,), begin)
                part.sub_(strip.flat[block.begin : block.end])
            elif block.end == offset + numel:
                gradient.sub_(strip.views[block.part])
            return
        # torch computes in the wider dtype and rounds once, when it stores.
        into: list[torch.Tensor] = []
        surplus: list[torch.Tensor] = []
        for slot in block.slots:
            gradient = gradients[slot]
            if gradient is not None:
                into.append(gradient)
                surplus.append(strip.views[slot])
        if into:
            torch._foreach_sub_(into, surplus)


def _plain(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter's gradient; a lazily conjugated or negated one is replaced by its values."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_conj() or gradient.is_neg():
        parameter.grad = gradient = gradient.resolve_conj().resolve_neg()
    return gradient.detach()


def blocks_of(layout: Layout, most: int | None) -> list[_Block]:
    """Cuts a layout into blocks of at most `most` elements (None: one block), whole slots where they fit."""
    if most is None:
        return [_Block(0, layout.numel, range(len(layout.numels)))]
    blocks: list[_Block] = []
    begin, first = 0, 0  # of the current block

    def end_block(end: int, slot: int) -> None:
        nonlocal begin, first
        if slot > first:
            blocks.append(_Block(begin, end, range(first, slot)))
        begin, first = end, slot

    for index, slot in enumerate(layout.slots):
        end = slot.offset + slot.numel
        if end - begin > most:
            end_block(slot.offset, index)
        if slot.numel > most:
            for at in range(slot.offset, end, most):
                blocks.append(_Block(at, min(at + most, end), range(0), index))
            begin, first = end, index + 1
    end_block(layout.numel, len(layout.numels))
    return blocks
