"""Traces: what is written is read back, what is damaged is refused, and what they say on numbers done by hand."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.loopback import PEERS, Loopback
from support.sweep import sweep
from support.traces import COSTS, EPOCH_NS, UNPADDED, FakeRun, check_chrome, edit
from torch.profiler import profile

from fusedreduce import ReduceConfig, Reducer
from fusedreduce.buckets.exchanged import EncodedBucket
from fusedreduce.buckets.phases import Phases
from fusedreduce.comm.group import Group
from fusedreduce.config import Wire
from fusedreduce.errors import FusedReduceError, TraceError
from fusedreduce.kernels.encodings import ENCODINGS
from fusedreduce.planning.bucketing import BucketCaps
from fusedreduce.planning.plan import Plan
from fusedreduce.planning.timeline import MISSING_NS
from fusedreduce.trace.chrome import chrome_trace, slices
from fusedreduce.trace.problem import (
    bucket_bytes,
    exchanges_shards,
    kinds,
    measured_costs,
    on_wire,
    problem,
    ready_times_ns,
    shares,
)
from fusedreduce.trace.reader import RankTrace, read
from fusedreduce.trace.recorder import MARKS, BucketMarks, Recorder, StepMarks, group_text, stall_ns
from fusedreduce.trace.report import Figures, figures, finish_ns, merge

HAND: tuple[tuple[int, ...], ...] = ((30, 30, 32, 45, 60, 62), (12, 32, 33, 50, 62, 63), (40, 41, 43, 70, 70, 75))


def by_hand(rows: tuple[tuple[int, ...], ...] = HAND, began_ns: int = 1000, backward_end_ns: int = 60) -> StepMarks:
    """Three buckets; the second was ready at 12, and the first, which comes before it, at 30 only."""
    marks = StepMarks(len(rows), began_ns)
    marks.forward_ns, marks.backward_end_ns = began_ns - 100, backward_end_ns
    marks.buckets = [BucketMarks(*row) for row in rows]
    return marks


def recorded(folder: Path, *steps: StepMarks, ranks: int = 1, **options: Any) -> list[RankTrace]:
    """The same steps from every rank, of three parameters in three buckets."""
    plan = ((2,), (1,), (0,))
    for rank in range(ranks):
        run = FakeRun(plan=plan, numels=(4, 4, 4), ready_ns=(30, 20, 10), ranks=ranks, options=options)
        recorder = Recorder(folder, run.header(rank))
        for number, marks in enumerate(steps):
            recorder.add(number, plan, marks, None)
        recorder.write(None)
    return read(folder)


def _marks(marks: StepMarks) -> tuple[object, ...]:
    """All of a step's times."""
    return marks.began_ns, marks.forward_ns, marks.backward_end_ns, marks.buckets


