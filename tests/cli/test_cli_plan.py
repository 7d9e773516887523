"""`fusedreduce plan` as a user runs it: policies side by side, plan.json, torch's argument, and what it refuses."""

from __future__ import annotations

import ast
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.test_cli_trace import refused
from support.ranks import RankPool
from support.traces import COSTS, UNPADDED, FakeRun, edit
from torch import nn

import fusedreduce
from fusedreduce import ReduceConfig
from fusedreduce.cli import main, wire_forecast
from fusedreduce.kernels.encodings import ENCODINGS
from fusedreduce.planning import plan_file
from fusedreduce.planning.bucketing import MIB, BucketCaps, assign_by_size
from fusedreduce.planning.cost_model import Costs, Linear
from fusedreduce.planning.plan import Plan
from fusedreduce.planning.timeline import MISSING_NS, ready_order, timeline
from fusedreduce.trace import wire_costs
from fusedreduce.trace.problem import known_copies, problem
from fusedreduce.trace.reader import read
from fusedreduce.trace.recorder import group_text
from fusedreduce.trace.wire_costs import Kernels, KernelTable
from fusedreduce.wires import PLAIN_WIRES, WIRES

LAYERS = 24
# A chain of layers, the last first; every fourth of them wide.
RUN = FakeRun(
    plan=tuple((number,) for number in reversed(range(LAYERS))),
    ready_ns=[(LAYERS - number) * 9_000 for number in range(LAYERS)],
    numels=[4_000 if number % 4 else 20_000 for number in range(LAYERS)],
    options={"caps": {"first_bytes": MIB, "cap_bytes": 25 * MIB, "listed_bytes": [], "planned_bytes": None}},
)


def recorded(rank: int, world: int, folder: str) -> None:
    ddp = fusedreduce.DistributedDataParallel(nn.Linear(3, 4), reduce=ReduceConfig(wire="native"))
    with ddp.record_trace(folder):
        ddp(torch.ones(2, 3)).sum().backward()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    RUN.write(tmp_path / "traces")
    return tmp_path / "traces"


def on_hosts(folder: Path, *hosts: str) -> None:
    """Says in a trace where its ranks were."""
    for rank, host in enumerate(hosts):
        edit(folder, lambda found: found.update(place={"host": host, "network": "net:[1]", "boot": "b"}), rank)  # noqa: B023


def rows_of(out: str) -> dict[str, list[float]]:
    """The table: buckets, last collective, finish, exposed, by policy."""
    names = ("static", "ready", "planned", "recorded")
    words = [line.split() for line in out.splitlines() if line.split()[:1] and line.split()[0] in names]
    return {row[0]: [float(cell) for cell in row[1:]] for row in words}


def plan_in(folder: Path) -> tuple[Plan, int]:
    parameters = read(folder)[0].parameters
    names, numels = [one.name for one in parameters], [one.numel for one in parameters]
    return plan_file.load((folder / "plan.json").read_text(), names=names, numels=numels)


def caps_in(out: str) -> list[float]:
    (line,) = [line for line in out.splitlines() if line.startswith("bucket_cap_mb_list=")]
    found: list[float] = ast.literal_eval(line.partition("=")[2])
    return found


def test_policies_side_by_side(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "2 ranks, cpu, wrapper; 24 parameters" in out and "all-reduce 2.0 us and 8.00 Gbit/s" in out
    rows = rows_of(out)
    assert list(rows) == ["static", "ready", "planned", "recorded"]
    assert rows["planned"][1] <= min(row[1] for row in rows.values())
    assert rows["static"][0] == 1 and rows["recorded"][0] == LAYERS, "a cap of 25 MiB holds everything"
    assert rows["planned"][1] < rows["static"][1]
    plan, ranks = plan_in(folder)
    assert (ranks, len(plan)) == (2, rows["planned"][0])
    assert json.loads((folder / "plan.json").read_text())["wire"] == "bf16"
    traces = read(folder)
    asked = wire_forecast.padded(plan, traces[0], problem(traces, COSTS))
    assert round(timeline(plan, asked).last_done / 1e12, 3) == rows["planned"][1]
    assert sorted(path.name for path in folder.iterdir()) == ["plan.json", "rank0.json", "rank1.json"]


def test_torchs_argument_gives_the_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(folder)]) == 0
    out = capsys.readouterr().out
    found, _ = plan_in(folder)
    assert f"With it torch makes the plan's {len(found)} buckets" in out
    asked = problem(read(folder), COSTS)
    limits = [int(cap_mb * MIB) for cap_mb in caps_in(out)]
    order = ready_order(asked.ready_ns)
    assert set(map(frozenset, assign_by_size(asked.size_bytes, ["f"] * LAYERS, limits, order=order))) == set(
        map(frozenset, found)
    )


