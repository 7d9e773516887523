"""Comm hooks by name, torch's, ours on a wire, built-in ones: functions that register them; and what they are shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import BuiltinCommHookType  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fusedreduce

Register = Callable[[TorchDDP], None]


def _built_in(kind: str) -> Register:
    return lambda ddp: ddp._register_builtin_comm_hook(getattr(BuiltinCommHookType, kind))


def _power_sgd(ddp: TorchDDP) -> None:
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=3, matrix_approximation_rank=2)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def _post_local_sgd(ddp: TorchDDP) -> None:
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    state = post_localSGD_hook.PostLocalSGDState(None, group, start_localSGD_iter=4)
    ddp.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)


class Shown:
    """One bucket, as DDP would show it: the methods of dist.GradBucket that a hook may call."""

    def __init__(
        self, index: int, parameters: Sequence[torch.Tensor], *, last: bool = True, buffer: Any = None
    ) -> None:
        self._index, self._parameters, self._last = index, list(parameters), last
        self._buffer = torch.cat([one.detach().reshape(-1) for one in parameters]) if buffer is None else buffer

    def index(self) -> int:
        return self._index

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def parameters(self) -> list[torch.Tensor]:
        return self._parameters

    def is_last(self) -> bool:
        return self._last


def _fused(wire: Any) -> Register:
    return lambda ddp: ddp.register_comm_hook(fusedreduce.FusedHookState(wire=wire), fusedreduce.fused_hook)


HOOKS: dict[str, Register] = {
    "allreduce": lambda ddp: ddp.register_comm_hook(None, default_hooks.allreduce_hook),
    "fp16": lambda ddp: ddp.register_comm_hook(None, default_hooks.fp16_compress_hook),
    "fp16 around allreduce": lambda ddp: ddp.register_comm_hook(
        dist.group.WORLD, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)
    ),
    "PowerSGD": _power_sgd,
    "post-localSGD": _post_local_sgd,
    "noop": lambda ddp: ddp.register_comm_hook(None, debugging_hooks.noop_hook),
    "fused native": _fused("native"),
    "fused bf16": _fused("bf16"),
    "built-in allreduce": _built_in("ALLREDUCE"),
    "built-in fp16": _built_in("FP16_COMPRESS"),
}
