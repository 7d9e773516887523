"""Steps of the wrapper that the caller ends, on 2 Gloo ranks."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.ddp_models import (
    STEPS,
    WIRES,
    assert_averaged,
    assert_same_on_all_ranks,
    assert_step_averages,
    batch,
    gradients,
    loss_of,
    mlp,
    wrapped,
)
from support.inside import inside
from support.ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fusedreduce
from fusedreduce import reducer_of

IN_TORCH = hasattr(TorchDDP, "finalize_backward")


@pytest.mark.parametrize(
    ("wire", "options"),
    [
        ("native", {}),
        ("native", {"static_graph": True}),
        ("native", {"find_unused_parameters": True}),
        ("native", {"gradient_as_bucket_view": True}),
        ("bf16", {"static_graph": True}),
        ("bf16", {"overlap": False, "policy": "static"}),
        ("fp16", {"gradient_as_bucket_view": True}),
        ("int8", {}),
        ("int8", {"find_unused_parameters": True}),
    ],
)
@on_ranks(2)
def test_steps_that_the_caller_ends_have_the_same_bits(
    rank: int, world: int, wire: str, options: dict[str, Any]
) -> None:
    """Training as without it, to the bit; gradients are this rank's own until the step is ended."""
    twin = wrapped(mlp(), wire, **options)
    ddp = wrapped(mlp(), wire, **options)
    ddp.require_manual_backward_finalization = True
    views = options.get("gradient_as_bucket_view", False)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (twin, ddp)]
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        if step == 3:
            with twin.no_sync(), ddp.no_sync():
                for model in (twin, ddp):
                    loss_of(model(batch(rank, 100))).backward()
                with pytest.raises(RuntimeError, match="no gradient reduction requires finalization"):
                    ddp.finalize_backward()
        local = copy.deepcopy(ddp.module)
        for model in (twin, local, ddp):
            loss_of(model(batch(rank, step))).backward()
        if not views and step != 3:
            assert all(map(torch.equal, gradients(ddp.module), gradients(local)))
        with pytest.raises(RuntimeError, match="Expected to have finalized the prior backward pass"):
            optimizers[1].step()
        ddp.finalize_backward()
        assert all(map(torch.equal, gradients(ddp), gradients(twin)))
        if step != 3:
            assert_averaged(ddp.module, local, wire)
        for optimizer in optimizers:
            optimizer.step()
    assert_same_on_all_ranks([parameter.detach() for parameter in ddp.parameters()])


@on_ranks(2)
def test_manual_refused(rank: int, world: int) -> None:
    """Where it is not possible."""
    ddp = wrapped(mlp())
    with pytest.raises(RuntimeError, match="manual backward finalization is not required"):
        ddp.finalize_backward()
    ddp.require_manual_backward_finalization = True
    assert_step_averages(ddp, batch(rank, 0), end=ddp.finalize_backward)
    ddp.mixed_precision = object()  # torch's, which a CPU does not have: its hooks end within the backward
    assert ddp.should_finalize_after_backward
    parameter = torch.zeros(24, requires_grad=True)
    parameter.register_hook(lambda _: ddp.finalize_backward())
    with pytest.raises(RuntimeError, match="with mixed_precision a step cannot be finalized within its backward"):
        parameter.sum().backward()
    model = nn.Sequential(mlp(), nn.Linear(12, 12).requires_grad_(False))
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    gate = torch.ones(24, requires_grad=True)
    delayed = fusedreduce.DistributedDataParallel(
        model, delay_all_reduce_named_params=named, param_to_hook_all_reduce=gate
    )
    assert not delayed.should_finalize_after_backward
    with pytest.raises(RuntimeError, match="not supported when all DDP parameters use delay_all_reduce_named_params"):
        delayed.require_manual_backward_finalization = True
    with pytest.raises(RuntimeError, match="not supported when all DDP parameters use delay_all_reduce_named_params"):
        delayed.finalize_backward()


@on_ranks(2)
def test_manual_scaled(rank: int, world: int) -> None:
    """Both loss scalers, with the step's end between backward and them."""
    for make in (lambda ddp: fusedreduce.FusedGradScaler(ddp, init_scale=8.0), lambda ddp: torch.amp.GradScaler("cpu")):
        ddp = wrapped(mlp())
        ddp.require_manual_backward_finalization = True
        optimizer, scaler = torch.optim.SGD(ddp.parameters(), lr=0.05), make(ddp)
        for step in range(4):
            local = copy.deepcopy(ddp.module)
            loss_of(local(batch(rank, step))).backward()
            optimizer.zero_grad()
            scaler.scale(loss_of(ddp(batch(rank, step)))).backward()
            with pytest.raises(RuntimeError, match="Expected to have finalized the prior backward pass"):
                optimizer.step()
            ddp.finalize_backward()
            scaler.unscale_(optimizer)
            assert_averaged(ddp.module, local)
            scaler.step(optimizer)
            scaler.update()


