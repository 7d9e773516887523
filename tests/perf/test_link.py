"""`fusedreduce bench link`: its arithmetic, what it makes of what ranks say, a tiny run; nothing is left behind."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import bench_link
import harness
import kernel_cases
import link_bound
import link_cells
import link_forecast
import link_here
import link_network
import link_room
import link_steps
import link_variants
import models
import pytest
import records
import report
import report_link
import report_tables
import report_wires
import torch
from link_bound import Link
from records import BenchError
from support.ranks import Program
from support.timeouts import SETUP_S

from fusedreduce.planning.cost_model import Linear
from fusedreduce.reducer import wire_trial

PERF = Path(bench_link.__file__).parent
MARK = "FUSEDREDUCE_TEST_MARK"
MBIT = Link(rate=1e6, burst_bytes=0)


# The arithmetic


def test_the_bound_is_the_local_step_or_what_is_left_to_send_from_the_worst_gradient_on() -> None:
    ready = [(0.010, 1000), (0.030, 3000)]
    assert link_bound.step_bound_s(0.030, ready, "native", 2, MBIT) == pytest.approx(0.138, rel=1e-12)
    assert link_bound.step_bound_s(0.500, ready, "native", 2, MBIT) == 0.500
    # Half of the bytes: from the first on 64 ms; the last one alone, 48 ms, is ready later.
    assert link_bound.step_bound_s(0.030, ready, "bf16", 2, MBIT) == pytest.approx(0.078, rel=1e-12)
    late = [(0.010, 1000), (0.090, 3000)]
    assert link_bound.step_bound_s(0.030, late, "native", 2, MBIT) == pytest.approx(0.186, rel=1e-12)
    # Of 4 ranks each sends 1.5 times its gradients; a burst of as much leaves the local step.
    assert link_bound.step_bound_s(0.030, ready, "native", 4, MBIT) == pytest.approx(0.010 + 0.192, rel=1e-12)
    assert link_bound.step_bound_s(0.030, ready, "native", 2, Link(rate=1e6, burst_bytes=16000)) == 0.030


@pytest.mark.parametrize(
    ("rate_mbit", "burst"), [(1, 131_072), (300, 131_072), (1000, 131_072), (2000, 250_000), (5000, 625_000)]
)
def test_a_burst_holds_a_millisecond_and_two_packets(rate_mbit: float, burst: int) -> None:
    assert link_bound.burst_bytes(rate_mbit) == burst
    assert link_network.tbf(rate_mbit)[:5] == ["tbf", "rate", f"{rate_mbit * 10**6}bit", "burst", str(burst)]


def test_a_raw_stream_is_judged_without_its_burst_and_with_its_headers() -> None:
    seconds = (2**24 - 131_072) * 8 / 956e6  # what is behind the burst goes at the line's rate
    rates = {"65536": 9e9, str(2**24): 8 * 2**24 / seconds}
    link = link_bound.steady(1000, rates)
    assert link.rate == pytest.approx(956e6) and link.burst_bytes == 131_072
    assert link_bound.on_the_line(1448.0) == 1514.0
    assert not link_bound.misses_nominal(956.0, 1000)
    assert not link_bound.misses_nominal(928.0, 1000) and link_bound.misses_nominal(927.0, 1000)
    assert not link_bound.misses_nominal(985.0, 1000) and link_bound.misses_nominal(986.0, 1000)
    assert not link_bound.misses_nominal(1.0, None)
    assert link_bound.steady(None, rates) == Link(rate=9e9, burst_bytes=0)
    row = link_cells.link_row(1000, [{"rates": rates, "congestion_control": "cubic"}] * 2)
    assert row["steady_mbit"] == pytest.approx(956.0) and not row["misses_nominal"]
    slow = {**rates, str(2**24): rates[str(2**24)] / 2}
    row = link_cells.link_row(1000, [{"rates": one, "congestion_control": "cubic"} for one in (rates, slow)])
    assert row["steady_mbit"] == pytest.approx(956.0) and row["misses_nominal"]


def test_bytes_on_the_wire_are_what_a_variant_must_send_and_headers() -> None:
    assert link_bound.must_send_bytes(1000, "native", 2) == 4000.0
    assert link_bound.must_send_bytes(1000, "fp16", 4) == 3000.0
    numel = 10**7
    assert link_bound.wrong_bytes(80e6, numel, "native", 2) is None
    assert link_bound.wrong_bytes(80e6 - 2048, numel, "native", 2) is None
    assert link_bound.wrong_bytes(79e6, numel, "native", 2) == "79,000,000 bytes on the wire, 80,000,000 are needed"
    assert link_bound.wrong_bytes(80e6 * 1.02 + 2**17, numel, "native", 2) is None
    assert "more than headers explain" in str(link_bound.wrong_bytes(80e6, numel, "bf16", 2))


def test_a_target_is_a_share_of_torchs_or_nearness_to_the_bound() -> None:
    assert link_bound.required_ms(100.0, 50.0, share=0.90) == pytest.approx(90.0)
    assert link_bound.required_ms(100.0, 95.0, share=0.90) == pytest.approx(100.0)


# From what ranks say to a record


def answer(**seconds: list[float]) -> dict[str, Any]:
    """One rank's, of 10 million elements whose fp32 takes at least 600 ms, and 16 bits 400."""
    named = {name.replace("__", ", ").replace("_", " "): of for name, of in seconds.items()}
    need = {"native": 40_000_000, "bf16": 20_000_000, "fp16": 20_000_000}
    wires = {name: link_variants.variants()[name].wire for name in named}
    return {
        "parameters": 3,
        "elements": 10_000_000,
        "seconds": named,
        "cpu_seconds": dict(named),
        "bytes": {name: [need.get(wires[name], 10)] * 3 for name in named},
        "ready": [(0.5, 4_000_000, 2), (1.0, 6_000_000, 2)],
        "latency_s": 2e-4,
        "bounds": {"native": [0.6] * 3, **{wire: [0.4] * 3 for wire in ("bf16", "fp16", "int8", "int4")}},
    }


