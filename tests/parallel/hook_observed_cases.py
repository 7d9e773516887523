"""What ranks run in test_hook_observed.py."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.hook_cases import Branches, ComplexNet, Zoo, assert_same_on_all_ranks, batch, hooked, images, loss_of, mlp
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fusedreduce
from fusedreduce.comm.process_group import ProcessGroupCommunicator
from fusedreduce.errors import NonFiniteGradientError
from fusedreduce.kernels import dispatch

RELATIVE = 1e-6


def observing(
    model: nn.Module, wire: Any, check: Any = "off", stats: bool = True, **options: Any
) -> tuple[DistributedDataParallel, fusedreduce.FusedHookState]:
    """`model` under torch's DDP with a hook that observes."""
    state = fusedreduce.FusedHookState(wire=wire, grad_stats=stats, check_finite=check)
    return hooked(model, state=state, **options)


class Several(nn.Module):
    """Everything at once: the zoo, a sparse embedding, a complex weight."""

    def __init__(self) -> None:
        super().__init__()
        self.zoo = Zoo()
        self.embedding = nn.Embedding(20, 6, sparse=True)
        self.complex = ComplexNet()

    def forward(self, given: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        image, tokens, features = given
        return (*self.zoo(image), self.embedding(tokens), self.complex(features))


def several_inputs(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For `Several`."""
    tokens = torch.randint(0, 20, (7,), generator=torch.Generator().manual_seed(17 * step + rank))
    return images(rank, step), tokens, batch(rank, step)


def exact(model: nn.Module) -> dict[str, tuple[float, float]]:
    """By name the L2 and the inf-norm of each gradient, in fp64."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            gradient = parameter.grad
            assert gradient is not None
            values = (gradient.coalesce().values() if gradient.is_sparse else gradient).detach()
            size = values.abs().double() if values.is_complex() else values.double().abs()
            wide = torch.view_as_real(values) if values.is_complex() else values
            peak = float(size.max()) if values.numel() else 0.0
            found[name] = float(wide.double().square().sum().sqrt()), peak
    return found


def assert_norms(state: fusedreduce.FusedHookState, model: nn.Module) -> None:
    """All that the state says of the latest step, against fp64 and the other ranks."""
    expected = exact(model)
    l2, largest = state.grad_norms(model), state.grad_norms(model, math.inf)
    assert list(l2) == list(expected) == list(largest)
    for name, (size, peak) in expected.items():
        assert l2[name].item() == pytest.approx(size, rel=RELATIVE), name
        assert largest[name].item() == pytest.approx(peak, rel=RELATIVE), name
    total = math.sqrt(math.fsum(size**2 for size, _ in expected.values()))
    norm = state.grad_norm()
    assert norm.dtype is torch.float64 and norm.dim() == 0
    assert norm.item() == pytest.approx(total, rel=RELATIVE)
    assert state.grad_norm(math.inf).item() == max(one.item() for one in largest.values())
    assert_same_on_all_ranks([norm.reshape(1), *[one.reshape(1) for one in l2.values()]])
    stats = state.grad_stats(model)
    assert stats["grad_norm"] == norm.item() and stats["grad_absmax"] == state.grad_norm(math.inf).item()
    assert set(stats) == {key + end for key in KEYS for end in ("", *[f"/{name}" for name in expected])}
    assert {name: stats[f"grad_norm/{name}"] for name in l2} == {name: one.item() for name, one in l2.items()}
    assert set(state.grad_stats()) == set(KEYS)


KEYS = ("grad_norm", "grad_absmax", "grad_flushed")


def norms(rank: int, world: int, wire: str, check: str, as_view: bool) -> None:
    """DDP lays its buckets out anew after the first step; parameters of every kind."""
    ddp, state = observing(Several(), wire, check, gradient_as_bucket_view=as_view)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for step in range(4):
        optimizer.zero_grad()
        if step == 2:
            with ddp.no_sync():
                loss_of(ddp(several_inputs(rank, 40))).backward()
        loss_of(ddp(several_inputs(rank, step))).backward()
        assert_norms(state, ddp.module)
        optimizer.step()
    assert state.non_finite() == []
    collectives = state.stats()["collectives"]
    loss_of(ddp(several_inputs(rank, 9))).backward()
    issued = int(state.stats()["collectives"]) - int(collectives)
    assert issued == int(state.stats()["buckets"]) + (check != "off")


def flushed(rank: int, world: int) -> dict[str, float]:
    """Half of rank 1's gradients are too small for fp16."""
    model = nn.Linear(4, 1, bias=False)
    ddp, state = observing(model, "fp16")
    features = torch.tensor([[1.0, 1.0, 1e-9, 1e-9]]) if rank else torch.tensor([[1.0, 0.0, 0.0, 1.0]])
    ddp(features).sum().backward()
    return state.grad_stats(model)


@contextlib.contextmanager
def planted(parameter: torch.Tensor, index: int, value: float) -> Iterator[None]:
    """One element of the gradient."""

    def plant(gradient: torch.Tensor) -> torch.Tensor:
        bad = gradient.clone(memory_format=torch.preserve_format)
        bad.view(-1)[index] = value
        return bad

    handle = parameter.register_hook(plant)
    try:
        yield
    finally:
        handle.remove()


def plantings(rank: int, world: int, wire: str, count: int, as_view: bool) -> None:
    """One element on one rank, or on every rank one of its own: found by all, and nothing else is."""
    ddp, state = observing(mlp(), wire, "count", stats=False, gradient_as_bucket_view=as_view)
    state.name_parameters(ddp.module)
    named = list(ddp.module.named_parameters())
    draw = random.Random(5)
    seen = 0
    for step in range(count):
        places = []
        for _ in range(world):
            name, parameter = draw.choice(named)
            places.append((name, parameter, draw.randrange(parameter.numel()), draw.choice((math.nan, math.inf))))
        bad = [[], [0], [1], [0, 1]][draw.randrange(4)]
        ddp.zero_grad()
        with contextlib.ExitStack() as stack:
            if rank in bad:
                _, parameter, index, value = places[rank]
                stack.enter_context(planted(parameter, index, value))
            loss_of(ddp(batch(rank, step))).backward()
        reports = state.non_finite()
        if not bad:
            assert len(reports) == min(seen, 100)
            continue
        seen += 1
        report = reports[-1]
        assert report.step == step + 1
        assert [(one.rank, one.parameter, one.index) for one in report.culprits] == [
            (one, places[one][0], places[one][2]) for one in bad
        ]
        assert set(report.reduced) == {places[one][0] for one in bad}


def planted_in_others(rank: int, world: int, wire: str) -> list[str]:
    """A sparse gradient and a complex one; without names."""
    ddp, state = observing(Several(), wire, "count")
    loss_of(ddp(several_inputs(rank, 0))).backward()
    texts = []
    for parameter in (ddp.module.embedding.weight, ddp.module.complex.weight, ddp.module.zoo.conv.weight):
        ddp.zero_grad()
        handle = parameter.register_hook(_poisoned if rank == 1 else lambda gradient: gradient)
        loss_of(ddp(several_inputs(rank, 1))).backward()
        handle.remove()
        (culprit,) = state.non_finite()[-1].culprits
        texts.append(f"{culprit.rank}: {culprit.parameter}, {culprit.index}")
        assert state.non_finite()[-1].reduced == (culprit.parameter,)
        assert math.isnan(state.grad_norm().item()) and math.isnan(state.grad_norm(math.inf).item())
    return texts


def rows_stay(rank: int, world: int) -> None:
    """Else those of all buckets would be copied next to each other, and their spans uploaded, step by step."""
    ddp, state = observing(Several(), "bf16", "count")
    together = []
    for step in range(6):
        ddp.zero_grad()
        loss_of(ddp(several_inputs(rank, step))).backward()
        assert_norms(state, ddp.module)
        latest = state._reduction.observed._latest
        assert latest is not None and any(rows.chunks is None for rows in latest.shown)
        together.append(latest.together)
    # DDP lays its buckets out anew for the second step.
    assert all(len(one) == 1 and one[0] is together[2][0] for one in together[2:])


def _poisoned(gradient: torch.Tensor) -> torch.Tensor:
    """The fifth element as it lies in memory."""
    bad = gradient.clone()
    if bad.is_sparse:
        bad._values().view(-1)[5] = math.nan
    else:
        bad.as_strided((bad.numel(),), (1,))[5] = math.nan
    return bad


def used_by_one_rank(rank: int, world: int, wire: str) -> None:
    """A NaN in what no other rank has a gradient of; a parameter that nobody uses counts as zeros."""
    ddp, state = observing(Branches(), wire, "count", find_unused_parameters=True, bucket_cap_mb=0.001)
    state.name_parameters(ddp.module)
    for step in range(4):
        ddp.zero_grad()
        which = (rank + step) % 2
        bias = ddp.module.layers[which].bias
        with planted(bias, 3, math.nan) if rank == 1 and step else contextlib.nullcontext():
            loss_of(ddp((batch(rank, step), which))).backward()
        norms = state.grad_norms(ddp.module)
        assert norms["layers.2.weight"].item() == 0.0 and ddp.module.layers[2].weight.grad is None
        if step:
            (culprit,) = state.non_finite()[-1].culprits
            assert (culprit.rank, culprit.parameter, culprit.index) == (1, f"layers.{(1 + step) % 2}.bias", 3)
        else:
            squares = [p.grad.double().square().sum().item() for p in ddp.parameters() if p.grad is not None]
            assert state.grad_norm().item() == pytest.approx(math.sqrt(math.fsum(squares)), rel=RELATIVE)
    assert len(state.non_finite()) == 3


def static_graph(rank: int, world: int, wire: str) -> None:
    """All buckets of the first step are shown at its end."""
    ddp, state = observing(mlp(), wire, "raise", static_graph=True)
    for step in range(4):
        ddp.zero_grad()
        if step == 2:
            with planted(ddp.module[0].weight, 0, math.nan), pytest.raises(NonFiniteGradientError):
                loss_of(ddp(batch(rank, step))).backward()
        else:
            loss_of(ddp(batch(rank, step))).backward()
            assert_norms(state, ddp.module)
    assert [one.step for one in state.non_finite()] == [3] and len(state.non_finite()[0].culprits) == world


def reentrant_checkpoint(rank: int, world: int, wire: str) -> None:
    """Buckets become ready within a backward inside the backward."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(8)
            self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))

        def forward(self, features: torch.Tensor) -> torch.Tensor:
            hidden = torch.tanh(self.layers[0](features))
            hidden = checkpoint(lambda x: torch.tanh(self.layers[1](x)), hidden, use_reentrant=True)
            result: torch.Tensor = self.layers[2](hidden)
            return result

    ddp, state = observing(Checkpointed(), wire, "raise")
    for step in range(5):
        ddp.zero_grad()
        if step == 3:
            with planted(ddp.module.layers[1].weight, 2, math.nan), pytest.raises(NonFiniteGradientError):
                loss_of(ddp(batch(rank, step))).backward()
        else:
            loss_of(ddp(batch(rank, step))).backward()
            assert_norms(state, ddp.module)


def in_our_wrapper(rank: int, world: int, wire: str) -> None:
    """The same hook in the wrapper, which takes the place of DDP there."""
    ddp = fusedreduce.DistributedDataParallel(mlp(), bucket_cap_mb=0.004)
    state = fusedreduce.FusedHookState(wire=wire, grad_stats=True, check_finite="raise")  # type: ignore[arg-type]
    ddp.register_comm_hook(state, fusedreduce.fused_hook)
    for step in range(4):
        ddp.zero_grad()
        if step == 2:
            with planted(ddp.module[0].weight, 0, math.nan), pytest.raises(NonFiniteGradientError):
                loss_of(ddp(batch(rank, step))).backward()
        else:
            loss_of(ddp(batch(rank, step))).backward()
            assert_norms(state, ddp.module)


def overflow_on_the_wire(rank: int, world: int) -> tuple[int, tuple[str, ...], str]:
    """Finite on every rank; their sum is not, in fp16."""
    model = nn.Linear(3, 1, bias=False)
    ddp, state = observing(model, "fp16", "count")
    ddp(torch.tensor([[1.0, 1e5, 1.0]])).sum().backward()
    (report,) = state.non_finite()
    return len(report.culprits), report.reduced, str(report)


def raises(rank: int, world: int, wire: str, as_view: bool) -> str:
    """On every rank, after DDP has finished; the next steps work."""
    ddp, state = observing(mlp(), wire, "raise", gradient_as_bucket_view=as_view)
    state.name_parameters(ddp.module)
    text = ""
    for step in range(4):
        ddp.zero_grad()
        weight = ddp.module[2].weight
        with planted(weight, 7, math.nan) if rank == 1 and step in (0, 2) else contextlib.nullcontext():
            if step not in (0, 2):
                loss_of(ddp(batch(rank, step))).backward()
                assert_norms(state, ddp.module)
                continue
            with pytest.raises(NonFiniteGradientError) as caught:
                loss_of(ddp(batch(rank, step))).backward()
            text = str(caught.value)
            assert weight.grad is not None and math.isnan(weight.grad.view(-1)[7].item()), "DDP has finished its step"
            assert state._reduction.errors.out_of_step is None and len(state.non_finite()) == step // 2 + 1
    return text


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
        for made in ("BucketPartials", "JoinedPartials"):
            patch.setattr(f"fusedreduce.parallel.hook_stats.{made}", lambda *_, **__: pytest.fail("rows are made anew"))
        with dispatch.count_launches() as launches:
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
    first, state = observing(mlp(1), wire, "count")
    second, _ = hooked(mlp(2), state=state)
    state.name_parameters(nn.ModuleDict({"first": first.module, "second": second.module}))
    for step in range(3):
        for model in (first, second):
            model.zero_grad()
            loss_of(model(batch(rank, step))).backward()
            assert_norms(state, model.module)
        with pytest.raises(ValueError, match="is no parameter of this Sequential"):
            state.grad_norms(first.module)
    for bad in (first, second):
        first.zero_grad()
        second.zero_grad()
        with planted(bad.module[0].weight, 11, math.nan) if rank == 1 else contextlib.nullcontext():
            (loss_of(first(batch(rank, 5))) + loss_of(second(batch(rank, 6)))).backward()
        (culprit,) = state.non_finite()[-1].culprits
        name = "first.0.weight" if bad is first else "second.0.weight"
        assert (culprit.rank, culprit.parameter, culprit.index) == (1, name, 11)
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
