"""The proofs of wires: errors of means, final losses, and when a wire pays."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import bench_errors
import bench_training
import break_even
import harness
import pytest
import records
import report
import report_wires
import torch
import training_data
import training_runs
from records import BenchError
from simulated_exchange import SimulatedExchange
from support.ranks import RankPool

from fusedreduce.kernels import reference_encoded
from fusedreduce.kernels.encoded_table import EncodedTable
from fusedreduce.kernels.encodings import ENCODINGS, INT4, Encoding
from fusedreduce.kernels.table import PointerTable

NODE = bench_errors.NODE


def _values(ranks: int, numel: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(ranks)
    return [torch.randn(numel, generator=generator) for _ in range(ranks)]


def _by_definition(contributions: Sequence[torch.Tensor], encoding: Encoding) -> torch.Tensor:
    """The sum that three or more ranks exchange in shards, by the reference of each kernel."""
    ranks, numel = len(contributions), contributions[0].numel()
    table = EncodedTable([numel], [0], [torch.float32], numel, encoding, ranks)
    sent = torch.empty(ranks, table.layout.nbytes, dtype=torch.uint8)
    for one, into in zip(contributions, sent, strict=True):
        reference_encoded.encode([one], table, PointerTable(), into, 1.0)
    summed = torch.empty(ranks, table.layout.shard_bytes, dtype=torch.uint8)
    for owner, into in enumerate(summed):
        received = sent.view(ranks, ranks, -1)[:, owner].contiguous().view(-1)
        reference_encoded.combine_encoded(received, table, into)
    result = torch.empty(numel)
    reference_encoded.decode([result], table, PointerTable(), summed.view(-1), torch.ones(1))
    return result


# Errors


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("encoding", ENCODINGS.values(), ids=ENCODINGS)
def test_nodes_add_up_in_fp32_and_encode_their_sums(encoding: Encoding) -> None:
    ranks, numel = 4 * NODE, 4 * encoding.shard_align
    values, sums = _values(ranks, numel), bench_errors.Sums()
    for one in values:
        sums.add([one])
    nodes = []
    for first in range(0, ranks, NODE):
        mine = values[first]
        for one in values[first + 1 : first + NODE]:
            mine = mine + one
        nodes.append(mine)
    assert all(torch.equal(one, other) for (one,), other in zip(sums.nodes, nodes, strict=True))
    (found,) = bench_errors.exchanged(sums.nodes, encoding)
    assert torch.equal(found, _by_definition(nodes, encoding))
    exact = torch.stack(values).double().sum(0)
    error = float((found.double() - exact).norm() / exact.norm())
    assert sums.errors()[encoding.name + bench_errors.IN_NODES] == pytest.approx(error, rel=1e-9)
    (flat,) = bench_errors.exchanged([[one] for one in values[:3]], encoding)
    padded = [torch.nn.functional.pad(one, (0, 3 * numel - numel)) for one in values[:3]]
    assert torch.equal(flat, _by_definition(padded, encoding)[:numel])


def test_sixteen_bits_are_rounded_once_each_and_their_sum_once() -> None:
    values = _values(5, 1000)
    in_order = list(itertools.accumulate((one.bfloat16().float() for one in values), torch.add))[-1]
    (found,) = bench_errors.accumulated([[one] for one in values])
    assert torch.equal(found, in_order.bfloat16())


@pytest.mark.parametrize("dtype", bench_errors.FP8.values(), ids=bench_errors.FP8)
def test_fp8_takes_the_nearest_number_that_it_has_times_the_scale_of_the_block(dtype: torch.dtype) -> None:
    values = torch.cat([torch.zeros(256), *_values(2, 300)])
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    numbers = numbers[numbers.isfinite()]
    (found,) = bench_errors.in_fp8([values], dtype)
    for block, decoded in zip(values.split(256), found.split(256), strict=True):
        scale = block.abs().max().double() / numbers.max()
        least = (block.double()[:, None] - numbers * scale).abs().min(1).values
        assert ((block.double() - decoded).abs() <= least + 1e-6 * scale * numbers.max()).all()
    sums = bench_errors.exchanged_in_fp8([[values], [values]], dtype)
    assert torch.equal(sums[0], found + found)
    assert torch.equal(
        bench_errors.exchanged_in_fp8([[values]] * 3, dtype)[0], bench_errors.in_fp8([found + found + found], dtype)[0]
    )


@pytest.mark.usefixtures("path")
def test_errors_at_two_levels_and_of_one_sign_are_within_their_bounds() -> None:
    """Of 16 and 64 ranks; flat ones have tests of their own, and perf/bench_errors.py goes to 1,024."""
    for case, limits in bench_errors.LIMITS.items():
        row = bench_errors.measure(case, bench_errors.drawn(case, 65_536), 64)
        for wire in ENCODINGS.keys() & limits.keys():
            errors = {key: one for key, one in row["variants"][wire + bench_errors.IN_NODES].items() if one is not None}
            assert list(errors) == ["error_16", "error_32", "error_64"]
            assert all(limits[wire] / 30 < one <= limits[wire] for one in errors.values()), (case, wire, errors)
        if case == bench_errors.ONE_SIGN:
            flat = [one for one in row["variants"][bench_errors.SUMS].values() if one is not None]
            ring = [one for one in row["variants"][bench_errors.RING].values() if one is not None]
            assert max(flat) == flat[0] and ring == sorted(ring) and ring[-1] > 4 * flat[-1]


@pytest.mark.usefixtures("path")
def test_the_rehearsal_of_errors_leaves_a_record_and_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.setattr(sys, "argv", ["bench_errors.py", "--quick", "--out", str(tmp_path)])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(bench_errors, "MODEL_STEPS", 1)
    assert bench_errors.main() == 0
    (path,) = tmp_path.glob("errors_cpu_*.json")
    record = records.read(path, published=False)
    assert [row["case"] for row in record["rows"]] == [
        "Gaussian",
        "Laplace",
        "one sign",
        "gradients of digits",
        "gradients of text",
    ]
    assert {one["bound"] for one in record["demands"]} == {0.0025, 0.01, 0.015, 0.155, 0.2}
    lines = report_wires.errors(record)
    assert len(lines) == 2 + 5 * 2 and lines[2].startswith("| Gaussian, 2 to 64 ranks | 0.")
    pytest.importorskip("matplotlib").use("Agg")
    save = report_wires.picture(record)
    assert save is not None and report_wires.picture({"rows": []}) is None
    save(tmp_path / "drawn.png")
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")


# Training


@pytest.mark.usefixtures("path")
def test_feedback_gives_back_what_was_lost_and_draws_differ_by_step() -> None:
    values, ranks = _values(12, 1000), 2
    exchange = SimulatedExchange([values[0]], INT4, ranks, feedback=True)
    given, true = torch.zeros(1000, dtype=torch.float64), torch.zeros(1000, dtype=torch.float64)
    for one, other in zip(values[::2], values[1::2], strict=True):
        result = torch.empty(1000)
        exchange.mean([[one], [other]], [result])
        given, true = given + result, true + (one.double() + other.double()) / 2
    assert exchange._residuals is not None
    left = sum(one.copies[int(one.live)][0].double() for one in exchange._residuals)
    assert float((given + left - true).abs().max()) < 1e-5 < float((given - true).abs().max())
    drawn = SimulatedExchange([values[0]], INT4, ranks, stochastic=True)
    results = [torch.empty(1000) for _ in range(400)]
    for result in results:
        drawn.mean([[values[0]], [values[1]]], [result])
    mean = (values[0] + values[1]) / 2
    assert not torch.equal(results[0], results[1])
    off = float((torch.stack(results).mean(0) - mean).norm() / mean.norm())
    assert off < 0.2 / math.sqrt(len(results)) * 2


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("task", training_runs.TASKS)
def test_seeds_decide_weights_and_batches_and_evaluation_is_apart(task: str) -> None:
    pytest.importorskip("sklearn")
    of = training_runs.TASKS[task]
    first, again, other = (next(iter(of.build(seed).parameters())) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    batches = [of.batch(step, rank, 2, seed)[0] for step in (0, 1) for rank in (0, 1) for seed in (0, 1)]
    assert not any(torch.equal(one, another) for one, another in itertools.combinations(batches, 2))
    assert torch.equal(of.batch(3, 1, 2, 4)[0], of.batch(3, 1, 2, 4)[0])
    if task == "text":
        split = training_data._held_out()
        assert split < len(training_data.text())
        assert torch.equal(of.evaluation()[0][0][0], training_data.windows([split])[0])
    encoded = training_runs._exchange(list(of.build(0).parameters()), "int4", 2, 0)[1]
    numels = [one.numel() for one in of.build(0).parameters()]
    assert sum(numels[index] for index in encoded) > 0.95 * sum(numels)


def _losses(rank: int, world: int, task: str, variants: Sequence[str]) -> list[float]:
    return [training_runs.exchanged(task, "AdamW", name, 0, 8) for name in variants]


@pytest.mark.usefixtures("path")
def test_what_is_simulated_is_what_two_ranks_do(two: RankPool) -> None:
    pytest.importorskip("sklearn")
    task, wires = "digits, 100 steps", ("native", "int8", "int4")
    here, there = two.run(_losses, task, [f"ours {wire}" for wire in wires])
    alone = [training_runs.simulated(task, "AdamW", wire, 0, 8) for wire in wires]
    assert here == there == pytest.approx(alone, rel=1e-6)
    assert len(set(alone)) == 3


def _cell(variant: str, seed: int, loss: float, task: str = "text", part: str = "exchanged") -> dict[str, Any]:
    names = {"part": part, "task": task, "optimizer": "SGD", "seed": seed, "variant": variant}
    return {**names, "ranks": 2, "steps": 400, "loss": loss}


def test_differences_are_paired_and_what_the_seeds_leave_open_is_not_judged() -> None:
    native = (2.0, 2.2, 1.8)
    off = {"ours int8": (0.001, 0.0011, 0.0012), "ours int4": (0.05, -0.04, 0.06), "torch PowerSGD rank 4": (0.1,) * 3}
    cells = [_cell("ours native", seed, loss) for seed, loss in enumerate(native)]
    cells += [_cell(name, seed, native[seed] + more[seed]) for name, more in off.items() for seed in range(3)]
    (row,) = bench_training.rows(cells)
    int8 = row["variants"]["ours int8"]
    assert int8["difference"] == pytest.approx(0.0011 / 2) and row["variants"]["ours native"][
        "spread"
    ] == pytest.approx(0.1)
    assert int8["difference_error"] == pytest.approx(1e-4 / 2 / math.sqrt(3))
    assert row["variants"]["torch PowerSGD rank 4"]["difference_error"] == pytest.approx(0.0, abs=1e-12)
    judged = bench_training.demands([row])
    assert [one["met"] for one in judged] == [True, None] and "standard error" in judged[1]["why_not"]
    assert bench_training.demands(bench_training.rows([{**one, "task": "digits, 100 steps"} for one in cells])) == []
    simulated = [_cell(name, seed, 2.0 + more, part="simulated") for seed in range(2) for name, more in (
        ("native", 0.0), ("int4", 0.2), ("int4, feedback", 0.1 + 0.02 * seed))]  # fmt: skip
    (row,) = bench_training.rows(simulated)
    assert row["variants"]["int4, feedback"]["of_nearest"] == pytest.approx(-0.045)
    assert row["variants"]["int4"]["of_nearest"] is None


@pytest.mark.usefixtures("path")
def test_runs_that_a_file_has_are_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    ran: list[int] = []

    def alone(worker: Any, ranks: int, todo: Sequence[bench_training.Cell], path: str) -> None:
        ran.append(len(todo))
        with Path(path).open("a") as lines:
            for cell in todo:
                names = (cell["task"], cell["optimizer"], cell["variant"], cell["seed"], cell["steps"])
                lines.write(json.dumps({**cell, "loss": training_runs.simulated(*names)}) + "\n")

    def never(*arguments: Any) -> NoReturn:
        raise AssertionError("there was nothing to run")

    cells = tmp_path / "cells.jsonl"
    command = f"bench_training.py --quick --parts simulated --variants int4 --cells {cells} --out {tmp_path}"
    monkeypatch.setattr(sys, "argv", [*command.split(), "--tasks", "digits, 100 steps"])
    monkeypatch.setattr(harness, "run_ranks", alone)
    assert bench_training.main() == 0
    assert ran == [2 * 2 * 5]
    monkeypatch.setattr(harness, "run_ranks", never)
    assert bench_training.main() == 0
    first, second = (records.read(path, published=False) for path in sorted(tmp_path.glob("training_cpu_*.json")))
    assert first["rows"] == second["rows"]
    assert len(report_wires.feedback(first)) == 2 + 2 and len(report_wires.losses(first)) == 2
    cells.write_text("{}\n")
    with pytest.raises(BenchError, match="a line that is no run's"):
        bench_training.main()


def test_what_the_page_says_of_training_is_so() -> None:
    page = " ".join((records.CHECKOUT / "docs" / "wires.md").read_text().split())
    (record,) = [one for one in report.latest_records(records.RESULTS) if one["what"] == "training"]
    rows = {(row["part"], row["case"]): row["variants"] for row in record["rows"]}
    assert "nowhere here does it help by more than the seeds' spread" in page
    for (part, case), variants in rows.items():
        for wire in ENCODINGS if part == "simulated" else ():
            assert variants[f"{wire}, feedback"]["of_nearest"] > -variants["native"]["spread"], case
    assert "There AdamW is behind at 4 bits, however codes are rounded" in page
    assert "By the end that is within the seeds' spread" in page
    for name in ("int4", "int4, stochastic", "int4, feedback"):
        behind, caught_up = (rows["simulated", f"{task}, AdamW"][name] for task in ("digits, 100 steps", "digits"))
        assert behind["difference"] > max(0.01, 2 * behind["difference_error"])
        assert caught_up["difference"] < min(0.003, rows["simulated", "digits, AdamW"]["native"]["spread"])
    assert "No final loss there differs from that of `native` by more than the seeds' spread" in page
    assert "**`int4`** with SGD ends within that spread too" in page
    for (part, case), variants in rows.items():
        for wire in ("int8", "int4") if part == "exchanged" else ():
            within = abs(variants[f"ours {wire}"]["difference"]) <= variants["ours native"]["spread"]
            assert within == ((wire, case) != ("int4", "digits, 100 steps, AdamW")), (wire, case)
    assert "a peak learning rate of 0.05: at twice that `native`'s own loss rises in one seed of five" in page
    before = records.read(records.RESULTS / "training_cpu_2026-11-23.json")
    for made, rate, outliers in ((record, 0.05, 0), (before, 0.1, 1)):
        (row,) = [one for one in made["rows"] if (one["part"], one["case"]) == ("exchanged", "text, SGD")]
        losses = row["variants"]["ours native"]["losses"]
        assert row["learning_rate"] == rate and len(losses) == 5
        assert sum(loss > 1.05 * min(losses) for loss in losses) == outliers


# When a wire pays


def test_break_even_is_bytes_saved_against_time_spent() -> None:
    assert break_even.saved_bytes("int8", "bf16", 2) == 2 - 260 / 256
    assert break_even.saved_bytes("int4", "native", 8) == 1.75 * (4 - 34 / 64)
    assert break_even.memory_bytes("bf16", 8) == 12
    assert break_even.memory_bytes("int8", 8) == pytest.approx(10.03 + 1 + 1 / 8, abs=0.02)
    assert break_even.break_even_gbit(1.0, 2.0) == 4.0 and break_even.break_even_gbit(1.0, 0.0) is None
    assert break_even.on_h100_gbit("int8", "bf16", 8) is None, "it moves less memory than 16 bits do"
    saved, spent = break_even.saved_bytes("int8", "native", 8), break_even.memory_bytes("int8", 8)
    assert break_even.on_h100_gbit("int8", "native", 8) == pytest.approx(8 * saved * 3350 / spent)
    spent_ns = {report_wires.BOTH: {"ns": 1.5}, report_wires.BF16: {"ns": 0.5}}
    record = {"rows": [{"case": "int8, 1x8", "encoding": "int8", "variants": spent_ns}]}
    assert report_wires.here(record)[-1] == "| int8, 1x8 | 1.50 | 0.50 | 0.98 | 7.9 |"
    spent_ns[report_wires.BF16]["ns"] = 1.5
    assert report_wires.here(record)[-1].endswith("any speed |")
