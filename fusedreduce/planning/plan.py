"""Plans: which parameters form which bucket, and the order in which buckets are launched; the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .assignment import UNLIMITED_BYTES, BucketCaps, CapPolicy, assign_by_size

Plan = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class ParameterKind:
    """What a plan depends on, per parameter."""

    size_bytes: int
    dtype: torch.dtype
    device: torch.device
    sparse: bool = False


def kind_of(parameter: torch.Tensor, sparse: bool) -> ParameterKind:
    """The kind of one parameter."""
    return ParameterKind(parameter.numel() * parameter.element_size(), parameter.dtype, parameter.device, sparse)


def first_plan(kinds: Sequence[ParameterKind], caps: BucketCaps, cap_policy: CapPolicy, *, learns: bool) -> Plan:
    """Before anything is known: in the reverse of the order of registration, which is near that of backward.

    Args:
        kinds: of all parameters.
        caps: limits.
        cap_policy: how they are meant.
        learns: an order will be learned in the first step, which then uses one bucket per dtype and device. (A bucket
            launched early could otherwise meet collectives of the user's own in another order on another rank.)
    """
    limits = (UNLIMITED_BYTES,) if learns and not caps.listed_bytes else caps.limits_bytes
    return tuple(reversed(_cut(kinds, limits, cap_policy, None, share=False)))


def learned_plan(
    kinds: Sequence[ParameterKind], caps: BucketCaps, cap_policy: CapPolicy, order: Sequence[int], *, share: bool
) -> Plan:
    """In the order in which gradients became ready.

    Args:
        kinds: of all parameters.
        caps: limits.
        cap_policy: how they are meant.
        order: every parameter once, the first ready first.
        share: fp32, bf16 and fp16 gradients (and their complex kin) may share a bucket.
    """
    return tuple(_cut(kinds, caps.limits_bytes, cap_policy, order, share=share))


def _cut(
    kinds: Sequence[ParameterKind],
    limits: Sequence[int],
    cap_policy: CapPolicy,
    order: Sequence[int] | None,
    *,
    share: bool,
) -> list[tuple[int, ...]]:
    wide = (torch.float64, torch.complex128)
    groups = [("any" if share and kind.dtype not in wide else kind.dtype, kind.device) for kind in kinds]
    alone = [index for index, kind in enumerate(kinds) if kind.sparse]
    sizes = [kind.size_bytes for kind in kinds]
    return assign_by_size(sizes, groups, limits, order=order, alone=alone, cap_policy=cap_policy)