class TestRecorder:
    def test_what_is_written_is_read_back(self, tmp_path: Path) -> None:
        folder = tmp_path / "new" / "folder"
        recorder = Recorder(folder, FakeRun(ranks=1).header(0), limit=5)
        first: Plan = ((3, 2), (1,), (0,))
        second: Plan = ((3, 2, 1), (0,))
        for step, plan in enumerate([first, first, second, first]):
            marks = StepMarks(len(plan), 100 * (step + 1))
            marks.buckets[0].ready_ns = step
            recorder.add(step, plan, marks, [1, 2, 3, MISSING_NS] if step == 2 else None)
        path = recorder.write(COSTS)
        assert path == folder / "rank0.json" and [one.name for one in folder.iterdir()] == ["rank0.json"]
        (trace,) = read(folder)
        assert (trace.rank, trace.ranks, trace.device, trace.source) == (0, 1, "cpu", "wrapper")
        assert trace.wall_ns == EPOCH_NS and trace.config["wire"] == "bf16" and trace.costs == COSTS
        assert trace.caps == BucketCaps(first_bytes=8_000, cap_bytes=16_000)
        assert trace.plans == (first, second) and [step.plan for step in trace.steps] == [0, 0, 1, 0]
        assert [step.step for step in trace.steps] == [0, 1, 2, 3]
        assert [step.marks.buckets[0].ready_ns for step in trace.steps] == [0, 1, 2, 3]
        assert [step.ready_ns for step in trace.steps] == [None, None, (1, 2, 3, MISSING_NS), None]
        assert trace.steps[0].marks.buckets[1] == BucketMarks() and trace.steps[0].marks.forward_ns == MISSING_NS
        assert trace.parameters[1].name == "layer1.weight" and trace.parameters[1].group == "float32 cpu"
        (alone,) = read(path)
        steps = [
            [(one.step, one.plan, one.ready_ns, _marks(one.marks)) for one in each.steps] for each in (alone, trace)
        ]
        assert steps[0] == steps[1]
        assert dataclasses.replace(alone, steps=()) == dataclasses.replace(trace, steps=())

    def test_it_stops_at_its_limit(self, tmp_path: Path) -> None:
        recorder = Recorder(tmp_path, FakeRun(ranks=1).header(0), limit=2)
        plan = ((3, 2), (1,), (0,))
        for step in range(4):
            assert recorder.recording == (step < 2)
            marks = StepMarks(3, step + 1)
            marks.buckets[0].pack_ns = step
            recorder.add(step, plan, marks, None)
        assert not recorder.recording
        (trace,) = read(recorder.write(None))
        assert [step.marks.buckets[0].pack_ns for step in trace.steps] == [0, 1] and trace.costs is None

    def test_the_averages_may_come_last(self, tmp_path: Path) -> None:
        recorder = Recorder(tmp_path, FakeRun(ranks=1).header(0))
        (trace,) = read(recorder.write(None, [7, MISSING_NS, 9, 10]))
        assert [one.ready_ns for one in trace.parameters] == [7, MISSING_NS, 9, 10]

    def test_an_end_that_is_told_late_stays_in_order(self, tmp_path: Path) -> None:
        late = by_hand(((10, 11, 12, 99, 60, 62), (20, 21, 30, 29, 62, 63), (40, 41, 43, 50, -1, -1)))
        (trace,) = recorded(tmp_path, late)
        assert [bucket.done_ns for bucket in trace.steps[0].marks.buckets] == [60, 30, 50]

    def test_a_file_is_replaced_whole_or_not_at_all(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        recorder = Recorder(tmp_path, FakeRun(ranks=1).header(0))
        before = recorder.write(None).read_text()
        monkeypatch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(OSError("full")))
        with pytest.raises(OSError, match="full"):
            recorder.write(COSTS)
        assert [one.read_text() for one in tmp_path.iterdir()] == [before]

    def test_a_limit_below_one_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="at least 1 step, got a limit of 0"):
            Recorder(tmp_path, {}, limit=0)


def drop(*path: str | int) -> Callable[[dict[str, Any]], None]:
    def change(found: Any) -> None:
        for name in path[:-1]:
            found = found[name]
        del found[path[-1]]

    return change


def put(value: object, *path: str | int) -> Callable[[dict[str, Any]], None]:
    def change(found: Any) -> None:
        for name in path[:-1]:
            found = found[name]
        found[path[-1]] = value

    return change


