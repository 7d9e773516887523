"""BoundedStaleness: after step t `.grad` holds the average of step t - k, to the bit. Ranks are threads.

The oracle is a list of per-step averages, computed apart: local sums in the gradient's dtype, scaled; one division and
one rounding to the wire per rank; the sum in the wire's dtype; one rounding back.
"""

from __future__ import annotations

import copy
import io
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.grids import grid
from support.inside import inside
from support.leaf_steps import CAPS, SCALER, WIRE_DTYPES, assert_same, backward, clear, copies, loss_scale, step
from support.leaf_steps import given as loss_of
from support.loopback import Loopback, ThreadWorld
from support.timeouts import PATIENT_S

from fusedreduce import BucketCaps, CollectiveError, FusedReduceError, ReduceConfig, Reducer
from fusedreduce.comm.protocol import Communicator, Pending, ReduceOp
from fusedreduce.config import Asynchronous, BoundedStaleness, FlushReport, Synchronous
from fusedreduce.planning.plan_file import plan_hash
from fusedreduce.reducer.state import ReducerState

pytestmark = pytest.mark.usefixtures("path")

SHAPES = ((3,), (5, 7), (1,), (0,), (40,), (8, 3))
MIXES: tuple[tuple[torch.dtype, ...], ...] = (
    (torch.float32,) * 6,
    (torch.float32, torch.bfloat16, torch.float32, torch.float16, torch.bfloat16, torch.float32),
    (torch.float64, torch.float32, torch.complex64, torch.float64, torch.complex64, torch.float32),
)
Gradients = Sequence[torch.Tensor | None]


def _stale(k: int, **options: Any) -> ReduceConfig:
    return ReduceConfig(sync_mode=BoundedStaleness(k), **options)


def _parameters(dtypes: Sequence[torch.dtype] = MIXES[0]) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=one, requires_grad=True) for shape, one in zip(SHAPES, dtypes, strict=True)]


def _of_three(communicator: Communicator, config: ReduceConfig, **options: Any) -> Reducer:
    """Of one weight of three elements."""
    return Reducer([torch.zeros(3, requires_grad=True)], communicator, config, **options)


def _give(reducer: Reducer, value: float) -> None:
    """A step with this gradient."""
    step(reducer, [torch.full((3,), value)])


def _given(reducer: Reducer, *values: float) -> None:
    """Such steps, and zero_grad after each."""
    for value in values:
        _give(reducer, value)
        clear(reducer.parameters)


def _drawn(seed: int, dtypes: Sequence[torch.dtype] = MIXES[0]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=generator, dtype=torch.complex128 if dtype.is_complex else torch.float64).to(dtype)
        for shape, dtype in zip(SHAPES, dtypes, strict=True)
    ]


class Average:
    """The oracle of one step."""

    def __init__(
        self, ranks: Sequence[Gradients], wire: str, scale: float, bucket_dtype: Sequence[torch.dtype]
    ) -> None:
        self.values: list[torch.Tensor | None] = []
        for index, own in enumerate(zip(*ranks, strict=True)):
            there = [one for one in own if one is not None]
            if not there:
                self.values.append(None)
                continue
            dtype = there[0].dtype
            real = [None if one is None else torch.view_as_real(one) if one.is_complex() else one for one in own]
            first = next(one for one in real if one is not None)
            compute = torch.float64 if first.dtype is torch.float64 else torch.float32
            travels = WIRE_DTYPES[wire] or bucket_dtype[index]
            total = torch.zeros(first.shape, dtype=travels)
            for one in real:
                local = torch.zeros_like(first) if one is None else one
                total += (local.to(compute) / len(ranks)).to(travels)
            # As a scaler makes it, and unpack takes it.
            value = (total.to(compute) * (1.0 / scale)).to(first.dtype)
            self.values.append(torch.view_as_complex(value) if dtype.is_complex else value)


def _bucket_dtypes(dtypes: Sequence[torch.dtype]) -> list[torch.dtype]:
    """At wire "native" a bucket has one dtype."""
    return [one.to_real() if one.is_complex else one for one in dtypes]


# Whole runs against the oracle


