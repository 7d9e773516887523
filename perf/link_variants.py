"""Who takes part in the link benchmark: those of the step benchmark that change what travels or when, and PowerSGD.

no DDP                                  each rank alone; beside it the same with a clock on every gradient
torch DDP's four forms                  with and without views, with and without batched copies
torch's 16-bit hooks                    with and without views, and with batched copies; one of these twice
with buckets of 2, 4, 8 MiB             torch DDP and its bf16 hook, views: sizes that a user could find by trying
torch PowerSGD rank 1, rank 4           an approximation: it is timed, and its gradients are only to be finite
ours native, bf16, fp16, int8, int4     the wrapper by wire, native with views too
ours auto                               the wrapper with native, bf16 and int8, of which its steps choose
the hook                                fused_hook on torch's DDP
torch HSDP; HSDP bf16, int8, int4       only where they are asked for: two replicas of FSDP2's model, of four ranks
                                        each over two, by torch's all-reduce, with bf16 reduction too, and by
                                        `set_fsdp_comms`
torch FSDP2; FSDP2 bf16, int8, int4     the same where each rank has a shard of the model, by the reduce-scatter
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence

import harness
import step_variants
import torch
import torch.distributed as dist
from link_bound import AUTO, AUTO_WIRES
from records import BenchError
from step_variants import BF16, FLOOR, FP16, HOOK_BF16, NATIVE, NATIVE_VIEWS, TORCH_HOOKS, Variant
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fusedreduce
from fusedreduce.config import Wire
from fusedreduce.kernels.encodings import ENCODINGS

CLOCKED = "no DDP, clocked"
POWERSGD = "powersgd"  # as Variant.wire: of no dtype
POWERSGD_RANKS = (1, 4)
POWERSGD_START = 2  # steps that are averaged exactly first; torch takes no fewer
ENCODED = {f"ours {wire}": wire for wire in ENCODINGS}
OURS = (NATIVE, NATIVE_VIEWS, BF16, FP16, HOOK_BF16)
ONE_BUCKET_MB = 100_000
SIZES_MB = (2, 4, 8)
# Where nothing but the wire decides, the quickest of torch's; it takes part twice.
STRONGEST = step_variants.strongest_hook("bf16")
AGAIN = f"{STRONGEST}, again"
QUICK = (harness.TORCH_STRONGEST, STRONGEST, AGAIN, NATIVE, NATIVE_VIEWS, BF16)
# As Variant.side: no rivals of DDP's.
TORCHS_HSDP, OUR_HSDP = "torch's hsdp", "hsdp"
TORCHS_FSDP2, OUR_FSDP2 = "torch's fsdp2", "fsdp2"  # which gather parameters: no bound or count of DDP's is theirs
FSDP_WIRES: tuple[Wire, ...] = ("bf16", "int8", "int4")
SHARDS = (TORCHS_HSDP, OUR_HSDP, TORCHS_FSDP2, OUR_FSDP2)
# What only the step benchmark asks.
_LEFT_OUT = ("torch allreduce_hook, views", step_variants.NOOP, step_variants.TORCH_AGAIN)


def variants() -> dict[str, Variant]:
    """All of them, the floor first."""
    found = step_variants.variants()
    for wire, hook in TORCH_HOOKS.items():
        found[f"torch {wire}_compress_hook"] = Variant(build=harness.hooked(hook), side="torch", wire=wire)
    for rank in POWERSGD_RANKS:
        found[f"torch PowerSGD rank {rank}"] = Variant(build=_powersgd(rank), side="torch", wire=POWERSGD)
    for size_mb in SIZES_MB:
        options = {"gradient_as_bucket_view": True, "bucket_cap_mb": size_mb}
        found[sized("torch DDP, views", size_mb)] = Variant(build=harness.torch_ddp(**options), side="torch")
        hook = harness.hooked(TORCH_HOOKS["bf16"], **options)
        found[sized("torch bf16_compress_hook, views", size_mb)] = Variant(build=hook, side="torch", wire="bf16")
    ours = {name: found[name] for name in OURS}
    for name, wire in ENCODED.items():
        ours[name] = step_variants.wrapper(wire=wire)
    auto = step_variants.wrapper(wire=AUTO_WIRES)
    ours[AUTO] = dataclasses.replace(auto, wire=AUTO_WIRES[-1])  # the coarsest, for checks
    torchs = {name: variant for name, variant in found.items() if variant.side == "torch" and name not in _LEFT_OUT}
    floor = found[FLOOR]
    shards = {}
    for kind, torchs_side, our_side in (("HSDP", TORCHS_HSDP, OUR_HSDP), ("FSDP2", TORCHS_FSDP2, OUR_FSDP2)):
        replicates = kind == "HSDP"
        for name, dtype in ((kind, None), (f"{kind}, bf16 reduce", torch.bfloat16), (f"{kind}, again", None)):
            wire = "native" if dtype is None else "bf16"
            shards[f"torch {name}"] = Variant(build=_sharded(replicates, dtype), side=torchs_side, wire=wire)
        for wire in FSDP_WIRES:
            shards[f"{kind} {wire}"] = Variant(build=_sharded(replicates, wire=wire), side=our_side, wire=wire)
    return {FLOOR: floor, CLOCKED: floor, **torchs, AGAIN: found[STRONGEST], **ours, **shards}


def sized(name: str, size_mb: int) -> str:
    """The variant `name` with buckets of another size than torch's own."""
    return f"{name}, buckets of {size_mb} MiB"


