"""Wires of one's own: in settings, and on 2 and 3 Gloo ranks in the wrapper, the hook, and every mode."""

from __future__ import annotations

import itertools
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel import ddp_wire_cases, hook_wire_cases, own_wire_cases
from parallel.own_wire_cases import HOOK, STATS
from support import own_wires
from support.grids import grid
from support.own_wires import EQUAL, NAME
from support.ranks import RankPool

from fusedreduce import CastWire, FusedHookState, ReduceConfig
from fusedreduce.kernels import dispatch
from fusedreduce.kernels.table import ChunkTable, PointerTable
from fusedreduce.run import options
from fusedreduce.wires import WIRES, described, is_own, like, wire_bytes, wire_format

TOP16, ZERO16, SMALL8, LARGE4 = map(NAME.format, ("TOP16", "ZERO16", "SMALL8", "LARGE4"))
ROOT = Path(__file__).resolve().parents[2]
TRAIN = """
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8, bias=False))
ddp(torch.full((1, 8), 1.0 + 2.0**-7 + 3 * 2.0**-9)).sum().backward()
assert (ddp.module.weight.grad == 1.0 + 2.0**-7).all(), ddp.module.weight.grad
dist.destroy_process_group()
"""
SURFACES = ("wrapper", HOOK, f"wrapper {STATS}", f"{HOOK} {STATS}")


@grid(("world", "own", "surface"), [*itertools.product((2, 3), EQUAL, SURFACES)])
def test_what_does_the_same_as_a_built_in_wire_leaves_its_bytes(
    two: RankPool, three: RankPool, world: int, own: str, surface: str
) -> None:
    {2: two, 3: three}[world].run(own_wire_cases.equal, NAME.format(own), EQUAL[own], surface)


@pytest.mark.parametrize("surface", [*SURFACES, "of fp64", "stale", "late"])
@pytest.mark.parametrize("world", [2, 3])
def test_every_surface_rounds_toward_zero(two: RankPool, three: RankPool, world: int, surface: str) -> None:
    for wire in (TOP16, ZERO16) if surface != "late" else (TOP16,):
        {2: two, 3: three}[world].run(own_wire_cases.rounded, wire, surface)


@pytest.mark.parametrize("wire", [TOP16, SMALL8, LARGE4])
def test_bits_are_the_definitions_in_hook_and_wrapper(two: RankPool, three: RankPool, wire: str) -> None:
    two.run(hook_wire_cases.same_bits, wire)
    if wire != TOP16:
        three.run(hook_wire_cases.same_bits, wire)


@pytest.mark.parametrize("wire", [SMALL8, LARGE4])
def test_blocks_of_another_size_have_what_the_built_in_ones_have(three: RankPool, wire: str) -> None:
    three.run(ddp_wire_cases.feedback, wire)
    three.run(ddp_wire_cases.wide, wire)


@pytest.mark.parametrize("surface", ["wrapper", HOOK])
@pytest.mark.parametrize("other", ["bf16", ZERO16, SMALL8])
def test_ranks_of_different_wires_are_all_told(three: RankPool, other: str, surface: str) -> None:
    messages = three.run(own_wire_cases.disagreement, TOP16, other, surface)
    assert len(set(messages)) == 1 and "rank 2" in messages[0]
    assert f"{TOP16} (torch.bfloat16)" in messages[0] and described(other) in messages[0]


def test_sums_that_would_be_rounded_to_nearest_are_refused(three: RankPool) -> None:
    three.run(own_wire_cases.refused, TOP16)


def test_traces_are_those_of_the_built_in_wire_that_costs_the_same(two: RankPool, tmp_path: Path) -> None:
    two.run(ddp_wire_cases.traced, TOP16, str(tmp_path))
    assert (like(TOP16), like(ZERO16), like(SMALL8), like(LARGE4)) == ("bf16", "fp16", "int8", "int4")
    assert all(like(wire) == wire for wire in WIRES)


# Names