def _backwards_of(number: int, rank: int, dtypes: Sequence[torch.dtype], option: str) -> list[Gradients]:
    """What each backward of a step makes on a rank; the last one is reduced. A static graph always uses the same."""
    made: list[Gradients] = []
    for micro in range(number % 3 + 1):
        changing = {(number + micro) % 6, (number + rank) % 6}
        unused = {"static_graph": {1, 4 + rank}, "find_unused_parameters": changing}.get(option, set())
        gradients = _drawn(number + 100 * rank + 10_000 * micro, dtypes)
        made.append([None if index in unused else one for index, one in enumerate(gradients)])
    return made


def _total(steps: Sequence[Gradients]) -> Gradients:
    """By parameter."""
    there = [[one for one in of_parameter if one is not None] for of_parameter in zip(*steps, strict=True)]
    return [sum(one[1:], start=one[0]) if one else None for one in there]


@grid(
    ("k", "wire", "mix", "option"),
    [
        *itertools.product(
            (0, 1, 3), ("native", "bf16", "fp16"), range(len(MIXES)), ("", "find_unused_parameters", "static_graph")
        )
    ],
)
def test_gradients_are_the_averages_of_k_steps_before(k: int, wire: Any, mix: int, option: str) -> None:
    """Of scaled losses, with micro-batches; what is in flight at last lands from a checkpoint, in other buckets."""
    dtypes, steps = MIXES[mix], range(7)
    scales = [4.0 ** (number % 3) for number in steps]
    ranks = [[_backwards_of(number, rank, dtypes, option) for number in steps] for rank in range(2)]
    averages = []
    for number, scale in enumerate(scales):
        local = [_total([[one if one is None else one * scale for one in each] for each in of[number]]) for of in ranks]
        averages.append(Average(local, wire, scale, _bucket_dtypes(dtypes)).values)

    def case(communicator: Communicator) -> None:
        parameters, plans = _parameters(dtypes), set()

        def made(caps: BucketCaps) -> Reducer:
            options: Any = {option: True} if option else {}
            reducer = Reducer(parameters, communicator, _stale(k, wire=wire), caps=caps, **options)
            inside(reducer).loss_scale.attach(SCALER)
            return reducer

        reducer = made(CAPS)
        for number in steps:
            *micro, last = ranks[communicator.rank][number]
            for one in micro:
                with reducer.no_sync():
                    step(reducer, one, scale=loss_scale(scales[number]))
            step(reducer, last, scale=loss_scale(scales[number]), ready=[2, 0, 5, 1, 3, 4])
            landed = averages[number - k] if number >= k else [None] * len(SHAPES)
            assert_same(copies(parameters), landed, number)
            assert reducer.stats()["steps_under_way"] == min(k, number + 1)
            plans.add(plan_hash(reducer.plan))
            clear(parameters)
        assert len(plans) == (1 if option == "find_unused_parameters" else 2)
        state = copy.deepcopy(reducer.state_dict())
        reducer.close()
        reducer = made(BucketCaps(first_bytes=30, cap_bytes=30))
        reducer.load_state_dict(state)
        assert reducer.flush().steps == k
        assert_same(copies(parameters), _total(averages[len(steps) - k :]) if k else [None] * len(SHAPES), "flush")

    ThreadWorld(2).results(case)


@pytest.mark.parametrize("k", [0, 1, 4])
@pytest.mark.parametrize("wire", ["native", "bf16"])
def test_wires_are_k_plus_one_per_bucket(k: int, wire: Any) -> None:
    def case(communicator: Communicator) -> None:
        parameters = _parameters()
        reducer = Reducer(parameters, communicator, _stale(k, wire=wire), caps=CAPS, find_unused_parameters=True)
        for number in range(25):
            step(reducer, _drawn(number + communicator.rank))
            clear(parameters)
        stats = reducer.stats()
        assert stats["wire_allocations"] == (k + 1) * int(stats["buckets"]) and int(stats["buckets"]) > 2
        assert stats["steps"] == 25 and stats["steps_under_way"] == k

    ThreadWorld(2).results(case)


