"""Encoded buckets in two levels: against their definition, over threads, and for many ranks."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from typing import Any

import pytest
import torch
from buckets.test_exchanged import SHAPES, _assert_bits, _config, _gradients, _wanted
from support.inside import inside, members
from support.leaf_steps import CAPS, clear, leaves, step
from support.loopback import ThreadRank, ThreadWorld
from support.wires import ENCODED, reduced_in_two_levels

from fusedreduce import DataParallel, ReduceConfig, Reducer
from fusedreduce.buckets.two_levels import TwoLevelBucket
from fusedreduce.buckets.wire_table import warn_of_small_shards
from fusedreduce.comm.local.group import LocalCommunicator
from fusedreduce.comm.protocol import Communicator
from fusedreduce.kernels.encodings import ENCODINGS

pytestmark = pytest.mark.usefixtures("path")

CPU = torch.device("cpu")


# What travels where


class Counted(ThreadRank):
    """Counts the bytes that this rank gives to collectives, by the ranks that take part in them."""

    def __init__(
        self, communicator: LocalCommunicator, parts: dict[tuple[int, ...], list[tuple[str, Any, int]]]
    ) -> None:
        super().__init__(communicator)
        self.parts = parts

    def apart(self, devices: Collection[torch.device] = (), ranks: Sequence[int] | None = None) -> ThreadRank:
        return Counted(super().apart(devices, ranks), self.parts)

    def _record(self, kind: str, tensor: torch.Tensor) -> None:
        self.parts.setdefault(members(self), []).append((kind, tensor.dtype, tensor.nbytes))


@pytest.mark.parametrize("wire", ENCODED)
@pytest.mark.parametrize("ranks", [4, 6])
def test_encoded_bytes_alone_cross_nodes(wire: str, ranks: int) -> None:
    """As many as the encoding has: of two nodes a rank's shard once, of more twice."""
    shape, block = (64, 128 * ranks), ENCODINGS[wire]

    def case(communicator: Any) -> dict[tuple[int, ...], list[tuple[str, Any, int]]]:
        parameters = [torch.zeros(shape, requires_grad=True) for _ in range(3)]
        counted = Counted(communicator, {})
        reducer = Reducer(parameters, counted, _config(wire, 2, policy="static"), caps=CAPS)
        for _ in range(3):
            counted.parts.clear()
            step(reducer, [torch.randn(shape) for _ in parameters])
            clear(parameters)
        assert len(reducer.plan) == 3
        return counted.parts

    for rank, parts in enumerate(ThreadWorld(ranks).results(case)):
        node, across = (rank // 2 * 2, rank // 2 * 2 + 1), tuple(range(rank % 2, ranks, 2))
        assert set(parts) == {node, across}, "the user's communicator has nothing to do"
        numel, nodes = math.prod(shape), ranks // 2
        encoded = numel // block.block_numel * block.block_bytes // 2  # of a local rank's shard
        assert [kind for kind, _, _ in parts[across]].count("all_gather") == 3
        assert {dtype for _, dtype, _ in parts[across]} == {torch.uint8}
        sent = encoded if nodes == 2 else encoded + encoded // nodes
        assert sum(nbytes for _, _, nbytes in parts[across]) == 3 * sent
        within = sum(nbytes for kind, _, nbytes in parts[node] if kind == "reduce_scatter")
        assert within == 3 * 4 * numel


# Who is asked, and what is refused


def _kinds(reducer: Reducer) -> set[type]:
    return {type(one) for one in inside(reducer).buckets}


@pytest.mark.parametrize(
    ("told", "asked", "expected"), [(2, None, True), (4, None, False), (2, 1, False), (1, 2, True)]
)
def test_nodes_are_those_that_ranks_are_told_unless_the_user_says_otherwise(
    told: int, asked: int | None, expected: bool
) -> None:
    class Told(ThreadRank):
        def ranks_per_node(self, device: torch.device) -> int:
            return told

    def case(communicator: Any) -> bool:
        parameters = leaves(SHAPES)
        reducer = Reducer(parameters, Told(communicator), _config("int8", asked))
        for number in range(2):
            step(reducer, _gradients(number))
            clear(parameters)
        return TwoLevelBucket in _kinds(reducer)

    assert ThreadWorld(4).results(case) == [expected] * 4


def test_nodes_that_are_not_possible_are_refused_on_every_rank() -> None:
    def case(communicator: Communicator) -> None:
        step(Reducer(leaves(SHAPES), communicator, _config("int8", 3)), _gradients(0))

    for error in ThreadWorld(4).run(case):
        assert isinstance(error, ValueError)
        assert "ranks_per_node=3 is not possible among 4 ranks: nodes differ" in str(error)
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="ranks_per_node must be a whole number of at least 1"):
            ReduceConfig(ranks_per_node=wrong)  # type: ignore[arg-type]
    parallel = DataParallel(torch.nn.Linear(40, 40), ["cpu"] * 4, reduce=_config("int8", 2), threads=False)
    with pytest.raises(ValueError, match="ranks_per_node=2 is not possible among 4 ranks: the ranks share a thread"):
        parallel(torch.randn(8, 40)).sum().backward()
    parallel.close()


