"""docs/scheduling_table.md: simulated clusters as a page, what follows first, then every figure.

python perf/scheduling_page.py > docs/scheduling_table.md     # a minute; at bf16 and native. Its options
                                                              # are those of `fusedreduce plan --simulate`
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterable, Sequence

from fusedreduce.cli.simulate import HEADS, Table, add_arguments, caps_of, cells, noise_of, percent, tables
from fusedreduce.planning.bucketing import MIB, UNLIMITED_BYTES, BucketCaps
from fusedreduce.simulation.clusters import GAIN, LOSS, RIVALS, Row
from fusedreduce.simulation.models import MODELS, Model
from fusedreduce.simulation.networks import ACCELERATORS, NETWORKS, Network, fastest_fs, lines
from fusedreduce.simulation.noise import Noise

# Of the networks' table: a bucket of torch's, over a few hosts.
_SIZE_BYTES, _RANKS = 25 * MIB, 64
_PAGE = """\
# Communication that stays exposed, simulated

Made by `{command}`; do not edit. What follows from it is in [scheduling.md](scheduling.md).

A model of training, not a measurement. A case is a model, what travels, a network and a number of ranks; there are
{count}, each without and with noise.

| policy | compared with | saves at least {gain:.1%} of a step | saves less | loses |
|---|---|---:|---:|---:|
{counts}

Saves: against *static*, in the better of the two (without or with noise). Loses: in the worse of the two a step takes
over {loss:.2%} longer than with one of those it is compared with. In {same} cases *ready* takes as long as *static*:
gradients of one dtype that come in order leave nothing to reorder.

What *planned* saves of a step, the least and the most over all numbers of ranks, without and with noise:

{overview}

{lost}

## How to read the tables

- *Exposed*, in ms and (without noise) as a share of the step: from where the slowest rank's backward would end without
  packing, to the last gradient reduced and unpacked on any rank. Packing and unpacking are in it; where the network is
  fast they are most of it. (`fusedreduce trace` and `fusedreduce plan FOLDER` count from the end of backward with its
  packing: what they call exposed leaves packing out.)
- *static*: torch's order and caps ({caps}). *ready*: the same caps, launched by readiness.
- *planned*: what the planner takes for the best of both and of its optimum with buckets of {reach}, from ready times
  that ranks agreed on and one straight line for the wire, fitted to the buckets of *static*. *capped*: the same with no
  bucket above {cap}.
- *noise*: every rank is delayed by 1 + {jitter} |z| in every step, and by another such factor from each gradient to the
  next, z normal{straggler}; means over 1 to 16 steps.
- *wire*: what gradients travel as; native: as they are. *compute*: forward and backward in ms, without noise.
  *buckets*: of the four plans, without noise. *saves*: of a step under *static*, without and with noise. *verdict*:
  where *planned* loses, or saves too little to count.

| network | hosts | a rank's port | NVLink | {size} over {ranks} ranks |
|---|---|---|---|---|
{networks}

| model | parameters | tensors | backward on A100 | on H100 |
|---|---:|---:|---:|---:|
{models}

