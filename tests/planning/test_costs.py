"""Straight lines through what was measured: exact where the samples are, and deaf to a quarter of them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.sweep import sweep

from fusedreduce.planning.cost_model import FREE, FS_PER_NS, MOST_SIZES, Costs, Linear, fit, fit_copy

MIB = 1024 * 1024
lines = st.builds(Linear, fixed_ns=st.integers(10, 10**7), fs_per_byte=st.integers(0, 10**7))
sizes = st.lists(st.integers(1, 100 * MIB), min_size=5, max_size=80, unique=True)


def _ns(line: Linear, size: int) -> int:
    return line.fs(size) // FS_PER_NS


def _close(found: Linear, line: Linear, points: list[int]) -> None:
    """Times are whole ns, so a slope is off by a ns over the distance of two sizes, and so is what follows from it."""
    nearest = min(b - a for a, b in zip(points, points[1:], strict=False))
    assert abs(found.fs_per_byte - line.fs_per_byte) <= FS_PER_NS / nearest + 1
    for size in points:
        assert abs(found.fs(size) - line.fs(size)) <= 3 * FS_PER_NS + (FS_PER_NS / nearest + 1) * points[-1]


@given(lines, sizes)
def test_a_line_without_noise_is_found(line: Linear, points: list[int]) -> None:
    found = fit([(size, _ns(line, size)) for size in points])
    assert found is not None
    _close(found, line, sorted(points))


def test_whole_nanoseconds_per_byte_are_found_exactly() -> None:
    line = Linear(fixed_ns=30_000, fs_per_byte=2 * FS_PER_NS)
    assert fit([(size, _ns(line, size)) for size in (0, 1, 7, 4096, MIB, 25 * MIB)]) == line
    assert fit([(1000, 40), (3000, 60)]) == Linear(fixed_ns=30, fs_per_byte=FS_PER_NS // 100)


@given(
    st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 10**15)), max_size=90), st.randoms(use_true_random=False)
)
@sweep(300)
def test_any_samples_give_the_same_line_in_any_order(samples: list[tuple[int, int]], chance: random.Random) -> None:
    found = fit(samples)
    assert fit(chance.sample(samples, len(samples))) == found
    if len({size for size, _ in samples}) < 2:
        assert found is None
    elif found is not None:
        assert type(found.fixed_ns) is int and type(found.fs_per_byte) is int
        assert found.fixed_ns >= 0 and found.fs_per_byte >= 0 and found != FREE


@given(lines, sizes, st.data())
@sweep(300)
def test_a_quarter_of_the_sizes_may_be_wild(line: Linear, points: list[int], data: st.DataObject) -> None:
    wild = data.draw(st.sets(st.sampled_from(points), max_size=min(len(points), MOST_SIZES) // 4))
    samples = [(size, data.draw(st.integers(0, 10**15)) if size in wild else _ns(line, size)) for size in points]
    found = fit(samples)
    assert found is not None
    kept = sorted(points)
    if len(kept) <= MOST_SIZES:
        _close(found, line, kept)


@given(lines, sizes, st.integers(1, 5), st.data())
@sweep(300)
def test_a_quarter_of_the_samples_of_every_size_may_be_wild(
    line: Linear, points: list[int], repeats: int, data: st.DataObject
) -> None:
    samples = []
    for size in points:
        samples += [(size, _ns(line, size))] * (3 * repeats)
        samples += [(size, data.draw(st.integers(0, 10**15))) for _ in range(repeats)]
    found = fit(samples)
    assert found is not None
    assert found == fit([(size, _ns(line, size)) for size in points]), "as if they were not there"


@pytest.mark.parametrize("seed", range(20))
def test_noise_and_random_outliers_like_those_of_a_link(seed: int) -> None:
    """50 us and 10 Gbit/s, 5 % of noise, a quarter of all samples up to ten times as slow."""
    chance = random.Random(seed)
    line = Linear(fixed_ns=50_000, fs_per_byte=800_000)
    samples = []
    for size in [2**power for power in range(10, 26)] * 8:
        slow = chance.uniform(1, 10) if chance.random() < 0.25 else 1
        samples.append((size, int(_ns(line, size) * chance.uniform(0.95, 1.05) * slow)))
    found = fit(samples)
    assert found is not None
    assert abs(found.fs_per_byte / line.fs_per_byte - 1) < 0.1
    assert all(abs(found.fs(size) / line.fs(size) - 1) < 0.25 for size in (MIB, 4 * MIB, 25 * MIB))


@pytest.mark.parametrize("samples", [[], [(8, 5)], [(8, 5), (8, 900)], [(1, 0), (2, 0)], [(0, 0), (100, 0), (200, 0)]])
def test_where_nothing_can_be_said_there_is_no_line(samples: list[tuple[int, int]]) -> None:
    assert fit(samples) is None


def test_slope_and_fixed_part_are_never_negative() -> None:
    assert fit([(1, 900), (2, 800), (3, 100)]) == Linear(fixed_ns=800, fs_per_byte=0), "falls: flat"
    assert fit([(10, 10), (20, 40), (30, 90)]) == Linear(fixed_ns=0, fs_per_byte=2 * FS_PER_NS), "through zero"
    assert fit([(0, 0), (10, 0), (20, 60)]) == Linear(fixed_ns=0, fs_per_byte=3 * FS_PER_NS)


def test_of_many_sizes_the_smallest_and_the_largest_count_too() -> None:
    line = Linear(fixed_ns=100, fs_per_byte=FS_PER_NS)
    many = [(size, _ns(line, size)) for size in range(1000)]
    assert fit(many) == line
    kept = [many[rank * 999 // (MOST_SIZES - 1)] for rank in range(MOST_SIZES)]
    assert kept[0] == many[0] and kept[-1] == many[-1] and len(set(kept)) == MOST_SIZES
    bent = [(size, ns + 10**9) if (size, ns) not in kept else (size, ns) for size, ns in many]
    assert fit(bent) == line


@pytest.mark.parametrize("sample", [(-1, 5), (5, -1), (1.5, 2), (1, 2.5), (True, 1), ("1", 2)])
def test_samples_that_cannot_be_are_refused(sample: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"a sample must be \(bytes, ns\)"):
        fit([(1, 2), sample])


@pytest.mark.parametrize("value", [-1, 1.0, True, None, "3"])
def test_a_line_checks_itself(value: int) -> None:
    with pytest.raises(ValueError, match="fixed_ns must be an int and not negative"):
        Linear(fixed_ns=value, fs_per_byte=1)
    with pytest.raises(ValueError, match="fs_per_byte must be an int and not negative"):
        Linear(fixed_ns=1, fs_per_byte=value)


def test_costs_of_a_bucket() -> None:
    line = Linear(fixed_ns=5, fs_per_byte=20_000)
    assert line.fs(0) == 5 * FS_PER_NS and line.fs(1000) == 25 * FS_PER_NS
    assert line.fs(2**62) == 5 * FS_PER_NS + 20_000 * 2**62, "no overflow"
    assert Costs(wire=line).pack == Costs(wire=line).unpack == FREE


def test_a_link_is_latency_and_bandwidth() -> None:
    assert Linear.of_link(20, 400) == Linear(fixed_ns=20_000, fs_per_byte=20_000), "50 GB/s"


def test_a_copy_always_has_a_cost() -> None:
    line = Linear(fixed_ns=100, fs_per_byte=FS_PER_NS)
    assert fit_copy([(10, 110), (30, 130)]) == line
    assert fit_copy([(10, 30), (10, 20), (10, 90)]) == Linear(fixed_ns=0, fs_per_byte=3 * FS_PER_NS), "one size"
    assert fit_copy([(0, 30)]) == fit_copy([]) == FREE


def test_a_line_that_starts_above_what_is_known_starts_there_and_keeps_the_bytes() -> None:
    # Four large buckets, the larger ones by chance quicker: alone a flat line, which costs no bytes at all.
    samples = [(4_000_000, 12_000_000), (5_000_000, 11_000_000), (6_000_000, 10_000_000), (7_000_000, 9_000_000)]
    flat = fit(samples)
    assert flat is not None and flat.fs_per_byte == 0
    found = fit([(1024, 500_000), *samples], 500_000)
    assert found is not None and found.fixed_ns <= 500_000
    slowest, quickest = 11_500_000 / 4_000_000, 8_500_000 / 7_000_000
    assert quickest <= found.fs_per_byte / FS_PER_NS <= slowest
    assert fit(samples, 10_500_000) == flat, "what is known says nothing against it"


@given(st.integers(0, 10**6), st.integers(1, 10**6), st.sets(st.integers(1, 10**8), min_size=2, max_size=20))
def test_an_exact_line_stays_whatever_is_known_of_its_start(fixed_ns: int, ns_per_byte: int, sizes: set[int]) -> None:
    samples = [(size, fixed_ns + ns_per_byte * size) for size in sizes]
    line = Linear(fixed_ns=fixed_ns, fs_per_byte=ns_per_byte * FS_PER_NS)
    assert fit(samples, fixed_ns) == fit(samples, 2 * fixed_ns) == fit(samples) == line
