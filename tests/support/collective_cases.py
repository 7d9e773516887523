"""Peers of collective sessions: threads of this process, alone or as nodes that find each other at an address."""

from __future__ import annotations

import dataclasses
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fusedreduce.collective import (
    CollectiveConfig,
    CollectiveSessionError,
    LocalGroup,
    Session,
    register,
)
from support.inside import peers_of, set_timeout_of_nodes
from support.timeouts import FAULT_S, PATIENT_S, after_the_others, in_time, settles

TIMEOUT_S = 10.0
JOIN_S = 60.0
# How peers are placed: (local, nodes).
PLACES = {"threads": (3, 1), "nodes": (1, 3), "both": (2, 2)}


def run_threads(cases: list[Callable[[], Any]]) -> list[Any]:
    """What each returned or raised."""
    results: list[Any] = [None] * len(cases)

    def run(index: int) -> None:
        try:
            results[index] = cases[index]()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
        assert not thread.is_alive(), "a peer hangs"
    return results


def free_port() -> int:
    """One that nobody listens at just now."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port: int = held.getsockname()[1]
        return port


_stores: dict[int, Any] = {}


def listen_or_connect(host: str, port: int, listens: bool, timeout_s: float) -> Any:
    """As the session's, but at the host "here" the store is one of this process.

    For each socket's name torch may ask a name server, which takes seconds where there is none.
    """
    import torch.distributed as dist

    from fusedreduce.collective import node_collectives as store

    if host != "here":
        return store.listen_or_connect(host, port, listens, timeout_s)
    if listens:
        stores: Any = dist
        return _stores.setdefault(port, stores.HashStore())
    if not settles(lambda: port in _stores, timeout_s):
        raise RuntimeError(f"nobody listens at {port}")
    return _stores[port]


@dataclass
class Peers:
    """`nodes` nodes of `local` threads each; one node has no address. `real`: they find each other by TCP."""

    local: int
    nodes: int = 1
    real: bool = False
    groups: list[LocalGroup | None] = field(default_factory=list)
    address: str | None = None

    def __post_init__(self) -> None:
        # A node of one peer needs no group.
        self.groups = [LocalGroup(self.local) if self.local > 1 else None for _ in range(self.nodes)]
        host = "127.0.0.1" if self.real else "here"
        self.address = f"{host}:{free_port()}" if self.nodes > 1 else None

    @property
    def total(self) -> int:
        return self.local * self.nodes

    def config(self, peer: int, **options: Any) -> CollectiveConfig:
        """Of one peer."""
        node = peer // self.local
        where: dict[str, Any] = {}
        if self.address is not None:
            where = {"global_address": self.address, "global_rank": node, "global_world_size": self.nodes}
        return CollectiveConfig(**{"world_size": self.local, "timeout_s": TIMEOUT_S, **where, **options})

    def register(self, peer: int, **options: Any) -> Session:
        return register(peer, "cpu", self.config(peer, **options), self.groups[peer // self.local])

    def run(self, case: Callable[[Session], Any], **options: Any) -> list[Any]:
        """`case(session)` on every peer; what each returned or raised."""

        def peer(number: int) -> Any:
            session = self.register(number, **options)
            try:
                result = case(session)
            except BaseException:
                session.reset()
                raise
            session.finish()
            return result

        return self.each(peer)

    def each(self, call: Callable[[int], Any]) -> list[Any]:
        """`call(peer)` on a thread of each; what each returned or raised."""
        return run_threads([partial(call, number) for number in range(self.total)])


def caught(call: Callable[[], Any]) -> CollectiveSessionError:
    """The session's error that `call` raises."""
    try:
        result = call()
    except CollectiveSessionError as error:
        return error
    raise AssertionError(f"nothing was raised, but {result!r} returned")


def good(session: Session, times: int = 3) -> None:
    """The session works."""
    peers = session.size
    for turn in range(times):
        total = session.all_reduce(torch.full((2, 3), float(session.peer + turn)))
        assert torch.equal(total, torch.full((2, 3), float(sum(range(peers)) + turn * peers)))


