"""`fusedreduce bench link --here`: ranks on the network that is there; one that cannot, fails or is gone ends all."""

from __future__ import annotations

import argparse
import collections
import os
import random
import socket
import statistics
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_link
import harness
import link_cells
import link_here
import link_rank
import link_steps
import link_together
import link_variants
import link_verdict
import pytest
import records
import report_tables
import step_training
import timing
import torch
import torch.distributed as dist
from records import BenchError
from step_variants import FLOOR
from support.cuda.fake_cuda import FakeCuda
from support.ranks import Program

from fusedreduce.cli import doctor_ranks
from fusedreduce.trace import recorder

STORE: Any = dist.HashStore  # type: ignore[attr-defined]  # torch does not say that it exports it
PERF = Path(records.__file__).parent
TINY = ("--models", "many:3x1000", "--rounds", "2", "--warmup", "2", "--rehearse")
VARIANTS = ("--variants", "torch DDP, views", "ours native", "ours bf16", "ours int8")
# What rank 1 does where it checks the gradients of ours; rank 0 waits for it in the barrier behind that.
FAULTS = {
    "fails": "raise records.BenchError('planted')",
    "breaks": "raise ZeroDivisionError('planted')",
    "is killed": "os.kill(os.getpid(), 9)",
}
BENCHMARK = "import bench_link, records; records.entry(bench_link.main)"
PLANTED = """
import os, sys
import bench_link, link_steps, records
inner = link_steps._same_everywhere
def planted(name, training, case):
    def check():
        {fault}
    if sum(one.numel() for one in training.model.parameters()) == 3000:
        return inner(name, training, case)
    return link_steps.dataclasses.replace(case, check=check)
link_steps._same_everywhere = planted
records.entry(bench_link.main)
"""


class Ranks:
    """Processes as torchrun would start them, on one machine.

    Args:
        typed: options of each rank.
        programs: that a rank runs instead of the benchmark.
        agent: whether a process beside them has the store, as torchrun's agent; else rank 0.
    """

    def __init__(
        self, folder: Path, typed: list[list[str]], programs: dict[int, str] | None = None, *, agent: bool = False
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.processes = []
        untyped: Any = dist
        self.store = untyped.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False) if agent else None
        for rank, options in enumerate(typed):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": len(typed), "LOCAL_WORLD_SIZE": len(typed)}
            environment = {
                **{name: str(value) for name, value in place.items()},
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "TORCHELASTIC_USE_AGENT_STORE": str(agent),
                "GLOO_SOCKET_IFNAME": "lo",
                "PYTHONPATH": str(PERF),
            }
            source = (programs or {}).get(rank, BENCHMARK)
            self.processes.append(Program(source, "--here", *options, environment=environment, folder=folder))

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.close()

    def ended(self) -> list[tuple[int, str, str]]:
        """Of each rank its exit status, and what it said and complained of."""
        return [process.ended() for process in self.processes]


def test_two_ranks_of_torchrun_measure_check_and_leave_a_record(tmp_path: Path) -> None:
    """Its agent has the store then, and `out` is where the command is given. Rank 0 alone says something."""
    typed = [*TINY, *VARIANTS, "--rounds", str(link_verdict.LEAST_ROUNDS)]
    with Ranks(tmp_path, [typed, typed], agent=True) as ranks:
        (status, said, wrong), other = ranks.ended()
    assert status == 0, wrong
    assert other[:2] == (0, "")
    [path] = (tmp_path / "out").iterdir()
    found = records.read(path, published=False)
    assert (
        str(path.relative_to(tmp_path)) in said
        and found["what"] == "link-here"
        and len(found["hardware_of_ranks"]) == 2
    )
    assert found["ended_early"] is None and "Mbit/s of payload: the quickest " in said
    link, one = found["rows"]
    assert link["case"] == one["link"] == "here" and one["case"] == "many:3x1000"
    taken = {FLOOR, link_variants.CLOCKED, "torch DDP, views", link_variants.STRONGEST, link_variants.AGAIN}
    assert taken | {"ours native", "ours bf16"} <= set(one["variants"]), "none is encoded where all have one dimension"
    assert {verdict["at"] for verdict in one["verdicts"]} == {"any", "fp32", "16 bits"} and one["aa_ratio"] is not None
    assert said.count("verdict on many:3x1000") == 1


