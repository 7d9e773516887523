"""perf/report.py: pages are what the records give, what is lost is marked, what cannot be read is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import harness
import pytest
import records
import render
import report
import report_summary
import report_tables
import report_wires
import step_variants
from records import demand

US = {"us": 10.0, "p20_us": 9.0, "p80_us": 12.0, "gbps": 3.0, "launches": 1}
STEP = {"step_ms": 9.0, "step_p20_ms": 8.0, "step_p80_ms": 10.0, "sync_ms": None, "ratio": None} | {
    f"over_{key}": None for key in ("operators", "collectives", "launches", "gpu_ms", "held_bytes", "peak_bytes")
}
KERNELS: dict[str, Any] = {
    "part": "kernels",
    "case": "pack, tiny, fp32-bf16, whole",
    "model": "tiny",
    "pair": "fp32-bf16",
    "way": "whole",
    "direction": "pack",
    "cache": "cold",
    "noise": 1.0,
    "variants": {
        "ours": {**US, "ratio": 1.0, "share_copy": 0.93, "share_cast": 0.94},
        "torch: cat": {**US, "ratio": 0.8, "share_copy": 0.99, "share_cast": 0.99},
        "torch: foreach": {**US, "us": 25.0, "ratio": 2.5, "share_copy": 0.4, "share_cast": 0.4},
    },
}
ENCODED_NS = {report_wires.BOTH: 1.5, report_wires.BF16: 0.5}
LINK = {"failed": None, "wire": "bf16", "step_ms": 50.0}
FINDING = {"what": "pack, one", "value": 0.5, "sign": ">=", "bound": 0.9, "unit": "x", "met": False}
CELL: dict[str, Any] = {
    "part": "steps",
    "case": "resnet18",
    "rate_mbit": 300,
    "parameters": 2,
    "elements": 16,
    "not_published": None,
    "aa_ratio": 1.0,
    "bound_ms": {"native": 30.0, "bf16": 20.0},
    "torch_best": {"native": "torch DDP", "bf16": "torch hook"},
    "torch_sized": {"native": "torch DDP", "bf16": "torch hook"},
    "ours_best": {"bf16": "ours bf16"},
    "variants": {
        "no DDP": {**LINK, "step_ms": 10.0},
        "torch DDP": LINK,
        "torch hook": {**LINK, "step_ms": 40.0},
        "ours bf16": LINK,
    },
}


def row(part: str, case: str, variants: dict[str, Any], **facts: Any) -> dict[str, Any]:
    return {"part": part, "case": case, **facts, "variants": variants}


# By what, the least that its tables want.
CONTENT: dict[str, dict[str, Any]] = {
    "kernels": {
        "rows": [KERNELS, {**KERNELS, "cache": "warm"}, {**KERNELS, "pair": "fp16-bf16"}],
        "demands": [demand("pack tiny: share of the copy", 0.5, ">=", 0.9)],
    },
    "step-clip": {
        "ranks": 2,
        "backend": "gloo",
        "optimizer": "none",
        "clip": True,
        "amp": False,
        "rows": [
            row(
                "steps",
                "Many",
                {
                    "no DDP": STEP,
                    "torch DDP": {**STEP, "sync_ms": 4.0, "ratio": 1.0, "over_held_bytes": 45e6},
                    "torch hook": {**STEP, "sync_ms": 2.0, "ratio": 0.5},
                    **{name: {**STEP, "sync_ms": 3.0, "ratio": 0.75} for name in report_summary.DECIDING},
                    "ours bf16": {**STEP, "sync_ms": 3.0, "ratio": 0.75, "over_held_bytes": 48e6},
                },
                parameters=2,
                elements=16,
                torch_best="torch DDP",
                aa_ratio=1.0,
                strongest_of_torch="torch hook",
            ),
        ],
        "demands": [
            demand("bf16, Many", 1.75, "<=", 1.0, of="torch DDP"),
            demand("native, Many", None, "<=", 1.0, of="torch DDP", why_not="it takes nothing"),
        ],
    },
    "link": {
        "ranks": 2,
        "rounds": 9,
        "ended_early": None,
        "rows": [CELL],
        "demands": [
            demand("resnet18 at 300 Mbit/s, bf16", 50.0, "<=", 36.0, unit=" ms", of="torch hook", ratio=1.25)
            | {"torch_ms": 40.0, "bound_ms": 20.0}
        ],
    },
    "encoded": {
        "rows": [
            row(
                "encoded",
                "int8, 5x40",
                {name: {"ns": ns, "p20_ns": 0.9, "p80_ns": 1.1, "ratio": 4.0} for name, ns in ENCODED_NS.items()},
                encoding="int8",
            )
        ],
    },
    "errors": {
        "rows": [
            row("errors", "Gaussian", {"int8": {f"error_{2**power}": 0.00983 for power in range(1, 11)}}),
            row("errors", "gradients of digits", {"bf16, ring": {f"error_{2**power}": None for power in range(1, 11)}}),
        ],
        "demands": [demand("Gaussian: int8", 0.0102, "<=", 0.01, unit="%")],
    },
    "host": {
        "rows": [
            row(
                "slopes",
                "parameter",
                {"ours": {f"us_{part}": 1.0 for part in ("slope", "besides", "worst")}},
            ),
            row(
                "points",
                "64 parameters",
                {
                    name: {"us": us, "p20_us": 1.0, "p80_us": 9.0}
                    for name, us in (("no DDP", 1.0), ("torch DDP", 2.0), ("ours bf16", 5.0))
                },
                parameters=64,
                buckets=4,
            ),
        ]
    },
}
MISSED = {
    "kernels": "- pack tiny: share of the copy: 0.5, at least 0.9\n",
    "step-clip": "- bf16, Many: 1.75 of 'torch DDP', at most 1\n- native, Many: not judged, it takes nothing\n",
    "link": "- resnet18 at 300 Mbit/s, bf16: 50 ms, 1.25 of 'torch hook', at most 36 ms\n",
    "errors": "- Gaussian: int8: 1.02%, at most 1%\n",
}
# What tables say where something is lost, and where nothing was measured.
LOST = {
    "kernels": ["whole | 10.0 | 9.0 to 12.0 | 3.0 | 0.93 | 0.94 | 1 | cat | 1 | 1.25 **slower** |"],
    "step-clip": ["| 3.00 | 0.75 | 1.50 **slower** | - |", "| torch DDP | 9.00 | 8.00 to 10.00 | 4.00 | 1.00 | 2.00 |"],
    "link": ["| 300 Mbit/s | 10 | 50 | 50 | - | 0.60 | 40 | 40 | 1.25 **slower** | - | - | 0.50 | - / - | 1.00 |"],
    "host": ["| ours bf16 | 5 | 1 to 9 | 2.50 **slower** |", "| no DDP | 1 | 1 to 9 | - |"],
    "errors": ["| int8 | 0.983 % | 0.983 % |", "| bf16, ring | - | - |"],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A record of every benchmark."""
    for what, content in CONTENT.items():
        records.write(tmp_path, what, "cpu", **content)
    return tmp_path


