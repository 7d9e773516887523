"""Whether a trace of CUDA work is ordered: reads behind writes, writes behind reads, no memory reused too early.

A trace lists, in the order in which the host came to them, what was enqueued on which stream, which bytes it reads and
writes, and what orders it: events, collectives, and where the host itself waited. Nothing of it says when the device
did anything: two accesses are ordered if every run of this trace has them in this order.

- Work of one stream runs in the order in which it was enqueued, and behind what the host did before it enqueued it.
- A stream that waits for an event, or for a collective, goes on behind what it was recorded, or issued, behind.
- The host goes on behind a stream only where it waits, or where a query has told it that an event has come.

Memory belongs to the stream that was current when it was allocated. What was freed may be given out by any later
allocation for that stream: by then all uses of it must lie behind that stream. What is allocated may have been used
there until now: what uses it on another stream must lie behind the allocation.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple


class Stream(NamedTuple):
    """A CUDA stream, a backend's stream for its collectives, or HOST."""

    device: str
    number: int

    def __str__(self) -> str:
        return "the host" if self == HOST else f"stream {self.number} of {self.device}"


HOST = Stream("host", 0)
END = 1 << 62  # of a memory: past its last byte

Kind = Literal[
    "allocate",  # memory `number`; HOST: pinned
    "free",
    "keep",  # once freed, memory `number` is not given out before what the stream has by then is done
    "work",  # a kernel, an operator; HOST: the host itself reads or writes pinned memory
    "copy",  # between two devices, or from or to the host
    "record",  # event `number`
    "issue",  # collective `number`, which runs on stream `beside`
    "wait",  # for the latest record of event `number`, or for collective `number`
    "query",  # by the host, of event or collective `number`: it has come
    "block",  # the host waits for event `number`, or (-1) for the stream
    "pageable",  # as "block", for a copy from or to memory that is not pinned
    "steady",  # from here on the host may not wait
]


class Access(NamedTuple):
    """Bytes [begin, end) of a memory."""

    memory: int
    begin: int
    end: int
    write: bool


class Entry(NamedTuple):
    """One line of a trace.

    Args:
        kind: see Kind.
        stream: where it was enqueued; HOST.
        what: for messages; of an allocation the name of the memory.
        accesses: what it reads and writes.
        number: of the event, collective or memory; -1 for none.
        beside: of "issue" only.
        where: "file.py: function" of the package that asked for it, if any.
    """

    kind: Kind
    stream: Stream
    what: str = ""
    accesses: tuple[Access, ...] = ()
    number: int = -1
    beside: Stream = HOST
    where: str = ""

    def __str__(self) -> str:
        return f"{self.what}{f' ({self.where})' if self.where else ''} on {self.stream}"


Rule = Literal["order", "reuse", "device", "host wait", "pageable copy"]


@dataclass(frozen=True)
class Violation:
    """A rule that a trace breaks, said in a sentence, and the numbers of the entries that do."""

    rule: Rule
    sentence: str
    entries: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.rule}: {self.sentence} (entries {', '.join(map(str, self.entries))})"


class _Past(NamedTuple):
    """An access that later ones must be ordered behind: `tick` of `stream`."""

    access: Access
    stream: Stream
    tick: int
    entry: int


# What is known to have happened: of each stream all up to a tick.
_Clock = dict[Stream, int]


