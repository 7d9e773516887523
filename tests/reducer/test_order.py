"""The order of CUDA work, without a GPU: no way in breaks a rule, and every planted fault does."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from support.cuda.fake_cuda import FakeCuda
from support.cuda.fake_streams import FakeWork
from support.cuda.order_cases import AGREED, CASES, ONE_WEIGHT_MB, Case, layers, step, wrapped
from support.cuda.order_check import Entry, Rule, Violation, check
from support.inside import (
    BUCKET_IS_UNPACKED,
    BUCKETS_LABEL,
    EXCHANGE_GOES_ON,
    EXCHANGE_IS_MADE,
    FINITE_CHECK_ENDS,
    LATER_PHASES_JOIN,
    MEASURE_EVERY,
    RESIDUALS_ARE_DROPPED,
    TEXTS_ARE_COMPARED,
    UNPACKS_BESIDE,
    WAITS_FOR_PACKS,
)
from support.leaf_steps import shadow_step
from support.rig import boom
from torch import nn
from triton.runtime.errors import PTXASError

from fusedreduce import DistributedDataParallel, FusedGradScaler, FusedHookState, fused_hook
from fusedreduce.buckets import data_path
from fusedreduce.buckets.bucket import Bucket
from fusedreduce.buckets.feedback import BucketFeedback
from fusedreduce.buckets.phases import Exchange
from fusedreduce.buckets.stats.non_finite import FiniteCheck
from fusedreduce.buckets.streams import Streams
from fusedreduce.comm import process_group
from fusedreduce.comm.process_group import ALL_GATHER, REDUCE_SCATTER, ProcessGroupCommunicator
from fusedreduce.comm.protocol import Pieces
from fusedreduce.errors import FusedReduceError
from fusedreduce.kernels import compile_time, counting, dispatch, encoded, table, variants
from fusedreduce.planning.layout import flat_layout
from fusedreduce.reducer.scheduler import Scheduler

IN_PHASES = [name for name, make in CASES.items() if make().ranks > 2]
# What asks whether an event has come: uploads of tables, of every case, and reports of what is not finite.
NEVER_COMES = [*IN_PHASES, "native", "observed", "raises", "planned", "one step late", "two steps late", "asynchronous"]
NEVER_COMES += ["scaled", "some unused", "lazy", "flushed", "hook int8"]

# Where wires, and the buffers of comm hooks, are allocated.
LAZY = ("bucket.py: buffer", "comm_hook.py: _allocated")


def fake_outline(patch: pytest.MonkeyPatch, name: str, **options: Any) -> list[tuple[str, str, int]]:
    """What a case does on stand-ins in its steady steps, with one rank."""
    cuda = FakeCuda(patch, ranks=1, **options)
    with cuda.recording():
        CASES[name]().run(cuda, cuda.device)
    return cuda.outline()


def _recorded(
    patch: pytest.MonkeyPatch, case: Case, plant: Callable[[pytest.MonkeyPatch], None] | None = None, **options: Any
) -> list[Entry]:
    """The trace of a case, whose model is on another device than the current one."""
    cuda = FakeCuda(patch, home=1, **{"ranks": case.ranks, **options})
    with cuda.recording():
        if plant is not None:
            plant(patch)
        case.run(cuda, cuda.device)
    return cuda.trace


def _through(door: str, net: nn.Module, config: Mapping[str, Any], cuda: FakeCuda) -> nn.Module:
    """`net` within our wrapper, or in torch's with our hook."""
    if door == "wrapper":
        return wrapped(net, config)
    with torch.cuda.device(cuda.device):
        state = FusedHookState(**config)
    model: Any = nn.parallel.DistributedDataParallel(net)
    model.register_comm_hook(state, cuda.comm_hook(fused_hook))
    return model  # type: ignore[no-any-return]


def _shown(found: list[Violation]) -> str:
    return "\n".join(map(str, found[:8]))


@functools.cache
def _trace(name: str, comes: bool) -> Sequence[Entry]:
    with pytest.MonkeyPatch.context() as patch:
        return _recorded(patch, CASES[name](), comes=comes)


@pytest.mark.parametrize(
    ("name", "comes"),
    [
        *[(name, True) for name in CASES],
        *[pytest.param(name, False, marks=[pytest.mark.full] * (name not in NEVER_COMES)) for name in CASES],
    ],
)
def test_every_way_in_is_ordered(name: str, comes: bool) -> None:
    case, trace = CASES[name](), _trace(name, comes)
    found = check(trace, case.permitted)
    assert not found, _shown(found)
    waits = {trace[one.entries[0]].where for one in check(trace)}
    assert waits == case.permitted.keys() or not comes, "what is permitted is needed"


