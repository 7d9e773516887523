"""The link benchmark over the present network, where torchrun has started the ranks: nothing is shaped, nor pinned.

Other traffic may go through the interface, and ranks of one machine share its counters: bytes are shown, not judged.
A machine with fewer cores than ranks is found, and the result marked.
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import json
import os
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import bench_link
import link_bound
import link_raw
import torch
import torch.distributed as dist
from link_rank import Rank
from records import BenchError

from fusedreduce.cli import wire_costs

_SIOCGIFADDR = 0x8915  # linux/sockios.h: an interface's IPv4 address


def run(asked: argparse.Namespace) -> NoReturn:
    """One rank's part of it; rank 0 shows and writes.

    Raises:
        BenchError: torchrun has not started this, or something cannot be measured.
    """
    if "RANK" not in os.environ:
        raise BenchError("--here is for ranks of torchrun: torchrun ... -m fusedreduce.cli bench link --here")
    rank = Rank(os.environ.get("GLOO_SOCKET_IFNAME") or interface_of(link_raw.own_address()))
    found = bench_link.Found(copies=wire_costs.copy_costs(torch.device("cpu"), rank.ranks) if rank.rank == 0 else {})
    asked.rates, asked.ranks = [None], rank.ranks
    shared = shares_cores(gather([socket.gethostname(), sorted(os.sched_getaffinity(0))]))
    raw_of_all = gather(rank.do({"do": "raw"}))
    link = dataclasses.asdict(link_bound.quickest(None, raw_of_all))
    _take(rank, found, {"rate_mbit": None, "raw": raw_of_all}, shared_cores=shared)
    for job in bench_link.jobs(asked):
        answers = gather(rank.do({**job["command"], "link": link}))
        _take(rank, found, {"job": job, "answers": answers}, shared_cores=shared)
    if rank.rank == 0:
        bench_link.show_forecast(found)
    if rank.rank == 0 and asked.out is not None:
        print(f"\n{bench_link.write(asked, found, name='link-here')}")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # Gloo's threads may outlive the interpreter and abort the process


def _take(rank: Rank, found: bench_link.Found, said: Mapping[str, Any], *, shared_cores: bool) -> None:
    if rank.rank == 0:
        bench_link.take(said, found, shared_cores=shared_cores, counted=False)


def shares_cores(places: Sequence[tuple[str, Sequence[int]]]) -> bool:
    """Whether a host has more ranks than cores for them.

    Args:
        places: of each rank its host, and the cores on which it may run.
    """
    hosts = [host for host, _ in places]
    cores = {host: {core for name, on in places if name == host for core in on} for host in hosts}
    return any(hosts.count(host) > len(cores[host]) for host in cores)


def gather(value: object) -> list[Any]:
    """Every rank's, by rank, as JSON."""
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, torch.tensor([len(text)]))
    longest = int(max(lengths))
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(text)] = text
    texts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(texts, padded)
    return [json.loads(bytes(received[: int(n)].tolist())) for received, n in zip(texts, lengths, strict=True)]


def interface_of(address: str) -> str:
    """Which interface has an IPv4 address.

    Raises:
        BenchError: none has.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # it has no IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    raise BenchError(f"no network interface has the address {address}: name one with GLOO_SOCKET_IFNAME")
