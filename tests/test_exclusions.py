"""What does not go together: the table, the page that is made from it, and every door at which two features can meet.

A door is tried with every two ways to have a feature, in both orders. What the table excludes is refused there with the
table's text, and leaves what was made as it was; all else trains. As a script, this file writes docs/exclusions.md.
"""

from __future__ import annotations

import dataclasses
import re
import tempfile
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.own_wires import NAME
from support.ranks import group_of_one
from torch import nn
from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _MixedPrecision

import fusedreduce
from fusedreduce import (
    Asynchronous,
    BoundedStaleness,
    DataParallel,
    FusedHookState,
    ReduceConfig,
    Reducer,
    SyncServer,
    fused_hook,
    reducer_of,
)
from fusedreduce.config import EXCLUSIONS, Exclusion, Feature, is_synchronous
from fusedreduce.reducer.state import LAUNCHED
from fusedreduce.run import options as command

PAGE = Path(__file__).resolve().parents[1] / "docs" / "exclusions.md"
LATE: Feature = "sync_mode= other than Synchronous()"
ASYNCHRONOUS: Feature = "sync_mode=Asynchronous()"
VIEWS: Feature = "gradient_as_bucket_view"
OTHER_WIRE: Feature = "wire= other than 'native'"
SKIPS: Feature = "skip_unused_buckets or skip_all_reduce_unused_params"
ENCODED: Feature = "wire='int8' or 'int4'"

# Ways to have a feature


@dataclass(frozen=True)
class Way:
    """One way to have features.

    Args:
        name: of the test.
        has: the features.
        options: of ReduceConfig.
        arguments: of the constructor, for a model.
        sparse: the model has a sparse gradient.
        call: what is done to what was made; the features are in use from then on.
        lasts: they stay in use when `call` has returned.
        trains: a step on CPU is possible with it.
        steps: `call` takes one.
        beside: it is tried beside ways that have this feature only.
    """

    name: str
    has: frozenset[Feature] = frozenset()
    options: Mapping[str, Any] = field(default_factory=dict)
    arguments: Callable[[nn.Module], Mapping[str, Any]] = lambda model: {}
    sparse: bool = False
    call: Callable[[Door, Any, ExitStack], object] | None = None
    lasts: bool = True
    trains: bool = True
    steps: bool = False
    beside: Feature | None = None

    def __str__(self) -> str:
        return self.name


class Door:
    """Something that users make, with options, and then call.

    Args:
        ways: to have features here.
        looks_not: features that are not looked at here.
        replaced: features that a comm hook takes the place of.
    """

    def __init__(
        self, ways: Collection[Way], looks_not: Collection[Feature] = (), replaced: Collection[Feature] = ()
    ) -> None:
        self.ways = tuple(ways)
        self.looks_not = frozenset(looks_not)
        self.replaced = frozenset(replaced)

    def make(self, model: nn.Module, config: ReduceConfig, arguments: Mapping[str, Any], stack: ExitStack) -> Any:
        """What users make here."""
        return config

    def train(self, made: Any, **step: Any) -> None:
        """Takes a step, whose gradients must be right."""

    def state(self, made: Any) -> object:
        """What a refused call must leave as it is."""
        return made

    def moments(self, first: Way, second: Way) -> list[tuple[Way | None, set[Feature]]]:
        """The features in use when it is made, and at each call."""
        both = [one for one in (first, second) if one.call is None]
        options = {**first.options, **second.options}
        in_use = {feature for one in both for feature in one.has} - self.looks_not
        wire = options.get("wire", "native")
        named = set(BY_FUNCTION) if callable(wire) else {wire} if isinstance(wire, str) else set(wire)
        named = set(wire.values()) if isinstance(wire, dict) else named
        lacking: dict[Feature, set[str]] = {
            "wire= without 'bf16' and 'fp16'": {"bf16", "fp16"},
            "wire= without 'int8' and 'int4'": {"int8", "int4"},
        }
        in_use |= {feature for feature, wires in lacking.items() if named.isdisjoint(wires)}
        in_use -= {VIEWS} if OTHER_WIRE in in_use else set()
        found: list[tuple[Way | None, set[Feature]]] = [(None, set(in_use))]
        for one in (first, second):
            if one.call is not None:
                in_use -= self.replaced if "a comm hook" in one.has else set()
                found.append((one, in_use | one.has))
                in_use |= one.has if one.lasts else set()
        return found


