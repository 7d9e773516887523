"""Training steps over a real network on one machine: namespaces joined by links of a given rate.

    fusedreduce bench link                               # four models, five rates, every variant: most of an hour
    fusedreduce bench link --quick                       # ResNet-18 at 1 Gbit/s, six ways: about a minute
    fusedreduce bench link --models mlp-8m --rates 300 2000 --variants "ours bf16" "batched copies, views"
    fusedreduce bench link --models gpt2-7m --rates 300 1000 --variants HSDP FSDP2 --rounds 10    # FSDP2's models
    fusedreduce bench link --ranks 3 --models resnet18   # takes as many cores: else its numbers are not shown
    torchrun ... -m fusedreduce.cli bench link --here --device cuda    # on the machines that torchrun started, over
                                                         # the network that they have (link_here.py)

Two ranks, each with a core and a network namespace of its own, joined by a bridge; tbf gives every link the rate. A
rate is that of the line, headers included, and in Mbit/s. All variants take turns step by step in one pair of
processes; what each leaves in gradients is checked first, and the bytes that it puts on the wire are counted. A step
is zero_grad, forward and backward, and as long as that of its slowest rank.

The bound (link_bound.py) is what no way of averaging can beat over this link, from when gradients are ready without
DDP, and a raw stream's rate. A result below it, or with the wrong number of bytes, is marked as failed. A link whose
raw stream misses the nominal rate by more than 3 % is measured and not published, nor is one with more ranks than
cores. Everything ends with this command, however it ends. Root, or user namespaces, are needed; iproute2 too.

Exit status 1 if something cannot be measured. Targets are printed; --check makes a missed one status 1.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kernel_cases
import link_bound
import link_cells
import link_forecast
import link_network
import link_steps
import link_variants
import models
import records
import torch
from records import BenchError
from render import demand_text, verdict_word

from fusedreduce.trace import wire_costs

ROOM = Path(__file__).with_name("link_room.py")
MODELS = ("resnet18", "gpt2-7m", "mlp-8m", "many:2000x64")
RATES_MBIT = (300.0, 1000.0, 2000.0, 5000.0, None)
ROUNDS, QUICK_ROUNDS = 20, 10
LIMIT_S, QUICK_LIMIT_S = 7200.0, 300.0


@dataclass
class Found:
    """What a run has brought so far."""

    link: dict[str, Any] = field(default_factory=dict)  # the present one
    rows: list[dict[str, Any]] = field(default_factory=list)
    ended_early: str | None = None
    copies: link_forecast.Copies = field(default_factory=dict)  # empty: nothing is forecast

    def forecast(self, cell: dict[str, Any], answers: Sequence[Mapping[str, Any]]) -> None:
        """Adds to a cell what the steps of ours should take, with each gradient as on the rank where it is last."""
        if self.copies and cell["ours_best"]:
            ready = [
                (max(share for share, _, _ in each), *each[0][1:])
                for each in zip(*(of["ready"] for of in answers), strict=True)
            ]
            latency_s = max(answer["latency_s"] for answer in answers)
            cell["forecast_ms"] = link_forecast.of_cell(cell, self.link, ready, latency_s, self.copies, len(answers))


def jobs(asked: argparse.Namespace) -> list[dict[str, Any]]:
    """What ranks are to do, rate by rate."""
    return [
        {
            "rate_mbit": rate,
            "command": {
                "do": "steps",
                "model": model,
                "variants": asked.variants,
                "rounds": asked.rounds,
                "warmup_rounds": asked.warmup,
            },
        }
        for rate in asked.rates
        for model in asked.models
    ]


def room(settings: Mapping[str, object], limit_s: float) -> Iterator[dict[str, Any]]:
    """Runs link_room.py and gives what it says, as it says it; it is killed when this ends, however it ends.

    Raises:
        TimeoutError: it has taken longer than `limit_s`.
        BenchError: it ended otherwise than by having done all.
    """
    read, write = os.pipe()
    command = link_network.room_command(ROOM, str(write))
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        text=True,
        pass_fds=[write],
        start_new_session=True,  # ^C is for this process, whose end is theirs
    )
    os.close(write)
    try:
        assert process.stdin is not None
        print(json.dumps(settings), file=process.stdin, flush=True)
        yield from _lines(read, limit_s)
        if process.wait() != 0:
            raise BenchError(f"the namespaces' first process ended with status {process.returncode}")
    finally:
        process.kill()
        process.wait()
        os.close(read)


def _lines(read: int, limit_s: float) -> Iterator[dict[str, Any]]:
    end_s, text = time.monotonic() + limit_s, b""
    with selectors.DefaultSelector() as selector:
        selector.register(read, selectors.EVENT_READ)
        while True:
            if not selector.select(max(0.0, end_s - time.monotonic())):
                raise TimeoutError
            got = os.read(read, 2**20)
            if not got:
                return
            *lines, text = (text + got).split(b"\n")
            yield from map(json.loads, lines)


def collect(asked: argparse.Namespace, cores: Sequence[int], found: Found) -> None:
    """Runs all jobs, shows each result as it comes and keeps it.

    Raises:
        BenchError: something is wrong; what was found before stays.
    """
    shared = len(set(cores)) < len(cores)
    for said in room({"cores": list(cores), "jobs": jobs(asked)}, asked.limit_s):
        if "error" in said:
            raise BenchError(said["error"])
        take(said, found, shared_cores=shared)


def take(said: Mapping[str, Any], found: Found, *, shared_cores: bool, counted: bool = True) -> None:
    """Keeps and shows one thing that the room, or rank 0, says."""
    if "raw" in said:
        row = found.link = link_cells.link_row(said["rate_mbit"], said["raw"], said.get("case"))
        row |= said.get("known", {})
        link_cells.show_link(row)
    else:
        answers = said["answers"]
        row = link_cells.cell(
            said["job"]["command"]["model"], found.link, answers, shared_cores=shared_cores, counted=counted
        )
        found.forecast(row, answers)
        link_cells.show(row)
    found.rows.append(row)


def show_forecast(found: Found) -> None:
    """Forecasts beside the measured steps of ours."""
    cells = [row for row in found.rows if "forecast_ms" in row]
    print("\n".join(["", *link_forecast.forecast_table(cells, [cell["forecast_ms"] for cell in cells])]))


# Command line


def parse_rate(text: str) -> float | None:
    """Mbit/s, or "unlimited", for argparse."""
    if text == link_cells.UNLIMITED:
        return None
    rate = float(text)
    if not 1 <= rate <= 100_000:
        raise ValueError(text)
    return rate


def options() -> argparse.Namespace:
    """What was asked for.

    Raises:
        BenchError: it makes no sense.
    """
    parser = records.Parser(description=__doc__)
    parser.add_argument("--models", nargs="+", metavar="NAME", help=f"default: {' '.join(MODELS)}")
    parser.add_argument("--rates", nargs="+", type=parse_rate, metavar="MBIT", help="Mbit/s, or unlimited")
    parser.add_argument(
        "--variants", nargs="+", metavar="TEXT", help="those that are called so, or whose name holds it"
    )
    parser.add_argument("--rounds", type=int, help=f"in which each variant is timed once (default: {ROUNDS})")
    parser.add_argument("--warmup", type=int, default=link_steps.WARMUP_ROUNDS, help="rounds before them, not timed")
    parser.add_argument("--ranks", type=int, default=2, help="each with a core of its own (default: 2)")
    parser.add_argument("--limit-s", type=float, help=f"everything is killed after that (default: {LIMIT_S:.0f})")
    parser.add_argument("--quick", action="store_true", help="resnet18 at 1 Gbit/s, few variants; no record by itself")
    parser.add_argument("--here", action="store_true", help="over the present network, as a rank that torchrun started")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="with --here: cuda is NCCL (default: cpu, over Gloo)")
    parser.add_argument("--check", action="store_true", help="exit status 1 if a target is missed")
    parser.add_argument(
        "--out", type=Path, help=f"folder for the JSON (default: perf/{records.RESULTS.name}; with --here: out)"
    )
    parser.add_argument("--rehearse", action="store_true", help="too small for numbers: the record says so")
    asked = parser.parse_args()
    if asked.ranks < 2 or (asked.rounds is not None and asked.rounds < 2) or asked.warmup < 1:
        parser.error("at least 2 ranks, 2 rounds and 1 round of warm-up")
    if asked.limit_s is not None and not asked.limit_s > 0:
        parser.error("--limit-s must be more than 0")
    if asked.here and (asked.rates or asked.limit_s or asked.check):
        parser.error("--here takes the present network, for as long as it takes: no --rates, --limit-s or --check")
    if asked.device and not asked.here:
        parser.error("--device is for --here: the links of the namespaces carry CPU tensors")
    for name in asked.models or ():
        models.shape_of(name)
    if asked.quick:
        asked.models, asked.rates = asked.models or ["resnet18"], asked.rates or [1000.0]
        asked.variants, asked.rounds = asked.variants or list(link_variants.QUICK), asked.rounds or QUICK_ROUNDS
    asked.models, asked.rates = asked.models or list(MODELS), asked.rates or list(RATES_MBIT)
    asked.variants, asked.rounds = asked.variants or [], asked.rounds or ROUNDS
    asked.limit_s = asked.limit_s or (QUICK_LIMIT_S if asked.quick else LIMIT_S)
    link_variants.picked(asked.variants)
    return asked


def record_name(asked: argparse.Namespace, *, complete: bool) -> str:
    """A run of all that has targets is "link", of which the README has its numbers; others lie beside it.

    One of FSDP2's models alone is "link-fsdp", which has a page.
    """
    if asked.ranks != 2:
        return f"link-{asked.ranks}ranks"
    if asked.variants and link_variants.of_shards(asked.variants):
        return "link-fsdp"
    all_models = set(asked.models) >= set(link_bound.TARGET_MODELS)
    all_rates = set(asked.rates) >= set(link_bound.TARGET_RATES_MBIT)
    judged = all_models and all_rates and not asked.variants
    return "link" if judged and complete else "link-part"


def main() -> int:
    """Runs what was asked for, prints tables and targets, writes one JSON."""
    if "--here" in sys.argv[1:]:
        import link_here  # imports this file

        link_here.run()
    asked = options()
    if not asked.rehearse:
        kernel_cases.prove_path(torch.device("cpu"))
    try:
        link_network.check_allowed()
    except link_network.LinkError as error:
        raise BenchError(str(error)) from None
    writes = asked.out is not None or not (asked.quick or asked.rehearse)
    if writes:
        records.make_folder(asked.out or records.RESULTS)  # now, and not after an hour
    have = sorted(os.sched_getaffinity(0))
    cores = [have[rank % len(have)] for rank in range(asked.ranks)]
    found = Found(copies=wire_costs.copy_costs(torch.device("cpu"), asked.ranks))
    try:
        collect(asked, cores, found)
    except TimeoutError:
        found.ended_early = f"--limit-s {asked.limit_s:g} was reached"
    except BenchError as error:  # what was checked and timed before it is worth keeping
        found.ended_early = str(error)
    if all(row["part"] == "links" for row in found.rows):
        raise BenchError(found.ended_early)
    demands = demanded(asked, found)
    show_forecast(found)
    print("\ntargets:" if demands else "\ntargets: none of what was measured has one")
    for one in demands:
        said = demand_text(one) + ("" if one["met"] is None else f": {verdict_word(one)}")
        print(f"  {said}" + (f"; the bound is {one['bound_ms']:.1f} ms" if "bound_ms" in one else ""))
    if writes:
        print(f"\n{write(asked, found, name=record_name(asked, complete=found.ended_early is None))}")
    if found.ended_early is not None:
        raise BenchError(f"{found.ended_early}: the rest is missing")
    return 1 if asked.check and not all(one["met"] for one in demands) else 0


def demanded(asked: argparse.Namespace, found: Found) -> list[dict[str, Any]]:
    """Of what was measured."""
    return [
        *link_bound.demands(found.rows),
        *link_bound.encoded_demands(found.rows, asked.ranks),
        *link_bound.shard_demands(found.rows, asked.ranks),
        *link_bound.auto_demands(found.rows),
    ]


def write(
    asked: argparse.Namespace, found: Found, *, name: str, device: torch.device | str = "cpu", **settings: Any
) -> Path:
    """The record of a run."""
    return records.write(
        asked.out or records.RESULTS,
        name,
        device,
        rehearsal=asked.rehearse,
        ranks=asked.ranks,
        cores=len(os.sched_getaffinity(0)),
        rounds=asked.rounds,
        warmup_rounds=asked.warmup,
        ended_early=found.ended_early,
        rows=found.rows,
        demands=demanded(asked, found),
        **settings,
    )


if __name__ == "__main__":
    records.entry(main)
