"""What counts as worse machine code, on rows made up for it; that of real kernels is compared by `make test`."""

from __future__ import annotations

from typing import Any

import pytest
from support.machine_code.record import BranchRow, Place, Row, Table, accesses, compare, dump, load

PLACE = Place("sm_90", "pack[mixed, wire bf16]")
BRANCH = "fp32->bf16"
LOOP = BranchRow(in_flight_bytes=65536, per_16_bytes=15.75, loads={16: 4, 4: 1}, stores={8: 4, 2: 1})
ROW = Row(registers=40, spills=0, branches={BRANCH: LOOP, "zero->bf16": BranchRow(0, None, {}, {16: 4, 2: 1})})


def changed(**figures: Any) -> Row:
    """ROW with other figures in its first branch."""
    return ROW._replace(branches={**ROW.branches, BRANCH: LOOP._replace(**figures)})


WORSE = [
    (ROW._replace(registers=41), "", "registers", "40", "41"),
    (ROW._replace(spills=8), "", "spills", "0", "8"),
    (changed(in_flight_bytes=65535), BRANCH, "in_flight_bytes", "65536", "65535"),
    (changed(per_16_bytes=16.0), BRANCH, "per_16_bytes", "15.75", "16"),
    (changed(per_16_bytes=None), BRANCH, "per_16_bytes", "15.75", "no loop"),
    # as many bytes, in narrower accesses
    (changed(loads={4: 17}), BRANCH, "loads", "16x4 4x1", "4x17"),
    (changed(loads={16: 3, 8: 2, 4: 1}), BRANCH, "loads", "16x4 4x1", "16x3 8x2 4x1"),
    (changed(stores={8: 4, 2: 2}), BRANCH, "stores", "8x4 2x1", "8x4 2x2"),
    # a width that was not there, beside those that were
    (changed(loads={32: 1, 16: 4, 4: 1}), BRANCH, "loads", "16x4 4x1", "32x1 16x4 4x1"),
    (changed(stores={8: 4, 2: 1, 1: 1}), BRANCH, "stores", "8x4 2x1", "8x4 2x1 1x1"),
    (changed(stores={16: 4, 2: 2}), BRANCH, "stores", "8x4 2x1", "16x4 2x2"),
    (ROW._replace(branches={"zero->bf16": ROW.branches["zero->bf16"]}), BRANCH, "branch", "recorded", "gone"),
    (ROW._replace(branches={**ROW.branches, "fp64->bf16": LOOP}), "fp64->bf16", "branch", "not recorded", "there"),
    (Row(unsupported="no bf16"), "", "kernel", "compiled", "unsupported (no bf16)"),
]
BETTER = [
    (ROW._replace(registers=39), "", "registers", "40", "39"),
    (changed(in_flight_bytes=131072), BRANCH, "in_flight_bytes", "65536", "131072"),
    (changed(per_16_bytes=15.5), BRANCH, "per_16_bytes", "15.75", "15.5"),
    (changed(loads={32: 2, 4: 1}), BRANCH, "loads", "16x4 4x1", "32x2 4x1"),
    (changed(stores={8: 4}), BRANCH, "stores", "8x4 2x1", "8x4"),
    (changed(stores={8: 4, 4: 1}), BRANCH, "stores", "8x4 2x1", "8x4 4x1"),
]


@pytest.mark.parametrize(("now", "branch", "figure", "was", "is_"), WORSE)
def test_worse(now: Row, branch: str, figure: str, was: str, is_: str) -> None:
    (change,) = compare({PLACE: ROW}, {PLACE: now})
    assert change == (PLACE.kernel, PLACE.target, branch, figure, was, is_, True)
    where = "pack[mixed, wire bf16] on sm_90" + (f", branch {branch}" if branch else "")
    assert str(change) == f"{where}: {figure}: was {was}, is {is_}"


@pytest.mark.parametrize(("now", "branch", "figure", "was", "is_"), BETTER)
def test_better(now: Row, branch: str, figure: str, was: str, is_: str) -> None:
    (change,) = compare({PLACE: ROW}, {PLACE: now})
    assert change == (PLACE.kernel, PLACE.target, branch, figure, was, is_, False)
    (back,) = compare({PLACE: now}, {PLACE: ROW})
    assert back.worse, "the way back from better is worse"


def test_equal_figures_are_no_change() -> None:
    assert compare({PLACE: ROW}, {PLACE: changed()}) == []


def test_every_figure_that_changed_is_told() -> None:
    now = changed(in_flight_bytes=1, per_16_bytes=1.0)._replace(registers=1)
    told = [(change.figure, change.worse) for change in compare({PLACE: ROW}, {PLACE: now})]
    assert told == [("registers", False), ("in_flight_bytes", True), ("per_16_bytes", False)]


def test_what_had_no_loop_and_has_one_is_to_be_looked_at() -> None:
    (change,) = compare({PLACE: changed(per_16_bytes=None)}, {PLACE: ROW})
    assert (change.was, change.now, change.worse) == ("no loop", "15.75", True)


def test_kernels_that_one_side_lacks_fail() -> None:
    other = Place("sm_90", "pack[mixed, wire fp16]")
    new, gone = compare({PLACE: ROW}, {PLACE: ROW, other: ROW}), compare({PLACE: ROW, other: ROW}, {PLACE: ROW})
    assert [str(change) for change in new] == [f"{other.kernel} on sm_90: kernel: was not recorded, is there"]
    assert [str(change) for change in gone] == [f"{other.kernel} on sm_90: kernel: was recorded, is gone"]
    assert all(change.worse for change in (*new, *gone))


def test_architectures_that_were_not_compiled_are_left_out() -> None:
    elsewhere = Place("gfx942", PLACE.kernel)
    assert compare({PLACE: ROW, elsewhere: ROW}, {PLACE: ROW}) == []
    assert len(compare({elsewhere: ROW}, {PLACE: ROW})) == 1


def test_support_that_came_or_changed_its_reason_is_no_fault() -> None:
    refused = Row(unsupported="no bf16")
    for now, text in ((ROW, "compiled"), (Row(unsupported="no tools"), "unsupported (no tools)")):
        (change,) = compare({PLACE: refused}, {PLACE: now})
        assert (change.was, change.now, change.worse) == ("unsupported (no bf16)", text, False)
    assert compare({PLACE: refused}, {PLACE: refused}) == []


def test_a_table_survives_its_file_and_has_one_line_a_row() -> None:
    rows = {PLACE: ROW, Place("gfx942", "total"): Row(registers=28), Place("gfx942", "x"): Row(unsupported="why")}
    text = dump(Table("3.7.1", rows))
    assert load(text) == Table("3.7.1", rows)
    assert dump(load(text)) == text
    assert [line[:20] for line in text.splitlines()[1:-1]] == [
        ' ["sm_90", "pack[mix',
        ' ["gfx942", "total",',
        ' ["gfx942", "x", "wh',
    ]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"triton": "3"}', '{"triton": "3", "rows": [["sm_90", "a", 1, 2]]}'])
def test_what_is_no_table_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a table of machine code"):
        load(text)


def test_accesses_are_written_widest_first() -> None:
    assert accesses({2: 1, 16: 4, 4: 3}) == "16x4 4x3 2x1"
    assert accesses({}) == "-"
