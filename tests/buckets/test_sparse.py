"""Sparse gradients that some ranks, or all, leave out: every mode and door in which there may be such."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Iterator

import pytest
import torch
from buckets import sparse_cases
from support.grids import grid
from support.leaf_steps import clear, sparse_like, step
from support.loopback import Loopback
from support.ranks import RankPool

from fusedreduce import FusedReduceError, Reducer
from fusedreduce.comm.local.group import LocalGroup
from fusedreduce.comm.protocol import Pending


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    pool = RankPool(request.param)
    pool.run(sparse_cases.make_groups)
    yield pool
    pool.close()


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.full), 3], indirect=True)
@pytest.mark.parametrize("how", sparse_cases.WAYS)
def test_tables_that_ranks_leave_out(ranks: RankPool, how: str) -> None:
    ranks.run(sparse_cases.left_out, how)


def test_a_static_graph_in_which_ranks_use_different_tables(ranks: RankPool) -> None:
    ranks.run(sparse_cases.static)


@grid(
    ("steps", "how", "search"),
    [*itertools.product([(2, 3, 5), (4, 0, 2), (0, 3, 0)], ["plain", "hook", "search, looked at"], [False, True])],
)
def test_ranks_run_out_of_inputs(ranks: RankPool, steps: tuple[int, ...], how: str, search: bool) -> None:
    ranks.run(sparse_cases.joined, steps, how, search)


def test_a_gradient_that_was_kept_of_an_unused_table_stays(ranks: RankPool) -> None:
    ranks.run(sparse_cases.kept)


@pytest.mark.parametrize("how", ["search", "staleness"])
@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize(("what", "shown"), [("dense", "dense and"), ("cells", "sparse of 2 sparse dimensions and")])
def test_a_gradient_of_another_kind_is_the_same_error_on_every_rank(
    ranks: RankPool, what: str, shown: str, before: int, how: str
) -> None:
    messages = ranks.run(sparse_cases.disagreed, what, before, how)
    assert len(set(messages)) == 1, messages
    world = len(messages)
    assert (
        "The gradient of rows.weight has not been reduced: it must be sparse (torch.sparse_coo), and of one kind"
        in messages[0]
    ), messages
    assert f"{shown} torch.float32 on rank {world - 1}" in messages[0], messages
    assert ("In the steps before it was sparse of 1 sparse dimensions" in messages[0]) == bool(before), messages


@pytest.mark.parametrize("how", ["search", "hook"])
@pytest.mark.parametrize("name", ["dense.weight", "rows.weight"])
def test_an_error_of_one_rank_does_not_keep_the_others_waiting_for_sums_that_come_late(
    ranks: RankPool, name: str, how: str
) -> None:
    ranks.run(sparse_cases.changed_here, name, how)


def test_sums_that_come_late_are_counted_one_by_one() -> None:
    """Else ranks of which one has failed behind the first sum, and one before it, go on together after reset()."""
    tables = [torch.zeros(4, 2, requires_grad=True) for _ in range(3)]
    communicator = Loopback()
    reducer, sum_of = Reducer(tables, communicator, sparse=[True] * 3), communicator.all_reduce_sparse
    for fails in range(3):
        issued: list[torch.Tensor] = []

        def counted(tensor: torch.Tensor, issued: list[torch.Tensor] = issued, fails: int = fails) -> Pending:
            if len(issued) == fails:
                raise MemoryError("out of memory")
            issued.append(tensor)
            return sum_of(tensor)

        communicator.all_reduce_sparse = counted  # type: ignore[method-assign]
        clear(tables)
        before = int(reducer.stats()["collectives"])
        with pytest.raises(MemoryError):
            step(reducer, [sparse_like(table, [1, 2]) for table in tables])
        # Beside them the exchange of kinds.
        assert int(reducer.stats()["collectives"]) - before == fails + 1
        reducer.give_up_step()
        communicator.under_way = 0


@pytest.mark.parametrize("how", ["written to", "replaced"])
def test_a_sparse_gradient_that_changes_after_it_was_taken_is_named(how: str) -> None:
    table, dense = torch.zeros(4, 2, requires_grad=True), torch.zeros(3, requires_grad=True)
    reducer = Reducer([table, dense], Loopback(), sparse=[True, False])

    def meddle(_: torch.Tensor) -> None:
        assert table.grad is not None, "it is ready first"
        if how == "replaced":
            table.grad = table.grad.clone()
        else:
            table.grad.mul_(2)

    def once() -> None:
        clear([table, dense])
        step(reducer, [sparse_like(table, [1, 2]), torch.ones(3)], ready=[0, 1])

    for _ in range(3):
        once()
    dense.register_post_accumulate_grad_hook(meddle)
    with pytest.raises(FusedReduceError, match=rf"gradient of parameter 0 \(parameter 0\) was {how} after"):
        once()


def test_a_reducer_that_is_given_up_leaves_its_ranks_without_the_garbage_collector() -> None:
    # Which may run on one of Gloo's threads, where a process group must not end.
    table, communicator = torch.zeros(4, 2, requires_grad=True), LocalGroup(1).communicator(0)
    reducer = Reducer([table], communicator, sparse=[True])
    for _ in range(2):
        table.grad = None
        step(reducer, [sparse_like(table, [1, 2])])
    alive = weakref.ref(communicator)
    gc.collect()
    gc.disable()
    try:
        del reducer, communicator
        assert alive() is None
    finally:
        gc.enable()


def test_sums_that_end_at_once_leave_the_heap_intact() -> None:
    """As one group, Gloo's own two threads crash within some thousand sums, at one rank too."""
    pool = RankPool(1)
    try:
        pool.run(sparse_cases.sums_that_end_at_once, 8000)
    finally:
        pool.close()


def test_ranks_that_cannot_be_connected_for_sparse_sums_are_a_lost_group() -> None:
    pool = RankPool(2)
    try:
        pool.run(sparse_cases.not_connected)
    finally:
        pool.close()


@pytest.mark.parametrize("wire", ["native", "bf16"])
def test_our_hook_on_torchs_class(ranks: RankPool, wire: str) -> None:
    ranks.run(sparse_cases.through_torchs_ddp, wire)
