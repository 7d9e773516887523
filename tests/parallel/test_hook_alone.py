"""FusedHookState and fused_hook without DDP: options, registration rules, bad buckets."""

from __future__ import annotations

import contextlib
import gc
import pickle
import threading
import time
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import raw_calls
from support.comm_hooks import Shown
from support.inside import BUCKET_IS_UNPACKED, HOOK_AGREES, inside_hook
from support.loopback import Loopback
from support.ranks import group_of_one
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fusedreduce
from fusedreduce.buckets import data_path
from fusedreduce.buckets.bucket import Bucket, BucketCache, BucketKey, BucketState
from fusedreduce.buckets.deferred_errors import DeferredErrors
from fusedreduce.comm.process_group import ProcessGroupCommunicator
from fusedreduce.planning.layout import flat_layout
from fusedreduce.trace.reader import read

pytestmark = pytest.mark.usefixtures("path")


def _hook(state: fusedreduce.FusedHookState, buffer: torch.Tensor) -> torch.Tensor:
    bucket: Any = Shown(0, [buffer], buffer=buffer)
    return fusedreduce.fused_hook(state, bucket).wait()


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf"), "10"])
def test_a_bad_stall_report_is_refused(seconds: Any) -> None:
    with pytest.raises(ValueError, match="stall_report_s"):
        fusedreduce.FusedHookState(stall_report_s=seconds)


def test_wrong_arguments_are_told_apart() -> None:
    with pytest.raises(TypeError, match="the wire is a keyword"):
        fusedreduce.FusedHookState("bf16")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="colour"):
        fusedreduce.FusedHookState(colour="red")  # type: ignore[call-arg]


def test_before_init_process_group_building_works_and_reducing_says_what_is_missing() -> None:
    state = fusedreduce.FusedHookState(wire="bf16")
    with pytest.raises(ValueError, match="init_process_group"):
        _hook(state, torch.ones(4))


def test_a_state_without_a_group_pickles_silently(
    recwarn: pytest.WarningsRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    state = fusedreduce.FusedHookState(wire="bf16", stall_report_s=5.0)
    assert pickle.loads(pickle.dumps(state)).config == state.config
    assert not recwarn.list and not caplog.records


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.bool, torch.uint8])
def test_a_bucket_of_integers_is_refused(alone: None, dtype: torch.dtype) -> None:
    buffer = torch.ones(4).to(dtype)
    with pytest.raises(TypeError, match=f"rank 0: bucket 0 .* holds {dtype}; gradients must be fp32"):
        _hook(fusedreduce.FusedHookState(), buffer)
    assert torch.equal(buffer, torch.ones(4).to(dtype))


@pytest.mark.parametrize("wire", ["native", "bf16", "fp16"])
def test_the_result_is_the_buckets_own_buffer(alone: None, wire: Any) -> None:
    state = fusedreduce.FusedHookState(wire=wire)
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64):
        buffer = torch.arange(5).to(dtype)
        result = _hook(state, buffer)
        assert result.data_ptr() == buffer.data_ptr() and result.dtype == dtype
        assert torch.equal(result, torch.arange(5).to(dtype)), "a mean over one rank changes nothing"
    assert _hook(state, torch.empty(0)).numel() == 0


def test_old_layouts_are_forgotten(alone: None) -> None:
    state = fusedreduce.FusedHookState(wire="bf16")
    weight = torch.ones(3)
    buffers = {numel: torch.ones(numel) for numel in (100, 30)}
    for numel in (100, 30, 30, 30):
        bucket: Any = Shown(0, [weight], buffer=buffers[numel])
        fusedreduce.fused_hook(state, bucket).wait()
        assert [one.layout.numel for one in inside_hook(state).buckets] == [numel], "the old wire goes at once"
    assert state.stats()["wire_allocations"] == 2
    del weight, bucket
    buffer = torch.ones(7)
    _hook(state, buffer)
    assert [one.layout.numel for one in inside_hook(state).buckets] == [7], "and all of them with their module"


def test_the_profiler_shows_the_stages_by_name(alone: None) -> None:
    state = fusedreduce.FusedHookState(wire="bf16")
    _hook(state, torch.ones(3))
    with torch.profiler.profile() as profile:
        _hook(state, torch.ones(3))
    names = " ".join(event.name for event in profile.events())
    assert "fusedreduce::pack bucket 0" in names and "fusedreduce::all_reduce bucket 0" in names


