"""A Reducer in asynchronous mode on ranks that are threads of this process, or that one thread drives."""

from __future__ import annotations

import copy
import io
import random
import time
from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.inside import inside, take_torch_path
from support.leaf_steps import clear
from support.timeouts import PATIENT_S
from torch import nn
from torch.optim import SGD

from fusedreduce import ReduceConfig, Reducer
from fusedreduce.buckets.parameters import Parameters
from fusedreduce.buckets.reduction import Members
from fusedreduce.buckets.stats.grad_stats import GradStats
from fusedreduce.buckets.wire_table import WireTable
from fusedreduce.comm.group import Group
from fusedreduce.comm.local.group import LocalCommunicator, LocalGroup
from fusedreduce.comm.protocol import Communicator, Pending
from fusedreduce.config import Asynchronous, BoundedStaleness, Synchronous, SyncMode
from fusedreduce.errors import AgreementError, CollectiveError, FusedReduceError
from fusedreduce.planning.bucketing import BucketCaps
from fusedreduce.reducer.modes.asynchronous import AsynchronousMode
from fusedreduce.reducer.modes.gradient_stash import GradientStash
from fusedreduce.reducer.modes.mode import DelayedAverages
from fusedreduce.reducer.state import ReducerState


def model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def loss_of(module: nn.Module, generator: torch.Generator) -> torch.Tensor:
    inputs = torch.randn(4, 8, generator=generator)
    loss: torch.Tensor = module(inputs).square().mean()
    return loss


def config(max_in_flight: int = 2, **options: Any) -> ReduceConfig:
    return ReduceConfig(sync_mode=Asynchronous(max_in_flight), **options)


@pytest.mark.parametrize(
    ("world", "overlap"), [(1, True), (3, True), (3, False), pytest.param(8, True, marks=pytest.mark.full)]
)
def test_ranks_that_sleep_at_random_end_alike(world: int, overlap: bool) -> None:
    template = model()

    def train(communicator: Communicator) -> tuple[list[torch.Tensor], float, dict[str, int | str]]:
        module = copy.deepcopy(template)
        optimizer = SGD(module.parameters(), lr=0.02)
        chance = random.Random(communicator.rank)
        generator = torch.Generator().manual_seed(communicator.rank)
        with Reducer(module.parameters(), communicator, config(overlap=overlap)) as reducer:
            drift = 0.0
            for turn in range(3):
                for _ in range(chance.randrange(4, 12)):
                    loss = loss_of(module, generator)
                    if chance.random() < 0.2:
                        with reducer.no_sync():
                            reducer.prepare_for_backward(loss)
                            loss.backward()
                        loss = loss_of(module, generator)
                    reducer.prepare_for_backward(loss)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=turn != 1)
                    if chance.random() < 0.1:
                        time.sleep(0.003)
                drift = max(drift, reducer.flush(optimizer).relative_drift)
            return [one.detach() for one in module.parameters()], drift, reducer.stats()

    with LocalGroup(world, timeout_s=PATIENT_S) as group:
        found = group.run(train)
    for parameters, drift, stats in found:
        assert all(map(torch.equal, parameters, found[0][0])) and drift < 1e-5
        assert stats["contributions"] == found[0][2]["contributions"] and stats["contributions_under_way"] == 0
        assert int(stats["collectives"]) == 0, "none but the contributions'"
        assert int(stats["wire_allocations"]) <= 2 * int(stats["buckets"])


def test_with_one_thread_for_all_ranks_no_backward_waits() -> None:
    modules = [model(), model()]
    with LocalGroup(2, timeout_s=PATIENT_S, one_thread=True) as group:
        reducers = [
            Reducer(module.parameters(), group.communicator(rank), config(1), agreed=True)
            for rank, module in enumerate(modules)
        ]
        generator = torch.Generator().manual_seed(1)
        for _ in range(4):
            for module, reducer in zip(modules, reducers, strict=True):
                loss = loss_of(module, generator)
                reducer.prepare_for_backward(loss)
                loss.backward()
                assert reducer.state.value == "idle"
        # The second rank's contribution meets the first's at once; the first hears of it in its next step.
        assert [one.stats()["contributions"] for one in reducers] == [4, 4]
        assert [one.stats()["contributions_under_way"] for one in reducers] == [1, 0]
        began = time.monotonic()
        with pytest.raises(CollectiveError, match="not every rank called flush"):
            reducers[0].flush()
        assert time.monotonic() - began < PATIENT_S / 2
        with pytest.raises(FusedReduceError, match="set_communicator"):
            reducers[0].prepare_for_backward()
        for reducer in reducers:
            reducer.close()


