"""Tables as text: every column has one width, and alignment by kind."""

from __future__ import annotations

from fusedreduce.cli.columns import columns


def test_names_to_the_left_numbers_to_the_right() -> None:
    rows = [["native", "1.0", "torch"], ["x", "10.25", "interpreter"]]
    assert columns([("", "wire"), ("time", "ms"), ("", "path")], rows, last_is_text=True).splitlines() == [
        "         time",
        "wire       ms  path",
        "--------------------------",
        "native    1.0  torch",
        "x       10.25  interpreter",
    ]
    assert columns([("", "a"), ("", "b")], [["1", "22"]]).splitlines() == ["", "a   b", "-----", "1  22"]
