"""What travels for the flat buffers that torch's DDP shows to a comm hook.

A wire that the backend adds up has one slot. Where contributions are exchanged, each parameter has a slot of its own,
as in the wrapper: so what is made of a gradient does not depend on the buckets. Parameters of a bucket that are too
small to be encoded are a second part of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import compress
from typing import Any
from weakref import WeakValueDictionary

import torch

from ..buckets.bucket import Bucket
from ..buckets.exchange import accumulated_split, divisor_split
from ..buckets.exchanged import AccumulatedBucket, EncodedBucket
from ..buckets.partly_encoded import PartlyEncodedBucket
from ..buckets.phases import Phases
from ..buckets.tensors import real_numel
from ..buckets.two_levels import TwoLevelBucket
from ..comm.protocol import Communicator
from ..config import ENCODED_WIRES, ReduceConfig
from ..kernels.encodings import ENCODINGS
from ..kernels.table import Shape
from ..planning.layout import aligned_layout, flat_layout

# By group and type of device: states that serve different modules on different ranks issue phases in one order too.
_phases: WeakValueDictionary[tuple[object, str], Phases] = WeakValueDictionary()


def phases_of(group: object, communicator: Communicator, device: torch.device, *, anew: bool = False) -> Phases:
    """The phases of all comm hooks over a group; `anew`: of those that come from now on."""
    phases = _phases.get((group, device.type))
    if phases is None or anew:
        phases = _phases[group, device.type] = Phases(communicator, device)
    return phases


def make_bucket(
    flat: torch.Tensor,
    parameters: Sequence[torch.Tensor],
    config: ReduceConfig,
    ranks: int,
    label: str,
    phases: Phases | None,
) -> Bucket:
    """Builds the bucket for a flat buffer.

    Args:
        flat: the buffer, real.
        parameters: whose gradients lie in it, one after the other.
        config: the wire.
        ranks: how many average.
        label: for messages.
        phases: issues what follows an exchange's first phase; None: nothing does, on up to two ranks.

    Returns:
        Its gradients are those of the parameters, each flat, if it is an `ExchangedBucket`; else the buffer.
    """
    device, dtype = flat.device, flat.dtype
    wire_dtype = config.wire_dtype(dtype)
    encoding = ENCODINGS.get(config.one_wire)
    is_encoded = [config.wire_of(one) in ENCODED_WIRES for one in parameters]
    numels = [real_numel(one) for one in parameters]
    # A backend's thread may free a bucket, and must not free the group with it.
    weak: Any = None if phases is None else weakref.proxy(phases)
    if encoding is not None and any(is_encoded):
        if not any(numel for numel, one in zip(numels, is_encoded, strict=True) if not one):
            is_encoded = [True] * len(numels)  # the others have no elements
        chosen = list(compress(numels, is_encoded))
        kind = EncodedBucket if phases is None or phases.per_node == 1 else TwoLevelBucket
        encoded = kind(
            chosen,
            [dtype] * len(chosen),
            encoding,
            device,
            label,
            _flat_shapes(chosen),
            ranks=ranks,
            phases=weak,
            lazy=False,
        )
        if all(is_encoded):
            return encoded
        others = [numel for numel, one in zip(numels, is_encoded, strict=True) if not one]
        layout = aligned_layout(others, wire_itemsize_bytes=wire_dtype.itemsize)
        rest = Bucket(layout, [dtype] * len(others), wire_dtype, device, label, _flat_shapes(others))
        return PartlyEncodedBucket(encoded, rest, is_encoded)
    if config.accumulation == "fp32" and wire_dtype.itemsize == 2 and ranks > 2:
        return AccumulatedBucket(
            numels,
            [dtype] * len(numels),
            wire_dtype,
            device,
            label,
            _flat_shapes(numels),
            split=accumulated_split(wire_dtype, ranks),
            ranks=ranks,
            phases=weak,
            lazy=False,
        )
    split = divisor_split(wire_dtype, {dtype}, ranks)
    return Bucket(flat_layout(flat.numel()), [dtype], wire_dtype, device, label, split=split)


def _flat_shapes(numels: Sequence[int]) -> list[Shape]:
    return [((numel,), (1,)) for numel in numels]
