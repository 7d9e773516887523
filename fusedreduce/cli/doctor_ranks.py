"""How the ranks of `fusedreduce doctor` connect, and what the link between them achieves.

Ranks exchange JSON through the launcher's key-value store, with a deadline each time: a rank that does not come is
named, and versions are compared before a process group is needed.
"""

from __future__ import annotations

import datetime
import functools
import json
import operator
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fusedreduce.collective.node_collectives import listen_or_connect
from fusedreduce.comm.agreement import ranks_text
from fusedreduce.comm.process_group import ProcessGroupCommunicator
from fusedreduce.comm.store_exchange import KeyValueStore
from fusedreduce.comm.waiting import wait_for
from fusedreduce.config import Wire
from fusedreduce.kernels.encodings import ENCODINGS
from fusedreduce.planning.cost_model import Linear, fit
from fusedreduce.trace.wire_costs import seconds
from fusedreduce.wires import PLAIN_WIRES, wire_dtype

from .arguments import torchrun
from .doctor_machine import Finding

_untyped: Any = dist  # names that torch does not say it exports
ENCODED = "encoded"  # the rows of a link that int8 and int4 share
MODULE = "-m fusedreduce.cli doctor"
NAMED = "fusedreduce doctor --model N --backward-ms MS --network 10gbe --ranks 4"
SIZES_BYTES = (256 * 1024, 2 * 1024**2, 16 * 1024**2)
_SIZE_S = 0.15  # of one size on one wire
_LEAST_TIMES, _MOST_TIMES = 3, 50
_SLOW_US = 2000.0
_NO_GAIN = 0.95
_ASK_EVERY_S = 0.02
PREFIX = "fusedreduce doctor"


class MissingRanksError(Exception):
    """Some ranks did not answer in time.

    Args:
        what: name of the exchange.
        ranks: those that did not answer.
        timeout_s: seconds that were waited.
    """

    def __init__(self, what: str, ranks: Sequence[int], timeout_s: float) -> None:
        super().__init__(f"no answer from {ranks_text(ranks)} within {timeout_s:g} s (exchange: {what})")
        self.ranks = tuple(ranks)


class Peers:
    """The ranks of this run, connected by a store.

    Args:
        rank: this rank's number.
        size: number of ranks.
        store: key-value store that all ranks use.
        timeout_s: of each exchange.
    """

    def __init__(self, rank: int, size: int, store: KeyValueStore, timeout_s: float) -> None:
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s
        self._store = store
        self._prefix = f"{PREFIX}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"

    def exchange(self, what: str, mine: Any, longer_s: float = 0.0) -> list[Any]:
        """Sends a value to all ranks.

        Args:
            what: name of the exchange, used once.
            mine: this rank's value, as JSON has it.
            longer_s: seconds to wait beyond the timeout.

        Returns:
            The values by rank.

        Raises:
            MissingRanksError: ranks have sent nothing within the timeout.
        """
        keys = {rank: f"{self._prefix}/{what}/{rank}" for rank in range(self.size)}
        self._store.set(keys[self.rank], json.dumps(mine))
        patience_s = self.timeout_s + longer_s
        if missing := self._missing(keys, patience_s):
            raise MissingRanksError(what, missing, patience_s)
        return [json.loads(self._store.get(key)) for key in keys.values()]

    def wait_until_printed(self, *, printed: bool, without: Sequence[int]) -> None:
        """Waits until a rank has printed the report; rank 0, which may host the store, waits until no rank needs it.

        A launcher ends all ranks as soon as one has failed, so a rank that exits early could prevent the report. No
        rank waits longer than the timeout.

        Args:
            printed: this rank has printed the report.
            without: ranks that are gone, and not waited for.
        """
        key = f"{self._prefix}/printed"
        gone = {rank: f"{self._prefix}/gone/{rank}" for rank in range(self.size) if rank not in without}
        try:
            if printed:
                self._store.set(key, "")
            else:
                self._missing({self.rank: key}, self.timeout_s)
            self._store.set(gone[self.rank], "")
            if self.rank == 0:
                self._missing(gone, self.timeout_s)
        except RuntimeError:
            return  # the rank that hosted the store has exited

    def _missing(self, keys: Mapping[int, str], patience_s: float) -> list[int]:
        """Ranks whose keys are not set when the time is over."""
        end = time.monotonic() + patience_s
        missing = list(keys)
        while missing := [rank for rank in missing if not self._store.check([keys[rank]])]:
            if time.monotonic() >= end:
                break
            time.sleep(_ASK_EVERY_S)
        return missing

    def join(self, backend: str) -> None:
        """Initialises the default process group with these ranks."""
        store = _untyped.PrefixStore(f"{self._prefix}/group", self._store)
        timeout = datetime.timedelta(seconds=self.timeout_s)
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=timeout)


