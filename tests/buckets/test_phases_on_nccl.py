"""The order of phases where the host waits for none: it follows from the buckets that are launched, and that alone.

Ranks in one thread, without tensors, on stand-ins for CUDA's streams. First what they issue; then what becomes of it if
each communicator's collectives run one after the other, as NCCL's do, and each rank's streams at their own pace.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.cuda.stand_in_streams import within
from support.loopback import Loopback

from fusedreduce.buckets.phases import ONE_LEVEL, Among, Phase, Phases, two_levels
from fusedreduce.buckets.wire_table import WireTable
from fusedreduce.comm.group import Group
from fusedreduce.errors import CollectiveError

CUDA = torch.device("cuda", 0)
# By the number of phases, those that are.
LEVELS: dict[int, tuple[Among, ...]] = {len(one): one for one in (ONE_LEVEL, two_levels(2), two_levels(3))}


class Stream:
    """A stream, and those that it was made to wait for."""

    def __init__(self, device: torch.device = CUDA, priority: int = 0) -> None:
        self.device, self.priority = device, priority
        self.behind: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.behind.append(other)


@pytest.fixture(scope="module", autouse=True)
def streams() -> Iterator[list[Stream]]:
    """The streams that are current, innermost last."""
    current = [Stream()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "stream", partial(within, current))
        patch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        yield current


class Act(NamedTuple):
    """What a rank has enqueued.

    Args:
        kind: "issue", or "wait" on a stream.
        bucket, phase: of the collective.
        aside: on the side stream; else on the current one.
        among: the ranks that take part.
    """

    kind: str
    bucket: int
    phase: int
    aside: bool
    among: tuple[int, ...]


class Rank(Loopback):
    """A communicator that writes down what is done with it; parts of it write to the same list."""

    def __init__(
        self, rank: int, among: tuple[int, ...], current: list[Stream], acts: list[Act] | None = None, fails: int = -1
    ) -> None:
        super().__init__([torch.clone] * (len(among) - 1), among.index(rank))
        self.mine, self.among, self.current, self.fails = rank, among, current, fails
        self.acts: list[Act] = [] if acts is None else acts

    def apart(self, devices: Collection[torch.device] = (), ranks: Sequence[int] | None = None) -> Rank:
        return Rank(self.mine, tuple(ranks or self.among), self.current, self.acts)

    def act(self, kind: str, bucket: int, phase: int) -> None:
        self.acts.append(Act(kind, bucket, phase, len(self.current) > 1, self.among))


class InFlight:
    """A collective that nobody but a stream may wait for."""

    def __init__(self, rank: Rank, bucket: int, phase: int) -> None:
        rank.act("issue", bucket, phase)
        self._rank, self._bucket, self._phase = rank, bucket, phase

    def notify(self, done: Any) -> None:
        """Nobody asks."""

    def future(self) -> Any:
        raise NotImplementedError

    def ready(self) -> bool:
        raise AssertionError("that follows a clock")

    def wait(self) -> None:
        self._rank.act("wait", self._bucket, self._phase)


def _opened(rank: int, per_node: int, ranks: int, current: list[Stream]) -> tuple[Rank, Phases]:
    communicator = Rank(rank, tuple(range(ranks)), current)
    phases = Phases(Group(communicator), CUDA)
    phases.open(WireTable(("int8",), "fp32"), per_node)
    return communicator, phases


def _launch(phases: Phases, bucket: int, levels: Sequence[Among], fails: Callable[[], bool] | None = None) -> None:
    def begin(phase: int) -> Callable[[Any], Any]:
        def begins(communicator: Rank) -> InFlight:
            if fails is not None and phase > 0 and fails():
                raise RuntimeError("Connection refused by peer")
            return InFlight(communicator, bucket, phase)

        return begins

    every = [Phase("phase", among, begin(place)) for place, among in enumerate(levels)]
    phases.start(every, f"bucket {bucket}", CUDA)


def _issued(communicator: Rank) -> list[tuple[int, int]]:
    return [(one.bucket, one.phase) for one in communicator.acts if one.kind == "issue"]


@pytest.mark.parametrize("count", LEVELS)
@pytest.mark.parametrize("buckets", range(1, 7))
def test_phases_are_skewed(streams: list[Stream], count: int, buckets: int) -> None:
    """With a bucket's first phase the second one of the bucket before, the third of that before it, and so on."""
    communicator, phases = _opened(0, 2, 6, streams)
    for bucket in range(buckets):
        _launch(phases, bucket, LEVELS[count])
        in_backward = [(bucket - place, place) for place in range(min(count, bucket + 1))]
        assert _issued(communicator)[-len(in_backward) :] == in_backward
    phases.issue_all()
    every = itertools.product(range(buckets), range(count))
    assert _issued(communicator) == sorted(every, key=lambda one: (sum(one), one[1]))
    assert not phases.due
    firsts = [one for one in communicator.acts if one.phase == 0 and one.kind == "issue"]
    assert not any(one.aside for one in firsts) and all(one.aside for one in communicator.acts if one not in firsts)


# A step: per bucket how many phases it has, or None for the end of a module's or a wrapper's buckets.
STEPS = st.lists(st.one_of(st.none(), st.sampled_from(list(LEVELS))), max_size=12)