@pytest.mark.parametrize("k", [1, 2])
def test_a_large_gradient_is_packed_into_the_wire_of_its_own_step(k: int) -> None:
    def case(communicator: Communicator) -> None:
        weight = torch.zeros(600, 600, requires_grad=True)
        reducer = Reducer([weight], communicator, _stale(k))
        for number in range(4 * k + 6):
            step(reducer, [torch.full((600, 600), float(number + 10 * communicator.rank))])
            if number < k:
                assert weight.grad is None
            else:
                assert weight.grad is not None and set(weight.grad.unique().tolist()) == {number - k + 5.0}
            weight.grad = None

    ThreadWorld(2).results(case)


def test_a_forward_or_an_autograd_grad_between_takes_no_gradient_away() -> None:
    parameters, communicator = _parameters(), Loopback()
    reducer = Reducer(parameters, communicator, _stale(1), caps=CAPS)
    for number in range(4):
        step(reducer, _drawn(number))
    held = copies(parameters)
    loss = loss_of(parameters, _drawn(9))
    reducer.prepare_for_backward(loss)  # to log it, and never backward
    assert_same(copies(parameters), held)
    factor = torch.ones((), requires_grad=True)
    loss = loss_of(parameters, _drawn(9)) * factor
    reducer.prepare_for_backward(loss)
    torch.autograd.grad(loss, factor, retain_graph=True)
    assert_same(copies(parameters), held)
    clear(parameters)
    loss.backward()
    assert_same(copies(parameters), [communicator.mean(one) for one in _drawn(3)])


@pytest.mark.filterwarnings("ignore:.* got a gradient after")
def test_backwards_under_no_sync_need_not_be_prepared() -> None:
    parameters, communicator = _parameters(), Loopback([lambda mine: mine.clone()])
    reducer = Reducer(parameters, communicator, _stale(1), caps=CAPS)
    held = waiting = [torch.zeros(shape) for shape in SHAPES]
    for number in range(8):  # never zeroed: what has landed stays, and is not sent again
        local, own = ([one.mul(8).round() for one in _drawn(number + seed)] for seed in (100, 200))
        with reducer.no_sync():
            for _ in range(number % 3):
                loss_of(parameters, local).backward()
        if number % 3 == 0 and number:
            assert_same(copies(parameters), held, "nothing came, and nothing is gone")
        step(reducer, own)
        if number:
            held = [one + other for one, other in zip(held, waiting, strict=True)]
            assert_same(copies(parameters), held, number)
        waiting = [one + other * (number % 3) for one, other in zip(own, local, strict=True)]


@pytest.mark.parametrize("prepared", [True, False])
def test_zeroed_gradients_do_not_come_back_from_the_stash(prepared: bool) -> None:
    communicator = Loopback()
    reducer = _of_three(communicator, _stale(1))
    _give(reducer, 1.0)
    clear(reducer.parameters)
    step(reducer, [torch.full((3,), 2.0)])  # `.grad` holds the average of the first step
    with reducer.no_sync():
        loss = loss_of(reducer.parameters, [torch.full((3,), 9.0)])
        if prepared:
            reducer.prepare_for_backward(loss)
        loss.backward()
    clear(reducer.parameters)
    _give(reducer, 3.0)
    assert reducer.parameters[0].grad is not None
    assert torch.equal(reducer.parameters[0].grad, communicator.mean(torch.full((3,), 2.0)))


def test_every_wire_of_a_bucket_has_the_split_of_an_fp16_wire() -> None:
    def case(communicator: Communicator) -> list[float | None]:
        reducer = _of_three(communicator, _stale(1, wire="fp16"))
        found = []
        for number in range(6):
            clear(reducer.parameters)
            _give(reducer, 2.0**number)
            gradient = reducer.parameters[0].grad
            found.append(None if gradient is None else gradient[0].item())
        return found

    for found in ThreadWorld(4).run(case):
        assert found == [None, 1.0, 2.0, 4.0, 8.0, 16.0]


