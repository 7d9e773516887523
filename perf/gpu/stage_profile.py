"""Stage 7, where time is left: what NVIDIA's tools say of walks.py.

--tool ncu        sectors between L1 and L2 and bytes of DRAM beside the 12 bytes per element that are needed
--tool memcheck   compute-sanitizer: accesses outside of allocations
--tool initcheck  compute-sanitizer: reads of what nobody wrote
"""

from __future__ import annotations

import csv
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import walks
from gpu_check import find_tool
from records import BenchError
from stage import Skipped, Stage, entry

PROGRAM = Path(__file__).resolve().parent / "walks.py"
READ, WRITTEN = "lts__t_sectors_srcunit_tex_op_read.sum", "lts__t_sectors_srcunit_tex_op_write.sum"
DRAM = ("dram__bytes_read.sum", "dram__bytes_write.sum")
DURATION = "gpu__time_duration.sum"
FABRIC = "lts__t_sectors_srcunit_ltcfabric.sum"  # between the halves of the L2: recorded, no part of what is judged
SECTOR_BYTES, BYTES_PER_ELEMENT = 32, 12
L2_BOUNDS: Mapping[str, float] = {"one": 1.02, "gpt2": 1.02, "tiny": 1.06}
DRAM_WITHIN = 0.05
KERNELS = (
    "_pack_kernel",
    "_unpack_kernel",
    "_walk_kernel",
    "_parameter_totals_kernel",
    "_total_kernel",
    "_parameter_sources_kernel",
    "_first_source_kernel",
)
ERROR_STATUS = 9


def run(stage: Stage) -> None:
    tool = stage.chosen["tool"]
    if tool == "ncu":
        count_sectors(stage)
    else:
        sanitize(stage, tool)


def count_sectors(stage: Stage) -> None:
    """Six launches under ncu."""
    program = _needed("ncu")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "ncu.csv")
        text = ""
        # A GPU without a second half of L2 does not know the last metric.
        for metrics in ((READ, WRITTEN, *DRAM, DURATION, FABRIC), (READ, WRITTEN, *DRAM, DURATION)):
            command = [program, "--clock-control", "none", "--target-processes", "all", "--print-units", "base"]
            command += ["-k", "regex:^_(un)?pack_kernel$", "--launch-count", "6", "--metrics", ",".join(metrics)]
            command += ["--csv", "--page", "raw", "--log-file", str(log), sys.executable, str(PROGRAM), "sectors"]
            said = _run(command, stage)
            text = log.read_text() if log.exists() else ""
            if "Failed to find metric" not in text + said:
                break
    rows = read_ncu(text.splitlines())
    if len(rows) != 2 * len(walks.LISTS):
        raise Skipped(f"ncu measured {len(rows)} of 6 launches: {_reason(text + said)}")
    if "walked: sectors" not in said:
        raise BenchError(f"the program under ncu did not get to its end: {_reason(said)}")
    table: dict[str, dict[str, object]] = {}
    dram_off = 0.0
    for place, name in enumerate(walks.LISTS):
        pair, needed = rows[2 * place : 2 * place + 2], BYTES_PER_ELEMENT * walks.numel_of(name)
        l2 = sum(row[READ] + row[WRITTEN] for row in pair) * SECTOR_BYTES / needed
        dram = sum(row[metric] for row in pair for metric in DRAM) / needed
        table[name] = {"l2": l2, "dram": dram, "needed_bytes": needed, "pack": pair[0], "unpack": pair[1]}
        stage.note(sectors=table)
        dram_off = abs(dram - 1) if name == "one" else dram_off
        stage.at_most(f"L2 sectors moved over those needed, {name}", l2, L2_BOUNDS[name], "x")
    stage.at_most("DRAM bytes off 12 per element, 1 GiB of gradients", dram_off, DRAM_WITHIN)


def read_ncu(lines: Iterable[str]) -> list[dict[str, float]]:
    """Metrics of each launch, from `--csv --page raw`: a header, a row of units, a row per launch."""
    quoted = [line for line in lines if line.startswith('"')]
    rows = []
    for row in csv.DictReader(quoted):
        if not row.get("ID"):
            continue  # units
        numbers = {}
        for name, value in row.items():
            if name is not None and "__" in name and isinstance(value, str):
                try:
                    numbers[name] = float(value.replace(",", ""))
                except ValueError:
                    numbers[name] = float("nan")
        rows.append(numbers)
    return rows


def sanitize(stage: Stage, tool: str) -> None:
    """Small buckets under compute-sanitizer."""
    program = _needed("compute-sanitizer")
    command = [program, "--tool", tool, "--error-exitcode", str(ERROR_STATUS)]
    for kernel in KERNELS:
        command += ["--kernel-name", f"kernel_substring={kernel}"]
    said = _run([*command, sys.executable, str(PROGRAM), "accesses"], stage)
    print(said[-20_000:], flush=True)
    found = re.findall(r"ERROR SUMMARY: (\d+) error", said)
    if not found or "walked: accesses" not in said:
        if re.search(r"not supported|Unable to|Failed to|permission", said, re.IGNORECASE):
            raise Skipped(f"compute-sanitizer could not work here: {_reason(said)}")
        raise BenchError(f"the program under {tool} did not get to its end: {_reason(said)}")
    stage.at_most(f"{tool}: errors", float(sum(map(int, found))), 0.0)


def _needed(tool: str) -> str:
    program = find_tool(tool)
    if program is None:
        raise Skipped(f"{tool} is not installed")
    return program


def _run(command: Sequence[str], stage: Stage) -> str:
    """What a command prints. The runner ends it with the stage, should it outlast its time here."""
    limit_s = max(1.0, stage.left_s() - 3)
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        try:
            process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise Skipped(f"{Path(command[0]).name} was not done after {limit_s:.0f} s") from None
        output.seek(0)
        return output.read()


def _reason(text: str) -> str:
    """The line that says what went wrong."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if re.search(r"error|permission|not supported|failed", line, re.IGNORECASE)]
    return (telling or lines[-1:] or ["it said nothing"])[0]


if __name__ == "__main__":
    entry(run, tool=("ncu", "memcheck", "initcheck"))