def test_the_pages_are_what_the_records_give() -> None:
    assert report.differences(report.latest_records(records.RESULTS)) == []


def test_what_pages_say_of_a_gpus_step_is_on_record() -> None:
    """The figures of README.md and of the comparison with what was calculated."""
    steps = [
        row
        for record in report.latest_records(records.RESULTS)
        if record["what"] == "step-models-clip-1ranks" and record["device"] == "h200"
        for row in record["rows"]
    ]
    (row,) = steps
    ours, torchs = row["variants"]["ours native, views"], row["variants"]["torch DDP, views"]
    bf16, hook = row["variants"]["ours bf16"], row["variants"]["torch bf16_compress_hook, views"]
    ours_ms, torchs_ms = ours["step_ms"], torchs["step_ms"]
    saying = {
        "README.md": f"GPT-2's step took [{ours_ms:.0f} ms where torch's takes {torchs_ms:.0f}]",
        "docs/performance.md": f"GPT-2's step takes {ours_ms:.1f} ms, torch's {torchs_ms:.1f}",
    }
    for page, said in saying.items():
        assert said in " ".join((records.CHECKOUT / page).read_text().split()), page
    said = (
        f"{bf16['over_gpu_ms']:.2f} ms beyond no DDP's, torch's hook {hook['over_gpu_ms']:.2f}; "
        f"{bf16['over_launches']:.0f} launches, torch's hook {hook['over_launches']:.0f}"
    )
    assert said in (records.CHECKOUT / "docs/performance.md").read_text()
    assert {one["over_waits"] for one in row["variants"].values()} == {0}


