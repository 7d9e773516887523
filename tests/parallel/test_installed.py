"""install, uninstall: what torch's class makes, what the command tells of it, and what comm hooks do to its wire."""

from __future__ import annotations

import functools
import gc
import inspect
import io
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.ddp_subclasses import is_torchs, replacing
from support.inside import inside
from support.leaf_steps import clear, leaves, step
from support.loopback import Loopback
from support.ranks import group_of_one
from torch import nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.parallel.distributed import _MixedPrecision

import fusedreduce
from fusedreduce import ReduceConfig, Reducer, reducer_of
from fusedreduce.parallel import ddp_arguments, install
from fusedreduce.reducer.plans import Forecast
from fusedreduce.run import options, process

TORCH_INIT, TORCH_SIGNATURE = inspect.unwrap(DDP.__init__), inspect.signature(DDP)
BF16 = ReduceConfig(wire="bf16")
UNTIMED = "no step time: 0 steps were timed behind the first 32, and 16 are needed"


@pytest.fixture(autouse=True)
def group(path: str) -> Iterator[None]:
    with group_of_one():
        yield
    fusedreduce.uninstall()


def half_hook(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """What fp16_compress_hook does, on one rank: the fake backend's collectives have no results."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer().half().float())
    return future


half_hook.__annotations__.clear()  # torch takes GradBucket or nothing, and these are text


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def gradients(wrapper: nn.Module, steps: int = 3) -> list[torch.Tensor]:
    for _ in range(steps):
        wrapper.zero_grad()
        wrapper(torch.full((2, 4), 1 / 3)).sum().backward()
    return [parameter.grad.clone() for parameter in wrapper.parameters() if parameter.grad is not None]


def assert_equal(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert len(got) == len(wanted) and all(map(torch.equal, got, wanted))


def test_torchs_class_makes_ours_until_uninstalled() -> None:
    plain, wanted = DDP(model()), gradients(fusedreduce.DistributedDataParallel(model(), reduce=BF16))
    fusedreduce.install(BF16)
    made = DDP(model(), gradient_as_bucket_view=False)
    assert type(made) is DDP and reducer_of(made).config == BF16
    assert_equal(gradients(made), wanted)
    assert inspect.signature(DDP) == TORCH_SIGNATURE
    assert inspect.signature(DDP.__init__) == inspect.signature(TORCH_INIT)
    fusedreduce.install(ReduceConfig(wire="fp16"))
    assert reducer_of(DDP(model())).config.wire == "fp16"
    chosen = fusedreduce.DistributedDataParallel(model(), reduce=ReduceConfig(policy="static"))
    assert chosen.reduce_config == ReduceConfig(policy="static"), "what names ours says how"
    fusedreduce.uninstall()
    fusedreduce.uninstall()
    assert is_torchs(DDP(model())) and is_torchs(plain)
    assert_equal(gradients(made), wanted)


@pytest.mark.parametrize("wrong", [{"wire": "bf16"}, "bf16", 3])
def test_a_config_of_another_type_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"fusedreduce\.ReduceConfig"):
        fusedreduce.install(wrong)
    with pytest.raises(TypeError, match="fallback"):
        fusedreduce.install(fallback=wrong)
    assert is_torchs(DDP(model()))


def test_another_librarys_wrapper_of_the_constructor_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    fusedreduce.install(BF16)
    ours = DDP.__init__

    @functools.wraps(ours)
    def theirs(self: DDP, *args: Any, **kwargs: Any) -> None:
        ours(self, *args, **kwargs)

    monkeypatch.setattr(DDP, "__init__", theirs)
    assert reducer_of(DDP(model())).config == BF16
    fusedreduce.uninstall()
    assert DDP.__init__ is theirs and is_torchs(DDP(model()))
    fusedreduce.install(ReduceConfig(wire="fp16"))
    assert reducer_of(DDP(model())).config.wire == "fp16"


def test_what_another_library_does_in_the_constructor_is_done_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fusedreduce.install()
    ours = DDP.__init__

    @functools.wraps(ours)
    def theirs(self: DDP, *args: Any, **kwargs: Any) -> None:
        ours(self, *args, **kwargs)
        self.register_comm_hook(None, half_hook)  # torch, and we, take one

    monkeypatch.setattr(DDP, "__init__", theirs)
    made = DDP(model())
    assert reducer_of(made).has_comm_hook and len(made._comm_hooks) == 1


@pytest.mark.parametrize(
    "config",
    [
        BF16,
        ReduceConfig(wire="bf16", op="sum"),
        ReduceConfig(wire="int8", stochastic_rounding=True, error_feedback=True),
        ReduceConfig(),
    ],
)
@pytest.mark.parametrize("when", ["at once", "after steps", "static graph", "static graph, after steps"])
def test_the_wire_gives_way_to_a_comm_hook(config: ReduceConfig, when: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fusedreduce.parallel.install")
    static = when.startswith("static graph")
    hooked = DDP(model(), static_graph=static)
    hooked.register_comm_hook(None, half_hook)
    wanted = gradients(hooked)
    fusedreduce.install(config)
    made = DDP(model(), static_graph=static)
    if when.endswith("after steps"):
        gradients(made)
    made.register_comm_hook(None, half_hook)
    assert reducer_of(made).config == ReduceConfig()
    assert_equal(gradients(made), wanted)
    dropped = {"bf16mean": "wire='bf16'", "bf16sum": "wire='bf16' and op='sum'", "int8mean": "wire='int8'"}.get(
        config.wire_text + config.op
    )
    assert [f"replaces {dropped}" in one.message for one in caplog.records] == [True] * bool(dropped)
    with pytest.raises(RuntimeError, match="only be called once"):
        made.register_comm_hook(None, half_hook)


def test_a_hook_between_forward_and_backward_is_refused() -> None:
    fusedreduce.install(BF16)
    made = DDP(model())
    loss = made(torch.ones(2, 4)).sum()
    with pytest.raises(RuntimeError, match="a forward waits for its backward"):
        made.register_comm_hook(None, default_hooks.allreduce_hook)
    loss.backward()
    assert reducer_of(made).config == BF16
    with pytest.raises(TypeError, match="callable"):
        made.register_comm_hook(None, None)  # type: ignore[arg-type]
    assert reducer_of(made).config == BF16
    reducer_of(made).set_bucket_size(64)
    made.register_comm_hook(None, default_hooks.allreduce_hook)
    assert reducer_of(made).config.wire == "native" and reducer_of(made).caps == fusedreduce.BucketCaps.of(64)


def test_mixed_precision_has_its_own_hook() -> None:
    fusedreduce.install(BF16)
    made = DDP(model(), mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
    assert reducer_of(made).config.wire == "native"


def test_a_wire_that_the_backend_cannot_sum_falls_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = []

    def check_wire(_: object, dtype: torch.dtype, device: torch.device) -> None:
        asked.append(dtype)
        if dtype is torch.bfloat16:
            raise fusedreduce.UnsupportedWireError("no bfloat16 here")

    monkeypatch.setattr("fusedreduce.comm.process_group.ProcessGroupCommunicator.check_wire", check_wire)
    fusedreduce.install(BF16, fallback=True)
    assert is_torchs(DDP(model())) and asked == [torch.bfloat16]
    assert "no bfloat16 here" in caplog.records[0].message
    fusedreduce.install(fallback=True)
    assert reducer_of(DDP(model().double())) and asked[1:] == [torch.float64]


def test_where_nothing_can_be_encoded_it_falls_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("fusedreduce.kernels.encoded.refusal", lambda _: "there is no C compiler")
    fusedreduce.install(ReduceConfig(wire="int8"))
    with pytest.raises(fusedreduce.FusedReduceError, match="cannot encode gradients: there is no C compiler"):
        DDP(nn.Linear(64, 64))
    fusedreduce.install(ReduceConfig(wire="int8"), fallback=True)
    assert is_torchs(DDP(nn.Linear(64, 64)))
    assert "there is no C compiler" in caplog.records[0].message


@pytest.mark.parametrize("why", ["cap", "mode", "plan", "asynchronous"])
def test_what_ours_refuses_is_an_error_or_torchs(why: str, caplog: pytest.LogCaptureFixture) -> None:
    arguments: dict[str, Any] = {}
    config, says = BF16, "bucket_cap_mb"
    if why == "cap":
        arguments = {"bucket_cap_mb": -1}
    elif why == "mode":
        config, says = ReduceConfig(sync_mode=fusedreduce.BoundedStaleness(1)), "gradient_as_bucket_view"
        arguments = {"gradient_as_bucket_view": True}
    elif why == "plan":
        config, says = ReduceConfig(plan="{}"), "plan"
    else:
        config, says = ReduceConfig(wire="fp16", sync_mode=fusedreduce.Asynchronous()), "exclude each other"
    fusedreduce.install(config)
    with pytest.raises(ValueError, match=says):
        DDP(model(), **arguments)
    fusedreduce.install(config, fallback=True)
    made = DDP(model(), **arguments)
    assert is_torchs(made)
    assert len(caplog.records) == 1 and says in caplog.records[0].message
    assert "torch's own reducer is used" in caplog.records[0].message


def test_what_torch_refuses_too_is_torchs_to_tell() -> None:
    fusedreduce.install(BF16, fallback=True)
    with pytest.raises(RuntimeError, match="doesn't have any parameter that requires a gradient"):
        DDP(nn.ReLU())
    with pytest.raises(TypeError, match="module"):
        DDP()  # type: ignore[call-arg]


def told(capsys: pytest.CaptureFixture[str], *, quiet: bool = False) -> process.PrintingInstallation:
    """As the command installs it."""
    asked = options.Options(BF16, fallback=False, quiet=quiet)
    installation = process.PrintingInstallation(asked)
    install.activate(installation)
    capsys.readouterr()
    return installation


@pytest.mark.parametrize(("says", "wire"), [("nothing", "bf16"), ("install", "fp16"), ("uninstall", None)])
def test_what_the_program_says_counts_in_place_of_the_command(
    monkeypatch: pytest.MonkeyPatch, says: str, wire: str | None
) -> None:
    monkeypatch.setattr(process, "_begun", False)
    monkeypatch.setattr(install, "_decided", False)
    monkeypatch.setenv("FUSEDREDUCE_WIRE", "bf16")

    def placed(self: DDP, *args: Any, **kwargs: Any) -> None:  # by site/sitecustomize.py
        process.method_for("__init__", TORCH_INIT)(self, *args, **kwargs)

    monkeypatch.setattr(DDP, "__init__", placed)
    if says == "install":
        fusedreduce.install(ReduceConfig(wire="fp16"))
    elif says == "uninstall":
        fusedreduce.uninstall()
    made = DDP(model())
    assert is_torchs(made) if wire is None else reducer_of(made).config.wire == wire
    fusedreduce.uninstall()
    assert is_torchs(DDP(model()))


def test_rank_0_tells_what_it_wraps_and_what_came_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    installation = told(capsys)
    first, second = DDP(model()), DDP(model(), find_unused_parameters=True)
    assert capsys.readouterr().err == (
        "fusedreduce: Sequential on 1 rank: wire bf16, policy planned, nothing is sent, though gradients are rounded "
        "to bf16\n"
    )
    gradients(first, 2)
    alive = weakref.ref(first)
    del first
    gc.collect()
    assert alive() is None, "telling keeps no wrapper alive"
    gradients(second, 3)
    second.register_comm_hook(None, half_hook)
    gradients(second, 4)
    assert "the script's comm hook half_hook replaces wire='bf16'" in capsys.readouterr().err
    installation.at_end()
    assert (
        capsys.readouterr().err == f"fusedreduce: 9 steps of 3 reducers; {UNTIMED}; a comm hook decided what was sent\n"
    )
    installation.at_end()
    assert capsys.readouterr().err == "", "once"


def test_a_hook_of_the_constructors_own_is_counted_once(capsys: pytest.CaptureFixture[str]) -> None:
    installation = told(capsys)
    made = DDP(model(), mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
    inside(made).pretend_steps(2)  # torch's mixed precision runs on devices that have events
    dropped, first = capsys.readouterr().err.splitlines()
    assert "replaces wire='bf16'" in dropped and "wire native" in first
    installation.at_end()
    assert capsys.readouterr().err == f"fusedreduce: 2 steps; {UNTIMED}; a comm hook decided what was sent\n"


def test_where_torch_reduces_all_there_is_nothing_to_tell(capsys: pytest.CaptureFixture[str]) -> None:
    installation = told(capsys)
    module = model()
    module.register_parameter("frozen", nn.Parameter(torch.ones(1), requires_grad=False))  # torch wants one
    made = DDP(
        module,
        delay_all_reduce_named_params=[one for one in module.named_parameters() if one[1].requires_grad],
        param_to_hook_all_reduce=module.get_parameter("0.weight"),
    )
    assert not hasattr(made, "reducer")
    with pytest.raises(TypeError, match="delay_all_reduce_named_params"):
        reducer_of(made)
    installation.at_end()
    assert capsys.readouterr().err == ""


def test_quiet_leaves_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    installation = told(capsys, quiet=True)
    gradients(DDP(model()))
    replacing("register_comm_hook", seen=True)(model())
    installation.at_end()
    assert capsys.readouterr().err.count("\n") == 1


def test_nothing_is_raised_where_nobody_reads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installation = told(capsys)
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr("sys.stderr", closed)
    gradients(DDP(model()))
    installation.at_end()
    monkeypatch.setattr("sys.stderr", None)
    installation.warn("x")


def test_steps_before_encoding_count_as_what_they_sent() -> None:
    reducer = Reducer(leaves([(64, 64)]), Loopback([torch.clone]), ReduceConfig(wire="int8", wire_after=2))
    first = (
        "M on 2 ranks: wire int8, policy planned, 4.16 kB of gradients a step instead of 16.38 kB, the first 2 at bf16"
    )
    assert process.first_line("M", reducer) == first
    for expected in (8_192, 16_384, 16_384 + 4_160):
        step(reducer, [torch.ones(64, 64)])
        clear(reducer.parameters)
        assert process.sent_bytes(reducer) == expected


def test_the_last_line() -> None:
    timed = process.Timed(33, [7_000_000] * 67)
    ended = process.Ended(100, 8, 4_000_000, 200_000_000, Forecast(80.0, 100.0, 90.0), timed)
    assert process.last_line([ended]) == (
        "100 steps; median step 7.00 ms (steps 33 to 99); 200.00 MB of gradients sent instead of 400.00 MB (50% less); "
        "20% of backward and reduction exposed, by the planner's model; by that model torch's own class may be up to "
        "10.0 ms a step faster here"
    )
    native = ended._replace(sent_bytes=400_000_000, forecast=Forecast(80.0, 100.0, 120.0))
    assert process.last_line([native]) == (
        "100 steps; median step 7.00 ms (steps 33 to 99); 400.00 MB of gradients sent, in their own dtype; 20% of "
        "backward and reduction exposed, by the planner's model"
    )
    alone = ended._replace(steps=1, ranks=1, forecast=None, timed=process.Timed(33, []))
    assert process.last_line([alone]) == f"1 step; {UNTIMED}"


def test_with_fallback_too_a_failure_says_that_a_rank_may_have_torchs_own_class(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whose first collective is another one, by which either of the two processes may end first."""

    def gone(*_: object) -> str:
        raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(ddp_arguments, "problems_of_ranks", gone)
    fusedreduce.install(BF16, fallback=True)
    with pytest.raises(
        fusedreduce.CollectiveError, match="torch's own class: start .*-m fusedreduce.run.*reset by peer"
    ):
        DDP(nn.Linear(3, 2))