@on_ranks(2)
def test_manual_copied(rank: int, world: int) -> None:
    """A copy requires it as well; so does a wrapper over another group."""
    ddp = wrapped(mlp())
    ddp.require_manual_backward_finalization = True
    made = copy.deepcopy(ddp)
    assert made.require_manual_backward_finalization
    for step in range(3):
        assert_step_averages(made, batch(rank, step), end=made.finalize_backward)


@on_ranks(2)
def test_manual_join(rank: int, world: int) -> None:
    """Ranks that have run out of inputs wait for the others' end of a step."""
    ddp = wrapped(mlp())
    ddp.require_manual_backward_finalization = True
    with ddp.join():
        for step in range(2 + 3 * rank):
            ddp.zero_grad()
            loss_of(ddp(batch(rank, step))).backward()
            ddp.finalize_backward()
    assert reducer_of(ddp).steps == 2 + 3 * rank


@pytest.mark.skipif(not IN_TORCH, reason="torch has it from 2.15 on")
@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"gradient_as_bucket_view": True}], ids=str)
@on_ranks(2)
def test_the_end_of_a_step_is_refused_where_torch_refuses_it(rank: int, world: int, options: dict[str, Any]) -> None:
    """Every call at every place of a step raises torch's error, or none where torch raises none."""
    seen = [_calls_of(cls, rank, **options) for cls in (TorchDDP, fusedreduce.DistributedDataParallel)]
    assert len(seen[0]) == len(seen[1]) > 20
    for theirs, ours in zip(*seen, strict=True):
        assert ours[0] == theirs[0]
        # Ours may say more, and next_bucket_ is of another plan.
        known, told = (re.sub(r"\. (Call|Set|This can).*|=\d+", "", one[1]) for one in (theirs, ours))
        assert told.startswith(known) and bool(known) == bool(told), (theirs, ours)


def _calls_of(cls: Any, rank: int, **options: Any) -> list[tuple[str, str]]:
    ddp = cls(mlp(), **options)
    told: list[tuple[str, str]] = []

    def attempt(what: str, call: Callable[[], object]) -> None:
        try:
            value = call()
        except RuntimeError as error:
            told.append((what, str(error)))
        else:
            told.append((f"{what} {value if isinstance(value, bool) else ''}", ""))

    def switch(required: bool) -> None:
        ddp.require_manual_backward_finalization = required

    attempt("off", ddp.finalize_backward)
    attempt("asked while off", lambda: ddp.should_finalize_after_backward)
    switch(True)
    attempt("before a step", ddp.finalize_backward)
    for step in range(3):
        loss = loss_of(ddp(batch(rank, step)))
        attempt("asked", lambda: ddp.should_finalize_after_backward or "static_graph" in options)
        attempt("armed", ddp.finalize_backward)
        attempt("switched while armed", lambda: switch(False))
        attempt("the same while armed", lambda: switch(True))
        loss.backward()
        attempt("switched while pending", lambda: switch(False))
        if step or "static_graph" not in options:  # torch's text of a static graph's first step is another
            attempt("checked while pending", ddp._check_reducer_finalized)
            attempt("forward while pending", lambda: ddp(batch(rank, 0)))
            with ddp.no_sync():
                attempt("forward under no_sync while pending", lambda: ddp(batch(rank, 0)))
        attempt("finalized", ddp.finalize_backward)
        attempt("a second time", ddp.finalize_backward)
        attempt("checked", ddp._check_reducer_finalized)
        ddp.zero_grad()
    with ddp.no_sync():
        loss_of(ddp(batch(rank, 0))).backward()
        attempt("under no_sync", ddp.finalize_backward)
    attempt("switched between steps", lambda: switch(False))
    return told


@pytest.mark.skipif(not IN_TORCH, reason="torch has it from 2.15 on")
@pytest.mark.parametrize("stats", [False, True])
@pytest.mark.parametrize("wire", WIRES)
@on_ranks(2)
def test_torchs_class_ends_the_step_of_our_hook(rank: int, world: int, wire: str, stats: bool) -> None:
    """torch's class ends the step, our hook has reduced it."""
    ddp: Any = TorchDDP(mlp(), bucket_cap_mb=1)
    state = fusedreduce.FusedHookState(wire=wire, grad_stats=stats)
    ddp.register_comm_hook(state, fusedreduce.fused_hook)
    ddp.require_manual_backward_finalization = True
    for step in range(STEPS):
        assert_step_averages(ddp, batch(rank, step), wire, end=ddp.finalize_backward)
        if stats:
            norm = torch.cat([one.reshape(-1) for one in gradients(ddp)]).double().norm()
            torch.testing.assert_close(state.grad_norm().double(), norm, rtol=1e-5, atol=0)


@pytest.mark.skipif(not IN_TORCH, reason="torch has it from 2.15 on")
@on_ranks(2)
def test_wires_are_lazy_as_torchs_argument_says(rank: int, world: int) -> None:
    """torch 2.15's argument."""
    ddp = wrapped(mlp(), lazy_bucket_allocation=True)
    for step in range(3):
        assert_step_averages(ddp, batch(rank, step))
        assert not inside(ddp).buffers()
