"""SyncServer, by the rows of burn's server whose faults it must not have; then random programs against a model."""

from __future__ import annotations

import gc
import random
import re
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from support import sweep
from support.every_moment import TIMEOUT_S, Beside, announce_waits, at_line, moments
from support.inside import epochs_of, group_of, inside
from support.on_device import own_stream, pick
from support.on_device import torch_path as torch_path
from support.sync_server_machine import (
    RAISES,
    WORLD,
    Attempt,
    Kind,
    Machine,
    Round,
    Sleeps,
    Turns,
    programs,
    random_attempt,
    random_round,
)
from support.timeouts import settles

from fusedreduce import (
    AgreementError,
    BucketCaps,
    CollectiveError,
    FusedReduceError,
    ReduceConfig,
    Reducer,
    SyncServer,
)
from fusedreduce.buckets.data_path import scalar
from fusedreduce.comm.local.group import LocalCommunicator
from fusedreduce.parallel.sync_device import SyncDevice
from fusedreduce.parallel.sync_epochs import DeviceState

HANGS_S = 0.2  # for those who are to wait in vain
NEVER_S = 3600.0  # for those who are to be told by something else than a timeout
Leaves = list[torch.Tensor]


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def leaves(*numels: int, dtype: torch.dtype = torch.float32) -> Leaves:
    return [torch.ones(numel, dtype=dtype, requires_grad=True) for numel in numels]


def named(parameters: Sequence[torch.Tensor], names: str = "wbcd") -> list[tuple[str, torch.Tensor]]:
    """Pairs, as `named_parameters()` gives them."""
    return list(zip(names, parameters, strict=False))


def loss_of(leaf: torch.Tensor, value: float) -> torch.Tensor:
    """Its gradient is `value` everywhere."""
    return (leaf * value).sum()


def values(parameters: Sequence[torch.Tensor]) -> list[float | None]:
    """Of each gradient, whose elements are all the same."""
    found = [None if one.grad is None else one.grad.unique().tolist() for one in parameters]
    assert all(one is None or len(one) == 1 for one in found), found
    return [None if one is None else one[0] for one in found]


def assert_equal(found: torch.Tensor | None, expected: torch.Tensor) -> None:
    assert found is not None and torch.equal(found, expected)


class Group:
    """A server, all of whose devices are started, with a parameter "w" and a parameter "b" each."""

    def __init__(self, world: int, timeout_s: float = 20.0, **options: Any) -> None:
        self.server = SyncServer(world, timeout_s=timeout_s, **options)
        self.leaves = [leaves(3, 2) for _ in range(world)]
        self.devices = [self.start(rank) for rank in range(world)]

    def start(self, rank: int) -> SyncDevice:
        return self.server.device(rank, named(self.leaves[rank]))

    def step(self, *losses: Callable[[Leaves], torch.Tensor] | None) -> list[list[float | None]]:
        """One epoch of all devices; the gradients of each."""

        def case(device: SyncDevice) -> list[float | None]:
            own, loss = self.leaves[device.rank], losses[device.rank]
            for one in own:
                one.grad = None
            device.backward(None if loss is None else loss(own))
            return values(own)

        return self.server.run(case)

    def works(self) -> None:
        """An epoch goes well."""
        world = self.server.world_size
        wanted: list[float | None] = [(world - 1) / 2, None]
        assert self.step(*[lambda own, rank=rank: loss_of(own[0], rank) for rank in range(world)]) == [wanted] * world

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.close()


def caught(future: Future[Any]) -> str:
    """What a thread raised: a CollectiveError."""
    error = future.exception(20)
    assert isinstance(error, CollectiveError), error
    return str(error)


def told(future: Future[Any]) -> str:
    """What a thread raised, class and message; empty: nothing."""
    error = future.exception(TIMEOUT_S)
    return "" if error is None else f"{type(error).__name__}: {error}"


def until_launched(device: SyncDevice) -> None:
    """Waits until another thread has started the collectives of the device's second epoch."""
    # One bucket, and who used what.
    assert settles(lambda: device.epoch >= 2 and int(device.reducer.stats()["collectives"]) > 2)


# Starting and closing: rows 0.1 to 0.5, 0.10, 0.11, 0.17


def test_row_0_1_servers_do_not_know_each_other() -> None:
    with Group(2) as one, Group(3) as other:
        one.works()
        other.works()
        one.server.close()
        other.works()


def test_row_0_2_a_second_start_is_an_error() -> None:
    with Group(2) as group:
        with pytest.raises(FusedReduceError, match="device 1 has been started already"):
            group.server.device(1, named(leaves(3, 2)))
        with SyncServer(2) as other, pytest.raises(ValueError, match="w belongs to another open Reducer"):
            other.device(0, named(group.leaves[0]))
        group.works()


def test_row_0_3_close_is_for_good_and_leaves_nothing_behind(threads: ThreadPoolExecutor) -> None:
    with Group(2) as group:
        group.works()
        waits = threads.submit(group.devices[0].backward, loss_of(group.leaves[0][0], 1.0))
        until_launched(group.devices[0])
        group.server.close()
        group.server.close()
        assert told(waits) == CLOSED
        for device, own in zip(group.devices, group.leaves, strict=True):
            assert device.state is DeviceState.CLOSED
            device.close()
            own[0].grad = None
            loss_of(own[0], 2.0).backward()  # nobody hooks it
            assert values(own)[0] == 2.0
        with SyncServer(1) as again:
            again.device(0, named(group.leaves[0]))


# Where a device can be while another thread closes the server.
EPOCH = ("parallel/sync_", "reducer/engine", "reducer/reducer", "reducer/backward_hooks", "comm/local/sequence")
CLOSED = "FusedReduceError: this SyncServer is closed: make a new one"


def in_one_call(device: SyncDevice, leaf: torch.Tensor) -> None:
    device.backward(loss_of(leaf, 2.0))


