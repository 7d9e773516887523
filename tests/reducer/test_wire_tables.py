"""Wires by parameter: which one each gets, what ranks compare, and what they then reduce, to the bit."""

from __future__ import annotations

import copy
import fnmatch
import json
import logging
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from support.inside import inside
from support.leaf_steps import CAPS, drawn, leaves, step
from support.loopback import Loopback, ThreadWorld
from support.wires import reduced

from fusedreduce import (
    AgreementError,
    Asynchronous,
    BoundedStaleness,
    BucketCaps,
    DistributedDataParallel,
    FusedHookState,
    LocalGroup,
    ReduceConfig,
    Reducer,
)
from fusedreduce.buckets.wire_table import LEAST_SHARD_BYTES, WireTable
from fusedreduce.comm.protocol import Communicator
from fusedreduce.config import Accumulation, Wire
from fusedreduce.kernels.encodings import ENCODINGS
from fusedreduce.planning.plan import ParameterKind, regrouped
from fusedreduce.trace import problem
from fusedreduce.trace.reader import RankTrace, read
from fusedreduce.wires import WIRES

pytestmark = pytest.mark.usefixtures("path")

ALL: tuple[Wire, ...] = tuple(WIRES)
NAMES = ("a.weight", "a.bias", "b.weight", "b.bias", "norm.weight", "head.weight", "head.bias")
SHAPES = ((7, 41), (300,), (2, 300), (5, 7), (513,), (16, 16), (3,))
MIXED: dict[str, Wire] = {"a.*": "int8", "head.weight": "int4", "b.*": "bf16", "norm*": "fp16"}


def _gradients(seed: int) -> list[torch.Tensor]:
    return [one * 10.0 ** (index - 3) for index, one in enumerate(drawn(seed, SHAPES))]


def _reducer(communicator: Communicator, config: ReduceConfig, **options: Any) -> Reducer:
    return Reducer(leaves(SHAPES), communicator, config, names=NAMES, caps=CAPS, **options)


def table(config: ReduceConfig, names: Sequence[str] = NAMES, **options: Any) -> tuple[Wire, ...]:
    parameters = options.pop("parameters", None) or leaves(SHAPES)
    return WireTable.of(config, names, parameters, options.get("sparse") or [False] * len(names)).wires


# Which wire


@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=50)
def test_the_first_pattern_that_matches_counts_whatever_the_order_of_parameters(data: st.DataObject) -> None:
    names = data.draw(st.lists(st.text("ab.", min_size=1, max_size=4), min_size=1, max_size=6, unique=True))
    pattern = st.text("ab.*?", min_size=1, max_size=4)
    drawn: dict[str, Wire] = data.draw(st.dictionaries(pattern, st.sampled_from(ALL), max_size=5))
    shapes = st.sampled_from([(300,), (20, 20), (3,), (8, 16), ()])
    kinds = [
        (data.draw(shapes), data.draw(st.sampled_from([torch.float32, torch.complex64])), data.draw(st.booleans()))
        for _ in names
    ]
    parameters = [torch.zeros(shape, dtype=dtype) for shape, dtype, _ in kinds]
    sparse = [one for _, _, one in kinds]
    patterns = {one: wire for one, wire in drawn.items() if any(fnmatch.fnmatchcase(name, one) for name in names)}
    if patterns != drawn:
        unused = next(one for one in drawn if one not in patterns)
        with pytest.raises(ValueError, match="no parameter's name matches") as raised:
            table(ReduceConfig(wire=drawn), names, parameters=parameters, sparse=sparse)
        assert repr(unused) in str(raised.value)
    expected: list[Wire] = []
    for name, parameter, alone in zip(names, parameters, sparse, strict=True):
        wire: Wire = "native"
        for one in reversed(patterns):
            wire = patterns[one] if fnmatch.fnmatchcase(name, one) else wire
        impossible = parameter.is_complex() or (wire in ENCODINGS and parameter.numel() < ENCODINGS[wire].block_numel)
        expected.append("native" if alone or (wire in ENCODINGS and impossible) else wire)
    config = ReduceConfig(wire=patterns)
    assert list(table(config, names, parameters=parameters, sparse=sparse)) == expected
    order = data.draw(st.permutations(range(len(names))))
    turned = [(names[number], parameters[number], sparse[number]) for number in order]
    found = WireTable.of(config, *map(list, zip(*turned, strict=True))).wires
    assert [found[order.index(number)] for number in range(len(names))] == expected