def test_what_it_does_not_go_with_is_refused() -> None:
    with LocalGroup(1) as group:
        parameters = list(model().parameters())
        communicator = group.communicator(0)
        cases: list[tuple[dict[str, Any], str]] = [
            ({"wire": "fp16"}, "fp16"),
            ({"check_finite": "raise"}, "check_finite"),
        ]
        for options, text in cases:
            with pytest.raises(ValueError, match=text):
                Reducer(parameters, communicator, config(**options))
        with pytest.raises(ValueError, match="the sparse gradients of parameter 1 and sync_mode=Asynchronous"):
            Reducer(parameters, communicator, config(), sparse=[False, True, False, False])
        with Reducer(parameters, communicator, config()) as reducer:
            with pytest.raises(ValueError, match="divisor"):
                reducer.prepare_for_backward(divisor=3.0)
            reducer.set_sync_mode(BoundedStaleness(1))
            reducer.set_sync_mode(Asynchronous())
        with pytest.raises(FusedReduceError, match="closed"):
            reducer.flush()


# What one rank cannot do nobody does, and nobody waits for it


def prepared(communicator: Communicator, mode: SyncMode, **options: Any) -> tuple[Reducer, list[torch.Tensor]]:
    parameters = [torch.zeros(3, requires_grad=True), torch.zeros(5, requires_grad=True)]
    return Reducer(parameters, communicator, ReduceConfig(sync_mode=mode, **options)), parameters


def backward(reducer: Reducer, parameters: list[torch.Tensor], value: float) -> None:
    loss = torch.stack([(value * parameter).sum() for parameter in parameters]).sum()
    reducer.prepare_for_backward(loss)
    loss.backward()


def first_of(parameters: list[torch.Tensor]) -> list[float]:
    return [parameter.grad[0].item() for parameter in parameters if parameter.grad is not None]


def test_flush_while_one_rank_has_gradients_of_no_sync_is_refused_by_all_at_once() -> None:
    def case(communicator: Communicator) -> str:
        reducer, parameters = prepared(communicator, Asynchronous())
        with reducer:
            backward(reducer, parameters, 1.0 + communicator.rank)
            given = first_of(parameters)[0]
            clear(parameters)
            if communicator.rank == 1:
                with reducer.no_sync():
                    backward(reducer, parameters, 7.0)
            with pytest.raises(FusedReduceError, match="rank 1: flush\\(\\) while gradients") as caught:
                reducer.flush()
            assert reducer.state is ReducerState.IDLE
            clear(parameters)
            reducer.flush()
            assert [given + more for more in first_of(parameters) or [0.0] * 2] == [1.5, 1.5], "nothing was lost"
            return str(caught.value)

    began = time.monotonic()
    with LocalGroup(2, timeout_s=PATIENT_S) as group:
        assert len(set(group.run(case))) == 1
    assert time.monotonic() - began < PATIENT_S / 2


def test_a_step_that_raises_in_flush_on_one_rank_is_told_to_all() -> None:
    def case(communicator: Communicator) -> None:
        reducer, parameters = prepared(communicator, Asynchronous())

        def step() -> None:
            if communicator.rank == 0:
                raise ZeroDivisionError("of mine")
            clear(parameters)

        with reducer:
            backward(reducer, parameters, 1.0)
            with pytest.raises(ZeroDivisionError if communicator.rank == 0 else AgreementError, match="of mine"):
                reducer.flush(step=step)
            assert reducer.state is ReducerState.IDLE
            clear(parameters)
            backward(reducer, parameters, 1.0)
            reducer.flush()

    began = time.monotonic()
    with LocalGroup(2, timeout_s=PATIENT_S) as group:
        group.run(case)
    assert time.monotonic() - began < PATIENT_S / 2


def driven(group: LocalGroup, dtype: torch.dtype = torch.float32) -> list[tuple[Reducer, list[torch.Tensor]]]:
    """Both ranks of a group that one thread drives, with a parameter each, and one contribution under way at most."""
    made = []
    for rank in range(group.size):
        parameters = [torch.zeros(3, dtype=dtype, requires_grad=True)]
        made.append((Reducer(parameters, group.communicator(rank), config(1), agreed=True), parameters))
    return made


def test_an_overflow_is_contributed_to_nobody() -> None:
    """Of a rank that is about to skip its step, under a loss scaler: what the others are given stays finite."""
    scaler = nn.Module()  # any object: what counts is that there is one
    with LocalGroup(2, timeout_s=PATIENT_S, one_thread=True) as group:
        (first, mine), (second, others) = driven(group)
        for one in (first, second):
            inside(one).loss_scale.attach(scaler)
        backward(first, mine, float("inf"))
        assert first.stats()["contributions"] == 0
        clear(mine)
        backward(second, others, 1.0)
        backward(first, mine, 3.0)
        clear(others)
        backward(second, others, 1.0)
        assert (first_of(mine), first_of(others)) == ([2.0], [2.0]), "1 and 3 have met"
        for one in (first, second):
            one.close()


