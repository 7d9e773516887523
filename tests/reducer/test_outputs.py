"""What a forward returns: which containers are walked, and that no output disturbs a step that does not need it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.leaf_steps import CAPS
from support.rig import SMALL, Rig
from torch.nn.parallel.distributed import _find_tensors
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from fusedreduce import FusedReduceError
from fusedreduce.reducer.unused_parameters import contains_itself, tensors_in

pytestmark = pytest.mark.usefixtures("path")


class Words(dict[str, Any]): ...


class Row(list[Any]): ...


class Group(tuple[Any, ...]): ...


@dataclasses.dataclass
class Record:
    left: object
    right: object = dataclasses.field(default=None, init=False)


class Opaque: ...


_values = st.recursive(
    st.one_of(st.none(), st.integers(), st.builds(lambda: torch.zeros(1)), st.builds(Opaque)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(Row),
        st.lists(inner, max_size=3).map(Group),
        st.tuples(inner, inner),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.dictionaries(st.text(max_size=2), inner, max_size=3).map(Words),
        st.builds(Record, inner),
    ),
    max_leaves=12,
)


@given(_values)
@settings(max_examples=200, deadline=None)
def test_every_tensor_is_found_that_torchs_walk_or_pytree_finds(output: object) -> None:
    found = set(map(id, tensors_in(output)))
    assert found == set(map(id, _find_tensors(output)))
    assert found >= {id(leaf) for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)}
    assert set(map(id, tensors_in(output, 4))) <= found


@dataclasses.dataclass
class Raises:
    """Its field cannot be read."""

    value: object

    def __getattribute__(self, name: str) -> Any:
        if name == "value":
            raise ZeroDivisionError
        return super().__getattribute__(name)


class Unreadable(dict[str, Any]):
    """Its values cannot be read."""

    def values(self) -> Any:
        raise ZeroDivisionError


@dataclasses.dataclass
class Child:
    parent: Any
    value: object = None


def _ring(loss: torch.Tensor) -> object:
    output: dict[str, Any] = {"loss": loss}
    output["all"] = [output]
    return output


def _family(loss: torch.Tensor) -> object:
    parent = Child(None)
    parent.parent, parent.value = parent, Child(parent, loss)
    return parent


def _deep(loss: torch.Tensor) -> object:
    output: object = loss
    for _ in range(3000):
        output = [output]
    return output


OUTPUTS: dict[str, Callable[[torch.Tensor], object]] = {
    "ring": _ring,
    "family": _family,
    "deep": _deep,
    "field that raises": lambda loss: [Raises(loss), Record(loss)],
    "values that raise": lambda loss: Unreadable(loss=loss),
    "opaque": lambda _: Opaque(),
    "many before it": lambda loss: {"ids": list(range(10_000)), "loss": loss},
    "behind many": lambda loss: [*range(10_000), loss],
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_a_step_that_needs_no_outputs_takes_any(kind: str) -> None:
    rig = Rig(SMALL, caps=CAPS)
    for _ in range(5):
        gradients = rig.draw()
        loss = rig.loss(gradients)
        rig.reducer.prepare_for_backward(OUTPUTS[kind](loss))
        loss.backward()
        rig.take(gradients)


@pytest.mark.parametrize("kind", OUTPUTS)
def test_a_step_ends_under_reentrant_checkpoints_whatever_the_output(kind: str) -> None:
    """The backward within a checkpoint ends before the one around it has made its gradients."""
    rig = Rig(((3,), (3,), (3,)))
    first, inner, last = rig.parameters
    for _ in range(4):
        x = torch.randn(3, requires_grad=True)
        hidden = checkpoint(lambda value: value * inner, x * first, use_reentrant=True)
        loss = (hidden * last).sum()
        rig.reducer.prepare_for_backward(OUTPUTS[kind](loss))
        with torch.no_grad():
            expected = [x * inner * last, x * first * last, x * first * inner]
        loss.backward()
        assert rig.reducer.stats()["steps_under_way"] == 0 and rig.communicator.under_way == 0
        rig.take(expected)


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
@pytest.mark.parametrize("kind", ["ring", "family", "deep", "many before it", "behind many"])
def test_a_step_that_needs_outputs_finds_them_all(kind: str, option: str) -> None:
    options: dict[str, Any] = {option: True}
    rig = Rig(((3,), (4,), (5,)), caps=CAPS, **options)
    for _ in range(4):
        gradients = rig.draw()
        loss = rig.loss(gradients, [2, 0])
        rig.reducer.prepare_for_backward(OUTPUTS[kind](loss))
        loss.backward()
        assert rig.reducer.last_unused == (1,) or option == "static_graph"
        assert rig.reducer.steps > 0 and rig.communicator.under_way == 0
        for index in (0, 2):
            assert torch.equal(rig.parameters[index].grad, rig.communicator.mean(gradients[index]))  # type: ignore[arg-type]
        for parameter in rig.parameters:
            parameter.grad = None


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
@pytest.mark.parametrize("output", [None, Opaque(), [3, "x"], {}], ids=lambda output: type(output).__name__)
def test_a_step_that_needs_outputs_says_that_there_is_no_tensor(output: object, option: str) -> None:
    options: dict[str, Any] = {option: True}
    rig = Rig(SMALL, caps=CAPS, **options)
    rig.reducer.prepare_for_backward(output)
    rig.reducer.prepare_for_backward(output)  # without a backward it is no error
    with pytest.raises(FusedReduceError, match=f"{option}=True .* its output of type {type(output).__name__}: "):
        rig.loss(rig.draw()).backward()
    assert rig.communicator.count("all_reduce") == 0


@given(_values, st.booleans())
@settings(max_examples=100, deadline=None)
def test_what_contains_itself_is_told_from_what_is_there_twice(output: object, ring: bool) -> None:
    outer: list[object] = [output, [output], Record(output)]
    if ring:
        outer.insert(1, Words(all=(outer,)))
    assert contains_itself([outer, outer]) is ring
