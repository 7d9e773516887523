"""Which rank had a NaN or Inf in which gradient, at which index: planted by hand and at random.

Ranks are threads, or one rank with scripted peers; on the torch path.
"""

from __future__ import annotations

import logging
import math
import random
from typing import Any

import pytest
import torch
from support import sweep
from support.inside import BY_PRODUCTS_ALLOCATED, inside
from support.leaf_steps import (
    CAPS,
    HOOKS,
    SCALER,
    TRAVELS,
    Wire,
    averaging,
    clear,
    given,
    leaves,
    shadow_step,
    sparse_like,
    step,
    with_hooks,
)
from support.loopback import Call, Counted, Loopback, LoopbackPending, ThreadWorld

from fusedreduce import BucketCaps, CollectiveError, FusedReduceError, ReduceConfig, Reducer
from fusedreduce.buckets.stats.non_finite import Culprit, FiniteCheck, NonFiniteReport
from fusedreduce.comm.group import Group
from fusedreduce.comm.protocol import Communicator, Pending
from fusedreduce.errors import NonFiniteGradientError
from fusedreduce.kernels import runs
from fusedreduce.kernels.table import Totals
from fusedreduce.reducer.state import ReducerState

pytestmark = pytest.mark.usefixtures("path")

BAD = (math.nan, math.inf, -math.inf)


def _names(parameters: list[torch.Tensor]) -> list[str]:
    return [f"layer.{index}" for index in range(len(parameters))]


def _reducer(
    parameters: list[torch.Tensor],
    communicator: Communicator,
    *,
    wire: Wire = "native",
    views: bool = False,
    check: Any = "count",
    hook: str | None = None,
    stats: bool = False,
    **options: Any,
) -> Reducer:
    config = ReduceConfig(wire=wire, check_finite=check, grad_stats=stats, overlap=options.pop("overlap", True))
    options.setdefault("caps", CAPS)
    reducer = Reducer(
        parameters, communicator, config, names=_names(parameters), gradient_as_bucket_view=views, **options
    )
    if hook is not None:

        def sums(buffer: torch.Tensor) -> torch.Tensor:
            communicator.all_reduce(buffer).wait()
            return buffer

        reducer.register_comm_hook(None, averaging(communicator.size, sums, hook))
    return reducer


def _plant(gradient: torch.Tensor, index: int, value: float, part: int = 0) -> None:
    """`index` counts elements in memory; `part` 1 is the imaginary one."""
    strided = gradient._values() if gradient.is_sparse else gradient
    real = torch.view_as_real(strided) if strided.is_complex() else strided
    pair = 2 if strided.is_complex() else 1
    numel = strided.numel() * pair
    real.as_strided((numel,), (1,), real.storage_offset())[index * pair + (part if pair == 2 else 0)] = value


def _latest(reducer: Reducer) -> NonFiniteReport | None:
    """The report of the latest step."""
    reports = inside(reducer).statistics.finite_check().reports
    return reports[-1] if reports and reports[-1].step == reducer.steps else None


# By hand


def test_what_waits_in_a_bucket_that_is_passed_over_is_not_of_this_step() -> None:
    parameters = leaves()
    reducer = _reducer(
        parameters,
        Loopback((torch.clone,)),
        find_unused_parameters=True,
        skip_unused_buckets=True,
        caps=BucketCaps(first_bytes=100, cap_bytes=100),
    )
    for number in range(5):
        clear(parameters)
        parameters[6].grad = torch.full((60,), math.nan)
        gradients: list[torch.Tensor | None] = [torch.randn_like(one) for one in parameters]
        gradients[6] = gradients[number] = None
        step(reducer, gradients)
        assert _latest(reducer) is None
        assert inside(reducer).statistics.found_non_finite().item() == 0.0