@pytest.mark.parametrize("bias", [True, False])
def test_a_trace_has_the_whole_steps_since_ddp_last_changed_its_buckets(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bias: bool
) -> None:
    """And none of the backwards under no_sync between them. The first bucket is of two parameters, or of one."""
    apart_ns, jumped_ns, clock = 10**15, 0, time.perf_counter_ns
    monkeypatch.setattr(time, "perf_counter_ns", lambda: clock() + jumped_ns)
    state = fusedreduce.FusedHookState(wire="bf16")
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=bias)), bucket_cap_mb=0.00002)
    ddp.register_comm_hook(state, fusedreduce.fused_hook)
    with state.record_trace(tmp_path, limit=3):
        with pytest.raises(fusedreduce.FusedReduceError, match="already"), state.record_trace(tmp_path):
            raise AssertionError
        for synchronised in (True, True, True, False, True, True, True):  # buckets change behind the first
            with contextlib.nullcontext() if synchronised else ddp.no_sync():
                ddp(torch.ones(1, 3, device="cpu")).sum().backward()
            jumped_ns += apart_ns
    (trace,) = read(tmp_path)
    assert trace.source == "hook" and [parameter.numel for parameter in trace.parameters] == [12, 4, 8, 2][: 3 + bias]
    assert [step.step for step in trace.steps] == [3, 4, 5]
    for step in trace.steps:
        for bucket in step.marks.buckets:
            times = [bucket.ready_ns, bucket.pack_ns, bucket.launch_ns, bucket.done_ns, bucket.end_ns]
            assert times[0] >= 0 and times == sorted(times) and times[-1] < apart_ns
        if step is not trace.steps[0]:  # in which the parameters get their hooks
            assert step.ready_ns is not None
            # DDP's hook on a parameter, which shows its bucket, runs before ours.
            order = [*step.ready_ns[3:], step.marks.buckets[0].ready_ns, *step.ready_ns[2:0:-1]]
            assert order[0] >= 0 and order == sorted(order) and order[-1] < apart_ns