def test_sums_of_fp16_gradients_travel_in_fp32() -> None:
    """A rank that is ahead sends the sum of many steps, which fp16 could not hold."""
    with LocalGroup(2, timeout_s=PATIENT_S, one_thread=True) as group:
        (ahead, mine), (behind, others) = driven(group, torch.float16)
        for _ in range(6):  # the first one is under way, five wait
            clear(mine)
            backward(ahead, mine, 20000.0)
        for value in (20000.0, 40000.0):
            clear(others)
            backward(behind, others, value)
        clear(mine)
        backward(ahead, mine, 0.0)
        assert first_of(mine) == [(5 * 20000.0 + 40000.0) / 2 - 5 * 20000.0]
        for one in (ahead, behind):
            one.close()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Synchronous(), BoundedStaleness(1)),
        (Synchronous(), Asynchronous()),
        (BoundedStaleness(1), Synchronous()),
        (BoundedStaleness(1), BoundedStaleness(2)),
        (Asynchronous(), Synchronous()),
        (Asynchronous(), BoundedStaleness(1)),
    ],
    ids=repr,
)
def test_gradients_of_no_sync_are_reduced_in_the_mode_that_follows(before: SyncMode, after: SyncMode) -> None:
    def case(communicator: Communicator) -> list[float]:
        reducer, parameters = prepared(communicator, before)
        with reducer:
            backward(reducer, parameters, 1.0 + communicator.rank)
            reducer.flush()
            clear(parameters)
            with reducer.no_sync():
                backward(reducer, parameters, 2.0 + 2 * communicator.rank)
            reducer.set_sync_mode(after)
            backward(reducer, parameters, 1.0 + communicator.rank)
            reducer.flush()
            return first_of(parameters)

    with LocalGroup(2, timeout_s=PATIENT_S) as group:
        assert group.run(case) == [[4.5, 4.5]] * 2


def test_reset_leaves_what_was_contributed() -> None:
    """In a step that an error of the user's has ended."""

    def case(communicator: Communicator) -> float:
        reducer, parameters = prepared(communicator, Asynchronous(1))
        with reducer:
            given = 0.0
            for number in range(4):
                backward(reducer, parameters, (1.0 + communicator.rank) * (number + 1))
                given += first_of(parameters)[0]
                clear(parameters)
            with parameters[0].register_hook(lambda gradient: 1 / 0), pytest.raises(ZeroDivisionError):
                backward(reducer, parameters, 100.0)
            reducer.reset()
            clear(parameters)
            reducer.flush()
            return given + (first_of(parameters) or [0.0])[0]

    with LocalGroup(2, timeout_s=PATIENT_S) as group:
        assert group.run(case) == [15.0, 15.0]


def test_a_step_with_nothing_of_this_rank_takes_part() -> None:
    def case(communicator: Communicator) -> list[float]:
        parameters = [torch.zeros(3, requires_grad=True), torch.zeros(5, requires_grad=True)]
        with Reducer(parameters, communicator, config(), find_unused_parameters=True) as reducer:
            if communicator.rank == 0:
                backward(reducer, parameters, 3.0)
            else:
                reducer.prepare_for_backward(torch.zeros(()))
                reducer.end_without_backward()
            reducer.flush()  # adds to what the step was given, which may be the peer's part already
            return first_of(parameters)

    with LocalGroup(2, timeout_s=PATIENT_S) as group:
        assert group.run(case) == [[1.5, 1.5]] * 2


def test_a_sum_is_a_sum() -> None:
    def case(communicator: Communicator) -> list[float]:
        reducer, parameters = prepared(communicator, Asynchronous(), op="sum")
        with reducer:
            backward(reducer, parameters, 2.0**communicator.rank)
            reducer.flush()
            return first_of(parameters)

    with LocalGroup(3, timeout_s=PATIENT_S) as group:
        assert group.run(case) == [[7.0, 7.0]] * 3


def test_contributions_have_wires_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    take_torch_path(monkeypatch)  # as elsewhere on CPU

    def case(communicator: Communicator) -> None:
        parameter = torch.zeros(600, 600, requires_grad=True)
        with Reducer([parameter], communicator, config()) as reducer:
            given = 0.0
            for number in range(6):
                parameter.grad = None
                backward(reducer, [parameter], float(communicator.rank + number))
                assert parameter.grad is not None
                given += parameter.grad[0, 0].item()
            parameter.grad = None
            reducer.flush()
            rest: torch.Tensor | None = parameter.grad
            assert given + (0.0 if rest is None else rest[0, 0].item()) == sum(0.5 + number for number in range(6))
            assert inside(reducer).wire_allocations == 0

    with LocalGroup(2, timeout_s=PATIENT_S) as group:
        group.run(case)


