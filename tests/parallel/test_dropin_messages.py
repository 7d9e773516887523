"""Scripts at which torch's DistributedDataParallel raises: ours raises there too, and begins with torch's words.

Each script is run with torch's class and with ours, on 2 Gloo ranks and on every rank alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.ddp_models import SMALL_CAP_MB, Checkpointed, Partial, TwoHeads, batch, loss_of, mlp
from support.ranks import on_ranks
from torch import nn
from torch.distributed import BuiltinCommHookType  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

import fusedreduce

Make = Callable[..., Any]


@dataclass(frozen=True)
class Script:
    """What a user does, and how the error that torch's class raises there begins.

    Args:
        run: given the class.
        kind: of the error; ours is one too.
        begins: its first words.
    """

    run: Callable[[Make], object]
    kind: type[Exception]
    begins: str


def _step(ddp: Any, *more: Any) -> None:
    ddp.zero_grad()
    loss_of(ddp((batch(0, 0), *more) if more else batch(0, 0))).backward()


class Biased(nn.Module):
    """A layer in a reentrant checkpoint, whose bias is used again in another one, when told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second, self.third = nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 24)
        self.again = False

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden = self.first(features)
        if self.again:
            hidden = checkpoint(lambda one: one + self.second.bias, hidden, use_reentrant=True)
        hidden = checkpoint(self.second, hidden, use_reentrant=True)
        result: torch.Tensor = self.third(hidden)
        return result


def _again_in_its_bucket(make: Make, steps: int, **options: Any) -> None:
    ddp = make(Biased(), **options)
    for _ in range(steps):
        _step(ddp)
    ddp.module.again = True
    _step(ddp)


def _checkpointed_twice(make: Make, **options: Any) -> None:
    _step(make(Checkpointed(reentrant=True, times=2), **options))


def _one_output_twice(make: Make, steps: int = 0, **options: Any) -> None:
    ddp = make(TwoHeads(), **options)
    for _ in range(steps):
        _step(ddp)
    ddp.zero_grad()
    left, right = ddp(batch(0, 0))
    loss_of(left).backward(retain_graph=True)
    loss_of(left).backward()
    loss_of(right).backward()


def _unfinished(make: Make, steps: int = 0, **options: Any) -> None:
    ddp = make(Partial(), **options)
    for _ in range(steps):
        _step(ddp, True)
    _step(ddp, False)
    _step(ddp, True)


def _fail(_: object = None) -> None:
    raise KeyError("of the user")


class _Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        layers: Any = self.body
        hidden = layers[:2](features)
        hidden.register_hook(_fail)
        result: torch.Tensor = layers[2:](hidden)
        return result


def _after_an_error(make: Make, **options: Any) -> None:
    ddp = make(_Fails(), **options)
    try:
        _step(ddp)
    except KeyError:
        _step(ddp)


def _graph_grows(make: Make) -> None:
    ddp = make(Partial(), static_graph=True)
    for everything in (False, True):
        _step(ddp, everything)


def _graph_shrinks(make: Make) -> None:
    ddp = make(Partial(), static_graph=True)
    for everything in (True, False, True):
        _step(ddp, everything)


def _static_too_late(make: Make) -> None:
    ddp = make(mlp())
    _step(ddp)
    ddp._set_static_graph()


def _dense_for_sparse(make: Make) -> None:
    module: Any = nn.Embedding(4, 3, sparse=True)
    ddp = make(module)
    module.sparse = False
    ddp(torch.tensor([1, 2])).sum().backward()


def _hooks(make: Make, *kinds: str) -> None:
    ddp = make(mlp())
    for kind in kinds:
        if kind == "python":
            ddp.register_comm_hook(None, default_hooks.allreduce_hook)
        else:
            ddp._register_builtin_comm_hook(BuiltinCommHookType.ALLREDUCE)


def _annotated_bucket(state: object, bucket: int) -> None:
    raise AssertionError


def _annotated_result(state: object, bucket: Any) -> int:
    raise AssertionError


_annotated_bucket.__annotations__["bucket"] = int
_annotated_result.__annotations__ = {"return": int}

TWICE = "Expected to mark a variable ready only once. "
PRIOR = "Expected to have finished reduction in the prior iteration before starting a new one. "
UNUSED = f"{PRIOR}This error indicates that your module has parameters that were not used in producing loss. "
LAZY = (
    "Modules with uninitialized parameters can't be used with `DistributedDataParallel`. "
    "Run a dummy forward pass to correctly initialize the modules"
)
NOTHING = "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient."
HOOK = "register_comm_hook or register_builtin_comm_hook can only be called once."
BUILT_IN = "register_builtin_comm_hook or register_comm_hook can only be called once."
VIEWS = {"gradient_as_bucket_view": True}
SMALL = {"bucket_cap_mb": 1e-5}

