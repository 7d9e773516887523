"""From the functions to the driver: how often they launch and compile, and with which arguments.

Everything is real but the driver: as a script, without TRITON_INTERPRET, this file runs the scenarios on CPU tensors
through Triton's own launch path for sm_90 and prints what reached the driver.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
from collections import defaultdict
from typing import Any

import pytest
import torch
from support.cuda.fake_driver import Compilations, FakeDriver, at_odd_address, run_compiled
from support.cuda.launched import MIXED, Bucket, EncodedBucket, as_on_sm_90
from triton.runtime.jit import JITFunction

from fusedreduce.kernels import aot

pytestmark = pytest.mark.slow  # all of them, since whichever is first waits for what all look at
PARAMETERS = (1, 10, 1000)


def launched_by(driver: FakeDriver, function: Any, *arguments: Any) -> list[dict[str, Any]]:
    """What one call made the driver launch."""
    driver.launches.clear()
    function(*arguments)
    return [
        {
            "kernel": launch.kernel,
            "grid": launch.grid,
            "addresses": launch.addresses(),
            "numbers": [argument for argument in launch.arguments if isinstance(argument, float)],
        }
        for launch in driver.launches
    ]


def one_launch_per_call(driver: FakeDriver) -> list[dict[str, Any]]:
    """Every function for buckets of 1, 10 and 1,000 parameters."""
    rows = []
    for parameters in PARAMETERS:
        for stats in (False, True):
            bucket = Bucket(parameters, MIXED, torch.bfloat16, odd=False)
            calls = bucket.calls(stats=stats).items()
            row = {
                "parameters": parameters,
                "launched": {name: launched_by(driver, function, *given) for name, (function, given) in calls},
                "expected": bucket.expected_addresses(stats=stats),
                "rows": len(bucket.chunks.rows),
                "data_rows": bucket.chunks.data_rows,
            }
            rows.append(row)
    return rows


def compilations_after_the_first() -> dict[str, list[str]]:
    """What compiles in two first steps, and then with other sizes, divisors, misaligned and moved tensors, or none."""
    compiled: dict[str, list[str]] = {}
    for dtypes, wire in ((MIXED, torch.float16), ((torch.float64,), torch.float64)):
        for stats in (False, True):
            name = f"{wire}{', stats' if stats else ''}"
            counter = Compilations()
            for divisor in (2.0, 3.0):
                _step(Bucket(2, dtypes, wire, odd=False), divisor, stats=stats)
            compiled[f"first {name}"] = counter.names
            counter = Compilations()
            for parameters in (1, 3, 16, 17):
                for odd in (False, True):
                    bucket = Bucket(parameters, dtypes, wire, odd=odd)
                    _step(bucket, parameters, stats=stats)
                    bucket.gradients = [None if g is None else at_odd_address(g) for g in bucket.gradients]
                    _step(bucket, 1 / (1 + parameters), stats=stats)
                    bucket.gradients[0] = None
                    _step(bucket, 2.0**-130 * parameters, stats=stats)
            compiled[f"later {name}"] = counter.names
    return compiled


def _step(bucket: Bucket, divisor: float, *, stats: bool) -> None:
    for function, given in bucket.calls(stats=stats, divisor=divisor).values():
        function(*given)


def encoded_launches(driver: FakeDriver) -> list[dict[str, Any]]:
    """Of encoded buckets, with and without options: what is launched, and what compiles first and later."""
    rows = []
    for options in (False, True):
        counter = Compilations()
        for divisor in (2.0, 3.0):
            EncodedBucket(2, options=options, odd=False).launch(divisor, 1)
        first = counter.names
        counter = Compilations()
        for parameters in PARAMETERS:
            bucket = EncodedBucket(parameters, options=options, odd=parameters == 10)
            driver.launches.clear()
            bucket.launch(5.0 * parameters, parameters % 3 + 1)
            rows.append(
                {
                    "launched": [launch.kernel for launch in driver.launches],
                    "programs": [launch.grid for launch in driver.launches],
                    "rows": len(bucket.chunks.rows),
                    "data_rows": bucket.chunks.data_rows,
                    "first": first,
                    "later": counter.names,
                }
            )
    return rows


def keys() -> dict[str, list[str]]:
    """By kernel, what Triton's cache knows it by: where it is launched first, and where others were before."""
    every = aot.all_variants(aot.TARGETS["sm_90"])
    functions = [one for one in gc.get_objects() if isinstance(one, JITFunction)]
    found = defaultdict(list)
    for first in {variant.kernel: variant for variant in every}.values():
        for order in ([first], every):
            for one in functions:
                one.hash, one.used_global_vals = None, {}
            for variant in order:
                dataclasses.replace(variant)
                _ = variant.kernel.cache_key
            found[first.kernel.__name__].append(first.kernel.cache_key)
    return found


