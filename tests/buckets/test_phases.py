"""The order of phases: whenever phases end, and in whatever order, every rank issues them alike.

First a simulation of several ranks in one thread, without tensors; then a Reducer whose first phases end by a script;
then threads.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import pytest
import torch
from support import sweep
from support.inside import inside
from support.leaf_steps import CAPS, clear, copies, given, leaves, shadow_step, step
from support.loopback import Loopback, LoopbackPending, ThreadWorld
from support.wires import EXCHANGED, reduced, settings

from fusedreduce import FusedReduceError, ReduceConfig, Reducer
from fusedreduce.buckets.phases import ONE_LEVEL, Exchange, Phase, Phases, two_levels
from fusedreduce.buckets.wire_table import WireTable
from fusedreduce.comm.group import Group
from fusedreduce.comm.protocol import Communicator, Pending
from fusedreduce.config import Wire
from fusedreduce.errors import CollectiveError
from fusedreduce.reducer.state import ReducerState

pytestmark = pytest.mark.usefixtures("path")

CPU = torch.device("cpu")


# Ranks in one thread


class Blocked(Exception):
    """A wait for what peers have not issued yet; no RuntimeError, so that nobody takes it for a failed collective."""


class World:
    """Ranks that launch their buckets, each at its own time, and see phases end when the script says so.

    Args:
        ranks: how many.
        draw: decides.

    Attributes:
        issued: by communicator (the ranks that take part, and which of theirs it is) and rank, what was issued there:
            pairs of bucket and phase.
        ended: per rank whether its backward has ended, so that it may wait.
        count: collectives issued by anyone.
    """

    def __init__(self, ranks: int, draw: random.Random) -> None:
        self.draw = draw
        self.sees = draw.random()
        self.issued: dict[tuple[tuple[int, ...], int], dict[int, list[tuple[int, int]]]] = {}
        self.made: Counter[tuple[int, tuple[int, ...]]] = Counter()
        self.ended = [False] * ranks
        self.count = 0


class Peer(Loopback):
    """One rank's part of a communicator, whose n-th collective of every rank meet."""

    def __init__(self, world: World, rank: int, among: tuple[int, ...], number: int = 0) -> None:
        super().__init__([torch.clone] * (len(among) - 1), among.index(rank))
        self.world, self.mine, self.among, self.number = world, rank, among, number

    def apart(self, devices: Collection[torch.device] = (), ranks: Sequence[int] | None = None) -> Peer:
        among = self.among if ranks is None else tuple(ranks)
        self.world.made[self.mine, among] += 1
        return Peer(self.world, self.mine, among, self.world.made[self.mine, among])

    def issue(self, bucket: int, phase: int) -> Meeting:
        """This rank's part in a phase of a bucket."""
        self.world.count += 1
        sequences = self.world.issued.setdefault((self.among, self.number), {rank: [] for rank in self.among})
        sequences[self.mine].append((bucket, phase))
        return Meeting(self, sequences, len(sequences[self.mine]) - 1)


class Meeting:
    """A collective in flight, as one rank has it."""

    def __init__(self, peer: Peer, sequences: dict[int, list[tuple[int, int]]], place: int) -> None:
        self._peer, self._sequences, self._place = peer, sequences, place
        self._seen = False

    def notify(self, done: Any) -> None:
        """Nobody asks."""

    def future(self) -> Any:
        raise NotImplementedError

    def complete(self) -> bool:
        """Whether every rank has issued it; then they must have issued the same."""
        if any(len(one) <= self._place for one in self._sequences.values()):
            return False
        assert len({one[self._place] for one in self._sequences.values()}) == 1, "different buckets meet"
        return True

    def ready(self) -> bool:
        self._seen = self._seen or (self.complete() and self._peer.world.draw.random() < self._peer.world.sees)
        return self._seen

    def wait(self) -> None:
        assert self._seen or self._peer.world.ended[self._peer.mine], "something waits before the end of the step"
        if not self.complete():
            raise Blocked


