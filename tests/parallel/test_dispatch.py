"""Torch's class under install: its type stays, subclasses inherit, copies and pickles; and who is left to torch."""

from __future__ import annotations

import copy
import functools
import io
import itertools
import json
import math
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import ddp_subclasses
from support.ddp_subclasses import DISPATCHED, Forwarding, installed_for, is_torchs, replacing
from support.ranks import Program, group_of_one, on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import fusedreduce
from fusedreduce import BucketCaps, ReduceConfig, Synchronous, reducer_of
from fusedreduce.parallel import install

BF16, FP16 = ReduceConfig(wire="bf16"), ReduceConfig(wire="fp16")


@pytest.fixture(autouse=True)
def group(request: pytest.FixtureRequest, path: str) -> Iterator[None]:
    if request.node.get_closest_marker("ranks") is not None:
        yield
        return
    with group_of_one():
        yield
    fusedreduce.uninstall()


def stepped(wrapper: nn.Module) -> list[torch.Tensor]:
    """The gradients of a step, which must have been reduced if the reducer is ours."""
    wrapper.zero_grad()
    wrapper(batches(0)[0]).square().mean().backward()
    return [parameter.grad.clone() for parameter in wrapper.parameters() if parameter.grad is not None]


# torch.compile; whichever test is first waits for what both look at, and so all are marked slow


STEPS = 4


def model() -> nn.Module:
    """With buffers, which ranks change each in its way, and a parameter that not every step uses."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def batches(rank: int, count: int = STEPS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1 + rank)
    return [torch.randn(5, 4, generator=generator) for _ in range(count)]


def trained(wrapper: DDP, rank: int, *, count: int = STEPS, accumulate: bool = False) -> dict[str, torch.Tensor]:
    """The model's state after some steps, on inputs of this rank's own."""
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1, momentum=0.9)
    for inputs in batches(rank, count):
        step: Any = getattr(type(wrapper), "train_step", None)
        if accumulate:
            with wrapper.no_sync():
                wrapper(2 * inputs).square().mean().backward()
            wrapper(inputs).square().mean().backward()
            optimizer.step()
            wrapper.zero_grad()
        elif step is not None:
            step(wrapper, inputs, optimizer)
        else:
            wrapper.zero_grad()
            wrapper(inputs).square().mean().backward()
            optimizer.step()
    return {name: value.clone() for name, value in wrapper.module.state_dict().items()}


def assert_same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert list(got) == list(wanted)
    for name, value in wanted.items():
        assert torch.equal(got[name], value), name


OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0001},
    {"find_unused_parameters": True},
)


@on_ranks(2)
def test_every_class_has_torchs_bits(rank: int, world: int) -> None:
    cases: list[tuple[type[DDP], dict[str, Any]]] = [(DDP, one) for one in OPTIONS]
    cases += zip(ddp_subclasses.REDUCED, itertools.cycle(OPTIONS))
    for kind, options in cases:
        plain = kind(model(), **options)
        with installed_for():
            made = kind(model(), **options)
        assert is_torchs(plain) and type(made) is kind and reducer_of(made).config == ReduceConfig()
        assert_same(trained(made, rank), trained(plain, rank))
        assert reducer_of(made).steps == STEPS
    assert ddp_subclasses.Forwarding.outputs_seen > 0


@on_ranks(2)
def test_accumulation_has_torchs_bits(rank: int, world: int) -> None:
    for kind in (DDP, ddp_subclasses.Forwarding):
        plain = kind(model())
        with installed_for():
            made = kind(model())
        assert_same(trained(made, rank, accumulate=True), trained(plain, rank, accumulate=True))
        assert reducer_of(made).steps == STEPS


@on_ranks(2)
def test_join_has_torchs_bits(rank: int, world: int) -> None:
    """Rank 1 has fewer inputs."""
    found = []
    for installs in (False, True):
        for kind in (DDP, ddp_subclasses.Forwarding):
            for initial in (True, False):
                if installs:
                    fusedreduce.install()
                made = kind(model())
                fusedreduce.uninstall()
                assert is_torchs(made) is not installs
                with made.join(divide_by_initial_world_size=initial):
                    found.append(trained(made, rank, count=STEPS - 2 * rank))
                # What rank 1 has at its end is not what it has when all have joined.
                found[-1] = {name: value.clone() for name, value in made.module.state_dict().items()}
    for got, wanted in zip(found[4:], found[:4], strict=True):
        assert_same(got, wanted)


@on_ranks(2)
def test_wrong_guesses_reduce(rank: int, world: int) -> None:
    """A method that is not what its code looks like: whoever reduces then, the weights are torch's."""
    for name in ddp_subclasses.DISPATCHED:
        kind = ddp_subclasses.replacing(name, seen=False)
        plain = kind(model())
        with installed_for():
            made = kind(model())
            loads = copy.deepcopy(made)
        assert is_torchs(made) is (name == "_ddp_init_helper"), name
        wanted = trained(plain, rank)
        assert_same(trained(made, rank), wanted)
        assert_same(trained(loads, rank), wanted)


