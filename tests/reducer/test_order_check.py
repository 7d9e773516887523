"""The order checker: one small trace per rule, and random ones against the definition, worked out pair by pair."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cuda.order_check import END, HOST, Access, Entry, Kind, Rule, Stream, check
from support.sweep import sweep

MAIN, SIDE, BACKEND, FAR = Stream("cuda:0", 0), Stream("cuda:0", 1), Stream("cuda:0", 2), Stream("cuda:1", 0)
MADE = Entry("allocate", MAIN, "wire", number=0)
FREED = Entry("free", MAIN, number=0)
MADE_AGAIN = Entry("allocate", MAIN, "gradient", number=1)
STEADY = Entry("steady", HOST)


def _use(stream: Stream, *, write: bool, begin: int = 0, end: int = 8, kind: Kind = "work") -> Entry:
    return Entry(kind, stream, "kernel", (Access(0, begin, end, write),), where="file.py: function")


def _after(stream: Stream, other: Stream, number: int = 9) -> list[Entry]:
    return [Entry("record", other, number=number), Entry("wait", stream, number=number)]


WRITTEN = [MADE, _use(MAIN, write=True)]
ISSUED = Entry("issue", MAIN, "all_reduce", (Access(0, 0, 8, True),), number=5, beside=BACKEND)
RULES: dict[str, tuple[Rule, Sequence[Entry], Sequence[Entry]]] = {
    "a read behind the write": (
        "order",
        [*WRITTEN, _use(SIDE, write=False)],
        [*WRITTEN, *_after(SIDE, MAIN), _use(SIDE, write=False)],
    ),
    "a write behind the read": (
        "order",
        [*WRITTEN, *_after(SIDE, MAIN), _use(SIDE, write=False), _use(MAIN, write=True)],
        [*WRITTEN, *_after(SIDE, MAIN), _use(SIDE, write=False), *_after(MAIN, SIDE, 8), _use(MAIN, write=True)],
    ),
    "an event that has been recorded anew too early": (
        "order",
        [
            *WRITTEN,
            Entry("record", MAIN, number=9),
            Entry("record", SIDE, number=9),
            *_after(FAR, SIDE),
            _use(FAR, write=False, kind="copy"),
        ],
        [*WRITTEN, *_after(FAR, MAIN), _use(FAR, write=False, kind="copy")],
    ),
    "a collective that is not waited for": (
        "order",
        [*WRITTEN, ISSUED, _use(MAIN, write=False)],
        [*WRITTEN, ISSUED, Entry("wait", MAIN, number=5), _use(MAIN, write=False)],
    ),
    "memory used behind its allocation": (
        "reuse",
        [MADE, _use(SIDE, write=True)],
        [MADE, *_after(SIDE, MAIN), _use(SIDE, write=True)],
    ),
    "memory given out behind its last use": (
        "reuse",
        [MADE, *_after(SIDE, MAIN), _use(SIDE, write=True), FREED, MADE_AGAIN],
        [MADE, *_after(SIDE, MAIN), _use(SIDE, write=True), FREED, *_after(MAIN, SIDE, 8), MADE_AGAIN],
    ),
    "memory not used once it is freed": (
        "reuse",
        [*WRITTEN, FREED, _use(MAIN, write=False)],
        [*WRITTEN, _use(MAIN, write=False), FREED],
    ),
    "pinned memory that a copy still reads": (
        "order",
        [Entry("allocate", HOST, "table", number=0), _use(MAIN, write=False, kind="copy"), _use(HOST, write=True)],
        [
            Entry("allocate", HOST, "table", number=0),
            _use(MAIN, write=False, kind="copy"),
            Entry("record", MAIN, number=9),
            Entry("query", HOST, number=9),
            _use(HOST, write=True),
        ],
    ),
    "a kernel on its memory's device": ("device", [MADE, _use(FAR, write=True)], [MADE, _use(MAIN, write=True)]),
    "an event on one device": (
        "device",
        [Entry("record", MAIN, number=9), Entry("record", FAR, number=9)],
        [Entry("record", MAIN, number=9), Entry("record", SIDE, number=9)],
    ),
    "no wait of the host's": (
        "host wait",
        [STEADY, Entry("block", MAIN, "Tensor.item", where="file.py: function")],
        [Entry("block", MAIN, "Tensor.item", where="file.py: function"), STEADY, Entry("block", MAIN, "the user's")],
    ),
    "no pageable copy": (
        "pageable copy",
        [STEADY, Entry("pageable", MAIN, "copy", where="file.py: function")],
        [STEADY, Entry("copy", MAIN, "copy", where="file.py: function")],
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_each_rule(name: str) -> None:
    rule, wrong, right = RULES[name]
    assert {one.rule for one in check(wrong)} >= {rule}
    assert not check(right)


def test_what_is_permitted_by_name_may_have_the_host_wait() -> None:
    waits = [STEADY, Entry("block", MAIN, "Tensor.item", where="file.py: function")]
    assert not check(waits, {"file.py: function": "a reason"})
    assert len(check(waits, {"file.py: other": "a reason"})) == 1


def test_a_sentence_names_both_accesses() -> None:
    (found,) = [one for one in check([*WRITTEN, _use(SIDE, write=False)]) if one.rule == "order"]
    assert str(found) == (
        "order: wire: nothing orders kernel (file.py: function), which reads it on stream 1 of cuda:0, behind "
        "kernel (file.py: function), which writes it on stream 0 of cuda:0 (entries 1, 2)"
    )
    assert found.entries == (1, 2)


def test_what_keeps_freed_memory_from_others() -> None:
    kept = [MADE, *_after(SIDE, MAIN), _use(SIDE, write=True), Entry("keep", SIDE, number=0), FREED, MADE_AGAIN]
    assert not check(kept)


# Against the definition


@dataclass
class _Graph:
    """All that happens, and behind what it does: by numbers of nodes."""

    behind: list[set[int]] = field(default_factory=list)
    last: dict[Stream, int] = field(default_factory=dict)
    recorded: dict[int, int] = field(default_factory=dict)
    uses: list[tuple[int, int, Access]] = field(default_factory=list)  # entry, node
    kept: set[tuple[int, Stream]] = field(default_factory=set)

    def add(self, stream: Stream, *others: int | None) -> int:
        """A node on a stream, behind what came before on it, what the host has done, and others."""
        direct = [self.last.get(stream), self.last.get(HOST), *others]
        found = {one for one in direct if one is not None}
        self.behind.append(found.union(*(self.behind[one] for one in found)))
        self.last[stream] = len(self.behind) - 1
        return self.last[stream]


def _expected(trace: Sequence[Entry]) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """Pairs of entries: those that conflict and are not ordered; a use, and an allocation that may be given its memory
    too early."""
    graph = _Graph()
    conflicts: set[tuple[int, int]] = set()
    reused: set[tuple[int, int]] = set()
    free: dict[Stream, list[tuple[int, set[int]]]] = {}
    for index, entry in enumerate(trace):
        node = graph.add(entry.stream, graph.recorded.get(entry.number) if entry.kind == "wait" else None)
        accesses = entry.accesses
        if entry.kind == "allocate":
            accesses = (Access(entry.number, 0, END, True),)
            for memory, kept in free.pop(entry.stream, []):
                done = graph.behind[node].union(kept, *(graph.behind[one] for one in kept))
                reused |= {(one, index) for one, then, use in graph.uses if use.memory == memory and then not in done}
        elif entry.kind == "free":
            kept = {graph.last[stream] for number, stream in graph.kept if number == entry.number}
            free.setdefault(entry.stream, []).append((entry.number, kept))
        elif entry.kind == "keep":
            graph.kept.add((entry.number, entry.stream))
        elif entry.kind == "issue":
            node = graph.recorded[entry.number] = graph.add(entry.beside, node)
        elif entry.kind == "record":
            graph.recorded[entry.number] = node
        elif entry.kind in ("query", "block"):
            graph.add(HOST, graph.recorded.get(entry.number) if entry.number >= 0 else node)
        for access in accesses:
            for earlier, then, other in graph.uses:
                overlap = access.begin < other.end and other.begin < access.end
                conflict = access.memory == other.memory and overlap and (access.write or other.write)
                if conflict and earlier != index and then not in graph.behind[node]:
                    conflicts.add((earlier, index))
        graph.uses += [(index, node, access) for access in accesses]
    return conflicts, reused


_STREAMS = st.sampled_from([MAIN, SIDE, HOST])
_ACCESSES = st.tuples(st.integers(0, 1), st.integers(0, 2), st.integers(1, 3), st.booleans())


@st.composite
def traces(draw: st.DrawFn) -> list[Entry]:
    """Random ones on one device, in which nothing is used before it is allocated or after it is freed."""
    numbers = itertools.count(2)
    owners = {0: MAIN, 1: MAIN}
    trace = [Entry("allocate", MAIN, f"memory {number}", number=number) for number in owners]
    trace.append(Entry("block", MAIN))  # all streams go on behind these
    for _ in range(draw(st.integers(4, 24))):
        kind = draw(
            st.sampled_from(["work", "work", "work", "record", "wait", "wait", "query", "block", "issue", "new"])
        )
        stream = draw(_STREAMS)
        alive = sorted(owners)
        accesses = tuple(
            Access(alive[place % len(alive)], begin, begin + length, write)
            for place, begin, length, write in draw(st.lists(_ACCESSES, min_size=1, max_size=2))
        )
        number = draw(st.integers(10_000, 10_001))
        if kind == "new":
            gone = alive[draw(st.integers(0, 1))]
            if draw(st.booleans()):
                trace.append(Entry("keep", SIDE, number=gone))
            trace.append(Entry("free", owners.pop(gone), number=gone))
            fresh = next(numbers)
            owners[fresh] = MAIN
            trace.append(Entry("allocate", MAIN, f"memory {fresh}", number=fresh))
        elif kind == "issue" and stream != HOST:
            trace.append(Entry("issue", stream, "collective", accesses, number=number, beside=BACKEND))
        elif kind == "work":
            trace.append(Entry("work", stream, "kernel", accesses))
        elif kind in ("record", "wait") and stream != HOST:
            trace.append(Entry(kind, stream, number=number))  # type: ignore[arg-type]
        elif kind in ("query", "block"):
            by_stream = kind == "block" and stream != HOST
            trace.append(Entry(kind, stream if by_stream else HOST, number=-1 if by_stream else number))  # type: ignore[arg-type]
    return trace


@given(traces())
@sweep(500)
def test_random_traces_against_every_pair(trace: list[Entry]) -> None:
    """Of what an entry is not ordered behind, one is named: others may be so because of that."""
    conflicts, reused = _expected(trace)
    found = [one.entries for one in check(trace) if one.rule in ("order", "reuse")]
    for said, expected in (
        ({(first, last) for first, *freed, last in found if not freed}, conflicts),
        ({(first, last) for first, *freed, last in found if freed}, reused),
    ):
        assert said <= expected
        assert {last for _, last in said} == {last for _, last in expected}
