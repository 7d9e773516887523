"""perf/report.py: pages are what the records give, what is lost is marked, what cannot be read is refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import pytest
import records
import report
import report_plots
import report_tables
import step_variants

SPREAD = {"median_us": 10.0, "p20_us": 9.0, "p80_us": 12.0, "gbps": 3.0, "launches": 1}
ROW = {"step_ms": 9.0, "step_p20_ms": 8.0, "step_p80_ms": 10.0} | {
    f"over_{key}": None for key in ("operators", "collectives", "launches", "gpu_ms", "held_bytes", "peak_bytes")
}
KERNELS = {
    "model": "tiny",
    "pair": "fp32-bf16",
    "way": "whole",
    "direction": "pack",
    "cache": "cold",
    "noise": 1.0,
    "cases": {
        "ours": {**SPREAD, "ratio": 1.0, "share_copy": 0.93, "share_cast": 0.94},
        "torch: cat": {**SPREAD, "ratio": 0.8, "share_copy": 0.99, "share_cast": 0.99},
        "torch: foreach": {**SPREAD, "ratio": 2.5, "median_us": 25.0, "share_copy": 0.4, "share_cast": 0.4},
    },
}
MODE = {key: [5.0, 6.0] for key in ("ms", "p20_ms", "p80_ms", "flush_ms")} | {"ratio": [1.0, 1.0]}
WAY = {"median_ms": 2.0, "p20_ms": 1.5, "p80_ms": 2.5, "ratio_to_torch": None}
STEP = {"failed": None, "wire": "bf16", "step_ms": 50.0}
FINDING = {"what": "pack, one", "value": 0.5, "sign": ">=", "bound": 0.9, "unit": "x", "met": False}
# By what, the least that its table wants.
CONTENT: dict[str, dict[str, Any]] = {
    "kernels": {
        "copy_8gb_gbps": None,
        "rows": [KERNELS, {**KERNELS, "cache": "warm"}, {**KERNELS, "pair": "fp16-bf16"}],
        "verdicts": [
            {"direction": "pack", "model": "tiny", "pair": "fp32-bf16", "way": "whole", "what": "share of the copy"}
            | {"figure": 0.5, "least": 0.9, "met": False}
        ],
    },
    "step-clip": {
        "ranks": 2,
        "backend": "gloo",
        "optimizer": "none",
        "clip": True,
        "amp": False,
        "memory": {"model": "Many", "steps": 10, "variants": {}},
        "models": {
            "Many": {
                "parameters": 2,
                "elements": 16,
                "torch_best": "torch DDP",
                "strongest_of_torch": "torch hook",
                "aa_ratio": 1.0,
                "variants": {
                    "no DDP": ROW,
                    "torch DDP": {**ROW, "sync_ms": 4.0, "ratio": 1.0},
                    "torch hook": {**ROW, "sync_ms": 2.0, "ratio": 0.5},
                    "ours bf16": {**ROW, "sync_ms": 3.0, "ratio": 0.75},
                },
            }
        },
        "verdicts": [
            {"what": "bf16, Many", "of": "torch DDP", "by": "ours bf16", "ratio": 1.75, "met": False, "required": 1.0},
            {"what": "memory of bf16 is more", "met": False},
            {"what": "native, Many", "met": None, "why_not": "it takes nothing"},
        ],
    },
    "link": {
        "ranks": 2,
        "rounds": 9,
        "links": [],
        "training": [],
        "ended_early": None,
        "cells": [
            {
                "model": "resnet18",
                "rate_mbit": 300,
                "parameters": 2,
                "elements": 16,
                "not_published": None,
                "bound_ms": {"native": 30.0, "bf16": 20.0, "fp16": 20.0},
                "torch_best": {"native": "torch DDP", "bf16": "torch hook"},
                "torch_sized": {"native": "torch DDP", "bf16": "torch hook"},
                "ours_best": {"bf16": "ours bf16"},
                "aa_ratio": 1.0,
                "variants": {
                    "no DDP": {**STEP, "step_ms": 10.0},
                    "torch DDP": STEP,
                    "torch hook": {**STEP, "step_ms": 40.0},
                    "ours bf16": STEP,
                },
            }
        ],
        "verdicts": [
            {
                "what": "resnet18 at 300 Mbit/s, bf16",
                "of": "torch hook",
                "ours_ms": 50.0,
                "torch_ms": 40.0,
                "ratio": 1.25,
            }
            | {"bound_ms": 20.0, "required_ms": 36.0, "met": False}
        ],
    },
    "clip": {
        "ranks": 2,
        "parts": {
            "clip": {
                "2 x 8": {
                    "torch DDP": {"ms": 2.0, "p20_ms": 1.0, "p80_ms": 3.0, "ratio": 1.0},
                    "ours": {"ms": 3.0, "p20_ms": 2.0, "p80_ms": 4.0, "ratio": 1.5},
                }
            }
        },
    },
    "host": {
        "slopes": {
            "parameter": {
                "ours": {key: {"slope": 1.0, "intercept": 2.0, "worst": 0.1} for key in ("us", "calls")},
            }
        },
        "points": [
            {
                "parameters": 64,
                "buckets": 4,
                "variants": {
                    name: {"us": us, "p20_us": 1.0, "p80_us": 9.0, "calls": 3}
                    for name, us in (("no DDP", 1.0), ("torch DDP", 2.0), ("ours bf16", 5.0))
                },
            }
        ],
        "stages": {"parameters": 64, "buckets": 4, "variants": {"ours": {"pack": {"us": 1.0, "calls": 4}}}},
    },
    "schedule_cost": {
        "gains": {},
        "allowed": {"recording_share": 0.01, "looking_share": 0.005},
        "costs": {
            "2 x 8": {
                "step_ms": 3.0,
                "recording_share": 0.02,
                "look_ms": 1.0,
                "looking_share": 0.0001,
                "noise_share": 0.001,
            }
        },
    },
    "prediction": {
        "required": {"rank_correlation": 0.9, "median_error": 0.25},
        "median_error": 0.3,
        "points_judged": 1,
        "models": {
            "uniform": {
                "judged": True,
                "rank_correlation": 0.5,
                "median_error": 0.3,
                "points": {"ready": {"buckets": 2, "predicted_ms": 1.0, "measured_ms": 2.0, "error": 0.5}},
            }
        },
    },
    "modes": {
        "ranks": 2,
        "seeds": 3,
        "steps": 220,
        "sleep_ms": 5.0,
        "block_steps": 48,
        "accuracy": {
            name: {"accuracy": 0.97, "lowest": 0.96, "highest": 0.98, "lost_points": lost, "drift": drift}
            | {"relative_drift": drift / 10}
            for name, lost, drift in (("synchronous", 0.0, 0.0), ("asynchronous", 1.25, 0.002))
        },
        "stragglers": {
            "even": {"synchronous": MODE, "asynchronous": {**MODE, "ratio": [1.5, 0.9]}},
            "always 5 times slower": {
                "synchronous": {**MODE, "held_up_ms": [4.0, 0.0]},
                "synchronous, again": {**MODE, "ratio": [1.02, 1.03]},
                "asynchronous": {**MODE, "ratio": [0.2, 1.125], "held_up_ms": [0.0, 0.0]},
            },
        },
        "verdicts": [
            {"what": "asynchronous: points of accuracy lost", "figure": 1.25, "most": 1.0, "met": False},
            {"what": "staleness 1: held up", "most": 0.25, "met": None, "why_not": "synchronous was not"},
        ],
    },
    "data_parallel": {
        "replicas": 2,
        "threads": 4,
        "models": {
            "mlp": {
                "one replica": {**WAY, "ratio": 1.0},
                "one replica, again": {**WAY, "ratio": 1.01},
                "ours": {**WAY, "ratio": 1.25},
            }
        },
        "verdicts": [{"what": "mlp: ours, of one replica", "figure": 1.25, "most": 1.05, "met": False}],
    },
    "gpu_check": {
        "stages": {
            "exact": {"status": "ok", "reason": "", "findings": [FINDING, {**FINDING, "met": None}], "skipped": []},
            "profile": {
                "status": "skipped",
                "reason": "no ncu | here",
                "findings": [],
                "skipped": ["memcheck: no tool"],
            },
        }
    },
}
MISSED = {
    "kernels": ["share of the copy is 0.500, at least 0.90"],
    "step-clip": ["1.75 of 'torch DDP', at most 1.00", "memory of bf16 is more", "native, Many: not judged, it takes"],
    "link": ["resnet18 at 300 Mbit/s, bf16: 50 ms, 1.25 of 'torch hook', at most 36 ms"],
    "schedule_cost": ["recording share 2.000%, less than 1.0%"],
    "prediction": ["rank correlation 0.50, at least 0.9", "median error 30.0%, at most 25%"],
    "modes": [
        "asynchronous: points of accuracy lost 1.25, at most 1",
        "- staleness 1: held up: not judged, synchronous was not\n",
    ],
    "data_parallel": ["mlp: ours, of one replica 1.25, at most 1.05"],
    "gpu_check": ["pack, one is 0.5x, >= 0.9x is demanded"],
}
# Where each table says that something is lost.
LOST = {
    "kernels": "| cat | 1 | 1.25 **slower** |",
    "step-clip": "| 0.75 | 1.50 **slower** |",
    "link": "| 300 Mbit/s | 10 | 50 | 50 | - | 0.60 | 40 | 40 | 1.25 **slower** |",
    "clip": "| 1.50 **slower** |",
    "host": "| 2.50 **slower** |",
    "schedule_cost": "2.000% **MISSED**",
    "prediction": "0.50 **MISSED**",
    "modes": "| 0.20 | 1.12 **slower** | 0.00 | 0.00 |",
    "data_parallel": "| ours | 2.00 | 1.50 to 2.50 | 1.25 **slower** | - |",
    "gpu_check": "| exact: pack, one | 0.5x | >= 0.9x | **MISSED** |",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A record of every benchmark."""
    for what, content in CONTENT.items():
        records.write(tmp_path, what, "cpu", **content)
    return tmp_path


