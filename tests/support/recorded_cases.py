"""The cells of the record: door x wire x sync mode x situation. A situation is a function of a `Rank`."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fusedreduce
from fusedreduce import Asynchronous, BoundedStaleness, BucketCaps, FusedHookState, ReduceConfig, Reducer, Synchronous
from fusedreduce.comm.local.group import LocalCommunicator
from fusedreduce.config import SyncMode
from fusedreduce.parallel.wrapper_reducer import find_reducer
from support.inside import inside
from support.leaf_steps import averaging, given, shadow_step
from support.recorded import RANKS, Ranks, digest, drawn

# By wire, from none to all of them are encoded; several buckets, of several parameters.
SHAPES = ((3,), (5, 7), (1,), (3, 100), (40,), (4, 65), (2, 33))
CAP_BYTES = 1300
TABLE = (10, 3)
DOORS = ("reducer", "wrapper", "hook")
MODES: Mapping[str, SyncMode] = {
    "synchronous": Synchronous(),
    "stale": BoundedStaleness(1),
    "asynchronous": Asynchronous(2),
}
WIRES: Mapping[str, Mapping[str, Any]] = {
    "native": {},
    "bf16": {"wire": "bf16"},
    "fp16": {"wire": "fp16"},
    "int8": {"wire": "int8"},
    "int4": {"wire": "int4"},
    "bf16+fp32": {"wire": "bf16", "accumulation": "fp32"},
    "int8 stochastic": {"wire": "int8", "stochastic_rounding": True, "seed": 7},
    "int4 feedback": {"wire": "int4", "error_feedback": True},
    "int4 after 2": {"wire": "int4", "wire_after": 2},
    "by name": {"wire": {"*.3": "int8", "*.5": "int4", "*.1": "bf16"}},
}
PLAIN_WIRES = ("native", "bf16", "fp16")
HOOK_WIRES = ("native", "bf16", "fp16", "int8", "int4", "bf16+fp32")


class Cell(NamedTuple):
    """One cell of the grid."""

    door: str
    wire: str
    mode: str
    situation: str

    def __str__(self) -> str:
        return ", ".join(self)


class Model(nn.Module):
    """Parameters whose gradients are what forward is given.

    Args:
        sparse: with an embedding, whose gradient is sparse.
    """

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.dense = nn.ParameterList([torch.zeros(shape) for shape in SHAPES])
        self.dense.append(torch.zeros(2, 35, dtype=torch.bfloat16))
        self.table = nn.Embedding(*TABLE, sparse=True, _weight=torch.zeros(TABLE)) if sparse else None

    def forward(self, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Zero."""
        return given(list(self.parameters()), gradients)


