"""`make gpu-check` without a GPU: the runner on stages that hang, crash and lie; its page; what stages judge."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import device_trace
import exact_cases
import gpu_check
import pytest
import records
import stage
import stage_chain
import stage_exact
import stage_profile
import stage_versions
import step_variants
import sweep
import timing
import torch

from fusedreduce.kernels import dispatch, pack, stats, unpack, walk
from fusedreduce.kernels.aot import compile as aot
from fusedreduce.kernels.variants import Variant

PRELUDE = """
import json, os, pathlib, subprocess, sys, time
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
def say(status, **more):
    out.write_text(json.dumps({"status": status, "reason": "", "findings": [], "skipped": [], **more}))
"""
FINE = 'say("ok", seen=1)'


def _stage(name: str, program: str, deadline_s: float = 20.0, **options: Any) -> gpu_check.Stage:
    command = (sys.executable, "-S", "-c", PRELUDE + program)
    return gpu_check.Stage(name=name, command=command, deadline_s=deadline_s, **options)


def _run(folder: Path, *chosen: gpu_check.Stage, **options: Any) -> dict[str, Any]:
    record: dict[str, Any] = {}
    path = folder / "gpu_check_cpu_2026-11-21.json"
    gpu_check.run_all(chosen, record, path, **options)
    written = json.loads(path.read_text())
    assert written == gpu_check._finite(record)
    stages: dict[str, Any] = written["stages"]
    return stages


def _gone(pid: int) -> bool:
    """Ended, or dead and not yet collected by whoever adopted it."""
    fields = gpu_check._stat(pid)
    return not fields or fields[0] == "Z"


def _finding(what: str, met: bool | None, value: float | None = 1.5) -> dict[str, Any]:
    return {"what": what, "value": value, "sign": ">=", "bound": 2.0, "unit": "x", "met": met}


def test_a_stage_that_hangs_is_killed_with_all_it_started_and_what_it_wrote_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "GRACE_S", 0.3)
    hangs = f"""
children = [subprocess.Popen(["sleep", "60"], start_new_session=session) for session in (False, True)]
pathlib.Path({str(tmp_path / "pids")!r}).write_text(" ".join(str(child.pid) for child in children))
say("running", seen=7)
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(60)
"""
    began_s = time.monotonic()
    results = _run(tmp_path, _stage("hangs", hangs, deadline_s=1.0), _stage("after", FINE))
    assert time.monotonic() - began_s < 15
    assert results["hangs"]["status"] == "deadline" and results["hangs"]["seen"] == 7
    assert results["hangs"]["seconds"] < 15
    assert results["after"]["status"] == "ok"
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert all(_gone(pid) for pid in pids)


@pytest.mark.parametrize(
    ("program", "status", "reason"),
    [
        ('say("ok"); sys.exit(3)', "failed", "exit status 3 after it said ok"),
        ('say("running", seen=2); os._exit(1)', "failed", "exit status 1"),
        ("os.kill(os.getpid(), 11)", "failed", "signal 11"),
        ('out.write_text("{\\"status\\": ")', "failed", "no JSON"),
        ('out.write_text("[1]")', "failed", "no result of a stage"),
        ('say("brilliant")', "failed", "no result of a stage"),
        ('say("skipped", reason="no such GPU")', "skipped", "no such GPU"),
        ("pass", "failed", "before it was done"),
        ('print("lost"); print("error: no such driver"); sys.exit(1)', "failed", "see the log: error: no such driver"),
    ],
)
def test_how_a_stage_ends(tmp_path: Path, program: str, status: str, reason: str) -> None:
    results = _run(tmp_path, _stage("odd", program))
    assert results["odd"]["status"] == status
    assert reason in results["odd"]["reason"]


def test_what_cannot_be_started_is_said(tmp_path: Path) -> None:
    results = _run(
        tmp_path,
        gpu_check.Stage(name="nothing", command=("/no/such/program",), deadline_s=1.0),
        _stage("tool", FINE, tools=("no-such-tool-here",), optional=True),
        _stage("rehearsed", FINE, why_skipped="needs a GPU"),
    )
    assert "cannot be run" in results["nothing"]["reason"]
    assert results["tool"]["reason"] == "no-such-tool-here is not installed"
    assert results["rehearsed"]["status"] == "skipped"
    # Only the optional one is as it should be.
    assert [line.partition(":")[0] for line in gpu_check.faults({"stages": results})] == ["nothing", "rehearsed"]


def test_a_spent_budget_skips_and_shortens(tmp_path: Path) -> None:
    results = _run(
        tmp_path,
        _stage("slow", "say('running'); time.sleep(60)", least_s=0.5),
        _stage("late", FINE, least_s=5.0),
        budget_s=1.0,
    )
    assert results["slow"]["status"] == "deadline" and results["slow"]["seconds"] < 10
    assert results["late"]["status"] == "skipped" and "are left of 1" in results["late"]["reason"]


def test_stages_are_given_a_clean_environment_and_one_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    tells = 'say("ok", environment=dict(os.environ))'
    results = _run(tmp_path, _stage("one", tells), _stage("two", tells, environment={"TRITON_INTERPRET": "1"}))
    one, two = (results[name]["environment"] for name in ("one", "two"))
    assert "TRITON_INTERPRET" not in one and two["TRITON_INTERPRET"] == "1"
    assert one["TRITON_CACHE_DIR"] == two["TRITON_CACHE_DIR"]
    assert one["PYTHONPATH"].split(os.pathsep)[-1] == "/somewhere"
    assert not Path(one["TRITON_CACHE_DIR"]).exists()
    # What a record says can be typed: a stage by itself cannot be.
    monkeypatch.setenv(records.COMMAND, one[records.COMMAND])
    assert records.provenance("cpu")["command"] == "python perf/gpu_check.py --only one"


def test_no_more_than_six_files_and_no_number_that_is_none(tmp_path: Path) -> None:
    leaves = """