def changed(folder: Path, what: str, change: Callable[[dict[str, Any]], object]) -> None:
    [path] = folder.glob(f"{what}_cpu_*.json")
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


def test_the_pages_are_what_the_records_give() -> None:
    assert report.differences(report.latest_records(records.RESULTS)) == []


def test_every_benchmark_has_a_block_and_every_block_a_place() -> None:
    made = report.blocks([])
    assert set(made) == {*report.BLOCKS, report.MISSED, report.SUMMARY, report.HEADLINE}
    text = report.filled(report.TABLES_PAGE.read_text(), made, needed=report.BLOCKS)
    assert report.filled(text, made) == text
    assert set(report.pages([])) == {report.PAGE, report.TABLES_PAGE, report.README}
    assert {report_tables.family(what) for what in CONTENT} == set(report_tables.TABLES)
    assert made["kernels"] == f"{report.NOTHING}\n\n{report.NO_GPU}"


def test_every_table_says_where_it_comes_from_and_what_is_lost(folder: Path) -> None:
    made = report.blocks(report.latest_records(folder))
    for what, text in LOST.items():
        block = made[str(report_tables.family(what)).replace("_", "-")]
        assert f"### {what}, cpu" in block
        for key in ("hardware", "commit", "command"):
            assert str(records.provenance("cpu")[key]) in block
        assert text in block
    for block in ("kernels", "step", "host", "gpu-check"):
        assert report.NO_GPU in made[block]
    for lines in MISSED.values():
        for line in lines:
            assert line in made[report.MISSED]


