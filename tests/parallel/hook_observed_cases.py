"""What ranks run in test_hook_observed.py."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel.observed_cases import Observed, Several, planted, several_inputs
from support.ddp_models import assert_same_on_all_ranks, batch, hooked, loss_of, mlp
from support.inside import HOOKS_ROWS, inside_hook
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import fusedreduce
from fusedreduce.buckets.stats.non_finite import Culprit
from fusedreduce.comm.process_group import ProcessGroupCommunicator
from fusedreduce.errors import NonFiniteGradientError
from fusedreduce.kernels import counting, dispatch


def observing(
    model: nn.Module, wire: Any, check: Any = "off", *, stats: bool = True
) -> tuple[DistributedDataParallel, fusedreduce.FusedHookState]:
    """`model` under torch's DDP with a hook that observes, and has no names."""
    return hooked(model, state=fusedreduce.FusedHookState(wire=wire, grad_stats=stats, check_finite=check))


def flushed(rank: int, world: int) -> dict[str, float]:
    """Half of rank 1's gradients are too small for fp16."""
    model = nn.Linear(4, 1, bias=False)
    ddp, state = observing(model, "fp16")
    features = torch.tensor([[1.0, 1.0, 1e-9, 1e-9]]) if rank else torch.tensor([[1.0, 0.0, 0.0, 1.0]])
    ddp(features).sum().backward()
    return state.grad_stats(model)


def rows_stay(rank: int, world: int) -> None:
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


def overflow_on_the_wire(rank: int, world: int) -> tuple[int, tuple[str, ...], str]:
    """Finite on every rank; their sum is not, in fp16."""
    model = nn.Linear(3, 1, bias=False)
    ddp, state = observing(model, "fp16", "count")
    ddp(torch.tensor([[1.0, 1e5, 1.0]])).sum().backward()
    (report,) = state.non_finite()
    return len(report.culprits), report.reduced, str(report)


def joined(rank: int, world: int, check: str) -> list[tuple[int, str, int]]:
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
    return [(one.rank, one.parameter, one.index) for one in report.culprits]


def counted(rank: int, world: int, wire: str, check: str, stats: bool) -> dict[str, Any]:
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
    return {
        "buckets": state.stats()["buckets"],
        "issued": issued,
        "functions": [one.function for one in launches],
        "known": state.stats()["collectives"],
    }


def modules_on_one_state(rank: int, world: int, wire: str) -> None:
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


def disagreeing_options(rank: int, world: int) -> str:
    """One rank does not look for what is not finite; the next step, with a new state, works."""
    ddp, _ = observing(mlp(), "bf16", "count" if rank else "off")
    with pytest.raises(fusedreduce.AgreementError) as caught:
        loss_of(ddp(batch(rank, 0))).backward()
    dist.barrier()
    return str(caught.value)


def another_architecture(rank: int, world: int, stats: bool) -> str:
    """Sums would differ in their last bits, and with them what a user makes of a norm."""
    ddp, state = observing(mlp(), "bf16", "count", stats=stats)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "arithmetic", lambda device: f"sm_{80 + 10 * rank}")
        if not stats:
            loss_of(ddp(batch(rank, 0))).backward()
            return ""
        with pytest.raises(fusedreduce.AgreementError) as caught:
            loss_of(ddp(batch(rank, 0))).backward()
    return str(caught.value)


def gather_fails(rank: int, world: int) -> str:
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
    return str(caught.value)