@pytest.mark.parametrize("wire", ["native", "bf16", "fp16"])
def test_sparse_and_complex_gradients(wire: Wire) -> None:
    """Of a sparse one the index is within its values, as they were before adding up."""

    def case(communicator: Communicator) -> None:
        torch.manual_seed(0)
        tables = [torch.zeros(20, 4, requires_grad=True), torch.zeros(9, 2, dtype=torch.complex64, requires_grad=True)]
        parameters = [*leaves((5, 9), torch.complex64), *tables, *leaves((7,), torch.complex128)]
        sparse = [False, False, True, True, False]
        reducer = _reducer(parameters, communicator, wire=wire, sparse=sparse)
        for number in range(10):
            clear(parameters)
            gradients = [torch.randn_like(one.detach()) for one in parameters]
            gradients[2], gradients[3] = sparse_like(tables[0], [3, 7, 3]), sparse_like(tables[1], [8, 8, 0])
            parameter, index = number // 2, (4, 8, 11, 5, 6)[number // 2]
            if communicator.rank == 1:
                _plant(gradients[parameter], index, math.nan, part=number % 2)
            step(reducer, list(gradients))
            culprit = Culprit(1, f"layer.{parameter}", index)
            assert _latest(reducer) == NonFiniteReport(number + 1, (culprit,), (culprit.parameter,))

    ThreadWorld(2).results(case)


def test_a_gradient_that_a_no_sync_backward_has_spoiled() -> None:
    parameters = leaves()
    reducer = _reducer(parameters, Loopback((torch.clone,)))
    gradients = [torch.randn_like(one) for one in parameters]
    _plant(gradients[1], 33, math.nan)
    with reducer.no_sync():
        step(reducer, list(gradients))
    assert not inside(reducer).statistics.finite_check().reports, "not reduced yet"
    step(reducer, [torch.randn_like(one) for one in parameters])
    assert (report := _latest(reducer)) is not None and report.culprits[0].index == 33


def test_the_index_is_counted_as_the_gradient_lies_in_memory_also_in_a_large_one() -> None:
    parameters = [
        torch.zeros(4, 3, 5, 5).to(memory_format=torch.channels_last).requires_grad_(),
        torch.zeros(140_001, requires_grad=True),
    ]
    assert parameters[1].numel() > runs.LARGE_NUMEL
    for wire, views in TRAVELS:
        communicator = Loopback((torch.clone,))
        communicator.gathered = lambda rank, mine: torch.full_like(mine, -1)
        with _reducer(parameters, communicator, wire=wire, views=views) as reducer:
            for parameter, index in ((0, 7), (1, 0), (1, 140_000), (1, 131_072), (0, 299)):
                clear(parameters)
                gradients = [torch.randn_like(one.detach()) for one in parameters]
                assert gradients[0].stride() == parameters[0].stride()
                _plant(gradients[parameter], index, math.nan)
                step(reducer, list(gradients))
                assert (report := _latest(reducer)) is not None
                assert report.culprits == (Culprit(0, f"layer.{parameter}", index),)


# At random

SETUPS: dict[str, dict[str, Any]] = {
    "native": {},
    "views": {"views": True},
    "bf16": {"wire": "bf16"},
    "fp16": {"wire": "fp16"},
    "overlap off": {"overlap": False, "wire": "bf16"},
    "statistics": {"stats": True, "views": True},
    "unused": {"find_unused_parameters": True},
    "unused, views": {"find_unused_parameters": True, "views": True},
    **{f"hook, {how}": {"hook": how} for how in HOOKS},
    **{f"hook, {how}, views": {"hook": how, "views": True} for how in HOOKS},
}
RANKS = 3