def _simulate(draw: random.Random, nodes: int, per_node: int) -> int:
    """One step: launches, completions and ends of all ranks, in random order. How many phases came early.

    Args:
        draw: decides.
        nodes: how many; 1: one level.
        per_node: ranks of each.
    """
    ranks, buckets = nodes * per_node, draw.randint(1, 6)
    levels = two_levels(nodes) if nodes > 1 else ONE_LEVEL
    world = World(ranks, draw)
    user = [Peer(world, rank, tuple(range(ranks))) for rank in range(ranks)]
    phases = [Phases(Group(one), CPU) for one in user]
    for one in phases:
        assert one.open(WireTable(("int8",), "wire"), per_node if nodes > 1 else None) == (nodes > 1)
    flights: list[list[Exchange]] = [[] for _ in range(ranks)]

    def begins(bucket: int, phase: int) -> Any:
        return lambda communicator: communicator.issue(bucket, phase)

    while any(len(one) < buckets for one in flights):
        rank = draw.randrange(ranks)
        if len(flights[rank]) < buckets:
            bucket = len(flights[rank])
            exchange = [Phase("a phase", among, begins(bucket, place)) for place, among in enumerate(levels)]
            flights[rank].append(phases[rank].start(exchange, f"bucket {bucket}", CPU))
    early, left = sum(one.issued for one in phases), [list(one) for one in flights]
    stuck: set[int] = set()
    while any(left):
        free = [rank for rank in range(ranks) if left[rank] and rank not in stuck]
        assert free, "every rank waits for another one"
        rank, before = draw.choice(free), world.count
        world.ended[rank] = True
        try:
            phases[rank].issue_all()
            left[rank][0].wait()
            left[rank].pop(0)
        except Blocked:
            stuck.add(rank)
        if world.count > before:
            stuck.clear()
    assert {(one.issued, one.issued_together, len(one.due)) for one in phases} == {(buckets * (len(levels) - 1), 0, 0)}
    for phase in range(len(levels)):
        in_order = [(bucket, phase) for bucket in range(buckets)]
        found = [one for each in world.issued.values() for one in each.values() if (0, phase) in one]
        assert found == [in_order] * ranks, "each phase has communicators of its own, and the order of the plan"
    return early


@pytest.mark.parametrize(
    ("nodes", "per_node", "times"), [(1, 2, 3000), (1, 3, 3500), (1, 4, 3500), (2, 2, 2000), (3, 2, 1000), (2, 3, 1000)]
)
def test_thousands_of_random_completions(nodes: int, per_node: int, times: int) -> None:
    """In one level and in two."""
    draw, times = random.Random(nodes * 10 + per_node), times if sweep.full else times // sweep.SHARE
    early = sum(_simulate(draw, nodes, per_node) for _ in range(times))
    assert early > times, "phases are issued while buckets are still being launched"


# A reducer


class Scripted(Loopback):
    """A Loopback with the order of everything that is issued, whose first phases end when the script says so."""

    def __init__(self, draw: random.Random, log: list[tuple[str, str, int]] | None = None, name: str = "user") -> None:
        super().__init__([torch.clone] * 2)
        self.draw = draw
        self.log: list[tuple[str, str, int]] = [] if log is None else log
        self.name = name
        self.in_backward = False
        self.parts: list[Scripted] = []
        self.closed = False

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> Pending:
        self.log.append((self.name, "all_to_all", input.numel()))
        pending = super().all_to_all(output, input)
        assert isinstance(pending, LoopbackPending)
        return ScriptedPending(self, pending)

    def all_gather(self, tensor: torch.Tensor, into: torch.Tensor | None = None) -> tuple[Pending, torch.Tensor]:
        assert not self.closed
        self.log.append((self.name, "all_gather", 3 * tensor.numel()))
        return super().all_gather(tensor, into)

    def apart(self, devices: Collection[torch.device] = (), ranks: Sequence[int] | None = None) -> Loopback:
        self.parts.append(Scripted(self.draw, self.log, f"private {len(self.parts)}"))
        return self.parts[-1]

    def close(self) -> None:
        self.closed = True


class ScriptedPending:
    """A collective that may be seen to have ended at any time, in any order."""

    def __init__(self, communicator: Scripted, pending: LoopbackPending) -> None:
        self._communicator = communicator
        self._pending = pending
        self._seen = False

    def notify(self, done: Any) -> None:
        self._pending.notify(done)

    def future(self) -> Any:
        return self._pending.future()

    def ready(self) -> bool:
        self._seen = self._seen or self._communicator.draw.random() < 0.3
        return self._seen

    def wait(self) -> None:
        assert self._seen or not self._communicator.in_backward, "something waits before the last gradient is there"
        self._pending.wait()


def _shapes() -> list[tuple[int, ...]]:
    return [(index + 1, 640) for index in range(6)]