def test_sparse_gradients_come_later_too() -> None:
    parameters, communicator = [torch.zeros(6, 2, requires_grad=True), torch.zeros(3, requires_grad=True)], Loopback()
    reducer = Reducer(parameters, communicator, _stale(2), sparse=[True, False])
    made = []
    for number in range(7):
        rows = torch.tensor([[number % 6, (number + 2) % 6]])
        sparse = torch.sparse_coo_tensor(rows, torch.full((2, 2), float(3 * number)), (6, 2), check_invariants=False)
        made.append(sparse)
        step(reducer, [sparse, torch.full((3,), 3.0 * number)])
        if number >= 2:
            assert parameters[0].grad is not None and parameters[0].grad.layout is torch.sparse_coo
            assert torch.equal(
                parameters[0].grad.to_dense(), communicator.sparse_total(made[number - 2] / 3).to_dense()
            )
            assert torch.equal(parameters[1].grad, torch.full((3,), number - 2 - 1.5))  # type: ignore[arg-type]
        else:
            assert parameters[0].grad is None
        clear(parameters)
    assert reducer.flush().steps == 2
    total = communicator.sparse_total(made[-2] / 3).to_dense() + communicator.sparse_total(made[-1] / 3).to_dense()
    assert parameters[0].grad is not None and torch.equal(parameters[0].grad.to_dense(), total)


# A late peer


class Late(Exception):
    """A wait for more than there should be."""


@pytest.mark.parametrize("k", [1, 3])
def test_a_late_peer_delays_nobody_for_k_steps(k: int) -> None:
    warm, hidden, comes = 6, threading.Event(), threading.Event()

    def case(communicator: Communicator) -> bool:
        parameters = _parameters()
        reducer = Reducer(parameters, communicator, _stale(k), caps=CAPS, agreed=True)
        for number in range(warm + k + 1):
            if communicator.rank == 1 and number == warm:
                assert hidden.wait(PATIENT_S)
                time.sleep(0.2)  # for a peer that does not wait
                comes.set()
            elif communicator.rank == 0 and number == warm + k:
                hidden.set()
            step(reducer, _drawn(number))
            clear(parameters)
        return comes.is_set()

    assert ThreadWorld(2).results(case) == [True, True], "the step behind those that it hides needs the late peer's"


# What goes wrong


class Broken(Loopback):
    """Waiting for an all-reduce fails from a number of them on."""

    def __init__(self, fails_from: int) -> None:
        super().__init__()
        self._fails_from = fails_from

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Pending:
        if self.count("all_reduce") == self._fails_from:
            self.fail_wait = self._fails_from
        return super().all_reduce(tensor, op)


def test_a_collective_that_fails_is_raised_by_the_step_that_lands_it() -> None:
    reducer = _of_three(Broken(1), _stale(2))
    _given(reducer, 1.0, 1.0, 1.0)
    with pytest.raises(CollectiveError, match="Connection closed"):
        _give(reducer, 1.0)
    assert reducer.state is ReducerState.FAILED and reducer.stats()["steps_under_way"] == 3
    with pytest.raises(FusedReduceError):
        reducer.reset()
    assert reducer.stats()["steps_given_up"] == 3 and reducer.stats()["steps_under_way"] == 0
    reducer.set_communicator(Loopback())
    clear(reducer.parameters)
    for number in range(5):
        _give(reducer, 3.0 * number)
        expected = None if number < 2 else torch.full((3,), number - 2 - 1.5)
        assert_same([reducer.parameters[0].grad], [expected])
        clear(reducer.parameters)


def test_flush_that_fails_leaves_a_reducer_that_says_so() -> None:
    reducer = _of_three(Broken(1), _stale(2))
    _given(reducer, 1.0, 1.0)
    with pytest.raises(CollectiveError, match="Connection closed"):
        reducer.flush()
    assert reducer.state is ReducerState.FAILED
    with pytest.raises(FusedReduceError):
        reducer.prepare_for_backward()


def test_a_checkpoint_that_fails_leaves_the_gradients_alone() -> None:
    reducer = _of_three(Broken(1), _stale(2))
    _given(reducer, 1.0, 1.0)
    mine = reducer.parameters[0].grad = torch.full((3,), 7.0)
    with pytest.raises(CollectiveError, match="Connection closed"):
        reducer.state_dict()
    assert reducer.parameters[0].grad is mine and mine.tolist() == [7.0] * 3
    assert reducer.state is ReducerState.FAILED


def test_closing_drops_what_is_under_way() -> None:
    parameters, communicator = _parameters(), Loopback()
    with Reducer(parameters, communicator, _stale(2), caps=CAPS) as reducer:
        for number in range(3):
            step(reducer, _drawn(number))
            clear(parameters)
        del reducer
    assert not any(one() is not None for one in communicator.wires)