TIMES = {
    "no_DDP": [0.1] * 3,
    "no_DDP__clocked": [0.1] * 3,
    "torch_DDP": [0.9] * 3,
    "torch_DDP__views": [0.8] * 3,
    "torch_PowerSGD_rank_1": [0.2] * 3,
    "ours_native": [0.7, 0.6, 0.8],
    "ours_bf16": [0.41] * 3,
}
LINK: dict[str, Any] = link_cells.link_row(1000, [{"rates": {str(2**24): 963.5e6}, "congestion_control": "cubic"}])


def cell(**changed: list[float]) -> dict[str, Any]:
    one, other = answer(**TIMES), answer(**{**TIMES, **changed})
    for rank in (one, other):
        for hook in ("torch bf16_compress_hook", "torch fp16_compress_hook"):
            rank["seconds"][hook] = [0.5 if "bf16" in hook else 0.48] * 3
            rank["cpu_seconds"][hook] = [0.1, 0.2, 0.3]
            rank["bytes"][hook] = [20_000_000] * 3
    return link_cells.cell("resnet18", LINK, [one, other], shared_cores=False)


def test_a_cell_is_as_slow_as_its_slowest_rank_and_compares_equal_bytes() -> None:
    found = cell(ours_native=[0.5, 0.9, 0.7])
    row = found["variants"]["ours native"]
    assert row["samples_ms"] == [700.0, 900.0, 800.0] and row["step_ms"] == pytest.approx(800.0)
    assert row["sent_bytes"] == 80_000_000 and row["failed"] is None
    assert found["variants"]["torch bf16_compress_hook"]["cpu_ms"] == pytest.approx(200.0)
    assert found["torch_best"] == {
        "native": "torch DDP, views",
        "bf16": "torch fp16_compress_hook",
        "fp16": "torch fp16_compress_hook",
    }
    assert found["bound_ms"] == {"native": 600.0, "bf16": 400.0, "fp16": 400.0, "int8": 400.0, "int4": 400.0}
    of_bound, of_torch = link_cells.ratios(found, "ours bf16")
    assert of_bound == pytest.approx(1.025) and of_torch == pytest.approx(0.41 / 0.48)
    assert link_cells.ratios(found, "torch PowerSGD rank 1") == (None, None)
    assert found["variants"]["torch PowerSGD rank 1"]["failed"] is None  # it sends less: no bound is its own
    assert found["ours_best"] == {"native": "ours native", "bf16": "ours bf16"}
    with_views = answer(**{**TIMES, "ours_native__views": [0.65] * 3})
    [judged] = link_bound.demands([link_cells.cell("resnet18", LINK, [with_views] * 2, shared_cores=False)])
    assert judged["what"].endswith(", native") and judged["value"] == pytest.approx(650.0)
    bf16, native = link_bound.demands([found])
    assert bf16["what"] == "resnet18 at 1000 Mbit/s, bf16" and bf16["met"] and bf16["of"] == "torch fp16_compress_hook"
    assert native["ratio"] == pytest.approx(1.0) and native["met"] is False


