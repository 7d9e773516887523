"""`fusedreduce doctor`: what it finds where all is well, each thing that can be wrong, ranks that do not come."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cli.test_cli_plan import RUN, on_hosts
from support import raw_calls
from support.on_device import pick

import fusedreduce
from fusedreduce.cli import doctor, doctor_forecast, doctor_machine, doctor_ranks, main, wire_forecast
from fusedreduce.cli.arguments import torchrun
from fusedreduce.cli.doctor_machine import Finding, check_kernels, machine_findings
from fusedreduce.cli.report import WIDTH
from fusedreduce.config import Wire
from fusedreduce.kernels import dispatch
from fusedreduce.planning.cost_model import Costs, Linear
from fusedreduce.trace import wire_costs
from fusedreduce.wires import PLAIN_WIRES, WIRES

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter's overflows
ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("doctor", "demo", "trace", "plan", "bench")
GPU = {"name": "A GPU", "capability": 90, "memory_gib": 80}
FACTS: dict[str, Any] = {
    "host": "a",
    "network": "net:[1]",
    "boot": "b",
    "versions": {"python": "3.12.1", "torch": "2.13.0+cu130", "triton": "3.7.1", "numpy": "2", "fusedreduce": "1"},
    "cores": 2,
    "affinity": "0x3",
    "processor": None,
    "gpus": [GPU, GPU],
    "driver": "580.95.05",
    "nccl": "2.28.3",
}
untyped: Any = dist  # names that torch does not say it exports
CPU = FACTS | {"gpus": [], "driver": None, "nccl": None, "processor": "A CPU, 2 cores"}


def versions(**changed: str | None) -> dict[str, Any]:
    return FACTS | {"versions": FACTS["versions"] | changed}


def link_costs(gbit_per_s: float) -> dict[Wire, Costs]:
    return dict.fromkeys(WIRES, Costs(wire=Linear.of_link(20, gbit_per_s)))


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def brief(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that are right, and as quick for every wire: that they are looked at and clocked is tested elsewhere."""
    kernels, copy = wire_costs.Kernels(pack=0.1, unpack=0.1, combine=0.1), Linear(fixed_ns=1000, fs_per_byte=100_000)
    table = wire_costs.KernelTable(dict.fromkeys(WIRES, kernels), "made up.")
    monkeypatch.setattr(doctor_machine, "check_kernels", lambda device: Finding("ok", "kernels", "not looked at"))
    monkeypatch.setattr(wire_costs, "copy_costs", lambda device, ranks: dict.fromkeys(WIRES, (copy, copy)))
    monkeypatch.setattr(wire_costs, "kernel_table", lambda trace: table)


def test_all_is_well_on_one_process(
    alone: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor_machine, "TESTED", ((torch.__version__.partition("+")[0], known("triton")),))
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert f"torch {torch.__version__}" in out and "are a tested pair" in " ".join(out.split())
    assert "[ok]               cpu: the right bits on wires native, bf16, fp16, int8, int4 (" in out
    assert out.endswith("\n0 broken, 1 warning\n"), "that the interpreter is on"
    assert "-> unset TRITON_INTERPRET" in out
    assert len(out.splitlines()) <= 24 and max(map(len, out.splitlines())) <= WIDTH


def known(name: str) -> Any:
    return doctor_machine.facts()["versions"][name]


def test_the_kernels_leave_the_right_bits(device: torch.device) -> None:
    found = check_kernels(device)
    assert found.status == "ok", found.text
    assert pick(device, cpu="(interpreted", cuda="(compiled, ") in found.text


def test_where_triton_cannot_launch_doctor_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_machine, "_compare", lambda *_: "")
    monkeypatch.setattr(doctor_machine, "_current", lambda _: nullcontext())
    why = "triton cannot launch a kernel (RuntimeError: Failed to find C compiler). Install a C compiler: apt-get"
    monkeypatch.setattr(dispatch, "without_kernels", lambda _: why)
    found = check_kernels(torch.device("cuda", 0))
    assert (found.status, found.about, found.action) == ("warning", "kernels", "Install a C compiler: apt-get")
    assert "Failed to find C compiler" in found.text and "no wire of 8 or 4 bits" in found.text