def test_every_benchmark_has_a_block_and_every_block_a_place() -> None:
    made = report.blocks([])
    assert set(made) == {name for names in report.NEEDED.values() for name in names}
    text = report.filled(report.TABLES_PAGE.read_text(), made, needed=report.BLOCKS)
    assert report.filled(text, made) == text
    assert report.filled(report.WIRES_PAGE.read_text(), made, needed=report.NEEDED[report.WIRES_PAGE])
    assert {report_tables.family(what) for what in CONTENT} == set(report_tables.TABLES)
    assert made["kernels"] == f"{report.NOTHING}\n\n{report.NO_GPU}"


def test_every_table_says_where_it_comes_from_and_what_is_lost(folder: Path) -> None:
    made = report.blocks(report.latest_records(folder))
    for what, texts in LOST.items():
        block = made[str(report_tables.family(what)).replace("_", "-")]
        for text in [f"### {what}, cpu", *texts]:
            assert text in block
        assert all(str(records.provenance("cpu")[key]) in block for key in ("hardware", "commit", "command"))
    for block in ("kernels", "step", "host"):
        assert report.NO_GPU in made[block]
    assert "| int8, 5x40 | 1.50 | 0.50 | 0.98 | 7.9 |" in made["break-even"]
    assert "| Gaussian, 2 to 64 ranks | - | - | 0.983 % | - |" in made["wire-errors"]
    for text in MISSED.values():
        assert text in f"{made[report.MISSED]}\n"


def test_the_summary_is_a_dozen_lines_that_a_reader_decides_by(folder: Path) -> None:
    records.write(folder, "step", "cpu", **CONTENT["step-clip"])
    records.write(folder, "step-4ranks", "cpu", **CONTENT["step-clip"])
    found = report.latest_records(folder)
    machine = f"({found[0]['hardware']}, torch {found[0]['versions']['torch']}):"
    assert report.blocks(found)[report.SUMMARY].splitlines() == [
        f"Over a network {machine}",
        "",
        "- a step of resnet18 at bf16, as a share of torch's best 16-bit hook's (with bucket sizes tried): "
        "300 Mbit/s 1.25 **slower** (1.25 **slower**)",
        "",
        report.NO_GPU,
        "",
        f"On CPU, within one machine {machine}",
        "",
        "- pack, 2 cases, 2 of them **slower**: 1.25 to 1.25 of the time of the fastest of torch's ways; "
        "0.93 to 0.93 of a copy's rate",
        "- synchronising Many, 2 ranks, as a share of 'torch hook': ours native 1.50 **slower**, "
        "ours native, views 1.50 **slower**, ours bf16 1.50 **slower**, fused_hook bf16, views 1.50 **slower**",
        "- MB held after a step of Many beyond no DDP's: torch DDP 45.0, ours bf16 48.0 **more**",
    ]


def test_the_summary_of_a_gpu_has_kernels_and_steps_of_as_many_ranks(tmp_path: Path) -> None:
    record = records.read(records.write(tmp_path, "kernels", "cpu", **CONTENT["kernels"])) | {"device": "h200"}
    step = record | CONTENT["step-clip"] | {"what": "step-1ranks", "ranks": 1}
    network = records.read(records.write(tmp_path, "link", "cpu", **CONTENT["link"]))
    said = report.blocks([record, step, network])
    assert said[report.SUMMARY].count("- pack, 2 cases") == 1
    places = [said[report.SUMMARY].index(where) for where in ("Over a network (", "- a step of resnet18", "On a GPU (")]
    assert places == sorted(places) and "On CPU" not in said[report.SUMMARY]
    assert "- synchronising Many, 1 ranks" in said[report.SUMMARY]
    assert report.NO_GPU not in said[report.SUMMARY] and LOST["kernels"][0] in said["kernels"]


def test_the_readme_has_what_a_step_takes_at_1_gbit_and_hides_what_is_not_published(tmp_path: Path) -> None:
    said = "- ResNet-18: **50 ms** a step, where torch's DDP takes 50, its best 16-bit hook 40, "
    said += "and that with the best of several bucket sizes 40"
    wrong: Any = {**CELL["variants"], "ours bf16": {**LINK, "failed": "wrong"}}
    counted: Any = {**CELL["variants"]["ours bf16"], "sent_bytes": 1.0}
    encoded = {**CELL["variants"], "ours bf16": counted, "ours int8": counted}
    for change, expected in (
        ({"rate_mbit": 1000}, said),
        ({"rate_mbit": 1000, "variants": encoded}, f"{said}; ours takes 50 at 8 bits"),
        ({}, report.NOTHING),
        ({"rate_mbit": 1000, "not_published": "shared cores"}, report.NOTHING),
        ({"rate_mbit": 1000, "variants": wrong}, report.NOTHING),
    ):
        content = CONTENT["link"] | {"rows": [CELL | change]}
        record = records.read(records.write(tmp_path, "link", "cpu", **content))
        assert report.blocks([record])[report.HEADLINE] == expected


