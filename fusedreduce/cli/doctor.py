"""`fusedreduce doctor`: checks this machine, the ranks and the link between them.

Without torchrun it checks one process. Under torchrun ranks connect, rank 0 prints, and all exit with one status.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fusedreduce.comm import init_process_group
from fusedreduce.comm.agreement import ranks_text
from fusedreduce.config import Wire
from fusedreduce.errors import TraceError
from fusedreduce.kernels.encodings import ENCODINGS
from fusedreduce.planning.bucketing import MIB
from fusedreduce.planning.cost_model import Costs, Linear
from fusedreduce.simulation.networks import NETWORKS
from fusedreduce.trace import wire_costs

from . import doctor_forecast, doctor_machine, doctor_ranks, wire_forecast
from .arguments import ALWAYS, ONE_MACHINE, SEVERAL_MACHINES, Beside, add, run_by, torchrun, whole
from .doctor_forecast import Backward, Row
from .doctor_machine import Finding
from .doctor_ranks import MODULE, MissingRanksError, Peers
from .report import WIDTH, as_json, one_line
from .wire_forecast import lines_of_code, shown

_TIMEOUT_S = 60.0
_NAMED_RANKS = 4
_MARKS = {"ok": "[ok]", "note": "[note]", "warning": "[warn]", "broken": "[BROKEN]"}
_ABOUT_WIDTH = 9
_INDENT = len("[BROKEN] ") + _ABOUT_WIDTH + 1
_COMMANDS = "\n".join(textwrap.indent(shown(f"{line} {MODULE}"), "  ") for line in (*SEVERAL_MACHINES, ONE_MACHINE))
_DESCRIPTION = f"""\
Prints versions, GPUs, driver and NCCL, whether the kernels give the right bits on each device, and, under torchrun,
whether all ranks have the same versions, and latency and bandwidth of the link between them. With --model or --trace:
how much communication a step should expose with each wire and plan on that link, or on the network that --network
names, a verdict, and the line to write. Takes seconds. Start it on each machine as training will be started; under
Slurm; or with the ranks of one machine:

{_COMMANDS}"""


def add_parser(subparsers: Any) -> None:
    """Adds `doctor` to the command line."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "doctor",
        help="check this machine, the kernels, and under torchrun the link between ranks",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit status: 0 nothing is broken (there may be warnings); 1 something is broken, and the report says\n"
        "what to do; 2 wrong usage.",
        allow_abbrev=False,
    )
    add(
        parser,
        "--model",
        needs=(Beside(absent=("--trace",)),),
        type=doctor_forecast.parameters,
        metavar="N",
        help="forecast for N parameters, such as 110M",
    )
    add(
        parser,
        "--trace",
        needs=ALWAYS,
        type=Path,
        metavar="FOLDER",
        help="forecast for the steps of record_trace(FOLDER)",
    )
    add(
        parser,
        "--backward-ms",
        needs=(Beside(("--model N",), ("--trace",)),),
        type=doctor_forecast.positive,
        metavar="MS",
        help="how long backward takes (default: as long as one all-reduce of its fp32 gradients)",
    )
    add(
        parser,
        "--network",
        needs=(Beside(("--model N",)), Beside(("--trace FOLDER",))),
        choices=tuple(NETWORKS),
        metavar="NAME",
        help=f"forecast for this network, of {', '.join(NETWORKS)} (default: the measured link)",
    )
    add(
        parser,
        "--ranks",
        needs=(Beside(("--model N", "--network NAME")), Beside(("--trace FOLDER", "--network NAME"))),
        type=whole(2, 2**16),
        metavar="N",
        help=f"on so many ranks (default: as started, or as recorded; else {_NAMED_RANKS})",
    )
    add(
        parser,
        "--timeout",
        needs=ALWAYS,
        type=doctor_forecast.positive,
        default=_TIMEOUT_S,
        metavar="S",
        help="seconds that ranks wait for each other, each time (default: %(default)g)",
    )
    add(parser, "--json", needs=ALWAYS, flag=True, help="print JSON, and nothing else")
    run_by(parser, _run)


@dataclasses.dataclass
class Report:
    """The report so far: the same on every rank, except on one that has lost others.

    Args:
        ranks: number of ranks that were started.
        known: `doctor_machine.facts` of each rank.
        findings: in the order in which they are printed.
        link: from `doctor_ranks.measure_link`.
        backward: the backward of the forecast.
        rows: the forecast, a row per wire.
        wire: the recommended wire; None: no wire gains anything.
        launcher: starts the ranks of the forecast.
        speaks: this rank prints the report.
        missing: ranks that did not answer.
    """

    ranks: int
    known: list[dict[str, Any]]
    findings: list[Finding]
    link: dict[str, Any] | None = None
    backward: Backward | None = None
    rows: Sequence[Row] = ()
    wire: Wire | None = None
    launcher: str = ""
    speaks: bool = True
    missing: Sequence[int] = ()

    @property
    def status(self) -> int:
        """The exit status."""
        return int(any(finding.status == "broken" for finding in self.findings))