def by_hand(device: SyncDevice, leaf: torch.Tensor) -> None:
    device.announce(loss := loss_of(leaf, 2.0))
    loss.backward()
    device.sync()


def nothing(device: SyncDevice, leaf: torch.Tensor) -> None:
    device.announce(None)
    device.sync()


@pytest.mark.filterwarnings("error::UserWarning")  # of a reducer, which its user has never seen
@pytest.mark.parametrize("waits_in", ["backward", "sync"])
@pytest.mark.parametrize(
    "epoch",
    [pytest.param(in_one_call, marks=pytest.mark.full), by_hand, pytest.param(nothing, marks=pytest.mark.full)],
)
@pytest.mark.parametrize(
    "others", ["are idle", "wait", pytest.param("are idle in the first epoch", marks=pytest.mark.full)]
)
def test_every_device_is_told_the_same_whenever_the_server_closes(
    threads: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    epoch: Callable[[SyncDevice, torch.Tensor], None],
    others: str,
    waits_in: str,
) -> None:
    """No CollectiveError, after which another epoch could be tried."""
    if waits_in == "sync":
        monkeypatch.setattr(LocalCommunicator, "waits_in_backward", lambda self, device: False)
    waiting = announce_waits(monkeypatch)
    for moment in moments(int(others == "wait"), 2):
        with Group(2, NEVER_S) as group:
            if "first" not in others:
                group.works()
            for own in group.leaves:
                own[0].grad = None
            waiting.clear()
            first, second = group.devices
            close = Beside(group.server.close, locks_of(group))
            other = None
            if others == "wait":
                other = threads.submit(epoch, second, group.leaves[1][0])
                assert waiting.wait(TIMEOUT_S)
                waiting.clear()
            where, mine = in_epoch(threads, moment, close, partial(epoch, first, group.leaves[0][0]), waiting)
            close.end()
            for found, own in ((mine, group.leaves[0]), (other, group.leaves[1])):
                if found is not None and (text := told(found)) != CLOSED:
                    assert text == "" and other is not None, (moment, where, text)
                    assert values(own)[0] == (None if epoch is nothing else 2.0), (moment, where)
            assert all(one.state is DeviceState.CLOSED for one in group.devices), (moment, where)
        if not where:
            break
    assert moment > 20


@pytest.mark.parametrize("how", ["abort", "close", "interrupt"])
@pytest.mark.parametrize(
    "epoch",
    [pytest.param(in_one_call, marks=pytest.mark.full), pytest.param(by_hand, marks=pytest.mark.full), nothing],
)
def test_a_device_is_told_the_same_whenever_an_epoch_is_given_up(
    threads: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    epoch: Callable[[SyncDevice, torch.Tensor], None],
    how: str,
) -> None:
    """A CollectiveError, in the epoch that the other does not come to: it aborts, is closed, or all are interrupted."""
    waiting = announce_waits(monkeypatch)
    for moment in moments(("abort", "close", "interrupt").index(how), 3):
        with Group(2, NEVER_S) as group:
            group.works()
            waiting.clear()
            first, second = group.devices
            acts: dict[str, tuple[Callable[[], object], str]] = {
                "abort": (partial(second.abort, ZeroDivisionError("planted")), "device 1 raised .*: planted"),
                "close": (second.close, "device 1 (is|raised .* was) closed"),
                "interrupt": (partial(interrupt_all, group), "device 0 raised KeyboardInterrupt"),
            }
            act, said = acts[how]
            ends = Beside(act, locks_of(group))
            where, mine = in_epoch(threads, moment, ends, partial(epoch, first, group.leaves[0][0]), waiting)
            ends.end()
            assert re.fullmatch(f"CollectiveError: .*{said}.*", told(mine)), (moment, where, told(mine))
            if how == "close":
                group.devices[1] = group.start(1)
            if how == "interrupt":
                with epochs_of(group.server).lock:
                    for one in group.devices:
                        one.rejoin()  # as run() has them
            group.works()
        if not where:
            break
    assert moment > 20


def interrupt_all(group: Group) -> None:
    """As run() does for an interrupted caller."""
    error = KeyboardInterrupt()
    for one in group.devices:
        one.interrupt(error)


def locks_of(group: Group) -> list[Any]:
    """What a thread that closes a server or a device may wait for."""
    return [
        epochs_of(group.server).lock,
        group_of(group.server).lock,
        *(inside(one.reducer).lock for one in group.devices),
    ]


def in_epoch(
    threads: ThreadPoolExecutor, moment: int, beside: Beside, epoch: Callable[[], None], waiting: threading.Event
) -> tuple[list[str], Future[None]]:
    """Runs an epoch in a thread, and `beside` at a moment of it; returns when it has ended, or waits for a device."""
    where: list[str] = []

    def case() -> None:
        try:
            with at_line(moment, EPOCH, beside.begin) as found:
                try:
                    epoch()
                finally:
                    where.extend(found)
        finally:
            waiting.set()

    mine = threads.submit(case)
    assert waiting.wait(TIMEOUT_S)
    return where, mine


def test_row_0_5_nothing_is_ignored_before_the_start_or_after_the_end() -> None:
    with Group(1) as group:
        (device,), (own,) = group.devices, group.leaves
        with pytest.raises(FusedReduceError, match="sync.. before announce"):
            device.sync()
        with pytest.raises(FusedReduceError, match="its gradient would not be averaged: call announce"):
            loss_of(own[1], 1.0).backward()
        assert values(own) == [None, None]
        device.backward(loss_of(own[1], 1.0))
        with pytest.raises(FusedReduceError, match=r"backward reached b, but no epoch has begun"):
            loss_of(own[1], 1.0).backward()
        assert values(own) == [None, 1.0]
        device.close()
        for call in (lambda: device.announce(None), device.sync, lambda: device.backward(None)):
            with pytest.raises(FusedReduceError, match="device 0 is closed"):
                call()
        with pytest.raises(FusedReduceError, match="device 0 is closed"), device.no_sync():
            pass
        group.server.close()
        asks: tuple[Callable[[], object], ...]
        asks = (lambda: device.announce(None), lambda: group.server.device(0, named(own)), lambda: group.server.run(id))
        for ask in asks:
            with pytest.raises(FusedReduceError, match="SyncServer is closed"):
                ask()


