"""What a user of torch's DistributedDataParallel relies on, of ours: on 2 and 3 Gloo ranks, torch's class beside it."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
from parallel import ddp_cases, ddp_dropin_cases, ddp_message_cases, ddp_module_cases
from support.grids import grid
from support.ranks import RankPool

from fusedreduce import Asynchronous, BoundedStaleness

KEPT = ("view", "other", "alone", "own")
KEPT_GRID = grid(
    ("world", "how", "others_to_none", "accumulates"),
    [*itertools.product((2, 3), KEPT, (False, True), (False, True))],
)


@KEPT_GRID
def test_the_mean_of_a_kept_gradient_that_no_rank_uses_has_torchs_bits(
    two: RankPool, three: RankPool, world: int, how: str, others_to_none: bool, accumulates: bool
) -> None:
    for theirs, ours in {2: two, 3: three}[world].run(
        ddp_dropin_cases.kept_mean_is_torchs, how, others_to_none, accumulates
    ):
        assert theirs == ours


@KEPT_GRID
def test_a_sum_leaves_a_kept_gradient_that_no_rank_uses(
    two: RankPool, three: RankPool, world: int, how: str, others_to_none: bool, accumulates: bool
) -> None:
    single = 0.699999988079071  # 0.7 as fp32
    for rank, found in enumerate(
        {2: two, 3: three}[world].run(ddp_dropin_cases.kept_sum, how, others_to_none, accumulates)
    ):
        kept = {"view": single, "other": 3 * 2.0**rank, "alone": single if rank == 0 else None, "own": 3 * 2.0**rank}[
            how
        ]
        assert found == [kept] * ddp_dropin_cases.STEPS


def test_in_a_static_graph_too(two: RankPool) -> None:
    for theirs, ours in two.run(ddp_dropin_cases.kept_static, "mean"):
        assert theirs == ours
    for rank, (_, ours) in enumerate(two.run(ddp_dropin_cases.kept_static, "sum")):
        assert ours == [3 * 2.0**rank] * ddp_dropin_cases.STEPS


# Messages


@pytest.mark.parametrize("name", ddp_message_cases.SCRIPTS)
def test_errors_begin_as_torchs(two: RankPool, name: str) -> None:
    begins = ddp_message_cases.SCRIPTS[name].begins
    for found in two.run(ddp_message_cases.messages, name):
        assert [kind for kind, _ in found] == [True, True], found
        assert [text[: len(begins)] for _, text in found] == [begins, begins]
        if begins == ddp_message_cases.TWICE:
            theirs, ours = (re.findall(r"Parameter at index \d+ with name [\w.]+\w", text) for _, text in found)
            assert theirs == ours and len(ours) == 1


@pytest.mark.parametrize("name", ["lazy", "a bias again, later", "unfinished", "graph grows", "dense for sparse"])
def test_errors_go_on_with_the_parameters_name(two: RankPool, name: str) -> None:
    script = ddp_message_cases.SCRIPTS[name]
    names = {"unfinished": "layers.2.weight", "graph grows": "layers.2.bias", "a bias again, later": "second.bias"}
    for _, (_, ours) in two.run(ddp_message_cases.messages, name):
        assert names.get(name, "weight") in ours.removeprefix(script.begins)


@pytest.mark.parametrize(
    "options", [{"bucket_cap_mb": 0}, {"bucket_cap_mb": 1e-7}, {"bucket_cap_mb_list": [0, 0.005]}], ids=str
)
def test_a_cap_of_less_than_a_byte_is_what_it_is_for_torch(two: RankPool, options: dict[str, Any]) -> None:
    for theirs, ours in two.run(ddp_dropin_cases.bucket_sizes, options):
        assert theirs == ours and "," in ours


# gradient_as_bucket_view with a 16-bit wire


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
@pytest.mark.parametrize("wire", ["bf16", "fp16"])
def test_views_of_a_16_bit_wire_are_none_and_rank_0_logs_what_that_costs(
    two: RankPool, wire: str, options: dict[str, Any]
) -> None:
    two.run(functools.partial(ddp_dropin_cases.flag_without_views, **options), wire)


@pytest.mark.parametrize("mode", [BoundedStaleness(2), Asynchronous()], ids=str)
def test_with_a_16_bit_wire_the_flag_excludes_no_mode(two: RankPool, mode: BoundedStaleness | Asynchronous) -> None:
    two.run(ddp_dropin_cases.flag_with_modes, mode)


@pytest.mark.parametrize("wire", ["native", "bf16"])
def test_ranks_with_different_flags_all_learn_of_it(two: RankPool, wire: str) -> None:
    for text in two.run(ddp_dropin_cases.flag_differs, wire):
        assert "gradient_as_bucket_view: true on rank 0; false on rank 1" in text


# Switches in the environment


@pytest.fixture(scope="module", params=["INFO", "DETAIL"])
def debugged(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """Two ranks with torch's debugging at a level: with DETAIL, every collective is compared across ranks first."""
    pool = RankPool(2, {"TORCH_DISTRIBUTED_DEBUG": request.param})
    yield pool
    pool.close()


