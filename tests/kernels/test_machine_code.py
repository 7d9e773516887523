"""The check of machine code: it finds planted faults, passes real kernels, and looks at what is really launched.

Compiling needs a process without TRITON_INTERPRET: as a script, this file compiles what the tests ask about and prints
it. The full check of the real kernels is a step of its own in `make test`.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from support import planted_kernels
from support.cuda.fake_driver import activate, at_odd_address, run_compiled
from support.machine_code import check
from support.machine_code.disassembly import (
    Access,
    Frame,
    Instruction,
    access_of,
    in_loop,
    parse_gcn,
    parse_sass,
    shortest_turn,
)
from support.machine_code.record import RECORD, Place, Table, dump, load
from support.machine_code.rules import BLOCKED, BranchFigures, Violation, fusion
from triton.backends.compiler import GPUTarget

from fusedreduce.kernels import aot, triton_versions, variants
from fusedreduce.kernels.aot import TARGETS, Target, all_variants
from fusedreduce.kernels.variants import TRITON_NAMES, Variant, tuning_for, warp_size

OTHERS = ("sm_86", "sm_89", "sm_120", "gfx950", "gfx1100")
# Every file of kernels, mixed and fp64, with and without by-products; the rest is left to `make test`.
SUBSET = (
    "pack[mixed, wire bf16, stats]",
    "pack[mixed, wire fp16, div]",
    "pack[fp64, wire fp16]",
    "unpack[mixed, wire fp32]",
    "unpack[fp64, wire bf16, stats]",
    "measure[mixed]",
    "scale[mixed]",
    "combine[fp32]",
    "combine[bf16, stacked]",
    "encode[int8, mixed]",
    "encode[int4, fp64, stats, div, feedback, stochastic]",
    "combine_encoded[int4]",
    "combine_encoded[int8, feedback, stochastic]",
    "decode[int8, mixed, stats]",
    "parameter_totals",
    "first_source",
)
# What each planted fault must be found by, and in which branches; None: in the kernel as a whole, others may suffer.
BF16 = "bf16->fp32"
FOUND_BY: dict[str, tuple[str | None, tuple[str, ...]]] = {
    "none": (None, ()),
    "scalar branch": (BF16, ("16 loads of 2 bytes in a block; the tile calls for 4 of 8", "vector width")),
    "layout conversion": (BF16, ("exchange",)),
    "missing branch": (BF16, ("branch: missing: no load_vector, load_single, store_vector, store_single",)),
    "by hand": (BF16, ("placement", "goes round load_vector")),
    "atomic": (BF16, ("memory", "atom")),
    "spill": (None, ("stack",)),
}
SPILL_FIGURES = {"gfx942": ("vgpr_spill_count is ", "private_segment_fixed_size is ", "scratch_store")}
FUSED = {"enable_fp_fusion": True}
EXCHANGE_FIGURES = {"gfx942": ("ds_write", "ds_read", "s_barrier")}
PLANTED = [(planted.fault, target) for planted in planted_kernels.PLANTED for target in planted.targets]


def compiled_here() -> dict[str, Any]:
    """What only a process without the interpreter can find out."""
    return {
        "planted": planted_messages(),
        "subset": subset_messages(),
        "fused": fused_messages(),
        "launches": launches_and_compilations(),
    }


def planted_messages() -> dict[str, list[str]]:
    found = {}
    for planted in planted_kernels.PLANTED:
        for name in planted.targets:
            report = check.report(planted_kernels.variant_of(planted, TARGETS[name]), TARGETS[name])
            found[f"{planted.fault} on {name}"] = [str(violation) for violation in report.violations]
    return found


def subset_messages() -> dict[str, list[str]]:
    return {
        f"{variant.label} on {target.name}": [str(violation) for violation in check.report(variant, target).violations]
        for target in (TARGETS[name] for name in check.RECORDED)
        for variant in all_variants(target)
        if variant.label in SUBSET
    }


def fused_messages() -> dict[str, list[str]]:
    """Of encoded kernels whose products and sums the compiler may fuse."""
    target = TARGETS["sm_90"]
    return {
        variant.label: [
            str(one) for one in check.report(dataclasses.replace(variant, options=FUSED), target).violations
        ]
        for variant in all_variants(target)
        if variant.label in SUBSET and variant.label.startswith(BLOCKED)
    }


def launches_and_compilations() -> list[dict[str, Any]]:
    """How Triton's launch path sees each variant, with aligned, odd and large tensors, beside what is examined."""
    rows = []
    for target in (TARGETS["sm_90"], TARGETS["gfx942"]):
        driver = activate(GPUTarget(*target.key, warp_size(target.key)))
        for variant in all_variants(target):
            variant.kernel.device_caches.clear()
            row = {
                "name": f"{variant.label} on {target.name}",
                "wanted": dict(variant.signature),
                "seen": [_specialised(variant, arguments) for arguments in _operands(variant)],
            }
            if variant.label in SUBSET:
                variant.launch(3, _operands(variant)[0])
                row["launched"] = driver.launches[-1].compiled
                row["examined"] = aot.compile_variant(variant, target).hash
            rows.append(row)
    return rows