@pytest.mark.parametrize("how", ["fails", pytest.param("breaks", marks=pytest.mark.full), "is killed"])
def test_a_rank_that_ends_while_others_wait_for_it_ends_all(tmp_path: Path, how: str) -> None:
    """In the second model; what was measured of the first one stays."""
    typed = [*TINY, "--models", "many:3x1000", "many:2x1000", *VARIANTS]
    # Who has been killed does not hear of it, however long rank 0 waits for that.
    briefly = "import link_together; link_together.HEARD_S = 1.0; " if how == "is killed" else ""
    with Ranks(tmp_path, [typed, typed], {0: briefly + BENCHMARK, 1: PLANTED.format(fault=FAULTS[how])}) as ranks:
        (status, shown, wrong), (other_status, _, _) = ranks.ended()
    [path] = (tmp_path / "out").iterdir()
    found = records.read(path, published=False)
    assert [row["case"] for row in found["rows"]] == ["here", "many:3x1000"] and found["ended_early"] == "1 of 2 were"
    assert "verdict on many:3x1000: none of 2 rounds: it takes 10" in shown
    assert status == 1 and other_status == (-9 if how == "is killed" else 1)
    said = {"fails": "error: rank 1: planted", "breaks": "error: rank 1: ZeroDivisionError: planted"}
    assert said.get(how, "error: rank 0: ") in wrong


def test_who_has_done_all_waits_for_rank_0_to_have_written(tmp_path: Path) -> None:
    """It measures nothing here: only rank 0 fails, where a full disk would make it."""
    planted = """
import bench_link, link_here, records
def measure(together):
    together.gather("facts", None)
    if together.rank == 0:
        raise records.BenchError("the disk is full")
link_here._measure = measure
records.entry(bench_link.main)
"""
    with Ranks(tmp_path, [[], []], dict.fromkeys(range(2), planted)) as ranks:
        found = ranks.ended()
    assert [(status, wrong) for status, _, wrong in found] == [(1, "error: rank 0: the disk is full\n")] * 2


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        ([], ["--models", "no-such"], "rank 1: unknown model 'no-such'"),
        pytest.param(
            ["--out", "/dev/null/folder"],
            [],
            "rank 0: /dev/null/folder cannot be made",
            marks=pytest.mark.full,
        ),
    ],
)
def test_what_one_rank_refuses_all_refuse(tmp_path: Path, first: list[str], second: list[str], why: str) -> None:
    with Ranks(tmp_path, [[*TINY, *first], [*TINY, *second]]) as ranks:
        found = ranks.ended()
    for rank, (status, said, wrong) in enumerate(found):
        assert (status, said) == (1, "") and f"error: rank {rank}: {why}" in wrong
    assert list(tmp_path.rglob("*.json")) == []


def test_without_torchrun_it_says_how_to_start_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(BenchError, match="torchrun"):
        link_here.run()


# Who is heard, who is missed


def watches(store: Any, ranks: int, clock: Callable[[], float]) -> list[link_together.Watch]:
    return [link_together.Watch(rank, ranks, store, clock=clock) for rank in range(ranks)]


def test_a_failure_is_heard_by_all_and_the_first_one_stays() -> None:
    first, second, third = watches(STORE(), 3, lambda: 0.0)
    assert first.look() is None and second.look() is None
    second.tell("rank 1: wrong")
    third.tell("rank 2: connection closed")
    assert not second.all_have_heard()
    assert first.look() == third.look() == "rank 1: wrong" and second.all_have_heard()