def test_a_run_needs_every_device() -> None:
    with SyncServer(3) as server:
        server.device(1, named(leaves(1)))
        with pytest.raises(FusedReduceError, match="devices 0 and 2 are not started"):
            server.run(lambda device: None)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: SyncServer(0), ValueError, "world_size"),
        (lambda: SyncServer(2, timeout_s=0), ValueError, "timeout_s"),
        (lambda: SyncServer(2, op="max"), ValueError, "op"),  # type: ignore[arg-type]
        (lambda: SyncServer(2).device(2, named(leaves(1))), ValueError, "rank must be one of 0 to 1, got 2"),
        (lambda: SyncServer(2).device(-1, named(leaves(1))), ValueError, "rank must be"),
        (lambda: SyncServer(2).device(True, named(leaves(1))), ValueError, "rank must be"),
        (lambda: SyncServer(2).device(0, []), ValueError, "at least one parameter"),
        (lambda: SyncServer(2).device(0, leaves(1)), TypeError, "named_parameters.. gives them, got Tensor"),  # type: ignore[arg-type]
        (lambda: SyncServer(2).device(0, [("w", 1.0)]), TypeError, "pairs of a name and a parameter"),  # type: ignore[list-item]
        (lambda: SyncServer(2).device(0, named(leaves(1, 1), "ww")), ValueError, "two parameters are named w"),
        (lambda: SyncServer(1).device(0, named(leaves(1))).announce(3.0), TypeError, "tensors or None, got float"),
    ],
)
def test_bad_input(make: Callable[[], object], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make()


def test_rows_0_11_and_0_17_shared_parameters_count_once_and_frozen_ones_never() -> None:
    """Tied weights: upstream counts and submits such a device twice. Steps need no new start."""

    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(4, 4, bias=False)
            self.frozen = torch.nn.Linear(4, 4).requires_grad_(False)
            self.last = torch.nn.Linear(4, 4, bias=False)
            self.last.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.last(self.frozen(self.first(x)))
            return result

    torch.manual_seed(0)
    models = [Tied() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    inputs = [torch.randn(5, 4) for _ in range(2)]
    with SyncServer(2) as server:
        for rank, model in enumerate(models):
            device = server.device(rank, model.named_parameters(remove_duplicate=False))
            assert device.reducer.names == ("first.weight",)

        def case(device: SyncDevice) -> None:
            model = models[device.rank]
            optimizer = torch.optim.SGD([model.first.weight], lr=0.1)
            for _ in range(5):
                optimizer.zero_grad()
                local = torch.autograd.grad(model(inputs[device.rank]).square().mean(), model.first.weight)[0]
                own[device.rank] = local
                device.backward(model(inputs[device.rank]).square().mean())
                meet.wait(20)
                assert_equal(model.first.weight.grad, own[0] / 2 + own[1] / 2)
                meet.wait(20)
                optimizer.step()

        own: list[Any] = [None, None]
        meet = threading.Barrier(2)
        server.run(case)
    assert torch.equal(models[0].first.weight, models[1].first.weight)


def test_different_models_are_refused_on_all_devices(threads: ThreadPoolExecutor) -> None:
    with SyncServer(2, timeout_s=20) as server:
        devices = [server.device(rank, named(leaves(rank + 3))) for rank in range(2)]
        for future in [threads.submit(device.announce, None) for device in devices]:
            assert isinstance(future.exception(20), AgreementError)


@pytest.mark.parametrize("later", [False, True], ids=["from the start", "started again"])
def test_another_order_of_parameters_is_refused_on_all_devices(threads: ThreadPoolExecutor, later: bool) -> None:
    """Of the same sizes: by their places in the list w would be averaged with b."""
    own = [leaves(3, 3) for _ in range(2)]
    with SyncServer(2, timeout_s=20) as server:
        devices = [server.device(rank, named(own[rank])) for rank in range(2 if later else 1)]
        if later:
            server.run(lambda device: device.backward(None))
            devices.pop().close()
        devices.append(server.device(1, named(own[1])[::-1]))
        losses = [loss_of(mine[0], 2.0) + loss_of(mine[1], 100.0) for mine in own]
        for future in [threads.submit(one.backward, loss) for one, loss in zip(devices, losses, strict=True)]:
            assert isinstance(future.exception(20), AgreementError)
        assert [values(mine) for mine in own] == [[None, None]] * 2


def test_nobody_is_told_to_change_options_that_the_server_has_set(caplog: pytest.LogCaptureFixture) -> None:
    """Every parameter is used: a reducer of one's own would say that the search for unused ones can be left out."""
    with Group(2) as group:
        both = lambda own: loss_of(own[0], 2.0) + loss_of(own[1], 2.0)  # noqa: E731
        assert group.step(both, both) == [[2.0, 2.0]] * 2
    assert caplog.messages == []
    parameters = leaves(3)
    with (
        SyncServer(1) as server,
        Reducer(parameters, group_of(server).communicator(0), find_unused_parameters=True) as reducer,
    ):
        reducer.prepare_for_backward(loss := loss_of(parameters[0], 2.0))
        loss.backward()
    assert [text for text in caplog.messages if "turn it off" in text] == caplog.messages != []


# Exceptions: row 0.7


@pytest.mark.parametrize("where", ["before announce", "before backward", "in backward", "before sync", "later"])
def test_row_0_7_what_one_device_raises_all_raise(where: str) -> None:
    heard: list[str] = []
    with Group(3) as group:
        group.works()

        def case(device: SyncDevice) -> None:
            own = group.leaves[device.rank]
            if device.rank == 1:
                if where == "before announce":
                    raise ZeroDivisionError("planted")
                loss = loss_of(own[0], 1.0)
                if where == "in backward":
                    loss.register_hook(_raise)
                device.announce(loss)
                if where == "before backward":
                    raise ZeroDivisionError("planted")
                loss.backward()
                if where == "before sync":
                    raise ZeroDivisionError("planted")
                device.sync()
                raise ZeroDivisionError("planted")
            try:
                for _ in range(2):  # where it raised after its part, the first one goes well
                    device.backward(loss_of(own[0], 1.0))
            except CollectiveError as error:
                heard.append(str(error))
                raise

        with pytest.raises(ZeroDivisionError, match="planted"):
            group.server.run(case)
        assert len(heard) == 2
        assert all("was given up: device 1 raised ZeroDivisionError: planted" in text for text in heard), heard
        group.works()


def _raise(_: object) -> None:
    raise ZeroDivisionError("planted")


def test_an_interrupt_that_does_not_wake_the_caller_ends_a_run() -> None:
    """As one that reaches another thread, or that comes just before the caller begins to wait."""
    heard, in_time, begun, ends = list[str](), list[bool](), threading.Event(), threading.Event()
    with Group(2, NEVER_S) as group:
        group.works()

        def case(device: SyncDevice) -> None:
            if device.rank == 1:
                begun.set()
                in_time.append(ends.wait(TIMEOUT_S))
                if not in_time[0]:
                    device.abort(AssertionError("nobody heard it"))
                return
            assert begun.wait(TIMEOUT_S)
            until_caller_waits()
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
            try:
                device.backward(loss_of(group.leaves[0][0], 1.0))  # waits for device 1
            except CollectiveError as error:
                heard.append(str(error))
            ends.set()

        with pytest.raises(KeyboardInterrupt):
            group.server.run(case)
        assert "raised KeyboardInterrupt" in heard[0] and in_time == [True]
        group.works()


def until_caller_waits() -> None:
    """Waits until the main thread has started the others, and waits for them."""
    main = threading.main_thread().ident
    assert main is not None
    while {"start", "wait"} & {one.name for one in traceback.extract_stack(sys._current_frames()[main])} != {"wait"}:
        time.sleep(1e-3)


def test_an_interrupt_between_two_epochs_ends_a_run() -> None:
    meet, last = threading.Barrier(2), [-1, -1]
    with Group(2) as group:

        def case(device: SyncDevice) -> None:
            for epoch in range(100):
                device.backward(loss_of(group.leaves[device.rank][0], 1.0))
                last[device.rank] = epoch
                if epoch == 2:
                    meet.wait(20)
                    if device.rank == 0:
                        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                    assert settles(lambda: bool(epochs_of(group.server).failures))  # the caller gives the next epoch up

        with pytest.raises(KeyboardInterrupt):
            group.server.run(case)
        assert last == [2, 2]
        group.works()


def test_row_0_7_of_a_context_manager(threads: ThreadPoolExecutor) -> None:
    with Group(2) as group:
        waits = threads.submit(group.devices[0].backward, loss_of(group.leaves[0][0], 1.0))
        with pytest.raises(ZeroDivisionError), group.devices[1]:
            raise ZeroDivisionError("planted")
        assert "epoch 1 was given up: device 1 raised ZeroDivisionError: planted" in caught(waits)
        with pytest.raises(CollectiveError, match="device 0: device 1 is closed.*start the closed"):
            group.devices[0].announce(None)  # at once, not after the timeout
        group.devices[1] = group.start(1)
        group.works()


def test_errors_of_several_devices_are_all_told() -> None:
    def case(device: SyncDevice) -> None:
        meet.wait(20)
        raise ZeroDivisionError(f"planted {device.rank}")

    meet = threading.Barrier(2)
    with Group(2) as group:
        with pytest.raises(ZeroDivisionError) as raised:
            group.server.run(case)
        assert len(raised.value.__notes__) == 1 and "planted" in raised.value.__notes__[0]
        group.works()


# What is announced: rows 0.8, 0.13 to 0.16, 0.23


def test_rows_0_14_0_15_a_device_with_nothing_hangs_nobody() -> None:
    """None; a loss that reaches no parameter; and all of them at once, which touches nothing."""
    with Group(3, timeout_s=5.0) as group:
        other = torch.ones(2, requires_grad=True)
        for nothing in (None, lambda own: loss_of(other, 2.0), lambda own: torch.zeros(())):
            assert group.step(lambda own: loss_of(own[0], 6.0), nothing, nothing) == [[2.0, None]] * 3
            assert group.step(nothing, nothing, nothing) == [[None, None]] * 3
        assert other.grad is not None and set(other.grad.tolist()) == {2.0 * 5}, "its own backward ran"


def test_nobody_announced_leaves_a_gradient_as_it_is() -> None:
    with Group(2) as group:
        kept = [torch.full((2,), 7.0 + rank) for rank in range(2)]

        def case(device: SyncDevice) -> None:
            own = group.leaves[device.rank]
            own[1].grad = kept[device.rank]
            device.backward(loss_of(own[0], 2.0) if device.rank else None)
            assert own[1].grad is kept[device.rank]
            assert set(own[1].grad.tolist()) == {7.0 + device.rank}

        group.server.run(case)


class Output(dict[str, Any]): ...


def test_what_is_announced_may_be_in_any_container() -> None:
    """A device that uses one of its two parameters; in a subclass of dict, which pytree takes for a leaf."""
    with Group(2) as group:

        def case(device: SyncDevice) -> list[float | None]:
            own = group.leaves[device.rank]
            output = Output(all=[Output(loss=loss_of(own[device.rank], 2.0))])
            device.announce(output)
            output["all"][0]["loss"].backward()
            device.sync()
            return values(own)

        assert group.server.run(case) == [[1.0, 1.0]] * 2


@pytest.mark.parametrize(("op", "expected"), [("mean", 3.0), ("sum", 12.0)])
def test_rows_0_8_0_23_k_of_n_devices_are_averaged_over_n(op: Any, expected: float) -> None:
    """Upstream: over k, on those k devices only."""
    with Group(4, op=op) as group:
        found = group.step(lambda own: loss_of(own[0], 4.0), lambda own: loss_of(own[0], 8.0), None, None)
        assert found == [[expected, None]] * 4
    with Group(4, config=ReduceConfig(op=op)) as group:
        assert group.step(None, lambda own: loss_of(own[1], 12.0), None, None)[3] == [None, expected]


def test_row_0_16_announcing_twice_is_an_error_and_changes_nothing(threads: ThreadPoolExecutor) -> None:
    with Group(2) as group:
        first = group.devices[0]
        loss = loss_of(group.leaves[0][0], 6.0)
        begins = threads.submit(first.announce, loss)
        done = threads.submit(group.devices[1].backward, None)
        begins.result(20)
        for again in (loss, None):
            with pytest.raises(FusedReduceError, match=r"device 0: announce\(\) twice: epoch 1 is not synced"):
                first.announce(again)
        with pytest.raises(FusedReduceError, match=r"sync\(\) before the backward .* epoch 1, of w"):
            first.sync()
        loss.backward()
        with pytest.raises(FusedReduceError, match=r"announce\(\) twice"):
            first.announce(loss)
        first.sync()
        done.result(20)
        assert [values(own) for own in group.leaves] == [[3.0, None]] * 2
        group.works()


def test_row_0_16_a_second_backward_is_an_error_and_changes_nothing() -> None:
    with Group(2) as group:

        def case(device: SyncDevice) -> None:
            own = group.leaves[device.rank]
            loss = loss_of(own[0], 2.0) + loss_of(own[1], 4.0)
            device.announce(loss)
            loss.backward(retain_graph=True)
            for again in (loss, loss_of(own[1], 1.0)):
                with pytest.raises(FusedReduceError, match=r"a second backward before sync\(\): epoch 1 has averaged"):
                    again.backward(retain_graph=True)
            device.sync()
            assert values(own) == [2.0, 4.0]

        group.server.run(case)
        group.works()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("late", [True, False])
def test_a_gradient_that_was_not_announced_is_an_error_for_all(late: bool, overlap: bool) -> None:
    """If it comes late, the others have the rest already: they raise in the next epoch."""
    with Group(2, config=ReduceConfig(overlap=overlap)) as group:

        def case(device: SyncDevice) -> None:
            own = group.leaves[device.rank]
            if device.rank == 0:
                # The engine runs that branch first that was made last.
                losses = [loss_of(own[index], 1.0) for index in ((1, 0) if late else (0, 1))]
                device.announce(losses[late])
                loss = losses[0] + losses[1]
                with pytest.raises(FusedReduceError, match="backward reached b, which was not announced for epoch 1"):
                    loss.backward()
                assert values(own)[1] is None
            else:
                if late and overlap:
                    device.backward(loss_of(own[0], 1.0))
                with pytest.raises(CollectiveError, match="device 0 raised .*backward reached b, which was not"):
                    device.backward(loss_of(own[0], 1.0))

        group.server.run(case)
        group.works()


@pytest.mark.parametrize("syncs", [True, False], ids=["at sync", "at the next announce"])
def test_an_announced_gradient_that_does_not_come_is_an_error_for_all(syncs: bool) -> None:
    said = "the backward of epoch 1 ended without the gradients of b, which were announced"
    with Group(2) as group:

        def case(device: SyncDevice) -> None:
            own = group.leaves[device.rank]
            if device.rank == 0:
                device.announce([loss := loss_of(own[0], 1.0), loss_of(own[1], 1.0)])
                loss.backward()
                with pytest.raises(FusedReduceError, match=said) as raised:
                    device.sync() if syncs else device.announce(None)
                assert not any(word in str(raised.value) for word in ("find_unused", "wrapper", "reset", "rank"))
            else:
                with pytest.raises(CollectiveError, match=f"epoch 1 was given up: device 0 raised .*{said}"):
                    device.backward(loss_of(own[0], 1.0))

        group.server.run(case)
        group.works()


# Launching: rows 0.22, 0.24 to 0.29


def test_row_0_22_a_fast_device_does_not_wait_with_its_gradients(threads: ThreadPoolExecutor) -> None:
    """Upstream, nothing is launched before the slowest device's forward is done."""
    with Group(2) as group:
        group.works()
        fast = group.devices[0]
        done = threads.submit(fast.backward, loss_of(group.leaves[0][0], 1.0))
        until_launched(fast)
        assert group.devices[1].state is DeviceState.IDLE and not done.done()
        group.devices[1].backward(None)
        done.result(20)


def test_row_0_24_one_order_whatever_the_order_of_readiness() -> None:
    """Four buckets, ready in another order on each device, 20 times: collectives that met wrongly would be refused."""
    dtypes = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    source = random.Random(0)
    own = [[leaf for dtype in dtypes for leaf in leaves(3, dtype=dtype)] for _ in range(3)]
    orders = [[source.sample(range(4), 4) for _ in range(20)] for _ in range(3)]
    with SyncServer(3, timeout_s=20) as server:
        for rank in range(3):
            server.device(rank, named(own[rank]))

        def case(device: SyncDevice) -> None:
            mine = own[device.rank]
            for epoch, order in enumerate(orders[device.rank]):
                for leaf in mine:
                    leaf.grad = None
                losses = [loss_of(mine[index], 3.0 * (index + epoch + device.rank)) for index in range(4)]
                device.announce(losses)
                for index in order:
                    losses[index].backward()
                device.sync()
                assert values(mine) == [3.0 * (index + epoch + 1) for index in range(4)]
            assert int(device.reducer.stats()["buckets_reduced"]) == 4

        server.run(case)


def test_row_0_25_nobody_is_released_before_all_is_there(threads: ThreadPoolExecutor) -> None:
    """Upstream, a moment between two parameters may look like the end."""
    with Group(2) as group:
        group.works()
        losses = [[loss_of(own[0], 2.0), loss_of(own[1], 2.0)] for own in group.leaves]
        for device, own in zip(group.devices, group.leaves, strict=True):
            own[0].grad = own[1].grad = None
            device.announce(losses[device.rank])
        losses[1][0].backward()

        def ends() -> None:
            for loss in losses[0]:
                loss.backward()
            group.devices[0].sync()

        first = threads.submit(ends)
        time.sleep(0.1)
        assert not first.done(), "device 1 has not given b"
        losses[1][1].backward()
        group.devices[1].sync()
        first.result(20)
        assert [values(own) for own in group.leaves] == [[2.0, 2.0]] * 2


def test_row_0_28_strides_and_complex_numbers() -> None:
    def make() -> Leaves:
        return [
            torch.zeros(3, 4).t().requires_grad_(),
            torch.zeros(2, dtype=torch.complex64, requires_grad=True),
            torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last).requires_grad_(),
        ]

    torch.manual_seed(0)
    own = [make() for _ in range(2)]
    given = [[torch.randn_like(leaf) for leaf in mine] for mine in own]
    with SyncServer(2) as server:
        for rank in range(2):
            server.device(rank, named(own[rank]))

        def case(device: SyncDevice) -> None:
            mine = given[device.rank]
            device.backward(
                sum((leaf * one.conj()).real.sum() for leaf, one in zip(own[device.rank], mine, strict=True))  # type: ignore[arg-type]
            )

        server.run(case)
    for index in range(3):
        expected = given[0][index] / 2 + given[1][index] / 2
        for mine in own:
            assert_equal(mine[index].grad, expected)


# Ending: rows 0.34 to 0.38


def test_row_0_36_an_epoch_begins_before_the_last_one_is_synced_everywhere(threads: ThreadPoolExecutor) -> None:
    """Upstream, device 1's sync wipes out what device 0 has announced: both wait for ever."""
    with Group(2, timeout_s=5.0) as group:
        group.works()
        for epoch in range(20):
            ahead = epoch % 2
            losses = [loss_of(own[0], 2.0 * (epoch + rank)) for rank, own in enumerate(group.leaves)]
            for own in group.leaves:
                own[0].grad = None
            for device in group.devices:
                device.announce(losses[device.rank])
            for future in [threads.submit(loss.backward) for loss in losses]:
                future.result(20)
            group.devices[ahead].sync()
            group.leaves[ahead][0].grad = None
            loss = loss_of(group.leaves[ahead][0], 8.0)
            early = threads.submit(group.devices[ahead].backward, loss)  # begins epoch e + 1 ...
            while group.devices[ahead].epoch == group.devices[1 - ahead].epoch:
                time.sleep(1e-4)
            group.devices[1 - ahead].sync()  # ... before the other has ended epoch e
            assert values(group.leaves[1 - ahead])[0] == 2.0 * epoch + 1
            group.leaves[1 - ahead][0].grad = None
            group.devices[1 - ahead].backward(None)
            early.result(20)
            assert [values(own)[0] for own in group.leaves] == [4.0, 4.0]


def test_row_0_37_a_sync_before_anything_is_there_releases_nobody(threads: ThreadPoolExecutor) -> None:
    with Group(2) as group:
        group.works()
        group.leaves[0][0].grad = group.leaves[1][0].grad = None
        group.devices[0].announce(None)
        waits = threads.submit(group.devices[0].sync)
        time.sleep(0.1)
        assert not waits.done(), "device 1 has announced nothing yet"
        group.devices[1].backward(loss_of(group.leaves[1][0], 4.0))
        waits.result(20)
        assert values(group.leaves[0])[0] == 2.0


@pytest.mark.parametrize("first", [True, False], ids=["first epoch", "later"])
def test_row_0_38_who_never_announces_is_named_in_time_and_may_come_back(
    threads: ThreadPoolExecutor, first: bool
) -> None:
    with Group(3) as group:
        if not first:
            group.works()
        epoch = group.devices[0].epoch + 1
        group_of(group.server).timeout_s = HANGS_S
        began_s = time.monotonic()
        waiting = [
            threads.submit(group.devices[0].backward, loss_of(group.leaves[0][0], 1.0)),
            threads.submit(group.devices[1].backward, None),
        ]
        for future in waiting:
            text = caught(future)
            assert f"epoch {epoch} was given up: " in text and f"device 2 has not announced epoch {epoch}" in text
            assert "w cannot be averaged" in text or first
        assert time.monotonic() - began_s < 20.0, "not the timeout of before"
        group_of(group.server).timeout_s = 20.0
        with pytest.raises(
            CollectiveError, match=f"device 2: epoch {epoch} was given up: .*device 2 has not announced"
        ):
            group.devices[2].announce(None)
        group.works()


def test_row_0_38_missing_gradients_are_named(threads: ThreadPoolExecutor) -> None:
    with Group(2) as group:
        group.works()
        group_of(group.server).timeout_s = HANGS_S
        group.devices[1].announce([loss_of(one, 1.0) for one in group.leaves[1]])
        waits = threads.submit(group.devices[0].backward, loss_of(group.leaves[0][0], 1.0))
        assert "epoch 2 was given up: device 1 has not produced the gradients of w, b" in caught(waits)
        with pytest.raises(CollectiveError, match="device 1: epoch 2 was given up"):
            group.devices[1].sync()
        group_of(group.server).timeout_s = 20.0
        group.works()
        group_of(group.server).timeout_s = HANGS_S
        group.devices[1].announce(None)
        waits = threads.submit(group.devices[0].backward, loss_of(group.leaves[0][0], 1.0))
        assert "device 1 announced nothing, and has not called sync" in caught(waits)
        group_of(group.server).timeout_s = 20.0
        with pytest.raises(CollectiveError, match="device 1: epoch 4 was given up"):
            group.devices[1].sync()
        group.works()


def test_row_0_38_a_device_that_was_never_started(threads: ThreadPoolExecutor) -> None:
    with SyncServer(2, timeout_s=HANGS_S) as server:
        own = leaves(3)
        waits = threads.submit(server.device(0, named(own)).backward, loss_of(own[0], 1.0))
        assert "device 1 is not started" in caught(waits)


def test_epochs_that_were_lost_are_each_told() -> None:
    """Of a device that slept through several: its n-th epoch is the n-th of the others."""
    with Group(2) as group:
        group.works()
        for epoch in (2, 3, 4):
            group.devices[0].abort(ZeroDivisionError(f"planted {epoch}"))
        for epoch in (2, 3, 4):
            with pytest.raises(CollectiveError, match=f"epoch {epoch} was given up: device 0 raised .*planted {epoch}"):
                group.devices[1].announce(None)
        group.works()
        group.works()
        assert not epochs_of(group.server).failures


def test_a_plain_backward_that_failed_is_recovered_from_by_the_next_announce(threads: ThreadPoolExecutor) -> None:
    with Group(2) as group:
        group.works()
        loss = loss_of(group.leaves[0][0], 1.0)
        group.devices[0].announce(loss)
        waits = threads.submit(loss.backward)
        time.sleep(0.02)
        group.devices[1].abort(ZeroDivisionError("planted"))
        assert "planted" in caught(waits)
        group.works()


def test_closing(threads: ThreadPoolExecutor) -> None:
    """After the last epoch: nobody raises, until they begin another."""
    with Group(2) as group:
        group.works()
        losses = [loss_of(own[0], 1.0) for own in group.leaves]
        for device, loss in zip(group.devices, losses, strict=True):
            device.announce(loss)
        for future in [threads.submit(loss.backward) for loss in losses]:
            future.result(20)
        group.devices[1].sync()
        group.devices[1].close()
        group.devices[0].sync()
        with pytest.raises(CollectiveError, match="device 1 is closed"):
            group.devices[0].announce(None)
        group.devices[1] = group.start(1)
        group.works()


# Beside the rows


def test_row_0_43_no_sync_keeps_gradients_here_until_the_next_epoch() -> None:
    with Group(2) as group:

        def case(device: SyncDevice) -> list[float | None]:
            own = group.leaves[device.rank]
            for _ in range(3):
                for one in own:
                    one.grad = None
                with device.no_sync():
                    loss_of(own[device.rank], 6.0).backward()
                assert values(own)[device.rank] == 6.0 and values(own)[1 - device.rank] is None
                device.announce(None)
                with pytest.raises(FusedReduceError, match="no_sync.. between"), device.no_sync():
                    pass
                device.sync()
            return values(own)

        assert group.server.run(case) == [[3.0, 3.0]] * 2


@pytest.mark.parametrize(("wire", "mean"), [("native", 1 + 2.0**-10), ("bf16", 1.0)])
def test_settings_reach_the_reducer(wire: Any, mean: float) -> None:
    """bf16 rounds each half down."""
    with Group(2, config=ReduceConfig(wire=wire), caps=BucketCaps(first_bytes=4, cap_bytes=4)) as group:
        loss = lambda own: loss_of(own[0], 1 + 2.0**-10)  # noqa: E731
        assert group.step(loss, loss) == [[mean, None]] * 2
        assert group.devices[0].reducer.stats()["buckets_reduced"] == 2


def test_the_bucket_size_changes_between_epochs(threads: ThreadPoolExecutor) -> None:
    """Also after an epoch that was given up, and for a device that is started again."""
    with Group(2, caps=BucketCaps(cap_bytes=10**6)) as group:

        def buckets() -> list[int]:
            return [len(device.reducer.plan) for device in group.devices]

        group.works()
        assert buckets() == [1, 1]
        group.server.set_bucket_size(1)
        assert buckets() == [1, 1], "from the next epoch on"
        group.works()
        assert buckets() == [2, 2]
        first, second = group.devices
        first.announce(loss := loss_of(group.leaves[0][0], 1.0))
        with pytest.raises(FusedReduceError, match=r"device 0 is in an epoch.*after sync\(\) of every device"):
            group.server.set_bucket_size(10**6)
        assert second.caps == BucketCaps.of(1)
        waits = threads.submit(loss.backward)
        second.abort(ValueError("enough"))
        assert "enough" in caught(waits)
        second.close()
        group.server.set_bucket_size(10**6)
        group.devices[1] = group.start(1)
        group.works()
        assert buckets() == [1, 1]
        with pytest.raises(ValueError, match="at least 1 byte"):
            group.server.set_bucket_size(0)
    with pytest.raises(FusedReduceError, match="closed"):
        group.server.set_bucket_size(1)
    planned = SyncServer(1, config=ReduceConfig(plan="{}"))
    with planned as server, pytest.raises(ValueError, match="exclude each other"):
        server.set_bucket_size(1)


def test_nothing_is_left_after_close() -> None:
    def count() -> tuple[int, int]:
        scalar.cache_clear()  # constants, kept from their first use on
        gc.collect()
        return threading.active_count(), sum(isinstance(one, torch.Tensor) for one in gc.get_objects())

    before = count()
    machine = Machine()
    spare = [random_attempt(random.Random(1)) for _ in range(WORLD)]
    source = random.Random(0)
    machine.run([random_round(source, troubled=epoch % 5 == 4) for epoch in range(20)], spare)
    parameters = machine.parameters
    gone = [weakref.ref(one) for one in (machine.server, group_of(machine.server), *machine.devices)]
    gone += [weakref.ref(device.reducer) for device in machine.devices]
    nodes = [torch.autograd.graph.get_gradient_edge(one).node for mine in parameters for one in mine]
    machine.close()
    del machine
    gc.collect()
    assert [one() for one in gone] == [None] * len(gone)
    for node in nodes:
        handles: list[Any] = [node.register_hook(lambda *_: None), node.register_prehook(lambda _: None)]
        for handle in handles:
            handle.remove()
            assert not handle.hooks_dict_ref(), "a hook is left"
        del handle, handles
    del parameters, nodes, node
    assert count() == before


def test_a_server_that_nobody_closes_goes_all_the_same() -> None:
    group = Group(2)
    group.works()
    gone = weakref.ref(group.server)
    own = group.leaves[0]
    del group
    gc.collect()
    assert gone() is None
    own[0].grad = None
    loss_of(own[0], 5.0).backward()
    assert values(own)[0] == 5.0
    Reducer(own, group_of(SyncServer(1)).communicator(0)).close()


# Random programs

_ANNOUNCES = st.none() | st.sets(st.sampled_from(range(3))).map(lambda chosen: tuple(sorted(chosen)))
_VALUES = st.integers(-1000, 1000).map(lambda value: WORLD * value)


def _attempts(*kinds: Kind) -> st.SearchStrategy[Attempt]:
    return st.builds(Attempt, st.sampled_from(kinds), _ANNOUNCES, _VALUES)


_FULL = st.tuples(*[_attempts(Kind.FULL)] * WORLD)
_ROUNDS = st.one_of(_FULL, st.tuples(*[_attempts(Kind.FULL, *RAISES)] * WORLD))
# Of one of three devices: closing, or coming late, beside two that do all of it.
_ONE_ODD = {
    kind: st.builds(
        lambda rank, odd, full: (*full[:rank], odd, *full[rank + 1 :]), st.integers(0, 2), _attempts(kind), _FULL
    )
    for kind in (Kind.CLOSES, Kind.LATE)
}


class Interleavings(RuleBasedStateMachine):
    """Three devices, whose calls begin in an order that hypothesis chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = Turns()
        self.machine = Machine(lambda rank: self.turns.take(rank))

    @rule(
        rounds=st.lists(_ROUNDS, min_size=1, max_size=3),
        spare=_FULL,
        order=st.lists(st.integers(0, WORLD - 1), max_size=24),
    )
    def together(self, rounds: list[Round], spare: Round, order: list[int]) -> None:
        self.turns = Turns(order)
        self.machine.run(rounds, spare)

    @rule(one=_ONE_ODD[Kind.CLOSES], spare=_FULL, order=st.lists(st.integers(0, WORLD - 1), max_size=12))
    def one_closes(self, one: Round, spare: Round, order: list[int]) -> None:
        self.turns = Turns(order)
        self.machine.run([one], spare)

    @rule(one=_ONE_ODD[Kind.LATE], spare=_FULL)
    def one_is_late(self, one: Round, spare: Round) -> None:
        self.turns = Turns()
        self.machine.run([one], spare)

    def teardown(self) -> None:
        self.machine.close()


def test_interleavings() -> None:
    threads = threading.active_count()
    run_state_machine_as_test(Interleavings, settings=settings(sweep.sweep(30), stateful_step_count=6))
    assert threading.active_count() == threads


@pytest.mark.full
def test_ten_thousand_random_steps_with_threads_that_sleep() -> None:
    done, source = 0, random.Random(7)
    threads = threading.active_count()
    machine = Machine(Sleeps(7))
    while done < 10_000:
        rounds = [random_round(source, troubled=source.random() < 0.05) for _ in range(200)]
        spare = [random_attempt(source) for _ in range(WORLD)]
        machine.run(rounds, spare)
        done += sum(map(len, programs(rounds, spare)))
    machine.close()
    assert threading.active_count() == threads


def test_random_steps_where_no_backward_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA: backward ends with everything under way, and sync() waits."""
    monkeypatch.setattr(LocalCommunicator, "waits_in_backward", lambda self, device: False)
    source, machine = random.Random(11), Machine(Sleeps(11))
    loss = loss_of(machine.parameters[0][0], 3.0)
    with ThreadPoolExecutor(WORLD) as pool:
        for future in [pool.submit(device.announce, loss if device.rank == 0 else None) for device in machine.devices]:
            future.result(20)
    loss.backward()  # in this thread, and nobody else has come
    assert machine.parameters[0][0].grad is not None
    with pytest.raises(FusedReduceError, match="a second backward before sync"):
        loss_of(machine.parameters[0][0], 1.0).backward()
    assert values(machine.parameters[0])[0] == 3.0
    machine.server.run(lambda device: device.sync())
    assert [values(one)[0] for one in machine.parameters] == [1.0] * WORLD
    for _ in range(2):
        spare = [random_attempt(source) for _ in range(WORLD)]
        # Of two that give up, one that has launched does not hear of the other, and gives up the next epoch as well.
        rounds = [random_round(source, troubled=source.random() < 0.2, several=False) for _ in range(50)]
        machine.run(rounds, spare)
    machine.close()


def test_eight_devices_on_one(device: torch.device) -> None:
    """On a GPU their backwards share one thread of autograd."""
    world, steps = 8, pick(device, cpu=8, cuda=20)
    parameters = [[one.to(device).detach().requires_grad_() for one in leaves(5, 3)] for _ in range(world)]
    with SyncServer(world, op="sum", timeout_s=20) as server:
        for rank in range(world):
            server.device(rank, named(parameters[rank]))

        def case(one: SyncDevice) -> None:
            own = parameters[one.rank]
            for step in range(steps):
                for leaf in own:
                    leaf.grad = None
                expected = float(sum(rank + step for rank in range(world) if rank != step % world))
                with own_stream(device):
                    one.backward(None if one.rank == step % world else loss_of(own[step % 2], one.rank + step))
                    assert values(own) == ([expected, None] if step % 2 == 0 else [None, expected])

        server.run(case)
