"""perf/against.py: slower beyond doubt fails, slower by chance does not."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import against
import pytest
import records
from records import BenchError


def test_the_interval_is_students_around_the_geometric_mean() -> None:
    mean, low, high = records.interval([1.0, 2.0, 4.0, 2.0, 1.0])
    assert math.isclose(mean, 2 ** (4 / 5))
    half = 2.776 * math.log(2) * math.sqrt(0.7) / math.sqrt(5)  # four degrees of freedom; logs 0, 1, 2, 1, 0
    assert math.isclose(high / mean, math.exp(half)) and math.isclose(mean / low, math.exp(half))


@pytest.mark.parametrize(
    ("times", "status"),
    [
        ([1.05, 1.06, 1.05, 1.06, 1.05], 1),
        ([1.05, 0.90, 1.30, 0.95, 1.25], 0),  # as slow on average, but by chance
        ([1.02, 1.03, 1.02, 1.03, 1.02], 0),
        ([0.50, 0.50, 0.50, 0.50, 0.50], 0),
    ],
)
def test_only_what_is_slower_beyond_doubt_fails(
    times: list[float], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    new, old = itertools.cycle(times), itertools.cycle([1.0, 1.001])
    monkeypatch.setattr(against, "checked_out", lambda revision, into: into)
    monkeypatch.setattr(
        against, "start", lambda checkout, cases: {"a case": next(new if checkout == against.ROOT else old)}
    )
    monkeypatch.setattr("sys.argv", ["against.py", "HEAD", "--starts", "5"])
    assert against.main() == status
    assert ("SLOWER" in capsys.readouterr().out) == bool(status)


def test_an_unknown_revision_and_a_start_that_fails_are_errors(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="no-such-revision"):
        against.checked_out("no-such-revision", tmp_path)
    with pytest.raises(BenchError, match="(?s)failed:\n.*(which is not of|No module named 'fusedreduce')"):
        against.start(tmp_path, [])