def _operands(variant: Variant) -> list[list[torch.Tensor | float | None]]:
    """Arguments of one launch: aligned, at odd addresses, and of 3 GiB each (which "meta" tensors only claim to be)."""
    dtypes = {f"*{name}": dtype for dtype, name in TRITON_NAMES.items()}
    # A constexpr without a value is a pointer that is not given.
    kinds = [kind for name, kind in variant.signature.items() if name not in variant.constexprs]
    aligned = [torch.zeros(4, dtype=dtypes[kind]) if kind in dtypes else None for kind in kinds]
    odd = [None if tensor is None else at_odd_address(tensor) for tensor in aligned]
    large = [
        None if tensor is None else torch.empty(3 * 2**30 // tensor.itemsize, dtype=tensor.dtype, device="meta")
        for tensor in aligned
    ]
    numbers = (1.0, 1 / 3, 1e300)
    return [
        [number if kind == "fp64" else tensor for kind, tensor in zip(kinds, tensors, strict=True)]
        for tensors, number in zip((aligned, odd, large), numbers, strict=True)
    ]


def _specialised(variant: Variant, arguments: Sequence[torch.Tensor | float | None]) -> dict[str, Any]:
    """Signature, attributes and values that a launch would compile for; the hook stops it there."""
    seen: list[Any] = []

    def stop(*, compile: dict[str, Any], **about: Any) -> bool:
        names = list(variant.signature)
        seen.append(
            {
                "signature": compile["signature"],
                "attributes": [value for value in compile["configs"][0].values() if value],
                "constexprs": {names[place]: value for (place,), value in compile["constants"].items()},
                "num_warps": compile["num_warps"],
            }
        )
        return True

    triton.knobs.runtime.jit_cache_hook = stop
    variant.launch(3, arguments)
    triton.knobs.runtime.jit_cache_hook = None
    assert len(seen) == 1
    return {**seen[0], "constexprs": {k: v for k, v in seen[0]["constexprs"].items() if v is not None}}


@pytest.fixture(scope="module")
def compiled() -> Any:
    return run_compiled(__file__)


@pytest.mark.full
@pytest.mark.parametrize(("fault", "target"), PLANTED)
def test_planted_fault_is_found_and_named(compiled: Any, fault: str, target: str) -> None:
    messages = compiled["planted"][f"{fault} on {target}"]
    branch, words = FOUND_BY[fault]
    where = f"planted[{fault}] on {target}" + (f", branch {branch}:" if branch else "")
    named = [message for message in messages if message.startswith(where)]
    if fault == "none":
        assert messages == []
    for word in words:
        assert any(word.lower() in message.lower() for message in named), (word, messages)
    if fault in ("scalar branch", "missing branch", "by hand", "atomic"):
        assert named == messages, "the sound branches are blamed too"
    if fault == "spill":
        for word in SPILL_FIGURES.get(target, ("STACK is ", "STL", "LDL")):
            assert any(word in message for message in messages), (word, messages)
    if fault == "layout conversion":
        for word in EXCHANGE_FIGURES.get(target, ("STS", "LDS", "BAR.SYNC")):
            assert any(word in message for message in named), (word, messages)


@pytest.mark.full
def test_real_kernels_pass(compiled: Any) -> None:
    assert len(compiled["subset"]) == len(SUBSET) * len(check.RECORDED)
    assert [message for messages in compiled["subset"].values() for message in messages] == []


@pytest.mark.full
def test_encoded_kernels_that_may_be_fused_are_found(compiled: Any) -> None:
    assert len(compiled["fused"]) == 5
    for label, messages in compiled["fused"].items():
        assert any(f"{label} on sm_90: fusion: " in message for message in messages), messages


@pytest.mark.parametrize("label", ["encode[int8]", "decode[int4]", "combine_encoded[int8]"])
def test_what_is_fused_or_may_be_is_named(label: str) -> None:
    sound = "add.rn.f32 %r1; mul.rn.f32x2 %rd1; sub.rn.f64 %rd2; add.s32 %r2; mad.lo.s32 %r4; div.rn.f32 %r5"
    variant = dataclasses.replace(_labelled(SOUND.kernel), label=label)
    assert fusion(variant, "sm_90", sound) == ()
    for operation in ("fma.rn.f32", "fma.rn.f32x2", "mul.f32", "add.ftz.f32", "sub.f64", "add.f32x2", "fma.rn.bf16x2"):
        (found,) = fusion(variant, "sm_90", f"{sound}; {operation} %r1; {operation} %r2")
        assert str(found) == f"{label} on sm_90: fusion: 2 x {operation}"
        assert fusion(_labelled(SOUND.kernel), "sm_90", operation) == (), "what is not encoded may be fused"


@pytest.mark.full
def test_a_launch_compiles_for_exactly_what_the_variant_says(compiled: Any) -> None:
    assert len(compiled["launches"]) == sum(len(all_variants(TARGETS[name])) for name in ("sm_90", "gfx942"))
    for row in compiled["launches"]:
        for seen in row["seen"]:
            assert seen["signature"] == row["wanted"], row["name"]
            assert seen["attributes"] == [], row["name"]
        assert row["seen"][0] == row["seen"][1] == row["seen"][2], row["name"]


@pytest.mark.full
def test_a_launch_uses_the_very_compilation_that_was_examined(compiled: Any) -> None:
    rows = [row for row in compiled["launches"] if "launched" in row]
    assert len(rows) == 2 * len(SUBSET)
    for row in rows:
        assert row["launched"] == row["examined"], row["name"]


@pytest.mark.full
def test_values_of_constexprs_are_the_variants(compiled: Any) -> None:
    for row in compiled["launches"]:
        name, target = row["name"].rsplit(" on ", 1)
        variant = next(variant for variant in all_variants(TARGETS[target]) if variant.label == name)
        assert row["seen"][0]["constexprs"] == dict(variant.constexprs), name
        assert row["seen"][0]["num_warps"] == variant.num_warps


def test_a_listed_architecture_is_shown_and_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "UNSUPPORTED", {("cuda", 90)})
    monkeypatch.setattr(aot, "compile_variant", lambda variant, target: pytest.fail("compiled a listed one"))
    mixed = _labelled("pack[mixed, wire fp32]")
    report = check.report(mixed, TARGETS["sm_90"])
    assert report.unsupported == variants.unsupported(("cuda", 90))
    assert report.violations == ()
    assert "pack[mixed, wire fp32]              unsupported: Triton generates no code" in check.table([report])