def excluded(features: Collection[Feature]) -> list[Exclusion]:
    return [pair for pair in EXCLUSIONS if pair.one in features and pair.other in features]


def shown(feature: Feature) -> str:
    """A pattern of how a message names it."""
    option = feature.partition("=")[0]
    is_option = option in {one.name for one in dataclasses.fields(ReduceConfig)}
    return (
        f"{option}=.+?"
        if is_option
        else re.escape(feature).replace(r"sparse\ gradients", "the sparse gradients of .+?")
    )


def check_told(error: ValueError, pairs: Collection[Exclusion]) -> None:
    """The text is that of one or more of `pairs`, and nothing else."""
    clauses = [
        f"{shown(pair.one)} and {shown(pair.other)} exclude each other: {re.escape(f'{pair.reason}. {pair.instead}')}"
        for pair in pairs
    ]
    one = "|".join(clauses)
    assert re.fullmatch(f"(?:{one})(?:; (?:{one}))*", str(error)), f"{error} is not of {pairs}"


def combine(door: Door, first: Way, second: Way) -> None:
    """Makes and calls what has both, and looks at whether that goes as the table says."""
    model = Model(sparse=first.sparse or second.sparse)
    options = {**first.options, **second.options}
    trains = first.trains and second.trains
    with ExitStack() as stack, group_of_one():
        moments = door.moments(first, second)
        (_, made_of), *calls = moments
        given = {**first.arguments(model), **second.arguments(model)}
        if pairs := excluded(made_of):
            with pytest.raises(ValueError, match="exclude each other") as refused:
                door.make(model, ReduceConfig(**options), given, stack)
            check_told(refused.value, pairs)
            again = door.make(model, ReduceConfig(), {}, stack)  # nothing was hooked, nobody has the parameters
            if trains:
                door.train(again)
            return
        made = door.make(model, ReduceConfig(**options), given, stack)
        for way, features in calls:
            assert way is not None and way.call is not None
            before = door.state(made)
            if pairs := excluded(features):
                with pytest.raises(ValueError, match="exclude each other") as refused:
                    way.call(door, made, stack)
                check_told(refused.value, pairs)
                assert door.state(made) == before
                break
            way.call(door, made, stack)
        if trains:
            door.train(made)
            door.train(made)


def tried(door: Door, first: Way) -> Iterator[tuple[Way, Way]]:
    """`first` beside each other way of the door; where both are calls, before it: the other order is that way's."""
    for second in door.ways:
        shared = first.options.keys() & second.options.keys()
        unlike = any(first.options[name] != second.options[name] for name in shared)  # an option has one value
        both_calls = first.call is not None and second.call is not None
        later = door.ways.index(second) > door.ways.index(first)
        outside = any(a.beside is not None and a.beside not in b.has for a, b in ((first, second), (second, first)))
        cannot = outside or (first.steps and not second.trains) or (second.steps and not first.trains)
        if first is second or unlike or cannot or {first.name, second.name} <= HOOKS:
            continue
        if (both_calls or later) and (first.name, second.name) not in NOT_YET:
            yield first, second


# What a step stands in the way of, for FusedReduceError to say: not what excludes each other.
NOT_YET = {("record_trace", "set_bucket_size")}
HOOKS = {"comm hook", "fused optimizer"}  # torch's rule: one is registered, once


