"""Which of several wires ends a step first: what is tried in which step, and the rule that decides. Pure.

    tried      each candidate in two blocks of steps, there and back (A B C, C B A), so that a drift favours none; the
               first step of a block, in new buckets, is not timed
    picked     in order of preference: one takes the place of those before it where it shortens the step by its share,
               in the first blocks and in the second
    checked    the steps behind the choice must agree with it, or it is undone
    watched    a window of steps that is much slower or quicker than those has the wires tried again

Example, native, bf16 and int8 take 100, 99 and 90 ms: bf16 saves 1 %, less than its 2 %; int8 saves 10 %, and is used.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from ..config import Wire
from ..wires import encoding_of

BLOCKS = 2
MOST_TRIED = 3
_TIMED = {2: 7, 3: 4}  # steps of a block, behind its first, by the number of candidates: 32 and 30 in all
_TIMED_OF_MORE = 3  # where no model has left three
CHECKED = 20
WINDOW = 50
CHANGED = 1.2
# By bits of an encoded element what a wire must shorten the step by; one of 16 bits by the other share.
_LEAST_GAINS = {8: 0.05, 4: 0.10}
_LEAST_GAIN = 0.02


def least_gain(wire: Wire) -> float:
    """The share of a step by which a wire must shorten it to take the place of one that is preferred."""
    encoding = encoding_of(wire)
    return _LEAST_GAIN if encoding is None else _LEAST_GAINS[encoding.bits]


def shortens(took_ns: Sequence[float], wire: Wire, before_ns: Sequence[float], *, share: float = 1.0) -> bool:
    """Whether steps on `wire` are so much shorter that it takes the place of a preferred one, each time.

    Args:
        took_ns: what a step on it took, some times.
        wire: its name.
        before_ns: what one on the preferred wire took, as many times.
        share: of the gain that is asked for.
    """
    most = 1 - share * least_gain(wire)
    return all(took <= most * before for took, before in zip(took_ns, before_ns, strict=True))


def pick(took_ns: Mapping[Wire, Sequence[float]]) -> Wire:
    """The wire to use.

    Args:
        took_ns: by wire what a step takes, in order of preference; each as many times.
    """
    wires = iter(took_ns)
    best = next(wires)
    for wire in wires:
        if shortens(took_ns[wire], wire, took_ns[best]):
            best = wire
    return best


def candidates(ends_ns: Mapping[Wire, float], held: Wire) -> list[Wire]:
    """Those that are tried, in order of preference: the first one, the one in use, that which the rule takes, and the
    quickest others.

    Args:
        ends_ns: by wire when a step ends, in the model, in order of preference.
        held: the one in use.
    """
    by_end = sorted(ends_ns, key=lambda wire: ends_ns[wire])
    taken = pick({wire: [end_ns] for wire, end_ns in ends_ns.items()})
    chosen = list(dict.fromkeys([next(iter(ends_ns)), held, taken, *by_end]))[:MOST_TRIED]
    return [wire for wire in ends_ns if wire in chosen]


def block(count: int) -> int:
    """How many steps a block of a trial of `count` candidates has."""
    return 1 + _TIMED.get(count, _TIMED_OF_MORE)


def tried_in(step: int, count: int) -> int | None:
    """Which of `count` candidates a step of the trial has, by its number from 0; None: the trial is over."""
    turn, place = divmod(step // block(count), count)
    return None if turn >= BLOCKS else count - 1 - place if turn % 2 else place


def is_timed(step: int, count: int) -> bool:
    """Whether a step of the trial is: not the first with its buckets."""
    return step % block(count) > 0


def medians(spans_ns: Sequence[int], count: int) -> list[list[float]]:
    """By candidate the median of the timed steps of each of its blocks.

    Args:
        spans_ns: of all timed steps, in order.
        count: of candidates.
    """
    timed = block(count) - 1
    assert len(spans_ns) == BLOCKS * count * timed
    found = [statistics.median(spans_ns[at : at + timed]) for at in range(0, len(spans_ns), timed)]
    turns = [found[at : at + count][:: -1 if at % (2 * count) else 1] for at in range(0, len(found), count)]
    return [list(one) for one in zip(*turns, strict=True)]


def has_changed(window_ns: float, usual_ns: float) -> bool:
    """Whether a window of steps says that the link, or the model, is another one."""
    return not usual_ns / CHANGED <= window_ns <= usual_ns * CHANGED