class Rank:
    """One rank's training, by a door, and its tape.

    Args:
        ranks: all of them.
        communicator: this one's.
        cell: what is asked for.
    """

    def __init__(self, ranks: Ranks, communicator: LocalCommunicator, cell: Cell) -> None:
        self.ranks = ranks
        self.communicator = communicator
        self.cell = cell
        self.number = communicator.rank
        self.tape = ranks.tapes[self.number]
        self.mode = MODES[cell.mode]
        self.steps = 0

    def build(
        self,
        *,
        sparse: bool = False,
        views: bool = False,
        unused: bool = False,
        static: bool = False,
        skip: bool = False,
        lazy: bool = False,
        cap_bytes: int = CAP_BYTES,
        **config: Any,
    ) -> None:
        """Makes the model and what reduces it."""
        self.model = Model(sparse=sparse)
        self.parameters = list(self.model.parameters())
        names = [name for name, _ in self.model.named_parameters()]
        wire = WIRES[self.cell.wire]
        self.reducer: Reducer | None = None
        self.ddp: Any = None
        alike: dict[str, Any] = {
            "find_unused_parameters": unused,
            "static_graph": static,
            "gradient_as_bucket_view": views,
        }
        group = self.communicator.process_group()
        of_wrappers: dict[str, Any] = {"process_group": group, "init_sync": False, "bucket_cap_mb": cap_bytes / 2**20}
        if self.cell.door == "hook":
            self.state = FusedHookState(group, **wire, **config)
            self.ddp = TorchDDP(self.model, **of_wrappers, **alike)
            self.ddp.register_comm_hook(self.state, fusedreduce.fused_hook)
        else:
            config = {"policy": "ready", "replan_every": 0, **wire, **config, "sync_mode": self.mode}
            settings = ReduceConfig(**config)
            if self.cell.door == "wrapper":
                self.ddp = fusedreduce.DistributedDataParallel(
                    self.model, **of_wrappers, **alike, skip_all_reduce_unused_params=skip, reduce=settings
                )
                self.reducer = find_reducer(self.ddp)
            else:
                self.reducer = Reducer(
                    self.parameters,
                    self.communicator,
                    settings,
                    names=names,
                    sparse=["table" in name for name in names],
                    caps=BucketCaps(first_bytes=cap_bytes, cap_bytes=cap_bytes),
                    skip_unused_buckets=skip,
                    lazy_bucket_allocation=lazy,
                    **alike,
                )
        self.note("built")

    def gradients(self, *without: int, part: int = 0, rows: Sequence[int] | None = None) -> list[torch.Tensor | None]:
        """Of this rank and step; None for those `without`. `rows` of the table, if it has a sparse one."""
        found: list[torch.Tensor | None] = []
        for index, one in enumerate(self.parameters):
            seed = self.number, self.steps, part, index
            if index in without:
                found.append(None)
            elif index >= len(SHAPES) + 1 and rows is not None:
                values = drawn((len(rows), TABLE[1]), torch.float32, *seed)
                values = (values * 64).round() / 64  # whose sums are exact, in whatever order
                found.append(torch.sparse_coo_tensor(torch.tensor([list(rows)]), values, TABLE, check_invariants=False))
            else:
                found.append(drawn(one.shape, one.dtype, *seed))
        return found

    def loss(self, gradients: Sequence[torch.Tensor | None], divisor: float | None = None) -> torch.Tensor:
        """A forward, which arms."""
        if self.ddp is not None:
            result: torch.Tensor = self.ddp(gradients)
            return result
        assert self.reducer is not None
        self.reducer.prepare_for_forward()
        loss: torch.Tensor = self.model(gradients)
        self.reducer.prepare_for_backward(loss, divisor=divisor)
        return loss

    def step(
        self,
        gradients: Sequence[torch.Tensor | None] | None = None,
        *,
        zero: bool = True,
        divisor: float | None = None,
        event: str = "",
    ) -> None:
        """A forward and a backward, whose line is `event`; by default the step's number."""
        if zero:
            for one in self.parameters:
                one.grad = None
        gradients = self.gradients() if gradients is None else gradients
        self.steps += 1
        loss = self.loss(gradients, divisor)
        in_turn = isinstance(self.mode, Asynchronous)
        with self.ranks.in_turn(self.number) if in_turn else contextlib.nullcontext():
            loss.backward()
        self.note(event or f"step {self.steps}")

    def train(self, steps: int, *, zero: bool = True) -> None:
        """So many steps."""
        for _ in range(steps):
            self.step(zero=zero)

    def note(self, event: str, *texts: str) -> None:
        """A line."""
        state = [] if self.reducer is None else [self.reducer.state.value]
        self.tape.note(event, *state, *texts, parameters=self.parameters)

    def attempt(self, event: str, call: Callable[[], object]) -> bool:
        """Whether `call` raises; a line if it does."""
        try:
            call()
        except Exception as error:
            self.note(event, raised(error))
            return True
        return False

    @property
    def door(self) -> Any:
        """What its user calls."""
        return self.reducer if self.ddp is None else self.ddp

    def no_sync(self) -> Any:
        """The door's own."""
        return self.door.no_sync()

    def join(self, inputs: int, most: int, step: Callable[[], None] | None = None, **options: Any) -> None:
        """`inputs` steps of this rank, where the ranks have at most `most`."""
        step = step or self.step
        if self.cell.door == "wrapper":
            with self.ddp.join(**options):
                for _ in range(inputs):
                    step()
            self.steps = most
            self.note("join has ended")
            return
        for number in range(most):
            if number < inputs:
                step()
                continue
            if self.reducer is not None:
                shadow_step(self.reducer)
            else:  # what torch's join does, but for its collectives on a group of torch's
                self.ddp.reducer._rebuild_buckets()
                self.ddp._match_all_reduce_for_bwd_pass()
                if self.ddp.find_unused_parameters:
                    self.ddp._match_unused_params_allreduce()
                self.ddp.reducer._push_all_rebuilt_params()
            self.steps += 1
            self.note(f"step {self.steps} without inputs")

    def reset(self) -> None:
        """Gives up a step that has failed."""
        self.door.reset()
        self.note("reset")

    def go_on_elsewhere(self) -> None:
        """Over another group, in which each has another rank."""
        other = self.ranks.others.communicator((self.number + 1) % RANKS)
        if self.cell.door == "wrapper":
            self.ddp._update_process_group(other.process_group())
        else:
            assert self.reducer is not None
            self.reducer.set_communicator(other)
        self.note("another group")

    def end(self) -> None:
        """Statistics, and what a checkpoint would hold."""
        if self.reducer is None:
            stats: Mapping[str, Any] = self.state.stats()
        else:
            if self.mode != Synchronous():
                self.tape.note("flush", f"{self.reducer.flush().steps} steps", parameters=self.parameters)
            stats = self.reducer.stats() if self.ddp is None else self.ddp.reduce_stats()
        self.tape.note("stats", " ".join(f"{name}={value}" for name, value in sorted(stats.items())))
        if self.reducer is not None:
            saved = self.reducer.state_dict() if self.ddp is None else self.ddp.reduce_state_dict()
            self.tape.note("state dict", described(saved))