@pytest.mark.parametrize("name", ["some unused", "some unused, late", "some unused, summed views"])
def test_parameters_that_no_rank_uses(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    case = CASES[name]()
    found = check(_recorded(monkeypatch, case, users=0), case.permitted)
    assert not found, _shown(found)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("lazy")])
def test_a_lazy_wire_may_be_given_out_as_soon_as_it_is_dropped(name: str) -> None:
    """The next forward is enqueued before the device has come so far: of what is kept for another stream than its
    own, which torch's allocator asks about only then, it gets nothing, and the wires add to the peak."""
    trace = _trace(name, True)
    steady = trace[next(index for index, entry in enumerate(trace) if entry.kind == "steady") :]
    numbers = {
        kind: {entry.number for entry in steady if entry.kind == kind and (kind != "allocate" or entry.where in LAZY)}
        for kind in ("allocate", "free", "keep")
    }
    assert numbers["allocate"] & numbers["free"]
    assert not numbers["allocate"] & numbers["keep"]


@pytest.mark.parametrize(("ranks", "per_node"), [(2, None), (4, None), (4, 2)])
def test_what_encodings_lose_is_measured_within_backward_without_waiting(
    monkeypatch: pytest.MonkeyPatch, ranks: int, per_node: int | None
) -> None:
    """It takes tables of its own, of fp32; only what ranks have found is waited for, before the next step."""
    MEASURE_EVERY.replace(monkeypatch, 1)
    config = {"wire": "int8", "least_sqnr_db": 10.0, "ranks_per_node": per_node}
    case = Case(config=config, ranks=ranks, permitted={"wire_schedule.py: _judge": "what ranks have found is read"})
    trace = _recorded(monkeypatch, case, comes=False)
    found = check(trace, case.permitted)
    assert not found, _shown(found)
    assert [entry for entry in trace if entry.kind == "block" and entry.where in case.permitted]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "config", [{}, {"grad_stats": True}, {"error_feedback": True}, {"stochastic_rounding": True}], ids=str
)
def test_what_measures_encodings_is_compiled_before_the_first_backward(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], dtype: torch.dtype
) -> None:
    """It rounds to nearest and owes nothing, whatever the steps do, and decodes to fp32."""
    MEASURE_EVERY.replace(monkeypatch, 1)
    encoded.warm_up.cache_clear()
    cuda, seen = FakeCuda(monkeypatch), set[str]()
    with cuda.recording():
        launch = variants.Variant.launch

        def noted(one: variants.Variant, *given: Any) -> None:
            seen.add(one.label)
            launch(one, *given)

        monkeypatch.setattr(variants.Variant, "launch", noted)
        net = layers().to(cuda.device, dtype)
        model = wrapped(net, {"wire": "int8", "least_sqnr_db": 10.0, **config})
        compiled = frozenset(seen)
        model(torch.randn(4, 16, dtype=dtype).to(cuda.device)).square().mean().backward()
        assert seen == compiled and "decode[int8, mixed]" in seen


def test_what_is_computed_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks with the same gradients train as one does."""
    torch.manual_seed(0)
    plain = layers()
    optimizer, batch = torch.optim.SGD(plain.parameters(), lr=0.1), torch.randn(4, 16)
    for _ in range(7):
        optimizer.zero_grad()
        step(plain, optimizer, batch)
    cuda = FakeCuda(monkeypatch)
    with cuda.recording():
        ours = CASES["native"]().run(cuda, cuda.device)
        assert {str(one.device) for one in ours.parameters()} == {"cuda:0"}
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


def test_what_ranks_gather_comes_in_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Into a list NCCL would copy row by row, on its stream, in every step."""
    trace = _recorded(monkeypatch, CASES["observed"](), ranks=4)
    gathers = [entry for entry in trace if entry.kind == "issue" and entry.what == process_group.ALL_GATHER]
    assert {entry.where for entry in gathers} == {"process_group.py: all_gather"}
    one_in_one_out = 2 * 2  # a collective counts as reading and writing each of its tensors
    assert {len(entry.accesses) for entry in gathers} == {one_in_one_out}