def flip(function: Callable[..., None], tensors: int) -> Callable[..., None]:
    """A launcher that leaves one bit wrong in what it wrote: argument `tensors`, or its second tensor."""

    def wrong(*arguments: Any, **options: Any) -> None:
        function(*arguments, **options)
        written = arguments[tensors][1] if isinstance(arguments[tensors], Sequence) else arguments[tensors]
        written.view(torch.uint8)[-64] ^= 1

    return wrong


@pytest.mark.parametrize(
    ("name", "tensors", "said"), [("pack", 3, "packed tensor 0"), ("unpack", 0, "unpacked tensor 1")]
)
def test_one_wrong_bit_is_found(
    alone: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    tensors: int,
    said: str,
) -> None:
    raw_calls.wrap(monkeypatch, name, lambda function: flip(function, tensors))
    assert main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["status"] == 1
    (broken,) = [one for one in found["findings"] if one["status"] == "broken"]
    for wire in PLAIN_WIRES:
        assert f"wire {wire}, gradients float32/bfloat16/float16: {said}, element " in broken["text"]
    assert "(1 of " in broken["text"]
    assert broken["action"].startswith("do not train with this build")


def test_a_kernel_that_does_not_compile_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no such instruction\nand more")

    raw_calls.replace(monkeypatch, "pack", fail)
    found = check_kernels(torch.device("cpu"))
    assert found.status == "broken"
    assert "wire bf16, gradients float32/bfloat16/float16: RuntimeError: no such instruction;" in found.text


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (FACTS, [("ok", "a tested pair", ""), ("ok", "2 x A GPU (sm_90, 80 GiB); driver 580.95.05, NCCL 2.28.3", "")]),
        (
            versions(triton="3.6.0"),
            [("note", "torch 2.13.0 with triton 3.6.0 is not the pair of our tests", ""), ("ok", "", "")],
        ),
        (FACTS | {"nccl": None}, [("ok", "", ""), ("broken", "NCCL missing", "install a torch with NCCL")]),
        (CPU, [("ok", "", ""), ("note", "Gloo in place of NCCL, on A CPU", "")]),
        (CPU | {"driver": "580.95"}, [("ok", "", ""), ("warning", "torch finds no GPU", "install a CUDA build")]),
        (
            CPU | {"versions": versions(triton=None)["versions"]},
            [("note", "triton is missing, so torch operators", ""), ("note", "no GPU", "")],
        ),
    ],
)
def test_what_a_machine_has(
    monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any], expected: list[tuple[str, str, str]]
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.version, "cuda", None)
    found = machine_findings(facts)
    assert [one.status for one in found] == [status for status, _, _ in expected]
    for one, (_, text, action) in zip(found, expected, strict=True):
        assert text in one.text and one.action.startswith(action) and bool(one.action) == bool(action)


def test_the_driver_is_read_from_what_either_kernel_module_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor_machine, "DRIVER", tmp_path / "version")
    assert doctor_machine.facts()["driver"] is None
    for text, version in (
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12", "535.183.01"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build", "580.95.05"),
    ):
        (tmp_path / "version").write_text(text)
        assert doctor_machine.facts()["driver"] == version


def test_ranks_that_differ_are_named() -> None:
    everyone = [FACTS, FACTS, versions(torch="2.11.0", python="3.11.2")]
    torchs, python = sorted(doctor_ranks.differences(everyone), key=lambda one: one.text, reverse=True)
    assert (torchs.status, torchs.text) == ("broken", "torch differs: 2.13.0+cu130 on ranks 0, 1, 2.11.0 on rank 2")
    assert torchs.action == "install the same torch everywhere: change rank 2"
    assert (python.status, python.text) == ("warning", "python differs: 3.12.1 on ranks 0, 1, 3.11.2 on rank 2")
    (fine,) = doctor_ranks.differences([FACTS, FACTS])
    assert (fine.status, fine.text) == ("ok", "2 of 2 connected, with the same versions")