def test_a_function_is_asked_for_each_parameter_and_a_string_keeps_its_rule() -> None:
    asked: list[tuple[str, torch.Size]] = []

    def wire(name: str, parameter: torch.Tensor) -> Wire:
        asked.append((name, parameter.shape))
        return "int8" if parameter.numel() >= 100 else "bf16"

    expected = ("int8", "int8", "int8", "bf16", "int8", "int8", "bf16")
    assert table(ReduceConfig(wire=wire)) == expected
    assert asked == [(name, torch.Size(shape)) for name, shape in zip(NAMES, SHAPES, strict=True)]
    encoded = ("int8", "native", "int8", "native", "native", "int8", "native")
    assert table(ReduceConfig(wire="int8")) == encoded
    assert table(ReduceConfig(wire="bf16")) == ("bf16",) * len(NAMES)
    assert table(ReduceConfig(wire={"*": "int8"})) == ("int8", "int8", "int8", "native", "int8", "int8", "native")


@pytest.mark.parametrize("options", [{"wire_after": 3}, {"least_sqnr_db": 20.0}, {"error_feedback": True}])
def test_options_of_encoded_wires_suit_a_model_that_has_nothing_to_encode(options: dict[str, Any]) -> None:
    small = [torch.zeros(4), torch.zeros(2, 2)]
    config = ReduceConfig(wire="int8", **options)
    assert WireTable.of(config, ["a", "b"], small, [False] * 2).wires == ("native", "native")


def test_wires_that_are_none_or_exclude_another_option_are_refused() -> None:
    for wrong in ("int2", {"*": "int2"}, {"*": None}, None, 3):
        with pytest.raises(ValueError, match="unknown wire .*: use one of 'native', "):
            ReduceConfig(wire=wrong)  # type: ignore[arg-type]
    for unpaired in ({1: "int8"}, (("*", "int8", "bf16"),)):
        with pytest.raises(ValueError, match="patterns of wire must be strings, each with a wire, got"):
            ReduceConfig(wire=unpaired)  # type: ignore[arg-type]
    functions: list[Any] = [lambda name, parameter: "int2", lambda name, parameter: {}[name]]
    for function in functions:
        with pytest.raises(ValueError, match=r"ReduceConfig\(wire=...\) failed for a.weight"):
            table(ReduceConfig(wire=function))
    with pytest.raises(ValueError, match=r"no parameter's name matches 'A\.\*', 'c\*'; there are a\.weight"):
        table(ReduceConfig(wire={"A.*": "int8", "a.*": "int8", "c*": "bf16"}))
    with pytest.raises(ValueError, match="accumulation='fp32' and wire=.* exclude each other"):
        ReduceConfig(wire={"a.*": "int8"}, accumulation="fp32")
    with pytest.raises(ValueError, match="accumulation='fp32' and wire=.* exclude each other"):
        table(ReduceConfig(wire=lambda name, parameter: "int8", accumulation="fp32"))
    for mode in (BoundedStaleness(1), Asynchronous()):
        with pytest.raises(ValueError, match="exchanged within their own step"):
            ReduceConfig(wire={"a.*": "bf16", "b.*": "int4"}, sync_mode=mode)
        with pytest.raises(ValueError, match="exchanged within their own step"):
            table(ReduceConfig(wire=lambda name, parameter: "int4", sync_mode=mode))
        reducer = _reducer(Loopback(), ReduceConfig(wire=lambda name, parameter: "int4"))
        with pytest.raises(ValueError, match="exchanged within their own step"):
            reducer.set_sync_mode(mode)
    with pytest.raises(ValueError, match=r"wire=.*'fp16'.* and sync_mode=Asynchronous\(.*\) exclude each other"):
        _reducer(Loopback(), ReduceConfig(wire={"a.*": "bf16", "b.*": "fp16"}, sync_mode=Asynchronous()))


def test_a_config_with_patterns_is_a_value_like_any_other() -> None:
    mutable: dict[str, Wire] = dict(MIXED)
    config = ReduceConfig(wire=mutable)
    mutable.clear()
    assert config.wire == tuple(MIXED.items()) and hash(config) == hash(ReduceConfig(wire=MIXED))
    for made in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config), copy.copy(config)):
        assert made == config
    assert config != ReduceConfig(wire=dict(reversed(MIXED.items())))
    for one in (config, ReduceConfig(wire=lambda name, parameter: "bf16")):
        assert json.loads(json.dumps(one.to_dict()))["wire"] == "mixed"


