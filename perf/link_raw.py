"""The rate of a plain TCP stream between two ranks, by the size of a message: what a link really carries.

A message is timed from the first byte written until the receiver has said that it has the last one. Before each the
link is idle for a moment, as it is before a step's first bucket: a short message goes out as a burst.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from records import BenchError

SIZES_BYTES = (64 * 1024, 2**20, 4 * 2**20, 16 * 2**20)
REPEATS = 3
IDLE_S = 0.02
TIMEOUT_S = 60.0
_PIECE_BYTES = 2**20


def stream(rank: int, sender: int, receiver: int, own: str, peer: str, sizes: Sequence[int]) -> dict[str, Any] | None:
    """What the sender sees: bit/s of payload by size of message, and by which congestion control; None on other ranks.

    All ranks call it, with their address and the receiver's.
    """
    port = torch.zeros(1, dtype=torch.int64)
    listening = socket.create_server((own, 0)) if rank == receiver else None
    if listening is not None:
        listening.settimeout(TIMEOUT_S)
        port[0] = listening.getsockname()[1]
    dist.broadcast(port, src=receiver)
    seen = None
    if listening is not None:
        with listening, listening.accept()[0] as link:
            _receive_all(link, sizes)
    elif rank == sender:
        with socket.create_connection((peer, int(port)), TIMEOUT_S) as link:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            control = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()
            seen = {"rates": _send_all(link, sizes), "congestion_control": control}
    dist.barrier()
    return seen


def own_address() -> str:
    """By which of its addresses this rank reaches rank 0, or rank 0 is reached."""
    master = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(master)  # of a datagram socket: sends nothing
        found: str = probe.getsockname()[0]
    return found


def all_addresses() -> list[str]:
    """Of every rank, by rank."""
    own = torch.tensor(list(socket.inet_aton(own_address())), dtype=torch.int64)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    return [socket.inet_ntoa(bytes(address.tolist())) for address in found]


def _send_all(link: socket.socket, sizes: Sequence[int]) -> dict[int, float]:
    message = memoryview(bytearray(max(sizes)))
    rates = {}
    for size in sizes:
        seconds = []
        for _ in range(REPEATS + 1):
            time.sleep(IDLE_S)
            begin_s = time.perf_counter()
            link.sendall(message[:size])
            if not link.recv(1):
                raise BenchError("the other end of a raw stream is gone")
            seconds.append(time.perf_counter() - begin_s)
        rates[size] = 8 * size / statistics.median(seconds[1:])  # the first one opens TCP's window
    return rates


def _receive_all(link: socket.socket, sizes: Sequence[int]) -> None:
    link.settimeout(TIMEOUT_S)
    into = memoryview(bytearray(_PIECE_BYTES))
    for size in sizes:
        for _ in range(REPEATS + 1):
            left = size
            while left:
                got = link.recv_into(into[: min(left, _PIECE_BYTES)])
                if not got:
                    raise BenchError("the other end of a raw stream is gone")
                left -= got
            link.sendall(b"x")