def test_what_only_some_ranks_find_names_them() -> None:
    ok, took_longer = (Finding("ok", "kernels", f"right bits, {took} s") for took in ("0.1", "2.0"))
    broken = Finding("broken", "kernels", "wrong bits", "do something")
    assert doctor.merge([[ok], [took_longer]]) == [ok]
    assert doctor.merge([[ok], [broken]]) == [
        dataclasses.replace(ok, text="rank 0: right bits, 0.1 s"),
        dataclasses.replace(broken, text="rank 1: wrong bits"),
    ]


def test_what_there_is_to_say_of_a_link() -> None:
    def link(latency_us: float, bf16_ms: float) -> dict[str, Any]:
        times_ms = {"native": 10.0, "bf16": bf16_ms, "fp16": 10.0}
        rows = [
            {"wire": wire, "bytes": size, "ms": ms * share, "gbit_per_s": 1.0}
            for wire, ms in times_ms.items()
            for size, share in zip(doctor_ranks.SIZES_BYTES, (1 / 64, 1 / 8, 1), strict=True)
        ]
        return {"backend": "gloo", "latency_us": latency_us, "rows": rows}

    apart = [CPU | {"host": host} for host in "abc"]
    (fine,) = doctor_ranks.link_findings(link(100, 10), apart)
    assert (fine.status, fine.text) == ("ok", "gloo, latency of an all-reduce 100 us")
    slow, memory, crowded, no_gain = doctor_ranks.link_findings(link(5000, 20), [CPU, CPU, CPU])
    assert slow.status == "warning" and "GLOO_SOCKET_IFNAME" in slow.action
    assert crowded.text.startswith("3 ranks share 2 cores of a") and crowded.action == "start at most one rank per core"
    assert no_gain.text.startswith("bf16: ") and "wire='native'" in no_gain.action
    pinned = [CPU | {"cores": 1, "affinity": hex(1 << core)} for core in range(3)]
    assert doctor_ranks.link_findings(link(100, 10), pinned) == [fine, memory], "a core each"
    assert memory.status == "note" and "of this machine's memory, and not of a network" in memory.text
    assert memory.write[0].startswith(
        "torchrun --nnodes=3 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 -m "
    )
    boots = [CPU | {"boot": boot} for boot in "ab"]
    assert doctor_ranks.link_findings(link(100, 10), boots) == [fine], "two machines of one name"
    namespaces = [CPU | {"network": f"net:[{number}]"} for number in range(2)]
    assert doctor_ranks.link_findings(link(100, 10), namespaces) == [fine], "what joins them may be shaped"
    nvlink = link(100, 10) | {"backend": "nccl"}
    assert "memory" not in "".join(one.text for one in doctor_ranks.link_findings(nvlink, [FACTS, FACTS]))
    assert doctor_ranks.line(link(100, 10), "native").fs(16 * 1024**2) == pytest.approx(10e12, rel=1e-3)


def free_port() -> str:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return str(held.getsockname()[1])


def test_ranks_that_do_not_come_are_named_in_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    place = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    for rank, said in (("0", "no answer from ranks 1, 2 within 0.2 s"), ("1", "rank 1: RuntimeError: nobody answers")):
        monkeypatch.setenv("RANK", rank)
        if rank == "1":
            monkeypatch.setenv("MASTER_PORT", free_port())
        with pytest.raises(SystemExit) as exited:  # nobody else comes, whatever the time
            main(["doctor", "--json", "--timeout", "0.2"])
        assert exited.value.code == 1
        broken = json.loads(capsys.readouterr().out)["findings"][-1]
        assert broken["status"] == "broken" and broken["text"].startswith(said) and broken["action"]


def test_nobody_leaves_before_the_report_is_printed_nor_the_store_before_the_others() -> None:
    store = untyped.HashStore()
    first, second = (doctor_ranks.Peers(rank, 2, store, 20.0) for rank in range(2))
    waits = threading.Thread(target=second.wait_until_printed, kwargs={"printed": False, "without": ()})
    waits.start()
    waits.join(0.1)
    assert waits.is_alive(), "rank 0 has not printed"
    first.wait_until_printed(printed=True, without=())
    assert store.check([f"{doctor_ranks.PREFIX}/0/gone/1"]), "rank 1 needs no store any more"
    waits.join(60)
    assert not waits.is_alive()


