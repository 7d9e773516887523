"""Parameters that are no longer those that were hooked: an error in the backward whose gradients would stay local."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import fake_group
from torch import nn

import fusedreduce
from fusedreduce import FusedReduceError, reducer_of

pytestmark = pytest.mark.usefixtures("path", "of_two")


@pytest.fixture
def of_two() -> Iterator[None]:
    with fake_group(2):
        yield


class Opaque:
    """An output into which no walk looks."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Model(nn.Module):
    """Two layers that are trained, and one that is frozen."""

    def __init__(self, *, opaque: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen, self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
        self.frozen.requires_grad_(False)
        self.opaque = opaque

    def forward(self, x: torch.Tensor) -> Any:
        out = self.second(self.first(self.frozen(x)))
        return Opaque(out) if self.opaque else out


def _set_all(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.set_(torch.ones_like(parameter))  # type: ignore[call-overload]


def _there_and_back(module: nn.Module) -> None:
    module.double()
    module.float()


def _half_for_an_evaluation(module: nn.Module) -> None:
    module.bfloat16()
    with torch.no_grad():
        for layer in module.modules():
            if isinstance(layer, nn.Linear):
                layer(torch.ones(1, 3, dtype=torch.bfloat16))
    module.float()


def _to_another_device_and_back(module: nn.Module) -> None:
    module.to("meta")
    module.to_empty(device="cpu")
    for parameter in module.parameters():
        nn.init.ones_(parameter)


def _assigned(module: nn.Module) -> None:
    module.load_state_dict(copy.deepcopy(module.state_dict()), assign=True)


def _replaced(module: nn.Module) -> None:
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=layer.weight.requires_grad)
            layer.bias = nn.Parameter(layer.bias.detach().clone(), requires_grad=layer.bias.requires_grad)


CONVERTED: list[Callable[[nn.Module], None]] = [
    _there_and_back,
    _half_for_an_evaluation,
    _set_all,
]
REPLACED: list[Callable[[nn.Module], None]] = [_assigned, _replaced, _to_another_device_and_back]
OPTIONS: list[dict[str, Any]] = [{}, {"find_unused_parameters": True}, {"static_graph": True}]


def _loss(output: Any) -> torch.Tensor:
    loss: torch.Tensor = (output.value if isinstance(output, Opaque) else output).sum()
    return loss


def _train(ddp: nn.Module, steps: int = 1) -> None:
    for _ in range(steps):
        ddp.zero_grad()
        _loss(ddp(torch.ones(2, 3))).backward()


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("change", CONVERTED, ids=lambda change: change.__name__)
def test_a_model_that_was_converted_and_back(
    change: Callable[[nn.Module], None], options: dict[str, Any], steps: int
) -> None:
    ddp = fusedreduce.DistributedDataParallel(Model(), **options)
    _train(ddp, steps)
    change(ddp.module)
    with pytest.raises(FusedReduceError, match=r"first\.weight was converted, moved or set .*: its gradients are not"):
        _train(ddp)


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("change", REPLACED, ids=lambda change: change.__name__)
def test_a_model_whose_parameters_were_replaced(
    change: Callable[[nn.Module], None], options: dict[str, Any], steps: int
) -> None:
    ddp = fusedreduce.DistributedDataParallel(Model(), **options)
    _train(ddp, steps)
    change(ddp.module)
    with pytest.raises(FusedReduceError, match=r"first\.weight has a gradient, and was not there"):
        _train(ddp)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("change", CONVERTED, ids=lambda change: change.__name__)
def test_a_part_of_a_model(change: Callable[[nn.Module], None], steps: int, options: dict[str, Any]) -> None:
    """Other parameters get their gradients. Where this part seems unused, each step from then on ends with the error;
    else the step does not end, and the next forward says why.
    """
    ddp = fusedreduce.DistributedDataParallel(Model(), **options)
    _train(ddp, steps)
    change(ddp.module.second)
    seems_unused = "find_unused_parameters" in options or ("static_graph" in options and not steps)
    for _ in range(2):
        with pytest.raises(FusedReduceError, match=r"second\.weight was converted"):
            _train(ddp, 1 if seems_unused else 2)
        assert reducer_of(ddp).steps == (steps + 1 if seems_unused else steps)
        steps += seems_unused


@pytest.mark.parametrize("change", CONVERTED + REPLACED, ids=lambda change: change.__name__)
def test_where_no_output_was_seen_the_next_forward_says_so(change: Callable[[nn.Module], None]) -> None:
    ddp = fusedreduce.DistributedDataParallel(Model(opaque=True))
    _train(ddp, 3)
    change(ddp.module)
    _train(ddp)
    with pytest.raises(FusedReduceError, match=r"first\.weight (was converted|has a gradient)"):
        ddp(torch.ones(2, 3))


def test_thawed_parameters_in_place_of_those_that_were_trained() -> None:
    ddp = fusedreduce.DistributedDataParallel(Model())
    _train(ddp, 2)
    ddp.module.requires_grad_(False)
    ddp.module.frozen.requires_grad_(True)
    with pytest.raises(FusedReduceError, match=r"frozen\.bias has a gradient, and was not there, or was frozen"):
        _train(ddp)


def test_a_reducer_of_its_own() -> None:
    model = Model()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    reducer = fusedreduce.Reducer(parameters, fusedreduce.ProcessGroupCommunicator())
    for step in range(2):
        loss = _loss(model(torch.ones(2, 3)))
        reducer.prepare_for_backward(loss)
        if step == 0:
            loss.backward()
            _there_and_back(model)
            continue
        with pytest.raises(FusedReduceError, match="parameter 0 was converted, moved or set"):
            loss.backward()


def test_what_is_no_fault() -> None:
    """Backwards that begin at an output and give no parameter a gradient, or not all of them."""
    ddp = fusedreduce.DistributedDataParallel(Model())
    for _ in range(3):
        ddp.zero_grad()
        x = torch.ones(2, 3, requires_grad=True)
        output = ddp(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)  # of a gradient penalty
        (output.sum() + slope.square().sum()).backward()
        output = ddp(x)
        output.sum().backward(inputs=[x])
        output = ddp(x)
        output.sum().backward(inputs=list(ddp.module.first.parameters()), retain_graph=True)
        output.sum().backward(inputs=list(ddp.module.second.parameters()))
    ddp.module.requires_grad_(False)
    ddp(torch.ones(2, 3, requires_grad=True)).sum().backward()  # a discriminator that only passes gradients on
    for parameter in ddp.module.parameters():
        parameter.data = parameter.data.clone()
    ddp.module.first.requires_grad_(True)
    ddp.module.second.requires_grad_(True)
    ddp.module.load_state_dict(copy.deepcopy(ddp.module.state_dict()))
    _train(ddp, 3)


def test_parameters_that_the_model_has_beside_are_no_fault() -> None:
    """Those that never get a gradient, that functional_call puts there for a while, or that are reduced elsewhere."""
    model: Any = Model()
    ddp = fusedreduce.DistributedDataParallel(model, find_unused_parameters=True)
    values = {f"module.{name}": value.detach() * 1.0 for name, value in model.named_parameters()}
    model.requires_grad_(True)  # a helper that thaws all, of which one part was frozen when the model was wrapped
    for _ in range(3):
        torch.func.functional_call(ddp, {name: nn.Parameter(one) for name, one in values.items()}, (torch.ones(2, 3),))
    model.delta = nn.Parameter(torch.zeros(2, 3))
    for _ in range(3):
        torch.autograd.grad(ddp(torch.ones(2, 3) + model.delta).sum(), model.delta, retain_graph=True)
        model.first.requires_grad_(False)
        model.first.requires_grad_(True)


def test_on_one_rank_nothing_is_left_out(tmp_path: Path) -> None:
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    ddp = fusedreduce.DistributedDataParallel(Model())
    _train(ddp, 2)
    _there_and_back(ddp.module)
    _train(ddp, 2)


def test_parameters_that_the_wrapper_leaves_alone_are_not_asked() -> None:
    model: Any = Model()
    model.frozen.requires_grad_(True)
    names = [name for name, _ in model.named_parameters() if re.match("frozen", name)]
    fusedreduce.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    ddp = fusedreduce.DistributedDataParallel(model)
    x = torch.ones(2, 3, requires_grad=True)
    torch.autograd.grad(ddp(x).sum(), x)
    _train(ddp, 2)
