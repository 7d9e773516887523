"""What copies cost on other wires: the ratio's arithmetic, the bytes that are counted, and how kernels are measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.traces import COSTS, FakeRun

from fusedreduce.config import Wire
from fusedreduce.kernels import dispatch
from fusedreduce.kernels.encodings import ENCODINGS
from fusedreduce.planning.cost_model import Costs, Linear
from fusedreduce.trace import wire_costs
from fusedreduce.trace.reader import RankTrace, read
from fusedreduce.trace.recorder import Parameter
from fusedreduce.trace.wire_costs import Kernels, KernelTable
from fusedreduce.wires import WIRES

CPU = torch.device("cpu")
FP32 = torch.float32


def parameter(wire: Wire, numel: int, *, group: str = "float32 cpu", alone: bool = False) -> Parameter:
    return Parameter(
        name="p", numel=numel, ndim=2, size_bytes=4 * numel, wire=wire, wire_bytes=1, group=group, alone=alone
    )


@pytest.fixture
def trace(tmp_path: Path) -> RankTrace:
    FakeRun().write(tmp_path)
    return read(tmp_path)[0]


def test_copies_follow_the_kernels() -> None:
    """1,000 elements at bf16: 0.1 ns per byte is 0.2 per element, and as much to unpack. Encoding takes 3 times as long
    as one of the casts, 0.6; decoding twice, and combining half, 0.5 in all. int8 has 1,040 bytes.
    """
    before, after = (2_000, Kernels(1.0, 1.0)), (1_040, Kernels(3.0, 2.0, 0.5))
    found = wire_costs.on_other_wire(COSTS, before, after, phases=2, combined=True)
    assert found == Costs(
        wire=Linear(fixed_ns=4_000, fs_per_byte=1_000_000),
        pack=Linear(fixed_ns=1_000, fs_per_byte=576_923),  # 600 ns / 1,040
        unpack=Linear(fixed_ns=0, fs_per_byte=480_769),  # 500 ns / 1,040
    )
    in_the_link = wire_costs.on_other_wire(COSTS, before, after, phases=1, combined=False)
    assert in_the_link.unpack.fs_per_byte == 384_615 and in_the_link.wire == COSTS.wire  # 400 ns / 1,040
    assert wire_costs.on_other_wire(COSTS, before, before, phases=1, combined=True) == COSTS


@pytest.mark.parametrize("hardly", [0, 1, 30_000])
def test_where_nothing_was_unpacked_unpacking_goes_at_the_pace_of_packing(hardly: int) -> None:
    """In place, 4,000 bytes: packing 0.1 ns per byte where the kernel takes 2; unpacking bf16 takes it 1.5."""
    costs = replace(COSTS, unpack=Linear(fixed_ns=7, fs_per_byte=hardly))
    before = 4_000, Kernels(2.0, 2.0)
    found = wire_costs.on_other_wire(costs, before, (2_000, Kernels(1.5, 1.5)), phases=1, combined=True)
    assert found.pack.fs_per_byte == 150_000 and found.unpack == Linear(fixed_ns=7, fs_per_byte=150_000)
    assert wire_costs.on_other_wire(costs, before, before, phases=1, combined=True) == costs


def test_a_share_of_two_stages_is_of_both() -> None:
    """Packing 0.1 and unpacking 0.04 ns per byte, kernels 2 + 2 ns: 0.07 ns per byte and 2 ns."""
    costs = replace(COSTS, unpack=Linear(fixed_ns=0, fs_per_byte=40_000))
    found = wire_costs.on_other_wire(
        costs, (4_000, Kernels(2.0, 2.0)), (1_000, Kernels(4.0, 1.0)), phases=1, combined=True
    )
    assert (found.pack.fs_per_byte, found.unpack.fs_per_byte) == (560_000, 140_000)


def test_wires_by_parameter_count_by_their_elements(trace: RankTrace) -> None:
    table = KernelTable({"native": Kernels(1.0, 2.0), "int8": Kernels(5.0, 4.0, 8.0)}, "")
    mixed = (parameter("int8", 3_000), parameter("native", 1_000), parameter("native", 9_000, alone=True))
    assert table.of(replace(trace, parameters=mixed)) == Kernels(4.0, 3.5, 6.0)
    assert table.of(replace(trace, parameters=mixed[2:])) == Kernels(1.0, 2.0), "sparse ones alone"


@pytest.mark.parametrize(
    ("ranks", "int8", "int4"), [(1, 10.03, 9.06), (2, 11.05, 9.59), (4, 11.05 + 1.02 / 4, 9.59 + 0.53 / 4)]
)
def test_bytes_are_those_of_the_tables_in_the_docs(ranks: int, int8: float, int4: float) -> None:
    """docs/kernels.md and docs/design.md."""
    found = wire_costs.counted(FP32, ranks)
    sums = {wire: one.pack + one.unpack + one.combine for wire, one in found.items()}
    assert sums == pytest.approx({"native": 16, "bf16": 12, "fp16": 12, "int8": int8, "int4": int4}, abs=0.01)
    assert wire_costs.counted(torch.bfloat16, ranks)["bf16"] == Kernels(4, 4)


@pytest.mark.parametrize("missing", ["cuda", "xpu"])
def test_bytes_are_counted_where_the_device_is_not(
    missing: str, trace: RankTrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = wire_costs.kernel_table(replace(trace, device=missing))
    assert found.by_wire == wire_costs.paced(wire_costs.counted(FP32, 2))
    assert found.source.startswith(
        f"counted, as there is no {missing} device here, in bytes at a copy's rate per float"
    )
    # 11.05 and 9.594 bytes, at 0.77 of it.
    assert "native 16, bf16 12, fp16 12, int8 14.35, int4 12.46." in found.source


@pytest.mark.parametrize("error", [torch.OutOfMemoryError(), dispatch.UnsupportedPairError(), RuntimeError("busy")])
def test_bytes_are_counted_where_kernels_do_not_run(
    error: Exception, trace: RankTrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(wire_costs, "measured", refuses)
    found = wire_costs.kernel_table(trace)
    assert f"counted, as the kernels do not run here: {type(error).__name__}, in bytes" in found.source


def test_what_is_measured_is_like_the_recorded_run(trace: RankTrace, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def measured(device: torch.device, dtype: torch.dtype, numels: list[int], ranks: int) -> dict[Wire, Kernels]:
        asked.append((device.type, dtype, len(numels), numels[0], ranks))
        return {"bf16": Kernels(1.0, 2.0)}

    monkeypatch.setattr(wire_costs, "measured", measured)
    found = wire_costs.kernel_table(trace)
    assert found.source == "measured here on one thread, in ns per float32 element: bf16 3."
    wire_costs.kernel_table(replace(trace, source="hook"))
    sizes = (parameter("native", 6_000, group="bfloat16 cpu"), parameter("native", 2_000))
    wire_costs.kernel_table(replace(trace, parameters=sizes))
    assert asked == [
        ("cpu", FP32, 2**22 // 1_250, 1_250, 2),
        ("cpu", FP32, 1, 2**22, 2),  # DDP's flat buckets
        ("cpu", torch.bfloat16, 2**22 // 4_000, 4_000, 2),
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3, 100])
def test_wires_take_turns_and_the_lower_quartile_counts(ranks: int) -> None:
    """By a clock whose n-th call takes n us; in the first round it is slow."""
    threads, ticks = set(), list[int]()

    def timer(device: torch.device, call: Callable[[], object]) -> float:
        call()
        threads.add(torch.get_num_threads())
        ticks.append(len(ticks))
        return 1e-6 * len(ticks) + (1.0 if len(ticks) == 1 else 0.0)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = wire_costs.measured(CPU, FP32, [500, 500], ranks, rounds=4, timer=timer)
        assert threads == {1} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    stages = 10 + 2 * (ranks > 2)
    assert len(ticks) == 4 * stages and tuple(found) == tuple(WIRES)
    # The second of four times. Of the first stage rounds took 1 s, and 1 + 1, 2, 3 x stages us, for 1,000 elements.
    assert found["native"].pack == pytest.approx(1 + 2 * stages)
    assert found["bf16"].pack == pytest.approx(3 + stages)
    assert all((found[wire].combine > 0) == (ranks > 2) for wire in ENCODINGS)


def test_copies_on_this_device_are_lines_through_two_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch of 1 us, and per element 2 ns to pack, 3 to unpack and 1 to combine."""

    def measured(
        device: torch.device, dtype: torch.dtype, numels: list[int], ranks: int, *, rounds: int
    ) -> dict[Wire, Kernels]:
        launch = 1_000 / numels[0]
        return {wire: Kernels(2 + launch, 3 + launch, 1.0) for wire in tuple(WIRES)}

    monkeypatch.setattr(wire_costs, "measured", measured)
    found = wire_costs.copy_costs(CPU, 3)
    assert tuple(found) == tuple(WIRES)
    sizes: dict[Wire, float] = {"native": 4, "bf16": 2, "int8": 260 / 256, "int4": 34 / 64}
    for wire, element_bytes in sizes.items():
        pack, unpack = found[wire]
        assert pack.fixed_ns == unpack.fixed_ns == pytest.approx(1_000, abs=2)
        assert pack.fs_per_byte == pytest.approx(2e6 / element_bytes, rel=1e-3)
        assert unpack.fs_per_byte == pytest.approx(4e6 / element_bytes, rel=1e-3)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError(), dispatch.UnsupportedPairError()])
