"""From pack, unpack and reduce_partials to the driver: how often they launch and compile, and with which arguments.

Everything is real but the driver: as a script, without TRITON_INTERPRET, this file runs the scenarios on CPU tensors
through Triton's own launch path for sm_90 and prints what reached the driver.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch
from fake_driver import Compilations, FakeDriver, activate, at_odd_address, run_compiled
from triton.backends.compiler import GPUTarget

from fusedreduce.kernels import pack, stats, unpack, variants
from fusedreduce.kernels.table import ChunkTable, Partials, PointerTable

PARAMETERS = (1, 10, 1000)
TARGET = GPUTarget("cuda", 90, 32)
MIXED = (torch.float32, torch.bfloat16, torch.float16)


class Bucket:
    """Gradients of one bucket and everything a step passes to the kernels, each tensor at an odd address if asked."""

    def __init__(self, parameters: int, dtypes: tuple[torch.dtype, ...], wire: torch.dtype, *, odd: bool) -> None:
        place = at_odd_address if odd else torch.clone
        generator = torch.Generator().manual_seed(parameters)
        numels = torch.randint(0, 300, (parameters,), generator=generator).tolist()
        numels[0] = 20_000 + parameters  # several chunks
        kinds = [dtypes[slot % len(dtypes)] for slot in range(parameters)]
        self.gradients: list[torch.Tensor | None] = [
            place(torch.zeros(numel, dtype=kind)) for numel, kind in zip(numels, kinds, strict=True)
        ]
        offsets = [0, *torch.tensor(numels).cumsum(0).tolist()]
        self.chunks = ChunkTable(numels, offsets[:-1], kinds, offsets[-1] + 5)
        self.pointers = PointerTable()
        self.wire = place(torch.zeros(offsets[-1] + 5, dtype=wire))
        self.scalar = place(torch.ones(1, dtype=torch.float64 if torch.float64 in dtypes else torch.float32))
        new = self.chunks.new_partials(torch.device("cpu"))
        self.partials = Partials(place(new.sums), place(new.first_non_finite))

    def arguments(self, *, sums: bool) -> tuple[Any, ...]:
        """Of `pack` and `unpack`."""
        partials = self.partials if sums else None
        return self.gradients, self.chunks, self.pointers, self.wire, self.scalar, partials

    def expected_addresses(self, *, sums: bool) -> list[int]:
        """In the order of the kernels' signature."""
        table = self.pointers.upload(self.gradients, self.chunks, self.wire)
        tensors = [table, self.chunks.on(self.wire.device).rows, self.wire, self.scalar]
        if sums:
            tensors += [self.partials.sums, self.partials.first_non_finite]
        return [tensor.data_ptr() for tensor in tensors]


def launched_by(driver: FakeDriver, function: Any, *arguments: Any) -> list[dict[str, Any]]:
    """What one call made the driver launch."""
    driver.launches.clear()
    function(*arguments)
    return [
        {"kernel": launch.kernel, "grid": launch.grid, "addresses": launch.addresses()} for launch in driver.launches
    ]


def one_launch_per_call(driver: FakeDriver) -> list[dict[str, Any]]:
    """pack, unpack and reduce_partials for buckets of 1, 10 and 1,000 parameters."""
    rows = []
    for parameters in PARAMETERS:
        for sums in (False, True):
            bucket = Bucket(parameters, MIXED, torch.bfloat16, odd=False)
            row = {
                "parameters": parameters,
                "pack": launched_by(driver, pack.pack, *bucket.arguments(sums=sums)),
                "unpack": launched_by(driver, unpack.unpack, *bucket.arguments(sums=sums)),
                "reduce": launched_by(driver, stats.reduce_partials, bucket.partials, bucket.chunks),
                "expected": bucket.expected_addresses(sums=sums),
                "rows": len(bucket.chunks.rows),
                "data_rows": bucket.chunks.data_rows,
            }
            rows.append(row)
    return rows


def compilations_after_the_first() -> dict[str, list[str]]:
    """What compiles in a first step, and then with other sizes, misaligned and moved tensors, missing gradients."""
    compiled: dict[str, list[str]] = {}
    for dtypes, wire in ((MIXED, torch.float16), ((torch.float64,), torch.float64)):
        for sums in (False, True):
            name = f"{wire}{', sums' if sums else ''}"
            counter = Compilations()
            _step(Bucket(2, dtypes, wire, odd=False), sums=sums)
            compiled[f"first {name}"] = counter.names
            counter = Compilations()
            for parameters in (1, 3, 16, 17):
                for odd in (False, True):
                    bucket = Bucket(parameters, dtypes, wire, odd=odd)
                    _step(bucket, sums=sums)
                    bucket.gradients = [None if g is None else at_odd_address(g) for g in bucket.gradients]
                    _step(bucket, sums=sums)
                    bucket.gradients[0] = None
                    _step(bucket, sums=sums)
            compiled[f"later {name}"] = counter.names
    return compiled


def _step(bucket: Bucket, *, sums: bool) -> None:
    pack.pack(*bucket.arguments(sums=sums))
    unpack.unpack(*bucket.arguments(sums=sums))
    if sums:
        stats.reduce_partials(bucket.partials, bucket.chunks)


def main() -> None:
    driver = activate(TARGET)
    for module in (variants, pack, unpack):
        module.current_target = lambda device: ("cuda", 90)  # type: ignore[attr-defined]
    json.dump({"calls": one_launch_per_call(driver), "compiled": compilations_after_the_first()}, sys.stdout)


@pytest.fixture(scope="module")
def observed() -> Any:
    return run_compiled(__file__)


def test_one_launch_whatever_the_number_of_parameters(observed: Any) -> None:
    assert [call["parameters"] for call in observed["calls"]] == [1, 1, 10, 10, 1000, 1000]
    for call in observed["calls"]:
        assert [launch["kernel"] for launch in call["pack"]] == ["_pack_kernel"], call["parameters"]
        assert [launch["kernel"] for launch in call["unpack"]] == ["_unpack_kernel"], call["parameters"]
        assert len(call["reduce"]) == 2, call["parameters"]


def test_one_program_per_row_of_the_table(observed: Any) -> None:
    for call in observed["calls"]:
        assert call["rows"] > call["data_rows"] >= 3  # the long parameter has three rows, the padding one
        assert call["pack"][0]["grid"] == [call["rows"], 1, 1]
        assert call["unpack"][0]["grid"] == [call["data_rows"], 1, 1]
        assert [launch["grid"] for launch in call["reduce"]] == [[call["parameters"], 1, 1], [1, 1, 1]]


def test_arguments_reach_the_kernel_in_the_order_of_its_signature(observed: Any) -> None:
    for call in observed["calls"]:
        assert call["pack"][0]["addresses"] == call["expected"]
        assert call["unpack"][0]["addresses"] == call["expected"]


def test_each_variant_compiles_once_and_nothing_compiles_later(observed: Any) -> None:
    # `one_launch_per_call` ran first, with another wire: the second stage is compiled by then.
    for name, compiled in observed["compiled"].items():
        wanted = ["_pack_kernel", "_unpack_kernel"] if name.startswith("first") else []
        assert compiled == wanted, name


if __name__ == "__main__":
    main()