@on_ranks(2)
def test_what_is_left_to_torch_takes_our_hook(rank: int, world: int) -> None:
    """The line that is written for it works, bit for bit."""
    for name in ("register_comm_hook", "_ddp_init_helper", "_post_forward"):
        kind = ddp_subclasses.replacing(name, seen=True)
        plain = kind(model())
        with installed_for():
            made = kind(model())
            assert is_torchs(made)
            state = fusedreduce.FusedHookState(wire="native")
            made.register_comm_hook(state, fusedreduce.fused_hook)
        assert_same(trained(made, rank), trained(plain, rank))
        assert state.stats()["steps"] == STEPS


@on_ranks(2)
def test_flush_knows_the_buffers(rank: int, world: int) -> None:
    """In the asynchronous mode forward broadcasts none."""
    with installed_for(ReduceConfig(sync_mode=fusedreduce.Asynchronous())):
        made = DDP(model())
    assert not made.will_sync_module_buffers()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    for inputs in batches(rank):
        optimizer.zero_grad()
        made(inputs).square().mean().backward()
        optimizer.step()
    mean: Any = made.module.get_buffer("1.running_mean")
    of_ranks = [torch.empty_like(mean) for _ in range(world)]
    dist.all_gather(of_ranks, mean)
    assert not torch.equal(*of_ranks)
    reducer_of(made).flush(optimizer)
    for value in made.module.state_dict().values():
        of_ranks = [torch.empty_like(value) for _ in range(world)]
        dist.all_gather(of_ranks, value)
        assert torch.equal(*of_ranks)


@pytest.mark.parametrize("kind", ddp_subclasses.REDUCED)
def test_the_type_is_what_was_called(kind: type[DDP]) -> None:
    fusedreduce.install(BF16)
    made = kind(model())
    assert type(made) is kind and isinstance(made, DDP) and made.__class__ is kind
    assert not isinstance(made, fusedreduce.DistributedDataParallel)
    assert reducer_of(made).config == BF16 and isinstance(reducer_of(made), fusedreduce.Reducer)
    fusedreduce.install(FP16)
    assert reducer_of(kind(model())).config == FP16
    assert reducer_of(made).config == BF16, "it keeps its settings"
    fusedreduce.uninstall()
    assert is_torchs(kind(model()))
    stepped(made)
    assert reducer_of(made).steps == 1


WAYS: dict[str, Callable[[DDP], DDP]] = {"deepcopy": copy.deepcopy, "copy": copy.copy}