DAMAGE: tuple[tuple[Callable[[dict[str, Any]], None], str], ...] = (
    (put("torch-trace", "format"), "no trace of fusedreduce"),
    (put(1, "version"), "its version is 1; this fusedreduce reads version 2"),
    (put(True, "version"), '"version" must be whole'),
    (put(1.0, "version"), '"version" must be whole'),
    (drop("ranks"), '"ranks" is missing'),
    (put(0, "ranks"), '"ranks" must be whole, from 1'),
    (put(2**40, "ranks"), '"ranks" must be whole, from 1'),
    (put(2, "rank"), '"rank" must be whole, from 0 to 1, got 2'),
    (put("gpu", "source"), "\"source\" must be one of wrapper, reducer, hook, got 'gpu'"),
    (put(3, "device"), '"device" must be a text, got 3'),
    (put("\x1b[2Jcpu", "device"), '"device" must be a word'),
    (put("$\\x$", "config", "wire"), '"wire" must be a word'),
    (put(1e9, "clock", "perf_ns"), '"perf_ns" must be whole'),
    (drop("clock", "wall_ns"), '"wall_ns" is missing'),
    (put([], "config"), '"config" must be an object'),
    (drop("config", "wire"), '"wire" is missing'),
    (put(0, "caps", "cap_bytes"), '"cap_bytes" must be whole, from 1'),
    (put([5, 0], "caps", "listed_bytes"), '"listed_bytes" must be whole, from 1'),
    (put(0, "caps", "planned_bytes"), '"planned_bytes" must be whole, from 1'),
    (put([], "parameters"), '"parameters" is empty'),
    (put([1], "parameters"), '"parameters" must be a list of objects'),
    (put(None, "parameters", 0, "name"), '"name" must be a text, got None'),
    (put(-1, "parameters", 0, "numel"), '"numel" must be whole, from 0'),
    (put(-2, "parameters", 0, "ready_ns"), '"ready_ns" must be whole, from -1'),
    (put(1, "parameters", 0, "alone"), '"alone" must be true or false, got 1'),
    (put({}, "costs"), '"wire" is missing'),
    (put(-5, "costs", "wire", "fixed_ns"), '"fixed_ns" must be whole, from 0'),
    (put(math.inf, "costs", "wire", "fixed_ns"), "Infinity is not JSON"),
    (put([[[0, 1], [2]]], "plans"), "a plan does not name each of 4 parameters once"),
    (put([[[0, 1], [2, 3, 3]]], "plans"), "a plan does not name each of 4 parameters once"),
    (put([[[0, 1, 2, 3], []]], "plans"), '"plans" must hold lists of buckets'),
    (put([[[0, 1], [2, 3.0]]], "plans"), "numbers of parameters in a plan must be whole"),
    (put([[[0, False], [2, 3]]], "plans"), "numbers of parameters in a plan must be whole"),
    (put(1, "steps", 0, "plan"), '"plan" must be whole, from 0 to 0, got 1'),
    (drop("steps", 0, "buckets", 0), "step 5 has 2 buckets, its plan 3"),
    (put([1, 2, 3], "steps", 0, "buckets", 0), "bucket 0 of step 5 must be a list of 6 times"),
    (put(math.nan, "steps", 0, "buckets", 0, 0), "NaN is not JSON"),
    (put(-7, "steps", 0, "buckets", 1, 0), "times of bucket 1 of step 5 must be whole, from -1"),
    (put(2**63, "steps", 0, "buckets", 1, 5), "times of bucket 1 of step 5 must be whole"),
    (put(10**9, "steps", 0, "buckets", 1, 2), "the times of bucket 1 of step 5 do not ascend"),
    (put([-1, -1, 0, -1, -1, -1], "steps", 0, "buckets", 2), "were not launched in their plan's order"),
    (put(5, "steps", 1, "step"), "step 5 does not begin after step 5, which stands before it"),
    (put(1, "steps", 1, "began_ns"), '"forward_ns" must be whole, from -1 to 1'),
    (put(-3, "steps", 1, "backward_end_ns"), '"backward_end_ns" must be whole, from -1'),
    (put([1, 2, 3], "steps", 1, "ready_ns"), '"ready_ns" of step 6 has 3 times for 4 parameters'),
    (put([1, 2, 3, None], "steps", 1, "ready_ns"), '"ready_ns" of step 6 must be whole'),
)
DIFFERENCE: tuple[tuple[Callable[[dict[str, Any]], None], str], ...] = (
    (put(3, "ranks"), "its number of ranks: 3, there: 2"),
    (put("reducer", "source"), "its source: 'reducer', there: 'wrapper'"),
    (put("fp16", "config", "wire"), r"its config: \('wire', 'fp16'\), there: \('wire', 'bf16'\)"),
    (put(9, "caps", "first_bytes"), "its limits: "),
    (put("head", "parameters", 2, "name"), r"its parameters: \('head', "),
    (put("float16 cpu", "parameters", 2, "group"), "its parameters: "),
    (put(99, "steps", 2, "step"), "its steps: 99, there: 7"),
    (drop("steps", 2), "its number of steps: 2, there: 3"),
    (put([[[2, 3], [1], [0]]], "plans"), "its plans: "),
)