def test_a_gradient_changed_after_it_was_packed_is_found_in_its_own_step() -> None:
    parameters = _parameters()
    reducer = Reducer(parameters, Loopback(), _stale(1), caps=CAPS)
    for number in range(2):
        step(reducer, _drawn(number))
        clear(parameters)
    loss = loss_of(parameters, _drawn(3), ready=[5, 4, 3, 2, 1, 0])
    reducer.prepare_for_backward(loss)

    def late(_: torch.Tensor) -> None:
        assert parameters[5].grad is not None
        parameters[5].grad.mul_(2)

    parameters[0].register_hook(late)
    with pytest.raises(FusedReduceError, match="written to after it had been packed"):
        loss.backward()
    assert reducer.stats()["steps_under_way"] == 1


# Flush, modes and what excludes them


def test_flush_leaves_no_optimizer_a_gradient_that_it_has_stepped_with() -> None:
    parameters = [torch.zeros(3, requires_grad=True), torch.zeros(2, requires_grad=True)]
    reducer = Reducer(parameters, Loopback([lambda mine: mine.clone()]), _stale(2))
    optimizers = [torch.optim.SGD([one], lr=1.0) for one in parameters]
    for value in (1.0, 2.0):
        step(reducer, [torch.full((3,), value), torch.full((2,), value)])
    assert reducer.flush(*optimizers).steps == 2
    for one in parameters:
        assert torch.equal(one.detach(), torch.full(one.shape, -3.0))
        assert one.grad is None, "the next step would take it once more"


def test_a_synchronous_reducer_has_nothing_to_flush_or_to_keep() -> None:
    for mode in (Synchronous(), BoundedStaleness(0)):
        reducer = _of_three(Loopback(), ReduceConfig(sync_mode=mode))
        _give(reducer, 3.0)
        assert reducer.flush() == FlushReport() and reducer.state_dict() == {}
        assert_same([reducer.parameters[0].grad], [torch.full((3,), -0.5)])
        reducer.load_state_dict({})


def test_flush_takes_optimizers_or_a_step() -> None:
    reducer = _of_three(Loopback(), _stale(1))
    optimizer = torch.optim.SGD(reducer.parameters, lr=1.0)
    with pytest.raises(TypeError, match="flush takes torch.optim"):
        reducer.flush(reducer.parameters)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not both"):
        reducer.flush(optimizer, step=optimizer.step)


@pytest.mark.parametrize("options", [{"gradient_as_bucket_view": True}, {"skip_unused_buckets": True}])
def test_what_excludes_stale_gradients_is_refused_before_anything_is_hooked(options: dict[str, bool]) -> None:
    parameters = _parameters()
    with pytest.raises(ValueError, match="exclude each other"):
        Reducer(parameters, Loopback(), _stale(1), **options)  # type: ignore[arg-type]
    reducer = Reducer(parameters, Loopback(), _stale(0), **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="exclude each other"):
        reducer.set_sync_mode(BoundedStaleness(1))
    step(reducer, _drawn(0))


def test_a_comm_hook_and_a_trace_are_refused(tmp_path: Any) -> None:
    reducer = Reducer(_parameters(), Loopback(), _stale(1))
    with pytest.raises(ValueError, match="a comm hook exclude"):
        reducer.register_comm_hook(None, lambda state, bucket: torch.futures.Future())
    with pytest.raises(ValueError, match="an optimizer in backward exclude"):
        reducer.leave_gradients_to_hook()
    with pytest.raises(ValueError, match=r"record_trace\(\) exclude"):
        reducer.record_trace(tmp_path)
    hooked = Reducer(_parameters(), Loopback())
    hooked.register_comm_hook(None, lambda state, bucket: torch.futures.Future())
    with pytest.raises(ValueError, match="a comm hook exclude"):
        hooked.set_sync_mode(BoundedStaleness(2))


@pytest.mark.parametrize("make", [BoundedStaleness, Asynchronous])
@pytest.mark.parametrize("value", [-1, 1.0, True, "1", None])
def test_a_mode_checks_its_number(make: Callable[[Any], object], value: Any) -> None:
    with pytest.raises(ValueError, match="must be a whole number of at least"):
        make(value)


