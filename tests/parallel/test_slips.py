"""The likeliest slips: each message says what came, what was expected, and a line to write, which is tried."""

from __future__ import annotations

import ast
import copy
import dataclasses
import functools
import inspect
import json
import os
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fusedreduce
from fusedreduce import (
    AgreementError,
    Asynchronous,
    DataParallel,
    DistributedDataParallel,
    FusedHookState,
    LocalGroup,
    ProcessGroupCommunicator,
    ReduceConfig,
    Reducer,
    SyncServer,
    fused_hook,
)
from fusedreduce.comm.local.group import LocalCommunicator
from fusedreduce.parallel import ddp, ddp_arguments
from fusedreduce.planning import plan_file

pytestmark = [
    pytest.mark.usefixtures("path"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # broadcast_buffers has a newer name
]
BF16 = ReduceConfig(wire="bf16")
WIRES = ReduceConfig(wire={"*.bias": "native", "*": "int8"}, wire_after=2)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))


def step(wrapped: nn.Module) -> None:
    wrapped(torch.ones(4, 7)).square().sum().backward()


def to_write(message: str) -> str:
    """The line at the end of a message."""
    return message.rpartition(": write ")[2]


@pytest.fixture
def installed() -> Iterator[None]:
    fusedreduce.install()
    yield
    fusedreduce.uninstall()


# The wrapper


@pytest.mark.parametrize("create", [DistributedDataParallel, fusedreduce.create_distributed_data_parallel])
@pytest.mark.parametrize(
    "given",
    [
        {"wire": "bf16"},
        {"wire": "int8", "wire_after": 2, "error_feedback": True},
        {"sync_mode": Asynchronous()},
        {"overlap": False},
        {"config": BF16},
        {"reduction": WIRES, "bucket_cap_mb": 1},
    ],
    ids=str,
)
def test_options_given_to_the_wrapper(alone: None, create: Callable[..., nn.Module], given: dict[str, Any]) -> None:
    with pytest.raises(TypeError) as raised:
        create(model(), **given)
    with pytest.raises(TypeError) as theirs:
        TorchDDP(model(), **given)
    assert str(raised.value).startswith(str(theirs.value))
    line = to_write(str(raised.value))
    wrapped: Any = eval(f"create(model(), {line})", {**globals(), "create": create})
    [config] = [one for one in given.values() if isinstance(one, ReduceConfig)] or [ReduceConfig(**given)]
    assert line.startswith("reduce=ReduceConfig(") and wrapped.reduce_config == config
    step(wrapped)


@pytest.mark.parametrize("position", [1, 3, 6, "process_group", "mixed_precision"])
@pytest.mark.parametrize("config", [ReduceConfig(), BF16, WIRES], ids=str)
def test_a_config_in_the_place_of_an_argument_of_torchs(alone: None, position: int | str, config: ReduceConfig) -> None:
    place = (
        position if isinstance(position, str) else list(inspect.signature(TorchDDP.__init__).parameters)[position + 1]
    )
    arguments: Any = ([None] * (position - 1) + [config], {}) if isinstance(position, int) else ([], {position: config})
    with pytest.raises(
        TypeError, match=f"^{place} is an argument of torch's .* got {re.escape(repr(config))}"
    ) as raised:
        DistributedDataParallel(model(), *arguments[0], **arguments[1])
    wrapped: Any = eval(to_write(str(raised.value)), {**globals(), "module": model()})
    assert wrapped.reduce_config == config


@pytest.mark.parametrize("given", [{"wire": "bf16"}, {"device_ids": BF16}, {"process_group": BF16}], ids=str)
def test_torchs_own_class_when_it_is_installed_says_so_too(alone: None, installed: None, given: dict[str, Any]) -> None:
    with pytest.raises(TypeError) as ours:
        DistributedDataParallel(model(), **given)
    with pytest.raises(TypeError, match="fusedreduce.DistributedDataParallel") as raised:
        TorchDDP(model(), **given)
    assert str(raised.value) == str(ours.value)


