"""`fusedreduce plan`: the cost model's times of each policy on a recorded run, and the plan as torch takes it."""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from fusedreduce.config import CAP_POLICIES, ENCODED_WIRES, WIRES, CapPolicy, Wire
from fusedreduce.errors import TraceError
from fusedreduce.planning import plan_file
from fusedreduce.planning.bucketing import MIB, BucketCaps
from fusedreduce.planning.cost_model import FS_PER_BYTE_AT_1_GBIT_S, FS_PER_NS, Costs, Linear
from fusedreduce.planning.plan import Plan, ready_plan, static_plan
from fusedreduce.planning.planner import best_plan
from fusedreduce.planning.simulation.clusters import Case
from fusedreduce.planning.timeline import Problem, ready_order, timeline
from fusedreduce.planning.torch_caps import TorchCaps, nearest
from fusedreduce.trace.files import replace_text
from fusedreduce.trace.problem import (
    bucket_bytes,
    exchanges_shards,
    kinds,
    known_copies,
    known_costs,
    problem,
    ready_times_ns,
    shares,
)
from fusedreduce.trace.problem import on_wire as trace_on_wire
from fusedreduce.trace.reader import RankTrace, read
from fusedreduce.trace.report import start_ns

from . import simulate, wire_costs
from .arguments import bucket_caps, writable
from .columns import columns
from .trace import beside, milliseconds
from .wire_costs import KernelTable

PLAN_FILE = "plan.json"
_NOTES = """\
In the model, ms since backward began: when the last collective ends, when the last gradient is reduced, and by how much
that is later than the end of backward, packing included. recorded: the plan of the last recorded step."""
_NOTES_ON_WIRES = """\
In the model, ms since backward began, by each wire's plan of the policy with which it ends first: what packing and
unpacking take in all; when the last collective ends; when the last gradient is reduced, which is what to compare; and
by how much that is later than the end of backward, packing included. Bytes include what buckets are padded by at int8
and int4. A collective costs what an all-reduce of as many bytes does; at int8 and int4 on three and more ranks, two
latencies, though the second phase may begin late; adding up their shards counts as unpacking, or, if the recorded run
exchanged shards on CPU, in its link. Copies are those of the recorded run, times the ratio of what the wires' kernels
take, """