class Model(nn.Module):
    """Two parameters that every wire can encode, the first with a gradient that may be sparse."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        torch.default_generator.manual_seed(0)  # of a GPU nothing is drawn, and noting that takes longer than the rest
        self.rows = nn.Embedding(16, 16, sparse=sparse)
        self.last = nn.Linear(16, 16)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.rows(numbers))
        return found


NUMBERS = torch.arange(8)
# Of the largest value; with error feedback and stochastic rounding, whose steps lose more.
LOSSES = {
    NAME.format("TOP16"): 2.0**-7,
    "native": 2.0**-20,
    "bf16": 2.0**-8,
    "fp16": 2.0**-8,
    "int8": 2.0**-5,
    "int4": 0.5,
}


@cache
def own_gradients() -> list[torch.Tensor]:
    """Of a model that nothing reduces."""
    alone = Model()
    return list(torch.autograd.grad(alone(NUMBERS).square().mean(), list(alone.parameters())))


def check_gradients(model: nn.Module, config: ReduceConfig, divisor: float = 1.0) -> None:
    """Those of one rank are its own, where they come in their own step; so are those of replicas. Then drops them."""
    loss = max(LOSSES[wire] for wire in config.named_wires() or BY_FUNCTION)
    for mine, own in zip(model.parameters(), own_gradients(), strict=True):
        if not is_synchronous(config.sync_mode):
            assert mine.grad is None or mine.grad.isfinite().all(), "of another step too, which may have had a divisor"
        else:
            assert mine.grad is not None
            most = float(own.abs().max()) * loss
            torch.testing.assert_close(mine.grad, own / divisor, rtol=0.0, atol=most)
        mine.grad = None


def option(name: str, has: Collection[Feature] = (), **options: Any) -> Way:
    return Way(name, frozenset(has), options)


def argument(has: Feature | None, name: str, arguments: Any = None, **more: Any) -> Way:
    given = arguments or (lambda model: {name: True})
    return Way(name, frozenset() if has is None else frozenset({has}), arguments=given, **more)


def called(name: str, has: Collection[Feature], call: Callable[[Door, Any, ExitStack], object], **more: Any) -> Way:
    return Way(name, frozenset(has), call=call, **more)


BF16 = option("bf16", [OTHER_WIRE], wire="bf16")
FP16 = option("fp16", [OTHER_WIRE, "wire='fp16'"], wire="fp16")
INT8 = option("int8", [OTHER_WIRE, ENCODED], wire="int8")
INT4_BY_PATTERN = option("int4 by pattern", [OTHER_WIRE, ENCODED, "wire= by parameter"], wire={"*": "int4"})
SEVERAL = option("several", [OTHER_WIRE, "wire= of several"], wire=("native", "bf16", "int8"))
WIRES = (
    BF16,
    SEVERAL,
    FP16,
    INT8,
    INT4_BY_PATTERN,
    option(
        "rounded by pattern",
        [OTHER_WIRE, "wire= by parameter", "wire= with a rounding of its own"],
        wire={"*weight": NAME.format("TOP16"), "*": "bf16"},
    ),
    option("accumulation on bf16", [OTHER_WIRE, "accumulation='fp32'"], wire="bf16", accumulation="fp32"),
    option("error_feedback on int8", [OTHER_WIRE, ENCODED, "error_feedback=True"], wire="int8", error_feedback=True),
)


BY_FUNCTION = ("native", "int8")


def by_function(name: str, parameter: torch.Tensor) -> Any:
    return BY_FUNCTION[name.endswith("weight")]


FUNCTION = option("by function", [OTHER_WIRE, ENCODED, "wire= by parameter"], wire=by_function)
OF_CODES = (
    option("accumulation", ["accumulation='fp32'"], accumulation="fp32"),
    option("error_feedback", ["error_feedback=True"], error_feedback=True),
    option("stochastic_rounding", ["stochastic_rounding=True"], stochastic_rounding=True),
    option("wire_after", ["wire_after="], wire_after=1),
    option("least_sqnr_db", ["least_sqnr_db="], least_sqnr_db=1.0),
)
MODES = (
    option("staleness 0", sync_mode=BoundedStaleness(0)),
    option("staleness 1", [LATE], sync_mode=BoundedStaleness(1)),
    option("asynchronous", [LATE, ASYNCHRONOUS], sync_mode=Asynchronous()),
)
OTHERS = (
    option("defaults"),
    option("sum", ["op='sum'"], op="sum"),
    option("count", ["check_finite='count' or 'raise'"], check_finite="count"),
    option("raise", ["check_finite='count' or 'raise'"], check_finite="raise"),
    option("grad_stats", ["grad_stats=True"], grad_stats=True),
    option("policy", policy="static"),
)
# The group's backend, which sends nothing, has no sum of sparse gradients.
SPARSE = Way("sparse gradients", frozenset({"sparse gradients"}), sparse=True, trains=False)
CHANGES = (
    called("to staleness 1", [LATE], lambda door, made, stack: made.set_sync_mode(BoundedStaleness(1))),
    called("to asynchronous", [LATE, ASYNCHRONOUS], lambda door, made, stack: made.set_sync_mode(Asynchronous())),
)
RESIZED = called(
    "set_bucket_size", ["set_bucket_size()"], lambda door, made, stack: made.set_bucket_size(600), lasts=False
)


def hooked(door: Door, made: Any, stack: ExitStack) -> None:
    made.register_comm_hook(None, lambda state, bucket: done(bucket.buffer()))


def done(buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future


def traced(door: Door, made: Any, stack: ExitStack) -> None:
    stack.enter_context(
        made.record_trace(stack.enter_context(tempfile.TemporaryDirectory(prefix="fusedreduce-trace-")))
    )


HOOKED = called("comm hook", ["a comm hook"], hooked)
TRACED = called("record_trace", ["record_trace()"], traced)

# The doors


class ReducerDoor(Door):
    """A Reducer of one rank."""

    def make(self, model: nn.Module, config: ReduceConfig, arguments: Mapping[str, Any], stack: ExitStack) -> Reducer:
        assert isinstance(model, Model)
        named = dict(model.named_parameters())
        reducer = stack.enter_context(
            Reducer(
                named.values(),
                fusedreduce.ProcessGroupCommunicator(),
                config,
                names=list(named),
                sparse=[model.rows.sparse and name.startswith("rows") for name in named],
                exclusive=False,
                **arguments,
            )
        )
        self.model = model
        return reducer

    def train(self, made: Any, **step: Any) -> None:
        loss = self.model(NUMBERS).square().mean()
        made.prepare_for_backward(loss, **step)
        loss.backward()
        if made.state is LAUNCHED:
            made.finalize_backward()
        made.finalize()
        check_gradients(self.model, made.config, **step)

    def state(self, made: Any) -> object:
        return made.config, made.has_comm_hook, made.state, made.caps


def beside_another(door: Door, made: Any, stack: ExitStack) -> None:
    """Takes a step while another reducer has the same parameters."""
    assert isinstance(door, ReducerDoor)
    with Reducer(made.parameters, fusedreduce.ProcessGroupCommunicator(), exclusive=False):
        door.train(made)


REDUCER = ReducerDoor(
    (
        *WIRES,
        FUNCTION,
        *OF_CODES,
        *MODES,
        *OTHERS,
        SPARSE,
        *CHANGES,
        HOOKED,
        TRACED,
        RESIZED,
        argument(VIEWS, "gradient_as_bucket_view"),
        argument(
            SKIPS, "skip_unused_buckets", lambda model: {"skip_unused_buckets": True, "find_unused_parameters": True}
        ),
        argument(None, "static_graph"),
        called("join", ["join"], lambda door, made, stack: made.step_without_inputs(), lasts=False),
        called(
            "divisor", ["divisor="], lambda door, made, stack: door.train(made, divisor=2.0), lasts=False, steps=True
        ),
        called("two reducers", ["parameters of two wrappers"], beside_another, lasts=False, steps=True),
        called(
            "optimizer in backward",
            ["an optimizer in backward"],
            lambda door, made, stack: made.leave_gradients_to_hook(),
        ),
        called(
            "manual finalization",
            ["manual backward finalization"],
            lambda door, made, stack: made.require_manual_finalization(True),
        ),
    )
)


class WrapperDoor(Door):
    """A DistributedDataParallel of one rank: our own class."""

    def make(self, model: nn.Module, config: ReduceConfig, arguments: Mapping[str, Any], stack: ExitStack) -> Any:
        return fusedreduce.DistributedDataParallel(model, reduce=config, **arguments)

    def train(self, made: Any, **step: Any) -> None:
        made(NUMBERS).square().mean().backward()
        if getattr(made, "require_manual_backward_finalization", False):
            made.finalize_backward()
        check_gradients(made.module, reducer_of(made).config)

    def state(self, made: Any) -> object:
        reducer = reducer_of(made)
        return reducer.config, reducer.has_comm_hook, reducer.state, reducer.caps, reducer


class InstalledDoor(WrapperDoor):
    """torch's own class, under fusedreduce.install()."""

    def make(self, model: nn.Module, config: ReduceConfig, arguments: Mapping[str, Any], stack: ExitStack) -> Any:
        stack.callback(fusedreduce.uninstall)
        fusedreduce.install(config)
        return TorchDDP(model, **arguments)


