"""Stage 6: what only shows between streams, in CUDA graphs, and between processes.

streams       gradients made late on two side streams: packs must wait for both; without that wait it must fail
graphs        pack and unpack captured and replayed on other values; tables uploaded before the capture, and in it
two ranks     two processes on one GPU, sums through the host by Gloo: steps equal on both and to a reference, and
              unpacking as the planner measures it; and the wrapper's refusal of Gloo with CUDA tensors, in words
conformance   some of torch's own DDP tests on this torch: on CPU, over Gloo
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import harness
import torch
import torch.distributed as dist
from exact_cases import same
from host_sums import HostSums
from records import CHECKOUT, BenchError
from stage import Skipped, Stage, entry, run_parts, synchronize
from torch import nn

import fusedreduce
from fusedreduce.buckets import streams
from fusedreduce.config import Wire
from fusedreduce.kernels import dispatch
from fusedreduce.kernels.table import ChunkTable, PointerTable
from fusedreduce.planning.bucketing import BucketCaps

SLOW_CYCLES = 20_000_000  # 10 ms and more
WIDTH = 256
STEPS = 10
# Costs are agreed on between the 13th and the 14th.
PLANNED_STEPS = 15
# Of kernels that take us, launched by a busy host; the wait for the end of backward, which is not theirs, takes more.
MOST_UNPACK_MS = 1.0
CONFORMANCE = (
    "test_DistributedDataParallel_requires_grad",
    "test_DistributedDataParallel_non_default_stream",
    "test_ddp_buffer_hook_allreduce",
    "test_ddp_comm_hook_logging",
    "test_ddp_device_mesh_initialization",
    "test_ddp_get_bucket_sizes",
    "test_ddp_grad_div_uneven_inputs",
    "test_ddp_multiple_nested_unused_params_error",
    "test_ddp_namedtuple",
    "test_ddp_new_tensor_in_fwd",
    "test_ddp_shared_grad_acc_unused_params",
    "test_ddp_static_graph_nested_types",
    "test_ddp_unused_params_rebuild_buckets_exception",
    "test_invalid_static_graph",
    "test_static_graph_api_cpu",
)
REHEARSED_CONFORMANCE = ("test_static_graph_api_cpu",)
LEAST_PASSED = 5


def run(stage: Stage) -> None:
    with tempfile.TemporaryDirectory() as folder:
        conformance = Conformance(stage, Path(folder))
        parts: Mapping[str, Callable[[Stage], None]] = {
            "side streams": side_streams,
            "graphs": graphs,
            "graphs that upload": graphs_that_upload,
            "two ranks": two_ranks,
            "refusal of Gloo": refusal,
            "conformance": conformance.judge,
        }
        try:
            run_parts(stage, {name: (0.0, part) for name, part in parts.items()})
        finally:
            conformance.end()


# Streams


class _Slow(torch.autograd.Function):
    """Its backward keeps the stream of its forward waiting."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, cycles: int) -> torch.Tensor:
        ctx.cycles, ctx.stream = cycles, torch.cuda.current_stream()
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        with torch.cuda.stream(ctx.stream):  # autograd has made it current already
            torch.cuda._sleep(ctx.cycles)
        return gradients[0], None