def test_what_stays_native_and_what_is_rounded_is_logged_once_by_rank_0(caplog: pytest.LogCaptureFixture) -> None:
    def case(communicator: Communicator) -> None:
        parameters = [torch.zeros(2, 300, dtype=torch.float64, requires_grad=True), torch.zeros(9, 9).requires_grad_()]
        config = ReduceConfig(wire={"rows": "native", "*": "int8"})
        with Reducer(parameters, communicator, config, names=("wide", "rows"), sparse=[False, True]) as reducer:
            assert inside(reducer).wires_in_use.wires == ("int8", "native")

    with caplog.at_level(logging.INFO):
        ThreadWorld(2).results(case)
    assert [one.getMessage() for one in caplog.records] == [
        "sparse gradients are not encoded: rows stay native",
        "fp64 gradients of wide are rounded to int8",
    ]


# What ranks compare


def _agreeing(*configs: ReduceConfig) -> Callable[[Communicator], None]:
    def case(communicator: Communicator) -> None:
        step(_reducer(communicator, configs[communicator.rank]), _gradients(0))

    return case


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_learns_which_parameters_have_other_wires(ranks: int) -> None:
    other = ReduceConfig(wire={"a.weight": "int4", **MIXED, "norm*": "native"})
    found = ThreadWorld(ranks).run(_agreeing(ReduceConfig(wire=MIXED), other, ReduceConfig(wire=MIXED)))
    on = "rank 0" if ranks == 2 else "ranks 0, 2"
    for one in found:
        assert isinstance(one, AgreementError)
        differing = f"a.weight: 'int8' on {on}; 'int4' on rank 1 | norm.weight: 'fp16' on {on}; 'native' on rank 1"
        assert str(one).endswith(differing)


def test_ranks_compare_wires_and_not_how_they_were_given() -> None:
    as_mapping = ReduceConfig(wire={"*.bias": "native", "norm.*": "native", "*": "int8"})
    as_function = ReduceConfig(wire=lambda name, parameter: "int8" if parameter.ndim > 1 else "native")
    ThreadWorld(3).results(_agreeing(as_mapping, as_function, ReduceConfig(wire="int8")))


def test_a_wrapper_compares_wires_before_it_is_made() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 8))
    models = [copy.deepcopy(model) for _ in range(2)]

    def made(wires: Sequence[Mapping[str, Wire]]) -> list[Any]:
        with LocalGroup(2, timeout_s=20.0) as group:

            def rank(communicator: Any) -> Any:
                try:
                    ddp = DistributedDataParallel(
                        models[communicator.rank],
                        process_group=communicator.process_group(),
                        reduce=ReduceConfig(wire=wires[communicator.rank]),
                    )
                    return inside(ddp).wires_in_use.wires
                except (AgreementError, ValueError) as error:
                    return error

            return group.run(rank)

    both: Mapping[str, Wire] = {"0.*": "int8", "1.weight": "bf16"}
    assert made([both, both]) == [("int8", "native", "bf16", "native")] * 2
    found = made([both, {**both, "0.*": "native"}])
    assert all("0.weight: 'int8' on rank 0; 'native' on rank 1" in str(one) for one in found), found
    found = made([both, {"2.*": "int8"}])
    assert all("no parameter's name matches '2.*'" in str(one) for one in found), found