def test_a_rank_that_gives_no_sign_is_missed_by_the_one_before_it() -> None:
    now_s = [0.0]
    first, second = watches(STORE(), 2, lambda: now_s[0])
    for _ in range(3):
        now_s[0] += link_together.SILENCE_S - 1
        assert second.look() is None and first.look() is None
    now_s[0] += link_together.SILENCE_S
    said = "rank 1 has given no sign for 60 s: its process or its machine is gone"
    assert first.look() == said and second.look() == said


def test_one_that_is_started_later_by_hand_is_waited_for() -> None:
    now_s = [0.0]
    first, second = watches(STORE(), 2, lambda: now_s[0])
    now_s[0] = link_together.CONNECT_S - 1
    assert first.look() is None and second.look() is None and first.look() is None
    first, _ = watches(STORE(), 2, lambda: now_s[0])
    now_s[0] += link_together.CONNECT_S
    assert "rank 1 has given no sign for 120 s" in str(first.look())


def test_a_store_that_never_answers_ends_a_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    together = object.__new__(link_together.Together)
    together._looked_s, together._ends = time.monotonic() - link_together.STORE_S, threading.Event()
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit, match="1"):
        together._minding()
    assert capsys.readouterr().err.startswith("error: torchrun's store has not answered for 90 s")
    together._ends.set()
    together._minding()


# Before a group is there


def known(**changed: Any) -> list[dict[str, Any]]:
    one = {"problem": None, "asked": {"rounds": "20"}, "versions": {"torch": "2.11", "the commit": "abc"}}
    return [one, {**one, **changed}]


def test_ranks_must_have_the_same_options_versions_and_commit() -> None:
    assert link_here.problem_of(known()) is None
    assert link_here.problem_of(known(asked={"rounds": "3"})) == (
        "--rounds differs: 20 on rank 0, 3 on rank 1: start all ranks alike"
    )
    other = {"torch": "2.10", "the commit": "abc"}
    assert link_here.problem_of(known(versions=other)) == (
        "torch differs: 2.11 on rank 0, 2.10 on rank 1: start all ranks alike"
    )
    assert "the commit differs" in str(link_here.problem_of(known(versions={"torch": "2.11", "the commit": "abd"})))
    assert link_here.problem_of(known(problem="no GPU")) == "rank 1: no GPU"