def test_where_kernels_do_not_run_bytes_go_at_a_copys_rate(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy takes 1 us, and 0.25 ns for each byte that it reads or writes."""

    def refuses(*_: object, **__: object) -> None:
        raise error

    def clock(device: torch.device, call: Callable[[], object]) -> float:
        copied = call()
        assert isinstance(copied, torch.Tensor)
        return 1e-6 + 0.25e-9 * 2 * copied.nbytes

    monkeypatch.setattr(wire_costs, "measured", refuses)
    monkeypatch.setattr(wire_costs, "seconds", clock)
    found = wire_costs.copy_costs(CPU, 2)
    # 4 + 4 bytes for 4 on the wire; 4 + 2 for 2; at int8 5.016, at 0.77 of the rate, for 1.016.
    rates: dict[Wire, float] = {"native": 8 / 4, "bf16": 6 / 2, "int8": (4 + 65 / 64) / 0.77 / (65 / 64)}
    for wire, moved in rates.items():
        assert found[wire][0].fs_per_byte == pytest.approx(0.25e6 * moved, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_gradients_of_every_dtype_are_measured(dtype: torch.dtype, device: torch.device) -> None:
    found = wire_costs.measured(device, dtype, [3_000], 3, rounds=1)
    assert all(one.pack > 0 and one.unpack > 0 for one in found.values())
