"""What fused_hook finds out on the way: norms, statistics, what is not finite; 2 Gloo ranks and in this process."""

from __future__ import annotations

import contextlib
import copy
import math
import pickle
from typing import Any

import pytest
import torch
from support.comm_hooks import Shown
from support.ddp_models import assert_same_on_all_ranks, batch, hooked, loss_of, mlp
from support.inside import HOOKS_ROWS, inside_hook
from support.observed import Observed, Several, planted, several_inputs
from support.ranks import fake_group, on_ranks
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import fusedreduce
from fusedreduce.buckets.data_path import fp16_split
from fusedreduce.buckets.stats.non_finite import Culprit
from fusedreduce.comm.process_group import ProcessGroupCommunicator
from fusedreduce.errors import NonFiniteGradientError
from fusedreduce.kernels import counting, dispatch

pytestmark = pytest.mark.usefixtures("path")


def observing(
    model: nn.Module, wire: Any, check: Any = "off", *, stats: bool = True
) -> tuple[DistributedDataParallel, fusedreduce.FusedHookState]:
    """`model` under torch's DDP with a hook that observes, and has no names."""
    return hooked(model, state=fusedreduce.FusedHookState(wire=wire, grad_stats=stats, check_finite=check))


@on_ranks(2)
def test_what_the_wire_flushes_to_zero(rank: int, world: int) -> None:
    """Half of rank 1's gradients are too small for fp16."""
    model = nn.Linear(4, 1, bias=False)
    ddp, state = observing(model, "fp16")
    features = torch.tensor([[1.0, 1.0, 1e-9, 1e-9]]) if rank else torch.tensor([[1.0, 0.0, 0.0, 1.0]])
    ddp(features).sum().backward()
    stats = state.grad_stats(model)
    assert stats["grad_flushed"] == stats["grad_flushed/weight"] == (0.5 if rank else 0.0)


@on_ranks(2)
def test_a_sparse_bucket_has_the_same_rows_in_every_step(rank: int, world: int) -> None:
    """Else those of all buckets would be copied next to each other, and their spans uploaded, step by step."""
    one = Observed("hook", Several(), "bf16", check="count")
    together = []
    for step in range(6):
        one.ddp.zero_grad()
        loss_of(one.ddp(several_inputs(rank, step))).backward()
        one.check()
        latest = inside_hook(one.state).latest_step()
        assert any(rows.chunks is None for rows in latest.shown)
        together.append(latest.together)
    # DDP lays its buckets out anew for the second step.
    assert all(len(rows) == 1 and rows[0] is together[2][0] for rows in together[2:])


@on_ranks(2)
def test_an_overflow_on_the_wire_is_nobodys_fault(rank: int, world: int) -> None:
    """Finite on every rank; their sum is not, in fp16."""
    model = nn.Linear(3, 1, bias=False)
    ddp, state = observing(model, "fp16", "count")
    ddp(torch.tensor([[1.0, 1e5, 1.0]])).sum().backward()
    (report,) = state.non_finite()
    culprits, reduced, text = len(report.culprits), report.reduced, str(report)
    assert culprits == 0 and reduced == ("bucket 0, parameter 0 of shape (1, 3)",)
    assert "every rank's gradients were finite" in text


@pytest.mark.parametrize("check", ["count", "raise"])
@on_ranks(2)
def test_ranks_that_have_joined_learn_of_it_too(rank: int, world: int, check: str) -> None:
    """Rank 0 has no inputs any more when rank 1's gradient is not finite; both learn of it, or raise."""
    ddp, state = observing(mlp(), "bf16", check)
    state.name_parameters(ddp.module)
    raised = False
    try:
        with Join([ddp]):
            for step in range(3 + 2 * rank):
                ddp.zero_grad()
                with planted(ddp.module[0].bias, 3, math.inf) if step == 4 else contextlib.nullcontext():
                    loss_of(ddp(batch(rank, step))).backward()
    except NonFiniteGradientError:
        raised = True
    assert raised is (check == "raise")
    (report,) = state.non_finite()
    assert report.step == 5
    if not raised:
        assert_same_on_all_ranks([state.grad_norm().reshape(1)])
    assert [(one.rank, one.parameter, one.index) for one in report.culprits] == [(1, "0.bias", 3)]


