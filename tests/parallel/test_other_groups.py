"""Other groups: wrappers, copies of them and states of the comm hook go on with other ranks as if they were new.

tests/reducer/test_other_ranks.py has the same of a reducer; docs/design.md has the table.
"""

from __future__ import annotations

import copy
import datetime
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ddp_models import batch, loss_of, mlp, right_steps
from support.inside import TIMES_OF_A_STEP
from support.leaf_steps import assert_same, copies
from support.object_graph import differences, walk
from support.ranks import on_ranks
from torch import nn
from torch.distributed import BuiltinCommHookType  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fusedreduce
from fusedreduce import LocalGroup, ReduceConfig
from fusedreduce.buckets.wire_table import WireTable
from fusedreduce.comm.local.group import LocalCommunicator

pytestmark = pytest.mark.usefixtures("path")

STEPS = 4
_TIMEOUT = datetime.timedelta(seconds=60)


def _model() -> nn.Module:
    return nn.Sequential(nn.Embedding(12, 6, sparse=True), nn.Flatten(), nn.Linear(18, 16), nn.ReLU(), nn.Linear(16, 3))


def _dense() -> nn.Module:
    return nn.Sequential(nn.Embedding(12, 6), nn.Flatten(), nn.Linear(18, 16), nn.ReLU(), nn.Linear(16, 3))


def _models(count: int, make: Callable[[], nn.Module] = _dense) -> list[nn.Module]:
    """Equal ones. Draws from torch's one generator: not for threads."""
    found = []
    for _ in range(count):
        torch.manual_seed(0)
        found.append(make())
    return found


def _train(ddp: nn.Module, rank: int, steps: int = STEPS) -> list[torch.Tensor | None]:
    """Each step's gradients, dense."""
    generator = torch.Generator().manual_seed(100 + rank)
    found: list[torch.Tensor | None] = []
    for _ in range(steps):
        ddp.zero_grad()
        ddp(torch.randint(12, (4, 3), generator=generator)).square().mean().backward()
        found += copies(list(ddp.parameters()))
    return found


def _builtin(ddp: TorchDDP) -> None:
    ddp._register_builtin_comm_hook(BuiltinCommHookType.ALLREDUCE)


KINDS: dict[str, tuple[dict[str, Any], Callable[[TorchDDP], None]]] = {
    "plain": ({}, lambda ddp: None),
    "static": ({"static_graph": True}, lambda ddp: None),
    "unused": ({"find_unused_parameters": True}, lambda ddp: None),
    "views": ({"gradient_as_bucket_view": True}, lambda ddp: None),
    "int4": ({"reduce": ReduceConfig(wire="int4", wire_after=2)}, lambda ddp: None),
    "built-in hook": ({}, _builtin),
}


def _wrapped(
    kind: str, communicator: LocalCommunicator, model: nn.Module, *, init_sync: bool = False
) -> fusedreduce.DistributedDataParallel:
    options, prepare = KINDS[kind]
    ddp = fusedreduce.DistributedDataParallel(
        model, process_group=communicator.process_group(), init_sync=init_sync, bucket_cap_mb=3e-4, **options
    )
    prepare(ddp)
    return ddp


def _leaf(found: object) -> str:
    if isinstance(found, LocalCommunicator):
        return f"rank {found.rank} of {found.size}"
    if isinstance(found, dist.ProcessGroup):
        return f"group: rank {found.rank()} of {found.size()}"
    if isinstance(found, nn.Module) and not isinstance(found, fusedreduce.DistributedDataParallel):
        return "the model"
    return repr(found) if isinstance(found, WireTable) else ""


@pytest.mark.parametrize("change", [(2, 3), (3, 2)], ids=["more", "fewer"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_wrapper_averages_over_another_group_as_a_new_one(kind: str, change: tuple[int, int]) -> None:
    """Beside ranks that are new; its logging data is of the group of now."""
    before, after = change
    old, new = _models(3), _models(3)
    with LocalGroup(before, timeout_s=30) as first, LocalGroup(after, timeout_s=30) as second:
        firsts = first.communicators()
        wrappers = first.run(lambda one: _wrapped(kind, firsts[one.rank], old[one.rank], init_sync=True))
        first.run(lambda one: _train(wrappers[one.rank], one.rank))

        def case(communicator: LocalCommunicator) -> list[torch.Tensor | None]:
            rank = communicator.rank
            if rank >= before:
                return _train(_wrapped(kind, communicator, old[rank]), rank)
            ddp = wrappers[rank]
            ddp._update_process_group(communicator.process_group())
            assert [path for path, found in walk(ddp, _leaf) if found is firsts[rank]] == []
            data = ddp._get_ddp_logging_data()
            assert (data["rank"], data["world_size"]) == (rank, after)
            return _train(ddp, rank)

        found = second.run(case)
        expected = second.run(lambda one: _train(_wrapped(kind, one, new[one.rank]), one.rank))
    for rank in range(after):
        assert_same(found[rank], expected[rank], (kind, rank))
        assert_same(found[rank], found[0], (kind, rank))


def test_a_reducer_that_is_made_anew_over_another_group_has_its_settings_compared(alone: None) -> None:
    """As for a comm hook, which replaces the installed wire."""
    fusedreduce.install(ReduceConfig(wire="bf16"))
    try:
        ddp: Any = TorchDDP(nn.Linear(3, 2))
        assert ddp.reducer.settings.agreed is not None
        ddp._update_process_group(dist.group.WORLD)
        assert ddp.reducer.settings.agreed is None
    finally:
        fusedreduce.uninstall()


# Of a copy, by the ways to it: torch's own, which its copies have too, and when an object was made.
OF_COPIES = (
    r"\._has_rebuilt_buckets|\._lazy_init_ran|\._static_graph_delay_allreduce_enqueued"
    rf"|\.reducer\.reducer{TIMES_OF_A_STEP}"
)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "built-in hook"])
@pytest.mark.parametrize("how", [copy.deepcopy, lambda ddp: pickle.loads(pickle.dumps(ddp))], ids=["copied", "pickled"])
def test_a_copy_is_as_new(kind: str, how: Callable[[TorchDDP], TorchDDP], alone: None) -> None:
    """It has compared nothing, since its ranks may be others, and holds nothing of the group that it was made over."""
    options, _ = KINDS[kind]
    model, fresh = _models(2)
    ddp = fusedreduce.DistributedDataParallel(model, **options)
    _train(ddp, 0)
    ddp.zero_grad()
    copied, other = how(ddp), fusedreduce.DistributedDataParallel(fresh, init_sync=False, **options)
    found = differences(copied, other, _leaf)
    assert {path: texts for path, texts in found.items() if not re.fullmatch(OF_COPIES, path)} == {}