def _run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    try:
        recorded = doctor_forecast.of_trace(arguments.trace) if arguments.trace else None
    except TraceError as error:
        parser.error(f"argument --trace: {error}")
    if not os.environ.keys() & {"RANK", "WORLD_SIZE"}:
        report = _alone()
        add_forecast(report, arguments, recorded, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        _print(report, as_json_only=arguments.json)
        return report.status
    try:
        rank, size, address = init_process_group.rank_size_address()
        backend = init_process_group.backend_named("auto")
        init_process_group.choose_device(backend, size)
    except ValueError as error:
        parser.error(str(error))
    report = Report(size, [], [], speaks=rank == 0)
    peers = _together(report, rank, address, backend, arguments, recorded)
    if report.speaks:
        _print(report, as_json_only=arguments.json)
    sys.stdout.flush()
    sys.stderr.flush()
    if peers is not None:
        peers.wait_until_printed(printed=report.speaks, without=report.missing)
    # No ordinary exit: destroying a process group may wait for peers that are gone (see launch.as_rank).
    os._exit(report.status)


def _alone() -> Report:
    known = doctor_machine.facts()
    devices = ["cpu", *(f"cuda:{index}" for index in range(len(known["gpus"])))]
    findings = doctor_machine.machine_findings(known)
    findings += [doctor_machine.check_kernels(torch.device(device)) for device in devices]
    return Report(1, [known], findings)


def _together(
    report: Report,
    rank: int,
    address: tuple[str, int],
    backend: str,
    arguments: argparse.Namespace,
    recorded: Backward | None,
) -> Peers | None:
    """Fills the report with all ranks' findings, or with this rank's alone if others cannot be reached.

    Returns:
        The connection to the other ranks; None if there never was one.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if "cuda" in backend else torch.device("cpu")
    known = doctor_machine.facts()
    own = [*doctor_machine.machine_findings(known), doctor_machine.check_kernels(device)]
    report.known, report.findings = [known], own
    peers = None
    try:
        peers = doctor_ranks.connect(rank, report.ranks, address, arguments.timeout)
        heard = peers.exchange("machine", [known, list(map(dataclasses.asdict, own))])
        report.known = [facts for facts, _ in heard]
        report.findings = merge([[Finding(**fields) for fields in found] for _, found in heard])
        report.findings += doctor_ranks.differences(report.known)
        if report.ranks > 1:
            _measure(report, peers, backend, device, arguments, recorded)
        else:
            add_forecast(report, arguments, recorded, device)
    except MissingRanksError as error:
        action = (
            f"check whether {ranks_text(error.ranks)} started, on which host, and what it printed; all hosts must be "
            f"able to connect to {address[0]}:{address[1]}"
        )
        report.findings.append(Finding("broken", "ranks", str(error), action))
        report.missing = error.ranks
        report.speaks = rank == min(set(range(report.ranks)).difference(error.ranks))
    except RuntimeError as error:
        action = f"start all ranks with torchrun, and check that this host can connect to {address[0]}:{address[1]}"
        report.findings.append(Finding("broken", "ranks", f"rank {rank}: {one_line(error)}", action))
        report.speaks = True  # other ranks may not know of it
    return peers


def _measure(
    report: Report,
    peers: Peers,
    backend: str,
    device: torch.device,
    arguments: argparse.Namespace,
    recorded: Backward | None,
) -> None:
    """Measures the link, and adds it and the forecast to the report."""
    link: dict[str, Any] | None = None
    copies: dict[Wire, tuple[Linear, Linear]] = {}
    problem = ""
    try:
        peers.join(backend)
        link = doctor_ranks.measure_link(device)
        if (arguments.model or recorded) and not arguments.network:
            copies = wire_costs.copy_costs(device, report.ranks)
    except RuntimeError as error:
        problem = one_line(error)
    # Rank 0's costs are used; the link's are the same on all ranks. A rank that failed at once waits here for ranks
    # that run into a timeout.
    mine = [problem, {wire: [dataclasses.asdict(line) for line in pair] for wire, pair in copies.items()}]
    heard = peers.exchange("link", mine, longer_s=peers.timeout_s)
    failed = [rank for rank, (why, _) in enumerate(heard) if why]
    if failed or link is None:
        text = f"{ranks_text(failed)}: an all-reduce failed: {heard[failed[0]][0]}"
        action = (
            "check that ranks can connect to each other on any port, through the interface in GLOO_SOCKET_IFNAME or "
            "NCCL_SOCKET_IFNAME"
        )
        report.findings.append(Finding("broken", "link", text, action))
        return
    report.link = link
    report.findings += doctor_ranks.link_findings(link, report.known)
    costs = {
        wire: Costs(wire=doctor_ranks.line(link, wire), pack=Linear(**pack), unpack=Linear(**unpack))
        for wire, (pack, unpack) in heard[0][1].items()
    }
    add_forecast(report, arguments, recorded, device, costs)


def add_forecast(
    report: Report,
    arguments: argparse.Namespace,
    recorded: Backward | None,
    device: torch.device,
    costs: Mapping[Wire, Costs] | None = None,
) -> None:
    """Adds the forecast that was asked for.

    Args:
        report: to which it is added.
        arguments: the options.
        recorded: a recorded backward.
        device: on which gradients would be.
        costs: by wire, on the measured link; None: none was measured.
    """
    if recorded is None and arguments.model is None:
        return
    network = NETWORKS[arguments.network] if arguments.network else None
    started = report.ranks if report.ranks > 1 else None
    own = None if recorded is None else recorded.traces[0].ranks
    ranks = (arguments.ranks or started or own or _NAMED_RANKS) if network else (started or own or 1)
    if recorded is not None:
        recorded = recorded.among(ranks)
        costs = costs if costs and not network else doctor_forecast.recorded_costs(recorded, network)
    elif network is not None:
        costs = doctor_forecast.named_costs(network, ranks, device)
    if not costs:
        text = "no forecast: with one rank there is no link to measure"
        action = "start a rank on each of several machines, or name a network:"
        lines = [f"{SEVERAL_MACHINES[0]} {MODULE} {_asked(arguments)}", _named(arguments)]
        report.findings.append(Finding("note", "forecast", text, action, lines))
        return
    memory, hosts = False, None
    if network is not None:
        hosts = network.hosts(ranks)
    elif report.link is not None:
        memory, hosts = doctor_ranks.of_memory(report.link, report.known), doctor_ranks.nodes(report.known)
    elif recorded is not None:
        memory, hosts = wire_forecast.of_memory(recorded.traces), wire_forecast.nodes(recorded.traces)
    report.launcher = torchrun(ranks, hosts)
    assumed = recorded is None and arguments.backward_ms is None
    if recorded is None:
        all_ms = costs["native"].wire.fs(4 * arguments.model) / 1e12
        backward_ms = arguments.backward_ms or max(all_ms, 0.001)
        recorded = doctor_forecast.of_model(arguments.model, backward_ms, ranks=ranks, device=device.type)
    if network is not None:
        recorded = dataclasses.replace(recorded, title=f"{recorded.title}, {ranks} ranks on {network.title}")
    report.backward = recorded
    report.rows = doctor_forecast.forecast(recorded, costs)
    if memory:
        text = "verdict: none, and no wire is recommended: what was measured is this machine's memory"
        if report.link is None:
            text += ", or the trace does not say where its ranks were"
        report.findings.append(
            Finding("note", "forecast", text, "name the network that you have:", [_named(arguments)])
        )
        return
    advice, report.wire = doctor_forecast.advice(recorded, report.rows)
    if assumed:
        text = f"{advice.text}, if backward takes as long as one all-reduce of its fp32 gradients"
        action = f"{advice.action}; pass --backward-ms, since the forecast depends on it"
        advice = dataclasses.replace(advice, text=text, action=action)
    report.findings.append(advice)


def _asked(arguments: argparse.Namespace) -> str:
    """The backward that was asked for, as options."""
    if arguments.model is None:
        return f"--trace {shlex.quote(str(arguments.trace))}"
    backward_ms = "MS" if arguments.backward_ms is None else f"{arguments.backward_ms:g}"
    return f"--model {arguments.model} --backward-ms {backward_ms}"


def _named(arguments: argparse.Namespace) -> str:
    """The command that forecasts the same on a named network."""
    return f"fusedreduce doctor {_asked(arguments)} --network 10gbe --ranks {_NAMED_RANKS}"


def merge(findings: Sequence[Sequence[Finding]]) -> list[Finding]:
    """Merges the ranks' findings into one list, in which a finding of some ranks only names them."""
    ranks: dict[tuple[str, str, str], list[int]] = {}
    first: dict[tuple[str, str, str], Finding] = {}
    for rank, found in enumerate(findings):
        for finding in found:
            # The texts of passed checks differ, by duration and device.
            key = (finding.status, finding.about, "" if finding.status == "ok" else finding.text)
            ranks.setdefault(key, []).append(rank)
            first.setdefault(key, finding)
    merged = []
    for kind, on in ranks.items():
        finding = first[kind]
        some = "" if len(on) == len(findings) else f"{ranks_text(on)}: "
        merged.append(dataclasses.replace(finding, text=some + finding.text))
    return merged


def _print(report: Report, *, as_json_only: bool) -> None:
    if as_json_only:
        print(as_json(_plain(report)))
        return
    hosts = len({machine["host"] for machine in report.known})
    where = f"{report.ranks} ranks on {hosts} host{'s'[: hosts > 1]}" if report.ranks > 1 else "one process"
    print(f"fusedreduce doctor: {where}\n")
    for number, finding in enumerate(report.findings):
        again = number and report.findings[number - 1].about == finding.about
        _print_finding(finding, "" if again else finding.about)
        last = number + 1 == len(report.findings) or report.findings[number + 1].about != finding.about
        if last and finding.about == "link" and report.link is not None:
            _print_lines(_link_table(report.link))
        if finding.about == "forecast" and report.rows:
            _print_lines(_forecast_table(report))
            if report.wire is not None:
                print("\n".join(map(shown, lines_of_code(report.wire, report.launcher))))  # as they are to be copied
    counts = [sum(finding.status == status for finding in report.findings) for status in ("broken", "warning")]
    print(f"\n{counts[0]} broken, {counts[1]} warning{'s'[: counts[1] != 1]}")


def _print_finding(finding: Finding, about: str) -> None:
    head = f"{_MARKS[finding.status]:<8} {about:<{_ABOUT_WIDTH}} "
    print(_filled(finding.text, head, " " * len(head)))
    if finding.action:
        indent = " " * len(head)
        print(_filled(finding.action, f"{indent}-> ", f"{indent}   "))
    for line in finding.write:
        print(shown(line))  # at the margin, as it is to be copied


def _filled(text: str, first: str, then: str) -> str:
    # Options are not broken at their hyphens: a command is to be copied.
    return textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=then, break_on_hyphens=False)


