"""pack, unpack and stats in Triton's interpreter against reference.py: exact, every element written once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
from hypothesis import assume, given
from hypothesis import strategies as st
from support.buckets import Case, Guarded, assert_same, cases, divisors, inner, poison
from support.by_products import assert_partials
from support.interpreter_defects import store_as_interpreted
from support.sweep import sweep

from fusedreduce.kernels import reference
from fusedreduce.kernels.pack import pack
from fusedreduce.kernels.table import ChunkTable, PointerTable
from fusedreduce.kernels.unpack import unpack
from fusedreduce.kernels.variants import Tuning, tuned

pytestmark = [
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
    # numpy's remarks on the overflows and NaNs that these tests are about
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
SCALES = (1.0, 0.5, 3.0, 1.0 / 65536.0)


@pytest.fixture(autouse=True)
def _reference_with_the_interpreters_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one difference that is known, and is not ours: interpreter_defects.py."""
    monkeypatch.setattr(reference, "store_rounded", store_as_interpreted)


@given(cases(divisors()), st.booleans())
@sweep(150)
def test_pack_equals_the_reference(case: Case, with_partials: bool) -> None:
    # Huge divisors make bf16 subnormals, and tiny ones infinities, which the interpreter gets wrong.
    assume(case.wire is not torch.bfloat16 or 2.0**-20 < case.scalar < 2.0**20)
    chunks, device = case.table(), torch.device("cpu")
    gradients = case.gradients()
    wires, partials = [], []
    for function in (pack, reference.pack):
        wire = Guarded.of(poison(chunks.wire_numel, case.wire), case.wire_shift)
        partials.append(chunks.new_source_partials(device) if with_partials else None)
        with tuned(Tuning(case.tile_bytes, 1)):
            function(inner(gradients), chunks, PointerTable(), wire.inner, case.scalar, partials[-1])
        wire.assert_edges_untouched()
        wires.append(wire.inner)
    assert_same(*wires)
    for one in gradients:
        if one is not None:
            assert_same(one.outer, one.before)
    if partials[0] is not None and partials[1] is not None:
        assert torch.equal(partials[0].first_non_finite, partials[1].first_non_finite)
        assert torch.equal(partials[0].flushed, partials[1].flushed)


@given(cases(SCALES), st.booleans())
@sweep(150)
def test_unpack_equals_the_reference(case: Case, with_partials: bool) -> None:
    chunks, device = case.table(), torch.device("cpu")
    scale = torch.tensor([case.scalar], dtype=case.compute)
    wire_values = torch.cat([case.values(slot).to(case.compute) for slot in range(len(chunks))] + [torch.zeros(0)])
    padded = torch.zeros(chunks.wire_numel, dtype=case.compute)
    padded[: wire_values.numel()] = wire_values
    travelled = reference.round_once(padded, case.wire)
    if torch.bfloat16 in (case.wire, *case.dtypes):
        smallest = torch.finfo(torch.bfloat16).tiny
        travelled[(travelled != 0) & (travelled.abs().to(torch.float64) * case.scalar < smallest)] = 1.0
    wire = Guarded.of(travelled, case.wire_shift)
    results, partials = [], []
    for function in (unpack, reference.unpack):
        gradients = case.gradients(poisoned=True)
        partials.append(chunks.new_partials(device) if with_partials else None)
        with tuned(Tuning(case.tile_bytes, 1)):
            function(inner(gradients), chunks, PointerTable(), wire.inner, scale, partials[-1])
        results.append(gradients)
    assert_same(wire.outer, wire.before)
    for ours, theirs in zip(*results, strict=True):
        if ours is not None and theirs is not None:
            ours.assert_edges_untouched()
            assert_same(ours.inner, theirs.inner)
    if partials[0] is not None and partials[1] is not None:
        assert_partials(partials[0], partials[1])


@pytest.mark.parametrize("begin", [1, 5, 16, 37])
def test_slots_of_one_shared_buffer(begin: int) -> None:
    """A comm hook's bucket: every slot names its begin within the one flat buffer, aligned or not."""
    buffer = torch.randn(begin + 300)
    numels, begins = [begin, 100, 200], [0, begin, begin + 100]
    chunks = ChunkTable(numels, begins, [torch.float32] * 3, begin + 300, begins=begins, chunk_numel=64)
    wire = torch.empty(begin + 300, dtype=torch.float16)
    with tuned(Tuning(1024, 1)):
        pack([buffer] * 3, chunks, PointerTable(), wire, 3.0)
    assert_same(wire, (buffer / torch.tensor(3.0)).half())


@pytest.mark.parametrize("function", [pack, reference.pack], ids=["kernel", "torch"])
def test_fp64_near_a_tie_of_its_wire_is_rounded_once(function: Any) -> None:
    """In an fp32 rounded to nearest, what lies a little beside a tie is that tie, and goes to the even neighbour."""
    step, nudge = 2.0**-10, 2.0**-40
    nearest = {
        1 + step / 2 - nudge: 1.0,
        1 + step / 2: 1.0,
        1 + step / 2 + nudge: 1 + step,
        1 + 3 * step / 2 - nudge: 1 + step,
        1 + 3 * step / 2: 1 + 2 * step,
        1 + 3 * step / 2 + nudge: 1 + 2 * step,
    }
    gradient = torch.tensor([*nearest, *[-one for one in nearest]], dtype=torch.float64)
    wire, chunks = torch.empty(12, dtype=torch.float16), ChunkTable([12], [0], [torch.float64], 12)
    function([gradient * 3], chunks, PointerTable(), wire, 3.0)
    assert wire.tolist() == [*nearest.values(), *[-one for one in nearest.values()]]


def test_nothing_at_all() -> None:
    chunks = ChunkTable([], [], [], 0)
    pack([], chunks, PointerTable(), torch.empty(0), 1.0)
    unpack([], chunks, PointerTable(), torch.empty(0), torch.ones(1))