def connect(rank: int, size: int, address: tuple[str, int], timeout_s: float) -> Peers:
    """Connects to the launcher's store, or to rank 0's if the launcher has none.

    Raises:
        RuntimeError: no store answers at the address.
    """
    listens = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return Peers(rank, size, listen_or_connect(*address, listens, timeout_s), timeout_s)


def differences(known: Sequence[dict[str, Any]]) -> list[Finding]:
    """Findings about versions and GPUs that differ between ranks.

    Args:
        known: `doctor_machine.facts` of each rank.
    """
    found = []
    values = {name: [machine["versions"][name] for machine in known] for name in known[0]["versions"]}
    values["NCCL"] = [machine["nccl"] for machine in known]
    values["GPU"] = [", ".join(sorted({gpu["name"] for gpu in machine["gpus"]})) or None for machine in known]
    for name, held in values.items():
        if len(set(held)) > 1:
            ranks = {
                value: [rank for rank, theirs in enumerate(held) if theirs == value] for value in dict.fromkeys(held)
            }
            text = f"{name} differs: " + ", ".join(
                f"{value or 'none'} on {ranks_text(on)}" for value, on in ranks.items()
            )
            most = max(ranks, key=lambda value: len(ranks[value]))
            others = ranks_text([rank for rank, theirs in enumerate(held) if theirs != most])
            if name in ("torch", "triton", "fusedreduce", "NCCL"):
                found.append(Finding("broken", "ranks", text, f"install the same {name} everywhere: change {others}"))
            else:
                found.append(
                    Finding("warning", "ranks", text, f"training works, at the pace of the slowest: check {others}")
                )
    return found or [Finding("ok", "ranks", f"{len(known)} of {len(known)} connected, with the same versions")]


def measure_link(device: torch.device) -> dict[str, Any]:
    """Measures latency, and a bucket's collectives at each size on each wire, on the slowest rank. Every rank calls it.

    Returns:
        backend, latency_us, and rows of wire, bytes, ms and gbit_per_s: what each rank sends and receives, which is
        2 (W - 1) / W of the bytes, by the time (nccl-tests calls it bus bandwidth). The wire "encoded" is what int8 and
        int4 do with their bytes: an all-gather of two ranks, else an all-to-all and an all-gather of shards.
    """
    size = dist.get_world_size()
    rows = []
    for wire in (*PLAIN_WIRES, ENCODED):
        for size_bytes in SIZES_BYTES:
            ms = _slowest_ms(exchange_of(wire, size_bytes, device), device)
            rate = 2 * (size - 1) / size * size_bytes * 8 / ms / 1e6
            rows.append({"wire": wire, "bytes": size_bytes, "ms": ms, "gbit_per_s": rate})
    latency_us = _slowest_ms(exchange_of("native", 4, device), device) * 1e3
    backend = "nccl" if device.type == "cuda" else "gloo"
    return {"backend": backend, "latency_us": latency_us, "rows": rows}


def of_memory(link: Mapping[str, Any], known: Sequence[Mapping[str, Any]]) -> bool:
    """Whether ranks talked through the memory of one machine; over NCCL that is PCIe or NVLink, as in training."""
    return link["backend"] == "gloo" and nodes(known) == 1


def nodes(known: Sequence[Mapping[str, Any]]) -> int:
    """On how many machines, or in how many network namespaces, ranks are, by `doctor_machine.facts` of each."""
    return len({(machine["host"], machine["boot"], machine["network"]) for machine in known})


