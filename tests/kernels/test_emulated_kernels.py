"""Every kernel as compiled for NVIDIA's architectures, run by the emulator: the bits of its definition, and no race.

As a script, without TRITON_INTERPRET, this file runs what the tests ask about and prints what it found. `make compile`
has compiled most of it before, into the same cache.
"""

from __future__ import annotations

import functools
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.cuda.fake_driver import run_compiled
from support.emulator import driver as emulated
from support.emulator import kernels, launcher, record
from support.emulator.cases import Bucket, EncodedBucket
from support.emulator.large import compared_behind_2_31

from fusedreduce.kernels import aot
from fusedreduce.kernels.encodings import ENCODINGS
from fusedreduce.kernels.triton_versions import KNOBS_OF_A_LAUNCH

# Compiling alone may take minutes, on a machine that does much else.
TIMEOUT_S = 1500
LARGE, BARRIERS = "large", "barriers of "
# Kernels that `make compile` compiles for no architecture: `make full` alone runs them, and the other architectures.
BESIDE = {"options", "tunings"}
RUNS = [
    pytest.param(name, part, marks=[pytest.mark.full] * (name != "sm_90" or part in BESIDE), id=f"{name}-{part}")
    for name in record.EMULATED
    for part in kernels.PARTS
]


def main() -> None:
    """Prints what was found of each of the parts that are named behind the architecture."""
    arch, parts = int(sys.argv[1].removeprefix("sm_")), sys.argv[2:]
    driver = emulated.activate(arch)
    found: dict[str, Any] = {"not in C": launcher.refusal()}
    if set(parts) & set(kernels.PARTS) and not found["not in C"]:
        driver.packing = launcher.CLauncher()
    for part in parts:
        if part in kernels.PARTS:
            found[part] = kernels.run_part(part, driver)
        elif part == LARGE:
            found[part] = compared_behind_2_31(driver)
        else:
            found[part] = kernels.without_barriers(part.removeprefix(BARRIERS), driver)
    json.dump(found, sys.stdout)


@pytest.fixture(scope="module")
def observed(request: pytest.FixtureRequest) -> Callable[[str, str], Any]:
    """What a part found on an architecture; one process runs all that are asked for."""
    asked: dict[str, list[str]] = {}
    for item in request.session.items:
        if item.path == Path(__file__) and isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            values = item.callspec.params
            if {"name", "part"} <= set(values):
                asked.setdefault(str(values["name"]), []).append(str(values["part"]))

    @functools.cache
    def of(name: str) -> Any:
        return run_compiled(__file__, name, *dict.fromkeys(asked[name]), timeout_s=TIMEOUT_S)

    return lambda name, part: {**of(name)[part], "not in C": of(name)["not in C"]}


# Which of those marked slow waits for the process that serves all, and so looks slow, is a matter of their order.
@pytest.mark.slow
@pytest.mark.parametrize(("name", "part"), RUNS)
def test_compiled_kernels_have_the_bits_of_their_definition(observed: Any, name: str, part: str) -> None:
    found = observed(name, part)
    assert found["wrong"] == []
    wanted = {one.label for one in aot.all_variants(aot.TARGETS[name]) if part_of(one.label) == part}
    assert wanted <= set(found["launched"])
    # First by Triton, then as kept launches.
    assert min(found["launched"].values()) >= 2
    assert not KNOBS_OF_A_LAUNCH or set(found["kept"]) == set(found["launched"])
    # Hardly an instruction that nothing comes to.
    assert found["executed"] > 0.9 * found["instructions"]
    assert record.load()[name][part] == record.entry(found), "run: make emulate"


def part_of(label: str) -> str:
    """The part that runs a variant."""
    name = label.partition("[")[0]
    others = {"measure": "walk", "scale": "walk", **dict.fromkeys(("parameter_totals", "total"), "stats")}
    return {**others, **dict.fromkeys(("parameter_sources", "first_source"), "stats")}.get(name, name)


def test_every_variant_has_a_part() -> None:
    for name in record.EMULATED:
        assert {part_of(one.label) for one in aot.all_variants(aot.TARGETS[name])} == {*kernels.PARTS} - BESIDE


@pytest.mark.slow
@pytest.mark.parametrize(("name", "part"), [("sm_90", "walk")])
def test_tritons_own_launcher_packs_the_arguments(observed: Any, name: str, part: str) -> None:
    if why := observed(name, part)["not in C"]:
        pytest.skip(why)
    assert observed(name, part)["packed in C"] == sum(observed(name, part)["launched"].values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "part"),
    [
        pytest.param("sm_90", f"{BARRIERS}{kernel}", marks=[pytest.mark.full] * (kernel not in ("unpack", "stats")))
        for kernel in kernels.WITH_BARRIERS
    ],
)
def test_without_any_one_of_its_barriers_a_kernel_is_wrong(observed: Any, name: str, part: str) -> None:
    found = observed(name, part)
    assert found["there"] and all(found["there"].values())
    assert found["missed"] == {}, f"of {found['there']}"


@pytest.mark.full
@pytest.mark.parametrize(("name", "part"), [("sm_90", LARGE)])
def test_elements_behind_2_31_of_one_gradient(observed: Any, name: str, part: str) -> None:
    assert observed(name, part)["wrong"] == []
    assert observed(name, part)["values"] > 100_000


@pytest.mark.parametrize("fp64", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_every_bucket_has_aligned_and_unaligned_slots(seed: int, fp64: bool) -> None:
    """Of each dtype, long enough for accesses of 16 bytes; without an unaligned one a planted fault was missed."""
    bucket = Bucket(seed, fp64=fp64)
    wire = bucket.wire(bucket.compute).inner
    seen: Counter[tuple[object, ...]] = Counter()
    for slot, one in enumerate(bucket.gradients()):
        if one is not None and one.inner.numel() >= 64:
            apart = one.inner.data_ptr() // one.inner.itemsize - wire.data_ptr() // wire.itemsize
            seen[one.inner.dtype, (apart - bucket.chunks.offsets[slot]) % 8 == 0] += 1
    encoded = EncodedBucket(seed, ENCODINGS["int8"], fp64=fp64)
    residuals, _ = encoded.residuals()
    for one, kept in zip(encoded.gradients(), residuals.copies[1], strict=True):
        if one is not None and one.inner.numel() >= 63:
            seen["encoded", one.inner.dtype, one.inner.data_ptr() % 16 == 0] += 1
            seen["residual", one.inner.data_ptr() % 16 == 0, kept.data_ptr() % 16 == 0] += 1
    dtypes = set(bucket.slots.dtypes)
    assert {(dtype, aligned) for dtype in dtypes for aligned in (True, False)} <= set(seen)
    assert {("encoded", dtype, aligned) for dtype in dtypes for aligned in (True, False)} <= set(seen)
    assert {("residual", one, other) for one in (True, False) for other in (True, False)} <= set(seen)


def test_the_page_says_what_was_run() -> None:
    assert record.written(record.PAGE.read_text()) == record.PAGE.read_text(), "run: make emulate"


def test_a_record_that_is_out_of_date_changes_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    page = record.PAGE.read_text()
    kept: Mapping[str, Any] = record.load()
    monkeypatch.setattr(record, "load", lambda: {**kept, "sm_90": {**kept["sm_90"], "pack": [24, 1]}})
    assert record.written(page) != page


if __name__ == "__main__":
    main()