def test_ranks_in_containers_of_one_machine_share_its_cores_and_gpus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each has a name of its own; a machine whose boot is not known goes by its name."""
    asked = argparse.Namespace(rates=None, ranks=None, models=[])
    names = iter("ab")

    def place() -> dict[str, str]:
        return {"host": next(names), "network": "", "boot": "one"}

    monkeypatch.setattr(recorder, "place", place)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    facts = [{**link_here.facts(asked, torch.device("cpu")), "gpu": "GPU-1"} for _ in range(2)]
    monkeypatch.setattr(recorder, "place", lambda: {"host": "a", "network": "", "boot": ""})
    assert (facts[0]["machine"], link_here.facts(asked, torch.device("cpu"))["machine"]) == ("one", "a")
    assert link_here.shares_cores([(one["machine"], one["cores"]) for one in facts])
    taken: list[dict[str, Any]] = []
    raw = {"rates": {str(2**20): 9e9}, "congestion_control": "nccl"}
    rank = argparse.Namespace(rank=0, ranks=2, do=lambda command: raw)
    monkeypatch.setattr(link_here, "settle", lambda together: (asked, torch.device("cuda", 0), facts))
    monkeypatch.setattr(link_here, "Rank", lambda *given: rank)
    monkeypatch.setattr(link_here, "_interface", lambda device: None)
    monkeypatch.setattr(bench_link, "jobs", lambda asked: [])
    monkeypatch.setattr(bench_link, "take", lambda said, found, **known: taken.append({**said, **known}))
    together: Any = argparse.Namespace(gather=lambda what, mine, longer_s: [mine] * 2, group_store=None)
    facts[0]["machine"] = "another"
    link_here._measure(together)
    assert taken[0]["known"] == {"shared_gpu": True} and not taken[0]["shared_cores"], "a GPU's name is its own"


def test_where_no_interface_is_known_no_byte_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "init_process_group", lambda *given, **options: None)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    for name, number in (("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, number)
    assert link_rank.Rank(link_here.interface_of("203.0.113.9"))._sent_bytes() == 0
    assert link_rank.Rank("lo")._sent_bytes() > 0


def fake_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> list[torch.device]:
    """As many GPUs, and those that become the present one."""
    present: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", present.append)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    return present


def test_a_rank_has_the_gpu_of_its_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    present = fake_gpus(monkeypatch, 1)
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert link_here.device_of("cuda") == torch.device("cuda", 0) == present[0]
    assert link_here.device_of("cpu") == torch.device("cpu")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(BenchError, match="rank 2 of its machine, which has 1 GPU$"):
        link_here.device_of("cuda")
    monkeypatch.setenv("NCCL_HOSTID", "another")
    assert link_here.device_of("cuda") == torch.device("cuda", 0)
    fake_gpus(monkeypatch, 0)
    with pytest.raises(BenchError, match="no GPU"):
        link_here.device_of("cuda")


def test_memory_is_checked_before_anything_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    given = "gpt2-medium", ["ours bf16"], torch.device("cuda", 0)
    fake_gpus(monkeypatch, 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    # With both floors three variants of weights, gradients and buckets, the truth's two, twice on a GPU.
    needed_bytes = 2 * 11 * 4 * 354_823_168
    monkeypatch.setattr(timing, "free_bytes", lambda device: needed_bytes)
    link_here.check_memory(*given)
    monkeypatch.setattr(timing, "free_bytes", lambda device: needed_bytes - 1)
    with pytest.raises(BenchError, match=r"gpt2-medium with 3 variants needs about 31.2 GB of cuda memory"):
        link_here.check_memory(*given)


# On a GPU


def test_a_gpus_ranks_talk_over_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: given.update(options, backend=backend))
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    gpu = torch.device("cuda", 0)
    rank = link_rank.Rank("lo", gpu, "a store")
    assert (given["backend"], given["device_id"], given["store"]) == ("nccl", gpu, "a store")
    assert (given["rank"], given["world_size"], given["timeout"]) == (1, 2, link_rank.GROUP_TIMEOUT)
    rows = [{"wire": "native", "bytes": 2**20, "gbit_per_s": 9.0}, {"wire": "bf16", "bytes": 2**20, "gbit_per_s": 8.0}]
    link = {"backend": "nccl", "rows": rows}
    monkeypatch.setattr(doctor_ranks, "measure_link", lambda device: link if device == gpu else None)
    assert rank.do({"do": "raw"}) == {"rates": {2**20: 9e9}, "congestion_control": "nccl"}


def test_on_a_gpu_every_tensor_of_every_collective_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the steps of ours; on a device that is not the present one, so that none is there by chance."""
    collectives: list[torch.device] = []
    waits: list[torch.device] = []
    order: list[str] = []

    def wait(device: torch.device) -> None:
        waits.append(device)
        order.append("wait")

    def clock() -> float:
        order.append("clock")
        return time.perf_counter()

    def step(training: step_training.Training) -> None:
        order.append("step")
        inner_step(training)

    inner_step = step_training.Training.step
    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    monkeypatch.setattr(link_steps, "time", types.SimpleNamespace(perf_counter=clock, process_time=time.process_time))
    monkeypatch.setattr(step_training.Training, "step", step)
    names = (FLOOR, link_variants.CLOCKED, "ours native", "ours bf16", "ours int8", "ours int4")
    variants = link_variants.variants()
    cuda = FakeCuda(monkeypatch, home=1)
    with cuda.recording():
        inner = dist.all_reduce

        def noted(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, **options: Any) -> object:
            collectives.append(tensor.device)
            return inner(tensor, op=op, **options)

        monkeypatch.setattr(dist, "all_reduce", noted)
        found = link_steps.measure(
            "mlp", {name: variants[name] for name in names}, 2, None, lambda: 0, device=cuda.device, warmup_rounds=1
        )
    assert collectives and {*collectives} == {*waits} == {torch.device("cuda", 1)}
    assert {name: len(of) for name, of in found.seconds.items()} == dict.fromkeys(
        [name for name in names if name != link_variants.CLOCKED], 2
    )
    at = [index for index, what in enumerate(order) if what == "step"]
    assert all(order[index - 2 : index + 3] == ["wait", "clock", "step", "wait", "clock"] for index in at)
    assert len(at) == 5 * 3, "two rounds of five variants behind one that is not timed"
    assert found.bounds == {} and found.ready == [] and found.elements == 798_474