SIZED = frozenset(
    sized(name, size_mb) for name in ("torch DDP, views", "torch bf16_compress_hook, views") for size_mb in SIZES_MB
)


def picked(names: Sequence[str]) -> dict[str, Variant]:
    """Those that are called as one of `names` or, if none is called so, hold it; and the floors, always.

    Args:
        names: none: all take part but those of FSDP2 and HSDP.

    Raises:
        BenchError: a name that is in none.
    """
    found = variants()
    taken = {
        name for name, variant in found.items() if variant.side == "floor" or not (names or variant.side in SHARDS)
    }
    for asked in names:
        like = [name for name in found if asked in name]
        if not like:
            raise BenchError(f"no variant {asked!r}; there are: {', '.join(found)}")
        taken.update([asked] if asked in found else like)
    return {name: variant for name, variant in found.items() if name in taken}


def of_shards(names: Sequence[str]) -> bool:
    """Whether those that are picked by `names` are FSDP2's models, and no others."""
    return all(variant.side in ("floor", *SHARDS) for variant in picked(names).values())


def torch_best(medians_ms: dict[str, float], found: dict[str, Variant], *, sized: bool = False) -> dict[str, str]:
    """By wire the quickest of torch's with as many bytes: 16-bit hooks are one, whichever of the two dtypes.

    `sized`: those with other bucket sizes than torch's own count too.
    """
    best = {}
    for wire in ("native", "bf16", "fp16"):
        equal = {"native": ("native",)}.get(wire, ("bf16", "fp16"))
        rivals = [
            name
            for name, variant in found.items()
            if variant.side == "torch" and variant.wire in equal and name in medians_ms and name != AGAIN
            if sized or name not in SIZED
        ]
        if rivals:
            best[wire] = min(rivals, key=medians_ms.__getitem__)
    return best


def ours_best(medians_ms: dict[str, float], found: Collection[str]) -> dict[str, str]:
    """By wire the quickest of ours; where none has a time, the first that took part."""
    forms = {"native": (NATIVE, NATIVE_VIEWS), "bf16": (BF16,), "fp16": (FP16,)}
    forms |= {wire: (name,) for name, wire in ENCODED.items()}
    taken = {wire: [name for name in names if name in found] for wire, names in forms.items()}
    return {wire: min(names, key=lambda name: medians_ms.get(name, math.inf)) for wire, names in taken.items() if names}


def noise(medians_ms: dict[str, float]) -> float | None:
    """The strongest of torch's twice, as a ratio; None: it did not take part twice."""
    if AGAIN not in medians_ms or STRONGEST not in medians_ms:
        return None
    return medians_ms[AGAIN] / medians_ms[STRONGEST]


def _sharded(replicates: bool, reduce_dtype: torch.dtype | None = None, wire: Wire | None = None) -> harness.Build:
    """A model of two replicas, or of which each rank has a shard; with a group of parameters per module of its first
    sequence, and one of the rest."""

    def build(model: nn.Module) -> nn.Module:
        device, ranks = next(model.parameters()).device.type, dist.get_world_size()
        shape, names = ((2, ranks // 2), ("replicate", "shard")) if replicates else ((ranks,), ("shard",))
        mesh = init_device_mesh(device, shape, mesh_dim_names=names)
        policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
        sequence = next((one for one in model.modules() if isinstance(one, nn.Sequential)), nn.Sequential())
        for module in sequence:
            if any(True for _ in module.parameters()):
                fully_shard(module, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        if wire is not None and replicates:
            fusedreduce.set_fsdp_comms(model, all_reduce=wire)
        elif wire is not None:
            fusedreduce.set_fsdp_comms(model, reduce_scatter=wire)
        return model

    return build


def _powersgd(rank: int) -> harness.Build:
    def build(model: nn.Module) -> nn.Module:
        state = powersgd.PowerSGDState(
            None,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=POWERSGD_START,
        )
        # One bucket: it issues collectives from callbacks, and those of two buckets cross on Gloo, rank by rank.
        options = {"gradient_as_bucket_view": True, "bucket_cap_mb": ONE_BUCKET_MB}
        return harness.hooked(powersgd.powerSGD_hook, state, **options)(model)

    return build
