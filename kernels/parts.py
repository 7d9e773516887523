"""In which order contributions are added: the parts of a tensor, and each part's additions as steps of a small stack.

Floating-point addition is commutative and not associative, so the association alone decides the bits of a sum.
"""

from __future__ import annotations

import functools
from typing import NamedTuple, TypeAlias

# A step: PUSH a contribution, ADD one to what lies on top, or FOLD: the two on top become their sum.
PUSH, ADD, FOLD = 0, 1, 2
Step: TypeAlias = tuple[int, int]
# A contribution's number, or the sum of two terms.
_Term: TypeAlias = "int | tuple[_Term, _Term]"


class Part(NamedTuple):
    """Elements [begin, end) of every tensor, and how they are added up.

    Attributes:
        adds: `(into, source)`: the partial sum at `into` becomes that plus the one at `source`, which is used up. A
            partial sum begins as that tensor's own elements.
        owner: where the whole sum is at the end.
    """

    begin: int
    end: int
    adds: tuple[tuple[int, int], ...]
    owner: int


@functools.lru_cache(maxsize=4096)
def steps(adds: tuple[tuple[int, int], ...], owner: int) -> tuple[Step, ...]:
    """The additions as steps, with as few sums at a time as can be: what needs more of them goes first.

    Example: ((1, 3), (0, 1), (0, 2)), owner 0: (t0 + (t1 + t3)) + t2 is PUSH 1, ADD 3, ADD 0, ADD 2.

    Raises:
        ValueError: something is added twice, or is not in the sum.
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
        raise ValueError(f"not in the sum at {owner}: what is at {sorted(left)}")
    found: list[Step] = []
    _evaluate(terms.get(owner, owner), found)
    return tuple(found)


def depth(program: tuple[Step, ...]) -> int:
    """How many sums lie on the stack at most."""
    height = highest = 0
    for kind, _ in program:
        height += {PUSH: 1, ADD: 0, FOLD: -1}[kind]
        highest = max(highest, height)
    return highest


def _evaluate(term: _Term, found: list[Step]) -> None:
    # Not recursive along the left side, which is as long as there are contributions.
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
    """Sums on the stack while a term is evaluated."""
    found: list[Step] = []
    _evaluate(term, found)
    return depth(tuple(found))