def raised(error: BaseException) -> str:
    """Its class, and what it says if it is ours."""
    says = f": {str(error)[:120]}" if "fusedreduce" in type(error).__module__ else ""
    return re.sub(r"\d+\.\d+ s", "... s", f"raises {type(error).__name__}{says}".replace("\n", " "))


def described(state: object) -> str:
    """Names and numbers of a state dict, and digests of its tensors."""
    if isinstance(state, torch.Tensor):
        return f"{str(state.dtype).removeprefix('torch.')}{list(state.shape)} {digest(state)}"
    if isinstance(state, Mapping):
        return "{" + ", ".join(f"{name}: {described(one)}" for name, one in state.items()) + "}"
    if isinstance(state, list | tuple):
        return "[" + ", ".join(map(described, state)) + "]"
    return str(state)


def keys(found: object) -> str:
    """Names of what a trace file holds, without its numbers."""
    if isinstance(found, Mapping):
        return "{" + ", ".join(f"{name}{keys(one)}" for name, one in sorted(found.items())) + "}"
    if isinstance(found, list):
        return "[" + "; ".join(dict.fromkeys(map(keys, found))) + "]"
    return ""


# Situations


def plain(rank: Rank) -> None:
    """Four steps, the first of which learns an order; the numbers of the first parameter."""
    rank.build()
    rank.train(4)
    first = rank.parameters[0].grad
    rank.tape.note("its first", "none" if first is None else " ".join(f"{one:.9g}" for one in first.tolist()))


def accumulated(rank: Rank) -> None:
    """Gradients stay: each backward adds to them."""
    rank.build()
    rank.train(3, zero=False)


def micro_batches(rank: Rank) -> None:
    """Two backwards under no_sync, of different parameters, and one that is reduced."""
    rank.build(unused=True)
    for _ in range(3):
        for one in rank.parameters:
            one.grad = None
        for part, without in ((1, (0, 3)), (2, (0, 4))):
            with rank.no_sync():
                rank.loss(rank.gradients(*without, part=part)).backward()
        rank.note(f"behind no_sync {rank.steps}")
        rank.step(rank.gradients(1, 3), zero=False)


def unused(rank: Rank) -> None:
    """A parameter that one rank leaves out, one that two do, one that no rank uses; all in use."""
    rank.build(unused=True)
    sets = ((1,), (), (5,)), ((), (2, 4), (2,)), ((3, 6), (3,), (3,)), ((), (), ())
    for without in sets:
        rank.step(rank.gradients(*without[rank.number]), zero=rank.steps != 2)