def test_costs_caps_and_folder_can_be_given(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out_folder = tmp_path / "out"
    # A latency that nothing makes up for: as few buckets as the cap allows. 4 bytes an element, 24 x 4,000 and more.
    assert main(["plan", str(folder), "--costs", "1e6,1000", "--cap-mb", "0.4", "--out", str(out_folder)]) == 0
    out = capsys.readouterr().out
    assert "all-reduce 1000000.0 us and 1000.00 Gbit/s" in out
    total = sum(4 * numel for numel in RUN.numels)
    assert rows_of(out)["planned"][0] == -(-total // int(0.4 * MIB)) and not (folder / "plan.json").exists()
    assert main(["plan", str(folder), "--costs", "0,0.001", "--out", str(out_folder)]) == 0
    assert rows_of(capsys.readouterr().out)["planned"][1] > 1000, "1 Mbit/s"


def test_costs_are_measured_where_no_rank_knows_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    FakeRun(costs=None).write(tmp_path)
    assert main(["plan", str(tmp_path)]) == 0
    assert "all-reduce 2.0 us and 8.00 Gbit/s" in capsys.readouterr().out


def test_a_hooks_trace_gives_torchs_argument_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def as_hook(found: dict[str, Any]) -> None:
        found.update(source="hook", costs=None, config={"wire": "bf16"})
        for parameter in found["parameters"]:
            parameter["ready_ns"] = MISSING_NS

    for rank in range(2):
        edit(folder, as_hook, rank)
    assert main(["plan", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "No plan.json: torch's reducer" in out and caps_in(out) and not (folder / "plan.json").exists()


def test_dtypes_share_buckets_in_the_plan_and_not_in_torchs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def mix(found: dict[str, Any]) -> None:
        for number, parameter in enumerate(found["parameters"]):
            parameter["group"] = group_text("torch.bfloat16" if number % 2 else "torch.float32", "cpu")

    for rank in range(2):
        edit(folder, mix, rank)
    assert main(["plan", str(folder)]) == 0
    out = capsys.readouterr().out
    assert any({number % 2 for number in bucket} == {0, 1} for bucket in plan_in(folder)[0])
    traces = read(folder)
    apart = problem(traces, COSTS, share=False)
    limits = [int(cap_mb * MIB) for cap_mb in caps_in(out)]
    torchs = assign_by_size(apart.size_bytes, apart.groups, limits, order=ready_order(apart.ready_ns))
    caps = BucketCaps(first_bytes=MIB, cap_bytes=25 * MIB)
    usual = assign_by_size(apart.size_bytes, apart.groups, caps.limits_bytes, order=ready_order(apart.ready_ns))

    def ends(plan: list[tuple[int, ...]]) -> int:
        return timeline(tuple(plan), apart).last_done

    assert ends(torchs) <= ends(usual)
    assert "torch makes" in out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "arguments are required: FOLDER, or --simulate"),
        (["nowhere"], "No such file or directory"),
        (
            ["traces", "--costs", "5"],
            "argument --costs: must be two numbers, latency in us and Gbit/s, such as 20,100; got '5'",
        ),
        (["traces", "--costs", "5,0"], "argument --costs: must be two numbers"),
        (["traces", "--costs", "nan,1"], "argument --costs: must be two numbers"),
        (["traces", "--costs=-1,1"], "argument --costs: must be two numbers"),
        (["traces", "--costs", "1,2,3"], "argument --costs: must be two numbers"),
        (["traces", "--cap-mb", "0"], "argument --cap-mb: must be MiB, at least one byte, got '0'"),
        (["traces", "--cap-mb", "inf"], "argument --cap-mb: must be MiB, at least one byte, got 'inf'"),
        (["traces", "--out", "/dev/null"], "--out: '/dev/null' is not a folder that can be written to"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    options: list[str], said: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder.parent)
    refused(["plan", *options], said, capsys)


def forget_times(found: dict[str, Any]) -> None:
    for parameter in found["parameters"]:
        parameter["ready_ns"] = MISSING_NS
    for step in found["steps"]:
        step["buckets"] = [[MISSING_NS] * 6 for _ in step["buckets"]]


def test_a_trace_without_times_is_refused_in_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(2):
        edit(folder, forget_times, rank)
    refused(["plan", str(folder)], "the trace has no ready time of any gradient", capsys)


def test_a_link_that_does_not_fit_has_to_be_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    FakeRun(plan=((3, 2, 1, 0),), costs=None).write(tmp_path)
    refused(["plan", str(tmp_path)], "its buckets have fewer than two sizes): pass --costs", capsys)
    assert main(["plan", str(tmp_path), "--costs", "20,10"]) == 0


def wires_of(out: str) -> dict[str, list[float]]:
    """The table of wires: MiB, buckets, copies, last collective, finish, exposed."""
    cells = [line.split() for line in out.splitlines()]
    rows = [row for row in cells if row[:1] and row[0] in tuple(WIRES) and row[1][0].isdigit()]
    return {row[0]: [float(cell) for cell in row[1:]] for row in rows}


@pytest.fixture
def equal_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every wire's kernels take the same."""
    table = KernelTable({wire: Kernels(1.0, 1.0) for wire in tuple(WIRES)}, "given by the test")
    monkeypatch.setattr(wire_costs, "kernel_table", lambda trace: table)


@pytest.mark.usefixtures("equal_kernels")
def test_wires_side_by_side(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a run at bf16 whose link decides: fewer bytes, an earlier end; the row of its own wire is that of the plan."""
    assert main(["plan", str(folder), "--costs", "20,0.1"]) == 0
    recorded = rows_of(capsys.readouterr().out)["planned"]
    (folder / "plan.json").unlink()
    assert main(["plan", str(folder), "--wires", "--costs", "20,0.1"]) == 0
    out = capsys.readouterr().out
    assert "2 ranks, cpu, wrapper; 24 parameters" in out and "all-reduce 20.0 us and 0.10 Gbit/s" in out
    assert "given by the test\n\nVerdict: " in out and out.endswith("-m fusedreduce.run --wire int4 train.py\n")
    assert "Verdict: wire int4: backward and its tail 8" in out and 'fusedreduce.ReduceConfig(wire="int4"))' in out
    rows = wires_of(out)
    assert tuple(rows) == tuple(WIRES)
    for wire in ("bf16", "fp16"):
        assert [rows[wire][1], *rows[wire][3:]] == recorded
    for larger, smaller in (("native", "bf16"), ("bf16", "int8"), ("int8", "int4")):
        assert all(rows[larger][column] > rows[smaller][column] for column in (0, 3, 4, 5)), (larger, smaller)
    assert rows["native"][0] == round(4 * sum(RUN.numels) / MIB, 2)
    # Copies take what they did: on a link without a cost only they are left, and as many in every row.
    assert main(["plan", str(folder), "--wires", "--costs", "0,1000000", "--cap-mb", "0.01"]) == 0
    rows = wires_of(capsys.readouterr().out)
    assert len({rows[wire][4] for wire in PLAIN_WIRES}) == 1 and not (folder / "plan.json").exists()


def test_copies_and_padding_decide_on_a_fast_link(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Encoding takes 3 times as long as the cast to bf16, decoding twice; one parameter a bucket."""
    kernels = {wire: Kernels(1.0, 1.0) for wire in PLAIN_WIRES} | {wire: Kernels(3.0, 2.0) for wire in ENCODINGS}
    monkeypatch.setattr(wire_costs, "kernel_table", lambda trace: KernelTable(kernels, ""))
    assert main(["plan", str(folder), "--wires", "--costs", "0,1000000", "--cap-mb", "0.01"]) == 0
    rows = wires_of(capsys.readouterr().out)
    assert all(rows[wire][1] == LAYERS for wire in rows)
    # 18 parameters of 4,000 elements are 16 blocks of 256 each, 6 of 20,000 are 79, padded to 80, in 260 bytes.
    assert rows["int8"][0] == round((18 * 16 + 6 * 80) * 260 / MIB, 2)
    # And 63 blocks of 64, padded to 64, and 313, padded to 320, in 34 bytes.
    assert rows["int4"][0] == round((18 * 64 + 6 * 320) * 34 / MIB, 2)
    # 1 us a bucket to pack, and 0.2 ns per element at bf16 both to pack and to unpack.
    assert rows["bf16"][2] == round(1e-6 * (24_000 + 2 * 0.2 * 192_000), 3)
    encoded_ns = (3 + 2) * 0.2 * 192_000 * (18 * 16 + 6 * 80) / (18 * 16 + 6 * 79)
    assert rows["int8"][2] == round(1e-6 * (24_000 + encoded_ns), 3)
    assert rows["int8"][4] > rows["bf16"][4], "copies outweigh what such a link saves"


@pytest.mark.usefixtures("equal_kernels")
def test_wires_are_compared_on_networks_that_are_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(folder), "--wires", "--network", "1gbe,ndr", "--ranks", "2,8"]) == 0
    out = capsys.readouterr().out
    titles = [line.rpartition("; ")[2] for line in out.splitlines() if line.startswith("fusedreduce plan:")]
    assert titles == [f"{name}, {ranks} ranks" for name in ("1 GbE, TCP", "400 Gb InfiniBand") for ranks in (2, 8)]
    finish = [float(line.split()[5]) for line in out.splitlines() if line.startswith("int8 ")]
    two, eight, fast, _ = finish
    assert eight > two > fast
    assert out.count("Verdict: ") == 4 and "\n\n1 GbE, TCP, 2 ranks\nVerdict: wire int4" in out


@pytest.mark.usefixtures("equal_kernels")
@pytest.mark.parametrize(
    ("hosts", "device", "advised"),
    [((), "cpu", False), (("a", "a"), "cpu", False), (("a", "b"), "cpu", True), (("a", "a"), "cuda", True)],
)
def test_the_memory_of_one_machine_is_no_network(
    hosts: Sequence[str], device: str, advised: bool, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Over Gloo; over NCCL it is what such a machine trains with. An older trace does not say where it was."""
    on_hosts(folder, *hosts)
    for rank in range(2):
        edit(folder, lambda found: found.update(device=device), rank)
    assert main(["plan", str(folder), "--wires"]) == 0
    out = capsys.readouterr().out
    assert ("Verdict: wire" in out and "Write one of these:" in out) is advised
    assert ("Verdict: none, and no wire is recommended" in out) is not advised
    if not advised:
        assert main(out.splitlines()[-1].split()[1:]) == 0, "what is advised is accepted"
        assert "Verdict: wire" in capsys.readouterr().out
    else:
        line = "torchrun --nproc-per-node=2 " if device == "cuda" else "torchrun --nnodes=2 --nproc-per-node=1 "
        assert f"\n{line}" in out


def test_ranks_write_down_where_they_are(two: RankPool, tmp_path: Path) -> None:
    two.run(recorded, str(tmp_path))
    first, second = read(tmp_path)
    assert first.place == second.place and first.place is not None and first.place[0]
    assert wire_forecast.of_memory([first, second]) and wire_forecast.nodes([first, second]) == 1
    assert wire_forecast.nodes([first]) is None, "the other rank's file is not there"


@pytest.mark.usefixtures("equal_kernels")
@pytest.mark.parametrize("recorded_at", ["bf16", "int8"])
def test_torchs_ddp_is_compared_at_wire_native_whatever_was_asked_for(
    recorded_at: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch's DDP can send no int8: what it takes does not depend on the wires asked for, nor on their order."""
    for rank in range(2):
        edit(folder, lambda found: found["config"].update(wire=recorded_at), rank)
    torch_ms = set()
    for wires in (["--wire", "all"], [], ["--wire", "int8"], ["--wire", "int8,bf16"], ["--wire", "native"]):
        assert main(["plan", str(folder), "--simulate", "--network", "1gbe", "--ranks", "4", *wires]) == 0
        lines = capsys.readouterr().out.splitlines()
        title = next(at for at, line in enumerate(lines) if line.startswith("the recorded run: ms of a step by wire"))
        assert lines[title + 2].split() == ["torch,"] and "native" in lines[title + 3].split()
        torch_ms.add(next(line for line in lines[title:] if line.startswith("1 GbE, TCP")).split()[4])
        if "native" not in wires:
            assert any(line.startswith("Verdict: ") and "little to gain" not in line for line in lines), wires
            assert "Write one of these:" in " ".join(lines) and "torchrun --nnodes=4 " in " ".join(lines)
    assert len(torch_ms) == 1


def test_models_are_compared_with_torchs_ddp_too(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", "resnet50", "--network", "1gbe", "--ranks", "4", "--wire", "int8"]
    assert main(["plan", "--simulate", *options]) == 0
    out = capsys.readouterr().out
    (row,) = [line.split() for line in out[out.index("ms of a step by wire") :].splitlines() if "1 GbE" in line]
    torch_ms, int8_ms = map(float, row[4:6])
    assert torch_ms > 2 * int8_ms and row[-1] == "int8" and "-m fusedreduce.run --wire int8" in out


@pytest.mark.usefixtures("equal_kernels")
def test_a_recorded_run_is_simulated_on_every_wire(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--simulate", "--network", "1gbe", "--ranks", "2,4", "--cap-mb", "0.5", "--wire", "all"]
    assert main(["plan", str(folder), *options]) == 0
    out = capsys.readouterr().out
    assert [wire for wire in tuple(WIRES) if f"MiB, wire {wire}: ms exposed" in out] == [*WIRES]
    assert "the recorded run: ms of a step by wire" in out and "Verdict: int" in out
    assert "2 ranks, cpu, wrapper; 24 parameters" in out and "buckets of 0.5 MiB" in out
    assert not (folder / "plan.json").exists()


@pytest.mark.usefixtures("equal_kernels")
def test_padding_grows_with_the_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Among 200 ranks a bucket has a multiple of 200 x 1,024 elements: all 192,000 in one, where bf16 has several."""
    dataclasses.replace(RUN, ranks=200, lag=0.0, steps=1).write(tmp_path)
    assert main(["plan", str(tmp_path), "--wires", "--costs", "0,1"]) == 0
    rows = wires_of(capsys.readouterr().out)
    assert rows["int8"][:2] == [round(800 * 260 / MIB, 2), 1] and rows["bf16"][1] > 1


@pytest.mark.usefixtures("equal_kernels")
@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_two_phases_have_two_latencies(wire: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of three ranks, with 2 us measured: a collective's at bf16; of both phases where the run had sent int8."""
    blocks = [-(-numel // 256) for numel in RUN.numels]
    run = dataclasses.replace(RUN, ranks=3)
    run.write(tmp_path)

    def as_int8(found: dict[str, Any]) -> None:
        for parameter, count in zip(found["parameters"], blocks, strict=True):
            parameter.update(wire="int8", wire_bytes=260 * count)

    for rank in range(3 if wire == "int8" else 0):
        edit(tmp_path, as_int8, rank)
    assert main(["plan", str(tmp_path), "--wires"]) == 0
    assert ("all-reduce 1.0 us" if wire == "int8" else "all-reduce 2.0 us") in capsys.readouterr().out
    traces = read(tmp_path)
    kernels = KernelTable({one: Kernels(1.0, 1.0) for one in tuple(WIRES)}, "")
    found = {one: wire_forecast.scaled_costs(traces, one, COSTS, kernels) for one in (*PLAIN_WIRES, "int8")}
    assert [costs.wire.fixed_ns for costs in found.values()] == [2_000, 2_000, 2_000, 4_000]


def test_kernels_are_measured_end_to_end(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(folder), "--wires", "--costs", "0,1000000", "--cap-mb", "0.01"]) == 0
    out = capsys.readouterr().out
    rows = wires_of(out)
    assert min(rows["int8"][2], rows["int4"][2]) > rows["bf16"][2] > 0
    assert "measured here on one thread, in ns per float32 element: native" in out.replace("\n", " ")


def test_buckets_of_one_size_tell_what_copies_cost(tmp_path: Path) -> None:
    """No line fits their link, which --costs gives then; their copies took 1.8 us to pack, and 1 us to unpack."""
    FakeRun(plan=((3, 2, 1, 0),), numels=UNPADDED, costs=None).write(tmp_path)
    copies = known_copies(read(tmp_path))
    assert copies == Costs(
        wire=Linear(fixed_ns=0, fs_per_byte=0),
        pack=Linear(fixed_ns=0, fs_per_byte=200_000),
        unpack=Linear(fixed_ns=0, fs_per_byte=100_000),
    )