@pytest.mark.parametrize("debugged", [pytest.param("INFO", marks=pytest.mark.full), "DETAIL"], indirect=True)
@pytest.mark.parametrize(
    "case",
    [
        functools.partial(ddp_cases.no_sync, wire="bf16"),
        functools.partial(ddp_cases.unused, wire="bf16", container="tensor"),
        functools.partial(ddp_cases.no_sync, wire="native"),
        functools.partial(ddp_cases.static_graph, wire="native"),
        functools.partial(ddp_cases.join, wire="native", batches=(3, 5), by_initial=True),
        functools.partial(ddp_module_cases.sparse, wire="native", hook=False),
        functools.partial(ddp_dropin_cases.flag_with_modes, mode=BoundedStaleness(2)),
        functools.partial(ddp_dropin_cases.flag_with_modes, mode=Asynchronous()),
        functools.partial(ddp_dropin_cases.own_pace),
    ],
    ids=lambda case: "-".join(
        [case.func.__name__, *(str(case.keywords[key]) for key in ("wire", "mode") if key in case.keywords)]
    ),
)
def test_the_wrapper_works_under_torchs_debugging(debugged: RankPool, case: Any) -> None:
    debugged.run(case)


def test_torchs_debugging_has_logging_data_logged(two: RankPool, debugged: RankPool, request: Any) -> None:
    assert two.run(ddp_dropin_cases.debugged) == [[], []]
    detail = "DETAIL" in request.node.name
    for rank, (first, *later) in enumerate(debugged.run(ddp_dropin_cases.debugged)):
        assert first.startswith(f"[Rank {rank}]: DDP Initialized with: ") and "world_size: 2" in first
        assert len(later) == (2 if detail else 0)
        for number, line in enumerate(later, 1):
            assert line.startswith(f"[Rank {rank} / 2] [after iteration {number}] ")
            assert "avg_backward_comm_time: " in line and "layers.1.weight, layers.1.bias, layers.2.weight" in line


def test_a_switch_of_torchs_reducer_that_is_not_followed_is_named_once() -> None:
    switches = {"DDP_SET_LAST_BUCKET_CAP": "1", "DDP_DISABLE_COMM_MEM": "0"}
    pool = RankPool(2, switches)
    try:
        for said, theirs, ours in pool.run(ddp_dropin_cases.told_of_switches):
            wanted = [f"{name}={value} is not followed" for name, value in switches.items()]
            assert [message.partition(" by ")[0] for message in said] == wanted
            # torch's small bucket is the last one then, ours the first.
            assert theirs == f"{2**21}, {2**20}" and ours == f"{2**20}, {2**21}"
    finally:
        pool.close()