@given(steps=STEPS, given_up=STEPS, nodes=st.sampled_from([2, 3]))
def test_every_rank_issues_the_same(
    streams: list[Stream], steps: list[int | None], given_up: list[int | None], nodes: int
) -> None:
    """Of buckets with different numbers of phases, wherever each rank was in a step that they have given up."""
    by_rank = []
    for rank in range(2 * nodes):
        communicator, phases = _opened(rank, 2, 2 * nodes, streams)
        for bucket, count in enumerate(given_up[rank:]):
            phases.issue_all() if count is None else _launch(phases, bucket, LEVELS[count])
        phases.dropped()
        phases.open(WireTable(("int8",), "fp32"), 2)
        communicator.acts.clear()
        for bucket, count in enumerate([*steps, None]):
            phases.issue_all() if count is None else _launch(phases, bucket, LEVELS[count])
        by_rank.append(_issued(communicator))
        counts = {bucket: count for bucket, count in enumerate(steps) if count is not None}
        every = [(bucket, phase) for bucket, count in counts.items() for phase in range(count)]
        assert sorted(by_rank[-1]) == every, "each once"
    assert len(set(map(tuple, by_rank))) == 1


def _run(acts: Sequence[Sequence[Act]], draw: random.Random) -> int:
    """Runs what ranks have enqueued, at any pace; how many collectives are left when nothing can go on."""
    queues: list[dict[str, deque[Act]]] = []
    for of_rank in acts:
        mine: dict[str, deque[Act]] = defaultdict(deque)
        for one in of_rank:
            mine["aside" if one.aside else "current"].append(one)
            if one.kind == "issue":
                mine[f"among {one.among}"].append(one)
        queues.append(mine)
    reached: set[tuple[int, int, int]] = set()  # by rank the collectives that its streams have come to
    done: set[tuple[int, int, int]] = set()

    def goes_on(rank: int, name: str) -> bool:
        act = queues[rank][name][0]
        mine = rank, act.bucket, act.phase
        if name in ("aside", "current"):
            if act.kind == "wait" and mine not in done:
                return False
            reached.add(mine)
            queues[rank][name].popleft()
            return True
        heads = [queues[one][name] for one in act.among]
        if not all(heads):
            return False
        if any((one, head[0].bucket, head[0].phase) not in reached for one, head in zip(act.among, heads, strict=True)):
            return False
        assert len({(head[0].bucket, head[0].phase) for head in heads}) == 1, "different buckets meet"
        for one, head in zip(act.among, heads, strict=True):
            done.add((one, act.bucket, act.phase))
            head.popleft()
        return True

    while True:
        left = [(rank, name) for rank, mine in enumerate(queues) for name, queue in mine.items() if queue]
        draw.shuffle(left)
        if not any(goes_on(rank, name) for rank, name in left):
            return sum(name.startswith("among") for _, name in left)


@given(steps=STEPS, nodes=st.sampled_from([2, 3]), seed=st.integers(0, 2**32))
def test_no_rank_waits_for_ever(streams: list[Stream], steps: list[int | None], nodes: int, seed: int) -> None:
    """Phases among the same ranks share a communicator."""
    acts = []
    for rank in range(2 * nodes):
        communicator, phases = _opened(rank, 2, 2 * nodes, streams)
        for bucket, count in enumerate([*steps, None]):
            levels = two_levels(nodes) if count == len(two_levels(nodes)) else ONE_LEVEL
            phases.issue_all() if count is None else _launch(phases, bucket, levels)
        acts.append(communicator.acts)
    assert _run(acts, random.Random(seed)) == 0


@pytest.mark.parametrize(
    "leave",
    [
        pytest.param(lambda phases: phases.dropped(), id="reset"),
        pytest.param(lambda phases: phases.close(), id="closed"),
        pytest.param(lambda phases: phases.new_group(), id="other ranks"),
        pytest.param(lambda phases: phases.fail(CollectiveError("failed")), id="failed"),
    ],
)
def test_the_current_stream_is_behind_what_is_given_up(
    streams: list[Stream], leave: Callable[[Phases], object]
) -> None:
    """Memory that is used on the side stream may be given out again then."""
    _, phases = _opened(0, 2, 6, streams)
    for bucket in range(2):
        _launch(phases, bucket, LEVELS[3])
    with torch.cuda.stream(Stream()):  # type: ignore[arg-type]
        leave(phases)
        (aside,) = streams[-1].behind
    assert aside.priority == -1
    assert not phases.due


def test_a_phase_that_cannot_be_issued_is_named_and_stays_due(streams: list[Stream]) -> None:
    """In the middle of backward too. Those behind it stay, in their order."""
    communicator, phases = _opened(0, 2, 6, streams)
    refused = [True]  # once
    _launch(phases, 0, LEVELS[4], lambda: bool(refused and refused.pop()))
    with pytest.raises(CollectiveError, match="the phase across nodes of bucket 0 could not be started"):
        _launch(phases, 1, LEVELS[4])
    assert len(streams) == 1 and [one.label for one in phases.due] == ["bucket 0", "bucket 1"]
    phases.issue_all()
    assert _issued(communicator) == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2), (0, 3), (1, 3)]
