"""The proofs of wires: errors of means, and when a wire pays."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

import bench_errors
import pytest
import records
import report_wires
import torch

from fusedreduce.kernels import reference_encoded
from fusedreduce.kernels.encoded_table import EncodedTable
from fusedreduce.kernels.encodings import ENCODINGS, Encoding
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
    assert sums.errors()[encoding.name + report_wires.NODES] == pytest.approx(error, rel=1e-9)
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
def test_errors_at_two_levels_and_of_one_sign_are_within_their_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16 to 64 ranks; flat ones have tests of their own, and perf/bench_errors.py goes to 1,024."""
    monkeypatch.setattr(bench_errors, "MOST_FLAT", NODE)
    for case, limits in bench_errors.LIMITS.items():
        row = bench_errors.measure(case, bench_errors.drawn(case, 65_536), 64)
        for wire in ENCODINGS.keys() & limits.keys():
            errors = {key: one for key, one in row["variants"][wire + report_wires.NODES].items() if one is not None}
            assert list(errors) == ["error_16", "error_32", "error_64"]
            assert all(limits[wire] / 30 < one <= limits[wire] for one in errors.values()), (case, wire, errors)
        if case == bench_errors.ONE_SIGN:
            flat = [one for one in row["variants"][report_wires.SUMS].values() if one is not None]
            ring = [one for one in row["variants"][report_wires.RING].values() if one is not None]
            assert max(flat) == flat[0] and ring == sorted(ring) and ring[-1] > 4 * flat[-1]


@pytest.mark.usefixtures("path")
def test_the_rehearsal_of_errors_leaves_a_record_and_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.setattr(sys, "argv", ["bench_errors.py", "--rehearse", "--out", str(tmp_path)])
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
    ]
    assert {one["bound"] for one in record["demands"]} == {0.0025, 0.01, 0.015, 0.155, 0.2}
    lines = report_wires.errors(record)
    assert len(lines) == 2 + 4 * 2 and lines[2].startswith("| Gaussian, 2 to 64 ranks | 0.")
    pytest.importorskip("matplotlib").use("Agg")
    save = report_wires.picture(record)
    assert save is not None and report_wires.picture({"rows": []}) is None
    save(tmp_path / "drawn.png")
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")


# When a wire pays


def test_break_even_is_bytes_saved_against_time_spent() -> None:
    spent_ns = {report_wires.BOTH: {"ns": 1.5}, report_wires.BF16: {"ns": 0.5}}
    record = {"rows": [{"case": "int8, 1x8", "encoding": "int8", "variants": spent_ns}]}
    assert report_wires.here(record)[-1] == "| int8, 1x8 | 1.50 | 0.50 | 0.98 | 7.9 |"
    spent_ns[report_wires.BF16]["ns"] = 1.5
    assert report_wires.here(record)[-1].endswith("any speed |")