def test_what_every_rank_refuses_leaves_ddp_as_it_was(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is raised behind DDP's own end of backward: else the next one would find that unfinished."""
    ddp = DistributedDataParallel(nn.Linear(3, 2))
    ddp.register_comm_hook(fusedreduce.FusedHookState(wire="bf16"), fusedreduce.fused_hook)

    def disagree(*_: object) -> None:
        raise fusedreduce.AgreementError("options differ")

    with monkeypatch.context() as patch:
        HOOK_AGREES.replace(patch, disagree)
        with pytest.raises(fusedreduce.AgreementError, match="options differ"):
            ddp(torch.ones(1, 3)).sum().backward()
    assert ddp.module.weight.grad is not None and ddp.module.weight.grad.eq(1).all(), "nothing is lost"
    ddp.zero_grad()
    ddp(torch.full((1, 3), 2.0)).sum().backward()
    assert ddp.module.weight.grad.eq(2).all()


@pytest.mark.parametrize("kind", ["dense", "sparse", "empty"])
def test_a_comparison_that_breaks_off_may_be_this_ranks_alone(
    alone: None, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Its peers may have got through and all-reduce by now: what differs on every rank is not all that can go wrong."""
    buffer = {"dense": torch.ones(3), "sparse": torch.eye(3).to_sparse(), "empty": torch.empty(0)}[kind]

    def gone(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    state = fusedreduce.FusedHookState()
    with monkeypatch.context() as patch:
        patch.setattr(ProcessGroupCommunicator, "all_gather_bytes", gone)
        with pytest.raises(fusedreduce.CollectiveError, match="comparing options before the first all-reduce of bucke"):
            _hook(state, buffer)
    with pytest.raises(fusedreduce.FusedReduceError, match="an earlier reduction failed on this rank.*Connection clos"):
        _hook(state, buffer)


class FailedWork:
    """A collective whose peer has gone."""

    def __init__(self) -> None:
        self._future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        self._future.set_exception(RuntimeError("Connection closed by peer"))  # type: ignore[arg-type]

    def future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return self._future


@pytest.mark.parametrize("sparse", [False, True])
def test_a_collective_that_fails_is_remembered_in_its_own_class(
    alone: None, monkeypatch: pytest.MonkeyPatch, sparse: bool
) -> None:
    buffer = torch.eye(3).to_sparse() if sparse else torch.ones(3)
    state = fusedreduce.FusedHookState(wire="bf16")
    kind = "fusedreduce.comm.process_group.ProcessGroupCommunicator"
    for method in ("all_reduce", "all_reduce_sparse"):
        monkeypatch.setattr(f"{kind}.{method}", lambda self, tensor: FailedWork())
    bucket: Any = Shown(0, [buffer], buffer=buffer)
    future = fusedreduce.fused_hook(state, bucket)
    with pytest.raises(RuntimeError, match="bucket 0"):
        future.wait()
    error = inside_hook(state).errors.pop_error()
    assert isinstance(error, fusedreduce.CollectiveError)
    assert "rank 0: the all-reduce of bucket 0" in str(error) and "Connection closed by peer" in str(error)
    for ours in inside_hook(state).buckets:
        assert ours.state.value == "failed", "its wire may still be written to"


def test_an_empty_bucket_takes_no_collective(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    state = fusedreduce.FusedHookState(wire="bf16")
    _hook(state, torch.ones(3))
    monkeypatch.setattr(
        "fusedreduce.comm.process_group.ProcessGroupCommunicator.all_reduce", lambda self, tensor: pytest.fail("issued")
    )
    assert _hook(state, torch.empty(0)).numel() == 0
    assert state.stats()["steps"] == 2


def _bucket_of_three() -> Bucket:
    return Bucket(flat_layout(3), [torch.float32], torch.bfloat16, torch.device("cpu"), "bucket 0")


def test_a_bucket_under_way_or_failed_is_not_given_out_again() -> None:
    cache, weight = BucketCache(), torch.ones(3)
    key = BucketKey(0, 3, torch.float32, torch.device("cpu"))

    first = cache.check_out(key, 64, [weight], _bucket_of_three)
    assert cache.find(key, 64) is None and cache.knows(key, [weight])
    for state in (BucketState.TAKEN, BucketState.LAUNCHED, BucketState.FAILED):
        first.state = state
        assert cache.find(key, 64) is not first
        assert cache.check_out(key, 128, [weight], _bucket_of_three) is not first
    assert cache.find(key, 256) is None
    other = torch.ones(3)
    assert not cache.knows(key, [other]) and cache.check_out(key, 512, [other], _bucket_of_three) not in (None, first)


def test_a_bucket_is_not_given_out_while_it_is_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A future's callback unpacks, while another module's backward may ask for a bucket."""
    cache, weight = BucketCache(), torch.ones(3)
    key = BucketKey(0, 3, torch.float32, torch.device("cpu"))
    ours = cache.check_out(key, 64, [weight], _bucket_of_three)
    in_flight = data_path.start(ours, [torch.ones(3)], Loopback(), divisor=1.0)
    in_flight.pending.wait()
    given_out = []

    def while_another_asks(unpack: Callable[..., None]) -> Callable[..., None]:
        def unpack_and_ask(*arguments: Any) -> None:
            given_out.append(cache.find(key, 64))
            unpack(*arguments)

        return unpack_and_ask

    raw_calls.wrap(monkeypatch, "unpack", while_another_asks)
    data_path.finish(in_flight)
    assert given_out == [None] and cache.find(key, 64) is ours


def test_a_bucket_of_a_module_that_is_gone_is_let_go_with_it() -> None:
    """Its wire is memory, and its address may be another module's by then, on this rank alone."""
    cache, weights = BucketCache(), [torch.ones(3), torch.ones(3)]
    key = BucketKey(0, 3, torch.float32, torch.device("cpu"))
    gone = cache.check_out(key, 64, weights[:1], _bucket_of_three)
    gone.state = BucketState.IDLE
    seen = weakref.ref(gone)
    del weights[0], gone
    assert seen() is None and cache.find(key, 64) is None
    later = cache.check_out(key, 128, weights, _bucket_of_three)
    assert cache.find(key, 64) is None and cache.buckets() == [later]


@pytest.mark.parametrize("modules", [1, 4])
def test_many_modules_on_one_state_allocate_nothing_in_the_steady_state(alone: None, modules: int) -> None:
    state = fusedreduce.FusedHookState(wire="bf16")
    shown: list[Any] = [Shown(0, [torch.ones(1)], buffer=torch.ones(50)) for _ in range(modules)]
    for step in range(8):
        for module, bucket in enumerate(shown):
            if module == 0 or step % 3 == 0:  # the others train less often
                fusedreduce.fused_hook(state, bucket).wait()
    assert state.stats()["wire_allocations"] == modules


@pytest.mark.parametrize("known", [False, True], ids=["new bucket", "known"])
@pytest.mark.parametrize("kind", [TypeError, ValueError, AssertionError, OSError, RuntimeError, Exception])
def test_whatever_fails_on_this_rank_alone_ends_reducing(
    alone: None, monkeypatch: pytest.MonkeyPatch, kind: type[Exception], known: bool
) -> None:
    state = fusedreduce.FusedHookState()
    if known:
        _hook(state, torch.ones(3))

    def fail(*arguments: Any, **options: Any) -> None:
        raise kind("only here")

    with monkeypatch.context() as patch:
        raw_calls.replace(patch, "pack", fail)
        with pytest.raises(kind, match="only here"):
            _hook(state, torch.ones(3))
    with pytest.raises(fusedreduce.FusedReduceError, match="rank 0: an earlier reduction failed.*only here"):
        _hook(state, torch.ones(3))


@pytest.mark.parametrize("wire", ["native", "bf16"])
def test_a_buffer_with_gaps_is_refused(alone: None, wire: Any) -> None:
    """A wrapping hook may have called set_buffer."""
    with pytest.raises(ValueError, match=r"buffer of .* must be contiguous, got strides \(2,\)"):
        _hook(fusedreduce.FusedHookState(wire=wire), torch.arange(8.0)[::2])


def test_a_dead_peer_is_no_unsupported_wire(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(ProcessGroupCommunicator, "all_reduce", gone)
    with pytest.raises(RuntimeError, match="Connection closed") as caught:
        _hook(fusedreduce.FusedHookState(), torch.ones(3))
    assert not isinstance(caught.value, fusedreduce.UnsupportedWireError)


@pytest.mark.parametrize("known_from", [1, 2], ids=["plain", "static_graph"])
def test_a_buckets_name_follows_ddps_new_layout_whenever_it_comes(alone: None, known_from: int) -> None:
    """In the order of readiness, after the first step or with static_graph the second; its memory may be the same."""
    weights, buffer, labels = [torch.ones(3, 2), torch.ones(5)], torch.ones(11), []
    state = fusedreduce.FusedHookState()
    for step in range(5):
        bucket: Any = Shown(0, weights if step < known_from else weights[::-1], buffer=buffer)
        fusedreduce.fused_hook(state, bucket).wait()
        (ours,) = inside_hook(state).buckets
        labels.append(ours.label)
    before, after = (f"bucket 0 (2 parameters of shapes {shapes})" for shapes in ("(3, 2), (5,)", "(5,), (3, 2)"))
    assert labels == [before] * known_from + [after] * (5 - known_from)


@pytest.mark.parametrize(("static", "known_from"), [(False, 1), (True, 2)])
def test_ddp_lays_its_buckets_out_anew_when_it_is_expected_to(alone: None, static: bool, known_from: int) -> None:
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 5)), static_graph=static)
    state, labels = fusedreduce.FusedHookState(), []
    ddp.register_comm_hook(state, fusedreduce.fused_hook)
    for _ in range(5):
        ddp(torch.ones(1, 3)).sum().backward()
        (ours,) = inside_hook(state).buckets
        labels.append(ours.label)
    assert len(set(labels[:known_from])) == len(set(labels[known_from:])) == 1 and labels[0] != labels[-1]


