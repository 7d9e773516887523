"""Collective sessions: every kind of error, on every peer alike, and the session afterwards."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import sweep
from support.collective_cases import (
    JOIN_S,
    TIMEOUT_S,
    Peers,
    caught,
    free_port,
    good,
    run_threads,
    same,
    values,
)
from support.every_moment import Beside, announce_waits, at_line, moments
from support.inside import (
    REGISTRATION_IS_DECIDED,
    REGISTRATION_WAITS,
    Part,
    is_decided,
    lock_of,
    peers_of,
    registering,
    registry_of,
)
from support.timeouts import PATIENT_S, in_time, settles

from fusedreduce.collective import (
    AllReduceOperationMismatch,
    AllReduceShapeMismatch,
    BroadcastMultipleTensors,
    BroadcastNoTensor,
    BroadcastRootMismatch,
    CollectiveConfig,
    CollectiveSessionError,
    DTypeMismatch,
    InvalidArgument,
    InvalidConfig,
    KindMismatch,
    LocalGroup,
    MultipleRegister,
    PeerLost,
    PendingOperations,
    ReduceOperationMismatch,
    ReduceRootMismatch,
    ReduceShapeMismatch,
    RegisterParamsMismatch,
    Ring,
    Session,
    SessionReset,
    UnsupportedDType,
    peer_group,
    register,
    reset,
)
from fusedreduce.collective.errors import BY_NAME
from fusedreduce.collective.node_collectives import NodePending
from fusedreduce.collective.transport import Transport
from fusedreduce.collective.verdicts import (
    Description,
    Verdict,
    decode_descriptions,
    decode_verdict,
    encode,
    failed,
    judge,
    lost,
)
from fusedreduce.comm.store_exchange import StoreExchange
from fusedreduce.errors import CollectiveError, FusedReduceError

# The verdict, as a function.


def _all_reduce(peer: int, **changes: Any) -> Description:
    held: dict[str, Any] = {"op": "sum", "shape": (2, 3), "stride": (3, 1), "dtype": "float32", **changes}
    return Description(peer, "all_reduce", **held)


def test_agreement_is_no_error() -> None:
    assert judge([_all_reduce(peer) for peer in range(3)], "operation 0") == Verdict()


def test_a_verdict_names_peers_and_values() -> None:
    verdict = judge([_all_reduce(2), _all_reduce(1, shape=(4,)), _all_reduce(0)], "operation 7")
    assert verdict.error == (
        "AllReduceShapeMismatch",
        "operation 7 (all_reduce): shapes differ: (2, 3) on peers 0, 2; (4,) on peer 1. Nothing was reduced",
    )


def test_who_is_missing_is_named() -> None:
    name, text = lost([_all_reduce(1)], range(4), "operation 2", 0.5).error or ("", "")
    assert name == "PeerLost" and "peers 0, 2, 3 did not arrive within 0.5 s" in text and "all_reduce on peer 1" in text


_descriptions = st.builds(
    Description,
    peer=st.integers(0, 5),
    kind=st.sampled_from(["all_reduce", "reduce", "broadcast", "finish", "register"]),
    op=st.sampled_from([None, "sum", "mean"]),
    root=st.sampled_from([None, 0, 1]),
    shape=st.sampled_from([None, (), (2, 3)]),
    stride=st.sampled_from([None, (), (3, 1)]),
    dtype=st.sampled_from([None, "float32", "int64"]),
    settings=st.sampled_from([(), (("world_size", 2),), (("world_size", 3),)]),
    problem=st.sampled_from([None, ("InvalidArgument", "why")]),
)


@sweep.sweep(200)
@given(st.lists(_descriptions, min_size=1, max_size=6, unique_by=lambda one: one.peer), st.randoms())
def test_a_verdict_depends_on_nothing_but_what_all_said(held: list[Description], order: random.Random) -> None:
    """Whoever finds it, in whatever order peers came, and after travelling as text."""
    verdict = judge(held, "operation 3")
    shuffled = decode_descriptions(encode(held))
    order.shuffle(shuffled)
    assert judge(shuffled, "operation 3") == verdict
    assert decode_verdict(encode(verdict)) == verdict
    if verdict.error is not None:
        error = verdict.raised()
        assert type(error).__name__ == verdict.error[0] in BY_NAME and isinstance(error, FusedReduceError)
        assert "peer" in str(error)


@pytest.mark.parametrize("garbage", ["", "7", "null", "[]", "{}", "[1]", '{"error": 5, "source": null}', "\x80"])
def test_garbage_is_refused(garbage: str) -> None:
    with pytest.raises(ValueError, match="expected a verdict|Expecting|Extra|column"):
        decode_verdict(garbage)
    with pytest.raises(ValueError, match="expected descriptions|Expecting|Extra|column"):
        decode_descriptions(garbage)


# The exchange, over a store.


@pytest.mark.parametrize("kind", ["HashStore", "TCPStore"])
def test_an_exchange_has_one_verdict_and_leaves_no_keys(kind: str) -> None:
    import torch.distributed as dist

    stores: Any = dist
    store = stores.HashStore() if kind == "HashStore" else stores.TCPStore("127.0.0.1", 0, None, True)
    ends = [StoreExchange(store, "x", node, 3) for node in range(3)]
    before = store.num_keys()
    for number in range(5):
        decide = lambda held: "+".join(held[node] for node in sorted(held))  # noqa: E731
        assert ends[2].post(number, "c", False, decide) is None and ends[2].verdict(number) is None
        assert ends[0].post(number, "a", False, decide) is None
        assert ends[0].present(number) == {0: "a", 2: "c"}
        if number % 2:
            assert ends[1].post(number, "b", False, decide) == "a+b+c"
            assert ends[0].propose(number, "lost") == "a+b+c" == ends[2].wait_for_verdict(number, 0.0)
        else:
            assert ends[0].propose(number, "lost") == "lost"
            assert ends[1].post(number, "b", False, decide) == "lost" == ends[1].verdict(number)
        for end in ends:
            end.acknowledge(number)
    assert store.num_keys() == before
    assert ends[0].post(9, "a", True, decide) is None
    assert ends[1].post(9, "b", False, decide) == "a+b"


def test_one_who_waits_keeps_nobody_from_the_store() -> None:
    """A TCPStore's client has one lock, and its own `wait` holds it."""
    import torch.distributed as dist

    stores: Any = dist
    store = stores.TCPStore("127.0.0.1", 0, None, True)
    one, other = (StoreExchange(store, "x", node, 2) for node in range(2))
    found: list[str | None] = []
    waiter = threading.Thread(target=lambda: found.append(one.wait_for_verdict(0, time.monotonic() + PATIENT_S)))
    waiter.start()
    began = time.monotonic()
    for _ in range(50):
        other.propose(0, "now")
    waiter.join(PATIENT_S)
    assert found == ["now"] and time.monotonic() - began < PATIENT_S / 2