@pytest.mark.parametrize("what", [model().parameters(), nn.Linear, BF16, None], ids=lambda what: type(what).__name__)
def test_something_else_than_the_model(alone: None, what: Any) -> None:
    with pytest.raises(TypeError, match="takes an nn.Module, got|module is an argument"):
        DistributedDataParallel(what)


def test_a_device_that_is_not_in_a_list(alone: None) -> None:
    for device in (0, torch.device("cuda", 0)):
        with pytest.raises(TypeError, match="must be a list of one device or None, got") as raised:
            DistributedDataParallel(model(), device)  # type: ignore[arg-type]
        assert to_write(str(raised.value)) == f"[{device!r}]"


@pytest.mark.parametrize("what", ["25", b"25", [25], (25,), "a lot"], ids=repr)
def test_a_bucket_cap_that_is_no_number(alone: None, what: Any) -> None:
    with pytest.raises(TypeError, match=rf"^bucket_cap_mb must be .*, got {re.escape(repr(what))}") as raised:
        DistributedDataParallel(model(), bucket_cap_mb=what)
    step(eval(f"DistributedDataParallel(model(), {to_write(str(raised.value))})"))
    if "bucket_cap_mb_list" not in inspect.signature(TorchDDP.__init__).parameters:
        return
    for listed in (25, "25", [what], [1, what]):
        with pytest.raises(TypeError, match="bucket_cap_mb_list must be") as raised:
            DistributedDataParallel(model(), bucket_cap_mb_list=listed)  # type: ignore[arg-type]
        step(eval(f"DistributedDataParallel(model(), {to_write(str(raised.value))})"))


@pytest.mark.parametrize("what", [-1, -1e-9, float("nan"), float("inf"), 1e308])
def test_a_bucket_cap_that_is_no_size(alone: None, what: float) -> None:
    with pytest.raises(ValueError, match="^bucket_cap_mb must be a number of MiB, 0 or more, got"):
        DistributedDataParallel(model(), bucket_cap_mb=what)


def test_a_bucket_cap_of_one_rank_is_raised_by_all() -> None:
    def case(communicator: LocalCommunicator) -> str:
        cap: Any = ("25", 25)[communicator.rank]
        try:
            DistributedDataParallel(model(), bucket_cap_mb=cap, process_group=communicator.process_group())
        except AgreementError as error:
            return str(error)
        return "nothing was raised"

    with LocalGroup(2, timeout_s=60.5) as group:
        found = group.run(case)
    assert found[0] == found[1] and "rank 0: bucket_cap_mb must be a number of MiB, got '25'" in found[0]


@pytest.mark.parametrize("options", [{}, {"init_sync": False}, {"reduce": BF16}], ids=str)
def test_the_wrapper_before_init_process_group(options: dict[str, Any]) -> None:
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="Default process group") as theirs:
        TorchDDP(model())
    for make in (lambda: DistributedDataParallel(model(), **options), ProcessGroupCommunicator):
        with pytest.raises(ValueError, match=f"^{theirs.value} .*torchrun.*write fusedreduce.init_process_group()"):
            make()


# Options in other places


@pytest.mark.parametrize(
    ("given", "options", "line"),
    [
        (("int8",), {}, "ReduceConfig(wire='int8')"),
        (("int9", 3), {"wire_after": 3}, "ReduceConfig(wire='bf16')"),
        (({"wire": "int4", "wire_after": 3},), {}, "ReduceConfig(wire='int4', wire_after=3)"),
        ((), {"bucket_cap_mb": 25}, "DistributedDataParallel(module, bucket_cap_mb=25, reduce=ReduceConfig())"),
        (
            (),
            {"wire": "bf16", "static_graph": True},
            "DistributedDataParallel(module, static_graph=True, reduce=ReduceConfig(wire='bf16'))",
        ),
    ],
    ids=str,
)
def test_arguments_that_a_config_does_not_take(
    alone: None, given: tuple[object, ...], options: dict[str, Any], line: str
) -> None:
    make: Any = ReduceConfig
    with pytest.raises(TypeError, match="takes options by name, got|is an argument of Distrib") as raised:
        make(*given, **options)
    assert to_write(str(raised.value)) == line
    eval(line, {**globals(), "module": model()})