SCRIPTS: dict[str, Script] = {
    "lazy": Script(lambda make: make(nn.LazyLinear(3)), RuntimeError, LAZY),
    "lazy among others": Script(lambda make: make(nn.Sequential(mlp(), nn.LazyLinear(3))), RuntimeError, LAZY),
    "lazy, no init_sync": Script(lambda make: make(nn.LazyLinear(3), init_sync=False), RuntimeError, LAZY),
    "nothing to train": Script(lambda make: make(mlp().requires_grad_(False)), RuntimeError, NOTHING),
    "checkpointed twice": Script(_checkpointed_twice, RuntimeError, TWICE),
    "checkpointed twice, views": Script(lambda make: _checkpointed_twice(make, **VIEWS), RuntimeError, TWICE),
    "checkpointed twice, small": Script(lambda make: _checkpointed_twice(make, **SMALL), RuntimeError, TWICE),
    "hidden from the search": Script(
        lambda make: _checkpointed_twice(make, find_unused_parameters=True), RuntimeError, TWICE
    ),
    "a bias again": Script(lambda make: _again_in_its_bucket(make, 0), RuntimeError, TWICE),
    "a bias again, later": Script(
        lambda make: _again_in_its_bucket(make, 6, bucket_cap_mb=SMALL_CAP_MB / 2), RuntimeError, TWICE
    ),
    "a bias again, later, views": Script(
        lambda make: _again_in_its_bucket(make, 6, bucket_cap_mb=SMALL_CAP_MB / 2, **VIEWS), RuntimeError, TWICE
    ),
    "one output twice": Script(_one_output_twice, RuntimeError, TWICE),
    "one output twice, later": Script(lambda make: _one_output_twice(make, 6), RuntimeError, TWICE),
    "one output twice, later, views": Script(lambda make: _one_output_twice(make, 6, **VIEWS), RuntimeError, TWICE),
    "one output twice, later, small": Script(lambda make: _one_output_twice(make, 6, **SMALL), RuntimeError, TWICE),
    "unfinished": Script(_unfinished, RuntimeError, UNUSED),
    "unfinished, later": Script(lambda make: _unfinished(make, 6), RuntimeError, UNUSED),
    "unfinished, views": Script(lambda make: _unfinished(make, **VIEWS), RuntimeError, UNUSED),
    "after an error": Script(_after_an_error, RuntimeError, PRIOR),
    "after an error, unused": Script(
        lambda make: _after_an_error(make, find_unused_parameters=True), RuntimeError, UNUSED
    ),
    "after an error, small": Script(lambda make: _after_an_error(make, **SMALL), RuntimeError, PRIOR),
    "graph grows": Script(
        _graph_grows,
        RuntimeError,
        "Your training graph has changed in this iteration, e.g., one parameter is unused in first iteration, but then "
        "got used in the second iteration. this is not compatible with static_graph set to True.",
    ),
    "graph shrinks": Script(
        _graph_shrinks,
        RuntimeError,
        f"{PRIOR}This error indicates that your training graph has changed in this iteration, e.g., one parameter is "
        "used in first iteration, but then got unused in the second iteration. this is not compatible with "
        "static_graph set to True.",
    ),
    "static too late": Script(
        _static_too_late,
        RuntimeError,
        "set_static_graph() should be called before training loop starts and after DistributedDataParallel is "
        "constructed.",
    ),
    "dense for sparse": Script(_dense_for_sparse, RuntimeError, "Expected variable to have sparse gradient."),
    "hook after a hook": Script(lambda make: _hooks(make, "python", "python"), RuntimeError, HOOK),
    "hook after a built-in one": Script(lambda make: _hooks(make, "built-in", "python"), RuntimeError, HOOK),
    "built-in after a hook": Script(lambda make: _hooks(make, "python", "built-in"), RuntimeError, BUILT_IN),
    "built-in after a built-in one": Script(lambda make: _hooks(make, "built-in", "built-in"), RuntimeError, BUILT_IN),
    "no hook": Script(
        lambda make: make(mlp()).register_comm_hook(None, 1), TypeError, "Communication hook must be callable."
    ),
    "hook's bucket": Script(
        lambda make: make(mlp()).register_comm_hook(None, _annotated_bucket),
        ValueError,
        "Communication hook: bucket annotation should be dist.GradBucket.",
    ),
    "hook's result": Script(
        lambda make: make(mlp()).register_comm_hook(None, _annotated_result),
        ValueError,
        "Communication hook: return annotation should be torch.futures.Future[torch.Tensor].",
    ),
    "devices": Script(
        lambda make: make(mlp(), device_ids=[0, 1]),
        ValueError,
        "device_ids can only be None or contain a single element.",
    ),
    "synchronised batch norm": Script(
        lambda make: make(nn.Sequential(mlp(), nn.SyncBatchNorm(12))),
        ValueError,
        "SyncBatchNorm layers only work with GPU modules",
    ),
    "sample rate": Script(
        lambda make: make(mlp())._set_ddp_runtime_logging_sample_rate(0),
        ValueError,
        "DDP runtime logging sample rate should be equal or greater than 1",
    ),
}


# Of parameters, with which our text goes on.
NAMES = {
    "lazy": "weight",
    "a bias again, later": "second.bias",
    "unfinished": "layers.2.weight",
    "graph grows": "layers.2.bias",
    "dense for sparse": "weight",
}


def _messages(name: str) -> list[tuple[bool, str]]:
    """What torch's class and ours raise: whether it is of the kind that is expected, and the text."""
    script = SCRIPTS[name]
    found = []
    for make in (TorchDDP, fusedreduce.DistributedDataParallel):
        try:
            script.run(make)
        except Exception as error:
            found.append((isinstance(error, script.kind), str(error)))
    return found


@pytest.mark.parametrize("name", SCRIPTS)
@on_ranks(2)
def test_errors_begin_as_torchs(rank: int, world: int, name: str) -> None:
    begins, found = SCRIPTS[name].begins, _messages(name)
    assert [kind for kind, _ in found] == [True, True], found
    assert [text[: len(begins)] for _, text in found] == [begins, begins]
    if begins == TWICE:
        theirs, ours = (re.findall(r"Parameter at index \d+ with name [\w.]+\w", text) for _, text in found)
        assert theirs == ours and len(ours) == 1
        assert "reentrant checkpoints" in found[1][1] and "static_graph=True" in found[1][1]
    assert NAMES.get(name, "") in found[1][1].removeprefix(begins)