class _Checker:
    def __init__(self, trace: Sequence[Entry], permitted: Container[str]) -> None:
        self._trace = trace
        self._permitted = permitted
        self._clocks: dict[Stream, _Clock] = {HOST: {}}
        self._recorded: dict[int, _Clock] = {}  # what an event, or a collective, comes behind
        self._event_devices: dict[int, str] = {}
        self._past: dict[int, list[_Past]] = {}
        self._allocated: dict[int, int] = {}  # the entry that allocated a memory
        self._freed: dict[int, int] = {}
        # Memory that an allocation may be given, and what the allocator has waited for by then.
        self._free: dict[Stream, list[tuple[int, _Clock]]] = {}
        self._kept: dict[int, set[Stream]] = {}
        self._steady = False
        self.found: list[Violation] = []

    def look(self, index: int, entry: Entry) -> None:
        """Goes on to the next entry."""
        clock = self._begun(entry.stream)
        if entry.kind == "allocate":
            self._allocated[entry.number] = index
            self._use(index, entry.stream, Access(entry.number, 0, END, write=True))
            for memory, behind in self._free.pop(entry.stream, ()):
                self._give_out(index, memory, behind)
        elif entry.kind == "free":
            self._freed[entry.number] = index
            waited_for: _Clock = {}
            for stream in self._kept.get(entry.number, ()):
                _join(waited_for, self._clocks[stream])
            self._free.setdefault(entry.stream, []).append((entry.number, waited_for))
        elif entry.kind == "keep":
            self._kept.setdefault(entry.number, set()).add(entry.stream)
        elif entry.kind in ("work", "copy"):
            for access in entry.accesses:
                self._use(index, entry.stream, access)
        elif entry.kind == "issue":
            beside = self._begun(entry.beside)
            _join(beside, clock)
            for access in entry.accesses:
                self._use(index, entry.beside, access)
            self._recorded[entry.number] = dict(beside)
        elif entry.kind == "record":
            device = self._event_devices.setdefault(entry.number, entry.stream.device)
            if device != entry.stream.device:
                self._find("device", f"an event of {device} is recorded: {entry}", index)
            self._recorded[entry.number] = dict(clock)
        elif entry.kind == "wait":
            _join(clock, self._recorded.get(entry.number, {}))
        elif entry.kind == "steady":
            self._steady = True
        else:
            _join(self._clocks[HOST], self._recorded.get(entry.number, {}) if entry.number >= 0 else clock)
            if entry.kind != "query" and self._steady and entry.where and entry.where not in self._permitted:
                rule: Rule = "host wait" if entry.kind == "block" else "pageable copy"
                self._find(rule, f"the host waits: {entry}", index)

    def _begun(self, stream: Stream) -> _Clock:
        """The stream's clock at its next tick, behind what the host has done."""
        clock = self._clocks.setdefault(stream, {})
        _join(clock, self._clocks[HOST])
        clock[stream] = clock.get(stream, 0) + 1
        return clock

    def _use(self, index: int, stream: Stream, access: Access) -> None:
        entry, clock, kept = self._trace[index], self._clocks[stream], []
        if access.memory in self._freed:
            sentence = f"{self._name(access)} has been freed: {_does(entry, access, stream)}"
            self._find("reuse", sentence, self._freed[access.memory], index)
        elif entry.kind != "copy" and self._device(access) not in (HOST.device, stream.device):
            sentence = f"{self._name(access)} is on {self._device(access)}: {_does(entry, access, stream)}"
            self._find("device", sentence, index)
        for past in self._past.get(access.memory, ()):
            if clock.get(past.stream, 0) >= past.tick and past.entry != index:
                # What is ordered behind this access is so behind the past one as well, if it conflicts with that.
                covers = access.begin <= past.access.begin and past.access.end <= access.end
                if covers and (access.write or not past.access.write):
                    continue
            elif past.entry != index and _conflict(access, past.access):
                then = self._trace[past.entry]
                now_and_then = _does(entry, access, stream), _does(then, past.access, past.stream)
                sentence = f"{self._name(access)}: nothing orders {', behind '.join(now_and_then)}"
                self._find("reuse" if then.kind == "allocate" else "order", sentence, past.entry, index)
            kept.append(past)
        self._past[access.memory] = [*kept, _Past(access, stream, clock[stream], index)]

    def _give_out(self, index: int, memory: int, behind: _Clock) -> None:
        stream = self._trace[index].stream
        _join(behind, self._clocks[stream])
        for past in self._past.pop(memory, ()):
            if behind.get(past.stream, 0) < past.tick:
                does = _does(self._trace[past.entry], past.access, past.stream)
                sentence = f"{self._name(past.access)} was freed, and may be given out on {stream}, not behind {does}"
                self._find("reuse", sentence, past.entry, self._freed[memory], index)

    def _device(self, access: Access) -> str:
        made = self._allocated.get(access.memory)
        return HOST.device if made is None else self._trace[made].stream.device

    def _name(self, access: Access) -> str:
        made = self._allocated.get(access.memory)
        return f"memory {access.memory}" if made is None else self._trace[made].what

    def _find(self, rule: Rule, sentence: str, *entries: int) -> None:
        self.found.append(Violation(rule, sentence, entries))


def check(trace: Sequence[Entry], permitted: Container[str] = ()) -> list[Violation]:
    """What is wrong with a trace; nothing, if every run of it is ordered.

    Args:
        trace: in the order in which the host came to the entries.
        permitted: `Entry.where` of those that may have the host wait in a steady step. What the package did not ask
            for may, too.
    """
    checker = _Checker(trace, permitted)
    for index, entry in enumerate(trace):
        checker.look(index, entry)
    return checker.found


def _join(clock: _Clock, other: _Clock) -> None:
    for stream, tick in other.items():
        if clock.get(stream, 0) < tick:
            clock[stream] = tick


def _conflict(one: Access, other: Access) -> bool:
    return (one.write or other.write) and one.begin < other.end and other.begin < one.end


def _does(entry: Entry, access: Access, stream: Stream) -> str:
    """What an entry does with some memory, for messages."""
    where = f" ({entry.where})" if entry.where else ""
    if entry.kind == "allocate":
        return f"its allocation{where} on {stream}"
    return f"{entry.what}{where}, which {'writes' if access.write else 'reads'} it on {stream}"