def test_a_checkpoint_gives_a_rank_what_it_is_owed_and_one_of_something_else_is_refused() -> None:
    template = model()

    def case(communicator: Communicator) -> None:
        def made(**options: Any) -> tuple[nn.Module, Reducer]:
            module = copy.deepcopy(template)
            reducer = Reducer(module.parameters(), communicator, config(), names=names, **options)
            return module, reducer

        names = [name for name, _ in template.named_parameters()]
        module, reducer = made()
        other, second = made(caps=BucketCaps(first_bytes=30, cap_bytes=30))
        for _ in range(1 + communicator.rank):  # so both are owed the average of one rank's second step
            loss = loss_of(module, torch.Generator().manual_seed(communicator.rank))
            reducer.prepare_for_backward(loss)
            loss.backward()
            module.zero_grad()
        state = reducer.state_dict()
        assert state["rank"] == communicator.rank and list(state["owed"]) == names
        with pytest.raises(FusedReduceError, match=r"outstanding: call flush\(\)"):
            reducer.load_state_dict(state)
        wrong = state["owed"]
        for change, text in (
            ({"rank": 1 - communicator.rank}, f"of rank {1 - communicator.rank}, here it is {communicator.rank}"),
            ({"world_size": 3}, "of world_size 3, here it is 2"),
            ({"mode": "staleness"}, "of mode 'staleness'"),
            ({"version": 9}, "of version 9"),
            ({"owed": None}, "damaged"),
            ({"owed": {**wrong, "other": None}}, "only one of them has other"),
            ({"owed": {name: wrong[name] for name in names[1:]}}, f"only one of them has {names[0]}"),
            ({"owed": {**wrong, names[1]: torch.zeros(5)}}, rf"{names[1]} is \(5,\)"),
        ):
            with pytest.raises(ValueError, match=text):
                second.load_state_dict({**state, **change})
            assert not second.pending()
        kept = io.BytesIO()
        torch.save(state, kept)
        kept.seek(0)
        second.load_state_dict(torch.load(kept, weights_only=True))
        for one in (reducer, second):
            one.flush()
            one.close()
        for mine, theirs in zip(module.parameters(), other.parameters(), strict=True):
            assert mine.grad is not None and theirs.grad is not None and torch.equal(mine.grad, theirs.grad)

    with LocalGroup(2, timeout_s=PATIENT_S) as group:
        group.run(case)


def test_the_channel_is_connected_for_every_device_before_it_is_used() -> None:
    """A collective of a device's would make the communicator for it, within a backward."""
    events: list[object] = []
    with LocalGroup(1) as group:
        channel: Any = group.communicator(0)

        class Recorded:
            rank, size = 0, 1

            def apart(
                self, devices: Collection[torch.device] = (), ranks: Sequence[int] | None = None
            ) -> LocalCommunicator:
                events.append(list(devices))
                issue = channel.all_reduce

                def recorded(tensor: torch.Tensor) -> Pending:
                    events.append("all_reduce")
                    pending: Pending = issue(tensor)
                    return pending

                channel.all_reduce = recorded
                made: LocalCommunicator = channel
                return made

        devices = [torch.device("cuda", 1), torch.device("cuda", 0)]
        parameters = [torch.zeros(3, requires_grad=True) for _ in range(4)]
        maker: Any = SimpleNamespace(
            parameters=SimpleNamespace(tensors=[SimpleNamespace(device=one) for one in devices]),
            group=Group(Recorded()),  # type: ignore[arg-type]
            wires=WireTable(("native",) * 4, "wire"),
            config=config(),
        )
        known = Parameters(tuple(parameters))
        own = AsynchronousMode(maker, 1, GradientStash(known), DelayedAverages())
        members = Members(0, tuple(range(4)), tuple(parameters), tuple("abcd"), True)
        buckets: Any = SimpleNamespace(
            reductions=[SimpleNamespace(members=members)],
            streams=None,
            packed=list,
        )
        own.set_buckets(buckets)
        own.open()
        own.open()
        assert events == [devices]
        for parameter in parameters:
            parameter.grad = torch.ones(3)
        observed = GradStats(known, maker.wires.wires, maker.config, Group(channel))
        steps: Any = SimpleNamespace(observed=observed, buckets=buckets, rounds=0)
        with torch.no_grad():
            own.end_step(steps, [])
        assert events == [devices, "all_reduce"]
