"""wait_for: what it raises, after how long, and what it leaves behind. How a process ends."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.loopback import Loopback, LoopbackPending
from torch.distributed import distributed_c10d as c10d

from fusedreduce import CollectiveError, NonFiniteGradientError
from fusedreduce.comm import waiting
from fusedreduce.comm.waiting import wait_for


def test_a_collective_that_fails_names_rank_what_and_seconds_and_its_group_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    communicator = Loopback(rank=2)
    asked: list[None] = []
    now_s = [5.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])

    def fail() -> torch.Tensor:
        now_s[0] += 7.25
        raise RuntimeError("Connection closed by peer")

    def what() -> str:
        asked.append(None)
        return "the all-reduce of bucket 3"

    wait_for(LoopbackPending(lambda: torch.ones(1)), what, communicator)
    assert not asked and not communicator.lost, "a text is made where it is needed only"
    with pytest.raises(CollectiveError, match=r"^rank 2: the all-reduce of bucket 3 failed after 7\.2 s") as caught:
        wait_for(LoopbackPending(fail), what, communicator)
    assert "Connection closed by peer" in str(caught.value) and isinstance(caught.value.__cause__, RuntimeError)
    assert communicator.lost == str(caught.value)
    with pytest.raises(CollectiveError, match="bucket 4 failed"):
        wait_for(LoopbackPending(fail), "the all-reduce of bucket 4", communicator)
    assert communicator.lost == str(caught.value), "the first one is why the others failed"


def test_a_future_gives_its_value() -> None:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(torch.ones(2))
    assert wait_for(future, "it", Loopback()).tolist() == [1.0, 1.0]


def test_a_future_that_nobody_completes_is_given_up_after_the_groups_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    communicator = Loopback()
    monkeypatch.setattr(communicator, "timeout_s", lambda device=None: 0.1)
    monkeypatch.setattr(waiting, "GRACE_S", 0.1)
    with pytest.raises(CollectiveError, match=r"the hook's future failed after [\d.]+ s.* within 0\.1 s"):
        wait_for(torch.futures.Future(), "the hook's future", communicator)
    assert communicator.lost


@pytest.mark.parametrize("error", [NonFiniteGradientError("ours"), CollectiveError("ours"), ValueError("theirs")])
def test_an_error_of_ours_that_a_callback_has_left_in_a_future_is_raised_as_it_is(error: Exception) -> None:
    communicator = Loopback()
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_exception(error)
    with pytest.raises(type(error), match=r"^(ours|theirs)$"):
        wait_for(future, "it", communicator)
    assert bool(communicator.lost) == isinstance(error, CollectiveError)


def _printed(folder: Path, text: str, argument: str = "", *before: str) -> str:
    """What a script prints in a process of its own, which ends with status 0; `before` stands in front of it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FUSEDREDUCE_")}
    script = folder / "script.py"
    script.write_text(text)
    command = [sys.executable, *before, str(script), argument]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


ENDS = """
import hashlib, sys, threading
import torch
import torch.distributed as dist

if sys.argv[1] == "run":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
else:
    from fusedreduce import DistributedDataParallel
store = dist.HashStore()
groups = [None, None]


def join(rank):
    groups[rank] = dist.ProcessGroupGloo(store, rank, 2)


joining = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
for thread in joining:
    thread.start()
for thread in joining:
    thread.join()
begun = threading.Event()


def work_on(_):  # on Gloo's thread; needs the interpreter's lock again when the script has ended
    begun.set()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 200_000)  # without the lock
    print("ended", flush=True)


first = groups[0].allreduce([torch.ones(1)])
first.get_future().add_done_callback(work_on)
second = groups[1].allreduce([torch.ones(1)])
begun.wait()
"""


@pytest.mark.parametrize("door", [pytest.param("import", marks=pytest.mark.full), "run"])
def test_a_process_ends_when_gloos_threads_have_dropped_what_is_pythons(door: str, tmp_path: Path) -> None:
    """Else the thread aborts it."""
    run = ("-m", "fusedreduce.run", "--quiet") if door == "run" else ()
    assert _printed(tmp_path, ENDS, door, *run) == "ended\n"


# Threads that call torch until the process ends: whoever wants the interpreter's lock then is ended within C++, now and
# then. What is registered first is called last.
CALLS = """
import atexit
import os
import signal
import sys
import threading
import time


def left():
    names = [one.name for one in threading.enumerate() if one.name.startswith("fusedreduce-")]
    if names:
        print(names, file=sys.stderr, flush=True)
        os._exit(3)


atexit.register(left)
import torch

from fusedreduce.comm.stall_monitor import StallMonitor
from fusedreduce.parallel.replicas.thread_pool import Workers

CPU = torch.device("cpu")


def calls():
    calls.count += 1
    return any(bool(torch.zeros(1000, device=CPU).sum()) for _ in range(100))


calls.count = 0
for number in range(8):
    StallMonitor(poll_s=0.0002).watch(number, "bucket", calls, 100.0, CPU)


class Stopped(Exception):
    pass


def raises(number, frame):
    raise Stopped


signal.signal(signal.SIGALRM, raises)
signal.setitimer(signal.ITIMER_REAL, 0.3, 0.1)  # the second ends the wait for what runs
stops = time.monotonic() + 2.0


def job():
    while time.monotonic() < stops:
        calls()


workers = Workers(2, "test")
try:
    workers.run([job, job])
except Stopped:
    signal.setitimer(signal.ITIMER_REAL, 0.0)
while not calls.count:
    time.sleep(0.01)
"""


def test_a_process_ends_when_our_threads_have(tmp_path: Path) -> None:
    """Stall monitors and workers: else one that calls torch aborts it."""
    assert not _printed(tmp_path, CALLS)


EVALUATES = """
import atexit
import weakref


def evaluate(replicas):
    print(tuple(replicas(inputs).shape), flush=True)


atexit.register(lambda: evaluate(first))
import torch

import fusedreduce

inputs = torch.ones(8, 4, device="cpu")
first, second = (fusedreduce.DataParallel(torch.nn.Linear(4, 4, device="cpu"), ["cpu", "cpu"]) for _ in range(2))
first(inputs)
second(inputs)
weakref.finalize(second, lambda: evaluate(second))
"""


def test_replicas_that_are_called_behind_the_end_of_their_threads_get_new_ones(tmp_path: Path) -> None:
    """By what a training has registered to evaluate once more, with atexit or with weakref."""
    assert _printed(tmp_path, EVALUATES) == "(8, 4)\n" * 2


def test_the_end_of_a_process_does_not_wait_for_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "EXIT_S", 60.0)
    store = dist.HashStore()  # type: ignore[attr-defined]
    groups: dict[int, Any] = {}

    def join(rank: int) -> None:
        groups[rank] = c10d.ProcessGroupGloo(store, rank, 2, timedelta(seconds=300))

    joining = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in joining:
        thread.start()
    for thread in joining:
        thread.join()
    alone = groups[0].allreduce([torch.ones(1)])
    began_s = time.monotonic()
    waiting.let_gloo_threads_rest()
    assert time.monotonic() - began_s < 60.0
    assert not alone.is_completed()
    groups[1].allreduce([torch.ones(1)]).wait()
    alone.wait()
