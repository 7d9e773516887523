"""Bad input to the kernels: the right class, the offending thing named, nothing written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from fusedreduce.kernels import dispatch
from fusedreduce.kernels import pack as pack_file
from fusedreduce.kernels import unpack as unpack_file
from fusedreduce.kernels.table import ChunkTable, Partials, PointerTable, Shape, new_partials
from fusedreduce.kernels.variants import variant_on

FUNCTIONS = [dispatch.pack, dispatch.unpack]


@dataclass
class Call:
    """Arguments that are right; each test spoils one."""

    gradients: list[Any] = field(default_factory=lambda: [torch.full((4,), 1.0), torch.full((6,), 2.0)])
    chunks: ChunkTable = field(default_factory=lambda: ChunkTable([4, 6], [0, 4], [torch.float32] * 2, 12))
    wire: torch.Tensor = field(default_factory=lambda: torch.full((12,), 7.0))
    scalar: torch.Tensor = field(default_factory=lambda: torch.ones(1))
    partials: Partials | None = None

    def run(self, function: Any, pointers: PointerTable | None = None) -> None:
        """A pack divides by a number; an unpack multiplies by a tensor, and so does scale."""
        of_all = self.gradients, self.chunks, pointers or PointerTable()
        if function is dispatch.measure:
            function(*of_all, self.partials or new_partials(2, torch.device("cpu")))
        elif function is dispatch.scale:
            function(*of_all, self.scalar)
        else:
            by = 1.0 if function.__name__ == "pack" else self.scalar
            function(*of_all, self.wire, by, self.partials)


def _overlapping(call: Call) -> None:
    room = torch.ones(9)
    call.gradients = [room[:4], room[3:]]


def _overlapping_wire(call: Call) -> None:
    call.gradients[0] = call.wire[1:5]


def _in_place_of_another_dtype(call: Call) -> None:
    call.wire = torch.full((12,), 7.0, dtype=torch.float16)
    call.gradients[0] = call.wire.view(torch.float32)[:4]


def _set(**changes: Any) -> Callable[[Call], None]:
    def spoil(call: Call) -> None:
        for name, value in changes.items():
            setattr(call, name, value)

    return spoil


def _gradient(value: Any) -> Callable[[Call], None]:
    def spoil(call: Call) -> None:
        call.gradients[1] = value

    return spoil


def _of_another_shape(gradient: torch.Tensor) -> Callable[[Call], None]:
    """Its table was told that it has rows of 3."""
    return _set(gradients=[torch.ones(4), gradient], chunks=_with_shapes(((4,), (1,)), ((2, 3), (3, 1))))


def _with_shapes(*shapes: Shape) -> ChunkTable:
    return ChunkTable([4, 6], [0, 4], [torch.float32] * 2, 12, shapes=shapes)


def _inside_the_wire(call: Call) -> None:
    call.scalar = call.wire[3:4]


BAD = {
    "count": (_set(gradients=[torch.ones(4)]), ValueError, "1 gradients for a layout of 2 slots"),
    "wire size": (_set(wire=torch.ones(11)), ValueError, r"shape \(12,\), got shape \(11,\)"),
    "wire strides": (_set(wire=torch.ones(24)[::2]), ValueError, "contiguous"),
    "wire dtype": (_set(wire=torch.ones(12, dtype=torch.int32)), TypeError, "torch.int32, expected one of"),
    "fp64 wire": (_set(wire=torch.ones(12, dtype=torch.float64)), TypeError, "torch.float64, expected one of"),
    "gradient device": (_gradient(torch.ones(6, device="meta")), ValueError, "gradient 1 is on meta"),
    "gradient dtype": (_gradient(torch.ones(6).half()), TypeError, "gradient 1 is torch.float16.*torch.float32"),
    "integer": (_gradient(torch.ones(6, dtype=torch.int64)), TypeError, "gradient 1 is torch.int64"),
    "gradient size": (_gradient(torch.ones(5)), ValueError, "gradient 1 has 5 elements, its slot expects 6"),
    "gaps": (_gradient(torch.ones(12)[::2]), ValueError, "gaps or repeats in memory; pass gradient.contiguous"),
    "repeats": (_gradient(torch.ones(1).expand(6)), ValueError, "gaps or repeats"),
    "sparse": (_gradient(torch.ones(6).to_sparse()), TypeError, "layout torch.sparse_coo"),
    "shape": (_of_another_shape(torch.ones(6)), ValueError, r"gradient 1 has shape \(6,\).*given shape \(2, 3\)"),
    "strides": (_of_another_shape(torch.ones(3, 2).t()), ValueError, r"strides \(1, 2\), the table .*strides \(3, 1\)"),
    "overlap": (_overlapping, ValueError, "gradients 0 and 1 overlap"),
    "wire overlap": (_overlapping_wire, ValueError, "gradient 0 overlaps the wire"),
    "in place of another dtype": (_in_place_of_another_dtype, ValueError, "gradient 0 overlaps the wire"),
    "negated view": (_gradient(torch.zeros(6, dtype=torch.complex64).conj().imag), ValueError, "lazily negated|gaps"),
    "wire in graph": (_set(wire=torch.ones(12, requires_grad=True)), ValueError, "requires a gradient"),
    "partials": (
        _set(partials=Partials(torch.ones(1), torch.ones(1), torch.ones(1))),
        ValueError,
        r"partials.sums must be contiguous torch.float64 of shape \(2,\)",
    ),
    "scale dtype": (_set(scalar=torch.ones(1, dtype=torch.float64)), TypeError, "one element of torch.float32"),
    "scale size": (_set(scalar=torch.ones(2)), TypeError, "got 2"),
    "scale device": (_set(scalar=torch.ones(1, device="meta")), ValueError, "is on meta, the other tensors on cpu"),
    "scale in wire": (_inside_the_wire, ValueError, "lies inside the wire buffer"),
}
OF_SCALES = {name for name in BAD if name.startswith("scale")}
OF_WIRES = {name for name in BAD if "wire" in name or name == "in place of another dtype"}
CALLS = [
    (function, name)
    for function, others in (
        (dispatch.pack, OF_SCALES),
        (dispatch.unpack, set()),
        (dispatch.measure, OF_WIRES | OF_SCALES),
        (dispatch.scale, OF_WIRES | {"partials", "scale device"}),
    )
    for name in BAD
    if name not in others
]


@pytest.mark.parametrize(("function", "name"), CALLS, ids=lambda one: getattr(one, "__name__", one))
def test_bad_arguments_are_refused_before_anything_is_written(function: Any, name: str) -> None:
    spoil, error, words = BAD[name]
    call = Call()
    spoil(call)
    before = [call.wire.clone(), *[g.clone() for g in call.gradients if not g.is_meta]]
    with pytest.raises(error, match=words):
        call.run(function)
    after = [call.wire, *[g for g in call.gradients if not g.is_meta]]
    for then, now in zip(before, after, strict=True):
        same = (then.to_dense() == now.to_dense()).all() if then.is_sparse else torch.equal(then, now)
        assert same


@pytest.mark.parametrize("function", FUNCTIONS, ids=["pack", "unpack"])
def test_a_gradient_that_becomes_bad_later_is_found(function: Any) -> None:
    call, pointers = Call(), PointerTable()
    call.run(function, pointers)
    call.gradients[1] = torch.ones(6).half()
    with pytest.raises(TypeError, match="gradient 1"):
        call.run(function, pointers)
    call.gradients[1] = torch.ones(6)
    call.run(function, pointers)


def test_kernels_refuse_cpu_tensors_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call()
    monkeypatch.setattr("fusedreduce.kernels.variants.interpreted", lambda: False)
    variant_on.cache_clear()
    for function in (pack_file.pack, unpack_file.unpack):
        with pytest.raises(ValueError, match="cannot read tensors on cpu.*TRITON_INTERPRET=1"):
            call.run(function)
    assert (call.wire == 7.0).all()


@pytest.mark.parametrize("function", FUNCTIONS, ids=["pack", "unpack"])
def test_another_tensor_at_the_same_address_is_checked_anew(function: Any) -> None:
    call, pointers = Call(), PointerTable()
    call.run(function, pointers)
    first, second = call.gradients
    room = torch.ones(12)
    for bad in (second.view(torch.float16)[:6], second[:2], room[::2]):
        with pytest.raises((TypeError, ValueError), match="gradient 1"):
            dataclasses.replace(call, gradients=[first, bad]).run(function, pointers)
    other = ChunkTable([4, 2], [0, 4], [torch.float32] * 2, 12)
    with pytest.raises(ValueError, match="gradient 1 has 6 elements"):
        dataclasses.replace(call, chunks=other).run(function, pointers)
    call.run(function, pointers)


@pytest.mark.parametrize("function", FUNCTIONS, ids=["pack", "unpack"])
def test_of_known_shapes_another_view_of_the_same_memory_is_refused(function: Any) -> None:
    """On CPU the order of its dimensions would decide which element goes where."""
    cube = torch.zeros(2, 3, 4).permute(1, 0, 2)
    call, pointers = Call(), PointerTable()
    shapes = [((2,), (1,)), (tuple(cube.shape), cube.stride())]
    call.chunks, call.wire = ChunkTable([2, 24], [0, 2], [torch.float32] * 2, 26, shapes=shapes), torch.ones(26)
    call.gradients = [torch.ones(2), cube]
    call.run(function, pointers)
    call.gradients[1] = cube.as_strided(cube.shape, (1, 12, 3))
    with pytest.raises(ValueError, match=r"gradient 1 has shape \(3, 2, 4\) and strides \(1, 12, 3\)"):
        call.run(function, pointers)


@pytest.mark.parametrize("function", FUNCTIONS, ids=["pack", "unpack"])
def test_strides_that_say_nothing_may_differ_from_the_known(function: Any) -> None:
    call = Call(chunks=_with_shapes(((4, 1), (1, 1)), ((6,), (1,))))
    call.gradients[0] = torch.ones(4).as_strided((4, 1), (1, 7))
    call.run(function)
