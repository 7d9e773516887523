"""The link benchmark over the present network, where torchrun has started the ranks: nothing is shaped, nor pinned.

    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
        -m fusedreduce.cli bench link --here --device cuda

On CPU over Gloo, or on a GPU per rank over NCCL. Ranks first settle, before a group is there, that all of them can: the
same options, versions and commit, a device each, memory enough; else all end with the reason. While they measure, one
that fails or is gone ends all (link_together.py).

Other traffic may go through the interface, ranks of one machine share its counters, and InfiniBand has others: bytes
are shown, not judged. A machine with fewer cores than ranks is found, as are ranks that share a GPU, and the result
marked. On a GPU no bound is known, as NCCL finds ways of its own, and cuDNN takes its deterministic algorithms, so that
gradients can be compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import os
import socket
import struct
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import bench_link
import kernel_cases
import link_bound
import link_raw
import link_variants
import link_verdict
import models
import records
import torch
from link_rank import GROUP_TIMEOUT, Rank
from link_together import Together
from records import BenchError, line_of

from fusedreduce.trace import recorder

OUT = Path("out")
SAME = ("torch", "triton", "cuda", "nccl")  # versions that decide what ranks compute and send
_SIOCGIFADDR = 0x8915  # linux/sockios.h: an interface's IPv4 address


def run() -> NoReturn:
    """One rank's part of it; rank 0 shows and writes.

    Raises:
        BenchError: torchrun has not started this.
    """
    together = Together()
    try:
        _measure(together)
        together.gather("done", None)  # rank 0 may fail where the others have nothing left to do
    except KeyboardInterrupt:
        together.fail("interrupted", 130)
    except SystemExit:  # --help
        raise
    except BaseException as error:
        if (line := line_of(error)) is None:
            traceback.print_exc()
            line = " ".join(traceback.format_exception_only(error)[-1].split())
        together.fail(line)
    together.end()


def _measure(together: Together) -> None:
    asked, device, known = settle(together)
    rank = Rank(_interface(device), device, together.group_store)
    shown = rank.rank == 0
    found = bench_link.Found()
    asked.rates, asked.ranks = [None], rank.ranks
    shared = shares_cores([(one["machine"], one["cores"]) for one in known])
    gpus = [one["gpu"] for one in known if one["gpu"] is not None]
    raw_of_all = together.gather("raw", rank.do({"do": "raw"}), GROUP_TIMEOUT.total_seconds())
    link = dataclasses.asdict(link_bound.quickest(None, raw_of_all)) if device.type == "cpu" else None
    if shown:
        said = {"rate_mbit": None, "raw": raw_of_all, "case": "here", "known": {"shared_gpu": len({*gpus}) < len(gpus)}}
        bench_link.take(said, found, shared_cores=shared, counted=False)
    jobs, hardware, path = bench_link.jobs(asked), [one["hardware"] for one in known], None
    for done, job in enumerate(jobs, 1):
        answers = together.gather("answer", rank.do({**job["command"], "link": link}), GROUP_TIMEOUT.total_seconds())
        if not shown:
            continue
        bench_link.take({"job": job, "answers": answers}, found, shared_cores=shared, counted=False)
        row = found.rows[-1]
        if row["part"] == "steps":
            row["verdicts"] = link_verdict.verdicts(row)
            print("\n".join(["", *link_verdict.lines(row)]))
        # What is done stays, whatever becomes of the rest.
        found.ended_early = None if done == len(jobs) else f"{done} of {len(jobs)} were"
        path = bench_link.write(asked, found, name="link-here", over=path, device=device, hardware_of_ranks=hardware)
        if done in (1, len(jobs)):
            print(f"\n{path}")


# Before a group is there


def settle(together: Together) -> tuple[argparse.Namespace, torch.device, list[Any]]:
    """What was asked for, this rank's device, and what is known of each rank, once all ranks can begin.

    Raises:
        BenchError: one cannot, or ranks differ in what they must not; the same on all ranks.
    """
    asked, device, mine = None, None, {}
    try:
        asked = bench_link.options()
        if asked.variants:  # the pair whose ratio is the noise
            asked.variants = [*asked.variants, link_variants.STRONGEST, link_variants.AGAIN]
        device = device_of(asked.device or "cpu")
        for name in asked.models:
            check_memory(name, asked.variants, device)
        if device.type == "cuda" or not asked.rehearse:
            kernel_cases.prove_path(device)
        asked.out = asked.out or OUT
        if together.rank == 0:
            records.make_folder(asked.out)
        mine = facts(asked, device)
        mine["problem"] = None if together.ranks > 1 else "at least 2 ranks"
    except BenchError as error:
        mine["problem"] = line_of(error)
    known = together.gather("facts", mine, GROUP_TIMEOUT.total_seconds())  # the last to come has all this to do yet
    if problem := problem_of(known):
        raise BenchError(problem)
    assert asked is not None and device is not None
    return asked, device, known


def facts(asked: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """What the others are to know of this rank."""
    found: dict[str, Any] = records.provenance(device)
    versions = {name: found["versions"].get(name) for name in SAME} | {"the commit": found["commit"]}
    place = recorder.place()
    return {
        "asked": {name: str(value) for name, value in vars(asked).items() if name != "out"},
        "versions": versions,
        "hardware": found["hardware"],
        "machine": place["boot"] or place["host"],  # containers of one machine have names of their own
        "cores": sorted(os.sched_getaffinity(0)),
        "gpu": str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None,
    }


def problem_of(known: Sequence[Mapping[str, Any]]) -> str | None:
    """Why ranks with these `facts`, each with a "problem" or None, cannot measure together; None: they can."""
    problems = [f"rank {rank}: {one['problem']}" for rank, one in enumerate(known) if one["problem"] is not None]
    if problems:
        return "; ".join(problems)
    for what in ("asked", "versions"):
        for name in known[0][what]:
            held = [one[what].get(name) for one in known]
            if len(set(held)) > 1:
                named = f"--{name}" if what == "asked" else name
                each = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(held))
                return f"{named} differs: {each}: start all ranks alike"
    return None


def device_of(name: str) -> torch.device:
    """This rank's: the GPU of its LOCAL_RANK, which becomes the present one.

    Raises:
        BenchError: there is none for it.
    """
    if records.pick_device(name).type == "cpu":
        return torch.device("cpu")
    local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    # NCCL refuses two ranks on one GPU, unless NCCL_HOSTID says that they are on two machines.
    if local >= count and "NCCL_HOSTID" not in os.environ:
        raise BenchError(f"this is rank {local + 1} of its machine, which has {count} GPU{'s'[: count != 1]}")
    device = torch.device("cuda", local % count)
    torch.cuda.set_device(device)
    torch.backends.cudnn.deterministic = True
    return device


def check_memory(name: str, variants: Sequence[str], device: torch.device) -> None:
    """Every variant has weights, gradients and buckets of its own."""
    sharing = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device.type == "cuda":
        sharing = -(-sharing // torch.cuda.device_count())
    remedy = "a smaller model, or fewer --variants"
    models.check_memory(name, len(link_variants.picked(variants)), 3, sharing, device, remedy)


def shares_cores(places: Sequence[tuple[str, Sequence[int]]]) -> bool:
    """Whether a machine has more ranks than cores, by each rank's machine and the cores on which it may run."""
    machines = [machine for machine, _ in places]
    cores = {machine: {core for name, on in places if name == machine for core in on} for machine in machines}
    return any(machines.count(machine) > len(cores[machine]) for machine in cores)


def _interface(device: torch.device) -> str | None:
    """Whose counters are read: that of the environment, if it names one and no pattern, else by which rank 0 is met."""
    named = os.environ.get("NCCL_SOCKET_IFNAME" if device.type == "cuda" else "GLOO_SOCKET_IFNAME", "")
    there = {name for _, name in socket.if_nameindex()}
    return named if named in there else interface_of(link_raw.own_address())


def interface_of(address: str) -> str | None:
    """Which interface has an IPv4 address; None: none has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # it has no IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
