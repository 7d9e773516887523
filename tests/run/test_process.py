"""What the command prints within a program, by the rank that the program itself has given to a process."""

from __future__ import annotations

import pytest
import torch
from support.ranks import fake_group
from torch import nn

import fusedreduce
from fusedreduce.reducer.plans import Forecast
from fusedreduce.run import options, process

pytestmark = pytest.mark.usefixtures("path")


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_totals_are_rank_0s_also_where_no_environment_numbers_the_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: int
) -> None:
    """As of a script that starts its ranks itself; it has destroyed its group when its processes end."""
    monkeypatch.delenv("RANK", raising=False)
    installation = process.PrintingInstallation(
        options.Options(fusedreduce.ReduceConfig(), fallback=False, quiet=False)
    )
    with fake_group(3, rank):
        ddp = fusedreduce.DistributedDataParallel(nn.Linear(30, 20))
        installation.wrapped(ddp)
        for _ in range(2):
            ddp(torch.ones(1, 30)).sum().backward()
        first = capsys.readouterr().err
    installation._at_end()
    last = capsys.readouterr().err
    if rank == 0:
        assert first.startswith("fusedreduce: Linear on 3 ranks: wire native") and first.count("\n") == 1
        assert last == "fusedreduce: 2 steps; 4.96 kB of gradients sent, in their own dtype\n"
    else:
        assert first == last == ""


def test_the_last_line_counts_what_each_reducer_sent_and_no_other() -> None:
    """Two that differ in everything, one of which a comm hook decided, and one that sent nothing to anybody."""
    ours = process.Ended(100, 8, 4_000_000, 100_000_000, Forecast(80.0, 100.0, 99.5))
    other = process.Ended(30, 4, 1_000_000, 20_000_000, Forecast(1.0, 2.0, 1.0))
    hook, alone = ours._replace(steps=7, sent_bytes=None), other._replace(steps=5, ranks=1)
    said = "120.00 MB of gradients sent instead of 430.00 MB (72% less)"
    exposed = "20% of backward and reduction exposed, by the planner's model"
    assert process.last_line([other, ours]) == f"130 steps of 2 reducers; {said}; {exposed}"
    assert process.last_line([alone, other, hook, ours]) == (
        f"142 steps of 4 reducers; {said}; a comm hook decided what was sent; {exposed}"
    )