def skipped(rank: Rank) -> None:
    """Every rank leaves out the same, and buckets that have nothing else are not reduced."""
    rank.build(unused=True, skip=True)
    for without in ((3,), (0, 1, 2), (), (5, 6, 7)):
        rank.step(rank.gradients(*without))


def static(rank: Rank) -> None:
    """A static graph that does not use one parameter."""
    rank.build(static=True)
    for _ in range(4):
        rank.step(rank.gradients(4))


def views(rank: Rank) -> None:
    """Gradients are views of the wire: zeroed to None, kept, and zeroed in place."""
    rank.build(views=True, unused=True)
    for number, without in enumerate(((), (), (1,), (1, 5))):
        if number == 3:
            (rank.reducer.zero_grad() if rank.reducer is not None else rank.ddp.zero_grad(set_to_none=False))
        rank.step(rank.gradients(*(without if rank.number else ())), zero=number < 2)


def joined(rank: Rank) -> None:
    """Rank 0 has no input at all, rank 1 two less than rank 2."""
    rank.build()
    rank.join(2 * rank.number, 2 * RANKS - 2)
    rank.step()


def joined_static(rank: Rank) -> None:
    """Rank 1 has no input at all, and the graph is static."""
    rank.build(static=True)
    rank.join(3 * (rank.number != 1), 3, lambda: rank.step(rank.gradients(4)))


def joined_unused(rank: Rank) -> None:
    """Ranks that still have inputs do not use the same parameters."""
    rank.build(unused=True)
    rank.join(2 * (rank.number + 1), 6, lambda: rank.step(rank.gradients(1 + rank.number, 5)))


def joined_views(rank: Rank) -> None:
    """What the rank without inputs had in its `.grad`, views of the buckets in use, stays."""
    rank.build(views=True)
    rank.join(2 + 2 * (rank.number != 1), 4, lambda: rank.step(zero=rank.steps == 0))
    rank.step(zero=False)


def joined_counted(rank: Rank) -> None:
    """Divided by the ranks that still have inputs."""
    rank.build()
    rank.join(2 * rank.number, 2 * RANKS - 2, divide_by_initial_world_size=False)
    rank.step()


def joined_observed(rank: Rank) -> None:
    """With statistics and the check for NaN, of which one comes while rank 0 has no inputs."""
    rank.build(**OBSERVED)

    def step() -> None:
        gradients = rank.gradients()
        if rank.steps == 2 and rank.number == 2:
            last = gradients[4]
            assert last is not None
            last[7] = math.nan
        rank.step(gradients)

    rank.join(4 if rank.number else 1, 4, step)
    rank.step()


def joined_sparse(rank: Rank) -> None:
    """Rank 1 has none of the sparse gradients, whose kind no rank knew."""
    rank.build(sparse=True)
    rank.join(3 * (rank.number != 1), 3, lambda: rank.step(rank.gradients(rows=(rank.number, 4, 4))))


def sparse(rank: Rank) -> None:
    """A sparse gradient that every rank has."""
    rank.build(sparse=True)
    for number in range(3):
        rank.step(rank.gradients(rows=(number, rank.number, 9)), zero=number != 2)


def sparse_late(rank: Rank) -> None:
    """No rank knows its kind; then one has it; then all; then one does not use it."""
    rank.build(sparse=True, unused=True)
    without: Sequence[Sequence[int]] = ((0, 1, 2), (0, 2), (), (1,))
    for ranks in without:
        rank.step(rank.gradients(*([8] if rank.number in ranks else []), rows=(rank.number, 5)))


def sparse_other(rank: Rank) -> None:
    """Of another kind than before, on every rank: dense. The step fails on all of them."""
    rank.build(sparse=True)
    rank.step(rank.gradients(rows=(1, 2)))
    rank.attempt("dense", lambda: rank.step())
    rank.reset()
    rank.step(rank.gradients(rows=(1, 2)))


def everything(rank: Rank) -> None:
    """All that follows the last bucket, in one step."""
    rank.build(sparse=True, unused=True, **OBSERVED)
    for without in ((8,), (2, 8), (2,), ()):
        rank.step(rank.gradients(*(without if rank.number else without[:1]), rows=(rank.number, 5)))


