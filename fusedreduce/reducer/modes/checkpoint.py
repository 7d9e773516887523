"""Checkpoints: what is in flight, as numbers and plain tensors by parameter name. So they load under any plan.

{"version": 2, "mode": "staleness", "world_size": 2, "rounds": 7, "steps": [
    {"step": 6, "loss_scale": 1024.0, "told": [[-1, -1], ...], "averages": {"weight": tensor, "bias": None}}, ...]}

{"version": 2, "mode": "asynchronous", "world_size": 2, "rank": 0, "owed": {"weight": tensor, "bias": None}}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...buckets.bucket_set import BucketMaker

_VERSION = 2


def header(maker: BucketMaker, mode: str, **more: int) -> dict[str, Any]:
    """What a checkpoint must have in common with the reducer that loads it."""
    return {"version": _VERSION, "mode": mode, "world_size": maker.group.communicator.size, **more}


def check(state: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raises ValueError where `state` differs from `here`, the `header` of now."""
    if state.get("version") != _VERSION:
        raise ValueError(f"this state is of version {state.get('version')!r}, this release reads {_VERSION} only")
    for key, expected in here.items():
        if state.get(key) != expected:
            raise ValueError(
                f"this state is of {key} {state.get(key)!r}, here it is {expected!r}: what it holds is not due here. "
                "Call flush() before saving where that may change"
            )


def in_order(
    tensors: Mapping[str, torch.Tensor | None], maker: BucketMaker, *, own_dtype: bool
) -> list[torch.Tensor | None]:
    """The tensors by number of the parameter, on its device.

    Args:
        tensors: by name of the parameter.
        maker: has the parameters.
        own_dtype: each has its parameter's dtype; else it is complex where that is.

    Raises:
        ValueError: they are of another model.
    """
    foreign = sorted(set(tensors) ^ set(maker.parameters.names))
    if foreign:
        raise ValueError(f"this state is of another model: only one of them has {', '.join(foreign[:8])}")
    found: list[torch.Tensor | None] = []
    for name, parameter in zip(maker.parameters.names, maker.parameters.tensors, strict=True):
        one = tensors[name]
        if one is None:
            found.append(None)
            continue
        same = one.dtype is parameter.dtype if own_dtype else one.is_complex() == parameter.is_complex()
        if not same or one.shape != parameter.shape:
            raise ValueError(
                f"this state is of another model: {name} is {tuple(one.shape)}, {one.dtype} there and "
                f"{tuple(parameter.shape)}, {parameter.dtype} here"
            )
        found.append(one.detach().to(parameter.device))
    return found