@pytest.mark.parametrize("option", ["stochastic_rounding", "error_feedback"])
def test_what_is_of_single_contributions_has_one_level(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option}=True and ranks_per_node=2 exclude each other"):
        _config("int8", 2, **{option: True})

    class Told(ThreadRank):
        def ranks_per_node(self, device: torch.device) -> int:
            raise AssertionError("nobody asks")

    def case(communicator: Any) -> bool:
        config = ReduceConfig(wire="int8", **{option: True})  # type: ignore[arg-type]
        reducer = Reducer(leaves(SHAPES), Told(communicator), config)
        step(reducer, _gradients(0))
        return TwoLevelBucket in _kinds(reducer)

    assert ThreadWorld(4).results(case) == [False] * 4


def test_another_wire_and_two_ranks_have_one_level() -> None:
    for ranks, config in (
        (4, ReduceConfig(wire="bf16", accumulation="fp32", ranks_per_node=2)),
        (2, _config("int8", 2)),
    ):

        def case(communicator: Communicator, config: ReduceConfig = config) -> bool:
            reducer = Reducer(leaves(SHAPES), communicator, config)
            step(reducer, _gradients(0))
            return TwoLevelBucket in _kinds(reducer)

        assert ThreadWorld(ranks).results(case) == [False] * ranks


@pytest.mark.parametrize(
    ("wire", "ranks", "cap_mb", "shard_bytes"),
    [
        ("int8", 101, 25, None),
        ("int8", 102, 25, 65254),
        ("int8", 1024, 25, 6500),
        ("int4", 53, 25, None),
        ("int4", 54, 25, 64474),
    ],
)
def test_small_shards_of_one_level_are_warned_of_once(
    caplog: pytest.LogCaptureFixture, wire: Any, ranks: int, cap_mb: int, shard_bytes: int | None
) -> None:
    warn_of_small_shards.cache_clear()
    for _ in range(2):
        warn_of_small_shards(frozenset({wire}), ranks, cap_mb * 2**20)
    assert len(caplog.records) == (shard_bytes is not None)
    if shard_bytes is not None:
        said = caplog.text
        assert f"wire='{wire}' among {ranks} ranks: full buckets have shards of {shard_bytes} bytes" in said
        enough = re.search(r"Raise bucket_cap_mb to (\d+)", said)
        assert enough is not None
        warn_of_small_shards(frozenset({wire}), ranks, int(enough[1]) * 2**20)
        assert len(caplog.records) == 1, "what it says helps"


@pytest.mark.parametrize(("per_node", "warned"), [(1, True), (2, False)])
def test_rank_0_warns_where_all_ranks_exchange(caplog: pytest.LogCaptureFixture, per_node: int, warned: bool) -> None:
    warn_of_small_shards.cache_clear()

    def case(communicator: Communicator) -> None:
        step(Reducer(leaves(SHAPES), communicator, _config("int8", per_node), caps=CAPS), _gradients(0))

    ThreadWorld(4).results(case)
    assert caplog.text.count("two levels") == warned


# Failures


def test_reset_makes_other_communicators() -> None:
    def case(communicator: Communicator) -> None:
        parameters = leaves(SHAPES)
        reducer = Reducer(parameters, communicator, _config("int8", 2), caps=CAPS)
        of_ranks = zip(*map(_gradients, range(6)), strict=True)
        expected = [_wanted(one, [6.0] * 6, "int8", 2) for one in of_ranks]
        for number in range(4):
            step(reducer, _gradients(communicator.rank))
            for index, one in enumerate(parameters):
                _assert_bits(one.grad, expected[index], (number, index))
            clear(parameters)
            made = inside(reducer).communicators_of_phases
            handle = parameters[number].register_post_accumulate_grad_hook(_fails)
            with pytest.raises(ZeroDivisionError):
                step(reducer, _gradients(communicator.rank))
            handle.remove()
            clear(parameters)
            reducer.reset()
            assert not inside(reducer).phases.due
            reducer.prepare_for_forward()
            assert made.isdisjoint(inside(reducer).communicators_of_phases)
        reducer.close()

    ThreadWorld(6).results(case)


def _fails(_: torch.Tensor) -> None:
    raise ZeroDivisionError


# Many ranks


LIMITS = {"int8": 0.010, "int4": 0.155}


@pytest.mark.parametrize("wire", ENCODED)
@pytest.mark.parametrize(
    ("nodes", "per_node"), [(2, 2), (2, 8), (3, 2), (8, 8), pytest.param(128, 8, marks=pytest.mark.full)]
)
def test_the_error_of_the_mean_of_gaussian_gradients(wire: Any, nodes: int, per_node: int) -> None:
    """By the definition, whose bits ranks get."""
    ranks, numel = nodes * per_node, 40_000
    local = [torch.randn(1, numel, generator=torch.Generator().manual_seed(rank)) for rank in range(ranks)]
    mean = reduced_in_two_levels(local, [float(ranks)] * ranks, wire, per_node)
    exact = torch.stack(local).double().mean(0)
    error = float((mean.double() - exact).norm() / exact.norm())
    assert LIMITS[wire] / 2 < error <= LIMITS[wire], error