def in_backward(model: nn.Module) -> Mapping[str, Any]:
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    return {}


def manual(door: Door, made: Any, stack: ExitStack) -> None:
    made.require_manual_backward_finalization = True


OF_WRAPPERS = (
    option("staleness on bf16", [LATE, OTHER_WIRE], wire="bf16", sync_mode=BoundedStaleness(1)),
    BF16,
    FP16,
    INT8,
    INT4_BY_PATTERN,
    SEVERAL,
    *MODES,
    *OTHERS,
    SPARSE,
    HOOKED,
    argument(VIEWS, "gradient_as_bucket_view"),
    argument(
        SKIPS,
        "skip_all_reduce_unused_params",
        lambda model: {"skip_all_reduce_unused_params": True, "find_unused_parameters": True},
    ),
    argument(
        "delay_all_reduce_named_params",
        "delay_all_reduce_named_params",
        lambda model: {
            "delay_all_reduce_named_params": [("last.bias", model.last.bias)],
            "param_to_hook_all_reduce": model.last.weight,
            "bucket_cap_mb": 1,
        },
        trains=False,  # torch's own buffer
    ),
    called("join", ["join"], lambda door, made, stack: made.join(), lasts=False),
)
LATE_ONLY = (
    argument(
        "mixed_precision",
        "mixed_precision",
        lambda model: {"mixed_precision": _MixedPrecision(param_dtype=torch.bfloat16)},
        trains=False,  # streams of CUDA
        beside=LATE,
    ),
    argument("an optimizer in backward", "optimizer in backward", in_backward, trains=False, beside=LATE),
)
WRAPPER = WrapperDoor(
    (
        *OF_WRAPPERS,
        *LATE_ONLY,
        *CHANGES,
        TRACED,
        RESIZED,
        called("manual finalization", ["manual backward finalization"], manual),
        called(
            "fused optimizer",
            ["an optimizer in backward", "a comm hook"],
            lambda door, made, stack: made._register_fused_optim(torch.optim.SGD, lr=0.1),
            trains=False,
        ),
    )
)
INSTALLED = InstalledDoor(
    (*OF_WRAPPERS, *LATE_ONLY), replaced=[OTHER_WIRE, ENCODED, "wire= by parameter", "wire='fp16'", "op='sum'"]
)


