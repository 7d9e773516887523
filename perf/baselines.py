"""What torch offers for packing and unpacking a bucket, as fast as it can be put together, each under its name.

They get every favour: all buffers are there before, buckets have no padding, views are made once, and where two orders
of operations leave the same bits the one that moves fewer bytes is taken. Bytes per element, fp32 gradients on a bf16
wire (ours: 6):

    pack    per parameter             10  copy_ into a view, which casts, and div_ of it: DDP's way without its bucket
            per parameter, one pass    6  torch.div of each gradient into its view: what DDP without a hook does
            foreach                   10  _foreach_copy_ into all views, which casts, and one div_
            foreach, then cast        18  _foreach_copy_ in the gradients' dtype, .to, div_: DDP and a hook
            cat                       14  torch.cat, then one division that casts
            chunk_cat                 14  torch._chunk_cat (FSDP2's), then the same
    unpack  per parameter              6  copy_ of each slot, which casts
            foreach                    6  one _foreach_copy_, which casts
            cast, then foreach        14  copy_ into a bucket of the gradients' dtype, _foreach_copy_: DDP with a hook
            split + foreach            6  split_with_sizes and _foreach_copy_, views made at every call
            split_with_sizes_copy      6  FSDP2's; one dtype only

Their rounding: with a divisor that is a power of two all leave our bits (the gradients here do not reach subnormals).
Else what casts first rounds twice, and what divides by a number multiplies with its reciprocal on a GPU: `units` says
how far off that may be, in units in the last place of the wire.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from workload import Workload

Call = Callable[[], object]

# Rounded before it is divided, a number is off by up to a unit of the result, and by half a one after: 1.5, ours 0.5.
ROUNDED_TWICE_UNITS = 2


@dataclass(frozen=True)
class _Places:
    """Where the gradients of one bucket of one set lie in a bucket without padding."""

    gradients: list[torch.Tensor]
    flat_gradients: list[torch.Tensor]
    sizes: list[int]
    wire: torch.Tensor
    views: list[torch.Tensor]
    flat_views: list[torch.Tensor]
    wide: torch.Tensor  # a bucket in the gradients' dtype, the same for all sets
    wide_views: list[torch.Tensor]


class Baselines:
    """Torch's ways for one workload.

    A callable per set each, in the order of the sets, by name. They write and read gradients of the workload, which is
    allocated, and the first elements of `wires`, by set and bucket.
    """

    def __init__(self, work: Workload, wires: Sequence[Sequence[torch.Tensor]]) -> None:
        self._same_dtype = work.pair.gradients == work.pair.wire
        self._divisor = work.divisor
        wide = torch.empty(max(work.bucket_numels), dtype=work.pair.gradients, device=work.device)
        self._places = [
            [self._place(bucket.gradients, wire, wide) for bucket, wire in zip(one.buckets, of_set, strict=True)]
            for one, of_set in zip(work.sets, wires, strict=True)
        ]

    @staticmethod
    def _place(gradients: list[torch.Tensor], wire: torch.Tensor, wide: torch.Tensor) -> _Places:
        sizes = [gradient.numel() for gradient in gradients]
        wire, wide = wire[: sum(sizes)], wide[: sum(sizes)]
        flat = list(wire.split(sizes))
        return _Places(
            gradients=gradients,
            flat_gradients=[gradient.view(-1) for gradient in gradients],
            sizes=sizes,
            wire=wire,
            views=[slot.view(gradient.shape) for slot, gradient in zip(flat, gradients, strict=True)],
            flat_views=flat,
            wide=wide,
            wide_views=[s.view(g.shape) for s, g in zip(wide.split(sizes), gradients, strict=True)],
        )

    @property
    def units(self) -> int:
        """How far from ours a pack may be, in units in the last place of the wire."""
        return 0 if math.frexp(self._divisor)[0] == 0.5 else ROUNDED_TWICE_UNITS

    def packs(self) -> dict[str, list[Call]]:
        """Ways to fill the wires."""
        ways: dict[str, Callable[[_Places], object]] = {
            "per parameter": self._pack_each,
            "per parameter, one pass": self._pack_each_at_once,
            "foreach": self._pack_foreach,
            "cat": self._pack_cat,
            "chunk_cat": self._pack_chunk_cat,
        }
        if not self._same_dtype:
            ways["foreach, then cast"] = self._pack_foreach_then_cast
        return self._per_set(ways)

    def unpacks(self) -> dict[str, list[Call]]:
        """Ways to fill the gradients."""
        ways: dict[str, Callable[[_Places], object]] = {
            "per parameter": self._unpack_each,
            "foreach": self._unpack_foreach,
            "split + foreach": self._unpack_split,
        }
        if self._same_dtype:
            ways["split_with_sizes_copy"] = self._unpack_split_copy
        else:
            ways["cast, then foreach"] = self._unpack_cast_then_foreach
        return self._per_set(ways)

    def _per_set(self, ways: dict[str, Callable[[_Places], object]]) -> dict[str, list[Call]]:
        def of(way: Callable[[_Places], object], places: Sequence[_Places]) -> Call:
            def call() -> None:
                for place in places:
                    way(place)

            return call

        return {name: [of(way, places) for places in self._places] for name, way in ways.items()}

    def _pack_each(self, place: _Places) -> None:
        for gradient, view in zip(place.gradients, place.views, strict=True):
            view.copy_(gradient)
            view.div_(self._divisor)

    def _pack_each_at_once(self, place: _Places) -> None:
        for gradient, view in zip(place.gradients, place.views, strict=True):
            torch.div(gradient, self._divisor, out=view)

    def _pack_foreach(self, place: _Places) -> None:
        torch._foreach_copy_(place.views, place.gradients)
        place.wire.div_(self._divisor)

    def _pack_foreach_then_cast(self, place: _Places) -> None:
        torch._foreach_copy_(place.wide_views, place.gradients)
        place.wire.copy_(place.wide)
        place.wire.div_(self._divisor)

    def _pack_cat(self, place: _Places) -> None:
        flat = place.wire if self._same_dtype else place.wide
        torch.cat(place.flat_gradients, out=flat)
        self._divide(flat, place.wire)

    def _pack_chunk_cat(self, place: _Places) -> None:
        flat = place.wire if self._same_dtype else place.wide
        torch._chunk_cat(place.flat_gradients, dim=0, num_chunks=1, out=flat.view(1, -1))
        self._divide(flat, place.wire)

    def _divide(self, flat: torch.Tensor, wire: torch.Tensor) -> None:
        if flat is wire:
            wire.div_(self._divisor)
        elif wire.is_cuda:
            torch.div(flat, self._divisor, out=wire)
        else:  # the CPU has no division that casts on the way: it would go through a third buffer
            wire.copy_(flat)
            wire.div_(self._divisor)

    @staticmethod
    def _unpack_each(place: _Places) -> None:
        for gradient, view in zip(place.gradients, place.views, strict=True):
            gradient.copy_(view)

    @staticmethod
    def _unpack_foreach(place: _Places) -> None:
        torch._foreach_copy_(place.gradients, place.views)

    @staticmethod
    def _unpack_cast_then_foreach(place: _Places) -> None:
        place.wide.copy_(place.wire)
        torch._foreach_copy_(place.gradients, place.wide_views)

    @staticmethod
    def _unpack_split(place: _Places) -> None:
        torch._foreach_copy_(place.flat_gradients, place.wire.split_with_sizes(place.sizes))

    @staticmethod
    def _unpack_split_copy(place: _Places) -> None:
        torch.split_with_sizes_copy(place.wire, place.sizes, out=place.flat_gradients)
