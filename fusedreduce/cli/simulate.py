"""`fusedreduce plan --simulate`: exposed communication of each policy, on clusters that are simulated.

`run` simulates known models, `table` any problem, such as one read from a trace; `text` formats it.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from fusedreduce.config import Wire
from fusedreduce.planning.bucketing import BucketCaps
from fusedreduce.planning.cost_model import FREE, Costs
from fusedreduce.simulation.clusters import RIVALS, Case, Row, rows
from fusedreduce.simulation.models import MODELS, Model
from fusedreduce.simulation.networks import ACCELERATORS, NETWORKS, Network, kernel
from fusedreduce.simulation.noise import Noise
from fusedreduce.simulation.simulate import POLICIES
from fusedreduce.trace.problem import on_wire, problem
from fusedreduce.trace.reader import RankTrace
from fusedreduce.trace.wire_costs import counted, paced, sent_bytes
from fusedreduce.wires import WIRES

from .arguments import Beside, add, names, torchrun, whole
from .columns import columns
from .report import WIDTH
from .wire_forecast import (
    Gradient,
    as_trace,
    compare_losses,
    lines_of_code,
    padded,
    shown,
    two_phases,
    verdict,
    wide,
)

HEADS = (
    *("network", "ranks", "compute", *POLICIES, *(f"{name}, noise" for name in POLICIES)),
    *("buckets", *(f"{name} saves" for name in RIVALS), "verdict"),
)
_RANKS = (8, 64, 512, 4096, 16384)
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_COUNT = whole(1, 2**16)
_NOTES = """\
Exposed, in ms and as a share of the step: from where the slowest rank's backward would end without packing, to the last
gradient reduced and unpacked on any rank; packing and unpacking are in it. (fusedreduce trace, and plan without
--simulate, count from the end of backward with its packing.) static, ready: torch's caps. planned: the planner's
buckets. capped: the same, none above the cap of static. saves: of a step under static, without and with noise."""


@dataclass(frozen=True)
class Table:
    """One model on many clusters.

    Args:
        name: the model and its wire.
        details: batch, accelerator and other settings.
        rows: one per cluster.
    """

    name: str
    details: str
    rows: Sequence[Row]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a simulation, except `--simulate` itself."""
    group = parser.add_argument_group("simulation, with --simulate, and networks, with --wires too")
    simulated, of_models = (Beside(("--simulate",)),), (Beside(("--simulate",), ("FOLDER",)),)
    compared = ("FOLDER", "--wires")
    every = f"{','.join(map(str, _RANKS))}"
    wires = ",".join(WIRES)
    for option, read, needs, says in (
        ("--model", names(MODELS), of_models, f"of {', '.join(MODELS)} (default: all)"),
        (
            "--network",
            names(NETWORKS),
            (*simulated, Beside(compared, ("--costs", "--simulate"))),
            f"of {', '.join(NETWORKS)} (default: all; with --wires the measured link)",
        ),
        (
            "--ranks",
            _counts,
            (*simulated, Beside((*compared, "--network NETWORK[,...]"))),
            f"how many (default: {every}; with --wires as recorded)",
        ),
        ("--wire", names(WIRES), simulated, f"what travels, of {wires} (default: all; with FOLDER as recorded)"),
    ):
        add(group, option, needs=needs, type=read, metavar=f"{option[2:].upper()}[,...]", help=says)
    add(
        group,
        "--gradients",
        needs=of_models,
        choices=("fp32", "bf16"),
        default="fp32",
        metavar="DTYPE",
        help="their dtype, fp32 or bf16 (%(default)s)",
    )
    add(
        group,
        "--accelerator",
        needs=of_models,
        choices=tuple(ACCELERATORS),
        metavar="NAME",
        help=f"of {', '.join(ACCELERATORS)} (default: what the network's hosts have)",
    )
    add(group, "--batch", needs=of_models, type=_COUNT, metavar="N", help="samples per rank (default: the model's)")
    add(
        group,
        "--jitter",
        needs=simulated,
        type=_number,
        default=0.05,
        metavar="X",
        help="random delays per rank and gradient (%(default)s)",
    )
    add(
        group,
        "--straggler",
        needs=simulated,
        type=_straggler,
        default=(0.0, 1.0),
        metavar="SHARE:SLOWDOWN",
        help="as 0.01:1.2 (default: none)",
    )
    add(
        group,
        "--seed",
        needs=simulated,
        type=_COUNT,
        default=1,
        metavar="N",
        help="of the random delays (%(default)s)",
    )