@pytest.mark.parametrize(("check", "stats"), [("off", False), ("off", True), ("count", False), ("count", True)])
@pytest.mark.parametrize("wire", ["native", "bf16"])
@on_ranks(2)
def test_launches_and_collectives(rank: int, world: int, wire: str, check: str, stats: bool) -> None:
    """Launches and collectives of one step."""
    ddp, state = observing(mlp(), wire, check, stats=stats)
    for step in range(3):
        loss_of(ddp(batch(rank, step))).backward()
    issued: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for method in ("all_reduce", "all_gather", "all_gather_bytes"):
            known = getattr(ProcessGroupCommunicator, method)

            def spy(*arguments: Any, _known: Any = known, _method: str = method) -> Any:
                issued.append(_method)
                return _known(*arguments)

            patch.setattr(ProcessGroupCommunicator, method, spy)
        for rows in HOOKS_ROWS:
            rows.replace(patch, lambda *_, **__: pytest.fail("rows are made anew"))
        with counting.count_launches() as launches:
            loss_of(ddp(batch(rank, 4))).backward()
            if stats:
                state.grad_norm(), state.grad_norms(ddp.module), state.grad_norm(math.inf)
    buckets, checks = int(state.stats()["buckets"]), check != "off"
    assert issued == ["all_reduce"] * buckets + ["all_gather"] * checks
    measured = (checks + (checks or stats)) * buckets if wire == "native" else 0
    expected = {
        "pack": buckets,
        "unpack": 0 if wire == "native" else buckets,
        "measure": measured,
        "reduce_source_partials": int(checks),
        "reduce_partials": int(checks or stats),
    }
    functions = [one.function for one in launches]
    assert {name: functions.count(name) for name in expected} == expected
    assert len(functions) == sum(expected.values())


@pytest.mark.parametrize("wire", ["native", "fp16"])
@on_ranks(2)
def test_several_modules_on_one_state(rank: int, world: int, wire: str) -> None:
    """One after the other, and in one backward: answers for the one that ended last; both are looked at."""
    first = Observed("hook", mlp(1), wire, check="count")
    second = Observed("hook", mlp(2), state=first.state)
    both, state = (first.ddp, second.ddp), first.state
    state.name_parameters(nn.ModuleDict({"first": first.ddp.module, "second": second.ddp.module}))
    for step in range(3):
        for one in (first, second):
            one.ddp.zero_grad()
            loss_of(one.ddp(batch(rank, step))).backward()
            one.check()
        with pytest.raises(ValueError, match="is no parameter of this Sequential"):
            first.grad_norms()
    for number, bad in enumerate(both):
        for ddp in both:
            ddp.zero_grad()
        with planted(bad.module[0].weight, 11, math.nan) if rank == 1 else contextlib.nullcontext():
            (loss_of(both[0](batch(rank, 5))) + loss_of(both[1](batch(rank, 6)))).backward()
        (culprit,) = state.non_finite()[-1].culprits
        assert culprit == Culprit(1, f"{('first', 'second')[number]}.0.weight", 11)
    assert len(state.non_finite()) == 2 and state.stats()["steps"] == 10


@pytest.mark.parametrize("stats", [True, False])
@on_ranks(2)
def test_norms_ask_for_ranks_that_compute_alike(rank: int, world: int, stats: bool) -> None:
    """Sums would differ in their last bits, and with them what a user makes of a norm."""
    ddp, state = observing(mlp(), "bf16", "count", stats=stats)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "arithmetic", lambda device: f"sm_{80 + 10 * rank}")
        if not stats:
            loss_of(ddp(batch(rank, 0))).backward()
            return
        with pytest.raises(fusedreduce.AgreementError) as caught:
            loss_of(ddp(batch(rank, 0))).backward()
    assert 'arithmetic of grad_stats: "sm_80" on rank 0; "sm_90" on rank 1' in str(caught.value)