# What they reduce


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("accumulation", ["wire", "fp32"])
def test_each_parameter_gets_the_bytes_of_its_own_wire(ranks: int, accumulation: Any) -> None:
    steps = 6
    config = ReduceConfig(wire=MIXED, accumulation=accumulation)

    def case(communicator: Communicator) -> list[list[torch.Tensor]]:
        found = []
        with _reducer(communicator, config) as reducer:
            for number in range(steps):
                gradients = _gradients(10 * number + communicator.rank)
                for parameter in reducer.parameters:
                    parameter.grad = None
                step(reducer, gradients)
                found.append([parameter.grad for parameter in reducer.parameters])
                for members in reducer.plan:
                    assert len({inside(reducer).wires_in_use[member] for member in members}) == 1
        return found  # type: ignore[return-value]

    wires = table(config)
    assert wires == ("int8", "int8", "bf16", "bf16", "fp16", "int4", "native")
    by_rank = ThreadWorld(ranks).results(case)
    for number in range(steps):
        local = [_gradients(10 * number + rank) for rank in range(ranks)]
        for index, wire in enumerate(wires):
            named = f"{wire}+fp32" if accumulation == "fp32" and wire in ("bf16", "fp16") else wire
            flat = [one[index].view(1, -1) for one in local]  # of two dimensions: the rule of strings encodes it
            expected = reduced(flat, [float(ranks)] * ranks, named).view(SHAPES[index])
            for found in by_rank:
                assert torch.equal(found[number][index], expected), (number, NAMES[index], wire)


@pytest.mark.parametrize(("ranks", "wire"), [(2, "bf16"), (3, "int8"), (2, "int4")])
def test_patterns_that_equal_a_string_give_its_bytes_and_its_plan(ranks: int, wire: Wire) -> None:
    def case(communicator: Communicator) -> None:
        patterns: dict[str, Wire] = {"*": wire}
        if wire != "bf16":
            patterns = {"*.bias": "native", "norm*": "native", **patterns}
        kept: list[tuple[Any, list[Any]]] = []
        for given in (wire, patterns):
            with _reducer(communicator, ReduceConfig(wire=given)) as reducer:
                for number in range(4):
                    step(reducer, _gradients(10 * number + communicator.rank))
                kept.append((reducer.plan, [parameter.grad for parameter in reducer.parameters]))
                json.loads(reducer.plan_json())
        assert kept[0][0] == kept[1][0]
        assert all(torch.equal(*pair) for pair in zip(kept[0][1], kept[1][1], strict=True))

    ThreadWorld(ranks).results(case)


def test_a_saved_plan_is_used_again_with_patterns_and_not_with_others() -> None:
    def trained(config: ReduceConfig) -> Reducer:
        reducer = _reducer(Loopback(), config)
        for number in range(3):
            step(reducer, _gradients(number))
        return reducer

    made = trained(ReduceConfig(wire=MIXED))
    again = trained(ReduceConfig(wire=MIXED, plan=made.plan_json()))
    assert again.plan == made.plan and json.loads(made.plan_json())["wire"] == "mixed"
    together = json.loads(trained(ReduceConfig(wire={"*": "bf16"})).plan_json())
    with pytest.raises(ValueError, match="was made for another wire"):
        _reducer(Loopback(), ReduceConfig(wire=MIXED, plan=json.dumps(together)))


@hypothesis.given(data=st.data())
def test_a_plan_whose_wires_have_changed_is_split_where_it_must_be(data: st.DataObject) -> None:
    groups = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=8))
    order = data.draw(st.permutations(range(len(groups))))
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(groups) - 1)))))
    edges = [0, *[cut for cut in cuts if cut < len(groups)], len(groups)]
    plan = tuple(tuple(order[begin:end]) for begin, end in zip(edges, edges[1:], strict=False))
    kinds = [ParameterKind(4, group, group) for group in groups]
    found = regrouped(plan, kinds, share=True)
    assert sorted(number for members in found for number in members) == sorted(order)
    assert all(len({groups[number] for number in members}) == 1 for members in found)
    assert len(found) == sum(len({groups[number] for number in members}) for members in plan)
    assert [members for members in plan if len({groups[number] for number in members}) == 1] == [
        members for members in found if members in plan
    ]


