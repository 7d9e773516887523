"""The forecast of `fusedreduce doctor`: exposed communication of a step, by wire and plan, on a link.

The backward is a recorded one, or that of a model of which only the number of parameters is known: equal matrices whose
gradients become ready at an even pace. The link is the measured one, or a network that was named. Packing and unpacking
are as measured on this device. Python's own time per parameter is not included.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fusedreduce.config import Wire
from fusedreduce.errors import TraceError
from fusedreduce.planning.bucketing import MIB
from fusedreduce.planning.cost_model import FREE, FS_PER_NS, Costs
from fusedreduce.simulation.networks import Network
from fusedreduce.trace import wire_costs
from fusedreduce.trace.problem import known_copies, known_costs, problem
from fusedreduce.trace.reader import RankTrace, read
from fusedreduce.wires import WIRES

from .doctor_machine import Finding
from .wire_forecast import (
    Gradient,
    as_trace,
    named_link,
    on_wire,
    recorded_link,
    scaled_costs,
    verdict,
)

_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}
_MOST_PARAMETERS, _LEAST_NUMEL = 100, 4096
_MOST_NUMEL = 10**12


@dataclass(frozen=True)
class Backward:
    """A backward whose gradients are reduced.

    Args:
        title: description for the report.
        traces: of all ranks.
        costs: as recorded; None: not known.
    """

    title: str
    traces: Sequence[RankTrace]
    costs: Costs | None = None

    @property
    def took_ms(self) -> float:
        """When the last gradient is ready."""
        return max(problem(self.traces, Costs(wire=FREE)).ready_fs) / FS_PER_NS / 1e6

    def among(self, ranks: int) -> Backward:
        """The same on so many ranks."""
        return dataclasses.replace(self, traces=[dataclasses.replace(trace, ranks=ranks) for trace in self.traces])


@dataclass(frozen=True)
class Row:
    """The forecast of one wire.

    Args:
        wire: its name.
        size_mib: all gradients on it, in MiB, with the padding of the planned buckets.
        collectives_ms: time of one collective of all gradients.
        exposed_ms: exposed communication, with torch's buckets ("static") and by our plan ("planned").
    """

    wire: Wire
    size_mib: float
    collectives_ms: float
    exposed_ms: Mapping[str, float]


def parameters(typed: str) -> int:
    """A number of parameters, such as 110M, for argparse."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMB]?)", typed.strip().upper(), re.ASCII)
    count = round(float(found[1]) * _SUFFIXES[found[2]]) if found else 0
    if not 1 <= count <= _MOST_NUMEL:
        raise argparse.ArgumentTypeError(f"must be a number of parameters, such as 110M, 1.3B or 25000; got {typed!r}")
    return count


def positive(typed: str) -> float:
    """A positive number, for argparse."""
    try:
        value = float(typed)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"must be a positive number, got {typed!r}")
    return value


def of_model(numel: int, backward_ms: float, *, ranks: int = 2, device: str = "cpu") -> Backward:
    """A backward of which only the length and the number of fp32 parameters are known."""
    count = max(1, min(_MOST_PARAMETERS, numel // _LEAST_NUMEL))
    ends = [numel * (index + 1) // count for index in range(count)]
    gradients = [
        Gradient(end - begin, 2, round(backward_ms * 1e6) * (count - index) // count)
        for index, (begin, end) in enumerate(zip([0, *ends], ends, strict=False))
    ]
    title = f"{numel:,} fp32 parameters, backward of {backward_ms:.1f} ms"
    return Backward(title, [as_trace(gradients, ranks=ranks, device=device)])


def of_trace(folder: Path) -> Backward:
    """A recorded backward.

    Raises:
        TraceError: the folder has no trace, or one without ready times of gradients.
    """
    traces = read(folder)
    known = problem(traces, Costs(wire=FREE))
    if max(known.ready_ns) < 0:
        raise TraceError(f"the trace in {folder} has no ready time of any gradient: record more steps")
    numel = sum(parameter.numel for parameter in traces[0].parameters)
    title = f"{numel:,} parameters recorded in {folder.name}, backward of {max(known.ready_ns) / 1e6:.1f} ms"
    return Backward(title, traces, known_costs(traces))


def recorded_costs(backward: Backward, network: Network | None) -> dict[Wire, Costs]:
    """By wire what a bucket of a recorded run costs, on its own link or on a network; empty: that is not known."""
    traces = backward.traces
    if network is not None:
        costs, combined = known_copies(traces), True
    elif backward.costs is not None:
        costs, combined = recorded_link(traces, backward.costs, given=False)
    else:
        return {}
    kernels = wire_costs.kernel_table(traces[0])
    return {wire: scaled_costs(traces, wire, costs, kernels, combined=combined, network=network) for wire in WIRES}


def named_costs(network: Network, ranks: int, device: torch.device) -> dict[Wire, Costs]:
    """By wire what a bucket costs on a network, with packing and unpacking as measured on this device."""
    copies = wire_costs.copy_costs(device, ranks)
    return {
        wire: Costs(wire=named_link(network, ranks, wire), pack=pack, unpack=unpack)
        for wire, (pack, unpack) in copies.items()
    }


def forecast(backward: Backward, costs: Mapping[Wire, Costs]) -> list[Row]:
    """Computes the timeline of a step with each wire, by torch's buckets and by our plan.

    Args:
        backward: whose gradients are reduced.
        costs: of a bucket, by wire.

    Returns:
        A row per wire.
    """
    traces, rows = backward.traces, []
    for wire in WIRES:
        planned = on_wire(traces, wire, costs[wire], traces[0].caps)
        static = on_wire(traces, wire, costs[wire], traces[0].caps, torchs=True)
        total = costs[wire].wire.fs(planned.sent_bytes) / FS_PER_NS / 1e6
        exposed_ms = {"static": static.exposed_ms, "planned": planned.exposed_ms}
        rows.append(Row(wire, planned.sent_bytes / MIB, total, exposed_ms))
    return rows


def advice(backward: Backward, rows: Sequence[Row]) -> tuple[Finding, Wire | None]:
    """Recommends a wire.

    Returns:
        The finding, and the wire; None if no wire gains anything.
    """
    took_ms = {row.wire: backward.took_ms + row.exposed_ms["planned"] for row in rows}
    found = verdict(took_ms, backward.took_ms + rows[0].exposed_ms["static"])
    if found.wire is None:
        return Finding("note", "forecast", f"verdict: {found.text}", "stay with torch's DDP"), None
    loss = "" if found.wire == "native" else ", and compare the loss with that of wire native for some hundred steps"
    return Finding("ok", "forecast", f"verdict: {found.text}", f"write one of the two lines below{loss}"), found.wire