@pytest.mark.parametrize(
    ("took_s", "met"),
    [([0.42, 0.40, 0.41, 0.40, 0.42], [True]), ([0.48, 0.40, 0.50, 0.41, 0.40], []), ([0.44, 0.45, 0.46] * 2, [False])],
)
def test_a_chosen_wire_misses_the_fixed_ones_step_beyond_doubt_or_not_at_all(
    took_s: list[float], met: list[bool]
) -> None:
    rounds = len(took_s)
    one = answer(**{**{name: seconds[:1] * rounds for name, seconds in TIMES.items()}, "ours_auto": took_s})
    for name in ("ours bf16", "ours auto"):
        one["bytes"][name] = [20_000_000] * rounds
    one["bytes"]["ours native"] = [40_000_000] * rounds
    one["chosen"] = {"ours auto": {"wire": "bf16", "since": None, "measured_ms": {}, "expected_ms": {}}}
    found = link_cells.cell("resnet18", LINK, [one, one], shared_cores=False)
    assert link_bound.auto_demands([found]) == [], "nothing took part twice"
    judged = link_bound.auto_demands([{**found, "aa_ratio": 1.01}])
    assert [one["met"] for one in judged] == met and link_bound.auto_demands([{**found, "aa_ratio": 1.03}]) == []
    assert {one["what"] for one in judged} <= {"resnet18 at 1 Gbit/s, auto, of ours bf16: step"}


def test_a_row_below_the_bound_or_with_wrong_bytes_is_no_measurement() -> None:
    found = cell(ours_bf16=[0.3] * 3, torch_DDP=[0.9] * 3)
    assert found["variants"]["ours bf16"]["failed"] is None  # the other rank's step is as long as before
    one = answer(**{**TIMES, "ours_bf16": [0.39] * 3, "torch_DDP__views": [0.5] * 3})
    one["bytes"]["ours native"] = [1] * 3
    found = link_cells.cell("resnet18", LINK, [one, one], shared_cores=False)
    assert "below the bound" in found["variants"]["torch DDP, views"]["failed"]
    assert "below the bound" in found["variants"]["ours bf16"]["failed"]
    assert found["variants"]["ours native"]["failed"] == "2 bytes on the wire, 80,000,000 are needed"
    assert found["torch_best"] == {"native": "torch DDP"}
    [verdict] = link_bound.demands([found])
    assert verdict["met"] is None and "bytes on the wire" in verdict["why_not"]
    uncounted = link_cells.cell("resnet18", LINK, [one, one], shared_cores=False, counted=False)
    assert uncounted["variants"]["ours native"]["failed"] is None