def joined_everything(rank: Rank) -> None:
    """The same with a rank that has no inputs in between."""
    rank.build(sparse=True, unused=True, **OBSERVED)
    rows = rank.number, 5

    def step() -> None:
        rank.step(rank.gradients(2, *([8] if rank.steps < 2 else []), rows=rows))

    rank.join(1 + 3 * (rank.number != 1), 4, step)
    rank.step(rank.gradients(rows=rows))


def scaled(rank: Rank) -> None:
    """A loss scale, which comes off on the way; NaN of rank 2 in step 3, which is skipped."""
    rank.build()
    optimizer = torch.optim.SGD(rank.parameters, lr=0.0)
    scaler = fusedreduce.FusedGradScaler(rank.reducer or rank.ddp, init_scale=1024.0, growth_interval=2)
    for number in range(5):
        gradients = rank.gradients()
        if number == 2 and rank.number == 2:
            gradients[3][1, 2] = math.nan  # type: ignore[index]
        optimizer.zero_grad()
        rank.steps += 1
        scaler.scale(rank.loss(gradients)).backward()
        scaler.step(optimizer)
        scaler.update()
        rank.note(f"step {rank.steps}", f"scale {scaler.get_scale():g}")


def views_reset(rank: Rank) -> None:
    """Rank 1 changes a gradient that is a view of what travels; all reset."""
    rank.build(views=True)
    rank.train(2, zero=False)
    with _changing(rank, rank.number == 1):
        rank.attempt("changed", lambda: rank.step(zero=False))
    rank.ranks.meet()
    rank.reset()
    rank.train(2, zero=False)


def raises_in_backward(rank: Rank) -> None:
    """A hook of rank 1 raises in the middle of backward; all go on over another group."""
    rank.build()
    rank.train(2)
    with _raising(rank, rank.number == 1):
        failed = rank.attempt("failed", lambda: _aborted(rank))
    assert failed
    rank.go_on_elsewhere()
    rank.train(2)


def raises_and_resets(rank: Rank) -> None:
    """A hook of every rank raises in the middle of backward; all reset."""
    rank.build()
    rank.train(2)
    with _raising(rank, True):
        assert rank.attempt("failed", rank.step)
    rank.ranks.meet()
    rank.attempt("next", rank.step)
    rank.attempt("reset", rank.reset)
    rank.attempt("next", rank.step)


def changed_after_pack(rank: Rank) -> None:
    """Rank 1 changes a gradient that has been packed, and alone raises; all reset."""
    rank.build(unused=True, check_finite="count", **({} if rank.cell.door == "hook" else {"grad_stats": True}))
    rank.train(2)
    with _changing(rank, rank.number == 1):
        rank.attempt("changed", rank.step)
    rank.ranks.meet()
    rank.reset()
    rank.train(2)


def reset(rank: Rank) -> None:
    """An armed step that is given up; then another group."""
    rank.build()
    rank.train(2)
    rank.loss(rank.gradients())
    rank.ranks.meet()
    rank.reset()
    rank.step()
    rank.go_on_elsewhere()
    rank.train(2)


def marked_reset(rank: Rank) -> None:
    """Backwards under no_sync that a reset gives up: what they have used does not count in the next step."""
    rank.build(unused=True)
    rank.step()
    with rank.no_sync():
        rank.loss(rank.gradients(part=1)).backward()
    rank.ranks.meet()
    rank.reset()
    rank.step(rank.gradients(3, 5))


def observed(rank: Rank) -> None:
    """Statistics, and a NaN of rank 1 in step 2."""
    rank.build(**OBSERVED)
    for number in range(4):
        gradients = rank.gradients()
        if number == 1 and rank.number == 1:
            gradients[3][1, 2] = math.inf  # type: ignore[index]
        rank.step(gradients)
    observed: Any = rank.state if rank.reducer is None else rank.ddp or inside(rank.reducer).statistics
    reports = observed.non_finite() if hasattr(observed, "non_finite") else observed.finite_check().reports
    rank.tape.note("reports", *[str(one).replace("\n", " ")[:200] for one in reports])
    rank.tape.note("keys", " ".join(observed.grad_stats()))