def add_parser(subparsers: Any) -> None:
    """Adds `plan` to the command line."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "plan",
        help="compare policies on a recorded run, and print the plan for torch's own DDP",
        description="Reads the traces that record_trace(FOLDER) wrote, applies the cost model to each policy, and "
        f"writes {PLAN_FILE}, for ReduceConfig(plan=...). Prints the bucket limits with which torch's own DDP comes "
        "nearest. With --simulate: how much communication each policy would expose on larger clusters, for that run "
        "or, without FOLDER, for known models. With --wires: how much each wire would expose, in place of the plans.",
        epilog="Exit status: 0 all went well; 2 wrong usage, or FOLDER has no trace.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", type=Path, nargs="?", metavar="FOLDER", help="where the traces are")
    parser.add_argument(
        "--costs", metavar="US,GBIT", help="latency in us and bandwidth in Gbit/s of one all-reduce (default: measured)"
    )
    parser.add_argument(
        "--cap-mb", type=bucket_caps, metavar="MB", help="the largest bucket, in MiB (default: as recorded)"
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where the file goes (default: beside the traces)")
    parser.add_argument("--wires", action="store_true", help="compare wires instead, on the measured link")
    parser.add_argument("--simulate", action="store_true", help="run models of training on models of clusters")
    simulate.add_arguments(parser)
    parser.set_defaults(run=lambda arguments: _run(parser, arguments))


def _run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    if arguments.simulate and arguments.wires:
        parser.error("--wires and --simulate exclude each other: simulated models take --wire")
    if arguments.folder is None:
        if arguments.simulate:
            simulate.run(arguments)
            return 0
        parser.error("the following arguments are required: FOLDER, or --simulate")
    try:
        traces = read(arguments.folder)
    except TraceError as error:
        parser.error(str(error))
    if arguments.simulate:
        return _simulate(parser, arguments, traces)
    costs = _costs(parser, arguments.costs, traces)
    caps = arguments.cap_mb or traces[0].caps
    share = shares(traces[0])
    asked = problem(traces, costs, caps.planned_limit_bytes, share=share)
    _check_times(parser, asked)
    if arguments.wires:
        kernels = wire_costs.kernel_table(traces[0])
        # Fitted to a run that exchanged shards, the link is that of both phases, and of combining between them; but on
        # CUDA traces time the first phase alone.
        fitted = arguments.costs is None and exchanges_shards(traces[0]) and traces[0].device == "cpu"
        if fitted:
            costs = dataclasses.replace(costs, wire=dataclasses.replace(costs.wire, fixed_ns=costs.wire.fixed_ns // 2))
        print(f"fusedreduce plan: {_facts(traces, asked)}; {_link(costs.wire)}\n")
        print(_table_of_wires(traces, costs, caps, kernels, combined=not fitted), end="\n\n")
        print(textwrap.fill(_NOTES_ON_WIRES + kernels.source, 120))
        return 0
    out = writable(parser, arguments.out or beside(arguments.folder))
    plans = policies(traces, asked, caps, share=share)
    recorded = traces[0].plans[traces[0].steps[-1].plan] if traces[0].steps else None
    print(f"fusedreduce plan: {_facts(traces, asked)}; {_link(costs.wire)}\n")
    print(f"{_table({**plans, **({'recorded': recorded} if recorded else {})}, asked)}\n\n{_NOTES}\n")
    # torch keeps dtypes apart.
    apart = problem(traces, costs, caps.planned_limit_bytes, share=False) if share else asked
    best = policies(traces, apart, caps, share=False)["planned"] if share else plans["planned"]
    print(_for_torch(torch_caps(best, apart), best, apart))
    print(_keep(out, traces[0], plans["planned"]))
    return 0


def on_wire(
    traces: Sequence[RankTrace],
    wire: Wire,
    costs: Costs,
    caps: BucketCaps,
    kernels: KernelTable,
    *,
    combined: bool = True,
) -> tuple[Plan, Problem]:
    """The recorded run on another wire.

    Args:
        traces: of all ranks.
        wire: the wire.
        costs: of the recorded run, whose link is that of one collective.
        caps: limits of the buckets.
        kernels: what those of each wire take.
        combined: unpacking includes that this rank adds up its shards; False: the link does.

    Returns:
        Its plan, and the planner's problem, with the padding of that plan's buckets.
    """
    sent = [trace_on_wire(trace, wire) for trace in traces]
    first = sent[0]
    before, after = (
        (sum(one.wire_bytes for one in trace.parameters), kernels.of(trace)) for trace in (traces[0], first)
    )
    other = wire_costs.on_other_wire(
        costs, before, after, phases=2 if exchanges_shards(first) else 1, combined=combined
    )
    asked = problem(sent, other, caps.planned_limit_bytes)
    plans = policies(sent, asked, caps, share=shares(first))
    rows = [(plan, _padded(plan, first, asked)) for plan in (plans.pop("planned"), *plans.values())]
    # The planner knows no padding, by which among many ranks a small bucket is as large as a large one.
    return min(rows, key=lambda row: timeline(*row).finish)


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


def torch_caps(plan: Plan, asked: Problem) -> TorchCaps:
    """The limits for torch with which the model says that the last collective ends first."""
    return nearest(
        plan,
        asked.size_bytes,
        asked.groups,
        ready_order(asked.ready_ns),
        alone=asked.alone,
        cost=lambda made: timeline(made, asked).last_done,
    )


def _simulate(parser: argparse.ArgumentParser, arguments: argparse.Namespace, traces: Sequence[RankTrace]) -> int:
    """Simulates the recorded run on clusters, with their links and its own costs of packing and unpacking."""
    costs = known_copies(traces)
    caps = arguments.cap_mb or traces[0].caps
    asked = problem(traces, costs, caps.planned_limit_bytes)
    _check_times(parser, asked)
    forwards = [-start_ns(step.marks) for trace in traces for step in trace.steps]
    case = Case(asked, statistics.median_low(forwards) if forwards else 0)
    found = simulate.table(lambda network: case, arguments, caps)
    print(simulate.text(f"{_facts(traces, asked)}; torch's buckets of {max(caps.limits_bytes) / MIB:g} MiB", found))
    return 0


def _check_times(parser: argparse.ArgumentParser, asked: Problem) -> None:
    if max(asked.ready_ns) < 0:
        parser.error("the trace has no ready time of any gradient: record more steps")


def _costs(parser: argparse.ArgumentParser, given: str | None, traces: Sequence[RankTrace]) -> Costs:
    """The costs given by --costs, else those of the trace."""
    if given is None:
        known = known_costs(traces)
        if known is None:
            parser.error(
                "the link's costs cannot be fitted to the trace (its buckets have fewer than two sizes): pass --costs"
            )
        return known
    try:
        latency_us, gbit_per_s = (float(part) for part in given.split(","))
        if not (math.isfinite(latency_us) and math.isfinite(gbit_per_s) and latency_us >= 0 and gbit_per_s > 0):
            raise ValueError(given)
    except ValueError:
        parser.error(f"argument --costs: must be two numbers, latency in us and Gbit/s, such as 20,100; got {given!r}")
    link = Linear.of_link(latency_us, gbit_per_s)
    return dataclasses.replace(known_copies(traces), wire=link)


def _facts(traces: Sequence[RankTrace], asked: Problem) -> str:
    first = traces[0]
    ranks = f"{len(traces)} of {first.ranks} ranks" if len(traces) < first.ranks else f"{first.ranks} ranks"
    size_mb = sum(asked.wire_bytes) / MIB
    parameters = f"{len(asked.ready_ns)} parameters, {size_mb:.2f} MiB on the wire ({first.config['wire']})"
    return f"{ranks}, {first.device}, {first.source}; {parameters}"


def _link(wire: Linear) -> str:
    rate = f"{FS_PER_BYTE_AT_1_GBIT_S / wire.fs_per_byte:.2f} Gbit/s" if wire.fs_per_byte else "no cost per byte"
    return f"all-reduce {wire.fixed_ns / 1e3:.1f} us and {rate}"


def _table(plans: Mapping[str, Plan], asked: Problem) -> str:
    rows = []
    for name, plan in plans.items():
        found = timeline(plan, asked)
        times = [found.last_done, found.finish, found.finish - found.backward_end]
        rows.append([name, str(len(plan)), *(milliseconds(time_fs / FS_PER_NS) for time_fs in times)])
    headings = [("", "policy"), ("", "buckets"), ("last collective", "ms"), ("finish", "ms"), ("exposed", "ms")]
    return columns(headings, rows)


def _table_of_wires(
    traces: Sequence[RankTrace], costs: Costs, caps: BucketCaps, kernels: KernelTable, *, combined: bool
) -> str:
    rows = []
    for wire in (*WIRES, *ENCODED_WIRES):
        plan, asked = on_wire(traces, wire, costs, caps, kernels, combined=combined)
        found, sent = timeline(plan, asked), sum(asked.wire_bytes)
        copies = sum(
            len(plan) * one.fixed_ns * FS_PER_NS + one.fs_per_byte * sent
            for one in (asked.costs.pack, asked.costs.unpack)
        )
        times = [copies, found.last_done, found.finish, found.finish - found.backward_end]
        shown = (milliseconds(time_fs / FS_PER_NS) for time_fs in times)
        rows.append([wire, f"{sent / MIB:.2f}", str(len(plan)), *shown])
    headings = [("", "wire"), ("on the wire", "MiB"), ("", "buckets"), ("copies", "ms")]
    return columns([*headings, ("last collective", "ms"), ("finish", "ms"), ("exposed", "ms")], rows)


def _padded(plan: Plan, trace: RankTrace, asked: Problem) -> Problem:
    """`asked`, in which the first member of a bucket has its padding too."""
    sizes = list(asked.wire_bytes)
    for members in plan:
        sizes[members[0]] += bucket_bytes(trace, members) - sum(asked.wire_bytes[number] for number in members)
    return dataclasses.replace(asked, wire_bytes=tuple(sizes))


def _for_torch(found: TorchCaps, plan: Plan, asked: Problem) -> str:
    """The argument for torch's DDP, and what it achieves."""
    listed = ", ".join(map(repr, found.caps_mb))
    lines = [f"For torch's own DistributedDataParallel:\nbucket_cap_mb_list=[{listed}]"]
    if found.exact:
        lines.append(f"With it torch makes the plan's {len(plan)} buckets, once it has laid them out by readiness.")
    else:
        torchs, ours = timeline(found.plan, asked).last_done, timeline(plan, asked).last_done
        lines.append(
            f"The nearest there is: torch makes {len(found.plan)} buckets, of which {found.kept} are among the plan's "
            f"{len(plan)}; in the model its last collective ends {milliseconds((torchs - ours) / FS_PER_NS)} ms later."
        )
    lines.append("torch does that after the first step, and not with find_unused_parameters unless static_graph.\n")
    return "\n".join(lines)


def _keep(out: Path, first: RankTrace, plan: Plan) -> str:
    """Writes the plan, unless it cannot be used. Returns a line about it."""
    if first.source == "hook":
        return f"No {PLAN_FILE}: torch's reducer, which this was recorded with, loads no plan."
    names, numels = [one.name for one in first.parameters], [one.numel for one in first.parameters]
    wire = str(first.config["wire"])
    text = plan_file.dump(plan, names=names, numels=numels, world_size=first.ranks, wire=wire)
    replace_text(out / PLAN_FILE, text)
    return f"{out / PLAN_FILE}  the plan of policy planned, for ReduceConfig(plan=...)"