def test_an_unlisted_architecture_that_does_not_compile_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(variant: Variant, target: Target) -> Any:
        raise RuntimeError("PassManager::run failed\nand much more")

    monkeypatch.setattr(aot, "compile_variant", refuse)
    report = check.report(_labelled("pack[fp64, wire fp64]"), TARGETS["gfx942"])
    (violation,) = report.violations
    assert str(violation) == (
        "pack[fp64, wire fp64] on gfx942: compiles: RuntimeError: PassManager::run failed; "
        "not listed in kernels/variants.py"
    )


@pytest.mark.parametrize(
    ("target", "refused"),
    [(("hip", "gfx906"), True), (("hip", "gfx940"), True), (("hip", "gfx942"), False), (("cuda", 75), False)],
)
def test_unsupported(target: tuple[str, int | str], refused: bool) -> None:
    assert (variants.unsupported(target) is not None) == refused


def _labelled(label: str) -> Variant:
    return next(variant for variant in all_variants(TARGETS["sm_90"]) if variant.label == label)


# Two masked loads: the second sits behind a skip, and a loop goes round both.
GCN = """
kernel:
\t.loc\t1 10 0 prologue_end              ; kernel.py:10:0
\ts_load_dwordx2 s[0:1], s[2:3], 0x0
.LBB0_1:                                ; =>This Inner Loop Header: Depth=1
\t.loc\t2 33 19 is_stmt 1               ; chunk.py:33:19 @[ kernel.py:12:5 ]
\tglobal_load_dwordx4 v[0:3], v[8:9], off
\ts_and_saveexec_b64 s[4:5], vcc
\ts_cbranch_execz .LBB0_3
; %bb.2:
\tglobal_load_dwordx4 v[4:7], v[8:9], off offset:2048
.LBB0_3:
\ts_cbranch_scc1 .LBB0_1
; %bb.4:
\ts_endpgm
\t.section\t.rodata,"a",@progbits
\ts_nop 0
"""
# Lines 2 and 4 of the PTX are what the SASS was made from; the store is one branch further, out of the loop.
PTX = """.loc 1 10 0 // kernel.py:10:0
ld.global.v4.b32
.loc 2 33 19 // chunk.py:33:19 @[ kernel.py:12:5 ]
st.global.v2.b32
"""
SASS = """
kernel:
\t//## File ".nv_debug_ptx_txt", line 2
.L_x_1:
        /*0000*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0010*/                   BSSY B0, `(.L_x_2) ;
        /*0020*/                   BSYNC B0 ;
.L_x_2:
        /*0030*/               @P1 BRA `(.L_x_1) ;
        /*0040*/                   BRA `(.L_x_4) ;
.L_x_3:
        /*0050*/                   STL [R1], R0 ;
        /*0060*/                   RET.REL.NODEC R2 `(kernel) ;
.L_x_4:
\t//## File ".nv_debug_ptx_txt", line 4
        /*0070*/                   STG.E.64 desc[UR4][R2.64], R4 ;
        /*0080*/                   EXIT ;
"""


