"""Compiles every kernel ahead of time into Triton's cache, without a GPU: where an image is built, for one.

    python -m fusedreduce.kernels.aot --arch sm_90 [--arch sm_100] [--jobs 2]

What is compiled is what `Variant.launch` launches: the same signature, constexprs, warps and options, and no
alignment. Exit status 1 if a kernel does not compile, 2 if Triton was imported as an interpreter.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any, NamedTuple, TypeVar

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from . import combine, combine_encoded, decode, encode, pack, stats, triton_versions, unpack, walk
from .variants import Variant, interpreted, tuning_for, warp_size

_R = TypeVar("_R")


class Target(NamedTuple):
    """An architecture: its name, and Triton's (backend, architecture)."""

    name: str
    key: tuple[str, int | str]


TARGETS: Mapping[str, Target] = {
    name: Target(name, key)
    for name, key in (
        ("sm_80", ("cuda", 80)),
        ("sm_90", ("cuda", 90)),
        ("sm_100", ("cuda", 100)),
        ("gfx942", ("hip", "gfx942")),
        ("sm_86", ("cuda", 86)),
        ("sm_89", ("cuda", 89)),
        ("sm_120", ("cuda", 120)),
        ("gfx950", ("hip", "gfx950")),
        ("gfx1100", ("hip", "gfx1100")),
    )
}
CORES = len(os.sched_getaffinity(0))
INTERPRETED = "TRITON_INTERPRET is set, with which triton compiles nothing: unset it"


def all_variants(target: Target) -> tuple[Variant, ...]:
    """All variants that can be launched on an architecture (of encode, those with one option each and with all)."""
    launch = tuning_for(target.key), target.key[0]
    modules = (pack, unpack, walk, combine, encode, combine_encoded, decode)
    walks = [variant for module in modules for variant in module.variants(*launch)]
    return (*walks, *stats.variants())


def compile_variant(variant: Variant, target: Target) -> Any:
    """Triton's CompiledKernel; it uses the same entry of Triton's cache as a launch."""
    constexprs = {name: None for name, kind in variant.signature.items() if kind == "constexpr"}
    # No argument has attributes (alignment, range), but a launch passes empty ones for constexprs.
    attributes = triton_versions.attributes_of_constexprs(
        {place: variant.constexprs.get(name) for place, name in enumerate(variant.signature) if name in constexprs}
    )
    source = ASTSource(
        variant.kernel, dict(variant.signature), constexprs={**constexprs, **variant.constexprs}, attrs=attributes
    )
    options = {"num_warps": variant.num_warps, **variant.options}
    return triton.compile(source, target=GPUTarget(*target.key, warp_size(target.key)), options=options)


def in_processes(
    work: Callable[[str, int], _R], targets: Sequence[Target], jobs: int
) -> Iterator[list[tuple[Variant, Future[_R]]]]:
    """The variants of each target in turn, each with what `work` gives of it.

    Args:
        work: takes a target's name and the index of one of `all_variants`, which hold functions and so cannot be sent
            to a process.
        targets: architectures.
        jobs: number of processes.
    """
    # Spawned, not forked: numpy and torch have threads by now, and a fork would copy their locks.
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        started = [
            [(variant, pool.submit(work, target.name, index)) for index, variant in enumerate(all_variants(target))]
            for target in targets
        ]
        yield from started


def reason(error: BaseException) -> str:
    """Why a variant did not compile, in one line."""
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m fusedreduce.kernels.aot", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--arch", action="append", choices=tuple(TARGETS), required=True, help="which to compile for (repeatable)"
    )
    parser.add_argument("--jobs", type=int, default=CORES, help="processes (default: cores)")
    chosen = parser.parse_args(arguments)
    if interpreted():
        parser.error(INTERPRETED)
    failed = False
    targets = [TARGETS[name] for name in dict.fromkeys(chosen.arch)]
    for target, variants in zip(targets, in_processes(_compile_nth, targets, max(1, chosen.jobs)), strict=True):
        reasons = {}
        for variant, future in variants:
            error = future.exception()  # of a compiler that ends its process, for one
            reasons[variant.label] = future.result() if error is None else reason(error)
        faults = [f"FAILED {label} on {target.name}: {why}" for label, why in reasons.items() if why]
        print("\n".join([*faults, f"{target.name}: {len(reasons) - len(faults)} kernels compiled"]), flush=True)
        failed = failed or bool(faults)
    return int(failed)


def _compile_nth(target: str, index: int) -> str | None:
    try:
        compile_variant(all_variants(TARGETS[target])[index], TARGETS[target])
    except Exception as error:  # whatever the compiler raises, which need not be fit to be sent to another process
        return reason(error)
    return None


if __name__ == "__main__":
    sys.exit(main())