class TestRead:
    @pytest.mark.parametrize(("change", "said"), DAMAGE, ids=[said for _, said in DAMAGE])
    def test_damage_is_refused(self, tmp_path: Path, change: Callable[[dict[str, Any]], None], said: str) -> None:
        FakeRun().write(tmp_path)
        edit(tmp_path, change)
        with pytest.raises(TraceError) as raised:
            read(tmp_path)
        assert said in str(raised.value) and str(tmp_path / "rank0.json") in str(raised.value)
        assert "\n" not in str(raised.value)

    @pytest.mark.parametrize(("change", "said"), DIFFERENCE, ids=[said for _, said in DIFFERENCE])
    def test_ranks_of_different_runs_are_refused(
        self, tmp_path: Path, change: Callable[[dict[str, Any]], None], said: str
    ) -> None:
        FakeRun().write(tmp_path)
        edit(tmp_path, change, rank=1)
        with pytest.raises(TraceError, match=said):
            read(tmp_path)

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            (b"", "no trace, as no JSON"),
            (b"[1, 2", "no trace, as no JSON"),
            (b"\xff\xfe\x00", "no trace, as no JSON"),
            (b"\x80\x04\x95", "no trace, as no JSON"),
            (b"[" * 100_000, "no trace, as no JSON"),
            (b"1" * 5_000, "no trace, as no JSON"),
            (b"[]", "no trace of fusedreduce"),
            (b"null", "no trace of fusedreduce"),
            (b'{"traceEvents": []}', "no trace of fusedreduce"),
        ],
    )
    def test_foreign_files_are_refused(self, tmp_path: Path, text: bytes, said: str) -> None:
        (tmp_path / "rank0.json").write_bytes(text)
        with pytest.raises(TraceError, match=said):
            read(tmp_path)

    def test_folders_without_all_ranks_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(TraceError, match="no trace there"):
            read(tmp_path)
        with pytest.raises(TraceError, match="No such file"):
            read(tmp_path / "nowhere")
        FakeRun(ranks=3).write(tmp_path)
        (tmp_path / "rank1.json").unlink()
        with pytest.raises(TraceError, match="rank 1 of 3 ranks left no trace there"):
            read(tmp_path)
        (tmp_path / "rank2.json").rename(tmp_path / "rank1.json")
        with pytest.raises(TraceError, match="it is the trace of rank 2"):
            read(tmp_path)

    def test_a_file_that_is_too_large_is_not_opened(self, tmp_path: Path) -> None:
        with (tmp_path / "rank0.json").open("wb") as file:
            file.truncate(2**33)
        with pytest.raises(TraceError, match="8,589,934,592 bytes are more than"):
            read(tmp_path)

    def test_other_files_in_the_folder_are_left_alone(self, tmp_path: Path) -> None:
        FakeRun().write(tmp_path)
        for name in ("trace.json", "rank01.json", "rank0.json.old", ".rank1.json.77", "rank99999999.json"):
            (tmp_path / name).write_text("?")
        assert [trace.rank for trace in read(tmp_path)] == [0, 1]

    def test_one_file_is_one_rank(self, tmp_path: Path) -> None:
        FakeRun(ranks=3).write(tmp_path)
        assert [trace.rank for trace in read(tmp_path / "rank2.json")] == [2]

    def test_devices_have_other_numbers_on_other_ranks(self, tmp_path: Path) -> None:
        FakeRun().write(tmp_path)
        for rank in range(2):
            for number in range(4):
                edit(tmp_path, put(group_text(torch.bfloat16, f"cuda:{rank}"), "parameters", number, "group"), rank)
        assert [trace.parameters[0].group for trace in read(tmp_path)] == ["bfloat16 cuda:0", "bfloat16 cuda:1"]

    @given(st.data())
    @sweep(800)
    def test_no_change_of_a_field_leads_to_anything_but_a_trace_error(
        self, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
    ) -> None:
        folder = tmp_path_factory.mktemp("trace")
        FakeRun(ranks=1, steps=2, looks=True).write(folder)
        found = json.loads((folder / "rank0.json").read_text())
        at: Any = {"": found}
        name: Any = ""
        for _ in range(data.draw(st.integers(1, 5))):
            inner = at[name]
            keys = (
                list(inner) if isinstance(inner, dict) else list(range(len(inner))) if isinstance(inner, list) else []
            )
            if not keys:
                break
            at, name = inner, data.draw(st.sampled_from(keys))
        leaf = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.just("rank"))
        at[name] = data.draw(st.one_of(leaf, st.lists(leaf, max_size=6), st.dictionaries(st.text(max_size=3), leaf)))
        (folder / "rank0.json").write_text(json.dumps(found))
        try:
            run = merge(read(folder))
        except TraceError:
            return
        figures(run)
        json.dumps(chrome_trace(run, range(len(run.steps))), allow_nan=False)
        costs = measured_costs(run.traces)
        if costs is not None:
            problem(run.traces, costs)