@pytest.mark.parametrize("setup", SETUPS)
def test_random_plantings_none_missed_none_false(setup: str) -> None:
    """Each rank names the first parameter in order of registration, and the first element there."""
    options, plantings = SETUPS[setup], 75 if sweep.full else 20
    mixed = "hook" not in setup

    def case(communicator: Communicator) -> list[int]:
        parameters = leaves()
        if mixed:
            parameters += [*leaves((9, 4), torch.bfloat16), *leaves((5,), torch.float64)]
        parameters += leaves((6,), torch.complex64)
        reducer = _reducer(parameters, communicator, **options)
        draw = random.Random(setup)  # the same on every rank
        mine = torch.Generator().manual_seed(communicator.rank)
        planted = clean = 0
        while planted < plantings:
            if draw.random() < 0.5:
                clear(parameters)
            else:
                reducer.zero_grad()  # what is a view of the wire stays one
            # Far from 1, and finite on any wire: nothing that could be taken for an Inf.
            size = draw.choice([1e-30, 1.0, 1e4])
            gradients: list[torch.Tensor | None] = [
                (torch.randn(one.shape, generator=mine).clamp(-3, 3) * size).to(one.dtype) for one in parameters
            ]
            used = [set(range(len(parameters))) for _ in range(communicator.size)]
            if "unused" in setup:
                used = [{number for number in one if draw.random() < 0.8} | {0} for one in used]
                gradients = [one if number in used[communicator.rank] else None for number, one in enumerate(gradients)]
            culprits: dict[int, tuple[int, int]] = {}
            reduced: set[int] = set()
            for _ in range(draw.choice([0, 1, 1, 2, 3])):
                rank, value, part = draw.randrange(communicator.size), draw.choice(BAD), draw.randrange(2)
                number = draw.choice(sorted(used[rank]))
                numel = parameters[number].numel()
                index = draw.choice([0, numel - 1, draw.randrange(numel)])  # beside padding, often
                culprits[rank] = min(culprits.get(rank, (number, index)), (number, index))
                reduced.add(number)
                if rank == communicator.rank:
                    _plant(gradients[number], index, value, part)  # type: ignore[arg-type]
            step(reducer, gradients)
            planted += bool(reduced)
            clean += not reduced
            expected = NonFiniteReport(
                reducer.steps,
                tuple(Culprit(rank, f"layer.{number}", at) for rank, (number, at) in sorted(culprits.items())),
                tuple(f"layer.{number}" for number in sorted(reduced)),
            )
            assert _latest(reducer) == (expected if reduced else None)
            spoiled = {n for n, one in enumerate(parameters) if one.grad is not None and not one.grad.isfinite().all()}
            assert spoiled == reduced
            assert inside(reducer).statistics.found_non_finite().item() == bool(reduced)
        assert len(reducer.plan) > 2 and (not mixed or int(reducer.stats()["padding_bytes"]) > 0)
        return [planted, clean]

    first, *others = ThreadWorld(RANKS).results(case)
    assert others == [first] * (RANKS - 1) and first[1] > 1


# What only the reduction made non-finite


OVERFLOWS: dict[str, tuple[dict[str, Any], torch.dtype, float]] = {
    "on the wire": ({"wire": "fp16"}, torch.float32, 1e6),
    "on the wire, of bf16": ({"wire": "fp16"}, torch.bfloat16, 1e6),
    "behind it": ({"wire": "bf16"}, torch.float16, 65_504.0),
    "in a comm hook": ({"hook": "fp16"}, torch.float32, 1e6),
}


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("where", OVERFLOWS)
def test_an_overflow_has_no_culprit(where: str, joined: bool) -> None:
    options, dtype, size = OVERFLOWS[where]

    def case(communicator: Communicator) -> NonFiniteReport:
        parameters = leaves((3, 35, 40), dtype)
        reducer = _reducer(parameters, communicator, **options)
        for _ in range(4):
            if joined and communicator.rank == 2:
                shadow_step(reducer)
                continue
            clear(parameters)
            gradients = [torch.randn_like(one) for one in parameters]
            gradients[1][34] = size
            if where == "behind it":  # the sum, which fits the wire
                inside(reducer).divide_by_ranks_counted(Counted(1.0))
            step(reducer, list(gradients))
        report: NonFiniteReport = inside(reducer).statistics.finite_check().reports[-1]
        assert report.step == 4
        return report

    first, *others = ThreadWorld(3).results(case)
    assert first == NonFiniteReport(4, (), ("layer.1",))
    assert others == [first, first], "one that has joined too"
    assert "every rank's gradients were finite" in str(first) and "layer.1" in str(first)