# Every kind, on every peer.


@dataclass(frozen=True)
class Kind:
    """A disagreement: what peer p of n calls, and what all must be told."""

    error: type[CollectiveSessionError]
    call: Callable[[Session, int], Any]
    says: tuple[str, ...]


def _odd(session: Session) -> bool:
    return session.peer == 1


KINDS = {
    "all_reduce shape": Kind(
        AllReduceShapeMismatch,
        lambda s, n: s.all_reduce(values(s.peer, (2,) if _odd(s) else (3,))),
        ("(2,) on peer 1", "(3,) on peers 0"),
    ),
    "all_reduce op": Kind(
        AllReduceOperationMismatch,
        lambda s, n: s.all_reduce(values(s.peer), "max" if _odd(s) else "sum"),
        ("max on peer 1", "sum on peers 0"),
    ),
    "all_reduce dtype": Kind(
        DTypeMismatch,
        lambda s, n: s.all_reduce(values(s.peer).to(torch.bfloat16 if _odd(s) else torch.float32)),
        ("bfloat16 on peer 1", "float32 on peers 0"),
    ),
    "reduce shape": Kind(
        ReduceShapeMismatch,
        lambda s, n: s.reduce(values(s.peer, (1, 3) if _odd(s) else (3,)), "sum", 0),
        ("(1, 3) on peer 1", "(3,) on peers 0"),
    ),
    "reduce op": Kind(
        ReduceOperationMismatch,
        lambda s, n: s.reduce(values(s.peer), "product" if _odd(s) else "min", 0),
        ("product on peer 1", "min on peers 0"),
    ),
    "reduce root": Kind(
        ReduceRootMismatch,
        lambda s, n: s.reduce(values(s.peer), "sum", 1 if _odd(s) else 0),
        ("1 on peer 1", "0 on peers 0"),
    ),
    "reduce dtype": Kind(
        DTypeMismatch,
        lambda s, n: s.reduce(values(s.peer).to(torch.float64 if _odd(s) else torch.float32), "sum", 0),
        ("float64 on peer 1", "float32 on peers 0"),
    ),
    "broadcast root": Kind(
        BroadcastRootMismatch,
        lambda s, n: s.broadcast(values(0) if s.peer == 0 else None, root=1 if _odd(s) else 0),
        ("1 on peer 1", "0 on peers 0"),
    ),
    "broadcast from another than root": Kind(
        BroadcastRootMismatch,
        lambda s, n: s.broadcast(values(0) if _odd(s) else None, root=0),
        ("root 0 on peers 0", "the tensor is peer 1's"),
    ),
    "broadcast of nothing": Kind(BroadcastNoTensor, lambda s, n: s.broadcast(None), ("none of peers 0",)),
    "broadcast of two": Kind(
        BroadcastMultipleTensors,
        lambda s, n: s.broadcast(values(s.peer, (s.peer + 1,)) if s.peer < 2 else None),
        ("float32 (1,) on peer 0", "float32 (2,) on peer 1"),
    ),
    "kinds": Kind(
        KindMismatch,
        lambda s, n: s.broadcast(values(0)) if _odd(s) else s.all_reduce(values(0)),
        ("broadcast on peer 1", "all_reduce on peers 0"),
    ),
    "mean of integers": Kind(
        UnsupportedDType, lambda s, n: s.all_reduce(torch.ones(2, dtype=torch.int64), "mean"), ("peer 1", "int64")
    ),
    "float8, of one": Kind(
        UnsupportedDType,
        lambda s, n: s.all_reduce(torch.ones(2).to(torch.float8_e5m2 if _odd(s) else torch.float32)),
        ("peer 1", "float8_e5m2", "use one of float16"),
    ),
    "bool": Kind(UnsupportedDType, lambda s, n: s.reduce(torch.ones(2).bool(), "max"), ("peer 0", "bool")),
    "unknown op": Kind(
        InvalidArgument, lambda s, n: s.all_reduce(values(0), "avg" if _odd(s) else "sum"), ("peer 1", "'avg'", "mean")
    ),
    "no tensor": Kind(
        InvalidArgument,
        lambda s, n: s.all_reduce([1.0] if _odd(s) else values(0)),  # type: ignore[arg-type]
        ("peer 1", "list"),
    ),
    "sparse": Kind(
        InvalidArgument,
        lambda s, n: s.broadcast(torch.eye(2).to_sparse() if s.peer == 0 else None),
        ("peer 0", "sparse"),
    ),
    "meta": Kind(
        InvalidArgument,
        lambda s, n: s.all_reduce(torch.ones(2, device="meta" if _odd(s) else "cpu")),
        ("peer 1", "meta"),
    ),
    "no such root": Kind(
        InvalidArgument,
        lambda s, n: s.reduce(values(0), "sum", n if _odd(s) else 0),
        ("peer 1", "root must be the number of a peer"),
    ),
    "a negative root of broadcast": Kind(
        InvalidArgument, lambda s, n: s.broadcast(values(0), root=-1), ("peer 0", "got -1")
    ),
    "finish among operations": Kind(
        PeerLost,
        lambda s, n: s.finish() if _odd(s) else s.all_reduce(values(0)),
        ("peer 1 called finish", "all_reduce on peer"),
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_every_peer_is_told_the_same_and_the_session_goes_on(peers: Peers, name: str) -> None:
    kind = KINDS[name]

    def case(session: Session) -> CollectiveSessionError:
        if session.peer == 0:
            time.sleep(0.02)  # comes late
        error = caught(lambda: kind.call(session, session.size))
        good(session)
        return error

    text = same(peers.run(case), kind.error)
    # Peers of a node that finishes may be told before all others have come.
    for words in kind.says[:1] if "finish" in name else kind.says:
        assert words in text, text
    if issubclass(kind.error, UnsupportedDType | DTypeMismatch):
        assert issubclass(kind.error, TypeError)


def test_an_error_is_raised_by_wait_and_others_under_way_are_none_of_its_business(peers: Peers) -> None:
    def case(session: Session) -> CollectiveSessionError:
        handles = [session.all_reduce_async(values(0, (3 if turn != 1 or _odd(session) else 2,))) for turn in range(3)]
        for turn in (2, 0):
            result = handles[turn].wait()
            assert result is not None and torch.equal(result, session.size * values(0, (3,)))
        error = caught(handles[1].wait)
        assert str(caught(handles[1].wait)) == str(error) and handles[1].ready()
        good(session)
        return error

    same(peers.run(case), AllReduceShapeMismatch)


# Peers that do not come.


def test_a_peer_that_is_late_is_told_too_and_at_once(peers: Peers) -> None:
    last, meet = peers.total - 1, threading.Barrier(peers.total)

    def case(session: Session) -> CollectiveSessionError:
        good(session)
        patient = peers_of(session).config
        meet.wait(JOIN_S)
        peers_of(session).config = dataclasses.replace(patient, timeout_s=0.25)
        if session.peer == last:
            meet.wait(JOIN_S)
        handle = session.all_reduce_async(torch.ones(3, device="cpu"))
        if session.peer == last:
            assert handle.ready()
        error = caught(handle.wait)
        if session.peer != last:
            meet.wait(JOIN_S)
        peers_of(session).config = patient
        meet.wait(JOIN_S)
        good(session)
        return error

    text = same(peers.run(case), PeerLost)
    assert f"peer {last} did not arrive within 0.25 s" in text or f"{last - 1}, {last} did not arrive" in text
    assert issubclass(PeerLost, CollectiveError)


def test_who_goes_on_is_told_of_one_that_finishes_before_all_have_come() -> None:
    """Whatever the third peer will call, it cannot become one operation any more."""
    peers = Peers(3)
    sessions = peers.each(partial(peers.register, timeout_s=0.5))
    handle = sessions[0].all_reduce_async(torch.ones(1))
    text = same(run_threads([lambda: caught(sessions[1].finish), lambda: caught(handle.wait)]), PeerLost)
    assert "peer 1 called finish, while others called other operations: all_reduce on peer 0" in text, text
    assert str(caught(lambda: sessions[2].all_reduce(torch.ones(1)))) == text
    run_threads([partial(good, one) for one in sessions])


def test_handles_of_a_peer_that_never_comes_become_ready() -> None:
    peers = Peers(2)

    def case(session: Session) -> str:
        if session.peer == 1:
            time.sleep(0.5)
            return ""
        handle = session.all_reduce_async(torch.ones(1))
        assert not handle.ready()
        time.sleep(0.2)
        assert handle.ready()
        return str(caught(handle.wait))

    results = peers.run(case, timeout_s=0.15)
    # Peer 1 calls finish where peer 0 is in an operation already, and reads its verdict.
    assert "peer 1 did not arrive" in str(results[0])


def test_who_is_interrupted_while_it_decides_keeps_nobody_beyond_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = Peers(2)
    sessions = peers.each(partial(peers.register, timeout_s=0.2))
    handle = sessions[0].all_reduce_async(torch.ones(1))
    with monkeypatch.context() as patched:
        patched.setattr("fusedreduce.collective.peer_group.judge", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            sessions[1].all_reduce_async(torch.ones(1))
    [error] = run_threads([lambda: caught(handle.wait)])
    assert type(error) is PeerLost and "all peers arrived, but reached no verdict within 0.2 s" in str(error)
    run_threads([partial(good, one) for one in sessions])


def test_who_is_interrupted_between_verdict_and_collective_loses_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = Peers(1, 2)
    with monkeypatch.context() as patched:
        taken = StoreExchange.acknowledge

        def take(self: StoreExchange, number: int) -> None:
            taken(self, number)
            if threading.current_thread() is interrupted[0] and self._prefix.endswith("operation"):
                interrupted.clear()
                interrupted.append(None)
                raise KeyboardInterrupt

        interrupted: list[Any] = [None]
        patched.setattr(StoreExchange, "acknowledge", take)

        def case(session: Session) -> torch.Tensor | None:
            handle = session.all_reduce_async(torch.ones(1))
            if session.peer == 1:
                interrupted[0] = threading.current_thread()
                with pytest.raises(KeyboardInterrupt):
                    handle.wait()
            total = handle.wait()
            good(session)
            return total

        assert peers.run(case) == [torch.full((1,), 2.0)] * 2


def test_a_timeout_while_the_last_peer_judges_waits_for_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = Peers(2)
    sessions = peers.each(partial(peers.register, timeout_s=0.2))

    def slowly(function: Any, seconds: float) -> Any:
        def slow(*arguments: Any) -> Any:
            time.sleep(seconds)
            return function(*arguments)

        return slow

    with monkeypatch.context() as patched:
        for name, seconds in (("judge", 0.3), ("lost", 0.4)):
            whole = f"fusedreduce.collective.peer_group.{name}"
            patched.setattr(whole, slowly(getattr(peer_group, name), seconds))
        patched.setattr(Transport, "start", slowly(Transport.start, 0.6))
        totals = run_threads([lambda one=one: one.all_reduce(torch.ones(1)) for one in sessions])  # type: ignore[misc]
    assert totals == [torch.full((1,), 2.0)] * 2
    run_threads([partial(good, one) for one in sessions])


def test_an_operation_that_fails_after_the_session_has_finished_is_a_lost_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may still be in its wait()."""
    peers = Peers(1, 2)

    def case(number: int) -> tuple[Session, Any]:
        session = peers.register(number)
        operation = peers_of(session).add_call(Description(session.peer, "all_reduce", "sum", None), torch.ones(1))
        assert peers_of(session).try_start(operation, block=True)
        session.finish()
        peers_of(session).abort(failed(PeerLost, "too late"))
        return session, operation

    ended = peers.each(case)
    monkeypatch.setattr(Transport, "result", _gone)
    for session, operation in ended:
        error = caught(lambda s=session, o=operation: peers_of(s).result(o, s.peer))  # type: ignore[misc]
        assert type(error) is PeerLost and "the node is gone" in str(error)


def _gone(*_: object) -> None:
    raise RuntimeError("the node is gone")


def _interrupted(*_: object) -> Verdict:
    raise KeyboardInterrupt


def test_ready_and_wait_of_one_handle_in_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    with register(0) as session:
        handle = session.all_reduce_async(torch.ones(1))
        settle = peers_of(session).try_start

        def meanwhile(operation: Any, block: bool) -> bool:
            monkeypatch.setattr(peers_of(session), "try_start", settle)
            run_threads([handle.wait])
            return settle(operation, block)

        monkeypatch.setattr(peers_of(session), "try_start", meanwhile)
        assert handle.ready()


def test_a_thread_that_dies_before_it_registers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    group = LocalGroup(3)
    told: list[str] = []
    waiters: list[Any] = []
    known = REGISTRATION_WAITS.present

    def waits(registry: Any, attempt: Any, *call: Any) -> Any:
        waiters[:] = [attempt.changed._waiters]  # of threading.Condition
        return known(registry, attempt, *call)

    REGISTRATION_WAITS.replace(monkeypatch, waits)

    def case(communicator: Any) -> None:
        if communicator.rank == 1:
            assert settles(lambda: any(len(threads) == 2 for threads in waiters))
            raise ArithmeticError("before")
        config = CollectiveConfig(world_size=3, timeout_s=2 * PATIENT_S)
        told.append(str(caught(lambda: register(communicator.rank, "cpu", config, group))))

    with in_time(), pytest.raises(ArithmeticError):
        group.run(case)
    assert told == ["register: rank 1 gave up: ArithmeticError: before; peer 1 had not registered"] * 2

    def again(communicator: Any) -> None:
        with register(communicator.rank, "cpu", CollectiveConfig(world_size=3, timeout_s=TIMEOUT_S), group) as session:
            good(session)

    group.run(again)


def test_who_registers_with_a_closed_group_does_not_wait_for_others() -> None:
    group = LocalGroup(2)
    group.close()
    with in_time():
        error = caught(lambda: register(0, "cpu", CollectiveConfig(world_size=2, timeout_s=2 * PATIENT_S), group))
    assert type(error) is PeerLost and str(error) == "register: the LocalGroup is closed"


def test_communicators_of_the_peers_own_meet_whatever_is_registered_between() -> None:
    group = LocalGroup(2, timeout_s=5)

    def case(rank: int) -> None:
        own = group.communicator(0) if rank == 0 else None
        with register(rank, "cpu", CollectiveConfig(world_size=2, timeout_s=5), group) as session:
            own = own or group.communicator(1)
            own.all_reduce(torch.ones(1)).wait()
            good(session)

    assert run_threads([lambda: case(0), lambda: case(1)]) == [None, None]


# The end.


def test_finish_with_work_that_was_never_waited_for(peers: Peers) -> None:
    def case(session: Session) -> CollectiveSessionError:
        handle = session.all_reduce_async(torch.ones(1))
        if not _odd(session):
            handle.wait()
        error = caught(session.finish)
        handle.wait()
        good(session)
        return error

    text = same(peers.run(case), PendingOperations)
    assert "peer 1: operations 0 are in flight" in text


_ENDS = {
    "reset": (SessionReset, "peer 1 called reset(): the session is over, register again"),
    "reset of all": (SessionReset, "collective.reset() was called: the session is over, register again"),
    "close": (PeerLost, "the session is over: the LocalGroup is closed"),
    "abort": (PeerLost, "the session is over: rank 1 gave up: RuntimeError: stop"),
}


@pytest.mark.parametrize(("end", "nodes"), [*((end, 1) for end in _ENDS), ("reset", 2)])
@pytest.mark.parametrize("other", ["does not come", "has come"])
def test_a_peer_is_told_the_same_whenever_another_ends_the_session(
    monkeypatch: pytest.MonkeyPatch, end: str, nodes: int, other: str
) -> None:
    """Waiting, deciding, between two calls: the class does not depend on where it was."""
    waiting = announce_waits(monkeypatch, (StoreExchange, "wait_for_verdict"), (NodePending, "wait"))
    kind, text = _ENDS[end]

    def calls(session: Session) -> None:
        try:
            with at_line(moment, ["fusedreduce/collective/"], ends.begin) as found:
                try:
                    results.append(session.all_reduce(torch.ones(1)))
                    results.append(session.reduce(torch.ones(1)))
                    results.append(session.broadcast(None))
                    session.finish()
                finally:
                    where.extend(found)
        finally:
            waiting.set()

    for moment in itertools.count(step=5) if nodes > 1 else moments([*_ENDS].index(end), 3):  # nodes connect anew
        peers, where, results = Peers(2 // nodes, nodes), list[str](), list[torch.Tensor | None]()
        first, second = peers.each(peers.register)
        locks = [lock_of(peers_of(first)), *(one.lock for one in peers.groups if one is not None)]
        ends = Beside(_ending(end, second, peers.groups[0]), locks)
        if other == "has come":
            second.all_reduce_async(torch.ones(1))
            second.reduce_async(torch.ones(1))
            second.broadcast_async(torch.ones(1))
        waiting.clear()
        with ThreadPoolExecutor(1) as pool:
            mine = pool.submit(calls, first)
            assert waiting.wait(TIMEOUT_S)
            ends.end()
            error = mine.exception(TIMEOUT_S)
        for found in (error, caught(lambda: first.all_reduce(torch.ones(1))), caught(second.finish)):  # noqa: B023
            assert type(found) is kind and str(found) == text, (moment, where, found)
        assert [one.item() for one in results if one is not None] == [2.0, 2.0, 1.0][: len(results)]
        if not where:
            break
    assert moment > 20


@pytest.mark.parametrize("end", ["close", "abort"])
def test_peers_that_register_are_told_the_same_whenever_their_group_ends(
    monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """All of them, or none: then their first operation is told."""
    waiting = announce_waits(monkeypatch)

    def registers(peer: int) -> None:
        try:
            with at_line(moment, ["fusedreduce/collective/"] if peer == 0 else [], ends.begin) as found:
                try:
                    sessions.append(peers.register(peer))
                finally:
                    where.extend(found)
        finally:
            waiting.set()

    for moment in moments(["close", "abort"].index(end), 2):
        peers, where, sessions = Peers(2), list[str](), list[Session]()
        group: Any = peers.groups[0]
        made = group.communicators()[1]
        locks = [group.lock, lock_of(registry_of(group))]
        ends = Beside(group.close if end == "close" else partial(made.abort, RuntimeError("stop")), locks)
        waiting.clear()
        with ThreadPoolExecutor(2) as pool:
            futures = [pool.submit(registers, 1)]
            assert waiting.wait(TIMEOUT_S)
            futures.append(pool.submit(registers, 0))
            errors = [one.exception(JOIN_S) for one in futures]
        if where:
            ends.end()
        else:
            assert errors == [None, None]
            break
        if sessions:  # made before the end, or beside it
            errors += [caught(lambda: one.all_reduce(torch.ones(1))) for one in sessions]  # noqa: B023
        said = "the LocalGroup is closed" if end == "close" else "rank 1 gave up: RuntimeError: stop"
        assert len(sessions) in (0, 2) and len(errors) == 2 + len(sessions)
        assert all(type(one) is PeerLost and said in str(one) for one in errors[-2:]), (moment, where, errors)
    assert moment > 20


def _ending(end: str, session: Session, group: Any) -> Callable[[], None]:
    """What ends the session, for peer 1's session and its LocalGroup."""
    if end == "abort":
        return partial(group.communicators()[1].abort, RuntimeError("stop"))
    return {"reset": session.reset, "reset of all": reset}.get(end) or group.close


def test_all_may_reset_at_once(peers: Peers) -> None:
    def case(session: Session) -> None:
        with contextlib.suppress(SessionReset):  # another was quicker
            session.all_reduce_async(torch.ones(1))
        session.reset()
        session.reset()

    def peer(number: int) -> None:
        case(peers.register(number))

    assert peers.each(peer) == [None] * peers.total
    assert peers.run(lambda s: good(s)) == [None] * peers.total


def test_a_reset_of_the_module_ends_all_sessions_and_the_next_ones_are_new(peers: Peers) -> None:
    other = Peers(2)

    def peer(number: int) -> str:
        session = peers.register(number)
        good(session)
        meet.wait(JOIN_S)
        error = caught(lambda: session.all_reduce(torch.ones(1)) if number else session.broadcast(torch.ones(1)))
        assert type(error) is SessionReset
        assert type(caught(lambda: session.reduce(torch.ones(1)))) is SessionReset
        return str(error)

    def of_the_other(number: int) -> str:
        session = other.register(number)
        meet.wait(JOIN_S)
        error = caught(lambda: session.all_reduce(torch.ones(1)))
        assert type(error) is SessionReset
        return str(error)

    def late(session: Session) -> str:
        meet.wait(JOIN_S)
        assert was_reset.wait(JOIN_S)
        return str(caught(lambda: session.all_reduce(torch.ones(1))))

    def late_here() -> str:
        session = peers.register(0)
        good(session)
        return late(session)

    def resets() -> str:
        meet.wait(JOIN_S)
        reset()
        was_reset.set()
        return ""

    meet, was_reset = threading.Barrier(peers.total + 3), threading.Event()
    for _ in range(2):
        was_reset.clear()
        waiting: list[Callable[[], str]] = [lambda number=number: peer(number) for number in range(1, peers.total)]  # type: ignore[misc]
        results = run_threads([*waiting, late_here, lambda: of_the_other(0), lambda: late(other.register(1)), resets])
        assert {*results} == {"collective.reset() was called: the session is over, register again", ""}, results
        assert results.count("") == 1
    reset()
    assert peers.run(lambda session: good(session)) == [None] * peers.total
    assert other.run(lambda session: good(session)) == [None] * 2


def test_a_reset_of_the_module_ends_registrations(peers: Peers) -> None:
    """Whoever waits for peers, here or on other nodes, is told at once; those that come later begin anew."""

    def early(number: int) -> str:
        error = caught(lambda: peers.register(number))
        assert type(error) is SessionReset
        return str(error)

    waiting: list[Callable[[], str]] = [lambda number=number: early(number) for number in range(peers.total - 1)]  # type: ignore[misc]
    last_node = range(peers.total - peers.local, peers.total)

    def they_wait() -> bool:
        return registering() == (peers.total - 1, peers.nodes - 1)

    def resets() -> str:
        assert settles(they_wait, JOIN_S)
        reset()
        return ""

    for _ in range(2):
        results = run_threads([*waiting, resets])
        assert {*results[:-1]} == {"collective.reset() was called: the session is over, register again"}, results
        if peers.nodes > 1:  # the last node has not come to what the others were told, and is told the same
            results = run_threads([lambda number=number: early(number) for number in last_node])  # type: ignore[misc]
            assert {*results} == {"collective.reset() was called: the session is over, register again"}, results
    reset()
    assert peers.run(lambda session: good(session)) == [None] * peers.total


def test_a_registration_that_is_given_up_while_it_succeeds_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    known = REGISTRATION_IS_DECIDED.present

    def decide(*arguments: Any) -> Any:
        decided = known(*arguments)
        reset()
        made.append(decided[1])
        return decided

    made: list[Any] = []
    peers = Peers(2)
    REGISTRATION_IS_DECIDED.replace(monkeypatch, decide)
    results = run_threads([lambda n=n: caught(lambda: peers.register(n)) for n in range(2)])  # type: ignore[misc]
    assert same(results, SessionReset) and not made[0].is_open
    monkeypatch.undo()
    assert peers.run(lambda session: good(session)) == [None] * 2


def test_leaving_by_an_exception_tells_the_others(peers: Peers) -> None:
    def peer(number: int) -> str:
        with peers.register(number) as session:
            if number == 0:
                raise KeyError("mine")
            return str(caught(lambda: session.all_reduce(torch.ones(1))))

    results = peers.each(peer)
    assert isinstance(results[0], KeyError)
    # What was raised inside `with` was caught there, and then finish() finds the session gone.
    assert all(isinstance(one, SessionReset) and "peer 0 called reset()" in str(one) for one in results[1:])


# Registering.


def test_options_that_differ_are_named_on_every_peer(peers: Peers) -> None:
    def peer(number: int) -> CollectiveSessionError:
        options = {"timeout_s": 7.5, "strategy": Ring()} if number == 1 else {"timeout_s": 8.0}
        error = caught(lambda: peers.register(number, **options))
        with peers.register(number) as session:
            good(session)
        return error

    text = same(peers.each(peer), RegisterParamsMismatch)
    others = ", ".join(str(n) for n in range(peers.total) if n != 1)
    assert f"timeout_s: 8.0 on peers {others}; 7.5 on peer 1" in text
    assert f'strategy: "Tree(arity=2)" on peers {others}; "Ring()" on peer 1' in text and "world_size" not in text


@pytest.mark.parametrize("option", ["global_rank", "global_world_size", "global_group"])
def test_local_peers_that_disagree_in_where_their_node_stands(option: str) -> None:
    """Found before anything is reached out to: nobody listens there."""
    group, address = LocalGroup(2), f"here:{free_port()}"
    world: Any = torch.distributed.ProcessGroup(torch.distributed.HashStore(), 0, 1)  # type: ignore[attr-defined]

    def peer(number: int) -> CollectiveSessionError:
        place: dict[str, Any] = {"global_address": address, "global_rank": 0, "global_world_size": 2}
        place[option] = place.get(option, 0) + number
        if option == "global_group":
            place = {"global_group": world} if number else {}
        config = CollectiveConfig(world_size=2, timeout_s=2 * PATIENT_S, **place)
        claimed = number + 2 * (config.global_rank or 0)
        return caught(lambda: register(claimed, "cpu", config, group))

    with in_time():
        text = same(run_threads([lambda: peer(0), lambda: peer(1)]), RegisterParamsMismatch)
    assert f"{option}: " in text and " on peer 0; " in text


def test_an_option_that_reads_like_two_values_is_one() -> None:
    held = [Description(peer, "register", settings=(("global_address", "a; b:1"),)) for peer in range(2)]
    assert judge(held, "register").error is None


def test_a_peer_that_registers_late_is_told_too(peers: Peers) -> None:
    given_up, barrier = threading.Barrier(peers.total), threading.Barrier(peers.total)

    def peer(number: int) -> CollectiveSessionError:
        if number == 0:
            given_up.wait(30)
        error = caught(lambda: peers.register(number, timeout_s=0.2))
        if number:
            given_up.wait(30)
        barrier.wait(5)
        with peers.register(number) as session:
            good(session)
        return error

    errors = peers.each(peer)
    if peers.nodes == 1:
        assert "peer 0 did not arrive within 0.2 s" in same(errors, PeerLost)
    else:  # node 0 is the host
        assert all(type(error) is PeerLost for error in errors), errors


def test_a_config_that_does_not_fit_the_group_fails_for_all() -> None:
    peers = Peers(2)

    def peer(number: int) -> CollectiveSessionError:
        error = caught(lambda: peers.register(number, world_size=3 if number else 2))
        good_session = peers.register(number)
        good(good_session)
        good_session.finish()
        return error

    errors = peers.each(peer)
    assert "peer 1: world_size is 3, but the group has 2 peers" in same(errors, InvalidConfig)


def test_two_callers_that_claim_one_peer(peers: Peers) -> None:
    if peers.local == 1:
        pytest.skip("a node of one peer has no second caller")

    def peer(number: int) -> CollectiveSessionError:
        claimed = 0 if number == 1 else number
        error = caught(lambda: peers.register(claimed))
        with peers.register(number) as session:
            good(session)
        return error

    errors = peers.each(peer)
    assert "several registered as peer 0" in same(errors, MultipleRegister)


def test_a_nested_register_concerns_its_caller_only(peers: Peers) -> None:
    def case(session: Session) -> CollectiveSessionError:
        error = caught(lambda: peers.register(session.peer))
        good(session)
        return error

    for number, error in enumerate(peers.run(case)):
        assert type(error) is MultipleRegister and f"peer {number} is registered already" in str(error)


def test_a_peer_that_registers_again_while_its_node_waits_for_others() -> None:
    peers = Peers(1, 2)
    found: list[Any] = []
    first = threading.Thread(target=lambda: found.append(peers.register(0)))
    first.start()

    def decides() -> bool:
        return is_decided(peers.address, 0)

    assert settles(decides)
    error = caught(lambda: peers.register(0))
    assert type(error) is MultipleRegister and "peer 0 is registered already" in str(error)
    other = peers.register(1)
    first.join(TIMEOUT_S)
    run_threads([partial(good, one) for one in (*found, other)])


@pytest.mark.parametrize("moment", [REGISTRATION_WAITS, REGISTRATION_IS_DECIDED], ids=["waits", "is decided"])
def test_who_is_interrupted_while_it_registers_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch, moment: Part
) -> None:
    peers = Peers(2)
    errors: list[BaseException] = []
    known = moment.present

    def interrupted(*arguments: Any) -> Any:
        result = known(*arguments) if moment is REGISTRATION_WAITS else None
        if moment is REGISTRATION_IS_DECIDED or result:
            raise KeyboardInterrupt
        return result

    def peer(number: int) -> Any:
        try:
            return peers.register(number, timeout_s=2 * PATIENT_S)
        except KeyboardInterrupt as error:
            errors.append(error)
            return None

    with monkeypatch.context() as patched, in_time():
        moment.replace(patched, interrupted)
        found = peers.each(peer)
    [error] = [one for one in found if one is not None]
    assert type(error) is PeerLost and "a peer gave up (KeyboardInterrupt" in str(error)
    assert len(errors) == 1
    assert peers.run(good) == [None, None]


def test_who_is_interrupted_while_it_waits_may_register_again(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = Peers(2)
    with monkeypatch.context() as patched:
        REGISTRATION_WAITS.replace(patched, _interrupted)
        with pytest.raises(KeyboardInterrupt):
            peers.register(0)
    assert peers.run(good) == [None, None]


@pytest.mark.parametrize("peer", [-1, 2, True, "0", 1.0])
def test_a_peer_too_many_is_refused_and_the_others_are_not_disturbed(peer: Any) -> None:
    peers = Peers(2)

    def case(session: Session) -> None:
        if session.peer == 0:
            error = caught(lambda: peers.groups[0] and register(peer, "cpu", peers.config(0), peers.groups[0]))
            assert type(error) is InvalidConfig and "its peers are 0 to 1" in str(error)
        good(session)

    assert peers.run(case) == [None, None]


def test_what_cannot_be_registered_with() -> None:
    with pytest.raises(InvalidConfig, match="there is no group"):
        register(0, "cpu", CollectiveConfig(world_size=2))
    with pytest.raises(InvalidConfig, match="must be a LocalGroup"):
        register(0, "cpu", CollectiveConfig(), group=3)
    with pytest.raises(InvalidConfig, match="must be a CollectiveConfig"):
        register(0, "cpu", {"world_size": 1})  # type: ignore[arg-type]
    with pytest.raises(InvalidConfig, match="on cpu or cuda"):
        register(0, "meta")


def test_an_address_where_somebody_else_listens() -> None:
    import socket

    with socket.socket() as held:
        held.bind(("0.0.0.0", 0))
        held.listen()
        port = held.getsockname()[1]
        config = CollectiveConfig(timeout_s=2, global_address=f"127.0.0.1:{port}", global_rank=0, global_world_size=2)
        with pytest.raises(InvalidConfig, match="node 0 cannot listen at global_address"):
            register(0, "cpu", config)


def test_an_address_where_nobody_listens() -> None:
    config = CollectiveConfig(
        timeout_s=0.3, global_address=f"127.0.0.1:{free_port()}", global_rank=1, global_world_size=2
    )
    with in_time(), pytest.raises(PeerLost, match="node 1 cannot reach node 0 at global_address .*: nobody answers"):
        register(1, "cpu", config)


# All together.

_GOOD = ("all_reduce", "reduce", "broadcast", "max", "async")
_plans = st.lists(st.one_of(st.sampled_from(_GOOD), st.sampled_from(sorted(KINDS))), min_size=1, max_size=8)


@sweep.sweep(120)
@given(_plans, st.integers(0, 2**31), st.sampled_from([*[(3, 1)] * 5, (1, 3), (2, 2)]))
def test_any_sequence_of_operations_and_disagreements(plan: list[str], seed: int, place: tuple[int, int]) -> None:
    """On threads that sleep at random: every peer gets the right results, and where planted the same error."""
    peers = Peers(*place)
    n = peers.total

    def case(session: Session) -> list[Any]:
        sleeps = random.Random(seed + session.peer)
        outcomes: list[Any] = []
        handles = []
        mine = torch.full((2,), session.peer + 1)
        for turn, name in enumerate(plan):
            if sleeps.random() < 0.5:
                time.sleep(sleeps.random() * 0.002)
            if name in KINDS:
                error = caught(lambda name=name: KINDS[name].call(session, n))  # type: ignore[misc]
                outcomes.append((type(error), "" if "finish" in name else str(error)))
            elif name == "all_reduce":
                outcomes.append(session.all_reduce(mine).tolist())
            elif name == "max":
                outcomes.append(session.all_reduce(mine, "max").tolist())
            elif name == "reduce":
                result = session.reduce(mine, "sum", turn % n)
                assert (result is not None) == (session.peer == turn % n)
                assert result is None or result[0].item() == n * (n + 1) // 2
            elif name == "broadcast":
                outcomes.append(session.broadcast(mine if session.peer == turn % n else None).tolist())
            else:
                handles.append((turn, session.all_reduce_async(mine * (turn + 1))))
                if "finish among operations" in plan:
                    handles[-1][1].wait()
        sleeps.shuffle(handles)
        for turn, handle in handles:
            result = handle.wait()
            assert result is not None and result[0].item() == (turn + 1) * n * (n + 1) // 2
        return outcomes

    results = peers.run(case)
    assert all(one == results[0] for one in results), results
    assert isinstance(results[0], list), results
    planted = [KINDS[name].error for name in plan if name in KINDS]
    assert [one[0] for one in results[0] if isinstance(one, tuple)] == planted