def test_a_rank_that_is_gone_keeps_nobody() -> None:
    began = time.monotonic()
    doctor_ranks.Peers(0, 3, untyped.HashStore(), 60.0).wait_until_printed(printed=True, without=(1, 2))
    doctor_ranks.Peers(1, 3, untyped.HashStore(), 0.1).wait_until_printed(printed=False, without=(2,))
    assert time.monotonic() - began < 30.0


def test_a_forecast_follows_bytes_and_link() -> None:
    """100 equal gradients that come evenly in 100 ms; all of them take 80 ms on 5 Gbit/s, 0.4 ms on 1,000."""
    backward = doctor_forecast.of_model(12_500_000, 100.0)
    assert sum(one.size_bytes for one in backward.traces[0].parameters) == 50_000_000
    times = [one.ready_ns for one in backward.traces[0].parameters]
    assert (min(times), max(times), backward.took_ms) == (1_000_000, 100_000_000, 100.0)
    slow = doctor_forecast.forecast(backward, link_costs(1))
    assert [row.wire for row in slow] == list(WIRES)
    assert [row.collectives_ms for row in slow[:3]] == pytest.approx([400.02, 200.02, 200.02], rel=1e-3)
    # 100 x 489 blocks of 260 bytes, and 1,954 of 34, and the padding of the buckets.
    assert [row.collectives_ms for row in slow[3:]] == pytest.approx([101.7, 53.1], rel=0.01)
    # The link is never idle once the first bucket is ready: what does not fit behind backward is left.
    for row in slow[:3]:
        assert row.exposed_ms["planned"] <= row.exposed_ms["static"]
        assert row.collectives_ms - 100 < row.exposed_ms["planned"] < row.collectives_ms - 90
    finding, wire = doctor_forecast.advice(backward, slow)
    assert (finding.status, wire) == ("ok", "int8"), "int4 saves less than a twentieth more"
    assert wire is not None
    code, command = wire_forecast.lines_of_code(wire, torchrun(4))
    assert code.endswith('reduce=fusedreduce.ReduceConfig(wire="int8"))')
    assert command.startswith("torchrun --nnodes=4") and command.endswith("-m fusedreduce.run --wire int8 train.py")
    fast = doctor_forecast.forecast(backward, link_costs(1000))
    finding, wire = doctor_forecast.advice(backward, fast)
    assert (finding.status, finding.action, wire) == ("note", "stay with torch's DDP", None)


@pytest.mark.parametrize(
    ("took_ms", "torch_ms", "wire"),
    [
        ({"native": 100, "bf16": 60, "fp16": 59, "int8": 40, "int4": 30}, 100, "int4"),
        ({"native": 100, "bf16": 60, "fp16": 59, "int8": 56, "int4": 53}, 100, "int4"),
        ({"native": 100, "bf16": 60, "fp16": 59, "int8": 56, "int4": 56}, 100, "bf16"),
        ({"native": 100, "bf16": 60, "fp16": 54, "int8": 90, "int4": 90}, 100, "fp16"),
        ({"native": 100, "bf16": 98, "fp16": 98, "int8": 97, "int4": 110}, 120, "native"),
        ({"native": 100, "bf16": 98, "fp16": 98, "int8": 97, "int4": 110}, 104, None),
    ],
)
def test_a_coarser_wire_must_save_a_twentieth(took_ms: dict[Wire, float], torch_ms: float, wire: Wire | None) -> None:
    found = wire_forecast.verdict(took_ms, torch_ms)
    assert found.wire == wire
    text = wire_forecast.advice(found, torchrun(4))
    assert ("Compare the loss" in text) is (wire not in (None, "native"))
    assert ("Write one of these: ddp = " in " ".join(text.split())) is (wire is not None)
    assert ("Stay with torch's DDP" in text) is (wire is None)
    assert (f'ReduceConfig(wire="{wire}")' in text) is (wire is not None)
    assert max(map(len, text.splitlines())) <= WIDTH