# "raise"


@pytest.mark.parametrize(("wire", "views", "hook"), with_hooks(None))
def test_every_rank_raises_one_that_has_joined_too_and_the_next_step_works(
    wire: Wire, views: bool, hook: str | None
) -> None:
    def case(communicator: Communicator) -> list[str]:
        torch.manual_seed(communicator.rank)
        parameters = leaves()
        reducer = _reducer(parameters, communicator, wire=wire, views=views, check="raise", hook=hook)
        errors = []
        for number in range(9):
            clear(parameters)
            gradients = [torch.randn_like(one) for one in parameters]
            if communicator.rank == 1 and number in (0, 1, 4, 7):
                _plant(gradients[number % 7], 0, math.nan)
            try:
                if communicator.rank == 2 and number >= 4:
                    shadow_step(reducer)
                else:
                    step(reducer, list(gradients))
            except NonFiniteGradientError as error:
                errors.append(str(error))
            assert len(errors) == sum(one <= number for one in (0, 1, 4, 7))
            if number not in (0, 1, 4, 7) and (communicator.rank != 2 or number < 4):
                assert all(one.grad is not None and one.grad.isfinite().all() for one in parameters)
            assert reducer.state is ReducerState.IDLE
            reducer.check_finalized()
        assert reducer.steps == (4 if communicator.rank == 2 else 9)
        assert all(one.startswith(f"rank {communicator.rank}: ") for one in errors)
        return [one.removeprefix(f"rank {communicator.rank}: ") for one in errors]

    assert issubclass(NonFiniteGradientError, FusedReduceError)
    first, *others = ThreadWorld(3).results(case)
    assert len(first) == 4 and others == [first, first]
    assert "rank 1, layer.4, element 0" in first[2] and "step 5" in first[2] and "zero_grad()" in first[2]


@pytest.mark.parametrize("which", ["first", "second", "both"])
@pytest.mark.parametrize("check", ["raise", "count"])
def test_a_second_reducer_in_the_same_backward_finishes_its_step_too(check: str, which: str) -> None:
    def case(communicator: Communicator) -> None:
        both = [leaves(), leaves()]
        reducers = [_reducer(one, communicator, check=check) for one in both]
        for number in range(8):
            losses = []
            for index, (parameters, reducer) in enumerate(zip(both, reducers, strict=True)):
                clear(parameters)
                gradients = [torch.ones_like(one) for one in parameters]
                if number % 2 and communicator.rank == 0 and which in (("first", "second")[index], "both"):
                    _plant(gradients[2], 0, math.nan)
                losses.append(given(parameters, gradients))
                reducer.prepare_for_backward(losses[-1])
            total = losses[0] + losses[1]
            if number % 2 and check == "raise":
                with pytest.raises(NonFiniteGradientError, match="rank 0, layer.2, element 0"):
                    total.backward()
            else:
                total.backward()
            for index, (parameters, reducer) in enumerate(zip(both, reducers, strict=True)):
                assert reducer.state is ReducerState.IDLE and reducer.steps == number + 1
                spoiled = number % 2 and which in (("first", "second")[index], "both")
                for place, one in enumerate(parameters):
                    assert one.grad is not None
                    if spoiled and place == 2:
                        assert one.grad.isnan().sum() == 1
                    else:
                        assert one.grad.eq(1.0).all()
                assert (_latest(reducer) is not None) == bool(spoiled)

    ThreadWorld(2).results(case)