def test_the_summary_is_a_dozen_lines_that_a_reader_decides_by(folder: Path) -> None:
    content = copy.deepcopy(CONTENT["step-clip"])
    model = content["models"]["Many"]
    model["variants"] |= {name: {**ROW, "sync_ms": 3.0, "ratio": 0.75} for name in report_tables.DECIDING}
    peaks = {"no DDP": 0, "torch DDP": 45e6, "torch DDP, views": 20e6, "ours bf16": 28e6, "ours native, views": 4e6}
    held = {name: {f"over_{key}_bytes": peak for key in ("end", "peak", "heap")} for name, peak in peaks.items()}
    content["memory"]["variants"] = held
    records.write(folder, "step", "cpu", **content)
    records.write(folder, "step-4ranks", "cpu", **content)
    found = report.latest_records(folder)
    assert report.blocks(found)[report.SUMMARY].splitlines() == [
        f"On {found[0]['hardware']}, torch {found[0]['versions']['torch']}:",
        "",
        "- a step that clips takes 1.50 to 1.50 of torch's (1 of 1 ways **slower**)",
        "- DataParallel, 2 replicas, as a share of one replica with all threads: mlp 1.25 **slower**",
        "- `make gpu-check`: 1 of 2 stages ok, 0 of 1 demands met",
        "- pack, 2 cases, 2 of them **slower**: 1.25 to 1.25 of the time of the fastest of torch's ways; "
        "0.93 to 0.93 of a copy's rate",
        "- a step of resnet18 at bf16, as a share of torch's best 16-bit hook's: 300 Mbit/s 1.25 **slower**",
        "- points of accuracy that a mode loses against synchronous, digits: asynchronous 1.25",
        "- always 5 times slower: a step of each rank, as a share of synchronous's: "
        "asynchronous 0.20 and 1.12 **slower**",
        "- synchronising Many, 2 ranks, as a share of 'torch hook': ours native 1.50 **slower**, "
        "ours native, views 1.50 **slower**, ours bf16 1.50 **slower**, fused_hook bf16, views 1.50 **slower**",
        "- peak of memory, MB above Many without DDP: torch DDP 45.0, torch DDP, views 20.0, ours bf16 28.0 **more**, "
        "ours native, views 4.0",
        "",
        report.NO_GPU,
    ]
    assert report.blocks([])[report.SUMMARY] == f"{report.NOTHING}\n\n{report.NO_GPU}"


