"""LocalGroup: peers that are threads of this process, or several that one thread drives."""

from __future__ import annotations

import gc
import itertools
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support import local_cases, sweep
from support.every_moment import TIMEOUT_S, Beside, announce_waits, at_line, moments
from support.inside import channels_of, incomplete
from support.timeouts import PATIENT_S, in_time

from fusedreduce.comm.local import operations, sequence
from fusedreduce.comm.local.group import LocalCommunicator, LocalGroup
from fusedreduce.comm.local.rendezvous import LocalPending, Rendezvous
from fusedreduce.comm.local.strategies import Centralized, Ring, Strategy, Tree
from fusedreduce.comm.protocol import Communicator, ReduceOp
from fusedreduce.errors import CollectiveError, UnsupportedWireError

CPU = torch.device("cpu")
STRATEGIES: tuple[Strategy, ...] = (Centralized(), Tree(2), Tree(3), Ring())
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def drawn(rank: int, numel: int = 1003) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def errors_of(group: LocalGroup, case: Callable[[LocalCommunicator], Any]) -> list[str]:
    """What each rank raised; each must raise a CollectiveError."""

    def caught(communicator: LocalCommunicator) -> str:
        with pytest.raises(CollectiveError) as found:
            case(communicator)
        return str(found.value)

    return group.run(caught)


# What comes out


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_sums_are_rounded_once_and_the_same_on_all(strategy: Strategy, size: int) -> None:
    def case(communicator: LocalCommunicator) -> list[torch.Tensor]:
        tensors = [drawn(communicator.rank).to(dtype) for dtype in DTYPES]
        started = [communicator.all_reduce(one) for one in tensors]
        for one in started:
            one.wait()
        return tensors

    results = LocalGroup(size, strategy=strategy, timeout_s=10).run(case)
    for index, dtype in enumerate(DTYPES):
        exact = torch.stack([drawn(rank).to(dtype).double() for rank in range(size)]).sum(0)
        for one in results:
            assert torch.equal(one[index].view(torch.uint8), results[0][index].view(torch.uint8))
        # Additions in fp32 (fp64), then half a unit of what it is rounded to.
        peak = exact.abs().max().item() * (size + 1)
        compute = torch.finfo(torch.float64 if dtype is torch.float64 else torch.float32).eps
        bound = exact.abs() * torch.finfo(dtype).eps / 2 + peak * compute
        assert (results[0][index].double() - exact).abs().le(bound).all()


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("size", [1, 3, 6])
def test_each_rank_gets_its_part_of_an_all_reduce(size: int, strategy: Strategy) -> None:
    group = LocalGroup(size, strategy=strategy, timeout_s=10, one_thread=True)
    ranks = [group.communicator(rank) for rank in range(size)]
    for dtype, numel, op in itertools.product((*DTYPES, torch.int32), (0, 1, 7), local_cases.OPS):
        has_the_parts_of_an_all_reduce(ranks, numel, dtype, op)


def has_the_parts_of_an_all_reduce(
    ranks: list[LocalCommunicator], numel: int, dtype: torch.dtype, op: ReduceOp
) -> None:
    size = len(ranks)
    mine = [(drawn(rank, size * numel) * 8).to(dtype) for rank in range(size)]
    whole = [one.clone() for one in mine]
    for pending in [rank.all_reduce(one, op) for rank, one in zip(ranks, whole, strict=True)]:
        pending.wait()
    given = [one.clone() for one in mine]
    started = [rank.reduce_scatter(one, op) for rank, one in zip(ranks, given, strict=True)]
    for number, (pending, part) in enumerate(started):
        pending.wait()
        at = slice(number * numel, (number + 1) * numel)
        assert part.data_ptr() == given[number][at].data_ptr() and part.shape == (numel,)
        assert torch.equal(part.view(torch.uint8), whole[0][at].view(torch.uint8))
        mine[number][at] = part
        assert torch.equal(mine[number].view(torch.uint8), given[number].view(torch.uint8)), "written outside"