def test_nothing_is_raised_while_a_loss_scaler_is_attached(caplog: pytest.LogCaptureFixture) -> None:
    parameters = leaves()
    reducer = _reducer(parameters, Loopback((torch.clone,)), check="raise")
    inside(reducer).loss_scale.attach(SCALER)
    gradients = [torch.randn_like(one) for one in parameters]
    _plant(gradients[0], 2, math.inf)
    with caplog.at_level(logging.INFO, logger="fusedreduce.buckets.stats.non_finite"):
        step(reducer, list(gradients))
    assert (report := _latest(reducer)) is not None and report.culprits[0] == Culprit(0, "layer.0", 2)
    assert [one.levelno for one in caplog.records] == [logging.INFO], "overflows are how it looks for its scale"


# "count" and "off"


def test_count_logs_where_it_concerns_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    def case(communicator: Communicator) -> int:
        parameters = leaves()
        reducer = _reducer(parameters, communicator)
        for _ in range(3):
            clear(parameters)
            gradients = [torch.randn_like(one) for one in parameters]
            if communicator.rank == 1:
                _plant(gradients[1], 17, math.nan)
            step(reducer, list(gradients))
        return len(inside(reducer).statistics.finite_check().reports)

    with caplog.at_level(logging.INFO, logger="fusedreduce.buckets.stats.non_finite"):
        assert ThreadWorld(3).results(case) == [3, 3, 3]
    for rank, level in ((0, logging.WARNING), (1, logging.WARNING), (2, logging.INFO)):
        lines = [one for one in caplog.records if one.getMessage().startswith(f"rank {rank}: step ")]
        assert len(lines) == 3 and {one.levelno for one in lines} == {level}
        assert "rank 1, layer.1, element 17" in lines[0].getMessage() and "step 1" in lines[0].getMessage()


def test_reports_are_kept_for_a_while_and_long_lists_are_cut() -> None:
    parameters = leaves((2,) * 12)
    communicator = Loopback((torch.clone,) * 11)
    reducer = _reducer(parameters, communicator)
    for _ in range(103):
        clear(parameters)
        step(reducer, [torch.full_like(one, math.nan) for one in parameters])
    found = inside(reducer).statistics.finite_check()
    assert [one.step for one in found.reports] == list(range(4, 104))
    text = str(found.reports[-1])
    assert "rank 0, layer.0, element 0; rank 1, layer.0, element 0" in text
    assert text.count("element 0") == 8 and "and 4 more" in text and len(found.reports[-1].culprits) == 12


MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "overlap off": {"overlap": False},
}


@pytest.mark.parametrize(
    ("wire", "views", "mode"),
    [*((*travel, "plain") for travel in TRAVELS), *(("bf16", False, mode) for mode in MODES if mode != "plain")],
)
def test_a_step_takes_one_small_collective_more_and_off_takes_none(wire: Wire, views: bool, mode: str) -> None:
    def calls(check: str) -> list[list[Call]]:
        def case(communicator: Any) -> list[list[Call]]:
            parameters = leaves()
            reducer = _reducer(parameters, communicator, wire=wire, views=views, check=check, **MODES[mode])
            found = []
            for number in range(8):
                before = len(communicator.calls)
                if number == 7 and communicator.rank == 1:
                    shadow_step(reducer)
                else:
                    clear(parameters)
                    step(reducer, [torch.randn_like(one) for one in parameters])
                found.append(communicator.calls[before:])
            told = sum(call.kind != "gather" for one in found for call in one)
            assert reducer.stats()["collectives"] == told
            return found

        ranks = ThreadWorld(2).results(case)
        assert ranks[0] == ranks[1]
        steps: list[list[Call]] = ranks[0]
        return steps

    extra = Call("all_gather", torch.int64, 2)
    off, count, raises = (calls(check) for check in ("off", "count", "raise"))
    for without, one, other in zip(off, count, raises, strict=True):
        assert extra not in without and one.count(extra) == 1 and one == other
        # (How many probes a schedule takes at which step depends on the clock in what they contain, not in number.)
        assert [call.kind for call in one if call != extra] == [call.kind for call in without]
        assert one.index(extra) > max(index for index, call in enumerate(one) if call.kind == "all_reduce")
    assert extra.numel * extra.dtype.itemsize == 16