class TestFigures:
    def test_one_step_by_hand(self, tmp_path: Path) -> None:
        run = merge(recorded(tmp_path, by_hand()))
        (rank, everyone) = figures(run)
        # On the wire from 32 to 70, of that within backward until 60; waiting from 12 to 30.
        assert rank == Figures(
            step_ns=175, backward_ns=60, exposed_ns=15, overlap=28 / 38, stall_ns=18, stall_share=18 / 60
        )
        assert everyone == rank

    def test_steps_are_counted_where_both_ends_were_recorded(self, tmp_path: Path) -> None:
        steps = [by_hand(began_ns=began_ns) for began_ns in (1_000, 1_500, 1_900, 8_000)]
        recorded(tmp_path, *steps)
        edit(tmp_path, put(77, "steps", 3, "step"))
        assert figures(merge(read(tmp_path)))[0].step_ns == 450

    def test_what_was_not_seen_gives_no_figure(self, tmp_path: Path) -> None:
        unseen = StepMarks(3, 1000)
        (rank, _) = figures(merge(recorded(tmp_path, unseen)))
        assert rank == Figures(
            step_ns=None, backward_ns=None, exposed_ns=None, overlap=None, stall_ns=None, stall_share=None
        )
        assert finish_ns(unseen) is None
        partly = by_hand((HAND[0], (12, 32, 33, -1, -1, -1), HAND[2]))
        assert finish_ns(partly) is None, "its end is not known"
        without = by_hand((HAND[0], (12, -1, -1, -1, -1, -1), HAND[2]))
        assert finish_ns(without) == 75, "it was not launched"
        in_place = by_hand((HAND[0], (12, 32, 33, 90, -1, -1), HAND[2]))
        assert finish_ns(in_place) == 90, "there was nothing to unpack"

    @given(st.lists(st.tuples(st.integers(-1, 30), st.integers(0, 10)), min_size=1, max_size=8))
    def test_stall_counts_the_ns_in_which_a_bucket_waits_for_an_earlier_one(self, rows: list[tuple[int, int]]) -> None:
        buckets = [BucketMarks(ready, ready + wait if ready >= 0 else MISSING_NS) for ready, wait in rows]
        waiting = 0
        for now in range(50):
            waiting += any(
                later.ready_ns != MISSING_NS
                and later.ready_ns <= now < later.pack_ns
                and any(earlier.ready_ns > now for earlier in buckets[:index])
                for index, later in enumerate(buckets)
            )
        known = any(bucket.ready_ns != MISSING_NS for bucket in buckets)
        assert stall_ns(buckets) == (waiting if known else None)

    def test_no_steps_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(TraceError, match="has no steps"):
            merge(recorded(tmp_path))


class TestClocks:
    @pytest.mark.parametrize("skew_ns", [0, 7_000_000, -3_600_000_000_000])
    def test_wall_clocks_that_disagree_are_put_right(self, tmp_path: Path, skew_ns: int) -> None:
        FakeRun(ranks=4, skew_ns=skew_ns).write(tmp_path)
        run = merge(read(tmp_path))
        assert run.errors_ns == tuple(rank * skew_ns for rank in range(4)) and run.spread_ns == 0
        # Forward began first, 200 us before backward did, on all of them at once.
        assert [run.base_ns(rank, 0) for rank in range(4)] == [200_000] * 4

    def test_a_third_of_wild_ends_moves_nothing(self, tmp_path: Path) -> None:
        FakeRun(steps=10).write(tmp_path)

        def disturb(found: dict[str, Any]) -> None:
            for step in found["steps"]:
                launch_ns, unpack_ns = step["buckets"][0][2], step["buckets"][0][4]
                step["buckets"][0][3] = (launch_ns + unpack_ns) // 2

        edit(tmp_path, disturb, rank=1)
        assert merge(read(tmp_path)).errors_ns == (0, 7_000_000)

    def test_without_an_end_in_common_wall_clocks_are_taken(self, tmp_path: Path) -> None:
        FakeRun().write(tmp_path)

        def forget(found: dict[str, Any]) -> None:
            for step in found["steps"]:
                for bucket in step["buckets"]:
                    bucket[3] = MISSING_NS

        edit(tmp_path, forget, rank=1)
        run = merge(read(tmp_path))
        assert (run.errors_ns, run.spread_ns) == ((0, 0), None)

    def test_the_runs_exposed_time_is_that_after_the_slowest_rank(self, tmp_path: Path) -> None:
        FakeRun(ranks=3, lag=0.5).write(tmp_path)
        rows = figures(merge(read(tmp_path)))
        exposed = [one.exposed_ns or 0 for one in rows]
        assert exposed[3] == exposed[2] < exposed[1] < exposed[0], "the others wait for rank 2"
        assert rows[3].backward_ns == rows[2].backward_ns


