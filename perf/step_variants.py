"""Who takes part in the step benchmark: torch DDP in its forms, our wrapper, our hook on torch DDP, and the floors.

A variant says how a model is wrapped, what its gradients must be, and how it clips and unscales: torch's way for
torch's class, ours for ours, each at its fastest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import harness
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks

import fusedreduce

FLOOR = "no DDP"
FLOOR_SAME_WORK = "no DDP, clipped or scaled"
TORCH_DEFAULT = "torch DDP"
TORCH_AGAIN = "torch DDP, again"
TORCH_VIEWS = "torch DDP, views"
NOOP = "no-op hook, views"
NATIVE = "ours native"
NATIVE_VIEWS = "ours native, views"
NATIVE_LATE = "ours native, no overlap"
BF16 = "ours bf16"
FP16 = "ours fp16"
HOOK_NATIVE = "fused_hook native, views"
HOOK_BF16 = "fused_hook bf16, views"
HOOK_FP16 = "fused_hook fp16, views"
TORCH_HOOKS: dict[str, Callable[..., Any]] = {
    "fp16": default_hooks.fp16_compress_hook,
    # Not as it is: by its name DDP refuses it where there is no NCCL, though it runs on Gloo as well.
    "bf16": lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket),
}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One row of the table.

    Args:
        build: wraps a model.
        side: "floor" exchanges nothing, "torch" is torch's alone, "wrapper" and "hook" are ours.
        wire: bounds the error.
        sums: False: its gradients stay this rank's own.
        plain: it neither clips nor scales, whatever the others do.
        clip: where steps clip, how: "torch" by its clip_grad_norm_; "torch folded" by its norm, the coefficient set
            as a fused optimizer's grad_scale by hand; "in place" by ours, in one launch; "folded" by ours, through
            the optimizer; "reused" the same with the norm out of the reduction.
    """

    build: harness.Build
    side: str
    wire: str = "native"
    sums: bool = True
    plain: bool = False
    clip: str = "torch"


def torch_side(*, clips: bool) -> dict[str, Variant]:
    """torch DDP's forms, the first one twice, and its hooks.

    Args:
        clips: also what a user could do by hand beyond `clip_grad_norm_`.
    """
    found = {name: Variant(build=build, side="torch") for name, build in harness.torch_variants().items()}
    found[TORCH_AGAIN] = found[TORCH_DEFAULT]
    views = {"gradient_as_bucket_view": True}
    allreduce = harness.hooked(default_hooks.allreduce_hook, **views)
    found["torch allreduce_hook, views"] = Variant(build=allreduce, side="torch")
    for wire, hook in TORCH_HOOKS.items():
        found[f"torch {wire}_compress_hook, views"] = Variant(
            build=harness.hooked(hook, **views), side="torch", wire=wire
        )
        name = strongest_hook(wire)
        if harness.HAS_BATCHED_COPIES:
            build = harness.hooked(hook, batched_grad_copy=True, **views)
            found[name] = Variant(build=build, side="torch", wire=wire)
        if clips:
            found[f"{name}, folded by hand"] = dataclasses.replace(found[name], clip="torch folded")
    found[NOOP] = Variant(build=harness.hooked(debugging_hooks.noop_hook, **views), side="torch", sums=False)
    return found


def strongest_hook(wire: str) -> str:
    """The name of torch's quickest hook of that wire: with views, and with copies of whole buckets where torch can."""
    return f"torch {wire}_compress_hook{', batched copies' * harness.HAS_BATCHED_COPIES}, views"


def wrapper(*, views: bool = False, reuse_norm: bool = False, **config: Any) -> Variant:
    """Ours, with a ReduceConfig of these options."""
    reduce = fusedreduce.ReduceConfig(grad_stats=reuse_norm, **config)

    def build(model: nn.Module) -> nn.Module:
        options = {"gradient_as_bucket_view": views, **harness.OWN_BUFFERS}
        return fusedreduce.DistributedDataParallel(model, reduce=reduce, **options)

    clip = "reused" if reuse_norm else "folded"
    return Variant(build=build, side="wrapper", wire=reduce.wire_text, clip=clip)


def our_side(*, clips: bool) -> dict[str, Variant]:
    """The wrapper by wire, by where gradients live, by when collectives start; the hook by wire.

    Args:
        clips: also those whose norm comes out of the reduction.
    """

    def hook(wire: Any) -> Variant:
        def build(model: nn.Module) -> nn.Module:
            state = fusedreduce.FusedHookState(wire=wire)
            return harness.hooked(fusedreduce.fused_hook, state, gradient_as_bucket_view=True)(model)

        return Variant(build=build, side="hook", wire=wire, clip="in place")

    found = {
        NATIVE: wrapper(wire="native"),
        NATIVE_VIEWS: wrapper(wire="native", views=True),
        NATIVE_LATE: wrapper(wire="native", overlap=False),
        BF16: wrapper(wire="bf16"),
        FP16: wrapper(wire="fp16"),
    }
    if clips:
        found[f"{NATIVE_VIEWS}, norm reused"] = wrapper(wire="native", views=True, reuse_norm=True)
        found[f"{BF16}, norm reused"] = wrapper(wire="bf16", reuse_norm=True)
    return {**found, HOOK_NATIVE: hook("native"), HOOK_BF16: hook("bf16"), HOOK_FP16: hook("fp16")}


def variants(*, clips: bool = False, scales: bool = False) -> dict[str, Variant]:
    """Everything that is measured, the floor first.

    Args:
        clips, scales: what a step does beside backward and the optimizer; there is a second floor then that does so
            too.
    """
    floor = Variant(build=lambda model: model, side="floor", sums=False, plain=True)
    found = {FLOOR: floor}
    if clips or scales:
        found[FLOOR_SAME_WORK] = Variant(build=floor.build, side="floor", sums=False)
    return {**found, **torch_side(clips=clips and not scales), **our_side(clips=clips)}