def refused(rank: Rank) -> None:
    """check_finite="raise": on every rank, behind the step."""
    rank.build(check_finite="raise")
    for number in range(3):
        gradients = rank.gradients()
        if number == 1 and rank.number == 2:
            gradients[0][0] = math.nan  # type: ignore[index]
        rank.attempt("refused", functools.partial(rank.step, gradients))


def another_plan(rank: Rank) -> None:
    """Other limits of buckets, while training."""
    rank.build()
    assert rank.reducer is not None
    for size in (400, 4000):
        rank.train(2)
        rank.reducer.flush()
        rank.door.set_bucket_size(size)
    rank.train(2)


def planned(rank: Rank) -> None:
    """With the planner on, over a link on which one bucket is the best; its exchanges."""
    rank.build(cap_bytes=100_000, policy="planned", replan_every=8, link=(1e6, 1e3))
    rank.train(34)


def no_overlap(rank: Rank) -> None:
    """All buckets are launched when backward has ended."""
    rank.build(overlap=False)
    rank.train(3)


def summed(rank: Rank) -> None:
    """Sums, and unused parameters of kept gradients."""
    rank.build(op="sum", unused=True, views=True)
    for number in range(3):
        without = (2, 3) if rank.number == 1 else (2,)
        rank.step(rank.gradients(*(without if number else ())), zero=number == 0)


def divided(rank: Rank) -> None:
    """A divisor of each rank's own."""
    rank.build()
    for number in range(3):
        rank.step(divisor=1.5 + rank.number if number else None)


def lazy(rank: Rank) -> None:
    """Wires last as long as a step."""
    rank.build(lazy=True)
    rank.train(3)


def with_hook(rank: Rank) -> None:
    """A comm hook that halves everything."""
    rank.build()
    hook = averaging(2, lambda one: one, "own")
    rank.door.register_comm_hook(None, lambda state, bucket: hook(state, bucket))
    rank.train(3)


def other_mode(rank: Rank) -> None:
    """From this mode to BoundedStaleness(2), and back."""
    rank.build()
    assert rank.reducer is not None
    for mode in (BoundedStaleness(2), rank.mode):
        rank.train(3)
        rank.reducer.flush()
        rank.note("flushed")
        rank.reducer.set_sync_mode(mode)
    rank.step()


def checkpointed(rank: Rank) -> None:
    """What a checkpoint holds is loaded again."""
    rank.build()
    assert rank.reducer is not None
    rank.train(3)
    saved = rank.reducer.state_dict()
    rank.note("saved", described(saved))
    rank.build()
    rank.step()
    rank.reducer.flush()
    rank.reducer.load_state_dict(saved)
    rank.note("loaded")
    rank.train(2)


def traced(rank: Rank) -> None:
    """The names in a trace file."""
    rank.build(unused=rank.cell.door != "hook")
    with tempfile.TemporaryDirectory(prefix="fusedreduce-record-") as folder:
        rank.step()
        owner: Any = rank.state if rank.cell.door == "hook" else rank.door
        with owner.record_trace(folder):
            rank.train(3)
        for path in sorted(Path(folder).iterdir()):
            text = path.read_text()
            lines = [json.loads(text)] if text.count("\n") < 2 else [json.loads(one) for one in text.splitlines()]
            rank.tape.note("trace", path.name.replace(str(rank.number), "RANK"), keys(lines))


OBSERVED: Mapping[str, Any] = {"grad_stats": True, "check_finite": "count"}


def _aborted(rank: Rank) -> None:
    """A step that this rank may fail in, in the middle: the others learn it when they wait."""
    try:
        rank.step()
    except RuntimeError as error:
        if rank.number == 1:
            rank.ranks.until_blocked(rank.number)
            rank.communicator.abort(error)
        raise


@contextlib.contextmanager
def _raising(rank: Rank, raises: bool) -> Iterator[None]:
    def fail(_: torch.Tensor) -> None:
        raise RuntimeError("planted")

    handle = rank.parameters[2].register_hook(fail) if raises else None
    yield
    if handle is not None:
        handle.remove()