def test_blocks_of_gcn_do_not_end_at_the_skip_of_a_masked_access() -> None:
    entry, loop, end = blocks = parse_gcn(GCN)
    assert [block.successors for block in blocks] == [[1], [1, 2], []]
    assert [instruction.opcode for instruction in end.instructions] == ["s_endpgm"]
    loads = [instruction for instruction in loop.instructions if access_of(instruction) is not None]
    assert [access_of(load) for load in loads] == [Access("global", False, 16)] * 2
    assert [load.frames for load in loads] == [(Frame("chunk.py", 33), Frame("kernel.py", 12))] * 2
    assert access_of(entry.instructions[0]) == Access("scalar", False, 8)
    assert (shortest_turn(blocks, 1), shortest_turn(blocks, 0)) == (5, None)
    assert [in_loop(blocks, index) for index in range(3)] == [False, True, False]


def test_blocks_of_sass() -> None:
    loop, end, unreached = blocks = parse_sass(SASS, PTX)
    assert [block.successors for block in blocks] == [[0, 1], [], []]
    assert [instruction.opcode for instruction in end.instructions] == ["BRA", "STG.E.64", "EXIT"]
    assert access_of(loop.instructions[0]) == Access("global", False, 16)
    assert access_of(end.instructions[1]) == Access("global", True, 8)
    assert access_of(unreached.instructions[0]) == Access("stack", True, 4)
    assert loop.instructions[0].frames == (Frame("kernel.py", 10),)
    assert end.instructions[1].frames == (Frame("chunk.py", 33), Frame("kernel.py", 12))
    assert shortest_turn(blocks, 0) == 4