def run(arguments: argparse.Namespace) -> None:
    """Simulates known models and prints their tables, and for each model which wire to use."""
    ends = []
    for name in arguments.model or MODELS:
        model = MODELS[name]
        found: dict[Wire, Sequence[Row]] = {}
        for wire, made in _tables_of(model, arguments):
            found[wire] = made.rows
            print(f"{_text(f'{made.name}; {made.details}', made.rows)}\n", flush=True)
        torchs = found.get("native") or _rows_of(model, "native", arguments)
        ends.append(wires_text(found, torchs, model.title))
    print("\n\n".join([_NOTES, *ends]))


def _tables_of(model: Model, arguments: argparse.Namespace) -> Iterator[tuple[Wire, Table]]:
    for wire in in_order(arguments.wire or WIRES):
        batch = arguments.batch or model.batch
        yield (
            wire,
            Table(
                name=f"{model.title}, wire {wire}",
                details=f"{batch} {model.sample} per rank, {arguments.gradients} gradients",
                rows=_rows_of(model, wire, arguments),
            ),
        )


def _rows_of(model: Model, wire: Wire, arguments: argparse.Namespace) -> list[Row]:
    return table(_case(model, wire, arguments), arguments, caps_of(arguments))


def in_order(wires: Collection[Wire]) -> list[Wire]:
    """Wires from fine to coarse."""
    return [wire for wire in WIRES if wire in wires]


def table(case: Callable[[Network, int], Case], arguments: argparse.Namespace, caps: BucketCaps) -> list[Row]:
    """Simulates one backward on every cluster of the arguments.

    Args:
        case: the backward and forward on a given network, among so many ranks.
        arguments: the options of `add_arguments`.
        caps: limits of the buckets.

    Returns:
        A row per cluster.
    """
    networks = [NETWORKS[name] for name in arguments.network or NETWORKS]
    return list(rows(case, networks, arguments.ranks or _RANKS, noise_of(arguments), caps))


def caps_of(arguments: argparse.Namespace) -> BucketCaps:
    """Limits of the buckets: --cap-mb, else the defaults."""
    given: BucketCaps | None = arguments.cap_mb
    return given or BucketCaps()


def noise_of(arguments: argparse.Namespace) -> Noise:
    """Random delays and stragglers of the arguments."""
    share, slowdown = arguments.straggler
    return Noise(jitter=arguments.jitter, straggler_share=share, straggler_slowdown=slowdown, seed=arguments.seed)


def case_of(
    traces: Sequence[RankTrace], wire: Wire | None, costs: Callable[[int], Costs], caps: BucketCaps, forward_ns: int
) -> Callable[[Network, int], Case]:
    """The work of every rank, whose backward is that of a trace.

    Args:
        traces: of all ranks.
        wire: what travels; None: as recorded.
        costs: of packing and unpacking, by the number of ranks.
        caps: limits of the buckets.
        forward_ns: duration of forward.
    """

    def case(network: Network, ranks: int) -> Case:
        among = [dataclasses.replace(trace, ranks=ranks) for trace in traces]
        sent = among if wire is None else [on_wire(trace, wire) for trace in among]
        return Case(
            problem(sent, costs(ranks), caps.planned_limit_bytes),
            forward_ns,
            wide=None if wire is None else wide(wire),
            measured=not two_phases(sent[0]),
            padded=lambda plan, asked: padded(plan, sent[0], asked),
        )

    return case


def _case(model: Model, wire: Wire, arguments: argparse.Namespace) -> Callable[[Network, int], Case]:
    dtype = _DTYPES[arguments.gradients]
    caps = caps_of(arguments)

    @functools.cache
    def on(device: str) -> Callable[[Network, int], Case]:
        workload = model.workload(device, arguments.batch)
        found = list(map(Gradient, workload.numels, model.ndims, workload.ready_ns))

        def costs(ranks: int) -> Costs:
            took, sent = paced(counted(dtype, ranks))[wire], sent_bytes(wire, dtype)
            packing, unpacking = (
                kernel(ACCELERATORS[device], moved / sent) for moved in (took.pack, took.unpack + took.combine)
            )
            return Costs(wire=FREE, pack=packing, unpack=unpacking)

        trace = as_trace(found, ranks=1, device="cuda", dtype=dtype)
        return case_of([trace], wire, costs, caps, workload.forward_ns)

    return lambda network, ranks: on(arguments.accelerator or network.accelerator)(network, ranks)