keep = pathlib.Path(os.environ["FUSEDREDUCE_GPU_CHECK_KEEP"])
for number in range(9):
    (keep / f"kept_{number}.json").write_text("{}")
say("ok", worst=float("nan"))
"""
    results = _run(tmp_path, _stage("leaves", leaves))
    (tmp_path / "gpu_check_cpu_2026-11-21.md").write_text("")
    assert results["leaves"]["worst"] is None
    assert len(list(tmp_path.iterdir())) == gpu_check.MOST_FILES


def test_without_a_gpu_there_is_one_line_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--out", str(tmp_path / "new")])
    with pytest.raises(records.BenchError, match="no GPU"):
        gpu_check.main()
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--rehearse", "--out", str(records.RESULTS)])
    with pytest.raises(records.BenchError, match="rehearsal"):
        gpu_check.main()


@pytest.mark.parametrize(
    ("met", "arguments", "status"), [(True, [], 0), (False, [], 1), (False, ["--no-check"], 0), (None, [], 0)]
)
def test_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, met: bool | None, arguments: list[str], status: int
) -> None:
    program = f'say("ok", findings=[{_finding("speed", met)!r}])'
    monkeypatch.setattr(gpu_check, "stages", lambda rehearse: (_stage("versions", program),))
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--rehearse", "--out", str(tmp_path), *arguments])
    assert gpu_check.main() == status
    (page,) = tmp_path.glob("*.md")
    assert ("MISSED" in page.read_text()) == (met is False)
    # A failed stage is wrong whatever is checked.
    monkeypatch.setattr(gpu_check, "stages", lambda rehearse: (_stage("versions", "sys.exit(1)"),))
    assert gpu_check.main() == 1


def test_the_page_is_one_page_and_shows_what_was_missed() -> None:
    many = [_finding(f"bound {number}", True) for number in range(200)]
    record = {
        "hardware": "a GPU",
        "versions": {"torch": "2.11"},
        "commit": "abc",
        "created": "now",
        "rehearsal": False,
        "stages": {
            "versions": {"status": "ok", "reason": "", "seconds": 3.2, "findings": [], "skipped": []},
            "chain": {
                "status": "deadline",
                "reason": "killed | after 75 s",
                "seconds": 75.0,
                "findings": [*many, _finding("ratio", False), _finding("nothing", False, None)],
                "skipped": [f"part {number}: no time left" for number in range(30)],
                "optional": False,
            },
        },
        "files": ["a.json"],
    }
    page = gpu_check.summary(record)
    assert len(page.splitlines()) <= gpu_check.PAGE_LINES + 12
    assert "200 bounds met, 2 missed" in page
    assert "| chain | ratio | 1.5x | >= 2x | MISSED |" in page
    assert "nothing finite" in page and "killed / after" in page and "part 0: no time left" in page
    assert gpu_check.missed(record)[0] == "chain: ratio is 1.5x, required >= 2x"


def test_every_stage_is_a_script_and_all_fit_into_nine_minutes() -> None:
    every = gpu_check.stages(False)
    assert all(Path(one.command[1]).is_file() for one in every)
    assert sum(one.deadline_s for one in every if not one.optional) + 60 <= gpu_check.BUDGET_S <= 535
    assert all("--rehearse" in one.command for one in gpu_check.stages(True))


def test_a_stages_result_can_be_read_at_any_time(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    one = stage.Stage(out, 10.0, rehearse=False)
    assert json.loads(out.read_text())["status"] == "running"
    one.note(seen=1)
    one.at_most("launches", 3.0, 2.0)
    one.at_least("ratio", float("nan"), 2.0, "x")
    one.skip("graphs", "needs\na GPU")
    result = json.loads(out.read_text())
    assert result["seen"] == 1 and [finding["met"] for finding in result["findings"]] == [False, False]
    assert result["skipped"] == ["graphs: needs a GPU"]
    one.end("ok")
    assert json.loads(out.read_text())["status"] == "ok"


def test_a_part_that_fails_leaves_the_others_their_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: stage.Stage) -> None:
        raise RuntimeError("no such kernel")

    def pass_by(_: stage.Stage) -> None:
        raise stage.Skipped("needs a GPU")

    done: list[stage.Stage] = []
    # Ten of its sixty seconds went into its start.
    monkeypatch.setenv(stage.BEGAN, str(time.monotonic() - 10))
    one = stage.Stage(tmp_path / "result.json", 60.0, rehearse=False)
    assert 40 < one.left_s() < 50
    parts = {
        "first": (0.0, fail),
        "second": (0.0, pass_by),
        "third": (55.0, done.append),
        "fourth": (40.0, done.append),
    }
    with pytest.raises(records.BenchError, match="^first: RuntimeError: no such kernel$"):
        stage.run_parts(one, parts)
    assert done == [one]
    skipped = json.loads((tmp_path / "result.json").read_text())["skipped"]
    assert skipped == ["second: needs a GPU", "third: no time left"]
    one.note(kept=1)

    def wrong(given: stage.Stage) -> None:
        given.note(us=7.0)
        given.at_least("ratio", 3.0, 2.0, "x")
        raise records.BenchError("a gradient is wrong")

    with pytest.raises(records.BenchError, match="^fifth: a gradient is wrong$"):
        stage.run_parts(one, {"fifth": (0.0, wrong)})
    left = json.loads((tmp_path / "result.json").read_text())
    # Numbers of a part whose check fails are gone, those from before are not.
    assert left["kept"] == 1 and "us" not in left and not left["findings"]
    one.end("failed", "x" * 1000 + " the rank's own error")
    assert json.loads((tmp_path / "result.json").read_text())["reason"].endswith("the rank's own error")


class _Graph:
    """Records the calls that are made through `recorded` while it is captured; a replay makes them."""

    capturing: _Graph | None = None

    def __init__(self) -> None:
        self.calls: list[Callable[[], object]] = []

    @classmethod
    @contextlib.contextmanager
    def captured(cls, graph: _Graph, *, stream: object, pool: object, capture_error_mode: str) -> Iterator[None]:
        cls.capturing = graph
        try:
            yield
        finally:
            cls.capturing = None

    @classmethod
    def recorded(cls, call: Callable[[], object]) -> Callable[[], object]:
        return lambda: call() if cls.capturing is None else cls.capturing.calls.append(call)

    def replay(self) -> None:
        for call in self.calls:
            call()


class _Stream:
    device_index = 0

    def __init__(self, device: torch.device) -> None: ...

    def wait_stream(self, other: object) -> None: ...


class _Event:
    def __init__(self, *, enable_timing: bool) -> None:
        self._at_s = 0.0

    def record(self, stream: object) -> None:
        self._at_s = time.perf_counter()

    def elapsed_time(self, end: _Event) -> float:
        return 1e3 * max(1e-6, end._at_s - self._at_s)


def test_what_a_graph_leaves_is_what_is_checked_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*_: object) -> Any:
        return contextlib.nullcontext()

    fakes: dict[str, Any] = {"CUDAGraph": _Graph, "graph": _Graph.captured, "Event": _Event, "Stream": _Stream}
    fakes["current_stream"] = _Stream
    fakes |= dict.fromkeys(("device", "stream", "synchronize", "_sleep", "graph_pool_handle"), nothing)
    ended: list[object] = []
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *pool: ended.append(pool), raising=False)
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(timing, "WARMUP_S", 0.0)
    monkeypatch.setattr(timing, "SHORTEST_REPLAY_S", 0.0)
    outputs = [torch.zeros(3), torch.zeros(3)]

    def cases(first: float, recorded: bool) -> tuple[list[Callable[[], object]], timing.Check]:
        calls = [functools.partial(one.fill_, first) for one in outputs]

        def poison() -> None:
            for one in outputs:
                one.fill_(-1)

        def check() -> None:
            if any(one[0] != first for one in outputs):
                raise records.BenchError("wrong")

        return [_Graph.recorded(call) if recorded else call for call in calls], timing.Check(poison=poison, check=check)

    def refuse() -> None:
        if _Graph.capturing is not None:
            raise RuntimeError("operation not permitted\nwhen stream is capturing")
        good[0](), good[1]()

    good, check = cases(7.0, recorded=True)
    made: dict[str, list[Callable[[], object]]] = {"good": good, "alone": [refuse]}
    times = timing._measure_graphs(made, torch.device("cpu"), 3, 5, {"good": check, "alone": check})
    assert [len(seconds) for seconds in times.values()] == [3, 3]
    assert times.eager == {"alone": "operation not permitted"} and len(ended) == 1
    # Right when it is called, but not recorded: a replay does nothing.
    bad, check = cases(7.0, recorded=False)
    with pytest.raises(records.BenchError, match="wrong"):
        timing._measure_graphs({"bad": bad}, torch.device("cpu"), 3, 5, {"bad": check})


def test_the_exact_check_passes_what_is_right_and_catches_one_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    cases = list(exact_cases.buckets(12, 1, cpu, 500, subnormal=True))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(dispatch, "path_for", lambda *_: "torch")
    for bucket in cases:
        stage_exact.check_bucket(bucket, cpu)
    right = dispatch.pack

    def off_by_a_bit(gradients: Any, chunks: Any, pointers: Any, wire: torch.Tensor, *rest: Any) -> None:
        right(gradients, chunks, pointers, wire, *rest)
        bits = wire.view(exact_cases.BITS[wire.element_size()])
        if bits.numel():
            bits[-1] ^= 1

    monkeypatch.setattr(dispatch, "pack", off_by_a_bit)
    caught = []
    for bucket in cases:
        try:
            stage_exact.check_bucket(bucket, cpu)
        except records.BenchError as error:
            caught.append(str(error))
    assert len(caught) >= 10 and all(re.search(r"pack: 1 of \d+ differ, the first at", line) for line in caught)


def test_sentinels_and_patterns() -> None:
    place = exact_cases.Guarded(10, torch.bfloat16, torch.device("cpu"), shift=3)
    place.inner.fill_(1.0)
    place.check_edges("pack")
    place._bits[-1] = 0
    with pytest.raises(records.BenchError, match="after its place"):
        place.check_edges("pack")
    values = torch.empty(5000)
    stage_exact.fill_patterns(values)
    bits = values.view(torch.int32).tolist()
    assert len(set(bits)) == 5000
    expected = [(number * stage_exact.ODD) % 2**32 for number in (0, 1, 2, 4999)]
    assert [bits[number] % 2**32 for number in (0, 1, 2, 4999)] == expected


def test_a_trace_is_summed_up_by_kind_outside_of_collectives() -> None:
    def event(cat: str, name: str, ts: float, dur: float) -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur}

    events = [
        event("user_annotation", device_trace.STEP, 100, 50),
        event("gpu_user_annotation", device_trace.STEP, 101, 400),
        event("kernel", "_pack_kernel", 110, 6),
        event("kernel", "_pack_kernel", 120, 2),
        event("gpu_memcpy", "Memcpy HtoD", 130, 1),
        event("kernel", "ncclDevKernel_AllReduce", 140, 30),
        event("cuda_runtime", "cudaStreamSynchronize", 145, 3),
        event("cuda_runtime", "cudaDeviceSynchronize", 151, 3),
        event("cuda_driver", "cuLaunchKernelEx", 109, 1),
        {"ph": "M", "name": "process_name"},
    ]
    seen = device_trace.read_trace(events, 1)
    assert (seen.gpu_us, seen.collective_us, seen.launches) == (9.0, 30.0, 3.0)
    assert seen.by_kind == {"kernel": 2.0, "gpu_memcpy": 1.0}
    assert seen.waits == {"cudaStreamSynchronize": 1.0}
    assert seen.longest_us["_pack_kernel"] == 8.0


def test_the_sanitizers_look_at_every_kernel() -> None:
    modules = (pack, unpack, walk, stats)
    kernels = {name for module in modules for name in vars(module) if name.endswith("_kernel")}
    assert kernels == set(stage_profile.KERNELS)  # substrings: "_pack_kernel" is none of "_unpack_kernel"


class _Compiled:
    asm = {"cubin": b"code"}


def test_kernels_are_compiled_in_the_stages_own_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = aot.TARGETS["sm_90"]
    needed, swept = len(aot.all_variants(target)), len(sweep.variants(target.key))
    one = stage.Stage(tmp_path / "result.json", 60.0, rehearse=False)
    one.device = torch.device("cpu")
    calls: list[str] = []
    fails_at, late_at = 0, needed + 3

    def compile_variant(variant: Variant, _: aot.Target) -> _Compiled:
        calls.append(variant.label)
        if len(calls) == fails_at:
            raise RuntimeError("no such instruction\nat line 3")
        if len(calls) == late_at:
            monkeypatch.setattr(one, "_ends_s", time.monotonic())
        return _Compiled()

    monkeypatch.setattr(aot, "compile_variant", compile_variant)
    stage_versions.compile_all(one, target)
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["compiled"], result["swept_compiled"]) == (needed, 3) and len(calls) == needed + 3
    assert result["skipped"][-1] == f"{swept - 3} of {swept} shapes of the sweep: no time left to compile them ahead"
    calls, fails_at = [], 5
    with pytest.raises(records.BenchError, match=f"^1 of {needed} variants .*: RuntimeError: no such instruction$"):
        stage_versions.compile_all(one, target)
    assert len(calls) == needed, "the stages behind it find the others"


def test_what_the_chain_is_asked_for_leaves_room_below_what_its_bytes_give() -> None:
    assert (stage_chain.TORCH_BYTES, stage_chain.FOLDED_BYTES, stage_chain.LATE_BYTES) == (36, 16, 14)
    assert stage_chain.WANTED < 0.85 * 36 / 16 and stage_chain.WANTED_SHORT < 0.85 * 36 / 14


class _Training:
    def __init__(self, name: str) -> None:
        self.name = name

    def step(self) -> str:
        return self.name

    def rewind(self) -> None: ...

    def check(self) -> None: ...


def test_profiled_steps_take_turns_and_are_compared_within_a_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def watch(step: Callable[[], str], *_: object) -> device_trace.Seen:
        done.append(step())
        # Clocks fall from round to round by far more than the variants differ by.
        slower = 1000.0 * (len(done) // 2 if len(done) % 2 == 0 else len(done) // 2 + 1)
        gpu_us = slower + (7.0 if step() == stage_chain.TORCH else 0.0)
        return device_trace.Seen(
            gpu_us=gpu_us, collective_us=0.0, launches=2.0, by_kind={"kernel": 2.0}, waits={}, longest_us={}
        )

    monkeypatch.setattr(device_trace, "watch", watch)
    monkeypatch.setattr(stage_chain, "count_waits", lambda: contextlib.nullcontext([]))
    one = stage.Stage(tmp_path / "result.json", 1000.0, rehearse=True)
    trainings: Any = {name: _Training(name) for name in (step_variants.FLOOR, stage_chain.TORCH)}
    rows: dict[str, dict[str, Any]] = {name: {} for name in trainings}
    stage_chain.profile_steps(one, trainings, rows)
    assert len(set(zip(done[::2], done[1::2], strict=True))) == 2  # either is first in some round
    assert rows[stage_chain.TORCH]["gpu_over_plain_us"] == 7.0
    assert rows[stage_chain.TORCH]["by_kind"] == {"kernel": 2.0} and rows[step_variants.FLOOR]["gpu_over_plain_us"] == 0


def test_ncus_table_is_read() -> None:
    lines = [
        "==PROF== Connected to process 7",
        '"ID","Process ID","Kernel Name","gpu__time_duration.sum","lts__t_sectors_srcunit_tex_op_read.sum"',
        '"","","","nsecond","sector"',
        '"0","7","_pack_kernel","1,234","8,388,608"',
        '"1","7","_unpack_kernel","99","n/a"',
    ]
    rows = stage_profile.read_ncu(lines)
    assert rows[0] == {stage_profile.DURATION: 1234.0, stage_profile.READ: 8388608.0}
    assert len(rows) == 2 and rows[1][stage_profile.READ] != rows[1][stage_profile.READ]
