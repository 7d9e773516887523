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
from ..buckets.data_path import divisor_split, prepare
from ..buckets.partly_encoded import PartlyEncodedBucket
from ..buckets.phases import Phases
from ..buckets.wire_bucket import wire_bucket
from ..comm.group import Group
from ..comm.protocol import Communicator
from ..config import ReduceConfig, Wire
from ..planning.layout import flat_layout
from ..wires import NATIVE, cast_of, encoding_of

# By group, type of device, and what decides how many levels there are: states that serve different modules on different
# ranks issue phases in one order too.
_phases: WeakValueDictionary[tuple[object, ...], Phases] = WeakValueDictionary()


def phases_of(
    group: object, communicator: Communicator, device: torch.device, config: ReduceConfig, *, anew: bool = False
) -> Phases:
    """The phases of all comm hooks with these options over a group; `anew`: of those that come from now on."""
    key = group, device.type, encoding_of(config.one_wire) is not None, config.ranks_per_node
    phases = _phases.get(key)
    if phases is None or anew:
        phases = _phases[key] = Phases(Group(communicator), device)
    return phases


def make_bucket(
    flat: torch.Tensor,
    numels: Sequence[int],
    is_encoded: Sequence[bool],
    config: ReduceConfig,
    ranks: int,
    label: str,
    phases: Phases | None,
    *,
    lazy: bool = False,
) -> Bucket:
    """Builds the bucket for a flat buffer.

    Args:
        flat: the buffer, real.
        numels: elements of the gradients that lie in it, one after the other.
        is_encoded: which of them are encoded, on an encoded wire.
        config: the wire.
        ranks: how many average.
        label: for messages.
        phases: issues what follows an exchange's first phase; None: nothing does, on up to two ranks.
        lazy: release the buffers at the end of each step.

    Returns:
        Its gradients are those of the parameters, each flat, if it is an `ExchangedBucket`; else the buffer.
    """
    device, dtype = flat.device, flat.dtype
    # A backend's thread may free a bucket, and must not free the group with it.
    weak: Any = None if phases is None else weakref.proxy(phases)

    def part(wire: Wire, numels: Sequence[int]) -> Bucket:
        shapes = [((numel,), (1,)) for numel in numels]
        dtypes = [dtype] * len(numels)
        made = wire_bucket(wire, config, numels, dtypes, device, label, shapes, ranks=ranks, phases=weak, lazy=lazy)
        prepare(made)  # else a table's upload has the host wait for the collective that its stream waits for
        return made

    # Those that are not encoded; without elements they are no second part.
    others = [numel for numel, one in zip(numels, is_encoded, strict=True) if not one]
    if any(is_encoded) and any(others):
        encoded = part(config.one_wire, list(compress(numels, is_encoded)))
        return PartlyEncodedBucket(encoded, part(NATIVE, others), is_encoded)
    if any(is_encoded) or (config.accumulation == "fp32" and ranks > 2):
        return part(config.one_wire, numels)
    wire_dtype = config.wire_dtype(dtype)
    split = divisor_split(wire_dtype, {dtype}, ranks, config.op)
    return Bucket(
        flat_layout(flat.numel()),
        [dtype],
        wire_dtype,
        device,
        label,
        split=split,
        cast=cast_of(config.one_wire),
        lazy=lazy,
    )