@pytest.mark.parametrize("wire", EXCHANGED)
def test_a_reducer_issues_both_phases_in_the_order_of_the_plan(wire: str) -> None:
    """Whatever the order in which gradients become ready, and first phases end."""
    draw = random.Random(1)
    communicator = Scripted(draw)
    parameters = leaves(_shapes())
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(lambda _: count.append(1))
    reducer = Reducer(parameters, communicator, ReduceConfig(policy="static", **settings(wire)), caps=CAPS)
    count: list[int] = []
    early = 0
    for number in range(40):
        count.clear()
        communicator.log.clear()
        communicator.in_backward = True
        last = parameters[draw.randrange(6)]
        order = draw.sample(range(6), 6)
        order.append(order.pop(next(at for at, one in enumerate(order) if parameters[one] is last)))
        # Its hook is behind the reducer's: what is issued after it is issued at the end of the step.
        handle = last.register_post_accumulate_grad_hook(lambda _: setattr(communicator, "in_backward", False))
        step(reducer, [torch.randn_like(one) for one in parameters], ready=order)
        handle.remove()
        clear(parameters)
        sizes = [one.wire_bytes for one in inside(reducer).buckets]
        firsts = [size for name, kind, size in communicator.log if (name, kind) == ("user", "all_to_all")]
        seconds = [size for name, kind, size in communicator.log if (name, kind) == ("private 0", "all_gather")]
        exchanged = [entry for entry in communicator.log if entry[1] in ("all_to_all", "all_gather")]
        assert firsts == seconds == sizes and len(exchanged) == 2 * len(sizes)
        kinds = [kind for _, kind, _ in exchanged]
        early += number > 0 and kinds != ["all_to_all"] * 6 + ["all_gather"] * 6
    assert len(communicator.parts) == 1 and early > 7
    assert reducer.stats()["buckets"] == 6


@pytest.mark.parametrize("wire", EXCHANGED)
def test_reset_closes_the_communicator_of_second_phases_and_the_next_step_makes_another(wire: str) -> None:
    communicator = Scripted(random.Random(2))
    parameters = leaves(_shapes())
    reducer = Reducer(parameters, communicator, ReduceConfig(policy="static", **settings(wire)), caps=CAPS)
    gradients = [torch.randn_like(one) for one in parameters]
    step(reducer, gradients)
    clear(parameters)

    def fails(_: torch.Tensor) -> None:
        raise ZeroDivisionError

    handle = parameters[2].register_post_accumulate_grad_hook(fails)
    with pytest.raises(ZeroDivisionError):
        step(reducer, gradients)
    handle.remove()
    assert not communicator.parts[0].closed
    reducer.reset()
    assert not inside(reducer).phases.due
    assert not communicator.parts[0].closed, "peers may still wait for what is in flight there"
    clear(parameters)
    step(reducer, gradients)
    assert communicator.parts[0].closed
    assert len(communicator.parts) == 2 and not communicator.parts[1].closed
    expected = reduced([gradients[0]] * 3, [3.0] * 3, wire)
    assert parameters[0].grad is not None and torch.equal(parameters[0].grad[0, :200], expected[0, :200]), (
        "this rank's shard"
    )
    reducer.close()
    assert communicator.parts[1].closed


def test_a_gradient_that_was_changed_on_one_rank_leaves_the_others_their_averages() -> None:
    """That rank has issued its second phases before it raises: its peers would wait for them."""

    def case(communicator: Communicator) -> list[torch.Tensor | None] | str:
        parameters = leaves(_shapes())
        reducer = Reducer(parameters, communicator, ReduceConfig(wire="int8", policy="static"), caps=CAPS)
        gradients = [torch.full_like(one, communicator.rank + 1.0) for one in parameters]
        for _ in range(2):
            clear(parameters)
            step(reducer, gradients)
        clear(parameters)
        if communicator.rank == 1:

            def change(_: torch.Tensor) -> None:
                assert parameters[5].grad is not None
                parameters[5].grad.mul_(2.0)

            parameters[0].register_post_accumulate_grad_hook(change)  # the last, when the first has been packed
            with pytest.raises(FusedReduceError) as caught:
                step(reducer, gradients)
            return str(caught.value)
        step(reducer, gradients)
        return [one.grad for one in parameters]

    first, changed, last = ThreadWorld(3).results(case)
    assert "the gradient of parameter 5 (parameter 5) was written to" in changed
    for held in (first, last):
        for gradient in held:
            assert gradient.sub(2.0).abs().max() < 0.02


@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_an_error_of_one_reducer_on_one_rank_leaves_its_peers_the_averages_of_another(wire: Wire) -> None:
    """Both end in the same backward: the other one's later phases are issued although the first one has raised."""

    def case(communicator: Communicator) -> str:
        mine, other = leaves(_shapes()), torch.zeros(4, 640)
        other.requires_grad_()
        first = Reducer(mine, communicator, ReduceConfig(policy="static"), caps=CAPS)
        second = Reducer([other], communicator, ReduceConfig(wire=wire, policy="static"))

        def both() -> None:
            clear([*mine, other])
            late = given([other], [torch.ones_like(other)])
            early = given(mine, [torch.ones_like(one) for one in mine])  # made later: its backward begins first
            second.prepare_for_backward(late)
            first.prepare_for_backward(early)
            (late + early).backward()

        both()
        both()
        if communicator.rank == 1:

            def change(_: torch.Tensor) -> None:
                assert mine[5].grad is not None
                mine[5].grad.mul_(2.0)

            mine[0].register_post_accumulate_grad_hook(change)
            with pytest.raises(FusedReduceError) as caught:
                both()
            assert (first.state, second.state) == (ReducerState.FAILED, ReducerState.IDLE)
            assert "check_unchanged" in [entry.name for entry in caught.traceback], "of where it was found"
            text = str(caught.value)
        else:
            other.register_hook(lambda _: time.sleep(0.2))  # rank 1 is not the last: its phase two is not issued early
            both()
            text = ""
        assert other.grad is not None and other.grad.sub(1.0).abs().max() < 0.02
        return text

    texts = ThreadWorld(3).results(case)
    assert texts[0] == texts[2] == "" and "the gradient of parameter 5 (parameter 5) was written to" in texts[1]