@on_ranks(2)
def test_telling_the_ranks_fails(rank: int, world: int) -> None:
    """Telling the ranks fails on this one: it says so, and reduces no more."""
    ddp, state = observing(mlp(), "bf16", "count")
    loss_of(ddp(batch(rank, 0))).backward()
    known = ProcessGroupCommunicator.all_gather

    class Failing:
        def wait(self) -> None:
            raise RuntimeError("Connection closed by peer")

    def all_gather(self: ProcessGroupCommunicator, one: torch.Tensor) -> Any:
        started = known(self, one)
        return started if one.dtype is torch.uint8 else (Failing(), started[1])  # bytes: the ranks agree

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessGroupCommunicator, "all_gather", all_gather)
        with pytest.raises(fusedreduce.CollectiveError) as caught:
            loss_of(ddp(batch(rank, 1))).backward()
    with pytest.raises(fusedreduce.FusedReduceError, match="an earlier reduction failed"):
        loss_of(ddp(batch(rank, 1))).backward()
    text = str(caught.value)
    assert f"rank {rank}: the exchange of non-finite gradients between the ranks failed after " in text


def _show(state: fusedreduce.FusedHookState, *buckets: Any) -> None:
    for bucket in buckets:
        fusedreduce.fused_hook(state, bucket).wait()


def _parameters(*sizes: int) -> list[torch.Tensor]:
    return [torch.arange(size, dtype=torch.float32) + 1 for size in sizes]


