"""How long ranks wait for each other: long while a test sets up and where nothing is to time out, briefly from a fault
on. On a machine that is loaded 20 times over a step may take seconds, and three interpreters minutes to start.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

# Until fresh interpreters have imported torch and found each other; and until a process has ended that should.
SETUP_S = 600.0
# Of groups in which nothing is to time out, and for what must end soon but has no time of its own.
PATIENT_S = 60.0
# Of collectives that a peer never comes to. No verdict hangs on it: what must not time out was issued before.
FAULT_S = 1.0

_kept: list[Any] = []  # a Gloo group that is destroyed while its threads run may abort the process


def patient_group() -> Any:
    """A patient group of all ranks of the pool: one that is ruined leaves the pool's alone."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=PATIENT_S))
    _kept.append(group)
    return group


def wait_briefly() -> None:
    """Gives this rank's groups, but for the pool's, a short timeout, those too that a reducer has made for itself.

    To be called when the collective that no peer will come to is the next one. Gloo keeps to the timeout with which a
    collective was issued, so that those in flight are waited for patiently; a send or receive, to that with which its
    group was made.
    """
    for group in c10d._world.pg_map:
        if group is not dist.group.WORLD:
            c10d._set_pg_timeout(datetime.timedelta(seconds=FAULT_S), group)


def settles(look: Callable[[], bool], within_s: float = PATIENT_S) -> bool:
    """Whether `look()` becomes true."""
    until_s = time.monotonic() + within_s
    while not look() and time.monotonic() < until_s:
        time.sleep(0.01)
    return look()


@contextmanager
def after_the_others(late: bool) -> Iterator[None]:
    """What it encloses begins on the late rank when it has ended on all other ranks of the pool."""
    if late:
        dist.barrier()
    yield
    if not late:
        dist.barrier()


@contextmanager
def in_time() -> Iterator[None]:
    """What it encloses ends soon: a net, under which a patient group's timeout would not pass either."""
    began_s = time.monotonic()
    yield
    assert time.monotonic() - began_s < PATIENT_S
