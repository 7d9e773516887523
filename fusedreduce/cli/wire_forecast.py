"""What a step takes on each wire, in the cost model: for doctor, `plan --wires` and `plan --simulate`, and the verdict.

A backward is a trace: a recorded one, or `as_trace` of one that nobody has recorded. So one place says what travels of
which gradient, and in how many bytes, with the padding of its buckets.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch

from fusedreduce.buckets.wire_table import WireTable
from fusedreduce.config import CAP_POLICIES, Accumulation, CapPolicy, Wire
from fusedreduce.planning.bucketing import BucketCaps
from fusedreduce.planning.cost_model import FS_PER_NS, Costs, Linear
from fusedreduce.planning.plan import Plan, ready_plan, static_plan
from fusedreduce.planning.planner import best_plan
from fusedreduce.planning.timeline import Problem, Timeline, ready_order, timeline
from fusedreduce.simulation.networks import Network, link
from fusedreduce.trace import wire_costs
from fusedreduce.trace.problem import bucket_bytes, exchanges_shards, kinds, problem, ready_times_ns, shares
from fusedreduce.trace.problem import on_wire as trace_on_wire
from fusedreduce.trace.reader import RankTrace
from fusedreduce.trace.recorder import Parameter, group_text
from fusedreduce.wires import encoding_of

from .report import WIDTH

# The least gain, as a share of what torch's DDP takes in fp32, for which a coarser wire is recommended.
WORTH = 0.05
_FS_PER_MS = 1e6 * FS_PER_NS


@dataclass(frozen=True)
class Gradient:
    """One gradient of a backward that nobody has recorded.

    Args:
        numel: its elements.
        ndim: its dimensions: what has one is not encoded.
        ready_ns: when it is ready, since backward began.
    """

    numel: int
    ndim: int
    ready_ns: int


def as_trace(
    gradients: Sequence[Gradient], *, ranks: int, device: str, dtype: torch.dtype = torch.float32
) -> RankTrace:
    """A backward as the trace that a rank would have left of it, at wire native and without steps."""
    group = group_text(dtype, device)
    parameters = tuple(
        Parameter(
            name=str(number),
            numel=gradient.numel,
            ndim=gradient.ndim,
            size_bytes=gradient.numel * dtype.itemsize,
            wire="native",
            wire_bytes=gradient.numel * dtype.itemsize,
            group=group,
            alone=False,
            ready_ns=gradient.ready_ns,
        )
        for number, gradient in enumerate(gradients)
    )
    return RankTrace(
        rank=0,
        ranks=ranks,
        device=device,
        source="wrapper",
        perf_ns=0,
        wall_ns=0,
        config={"wire": "native"},
        caps=BucketCaps(),
        parameters=parameters,
        costs=None,
        plans=(),
        steps=(),
    )


def two_phases(trace: RankTrace) -> bool:
    """Whether buckets of the run are exchanged in shards, for which no plan follows measured times."""
    return _table(trace).has_two_phases(trace.ranks)


def _table(trace: RankTrace) -> WireTable:
    accumulation = cast("Accumulation", trace.config.get("accumulation", "wire"))
    return WireTable(tuple(parameter.wire for parameter in trace.parameters), accumulation)


def wide(wire: Wire) -> float | None:
    """Bytes of fp32 that a byte on the wire stands for; None: it is all-reduced, and not exchanged."""
    encoding = encoding_of(wire)
    if encoding is None:
        return None
    return 4 * encoding.block_numel / encoding.block_bytes


def named_link(network: Network, ranks: int, wire: Wire) -> Linear:
    """What a bucket on a wire costs on a network."""
    return link(network, ranks, wide=wide(wire))


def scaled_costs(
    traces: Sequence[RankTrace],
    wire: Wire,
    costs: Costs,
    kernels: wire_costs.KernelTable,
    *,
    combined: bool = True,
    network: Network | None = None,
) -> Costs:
    """The costs of the recorded run on another wire.

    Args:
        traces: of all ranks.
        wire: the wire.
        costs: of the recorded run, whose link is that of one collective.
        kernels: what those of each wire take.
        combined: unpacking includes that this rank adds up its shards; False: the link does.
        network: in place of the link of `costs`.
    """
    first = trace_on_wire(traces[0], wire)
    before, after = (
        (sum(known.wire_bytes for known in trace.parameters), kernels.of(trace)) for trace in (traces[0], first)
    )
    phases = 2 if exchanges_shards(first) else 1
    other = wire_costs.on_other_wire(costs, before, after, phases=phases, combined=combined)
    if network is None:
        return other
    return dataclasses.replace(other, wire=named_link(network, first.ranks, wire))


def recorded_link(traces: Sequence[RankTrace], costs: Costs, *, given: bool) -> tuple[Costs, bool]:
    """The costs of a run with the link of one collective, and whether unpacking includes that shards are added up.

    Args:
        traces: of all ranks.
        costs: of the recorded run.
        given: their link was given by the user, and not fitted to the run.
    """
    # Fitted to a run that exchanged shards, the link is that of both phases, and of combining between them; but on CUDA
    # traces time the first phase alone.
    if given or not exchanges_shards(traces[0]) or traces[0].device != "cpu":
        return costs, True
    return dataclasses.replace(costs, wire=dataclasses.replace(costs.wire, fixed_ns=costs.wire.fixed_ns // 2)), False


@dataclass(frozen=True)
class WireForecast:
    """A backward on one wire, in the model.

    Args:
        wire: its name.
        plan: the buckets.
        problem: the planner's, with the padding of those buckets.
    """

    wire: Wire
    plan: Plan
    problem: Problem

    @cached_property
    def times(self) -> Timeline:
        """When what is done."""
        return timeline(self.plan, self.problem)

    @property
    def sent_bytes(self) -> int:
        """Bytes that a rank hands to collectives, padding included."""
        return sum(self.problem.wire_bytes)

    @property
    def copies_ms(self) -> float:
        """What packing and unpacking take in all."""
        lines = (self.problem.costs.pack, self.problem.costs.unpack)
        fixed = sum(line.fixed_ns for line in lines) * FS_PER_NS
        return (len(self.plan) * fixed + sum(line.fs_per_byte for line in lines) * self.sent_bytes) / _FS_PER_MS

    @property
    def last_done_ms(self) -> float:
        """When the last collective ends, since backward began."""
        return self.times.last_done / _FS_PER_MS

    @property
    def finish_ms(self) -> float:
        """When the last gradient holds its result."""
        return self.times.finish / _FS_PER_MS

    @property
    def packed_exposed_ms(self) -> float:
        """How much later that is than the end of backward with its packing."""
        return (self.times.finish - self.times.backward_end) / _FS_PER_MS

    @property
    def exposed_ms(self) -> float:
        """How much later that is than the end of a backward that nothing delays."""
        return (self.times.finish - max(self.problem.ready_fs)) / _FS_PER_MS


def of_memory(traces: Sequence[RankTrace]) -> bool:
    """Whether the recorded ranks talked through the memory of one machine, or may have.

    On CUDA they talk by NCCL: PCIe or NVLink, as in training. Older traces do not say where their ranks were.
    """
    return traces[0].device == "cpu" and (nodes(traces) or 1) == 1


def nodes(traces: Sequence[RankTrace]) -> int | None:
    """On how many machines, or in how many network namespaces, the recorded ranks were; None: not known."""
    places = [trace.place for trace in traces]
    return None if None in places or len(traces) < traces[0].ranks else len(set(places))


def on_wire(
    traces: Sequence[RankTrace], wire: Wire, costs: Costs, caps: BucketCaps, *, torchs: bool = False
) -> WireForecast:
    """A backward on a wire, by the plan of the policy with which it ends first.

    Args:
        traces: of all ranks.
        wire: the wire.
        costs: of a bucket on it.
        caps: limits of the buckets.
        torchs: by torch's buckets.
    """
    sent = [trace_on_wire(trace, wire) for trace in traces]
    first = sent[0]
    if caps == BucketCaps() and not torchs:
        caps = _table(first).default_caps(first.ranks, torch.device(first.device))
    asked = problem(sent, costs, caps.planned_limit_bytes)
    plans = policies(sent, asked, caps, share=shares(first))
    if torchs:
        plans = {"static": plans["static"]}
    elif two_phases(first):
        plans = {"ready": plans["ready"]}
    rows = [WireForecast(wire, plan, padded(plan, first, asked)) for plan in reversed(plans.values())]
    # The planner knows no padding, by which among many ranks a small bucket is as large as a large one.
    return min(rows, key=lambda row: row.times.finish)


def policies(traces: Sequence[RankTrace], asked: Problem, caps: BucketCaps, *, share: bool) -> dict[str, Plan]:
    """The plan of each policy.

    Args:
        traces: of all ranks.
        asked: the planner's problem.
        caps: limits of `static` and `ready`.
        share: `ready` may have buckets of mixed dtypes.
    """
    # Missing in traces of the hook, and in older ones.
    cap_policy = cast("CapPolicy", traces[0].config.get("cap_policy"))
    cap_policy = cap_policy if cap_policy in CAP_POLICIES else "c10d"
    found = {
        "static": static_plan(kinds(traces[0]), caps, cap_policy, ready_order(ready_times_ns(traces[0]))),
        "ready": ready_plan(kinds(traces[0]), caps, cap_policy, ready_order(asked.ready_ns), share=share),
    }
    return {**found, "planned": best_plan(asked, found)[1]}


def padded(plan: Plan, trace: RankTrace, asked: Problem) -> Problem:
    """`asked`, in which the first member of a bucket has its padding too."""
    sizes = list(asked.wire_bytes)
    for members in plan:
        sizes[members[0]] += bucket_bytes(trace, members) - sum(asked.wire_bytes[number] for number in members)
    return dataclasses.replace(asked, wire_bytes=tuple(sizes))


@dataclass(frozen=True)
class Verdict:
    """Which wire to use.

    Args:
        text: the verdict in a sentence, without its end.
        wire: the wire; None: none gains anything.
    """

    text: str
    wire: Wire | None


def verdict(took_ms: Mapping[Wire, float], torch_ms: float, what: str = "backward and its tail") -> Verdict:
    """Recommends the finest wire beside which no coarser one saves a twentieth of what torch's DDP takes.

    Args:
        took_ms: by wire, from fine to coarse.
        torch_ms: what torch's DDP takes, which sends gradients as they are: with its buckets, at wire native.
        what: takes that long.
    """
    best = next(iter(took_ms))
    for wire, ms in took_ms.items():
        if took_ms[best] - ms >= WORTH * torch_ms:
            best = wire
    saved = 1 - took_ms[best] / torch_ms
    if saved < WORTH:
        text = f"little to gain: {what} would take {took_ms[best]:.1f} ms at best, and {torch_ms:.1f} with torch's DDP"
        return Verdict(text, None)
    text = (
        f"wire {best}: {what} {saved:.0%} shorter, {took_ms[best]:.1f} ms where torch's buckets at wire native take "
        f"{torch_ms:.1f}"
    )
    if best not in ("native", "bf16") and "bf16" in took_ms:
        text += f" and bf16 {took_ms['bf16']:.1f}"
    return Verdict(text, best)


def lines_of_code(wire: Wire, launcher: str) -> list[str]:
    """Lines to write for the two ways to use a wire; `launcher` starts the ranks."""
    return [
        f'ddp = fusedreduce.DistributedDataParallel(model, reduce=fusedreduce.ReduceConfig(wire="{wire}"))',
        f"{launcher} -m fusedreduce.run --wire {wire} train.py",
    ]


def shown(line: str) -> str:
    """A line to write, with a command that is too wide for a page in two."""
    command, module, rest = line.partition(" -m ")
    return f"{command} \\\n    -m {rest}" if module and len(line) > WIDTH else line


def compare_losses(wires: Iterable[Wire]) -> str:
    """What to do with wires that round, before their lines; "" if none does."""
    if set(wires) <= {"native"}:
        return ""
    return "Compare the loss with that of wire native for some hundred steps. "


def advice(found: Verdict, launcher: str) -> str:
    """The verdict, and the lines to write, as the end of a report."""
    if found.wire is None:
        return "\n".join([textwrap.fill(f"Verdict: {found.text}.", WIDTH), "Stay with torch's DDP."])
    said = f"Verdict: {found.text}. {compare_losses([found.wire])}Write one of these:"
    return "\n".join([textwrap.fill(said, WIDTH), *map(shown, lines_of_code(found.wire, launcher))])
