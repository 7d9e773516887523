"""`fusedreduce plan --simulate`: exposed communication of each policy, on clusters that are simulated.

`run` simulates known models, `table` any problem, such as one read from a trace; `text` formats it.
perf/scheduling_page.py makes the page of the documentation from `tables`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fusedreduce.config import WIRES
from fusedreduce.planning.bucketing import BucketCaps
from fusedreduce.planning.simulation.clusters import RIVALS, Case, Row, rows
from fusedreduce.planning.simulation.models import MODELS, Model
from fusedreduce.planning.simulation.networks import ACCELERATORS, NETWORKS, Network, copies
from fusedreduce.planning.simulation.noise import Noise
from fusedreduce.planning.simulation.simulate import POLICIES, problem_of

from .arguments import names, whole

HEADS = (
    *("network", "ranks", "compute", *POLICIES, *(f"{name}, noise" for name in POLICIES)),
    *("buckets", *(f"{name} saves" for name in RIVALS), "verdict"),
)
_RANKS = (8, 64, 512, 4096, 16384)
_ITEMSIZE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
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
    group = parser.add_argument_group("simulation, with --simulate")
    every = f"{','.join(map(str, _RANKS))}"
    for option, read, default, says in (
        ("--model", names(MODELS), tuple(MODELS), f"of {', '.join(MODELS)} (default: all)"),
        ("--network", names(NETWORKS), tuple(NETWORKS), f"of {', '.join(NETWORKS)} (default: all)"),
        ("--ranks", _counts, _RANKS, f"how many (default: {every})"),
        ("--wire", names(WIRES), ("bf16", "native"), f"what travels, of {', '.join(WIRES)} (default: bf16,native)"),
    ):
        group.add_argument(option, type=read, default=default, metavar=f"{option[2:].upper()}[,...]", help=says)
    group.add_argument("--gradients", choices=("fp32", "bf16"), default="fp32", help="their dtype (%(default)s)")
    group.add_argument("--accelerator", choices=tuple(ACCELERATORS), help="default: what the network's hosts have")
    group.add_argument("--batch", type=_COUNT, metavar="N", help="samples per rank (default: the model's)")
    group.add_argument(
        "--jitter", type=_number, default=0.05, metavar="X", help="random delays per rank and gradient (%(default)s)"
    )
    group.add_argument(
        "--straggler", type=_straggler, default=(0.0, 1.0), metavar="SHARE:SLOWDOWN", help="as 0.01:1.2 (default: none)"
    )
    group.add_argument("--seed", type=_COUNT, default=1, metavar="N", help="of the random delays (%(default)s)")


def run(arguments: argparse.Namespace) -> None:
    """Simulates known models and prints their tables."""
    for one in tables(arguments):
        print(f"{_text(f'{one.name}; {one.details}', one.rows)}\n", flush=True)
    print(_NOTES)


def tables(arguments: argparse.Namespace) -> Iterator[Table]:
    """Tables of known models, by the arguments; each is simulated when it is consumed."""
    for model in map(MODELS.__getitem__, arguments.model):
        for wire in arguments.wire:
            batch = arguments.batch or model.batch
            yield Table(
                name=f"{model.title}, wire {wire}",
                details=f"{batch} {model.sample} per rank, {arguments.gradients} gradients",
                rows=table(_case(model, wire, arguments), arguments, caps_of(arguments)),
            )


def table(case: Callable[[Network], Case], arguments: argparse.Namespace, caps: BucketCaps) -> list[Row]:
    """Simulates one backward on every cluster of the arguments.

    Args:
        case: the backward and forward on a given network.
        arguments: the options of `add_arguments`.
        caps: limits of the buckets.

    Returns:
        A row per cluster.
    """
    networks = list(map(NETWORKS.__getitem__, arguments.network))
    return list(rows(case, networks, arguments.ranks, noise_of(arguments), caps))


def caps_of(arguments: argparse.Namespace) -> BucketCaps:
    """Limits of the buckets: --cap-mb, else the defaults."""
    given: BucketCaps | None = arguments.cap_mb
    return given or BucketCaps()


def noise_of(arguments: argparse.Namespace) -> Noise:
    """Random delays and stragglers of the arguments."""
    share, slowdown = arguments.straggler
    return Noise(jitter=arguments.jitter, straggler_share=share, straggler_slowdown=slowdown, seed=arguments.seed)


def _case(model: Model, wire: str, arguments: argparse.Namespace) -> Callable[[Network], Case]:
    own = _ITEMSIZE_BYTES[arguments.gradients]
    travels = _ITEMSIZE_BYTES.get(wire, own)

    def case(network: Network) -> Case:
        device = arguments.accelerator or network.accelerator
        workload = model.workload(device, arguments.batch)
        copy = copies(ACCELERATORS[device], wire_itemsize_bytes=travels, gradient_itemsize_bytes=own)
        problem = problem_of(workload, copy, wire_itemsize_bytes=travels, gradient_itemsize_bytes=own)
        return Case(problem, workload.forward_ns)

    return case


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
