"""wire_bucket: the bucket that serves a wire, for the reducer and for the hook."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..config import ReduceConfig, Wire
from ..kernels.table import Shape
from ..planning.layout import aligned_layout
from ..wires import cast_of, encoding_of, is_accumulated, wire_dtype
from .bucket import Bucket
from .data_path import accumulated_split, divisor_split
from .draws import BucketDraws
from .exchanged import AccumulatedBucket, EncodedBucket
from .phases import Phases
from .two_levels import TwoLevelBucket


def wire_bucket(
    wire: Wire,
    config: ReduceConfig,
    numels: Sequence[int],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    label: str,
    shapes: Sequence[Shape],
    *,
    ranks: int,
    phases: Phases | None,
    lazy: bool,
    keys: Sequence[int] | None = None,
    draws: BucketDraws | None = None,
) -> Bucket:
    """Builds a bucket of gradients that travel on `wire`.

    Args:
        wire: of all of them.
        config: accumulation and operation.
        numels, dtypes, device, label, shapes, ranks, lazy, keys, draws: see EncodedBucket.
        phases: issues what follows the first phase, and says how many ranks a node has; None: no bucket has two.
    """
    encoding = encoding_of(wire)
    if encoding is not None and phases is not None and ranks > 2 and phases.per_node > 1:
        return TwoLevelBucket(numels, dtypes, encoding, device, label, shapes, ranks=ranks, phases=phases, lazy=lazy)
    if encoding is not None:
        return EncodedBucket(
            numels,
            dtypes,
            encoding,
            device,
            label,
            shapes,
            ranks=ranks,
            phases=phases,
            lazy=lazy,
            keys=keys,
            draws=draws,
        )
    dtype = wire_dtype(wire) or dtypes[0]
    if config.accumulation == "fp32" and is_accumulated(wire) and ranks > 2:
        split = accumulated_split(dtype, ranks, config.op)
        return AccumulatedBucket(
            numels, dtypes, dtype, device, label, shapes, split=split, ranks=ranks, phases=phases, lazy=lazy
        )
    split = divisor_split(dtype, set(dtypes), ranks, config.op)
    layout = aligned_layout(numels, wire_itemsize_bytes=dtype.itemsize)
    return Bucket(layout, dtypes, dtype, device, label, shapes, split=split, cast=cast_of(wire), lazy=lazy)