def test_options_are_checked_and_kept() -> None:
    with pytest.raises(ValueError, match="unknown check_finite 'yes': use one of 'off', 'count', 'raise'"):
        fusedreduce.FusedHookState(check_finite="yes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="grad_stats must be True or False"):
        fusedreduce.FusedHookState(grad_stats=1)  # type: ignore[arg-type]
    state = fusedreduce.FusedHookState(
        wire="fp16", accumulation="fp32", grad_stats=True, check_finite="raise", stall_report_s=3.0
    )
    for other in (pickle.loads(pickle.dumps(state)), copy.copy(state), copy.deepcopy(state)):
        assert (
            other.config == state.config
            and inside_hook(other).statistics.wanted
            and inside_hook(other).statistics.checks
        )


def test_what_cannot_be_answered_is_refused(alone: None) -> None:
    state = fusedreduce.FusedHookState(wire="bf16", check_finite="count")
    _show(state, Shown(0, _parameters(3), last=True))
    for ask in (state.grad_norm, state.grad_stats, lambda: state.grad_norms(nn.Linear(1, 1))):
        with pytest.raises(fusedreduce.FusedReduceError, match=r"FusedHookState\(grad_stats=True\)"):
            ask()
    state = fusedreduce.FusedHookState(grad_stats=True)
    with pytest.raises(fusedreduce.FusedReduceError, match="no synchronised backward has ended"):
        state.grad_norm()
    one, other = _parameters(3, 4)
    _show(state, Shown(0, [one], last=True))
    for norm_type in (1.0, 0.0, -2.0, math.nan):
        with pytest.raises(ValueError, match="norm_type must be 2 or inf"):
            state.grad_norm(norm_type)
    _show(state, Shown(0, [one], last=False))
    with pytest.raises(fusedreduce.FusedReduceError, match="no synchronised backward has ended"):
        state.grad_norm()
    assert state.non_finite() == []


@pytest.mark.parametrize("wire", ["native", "bf16"])
def test_interleaved_modules_have_no_norm_but_are_looked_at(alone: None, wire: Any) -> None:
    state = fusedreduce.FusedHookState(wire=wire, grad_stats=True, check_finite="count")
    mine, others, thirds = _parameters(3, 4), _parameters(5, 2, 6), _parameters(7, 8)
    others[2][3] = math.inf

    def refused() -> None:
        with pytest.raises(fusedreduce.FusedReduceError, match="came interleaved"):
            state.grad_norm()

    _show(state, Shown(0, mine[:1], last=False), Shown(0, others[:1], last=False), Shown(1, mine[1:], last=True))
    refused()
    _show(state, Shown(0, thirds[:1], last=False), Shown(1, others[1:], last=True))
    refused()
    _show(state, Shown(1, thirds[1:], last=True))
    refused()
    (report,) = state.non_finite()
    assert report.step == 2 and [str(one) for one in report.culprits] == [
        "rank 0, bucket 1, parameter 1 of shape (6,), element 3"
    ]
    _show(state, Shown(0, mine[:1], last=False), Shown(1, mine[1:], last=True))
    assert state.grad_norm().item() == pytest.approx(math.sqrt(1 + 4 + 9 + 1 + 4 + 9 + 16))


def test_rows_are_found_however_buckets_mingle(alone: None) -> None:
    state = fusedreduce.FusedHookState(wire="bf16", check_finite="count")
    (a, b), (c, d) = _parameters(3, 4), _parameters(5, 6)
    order = ((a, c, b), (d,), (c, d), (a, c, b), (a, b))
    for step, segment in enumerate(order, 1):
        for bad in (None, *segment):
            for weight in segment:
                buffer = weight.clone()
                if weight is bad:
                    buffer[2] = math.nan
                index = int(weight is b or weight is d)
                _show(state, Shown(index, [weight], last=weight is segment[-1], buffer=buffer))
            reports = [str(one.culprits[0]) for one in state.non_finite()]
            if bad is None:
                before = len(reports)
            else:
                before += 1
                assert len(reports) == before, (step, reports)
                assert reports[-1].endswith(f"parameter 0 of shape ({len(bad)},), element 2")


def test_a_backward_that_was_given_up_is_forgotten(alone: None) -> None:
    state = fusedreduce.FusedHookState(grad_stats=True)
    first, second = _parameters(3, 4)
    _show(state, Shown(0, [first], last=False), Shown(0, [first], last=False), Shown(1, [second], last=True))
    assert state.grad_norm(math.inf).item() == 4.0


@pytest.mark.parametrize("failing", [0, 1])
def test_what_fails_outside_backward_is_no_part_of_the_next_modules_step(alone: None, failing: int) -> None:
    """As DDP's join calls the hook."""
    state = fusedreduce.FusedHookState(grad_stats=True, check_finite="count")
    first, second = _parameters(3, 4), _parameters(5, 2)
    integers = torch.ones(first[failing].shape, dtype=torch.int32)
    buffers = [integers if place == failing else None for place in range(2)]
    with pytest.raises(TypeError, match=f"bucket {failing} .* holds torch.int32"):
        _show(
            state, *(Shown(place, first[place : place + 1], last=place == 1, buffer=buffers[place]) for place in (0, 1))
        )
    _show(state, Shown(0, second[:1], last=False), Shown(1, second[1:], last=True))
    assert state.grad_norm().item() == pytest.approx(math.sqrt(1 + 4 + 9 + 16 + 25 + 1 + 4))


def test_other_parameters_in_a_bucket_of_the_same_size_and_address(alone: None) -> None:
    state = fusedreduce.FusedHookState(wire="bf16", grad_stats=True, check_finite="count")
    module = nn.Module()
    module.a, module.b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(5))
    buffer = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])
    squares = buffer.double().square()
    for order, cut in (([module.a, module.b], 2), ([module.b, module.a], 5)):
        _show(state, Shown(0, order, last=True, buffer=buffer))
        norms = [one.item() ** 2 for one in state.grad_norms(module).values()]
        parts = [squares[:cut].sum().item(), squares[cut:].sum().item()]
        assert norms == pytest.approx(parts if order[0] is module.a else parts[::-1])
    buffer[5] = math.nan
    state.name_parameters(module)
    _show(state, Shown(0, [module.b, module.a], last=True, buffer=buffer))
    assert [str(one) for one in state.non_finite()[0].culprits] == ["rank 0, a, element 0"]
    assert list(state.grad_norms(module)) == ["a", "b"]


