"""Layouts: exact cover, alignment and bounds, as properties."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.sweep import sweep

from fusedreduce.planning.layout import (
    LARGE_ALIGN_BYTES,
    LARGE_SLOT_BYTES,
    SMALL_ALIGN_BYTES,
    Layout,
    aligned_layout,
    flat_layout,
)

numels = st.lists(
    st.one_of(st.integers(0, 70), st.integers(0, 5000), st.sampled_from([0, 1, 511, 512, 1024, 2048, 10**9])),
    max_size=12,
)
itemsizes = st.sampled_from([1, 2, 4, 8])


@given(numels, itemsizes, st.integers(1, 17))
@sweep(3000)
def test_slots_are_aligned_ascend_and_fit(sizes: list[int], itemsize: int, shards: int) -> None:
    layout = aligned_layout(sizes, wire_itemsize_bytes=itemsize, shards=shards)
    assert list(layout.numels) == sizes
    end = 0
    for slot in layout.slots:
        assert slot.offset >= end
        if slot.numel:
            align = LARGE_ALIGN_BYTES if slot.numel * itemsize >= LARGE_SLOT_BYTES else SMALL_ALIGN_BYTES
            assert slot.offset * itemsize % align == 0
            assert (slot.offset - end) * itemsize < align, "more padding than alignment needs"
        end = slot.offset + slot.numel
    assert end <= layout.numel < end + shards * SMALL_ALIGN_BYTES // itemsize
    assert layout.numel * itemsize % (shards * SMALL_ALIGN_BYTES) == 0
    assert layout.padding_numel == layout.numel - sum(sizes)


def test_the_example_of_the_docstring() -> None:
    layout = aligned_layout([3, 5000, 10], wire_itemsize_bytes=2)
    assert (layout.offsets, layout.numel) == ((0, 64, 5064), 5080)


def test_flat_layout_has_no_padding() -> None:
    assert flat_layout(13) == Layout(numels=(13,), offsets=(0,), numel=13)
    assert flat_layout(13).padding_numel == 0 and flat_layout(0).numel == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([1], 3, 1), "must divide 16, got 3"),
        (([1], 0, 1), "must divide 16, got 0"),
        (([1], 2, 0), "at least 1, got 0"),
        (([1, -2], 2, 1), "parameter 1 has -2 elements"),
    ],
)
def test_bad_arguments_are_named(arguments: tuple[list[int], int, int], words: str) -> None:
    sizes, itemsize, shards = arguments
    with pytest.raises(ValueError, match=words):
        aligned_layout(sizes, wire_itemsize_bytes=itemsize, shards=shards)
    with pytest.raises(ValueError, match="-1 elements"):
        flat_layout(-1)