def add_forecast(report: doctor.Report, **given: Any) -> None:
    options = {"model": 12_500_000, "backward_ms": 100.0, "network": None, "ranks": None}
    costs = None if given.pop("unmeasured", False) else link_costs(1)
    doctor.add_forecast(report, argparse.Namespace(**options | given), None, torch.device("cpu"), costs)


@pytest.mark.parametrize("backward_ms", [None, 100.0])
def test_a_backward_that_nobody_has_measured_is_said_to_be_assumed(backward_ms: float | None) -> None:
    report = doctor.Report(2, [], [])
    add_forecast(report, backward_ms=backward_ms)
    (found,) = report.findings
    assert report.backward is not None
    assert report.backward.title.endswith(f"backward of {backward_ms or 400.0:.1f} ms")
    assert ("if backward takes as long as one all-reduce" in found.text) is (backward_ms is None)
    assert ("--backward-ms" in found.action) is (backward_ms is None)


@pytest.mark.parametrize(("backend", "network", "advised"), [("gloo", None, False), ("gloo", "1gbe", True)])
def test_over_memory_no_wire_is_recommended_and_on_a_named_network_one_is(
    backend: str, network: str | None, advised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire_costs, "copy_costs", lambda *_: dict.fromkeys(WIRES, (Linear.of_link(1, 100),) * 2))
    report = doctor.Report(2, [CPU, CPU], [], link={"backend": backend, "latency_us": 1.0, "rows": []})
    add_forecast(report, network=network, ranks=4 if network else None)
    (found,) = report.findings
    assert found.text.startswith("verdict: ") and (report.wire is not None) is advised
    assert ("no wire is recommended: what was measured is this machine's memory" in found.text) is not advised
    assert len(report.rows) == len(WIRES) and (not network or "4 ranks on 1 GbE" in report.backward.title)  # type: ignore[union-attr]