def test_a_trace_groups_parameters_as_the_run_did_and_knows_other_wires(tmp_path: Path) -> None:
    """Of fp32, fp64, complex, sparse and 1-D gradients on wires of their own: as reducers on each wire say."""
    fp32, fp64 = torch.float32, torch.float64
    dtypes = (fp32, fp32, fp64, torch.bfloat16, fp32, torch.complex64, fp64)
    sparse = [False, False, False, False, True, False, False]

    def reducer(config: ReduceConfig) -> Reducer:
        rows = zip(SHAPES, dtypes, strict=True)
        parameters = [torch.zeros(shape, dtype=dtype, requires_grad=True) for shape, dtype in rows]
        return Reducer(parameters, Loopback(), config, names=NAMES, sparse=sparse)

    def recorded(made: Reducer, folder: Path) -> RankTrace:
        with made.record_trace(folder):
            pass
        return read(folder / "rank0.json")[0]

    def groups(kinds: Sequence[ParameterKind]) -> list[list[bool]]:
        return [[one.wide_group == other.wide_group for one in kinds] for other in kinds]

    live = reducer(ReduceConfig(wire={**MIXED, "b.weight": "int8"}))
    trace = recorded(live, tmp_path)
    assert groups(problem.kinds(trace)) == groups(inside(live).kinds)
    assert tuple(one.wire for one in trace.parameters) == inside(live).wires_in_use.wires
    for wire in ALL:
        other = reducer(ReduceConfig(wire=wire))
        expected = recorded(other, tmp_path / wire)
        found = problem.on_wire(trace, wire)
        assert found.parameters == expected.parameters, wire
        assert groups(problem.kinds(found)) == groups(inside(other).kinds), wire


def test_a_comm_hook_and_views_need_the_wire_native(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="fused_hook has one wire for all parameters"):
        FusedHookState(wire={"*": "int8"})  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO):
        reducer = _reducer(Loopback(), ReduceConfig(wire={"a.*": "int8"}), gradient_as_bucket_view=True)
    (said,) = caplog.messages
    assert "gradient_as_bucket_view=True has no effect with wire='mixed'" in said and not reducer.has_views
    with pytest.raises(ValueError, match=r"wire=\(\('a.\*', 'int8'\),\) and a comm hook exclude each other"):
        reducer.register_comm_hook(None, lambda state, bucket: torch.futures.Future())


@hypothesis.given(wires=st.lists(st.sampled_from(ALL), min_size=1, max_size=4), ranks=st.integers(1, 1024))
def test_buckets_that_are_exchanged_on_cpu_are_small_and_their_shards_are_not(wires: list[Wire], ranks: int) -> None:
    accumulations: tuple[Accumulation, ...] = ("wire", "fp32")
    for accumulation in accumulations:
        table = WireTable(tuple(wires), accumulation)
        caps = table.default_caps(ranks, torch.device("cpu"))
        assert table.default_caps(ranks, torch.device("cuda")) == BucketCaps()
        if not table.has_two_phases(ranks):
            assert caps == BucketCaps()
            continue
        assert 2 * 2**20 <= caps.cap_bytes <= BucketCaps().cap_bytes
        for wire in {*wires} - {"native"}:
            encoding = ENCODINGS.get(wire)
            numel, nbytes = (encoding.block_numel, encoding.block_bytes) if encoding else (1, 2)
            shard_bytes = caps.cap_bytes / 4 / numel * nbytes / ranks
            assert shard_bytes >= LEAST_SHARD_BYTES or caps == BucketCaps(), (wire, shard_bytes)


def test_the_user_limits_and_other_ranks_change_the_size_of_exchanged_buckets() -> None:
    def sizes(ranks: int, then: Callable[[Reducer], None] | None = None, after: int = 0, **options: Any) -> list[int]:
        plans: list[tuple[int, ...]] = []

        def case(communicator: Communicator) -> None:
            parameters = [torch.zeros(512, 1024, requires_grad=True) for _ in range(6)]  # 2 MiB each
            config = ReduceConfig(wire="int8", wire_after=after)
            reducer = Reducer(parameters, communicator, config, **options)
            for _ in range(2):
                step(reducer, [torch.zeros(512, 1024)] * 6)
            if then is not None:
                then(reducer)
            reducer.prepare_for_forward()
            if communicator.rank == 0:
                plans.extend(reducer.plan)

        ThreadWorld(ranks).results(case)
        return [len(members) for members in plans]

    assert sizes(3) == [1] * 6
    assert sizes(2) == [1, 5]
    assert sizes(3, caps=BucketCaps(cap_bytes=8 * 2**20)) == [1, 4, 1]
    assert sizes(3, lambda reducer: reducer.set_bucket_size(4 * 2**20)) == [2, 2, 2]
    first = BucketCaps(cap_bytes=8 * 2**20)
    assert sizes(3, lambda reducer: reducer.set_bucket_size(BucketCaps()), caps=first) == [1] * 6
    assert sizes(3, after=2) == [1] * 6, "from the step on in which they are exchanged"
    assert sizes(3, after=3) == [1, 5]