def test_a_rank_without_inputs_while_the_kind_of_a_sparse_gradient_is_not_known_yet() -> None:
    """It takes part in the exchange of kinds only when it has all sums, and its peers wait for that exchange."""

    def case(communicator: Communicator) -> list[torch.Tensor | None]:
        dense, table = torch.zeros(4, 640, requires_grad=True), torch.zeros(8, 4, requires_grad=True)
        config = ReduceConfig(wire="int8", policy="static")
        reducer = Reducer([dense, table], communicator, config, sparse=[False, True])
        if communicator.rank == 2:
            shadow_step(reducer)
        else:
            rows = torch.sparse_coo_tensor(torch.tensor([[1, 3]]), torch.ones(2, 4), (8, 4), check_invariants=False)
            step(reducer, [torch.ones_like(dense), rows])
        return copies([dense, table])

    first, second, _ = ThreadWorld(3).results(case)
    for dense, table in (first, second):
        assert dense is not None and dense.sub(2 / 3).abs().max() < 0.02
        assert table is not None and table.sum(1).tolist() == pytest.approx([0, 8 / 3, 0, 8 / 3, 0, 0, 0, 0])


# Failures


class Failing(Loopback):
    """A phase of the second bucket fails: when it is waited for, or when it is issued."""

    def __init__(self, phase: str, when: str) -> None:
        super().__init__([torch.clone] * 2)
        self.phase, self.when = phase, when

    def _failing(self, kind: str, pending: Pending) -> Pending:
        if self.phase != kind or self.count(kind) != 2:
            return pending
        if self.when == "issue":
            raise RuntimeError("Connection refused by peer")

        def closed() -> torch.Tensor:
            raise RuntimeError("Connection closed by peer")

        return LoopbackPending(closed)

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> Pending:
        return self._failing("all_to_all", super().all_to_all(output, input))

    def all_gather(self, tensor: torch.Tensor, into: torch.Tensor | None = None) -> tuple[Pending, torch.Tensor]:
        pending, gathered = super().all_gather(tensor, into)
        return self._failing("all_gather", pending), gathered


@pytest.mark.parametrize("wire", EXCHANGED)
@pytest.mark.parametrize(
    ("phase", "when", "text"),
    [
        ("all_to_all", "issue", r"bucket 1 \(p4\) could not be started"),
        ("all_to_all", "wait", r"the all-to-all of bucket 1 \(p4\) failed after .* Connection closed by peer"),
        ("all_gather", "issue", r"the all-gather of bucket 1 \(p4\) could not be started.* Connection refused by peer"),
        ("all_gather", "wait", r"the all-gather of bucket 1 \(p4\): Connection closed by peer"),
    ],
)
def test_a_phase_that_fails_is_named_with_its_bucket(phase: str, when: str, text: str, wire: str) -> None:
    communicator = Failing(phase, when)
    parameters = leaves(_shapes())
    names = [f"p{number}" for number in range(6)]
    config = ReduceConfig(policy="static", plan=None, **settings(wire))
    reducer = Reducer(parameters, communicator, config, names=names, caps=CAPS)
    # A first step has one bucket.
    communicator.phase, asked = "", phase
    step(reducer, [torch.randn_like(one) for one in parameters])
    clear(parameters)
    communicator.calls.clear()
    communicator.phase = asked
    with pytest.raises(CollectiveError, match=text):
        step(reducer, [torch.randn_like(one) for one in parameters])
    assert communicator.lost and reducer.state is ReducerState.FAILED
    communicator.aside = lambda mine: [mine] * 3
    with pytest.raises(FusedReduceError, match=r"set_communicator\(\)"):
        reducer.reset()
    another = Loopback([torch.clone] * 2)
    reducer.set_communicator(another)
    clear(parameters)
    step(reducer, [torch.randn_like(one) for one in parameters])
    assert reducer.stats()["state"] == "idle" and another.count("all_gather") == another.count("all_to_all") > 0