@pytest.mark.parametrize("then", ["", "other settings", "uninstalled"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [DDP, Forwarding])
def test_a_copy_is_reduced_as_its_original(kind: type[DDP], way: str, then: str) -> None:
    plain = kind(model())
    fusedreduce.install(BF16)
    made = kind(model(), bucket_cap_mb=1, static_graph=True)
    reducer_of(made).set_bucket_size(5000)
    wanted = stepped(made)
    if then == "other settings":
        fusedreduce.install(FP16)
    elif then:
        fusedreduce.uninstall()
    copied = WAYS[way](made)
    assert type(copied) is kind and reducer_of(copied).config == BF16
    assert reducer_of(copied).caps == reducer_of(made).caps == BucketCaps.of(5000)
    assert all(map(torch.equal, stepped(copied), wanted)) and reducer_of(copied).steps == 1
    assert not any(name.startswith("_fusedreduce") for name in vars(copied))
    assert is_torchs(WAYS[way](plain)), "what torch reduces it goes on to reduce"


@pytest.mark.parametrize("kind", [DDP, Forwarding])
@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 1}, {"bucket_cap_mb": 0}, {"bucket_cap_mb_list": [2, 1]}])
def test_a_pickle_is_torchs_and_takes_the_settings_of_who_loads_it(kind: type[DDP], options: dict[str, Any]) -> None:
    by_torch = pickle.dumps(kind(model(), **options))
    fusedreduce.install(BF16)
    made = kind(model(), **options)
    stepped(made)
    saved = io.BytesIO()
    torch.save(made, saved)
    pickled = pickle.dumps(made)
    assert b"fusedreduce" not in pickled and b"fusedreduce" not in saved.getvalue()
    fusedreduce.install(FP16)
    saved.seek(0)
    for loaded in (pickle.loads(pickled), pickle.loads(by_torch), torch.load(saved, weights_only=False)):
        assert type(loaded) is kind and reducer_of(loaded).config == FP16
        assert reducer_of(loaded).caps == reducer_of(kind(model(), **options)).caps == reducer_of(made).caps
        stepped(loaded)
        assert reducer_of(loaded).steps == 1
    fusedreduce.uninstall()
    assert is_torchs(pickle.loads(pickled))


def test_a_plain_torch_loads_what_was_pickled(tmp_path: Path) -> None:
    fusedreduce.install()
    made = DDP(model())
    torch.save(stepped(made), tmp_path / "gradients")
    (tmp_path / "model").write_bytes(pickle.dumps([made, copy.deepcopy(made)]))
    code = """if True:
        import os, pickle, sys, torch
        # Importing any of it fails.
        sys.modules.update({name: None for name in sys.modules if name.split(".")[0] == "fusedreduce"})
        store = f"file://{sys.argv[1]}.store"
        torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        for model in pickle.load(open(sys.argv[1], "rb")):
            model.zero_grad()
            model(torch.randn(5, 4, generator=torch.Generator().manual_seed(1))).square().mean().backward()
            same = map(torch.equal, [one.grad for one in model.parameters()], torch.load(sys.argv[2]))
            print(type(model.reducer).__module__, all(same), flush=True)
        os._exit(0)  # a process that ends with Gloo's threads in it may abort
    """
    said = Program(code, *(str(tmp_path / name) for name in ("model", "gradients"))).printed()
    assert said.splitlines() == ["torch._C._distributed_c10d True"] * 2


def test_what_is_refused_of_a_pickle_is_an_error_or_torchs(caplog: pytest.LogCaptureFixture) -> None:
    pickled = pickle.dumps(DDP(model(), skip_all_reduce_unused_params=True))
    config = ReduceConfig(sync_mode=fusedreduce.BoundedStaleness(1))
    fusedreduce.install(config)
    with pytest.raises(ValueError, match="skip_all_reduce_unused_params exclude each other"):
        pickle.loads(pickled)
    fusedreduce.install(config, fallback=True)
    loaded = pickle.loads(pickled)
    assert is_torchs(loaded) and "torch's own reducer is used" in caplog.text


