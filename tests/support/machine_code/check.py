"""Compiles every kernel as `fusedreduce.kernels.aot` does, for the architectures that are RECORDED or named, and reads
the machine code.

    PYTHONPATH=tests python -m support.machine_code [--arch sm_90 | --arch others] [--jobs 2] [--json FILE]
    PYTHONPATH=tests python -m support.machine_code --record

The first is `make compile`. `rules` says what the code must look like; `record` keeps how good it was, as --record
found it. Exit status 1 if a rule is broken, a kernel does not compile or a figure is worse than recorded, 2 if Triton
was imported as an interpreter. Columns:

    regs      registers of a thread (AMD: vector registers)
    KiB/SM    loads in flight: resident warps x bytes of vector loads that a thread issues in one block x threads of
              a warp. Resident warps are what registers, threads, blocks and shared memory of one multiprocessor (AMD:
              compute unit, by LLVM's own figure) allow, in whole programs. The worst dtype branch counts.
    ins/16B   instructions of a turn of the tile loop for 16 bytes of the wider side, along the shortest path. The worst
              dtype branch counts.
    loads, stores   accesses to gradients and wire in the code, as width in bytes x how many
    !         a rule is broken; the lines below the tables say which

Example, sm_90, 64 registers, 128 threads, 4 loads of 16 bytes: 65536 / (64 x 32) = 32 warps x 64 bytes x 32 = 64 KiB.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import triton

from fusedreduce.kernels import aot, triton_versions
from fusedreduce.kernels.aot import TARGETS, Target
from fusedreduce.kernels.variants import Variant, interpreted, unsupported, warp_size

from .disassembly import parse_gcn, parse_sass
from .record import RECORD, BranchRow, Place, Row, Table, compare, dump, load
from .rules import BranchFigures, Violation, examine, fusion

# Compiled wherever none is named, by `make test` too; machine_code.json has their figures.
RECORDED = ("sm_80", "sm_90", "sm_100", "gfx942")


class Multiprocessor(NamedTuple):
    """How much one of NVIDIA's holds."""

    warps: int
    programs: int
    shared_bytes: int


# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability". Of AMD's, LLVM reports occupancy.
MULTIPROCESSORS: Mapping[str, Multiprocessor] = {
    "sm_80": Multiprocessor(warps=64, programs=32, shared_bytes=164 * 1024),
    "sm_90": Multiprocessor(warps=64, programs=32, shared_bytes=228 * 1024),
    "sm_100": Multiprocessor(warps=64, programs=32, shared_bytes=228 * 1024),
    "sm_86": Multiprocessor(warps=48, programs=16, shared_bytes=100 * 1024),
    "sm_89": Multiprocessor(warps=48, programs=24, shared_bytes=100 * 1024),
    "sm_120": Multiprocessor(warps=48, programs=24, shared_bytes=100 * 1024),
}
_REGISTERS = 65536  # of a multiprocessor
_REGISTERS_PER_WARP = 256  # granularity of their allocation
_RESERVED_SHARED_BYTES = 1024  # of each program, by the system
_SIMDS = 4  # of a compute unit
_COMMAND = "PYTHONPATH=tests python -m support.machine_code"


@dataclass(frozen=True)
class Report:
    """One row of the table. `unsupported` is the reason why the kernel cannot be compiled, or None."""

    kernel: str
    target: str
    unsupported: str | None = None
    violations: tuple[Violation, ...] = ()
    registers: int = 0
    spills: int = 0
    resident_warps: int = 0
    in_flight_bytes: int | None = None
    branches: Mapping[str, BranchFigures] = dataclasses.field(default_factory=dict)
    loads: Mapping[int, int] = dataclasses.field(default_factory=dict)
    stores: Mapping[int, int] = dataclasses.field(default_factory=dict)


