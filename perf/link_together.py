"""Ranks that torchrun started on several machines: they settle things before a group is there, and end together.

A rank that fails says so in torchrun's store; the others read it there, say it too and end, whatever collective they
are in, NCCL's included. A rank that gives no sign any more (killed, its machine gone) is missed by the rank before it.
So no rank waits for one that will not come, and each says why it ended.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import torch.distributed as dist
from records import BenchError

from fusedreduce.cli.doctor_ranks import MissingRanksError, Peers
from fusedreduce.collective.node_collectives import listen_or_connect
from fusedreduce.comm.store_exchange import KeyValueStore

CONNECT_S = 120.0  # until machines that are started by hand have come
HEARD_S = 10.0  # for which one that failed waits until all have heard
SILENCE_S = 60.0  # after which a rank is gone; a compiler may hold the interpreter for seconds
STORE_S = 90.0  # longer: whoever can tell more is to be first
LOOK_S = 0.5
_PREFIX = "fusedreduce bench link"


class Watch:
    """What a rank tells the others of itself, and hears of them, by a store whose calls here do not wait."""

    def __init__(
        self, rank: int, ranks: int, store: KeyValueStore, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rank, self._ranks, self._store, self._clock = rank, ranks, store, clock
        self._next = (rank + 1) % ranks
        self._beats = 0
        self._seen: tuple[str, float] = ("", clock())

    def look(self) -> str | None:
        """Gives a sign; why this rank must end, or None. What it hears of another's failure, it acknowledges."""
        self._beats += 1
        self._store.set(f"sign/{self._rank}", str(self._beats))
        if self._store.check(["failed"]):
            line = self._store.get("failed").decode()
            self._store.set(f"heard/{self._rank}", "")  # the store may end with whom all have heard
            return line
        key = f"sign/{self._next}"
        sign, now_s = self._store.get(key).decode() if self._store.check([key]) else "", self._clock()
        if sign != self._seen[0]:
            self._seen = sign, now_s
        patience_s = SILENCE_S if sign else CONNECT_S
        if now_s - self._seen[1] < patience_s:
            return None
        line = f"rank {self._next} has given no sign for {patience_s:.0f} s: its process or its machine is gone"
        self.tell(line)
        return line

    def tell(self, line: str) -> None:
        """All others end with this line, unless one has failed before."""
        if not self._store.check(["failed"]):
            self._store.set("failed", line)
        self._store.set(f"heard/{self._rank}", "")

    def all_have_heard(self) -> bool:
        """Of a failure."""
        return all(self._store.check([f"heard/{rank}"]) for rank in range(self._ranks))


class Together:
    """This rank among those of a run.

    Raises:
        BenchError: torchrun has not started this, or its store does not answer.
    """

    def __init__(self) -> None:
        if "RANK" not in os.environ:
            raise BenchError("--here is for ranks of torchrun: torchrun ... -m fusedreduce.cli bench link --here")
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        hosts_store = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        run: Any = f"{_PREFIX}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        untyped: Any = dist  # PrefixStore takes any store, and says less
        try:
            store = listen_or_connect(*address, hosts_store, CONNECT_S)
            # A connection of its own: a group's store may be in a call that waits.
            beside = listen_or_connect(*address, False, CONNECT_S)
        except RuntimeError as error:
            raise BenchError(f"rank {self.rank}: no store of torchrun answers at {address}: {error}") from error
        self.group_store: Any = untyped.PrefixStore(f"{run}/group", store)
        self._peers = Peers(self.rank, self.ranks, store, CONNECT_S)
        self._watch = Watch(self.rank, self.ranks, untyped.PrefixStore(f"{run}/watch", beside))
        self._ends = threading.Event()  # this rank ends by itself
        self._names: dict[str, int] = {}
        self._looked_s = time.monotonic()
        for thread in (self._watching, self._minding):
            threading.Thread(target=thread, daemon=True).start()

    def gather(self, what: str, value: object, longer_s: float = 0.0) -> list[Any]:
        """Every rank's, by rank, as JSON.

        Args:
            what: is gathered; all ranks gather the same.
            value: this rank's.
            longer_s: for which others may come later than a store takes to answer.

        Raises:
            BenchError: a rank has not come.
        """
        self._names[what] = self._names.get(what, 0) + 1
        try:
            return self._peers.exchange(f"link/{what}/{self._names[what]}", value, longer_s)
        except MissingRanksError as error:
            raise BenchError(str(error)) from None

    def end(self) -> NoReturn:
        """All is done. Rank 0, which may host the store, is the last."""
        self._ends.set()
        sys.stdout.flush()
        self._peers.wait_until_printed(printed=self.rank == 0, without=())
        os._exit(0)  # Gloo's threads may outlive the interpreter and abort the process

    def fail(self, line: str, status: int = 1) -> NoReturn:
        """Ends this rank, and all others with the same line."""
        self._ends.set()
        _say(f"rank {self.rank}: {line}")
        # A store whose machine is gone may never answer.
        net = threading.Timer(2 * HEARD_S, os._exit, (status,))
        net.daemon = True
        net.start()
        try:
            self._watch.tell(f"rank {self.rank}: {line}")
            until_s = time.monotonic() + HEARD_S
            # torchrun ends the ranks of a machine as soon as one has: not before they have said why.
            while not self._watch.all_have_heard() and time.monotonic() < until_s:
                time.sleep(LOOK_S / 10)
        except RuntimeError:
            pass  # the store is gone, and so are those that could hear
        os._exit(status)

    def _watching(self) -> None:
        while True:
            try:
                line = self._watch.look()
            except RuntimeError as error:  # all errors of a connection are
                line = f"torchrun's store is gone, or rank 0's machine: {error}"
            if line is not None and self._ends.is_set():
                return
            if line is not None:
                _say(line)
                os._exit(1)
            self._looked_s = time.monotonic()
            time.sleep(LOOK_S)

    def _minding(self) -> None:
        """A store whose machine is gone does not refuse: it never answers."""
        while time.monotonic() - self._looked_s < STORE_S:
            time.sleep(LOOK_S)
        if not self._ends.is_set():
            _say(f"torchrun's store has not answered for {STORE_S:.0f} s: rank 0's machine or the way to it is gone")
            os._exit(1)


def _say(line: str) -> None:
    sys.stdout.flush()
    print(f"error: {line}", file=sys.stderr, flush=True)
