"""Training in surroundings that scripts make: default device and dtype, inference mode, warnings as errors."""

from __future__ import annotations

import pytest
from parallel import surroundings_cases as cases
from support.ranks import RankPool

from fusedreduce.kernels import dispatch


@pytest.mark.parametrize("program", cases.PROGRAMS)
def test_ranks_train_as_ever(two: RankPool, program: str) -> None:
    two.run(cases.run, program)


@pytest.mark.parametrize("program", cases.PHASES)
def test_three_ranks_train_as_ever(three: RankPool, program: str) -> None:
    three.run(cases.run, program)


@pytest.mark.parametrize("program", cases.IN_PROCESS)
def test_threads_train_as_ever(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    monkeypatch.setattr(dispatch, "_triton", lambda: None)
    cases.compare(cases.IN_PROCESS[program])


def test_interpreted_kernels_train_as_ever() -> None:
    cases.compare(lambda around: cases.local_reducers(around, model=cases.small, wire="int4", stochastic_rounding=True))