def test_shared_cores_and_links_that_miss_are_neither_shown_nor_judged() -> None:
    answers = [answer(**TIMES)] * 2
    shared = link_cells.cell("resnet18", LINK, answers, shared_cores=True)
    missing = link_cells.cell("resnet18", {**LINK, "misses_nominal": True}, answers, shared_cores=False)
    assert shared["not_published"] == "shared cores" and "more than 3%" in missing["not_published"]
    assert link_bound.demands([shared, missing]) == []
    assert report_link.picture(record([shared, missing])) is None
    assert report_link.summary(record([shared, missing])) == []
    assert "Not shown: 1 Gbit/s, shared cores." in page(record([shared]))


def record(rows: list[dict[str, Any]], **changed: Any) -> dict[str, Any]:
    empty: Mapping[str, Any] = {"demands": [], "ended_early": None}
    return {**records.provenance("cpu"), "what": "link", "ranks": 2, "rounds": 3, "rows": rows, **empty, **changed}


def page(found: Mapping[str, Any]) -> str:
    return "\n".join(report_tables.lines_of(found))


def test_the_page_has_ratios_the_bound_and_what_is_lost(tmp_path: Path) -> None:
    found = cell(ours_bf16=[0.5] * 3)
    ended = "--limit-s 9 was reached"
    made = record([LINK, found], demands=link_bound.demands([found]), ended_early=ended)
    said = page(made)
    assert (
        "| 1 Gbit/s | 100 | 800 | 800 | 0.88 | 0.75 | 480 | 480 | 1.04 **slower** | - | - | 0.83 | 200 / - | - |"
        in said
    )
    assert "| 1 Gbit/s | 956 | 1.000 | 16 MiB 964 |" in said
    assert "| resnet18 at 1000 Mbit/s, bf16 | 500 | 480 | 400 | 432 | **MISSED** |" in said
    assert "Not all was measured: --limit-s 9 was reached." in said
    assert report_tables.missed(made) == [
        "resnet18 at 1000 Mbit/s, bf16: 500 ms, 1.04 of 'torch fp16_compress_hook', at most 432 ms"
    ]
    assert report_link.summary(made) == [
        "a step of resnet18 at bf16, as a share of torch's best 16-bit hook's (with bucket sizes tried): "
        "1 Gbit/s 1.04 **slower** (1.04 **slower**)"
    ]
    pictures = report.pictures(made)
    assert list(pictures) == ["link.png", "wires_by_link.png"] and not report.pictures({**made, "what": "link-fsdp"})
    pytest.importorskip("matplotlib")
    for name, save in pictures.items():
        report.draw(save, tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_encoded_wires_stand_beside_our_bf16_in_time_and_bytes() -> None:
    slow = {**LINK, "rate_mbit": 300}
    one = answer(**TIMES, ours_int8=[0.42] * 3, ours_int4=[0.41] * 3)
    one["bounds"] |= {"int8": [0.2] * 3, "int4": [0.1] * 3}
    sent = {"ours bf16": 20_000_000, "ours int8": 10_200_000, "ours int4": 5_800_000}
    one["bytes"] |= {name: [nbytes] * 3 for name, nbytes in sent.items()}
    one["seconds"]["ours bf16"] = [0.8] * 3
    found = link_cells.cell("resnet18", slow, [one, one], shared_cores=False)
    made = record([slow, found], demands=link_bound.encoded_demands([found], 2))
    said = page(made)
    assert "| 300 Mbit/s | 800 | 420 | - | 0.53 | failed | 0.51 | failed | - |" in said
    assert "| resnet18 at 300 Mbit/s, int8: step, of our bf16's | 0.53 | 0.60 | met |" in said
    assert "int4: bytes, of our bf16's | 0.29 | 0.28 | not judged, 11,600,000 bytes on the wire" in said
    assert link_bound.encoded_demands([found], 3) == [] and link_bound.demands([found]) != []
    assert "of bf16's step" not in page(record([LINK, cell()]))
    assert report_link.summary(made)[1:] == [
        "a step of resnet18 at int8 and int4, as a share of ours at bf16: 300 Mbit/s 0.53 and failed"
    ]
    first, _, int8, int4, native = report_wires.decision(made)
    assert first.endswith("took 1.14 of `native`'s at 300 Mbit/s.")
    assert int8.endswith("took 0.53 of `bf16`'s at 300 Mbit/s.") and int4.endswith("took an unknown part of `int8`'s.")
    assert native.startswith("- **`native` where backward hides")


def test_what_was_measured_before_something_went_wrong_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def room(settings: Mapping[str, Any], limit_s: float) -> Iterator[dict[str, Any]]:
        yield {"rate_mbit": 1000, "raw": [{"rates": {str(2**24): 963.5e6}, "congestion_control": "cubic"}] * 2}
        yield {"job": settings["jobs"][0], "answers": [answer(**TIMES)] * 2}
        yield {"error": "rank 1 is gone"}

    monkeypatch.setattr(link_network, "check_allowed", lambda: None)
    monkeypatch.setattr(bench_link, "room", room)
    monkeypatch.setattr(kernel_cases, "prove_path", lambda _: None)
    typed = ["bench_link.py", "--models", "resnet18", "mlp-8m", "--rates", "1000", "--out"]
    monkeypatch.setattr(sys, "argv", [*typed, "/dev/null/folder"])
    with pytest.raises(BenchError, match="cannot be made"):
        bench_link.main()
    monkeypatch.setattr(sys, "argv", [*typed, str(tmp_path)])
    with pytest.raises(BenchError, match="^rank 1 is gone: the rest is missing$"):
        bench_link.main()
    [path] = tmp_path.iterdir()
    found = json.loads(path.read_text())
    assert found["ended_early"] == "rank 1 is gone" and [one["case"] for one in found["rows"]] == [
        "1 Gbit/s",
        "resnet18",
    ]


# Options


def options(monkeypatch: pytest.MonkeyPatch, *typed: str) -> argparse.Namespace:
    monkeypatch.setattr(sys, "argv", ["bench_link.py", *typed])
    return bench_link.options()


def test_options_say_which_jobs_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = options(monkeypatch)
    assert [(job["rate_mbit"], job["command"]["model"]) for job in bench_link.jobs(whole)] == [
        (rate, model) for rate in (300, 1000, 2000, 5000, None) for model in bench_link.MODELS
    ]
    assert bench_link.record_name(whole, complete=True) == "link"
    assert bench_link.record_name(whole, complete=False) == "link-part"
    quick = options(monkeypatch, "--quick")
    [job] = bench_link.jobs(quick)
    assert (job["rate_mbit"], job["command"]["model"]) == (1000, "resnet18")
    assert len(link_variants.picked(job["command"]["variants"])) == len(link_variants.QUICK) + 2
    part = options(monkeypatch, "--models", "mlp", "--rates", "unlimited", "--variants", "ours bf16")
    assert [job["rate_mbit"] for job in bench_link.jobs(part)] == [None]
    assert bench_link.record_name(part, complete=True) == "link-part"
    shards = options(monkeypatch, "--models", "gpt2-7m", "--rates", "300", "--variants", "HSDP", "FSDP2")
    assert bench_link.record_name(shards, complete=True) == "link-fsdp"
    assert bench_link.record_name(options(monkeypatch, "--ranks", "3"), complete=True) == "link-3ranks"
    for typed in (["--rates", "0"], ["--here", "--rates", "1000"]):
        with pytest.raises(BenchError):
            options(monkeypatch, *typed)


def test_what_takes_part_is_what_the_page_names() -> None:
    found = link_variants.variants()
    assert {report_link.LOCAL, report_link.BF16, report_link.FP16, report_link.HOOK} <= set(found)
    assert tuple(link_variants.ENCODED) == report_link.ENCODED
    assert {*report_link.POWERSGD, *link_variants.QUICK} <= set(found)
    forms = [name for name, variant in found.items() if variant.side == "torch" and variant.wire == "native"]
    sizes = [link_variants.sized("torch DDP, views", size_mb) for size_mb in link_variants.SIZES_MB]
    assert len(forms) == len(harness.torch_variants()) + len(sizes) and set(sizes) < set(forms)
    for wire in ("bf16", "fp16"):
        assert {f"torch {wire}_compress_hook", f"torch {wire}_compress_hook, views"} <= set(found)
    assert set(link_variants.picked(["ours bf16"])) == {"no DDP", "no DDP, clocked", "ours bf16"}
    assert {name for name in found if "SDP" in name}.isdisjoint(link_variants.picked([])), (
        "only where they are asked for"
    )
    for kind in ("HSDP", "FSDP2"):
        assert len(link_variants.picked([kind])) == 2 + 3 + len(link_variants.FSDP_WIRES)
    assert set(bench_link.MODELS) - set(models.NAMES) == {"many:2000x64"}
    assert set(report_link.TITLES) == set(link_bound.TARGET_MODELS) < set(bench_link.MODELS)


def test_models_of_fsdp2_are_judged_by_what_their_reductions_send() -> None:
    """1,000 elements on two ranks. Gathers send 8,000 bytes in all, torch's reduce-scatter what an all-reduce does."""
    steps_ms = {"torch HSDP": 100.0, "HSDP int8": 50.0, "torch FSDP2": 200.0, "FSDP2 int8": 150.0, "FSDP2 bf16": 160.0}
    sent = {
        "torch HSDP": 8000,
        "HSDP int8": 2060,
        "torch FSDP2": 16_000,
        "FSDP2 int8": 9030,
        "FSDP2 bf16": 8000 + 2000,
    }
    variants: dict[str, dict[str, Any]] = {
        name: {"step_ms": took_ms, "sent_bytes": sent[name], "failed": None} for name, took_ms in steps_ms.items()
    }
    row = {
        "part": "steps",
        "case": "gpt2-7m",
        "rate_mbit": 300,
        "link": "300 Mbit/s",
        "elements": 1000,
        "not_published": None,
        "torch_best": {},
        "ours_best": {},
        "variants": variants,
    }
    found = {one["what"]: one["value"] for one in link_bound.shard_demands([row], 2)}
    at = "gpt2-7m at 300 Mbit/s, "
    for name, bytes_sent, share in (("HSDP int8", 1.03, 0.5), ("FSDP2 int8", 1.03, 0.75), ("FSDP2 bf16", 2.0, 0.8)):
        assert found[f"{at}{name}: bytes an element"] == pytest.approx(bytes_sent)
        assert found[f"{at}{name}: step, of torch's"] == pytest.approx(share)
    assert len(found) == 6 and not link_bound.shard_demands([row], 3)
    assert not link_bound.shard_demands([{**row, "not_published": "shared cores"}], 2)
    lines = report_link.shards({"rows": [row]})
    assert "| 300 Mbit/s | FSDP2 int8 | 150 | 0.75 | 1.03 |" in lines
    variants["torch HSDP"]["failed"] = "it did not end"
    assert {one["what"].split(", ")[1] for one in link_bound.shard_demands([row], 2)} == {"HSDP int8: bytes an element"}


def test_gradients_are_clocked_in_the_order_in_which_they_are_ready() -> None:
    clock = link_steps.GradientClock()
    model = clock.attach(models.build("mlp"))
    model(*models.batch("mlp", 0, torch.device("cpu"))).backward()
    last = [(512, 1), (784 * 512, 2)]
    assert [(numel, ndim) for _, numel, ndim in clock.ready][-2:] in (last, last[::-1])
    assert len(clock.ready) == 8 and clock.ready == sorted(clock.ready, key=lambda one: one[0])


def test_a_forecast_of_a_step_is_what_the_link_takes_and_its_misses_are_named() -> None:
    """1 million elements, ready at 10 ms: 32 ms at native on 1 Gbit/s, 16 at bf16; copies take 1 and 1 ns a byte."""
    link = link_forecast.link_line(1000.0, 0.0, 2)
    assert link.fs(10**6) == 8 * 10**12 and link_forecast.link_line(1000.0, 0.001, 4).fs(0) == 10**12
    assert link_forecast.link_line(1000.0, 0.0, 4).fs_per_byte == 1.5 * link.fs_per_byte
    nanosecond = Linear(fixed_ns=0, fs_per_byte=10**6)
    copies: link_forecast.Copies = dict.fromkeys(("native", "bf16", "int8"), (nanosecond, nanosecond))
    found = link_forecast.steps_ms([(0.5, 10**6, 2)], 20.0, link, copies, 2)
    assert found["native"] == pytest.approx(10 + 4 + 32 + 4) and found["bf16"] == pytest.approx(10 + 2 + 16 + 2)
    assert found["int8"] == pytest.approx(10 + 10 * 1.0157, rel=1e-2), "260 bytes for 256 elements"
    measured = cell(ours_bf16=[0.45] * 3)
    said = {measured["ours_best"]["native"]: 690.0, measured["ours_best"]["bf16"]: 300.0}
    lines = link_forecast.forecast_table([measured], [said])
    assert "| ResNet-18, 1 Gbit/s | 100 | 700 / 690 (-1%) | 450 / 300 (-33%) | - | - | - | bf16 / bf16 |" in lines
    assert lines[-2:] == [
        "1 of 2 forecasts are within 10% of the measured step.",
        "MISSED ResNet-18, 1 Gbit/s, bf16: 450 ms measured, 300 forecast, -33%",
    ]


def test_the_interface_of_an_address_is_found() -> None:
    assert link_here.interface_of("127.0.0.1") == "lo"
    assert link_here.interface_of("203.0.113.9") is None


def test_a_host_with_more_ranks_than_cores_is_found() -> None:
    assert not link_here.shares_cores([("a", [0]), ("a", [1]), ("b", [0])])
    assert link_here.shares_cores([("a", [0, 1]), ("b", [0]), ("b", [0])])


# Namespaces


def test_where_namespaces_are_refused_it_says_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_network, "_NAMESPACES", ("--no-such-option",))
    with pytest.raises(link_network.LinkError, match=r"sysctl -w user.max_user_namespaces"):
        link_network.check_allowed()
    monkeypatch.setattr(shutil, "which", lambda name, path: None)
    with pytest.raises(link_network.LinkError, match="tc is not installed: it is in the package iproute2"):
        link_network.tool("tc")