@contextlib.contextmanager
def _changing(rank: Rank, changes: bool) -> Iterator[None]:
    """The gradient of the last parameter, whose bucket is the first, is changed by a hook of the first one.

    One that is a view of what travels not before the others have read that, and wait for the last bucket.
    """

    def change(_: torch.Tensor) -> None:
        if rank.reducer is not None and rank.reducer.has_views:
            rank.ranks.until_blocked(rank.number)
        gradient = rank.parameters[-1].grad
        assert gradient is not None
        gradient.add_(1.0)

    handle = rank.parameters[0].register_hook(change) if changes else None
    yield
    if handle is not None:
        handle.remove()


Situation = Callable[[Rank], None]
EVERYWHERE: tuple[Situation, ...] = (
    plain,
    accumulated,
    micro_batches,
    unused,
    static,
    joined,
    joined_static,
    joined_unused,
    observed,
    joined_observed,
    refused,
)
# By what they need: not the hook, which has it from torch or not at all.
OURS: tuple[Situation, ...] = (
    skipped,
    everything,
    joined_everything,
    scaled,
    views_reset,
    sparse_late,
    sparse_other,
    raises_in_backward,
    raises_and_resets,
    changed_after_pack,
    reset,
    marked_reset,
    another_plan,
    planned,
    no_overlap,
    summed,
    with_hook,
    other_mode,
    checkpointed,
)
WITH_VIEWS: tuple[Situation, ...] = (views, joined_views)
SPARSE: tuple[Situation, ...] = (sparse, joined_sparse)
NOT_LATE: tuple[Situation, ...] = (*WITH_VIEWS, views_reset, marked_reset, skipped, summed, with_hook, traced)
NOT_ASYNCHRONOUS: tuple[Situation, ...] = (
    *SPARSE,
    sparse_late,
    sparse_other,
    observed,
    refused,
    changed_after_pack,
    everything,
    divided,
    scaled,
)
SITUATIONS: Mapping[str, Situation] = {
    one.__name__.replace("_", " "): one
    for one in (*EVERYWHERE, *WITH_VIEWS, *SPARSE, *OURS, divided, lazy, joined_counted, traced)
}


def hole(cell: Cell) -> str:
    """Why there is no such cell; empty where there is one."""
    door, wire, mode, name = cell
    situation, late = SITUATIONS[name], mode != "synchronous"
    if door == "hook":
        if late or wire not in HOOK_WIRES:
            return "the hook has no such option"
        if situation in OURS:
            return "that is torch's, or the hook has it not"
        if situation in (joined_static, joined_sparse, joined_counted):
            return "torch itself has no such joined rank, or counts the ranks"
    if late and (wire not in PLAIN_WIRES or situation in NOT_LATE or name.startswith("joined")):
        return "they exclude each other"
    if mode == "asynchronous" and (wire == "fp16" or situation in NOT_ASYNCHRONOUS):
        return "they exclude each other, or what lands depends on the clock"
    if situation in (raises_in_backward, raises_and_resets) and (late or wire not in PLAIN_WIRES):
        return "where the other ranks learn of it depends on the clock"
    if situation is with_hook and wire != "native" or situation is other_mode and wire not in PLAIN_WIRES:
        return "they exclude each other"
    if situation is planned and (late or wire not in ("native", "bf16")):
        return "it is long, and the planner knows no wires"
    if situation in (divided, lazy) and door != "reducer":
        return "a Reducer's alone"
    if situation is joined_counted and door == "reducer":
        return "a wrapper's alone"
    return ""


def cells() -> list[Cell]:
    """All of them."""
    every = itertools.product(DOORS, WIRES, MODES, SITUATIONS)
    return [cell for one in every if not hole(cell := Cell(*one))]


def lines(cell: Cell) -> list[str]:
    """What the cell does now."""
    ranks = Ranks()

    def case(communicator: LocalCommunicator) -> None:
        rank = Rank(ranks, communicator, cell)
        SITUATIONS[cell.situation](rank)
        rank.end()

    return ranks.run(case)