def test_a_mode_is_one_of_three() -> None:
    with pytest.raises(ValueError, match="max_in_flight must be a whole number of at least 1, got 0"):
        Asynchronous(0)
    for value in (None, 1, "Synchronous", BoundedStaleness):
        with pytest.raises(ValueError, match="sync_mode must be"):
            ReduceConfig(sync_mode=value)  # type: ignore[arg-type]


# What is kept in a checkpoint


def _with_steps(k: int = 2, **options: Any) -> tuple[Reducer, list[torch.Tensor]]:
    parameters = _parameters()
    reducer = Reducer(parameters, Loopback(), _stale(k), caps=CAPS, **options)
    for number in range(4):
        step(reducer, _drawn(number))
        clear(parameters)
    return reducer, parameters


def test_a_checkpoint_is_plain_and_stays_as_it_was_saved() -> None:
    reducer, parameters = _with_steps()
    state = reducer.state_dict()
    kept = copy.deepcopy(state)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert [one["step"] for one in loaded["steps"]] == [3, 4] and state["world_size"] == 3
    for number in range(4, 8):
        step(reducer, _drawn(number))
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.mul_(7)
        clear(parameters)
    for one, other in zip(state["steps"], kept["steps"], strict=True):
        assert_same(list(one["averages"].values()), list(other["averages"].values()))


def test_a_checkpoint_has_each_steps_own_average_and_leaves_gradients_alone() -> None:
    reducer, parameters = _with_steps()
    for parameter in parameters:
        parameter.grad = torch.full(parameter.shape, 7.0)
    mine = [parameter.grad for parameter in parameters]
    state = reducer.state_dict()
    for kept, number in zip(state["steps"], (2, 3), strict=True):
        assert_same(list(kept["averages"].values()), [Loopback().mean(one) for one in _drawn(number)], number)
    assert all(parameter.grad is one for parameter, one in zip(parameters, mine, strict=True))
    assert_same(mine, [torch.full(shape, 7.0) for shape in SHAPES], "gradients of the user's")


def test_landing_leaves_a_loaded_checkpoint_as_it_was() -> None:
    """It may be loaded again: landings are added up in other memory."""
    state = _with_steps()[0].state_dict()
    kept = copy.deepcopy(state)
    reducer = Reducer(_parameters(), Loopback(), _stale(2))
    reducer.load_state_dict(state)
    assert reducer.flush().steps == 2
    for one, before in zip(state["steps"], kept["steps"], strict=True):
        assert_same(list(one["averages"].values()), list(before["averages"].values()))


def test_a_checkpoint_of_something_else_is_refused_and_nothing_is_loaded() -> None:
    state = _with_steps()[0].state_dict()
    missing = copy.deepcopy(state)
    del missing["steps"][0]["averages"]["parameter 1"]
    foreign = copy.deepcopy(state)
    foreign["steps"][1]["averages"]["other"] = None
    shaped = copy.deepcopy(state)
    shaped["steps"][0]["averages"]["parameter 0"] = torch.zeros(4)
    for bad, text in (
        ({**state, "world_size": 4}, "of world_size 4, here it is 3"),
        ({**state, "version": 9}, "version 9"),
        ({**state, "mode": "asynchronous"}, "of mode 'asynchronous', here it is 'staleness'"),
        ({name: state[name] for name in ("version", "mode", "world_size")}, "damaged.*steps"),
        ({name: state[name] for name in ("version", "mode", "world_size", "steps")}, "damaged.*rounds"),
        ({**state, "steps": [{**state["steps"][0], "averages": None}]}, "damaged"),
        (missing, "only one of them has parameter 1"),
        (foreign, "only one of them has other"),
        (shaped, r"parameter 0 is \(4,\)"),
    ):
        reducer = Reducer(_parameters(), Loopback(), _stale(2))
        with pytest.raises(ValueError, match=text):
            reducer.load_state_dict(bad)
        assert reducer.stats()["steps_under_way"] == 0 and inside(reducer).rounds == 0
    for mode in (Synchronous(), BoundedStaleness(1)):
        with pytest.raises(ValueError, match="sync_mode allows"):
            Reducer(_parameters(), Loopback(), ReduceConfig(sync_mode=mode)).load_state_dict(state)
    reducer, _ = _with_steps()
    for one in (state, {}):
        with pytest.raises(FusedReduceError, match="steps are in flight"):
            reducer.load_state_dict(one)