def marked(mark: str) -> dict[int, str]:
    """Processes with this mark in their environment, with their network namespace."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (path / "environ").read_bytes():
                found[int(path.name)] = os.readlink(path / "ns" / "net")
        except OSError:  # it has ended, or is another user's
            continue
    return found


def namespaces_in_use() -> set[str]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            found.add(os.readlink(path))
        except OSError:
            continue
    return found


def start(mark: str, *arguments: str) -> Program:
    """The benchmark, and whatever it starts marked."""
    source = "import bench_link, records; records.entry(bench_link.main)"
    return Program(source, *arguments, environment={MARK: mark, "PYTHONPATH": str(PERF)})


@pytest.fixture(scope="module")
def allowed() -> None:
    """Namespaces can be made."""
    try:
        link_network.check_allowed()
    except link_network.LinkError as error:
        pytest.skip(f"no network namespaces here: {error}")


TINY = [
    "--models",
    "many:3x1000",
    "--rates",
    "1000",
    "--variants",
    "torch DDP, views",
    "ours bf16",
    "ours int8",
    "--rehearse",
]


def test_nothing_outlives_a_command_that_was_killed(allowed: None) -> None:
    mark = uuid.uuid4().hex
    before = namespaces_in_use()
    process = start(mark, *TINY)
    try:
        deadline_s = time.monotonic() + 600  # a net
        while len(made := set(marked(mark).values()) - before) < 3:  # the room's and the ranks'
            assert time.monotonic() < deadline_s and process.runs(), "no ranks were started"
            time.sleep(0.02)
    finally:
        process.close()
    deadline_s = time.monotonic() + 10
    while marked(mark) or made & namespaces_in_use():
        assert time.monotonic() < deadline_s, f"left behind: {marked(mark)}"
        time.sleep(0.02)


def test_ranks_that_end_have_been_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or their time on the cores passes for that of other work."""
    processes = []

    class Waits:
        def __init__(self, rank: int, ranks: int, core: int) -> None:
            self.process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
            processes.append(self.process)

        def tell(self, command: object) -> None:
            """It has nothing to do."""

    monkeypatch.setattr(link_room, "_Started", Waits)
    monkeypatch.setattr(link_room, "Network", lambda pids: None)
    monkeypatch.setattr(link_room.Ranks, "_answers", lambda self: [])
    link_room.Ranks([0, 1]).end()
    assert [process.returncode for process in processes] == [-signal.SIGKILL] * 2