class Branches(nn.Module):
    """Two halves of one bucket, run forward, and so backward, on a stream each.

    A gradient is accumulated on the stream that was current when its AccumulateGrad node was made, wherever it comes
    from. A wrapper makes the nodes that nobody holds, and keeps all of them: made by it, they would all have one
    stream. So they are made here, each under its branch's stream, and held.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(WIDTH, WIDTH, device=device) for _ in range(2))
        self.cycles = [0, 0]
        self.streams = [torch.cuda.Stream(device), torch.cuda.Stream(device)]
        self._nodes: list[object] = []
        for layer, stream in zip((self.first, self.second), self.streams, strict=True):
            with torch.cuda.stream(stream):
                functions = [parameter.view_as(parameter).grad_fn for parameter in layer.parameters()]
                self._nodes += [function.next_functions[0][0] for function in functions if function is not None]

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        current = torch.cuda.current_stream()
        parts = []
        for layer, stream, cycles in zip((self.first, self.second), self.streams, self.cycles, strict=True):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                parts.append(_Slow.apply(layer(features), cycles))
        for stream in self.streams:
            current.wait_stream(stream)
        return torch.tanh(parts[0]) * torch.tanh(parts[1])


def side_streams(stage: Stage) -> None:
    """Averaged gradients are the local ones, rounded to the wire, however late each stream is."""
    if stage.device.type != "cuda":
        raise Skipped("needs a GPU")
    with tempfile.TemporaryDirectory() as folder:
        harness.begin(0, 1, folder, "nccl", "cuda")
        try:
            wrong = late_steps(stage.device)
            if wrong:
                raise BenchError(f"{wrong} of {STEPS} steps packed gradients that were not there yet")
            kept = streams.Streams.wait_for_gradients
            # mypy cannot know that this is put back.
            streams.Streams.wait_for_gradients = lambda *_: None  # type: ignore[method-assign]
            try:
                control = late_steps(stage.device)
            finally:
                streams.Streams.wait_for_gradients = kept  # type: ignore[method-assign]
            stage.note(late_steps=STEPS, wrong_without_waiting=control)
            # The bucket is packed behind the gradient that comes last, on that one's stream: where the other stream is
            # the late one, in every second step, what is packed is not there yet.
            stage.at_least("steps that are wrong without waiting for other streams", float(control), 1.0)
        finally:
            synchronize(stage.device)
            dist.destroy_process_group()


def late_steps(device: torch.device, wire: Wire = "bf16", views: bool = False) -> int:
    """How many of STEPS steps were wrong, each with one of two streams late."""
    torch.manual_seed(0)
    model = Branches(device)
    config = fusedreduce.ReduceConfig(wire=wire)
    ddp = fusedreduce.DistributedDataParallel(model, gradient_as_bucket_view=views, reduce=config)
    sent = {"native": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[wire]
    wrong = 0
    for step in range(STEPS):
        batch = torch.randn(32, WIDTH, device=device)
        model.cycles = [0, 0]
        ddp.zero_grad()
        with ddp.no_sync():
            ddp(batch).square().mean().backward()
        local = [one.grad.clone() for one in model.parameters() if one.grad is not None]
        for one in model.parameters():
            # A gradient that is packed too early is what its memory held before: not the very same gradient, please.
            assert one.grad is not None
            one.grad.fill_(float("nan"))
        torch.cuda.synchronize(device)
        # Each stream is the late one in turn.
        model.cycles = [SLOW_CYCLES, 0] if step % 2 else [0, SLOW_CYCLES]
        ddp.zero_grad()
        ddp(batch).square().mean().backward()
        averaged = [one.grad.clone() for one in model.parameters() if one.grad is not None]
        torch.cuda.synchronize(device)
        rounded = [one.to(sent).float() for one in local]
        wrong += not all(torch.equal(ours, mine) for ours, mine in zip(averaged, rounded, strict=True))
    return wrong


# Graphs


class _Walk:
    """Gradients of all dtypes and alignments, a wire, and pack and unpack over them."""

    def __init__(self, device: torch.device) -> None:
        numels = (1, 7, 1000, 100_003, 4096)
        kinds = (torch.float32, torch.bfloat16, torch.float16, torch.float32, torch.float32)
        rooms = [torch.zeros(numel + 5, dtype=kind, device=device) for numel, kind in zip(numels, kinds, strict=True)]
        self.gradients = [room[shift:][:numel] for room, shift, numel in zip(rooms, range(5), numels, strict=True)]
        offsets, end = [], 0
        for numel in numels:
            offsets.append(end)
            end += -(-numel // 64) * 64
        self.chunks = ChunkTable(numels, offsets, kinds, end)
        self.chunks.on(device)
        self.wire = torch.zeros(end, dtype=torch.bfloat16, device=device)
        self.scale = torch.tensor([0.7], device=device)
        self.pointers = PointerTable()
        self._offsets, self._seed = offsets, 0

    def fill(self) -> None:
        """Other values, in the same places."""
        self._seed += 1
        generator = torch.Generator(self.wire.device).manual_seed(self._seed)
        for gradient in self.gradients:
            gradient.copy_(torch.randn(gradient.numel(), generator=generator, device=gradient.device))
        self.wire.fill_(float("nan"))

    def run(self) -> None:
        dispatch.pack(self.gradients, self.chunks, self.pointers, self.wire, 2.0)
        dispatch.unpack(self.gradients, self.chunks, self.pointers, self.wire, self.scale)

    def check(self, given: list[torch.Tensor], what: str) -> None:
        """Raises BenchError unless `given` was packed and unpacked."""
        for slot, (gradient, before, offset) in enumerate(zip(self.gradients, given, self._offsets, strict=True)):
            wire = (before.float() / 2.0).bfloat16()
            same(f"{what}, wire of slot {slot}", self.wire[offset : offset + before.numel()], wire)
            same(f"{what}, gradient {slot}", gradient, (wire.float() * self.scale).to(gradient.dtype))


def graphs(stage: Stage) -> None:
    """A captured pack and unpack does its work at every replay."""
    _replayed(stage, uploaded=True)


def graphs_that_upload(stage: Stage) -> None:
    """So does one whose addresses are uploaded within the capture."""
    _replayed(stage, uploaded=False)


def _replayed(stage: Stage, *, uploaded: bool) -> None:
    if stage.device.type != "cuda":
        walk = _Walk(stage.device)
        walk.fill()
        given = [one.clone() for one in walk.gradients]
        walk.run()
        walk.check(given, "pack and unpack")
        raise Skipped("needs a GPU")
    walk = _Walk(stage.device)
    side = torch.cuda.Stream(stage.device)
    side.wait_stream(torch.cuda.current_stream(stage.device))
    with torch.cuda.stream(side):
        walk.fill()
        walk.run()  # compiles
    torch.cuda.synchronize(stage.device)
    if not uploaded:
        walk.pointers = PointerTable()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        walk.run()
    for replay in range(5):
        walk.fill()
        given = [one.clone() for one in walk.gradients]
        graph.replay()
        torch.cuda.synchronize(stage.device)
        walk.check(given, f"replay {replay}")
        if replay == 2:
            # Memory of tables that a capture has let go of would be taken by these.
            junk = [torch.full((64,), -1, dtype=torch.int64, device=stage.device) for _ in range(256)]
            del junk
    stage.note(**{"replays_uploaded_before" if uploaded else "replays_uploaded_in_capture": 5})


# Two ranks


def two_ranks(stage: Stage) -> None:
    """Training on two ranks that share the GPU, bit for bit; what the planner takes for unpacking is no waiting."""
    results = harness.run_ranks(_train, 2, stage.device.type, PLANNED_STEPS)
    if results[0]["weights"] != results[1]["weights"]:
        step = next(
            n for n, pair in enumerate(zip(*(one["weights"] for one in results), strict=True)) if len({*pair}) > 1
        )
        raise BenchError(f"weights of the ranks differ after step {step}")
    if stage.device.type == "cuda" and {one["path"] for one in results} != {"triton"}:
        raise BenchError("the ranks did not use the compiled kernels")
    unpack_ms = results[0]["unpack_ms"]
    if stage.device.type == "cuda" and unpack_ms >= MOST_UNPACK_MS:
        raise BenchError(f"the planner takes unpacking the largest bucket for {unpack_ms:.3f} ms of work")
    stage.note(
        two_ranks={
            "steps": len(results[0]["weights"]),
            "sums": results[0]["sums"],
            "unpack_ms": unpack_ms,
            "through": "the host, Gloo",
        }
    )


def _train(rank: int, world: int, folder: str, device_type: str, steps: int) -> NoReturn:
    """One rank: ours, and beside it the same model with gradients averaged by the definition."""
    device = harness.begin(rank, world, folder, "gloo", device_type)
    ours, plain = (_mlp().to(device) for _ in range(2))
    plain.load_state_dict(ours.state_dict())
    sums = HostSums()
    config = fusedreduce.ReduceConfig(wire="bf16", grad_stats=True)
    caps = BucketCaps(first_bytes=2**18, cap_bytes=2**19)
    digests = []
    with fusedreduce.Reducer(ours.parameters(), sums, config, caps=caps) as reducer:
        optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True) for model in (ours, plain)]
        for step in range(steps):
            generator = torch.Generator().manual_seed(100 * step + rank)
            batch = torch.randn(16, WIDTH, generator=generator).to(device)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = ours(batch).square().mean()
            reducer.prepare_for_backward(loss)
            loss.backward()
            plain(batch).square().mean().backward()
            for number, (one, other) in enumerate(zip(ours.parameters(), plain.parameters(), strict=True)):
                assert one.grad is not None and other.grad is not None
                wire = (other.grad.float() / world).bfloat16().cpu()
                dist.all_reduce(wire)
                other.grad.copy_(wire.float())
                same(f"rank {rank}, step {step}, gradient {number}", one.grad.reshape(-1), other.grad.reshape(-1))
            for optimizer in optimizers:
                optimizer.step()
            digests.append(_digest(ours))
            if digests[-1] != _digest(plain):
                raise BenchError(f"rank {rank}: weights differ from the reference's after step {step}")
        path = str(reducer.stats()["path"])
        schedule = reducer._plans.scheduler.schedule
        if schedule.costs is None:
            raise BenchError(f"rank {rank}: no costs were agreed on in {steps} steps")
        sizes = [sum(schedule.model.wire_bytes[number] for number in members) for members in reducer.plan]
        unpack_ms = schedule.costs.unpack.fs(max(sizes)) / 1e12
    harness.finish(rank, folder, {"weights": digests, "sums": sums.sums, "path": path, "unpack_ms": unpack_ms})


def _mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])


def _digest(model: nn.Module) -> str:
    data = b"".join(one.detach().cpu().numpy().tobytes() for one in model.parameters())
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def refusal(stage: Stage) -> None:
    """Over Gloo with CUDA tensors the wrapper must say on both ranks what is the matter."""
    if stage.device.type != "cuda":
        raise Skipped("needs a GPU")
    said = harness.run_ranks(_refused, 2, stage.device.type)
    if not all(re.search(r"UnsupportedWireError: .*gloo", text) for text in said):
        raise BenchError(f"the wrapper over Gloo on CUDA gave {said}")
    stage.note(refusal=said[0])


def _refused(rank: int, world: int, folder: str, device_type: str) -> NoReturn:
    device = harness.begin(rank, world, folder, "gloo", device_type)
    text = "nothing: it went through"
    try:
        ddp = fusedreduce.DistributedDataParallel(_mlp().to(device))
        ddp(torch.randn(4, WIDTH, device=device)).sum().backward()
    except fusedreduce.FusedReduceError as error:
        text = f"{type(error).__name__}: {error}"
    except Exception as error:
        text = f"{type(error).__name__}, which is none of ours: {error}"
    harness.finish(rank, folder, text)


# Conformance


class Conformance:
    """torch's own tests, run beside the other parts: they keep CPU cores busy, and the GPU idle."""

    def __init__(self, stage: Stage, folder: Path) -> None:
        tests = REHEARSED_CONFORMANCE if stage.rehearse else CONFORMANCE
        environment = dict(os.environ)
        self._stands_in = importlib.util.find_spec("expecttest") is None
        if self._stands_in:
            stand_ins = str(Path(__file__).resolve().parent / "stand_ins")
            environment["PYTHONPATH"] = os.pathsep.join([stand_ins, environment.get("PYTHONPATH", "")])
        jobs = max(1, min(8, len(os.sched_getaffinity(0)) // 2))
        self._log = folder / "log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, str(CHECKOUT / "tests" / "conformance" / "run.py")),
                    *("--tests", "|".join(f"^{test}$" for test in tests)),
                    *("--jobs", str(jobs), "--limit", "20", "--out", str(folder / "out")),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
            )
        stage.note(conformance_tests=len(tests), conformance_jobs=jobs, expecttest_stand_in=self._stands_in)

    def judge(self, stage: Stage) -> None:
        """Waits for the tests as long as there is time."""
        try:
            status: int | None = self._process.wait(timeout=max(1.0, stage.left_s() - 4))
        except subprocess.TimeoutExpired:
            status = None
            self.end()
        text = self._log.read_text()
        print(text, flush=True)
        rows = [line for line in text.splitlines() if re.search(r"\btest_\w+", line)]
        last = text.strip().splitlines()[-1] if text.strip() else "it said nothing"
        stage.note(conformance=last if status is not None else f"stopped for lack of time after {len(rows)} rows")
        if status is None:
            raise Skipped(f"stopped for lack of time after {len(rows)} rows")
        if status != 0:
            wrong = next((line for line in text.splitlines() if line.startswith("FAULT")), last)
            raise BenchError(f"exit status {status}: {wrong}")
        passed = re.search(r"ours (\d+), torch (\d+)", last)
        if passed is None:
            raise BenchError(f"its last line is {last!r}")
        stage.at_least(
            "conformance tests (on CPU, over Gloo) that ours passes", float(passed[1]), float(passed[2]), " of torch's"
        )
        if not stage.rehearse and int(passed[1]) < LEAST_PASSED:
            raise BenchError(f"only {passed[1]} tests were asked of ours")

    def end(self) -> None:
        """Stops what still runs; its signal handler ends the tests."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout=3)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


if __name__ == "__main__":
    entry(run)
