"""ChunkTable covers every element once; PointerTable uploads only what changed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.cuda.fake_cuda import FakeCuda
from support.cuda.fake_streams import FakeEvent
from support.sweep import sweep

from fusedreduce.kernels.table import (
    DTYPE_CODES,
    PADDING_CODE,
    ChunkTable,
    PointerTable,
    may_flush,
    new_partials,
    new_source_partials,
)

sizes = st.lists(st.integers(0, 400), max_size=20)
gaps = st.lists(st.integers(0, 20), min_size=21, max_size=21)


def _place(numels: list[int], gap: list[int]) -> tuple[list[int], int]:
    offsets, end = [], 0
    for numel, before in zip(numels, gap, strict=False):
        offsets.append(end + before)
        end += before + numel
    return offsets, end + gap[-1]


@given(sizes, gaps, st.integers(1, 150))
@sweep(1500)
def test_rows_cover_every_wire_element_and_every_gradient_element_once(
    numels: list[int], gap: list[int], chunk: int
) -> None:
    offsets, wire_numel = _place(numels, gap)
    table = ChunkTable(numels, offsets, [torch.float32] * len(numels), wire_numel, chunk_numel=chunk)
    wire = np.zeros(wire_numel, dtype=np.int64)
    gradients = [np.zeros(numel, dtype=np.int64) for numel in numels]
    for number, (parameter, begin, end, offset, code) in enumerate(table.rows.tolist()):
        assert 0 < end - begin <= chunk
        wire[offset : offset + end - begin] += 1
        if number < table.data_rows:
            gradients[parameter][begin:end] += 1
            assert offset - begin == offsets[parameter] and code == DTYPE_CODES[torch.float32]
        else:
            assert parameter == len(numels), "padding must point to the entry that never has an address"
            assert code == PADDING_CODE
    assert (wire == 1).all() and all((gradient == 1).all() for gradient in gradients)
    parameters, *ends = table.spans(torch.device("cpu")).tolist()
    assert parameters == len(numels) and sum(ends[1::2]) - sum(ends[::2]) == table.data_rows
    for parameter, (first, last) in enumerate(zip(ends[::2], ends[1::2], strict=True)):
        assert (table.rows[first:last, 0] == parameter).all()


def test_the_example_of_the_docstring() -> None:
    table = ChunkTable([5, 3], [0, 8], [torch.float32] * 2, 16, chunk_numel=4)
    data = [[0, 0, 4, 0, 0], [0, 4, 5, 4, 0], [1, 0, 3, 8, 0]]
    padding = [[2, 0, 3, 5, 4], [2, 0, 4, 11, 4], [2, 4, 5, 15, 4]]
    assert table.rows.tolist() == data + padding
    assert table.data_rows == 3


def test_begins_shift_the_memory_and_not_the_wire() -> None:
    table = ChunkTable([5, 3], [0, 5], [torch.float16] * 2, 8, begins=[10, 15], chunk_numel=4)
    assert table.rows.tolist() == [[0, 10, 14, 0, 2], [0, 14, 15, 4, 2], [1, 15, 18, 5, 2]]


@pytest.mark.parametrize(
    ("numels", "offsets", "dtypes", "wire", "error", "words"),
    [
        ([4, 4], [0, 3], [torch.float32] * 2, 8, ValueError, "slot 1 begins at 3, but slot 0 ends at 4"),
        ([4], [0], [torch.float32], 3, ValueError, "the wire ends at 3, but slot 0 ends at 4"),
        ([-1], [0], [torch.float32], 3, ValueError, "must not be negative"),
        ([1], [0], [torch.int32], 3, TypeError, "torch.int32 cannot be packed; accepted"),
        ([1, 1], [0, 1], [torch.float64, torch.float32], 3, TypeError, "bucket of their own"),
        ([1, 1], [0], [torch.float32], 3, ValueError, "one of each per slot"),
    ],
)
def test_bad_tables_are_refused(
    numels: list[int], offsets: list[int], dtypes: list[torch.dtype], wire: int, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        ChunkTable(numels, offsets, dtypes, wire)
    with pytest.raises(ValueError, match="chunk_numel"):
        ChunkTable([1], [0], [torch.float32], 1, chunk_numel=0)


CPU = torch.device("cpu")


def test_pointers_are_uploaded_only_when_an_address_changed() -> None:
    table = PointerTable()
    gradients: list[torch.Tensor | None] = [torch.ones(3), None, torch.ones(5)]
    addresses = table.upload(gradients, CPU)
    kept = [gradient.data_ptr() if gradient is not None else 0 for gradient in gradients]
    assert addresses.tolist() == [*kept, 0] and table.uploads == 1
    assert table.upload(list(gradients), CPU) is addresses and table.uploads == 1
    elsewhere = torch.ones(3)
    moved = [elsewhere, *gradients[1:]]
    assert table.upload(moved, CPU)[0].item() == elsewhere.data_ptr() and table.uploads == 2
    assert addresses.tolist() == [*kept, 0], "a table that a launch may still read must not change"


def test_gradients_that_are_only_measured_were_not_checked_against_a_wire() -> None:
    table, wire = PointerTable(), torch.empty(3)
    chunks = ChunkTable([3], [0], [torch.float32], 3)
    gradients = [torch.ones(3)]
    table.remember(gradients, chunks, wire)
    assert table.holds(gradients, chunks, wire) and not table.holds(gradients, chunks, torch.empty(3))
    table.remember(gradients, chunks)
    assert table.holds(gradients, chunks, wire)
    other = [torch.ones(3)]
    table.remember(other, chunks)
    assert table.holds(other, chunks) and not table.holds(other, chunks, wire) and not table.holds(gradients, chunks)
    table.remember(gradients, chunks, wire)
    same = ChunkTable([3], [0], [torch.float32], 3)
    table.remember(gradients, same)
    assert table.holds(gradients, same) and not table.holds(gradients, same, wire)


def test_parts_of_partials_are_views() -> None:
    for partials in (new_partials(5, CPU), new_source_partials(5, CPU)):
        part = partials.part(1, 4)
        for name, tensor in vars(part).items():
            assert tensor.data_ptr() == getattr(partials, name)[1:].data_ptr() and tensor.shape == (3,)


def test_which_wires_are_narrower() -> None:
    wires = (torch.float32, torch.bfloat16, torch.float16)
    assert [may_flush(torch.float32, wire) for wire in wires] == [False, True, True]
    assert not any(may_flush(gradient, wire) for gradient in (torch.bfloat16, torch.float16) for wire in wires)
    assert [may_flush(torch.float64, wire) for wire in (torch.float64, *wires[1:])] == [False, True, True]


def test_other_memory_behind_the_same_tensor_is_noticed() -> None:
    """`gradient.data = ...` moves a tensor that stays the same object."""
    table, chunks = PointerTable(), ChunkTable([3], [0], [torch.float32], 3)
    gradient, elsewhere = torch.ones(3), torch.zeros(3)
    table.remember([gradient], chunks)
    before = table.upload([gradient], CPU)
    gradient.data = elsewhere
    assert not table.holds([gradient], chunks), "what was checked is another piece of memory"
    after = table.upload([gradient], CPU)
    assert after is not before and after[0].item() == elsewhere.data_ptr()


# On CUDA, where launches lag behind: fake_cuda.py


def test_a_table_that_a_graph_reads_is_never_filled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its replays come at any time, and read the addresses that were there when it was captured."""
    cuda = FakeCuda(monkeypatch)
    with cuda.recording():
        table = PointerTable()
        gradients = [torch.ones(3, device=cuda.device) for _ in range(6)]

        def launch(gradient: torch.Tensor) -> torch.Tensor:
            addresses = table.upload([gradient], cuda.device)
            table.launched()
            return addresses

        of_before = launch(gradients[0])
        with monkeypatch.context() as capturing:
            capturing.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            assert launch(gradients[0]) is of_before
            made_in_it = launch(gradients[1])
        assert launch(gradients[1]) is not made_in_it, "only a replay fills it"
        for gradient in gradients[2:]:
            later = launch(gradient)
            assert later is not of_before and later is not made_in_it
        assert of_before.tolist() == [gradients[0].data_ptr(), 0]
        assert made_in_it.tolist() == [gradients[1].data_ptr(), 0]