def test_options_are_fixed() -> None:
    with pytest.raises(AttributeError):
        fusedreduce.FusedHookState().config = fusedreduce.ReduceConfig()  # type: ignore[misc]


def test_a_bucket_whose_parameters_have_moved_is_given_up_whatever_its_index() -> None:
    cache, weights = BucketCache(), [torch.ones(3), torch.ones(3)]

    def take(index: int, numel: int, address: int, parameters: list[torch.Tensor]) -> Bucket:
        key = BucketKey(index, numel, torch.float32, torch.device("cpu"))
        layout = flat_layout(numel)
        return cache.check_out(
            key, address, parameters, lambda: Bucket(layout, [torch.float32], torch.bfloat16, key.device, "")
        )

    take(0, 6, 64, weights)
    later = take(1, 3, 128, weights[:1])
    assert cache.buckets() == [later], "a mixed-dtype model's large bucket may move to a higher index"


def test_a_new_process_group_agrees_on_every_bucket_again(monkeypatch: pytest.MonkeyPatch) -> None:
    agreed: list[str] = []
    HOOK_AGREES.replace(monkeypatch, lambda c, what, settings, device: agreed.append(str(settings)))
    state = fusedreduce.FusedHookState()
    buffers = [torch.ones(3), torch.ones(4)]
    for groups in (1, 2):
        with group_of_one():
            for _ in range(3):
                for buffer in buffers:
                    _hook(state, buffer)
        assert len(agreed) == 2 * groups