def test_transfers_meet_in_order_beside_everything_else() -> None:
    """One thread drives three ranks: sends and receives in any order, with collectives between them."""
    group = LocalGroup(3, one_thread=True)
    ranks = [group.communicator(rank) for rank in range(3)]
    got = [torch.zeros(2, dtype=torch.int64) for _ in range(4)]
    first = ranks[2].recv(got[0], 0)
    sums = [ranks[rank].all_reduce(torch.ones(1)) for rank in (0, 1)]
    sent = [ranks[0].send(torch.tensor([number, peer]), peer) for number in (1, 2) for peer in (1, 2)]
    assert first.ready() and sent[1].ready() and not sent[0].ready() and not sums[0].ready()
    rest = [ranks[2].recv(got[1], 0), ranks[1].recv(got[2], 0), ranks[1].recv(got[3], 0)]
    sums.append(ranks[2].all_reduce(torch.ones(1)))
    for pending in (*sent, first, *rest, *sums):
        pending.wait()
    assert [one.tolist() for one in got] == [[1, 2], [2, 2], [1, 1], [2, 1]]
    assert first.future().value()[0] is got[0] and not incomplete(ranks[0])
    local_cases.peers_that_cannot_be(ranks[1])
    lonely = ranks[0].recv(torch.ones(1), 1)
    with pytest.raises(CollectiveError, match="rank 1 cannot arrive: the thread that waits drives them too"):
        lonely.wait()


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.ones(4), ("transfer float32[3] on cpu from rank 0", "transfer float32[4] on cpu from rank 2")),
        (torch.ones(3, dtype=torch.int32), ("float32[3] on cpu from rank 0", "int32[3] on cpu from rank 2")),
        (torch.ones(6)[::2], ("rank 2: a tensor of strides (2,) is not contiguous",)),
    ],
)
def test_both_ends_of_a_transfer_raise_who_brought_what(tensor: torch.Tensor, words: tuple[str, ...]) -> None:
    had = tensor.clone()

    def case(communicator: LocalCommunicator) -> str:
        said = ""
        if communicator.rank != 1:
            ends = communicator.send(torch.zeros(3), 2) if communicator.rank == 0 else communicator.recv(tensor, 0)
            with pytest.raises(CollectiveError) as found:
                ends.wait()
            said = str(found.value)
        one = torch.ones(1)
        communicator.all_reduce(one).wait()
        assert one.item() == 3.0, "the channel goes on"
        return said

    first, none, last = LocalGroup(3, timeout_s=10).run(case)
    assert first == last and none == "" and torch.equal(tensor, had)
    assert "transfer 0 from rank 0 to rank 2 of channel together 0 among 3 local ranks" in first
    assert all(one in first for one in words)


def test_a_transfer_that_nobody_answers_ends() -> None:
    group = LocalGroup(3, timeout_s=0.05)
    ranks = [group.communicator(rank) for rank in range(3)]
    pending = ranks[0].send(torch.ones(2), 1)
    with pytest.raises(
        CollectiveError, match=r"transfer 0 .* rank 1 did not issue it within 0\.05 s .*float32\[2\]"
    ) as told:
        pending.wait()
    late = torch.zeros(2)
    with pytest.raises(CollectiveError) as found:
        ranks[1].recv(late, 0).wait()
    assert str(found.value) == str(told.value) and not late.any()
    pending = ranks[2].recv(late, 1)
    ranks[0].abort(KeyError("stop"))
    for attempt in (pending.wait, lambda: ranks[1].send(late, 2)):
        with pytest.raises(CollectiveError, match="rank 0 gave up: KeyError: 'stop'"):
            attempt()


def test_of_sparse_16_bit_tensors_the_sum_is_rounded_once() -> None:
    def case(communicator: LocalCommunicator) -> float:
        value = 256.0 if communicator.rank == 0 else 1.0
        one = torch.sparse_coo_tensor(
            torch.tensor([[0]]), torch.tensor([value], dtype=torch.bfloat16), (1,), check_invariants=True
        )
        return float(communicator.all_reduce_sparse(one).future().wait()[0].to_dense())

    assert LocalGroup(3, timeout_s=10).run(case) == [258.0] * 3


def test_every_rank_has_a_sparse_sum_of_its_own() -> None:
    group = LocalGroup(3, timeout_s=10)
    ranks = [group.communicator(rank) for rank in range(3)]
    index = torch.tensor([[1]])
    pendings = [
        one.all_reduce_sparse(torch.sparse_coo_tensor(index, torch.ones(1), (2,), check_invariants=True))
        for one in ranks
    ]
    sums = [one.future().wait()[0] for one in pendings]
    assert all(one.is_coalesced() for one in sums)
    sums[0].mul_(2.0)  # a gradient that is clipped, say
    assert [one.to_dense().tolist() for one in sums] == [[0.0, 6.0], [0.0, 3.0], [0.0, 3.0]]


def test_tensors_of_inference_mode_and_those_that_require_a_gradient() -> None:
    def case(communicator: LocalCommunicator) -> list[float]:
        with torch.inference_mode():
            one = torch.ones(2)
        other = torch.ones(2)
        communicator.all_reduce(one if communicator.rank else other).wait()
        parameter = torch.full((1,), float(communicator.rank), requires_grad=True)
        communicator.broadcast(parameter, 1)
        assert parameter.grad_fn is None
        return [float((one if communicator.rank else other)[0]), float(parameter.detach())]

    assert LocalGroup(2, timeout_s=10).run(case) == [[2.0, 1.0]] * 2


def test_what_can_be_summed_is_said_before() -> None:
    communicator = LocalGroup(1).communicator(0)
    for dtype in DTYPES:
        communicator.check_wire(dtype, CPU)
    for dtype, device in ((torch.float8_e4m3fn, CPU), (torch.int32, CPU), (torch.float32, torch.device("meta"))):
        with pytest.raises(UnsupportedWireError, match="LocalGroup cannot all-reduce"):
            communicator.check_wire(dtype, device)


# Arriving, waiting, being told