def test_the_summary_of_a_gpu_has_the_whole_matrix_or_the_headline_and_steps_of_as_many_ranks(tmp_path: Path) -> None:
    record = records.read(records.write(tmp_path, "headline", "cpu", **CONTENT["kernels"])) | {"device": "h200"}
    step = record | CONTENT["step-clip"] | {"what": "step-1ranks", "ranks": 1}
    said = report.blocks([record, step])[report.SUMMARY]
    assert said.count("- pack, 2 cases") == 1
    assert "- synchronising Many, 1 ranks" in said
    assert report.NO_GPU not in said
    assert report.blocks([record, record | {"what": "kernels"}])[report.SUMMARY].count("- pack, 2 cases") == 1


def test_the_readme_has_what_a_step_takes_at_1_gbit_and_hides_what_is_not_published(tmp_path: Path) -> None:
    (cell,) = CONTENT["link"]["cells"]
    said = "- ResNet-18: **50 ms** a step, where torch's DDP takes 50, its best 16-bit hook 40, "
    said += "and that with the best of several bucket sizes 40"
    for change, expected in (
        ({"rate_mbit": 1000}, said),
        ({}, report.NOTHING),
        ({"rate_mbit": 1000, "not_published": "shared cores"}, report.NOTHING),
        (
            {"rate_mbit": 1000, "variants": cell["variants"] | {"ours bf16": {**STEP, "failed": "wrong"}}},
            report.NOTHING,
        ),
    ):
        content = CONTENT["link"] | {"cells": [cell | change]}
        record = records.read(records.write(tmp_path, "link", "cpu", **content))
        assert report.blocks([record])[report.HEADLINE] == expected


def test_names_are_those_of_the_records() -> None:
    variants = step_variants.variants(clips=True)
    ours = {name for name, one in variants.items() if one.side in ("wrapper", "hook")}
    assert {*report_tables.DECIDING} <= ours
    assert all(report_tables.is_torchs(name) != (name in ours) for name in variants if variants[name].sums)
    assert report_tables.is_torchs(harness.torch_batched(views=True)[0])
    assert report_tables.is_torchs("rebuilt batched copies")


def test_a_pair_that_lost_is_not_folded_away(folder: Path) -> None:
    lines = report_tables.kernels(CONTENT["kernels"])
    assert not any("<details>" in line for line in lines)
    won = copy.deepcopy(CONTENT["kernels"])
    won["rows"][2]["cases"]["torch: cat"]["ratio"] = 1.2
    assert any("<details>" in line for line in report_tables.kernels(won))


