"""What goes wrong: collectives, kernels and backwards that fail, ranks that differ, and ranks without inputs."""

from __future__ import annotations

import dataclasses
import functools
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import raw_calls
from support.inside import before_buckets_are_built, inside
from support.leaf_steps import CAPS, assert_close, clear, given, leaves_all, shadow_step, sparse_like
from support.leaf_steps import step as leaf_step
from support.loopback import PEERS, Call, Counted, Loopback, ThreadWorld, constant
from support.rig import (
    LARGE,
    SMALL,
    Rig,
    assert_gradient,
    boom,
    drawn,
    drawn_like,
    loss_with,
    run,
    state_of,
)

from fusedreduce import AgreementError, BucketCaps, CollectiveError, FusedReduceError, ReduceConfig, Reducer
from fusedreduce.buckets.stats.non_finite import NonFiniteReport
from fusedreduce.comm.agreement import agree_on_parameters
from fusedreduce.comm.protocol import Communicator
from fusedreduce.config import Asynchronous
from fusedreduce.planning.plan import Plan
from fusedreduce.planning.plan_file import dump
from fusedreduce.reducer.state import ReducerState

pytestmark = pytest.mark.usefixtures("path")


# Failures


def _double(parameter: torch.Tensor, _: object) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2.0)


@pytest.mark.parametrize("failing", ["change", "wait"])
def test_of_two_reducers_that_fail_in_one_backward_the_first_error_is_raised(failing: str) -> None:
    """The other one has ended its step too, unless a collective has failed."""
    communicators = [Loopback(), Loopback()]
    reducers = [
        Reducer(drawn(((40,), (40,))), one, names=[f"{name}0", f"{name}1"], caps=CAPS)
        for one, name in zip(communicators, "ab", strict=True)
    ]
    for reducer, communicator in zip(reducers, communicators, strict=True):
        for _ in range(2):
            leaf_step(reducer, drawn_like(reducer.parameters))
            clear(reducer.parameters)
        if failing == "wait":
            communicator.fail_wait = communicator.count("all_reduce")
        else:  # a gradient that has been packed
            packed = reducer.parameters[1]
            reducer.parameters[0].register_post_accumulate_grad_hook(functools.partial(_double, packed))
    losses = [given(reducer.parameters, drawn_like(reducer.parameters)) for reducer in reducers]
    for reducer, loss in zip(reducers, losses, strict=True):
        reducer.prepare_for_backward(loss)
    error, text = (CollectiveError, r"bucket 0 \(b1\)") if failing == "wait" else (FusedReduceError, "gradient of b1")
    with pytest.raises(error, match=text):  # made last: its backward begins first
        (losses[0] + losses[1]).backward()
    other = ReducerState.ARMED if failing == "wait" else ReducerState.FAILED
    assert [reducer.state for reducer in reducers] == [other, ReducerState.FAILED]


@pytest.mark.parametrize("which", ["fail_issue", "fail_wait"])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_collective_that_fails_needs_a_new_group(which: str, number: int) -> None:
    rig = Rig(((3,), (4,), (LARGE,)), names=["a", "b", "c"], caps=BucketCaps(cap_bytes=8))
    rig.warm(2)
    setattr(rig.communicator, which, rig.communicator.count("all_reduce") + number)
    told: list[str] = []
    inside(rig.reducer).tell_of_errors(told.append)
    gradients = rig.draw()
    name = "cba"[number]
    with pytest.raises(CollectiveError, match=rf"rank 0: the all-reduce of bucket {number} \({name}\).*Connection"):
        rig.run(gradients)
    assert state_of(rig.reducer) is ReducerState.FAILED and len(told) == 1
    for index, (parameter, gradient) in enumerate(zip(rig.parameters, gradients, strict=True)):
        if parameter.grad is None:  # backward ended before it came to this one
            assert which == "fail_issue" and 2 - index > number
            continue
        reduced = torch.equal(parameter.grad, rig.communicator.mean(gradient))
        assert reduced or torch.equal(parameter.grad, gradient), f"{index}: neither reduced nor local"
        assert reduced == (which == "fail_wait" and 2 - index < number)
    with pytest.raises(FusedReduceError, match="process group cannot be used any more"):
        rig.reducer.prepare_for_backward()
    with pytest.raises(FusedReduceError, match="a collective failed, on ranks 0, 1, 2"):
        rig.reducer.reset()
    assert state_of(rig.reducer) is ReducerState.LOST
    with pytest.raises(FusedReduceError, match="process group cannot be used any more"):
        rig.reducer.prepare_for_forward()
    fresh = Loopback([constant(4.0)])
    rig.reducer.set_communicator(fresh)
    for _ in range(6):
        clear(rig.parameters)
        rig.run(gradients)
        rig.assert_mean(gradients)
    assert fresh.count("broadcast") == 1 and fresh.count("gather") == 2, "agreed and learned anew"
    assert rig.reducer.stats()["collectives"] == 1 + 5 * 3 + 1, "and the order"