def test_gradients_that_move_in_every_step_need_a_few_tables_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU is always two launches behind: a table is free again when its launch has run, whichever it is."""
    launched = 0

    class Late(FakeEvent):
        """Has come when two others have been recorded after it."""

        recorded_at = 0

        def record(self, stream: object = None) -> None:
            self.recorded_at = launched

        def query(self) -> bool:
            return launched - self.recorded_at >= 2

    cuda = FakeCuda(monkeypatch)
    with cuda.recording():
        monkeypatch.setattr(torch.cuda, "Event", Late)
        table = PointerTable()
        gradients = [torch.ones(3, device=cuda.device) for _ in range(4)]
        tables = []
        for step in range(12):
            tables.append(table.upload([gradients[step % 4]], cuda.device))
            launched += 1
            table.launched()
            assert tables[-1].tolist() == [gradients[step % 4].data_ptr(), 0]
    assert table.uploads == 12 and len({one.data_ptr() for one in tables}) == 3, "no more than are read at a time"


def test_gradients_that_take_turns_are_uploaded_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where unpack writes gradients that this rank has none of: pack and unpack have other tables in every step."""
    cuda = FakeCuda(monkeypatch)
    with cuda.recording():
        table = PointerTable()
        packed, unpacked = ([torch.ones(3, device=cuda.device), None], [torch.ones(3, device=cuda.device)] * 2)
        for _ in range(4):
            for gradients in (packed, unpacked):
                addresses = table.upload(gradients, cuda.device)
                table.launched()
                assert addresses.tolist() == [0 if one is None else one.data_ptr() for one in (*gradients, None)]
    assert table.uploads == 2


def test_rows_end_where_a_shard_does() -> None:
    chunks = ChunkTable(
        [5, 0, 9], [0, 8, 8], [torch.float32] * 3, 24, chunk_numel=4, block_numel=4, shard_numel=12, begins=[2, 0, 7]
    )
    assert chunks.rows.tolist() == [
        [0, 2, 6, 0, 0],
        [0, 6, 7, 4, 0],
        [2, 7, 11, 8, 0],
        [2, 11, 15, 12, 0],
        [2, 15, 16, 16, 0],
        [3, 0, 4, 20, 4],
    ]
    assert chunks.first_rows.tolist() == [0, 2, 2, 5] and chunks.data_rows == 5
    with pytest.raises(ValueError, match="multiples of a block, 4 elements"):
        ChunkTable([5], [2], [torch.float32], 8, block_numel=4)