class TestTimeline:
    def test_slices_by_hand(self, tmp_path: Path) -> None:
        run = merge(recorded(tmp_path, by_hand()))
        # Forward began at 0, backward at 100.
        found = [
            (one.lane, one.stage, one.bucket, one.begin_ns, one.end_ns, one.waited_ns) for one in slices(run, 0, 0)
        ]
        assert found == [
            ("compute", "forward", None, 0, 100, 0),
            ("compute", "backward", None, 100, 160, 0),
            ("compute", "exposed", None, 160, 175, 0),
            ("pack", "pack", 0, 130, 132, 0),
            ("pack", "pack", 1, 132, 133, 20),
            ("pack", "pack", 2, 141, 143, 1),
            ("wire", "all_reduce", 0, 132, 145, 0),
            ("wire", "all_reduce", 1, 145, 150, 12),
            ("wire", "all_reduce", 2, 150, 170, 7),
            ("unpack", "unpack", 0, 160, 162, 0),
            ("unpack", "unpack", 1, 162, 163, 0),
            ("unpack", "unpack", 2, 170, 175, 0),
        ]

    def test_json_has_the_fields_of_the_trace_event_format(self, tmp_path: Path) -> None:
        FakeRun(ranks=3, steps=4).write(tmp_path)
        run = merge(read(tmp_path))
        found = json.loads(json.dumps(chrome_trace(run, range(4)), allow_nan=False))
        check_chrome(found)
        complete = [event for event in found["traceEvents"] if event["ph"] == "X"]
        names = {event["name"] for event in complete}
        label = "bucket 0 (layer3.weight, layer2.weight)"
        assert {f"fusedreduce::{stage} {label}" for stage in ("pack", "all_reduce", "unpack")} <= names
        assert {"forward", "backward", "exposed"} <= names
        first = next(event for event in complete if event["name"] == f"fusedreduce::pack {label}")
        assert first["args"] == {
            "step": 5,
            "bucket": 0,
            "parameters": ["layer3.weight", "layer2.weight"],
            "parameter_count": 2,
            "gradient_bytes": 8_000,
            "wire_bytes": 4_000,
            "waited_us": 0,
        }
        # Per rank 4 steps of forward, backward, exposed, and 3 buckets of 3 stages.
        assert len(complete) == 3 * 4 * (3 + 9)
        assert min(event["ts"] for event in complete) == 0
        [named] = [event for event in found["traceEvents"] if event["name"] == "process_name" and event["pid"] == 2]
        assert named["args"] == {"name": "rank 2 of 3 (cpu, wrapper)"}

    def test_steps_that_overlap_on_a_gpu_do_not_in_a_thread(self, tmp_path: Path) -> None:
        run = merge(recorded(tmp_path, by_hand(began_ns=1_000), by_hand(began_ns=1_120)))
        check_chrome(chrome_trace(run, [0, 1]))

    def test_one_ranks_file_keeps_its_number(self, tmp_path: Path) -> None:
        FakeRun(ranks=3).write(tmp_path)
        run = merge(read(tmp_path / "rank2.json"))
        assert {event["pid"] for event in chrome_trace(run, [0])["traceEvents"]} == {2}


