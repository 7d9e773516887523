"""Training in surroundings that scripts make: default device and dtype, inference mode, warnings as errors."""

from __future__ import annotations

import pytest
from parallel import surroundings_cases as cases
from support.ranks import RankPool

AROUND = [around for around in cases.SURROUNDINGS if around]


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("program", cases.PROGRAMS)
def test_ranks_train_as_ever(two: RankPool, program: str, around: str) -> None:
    two.run(cases.run, program, around)


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("program", cases.PHASES)
def test_three_ranks_train_as_ever(three: RankPool, program: str, around: str) -> None:
    three.run(cases.run, program, around)


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("program", cases.IN_PROCESS)
@pytest.mark.parametrize("path", ["torch", "interpreter"], indirect=True)
def test_threads_train_as_ever(path: str, program: str, around: str) -> None:
    case = cases.IN_PROCESS[program]
    plain, found = (case(cases.SURROUNDINGS[one]) for one in ("", around))
    assert len(plain) == len(found) > 0
    cases.assert_same(plain, found)
