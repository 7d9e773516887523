"""`fusedreduce plan`: the cost model's times of each policy on a recorded run, and the plan as torch takes it."""

from __future__ import annotations

import argparse
import dataclasses
import math
import shlex
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fusedreduce.config import Wire
from fusedreduce.errors import TraceError
from fusedreduce.kernels.encodings import ENCODINGS
from fusedreduce.planning import plan_file
from fusedreduce.planning.bucketing import MIB, BucketCaps
from fusedreduce.planning.cost_model import FS_PER_BYTE_AT_1_GBIT_S, FS_PER_NS, Costs, Linear
from fusedreduce.planning.plan import Plan
from fusedreduce.planning.timeline import Problem, ready_order, timeline
from fusedreduce.planning.torch_caps import TorchCaps, nearest
from fusedreduce.simulation.clusters import Row
from fusedreduce.simulation.networks import NETWORKS, Network
from fusedreduce.trace import wire_costs
from fusedreduce.trace.files import replace_text
from fusedreduce.trace.problem import known_copies, known_costs, problem, shares
from fusedreduce.trace.reader import RankTrace, read
from fusedreduce.trace.report import start_ns
from fusedreduce.trace.wire_costs import KernelTable
from fusedreduce.wires import WIRES

from . import simulate, wire_forecast
from .arguments import ALWAYS, Beside, add, bucket_caps, run_by, torchrun, writable
from .columns import columns
from .report import WIDTH
from .trace import beside, milliseconds
from .wire_forecast import WireForecast, padded, policies

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

_NO_VERDICT = """\
Verdict: none, and no wire is recommended: the link is that between the run's ranks, which were
on one machine, so its memory, or the trace does not say where they were. Name your network:"""


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
    recorded, compared = (Beside(("FOLDER",), ("--simulate",)), Beside(("FOLDER",), ("--simulate", "--wires")))
    add(parser, "folder", needs=ALWAYS, type=Path, nargs="?", metavar="FOLDER", help="where the traces are")
    add(
        parser,
        "--costs",
        needs=(Beside(("FOLDER",), ("--simulate", "--network")),),
        metavar="US,GBIT",
        help="latency in us and bandwidth in Gbit/s of one all-reduce (default: measured)",
    )
    add(
        parser,
        "--cap-mb",
        needs=ALWAYS,
        type=bucket_caps,
        metavar="MB",
        help="the largest bucket, in MiB (default: as recorded)",
    )
    add(
        parser,
        "--out",
        needs=(compared,),
        type=Path,
        metavar="FOLDER",
        help="where the file goes (default: beside the traces)",
    )
    add(
        parser,
        "--wires",
        needs=(recorded,),
        flag=True,
        help="compare wires instead, on the measured link, or on those of --network",
    )
    add(parser, "--simulate", needs=ALWAYS, flag=True, help="run models of training on models of clusters")
    simulate.add_arguments(parser)
    run_by(parser, _run)


def _run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    if arguments.folder is None:
        if arguments.simulate:
            simulate.run(arguments)
            return 0
        parser.error("the following arguments are required: FOLDER, or --simulate")
    try:
        traces = read(arguments.folder)
    except TraceError as error:
        parser.error(str(error))
    caps = arguments.cap_mb or traces[0].caps
    if arguments.simulate:
        return _simulate(parser, arguments, traces, caps)
    if arguments.wires:
        return _wires(parser, arguments, traces, caps)
    costs = _costs(parser, arguments.costs, traces)
    share = shares(traces[0])
    asked = problem(traces, costs, caps.planned_limit_bytes, share=share)
    _check_times(parser, asked)
    out = writable(parser, arguments.out or beside(arguments.folder))
    plans = policies(traces, asked, caps, share=share)
    recorded = traces[0].plans[traces[0].steps[-1].plan] if traces[0].steps else None
    print(f"fusedreduce plan: {_facts(traces, asked)}; {_link(costs.wire)}\n")
    shown = {**plans, **({"recorded": recorded} if recorded else {})}
    print(f"{_table({name: (plan, padded(plan, traces[0], asked)) for name, plan in shown.items()})}\n\n{_NOTES}\n")
    # torch keeps dtypes apart.
    apart = problem(traces, costs, caps.planned_limit_bytes, share=False) if share else asked
    best = policies(traces, apart, caps, share=False)["planned"] if share else plans["planned"]
    print(_for_torch(torch_caps(best, apart), best, apart))
    print(_keep(out, traces[0], plans["planned"]))
    return 0


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