@pytest.mark.parametrize("name", DISPATCHED)
def test_a_class_that_replaces_a_method_is_left_to_torch_and_told_what_to_write(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    kind = replacing(name, seen=True)
    pickled = pickle.dumps(DDP(model()))
    fusedreduce.install(BF16)
    for _ in range(2):
        made = kind(model())
        assert is_torchs(made) and is_torchs(copy.deepcopy(made))
    assert [one.message for one in caplog.records] == [
        f"support.ddp_subclasses.Replaces{name} is left to torch, because this subclass of DistributedDataParallel "
        f"replaces Replaces{name}.{name} and does not seem to call super() there. Call it, or, where the model is "
        "wrapped, add: "
        "model.register_comm_hook(fusedreduce.FusedHookState(wire='bf16'), fusedreduce.fused_hook)"
    ]
    assert reducer_of(pickle.loads(pickled))
    with pytest.raises(TypeError, match="reduced by torch"):
        reducer_of(made)


def test_whose_helper_ran_is_seen_when_it_has_run(caplog: pytest.LogCaptureFixture) -> None:
    fusedreduce.install(BF16)
    made = replacing("_ddp_init_helper", seen=False)(model())
    assert is_torchs(made) and "replaces _ddp_init_helper and does not seem" in caplog.text


def test_a_class_below_ours_is_what_its_script_made_it(caplog: pytest.LogCaptureFixture) -> None:
    class Own(fusedreduce.DistributedDataParallel):
        def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
            """Takes none."""

    fusedreduce.install(BF16)
    made = Own(model(), reduce=FP16)
    assert made.reduce_config == reducer_of(made).config == FP16 and not caplog.records
    with pytest.raises(ValueError, match="exclude each other"):
        super(Own, made).register_comm_hook(None, lambda state, bucket: None)  # no wire gives way


def test_uninstalling_takes_nothing_from_what_lives() -> None:
    fusedreduce.install(BF16)
    made = DDP(model(), gradient_as_bucket_view=False)
    fusedreduce.uninstall()
    stepped(copy.deepcopy(made))
    made.register_comm_hook(None, _halved)
    assert reducer_of(made).config.wire == "native" and reducer_of(made).has_comm_hook
    stepped(made)
    with made.no_sync():
        stepped(made)
    made.zero_grad(set_to_none=False)
    with made.join():
        stepped(made)
    assert reducer_of(made).steps == 2


def _halved(_: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer() / 2)
    return future


_halved.__annotations__.clear()  # torch takes GradBucket or nothing, and these are text


@pytest.mark.parametrize("when", ["before", "behind"])
@pytest.mark.parametrize("name", ["_post_forward", "zero_grad", "will_sync_module_buffers", "register_comm_hook"])
def test_what_another_library_put_around_a_method_runs_once(
    monkeypatch: pytest.MonkeyPatch, when: str, name: str
) -> None:
    fusedreduce.install(BF16)
    calls: list[type] = []
    inner = ddp_subclasses.torchs(name) if when == "before" else getattr(DDP, name)

    @functools.wraps(inner)
    def theirs(self: DDP, *arguments: Any, **options: Any) -> Any:
        calls.append(type(self))
        return inner(self, *arguments, **options)

    monkeypatch.setattr(DDP, name, install.method_for(name, theirs) if when == "before" else theirs)
    explicit = fusedreduce.DistributedDataParallel(model())
    for made in (DDP(model()), Forwarding(model()), explicit):
        del calls[:]
        if name == "register_comm_hook":
            made.register_comm_hook(None, _halved)
            assert reducer_of(made).has_comm_hook
            # Where torch's is not to be called, nor is what was in front of it.
            assert calls == ([] if when == "before" or made is explicit else [type(made)])
            continue
        stepped(made)
        assert calls.count(type(made)) == len(calls) == {"will_sync_module_buffers": 2}.get(name, 1)
        assert reducer_of(made).steps == 1


def test_what_another_library_puts_back_is_placed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that had patched torch's class before us restores what it found."""
    fusedreduce.install(BF16)
    placed = {name: vars(DDP)[name] for name in DISPATCHED}
    fusedreduce.install(FP16)
    assert {name: vars(DDP)[name] for name in DISPATCHED} == placed, "once"
    for name in ("__init__", "_ddp_init_helper", "register_comm_hook", "__getstate__"):
        monkeypatch.setattr(DDP, name, ddp_subclasses.torchs(name))
    assert is_torchs(DDP(model()))
    fusedreduce.install(BF16)
    made = DDP(model())
    assert reducer_of(copy.deepcopy(made)).config == BF16
    made.register_comm_hook(None, _halved)
    # A wrapper of ours that knows of no `__wrapped__` is not seen, and one layer more does no harm.
    inner = DDP._post_forward
    monkeypatch.setattr(DDP, "_post_forward", lambda self, output: inner(self, output))
    fusedreduce.install(BF16)
    made = DDP(model())
    stepped(made)
    assert reducer_of(made).steps == 1


def test_a_helper_that_is_called_again_makes_ours_again() -> None:
    fusedreduce.install(BF16)
    made = DDP(model())
    parameters, sparse = made._build_params_for_reducer()
    old = reducer_of(made)
    old.close()
    made._ddp_init_helper(parameters, sparse, made._build_debug_param_to_name_mapping(parameters), False)
    assert reducer_of(made) is not old and reducer_of(made).config == BF16
    stepped(made)


# reducer_of


def test_reducer_of_every_wrapper_that_we_reduce() -> None:
    fusedreduce.install(BF16)
    for made in (DDP(model()), Forwarding(model()), fusedreduce.DistributedDataParallel(model(), reduce=BF16)):
        assert reducer_of(made) is reducer_of(torch.compile(made))  # type: ignore[arg-type]
        assert reducer_of(made).config == BF16
    inside = Forwarding(torch.compile(model()))
    assert reducer_of(inside).config == BF16, "not the compiled module's"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (nn.Linear(2, 2), "got torch.nn.modules.linear.Linear: pass what wrapping the model has returned"),
        (None, "got builtins.NoneType"),
        ("DDP", "is reduced by torch: call fusedreduce.install"),
        ("compiled", "is reduced by torch: call fusedreduce.install"),
        ("a reducer within", "got torch.nn.modules.linear.Linear"),
    ],
)
def test_reducer_of_anything_else_says_what_came_and_what_to_write(given: Any, says: str) -> None:
    if given == "DDP":
        given = DDP(model())
    elif given == "compiled":
        given = torch.compile(Forwarding(model()))
    elif given == "a reducer within":
        given = nn.Linear(2, 2)
        given.reducer = "somebody's"
    with pytest.raises(TypeError, match=says):
        reducer_of(given)


