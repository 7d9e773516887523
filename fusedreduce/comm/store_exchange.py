"""StoreExchange: nodes exchange texts through a key-value store, beside their collectives, and agree on one verdict.

A node is a process (of ranks, each is one). Per exchange n, under the prefix:
    d/n/node   that node's text
    c/n        how many nodes have posted theirs, and (from bit 32 on) how many of those are finishing
    v/n        the verdict, set once by compare_set: by the last node to post, or by one whose timeout is over. A late
               node reads it, and so never enters a collective that its peers have given up
    t/n        how many nodes have read the verdict; the last one deletes all four

Nothing blocks inside the store: a TCPStore's client has one lock, which a blocking call would keep from this process's
other threads. A node that waits polls, at intervals that grow to a tenth of the time that it has waited.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol

_FINISHING = 1 << 32
_LEAST_PAUSE_S = 30e-6
_MOST_PAUSE_S = 0.02


class KeyValueStore(Protocol):
    """The part of torch.distributed.Store that is used; none of it blocks."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...
    def delete_key(self, key: str, /) -> bool: ...


class KeyPrefixes:
    """Prefixes of keys for the exchanges of a group of nodes, each used once.

    The store may be that of an earlier group, with what was written there, so each node counts in it the groups that it
    has had.

    Args:
        store: shared by all nodes.
        node: this node's number.
    """

    def __init__(self, store: KeyValueStore, node: int) -> None:
        self._group = store.add(f"fusedreduce/{node}", 1)
        self._counts: Counter[str] = Counter()

    def next(self, what: str) -> str:
        """Returns a prefix that is the same on every node: the n-th one for the n-th `what` of the group.

        Args:
            what: names an event that all nodes reach in one order, whatever objects of theirs it concerns.
        """
        self._counts[what] += 1
        return f"fusedreduce/{self._group}/{what}/{self._counts[what]}"


class _Closed:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("the nodes have finished their exchanges")


class StoreExchange:
    """One node's side of exchanges, each of which has a number, or name, of its own.

    Args:
        store: shared by all nodes.
        prefix: of the keys; used by these exchanges only.
        node: this node's number.
        nodes: how many there are.
    """

    def __init__(self, store: KeyValueStore, prefix: str, node: int, nodes: int) -> None:
        self._store: KeyValueStore | _Closed = store
        self._prefix = prefix
        self._node = node
        self._nodes = nodes

    def post(
        self, number: int | str, text: str, finishing: bool, decide: Callable[[Mapping[int, str]], str]
    ) -> str | None:
        """Posts this node's text, and proposes the verdict if enough nodes have posted theirs.

        Args:
            number: of the exchange.
            text: this node's.
            finishing: this node is finishing. Where others that have posted are not, the verdict does not wait for the
                rest.
            decide: makes the verdict from the nodes' texts.

        Returns:
            The verdict; None if it is not known yet.
        """
        self._store.set(self._key("d", number, self._node), text)
        count = self._store.add(self._key("c", number), 1 + (_FINISHING if finishing else 0))
        finished, posted = divmod(count, _FINISHING)
        if posted == self._nodes or 0 < finished < posted:
            return self.propose(number, decide(self.present(number)))
        return None

    def present(self, number: int | str) -> dict[int, str]:
        """Returns the texts of the nodes that have posted theirs. Only before `acknowledge`."""
        keys = {node: self._key("d", number, node) for node in range(self._nodes)}
        return {node: self._store.get(key).decode() for node, key in keys.items() if self._store.check([key])}

    def propose(self, number: int | str, verdict: str) -> str:
        """Makes `verdict` the verdict, unless there is one already; returns the verdict."""
        return str(self._store.compare_set(self._key("v", number), "", verdict).decode())

    def verdict(self, number: int | str) -> str | None:
        """Returns the verdict, or None if there is none yet. Only before `acknowledge`."""
        key = self._key("v", number)
        return str(self._store.get(key).decode()) if self._store.check([key]) else None

    def wait_for_verdict(self, number: int | str, until_s: float) -> str | None:
        """Returns the verdict, or None if there is none by `until_s` (time.monotonic())."""
        began_s = time.monotonic()
        while True:
            verdict = self.verdict(number)
            now_s = time.monotonic()
            if verdict is not None or now_s >= until_s:
                return verdict
            pause_s = min(max((now_s - began_s) / 10, _LEAST_PAUSE_S), _MOST_PAUSE_S)
            time.sleep(min(pause_s, max(until_s - now_s, 0.0)))

    def acknowledge(self, number: int | str) -> None:
        """Says that this node has read the verdict; each node calls it once."""
        with contextlib.suppress(RuntimeError):  # the store's host has gone, as the next call will say
            if self._store.add(self._key("t", number), 1) == self._nodes:
                keys = [self._key("d", number, node) for node in range(self._nodes)]
                for key in [*keys, self._key("c", number), self._key("v", number), self._key("t", number)]:
                    self._store.delete_key(key)

    def wait_until_acknowledged(self, number: int | str, until_s: float) -> None:
        """Blocks until every node has read a verdict that this node has acknowledged, or until `until_s`."""
        with contextlib.suppress(RuntimeError):
            while self._store.check([self._key("t", number)]) and time.monotonic() < until_s:
                time.sleep(0.001)

    def first_failure(self, text: str) -> str:
        """Returns the text of the first node that called this, so that all report the same; `text` without a store."""
        with contextlib.suppress(RuntimeError):
            return str(self._store.compare_set(f"{self._prefix}/failed", "", text).decode())
        return text

    def close(self) -> None:
        """Drops the store, which frees the port of its host; what is asked for later raises RuntimeError."""
        self._store = _Closed()

    def _key(self, what: str, number: int | str, node: int | None = None) -> str:
        return f"{self._prefix}/{what}/{number}" + ("" if node is None else f"/{node}")