def wires_text(found: Mapping[Wire, Sequence[Row]], torchs: Sequence[Row], what: str = "a step") -> str:
    """Steps on each cluster by wire, planned and without noise; which wire to use, and the lines to write.

    Args:
        found: by wire, from fine to coarse, rows of the same clusters.
        torchs: those at wire native, of which torch's DDP has the static buckets, whatever wires were asked for.
        what: is trained.
    """
    lines, chosen, gains = [], dict[Wire, str](), list[str]()
    for native, *on in zip(torchs, *found.values(), strict=True):
        took_ms = {
            wire: row.quiet.compute_ms + row.quiet.exposed_ms["planned"] for wire, row in zip(found, on, strict=True)
        }
        torch_ms = native.quiet.compute_ms + native.quiet.exposed_ms["static"]
        advised = verdict(took_ms, torch_ms, what).wire
        lines.append(
            [
                native.network.title,
                f"{native.ranks:,}",
                *(f"{ms:.1f}" for ms in (torch_ms, *took_ms.values())),
                advised or "torch's DDP",
            ]
        )
        if advised is not None:
            chosen.setdefault(advised, torchrun(native.ranks, native.network.hosts(native.ranks)))
            gains.append(f"{1 - took_ms[advised] / torch_ms:.0%}")
    headings = [("", "network"), ("", "ranks"), ("torch,", "native"), *(("", wire) for wire in found)]
    rows = columns([*headings, ("", "use")], lines, last_is_text=True)
    title = f"{what}: ms of a step by wire, planned, without noise; torch: with its buckets"
    if not chosen:
        return f"{title}\n\n{rows}\n\nVerdict: little to gain on any of these: stay with torch's DDP."
    ordered = [wire for wire in found if wire in chosen]
    saved = gains[0] if len(gains) == 1 else f"up to {max(gains, key=lambda gain: float(gain[:-1]))}"
    end = (
        f"Verdict: {' or '.join(ordered)}, by the column `use`, saves {saved} of a step. {compare_losses(ordered)}"
        f"Write one of these{', with the number of your hosts' if len(lines) > 1 else ''}:"
    )
    code = [shown(line) for wire in ordered for line in lines_of_code(wire, chosen[wire])]
    return "\n".join([title, "", rows, "", textwrap.fill(end, WIDTH), *code])


def cells(row: Row) -> list[str]:
    """A row's cells, in the order of HEADS."""
    return [
        row.network.title,
        f"{row.ranks:,}",
        f"{row.quiet.compute_ms:.1f}",
        *(f"{row.quiet.exposed_ms[name]:.2f} ({row.quiet.share(name):.1%})" for name in POLICIES),
        *(f"{row.noisy.exposed_ms[name]:.2f}" for name in POLICIES),
        "/".join(str(row.buckets[name]) for name in POLICIES),
        *(", ".join(map(percent, row.saved(policy))) for policy in RIVALS),
        row.verdict("planned"),
    ]


def text(title: str, found: Sequence[Row]) -> str:
    """A table for a terminal, with explanations of its columns."""
    return f"{_text(title, found)}\n\n{_NOTES}"


def _text(title: str, found: Sequence[Row]) -> str:
    lines = [HEADS, *map(cells, found)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ["  ".join([*map(str.rjust, line[:-1], widths), line[-1]]).rstrip() for line in lines]
    return "\n".join([f"{title}: ms exposed", "", padded[0], "-" * len(padded[0]), *padded[1:]])


def _counts(typed: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(map(_COUNT, typed.split(","))))


def percent(share: float) -> str:
    """A share of one as a percentage."""
    return f"{round(share, 3) + 0.0:.1%}"  # + 0.0: without it, -0.0 % where a trifle is lost


def _number(typed: str) -> float:
    try:
        return Noise(jitter=float(typed)).jitter
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _straggler(typed: str) -> tuple[float, float]:
    share, _, slowdown = typed.partition(":")
    try:
        noise = Noise(straggler_share=float(share), straggler_slowdown=float(slowdown))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be SHARE:SLOWDOWN, such as 0.01:1.2: {error}") from None
    return noise.straggler_share, noise.straggler_slowdown
