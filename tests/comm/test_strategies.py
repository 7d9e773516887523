"""Strategies are pure: every element in one part, every peer once in its sum, balanced parts, for all sizes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusedreduce.comm.local.strategies import Centralized, Ring, Strategy, Tree, balanced

SIZES = range(2, 17)
NUMELS = range(65)
STRATEGIES: tuple[Strategy, ...] = (Centralized(), Tree(1), Tree(2), Tree(3), Tree(16), Ring())


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_every_element_is_in_one_part_and_every_peer_once_in_its_sum(strategy: Strategy) -> None:
    for size in SIZES:
        for numel in NUMELS:
            parts = strategy.parts(size, numel)
            covered = [index for part in parts for index in range(part.begin, part.end)]
            assert covered == list(range(numel)), (size, numel)
            for part in parts:
                held = {peer: {peer} for peer in range(size)}
                for into, source in part.adds:
                    taken = held.pop(source)
                    assert not held[into] & taken, "added twice"
                    held[into] |= taken
                assert held == {part.owner: set(range(size))}, (size, numel, part)


def test_centralized_adds_in_rank_order() -> None:
    (part,) = Centralized().parts(4, 10)
    assert part.adds == ((0, 1), (0, 2), (0, 3)) and part.owner == 0


def test_a_ring_begins_after_its_owner_and_sums_travel_one_hop_at_a_time() -> None:
    for size in SIZES:
        for part in Ring().parts(size, 64):
            for (into, source), number in zip(part.adds, range(size - 1), strict=True):
                assert into == (source + 1) % size and source == (part.owner + 1 + number) % size
            assert part.adds[-1][0] == part.owner


def test_parents_of_a_tree_add_whole_sums_of_their_children() -> None:
    for size in SIZES:
        for arity in (1, 2, 3, 5):
            (part,) = Tree(arity).parts(size, 1)
            for number, (into, source) in enumerate(part.adds):
                assert (source - 1) // arity == into
                assert all(later != source for later, _ in part.adds[number:])


@given(st.integers(0, 1000), st.integers(1, 40))
def test_balanced_parts_differ_by_one_at_most(numel: int, pieces: int) -> None:
    ranges = balanced(numel, pieces)
    lengths = [end - begin for begin, end in ranges]
    assert len(ranges) == pieces and sum(lengths) == numel
    assert max(lengths) - min(lengths) <= 1 and lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize("arity", [0, -1, 1.5, True, "2"])
def test_an_arity_that_is_none_is_refused(arity: Any) -> None:
    with pytest.raises(ValueError, match="arity must be an integer of at least 1"):
        Tree(arity)