def test_kernels_are_compiled_once_and_where_this_process_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch has the host wait for uploads, and a plan of many buckets made two for each of them."""
    dispatch.warm_up.cache_clear()
    cuda = FakeCuda(monkeypatch, home=1)
    with cuda.recording(), counting.count_launches() as launches:
        FusedHookState(wire="bf16")
        assert not launches, "the current device is not the model's yet"
        with torch.cuda.device(cuda.device):
            FusedHookState(wire="bf16")
        assert launches
        for cap_mb in (1.0, 2.0**-20):
            launches.clear()
            for wire in ("native", "bf16"):
                wrapped(layers().to(cuda.device), {"wire": wire}, cap_mb=cap_mb)
            assert bool(launches) == (cap_mb == 1.0), "nothing that another plan's buckets would need is missing"


@pytest.mark.parametrize("door", ["wrapper", "hook"])
@pytest.mark.parametrize(
    "config",
    [
        {"wire": "native"},
        {"wire": "bf16", "accumulation": "fp32", "grad_stats": True},
        {"wire": "int8"},
        {"wire": "int8", "check_finite": "count"},
        {"wire": "int4", "ranks_per_node": 2, "grad_stats": True},
    ],
    ids=str,
)
def test_what_a_first_backward_launches_is_compiled_before_it(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], door: str
) -> None:
    """Not in the middle of backward, for which peers would wait in a collective; all parameters are encoded."""
    cuda = FakeCuda(monkeypatch, ranks=4)
    encoded.warm_up.cache_clear()
    with cuda.recording(), counting.count_launches() as launches:
        net = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(3)]).to(cuda.device)
        model = _through(door, net, config, cuda)
        loss = model(torch.randn(4, 64).to(cuda.device)).square().mean()
        compiled = {one.function for one in launches}
        launches.clear()
        loss.backward()
        assert {one.function for one in launches} <= compiled


@pytest.mark.parametrize(("door", "each_s"), [("wrapper", 0.1), ("wrapper", 1.7), ("hook", 1.7)])
def test_who_waits_long_for_kernels_to_compile_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, door: str, each_s: float
) -> None:
    """Once per rank: how long, where they are kept, and what makes the next start quick. Time is a stand-in's."""
    cuda = FakeCuda(monkeypatch, home=1)
    compiled: dict[str, float] = {}
    launch = variants.Variant.launch

    def compiling(one: variants.Variant, *given: Any) -> None:
        compiled[one.label] = each_s
        launch(one, *given)

    encoded.warm_up.cache_clear()
    compile_time.take()
    monkeypatch.setattr(compile_time, "_clock", lambda: sum(compiled.values()))
    monkeypatch.setenv("TRITON_CACHE_DIR", "/somewhere/kept")
    with cuda.recording():
        monkeypatch.setattr(variants.Variant, "launch", compiling)
        config = {"wire": "int8" if door == "wrapper" else "bf16", "grad_stats": True}
        model = _through(door, layers().to(cuda.device), config, cuda)
        for _ in range(2):
            model(torch.randn(4, 16).to(cuda.device)).square().mean().backward()
    told = [record for record in caplog.records if "compiling kernels" in record.message]
    assert len(compiled) >= 4
    if each_s * len(compiled) <= 5.0:
        assert not told
    else:
        (record,) = told
        assert record.levelname == "WARNING" and record.name.startswith("fusedreduce.")
        assert record.message.startswith(
            f"compiling kernels took {sum(compiled.values()):.1f} s. Triton keeps them in "
        )
        assert "/somewhere/kept" in record.message and "TRITON_CACHE_DIR" in record.message


_CANNOT_LAUNCH = [
    RuntimeError("Failed to find C compiler. Please specify via CC environment variable"),
    subprocess.CalledProcessError(1, ["gcc", "main.c"]),
    FileNotFoundError(2, "No such file or directory", "/sbin/ldconfig"),
    PermissionError(13, "Permission denied", "/home/someone/.triton"),
    AssertionError("libcuda.so cannot found!"),
    ImportError("cuda_utils.so: file too short"),
    PTXASError("ptxas fatal: Value 'sm_110' is not defined for option 'gpu-name'"),  # as other errors of triton's
]


@pytest.fixture
def cannot_launch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """CUDA on which Triton fails to launch, with that error."""
    cuda = FakeCuda(monkeypatch)

    def fail(*_: Any, **__: Any) -> None:
        raise request.param

    monkeypatch.setattr(cuda, "run_kernel", fail)
    with cuda.recording():
        yield cuda