def test_lines_of_triton_3_9() -> None:
    """`.loc` names the nearest call, and lines of inline assembly are counted on from the first."""
    inlined = "function_name $L__info_string0, inlined_at"
    ptx = f""".loc 1 12 5 // kernel.py:12:5
.loc 2 146 51, {inlined} 1 12 5 // chunk.py:146:51
// begin inline asm
.loc 2 33 19, {inlined} 2 146 51 // chunk.py:33:19
mov.u32 %r1, 0x0;
.loc 2 34 19, {inlined} 2 146 51 // chunk.py:34:19
@%p1 ld.global.b32 {{ %r1 }}, [ %rd1 + 0 ];
// end inline asm
.loc 2 147 9, {inlined} 1 12 5 // chunk.py:147:9
add.f32 %r2, %r1, %r1;
"""
    sass = "".join(
        f'\t//## File ".nv_debug_ptx_txt", line {line}\n        /*{address}*/                   {opcode} ;\n'
        for line, address, opcode in ((7, "0000", "LDG.E R4, [R2]"), (10, "0010", "FADD R5, R4, R4"))
    )
    ((load, add),) = [block.instructions for block in parse_sass(sass, ptx)]
    assert load.frames == (Frame("chunk.py", 33), Frame("chunk.py", 146), Frame("kernel.py", 12))
    assert add.frames == (Frame("chunk.py", 147), Frame("kernel.py", 12))


@pytest.mark.parametrize(
    ("opcode", "access"),
    [
        ("LDGSTS.E.BYPASS.LTC128B.128", Access("global", False, 16)),
        ("LDG.E.U16.CONSTANT", Access("global", False, 2)),
        ("LD.E.64", Access("other", False, 8)),
        ("RED.E.ADD.F32.FTZ.RN.STRONG.GPU", Access("other", True, 4)),
        ("SHFL.BFLY", Access("exchange", False, 4)),
        ("REDUX.MIN", Access("exchange", False, 4)),
        ("LDC.64", None),
        ("FFMA.FTZ", None),
        ("global_load_ushort", Access("global", False, 2)),
        ("global_store_short_d16_hi", Access("global", True, 2)),
        ("global_load_b128", Access("global", False, 16)),
        ("global_load_u16", Access("global", False, 2)),
        ("global_store_d16_hi_b16", Access("global", True, 2)),
        ("global_store_b8", Access("global", True, 1)),
        ("s_load_b512", Access("scalar", False, 64)),
        ("ds_store_b64", Access("exchange", True, 0)),
        ("ds_load_2addr_stride64_b64", Access("exchange", False, 0)),
        ("global_atomic_add_u32", Access("other", True, 4)),
        ("buffer_load_dwordx2", Access("global", False, 8)),
        ("flat_load_dword", Access("other", False, 4)),
        ("global_atomic_add_f32", Access("other", True, 4)),
        ("scratch_store_dwordx4", Access("stack", True, 16)),
        ("ds_bpermute_b32", Access("exchange", False, 0)),
        ("v_add_f32_dpp", Access("exchange", False, 0)),
        ("s_add_u32", None),
        ("v_mov_b32_e32", None),
    ],
)
def test_access_of(opcode: str, access: Access | None) -> None:
    assert access_of(Instruction(opcode)) == access


