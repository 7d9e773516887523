"""Stage 1: what this machine is, and that kernels are compiled for it: all variants, into Triton's cache.

Then each is launched once, and what was launched must be a binary for this GPU, loaded by CUDA's driver. A launch that
compiles once more means that the ahead-of-time check looks at other code than what runs; that is counted. Then what
only the sweep launches is compiled, as far as the time goes.

One process compiles, at 0.25 s a variant on a slow core: more of them would each import torch first, which from a cold
disk takes longer than all there is to compile.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from typing import Any

import sweep
import torch
import triton
from records import BenchError, provenance
from stage import Stage, count_compilations, entry, synchronize

from fusedreduce.kernels import dispatch, pack, stats, unpack, variants, walk
from fusedreduce.kernels.aot import compile as aot
from fusedreduce.kernels.table import ChunkTable, PointerTable

CLOCKS = "clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,temperature.gpu,power.draw,power.limit,pstate"
REHEARSED_VARIANTS = 2
BUSY_S = 0.5
END_S = 6.0  # kept for the variant that has begun, and for writing


def run(stage: Stage) -> None:
    stage.note(provenance=provenance(stage.device), clocks_idle=clocks())
    if variants.interpreted():
        raise BenchError("Triton was imported as an interpreter: TRITON_INTERPRET is set")
    if stage.device.type == "cuda":
        gpu = torch.cuda.get_device_properties(stage.device)
        stage.note(
            name=gpu.name,
            multiprocessors=gpu.multi_processor_count,
            memory_bytes=gpu.total_memory,
            l2_bytes=gpu.L2_cache_size,
            capability=torch.cuda.get_device_capability(stage.device),
            count=torch.cuda.device_count(),
        )
    compile_all(stage, target_of(stage))


def launch_and_look(stage: Stage) -> None:
    """What only a GPU can say of the compiled kernels."""
    if stage.device.type != "cuda":
        stage.skip("launches", "needs a GPU")
        return
    busy(stage.device)
    stage.note(clocks_busy=clocks())
    launch_all(stage)


def target_of(stage: Stage) -> aot.Target:
    """The GPU's architecture; one that `aot` has no figures for is compiled all the same."""
    key: tuple[str, int | str] = ("cuda", 90)
    if stage.device.type == "cuda":
        key = variants.current_target(stage.device)
    known = (target for target in aot.TARGETS.values() if target.key == key)
    return next(known, aot.Target(f"sm_{key[1]}", key))


def compile_all(stage: Stage, target: aot.Target) -> None:
    """Every variant that can be launched here, and launches them; then what the sweep adds."""
    needed: Sequence[variants.Variant] = aot.all_variants(target)
    swept: Sequence[variants.Variant] = sweep.variants(target.key)
    if stage.rehearse:
        needed, swept = needed[:REHEARSED_VARIANTS], swept[-1:]
    stage.note(target=target.name)
    began_s = time.monotonic()
    failed: list[str] = []
    for count, variant in enumerate(needed, 1):
        failed += compile_one(variant, target)
        took_s = round(time.monotonic() - began_s, 1)
        stage.note(compiled=count - len(failed), compile_failures=failed, compile_seconds=took_s)
    if failed:
        raise BenchError(f"{len(failed)} of {len(needed)} variants do not compile, the first: {failed[0]}")
    launch_and_look(stage)
    wrong: list[str] = []  # a shape that does not compile is the sweep's to stumble over
    done = 0
    for variant in swept:
        if stage.left_s() < END_S and not stage.rehearse:
            stage.skip(f"{len(swept) - done} of {len(swept)} shapes of the sweep", "no time left to compile them ahead")
            break
        wrong += compile_one(variant, target)
        done += 1
    took_s = round(time.monotonic() - began_s, 1)
    stage.note(swept_compiled=done - len(wrong), swept_failures=wrong, swept_seconds=took_s)


def compile_one(variant: variants.Variant, target: aot.Target) -> list[str]:
    """Compiles one, into Triton's cache: [], or why it cannot be."""
    try:
        if aot.compile_variant(variant, target).asm["cubin" if target.key[0] == "cuda" else "hsaco"]:
            return []
        return [f"{variant.label}: no machine code"]
    except Exception as error:  # whatever the compiler raises
        return [f"{variant.label}: {type(error).__name__}: {' '.join(str(error).splitlines()[:1])}"]


def clocks() -> dict[str, str] | str:
    """What nvidia-smi says of clocks; read, never set."""
    command = ["nvidia-smi", f"--query-gpu={CLOCKS}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi cannot be asked: {type(error).__name__}"
    if done.returncode != 0:
        return f"nvidia-smi: {done.stdout.strip()[:200]}"
    return dict(zip(CLOCKS.split(","), map(str.strip, done.stdout.splitlines()[0].split(",")), strict=False))


def busy(device: torch.device) -> None:
    """Half a second of copying, so that the clocks are those of work."""
    source = torch.zeros(2**28, dtype=torch.uint8, device=device)
    into = torch.empty_like(source)
    ends_s = time.monotonic() + BUSY_S
    while time.monotonic() < ends_s:
        for _ in range(20):
            into.copy_(source)
        torch.cuda.synchronize(device)


def launch_all(stage: Stage) -> None:
    """Launches every variant once, and looks at what was launched."""
    with count_compilations() as hits:
        for wire, fp64, _stats in variants.TRANSFERS:
            dispatch.warm_up(stage.device, wire, fp64=fp64, stats=True)
        _launch_stats(stage.device)
        synchronize(stage.device)
    index = stage.device.index or 0
    kernels: dict[str, dict[str, object]] = {}
    for module in (pack, unpack, walk, stats):
        for name, kernel in vars(module).items():
            if name.endswith("_kernel") and hasattr(kernel, "device_caches"):
                kernels[name] = _proof(kernel.device_caches[index][0].values())
    driver = type(triton.runtime.driver.active)
    stage.note(
        triton_driver=f"{driver.__module__}.{driver.__qualname__}",
        triton_target=str(triton.runtime.driver.active.get_current_target()),
        launched=kernels,
        launches_from_cache=sum(hits),
    )
    bare = [name for name, proof in kernels.items() if not proof["compilations"] or proof["without_cubin"]]
    if bare:
        raise BenchError(f"not compiled for this GPU: {', '.join(bare)}")
    stage.at_most("launches that compiled what had been compiled ahead", float(hits.count(False)), 0.0)


def _proof(compiled: Any) -> dict[str, object]:
    """What the compilations of one kernel are: with a cubin each, and loaded."""
    every = list(compiled)
    bare = [one for one in every if not one.asm.get("cubin") or one.module is None]
    return {
        "compilations": len(every),
        "cubin_bytes": sum(len(one.asm.get("cubin", b"")) for one in every),
        "most_registers": max((one.n_regs for one in every), default=0),
        "spills": sum(one.n_spills for one in every),
        "without_cubin": len(bare),
    }


def _launch_stats(device: torch.device) -> None:
    """The second stages, on more rows than one block has."""
    chunks = ChunkTable([100_003], [0], [torch.float32], 100_003, chunk_numel=64)
    gradient = torch.ones(100_003, device=device)
    partials = chunks.new_partials(device)
    dispatch.measure([gradient], chunks, PointerTable(), partials)
    total = float(dispatch.reduce_partials(partials, chunks.spans(device)).total[0])
    if total != 100_003:
        raise BenchError(f"the sum of 100,003 ones is {total}")


if __name__ == "__main__":
    entry(run)
