"""Wires of one's own: in settings, and on 2 and 3 Gloo ranks in the wrapper, the hook, and every mode.

What they have in common with built-in ones: the tables of test_ddp_wires.py and test_hook_wires.py.
"""

from __future__ import annotations

import copy
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
from support import own_wires
from support.ddp_models import SMALL_CAP_MB, batch, gradients, hooked, loss_of, mlp
from support.grids import grid
from support.own_wires import EQUAL, NAME
from support.ranks import on_ranks
from support.wires import settings
from torch import nn

import fusedreduce
from fusedreduce import CastWire, DistributedDataParallel, FusedHookState, ReduceConfig
from fusedreduce.kernels import dispatch
from fusedreduce.kernels.reference import store_rounded
from fusedreduce.kernels.table import ChunkTable, PointerTable
from fusedreduce.run import options
from fusedreduce.wires import WIRES, cast_of, described, is_own, like, wire_bytes, wire_format

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
HOOK, STATS = "hook", "with statistics"
SURFACES = ("wrapper", HOOK, f"wrapper {STATS}", f"{HOOK} {STATS}")


def _made(model: nn.Module, wire: str, surface: str, **options: Any) -> tuple[Any, Any]:
    """A wrapper with this wire, and what to ask for its statistics."""
    has_stats = STATS in surface
    if surface.startswith(HOOK):
        state = FusedHookState(grad_stats=has_stats, **settings(wire))
        return hooked(model, wire, state, **options)[0], state
    config = ReduceConfig(**settings(wire), grad_stats=has_stats, **options)
    ddp = DistributedDataParallel(model, reduce=config, bucket_cap_mb=SMALL_CAP_MB)
    return ddp, ddp


def _steps(rank: int, wire: str, surface: str, steps: int, **options: Any) -> list[Any]:
    """Gradients of some steps and their statistics."""
    ddp, told = _made(mlp(), wire, surface, **options)
    found: list[Any] = []
    for step in range(steps):
        ddp.zero_grad()
        loss_of(ddp(batch(rank, step))).backward()
        found += gradients(ddp)
        if STATS in surface:
            found.append(told.grad_stats())
    return found


@grid(("world", "own", "surface"), [*itertools.product((2, 3), EQUAL, SURFACES)])
@on_ranks()
def test_what_does_the_same_as_a_built_in_wire_leaves_its_bytes(rank: int, world: int, own: str, surface: str) -> None:
    """And its statistics."""
    mine, theirs = (_steps(rank, wire, surface, steps=3) for wire in (NAME.format(own), EQUAL[own]))
    for one, other in zip(mine, theirs, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize("surface", [*SURFACES, "of fp64", "stale", "late"])
@pytest.mark.parametrize("world", [2, 3])
@on_ranks()
def test_every_surface_rounds_toward_zero(rank: int, world: int, surface: str) -> None:
    """Gradients are of the last rank alone, so that sums are exact in any order."""
    for wire in (TOP16, ZERO16) if surface != "late" else (TOP16,):
        _rounds(rank, world, wire, surface)


def _rounds(rank: int, world: int, wire: str, surface: str) -> None:
    modes = {"stale": fusedreduce.BoundedStaleness(1), "late": fusedreduce.Asynchronous()}
    options = {"sync_mode": modes[surface]} if surface in modes else {}
    model = mlp().double() if surface == "of fp64" else mlp()
    (ddp, told), cast, mine = _made(model, wire, surface, **options), cast_of(wire), rank == world - 1
    assert cast is not None and cast.rounding is not None
    expected: list[torch.Tensor] = []
    for step in range(4):
        before = expected
        for owner in (ddp, alone := copy.deepcopy(ddp.module)):
            owner.zero_grad()
            rows = batch(world - 1, step).to(next(ddp.parameters()).dtype)
            (loss_of(owner(rows)) * float(mine or owner is alone)).backward()
        expected = gradients(alone)
        for one in expected:
            sent = torch.empty_like(one, dtype=cast.torch_dtype)
            store_rounded(sent, one / world, cast)
            one.copy_(sent)
        if surface == "late":
            ddp.flush()
            if mine:  # its own in fp32, plus the average less that, which is rounded
                continue
        wanted = before if surface == "stale" else expected
        for one, other in zip(gradients(ddp), wanted, strict=True):
            assert torch.equal(one, other), (step, (one - other).abs().max())
        exact = zip(gradients(alone), expected, strict=True)
        assert not any(torch.equal((one / world).to(cast.torch_dtype).to(one.dtype), other) for one, other in exact)
    if STATS in surface:
        squares = sum(float(one.double().square().sum()) for one in expected)
        assert float(told.grad_norm()) == pytest.approx(squares**0.5, rel=1e-6)


@pytest.mark.parametrize("surface", ["wrapper", HOOK])
@pytest.mark.parametrize("other", ["bf16", ZERO16, SMALL8])
@on_ranks(3)
def test_ranks_of_different_wires_are_all_told(rank: int, world: int, other: str, surface: str) -> str:
    """The last rank is given another wire."""
    with pytest.raises(fusedreduce.AgreementError) as caught:
        _steps(rank, other if rank == world - 1 else TOP16, surface, steps=1)
    message = str(caught.value)
    assert "rank 2" in message and f"{TOP16} (torch.bfloat16)" in message and described(other) in message
    return message


@on_ranks(3)
def test_sums_that_would_be_rounded_to_nearest_are_refused(rank: int, world: int) -> None:
    """Where sums would be rounded to nearest, on every rank alike, and nothing is left behind."""
    patterns: dict[str, Any] = {"*weight": TOP16, "*": "bf16"}
    for asked in (patterns, lambda name, parameter: patterns["*weight" if name.endswith("weight") else "*"]):
        with pytest.raises(
            ValueError, match=r"accumulation='fp32' and wire=.* exclude each other: sums would be rounded"
        ):
            DistributedDataParallel(mlp(), reduce=ReduceConfig(wire=asked, accumulation="fp32"))
    with pytest.raises(ValueError, match="exclude each other"):
        FusedHookState(wire=TOP16, accumulation="fp32")
    _steps(rank, TOP16, "wrapper", steps=2)


def test_a_wire_stands_for_the_built_in_one_that_costs_the_same() -> None:
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