def _simulate(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, traces: Sequence[RankTrace], caps: BucketCaps
) -> int:
    """Simulates the recorded run on clusters, with their links and its own costs of packing and unpacking."""
    copies = known_copies(traces)
    asked = problem(traces, copies, caps.planned_limit_bytes)
    _check_times(parser, asked)
    forwards = [-start_ns(step.marks) for trace in traces for step in trace.steps]
    forward_ns = statistics.median_low(forwards) if forwards else 0
    facts = f"{_facts(traces, asked)}; torch's buckets of {max(caps.limits_bytes) / MIB:g} MiB"
    own = traces[0].config["wire"]
    # Wires by parameter have no name of their own: they are simulated as they were recorded.
    wires = simulate.in_order(arguments.wire or [wire for wire in WIRES if wire == own])
    kernels = wire_costs.kernel_tables(traces[0])
    if not wires:
        found = simulate.table(simulate.case_of(traces, None, lambda _: copies, caps, forward_ns), arguments, caps)
        print(simulate.text(facts, found))
        return 0

    def rows_of(wire: Wire) -> Sequence[Row]:
        case = simulate.case_of(traces, wire, _copies_on(traces, wire, copies, kernels), caps, forward_ns)
        return simulate.table(case, arguments, caps)

    by_wire: dict[Wire, Sequence[Row]] = {}
    for wire in wires:
        by_wire[wire] = rows_of(wire)
        print(f"{simulate.text(f'{facts}, wire {wire}', by_wire[wire])}\n")
    print(simulate.wires_text(by_wire, by_wire.get("native") or rows_of("native"), "the recorded run"))
    return 0


def _copies_on(
    traces: Sequence[RankTrace], wire: Wire, copies: Costs, kernels: Callable[[int], KernelTable]
) -> Callable[[int], Costs]:
    """What packing and unpacking cost on a wire, by the number of ranks; on the recorded one as they were."""
    if wire == traces[0].config["wire"] and wire not in ENCODINGS:
        return lambda _: copies

    def among(ranks: int) -> Costs:
        theirs = [dataclasses.replace(trace, ranks=ranks) for trace in traces]
        return wire_forecast.scaled_costs(theirs, wire, copies, kernels(ranks))

    return among


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


def _table(plans: Mapping[str, tuple[Plan, Problem]]) -> str:
    rows = []
    for name, (plan, asked) in plans.items():
        found = timeline(plan, asked)
        times = [found.last_done, found.finish, found.finish - found.backward_end]
        rows.append([name, str(len(plan)), *(milliseconds(time_fs / FS_PER_NS) for time_fs in times)])
    headings = [("", "policy"), ("", "buckets"), ("last collective", "ms"), ("finish", "ms"), ("exposed", "ms")]
    return columns(headings, rows)


def _wires(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, traces: Sequence[RankTrace], caps: BucketCaps
) -> int:
    """Compares wires on the link that the run has measured, or on each network that was named."""
    if arguments.network is None:
        costs = _costs(parser, arguments.costs, traces)
        costs, combined = wire_forecast.recorded_link(traces, costs, given=arguments.costs is not None)
        links: list[tuple[str, Network | None, int]] = [(_link(costs.wire), None, traces[0].ranks)]
    else:
        costs, combined = known_copies(traces), True
        counts = arguments.ranks or (traces[0].ranks,)
        links = [
            (f"{NETWORKS[name].title}, {count} ranks", NETWORKS[name], count)
            for name in arguments.network
            for count in counts
        ]
    _check_times(parser, problem(traces, costs, caps.planned_limit_bytes))
    memory = arguments.network is None and arguments.costs is None and wire_forecast.of_memory(traces)
    verdicts, tables = [], wire_costs.kernel_tables(traces[0])
    for link, network, ranks in links:
        among = [dataclasses.replace(trace, ranks=ranks) for trace in traces]
        kernels = tables(ranks)

        def of_wire(wire: Wire, *, torchs: bool = False) -> WireForecast:
            theirs = wire_forecast.scaled_costs(among, wire, costs, kernels, combined=combined, network=network)  # noqa: B023
            return wire_forecast.on_wire(among, wire, theirs, caps, torchs=torchs)  # noqa: B023

        rows = [of_wire(wire) for wire in WIRES]
        took_ms = {row.wire: row.finish_ms for row in rows}
        print(f"fusedreduce plan: {_facts(traces, problem(traces, costs))}; {link}\n")
        print(f"{_table_of_wires(rows)}\n")
        if memory:
            line = f"fusedreduce plan {shlex.quote(str(arguments.folder))} --wires --network 10gbe --ranks 4"
            verdicts.append(f"{_NO_VERDICT}\n{line}")
            continue
        found = wire_forecast.verdict(took_ms, of_wire("native", torchs=True).finish_ms)
        hosts = network.hosts(ranks) if network else wire_forecast.nodes(traces)
        advice = wire_forecast.advice(found, torchrun(ranks, hosts))
        verdicts.append(f"{link}\n{advice}" if len(links) > 1 else advice)
    print("\n\n".join([textwrap.fill(_NOTES_ON_WIRES + kernels.source, WIDTH), *verdicts]))
    return 0


def _table_of_wires(rows: Sequence[WireForecast]) -> str:
    cells = [
        [
            row.wire,
            f"{row.sent_bytes / MIB:.2f}",
            str(len(row.plan)),
            *(f"{ms:.3f}" for ms in (row.copies_ms, row.last_done_ms, row.finish_ms, row.packed_exposed_ms)),
        ]
        for row in rows
    ]
    headings = [("", "wire"), ("on the wire", "MiB"), ("", "buckets"), ("copies", "ms")]
    return columns([*headings, ("last collective", "ms"), ("finish", "ms"), ("exposed", "ms")], cells)


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