class DataParallelDoor(Door):
    """A DataParallel of two replicas."""

    def make(self, model: nn.Module, config: ReduceConfig, arguments: Mapping[str, Any], stack: ExitStack) -> Any:
        made = DataParallel(model, ["cpu", "cpu"], reduce=config, **arguments)
        stack.callback(made.close)
        return made

    def train(self, made: Any, **step: Any) -> None:
        made(NUMBERS).square().mean().backward()
        check_gradients(made.module, made.reduce_config)

    def state(self, made: Any) -> object:
        return made.reduce_config


DATA_PARALLEL = DataParallelDoor(
    tuple(
        dataclasses.replace(one, has=one.has | {"DataParallel"})
        for one in (
            *WIRES,
            *MODES,
            *(one for one in OTHERS if one.name != "sum"),
            SPARSE,
            *CHANGES,
            argument("threads=False", "threads", lambda model: {"threads": False}),
        )
    )
)


class ServerDoor(Door):
    """A SyncServer."""

    def make(self, model: nn.Module, config: ReduceConfig, arguments: Mapping[str, Any], stack: ExitStack) -> Any:
        return stack.enter_context(SyncServer(2, config=config))

    def state(self, made: Any) -> object:
        return made.config


def with_server(way: Way) -> Way:
    return dataclasses.replace(way, has=way.has | {"SyncServer"})


SERVER = ServerDoor(
    (
        *(with_server(one) for one in (*MODES, *OTHERS, *WIRES)),
        option("plan", ["plan="], plan="{}"),
        RESIZED,
    )
)
SETTINGS = Door(
    (
        option(
            "stochastic_rounding on int8",
            [OTHER_WIRE, ENCODED, "stochastic_rounding=True"],
            wire="int8",
            stochastic_rounding=True,
        ),
        *WIRES,
        *OF_CODES,
        *MODES,
        *OTHERS,
        option("two levels", ["ranks_per_node= above 1"], ranks_per_node=2),
        option("plan", ["plan="], plan="{}"),
    ),
    # A reducer's, in whose place install(fallback=True) takes torch's.
    looks_not=[ASYNCHRONOUS],
)
DOORS: dict[str, Door] = {
    "settings": SETTINGS,
    "reducer": REDUCER,
    "wrapper": WRAPPER,
    "installed": INSTALLED,
    "data parallel": DATA_PARALLEL,
    "server": SERVER,
}


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(
    ("door", "way"),
    [(name, way) for name, door in DOORS.items() for way in door.ways],
    ids=lambda value: str(value).replace(" ", "-"),
)
def test_what_the_table_excludes_is_refused_and_all_else_trains(door: str, way: Way) -> None:
    for first, second in tried(DOORS[door], way):
        try:
            combine(DOORS[door], first, second)
        except BaseException as error:
            error.add_note(f"{door}: {first} and {second}")
            raise