def test_reducer_of_has_what_our_class_adds_to_torchs() -> None:
    ours = fusedreduce.DistributedDataParallel
    added = {name for kind in ours.__mro__[: ours.__mro__.index(DDP)] for name in vars(kind) if name[0] != "_"}
    here = {
        "reduce_stats": "stats",
        "reduce_config": "config",
        "reduce_state_dict": "state_dict",
        "load_reduce_state_dict": "load_state_dict",
        "require_manual_backward_finalization": "require_manual_finalization",
    }
    # torch's own, and what the process group and the module know.
    elsewhere = {"join", "join_hook", "will_sync_module_buffers", "world_size", "rank", "local_rank", "module"}
    elsewhere |= {"sync_mode", "process_group"}  # the config's
    fusedreduce.install()
    reducer = reducer_of(DDP(model()))
    missing = {name for name in added - elsewhere if not hasattr(reducer, here.get(name, name))}
    assert not missing


def test_reducer_of_changes_what_the_wrapper_knows_too(tmp_path: Path) -> None:
    fusedreduce.install(ReduceConfig(grad_stats=True, check_finite="count"))
    module = model()
    frozen = module.get_parameter("3.bias").requires_grad_(False)
    made = DDP(module)
    reducer = reducer_of(made)
    reducer.set_bucket_size(4096)
    assert made.bucket_bytes_cap == 4096 and made._get_ddp_logging_data()["bucket_cap_bytes"] == 4096
    with reducer.record_trace(tmp_path), reducer.measure_collectives() as metrics:
        stepped(made)
    assert list(tmp_path.iterdir()) and metrics.total.count
    assert reducer.grad_norm() > 0 and set(reducer.grad_norms()) == set(reducer.names)
    assert reducer.grad_stats()["grad_norm"] > 0 and reducer.non_finite() == []
    for value, norm_type in itertools.product((1.0, 0.01), (2.0, math.inf)):
        frozen.grad = torch.full_like(frozen, value)
        held = torch.cat([one.grad.flatten() for one in made.parameters() if one.grad is not None])
        assert float(reducer.grad_norm(norm_type, include_ignored=True)) == pytest.approx(float(held.norm(norm_type)))
    with pytest.raises(ValueError, match=r"3\.bias has a gradient that this wrapper does not reduce"):
        reducer.grad_norm()
    delayed = DDP(model(), skip_all_reduce_unused_params=True)
    with pytest.raises(ValueError, match="skip_all_reduce_unused_params"):
        reducer_of(delayed).set_sync_mode(fusedreduce.BoundedStaleness(1))
    reducer_of(delayed).set_sync_mode(Synchronous())
    del made
    with pytest.raises(fusedreduce.FusedReduceError, match=r"has been freed.*reducer_of\(model\)"):
        reducer.flush()