def cell(**seconds: list[float]) -> dict[str, Any]:
    """Of 20 rounds on a GPU, where no bound is known."""
    named = {name.replace("__", ", ").replace("_", " "): [one / 1e3 for one in of] for name, of in seconds.items()}
    named |= {FLOOR: [0.005] * 20, link_variants.STRONGEST: [0.1] * 20, link_variants.AGAIN: [0.103] * 20}
    answer = {
        "parameters": 3,
        "elements": 10_000_000,
        "seconds": named,
        "cpu_seconds": named,
        "bytes": {name: [0] * 20 for name in named},
        "bounds": {},
    }
    rates = {str(2**20): 9e9}
    link = link_cells.link_row(None, [{"rates": rates, "congestion_control": "nccl"}] * 2, "here")
    return link_cells.cell("resnet18", link, [answer] * 2, shared_cores=False, counted=False)


def said(one: dict[str, Any]) -> list[str]:
    link_cells.show(one)
    return [f"{verdict['at']}: {verdict['ended']} {verdict['ratio']:.2f}" for verdict in link_verdict.verdicts(one)]


def test_the_verdict_names_the_first_and_is_of_the_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    torchs = {"torch_DDP__views": [200.0] * 20}
    first = cell(**torchs, ours_native=[190.0] * 20, ours_bf16=[98.0] * 20, ours_int4=[60.0] * 20)
    assert said(first) == ["any: ours 0.60", "fp32: ours 0.95", "16 bits: neither 0.98"], "the same twice is 3 % off"
    assert [line.strip() for line in link_verdict.lines(first)[:4]] == [
        "verdict on resnet18:",
        "whatever travels: ours int4 ends a step first",
        f"60.0 ms beside 100.0 of {link_variants.STRONGEST}",
        "ratio by rounds 0.60, sooner in 20 of 20",
    ]
    assert link_verdict.lines(first)[-1].endswith("is 3.0%")
    late = cell(**torchs, ours_native=[220.0] * 20, ours_bf16=[90.0] * 11 + [130.0] * 9)
    assert said(late) == ["any: neither 0.90", "fp32: torch 1.10", "16 bits: neither 0.90"], "11 of 20 rounds"
    assert "torch's best is not beaten" in link_verdict.lines(late)[1]
    assert link_verdict.lines({**late, "not_published": "ranks share a GPU"}) == [
        "verdict on resnet18: none, ranks share a GPU"
    ]
    assert link_verdict.lines(cell(ours_native=[1.0] * 20))[1].startswith("  whatever travels: ours native ends")
    shown = capsys.readouterr().out
    assert "resnet18 at here" in shown and "bound, ms: not known" in shown


def alike(generator: random.Random, counts: dict[str, int], rounds: int) -> dict[str, Any]:
    """A cell whose variants differ by chance alone, in rounds that differ too."""
    of_round = [generator.gauss(100, 20) for _ in range(rounds)]
    variants = {}
    for side, count in counts.items():
        for number in range(count):
            samples = [base + generator.gauss(0, 5) for base in of_round]
            variants[f"{side} {number}"] = {
                "side": side,
                "wire": "native",
                "failed": None,
                "samples_ms": samples,
                "step_ms": statistics.median(samples),
            }
    return {"case": "many:3x1000", "not_published": None, "aa_ratio": None, "variants": variants}


