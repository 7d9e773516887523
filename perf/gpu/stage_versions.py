"""Stage 1: what this machine is, and that kernels are compiled for it: all variants, in parallel, into Triton's cache.

Then each is launched once, and what was launched must be a binary for this GPU, loaded by CUDA's driver. A launch that
compiles once more means that the ahead-of-time check looks at other code than what runs; that is counted. Meanwhile
what only the sweep launches is compiled, as far as the time goes.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import time
from concurrent.futures import ProcessPoolExecutor, as_completed, wait
from typing import Any

import sweep
import torch
import triton
from records import BenchError, provenance
from stage import Stage, count_compilations, entry, synchronize

from fusedreduce.kernels import aot, dispatch, measure, pack, scale, stats, unpack, variants
from fusedreduce.kernels.table import ChunkTable, PointerTable

CLOCKS = "clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,temperature.gpu,power.draw,power.limit,pstate"
REHEARSED_VARIANTS = 2
MOST_PROCESSES = 12  # each imports torch first
BUSY_S = 0.5
END_S = 6.0  # for what the pool is at when the time is over


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
    """Every variant that can be launched here, by several processes, and launches them; then what the sweep adds."""
    every = all_variants(target)
    needed = len(aot.all_variants(target))
    indices = list(range(len(every)))
    if stage.rehearse:
        indices = [*indices[:REHEARSED_VARIANTS], indices[-1]]
    jobs = min(len(indices), MOST_PROCESSES, len(os.sched_getaffinity(0)))
    stage.note(compile_processes=jobs, target=target.name)
    began_s = time.monotonic()
    # Spawned, not forked: CUDA is up in this process.
    pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))
    try:
        started = {index: pool.submit(compile_nth, target.key, index) for index in indices}
        count = sum(index < needed for index in indices)
        failed: list[str] = []
        numbers = {future: index for index, future in started.items() if index < needed}
        for done_count, future in enumerate(as_completed(numbers), 1):
            if (error := future.exception()) is not None:
                failed.append(_told(every[numbers[future]], error))
            took_s = round(time.monotonic() - began_s, 1)
            stage.note(compiled=done_count - len(failed), compile_failures=failed, compile_seconds=took_s)
        if failed:
            raise BenchError(f"{len(failed)} of {count} variants do not compile, the first: {failed[0]}")
        launch_and_look(stage)
        swept = {index: future for index, future in started.items() if index >= needed}
        done, late = wait(swept.values(), timeout=None if stage.rehearse else max(0.0, stage.left_s() - END_S))
        # A shape that does not compile is the sweep's to stumble over.
        wrong = [
            _told(every[index], error)
            for index, future in swept.items()
            if future in done and (error := future.exception()) is not None
        ]
        took_s = round(time.monotonic() - began_s, 1)
        stage.note(swept_compiled=len(done) - len(wrong), swept_failures=wrong, swept_seconds=took_s)
        if late:
            stage.skip(f"{len(late)} of {len(swept)} shapes of the sweep", "no time left to compile them ahead")
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _told(variant: variants.Variant, error: BaseException) -> str:
    return f"{variant.label}: {type(error).__name__}: {' '.join(str(error).splitlines()[:1])}"


def all_variants(target: aot.Target) -> list[variants.Variant]:
    """Everything that can be launched here, and behind it what only the sweep launches."""
    return [*aot.all_variants(target), *sweep.variants(target.key)]


def compile_nth(key: tuple[str, int | str], index: int) -> int:
    """In a process of the pool. Bytes of machine code."""
    target = next((one for one in aot.TARGETS.values() if one.key == key), aot.Target("here", key))
    variant = all_variants(target)[index]
    binary = aot.compile_variant(variant, target).asm["cubin" if key[0] == "cuda" else "hsaco"]
    if not binary:
        raise RuntimeError(f"{variant.label}: no machine code")
    return len(binary)


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
    for module in (pack, unpack, measure, scale, stats):
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