def link_findings(link: dict[str, Any], known: Sequence[dict[str, Any]]) -> list[Finding]:
    """Findings about a link.

    Args:
        link: from `measure_link`.
        known: `doctor_machine.facts` of each rank.
    """
    found = []
    text = f"{link['backend']}, latency of an all-reduce {link['latency_us']:.0f} us"
    if link["latency_us"] > _SLOW_US:
        action = "check that ranks use the fast interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME) and have free cores"
        found.append(Finding("warning", "link", text, action))
    else:
        found.append(Finding("ok", "link", text))
    if of_memory(link, known):
        text = "all ranks are on one host: over Gloo these times are of this machine's memory, and not of a network"
        action = "start a rank on each of several machines, or name a network:"
        found.append(Finding("note", "link", text, action, [f"{torchrun(len(known))} {MODULE}", NAMED]))
    for host, ranks in _hosts(known).items():
        # A launcher may have given each rank cores of its own: the union counts.
        masks = [int(known[rank]["affinity"], 16) for rank in ranks]
        cores = functools.reduce(operator.or_, masks).bit_count()
        if not known[ranks[0]]["gpus"] and len(ranks) > cores:
            some = f"{cores} core{'s'[: cores != 1]}"
            text = f"{len(ranks)} ranks share {some} of {host}: these times show the cores, not the link"
            found.append(Finding("warning", "link", text, "start at most one rank per core"))
    # Of the same number of bytes; on a 16-bit wire these are twice as many elements.
    slow = [wire for wire in PLAIN_WIRES if wire != "native" and _ms(link, wire) / 2 > _NO_GAIN * _ms(link, "native")]
    if slow:
        wires = " and ".join(slow)
        text = f"{wires}: {link['backend']} reduces elements no faster than in fp32 here, so the link is not the limit"
        found.append(Finding("note", "link", text, "measure a step with wire='native' too before choosing one"))
    return found


def line(link: dict[str, Any], wire: Wire) -> Linear:
    """The planner's cost model of a bucket's collectives: their time by bytes on the wire."""
    measured = ENCODED if wire in ENCODINGS else wire
    samples = [(row["bytes"], round(row["ms"] * 1e6)) for row in link["rows"] if row["wire"] == measured]
    found = fit(samples)
    assert found is not None, "three sizes, and none in no time"
    return found


def _ms(link: dict[str, Any], wire: str) -> float:
    """Time of the largest all-reduce on a wire."""
    return float([row["ms"] for row in link["rows"] if row["wire"] == wire][-1])


def _hosts(known: Sequence[dict[str, Any]]) -> dict[str, list[int]]:
    hosts: dict[str, list[int]] = {}
    for rank, machine in enumerate(known):
        hosts.setdefault(machine["host"], []).append(rank)
    return hosts


def exchange_of(wire: str, size_bytes: int, device: torch.device) -> Callable[[], object]:
    """What a bucket of so many bytes does on a wire."""
    communicator = ProcessGroupCommunicator()
    ranks = communicator.size
    if wire != ENCODED:
        dtype = wire_dtype(wire) or torch.float32
        tensor = torch.zeros(size_bytes // dtype.itemsize, dtype=dtype, device=device)
        return lambda: wait_for(communicator.all_reduce(tensor), "an all-reduce", communicator)
    own = torch.zeros(size_bytes if ranks <= 2 else size_bytes // ranks, dtype=torch.uint8, device=device)
    contribution = own.repeat(ranks)
    received = torch.empty_like(contribution)

    def shards() -> None:
        if ranks > 2:
            wait_for(communicator.all_to_all(received, contribution), "an all-to-all", communicator)
        wait_for(communicator.all_gather(own, received)[0], "an all-gather", communicator)

    return shards


def _slowest_ms(call: Callable[[], object], device: torch.device) -> float:
    """The median of one call, on the slowest rank."""

    def once() -> float:
        return seconds(device, call)

    once()
    (first_s,) = _slowest([once()], device)
    times = max(_LEAST_TIMES, min(_MOST_TIMES, int(_SIZE_S / max(first_s, 1e-6))))
    return statistics.median(_slowest([once() for _ in range(times)], device)) * 1e3


def _slowest(times_s: Sequence[float], device: torch.device) -> list[float]:
    """The maximum of each time over ranks."""
    shared = torch.tensor(times_s, dtype=torch.float64, device=device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return [float(time_s) for time_s in shared.tolist()]