def test_a_config_is_made_as_a_dataclass_is() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        ReduceConfig(colour=1)  # type: ignore[call-arg]
    assert [*inspect.signature(ReduceConfig).parameters] == [one.name for one in dataclasses.fields(ReduceConfig)]
    assert dataclasses.replace(BF16, wire="fp16") == copy.copy(pickle.loads(pickle.dumps(ReduceConfig(wire="fp16"))))


@pytest.mark.parametrize("name", ["replan_every", "least_sqnr_db", "wire_after", "seed", "stall_report_s"])
def test_a_string_in_the_place_of_a_number(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must be .*(whole|finite|positive) number.* got the string '100'$"):
        ReduceConfig(wire="int8", **{name: "100"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("bf16", "ReduceConfig(wire='bf16')"),
        ("int8", "ReduceConfig(wire='int8')"),
        ({"wire": "int8", "wire_after": 3}, "ReduceConfig(wire='int8', wire_after=3)"),
        (ReduceConfig, "ReduceConfig(wire='bf16')"),
        (FusedHookState(wire="fp16"), "ReduceConfig(wire='fp16')"),
        (Asynchronous(), "ReduceConfig(sync_mode=Asynchronous(max_in_flight=2))"),
        ({"colour": 1}, "ReduceConfig(wire='bf16')"),
        (7, "ReduceConfig(wire='bf16')"),
    ],
    ids=["wire", "other wire", "options", "class", "state of the hook", "mode", "unknown options", "number"],
)
def test_something_else_than_a_config(alone: None, given: Any, line: str) -> None:
    communicator = ProcessGroupCommunicator()
    doors: dict[Callable[[], object], str] = {
        lambda: DistributedDataParallel(model(), reduce=given): "reduce",
        lambda: DataParallel(model(), ["cpu"], reduce=given): "reduce",
        lambda: Reducer(model().parameters(), communicator, given): "config",
        lambda: SyncServer(2, config=given): "config",
        lambda: fusedreduce.install(given): "config",
    }
    assert isinstance(eval(line), ReduceConfig)
    for door, name in doors.items():
        with pytest.raises(TypeError, match=f"^{name} must be a fusedreduce.ReduceConfig, got ") as raised:
            door()
        assert repr(given) in str(raised.value) and to_write(str(raised.value)) == f"{name}={line}"


def test_a_config_that_is_not_given_by_name(alone: None) -> None:
    places: Any = {
        "devices": lambda: DataParallel(model(), BF16),  # type: ignore[arg-type]
        "communicator": lambda: Reducer(model().parameters(), BF16),  # type: ignore[arg-type]
        "process_group": lambda: FusedHookState(BF16),  # type: ignore[arg-type]
        "world_size": lambda: SyncServer(BF16),  # type: ignore[arg-type]
    }
    for place, door in places.items():
        with pytest.raises((TypeError, ValueError), match=rf"{place} must be .*ReduceConfig\(wire='bf16'\)"):
            door()


@pytest.mark.parametrize("given", [None, "a process group", "gloo"])
def test_something_else_than_a_communicator(alone: None, given: Any) -> None:
    given = dist.group.WORLD if given == "a process group" else given
    with pytest.raises(TypeError, match="^communicator must be the ranks to average over, got") as raised:
        Reducer(model().parameters(), given)
    parameters, config = model().parameters(), BF16
    reducer: Any = eval(to_write(str(raised.value)), {**globals(), "parameters": parameters, "config": config})
    reducer.close()


@pytest.mark.parametrize("config", [ReduceConfig(), BF16, WIRES, ReduceConfig(link=(1.0, 2.0), op="sum")], ids=str)
def test_a_config_is_shown_as_it_is_written(config: ReduceConfig) -> None:
    assert eval(repr(config)) == config
    assert repr(ReduceConfig()) == "ReduceConfig()" and repr(ReduceConfig(plan="{}")) == "ReduceConfig(plan=...)"


# The hook


STATES: dict[str, tuple[Any, str]] = {
    "None": (None, "FusedHookState(wire='bf16')"),
    "config": (
        ReduceConfig(wire="int8", wire_after=3, ranks_per_node=1),
        "FusedHookState(wire='int8', ranks_per_node=1)",
    ),
    "defaults": (ReduceConfig(), "FusedHookState()"),
    "class": (FusedHookState, "FusedHookState(wire='bf16')"),
    "wire": ("fp16", "FusedHookState(wire='fp16')"),
    "group": ("group", "FusedHookState(process_group, wire='bf16')"),
}


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("kind", ["torch's", "ours", "installed"])
def test_a_wrong_state_of_the_hook(alone: None, kind: str, name: str, request: pytest.FixtureRequest) -> None:
    if kind == "installed":
        request.getfixturevalue("installed")
    state, line = STATES[name]
    state = dist.group.WORLD if state == "group" else state
    wrapped = (DistributedDataParallel if kind == "ours" else TorchDDP)(model())
    if kind == "torch's":  # which calls the hook in backward
        wrapped.register_comm_hook(state, fused_hook)
        meets: Callable[[], None] = functools.partial(step, wrapped)
    else:
        meets = functools.partial(wrapped.register_comm_hook, state, fused_hook)
    with pytest.raises(TypeError, match="^fused_hook takes a FusedHookState as its state, got ") as raised:
        meets()
    assert to_write(str(raised.value)) == f"register_comm_hook(fusedreduce.{line}, fusedreduce.fused_hook)"
    if kind == "torch's":
        wrapped = TorchDDP(model())
    right = eval(line, {**globals(), "process_group": dist.group.WORLD})
    if right.config.wire == "int8":  # exchanged: for torch's own class
        right = FusedHookState()
    wrapped.register_comm_hook(right, fused_hook)
    step(wrapped)


def test_a_hook_that_is_refused_leaves_the_wire_as_it_was(alone: None, installed: None) -> None:
    fusedreduce.install(BF16)
    wrapped = TorchDDP(model())
    with pytest.raises(TypeError, match="^fused_hook takes a FusedHookState"):
        wrapped.register_comm_hook(None, fused_hook)
    assert fusedreduce.reducer_of(wrapped).config == BF16
    step(wrapped)


def test_other_hooks_have_states_of_their_own(alone: None) -> None:
    for state in (None, dist.group.WORLD):
        wrapped = DistributedDataParallel(model())
        wrapped.register_comm_hook(state, debugging_hooks.noop_hook)
        step(wrapped)


# Files of plans


def plan_text(ranks: int = 1) -> str:
    names, numels = zip(*((name, one.numel()) for name, one in model().named_parameters()), strict=True)
    return plan_file.dump(((3, 2), (1,), (0,)), names=names, numels=numels, world_size=ranks, wire="native")


@pytest.mark.parametrize("kind", [str, Path])
def test_a_plan_is_taken_from_a_file_which_is_read_once(
    alone: None, tmp_path: Path, kind: Callable[[Path], Any]
) -> None:
    file = tmp_path / "plan.json"
    file.write_text(plan_text())
    config = ReduceConfig(plan=kind(file))
    assert config == ReduceConfig(plan=plan_text()) and config.to_dict() == ReduceConfig(plan=plan_text()).to_dict()
    file.unlink()
    assert repr(config) == f"ReduceConfig(plan={str(file)!r})"
    for made in (config, copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        wrapped = DistributedDataParallel(model(), reduce=made)
        step(wrapped)
        assert json.loads(wrapped.plan_json())["buckets"] == [[3, 2], [1], [0]]
        with pytest.raises(
            ValueError, match=f"^plan={re.escape(repr(str(file)))}: .*for a model with other parameters"
        ):
            DistributedDataParallel(nn.Linear(2, 2), reduce=made)
        with DataParallel(model(), ["cpu"], reduce=made) as parallel:  # makes a config of its own
            step(parallel)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("a/path.json", "No such file or directory"),
        (".", "Is a directory"),
        ("bytes.json", "codec can't decode"),
        ("", "No such file or directory"),
        ("a\0b", "null"),
        ("long" * 5000, "File name too long"),
    ],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, reason: str) -> None:
    (tmp_path / "bytes.json").write_bytes(b"{\xff}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"plan={re.escape(repr(name)[:50])}.* cannot be read: .*{reason}") as raised:
        ReduceConfig(plan=name)
    assert "that `fusedreduce plan` has written, or the text that plan_json() returns" in str(raised.value)
    assert len(str(raised.value)) < 500


@pytest.mark.parametrize("content", ["", "[]", "{", "{}", "a plan"])
def test_a_file_that_is_no_plan_is_named(alone: None, tmp_path: Path, content: str) -> None:
    file = tmp_path / "plan.json"
    file.write_text(content)
    for door in (
        lambda config: DistributedDataParallel(model(), reduce=config),
        lambda config: Reducer(model().parameters(), ProcessGroupCommunicator(), config),
    ):
        with pytest.raises(ValueError, match=rf"^plan='{file}': this is not a plan"):
            door(ReduceConfig(plan=os.fspath(file)))


@pytest.mark.parametrize("plan", [7, {}, b"plan.json", ["plan.json"]], ids=repr)
def test_something_else_than_a_plan(plan: Any) -> None:
    with pytest.raises(ValueError, match=f"^plan must be the path of a file .*; got {type(plan).__name__}$"):
        ReduceConfig(plan=plan)


# What editors show


def spelled() -> ast.arguments:
    """The arguments that type checkers see of the wrapper."""
    [kind] = [
        node
        for node in ast.parse(inspect.getsource(ddp)).body
        if getattr(node, "name", "") == "DistributedDataParallel"
    ]
    assert isinstance(kind, ast.ClassDef)
    [branch] = [node for node in kind.body if isinstance(node, ast.If)]
    assert ast.unparse(branch.test) == "TYPE_CHECKING"
    [init] = branch.body
    assert isinstance(init, ast.FunctionDef) and init.name == "__init__"
    return init.args


def test_every_argument_of_torchs_is_spelled_with_torchs_default() -> None:
    arguments = spelled()
    torchs = inspect.signature(TorchDDP.__init__).parameters
    by_position = [one.arg for one in arguments.args]
    assert by_position == list(torchs)[: len(by_position)]
    by_name = [one.arg for one in arguments.kwonlyargs]
    assert {*by_position, *by_name} == {"self", "reduce"} | ddp_arguments.KNOWN_ARGUMENTS
    assert set(torchs) <= {*by_position, *by_name}
    given = dict(zip(by_position[-len(arguments.defaults) :], arguments.defaults, strict=True))
    given |= dict(zip(by_name, arguments.kw_defaults, strict=True))  # type: ignore[arg-type]
    shown = {name: ast.literal_eval(value) for name, value in given.items()}
    defaults = {name: one.default for name, one in torchs.items() if one.default is not one.empty}
    if defaults["broadcast_buffers"] is True:  # before torch 2.13, where None means the same
        defaults["broadcast_buffers"] = None
    assert {name: shown[name] for name in defaults} == defaults


def test_help_shows_the_arguments_of_this_torch() -> None:
    shown = inspect.signature(DistributedDataParallel)
    assert list(shown.parameters) == [*inspect.signature(TorchDDP).parameters, "reduce"]
    assert shown.parameters["reduce"].kind is inspect.Parameter.KEYWORD_ONLY