def test_the_latest_of_a_machine_is_shown_whatever_it_says(folder: Path) -> None:
    records.write(folder, "kernels", "cpu", **{**CONTENT["kernels"], "copy_8gb_gbps": 77.0})
    [first, _] = sorted(folder.glob("kernels_*.json"), key=lambda path: len(path.name))
    record = json.loads(first.read_text())
    first.write_text(json.dumps({**record, "created": "2099-01-01T00:00:00+00:00", "copy_8gb_gbps": 55.0}))
    on_gpu = {**record, "device": "h200", "copy_8gb_gbps": 4000.0}
    (folder / "kernels_h200_2026-01-01.json").write_text(json.dumps(on_gpu))
    block = report.blocks(report.latest_records(folder))["kernels"]
    assert "55 GB/s" in block
    assert "77 GB/s" not in block
    assert block.index("### kernels, h200") < block.index("### kernels, cpu")
    assert report.NO_GPU not in block


@pytest.mark.parametrize(
    ("what", "change", "said"),
    [
        ("clip", lambda record: record.pop("schema"), "has no schema"),
        ("clip", lambda record: record.update(rehearsal=True), "rehearsal"),
        ("clip", lambda record: record.pop("parts"), "'clip' on 'cpu', .* lacks 'parts'"),
        ("kernels", lambda record: record.update(rows=3), "'kernels' on 'cpu', .* is not as its table wants"),
        ("clip", lambda record: record["parts"]["clip"]["2 x 8"]["ours"].update(ratio="much"), "is not as its table"),
    ],
)
def test_records_that_cannot_be_shown_are_refused(
    folder: Path, what: str, change: Callable[[dict[str, Any]], object], said: str
) -> None:
    changed(folder, what, change)
    with pytest.raises(records.BenchError, match=said):
        report.blocks(report.latest_records(folder))


def test_the_headline_of_gpu_check_stands_with_the_kernels(tmp_path: Path) -> None:
    records.write(tmp_path, "headline", "cpu", **CONTENT["kernels"])
    made = report.blocks(report.latest_records(tmp_path))
    assert LOST["kernels"] in made["kernels"]
    assert MISSED["kernels"][0] in made[report.MISSED]


def test_a_record_without_a_table_is_refused(tmp_path: Path) -> None:
    records.write(tmp_path, "something", "cpu")
    with pytest.raises(records.BenchError, match="no table for 'something'"):
        report.latest_records(tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<!-- begin one: x -->\n", "no end"),
        ("<!-- end one -->\n<!-- begin one -->\n", "no end"),
        ("<!-- begin other -->\n<!-- end other -->\n", "no block 'other'"),
        ("nothing", "no place for one"),
    ],
)
def test_pages_with_odd_places_are_refused(text: str, said: str) -> None:
    with pytest.raises(records.BenchError, match=said):
        report.filled(text, {"one": "1"}, needed=["one"])


def test_what_is_written_by_hand_is_left_alone() -> None:
    page = "above\n<!-- begin one: by x -->\nold\n<!-- end one -->\nbelow\n<!-- begin one -->\n<!-- end one -->"
    first, second = (
        "<!-- begin one: by x -->\n\nnew\n\n<!-- end one -->",
        "<!-- begin one -->\n\nnew\n\n<!-- end one -->",
    )
    assert report.filled(page, {"one": "new", "two": "2"}) == f"above\n{first}\nbelow\n{second}"


def test_pictures_are_of_records_that_have_something_to_draw(folder: Path) -> None:
    names = {report_plots.name_of(record) for record in report.latest_records(folder)}
    drawn = {f"performance_{what}_cpu.png" for what in ("kernels", "step-clip")}
    assert names - {None} == {*drawn, "link.png"}
    assert report_plots.name_of({**records.provenance("cpu"), "what": "kernels", "rows": []}) is None


def test_a_picture_can_be_drawn(folder: Path) -> None:
    pytest.importorskip("matplotlib")
    [step] = [one for one in report.latest_records(folder) if one["what"] == "step-clip"]
    report_plots.draw(step, folder / "step.png")
    assert (folder / "step.png").read_bytes().startswith(b"\x89PNG")
