"""combine: the torch paths against additions written out, and the kernel in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import triton
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from support.buckets import Guarded, assert_same, poison
from support.interpreter_defects import store_as_interpreted
from support.sweep import sweep

from fusedreduce.comm.local.strategies import Centralized, Ring, Strategy, Tree
from fusedreduce.kernels import counting, cpu, dispatch, few_ops, launchers, reference
from fusedreduce.kernels.combine import CombineTables, combine, serves
from fusedreduce.kernels.parts import ADD, FOLD, PUSH, Part, depth, steps
from fusedreduce.kernels.variants import Tuning, tuned

interpreted = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, on overflows and NaNs
STRATEGIES: tuple[Strategy, ...] = (Centralized(), Ring(), Tree(1), Tree(2), Tree(3))
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SPECIAL = (float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 65504.0, 3e38, 1e-40)


@dataclass(frozen=True)
class Sum:
    """Contributions, how they are added, and where they lie in memory; `into`: the dtype of their sum."""

    dtype: torch.dtype
    into: torch.dtype
    strategy: Strategy
    peers: int
    numel: int
    shifts: tuple[int, ...]
    scale: float
    seed: int
    root: int | None

    def tensors(self) -> list[Guarded]:
        generator = torch.Generator().manual_seed(self.seed)
        values = [torch.randn(self.numel, generator=generator, dtype=torch.float64) for _ in range(self.peers)]
        if self.numel and self.seed % 3 == 0:
            for one in values:
                places = torch.randint(self.numel, (3,), generator=generator)
                one[places] = torch.tensor(SPECIAL, dtype=torch.float64)[torch.randint(8, (3,), generator=generator)]
        return [Guarded.of(one.to(self.dtype), shift) for one, shift in zip(values, self.shifts, strict=True)]

    def outputs(self, tensors: list[Guarded]) -> list[Guarded]:
        if self.root is None:
            return tensors
        return [Guarded.of(poison(self.numel, self.into), self.shifts[0])] if self.root < 0 else [tensors[self.root]]

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.strategy.parts(self.peers, self.numel)


@st.composite
def sums(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = DTYPES) -> Sum:
    peers = draw(st.integers(1, 9))
    together = draw(st.booleans())
    shift = draw(st.integers(0, 8))
    shifts = [shift if together else draw(st.integers(0, 8)) for _ in range(peers)]
    dtype = draw(st.sampled_from(dtypes))
    into = draw(st.sampled_from((dtype, *dtypes))) if dtype.itemsize == 2 else dtype
    return Sum(
        dtype=dtype,
        into=into,
        strategy=draw(st.sampled_from(STRATEGIES)),
        peers=peers,
        numel=draw(st.sampled_from((0, 1, 3, 16, 63, 64, 65, 200, 513))),
        shifts=tuple(shifts),
        scale=draw(st.sampled_from((1.0, 0.5, 1 / 3))),
        seed=draw(st.integers(0, 2**20)),
        root=-1 if into is not dtype else draw(st.sampled_from((None, None, -1, 0, peers - 1))),
    )


@dataclass(frozen=True)
class Pieces:
    """A sum, and pieces of it with an output each: where they begin, and where outputs lie in a flat tensor."""

    sum: Sum
    begins: tuple[int, ...]
    numels: tuple[int, ...]
    places: tuple[int, ...]
    into_numel: int
    into_shift: int

    def outputs(self, into: torch.Tensor) -> list[torch.Tensor]:
        return [into[place : place + numel] for place, numel in zip(self.places, self.numels, strict=True)]


@st.composite
def pieces(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = DTYPES) -> Pieces:
    whole = draw(sums(dtypes))
    begins = draw(st.lists(st.integers(0, whole.numel), min_size=1, max_size=5))
    numels = [min(draw(st.sampled_from((0, 1, 3, 8, 64, 200))), whole.numel - begin) for begin in begins]
    places, end = [0] * len(begins), 0
    for nth in draw(st.permutations(range(len(begins)))):
        places[nth] = end + draw(st.sampled_from((0, 0, 1, 4, 7)))
        end = places[nth] + numels[nth]
    return Pieces(whole, tuple(begins), tuple(numels), tuple(places), end + 1, draw(st.integers(0, 8)))


def assert_pieces(case: Pieces, function: Callable[..., None]) -> None:
    """Each piece lies in its output, and nothing else was written."""
    whole, tensors = case.sum, case.sum.tensors()
    wanted = poison(case.into_numel, whole.into)
    total = written_out([one.inner for one in tensors], whole.parts, whole.scale, whole.into)
    for begin, output in zip(case.begins, case.outputs(wanted), strict=True):
        output.copy_(total[begin : begin + output.numel()])
    into = Guarded.of(poison(case.into_numel, whole.into), case.into_shift)
    outputs = case.outputs(into.inner)
    function([one.inner for one in tensors], outputs, whole.parts, whole.scale, begins=case.begins)
    assert_same(into.inner, wanted)
    into.assert_edges_untouched()
    for one in tensors:
        assert_same(one.outer, one.before)


def written_out(
    tensors: list[torch.Tensor], parts: tuple[Part, ...], scale: float, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Every addition of every part, one by one, in fp32 (fp64), and one rounding."""
    compute = torch.float64 if tensors[0].dtype is torch.float64 else torch.float32
    result = torch.empty_like(tensors[0], dtype=dtype)
    for part in parts:
        held = [one[part.begin : part.end].to(compute) for one in tensors]
        for into, source in part.adds:
            held[into] = held[into] + held[source]
        total = held[part.owner] * torch.tensor(scale, dtype=compute)
        result[part.begin : part.end] = total.to(result.dtype)
    return result