@pytest.mark.parametrize("cannot_launch", _CANNOT_LAUNCH, indirect=True, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("door", ["wrapper", "hook"])
def test_where_triton_cannot_launch_training_goes_on_with_the_same_gradients(
    cannot_launch: FakeCuda, door: str, caplog: pytest.LogCaptureFixture
) -> None:
    """torch's DDP trains there too. Once it is said what to install."""
    torch.manual_seed(0)
    net, plain, batch = layers(), layers(), torch.randn(4, 16)
    plain.load_state_dict(net.state_dict())
    plain(batch).square().mean().backward()
    model = _through(door, net.to(cannot_launch.device), {"wire": "bf16"}, cannot_launch)
    model(batch.to(cannot_launch.device)).square().mean().backward()
    for one, other in zip(net.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        halves = (other.grad / 2).bfloat16().float()
        assert torch.equal(one.grad, (halves * 2).bfloat16().float())
    (said,) = [record.getMessage() for record in caplog.records if "torch operators take" in record.getMessage()]
    assert "apt-get install gcc python3-dev" in said


@pytest.mark.parametrize("cannot_launch", _CANNOT_LAUNCH[:1], indirect=True, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("door", ["wrapper", "hook"])
def test_where_triton_cannot_launch_nothing_is_encoded(cannot_launch: FakeCuda, door: str) -> None:
    """Every rank says so: to encode on the host would take seconds a step."""
    device = cannot_launch.device

    def begin() -> None:
        model = _through(door, layers().to(device), {"wire": "int8"}, cannot_launch)
        assert door == "hook", "the wrapper says so before the first step"
        model(torch.randn(4, 16).to(device)).square().mean().backward()

    with pytest.raises(FusedReduceError, match="cannot encode gradients: triton cannot launch a kernel"):
        begin()


def _callers(patch: pytest.MonkeyPatch, name: str) -> list[str]:
    """Who calls a function of torch.cuda from here on."""
    inner, callers = getattr(torch.cuda, name), list[str]()

    def called(*given: Any, **options: Any) -> Any:
        callers.append(sys._getframe(2 if name == "current_stream" else 1).f_code.co_qualname)  # behind our own of it
        return inner(*given, **options)

    patch.setattr(torch.cuda, name, called)
    return callers


@pytest.mark.parametrize("wire", ["native", "bf16"])
def test_what_a_steady_step_asks_of_cuda(monkeypatch: pytest.MonkeyPatch, wire: str) -> None:
    """No new event, and the current stream no more often than this: each costs the host some 1 us."""
    cuda = FakeCuda(monkeypatch)
    with cuda.recording():
        model = wrapped(layers().to(cuda.device), {"wire": wire})
        optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, 16).to(cuda.device)
        for _ in range(4):
            step(model, optimizer, batch)
        made, asked = _callers(monkeypatch, "Event"), _callers(monkeypatch, "current_stream")
        BUCKETS_LABEL.replace(monkeypatch, lambda *_: pytest.fail("a bucket's names are joined anew"))
        step(model, optimizer, batch)
        buckets = int(model.reduce_stats()["buckets"])
    assert not made
    ours = Counter(one for one in asked if one.startswith(("Streams.", "Bucket.", "PointerTable.")))
    per_step = {"Streams.wait_for_packs": 1, "Streams.beside": 1}
    once = ("Streams.wait_for_gradients", "Bucket.wire", "Bucket.unpacked")
    per_bucket = {**dict.fromkeys(once, 1), "PointerTable.launched": 2}
    assert buckets > 1
    assert ours == {**per_step, **{one: times * buckets for one, times in per_bucket.items()}}


def _waits_of_backward(trace: Sequence[Entry]) -> set[str]:
    """Who has a stream on which gradients are made wait, in a steady step, before the last of them is there."""
    steady = next(index for index, entry in enumerate(trace) if entry.kind == "steady")
    begins = [index for index, entry in enumerate(trace) if index > steady and entry.what == "operator ones_like"]
    found = set[str]()
    for begin, end in itertools.pairwise([*begins, len(trace)]):
        last = max(index for index in range(begin, end) if trace[index].what in ("operator mm", "operator sum"))
        streams = {entry.stream for entry in trace[begin:last] if entry.what == "operator mm"}
        waits = (entry for entry in trace[begin:last] if entry.kind == "wait" and entry.stream in streams)
        found |= {entry.where for entry in waits if entry.where}
    return found


# A bucket's last unpack, which the next step's pack is behind; gradients of other streams; weights of residuals.
_WAITS_BEFORE_PACKING = {"bucket.py: wire", "streams.py: wait_for_gradients", "feedback.py: before_encode"}


@pytest.mark.parametrize("name", IN_PHASES)
def test_backward_waits_for_no_phase(name: str) -> None:
    """Nor does the host, in the first step either: an upload aside would have it wait for other ranks."""
    trace = _trace(name, True)
    assert _waits_of_backward(trace) <= _WAITS_BEFORE_PACKING
    waits = [entry for entry in trace if entry.kind == "wait" and entry.what in ("all_to_all_single", REDUCE_SCATTER)]
    (aside,) = {entry.stream for entry in waits if entry.where == "process_group.py: wait"}
    assert not [entry for entry in trace if entry.kind in ("pageable", "block") and entry.stream == aside]


@pytest.mark.parametrize(
    ("name", "phases"),
    [
        ("int8 on four", 2),
        ("int4 with feedback on four", 2),
        ("bf16 added up in fp32", 2),
        ("int8 in two levels on eight", 4),
        ("hook int8 on four", 2),
        ("hook int8 in two levels", 3),
    ],
)
def test_later_phases_are_issued_as_further_buckets_are_launched(
    monkeypatch: pytest.MonkeyPatch, name: str, phases: int
) -> None:
    """Phase p of a bucket with the first phase of the p-th bucket behind it, and the rest with the last one."""
    started: list[Exchange] = []
    issued: list[tuple[int, int]] = []
    init, begin_next = EXCHANGE_IS_MADE.present, EXCHANGE_GOES_ON.present

    def made(self: Exchange, *given: Any) -> None:
        init(self, *given)
        started.append(self)

    def begin(self: Exchange, communicator: Any) -> None:
        assert torch._C._current_autograd_node() is not None, "not at the end of backward"
        issued.append((started.index(self), len(self.issued)))
        begin_next(self, communicator)

    EXCHANGE_IS_MADE.replace(monkeypatch, made)
    EXCHANGE_GOES_ON.replace(monkeypatch, begin)
    _recorded(monkeypatch, CASES[name]())
    steps = [range(1), *(range(first, first + 4) for first in range(1, 25, 4))]  # the first has one bucket
    assert issued == [
        one
        for buckets in steps
        for one in sorted(itertools.product(buckets, range(phases)), key=lambda each: (sum(each), each[1]))
    ]


@pytest.mark.parametrize("name", AGREED)
def test_a_gpus_trace_has_something_to_agree_with(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The outline with which a GPU's is compared is the same in every run, whatever queries say."""
    outlines = []
    for comes in (True, False):
        with monkeypatch.context() as patch:
            outlines.append(fake_outline(patch, name, comes=comes))
    assert outlines[0] == outlines[1]
    assert {kind for kind, _, _ in outlines[0]} >= {"work", "record", "wait", "issue"}


# Faults


class Fault(NamedTuple):
    """Something taken out of the package.

    Args:
        plant: takes it out.
        case: where that shows.
        rule: that is broken.
        said: in a sentence about it.
    """

    plant: Callable[[pytest.MonkeyPatch], None]
    case: str
    rule: Rule
    said: tuple[str, ...]


def _without(owner: Any, name: str) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(owner, name, lambda *_, **__: None)


def _beside(*, waits: bool, joins: bool) -> Callable[[pytest.MonkeyPatch], None]:
    """The side stream without one of its waits."""

    @contextlib.contextmanager
    def beside(self: Streams, device: torch.device) -> Iterator[Callable[[int], torch.cuda.Event]]:
        side = self._side.setdefault(device, torch.cuda.Stream(device))
        current = torch.cuda.current_stream(device)
        if waits:
            side.wait_stream(current)
        with torch.cuda.stream(side):
            yield lambda _: side.record_event()
        if joins:
            current.wait_stream(side)

    return lambda patch: UNPACKS_BESIDE.replace(patch, beside)


def _ended_on_the_host(patch: pytest.MonkeyPatch) -> None:
    """A future of several collectives as `collect_all` makes it, which has no devices."""
    patch.setattr(
        Pieces,
        "future",
        lambda self: torch.futures.collect_all([one.future() for one in self._pieces]).then(lambda _: list[Any]()),
    )


def _waits_for_nothing(patch: pytest.MonkeyPatch) -> None:
    """What is waited for is taken as it is: check_finite's exchange."""
    inner = FINITE_CHECK_ENDS.present

    def complete(self: FiniteCheck, started: Any) -> None:
        inner(self, (FakeWork([]), started[1]))

    FINITE_CHECK_ENDS.replace(patch, complete)


def _first_record_only(patch: pytest.MonkeyPatch) -> None:
    """A table's event is recorded by the first launch that reads it, and not by later ones."""

    def launched(self: table.PointerTable) -> None:
        current = self._current
        if current is not None and not current.readers:
            stream = torch.cuda.current_stream(current.device.device)
            current.readers[stream.cuda_stream] = stream.record_event()

    patch.setattr(table.PointerTable, "launched", launched)
    patch.setattr(table, "GENERATIONS", 1)  # so that these few steps fill one again


def _on_the_current_device(patch: pytest.MonkeyPatch) -> None:
    """Events are recorded where the current device is, whatever stream was named."""
    inner: Any = torch.cuda.Event.record
    patch.setattr(torch.cuda.Event, "record", lambda self, stream=None: inner(self))


def _blocking(patch: pytest.MonkeyPatch) -> None:
    inner: Any = torch.Tensor.copy_
    patch.setattr(torch.Tensor, "copy_", lambda self, source, non_blocking=False: inner(self, source))


def _counted_in_one_place(patch: pytest.MonkeyPatch) -> None:
    """Residuals of parameters and of sums, which are dropped on two streams."""
    inner = RESIDUALS_ARE_DROPPED.present

    def drop(self: BucketFeedback, copies: Any, values: Any, divisor: float, dropped: torch.Tensor) -> None:
        inner(self, copies, values, divisor, self._state.dropped[:1])

    RESIDUALS_ARE_DROPPED.replace(patch, drop)


def _host_waits(patch: pytest.MonkeyPatch) -> None:
    inner = WAITS_FOR_PACKS.present

    def wait_for_packs(self: Streams) -> None:
        inner(self)
        torch.cuda.current_stream().synchronize()

    WAITS_FOR_PACKS.replace(patch, wait_for_packs)


def _gradients_dropped(patch: pytest.MonkeyPatch) -> None:
    """A table of addresses is not uploaded anew when a gradient has moved."""
    patch.setattr(table.Upload, "serves", lambda self, addresses, device: True)


FAULTS: Mapping[str, Fault] = {
    "unpack does not wait for a user's reader": Fault(
        _beside(waits=False, joins=True), "watched", "order", ("unpack", "linalg_vector_norm")
    ),
    "unpack into a gradient of later": Fault(
        _beside(waits=False, joins=True), "one step late", "order", ("unpack", "operator mm")
    ),
    "nothing waits for unpack": Fault(_beside(waits=True, joins=False), "native", "order", ("_foreach_add_", "unpack")),
    "a gradient is freed under unpack": Fault(
        _beside(waits=True, joins=False), "native", "reuse", ("was freed", "unpack")
    ),
    "pack does not wait for other streams' gradients": Fault(
        _without(Streams, "wait_for_gradients"), "streams", "order", ("pack", "operator mm")
    ),
    "by-products are read before the packs of other streams": Fault(
        _without(Streams, "wait_for_packs"), "streams", "order", ("parameter_sources", "pack")
    ),
    "a collective is not waited for": Fault(
        lambda patch: patch.setattr(process_group.Work, "wait", lambda self: None),
        "bf16",
        "order",
        ("unpack", "all_reduce"),
    ),
    "contributions are added up before they have come": Fault(
        lambda patch: patch.setattr(process_group.Work, "wait", lambda self: None),
        "int8 on four",
        "order",
        ("combine_encoded", "all_to_all_single"),
    ),
    "what is added up aside is counted where packs count": Fault(
        _counted_in_one_place, "int4 with feedback on four", "order", ("operator add_", "feedback.py: _drop")
    ),
    "a future of several collectives orders nothing": Fault(
        _ended_on_the_host, "hook int8", "order", ("decode", ALL_GATHER)
    ),
    "a small collective is not waited for": Fault(_waits_for_nothing, "observed", "order", ("copy", "all_gather")),
    "a plan's numbers are not waited for": Fault(
        _without(Scheduler, "complete"), "planned", "order", ("scheduler.py: decide", "all_reduce")
    ),
    "a table is filled under its reader": Fault(
        lambda patch: patch.setattr(table.Upload, "unread", lambda self: True),
        "native",
        "order",
        ("_uploaded", "on the host"),
    ),
    "an event's first record is taken for its last": Fault(
        _first_record_only, "native", "order", ("_uploaded", "on the host")
    ),
    "addresses of freed gradients": Fault(_gradients_dropped, "native", "reuse", ("has been freed", "pack")),
    "events on the current device": Fault(_on_the_current_device, "native", "order", ("_foreach_add_", "unpack")),
    "the event of a copy to the host on the current device": Fault(
        _on_the_current_device,
        "flushed",
        "order",
        ("Tensor.tolist (non_finite.py: _report)", "non_finite.py: end_step"),
    ),
    "a launch on the current device": Fault(
        lambda patch: patch.setattr(variants, "_launch_on", lambda device: contextlib.nullcontext()),
        "measured",
        "device",
        ("measure", "is on cuda:1", "of cuda:0"),
    ),
    "a pageable copy": Fault(
        lambda patch: patch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone),
        "native",
        "pageable copy",
        ("table.py: _uploaded",),
    ),
    "a blocking copy": Fault(_blocking, "observed", "host wait", ("non_finite.py: end_step",)),
    "a wait of the host's": Fault(_host_waits, "native", "host wait", ("Stream.synchronize",)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fault = FAULTS[name]
    found = check(_recorded(monkeypatch, CASES[fault.case](), fault.plant))
    fitting = [one for one in found if one.rule == fault.rule and all(word in one.sentence for word in fault.said)]
    assert fitting, _shown(found)


def _two_streams_in_turns(cuda: FakeCuda) -> list[Violation]:
    """A bucket that is packed on one stream and unpacked on another, which nobody joins: its own event orders them."""
    packs, unpacks = torch.cuda.Stream(cuda.device), torch.cuda.Stream(cuda.device)
    with torch.cuda.stream(packs):
        gradient = torch.randn(64, device=cuda.device)
        bucket = Bucket(flat_layout(64), [gradient.dtype], torch.bfloat16, cuda.device, "a bucket")
        data_path.prepare(bucket)
        for _ in range(3):
            in_flight = data_path.start(bucket, [gradient], ProcessGroupCommunicator(), divisor=1.0)
            with torch.cuda.stream(unpacks):
                in_flight.pending.wait()
                data_path.finish(in_flight)
    return check(cuda.trace)


@pytest.mark.parametrize("forgets", [False, True])
def test_a_wire_is_not_packed_before_it_is_unpacked(monkeypatch: pytest.MonkeyPatch, forgets: bool) -> None:
    cuda = FakeCuda(monkeypatch)
    if forgets:
        BUCKET_IS_UNPACKED.replace(monkeypatch, lambda self: None)
    with cuda.recording():
        found = _two_streams_in_turns(cuda)
    packed_too_early = [one for one in found if "pack[" in one.sentence and "unpack[" in one.sentence]
    assert bool(packed_too_early) == forgets, _shown(found)
    assert forgets or not found, _shown(found)


# Steps of other kinds


def test_wrappers_that_share_a_loss_scaler_may_end_their_steps_on_two_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """What removes the scale is not made on one and read on the other."""
    cuda = FakeCuda(monkeypatch, home=1)
    with cuda.recording():
        models = [wrapped(layers().to(cuda.device), {"wire": "bf16"}) for _ in range(2)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, fused=True) for model in models]
        batch = torch.randn(4, 16).to(cuda.device)
        scaler = FusedGradScaler(models)
        main, streams = cuda.home_stream(), [torch.cuda.Stream(cuda.device) for _ in models]
        for _ in range(4):
            losses = [scaler.scale(model(batch).square().mean()) for model in models]
            for stream in streams:
                stream.wait_stream(main)
            kept = []  # gradients are memory of the stream of their parameters
            for loss, optimizer, model, stream in zip(losses, optimizers, models, streams, strict=True):
                with torch.cuda.stream(stream):
                    loss.backward()
                    scaler.step(optimizer)
                kept += [one.grad for one in model.parameters()]
                optimizer.zero_grad()
            for stream in streams:
                main.wait_stream(stream)
            kept.clear()
            scaler.update()
    found = check(cuda.trace)
    assert not found, _shown(found)


@pytest.mark.parametrize(
    ("config", "ranks"),
    [
        ({"wire": "int8"}, 4),
        ({"wire": "int8", "ranks_per_node": 2}, 8),
        ({"wire": "bf16", "accumulation": "fp32"}, 4),
        ({"wire": "int4", "error_feedback": True, "stochastic_rounding": True}, 4),
    ],
)
def test_a_rank_without_inputs_issues_the_same(
    monkeypatch: pytest.MonkeyPatch, config: Mapping[str, Any], ranks: int
) -> None:
    """In join: phases among them."""
    cuda, begins = FakeCuda(monkeypatch, home=1, ranks=ranks), list[int]()
    with cuda.recording():
        model = wrapped(layers().to(cuda.device), config, cap_mb=ONE_WEIGHT_MB)
        reducer: Any = model.reducer
        optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, 16).to(cuda.device)
        for _ in range(3):
            begins.append(len(cuda.trace))
            step(model, optimizer, batch)
            begins.append(len(cuda.trace))
            shadow_step(reducer.reducer)
        trace = cuda.trace
    found = check(trace)
    assert not found, _shown(found)
    *_, ours, theirs = (
        [entry.what for entry in trace[begin:end] if entry.kind == "issue"]
        for begin, end in itertools.pairwise([*begins, len(trace)])
    )
    assert ours == theirs and len(ours) >= 8


def _fail(model: nn.Module, batch: torch.Tensor) -> None:
    """A backward that a hook ends when all but the last bucket are launched."""
    first, *_ = model.parameters()
    with first.register_hook(boom), pytest.raises(ZeroDivisionError):
        model(batch).square().mean().backward()


def _given_up(cuda: FakeCuda, leave: Callable[[DistributedDataParallel], object]) -> list[Violation]:
    """Memory that phases still use is not given out again, whatever becomes of a model whose backward has failed."""
    model = wrapped(layers().to(cuda.device), {"wire": "int8"}, cap_mb=ONE_WEIGHT_MB)
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, 16).to(cuda.device)
    for _ in range(2):
        step(model, optimizer, batch)
    _fail(model, batch)
    optimizer.zero_grad()
    leave(model)
    torch.empty(1 << 10, device=cuda.device)
    del model, optimizer
    gc.collect()
    torch.empty(1 << 10, device=cuda.device)
    return check(cuda.trace)


@pytest.mark.parametrize("joins", [True, False])
@pytest.mark.parametrize(
    "leave",
    [
        pytest.param(lambda model: model.reset(), id="reset"),
        pytest.param(lambda model: model.reducer.reducer.close(), id="closed"),
        pytest.param(lambda model: model._update_process_group(dist.group.WORLD), id="other ranks"),
        pytest.param(lambda model: None, id="dropped"),
    ],
)
def test_memory_of_a_step_that_is_given_up(
    monkeypatch: pytest.MonkeyPatch, leave: Callable[[DistributedDataParallel], object], joins: bool
) -> None:
    cuda = FakeCuda(monkeypatch, home=1, ranks=4)
    if not joins:
        LATER_PHASES_JOIN.replace(monkeypatch, lambda self: None)
    with cuda.recording():
        found = _given_up(cuda, leave)
    early = [one for one in found if one.rule == "reuse" and "combine_encoded" in one.sentence]
    assert bool(early) != joins, _shown(found)
    assert not joins or not found, _shown(found)


@pytest.mark.parametrize("config", [{"wire": "int8"}, {"wire": "bf16", "accumulation": "fp32"}], ids=["int8", "bf16"])
def test_reset_compares_ranks_before_a_stream_waits_for_what_a_peer_may_not_have_issued(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]
) -> None:
    """A peer has raised before its second all-to-all, this rank after its third, so that a side stream waits for ever.
    Uploads of new tables would have the host wait for that stream, and peers for this rank.
    """
    cuda = FakeCuda(monkeypatch, home=1, ranks=4, comes=False)
    with cuda.recording():
        model = wrapped(layers().to(cuda.device), config, cap_mb=ONE_WEIGHT_MB)
        optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, 16).to(cuda.device)
        for _ in range(2):
            step(model, optimizer, batch)
            optimizer.zero_grad()
        begun = len(cuda.trace)
        _fail(model, batch)
        issued = [one.number for one in cuda.trace[begun:] if one.what == "all_to_all_single" and one.kind == "issue"]
        assert len(issued) == 3

        def compare(_: object, prefix: str, key: str, text: str, device: torch.device) -> list[str]:
            return [text, *[f"1 {text.partition(' ')[2]}"] * 3]

        TEXTS_ARE_COMPARED.replace(monkeypatch, compare)
        with pytest.raises(FusedReduceError, match="different numbers"):
            model.reset()
    assert not _host_waits_for(cuda.trace, issued[1])


def _host_waits_for(trace: Sequence[Entry], collective: int) -> list[str]:
    """Waits of the host that never end if a collective does not."""
    stuck, without_end, found = set(), set[int](), []
    for one in trace:
        if one.kind == "issue":
            if one.number == collective or one.stream in stuck or one.beside in stuck:
                without_end.add(one.number)
                stuck.add(one.beside)
        elif one.kind == "record":
            (without_end.add if one.stream in stuck else without_end.discard)(one.number)
        elif one.kind == "wait" and one.number in without_end:
            stuck.add(one.stream)
        elif one.kind in ("block", "pageable") and (one.number in without_end or one.stream in stuck):
            found.append(str(one))
    return found