def _out_of_step(errors: DeferredErrors) -> None:
    errors.remember(RuntimeError("a kernel failed"))
    assert errors.pop_error() is not None and errors.out_of_step is not None


LEFT: dict[str, Callable[[DeferredErrors], object]] = {
    "nothing": lambda errors: None,
    "out of step": _out_of_step,
    "an error": lambda errors: errors.remember(RuntimeError("of a backward that was given up")),
    "a failed future": lambda errors: errors.add(lambda _: FailedWork().future().wait()),
}


@pytest.mark.parametrize("left", LEFT)
def test_a_new_group_knows_nothing_of_what_was_left_in_the_old_one(left: str) -> None:
    state = fusedreduce.FusedHookState(wire="bf16", grad_stats=True, check_finite="count")
    with group_of_one():
        assert _hook(state, torch.ones(3)).tolist() == [1.0] * 3
        LEFT[left](inside_hook(state).errors)
    with group_of_one():
        assert _hook(state, torch.full((4,), 2.0)).tolist() == [2.0] * 4
        assert state.grad_norm(float("inf")).item() == 2.0, "the step has ended"


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, batch: torch.Tensor) -> torch.Tensor:
        return batch.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("in the middle of backward")


class _Halves(nn.Module):
    """A backward that comes to the second layer and then, if asked, raises."""

    fails = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 2)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        between = self.first(batch)
        return torch.as_tensor(self.second(_Fails.apply(between) if self.fails else between)).sum()


def _trained(hook: Callable[..., Any], state: object, steps: int = 3) -> list[torch.Tensor]:
    """The gradients of DDP's last step with that hook, in a bucket for each parameter."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(_Halves(), bucket_cap_mb=1e-5)
    ddp.register_comm_hook(state, hook)
    for _ in range(steps):
        ddp.zero_grad()
        ddp(torch.randn(4, 3)).backward()
    return [parameter.grad.clone() for parameter in ddp.parameters() if parameter.grad is not None]


def _in_time(work: Callable[[], Any]) -> Any:
    """What `work` returns; fails if it has not within a minute, as a wait for ever would not."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()
    thread.join(60)
    assert found, "it waits, or has raised"
    return found[0]


def _waited(future: torch.futures.Future[Any]) -> torch.futures.Future[Any]:
    future.wait()
    return future


def _chained(future: torch.futures.Future[Any]) -> torch.futures.Future[Any]:
    chained = future.then(lambda done: done.value())
    chained.wait()
    return chained


def _called_back(future: torch.futures.Future[Any]) -> torch.futures.Future[Any]:
    called = threading.Event()
    future.add_done_callback(lambda _: called.set())
    assert called.wait(60)
    return future


def _collected(future: torch.futures.Future[Any]) -> torch.futures.Future[Any]:
    torch.futures.wait_all([future])
    return future


def _polled(future: torch.futures.Future[Any]) -> torch.futures.Future[Any]:
    until_s = time.monotonic() + 60
    while not future.done():
        assert time.monotonic() < until_s
    return future


@pytest.mark.parametrize("use", [_waited, _chained, _called_back, _collected, _polled])
def test_a_hook_around_ours_may_wait_for_its_future(alone: None, use: Callable[..., Any]) -> None:
    def around(state: Any, bucket: Any) -> Any:
        return use(fusedreduce.fused_hook(state, bucket))

    around.__annotations__ = {}  # which torch would compare with its own types
    wanted = _trained(fusedreduce.fused_hook, fusedreduce.FusedHookState(wire="bf16"))
    found = _in_time(lambda: _trained(around, fusedreduce.FusedHookState(wire="bf16")))
    assert len(found) == 4 and all(map(torch.equal, found, wanted))