def main() -> None:
    driver = as_on_sm_90()
    found = {
        "calls": one_launch_per_call(driver),
        "compiled": compilations_after_the_first(),
        "encoded": encoded_launches(driver),
        "keys": keys(),
    }
    json.dump(found, sys.stdout)


@pytest.fixture(scope="module")
def observed() -> Any:
    return run_compiled(__file__)


def test_one_launch_whatever_the_number_of_parameters(observed: Any) -> None:
    assert [call["parameters"] for call in observed["calls"]] == [1, 1, 10, 10, 1000, 1000]
    kernels = {
        "pack": ["_pack_kernel"],
        "unpack": ["_unpack_kernel"],
        "measure": ["_walk_kernel"],
        "scale": ["_walk_kernel"],
        "reduce": ["_parameter_totals_kernel", "_total_kernel"],
        "reduce_source": ["_parameter_sources_kernel", "_first_source_kernel"],
    }
    for number, call in enumerate(observed["calls"]):
        assert set(call["launched"]) == (set(kernels) if number % 2 else {"pack", "unpack", "scale"})
        for name, launched in call["launched"].items():
            assert [launch["kernel"] for launch in launched] == kernels[name], call["parameters"]


def test_one_program_per_row_of_the_table(observed: Any) -> None:
    for call in observed["calls"]:
        assert call["rows"] > call["data_rows"] >= 3  # the long parameter has three rows, the padding one
        for name, launched in call["launched"].items():
            programs = {"pack": call["rows"], "reduce": call["parameters"], "reduce_source": call["parameters"]}
            assert launched[0]["grid"] == [programs.get(name, call["data_rows"]), 1, 1]
            assert [launch["grid"] for launch in launched[1:]] == [[1, 1, 1]] * (len(launched) - 1)


def test_arguments_reach_the_kernel_in_the_order_of_its_signature(observed: Any) -> None:
    for number, call in enumerate(observed["calls"]):
        assert set(call["expected"]) == {"pack", "unpack", "scale", *(["measure"] if number % 2 else [])}
        for name, expected in call["expected"].items():
            assert call["launched"][name][0]["addresses"] == expected, name
            assert call["launched"][name][0]["numbers"] == ([0.5] if name == "pack" else []), name


def test_each_variant_compiles_once_and_nothing_compiles_later(observed: Any) -> None:
    # `one_launch_per_call` ran first, with another wire: the second stage and mixed gradients' scale and measure are
    # compiled by then.
    assert [name.partition(" ")[0] for name in observed["compiled"]] == ["first", "later"] * 4
    for name, compiled in observed["compiled"].items():
        wanted = ["_pack_kernel", "_unpack_kernel"] if name.startswith("first") else []
        if name.startswith("first torch.float64"):
            wanted.append("_walk_kernel")  # scale, then with statistics measure
        if name.startswith("first"):
            wanted.append("_pack_kernel")  # by product, then by division
        assert compiled == wanted, name


def test_encoded_buckets_take_three_launches_and_compile_nothing_later(observed: Any) -> None:
    kernels = ["_encode_kernel", "_combine_encoded_kernel", "_decode_kernel"]
    for row in observed["encoded"]:
        assert row["launched"] == kernels and row["later"] == []
        assert row["first"] == [*kernels, "_encode_kernel"]  # by product, then by division
        assert [grid[0] for grid in row["programs"]][::2] == [row["rows"], row["data_rows"]]
    assert len(observed["encoded"]) == 2 * len(PARAMETERS)


def test_a_kernel_is_found_in_the_cache_whatever_was_launched_before(observed: Any) -> None:
    """So that what one program, the compile check or doctor, has compiled is there for the next one."""
    assert {"_pack_kernel", "_unpack_kernel", "_walk_kernel", "_encode_kernel"} <= observed["keys"].keys()
    for name, (alone, behind_others) in observed["keys"].items():
        assert alone == behind_others, name


if __name__ == "__main__":
    main()