def test_resident_warps() -> None:
    most = check.MULTIPROCESSORS["sm_90"]
    assert check.resident_warps(most, registers=64, shared_bytes=0, num_warps=4) == 32
    assert check.resident_warps(most, registers=33, shared_bytes=0, num_warps=4) == 48  # rounded up to 40
    assert check.resident_warps(most, registers=16, shared_bytes=0, num_warps=1) == 32  # programs
    assert check.resident_warps(most, registers=16, shared_bytes=63 * 1024, num_warps=8) == 24


BROKEN = check.Report(
    "pack[mixed, wire bf16, stats]", "sm_90", violations=(Violation("pack", "sm_90", "fp32->bf16", "stack", "STL"),)
)
SOUND = check.Report(
    "unpack[mixed, wire bf16, stats]",
    "sm_90",
    registers=255,
    in_flight_bytes=128 * 1024,
    branches={"bf16->fp32": BranchFigures(64, 123.4, {16: 4}, {16: 8})},
    loads={16: 12, 8: 4, 4: 7, 2: 35},
    stores={16: 12, 4: 17, 2: 24},
)


@pytest.mark.parametrize(("rows", "status"), [([SOUND], 0), ([SOUND, BROKEN], 1)])
def test_command_line(
    rows: list[check.Report], status: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "aot.json"
    assert _run(rows, _recorded(tmp_path, rows), "--arch", "sm_90", "--json", str(file)) == status
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 100
    assert ("FAILED pack on sm_90, branch fp32->bf16: stack: STL" in printed) == (BROKEN in rows)
    assert [row["kernel"] for row in json.loads(file.read_text())["kernels"]] == [row.kernel for row in rows]


def _recorded(folder: Path, rows: Sequence[check.Report], version: str = triton.__version__) -> Path:
    """A table of these rows, as if they had been found before."""
    path = folder / "machine_code.json"
    found = {Place(row.target, row.kernel): check.row_of(row) for row in rows}
    path.write_text(dump(Table(version, found)))
    return path


def _run(rows: Sequence[check.Report], record: Path, *flags: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "interpreted", lambda: False)
        patch.setattr(check, "report_all", lambda targets, jobs: [rows])
        patch.setattr(check, "RECORD", record)
        return check.main(flags)


def test_a_figure_worse_than_recorded_fails_the_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = _recorded(tmp_path, [SOUND])
    branch = dataclasses.replace(SOUND.branches["bf16->fp32"], loads={8: 8})
    worse = dataclasses.replace(SOUND, registers=256, branches={"bf16->fp32": branch})
    assert _run([worse], record) == 1
    out = capsys.readouterr().out
    name = "unpack[mixed, wire bf16, stats] on sm_90"
    assert f"FAILED {name}: registers: was 255, is 256\n" in out
    assert f"FAILED {name}, branch bf16->fp32: loads: was 16x4, is 8x8\n" in out
    assert "If that is intended, record it: PYTHONPATH=tests python -m support.machine_code --record" in out
    assert _run([worse], record, "--record") == 0
    assert _run([worse], record) == 0
    assert "as recorded in machine_code.json" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "compiled"),
    [
        ([], check.RECORDED),
        (["--arch", "sm_120", "--arch", "gfx942"], ("sm_120", "gfx942")),
        (["--arch", "sm_90", "--arch", "others"], ("sm_90", *OTHERS)),
    ],
)
def test_architectures_are_those_recorded_those_named_or_the_others(
    flags: list[str], compiled: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def report_all(targets: Sequence[Target], jobs: int) -> list[list[check.Report]]:
        seen.extend(target.name for target in targets)
        return [[dataclasses.replace(SOUND, target=name)] for name in seen]

    recorded = [dataclasses.replace(SOUND, target=name) for name in check.RECORDED]
    monkeypatch.setattr(check, "interpreted", lambda: False)
    monkeypatch.setattr(check, "report_all", report_all)
    monkeypatch.setattr(check, "RECORD", _recorded(tmp_path, recorded))
    assert check.main(flags) == 0, "those that are not recorded are compared with nothing"
    assert tuple(seen) == compiled


@pytest.mark.parametrize(
    ("target", "threads", "tile_bytes"),
    [
        (("cuda", 120), 32, 8192),
        (("hip", "gfx942"), 64, 16384),
        (("hip", "gfx90a"), 64, 16384),
        (("hip", "gfx950"), 64, 16384),
        (("hip", "gfx1030"), 32, 8192),
        (("hip", "gfx1201"), 32, 8192),
    ],
)
def test_a_thread_has_four_accesses_of_16_bytes_in_a_tile(
    target: tuple[str, int | str], threads: int, tile_bytes: int
) -> None:
    shape = tuning_for(target)
    assert (warp_size(target), shape.tile_bytes) == (threads, tile_bytes)
    assert shape.tile_bytes == 4 * 16 * threads * shape.num_warps


def test_a_figure_better_than_recorded_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run([dataclasses.replace(SOUND, registers=80)], _recorded(tmp_path, [SOUND])) == 0
    out = capsys.readouterr().out
    assert "better unpack[mixed, wire bf16, stats] on sm_90: registers: was 255, is 80\n" in out
    assert "Better than recorded: record it: PYTHONPATH=tests python -m support.machine_code --record" in out


def test_another_triton_is_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = _recorded(tmp_path, [], version="3.0.0")
    assert _run([SOUND], record) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"not compared: machine_code.json is of triton 3.0.0, this is {triton.__version__}"


def test_an_untested_triton_is_not_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(triton_versions, "VERSION", (99, 0))
    record = _recorded(tmp_path, [], version="99.0.0")
    assert _run([BROKEN], record) == 0
    assert "not judged: rules are for the machine code of versions that were tested" in capsys.readouterr().out
    unfit = check.failed(_labelled(SOUND.kernel), TARGETS["sm_90"], RuntimeError("no"))
    assert _run([unfit], record) == 1


@pytest.mark.parametrize(
    "text", [None, "", "<<<<<<< ours", '{"triton": "3.7.1"}', '{"triton": "3.7.1", "rows": [["a"]]}']
)
def test_no_table_to_compare_with_fails(text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "machine_code.json"
    if text is not None:
        record.write_text(text)
    assert _run([SOUND], record) == 1
    assert "FAILED machine_code.json: " in capsys.readouterr().out


def test_what_breaks_a_rule_is_not_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "machine_code.json"
    assert _run([SOUND, BROKEN], record, "--record") == 1
    assert not record.exists()
    with pytest.raises(SystemExit):
        _run([SOUND], record, "--record", "--arch", "sm_90")
    assert "leave out --arch" in capsys.readouterr().err


def test_what_does_not_compile_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    variant = _labelled(SOUND.kernel)
    unfit = check.failed(variant, TARGETS["sm_90"], RuntimeError("no"))
    assert _run([unfit], _recorded(tmp_path, [SOUND])) == 1
    assert capsys.readouterr().out.count("FAILED") == 1


def test_the_table_kept_here_is_of_what_can_be_launched() -> None:
    """Names alone; `make test` compares the figures. So a variant that is new is noticed without a compiler."""
    kept = load(RECORD.read_text())
    assert list(kept.rows) == [
        Place(name, variant.label) for name in check.RECORDED for variant in all_variants(TARGETS[name])
    ]
    assert dump(kept) == RECORD.read_text()


def test_refuses_to_run_interpreted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(check, "interpreted", lambda: True)
    with pytest.raises(SystemExit, match="2"):
        check.main([])
    assert "TRITON_INTERPRET" in capsys.readouterr().err


if __name__ == "__main__":
    json.dump(compiled_here(), sys.stdout)