def assert_added(case: Sum, function: Callable[..., None]) -> None:
    """Outputs have the sum, and nothing else was written."""
    tensors = case.tensors()
    wanted = written_out([one.inner.clone() for one in tensors], case.parts, case.scale, case.into)
    outputs = case.outputs(tensors)
    function([one.inner for one in tensors], [one.inner for one in outputs], case.parts, case.scale)
    for one in outputs:
        assert_same(one.inner, wanted)
    for one in (*tensors, *outputs):
        one.assert_edges_untouched()
    for one in tensors:
        if all(one is not output for output in outputs):
            assert_same(one.outer, one.before)


@pytest.mark.parametrize("function", [cpu.combine, reference.combine], ids=["cpu", "reference"])
@given(case=sums(), block_numel=st.sampled_from((7, 64, 131072)))
@settings(max_examples=150)
def test_blocks_add_as_the_parts_say(case: Sum, block_numel: int, function: Callable[..., None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "COMBINE_NUMEL", block_numel)
        assert_added(case, function)


@pytest.mark.parametrize("function", [cpu.combine, few_ops.combine], ids=["cpu", "few_ops"])
@given(case=pieces(), block_numel=st.sampled_from((7, 64, 131072)))
@settings(max_examples=100)
def test_pieces_go_to_outputs_of_their_own(case: Pieces, block_numel: int, function: Callable[..., None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "COMBINE_NUMEL", block_numel)
        assert_pieces(case, function)


@interpreted
@given(sums((torch.float32, torch.float16, torch.float64)))
@example(Sum(torch.float16, torch.float32, Ring(), 3, 65, (0, 1, 2), 0.5, 1, -1))
@example(Sum(torch.float16, torch.float32, Centralized(), 3, 513, (0, 0, 0), 0.5, 1, -1))  # vectors in several tiles
@sweep(120)
@tuned(Tuning(1024, 1))
def test_the_kernel_equals_the_reference(case: Sum) -> None:
    if not serves(case.parts, widens=case.into is not case.dtype):
        with pytest.raises(ValueError, match="partial sums at a time; the kernel has 4, or 1 for outputs of another"):
            assert_added(case, launchers.combine)
        return
    with counting.count_launches() as counted:
        assert_added(case, launchers.combine)
    assert counted[0].launches == (1 if case.numel else 0)


@interpreted
@given(pieces((torch.float32, torch.float16, torch.float64)))
@sweep(100)
@tuned(Tuning(1024, 1))
def test_the_kernel_writes_pieces_to_outputs_of_their_own(case: Pieces) -> None:
    assume(serves(case.sum.parts, widens=case.sum.into is not case.sum.dtype))
    with counting.count_launches() as counted:
        assert_pieces(case, launchers.combine)
    assert counted[0].launches == any(case.numels)


@interpreted
@pytest.mark.parametrize("peers", [2, 3, 8])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@tuned(Tuning(1024, 1))
def test_the_kernel_on_bf16_but_for_the_interpreters_rounding(strategy: Strategy, peers: int) -> None:
    tensors = [torch.randn(300).bfloat16() for _ in range(peers)]
    parts = strategy.parts(peers, 300)
    wanted = torch.empty(300, dtype=torch.bfloat16)
    store_as_interpreted(wanted, written_out([one.float() for one in tensors], parts, 0.5))
    combine(tensors, tensors, parts, 0.5)
    for one in tensors:
        assert_same(one, wanted)


@pytest.mark.parametrize("function", [cpu.combine, reference.combine, pytest.param(combine, marks=interpreted)])
@pytest.mark.parametrize("peers", [2, 3])
def test_a_sum_in_fp32_is_not_rounded_before(function: Callable[..., None], peers: int) -> None:
    tensors = [torch.full((9,), value, dtype=torch.float16) for value in (2048.0, 1.0, 1.0)[:peers]]
    total = torch.empty(9)
    function(tensors, [total], Centralized().parts(peers, 9))
    assert total.eq(2047.0 + peers).all()


@interpreted
def test_more_partial_sums_than_the_kernel_has_are_refused() -> None:
    tensors = [torch.ones(65, dtype=torch.float16, device="cpu") for _ in range(7)]
    total = torch.zeros(65, device="cpu")
    with pytest.raises(ValueError, match="partial sums at a time; the kernel has 4, or 1 for outputs of another"):
        combine(tensors, [total], Tree(2).parts(7, 65))
    assert total.eq(0).all()


@interpreted
def test_tables_are_made_once_for_each_set_of_addresses() -> None:
    tables, strategy = CombineTables(), Ring()
    tensors, parts = [torch.ones(100), torch.ones(100)], strategy.parts(2, 100)
    combine(tensors, tensors, parts, tables=tables)
    made = dict(tables._uploaded)
    combine(tensors, tensors, parts, tables=tables)
    assert tables._uploaded == made, "a table was made again"
    others = [torch.ones(100), torch.ones(100)]
    combine(others, others, parts, tables=tables)
    assert len(tables._uploaded) == len(made) + 1, "the rows are the same"
    assert tensors[1].eq(4).all() and others[1].eq(2).all()


@interpreted
def test_other_outputs_of_the_same_tensors_are_the_ones_written() -> None:
    """A sum for one rank after a sum for another, or for all: what is read, and how it is added, is the same."""
    tables, parts = CombineTables(), Centralized().parts(2, 100)
    tensors = [torch.full((100,), 1.0), torch.full((100,), 2.0)]
    outputs = [torch.zeros(100) for _ in range(3)]
    for written in ([outputs[0]], [outputs[1]], [outputs[2], tensors[1]]):
        combine(tensors, written, parts, tables=tables)
        assert all(one.eq(3.0).all() for one in written), "the sum went elsewhere"
    assert tensors[0].eq(1.0).all()


def test_dispatch_takes_the_torch_path_on_cpu() -> None:
    tensors = [torch.tensor([256.0], dtype=torch.bfloat16), *[torch.ones(1, dtype=torch.bfloat16) for _ in range(2)]]
    with counting.count_launches() as counted:
        dispatch.combine(tensors, tensors, Centralized().parts(3, 1))
    assert counted[0].function == "combine" and counted[0].path == "torch"
    assert [one.item() for one in tensors] == [258.0] * 3, "rounded once"


@given(st.sampled_from(STRATEGIES), st.integers(1, 31))
def test_every_order_fits_into_the_registers(strategy: Strategy, peers: int) -> None:
    parts = strategy.parts(peers, 64)
    assert serves(parts)
    for part in parts:
        program = steps(part.adds, part.owner)
        assert sorted(peer for kind, peer in program if kind != FOLD) == list(range(peers))
        assert depth(program) == 1 or isinstance(strategy, Tree)


def test_steps_of_a_tree() -> None:
    (part,) = Tree(2).parts(5, 1)
    assert part.adds == ((1, 3), (1, 4), (0, 1), (0, 2))
    assert steps(part.adds, 0) == ((PUSH, 1), (ADD, 3), (ADD, 4), (ADD, 0), (ADD, 2))
    (part,) = Tree(2).parts(7, 1)
    assert [kind for kind, _ in steps(part.adds, 0)] == [PUSH, ADD, ADD, ADD, PUSH, ADD, ADD, FOLD]


@pytest.mark.parametrize("adds", [((0, 1), (2, 1)), ((0, 1), (1, 2)), ((0, 0),), ((0, 1), (2, 3))])
def test_what_is_no_sum_is_refused(adds: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match="not a sum|not in the sum"):
        steps(adds, 0)


def test_arguments_that_do_not_fit_together_are_refused() -> None:
    one, two = torch.ones(4), torch.ones(4)
    parts = Centralized().parts(2, 4)
    wrong: list[tuple[list[torch.Tensor], tuple[Part, ...], type[Exception], str]] = [
        ([one, torch.ones(5)], parts, ValueError, "one size, not 4 and 5"),
        ([one, two.double()], parts, TypeError, "one dtype, not torch.float32 and torch.float64"),
        ([one.int(), two.int()], parts, TypeError, "torch.int32 cannot be combined"),
        ([one.half(), two], parts, TypeError, "one dtype, not torch.float16 and torch.float32"),
        ([one, torch.ones(8)[::2]], parts, ValueError, "contiguous"),
        ([one, two], Centralized().parts(2, 3), ValueError, "do not cover 4 elements"),
        ([one, two], (Part(1, 4, ((0, 1),), 0),), ValueError, "do not cover 4 elements"),
        ([], (), ValueError, "at least one tensor"),
    ]
    for tensors, given_parts, kind, message in wrong:
        with pytest.raises(kind, match=message):
            dispatch.combine(tensors, tensors, given_parts)
    for sources, outputs in (
        ([one, two], [one.half()]),
        ([one.half()] * 2, [one, one.half()]),
        ([one.half()] * 2, [one.int()]),
        ([one], [one.double()]),
    ):
        with pytest.raises(TypeError, match="outputs must all be of torch.float.., or for 16-bit tensors"):
            dispatch.combine(sources, outputs, Centralized().parts(len(sources), 4))
    assert one.eq(1).all() and two.eq(1).all()


def test_outputs_that_are_no_pieces_are_refused() -> None:
    tensors, outputs = [torch.ones(8), torch.ones(8)], [torch.zeros(3), torch.zeros(4)]
    parts = Centralized().parts(2, 8)
    wrong: list[tuple[list[torch.Tensor], tuple[int, ...], tuple[Part, ...], type[Exception], str]] = [
        (outputs, (0,), parts, ValueError, "2 outputs, and the first elements of 1"),
        (outputs, (0, 3, 5), parts, ValueError, "2 outputs, and the first elements of 3"),
        (outputs, (0, 5), parts, ValueError, "elements 5 to 9 of tensors of 8"),
        (outputs, (-1, 4), parts, ValueError, "elements -1 to 2 of tensors of 8"),
        (outputs, (0, 4), Centralized().parts(2, 7), ValueError, "do not cover 8 elements"),
        ([outputs[0], torch.zeros(2, 4)[:, :2]], (0, 4), parts, ValueError, "contiguous"),
        ([outputs[0], torch.zeros(4).half()], (0, 4), parts, TypeError, "outputs must all be of"),
    ]
    for given_outputs, begins, given_parts, kind, message in wrong:
        with pytest.raises(kind, match=message):
            dispatch.combine(tensors, given_outputs, given_parts, begins=begins)
    assert all(one.eq(0).all() for one in outputs) and all(one.eq(1).all() for one in tensors)
    dispatch.combine(tensors, outputs, parts, begins=(5, 0))
    assert all(one.eq(2).all() for one in outputs)


@interpreted
def test_pieces_that_begin_elsewhere_are_the_ones_written() -> None:
    """A sum of the same tensors into the same outputs before, from other elements on, has tables of its own."""
    tables, parts = CombineTables(), Centralized().parts(2, 100)
    room, tensors = torch.zeros(600), [torch.arange(100.0), torch.zeros(100)]
    outputs = [room[200:210], room[400:409]]
    for begins in ((0, 10), (3, 77), (40, 10)):
        combine(tensors, outputs, parts, tables=tables, begins=begins)
        for begin, output in zip(begins, outputs, strict=True):
            assert_same(output, tensors[0][begin : begin + output.numel()])