class TestProblem:
    def test_costs_and_times_come_back(self, tmp_path: Path) -> None:
        FakeRun(numels=UNPADDED).write(tmp_path)
        traces = read(tmp_path)
        assert measured_costs(traces) == COSTS
        asked = problem(traces, COSTS)
        assert asked.ready_ns == (44_000, 33_000, 22_000, 11_000), "the later of the two ranks"
        assert asked.wire_bytes == (2_080, 4_000, 960, 2_960) and asked.size_bytes == (4_160, 8_000, 1_920, 5_920)
        assert asked.cap_bytes == 16_000 and problem(traces, COSTS, 99).cap_bytes == 99

    def test_collectives_side_by_side_share_what_they_took(self, tmp_path: Path) -> None:
        # 3,000 and 1,000 bytes, 5 and 3 us, end together after 8; then 4,000 bytes in 6 us, and 2,000 in 4.
        rows = [(0, 8_000), (100, 8_000), (20_000, 26_000), (30_000, 34_000)]
        FakeRun(plan=((3,), (2,), (1,), (0,)), ranks=1, steps=1).write(tmp_path)
        edit(tmp_path, put([[at, at, at, end, end, end] for at, end in rows], "steps", 0, "buckets"))
        costs = measured_costs(read(tmp_path))
        assert costs is not None and costs.wire == COSTS.wire

    def test_a_bucket_that_was_not_seen_hides_the_one_behind_it(self, tmp_path: Path) -> None:
        # The one behind it waited until 20 us; then 4,000 bytes in 6 us, and 2,000 in 4.
        rows = [(3_000, 23_000), (30_000, 36_000), (40_000, 44_000)]
        FakeRun(plan=((3,), (2,), (1,), (0,)), ranks=1, steps=1).write(tmp_path)
        buckets = [[at, at, at, end, end, end] for at, end in rows]
        edit(tmp_path, put([[0, 0, *[MISSING_NS] * 4], *buckets], "steps", 0, "buckets"))
        costs = measured_costs(read(tmp_path))
        assert costs is not None and costs.wire == COSTS.wire

    def test_times_of_single_steps_come_before_averages(self, tmp_path: Path) -> None:
        FakeRun(looks=True).write(tmp_path)
        edit(tmp_path, put(5, "parameters", 0, "ready_ns"))
        edit(tmp_path, put([90_000, -1, 20_000, 10_000], "steps", 2, "ready_ns"))
        assert [ready_times_ns(trace) for trace in read(tmp_path)] == [
            [40_000, 30_000, 20_000, 10_000],
            [44_000, 33_000, 22_000, 11_000],
        ]

    def test_else_a_bucket_speaks_for_its_parameters(self, tmp_path: Path) -> None:
        FakeRun(ranks=1).write(tmp_path)
        for number in range(4):
            edit(tmp_path, put(MISSING_NS, "parameters", number, "ready_ns"))
        (trace,) = read(tmp_path)
        assert ready_times_ns(trace) == [40_000, 30_000, 20_000, 20_000], "packing taken off"

    def test_one_size_says_nothing_of_the_link(self, tmp_path: Path) -> None:
        FakeRun(plan=((3, 2, 1, 0),)).write(tmp_path)
        assert measured_costs(read(tmp_path)) is None

    @pytest.mark.parametrize("wire", ["int8", "int4"])
    @pytest.mark.parametrize("ranks", [1, 2, 3, 64])
    def test_encoded_buckets_count_with_their_padding(self, wire: Wire, ranks: int, tmp_path: Path) -> None:
        """As the bucket itself says. In the hook's buckets others may lie beside."""
        FakeRun(ranks=ranks, steps=0).write(tmp_path)
        trace = on_wire(read(tmp_path)[0], wire)
        numels, cpu = [one.numel for one in trace.parameters], torch.device("cpu")
        shapes = [((numel,), (1,)) for numel in numels]
        dtypes, phases = [torch.float32] * len(numels), Phases(Group(Loopback()), cpu)
        bucket = EncodedBucket(
            numels, dtypes, ENCODINGS[wire], cpu, "bucket 0", shapes, ranks=ranks, phases=phases, lazy=False
        )
        assert bucket_bytes(trace, range(4)) == bucket.wire_bytes
        beside = dataclasses.replace(trace.parameters[0], wire="native", wire_bytes=4_000)
        mixed = dataclasses.replace(trace, parameters=(*trace.parameters, beside))
        assert bucket_bytes(mixed, range(5)) == bucket.wire_bytes + 4_000

    def test_costs_are_fitted_to_bytes_with_padding(self, tmp_path: Path) -> None:
        """Of 64 ranks each of these buckets has 65,536 elements: they are of one size."""
        FakeRun(ranks=64, lag=0.0, steps=1).write(tmp_path)
        traces = read(tmp_path)
        assert measured_costs(traces) is not None
        assert measured_costs([on_wire(trace, "int8") for trace in traces]) is None

    def test_shards_are_exchanged_where_most_elements_are_encoded(self, tmp_path: Path) -> None:
        FakeRun(ranks=3, steps=0).write(tmp_path)
        trace = read(tmp_path)[0]
        assert [exchanges_shards(on_wire(trace, wire)) for wire in ("native", "bf16", "int8", "int4")] == [0, 0, 1, 1]
        assert not exchanges_shards(dataclasses.replace(on_wire(trace, "int8"), ranks=2))
        summed = dataclasses.replace(trace, config={**trace.config, "accumulation": "fp32"})
        assert [exchanges_shards(on_wire(summed, wire)) for wire in ("native", "bf16", "int8")] == [0, 1, 1]
        for number, expected in ((1, True), (3, False)):  # 2,000 of 5,000 elements are native, and 3,500
            parameters = [
                dataclasses.replace(one, wire="native" if at in (1, number) else "int8")
                for at, one in enumerate(trace.parameters)
            ]
            assert exchanges_shards(dataclasses.replace(trace, parameters=tuple(parameters))) == expected

    def test_sparse_buckets_say_nothing_either(self, tmp_path: Path) -> None:
        FakeRun(plan=((3, 2), (1,), (0,)), ranks=1).write(tmp_path)
        for number in (0, 1):
            edit(tmp_path, put(True, "parameters", number, "alone"))
        (trace,) = read(tmp_path)
        assert measured_costs([trace]) is None and problem([trace], COSTS).alone == {0, 1}

    def test_which_dtypes_share(self, tmp_path: Path) -> None:
        FakeRun(ranks=1).write(tmp_path)
        for number, dtype in enumerate((torch.float64, torch.complex128, torch.bfloat16, torch.float32)):
            edit(tmp_path, put(group_text(dtype, "cuda:1"), "parameters", number, "group"))
        (trace,) = read(tmp_path)
        wide = [kind.wide_group for kind in kinds(trace)]
        assert wide[0] == wide[1] != wide[2] == wide[3] and len({kind.group for kind in kinds(trace)}) == 4
        assert shares(trace) and len(set(problem([trace], COSTS).groups)) == 2
        assert len(set(problem([trace], COSTS, share=False).groups)) == 4
        for number, wire in enumerate(("int8", "int8", "native", "bf16")):
            edit(tmp_path, put(wire, "parameters", number, "wire"))
        assert len(set(problem(read(tmp_path), COSTS).groups)) == 3
        for number in range(4):
            edit(tmp_path, put("native", "parameters", number, "wire"))
        assert not shares(*read(tmp_path)) and len(set(problem(read(tmp_path), COSTS, share=True).groups)) == 4
        edit(tmp_path, put("bf16", "parameters", 0, "wire"))
        edit(tmp_path, put("hook", "source"))
        assert not shares(*read(tmp_path))