{tables}"""


def page(
    tables: Sequence[Table],
    *,
    command: str,
    networks: Sequence[Network],
    models: Sequence[Model],
    noise: Noise,
    caps: BucketCaps,
) -> str:
    """The page, in Markdown.

    Args:
        tables: in order.
        command: that makes it.
        networks: theirs.
        models: theirs.
        noise: theirs.
        caps: theirs.
    """
    rows = [row for table in tables for row in table.rows]
    share, slowdown = noise.straggler_share, noise.straggler_slowdown
    reach_bytes = caps.planned_limit_bytes
    return _PAGE.format(
        command=command,
        count=len(rows),
        gain=GAIN,
        loss=LOSS,
        counts="\n".join(_counts(policy, rows) for policy in RIVALS),
        same=sum(_as_long(row, "static", "ready") for row in rows),
        overview=_overview(tables, networks),
        lost="\n\n".join(_lost(policy, tables) for policy in RIVALS),
        caps=" and then ".join(map(_size, caps.limits_bytes)),
        cap=_size(max(caps.limits_bytes)),
        reach="any size" if reach_bytes == UNLIMITED_BYTES else f"up to {_size(reach_bytes)}",
        jitter=noise.jitter,
        straggler=f"; {share:.1%} of ranks take {slowdown} times as long" if share else "",
        size=_size(_SIZE_BYTES),
        ranks=_RANKS,
        networks="\n".join(map(_network, networks)),
        models="\n".join(map(_model, models)),
        tables="\n\n".join(map(_table, tables)),
    )


def _as_long(row: Row, one: str, other: str) -> bool:
    """Whether two policies take the same time, without and with noise."""
    return all(steps.exposed_ms[one] == steps.exposed_ms[other] for steps in (row.quiet, row.noisy))


def _counts(policy: str, rows: Sequence[Row]) -> str:
    gains, losses = sum(row.gains(policy) for row in rows), sum(row.loses(policy) for row in rows)
    return _line([f"*{policy}*", ", ".join(RIVALS[policy]), gains, len(rows) - gains - losses, losses])


def _overview(tables: Sequence[Table], networks: Sequence[Network]) -> str:
    found = [_line(["", *(network.title for network in networks)]), _line(["---", *["---:"] * len(networks)])]
    for table in tables:
        on = [[row for row in table.rows if row.network is network] for network in networks]
        saved = [sorted(share for row in some for share in row.saved("planned")) for some in on]
        found.append(_line([table.name, *(f"{percent(one[0])} to {percent(one[-1])}" for one in saved)]))
    return "\n".join(found)


def _lost(policy: str, tables: Sequence[Table]) -> str:
    found = [
        f"- {table.name}, {row.network.title}, {row.ranks:,} ranks: {row.verdict(policy)}"
        for table in tables
        for row in table.rows
        if row.loses(policy)
    ]
    return "\n".join([f"Where *{policy}* loses:", "", *(found or ["- nowhere"])])


def _table(table: Table) -> str:
    rule = ["---", *["---:"] * (len(HEADS) - 2), "---"]
    found = [_line(line) for line in (HEADS, rule, *map(cells, table.rows))]
    return "\n".join([f"## {table.name}", "", f"{table.details}.", "", *found])


def _network(network: Network) -> str:
    hosts = f"{network.ranks_per_host} x {network.accelerator.upper()}"
    nvlink = "-" if network.ranks_per_host == 1 else f"{network.nvlink_gb_per_s:.0f} GB/s"
    choices = lines(network, _RANKS)
    name = min(choices, key=lambda name: choices[name].fs(_SIZE_BYTES))
    took = f"{fastest_fs(list(choices.values()), _SIZE_BYTES) / 1e12:.2f} ms ({name})"
    return _line([network.title, hosts, f"{network.port_gb_per_s:.0f} GB/s", nvlink, took])


def _model(model: Model) -> str:
    backward = (f"{max(model.workload(device).ready_ns) / 1e6:.1f} ms" for device in ACCELERATORS)
    return _line([model.title, f"{sum(model.numels):,}", len(model.numels), *backward])


def _line(found: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, found))} |"


def _size(size_bytes: int) -> str:
    return f"{size_bytes / MIB:g} MiB"


def main(typed: Sequence[str]) -> int:
    """Prints the page; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.set_defaults(cap_mb=None, wire=("bf16", "native"))
    arguments = parser.parse_args(typed)
    networks, models = arguments.network or tuple(NETWORKS), arguments.model or tuple(MODELS)
    print(
        page(
            list(tables(arguments)),
            command=shlex.join(["python", "perf/scheduling_page.py", *typed]),
            networks=list(map(NETWORKS.__getitem__, networks)),
            models=list(map(MODELS.__getitem__, models)),
            noise=noise_of(arguments),
            caps=caps_of(arguments),
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