@pytest.mark.parametrize(
    ("ours", "torchs", "rounds"), [(1, 1, 15), (7, 1, 10), (7, 1, 20), (7, 14, 20), (1, 14, 10), (1, 14, 20)]
)
def test_of_variants_that_are_alike_one_is_first_once_in_50_verdicts_at_most(
    ours: int, torchs: int, rounds: int
) -> None:
    generator, cells = random.Random(7 * ours + torchs + rounds), 1000
    counts = {"wrapper": ours, "torch": torchs}
    drawn = (alike(generator, counts, rounds) for _ in range(cells))
    ended = collections.Counter(link_verdict.verdicts(one)[0]["ended"] for one in drawn)
    assert ended.total() == cells and max(ended["ours"], ended["torch"]) <= cells * link_verdict.FALSE_SHARE


def test_few_rounds_have_no_verdict() -> None:
    one = alike(random.Random(0), {"wrapper": 1, "torch": 1}, link_verdict.LEAST_ROUNDS - 1)
    assert link_verdict.verdicts(one) == []
    assert link_verdict.lines(one) == ["verdict on many:3x1000: none of 9 rounds: it takes 10"]


def test_ten_rounds_of_ten_are_enough_and_as_many_of_twenty_as_luck_does_not_explain() -> None:
    torchs = {"torch_DDP__views": [200.0] * 20}
    for won, expected in ((17, "ours"), (16, "ours"), (15, "neither")):
        found = cell(**torchs, ours_native=[150.0] * won + [250.0] * (20 - won), ours_native__views=[260.0] * 20)
        assert link_verdict.verdicts(found)[1]["ended"] == expected, won
    assert 7 * link_verdict.by_chance(10, 10) <= link_verdict.FALSE_SHARE < 7 * link_verdict.by_chance(9, 10)


def test_a_page_of_it_has_no_bound() -> None:
    found = cell(torch_DDP__views=[200.0] * 20, ours_native=[190.0] * 20)
    empty: dict[str, Any] = {"demands": [], "ended_early": None}
    record = {**records.provenance("cpu"), "what": "link-here", "ranks": 2, "rounds": 20, "rows": [found], **empty}
    lines = report_tables.lines_of(record)
    assert any(line.startswith("| here | 5 | 200 | 200 | 0.95 | - | 100 |") for line in lines), lines


def test_buckets_of_any_size_and_powersgd_not_at_all_are_torchs_best() -> None:
    sized = link_variants.sized("torch DDP, views", 4)
    rows = {"torch_DDP__views": [200.0] * 20, "torch_PowerSGD_rank_1": [1.0] * 20, "ours_native": [190.0] * 20}
    found = cell(**rows, **{sized.replace(", ", "__").replace(" ", "_"): [180.0] * 20})
    overall, fp32 = link_verdict.verdicts(found)
    assert (fp32["at"], fp32["torch"], fp32["ended"]) == ("fp32", sized, "torch")
    assert overall["torch"] == link_variants.STRONGEST, "PowerSGD's 1 ms is of gradients that nothing checks"


# What a check of ours asks


def test_ranks_that_differ_in_a_bit_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_steps, "DIGEST_NUMEL", 4)
    model = torch.nn.Linear(5, 2)
    for parameter in model.parameters():
        parameter.grad = torch.arange(parameter.numel(), dtype=torch.float32).view_as(parameter)
    others: list[torch.Tensor] = []

    def most_of_both(tensor: torch.Tensor, op: object) -> None:
        others.append(tensor.clone())
        tensor.copy_(torch.maximum(tensor, others[0]))

    monkeypatch.setattr(dist, "all_reduce", most_of_both)
    training: Any = argparse.Namespace(model=model)
    nothing = harness.Case(prepare=lambda: None, run=lambda: None, check=lambda: None)
    case = link_steps._same_everywhere("ours int8", training, nothing)
    case.check()
    case.check()
    assert len(others[0][0]) == 3 + 1, "pieces of four elements"
    assert model.weight.grad is not None
    model.weight.grad[1, 4] = torch.nextafter(model.weight.grad[1, 4], torch.tensor(100.0))
    with pytest.raises(BenchError, match="ours int8 is wrong: ranks differ in the gradient of weight"):
        case.check()