def test_marks_have_the_files_order() -> None:
    assert MARKS == ("ready_ns", "pack_ns", "launch_ns", "done_ns", "unpack_ns", "end_ns")
    assert copy.copy(BucketMarks(1, 2)) == BucketMarks(1, 2, -1, -1, -1, -1) and not hasattr(BucketMarks(), "__dict__")


def test_a_recorded_reducer_has_the_profilers_labels(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    names = [name for name, _ in model.named_parameters()]
    reducer = Reducer(model.parameters(), Loopback(PEERS), ReduceConfig(wire="bf16", policy="static"), names=names)
    with reducer, reducer.record_trace(tmp_path), profile() as profiler:
        for _ in range(3):
            loss = model(torch.ones(2, 4)).sum()
            reducer.prepare_for_backward(loss)
            loss.backward()
    run = merge([read(tmp_path / "rank0.json")[0]])
    ours = {event["name"] for event in chrome_trace(run, range(len(run.steps)))["traceEvents"] if event["ph"] == "X"}
    theirs = {event.key for event in profiler.key_averages() if event.key.startswith("fusedreduce::")}
    staged = {name for name in ours if name.startswith("fusedreduce::")}
    assert staged and staged <= theirs
    assert {name.split()[0] for name in staged} == {
        f"fusedreduce::{stage}" for stage in ("pack", "all_reduce", "unpack")
    }


def test_a_second_recording_has_steps_of_its_own(tmp_path: Path) -> None:
    parameter = torch.zeros(3, requires_grad=True)
    with Reducer([parameter], Loopback(PEERS), ReduceConfig(policy="static")) as reducer:
        for folder, steps in (("first", 3), ("second", 2), ("third", 4)):
            with reducer.record_trace(tmp_path / folder, limit=3):
                for _ in range(steps):
                    loss = parameter.sum()
                    reducer.prepare_for_backward(loss)
                    loss.backward()
    found = [json.loads((tmp_path / folder / "rank0.json").read_text()) for folder in ("first", "second", "third")]
    assert [[step["step"] for step in one["steps"]] for one in found] == [[1, 2, 3], [4, 5], [6, 7, 8]]


def test_a_file_is_there_once_its_steps_are_kept_and_a_forked_process_writes_none(tmp_path: Path) -> None:
    parameter = torch.zeros(3, requires_grad=True)

    def steps(count: int) -> None:
        for _ in range(count):
            loss = parameter.sum()
            reducer.prepare_for_backward(loss)
            loss.backward()

    with Reducer([parameter], Loopback(PEERS), ReduceConfig(policy="static")) as reducer:
        with ExitStack() as recording:
            recording.enter_context(reducer.record_trace(tmp_path, limit=2))
            steps(2)
            child = os.fork()
            if child == 0:
                with suppress(BaseException):
                    recording.close()
                os._exit(0)
            os.waitpid(child, 0)
            assert not list(tmp_path.iterdir())
            steps(1)
            [file] = tmp_path.iterdir()
            assert [step["step"] for step in json.loads(file.read_text())["steps"]] == [1, 2]
            with pytest.raises(FusedReduceError, match="already"):
                recording.enter_context(reducer.record_trace(tmp_path))
            steps(1)
            file.unlink()
        assert not list(tmp_path.iterdir()), "written once"