def test_every_pair_is_alone_in_the_way_at_some_door() -> None:
    elsewhere = ("fusedreduce run", "set_fsdp_comms")  # below, and parallel/test_fsdp.py
    alone = set(OF_FUSED_HOOK) | {pair for pair in EXCLUSIONS if pair.other in elsewhere}
    for door in DOORS.values():
        for first, second in (pair for way in door.ways for pair in tried(door, way)):
            in_the_way = [pairs for _, features in door.moments(first, second) if (pairs := excluded(features))]
            if in_the_way and len(in_the_way[0]) == 1:
                alone.update(in_the_way[0])
    assert alone == set(EXCLUSIONS), "a door is missing above"


OF_FUSED_HOOK = [pair for pair in EXCLUSIONS if pair.other.startswith("fused_hook")]
EXCHANGED: tuple[dict[str, Any], ...] = ({"wire": "int8"}, {"wire": "int4"}, {"wire": "bf16", "accumulation": "fp32"})


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("door", ["reducer", "wrapper", "installed"])
def test_a_fused_hook_with_an_exchanged_wire_is_refused(door: str) -> None:
    """The installed wire gives way to none that is refused."""
    config = ReduceConfig(wire="bf16" if door == "installed" else "native")
    for options in EXCHANGED:
        with ExitStack() as stack, group_of_one():
            made = DOORS[door].make(Model(), config, {}, stack)
            before = DOORS[door].state(made)
            with pytest.raises(ValueError, match="exclude each other") as refused:
                made.register_comm_hook(FusedHookState(**options), fused_hook)
            check_told(refused.value, OF_FUSED_HOOK)
            assert DOORS[door].state(made) == before
            DOORS[door].train(made)


def test_a_fused_hook_has_one_wire() -> None:
    for wire in ({"*": "int8"}, by_function, "auto", ("native", "int8")):
        with pytest.raises(ValueError, match="exclude each other") as refused:
            FusedHookState(wire=wire)  # type: ignore[arg-type]
        check_told(refused.value, OF_FUSED_HOOK)


def test_the_command_leaves_out_what_the_table_says() -> None:
    values = {"op": "mean", "grad_stats": "0", "sync_mode": "Synchronous()"}
    assert command.LEFT_OUT.keys() == values.keys()
    for name, value in values.items():
        (pair,) = (one for one in EXCLUSIONS if one.other == "fusedreduce run" and one.one.startswith(f"{name}="))
        with pytest.raises(ValueError, match=re.escape(f"is no option of this command: {pair.reason}")):
            command.read({command.variable(name): value})


def test_several_refusals_are_one_line() -> None:
    with pytest.raises(ValueError, match="exclude each other") as refused:
        ReduceConfig(error_feedback=True, wire_after=3)
    assert "\n" not in str(refused.value)
    assert [part.split(" ")[0] for part in str(refused.value).split("; ")] == ["wire_after=3", "error_feedback=True"]


# The table and its page


def test_the_table_names_every_feature_and_no_pair_twice() -> None:
    pairs = [frozenset({pair.one, pair.other}) for pair in EXCLUSIONS]
    assert len(set(pairs)) == len(pairs) and all(len(pair) == 2 for pair in pairs)
    assert set[str]().union(*pairs) == set(typing.get_args(Feature)), "a feature that excludes none"
    for pair in EXCLUSIONS:
        assert pair.reason[0].islower() and pair.reason[-1] != "." and pair.instead[0].isupper()
        assert pair.instead[-1] != "." and "; " not in pair.reason + pair.instead


def rows() -> str:
    """The table of the page."""

    def code(text: str) -> str:
        """With what is written in a program as code."""
        return re.sub(r"[^\s,]*[=(_][^\s,]*|'\w+'", r"`\g<0>`", text)

    lines = [
        f"| {code(pair.one)} | {code(pair.other)} | {code(pair.reason)} | {code(pair.instead)} |" for pair in EXCLUSIONS
    ]
    return "\n".join(["| this | and this | since | so |", "|---|---|---|---|", *lines])


BEGIN, END = "<!-- begin exclusions: written by tests/test_exclusions.py -->\n\n", "\n\n<!-- end exclusions -->"


def page() -> str:
    """The page with the table as it is."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return f"{before}{BEGIN}{rows()}{END}{rest.partition(END)[2]}"


def test_the_page_is_the_table() -> None:
    assert PAGE.read_text() == page(), "run python tests/test_exclusions.py"


if __name__ == "__main__":
    PAGE.write_text(page())
