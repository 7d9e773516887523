"""Sparse gradients that some ranks, or all, leave out: every mode and door in which there may be such."""

from __future__ import annotations

import datetime
import gc
import itertools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.grids import grid
from support.leaf_steps import clear, sparse_like
from support.leaf_steps import step as leaf_step
from support.loopback import Loopback
from support.ranks import RankPool, on_ranks
from support.timeouts import PATIENT_S, patient_group, wait_briefly
from torch import nn

import fusedreduce
from fusedreduce import AgreementError, BoundedStaleness, CollectiveError, FusedReduceError, ReduceConfig, Reducer
from fusedreduce.comm.local.group import LocalGroup
from fusedreduce.comm.protocol import Pending


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.full), 3])
def ranks(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    pool = RankPool(request.param)
    pool.run(make_groups)
    yield pool
    pool.close()


ROWS, WIDTH = 10, 3
# By step and rank, which tables a rank uses: of "rows", "bag" (one sparse dimension) and "cells" (two).
LEFT_OUT: tuple[tuple[frozenset[str], ...], ...] = tuple(
    tuple(map(frozenset, ranks))
    for ranks in (
        (("bag",), (), ("rows",)),  # nobody uses cells, the first rank no rows
        (("bag", "rows"), ("bag",), ("bag",)),  # the second rank has never had rows
        ((), (), ()),
        (("cells",), ("rows",), ()),
        (("rows", "bag", "cells"),) * 3,
        (("cells",), (), ()),
        ((), ("cells", "bag"), ("cells", "bag")),
    )
)


class Tables(nn.Module):
    """Embeddings with sparse gradients, each used or not, beside a dense layer.

    `cells` gets a gradient with two sparse dimensions, which no module of torch's makes.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.rows = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.bag = nn.EmbeddingBag(ROWS, WIDTH, sparse=True, mode="sum")
        self.cells = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.cells.weight.register_hook(lambda gradient: gradient.to_dense().to_sparse(2))
        self.dense = nn.Linear(WIDTH, 2)

    def forward(self, given: tuple[torch.Tensor, frozenset[str]]) -> torch.Tensor:
        indices, used = given
        features = torch.ones(1, WIDTH)
        if "rows" in used:
            features = features + self.rows(indices).sum(0)
        if "bag" in used:
            features = features + self.bag(indices, torch.zeros(1, dtype=torch.int64))
        if "cells" in used:
            features = features + self.cells(indices).sum(0)
        out: torch.Tensor = self.dense(features)
        return out


def model() -> Tables:
    """With weights that are small integers: sums of any order are exact."""
    tables = Tables()
    with torch.no_grad():
        for parameter in tables.parameters():
            parameter.copy_(torch.randint(-4, 5, parameter.shape))
    return tables


def indices(rank: int, step: int) -> torch.Tensor:
    """Duplicates, and in every fourth step none at all."""
    return torch.tensor([] if (rank + step) % 4 == 3 else [rank, rank, (rank + step) % ROWS], dtype=torch.int64)


def loss_of(output: torch.Tensor, world: int) -> torch.Tensor:
    """Its gradients are multiples of the ranks' number: their mean is exact on every wire."""
    return (world * output).sum()


def backwards(modules: Sequence[nn.Module], rank: int, world: int, step: int, used: frozenset[str]) -> None:
    """Of a rank's step: the same loss of each."""
    for module in modules:
        module.zero_grad()
        loss_of(module((indices(rank, step), used)), world).backward()


def expected(
    local: nn.Module, world: int, op: str = "mean", group: dist.ProcessGroup | None = None
) -> list[torch.Tensor | None]:
    """Per parameter, of all ranks' gradients the mean or sum, dense; None where no rank has one. A collective."""
    parameters = list(local.parameters())
    dense = [torch.zeros(one.shape, device="cpu") if one.grad is None else one.grad.to_dense() for one in parameters]
    here = torch.tensor([float(one.grad is not None) for one in parameters], device="cpu")
    of_ranks = torch.cat([here, *(one.reshape(-1) for one in dense)])
    dist.all_reduce(of_ranks, group=group)
    here, *totals = of_ranks.split([len(dense), *(one.numel() for one in dense)])
    return [
        (total / world if op == "mean" else total).view(one.shape) if used else None
        for used, total, one in zip(here, totals, dense, strict=True)
    ]


def assert_gradients(module: nn.Module, wanted: Sequence[torch.Tensor | None]) -> None:
    """Each gradient is what is wanted, and of the layout that its table has."""
    for (name, parameter), want in zip(module.named_parameters(), wanted, strict=True):
        if want is None:
            assert parameter.grad is None, name
            continue
        assert parameter.grad is not None, name
        if not name.startswith("dense"):
            assert parameter.grad.layout is torch.sparse_coo, name
            assert parameter.grad.sparse_dim() == (2 if name.startswith("cells") else 1), name
        assert torch.equal(parameter.grad.to_dense(), want), name


# How a wrapper is built, and what its steps are.
WAYS: dict[str, dict[str, Any]] = {
    "search": {},
    "search, bf16": {"wire": "bf16"},
    "search, fp16": {"wire": "fp16"},
    "search, sum": {"op": "sum"},
    "search, views": {"gradient_as_bucket_view": True},
    "search, no overlap": {"overlap": False},
    "search, looked at": {"grad_stats": True, "check_finite": "raise"},
    "staleness": {"sync_mode": BoundedStaleness(1)},
    "staleness, looked at": {"sync_mode": BoundedStaleness(2), "grad_stats": True, "check_finite": "count"},
    "hook": {},
}
_OF_CONFIG = ("wire", "op", "overlap", "grad_stats", "check_finite", "sync_mode")


def wrapped(how: str, **more: Any) -> Any:
    options = {**WAYS.get(how, {}), **more}
    config = ReduceConfig(**{name: options.pop(name) for name in _OF_CONFIG if name in options})
    ddp: Any = fusedreduce.DistributedDataParallel(model(), reduce=config, bucket_cap_mb=1e-5, **options)
    if how == "hook":  # a lambda, because torch refuses an annotation that is a string
        ddp.register_comm_hook(fusedreduce.ProcessGroupCommunicator(), lambda state, bucket: averaged(state, bucket))
    return ddp


def averaged(communicator: fusedreduce.ProcessGroupCommunicator, bucket: Any) -> torch.futures.Future[Any]:
    """A user's hook. torch's own has Gloo's two threads end sparse sums, which now and then corrupts the heap."""
    buffer = bucket.buffer().div_(communicator.size)
    reduce = communicator.all_reduce_sparse if buffer.is_sparse else communicator.all_reduce
    return reduce(buffer).future().then(lambda done: done.value()[0])


@pytest.mark.parametrize("how", WAYS)
@on_ranks(pool="ranks")
def test_tables_that_ranks_leave_out(rank: int, world: int, how: str) -> None:
    """Tables that some ranks, or all, leave out, in other steps others."""
    ddp, local = wrapped(how, find_unused_parameters=True), model()
    late = fusedreduce.config.staleness(ddp.sync_mode)
    wanted: list[list[torch.Tensor | None]] = []
    for step in range(2 * len(LEFT_OUT)):
        used = ALL - LEFT_OUT[step % len(LEFT_OUT)][rank]
        backwards((ddp, local), rank, world, step, used)
        wanted.append(expected(local, world, ddp.reduce_config.op))
        if step >= late:
            assert_gradients(ddp.module, wanted[step - late])
    landing = wanted[len(wanted) - late :]

    def landed() -> None:
        assert_gradients(ddp.module, landing.pop(0))
        ddp.zero_grad()

    ddp.zero_grad()
    ddp.flush(step=landed)
    assert not landing
    if "looked at" in how and not late:
        assert ddp.non_finite() == []


@on_ranks(pool="ranks")
def test_a_static_graph_in_which_ranks_use_different_tables(rank: int, world: int) -> None:
    """A static graph, in which each rank leaves out tables of its own."""
    ddp, local = wrapped("static", static_graph=True), model()
    for step in range(6):
        used = ALL - {"rows", ("bag", "cells")[rank % 2]}
        backwards((ddp, local), rank, world, step, used)
        assert_gradients(ddp.module, expected(local, world))


@grid(
    ("steps", "how", "search"),
    [*itertools.product([(2, 3, 5), (4, 0, 2), (0, 3, 0)], ["plain", "hook", "search, looked at"], [False, True])],
)
@on_ranks(pool="ranks")
def test_ranks_run_out_of_inputs(rank: int, world: int, steps: Sequence[int], how: str, search: bool) -> None:
    """Ranks run out of inputs after different numbers of steps, one maybe before it has ever had a gradient."""
    ddp, local = wrapped(how, find_unused_parameters=search), model()
    with ddp.join():
        for step in range(steps[rank]):
            used = frozenset(ALL - LEFT_OUT[step % len(LEFT_OUT)][rank]) if search else ALL
            backwards((ddp, local), rank, world, step, used)
            wanted = _of_those_left(local, world, [step < count for count in steps[:world]])
            assert_gradients(ddp.module, wanted)


def _of_those_left(local: nn.Module, world: int, left: Sequence[bool]) -> list[torch.Tensor | None]:
    """As `expected`, among ranks that still have inputs, each of which knows the others' from its own model."""
    return expected(local, world, group=GROUPS[tuple(left)])


@on_ranks(pool="ranks")
def test_a_gradient_that_was_kept_of_an_unused_table_stays(rank: int, world: int) -> None:
    """A gradient of a table that no rank uses stays as it is, on each rank another one."""
    ddp = wrapped("kept", find_unused_parameters=True)
    for step in range(3):
        ddp.zero_grad()
        loss_of(ddp((indices(rank, step), ALL)), world).backward()
    table = ddp.module.rows.weight
    mine = torch.sparse_coo_tensor(torch.tensor([[rank, ROWS - 1]]), torch.full((2, WIDTH), rank + 1.0), table.shape)
    table.grad = mine
    for step in range(3):
        loss_of(ddp((indices(rank, step), ALL - {"rows"})), world).backward()
        assert table.grad is mine and torch.equal(mine.to_dense()[rank], torch.full((WIDTH,), rank + 1.0))


@pytest.mark.parametrize("how", ["search", "staleness"])
@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize(("what", "shown"), [("dense", "dense and"), ("cells", "sparse of 2 sparse dimensions and")])
@on_ranks(pool="ranks")
def test_a_gradient_of_another_kind_is_the_same_error_on_every_rank(
    rank: int, world: int, what: str, shown: str, before: int, how: str
) -> str:
    """One rank's gradient is of another kind, in the first step or later; the error. Then reset(), and on."""
    ddp, spoilt = wrapped(how, find_unused_parameters=True), [False]
    change = {"dense": torch.Tensor.to_dense, "cells": lambda one: one.to_dense().to_sparse(2)}[what]

    def spoil(table: torch.Tensor) -> None:
        if spoilt[0] and table.grad is not None:
            table.grad = change(table.grad)

    ddp.module.rows.weight.register_post_accumulate_grad_hook(spoil)

    def steps(count: int) -> None:
        local = model()
        for step in range(count):
            backwards((ddp, local), rank, world, step, ALL)
            wanted = expected(local, world)
            if not fusedreduce.config.staleness(ddp.sync_mode):
                assert_gradients(ddp.module, wanted)

    def until_it_lands() -> None:
        for step in range(1 + fusedreduce.config.staleness(ddp.sync_mode)):
            spoilt[0] = rank == world - 1 and step == 0
            ddp.zero_grad()
            loss_of(ddp((indices(rank, 0), ALL)), world).backward()

    steps(before)
    with pytest.raises(AgreementError) as caught:
        until_it_lands()
    spoilt[0] = False
    ddp.reset()
    steps(3)
    message = str(caught.value)
    text = "The gradient of rows.weight has not been reduced: it must be sparse (torch.sparse_coo), and of one kind"
    assert text in message, message
    assert f"{shown} torch.float32 on rank {world - 1}" in message, message
    assert ("In the steps before it was sparse of 1 sparse dimensions" in message) == bool(before), message
    return message


@pytest.mark.parametrize("how", ["search", "hook"])
@pytest.mark.parametrize("name", ["dense.weight", "rows.weight"])
@on_ranks(pool="ranks")
def test_an_error_of_one_rank_does_not_keep_the_others_waiting_for_sums_that_come_late(
    rank: int, world: int, name: str, how: str
) -> None:
    """In the first step, whose sparse sums come late, one rank's gradient is changed behind its pack; then reset()."""
    ddp, local = wrapped(how, find_unused_parameters=True), model()
    parameter = ddp.module.get_parameter(name)

    def replace() -> None:
        parameter.grad = parameter.grad.clone()

    def behind_the_reducers_end(gradient: torch.Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(replace)

    output = ddp((indices(rank, 0), ALL))
    if rank == 0:
        output.register_hook(behind_the_reducers_end)
        with pytest.raises(FusedReduceError, match=f"the gradient of {name} .* was replaced after it had been packed"):
            loss_of(output, world).backward()
    else:
        loss_of(output, world).backward()
    ddp.reset()
    for step in range(3):
        backwards((ddp, local), rank, world, step, ALL)
        assert_gradients(ddp.module, expected(local, world))


@pytest.mark.parametrize("wire", ["native", "bf16"])
@on_ranks(pool="ranks")
def test_our_hook_on_torchs_class(rank: int, world: int, wire: str) -> None:
    """Our hook on torch's class, whose join contributes empty tensors of the latest gradient's kind."""
    tables, local = model(), model()
    ddp = nn.parallel.DistributedDataParallel(tables, bucket_cap_mb=1e-5)
    ddp.register_comm_hook(fusedreduce.FusedHookState(wire=wire), fusedreduce.fused_hook)
    steps = [2 + one for one in range(world)]
    with ddp.join():
        for step in range(steps[rank]):
            backwards((ddp, local), rank, world, step, ALL)
            assert_gradients(tables, _of_those_left(local, world, [step < count for count in steps[:world]]))


def sums_that_end_at_once(rank: int, world: int, count: int) -> None:
    """Many sparse and dense sums in flight together."""
    communicator = fusedreduce.ProcessGroupCommunicator()
    table = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, 2), (8, 2), check_invariants=True).coalesce()
    for _ in range(count):
        tables = [table.clone() for _ in range(4)]
        vectors = [torch.ones(4) for _ in range(4)]
        works = []
        for vector, one in zip(vectors, tables, strict=True):
            works += [communicator.all_reduce(vector), communicator.all_reduce_sparse(one)]
        for work in works:
            work.wait()
        assert all(torch.equal(one.to_dense(), world * table.to_dense()) for one in tables)