def report(variant: Variant, target: Target) -> Report:
    """Compiles one variant for one architecture and judges its machine code."""
    reason = unsupported(target.key)
    if reason is not None:
        return Report(variant.label, target.name, unsupported=reason)
    try:
        compiled = aot.compile_variant(variant, target)
    except Exception as error:  # whatever the compiler raises: what fails and is not listed fails the check
        return failed(variant, target, error)
    if target.key[0] == "cuda":
        disassembly, usage = _dump(compiled.asm["cubin"])
        blocks = parse_sass(disassembly, compiled.asm["ptx"])
        registers = _number(r"REG:(\d+)", usage)
        must_be_zero = {name: _number(rf"{name}:(\d+)", usage) for name in ("STACK", "LOCAL")}
        most = MULTIPROCESSORS[target.name]
        resident = resident_warps(most, registers, compiled.metadata.shared, variant.num_warps)
    else:
        assembly = compiled.asm["amdgcn"]
        blocks = parse_gcn(assembly)
        registers = _number(r"\.vgpr_count:\s*(\d+)", assembly)
        spills = ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size")
        must_be_zero = {name: _number(rf"\.{name}:\s*(\d+)", assembly) for name in spills}
        resident = _whole(_SIMDS * _number(r"; Occupancy: (\d+)", assembly), variant.num_warps)
    lanes = warp_size(target.key)
    found = examine(variant, target.name, blocks, variant.num_warps * lanes, must_be_zero)
    fused = fusion(variant, target.name, compiled.asm.get("ptx", ""))
    loading = [figures.load_bytes for figures in found.branches.values() if figures.load_bytes]
    return Report(
        kernel=variant.label,
        target=target.name,
        violations=(*found.violations, *fused),
        registers=registers,
        spills=sum(must_be_zero.values()),
        resident_warps=resident,
        in_flight_bytes=resident * min(loading) * lanes if loading else None,
        branches=found.branches,
        loads=found.loads,
        stores=found.stores,
    )


def failed(variant: Variant, target: Target, error: BaseException) -> Report:
    """The row of a variant that did not compile."""
    detail = f"{aot.reason(error)}; not listed in kernels/variants.py"
    violation = Violation(variant.label, target.name, "", "compiles", detail)
    return Report(variant.label, target.name, violations=(violation,))


def _dump(cubin: bytes) -> tuple[str, str]:
    """Disassembly with PTX lines, and resource usage, by the tools in Triton's package."""
    tools = triton.knobs.nvidia
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        disassembly, usage = (
            subprocess.run([*command, file.name], capture_output=True, text=True, check=True).stdout
            for command in ((tools.nvdisasm.path, "-gp", "-c"), (tools.cuobjdump.path, "-res-usage"))
        )
    return disassembly, usage


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found, f"the compiler's output has no {pattern}"
    return int(found[1])


