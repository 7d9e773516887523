"""The host's time in one pack of a bucket, from `dispatch.pack` to Triton's launcher: no GPU is needed.

    python perf/bench_launch.py

CPU tensors pass for those of an sm_90, and the launcher does nothing; a real one asks CUDA about each pointer, and
launches. Ways take turns in one process: through the kernel that the first launch returned, the same again (how they
differ is the noise), and as Triton launches. Microseconds: median over rounds, with 20th and 80th percentile.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import records
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from support.fake_driver import FakeDriver
from support.launched import as_on_sm_90

from fusedreduce.kernels import dispatch
from fusedreduce.kernels.kept_launch import KeptLaunch
from fusedreduce.kernels.table import ChunkTable, PointerTable

PARAMETERS = (1, 12, 148, 1000)
NUMEL = 100
CALLS = 200
CPU = torch.device("cpu")


@contextmanager
def no_launches() -> Iterator[None]:
    """Within: launches end in a launcher that does nothing."""

    def launcher(self: FakeDriver, source: Any, metadata: Any) -> Callable[..., None]:
        return lambda *arguments: None

    with patch.object(FakeDriver, "launcher_cls", launcher), patch.object(dispatch, "path_for", lambda *_: "triton"):
        as_on_sm_90()
        yield


@contextmanager
def _as_triton_launches() -> Iterator[None]:
    """Within: nothing is kept, and nothing is asked of what was."""
    serves = patch.object(KeptLaunch, "serves", lambda compiled: False)
    launch = patch.object(KeptLaunch, "launch", lambda *_: False)
    with serves, launch:
        yield


def ways(parameters: int) -> Mapping[str, Callable[[], float]]:
    """Microseconds of one call, by what is called."""
    numels, dtypes = [NUMEL] * parameters, [torch.float32] * parameters
    chunks = ChunkTable(numels, range(0, NUMEL * parameters, NUMEL), dtypes, NUMEL * parameters)
    gradients: list[torch.Tensor | None] = [torch.zeros(NUMEL) for _ in numels]
    pointers, wire = PointerTable(), torch.zeros(chunks.wire_numel, dtype=torch.bfloat16)

    def pack() -> None:
        dispatch.pack(gradients, chunks, pointers, wire, 4.0, vouched=True)

    def timed(call: Callable[[], object]) -> float:
        call()
        begin_ns = time.perf_counter_ns()
        for _ in range(CALLS):
            call()
        return (time.perf_counter_ns() - begin_ns) / CALLS / 1e3

    def plain() -> float:
        with _as_triton_launches():
            return timed(pack)

    return {
        "pack": lambda: timed(pack),
        "pack, again": lambda: timed(pack),
        "pack, as Triton launches": plain,
        "of which addresses": lambda: timed(lambda: pointers.upload(gradients, CPU)),
    }


def main() -> int:
    """Prints a table."""
    parser = records.Parser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30, help="default: 30")
    rounds = parser.parse_args().rounds
    with no_launches():
        for parameters in PARAMETERS:
            calls = ways(parameters)
            found: dict[str, list[float]] = {name: [] for name in calls}
            for _ in range(rounds):
                for name, call in calls.items():
                    found[name].append(call())
            print(f"{parameters} gradients")
            for name, samples in found.items():
                spread = records.Spread.of([one * 1e-3 for one in samples])
                print(f"    {name:26}{spread.median_ms:8.2f}  ({spread.p20_ms:.2f} to {spread.p80_ms:.2f})")
    return 0


if __name__ == "__main__":
    records.entry(main)