# What else of the package may meet an installed object


@pytest.mark.parametrize("kind", [DDP, Forwarding])
def test_clipping_and_scaling_take_what_is_installed(kind: type[DDP]) -> None:
    found = []
    for installs in (False, True):
        if installs:
            fusedreduce.install(BF16)
            made: DDP = kind(model())
        else:
            made = fusedreduce.DistributedDataParallel(model(), reduce=BF16)
        optimizer = torch.optim.SGD(made.parameters(), lr=0.1, fused=True)
        scaler = fusedreduce.FusedGradScaler(made, init_scale=8.0)
        for inputs in batches(0):
            optimizer.zero_grad()
            scaler.scale(made(inputs).square().mean()).backward()
            scaler.unscale_(optimizer)
            norm = fusedreduce.clip_grad_norm_(made, 0.1, optimizer, reuse_norm=True)
            scaler.step(optimizer)
            scaler.update()
        found.append([norm, *(one.detach().clone() for one in made.parameters())])
    assert all(map(torch.equal, *found))
    with pytest.raises(ValueError, match="which cannot be replicated"):
        fusedreduce.DataParallel(made, ["cpu"])
    fusedreduce.uninstall()
    with pytest.raises(TypeError, match=r"torch\.amp\.GradScaler"):
        fusedreduce.FusedGradScaler(kind(model()))


@functools.cache
def compiled(mode: str) -> dict[str, Any]:
    out = Program("from parallel.dispatch_compiled import main; main()", mode).printed()
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


NO_OPTIMIZATION = pytest.param("no_optimization", marks=pytest.mark.full)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp_optimizer", NO_OPTIMIZATION, "python_reducer"])
def test_torch_compile_sees_nothing_of_it_where_torch_reduces(mode: str) -> None:
    found = compiled(mode)
    assert found["before"]["graphs"] and bool(found["before"]["breaks"]) is (mode != "python_reducer")
    assert found["made before"] == found["uninstalled"] == found["before"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp_optimizer", NO_OPTIMIZATION])
def test_torch_compile_makes_the_same_graphs_where_we_reduce(mode: str) -> None:
    before, ours = compiled(mode)["before"], compiled(mode)["installed"]
    assert ours["graphs"] == before["graphs"] and ours["breaks"] == before["breaks"]
    assert ours["steps"] == 6 and ours["weights"] == before["weights"]
