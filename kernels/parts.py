"""The order of additions: parts of a tensor, and each part's additions as steps on a small stack.

Floating-point addition is commutative, not associative: the association alone determines the bits of a sum.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

# A step: PUSH a contribution, ADD one to the top, or FOLD: replace the top two by their sum.
PUSH, ADD, FOLD = 0, 1, 2
Step: TypeAlias = tuple[int, int]
# A contribution's number, or the sum of two terms.
_Term: TypeAlias = "int | tuple[_Term, _Term]"


class Part(NamedTuple):
    """Elements [begin, end) of every tensor, and the order in which they are added up.

    Attributes:
        begin: first element.
        end: the element after the last one.
        adds: pairs `(into, source)`, in order: the partial sum of tensor `source` is added to that of tensor `into`,
            and not used again. A partial sum begins as its tensor's own elements.
        owner: the tensor whose partial sum is the whole sum at the end.
    """

    begin: int
    end: int
    adds: tuple[tuple[int, int], ...]
    owner: int


@functools.lru_cache(maxsize=4096)
def in_rank_order(numel: int, ranks: int) -> tuple[Part, ...]:
    """All elements of a tensor per rank, added up in the order of ranks; of one rank a copy."""
    return (Part(0, numel, tuple((0, source) for source in range(1, ranks)), 0),)


def parts_within(parts: Sequence[Part], begin: int, end: int) -> tuple[Part, ...]:
    """The parts of elements [begin, end), which are numbered from 0 in the result."""
    inside = (part._replace(begin=max(part.begin, begin) - begin, end=min(part.end, end) - begin) for part in parts)
    return tuple(part for part in inside if part.begin < part.end)


@functools.lru_cache(maxsize=4096)
def steps(adds: tuple[tuple[int, int], ...], owner: int) -> tuple[Step, ...]:
    """The additions as steps with the smallest stack: a term that needs more partial sums is evaluated first.

    Example: ((1, 3), (0, 1), (0, 2)), owner 0: (t0 + (t1 + t3)) + t2 is PUSH 1, ADD 3, ADD 0, ADD 2.

    Args:
        adds: see `Part`.
        owner: see `Part`.

    Returns:
        Pairs of PUSH, ADD or FOLD and the contribution's number (0 for FOLD).

    Raises:
        ValueError: a contribution is added twice, or is not in the sum.
    """
    terms: dict[int, _Term] = {}
    used: set[int] = set()
    for into, source in adds:
        if source in used or into in used or into == source:
            raise ValueError(f"not a sum: {source} into {into} after {adds[: adds.index((into, source))]}")
        terms[into] = terms.get(into, into), terms.get(source, source)
        used.add(source)
    left = {peer for add in adds for peer in add} - used
    if left - {owner}:
        raise ValueError(f"not in the sum of owner {owner}: tensors {sorted(left - {owner})}")
    found: list[Step] = []
    _evaluate(terms.get(owner, owner), found)
    return tuple(found)


def depth(program: tuple[Step, ...]) -> int:
    """The largest number of sums on the stack.

    Args:
        program: from `steps`.
    """
    height = highest = 0
    for kind, _ in program:
        height += {PUSH: 1, ADD: 0, FOLD: -1}[kind]
        highest = max(highest, height)
    return highest


def _evaluate(term: _Term, found: list[Step]) -> None:
    # No recursion along the left side, which is as long as the number of contributions.
    waiting: list[_Term] = []
    while not isinstance(term, int):
        one, other = term
        if isinstance(other, int) or (not isinstance(one, int) and _height(one) >= _height(other)):
            term = one
            waiting.append(other)
        else:
            term = other
            waiting.append(one)
    found.append((PUSH, term))
    for other in reversed(waiting):
        if isinstance(other, int):
            found.append((ADD, other))
        else:
            _evaluate(other, found)
            found.append((FOLD, 0))


def _height(term: _Term) -> int:
    """The largest number of sums on the stack while a term is evaluated."""
    found: list[Step] = []
    _evaluate(term, found)
    return depth(tuple(found))