def test_a_failing_agreement_or_broadcast_names_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(((3,), (4,)))

    def gone(*_: object) -> Any:
        raise RuntimeError("Connection closed by peer")

    with monkeypatch.context() as patch:
        patch.setattr(rig.communicator, "all_gather_bytes", gone)
        said = (
            "rank 0: comparing model and settings .*if a rank reduces with torch's own class: start .*Connection closed"
        )
        with pytest.raises(CollectiveError, match=said):
            rig.step()
    with pytest.raises(FusedReduceError, match=r"set_communicator\(\).* comparing model and settings"):
        rig.step()
    rig.communicator = Loopback()
    rig.reducer.set_communicator(rig.communicator)
    rig.step()
    with monkeypatch.context() as patch:
        patch.setattr(rig.communicator, "broadcast", gone)
        with pytest.raises(CollectiveError, match="rank 0: broadcasting the order of readiness failed"):
            rig.step()


@pytest.mark.parametrize(("stage", "views"), [("pack", False), ("pack", True), ("unpack", False)])
def test_a_kernel_that_fails_leaves_a_reducer_that_can_be_reset(
    views: bool, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(((3,), (4,), (LARGE,)), gradient_as_bucket_view=views, caps=BucketCaps(cap_bytes=8))
    rig.warm(2)
    gradients = rig.draw()

    def out_of_memory(*_: object, **__: object) -> None:
        raise MemoryError("out of memory")

    with monkeypatch.context() as patch:
        raw_calls.replace(patch, stage, out_of_memory)
        with pytest.raises(MemoryError):
            rig.run(gradients)
    assert state_of(rig.reducer) is ReducerState.FAILED
    for parameter, gradient in zip(rig.parameters, gradients, strict=True):
        if parameter.grad is not None:
            # What is a view of the wire is divided already.
            local = (
                gradient / rig.communicator.size if views and not torch.equal(parameter.grad, gradient) else gradient
            )
            assert_gradient(parameter.grad, local, "all local, not half written")
    with pytest.raises(FusedReduceError, match="MemoryError: out of memory"):
        rig.reducer.check_finalized()
    rig.reducer.reset()
    rig.communicator.under_way = 0  # what was given up is never waited for
    for _ in range(6):
        clear(rig.parameters)
        rig.run(gradients)
        rig.assert_mean(gradients)


def test_ranks_that_failed_at_different_places_all_learn_so_from_reset() -> None:
    """Each has issued the buckets before its own culprit: two, one and none."""

    def case(communicator: Communicator) -> None:
        parameters = drawn(((3,), (4,), (5,)))
        caps = BucketCaps(first_bytes=1, cap_bytes=1)
        reducer = Reducer(parameters, communicator, ReduceConfig(policy="static"), caps=caps)
        for _ in range(3):
            run(reducer, drawn_like(parameters))
            clear(parameters)
        parameters[communicator.rank].register_hook(boom)
        with pytest.raises(ZeroDivisionError):
            run(reducer, drawn_like(parameters))
        with pytest.raises(FusedReduceError) as caught:
            reducer.reset()
        assert state_of(reducer) is ReducerState.LOST
        raise caught.value

    found = []
    for rank, error in enumerate(ThreadWorld(3).run(case)):
        assert isinstance(error, FusedReduceError) and str(error).startswith(f"rank {rank}: the process group cannot")
        told = re.search(r"different numbers of collectives, by rank: \['(\d+)', '(\d+)', '(\d+)'\]$", str(error))
        assert told is not None, error
        found.append([int(number) for number in told.groups()])
    assert found[1:] == found[:2] and found[0] == [found[0][2] + 2, found[0][2] + 1, found[0][2]]


def _set_bucket_size(reducer: Reducer) -> None:
    reducer.set_bucket_size(1_000_000)
    reducer.prepare_for_forward()


# By what builds buckets: settings, steps before it, and the call.
BUILDS: dict[str, tuple[ReduceConfig, int, Callable[[Reducer], object]]] = {
    "order of readiness": (ReduceConfig(policy="static"), 1, Reducer.prepare_for_forward),
    "encoded at last": (ReduceConfig(policy="static", wire="int8", wire_after=4), 4, Reducer.prepare_for_forward),
    "bucket size": (ReduceConfig(), 4, _set_bucket_size),
    "static graph": (ReduceConfig(policy="static"), 0, Reducer.set_static_graph),
    "comm hook": (ReduceConfig(), 4, lambda reducer: reducer.register_comm_hook(None, leaves_all)),
    "reset": (ReduceConfig(wire="bf16"), 4, Reducer.reset),
    "group": (ReduceConfig(wire="int8"), 4, lambda reducer: reducer.set_communicator(reducer.communicator)),
}


@pytest.mark.parametrize("build", BUILDS)
def test_a_build_that_raises_on_one_rank_is_said_and_mended_by_reset(
    build: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else that rank would go on with its old buckets, which may have another plan, and another wire, than its peers'.

    What each rank has to reduce is the same, so that the averages are known whatever the wire.
    """
    config, steps, call = BUILDS[build]
    scarce = threading.local()

    def allocate() -> None:
        if getattr(scarce, "now", False):
            raise MemoryError("no room")

    before_buckets_are_built(monkeypatch, allocate)

    def case(communicator: Communicator) -> tuple[Any, ...]:
        parameters = [torch.zeros(shape, requires_grad=True) for shape in ((100, 40), (100, 40), (5,))]
        gradients = [torch.full_like(one, 2.0) for one in parameters]
        caps = BucketCaps(first_bytes=100 * 40 * 4, cap_bytes=100 * 40 * 4)
        reducer = Reducer(parameters, communicator, config, caps=caps)

        for _ in range(steps):
            run(reducer, gradients, [0, 1, 2])
            clear(parameters)
        if communicator.rank == 1:
            scarce.now = True
            with pytest.raises(MemoryError, match="no room"):
                call(reducer)
            assert state_of(reducer) is ReducerState.FAILED
            with pytest.raises(FusedReduceError, match="call reset.. on every rank. MemoryError: no room"):
                run(reducer, gradients)
            scarce.now = False
        else:
            call(reducer)
        reducer.reset()
        for _ in range(3):
            run(reducer, gradients)
            for one in parameters:
                assert one.grad is not None
                assert_close([one.grad.amin(), one.grad.amax()], [2.0, 2.0])
            clear(parameters)
        return reducer.plan, inside(reducer).wires_in_use, [type(one).__name__ for one in inside(reducer).buckets]

    first, other = ThreadWorld(2).results(case)
    assert first == other


def test_reset_compares_how_far_each_rank_has_come() -> None:
    rig = Rig(((3,),))
    rig.step()
    rig.reducer.reset()
    assert state_of(rig.reducer) is ReducerState.IDLE
    rig.communicator.aside = lambda text: [text, "7 whole", text]
    with pytest.raises(FusedReduceError, match=r"different numbers of collectives, by rank: \['1', '7', '1'\]"):
        rig.reducer.reset()
    assert state_of(rig.reducer) is ReducerState.LOST
    rig.communicator.aside = lambda text: [text, text, text]
    with pytest.raises(FusedReduceError, match="a collective failed, on ranks 0, 1, 2. ranks have issued different"):
        rig.reducer.reset()
    keys = [call.kind for call in rig.communicator.calls if call.kind.startswith("aside")]
    assert len(set(keys)) == len(keys) == 3, "a key is never used twice"

    other = Loopback()
    other.aside = lambda text: [text, text.replace("whole", "failed"), text]
    rig.reducer.set_communicator(other)
    with pytest.raises(FusedReduceError, match="a collective failed, on ranks 1"):
        rig.reducer.reset()

    def late(_: str) -> list[str]:
        raise RuntimeError("timed out")

    third = Loopback()
    third.aside = late
    rig.reducer.set_communicator(third)
    with pytest.raises(FusedReduceError, match=r"not every rank called reset\(\) in time: timed out"):
        rig.reducer.reset()


def test_after_reset_ranks_number_their_steps_alike() -> None:
    """A rank that has raised alone has not ended the step that its peers have."""

    def case(communicator: Communicator) -> tuple[int, NonFiniteReport]:
        parameters = drawn(((40,), (40,)))
        config = ReduceConfig(wire="int8", stochastic_rounding=True, check_finite="count", policy="static")
        reducer = Reducer(parameters, communicator, config, caps=CAPS)
        ones = [torch.ones_like(one) for one in parameters]
        for _ in range(2):
            leaf_step(reducer, ones)
            clear(parameters)
        if communicator.rank == 1:
            change = functools.partial(_double, parameters[1])
            handle = parameters[0].register_post_accumulate_grad_hook(change)
            with pytest.raises(FusedReduceError, match="was written to"):
                leaf_step(reducer, ones)
            handle.remove()
        else:
            leaf_step(reducer, ones)
        reducer.reset()
        clear(parameters)
        gradients = drawn_like(parameters)
        gradients[0][communicator.rank] = float("nan")
        leaf_step(reducer, gradients)
        (report,) = inside(reducer).statistics.finite_check().reports
        return reducer.state_dict()["rounds"], report

    for rounds, report in ThreadWorld(3).results(case):
        assert (rounds, report.step) == (4, 4)
        assert report.reduced == ("parameter 0",) and len(report.culprits) == 3


def test_in_a_new_group_resets_are_counted_anew() -> None:
    """Ranks meet there by the count, and one that is new to all of them has reset nothing yet."""
    old, group, fresh = Loopback(), Loopback(), Loopback()
    reducer = Reducer(drawn(((3,),)), old)
    for _ in range(2):
        reducer.reset()
    reducer.set_communicator(group)
    reducer.reset()
    Reducer(drawn(((3,),)), fresh).reset()
    assert old.count("aside reset 2") == 1
    assert [call.kind for call in group.calls] == [call.kind for call in fresh.calls] == ["aside reset 1"]


def test_reset_forgets_the_divisor_and_the_futures_of_the_step_that_was_given_up() -> None:
    rig = Rig(((3,), (4,)))
    failed: torch.futures.Future[Any] = torch.futures.Future()
    failed.set_exception(ValueError("of the step that was given up"))
    inside(rig.reducer).divide_by_ranks_counted(Counted(1.0))
    inside(rig.reducer).wait_at_end([failed])
    rig.reducer.reset()
    gradients = rig.step()
    rig.assert_mean(gradients)


def test_reset_drops_gradients_that_a_collective_may_still_write() -> None:
    rig = Rig(((3,), (4,)), gradient_as_bucket_view=True)
    rig.step()
    rig.reducer.reset()
    assert [parameter.grad for parameter in rig.parameters] == [None, None]
    rig.step()
    rig.communicator.aside = lambda text: [text, "7 whole", text]
    with pytest.raises(FusedReduceError, match="different numbers of collectives"):
        rig.reducer.reset()
    assert [parameter.grad for parameter in rig.parameters] == [None, None]


# Ranks without inputs


def _issued(inputs: int, **options: Any) -> tuple[list[Call], int]:
    """What a rank issues and counts in 25 steps, of which it has inputs for the first; its peers have for all."""
    parameters, communicator = drawn((*SMALL, (6, 2))), Loopback()
    count = len(parameters)
    communicator.order = lambda _: torch.arange(count).flip(0)
    kind = torch.tensor([0, 1, 0])  # sparse, of one sparse dimension, fp32
    communicator.gathered = lambda _, mine: kind if mine.numel() == len(kind) else mine
    sparse = [False] * (count - 1) + [True]
    # With "planned" what follows depends on numbers that all ranks share, and here are this rank's own.
    config = ReduceConfig(policy="ready", check_finite="count")
    with Reducer(parameters, communicator, config, caps=CAPS, sparse=sparse, **options) as reducer:
        for step in range(25):
            clear(parameters)
            if step < inputs:
                leaf_step(reducer, [*drawn_like(parameters[:-1]), sparse_like(parameters[-1], [1, 2])])
            else:
                shadow_step(reducer)
        return communicator.calls, int(reducer.stats()["collectives"])


@pytest.mark.parametrize("option", ["", "find_unused_parameters", "static_graph"])
def test_a_rank_without_inputs_issues_what_the_others_do_and_counts_it(option: str) -> None:
    """From any step on: before an order is known, before anybody has had a sparse gradient, among profiled steps.
    reset() compares these counts: where they differ it gives the group up."""
    options = {option: True} if option else {}
    wanted = _issued(25, **options)
    for inputs in (0, 1, 10):
        assert _issued(inputs, **options) == wanted, inputs


# Agreement across ranks


def _refused(communicator: Loopback, parameters: list[torch.Tensor], **options: Any) -> str:
    reducer = Reducer(parameters, communicator, **options)
    with pytest.raises(AgreementError) as caught:
        reducer.prepare_for_backward(loss_with(parameters, drawn_like(parameters)))
    reducer.close()
    assert isinstance(caught.value, ValueError) and communicator.count("all_reduce") == 0
    return str(caught.value)


@pytest.mark.parametrize(
    ("shapes", "dtypes", "words"),
    [
        ((((3,), (4,)), ((3,),)), (torch.float32,) * 2, "Rank 0 has 2 params, while rank 1 has inconsistent 1 params"),
        ((((3,), (4,)), ((3,), (5,))), (torch.float32,) * 2, r"parameter 1 .*\(4,\).*on rank 0; .*\(5,\).*on rank 1"),
        ((((3,), (4,)), ((4,), (3,))), (torch.float32,) * 2, r"parameter 0 .*\(3,\).*on rank 0; .*\(4,\).*on rank 1"),
        ((((3,),), ((3,),)), (torch.float32, torch.float64), r"parameter 0 .*float32.*rank 0; .*float64.*rank 1"),
    ],
)
def test_another_model_on_another_rank_is_the_same_error_everywhere(
    shapes: Any, dtypes: tuple[torch.dtype, torch.dtype], words: str
) -> None:
    def case(communicator: Communicator) -> None:
        parameters = drawn(shapes[communicator.rank], dtypes[communicator.rank])
        Reducer(parameters, communicator).prepare_for_backward(loss_with(parameters, parameters))

    first, second = ThreadWorld(2).run(case)
    assert isinstance(first, AgreementError) and isinstance(second, AgreementError)
    assert str(first) == str(second)
    with pytest.raises(AgreementError, match=words):
        raise first


def test_other_strides_and_sparse_flags_are_another_model() -> None:
    def case(communicator: Communicator) -> None:
        turned = torch.ones(3, 2).t() if communicator.rank else torch.ones(2, 3)
        sparse = [communicator.rank == 2]
        Reducer([turned.requires_grad_()], communicator, sparse=sparse).prepare_for_backward(turned.sum())

    errors = ThreadWorld(3).run(case)
    assert all(isinstance(error, AgreementError) for error in errors) and len(set(map(str, errors))) == 1
    assert "strides (3, 1)" in str(errors[0]) and "strides (1, 2)" in str(errors[0]) and "sparse" in str(errors[0])


def _saved(plan: Plan) -> str:
    names = [f"parameter {index}" for index in range(3)]
    return dump(plan, names=names, numels=[3, 4, 5], world_size=3, wire="native")


# By field of ReduceConfig: what every rank has besides, and what one rank has there that the others have not.
FIELDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "wire": ({}, {"wire": {"* 1": "bf16"}}),
    "wire_after": ({"wire": "int8"}, {"wire_after": 3}),
    "least_sqnr_db": ({"wire": "int8"}, {"least_sqnr_db": 20.5}),
    "accumulation": ({"wire": "bf16"}, {"accumulation": "fp32"}),
    "stochastic_rounding": ({"wire": "int8"}, {"stochastic_rounding": True}),
    "seed": ({}, {"seed": 1}),
    "error_feedback": ({"wire": "int8"}, {"error_feedback": True}),
    "op": ({}, {"op": "sum"}),
    "stall_report_s": ({}, {"stall_report_s": 2.5}),
    "overlap": ({}, {"overlap": False}),
    "policy": ({}, {"policy": "static"}),
    "cap_policy": ({}, {"cap_policy": "strict"}),
    "replan_every": ({}, {"replan_every": 999}),
    "link": ({"link": (50.0, 25.0)}, {"link": (25.0, 50.0)}),
    "plan": ({"plan": _saved(((1, 0), (2,)))}, {"plan": _saved(((2,), (1, 0)))}),
    "grad_stats": ({}, {"grad_stats": True}),
    "check_finite": ({"check_finite": "count"}, {"check_finite": "raise"}),
    "sync_mode": ({"sync_mode": Asynchronous(1)}, {"sync_mode": Asynchronous(2)}),
    "ranks_per_node": ({}, {"ranks_per_node": 1}),
}
OTHERS: dict[str, dict[str, Any]] = {
    "first_bucket_bytes": {"caps": BucketCaps(first_bytes=5)},
    "bucket_cap_bytes": {"caps": BucketCaps(cap_bytes=5)},
    "bucket_caps_bytes": {"caps": BucketCaps(listed_bytes=(5, 6))},
    "planned_bytes": {"caps": BucketCaps(planned_bytes=5)},
    "find_unused_parameters": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "skip_unused_buckets": {"skip_unused_buckets": True},
}


def _settings(name: str, odd: bool) -> dict[str, Any]:
    if name in OTHERS:
        return OTHERS[name] if odd else {}
    shared, other = FIELDS[name]
    return {"config": ReduceConfig(**{**shared, **(other if odd else {})})}


@pytest.mark.parametrize("name", [*FIELDS, *OTHERS])
def test_other_settings_on_another_rank_are_named_everywhere(name: str) -> None:
    """Whatever the setting: peers that are ranks of their own say what they have, and not what this rank sends."""

    def case(communicator: Communicator) -> None:
        parameters = drawn(((3,), (4,), (5,)))
        mine = _settings(name, communicator.rank == 1)
        Reducer(parameters, communicator, **mine).prepare_for_backward(loss_with(parameters, parameters))

    errors = ThreadWorld(3).run(case)
    assert all(isinstance(error, AgreementError) for error in errors) and len(set(map(str, errors))) == 1
    told = "parameter 1" if name == "wire" else name
    assert f" {told}: " in str(errors[0]) and "ranks 0, 2" in str(errors[0]) and "rank 1" in str(errors[0])


def test_no_field_is_left_out_of_what_ranks_compare() -> None:
    assert set(FIELDS) == {one.name for one in dataclasses.fields(ReduceConfig)}


def test_long_lists_of_caps_are_compared_too() -> None:
    def case(communicator: Communicator) -> None:
        parameters = drawn(((3,),))
        caps = BucketCaps(listed_bytes=(*range(1, 5000), 1 + communicator.rank // 2))
        Reducer(parameters, communicator, caps=caps).prepare_for_backward(loss_with(parameters, parameters))

    errors = ThreadWorld(4).run(case)
    assert all("bucket_caps_bytes" in str(error) for error in errors) and len(set(map(str, errors))) == 1


def test_a_peers_problem_is_told_to_all() -> None:
    def case(communicator: Communicator) -> None:
        problem = "its disk is full" if communicator.rank == 2 else ""
        agree_on_parameters(communicator, ["weight"], {}, torch.device("cpu"), problem)

    errors = ThreadWorld(3).run(case)
    assert len(set(map(str, errors))) == 1
    assert "not every rank can reduce its model. rank 2: its disk is full" in str(errors[0])


def test_what_is_no_settings_is_named() -> None:
    """As where `run` was forgotten on a machine: torch's class there sends other, and less. No error is chained."""
    communicator = Loopback(PEERS)
    for sent in (bytes(40), b"GET / HTTP/1.1", b"5"):

        def payload(rank: int, mine: bytes, sent: bytes = sent) -> bytes:
            return mine if rank == 0 else sent

        communicator.payload = payload
        parameters = drawn(((3,),))
        with pytest.raises(AgreementError) as caught:
            Reducer(parameters, communicator).prepare_for_backward(loss_with(parameters, parameters))
        assert str(caught.value) == (
            "ranks 1, 2 sent something else than settings, as torch's own class or another program does: start "
            "`python -m fusedreduce.run` on every machine, or have the script make fusedreduce's wrapper"
        )
        assert caught.value.__cause__ is None and caught.value.__context__ is None


def test_wires_that_differ_alike_are_named_together() -> None:
    """Each pair once, with the parameters that have it, and the flag beside the option."""

    def said(wires: dict[str, str], other: dict[str, str]) -> str:
        def case(communicator: Communicator) -> None:
            mine = other if communicator.rank == 1 else wires
            agree_on_parameters(communicator, list(wires), {}, torch.device("cpu"), wires=mine)

        [text] = set(map(str, ThreadWorld(2).run(case)))
        assert "same ReduceConfig(wire=...) (under fusedreduce run: the same --wire or FUSEDREDUCE_WIRE). " in text
        return text.partition("FUSEDREDUCE_WIRE). ")[2]

    names = [f"layer{number}" for number in range(12)]
    all_int8, native = dict.fromkeys(names, "int8"), dict.fromkeys(names, "native")
    assert said(all_int8, native) == "all 12 parameters: 'int8' on rank 0; 'native' on rank 1"
    some = {name: "bf16" if name == "layer3" else "native" if name > "layer1" else "int8" for name in names}
    assert said(some, native) == "layer0, layer1: 'int8' on rank 0; 'native' on rank 1 | layer3: 'bf16' on rank 0; " + (
        "'native' on rank 1"
    )
    many = {**all_int8, "layer0": "native"}
    assert said(many, native).startswith(f"{', '.join(names[1:9])} and 3 more: 'int8' on rank 0")


def test_ranks_adopt_the_order_of_rank_0() -> None:
    def case(communicator: Communicator) -> tuple[Any, list[list[float]]]:
        parameters = [torch.ones(2, requires_grad=True) for _ in range(4)]
        reducer = Reducer(parameters, communicator, ReduceConfig(policy="static"), caps=BucketCaps(cap_bytes=8))
        order = [2, 0, 3, 1] if communicator.rank == 0 else [0, 1, 2, 3]
        for _ in range(8):
            clear(parameters)
            run(reducer, [torch.full((2,), float(communicator.rank + k)) for k in range(4)], order)
        return reducer.plan, [parameter.grad.tolist() for parameter in parameters if parameter.grad is not None]

    for plan, gradients in ThreadWorld(3).run(case):
        assert plan == ((2,), (0,), (3,), (1,))
        assert gradients == [[1.0 + k] * 2 for k in range(4)]