def test_arriving_never_blocks_and_nobody_need_wait() -> None:
    group = LocalGroup(3, timeout_s=10)
    ranks = [group.communicator(rank) for rank in range(3)]
    tensors = [torch.full((2,), float(rank)) for rank in range(3)]
    told: list[int] = []
    pendings = []
    for rank in range(3):
        pendings.append(ranks[rank].all_reduce(tensors[rank]))
        pendings[-1].notify(lambda rank=rank: told.append(rank))  # type: ignore[misc]
        assert pendings[0].ready() == (rank == 2)
        future = pendings[0].future()
        assert future.done() == (rank == 2)
    assert sorted(told) == [0, 1, 2] and future.value()[0] is tensors[0]
    assert [one.tolist() for one in tensors] == [[3.0, 3.0]] * 3
    for one in pendings:
        one.wait()
        one.wait()


def test_a_callback_that_raises_takes_nothing_from_the_others(caplog: pytest.LogCaptureFixture) -> None:
    group = LocalGroup(2, timeout_s=10)
    first, second = group.communicator(0), group.communicator(1)
    told: list[str] = []
    pending = first.all_reduce(torch.ones(1))
    pending.notify(lambda: told.append("before"))
    pending.notify(lambda: 1 // 0)  # type: ignore[arg-type]
    pending.notify(lambda: told.append("after"))
    second.all_reduce(torch.ones(1)).wait()
    assert told == ["before", "after"] and "a callback at the end of collective 0" in caplog.text


def test_a_callback_may_issue_the_next_collective() -> None:
    """So no lock is held while callbacks run, nor while a collective is performed."""
    group = LocalGroup(2, timeout_s=10)
    first, second = group.communicator(0), group.communicator(1)
    held: list[LocalPending] = []
    one, other = torch.ones(1), torch.ones(1)
    first.all_reduce(torch.ones(1)).notify(lambda: held.append(first.all_reduce(one)))
    second.all_reduce(torch.ones(1)).wait()
    second.all_reduce(other).wait()
    held[0].wait()
    assert one.item() == other.item() == 2.0


def test_the_group_can_be_used_while_a_sum_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    group = LocalGroup(2, timeout_s=10)
    seen: list[bool] = []
    known = operations.perform

    def take() -> None:
        seen.append(group.lock.acquire(timeout=5))
        group.lock.release()

    def perform(*arguments: Any) -> Any:
        free = threading.Thread(target=take)
        free.start()
        free.join()
        return known(*arguments)

    monkeypatch.setattr(sequence, "perform", perform)
    group.run(lambda communicator: communicator.all_reduce(torch.ones(1)).wait())
    assert seen == [True]


def test_what_takes_longer_than_the_timeout_is_waited_for_once_all_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one writes into every peer's tensor: nobody may use it before."""
    known, both_have_come = operations.perform, threading.Event()
    pending: list[Any] = []

    def slowly(*arguments: Any) -> Any:
        both_have_come.set()
        time.sleep(0.4)
        return known(*arguments)

    def waited() -> float:
        assert both_have_come.wait(PATIENT_S)
        pending[0].wait()
        return ones[0].item()

    monkeypatch.setattr(sequence, "perform", slowly)
    group, ones = LocalGroup(2, timeout_s=0.2), torch.ones(2, 1, device="cpu")
    first, second = group.communicator(0), group.communicator(1)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(waited)
        pending.append(first.all_reduce(ones[0]))
        second.all_reduce(ones[1]).wait()
        assert found.result() == ones[1].item() == 2.0


def test_an_error_of_the_work_itself_is_every_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> Any:
        raise MemoryError("no memory left")

    group = LocalGroup(3, timeout_s=10)
    with monkeypatch.context() as patch:
        patch.setattr(sequence, "perform", failing)
        errors = errors_of(group, lambda communicator: communicator.all_reduce(torch.ones(1)).wait())
    assert len(set(errors)) == 1 and "MemoryError: no memory left" in errors[0]
    group.run(lambda communicator: communicator.all_reduce(torch.ones(1)).wait())


def test_channels_are_independent() -> None:
    group = LocalGroup(2, timeout_s=10)
    first, second = group.communicator(0), group.communicator(1)
    apart = first.apart(), second.apart()
    waiting = first.all_reduce(torch.ones(1))
    mine, theirs = torch.ones(1), torch.ones(1)
    pending = apart[0].all_reduce(mine)
    apart[1].all_reduce(theirs).wait()
    pending.wait()
    assert mine.item() == 2.0 and not waiting.ready()
    second.all_reduce(torch.ones(1)).wait()
    assert waiting.ready()


# Peers that disagree, come late, or not at all


@pytest.mark.parametrize(
    ("issue", "words"),
    [
        (
            lambda c: c.all_reduce(torch.ones(3)) if c.rank else c.reduce(torch.ones(3), 0),
            (
                "reduce op sum, root 0, float32[3] on cpu from rank 0",
                "all_reduce op sum, float32[3] on cpu from ranks 1",
            ),
        ),
        (lambda c: c.all_reduce(torch.ones(3), "max" if c.rank else "sum"), ("op sum", "op max")),
        (lambda c: c.all_reduce(torch.ones(3 + c.rank // 2)), ("float32[3] on cpu from ranks 0, 1", "float32[4]")),
        (
            lambda c: c.all_reduce(torch.ones(3, dtype=torch.float64 if c.rank == 1 else torch.float32)),
            ("float32[3] on cpu from ranks 0, 2", "float64[3] on cpu from rank 1"),
        ),
        (lambda c: c.reduce(torch.ones(3), c.rank), ("root 0", "root 1", "root 2")),
        (lambda c: c.all_gather(torch.ones(3 + c.rank))[0], ("all_gather float32[3]", "float32[5]")),
        (lambda c: c.all_reduce(torch.ones(6)[:: 1 + (c.rank == 1)]), ("rank 1: a tensor of strides (2,)",)),
        (lambda c: c.reduce(torch.ones(1), 3), ("rank 0: there is no rank 3", "rank 2: there is no rank 3")),
        (lambda c: c.reduce(torch.ones(1), "max"), ("rank 2: there is no rank 'max'",)),
        (lambda c: c.all_to_all(torch.ones(4), torch.ones(4)), ("4 elements cannot be divided among 3 ranks",)),
        (lambda c: c.reduce_scatter(torch.ones(4))[0], ("4 elements cannot be divided among 3 ranks",)),
        (lambda c: c.reduce_scatter(torch.ones(3), "max" if c.rank else "sum")[0], ("reduce_scatter op sum", "op max")),
        (lambda c: c.reduce_scatter(torch.ones(6)[::2])[0], ("a tensor of strides (2,) is not contiguous",)),
        (lambda c: c.all_to_all(torch.ones(3), torch.ones(6)), ("output and input of an all_to_all differ",)),
        (lambda c: c.all_reduce_sparse(torch.ones(3)), ("is not sparse COO",)),
    ],
)
def test_peers_that_disagree_all_raise_who_brought_what(
    issue: Callable[[LocalCommunicator], LocalPending], words: tuple[str, ...]
) -> None:
    group = LocalGroup(3, timeout_s=10)

    def case(communicator: LocalCommunicator) -> str:
        communicator.all_reduce(torch.ones(1)).wait()
        with pytest.raises(CollectiveError) as found:
            issue(communicator).wait()
        after = torch.ones(1)
        communicator.all_reduce(after).wait()
        assert after.item() == 3.0, "the channel goes on"
        return str(found.value)

    first, *others = group.run(case)
    assert others == [first, first] and "collective 1 of channel together 0 among 3 local ranks" in first
    for one in words:
        assert one in first


def test_memory_that_two_ranks_share_is_refused_but_for_a_broadcast() -> None:
    shared = torch.arange(6.0)

    def overlapping(communicator: LocalCommunicator) -> None:
        communicator.all_reduce(shared[communicator.rank :][:5]).wait()

    group = LocalGroup(2, timeout_s=10)
    errors = errors_of(group, overlapping)
    assert errors[0] == errors[1] and "overlapping memory was given by ranks 0, 1" in errors[0]
    assert shared.tolist() == list(range(6)), "nothing was done"
    group.run(lambda communicator: communicator.broadcast(shared, 1))


def test_who_did_not_come_is_named_and_who_comes_late_reads_the_same_at_once() -> None:
    group = LocalGroup(3, timeout_s=0.1)
    ranks = [group.communicator(rank) for rank in range(3)]
    first, second = (ranks[rank].all_reduce(torch.ones(2)) for rank in (0, 2))
    began = time.monotonic()
    with (
        in_time(),
        pytest.raises(CollectiveError, match=r"rank 1 did not issue it within 0\.1 s .*float32\[2\].* ranks 0, 2"),
    ):
        first.wait()
    assert time.monotonic() - began > 0.05
    told: list[int] = []
    second.notify(lambda: told.append(2))
    mine = torch.ones(2)
    late = ranks[1].all_reduce(mine)
    assert late.ready() and told == [2]
    texts = set()
    for one in (first, second, late):
        with pytest.raises(CollectiveError) as found:
            one.wait()
        texts.add(str(found.value))
        with pytest.raises(RuntimeError, match="did not issue it"):
            one.future().wait()
    assert len(texts) == 1 and mine.eq(1).all()
    after = [torch.ones(1) for _ in range(3)]
    for one in [ranks[rank].all_reduce(after[rank]) for rank in range(3)]:
        one.wait()
    assert [one.item() for one in after] == [3.0] * 3


def test_of_what_has_timed_out_a_look_says_so() -> None:
    group = LocalGroup(2, timeout_s=0.2)
    pending = group.communicator(0).all_reduce(torch.ones(1))
    assert not pending.ready()
    time.sleep(0.25)
    assert pending.ready()


def test_an_exchange_aside_meets_by_key_whatever_else_is_issued() -> None:
    group = LocalGroup(2, timeout_s=5)

    def case(communicator: LocalCommunicator) -> list[str]:
        for _ in range(communicator.rank * 3):
            communicator.all_reduce(torch.ones(1))
        return communicator.compare_aside("reset", f"{communicator.rank * 3} issued", CPU)

    assert group.run(case) == [["0 issued", "3 issued"]] * 2
    quick = LocalGroup(2, timeout_s=0.05)
    first, second = quick.communicator(0), quick.communicator(1)
    for _ in range(2):
        with pytest.raises(CollectiveError, match=r"exchange 'key' .* rank 1 did not issue it"):
            first.compare_aside("key", "", CPU)
    with pytest.raises(CollectiveError, match="rank 1 did not issue it"):
        second.compare_aside("key", "", CPU)
    assert not incomplete(first)


# Giving up


def test_an_abort_ends_everything_in_flight_and_later_of_its_epoch() -> None:
    group = LocalGroup(3, timeout_s=30)
    ranks = [group.communicator(rank) for rank in range(3)]
    apart = [one.apart() for one in ranks]
    under_way = [ranks[0].all_reduce(torch.ones(1)), apart[1].all_reduce(torch.ones(1))]
    told: list[str] = []
    under_way[0].notify(lambda: told.append("told"))
    ends: list[str] = []
    owner = Owner()
    group.on_epoch_end(owner, lambda _, why: ends.append(why))
    error = KeyError("the cause")
    ranks[2].abort(error)
    ranks[1].abort(ValueError("too late"))
    assert told == ["told"]
    for one in under_way:
        with pytest.raises(CollectiveError, match="rank 2 gave up: KeyError: 'the cause'") as found:
            one.wait()
        assert found.value.__cause__ is error
    for issue in (
        lambda: ranks[0].all_reduce(torch.ones(1)),
        lambda: apart[2].all_gather_bytes(b"", 1, CPU),
        lambda: ranks[1].compare_aside("key", "", CPU),
        lambda: ranks[0].apart(),
    ):
        with pytest.raises(CollectiveError, match="rank 2 gave up"):
            issue()
    again = [group.communicator(rank) for rank in range(3)]
    for pending in [one.all_reduce(torch.ones(1)) for one in again]:
        pending.wait()
    ranks[0].abort(ValueError("of the old epoch"))
    assert ends == ["rank 2 gave up: KeyError: 'the cause'"]
    assert again[0].all_reduce(torch.ones(1)).ready() is False


class Owner:
    """An object that waits for an epoch's end."""


def test_the_end_of_an_epoch_is_told_once_to_each_owner_that_lives(caplog: pytest.LogCaptureFixture) -> None:
    group = LocalGroup(2, timeout_s=5)
    told: list[tuple[str, str]] = []
    owners = {name: Owner() for name in ("first", "second", "gone")}

    def fails(_: object, why: str) -> None:
        raise ZeroDivisionError(why)

    group.on_epoch_end(owners["first"], fails)
    for name in ("second", "gone"):
        group.on_epoch_end(owners[name], lambda _, why, name=name: told.append((name, why)))  # type: ignore[misc]
    del owners["gone"]
    group.communicators()[1].abort(RuntimeError("stop"))
    assert told == [("second", "rank 1 gave up: RuntimeError: stop")] and "ZeroDivisionError" in caplog.text
    group.communicators()[0].abort(RuntimeError("again"))
    assert len(told) == 1, "that was the next epoch"
    group.on_epoch_end(owners["first"], lambda _, why: told.append(("first", why)))
    group.close()
    group.close()
    assert told[1:] == [("first", "the LocalGroup is closed")]
    with pytest.raises(CollectiveError, match="closed"):
        group.on_epoch_end(owners["first"], fails)


@pytest.mark.parametrize("end", ["abort", "close"])
@pytest.mark.parametrize("other", ["does not come", "has come"])
def test_a_rank_is_told_the_same_whenever_another_ends_the_epoch(
    monkeypatch: pytest.MonkeyPatch, end: str, other: str
) -> None:
    """In whatever it does: wait, issue, make another communicator. Each gives the reason, or the result before it."""
    waiting = announce_waits(monkeypatch)
    why = "rank 1 gave up: RuntimeError: stop" if end == "abort" else "the LocalGroup is closed"

    def case() -> None:
        try:
            with at_line(moment, ["comm/local/"], ends.begin) as found:
                try:
                    first.all_reduce(tensors[0]).wait()
                    first.apart().all_reduce(tensors[1]).wait()
                    group.communicator(0).all_reduce(tensors[2]).wait()
                finally:
                    where.extend(found)
        finally:
            waiting.set()

    for moment in moments(["abort", "close"].index(end), 2):
        waiting.clear()
        group, where = LocalGroup(2, timeout_s=60), list[str]()
        first, second = group.communicator(0), group.communicator(1)
        ends = Beside(partial(second.abort, RuntimeError("stop")) if end == "abort" else group.close, [group.lock])
        tensors = [torch.ones(1) for _ in range(3)]
        if other == "has come":
            for communicator in (second, second.apart(), group.communicator(1)):
                communicator.all_reduce(torch.ones(1))
        with ThreadPoolExecutor(1) as pool:
            mine = pool.submit(case)
            assert waiting.wait(TIMEOUT_S)
            ends.end()
            error = mine.exception(TIMEOUT_S)
        if not (other == "has come" and error is None):
            assert type(error) is CollectiveError and why in str(error), (moment, where, error)
        assert [one.item() for one in tensors] in ([1, 1, 1], [2, 1, 1], [2, 2, 1], [2, 2, 2])
        if not where:
            break
    assert moment > 20


def test_nobody_strays_into_the_next_epoch_while_this_one_is_given_up() -> None:
    def first_collective(asks: Beside, made: list[LocalCommunicator]) -> None:
        asks.end()
        made[0].all_reduce(torch.ones(1))

    for moment in itertools.count():
        group, made = LocalGroup(2, timeout_s=5), list[LocalCommunicator]()
        first, _ = group.communicator(0), group.communicator(1)
        asks = Beside(lambda: made.append(group.communicator(1)), [group.lock])  # noqa: B023
        with at_line(moment, ["comm/local/"], asks.begin) as where:
            first.abort(RuntimeError("stop"))
        with pytest.raises(CollectiveError, match="rank 0 gave up: RuntimeError: stop"):
            first_collective(asks, made)
        if not where:
            break
    assert moment > 5


def test_who_does_not_know_of_an_abort_does_not_stray_into_the_next_epoch() -> None:
    """Rank 1 makes its second communicator of the old life when rank 0 has begun a new one."""
    group = LocalGroup(2, timeout_s=5)
    first, _ = group.communicator(0), group.communicator(1)
    group.abort(first, RuntimeError("stopped"))
    new = group.communicator(0)
    with pytest.raises(CollectiveError, match=r"rank 1 cannot make a communicator: rank 0 gave up"):
        group.communicator(1)
    peer = group.communicator(1)
    pending = new.all_reduce(torch.ones(1))
    peer.all_reduce(torch.ones(1)).wait()
    pending.wait()
    group.abort(new, RuntimeError("again"))
    group.rejoin(1)
    group.communicator(1)


def test_an_old_error_does_not_tell_of_a_newer_abort() -> None:
    group = LocalGroup(2, timeout_s=5)
    first, old = group.communicator(0), group.communicator(1)
    pendings = [old.all_reduce(torch.ones(1)) for _ in range(2)]
    first.abort(RuntimeError("first"))
    with pytest.raises(CollectiveError, match="first"):
        pendings[0].wait()
    second, _ = group.communicator(0), group.communicator(1)
    second.abort(RuntimeError("second"))
    for raises in (pendings[1].wait, lambda: old.all_reduce(torch.ones(1))):
        with pytest.raises(CollectiveError, match="first"):
            raises()
    with pytest.raises(CollectiveError, match="second"):
        group.communicator(1)
    group.communicator(1)


def test_communicators_made_together_are_nobody_elses() -> None:
    """Where one rank has made a communicator of its own, and another will later."""
    group = LocalGroup(2, timeout_s=5)
    one = group.communicator(0)
    together = group.communicators()
    other = group.communicator(1)
    for first, second in ((one, other), together):
        pending = first.all_reduce(torch.ones(1))
        second.all_reduce(torch.ones(1)).wait()
        pending.wait()
    together[0].abort(RuntimeError("stop"))
    with pytest.raises(CollectiveError, match="stop"):
        other.all_reduce(torch.ones(1))
    group.close()
    with pytest.raises(CollectiveError, match="closed"):
        group.communicators()


def test_communicators_apart_outlive_the_end_of_others_and_not_the_group() -> None:
    group = LocalGroup(2, timeout_s=30)
    one, first, second = group.communicator(0), *(group.communicators(apart=True) for _ in range(2))

    def works(together: Sequence[Communicator]) -> None:
        pending = together[0].all_reduce(torch.ones(1))
        together[1].all_reduce(torch.ones(1)).wait()
        pending.wait()

    first[1].abort(RuntimeError("stop"))
    with pytest.raises(CollectiveError, match="rank 1 gave up: RuntimeError: stop"):
        first[0].all_reduce(torch.ones(1))
    works(second)
    works([one, group.communicator(1)])
    one.abort(RuntimeError("another"))
    works(second)
    waits = second[0].all_reduce(torch.ones(1))
    group.close()
    for ended in (
        waits.wait,
        lambda: second[1].all_reduce(torch.ones(1)),
        lambda: group.communicator(0),
        lambda: group.run(lambda _: None),
    ):
        with pytest.raises(CollectiveError, match="closed"):
            ended()


def test_who_is_interrupted_before_it_performs_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    group = LocalGroup(2, timeout_s=2 * PATIENT_S)
    first, last = group.communicators()
    pending = first.all_reduce(torch.ones(1))
    with monkeypatch.context() as patched:
        patched.setattr(Rendezvous, "perform", interrupted)
        with pytest.raises(KeyboardInterrupt):
            last.all_reduce(torch.ones(1))
    with in_time(), pytest.raises(CollectiveError, match="rank 1, the last to arrive, was interrupted"):
        pending.wait()
    pending = first.all_reduce(torch.ones(1))
    last.all_reduce(torch.ones(1)).wait()
    pending.wait()


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_run_raises_what_was_raised_first_and_the_next_run_works() -> None:
    group = LocalGroup(3, timeout_s=2 * PATIENT_S)
    before = threading.active_count()

    def case(communicator: LocalCommunicator) -> None:
        if communicator.rank == 1:
            time.sleep(0.02)
            raise KeyError("mine")
        try:
            communicator.all_reduce(torch.ones(1)).wait()
        except CollectiveError as error:
            if communicator.rank == 2:
                raise ValueError("of its own") from error
            raise

    with in_time(), pytest.raises(KeyError, match="mine") as found:
        group.run(case)
    assert found.value.__notes__ == ["rank 2 raised ValueError: of its own"]
    assert threading.active_count() == before
    assert group.run(lambda communicator: communicator.all_gather_bytes(b"x", 1, CPU)) == [[b"x"] * 3] * 3
    with pytest.raises(SystemExit):
        group.run(lambda communicator: sys.exit(3) if communicator.rank else communicator.broadcast(torch.ones(1), 0))


def test_an_interrupt_of_the_caller_ends_a_run() -> None:
    group = LocalGroup(2, timeout_s=2 * PATIENT_S)
    ended: list[int] = []

    def case(communicator: LocalCommunicator) -> None:
        try:
            work(communicator)
        finally:
            time.sleep(0.1)
            ended.append(communicator.rank)

    def work(communicator: LocalCommunicator) -> None:
        if communicator.rank == 0:
            communicator.all_reduce(torch.ones(1)).wait()
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            communicator.all_reduce(torch.ones(1)).wait()  # nobody else comes
        communicator.all_reduce(torch.ones(1)).wait()

    with in_time(), pytest.raises(KeyboardInterrupt):
        group.run(case)
    assert sorted(ended) == [0, 1]
    assert group.run(lambda communicator: communicator.rank) == [0, 1]


def test_who_is_told_of_an_error_first_does_not_hide_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank may tell the others, by `abort`, before it raises; which of their threads ends first is no matter."""
    told = threading.Event()

    def case(communicator: LocalCommunicator) -> None:
        if communicator.rank == 1:
            communicator.all_reduce(torch.ones(1)).wait()
        error = ZeroDivisionError("mine")
        communicator.abort(error)
        assert told.wait(TIMEOUT_S)
        raise error

    group = LocalGroup(2, timeout_s=60)
    known = LocalCommunicator.abort

    def abort(self: LocalCommunicator, error: BaseException) -> None:
        known(self, error)
        if self.rank == 1:
            told.set()  # its own error is noted by now

    monkeypatch.setattr(LocalCommunicator, "abort", abort)
    with pytest.raises(ZeroDivisionError, match="mine") as raised:
        group.run(case)
    assert not getattr(raised.value, "__notes__", [])


# One thread for all


def test_where_one_thread_drives_all_ranks_waiting_for_another_is_an_error_at_once() -> None:
    group = LocalGroup(3, one_thread=True, timeout_s=2 * PATIENT_S)
    ranks = [group.communicator(rank) for rank in range(3)]
    assert not ranks[0].waits_in_backward(CPU)
    with (
        in_time(),
        pytest.raises(CollectiveError, match="ranks 1, 2 cannot arrive: the thread that waits drives them too"),
    ):
        ranks[0].all_gather_bytes(b"", 1, CPU)
    for one in ranks[1:]:
        with pytest.raises(CollectiveError, match="cannot arrive"):
            one.all_gather_bytes(b"", 1, CPU)
    pendings = [one.all_reduce(torch.ones(1)) for one in ranks]
    for pending in pendings:
        pending.wait()


def test_threads_of_a_group_for_one_thread_wait_for_each_other() -> None:
    group = LocalGroup(2, timeout_s=10, one_thread=True)

    def case(communicator: LocalCommunicator) -> None:
        time.sleep(0.02 * communicator.rank)
        communicator.all_reduce(torch.ones(1)).wait()

    group.run(case)
    waits = LocalGroup(2).communicator(0).waits_in_backward
    assert waits(CPU) and not waits(torch.device("cuda", 0)), "backwards of one CUDA device share a thread"


# What is refused


@pytest.mark.parametrize(
    ("arguments", "options", "kind"),
    [
        ((0,), {}, ValueError),
        ((True,), {}, ValueError),
        ((2.0,), {}, ValueError),
        ((2,), {"timeout_s": 0}, ValueError),
        ((2,), {"timeout_s": float("nan")}, ValueError),
        ((2,), {"strategy": "ring"}, TypeError),
        ((2,), {"strategy": Ring}, TypeError),
    ],
)
def test_groups_that_cannot_be(arguments: Any, options: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="LocalGroup"):
        LocalGroup(*arguments, **options)


def test_ranks_and_payloads_that_cannot_be() -> None:
    group = LocalGroup(2)
    wrong: list[Any] = [2, -1, 0.0, True]
    for rank in wrong:
        with pytest.raises(ValueError, match="rank must be one of 0 to 1"):
            group.communicator(rank)
    with pytest.raises(ValueError, match="does not fit"):
        group.communicator(0).all_gather_bytes(b"xx", 1, CPU)


# What is left behind


def test_nothing_is_left_of_hundreds_of_collectives() -> None:
    group = LocalGroup(3, timeout_s=10)
    threads, held = threading.active_count(), []

    def case(communicator: LocalCommunicator) -> None:
        draw = torch.Generator().manual_seed(communicator.rank)
        kept = torch.ones(16)
        for number in range(600):
            if torch.rand(1, generator=draw) < 0.02:
                time.sleep(0.0005)
            pending = communicator.all_reduce(kept)
            if number % 3:
                pending.wait()  # else dropped: those that follow are waited for
            if number % 50 == 0:
                dropped = torch.ones(3)
                held.append(weakref.ref(dropped))
                communicator.all_reduce(dropped).notify(lambda: None)
            kept = torch.ones(16)
        communicator.all_gather_bytes(b"", 1, CPU)
        assert not incomplete(communicator)

    group.run(case)
    gc.collect()
    assert threading.active_count() <= threads  # one of another test may have ended
    assert len(held) == 36 and all(one() is None for one in held)
    assert not channels_of(group), "channels go with their communicators"
    tensor = torch.ones(2)
    given_up, alone = weakref.ref(tensor), group.communicator(0)
    alone.all_reduce(tensor)
    del tensor
    assert given_up() is not None, "a peer may still come and need it"
    group.close()
    assert given_up() is None


@pytest.mark.parametrize("failure", ["timeout", "abort", "mismatch"])
def test_failures_keep_nothing(failure: str) -> None:
    group = LocalGroup(2, timeout_s=0.02)
    first, second = group.communicator(0), group.communicator(1)
    tensor = torch.ones(3)
    held = weakref.ref(tensor)
    pending = first.all_reduce(tensor)
    if failure == "abort":
        second.abort(RuntimeError("stop"))
    elif failure == "mismatch":
        second.all_reduce(torch.ones(4))
    with pytest.raises(CollectiveError):
        pending.wait()
    del tensor, pending
    gc.collect()
    assert held() is None


# Interleavings


class Interleavings(RuleBasedStateMachine):
    """One channel driven by one thread in any order; the model knows what every meeting must come to."""

    SIZE = 3

    def __init__(self) -> None:
        super().__init__()
        self.group = LocalGroup(self.SIZE, timeout_s=0.004)
        self.begin()

    def begin(self) -> None:
        self.group.rejoin(*range(self.SIZE))
        self.ranks = [self.group.communicator(rank) for rank in range(self.SIZE)]
        self.issued = [0] * self.SIZE
        self.brought: list[dict[int, int]] = []  # by meeting: rank -> number of elements
        self.timed_out: set[int] = set()
        self.held: list[tuple[int, int, torch.Tensor, LocalPending, list[int]]] = []

    @initialize()
    def first(self) -> None:
        assert not incomplete(self.ranks[0])

    @rule(rank=st.integers(0, SIZE - 1), numel=st.sampled_from((2, 2, 2, 2, 3)))
    def arrive(self, rank: int, numel: int) -> None:
        number, self.issued[rank] = self.issued[rank], self.issued[rank] + 1
        if number == len(self.brought):
            self.brought.append({})
        tensor, told = torch.full((numel,), float(rank + 1)), [0]
        pending = self.ranks[rank].all_reduce(tensor)
        self.brought[number][rank] = numel
        pending.notify(lambda: told.__setitem__(0, told[0] + 1))
        self.held.append((number, rank, tensor, pending, told))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def wait(self, data: st.DataObject) -> None:
        number, rank, tensor, pending, told = data.draw(st.sampled_from(self.held))
        brought = self.brought[number]
        if number in self.timed_out or len(brought) < self.SIZE:
            with pytest.raises(CollectiveError, match="did not issue it within"):
                pending.wait()
            self.timed_out.add(number)
            assert tensor.eq(rank + 1).all(), "written by nobody"
        elif len(set(brought.values())) > 1:
            with pytest.raises(CollectiveError, match="different collectives"):
                pending.wait()
        else:
            pending.wait()
            assert tensor.eq(6).all()
        assert told == [1] and pending.ready()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))

    @rule(rank=st.integers(0, SIZE - 1))
    def abort(self, rank: int) -> None:
        self.ranks[rank].abort(RuntimeError("stop"))
        for number, _, _, pending, told in self.held:
            open_ = len(self.brought[number]) < self.SIZE and number not in self.timed_out
            assert told == [1] and pending.ready()
            if open_:
                with pytest.raises(CollectiveError, match=f"rank {rank} gave up"):
                    pending.wait()
        with pytest.raises(CollectiveError, match="gave up"):
            self.ranks[0].all_reduce(torch.ones(1))
        self.begin()

    @invariant()
    def only_what_somebody_may_come_to_is_kept(self) -> None:
        wanted = {number for number, brought in enumerate(self.brought) if len(brought) < self.SIZE}
        assert set(incomplete(self.ranks[0])) == wanted
        for number, _, _, _, told in self.held:
            assert told[0] == (len(self.brought[number]) == self.SIZE or number in self.timed_out)


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(sweep.sweep(100), stateful_step_count=40)


def test_a_product_of_16_bit_tensors_is_computed_wide() -> None:
    factors = [300.0, 300.0, 2.0**-8]  # 300 * 300 is more than fp16 holds, the product is not

    def case(communicator: LocalCommunicator) -> torch.Tensor:
        mine = torch.tensor([factors[communicator.rank]], dtype=torch.float16)
        communicator.all_reduce(mine, "product").wait()
        return mine

    for product in LocalGroup(3).run(case):
        assert product.tolist() == [351.5]