def test_names_are_those_of_the_records() -> None:
    variants = step_variants.variants(clips=True)
    ours = {name for name, one in variants.items() if one.side in ("wrapper", "hook")}
    assert {*report_summary.DECIDING} <= ours
    assert all(report_tables.is_torchs(name) != (name in ours) for name in variants if variants[name].sums)
    assert harness.TORCH_STRONGEST in variants and report_tables.is_torchs("rebuilt batched copies")


def test_a_pair_that_lost_is_not_folded_away() -> None:
    won = {**KERNELS["variants"], "torch: cat": {**KERNELS["variants"]["torch: cat"], "ratio": 1.2}}
    for variants, folded in ((KERNELS["variants"], False), (won, True)):
        rows = [{**KERNELS, "pair": "fp16-bf16", "variants": variants}]
        lines = report_tables.lines_of({"what": "kernels", "rows": rows})
        assert ("<details><summary>" in lines[0]) == folded


def test_the_latest_of_a_machine_is_shown_whatever_it_says(folder: Path) -> None:
    records.write(folder, "kernels", "cpu", **CONTENT["kernels"])
    [first, _] = sorted(folder.glob("kernels_*.json"), key=lambda path: len(path.name))
    record = json.loads(first.read_text())
    first.write_text(json.dumps({**record, "created": "2099-01-01T00:00:00+00:00", "commit": "the-latest"}))
    (folder / "kernels_h200_2026-01-01.json").write_text(json.dumps({**record, "device": "h200"}))
    block = report.blocks(report.latest_records(folder))["kernels"]
    assert block.count("commit the-latest") == 1 and block.count("### kernels, cpu") == 1
    assert block.index("### kernels, h200") < block.index("### kernels, cpu") and report.NO_GPU not in block


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
    page = "above\n<!-- begin one: by x -->\nold\n<!-- end one -->\nbelow\n"
    assert report.filled(page, {"one": "new"}) == "above\n<!-- begin one: by x -->\n\nnew\n\n<!-- end one -->\nbelow\n"


def test_pictures_are_of_records_that_have_something_to_draw(folder: Path) -> None:
    found = report.latest_records(folder)
    made = {name: save for record in found for name, save in report.pictures(record).items()}
    assert set(made) == set(report.PICTURES)
    assert not report.pictures({**records.provenance("cpu"), "what": "errors", "rows": []})
    pytest.importorskip("matplotlib")
    for save in made.values():
        report.draw(save, folder / "drawn.png")
        assert (folder / "drawn.png").read_bytes().startswith(b"\x89PNG")


def test_a_benchmark_ends_with_its_record_its_tables_and_its_demands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = CONTENT["kernels"]
    for options, demands, status in (
        ([], content["demands"], 1),
        (["--no-check"], content["demands"], 0),
        (["--rehearse"], content["demands"], 0),
        ([], [], 0),
    ):
        parser = records.Parser(description="x")
        parser.add_record()
        asked = parser.parse_args(["--out", str(tmp_path), *options])
        assert report_tables.publish(asked, "kernels", "cpu", **{**content, "demands": demands}) == status
    said = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("pack, tiny, fp32-bf16, whole  10.0  9.0 to 12.0") for line in said) == 8
    assert said.count("pack tiny: share of the copy: 0.5, at least 0.9: MISSED") == 3


def test_a_table_for_a_terminal_has_columns_of_one_width() -> None:
    lines = render.table(["what", "ms", ""], [["a long name", "1.00", ""], ["b", "12.00", "met"]])
    assert render.aligned(["title", "", *lines, "behind"]) == [
        "title",
        "",
        "what            ms",
        "a long name   1.00",
        "b            12.00  met",
        "behind",
    ]


def test_nothing_is_shown_for_what_was_not_measured() -> None:
    assert (
        render.share_of(1.0, 0.0) is None and render.share_of(1.0, -2.0) is None and render.share_of(None, 1.0) is None
    )
    assert render.ratio_text(None) == render.number(None) == "-"
    assert (render.ratio_text(1.005), render.ratio_text(1.006)) == ("1.00", "1.01 **slower**")
    assert render.number(-0.001) == "0.00"
    assert render.demand_text({**FINDING, "value": None}) == "pack, one: nothing finite, at least 0.9x"