def test_a_name_stands_for_the_wire_in_settings() -> None:
    config = ReduceConfig(wire=TOP16)
    assert pickle.loads(pickle.dumps(config)) == config and eval(repr(config)) == config
    assert config.to_dict()["wire"] == TOP16
    assert wire_format(TOP16) is own_wires.TOP16 and is_own(TOP16) and not any(map(is_own, WIRES))
    assert ReduceConfig(wire={"*.bias": "native", "*": TOP16}).wire == (("*.bias", "native"), ("*", TOP16))
    gradient = torch.zeros(3, 100)
    assert wire_bytes(gradient, TOP16) == 600 and wire_bytes(gradient, SMALL8) == 5 * 68
    assert config.wire_of(gradient) == TOP16 and ReduceConfig(wire=SMALL8).wire_of(gradient[0]) == "native"
    assert described("bf16") == "bf16" and described(SMALL8) == f"{SMALL8} (int8 of 64)"


@pytest.mark.parametrize(
    ("wire", "message"),
    [
        ("int2", r"unknown wire 'int2': use one of 'native', 'bf16', 'fp16', 'int8', 'int4', or 'MODULE:NAME'"),
        ("support.own_wires:", "unknown wire 'support.own_wires:'"),
        (":TOP16", "unknown wire ':TOP16'"),
        (b"bf16", "unknown wire b'bf16'"),
        (own_wires.TOP16, r"a wire is given by its name: write wire='MODULE:NAME'"),
        (
            "absent.own:TOP16",
            r"wire 'absent.own:TOP16' cannot be imported \(ModuleNotFoundError: No module named 'absent'\): "
            r"write TOP16 = fusedreduce.CastWire\(...\), or fusedreduce.Encoding\(...\), in absent/own.py",
        ),
        ("support.own_wires:TOP17", r"cannot be imported \(AttributeError: .*'TOP17'\): write TOP17 = "),
        (
            "support.own_wires:NO_WIRE",
            r"wire 'support.own_wires:NO_WIRE' is torch.bfloat16, and no wire: write NO_WIRE",
        ),
    ],
)
def test_a_name_of_no_wire_says_what_to_write(wire: Any, message: str) -> None:
    for build in (
        lambda: ReduceConfig(wire=wire),
        lambda: ReduceConfig(wire={"*": wire}),
        lambda: FusedHookState(wire=wire),
    ):
        with pytest.raises(ValueError, match=message):
            build()


def test_a_module_that_fails_is_told_of_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "failing_wire.py"
    file.write_text("1 / 0")
    with pytest.raises(
        ValueError, match=r"'failing_wire:W' cannot be imported \(ZeroDivisionError: division by zero\)"
    ):
        ReduceConfig(wire="failing_wire:W")
    file.write_text("import fusedreduce\nW = fusedreduce.CastWire('float16')\n")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert ReduceConfig(wire="failing_wire:W").wire_dtype(torch.float32) is torch.float16


def test_a_table_of_a_cast_is_of_its_wire_alone() -> None:
    chunks = ChunkTable([3], [0], [torch.float32], 3, cast=own_wires.TOP16)
    with pytest.raises(TypeError, match="the wire buffer is torch.float16, expected one of torch.bfloat16"):
        dispatch.pack([torch.ones(3)], chunks, PointerTable(), torch.empty(3, dtype=torch.float16), 1.0)
    assert ChunkTable([3], [0], [torch.float32], 3, cast=CastWire("float16")).cast is None


# fusedreduce run


@pytest.mark.parametrize("text", ["absent:W", "*.bias=native,*=absent:W"])
def test_the_command_leaves_a_wire_of_the_programs_own_to_the_program(text: str) -> None:
    assert options.names_own_wire({"FUSEDREDUCE_WIRE": text})
    assert not options.names_own_wire({"FUSEDREDUCE_WIRE": "*.bias=native,*=int8"}) and not options.names_own_wire({})
    with pytest.raises(ValueError, match=re.escape("'absent:W' cannot be imported")):
        options.read({"FUSEDREDUCE_WIRE": text})


def test_the_command_gives_a_script_a_wire_that_lies_beside_it(tmp_path: Path) -> None:
    """Started from elsewhere: where the command itself cannot import it."""
    (tmp_path / "beside.py").write_text("from support.own_wires import TOP16 as CUT\n")
    (tmp_path / "train.py").write_text(TRAIN)
    command = [sys.executable, "-m", "fusedreduce.run", "--wire", "beside:CUT", str(tmp_path / "train.py")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    done = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "wire beside:CUT" in done.stderr, done.stderr
    command[4] = "beside:GONE"
    done = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "wire 'beside:GONE' cannot be imported" in done.stderr, done.stderr