def test_rows_of_an_empty_bucket_stay_as_long_as_its_parameters(alone: None) -> None:
    state = fusedreduce.FusedHookState(wire="bf16", grad_stats=True, check_finite="count")
    dense, empty = *_parameters(3), torch.zeros(0)
    together = []
    for _ in range(4):
        _show(state, Shown(0, [dense], last=False), Shown(1, [empty], last=True))
        assert state.grad_norm().item() == pytest.approx(math.sqrt(1 + 4 + 9))
        together.append(inside_hook(state).latest_step().together[0])
    assert all(one is together[0] for one in together)
    other = torch.zeros(0)
    _show(state, Shown(0, [dense], last=False), Shown(1, [other], last=True))
    assert inside_hook(state).rows_without_bucket == 2
    del empty
    for _ in range(20):
        other = torch.zeros(0)
        _show(state, Shown(0, [dense], last=False), Shown(1, [other], last=True))
    assert inside_hook(state).rows_without_bucket == 1


def test_the_state_keeps_no_parameter_alive(alone: None) -> None:
    import gc
    import weakref

    state = fusedreduce.FusedHookState(wire="bf16", grad_stats=True, check_finite="count")
    module = nn.Linear(3, 2)
    state.name_parameters(module)
    _show(state, Shown(0, list(module.parameters()), last=True))
    gone = weakref.ref(module.weight)
    del module
    gc.collect()
    assert gone() is None
    with pytest.raises(ValueError, match=r"bucket 0, parameter 0 of shape \(2, 3\) was reduced"):
        state.grad_norms(nn.Linear(3, 2))


def test_raise_outside_backward_and_the_next_step(alone: None) -> None:
    state = fusedreduce.FusedHookState(wire="bf16", check_finite="raise")
    weights = _parameters(4, 5, 3)
    bad = torch.cat(weights)
    bad[4 + 2] = math.nan
    for _ in range(2):
        with pytest.raises(NonFiniteGradientError, match=r"bucket 0, parameter 1 of shape \(5,\), element 2"):
            _show(state, Shown(0, weights, last=True, buffer=bad.clone()))
        _show(state, Shown(0, weights, last=True))
    assert [one.step for one in state.non_finite()] == [1, 3]


def test_an_fp16_wire_divides_in_two_powers_of_two() -> None:
    """Eight ranks, of which seven have nothing: 1e-6 / 8 is below fp16's smallest number, 1e-6 / 2 is not."""
    with fake_group(8):
        assert fp16_split(8) == 4.0
        for stats in (False, True):
            state = fusedreduce.FusedHookState(wire="fp16", grad_stats=stats)
            for dtype, expected in ((torch.float32, 2.0**-25 / 8), (torch.float64, 2.0**-25 / 8), (torch.float16, 0.0)):
                weight = torch.full((5,), 2.0**-23 if dtype is not torch.float16 else 2.0**-24, dtype=dtype)
                bucket: Any = Shown(0, [weight], last=True)
                mean = fusedreduce.fused_hook(state, bucket).wait()
                assert mean.dtype is dtype
                assert mean.tolist() == [2.0**-26 if expected else 0.0] * 5


@pytest.mark.parametrize("wire", ["native", "fp16"])
def test_fp16_gradients_are_divided_once_where_they_are_the_wire(wire: Any) -> None:
    """Nothing is unpacked there that could take a split off again."""
    with fake_group(8):
        bucket: Any = Shown(0, [torch.full((5,), 16.0, dtype=torch.float16)], last=True)
        mean = fusedreduce.fused_hook(fusedreduce.FusedHookState(wire=wire), bucket).wait()
        assert mean.dtype is torch.float16 and mean.tolist() == [16.0 / 8] * 5