def resident_warps(most: Multiprocessor, registers: int, shared_bytes: int, num_warps: int) -> int:
    """Warps that one NVIDIA multiprocessor holds, in whole programs."""
    warp_registers = -(-registers * warp_size(("cuda", 0)) // _REGISTERS_PER_WARP) * _REGISTERS_PER_WARP
    warps = min(most.warps, _REGISTERS // warp_registers, most.programs * num_warps)
    return _whole(min(warps, most.shared_bytes // (shared_bytes + _RESERVED_SHARED_BYTES) * num_warps), num_warps)


def _whole(warps: int, num_warps: int) -> int:
    return warps // num_warps * num_warps


def _report_nth(target: str, index: int) -> Report:
    return report(aot.all_variants(TARGETS[target])[index], TARGETS[target])


def report_all(targets: Sequence[Target], jobs: int) -> Iterable[list[Report]]:
    """The rows of each target in turn, compiled by `jobs` processes."""
    for target, variants in zip(targets, aot.in_processes(_report_nth, targets, jobs), strict=True):
        rows = []
        for variant, future in variants:
            error = future.exception()  # a compiler that ends its process, for one
            rows.append(future.result() if error is None else failed(variant, target, error))
        yield rows


def table(rows: Sequence[Report]) -> str:
    """The rows of one target as text, 100 columns at most."""
    lines = [f"{rows[0].target:<38} regs  KiB/SM  ins/16B  {'loads':<21}stores"]
    for row in rows:
        if row.unsupported is not None:
            lines.append(f"  {row.kernel:<36}unsupported: {row.unsupported}")
            continue
        costs = [figures.per_16_bytes for figures in row.branches.values() if figures.per_16_bytes is not None]
        in_flight = "-" if row.in_flight_bytes is None else f"{row.in_flight_bytes / 1024:.0f}"
        cost = f"{max(costs):.1f}" if costs else "-"
        loads, stores = (
            " ".join(f"{width}x{times}" for width, times in counts.items()) or "-" for counts in (row.loads, row.stores)
        )
        mark = "!" if row.violations else " "
        lines.append(f"{mark} {row.kernel:<36}{row.registers:>5}{in_flight:>8}{cost:>9}  {loads:<21}{stores}")
    return "\n".join(lines)


def row_of(report: Report) -> Row:
    """The figures of a report that are recorded."""
    lanes = warp_size(TARGETS[report.target].key)
    return Row(
        registers=report.registers,
        spills=report.spills,
        branches={
            branch: BranchRow(
                in_flight_bytes=report.resident_warps * figures.load_bytes * lanes,
                per_16_bytes=figures.per_16_bytes,
                loads=figures.loads,
                stores=figures.stores,
            )
            for branch, figures in report.branches.items()
        },
        unsupported=report.unsupported,
    )


def against_record(rows: Sequence[Report], path: Path) -> tuple[list[str], bool]:
    """Lines about figures that differ from those recorded in `path`, and whether any is worse."""
    try:
        recorded = load(path.read_text())
    except (OSError, ValueError) as error:
        return [f"FAILED {path.name}: {error}; write it with --record"], True
    if recorded.triton != triton.__version__:
        return [f"not compared: {path.name} is of triton {recorded.triton}, this is {triton.__version__}"], False
    # A kernel that did not compile is reported already, and has no figures.
    broken = {
        Place(row.target, row.kernel) for row in rows if any(fault.rule == "compiles" for fault in row.violations)
    }
    places = {Place(row.target, row.kernel): row for row in rows if row.target in RECORDED}
    found = {place: row_of(row) for place, row in places.items() if place not in broken}
    wanted = {place: row for place, row in recorded.rows.items() if place not in broken}
    changes = compare(wanted, found)
    worse = [change for change in changes if change.worse]
    lines = [f"{'FAILED' if change.worse else 'better'} {change}" for change in changes]
    if changes:
        meant = "If that is intended, record it" if worse else "Better than recorded: record it"
        lines.append(f"{meant}: {_COMMAND} --record, and commit {path.name}")
    return lines, bool(worse)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog=_COMMAND, description=__doc__.split("\n\n")[0])
    parser.add_argument("--record", action="store_true", help=f"write the figures of every kernel into {RECORD.name}")
    parser.add_argument(
        "--arch",
        action="append",
        choices=("others", *TARGETS),
        help=f"this one, or those that are not recorded (repeatable; default: {', '.join(RECORDED)})",
    )
    parser.add_argument("--jobs", type=int, default=aot.CORES, help="processes (default: cores)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too, with every branch")
    chosen = parser.parse_args(arguments)
    if chosen.record and chosen.arch:
        parser.error("--record is for those that are recorded, all of them: leave out --arch")
    if interpreted():
        parser.error(aot.INTERPRETED)
    rows: list[Report] = []
    groups = {"others": [name for name in TARGETS if name not in RECORDED]}
    names = dict.fromkeys(one for name in chosen.arch or RECORDED for one in groups.get(name, [name]))
    for group in report_all([TARGETS[name] for name in names], max(1, chosen.jobs)):
        print(table(group), flush=True)
        rows += group
    judged = triton_versions.VERSION in triton_versions.TESTED
    violations = [violation for row in rows for violation in row.violations if judged or violation.rule == "compiles"]
    for violation in violations:
        print(f"FAILED {violation}")
    skipped = sum(row.unsupported is not None for row in rows)
    print(f"{len(rows) - skipped} kernels compiled, {skipped} unsupported, {len(violations)} rules broken")
    if not judged:
        print(f"not judged: rules are for the machine code of versions that were tested, this is {triton.__version__}")
    worse = False
    if not chosen.record:
        lines, worse = against_record(rows, RECORD)
        print("\n".join(lines) or f"as recorded in {RECORD.name}, which is of {', '.join(RECORDED)}")
    elif not violations:
        found = {Place(row.target, row.kernel): row_of(row) for row in rows}
        RECORD.write_text(dump(Table(triton.__version__, found)))
        print(f"recorded in {RECORD}")
    if chosen.json:
        as_objects = [
            {**dataclasses.asdict(row), "violations": [violation._asdict() for violation in row.violations]}
            for row in rows
        ]
        chosen.json.write_text(json.dumps({"triton": triton.__version__, "kernels": as_objects}, indent=1) + "\n")
    return int(bool(violations) or worse)