def test_known_buckets_are_unpacked_behind_backward_by_its_thread(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by the backend's thread, which would take the interpreter's lock from backward for each bucket."""
    unpacked, threads, within = Bucket.unpacked, list[int](), list[int]()

    def noted(self: Bucket) -> Any:
        threads.append(threading.get_ident())
        return unpacked(self)

    def at_the_last_gradient(_: torch.Tensor) -> None:
        time.sleep(0.02)  # in which the backend's thread would have unpacked what has come
        within.append(len(threads))

    BUCKET_IS_UNPACKED.replace(monkeypatch, noted)
    ddp = DistributedDataParallel(_Halves(), bucket_cap_mb=1e-5)
    ddp.register_comm_hook(fusedreduce.FusedHookState(wire="bf16"), fusedreduce.fused_hook)
    ddp.module.first.weight.register_post_accumulate_grad_hook(at_the_last_gradient)
    for _ in range(6):
        threads.clear()
        ddp(torch.randn(4, 3)).backward()
    assert len(threads) > 1 and set(threads) == {threading.get_ident()} and within[-1] == 0


def test_what_a_given_up_backward_has_in_flight_ends_with_the_next_step(alone: None) -> None:
    state = fusedreduce.FusedHookState(wire="bf16")
    ddp = DistributedDataParallel(_Halves(), bucket_cap_mb=1e-5)
    ddp.register_comm_hook(state, fusedreduce.fused_hook)
    for _ in range(4):
        ddp(torch.randn(4, 3)).backward()
    ddp.module.fails = True
    with pytest.raises(ArithmeticError):
        ddp(torch.randn(4, 3)).backward()
    assert not all(bucket.state is BucketState.IDLE for bucket in inside_hook(state).buckets)
    found = _trained(fusedreduce.fused_hook, state)
    assert all(bucket.state is BucketState.IDLE for bucket in inside_hook(state).buckets)
    wanted = _trained(fusedreduce.fused_hook, fusedreduce.FusedHookState(wire="bf16"))
    assert all(map(torch.equal, found, wanted))


def _leads_to(start: object, wanted: type) -> bool:
    """Whether one of that class is held; of functions only by what they enclose, not by their modules."""
    seen, found = set[int](), [start]
    while found:
        one = found.pop()
        if isinstance(one, wanted):
            return True
        if id(one) not in seen and not isinstance(one, type | types.ModuleType):
            seen.add(id(one))
            found += gc.get_referents(one.__closure__) if isinstance(one, types.FunctionType) else gc.get_referents(one)
    return False


@pytest.mark.parametrize("use", [lambda future: future, _waited])
def test_what_a_callback_holds_does_not_lead_to_the_group(alone: None, use: Callable[..., Any]) -> None:
    """A callback of a backend's thread holds the errors: were it the last to hold a group, it would end the process."""
    state = fusedreduce.FusedHookState(wire="bf16")
    ddp = DistributedDataParallel(_Halves(), bucket_cap_mb=1e-5)
    around: Any = lambda state, bucket: use(fusedreduce.fused_hook(state, bucket))  # noqa: E731
    ddp.register_comm_hook(state, fusedreduce.fused_hook if use is not _waited else around)
    for _ in range(4):
        ddp(torch.randn(4, 3)).backward()
    ddp.module.fails = True
    with pytest.raises(ArithmeticError):
        ddp(torch.randn(4, 3)).backward()
    assert _leads_to(inside_hook(state), dist.ProcessGroup), "by its communicator"
    assert not _leads_to(inside_hook(state).errors, dist.ProcessGroup)


def test_static_graphs_first_step_within_a_node_of_another_backward_ends(alone: None) -> None:
    """DDP waits for its buckets at once, though the current node is one that accumulates a gradient."""
    state = fusedreduce.FusedHookState(wire="bf16")
    inner = DistributedDataParallel(nn.Linear(3, 2), static_graph=True)
    inner.register_comm_hook(state, fusedreduce.fused_hook)
    outer = nn.Parameter(torch.ones(3))

    @torch.enable_grad()
    def nested(_: torch.Tensor) -> None:
        inner(torch.ones(4, 3)).sum().backward()

    outer.register_post_accumulate_grad_hook(nested)

    def gradient() -> list[list[float]]:
        (2 * outer).sum().backward()
        found: list[list[float]] = inner.module.weight.grad.tolist()
        return found

    for step in range(1, 4):
        assert _in_time(gradient) == [[4.0 * step] * 3] * 2