def test_off_allocates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("by-products were allocated")

    for part in BY_PRODUCTS_ALLOCATED:
        part.replace(monkeypatch, never)
        monkeypatch.setattr(f"fusedreduce.kernels.table.{part.name}", never)
    parameters = leaves()
    reducer = _reducer(parameters, Loopback((torch.clone,)), check="off")
    for _ in range(6):
        clear(parameters)
        step(reducer, [torch.randn_like(one) for one in parameters])
    assert not inside(reducer).statistics.finite_check().reports
    with pytest.raises(AssertionError, match="allocated"):
        _reducer(leaves(), Loopback((torch.clone,)))


# Failures


class _Deaf(Loopback):
    """Nobody can be told, or nobody answers."""

    when = ""

    def all_gather(self, tensor: torch.Tensor, into: torch.Tensor | None = None) -> tuple[Pending, torch.Tensor]:
        if self.when == "issue":
            raise RuntimeError("Connection refused by peer")
        pending, result = super().all_gather(tensor)
        if self.when == "wait":

            def closed() -> None:
                raise RuntimeError("Connection closed by peer")

            pending.wait = closed  # type: ignore[method-assign]
        return pending, result


@pytest.mark.parametrize("when", ["issue", "wait"])
def test_a_peer_that_cannot_be_told_is_an_error_of_the_collective(when: str) -> None:
    parameters, communicator = leaves(), _Deaf((torch.clone,))
    reducer = _reducer(parameters, communicator)
    step(reducer, [torch.randn_like(one) for one in parameters])
    communicator.when = when
    clear(parameters)
    with pytest.raises(
        CollectiveError, match="the exchange of non-finite gradients between the ranks (failed|could not)"
    ):
        step(reducer, [torch.randn_like(one) for one in parameters])
    assert reducer.state is ReducerState.FAILED
    with pytest.raises(FusedReduceError, match="cannot be used any more"):
        reducer.check_finalized()
    reducer.set_communicator(Loopback((torch.clone,)))
    for _ in range(3):
        clear(parameters)
        step(reducer, [torch.randn_like(one) for one in parameters])
        assert _latest(reducer) is None


class OnFirstGpu(torch.Tensor):
    """Says that it is on cuda:0."""

    is_cuda = True
    device = torch.device("cuda", 0)


def test_what_comes_to_the_host_is_awaited_on_its_own_devices_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Final callbacks run in the thread of whichever device was last: the current device may be another one."""
    recorded: list[torch.device] = []

    def current_stream(device: torch.device | None = None) -> torch.device:
        return device or torch.device("cuda", 1)  # which is current

    class Event:
        def record(self, stream: torch.device | None = None) -> None:
            recorded.append(stream or current_stream())

        def query(self) -> bool:
            return True

    def unpinned(tensor: torch.Tensor, *, device: str, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch, "empty_like", unpinned)
    communicator = Loopback()
    first, gathered = torch.tensor([1, 7]), torch.tensor([[1, 7], [-1, 0]]).as_subclass(OnFirstGpu)
    monkeypatch.setattr(communicator, "all_gather", lambda _: (LoopbackPending(lambda: gathered), gathered))
    check = FiniteCheck(lambda number, index: ("ab"[number], index), Group(communicator), raises=False)
    check.complete(check.start_exchange(first))
    nothing, total = torch.zeros(2, dtype=torch.float64), torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    check.end_step(1, Totals(nothing, nothing, torch.tensor([-1, 7]), total))
    assert recorded == [torch.device("cuda", 0)]
    report = check.make_reports()
    assert report is not None and [str(one) for one in report.culprits] == ["rank 0, b, element 7"]