def test_a_network_is_named_in_place_of_one_to_measure(brief: None, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", "1M", "--backward-ms", "5", "--network", "1gbe", "--ranks", "8"]
    assert main(["doctor", *options]) == 0
    out = capsys.readouterr().out
    assert "1,000,000 fp32 parameters, backward of 5.0 ms, 8 ranks on 1 GbE, TCP; exposed behind it:" in " ".join(
        out.split()
    )
    rows = [line.split() for line in out.splitlines() if line.count(" ms") == 3]
    assert [row[0] for row in rows] == list(WIRES)
    assert "[ok]     forecast  verdict: wire int" in out and "-m fusedreduce.run --wire int" in out


def test_a_recorded_backward_needs_no_ranks(brief: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RUN.write(tmp_path / "traces")
    on_hosts(tmp_path / "traces", "a", "b")
    assert main(["doctor", "--trace", str(tmp_path / "traces")]) == 0
    out = capsys.readouterr().out
    assert "192,000 parameters recorded in traces, backward of 0.2 ms; exposed behind it:" in out
    assert "[ok]     forecast  verdict: wire " in out and "fusedreduce.ReduceConfig(wire=" in out
    assert "\ntorchrun --nnodes=2 --nproc-per-node=1 " in out
    (row,) = [line.split() for line in out.splitlines() if line.split()[:2] == ["native", "0.7"]]
    assert row[2:4] == ["0.8", "ms"], "2 us and 1 ns for each of 768,000 bytes"


@pytest.mark.parametrize("hosts", [(), ("a", "a")], ids=["older", "one"])
def test_a_run_of_one_machine_recommends_no_wire(
    brief: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], hosts: Sequence[str]
) -> None:
    RUN.write(tmp_path / "traces")
    on_hosts(tmp_path / "traces", *hosts)
    assert main(["doctor", "--trace", str(tmp_path / "traces"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    last = found["findings"][-1]
    assert found["forecast"]["wire"] is None and "no wire is recommended" in last["text"]
    assert main([*last["write"][0].split()[1:], "--json"]) == 0, "what is advised is accepted"
    assert json.loads(capsys.readouterr().out)["forecast"]["wire"]


def test_a_recorded_backward_is_forecast_on_a_named_network(
    brief: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On as many ranks as were recorded, or as are asked for: from three on shards are exchanged, and padded."""
    RUN.write(tmp_path / "traces")
    sizes = []
    for more, ranks in (([], 2), (["--ranks", "64"], 64)):
        assert main(["doctor", "--trace", str(tmp_path / "traces"), "--network", "1gbe", "--json", *more]) == 0
        found = json.loads(capsys.readouterr().out)["forecast"]
        assert found["of"].endswith(f"{ranks} ranks on 1 GbE, TCP")
        assert [row["wire"] for row in found["rows"]] == list(WIRES)
        assert found["wire"] and found["write"] == wire_forecast.lines_of_code(found["wire"], torchrun(ranks))
        sizes.append([row["size_mib"] for row in found["rows"]])
    assert sizes[0][:3] == pytest.approx(sizes[1][:3], rel=0.01) and sizes[1][3] > sizes[0][3]


def test_a_model_without_a_link_says_how_to_get_one(brief: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", "110M", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["forecast"] is None
    last = found["findings"][-1]
    assert last["action"].startswith("start a rank on each of several machines")
    assert last["write"][0].startswith("torchrun --nn")
    assert last["write"][1] == "fusedreduce doctor --model 110000000 --backward-ms MS --network 10gbe --ranks 4"
    for line in (last["write"][1], doctor_ranks.NAMED):  # what is advised is accepted
        typed = line.replace(" N ", " 1M ").replace(" MS ", " 5 ").split()
        assert main([*typed[1:], "--json"]) == 0 and json.loads(capsys.readouterr().out)["forecast"]


@pytest.mark.parametrize(
    ("ranks", "hosts", "line"),
    [
        (8, None, "torchrun --nnodes=8 --nproc-per-node=1 --rdzv"),
        (8, 2, "torchrun --nnodes=2 --nproc-per-node=4 --rdzv"),
        (8, 1, "torchrun --nproc-per-node=8"),
    ],
)
def test_the_line_to_write_has_the_ranks_that_there_are(ranks: int, hosts: int | None, line: str) -> None:
    assert torchrun(ranks, hosts).startswith(line)


def test_lines_to_copy_are_at_the_margin(brief: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", "110M"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "    -m fusedreduce.cli doctor --model 110000000 --backward-ms MS" in lines
    assert "fusedreduce doctor --model 110000000 --backward-ms MS --network 10gbe --ranks 4" in lines


@pytest.mark.parametrize(
    ("options", "environment", "said"),
    [
        (["--model", "much"], {}, "--model: must be a number of parameters, such as 110M, 1.3B or 25000; got 'much'"),
        (["--network", "2gbe", "--model", "1M"], {}, "--network: invalid choice: '2gbe'"),
        (["--model", "1M", "--backward-ms", "nan"], {}, "--backward-ms: must be a positive number, got 'nan'"),
        (["--trace", "/nowhere"], {}, "--trace: "),
        ([], {"RANK": "0"}, "not set in the environment: WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
    ],
)
def test_wrong_usage(
    alone: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    environment: dict[str, str],
    said: str,
) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as exited:
        main(["doctor", *options])
    assert exited.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


@pytest.mark.parametrize("command", [[], *([one] for one in COMMANDS)], ids=["fusedreduce", *COMMANDS])
def test_help_tells_the_exit_status(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main([*command, "--help"])
    assert exited.value.code == 0
    assert "Exit status: " in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["--version"])
    assert exited.value.code == 0
    expected = f"fusedreduce {fusedreduce.__version__} (torch {torch.__version__}, triton {known('triton')})\n"
    assert capsys.readouterr().out == expected


def test_the_page_has_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "--help"])
    options = re.findall(r"^  (?:-h, )?(--[a-z-]+)", capsys.readouterr().out, re.MULTILINE)
    page = (ROOT / "docs" / "doctor.md").read_text()
    assert len(options) == 8
    assert [option for option in options if f"| `{option}" not in page] == ["--help"]