def _print_lines(lines: Sequence[str]) -> None:
    print(textwrap.indent("\n".join(lines), " " * _INDENT))


def _link_table(link: Mapping[str, Any]) -> list[str]:
    """Lines of a table: time and rate of a bucket's collectives, by size and wire."""
    sizes = sorted({row["bytes"] for row in link["rows"]})
    lines = ["all-reduce" + "".join(f"{_size(size):>22}" for size in sizes)]
    for wire in dict.fromkeys(row["wire"] for row in link["rows"]):
        cells = [
            f"{row['ms']:.2f} ms {row['gbit_per_s']:.2f} Gbit/s".rjust(22)
            for row in link["rows"]
            if row["wire"] == wire
        ]
        name = ", ".join(ENCODINGS) if wire == doctor_ranks.ENCODED else wire
        lines.append(f"{name:<10}" + "".join(cells))
    return lines


def _forecast_table(report: Report) -> list[str]:
    assert report.backward is not None
    lines = textwrap.wrap(f"{report.backward.title}; exposed behind it:", WIDTH - _INDENT)
    lines.append(f"{'wire':<8}{'MiB':>10}{'one collective':>18}{'torch buckets':>18}{'planned':>14}")
    for row in report.rows:
        times = (row.collectives_ms, row.exposed_ms["static"], row.exposed_ms["planned"])
        cells = "".join(f"{time_ms:.1f} ms".rjust(width) for time_ms, width in zip(times, (18, 18, 14), strict=True))
        lines.append(f"{row.wire:<8}{row.size_mib:>10.1f}{cells}")
    return lines


def _size(size_bytes: int) -> str:
    return f"{size_bytes // MIB} MiB" if size_bytes >= MIB else f"{size_bytes // 1024} KiB"


def _plain(report: Report) -> dict[str, Any]:
    forecast = None
    if report.backward is not None:
        forecast = {
            "of": report.backward.title,
            "rows": [dataclasses.asdict(row) for row in report.rows],
            "wire": report.wire,
            "write": [] if report.wire is None else lines_of_code(report.wire, report.launcher),
        }
    return {
        "status": report.status,
        "ranks": report.ranks,
        "findings": [dataclasses.asdict(finding) for finding in report.findings],
        "machines": report.known,
        "link": report.link,
        "forecast": forecast,
    }