def not_connected(rank: int, world: int) -> None:
    """A rank issues the first sparse sum of a group, and its peer never does."""
    group = patient_group()
    communicator = fusedreduce.ProcessGroupCommunicator(group)
    table = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, 2), (8, 2), check_invariants=True)
    if rank == 0:
        wait_briefly()
        for _ in range(2):  # no second attempt, which might meet the peer's first
            with pytest.raises(CollectiveError, match="rank 0: connecting the ranks for sums of sparse gradients"):
                communicator.all_reduce_sparse(table)
        assert communicator.lost
    dist.barrier()


def make_groups(rank: int, world: int) -> None:
    """Groups of the ranks that still have inputs, for every such set."""
    for number in range(1, 2**world):
        left = tuple(bool(number >> one & 1) for one in range(world))
        members = [one for one, there in enumerate(left) if there]
        GROUPS[left] = dist.new_group(members, timeout=datetime.timedelta(seconds=PATIENT_S))


ALL = frozenset({"rows", "bag", "cells"})
GROUPS: dict[tuple[bool, ...], Any] = {}


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
            leaf_step(reducer, [sparse_like(table, [1, 2]) for table in tables])
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
        leaf_step(reducer, [sparse_like(table, [1, 2]), torch.ones(3)], ready=[0, 1])

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
        leaf_step(reducer, [sparse_like(table, [1, 2])])
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
        pool.run(sums_that_end_at_once, 8000)
    finally:
        pool.close()


def test_ranks_that_cannot_be_connected_for_sparse_sums_are_a_lost_group() -> None:
    pool = RankPool(2)
    try:
        pool.run(not_connected)
    finally:
        pool.close()