def test_a_synchronous_reducer_goes_on_from_a_checkpoint_without_steps_in_flight() -> None:
    flushed, _ = _with_steps()
    flushed.flush()
    state = flushed.state_dict()
    assert state["steps"] == []
    reducer = Reducer(_parameters(), Loopback(), ReduceConfig())
    reducer.load_state_dict(state)
    assert inside(reducer).rounds == state["rounds"] == 4


def test_what_was_told_and_scaled_goes_with_a_checkpoint() -> None:
    parameters = [torch.zeros(3, requires_grad=True)]
    config = _stale(2, check_finite="count")
    reducer = Reducer(parameters, Loopback(), config, names=["weight"])
    inside(reducer).loss_scale.attach(SCALER)
    for value in (8.0, 2.0):
        loss = loss_of(parameters, [torch.tensor([1.0, float("inf") if value == 2.0 else 1.0, 1.0])])
        reducer.prepare_for_backward(loss)
        backward(reducer, loss, loss_scale(value))
        clear(parameters)
    state = reducer.state_dict()
    assert [one["loss_scale"] for one in state["steps"]] == [8.0, 2.0]
    reducer.close()
    other = Reducer(parameters, Loopback(), config, names=["weight"])
    other.load_state_dict(state)
    assert other.flush().steps == 2
    (report,) = inside(other).statistics.finite_check().reports
    assert report.step == 2 and report.reduced == ("weight",) and report.culprits[0].index == 1
    landed_scale = inside(other).delayed.landed_scale
    assert landed_scale is not None and landed_scale.scale.item() == 2.0


@pytest.mark.parametrize("mode", [BoundedStaleness(2), Asynchronous()])
def test_an_autograd_grad_is_no_step_while_grad_holds_an_average(mode: Any) -> None:
    """The average, put back at the end of it, was taken for a gradient that it had made, and was reduced again."""
    communicator = Loopback()
    reducer = _of_three(communicator, ReduceConfig(sync_mode=mode))
    for value in (1.0, 2.0, 3.0):
        _give(reducer, value)
    before = reducer.parameters[0].grad
    assert before is not None
    had, calls = before.clone(), len(communicator.calls)
    loss = loss_of(reducer.parameters, [torch.ones(3)])
    reducer.prepare_for_backward(loss)
    torch.autograd.grad(loss, reducer.parameters)
    assert reducer.steps == 3 and len(communicator.calls) == calls and reducer.state is ReducerState.ARMED
    assert reducer.parameters[0].grad is not None and torch.equal(reducer.parameters[0].grad, had)


@pytest.mark.parametrize("between", ["no_sync", "autograd.grad", "a step that applies nothing"])
def test_flush_applies_nothing_twice_whatever_came_after_the_optimizers_step(between: str) -> None:
    """No zero_grad: `.grad` still holds the averages that the optimizer has stepped with, and flush must drop them."""
    communicator = Loopback()
    reducer = _of_three(communicator, ReduceConfig(sync_mode=BoundedStaleness(2)))
    optimizer = torch.optim.SGD(reducer.parameters, lr=1.0)
    for value in (1.0, 2.0, 3.0):
        _give(reducer, value)
    optimizer.step()
    expected = -communicator.mean(torch.full((3,), 1.0))
    assert torch.equal(reducer.parameters[0], expected)
    if between == "no_sync":
        with reducer.no_sync():
            pass
    elif between == "autograd.grad":
        loss = loss_of(reducer.parameters, [torch.ones(3)])
        reducer.prepare_for_backward(loss)
        torch.autograd.grad(loss, reducer.parameters)
    else:
        reducer.flush(optimizer)
        for value in (2.0, 3.0):
            expected -= communicator.mean(torch.full((3,), value))
        reducer.parameters[0].grad = torch.ones(3)
        optimizer.step()
        expected -= 1
        for value in (2.0, 3.0):
            _give(reducer, value)
    reducer.flush(optimizer)
    for value in (2.0, 3.0):
        expected -= communicator.mean(torch.full((3,), value))
    assert torch.equal(reducer.parameters[0], expected)