def same(errors: list[Any], kind: type[CollectiveSessionError]) -> str:
    """All are the same error, of that class; its text."""
    for error in errors:
        assert type(error) is kind, errors
    [text] = {str(error) for error in errors}
    return text


def values(peer: int, shape: tuple[int, ...] = (4,)) -> torch.Tensor:
    """Different on every peer; sums of a few of them are exact."""
    numel = torch.Size(shape).numel()
    return (torch.arange(numel, dtype=torch.float32) * (peer + 1) - 3.0 * peer).view(shape)


def tasks() -> int:
    """Threads of this process, the backends' own too."""
    return len(os.listdir("/proc/self/task"))


# Processes with several peers each.


def a_group_of_processes(rank: int, world: int, times: int) -> list[str]:
    """One peer per process, over the default group; what went wrong."""
    import torch.distributed as dist

    default: Any = dist.group.WORLD
    store: Any = dist.distributed_c10d._get_process_group_store(default)
    dist.barrier()
    before = _session_keys(store)
    dist.barrier()
    config = CollectiveConfig(world_size=world, timeout_s=PATIENT_S)
    texts = []
    session = register(rank, "cpu", config, default)
    for turn in range(times):
        total = session.all_reduce(torch.full((3,), float(rank + turn)))
        assert torch.equal(total, torch.full((3,), float(sum(range(world)) + turn * world))), turn
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int64):
        total = session.all_reduce(torch.full((3,), rank + 1, dtype=dtype))
        assert torch.equal(total, torch.full((3,), sum(range(1, world + 1)), dtype=dtype))
    handles = [session.all_reduce_async(torch.full((2,), float(rank + turn))) for turn in range(4)]
    order = [3, 0, 2, 1] if rank == 0 else [0, 1, 2, 3]
    for turn in order:
        total = handles[turn].wait()  # type: ignore[assignment]
        assert torch.equal(total, torch.full((2,), float(sum(range(world)) + turn * world)))
    texts.append(str(caught(lambda: session.all_reduce(torch.ones(2 + rank)))))
    texts.append(str(caught(lambda: session.all_reduce(torch.ones(2, dtype=torch.int32 if rank else torch.float32)))))
    good(session)
    session.finish()
    # Too late, twice: once the registration, once an operation. The short time passes before anybody else comes.
    short = dataclasses.replace(config, timeout_s=0.2)
    with after_the_others(rank == 1):
        texts.append(str(caught(lambda: register(rank, "cpu", short))))
    dist.barrier()
    session = register(rank, "cpu", config)
    peers_of(session).config = short
    with after_the_others(rank == 1):
        texts.append(str(caught(lambda: session.all_reduce(torch.ones(1)))))
    peers_of(session).config = config
    good(session)
    session.finish()
    dist.barrier()
    after = _session_keys(store)
    return [*texts, f"{after - before} keys stayed"]


def _session_keys(store: Any) -> int:
    """How many keys there are; a FileStore counts some of its own, always the same."""
    return int(store.num_keys())


def ends_in_between(rank: int, world: int, port: int, path: str, dies: bool) -> None:
    """Rank 1 agrees to an operation and does not come to its collective; what rank 0 is told goes into a file."""
    import torch.distributed as dist

    config = CollectiveConfig(
        timeout_s=PATIENT_S, global_address=f"127.0.0.1:{port}", global_rank=rank, global_world_size=world
    )
    session = register(rank, "cpu", config)
    good(session)
    set_timeout_of_nodes(session, FAULT_S)
    handle = session.all_reduce_async(torch.ones(3))
    if rank == 0:
        with in_time():
            first = caught(handle.wait)
        again = caught(lambda: session.all_reduce(torch.ones(3)))
        assert str(first) == str(again)
        Path(path).write_text(f"{type(first).__name__}: {first}\n{type(again).__name__}")
    elif dies:
        os._exit(1)
    if not dies:
        dist.barrier()
    session.reset()
