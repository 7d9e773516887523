"""Reduction orders: which contributions are added in which order and where, from the numbers of peers and elements.

Floating-point addition is commutative and not associative, so the *association* decides the bits. A strategy gives it
for each part of a tensor as a list of additions between peers (`kernels.parts.Part`), which also says on whose device
each addition is done where the peers have several.

Example, 3 peers, 7 elements, by strategy:
    Centralized   [0, 7): (0, 1), (0, 2)          ->  (t0 + t1) + t2, at peer 0
    Tree(2)       [0, 7): (0, 1), (0, 2)          ->  the same; from 4 peers on (t0 + (t1 + t3)) + t2
    Ring          [0, 3): (2, 1), (0, 2)          ->  (t1 + t2) + t0, at peer 0
                  [3, 5): (0, 2), (1, 0)          ->  (t2 + t0) + t1, at peer 1
                  [5, 7): (1, 0), (2, 1)          ->  (t0 + t1) + t2, at peer 2
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ...kernels.parts import Part, in_rank_order


@dataclass(frozen=True)
class Centralized:
    """Peer 0 adds all contributions, in rank order."""

    def parts(self, size: int, numel: int) -> tuple[Part, ...]:
        """The order of additions of a tensor.

        Args:
            size: number of peers.
            numel: elements of the tensor.

        Returns:
            Parts that cover it; empty parts are left out.
        """
        return in_rank_order(numel, size) if numel else ()


@dataclass(frozen=True)
class Tree:
    """Peer p adds the sums of its children, peers arity * p + 1 to arity * p + arity, to its own contribution.

    Args:
        arity: children per peer; 1 is a chain.

    Raises:
        ValueError: `arity` is below 1.
    """

    arity: int = 2

    def __post_init__(self) -> None:
        if isinstance(self.arity, bool) or not isinstance(self.arity, int) or self.arity < 1:
            raise ValueError(f"Tree: arity must be an integer of at least 1, not {self.arity!r}")

    def parts(self, size: int, numel: int) -> tuple[Part, ...]:
        """The order of additions of a tensor; see `Centralized.parts`."""
        return (Part(0, numel, _tree(self.arity, size), 0),) if numel else ()


@dataclass(frozen=True)
class Ring:
    """Each peer owns a part, whose sum starts at the owner's successor and goes round; every peer adds its share."""

    def parts(self, size: int, numel: int) -> tuple[Part, ...]:
        """The order of additions of a tensor; see `Centralized.parts`."""
        return _ring(size, numel)


Strategy = Centralized | Tree | Ring


def balanced(numel: int, pieces: int) -> list[tuple[int, int]]:
    """Divides range(numel) into contiguous ranges of nearly equal length.

    Args:
        numel: how many elements.
        pieces: how many ranges.

    Returns:
        (begin, end) of each, in order; lengths differ by one at most, the longer ones first.
    """
    length, longer = divmod(numel, pieces)
    bounds = [index * length + min(index, longer) for index in range(pieces + 1)]
    return list(zip(bounds, bounds[1:], strict=False))


@functools.cache
def _tree(arity: int, size: int) -> tuple[tuple[int, int], ...]:
    # Children have higher numbers than their parents, so in descending order of parents every sum is complete before it
    # is used; of one parent's children the lower number goes first.
    adds: list[tuple[int, int]] = []
    for parent in reversed(range(size)):
        first = arity * parent + 1
        adds += [(parent, child) for child in range(first, min(first + arity, size))]
    return tuple(adds)


@functools.lru_cache(maxsize=4096)
def _ring(size: int, numel: int) -> tuple[Part, ...]:
    parts = []
    for owner, (begin, end) in enumerate(balanced(numel, size)):
        way = [(owner + 1 + hop) % size for hop in range(size)]
        if end > begin:
            parts.append(Part(begin, end, tuple(zip(way[1:], way, strict=False)), owner))
    return tuple(parts)