def test_a_tiny_run_leaves_its_record_and_nothing_else(allowed: None, tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    process = start(mark, *TINY, "--rounds", "2", "--warmup", "2", "--limit-s", "600", "--out", str(tmp_path))
    process.printed()
    assert marked(mark) == {}
    [path] = tmp_path.iterdir()
    found = json.loads(path.read_text())
    assert path.name.startswith("link-part_cpu_") and found["rehearsal"] and found["ended_early"] is None
    link, one = found["rows"]
    assert set(link["raw_mbit"]) == {str(size) for size in (65536, 2**20, 2**22, 2**24)}
    assert link["steady_mbit"] > 0 and link["congestion_control"]
    names = {"no DDP", "no DDP, clocked", "torch DDP, views", "torch DDP, batched copies, views", "ours bf16"}
    assert {"no DDP", "no DDP, clocked", "torch DDP, views", "ours bf16"} <= set(one["variants"]) <= names, "no int8"
    assert (one["case"], one["rate_mbit"], one["parameters"], one["elements"]) == ("many:3x1000", 1000, 3, 3000)
    assert all(len(row["samples_ms"]) == 2 for row in one["variants"].values())
    assert one["variants"]["no DDP"]["sent_bytes"] < 4 * 3000 < one["variants"]["torch DDP, views"]["sent_bytes"]
    assert one["bound_ms"]["native"] >= one["bound_ms"]["bf16"] > 0
    assert page(found)


CHOICE = Path(__file__).with_name("choice_link.py")
SETTLING_STEPS = 32  # behind which wires are tried


def test_the_wire_follows_a_link_that_becomes_slow_in_the_middle_of_a_run(allowed: None) -> None:
    done = subprocess.run(
        link_network.room_command(CHOICE), capture_output=True, text=True, check=False, timeout=4 * SETUP_S
    )
    assert done.returncode == 0, done.stderr
    _, *by_rank = [json.loads(line) for line in done.stdout.splitlines()]
    first, second = by_rank
    assert first == second, "the same wire at the same step, and the same weights"
    (before, *_), (after, wire, measured_ms) = first["chosen"]
    assert wire == "int8", measured_ms
    # A window that was under way, one on the slow link, a new plan, the trial and its check.
    most = (
        2 * wire_trial.WINDOW + SETTLING_STEPS + wire_trial.BLOCKS * 2 * wire_trial.block(2) + wire_trial.CHECKED + 10
    )
    assert after - before <= most, first