def _hooked(
    state: fusedreduce.FusedHookState, communicator: LocalCommunicator, model: nn.Module
) -> tuple[TorchDDP, fusedreduce.FusedHookState]:
    state.process_group = communicator.process_group()
    ddp = TorchDDP(model, process_group=state.process_group, init_sync=False)
    ddp.register_comm_hook(state, fusedreduce.fused_hook)
    return ddp, state


STATES: dict[str, tuple[dict[str, Any], Callable[[], nn.Module]]] = {
    "dense": ({"wire": "bf16", "grad_stats": True, "check_finite": "count"}, _dense),
    "sparse": ({"check_finite": "raise"}, _model),
    "exchanged": ({"wire": "int8"}, _dense),
}


@pytest.mark.parametrize("kind", STATES)
def test_a_hooks_state_averages_over_another_group_as_a_new_one(kind: str) -> None:
    """Beside a rank whose state is new; it holds nothing of the old group."""
    options, make = STATES[kind]
    old, new = _models(3, make), _models(3, make)
    with LocalGroup(2, timeout_s=30) as first, LocalGroup(3, timeout_s=30) as second:
        states = [fusedreduce.FusedHookState(**options) for _ in range(3)]

        def before(communicator: LocalCommunicator) -> None:
            ddp, _ = _hooked(states[communicator.rank], communicator, old[communicator.rank])
            _train(ddp, communicator.rank)

        def case(communicator: LocalCommunicator) -> list[torch.Tensor | None]:
            rank = communicator.rank
            ddp, state = _hooked(states[rank], communicator, old[rank])
            found = _train(ddp, rank)
            held = [each.group for _, each in walk(state, _leaf) if isinstance(each, LocalCommunicator)]
            assert held and all(each is second for each in held), held
            assert state.stats()["steps"] == (2 * STEPS if rank < 2 else STEPS)
            return found

        def fresh(communicator: LocalCommunicator) -> list[torch.Tensor | None]:
            ddp, _ = _hooked(fusedreduce.FusedHookState(**options), communicator, new[communicator.rank])
            return _train(ddp, communicator.rank)

        first.run(before)
        found, expected = second.run(case), second.run(fresh)
    for rank in range(3):
        assert_same(found[rank], expected[rank], (kind, rank))


def _join(store: Path, name: str, rank: int, world: int) -> None:
    """Destroys the default group and makes another."""
    dist.destroy_process_group()
    method = f"file://{store / name}"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=world, timeout=_TIMEOUT)


@on_ranks(2)
def test_a_new_default_group_around_the_same_objects(rank: int, world: int, tmp_path: Path) -> str:
    """It is destroyed and made anew, of one rank, then of all in another order.

    Returns:
        The error that ranks agree on when wrappers of other settings are unpickled.
    """
    state = fusedreduce.FusedHookState()
    _join(tmp_path, f"alone {rank}", 0, 1)
    ddp = fusedreduce.DistributedDataParallel(mlp())
    right_steps(rank, ddp, steps=3)
    hooked = TorchDDP(mlp())
    hooked.register_comm_hook(state, fusedreduce.fused_hook)
    loss_of(hooked(batch(rank, 0))).backward()
    config = fusedreduce.ReduceConfig(wire="bf16" if rank else "native")
    pickled = pickle.dumps(fusedreduce.DistributedDataParallel(mlp(), reduce=config))
    again = pickle.dumps(ddp)

    turned = world - 1 - rank
    _join(tmp_path, "together", turned, world)
    ddp._update_process_group(dist.group.WORLD)
    hooked = TorchDDP(mlp())
    hooked.register_comm_hook(state, fusedreduce.fused_hook)
    for one in (ddp, pickle.loads(again), hooked):
        right_steps(turned, one, steps=3)
    loaded = pickle.loads(pickled)
    with pytest.raises(fusedreduce.AgreementError) as raised:
        loss_of(loaded(batch(rank, 0))).backward()
    _join(tmp_path, "as before", rank, world)  # for the next case
    assert "wires of parameters" in str(raised.value)
    return str(raised.value)
